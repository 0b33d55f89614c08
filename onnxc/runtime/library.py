"""The native runtime of this process: compiled once, loaded once.

One process has one runtime, and so one pool of threads, wherever it came from: the first to load, from a
saved model or compiled from the source beside this file, serves all.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from onnxc.errors import CacheError, InternalError, LimitError, OnnxcError, PackageError, RunError
from onnxc.runtime.cache import Buffer, Cache, digest
from onnxc.runtime.package import load_library
from onnxc.runtime.toolchain import Compiler, Source, compile_library, find_compiler

ABI = 4  # OX_ABI of runtime.h
POISON = 1  # OX_POISON
# Never unloaded: its threads run to the end of the process.
_LINK_FLAGS = ("-Wl,-z,nodelete", "-lpthread") if sys.platform.startswith("linux") else ("-lpthread",)
NATIVE = Path(__file__).parent / "native"  # the folder of runtime.h, for the compiler's -I

_p, _i, _l, _o = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.py_object


class CallError(ctypes.Structure):
    """What ox_error of runtime.h holds: the first failure of a call."""

    _fields_ = (("claimed", _i), ("code", _i), ("node", _l), ("value", _l))
    code: int
    node: int
    value: int


# Result and arguments of each function that runtime.c exports.
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ox_api_get": (_p, []),
    "ox_pool_get": (_p, []),
    "ox_pool_workers": (_i, [_p]),
    "ox_pool_regions": (_l, [_p]),
    "ox_pool_set_spin": (None, [_p, _i]),
    "ox_pool_stop": (None, [_p]),
    "ox_cpus": (_i, []),
    "ox_parallel": (None, [_p, _i, _l, _p, _p]),
    "ox_alloc": (_p, [_l]),
    "ox_release": (None, [_p]),
    "ox_model_new": (_p, [_p, _p, _l, _i]),
    "ox_model_trim": (None, [_p, _i]),
    "ox_model_idle_bytes": (_l, [_p]),
    "ox_model_free": (None, [_p]),
    "ox_call": (_i, [_p, _i, _p, _p, _p]),
    "ox_profile": (_i, [_p, _i, _p, _p, _p, _p, _l]),
    "ox_call_arrays": (_i, [_p, _i, _o, _o]),
    "ox_last_error": (None, [_p]),
    "ox_set_python": (None, [_p, _p, _p, _p]),
    "ox_exception": (None, [_p]),
    "ox_array_fields": (None, [_o, _l, _l, _p]),
    "ox_place": (_l, [_l, _p, _p, _p, _p, _p]),
    "ox_peak_fma": (_l, [_i, _i, _l]),
    "ox_peak_read": (_l, [_i, _i, _p, _l, _l]),
}

_OF_PYTHON = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch")
SIGNAL = 9  # OX_ERR_SIGNAL
_restore = ctypes.PYFUNCTYPE(None, _p, _p, _p)(("PyErr_Restore", ctypes.pythonapi))


class Runtime:
    """The loaded runtime.

    Attributes:
        library: the functions of runtime.c, with their types set: ``library.ox_call(...)``.
        code: the library's bytes, for saved models.
        api: the address of its ``ox_api``.
        pool: the address of its thread pool.
    """

    def __init__(self, library: ctypes.CDLL, code: bytes) -> None:
        self.library = library
        self.code = code
        try:
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise PackageError(f"the runtime lacks a function: {error}", cause=error) from error
        self.api: int = library.ox_api_get()
        self.pool: int = library.ox_pool_get()
        abi = ctypes.c_int.from_address(self.api).value
        if abi != ABI:
            raise PackageError(f"the runtime has ABI {abi}; this onnxc has {ABI}")
        library.ox_set_python(*(ctypes.cast(getattr(ctypes.pythonapi, name), _p) for name in _OF_PYTHON))

    def raise_signal(self) -> None:
        """Raises what the handler of a signal raised during this thread's last call, which ended it so."""
        found = (_p * 3)()
        self.library.ox_exception(found)
        _restore(*found)


class NativeModel:
    """A loaded program, ready to be called from any thread.

    Args:
        runtime: of this process.
        program: the loaded program. It is kept as long as this model.
        entry: the name of its ``ox_entry``.
        user: addresses that the program finds as ``ctx->user`` (its weights); what lies there must stay.
        limit: the most bytes of an arena; 0: no limit.
        poison: fill memory with NaN before the program sees it.
    """

    def __init__(
        self,
        runtime: Runtime,
        program: ctypes.CDLL,
        entry: str,
        user: Sequence[int] = (),
        *,
        limit: int = 0,
        poison: bool = False,
    ) -> None:
        try:
            address = ctypes.cast(getattr(program, entry), ctypes.c_void_p)
        except AttributeError as error:
            raise PackageError(f"the program has no entry {entry!r}", cause=error) from error
        self._library = runtime.library
        self._program = program
        self._user = (ctypes.c_void_p * len(user))(*user)
        self._ox_call = runtime.library.ox_call
        self._handle: int | None = runtime.library.ox_model_new(address, self._user, limit, POISON if poison else 0)
        if not self._handle:
            raise InternalError("no memory for a model")

    def call(self, threads: int, buffers: object, dims: object) -> CallError | None:
        """Run the program once. The arguments are not checked.

        Args:
            threads: the most threads to use, the caller's among them.
            buffers: a ctypes array of addresses.
            dims: a ctypes array of ``c_longlong``.

        Returns:
            None, or what failed first.
        """
        error = CallError()
        if self._ox_call(self._handle, threads, buffers, dims, ctypes.byref(error)):
            return error
        return None

    def profile(
        self, threads: int, buffers: object, dims: object, times: ctypes.Array[ctypes.c_longlong]
    ) -> CallError | None:
        """As :meth:`call`; the nanoseconds of each kernel are added to `times`."""
        error = CallError()
        if self._library.ox_profile(self._handle, threads, buffers, dims, ctypes.byref(error), times, len(times)):
            return error
        return None

    @property
    def handle(self) -> int | None:
        """The address of its ``ox_model``; None once closed."""
        return self._handle

    def trim(self) -> None:
        """Give the memory of idle arenas back to the system."""
        self._library.ox_model_trim(self._handle, 0)

    @property
    def idle_bytes(self) -> int:
        """Bytes held in arenas between calls."""
        return int(self._library.ox_model_idle_bytes(self._handle))

    def close(self) -> None:
        """Free the model. No call may be in progress."""
        handle, self._handle = self._handle, None
        self._library.ox_model_free(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


TOO_LARGE = (
    "the intermediates of a call at these sizes take {value} bytes, more than its limit"
    " (memory_limit; by default the memory of the machine)"
)
_MEANINGS: dict[int, tuple[type[OnnxcError], str]] = {
    1: (LimitError, "no memory for {value} bytes"),
    2: (LimitError, TOO_LARGE),
    3: (RunError, "the index {value} is out of bounds"),
    4: (RunError, "integer division by zero"),
    5: (RunError, "the size {value} does not fit"),
    6: (RunError, "the iou_threshold is not in 0 to 1"),
    8: (RunError, "a user's kernel failed: it returned {value}"),
}


def call_exception(error: CallError, node: str | None = None) -> OnnxcError:
    """The exception that says what a :class:`CallError` means.

    Args:
        error: of a call.
        node: how to name the node ``error.node`` (which is -1 where the failure is no node's).

    >>> call_exception(CallError(1, 3, 17, -9), "n17 Gather")
    RunError('the index -9 is out of bounds')
    """
    kind, text = _MEANINGS.get(error.code, (InternalError, f"the program failed with code {error.code}"))
    return kind(text.format(value=error.value), node=node)


_lock = threading.Lock()
_loaded: Runtime | None = None


def load_runtime(cache: Cache | None = None, code: Buffer | None = None) -> Runtime:
    """The runtime of this process.

    Args:
        cache: where to look for a compiled one, and keep it.
        code: a compiled runtime (a saved model's), used when none is loaded yet.

    Raises:
        ToolchainError: it must be compiled, and cannot be.
        PackageError: `code` is not a runtime of this version.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            found = bytes(code) if code is not None else runtime_code(cache)
            _loaded = Runtime(load_library(found, "runtime.so"), found)
        return _loaded


def runtime_code(cache: Cache | None = None, compiler: Compiler | None = None) -> bytes:
    """The compiled runtime: the cache's, or compiled now. It runs on every CPU of this instruction set."""
    compiler = compiler or find_compiler(cache)
    key = digest("runtime", ABI, _source(), _headers(), compiler.identity)
    known = cache.read(key) if cache else None
    if known and known.startswith(b"\x7fELF"):
        return known
    code = compile_library(
        [Source("runtime.cpp", _source())],
        include=[NATIVE],
        link_flags=_LINK_FLAGS,
        bare=False,
        compiler=compiler,
    )
    if cache:
        with contextlib.suppress(CacheError):  # compiled again next time
            cache.put(key, code)
    return code


@functools.cache
def _source() -> str:
    return _read("runtime.c")


@functools.cache
def _headers() -> list[str]:
    return [_read("runtime.h"), _read("peaks.h")]


def _read(name: str) -> str:
    try:
        return (NATIVE / name).read_text(encoding="utf-8")
    except OSError as error:
        raise InternalError(f"the installation lacks {name}", cause=error) from error
