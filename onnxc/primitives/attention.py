"""Attention as one primitive: scores, what becomes of them one by one, their softmax, and the values they weigh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, broadcast_shapes, register, summed_in_float32
from onnxc.primitives.contraction import product_type

MASKED = ("add", "sub", "fill", "keep")  # steps that have an operand ...
NUMBERED = ("scale", "fill", "keep", "max")  # ... and a number
STEPS = frozenset({"tanh", *MASKED, *NUMBERED})
PRODUCTS = 512.0  # of queries and keys are taken to be no larger, where it is asked whether a finite mask hides keys


def score_steps(attrs: Attrs, masks: Sequence[Any]) -> Iterator[tuple[str, Any, float | None]]:
    """What becomes of a score s = scale * q . k, in order: a name, a mask (or None), a number (or None).

    ======  ==================================
    scale   s * number
    tanh    tanh(s)
    max     max(s, number)
    add     s + mask
    sub     s - mask
    fill    number where the mask holds, else s
    keep    s where the mask holds, else number
    ======  ==================================

    Attributes `steps` and `numbers` tell; without them there is one mask at most, which `fill` says more of.

    >>> list(score_steps({"steps": ("tanh", "add", "fill"), "numbers": (0.5,)}, ["bias", "hidden"]))
    [('tanh', None, None), ('add', 'bias', None), ('fill', 'hidden', 0.5)]
    """
    if "steps" not in attrs:
        fill = attrs.get("fill")
        yield from (("add" if fill is None else "fill", mask, fill) for mask in masks)
        return
    of, numbers = iter(masks), iter(attrs["numbers"])
    for name in attrs["steps"]:
        yield name, next(of) if name in MASKED else None, next(numbers) if name in NUMBERED else None


def fill_of(fill: float, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The number of a dtype for `fill`: the largest or smallest one for a number that it does not reach."""
    most = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return np.asarray(fill if math.isinf(fill) else min(max(fill, -most), most)).astype(dtype)


def _attention(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """softmax(scale * q @ kt + bias) @ v.

    Shapes: q [..., Q, D], kt [..., D, K], v [..., K, E], bias broadcast to [..., Q, K].

    With `fill`, a number, the fourth operand is a condition: scores are `fill` where it holds. With `steps`, more is
    done to the scores, by any number of masks: `score_steps`.

    With `guard`, rows of the softmax that are NaN (every key masked) count as zero.
    """
    q, kt, v, *masks = types
    scores = product_type(q, kt)
    _check_steps(attrs, len(masks))
    for name, mask, _ in score_steps(attrs, masks):
        if mask is None:
            continue
        broadcast_shapes(scores.shape, mask.shape)
        if (name in ("fill", "keep")) is not (mask.dtype is dtypes.boolean):
            raise ShapeError(f"attention with a mask {mask}: it is a condition where scores are filled, else numbers")
    return (product_type(scores, v),)


def _check_steps(attrs: Attrs, masks: int) -> None:
    steps = attrs.get("steps")
    if steps is None:
        fits = masks <= 1
    else:
        known = all(name in STEPS for name in steps) and "fill" not in attrs
        fits = known and masks == sum(name in MASKED for name in steps)
        fits = fits and len(attrs["numbers"]) == sum(name in NUMBERED for name in steps)
    if not fits:
        raise ShapeError(f"attention with {masks} masks: steps {steps} do not fit")


Array = np.ndarray[Any, Any]


def _attention_eval(
    q: Array, kt: Array, v: Array, *masks: Array, scale: float = 1.0, guard: bool = False, **attrs: Any
) -> Array:
    s = np.matmul(q, kt) * q.dtype.type(scale)
    with np.errstate(all="ignore"):
        for name, mask, number in score_steps(attrs, masks):
            s = _stepped(s, name, mask, number)
        e = np.exp(s - s.max(-1, keepdims=True))
        p = e / e.sum(-1, keepdims=True)
    return np.asarray(np.matmul(np.nan_to_num(p) if guard else p, v)).astype(q.dtype)


def _stepped(s: Array, name: str, mask: Array | None, number: float | None) -> Array:
    if mask is not None and name in ("add", "sub"):
        return np.asarray(s + mask if name == "add" else s - mask)
    if name == "tanh":
        return np.asarray(np.tanh(s))
    assert number is not None
    given = fill_of(number, s.dtype)
    if mask is not None:
        return np.where(mask, given, s) if name == "fill" else np.where(mask, s, given)
    return np.asarray(s * given if name == "scale" else np.maximum(s, given))


register(Primitive("attention", Kind.TEMPLATE, _attention, summed_in_float32(_attention_eval)))
