# ruff: noqa: E501  (models as text, one to a line)
"""Models whose inputs have no fixed sizes: every op of the standard, and sizes that the data tell and that may be 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import onnxc
from benchmarks.conformance import Observed, cases
from onnxc.errors import InputError, ModelError, OnnxcError, SizesError
from onnxc.runtime.staged import StagedModel
from onnxc.runtime.staged_later import Later

Array = np.ndarray[Any, Any]
HEAD = '<ir_version: 8, opset_import: ["" : 18]> g '
RNG = np.random.default_rng(9)


# ---------------------------------------------------------------- the standard's own cases, opened

CASES = [
    "attention_4d_gqa",
    "averagepool_2d_pads",
    "basic_conv_with_padding",
    "center_crop_pad_crop_and_pad",
    "col2im",
    "convtranspose_pads",
    "det_nd",
    "dft_opset19",
    "einsum_batch_diagonal",
    "gathernd_example_int32",
    "gru_defaults",
    "lstm_with_peepholes",
    "quantizelinear_e4m3fn",
    "resize_downsample_sizes_linear_antialias",
    "rotary_embedding",
    "simple_rnn_batchwise",
]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Observed, "open", True)
    yield


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, opened: None) -> None:
    cases()[f"test_{name}"].run()
    assert Observed.prepared is not None
    assert not any(isinstance(d, int) for t in Observed.prepared.model.get_inputs() for d in t.shape)


def session(text: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        onnx.parser.parse_model(HEAD + text).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def agree(text: str, calls: Sequence[Sequence[Array]], refused: Sequence[Sequence[Array]] = ()) -> Any:
    """What onnxruntime gives, for each of the calls; errors of both for those that are refused."""
    model, oracle = onnxc.compile(onnx.parser.parse_model(HEAD + text)), session(text)
    names = [i.name for i in oracle.get_inputs()]
    for args in calls:
        wanted = oracle.run(None, dict(zip(names, args, strict=True)))
        for w, f in zip(wanted, model(*args).values(), strict=True):
            assert w.shape == f.shape
            np.testing.assert_allclose(f, w, rtol=1e-4, atol=1e-5)
    for args in refused:
        with pytest.raises(Exception, match=r"."):
            oracle.run(None, dict(zip(names, args, strict=True)))
        with pytest.raises(OnnxcError):
            model(*args)
    return model


def f32(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def test_a_kernel_is_compiled_for_its_own_size_alone() -> None:
    """Two convolutions whose kernels are inputs: batch, image and channels stay open, also those that equal a kernel."""
    text = "(float[n, c, h, w] x, float[m, c, p, q] k) => (y) { z = Conv(x, k)  y = Relu(z) }"
    model = agree(
        text,
        [(f32(3, 2, 8, 9), f32(3, 2, 3, 3)), (f32(1, 4, 7, 5), f32(5, 4, 3, 3)), (f32(2, 3, 6, 6), f32(2, 3, 2, 3))],
    )
    assert isinstance(model, StagedModel)
    (step,) = (s for s in model._plan.steps if isinstance(s, Later))
    assert step.pinned == {(1, 2), (1, 3)}
    assert step.made <= 3
    with pytest.raises((InputError, ModelError)):
        model(f32(1, 2, 8, 9), f32(3, 5, 3, 3))


def test_kernels_in_a_branch_and_in_a_loop() -> None:
    branch = """(float[n, c, h] x, float[m, c, p] k, bool go) => (y) {
      y = If (go) <then_branch = t () => (a) { a = Conv(x, k) }, else_branch = e () => (b) { b = Neg(x) }> }"""
    x, k = f32(2, 3, 9), f32(4, 3, 3)
    agree(branch, [(x, k, np.array(True)), (x, k, np.array(False))])
    loop = """(float[n, c, h] x, float[c, c, p] k, int64 t) => (y) {
      y = Loop (t, "", x) <body = b (int64 i, bool go, float[n, c, q] a) => (bool on, float[n, c, r] o) {
        on = Identity(go)  o = Conv(a, k) }> }"""
    agree(loop, [(x, f32(3, 3, 3), np.array(2)), (x, f32(3, 3, 2), np.array(3))])


# ---------------------------------------------------------------- sizes that the data tell


X = np.arange(5, dtype=np.float32)
CHOSEN = """(float[n] x, float[k] w) => (y) {
  half = Constant <value = float {0.5}> ()
  chosen = Greater(x, half)  c = Compress(x, chosen)  s = Add(c, w)  y = Exp(s) }"""


def test_one_chosen_element_is_broadcast() -> None:
    calls = [
        (X, f32(4)),
        (X[::-1][:1] * 3, f32(7)),
        (X, f32(1)),
        (X[:2], f32(3)),
        (np.zeros(3, np.float32), f32(1)),
        (X, f32(4)),
    ]
    model = agree(CHOSEN, calls, refused=[(X, f32(3))])
    with pytest.raises(SizesError, match=r"3 and 4 meet, which must be equal \[node n3 Add\]"):
        model(X, f32(3))


def test_positions_of_one_element() -> None:
    text = """(float[n] x, float[m] z, float[k, 1] w) => (y) {
      at = NonZero(x)  f = Cast <to = 1> (at)  a = Add(f, z)  y = Mul(a, w) }"""
    agree(
        text,
        [
            (X[:3], X[:2], X[:4, None]),
            (X[:2], X[:2], X[:4, None]),
            (X[:2], X[:1], X[:1, None]),
            (X, X[:1], X[:2, None]),
        ],
    )


def test_an_expansion_to_a_size_of_one() -> None:
    text = "(float[n] x, int64[1] k) => (y) { e = Expand(x, k)  y = Exp(e) }"
    agree(text, [(X, np.array([5])), (X, np.array([1])), (X[:1], np.array([7]))], refused=[(X, np.array([4]))])


def test_sizes_of_one_in_some_turns_of_a_loop() -> None:
    text = """(float[n] x, float[m] w, int64 t) => (y) {
      zero = Constant <value_ints = [0]> ()  one = Constant <value_int = 1> ()  start = Constant <value = float[1] {0}> ()
      y = Loop (t, "", start) <body = b (int64 i, bool go, float[k] a) => (bool on, float[l] o) {
        on = Identity(go)  next = Add(i, one)  end = Unsqueeze(next, zero)  part = Slice(x, zero, end)
        s = Add(part, w)  r = ReduceSum <keepdims = 1> (s)  o = Add(a, r) }> }"""
    agree(text, [(X, f32(1), np.array(3)), (X[:3], f32(3), np.array(1))])


@pytest.mark.parametrize("where", ["UPPER", "LOWER"])
@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool", "Conv"])
def test_gradients_of_windows_that_keep_open_sizes(op: str, where: str) -> None:
    """How much is padded, and may be cut off again, follows from the sizes."""
    window, weights = (
        f'auto_pad = "SAME_{where}", kernel_shape = [3, 2], strides = [2, 3]',
        ", w" if op == "Conv" else "",
    )
    text = f"(float[n, 2, h, w] x) => (float l) {{ w = Constant <value = float[1, 2, 3, 2] {{1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6}}> () y = {op} <{window}> (x{weights}) t = Mul(y, y) l = ReduceSum <keepdims = 0> (t) }}"
    model = onnx.parser.parse_model(HEAD.replace("18", "22") + text)
    back = onnxc.backward(model, loss="l", wrt=["x"])
    compiled, oracle = onnxc.compile(back), onnxruntime.InferenceSession(back.SerializeToString())
    for shape in ((1, 2, 7, 9), (2, 2, 4, 6), (1, 2, 1, 1), (1, 2, 3, 8)):
        x = RNG.standard_normal(shape).astype(np.float32)
        for y, right in zip(compiled.run(None, {"x": x}), oracle.run(None, {"x": x}), strict=True):
            assert np.allclose(y, right, 1e-4, 1e-4)


@pytest.mark.parametrize(("sizes", "axes"), [("3, 6", ""), ("5, 2", "<axes = [1, 0]>"), ("4", "<axes = [-1]>")])
def test_what_is_cropped_or_padded_by_the_size(sizes: str, axes: str) -> None:
    """Whether an open axis is too long or too short is part of its sizes: one program, with a derivative."""
    model = onnx.parser.parse_model(
        HEAD
        + f"(float[n, k] x) => (float[a, b] y) {{ s = Constant <value_ints = [{sizes}]> () y = CenterCropPad {axes} (x, s) }}"
    )
    compiled, reference = onnxc.compile(model), onnxruntime.InferenceSession(model.SerializeToString())
    assert not isinstance(compiled, StagedModel)
    back = onnxc.compile(onnxc.backward(model, wrt=["x"], cotangents=True))
    for shape in ((1, 1), (3, 6), (9, 2), (4, 5), (2, 10)):
        x = RNG.standard_normal(shape).astype(np.float32)
        (expected,) = reference.run(None, {"x": x})
        np.testing.assert_array_equal(compiled(x)["y"], expected)
        kept = np.isin(x, expected)
        np.testing.assert_array_equal(back(x, np.ones_like(expected))["x_grad"], kept)


@pytest.mark.parametrize(
    "node",
    [
        "n = Constant <value_int = 4> () at = Constant <value_int = 1> () y = DFT (x, n, at)",
        "n = Constant <value_int = 4> () s = Constant <value_int = 2> () y = STFT <onesided = 0> (x, s, , n)",
    ],
)
def test_numbers_that_may_be_complex(node: str) -> None:
    """The length of a transform is known, but not whether the numbers are complex: that is a size, too."""
    model = onnx.parser.parse_model(HEAD.replace("18", "20") + f"(float[a, b, c] x) => (y) {{ {node} }}")
    compiled, reference = onnxc.compile(model), onnxruntime.InferenceSession(model.SerializeToString())
    for parts in (1, 2):
        x = RNG.standard_normal((2, 9, parts)).astype(np.float32)
        (expected,) = reference.run(None, {"x": x})
        np.testing.assert_allclose(compiled.run(None, {"x": x})[0], expected, atol=1e-5)


def test_images_without_pixels() -> None:
    text = "(float[N, 4, P, Q] x, float[16, 4, 1, 1] w) => (float[N, 16, P, Q] y) { y = Conv (x, w) }"
    model = onnxc.compile(onnx.parser.parse_model(HEAD + text))
    for n, p, q in ((2, 3, 5), (2, 3, 0), (2, 0, 5), (0, 3, 5)):
        assert model(np.ones((n, 4, p, q), np.float32), np.ones((16, 4, 1, 1), np.float32))["y"].shape == (n, 16, p, q)


def test_a_window_of_one_column_over_no_columns() -> None:
    """Few channels: the kernel whose lanes are pixels."""
    text = f"(float[N, 3, P, Q] x) => (float[N, 3, R, Q] y) <float[3, 3, 3, 1] w = {{{', '.join(['1'] * 27)}}}>"
    model = onnxc.compile(onnx.parser.parse_model(HEAD + text + " { y = Conv (x, w) }"))
    for n, p, q in ((2, 5, 3), (2, 5, 0), (0, 5, 3)):
        assert model(np.ones((n, 3, p, q), np.float32))["y"].shape == (n, 3, p - 2, q)


LAYERS = {
    "planar, then 1x1": ("1, 1", "y = Conv <kernel_shape = [1, 1]> (t, w)"),
    "3x3": ("3, 3", "y = Conv <pads = [1, 1, 1, 1]> (t, w)"),
    "stride 2": ("3, 3", "y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (t, w)"),
    "5x5": ("5, 5", "y = Conv <pads = [2, 2, 2, 2], dilations = [1, 1]> (t, w)"),
    "transposed": ("3, 3", "y = ConvTranspose <strides = [2, 2]> (t, w)"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_without_images_after_some(layer: str) -> None:
    """In this order: the arena is laid out for the sizes that were, and no kernel may go by them."""
    kernel, node = LAYERS[layer]
    text = (
        f"(float[N, 3, 2, 1024] x, float[64, 3, 1, 1] v, float[64, 64, {kernel}] w) => (float[N, 64, P, Q] y) "
        f"{{ c = Conv (x, v) t = Relu (c) {node} }}"
    )
    proto = onnx.parser.parse_model(HEAD + text)
    filters = {"v": f32(64, 3, 1, 1) / 8, "w": f32(64, 64, *map(int, kernel.split(", "))) / 8}
    for name, value in filters.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    del proto.graph.input[1:]
    model = onnxc.compile(proto)
    oracle = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for n in (2, 3, 0, 1):
        x = f32(n, 3, 2, 1024)
        (wanted,) = oracle.run(None, {"x": x})
        found = model(x)["y"]
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_saved_model_says_what_it_lacks(tmp_path: Any) -> None:
    onnxc.compile(onnx.parser.parse_model(HEAD + CHOSEN)).save(tmp_path / "chosen.onnxc")
    model = onnxc.load(tmp_path / "chosen.onnxc")
    assert model(X, f32(4))["y"].shape == (4,)
    with pytest.raises(SizesError, match=r"4 and 1 meet|1 and 4 meet"):
        model(X, f32(1))


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("how", ["half_pixel", "output_half_pixel"])
def test_regions_decide_how_many_samples_are_taken(mode: str, how: str) -> None:
    text = f"""(float[n, 2, h, w] x, float[r, 4] rois, int64[r] at) => (y) {{
      y = RoiAlign <mode = "{mode}", output_height = 2, output_width = 3, coordinate_transformation_mode = "{how}"> (x, rois, at) }}"""
    x, regions = f32(2, 2, 9, 11), np.array([[0, 0, 8, 8], [2, 1, 3, 2.5], [1, 1, 1, 1]], np.float32)
    agree(
        text,
        [(x, regions, np.array([0, 1, 1])), (x, regions[1:2], np.array([1])), (x, regions[:0], np.zeros(0, np.int64))],
    )


# ---------------------------------------------------------------- sizes that are 1 as they are computed


ENDS = """zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [1]> ()  two = Constant <value_ints = [2]> ()
  last = Constant <value_ints = [-1]> ()  far = Constant <value_ints = [9223372036854775807]> ()"""


def test_a_part_of_at_most_one_element_is_broadcast_at_any_size() -> None:
    """No program of its own for each size: only nothing at all has one."""
    model = agree(
        f"""(float[n, 3] x, float[m, 3] w) => (a, b, c, d, e) {{ {ENDS}
          first = Slice(x, zero, one)  end = Slice(x, last, far)
          a = Sub(x, first)  b = Sub(end, w)  c = Where(before, first, end)  before = Less(first, end)
          t = Transpose(first)  d = MatMul(x, t)  s = Shape(x)  e = Expand(first, s) }}""",
        [(f32(n, 3), f32(m, 3)) for n, m in ((5, 2), (1, 4), (2, 1), (2, 0), (0, 1), (0, 0), (7, 7))],
        refused=[(f32(0, 3), f32(2, 3))],
    )
    assert all(n < 2 for _, fixed in model._variants._made for _, _, n in fixed)


def test_an_expansion_to_a_part_of_at_most_one_element() -> None:
    """As exporters add rows at indices: to the shape of the first row of what they are added to."""
    model = agree(
        f"""(float[n, 3] x, float[e, 3] w) => (a, b) {{ {ENDS}
          first = Slice(x, zero, one)  s = Shape(first)  a = Expand(w, s)
          t = Transpose(first)  q = Shape(t)  v = Transpose(w)  b = Expand(v, q) }}""",
        [(f32(n, 3), f32(e, 3)) for n, e in ((5, 2), (1, 4), (2, 1), (2, 0), (0, 1), (0, 0), (7, 7))],
        refused=[(f32(0, 3), f32(2, 3))],
    )
    assert not isinstance(model, StagedModel)
    assert all(n < 2 for _, fixed in model._variants._made for _, _, n in fixed)


def test_shapes_of_nothing_that_is_broadcast() -> None:
    """A part of at most one element that is none is no row to repeat, of rows of no elements either."""
    agree(
        f"""(float[n, m] x, float[e, m] w) => (a, b) {{ {ENDS}
          first = Slice(x, zero, one)  s = Shape(first)  a = Expand(w, s)  b = Add(w, first) }}""",
        [(f32(n, m), f32(e, m)) for n, e, m in ((5, 2, 3), (0, 1, 0), (0, 1, 3), (1, 2, 0), (0, 0, 0))],
        refused=[(f32(0, 0), f32(2, 0)), (f32(0, 3), f32(2, 3))],
    )


def test_floats_that_count_up_to_a_size() -> None:
    """Range in floats, as exporters write positions; no data decide about its size."""
    text = """(bool[n] x) => (a, b) {
      zero = Constant <value_float = 0.0> ()  one = Constant <value_float = 1.0> ()  down = Constant <value_float = -1.0> ()
      n = Size(x)  far = Cast <to = 1> (n)  a = Range(zero, far, one)
      m = Neg(n)  last = Cast <to = 1> (m)  b = Range(far, last, down) }"""
    model = agree(text, [(np.ones(n, bool),) for n in (5, 1, 0)])
    assert not isinstance(model, StagedModel)
    one_way = text.replace("(a, b)", "(a)")
    agree(one_way, [(np.ones(1 << 24, bool),)], refused=[])
    with pytest.raises(InputError):  # numbers that floats do not hold
        onnxc.compile(onnx.parser.parse_model(HEAD + one_way))(np.ones((1 << 24) + 1, bool))


def test_floats_that_count_from_what_they_do_not_hold() -> None:
    """2**24 + 5 is 2**24 + 4 in float32, and 2049 is 2048 in float16."""
    text = """(bool[n] x) => (a) { one = Constant <value_float = 1.0> ()  most = Constant <value_int = 16777216> ()
      n = Size(x)  far = Add(n, most)  start = Cast <to = 1> (most)  end = Cast <to = 1> (far)  a = Range(start, end, one) }"""
    with pytest.raises(InputError):
        onnxc.compile(onnx.parser.parse_model(HEAD + text))(np.ones(5, bool))
    text = """(bool[n] x) => (a) { zero = Constant <value_float = 0.0> ()  one = Constant <value_float = 1.0> ()
      n = Size(x)  half = Cast <to = 10> (n)  end = Cast <to = 1> (half)  a = Range(zero, end, one) }"""
    agree(text, [(np.ones(n, bool),) for n in (2048, 2049)])


SHIFTED = {
    "a rest": ("y = Add(r, w)  r = Slice(x, one, far)", [(2, 5), (2, 0), (3, 2), (1, 0), (3, 1)], [(4, 2)]),
    "a rest of itself": ("r = Slice(x, one, far)  t = Sub(r, x)  y = Add(t, w)", [(2, 2), (1, 0), (2, 1)], [(3, 1)]),
    "two parts": (
        "end = Constant <value_ints = [3]> ()  p = Slice(x, zero, two)  q = Slice(x, one, end)  r = Sub(p, q)"
        "  y = Add(r, w)",
        [(2, 2), (3, 1), (1, 1)],
        [(2, 3)],
    ),
    "a half": ("s = Shape(x)  h = Div(s, two)  r = Slice(x, zero, h)  y = Add(r, w)", [(2, 5), (3, 4), (8, 4)], [(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIFTED)
def test_a_size_that_is_computed_may_be_one(name: str) -> None:
    body, calls, refused = SHIFTED[name]
    agree(
        f"(float[n] x, float[m] w) => (y) {{ {ENDS} {body} }}",
        [(f32(n), f32(m)) for n, m in calls],
        refused=[(f32(n), f32(m)) for n, m in refused],
    )


def test_a_size_that_is_computed_of_what_the_data_tell() -> None:
    text = f"""(bool[n] c, float[m] w) => (y) {{ {ENDS}
      at = NonZero(c)  f = Cast <to = 1> (at)  rest = Slice(f, one, far, one)  y = Mul(rest, w) }}"""
    some = np.array([True, False, True, True])
    agree(text, [(some, f32(2)), (some[:3], f32(5)), (some[:3], f32(1)), (some[:1], f32(0))], refused=[(some, f32(3))])


def test_programs_for_single_sizes_are_bounded_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxc.runtime.compiled_model.MOST_KEPT", 2)
    monkeypatch.setattr("onnxc.runtime.compiled_model.MANY", 3)
    text = "(float[n, k] x, float[m] w) => (y) { shape = Constant <value_ints = [-1]> ()  r = Reshape(x, shape)  y = Add(r, w) }"
    model = onnxc.compile(onnx.parser.parse_model(HEAD + text))
    with pytest.warns(UserWarning, match="compiled 3 times"):
        for n, k, m in ((3, 1, 1), (1, 1, 2), (1, 3, 1), (3, 1, 1)):
            assert model(f32(n, k), f32(m))["y"].shape == (max(n * k, m),)
    assert len(model._variants._made) <= 2


# ---------------------------------------------------------------- what may not be made larger, is refused


NOT_LARGER = {
    "Gemm": ("float[n, 3] x, float[3, k] v, float[p, q] w", "y = Gemm(x, v, w)", [(2, 4, 1, 4), (2, 4, 2, 1)], [(1, 4, 2, 4), (2, 1, 2, 3)]),
    "LayerNormalization": ("float[n, k] x, float[p] w", "y = LayerNormalization(x, w)", [(2, 4, 4)], [(2, 1, 4)]),
    "BatchNormalization": ("float[n, k, 2] x, float[p] w", "v = Abs(w)  y = BatchNormalization(x, w, w, w, v)", [(2, 4, 4)], [(2, 1, 4)]),
    "Expand": ("float[2, n] x, float[k, p] w", "s = Shape(w)  y = Expand(x, s)", [(3, 2, 3), (3, 2, 1), (1, 2, 4)], [(3, 2, 4), (3, 3, 3), (0, 2, 2)]),
    "Squeeze": ("float[n, k] x", "zero = Constant <value_ints = [0]> ()  y = Squeeze(x, zero)", [(1, 3), (1, 0)], [(2, 3), (2, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_LARGER)
def test_what_a_tensor_may_not_become(name: str) -> None:
    inputs, body, calls, refused = NOT_LARGER[name]
    agree(
        f"({inputs}) => (y) {{ {body} }}",
        [filled(inputs, sizes) for sizes in calls],
        refused=[filled(inputs, sizes) for sizes in refused],
    )


def filled(inputs: str, sizes: Sequence[int]) -> list[Array]:
    """Tensors for declared inputs: open dims in the order in which they are first named."""
    shapes = [part[part.index("[") + 1 : part.index("]")].split(", ") for part in inputs.split("float")[1:]]
    names = dict.fromkeys(d for shape in shapes for d in shape if not d.isdigit())
    known = dict(zip(names, sizes, strict=True))
    return [f32(*(known[d] if d in known else int(d) for d in shape)) for shape in shapes]


def test_resize_by_a_scale_that_is_no_simple_fraction() -> None:
    """Compiled for the sizes of a call: floor(size * scale) is then a number."""
    text = "(float[N, 2, H, W] x) => (float[N, 2, P, Q] y) <float[4] s = {1, 1, 1.8013157, 0.7071068}>"
    proto = onnx.parser.parse_model(HEAD + text + ' { y = Resize <mode = "linear"> (x, , s) }')
    model, judge = onnxc.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    for n, h, w in ((1, 5, 6), (2, 7, 3), (1, 1, 10)):
        x = np.random.default_rng(h).standard_normal((n, 2, h, w)).astype(np.float32)
        np.testing.assert_allclose(model(x)["y"], judge.run(None, {"x": x})[0], atol=1e-5)
