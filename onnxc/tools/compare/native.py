"""The functions of `native/`, compiled for this machine."""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path

from onnxc.compiler.machine_code import MachineCode
from onnxc.errors import CacheError, OnnxcError
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import level
from onnxc.runtime.package import load_library

_FOLDER = Path(__file__).parent / "native"
_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """A library of all of them, with their types declared; None where there is no C++ compiler."""
    with _lock:
        return _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        cache = Cache()
    except CacheError:
        cache = None
    sources = [(_FOLDER / name).read_text() for name in ("differences.cpp", "products.cpp")]
    try:
        found = load_library(MachineCode(cache).library(sources, level()), "compare.so")
    except OnnxcError:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    for kinds in ("ff", "fd", "df", "dd"):
        _declare(found, f"sums_{kinds}", None, pointer, pointer, size, pointer)
        _declare(found, f"gap_{kinds}", ctypes.c_double, pointer, pointer, size)
    for kind in "fd":
        _declare(found, f"product_{kind}", None, pointer, pointer, size, size, pointer, *[size] * 4, pointer)
    _declare(found, "product_room", size, size)
    return found


def _declare(found: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(found, name)
    function.restype, function.argtypes = result, arguments
