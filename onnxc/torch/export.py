"""``onnxc.from_torch``: a module through PyTorch's ONNX exporter, as a compiled model with the module's own call."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
)
from torch.utils import _pytree as pytree

from onnxc.compiler import compile
from onnxc.errors import InputError, UnsupportedError
from onnxc.report import Report
from onnxc.runtime.model import CompiledModel
from onnxc.torch.arrays import array_of, tensor_of

_MOST_BYTES = 1 << 30  # of weights inside of one protobuf message; more go to files


class ExportError(UnsupportedError):
    """PyTorch's exporters cannot turn the module into ONNX.

    Attributes:
        report: what the exporter wrote down of its failure, as Markdown; empty where it wrote nothing.
    """

    def __init__(self, message: str, report: str, cause: BaseException) -> None:
        super().__init__(message, cause=cause)
        self.report = report


@dataclass(frozen=True)
class Exported:
    """A module as an ONNX model.

    Attributes:
        model: the model, or the path of its file.
        arguments: of a call's leaves in order: the model's input, or a constant.
        results: likewise of the leaves of its outputs.
        inputs, outputs: how leaves are nested.
        folder: where the files lie, as long as this is there.
    """

    model: onnx.ModelProto | str
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    inputs: Any
    outputs: Any
    folder: tempfile.TemporaryDirectory[str] | None = None


@dataclass(frozen=True)
class Leaf:
    """A tensor of the model, by name; or, without a name, a value that the export took for granted.

    Attributes:
        number: whether the tensor stands for a number of Python's.
    """

    name: str | None
    value: Any = None
    number: bool = False


class TorchModel:
    """A compiled PyTorch module: called as the module is, with tensors or arrays.

    Attributes:
        compiled: the compiled model behind it, with the exporter's names of inputs and outputs.
    """

    def __init__(self, compiled: CompiledModel, exported: Exported, keywords: Sequence[str]) -> None:
        self.compiled = compiled
        self._exported, self._keywords = exported, tuple(keywords)
        names = [t.name for t in compiled.get_inputs()]
        self._order = {name: k for k, name in enumerate(names)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module.

        Args:
            args, kwargs: as the module takes them, nested as in the example: tensors on the CPU, or arrays.

        Returns:
            What the module returns: tensors where a tensor was given, else arrays.

        Raises:
            InputError: the arguments are nested otherwise than the example's, or a number that the export took for
                granted is another.
        """
        unknown = [k for k in kwargs if k not in self._keywords]
        if not unknown and len(kwargs) == len(self._keywords):
            kwargs = {k: kwargs[k] for k in self._keywords}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._exported.inputs:
            raise InputError(f"the arguments are nested as {spec}; the example's as {self._exported.inputs}")
        given: list[Any] = [None] * len(self._order)
        tensors = False
        for k, (leaf, wanted) in enumerate(zip(leaves, self._exported.arguments, strict=True)):
            if wanted.name in self._order:
                tensors = tensors or isinstance(leaf, torch.Tensor)
                given[self._order[wanted.name]] = array_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
            elif wanted.name is None and not _same(leaf, wanted.value):
                raise InputError(f"argument {k} is {leaf!r}, and was {wanted.value!r} when the module was exported")
        found = self.compiled(*given)
        results = [found[leaf.name] if leaf.name is not None else leaf.value for leaf in self._exported.results]
        results = [r.item() if leaf.number else r for r, leaf in zip(results, self._exported.results, strict=True)]
        if tensors:
            results = [tensor_of(r) if isinstance(r, np.ndarray) else r for r in results]
        return pytree.tree_unflatten(results, self._exported.outputs)

    def explain(self) -> Report:
        """Which kernels the module became: see :meth:`onnxc.CompiledModel.explain`."""
        return self.compiled.explain()

    def __repr__(self) -> str:
        return f"<TorchModel of {self.compiled!r}>"


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def from_torch(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Any,
) -> TorchModel:
    """Compile a PyTorch module.

    The module is exported as it is: in training mode if it is. Its parameters are constants of the result.

    Args:
        module: what is exported. What it computes must not depend on the contents of its inputs.
        args: example arguments, positional; a tensor alone counts as one argument.
        kwargs: example arguments by keyword.
        dynamic_shapes: which dims are open, as ``torch.export.export`` takes it.
        options: of :func:`onnxc.compile`.

    Returns:
        A model that is called as the module is.

    Raises:
        ExportError: PyTorch cannot export the module; it carries the exporter's report.
        ModelError, UnsupportedError: as of :func:`onnxc.compile`.

    >>> linear = torch.nn.Linear(3, 2)
    >>> model = from_torch(linear, (torch.ones(1, 3),))
    >>> torch.allclose(model(torch.ones(1, 3)), linear(torch.ones(1, 3)))
    True
    """
    given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    named = dict(kwargs or {})
    exported = _export(module, given, named, dynamic_shapes)
    return TorchModel(compile(exported.model, **options), exported, tuple(named))


# ---------------------------------------------------------------- the exporters


def _export(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Exported:
    """Through the exporter on torch.export, and where that fails the older one, by tracing."""
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        try:
            return _by_export(module, args, kwargs, dynamic_shapes, scratch)
        except ExportError:
            raise
        except Exception as error:
            report = "\n".join(p.read_text() for p in sorted(Path(scratch).glob("*.md")))
            try:
                if dynamic_shapes is not None:
                    raise
                return _by_trace(module, args, kwargs)
            except Exception as second:
                older = "" if second is error else f"; the older exporter fails too: {_short(second)}"
                raise ExportError(
                    f"PyTorch cannot export {type(module).__name__}: {_short(error)}{older}", report, error
                ) from error


def _short(error: BaseException) -> str:
    """The first cause of an exporter's error: what is around it is advice on the exporter."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text[:600]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong is in the error; what the exporters print beside is not for the user of a compiler."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _by_export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, scratch: str
) -> Exported:
    if not kwargs and args and isinstance(args[-1], dict):
        args = (*args, {})  # else the exporter takes the last argument for keywords
    program = torch.onnx.export(
        module, args, kwargs=kwargs, dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False, report=True,
        artifacts_dir=scratch,
    )  # fmt: skip
    assert program is not None and program.exported_program is not None
    traced = program.exported_program
    _check_stateless(module, traced)
    signature, spec = traced.graph_signature, traced.call_spec
    arguments = [s.arg for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    results = [s.arg for s in signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    model, folder = _stored(program)
    graph = (onnx.load(model, load_external_data=False) if isinstance(model, str) else model).graph
    return Exported(
        model,
        _leaves(arguments, [i.name for i in graph.input]),
        _leaves(results, [o.name for o in graph.output]),
        spec.in_spec,
        spec.out_spec,
        folder,
    )


def _check_stateless(module: torch.nn.Module, program: torch.export.ExportedProgram) -> None:
    """ExportError for a module whose results depend on buffers that each call changes: a model keeps nothing."""
    outputs = program.graph_signature.output_specs
    changed = {s.target for s in outputs if s.kind == OutputKind.BUFFER_MUTATION}
    nodes = {n.name: n for n in program.graph.nodes}
    names = [getattr(s.arg, "name", None) for s in outputs if s.kind == OutputKind.USER_OUTPUT]  # constants have none
    pending = [nodes[name] for name in names if name in nodes]
    read = set(pending)
    while pending:
        found = set(pending.pop().all_input_nodes) - read
        read |= found
        pending += found
    buffers = program.graph_signature.inputs_to_buffers
    kept = sorted({buffers[n.name] for n in read if n.name in buffers} & changed)
    if kept:
        why = "it is in training mode: call .eval() first, or " if module.training else ""
        why += "use torch.compile(backend='onnxc'), which keeps buffers up to date"
        shown = ", ".join(map(repr, kept[:4])) + (", ..." if len(kept) > 4 else "")
        who = type(module).__name__
        message = f"{who} computes with buffers that each call changes ({shown}), and a model has none"
        raise ExportError(f"{message}; {why}", "", UnsupportedError(message))


_NUMBERS = (SymIntArgument, SymFloatArgument, SymBoolArgument)


def _leaves(arguments: Sequence[Any], names: Sequence[str]) -> tuple[Leaf, ...]:
    """The model's tensors stand in the order of the arguments, without those that are constants."""
    left = iter(names)
    return tuple(
        Leaf(None, a.value) if isinstance(a, ConstantArgument) else Leaf(next(left), number=isinstance(a, _NUMBERS))
        for a in arguments
    )


def _stored(program: Any) -> tuple[onnx.ModelProto | str, tempfile.TemporaryDirectory[str] | None]:
    """The model in memory; a large one in files."""
    exported = program.exported_program
    if sum(t.numel() * t.element_size() for t in exported.state_dict.values()) < _MOST_BYTES:
        return program.model_proto, None
    folder = tempfile.TemporaryDirectory(prefix="onnxc-")
    path = str(Path(folder.name) / "model.onnx")
    program.save(path, external_data=True)
    return path, folder


def _by_trace(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exported:
    leaves, inputs = pytree.tree_flatten((args, kwargs))
    results, outputs = pytree.tree_flatten(module(*args, **kwargs))
    if not all(isinstance(r, torch.Tensor) for r in results):
        raise UnsupportedError("a module that returns what is no tensor")
    names = [f"x{k}" if isinstance(x, torch.Tensor) else None for k, x in enumerate(leaves)]
    ends = [f"y{k}" for k in range(len(results))]
    file = io.BytesIO()
    warnings.simplefilter("error", torch.jit.TracerWarning)  # what depends on the content of the example is no model
    torch.onnx.export(
        _Flat(module, leaves, inputs), tuple(x for x in leaves if isinstance(x, torch.Tensor)), file,
        input_names=[n for n in names if n is not None], output_names=ends, dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,
    )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    arguments = tuple(Leaf(n) if n is not None else Leaf(None, x) for n, x in zip(names, leaves, strict=True))
    return Exported(model, arguments, tuple(Leaf(n) for n in ends), inputs, outputs)


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """A module that takes its tensors alone, in a row, and returns its tensors in a row."""

    def __init__(self, module: torch.nn.Module, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.module, self.leaves, self.spec = module, list(leaves), spec
        self.training = module.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(pytree.tree_leaves(self.module(*args, **kwargs)))
