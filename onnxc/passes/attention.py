"""Recognises attention as it is computed: matmul, what becomes of scores, softmax, (guards,) matmul."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Graph, Node, Origin, Value, merge_origins
from onnxc.ir.types import same_shape
from onnxc.passes.attention_scores import Scores, Step, Uses, behind_leads, cast_of, made_by, scalar, scores_of
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.attention import PRODUCTS
from onnxc.primitives.attention_gradient import FAR
from onnxc.primitives.builder import Builder


def _behind_reshape(v: Value) -> Value:
    """What is reshaped, and copied as a hint of derivative rules."""
    while v.node is not None and (v.node.op == "reshape" or (v.node.op == "copy" and "stop" in v.node.attrs)):
        v = v.node.operands[0]
    return v


def _is_of_rows(v: Value, op: str, x: Value) -> bool:
    """Whether v is a reduction of x over its last axis, and has that axis with a size of 1: each row meets its own."""
    made = made_by(_behind_reshape(v), op)
    if made is None or made.operands[0] is not x or made.attrs["axes"] != (x.rank - 1,):
        return False
    return v.shape == (*x.shape[:-1], 1)


def _softmax_input(p: Value) -> Value | None:
    """x where p is softmax(x) over the last axis, as max, sub, exp, sum, div."""
    div = made_by(p, "div")
    if div is None:
        return None
    exp = made_by(div.operands[0], "exp")
    sub = made_by(exp.operands[0], "sub") if exp is not None else None
    if exp is None or sub is None:
        return None
    x, top = sub.operands
    single = x.shape[-1:] == (1,) and top.shape == x.shape and _behind_reshape(top) is _behind_reshape(x)
    if not (single or _is_of_rows(top, "reduce_max", x)):
        return None
    return x if _is_of_rows(div.operands[1], "reduce_sum", exp.output) else None


@dataclass
class _Found:
    """softmax(scores) @ v, or what is 0 instead: with `guard`, probabilities that are NaN; `rows`, whole rows where a
    condition [..., Q, 1] holds (or does not hold, with True beside it).

    Probabilities may have other leading axes than scores, of as many elements in the same order.
    """

    scores: Scores
    v: Value
    guard: bool
    rows: list[tuple[Value, bool]]
    lead: tuple[Dim, ...]  # of v and the result
    origin: Origin


@dataclass
class _Guarded:
    """Probabilities behind what replaces them by 0: `where(isnan(p), 0, p)`, `where(rows, 0, p)`; and behind a cast to
    halves, which kernels multiply in any case.
    """

    p: Value
    uses: Uses
    nan: bool = False
    rows: list[tuple[Value, bool]] = field(default_factory=list)

    def step(self) -> bool:
        """One further node; False where there is none to pass."""
        where = made_by(self.p, "where")
        if where is None:
            if (wide := cast_of(self.p, narrow=True)) is not None and self.uses.only(wide):
                self.p = wide
                return True
            inner = behind_leads(self.p)
            if inner is self.p or self.rows or not self.uses.only(inner):
                return False
            self.p = inner
            return True
        test, *both = where.operands
        isnan = made_by(test, "isnan")
        for (zero, inner), kept in ((both, False), (both[::-1], True)):
            if scalar(zero) != 0.0 or inner.shape != self.p.shape:
                continue
            if isnan is not None and isnan.operands[0] is inner and not kept and self.uses.only(inner, 2):
                self.p, self.nan = inner, True
                return True
            if test.rank and test.shape[-1] == 1 and self.uses.only(inner):
                self.p = inner
                self.rows.append((test, kept))
                return True
        return False


FLOAT32 = frozenset({dtypes.float32})


def fuse_attention(
    graph: Graph,
    of: frozenset[DType] = FLOAT32,
    deepest: int | None = None,
    learnt: Container[int] = frozenset(),
    stepped: bool = True,
) -> Graph:
    """Replaces attention by one `attention` node (q, kt, v, masks) wherever nothing else reads the probabilities.

    `of` are the dtypes that the target has a kernel for, `deepest` the depth of the deepest heads that it takes; None
    is no limit; `learnt` are ids of values that a mask must not be. `stepped`: kernels take any `score_steps`; else one
    mask that is added, or a condition where scores are replaced, as `masked_fill` does.
    """
    uses = Uses(graph)
    r = Rewriter(graph)
    for node in graph.nodes:
        found = _match(node, uses) if node.op == "matmul" and node.output.dtype in of else None
        if found is None or not _takes(found, stepped, deepest, learnt):
            r.keep(node)
            continue
        b = Builder()
        with b.from_origin(found.origin):
            out = _fused(b, r, found, node, stepped)
        r.nodes += b.nodes
        r.replace(node.output, out)
    return r.result()


def _takes(found: _Found, stepped: bool, deepest: int | None, learnt: Container[int]) -> bool:
    """Whether the target has a kernel."""
    scores = found.scores
    if not (scores.rises if stepped else _is_simple(scores)):
        return False
    fits = _fits(scores.q, deepest) and _fits(found.v, deepest)
    return fits and not any(mask.id in learnt for mask in scores.masks)


def _is_simple(scores: Scores) -> bool:
    """Whether kernels of derivatives know what becomes of scores. Masks, which they bound (`FAR`), lie beyond them."""
    filled = len(scores.steps) == 1 and scores.steps[0].name in ("fill", "keep")
    near = not scores.masks or 2 * PRODUCTS * abs(scores.scale) <= FAR
    return near and (filled or all(step.name == "add" for step in scores.steps))


def _fits(v: Value, deepest: int | None) -> bool:
    depth = v.shape[-1]
    return deepest is None or (isinstance(depth, int) and depth <= deepest)


def _fused(b: Builder, r: Rewriter, found: _Found, node: Node, stepped: bool) -> Value:
    """The attention node, and what makes its result that of the matmul."""
    scores = found.scores
    q, kt, v = (_now(r, x) for x in (scores.q, scores.kt, found.v))
    if scores.turned is not None and scores.kt.node is not None:
        kt = b.transpose(_now(r, scores.turned), scores.kt.node.attrs["perm"])
    for rows in scores.factors:
        q = b.mul(q, _now(r, rows))
    if not same_shape(q.shape[:-2], scores.lead):
        q, kt = (b.reshape(x, (*scores.lead, *x.shape[-2:])) for x in (q, kt))
    if not same_shape(found.lead, scores.lead):
        v = b.reshape(v, (*scores.lead, *v.shape[-2:]))
    masks, attrs = _spelled(b, r, scores, stepped)
    y = b.one("attention", q, kt, v, *masks, scale=scores.scale, guard=found.guard, **attrs)
    for test, kept in found.rows:
        rows = _now(r, test)
        y = b.where(rows, y, 0.0) if kept else b.where(rows, 0.0, y)
    return b.reshape(y, node.output.shape)


def _now(r: Rewriter, v: Value) -> Value:
    new = r.value(v)
    assert new is not None
    return new


def _spelled(b: Builder, r: Rewriter, scores: Scores, stepped: bool) -> tuple[list[Value], dict[str, Any]]:
    """The masks of an attention node, and the attributes that say what they do."""
    steps = scores.steps
    masks = [_mask(b, r, step) for step in steps if step.mask is not None]
    names = tuple(step.name for step in steps)
    if len(names) == 1 and names[0] == "fill":
        return masks, {"fill": steps[0].number}
    if len(names) == 1 and names[0] == "keep" and not stepped:
        return [b.not_(masks[0])], {"fill": steps[0].number}
    if len(names) > 1 and not stepped:
        return [reduce(b.add, masks)], {}
    if names in ((), ("add",)):
        return masks, {}
    return masks, {"steps": names, "numbers": tuple(step.number for step in steps if step.number is not None)}


def _mask(b: Builder, r: Rewriter, step: Step) -> Value:
    assert step.mask is not None
    mask = _now(r, step.mask)
    return mask if step.lead is None else b.reshape(mask, (*step.lead, *mask.shape[-2:]))


def _match(node: Node, uses: Uses) -> _Found | None:
    p, v = node.operands
    lead = node.output.shape[:-2]
    if node.output.rank < 3 or not uses.only(p) or v.rank != node.output.rank:
        return None
    found = _Guarded(p, uses)
    while found.step():
        pass
    x = _softmax_input(found.p)
    if x is None or not uses.only(x, 2):
        return None
    scores = scores_of(x, uses)
    if scores is None or scores.q.dtype is not v.dtype or not _leads_fit(scores, p, v, lead):
        return None
    stop = (scores.q, scores.turned or scores.kt, v, *scores.masks, *scores.factors, *(test for test, _ in found.rows))
    between = _between(node, {x.id for x in stop})
    if any(v.id in uses.outputs for n in between if n is not node for v in n.outputs):
        return None  # it is asked for, or its derivative stops there
    return _Found(scores, v, found.nan, found.rows, lead, merge_origins(n.origin for n in between))


def _leads_fit(scores: Scores, p: Value, v: Value, lead: tuple[Dim, ...]) -> bool:
    """Whether heads of queries are those of the result; heads of keys and values may repeat, or be reshaped alike."""
    q, k = scores.q.shape[:-2], scores.kt.shape[:-2]
    if p.shape[:-2] != lead or len(k) != len(q):
        return False
    split = same_shape(q, scores.lead) or same_shape(q, k)
    return split and (same_shape(scores.lead, lead) or same_shape(v.shape[:-2], lead))


def _between(node: Node, stop: set[int]) -> list[Node]:
    """The nodes from the operands to the result."""
    found: dict[int, Node] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if id(n) in found:
            continue
        found[id(n)] = n
        stack.extend(v.node for v in n.operands if v.node is not None and v.id not in stop and v.node.op != "constant")
    return list(found.values())
