# ruff: noqa: E501  (models as text)
"""Elements that no kernel has a type for, strings and complex128: programs move places, the host takes the elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxc
from onnxc.errors import RunError, UnsupportedError
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose

Array = np.ndarray[Any, Any]
WORDS = np.array([["a", "bb", "c"], ["ü", "", "a"]], object)

# Each a few operators of one family, so that few programs are compiled. T is the type of the elements.
GRAPHS: dict[str, tuple[str, list[Array]]] = {
    "views": (
        """(T[n, 3] x) => (a, b, c, d) { s = Constant <value_ints = [3, -1]> ()  at = Constant <value_ints = [1]> ()
          r = Reshape (x, s)  t = Transpose (r)  a = Concat <axis = 1> (t, x)  b = Unsqueeze (t, at)
          one = Constant <value_ints = [0]> ()  two = Constant <value_ints = [5]> ()  step = Constant <value_ints = [2]> ()
          c = Slice (a, one, two, at, step)  d = Flatten (b) }""",
        [WORDS],
    ),
    "sizes": (
        """(T[n, m] x, int64[2] r) => (a, b, c, d, e) { a = Tile (x, r)  h = Constant <value_ints = [2, 1, 1]> ()
          b = Expand (x, h)  c, d = Split <axis = 1, num_outputs = 2> (x)
          z = Constant <value_ints = [-1]> ()  e = Reshape (x, z) }""",
        [WORDS, np.array([2, 1])],
    ),
    "positions": (
        """(T[n, m] x, int64[k] i, int64[1, 1] j) => (a, b, c, d) { a = Gather <axis = 1> (x, i)
          b = GatherElements (x, j)  c = GatherND (x, j)  one = Constant <value_ints = [1]> ()
          n = Constant <value_ints = [3]> ()  l = Expand (one, n)
          d = ReverseSequence <time_axis = 0, batch_axis = 1> (x, l) }""",
        [WORDS, np.array([2, -3, 2, 0]), np.array([[1]])],
    ),
    "selected": (
        """(T[n, m] x, bool[n, 1] c, bool[k] k) => (a, b) { y = Identity (x)  one = Constant <value_ints = [0]> ()
          two = Constant <value_ints = [1]> ()  z = Gather (x, one)  a = Where (c, y, z)  b = Compress <axis = 1> (x, k) }""",
        [WORDS, np.array([[True], [False]]), np.array([True, False, True])],
    ),
    "scattered": (
        """(T[n, m] x, int64[1, 2] i, int64[1, 1] j) => (a, b) { s = Constant <value_ints = [0]> ()
          f = Constant <value_ints = [1]> ()  o = Constant <value_ints = [1]> ()  u = Slice (x, s, f, o)
          w = Concat <axis = 1> (u, u)  z = Slice (w, s, f, s)  a = ScatterElements <axis = 1> (x, i, z)
          l = Constant <value_ints = [2]> ()  p = Slice (x, f, l, s)  b = ScatterND (x, j, p) }""",
        [WORDS, np.array([[2, 0]]), np.array([[0]])],
    ),
    "blocks": (
        """(T[1, 4, 2, 2] x) => (a, b) { a = DepthToSpace <blocksize = 2> (x)  b = SpaceToDepth <blocksize = 2> (a) }""",
        [np.array([*"abcdefghijklmnop"], object).reshape(1, 4, 2, 2)],
    ),
}  # fmt: skip
CONTROL: dict[str, tuple[str, list[Array]]] = {
    "a loop that keeps its sizes": (
        """(T[3] x, int64 n) => (y, s) { y, s = Loop (n, "", x) <body = b (int64 i, bool go, T[3] a) => (bool on, T[3] o, T[3] q) {
          on = Identity (go)  one = Constant <value_ints = [2, 0, 1]> ()  o = Gather (a, one)  q = Identity (a) }> }""",
        [WORDS[0], np.array(4)],
    ),
    "a loop that only hands on": (
        """(T[3] x) => (y, s) { n = Constant <value_int = 3> ()
          y, s = Loop (n, "", x) <body = b (int64 i, bool go, T[3] a) => (bool on, T[3] o, T[3] q) {
            on = Identity (go)  o = Identity (a)  q = Identity (x) }> }""",
        [WORDS[0]],
    ),
    "a scan": (
        """(T[2] x, T[3, 2] z) => (y, s) { y, s = Scan <num_scan_inputs = 1, body = b (T[2] a, T[2] q) => (T[2] o, T[2] p) {
          o = Identity (q)  p = Identity (a) }> (x, z) }""",
        [WORDS[0, :2], WORDS.reshape(3, 2)],
    ),
    "branches": (
        """(T[3] x, bool c) => (y) { y = If (c) <then_branch = t () => (T[k] o) { o = Concat <axis = 0> (x, x) },
          else_branch = e () => (T[k] p) { p = Identity (x) }> }""",
        [WORDS[0], np.array(True)],
    ),
}  # fmt: skip


def model_of(text: str, kind: str) -> onnx.ModelProto:
    head = '<ir_version: 10, opset_import: ["" : 18]> g '
    return onnx.parser.parse_model(head + text.replace("T[", f"{kind}["))


def numbers(x: Array) -> Array:
    """Strings, as complex numbers."""
    return np.array([len(v) + 1j * sum(map(ord, v)) for v in x.ravel()]).reshape(x.shape) if x.dtype == object else x


def named(model: onnx.ModelProto, arrays: list[Array]) -> dict[str, Array]:
    return {i.name: a for i, a in zip(model.graph.input, arrays, strict=True)}


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, feeds))


def judged(text: str, arrays: list[Array]) -> list[Array]:
    """By onnxruntime, of numbers that stand for the elements: of strings it gets some of these operators wrong."""
    words = np.array(sorted({w for x in arrays if x.dtype == object for w in x.ravel()}), object)
    numbered = [np.searchsorted(words, x).astype(np.float32) if x.dtype == object else x for x in arrays]
    model = model_of(text, "float")
    return [words[y.astype(np.int64)] for y in by_onnxruntime(model, named(model, numbered))]


def check(found: list[Array], wanted: list[Array]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", GRAPHS | CONTROL)
def test_strings(name: str) -> None:
    text, arrays = (GRAPHS | CONTROL)[name]
    model = model_of(text, "string")
    check(onnxc.compile(model).run(None, named(model, arrays)), judged(text, arrays))


@pytest.mark.parametrize("name", GRAPHS | CONTROL)
def test_complex128(name: str) -> None:
    text, arrays = (GRAPHS | CONTROL)[name]
    model = model_of(text, "complex128")
    found = onnxc.compile(model).run(None, named(model, [numbers(x) for x in arrays]))
    check(found, [numbers(y) for y in judged(text, arrays)])


def test_no_program_where_nothing_is_computed() -> None:
    model = onnxc.compile(model_of("(T[n] x) => (y) { y = Identity (x) }", "string"))
    y = model(WORDS[0])["y"]
    assert y is not WORDS[0]
    check([y], [WORDS[0]])
    assert onnxc.compile(model_of('() => (y) { y = Constant <value_strings = ["a"]> () }', "string"))()[0] == ["a"]


def test_several_moves_are_one_program() -> None:
    """Of strings that are moved again no one makes the tensor in between."""
    text = """(T[n, 3] x) => (y) { t = Transpose (x)  u = Concat <axis = 1> (t, t)  z = Constant <value_ints = [-1]> ()
      y = Reshape (u, z) }"""
    model = onnxc.compile(model_of(text, "string"))
    assert [k.function for k in model.explain().kernels if k.kind == "host"] == ["elements_at"]
    check([model(WORDS)["y"]], [np.concatenate([WORDS.T, WORDS.T], 1).reshape(-1)])


def test_padding_is_the_empty_string() -> None:
    text = "(T[3] x) => (y) { p = Constant <value_ints = [1, 2]> ()  y = Pad (x, p) }"
    check([onnxc.compile(model_of(text, "string"))(WORDS[0])["y"]], [np.array(["", "a", "bb", "c", "", ""], object)])
    z = numbers(WORDS[0])
    check([onnxc.compile(model_of(text, "complex128"))(z)["y"]], [np.pad(z, (1, 2))])


def test_positions_outside_are_refused() -> None:
    model = onnxc.compile(model_of("(T[n] x, int64[k] i) => (y) { y = Gather (x, i) }", "string"))
    with pytest.raises(RunError, match=r"index 3 is out of bounds \[node n0 Gather\]"):
        model(WORDS[0], np.array([0, 3]))


def test_what_computes_is_refused() -> None:
    text = '(T[3] x, int64[1] i) => (y) { y = ScatterElements <reduction = "add"> (x, i, x) }'
    with pytest.raises(UnsupportedError, match=r"the type string are moved only; .*n0 ScatterElements"):
        onnxc.compile(model_of(text.replace("int64[1]", "int64[3]"), "string"))


@pytest.mark.parametrize("name", ["views", "scattered"])
def test_exported(name: str) -> None:
    text, arrays = GRAPHS[name]
    model = model_of(text, "string")
    written = to_onnx(decompose(onnx_file.load(model), staged=True))
    check(by_onnxruntime(written, named(model, arrays)), by_onnxruntime(model, named(model, arrays)))


def test_saved(tmp_path: Path) -> None:
    text, arrays = GRAPHS["selected"]
    model = onnxc.compile(model_of(text, "string"))
    model.save(tmp_path / "m.onnxc")
    check(list(onnxc.load(tmp_path / "m.onnxc")(*arrays).values()), list(model(*arrays).values()))
