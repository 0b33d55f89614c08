"""What a node gives: onnxruntime runs it alone, optimizations off; onnx's reference evaluator where that cannot.

Oracle().run(node, opset, inputs, constants)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = np.ndarray[Any, Any]
Value = Array | list[Array]
NEWEST = 26  # the highest opset that the installed onnxruntime reads
MOST_SESSIONS = 2000

# Types that onnxruntime computes with and does not take from numpy: they travel as another type, cast inside.
_CARRIERS: dict[np.dtype[Any], type] = {
    np.dtype(ml_dtypes.bfloat16): np.float32,
    np.dtype(ml_dtypes.float8_e4m3fn): np.float32,
    np.dtype(ml_dtypes.float8_e5m2): np.float32,
    np.dtype(ml_dtypes.int4): np.int8,
    np.dtype(ml_dtypes.uint4): np.uint8,
}
_NO_KERNEL = (
    ort.capi.onnxruntime_pybind11_state.NotImplemented,
    ort.capi.onnxruntime_pybind11_state.InvalidGraph,
)


class Refused(Exception):
    """No oracle runs the node: it is not valid, or nobody has a kernel."""


def onnx_type(dtype: np.dtype[Any]) -> int:
    """The number of a dtype in a TensorProto."""
    return helper.np_dtype_to_tensor_dtype(dtype)


def free_names(graph: onnx.GraphProto) -> Iterator[str]:
    """What a subgraph reads from outside."""
    own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    for node in graph.node:
        yield from (n for n in reads(node) if n not in own)
        own.update(node.output)
    yield from (o.name for o in graph.output if o.name not in own)


def reads(node: onnx.NodeProto) -> list[str]:
    """The names that a node reads, its subgraphs included, each once."""
    found = [n for n in node.input if n]
    for a in node.attribute:
        if a.type == onnx.AttributeProto.GRAPH:
            found += free_names(a.g)
    return list(dict.fromkeys(found))


def value_info(name: str, value: Value, dims: list[int | str] | None = None) -> onnx.ValueInfoProto:
    """The type of a value; its rank alone where `dims` are left out."""
    if isinstance(value, list):
        element = onnx_type(value[0].dtype) if value else onnx.TensorProto.FLOAT
        return helper.make_value_info(
            name, helper.make_sequence_type_proto(helper.make_tensor_type_proto(element, None))
        )
    shape = [None] * value.ndim if dims is None else dims
    return helper.make_tensor_value_info(name, onnx_type(value.dtype), shape)


def _is_wrong_in_onnxruntime(node: onnx.NodeProto, values: Mapping[str, Value]) -> bool:
    """Where onnxruntime is known to answer wrongly (docs/accuracy.md), onnx's reference evaluator is asked instead."""
    if node.op_type in ("QLinearMatMul", "MatMulInteger"):  # sums of nothing
        return np.shape(values[node.input[0]])[-1] == 0
    if node.op_type.startswith(("Arg", "Reduce")) and node.op_type != "ReduceMean":  # of nothing, which has no mean
        return np.size(values[node.input[0]]) == 0
    return False


# Where onnx's reference evaluator is wrong: of some ranks, types or attributes.
_NOT_BY_REFERENCE = frozenset(["Hardmax", "Loop", "Scan", "GlobalMaxPool", "GlobalAveragePool", "LRN", "Unique"])


class Oracle:
    """Runs nodes alone, and remembers their sessions."""

    def __init__(self, reference_only: bool = False) -> None:
        self._sessions: dict[bytes, Callable[[dict[str, Value]], list[Value]] | None] = {}
        self._reference_only = reference_only

    def run(
        self, node: onnx.NodeProto, opset: int, values: Mapping[str, Value], constants: Mapping[str, Array]
    ) -> list[Value]:
        """The outputs that have a name. Raises Refused."""
        names = reads(node)
        given = {n: values[n] for n in names if n not in constants}
        weights = [numpy_helper.from_array(constants[n], n) for n in names if n in constants]
        infos = [value_info(n, v) for n, v in given.items()]
        ends = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = helper.make_graph([node], "node", infos, ends, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
        wrong = _is_wrong_in_onnxruntime(node, values)
        key = model.SerializeToString() + (b"r" if wrong else b"")
        if key not in self._sessions:
            if len(self._sessions) >= MOST_SESSIONS:
                self._sessions.clear()
            self._sessions[key] = self._runner(model, given, opset, wrong)
        run = self._sessions[key]
        if run is None:
            raise Refused(f"{node.op_type}: no kernel")
        return run(given)

    def _runner(
        self, model: onnx.ModelProto, given: Mapping[str, Value], opset: int, wrong: bool
    ) -> Callable[[dict[str, Value]], list[Value]] | None:
        node = model.graph.node[0]
        if not wrong and not self._reference_only and onnx.defs.get_schema(node.op_type, opset).since_version <= NEWEST:
            found = _onnxruntime(model, given, min(opset, NEWEST))
            if found is not None:
                return found
        if node.op_type in _NOT_BY_REFERENCE:
            return None
        try:
            evaluator = ReferenceEvaluator(model)
        except Exception:  # it raises whatever its ops raise
            return None
        return lambda values: _reference(evaluator, values)


def _reference(evaluator: ReferenceEvaluator, values: dict[str, Value]) -> list[Value]:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [a if isinstance(a, list) else np.asarray(a) for a in evaluator.run(None, values)]
    except Exception as error:
        raise Refused(str(error)) from error


def _onnxruntime(
    model: onnx.ModelProto, given: Mapping[str, Value], opset: int
) -> Callable[[dict[str, Value]], list[Value]] | None:
    carried = _with_carriers(model, given)
    carried.opset_import[0].version = opset
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(carried.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except _NO_KERNEL:
        return None
    except Exception as error:
        raise Refused(str(error)) from error

    def run(values: dict[str, Value]) -> list[Value]:
        try:
            sent = dict(_carried(n, v) for n, v in values.items())
            outputs = session.run(None, sent)
        except Exception as error:
            raise Refused(str(error)) from error
        return [a if isinstance(a, list) else np.asarray(a) for a in outputs]

    narrow = _narrow_outputs(model, given)
    if not narrow:
        return run
    return lambda values: [
        a if isinstance(a, list) else a.astype(narrow.get(k, a.dtype)) for k, a in enumerate(run(values))
    ]


def _carried(name: str, value: Value) -> tuple[str, Value]:
    carrier = None if isinstance(value, list) else _CARRIERS.get(value.dtype)
    return (name, value) if carrier is None or isinstance(value, list) else (f"{name}__", value.astype(carrier))


def _narrow_outputs(model: onnx.ModelProto, given: Mapping[str, Value]) -> dict[int, np.dtype[Any]]:
    """Which outputs have a type that travels as another, by position: as type inference says."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=False)
    except onnx.shape_inference.InferenceError:
        return {}
    types = [o.type.tensor_type.elem_type for o in inferred.graph.output]
    known = {onnx_type(d): d for d in _CARRIERS}
    return {k: known[t] for k, t in enumerate(types) if t in known}


def _with_carriers(model: onnx.ModelProto, given: Mapping[str, Value]) -> onnx.ModelProto:
    """The model with inputs and outputs that numpy and onnxruntime both hold."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    graph, narrow = out.graph, _narrow_outputs(model, given)
    before, after = [], []
    for info in graph.input:
        value = given[info.name]
        carrier = None if isinstance(value, list) else _CARRIERS.get(value.dtype)
        if carrier is not None and not isinstance(value, list):
            before.append(helper.make_node("Cast", [f"{info.name}__"], [info.name], to=onnx_type(value.dtype)))
            info.name = f"{info.name}__"
            info.type.tensor_type.elem_type = onnx_type(np.dtype(carrier))
    for k, dtype in narrow.items():
        name = graph.output[k].name
        after.append(helper.make_node("Cast", [name], [f"{name}__"], to=onnx_type(np.dtype(_CARRIERS[dtype]))))
        graph.output[k].name = f"{name}__"
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return out
