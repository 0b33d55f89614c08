"""Determinants, solutions and decompositions of matrices [..., m, n], real or complex, whose sizes are known.

`decompositions` has the loops, of matrices [batch, m, n] that have elements. Of a matrix that has no inverse, or no
Cholesky factor, the result has infinities or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops import decompositions, numbers
from onnxc.ops.decompositions import flatten, own_type, size_of
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import PART, Complex, Number, each


def _unflat(b: Builder, x: Number, like: Number, *tail: Dim) -> Number:
    """[batch, ...] with the leading axes of the matrices again."""
    return each(lambda v: b.reshape(v, (*like.shape[:-2], *tail)), x)


def is_empty(x: Number) -> bool:
    """Whether matrices have no rows or no columns."""
    return 0 in x.shape[-2:]


def det(b: Builder, x: Number) -> Number:
    """Determinants [...]."""
    sign, pivots = _pivots(b, x)
    out: Number = numbers.to_complex(b, sign) if x.dtype in PART else sign
    for k in range(size_of(x)[0]):
        out = numbers.mul(b, out, each(lambda v: b.reshape(b.slice(v, 1, k, k + 1), (v.shape[0],)), pivots))  # noqa: B023
    return _unflat(b, out, x)


def _pivots(b: Builder, x: Number) -> tuple[Value, Number]:
    """Signs of the exchanges [batch] and what is on the diagonal after the elimination [batch, n]."""
    flat = flatten(b, x)
    if is_empty(x):
        return b.full(flat.shape[:1], 1.0, own_type(x)), each(lambda v: b.reshape(v, (flat.shape[0], 0)), flat)
    upper, _, sign = decompositions.eliminate(b, flat, None)
    return b.reshape(sign, flat.shape[:1]), decompositions.diagonal(b, upper)


def slogdet(b: Builder, x: Number) -> list[Number]:
    """Signs (of complex numbers, the turns), and logarithms of the absolute values, of determinants: [...] each; 0 and
    -infinity where there is no inverse.
    """
    sign, pivots = _pivots(b, x)
    logs = b.reduce("sum", b.log(numbers.absolute(b, pivots)), [1])
    turns = numbers.phase(b, pivots)
    none = b.eq(logs, -math.inf)
    out: Number = numbers.to_complex(b, sign) if x.dtype in PART else sign
    for k in range(size_of(x)[0]):
        out = numbers.mul(b, out, each(lambda v: b.reshape(b.slice(v, 1, k, k + 1), (v.shape[0],)), turns))  # noqa: B023
    out = numbers.where(b, none, b.scalar(0.0, own_type(x)), out)
    return [_unflat(b, out, x), _unflat(b, logs, x)]


def solve(b: Builder, x: Number, y: Number) -> Number:
    """The z with x z = y, for matrices y [..., n, k] or one vector [n]; leading axes are broadcast."""
    return _solved(b, x, y, decompositions.solve)


def solve_triangular(b: Builder, x: Number, y: Number, *, upper: bool) -> Number:
    """As `solve`, by the triangle of x that is named alone. A lower one is an upper one from the last row on."""
    if isinstance(x, Complex) or isinstance(y, Complex):
        x, y = numbers.to_complex(b, x), numbers.to_complex(b, y)
    if upper:
        return _solved(b, x, y, decompositions.solve_upper)
    turned = each(lambda v: b.flip(v, [v.rank - 2, v.rank - 1]), x)
    rows = max(y.rank - 2, 0)
    found = _solved(b, turned, each(lambda v: b.flip(v, [rows]), y), decompositions.solve_upper)
    return each(lambda v: b.flip(v, [max(v.rank - 2, 0)]), found)


def _solved(b: Builder, x: Number, y: Number, by: Callable[[Builder, Number, Number], Number]) -> Number:
    vector = y.rank == 1
    y = each(lambda v: b.reshape(v, (*v.shape, 1)), y) if vector else y
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (each(lambda v: b.expand(v, (*batch, *v.shape[-2:])), v) for v in (x, y))
    shape = y.shape
    if 0 in shape or is_empty(x):
        return each(lambda v: b.reshape(v, shape[:-1] if vector else shape), y)
    found = _unflat(b, by(b, flatten(b, x), flatten(b, y)), y, *shape[-2:])
    return each(lambda v: b.reshape(v, shape[:-1]), found) if vector else found


def cholesky(b: Builder, x: Number, *, upper: bool) -> Number:
    """Lower triangles l with l l* = x, or upper ones. NaN where x is not positive definite."""
    if is_empty(x):
        return x
    x = numbers.adjoint(b, x) if upper else x
    found = decompositions.cholesky(b, flatten(b, x))
    return _unflat(b, numbers.adjoint(b, found) if upper else found, x, *x.shape[-2:])


def qr(b: Builder, x: Number, *, complete: bool) -> list[Number]:
    """q with orthonormal columns, min(m, n) of them or (`complete`) m, and upper triangles r with q r = x."""
    m, n = size_of(x)
    k = m if complete else min(m, n)
    if is_empty(x):
        lead = x.shape[:-2]
        return [identity(b, x, lead, m, k), numbers.zeros(b, (*lead, k, n), x.dtype)]
    q, r = decompositions.qr(b, flatten(b, x), complete)
    return [_unflat(b, q, x, m, k), _unflat(b, r, x, k, n)]


def identity(b: Builder, x: Number, lead: tuple[Dim, ...], m: int, n: int) -> Number:
    """[*lead, m, n] with ones on the diagonal, of the dtype of x."""
    one = b.cast(b.eq(b.reshape(b.iota(m), (m, 1)), b.iota(n)), own_type(x))
    return numbers.add(b, numbers.zeros(b, (*lead, m, n), x.dtype), one)


def eigh(b: Builder, x: Number) -> list[Number]:
    """Eigenvalues [..., n], from the least on, and eigenvectors, in columns, of symmetric (or Hermitian) matrices, of
    which it reads what is on and below the diagonal.
    """
    n, _ = size_of(x)
    if n == 0:
        return [numbers.zeros(b, x.shape[:-1], own_type(x)), x]
    values, vectors = decompositions.eigh(b, flatten(b, x))
    return [_unflat(b, values, x, n), _unflat(b, vectors, x, n, n)]


def svd(b: Builder, x: Number, *, full: bool) -> list[Number]:
    """u, singular values s [..., min(m, n)], from the greatest on, and v* with u s v* = x. Without `full`, the first
    columns of u and rows of v* alone.
    """
    m, n = size_of(x)
    k = min(m, n)
    lead = x.shape[:-2]
    rows, columns = (m, n) if full else (k, k)
    if k == 0:
        values = b.full((*lead, 0), 0.0, own_type(x))
        return [identity(b, x, lead, m, rows), values, identity(b, x, lead, columns, n)]
    u, values, v = decompositions.svd(b, flatten(b, x), full)
    return [_unflat(b, u, x, m, rows), _unflat(b, values, x, k), _unflat(b, v, x, columns, n)]


def pinv(b: Builder, x: Number, kept: Callable[[Value], Value]) -> Number:
    """Pseudo-inverses (Moore, Penrose), by those singular values [..., min(m, n)] that `kept` says are to count."""
    if is_empty(x):
        return numbers.adjoint(b, x)
    u, found, v = svd(b, x, full=False)
    values = numbers.real(found)
    counts, one = kept(values), b.scalar(1.0, values.dtype)
    inverse = b.where(counts, b.div(1.0, b.where(counts, values, one)), b.scalar(0.0, values.dtype))
    scaled = numbers.mul(b, numbers.adjoint(b, v), b.reshape(inverse, (*values.shape[:-1], 1, values.shape[-1])))
    return numbers.matmul(b, scaled, numbers.adjoint(b, u))
