"""Models whose sizes depend on data: several programs, with steps on the host between them."""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import onnxc
from onnxc.cli import app
from onnxc.errors import InputError, OnnxcError, PackageError, RunError
from onnxc.frontends import onnx_file
from onnxc.host.selection import _unique_slices
from onnxc.passes.decompose import decompose
from onnxc.runtime.package import open_package, write_package
from onnxc.runtime.staged import StagedModel
from onnxc.staging.cut import cut
from tests.staging_harness import check, floats, int64, parsed, same

TRUE, FALSE = np.array(True), np.array(False)
f32 = np.float32


def integers(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, high, shape)


SPARSE = [floats(3, 5) * (floats(3, 5) > 0), np.zeros((3, 4), f32), floats(0, 5), floats(1, 1), floats(17, 13)]
TABLE: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "NonZero": ("(float[n, m] x) => (int64[2, k] y) { y = NonZero(x) }", [{"x": x} for x in SPARSE]),
    "NonZero-scalar": ("(float x) => (y) { y = NonZero(x) }", [{"x": np.array(x, f32)} for x in (0, 1, np.nan)]),
    "NonZero-bool-4d": ("(bool[a, b, c, d] x) => (y) { y = NonZero(x) }", [{"x": integers(2, 2, 3, 1, 5) > 0}]),
    "NonZero-then-GatherND": (
        """(float[n, m] x) => (y, k) {
  c = Greater(x, zero) p = NonZero(c) t = Transpose <perm = [1, 0]> (p) g = GatherND(x, t) y = Exp(g) k = Size(g)
}""".replace("=> (y, k) {", "=> (y, k) <float zero = {0}> {"),
        [{"x": x} for x in SPARSE],
    ),
    "Compress": (
        "(float[n, m] x, bool[k] c) => (y) { y = Compress <axis = 1> (x, c) }",
        [{"x": floats(3, 5), "c": np.array(c)} for c in ([True, False, True], [False] * 5, [True] * 5)],
    ),
    "Compress-flat": (
        "(int32[n, m] x, bool[k] c) => (y) { y = Compress(x, c) }",
        [{"x": integers(9, 3, 5).astype(np.int32), "c": integers(2, k) > 0} for k in (1, 9, 15)],
    ),
    "Unique": (
        "(float[n] x) => (y, i, j, c) { y, i, j, c = Unique(x) }",
        [{"x": integers(9, n).astype(f32)} for n in (0, 1, 30)],
    ),
    "Unique-unsorted": (
        "(int64[n, m] x) => (y, i, j, c) { y, i, j, c = Unique <sorted = 0> (x) }",
        [{"x": integers(9, n, 3)} for n in (1, 10)],
    ),
    "Unique-rows": (
        "(float[n, m] x) => (z, c) { y, i, j, c = Unique <axis = 0> (x) z = Neg(y) }",
        [{"x": integers(2, n, 3).astype(f32)} for n in (1, 17)],
    ),
    "Reshape": (
        "(float[n, m] x, int64[3] s) => (y) { z = Reshape(x, s) y = Exp(z) }",
        [
            {"x": floats(n, 6), "s": int64(s)}
            for n, s in ((4, [2, -1, 3]), (4, [0, 2, 3]), (0, [0, 2, 3]), (1, [1, 6, 1]))
        ],
    ),
    "Reshape-allowzero": (
        "(float[n, m] x, int64[2] s) => (y) { y = Reshape <allowzero = 1> (x, s) }",
        [{"x": floats(0, 6), "s": int64([0, 3])}, {"x": floats(2, 3), "s": int64([3, -1])}],
    ),
    "Reshape-to-open-rank": (
        "(float[n, m] x, int64[k] s) => (y) { z = Reshape(x, s) y = Neg(z) }",
        [{"x": floats(4, 6), "s": int64(s)} for s in ([2, -1, 3], [24], [4, 6])]
        + [{"x": floats(1, 1), "s": int64([])}],
    ),
    "Expand": (
        "(float[n, 1] x, int64[3] s) => (y) { y = Expand(x, s) }",
        [
            {"x": floats(n, 1), "s": int64(s)}
            for n, s in ((4, [2, 1, 3]), (4, [2, 4, 1]), (1, [0, 2, 3]), (1, [2, 5, 1]))
        ],
    ),
    "Range": (
        "(int64 a, int64 c, int64 d) => (y) { y = Range(a, c, d) }",
        [
            {"a": int64(a), "c": int64(c), "d": int64(d)}
            for a, c, d in ((0, 5, 1), (5, 0, -2), (3, 3, 1), (0, 7, 3), (4, 0, 1))
        ],
    ),
    "Range-float": (
        "(float a, float c, float d) => (y) { y = Range(a, c, d) }",
        [
            {"a": np.array(a, f32), "c": np.array(c, f32), "d": np.array(d, f32)}
            for a, c, d in ((0, 1, 0.1), (1, -1, -0.5))
        ],
    ),
    "Slice": (
        "(float[n, m] x, int64[2] s, int64[2] e) => (y) { z = Slice(x, s, e) y = Neg(z) }",
        [
            {"x": floats(n, m), "s": int64(s), "e": int64(e)}
            for n, m, s, e in (
                (4, 6, [1, -3], [3, 100]),
                (4, 6, [3, 0], [1, 0]),
                (1, 0, [0, 0], [1, 1]),
                (1, 1, [-9, 0], [9, 1]),
            )
        ],
    ),
    "Slice-steps": (
        """(float[n, m] x, int64[2] s, int64[2] e) => (y) <int64[2] a = {1, 0}, int64[2] st = {-2, 3}> {
  y = Slice(x, s, e, a, st)
}""",
        [{"x": floats(5, 7), "s": int64(s), "e": int64(e)} for s, e in (([-1, 0], [-100, 5]), ([2, 1], [4, 2]))],
    ),
    "Slice-axes-and-steps-given": (
        """(float[n, m] x, int64[1] s, int64[1] e, int64[1] a, int64[1] st) => (y) {
  z = Slice(x, s, e, a, st) y = Neg(z)
}""",
        [
            {"x": floats(4, 6), "s": int64([s]), "e": int64([e]), "a": int64([a]), "st": int64([t])}
            for s, e, a, t in ((1, 3, 1, 1), (-1, -100, -2, -2), (0, 4, 0, 3))
        ],
    ),
    "Pad": (
        "(float[n, m] x, int64[4] p) => (y) { z = Pad(x, p) y = Exp(z) }",
        [{"x": floats(n, 6), "p": int64(p)} for n, p in ((4, [1, 0, -1, 2]), (1, [0, 0, 0, 0]), (4, [-1, -2, 0, -3]))],
    ),
    "Pad-modes": (
        """(float[n, m] x, int64[4] p) => (y, z, w) {
  y = Pad <mode = "reflect"> (x, p) z = Pad <mode = "edge"> (x, p) w = Pad <mode = "wrap"> (x, p)
}""",
        [{"x": floats(4, 6), "p": int64(p)} for p in ([1, 0, 2, 3], [0, 0, 0, 0])],
    ),
    "Tile": (
        "(float[n, m] x, int64[2] r) => (y) { y = Tile(x, r) }",
        [{"x": floats(2, 3), "r": int64(r)} for r in ([1, 3], [0, 3], [2, 1])],
    ),
    "TopK": (
        "(float[n, m] x, int64[1] k) => (y, i) { y, i = TopK(x, k) }",
        [{"x": floats(4, 6), "k": int64([k])} for k in (0, 1, 3, 6)],
    ),
    "OneHot": (
        "(int64[n] x, int64 k, float[2] v) => (y) { y = OneHot(x, k, v) }",
        [{"x": int64([1, 2, -1]), "k": int64(k), "v": floats(2)} for k in (1, 3, 7)],
    ),
    "ConstantOfShape": (
        "(int64[2] k) => (y) { y = ConstantOfShape <value = int8[1] {3}> (k) }",
        [{"k": int64(k)} for k in ([3, 0], [3, 2], [1, 1])],
    ),
    "ConstantOfShape-of-open-rank": (
        "(int64[k] s) => (y) { z = ConstantOfShape(s) y = Exp(z) }",
        [{"s": int64(s)} for s in ([3, 2], [], [4])],
    ),
    "Split": (
        "(float[n, m] x, int64[2] s) => (y, z) { y, z = Split <axis = 1> (x, s) }",
        [{"x": floats(4, 6), "s": int64(s)} for s in ([1, 5], [6, 0])],
    ),
    "Resize-sizes": (
        '(float[1, 2, h, w] x, int64[4] s) => (y) { y = Resize <mode = "linear"> (x, "", "", s) }',
        [{"x": floats(1, 2, 4, 5), "s": int64(s)} for s in ([1, 2, 8, 3], [1, 2, 4, 5])],
    ),
    "Resize-scales": (
        '(float[1, 2, h, w] x, float[4] s) => (y) { y = Resize <mode = "nearest"> (x, "", s) }',
        [{"x": floats(1, 2, 4, 5), "s": np.array(s, f32)} for s in ([1, 1, 2, 0.5], [1, 1, 1, 1])],
    ),
    "axes-given": (
        "(float[n, m] x, int64[1] a) => (y, z, w) { y = ReduceSum(x, a) z = Unsqueeze(x, a) w = CumSum(x, a) }",
        [{"x": floats(3, 4), "a": int64([a])} for a in (1, -2, 0)],
    ),
    "squeezed-axes-given": (
        "(float[n, m, k] x, int64[j] a) => (z) { y = Squeeze(x, a) z = Neg(y) }",
        [{"x": floats(1, 3, 1), "a": int64(a)} for a in ([0], [2], [0, -1])],
    ),
    "open-rank": (
        "(float[] x, float[n] z) => (y, s) { w = Add(x, z) y = Exp(w) s = Shape(x) }",
        [{"x": floats(*s), "z": floats(3)} for s in ((3,), (2, 3), (), (4, 1, 3), (0, 3))],
    ),
    "sizes-from-data-of-data": (
        """(float[n] x, float[n] y) => (z, u) {
  p = NonZero(x) q = Squeeze(p, zero) g = Gather(y, q) r = NonZero(g) s = Shape(r) t = Slice(s, one, two)
  z = ConstantOfShape(t) u = Transpose(r)
}""".replace("=> (z, u) {", "=> (z, u) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}> {"),
        [{"x": x, "y": x[::-1].copy()} for x in (floats(7) * (floats(7) > 0), np.zeros(3, f32), floats(1))],
    ),
    "shape-arithmetic-on-what-is-read": (
        """(float[n, 4] x) => (y) <int64[1] two = {2}, int64[1] rest = {-1}> {
  m = ReduceMax <keepdims = 0> (x) c = Greater(x, m2) f = NonZero(c) t = Transpose(f) g = GatherND(x, t)
  s = Shape(g) d = Mul(s, two) z = Concat <axis = 0> (g, g) r = Concat <axis = 0> (two, rest) y = Reshape(z, r)
}""".replace("int64[1] two = {2}", "float m2 = {0}, int64[1] two = {2}")
        .replace("m = ReduceMax <keepdims = 0> (x) ", "")
        .replace("s = Shape(g) d = Mul(s, two) ", ""),
        [{"x": floats(n, 4)} for n in (1, 7)],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_sizes_from_data(case: str) -> None:
    text, feeds = TABLE[case]
    check("g " + text, *feeds)


@pytest.mark.parametrize(
    "dtype",
    (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16, f32, np.float64),
)
def test_dtypes(dtype: Any) -> None:
    """Of selections, in each dtype; onnxruntime lacks some, so numpy is the judge."""
    name = "float" if dtype is f32 else "double" if dtype is np.float64 else np.dtype(dtype).name
    model = onnxc.compile(
        parsed(f"""g ({name}[n] x, bool[n] c) => (p, y, u) {{
  p = NonZero(x) y = Compress <axis = 0> (x, c) u, i, j, k = Unique(x)
}}""")
    )
    for n in (0, 1, 17):
        x, c = integers(3, n).astype(dtype), integers(2, n) > 0
        got = model(x, c)
        same(got["p"], np.array(np.nonzero(x), np.int64), "NonZero")
        same(got["y"], x[c], "Compress")
        same(got["u"], np.unique(x), "Unique")


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int64, np.float16, np.float64])
def test_unique_slices_as_numpy_finds_them(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for shape, axis in (((50, 3), 0), ((2, 40, 2), 1), ((9,), 0), ((1, 4), -1)):
        x = np.where(rng.random(shape) < 0.2, -0.0, rng.integers(-2, 3, shape)).astype(dtype)
        found = _unique_slices(x, axis)
        assert found is not None
        for a, b in zip(found, np.unique(x, True, True, True, axis=axis), strict=True):
            np.testing.assert_array_equal(a, b.reshape(a.shape))
    assert _unique_slices(np.array([[np.nan]]), 0) is None


@pytest.mark.parametrize("flags", ["axis = 0", "axis = -1", "axis = 1, sorted = 0"])
@pytest.mark.parametrize("dtype", ["string", "bfloat16", "complex64"])
def test_unique_slices_of_what_numpy_does_not_order(dtype: str, flags: str) -> None:
    """Strings, and numbers of other libraries, along an axis: as the same numbers in float32."""
    numbers = np.random.default_rng(3).integers(0, 2, (4, 2)).astype(np.float32)
    for x in (numbers, numbers.T, numbers[:0], numbers[:, :0]):
        compiled = [
            onnxc.compile(parsed(f"g ({t}[n, m] x) => (y, i, j, c) {{ y, i, j, c = Unique <{flags}> (x) }}"))
            for t in ("float", dtype)
        ]
        expected = compiled[0].run(None, {"x": x})
        own = compiled[1].get_inputs()[0].dtype.numpy
        given = x.astype(int).astype(str).astype(object) if dtype == "string" else x.astype(own)
        got = compiled[1].run(None, {"x": given})
        values = got[0].real if dtype == "complex64" else got[0]
        same(values.astype(np.float32), expected[0], "values")
        for a, b in zip(got[1:], expected[1:], strict=True):
            same(a, b, "positions")


def test_strings_and_bfloat16() -> None:
    model = onnxc.compile(parsed("g (bfloat16[n] x, bool[n] c) => (y) { z = Compress <axis = 0> (x, c) y = Neg(z) }"))
    x = np.array([1, 2, 3], ml_dtypes.bfloat16)
    assert (model(x, np.array([True, False, True]))["y"] == np.array([-1, -3], ml_dtypes.bfloat16)).all()
    words = onnxc.compile(parsed("g (string[n] x) => (y, i) { y, i = Unique(x) }"))(np.array(["b", "a", "b"], object))
    assert words["y"].tolist() == ["a", "b"] and words["i"].tolist() == [1, 0]


# ---------------------------------------------------------------- wrong data


@pytest.mark.parametrize(
    "case, feed, says",
    (
        ("Reshape", {"x": floats(4, 6), "s": int64([5, -1, 3])}, "Reshape"),
        ("Reshape", {"x": floats(4, 6), "s": int64([5, 5, 5])}, "Reshape"),
        ("Reshape", {"x": floats(4, 6), "s": int64([-2, 5, 5])}, "Reshape"),
        ("Reshape", {"x": floats(4, 6), "s": int64([-1, -1, 6])}, "Reshape"),
        ("Reshape-to-open-rank", {"x": floats(4, 6), "s": int64([5, 5])}, "Reshape"),
        ("Expand", {"x": floats(4, 1), "s": int64([2, 3, 3])}, "the shape of Expand.*Expand"),
        ("Expand", {"x": floats(4, 1), "s": int64([-1, 4, 3])}, "the shape of Expand.*Expand"),
        ("Range", {"a": int64(0), "c": int64(3), "d": int64(0)}, "the size of Range.*Range"),
        ("Range-float", {k: np.float32(v) for k, v in (("a", 0), ("c", 1e30), ("d", 1e-30))}, "bytes.*Range"),
        ("Pad", {"x": floats(2, 2), "p": int64([-3, 0, 0, 0])}, "Pad"),
        ("Tile", {"x": floats(2, 2), "r": int64([-1, 1])}, "the repeats of Tile.*Tile"),
        ("TopK", {"x": floats(2, 2), "k": int64([3])}, "TopK"),
        ("TopK", {"x": floats(2, 2), "k": int64([-1])}, "the count of TopK.*TopK"),
        ("OneHot", {"x": int64([0]), "k": int64(-1), "v": floats(2)}, "the depth of OneHot.*OneHot"),
        ("ConstantOfShape", {"k": int64([-1, 2])}, "the shape of ConstantOfShape.*ConstantOfShape"),
        ("Split", {"x": floats(4, 6), "s": int64([1, 4])}, "the sizes of Split.*Split"),
        ("Split", {"x": floats(4, 6), "s": int64([-1, 7])}, "the sizes of Split.*Split"),
        ("axes-given", {"x": floats(3, 4), "a": int64([5])}, "axis"),
        ("Slice-axes-and-steps-given", {"x": floats(2, 2), **{k: int64([0]) for k in ("s", "e", "a", "st")}}, "Slice"),
        ("squeezed-axes-given", {"x": floats(1, 3, 1), "a": int64([1])}, "Squeeze"),
        ("Compress", {"x": floats(3, 5), "c": np.array([True] * 6)}, "Compress"),
    ),
)  # fmt: skip
def test_wrong_data(case: str, feed: dict[str, Any], says: str) -> None:
    model = onnxc.compile(parsed("g " + TABLE[case][0]))
    with pytest.raises(OnnxcError, match=says) as caught:
        model(**feed)
    assert isinstance(caught.value, (RunError, InputError)) or "later" in says or caught.value.node, caught.value


def test_an_expand_that_changes_nothing_is_checked() -> None:
    model, x = onnxc.compile(parsed("g (float[2,6] x, int64[2] s) => (y) { y = Expand(x, s) }")), floats(2, 6)
    for shape in ([2, 6], [1, 6]):
        np.testing.assert_array_equal(model(x, np.array(shape))["y"], x)
    for wrong in ([5, 6], [2, -6]):
        with pytest.raises(RunError, match=r"the shape of Expand.*Expand"):
            model(x, np.array(wrong))


def test_wrong_inputs() -> None:
    model = onnxc.compile(parsed("g " + TABLE["open-rank"][0]))
    with pytest.raises(InputError, match="'x' expects arrays of float32; int64"):
        model(int64([1, 2, 3]), floats(3))
    for args in ((floats(3),), (floats(3), floats(3), floats(3))):
        with pytest.raises(InputError):
            model(*args)
    with pytest.raises(InputError, match="q"):
        model(x=floats(3), z=floats(3), q=floats(3))


# ---------------------------------------------------------------- the compiled model


TWO_TIMES = """g (float[n] x, float[m] y) => (a, b) {
  p = NonZero(x) q = NonZero(y) c = Cast <to = 1> (p) d = Cast <to = 1> (q) a = Exp(c) b = Exp(d)
}"""


@pytest.mark.parametrize("case", ("Reshape", "Reshape-to-open-rank", "Unique-rows", "open-rank", "NonZero"))
def test_saved_and_loaded(case: str, tmp_path: Path) -> None:
    text, feeds = TABLE[case]
    model = onnxc.compile(parsed("g " + text), cache=False)
    model.save(tmp_path / "model.onnxc")
    loaded = onnxc.load(tmp_path / "model.onnxc")
    assert isinstance(loaded, StagedModel)
    assert [str(t) for t in loaded.get_inputs()] == [str(t) for t in model.get_inputs()]
    for feed in feeds:
        same([*loaded(**feed).values()], [*model(**feed).values()], case)


SEVERAL_STEPS = """g (float[n] x, int64 k, bool c) => (y, z, w) <int64[1] flat = {-1}> {
  p = NonZero(x)
  i = Reshape(p, flat)
  y = Gather(x, i)
  z = If (c) <then_branch = t () => (a) { a = Neg(y) }, else_branch = e () => (b) { b = Concat <axis = 0> (y, x) }>
  w = Loop (k, c, y) <body = body (int64 at, bool go, float[m] s) => (bool l, float[q] o) {
    l = Identity(go)
    o = Concat <axis = 0> (s, s)
  }>
}"""


@pytest.mark.parametrize("changes", [{"first_kernels": [99]}, {"first_kernels": [None]}, {"size_places": [3]}])
def test_damaged_tables(changes: dict[str, Any], tmp_path: Path) -> None:
    onnxc.compile(parsed("g (float[n] x) => (int64[1, k] y) { y = NonZero(x) }")).save(tmp_path / "m.onnxc")
    with open_package(tmp_path / "m.onnxc") as package:
        sections = {name: bytes(package.section(name)) for name in package.names if name != "manifest"}
        manifest = package.manifest | changes
    write_package(tmp_path / "m.onnxc", manifest, sections)
    with pytest.raises(PackageError, match="damaged"):
        onnxc.load(tmp_path / "m.onnxc")


def test_damaged_plans(tmp_path: Path) -> None:
    """Whatever a file's manifest says: the model runs, or an error tells that the file is damaged."""
    onnxc.compile(parsed(SEVERAL_STEPS)).save(tmp_path / "model.onnxc")
    feed = np.array([1, 0, 2], f32), np.array(2), TRUE
    with open_package(tmp_path / "model.onnxc") as package:
        manifest = dict(package.manifest)
        sections = {n: bytes(package.section(n)) for n in package.names if n != "manifest"}
    random, damaged = Random(0), 0
    for _ in range(60):
        found = copy.deepcopy(manifest)
        part = random.choice(["plan", "plan", "plan", "inputs", "outputs", "dim_names", "kernels", "arrays"])
        *way, last = random.choice(list(_places(found[part], (part,))))
        inner = functools.reduce(operator.getitem, way, found)
        inner[last] = random.choice([None, -1, 1, 99, 2**70, "x", "s0", [], {}, [[1]], 1.5])
        try:
            model = StagedModel(found, sections)
            model(*feed)
            model.explain()
        except PackageError:
            damaged += 1
        except OnnxcError:
            pass
    assert damaged > 30
    branch = next(k for k, step in enumerate(manifest["plan"]["steps"]) if step["kind"] == "if")
    for (*way, last), value in ((("plan", "steps", branch, "in", 1), None), (("inputs", 0, 1, 2, 0), [[1, "s9"]])):
        found = copy.deepcopy(manifest)
        functools.reduce(operator.getitem, way, found)[last] = value
        with pytest.raises(PackageError):
            StagedModel(found, sections)


def _places(tree: Any, way: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield way
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from _places(value, (*way, key))


def test_from_the_cache(tmp_path: Path) -> None:
    proto = parsed("g " + TABLE["Unique-rows"][0])
    stages: list[str] = []
    onnxc.compile(proto, cache=tmp_path)
    model = onnxc.compile(proto, cache=tmp_path, progress=stages.append)
    assert "load" in stages and "c++" not in stages
    feed = TABLE["Unique-rows"][1][1]
    same(model(**feed)["c"], np.unique(feed["x"], axis=0, return_counts=True)[1], "c")


def test_the_same_program_twice() -> None:
    model = check(TWO_TIMES, {"x": floats(3), "y": np.float32([0, 1, 0, 2])})
    assert len(model.manifest["parts"]) < len(
        list(cut(decompose(onnx_file.load(parsed(TWO_TIMES)), staged=True)).parts())
    ) + 1  # fmt: skip


def test_calls_from_several_threads() -> None:
    model = onnxc.compile(parsed("g " + TABLE["Reshape-to-open-rank"][0]))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            n, m = rng.integers(1, 9, 2)
            x = rng.standard_normal((n, m)).astype(f32)
            shape = [[m, n], [n * m], [1, n, m]][seed % 3]
            if not np.array_equal(model(x, int64(shape))["y"], -x.reshape(shape)):
                wrong.append((n, m, shape))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_views_are_no_programs() -> None:
    """What a program would only hand on in another shape is read as it lies, by a later one and by the host."""
    model = onnxc.compile(parsed("g (float[2,3] x, int64[2] r) => (y) { y = Tile(x, r) }"))
    x = floats(2, 3)
    np.testing.assert_array_equal(model(x, np.array([2, 3]))["y"], np.tile(x, (2, 3)))
    assert len(model.manifest["parts"]) == 1
    text = """g (float[2,6] x, int64[2,1] r, int64[3] shape) => (y, z, w) {
      two = Constant <value_ints = [2]> () flat = Reshape(r, two) n = Neg(x)
      turned = Reshape(n, shape) y = Abs(turned)
      z = Tile(n, flat) minus = Constant <value_ints = [-1]> () w = Reshape(n, minus)
    }"""
    check(parsed(text), {"x": floats(2, 6), "r": np.array([[2], [1]]), "shape": np.array([3, 2, 2])})


def test_what_the_host_does_is_reported() -> None:
    report = onnxc.compile(parsed("g " + TABLE["Unique"][0])).explain()
    (step,) = [k for k in report.kernels if k.kind == "host"]
    assert "Unique" in str(report) and step.function == "unique"
    assert report.to_dict()


@settings(max_examples=15)
@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.data())
def test_random_reshapes(shape: list[int], data: st.DataObject) -> None:
    """Any shape to any that has as many elements, given as a tensor, with -1 and 0 in it."""
    x = floats(*shape)
    wanted = data.draw(st.permutations(shape))
    if x.size and wanted:
        wanted = list(wanted)
        wanted[data.draw(st.integers(0, len(wanted) - 1))] = -1
    dims = ", ".join(f"d{k}" for k in range(len(shape)))
    model = (
        onnxc.compile(
            parsed(f"g (float[{dims}] x, int64[k] s) => (y) {{ z = Reshape <allowzero = 1> (x, s) y = Neg(z) }}")
        )
        if shape
        else None
    )
    if model is not None:
        same(model(x, int64(list(wanted)))["y"], -x.reshape(wanted), f"{shape} to {wanted}")


# ---------------------------------------------------------------- tools


def test_profile() -> None:
    """Times of kernels and of what the host does; of what did not run there are none."""
    text, feeds = TABLE["NonZero-then-GatherND"]
    model = onnxc.compile(parsed("g " + text))
    report = model.profile(feeds[0], runs=3, warm_up=1)
    assert report.profile is not None and report.profile.runs == 3
    assert {k.kind for k in report.profile.kernels} > {"host"}
    assert all(k.times is not None and k.times.best > 0 for k in report.kernels)
    assert report.to_dict()["profile"]["kinds"]["host"]["best"] > 0
    branches = onnxc.compile(parsed(BRANCHES))
    for c in (TRUE, FALSE):
        times = {k.label: k.times for k in branches.profile([c, floats(3)], runs=2).kernels}
        assert times["If"] is not None and (times["Exp"] is None) == (not c) and (times["Neg"] is None) == bool(c)
    later = onnxc.compile(parsed("g " + TABLE["open-rank"][0])).profile([floats(2, 3), floats(3)], runs=2)
    assert [k.function for k in later.kernels if k.times] == ["later"]


BRANCHES = """g (bool c, float[n] x) => (y) {
  y = If (c) <then_branch = t () => (a) { a = Exp(x) }, else_branch = e () => (b) { b = Neg(x) }>
}"""


def test_each_program_is_tuned(tmp_path: Path) -> None:
    """With what it is given in a call of the model; among algorithms that only sum, whichever is fastest here."""
    weights = ", ".join(f"{w:g}" for w in floats(9 * 256).ravel())
    text = f"""g (float[1, 16, 9, 9] x, int64[1] k) => (y)
    <float[16, 16, 3, 3] w = {{{weights}}}, int64[1] zero = {{0}}> {{
  c = Conv <pads = [1, 1, 1, 1]> (x, w) p = Slice(c, zero, k) y = Neg(p)
}}"""
    record = tmp_path / "record.json"
    model = onnxc.compile(parsed(text), mode="max-autotune", accuracy="strict", record=record, cache=False)
    assert record.exists() and any(k.choice is not None for k in model.explain().kernels)
    plain = onnxc.compile(parsed(text), accuracy="strict", tuned=False)
    same(model(floats(1, 16, 9, 9), int64([1]))["y"], plain(floats(1, 16, 9, 9), int64([1]))["y"], "y")
    path = tmp_path / "model.onnx"
    onnx.save(parsed(text), path)
    with pytest.raises(InputError, match="max-autotune"):
        onnxc.tune(path)


def test_comparison(tmp_path: Path) -> None:
    """`onnxc.compare` with random inputs: sequences, optionals and tensors of any rank among them."""
    for text in (
        TABLE["NonZero-then-GatherND"][0],
        "(seq(float[a, 3]) s, optional(float[n]) o, float[] x) => (seq(float[a, 3]) t, h, y) "
        "{ e = SequenceErase(s) t = Identity(e) h = OptionalHasElement(o) y = Exp(x) }",
    ):
        assert onnxc.compare(parsed("g " + text), samples=2).agree


def test_command_line(tmp_path: Path) -> None:
    path, saved = str(tmp_path / "m.onnx"), str(tmp_path / "m.onnxc")
    text = (
        "(seq(float[a, 3]) s, float[] x) => (seq(float[a, 3]) t, y) { e = SequenceErase(s) t = Identity(e) y = Exp(x) }"
    )
    onnx.save(parsed("g " + text), path)
    inputs = str(tmp_path / "i.npz")
    np.savez(inputs, **{"s[0]": floats(2, 3), "s[1]": floats(4, 3), "x": floats(2)})  # type: ignore[arg-type]
    results = {}
    for args in (
        ["info", path], ["compile", path, "-o", saved], ["info", saved], ["run", path], ["explain", path, "--profile"],
        ["run", saved, "--inputs", inputs, "-o", str(tmp_path / "o.npz")], ["compare", path],
    ):  # fmt: skip
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, (args, done.output, done.exception)
        results[" ".join(args[:2])] = done.output
    assert "sequence(float32[a, 3])" in results[f"info {path}"] and "float32[...]" in results[f"info {path}"]
    assert "seq(tensor(float))" in results[f"info {saved}"]
    assert "a sequence of 1" in results[f"run {saved}"]
    with np.load(tmp_path / "o.npz") as found:
        same(found["t[0]"], floats(2, 3), "t[0]")
        same(found["y"], np.exp(floats(2)), "y")


@pytest.mark.parametrize("n", (0, 1, 7, 8, 16383, 16384, 16385, 50001))
def test_positions(n: int) -> None:
    """The routine, on chunks and their ends; bytes of a bool may be any that are not 0; any step between them."""
    model = onnxc.compile(parsed("g (bool[n] x) => (y) { y = NonZero(x) }"))
    both = onnxc.compile(parsed("g (bool[n, m] x) => (y) { t = Transpose(x) y = NonZero(t) }"))
    for high in (2, 100):
        x = (integers(high, n) == 1).astype(np.uint8) * np.uint8(1 + 128 * (high == 100))
        for threads in (1, 3):
            model.threads = threads
            same(model(x.view(bool))["y"], np.array(np.nonzero(x), np.int64), f"{n}, one in {high}")
        pair = np.stack([x, x[::-1]], 1)
        same(both(pair.view(bool))["y"], np.array(np.nonzero(pair.T), np.int64), f"{n}, transposed")


def test_strings_are_exported() -> None:
    text = """g (string[n] x, string[n] z) => (y, e, i) {
  s = StringConcat(x, z) e = Equal(x, z) m = RegexFullMatch <pattern = "[ab]+"> (s)
  y, k = StringSplit <delimiter = "b"> (s) i = Cast <to = 7> (m)
}"""
    feed = {"x": np.array(["ab", "c", "b"], object), "z": np.array(["a", "c", ""], object)}
    check(text, feed, opset=20)
