"""The table of the functions that steps on the host run."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import onnxc.host
from onnxc.errors import InternalError, LimitError

Function = Callable[..., Any]
_F = TypeVar("_F", bound=Function)
NO_SIZE = -(1 << 60)  # what programs give in the place of a size that does not fit: sums of two do not wrap
_TABLE: dict[str, Function] = {}


def host_function(define: _F) -> _F:
    """Adds a function, under its own name. It returns an array, a list or None, or a tuple of several outputs."""
    if define.__name__ in _TABLE:
        raise InternalError(f"the host function {define.__name__} is defined twice")
    _TABLE[define.__name__] = define
    return define


def passes_on(*looks_at: int) -> Callable[[_F], _F]:
    """Says of a host function that it hands values on without looking at them, but for the arguments at these places.

    Where values lie on a GPU they stay there.
    """

    def mark(define: _F) -> _F:
        define.looks_at = looks_at  # type: ignore[attr-defined]
        return define

    return mark


def looked_at(function: Function) -> tuple[int, ...] | None:
    """The places of the arguments whose content a function looks at; None: all of them."""
    found: tuple[int, ...] | None = getattr(function, "looks_at", None)
    return found


@cache
def table() -> dict[str, Function]:
    """Every function by name. Importing the modules of `onnxc.host` fills it."""
    import_all(onnxc.host)
    return _TABLE


def import_all(package: ModuleType) -> None:
    """Imports the modules of a package. Raises LimitError where the process may open no more files: pkgutil would find
    no module then, and say nothing.
    """
    try:
        for folder in package.__path__:
            os.listdir(folder)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    except OSError as error:
        raise LimitError(f"the modules of {package.__name__} cannot be read: {error.strerror}", cause=error) from error


def function(name: str) -> Function:
    """The function of that name."""
    try:
        return table()[name]
    except KeyError:
        raise InternalError(f"there is no host function {name!r}; they are defined in onnxc/host/") from None
