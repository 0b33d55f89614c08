"""The standard's differentiable operators, and small models of each: onnx's own node cases, in float64.

`OPS` are the 135: those that the standard marks as differentiable, those that it forgot to mark, those that are linear
in an input, and control flow.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, TensorProto, defs, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases

from onnxc.errors import UnsupportedError, UnsupportedOpError
from onnxc.frontends.onnx_file import load
from onnxc.gradient import differentiate
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose

Array = np.ndarray[Any, Any]

UNTAGGED = ("Attention", "DeformConv", "DequantizeLinear", "LayerNormalization", "RMSNormalization", "ReverseSequence",
            "RoiAlign", "RotaryEmbedding")  # fmt: skip
LINEAR = ("AffineGrid", "DFT", "OneHot", "STFT")
CONTROL = ("If", "Loop", "Scan")
# Inputs of floats that say how, not what: they must be constants.
SETTINGS = {("CastLike", 1), ("Dropout", 1), ("OneHot", 0), ("OneHot", 1), ("Resize", 1), ("Resize", 2)}
# Attributes that name a dtype.
NAMING = ("to", "softmax_precision", "output_dtype", "stash_type")
_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def tagged() -> list[str]:
    """Operators of which the standard calls some input differentiable."""
    wanted = defs.OpSchema.DifferentiationCategory.Differentiable
    return sorted(
        {
            schema.name
            for schema in defs.get_all_schemas()
            if schema.domain == "" and not schema.deprecated
            if any(p.differentiation_category == wanted for p in schema.inputs)
        }
    )


OPS = (*tagged(), *UNTAGGED, *LINEAR, *CONTROL)


@dataclass(frozen=True)
class NodeCase:
    """A model of one node, and its inputs by name, floats in float64."""

    name: str
    op: str
    model: ModelProto
    inputs: Mapping[str, Array]

    def with_floats(self, dtype: type[np.floating[Any]]) -> tuple[ModelProto, dict[str, Array]]:
        """Model and inputs with all floats of this dtype."""
        to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        changed = ModelProto()
        changed.CopyFrom(self.model)
        for info in (*changed.graph.input, *changed.graph.output):
            if info.type.tensor_type.elem_type == TensorProto.DOUBLE:
                info.type.tensor_type.elem_type = to
        for weight in changed.graph.initializer:
            if weight.data_type == TensorProto.DOUBLE:
                weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(dtype), weight.name))
        for attribute in changed.graph.node[0].attribute:
            if attribute.name in NAMING and attribute.i == TensorProto.DOUBLE:
                attribute.i = to
        return changed, {k: a.astype(dtype) if is_real(a) else a for k, a in self.inputs.items()}


def node_case(op: str, arrays: Mapping[str, Array], n_outputs: int, **attrs: object) -> NodeCase:
    """A case of our own."""
    outputs = [f"y{k}" for k in range(n_outputs)]
    node = helper.make_node(op, list(arrays), outputs, **attrs)
    arrays = {n: a for n, a in arrays.items() if n}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in arrays.items()
    ]
    graph = helper.make_graph([node], "one", infos, [helper.make_empty_tensor_value_info(y) for y in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    return NodeCase(f"own_{op.lower()}", op, model, arrays)


def _own() -> Iterator[NodeCase]:
    """Where the node tests leave out an operator, or an input of one."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Array:
        return rng.uniform(-1.5, 1.5, shape)

    yield node_case("GlobalLpPool", {"x": floats(2, 3, 4, 5)}, 1, p=3)
    yield node_case("Trilu", {"x": floats(2, 3, 4)}, 1, upper=0)
    yield node_case("Conv", {"x": floats(2, 3, 5, 4), "w": floats(4, 3, 3, 2), "b": floats(4)}, 1, pads=[1, 0, 0, 1])
    yield node_case(
        "ConvTranspose", {"x": floats(2, 3, 4, 3), "w": floats(3, 2, 3, 2), "b": floats(2)}, 1, strides=[2, 1]
    )
    # An image's number is a float, which is cut: a little above it no difference leaves it.
    regions = np.array([[0.2, 0.2, 1.3, 3.7, 4.2], [1.2, 1.8, -1.4, 6.3, 2.1], [0.2, 3.2, 3.3, 1.2, 0.7],
                        [1.2, 8.1, 8.2, 9.3, 9.4]])  # fmt: skip
    pooled = {"pooled_shape": [2, 3], "spatial_scale": 0.8}
    yield node_case("MaxRoiPool", {"x": floats(2, 3, 5, 6), "regions": regions}, 1, **pooled)
    for op, gates in (("GRU", 3), ("RNN", 1)):
        x, w, r = floats(3, 2, 4), floats(1, gates * 5, 4), floats(1, gates * 5, 5)
        inputs = {"x": x, "w": w, "r": r, "b": floats(1, 2 * gates * 5), "": floats(), "h": floats(1, 2, 5)}
        yield node_case(op, inputs, 2, hidden_size=5)


def cases() -> dict[str, NodeCase]:
    """Cases by name: every node test of the operators, unless it has no floats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute infinities on purpose
        collected = collect_testcases(None)
    found = [_converted(c) for c in collected if _is_one_node(c.model)]
    return {c.name: c for c in (*found, *_own()) if c is not None and _has_floats(c)}


def _has_floats(case: NodeCase) -> bool:
    """Whether a result could have a gradient by some input."""
    return any(map(is_real, case.inputs.values())) and any(map(_is_float, case.model.graph.output))


def _is_one_node(model: ModelProto | None) -> bool:
    if model is None:
        return False
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 7)
    return len(model.graph.node) == 1 and model.graph.node[0].op_type in OPS and version >= 7


def _converted(case: Any) -> NodeCase | None:
    """The case in float64, its floats moved a little: away from ties, bends and zeros."""
    model, (given, _) = ModelProto(), case.data_sets[0]
    model.CopyFrom(case.model)
    if not all(i.type.HasField("tensor_type") for i in (*model.graph.input, *model.graph.output)):
        return None
    for info in (*model.graph.input, *model.graph.output):
        if info.type.tensor_type.elem_type in _NARROW:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    (node,) = model.graph.node
    if node.op_type == "LayerNormalization" and all(a.name != "stash_type" for a in node.attribute):
        node.attribute.append(helper.make_attribute("stash_type", TensorProto.FLOAT))  # of the statistics it gives out
    for attribute in node.attribute:
        if attribute.name in NAMING and attribute.i in _NARROW:
            attribute.i = TensorProto.DOUBLE
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.TENSOR):
            return None
    rng = np.random.default_rng(len(case.name))
    arrays, settings = {}, _settings(model)
    for info, value in zip(model.graph.input, given, strict=False):
        array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
        if info.type.tensor_type.elem_type == TensorProto.DOUBLE:
            move = 0.0 if info.name in settings else 0.02
            array = np.asarray(array.astype(np.float64) + rng.uniform(-move, move, array.shape))
        arrays[info.name] = array
    return NodeCase(case.name, model.graph.node[0].op_type, model, arrays)


def _settings(model: ModelProto) -> set[str]:
    """The inputs that must be constants."""
    (node,) = model.graph.node
    return {x for i, x in enumerate(node.input) if x and (node.op_type, i) in SETTINGS}


def is_real(a: Array) -> bool:
    """Floats that numpy and onnxruntime compute with: none of 8 or 4 bits."""
    return a.dtype in (np.float32, np.float64)


@dataclass(frozen=True)
class Derived:
    """A case with its gradient."""

    model: ModelProto  # with what must be constant as constants
    gradient: Graph
    wrt: tuple[str, ...]
    losses: tuple[str, ...]


def derive(case: NodeCase, dtype: type[np.floating[Any]] = np.float64) -> Derived | None:
    """The gradient by all float inputs of all float outputs; None where there are none of either.

    Raises UnsupportedError: the forward pass or the gradient is not supported.
    """
    model, arrays = case.with_floats(dtype)
    names = [i.name for i in model.graph.input]
    settings = _settings(model)
    lists = {n for n in names if arrays[n].dtype.kind == "i" and arrays[n].ndim <= 1}
    whole = settings | {n for n in names if not is_real(arrays[n])}
    error: UnsupportedError | None = None
    for fixed in (settings, settings | lists, whole):
        wrt = tuple(n for n in names if is_real(arrays[n]) and n not in fixed)
        losses = tuple(o.name for o in model.graph.output if o.name and _is_float(o))
        if not wrt or not losses:
            return None
        bound = with_constants(model, arrays, fixed)
        try:
            decompose(load(bound))  # one program: inputs that decide what is computed are constants
            return Derived(bound, differentiate(load(bound), losses, wrt, cotangents=True, outputs=False), wrt, losses)
        except UnsupportedOpError:
            raise
        except UnsupportedError as caught:
            error = caught
    assert error is not None
    raise error


def _is_float(info: onnx.ValueInfoProto) -> bool:
    kind: int = info.type.tensor_type.elem_type
    return kind in (0, TensorProto.DOUBLE, TensorProto.FLOAT)


def with_constants(model: ModelProto, arrays: Mapping[str, Array], fixed: Sequence[str] | set[str]) -> ModelProto:
    """The model with these inputs as constants."""
    changed = ModelProto()
    changed.CopyFrom(model)
    changed.graph.initializer.extend(numpy_helper.from_array(arrays[n], n) for n in arrays if n in fixed)
    kept = [i for i in changed.graph.input if i.name not in fixed]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    return changed


# ------------------------------------------------------------ the table in docs/training.md

BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"
_EVENLY, _BELOW, _NORM = "equal elements share evenly", "at 0 that of the branch below", "0 where the norm is 0"
_PAIRS, _WRITES = "equal operands share evenly, pair by pair", "of a place written twice each update has it all"
NOTES = {
    "Abs": "0 at 0", "Cast": "between floats", "CastLike": "between floats", "Celu": _BELOW, "Clip": "1 at the bounds",
    "Elu": _BELOW, "GlobalLpPool": _NORM, "GlobalMaxPool": _EVENLY, "HardSigmoid": "0 at both bends",
    "HardSwish": "0 and 1 at the bends", "Hardmax": "zero everywhere", "LeakyRelu": _BELOW, "LpNormalization": _NORM,
    "LpPool": _NORM, "Max": _PAIRS, "MaxPool": "the first of equal elements has it all",
    "MaxRoiPool": "equal elements share, line by line; 0 by the regions", "Min": _PAIRS, "PRelu": _BELOW,
    "Pow": "0 by a power of 0", "ReduceL1": "0 at 0", "ReduceL2": _NORM, "ReduceMax": _EVENLY, "ReduceMin": _EVENLY,
    "ReduceProd": "exact where factors are 0", "Relu": "0 at 0", "ScatterElements": _WRITES, "ScatterND": _WRITES,
    "Selu": _BELOW, "Sqrt": "infinite at 0", "ThresholdedRelu": "0 at the threshold",
    "Where": "0 times infinity in the branch not taken is NaN",
}  # fmt: skip


BRANCHES = {  # checked by tests/test_gradients_branches.py
    "If": "of the branch that runs", "Loop": "of values that keep their shapes", "Scan": "",
}  # fmt: skip


def table() -> str:
    """A row for each operator: the inputs by which some case is differentiated, and what holds where there is no
    derivative.
    """
    every: dict[str, list[NodeCase]] = {}
    for case in cases().values():
        every.setdefault(case.op, []).append(case)
    rows, count = [], 0
    for op in sorted(OPS):
        inputs, reasons = _covered(every.get(op, []))
        note = NOTES.get(op, "")
        if op in CONTROL:
            inputs, note = ["what it carries and reads"], BRANCHES[op]
        elif not inputs:
            note = "; ".join(sorted(reasons)) or "no case of the suite has floats that can be differentiated"
        count += bool(inputs)
        rows.append(f"| {op} | {', '.join(inputs) or 'none'} | {note} |")
    head = [f"{count} of {len(OPS)} operators have gradients.", "", "| operator | by | |", "| --- | --- | --- |"]
    return "\n".join([BEGIN, *head, *rows, END])


def _covered(found: Sequence[NodeCase]) -> tuple[list[str], set[str]]:
    """Names of differentiated inputs, in the standard's order, and reasons of the cases that have no gradient."""
    seen: dict[int, str] = {}
    reasons = set()
    for case in found:
        names = [formal.name for formal in defs.get_schema(case.op).inputs]
        places = {
            min(i, len(names) - 1) for i, x in enumerate(case.model.graph.node[0].input) if is_real_input(case, x)
        }
        if places <= set(seen):
            continue
        try:
            got = derive(case)
        except UnsupportedOpError:
            reasons.add("the operator is not supported yet")
            continue
        except UnsupportedError as error:
            reasons.add(error.message)
            continue
        for i, x in enumerate(case.model.graph.node[0].input):
            if got is not None and x in got.wrt:
                seen[min(i, len(names) - 1)] = names[min(i, len(names) - 1)]
    return [seen[i] for i in sorted(seen)], reasons


def is_real_input(case: NodeCase, name: str) -> bool:
    return name in case.inputs and is_real(case.inputs[name]) and name not in _settings(case.model)


def main() -> None:
    """Writes the table into the page."""
    page = Path(__file__).parents[1] / "docs" / "training.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + table() + after)


if __name__ == "__main__":
    main()
