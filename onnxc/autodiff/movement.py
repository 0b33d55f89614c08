"""Derivatives of primitives that move elements: their transposes."""

from __future__ import annotations

from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.ir.expr import Dim, always_equal
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder


@rule("reshape")
def reshape(s: Step) -> Gradients:
    return [s.b.reshape(s.dy, s.x.shape)]


@rule("transpose")
def transpose(s: Step) -> Gradients:
    perm = s.node.attrs["perm"]
    return [s.b.transpose(s.dy, [perm.index(k) for k in range(len(perm))])]


@rule("expand")
def expand(s: Step) -> Gradients:
    return [s.b.reshape(summed_to(s.b, s.dy, s.x.shape), s.x.shape)]  # a size that turns out to be 1 may have become 1


@rule("slice")
def slice_(s: Step) -> Gradients:
    """The elements back in their places, zeros between and around them."""
    b, dy = s.b, s.dy
    rows = list(zip(s.x.shape, *(s.node.attrs[k] for k in ("starts", "sizes", "steps")), strict=True))
    backward = [i for i, (_, _, _, step) in enumerate(rows) if step < 0]
    dy = b.flip(dy, backward)
    low: list[Dim] = []
    high: list[Dim] = []
    gaps = []
    for size, start, count, step in rows:
        first = start if step > 0 else start + (count - 1) * step
        if isinstance(count, int) and count == 0:
            first = 0
        low.append(first)
        high.append(size - first - _span(count, abs(step)))
        gaps.append(abs(step) - 1)
    return [b.pad(dy, low, high, 0.0, gaps)]


def _span(count: Dim, step: int) -> Dim:
    """Positions from the first of `count` elements to the last, both counted."""
    return count if step == 1 or count == 0 else (count - 1) * step + 1


@rule("pad")
def pad(s: Step) -> Gradients:
    """What was inside; the value that surrounds it has the rest."""
    b, node = s.b, s.node
    low, gaps = node.attrs["low"], node.attrs["interior"]
    inside = b.one("slice", s.dy, starts=tuple(low), sizes=tuple(s.x.shape), steps=tuple(g + 1 for g in gaps))
    if not s.needed[1]:
        return inside, None
    axes = range(s.dy.rank)
    return inside, b.sub(b.reduce("sum", s.dy, axes), b.reduce("sum", inside, axes))


@rule("concat")
def concat(s: Step) -> Gradients:
    axis = s.node.attrs["axis"]
    return s.b.split(s.dy, axis, [x.shape[axis] for x in s.operands])


def summed_to(b: Builder, dy: Value, shape: tuple[Dim, ...]) -> Value:
    """The cotangent of an operand of this shape that was broadcast to the shape of `dy`."""
    lead = dy.rank - len(shape)
    axes = [*range(lead)]
    axes += [lead + k for k, d in enumerate(shape) if always_equal(d, 1) and not always_equal(dy.shape[lead + k], 1)]
    return b.reshape(b.reduce("sum", dy, axes), shape) if axes else dy
