"""``onnxc.from_torch``: a module through PyTorch's ONNX exporter, as a compiled model with the module's own call."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from onnxc.errors import InputError, ModelError, ShapeError, UnsupportedError
from onnxc.ir.graph import Graph
from onnxc.report import Report
from onnxc.runtime.compiled_model import CompiledModel, Outputs
from onnxc.torch.arrays import array_of, complex_of, reals_of, tensor_of
from onnxc.torch.direct import direct
from onnxc.torch.limits import Limits
from onnxc.torch.nesting import Held, difference, held, restored, traced
from onnxc.torch.omissions import MeanOfNothingError, check_means, check_nothing_left_out

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
    """A module as an ONNX model, or as a graph.

    Attributes:
        model: the model, the path of its file, or the graph.
        arguments: of a call's leaves in order: the model's input, or a constant.
        results: likewise of the leaves of its outputs.
        inputs, outputs: how leaves are nested.
        limits: of the sizes of a call, where some are open.
        folder: where the files lie, as long as this is there.
    """

    model: onnx.ModelProto | str | Graph
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    inputs: Any
    outputs: Any
    folder: tempfile.TemporaryDirectory[str] | None = None
    limits: Limits | None = None


@dataclass(frozen=True)
class Leaf:
    """A tensor of the model, by name; or, without a name, a value that the export took for granted.

    Attributes:
        number: whether the tensor stands for a number of Python's.
        complex: whether the module's tensor is complex, and the model's is one of pairs of real numbers.
    """

    name: str | None
    value: Any = None
    number: bool = False
    complex: bool = False


class TorchModel:
    """A compiled PyTorch module: called as the module is, with tensors or arrays.

    Attributes:
        compiled: the compiled model behind it, with the exporter's names of inputs and outputs.
    """

    def __init__(self, compiled: CompiledModel, exported: Exported) -> None:
        self.compiled = compiled
        self._exported = exported
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
        example = self._exported.inputs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != example:
            plain = held((args, kwargs))
            leaves, spec = pytree.tree_flatten(plain)
            if spec != example:
                leaves = _rearranged(plain, example)
        if self._exported.limits is not None:
            self._exported.limits.check(leaves)
        given: list[Any] = [None] * len(self._order)
        tensors = not given  # nothing says otherwise
        for k, (leaf, wanted) in enumerate(zip(leaves, self._exported.arguments, strict=True)):
            if wanted.name in self._order:
                tensors = tensors or isinstance(leaf, torch.Tensor)
                if wanted.complex:
                    leaf = _reals(leaf)
                given[self._order[wanted.name]] = array_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
            elif wanted.name is None and not _same(leaf, wanted.value):
                raise InputError(f"argument {k} is {leaf!r}, and was {wanted.value!r} when the module was exported")
        found = self.compiled(*given)
        results = [_result(leaf, found, tensors) for leaf in self._exported.results]
        return restored(pytree.tree_unflatten(results, self._exported.outputs))

    def explain(self) -> Report:
        """Which kernels the module became: see :meth:`onnxc.CompiledModel.explain`."""
        return self.compiled.explain()

    def __repr__(self) -> str:
        return f"<TorchModel of {self.compiled!r}>"


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _reals(x: Any) -> Any:
    """Complex numbers as pairs of real ones; what is none stays, and is an error of the model's."""
    if isinstance(x, torch.Tensor):
        return reals_of(x) if x.is_complex() else x
    x = np.asarray(x)
    return np.stack([x.real, x.imag], -1) if x.dtype.kind == "c" else x


def _result(leaf: Leaf, found: Outputs, tensors: bool) -> Any:
    """One of the module's results: a number, a tensor or an array."""
    if leaf.name is None:
        return leaf.value
    array = found[leaf.name]
    if leaf.number:
        return array.item()
    if not leaf.complex:
        return tensor_of(array) if tensors else array
    tensor = complex_of(array)
    return tensor if tensors else tensor.numpy()


def _rearranged(given: Any, wanted: Any) -> list[Any]:
    """The leaves of a tree in the order of one that has its dicts' keys in another order."""
    example = pytree.tree_unflatten([0] * wanted.num_leaves, wanted)
    order = [p for p, _ in pytree.tree_flatten_with_path(example)[0]]
    leaves = dict(pytree.tree_flatten_with_path(given)[0])
    lacking, more = ([_place(p) for p in a if p not in b] for a, b in ((order, leaves), (leaves, order)))
    if lacking or more:
        words = [f"{', '.join(places[:5])} {what}" for places, what in ((lacking, "missing"), (more, "too much"))]
        words = [w for w, places in zip(words, (lacking, more), strict=True) if places]
        raise InputError(f"the arguments are nested otherwise than the example's: {'; '.join(words)}")
    _check_objects(given, example)
    return [leaves[p] for p in order]


def _check_objects(given: Any, example: Any) -> None:
    """InputError where an object's numbers and the like, which the export took for granted, are others."""
    ours, theirs = (
        dict(pytree.tree_flatten_with_path(t, is_leaf=lambda x: isinstance(x, Held))[0]) for t in (example, given)
    )
    for path, wanted in ours.items():
        found = theirs.get(path)
        if isinstance(wanted, Held) and isinstance(found, Held):
            where = difference(found.recipe, wanted.recipe)
            if where is not None:
                raise InputError(f"{_place(path)}{where} is not what it was when the module was exported")


def _place(path: Any) -> str:
    return f"{('args', 'kwargs')[path[0].idx]}{pytree.keystr(path[1:])}"


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
        InputError: the module is none, or the arguments are not in a sequence.
        ExportError: PyTorch cannot export the module; it carries the exporter's report.
        ModelError, UnsupportedError: as of :func:`onnxc.compile`.

    >>> linear = torch.nn.Linear(3, 2)
    >>> model = from_torch(linear, (torch.ones(1, 3),))
    >>> torch.allclose(model(torch.ones(1, 3)), linear(torch.ones(1, 3)))
    True
    """
    _check_example(module, args)
    given, named = held(((args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {})))
    given, named = _apart(module, given, named)
    exported = _export(module, given, named, dynamic_shapes)
    try:
        return TorchModel(compile(exported.model, **options), exported)
    except (ModelError, ShapeError, UnsupportedError):
        if isinstance(exported.model, Graph):
            raise
        try:  # the exporter may write what is no valid ONNX
            with _quiet(), traced(module) as watch:
                exported = _directly(module, given, named, dynamic_shapes)
                exported = replace(exported, limits=watch.limits(exported.inputs))
            compiled = compile(exported.model, **options)
        except Exception:
            compiled = None
        if compiled is None:
            raise
        return TorchModel(compiled, exported)


def _check_example(module: object, args: object) -> None:
    if not isinstance(module, (torch.nn.Module, torch.export.ExportedProgram)):
        advice = "; a function can be the forward of one" if callable(module) else ""
        raise InputError(f"from_torch takes a torch.nn.Module, not a {type(module).__name__}{advice}")
    if not isinstance(args, (torch.Tensor, Sequence)) or isinstance(args, (str, bytes)):
        raise InputError(f"the example arguments are a sequence, or one tensor, and not a {type(args).__name__}")


def _apart(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The example with a copy of each tensor that is there twice, or is the module's: torch.export takes equal tensors
    for one argument, whatever a later call gives. It also writes attributes to tensors, which are not the user's.
    """
    seen = {id(t) for t in (*module.parameters(), *module.buffers())} if isinstance(module, torch.nn.Module) else set()

    def own(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        found = x.detach().clone() if id(x) in seen else x.detach()
        seen.add(id(x))
        return found.requires_grad_(x.requires_grad)

    return pytree.tree_map(own, (args, kwargs))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the exporters


def _export(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Exported:
    """Through the exporter on torch.export; where that fails without ONNX; and at last the older one, by tracing."""
    with tempfile.TemporaryDirectory() as scratch, _quiet(), traced(module) as watch:
        try:
            found = _by_export(module, args, kwargs, dynamic_shapes, scratch)
        except ExportError:
            raise
        except Exception as error:
            found = _otherwise(module, args, kwargs, dynamic_shapes, scratch, error)
        return replace(found, limits=watch.limits(found.inputs))


def _otherwise(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any], dynamic_shapes: Any, scratch: str, error: Exception
) -> Exported:
    """Where the exporter on torch.export fails."""
    report = "\n".join(p.read_text() for p in sorted(Path(scratch).glob("*.md")))
    message = f"PyTorch cannot export {type(module).__name__}: {_short(error)}"
    others: dict[str, Callable[..., Exported]] = {
        "onnxc's own importer": partial(_directly, dynamic_shapes=dynamic_shapes)
    }
    if dynamic_shapes is None:
        others["the older exporter"] = _by_trace
    if isinstance(error, MeanOfNothingError):  # right for all other sizes
        others["the exporter"] = partial(_by_export, dynamic_shapes=dynamic_shapes, scratch=scratch, means=False)
    for name, other in others.items():
        try:
            return other(module, args, kwargs)
        except ExportError:
            raise
        except Exception as second:
            if _short(second) not in message:
                message += f"; {name} fails too: {_short(second)}"
    advice = _advice(module)
    if advice is not None:
        message = f"PyTorch cannot export {type(module).__name__}: {advice} [{_short(error)}]"
    raise ExportError(message, report, error) from error


def _advice(module: torch.nn.Module) -> str | None:
    """What to do about a part of the module of a kind that the exporters are not for, if there is one."""
    parts = module.named_modules() if isinstance(module, torch.nn.Module) else ()  # an ExportedProgram has none
    for name, part in parts:
        what = f"{f'its part {name!r}' if name else 'it'} is a {type(part).__name__}"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{what}, which is TorchScript; give the module that was scripted or traced"
        if type(part).__module__.startswith("torch.ao.nn.quantized"):
            return (
                f"{what} of {type(part).__module__}, whose weights are packed for PyTorch's own kernels; give the "
                "module before it was quantized, and quantize the ONNX model"
            )
    return None


def _short(error: BaseException) -> str:
    """The first cause of an exporter's error: what is around it is advice on the exporter."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text[:600]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong is in the error; what the exporters print beside is not for the user of a compiler."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _by_export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, scratch: str,
    means: bool = True,
) -> Exported:  # fmt: skip
    if not kwargs and args and isinstance(args[-1], dict):
        args = (*args, {})  # else the exporter takes the last argument for keywords
    program = torch.onnx.export(
        module, args, kwargs=kwargs, dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False, report=True,
        artifacts_dir=scratch,
    )  # fmt: skip
    assert program is not None and program.exported_program is not None
    traced = program.exported_program
    _check_stateless(module, traced)
    check_nothing_left_out(traced)
    if means:
        check_means(traced)
    signature, spec = traced.graph_signature, traced.call_spec
    arguments = [s.arg for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    results = [s.arg for s in signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    model, folder = _stored(program)
    graph = (onnx.load(model, load_external_data=False) if isinstance(model, str) else model).graph
    values = {n.name: n.meta.get("val") for n in traced.graph.nodes}
    return Exported(
        model,
        _leaves(arguments, [i.name for i in graph.input], values),
        _leaves(results, [o.name for o in graph.output], values),
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


def _leaves(arguments: Sequence[Any], names: Sequence[str], values: Mapping[str, Any]) -> tuple[Leaf, ...]:
    """The model's tensors stand in the order of the arguments, without those that are constants."""
    left = iter(names)
    return tuple(
        Leaf(None, a.value)
        if isinstance(a, ConstantArgument)
        else Leaf(next(left), number=isinstance(a, _NUMBERS), complex=_is_complex(values[a.name]))
        for a in arguments
    )


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _directly(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Exported:
    """Through torch.export alone."""
    found = direct(module, args, kwargs, dynamic_shapes, partial(_check_stateless, module))

    def leaf(x: Any, names: Mapping[Any, str]) -> Leaf:
        if isinstance(x, ConstantArgument):
            return Leaf(None, x.value)
        value = x.meta["val"]
        return Leaf(names.get(x, x.name), number=not isinstance(value, torch.Tensor), complex=_is_complex(value))

    ends = dict.fromkeys(o for o in found.outputs if not isinstance(o, ConstantArgument))
    names = dict(zip(ends, found.graph.output_names, strict=True))
    spec = found.program.call_spec
    return Exported(
        found.graph,
        tuple(leaf(x, {}) for x in found.inputs),
        tuple(leaf(x, names) for x in found.outputs),
        spec.in_spec,
        spec.out_spec,
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
