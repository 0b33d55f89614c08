"""ATen ops of backward graphs whose meaning is the derivative of another op: the derivative of that op's rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onnxc.autodiff.reverse import gradients
from onnxc.frontends.torch_fx_movement import reflection_pad, replication_pad
from onnxc.frontends.torch_fx_nn import (
    adaptive_average,
    attention_scores,
    average_pool,
    convolution,
    for_heads,
    grid_sampler,
    widened,
)
from onnxc.frontends.torch_fx_resizing import (
    bicubic_antialiased,
    bilinear_antialiased,
    upsample_bicubic,
    upsample_linear,
    upsample_nearest,
)
from onnxc.frontends.torch_fx_table import Call, aten
from onnxc.ir.expr import Dim, always_equal, floordiv, prod
from onnxc.ir.graph import Value, cloned
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder


def vjp(c: Call, forward: Callable[..., Value], xs: Sequence[Value], dy: Value, wanted: Sequence[bool]) -> list[Any]:
    """The cotangents of `xs` for that of ``forward(call, *xs)``; None for those that are not wanted.

    The forward graph comes along; what the derivative does not read of it is dropped with other dead nodes.
    """
    inner = Builder()
    inner.origin = c.b.origin
    at = {inner.input(x.t).id: x for x in (*xs, dy)}
    *points, seed = inner.inputs
    y = forward(Call(inner, (dy.t,)), *points)
    wrt = [p for p, w in zip(points, wanted, strict=True) if w]
    found = gradients(inner, list(inner.nodes), {y.id: seed}, wrt)
    c.b.nodes += cloned(inner.nodes, at)
    ends = iter(c.b.full(p.shape, 0, p.dtype) if g is None else at[g.id] for p, g in zip(wrt, found, strict=True))
    return [next(ends) if w else None for w in wanted]


def _by_one(c: Call, forward: Callable[..., Value], x: TensorType, dy: Value) -> Value:
    """Of an op that is linear in its only operand: the derivative reads no operand, only its type."""
    (dy,) = widened(c.b, dy)
    point = c.b.full(x.shape, 0, dy.dtype)
    return vjp(c, forward, [point], dy, [True])[0]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- convolutions, pools


@aten("convolution_backward")
def convolution_backward(
    c: Call, dy: Value, x: Value, w: Value, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    dy, x, w = widened(c.b, dy, x, w)

    def forward(inner: Call, x: Value, w: Value) -> Value:
        return convolution(inner, x, w, None, stride, padding, dilation, transposed, output_padding, groups)

    dx, dw = vjp(c, forward, [x, w], dy, wanted[:2])
    channels = dy.rank - (w.rank - 1)
    db = c.b.reduce("sum", dy, [i for i in range(dy.rank) if i != channels]) if wanted[2] else None
    return [dx, dw, db]


@aten("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(c: Call, dy: Value, x: Value, *window: Any) -> Value:
    return _by_one(c, lambda inner, v: average_pool(inner, v, *window), x.t, dy)


@aten("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(c: Call, dy: Value, x: Value) -> Value:
    return _by_one(c, lambda inner, v: adaptive_average(inner, v, dy.shape[-_spatial(c) :]), x.t, dy)


def _spatial(c: Call) -> int:
    """How many spatial axes the op's name says: `avg_pool2d`."""
    return int(next(ch for ch in c.name if ch.isdigit()))


@aten("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(c: Call, dy: Value, x: Value, *window: Any) -> Value:
    """Each cotangent goes to the position, within its plane, that the forward pass wrote down."""
    return _unpooled(c, dy, x, window[-1])


@aten("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(c: Call, dy: Value, x: Value, index: Value) -> Value:
    return _unpooled(c, dy, x, index)


def _unpooled(c: Call, dy: Value, x: Value, index: Value) -> Value:
    n = _spatial(c)
    b, (dy,) = c.b, widened(c.b, dy)
    planes, size = prod(x.shape[:-n]), prod(x.shape[-n:])
    each = prod(dy.shape[-n:])
    rows = b.full((planes, size), 0, dy.dtype)
    index, dy = b.reshape(index, (planes, each)), b.reshape(dy, (planes, each))
    return b.reshape(b.one("scatter_elements", rows, index, dy, axis=1, reduction="add"), x.shape)


# ---------------------------------------------------------------- padding, resizing


def _pad_backward(rule: Callable[..., Value]) -> Callable[..., Value]:
    return lambda c, dy, x, pad: _by_one(c, lambda inner, v: rule(inner, v, pad), x.t, dy)


for _n in (1, 2, 3):
    aten(f"reflection_pad{_n}d_backward")(_pad_backward(reflection_pad))
    aten(f"replication_pad{_n}d_backward")(_pad_backward(replication_pad))


def _upsample_backward(rule: Callable[..., Value]) -> Callable[..., Value]:
    def backward(
        c: Call, dy: Value, size: Sequence[Dim], before: Sequence[Dim], *rest: Any, **named: float | None
    ) -> Value:
        x = TensorType(dy.dtype, tuple(before))
        return _by_one(c, lambda inner, v: rule(inner, v, size, *rest, **named), x, dy)

    return backward


for _name, _rule in {
    "nearest1d": upsample_nearest, "nearest2d": upsample_nearest, "nearest3d": upsample_nearest,
    "linear1d": upsample_linear, "bilinear2d": upsample_linear, "trilinear3d": upsample_linear,
    "bicubic2d": upsample_bicubic,
}.items():  # fmt: skip
    aten(f"upsample_{_name}_backward")(_upsample_backward(_rule))
aten("_upsample_bilinear2d_aa_backward")(_upsample_backward(bilinear_antialiased))
aten("_upsample_bicubic2d_aa_backward")(_upsample_backward(bicubic_antialiased))


@aten("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    c: Call, dy: Value, x: Value, grid: Value, mode: int, padding: int, align: bool, wanted: Sequence[bool]
) -> list[Value | None]:
    def forward(inner: Call, x: Value, grid: Value) -> Value:
        return grid_sampler(inner, x, grid, mode, padding, align)

    return vjp(c, forward, [x, grid], dy, wanted)


# ---------------------------------------------------------------- attention


@aten("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    c: Call, dy: Value, q: Value, k: Value, v: Value, y: Value, lse: Value, dropout_p: float, is_causal: bool, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> list[Value]:  # fmt: skip
    """The weights again, as exp(scores - lse); a row all of whose keys are masked has none."""
    b, (dy, q, k, v, y, mask) = c.b, widened(c.b, dy, q, k, v, y, attn_mask)
    heads, groups = q.shape[1], k.shape[1]
    k, v = (for_heads(b, x, heads) for x in (k, v))
    scores, factor = attention_scores(c, q, k, mask, is_causal, scale)
    lse = b.reshape(b.cast(lse, scores.dtype), (*scores.shape[:-1], 1))
    weights = b.exp(b.sub(scores, b.where(b.eq(lse, -math.inf), 0.0, lse)))
    last = weights.rank - 1
    dv = b.matmul(b.swap(weights, last - 1, last), dy)
    dweights = b.matmul(dy, b.swap(v, last - 1, last))
    total = b.reduce("sum", b.mul(dy, y), [last], True)
    dscores = b.mul(b.mul(weights, b.sub(dweights, total)), factor)
    dk = b.matmul(b.swap(dscores, last - 1, last), q)
    if not always_equal(groups, heads):
        dk, dv = (_of_groups(b, x, groups) for x in (dk, dv))
    return [b.matmul(dscores, k), dk, dv]


def _of_groups(b: Builder, x: Value, groups: Dim) -> Value:
    """Cotangents of the heads that share keys and values, summed."""
    batch, heads, length, width = x.shape
    return b.reduce("sum", b.reshape(x, (batch, groups, floordiv(heads, groups), length, width)), [2])


# ---------------------------------------------------------------- weights


@aten("_weight_norm_interface_backward")
def weight_norm_backward(c: Call, dw: Value, v: Value, g: Value, norms: Value, dim: int = 0) -> list[Value]:
    """Of w = g v / |v|, with a norm for each slice along `dim`: of v and g."""
    b, (dw, v, g, norms) = c.b, widened(c.b, dw, v, g, norms)
    axis = b.axis(dim, v.rank)
    along = b.reduce("sum", b.mul(dw, v), [i for i in range(v.rank) if i != axis], True)
    dg = b.div(along, norms)
    return [b.mul(b.div(g, norms), b.sub(dw, b.mul(v, b.div(dg, norms)))), dg]
