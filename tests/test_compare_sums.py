"""Sums of differences, in C++ and in numpy: the same of any two floats, whatever the size."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product as pairs_of

import numpy as np
import pytest

from onnxc.tools.compare.native import library
from onnxc.tools.compare.products import native_product, product
from onnxc.tools.compare.sums import largest_gap, numpy_gap, numpy_sums, sums

SIZES = [1, 7, 8, 9, 4095, 4096, 4097, 20_001]
EXACT = ["top", "worst", "scale", "zero_signs"]
ADDED = ["total", "noise", "ours", "theirs"]


def pair(size: int, a: type, b: type) -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(size)
    x = r.standard_normal(size)
    found = x.astype(a), (x + 1e-3 * r.standard_normal(size)).astype(b)
    for k, zeros in enumerate([(0.0, -0.0), (-0.0, 0.0), (0.0, 0.0)]):
        if size > 3 * k + 3:
            found[0][3 * k], found[1][3 * k] = zeros
    return found


@pytest.mark.parametrize("size", SIZES)
def test_native_and_numpy(size: int) -> None:
    assert library() is not None
    for kinds in pairs_of((np.float32, np.float64), repeat=2):
        a, b = pair(size, *kinds)
        got, want = sums(a, b), numpy_sums(a, b)
        assert got is not None and want is not None
        assert [getattr(got, n) for n in EXACT] == [getattr(want, n) for n in EXACT]
        np.testing.assert_allclose([getattr(got, n) for n in ADDED], [getattr(want, n) for n in ADDED], rtol=1e-12)
        assert largest_gap(a, b) == numpy_gap(a, b) == np.abs(a.astype(np.float64) - b).max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(size: int, bad: float) -> None:
    for k in {0, size // 2, size - 1}:
        a, b = pair(size, np.float32, np.float64)
        b[k] = bad
        assert sums(a, b) is None and sums(b, a) is None
        np.testing.assert_equal(largest_gap(a, b), numpy_gap(a, b))
        a[k] = bad  # infinities of one sign have no difference
        assert sums(a, b) is None
        np.testing.assert_equal(largest_gap(a, b), numpy_gap(a, b))


def test_what_goes_through_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves, views that skip elements, nothing, and machines without a compiler."""
    a, b = pair(99, np.float32, np.float32)
    assert sums(a.astype(np.float16), b.astype(np.float16)) is not None
    assert largest_gap(a[::2], b[::2]) == numpy_gap(a[::2], b[::2])
    assert sums(a[:0], b[:0]) is None and largest_gap(a[:0], b[:0]) == 0
    monkeypatch.setattr("onnxc.tools.compare.native._library", lambda: None)
    assert sums(a, b) == numpy_sums(a, b)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 70, 33), (13, 300, 130)])
def test_products_are_those_of_numpy(m: int, k: int, n: int) -> None:
    r = np.random.default_rng(n)
    a = r.standard_normal((m, k))
    plain, wide = r.standard_normal((k, n)).astype(np.float32), r.standard_normal((2 * k, 3 * n))
    for b in (plain, plain.T.copy().T, plain[:, ::-1], plain.astype(np.float16), wide[::2, ::3]):
        found = np.full((m, n + 2), 7.0)
        assert native_product(a, b, found[:, 1:-1]) and (found[:, [0, -1]] == 7).all()
        np.testing.assert_allclose(found[:, 1:-1], a @ b.astype(np.float64), rtol=1e-12, atol=1e-12)
    with ThreadPoolExecutor(2) as pool:
        assert np.array_equal(product(a.reshape(m, 1, k), wide[::2, ::3], pool)[:, 0], found[:, 1:-1])
