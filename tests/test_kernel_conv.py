"""The convolution templates (conv.h, conv_dw.h, conv_wino.h, conv_strassen.h), compiled alone and run against float64.

Every run poisons what it may not read (NaN between the channels of a slice) or write (NaN in the output's
other channels, a mark behind the scratch), and checks that the division of the work changes no bit.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxc.codegen.cpp.conv_algorithms import groups_fit_lanes, pack_strassen
from tests.native_library import native_library

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LEVELS = ["native", "x86-64-v3"] if platform.machine() == "x86_64" else ["native"]
FIELDS = ["N", "H", "W", "CI", "OH", "OW", "CO", "KH", "KW", "SY", "SX", "DY", "DX", "PT", "PL", "G"]
FIELDS += ["ins", "irs", "ips", "ics"]

SOURCE = """
#include "conv.h"
#include "conv_dw.h"
#include "conv_wino.h"
#include "conv_strassen.h"
struct Call { const f32 *x, *w, *b; f32 *o; void *scratch; i64 ops, first, last; };
#define KERNEL(name, count, bytes, items) \\
  extern "C" i64 name##_count(const ConvShape *s) { return count(*s); } \\
  extern "C" i64 name##_scratch(const ConvShape *s) { return bytes(*s); } \\
  extern "C" void name(const ConvShape *s, const Call *k) { \\
    const f32 *b = k->b; f32 *o = k->o; i64 ops = k->ops; const ConvShape q = *s; \\
    items(*s, k->x, k->w, k->first, k->last, k->scratch, [=](const Px &p, i64 c, vf v, auto l) OX_LAMBDA { \\
      if (p.i != (p.n * q.OH + p.y) * q.OW + p.x) __builtin_trap(); \\
      vf z = {}; v += ldl(b + c, l); stl(o + p.i * ops + c, sel<f32>(v < z, z, v), l); }); }
KERNEL(direct, conv_items_count, conv_scratch, conv_items)
KERNEL(wide, conv_items_count, conv_scratch, conv_items<CONV_WIDE>)
KERNEL(direct_short, conv_items_count, conv_scratch, (conv_items<CONV_BOTH, true>))
static i64 far_count(const ConvShape &s) { return conv_items_count(ConvDilated{s}); }
static i64 far_bytes(const ConvShape &s) { return conv_scratch(ConvDilated{s}); }
template <class E> static void far_items(
    const ConvShape &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &e) {
  conv_items(ConvDilated{s}, x, w, first, last, scratch, e);
}
KERNEL(direct_far, far_count, far_bytes, far_items)
#define WINO(y, x, step) \\
  static i64 count##y##x##step(const ConvShape &s) { return conv_wino_count<y, x, step>(s); } \\
  static i64 bytes##y##x##step(const ConvShape &s) { return conv_wino_scratch<y, x, step>(s); } \\
  KERNEL(wino##y##x##step, count##y##x##step, bytes##y##x##step, (conv_wino_items<y, x, step>))
WINO(2, 2, 1) WINO(4, 4, 1) WINO(1, 2, 1) WINO(1, 4, 1) WINO(2, 1, 1) WINO(4, 1, 1) WINO(2, 2, 2) WINO(4, 4, 2)
KERNEL(strassen, conv_strassen_count, conv_strassen_scratch, conv_strassen_items)
#define DW(k, s) KERNEL(dw##k##s, conv_dw_count, conv_dw_scratch, (conv_dw_items<k, s>))
#define GROUPED(k, s) KERNEL(grouped##k##s, conv_dw_count, conv_dw_scratch, (conv_dw_items<k, s, true>))
GROUPED(0, 0) GROUPED(3, 1) GROUPED(3, 2)
DW(0, 0) DW(3, 1) DW(3, 2) DW(5, 1) DW(5, 2) DW(7, 1) DW(7, 2) DW(1, 1) DW(1, 2) DW(2, 1) DW(9, 2)
#define SLIDING(name, ...) KERNEL(name, conv_dw_count, conv_dw_scratch, (conv_dw_items<__VA_ARGS__>))
SLIDING(dw33, 3, 3) SLIDING(dw54, 5, 4)
SLIDING(long51, 5, 1, false, true) SLIDING(long82, 8, 2, false, true) SLIDING(long_grouped, 7, 1, true, true)
SLIDING(tall31, 3, 1, false, false, true) SLIDING(tall52, 5, 2, false, false, true)
SLIDING(tall_grouped, 4, 1, true, false, true) SLIDING(tall_long, 7, 1, false, true, true)
extern "C" void fresh(void *scratch) { conv_fresh(scratch); }
extern "C" i64 panel() { return CONV_NR; }
extern "C" i64 unfetched(i64 K, i64 tiles) {  // bytes of the next K rows of weights that no tile fetches in its share
  i64 n = 0, begin = 4 * K * CONV_NR;
  for (i64 t = 0; t < tiles; t++) {
    const ConvFetch f = conv_fetch((const f32 *)4096, K, t, tiles);
    n += ox_max(0, (i64)f.at - 4096 - begin), begin = (i64)f.at - 4096 + K * f.step;
  }
  return n + ox_max(0, 8 * K * CONV_NR - begin);
}
"""


class Shape(ctypes.Structure):
    """ConvShape of conv.h."""

    _fields_ = [(name, ctypes.c_longlong) for name in FIELDS]


class Call(ctypes.Structure):
    """The arguments of one call of a test kernel."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "w", "b", "o", "scratch")]
        + [(name, ctypes.c_longlong) for name in ("ops", "first", "last")]
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A convolution: sizes, kernel (height, width), strides, dilations, pads (top, left, bottom, right)."""

    n: int
    h: int
    w: int
    ci: int
    co: int
    k: tuple[int, int] = (3, 3)
    s: tuple[int, int] = (1, 1)
    d: tuple[int, int] = (1, 1)
    p: tuple[int, int, int, int] = (0, 0, 0, 0)
    g: int = 1
    slack: int = 0  # channels of the input buffer that are not this tensor's
    planar: bool = False

    def out(self) -> tuple[int, int]:
        """Height and width of the output."""
        size = [self.h + self.p[0] + self.p[2], self.w + self.p[1] + self.p[3]]
        return (
            (size[0] - self.d[0] * (self.k[0] - 1) - 1) // self.s[0] + 1,
            (size[1] - self.d[1] * (self.k[1] - 1) - 1) // self.s[1] + 1,
        )

    def shape(self) -> Shape:
        """The ConvShape: channels-last with `slack` further channels, or planar."""
        ips = self.ci + self.slack
        strides = (self.h * self.w * ips, self.w * ips, ips, 1)
        if self.planar:
            strides = (self.ci * self.h * self.w, self.w, 1, self.h * self.w)
        return Shape(
            self.n,
            self.h,
            self.w,
            self.ci,
            *self.out(),
            self.co,
            *self.k,
            *self.s,
            *self.d,
            self.p[0],
            self.p[1],
            self.g,
            *strides,
        )


def aligned(count: int, fill: float = 0.0) -> F32:
    """A vector of floats that begins on a cache line."""
    raw = np.empty(count + 16, np.float32)
    start = (-raw.ctypes.data // 4) % 16
    raw[:] = fill
    return raw[start : start + count]


def packed(a: NDArray[np.floating]) -> F32:
    """The array's elements in C order, aligned."""
    r = aligned(a.size)
    r[:] = a.astype(np.float32).ravel()
    return r


def pack_direct(w: F32, panel: int, groups: int) -> F32:
    """OIHW weights as [group][panel][ky][kx][ci][NR]."""
    co, ci, kh, kw = w.shape
    panels = -(-(co // groups) // panel)
    q = np.zeros((groups, panels * panel, ci, kh, kw), np.float32)
    q[:, : co // groups] = w.reshape(groups, co // groups, ci, kh, kw)
    return packed(q.reshape(groups, panels, panel, ci, kh, kw).transpose(0, 1, 4, 5, 3, 2))


def pack_depthwise(w: F32, panel: int) -> F32:
    """OIHW weights as [ky][kx][ci of a group][co]; there are no panels."""
    return packed(w.transpose(2, 3, 1, 0))


def wino_g(m: int, step: int = 1) -> F64:
    """The weight transform of F(m, 3) as conv_wino.h defines it: (m + 2, 3)."""
    if m == 1:
        return np.ones((1, 1))
    if step == 2:  # the outer taps by their points, then the middle one
        points = [1 / 2, -1 / 2, 5 / 4, -5 / 4]
        outer = [np.array([1, 0, q]) / np.prod([q - r for r in points if r != q]) for q in points]
        outer = [[1, 0, 0], [1, 0, 1]] if m == 2 else outer
        return np.array([*outer, [0, 0, 1], [0, 1, 0]])
    if m == 2:
        return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    a, b = 45 / 64, 91 / 64
    points = [0.0, a, -a, b, -b]
    rows = [[q**i / np.prod([q - r for r in points if r != q]) for i in range(3)] for q in points]
    return np.array([*rows, [0, 0, 1]])


def pack_wino(w: F32, panel: int, m: tuple[int, int], step: int = 1) -> F32:
    """OIHW weights as U[panel][p][ci][NR]."""
    co, ci = w.shape[:2]
    (gy, gx), panels = (wino_g(k, step) for k in m), -(-co // panel)
    q = np.zeros((panels * panel, ci, len(gy) * len(gx)))
    q[:co] = np.einsum("ay,oiyx,bx->oiab", gy, w.astype(np.float64), gx).reshape(co, ci, -1)
    return packed(q.reshape(panels, panel, ci, -1).transpose(0, 3, 2, 1))


def reference(c: Case, x: F32, w: F32, b: F32) -> F64:
    """relu(conv(x, w) + b) in float64, tap by tap: NCHW."""
    oh, ow = c.out()
    big = np.zeros((c.n, c.ci, c.h + c.p[0] + c.p[2], c.w + c.p[1] + c.p[3]))
    big[:, :, c.p[0] : c.p[0] + c.h, c.p[1] : c.p[1] + c.w] = x
    big = big.reshape(c.n, c.g, c.ci // c.g, *big.shape[2:])
    wg = w.astype(np.float64).reshape(c.g, c.co // c.g, c.ci // c.g, *c.k)
    y = np.zeros((c.n, c.g, c.co // c.g, oh, ow))
    for ky, kx in itertools.product(range(c.k[0]), range(c.k[1])):
        y0, x0 = ky * c.d[0], kx * c.d[1]
        taps = big[..., y0 : y0 + (oh - 1) * c.s[0] + 1 : c.s[0], x0 : x0 + (ow - 1) * c.s[1] + 1 : c.s[1]]
        y += np.einsum("ngiyx,goi->ngoyx", taps, wg[..., ky, kx], optimize=True)
    result: F64 = np.maximum(y.reshape(c.n, c.co, oh, ow) + b[:, None, None], 0)
    return result


@pytest.fixture(scope="module", params=LEVELS)
def lib(request: pytest.FixtureRequest, session_folder: Path) -> ctypes.CDLL:
    """The test kernels, compiled for one CPU level."""
    level = request.param
    if level == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU has no AVX2")
    return ctypes.CDLL(str(native_library(session_folder, SOURCE, [f"-march={level}"])))


def test_tiles_fetch_all_of_the_next_weights(lib: ctypes.CDLL) -> None:
    """Shares have no gaps between them but for rounding, in whatever number of tiles."""
    missing = function(lib, "unfetched")
    for terms, tiles in itertools.product((64, 512), range(2, 60)):
        assert missing(ctypes.c_longlong(terms), ctypes.c_longlong(tiles)) < 4 * tiles, (terms, tiles)


def function(lib: ctypes.CDLL, name: str) -> Callable[..., int]:
    """An exported function that returns a 64-bit integer."""
    f = getattr(lib, name)
    f.restype = ctypes.c_longlong
    return f  # type: ignore[no-any-return]


def run(lib: ctypes.CDLL, kernel: str, c: Case, x: F32, w: F32, b: F32, parts: int) -> F32:
    """The kernel's result (NCHW), its work items divided into `parts` calls."""
    s = c.shape()
    count = function(lib, f"{kernel}_count")(ctypes.byref(s))
    size = -(-function(lib, f"{kernel}_scratch")(ctypes.byref(s)) // 4)
    data = packed(x)
    if not c.planar:
        data = aligned(x.size // c.ci * (c.ci + c.slack), np.nan)
        data.reshape(c.n, c.h, c.w, -1)[..., : c.ci] = x.transpose(0, 2, 3, 1)
    oh, ow = c.out()
    ops = c.co + 3
    out = aligned(c.n * oh * ow * ops, np.nan)
    scratch = aligned(size + 16, np.nan)
    scratch[size:] = 1234.5
    if kernel.startswith(("direct", "wide", "wino", "strassen")):
        lib.fresh(ctypes.c_void_p(scratch.ctypes.data))
    for i in range(parts):
        first, last = count * i // parts, count * (i + 1) // parts
        call = Call(*(a.ctypes.data for a in (data, w, b, out, scratch)), ops, first, last)
        getattr(lib, kernel)(ctypes.byref(s), ctypes.byref(call))
    assert (scratch[size:] == 1234.5).all()
    r = out.reshape(c.n, oh, ow, ops)
    assert np.isnan(r[..., c.co :]).all()
    return np.ascontiguousarray(r[..., : c.co].transpose(0, 3, 1, 2))


def check(lib: ctypes.CDLL, kernel: str, c: Case, pack: Callable[[F32, int], F32], limit: float) -> None:
    """Largest error against float64 over the output's rms is at most `limit`; no division changes a bit."""
    rng = np.random.default_rng(c.ci * 1000 + c.co)
    x = rng.standard_normal((c.n, c.ci, c.h, c.w)).astype(np.float32)
    w = rng.standard_normal((c.co, c.ci // c.g, *c.k)).astype(np.float32)
    b = packed(rng.standard_normal(c.co))
    weights = pack(w, function(lib, "panel")())
    y = run(lib, kernel, c, x, weights, b, 1)
    want = reference(c, x, w, b)
    assert np.abs(y - want).max() <= limit * max(float(np.sqrt((want**2).mean())), 0.1), c
    for parts in (2, 7):
        assert np.array_equal(y, run(lib, kernel, c, x, weights, b, parts)), c


CHANNELS = [1, 3, 5, 16, 17, 33, 64]


def cases(seed: int, count: int) -> list[Case]:
    """Random convolutions of odd sizes, strides, dilations, groups, asymmetric pads."""
    rng = np.random.default_rng(seed)

    def pick(*of: int) -> int:
        return int(rng.choice(of))

    result = []
    for _ in range(count):
        kh, kw, g, planar = pick(1, 2, 3, 5), pick(1, 2, 3, 4, 7), pick(1, 1, 1, 2, 4), pick(0, 0, 1) == 1
        ci, co = (-(-pick(*CHANNELS) // g) * g for _ in range(2))
        size = (pick(1, 1, 2, 3), pick(8, 13, 20), pick(9, 14, 27))
        strides, dilations = (pick(1, 2, 3), pick(1, 2, 3)), (pick(1, 1, 2), 1)
        pads = (pick(*range(kh)), pick(*range(kw)), pick(*range(kh)), pick(*range(kw)))
        slack = 0 if planar else pick(0, 7)
        result.append(Case(*size, ci, co, (kh, kw), strides, dilations, pads, g, slack, planar))
    return result


@pytest.mark.parametrize("seed", range(6))
def test_direct(lib: ctypes.CDLL, seed: int) -> None:
    """Any kernel, stride, dilation, pad and group count, on slices and on planar inputs."""
    for c in cases(seed, 12):
        check(lib, "direct", c, partial(pack_direct, groups=c.g), 1e-5)


@pytest.mark.parametrize(
    "c",
    [
        Case(1, 7, 7, 320, 70, p=(1, 1, 1, 1)),
        Case(1, 9, 9, 700, 40, k=(1, 1)),
        Case(2, 1, 1, 33, 17, k=(1, 1)),
        Case(1, 40, 40, 3, 32, k=(7, 7), s=(2, 2), p=(3, 3, 3, 3), planar=True),
        Case(1, 5, 5, 8, 64, k=(5, 5), d=(2, 2), p=(4, 4, 4, 4)),
        Case(1, 3, 300, 16, 16, k=(1, 9), p=(0, 8, 0, 0), d=(1, 3)),
        Case(1, 4, 4, 3, 5, p=(3, 3, 3, 3)),
        Case(2, 9, 8, 1024, 40, p=(1, 1, 1, 1)),
        Case(1, 5, 11, 2100, 17, k=(2, 3), s=(1, 2), p=(0, 2, 1, 0)),
    ],
)
def test_direct_long_sums_and_extremes(lib: ctypes.CDLL, c: Case) -> None:
    """Sums longer than a run of the accumulators, weights that are passed over in parts, single pixels, kernels larger
    than the image."""
    for kernel in ("direct", "wide"):
        check(lib, kernel, c, partial(pack_direct, groups=1), 1e-5)


@pytest.mark.parametrize(
    "c",
    [
        Case(1, 33, 33, 64, 40, d=(24, 36), p=(24, 36, 24, 36)),
        Case(1, 9, 9, 1024, 33, d=(12, 12), p=(12, 12, 12, 12)),
        Case(2, 11, 10, 1024, 5, d=(3, 5), p=(3, 5, 1, 0)),
        Case(3, 14, 11, 512, 17, s=(2, 2), d=(5, 4), p=(5, 4, 5, 4)),
        Case(1, 12, 7, 1024, 16, k=(4, 1), d=(3, 1), p=(9, 0, 2, 0)),
        Case(2, 30, 31, 3, 20, d=(11, 9), p=(11, 9, 4, 9), planar=True),
        Case(1, 30, 31, 5, 20, k=(3, 2), s=(3, 1), d=(9, 1), p=(18, 1, 0, 0), planar=True),
        Case(1, 3, 3, 2, 5, d=(8, 8), p=(8, 8, 8, 8), planar=True),
        Case(2, 4, 5, 64, 40, k=(7, 7), p=(3, 3, 3, 3)),
        Case(1, 1, 8, 17, 16, k=(1, 31), p=(0, 15, 0, 15)),
    ],
)
def test_direct_far_beyond_the_image(lib: ctypes.CDLL, c: Case) -> None:
    """Kernels that reach far, many of whose taps are beyond the image: those are left out, and rows between are not
    copied."""
    check(lib, "direct_far", c, partial(pack_direct, groups=1), 1e-5)


@pytest.mark.parametrize(
    "c",
    [
        Case(1, 28, 28, 16, 96, k=(1, 1)),
        Case(3, 17, 13, 24, 144, k=(1, 1), slack=5),
        Case(1, 31, 29, 160, 40, k=(1, 1)),
        Case(2, 37, 41, 3, 32, s=(2, 2), p=(1, 1, 1, 1), planar=True),
        Case(1, 40, 40, 3, 64, k=(7, 7), s=(2, 2), p=(3, 3, 3, 3), planar=True),
        Case(1, 23, 26, 17, 48, p=(1, 1, 1, 1)),
        Case(1, 20, 20, 32, 16, k=(1, 1)),
        Case(2, 19, 23, 64, 160, k=(1, 1), g=2),
        Case(1, 21, 22, 34, 64, k=(3, 3), p=(0, 2, 1, 0), g=2),
    ],
)
def test_direct_short_sums(lib: ctypes.CDLL, c: Case) -> None:
    """Sums that go to the epilogue from where they were added up have the bits of the others."""
    check(lib, "direct_short", c, partial(pack_direct, groups=c.g), 1e-5)
    rng = np.random.default_rng(c.co)
    x = rng.standard_normal((c.n, c.ci, c.h, c.w)).astype(np.float32)
    w = pack_direct(rng.standard_normal((c.co, c.ci // c.g, *c.k)).astype(np.float32), function(lib, "panel")(), c.g)
    b = packed(rng.standard_normal(c.co))
    assert np.array_equal(run(lib, "direct_short", c, x, w, b, 3), run(lib, "direct", c, x, w, b, 1))


@pytest.mark.parametrize(
    "c",
    [
        Case(1, 9, 9, 1024, 70, k=(1, 1)),
        Case(2, 9, 7, 1024, 40, k=(1, 1), s=(1, 2)),
        Case(3, 7, 7, 1000, 33, k=(1, 1), slack=24),
        Case(1, 5, 9, 1024, 64, k=(1, 1), g=4),
        Case(1, 5, 6, 1024, 40, k=(1, 1), p=(1, 2, 0, 1)),
        Case(3, 9, 11, 512, 40, s=(2, 2), p=(1, 1, 1, 1)),
        Case(1, 14, 9, 512, 40, k=(3, 2), s=(1, 2), d=(2, 1), p=(0, 1, 3, 2), g=2),
        Case(2, 7, 5, 1021, 17, k=(2, 3), p=(1, 0, 0, 2), slack=3),
    ],
)
def test_direct_where_neighbours_collide_in_the_cache(lib: ctypes.CDLL, c: Case) -> None:
    """Pixels a multiple of 4096 bytes apart, which are copied first."""
    for kernel in ("direct", "wide"):
        check(lib, kernel, c, partial(pack_direct, groups=c.g), 2e-5)


@pytest.mark.parametrize(
    "c",
    [
        Case(2, 56, 57, 64, 200, k=(1, 1), slack=3),
        Case(1, 113, 111, 128, 64, k=(1, 1), s=(1, 2)),
        Case(1, 97, 101, 160, 96, k=(1, 1), g=2),
        Case(1, 120, 119, 32, 70, p=(1, 1, 1, 1)),
    ],
)
def test_direct_of_maps_beyond_the_caches(lib: ctypes.CDLL, c: Case) -> None:
    """Tiles that are multiplied by several panels in turn."""
    for kernel in ("direct", "direct_short") if c.k == (1, 1) else ("direct",):
        check(lib, kernel, c, partial(pack_direct, groups=c.g), 1e-5)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("ci", CHANNELS)
def test_winograd(lib: ctypes.CDLL, m: int, ci: int) -> None:
    """3x3 of stride 1 in every mix of channels; F(4) is allowed the error of its transform."""
    for co, (h, w) in zip(CHANNELS, itertools.cycle([(3, 3), (7, 7), (14, 19), (26, 5)]), strict=False):
        pads = (ci % 3, co % 3, (ci + 1) % 3, 1)
        c = Case(1 + ci % 2, h, w, ci, co, p=pads, slack=ci % 4)
        check(lib, f"wino{m}{m}1", c, partial(pack_wino, m=(m, m)), 5e-6 if m == 2 else 3e-5)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("ci", [5, 17, 64])
def test_winograd_with_a_stride(lib: ctypes.CDLL, m: int, ci: int) -> None:
    """3x3 of stride 2: images of odd and even sizes, also below a tile; groups."""
    pack, limit = partial(pack_wino_groups, m=(m, m), step=2), 5e-6 if m == 2 else 3e-5
    for co, (h, w) in zip(CHANNELS, itertools.cycle([(1, 2), (3, 3), (8, 7), (15, 38), (32, 5)]), strict=False):
        g = 1 + co % 2
        c = Case(1 + ci % 2, h, w, g * ci, g * co, s=(2, 2), p=(ci % 3, 1, 2, co % 3), g=g, slack=ci % 4)
        check(lib, f"wino{m}{m}2", c, partial(pack, groups=g), limit)


def pack_halves(w: F32, panel: int) -> F32:
    """OIHW weights for conv_strassen.h."""
    return packed(pack_strassen(w, panel, 1))


@pytest.mark.parametrize(
    "c",
    [
        Case(1, 14, 14, 64, 192, k=(1, 1)),
        Case(3, 7, 7, 544, 64, k=(1, 1), slack=5),
        Case(2, 9, 6, 1024, 128, k=(1, 1), s=(2, 1)),
        Case(1, 41, 40, 96, 64, k=(1, 1), s=(1, 3)),
        Case(2, 1, 1, 32, 64, k=(1, 1)),
    ],
)
def test_strassen(lib: ctypes.CDLL, c: Case) -> None:
    """Images of odd and even numbers of pixels, blocks of them, long sums; an image alone has the bits of the batch."""
    check(lib, "strassen", c, pack_halves, 1e-5)
    rng = np.random.default_rng(c.ci)
    x = rng.standard_normal((c.n, c.ci, c.h, c.w)).astype(np.float32)
    w = pack_halves(rng.standard_normal((c.co, c.ci, 1, 1)).astype(np.float32), function(lib, "panel")())
    b = packed(np.zeros(c.co))
    if c.n > 1:
        x[0, 0, 0, 0] = np.nan  # nor does it reach the others
        alone = run(lib, "strassen", replace(c, n=1), x[1:2], w, b, 1)
        assert np.array_equal(run(lib, "strassen", c, x, w, b, 3)[1:2], alone)


def test_strassen_of_channels_of_different_scales(lib: ctypes.CDLL) -> None:
    """What meets in its sums is brought to one scale: each output channel is as exact as if it were alone."""
    c, rng = Case(1, 8, 9, 128, 128, k=(1, 1)), np.random.default_rng(5)
    inner, outer = (10.0 ** rng.uniform(-4, 4, n) for n in (c.ci, c.co))
    outer[[3, 70]] = 0
    x = (rng.standard_normal((1, c.ci, c.h, c.w)) * inner[:, None, None]).astype(np.float32)
    w = (rng.standard_normal((c.co, c.ci, 1, 1)) * outer[:, None, None, None] / inner[:, None, None]).astype(np.float32)
    y = run(lib, "strassen", c, x, pack_halves(w, function(lib, "panel")()), packed(np.zeros(c.co)), 1)
    want = reference(c, x, w, np.zeros(c.co, np.float32))
    rms = np.sqrt((want**2).mean(axis=(0, 2, 3)))
    assert (np.abs(y - want).max(axis=(0, 2, 3)) <= 1e-5 * np.maximum(rms, 1e-6 * rms.max())).all()


@pytest.mark.parametrize("m", [(1, 2), (1, 4), (2, 1), (4, 1)])
@pytest.mark.parametrize("ci", [5, 17, 64])
def test_winograd_along_one_axis(lib: ctypes.CDLL, m: tuple[int, int], ci: int) -> None:
    """Kernels of three along one axis, and of one along the other, where pads are zeros all the same."""
    k = (3 if m[0] > 1 else 1, 3 if m[1] > 1 else 1)
    for co, (h, w) in zip(CHANNELS, itertools.cycle([(3, 3), (1, 97), (61, 1), (14, 19), (26, 5)]), strict=False):
        pads = (3 + ci % 2, 3 + co % 3, 2, 3 + ci % 3)
        c = Case(1 + ci % 2, h, w, ci, co, k=k, p=pads, slack=ci % 4, d=(1 + co % 2, 1 + co % 3))
        check(lib, f"wino{m[0]}{m[1]}1", c, partial(pack_wino, m=m), 3e-5)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("d", [(1, 2), (2, 2), (3, 5), (6, 1), (18, 18), (200, 3)])
def test_winograd_with_dilations(lib: ctypes.CDLL, m: int, d: tuple[int, int]) -> None:
    """Interleaved images: of many tiles, of part of one, and more of them than rows."""
    for n, h, w, ci, co in ((1, 33, 31, 17, 40), (2, 7, 20, 16, 32), (1, 40, 5, 5, 17)):
        c = Case(n, h, w, ci, co, p=(d[0], d[1], d[0], d[1] + 1), d=d)
        check(lib, f"wino{m}{m}1", c, partial(pack_wino, m=(m, m)), 3e-5)


# Largest error over the rms of the result, for normal inputs and weights: twice what was measured.
@pytest.mark.parametrize(
    ("c", "kernel", "limit"),
    [
        (Case(1, 56, 56, 64, 64, p=(1, 1, 1, 1)), "direct", 6e-6),
        (Case(1, 56, 56, 64, 64, p=(1, 1, 1, 1)), "wino221", 5e-6),
        (Case(1, 56, 56, 64, 64, p=(1, 1, 1, 1)), "wino441", 2e-5),
        (Case(1, 56, 56, 64, 64, s=(2, 2), p=(1, 1, 1, 1)), "wino222", 5e-6),
        (Case(1, 56, 56, 64, 64, s=(2, 2), p=(1, 1, 1, 1)), "wino442", 1e-5),
        (Case(1, 7, 7, 512, 512, p=(1, 1, 1, 1)), "direct", 1.1e-5),
        (Case(1, 7, 7, 512, 512, p=(1, 1, 1, 1)), "wino221", 1.1e-5),
        (Case(1, 7, 7, 512, 512, p=(1, 1, 1, 1)), "wino441", 4.4e-5),
    ],
)
def test_accuracy_of_wide_layers(lib: ctypes.CDLL, c: Case, kernel: str, limit: float) -> None:
    """F(2x2) is as accurate as a direct sum, F(4x4) loses two bits, and one with the stride."""
    pack = partial(pack_direct, groups=1)
    if kernel != "direct":
        pack = partial(pack_wino, m=(int(kernel[-2]),) * 2, step=int(kernel[-1]))
    check(lib, kernel, c, pack, limit)


def pack_wino_groups(w: F32, panel: int, m: tuple[int, int], groups: int, step: int = 1) -> F32:
    """The weights of each group on their own, one group after the other."""
    return packed(np.concatenate([pack_wino(part, panel, m, step) for part in np.split(w, groups)]))


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize(("groups", "ci", "co"), [(2, 3, 5), (3, 17, 16), (4, 16, 7), (2, 64, 33), (7, 1, 2)])
def test_winograd_of_groups(lib: ctypes.CDLL, m: int, groups: int, ci: int, co: int) -> None:
    """Channels of a group in any relation to vectors and panels."""
    for n, h, w in [(1, 7, 7), (2, 13, 9), (1, 3, 29)]:
        c = Case(n, h, w, groups * ci, groups * co, p=(1, 0, 2, 1), g=groups, slack=co % 4)
        check(lib, f"wino{m}{m}1", c, partial(pack_wino_groups, m=(m, m), groups=groups), 5e-6 if m == 2 else 3e-5)


@pytest.mark.parametrize("channels", [*CHANNELS, 200])
@pytest.mark.parametrize("k", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise(lib: ctypes.CDLL, channels: int, k: int, stride: int) -> None:
    """The sliding kernels, with asymmetric pads, and the general one for the same shapes."""
    for h, w, p in [(7, 7, (k // 2,) * 4), (9, 30, (0, k - 1, 2, 0)), (k, k + 1, (1, 0, 0, 2))]:
        c = Case(2, h, w, channels, channels, (k, k), (stride, stride), p=p, g=channels, slack=channels % 3)
        for kernel in (f"dw{k}{stride}", "dw00"):
            check(lib, kernel, c, pack_depthwise, 5e-6)


@pytest.mark.parametrize("channels", [1, 17, 64])
@pytest.mark.parametrize(("kernel", "k", "s", "d"), [
    ("dw11", (3, 1), 1, 1), ("dw12", (5, 1), 2, 1), ("dw21", (2, 2), 1, 1), ("dw92", (9, 9), 2, 1),
    ("dw21", (3, 2), 1, 2), ("dw31", (3, 3), 1, 2), ("dw51", (1, 5), 1, 2), ("dw31", (3, 3), 1, 6),
    ("dw31", (2, 3), 1, 40), ("dw32", (3, 3), 2, 2), ("dw33", (3, 3), 3, 1), ("dw33", (3, 3), 3, 5),
    ("dw54", (5, 5), 4, 1),
    ("long51", (2, 10), 1, 1), ("long51", (3, 14), 1, 3), ("long82", (4, 31), 2, 1), ("long82", (2, 22), 2, 2),
])  # fmt: skip
def test_depthwise_widths(lib: ctypes.CDLL, channels: int, kernel: str, k: tuple[int, int], s: int, d: int) -> None:
    """Kernels of one column, of even width, wide and dilated ones."""
    for h, w in [(11, 11), (17, 31), (12, 47)]:
        pads = (0, d * (k[1] // 2), 1, d * k[1])
        c = Case(2, h, w, channels, channels, k=k, s=(s, s), d=(1, d), p=pads, g=channels, slack=3)
        check(lib, kernel, c, pack_depthwise, 5e-6)


@pytest.mark.parametrize("channels", [1, 17, 200])
@pytest.mark.parametrize(("kernel", "k", "s", "d"), [
    ("tall31", (3, 1), 1, 1), ("tall31", (3, 2), 1, 1), ("tall31", (3, 2), 1, 3), ("tall31", (3, 1), 1, 17),
    ("tall52", (5, 3), 2, 1), ("tall52", (5, 1), 2, 2), ("tall_long", (13, 3), 1, 1), ("tall_long", (21, 1), 1, 1),
    ("tall_long", (7 * 3, 2), 1, 2),
])  # fmt: skip
def test_depthwise_down_columns(
    lib: ctypes.CDLL, channels: int, kernel: str, k: tuple[int, int], s: int, d: int
) -> None:
    """Kernels that are higher than wide, whose tiles slide along y; strides along x are any."""
    reach = k[0] // 2 * d
    for h, w, p in [(7, 9, (reach, k[1] // 2, reach, 1)), (47, 5, (d, 0, 2 * d, 1)), (30, 40, (k[0], 1, k[0], 2))]:
        c = Case(2, h, w, channels, channels, k, (s, 1 + w % 2), (d, 1 + h % 2), p, channels, slack=channels % 3)
        if min(c.out()) > 0:
            check(lib, kernel, c, pack_depthwise, 5e-6)


@pytest.mark.parametrize(("kernel", "k"), [("long_grouped", (3, 13)), ("tall_grouped", (4, 3))])
@pytest.mark.parametrize("group", [(1, 2), (2, 2), (2, 4)])
def test_small_groups_of_long_and_tall_kernels(
    lib: ctypes.CDLL, kernel: str, k: tuple[int, int], group: tuple[int, int]
) -> None:
    """Permuted lanes, in parts of a row of taps, and down columns."""
    ci, co = group
    for groups in (2, 7, 33):
        if groups_fit_lanes(groups * co, groups, ci, function(lib, "panel")() // 2):
            c = Case(2, 17, 19, groups * ci, groups * co, k, (1, 1), (2, 1), (3, 6, 3, 6), groups, slack=1)
            check(lib, kernel, c, pack_depthwise, 5e-6)


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_depthwise_general(lib: ctypes.CDLL, multiplier: int) -> None:
    """Dilations, unequal strides, kernels that are not square, channel multipliers."""
    for channels in (1, 5, 16, 70):
        c = Case(1, 12, 15, channels, channels * multiplier, (2, 4), (2, 1), (3, 2), (1, 2, 0, 3), channels)
        check(lib, "grouped00", c, pack_depthwise, 5e-6)
        c = Case(2, 29, 33, channels, channels * multiplier, (4, 3), (5, 7), (2, 3), (1, 2, 0, 3), channels)
        check(lib, "grouped00", c, pack_depthwise, 5e-6)
        if multiplier == 1:
            check(lib, "dw00", c, pack_depthwise, 5e-6)


@pytest.mark.parametrize("group", [(1, 2), (1, 3), (2, 2), (4, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_small_groups(lib: ctypes.CDLL, group: tuple[int, int], stride: int) -> None:
    """Groups of a few channels, whose lanes are permuted; sizes that end within a vector and within a strip."""
    ci, co = group
    lanes = function(lib, "panel")() // 2
    for groups, (h, w) in itertools.product((2, 7, 16, 70), [(7, 7), (9, 30), (3, 2)]):
        if not groups_fit_lanes(groups * co, groups, ci, lanes):
            continue
        c = Case(2, h, w, groups * ci, groups * co, (3, 3), (stride, stride), p=(1, 1, 1, 0), g=groups, slack=h % 3)
        for kernel in (f"grouped3{stride}", "grouped00"):
            check(lib, kernel, c, pack_depthwise, 5e-6)


def test_rows_of_depthwise_may_be_dilated(lib: ctypes.CDLL) -> None:
    """The sliding kernel knows the width of its kernel, and takes any dilation along y."""
    c = Case(1, 12, 15, 20, 20, (3, 3), (1, 1), (2, 1), (2, 1, 2, 1), 20)
    check(lib, "dw31", c, pack_depthwise, 5e-6)


def test_infinity_stays_under_its_kernel(lib: ctypes.CDLL) -> None:
    """Direct and depthwise sums see an infinity only where their kernel covers it."""
    c = Case(1, 9, 9, 16, 16, p=(1, 1, 1, 1), g=1)
    x = np.ones((1, 16, 9, 9), np.float32)
    x[0, 3, 4, 4] = np.inf
    w = np.ones((16, 16, 3, 3), np.float32)
    y = run(lib, "direct", c, x, pack_direct(w, function(lib, "panel")(), 1), aligned(16), 1)
    mask = np.zeros((9, 9), bool)
    mask[3:6, 3:6] = True
    assert (np.isinf(y) == mask).all() and not np.isnan(y).any()
