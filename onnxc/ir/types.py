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


def element_name(of: Type | None) -> str:
    """A type without its shape, as far as it is known: `float32`, `sequence(float32)`, `optional(?)`.

    >>> from onnxc.ir import dtypes
    >>> element_name(SequenceType(TensorType(dtypes.float32, (2, 3))))
    'sequence(float32)'
    """
    if isinstance(of, (TensorType, EmptyType)):
        return of.dtype.name
    if isinstance(of, (SequenceType, OptionalType)):
        return f"{'sequence' if isinstance(of, SequenceType) else 'optional'}({element_name(of.element)})"
    return "?" if of is None else repr(of)


def contradict(a: str, b: str) -> bool:
    """Whether two such names cannot be of one value. What is in an optional may stand for it."""
    if "?" in (a, b) or "optional" in (a.partition("(")[0], b.partition("(")[0]):
        return False
    if a.startswith("sequence(") and b.startswith("sequence("):
        return contradict(a[len("sequence(") : -1], b[len("sequence(") : -1])
    return a != b


def same_shape(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """True where both shapes are certainly equal."""
    return len(a) == len(b) and all(always_equal(x, y) for x, y in zip(a, b, strict=True))


def shape_within(of: Type | None) -> tuple[Dim, ...]:
    """The shape of a tensor, or of the tensors inside a sequence or an optional; no dims where there are none."""
    while isinstance(of, (SequenceType, OptionalType)):
        of = of.element
    return of.shape if isinstance(of, TensorType) else ()
