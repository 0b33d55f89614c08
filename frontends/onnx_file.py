"""Reads an ONNX model into the graph IR.

    graph = load("model.onnx")

The result is the model as it is written, cleaned of everything that is only notation: local functions are
inlined, names are gone (a value is an object, not a string), weights and Constant nodes are `constant` nodes,
unused weights are dropped, nodes are in topological order, attributes are Python values. A node of the
default domain is `onnx.<Type>`, of another domain `<domain>.<Type>`; where a local function was written for
another opset in which the operator meant something else, its version follows: `onnx.Softmax@11`. Only inputs
and constants have types.

A model comes from a stranger: whatever is wrong with it is a ModelError (or LimitError) that names the node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import networkx as nx
import numpy as np
import onnx
from google.protobuf import text_format
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnxc.errors import InputError, LimitError, ModelError
from onnxc.frontends.onnx_tensors import DataFolder, array_of, dense, dtype_of, open_regular, text
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Sym
from onnxc.ir.graph import Graph, Node, Origin, Source, Value, topological
from onnxc.ir.types import TensorType

MIN_OPSET, MAX_OPSET = 7, 28
MAX_IR_VERSION = 14
MAX_DEPTH = 64  # of subgraphs and local functions in each other
MAX_NODES = 1 << 20  # after inlining: functions that call functions twice grow exponentially
MAX_BYTES = 1 << 31  # protobuf's own limit
MAX_DIM = 1 << 40

Model = Union[str, "os.PathLike[str]", bytes, ModelProto]
InputShapes = Mapping[str, Sequence["int | str | None"]]


def load(
    model: Model,
    *,
    base_dir: str | os.PathLike[str] | None = None,
    input_shapes: InputShapes | None = None,
    keep_inputs: Sequence[str] = (),
) -> Graph:
    """The graph of an ONNX model.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        base_dir: the folder of external data, for bytes and ModelProto (a path's own folder is known).
        input_shapes: sizes for dynamic dims, as `{"x": (1, 3, 224, None)}`; None leaves a dim as the model
            has it, a string names it. A size given for a named dim holds wherever the model uses the name.
        keep_inputs: inputs that stay inputs although the model has an initializer (a default) for them.

    Raises ModelError for a model that is not valid, LimitError for one that claims absurd sizes, InputError
    for `input_shapes` or `keep_inputs` that do not fit the model.
    """
    proto, folder = _read(model, base_dir)
    try:
        return _Importer(proto, folder, input_shapes or {}, keep_inputs).graph()
    except (UnicodeError, RecursionError) as error:
        raise ModelError(f"the model cannot be read: {error}", cause=error) from error


def _read(model: Model, base_dir: str | os.PathLike[str] | None) -> tuple[ModelProto, DataFolder | None]:
    folder = None if base_dir is None else DataFolder(os.fspath(base_dir), os.fspath(base_dir))
    if isinstance(model, ModelProto):
        return model, folder
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _parse(bytes(model), "the model"), folder
    path = os.fspath(model)
    if folder is None:
        folder = DataFolder(os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))
    with os.fdopen(open_regular(path, f"model {path!r}"), "rb") as file:
        if os.fstat(file.fileno()).st_size >= MAX_BYTES:
            raise ModelError(
                f"model {path!r} is over 2 GB, which protobuf cannot hold: store its weights as external data"
            )
        return _parse(file.read(), f"model {path!r}"), folder


def _parse(data: bytes, what: str) -> ModelProto:
    try:
        model: ModelProto = ModelProto.FromString(data)
        return model
    except (DecodeError, RuntimeError, ValueError) as error:
        raise ModelError(f"{what} is not an ONNX file, or is truncated ({error})", cause=error) from error


# ---------------------------------------------------------------- versions


def _domain(name: str | bytes) -> str:
    name = text(name)
    return "" if name == "ai.onnx" else name


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Version by domain. A domain that is imported twice has the higher version."""
    found: dict[str, int] = {}
    for entry in imports:
        domain = _domain(entry.domain)
        found[domain] = max(found.get(domain, int(entry.version)), int(entry.version))
    if "" in found and not MIN_OPSET <= found[""] <= MAX_OPSET:
        raise ModelError(f"the model uses opset {found['']}; opsets {MIN_OPSET} to {MAX_OPSET} are supported")
    return found


def _check_versions(model: ModelProto) -> None:
    if not model.HasField("graph"):
        raise ModelError("the model has no graph (it is empty, or not an ONNX file)")
    if not 1 <= model.ir_version <= MAX_IR_VERSION:
        raise ModelError(
            f"the model has IR version {model.ir_version}; versions 1 to {MAX_IR_VERSION} are supported"
        )
    if not model.opset_import:
        raise ModelError("the model does not say which opset it uses (opset_import is empty)")


def _meaning(domain: str, op_type: str, version: int) -> int | None:
    """The version that last changed an operator; None where onnx does not know it."""
    try:
        return int(onnx.defs.get_schema(op_type, version, domain).since_version)
    except onnx.defs.SchemaError:
        return None


# ---------------------------------------------------------------- names

Attribute = tuple[AttributeProto, "_Scope"]
FunctionKey = tuple[str, str, str]


@dataclass
class _Scope:
    """The names that a list of nodes can see, and where the nodes made for it go."""

    opsets: dict[str, int]
    parent: _Scope | None = None
    names: dict[str, Value | None] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)  # name -> the node that makes it, for messages
    weights: dict[str, Any] = field(default_factory=dict)  # initializers that nothing has read yet
    constants: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    attributes: dict[str, Attribute] | None = None  # inside a function: what its call gave
    prefix: str = ""
    calls: tuple[FunctionKey, ...] = ()
    depth: int = 0

    def inner(self, **changes: Any) -> _Scope:
        """A scope one level down: a subgraph's, or (with `parent=None`) a function's."""
        if self.depth >= MAX_DEPTH:
            raise LimitError(f"subgraphs and functions lie more than {MAX_DEPTH} deep in each other")
        common: dict[str, Any] = {
            "opsets": self.opsets, "parent": self, "attributes": self.attributes, "prefix": self.prefix,
            "calls": self.calls, "depth": self.depth + 1,
        }  # fmt: skip
        return _Scope(**{**common, **changes})

    def define(self, name: str, value: Value | None, maker: str) -> None:
        if name in self.names or name in self.weights:
            other = self.makers.get(name, "an initializer")
            raise ModelError(f"{name!r} is defined twice: by {other} and by {maker}")
        self.names[name] = value
        self.makers[name] = maker


def _label(number: int, node: NodeProto) -> str:
    name = text(node.name)
    return f"n{number} {text(node.op_type)}" + (f" {name!r}" if name else "")


_FRAME = re.compile(r'File "([^"\n]*)", line (\d+)')


def _source_line(node: NodeProto) -> str:
    """`file.py:123`, the innermost frame that the PyTorch exporter recorded for a node."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.stack_trace":
            frames = _FRAME.findall(text(entry.value))
            return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return ""


# ---------------------------------------------------------------- the import


class _Importer:
    """One import: the model's tables, and the counters that run through all of its graphs."""

    def __init__(
        self,
        model: ModelProto,
        folder: DataFolder | None,
        input_shapes: InputShapes,
        keep_inputs: Sequence[str],
    ) -> None:
        _check_versions(model)
        self.model = model
        self.folder = folder
        self.opsets = _opsets(model.opset_import)
        self.functions = self._function_table()
        self.sizes: dict[FunctionKey, int] = {}
        self._check_size(self._size(model.graph.node, 0) if self.functions else len(model.graph.node))
        self.keep = set(keep_inputs)
        self.dims = _Dims(model.graph, input_shapes)
        self.count = 0

    def _function_table(self) -> dict[FunctionKey, onnx.FunctionProto]:
        table: dict[FunctionKey, onnx.FunctionProto] = {}
        for f in self.model.functions:
            key = (_domain(f.domain), text(f.name), text(f.overload))
            if key in table:
                raise ModelError(f"the model has two local functions {'.'.join(key[:2])}")
            table[key] = f
        return table

    def _check_size(self, nodes: int) -> None:
        if nodes > MAX_NODES:
            raise LimitError(
                f"the model has {nodes} nodes once its functions are inlined (limit: {MAX_NODES})"
            )

    def _size(self, nodes: Iterable[NodeProto], depth: int) -> int:
        """The number of nodes once all functions are inlined, counted without doing it."""
        if depth > MAX_DEPTH:
            raise LimitError(f"subgraphs and functions lie more than {MAX_DEPTH} deep in each other")
        total = 0
        for n in nodes:
            total += 1 + sum(self._size(a.g.node, depth + 1) for a in n.attribute if a.HasField("g"))
            key = (_domain(n.domain), text(n.op_type), text(n.overload))
            if key in self.functions and key not in self.sizes:
                self.sizes[key] = 0  # a function that calls itself is found when it is inlined
                self.sizes[key] = self._size(self.functions[key].node, depth + 1)
            total += self.sizes.get(key, 0)
        return total

    def graph(self) -> Graph:
        """The main graph, with the model's metadata."""
        proto = self.model.graph
        scope = _Scope(self.opsets)
        inputs = self._inputs(proto, scope)
        body = self._body(proto, scope, inputs)
        body.dim_names = self.dims.names
        body.metadata = {
            "opsets": dict(self.opsets),
            "ir_version": int(self.model.ir_version),
            "producer": f"{text(self.model.producer_name)} {text(self.model.producer_version)}".strip(),
            "output_types": {
                text(o.name): _declared(o) for o in proto.output if o.type.tensor_type.elem_type
            },
            "properties": {text(p.key): text(p.value) for p in self.model.metadata_props},
        }
        return body

    def _inputs(self, proto: GraphProto, scope: _Scope) -> list[Value]:
        """Graph inputs, without those that have an initializer."""
        names = [text(i.name) for i in proto.input]
        unknown = sorted(self.keep - set(names))
        if unknown:
            raise InputError(
                f"keep_inputs names {', '.join(map(repr, unknown))}; the model's inputs are {names}"
            )
        weights = {text(t.name) for t in proto.initializer} | {
            text(t.values.name) for t in proto.sparse_initializer
        }
        found = []
        for info, name in zip(proto.input, names, strict=True):
            if name in weights and name not in self.keep:
                continue
            value = Value(self.dims.type_of(info), name)
            scope.define(name, value, "a graph input")
            found.append(value)
        return found

    def _region(self, proto: GraphProto, outer: _Scope) -> Graph:
        """A subgraph (a branch or a loop's body). Its inputs get their types from the node that holds it."""
        scope = outer.inner()
        weights = {text(t.name) for t in proto.initializer}
        inputs = [Value(None, text(i.name)) for i in proto.input if text(i.name) not in weights]
        for value in inputs:
            scope.define(value.name, value, "an input of the subgraph")
        return self._body(proto, scope, inputs)

    def _body(self, proto: GraphProto, scope: _Scope, inputs: list[Value]) -> Graph:
        self._weights(proto, scope)
        self._nodes(proto.node, scope, {})
        names = [text(o.name) for o in proto.output]
        if len(set(names)) != len(names):
            raise ModelError(f"the graph has an output twice: {names}")
        outputs = [self._value(name, scope, "the graph's outputs") for name in names]
        if not outputs and scope.parent is None:
            raise ModelError("the graph has no outputs")
        nodes = _ordered(scope.constants + scope.nodes)
        return Graph(inputs, [v for v in outputs if v is not None], nodes, names, text(proto.name))

    def _weights(self, proto: GraphProto, scope: _Scope) -> None:
        """Initializers, to be read when something uses them. Of two with one name the last counts, as
        elsewhere.
        """
        tensors = [(text(t.name), t) for t in proto.initializer]
        sparse = [(text(t.values.name), t) for t in proto.sparse_initializer]
        scope.weights = {name: t for name, t in (*tensors, *sparse) if name and name not in scope.names}

    def _value(self, name: str, scope: _Scope, reader: str) -> Value | None:
        """The value of a name, from this scope or one around it."""
        if not name:
            raise ModelError(f"{reader}: a name is empty")
        level: _Scope | None = scope
        while level is not None:
            if name in level.weights:
                self._materialize(name, level)
            if name in level.names:
                return level.names[name]
            level = level.parent
        raise ModelError(f"{name!r} is used, but nothing in the model defines it", node=reader)

    def _materialize(self, name: str, scope: _Scope) -> None:
        tensor = scope.weights.pop(name)
        is_dense = isinstance(tensor, TensorProto)
        array = (
            array_of(tensor, self.folder, f"initializer {name!r}") if is_dense else dense(tensor, self.folder)
        )
        scope.define(name, _constant(array, name, (), scope.constants), "an initializer")

    # ------------------------------------------------------------ nodes

    def _nodes(self, protos: Sequence[NodeProto], scope: _Scope, bound: Mapping[str, Value]) -> None:
        """Imports a list of nodes. Outputs are declared first, so that the list may stand in any order."""
        first = self.count
        self.count += len(protos)
        self._check_size(self.count)
        outputs = [self._declare(p, first + i, scope, bound) for i, p in enumerate(protos)]
        for i, proto in enumerate(protos):
            self._node(proto, first + i, outputs[i], scope)

    def _declare(
        self, proto: NodeProto, number: int, scope: _Scope, bound: Mapping[str, Value]
    ) -> list[Value]:
        label = _label(number, proto)
        names = [text(n) for n in proto.output]
        while names and not names[-1]:
            names.pop()
        values = []
        for name in names:
            value = bound.get(name) or Value(None, name)
            if name:
                scope.define(name, value, label)
            values.append(value)
        return values

    def _node(self, proto: NodeProto, number: int, outputs: list[Value], scope: _Scope) -> None:
        label = _label(number, proto)
        origin = (Source(number, text(proto.op_type), scope.prefix + text(proto.name), _source_line(proto)),)
        inputs = [self._value(text(n), scope, label) if n else None for n in proto.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        domain, op_type = _domain(proto.domain), text(proto.op_type)
        try:
            function = self.functions.get((domain, op_type, text(proto.overload)))
            if function is not None:
                return self._call(proto, function, inputs, outputs, scope, label)
            attrs, regions = self._attributes(proto, scope)
        except (ModelError, LimitError) as error:
            error.node = error.node or label
            raise
        if (domain, op_type) == ("", "Constant"):
            return self._constant_node(attrs, outputs, origin, scope, label)
        scope.nodes.append(
            Node(self._op(domain, op_type, scope, label), inputs, outputs, attrs, regions, origin)
        )

    def _op(self, domain: str, op_type: str, scope: _Scope, label: str) -> str:
        """The op's name in the graph; with a version where the model's own opset would give it another
        meaning.
        """
        if not op_type:
            raise ModelError("a node has no op type", node=label)
        if domain == "" and "" not in scope.opsets:
            raise ModelError(
                "the model imports no opset for ONNX's own domain, but uses its operators", node=label
            )
        version = scope.opsets.get(domain, 1)
        own = self.opsets.setdefault(domain, version)
        name = f"{domain or 'onnx'}.{op_type}"
        if version == own or _meaning(domain, op_type, version) == _meaning(domain, op_type, own) is not None:
            return name
        return f"{name}@{version}"

    def _constant_node(
        self, attrs: Mapping[str, Any], outputs: list[Value], origin: Origin, scope: _Scope, label: str
    ) -> None:
        values = {k: v for k, v in attrs.items() if k.startswith("value") or k == "sparse_value"}
        if len(values) != 1 or len(outputs) != 1:
            raise ModelError("a Constant must have one output and one value", node=label)
        ((form, value),) = values.items()
        if form not in _CONSTANT_FORMS:
            raise ModelError(f"a Constant has no attribute {form}", node=label)
        dtype = _CONSTANT_FORMS[form]
        if dtype is None:
            array = value
        elif dtype is object:
            array = np.empty(len(value) if isinstance(value, tuple) else (), object)
            array[...] = value
        else:
            array = np.array(value, dtype)
        if not isinstance(array, np.ndarray):
            raise ModelError(f"attribute {form} of a Constant must be a tensor", node=label)
        outputs[0].type = TensorType(dtypes.from_numpy(array.dtype), array.shape)
        scope.nodes.append(Node("constant", (), outputs, {"value": array}, (), origin))

    # ------------------------------------------------------------ functions

    def _call(
        self,
        proto: NodeProto,
        function: onnx.FunctionProto,
        inputs: list[Value | None],
        outputs: list[Value],
        scope: _Scope,
        label: str,
    ) -> None:
        """A call of a local function, replaced by the function's nodes."""
        key = (_domain(function.domain), text(function.name), text(function.overload))
        if key in scope.calls:
            raise ModelError(f"the local function {key[1]} calls itself")
        formal, results = [text(n) for n in function.input], [text(n) for n in function.output]
        if len(inputs) > len(formal) or len(outputs) > len(results):
            raise ModelError(
                f"the local function {key[1]} has {len(formal)} inputs and {len(results)} outputs; "
                f"a call has {len(inputs)} and {len(outputs)}"
            )
        body = scope.inner(
            parent=None,
            attributes=self._arguments(proto, function, scope),
            calls=(*scope.calls, key),
            prefix=f"{scope.prefix}{text(proto.name) or key[1]}/",
            opsets=_opsets(function.opset_import) or scope.opsets,
        )
        for name, value in zip(formal, inputs + [None] * (len(formal) - len(inputs)), strict=True):
            body.define(name, value, "an input of the function")
        bound = {r: v for r, v in reversed([*zip(results, outputs)]) if r not in formal}  # noqa: B905
        self._nodes(function.node, body, bound)
        scope.nodes += body.constants + body.nodes
        for result, output in zip(results, outputs):  # noqa: B905  (a call may leave outputs out)
            self._pass_through(self._value(result, body, label), output, scope, label)

    def _pass_through(self, made: Value | None, wanted: Value, scope: _Scope, label: str) -> None:
        """Where a function returns its own input, or one value twice, an Identity makes the call's output."""
        if made is None:
            raise ModelError("a local function returns an input that its call leaves out", node=label)
        if made is not wanted:
            scope.nodes.append(Node("onnx.Identity", [made], [wanted]))

    def _arguments(
        self, proto: NodeProto, function: onnx.FunctionProto, scope: _Scope
    ) -> dict[str, Attribute]:
        """The attributes that a function sees: its defaults, then what the call gives."""
        found = {text(a.name): (a, scope) for a in function.attribute_proto}
        for given in proto.attribute:
            resolved = _resolve(given, scope)
            if resolved is not None:
                found[text(given.name)] = resolved
        return found

    # ------------------------------------------------------------ attributes

    def _attributes(self, proto: NodeProto, scope: _Scope) -> tuple[dict[str, Any], list[Graph]]:
        attrs: dict[str, Any] = {}
        regions: dict[str, Graph] = {}
        for given in proto.attribute:
            name = text(given.name)
            if name in attrs or name in regions:
                raise ModelError(f"attribute {name!r} is given twice")
            resolved = _resolve(given, scope)
            if resolved is None:
                continue
            value = self._attribute(*resolved, name)
            if isinstance(value, Graph):
                regions[name] = value
            else:
                attrs[name] = value
        if regions:
            attrs["regions"] = tuple(regions)
        return attrs, list(regions.values())

    def _attribute(self, a: AttributeProto, scope: _Scope, name: str) -> Any:
        """An attribute as a Python value: int, float, str, a tuple of those, an array, or the Graph of a
        subgraph.
        """
        kind = _kind(a)
        if kind == AttributeProto.GRAPH:
            return self._region(a.g, scope)
        if kind == AttributeProto.TENSOR:
            return array_of(a.t, self.folder, f"attribute {name!r}")
        if kind == AttributeProto.TENSORS:
            return tuple(array_of(t, self.folder, f"attribute {name!r}") for t in a.tensors)
        if kind == AttributeProto.SPARSE_TENSOR:
            return dense(a.sparse_tensor, self.folder)
        if kind not in _PLAIN:
            raise ModelError(f"attribute {name!r} has a type that no operator uses ({kind})")
        return _PLAIN[kind](a)


_CONSTANT_FORMS: dict[str, Any] = {
    "value": None, "sparse_value": None, "value_float": np.float32, "value_floats": np.float32,
    "value_int": np.int64, "value_ints": np.int64, "value_string": object, "value_strings": object,
}  # fmt: skip

_PLAIN: dict[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda a: float(a.f),
    AttributeProto.INT: lambda a: int(a.i),
    AttributeProto.STRING: lambda a: text(a.s),
    AttributeProto.FLOATS: lambda a: tuple(float(x) for x in a.floats),
    AttributeProto.INTS: lambda a: tuple(int(x) for x in a.ints),
    AttributeProto.STRINGS: lambda a: tuple(text(s) for s in a.strings),
    AttributeProto.TYPE_PROTO: lambda a: text_format.MessageToString(a.tp, as_one_line=True),
}

# How the type of an attribute shows in files that are too old to state it.
_FIELD_KINDS = (
    ("f", AttributeProto.FLOAT),
    ("i", AttributeProto.INT),
    ("s", AttributeProto.STRING),
    ("t", AttributeProto.TENSOR),
    ("g", AttributeProto.GRAPH),
    ("sparse_tensor", AttributeProto.SPARSE_TENSOR),
    ("tp", AttributeProto.TYPE_PROTO),
)
_LIST_KINDS = (
    ("floats", AttributeProto.FLOATS),
    ("ints", AttributeProto.INTS),
    ("strings", AttributeProto.STRINGS),
)


def _kind(a: AttributeProto) -> int:
    if a.type:
        return int(a.type)
    single = next((kind for name, kind in _FIELD_KINDS if a.HasField(name)), None)
    listed = next((kind for name, kind in _LIST_KINDS if len(getattr(a, name))), AttributeProto.INTS)
    return int(listed if single is None else single)


def _resolve(a: AttributeProto, scope: _Scope) -> Attribute | None:
    """An attribute, or the one that it refers to in the call of a function; None where the call does not give
    it.
    """
    reference = text(a.ref_attr_name)
    if not reference:
        return a, scope
    if scope.attributes is None:
        raise ModelError(f"attribute {text(a.name)!r} refers to {reference!r} outside of a function")
    return scope.attributes.get(reference)


def _constant(array: np.ndarray, name: str, origin: Origin, nodes: list[Node]) -> Value:
    value = Value(TensorType(dtypes.from_numpy(array.dtype), array.shape), name)
    nodes.append(Node("constant", (), [value], {"value": array}, (), origin))
    return value


def _ordered(nodes: list[Node]) -> list[Node]:
    """The nodes in topological order: as they stand, where that is one."""
    seen: set[int] = set()
    made_here = {v.id for n in nodes for v in n.outputs}
    for node in nodes:
        if any(v.id in made_here and v.id not in seen for v in node.operands):
            break
        seen.update(v.id for v in node.outputs)
    else:
        return nodes
    try:
        return topological(nodes)
    except ValueError as error:
        raise ModelError(f"the graph has a cycle: {_cycle(nodes)}", cause=error) from error


def _cycle(nodes: list[Node]) -> str:
    position = {id(n): i for i, n in enumerate(nodes)}
    g: nx.DiGraph = nx.DiGraph()
    for i, n in enumerate(nodes):
        g.add_edges_from(
            (position[id(v.node)], i) for v in n.operands if v.node is not None and id(v.node) in position
        )
    sources = [nodes[a].origin for a, _ in nx.find_cycle(g)]
    names = [f"{o[0]} {o[0].name!r}" if o else "Identity" for o in sources]
    return " -> ".join([*names[:8], *(["..."] if len(names) > 8 else []), names[0]])


def _declared(info: ValueInfoProto) -> list[Any] | None:
    """The type that the model declares for an output, `["float32", ["batch", 10]]`; None for a dim (or shape)
    unknown.
    """
    tensor = info.type.tensor_type
    dims = [
        int(d.dim_value) if d.HasField("dim_value") else text(d.dim_param) or None for d in tensor.shape.dim
    ]
    return [
        dtype_of(tensor.elem_type, f"output {text(info.name)!r}").name,
        dims if tensor.HasField("shape") else None,
    ]


# ---------------------------------------------------------------- input shapes


class _Dims:
    """The symbols of a model's dynamic dims: one for each name, one for each unnamed dim."""

    def __init__(self, graph: GraphProto, overrides: InputShapes) -> None:
        self.names: dict[str, str] = {}  # symbol -> the model's name of the dim
        self._symbols: dict[str, Dim] = {}
        self._fixed: dict[str, int] = {}
        self._overrides = overrides
        self._count = 0
        declared = {text(i.name): i for i in graph.input}
        unknown = sorted(set(overrides) - set(declared))
        if unknown:
            raise InputError(
                f"input_shapes names {', '.join(map(repr, unknown))}; the model's inputs are {list(declared)}"
            )
        for name, shape in overrides.items():
            self._fix(name, declared[name], shape)

    def _fix(self, name: str, info: ValueInfoProto, shape: Sequence[int | str | None]) -> None:
        """Takes note of the sizes given for named dims, which then hold for every input."""
        if any(isinstance(d, int) and not 0 <= d <= MAX_DIM for d in shape):
            raise InputError(f"input {name!r}: {tuple(shape)} has a size outside of 0 to 2**40")
        tensor = info.type.tensor_type
        if not tensor.HasField("shape"):
            return
        if len(shape) != len(tensor.shape.dim):
            raise InputError(
                f"input {name!r} has rank {len(tensor.shape.dim)}; input_shapes gives it {tuple(shape)}"
            )
        for dim, size in zip(tensor.shape.dim, shape, strict=True):
            param = _dim_name(dim)
            if param and isinstance(size, int) and self._fixed.setdefault(param, size) != size:
                raise InputError(
                    f"input_shapes gives the dim {param!r} the sizes {self._fixed[param]} and {size}"
                )

    def type_of(self, info: ValueInfoProto) -> TensorType:
        """The type of a graph input."""
        name = text(info.name)
        kind = info.type.WhichOneof("value")
        if kind != "tensor_type":
            raise ModelError(
                f"input {name!r} is a {(kind or 'value without a type').replace('_type', '')}, not a tensor"
            )
        tensor = info.type.tensor_type
        dtype = dtype_of(tensor.elem_type, f"input {name!r}")
        given = self._overrides.get(name)
        if not tensor.HasField("shape"):
            if given is None:
                raise ModelError(f"input {name!r} has no rank in the model: give its shape in input_shapes")
            return TensorType(dtype, tuple(self._symbol(d) for d in given))
        wanted = [None] * len(tensor.shape.dim) if given is None else list(given)
        return TensorType(
            dtype, tuple(self._dim(name, d, w) for d, w in zip(tensor.shape.dim, wanted, strict=True))
        )

    def _dim(self, name: str, dim: onnx.TensorShapeProto.Dimension, wanted: int | str | None) -> Dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            size = int(dim.dim_value)
            if size > MAX_DIM:
                raise LimitError(f"input {name!r} claims a dim of {size}")
            if isinstance(wanted, int) and wanted != size:
                raise InputError(
                    f"input {name!r} has a dim of {size} in the model; input_shapes gives it {wanted}"
                )
            return size
        param = _dim_name(dim)
        if param in self._fixed:
            return self._fixed[param]
        return self._symbol(wanted if wanted is not None else param or None)

    def _symbol(self, wanted: int | str | None) -> Dim:
        """A size as it is; the symbol of a name; a new symbol for a dim without one."""
        if isinstance(wanted, int):
            return wanted
        if wanted is None or wanted not in self._symbols:
            symbol = Sym(f"s{self._count}")
            if wanted is None:
                self._count += 1
                return symbol
            self._symbols[wanted] = symbol
            self.names[f"s{self._count}"] = wanted
            self._count += 1
        return self._symbols[wanted]


def _dim_name(dim: onnx.TensorShapeProto.Dimension) -> str:
    """The dim's name; empty for one such as "?", which exporters give to every dim that they do not know."""
    name = text(dim.dim_param)
    return name if any(c.isalnum() for c in name) else ""
