"""What rounding explains, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxc.errors import InputError
from onnxc.tools.compare.metrics import distance, is_float, largest, largest_finite, unit, wide
from onnxc.tools.compare.sums import largest_gap
from onnxc.tools.compare.verdict import Verdict

Array = np.ndarray[Any, Any]

# Of one layer, in units of its dtype by the largest value. A float32 kernel may take an approximation of a few units,
# or add in another order; halves are computed in float32 and rounded once or twice.
FLOOR = 32.0
FLOOR_OF_HALVES = 4.0
FLOOR_OF_OPS = {"Conv": 256.0, "ConvTranspose": 256.0, "FusedConv": 256.0}  # Winograd's transforms cost digits
# What only chooses or moves numbers: nothing is rounded.
EXACT_OPS = frozenset(
    [
        "Abs",
        "Ceil",
        "Clip",
        "Compress",
        "Concat",
        "CumMax",
        "DepthToSpace",
        "Dropout",
        "Expand",
        "Flatten",
        "Floor",
        "Gather",
        "GatherElements",
        "GatherND",
        "GlobalMaxPool",
        "Identity",
        "Max",
        "MaxPool",
        "Min",
        "Neg",
        "Pad",
        "ReduceMax",
        "ReduceMin",
        "Relu",
        "Reshape",
        "Round",
        "ScatterElements",
        "ScatterND",
        "Sign",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "TopK",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    ]
)
CASTS = frozenset(["Cast", "CastLike"])  # which round, but to nothing else than the nearest number
NARROW = 16.0  # times the error of the same layer in numpy, in its own dtype
GROSS = 1e-2  # an error of this share of the largest value is no matter of rounding, where a unit is below 1e-4


@dataclass(frozen=True)
class Tolerances:
    """When values agree.

    Attributes:
        rtol, atol: of outputs, relative to each element and to the output's largest value.
        by: of layers and outputs, relative to the largest value, by dtype ("float16"), op type ("Softmax") or both
            ("Softmax:float16", which counts before op type, which counts before dtype).
    """

    rtol: float = 1e-3
    atol: float = 1e-5
    by: Mapping[str, float] = field(default_factory=dict)

    def asked(self, op_type: str, dtype: str) -> float | None:
        """What the user tolerates of such a tensor; None where that was left to us."""
        return next((self.by[k] for k in (f"{op_type}:{dtype}", op_type, dtype) if k in self.by), None)

    def allowed(self, reference: Array) -> Array:
        """The tolerance of each element of an output."""
        magnitude = np.abs(np.where(np.isfinite(reference), reference, 0))
        found: Array = self.rtol * magnitude + self.atol * largest(magnitude)
        return found


def parse_tolerances(options: list[str] | tuple[str, ...]) -> dict[str, float]:
    """Tolerances as the command line gives them.

    >>> parse_tolerances(["float16=1e-2", "Softmax=1e-4"])
    {'float16': 0.01, 'Softmax': 0.0001}
    """
    found: dict[str, float] = {}
    for option in options:
        name, equals, text = option.rpartition("=")
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not equals or not name or not number >= 0:
            raise InputError(
                f"a tolerance is given as float16=1e-2, Softmax=1e-4 or Softmax:float16=1e-2, not {option!r}"
            )
        found[name] = number
    return found


def only_moves(op_types: Sequence[str]) -> bool:
    """Whether a layer of these ops only moves and casts numbers."""
    return all(op in EXACT_OPS or op in CASTS for op in op_types)


def layer_bound(op_types: list[str], exact: Array, narrow: Array | None, eps: float, *, exactly: bool = False) -> float:
    """The largest distance to `exact` that rounding explains of a layer of these ops.

    With `exactly`, both sides have the same dtypes: then what only moves or casts numbers has to give the same.

    `narrow` is the same layer, for the same inputs, in numpy with the layer's own dtypes: where values cancel, or a
    function is steep, it is far from `exact`, and so may others be.
    """
    if exactly and only_moves(op_types):
        return 0.0
    floor = FLOOR_OF_HALVES if is_half(eps) else max([FLOOR, *(FLOOR_OF_OPS.get(op, 0.0) for op in op_types)])
    bound = floor * math.sqrt(max(1, len(op_types))) * eps * largest_finite(exact)
    if narrow is not None and narrow.shape == exact.shape:
        errors = distance(wide(narrow), wide(exact))
        bound = max(bound, NARROW * largest_finite(errors))
    return bound


def output_bound(depth: int, largest_value: float, eps: float) -> float:
    """The largest distance to float64 that rounding explains of a model's output: it grows like a random walk."""
    return 2.0 * eps * math.sqrt(depth + 4) * largest_value


def gap(a: Array, b: Array) -> float:
    """The largest distance of two tensors of one shape, in float64; of what is no float, 0 or infinity... as a number.

    Integers and booleans: the largest difference, at least 1 where any differs. Strings: 1 where any differs.
    """
    if a.shape != b.shape:
        return math.inf
    if a.dtype.kind not in "iubfcV" or b.dtype.kind not in "iubfcV":
        return float(not np.array_equal(a, b))
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":  # those of 64 bits have no exact float64
        return 0.0 if np.array_equal(a, b) else max(1.0, largest(distance(wide(a), wide(b))))
    if a.dtype.kind == b.dtype.kind == "f":
        top = largest_gap(a, b)
        if math.isfinite(top):
            return top
    return largest(distance(wide(a), wide(b)))


def graver(error: float, scale: float, eps: float) -> Verdict:
    """Of an error that rounding does not explain: OURS_WORSE, or WRONG where it is gross."""
    gross = 20 * eps if is_half(eps) else GROSS
    return Verdict.WRONG if not error <= gross * (scale or 1.0) or eps == 0 else Verdict.OURS_WORSE


def is_half(eps: float) -> bool:
    """Whether a unit is that of a type with fewer digits than a float32 has."""
    return eps > 1e-4


def coarsest(*arrays: Array) -> float:
    """The coarser unit of some tensors."""
    return max((unit(a.dtype) for a in arrays if is_float(a)), default=0.0)
