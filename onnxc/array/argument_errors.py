"""What functions of `onnxc.array_api` do about errors: each names the function that was called, and those about an
argument of a wrong type the argument too. In a trace the functions get sizes as the compiler has them.

    add = named(add)     # add(x, "a"): ArgumentError("add: the argument x2 is the str 'a', and has to be an array ...")

An argument is looked at only when the function has failed, so that a call that is right pays nothing for it. A size
that stands for a number, and which the function does not take as it is, is then what it is in the call that is traced.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral, Number, Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onnxc.array.core import Array
from onnxc.array.sizes import Size, unsized
from onnxc.errors import ArgumentError, OnnxcError, abridged
from onnxc.frontends.trace import current
from onnxc.ir.expr import Expr

P = ParamSpec("P")
R = TypeVar("R")
_BARE = (TypeError, ValueError, AttributeError, OverflowError, KeyError)
_STANDS_FOR: dict[object, tuple[type, ...]] = {
    int: (Integral,), float: (Real, np.number), complex: (Number, np.number), bool: (bool, np.bool_),
    Array: (Array, np.ndarray, np.generic, Expr, Size),
}  # fmt: skip


def named(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with its name in errors, and with errors of its own for what Python would say of an argument that
    does not fit.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if current() is None:
                return function(*args, **kwargs)
            return function(*map(unsized, args), **{k: unsized(x) for k, x in kwargs.items()})
        except OnnxcError as error:
            _name(error, function.__name__)
            raise
        except _BARE as error:
            if isinstance(error, IndexError):  # an axis out of range, too
                raise
            numbers = _as_numbers(function, args, kwargs)
            if numbers is not None:
                return checked(*numbers.args, **numbers.kwargs)
            raise ArgumentError(_explained(function, args, kwargs, error), cause=error) from error

    return checked


def _as_numbers(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """The arguments with the numbers that dynamic sizes are in this call, where a number of Python has to stand; None
    where there is no such size.
    """
    if not any(isinstance(x, Size) for x in (*args, *kwargs.values())):
        return None
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None
    hints = typing.get_type_hints(function)
    sizes = {n: x for n, x in bound.arguments.items() if isinstance(x, Size) and hints[n] in (int, float, complex)}
    numbers = {n: int(x) for n, x in sizes.items()}
    bound.arguments.update(numbers)
    return bound if numbers else None


def named_all(space: dict[str, Any], names: Collection[str]) -> None:
    """Each function of these names in the namespace of a module."""
    for name in names:
        if inspect.isfunction(space[name]):
            space[name] = named(space[name])


def _name(error: OnnxcError, name: str) -> None:
    """Has the message begin with the function's name, if it does not say it: of functions that call each other with the
    outermost one's.
    """
    said = error.__dict__.setdefault("said", error.message)
    if not _says(said, name):
        error.message = f"{name}: {said}"
        error.args = (error.message, *error.args[1:])


def _says(said: str, name: str) -> bool:
    """Whether a message names the function: at its start, or after the line. Elsewhere `all` may be a word."""
    return re.search(rf"(^|: ){re.escape(name)}\b", said) is not None


def _explained(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    """Which argument is of another type than it has to be; else what the error says, and what was given."""
    name = function.__name__
    said = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    try:
        given = list(_given(function, args, kwargs))
    except TypeError:  # too few, too many, or an unknown one: that is said already
        return said
    hints = typing.get_type_hints(function)
    for parameter, value in given:
        if not _is_a(value, hints[parameter]):
            wanted = f"the argument {parameter} is {_shown(value)}, and has to be {_spelled(hints[parameter])}"
            return f"{name}: {wanted}" + ("" if _says(said, name) else f" ({said})")
    listed = ", ".join(f"{parameter} is {_shown(value)}" for parameter, value in given)
    return f"{'' if _says(said, name) else f'{name}: '}{said} ({listed})"


def _given(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments by the names of their parameters; each of a variadic one."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    for parameter in bound.signature.parameters.values():
        if parameter.name in bound.arguments:
            value = bound.arguments[parameter.name]
            many = parameter.kind is parameter.VAR_POSITIONAL
            yield from ((parameter.name, v) for v in (value if many else (value,)))


def _is_a(value: object, wanted: Any) -> bool:
    """Whether a value is of the type that an annotation names; True for one that is not understood."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, UnionType):
        return any(_is_a(value, one) for one in args)
    if origin is typing.Literal:
        return value in args if isinstance(value, str) else False
    if origin is np.dtype:
        return isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    if isinstance(origin, type) and issubclass(origin, (tuple, Sequence)):
        of = args[0] if args else Any
        return isinstance(value, (tuple, list)) and all(_is_a(v, of) for v in value)
    if wanted is Any:
        return True
    if wanted in _STANDS_FOR:
        return isinstance(value, _STANDS_FOR[wanted])
    return not isinstance(wanted, type) or isinstance(value, wanted)


def _spelled(wanted: Any) -> str:
    """A type for a reader: `int, tuple of int or None`."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, UnionType):
        words = list(dict.fromkeys(_spelled(one) for one in args))
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin is np.dtype:
        return "a dtype"
    if isinstance(origin, type) and issubclass(origin, (tuple, Sequence)):
        return f"a tuple of {_spelled(args[0])}" if args else "a tuple"
    named_types = {type(None): "None", Array: "an array", Expr: "a dynamic size", Any: "any"}
    return named_types.get(wanted, getattr(wanted, "__name__", str(wanted)))


def _shown(value: object) -> str:
    """An argument for a reader: an array by its type, anything else as it is, if that is short."""
    if isinstance(value, (Array, np.ndarray)):
        return f"an array of {value.dtype} and shape {value.shape}"
    if value is None or isinstance(value, bool):
        return repr(value)
    try:
        text = abridged(repr(value), 60)
    except Exception:  # of a stranger's class
        text = "?"
    return f"the {type(value).__name__} {text}"
