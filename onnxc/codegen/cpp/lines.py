"""Windows in two steps by way of a line: down the columns, then along the row.

A window of 3 by 3 whose vectors run along a row takes nine elements for each of its results, most of them at places
where a vector begins in the middle of a line of the cache, or steps over elements, or leaves the image. So for each
row of results, columns come first, into a line on the stack whose ends hold what changes nothing:

    for (i64 x = 0; x < 56; x += VL) line[1 + x] = max(image[y - 1][x], image[y][x], image[y + 1][x]);
    for (i64 x = 0; x < 56; x += VL) out[y][x] = max(line[x], line[x + 1], line[x + 2]);
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxc.codegen.cpp.windows import changes_nothing
from onnxc.ir.expr import Dim, Symbol, always_equal, coefficient, of, symbols
from onnxc.loops.access import fresh
from onnxc.loops.nest import Loop, Nest, Phase, extent_of, phase_terms
from onnxc.loops.rewriting import rewrite
from onnxc.loops.terms import Guard, Load, Position, index_symbols
from onnxc.planner.split import LONGEST_ROW, MOST_STRIDE, MOST_TAPS

LONGEST = 2 * LONGEST_ROW  # elements of a line


@dataclass(frozen=True)
class Lines:
    """How the windows of a nest go through lines: a result takes the places stride * result + dilation * tap, of which
    those from `first` on hold columns of the image.
    """

    taps: int
    stride: int
    dilation: int
    first: int
    end: int  # the last place that a window takes
    column: Loop
    phase: Phase  # the reductions down a column


def lines_of_windows(nest: Nest, vector: Symbol, lanes: int) -> Lines | None:
    """The way through lines for windows whose vectors run along `vector`, an outer loop; None where it is no gain."""
    windows, *rest = nest.phases
    if any(p.reductions or p.loops for p in rest) or len(windows.loops) < 2 or windows.stores:
        return None
    if any(r.op not in ("sum", "max", "min") or r.position is not None for r in windows.reductions):
        return None
    if any(index_symbols(t) & nest.lookups.keys() for t in phase_terms(windows, nest.lookups)):
        return None
    found = [p for s, _ in windows.loops if (p := _along(nest, windows, vector, s)) is not None]
    return found[0] if len(found) == 1 and _is_gain(found[0], nest, vector, lanes) else None


def _along(nest: Nest, windows: Phase, vector: Symbol, tap: Symbol) -> Lines | None:
    """The lines if `tap` is the loop along the row."""
    expressions = [e for t in phase_terms(windows, {}) for e in _indices(t)]
    moving = [e for e in expressions if {vector, tap} & symbols(e)]
    steps = {_steps(e, vector, tap) for e in moving}
    results, taps = extent_of(nest, vector), dict(windows.loops)[tap]
    if len(steps) != 1 or None in steps or not isinstance(results, int) or not isinstance(taps, int):
        return None
    ((stride, dilation),) = (p for p in steps if p is not None)
    end = (results - 1) * stride + (taps - 1) * dilation  # the last place of the line
    bounds = _bounds(windows, vector, tap, (stride, dilation))
    if bounds is None or min(stride, dilation) != 1:
        return None
    first, last = max(0, *bounds[0], 0), min(end, *bounds[1], end)
    if last < first or end >= LONGEST or taps > MOST_TAPS:
        return None
    x = fresh("i", last - first + 1)
    (column,) = symbols(x)
    values: dict[Symbol, Dim] = {vector: 0, tap: x + first} if dilation == 1 else {vector: x + first, tap: 0}
    reductions = [replace(r, body=rewrite(r.body, values)) for r in windows.reductions]
    if any(column in symbols(c) for r in reductions if isinstance(r.body, Guard) for c in r.body.conditions):
        return None
    others = [(s, d) for s, d in windows.loops if s != tap]
    return Lines(taps, stride, dilation, first, end, (column, last - first + 1), Phase(others, reductions))


def _steps(e: Dim, vector: Symbol, tap: Symbol) -> tuple[int, int] | None:
    """Stride and dilation of an index that moves with results and taps: places of the line for a step of either."""
    a, b = coefficient(e, vector), coefficient(e, tap)
    if not isinstance(a, int) or not isinstance(b, int) or a * b <= 0:
        return None
    return abs(a) // math.gcd(a, b), abs(b) // math.gcd(a, b)


def _indices(term: object) -> tuple[Dim, ...]:
    if isinstance(term, Load):
        return term.index
    if isinstance(term, Guard):
        return term.conditions
    return (term.expr,) if isinstance(term, Position) else ()


def _bounds(windows: Phase, vector: Symbol, tap: Symbol, steps: tuple[int, int]) -> tuple[list[int], list[int]] | None:
    """The first and the last places of a line that lie inside of the image, by each of the conditions on them; None
    where conditions are none for the ends of a line.
    """
    guards = [t for t in phase_terms(windows, {}) if isinstance(t, Guard)]
    along = [[c for c in g.conditions if {vector, tap} & symbols(c)] for g in guards]
    if not any(along):
        return [], []
    every = all(map(changes_nothing, windows.reductions)) and len(guards) == len({r.body for r in windows.reductions})
    if not every or any(c != along[0] for c in along):
        return None
    first, last = list[int](), list[int]()
    for c in along[0]:
        a, b = coefficient(c, vector), coefficient(c, tap)
        if not isinstance(a, int) or not isinstance(b, int) or abs(a) != steps[0]:
            return None
        rest = c - of(vector) * a - of(tap) * b
        if not isinstance(rest, int):
            return None
        if a > 0:
            first.append(-rest)
        else:
            last.append(rest)
    return first, last


def _is_gain(lines: Lines, nest: Nest, vector: Symbol, lanes: int) -> bool:
    """Whether lines take fewer loads: one with a stride counts as three."""
    results = extent_of(nest, vector)
    down = math.prod(d if isinstance(d, int) else 1 for _, d in lines.phase.loops)
    if not isinstance(results, int) or results < lanes // 2 or lines.stride > MOST_STRIDE:
        return False
    each = 3 if lines.stride > 1 else 1
    _, columns = lines.column
    guarded = 2 if lines.first or not always_equal(columns, lines.end + 1) else 1
    through = (down + 1) * columns + each * lines.taps * results
    return isinstance(through, int) and through < guarded * each * down * lines.taps * results
