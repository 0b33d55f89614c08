"""What a kernel of attention has to do with its scores: their steps, but for what is known without reading a mask.

Steps keep their order. A mask that is a band (`attention_mask.py`) is found from indices. Where what it does to keys
outside is as if there were none, they are left out, whole blocks of them at a time: then it is no step any more. That
depends on the other steps:

    -inf    stays what it is where a number is added, or in a product with a positive one; a tanh, a bound or a
            condition that replaces it makes a number of it
    finite  is as good, in rows that see a key whose score is not as low: which no other mask may have made so, nor a
            scale of what products are taken to be (`PRODUCTS`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxc.codegen.triton.attention_mask import Band, Mask, mask_of
from onnxc.ir.expr import Dim, maximum, minimum
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.attention import PRODUCTS, score_steps

KNOWN = "known"  # the attribute of a node whose masks that are known are no operands any more: its steps
LOWEST = -math.inf


@dataclass(frozen=True)
class Step:
    """One of `score_steps`.

    Attributes:
        mask: which of the node's masks it reads; None for none.
        band: what is found from indices instead: `fill` is then outside of it, and `add` is of its `low` there.
        alike: whether all rows of the mask are equal.
    """

    name: str
    number: float | None = None
    mask: int | None = None
    band: Band | None = None
    alike: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether it differs from key to key."""
        return self.mask is not None or self.band is not None


@dataclass(frozen=True)
class ScoreSteps:
    """What a kernel computes of scores.

    Attributes:
        steps: in order.
        band: keys outside of it are left out.
    """

    steps: tuple[Step, ...]
    band: Band | None = None

    @property
    def by_position(self) -> bool:
        """Whether anything depends on where keys are."""
        return self.band is not None or any(step.band is not None for step in self.steps)


def steps_of(node: Node, queries: Dim, keys: Dim) -> ScoreSteps:
    """What a kernel of an attention node computes of its scores [..., queries, keys]."""
    steps = _known_steps(node, queries, keys)
    band: Band | None = None
    rest: list[Step] = []
    for k, step in enumerate(steps):
        own = _leaves_out(node, steps, k, queries, keys)
        if own is None:
            rest.append(step)
        else:
            band = own if band is None else _both(band, own)
    return ScoreSteps(tuple(rest), band)


def without_masks(graph: Graph) -> Graph:
    """The graph with attention nodes that know what their masks are: those that a kernel need not read are no operands
    any more (`KNOWN` tells their steps), and nobody computes them.
    """
    r = Rewriter(graph)
    for node in graph.nodes:
        if node.op != "attention":
            r.keep(node)
            continue
        q, kt, v, *masks = node.operands
        steps = _known_steps(node, q.shape[-2], kt.shape[-1])
        read = [step.mask for step in steps if step.mask is not None]
        if len(read) == len(masks):
            r.keep(node)
            continue
        places = {mask: at for at, mask in enumerate(read)}
        steps = tuple(s if s.mask is None else replace(s, mask=places[s.mask]) for s in steps)
        attrs = {k: x for k, x in node.attrs.items() if k not in ("fill", "steps", "numbers")} | {KNOWN: steps}
        out = Value(node.output.type, node.output.name, node.output.data)
        inputs = [r.value(x) for x in (q, kt, v, *(masks[k] for k in read))]
        r.nodes.append(Node("attention", inputs, [out], attrs, (), node.origin))
        r.replace(node.output, out)
    return r.result()


def _known_steps(node: Node, queries: Dim, keys: Dim) -> tuple[Step, ...]:
    """The steps of an attention node, without those that do nothing."""
    if KNOWN in node.attrs:
        known: tuple[Step, ...] = node.attrs[KNOWN]
        return known
    masks = node.operands[3:]
    found: list[Step] = []
    for name, at, number in score_steps(node.attrs, range(len(masks))):
        if at is None:
            found.append(Step(name, number))
            continue
        mask = mask_of(masks[at], queries, keys, number, name == "keep")
        if not mask.nothing:
            found.append(_masked(name, number, at, mask))
    return tuple(found)


def _masked(name: str, number: float | None, at: int, mask: Mask) -> Step:
    if mask.band is None:
        return Step(name, number, at, alike=mask.alike)
    if name == "sub":
        return Step("add", band=replace(mask.band, low=-mask.band.low))
    return Step("add" if name == "add" else "fill", number, band=mask.band)


def _leaves_out(node: Node, steps: Sequence[Step], at: int, queries: Dim, keys: Dim) -> Band | None:
    """The band of a step outside of which keys can be left out, if so."""
    band = steps[at].band
    if band is None:
        return None
    low: float | None = band.low
    if low != LOWEST and any(step.is_masked for k, step in enumerate(steps) if k != at):
        return None
    for step in steps[at + 1 :]:
        low = _after(step, low) if low is not None else None
    if low is None:
        return None
    band = replace(band, low=low)
    most = _most(float(node.attrs.get("scale", 1.0)), steps)
    return band if band.hides(queries, keys, node.output.dtype, most) else None


def _most(scale: float, steps: Sequence[Step]) -> float:
    """How large scores are taken to be after steps, but for those with masks."""
    most = PRODUCTS * abs(scale)
    for step in steps:
        if step.name == "tanh":
            most = min(most, 1.0)
        elif step.number is not None and not step.is_masked:
            most = most * abs(step.number) if step.name == "scale" else max(most, step.number)
    return most


def _after(step: Step, low: float) -> float | None:
    """What a step makes of so low a score; None where that is low no more. Of a mask that is added, nothing is +inf."""
    if step.name == "scale":
        number = np.float32(step.number)
        with np.errstate(over="ignore"):
            return float(np.float32(low) * number) if number > 0 else None
    stays = step.name == "add" or (step.name != "tanh" and step.number == LOWEST)
    return low if stays and (low == LOWEST or step.name == "max") else None


def _both(a: Band, b: Band) -> Band:
    """The keys of two bands."""

    def one(x: Dim | None, y: Dim | None, of: Any) -> Dim | None:
        found: Dim | None = x if y is None else y if x is None else of(x, y)
        return found

    return Band(one(a.lower, b.lower, maximum), one(a.upper, b.upper, minimum))
