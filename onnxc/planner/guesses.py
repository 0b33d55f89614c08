"""What symbolic sizes are taken for, where a choice depends on them: it holds for any size, and is good for these."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxc.ir.expr import Dim, evaluate, symbols

IMAGES = (224, 640)  # a model's images, along an axis: of classifiers and of detectors
BATCHES = (1, 1, 8)  # one image more often than several
LARGEST = 1 << 24  # of a size that a model computes, say as a power


def guessed(sizes: Sequence[Dim], each: int) -> tuple[int, ...]:
    """Sizes in the midst of a model, whose own symbolic sizes are all `each`."""
    return tuple(_guess(d, each) for d in sizes)


def guessed_size(shape: Sequence[Dim]) -> int:
    """Elements of a tensor where nothing is said of the images; none where a size is known to be 0."""
    return 0 if any(isinstance(d, int) and d == 0 for d in shape) else math.prod(guessed(shape, min(IMAGES)))


def taken(d: Dim, each: int) -> int:
    """What an expression is where all symbolic sizes in it are `each`.

    >>> from onnxc.ir.expr import Sym
    >>> taken(64 * Sym("h") - 1, 10)
    639
    """
    try:
        return evaluate(d, {s.key: each for s in symbols(d)})
    except ZeroDivisionError:  # of a size by another one, which is 0 then
        return each


def _guess(d: Dim, each: int) -> int:
    return min(max(1, taken(d, each)), LARGEST)
