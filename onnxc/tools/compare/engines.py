"""What runs ONNX models, or pieces of them: onnxruntime, onnx's reference evaluator, float64, onnxc.

Each engine has `load(model)`, which gives a function from inputs by name to outputs in the model's order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto

from onnxc.compiler import compile as compile_model
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError, RunError, UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.primitives.host import is_host
from onnxc.tools.compare.peer import LostError, Session
from onnxc.tools.compare.pieces import SourceModel, input_names
from onnxc.tools.float64 import evaluate_float64, open_shapes
from onnxc.tools.process import DiedError
from onnxc.tools.sessions import LEVELS

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Any]
Model = str | os.PathLike[str] | bytes | ModelProto
Runner = Callable[[Arrays], list[Any]]


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
    """onnxruntime on the CPU, in a process of its own (`onnxc.tools.compare.peer`). `level` is how much it optimizes:
    disabled, basic, extended, all.

    Attributes:
        subject: what it runs, for errors: "'m.onnx', the reference". Default: the model that is loaded.
    """

    maps = True

    def __init__(self, level: str = "disabled", threads: int | None = None, subject: str = "") -> None:
        if level not in LEVELS:
            raise InputError(f"onnxruntime has no optimization level {level!r}; there are {', '.join(LEVELS)}")
        self.level, self.threads, self.subject = level, threads, subject
        self.name = "onnxruntime" if level == "disabled" else f"onnxruntime:{level}"

    def load(self, model: Model, folder: str | None = None) -> Runner:
        """A session."""
        entries = {} if folder is None else {"session.model_external_initializers_file_folder_path": folder}
        session = self._opened(model, entries)

        def run(given: Arrays) -> list[Any]:
            nonlocal session
            while True:
                try:
                    with self._told("run", model):
                        return session.run(given)
                except LostError:  # over another model
                    session = self._opened(model, entries)

        return run

    def optimize(self, model: Model, path: str) -> None:
        """Stores the model as it is optimized, weights in a file beside it. Raises RunError."""
        prefix = "session.optimized_model_external_initializers"
        self._opened(model, {f"{prefix}_file_name": "weights.bin", f"{prefix}_min_size_in_bytes": "1024"}, path)

    def _opened(self, model: Model, entries: Mapping[str, str], written: str | None = None) -> Session:
        settings = {"level": self.level, "threads": self.threads, "entries": entries, "written": written}
        with self._told("optimize" if written else "load", model):
            return Session(_as_file(model), settings)

    @contextmanager
    def _told(self, doing: str, model: Model) -> Iterator[None]:
        """Errors of the process, in words."""
        try:
            yield
        except DiedError as error:
            raise RunError(_died(error, doing, self.subject or described(model)), cause=error) from error
        except RunError as error:
            if error.cause is None:  # not onnxruntime's
                raise
            hint = "" if doing == "run" else "; another reference may"
            said = f"onnxruntime cannot {doing} the model ({first_line(error.cause)}){hint}"
            raise RunError(said, cause=error.cause) from error.cause
        except TypeError as error:
            raise RunError(f"onnxruntime cannot {doing} the model ({error})", cause=error) from error


def _as_file(model: Model) -> str | bytes:
    source = model.SerializeToString() if isinstance(model, ModelProto) else model
    return source if isinstance(source, bytes) else os.fspath(source)


def described(model: Model) -> str:
    """A model, as errors name it."""
    return repr(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else "a model in memory"


def _died(error: DiedError, doing: str, subject: str) -> str:
    """What happened, and what to do."""
    said = f"onnxruntime's process ended ({error.how}) while it had to {doing} {subject}"
    if error.how == "SIGKILL":
        return f"{said}; the system ends a process so where memory runs out"
    if error.code >= 0:
        return f"{said}; what it printed may say why"
    return f"{said}: it ends so over some models that are valid. With onnx or float64 on that side they can be compared"


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

        def made(shapes: Mapping[str, Sequence[int]] | None) -> Graph:
            imported = onnx_file.load(model, base_dir=folder or self.base_dir, input_shapes=shapes)
            graph = decompose(imported, staged=True)
            if any(is_host(n) for n in graph.nodes):
                raise UnsupportedError("a model of several programs is not evaluated in float64")
            return graph

        graph = made(None)

        def run(given: Arrays) -> list[Any]:
            shapes = open_shapes(graph, given)
            exact = made(shapes) if shapes else graph
            return list(evaluate_float64(exact, [given[name] for name in graph.input_names]))

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
