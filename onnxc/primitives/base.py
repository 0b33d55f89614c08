"""What a primitive is, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from onnxc.errors import InternalError, LimitError, ShapeError
from onnxc.ir.dtypes import from_numpy
from onnxc.ir.expr import Dim, always_equal, bounds, never_equal
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType

NARROW = 16  # bits of floats that are too short to add up in
# What is no step anywhere: of halves, its results may be nearer to the exact ones than halves are.
SMOOTH = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "sqrt", "exp", "log", "pow", "tanh", "erf", "sin", "cos", "sinh",
        "cosh", "atan", "asinh", "max", "min", "where", "copy", "reduce_sum", "reduce_max", "reduce_min",
        "reduce_prod", "window_sum", "window_max", "matmul", "conv", "cumsum",
    }
)  # fmt: skip


class Kind(Enum):
    """How the loop IR treats a primitive."""

    POINTWISE = auto()  # one output element from the elements at the same (broadcast) position
    VIEW = auto()  # index arithmetic only
    REDUCTION = auto()  # a loop over axes that the output lacks
    INDEXED = auto()  # reads at positions that are data
    TEMPLATE = auto()  # matmul, convolution, attention: a kernel template or an extern call
    OPAQUE = auto()  # a routine of the runtime (sort, scatter)
    CONTROL = auto()  # has regions
    HOST = auto()  # a step between programs: see onnxc.primitives.host


Infer = Callable[[Sequence[TensorType], Attrs], tuple[TensorType, ...]]
Evaluate = Callable[..., "np.ndarray | tuple[np.ndarray, ...]"]


@dataclass(frozen=True)
class Primitive:
    """A primitive: `infer(types, attrs)` gives the output types, `evaluate(*arrays, **attrs)` the numpy result.

    `symbolic` is true where `evaluate` also works on object arrays of ints and symbolic expressions.
    """

    name: str
    kind: Kind
    infer: Infer
    evaluate: Evaluate | None
    symbolic: bool = False


def summed_in_float32(evaluate: Evaluate) -> Evaluate:
    """What adds up floats of 16 bits and less does so in float32, as kernels do; its result is rounded once."""

    def call(*arrays: np.ndarray, **attrs: Any) -> np.ndarray:
        if not any(_is_narrow(a) for a in arrays):
            return np.asarray(evaluate(*arrays, **attrs))
        with np.errstate(all="ignore"):
            found = np.asarray(evaluate(*(a.astype(np.float32) if _is_narrow(a) else a for a in arrays), **attrs))
            return found.astype(arrays[0].dtype)

    return call


def _is_narrow(array: np.ndarray) -> bool:
    dtype = from_numpy(array.dtype)
    return dtype.is_float and dtype.bits <= NARROW


TABLE: dict[str, Primitive] = {}


def register(primitive: Primitive) -> Primitive:
    """Adds a primitive to the table."""
    if primitive.name in TABLE:
        raise InternalError(f"primitive {primitive.name} is defined twice")
    TABLE[primitive.name] = primitive
    return primitive


def lookup(name: str) -> Primitive:
    """The primitive of that name; an InternalError says where to write a missing one."""
    try:
        return TABLE[name]
    except KeyError:
        raise InternalError(f"no primitive named {name!r}; primitives are defined in onnxc/primitives/") from None


# numpy has arrays of at most so many dims, and no machine has the memory for more bytes (as in runtime.c).
MAX_RANK = 64
MAX_BYTES = 1 << 46


def check_type(t: TensorType) -> None:
    """Raises ShapeError for a negative dim, LimitError for a tensor that no machine could hold."""
    if any(isinstance(d, int) and d < 0 for d in t.shape):
        raise ShapeError(f"a tensor would have the shape {list(t.shape)}")
    if t.rank > MAX_RANK:
        raise LimitError(f"a tensor would have the rank {t.rank}; the limit is {MAX_RANK}")
    nbytes = t.nbytes
    if isinstance(nbytes, int) and nbytes > MAX_BYTES:
        raise LimitError(f"a tensor {t} would have {nbytes} bytes")
    if nbytes == 0 and math.prod(d or 1 for d in t.shape if isinstance(d, int)) * t.dtype.itemsize >= 1 << 63:
        raise LimitError(f"no array has the shape {list(t.shape)}")  # numpy counts a dim of 0 as 1 here


def at_most_one(d: Dim) -> bool:
    """Whether a size is an expression that is never more than 1, as that of ``x[:1]`` is."""
    return not isinstance(d, int) and (top := bounds(d)[1]) is not None and top <= 1


def broadcast_dims(a: Dim, b: Dim) -> Dim:
    """numpy's rule for one pair of dims. Two different symbolic dims are taken to be equal, and one that is never more
    than 1 to be 1 (both checked at run time).
    """
    if a == 1:
        return b
    if b == 1 or always_equal(a, b):
        return a
    if at_most_one(a) or at_most_one(b):
        return b if at_most_one(a) else a
    if never_equal(a, b):
        raise ShapeError(f"dims {a} and {b} do not broadcast")
    return a if isinstance(a, int) else b if isinstance(b, int) else a


def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """numpy's broadcast of shapes. Raises ShapeError naming the shapes where they do not fit."""
    rank = max((len(s) for s in shapes), default=0)
    out: tuple[Dim, ...] = (1,) * rank
    for shape in shapes:
        padded = (1,) * (rank - len(shape)) + shape
        try:
            out = tuple(broadcast_dims(a, b) for a, b in zip(out, padded, strict=True))
        except ShapeError:
            raise ShapeError(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast") from None
    return out
