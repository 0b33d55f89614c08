"""The ONNX importer: versions, and files that are damaged or no models."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from onnxc.errors import ModelError, OnnxcError
from onnxc.frontends.onnx_file import load
from onnxc.primitives.verify import verify
from tests.onnx_protos import (
    RELU,
    W,
    branch,
    call,
    constant,
    function,
    model,
    node,
    read,
    reference,
    sparse,
    tensor_info,
)


@pytest.mark.parametrize("opset", [1, 6, 7, 13, 28])
def test_supported_opsets(opset: int) -> None:
    assert read(model(RELU, opset=opset)).metadata["opsets"] == {"": opset}


def test_versions_that_are_not_supported() -> None:
    for opset in (0, -1, 29):
        with pytest.raises(ModelError, match=f"opset {opset}; opsets 1 to 28"):
            load(model(RELU, opset=opset))
    for version in (0, -1, 15, 1 << 40):
        proto = model(RELU)
        proto.ir_version = version
        with pytest.raises(ModelError, match=f"IR version {version}"):
            load(proto)
    missing = model(RELU)
    del missing.opset_import[:]
    with pytest.raises(ModelError, match="opset_import is empty"):
        load(missing)
    missing.opset_import.add(domain="com.acme", version=1)
    with pytest.raises(ModelError, match=r"imports no opset.*n0 Relu"):
        load(missing)


@pytest.mark.parametrize("data", [b"", b"onnx", b"\x00" * 100, b"\xff" * 100, b"PK\x03\x04", b"\x08\x0a"])
def test_files_that_are_not_models(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load(data)
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError):
        load(tmp_path / "m.onnx")


def rich() -> bytes:
    """A model with something of everything, to be damaged."""
    leaky = reference(node("LeakyRelu", ["a"], ["t"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    f = function("F", ["a"], ["t"], [leaky], ["slope"])
    then = branch([node("Mul", ["h", "w"], ["m"])], "m")
    nodes = [
        call("F", ["x"], ["h"], slope=0.5, name="call"),
        node("Constant", [], ["k"], value_strings=["a", "b"]),
        node("If", ["c"], ["i"], then_branch=then, else_branch=branch([], "x"), name="if"),
        node("Conv", ["i", "v"], ["y"], strides=[1, 1], pads=[0, 0, 0, 0], name="conv"),
    ]  # fmt: skip
    weights = [W, numpy_helper.from_array(np.arange(6).astype(ml_dtypes.int4), "v")]
    inputs = [tensor_info("x", ["n", 2]), tensor_info("c", [], TensorProto.BOOL)]
    return model(
        nodes, inputs, functions=[f], initializer=weights, sparse_initializer=[sparse(np.array([1, 5]))]
    ).SerializeToString()


RICH = rich()


def tolerates(data: bytes) -> None:
    """Either a graph that is well formed or an error of ours."""
    try:
        verify(load(data, base_dir="/nonexistent"))
    except OnnxcError as error:
        str(error)


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5c69\nsize 397058\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        load(path)


def test_truncated_models() -> None:
    for end in range(len(RICH)):
        tolerates(RICH[:end])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_models(data: st.DataObject) -> None:
    damaged = bytearray(RICH)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    tolerates(bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    tolerates(data)


def test_names_that_are_not_utf8() -> None:
    data = model([node("Relu", ["x"], ["y"], name="NAME")]).SerializeToString().replace(b"NAME", b"\xff\xfeAB")
    assert load(data).nodes[0].origin[0].name == "\udcff\udcfeAB"
    strings = TensorProto(name="w", data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff"])
    assert constant(load(model([], outputs=["w"], initializer=[strings]))).tolist() == ["\udcff"]
