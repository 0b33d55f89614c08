"""What is said of a tensor: `Verdict`."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """What is said of a tensor, the mildest first.

    EQUAL: every element is the same (-0 and 0 are; NaN and NaN are).
    ROUNDING: they differ by no more than rounding explains, given the dtype and the depth, or by what was tolerated.
    THEIRS_WORSE: they differ by more, and the float64 reference is nearer to ours.
    OURS_WORSE: they differ by more, and the float64 reference is nearer to theirs.
    WRONG: no rounding explains it: integers that are not equal, NaN where the other is finite, other shapes, an error
        of the size of the values themselves.
    SKIPPED: there is nothing to compare; the note says why (the tensor is inside of a fused kernel, say).
    """

    EQUAL = "equal"
    ROUNDING = "rounding"
    THEIRS_WORSE = "theirs worse"
    OURS_WORSE = "ours worse"
    WRONG = "wrong"
    SKIPPED = "skipped"

    @property
    def fails(self) -> bool:
        """Whether ours is at fault."""
        return self in (Verdict.OURS_WORSE, Verdict.WRONG)
