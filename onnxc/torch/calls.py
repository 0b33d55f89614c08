"""Quick calls: one foreign call looks at the tensors, at the weights that were compiled in, and runs the program.

Where something is not plainly what the last calls were like (another memory order, a shape not seen before), or where
there is no C++ compiler, a call goes the way of arrays, as `onnxc.compile`'s do: `onnxc.torch.program` does that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onnxc.compiler.machine_code import MachineCode
from onnxc.errors import CacheError, OnnxcError
from onnxc.runtime.cache import Cache
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.cpu import level
from onnxc.runtime.library import CallError, load_runtime
from onnxc.runtime.model import CpuModel, Site
from onnxc.runtime.package import load_library
from onnxc.torch.arrays import Array

MOST_SITES = 512
_MAJOR = 1  # version of DLPack
# How long a worker waits for the next call before it sleeps. Dynamo takes longer between two calls than the runtime
# waits by itself (50 us), and to wake a worker takes 10 us, and more on a busy machine, where it waits for less.
_SPIN = 300_000  # nanoseconds

_p, _i, _l, _o = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.py_object
_OF_PYTHON = (
    "PyErr_Clear", "PyEval_SaveThread", "PyEval_RestoreThread", "PyObject_GetAttr", "PyLong_AsLongLong", "Py_DecRef",
    "PyObject_CallFunctionObjArgs",
)  # fmt: skip


class _Exchange(ctypes.Structure):
    """DLPackExchangeAPI of DLPack."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", _p), ("allocate", _p), ("export", _p),
        ("import_", _p), ("read", _p), ("stream", _p),
    )  # fmt: skip


class _Python(ctypes.Structure):
    """``Python`` of tensors.cpp."""

    _fields_ = (
        ("read", _p), ("clear", _p), ("save", _p), ("restore", _p), ("attribute", _p), ("number", _p), ("drop", _p),
        ("ask", _p), ("is_negated", _p), ("no", _p), ("version", _p), ("items", _l), ("data", _l),
    )  # fmt: skip


class _Watched(ctypes.Structure):
    """``Watched`` of tensors.cpp."""

    _fields_ = (("count", _l), ("positions", _p), ("objects", _p), ("memory", _p), ("versions", _p))


class _Want(ctypes.Structure):
    """``Want`` of tensors.cpp."""

    _fields_ = (("type", _l), ("rank", _l), ("shape", _p))


class _SiteFields(ctypes.Structure):
    """``Site`` of tensors.cpp."""

    _fields_ = (
        ("python", _p), ("watched", _p), ("run", _p), ("model", _p), ("dims", _p), ("inputs", _l), ("empty", _l),
        ("outputs", _l), ("reads", _p), ("want", _p),
    )  # fmt: skip


class _Bridge:
    """The functions of tensors.cpp, and what they call of Python and PyTorch."""

    def __init__(self, library: ctypes.CDLL, read: int) -> None:
        self.version = "_version"  # as long as this lives
        found = [ctypes.cast(getattr(ctypes.pythonapi, name), _p).value for name in _OF_PYTHON]
        objects = map(id, (torch.is_neg, False, self.version))
        self.python = _Python(read, *found, *objects, tuple.__basicsize__, object.__basicsize__)
        self.address = ctypes.addressof(self.python)
        self.library = library
        self.call: Any = ctypes.PYFUNCTYPE(_i, _p, _i, _o, _o)(("call_tensors", library))
        self._facts: Any = ctypes.PYFUNCTYPE(None, _p, _o, _p)(("tensor_facts", library))

    def facts(self, tensor: torch.Tensor) -> tuple[int, int, int, bool] | None:
        """A tensor's type, address, rank, and whether it lies row by row, as it is; None where it cannot be read."""
        found = (_l * 5)()
        self._facts(self.address, (tensor,), found)
        return (found[1], found[2], found[3], bool(found[4])) if found[0] else None

    def holds(self) -> bool:
        """Whether this Python's objects lie in memory as tensors.cpp reads them."""
        tensor, array = torch.zeros(2, 3)[1:], np.zeros(3)
        address = ctypes.PYFUNCTYPE(_l, _p, _o)(("array_address", self.library))
        facts = self.facts(tensor)
        known = facts is not None and facts[1:] == (tensor.data_ptr(), 2, True)
        return (
            known
            and self.facts(torch.zeros(2, 3).T) is not None
            and address(self.address, (array, None)) == (array.ctypes.data)
        )


@functools.cache
def _bridge() -> _Bridge | None:
    """None where calls have to go the way of arrays."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.PYFUNCTYPE(_p, _o, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    exchange = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    if exchange.major != _MAJOR or not exchange.read:
        return None
    try:
        cache = Cache()
    except CacheError:
        cache = None
    source = (Path(__file__).parent / "native" / "tensors.cpp").read_text(encoding="utf-8")
    try:
        bridge = _Bridge(load_library(MachineCode(cache).library([source], level()), "tensors.so"), exchange.read)
    except OnnxcError:
        return None
    runtime = load_runtime()
    runtime.library.ox_pool_set_spin(runtime.pool, _SPIN)
    return bridge if bridge.holds() else None


class Watch:
    """Arguments that were compiled in: each must be the same object, of the same version, in the same memory.

    Args:
        tensors: by their positions.
    """

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        kept = list(tensors.values())
        self._keep = (
            kept, _longs(list(tensors)), (_p * len(kept))(*map(id, kept)),
            (_p * len(kept))(*(t.data_ptr() for t in kept)), _longs([t._version for t in kept]),
        )  # fmt: skip
        self._fields = _Watched(len(kept), *map(ctypes.addressof, self._keep[1:]))
        self.address = ctypes.addressof(self._fields) if kept else None


class _Known:
    """What a call needs to know for arguments of one set of shapes."""

    __slots__ = ("address", "keep", "site")

    def __init__(
        self, bridge: _Bridge, site: Site, reads: Any, watch: Watch | None, facts: list[Any],
        shapes: Sequence[Sequence[int]], empty: int,
    ) -> None:  # fmt: skip
        sizes = [_longs(shape) for shape in shapes]
        want = (_Want * max(1, len(facts)))(
            *(_Want(f[0], f[2], ctypes.addressof(s)) for f, s in zip(facts, sizes, strict=True))
        )
        run = ctypes.cast(load_runtime().library.ox_call, _p).value
        fields = _SiteFields(
            bridge.address, None if watch is None else watch.address, run, site.model, ctypes.addressof(site.dims),
            len(facts), empty, len(site.outputs), ctypes.addressof(reads), ctypes.addressof(want),
        )  # fmt: skip
        self.site, self.address = site, ctypes.addressof(fields)
        self.keep = (sizes, want, fields, watch, reads)


class Calls:
    """Calls of a program with tensors, from any number of threads.

    Args:
        model: the program.
        reads: the positions of its inputs among the arguments.
        watch: arguments that must not have changed.
    """

    def __init__(self, model: CompiledModel, reads: Sequence[int], watch: Watch | None = None) -> None:
        self._bridge = _bridge() if isinstance(model, CpuModel) else None
        self._model: Any = model
        self.reads, self._positions, self._watch = tuple(reads), _longs(reads), watch
        self._known: dict[Any, _Known] = {}
        self._fixed: _Known | None = None
        self._call: Any = None if self._bridge is None else self._bridge.call

    def __call__(self, args: tuple[Any, ...], hidden: Sequence[int] = ()) -> tuple[Array, ...] | None:
        """The outputs; None where the call has to go the way of arrays, or where what is watched has changed.

        Args:
            args: the tensors, and what else is not read.
            hidden: sizes that the program is told beside its inputs.
        """
        known = self._fixed
        if known is None:
            known = self._known.get((*[args[k].shape for k in self.reads], *hidden)) if self._known else None
            if known is None:
                return None
        model = self._model
        outputs: tuple[Array, ...] = model.new_outputs(known.site)
        code = self._call(known.address, model.threads, args, outputs)
        if code == 0:
            return outputs
        if code < 0:
            return None
        error = CallError()
        self._bridge.library.last_error(ctypes.byref(error))  # type: ignore[union-attr]
        raise model._failure(error)

    def learn(self, args: tuple[Any, ...], arrays: Sequence[Array], hidden: Sequence[int] = ()) -> None:
        """Lets the next call with such arguments be quick.

        Args:
            args, hidden: of a call that has just gone the way of arrays.
            arrays: those that it was given for the arguments that are read.
        """
        if self._bridge is None:
            return
        tensors = [args[k] for k in self.reads]
        facts = [self._bridge.facts(t) for t in tensors]
        plain = all(
            f is not None and f[3] and (f[1] == a.ctypes.data or not a.size) for f, a in zip(facts, arrays, strict=True)
        )
        shapes = [tuple(t.shape) for t in tensors]
        site = self._model.site([*shapes, *((n, 0) for n in hidden)])
        if not plain or [a.dtype for a in arrays] != site.inputs[: len(arrays)]:
            return
        known = _Known(self._bridge, site, self._positions, self._watch, facts, shapes, len(hidden))
        if self._model.is_static:
            self._fixed = known
            return
        if len(self._known) >= MOST_SITES:
            self._known = {}  # no clear(): another thread may be looking through it
        self._known[(*shapes, *hidden)] = known


def _longs(values: Sequence[int]) -> Any:
    return (_l * max(1, len(values)))(*values)
