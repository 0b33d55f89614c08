"""The ONNX importer: local functions, which are inlined."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.errors import LimitError, ModelError
from onnxc.frontends.onnx_file import load
from tests.onnx_protos import (
    RELU,
    branch,
    call,
    constant,
    function,
    model,
    node,
    ops,
    read,
    reference,
    tensor_info,
)


def test_functions_are_inlined() -> None:
    leaky = reference(node("LeakyRelu", ["a"], ["t"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    inner = function("Inner", ["a"], ["t"], [leaky], ["slope"])
    twice = reference(call("Inner", ["b"], ["t"], name="first"), "slope", "k", onnx.AttributeProto.FLOAT)
    outer = function("Outer", ["b", "unused"], ["r"], [twice, call("Inner", ["t"], ["r"], slope=0.25)], ["k"])
    graph = read(
        model(
            [call("Outer", ["x"], ["h"], k=0.5, name="o"), node("Neg", ["h"], ["y"])],
            functions=[inner, outer],
        )
    )
    assert ops(graph) == ["onnx.LeakyRelu", "onnx.LeakyRelu", "onnx.Neg"]
    assert [n.attrs.get("alpha") for n in graph.nodes] == [0.5, 0.25, None]
    assert graph.nodes[0].origin[0].name == "o/first/" and len({n.origin for n in graph.nodes}) == 3
    assert graph.nodes[2].inputs == graph.nodes[1].outputs


def test_attributes_of_functions_have_defaults_or_are_left_out() -> None:
    leaky = reference(node("LeakyRelu", ["a"], ["t"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    half = helper.make_attribute("slope", 0.5)
    for defaults, attrs, expected in (([], {}, None), ([half], {}, 0.5), ([half], {"slope": 0.75}, 0.75)):
        f = function("F", ["a"], ["t"], [leaky], [] if defaults else ["slope"], defaults)
        graph = read(model([call("F", ["x"], ["y"], **attrs)], functions=[f]))
        assert graph.nodes[0].attrs.get("alpha") == expected
    with pytest.raises(ModelError, match="'slope' outside of a function"):
        load(model([reference(node("LeakyRelu", ["x"], ["y"]), "alpha", "slope", onnx.AttributeProto.FLOAT)]))


def test_a_constant_and_a_subgraph_of_a_function_take_its_attributes() -> None:
    value = reference(node("Constant", [], ["k"]), "value", "t", onnx.AttributeProto.TENSOR)
    inner = reference(node("LeakyRelu", ["a"], ["l"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    choose = node("If", ["c"], ["r"], then_branch=branch([inner], "l"), else_branch=branch([], "k"))
    f = function("F", ["a", "c"], ["r"], [value, choose], ["t", "slope"])
    weight = numpy_helper.from_array(np.array([7, 8], np.float32))
    nodes = [call("F", ["x", "c"], ["y"], t=weight, slope=0.5)]
    graph = read(model(nodes, ["x", tensor_info("c", [], TensorProto.BOOL)], functions=[f]))
    assert constant(graph).tolist() == [7, 8]
    assert graph.nodes[-1].regions[1].nodes[0].attrs["alpha"] == 0.5


def test_functions_that_return_their_inputs_or_one_value_twice() -> None:
    f = function("F", ["a"], ["a", "t", "t"], [node("Relu", ["a"], ["t"])])
    graph = read(model([call("F", ["x"], ["p", "q", "r"])], outputs=["p", "q", "r"], functions=[f]))
    assert ops(graph) == ["onnx.Relu", "onnx.Identity", "onnx.Identity"]
    graph = read(model([call("F", ["x"], ["p"])], outputs=["p"], functions=[f]))
    assert "onnx.Relu" in ops(graph)


def test_functions_of_another_opset() -> None:
    f = function("F", ["a"], ["t"], [node("Relu", ["a"], ["s"]), node("Softmax", ["s"], ["t"])], opset=11)
    assert ops(read(model([call("F", ["x"], ["y"])], functions=[f]))) == ["onnx.Relu@11", "onnx.Softmax@11"]
    f = function("F", ["a"], ["t"], [node("Relu", ["a"], ["s"]), node("Softmax", ["s"], ["t"])], opset=17)
    assert ops(read(model([call("F", ["x"], ["y"])], functions=[f]))) == ["onnx.Relu", "onnx.Softmax"]


def test_a_function_may_replace_an_operator() -> None:
    f = helper.make_function("", "Relu", ["a"], ["t"], [node("Neg", ["a"], ["t"])], [helper.make_opsetid("", 20)])
    assert ops(read(model(RELU, functions=[f]))) == ["onnx.Neg"]


def test_functions_that_cannot_be_inlined() -> None:
    loop = (
        function("F", ["a"], ["t"], [call("G", ["a"], ["t"])]),
        function("G", ["a"], ["t"], [call("F", ["a"], ["t"])]),
    )
    with pytest.raises(ModelError, match="calls itself"):
        load(model([call("F", ["x"], ["y"])], functions=loop))
    one = function("F", ["a"], ["t"], [node("Relu", ["a"], ["t"])])
    with pytest.raises(ModelError, match=r"1 inputs and 1 outputs.*n0 F"):
        load(model([call("F", ["x", "x"], ["y"])], functions=[one]))
    with pytest.raises(ModelError, match="two local functions"):
        load(model([call("F", ["x"], ["y"])], functions=[one, one]))
    with pytest.raises(ModelError, match="'nowhere'"):
        load(
            model(
                [call("F", ["x"], ["y"])],
                functions=[function("F", ["a"], ["nowhere"], [node("Relu", ["a"], ["t"])])],
            )
        )
    with pytest.raises(ModelError, match="leaves out"):
        load(model([call("F", [], ["y"])], functions=[function("F", ["a"], ["a"], [])]))


def test_functions_that_grow_exponentially() -> None:
    fs = [function("F0", ["a"], ["t"], [node("Relu", ["a"], ["t"])])]
    for i in range(1, 40):
        body = [call(f"F{i - 1}", ["a"], ["s"]), call(f"F{i - 1}", ["s"], ["t"])]
        fs.append(function(f"F{i}", ["a"], ["t"], body))
    with pytest.raises(LimitError, match="nodes once its functions are inlined"):
        load(model([call("F39", ["x"], ["y"])], functions=fs))
