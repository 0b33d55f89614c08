"""The convolution template whose lanes are pixels (conv_pixels.h), compiled alone and run against float64.

As in test_kernel_conv.py, what it may not read or write is poisoned, and no division of the work changes a bit.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest

from onnxc.codegen.cpp.conv_algorithms import PIXELS, Pixels, pixels_of
from tests.native_library import native_library
from tests.test_kernel_conv import Case, aligned, packed, reference, run

LEVELS = ["native", "x86-64-v3", "x86-64-v2"] if platform.machine() == "x86_64" else ["native"]
WAYS = ["PX_WIDE", "PX_TALL", "PX_LINE"]

HEAD = """
#include "conv_pixels.h"
struct Call { const f32 *x, *w, *b; f32 *o; void *scratch; i64 ops, first, last; };
#define KERNEL(name, O, K, S, LONG, WAY) \\
  extern "C" i64 name##_count(const ConvShape *s) { return conv_px_count<O, WAY>(*s); } \\
  extern "C" i64 name##_scratch(const ConvShape *s) { return conv_px_scratch<O, WAY>(*s); } \\
  extern "C" void name(const ConvShape *s, const Call *k) { \\
    const f32 *b = k->b; f32 *o = k->o; i64 ops = k->ops; const ConvShape q = *s; \\
    conv_px_items<O, K, S, LONG, WAY>(*s, k->x, k->w, k->first, k->last, k->scratch, conv_across( \\
      [=](const Px &p, i64 c, vf v, auto l) OX_LAMBDA { \\
        if (p.i - p.x != (p.n * q.OH + p.y) * q.OW) __builtin_trap(); \\
        vf z = {}; v += b[c]; sts(o + p.i * ops + c, sel<f32>(v < z, z, v), ops, (int)l); })); } \\
  extern "C" i64 name##_turned_count(const ConvShape *s) { return name##_count(s); } \\
  extern "C" i64 name##_turned_scratch(const ConvShape *s) { return name##_scratch(s); } \\
  extern "C" void name##_turned(const ConvShape *s, const Call *k) { \\
    const f32 *b = k->b; f32 *o = k->o; i64 ops = k->ops; const ConvShape q = *s; \\
    conv_px_items<O, K, S, LONG, WAY>(*s, k->x, k->w, k->first, k->last, k->scratch, \\
      [=](const Px &p, i64 c, vf v, auto l) OX_LAMBDA { \\
        if (p.i != (p.n * q.OH + p.y) * q.OW + p.x) __builtin_trap(); \\
        vf z = {}; v += ldl(b + c, l); stl(o + p.i * ops + c, sel<f32>(v < z, z, v), l); }); }
"""
VARIANTS = [(1, 3, 1, 0), (1, 3, 2, 0), (1, 7, 1, 0), (1, 6, 1, 1), *((o, 0, 0, 0) for o in (1, 2, 3, 4))]


def name_of(variant: tuple[int, ...], way: str) -> str:
    """The exported function of a variant."""
    return "_".join(["px", *map(str, variant), way[3:].lower()])


@pytest.fixture(scope="module", params=LEVELS)
def lib(request: pytest.FixtureRequest, session_folder: Path) -> ctypes.CDLL:
    """The test kernels, compiled for one CPU level."""
    if request.param == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU has no AVX2")
    kernels = [f"KERNEL({name_of(v, way)}, {', '.join(map(str, v))}, {way})" for v in VARIANTS for way in WAYS]
    source = HEAD + "\n".join(kernels)
    return ctypes.CDLL(str(native_library(session_folder, source, [f"-march={request.param}"])))


def check(lib: ctypes.CDLL, c: Case, variant: tuple[int, ...]) -> None:
    """Near the definition in float64, in every way that tiles lie; no division changes a bit."""
    rng = np.random.default_rng(c.ci * 1000 + c.co)
    x = rng.standard_normal((c.n, c.ci, c.h, c.w)).astype(np.float32)
    w = rng.standard_normal((c.co, c.ci // c.g, *c.k)).astype(np.float32)
    b = packed(rng.standard_normal(c.co))
    assert pixels_of(c.co // c.g).together == variant[0]
    weights = packed(PIXELS.pack(w, 0, c.g))
    want = reference(c, x, w, b)
    for way in WAYS:
        y = run(lib, name_of(variant, way), c, x, weights, b, 1)
        assert np.abs(y - want).max() <= 1e-5 * max(float(np.sqrt((want**2).mean())), 0.1), (c, way)
        assert np.array_equal(y, run(lib, name_of(variant, way), c, x, weights, b, 3)), (c, way)
        assert np.array_equal(y, run(lib, name_of(variant, way) + "_turned", c, x, weights, b, 2)), (c, way)


ANY, SLIDING = (1, 0, 0, 0), (1, 3, 1, 0)


@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize(("c", "variant"), [
    (Case(2, 17, 31, 5, 5, p=(1, 1, 1, 1), g=5), SLIDING),
    (Case(2, 23, 70, 3, 3, p=(0, 2, 5, 0), g=3), SLIDING),
    (Case(1, 29, 40, 3, 3, s=(2, 2), p=(1, 1, 1, 1), g=3), (1, 3, 2, 0)),
    (Case(1, 29, 13, 2, 2, k=(3, 5), s=(2, 3), p=(1, 2, 0, 2), g=2), (1, 3, 2, 0)),
    (Case(1, 41, 37, 3, 3, k=(7, 7), p=(3, 3, 3, 3), g=3), (1, 7, 1, 0)),
    (Case(2, 20, 19, 2, 2, k=(11, 11), p=(5, 5, 5, 5), g=2), (1, 6, 1, 1)),
    (Case(2, 20, 19, 2, 2, k=(16, 4), p=(9, 3, 7, 0), g=2), (1, 6, 1, 1)),
    (Case(1, 19, 45, 1, 1, k=(3, 3), d=(4, 3), p=(4, 3, 4, 3)), ANY),
    (Case(3, 1, 211, 1, 1, k=(1, 9), p=(0, 4, 0, 4)), ANY),
    (Case(2, 1, 130, 33, 1, k=(1, 25), s=(1, 4), p=(0, 30, 0, 3)), ANY),
    (Case(1, 3, 4, 40, 1, k=(3, 3), p=(7, 7, 7, 7)), ANY),
    (Case(1, 13, 17, 64, 2, k=(9, 9), p=(4, 4, 4, 4)), (2, 0, 0, 0)),
    (Case(1, 31, 65, 19, 3, k=(3, 3), p=(1, 1, 1, 1)), (3, 0, 0, 0)),
    (Case(2, 9, 33, 36, 9, k=(2, 3), s=(3, 2), p=(1, 1, 0, 0), g=3), (3, 0, 0, 0)),
    (Case(1, 12, 20, 21, 7, k=(1, 1)), (4, 0, 0, 0)),
    (Case(1, 12, 512, 17, 4, k=(3, 3), s=(1, 4), p=(1, 1, 1, 1), d=(2, 3)), (4, 0, 0, 0)),
    (Case(1, 2, 2100, 2, 1, k=(1, 3), p=(0, 1, 0, 1)), ANY),
    (Case(2, 11, 37, 3, 20, k=(3, 3), p=(1, 1, 1, 1)), (4, 0, 0, 0)),
    (Case(1, 9, 35, 2, 33, k=(2, 3)), (4, 0, 0, 0)),
], ids=str)  # fmt: skip
def test_against_float64(lib: ctypes.CDLL, c: Case, variant: tuple[int, ...], planar: bool) -> None:
    """Odd sizes, strides, dilations, groups and pads, of planar images and of slices of channels-last ones."""
    check(lib, Case(**{**c.__dict__, "planar": planar, "slack": 0 if planar else 5}), variant)


def test_outside_of_the_image_is_zero(lib: ctypes.CDLL) -> None:
    """What lies beyond an output's window never reaches its sum: infinities stay where they belong."""
    c = Case(1, 20, 40, 1, 1, k=(11, 3), p=(5, 1, 5, 1), planar=True)
    x = np.zeros((1, 1, 20, 40), np.float32)
    x[0, 0, 13, 20] = np.inf
    w = np.ones((1, 1, 11, 3), np.float32)
    for way in WAYS:
        y = run(lib, name_of((1, 6, 1, 1), way), c, x, packed(PIXELS.pack(w, 0, 1)), aligned(1), 1)
        assert np.array_equal(np.isinf(y[0, 0]).nonzero()[0], np.repeat(np.arange(8, 19), 3)), way


def test_parts_of_outputs() -> None:
    """Output channels are divided evenly, four at most."""
    assert [pixels_of(n) for n in (1, 4, 5, 7, 8, 9)] == [
        Pixels(1, 1), Pixels(4, 1), Pixels(3, 2), Pixels(4, 2), Pixels(4, 2), Pixels(3, 3)
    ]  # fmt: skip
