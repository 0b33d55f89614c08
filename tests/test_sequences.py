"""Sequences and optionals: inside of a program where what is in them is known, on the host where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.errors import InputError, ModelError, RunError, ShapeError
from tests.staging_harness import check, floats, int64, parsed, same

TRUE, FALSE = np.array(True), np.array(False)
ADD_BIAS = "body = m (float[a, 3] p, float[3] q) => (float[a, 3] r) { r = Add(p, q) }"
TABLE: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "known": (
        """(float[n, 3] x) => (y, l, z) {
  i = Constant <value_int = -1> () e = Exp(x) s = SequenceConstruct(x, e)
  y = SequenceAt(s, i) l = SequenceLength(s) z = ConcatFromSequence <axis = 0> (s)
}""",
        [{"x": floats(n, 3)} for n in (0, 1, 7)],
    ),
    "known-inserted-and-erased": (
        """(float[n, 3] x) => (y, l) {
  i = Constant <value_int = 1> () e = Exp(x) n = Neg(x)
  a = SequenceEmpty() b = SequenceInsert(a, x) c = SequenceInsert(b, e, i) d = SequenceInsert(c, n, i)
  f = SequenceErase(d) g = SequenceErase(f, i) h = SequenceInsert(g, e)
  y = ConcatFromSequence <axis = -1, new_axis = 1> (h) l = SequenceLength(h)
}""",
        [{"x": floats(n, 3)} for n in (0, 1, 7)],
    ),
    "position-given": (
        """(float[n, 3] x, int64 i) => (y) {
  e = Exp(x) s = SequenceConstruct(x, e) a = SequenceAt(s, i) y = Neg(a)
}""",
        [{"x": floats(2, 3), "i": int64(i)} for i in (0, 1, -1, -2)],
    ),
    "position-int32-and-ranks": (
        """(float[n, 3] x, int32 i) => (y) {
  e = ReduceSum(x) f = ReduceSum <keepdims = 0> (x) s = SequenceConstruct(x, e, f) a = SequenceAt(s, i) y = Neg(a)
}""",
        [{"x": floats(2, 3), "i": np.array(i, np.int32)} for i in (0, 1, 2, -1)],
    ),
    "insert-at-position-given": (
        """(float[n, 3] x, int64 i) => (seq(float[a, b]) s) {
  e = Exp(x) t = SequenceConstruct(x, e) n = Neg(x) s = SequenceInsert(t, n, i)
}""",
        [{"x": floats(2, 3), "i": int64(i)} for i in (0, 1, 2, -1, -2)],
    ),
    "erase-at-position-given": (
        """(float[n, 3] x, int64 i) => (seq(float[a, b]) s, l) {
  e = Exp(x) n = Neg(x) t = SequenceConstruct(x, e, n) s = SequenceErase(t, i) l = SequenceLength(s)
}""",
        [{"x": floats(2, 3), "i": int64(i)} for i in (0, 1, 2, -1, -3)],
    ),
    "nothing-split": (
        """(float[n, 3] x) => (l, m) {
  k = Constant <value_int = 2> () s = SplitToSequence(x, k) l = SequenceLength(s)
  t = SplitToSequence(x) m = SequenceLength(t)
}""",
        [{"x": floats(n, 3)} for n in (0, 1, 5)],
    ),
    "input": (
        "(seq(float[a, b]) s, int64 i) => (y, l) { x = SequenceAt(s, i) y = Exp(x) l = SequenceLength(s) }",
        [{"s": [floats(2, 3), floats(3, 1), floats(0, 2)], "i": int64(i)} for i in (0, 1, 2)],
    ),
    "input-of-any-rank": (
        "(seq(float[]) s, int64 i) => (y, l) { x = SequenceAt(s, i) y = Exp(x) l = SequenceLength(s) }",
        [{"s": [floats(2, 3), floats(3)], "i": int64(i)} for i in (0, 1)],
    ),
    "input-that-is-output": (
        "(seq(int64[n]) s) => (seq(int64[n]) t, l) { t = Identity(s) l = SequenceLength(s) }",
        [{"s": [int64([1, 2])]}, {"s": []}],
    ),
    "strings": (
        "(seq(string[n]) s, int64 i) => (y) { y = SequenceAt(s, i) }",
        [{"s": [np.array(["a", "bc"], object), np.array([], object)], "i": int64(i)} for i in (0, 1)],
    ),
    "split": (
        """(float[n, m] x, int64 i, int64 k) => (y, z) {
  s = SplitToSequence <axis = 1> (x, k) y = SequenceAt(s, i) z = ConcatFromSequence <axis = 1> (s)
}""",
        [{"x": floats(2, m), "i": int64(-1), "k": int64(3)} for m in (6, 7)],
    ),
    "split-into-sizes": (
        """(float[n, m] x, int64[k] k) => (y, z) {
  i = Constant <value_int = -1> () s = SplitToSequence <axis = 1> (x, k)
  y = SequenceAt(s, i) z = ConcatFromSequence <axis = 1> (s)
}""",
        [{"x": floats(2, 7), "k": int64(k)} for k in ([3, 0, 4], [7])],
    ),
    "split-known": (
        """(float[n, 7] x) => (y, z, w) {
  i = Constant <value_int = -1> () k = Constant <value_int = 3> () ks = Constant <value_ints = [2, 5]> ()
  s = SplitToSequence <axis = 1> (x, k) y = SequenceAt(s, i)
  t = SplitToSequence <axis = 1> (x, ks) z = SequenceAt(t, i)
  u = SplitToSequence <axis = 1, keepdims = 0> (x) w = ConcatFromSequence <axis = 1, new_axis = 1> (u)
}""",
        [{"x": floats(2, 7)}],
    ),
    "split-open-axis": (
        """(float[n, m] x) => (y, z) {
  i = Constant <value_int = -1> () s = SplitToSequence <axis = 0, keepdims = 0> (x)
  y = SequenceAt(s, i) z = ConcatFromSequence <axis = 1, new_axis = 1> (s)
}""",
        [{"x": floats(n, 5)} for n in (1, 2)],
    ),
    "grows-in-a-loop": (
        """(int64 t, float[n, 3] x) => (y) {
  e = SequenceEmpty()
  s = Loop (t, "", e) <body = b (int64 i, bool c, seq(float[a, 3]) q) => (bool co, seq(float[a, 3]) r) {
    co = Identity(c) k = Cast <to = 1> (i) v = Add(x, k) r = SequenceInsert(q, v)
  }>
  y = ConcatFromSequence <axis = 0> (s)
}""",
        [{"t": int64(t), "x": floats(2, 3)} for t in (1, 3)],
    ),
    "grows-in-a-loop-by-other-shapes": (
        """(int64 t) => (y, l) {
  e = SequenceEmpty <dtype = 7> ()
  s = Loop (t, "", e) <body = b (int64 i, bool c, seq(int64[a]) q) => (bool co, seq(int64[a]) r) {
    co = Identity(c) z = Constant <value_int = 0> () o = Constant <value_int = 1> ()
    v = Range(z, i, o) r = SequenceInsert(q, v)
  }>
  y = ConcatFromSequence <axis = 0> (s) l = SequenceLength(s)
}""",
        [{"t": int64(t)} for t in (1, 4)],
    ),
    "while-it-grows": (
        """(float[n] x) => (y) <float two = {2}, float limit = {100}, int64 last = {-1}> {
  c = Constant <value = bool {1}> () e = SequenceConstruct(x)
  s = Loop ("", c, e) <body = b (int64 i, bool c1, seq(float[a]) q) => (bool co, seq(float[a]) r) {
    l = SequenceAt(q, last) v = Mul(l, two) m = ReduceMax <keepdims = 0> (v) co = Less(m, limit)
    r = SequenceInsert(q, v)
  }>
  y = ConcatFromSequence <axis = 0, new_axis = 1> (s)
}""",
        [{"x": np.float32([0.1, 1])}],
    ),
    "of-a-branch": (
        """(bool c, float[n] x) => (y, l) {
  s = If (c) <then_branch = t () => (a) { a = SequenceConstruct(x, x) },
              else_branch = e () => (b) { z = SequenceEmpty() b = SequenceInsert(z, x) }>
  y = ConcatFromSequence <axis = 0> (s) l = SequenceLength(s)
}""",
        [{"c": c, "x": floats(3)} for c in (TRUE, FALSE)],
    ),
    "map": (
        f"""(seq(float[a, 3]) s, float[3] b) => (y, l) {{
  t = SequenceMap (s, b) <{ADD_BIAS}> y = ConcatFromSequence <axis = 0> (t) l = SequenceLength(t)
}}""",
        [{"s": [floats(n, 3) for n in ns], "b": floats(3)} for ns in ((2, 1), (4,))],
    ),
    "map-of-two": (
        """(seq(float[n]) s, seq(float[n]) t) => (y, z) {
  u, v = SequenceMap (s, t) <body = m (float[n] p, float[n] q) => (float[n] r, int64[k] w) {
    r = Mul(p, q) w = NonZero(r)
  }>
  y = ConcatFromSequence <axis = 0> (u) z = ConcatFromSequence <axis = 1> (v)
}""",
        [{"s": [floats(3), floats(2)], "t": [floats(3), floats(2)]}],
    ),
    "map-known": (
        f"""(float[n, 3] x, float[3] b) => (y, l) {{
  e = Exp(x) s = SequenceConstruct(x, e) t = SequenceMap (s, b) <{ADD_BIAS}>
  y = ConcatFromSequence <axis = 0> (t) l = SequenceLength(t)
}}""",
        [{"x": floats(2, 3), "b": floats(3)}],
    ),
    "optional-input": (
        """(optional(float[n]) o) => (y) {
  h = OptionalHasElement(o)
  y = If (h) <then_branch = t () => (a) { v = OptionalGetElement(o) a = Neg(v) },
              else_branch = e () => (b) { b = Constant <value_floats = [1.0, 2.0]> () }>
}""",
        [{"o": floats(3)}, {"o": None}],
    ),
    "optional-known": (
        "(float[n] x) => (y, h) { o = Optional(x) h = OptionalHasElement(o) v = OptionalGetElement(o) y = Neg(v) }",
        [{"x": floats(n)} for n in (0, 3)],
    ),
    "optional-of-a-sequence": (
        """(optional(seq(float[n])) o) => (y, h) {
  h = OptionalHasElement(o) s = OptionalGetElement(o) y = ConcatFromSequence <axis = 0> (s)
}""",
        [{"o": [floats(3), floats(1)]}],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_sequences(case: str) -> None:
    text, feeds = TABLE[case]
    check("g " + text, *feeds, export=case not in ("map-of-two",))


def empty_or_not() -> onnx.ModelProto:
    """A branch makes an optional of x, the other an empty one."""
    vector = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    info = helper.make_tensor_value_info
    some = helper.make_graph([helper.make_node("Optional", ["x"], ["a"])], "t", [], [onnx.ValueInfoProto(name="a")])
    none = helper.make_graph([helper.make_node("Optional", [], ["b"])], "e", [], [onnx.ValueInfoProto(name="b")])
    none.node[0].attribute.append(helper.make_attribute("type", vector))
    for graph in (some, none):
        graph.output[0].type.CopyFrom(helper.make_optional_type_proto(vector))
    nodes = [
        helper.make_node("If", ["c"], ["o"], then_branch=some, else_branch=none),
        helper.make_node("OptionalHasElement", ["o"], ["h"]),
    ]
    inputs = [info("c", TensorProto.BOOL, []), info("x", TensorProto.FLOAT, ["n"])]
    graph = helper.make_graph(nodes, "g", inputs, [info("h", TensorProto.BOOL, [])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_an_optional_that_a_branch_leaves_empty() -> None:
    check(empty_or_not(), *({"c": c, "x": floats(3)} for c in (TRUE, FALSE)))


def test_what_is_known_needs_no_host() -> None:
    for case in ("known", "known-inserted-and-erased", "split-known", "map-known", "optional-known"):
        report = onnxc.compile(parsed("g " + TABLE[case][0])).explain()
        assert all(k.kind != "host" for k in report.kernels), case


def test_a_map_of_very_many() -> None:
    """Each of them is a part of one program."""
    text = """(float[600, 2] x) => (float[600, 2] y) {
      s = SplitToSequence <axis = 0, keepdims = 0> (x)
      t = SequenceMap <body = b (float[2] e) => (float[2] o) { o = Neg(e) }> (s)
      y = ConcatFromSequence <axis = 0, new_axis = 1> (t)
    }"""
    check(parsed("g " + text), {"x": floats(600, 2)})


def test_a_map_of_nothing() -> None:
    model = onnxc.compile(
        parsed(
            "g "
            + TABLE["map"][0]
            .replace("=> (y, l)", "=> (seq(float[a, 3]) t, l)")
            .replace(" y = ConcatFromSequence <axis = 0> (t)", "")
        )
    )
    found = model([], floats(3))
    assert found["t"] == [] and found["l"] == 0


@pytest.mark.parametrize(
    "case, feed, says",
    (
        ("position-given", {"x": floats(2, 3), "i": int64(2)}, "index 2 is out of bounds.*SequenceAt"),
        ("position-given", {"x": floats(2, 3), "i": int64(-3)}, "index -3 is out of bounds.*SequenceAt"),
        ("position-int32-and-ranks", {"x": floats(2, 3), "i": np.int32(3)}, "position 3 is outside of.*SequenceAt"),
        ("position-int32-and-ranks", {"x": floats(2, 3), "i": np.int32(-4)}, "position -4 .*SequenceAt"),
        ("insert-at-position-given", {"x": floats(2, 3), "i": int64(3)}, "position 3 .*SequenceInsert"),
        ("erase-at-position-given", {"x": floats(2, 3), "i": int64(3)}, "position 3 .*SequenceErase"),
        ("split", {"x": floats(2, 3), "i": int64(0), "k": int64(0)}, "parts of size 0.*SplitToSequence"),
        ("split-into-sizes", {"x": floats(2, 3), "k": int64([1, 1])}, r"sizes \[1, 1\].*SplitToSequence"),
        ("split-into-sizes", {"x": floats(2, 3), "k": int64([4, -1])}, r"sizes \[4, -1\].*SplitToSequence"),
        ("map-of-two", {"s": [floats(2), floats(2)], "t": [floats(2)]}, "position 1.*SequenceMap"),
        ("optional-of-a-sequence", {"o": None}, "optional without a value.*OptionalGetElement"),
        ("input-of-any-rank", {"s": [], "i": int64(0)}, "position 0.*SequenceAt"),
    ),
)  # fmt: skip
def test_wrong_data(case: str, feed: dict[str, Any], says: str) -> None:
    model = onnxc.compile(parsed("g " + TABLE[case][0]))
    with pytest.raises(RunError, match=says):
        model(**feed)


def test_a_sequence_of_nothing_cannot_be_joined() -> None:
    model = onnxc.compile(parsed("g (seq(float[n]) s) => (y) { y = ConcatFromSequence <axis = 0> (s) }"))
    same(model([floats(2), floats(1)])["y"], np.concatenate([floats(2), floats(1)]), "y")
    with pytest.raises(RunError, match=r"empty sequence.*ConcatFromSequence"):
        model([])
    with pytest.raises(InputError, match="'s' expects arrays of float32 of rank 1; float32"):
        model([floats(2, 3)])


@pytest.mark.parametrize(
    "given, says",
    ((floats(3), "expects a list"), ([floats(3)], "float32 of rank 2"), ([int64([[1]])], "int64"), (None, "list")),
)
def test_wrong_inputs(given: Any, says: str) -> None:
    model = onnxc.compile(parsed("g " + TABLE["input"][0]))
    with pytest.raises(InputError, match=says):
        model(given, int64(0))


def test_wrong_models() -> None:
    for text, says in (
        ("(float[n] x) => (y) <int64 i = {2}> { s = SequenceConstruct(x) y = SequenceAt(s, i) }", "position 2"),
        ("(float[n] x) => (y) { y = SequenceLength(x) }", "SequenceLength"),
        ("(float[n] x) => (y) { s = SequenceConstruct(x) y = Exp(s) }", "Exp"),
    ):  # fmt: skip
        with pytest.raises((ModelError, ShapeError), match=says):
            onnxc.compile(parsed("g " + text))
