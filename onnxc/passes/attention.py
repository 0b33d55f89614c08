"""Recognises attention as it is computed: matmul, scale, bias, softmax, (NaN guard,) matmul."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Node, Origin, Value, merge_origins
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import constant_of


def _made_by(v: Value | None, op: str) -> Node | None:
    return v.node if v is not None and v.node is not None and v.node.op == op else None


def _scalar(v: Value | None) -> float | None:
    array = constant_of(v)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _behind_reshape(v: Value) -> Value:
    """What is reshaped, and copied as a hint of derivative rules."""
    while v.node is not None and (v.node.op == "reshape" or (v.node.op == "copy" and "stop" in v.node.attrs)):
        v = v.node.operands[0]
    return v


def _is_of_rows(v: Value, op: str, x: Value) -> bool:
    """Whether v is a reduction of x over its last axis, and has that axis with a size of 1: each row meets its own."""
    made = _made_by(_behind_reshape(v), op)
    if made is None or made.operands[0] is not x or made.attrs["axes"] != (x.rank - 1,):
        return False
    return v.shape == (*x.shape[:-1], 1)


def _softmax_input(p: Value) -> Value | None:
    """x where p is softmax(x) over the last axis, as max, sub, exp, sum, div."""
    div = _made_by(p, "div")
    if div is None:
        return None
    exp = _made_by(div.operands[0], "exp")
    sub = _made_by(exp.operands[0], "sub") if exp is not None else None
    if exp is None or sub is None:
        return None
    x = sub.operands[0]
    if not _is_of_rows(sub.operands[1], "reduce_max", x):
        return None
    return x if _is_of_rows(div.operands[1], "reduce_sum", exp.output) else None


def _without_guard(p: Value) -> tuple[Value, bool]:
    """The probabilities behind `where(isnan(p), 0, p)`."""
    where = _made_by(p, "where")
    if where is not None:
        test, zero, inner = where.operands
        isnan = _made_by(test, "isnan")
        if isnan is not None and isnan.operands[0] is inner and _scalar(zero) == 0.0:
            return inner, True
    return p, False


@dataclass
class _Scores:
    """scale * (q @ kt) + bias; or `fill` in its place, where `bias` holds (or does not hold, with `kept`).

    `turned` is k where kt is to be made of it: its transpose was scaled before.
    """

    q: Value
    kt: Value
    scale: float
    bias: Value | None
    turned: Value | None = None
    fill: float | None = None
    kept: bool = False


def _strip_scale(v: Value) -> tuple[Value, float]:
    """x and c where v is x * c or x / c with a constant scalar c."""
    for op in ("mul", "div"):
        node = _made_by(v, op)
        if node is None:
            continue
        a, b = node.operands
        c = _scalar(b)
        if c is not None and op == "div":
            c = 1.0 / c if abs(c) > np.finfo(np.float32).tiny else None
        if c is not None and a.shape == v.shape:
            return a, c
        c = _scalar(a)
        if c is not None and op == "mul" and b.shape == v.shape:
            return b, c
    return v, 1.0


Uses = dict[int, list[Node]]


def _filled(x: Value, uses: Uses) -> tuple[Value, Value, float, bool] | None:
    """s, mask, c, False where x is `where(mask, c, s)`; with True for `where(mask, s, c)`. c is a number or -inf, and
    nothing else reads the scores s: a mask that is made of them would need them in memory.
    """
    where = _made_by(x, "where")
    if where is None:
        return None
    mask, *both = where.operands
    for at, (c, s) in enumerate((both, both[::-1])):
        fill = _scalar(c)
        product = _made_by(_strip_scale(s)[0], "matmul")
        if fill is None or not (np.isfinite(fill) or fill == -np.inf) or product is None or s.shape != x.shape:
            continue
        if len(uses.get(s.id, ())) == len(uses.get(product.output.id, ())) == 1:
            return s, mask, fill, at == 1
    return None


def _scores(x: Value, uses: Uses | None) -> _Scores | None:
    """The scores that x is; with `uses`, also filled ones."""
    filled = _filled(x, uses) if uses is not None else None
    if filled is not None:
        scores = _scores(filled[0], None)
        if scores is not None and scores.bias is None:
            return replace(scores, bias=filled[1], fill=filled[2], kept=filled[3])
        return None
    bias: Value | None = None
    add = _made_by(x, "add")
    if add is not None:
        for s, other in (add.operands, add.operands[::-1]):
            inner = _strip_scale(s)[0]
            if s.shape == x.shape and _made_by(inner, "matmul") is not None:
                x, bias = s, other
                break
    product, scale = _strip_scale(x)
    matmul = _made_by(product, "matmul")
    if matmul is None:
        return None
    (q, sq), (kt, sk) = (_strip_scale(v) for v in matmul.operands)
    transpose = _made_by(kt, "transpose")
    k, before = _strip_scale(transpose.operands[0]) if transpose is not None else (kt, 1.0)
    turned = k if transpose is not None and k is not transpose.operands[0] else None
    return _Scores(q, kt, float(np.float32(scale * sq * sk * before)), bias, turned)


FLOAT32 = frozenset({dtypes.float32})
HALF = frozenset({dtypes.float16, dtypes.bfloat16})


def fuse_attention(
    graph: Graph,
    of: frozenset[DType] = FLOAT32,
    deepest: int | None = None,
    fills: bool = False,
    learnt: Container[int] = frozenset(),
) -> Graph:
    """Replaces attention by one `attention` node (q, kt, v, bias?) wherever nothing else reads the probabilities.

    `of` are the dtypes that the target has a kernel for, `deepest` the depth of the deepest heads that it takes; None
    is no limit. `fills`: it has one for scores that are replaced where a condition holds, as `masked_fill` does.
    `learnt` are ids of values that a mask must not be.
    """
    uses = graph.uses()
    r = Rewriter(graph)
    for node in graph.nodes:
        fused = _match(node, graph, uses, fills) if node.op == "matmul" and node.output.dtype in of else None
        fits = fused is not None and _fits(fused[0].q, deepest) and _fits(fused[1], deepest)
        if fused is None or not fits or (fused[0].bias is not None and fused[0].bias.id in learnt):
            r.keep(node)
            continue
        scores, value, guard, origin = fused
        kt, transpose = scores.kt, scores.kt.node
        if scores.turned is not None and transpose is not None:
            kt = Value(kt.type)
            r.nodes.append(Node("transpose", [r.value(scores.turned)], [kt], transpose.attrs, (), transpose.origin))
        mask = r.value(scores.bias)
        if scores.kept and mask is not None:
            mask = _opposite(r, mask, origin)
        operands = [*(r.value(v) for v in (scores.q, kt, value)), *([mask] if mask is not None else [])]
        out = Value(node.output.type)
        attrs = {"scale": scores.scale, "guard": guard, **({} if scores.fill is None else {"fill": scores.fill})}
        r.nodes.append(Node("attention", operands, [out], attrs, (), origin))
        r.replace(node.output, out)
    return r.result()


def _opposite(r: Rewriter, mask: Value, origin: Origin) -> Value:
    """Where a condition does not hold."""
    hidden, array = Value(mask.type), constant_of(mask)
    if array is not None:
        r.nodes.append(Node("constant", (), [hidden], {"value": ~array}, (), origin))
    else:
        r.nodes.append(Node("not", [mask], [hidden], {}, (), origin))
    return hidden


def _fits(v: Value, deepest: int | None) -> bool:
    depth = v.shape[-1]
    return deepest is None or (isinstance(depth, int) and depth <= deepest)


def _match(node: Node, graph: Graph, uses: Uses, fills: bool) -> tuple[_Scores, Value, bool, Origin] | None:
    if node.output.rank < 3:
        return None
    p, v = node.operands
    outputs = {o.id for o in graph.outputs}
    if len(uses.get(p.id, ())) != 1 or p.id in outputs:
        return None
    inner, guard = _without_guard(p)
    x = _softmax_input(inner)
    scores = _scores(x, uses if fills else None) if x is not None else None
    if scores is None or x is None or x.id in outputs or inner.id in outputs:
        return None
    if len(uses.get(x.id, ())) != 2 or len(uses.get(inner.id, ())) != (2 if guard else 1):
        return None
    q_lead, k_lead = scores.q.shape[:-2], scores.kt.shape[:-2]
    if q_lead != node.output.shape[:-2] or len(k_lead) != len(q_lead) or len(v.shape) != len(node.output.shape):
        return None
    stop = (scores.q, scores.turned or scores.kt, v, scores.bias)
    between = _between(node, {x.id for x in stop if x is not None})
    if any(v.id in outputs for n in between if n is not node for v in n.outputs):
        return None  # it is asked for, or its derivative stops there
    return scores, v, guard, merge_origins(n.origin for n in between)


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
