"""The error function of float64 arrays beside the C library's."""

from __future__ import annotations

import math

import numpy as np

from onnxc.primitives.erf import erf


def test_erf_is_within_two_units() -> None:
    grid = np.linspace(-6.5, 6.5, 40_001)
    small = np.ldexp(1.0, np.arange(-1070, 3)) * 1.1
    x = np.concatenate([grid, small, -small, (np.arange(193) - 96) / 32])  # halves between two points of the table
    right = np.array([math.erf(v) for v in x])
    assert (np.abs(erf(x) - right) <= 2 * np.spacing(np.abs(right))).all()


def test_erf_of_special_values_and_shapes() -> None:
    found = erf(np.array([[np.inf, -np.inf, 0.0, -0.0, np.nan, 5e-324]]))
    assert found.shape == (1, 6)
    np.testing.assert_array_equal(found, [[1, -1, 0, 0, np.nan, 5e-324]])
    assert np.signbit(found[0, 3]) and not np.signbit(found[0, 2])
    assert erf(np.float64(0.5).reshape(())).shape == () and erf(np.empty((0, 3))).shape == (0, 3)
