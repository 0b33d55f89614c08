"""The type of a value: element type and shape."""

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
        return all(isinstance(d, int) for d in self.shape)

    def with_shape(self, shape: tuple[Dim, ...]) -> TensorType:
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


def same_shape(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """True where both shapes are certainly equal."""
    return len(a) == len(b) and all(always_equal(x, y) for x, y in zip(a, b, strict=True))
