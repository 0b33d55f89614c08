"""Terms that several phases of a loop nest need: computed by the first, and kept in a buffer for the others."""

from __future__ import annotations

from onnxc.codegen.cpp.tables import costs
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.ir.expr import prod
from onnxc.loops.nest import Nest, Phase, phase_terms
from onnxc.loops.terms import Const, Load, Reduced, Term, children

CACHE_BYTES = 1 << 15
MOST_CACHES = 4
LEAST_WEIGHT = 6  # of a term: cheaper ones are computed again


class PhaseCaches:
    """Which terms are kept.

    Attributes:
        kept: by term, the name of its buffer and the phase that computes it.
        lines: declarations of the buffers.
    """

    def __init__(self, emitter: TermEmitter, lanes: int) -> None:
        self.kept: dict[Term, tuple[str, Phase]] = {}
        self.lines: list[str] = []
        self._emitter, self._lanes = emitter, lanes

    def plan(self, nest: Nest) -> None:
        """Terms that two phases over the same loops need, and that cost more than a load, are kept in
        between.
        """
        phases = [p for p in nest.phases if p.loops]
        for k, first in enumerate(phases[:-1]):
            extent = prod(d for _, d in first.loops)
            later = [p for p in phases[k + 1 :] if p.loops == first.loops]
            if not later or not isinstance(extent, int) or extent * 4 > CACHE_BYTES:
                continue
            here, seen = set(phase_terms(first, nest.lookups)), set[Term]()
            for p in later:
                for root in [r.body for r in p.reductions] + [s.term for s in p.stores]:
                    self._share(root, here, seen, first, extent)

    def computed_by(self, phase: Phase) -> list[tuple[Term, str]]:
        """What this phase computes and keeps, with the names of the buffers."""
        return [(term, name) for term, (name, first) in self.kept.items() if first is phase]

    def _share(self, term: Term, here: set[Term], seen: set[Term], phase: Phase, extent: int) -> None:
        if term in self.kept or term in seen:
            return
        seen.add(term)
        if term in here and self._worth(term, phase) and len(self.kept) < MOST_CACHES:
            name = f"c{len(self.kept)}"
            self.kept[term] = (name, phase)
            self.lines.append(f"alignas(64) f32 {name}[{-(-extent // self._lanes) * self._lanes}];")
            return
        for c in children(term):
            self._share(c, here, seen, phase, extent)

    def _worth(self, term: Term, phase: Phase) -> bool:
        if isinstance(term, (Const, Load, Reduced)) or term.dtype.name != "float32" or not costs(term, LEAST_WEIGHT):
            return False
        return all(s in self._emitter.deps(term) for s, _ in phase.loops)
