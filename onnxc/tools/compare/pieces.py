"""An ONNX file as nodes and tensors, and parts of it as ONNX models of their own.

    source = SourceModel("model.onnx")             # weights stay in their files until a piece needs them
    piece = source.piece([3, 4], feeds, ["y"])     # nodes 3 and 4, fed with arrays, as a ModelProto

Pieces are run one after the other by whatever engine: so a model is compared in little more memory than its largest
piece takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, inliner, numpy_helper

from onnxc.errors import InputError, ModelError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_scope import source_line
from onnxc.frontends.onnx_tensors import array_of
from onnxc.ir import dtypes
from onnxc.runtime.mapped import forget

Array = np.ndarray[Any, Any]
ModelLike = str | os.PathLike[str] | bytes | ModelProto
CONTENT = 64  # elements of an integer tensor that goes into a piece as a constant: sizes and axes are such


def reads(node: NodeProto) -> list[str]:
    """The names that a node reads, its subgraphs included, each once."""
    found = [n for n in node.input if n]
    for a in node.attribute:
        for graph in [*([a.g] if a.type == onnx.AttributeProto.GRAPH else []), *a.graphs]:
            found += free_names(graph)
    return list(dict.fromkeys(found))


def free_names(graph: GraphProto) -> list[str]:
    """What a subgraph reads from outside."""
    own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    found: list[str] = []
    for node in graph.node:
        found += [n for n in reads(node) if n not in own]
        own.update(node.output)
    return [*found, *(o.name for o in graph.output if o.name not in own)]


class SourceModel:
    """A model as it is in its file; only the graph is in memory, not external weights.

    Attributes:
        proto: the model, weights in other files not loaded.
        nodes: in topological order; local functions are inlined.
        numbers: of each of `nodes`, its position in the file (as origins in explain() have it).
        inputs, outputs: names, without inputs that have an initializer.
        made: the position in `nodes` of the node that makes a tensor, by its name.
    """

    def __init__(self, model: ModelLike, base_dir: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self.proto, self.folder = onnx_file.read_model(model, base_dir)
        if self.proto.functions:
            self.proto = inliner.inline_local_functions(self.proto)
        graph = self.proto.graph
        self.weights: dict[str, TensorProto] = {t.name: t for t in graph.initializer}
        self.sparse = {t.values.name: t for t in graph.sparse_initializer}
        self.constants = {*self.weights, *self.sparse}
        self.inputs = [i.name for i in graph.input if i.name not in self.constants]
        self.outputs = [o.name for o in graph.output]
        order = _ordered(list(graph.node), {*self.constants, *(i.name for i in graph.input)})
        self.nodes = [graph.node[k] for k in order]
        self.numbers = order
        self.made = {o: k for k, n in enumerate(self.nodes) for o in n.output if o}
        self.reads = [reads(n) for n in self.nodes]

    @cached_property
    def float_inputs(self) -> dict[str, np.dtype[Any]]:
        """The types of inputs that are tensors of floats."""
        known = _declared(i for i in self.proto.graph.input if i.name not in self.constants)
        return {n: t.numpy for n, t in known.items() if t.is_float}

    @cached_property
    def declared_types(self) -> dict[str, np.dtype[Any]]:
        """The types of outputs and of what lies before them, as far as the model says them."""
        graph = self.proto.graph
        return {n: t.numpy for n, t in _declared([*graph.value_info, *graph.output]).items()}

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Tensors that depend on constants alone."""
        known = set(self.constants)
        for node, names in zip(self.nodes, self.reads, strict=True):
            drawn = node.op_type in ("RandomNormal", "RandomUniform") or (not names and node.op_type != "Constant")
            if all(n in known for n in names) and not drawn:
                known.update(o for o in node.output if o)
        return frozenset(known)

    @cached_property
    def depths(self) -> list[int]:
        """For each node the number of nodes on the longest path that ends with it; what is constant does not count."""
        at: dict[str, int] = {}
        found = []
        for node, names in zip(self.nodes, self.reads, strict=True):
            before = max((at.get(n, 0) for n in names), default=0)
            mine = before if all(o in self.fixed for o in node.output if o) else before + 1
            at.update(dict.fromkeys((o for o in node.output if o), mine))
            found.append(mine)
        return found

    def tensors(self) -> list[str]:
        """Every tensor that a node makes and that the inputs decide about, in order."""
        return [o for n in self.nodes for o in n.output if o and o not in self.fixed]

    def computed(self, nodes: Iterable[int]) -> list[int]:
        """Those of some nodes that depend on the inputs."""
        return [k for k in nodes if any(o not in self.fixed for o in self.nodes[k].output if o)]

    def line(self, k: int) -> str:
        """The source line that the exporter left with a node."""
        return source_line(self.nodes[k])

    def array(self, name: str) -> Array:
        """An initializer's content."""
        return array_of(self.weights[name], self.folder, f"initializer {name!r}")

    def forget(self) -> None:
        """Lets the memory of weights in files go, until they are read again."""
        if self.folder is not None:
            forget(self.folder.mapped)

    def weight_bytes(self, k: int) -> int:
        """Of the initializers that a node reads."""
        found = [self.weights[n] for n in self.reads[k] if n in self.weights]
        return sum(math.prod(t.dims) * 4 for t in found)

    @cached_property
    def total_bytes(self) -> int:
        """Of all initializers."""
        return sum(math.prod(t.dims) * 4 for t in self.weights.values())

    def cone(self, ends: Iterable[str], stop: Collection[str]) -> tuple[list[int], list[str]]:
        """The nodes between some tensors and those at which to stop (and the model's inputs), and those of the
        latter that are read. A tensor of `ends` is gone through even if it is in `stop`.
        """
        taken: set[int] = set()
        fed: dict[str, None] = {}
        pending = [e for e in ends if e in self.made]
        while pending:
            k = self.made[pending.pop()]
            if k in taken:
                continue
            taken.add(k)
            for name in self.reads[k]:
                if name in self.constants:
                    continue
                if name in stop or name not in self.made:
                    fed[name] = None
                else:
                    pending.append(name)
        return sorted(taken), list(fed)

    @cached_property
    def data_dir(self) -> str | None:
        """The folder in which all external weights lie; None where there are none, or several folders, or where it is
        not the folder that locations elsewhere in the model, which pieces have as they are, mean.
        """
        folder = self.folder
        if folder is None:
            return None
        places = {os.path.dirname(folder.path(name)) for name in {_location(t) for t in self.weights.values()} if name}
        if len(places) != 1:
            return None
        (place,) = places
        others = {_location(t) for t in [*_inner_tensors(self.nodes), *_parts(self.proto.graph.sparse_initializer)]}
        same = all(os.path.realpath(os.path.join(place, name)) == folder.path(name) for name in others if name)
        return place if same else None

    def piece(
        self, nodes: Sequence[int], feeds: Mapping[str, Any], outputs: Sequence[str], extra: Sequence[str] = (), *,
        linked: bool = False,
    ) -> ModelProto:  # fmt: skip
        """Some nodes as a model. What they read and do not make is in `feeds`; small integers become constants.
        `extra` are names of feeds that are inputs even if nothing reads them. With `linked`, external weights stay in
        their files, which lie in `data_dir`, but for small ones; else they are copied into the piece.

        Types are those of the arrays. Raises InputError for a tensor that is not fed.
        """
        constants = {k: t for k in nodes if (t := _constant(self.nodes[k])) is not None}
        self._hold(constants.values())
        chosen = [self.nodes[k] for k in nodes if k not in constants]
        own = {o for k in nodes for o in self.nodes[k].output}
        names = list(dict.fromkeys(n for k in nodes for n in self.reads[k] if n not in own))
        held = [n for n in names if n not in feeds or is_content(feeds[n])]
        fed = [n for n in names if n not in held]
        through = [n for n in outputs if n in feeds and n not in own]
        fed += [*through, *(n for n in extra if not is_content(feeds[n]))]
        inputs = [_info(n, feeds[n]) for n in dict.fromkeys(fed)]
        initializers, sparse = self._held(held, feeds, linked)
        initializers = [*constants.values(), *initializers]
        graph = helper.make_graph(chosen, "piece", inputs, [onnx.ValueInfoProto(name=o) for o in outputs], initializers)
        graph.sparse_initializer.extend(sparse)
        if not linked:
            self._hold([*_parts(graph.sparse_initializer), *_inner_tensors(graph.node)])
        model = helper.make_model(graph, opset_imports=self.proto.opset_import)
        model.ir_version = self.proto.ir_version
        return model

    def _held(
        self, names: Sequence[str], feeds: Mapping[str, Any], linked: bool
    ) -> tuple[list[TensorProto], list[SparseTensorProto]]:
        """What a piece holds itself: weights, and feeds whose content a node may have to know."""
        dense, sparse = [], []
        for name in names:
            if name in feeds:
                dense.append(numpy_helper.from_array(np.asarray(feeds[name], order="C"), name))
            elif name in self.weights:
                dense.append(self._link(name) if linked else self._tensor(name))
            elif name in self.sparse:
                sparse.append(self.sparse[name])
            else:
                raise InputError(f"a part of the model reads {name!r}, for which there is no value")
        return dense, sparse

    def _hold(self, tensors: Iterable[TensorProto]) -> None:
        """Copies what lies in other files into tensors."""
        for t in tensors:
            if t.data_location == TensorProto.EXTERNAL:
                t.CopyFrom(numpy_helper.from_array(array_of(t, self.folder, f"a tensor {t.name!r}"), t.name))

    def _tensor(self, name: str) -> TensorProto:
        tensor = self.weights[name]
        if tensor.data_location != TensorProto.EXTERNAL:
            return tensor
        return numpy_helper.from_array(self.array(name), name)

    def _link(self, name: str) -> TensorProto:
        """The initializer, its data where it is."""
        tensor = self.weights[name]
        if tensor.data_location != TensorProto.EXTERNAL:
            return tensor
        assert self.folder is not None
        data = self.array(name)  # checks what the model says of its place; what is mapped is not read
        if data.dtype.kind in "OV" or data.dtype == np.bool_:  # packed, or spelled otherwise in memory
            return self._tensor(name)
        if data.size <= CONTENT:  # onnxruntime does not look for sizes and axes in files
            return self._tensor(name)
        link = TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
        link.data_location = TensorProto.EXTERNAL
        said = {e.key: e.value for e in tensor.external_data}
        place = os.path.basename(self.folder.path(said["location"]))
        for key, value in (("location", place), ("offset", said.get("offset", "0")), ("length", str(data.nbytes))):
            link.external_data.add(key=key, value=value)
        return link


def _declared(values: Iterable[onnx.ValueInfoProto]) -> dict[str, dtypes.DType]:
    """The types of tensors."""
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    return {n: dtypes.BY_ONNX[t] for n, t in types.items() if t in dtypes.BY_ONNX}


def _location(tensor: TensorProto) -> str:
    """The file of a tensor whose data is external; "" for others."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return ""
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def _inner_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    """The tensors in attributes of nodes, and in their subgraphs."""
    for a in (a for node in nodes for a in node.attribute):
        yield from (a.t, *a.tensors, *_parts([a.sparse_tensor, *a.sparse_tensors]))
        for graph in (a.g, *a.graphs):
            yield from (*graph.initializer, *_parts(graph.sparse_initializer), *_inner_tensors(graph.node))


def _parts(tensors: Iterable[SparseTensorProto]) -> Iterator[TensorProto]:
    for t in tensors:
        yield from (t.values, t.indices)


def _constant(node: NodeProto) -> TensorProto | None:
    """A Constant node as an initializer; None for other nodes, and for sparse constants."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return None
    (a,) = node.attribute
    name = node.output[0]
    if a.name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(a.t)
        tensor.name = name
        return tensor
    found: Array | None = None
    if a.name in ("value_float", "value_floats"):
        found = np.array(a.f if a.name == "value_float" else a.floats, np.float32)
    elif a.name in ("value_int", "value_ints"):
        found = np.array(a.i if a.name == "value_int" else a.ints, np.int64)
    return None if found is None else numpy_helper.from_array(found, name)


def is_content(value: Any) -> bool:
    """Whether a value is what sizes and axes are: a few integers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim <= 1 and value.size <= CONTENT


def input_names(piece: ModelProto) -> list[str]:
    """What a piece is fed."""
    return [i.name for i in piece.graph.input]


def typed_outputs(piece: ModelProto, arrays: Mapping[str, Any]) -> ModelProto:
    """The piece, its outputs declared with the types of these arrays: some engines want them."""
    copy = ModelProto()
    copy.CopyFrom(piece)
    for k, output in enumerate(piece.graph.output):
        if output.name in arrays:
            copy.graph.output[k].CopyFrom(_info(output.name, arrays[output.name]))
    return copy


def _info(name: str, value: Any) -> onnx.ValueInfoProto:
    if isinstance(value, list):
        dtype = np.asarray(value[0]).dtype if value else np.dtype(np.float32)
        return helper.make_tensor_sequence_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)
    array = np.asarray(value)
    kind = TensorProto.STRING if array.dtype.kind in "OUS" else helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, list(array.shape))


def _ordered(nodes: list[NodeProto], known: set[str]) -> list[int]:
    """Positions in topological order; the file's own where it is one."""
    made = {o for n in nodes for o in n.output if o}
    pending = [(k, [n for n in reads(node) if n in made]) for k, node in enumerate(nodes)]
    order: list[int] = []
    done = set(known)
    while pending:
        later = []
        for k, names in pending:
            if all(n in done for n in names):
                order.append(k)
                done.update(nodes[k].output)
            else:
                later.append((k, names))
        if len(later) == len(pending):
            raise ModelError("the model's nodes form a cycle", node=nodes[later[0][0]].op_type)
        pending = later
    return order
