"""Functions of neural networks, beside the array API: activations, norms, convolutions, pools, attention, losses.

    from onnxc import nn
    hidden = nn.gelu(nn.layer_norm(x, scale, bias) @ w)

Images are [batch, channels, height, width], and so for one and three axes. All are differentiable, and made of ONNX's
own operators where there is one. Arguments that are arrays may be numpy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxc import random
from onnxc.array.argument_errors import named_all
from onnxc.array.arguments import size_of, whole
from onnxc.array.core import Array, asarray, call, call_one
from onnxc.array.dims import may_be_equal
from onnxc.array.tracing import NUMBERS
from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Value
from onnxc.ops.registry import apply, find
from onnxc.primitives.builder import Builder

_OPSET = 23  # of the ONNX operators
Each = int | Sequence[int]  # one number for all spatial axes, or one for each


# ---------------------------------------------------------------- activations


def relu(x: Any) -> Array:
    """max(x, 0)."""
    return _onnx("Relu", [_float("relu", x)])


def leaky_relu(x: Any, slope: float = 0.01) -> Array:
    """x, or slope * x below zero."""
    return _onnx("LeakyRelu", [_float("leaky_relu", x)], alpha=float(slope))


def elu(x: Any, alpha: float = 1.0) -> Array:
    """x, or alpha * (exp(x) - 1) below zero."""
    return _onnx("Elu", [_float("elu", x)], alpha=float(alpha))


def gelu(x: Any, approximate: str = "none") -> Array:
    """x * Phi(x), Phi the normal distribution function; or its approximation by `"tanh"`."""
    if approximate not in ("none", "tanh"):
        raise InputError(f"gelu: approximate is 'none' or 'tanh', not {approximate!r}")
    return _onnx("Gelu", [_float("gelu", x)], approximate=approximate)


def sigmoid(x: Any) -> Array:
    """1 / (1 + exp(-x))."""
    return _onnx("Sigmoid", [_float("sigmoid", x)])


def silu(x: Any) -> Array:
    """x * sigmoid(x)."""
    return call_one(_silu, _float("silu", x), name="silu")


def _silu(b: Builder, x: Value) -> Value:
    return b.mul(x, b.sigmoid(x))


def softplus(x: Any) -> Array:
    """log(1 + exp(x))."""
    return _onnx("Softplus", [_float("softplus", x)])


def softmax(x: Any, axis: int = -1) -> Array:
    """exp(x) / sum(exp(x)) along an axis."""
    return _onnx("Softmax", [_float("softmax", x)], axis=whole(axis, "axis"))


def log_softmax(x: Any, axis: int = -1) -> Array:
    """The logarithm of :func:`softmax`."""
    return _onnx("LogSoftmax", [_float("log_softmax", x)], axis=whole(axis, "axis"))


# ---------------------------------------------------------------- norms


def layer_norm(x: Any, scale: Any = None, bias: Any = None, axis: int = -1, epsilon: float = 1e-5) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, over `axis` and all after it, the shape of scale and bias.

    Computed in float32 for narrower floats.
    """
    x, scale, bias = _floats("layer_norm", x, scale, bias)
    axis = whole(axis, "axis")
    if scale is None:
        scale = _ones(x, axis)
    return _onnx("LayerNormalization", [x, scale, bias], axis=axis, epsilon=float(epsilon))


def rms_norm(x: Any, scale: Any = None, axis: int = -1, epsilon: float = 1e-5) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * scale, over `axis` and all after it. Computed in float32 for narrower floats."""
    x, scale = _floats("rms_norm", x, scale)
    axis = whole(axis, "axis")
    return _onnx("RMSNormalization", [x, _ones(x, axis) if scale is None else scale], axis=axis, epsilon=float(epsilon))


def batch_norm(
    x: Any, scale: Any, bias: Any, mean: Any, variance: Any, training: bool = False, momentum: float = 0.9,
    epsilon: float = 1e-5,
) -> Any:  # fmt: skip
    """Each channel by its mean and variance, then times scale plus bias, all of them [channels].

    Args:
        training: by those of the batch.
        momentum: how much of the running statistics stays.

    Returns:
        The array; in training `(array, mean, variance)` with the new running statistics.
    """
    x, *rest = _floats("batch_norm", x, scale, bias, mean, variance)
    for what, v in zip(("scale", "bias", "mean", "variance"), rest, strict=True):
        if v.ndim != 1 or not may_be_equal(v.dims[0], x.dims[1]):
            raise InputError(f"batch_norm: {what} has the shape {v.dims}, and there are {x.dims[1]} channels")
    options = {"epsilon": float(epsilon), "momentum": float(momentum), "training_mode": int(training)}
    found = _results("BatchNormalization", [x, *rest], 3 if training else 1, options)
    return tuple(found) if training else found[0]


def group_norm(x: Any, groups: int, scale: Any, bias: Any, epsilon: float = 1e-5) -> Array:
    """Each group of channels by its own mean and variance, then each channel times scale plus bias, [channels]."""
    x, scale, bias = _floats("group_norm", x, scale, bias)
    return _onnx("GroupNormalization", [x, scale, bias], num_groups=whole(groups, "groups"), epsilon=float(epsilon))


def _ones(x: Array, axis: int) -> Array:
    return call_one(_ones_like, x, name="ones", axis=axis)


def _ones_like(b: Builder, x: Value, *, axis: int) -> Value:
    return b.full(x.shape[b.axis(axis, x.rank) :], 1.0, x.dtype)


# ---------------------------------------------------------------- convolutions and pools


def conv(
    x: Any, w: Any, bias: Any = None, stride: Each = 1, padding: Each | str | Sequence[tuple[int, int]] = 0,
    dilation: Each = 1, groups: int = 1,
) -> Array:  # fmt: skip
    """A convolution (the weights are not flipped).

    Args:
        x: [batch, channels, spatial...].
        w: [output channels, channels / groups, kernel...].
        bias: [output channels].
        padding: zeros before and after: a number, one for each spatial axis, pairs (before, after), `"same"` (as many
            outputs as inputs / stride, the odd one after), or `"valid"` (none).
    """
    x, w, bias = _floats("conv", x, w, bias)
    n = x.ndim - 2
    if n < 1 or w.ndim != x.ndim:
        raise InputError(f"conv: an image {x.shape} and weights {w.shape}; both have two axes and the spatial ones")
    return _onnx(
        "Conv", [x, w, bias], group=whole(groups, "groups"), strides=_each(stride, n, "stride"),
        dilations=_each(dilation, n, "dilation"), **_pads(padding, n),
    )  # fmt: skip


def conv_transpose(
    x: Any, w: Any, bias: Any = None, stride: Each = 1, padding: Each = 0, output_padding: Each = 0,
    dilation: Each = 1, groups: int = 1,
) -> Array:  # fmt: skip
    """The transpose of :func:`conv` (its derivative by the image), of weights [channels, output channels / groups,
    kernel...].
    """
    x, w, bias = _floats("conv_transpose", x, w, bias)
    n = x.ndim - 2
    if n < 1 or w.ndim != x.ndim:
        raise InputError(f"conv_transpose: an image {x.shape} and weights {w.shape}")
    return _onnx(
        "ConvTranspose", [x, w, bias], group=whole(groups, "groups"), strides=_each(stride, n, "stride"),
        dilations=_each(dilation, n, "dilation"), output_padding=_each(output_padding, n, "output_padding"),
        pads=_each(padding, n, "padding") * 2,
    )  # fmt: skip


def max_pool(
    x: Any, window: Each, stride: Each | None = None, padding: Each | str | Sequence[tuple[int, int]] = 0,
    dilation: Each = 1,
) -> Array:  # fmt: skip
    """The greatest element of each window; padding never is. Windows follow on each other where there is no stride."""
    return _pool("MaxPool", x, window, stride, padding, dilation)


def avg_pool(
    x: Any, window: Each, stride: Each | None = None, padding: Each | str | Sequence[tuple[int, int]] = 0,
    dilation: Each = 1, count_padding: bool = False,
) -> Array:  # fmt: skip
    """The mean of each window, of which padding is a part only with `count_padding`."""
    return _pool("AveragePool", x, window, stride, padding, dilation, count_include_pad=int(count_padding))


def _pool(name: str, x: Any, window: Each, stride: Each | None, padding: Any, dilation: Each, **more: int) -> Array:
    x = _float(name, x)
    n = x.ndim - 2
    if n < 1:
        raise InputError(f"{name}: an image {x.shape} has two axes and the spatial ones")
    kernel = _each(window, n, "window")
    return _onnx(
        name, [x], kernel_shape=kernel, strides=kernel if stride is None else _each(stride, n, "stride"),
        dilations=_each(dilation, n, "dilation"), **_pads(padding, n), **more,
    )  # fmt: skip


def _each(value: Each, n: int, what: str) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, Sequence) else (value,) * n
    if len(found) != n:
        raise InputError(f"{what} is an int, or {n} of them, not {value!r}")
    return tuple(whole(k, what) for k in found)


def _pads(padding: Any, n: int) -> Mapping[str, Any]:
    if padding == "same":
        return {"auto_pad": "SAME_UPPER"}
    if padding == "valid":
        return {"auto_pad": "VALID"}
    if isinstance(padding, str):
        raise InputError(f"padding is a number, 'same' or 'valid', not {padding!r}")
    if isinstance(padding, Sequence) and any(isinstance(p, (tuple, list)) for p in padding):
        if len(padding) != n or any(len(p) != 2 for p in padding):
            raise InputError(f"padding is {n} pairs (before, after), not {padding!r}")
        return {"pads": tuple(whole(p[k], "padding") for k in (0, 1) for p in padding)}
    return {"pads": _each(padding, n, "padding") * 2}


# ---------------------------------------------------------------- attention, tables


def attention(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, scale: float | None = None) -> Array:
    """softmax(q k' * scale + mask) v.

    Args:
        q, k, v: [batch, heads, sequence, size], or without the batch, or without both. Keys and values may have fewer
            heads, each of which then serves a run of queries' heads.
        mask: what is added to the scores, or bools of what is seen; broadcasts to [batch, heads, queries, keys]. A
            query that sees nothing gives zeros.
        causal: query i sees keys 0 to i.
        scale: default 1 / sqrt(size).
    """
    is_bool = mask is not None and asarray(mask).dtype == np.bool_
    q, k, v, *rest = _floats("attention", q, k, v, *([] if is_bool or mask is None else [mask]))
    rank = q.ndim
    if not 2 <= rank <= 4 or k.ndim != rank or v.ndim != rank:
        raise InputError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} have two to four axes, all of them as many")
    extra = [asarray(mask)] if is_bool else rest
    return call_one(_attention, q, k, v, *extra, name="attention", causal=bool(causal), scale=scale)


def _attention(
    b: Builder, q: Value, k: Value, v: Value, mask: Value | None = None, *, causal: bool, scale: float | None
) -> Value:  # fmt: skip
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = (b.reshape(t, (1,) * (4 - t.rank) + t.shape) for t in (q, k, v))
    if mask is not None:
        mask = b.reshape(mask, (1,) * (4 - mask.rank) + mask.shape)
    options = {"is_causal": int(causal)} | ({} if scale is None else {"scale": float(scale)})
    return b.reshape(onnx_op(b, "Attention", [q, k, v, mask], options)[0], shape)


def embedding(indices: Any, table: Any) -> Array:
    """Rows of a table [n, ...] by their numbers: indices [...] of ints become [..., ...]. Negative ones count from the
    end; one that is out of bounds is an error of the call.
    """
    return call_one(_rows, _ints("embedding", indices), asarray(table), name="embedding")


def _rows(b: Builder, index: Value, table: Value) -> Value:
    return b.gather(table, b.cast(index, dtypes.int64), 0)


def one_hot(indices: Any, n: int, dtype: Any = np.float32) -> Array:
    """Ints [...] as rows of zeros with a one, [..., n]. Those that are not in 0 to n - 1 are rows of zeros."""
    to = dtypes.from_numpy(np.dtype(dtype))
    return call_one(_one_hot, _ints("one_hot", indices), name="one_hot", n=size_of(n, "n"), to=to)


def _one_hot(b: Builder, index: Value, *, n: int, to: DType) -> Value:
    wide = b.reshape(b.cast(index, dtypes.int64), (*index.shape, 1))
    return b.cast(b.eq(wide, b.iota(n)), to)


# ---------------------------------------------------------------- losses, dropout


def cross_entropy(
    scores: Any, labels: Any, axis: int = -1, reduction: str = "mean", ignore: int | None = None
) -> Array:  # fmt: skip
    """-log softmax(scores)[label].

    Args:
        scores: floats, with the classes along `axis`.
        labels: ints, in the shape of scores without that axis.
        reduction: `"mean"`, `"sum"`, or `"none"`.
        ignore: a label that does not count, in the mean either.
    """
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"cross_entropy: reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    return call_one(
        _cross_entropy, _float("cross_entropy", scores), _ints("cross_entropy", labels), name="cross_entropy",
        axis=whole(axis, "axis"), reduction=reduction, ignore=None if ignore is None else whole(ignore, "ignore"),
    )  # fmt: skip


def _cross_entropy(
    b: Builder, scores: Value, labels: Value, *, axis: int, reduction: str, ignore: int | None
) -> Value:  # fmt: skip
    axis = b.axis(axis, scores.rank)
    rest = [k for k in range(scores.rank) if k != axis]
    moved = b.transpose(scores, [*rest[:1], axis, *rest[1:]] if rest else [axis])
    if not rest:  # one row of scores
        moved, labels = b.reshape(moved, (1, *moved.shape)), b.reshape(labels, (1, *labels.shape))
    options: dict[str, Any] = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    loss = onnx_op(b, "SoftmaxCrossEntropyLoss", [moved, labels], options)[0]
    return b.reshape(loss, ()) if not rest else loss


def dropout(x: Any, rate: float, key: Any, training: bool = True) -> Array:
    """Zeros in the place of some elements, and the others divided by 1 - rate.

    Args:
        rate: the probability of zeros, at least 0 and less than 1.
        key: of :func:`onnxc.random.key`: the same key, the same zeros.
        training: False: x as it is.
    """
    found = _float("dropout", x)
    if not 0 <= rate < 1:
        raise InputError(f"dropout: rate is at least 0 and less than 1, not {rate}")
    if not training or rate == 0:
        return found
    return call_one(_dropout, found, random.key_array(key), name="dropout", rate=float(rate))


def _dropout(b: Builder, x: Value, key: Value, *, rate: float) -> Value:
    kept = b.le(rate, random.unit(b, key, x.shape, dtypes.float32))
    return b.where(kept, b.div(x, 1 - rate), 0.0)


# ---------------------------------------------------------------- arguments, operators


def onnx_op(b: Builder, name: str, inputs: Sequence[Value | None], options: Mapping[str, Any]) -> list[Any]:
    """The outputs of an operator of the ONNX standard."""
    return _applied(b, name, inputs, options, 1)


def _applied(b: Builder, name: str, inputs: Sequence[Value | None], options: Mapping[str, Any], n: int) -> list[Any]:
    definition = find("", name, _OPSET)
    assert definition is not None, name
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    return apply(definition, b, inputs, listed, _OPSET, n)


def _operator(b: Builder, *values: Value, op: str, at: tuple[int, ...], outputs: int, options: Any) -> Sequence[Value]:
    inputs: list[Value | None] = [None] * (max(at) + 1)
    for k, v in zip(at, values, strict=True):
        inputs[k] = v
    return _applied(b, op, inputs, dict(options), outputs)[:outputs]


def _onnx(op: str, inputs: Sequence[Array | None], **options: Any) -> Array:
    return _results(op, inputs, 1, options)[0]


def _results(op: str, inputs: Sequence[Array | None], outputs: int, options: Mapping[str, Any]) -> Sequence[Array]:
    at = tuple(k for k, x in enumerate(inputs) if x is not None)
    given = [x for x in inputs if x is not None]
    found = call(_operator, *given, name=op, op=op, at=at, outputs=outputs, options=tuple(sorted(options.items())))
    assert isinstance(found, tuple)
    return found


def _float(name: str, x: Any) -> Array:
    found: Array = _floats(name, x)[0]
    return found


def _floats(name: str, *xs: Any) -> list[Any]:
    """Arrays of one float dtype; numbers of Python become it. None stays."""
    arrays = [None if x is None else asarray(x) for x in xs]
    weak = [x is None or type(given) in NUMBERS or x.weak for x, given in zip(arrays, xs, strict=True)]
    strong = {x.dtype: None for x, w in zip(arrays, weak, strict=True) if x is not None and not w}
    found = list(strong) or [np.dtype(np.float32)]
    kinds = [dtypes.from_numpy(d) for d in found]
    if len(found) > 1 or not kinds[0].is_float:
        raise InputError(f"{name} is of floats of one dtype, and was given {', '.join(map(str, found))}")
    return [
        x if x is None or not w or x.dtype == found[0] else call_one(_cast, x, name=name, to=kinds[0])
        for x, w in zip(arrays, weak, strict=True)
    ]


def _cast(b: Builder, x: Value, *, to: DType) -> Value:
    return b.cast(x, to)


def _ints(name: str, x: Any) -> Array:
    found = asarray(x)
    if found.dtype.kind not in "iu":
        raise InputError(f"{name}: indices are ints, not {found.dtype}")
    return found


__all__ = [
    "attention", "avg_pool", "batch_norm", "conv", "conv_transpose", "cross_entropy", "dropout", "elu", "embedding",
    "gelu", "group_norm", "layer_norm", "leaky_relu", "log_softmax", "max_pool", "one_hot", "relu", "rms_norm",
    "sigmoid", "silu", "softmax", "softplus",
]  # fmt: skip

named_all(globals(), __all__)
