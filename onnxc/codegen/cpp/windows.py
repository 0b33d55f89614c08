"""Padded windows: their loops run over what lies inside of the image alone, where the rest changes nothing.

    for (i64 tap = 0; tap < 5; tap++) best = max(best, 0 <= y + tap - 2 < 20 ? x[y + tap - 2] : -inf)

becomes

    for (i64 tap = max(0, 2 - y); tap < min(5, 22 - y); tap++) best = max(best, x[y + tap - 2])

Where lanes differ in what lies inside, most vectors have no such lane: for them the loops run without conditions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, ceildiv, coefficient, floordiv, of, symbols
from onnxc.loops.nest import Phase
from onnxc.loops.terms import Const, Guard, Reduction

NEUTRAL = {"sum": 0, "prod": 1}
Bounds = dict[Symbol, tuple[list[Dim], list[Dim]]]  # of a loop: where it may begin, and where it must end


def inside(reductions: list[Reduction], phase: Phase, emitter: TermEmitter) -> tuple[list[Reduction], Bounds]:
    """The reductions of a phase with the conditions that bounds of its loops can stand for taken out, and the bounds."""
    guards = [r.body for r in reductions if isinstance(r.body, Guard)]
    bounds: Bounds = {}
    if not reductions or len(guards) != len(reductions) or not all(map(changes_nothing, reductions)):
        return reductions, bounds
    shared = [c for c in guards[0].conditions if all(c in g.conditions for g in guards)]
    taken = {c for c in shared if _bound(c, phase, emitter, bounds)}
    out = []
    for r, guard in zip(reductions, guards, strict=True):
        left = tuple(c for c in guard.conditions if c not in taken)
        out.append(replace(r, body=replace(guard, conditions=left) if left else guard.inside))
    return out, bounds


def _bound(condition: Dim, phase: Phase, emitter: TermEmitter, bounds: Bounds) -> bool:
    """Whether a condition (>= 0) is a bound of one loop, the same for all lanes; adds it to the bounds."""
    found = symbols(condition)
    loops = [s for s, _ in phase.loops if s in found]
    if len(loops) != 1 or found & emitter.lookups.keys() or emitter.stride(condition) != 0:
        return False
    (loop,) = loops
    c = coefficient(condition, loop)
    if not isinstance(c, int) or c == 0:
        return False
    rest = condition - of(loop) * c
    least, most = bounds.setdefault(loop, ([], []))
    if c > 0:
        least.append(ceildiv(-rest, c))
    else:
        most.append(floordiv(rest, -c) + 1)
    return True


def whole(reductions: list[Reduction], phase: Phase, emitter: TermEmitter) -> list[tuple[Dim, Dim]] | None:
    """Conditions under which all windows of a vector lie inside of the image, each at its least over the loops of the
    phase, with its step from lane to lane; None where lanes do not differ, or it cannot be told.
    """
    guards = [r.body for r in reductions if isinstance(r.body, Guard)]
    found: dict[Dim, Dim] = {}
    for condition in (c for g in guards for c in g.conditions):
        step, least = emitter.stride(condition), condition
        for s, extent in phase.loops:
            c = coefficient(least, s)
            if not isinstance(c, int):
                return None
            least = least - of(s) * c + (c * (extent - 1) if c < 0 else 0)
        if not isinstance(step, int) or symbols(condition) & emitter.lookups.keys():
            return None
        found[least] = step
    return list(found.items()) if any(step != 0 for step in found.values()) else None


def changes_nothing(r: Reduction) -> bool:
    """Whether what a reduction takes outside of its guard leaves its result as it is."""
    if not isinstance(r.body, Guard) or not isinstance(r.body.outside, Const) or r.position is not None:
        return False
    fill = r.body.outside
    if r.op in NEUTRAL:
        return fill.raw == np.asarray(NEUTRAL[r.op], fill.dtype.numpy).tobytes()
    return fill.raw == _extreme(fill.dtype, r.op == "max").tobytes()


def _extreme(dtype: DType, least: bool) -> np.ndarray:
    """The least (or greatest) number of a type."""
    if dtype.is_float:
        return np.asarray(-np.inf if least else np.inf, dtype.numpy)
    if dtype.name == "bool":
        return np.asarray(not least)
    info = np.iinfo(dtype.numpy)
    return np.asarray(info.min if least else info.max, dtype.numpy)
