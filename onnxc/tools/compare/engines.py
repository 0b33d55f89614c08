"""What runs ONNX models, or pieces of them: onnxruntime, onnx's reference evaluator, float64, onnxc.

Each engine has `load(model)`, which gives a function from inputs by name to outputs in the model's order.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto, helper

from onnxc.compiler import compile as compile_model
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError, RunError, UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.primitives.host import is_host
from onnxc.tools.compare.metrics import is_float
from onnxc.tools.compare.pieces import SourceModel, input_names
from onnxc.tools.float64 import evaluate_float64

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Any]
Model = str | os.PathLike[str] | bytes | ModelProto
Runner = Callable[[Arrays], list[Any]]
ORT_LEVELS = ("disabled", "basic", "extended", "all")


class Engine(Protocol):
    """Something that runs models. `maps` says whether it reads weights from files beside a model in memory, without
    copies.
    """

    name: str
    maps: bool

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """The model, ready to run; `folder` is where the external data of a model in memory lies. Raises RunError."""


def load_piece(
    engine: Engine, source: SourceModel, nodes: Sequence[int], feeds: Mapping[str, Any], outputs: Sequence[str]
) -> tuple[Runner, list[str]]:
    """A part of a model in an engine, and the names of what it is fed."""
    folder = source.data_dir if engine.maps else None
    piece = source.piece(nodes, feeds, outputs, linked=folder is not None)
    return engine.load(piece, folder), input_names(piece)


class Strict:
    """An engine without the liberty that a model allows it: `accuracy_level` of MatMulNBits, to round what is
    multiplied to fewer bits. Only for models in memory that say so.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name, self.maps = engine, engine.name, engine.maps

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """The model without the attribute. Raises RunError where it has none."""
        strict = ModelProto()
        if isinstance(model, ModelProto):
            strict.CopyFrom(model)
        free = [(n, a) for n in strict.graph.node for a in n.attribute if a.name == "accuracy_level" and a.i]
        if not free:
            raise RunError("no node has an accuracy_level")
        for node, attribute in free:
            node.attribute.remove(attribute)
        return self.engine.load(strict, folder)


class OnnxRuntime:
    """onnxruntime on the CPU. `level` is how much it optimizes: disabled, basic, extended, all."""

    maps = True

    def __init__(self, level: str = "disabled", threads: int | None = None) -> None:
        if level not in ORT_LEVELS:
            raise InputError(f"onnxruntime has no optimization level {level!r}; there are {', '.join(ORT_LEVELS)}")
        self.level, self.threads = level, threads
        self.name = "onnxruntime" if level == "disabled" else f"onnxruntime:{level}"

    def options(self) -> Any:
        """Of a session."""
        import onnxruntime  # a quarter of a second, and only needed here

        options = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        named = {"disabled": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL"}
        options.graph_optimization_level = getattr(levels, f"ORT_{named[self.level]}")
        options.log_severity_level = 3
        # Threads that wait for work leave the cores to whatever else compares.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.threads:
            options.intra_op_num_threads = self.threads
        return options

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """A session."""
        import onnxruntime

        options = self.options()
        source = model.SerializeToString() if isinstance(model, ModelProto) else model
        source = source if isinstance(source, bytes) else os.fspath(source)
        try:
            if folder is not None:
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
            session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # it has an exception class for each status, with no common base but this
            raise RunError(
                f"onnxruntime cannot load the model ({first_line(error)}); another reference may", cause=error
            ) from error
        known = {i.name for i in session.get_inputs()}
        run_session = _run_by_bits if _has_types_of_its_own(session) else _run_arrays

        def run(given: Arrays) -> list[Any]:
            try:
                outputs = run_session(session, {n: a for n, a in given.items() if n in known})
            except Exception as error:
                raise RunError(f"onnxruntime cannot run the model ({first_line(error)})", cause=error) from error
            return outputs

        return run


def _run_arrays(session: Any, given: Arrays) -> list[Any]:
    found: list[Any] = session.run(None, dict(given))
    return found


def _has_types_of_its_own(session: Any) -> bool:
    """Whether a session takes or gives floats that numpy lacks, which its arrays then cannot be."""
    types = [v.type for v in (*session.get_inputs(), *session.get_outputs())]
    whole = all(t.startswith("tensor(") for t in types)  # no sequences
    return whole and any(t.startswith(("tensor(bfloat16", "tensor(float8")) for t in types)


def _run_by_bits(session: Any, given: Arrays) -> list[Any]:
    """bfloat16 and floats of 8 bits go in and come out as bits."""
    from onnxruntime import OrtValue

    arrays = {name: np.asarray(a, order="C") for name, a in given.items()}  # the values lie in these
    values = {
        name: OrtValue.ortvalue_from_numpy_with_onnx_type(
            a.view(f"u{a.dtype.itemsize}"), helper.np_dtype_to_tensor_dtype(a.dtype)
        )
        if is_float(a) and a.dtype.kind == "V" else OrtValue.ortvalue_from_numpy(a)
        for name, a in arrays.items()
    }  # fmt: skip
    return [_array(v) for v in session.run_with_ort_values(None, values)]


def _array(value: Any) -> Array:
    """A tensor of onnxruntime's as an array."""
    dtype = helper.tensor_dtype_to_np_dtype(value.element_type())
    if dtype.kind != "V":
        found: Array = value.numpy()
        return found
    shape = value.shape()
    raw = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(raw, f"u{dtype.itemsize}").view(dtype).reshape(shape)


class OnnxReference:
    """onnx's reference evaluator: slow, and exact in integers."""

    name, maps = "onnx", False

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """An evaluator."""
        from onnx.reference import ReferenceEvaluator

        try:
            evaluator = ReferenceEvaluator(model if isinstance(model, (bytes, ModelProto)) else os.fspath(model))
        except Exception as error:  # it raises whatever its ops raise
            raise RunError(
                f"onnx's reference evaluator cannot load the model ({first_line(error)})", cause=error
            ) from error

        def run(given: Arrays) -> list[Any]:
            try:
                with np.errstate(all="ignore"):
                    return list(evaluator.run(None, dict(given)))
            except Exception as error:
                raise RunError(
                    f"onnx's reference evaluator cannot run the model ({first_line(error)})", cause=error
                ) from error

        return run


class Float64:
    """The model in float64: its primitives, every float replaced by float64."""

    name, maps = "float64", True

    def __init__(self, base_dir: str | None = None) -> None:
        self.base_dir = base_dir

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """The graph of primitives. Raises UnsupportedError for models of several programs."""
        imported = onnx_file.load(model, base_dir=folder or self.base_dir)
        graph = decompose(imported, staged=True)
        if any(is_host(n) for n in graph.nodes):
            raise UnsupportedError("a model of several programs is not evaluated in float64")

        def run(given: Arrays) -> list[Any]:
            return list(evaluate_float64(graph, [given[name] for name in graph.input_names]))

        run.dtypes = [v.dtype.numpy for v in graph.outputs]  # type: ignore[attr-defined]  # before they were widened
        return run


class Onnxc:
    """onnxc with any options."""

    maps = False  # the cache's key would be made of all bytes of these files, for each piece

    def __init__(self, options: CompileOptions | None = None, progress: Callable[[str], None] | None = None) -> None:
        self.options = options or CompileOptions()
        self.progress = progress
        self.name = "onnxc" if self.options.target == "cpu" else f"onnxc:{self.options.target}"

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """The compiled model."""
        return called(compile_model(model, **self.options.keywords(), progress=self.progress))


def called(compiled: Any) -> Runner:
    """A compiled model (or what is called like one) as a runner."""

    def run(given: Arrays) -> list[Any]:
        found = compiled(*given.values()) if given else compiled()
        return list(found.values())

    return run


def first_line(error: BaseException) -> str:
    """The first line of a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def onnxruntime_runner(model: Model, *, optimize: bool = False, threads: int | None = None) -> Runner:
    """onnxruntime on the CPU, its optimizations all disabled or all enabled. Raises RunError."""
    return OnnxRuntime("all" if optimize else "disabled", threads).load(model)


def onnx_runner(model: Model) -> Runner:
    """onnx's reference evaluator. Raises RunError."""
    return OnnxReference().load(model)


def torch_runner(module: Any, names: Sequence[str]) -> Runner:
    """A PyTorch module on the CPU; its tensor outputs in the order in which they stand in what it returns."""
    import torch

    def run(given: Arrays) -> list[Any]:
        with torch.no_grad():
            found = module(*(torch.from_numpy(np.asarray(given[name], order="C")) for name in names))
        return [t.detach().cpu().numpy() for t in _tensors(found)]

    return run


def _tensors(found: Any) -> list[Any]:
    """Tensors inside of tuples, lists, dicts and dataclasses that torch's pytree knows."""
    from torch.utils import _pytree

    return [t for t in _pytree.tree_leaves(found) if hasattr(t, "detach")]
