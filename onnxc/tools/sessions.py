"""onnxruntime's sessions in a process that may die of them: it ends itself over some models that are valid.

The other end is `onnxc.tools.compare.peer`. Sessions have numbers:

    {"do": "open", "model": "m.onnx", "options": {...}}  ->  {"session": 1, "inputs": ["x"]}
    {"do": "run", "session": 1, "names": ["x"], "values": [...]}  ->  {"values": [...]}
    {"do": "shut", "session": 1}  ->  {}
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from onnxc.tools.messages import Message, serve_pipes
from onnxc.tools.paths import readable

Run = Callable[[Any, Mapping[str, Any]], list[Any]]
LEVELS = {"disabled": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL"}

OWN = {"bfloat16": 16, "float8": 8, "int4": 4, "uint4": 4, "float4": 4}  # bits of what numpy lacks, by their names


class Sessions:
    """Those that are open."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Any, Run]] = {}
        self._last = 0

    def do_open(self, settings: Message, place: str, model: str = "", values: list[Any] | None = None) -> Message:
        """A session of a file or, in `values`, of a file's bytes; and what it takes. `place` is the working directory,
        in which paths begin.
        """
        import onnxruntime

        if place:
            os.chdir(place)
        source = values.pop() if values else readable(model)
        session = onnxruntime.InferenceSession(source, _options(**settings), providers=["CPUExecutionProvider"])
        self._last += 1
        self._runs[self._last] = session, _run_by_bits if _has_types_of_its_own(session) else _run_arrays
        return {"session": self._last, "inputs": [i.name for i in session.get_inputs()]}

    def do_run(self, session: int, names: list[str], values: list[Any]) -> Message:
        """The outputs."""
        known, run = self._runs[session]
        return {"values": run(known, dict(zip(names, values, strict=True)))}

    def do_shut(self, session: int) -> Message:
        """Lets a session go."""
        del self._runs[session]
        return {}

    def do_peak(self) -> Message:
        """The most bytes that this process has had (Linux); `getrusage` may give those of the one that started it."""
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return {"bytes": int(lines["VmHWM"].split()[0]) * 1024}


def _options(level: str, threads: int | None, entries: Mapping[str, str], written: str | None) -> Any:
    """Of a session; where `written` names a file, the model is stored there as it is optimized."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{LEVELS[level]}")
    options.log_severity_level = 3
    # Threads that wait for work leave the cores to whatever else compares.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if threads:
        options.intra_op_num_threads = threads
    if written is not None:
        options.optimized_model_filepath = written
    return options


def _run_arrays(session: Any, given: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = session.run(None, given)
    return found


def _has_types_of_its_own(session: Any) -> bool:
    """Whether a session takes or gives numbers that numpy lacks, which its arrays then cannot be."""
    types = [v.type for v in (*session.get_inputs(), *session.get_outputs())]
    whole = all(t.startswith("tensor(") for t in types)  # no sequences
    return whole and any(t.startswith(tuple(f"tensor({name}" for name in OWN)) for t in types)


def _run_by_bits(session: Any, given: Mapping[str, Any]) -> list[Any]:
    """What numpy lacks goes in and comes out as bits (but numbers of 4 bits do not go in: onnxruntime raises)."""
    from onnx import helper  # for few models, and slow to import
    from onnxruntime import OrtValue

    arrays = {name: np.asarray(a, order="C") for name, a in given.items()}  # the values lie in these
    values = {
        name: OrtValue.ortvalue_from_numpy_with_onnx_type(
            a.view(f"u{a.dtype.itemsize}"), helper.np_dtype_to_tensor_dtype(a.dtype)
        )
        if a.dtype.name.startswith(("bfloat16", "float8")) else OrtValue.ortvalue_from_numpy(a)
        for name, a in arrays.items()
    }  # fmt: skip
    return [_array(v) for v in session.run_with_ort_values(None, values)]


def _array(value: Any) -> Any:
    """A tensor of onnxruntime's as an array."""
    from onnx import TensorProto, helper, numpy_helper  # as above

    number, shape = value.element_type(), value.shape()
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(number))
    bits = next((bits for own, bits in OWN.items() if dtype.name.startswith(own)), None)
    if bits is None:
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), (math.prod(shape) * bits + 7) // 8)
    if bits < 8:  # two in a byte
        return numpy_helper.to_array(TensorProto(data_type=number, dims=shape, raw_data=raw))
    return np.frombuffer(raw, f"u{dtype.itemsize}").view(dtype).reshape(shape)


def _end_with(parent: int) -> None:
    """Ends this process soon after the one that started it, which may be killed while a model runs here."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _prepared() -> Sessions:
    """What sessions need is imported at once, while nobody waits for it."""
    with suppress(Exception):  # what is amiss is said where it is wanted
        import_module("onnxruntime")
    return Sessions()


def main() -> None:
    """Answers commands on standard input."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    serve_pipes(_prepared)
