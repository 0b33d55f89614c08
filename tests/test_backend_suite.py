"""The backend interface of the onnx package, and the standard's own suite through it: every case, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import onnxc
from benchmarks.conformance import RANDOM, cases
from benchmarks.conformance import _light_models as light_models
from onnxc.errors import InputError, ModelError, UnsupportedOpError


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    with light_models():
        yield


@pytest.mark.parametrize("name", sorted(cases()))
def test_case(name: str) -> None:
    cases()[name].run()


def test_the_suite_is_whole() -> None:
    assert len(cases()) >= 2033 or onnx.__version__ != "1.23.2"
    assert set(cases()) >= RANDOM


# ---------------------------------------------------------------- the interface


MODEL = """<ir_version: 8, opset_import: ["" : 18]>
g (float[N] x, float[N] y) => (float[N] s, float[N] d) { s = Add(x, y) d = Sub(x, y) }"""
X, Y = np.array([1, 2, 3], np.float32), np.array([4, 4, 4], np.float32)


def test_a_prepared_model_takes_inputs_by_position_and_by_name() -> None:
    rep = onnxc.backend.prepare(onnx.parser.parse_model(MODEL))
    for outputs in (rep.run([X, Y]), rep.run((X, Y)), rep.run({"y": Y, "x": X})):
        assert outputs[0].tolist() == outputs.s.tolist() == outputs["s"].tolist() == [5, 6, 7]
        assert outputs.d.tolist() == [-3, -2, -1]


def test_a_single_input_needs_no_list() -> None:
    node = helper.make_node("Neg", ["x"], ["y"])
    assert onnxc.backend.run_node(node, X)[0].tolist() == [-1, -2, -3]


def test_a_model_is_checked_first() -> None:
    model = onnx.parser.parse_model(MODEL)
    model.graph.node[0].op_type = "NoSuchOp"
    with pytest.raises(onnx.checker.ValidationError):
        onnxc.backend.run_model(model, [X, Y])


def test_compatible_is_what_compiles() -> None:
    model = onnx.parser.parse_model(MODEL)
    assert onnxc.backend.is_compatible(model)
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_operatorsetid("com.example", 1))
    assert not onnxc.backend.is_compatible(model)
    with pytest.raises(UnsupportedOpError):
        onnxc.backend.prepare(model)


def test_a_node_runs_at_a_version() -> None:
    node = helper.make_node("Add", ["x", "y"], ["z"], broadcast=1, axis=0)
    x = np.zeros((2, 3), np.float32)
    (z,) = onnxc.backend.run_node(node, [x, np.array([1, 2], np.float32)], opset_version=6)
    assert z.tolist() == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(onnx.checker.ValidationError):
        onnxc.backend.run_node(node, [x, x])


def test_a_node_of_another_domain() -> None:
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    (y,) = onnxc.backend.run_node(node, [X], outputs_info=[(np.dtype(np.float32), (3,))])
    np.testing.assert_allclose(y, [0.8413447, 1.9544997, 2.9959502], 1e-5)


def test_inputs_that_a_node_lacks() -> None:
    node = helper.make_node("Clip", ["x", "", "most"], ["y"])
    assert onnxc.backend.run_node(node, [X, np.float32(2)])[0].tolist() == [1, 2, 2]
    with pytest.raises(InputError, match=r"\['x', 'most'\]; 1 are given"):
        onnxc.backend.run_node(node, [X])
    with pytest.raises(InputError, match="lacks the inputs most"):
        onnxc.backend.run_node(node, {"x": X})


def test_devices() -> None:
    assert onnxc.backend.supports_device("CPU")
    assert not onnxc.backend.supports_device("CUDA:1000")
    assert not onnxc.backend.supports_device("TPU")
    with pytest.raises(InputError, match="not 'TPU'"):
        onnxc.backend.prepare(onnx.parser.parse_model(MODEL), "TPU")


def test_old_models_without_types_of_outputs_are_refused_by_the_checker() -> None:
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", infos, [onnx.ValueInfoProto(name="y")])
    with pytest.raises((onnx.checker.ValidationError, ModelError)):
        onnxc.backend.prepare(helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 18)]))
