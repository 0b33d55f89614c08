"""A choice between ways to compute a kernel: code generators make it, reports show it, the tuner measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COST_MODEL = "cost model"


@dataclass(frozen=True)
class Choice:
    """One decision: what for (a readable text that says all that its speed depends on), what, among what, and why."""

    subject: str
    chosen: str
    candidates: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Decisions:
    """What was measured for one architecture.

    Attributes:
        best: the name of the fastest candidate, by subject.
        where: what it was measured on, for `explain()`.
        missing: why other subjects have no measurement.
        refused: pairs of a subject and a name that did not compile, or answered wrongly.
        architecture: as 90 for sm_90; None where only what all of them run may be taken.
    """

    best: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    missing: str = ""
    refused: frozenset[tuple[str, str]] = frozenset()
    architecture: int | None = None

    def choose(self, subject: str, names: Sequence[str]) -> Choice:
        """One of the names, and why: the first where nothing was measured."""
        allowed = [n for n in names if (subject, n) not in self.refused] or [names[0]]
        found = self.best.get(subject)
        if found in allowed:
            return Choice(subject, found, tuple(names), f"measured on {self.where}")
        if allowed[0] != names[0]:
            reason = f"{names[0]} does not compile"
        elif found is None:
            reason = self.missing
        elif found in names:
            reason = f"{found}, which was measured, does not compile"
        else:
            reason = "what was measured is no candidate any more"
        return Choice(subject, allowed[0], tuple(names), f"{COST_MODEL}: {reason}" if reason else COST_MODEL)
