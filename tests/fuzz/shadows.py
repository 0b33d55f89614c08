"""How sure a value is: its shadows are what other correct runtimes might compute.

A node runs once on the oracle's values, and once more on each set of shadows; then each result of rounding is moved
a little, at random, by more than the ways of computing it differ. A node whose results depend on that (a floor of
what might be 2 or 1.9999999, a difference of nearly equal numbers) is ill-conditioned, and is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.oracle import Array, Value

COUNT = 3  # sets of shadows
NOISE = {"float64": 1e-14, "float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
WORST = {"float64": 1e-9, "float32": 1e-3, "float16": 3e-2, "bfloat16": 8e-2}  # by the largest magnitude
_MANTISSA = {"float64": 50, "float32": 22, "float16": 10, "bfloat16": 7}

# Results of these are copies of elements, or whole: no rounding.
EXACT = frozenset([
    "Abs", "And", "ArgMax", "ArgMin", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "Ceil", "CenterCropPad", "Clip", "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape",
    "DepthToSpace", "Equal", "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements", "GatherND",
    "GlobalMaxPool", "Greater", "GreaterOrEqual", "Hardmax", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual",
    "Max", "MaxPool", "MaxUnpool", "Min", "Neg", "NonMaxSuppression", "NonZero", "Not", "OneHot", "Optional",
    "OptionalGetElement", "OptionalHasElement", "Or", "Pad", "QuantizeLinear", "Range", "ReduceMax", "ReduceMin",
    "Relu", "Reshape", "ReverseSequence", "Round", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
    "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Sign", "Size", "Slice", "SpaceToDepth", "Split",
    "SplitToSequence", "Squeeze", "TensorScatter", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu",
    "Unique", "Unsqueeze", "Where", "Xor",
])  # fmt: skip
# Exact where all numbers are whole and small, whatever the order of additions.
_WHOLE = frozenset([
    "Add", "Sub", "Mul", "Sum", "MatMul", "Gemm", "ReduceSum", "ReduceL1", "CumSum", "Mean", "Cast", "CastLike",
    "Dropout", "Einsum", "Mod",
])  # fmt: skip


def is_float(value: Any) -> bool:
    """Whether elements have digits to lose."""
    return isinstance(value, np.ndarray) and value.dtype.name in NOISE


def _is_whole(value: Any) -> bool:
    if not is_float(value):
        return True
    wide = value.astype(np.float64)
    limit = 2.0 ** _MANTISSA[value.dtype.name]
    return bool(np.all(np.isfinite(wide) & (wide == np.round(wide)) & (np.abs(wide) < limit)))


def rounds(op: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
    """Whether an op's results may differ between correct runtimes, given equal inputs."""
    if op in EXACT:
        return False
    return op not in _WHOLE or not all(map(_is_whole, [*inputs, *outputs]))


# What onnxruntime computes by way of float32: coordinates, whatever is interpolated; and the constants of some.
_BY_FLOAT32 = frozenset(["AffineGrid", "GridSample", "HardSwish", "Resize", "Shrink", "Upsample"])


def moved(op: str, value: Value, rng: np.random.Generator) -> Value:
    """A result of an op whose elements have been rounded otherwise. Zeros stay: most are the structure's own."""
    if not isinstance(value, np.ndarray) or not is_float(value):
        return value
    wide = value.astype(np.float64)
    noise = NOISE["float32" if op in _BY_FLOAT32 and value.dtype == np.float64 else value.dtype.name]
    scale = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
    with np.errstate(all="ignore"):
        shift = rng.uniform(-1, 1, wide.shape) * noise * (np.abs(wide) + 0.05 * scale)
        return np.where(wide == 0, wide, wide + shift).astype(value.dtype)


def error(value: Array, shadows: Sequence[Array]) -> float:
    """The largest distance of the shadows from a value; infinite where they are not even alike."""
    worst = 0.0
    for s in shadows:
        if s.shape != value.shape or s.dtype != value.dtype:
            return np.inf
        if not is_float(value):
            if not np.array_equal(s, value):
                return np.inf
            continue
        a, b = value.astype(np.float64), s.astype(np.float64)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return np.inf
        fine = np.isfinite(a)
        worst = max(worst, float(np.abs(a[fine] - b[fine]).max(initial=0.0)))
    return worst


def is_steady(value: Value, shadows: Sequence[Value]) -> bool:
    """Whether the shadows differ by rounding alone."""
    if isinstance(value, list):
        return all(isinstance(s, list) and len(s) == len(value) for s in shadows) and all(
            is_steady(v, [s[k] for s in shadows]) for k, v in enumerate(value)
        )
    if not is_float(value):
        return error(value, shadows) == 0  # type: ignore[arg-type]
    wide = value.astype(np.float64)
    scale = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
    return error(value, shadows) <= WORST[value.dtype.name] * scale  # type: ignore[arg-type]


def is_plain(value: Value) -> bool:
    """Whether there is neither NaN nor infinity, nor a magnitude in which differences drown or vanish."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if value.dtype.kind in "iub" or value.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return bool(np.abs(value.astype(np.float64)).max(initial=0.0) < 2**40)
    if value.dtype.kind in "c":
        return bool(np.isfinite(value).all())
    wide = value.astype(np.float64)
    largest = np.abs(wide).max(initial=0.0)
    return bool(np.isfinite(wide).all()) and largest < (300 if value.dtype.itemsize < 4 else 1e4)
