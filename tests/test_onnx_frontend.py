"""The ONNX importer: what it makes of valid graphs, and what it says of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import onnxc
from onnxc.errors import InputError, LimitError, ModelError, OnnxcError
from onnxc.export.model import to_onnx
from onnxc.frontends.onnx_file import load
from onnxc.ir.graph import DECLARED
from onnxc.ir.text import from_text, to_text
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from tests.onnx_protos import (
    ADD,
    RELU,
    W,
    branch,
    constant,
    model,
    node,
    ops,
    read,
    sparse,
    tensor_info,
)
from tests.small_models import reference

# ---------------------------------------------------------------- what a graph looks like


def test_nodes_attributes_and_origins() -> None:
    relu = node("Relu", ["x"], ["h"], name="a/relu")
    trace = 'File "/src/a.py", line 3, in forward\n  y = f(x)\n  File "/src/b.py", line 17, in f\n  relu(x)'
    relu.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    clip = node(
        "Custom",
        ["h", "", "x", ""],
        ["y", "", "z", ""],
        domain="com.acme",
        f=0.5,
        i=3,
        s="hé",
        fs=[1.0, 2.5],
        is_=[1, 2],
        ss=["a", "b"],
        t=numpy_helper.from_array(np.arange(3)),
    )
    proto = model([relu, clip])
    proto.opset_import.add(domain="com.acme", version=3)
    graph = read(proto)
    assert ops(graph) == ["onnx.Relu", "com.acme.Custom"] and graph.metadata["opsets"] == {
        "": 20,
        "com.acme": 3,
    }
    first, second = graph.nodes
    assert (first.origin[0].number, first.origin[0].op_type, first.origin[0].name) == (0, "Relu", "a/relu")
    assert first.origin[0].line == "/src/b.py:17" and str(second.origin[0]) == "n1 Custom"
    assert second.inputs == (first.output, None, graph.inputs[0]) and len(second.outputs) == 3
    attrs = {k: v for k, v in second.attrs.items() if k != DECLARED}
    assert attrs.pop("t").tolist() == [0, 1, 2]
    assert attrs == {"f": 0.5, "i": 3, "s": "hé", "fs": (1.0, 2.5), "is_": (1, 2), "ss": ("a", "b")}
    assert graph.output_names == ["y"] and graph.outputs == [second.outputs[0]] and graph.input_names == ["x"]
    assert first.output.type is None and str(graph.inputs[0].type) == "float32[2]"


def test_a_domain_may_be_spelled_ai_onnx() -> None:
    proto = model([node("Relu", ["x"], ["y"], domain="ai.onnx")])
    proto.opset_import[0].domain = "ai.onnx"
    assert ops(read(proto)) == ["onnx.Relu"]


def test_dims_become_symbols() -> None:
    x = tensor_info("x", ["batch", 3, None, "batch", -1, 0])
    graph = read(model([node("Add", ["x", "z"], ["y"])], [x, tensor_info("z", ["s0", "batch"])]))
    assert [str(t.type) for t in graph.inputs] == ["float32[s0, 3, s1, s0, s2, 0]", "float32[s3, s0]"]
    assert graph.dim_names == {"s0": "batch", "s3": "s0"}


def test_input_shapes_fix_dims() -> None:
    proto = model([node("Add", ["x", "z"], ["y"])], [tensor_info("x", ["n", 3, None]), tensor_info("z", ["n", "m"])])
    graph = read(proto, input_shapes={"x": (4, None, 5)})
    assert [str(t.type) for t in graph.inputs] == ["float32[4, 3, 5]", "float32[4, s0]"]
    graph = read(proto, input_shapes={"z": ("rows", 2)})
    assert [str(t.type) for t in graph.inputs] == ["float32[s0, 3, s1]", "float32[s2, 2]"]
    for shape in [(4, 4, 5), (4, 3), (4, 3, -1), (4, 3, 1 << 50)]:
        with pytest.raises(InputError, match="'x'"):
            load(proto, input_shapes={"x": shape})
    with pytest.raises(InputError, match=r"'w'.*\['x', 'z'\]"):
        load(proto, input_shapes={"w": (1,)})
    with pytest.raises(InputError, match="'n' the sizes 1 and 2"):
        load(proto, input_shapes={"x": (1, 3, 1), "z": (2, 2)})


def test_an_input_without_a_rank_is_of_unknown_type() -> None:
    proto = model(RELU, [tensor_info("x", None)])
    assert load(proto).inputs[0].type is None
    assert str(read(proto, input_shapes={"x": (2, None, "n")}).inputs[0].type) == "float32[2, s0, s1]"


def test_inputs_that_are_not_tensors() -> None:
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [2, "n"])
    assert str(load(model(RELU, [sequence])).inputs[0].type) == "sequence(float32[2, s0])"
    with pytest.raises(ModelError, match="'x' is a value without a type"):
        load(model(RELU, [onnx.ValueInfoProto(name="x")]))


# ---------------------------------------------------------------- weights and constants


def test_an_initializer_that_is_also_an_input() -> None:
    proto = model(ADD, ["x", "w"], initializer=[W])
    graph = read(proto)
    assert graph.input_names == ["x"] and constant(graph).tolist() == [1, 2]
    kept = read(proto, keep_inputs=["w"])
    assert kept.input_names == ["x", "w"] and ops(kept) == ["onnx.Add"]
    with pytest.raises(InputError, match=r"'v'.*\['x', 'w'\]"):
        load(proto, keep_inputs=["v"])


@pytest.mark.parametrize(
    "declared",
    [tensor_info("w", (3,)), tensor_info("w", (2, 1)), tensor_info("w", ()), tensor_info("w", dtype=TensorProto.INT64),
     tensor_info("w", dtype=99), helper.make_tensor_sequence_value_info("w", TensorProto.FLOAT, None)],
)  # fmt: skip
def test_an_initializer_that_is_not_what_its_input_declares(declared: onnx.ValueInfoProto) -> None:
    with pytest.raises(ModelError, match=r"input 'w' is declared as .* initializer is float32 \[2\]"):
        load(model(ADD, ["x", declared], initializer=[W]))
    for fits in (tensor_info("w", ("n",)), tensor_info("w", None)):
        assert read(model(ADD, ["x", fits], initializer=[W])).input_names == ["x"]


def test_unused_and_duplicated_initializers() -> None:
    later, unused = (
        numpy_helper.from_array(np.array([5, 6], np.float32), "w"),
        numpy_helper.from_array(np.ones(3), "u"),
    )
    assert constant(read(model(ADD, initializer=[W, unused, later]))).tolist() == [5, 6]


def test_an_unused_initializer_is_not_even_read() -> None:
    broken = TensorProto(name="u", data_type=1, dims=[1 << 60])
    assert ops(read(model(RELU, initializer=[broken]))) == ["onnx.Relu"]


def test_an_output_may_be_an_input_or_an_initializer() -> None:
    graph = read(model([], outputs=["x", "w"], initializer=[W]))
    assert graph.outputs[0] is graph.inputs[0] and constant(graph).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value": numpy_helper.from_array(np.eye(2))}, np.eye(2)),
        ({"value_float": 0.1}, np.float32(0.1)),
        ({"value_floats": [1.5, 2.5]}, np.array([1.5, 2.5], np.float32)),
        ({"value_int": 7}, np.int64(7)),
        ({"value_ints": [7, 8]}, np.array([7, 8])),
        ({"value_string": "é"}, np.array("é", object)),
        ({"value_strings": ["a", "b"]}, np.array(["a", "b"], object)),
    ],
)
def test_constant_nodes(attribute: dict[str, Any], expected: Any) -> None:
    untyped = onnx.ValueInfoProto(name="y")
    array = constant(read(model([node("Constant", [], ["y"], **attribute)], outputs=[untyped])))
    assert array.dtype == np.asarray(expected).dtype and array.shape == np.shape(expected)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("positions", [np.array([1, 5]), np.array([[0, 1], [1, 2]]), np.array([5, 1])])
def test_sparse_tensors(positions: np.ndarray) -> None:
    expected = [[0, 1, 0], [0, 0, 2]] if positions.ravel()[0] < 5 else [[0, 2, 0], [0, 0, 1]]
    as_node = model([node("Constant", [], ["y"], sparse_value=sparse(positions))])
    as_weight = model(ADD, sparse_initializer=[sparse(positions)])
    assert constant(read(as_node)).tolist() == constant(read(as_weight)).tolist() == expected


@pytest.mark.parametrize(
    "bad",
    [
        sparse(np.array([1, 6])),
        sparse(np.array([-1, 0])),
        sparse(np.array([[0, 3], [0, 0]])),
        sparse(np.array([0])),
        sparse(np.array([4, 4])),
        sparse(np.array([[1, 1], [1, 1]])),
        sparse(np.array([0, 1]), (1 << 20, 1 << 19)),
    ],
)
def test_bad_sparse_tensors(bad: onnx.SparseTensorProto) -> None:
    with pytest.raises(OnnxcError, match="sparse tensor 'w'"):
        load(model(ADD, sparse_initializer=[bad]))


@pytest.mark.parametrize("attributes", [{}, {"value_int": 1, "value_float": 1.0}, {"value_other": 1}, {"value": 3}])
def test_bad_constant_nodes(attributes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="Constant"):
        load(model([node("Constant", [], ["y"], name="c", **attributes)]))


MISNAMED = [{"value_int": 1.5}, {"value_floats": [1, 2]}, {"value_ints": 3}, {"value_float": 1}, {"value_int": "7"},
            {"value_strings": "ab"}]  # fmt: skip


@pytest.mark.parametrize("attributes", MISNAMED, ids=str)
def test_constants_of_another_type_than_their_name_says(attributes: dict[str, Any]) -> None:
    """They are what the value is, as in onnxruntime: an `int` of 1.5 is not 1."""
    graph = helper.make_graph([node("Constant", [], ["y"], **attributes)], "g", [], [onnx.ValueInfoProto(name="y")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (wanted,) = reference(proto)
    (found,) = interpret(decompose(load(proto), staged=True), [])
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("said", ["INT", "FLOATS"])
def test_an_attribute_of_another_type_than_it_says(said: str) -> None:
    """What its type reads is 0 or nothing, and no answer that was meant."""
    leaky = node("LeakyRelu", ["x"], ["y"], name="leaky", alpha=0.1)
    leaky.attribute[0].type = onnx.AttributeProto.AttributeType.Value(said)
    with pytest.raises(
        ModelError, match=rf"'alpha' is said to be of type {said}, but its value is one of FLOAT .*leaky"
    ):
        load(model([leaky]))


# ---------------------------------------------------------------- graphs


def test_unsorted_nodes_are_sorted() -> None:
    nodes = [node("Neg", ["b"], ["y"]), node("Abs", ["a"], ["b"]), node("Relu", ["x"], ["a"])]
    graph = read(model(nodes))
    assert ops(graph) == ["onnx.Relu", "onnx.Abs", "onnx.Neg"] and [n.origin[0].number for n in graph.nodes] == [
        2,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), *RELU], "cycle.*n[01].*n[01]"),
        ([node("Add", ["x", "y"], ["y"], name="self")], "cycle.*'self'"),
        ([node("Add", ["x", "nowhere"], ["y"], name="one")], r"'nowhere'.*n0 Add 'one'"),
        ([node("Neg", ["x"], ["y"], name="a"), *RELU], "'y' is defined twice.*n0 Neg 'a'.*n1 Relu"),
        ([node("Relu", ["x"], ["x"])], "'x' is defined twice.*graph input.*n0"),
        ([node("Relu", ["x"], ["z"])], "'y' is used, but nothing"),
        ([node("Relu", ["x"], ["y", "y"])], "'y' is defined twice"),
        ([node("", ["x"], ["y"])], "no op type"),
        ([node("Relu@6", ["x"], ["y"])], "no operator 'Relu@6'"),
        ([node("microsoft.Gelu", ["x"], ["y"], domain="com")], "no operator 'microsoft.Gelu' of the domain 'com'"),
        ([node("Relu", ["x"], ["y"], domain="onnx")], "no operator 'Relu' of the domain 'onnx'"),
    ],
)  # fmt: skip
def test_graphs_that_are_not_dags(nodes: list[NodeProto], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model(nodes))


def test_an_output_may_be_listed_twice() -> None:
    """The standard wants names that are defined once; listing is no definition."""
    graph = "g (float[N] x) => (float[N] y, float[2] w, float[N] y, float[2] w, float[N] x) <float[2] w = {1, 2}>"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {graph} {{ y = Relu(x) }}')
    onnx.checker.check_model(proto, full_check=True)
    x, w = np.array([1, -1], np.float32), np.array([1, 2], np.float32)
    for spelled in (proto, to_onnx(load(proto)), to_onnx(decompose(load(proto)))):
        outputs = onnxc.compile(spelled)(x)
        assert outputs.keys() == ("y", "w", "y", "w", "x")
        for found, wanted in zip(outputs, (x.clip(0), w, x.clip(0), w, x), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_subgraph_may_have_an_output_twice() -> None:
    """Its outputs are told by their places: here the next state and what is stacked, of the step before it."""
    body = """b (int64 i, bool go, float[2] s) => (bool go, float[2] t, float[2] t) { t = Neg(s) }"""
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y, float[n, 2] z) {{
      k = Constant<value = int64 {{3}}>()  y, z = Loop(k, , x)<body = {body}> }}"""
    proto = onnx.parser.parse_model(text)
    assert to_text(from_text(to_text(load(proto)))) == to_text(load(proto))
    x = np.array([1, -2], np.float32)
    found = onnxc.compile(proto)(x)
    np.testing.assert_array_equal(found["y"], -x)
    np.testing.assert_array_equal(found["z"], [-x, x, -x])


def test_names_that_are_taken_twice() -> None:
    with pytest.raises(ModelError, match="'x' is defined twice"):
        load(model(RELU, ["x", "x"]))
    with pytest.raises(ModelError, match="'w' is defined twice"):
        load(model([node("Relu", ["x"], ["w"]), *ADD], initializer=[W]))
    with pytest.raises(ModelError, match="no outputs"):
        load(model(RELU, outputs=[]))
    twice = node("Relu", ["x"], ["y"], alpha=1)
    twice.attribute.add().CopyFrom(twice.attribute[0])
    with pytest.raises(ModelError, match=r"'alpha' is given twice.*n0 Relu"):
        load(model([twice]))


def test_subgraphs_see_the_names_around_them() -> None:
    inner = branch([node("Mul", ["h", "w"], ["m"])], "m")
    nested = node("If", ["c"], ["q"], then_branch=inner, else_branch=branch([], "h"))
    then = branch([node("Add", ["h", "v"], ["p"]), nested], "q", initializer=[
        numpy_helper.from_array(np.ones(2, np.float32), "v")])  # fmt: skip
    nodes = [
        node("Relu", ["x"], ["h"]),
        node("If", ["c"], ["y"], then_branch=then, else_branch=branch([], "x"), name="if"),
    ]
    graph = read(model(nodes, ["x", tensor_info("c", [], TensorProto.BOOL)], initializer=[W]))
    outer = graph.nodes[-1]
    assert ops(graph) == ["constant", "onnx.Relu", "onnx.If"] and outer.attrs["regions"] == (
        "else_branch",
        "then_branch",
    )
    else_graph, then_graph = outer.regions
    assert ops(then_graph) == ["constant", "onnx.Add", "onnx.If"] and else_graph.outputs == [graph.inputs[0]]
    assert {v.name for v in outer.operands} == {"c", "h", "w", "x"}


def test_nodes_are_sorted_by_what_their_subgraphs_read() -> None:
    body = branch([node("Neg", ["late"], ["r"])], "r")
    nodes = [
        node("If", ["c"], ["y"], then_branch=body, else_branch=branch([], "x")),
        node("Relu", ["x"], ["late"]),
    ]
    assert ops(read(model(nodes, ["x", tensor_info("c", [], TensorProto.BOOL)]))) == ["onnx.Relu", "onnx.If"]


def test_a_loop_body_has_inputs() -> None:
    body = branch(
        [node("Add", ["state", "x"], ["next"])],
        "next",
        inputs=[tensor_info("i", [], 7), tensor_info("k", [], 9), tensor_info("state")],
    )
    body.output.insert(0, tensor_info("k", [], 9))
    graph = read(model([node("Loop", ["", "c", "x"], ["y"], body=body)], ["x", tensor_info("c", [], TensorProto.BOOL)]))
    (region,) = graph.nodes[0].regions
    assert region.input_names == ["i", "k", "state"] and region.outputs[0] is region.inputs[1]
    assert graph.nodes[0].inputs[0] is None


def test_subgraphs_that_are_too_deep() -> None:
    proto = ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)])
    graph = proto.graph
    for _ in range(80):
        graph.output.add(name="y")
        graph.node.add(op_type="If", input=["c"], output=["y"])
        graph = graph.node[0].attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    graph.output.add(name="x")
    proto.graph.input.extend([tensor_info("x"), tensor_info("c", [], TensorProto.BOOL)])
    with pytest.raises(LimitError, match="deep"):
        load(proto)
    with pytest.raises(ModelError):  # protobuf's own limit
        load(proto.SerializeToString())
