"""The type of a value: a tensor's element type and shape, or what a sequence, an optional or a map holds."""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, prod


@dataclass(frozen=True)
class TensorType:
    """A dense tensor of `dtype` with a shape of ints and symbolic dims.

    >>> from onnxc.ir import dtypes, expr
    >>> TensorType(dtypes.float32, (expr.Sym("s0"), 64))
    float32[s0, 64]
    """

    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes of the elements, dense."""
        return self.size * self.dtype.itemsize

    @property
    def is_static(self) -> bool:
        """Whether all dims are numbers."""
        return all(isinstance(d, int) for d in self.shape)

    def with_shape(self, shape: tuple[Dim, ...]) -> TensorType:
        """The same dtype in another shape."""
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: DType) -> TensorType:
        """The same shape of another dtype."""
        return TensorType(dtype, self.shape)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class SequenceType:
    """A list of values of one kind. `element` is what is known of all of them; None for nothing.

    A dim of the elements that is a symbol may be another number in each of them.
    """

    element: Type | None

    def __repr__(self) -> str:
        return f"sequence({'?' if self.element is None else self.element})"


@dataclass(frozen=True)
class OptionalType:
    """A value that may be missing (Python's None)."""

    element: Type | None

    def __repr__(self) -> str:
        return f"optional({'?' if self.element is None else self.element})"


@dataclass(frozen=True)
class EmptyType:
    """What is inside of a sequence or an optional that is known to be empty: it may become tensors of this dtype."""

    dtype: DType

    def __repr__(self) -> str:
        return f"nothing({self.dtype})"


@dataclass(frozen=True)
class MapType:
    """A dict from integers or strings to scalars."""

    key: DType
    value: DType

    def __repr__(self) -> str:
        return f"map({self.key}, {self.value})"


Type = TensorType | SequenceType | OptionalType | MapType | EmptyType


def same_shape(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """True where both shapes are certainly equal."""
    return len(a) == len(b) and all(always_equal(x, y) for x, y in zip(a, b, strict=True))


def shape_within(of: Type | None) -> tuple[Dim, ...]:
    """The shape of a tensor, or of the tensors inside a sequence or an optional; no dims where there are none."""
    while isinstance(of, (SequenceType, OptionalType)):
        of = of.element
    return of.shape if isinstance(of, TensorType) else ()
