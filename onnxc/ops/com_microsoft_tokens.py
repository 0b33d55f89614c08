"""onnxruntime's contrib operators that stand between the steps of a decoder, and behind one."""

from __future__ import annotations

from functools import reduce as fold
from typing import Any

from onnxc.errors import ModelError, NeedsContentError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, maximum
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.ops.com_microsoft import MS
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import on_host


@op("NGramRepeatBlock", 1, domain=MS)
def ngram_repeat_block(b: Builder, tokens: Value, scores: Value, *, ngram_size: int) -> Value:
    """scores [batch, words], -inf where a word would repeat an n-gram of tokens [batch, length]."""
    if ngram_size < 1:
        raise ModelError(f"NGramRepeatBlock: the ngram_size {ngram_size} must be positive")
    if tokens.rank != 2 or scores.rank != 2:
        raise ShapeError(f"NGramRepeatBlock takes tokens and scores of two axes, not {tokens.t} and {scores.t}")
    return without_repeated(b, tokens, scores, ngram_size, -float("inf"))


def without_repeated(b: Builder, tokens: Value, scores: Value, size: int, least: float) -> Value:
    """scores [batch, words], at most `least` where a word would repeat an n-gram of tokens [batch, length]."""
    before, length = size - 1, tokens.shape[1]
    count = maximum(length - before, 0)  # n-grams that are there already
    padded = b.pad(tokens, (0, before), (0, 0), -1)  # as long as what is to be compared, whatever the length
    same = [
        b.eq(b.slice(padded, 1, before + k, before + k + count), b.slice(padded, 1, length + k, length + k + 1))
        for k in range(before)
    ]
    followers = b.slice(padded, 1, 2 * before, 2 * before + count)
    repeated = fold(b.and_, same) if same else b.full(followers.shape, True, dtypes.boolean)
    banned = b.where(repeated, b.scalar(least, scores.dtype), float("inf"))
    return b.one("scatter_elements", scores, followers, banned, axis=1, reduction="min")


@op("DynamicTimeWarping", 1, domain=MS)
def dynamic_time_warping(b: Builder, cost: Value) -> Value:
    """The cheapest way [2, steps] through the costs [rows, columns], or [1, rows, columns], by steps of at most one."""
    if cost.rank not in (2, 3):
        raise ShapeError(f"DynamicTimeWarping takes costs [rows, columns] or [1, rows, columns], not {cost.t}")
    flat, steps = b.reshape(cost, cost.shape[-2:]), _size(b, cost, "the length of DynamicTimeWarping")
    (way,) = on_host(b, "ms_dynamic_time_warping", [flat], [TensorType(dtypes.int32, (2, steps))])
    return way


@op("Tokenizer", 1, domain=MS)
def tokenizer(
    b: Builder, x: Value, *, mark: int, mincharnum: int, pad_value: str, separators: list[str] | None = None,
    tokenexp: str = "",
) -> Value:  # fmt: skip
    """Strings [C] or [N, C] as their tokens [..., most tokens]: by separators, where there are some."""
    if x.dtype is not dtypes.string or x.rank not in (1, 2):
        raise ModelError(f"Tokenizer takes strings of one or two axes, not {x.t}")
    if not separators and not tokenexp:
        raise ModelError("Tokenizer needs separators or a tokenexp")
    alone = list(separators or ()) == [""] or (not separators and tokenexp == ".")
    if mincharnum < 1 or (alone and mincharnum > 1):
        raise ModelError(f"Tokenizer has the mincharnum {mincharnum}; {1 if alone else 'a positive number'} is allowed")
    how: dict[str, Any] = {} if alone else {"separators": separators} if separators else {"token": tokenexp}
    shape = (*x.shape, _size(b, x, "the most tokens of Tokenizer"))
    (y,) = on_host(
        b, "ms_tokenize", [x], [x.t.with_shape(shape)], least=mincharnum, mark=bool(mark), pad=pad_value, **how
    )
    return y


def _size(b: Builder, x: Value, what: str) -> Dim:
    """A size that only a run will tell."""
    if b.run_time is None:
        raise NeedsContentError(f"{what} depends on data, which is not supported here", x)
    return b.run_time.size()


@op("SampleOp", 1, domain=MS)
def sample_op(b: Builder, x: Value) -> Value:
    return x
