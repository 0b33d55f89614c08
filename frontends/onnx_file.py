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
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
)

from onnxc.errors import InputError, LimitError, ModelError
from onnxc.frontends.onnx_attributes import constant_array, kind_of, resolve, value_of
from onnxc.frontends.onnx_dims import Dims, InputShapes, check_declared, declared_names
from onnxc.frontends.onnx_functions import Functions, arguments, check_size, key_of
from onnxc.frontends.onnx_order import ordered
from onnxc.frontends.onnx_scope import (
    Scope,
    detached_values,
    domain_of,
    folded_weights,
    label_of,
    meaning,
    noted_parameters,
    opsets_of,
    padded_embeddings,
    source_line,
)
from onnxc.frontends.onnx_tensors import DataFolder, array_of, dense, dtype_of, open_regular, text
from onnxc.ir import dtypes
from onnxc.ir.graph import DECLARED, Graph, Node, Source, Value
from onnxc.ir.types import OptionalType, SequenceType, TensorType, contradict

__all__ = ["InputShapes", "Model", "load"]

MAX_IR_VERSION = 14
MAX_BYTES = 1 << 31  # protobuf's own limit
_OP_TYPE = frozenset(".@")  # what no type of an operator has: it is an identifier
FIXED = "fixed_inputs"  # of the metadata: names of inputs that have an initializer, and are constants
SAVED = b"\x89ONNXC"  # how a saved compiled model begins (`onnxc.runtime.package`)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that stands for one which Git LFS keeps

Model = Union[str, "os.PathLike[str]", bytes, ModelProto]


def load(
    model: Model,
    *,
    base_dir: str | os.PathLike[str] | None = None,
    input_shapes: InputShapes | None = None,
    keep_inputs: Sequence[str] = (),
    memory: int | None = None,
) -> Graph:
    """The graph of an ONNX model.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        base_dir: the folder of external data, for bytes and ModelProto (a path's own folder is known).
        input_shapes: sizes for dynamic dims, as `{"x": (1, 3, 224, None)}`; None leaves a dim as the model
            has it, a string names it. A size given for a named dim holds wherever the model uses the name.
        keep_inputs: inputs that stay inputs although the model has an initializer (a default) for them.
        memory: bytes that weights in other files may take; None: any number.

    Raises ModelError for a model that is not valid, LimitError for one that claims absurd sizes, InputError
    for `input_shapes` or `keep_inputs` that do not fit the model.
    """
    proto, folder = read_model(model, base_dir)
    if folder is not None:
        folder.limit = memory
    try:
        return _Importer(proto, folder, input_shapes or {}, keep_inputs).graph()
    except (UnicodeError, RecursionError) as error:
        raise ModelError(f"the model cannot be read: {error}", cause=error) from error


def read_model(model: Model, base_dir: str | os.PathLike[str] | None) -> tuple[ModelProto, DataFolder | None]:
    """A model, without what lies in other files, and where these are. Raises ModelError for what is no ONNX file."""
    folder = None if base_dir is None else DataFolder(os.fspath(base_dir), os.fspath(base_dir))
    if isinstance(model, ModelProto):
        return model, folder
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _parse(bytes(model), "the model"), folder
    path = path_of(model)
    if folder is None:
        folder = DataFolder.of(path)
    with os.fdopen(open_model(path), "rb") as file:
        try:
            content = file.read()
        except OSError as error:
            raise ModelError(f"model {path!r} cannot be read: {error.strerror}", cause=error) from error
    return _parse(content, f"model {path!r}"), folder


def open_model(path: str) -> int:
    """A descriptor of a file that may be a model: regular, and no larger than protobuf reads; else ModelError."""
    handle = open_regular(path, f"model {path!r}")
    if os.fstat(handle).st_size < MAX_BYTES:
        return handle
    os.close(handle)
    raise ModelError(f"model {path!r} is over 2 GB, which protobuf cannot hold: store its weights as external data")


def path_of(model: object) -> str:
    """The path of a model that is given by one. Raises InputError for what is no model at all, ModelError for what no
    path can be.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(f"a model is a path, the bytes of an ONNX file or a ModelProto, and not a {_type_of(model)}")
    path = os.fsdecode(model)
    try:
        known = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        known = False
    if not known:
        raise ModelError(f"model {path!r} cannot be opened: no path has a null byte, or what is no character")
    return path


def _type_of(model: object) -> str:
    """The type of what is no model, and what was meant."""
    kind = type(model)
    if isinstance(model, GraphProto):
        return "GraphProto (onnx.helper.make_model makes a model of it)"
    if any(t.__module__.startswith("torch.nn.") for t in kind.__mro__):
        return f"{kind.__name__} (onnxc.from_torch compiles PyTorch modules)"
    return "value of None" if model is None else kind.__name__


def _parse(data: bytes, what: str) -> ModelProto:
    if data.startswith(LFS_POINTER):
        raise ModelError(f"{what} is a pointer of Git LFS, not the model: `git lfs pull` fetches that")
    if data.startswith(SAVED):
        raise ModelError(f"{what} is a compiled model, or what is left of one: onnxc.load opens those, and `onnxc run`")
    try:
        model: ModelProto = ModelProto.FromString(data)
        return model
    except (DecodeError, RuntimeError, ValueError) as error:
        hint = "; onnxc.load opens compiled models" if what.endswith(".onnxc'") else ""
        raise ModelError(f"{what} is not an ONNX file, or is truncated ({error}){hint}", cause=error) from error


def _check_versions(model: ModelProto) -> None:
    if not model.HasField("graph"):
        raise ModelError("the model has no graph (it is empty, or not an ONNX file)")
    if not 1 <= model.ir_version <= MAX_IR_VERSION:
        raise ModelError(f"the model has IR version {model.ir_version}; versions 1 to {MAX_IR_VERSION} are supported")
    if not model.opset_import:
        raise ModelError("the model does not say which opset it uses (opset_import is empty)")


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
        self.opsets = opsets_of(model.opset_import)
        self.functions = Functions(model)
        check_size(self.functions.inlined(model.graph.node))
        self.keep = set(keep_inputs)
        self.dims = Dims(model.graph, input_shapes)
        self.count = 0  # nodes so far
        self.declared: dict[int, str] = {}  # by value: its element type as the model declares it

    def graph(self) -> Graph:
        """The main graph, with the model's metadata."""
        proto = self.model.graph
        scope = Scope(self.opsets)
        inputs = self._inputs(proto, scope)
        types = {text(i.name): i.type for i in proto.input}
        body = self._body(proto, scope, inputs)
        body.dim_names = self.dims.names
        body.defaults = self._defaults(proto, inputs)
        body.metadata = {
            "opsets": dict(self.opsets),
            "ir_version": int(self.model.ir_version),
            "producer": f"{text(self.model.producer_name)} {text(self.model.producer_version)}".strip(),
            "output_types": {text(o.name): _declared(o) for o in proto.output if _is_typed(o)},
            "input_types": {v.name: kind for v in inputs if (kind := _unranked(v, types[v.name])) is not None},
            "properties": {text(p.key): text(p.value) for p in self.model.metadata_props},
        }
        fixed = sorted(set(types) - {v.name for v in inputs})
        noted = {
            "folded": folded_weights(proto), "parameters": noted_parameters(proto),
            "detached": detached_values(proto), "padding": padded_embeddings(proto), FIXED: fixed,
        }  # fmt: skip
        body.metadata |= {key: found for key, found in noted.items() if found}
        return body

    def _inputs(self, proto: GraphProto, scope: Scope) -> list[Value]:
        """Graph inputs, without those that have an initializer."""
        names = [text(i.name) for i in proto.input]
        unknown = sorted(self.keep - set(names))
        if unknown:
            raise InputError(f"keep_inputs names {', '.join(map(repr, unknown))}; the model's inputs are {names}")
        weights = {text(t.name): (t.data_type, t.dims) for t in proto.initializer}
        weights |= {text(t.values.name): (t.values.data_type, t.dims) for t in proto.sparse_initializer}
        found = []
        for info, name in zip(proto.input, names, strict=True):
            if name in weights:
                check_declared(info, *weights[name])
            if name in weights and name not in self.keep:
                continue
            value = Value(self.dims.type_of(info), name)
            scope.define(name, value, "a graph input")
            found.append(value)
        return found

    def _defaults(self, proto: GraphProto, inputs: Sequence[Value]) -> dict[str, np.ndarray[Any, Any]]:
        """The values of inputs that have an initializer, by name; of two with one name the last counts."""
        own = {v.name for v in inputs}
        found = {name: self._array(t, name) for t in proto.initializer if (name := text(t.name)) in own}
        return found | {n: self._array(t, n) for t in proto.sparse_initializer if (n := text(t.values.name)) in own}

    def _array(self, tensor: TensorProto | SparseTensorProto, name: str) -> np.ndarray[Any, Any]:
        if isinstance(tensor, TensorProto):
            return array_of(tensor, self.folder, f"initializer {name!r}")
        return dense(tensor, self.folder)

    def _region(self, proto: GraphProto, outer: Scope) -> Graph:
        """A subgraph (a branch or a loop's body). Its inputs get their types from the node that holds it.

        What it declares itself is in the metadata, for operators that make inputs of their own, and for loops that
        never run.
        """
        scope = outer.inner()
        weights = {text(t.name) for t in proto.initializer}
        inputs = [Value(None, text(i.name)) for i in proto.input if text(i.name) not in weights]
        for value in inputs:
            scope.define(value.name, value, "an input of the subgraph")
        region = self._body(proto, scope, inputs)
        region.metadata["input_types"] = {text(i.name): _declared(i) for i in proto.input if _is_typed(i)}
        region.metadata["output_types"] = {text(o.name): _declared(o) for o in proto.output if _is_typed(o)}
        return region

    def _body(self, proto: GraphProto, scope: Scope, inputs: list[Value]) -> Graph:
        self._weights(proto, scope)
        scope.declared = declared_names(proto)
        self._nodes(proto.node, scope, {})
        names = [text(o.name) for o in proto.output]
        outputs = [self._value(name, scope, "the graph's outputs") for name in names]
        if not outputs and scope.parent is None:
            raise ModelError("the graph has no outputs")
        nodes = ordered(scope.constants + scope.nodes)
        return Graph(inputs, [v for v in outputs if v is not None], nodes, names, text(proto.name))

    def _weights(self, proto: GraphProto, scope: Scope) -> None:
        """Initializers, to be read when something uses them. Of two with one name the last counts, as elsewhere."""
        tensors = [(text(t.name), t) for t in proto.initializer]
        sparse = [(text(t.values.name), t) for t in proto.sparse_initializer]
        scope.weights = {name: t for name, t in (*tensors, *sparse) if name and name not in scope.names}

    def _value(self, name: str, scope: Scope, reader: str) -> Value | None:
        """The value of a name, from this scope or one around it."""
        if not name:
            raise ModelError(f"{reader}: a name is empty")
        level: Scope | None = scope
        while level is not None:
            if name in level.weights:
                self._materialize(name, level)
            if name in level.names:
                return level.names[name]
            level = level.parent
        raise ModelError(f"{name!r} is used, but nothing in the model defines it", node=reader)

    def _materialize(self, name: str, scope: Scope) -> None:
        array = self._array(scope.weights.pop(name), name)
        value = Value(TensorType(dtypes.from_numpy(array.dtype), array.shape), name)
        scope.constants.append(Node("constant", (), [value], {"value": array}))
        scope.define(name, value, "an initializer")

    # ------------------------------------------------------------ nodes

    def _nodes(self, protos: Sequence[NodeProto], scope: Scope, bound: Mapping[str, Value]) -> None:
        """Imports a list of nodes. Outputs are declared first, so that the list may stand in any order."""
        first = self.count
        self.count += len(protos)
        check_size(self.count)
        outputs = [self._declare(p, first + i, scope, bound) for i, p in enumerate(protos)]
        for i, proto in enumerate(protos):
            self._node(proto, first + i, outputs[i], scope)

    def _declare(self, proto: NodeProto, number: int, scope: Scope, bound: Mapping[str, Value]) -> list[Value]:
        label = label_of(number, proto)
        names = [text(n) for n in proto.output]
        while names and not names[-1]:
            names.pop()
        values = []
        for name in names:
            value = bound.get(name) or Value(None, name)
            if name:
                scope.define(name, value, label)
            if name in scope.declared:
                self.declared[value.id] = scope.declared[name]
            values.append(value)
        return values

    def _node(self, proto: NodeProto, number: int, outputs: list[Value], scope: Scope) -> None:
        label = label_of(number, proto)
        origin = (Source(number, text(proto.op_type), scope.path(text(proto.name)), source_line(proto)),)
        inputs = [self._value(text(n), scope, label) if n else None for n in proto.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        domain, op_type = domain_of(proto.domain), text(proto.op_type)
        try:
            function = self.functions.called(proto)
            if function is not None:
                return self._call(proto, function, inputs, outputs, scope, label)
            attrs, regions = self._attributes(proto, scope)
        except (ModelError, LimitError) as error:
            error.node = error.node or label
            raise
        if (domain, op_type) == ("", "Constant"):
            array = constant_array(attrs, len(outputs), label)
            outputs[0].type = TensorType(dtypes.from_numpy(array.dtype), array.shape)
            said = self.declared.get(outputs[0].id, "?")
            if contradict(said, outputs[0].dtype.name):
                raise ModelError(f"it is {outputs[0].t}, but the model declares it as {said}", node=label)
            scope.nodes.append(Node("constant", (), outputs, {"value": array}, (), origin))
            return
        op = self._op(domain, op_type, scope, label)
        scope.nodes.append(Node(op, inputs, outputs, attrs | self._types(outputs), regions, origin))

    def _types(self, outputs: Sequence[Value]) -> dict[str, Any]:
        """What the model declares of a node's outputs, as an attribute; none where that is nothing."""
        types = tuple(self.declared.get(v.id, "") for v in outputs)
        return {DECLARED: types} if any(types) else {}

    def _op(self, domain: str, op_type: str, scope: Scope, label: str) -> str:
        """The op's name in the graph; with a version where the model's own opset would give it another meaning."""
        if not op_type:
            raise ModelError("a node has no op type", node=label)
        if domain == "onnx" or "@" in domain or not _OP_TYPE.isdisjoint(op_type):  # or the op's name means another
            raise ModelError(f"there can be no operator {op_type!r} of the domain {domain!r}", node=label)
        if domain == "" and "" not in scope.opsets:
            raise ModelError("the model imports no opset for ONNX's own domain, but uses its operators", node=label)
        version = scope.opsets.get(domain, 1)
        own = self.opsets.setdefault(domain, version)
        name = f"{domain or 'onnx'}.{op_type}"
        if version == own or meaning(domain, op_type, version) == meaning(domain, op_type, own) is not None:
            return name
        return f"{name}@{version}"

    # ------------------------------------------------------------ functions

    def _call(
        self,
        proto: NodeProto,
        function: onnx.FunctionProto,
        inputs: list[Value | None],
        outputs: list[Value],
        scope: Scope,
        label: str,
    ) -> None:
        """A call of a local function, replaced by the function's nodes."""
        key = key_of(function)
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
            attributes=arguments(proto, function, scope),
            calls=(*scope.calls, key),
            prefix=scope.path(text(proto.name) or key[1]) + "/",
            opsets=opsets_of(function.opset_import) or scope.opsets,
        )
        for name, value in zip(formal, inputs + [None] * (len(formal) - len(inputs)), strict=True):
            body.define(name, value, "an input of the function")
        bound = {r: v for r, v in reversed([*zip(results, outputs)]) if r not in formal}  # noqa: B905
        self._nodes(function.node, body, bound)
        scope.nodes += body.constants + body.nodes
        for result, output in zip(results, outputs):  # noqa: B905  (a call may leave outputs out)
            self._pass_through(self._value(result, body, label), output, scope, label)

    def _pass_through(self, made: Value | None, wanted: Value, scope: Scope, label: str) -> None:
        """Where a function returns its own input, or one value twice, an Identity makes the call's output."""
        if made is None:
            raise ModelError("a local function returns an input that its call leaves out", node=label)
        if made is not wanted:
            scope.nodes.append(Node("onnx.Identity", [made], [wanted], self._types([wanted])))

    # ------------------------------------------------------------ attributes

    def _attributes(self, proto: NodeProto, scope: Scope) -> tuple[dict[str, Any], list[Graph]]:
        """A node's attributes as Python values, and its subgraphs."""
        attrs: dict[str, Any] = {}
        regions: dict[str, Graph] = {}
        for given in proto.attribute:
            name = text(given.name)
            if name in attrs or name in regions:
                raise ModelError(f"attribute {name!r} is given twice")
            resolved = resolve(given, scope)
            if resolved is None:
                continue
            found, around = resolved
            if kind_of(found) == AttributeProto.GRAPH:
                regions[name] = self._region(found.g, around)
            else:
                attrs[name] = value_of(found, name, self.folder)
        if regions:
            attrs["regions"] = tuple(regions)
        return attrs, list(regions.values())


def _unranked(value: Value, declared: TypeProto) -> list[Any] | None:
    """What the model says of an input with a tensor whose rank it leaves open: `["sequence", ["any", "float32"]]`.

    None where the type of the input says it all.
    """
    t = value.type
    while isinstance(t, (SequenceType, OptionalType)):
        t = t.element
    return _kind(declared, value.name) if t is None else None


def _kind(declared: TypeProto, name: str) -> list[Any]:
    if declared.HasField("sequence_type"):
        return ["sequence", _kind(declared.sequence_type.elem_type, name)]
    if declared.HasField("optional_type"):
        return ["optional", _kind(declared.optional_type.elem_type, name)]
    return ["any", dtype_of(declared.tensor_type.elem_type, f"input {name!r}").name]


def _is_typed(info: ValueInfoProto) -> bool:
    return bool(info.type.tensor_type.elem_type)


def _declared(info: ValueInfoProto) -> list[Any] | None:
    """The type that the model declares for an output, `["float32", ["batch", 10]]`; None for what it leaves open."""
    tensor = info.type.tensor_type
    dims = [int(d.dim_value) if d.HasField("dim_value") else text(d.dim_param) or None for d in tensor.shape.dim]
    return [
        dtype_of(tensor.elem_type, f"output {text(info.name)!r}").name,
        dims if tensor.HasField("shape") else None,
    ]
