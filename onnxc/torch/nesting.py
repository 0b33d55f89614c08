"""Objects that hold tensors, as arguments and results of a module: the caches of transformers, say.

PyTorch's exporters know lists, dicts and what is registered with ``torch.utils._pytree``. Any other object stands in an
example, and in what a traced module returns, as a :class:`Held`: its tensors, and how the object is made of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onnxc.errors import UnsupportedError
from onnxc.torch.limits import Watch

_OPEN = (torch.Tensor, np.ndarray, torch.SymInt, torch.SymFloat, torch.SymBool)  # what each call decides about
_CLOSED = (int, float, complex, str, bytes, type, FunctionType, MethodType, ModuleType, torch.nn.Module)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor, or of a number that sizes decide."""

    number: int


@dataclass(frozen=True, eq=False)
class Made:
    """The place of an object or of a list, dict, ...: `kind` is its class, or how pytrees make it; `items` are recipes
    of what it holds, or constants.
    """

    kind: type | pytree.TreeSpec
    names: tuple[str, ...]
    items: tuple[Any, ...]
    has_tensors: bool = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and difference(self, other) is None

    __hash__ = None  # type: ignore[assignment]


class Held:
    """An object as its tensors and a recipe: a node of pytrees."""

    def __init__(self, tensors: Sequence[Any], recipe: Made) -> None:
        self.tensors, self.recipe = list(tensors), recipe

    def restored(self) -> Any:
        """The object anew."""
        return _made(self.recipe, self.tensors, {})


pytree.register_pytree_node(
    Held,
    lambda x: (x.tensors, x.recipe),
    Held,
    flatten_with_keys_fn=lambda x: ([(pytree.SequenceKey(k), t) for k, t in enumerate(x.tensors)], x.recipe),
    serialized_type_name="onnxc.torch.nesting.Held",
)


def _is_held(x: Any) -> bool:
    return isinstance(x, Held)


def held(tree: Any) -> Any:
    """A tree with each object that pytrees do not know, and that holds tensors, as a :class:`Held`.

    Raises:
        UnsupportedError: an object that refers to itself, or is a list or a dict of its own kind.
    """
    return pytree.tree_map(_held, tree, is_leaf=_is_held)


def restored(tree: Any) -> Any:
    """The tree with its objects again."""
    return pytree.tree_map(lambda x: x.restored() if _is_held(x) else x, tree, is_leaf=_is_held)


@contextlib.contextmanager
def traced(module: torch.nn.Module) -> Iterator[Watch]:
    """In this context the module takes what :func:`held` gives, and returns such.

    Yields:
        What the last trace says of sizes. Those of Dynamo, which would trace the hooks too, are not looked at.
    """
    watch = Watch()
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):  # which take no hooks
        yield watch
        return

    def begin(_: Any, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            watch.begin((args, kwargs))
        return restored((args, kwargs))

    def end(_: Any, args: Any, result: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            watch.end()
        return held(result)

    with (
        module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        module.register_forward_hook(end),
    ):
        yield watch


def difference(a: Any, b: Any) -> str | None:
    """Where two recipes differ, as ``.layers[0].size``; None where they are the same."""
    if isinstance(a, Made) and isinstance(b, Made):
        if a.kind != b.kind or a.names != b.names or len(a.items) != len(b.items):
            return ""
        places = [f".{n}" for n in a.names] or [f"[{k}]" for k in range(len(a.items))]
        for place, x, y in zip(places, a.items, b.items, strict=True):
            found = difference(x, y)
            if found is not None:
                return place + found
        return None
    try:
        return None if a is b or (type(a) is type(b) and bool(a == b)) else ""
    except (TypeError, ValueError, RuntimeError):  # what cannot be compared
        return ""


# ---------------------------------------------------------------- objects and recipes


def _held(leaf: Any) -> Any:
    if isinstance(leaf, (*_OPEN, Held)) or not _has_content(leaf):
        return leaf
    reader = _Reader()
    recipe = reader.recipe(leaf)
    return Held(reader.tensors, recipe) if _has_tensors(recipe) else leaf


def _has_tensors(recipe: Any) -> bool:
    return isinstance(recipe, Slot) or (isinstance(recipe, Made) and recipe.has_tensors)


def _has_content(x: Any) -> bool:
    return not isinstance(x, _CLOSED) and (hasattr(x, "__dict__") or hasattr(x, "__slots__"))


class _Reader:
    """Takes an object apart. An object that holds no tensor is part of the recipe as it is; a list or a dict that
    holds none is not: to it a module may add.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: the object, which keeps the id its own, and its recipe
        self._above: set[int] = set()
        self._cyclic: set[int] = set()

    def recipe(self, x: Any) -> Any:
        if id(x) in self._above:
            self._cyclic.add(id(x))
            return x
        if id(x) not in self._known:
            self._known[id(x)] = (x, self._new(x))
        return self._known[id(x)][1]

    def _new(self, x: Any) -> Any:
        if isinstance(x, _OPEN):
            self.tensors.append(x)
            return Slot(len(self.tensors) - 1)
        kind, names, items = _parts(x)
        self._above.add(id(x))
        found = tuple([self.recipe(item) for item in items])
        self._above.remove(id(x))
        if not any(map(_has_tensors, found)):
            if isinstance(kind, pytree.TreeSpec) and id(x) not in self._cyclic:
                return Made(kind, names, found, has_tensors=False)
            return x
        if id(x) in self._cyclic:
            raise UnsupportedError(f"a {type(x).__name__} with tensors that refers to itself, as argument or result")
        if kind is None:
            raise UnsupportedError(f"a {type(x).__name__} with tensors as argument or result; a plain list or dict is")
        return Made(kind, names, found)


def _parts(x: Any) -> tuple[type | pytree.TreeSpec | None, tuple[str, ...], Sequence[Any]]:
    """How an object is made, the names of its attributes, and what it holds."""
    children, spec = pytree.tree_flatten(x, is_leaf=lambda y: y is not x)
    if not (len(children) == 1 and children[0] is x):
        return spec, (), children
    if isinstance(x, dict):
        return None, (), list(x.values())
    if isinstance(x, (list, tuple, set, frozenset)):
        return None, (), list(x)
    if not _has_content(x):
        return None, (), ()
    attributes = {n: getattr(x, n) for n in _slots(type(x)) if hasattr(x, n)} | getattr(x, "__dict__", {})
    return type(x), tuple(attributes), list(attributes.values())


def _slots(kind: type) -> list[str]:
    """The attributes of a class that have slots, by the names that they have in it."""
    own = [c for c in kind.__mro__ if "__slots__" in vars(c)]
    return [n for c in own for n, member in vars(c).items() if isinstance(member, MemberDescriptorType)]


def _made(recipe: Any, tensors: Sequence[Any], done: dict[int, Any]) -> Any:
    if isinstance(recipe, Slot):
        return tensors[recipe.number]
    if not isinstance(recipe, Made):
        return recipe
    if id(recipe) not in done:
        items = [_made(i, tensors, done) for i in recipe.items]
        done[id(recipe)] = _new(recipe, items)
    return done[id(recipe)]


def _new(recipe: Made, items: Sequence[Any]) -> Any:
    if isinstance(recipe.kind, pytree.TreeSpec):
        return pytree.tree_unflatten(items, recipe.kind)
    try:
        found = object.__new__(recipe.kind)
    except TypeError as error:
        raise UnsupportedError(f"a {recipe.kind.__name__} with tensors as argument or result: {error}") from error
    slots = _slots(recipe.kind)
    for name, item in zip(recipe.names, items, strict=True):
        if name in slots:
            object.__setattr__(found, name, item)
        else:
            vars(found)[name] = item  # a property may have the same name
    return found
