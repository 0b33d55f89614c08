"""A call's arguments: those that are static, and the leaves of the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from onnxc.array.core import Array
from onnxc.array.eager import Data
from onnxc.array.pytree import Spec, flatten, places, unflatten
from onnxc.array.sizes import unsized, value_of_size
from onnxc.array.tracing import Leaf, as_data, leaf_of
from onnxc.errors import InputError
from onnxc.ir.expr import Expr

K = TypeVar("K", int, str)


@dataclass
class Given:
    """The arguments of one call.

    Attributes:
        positions, keywords: static arguments, by position and by name.
        static: all of these, by name.
        tree: all others: positional ones, and those by name.
        names: of the positional ones.
        data, leaves: of the tree.
        plain: whether all arguments that are not static are arrays themselves.
    """

    positions: Mapping[int, Any]
    keywords: Mapping[str, Any]
    static: Mapping[str, Any]
    tree: tuple[tuple[Any, ...], dict[str, Any]]
    names: Sequence[str]
    data: list[Data]
    leaves: list[Leaf]
    spec: Spec
    plain: bool
    _places: list[str] = field(default_factory=list)

    def places(self) -> list[str]:
        """How each leaf is called: `params['w']`."""
        if not self._places:
            args, kwargs = self.tree
            self._places += named_places(args, kwargs, self.names)
        return self._places


def named_places(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The places of the leaves of arguments, in order."""
    found = [p for x, name in zip(args, names, strict=False) for p in places(x, name)]
    return found + [p for name in sorted(kwargs) for p in places(kwargs[name], name)]


class Arguments:
    """How a function's arguments are taken apart.

    Attributes:
        numbers, names: the positions and names of those that are static.

    Args:
        f: the function.
        static_argnums, static_argnames: which of them are static; those of either are found by the function's
            signature, where it has one.
    """

    def __init__(
        self, f: Callable[..., Any], static_argnums: int | Sequence[int], static_argnames: str | Sequence[str]
    ) -> None:
        nums = several(static_argnums, int, "static_argnums")
        names = several(static_argnames, str, "static_argnames")
        parameters = _parameters(f)
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
        _check_names(names, parameters)
        rest = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for k in nums:
            if not -len(self.positional) <= k or (k >= len(self.positional) and not rest):
                raise InputError(f"static_argnums: there is no argument {k}; there are {len(self.positional)}")
        at = {k if k >= 0 else k + len(self.positional) for k in nums}
        self.numbers = at | {k for k, n in enumerate(self.positional) if n in names}
        self.names = {*names, *(self.name(k) for k in at if k < len(self.positional))}

    @property
    def static(self) -> bool:
        """Whether there are static arguments."""
        return bool(self.numbers or self.names)

    def name(self, k: int) -> str:
        """What the k-th positional argument is called."""
        count = len(self.positional)
        return self.positional[k] if k < count else f"{self._rest}[{k - count}]"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        """The arguments of a call, taken apart. InputError where one is neither static nor made of arrays."""
        positions = {k: x for k, x in enumerate(args) if k in self.numbers}
        keywords = {n: x for n, x in kwargs.items() if n in self.names}
        static = {**{self.name(k): x for k, x in positions.items()}, **keywords}
        for n, x in static.items():
            try:
                hash(x)
            except TypeError:
                raise InputError(
                    f"the static argument {n!r} is of the type {type(x).__name__}, which cannot be hashed (a tuple can)"
                ) from None
        rest = tuple(x for k, x in enumerate(args) if k not in self.numbers)
        names = [self.name(k) for k in range(len(args)) if k not in self.numbers]
        named = {n: x for n, x in kwargs.items() if n not in self.names}
        given, spec = flatten((rest, named))
        plain = all(type(x) in (Array, np.ndarray) for x in (*rest, *named.values()))
        try:
            data = [as_data(x, "") for x in given]
        except InputError:
            where = named_places(rest, named, names)
            data = [as_data(x, place) for x, place in zip(given, where, strict=True)]
        leaves = [leaf_of(d, x) for d, x in zip(data, given, strict=True)]
        return Given(positions, keywords, static, (rest, named), names, data, leaves, spec, plain)

    def apply(self, f: Callable[..., Any], given: Given, arrays: Sequence[Array]) -> Any:
        """The function, called with other leaves."""
        rest, named = unflatten(given.spec, arrays)
        args = list(rest)
        for k, x in sorted(given.positions.items()):
            args.insert(k, x)
        return f(*args, **named, **given.keywords)


def several(given: Any, kind: type[K], what: str) -> list[K]:
    """One int or string, or the list of those of a sequence. InputError for anything else: it says `what` is wrong."""
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    wrong = [x for x in found if not isinstance(x, _KINDS[kind]) or isinstance(x, bool)]
    if wrong:
        raise InputError(f"{what} has to be of the type {kind.__name__}, or a sequence of such, not {wrong[0]!r}")
    return [kind(x) for x in found]


_KINDS: dict[type, tuple[type, ...]] = {int: (int, np.integer), str: (str,)}


def whole(x: Any, what: str, least: int | None = None) -> int:
    """An int of Python or numpy that is no bool, or a dynamic size as the call decides. InputError for anything else,
    or for less than `least`.
    """
    try:
        found = None if isinstance(x, (bool, np.bool_)) else value_of_size(x, what)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        raise InputError(f"{what} is an int{'' if least is None else f', {least} at least'}, not {x!r}")
    return found


def size_of(x: Any, what: str) -> Any:
    """A number of elements: a dynamic size as it is, else an int from 0 on. InputError for anything else."""
    x = unsized(x)
    return x if isinstance(x, Expr) else whole(x, what, 0)


def checked_function(f: Any, what: str) -> None:
    """InputError, which says `what` it is to be, where an argument is no function."""
    if not callable(f):
        raise InputError(f"{what} is a function, not of the type {type(f).__name__}")


def _parameters(f: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; none where it does not tell."""
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return []


def _check_names(names: Sequence[str], parameters: Sequence[inspect.Parameter]) -> None:
    """InputError for a name that no argument can have."""
    keywords = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for n in names:
        if n not in keywords:
            raise InputError(f"static_argnames: there is no argument {n!r}; there are {keywords}")
