"""The routines behind cumsum, top_k and the scatters, through compiled programs.

Every program is compared with the interpreter's numpy, on buffers that end at an inaccessible page; the ONNX
operators are compared with onnxruntime as well. All programs of a test are one library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.errors import OnnxcError, RunError, ShapeError
from onnxc.frontends.onnx_file import load
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Sym
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.passes.decompose import decompose
from onnxc.primitives.builder import Builder
from tests import ops_harness
from tests.compile_harness import Compiled, check, compare, compile_graphs

pytestmark = pytest.mark.every_target

Array = np.ndarray
RNG = np.random.default_rng(7)
NUMBERS = [
    np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64,
    np.uint8, np.uint16, np.uint32, np.uint64,
]  # fmt: skip
INF, NAN = np.inf, np.nan


@dataclass
class Case:
    """A node of one primitive, and what it is run on. `shapes` stands for the arrays' own shapes."""

    op: str
    arrays: Sequence[Array]
    attrs: dict[str, Any]
    shapes: Sequence[Sequence[Dim]] | None = None
    transposed: bool = False  # the first operand arrives through a pointwise node over a transpose
    exact: bool = False


def graph(case: Case) -> Graph:
    b = Builder()
    shapes = case.shapes or [a.shape for a in case.arrays]
    xs = [
        b.input(TensorType(dtypes.from_numpy(a.dtype), tuple(s)), f"x{i}")
        for i, (a, s) in enumerate(zip(case.arrays, shapes, strict=True))
    ]
    if case.transposed:
        perm = tuple(reversed(range(xs[0].rank)))
        xs[0] = b.add(b.transpose(xs[0], perm), 1)
    return b.graph(list(b.emit(case.op, xs, case.attrs)))


def check_all(cases: Sequence[Case]) -> list[Compiled]:
    programs = compile_graphs([graph(c) for c in cases])
    for program, case in zip(programs, cases, strict=True):
        if case.exact:
            check(program, case.arrays, 0, 0)
        else:
            check(program, case.arrays)
    return programs


def numbers(dtype: Any, *shape: int) -> Array:
    """Few different values, so that ties and duplicates are common."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return RNG.integers(0, 2, shape).astype(bool)
    low = 0 if dtype.kind == "u" else -9
    return RNG.integers(low, 10, shape).astype(dtype)


def reals(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def indices(n: int, *shape: int, dtype: Any = np.int64) -> Array:
    """Positions in an axis of n elements, half of them negative."""
    return RNG.integers(-n, n, shape).astype(dtype)


# ---------------------------------------------------------------- cumsum


def cumsum_cases() -> list[Case]:
    cases = [Case("cumsum", [numbers(t, 3, 17, 5)], {"axis": a}) for t in NUMBERS for a in (1, 2)]
    for shape in ((1,), (1000,), (9, 70), (3, 5, 33), (2, 3, 1, 40), (0, 4), (4, 0)):
        for axis in range(len(shape)):
            for exclusive, reverse in ((False, False), (True, False), (False, True), (True, True)):
                attrs = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
                cases.append(Case("cumsum", [reals(*shape)], attrs))
    special = np.array([[1, INF, 2, NAN, 3], [-0.0, -0.0, 0.0, -INF, INF]], np.float32)
    cases += [Case("cumsum", [special], {"axis": 1, "exclusive": e, "reverse": r}) for e in (0, 1) for r in (0, 1)]
    cases.append(Case("cumsum", [reals(7, 6, 5)], {"axis": 1}, transposed=True))
    cases.append(Case("cumsum", [np.array([2**31 - 1, 5, 9], np.int32)], {"axis": 0}))
    n, m = Sym("s0"), Sym("s1")
    cases += [
        Case("cumsum", [reals(7, 6, 5)], {"axis": a, "reverse": r}, [(n, 6, m)]) for a in range(3) for r in (0, 1)
    ]
    return cases


def test_cumsum() -> None:
    check_all(cumsum_cases())


def test_cumsum_keeps_the_sign_of_zero() -> None:
    x = np.array([-0.0, -0.0, 0.0, -0.0], np.float32)
    (program,) = compile_graphs([graph(Case("cumsum", [x], {"axis": 0}))])
    assert np.signbit(program(x)[0]).tolist() == [True, True, False, False]


# ---------------------------------------------------------------- top_k


def top_k(x: Array, k: Dim, axis: int, largest: bool, **more: Any) -> Case:
    return Case("top_k", [x], {"k": k, "axis": axis, "largest": largest}, exact=True, **more)


def top_k_cases() -> list[Case]:
    cases = [top_k(numbers(t, 3, 150), k, 1, m) for t in (*NUMBERS, np.bool_) for k, m in ((5, True), (40, False))]
    for n, k in (
        (1, 1),
        (7, 7),
        (64, 40),
        (65, 33),
        (1000, 1),
        (1000, 32),
        (1000, 33),
        (1000, 125),
        (1000, 126),
        (4000, 4000),
        (5, 0),
    ):
        cases += [top_k(reals(3, n), k, 1, m) for m in (True, False)]
    cases += [top_k(reals(5, 6, 7), 3, axis, True) for axis in range(3)]
    cases += [top_k(numbers(np.int64, 300, 3), k, 0, False) for k in (2, 35, 200)]
    cases += [top_k(numbers(np.float64, 2, 3000), k, 1, True) for k in (40, 3000)]
    cases += [top_k(reals(0, 6), 3, 1, True), top_k(reals(6, 5, 4), 2, 0, True, transposed=True)]
    special = np.array([1, NAN, 3, -0.0, 0.0, -NAN, INF, -INF, 0.0, 1e-42, -1e-42], np.float32)
    for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        cases += [top_k(special.astype(t), k, 0, m) for k in (1, 4, 11) for m in (True, False)]
        cases += [top_k(np.tile(special, 30).astype(t), k, 0, True) for k in (35, 200)]
    for t in (np.int8, np.int64, np.uint64, np.uint8):
        ends = np.array([np.iinfo(t).min, np.iinfo(t).max, 0, 1, np.iinfo(t).max - 1], t)
        cases += [top_k(ends, 5, 0, m) for m in (True, False)]
    cases += [top_k(np.sort(reals(5000)), k, 0, m) for k in (8, 100) for m in (True, False)]
    cases += [top_k(np.full(500, v, np.int8), 70, 0, m) for v in (-128, 127) for m in (True, False)]  # one key
    many = numbers(np.uint8, 9000)
    cases += [top_k(many, 600, 0, True), top_k(np.maximum(many, 250), 600, 0, False), top_k(many, 5, 0, False)]
    n = Sym("s0")
    cases += [top_k(reals(4, 90), kk, 1, True, shapes=[(n, Sym("s1"))]) for kk in (3, 40)]
    cases.append(top_k(reals(9, 4), 3, 0, True, shapes=[(n, 4)]))
    return cases


def test_top_k() -> None:
    check_all(top_k_cases())


def test_top_k_of_too_few() -> None:
    with pytest.raises(ShapeError, match="best 5 of 4"):
        graph(top_k(reals(4), 5, 0, True))
    (program,) = compile_graphs([graph(top_k(reals(4), 3, 0, True, shapes=[(Sym("s0"),)]))])
    check(program, [reals(3)])
    with pytest.raises(OnnxcError):
        program(reals(2))


# ---------------------------------------------------------------- scatters


def scatter_elements(x: Array, index: Array, updates: Array, axis: int, reduction: str, **more: Any) -> Case:
    return Case("scatter_elements", [x, index, updates], {"axis": axis, "reduction": reduction}, **more)


def scatter_nd(x: Array, index: Array, updates: Array, reduction: str, **more: Any) -> Case:
    return Case("scatter_nd", [x, index, updates], {"reduction": reduction}, **more)


REDUCTIONS = ("none", "add", "mul", "max", "min")


def scatter_elements_cases() -> list[Case]:
    cases = [
        scatter_elements(numbers(t, 5, 21), indices(5, 8, 21), numbers(t, 8, 21), 0, r)
        for t in (*NUMBERS, np.bool_) for r in REDUCTIONS
    ]  # fmt: skip
    for axis in range(3):
        for used in ((4, 5, 6), (2, 3, 2), (1, 5, 1), (4, 0, 6)):
            for dtype in (np.int64, np.int32):
                index = indices((4, 5, 6)[axis], *used, dtype=dtype)
                cases.append(scatter_elements(reals(4, 5, 6), index, reals(*used), axis, "add"))
    cases.append(scatter_elements(reals(50), indices(50, 3000), reals(3000), 0, "none"))
    cases.append(scatter_elements(reals(50, 600), indices(50, 90, 600), reals(90, 600), 0, "none"))
    cases.append(scatter_elements(reals(200, 300), indices(300, 200, 40), reals(200, 40), 1, "max"))
    cases.append(scatter_elements(reals(0, 3), np.zeros((0, 3), np.int64), reals(0, 3), 0, "none"))
    cases.append(scatter_elements(reals(6, 5, 4), indices(5, 4, 3, 6), reals(4, 3, 6), 1, "add", transposed=True))
    nan = np.array([1, NAN, 2, 3], np.float32)
    into = np.array([NAN, 1, 5, NAN], np.float32)
    cases += [scatter_elements(nan, np.arange(4), into, 0, r) for r in REDUCTIONS]
    n, m, j = Sym("s0"), Sym("s1"), Sym("s2")
    for axis in (0, 1):
        index = indices((7, 20)[axis], 5, 9)
        shapes = [(n, m), (j, 9), (j, 9)]
        cases.append(scatter_elements(reals(7, 20), index, reals(5, 9), axis, "none", shapes=shapes))
    return cases


def test_scatter_elements() -> None:
    check_all(scatter_elements_cases())


def scatter_nd_cases() -> list[Case]:
    cases = [
        scatter_nd(numbers(t, 5, 37), indices(5, 9, 1), numbers(t, 9, 37), r)
        for t in (*NUMBERS, np.bool_) for r in REDUCTIONS
    ]  # fmt: skip
    for depth in (1, 2, 3):
        for lead in ((), (7,), (2, 3), (0,)):
            index = np.stack([indices(d, *lead) for d in (4, 5, 6)[:depth]], -1)
            updates = reals(*lead, *(4, 5, 6)[depth:])
            cases += [scatter_nd(reals(4, 5, 6), index, updates, r) for r in ("none", "add")]
    cases.append(scatter_nd(reals(30, 2000), indices(30, 40, 1), reals(40, 2000), "add"))
    cases.append(scatter_nd(reals(300, 100), indices(100, 1, 2), reals(1), "none"))
    cases.append(scatter_nd(reals(6, 5, 4), indices(4, 8, 2), reals(8, 6), "add", transposed=True))
    n, m, j = Sym("s0"), Sym("s1"), Sym("s2")
    shapes: list[Sequence[Dim]] = [(n, 6, m), (j, 2), (j, m)]
    cases.append(scatter_nd(reals(8, 6, 11), indices(6, 13, 2), reals(13, 11), "mul", shapes=shapes))
    shapes = [(n, 6, m), (j, Sym("s3")), (j, m)]
    cases.append(scatter_nd(reals(8, 6, 11), indices(6, 13, 2), reals(13, 11), "none", shapes=shapes))
    return cases


def test_scatter_nd() -> None:
    check_all(scatter_nd_cases())


def test_an_index_out_of_bounds_is_an_error() -> None:
    x, at, updates = reals(4, 5), np.zeros((2, 5), np.int64), reals(2, 5)
    cases = [scatter_elements(x, at, updates, 0, "none"), scatter_nd(x, at[:, :1], updates, "add")]
    for program, case in zip(compile_graphs([graph(c) for c in cases]), cases, strict=True):
        check(program, case.arrays)
        for wrong in (4, -5, 2**40, -(2**63)):
            arrays = [a.copy() for a in case.arrays]
            arrays[1][-1, 0] = wrong
            with pytest.raises(RunError, match=f"index {wrong} is out of bounds"):
                program(*arrays)
        check(program, case.arrays)


def test_shapes_that_do_not_fit() -> None:
    x, at = reals(4, 5), np.zeros((2, 6), np.int64)
    with pytest.raises(ShapeError, match="reaches outside"):
        graph(scatter_elements(x, at, reals(2, 6), 0, "none"))
    with pytest.raises(ShapeError, match="the updates"):
        graph(scatter_nd(x, at[:, :1], reals(2, 4), "none"))
    n, m, u = Sym("s0"), Sym("s1"), Sym("s4")
    case = scatter_elements(x, at[:, :5], reals(2, 5), 0, "none", shapes=[(4, n), (2, m), (u, m)])
    (program,) = compile_graphs([graph(case)])
    check(program, case.arrays)
    with pytest.raises(OnnxcError):
        program(x, at, reals(2, 6))
    with pytest.raises(OnnxcError):
        program(x, at[:, :5], reals(1, 5))


def test_threads_do_not_change_the_bits() -> None:
    cases = [
        Case("cumsum", [reals(90, 700)], {"axis": 1}), Case("cumsum", [reals(700, 90)], {"axis": 0}),
        scatter_elements(reals(50, 90), indices(50, 900, 90), reals(900, 90), 0, "add"),
        scatter_nd(reals(50, 90), indices(50, 900, 1), reals(900, 90), "add"),
        top_k(numbers(np.float32, 60, 900), 50, 1, True),
    ]  # fmt: skip
    for program, case in zip(compile_graphs([graph(c) for c in cases]), cases, strict=True):
        once = program(*case.arrays, threads=1)
        for threads in (2, 3):
            for a, b in zip(once, program(*case.arrays, threads=threads), strict=True):
                assert a.tobytes() == b.tobytes()


def test_routines_inside_a_graph() -> None:
    """Operands that other kernels compute, results that are read again, and constants."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (6, 40)), "x")
    values, at = b.emit("top_k", [b.mul(x, 2.0)], {"k": 9, "axis": 1, "largest": True})
    zeros = b.constant(np.zeros((6, 40), np.float32))
    back = b.one("scatter_elements", zeros, at, b.exp(values), axis=1, reduction="none")
    total = b.one("cumsum", b.add(back, x), axis=1, exclusive=False, reverse=False)
    (program,) = compile_graphs([b.graph([b.mul(total, 0.5), back])])
    check(program, [reals(6, 40)])


# ---------------------------------------------------------------- against onnxruntime


def onnx_cases() -> list[ops_harness.Case]:
    one = ops_harness.Case
    x, wide = reals(5, 6, 7), reals(3, 500)
    axis = np.array(1)
    cases = [one("CumSum", [x, axis], {"exclusive": e, "reverse": r}, 14, const=[1]) for e in (0, 1) for r in (0, 1)]
    for k in (1, 20, 50, 400):
        for largest in (0, 1):
            inputs = [np.round(wide * 4), np.array([k])]
            cases.append(one("TopK", inputs, {"largest": largest}, 11, const=[1], outputs=2))
    for reduction in REDUCTIONS:
        at = indices(6, 5, 9, 7)
        cases.append(one("ScatterElements", [x, at, reals(5, 9, 7)], {"axis": 1, "reduction": reduction}, 18))
        nd = np.stack([indices(5, 8), indices(6, 8)], -1)
        cases.append(one("ScatterND", [x, nd, reals(8, 7)], {"reduction": reduction}, 18, keep=[2]))
    return cases


def test_onnx_operators() -> None:
    cases = [(c, dynamic) for c in onnx_cases() for dynamic in (False, True)]
    graphs = [decompose(load(ops_harness.build(c, dynamic))) for c, dynamic in cases]
    for program, (case, _) in zip(compile_graphs(graphs), cases, strict=True):
        actual = program(*ops_harness.feeds(case).values())
        for a, e in zip(actual, ops_harness.expected(case), strict=True):
            compare(a, e, 1e-6, 1e-6, str(case))


@pytest.mark.parametrize("rows", ["7, 3, 5", "M, C, N"])
def test_an_index_that_is_repeated_along_rows(rows: str) -> None:
    """As graph networks add up what comes along edges. Rows that are narrower than the data's stay as they are."""
    m, c, n = rows.split(", ")
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    g (float[4,{c},{n}] x, int64[{m}] i, float[{m},{c},{n}] u, float[{m},2,{n}] v)
        => (float[4,{c},{n}] added, float[4,{c},{n}] written, float[4,{c},{n}] some) {{
        axes = Constant <value_ints = [1, 2]> ()
        j = Unsqueeze (i, axes)  us = Shape (u)  vs = Shape (v)  k = Expand (j, us)  l = Expand (j, vs)
        added = ScatterElements <axis = 0, reduction = "add"> (x, k, u)
        written = ScatterElements <axis = 0> (x, k, u)
        some = ScatterElements <axis = 0> (x, l, v)
    }}"""
    model = onnxc.compile(onnx.parser.parse_model(text))
    x, u, v, i = reals(4, 3, 5), reals(7, 3, 5), reals(7, 2, 5), indices(4, 7)
    added, written, some = x.copy(), x.copy(), x.copy()
    np.add.at(added, i, u)
    for k, at in enumerate(i):
        written[at] = u[k]
        some[at, :2] = v[k]
    got = model(x, i, u, v)
    np.testing.assert_allclose(got["added"], added, 1e-6, 1e-6)
    np.testing.assert_array_equal(got["written"], written)
    np.testing.assert_array_equal(got["some"], some)
