"""ATen's linear algebra, in models: decompositions of matrices of known sizes as loops.

With `torch.compile` they stay PyTorch's, which says of a matrix that it has no inverse; a model gives infinities or NaN
for it. What callers seldom read (pivots of a solution, say, and whether there is one) is left out: reading that is an
UnsupportedError. Signs of vectors, which mathematics leaves open, may be others than PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_complex import COMPLEX
from onnxc.frontends.torch_fx_table import RULES, Call, alone, aten
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops import matrices, numbers
from onnxc.ops.decompositions import own_type, size_of
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each

F = TypeVar("F", bound=Callable[..., Any])


def of_matrices(*names: str) -> Callable[[F], F]:
    """Registers the decorated function for matrices of real and complex numbers, for models alone."""

    def add(rule: F) -> F:
        before = set(RULES)
        aten(*names)(alone(rule))
        COMPLEX.update({op: RULES[op] for op in set(RULES) - before})
        return rule

    return add


def _swapped(b: Builder, x: Number) -> Number:
    return each(lambda v: b.swap(v, v.rank - 2, v.rank - 1), x)


def _unit(b: Builder, x: Number) -> Number:
    """The identity, in the shape of matrices."""
    n, _ = size_of(x)
    return matrices.identity(b, x, tuple(x.shape[:-2]), n, n)


# ---------------------------------------------------------------- elimination


@of_matrices("linalg_inv_ex")
def inverse(c: Call, x: Number, *, check_errors: bool = False) -> list[Any]:
    return [matrices.solve(c.b, x, _unit(c.b, x)), None]


@of_matrices("_linalg_solve_ex")
def solve(c: Call, x: Number, y: Number, *, left: bool = True, check_errors: bool = False) -> list[Any]:
    b = c.b
    if not left:
        found = _swapped(b, matrices.solve(b, _swapped(b, x), _swapped(b, y)))
    elif y.rank > 1 and y.rank == x.rank - 1 and tuple(y.shape) == tuple(x.shape[:-1]):  # vectors, one for each matrix
        column = each(lambda v: b.reshape(v, (*v.shape, 1)), y)
        found = each(lambda v: b.reshape(v, y.shape), matrices.solve(b, x, column))
    else:
        found = matrices.solve(b, x, y)
    return [found, None, None, None]


@of_matrices("_linalg_det")
def determinant(c: Call, x: Number) -> list[Any]:
    return [matrices.det(c.b, x), None, None]


@of_matrices("_linalg_slogdet")
def log_determinant(c: Call, x: Number) -> list[Any]:
    return [*matrices.slogdet(c.b, x), None, None]


@of_matrices("linalg_solve_triangular")
def solve_triangular(
    c: Call, x: Number, y: Number, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Number:
    """Only the triangle that is named is read."""
    b = c.b
    if unitriangular:
        line = b.iota(x.shape[-1])
        diagonal = b.eq(b.reshape(line, (x.shape[-1], 1)), line)
        x = numbers.where(b, diagonal, b.scalar(1.0, own_type(x)), x)
    if left:
        return matrices.solve_triangular(b, x, y, upper=upper)
    return _swapped(b, matrices.solve_triangular(b, _swapped(b, x), _swapped(b, y), upper=not upper))


def _factor(b: Builder, x: Number, upper: bool) -> tuple[Number, Value]:
    """The triangle, all NaN where a matrix is not positive definite; the order of the first minor of it that is not
    (else 0).
    """
    found, n = matrices.cholesky(b, x, upper=upper), x.shape[-1]
    if n == 0:
        return found, b.full(x.shape[:-2], 0, dtypes.int32)
    line, real = b.iota(n), own_type(x)
    unit = b.eq(b.reshape(line, (n, 1)), line)
    roots = b.reduce("sum", b.where(unit, numbers.real(found), b.scalar(0.0, real)), [found.rank - 1])
    good = b.lt(0.0, roots)
    end = b.size_as(n, dtypes.int64)
    first = b.reduce("min", b.where(good, end, line), [roots.rank - 1])
    fails = b.lt(first, end)
    whole = b.reshape(fails, (*fails.shape, 1, 1))
    return numbers.where(b, whole, b.scalar(math.nan, real), found), b.where(fails, b.add(first, 1), 0)


@of_matrices("linalg_cholesky_ex")
def cholesky_ex(c: Call, x: Number, *, upper: bool = False, check_errors: bool = False) -> list[Any]:
    return [*_factor(c.b, x, upper)]


@of_matrices("cholesky")
def cholesky(c: Call, x: Number, upper: bool = False) -> Number:
    return _factor(c.b, x, upper)[0]


@of_matrices("cholesky_solve")
def cholesky_solve(c: Call, y: Number, factor: Number, upper: bool = False) -> Number:
    b = c.b
    lower = numbers.adjoint(b, factor) if upper else factor
    first = matrices.solve_triangular(b, lower, y, upper=False)
    return matrices.solve_triangular(b, numbers.adjoint(b, lower), first, upper=True)


@of_matrices("cholesky_inverse")
def cholesky_inverse(c: Call, factor: Number, upper: bool = False) -> Number:
    return cholesky_solve(c, _unit(c.b, factor), factor, upper)


# ---------------------------------------------------------------- orthogonal factors


@of_matrices("linalg_qr")
def qr(c: Call, x: Number, mode: str = "reduced") -> list[Any]:
    if mode == "r":
        return [numbers.zeros(c.b, (0,), x.dtype), matrices.qr(c.b, x, complete=False)[1]]
    return matrices.qr(c.b, x, complete=mode == "complete")


@of_matrices("_linalg_eigh")
def eigh(c: Call, x: Number, uplo: str = "L", compute_v: bool = True) -> list[Any]:
    values, vectors = matrices.eigh(c.b, numbers.adjoint(c.b, x) if uplo.upper() == "U" else x)
    return [values, vectors if compute_v else numbers.zeros(c.b, (0,), x.dtype)]


@of_matrices("_linalg_svd")
def svd(c: Call, x: Number, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> list[Any]:
    u, values, v = matrices.svd(c.b, x, full=full_matrices and compute_uv)
    none = numbers.zeros(c.b, (0,), x.dtype)
    return [u, values, v] if compute_uv else [none, values, none]


@of_matrices("linalg_pinv.atol_rtol_tensor")
def pinv(
    c: Call, x: Number, *, atol: Value | None = None, rtol: Value | None = None, hermitian: bool = False
) -> Number:
    b = c.b
    if hermitian:
        raise UnsupportedError("a pseudo-inverse that reads one triangle of a matrix")
    m, n = size_of(x)
    real = own_type(x)
    by_size = b.scalar(max(m, n) * float(np.finfo(real.numpy).eps), real)
    given = [None if v is None else b.reshape(b.cast(v, real), (*v.shape, 1)) for v in (atol, rtol)]

    def kept(values: Value) -> Value:
        bound, share = given
        if share is None:  # PyTorch's, for which an absolute bound is enough
            share = by_size if bound is None else b.where(b.lt(0.0, bound), b.scalar(0.0, real), by_size)
        least = b.mul(b.reduce("max", values, [values.rank - 1], True), share)
        return b.lt(least if bound is None else b.max(least, bound), values)

    return matrices.pinv(b, x, kept)
