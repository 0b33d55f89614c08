"""A choice between ways to compute a kernel: code generators make it, reports show it, the tuner measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COST_MODEL = "cost model"


@dataclass(frozen=True)
class Choice:
    """One decision: what for (a readable text that says all that its speed depends on), what, among what, and why; and
    which of them runs `instead` where what was chosen is a library's, and the library is not there.
    """

    subject: str
    chosen: str
    candidates: tuple[str, ...]
    why: str = ""
    instead: str = ""


@dataclass(frozen=True)
class Decisions:
    """What was measured for one architecture.

    Attributes:
        best: the name of the fastest candidate, by subject.
        ranked: the names of all that were measured, the fastest first, by subject.
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
    ranked: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def deciding(self, subject: str) -> list[str]:
        """What decides about a subject: names, the first that is allowed before the others."""
        best = self.best.get(subject)
        return [*([best] if best is not None else []), *self.ranked.get(subject, ())]

    def choose(self, subject: str, names: Sequence[str], library: Sequence[str] = ()) -> Choice:
        """One of the names, and why: the fastest; the first where nothing was measured. Those of a `library` need
        measurements, and another one that runs instead.
        """
        allowed = [n for n in names if (subject, n) not in self.refused]
        own = [n for n in allowed if n not in library] or [names[0]]
        known = self.deciding(subject)
        best, found = self.best.get(subject), next((n for n in known if n in allowed), None)
        instead = next((n for n in known if n in own), own[0]) if found in library else ""
        if found is not None:
            lost = "does not compile" if best in names else "is no candidate here"
            why = f"measured on {self.where}{'' if found == best else f', of the others: the best {lost}'}"
            return Choice(subject, found, tuple(names), why, instead)
        if own[0] != names[0]:
            reason = f"{names[0]} does not compile"
        elif best is None:
            reason = self.missing
        elif best in names:
            reason = f"{best}, which was measured, does not compile"
        else:
            reason = "what was measured is no candidate any more"
        return Choice(subject, own[0], tuple(names), f"{COST_MODEL}: {reason}" if reason else COST_MODEL)
