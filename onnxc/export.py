"""Writes a graph at any stage as an ONNX model: every primitive has an ONNX spelling.

    model = to_onnx(graph)                      # a ModelProto that onnxruntime runs
    write_onnx(graph, "stage.onnx")             # with its weights in stage.onnx.data

So onnxruntime can judge each stage of a compile, not only its end. The spelling of a primitive is one entry
of `SPELLINGS`. Nodes of an imported graph are written as they are. Sizes that are symbolic become Shape of a
graph input and integer arithmetic. Names are generated; those of inputs and outputs are the model's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf import text_format
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxc.errors import InternalError, UnsupportedOpError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Atom, Call, Dim, Expr, Symbol, always_equal, is_nonnegative, of, prod
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType

OPSET = 21  # what primitives are spelled in
MIN_OPSET = 20  # the least opset that has all the spellings
EXTERNAL_BYTES = 1024  # smaller constants stay in the model itself


def to_onnx(graph: Graph, *, opset: int | None = None, ir_version: int | None = None) -> ModelProto:
    """The graph as an ONNX model. `opset` is by default the imported graph's own, and OPSET for primitives.

    Raises InternalError where a primitive has no spelling, UnsupportedOpError for nodes of two opsets in one
    graph.
    """
    return _model(graph, opset, ir_version, None)


def write_onnx(
    graph: Graph, path: str | os.PathLike[str], *, opset: int | None = None, ir_version: int | None = None
) -> None:
    """Writes the graph to a file, with large constants in a second one beside it (`<name>.data`).

    No constant is ever in the protobuf, so a model may be larger than 2 GB.
    """
    path = Path(path)
    data = path.with_name(path.name + ".data")
    with open(data, "wb") as file:
        model = _model(graph, opset, ir_version, _External(data.name, file))
    if data.stat().st_size == 0:
        data.unlink()
    path.write_bytes(model.SerializeToString())


def _model(graph: Graph, opset: int | None, ir_version: int | None, external: _External | None) -> ModelProto:
    imports = _imports(graph, opset)
    writer = _Writer(imports, graph.dim_names, _prefix(graph), external)
    proto = writer.top(graph)
    opsets = [helper.make_opsetid(domain, version) for domain, version in imports.items()]
    model = helper.make_model(proto, producer_name="onnxc", opset_imports=opsets)
    model.ir_version = ir_version or max(10, helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    if any(not o.type.WhichOneof("value") for o in model.graph.output):
        model = onnx.shape_inference.infer_shapes(model)
    return model


def _imports(graph: Graph, opset: int | None) -> dict[str, int]:
    """Opset versions by domain. The imported ops fix the version of ONNX's own domain, else it is ours to
    choose.
    """
    ops = set(_ops(graph))
    own = graph.metadata.get("opsets", {})
    imported = any(op.startswith("onnx.") for op in ops)
    chosen = opset or (own.get("", OPSET) if imported else OPSET)
    spelled = sorted(op for op in ops if "." not in op and op != "constant")
    if spelled and chosen < MIN_OPSET:
        raise InternalError(
            f"{spelled[0]} has no spelling in opset {chosen}: primitives need {MIN_OPSET} at least"
        )
    domains = sorted({op.rpartition(".")[0] for op in ops if "." in op} - {"onnx"})
    return {"": chosen, **{d: own.get(d, 1) for d in domains}}


def _ops(graph: Graph) -> Iterable[str]:
    for node in graph.nodes:
        yield node.op.partition("@")[0]
        for region in node.regions:
            yield from _ops(region)


def _prefix(graph: Graph) -> str:
    """A prefix for generated names that none of the model's names begins with."""
    names, prefix = [*graph.input_names, *graph.output_names], "v"
    while any(n.startswith(prefix) and n[len(prefix) :].isdigit() for n in names):
        prefix += "_"
    return prefix


# ---------------------------------------------------------------- constants


@dataclass
class _External:
    """The file that large constants go to, each aligned so that it can be mapped."""

    location: str
    file: Any

    def add(self, array: np.ndarray, name: str) -> TensorProto:
        self.file.write(b"\0" * (-self.file.tell() % 64))
        offset = self.file.tell()
        dtype = dtypes.from_numpy(array.dtype)
        self.file.write(
            np.ascontiguousarray(array).view(np.uint8).data
            if dtype.bits >= 8
            else _tensor(array, name).raw_data
        )
        tensor = TensorProto(
            name=name, data_type=dtype.onnx, dims=array.shape, data_location=TensorProto.EXTERNAL
        )
        entries = {"location": self.location, "offset": offset, "length": self.file.tell() - offset}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def _tensor(array: np.ndarray, name: str) -> TensorProto:
    if array.dtype == object:
        words = [s.encode("utf-8", "surrogateescape") for s in array.ravel()]
        return TensorProto(name=name, data_type=TensorProto.STRING, dims=array.shape, string_data=words)
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


# ---------------------------------------------------------------- the writer


class _Writer:
    """Writes one graph; a region's writer sees the names of the graphs around it."""

    def __init__(
        self,
        opsets: Mapping[str, int],
        dim_names: Mapping[str, str],
        prefix: str,
        external: _External | None,
        parent: _Writer | None = None,
    ) -> None:
        self.opsets, self.dim_names, self.prefix, self.external, self.parent = (
            opsets,
            dim_names,
            prefix,
            external,
            parent,
        )
        self.counter: list[int] = parent.counter if parent else [0]
        self.names: dict[int, str] = dict(parent.names) if parent else {}
        self.dims: dict[Dim, str] = dict(parent.dims) if parent else {}
        self.constants: dict[tuple[Any, ...], str] = dict(parent.constants) if parent else {}
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    # ------------------------------------------------------------ graphs

    def top(self, graph: Graph) -> GraphProto:
        for value in graph.inputs:
            self.names[value.id] = value.name
        self._symbols(graph)
        declared = graph.metadata.get("output_types", {})
        inputs = [self.info(v.name, v.type) for v in graph.inputs]
        self.body(graph, graph.output_names)
        outputs = [
            self.info(name, v.type, declared.get(name))
            for v, name in zip(graph.outputs, graph.output_names, strict=True)
        ]
        return helper.make_graph(self.nodes, graph.name or "graph", inputs, outputs, self.initializers)

    def region(self, graph: Graph) -> GraphProto:
        """A subgraph. Its names are generated, since none may be used twice in a model."""
        inner = _Writer(self.opsets, self.dim_names, self.prefix, self.external, self)
        inputs = []
        for value in graph.inputs:
            inner.names[value.id] = inner.fresh()
            inputs.append(self.info(inner.names[value.id], value.type))
        names = [inner.fresh() for _ in graph.outputs]
        inner.body(graph, names)
        outputs = [self.info(n, v.type) for n, v in zip(names, graph.outputs, strict=True)]
        return helper.make_graph(inner.nodes, inner.fresh(), inputs, outputs, inner.initializers)

    def body(self, graph: Graph, output_names: Sequence[str]) -> None:
        """Nodes; a node's output that is a graph output has its name at once, all else goes through an
        Identity.
        """
        made = {v.id for n in graph.nodes if n.op != "constant" for v in n.outputs}
        wanted: dict[int, str] = {}
        for value, name in zip(graph.outputs, output_names, strict=True):
            if value.id in made:
                wanted.setdefault(value.id, name)
        for node in graph.nodes:
            self.write(node, wanted)
        for value, name in zip(graph.outputs, output_names, strict=True):
            if wanted.get(value.id) != name:
                self.nodes.append(helper.make_node("Identity", [self.names[value.id]], [name]))

    def write(self, node: Node, wanted: Mapping[int, str]) -> None:
        if node.op == "constant":
            self.names[node.output.id] = self.constant(node.attrs["value"])
            return
        if "." in node.op or "@" in node.op:
            return self.imported(node, wanted)
        if node.op not in SPELLINGS:
            raise InternalError(
                f"the primitive {node.op!r} has no ONNX spelling: add one to SPELLINGS in onnxc/export.py"
            )
        inputs = [self.names[v.id] for v in node.inputs if v is not None]
        made = SPELLINGS[node.op](self, node, inputs)
        for value, name in zip(node.outputs, [made] if isinstance(made, str) else made, strict=True):
            self.names[value.id] = name
            if value.id in wanted:
                self.rename(name, wanted[value.id], inputs)
                self.names[value.id] = wanted[value.id]

    def rename(self, name: str, to: str, inputs: Sequence[str]) -> None:
        """Gives a value that has just been made (so it is not one of the node's inputs) its final name."""
        last = self.nodes[-1] if self.nodes else None
        if last is not None and name in last.output and name not in inputs:
            last.output[list(last.output).index(name)] = to
        else:
            self.nodes.append(helper.make_node("Identity", [name], [to]))

    def imported(self, node: Node, wanted: Mapping[int, str]) -> None:
        """A node of the user's model, as it was."""
        domain, _, op_type = node.op.rpartition(".")
        domain = "" if domain == "onnx" else domain
        if "@" in op_type:
            raise UnsupportedOpError(
                [(node.origin[0].name if node.origin else "", f"{node.op} beside {self.opsets[domain]}")]
            )
        for value in node.outputs:
            self.names[value.id] = wanted.get(value.id) or self.fresh()
        inputs = ["" if v is None else self.names[v.id] for v in node.inputs]
        proto = helper.make_node(
            op_type, inputs, [self.names[v.id] for v in node.outputs], domain=domain or None
        )
        kinds = _attribute_kinds(op_type, self.opsets.get(domain, 1), domain)
        for name, value in node.attrs.items():
            if name != "regions":
                proto.attribute.append(_attribute(name, value, kinds.get(name)))
        for name, region in zip(node.attrs.get("regions", ()), node.regions, strict=True):
            proto.attribute.append(helper.make_attribute(name, self.region(region)))
        self.nodes.append(proto)

    def info(self, name: str, type: TensorType | None, declared: Any = None) -> onnx.ValueInfoProto:
        """A graph input or output with its type (of an imported graph's output, the one that the model
        declares).
        """
        if type is not None:
            dims = [d if isinstance(d, int) else self.dim_names.get(repr(d), repr(d)) for d in type.shape]
            return helper.make_tensor_value_info(name, type.dtype.onnx, dims)
        if declared is not None:
            dtype, shape = declared
            return helper.make_tensor_value_info(name, dtypes.BY_NAME[dtype].onnx, shape)
        return onnx.ValueInfoProto(name=name)

    # ------------------------------------------------------------ nodes and constants

    def fresh(self) -> str:
        self.counter[0] += 1
        return f"{self.prefix}{self.counter[0]}"

    def several(self, op_type: str, inputs: Sequence[str], count: int, **attrs: Any) -> list[str]:
        """A node with several outputs."""
        outputs = [self.fresh() for _ in range(count)]
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, **attrs))
        return outputs

    def one(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        return self.several(op_type, inputs, 1, **attrs)[0]

    def cast(self, x: str, to: DType) -> str:
        return self.one("Cast", x, to=to.onnx)

    def compute(self, op_type: str, dtype: DType, inputs: Sequence[str], *more: str, **attrs: Any) -> str:
        """An op on inputs of one dtype (`more` are others), through a wider one where runtimes have no
        kernel.
        """
        return self.compute_several(op_type, dtype, inputs, more, 1, **attrs)[0]

    def compute_several(
        self, op_type: str, dtype: DType, inputs: Sequence[str], more: Sequence[str], count: int, **attrs: Any
    ) -> list[str]:
        """As `compute`; the first output has the inputs' dtype."""
        wide = _wide(op_type, dtype)
        if wide is dtype:
            return self.several(op_type, [*inputs, *more], count, **attrs)
        made = self.several(op_type, [*(self.cast(x, wide) for x in inputs), *more], count, **attrs)
        return [self.cast(made[0], dtype), *made[1:]]

    def constant(self, array: np.ndarray) -> str:
        """An initializer; small ones that are equal are one."""
        small = array.size <= 64 and array.dtype != object
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes()) if small else (id(array),)
        if key not in self.constants:
            name = self.constants[key] = self.fresh()
            large = array.nbytes >= EXTERNAL_BYTES and array.dtype != object
            out = self.external.add(array, name) if self.external and large else _tensor(array, name)
            self.initializers.append(out)
        return self.constants[key]

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float | int, dtype: DType) -> str:
        return self.constant(np.array(value).astype(dtype.numpy))

    # ------------------------------------------------------------ sizes

    def _symbols(self, graph: Graph) -> None:
        """Reads each symbol from the first input that has it as a dim, alone or as `a * s + b`."""
        found: list[tuple[Value, int, Symbol, int, int]] = []
        for value in graph.inputs:
            for axis, dim in enumerate(value.shape):
                line = _line(dim)
                if line is not None:
                    found.append((value, axis, *line))
        for value, axis, symbol, factor, offset in sorted(found, key=lambda f: (f[3], f[4]) != (1, 0)):
            if of(symbol) in self.dims:
                continue
            size = self.one("Shape", self.names[value.id], start=axis, end=axis + 1)
            if offset:
                size = self.one("Sub", size, self.ints(offset))
            self.dims[of(symbol)] = self.one("Div", size, self.ints(factor)) if factor != 1 else size

    def dim(self, d: Dim) -> str:
        """A size as an int64 tensor of shape [1]."""
        if isinstance(d, int):
            return self.ints(d)
        if d not in self.dims:
            self.dims[d] = self._polynomial(d)
        return self.dims[d]

    def _polynomial(self, d: Expr) -> str:
        terms = []
        for mono, coef in d.terms:
            factors = [self._atom(a) for a in mono]
            if coef != 1 or not factors:
                factors.append(self.ints(coef))
            terms.append(self._chain("Mul", factors))
        return self._chain("Add", terms)

    def _chain(self, op_type: str, parts: Sequence[str]) -> str:
        total = parts[0]
        for part in parts[1:]:
            total = self.one(op_type, total, part)
        return total

    def _atom(self, atom: Atom) -> str:
        if of(atom) in self.dims:
            return self.dims[of(atom)]
        if not isinstance(atom, Call):
            raise InternalError(
                f"the symbol {atom} is a dim of no graph input, so it cannot be written as ONNX"
            )
        a, b = (self.dim(x) for x in atom.args)
        if atom.op == "floordiv":
            if not is_nonnegative(atom.args[0]):  # Div rounds toward zero, Mod has the sign of the divisor
                a = self.one("Sub", a, self.one("Mod", a, b))
            made = self.one("Div", a, b)
        else:
            made = self.one({"mod": "Mod", "max": "Max", "min": "Min"}[atom.op], a, b)
        self.dims[of(atom)] = made
        return made

    def shape(self, dims: Sequence[Dim]) -> str:
        """Sizes as an int64 vector."""
        if all(isinstance(d, int) for d in dims):
            return self.constant(np.array(dims, np.int64))
        return self.one("Concat", *map(self.dim, dims), axis=0) if len(dims) > 1 else self.dim(dims[0])

    def reshape(self, x: str, shape: Sequence[Dim]) -> str:
        return self.one("Reshape", x, self.shape(shape), allowzero=1)


def _line(d: Dim) -> tuple[Symbol, int, int] | None:
    """`factor * symbol + offset`, where a dim is that."""
    if not isinstance(d, Expr) or not isinstance(d.terms[0][0][0] if d.terms[0][0] else None, Symbol):
        return None
    (mono, factor), *rest = d.terms
    if len(mono) != 1 or factor < 1 or len(rest) > 1 or (rest and rest[0][0]):
        return None
    symbol = mono[0]
    return (symbol, factor, rest[0][1] if rest else 0) if isinstance(symbol, Symbol) else None


def _attribute_kinds(op_type: str, version: int, domain: str) -> dict[str, int]:
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: int(a.type.value) for name, a in schema.attributes.items()}  # type: ignore[attr-defined]


def _attribute(name: str, value: Any, kind: int | None) -> AttributeProto:
    """A Python value as an attribute; the schema's type decides what an empty tuple is a list of."""
    if kind == AttributeProto.TYPE_PROTO and isinstance(value, str):
        return helper.make_attribute(name, text_format.Parse(value, onnx.TypeProto()))
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, _tensor(value, ""))
    if isinstance(value, str):
        return helper.make_attribute(
            name, value.encode("utf-8", "surrogateescape"), attr_type=AttributeProto.STRING
        )
    if isinstance(value, tuple):
        items = [_tensor(v, "") if isinstance(v, np.ndarray) else v for v in value]
        items = [v.encode("utf-8", "surrogateescape") if isinstance(v, str) else v for v in items]
        return helper.make_attribute(name, items, attr_type=kind or (None if items else AttributeProto.INTS))
    return helper.make_attribute(name, value)


# ---------------------------------------------------------------- kernels that onnxruntime lacks

_FLOATS = {"float16", "float32", "float64"}
_SIGNED = {"int32", "int64"}
_ALL = (
    _FLOATS
    | _SIGNED
    | {"int8", "int16", "uint8", "uint16", "uint32", "uint64", "bool", "string", "complex64", "complex128"}
)
_SMALL = _FLOATS | _SIGNED | {"int8", "uint8"}
_KERNELS: dict[str, set[str]] = {
    "Neg": _FLOATS | _SIGNED | {"int8", "int16"}, "Pow": _FLOATS | _SIGNED, "Max": _SMALL | {"uint32",
    "uint64"}, "Min": _SMALL | {"uint32", "uint64"}, "Where": _SMALL | {"uint32", "string"}, "BitShift":
    {"uint8", "uint32", "uint64"}, "MatMul": _FLOATS | _SIGNED | {"uint32", "uint64"}, "ReduceSum": _FLOATS |
    _SIGNED, "ReduceProd": _FLOATS | _SIGNED, "ReduceMax": _SMALL, "ReduceMin": _SMALL, "ArgMax": _SMALL,
    "ArgMin": _SMALL, "CumSum": _FLOATS | _SIGNED, "TopK": _SMALL | {"int16"}, "Pad": _SMALL | {"uint32",
    "uint64", "bool"},
}  # fmt: skip
_WIDER = {
    "bool": "int32",
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
    "int4": "int32",
    "uint4": "int32",
    "int2": "int32",
    "uint2": "int32",
}
_ORDERED = {"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK", "Pow"}  # int64 would misread large uint64


def _wide(op_type: str, dtype: DType) -> DType:
    """The dtype to compute in: integers wrap alike in a wider type, small floats round once at the end."""
    if dtype.name in _KERNELS.get(op_type, _ALL) or (dtype is dtypes.uint64 and op_type in _ORDERED):
        return dtype
    if op_type == "BitShift":
        return dtypes.uint32
    if dtype.is_float:
        return dtypes.float32
    return dtypes.BY_NAME[_WIDER.get(dtype.name, dtype.name)]


# ---------------------------------------------------------------- spellings

Spelling = Callable[[_Writer, Node, list[str]], "str | list[str]"]


def _direct(op_type: str, **attrs: Any) -> Spelling:
    """The ONNX op of the same meaning."""
    return lambda w, node, xs: w.compute(op_type, node.inputs[0].dtype, xs, **attrs)  # type: ignore[union-attr]


def _predicate(op_type: str) -> Spelling:
    """As `_direct`, with a bool output."""

    def spell(w: _Writer, node: Node, xs: list[str]) -> str:
        dtype = _operand(node).dtype
        wide = _wide(op_type, dtype)
        return w.one(op_type, *(xs if wide is dtype else [w.cast(x, wide) for x in xs]))

    return spell


def _operand(node: Node, i: int = 0) -> Value:
    value = node.inputs[i]
    assert value is not None
    return value


def _isinf(w: _Writer, node: Node, xs: list[str]) -> str:
    attrs = {f"detect_{side}": int(node.attrs.get(side, True)) for side in ("positive", "negative")}
    return w.one("IsInf", *xs, **attrs)


def _mod(w: _Writer, node: Node, xs: list[str]) -> str:
    """The remainder with the divisor's sign. ONNX has it for integers; for floats it follows from fmod."""
    dtype = _operand(node).dtype
    if not dtype.is_float:
        return w.compute("Mod", dtype, xs)
    rest = w.compute("Mod", dtype, xs, fmod=1)
    zero = w.scalar(0, dtype)
    wrong = w.one(
        "And",
        w.one("Less", w.one("Mul", w.one("Sign", rest), xs[1]), zero),
        w.one("Not", w.one("Equal", rest, zero)),
    )
    moved = _select(w, dtype, wrong, w.one("Add", rest, xs[1]), rest)
    signed_zero = w.one("Mul", w.one("Sign", xs[1]), zero)
    return _select(w, dtype, w.one("Equal", rest, zero), signed_zero, moved)


def _shift(direction: str) -> Spelling:
    """BitShift is for unsigned types; a signed value is shifted as its bits, to the right with its sign."""

    def spell(w: _Writer, node: Node, xs: list[str]) -> str:
        dtype = _operand(node).dtype
        if dtype.kind == "uint":
            return w.compute("BitShift", dtype, xs, direction=direction)
        bits = dtypes.BY_NAME[f"u{dtype.name}"]
        shift = w.cast(xs[1], bits)

        def shifted(x: str) -> str:
            return w.cast(w.compute("BitShift", bits, [w.cast(x, bits), shift], direction=direction), dtype)

        if direction == "LEFT":
            return shifted(xs[0])
        negative = w.one("Less", xs[0], w.scalar(0, dtype))
        flipped = w.one("BitwiseNot", shifted(w.one("BitwiseNot", xs[0])))
        return _select(w, dtype, negative, flipped, shifted(xs[0]))

    return spell


def _select(w: _Writer, dtype: DType, condition: str, x: str, y: str) -> str:
    wide = _wide("Where", dtype)
    if wide is dtype:
        return w.one("Where", condition, x, y)
    return w.cast(w.one("Where", condition, w.cast(x, wide), w.cast(y, wide)), dtype)


def _where(w: _Writer, node: Node, xs: list[str]) -> str:
    return _select(w, _operand(node, 1).dtype, *xs)


def _cast(w: _Writer, node: Node, xs: list[str]) -> str:
    to: DType = node.attrs["to"]
    narrow = to.is_float and to.bits == 8 and to.name != "float8e8m0"
    return w.one("Cast", *xs, to=to.onnx, **({"saturate": 0} if narrow else {}))


def _reshape(w: _Writer, node: Node, xs: list[str]) -> str:
    return w.reshape(xs[0], node.attrs["shape"])


def _expand(w: _Writer, node: Node, xs: list[str]) -> str:
    return w.compute("Expand", _operand(node).dtype, xs, w.shape(node.attrs["shape"]))


def _slice(w: _Writer, node: Node, xs: list[str]) -> str:
    x = _operand(node)
    rows = zip(x.shape, node.attrs["starts"], node.attrs["sizes"], node.attrs["steps"], strict=True)
    kept = [
        (axis, *row)
        for axis, row in enumerate(rows)
        if not (row[3] == 1 and row[1] == 0 and always_equal(row[0], row[2]))
    ]
    if not kept:
        return w.one("Identity", xs[0])
    ends = [_slice_end(w, dim, start + size * step, step) for _, dim, start, size, step in kept]
    ends_tensor = w.one("Concat", *ends, axis=0) if len(ends) > 1 else ends[0]
    return w.one(
        "Slice",
        xs[0],
        w.shape([k[2] for k in kept]),
        ends_tensor,
        w.ints(*(k[0] for k in kept)),
        w.ints(*(k[4] for k in kept)),
    )


def _slice_end(w: _Writer, dim: Dim, end: Dim, step: int) -> str:
    """Where a slice ends. Past the first element, where one counts down to it, is written `end - dim`."""
    if step > 0 or is_nonnegative(end):
        return w.dim(end)
    if isinstance(end, int):
        return w.ints(-(1 << 62))
    below = w.one("Less", w.dim(end), w.ints(0))
    return w.one("Where", below, w.dim(end - dim), w.dim(end))


def _pad(w: _Writer, node: Node, xs: list[str]) -> str:
    x, value = xs
    dtype, shape = _operand(node).dtype, list(_operand(node).shape)
    for axis, gap in enumerate(node.attrs["interior"]):
        if gap:
            x, shape[axis] = _interleave(w, x, value, dtype, shape, axis, gap)
    pads = (*node.attrs["low"], *node.attrs["high"])
    return x if all(always_equal(p, 0) for p in pads) else _pad_by(w, x, value, dtype, pads)


def _pad_by(w: _Writer, x: str, value: str, dtype: DType, pads: Sequence[Dim]) -> str:
    wide = _wide("Pad", dtype)
    if wide is dtype:
        return w.one("Pad", x, w.shape(pads), value)
    return w.cast(w.one("Pad", w.cast(x, wide), w.shape(pads), w.cast(value, wide)), dtype)


def _interleave(
    w: _Writer, x: str, value: str, dtype: DType, shape: list[Any], axis: int, gap: int
) -> tuple[str, Dim]:
    """`gap` values between neighbours: each element is a row that is padded; the last padding is cut off."""
    rank, d = len(shape), shape[axis]
    rows = w.reshape(x, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    pads = [0] * (2 * (rank + 1))
    pads[rank + 1 + axis + 1] = gap
    rows = _pad_by(w, rows, value, dtype, pads)
    whole = d * (gap + 1)
    flat = w.reshape(rows, [*shape[:axis], whole, *shape[axis + 1 :]])
    size = d + _maximum(d - 1, 0) * gap
    return w.one("Slice", flat, w.ints(0), w.dim(size), w.ints(axis)), size


def _maximum(a: Dim, b: Dim) -> Dim:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else of(Call("max", a, b))


def _iota(w: _Writer, node: Node, xs: list[str]) -> str:
    size = w.one("Squeeze", w.dim(node.attrs["size"]))
    counted = w.one("Range", w.scalar(0, dtypes.int64), size, w.scalar(1, dtypes.int64))
    return counted if node.attrs["dtype"] is dtypes.int64 else w.cast(counted, node.attrs["dtype"])


def _sizes(w: _Writer, node: Node, xs: list[str]) -> str:
    return w.one("Identity", w.shape(node.attrs["dims"]))


def _reduce(op_type: str) -> Spelling:
    def spell(w: _Writer, node: Node, xs: list[str]) -> str:
        axes = w.ints(*node.attrs["axes"])
        return w.compute(op_type, _operand(node).dtype, xs, axes, keepdims=0, noop_with_empty_axes=1)

    return spell


def _arg(op_type: str) -> Spelling:
    def spell(w: _Writer, node: Node, xs: list[str]) -> str:
        dtype = _operand(node).dtype
        wide = _wide(op_type, dtype)
        x = xs[0] if wide is dtype else w.cast(xs[0], wide)
        return w.one(
            op_type,
            x,
            axis=node.attrs["axis"],
            keepdims=0,
            select_last_index=int(node.attrs.get("last", False)),
        )

    return spell


def _cumsum(w: _Writer, node: Node, xs: list[str]) -> str:
    flags = {k: int(node.attrs.get(k, False)) for k in ("exclusive", "reverse")}
    return w.compute("CumSum", _operand(node).dtype, xs, w.scalar(node.attrs["axis"], dtypes.int64), **flags)


def _index(w: _Writer, node: Node, x: str, allowed: Sequence[DType] = (dtypes.int64, dtypes.int32)) -> str:
    """An index tensor in a dtype that ONNX takes."""
    return x if _operand(node, 1).dtype in allowed else w.cast(x, dtypes.int64)


def _gather(op_type: str) -> Spelling:
    return lambda w, node, xs: w.one(op_type, xs[0], _index(w, node, xs[1]), axis=node.attrs["axis"])


def _gather_nd(w: _Writer, node: Node, xs: list[str]) -> str:
    return w.one(
        "GatherND", xs[0], _index(w, node, xs[1], (dtypes.int64,)), batch_dims=node.attrs["batch_dims"]
    )


def _scatter_elements(w: _Writer, node: Node, xs: list[str]) -> str:
    index, attrs = _index(w, node, xs[1]), node.attrs
    return w.one("ScatterElements", xs[0], index, xs[2], axis=attrs["axis"], reduction=attrs["reduction"])


def _scatter_nd(w: _Writer, node: Node, xs: list[str]) -> str:
    return w.one(
        "ScatterND", xs[0], _index(w, node, xs[1], (dtypes.int64,)), xs[2], reduction=node.attrs["reduction"]
    )


def _top_k(w: _Writer, node: Node, xs: list[str]) -> list[str]:
    attrs = {"axis": node.attrs["axis"], "largest": int(node.attrs["largest"]), "sorted": 1}
    return w.compute_several("TopK", _operand(node).dtype, xs, [w.dim(node.attrs["k"])], 2, **attrs)


# ---------------------------------------------------------------- windows


def _quantize(w: _Writer, node: Node, xs: list[str]) -> str:
    a, to = node.attrs, dtypes.float32
    y = w.one("Round", w.one("Div", xs[0], w.scalar(a["scale"], to)))
    y = w.one("Add", y, w.scalar(a["zero"], to))
    y = _select(w, to, w.one("IsNaN", y), w.scalar(a["low"], to), y)
    return w.cast(w.one("Clip", y, w.scalar(a["low"], to), w.scalar(a["high"], to)), dtypes.int32)


def _matmul(w: _Writer, node: Node, xs: list[str]) -> str:
    dtype = node.output.dtype
    return w.compute("MatMul", dtype, [w.cast(x, dtype) for x in xs] if node.attrs.get("wide") else xs)


def _conv(w: _Writer, node: Node, xs: list[str]) -> str:
    dtype, attrs = node.output.dtype, node.attrs
    pads = (*attrs["low"], *attrs["high"])
    xs = [w.cast(x, dtype) for x in xs] if attrs.get("wide") else xs
    if len(xs) > 2:
        xs = [_pad_by(w, xs[0], xs[2], dtype, (0, 0, *attrs["low"], 0, 0, *attrs["high"])), xs[1]]
        pads = (0,) * len(pads)
    if not all(isinstance(p, int) for p in pads):
        rank = _operand(node).rank
        zeros: list[Dim] = [0, 0]
        around = zeros + list(attrs["low"]) + zeros + list(attrs["high"])
        xs = [_pad_by(w, xs[0], w.scalar(0, dtype), dtype, around), xs[1]]
        pads = (0,) * (2 * (rank - 2))
    return w.compute(
        "Conv",
        dtype,
        xs,
        strides=attrs["strides"],
        dilations=attrs["dilations"],
        pads=pads,
        group=attrs["groups"],
    )


def _matmul_quantized(w: _Writer, node: Node, xs: list[str]) -> str:
    """The weights are made as numbers, then multiplied: ONNX's blocked DequantizeLinear has no float zero points."""
    rows = w.constant(np.arange(node.operands[1].shape[0]) // node.attrs["block"])
    weights = w.cast(xs[1], dtypes.float32)
    if len(xs) > 3:
        weights = w.one("Sub", weights, w.one("Gather", xs[3], rows, axis=0))
    return w.one("MatMul", xs[0], w.one("Mul", weights, w.one("Gather", xs[2], rows, axis=0)))


def _attention(w: _Writer, node: Node, xs: list[str]) -> str:
    dtype = _operand(node).dtype
    scores = w.compute("MatMul", dtype, xs[:2])
    scores = w.compute("Mul", dtype, [scores, w.scalar(node.attrs.get("scale", 1.0), dtype)])
    if len(xs) > 3:
        scores = w.compute("Add", dtype, [scores, xs[3]])
    p = w.compute("Softmax", dtype, [scores], axis=-1)
    if node.attrs.get("guard", False):
        p = _select(w, dtype, w.one("IsNaN", p), w.scalar(0, dtype), p)
    return w.compute("MatMul", dtype, [p, xs[2]])


def _window(op_type: str, pool: str, combine: str, native: set[str]) -> Spelling:
    """A pool where one fits (up to three axes, a dtype that has one), else the shifted slices one by one."""

    def spell(w: _Writer, node: Node, xs: list[str]) -> str:
        x, attrs = _operand(node), node.attrs
        fill = 0 if op_type == "sum" else _lowest(x.dtype)
        pads = (*attrs["low"], *attrs["high"])
        padded = xs[0]
        if not all(always_equal(p, 0) for p in pads):
            padded = _pad_by(w, xs[0], w.scalar(fill, x.dtype), x.dtype, pads)
        shape = [d + lo + hi for d, lo, hi in zip(x.shape, attrs["low"], attrs["high"], strict=True)]
        axes = [a for a in range(x.rank) if attrs["kernel"][a] != 1 or attrs["strides"][a] != 1]
        if not axes:
            return w.one("Identity", padded)
        if x.dtype.name in native and len(axes) <= 3:
            return _pool(w, node, padded, shape, axes, pool)
        for axis in axes:
            padded = _shifted(w, node, padded, axis, combine)
        return padded

    return spell


def _lowest(dtype: DType) -> float | int:
    return -np.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)


def _pool(w: _Writer, node: Node, x: str, shape: list[Any], axes: list[int], pool: str) -> str:
    """A pooling op over the windowed axes: they are moved to the end, all others become the batch."""
    attrs, rank = node.attrs, len(shape)
    rest = [a for a in range(rank) if a not in axes]
    perm = [*rest, *axes]
    moved = x if perm == list(range(rank)) else w.one("Transpose", x, perm=perm)
    flat = w.reshape(moved, [prod(shape[a] for a in rest), 1, *(shape[a] for a in axes)])
    kernel, strides, dilations = ([attrs[k][a] for a in axes] for k in ("kernel", "strides", "dilations"))
    more = {"count_include_pad": 1} if pool == "AveragePool" else {}
    out = w.one(pool, flat, kernel_shape=kernel, strides=strides, dilations=dilations, **more)
    if pool == "AveragePool":
        out = w.one("Mul", out, w.scalar(int(prod(kernel)), _operand(node).dtype))  # type: ignore[arg-type]
    sizes = node.output.shape
    back = w.reshape(out, [sizes[a] for a in perm])
    return (
        back
        if perm == list(range(rank))
        else w.one("Transpose", back, perm=[perm.index(a) for a in range(rank)])
    )


def _shifted(w: _Writer, node: Node, x: str, axis: int, combine: str) -> str:
    """A window along one axis: the slices that hold its first, second, ... elements, combined."""
    attrs, size = node.attrs, node.output.shape[axis]
    stride, dilation = attrs["strides"][axis], attrs["dilations"][axis]
    taps = []
    for k in range(attrs["kernel"][axis]):
        start = k * dilation
        end = w.dim(start + (size - 1) * stride + 1)
        taps.append(w.one("Slice", x, w.ints(start), end, w.ints(axis), w.ints(stride)))
    total = taps[0]
    for tap in taps[1:]:
        total = w.compute(combine, _operand(node).dtype, [total, tap])
    return total


_SAME_NAME = {
    "neg": "Neg", "abs": "Abs", "sign": "Sign", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "tanh": "Tanh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "not": "Not", "bitnot": "BitwiseNot", "add": "Add",
    "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "max": "Max", "min": "Min", "and": "And",
    "or": "Or", "xor": "Xor", "bitand": "BitwiseAnd", "bitor": "BitwiseOr", "bitxor": "BitwiseXor",
}  # fmt: skip
SPELLINGS: dict[str, Spelling] = {
    "attention": _attention, "matmul_quantized": _matmul_quantized,
    **{name: _direct(op_type) for name, op_type in _SAME_NAME.items()}, "eq": _predicate("Equal"),
    "lt": _predicate("Less"), "le": _predicate("LessOrEqual"), "isnan": _predicate("IsNaN"),
    "isinf": _isinf, "where": _where, "cast": _cast, "mod": _mod, "fmod": _direct("Mod", fmod=1),
    "shl": _shift("LEFT"), "shr": _shift("RIGHT"), "reshape": _reshape, "expand": _expand, "slice": _slice,
    "pad": _pad, "iota": _iota, "sizes": _sizes, "copy": lambda w, node, xs: w.one("Identity", *xs),
    "transpose": lambda w, node, xs: w.one("Transpose", *xs, perm=node.attrs["perm"]),
    "concat": lambda w, node, xs: w.one("Concat", *xs, axis=node.attrs["axis"]),
    "reduce_sum": _reduce("ReduceSum"), "reduce_prod": _reduce("ReduceProd"),
    "reduce_max": _reduce("ReduceMax"), "reduce_min": _reduce("ReduceMin"), "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"), "cumsum": _cumsum, "gather": _gather("Gather"),
    "gather_elements": _gather("GatherElements"), "gather_nd": _gather_nd,
    "scatter_elements": _scatter_elements, "scatter_nd": _scatter_nd, "top_k": _top_k, "conv": _conv,
    "matmul": _matmul, "quantize": _quantize,
    "window_max": _window("max", "MaxPool", "Max", {"float16", "float32", "float64"}),
    "window_sum": _window("sum", "AveragePool", "Add", {"float32"}),
}  # fmt: skip
