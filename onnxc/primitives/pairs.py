"""Complex numbers in a graph that is being built: pairs of real values, as kernels compute with real numbers only.

`pair` makes one value of a complex dtype of two parts, for who passes values on without looking at them; it is in no
graph, and is taken apart again (`opened`) by who computes with it. At the borders of a graph a complex tensor [...] is
one of real numbers [..., 2] (`split`, `join`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder, constant_of

complex64, complex128 = dtypes.BY_NAME["complex64"], dtypes.BY_NAME["complex128"]
PART = {complex64: dtypes.float32, complex128: dtypes.float64}
WHOLE = {part: whole for whole, part in PART.items()}


@dataclass(frozen=True)
class Complex:
    """A complex tensor: real and imaginary part, of one dtype and shape."""

    re: Value
    im: Value

    @property
    def dtype(self) -> DType:
        return WHOLE[self.re.dtype]

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.re.shape

    @property
    def rank(self) -> int:
        return self.re.rank


Number = Value | Complex


def each(f: Callable[[Value], Value], x: Number) -> Number:
    """What moves elements, of both parts."""
    return Complex(f(x.re), f(x.im)) if isinstance(x, Complex) else f(x)


def pair(x: Number) -> Value:
    """One value of a complex dtype for both parts. A real one as it is."""
    if isinstance(x, Value):
        return x
    return Node("pair", (x.re, x.im), [Value(TensorType(x.dtype, x.shape))]).output


def opened(x: Value) -> Number:
    """The parts of a value of a complex dtype. A real one as it is."""
    if x.dtype not in PART:
        return x
    if x.node is None or x.node.op != "pair":
        raise UnsupportedError(f"{x.type}: a complex value that no function of onnxc.array_api has made")
    re, im = x.node.operands
    return Complex(re, im)


def constant_pair(b: Builder, array: np.ndarray) -> Complex:
    """A complex constant."""
    return Complex(b.constant(array.real.copy()), b.constant(array.imag.copy()))


def known_pair(x: Value) -> np.ndarray | None:
    """The content of a value of a complex dtype, where both parts are constants."""
    parts = opened(x)
    assert isinstance(parts, Complex)
    re, im = constant_of(parts.re), constant_of(parts.im)
    if re is None or im is None:
        return None
    out = np.empty(re.shape, x.dtype.numpy)
    out.real, out.imag = re, im
    return out


def split(b: Builder, x: Value) -> Complex:
    """[..., 2] as a pair: how complex tensors enter a program."""
    re, im = (b.reshape(part, x.shape[:-1]) for part in b.split(x, x.rank - 1, [1, 1]))
    return Complex(re, im)


def join(b: Builder, x: Complex) -> Value:
    """A pair as [..., 2]: how complex tensors leave a program."""
    return b.concat([b.reshape(part, (*part.shape, 1)) for part in (x.re, x.im)], x.rank)


def as_floats(array: np.ndarray) -> np.ndarray:
    """A complex array [...] as the floats [..., 2] that it consists of."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # which gives an array without axes one
    return array.reshape(*array.shape, 1).view(PART[dtypes.from_numpy(array.dtype)].numpy)


def as_complex(array: np.ndarray) -> np.ndarray:
    """Floats [..., 2] as a complex array [...]."""
    array = np.ascontiguousarray(array)
    return array.view(WHOLE[dtypes.from_numpy(array.dtype)].numpy).reshape(array.shape[:-1])
