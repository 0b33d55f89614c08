"""Einsum: any equation, as reductions, transposes and matmuls."""

from __future__ import annotations

import string
from collections.abc import Sequence

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, never_equal, prod
from onnxc.ir.graph import Value
from onnxc.ops.registry import op
from onnxc.primitives.base import broadcast_dims
from onnxc.primitives.builder import Builder

Labelled = tuple[Value, str]  # a tensor with a letter for each axis


@op("Einsum", 12)
def einsum(b: Builder, *xs: Value, equation: str) -> Value:
    """Operands are contracted from left to right, each label summed as soon as nothing later needs it."""
    labels, wanted = _parse(equation, [x.rank for x in xs])
    operands = [_diagonal(b, x, text) for x, text in zip(xs, labels, strict=True)]
    sizes: dict[str, Dim] = {}
    for x, text in operands:
        for label, size in zip(text, x.shape, strict=True):
            sizes[label] = broadcast_dims(sizes.get(label, 1), size)
    last = {label: i for i, (_, text) in enumerate(operands) for label in text}
    current = _summed(b, operands[0], {label for label in sizes if label in wanted or last[label] > 0})
    for i, operand in enumerate(operands[1:], 1):
        needed = {label for label in sizes if label in wanted or last[label] > i}
        pair = _ordered(current, _summed(b, operand, needed | set(current[1])), wanted)
        current = _contract(b, *pair, needed, sizes)
    x, text = current
    y = b.transpose(x, [text.index(label) for label in wanted])
    return b.expand(y, [sizes[label] for label in wanted])


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result; an ellipsis becomes labels of its own."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ModelError(f"Einsum {equation!r} is for {len(terms)} operands, not {len(ranks)}")
    if not all(set(t.replace("...", "", 1)) <= set(string.ascii_letters) for t in (*terms, right)):
        raise ModelError(f"Einsum {equation!r}: an operand is letters, and an ellipsis (...) at most once")
    used = set(equation) & set(string.ascii_letters)
    extra = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]
    if any(n < 0 or (n > 0 and "..." not in t) for n, t in zip(extra, terms, strict=True)):
        raise ShapeError(f"Einsum {equation!r} does not fit operands of the ranks {list(ranks)}")
    widest = max(extra)
    free = "".join(chr(0x100 + i) for i in range(widest))  # letters that an equation cannot contain
    labels = [t.replace("...", free[widest - n :]) for t, n in zip(terms, extra, strict=True)]
    if arrow:
        wanted = right.replace("...", free)
    else:
        once = sorted(c for c in used if left.count(c) == 1)
        wanted = free + "".join(once)
    unknown = set(wanted) - set("".join(labels))
    if unknown or len(set(wanted)) != len(wanted):
        raise ModelError(f"Einsum {equation!r}: its result must name labels of its operands, each once")
    return labels, wanted


def _diagonal(b: Builder, x: Value, text: str) -> Labelled:
    """A label that stands twice in one operand takes the diagonal of its two axes."""
    while len(set(text)) < len(text):
        label = next(c for c in text if text.count(c) > 1)
        i = text.index(label)
        j = text.index(label, i + 1)
        order = [i, j, *(k for k in range(x.rank) if k not in (i, j))]
        x = b.transpose(x, order)
        n, rest = x.shape[0], x.shape[2:]
        if never_equal(n, x.shape[1]):
            raise ShapeError(f"Einsum takes the diagonal of axes of sizes {n} and {x.shape[1]}")
        flat = b.reshape(x, (n * n, *rest))
        if isinstance(n, int):
            x = b.one("slice", flat, starts=(0,) * flat.rank, sizes=(n, *rest), steps=(n + 1, *(1,) * len(rest)))
        else:
            x = b.gather(flat, b.mul(b.iota(n), b.size_as(n + 1, dtypes.int64)), 0)
        text = "".join(text[k] for k in order if k != j)
    return x, text


def _summed(b: Builder, operand: Labelled, needed: set[str]) -> Labelled:
    """Without the labels that nothing else needs."""
    x, text = operand
    drop = [i for i, label in enumerate(text) if label not in needed]
    return b.reduce("sum", x, drop), "".join(label for label in text if label in needed)


def _ordered(left: Labelled, right: Labelled, wanted: str) -> tuple[Labelled, Labelled]:
    """Two operands, last the one that has the last label of the result that they do not share.

    So the product's columns are the result's, without a transpose: keras writes the scores of attention as keys times
    queries, and weights as left factors.
    """
    alone = [label for label in wanted if (label in left[1]) != (label in right[1])]
    return (right, left) if alone and alone[-1] in left[1] else (left, right)


def _contract(
    b: Builder, left: Labelled, right: Labelled, needed: set[str], sizes: dict[str, Dim],
) -> Labelled:  # fmt: skip
    """One pair: labels of both are a batch where they are needed later; a matmul contracts the others."""
    (x, xl), (y, yl) = left, right
    shared = [c for c in xl if c in yl]
    batch = [c for c in shared if c in needed]
    inner = [c for c in shared if c not in needed]
    rows, columns = [c for c in xl if c not in shared], [c for c in yl if c not in shared]
    text = "".join(batch + rows + columns)
    if not inner:
        x = _laid(b, x, xl, [*batch, *rows], len(columns))
        y = b.transpose(y, [yl.index(c) for c in batch + columns])
        y = b.reshape(y, (*y.shape[: len(batch)], *(1,) * len(rows), *y.shape[len(batch) :]))
        return b.mul(x, y), text
    x = _grouped(b, x, xl, batch, rows, inner, sizes)
    y = _grouped(b, y, yl, batch, inner, columns, sizes)
    return b.reshape(b.matmul(x, y), [sizes[c] for c in text]), text


def _laid(b: Builder, x: Value, text: str, order: Sequence[str], trailing: int) -> Value:
    """The axes in an order, and some of size one behind them."""
    y = b.transpose(x, [text.index(c) for c in order])
    return b.reshape(y, (*y.shape, *(1,) * trailing))


def _grouped(
    b: Builder, x: Value, text: str, batch: list[str], first: list[str], second: list[str],
    sizes: dict[str, Dim],
) -> Value:  # fmt: skip
    """[batch..., product of the first labels, product of the second ones], with dims of one broadcast."""
    order = batch + first + second
    y = b.expand(b.transpose(x, [text.index(c) for c in order]), [sizes[c] for c in order])
    return b.reshape(y, (*(sizes[c] for c in batch), prod(sizes[c] for c in first), prod(sizes[c] for c in second)))
