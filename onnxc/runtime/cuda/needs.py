"""Which steps of a program need which: what lets others run side by side in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxc.runtime.cuda.program import Span, Step


def needs(steps: Sequence[Step]) -> list[list[int]]:
    """For each step the steps ahead of it that must have ended, without those that others of these need anyway.

    A step needs those that wrote what it touches, and those that read what it writes: bytes of the arena belong to one
    buffer after the other.
    """
    touched: dict[int, list[tuple[int, int, int, bool]]] = {}  # by base: start, end, step, whether written
    before: list[int] = []  # of each step all that it needs, as bits
    found: list[list[int]] = []
    for k, step in enumerate(steps):
        wanted: set[int] = set()
        for span in step.spans:
            wanted |= _met(touched.get(span.base, []), span)
        direct, known = list[int](), 0
        for j in sorted(wanted, reverse=True):
            if not known >> j & 1:
                direct.append(j)
                known |= before[j] | 1 << j
        found.append(direct)
        before.append(known)
        for span in step.spans:
            _note(touched.setdefault(span.base, []), span, k)
    return found


def _met(touched: list[tuple[int, int, int, bool]], span: Span) -> set[int]:
    """The steps that a step must wait for because of a span."""
    start, end, written = span.start, span.end, span.written
    return {k for a, b, k, w in touched if a < end and start < b and (w or written)}


def _note(touched: list[tuple[int, int, int, bool]], span: Span, step: int) -> None:
    """Adds a span, in place of those that whatever comes waits for by way of it."""
    start, end = span.start, span.end
    if span.written:
        touched[:] = [t for t in touched if t[2] == step or not (start <= t[0] and t[1] <= end)]
    touched.append((start, end, step, span.written))
