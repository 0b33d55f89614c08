"""Strassen's algorithm for products with a constant right factor (matmul_strassen.h), in whole models."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import onnxc
from onnxc.codegen.cpp import strassen
from onnxc.runtime.cpu import machine
from tests.native_library import INCLUDE

F32, F64 = NDArray[np.float32], NDArray[np.float64]
LEVELS = ["native", "x86-64-v3"] if machine() == "x86_64" else ["native"]
MOST = 2.5  # by how much the error of the algorithm is greater than that of a sum, at most: as root of mean squares


@dataclass(frozen=True)
class Case:
    """A product [*left, k] by [k, n]."""

    left: tuple[int, ...]
    k: int
    n: int

    def factors(self, seed: int = 0) -> tuple[F32, F32]:
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((*self.left, self.k)), rng.standard_normal((self.k, self.n)) * 0.05
        return a.astype(np.float32), b.astype(np.float32)

    def model(self, b: F32, *more: onnx.NodeProto) -> onnx.ModelProto:
        end = more[-1].output[0] if more else "c"
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["a", "b"], ["c"]), *more], "product",
            [helper.make_tensor_value_info("a", 1, [*self.left, self.k])], [onnx.ValueInfoProto(name=end)],
            [numpy_helper.from_array(b, "b")],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


CASES = [
    Case((128,), 768, 768),
    Case((131,), 770, 1091),  # no whole tiles, no whole panels
    Case((2, 99), 768, 768),  # pairs of rows are of one item; the last is a pair with itself
    Case((1, 333), 642, 512),
    Case((3, 1, 65), 512, 2048),
]


def decided(model: onnx.ModelProto, **options: Any) -> onnxc.CompiledModel:
    """The model, compiled as if a measurement had decided for Strassen's algorithm."""
    *left, k = (d.dim_value or "?" for d in model.graph.input[0].type.tensor_type.shape.dim)
    rows = "?" if "?" in left else math.prod(left)
    each = rows if all(d == 1 for d in left[:-1]) else left[-1]
    subject = f"matmul {rows}x{k} to {model.graph.initializer[0].dims[1]}"
    subject += f", items of {each}" if each != rows else ""
    return onnxc.compile(model, tuned={subject: strassen.STRASSEN}, **{"threads": 2, **options})


def summed(model: onnx.ModelProto, a: F32, **options: Any) -> F32:
    """The ordinary product."""
    return run(onnxc.compile(model, **{"threads": 2, **options}), a, "matmul")


def compiled(model: onnx.ModelProto, a: F32, **options: Any) -> F32:
    """The product by Strassen's algorithm."""
    return run(decided(model, **options), a, "matmul strassen")


def run(made: onnxc.CompiledModel, a: F32, kind: str) -> F32:
    assert kind in {k.kind for k in made.explain().kernels}
    (found,) = made.run(None, {"a": a})
    return found


def rms(x: F64) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, cpu: str) -> None:
    a, b = case.factors()
    model, want = case.model(b), a.astype(np.float64) @ b
    found = compiled(model, a, cpu=cpu)
    assert rms(found - want) <= MOST * rms(summed(model, a, cpu=cpu) - want)
    np.testing.assert_array_equal(found, compiled(model, a, cpu=cpu, threads=1))


@pytest.mark.parametrize("cpu", LEVELS)
def test_factors_of_many_sizes(cpu: str) -> None:
    """Rows, terms and columns whose sizes are far apart: each result is as exact as with one size."""
    case, rng = CASES[1], np.random.default_rng(1)
    a, b = case.factors()
    rows, terms, columns = (
        np.exp2(rng.integers(-most, most, n)).astype(np.float32)
        for most, n in ((40, case.left[0]), (15, case.k), (12, case.n))
    )
    want = a.astype(np.float64) @ b
    made = compiled(case.model(b / terms[:, None] * columns), a * rows[:, None] * terms, cpu=cpu)
    plain = compiled(case.model(b), a, cpu=cpu)
    found = made.astype(np.float64) / rows[:, None] / columns
    assert rms(found - want) <= 2 * rms(plain - want)
    assert np.abs(found - want).max() <= 3 * np.abs(plain - want).max()


@pytest.mark.parametrize("cpu", LEVELS)
def test_zeros_are_zeros(cpu: str) -> None:
    """Columns of zeros, left and right of a pair, give zeros, and so do rows."""
    case = CASES[1]
    a, b = case.factors()
    b[:, ::7] = 0
    b[:, 32:35] = 0
    a[4:9] = 0
    found = compiled(case.model(b), a, cpu=cpu)
    want = a.astype(np.float64) @ b
    assert not found[want == 0].any() and not np.signbit(found[want == 0]).any()
    assert np.abs(found - want).max() <= 1e-5 * rms(want)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3]], ids=str)
def test_what_is_not_finite_stays_in_its_row(case: Case) -> None:
    """NaN, infinities, numbers whose sums overflow or are denormal: as the ordinary product has them."""
    a, b = case.factors()
    flat = a.reshape(-1, case.k)
    flat[3, 5], flat[10, 7], flat[-1, 3] = np.nan, np.inf, -np.inf
    flat[20:24] *= np.float32(1e-42)
    flat[30] *= np.float32(5e37)
    flat[36] *= np.float32(1e-25)
    flat[41, :4] = 3e38
    model = case.model(b)
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) @ b).reshape(-1, case.n)
    found, ordinary = (by(model, a).reshape(-1, case.n) for by in (compiled, summed))
    touched = [3, 10, len(flat) - 1, *range(20, 24), 30, 36, 41]
    np.testing.assert_array_equal(found[touched], ordinary[touched])
    others = np.setdiff1d(np.arange(len(flat)), touched)
    assert np.abs(found[others] - want[others]).max() <= 1e-5 * rms(want[others])


def test_items_do_not_depend_on_each_other() -> None:
    """What is computed of an item has the same bits whatever the others are, and wherever it is."""
    case = Case((4, 97), 512, 1024)
    a, b = case.factors()
    model = case.model(b)
    whole = compiled(model, a)
    np.testing.assert_array_equal(whole[::-1], compiled(model, np.ascontiguousarray(a[::-1])))
    other = a.copy()
    other[1:] *= 17
    np.testing.assert_array_equal(whole[0], compiled(model, other)[0])


def product(shape: list[Any], b: F32) -> onnx.ModelProto:
    """A product of an input of that shape by b."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])], "product",
        [helper.make_tensor_value_info("a", 1, shape)], [onnx.ValueInfoProto(name="c")],
        [numpy_helper.from_array(b, "b")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_a_batch_changes_no_bit() -> None:
    """An item of an open batch is computed as it would be alone."""
    case = Case((7, 97), 512, 1024)
    a, b = case.factors()
    made = decided(product(["batch", 97, case.k], b))
    assert {k.kind for k in made.explain().kernels} == {"matmul strassen"}
    whole = made.run(None, {"a": a})[0]
    for first, last in ((0, 1), (3, 4), (5, 7), (0, 0)):
        np.testing.assert_array_equal(whole[first:last], made.run(None, {"a": a[first:last]})[0])


@pytest.mark.parametrize("shape", [["rows", 512], ["batch", "rows", 512], [40, 512]])
def test_rows_that_are_open_or_few_do_not_meet(shape: list[Any]) -> None:
    """An element depends on its row alone where the number of rows is open: the algorithm is no candidate."""
    _, b = Case((1,), 512, 1024).factors()
    (kernel,) = onnxc.compile(product(shape, b)).explain().kernels
    assert kernel.kind == "matmul" and kernel.choice is None


def errors(found: F32, a: F32, b: F32) -> tuple[F64, F64]:
    """Of each row: the root of the mean square of the errors beside the sizes of columns, and the largest error beside
    what |a| |b| adds up to.
    """
    wide, weights = a.astype(np.float64), b.astype(np.float64)
    wrong = np.abs(found - wide @ weights)
    sizes = np.sqrt(np.mean(weights**2, axis=0))
    return np.sqrt(np.mean((wrong / sizes) ** 2, axis=1)), (wrong / (np.abs(wide) @ np.abs(weights))).max(axis=1)


def outliers(kind: str, a: F32, b: F32) -> None:
    """Makes some features, rows or weights a thousand times as large, as transformers have them."""
    if kind == "features of all rows":
        a[:, [7, 401]] *= 1000
    elif kind == "a feature of single rows":  # a token that attention rests on
        a[::6, 7] *= 1000
    elif kind == "single elements":
        a[np.arange(len(a)), np.arange(len(a)) * 5 % a.shape[1]] *= 1000
    elif kind == "weights":
        b[np.arange(b.shape[1]) * 5 % len(b), np.arange(b.shape[1])] *= 3
    elif kind == "rows of weights":
        b[[9, 500]] *= 1000
    elif kind == "columns of weights":
        b[:, [9, 33]] *= 1000
    else:
        np.maximum(a, 0, out=a)
        a **= 4


KINDS = ["features of all rows", "a feature of single rows", "single elements", "weights"]
KINDS += ["rows of weights", "columns of weights", "long tails"]


@pytest.mark.parametrize("kind", KINDS)
def test_outliers(kind: str) -> None:
    """Each row's error stays within a factor of the ordinary product's, where sizes in a row, or from one row to the
    next, are far apart.
    """
    case = Case((128,), 768, 768)
    a, b = case.factors()
    outliers(kind, a, b)
    model = case.model(b)
    found, ordinary = (errors(by(model, a), a, b) for by in (compiled, summed))
    for ours, theirs, most in zip(found, ordinary, (4, 6), strict=True):
        assert np.median(ours / theirs) <= 2.5 and (ours / theirs).max() <= most


BOUNDS = r"""
#include "matmul_strassen.h"
#include <cstdlib>
#include <cstring>
#include <vector>
template <class T> static T *block(i64 n) { return (T *)aligned_alloc(64, ox_up(n * sizeof(T), 64) * 64); }
// A product by tasks of `threads` threads, in an order that they may take; false where a bit is not as `want` has it.
static bool product(i64 M, i64 N, i64 K, i64 each, i64 threads, std::vector<f32> &want) {
  std::vector<f32> a(M * K), b(K * N), c(M * N);
  for (i64 i = 0; i < M * K; i++) a[i] = (f32)(i * 7919 % 1013 - 506) / 512;
  for (i64 i = 0; i < K * N; i++) b[i] = (f32)(i * 6271 % 997 - 498) / 512;
  for (i64 m = 5; m < M; m += 7) a[m * K] = __builtin_inff();
  f32 *packed = block<f32>(mm_packed(K, N));
  mm_pack_b(b.data(), N, 1, K, N, packed, 0, mm_panels(N));
  std::vector<f32> constants(2 * K + N / (2 * MM_NR) * 3 * MM_NR, 1);
  const MsPlan g = ms_plan(M, N, K, each, threads);
  char *scratch = block<char>(threads * ms_bytes(g));
  memset(scratch, 255, threads * ms_bytes(g));
  ms_fresh(g, scratch, threads);
  f32 *const out = c.data();
  const auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(out + m * N + n, v, lanes); };
  for (i64 w = threads; w-- > 0;)
    for (i64 t = w; t < g.tasks; t += threads)
      ms_task(g, t, MmRows<f32>{a.data(), K}, MmRight<f32>(packed), constants.data(), M, N, K,
              (f32 *)(scratch + w * ms_bytes(g)), epi, MmLines{out, 4 * N, 4});
  free(packed), free(scratch);
  if (want.empty()) want = c;
  return g.pairs > 0 && !memcmp(want.data(), c.data(), 4 * c.size());
}
int main() {
  for (i64 each : {1, 2, 16, 47, 129})
    for (i64 items : {1, 3})
      for (i64 N : {2 * MM_NR, 2 * MM_NR + 1, 5 * MM_NR + VL + 1})
        for (i64 K : {128, 770}) {
          std::vector<f32> want;
          for (i64 threads : {1, 2, 4})
            if (!product(each * items, N, K, each, threads, want)) return 1;
        }
}
"""


@pytest.mark.parametrize("cpu", LEVELS)
def test_stays_within_bounds(cpu: str, tmp_path: Path) -> None:
    """Compiled with checks of each access: rows, items, terms and columns of odd numbers, and any number of threads."""
    source, program = tmp_path / "bounds.cpp", tmp_path / "bounds"
    source.write_text(BOUNDS)
    flags = ["-O1", "-std=c++17", "-Wno-psabi", "-Wall", "-Wextra", "-fno-strict-aliasing", "-fsanitize=address"]
    command = ["g++", *flags, f"-march={cpu}", f"-I{INCLUDE}", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "asan" in built.stderr and built.returncode:
        pytest.skip("no library of the address sanitizer")
    assert built.returncode == 0 and "warning" not in built.stderr, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_epilogue_and_choice(tmp_path: Path) -> None:
    """What follows the product is computed with it; the report has the choice, which only a measurement turns; it is
    saved; accuracy="strict" rules it out.
    """
    case = CASES[1]
    a, b = case.factors()
    model = case.model(b, helper.make_node("Relu", ["c"], ["y"]))
    (kernel,) = onnxc.compile(model, threads=2).explain().kernels
    assert kernel.choice is not None and kernel.choice.chosen == "direct"
    assert kernel.choice.subject == "matmul 131x770 to 1091"
    assert set(kernel.choice.candidates) == {"direct", "strassen"}
    made = decided(model)
    found = run(made, a, "matmul strassen")
    np.testing.assert_array_equal(found, np.maximum(compiled(case.model(b), a), 0))
    made.save(tmp_path / "product.onnxc")
    np.testing.assert_array_equal(found, onnxc.load(tmp_path / "product.onnxc").run(None, {"a": a})[0])
    run(decided(model, accuracy="strict"), a, "matmul")


@pytest.mark.parametrize("cpu", LEVELS)
def test_a_column_of_one_great_weight(cpu: str) -> None:
    """It takes the ordinary product, with those of its panels; so do columns beside the last pair of panels."""
    case = CASES[1]
    a, b = case.factors()
    b[9, [5, 700, case.n - 1]] = 50
    found, ordinary = (by(case.model(b), a, cpu=cpu) for by in (compiled, summed))
    same = (found == ordinary).all(axis=0)
    assert same[[5, 700, case.n - 1]].all() and not same[200:600].all()
    assert (errors(found, a, b)[1] <= 6 * errors(ordinary, a, b)[1]).all()


@pytest.mark.parametrize("fault", ["infinite", "a row of zeros", "far apart", "great weights"])
def test_weights_that_it_does_not_fit(fault: str) -> None:
    case = CASES[0]
    a, b = case.factors()
    if fault == "infinite":
        b[3, 4] = np.inf
    elif fault == "a row of zeros":
        b[5] = 0
    elif fault == "great weights":
        b[9, ::100] = 10
    else:
        b[:300] *= np.float32(2.0**-50)
    model = case.model(b)
    np.testing.assert_array_equal(run(decided(model), a, "matmul"), summed(model, a))
