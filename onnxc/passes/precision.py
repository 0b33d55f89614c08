"""A float32 model in float16 or bfloat16: what may lie in memory as halves does, what needs float32 keeps it.

    x: float32[8, 64]                          %1 = cast(x) {to=float16}
    y = matmul(x, w)                           %2 = matmul(%1, w as float16)
    z = softmax(y)          becomes            %3 = sub(%2, reduce_max(%2))
                                               %4 = exp(cast(%3) {to=float32})
                                               z  = div(%4, reduce_sum(%4))

Kernels compute halves in float32 registers and round where they store, and contractions add up in float32. So the
dtype of a value says how it is *stored*; between ops that share a kernel nothing is rounded but by a `cast`. "The same
graph in float16" is therefore defined up to those roundings: which values meet memory is for the planner to say.

Each op has a class (`onnxc.passes.precision_rules`):

- `TEMPLATES` multiply halves: matmul, conv, attention. Their weights become halves here, once.
- `FOLLOWS`: half where all they read is half (constants come in the dtype that is wanted), float32 where something is
  not. A float32 result returns to half where it leaves its kernel for certain: in front of a template, or where it is
  read behind the next one. So a chain of float32 ops is rounded once, at its end.
- `FLOAT32`, each with its reason: functions that leave the range of a half or magnify the errors of their argument.

What their class would make half stays float32 all the same where

- it is, or is computed from, a number beyond the range of the dtype (a mask of -1e9), or an exponential without a
  bound (`onnxc.passes.ranges`), up to an op whose results are bounded;
- it counts: positions and other integers as floats, up to the function that they are the argument of;
- sin, cos, or a cast to integers reads it, and it is computed in the same kernel.

`kept(graph)` lists what stayed float32, and why: `graph.metadata["float32"]` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Node, Origin, Source, Value
from onnxc.passes.precision_rules import (
    COMPARES,
    COUNTS,
    FACTORS,
    FLOAT32,
    FOLLOWS,
    HALVES,
    READS,
    SQUARE,
    SUM,
    TEMPLATES,
    Analysis,
    Half,
    is_count,
)
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.builder import constant_of

METADATA = "float32"
_LARGE_CONSTANT = 1 << 12  # elements, from which a constant is read as halves by float32 ops as well


@dataclass(frozen=True)
class Kept:
    """Ops of one node of the user's model (or of several, merged into one) that stay float32."""

    origin: Origin
    ops: tuple[str, ...]
    reason: str


def kept(graph: Graph) -> list[Kept]:
    """What a conversion left in float32; none where there was no conversion."""
    rows = graph.metadata.get(METADATA, [])
    return [Kept(tuple(Source(*s) for s in origin), tuple(ops), reason) for origin, ops, reason in rows]


def convert_precision(graph: Graph, dtype: str, keep_io: bool = True, packed: bool = False) -> Graph:
    """The graph with its float32 values in `dtype`, float16 or bfloat16, as the module's docstring says.

    Before: primitives, constants folded, attention found (a cast would hide it). After: primitives; the metadata
    lists what stayed float32. Other dtypes, float64 too, are left as they are.

    Inputs and outputs of the graph stay float32, or, without `keep_io`, become halves as well, but for outputs whose
    range a half lacks. `packed`: products with packed weights multiply halves, too.

    Raises InputError for another dtype.
    """
    if dtype not in HALVES:
        raise InputError(f"dtype is one of {', '.join(HALVES)}, not {dtype!r}")
    half = Half(HALVES[dtype])
    notes = _Notes()
    inputs = [half.dtype if v.dtype is dtypes.float32 and not keep_io else v.dtype for v in graph.inputs]
    converter = _Converter(graph, half, notes, inputs, packed)
    converter.run()
    outputs = [converter.output(v, dtypes.float32 if keep_io else None) for v in graph.outputs]
    declared = dict(graph.metadata.get("output_types", {}))
    for name, old, new in zip(graph.output_names, graph.outputs, outputs, strict=True):
        if name in declared and old.dtype is not new.dtype:
            declared[name] = [new.dtype.name, *declared[name][1:]]
    metadata = {**graph.metadata, METADATA: notes.rows()}
    metadata |= {"output_types": declared} if declared else {}
    made = replace(graph, inputs=converter.inputs, outputs=outputs, nodes=converter.nodes, metadata=metadata)
    return eliminate_dead(made)


@dataclass
class _Notes:
    """What stayed float32: ops by origin and reason."""

    found: dict[tuple[Origin, str], list[str]] = field(default_factory=dict)

    def add(self, node: Node, reason: str) -> None:
        ops = self.found.setdefault((node.origin, reason), [])
        if node.op not in ops:
            ops.append(node.op)

    def rows(self) -> list[Any]:
        """As the text of a graph and a manifest can hold it."""
        return [
            [[[s.number, s.op_type, s.name, s.line] for s in origin], ops, reason]
            for (origin, reason), ops in self.found.items()
        ]


# ---------------------------------------------------------------- the conversion


class _Converter:
    """Rebuilds a graph (or a region) with new dtypes. Each value of the old graph has one new one, and casts of it.

    A cast to half is made once. A cast from half is made for each reader: it costs nothing in a reader's kernel, and
    with several readers it would be what is stored.
    """

    def __init__(self, graph: Graph, half: Half, notes: _Notes, inputs: Sequence[DType], packed: bool = False) -> None:
        self.graph, self.half, self.notes, self.packed = graph, half, notes, packed
        self.known = Analysis(graph, half)
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}  # of old values, by id
        self.made: dict[tuple[int, str], Value] = {}  # casts and constants, by the old value's id and the dtype
        self.widened: dict[int, Value] = {}  # casts from half for the node at hand, by the old value's id
        self.inputs = [
            v if v.dtype is t else Value(v.t.with_dtype(t), v.name, v.data)
            for v, t in zip(graph.inputs, inputs, strict=True)
        ]
        self.values.update({old.id: new for old, new in zip(graph.inputs, self.inputs, strict=True)})

    def run(self) -> None:
        for node in self.graph.nodes:
            self.widened = {}
            self._convert(node)

    def output(self, v: Value, dtype: DType | None) -> Value:
        """A result in a dtype; by default, in half where it may be."""
        if v.dtype is not dtypes.float32:
            return self.values[v.id]
        if dtype is None:
            array = constant_of(v)
            stays = v.id in self.known.taints or (array is not None and bool(self.half.misfit(array)))
            dtype = dtypes.float32 if stays else self.half.dtype
        return self.value(v, dtype)

    # ------------------------------------------------------------ values

    def value(self, v: Value, dtype: DType | None = None) -> Value:
        """The new value of an old one; float32 is wanted in a certain dtype, or as it is."""
        array = constant_of(v)
        if v.dtype is not dtypes.float32:
            return self.values[v.id]
        if array is not None:
            return self._constant(v, array, dtype or (dtypes.float32 if self.known.misfits[v.id] else self.half.dtype))
        new = self.values[v.id]
        if dtype is None or new.dtype is dtype:
            return new
        if dtype is dtypes.float32:
            return self._widened(v, new)
        key = (v.id, dtype.name)
        if key not in self.made:
            self.made[key] = self._cast(new, dtype, v.node.origin if v.node else ())
        return self.made[key]

    def _widened(self, v: Value, new: Value) -> Value:
        if v.id not in self.widened:
            self.widened[v.id] = self._cast(new, dtypes.float32, v.node.origin if v.node else ())
        return self.widened[v.id]

    def _cast(self, x: Value, to: DType, origin: Origin) -> Value:
        out = Value(x.t.with_dtype(to))
        self.nodes.append(Node("cast", [x], [out], {"to": to}, (), origin))
        return out

    def _constant(self, v: Value, array: np.ndarray, dtype: DType) -> Value:
        key = (v.id, dtype.name)
        if key not in self.made:
            content = array if dtype is dtypes.float32 else self.half.convert(array)
            out = Value(v.t.with_dtype(dtype), v.name)
            self.nodes.append(Node("constant", (), [out], {"value": content}, (), v.node.origin if v.node else ()))
            self.made[key] = out
        return self.made[key]

    # ------------------------------------------------------------ nodes

    def _convert(self, node: Node) -> None:
        op = node.op
        touched = any(v.dtype is dtypes.float32 for v in (*node.operands, *node.outputs))
        if op == "constant":
            if node.output.dtype is not dtypes.float32:
                self._emit(node, None)
        elif op == "scan":
            self._scan(node)
        elif not touched:
            self._emit(node, None)
        elif op == "cast":
            self._convert_cast(node)
        elif op in TEMPLATES:
            self._template(node)
        elif op == "matmul_quantized" and (self._unpacked(node) or (self.packed and self._packed(node))):
            pass
        elif op in READS:
            self._emit(node, None)
        elif op in FOLLOWS and not self._is_square(node) and not self._adds_up(node):
            self._follow(node)
        else:
            self._float32(node)

    def _emit(self, node: Node, dtype: DType | None, inputs: Sequence[Value] | None = None) -> None:
        """A node with its float32 operands and results in a dtype (operands as they are, by default)."""
        if inputs is None:
            inputs = [self.value(v, dtype) for v in node.operands]
        result = dtype or dtypes.float32
        types = [v.t if v.dtype is not dtypes.float32 else v.t.with_dtype(result) for v in node.outputs]
        old = [v for v in node.inputs if v is not None]
        same = all(a is b for a, b in zip(inputs, old, strict=True))
        if same and all(t is v.t or t == v.t for t, v in zip(types, node.outputs, strict=True)):
            self.nodes.append(node)
            outputs = list(node.outputs)
        else:
            outputs = [Value(t, v.name, v.data) for t, v in zip(types, node.outputs, strict=True)]
            self.nodes.append(Node(node.op, inputs, outputs, node.attrs, node.regions, node.origin))
        self.values.update({a.id: b for a, b in zip(node.outputs, outputs, strict=True)})

    def _float32(self, node: Node) -> None:
        if node.op not in COMPARES:
            self.notes.add(node, self._reason(node))
        self._emit(node, dtypes.float32)

    def _reason(self, node: Node) -> str:
        if self._adds_up(node):
            return SUM
        return SQUARE if self._is_square(node) else FLOAT32.get(node.op, "there is no rule for it")

    def _is_square(self, node: Node) -> bool:
        return node.op == "mul" and node.operands[0] is node.operands[1]

    def _adds_up(self, node: Node) -> bool:
        return bool(node.attrs.get("reduction", "none") in ("add", "mul"))

    def _template(self, node: Node) -> None:
        why = self.known.refusal(node)
        if why:
            self.notes.add(node, why)
            self._emit(node, dtypes.float32)
            return
        count = FACTORS.get(node.op, 3)
        inputs = [self.value(v, self.half.dtype) for v in node.operands[:count]]
        for bias in node.operands[count:]:  # the bias of attention has a dtype of its own
            inputs.append(self.value(bias))
            if constant_of(bias) is not None and self.known.misfits.get(bias.id):
                self.notes.add(node, self.known.misfits[bias.id])
        self._emit(node, None if node.op == "attention_norm" else self.half.dtype, inputs)

    def _unpacked(self, node: Node) -> bool:
        """Weights that are halves already are multiplied as such."""
        x, q, *rows = node.operands
        codes, scale = constant_of(q), constant_of(rows[0])
        if codes is None or scale is None or q.dtype not in HALVES.values() or len(rows) > 1 or (scale != 1).any():
            return False
        if self.half.misfit(codes.astype(np.float32)) or x.id in self.known.taints or x.dtype is not dtypes.float32:
            return False
        weights = Value(q.t.with_dtype(self.half.dtype))
        self.nodes.append(Node("constant", (), [weights], {"value": self.half.convert(codes)}, (), node.origin))
        out = Value(node.output.t.with_dtype(self.half.dtype))
        self.nodes.append(Node("matmul", [self.value(x, self.half.dtype), weights], [out], {}, (), node.origin))
        self.values[node.output.id] = out
        return True

    def _packed(self, node: Node) -> bool:
        """Codes are multiplied as halves where a half holds what they stand for."""
        scale, *zeros = (constant_of(v) for v in node.operands[2:])
        bits = int(node.attrs["bits"])
        if scale is None or bits == 16 or node.output.dtype is not dtypes.float32:
            return False
        most = float((1 << (bits - 1)) + max((np.abs(z).max() for z in zeros if z is not None), default=0))
        if self.known.refusal(node) or self.half.misfit(most * np.abs(scale).max(keepdims=True)):
            return False
        x, *rest = node.operands
        inputs = [self.value(x, self.half.dtype), *(self.value(v, dtypes.float32) for v in rest)]
        self._emit(node, self.half.dtype, inputs)
        return True

    def _follow(self, node: Node) -> None:
        """In the dtype of what it reads; a float32 result returns to half where it is stored."""
        dtype = self._followed(node)
        if dtype is self.half.dtype:
            self._emit(node, dtype)
            return
        stays = self.known.wants(node) or any(v.id in self.known.taints for v in node.outputs)
        for taint in (self.known.taints.get(v.id) for v in node.operands if constant_of(v) is not None):
            if taint is not None:
                self.notes.add(node, taint.reason)
        inputs = [self._large_as_half(v, stays) for v in node.operands]
        self._emit(node, dtypes.float32, inputs)
        for v in node.outputs:
            if v.dtype is dtypes.float32 and not stays and v.id in self.known.stored:
                self.values[v.id] = self._cast(self.values[v.id], self.half.dtype, node.origin)

    def _followed(self, node: Node) -> DType:
        if self.known.wants(node) or any(v.id in self.known.taints for v in node.outputs):
            return dtypes.float32
        arrays = [(v, constant_of(v)) for v in node.operands if v.dtype is dtypes.float32]
        if any(a is None and self.values[v.id].dtype is dtypes.float32 for v, a in arrays):
            return dtypes.float32
        fits = all(self._fits(node, v, a) for v, a in arrays if a is not None)
        return self.half.dtype if fits else dtypes.float32

    def _fits(self, node: Node, v: Value, array: np.ndarray) -> bool:
        """Whether a constant may be half: a scalar only where that changes nothing, since to keep it costs nothing."""
        divides = node.op == "div" and node.operands[1] is v
        why = self.known.misfits[v.id] or (self.half.misfit(array, each=True) if divides else "")
        if why:
            self.notes.add(node, why)
            return False
        return array.size != 1 or self.half.exact(array)

    def _large_as_half(self, v: Value, exactly: bool) -> Value:
        """A float32 operand; a constant that is worth it lies in memory as halves."""
        array = constant_of(v)
        if exactly or array is None or v.dtype is not dtypes.float32 or array.size < _LARGE_CONSTANT:
            return self.value(v, dtypes.float32)
        if self.known.misfits[v.id]:
            return self.value(v, dtypes.float32)
        return self._widened(v, self.value(v, self.half.dtype))

    def _convert_cast(self, node: Node) -> None:
        """Casts that the model has. What becomes half already needs none."""
        x, to = node.operands[0], node.attrs["to"]
        if x.dtype is dtypes.float32 and to in (dtypes.float32, self.half.dtype):
            self.values[node.output.id] = self.value(x, None if to is dtypes.float32 else to)
        elif x.dtype is dtypes.float32:
            if to.is_integer:
                self.notes.add(node, "its argument becomes integers")
            self._emit(node, None, [self.value(x, None if to is dtypes.boolean else dtypes.float32)])
        elif x.dtype is self.half.dtype:
            self.values[node.output.id] = self.values[x.id]
        elif x.dtype is dtypes.boolean or (x.dtype.is_integer and x.dtype.bits <= 8):
            out = self._cast(self.values[x.id], self.half.dtype, node.origin)  # exact
            self.values[node.output.id] = out
        else:
            if is_count(x):
                self.notes.add(node, COUNTS)
            self._emit(node, None)

    # ------------------------------------------------------------ regions

    def _scan(self, node: Node) -> None:
        """The region is converted too, its states stay as they are."""
        states, (region,) = node.attrs["states"], node.regions
        if any(v.dtype is dtypes.float32 for v in node.outputs[:states]):
            self.notes.add(node, FLOAT32["scan"])
        inputs = [self.value(v, dtypes.float32 if k < states else None) for k, v in enumerate(node.inputs) if v]
        inner = _Converter(region, self.half, self.notes, [v.dtype for v in inputs], self.packed)
        inner.run()
        carried = set(node.attrs["results"][:states])
        ends = [inner.output(v, dtypes.float32 if k in carried else None) for k, v in enumerate(region.outputs)]
        body = eliminate_dead(replace(region, inputs=inner.inputs, outputs=ends, nodes=inner.nodes))
        types = [ends[k].dtype for k in node.attrs["results"]]
        outputs = [Value(v.t.with_dtype(t), v.name, v.data) for v, t in zip(node.outputs, types, strict=True)]
        self.nodes.append(Node("scan", inputs, outputs, node.attrs, [body], node.origin))
        self.values.update({a.id: b for a, b in zip(node.outputs, outputs, strict=True)})


def summary(rows: Iterable[Kept]) -> Mapping[str, int]:
    """How many nodes of the model have ops that stayed float32, by reason."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.reason] = found.get(row.reason, 0) + 1
    return found
