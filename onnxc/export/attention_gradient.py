"""Spellings of attention's derivative."""

from __future__ import annotations

from onnxc.export.common import Spelling, operand
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Node
from onnxc.primitives.attention_gradient import FAR, mask_operand, near


def _wide(node: Node) -> DType:
    """What is computed in."""
    dtype = operand(node).dtype
    return dtype if dtype.bits > 32 else dtypes.float32


def _as(w: NodeWriter, x: str, given: DType, wanted: DType) -> str:
    return x if given is wanted else w.cast(x, wanted)


def _scores(w: NodeWriter, node: Node, q: str, kt: str, mask: str | None) -> str:
    """Of queries and keys in the wide dtype."""
    wide, fill = _wide(node), node.attrs.get("fill")
    s = w.compute("MatMul", wide, [q, kt])
    s = w.compute("Mul", wide, [s, w.scalar(node.attrs.get("scale", 1.0), wide)])
    bias = mask_operand(node)
    if mask is None or bias is None:
        return s
    if fill is not None:
        return w.select(wide, mask, w.scalar(near(fill), wide), s)
    s = w.compute("Add", wide, [s, _as(w, mask, bias.dtype, wide)])
    return w.select(
        wide, w.one("IsInf", s, detect_positive=0), s, w.compute("Max", wide, [s, w.scalar(-FAR, wide)])
    )  # fmt: skip


def _norm(w: NodeWriter, node: Node, xs: list[str]) -> str:
    wide = _wide(node)
    q, kt = (_as(w, x, operand(node).dtype, wide) for x in xs[:2])
    s = _scores(w, node, q, kt, xs[2] if len(xs) > 2 else None)
    top = w.compute("ReduceMax", wide, [s], w.ints(-1), keepdims=1)
    base = w.select(wide, w.one("IsInf", top, detect_positive=0), w.scalar(0, wide), top)
    powers = w.compute("Exp", wide, [w.compute("Sub", wide, [s, base])])
    total = w.compute("Log", wide, [w.compute("ReduceSum", wide, [powers], w.ints(-1), keepdims=1)])
    return w.one("Squeeze", w.compute("Add", wide, [total, base]), w.ints(-1))


def _gradient(w: NodeWriter, node: Node, xs: list[str]) -> str:
    wide, of = _wide(node), node.attrs["of"]
    given = operand(node).dtype
    q, kt, v, dy = (_as(w, x, given, wide) for x in xs[:4])
    norm, delta = (w.one("Unsqueeze", x, w.ints(-1)) for x in xs[4:6])
    mask = xs[6] if len(xs) > 6 else None
    s = _scores(w, node, q, kt, mask)
    p = w.compute("Exp", wide, [w.compute("Sub", wide, [s, norm])])
    if node.attrs.get("guard", False):
        p = w.select(wide, w.one("IsNaN", p), w.scalar(0, wide), p)
    if of == "v":
        found = w.compute("MatMul", wide, [_turned(w, node, p, 3), dy])
        return _as(w, found, wide, given)
    back = w.compute("MatMul", wide, [dy, _turned(w, node, v, 2)])
    ds = w.compute("Mul", wide, [p, w.compute("Sub", wide, [back, delta])])
    if mask is not None and node.attrs.get("fill") is not None:
        ds = w.select(wide, mask, w.scalar(0, wide), ds)
    ds = w.compute("Mul", wide, [ds, w.scalar(node.attrs.get("scale", 1.0), wide)])
    pair = [ds, _turned(w, node, kt, 1)] if of == "q" else [_turned(w, node, ds, 3), q]
    return _as(w, w.compute("MatMul", wide, pair), wide, given)


def _turned(w: NodeWriter, node: Node, x: str, like: int) -> str:
    """The transpose of a value that has as many axes as an operand."""
    rank = node.operands[like].rank
    return w.one("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])


SPELLINGS: dict[str, Spelling] = {"attention_norm": _norm, "attention_gradient": _gradient}
