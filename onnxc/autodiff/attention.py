"""The derivative of attention as one node, which training steps on GPUs have."""

from __future__ import annotations

from onnxc.autodiff.movement import summed_to
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.errors import UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value


@rule("attention")
def attention(s: Step) -> Gradients:
    """By queries, keys and values; probabilities are computed again from the norms of their rows. A mask has no
    cotangent here: attention with one that is learnt, or of other steps than one mask, is differentiated as it is
    written.
    """
    b, (q, kt, v, *bias) = s.b, s.operands
    if "steps" in s.node.attrs:
        raise UnsupportedError(f"attention has no derivative through {', '.join(s.node.attrs['steps'])} of its scores")
    if any(s.needed[3:]):
        raise UnsupportedError(f"attention has no derivative by its mask, {bias[0].t}")
    attrs = {key: s.node.attrs[key] for key in ("scale", "fill") if key in s.node.attrs}
    wide = q.dtype if q.dtype.bits > 32 else dtypes.float32
    norm = b.one("attention_norm", q, kt, *bias, **attrs)
    delta = b.reduce("sum", b.mul(b.cast(s.dy, wide), b.cast(s.y, wide)), [s.dy.rank - 1])
    guard = bool(s.node.attrs.get("guard", False))

    def part(of: str) -> Value:
        return b.one("attention_gradient", q, kt, v, s.dy, norm, delta, *bias, of=of, guard=guard, **attrs)

    dq = summed_to(b, part("q"), q.shape) if s.needed[0] else None
    dk = part("k") if s.needed[1] else None
    dkt = None if dk is None else summed_to(b, b.swap(dk, dk.rank - 2, dk.rank - 1), kt.shape)
    dv = summed_to(b, part("v"), v.shape) if s.needed[2] else None
    return dq, dkt, dv, *(None for _ in bias)
