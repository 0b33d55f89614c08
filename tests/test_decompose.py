"""From an imported graph to primitives."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.errors import LimitError, ModelError, ShapeError, UnsupportedError, UnsupportedOpError
from onnxc.frontends.onnx_file import load
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret


def graph(
    nodes: list, x: list, outputs: list[str], weights: dict[str, np.ndarray] | None = None, opset: int = 20
) -> Graph:
    """The decomposed graph of nodes over one float input."""
    proto = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid(*o) for o in (("", opset), ("acme", 1), ("com.microsoft", 1))]
    return decompose(load(helper.make_model(proto, opset_imports=opsets, ir_version=10)))


def node(op: str, inputs: list[str], outputs: list[str], **attrs: object):
    return helper.make_node(op, inputs, outputs, name=f"my_{op}", **attrs)


def test_every_missing_op_is_listed():
    nodes = [
        node("Frobnicate", ["x"], ["a"], domain="acme"),
        node("Relu", ["a"], ["b"]),
        node("Nonesuch", ["b", "b"], ["y"]),
    ]
    with pytest.raises(UnsupportedOpError) as caught:
        graph(nodes, [2], ["y"])
    assert caught.value.missing == [
        ("my_Frobnicate", "Frobnicate-1 (acme)"),
        ("my_Nonesuch", "Nonesuch-20"),
    ]


def test_errors_name_the_node_and_its_shapes():
    weights = {"w": np.ones((3, 4), np.float32)}
    with pytest.raises(ShapeError, match=r"n0 MatMul 'my_MatMul'; input 0: \(2, 5\), input 1: \(3, 4\)"):
        graph([node("MatMul", ["x", "w"], ["y"])], [2, 5], ["y"], weights)


def test_what_a_definition_cannot_be_built_from_is_a_model_error():
    with pytest.raises(ModelError, match="do not fit LpPool: "):
        graph([node("LpPool", ["x"], ["y"], kernel_shape=[1], p=0)], [1, 1, 4], ["y"])


def test_misfits_are_told_in_the_words_of_models():
    grid = {"g": np.zeros((), np.float32)}
    with pytest.raises(ShapeError, match=r"the grid of GridSample is float32\[\], but has to be \[1, 2\]"):
        graph([node("GridSample", ["x", "g"], ["y"])], [1, 1, 4, 4], ["y"], grid)
    with pytest.raises(ModelError, match="do not fit Trilu: an input of another rank"):
        graph([node("Trilu", ["g"], ["y"])], [1, 1, 4, 4], ["y"], grid)
    with pytest.raises(ModelError, match="do not fit MultiHeadAttention: a dim, or an attribute, is 0"):
        attention = helper.make_node("MultiHeadAttention", ["x", "x", "x"], ["y"], domain="com.microsoft", num_heads=0)
        graph([attention], [1, 2, 4], ["y"])
    with pytest.raises(ModelError, match="axis of Softmax is a tensor, not of the type int"):
        graph([node("Softmax", ["x"], ["y"], axis=numpy_helper.from_array(np.ones(2)))], [4], ["y"])
    with pytest.raises(ModelError, match="Concat takes at least 1 input, not 0"):
        graph([node("Concat", [], ["y"], axis=0)], [4], ["y"])


def test_an_unknown_attribute_is_refused():
    with pytest.raises(UnsupportedError, match="frob"):
        graph([node("Relu", ["x"], ["y"], frob=1)], [4], ["y"])


def test_tables_have_a_limit():
    weights = {"n": np.array(10**6 + 3, np.int64)}  # a prime: no shorter transforms make it
    with pytest.raises(LimitError, match="DFT"):
        graph([node("DFT", ["x", "n"], ["y"])], [1, 8, 1], ["y"], weights)


def test_what_no_output_needs_is_dropped():
    g = graph([node("Exp", ["x"], ["a"]), node("Relu", ["x"], ["y"])], [4], ["y"])
    assert [n.op for n in g.nodes if n.op != "constant"] == ["max"]


def test_origins_cite_the_nodes():
    g = graph([node("Gelu", ["x"], ["y"])], [4], ["y"])
    assert {str(s) for n in g.nodes for s in n.origin} == {"n0 Gelu"}


def test_sizes_computed_from_shapes_stay_symbolic():
    """What exporters write for x.view(b, -1, heads, size): Shape, Gather, Unsqueeze, Concat, Reshape."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Gather", ["s", "one"], ["t"]),
        node("Mul", ["t", "two"], ["t2"]),
        node("Div", ["t2", "two"], ["t3"]),
        node("Unsqueeze", ["b", "axes"], ["b1"]),
        node("Unsqueeze", ["t3", "axes"], ["t1"]),
        node("Concat", ["b1", "t1", "tail"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    constants = {"zero": 0, "one": 1, "two": 2, "axes": [0], "tail": [-1, 4]}
    weights = {k: np.array(v, np.int64) for k, v in constants.items()}
    g = graph(nodes, ["b", "t", 12], ["y"], weights)
    assert str(g.outputs[0].type) == "float32[s0, s1, 3, 4]"
    assert [n.op for n in g.nodes] == ["reshape"]
    x = np.arange(5 * 7 * 12, dtype=np.float32).reshape(5, 7, 12)
    np.testing.assert_array_equal(interpret(g, [x])[0], x.reshape(5, 7, 3, 4))
