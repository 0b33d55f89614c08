"""The attention template (attention.h) against float64, built with the flags of generated code.

Each CPU level that this machine runs gets one small library whose `run` plays the code generator: it
picks a score function (nothing, float mask, boolean mask, ALiBi), walks the rows in ranges as work items
would, and stores through an `out` function with strides of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.native_library import native_library

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
LEVELS = {"native": "-march=native", "avx2": "-march=x86-64-v3", "sse2": "-march=x86-64"}
NO_CAUSAL = 1 << 60
NO_MASK, FLOAT_MASK, BOOL_MASK, ALIBI = range(4)

SOURCE = r"""
#include "attention.h"
struct Call {
  const f32 *q, *k, *v, *mask;
  const u8 *keep;
  f32 *o, *w;
  i64 sq, sk, d, dv, causal, group, q_group, strides[7], step, kind, guard;
  f32 scale, slope;
};
extern "C" i64 scratch_floats(i64 d, i64 dv) { return attn::scratch_floats(d, dv); }
extern "C" i64 rows_per_item(i64 rows, i64 heads, i64 threads) {
  return attn::rows_per_item(rows, heads, threads);
}
extern "C" i64 runs_here() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#endif
  return 1;
}
template <bool GUARD, class Score> static void rows(const Call &c, const Score &score) {
  const i64 *s = c.strides;
  attn::Shape z;
  z.sq = c.sq, z.sk = c.sk, z.d = c.d, z.dv = c.dv, z.scale = c.scale;
  z.causal = c.causal, z.group = c.group, z.q_group = c.q_group;
  for (i64 r = 0; r < c.group * c.sq; r += c.step) {
    i64 e = attn::lesser(r + c.step, c.group * c.sq);
    auto out = [&](i64 row, i64 col, vf x, auto n) OX_LAMBDA { stl(c.o + row * s[6] + col, x, n); };
    attn::attention<GUARD>(z, {c.q, s[0], s[1]}, {c.k, s[2], s[3]}, {c.v, s[4], s[5]}, r, e, c.w, score, out);
  }
}
template <bool GUARD> static void kinds(const Call &c) {
  switch (c.kind) {
    case 0: return rows<GUARD>(c, attn::Plain{});
    case 1: return rows<GUARD>(c, [&](i64 r, i64 k, vf s, auto n) OX_LAMBDA {
      return s + ldl(c.mask + r % c.sq * c.sk + k, n);
    });
    case 2: return rows<GUARD>(c, [&](i64 r, i64 k, vf s, auto n) OX_LAMBDA {
      vi m = conv<i32, u8>(ldl(c.keep + r % c.sq * c.sk + k, n)) != 0;
      return sel<f32>(m, s, vf{} - __builtin_inff());
    });
    default: return rows<GUARD>(c, [&](i64 r, i64 k, vf s, auto) OX_LAMBDA {
      vf far = {};
      for (int i = 0; i < VL; i++) far[i] = (f32)(k + i - r % c.sq);
      return s + far * c.slope;
    });
  }
}
extern "C" void run(const Call *c) { c->guard ? kinds<true>(*c) : kinds<false>(*c); }
"""


class Call(ctypes.Structure):
    """The C++ struct of the same name."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "keep", "o", "w")),
        *((name, ctypes.c_longlong) for name in ("sq", "sk", "d", "dv", "causal", "group", "q_group")),
        ("strides", ctypes.c_longlong * 7),
        *((name, ctypes.c_longlong) for name in ("step", "kind", "guard")),
        *((name, ctypes.c_float) for name in ("scale", "slope")),
    ]


@pytest.fixture(scope="module", params=list(LEVELS))
def lib(request: pytest.FixtureRequest, session_folder: Path) -> Iterator[ctypes.CDLL]:
    """The test library for one CPU level."""
    path = native_library(session_folder, SOURCE, [*WARNINGS, LEVELS[request.param]])
    library = ctypes.CDLL(str(path))
    library.scratch_floats.restype = ctypes.c_longlong
    library.scratch_floats.argtypes = [ctypes.c_longlong, ctypes.c_longlong]
    library.rows_per_item.restype = ctypes.c_longlong
    library.rows_per_item.argtypes = [ctypes.c_longlong] * 3
    if not library.runs_here():
        pytest.skip(f"this CPU does not run {request.param}")
    yield library


@dataclass
class Problem:
    """One key/value head; q is [group, sq, d], k [sk, d], v [sk, dv]."""

    q: F32
    k: F32
    v: F32
    kind: int = NO_MASK
    mask: F32 | None = None
    keep: NDArray[np.bool_] | None = None
    causal: int = NO_CAUSAL
    guard: bool = False
    slope: float = 0.0
    k_transposed: bool = False
    v_transposed: bool = False
    q_row: int = 0  # extra elements between rows
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = float(np.float32(self.q.shape[-1] ** -0.5))

    def expected(self) -> F64:
        """Softmax attention in float64, [group * sq, dv]."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        sq, sk = q.shape[1], k.shape[0]
        row, key = np.arange(sq)[:, None], np.arange(sk)[None, :]
        with np.errstate(all="ignore"):
            s = q @ k.T * self.scale
            if self.kind == FLOAT_MASK and self.mask is not None:
                s = s + self.mask
            if self.kind == BOOL_MASK and self.keep is not None:
                s = np.where(self.keep, s, -np.inf)
            if self.kind == ALIBI:
                s = s + np.float64(np.float32(self.slope)) * (key - row)
            s = np.where(key <= row + self.causal, s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            if self.guard:
                p = np.where(np.isnan(p), 0, p)
            result: F64 = (p @ v).reshape(-1, v.shape[1])
            return result

    def run(self, lib: ctypes.CDLL, step: int = 1 << 40) -> F32:
        """The kernel's answer, computed in ranges of `step` rows, with canaries around what it may write."""
        (group, sq, d), (sk, dv) = self.q.shape, self.v.shape
        q = np.full((group, sq, d + self.q_row), np.nan, np.float32)
        q[:, :, :d] = self.q
        k = np.ascontiguousarray(self.k.T if self.k_transposed else self.k)
        v = np.ascontiguousarray(self.v.T if self.v_transposed else self.v)
        mask = None if self.mask is None else np.ascontiguousarray(self.mask, np.float32)
        keep = None if self.keep is None else np.ascontiguousarray(self.keep)
        size = lib.scratch_floats(d, dv)
        w = np.full(size + 16, np.nan, np.float32)
        w[size:] = 12345
        o = np.full((group * sq, dv + 3), 777, np.float32)
        call = Call(
            q.ctypes.data, k.ctypes.data, v.ctypes.data,
            mask.ctypes.data if mask is not None else None, keep.ctypes.data if keep is not None else None,
            o.ctypes.data, w.ctypes.data,
            sq, sk, d, dv, self.causal, group, sq * (d + self.q_row),
            (ctypes.c_longlong * 7)(
                d + self.q_row, 1, *((1, sk) if self.k_transposed else (d, 1)),
                *((1, sk) if self.v_transposed else (dv, 1)), dv + 3,
            ),
            min(step, group * sq), self.kind, self.guard, self.scale, self.slope,
        )  # fmt: skip
        lib.run(ctypes.byref(call))
        assert (w[size:] == 12345).all(), "wrote behind the scratch"
        assert (o[:, dv:] == 777).all(), "wrote behind a row"
        return o[:, :dv]


def problem(sq: int, sk: int, d: int, dv: int | None = None, group: int = 1, **options: Any) -> Problem:
    """Normal random inputs; masks are made from the seed when the kind asks for one."""
    rng = np.random.default_rng(sq * 7 + sk * 5 + d)

    def draw(*shape: int) -> F32:
        return rng.standard_normal(shape, dtype=np.float32)

    p = Problem(draw(group, sq, d), draw(sk, d), draw(sk, d if dv is None else dv), **options)
    if p.kind == FLOAT_MASK and p.mask is None:
        p.mask = draw(sq, sk)
    if p.kind == BOOL_MASK and p.keep is None:
        p.keep = rng.random((sq, sk)) < 0.6
    return p


def check(p: Problem, lib: ctypes.CDLL) -> F32:
    """Same NaNs as float64, a small error elsewhere."""
    got, want = p.run(lib), p.expected()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    scale = max(1.0, float(np.abs(want[finite]).max(initial=0)))
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=4e-6 * scale)
    return got


SIZES = (1, 7, 17, 65, 129)


@pytest.mark.parametrize("d", [1, 8, 17, 64, 80])
def test_sizes(lib: ctypes.CDLL, d: int) -> None:
    for sq in SIZES:
        for sk in SIZES:
            check(problem(sq, sk, d), lib)


@pytest.mark.parametrize("sq", SIZES)
def test_several_blocks_of_keys(lib: ctypes.CDLL, sq: int) -> None:
    for sk in (256, 257, 300, 600):
        check(problem(sq, sk, 40, 24, kind=FLOAT_MASK), lib)


def test_more_rows_than_share_a_packed_block(lib: ctypes.CDLL) -> None:
    check(problem(1100, 300, 16), lib)


@pytest.mark.parametrize("d", [257, 300, 520])
def test_wide_heads(lib: ctypes.CDLL, d: int) -> None:
    for sq in (3, 20):
        check(problem(sq, 300, d, 33), lib)


@pytest.mark.parametrize("dv", [1, 15, 16, 31, 33, 100])
def test_value_width_differs(lib: ctypes.CDLL, dv: int) -> None:
    for sq in (1, 5, 30):
        check(problem(sq, 70, 24, dv), lib)


@pytest.mark.parametrize("kind", [FLOAT_MASK, BOOL_MASK, ALIBI])
def test_score_functions(lib: ctypes.CDLL, kind: int) -> None:
    for sq in SIZES:
        for sk in SIZES[1:]:
            p = problem(sq, sk, 17, kind=kind, slope=0.25)
            if p.keep is not None:
                p.keep[:, 0] = True
            check(p, lib)


@pytest.mark.parametrize("sq", SIZES)
def test_causal(lib: ctypes.CDLL, sq: int) -> None:
    for sk in (*SIZES, 530):
        for causal in {0, sk - sq, 3, -4, -1000, 1000}:
            check(problem(sq, sk, 24, causal=causal), lib)


def test_causal_over_several_blocks(lib: ctypes.CDLL) -> None:
    for guard in (False, True):
        check(problem(900, 900, 24, causal=0), lib)
        check(problem(530, 900, 24, causal=-270, guard=guard, kind=FLOAT_MASK), lib)


@pytest.mark.parametrize("sq", [3, 40])
@pytest.mark.parametrize("guard", [False, True])
def test_masked_rows(lib: ctypes.CDLL, sq: int, guard: bool) -> None:
    """Rows without any key are NaN, or 0 under the guard; rows that start with masked blocks are plain."""
    p = problem(sq, 600, 24, kind=BOOL_MASK, guard=guard)
    assert p.keep is not None
    p.keep[0] = False
    p.keep[1, :520] = False
    p.keep[2, 1:] = False
    p.keep[2, 0] = True
    got = check(p, lib)
    assert (got[0] == 0).all() if guard else np.isnan(got[0]).all()
    q = problem(sq, 600, 24, kind=FLOAT_MASK, guard=guard)
    q.mask = np.where(p.keep, np.float32(0), np.float32(-np.inf))
    np.testing.assert_array_equal(q.run(lib), got)
    check(q, lib)


def test_lowest_finite_mask(lib: ctypes.CDLL) -> None:
    """Exporters mask with the lowest float: a fully masked row is then uniform, and nothing overflows."""
    for sq in (3, 40):
        p = problem(sq, 300, 24, kind=FLOAT_MASK)
        p.mask = np.zeros((sq, 300), np.float32)
        p.mask[0] = np.finfo(np.float32).min
        p.mask[1, :290] = np.finfo(np.float32).min
        got = p.run(lib)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got[0], p.v.mean(0), atol=1e-5)
        np.testing.assert_allclose(got[1:], p.expected()[1:], atol=1e-5)


@pytest.mark.parametrize("sq", [2, 40])
def test_nan_and_infinity_propagate(lib: ctypes.CDLL, sq: int) -> None:
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)[0]  # a NaN with other bits than usual
    for bad in (np.float32(np.nan), payload, np.float32(np.inf), np.float32(-np.inf)):
        for name in ("q", "k", "v"):
            for row in (0, 1):
                p = problem(sq, 300, 24)
                array = getattr(p, name)
                array = array[0] if name == "q" else array
                array[row, 3] = bad
                got, want = p.run(lib), p.expected()
                np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{name} {bad}")
                finite = np.isfinite(want)
                np.testing.assert_allclose(got[finite], want[finite], atol=1e-5)
                np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])


def test_guard_turns_nan_rows_into_zeros(lib: ctypes.CDLL) -> None:
    for sq in (2, 40):
        p = problem(sq, 70, 24, guard=True)
        p.q[0, 1] = np.nan
        got = p.run(lib)
        assert (got[1] == 0).all()
        np.testing.assert_allclose(np.delete(got, 1, 0), np.delete(p.expected(), 1, 0), atol=1e-5)


def test_large_scores(lib: ctypes.CDLL) -> None:
    """Scores in the thousands: the winner takes all, the rest underflows to exactly nothing."""
    for sq in (2, 40):
        p = problem(sq, 300, 16)
        p.q *= 1000
        p.k *= 10
        check(p, lib)


@pytest.mark.parametrize("sq", [1, 5, 40, 129])
def test_strides(lib: ctypes.CDLL, sq: int) -> None:
    for sk in (7, 65, 300):
        plain = problem(sq, sk, 17, 40)
        for options in (
            {"k_transposed": True}, {"v_transposed": True}, {"q_row": 5},
            {"k_transposed": True, "v_transposed": True, "q_row": 1},
        ):  # fmt: skip
            p = problem(sq, sk, 17, 40, **options)
            np.testing.assert_allclose(check(p, lib), plain.run(lib), atol=3e-6)


@pytest.mark.parametrize("group", [2, 4, 7])
def test_query_heads_of_a_group(lib: ctypes.CDLL, group: int) -> None:
    for sq in (1, 2, 9, 33):
        for causal in (NO_CAUSAL, 0, 70 - sq):
            check(problem(sq, 70, 24, group=group, causal=causal, kind=FLOAT_MASK), lib)


@pytest.mark.parametrize("group,sq", [(1, 7), (1, 129), (3, 50), (2, 600)])
def test_any_split_of_the_rows_gives_the_same_bits(lib: ctypes.CDLL, group: int, sq: int) -> None:
    for causal in (NO_CAUSAL, 5):
        p = problem(sq, 300, 40, group=group, causal=causal, kind=FLOAT_MASK)
        whole = p.run(lib)
        for step in (1, 5, 24, 100):
            np.testing.assert_array_equal(whole, p.run(lib, step))


def test_work_items(lib: ctypes.CDLL) -> None:
    """Whole heads where there are enough of them, else ranges: six items a thread for long sequences, or two."""
    assert lib.rows_per_item(1500, 12, 2) >= 1500
    assert 750 <= lib.rows_per_item(1500, 6, 2) < 800
    assert lib.rows_per_item(128, 6, 2) >= 128
    assert lib.rows_per_item(4096, 1, 1) >= 4096
    for threads in (2, 8, 64):
        rows = lib.rows_per_item(1 << 16, 1, threads)
        assert -(-(1 << 16) // rows) in range(min(6 * threads, 256) * 9 // 10, 6 * threads + 1)
    assert lib.rows_per_item(1, 1, 64) >= 1


def test_no_keys(lib: ctypes.CDLL) -> None:
    """A sum over no keys is 0."""
    for sq in (1, 40):
        assert (problem(sq, 0, 8).run(lib) == 0).all()


def test_accuracy_does_not_decay_with_length(lib: ctypes.CDLL) -> None:
    """Sums are taken block by block: the error's rms stays near one rounding at 4096 keys."""
    p = problem(24, 4096, 64)
    want = p.expected()
    rms = float(np.sqrt((want**2).mean()))
    assert float(np.sqrt(((p.run(lib) - want) ** 2).mean())) < 1e-6 * rms


def causal_mask(sq: int, sk: int, least: float) -> F32:
    """0 up to the diagonal that ends in the last key, `least` after it."""
    mask: F32 = np.triu(np.full((sq, sk), least, np.float32), 1 + max(0, sk - sq))
    return mask


@pytest.mark.parametrize("least", [-1e4, -1e9, float(np.finfo(np.float32).min), -np.inf])
@pytest.mark.parametrize("sq,sk", [(40, 40), (700, 700), (100, 1300), (1100, 30), (61, 517)])
def test_keys_that_a_mask_hides(lib: ctypes.CDLL, sq: int, sk: int, least: float) -> None:
    """Tiles leave out what a mask hides: the answer is that of all keys, also where padding comes first."""
    p = problem(sq, sk, 24, kind=FLOAT_MASK, mask=causal_mask(sq, sk, least))
    check(p, lib)
    np.testing.assert_array_equal(p.run(lib), p.run(lib, 29))
    assert p.mask is not None
    p.mask = p.mask[:, ::-1]
    check(p, lib)
    p.mask = causal_mask(sq, sk, least)
    p.mask[:, : sk // 2] = least  # padding; with a finite `least`, some rows see all of their keys equally
    p.mask[:, 0] = 0
    check(p, lib)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_hidden_keys_still_propagate(lib: ctypes.CDLL, where: str, bad: float) -> None:
    """0 times infinity is NaN, and so is -inf plus infinity: with such values in it, no block is left out."""
    for kind in (FLOAT_MASK, BOOL_MASK):
        hidden = causal_mask(300, 300, -np.inf)
        p = problem(300, 300, 24, kind=kind, mask=hidden, keep=hidden == 0)
        array = p.q[0] if where == "q" else getattr(p, where)
        array[290, 3] = bad
        got, want = p.run(lib), p.expected()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        finite = np.isfinite(want)
        np.testing.assert_allclose(got[finite], want[finite], atol=1e-5)


@pytest.mark.parametrize("gap", [60.0, 80.0, 110.0])
def test_scores_at_the_edge_of_what_counts(lib: ctypes.CDLL, gap: float) -> None:
    """A key is left out only if its exponential is exactly 0: huge values tell."""
    p = problem(40, 600, 8, kind=FLOAT_MASK)
    p.q *= np.float32(1e-3)
    p.mask = np.zeros((40, 600), np.float32)
    p.mask[:, 300:] = -gap
    p.v[300:] = np.abs(p.v[300:]) * np.float32(1e36)
    np.testing.assert_allclose(p.run(lib), p.expected(), rtol=1e-4, atol=1e-5)


def test_large_queries_outweigh_a_mask(lib: ctypes.CDLL) -> None:
    """A mask of -1e4 hides nothing from a query whose products are greater."""
    p = problem(60, 600, 24, kind=FLOAT_MASK, mask=causal_mask(60, 600, -1e4))
    p.q[0, 5:20] *= np.float32(1e4)
    p.k[595] *= np.float32(1e3)
    check(p, lib)
