# ruff: noqa: E501  (models as text, one to a line)
"""Inputs and attributes that ask a run for more than there is: a clear error that names the node, at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import onnxc
from onnxc.errors import LimitError, ModelError, OnnxcError, RunError
from onnxc.host import regex, sequences
from onnxc.runtime import staged_steps

HEAD = '<ir_version: 10, opset_import: ["" : 22, "com.microsoft" : 1]> g '
Array = np.ndarray[Any, Any]
HUGE, LEAST, MOST = 2**62, -(2**63), 2**63 - 1
X = np.arange(5, dtype=np.float32)


def longs(*values: int) -> Array:
    return np.array(values, np.int64)


def run(text: str, *args: Any) -> dict[str, Any]:
    return dict(onnxc.compile(onnx.parser.parse_model(HEAD + text))(*args).items())


SIZES: dict[str, tuple[str, list[Any], str]] = {
    "expand": ("(float[1] x, int64[2] s) => (y) { y = Expand(x, s) }", [X[:1], longs(2**40, 2**40)], "Expand"),
    "tile": ("(float[5] x, int64[1] s) => (y) { y = Tile(x, s) }", [X, longs(HUGE)], "Tile"),
    "fill": ("(int64[2] s) => (y) { y = ConstantOfShape(s) }", [longs(HUGE, HUGE)], "ConstantOfShape"),
    "range": ("(int64 a, int64 b) => (y) { one = Constant <value_int = 1> () y = Range(a, b, one) }", [np.int64(LEAST), np.int64(MOST)], "Range"),
    "pad": ("(float[5] x, int64[2] s) => (y) { y = Pad(x, s) }", [X, longs(LEAST, MOST)], "Pad"),
    "one-hot": ("(int64[3] x, int64 d, float[2] v) => (y) { y = OneHot(x, d, v) }", [longs(0, 1, 2), np.int64(HUGE), X[:2]], "OneHot"),
    "top": ("(float[5] x, int64[1] k) => (y, z) { y, z = TopK(x, k) }", [X, longs(HUGE)], "TopK"),
    "split": ("(float[5] x, int64[2] s) => (y, z) { y, z = Split(x, s) }", [X, longs(MOST, 4 - MOST)], "Split"),
    "a window": ("(int64 n) => (y) { y = HannWindow(n) }", [np.int64(HUGE)], "HannWindow"),
    "a crop": ("(float[5] x, int64[1] s) => (y) { y = CenterCropPad(x, s) }", [X, longs(HUGE)], "CenterCropPad"),
    "turns of a loop": (
        """(float[9] x, int64 n) => (y) { z, y = Loop (n, "", x) <body = b (int64 i, bool go, float[9] a) => (bool on, float[9] o, float[9] s) {
          on = Identity(go)  o = Neg(a)  s = Exp(a) }> }""",
        [np.zeros(9, np.float32), np.int64(MOST)], "",
    ),
    "a cache": (
        """(float[1, 1, 16] q, float[1, 2, 4, 8] p, int32[1] s, int32 t) => (y, a, b) {
          y, a, b = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (q, q, q, p, p, s, t) }""",
        [np.ones((1, 1, 16), np.float32), np.ones((1, 2, 4, 8), np.float32), np.int32([2]), np.int32(2**31 - 1)], "GroupQueryAttention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_a_run_is_given(name: str) -> None:
    text, args, op = SIZES[name]
    with pytest.raises(OnnxcError) as found:
        run(text, *args)
    assert op in (found.value.node or "")


def test_a_crop_to_less_than_nothing() -> None:
    with pytest.raises(OnnxcError, match="CenterCropPad to a negative size: -2 in dim 0"):
        run("(float[n] x, int64[1] s) => (y) { y = CenterCropPad(x, s) }", X, longs(-2))


def test_strings_that_double() -> None:
    text = """(string[1] x) => (y) { n = Constant <value_int = 60> ()
      y = Loop (n, "", x) <body = b (int64 i, bool go, string[1] a) => (bool on, string[1] o) { on = Identity(go)  o = StringConcat(a, a) }> }"""
    with pytest.raises(LimitError, match="characters would be made"):
        run(text, np.array(["abcdefgh" * 1000], object))
    with pytest.raises(LimitError, match="10000000000 strings"):
        run(
            "(string[n, 1] x, string[1, m] y) => (z) { z = StringConcat(x, y) }",
            *(np.full(s, "", object) for s in ((100_000, 1), (1, 100_000))),
        )


def test_a_sequence_that_grows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_steps, "memory_bytes", lambda: 1 << 24)
    text = """(float[n] x) => (y) { n = Constant <value_int = 9223372036854775807> ()  empty = SequenceEmpty()
      y = Loop (n, "", empty) <body = b (int64 i, bool go, seq(float[m]) a) => (bool on, seq(float[m]) o) {
        on = Identity(go)  first = Constant <value_int = 0> ()  r = Neg(x)  o = SequenceInsert(a, r, first) }> }"""
    with pytest.raises(LimitError, match="does not fit into memory"):
        run(text, np.zeros(100_000, np.float32))


@pytest.mark.parametrize("how", ["a sequence", "scan outputs"])
def test_long_strings_count(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each iteration makes a new string of 100,000 characters, in an array that itself takes 8 bytes."""
    monkeypatch.setattr(staged_steps, "memory_bytes", lambda: 1 << 24)
    if how == "a sequence":
        text = """(string x) => (y) { n = Constant <value_int = 9223372036854775807> ()  e = SequenceEmpty <dtype = 8> ()
          y = Loop (n, "", e) <body = b (int64 i, bool go, seq(string) a) => (bool on, seq(string) o) {
            on = Identity(go)  s = Cast <to = 8> (i)  r = StringConcat(x, s)  o = SequenceInsert(a, r) }> }"""
    else:
        text = """(string x) => (y) { n = Constant <value_int = 9223372036854775807> ()
          y = Loop (n, "") <body = b (int64 i, bool go) => (bool on, string r) {
            on = Identity(go)  s = Cast <to = 8> (i)  r = StringConcat(x, s) }> }"""
    with pytest.raises(LimitError, match=r"does not fit into memory after 1[67][0-9] iterations"):
        run(text, np.array("a" * 100_000, object))


def test_a_string_that_is_collected_again_and_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_steps, "memory_bytes", lambda: 1 << 24)
    text = """(string x) => (y) { n = Constant <value_int = 300> ()
      y = Loop (n, "") <body = b (int64 i, bool go) => (bool on, string r) { on = Identity(go)  r = Identity(x) }> }"""
    y = run(text, np.array("a" * 100_000, object))["y"]
    assert y.shape == (300,) and set(map(len, y)) == {100_000}


def test_regular_expressions_have_a_length() -> None:
    with pytest.raises(LimitError, match="1000000 characters"):
        regex.Regex("a" * 1_000_000)


def test_regular_expressions_take_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "MOST_STEPS", 100_000)
    node = helper.make_node("RegexFullMatch", ["x"], ["y"], pattern="a?" * 300 + "a" * 300)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", 8, [1])], [helper.make_tensor_value_info("y", 9, [1])]
    )
    model = onnxc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    assert model(np.array(["b"], object))["y"].tolist() == [False]
    with pytest.raises(LimitError, match=r"too many steps \[node n0 RegexFullMatch\]"):
        model(np.array(["a" * 300], object))


@pytest.mark.parametrize("more", [{"max_skip_count": 2**60}, {"max_gram_length": 2**60}, {"min_gram_length": -(2**60)}])
def test_ngrams_are_no_longer_than_the_text(more: dict[str, int]) -> None:
    attrs: dict[str, Any] = {
        "mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "ngram_counts": [0, 2],
        "ngram_indexes": [0, 1, 2], "pool_int64s": [1, 2, 1, 2],
    }  # fmt: skip
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], **(attrs | more))
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", 7, [6])], [onnx.ValueInfoProto(name="y")]
    )
    model = onnxc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    skips = 3 if "max_skip_count" in more else 2  # 1 2 with two others in between, too
    assert model(longs(1, 2, 1, 2, 3, 1))["y"].tolist() == [3, 2, skips]


def test_a_pool_that_counts_at_far_places() -> None:
    attrs = 'mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0, ngram_counts = [0]'
    text = f"(int64[4] x) => (y) {{ y = TfIdfVectorizer <{attrs}, ngram_indexes = [{HUGE}], pool_int64s = [1]> (x) }}"
    with pytest.raises(LimitError, match=r"counts would be made.*\[node n0 TfIdfVectorizer\]"):
        run(text, longs(1, 2, 3, 4))


def test_parts_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "(float[n] x, int64[k] s) => (y) { q = SplitToSequence (x, s)  y = SequenceLength (q) }"
    assert run(text, X, longs(2, 0, 3))["y"] == 3
    assert run(text, X[:0], longs())["y"] == 0
    with pytest.raises(RunError, match="do not make an axis of size 5"):  # 2^64 + 5, as int64 adds it
        run(text, X, longs(HUGE, HUGE, HUGE, HUGE, 5))
    monkeypatch.setattr(sequences, "MOST_PARTS", 4)
    with pytest.raises(LimitError, match=r"a sequence of 5 parts.*\[node n0 SplitToSequence\]"):
        run("(float[n] x) => (seq(float[m]) q) { q = SplitToSequence (x) }", X)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_positions_that_are_no_numbers(mode: str) -> None:
    """What is no number is outside, or is itself no number: no error, and nothing else is touched."""
    text = f'(float[1, 1, 4, 4] x, float[1, 3, 1, 2] g) => (y) {{ y = GridSample <mode = "{mode}"> (x, g) }}'
    grid = np.array([np.nan, 0, np.inf, -np.inf, 1e30, 0.25], np.float32).reshape(1, 3, 1, 2)
    y = run(text, np.ones((1, 1, 4, 4), np.float32), grid)["y"].ravel()
    assert all(v == 0 or np.isnan(v) for v in y)


def test_what_is_outside_of_an_infinite_image_is_zero() -> None:
    """The pixel at the border was read in its place, and multiplied by zero."""
    text = """(float[1, 1, 4, 4] x, float[1, 1, 1, 2] g, float[1, 1, 1, 1] w, float[1, 2, 4, 4] o) => (a, b, c, d) {
      a = GridSample <mode = "linear"> (x, g) b = GridSample <mode = "nearest"> (x, g)
      c = GridSample <mode = "cubic"> (x, g) d = DeformConv (x, w, o) }"""
    far = np.full((1, 1, 1, 2), 5, np.float32), np.ones((1, 1, 1, 1), np.float32), np.full((1, 2, 4, 4), -9, np.float32)
    for value in (np.inf, np.nan):
        found = run(text, np.full((1, 1, 4, 4), value, np.float32), *far)
        assert not any(y.any() for y in found.values())


def test_a_loop_that_does_not_count_keeps_no_numbers() -> None:
    """2^33 iterations would have 64 GB of them."""
    text = """(float[4] x) => (float[4] y) <int64 trip = {8589934592}> { y = Loop (trip, , x) <body = b
        (int64 i, bool c, float[4] s) => (bool d, float[4] t) { d = Identity (c) t = Sin (s) }> }"""
    assert onnxc.compile(onnx.parser.parse_model(HEAD + text)).explain().memory.arena < 1 << 20
    with pytest.raises(LimitError, match="a Loop of 4611686018427387904 iterations"):
        onnxc.compile(onnx.parser.parse_model(HEAD + text.replace(str(1 << 33), str(1 << 62))))


def test_branches_inside_of_branches() -> None:
    """A thousand, as bytes: more than any library writes. Protobuf refuses them, and so does the import."""

    def field(number: int, content: bytes) -> bytes:
        size, head = len(content), b""
        while size > 127:
            head += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + head + bytes([size]) + content

    graph = b""
    for _ in range(1000):
        attribute = field(1, b"then_branch") + field(6, graph) + b"\xa0\x01\x05"
        graph = field(1, field(1, b"c") + field(2, b"y") + field(4, b"If") + field(5, attribute))
    with pytest.raises(ModelError):
        onnxc.compile(b"\x08\x0a" + field(7, graph) + field(8, b"\x10\x16"))


def test_images_that_are_bombs() -> None:
    pytest.importorskip("PIL")
    head = b"BM" + b"\x36\0\0\0" + bytes(4) + b"\x36\0\0\0" + b"\x28\0\0\0" + (60_000).to_bytes(4, "little") * 2
    bomb = head + b"\x01\0\x18\0" + bytes(24)
    with pytest.raises((LimitError, RunError), match=r"too large.*\[node n0 ImageDecoder\]"):
        run("(uint8[n] x) => (y) { y = ImageDecoder(x) }", np.frombuffer(bomb, np.uint8))


def test_a_sequence_whose_tensors_double_is_measured_in_time() -> None:
    growth, room = staged_steps._Growth(), 1 << 20
    values: list[np.ndarray] = []
    while not growth.is_beyond([values], room):
        values.append(np.zeros(1 << len(values), np.uint8))
        assert sum(v.nbytes for v in values) < 8 * room


# By the standard these have no end to count from, as Gather's have.
FROM_THE_START: dict[str, tuple[str, list[Any], str]] = {
    "a cache's position": ("(float[1, 5] x, float[1, 2] u, int64[1] i) => (y) { y = TensorScatter <axis = 1> (x, u, i) }", [X[None], X[None, :2], longs(2)], "TensorScatter"),
    "in a circle": ("(float[1, 5] x, float[1, 2] u, int64[1] i) => (y) { y = TensorScatter <axis = 1, mode = \"circular\"> (x, u, i) }", [X[None], X[None, :2], longs(9)], "TensorScatter"),
    "a position's angle": ("(float[1, 1, 1, 4] x, float[5, 2] c, int64[1, 1] i) => (y) { y = RotaryEmbedding (x, c, c, i) }", [X[:4].reshape(1, 1, 1, 4), np.ones((5, 2), np.float32), longs(4)[None]], "RotaryEmbedding"),
    "an image of boxes": ("(float[2, 1, 3, 3] x, float[1, 4] r, int64[1] i) => (y) { y = RoiAlign (x, r, i) }", [np.ones((2, 1, 3, 3), np.float32), np.float32([[0, 0, 2, 2]]), longs(1)], "RoiAlign"),
    "a maximum's place": ("(float[1, 1, 1, 1] x, int64[1, 1, 1, 1] i) => (y) { y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, i) }", [np.ones((1, 1, 1, 1), np.float32), longs(3).reshape(1, 1, 1, 1)], "MaxUnpool"),
    "a length": ("(float[5, 1] x, int64[1] i) => (y) { y = ReverseSequence (x, i) }", [X[:, None], longs(5)], "ReverseSequence"),
    "a word": ("(int32[1, 1] i, float[5, 4] w, float[3, 4] p, float[4] g) => (y, z) { y, z = com.microsoft.EmbedLayerNormalization (i, \"\", w, p, \"\", g, g) }", [np.int32([[4]]), np.ones((5, 4), np.float32), np.ones((3, 4), np.float32), X[:4]], "EmbedLayerNormalization"),
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_THE_START)
def test_indices_that_must_not_be_negative(name: str) -> None:
    text, args, op = FROM_THE_START[name]
    head = HEAD.replace('"" : 22', '"" : 24')
    compiled = onnxc.compile(onnx.parser.parse_model(head + text))
    compiled(*args)
    at = next(k for k, a in enumerate(args) if a.dtype.kind == "i")
    for wrong in (-1, -2, np.iinfo(args[at].dtype).min):
        with pytest.raises(RunError, match=f"out of bounds.*{op}"):
            compiled(*args[:at], np.full_like(args[at], wrong), *args[at + 1 :])


MS_CACHE = "float[1, 1, 4] x, float[1, 2, 6, 2] c"
MS_BLOCKS = "r = Constant <value_ints = [0, 1, 3]> () s = Constant <value_ints = [0, 0, 1]> () r32 = Cast <to = 6> (r) s32 = Cast <to = 6> (s) rows = Reshape (r32, one) columns = Reshape (s32, one)"
IN_HEADS = "s = Constant <value_ints = [1, 2, 1, 2]> () q = Reshape (x, s)"
# What counts keys: the least count, the greatest, and the model.
COUNTS: dict[str, tuple[int, int, str, str]] = {
    "keys of attention": (0, 6, f"({MS_CACHE}, int64[1] i) => (y) {{ {IN_HEADS} y = Attention (q, c, c, , , , i) }}", "Attention"),
    "in front of a causal mask": (0, 6, f"({MS_CACHE}, int64[1] i) => (y) {{ {IN_HEADS} y = Attention <is_causal = 1> (q, c, c, , , , i) }}", "Attention"),
    "a shared cache": (0, 5, f"({MS_CACHE}, int32[1] i) => (y, k, v) {{ y, k, v = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x, , , , c, c, i) }}", "MultiHeadAttention"),
    "a step of a decoder": (0, 5, f"({MS_CACHE}, int32[1] i) => (y, k, v) {{ y, k, v = com.microsoft.DecoderMaskedMultiHeadAttention <num_heads = 2, past_present_share_buffer = 1> (x, x, x, , , c, c, i) }}", "DecoderMaskedMultiHeadAttention"),
    "grouped queries": (0, 5, f"({MS_CACHE}, int32[1] i) => (y, k, v) {{ t = Constant <value_int = 6> () t32 = Cast <to = 6> (t) y, k, v = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (x, x, x, c, c, i, t32) }}", "GroupQueryAttention"),
    "some new at once": (1, 5, "(float[1, 2, 4] x, float[1, 2, 6, 2] c, int32[1] i) => (y, k, v) { t = Constant <value_int = 6> () t32 = Cast <to = 6> (t) y, k, v = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (x, x, x, c, c, i, t32) }", "GroupQueryAttention"),
    "blocks of keys": (1, 5, f"({MS_CACHE}, int32[1] i) => (y, k, v) {{ one = Constant <value_ints = [1, 3]> () t = Constant <value_int = 5> () t32 = Cast <to = 6> (t) {MS_BLOCKS} y, k, v = com.microsoft.SparseAttention <num_heads = 2, kv_num_heads = 2, sparse_block_size = 4> (x, x, x, c, c, rows, columns, t32, i) }}", "SparseAttention"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_keys_are_those_there_may_be(name: str) -> None:
    least, most, text, op = COUNTS[name]
    compiled = onnxc.compile(onnx.parser.parse_model(HEAD.replace('"" : 22', '"" : 24') + text))
    dtype = np.int64 if "int64" in text else np.int32
    rows = 2 if least and "Group" in op else 1
    args = [np.linspace(-1, 1, 4 * rows, dtype=np.float32).reshape(1, rows, 4), np.ones((1, 2, 6, 2), np.float32)]
    for right in (least, most):
        assert np.isfinite(compiled(*args, np.array([right], dtype))[0]).all()
    for wrong in (least - 1, most + 1, np.iinfo(dtype).min, np.iinfo(dtype).max):
        with pytest.raises(RunError, match=f"out of bounds.*{op}"):
            compiled(*args, np.array([wrong], dtype))


def test_a_position_in_a_circle_may_be_the_greatest_integer() -> None:
    text = '(float[1, 5] x, float[1, 2] u, int64[1] i) => (y) { y = TensorScatter <axis = 1, mode = "circular"> (x, u, i) }'
    compiled = onnxc.compile(onnx.parser.parse_model(HEAD.replace('"" : 22', '"" : 24') + text))
    first = MOST % 5
    expected = X[None].copy()
    expected[0, [first, (first + 1) % 5]] = (7, 8)
    assert np.array_equal(compiled(X[None], np.float32([[7, 8]]), longs(MOST))[0], expected)


@pytest.mark.parametrize("step", [0, -1, LEAST])
def test_a_step_of_frames_is_positive(step: int) -> None:
    text = f'(float[1, 16, 1] x) => (y) {{ s = Constant <value_int = {step}> () n = Constant <value_int = 8> () y = STFT (x, s, "", n) }}'
    with pytest.raises(ModelError, match="frame_step"):
        onnxc.compile(onnx.parser.parse_model(HEAD + text))


@pytest.mark.parametrize(
    ("length", "rate", "low", "high", "message"),
    [(-1, 8000, 0.0, 4000.0, "negative"), (16, 0, 0.0, 4000.0, "positive"), (16, 8000, -900.0, 4000.0, "negative"),
     (16, 8000, 0.0, 9000.0, "out of the range of 9 bins")],
)  # fmt: skip
def test_a_mel_scale_that_does_not_fit(length: int, rate: int, low: float, high: float, message: str) -> None:
    text = f"""() => (float[a, b] y) {{ n = Constant <value_int = 4> () l = Constant <value_int = {length}> ()
      r = Constant <value_int = {rate}> () lo = Constant <value_float = {low}> () hi = Constant <value_float = {high}> ()
      y = MelWeightMatrix (n, l, r, lo, hi) }}"""
    with pytest.raises(ModelError, match=message):
        onnxc.compile(onnx.parser.parse_model(HEAD + text))
