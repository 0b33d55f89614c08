"""What a traced function asks of its dynamic sizes while it is traced, and what the sizes of the call at hand answer.

A trace whose decisions are noted is right for all calls that would decide alike: :func:`hold` says whether one would.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from onnxc.ir.expr import Dim, Expr, evaluate, is_nonnegative, never_equal, symbols

VALUE, IS_ZERO, IS_NEGATIVE = "", "== 0", "< 0"  # what may be asked of a size


@dataclass(frozen=True)
class Decision:
    """One question about a size.

    Attributes:
        asked: for its value, or whether it is 0, or negative.
        of: the size, or the difference of two.
        answer: of the call that was traced.
        line: where the user's code asked.
    """

    asked: str
    of: Expr
    answer: int
    line: str

    def told(self, names: Mapping[str, str]) -> tuple[str, str]:
        """The question and its answer for a reader, with these names of the symbols."""
        of = re.sub(r"\bs\d+\b", lambda m: names.get(m[0], m[0]), repr(self.of))
        return f"{of} {self.asked} ({self.line})".replace("  ", " "), str(self.answer)


@dataclass
class Decisions:
    """The decisions of a trace, each once.

    Attributes:
        sizes: what the symbols are in the call that is traced; those that are missing, only a run tells.
        made: the decisions so far, in their order.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    made: dict[tuple[str, Expr], Decision] = field(default_factory=dict)

    def ask(self, asked: str, of: Dim, line: str) -> int:
        """The answer, which is noted where it depends on the sizes. KeyError: no call tells them."""
        known = _certain(asked, of)
        if known is not None:
            return known
        assert isinstance(of, Expr)
        found = self.made.get((asked, of))
        if found is None:
            found = self.made[asked, of] = Decision(asked, of, answer(asked, evaluate(of, self.sizes)), line)
        return found.answer


def hold(made: Iterable[Decision], sizes: Mapping[str, int]) -> bool:
    """Whether other sizes answer all questions alike."""
    try:
        return all(answer(d.asked, evaluate(d.of, sizes)) == d.answer for d in made)
    except ZeroDivisionError:  # of a size that there is not
        return False


def sizes_of(dims: Iterable[Dim], given: Iterable[int]) -> Iterator[tuple[str, int]]:
    """The symbols among dims, and the sizes that they stand for."""
    return ((s.key, n) for d, n in zip(dims, given, strict=True) for s in symbols(d))


def _certain(asked: str, of: Dim) -> int | None:
    """The answer that holds for all sizes; None where they decide."""
    if isinstance(of, int):
        return answer(asked, of)
    if asked == IS_ZERO and never_equal(of, 0):
        return False
    if asked == IS_NEGATIVE and is_nonnegative(of):
        return False
    return True if asked == IS_NEGATIVE and is_nonnegative(-of - 1) else None


def answer(asked: str, value: int) -> int:
    """What a number answers."""
    return value if asked == VALUE else (value == 0 if asked == IS_ZERO else value < 0)
