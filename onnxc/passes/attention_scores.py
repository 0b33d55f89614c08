"""The scores of attention in one normal form: a product of queries and keys, scaled, and what becomes of it.

Exporters and operators write scores in many ways: masks are added or replace scores, before a scale or after it, one
after the other; scores are bounded by a tanh; heads are an axis of their own for the mask, but not for the products.
All of these are the same walk from what the softmax is taken of back to the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import same_shape
from onnxc.passes.uniform import number_of
from onnxc.primitives.builder import constant_of

DEEPEST = 16  # steps from the softmax to the product
MOST_MASKS = 6
HALF = frozenset({dtypes.float16, dtypes.bfloat16})

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class Step:
    """One of `score_steps`."""

    name: str
    mask: Value | None = None
    number: float | None = None
    lead: Shape | None = None  # the leading axes that the mask is to be given, where it has others

    @property
    def adds_nothing(self) -> bool:
        """Whether it leaves scores as they are: a mask that hides nothing."""
        number = number_of(self.mask) if self.name in ("add", "sub") else None
        return number is not None and bool(number == 0)

    def of_leads(self, before: Shape, after: Shape) -> Step | None:
        """The step for scores whose leading axes are reshaped; of those that become others, a mask must have all or
        none.
        """
        if self.mask is None or self.mask.rank <= 2:
            return self
        own = self.mask.shape[:-2] if self.lead is None else self.lead
        own = (*(1,) * (len(before) - len(own)), *own)
        pairs = list(zip(reversed(before), reversed(after), strict=False))  # an open dim may be 0: no fact of the rest
        kept = next((n for n, (d, e) in enumerate(pairs) if not (isinstance(d, int) and d == e)), len(pairs))
        rest, others = own[: len(own) - kept], after[: len(after) - kept]
        if all(always_equal(d, 1) for d in rest):
            others = (1,) * len(others)
        elif not same_shape(rest, before[: len(rest)]):
            return None
        return replace(self, lead=(*others, *own[len(rest) :]))


@dataclass(frozen=True)
class Scores:
    """What becomes of scale * (q @ kt) by `steps`, whose masks broadcast to [*lead, Q, K].

    The product may have other leading axes than `lead`, of as many elements in the same order. `turned` is k where kt
    is to be made of it: its transpose was scaled before. `factors` are those of whole rows of scores, which queries are
    to be multiplied with: temperatures of heads, say.
    """

    q: Value
    kt: Value
    lead: Shape
    scale: float = 1.0
    steps: tuple[Step, ...] = ()
    turned: Value | None = None
    factors: tuple[Value, ...] = ()

    @property
    def masks(self) -> list[Value]:
        """The masks, in the order of the steps."""
        return [s.mask for s in self.steps if s.mask is not None]

    @property
    def rises(self) -> bool:
        """Whether no score falls where its product grows, as the kernels of CPUs want it."""
        return sum(s.name == "scale" and (s.number or 0.0) < 0 for s in self.steps) % 2 == 0


def made_by(v: Value | None, op: str) -> Node | None:
    """The node of a kind that makes a value."""
    return v.node if v is not None and v.node is not None and v.node.op == op else None


def scalar(v: Value | None) -> float | None:
    """The number that a constant is."""
    array = constant_of(v)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def factor(node: Node) -> tuple[Value, float] | None:
    """x and c where a node is x * c or x / c with a constant scalar c."""
    if node.op not in ("mul", "div"):
        return None
    a, b = node.operands
    c = scalar(b)
    if c is not None and node.op == "div":
        c = 1.0 / c if abs(c) > np.finfo(np.float32).tiny else None
    if c is not None and a.shape == node.output.shape:
        return a, c
    c = scalar(a)
    return (b, c) if c is not None and node.op == "mul" and b.shape == node.output.shape else None


def without_scale(v: Value) -> tuple[Value, float]:
    """x and c where v is c * x with a constant c, which may be 1."""
    found = factor(v.node) if v.node is not None else None
    return found if found is not None else (v, 1.0)


def behind_leads(v: Value) -> Value:
    """What is reshaped, but for the last two axes."""
    while (node := made_by(v, "reshape")) is not None and v.rank > 1:
        (x,) = node.operands
        if x.rank < 2 or not same_shape(x.shape[-2:], v.shape[-2:]):
            break
        v = x
    return v


def cast_of(v: Value, narrow: bool) -> Value | None:
    """What is cast from halves to float32, or (`narrow`) back: kernels keep scores of halves in float32 anyway."""
    cast = made_by(v, "cast")
    if cast is None:
        return None
    (x,) = cast.operands
    half, wide = (v, x) if narrow else (x, v)
    return x if half.dtype in HALF and wide.dtype is dtypes.float32 else None


class Uses:
    """Who reads the values of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.readers = graph.uses()
        self.outputs = {o.id for o in graph.outputs}

    def only(self, v: Value, count: int = 1) -> bool:
        """Whether a value is read so often, and no output: else it must be in memory anyhow."""
        return v.id not in self.outputs and len(self.readers.get(v.id, ())) == count


@dataclass
class _Walk:
    """From scores back to the product."""

    uses: Uses
    seen: dict[int, Scores | None] = field(default_factory=dict)

    def scores(self, v: Value, deep: int = 0) -> Scores | None:
        if v.id not in self.seen:
            self.seen[v.id] = None  # where it is too deep
            self.seen[v.id] = self._scores(v, deep) if deep <= DEEPEST else None
        return self.seen[v.id]

    def _scores(self, v: Value, deep: int) -> Scores | None:
        node = v.node
        if node is None or node.output.rank < 2 or (deep and not self.uses.only(v)):
            return None
        if node.op == "matmul":
            return _product(node)
        if node.op == "reshape":
            return self._reshaped(v, deep)
        if (half := cast_of(v, narrow=False)) is not None:
            return self.scores(half, deep + 1)
        for x, rows in _row_factors(node):
            found = self.scores(x, deep + 1)
            if found is None or found.steps or rows.dtype is not found.q.dtype:
                continue
            if same_shape(found.q.shape[:-2], v.shape[:-2]):
                return replace(found, factors=(*found.factors, rows))
        for x, step in _steps(node):
            found = self.scores(x, deep + 1) if x.shape == v.shape else None
            if found is not None and step.adds_nothing:
                return found
            if found is not None and len(found.masks) < MOST_MASKS:
                return _then(found, step)
        return None

    def _reshaped(self, v: Value, deep: int) -> Scores | None:
        inner = behind_leads(v)
        if inner is v or 0 in v.shape:  # no scores: their leading axes may be of any sizes
            return None
        found = self.scores(inner, deep + 1)
        lead = v.shape[:-2]
        if found is None or same_shape(found.lead, lead):
            return found
        steps = [step.of_leads(found.lead, lead) for step in found.steps]
        kept = tuple(step for step in steps if step is not None)
        return replace(found, lead=lead, steps=kept) if len(kept) == len(steps) else None


def _product(matmul: Node) -> Scores:
    (q, sq), (kt, sk) = (without_scale(v) for v in matmul.operands)
    transpose = made_by(kt, "transpose")
    k, before = without_scale(transpose.operands[0]) if transpose is not None else (kt, 1.0)
    turned = k if transpose is not None and k is not transpose.operands[0] else None
    return Scores(q, kt, matmul.output.shape[:-2], sq * sk * before, (), turned)


def _row_factors(node: Node) -> list[tuple[Value, Value]]:
    """The operand that may be scores, and what is the same for all keys and multiplies them."""
    if node.op != "mul":
        return []
    a, b = node.operands
    return [
        (x, rows)
        for x, rows in ((a, b), (b, a))
        if scalar(rows) is None and x.shape == node.output.shape and (rows.rank == 0 or always_equal(rows.shape[-1], 1))
    ]


def _steps(node: Node) -> list[tuple[Value, Step]]:
    """The operands that may be scores, and what is done to them."""
    scaled = factor(node)
    if scaled is not None:
        return [(scaled[0], Step("scale", None, scaled[1]))]
    if node.op == "tanh":
        return [(node.operands[0], Step("tanh"))]
    if node.op == "add":
        a, b = node.operands
        return [(a, Step("add", b)), (b, Step("add", a))]
    if node.op == "sub":
        return [(node.operands[0], Step("sub", node.operands[1]))]
    if node.op == "max":
        a, b = node.operands
        return [(x, Step("max", None, c)) for x, y in ((a, b), (b, a)) if (c := scalar(y)) is not None]
    if node.op == "where":
        mask, a, b = node.operands
        fills = [(b, scalar(a), False), (a, scalar(b), True)]
        return [(x, Step("keep" if kept else "fill", mask, c)) for x, c, kept in fills if _is_fill(c)]
    return []


def _is_fill(c: float | None) -> bool:
    return c is not None and (bool(np.isfinite(c)) or c == -np.inf)


def _then(scores: Scores, step: Step) -> Scores:
    """Scores with one more step. Scales that follow one another are one, that of the product among them; that before a
    tanh, an odd function, is positive.
    """
    *before, last = scores.steps or [Step("scale", None, scores.scale)]
    if last.name == "scale" and last.number is not None:
        if step.name == "scale" and step.number is not None:
            return _scaled(scores, before, last.number * step.number)
        if step.name == "tanh" and last.number < 0:
            return _then(_then(_scaled(scores, before, -last.number), step), Step("scale", None, -1.0))
    return replace(scores, steps=(*scores.steps, step))


def _scaled(scores: Scores, before: Sequence[Step], number: float) -> Scores:
    """Scores whose last step is a scale: the product's, where there is no other."""
    if not scores.steps:
        return replace(scores, scale=number)
    return replace(scores, steps=(*before, Step("scale", None, number)))


def scores_of(x: Value, uses: Uses) -> Scores | None:
    """The scores that x is; None where it is none, or where something else reads them on the way."""
    found = _Walk(uses).scores(x)
    if found is None:
        return None
    scales = [found.scale, *(s.number for s in found.steps if s.name == "scale" and s.number is not None)]
    with np.errstate(over="ignore"):
        if not np.isfinite(np.array(scales, np.float32)).all():  # a product of several, perhaps
            return None
    return replace(found, scale=float(np.float32(found.scale)))
