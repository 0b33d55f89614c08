"""Loop nests: outer (parallel) loops around phases, each a loop over the same or other inner variables.

All addresses are physical here: a `Load` carries one index expression, the element's position in its storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from onnxc.ir.expr import Dim, Symbol
from onnxc.ir.graph import Value
from onnxc.loops.terms import Load, Lookup, Reduction, Term, deep_walk

Loop = tuple[Symbol, Dim]


@dataclass(frozen=True)
class Store:
    """term goes to the element at `address` of the storage of `value`."""

    value: Value
    address: Dim
    term: Term
    ahead: int = 0  # so many bytes behind it, a line is fetched for writing; 0: none is


@dataclass
class Phase:
    """Loops over `loops`; reductions complete when the phase ends. A phase without loops runs once per
    outer point.
    """

    loops: list[Loop]
    reductions: list[Reduction] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    fetched: list[Store] = field(default_factory=list)  # of later phases: this one fetches their lines for writing


@dataclass
class Nest:
    """One section, lowered."""

    outer: list[Loop]
    phases: list[Phase]
    lookups: dict[Symbol, Lookup]
    exact: bool = False  # what it computes has the same bits in every plan

    @property
    def is_plain(self) -> bool:
        """Whether its phases are loops around stores, and nothing else."""
        return not self.outer and not self.reductions()

    def reductions(self) -> list[Reduction]:
        """Those of all phases, in order."""
        return [r for p in self.phases for r in p.reductions]

    def stores(self) -> list[Store]:
        """Those of all phases, in order."""
        return [s for p in self.phases for s in p.stores]


def roots(phase: Phase) -> list[Term]:
    """The terms that a phase evaluates."""
    return [r.body for r in phase.reductions] + [s.term for s in phase.stores]


def phase_terms(phase: Phase, lookups: dict[Symbol, Lookup]) -> list[Term]:
    """Every term of a phase, lookups included."""
    return deep_walk(roots(phase), lookups)


def addresses(phase: Phase, lookups: dict[Symbol, Lookup]) -> list[Dim]:
    """All element positions that a phase reads and writes."""
    return [t.index[0] for t in phase_terms(phase, lookups) if isinstance(t, Load)] + [s.address for s in phase.stores]


def extent_of(nest: Nest, s: Symbol) -> Dim:
    """The turns of a loop of a nest."""
    for loops in (nest.outer, *(p.loops for p in nest.phases)):
        for symbol, d in loops:
            if symbol == s:
                return d
    raise KeyError(s)


def apart(nest: Nest) -> list[Nest]:
    """A nest by the loops of its phases, where nothing holds these together: the vectors of each run along a loop of
    its own.
    """
    if not nest.is_plain:
        return [nest]
    found: dict[frozenset[Symbol], list[Phase]] = {}
    for phase in nest.phases:
        found.setdefault(frozenset(s for s, _ in phase.loops), []).append(phase)
    return [replace(nest, phases=phases, lookups=dict(nest.lookups)) for phases in found.values()]
