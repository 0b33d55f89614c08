"""What the tables of operators' cases are made with: inputs, drawn in the order in which the cases are listed."""

from __future__ import annotations

from typing import Any

import numpy as np

rng = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def pos(*shape: int) -> np.ndarray:
    return (rng.random(shape) + 0.1).astype(np.float32)


def ints(low: int, high: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return rng.integers(low, high, shape).astype(dtype)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def bools(*shape: int) -> np.ndarray:
    return rng.random(shape) < 0.5


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 88.0, -88.0, 1.5, -2.5, 0.5, 2.0, -1.0], np.float32)

# Sizes of kernels and channels, which are part of a model.
KERNELS = (2, 3, 4, 6, 8)
