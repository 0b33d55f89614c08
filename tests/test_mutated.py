"""Damaged models and calls: an error of onnxc's own that says what is wrong, or a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.errors import (
    InputError,
    LimitError,
    ModelError,
    OnnxcError,
    PackageError,
    ShapeError,
    UnsupportedError,
    UnsupportedOpError,
)
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from onnxc.runtime.package import write_package
from onnxc.tools.inputs import parse_dims
from tests.mutated import damaged
from tests.small_models import floats, parse, reference

PER_TEST = 100


@pytest.mark.parametrize("first", range(0, 1000, PER_TEST))
def test_damaged_models_are_read_or_refused(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        model, log = damaged(seed)
        try:
            decompose(onnx_file.load(model.SerializeToString()), staged=True)
        except OnnxcError as error:
            assert type(error).__name__ != "InternalError", (seed, log, str(error))
            assert 0 < len(str(error)) < 4000, (seed, log)


# ---------------------------------------------------------------- what mutated models of the suite have shown


def interpreted(model: onnx.ModelProto, *inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return interpret(decompose(onnx_file.load(model)), inputs)


def test_antialias_and_extrapolation() -> None:
    model = parse(
        "(float[1,1,4,4] x) => (float[1,1,n,m] y) <float[8] roi = {0,0,0.4,0.6,1,1,1.2,1.7}, int64[4] s = {1,1,3,3}>"
        '{ y = Resize <antialias = 1, coordinate_transformation_mode = "tf_crop_and_resize", mode = "linear",'
        " extrapolation_value = 10.0> (x, roi, , s) }",
        opset=19,
    )
    x = floats(1, 1, 4, 4)
    (y,) = interpreted(model, x)
    outside = reference(model, x)[0] == 10
    assert outside.any()
    assert (y[outside] == 10).all() and (y[~outside] != 10).all()


def test_antialias_of_the_greatest_integers() -> None:
    model = parse(
        '(int32[8] x) => (int32[m] y) <int64[1] s = {4}> { y = Resize <antialias = 1, mode = "linear"> (x, , , s) }',
        opset=19,
    )
    (y,) = interpreted(model, np.full(8, 2**31 - 1, np.int32))
    np.testing.assert_allclose(y.astype(float), 2.0**31, rtol=1e-6)


@pytest.mark.parametrize("after", [21, 37])
def test_antialias_of_infinities(after: int) -> None:
    """What a filter does not reach, or reaches less often than others do, stays out of its sum."""
    model = parse(
        f"(float[1,1,1,100] x) => (float[1,1,1,m] y) <int64[4] s = {{1,1,1,{after}}}>"
        '{ y = Resize <antialias = 1, mode = "linear"> (x, , , s) }',
        opset=18,
    )
    x = floats(1, 1, 1, 100)
    x[..., 3] = x[..., 50] = np.inf
    np.testing.assert_allclose(interpreted(model, x)[0], reference(model, x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [-1.0, -0.5, 0.0, 2.0])
def test_celu_of_any_sign(alpha: float) -> None:
    model = parse(f"(float[5] x) => (float[5] y) {{ y = Celu <alpha = {alpha}> (x) }}")
    x = np.array([-3, -0.5, 0, 0.5, 3], np.float32)
    np.testing.assert_allclose(interpreted(model, x)[0], reference(model, x)[0], rtol=1e-6)


@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_max_of_infinities(ratio: int) -> None:
    model = parse(
        '(float[1,1,6,6] x, float[3,4] r, int64[3] i) => (float[3,1,2,2] y) { y = RoiAlign <mode = "max",'
        f" output_height = 2, output_width = 2, sampling_ratio = {ratio},"
        ' coordinate_transformation_mode = "output_half_pixel"> (x, r, i) }',
        opset=16,
    )
    x = np.full((1, 1, 6, 6), -np.inf, np.float32)
    r = np.array([[0, 0, 5, 5], [1.5, 1.5, 1.5, 1.5], [0.2, 0.3, 4.5, 3]], np.float32)
    inputs = (x, r, np.zeros(3, np.int64))
    (y,) = onnxc.compile(model)(*inputs).values()
    assert (y == -np.inf).any()
    np.testing.assert_array_equal(y, reference(model, *inputs)[0])


def test_roi_align_max_of_no_samples() -> None:
    model = parse(
        '(float[1,1,6,6] x, float[1,4] r, int64[1] i) => (float[1,1,2,2] y) { y = RoiAlign <mode = "max",'
        ' output_height = 2, output_width = 2, coordinate_transformation_mode = "half_pixel"> (x, r, i) }',
        opset=16,
    )
    inside_out = np.array([[4, 4, 1, 1]], np.float32)
    (y,) = onnxc.compile(model)(np.ones((1, 1, 6, 6), np.float32), inside_out, np.zeros(1, np.int64)).values()
    assert (y == 0).all()


def test_mish_keeps_the_digits_of_small_results() -> None:
    model = parse("(float[n] x) => (float[n] y) { y = Mish (x) }")
    x = np.linspace(-40, 20, 500).astype(np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(interpreted(model, x)[0], wide * np.tanh(np.log1p(np.exp(wide))), rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize(
    "text, says",
    [
        ("(float[2,3,4] x, int64[2] n) => (y) { y = ReverseSequence <time_axis = 1> (x, n) }", "differ"),
        ("(float[2,3,4] x) => (y) { y = LRN <size = -3> (x) }", "LRN"),
        ("(float[2,4,4] x, float[1,4] s, float[4] b) => (y) { y = InstanceNormalization (x, s, b) }", "no vector"),
        ("(float[2,4,4] x, float[3] s, float[4] b) => (y) { y = InstanceNormalization (x, s, b) }", "no vector"),
        ("(float[3,1,2] x, float[1,4,2] w, float[1,4,4] r) => (y) { y = RNN <hidden_size = 4, layout = 3> (x, w, r) }",
         "layout of RNN is 3, not 0 or 1"),
        ("(float[2,4] x) => (y) <int64[1] s = {2}> { y = CenterCropPad (x, s) }", "1 sizes for the axes"),
        ("(float[2,2] x, int64[3,0] i) => (y) { y = GatherND (x, i) }", "index no axis"),
        ("(float[4] x, int64[2147483647] s) => (y) { y = Reshape (x, s) }", "rank 2147483647"),
        ("(float[4] x, int64[2147483647] s) => (y) { y = Expand (x, s) }", "rank 2147483647"),
        ("(float[4] x, int64[2147483647] s) => (y) { y = Slice (x, s, s) }", "2147483647 starts"),
    ],
)  # fmt: skip
def test_wrong_operands_are_refused(text: str, says: str) -> None:
    with pytest.raises((ModelError, ShapeError, LimitError), match=says) as caught:
        decompose(onnx_file.load(parse(text)), staged=True)
    assert caught.value.node is not None and caught.value.node.startswith("n0 ")


def test_scales_below_zero() -> None:
    """Of half floats, too, which are scaled on both sides by a root."""
    text = "(T[1,1,2,4] x) => (y) { y = Attention <scale = -0.25> (x, x, x) }"
    x = floats(1, 1, 2, 4)
    wide, narrow = (parse(text.replace("T[", f"{kind}["), opset=23) for kind in ("float", "float16"))
    found = interpreted(narrow, x.astype(np.float16))[0]
    np.testing.assert_allclose(found, interpreted(wide, x)[0], rtol=1e-2, atol=1e-2)


def test_a_zero_string_is_empty() -> None:
    model = onnxc.compile(parse("(string[N] x) => (y) { y = NonZero (x) }"))
    np.testing.assert_array_equal(model(np.array(["a", "", "b"], object))["y"], [[0, 2]])


@pytest.mark.parametrize("version", [2**31, 2**63 - 1, -1])
def test_versions_of_domains(version: int) -> None:
    model = parse(RELU)
    model.opset_import.append(helper.make_opsetid("com.microsoft", version))
    with pytest.raises(ModelError, match=f"'com.microsoft' in version {version}"):
        onnx_file.load(model)


# ---------------------------------------------------------------- what a user reads

RELU = "(float[N, 3] x) => (float[N, 3] y) { y = Relu (x) }"


@pytest.mark.parametrize("model", [None, 3, [1], np.zeros(3), parse(RELU).graph])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(InputError, match="a model is a path, the bytes of an ONNX file or a ModelProto"):
        onnxc.compile(model)


@pytest.mark.parametrize("cache", [True, False])
def test_what_is_no_path(cache: bool) -> None:
    with pytest.raises(ModelError, match=r"model 'a\\x00b' cannot be opened"):
        onnxc.compile("a\0b", cache=cache)


def test_a_dict_of_inputs_given_by_position() -> None:
    x = np.ones((2, 3), np.float32)
    two = parse("(float[N, 3] x, float[N, 3] z) => (float[N, 3] y) { y = Add (x, z) }")
    staged = parse("(float[N, 3] x) => (int64[2, M] y) { y = NonZero (x) }")
    for model, given in ((parse(RELU), {"x": x}), (two, {"x": x, "z": x}), (staged, {"x": x})):
        with pytest.raises(InputError, match=r"model\(\*\*inputs\)"):
            onnxc.compile(model)(given)


def test_operators_that_are_missing() -> None:
    model = parse("(float[2] x) => (float[2] y) { a = Foo (x) y = Foo (a) }")
    model.graph.node[1].name = "head/foo"
    with pytest.raises(UnsupportedOpError, match=r"Foo-18 \('n0 Foo'\), Foo-18 \('head/foo'\); onnxc\.op "):
        onnxc.compile(model)


def test_operators_of_other_opsets() -> None:
    """Those that came later, or are gone, are told apart from those that nobody knows."""
    model = parse("(float[2] x) => (float[2] y) { a = Gelu (x) b = Mish (a) c = ScaledTanh (b) y = Gelu (c) }")
    later = r"\('n3 Gelu'\); Gelu is there from opset 20 on, Mish is there from opset 18 on, ScaledTanh is there until "
    with pytest.raises(UnsupportedOpError, match=later + r"opset 9: onnx\.version_converter converts models$"):
        onnxc.compile(with_opset(model, 17))
    model.graph.node[1].op_type = "Foo"
    with pytest.raises(UnsupportedOpError, match=r"Gelu is there from opset 20 on.* models; onnxc\.op adds"):
        onnxc.compile(with_opset(model, 17))


def with_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    model.opset_import[0].version = opset
    return model


def test_a_thousand_unknown_attributes() -> None:
    model = parse(RELU)
    model.graph.node[0].attribute.extend(helper.make_attribute(f"a{i}", 1) for i in range(1000))
    with pytest.raises(UnsupportedError, match=r"has no attribute a0, a1, .* \(and 992 more\) in opset"):
        decompose(onnx_file.load(model))


def test_messages_leave_out_the_middle_of_long_names() -> None:
    node = helper.make_node("Op" + "n" * 100_000, ["x"], ["y"])
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    with pytest.raises(UnsupportedOpError) as caught:
        onnxc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert len(str(caught.value)) < 2000 and "Opnnn" in str(caught.value)


@pytest.mark.parametrize("length", [3, 8, 500])
def test_what_is_left_of_a_compiled_model(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.onnxc"
    onnxc.compile(parse(RELU)).save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"onnxc\.load opens"):
        onnxc.compile(path)
    with pytest.raises(PackageError):
        onnxc.load(path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "m.onnxc"
    with pytest.raises(PackageError) as caught:
        write_package(path, {}, {})
    assert str(caught.value) == f"cannot write {str(path)!r}: No such file or directory"


@pytest.mark.parametrize("option", ["batch=-1", "batch=x", "batch", "=3", "batch=\u00b2"])
def test_dims_of_the_command_line(option: str) -> None:
    with pytest.raises(InputError, match="--dim gives the size of a dim as NAME=2, from 0 on"):
        parse_dims([option])
