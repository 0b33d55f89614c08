"""What a function reads from outside of itself, to be looked at again in each call.

What stands in its closure or its module under the names that it reads, and in those of functions of the same module
that it calls: numbers, strings, arrays, functions, and which object it is of all others. What is inside of these is not
looked at, nor are modules, classes and functions that are not of Python.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from onnxc.array.core import Array

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_FIXED = (ModuleType, type, BuiltinFunctionType, np.ufunc)
_MISSING = object()
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Guards:
    """The values of a function's outer variables.

    >>> scale = 2.0
    >>> def f(x):
    ...     return x * scale
    >>> guards = Guards(f)
    >>> guards.values()
    (2.0,)
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        self._cells: list[tuple[str, CellType]] = []
        self._globals: list[tuple[str, Mapping[str, Any]]] = []
        seen: set[int] = set()
        for function in _functions(f):
            self._add(function, seen)

    def _add(self, f: FunctionType, seen: set[int]) -> None:
        if id(f.__code__) in seen:
            return
        seen.add(id(f.__code__))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            if not isinstance(value, _FIXED):
                self._cells.append((name, cell))
            self._follow(value, f, seen)
        for name in _names(f.__code__):
            value = f.__globals__.get(name, _MISSING)
            if value is not _MISSING and not isinstance(value, _FIXED):
                self._globals.append((name, f.__globals__))
            self._follow(value, f, seen)

    def _follow(self, value: Any, f: FunctionType, seen: set[int]) -> None:
        for inner in _functions(value):
            if inner.__module__ == f.__module__ and not (f.__module__ or "").startswith("onnxc."):
                self._add(inner, seen)

    def __bool__(self) -> bool:
        return bool(self._cells or self._globals)

    @property
    def names(self) -> list[str]:
        """The variables, in the order of `values`."""
        return [n for n, _ in self._cells] + [n for n, _ in self._globals]

    def values(self) -> tuple[Any, ...]:
        """What they are now. Of an array that can change in place, what it holds now."""
        found = [_cell(c) for _, c in self._cells]
        found += [names.get(name, _MISSING) for name, names in self._globals]
        return tuple([x._data if type(x) is Array else x for x in found])


def _cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Global names that code reads, functions inside of it included; names of attributes are none of these."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in _LOADS}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(_names(constant))
    return tuple(found)


def _functions(f: Any) -> Iterator[FunctionType]:
    """The functions of Python behind a callable."""
    while f is not None:
        if isinstance(f, functools.partial):
            f = f.func
        elif isinstance(f, FunctionType):
            yield f
            f = getattr(f, "__wrapped__", None)
        else:
            f = getattr(f, "__func__", None) or getattr(f, "__dict__", {}).get("__wrapped__")


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether all values are the same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def guard_key(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values as a part of a key: numbers and strings by what they are, arrays by their identity."""
    return tuple((type(x), repr(x)) if isinstance(x, PLAIN) else (type(x), id(x)) for x in values)
