"""How products of queries and keys become powers of two: their scale, the steps of `score_steps`, and the exponent.

The unit of a power of two, log2(e), is part of a multiplication that is needed anyway, where nothing is done to scores
that this would change. Scores are float32, whatever the dtype of what is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.attention_steps import LOWEST, Step
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType

LOG2E = math.log2(math.e)
MOST = 3.4028234663852886e38  # of float32
TAME = 1e30  # factors within which products with log2(e) neither overflow nor vanish

# What becomes of scores `s` (`score_steps`).
STEPS = {
    "scale": "libdevice.mul_rn(s, {number})", "tanh": "libdevice.tanh(s)", "max": "ox_max(s, {number})",
    "add": "s + {mask}", "sub": "s - {mask}", "fill": "tl.where({mask}, {number}, s)",
    "keep": "tl.where({mask}, s, {number})",
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """How scores become powers of two.

    Attributes:
        scores: statements that make of products `s` what a maximum is taken of.
        factor: of a score in the exponent, where the maximum is taken before; None is 1.
        late: whether the factor comes after the subtraction: scores may be so large that it would overflow.
    """

    scores: tuple[str, ...] = ()
    factor: str | None = None
    late: bool = False

    def exponent(self, s: str, base: str) -> str:
        """The power of two for a score, less the base (which is in units of scores only where `late`)."""
        if self.factor is None:
            return f"{s} - {base}"
        return f"({s} - {base}) * {self.factor}" if self.late else f"{s} * {self.factor} - {base}"


def unit_of(
    scale: float, steps: Sequence[Step], masks: Sequence[str], dtypes_of: Sequence[DType], dtype: DType
) -> Unit:
    """The unit for a scale and steps. `masks` are the names of what those with a mask are done by, in order;
    `dtypes_of` those of the node's masks, `dtype` that of queries and keys.

    Scores of float32 may be so large that a product which is joined with a subtraction, and is not rounded, would be
    above the greatest of rounded ones by more than a power of two can be of.
    """
    unit = _unit_of(scale, steps, masks, dtypes_of)
    return replace(unit, late=unit.factor is not None) if dtype is dtypes.float32 else unit


def _unit_of(scale: float, steps: Sequence[Step], masks: Sequence[str], dtypes_of: Sequence[DType]) -> Unit:
    if len(steps) == 1 and steps[0].name == "add":
        return _added(scale, masks[0], _is_small(steps[0], dtypes_of))
    if any(step.name not in ("fill", "keep") or step.number != LOWEST for step in steps):
        return _stepped(scale, steps, masks)
    plain = _plain(scale)
    return Unit((*plain.scores, *_statements(steps, masks)), plain.factor, plain.late)


def _plain(scale: float) -> Unit:
    number = spelling.scalar
    if 1 / TAME <= scale <= TAME:
        return Unit(factor=number(scale * LOG2E))
    if abs(scale) <= MOST < abs(scale * LOG2E):
        return Unit((f"s = libdevice.mul_rn(s * {number(scale)}, {number(LOG2E)})",))
    return Unit((f"s = libdevice.mul_rn(s, {number(scale * LOG2E)})",))


def _added(scale: float, added: str, small: bool) -> Unit:
    """With one mask; `small`: it is no larger than float16's."""
    number = spelling.scalar
    if small and abs(scale) <= TAME:
        return Unit((f"s = s * {number(scale * LOG2E)} + {added} * {LOG2E!r}",))
    return Unit((f"s = s * {number(scale)} + {added}",), repr(LOG2E), late=True)


def _is_small(step: Step, dtypes_of: Sequence[DType]) -> bool:
    if step.band is not None:
        return abs(step.band.low) <= TAME
    return step.mask is not None and dtypes_of[step.mask] is dtypes.float16


def _stepped(scale: float, steps: Sequence[Step], masks: Sequence[str]) -> Unit:
    """Scores in the model's own unit. A last scale is part of the exponent's, where scores that it has or has not
    multiplied are finite alike.
    """
    factor, late = LOG2E, True
    *before, last = steps
    bounded = bool(before) and before[-1].name == "tanh"
    if last.name == "scale" and last.number is not None and 1 / TAME <= last.number <= (TAME if bounded else 1):
        steps, factor, late = before, last.number * LOG2E, not bounded
    joined = bool(steps) and steps[0].name in ("add", "sub")
    number = spelling.scalar(scale)
    lines = (f"s = s * {number}" if joined else f"s = libdevice.mul_rn(s, {number})", *_statements(steps, masks))
    return Unit(lines, repr(factor), late)


def _statements(steps: Sequence[Step], masks: Sequence[str]) -> list[str]:
    """Statements that do steps to `s`."""
    names = iter(masks)
    lines = []
    for step in steps:
        number = "" if step.number is None else spelling.scalar(step.number)
        lines.append(f"s = {STEPS[step.name].format(number=number, mask=next(names) if step.is_masked else '')}")
    return lines
