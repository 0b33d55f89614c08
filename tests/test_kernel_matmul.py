"""The matmul template (matmul.h), compiled alone and compared with float64 at awkward sizes and strides."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from onnxc.codegen.cpp.templates import pack_panels, packed_columns
from tests.native_library import native_library

LEVELS = {
    "native": ["-march=native"], "broad": ["-march=native", "-DONNXC_BROAD_TILES"], "avx2": ["-march=x86-64-v3"],
    "sse2": ["-march=x86-64"],
}  # fmt: skip

SOURCE = r"""
#include "matvec.h"
alignas(64) static char scratch[MM_SCRATCH * 8];

// Plain product with a bias row; every task of a grid made for `threads` threads, last task first.
template <class T>
static void run(const T *a, i64 sm, i64 sk, const T *bp, const T *rows, i64 ld, const T *bias, T *c, i64 ldc, i64 M,
                i64 N, i64 K, i64 threads) {
  auto epi = [=](i64 m, i64 n, V<T> v, auto lanes) OX_LAMBDA {
    stl(c + m * ldc + n, v + ldl(bias + n, lanes), lanes);
  };
  MmGrid g = mm_grid(M, N, K, threads);
  MmRight<T> b(bp, rows, ld);
  MmLines out{c, ldc * (i64)sizeof(T), sizeof(T)};
  for (i64 t = g.tasks; t-- > 0;)
    if (sk == 1)
      mm_task<T>(g, t, MmRows<T>{a, sm}, b, M, N, K, (T *)scratch, epi, out);
    else
      mm_task<T>(g, t, MmStrided<T>{a, sm, sk}, b, M, N, K, (T *)scratch, epi);
}
// Packs panel by panel, as tasks of a pool would.
template <class T> static void pack(const T *b, i64 sk, i64 sn, i64 K, i64 N, T *bp) {
  for (i64 p = mm_panels(N); p-- > 0;) mm_pack_b(b, sk, sn, K, N, bp, p, p + 1);
}
#define ENTRIES(T)                                                                                         \
  extern "C" void run_##T(const T *a, i64 sm, i64 sk, const T *bp, const T *rows, i64 ld, const T *bias,   \
                          T *c, i64 ldc, i64 M, i64 N, i64 K, i64 threads) {                               \
    run<T>(a, sm, sk, bp, rows, ld, bias, c, ldc, M, N, K, threads);                                       \
  }                                                                                                        \
  extern "C" void pack_##T(const T *b, i64 sk, i64 sn, i64 K, i64 N, T *bp) {                              \
    pack<T>(b, sk, sn, K, N, bp);                                                                          \
  }                                                                                                        \
  extern "C" void whole_##T(const T *b, i64 sk, i64 sn, i64 K, i64 N, T *bp) {                             \
    mm_pack_b(b, sk, sn, K, N, bp, 0, mm_panels(N));                                                       \
  }
ENTRIES(f32) ENTRIES(f64) ENTRIES(i32) ENTRIES(i64)

// A prologue (A is squared while it is packed) and one rectangle of tiles.
extern "C" void squared(const f32 *a, const f32 *bp, f32 *c, i64 N, i64 K, i64 m0, i64 m1, i64 p0,
                        i64 p1) {
  auto sq = [=](i64 m, i64 k, auto lanes) OX_LAMBDA { vf x = ldl(a + m * K + k, lanes); return x * x; };
  auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(c + m * N + n, v, lanes); };
  matmul_block<f32>(mm_map<f32>(sq), bp, N, K, m0, m1, p0, p1, (f32 *)scratch, epi);
}
// A B that nothing has packed, by tasks that pack some panels at a time.
extern "C" void run_loose(const f32 *a, const f32 *b, i64 sk, i64 sn, f32 *c, i64 M, i64 N, i64 K, i64 panels,
                          f32 *room, i64 threads) {
  auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(c + m * N + n, v, lanes); };
  MmGrid g = mm_loose_grid(M, N, K, threads);
  for (i64 t = g.tasks; t-- > 0;)
    mm_loose_task(g, t, MmRows<f32>{a, K}, MmLoose<f32>{b, sk, sn}, M, N, K, panels, room, (f32 *)scratch, epi);
}
// Short sums, the tasks of a grid for three threads.
extern "C" void run_short(const f32 *a, i64 lda, const f32 *bp, f32 *c, i64 ldc, i64 M, i64 N, i64 K) {
  auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(c + m * ldc + n, v, lanes); };
  MmGrid g = mm_short_grid(M, N, K, 3);
  for (i64 t = g.tasks; t-- > 0;) mm_short<f32>(g, t, MmRows<f32>{a, lda}, bp, M, N, K, epi);
}
// A matrix times a vector, the parts for three threads.
extern "C" void run_vector(const f32 *a, i64 lda, const f32 *b, f32 *c, i64 M, i64 K, i64 threads) {
  auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(c + m + n, v, lanes); };
  const i64 parts = mv_parts(M, K, threads);
  for (i64 t = parts; t-- > 0;) mv_task<f32>(t, parts, MmRows<f32>{a, lda}, b, M, K, epi);
}
// Few rows by columns that are contiguous, the parts for so many threads.
#define FEW(T)                                                                                              \
  extern "C" void few_##T(const T *a, i64 lda, const T *b, i64 ldb, T *c, i64 M, i64 N, i64 K, i64 threads) { \
    auto epi = [=](i64 m, i64 n, V<T> v, auto lanes) OX_LAMBDA { stl(c + m * N + n, v, lanes); };           \
    const i64 parts = mv_few_parts(M, N, K, threads);                                                       \
    for (i64 t = parts; t-- > 0;) mv_few_task(t, parts, MmRows<T>{a, lda}, MvColumns<T>{b, ldb}, M, N, K, epi); \
  }
FEW(f32) FEW(f64)
extern "C" i64 panel_width() { return MM_NR; }
extern "C" i64 packs(i64 M, i64 N, i64 K) { return mm_packs(M, N, K, true); }
extern "C" i64 forth_and_back(i64 i, i64 items, i64 threads, i64 turn) {
  return mm_forth_and_back(i, items, threads, turn);
}
extern "C" i64 packed_size(i64 K, i64 N) { return mm_packed(K, N); }
extern "C" void grid(i64 M, i64 N, i64 K, i64 threads, i64 *out) {
  MmGrid g = mm_grid(M, N, K, threads);
  out[0] = g.gm; out[1] = g.gp; out[2] = g.tasks;
}
"""

SUFFIX = {"float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64"}


def _argument(x: np.ndarray | int) -> ctypes.c_void_p | ctypes.c_longlong:
    return ctypes.c_void_p(x.ctypes.data) if isinstance(x, np.ndarray) else ctypes.c_longlong(x)


@dataclass
class Kernel:
    """The compiled test library; arrays go in as numpy, strides are read off them."""

    lib: ctypes.CDLL

    def call(self, name: str, *args: np.ndarray | int) -> None:
        getattr(self.lib, name)(*(_argument(x) for x in args))

    def number(self, name: str, *args: int) -> int:
        function = getattr(self.lib, name)
        function.restype = ctypes.c_longlong
        return int(function(*(ctypes.c_longlong(x) for x in args)))

    def pack(self, b: np.ndarray, entry: str = "pack") -> np.ndarray:
        k, n = b.shape
        packed = np.full(self.number("packed_size", k, n), 77, b.dtype)
        steps = [s // b.itemsize for s in b.strides]
        self.call(f"{entry}_{SUFFIX[b.dtype.name]}", b, *steps, k, n, packed)
        return packed

    def matmul(
        self, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, threads: int = 1, gap: int = 5,
        in_place: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """a @ b + bias; the output has `gap` guard columns and one guard row, which must stay untouched. With
        `in_place`, only the panels are packed that the kernel asks for."""
        (m, k), n = a.shape, b.shape[1]
        bias = np.zeros(n, a.dtype) if bias is None else bias
        c = np.full((m + 1, n + gap), 99, a.dtype)
        steps = [s // a.itemsize for s in a.strides]
        packed, rows, ld = self.pack(b), 0, 0
        if in_place:
            rows, ld = b.ctypes.data, b.strides[0] // b.itemsize
            packed[: k * self.number("packs", m, n, k) * self.number("panel_width")] = 77
        self.call(f"run_{SUFFIX[a.dtype.name]}", a, *steps, packed, rows, ld, bias, c, n + gap, m, n, k, threads)
        assert (c[m] == 99).all() and (c[:, n:] == 99).all(), "wrote outside of C"
        return c[:m, :n]


def built(session_folder: Path, level: str) -> Kernel:
    flags = ["-Wall", "-Wextra", "-Werror", *LEVELS[level]]
    return Kernel(ctypes.CDLL(str(native_library(session_folder, SOURCE, flags))))


@pytest.fixture(scope="module", params=list(LEVELS))
def kernel(request: pytest.FixtureRequest, session_folder: Path) -> Kernel:
    return built(session_folder, request.param)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    if dtype.startswith("int"):
        return rng.integers(-1000, 1000, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def check(got: np.ndarray, a: np.ndarray, b: np.ndarray, bias: np.ndarray | float = 0.0) -> None:
    """Against float64, with a bound that grows as the root of the chain (384 at most, then the K blocks)."""
    if got.dtype.kind == "i":
        np.testing.assert_array_equal(got, a @ b + np.asarray(bias, got.dtype))
        return
    a, b = a.astype(np.float64), b.astype(np.float64)
    want = a @ b + bias
    size = np.linalg.norm(a, axis=1).max() * np.linalg.norm(b, axis=0).max() + np.abs(bias).max()
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 8 * np.finfo(got.dtype).eps * size


SIZES = (1, 7, 17, 31, 33, 129)


@pytest.mark.parametrize("dtype", SUFFIX)
def test_odd_sizes(kernel: Kernel, dtype: str) -> None:
    for m, n, k in itertools.product(SIZES, SIZES, SIZES):
        a, b, bias = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), normal(n, dtype=dtype)
        check(kernel.matmul(a, b, bias), a, b, bias)


@pytest.mark.parametrize("items,threads", [(1, 1), (1, 4), (7, 2), (8, 2), (17, 3), (2, 8), (29, 29)])
def test_turns_go_forth_and_back(session_folder: Path, items: int, threads: int) -> None:
    kernel = built(session_folder, "native")

    def order(turn: int) -> list[int]:
        return [kernel.number("forth_and_back", i, items, threads, turn) for i in range(items)]

    assert order(0) == order(4) == list(range(items))
    team = min(items, threads)
    shares = [list(range(items * k // team, items * (k + 1) // team)) for k in range(team)]
    assert order(1) == [i for share in shares for i in reversed(share)]


@pytest.mark.parametrize("shape", [(7, 17, 1), (31, 300, 70), (129, 1, 33), (150, 520, 257)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("panels", "threads"), [(1, 1), (2, 3), (50, 2)])
def test_tasks_that_pack_for_themselves(
    kernel: Kernel, shape: tuple[int, int, int], turned: bool, panels: int, threads: int
) -> None:
    m, k, n = shape
    a, b = normal(m, k), normal(n, k).T if turned else normal(k, n)
    room = np.full(panels * kernel.number("panel_width") * k + 64, 77, np.float32)
    c = np.full((m + 1, n), 99, np.float32)
    steps = [s // b.itemsize for s in b.strides]
    kernel.call("run_loose", a, b, *steps, c, m, n, k, panels, room[-room.ctypes.data % 64 // 4 :], threads)
    np.testing.assert_array_equal(c[:m], kernel.matmul(a, b))
    assert (c[m] == 99).all()


def test_every_row_count_and_lane_count(kernel: Kernel) -> None:
    for i in range(1, 66):
        a, b = normal(i, 19), normal(19, 66 - i)
        check(kernel.matmul(a, b), a, b)
        a, b = normal(i, 5), normal(5, 160)  # several panels at once for few rows
        check(kernel.matmul(a, b), a, b)


@pytest.mark.parametrize(
    "shape",
    [(3, 256, 40), (130, 257, 70), (300, 1000, 100), (5, 5000, 65), (150, 2600, 700), (150, 20, 2100)],
)
def test_several_blocks_of_m_n_and_k(kernel: Kernel, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b, bias = normal(m, k), normal(k, n), normal(n)
    check(kernel.matmul(a, b, bias), a, b, bias)


@pytest.mark.parametrize("m", [8, 9, 13, 131])
def test_rows_a_whole_number_of_pages_apart(kernel: Kernel, m: int) -> None:
    """They collide in the cache, and are copied; the bits are those of rows that do not."""
    a, b = normal(m, 2048), normal(1024, 331)
    for dtype, k in (("float32", 1024), ("float32", 1000), ("float64", 512)):
        x, y = a.astype(dtype)[:, :k], b.astype(dtype)[:k]
        got = kernel.matmul(x, y, threads=2)
        check(got, x, y)
        np.testing.assert_array_equal(kernel.matmul(np.ascontiguousarray(a[:, : k + 16].astype(dtype))[:, :k], y), got)


def test_broad_tiles_have_the_bits_of_others(session_folder: Path) -> None:
    plain, broad = (built(session_folder, level) for level in ("native", "broad"))
    for m, n, k in itertools.product((8, 9, 14, 31, 145, 197), (33, 64, 65, 129, 1000), (1, 7, 300, 1024)):
        a, b = normal(m, k), normal(k, n)
        for threads in (1, 3):
            np.testing.assert_array_equal(broad.matmul(a, b, threads=threads), plain.matmul(a, b))


def test_b_in_place(kernel: Kernel) -> None:
    """Few rows read B where it lies, as far as whole panels go, with the same bits as from a packed B."""
    for m, n, k in itertools.product((1, 2, 3, 7, 12, 13, 25), (1, 15, 17, 32, 33, 129, 200), (0, 1, 19, 600)):
        a, b = normal(m, k), normal(k, n + 3)[:, :n]
        got = kernel.matmul(a, b, threads=2, in_place=True)
        check(got, a, b)
        np.testing.assert_array_equal(got, kernel.matmul(a, b))


def test_one_row_of_a_wide_b_in_place(kernel: Kernel) -> None:
    for n, k in ((5000, 300), (4095, 20), (2048, 513)):
        a, b = normal(1, k), normal(k, n)
        got = kernel.matmul(a, b, threads=2, in_place=True)
        check(got, a, b)
        np.testing.assert_array_equal(got, kernel.matmul(a, b))
        np.testing.assert_array_equal(got, kernel.matmul(np.asfortranarray(np.repeat(a, 3, 0))[:1], b, in_place=True))


def test_short_sums(kernel: Kernel) -> None:
    """The plain loop gives the bits of the tiles, and writes nothing else."""
    for m, n, k in itertools.product((1, 7, 17, 67, 4000), (1, 15, 17, 33, 65), (0, 1, 3, 32)):
        a, b = normal(m, k + 2)[:, :k], normal(k, n)
        c = np.full((m, n + 5), 99, np.float32)
        kernel.call("run_short", a, k + 2, kernel.pack(b), c, n + 5, m, n, k)
        np.testing.assert_array_equal(c[:, :n], kernel.matmul(a, b))
        assert (c[:, n:] == 99).all()


def test_a_matrix_times_a_vector(kernel: Kernel) -> None:
    for m, k in itertools.product((0, 1, 3, 7, 17, 67, 1000), (0, 1, 3, 15, 16, 17, 31, 33, 129, 1000, 20001)):
        a, b = normal(m, k + 2)[:, :k], normal(k, 1)
        c, other = np.full((m + 1, 1), 99, np.float32), np.full((m + 1, 1), 99, np.float32)
        kernel.call("run_vector", a, k + 2, b, c, m, k, 2)
        if m:
            check(c[:m], a, b)
        assert c[m] == 99
        kernel.call("run_vector", a, k + 2, b, other, m, k, 16)
        np.testing.assert_array_equal(c, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_rows_by_contiguous_columns(kernel: Kernel, dtype: str) -> None:
    sizes = itertools.product((0, 1, 2, 3, 5, 8), (0, 1, 3, 15, 16, 17, 37, 300), (0, 1, 7, 16, 33, 100, 9000))
    for m, n, k in sizes:
        a, b = normal(m, k + 2, dtype=dtype)[:, :k], normal(n, k + 3, dtype=dtype)[:, :k].T
        c, other = np.full(m * n + 3, 99, dtype), np.full(m * n + 3, 99, dtype)
        for out, threads in ((c, 2), (other, 16)):
            kernel.call(f"few_{SUFFIX[dtype]}", a, k + 2, b, k + 3, out, m, n, k, threads)
        if m * n:
            check(c[: m * n].reshape(m, n), a, b)
        assert (c[m * n :] == 99).all()
        np.testing.assert_array_equal(c, other)


def test_few_rows_keep_nan_and_infinity_in_their_places(kernel: Kernel) -> None:
    a, b, c = normal(3, 37), normal(21, 37), np.empty((3, 21), np.float32)
    b[20, 36], b[5, 0] = np.nan, -np.inf
    kernel.call("few_f32", a, 37, b, 37, c, 3, 21, 37, 1)
    assert {*np.flatnonzero(~np.isfinite(c).all(0))} == {5, 20} and np.isnan(c[:, 20]).all()


def test_a_vector_meets_nan_and_infinity(kernel: Kernel) -> None:
    a, b, c = normal(9, 37), normal(37, 1), np.empty((9, 1), np.float32)
    a[3, 36], a[5, 0] = np.nan, -np.inf
    kernel.call("run_vector", a, 37, b, c, 9, 37, 1)
    assert list(np.flatnonzero(~np.isfinite(c))) == [3, 5] and np.isnan(c[3])


def test_long_sums_stay_accurate(kernel: Kernel) -> None:
    """All terms positive: one chain of 32768 additions in float32 would be off by 1e-4 and more."""
    a, b = np.abs(normal(2, 32768)), np.abs(normal(32768, 3))
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(kernel.matmul(a, b) / want - 1).max() < 1e-5


def test_empty(kernel: Kernel) -> None:
    bias = normal(40)
    np.testing.assert_array_equal(kernel.matmul(normal(3, 0), normal(0, 40), bias), np.tile(bias, (3, 1)))
    assert kernel.matmul(normal(0, 4), normal(4, 40)).shape == (0, 40)
    assert kernel.matmul(normal(3, 4), normal(4, 0)).shape == (3, 0)


@pytest.mark.parametrize("dtype", SUFFIX)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (40, 70), (129, 300), (64, 128)])
def test_packing(kernel: Kernel, dtype: str, shape: tuple[int, int]) -> None:
    """[ceil(N/NR)][K][NR], the last panel half as wide if that is enough, zero padded, whatever the strides of B.
    The compiler packs constants alike."""
    k, n = shape
    nr, plain = kernel.number("panel_width"), normal(k, n, dtype=dtype)
    columns = packed_columns(n, nr)
    padded = np.zeros((k, columns), dtype)
    padded[:, :n] = plain
    want = np.concatenate([padded[:, c : c + nr].ravel() for c in range(0, columns, nr)])
    constant = np.zeros_like(want)
    pack_panels(plain, nr, constant.view(np.uint8))
    np.testing.assert_array_equal(constant, want)
    wide = np.zeros((k, 2 * n), dtype)
    wide[:, ::2] = plain
    for b in (plain, np.asfortranarray(plain), wide[:, ::2], plain[::-1, ::-1].copy()[::-1, ::-1]):
        for entry in ("pack", "whole"):
            np.testing.assert_array_equal(kernel.pack(b, entry), want)


@pytest.mark.parametrize("dtype", SUFFIX)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (40, 70), (129, 300), (200, 520)])
def test_strides_of_a(kernel: Kernel, dtype: str, shape: tuple[int, int]) -> None:
    m, k = shape
    plain, b = normal(m, k, dtype=dtype), normal(k, 37, dtype=dtype)
    wide = np.zeros((2 * m, 3 * k), dtype)
    wide[::2, ::3] = plain
    rows = np.zeros((m, k + 9), dtype)
    rows[:, 4:-5] = plain
    want = kernel.matmul(plain, b)
    for a in (np.asfortranarray(plain), wide[::2, ::3], rows[:, 4:-5], plain[::-1, ::-1].copy()[::-1, ::-1]):
        np.testing.assert_array_equal(kernel.matmul(a, b), want)


def test_nan_and_infinity_stay_in_their_row_and_column(kernel: Kernel) -> None:
    """Padding never leaks: 0 * inf of the padded columns is computed, and must not be seen."""
    for m, k, n, place in itertools.product((1, 5, 30), (9, 300), (5, 33, 64), (0, -1)):
        for value in (np.nan, np.inf, -np.inf):
            a, b = normal(m, k), normal(k, n)
            a[place, place] = value
            with np.errstate(invalid="ignore"):
                got, want = kernel.matmul(a, b), a.astype(np.float64) @ b
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
            a, b = normal(m, k), normal(k, n)
            b[place, place] = value
            with np.errstate(invalid="ignore"):
                got, want = kernel.matmul(a, b), a.astype(np.float64) @ b
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_denormals_and_overflow(kernel: Kernel) -> None:
    a, b = np.full((2, 3), 1e-30, np.float32), np.full((3, 2), 1e-12, np.float32)
    np.testing.assert_allclose(kernel.matmul(a, b), 3e-42, rtol=1e-2)
    a, b = np.full((2, 3), 1e30, np.float32), np.full((3, 2), 1e30, np.float32)
    assert np.isposinf(kernel.matmul(a, b)).all()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 768, 3000),
        (2, 768, 3000),
        (47, 1600, 40),
        (128, 768, 768),
        (500, 600, 320),
        (97, 3072, 100),
        (1153, 1160, 70),
    ],
)
def test_the_bits_do_not_depend_on_threads_or_on_m(kernel: Kernel, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = normal(m, k), normal(k, n)
    one = kernel.matmul(a, b)
    for threads in (2, 3, 16):
        np.testing.assert_array_equal(kernel.matmul(a, b, threads=threads), one)
    np.testing.assert_array_equal(kernel.matmul(a[m // 2 :], b), one[m // 2 :])
    for few in (1, 7, 47):
        np.testing.assert_array_equal(kernel.matmul(a[:few], b), one[:few])


def test_prologue_and_a_rectangle_of_tiles(kernel: Kernel) -> None:
    m, k, n, nr = 40, 300, 200, kernel.number("panel_width")
    a, b = normal(m, k), normal(k, n)
    c = np.full((m, n), 99, np.float32)
    kernel.call("squared", a, kernel.pack(b), c, n, k, 3, 29, 1, 4)
    check(c[3:29, nr : 4 * nr], (a * a)[3:29], b[:, nr : 4 * nr])
    c[3:29, nr : 4 * nr] = 99
    assert (c == 99).all()


def test_the_grid_gives_every_thread_work(kernel: Kernel) -> None:
    assert _grid(kernel, 4, 8, 8, 8) == [1, 1, 1]
    for m, n, k in ((1, 50257, 768), (128, 3072, 768), (4096, 64, 512), (512, 768, 3072)):
        gm, gp, tasks = _grid(kernel, m, n, k, 8)
        assert gm * gp == tasks >= 8 and gm <= m and gp <= -(-n // kernel.number("panel_width"))


def _grid(kernel: Kernel, m: int, n: int, k: int, threads: int) -> list[int]:
    out = np.zeros(3, np.int64)
    kernel.call("grid", m, n, k, threads, out)
    return [int(x) for x in out]
