"""Losses of classification."""

from __future__ import annotations

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ops.activation import log_softmax_13
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


def _negative_log_likelihood(
    b: Builder, logp: Value, target: Value, weight: Value | None, ignore: int | None, reduction: str,
) -> Value:  # fmt: skip
    """-logp[n, target[n]] * weight[target[n]], of [N, C, d...] and [N, d...]; a mean is over the weights."""
    if logp.rank < 2:
        raise ShapeError(f"scores {logp.t} have no axis of classes")
    if weight is not None and (weight.rank != 1 or never_equal(weight.shape[0], logp.shape[1])):
        raise ShapeError(f"weights {weight.t} are not one for each class of {logp.t}")
    places = (logp.shape[0], *logp.shape[2:])
    if target.rank != len(places) or any(never_equal(d, n) for d, n in zip(target.shape, places, strict=True)):
        raise ShapeError(f"targets {target.t} of scores {logp.t}")
    target = b.reshape(b.cast(target, dtypes.int64), places)
    counted = None if ignore is None else b.not_(b.eq(target, ignore))
    index = target if counted is None else b.where(counted, target, 0)
    picked = b.one("gather_elements", logp, b.reshape(index, (target.shape[0], 1, *target.shape[1:])), axis=1)
    loss = b.neg(b.reshape(picked, target.shape))
    scale = None if weight is None else b.gather(weight, index, 0)
    if counted is not None:
        scale = b.cast(counted, logp.dtype) if scale is None else b.where(counted, scale, 0.0)
        loss = b.where(counted, loss, 0.0)
    loss = loss if scale is None else b.mul(loss, scale)
    axes = range(loss.rank)
    if reduction == "none":
        return loss
    total = b.reduce("sum", loss, axes)
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ModelError(f"a loss has the reduction {reduction!r}; none, sum and mean exist")
    return b.mean(loss, axes) if scale is None else b.div(total, b.reduce("sum", scale, axes))


@op("NegativeLogLikelihoodLoss", 12)
def negative_log_likelihood_loss(
    b: Builder, x: Value, target: Value, weight: Value | None = None, *, ignore_index: int | None = None,
    reduction: str = "mean",
) -> Value:  # fmt: skip
    return _negative_log_likelihood(b, x, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss", 12)
def softmax_cross_entropy_loss(
    b: Builder, scores: Value, labels: Value, weights: Value | None = None, *,
    ignore_index: int | None = None, reduction: str = "mean",
) -> list[Value]:  # fmt: skip
    """The negative log likelihood of the softmax over axis 1, and the logarithm of that softmax."""
    logp = log_softmax_13(b, scores, axis=1)
    return [_negative_log_likelihood(b, logp, labels, weights, ignore_index, reduction), logp]
