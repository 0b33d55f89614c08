"""The convolution template of images of few channels (conv_rows.h), compiled alone and run against float64.

As in test_kernel_conv.py, what it may not read or write is poisoned, and no division of the work changes a bit. Its
sums are those of conv.h, term by term: so are its bits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.native_library import native_library
from tests.test_kernel_conv import LEVELS, Case, function, pack_direct, packed, reference, run

HEAD = """
#include "conv_rows.h"
struct Call { const f32 *x, *w, *b; f32 *o; void *scratch; i64 ops, first, last; };
#define KERNEL(name, count, bytes, items, wrap, epilogue) \\
  extern "C" i64 name##_count(const ConvShape *s) { return count(*s); } \\
  extern "C" i64 name##_scratch(const ConvShape *s) { return bytes(*s); } \\
  extern "C" void name(const ConvShape *s, const Call *k) { \\
    const f32 *b = k->b; f32 *o = k->o; i64 ops = k->ops; const ConvShape q = *s; (void)q; \\
    items(*s, k->x, k->w, k->first, k->last, k->scratch, \\
          wrap([=](const Px &p, i64 c, vf v, auto l) OX_LAMBDA { vf z = {}; epilogue })); }
#define LAST if (p.i != (p.n * q.OH + p.y) * q.OW + p.x) __builtin_trap(); \\
  v += ldl(b + c, l); stl(o + p.i * ops + c, sel<f32>(v < z, z, v), l);
#define PLANAR v += b[c]; sts(o + p.i * ops + c, sel<f32>(v < z, z, v), ops, (int)l);
#define ROWS(name, ...) \\
  KERNEL(name, (conv_row_count<__VA_ARGS__>), (conv_row_scratch<__VA_ARGS__>), (conv_row_items<__VA_ARGS__>), , \\
         LAST) \\
  KERNEL(name##_across, (conv_row_count<__VA_ARGS__>), (conv_row_scratch<__VA_ARGS__>), \\
         (conv_row_items<__VA_ARGS__>), conv_across, PLANAR)
KERNEL(direct, conv_items_count, conv_scratch, conv_items, , LAST)
extern "C" void fresh(void *scratch) { conv_fresh(scratch); }
extern "C" i64 panel() { return CONV_NR; }
"""
CASES = [
    Case(2, 19, 27, 1, 6, k=(5, 5), p=(2, 2, 2, 2), planar=True),
    Case(1, 41, 39, 3, 64, k=(7, 7), s=(2, 2), p=(3, 3, 3, 3), planar=True),
    Case(3, 13, 18, 3, 16, p=(1, 0, 0, 2), planar=True),
    Case(2, 9, 31, 4, 37, k=(2, 4), s=(3, 1), planar=True),
    Case(2, 14, 14, 6, 16, k=(5, 5)),  # read where it lies
    Case(2, 14, 14, 6, 16, k=(5, 5), slack=3),
    Case(1, 12, 20, 5, 20, k=(1, 3), s=(2, 2), p=(0, 7, 1, 9)),
    Case(1, 1, 700, 12, 33, k=(1, 7), p=(0, 3, 0, 3)),  # a row in parts
    Case(2, 1, 1501, 1, 8, k=(1, 10), s=(1, 5), p=(0, 0, 0, 4), planar=True),
    Case(1, 3, 8, 2, 70, k=(3, 2), s=(1, 4), p=(3, 3, 3, 3), planar=True),  # windows beside the image
    Case(1, 4, 9, 2, 17, k=(6, 5), p=(2, 0, 0, 0), planar=True),
]


@pytest.fixture(scope="module", params=LEVELS)
def lib(request: pytest.FixtureRequest, session_folder: Path) -> ctypes.CDLL:
    """A kernel for each case, compiled for one CPU level."""
    if request.param == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU has no AVX2")
    sizes = [(c.ci, c.k[1], c.s[1], c.co, c.out()[1]) for c in CASES]
    kernels = [
        f"ROWS(rows{i}{name}, {ci}, {kx}, {sx}, {co}, cr_pixels<{co}, {width}>)"
        for i, (ci, kx, sx, co, known) in enumerate(sizes)
        for name, width in (("", known), ("_open", 0))
    ]
    source = HEAD + "\n".join(kernels)
    return ctypes.CDLL(str(native_library(session_folder, source, [f"-march={request.param}"])))


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_against_float64_and_the_direct_kernel(lib: ctypes.CDLL, case: int) -> None:
    """Odd sizes, strides, pads, planar images and slices; lanes that are channels, and pixels."""
    c = CASES[case]
    rng = np.random.default_rng(case)
    x = rng.standard_normal((c.n, c.ci, c.h, c.w)).astype(np.float32)
    w = rng.standard_normal((c.co, c.ci, *c.k)).astype(np.float32)
    b = packed(rng.standard_normal(c.co))
    weights = pack_direct(w, function(lib, "panel")(), 1)
    y = run(lib, f"rows{case}", c, x, weights, b, 1)
    want = reference(c, x, w, b)
    assert np.abs(y - want).max() <= 1e-5 * max(float(np.sqrt((want**2).mean())), 0.1)
    assert np.array_equal(y, run(lib, "direct", c, x, weights, b, 1))
    for parts in (2, 7):
        assert np.array_equal(y, run(lib, f"rows{case}", c, x, weights, b, parts))
        assert np.array_equal(y, run(lib, f"rows{case}_open", c, x, weights, b, parts))
        assert np.array_equal(y, run(lib, f"rows{case}_across", c, x, weights, b, parts))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_no_number_stays_in_its_windows(lib: ctypes.CDLL, value: float) -> None:
    """An infinity reaches the pixels whose windows hold it, and no other ones."""
    c = CASES[0]
    x = np.zeros((c.n, c.ci, c.h, c.w), np.float32)
    x[1, 0, 4, 20] = value
    weights = pack_direct(np.ones((c.co, 1, 5, 5), np.float32), function(lib, "panel")(), 1)
    y = run(lib, "rows0", c, x, weights, packed(np.zeros(c.co)), 1)
    hit = ~np.isfinite(y) if np.isinf(value) else y != 0
    places = np.zeros(y.shape, bool)
    places[1, :, 2:7, 18:23] = True
    assert np.array_equal(hit, places)
