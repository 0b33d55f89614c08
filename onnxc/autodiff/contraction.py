"""Derivatives of products of matrices and of convolutions."""

from __future__ import annotations

from onnxc.autodiff.movement import summed_to
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.ir.expr import always_equal, prod
from onnxc.ir.graph import Value
from onnxc.ops.common import static_shape
from onnxc.ops.conv import conv_transpose


@rule("matmul")
def matmul(s: Step) -> Gradients:
    """dy b' and a' dy. Where one matrix meets a batch of others, the batch becomes part of the sum."""
    b, (x, w) = s.b, s.operands
    dx = dw = None
    if s.needed[0]:
        dx = summed_to(b, b.matmul(s.dy, b.swap(w, w.rank - 2, w.rank - 1)), x.shape)
    if s.needed[1] and all(always_equal(d, 1) for d in w.shape[:-2]) and x.rank >= w.rank:
        rows = prod(s.dy.shape[:-1])
        flat = b.reshape(b.expand(x, (*s.dy.shape[:-1], x.shape[-1])), (rows, x.shape[-1]))
        dw = b.reshape(b.matmul(b.swap(flat, 0, 1), b.reshape(s.dy, (rows, s.dy.shape[-1]))), w.shape)
    elif s.needed[1]:
        dw = summed_to(b, b.matmul(b.swap(x, x.rank - 2, x.rank - 1), s.dy), w.shape)
    return dx, dw


@rule("conv")
def conv(s: Step) -> Gradients:
    """By the image: the transposed convolution. By the weights: a primitive of its own."""
    x, w = s.operands
    return _by_image(s, x, s.dy, w) if s.needed[0] else None, _by_weights(s, x, s.dy, w) if s.needed[1] else None


@rule("conv_weights")
def conv_weights(s: Step) -> Gradients:
    """It is linear in both: with a cotangent for weights, by the image as above; by `dy` the convolution itself."""
    x, dy = s.operands
    attrs = {key: value for key, value in s.node.attrs.items() if key != "kernel"}
    return (
        _by_image(s, x, dy, s.dy) if s.needed[0] else None,
        s.b.one("conv", x, s.dy, **attrs) if s.needed[1] else None,
    )


def _by_image(s: Step, x: Value, dy: Value, w: Value) -> Value:
    attrs = s.node.attrs
    rows = zip(x.shape[2:], dy.shape[2:], w.shape[2:], *(attrs[k] for k in ("strides", "dilations", "low", "high")),
               strict=True)  # fmt: skip
    rest = [size - ((out - 1) * step + d * (k - 1) + 1 - lo - hi) for size, out, k, step, d, lo, hi in rows]
    return conv_transpose(
        s.b, dy, w, strides=list(attrs["strides"]), dilations=list(attrs["dilations"]), group=attrs["groups"],
        pads=[*attrs["low"], *attrs["high"]], output_padding=rest,
    )  # fmt: skip


def _by_weights(s: Step, x: Value, dy: Value, w: Value) -> Value:
    """dw[m, c, k] = sum over n, o of dy[n, m, o] x[n, c, o * stride + k * dilation - low]."""
    return s.b.one("conv_weights", x, dy, kernel=static_shape(w.shape[2:], "the kernel of Conv"),
                   **{key: s.node.attrs[key] for key in ("strides", "low", "high", "dilations", "groups")})  # fmt: skip
