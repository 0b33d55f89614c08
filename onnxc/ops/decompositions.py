"""Decompositions of matrices [batch, m, n], real or complex, as loops over rows, columns and rotations.

Sizes of the matrices are known when a program is compiled. Nothing here checks a matrix: of one that has no inverse, or
no Cholesky factor, the result has infinities or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.errors import NeedsSizesError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops import numbers, reals
from onnxc.ops.numbers import parts
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Complex, Number, each

MOST_SWEEPS = 40  # of rotations; they converge after about ten


def size_of(x: Number) -> tuple[int, int]:
    """Rows and columns of matrices, which are known."""
    m, n = x.shape[-2:]
    if not isinstance(m, int) or not isinstance(n, int):
        raise NeedsSizesError(f"a decomposition of matrices of dynamic size, [{m}, {n}]", m, n)
    return m, n


def flatten(b: Builder, x: Number) -> Number:
    """[..., m, n] as [batch, m, n]."""
    batch = numbers.real(x).t.with_shape(x.shape[:-2]).size
    return each(lambda v: b.reshape(v, (batch, *v.shape[-2:])), x)


Body = Callable[[Builder, list[Number], Value], Sequence[Number]]


def loop(b: Builder, states: Sequence[Number], trip: int, body: Body, going: bool = False) -> list[Number]:
    """Runs `body(builder, states, number of the step) -> states`. With `going`, the last state is a bool: to go on."""
    widths = [len(parts(s)) for s in states]

    def step(inner: Builder, flat: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        after = body(inner, _packed(flat, widths), slices[0])
        return [p for s in after for p in parts(s)], []

    flat = [p for s in states for p in parts(s)]
    found, _ = b.scan(flat, [b.iota(trip)], trip, step, len(flat) - 1 if going else None)
    return _packed(found, widths)


def _packed(flat: Sequence[Value], widths: Sequence[int]) -> list[Number]:
    rest = iter(flat)
    return [Complex(next(rest), next(rest)) if w == 2 else next(rest) for w in widths]


def _line(b: Builder, size: int, axis: int) -> Value:
    """0, 1, ... along an axis of [batch, m, n]."""
    return b.reshape(b.iota(size), tuple(size if k == axis else 1 for k in range(3)))


def _at(b: Builder, x: Number, where: Value, axis: int) -> Number:
    """The row (axis 1) or column (axis 2) that a mask selects, as [batch, 1, n] or [batch, m, 1]."""
    return numbers.total(b, each(lambda v: b.where(where, v, b.scalar(0, v.dtype)), x), [axis], True)


def _power(b: Builder, x: Number) -> Value:
    """The power of two at or below the greatest element of each matrix: [batch, 1, 1]. Dividing by it is exact."""
    most = b.reduce("max", _largest(b, x), [1, 2], True)
    integer = {32: dtypes.int32, 64: dtypes.int64}[most.dtype.bits]
    mask = 0x7F800000 if most.dtype.bits == 32 else 0x7FF0000000000000
    found = b.bitcast(b.binary("bitand", b.bitcast(most, integer), b.scalar(mask, integer)), most.dtype)
    usual = b.and_(b.lt(0.0, found), reals.isfinite(b, found))
    return b.detach(b.where(usual, found, b.scalar(1.0, found.dtype)))


def _largest(b: Builder, x: Number) -> Value:
    return b.max(b.abs(x.re), b.abs(x.im)) if isinstance(x, Complex) else b.abs(x)


# ---------------------------------------------------------------- elimination


def eliminate(b: Builder, x: Number, rhs: Number | None) -> tuple[Number, Number | None, Value]:
    """Rows eliminated with pivots: upper triangles, right-hand sides, signs [batch, 1, 1] of the exchanges."""
    n, _ = size_of(x)
    rows = _line(b, n, 1)
    columns = _line(b, n, 2)
    one = b.full((x.shape[0], 1, 1), 1.0, numbers.part_type(x.dtype))

    def body(i: Builder, states: list[Number], k: Value) -> list[Number]:
        a, sign, *rest = states
        column = _at(i, a, i.eq(columns, k), 2)
        size = i.where(i.lt(rows, k), i.scalar(-1.0, one.dtype), numbers.absolute(i, column))
        size = i.where(i.isnan(size), i.scalar(math.inf, one.dtype), size)
        pivot = i.reshape(i.one("argmax", size, axis=1, last=False), (x.shape[0], 1, 1))
        here, there = i.eq(rows, k), i.eq(rows, pivot)
        sign = i.where(i.eq(pivot, k), numbers.real(sign), i.neg(numbers.real(sign)))

        def exchanged(v: Number) -> tuple[Number, Number]:
            own, best = _at(i, v, here, 1), _at(i, v, there, 1)
            return numbers.where(i, here, best, numbers.where(i, there, own, v)), best

        a, best = exchanged(a)
        top = _at(i, best, i.eq(columns, k), 2)
        column = _at(i, a, i.eq(columns, k), 2)
        none = numbers.eq(i, top, i.scalar(0.0, one.dtype))
        factor = numbers.div(i, column, numbers.where(i, none, one, top))
        zero = i.scalar(0.0, one.dtype)
        factor = numbers.where(i, i.and_(i.lt(k, rows), i.not_(none)), factor, zero)
        out: list[Number] = [numbers.sub(i, a, numbers.mul(i, factor, best)), sign]
        for v in rest:
            v, best = exchanged(v)
            out.append(numbers.sub(i, v, numbers.mul(i, factor, best)))
        return out

    found = loop(b, [x, one, *([] if rhs is None else [rhs])], n, body)
    return found[0], None if rhs is None else found[2], numbers.real(found[1])


def solve(b: Builder, x: Number, rhs: Number) -> Number:
    """y with x y = rhs: elimination, then from the last row up."""
    if isinstance(x, Complex) or isinstance(rhs, Complex):
        x, rhs = numbers.to_complex(b, x), numbers.to_complex(b, rhs)
    upper, right, _ = eliminate(b, x, rhs)
    assert right is not None
    return solve_upper(b, upper, right)


def solve_upper(b: Builder, upper: Number, right: Number) -> Number:
    """y with upper y = right, both real or both complex, from the last row up. Reads what is on and above the
    diagonal.
    """
    n, _ = size_of(upper)
    rows, columns = _line(b, n, 1), _line(b, n, 2)

    def body(i: Builder, states: list[Number], k: Value) -> list[Number]:
        (y,) = states
        k = i.sub(n - 1, k)
        here = i.eq(rows, k)
        row = _at(i, upper, here, 1)
        own = _at(i, row, i.eq(columns, k), 2)
        known = numbers.where(i, i.lt(k, columns), row, i.scalar(0.0, numbers.part_type(row.dtype)))
        known = each(lambda v: i.swap(v, 1, 2), known)
        below = numbers.where(i, i.lt(k, rows), y, i.scalar(0.0, own_type(row)))
        part = numbers.total(i, numbers.mul(i, known, below), [1], True)
        value = numbers.div(i, numbers.sub(i, _at(i, y, here, 1), part), own)
        return [numbers.where(i, here, value, y)]

    return loop(b, [right], n, body)[0]


def own_type(x: Number) -> Any:
    """The dtype of a matrix, or of its parts, where these are complex."""
    return numbers.part_type(x.dtype)


def diagonal(b: Builder, x: Number) -> Number:
    """[batch, m, n] to [batch, min(m, n)]."""
    m, n = size_of(x)
    k = min(m, n)
    rows = b.eq(_line(b, m, 1), _line(b, n, 2))
    found = _at(b, x, rows, 1)
    return each(lambda v: b.slice(b.reshape(v, (v.shape[0], n)), 1, 0, k), found)


def cholesky(b: Builder, x: Number) -> Number:
    """Lower triangles l with l l* = x, column by column. Reads what is on and below the diagonal."""
    n, _ = size_of(x)
    rows, columns = _line(b, n, 1), _line(b, n, 2)
    zero = b.scalar(0.0, own_type(x))

    def body(i: Builder, states: list[Number], k: Value) -> list[Number]:
        a, out = states
        here = i.eq(columns, k)
        column = _at(i, a, here, 2)
        root = i.sqrt(numbers.real(_at(i, column, i.eq(rows, k), 1)))
        column = numbers.where(i, i.lt(k, rows), numbers.div(i, column, root), zero)
        out = numbers.where(i, here, numbers.where(i, i.eq(rows, k), root, column), out)
        return [numbers.sub(i, a, numbers.mul(i, column, numbers.adjoint(i, column))), out]

    return loop(b, [x, numbers.zeros(b, x.shape, x.dtype)], n, body)[1]


# ---------------------------------------------------------------- reflections


def qr(b: Builder, x: Number, complete: bool) -> tuple[Number, Number]:
    """q, with orthonormal columns, and upper triangles r, by reflections (Householder)."""
    m, n = size_of(x)
    k = min(m, n)
    rows, columns = _line(b, m, 1), _line(b, n, 2)
    scale = _power(b, x)
    zero, dtype = b.scalar(0.0, own_type(x)), own_type(x)
    wide = _line(b, k, 2)

    def reduce(i: Builder, states: list[Number], step: Value) -> list[Number]:
        a, kept = states
        column = numbers.where(i, i.le(step, rows), _at(i, a, i.eq(columns, step), 2), zero)
        norm = i.sqrt(i.reduce("sum", numbers.square_abs(i, column), [1], True))
        head = _at(i, column, i.eq(rows, step), 1)
        turn = numbers.mul(i, numbers.phase(i, head), norm)
        v = numbers.where(i, i.eq(rows, step), numbers.add(i, head, turn), column)
        size = i.sqrt(i.reduce("sum", numbers.square_abs(i, v), [1], True))
        v = numbers.div(i, v, i.where(i.eq(size, 0.0), i.scalar(1.0, dtype), size))
        return [_reflected(i, v, a), numbers.where(i, i.eq(wide, step), v, kept)]

    start = numbers.zeros(b, (x.shape[0], m, k), x.dtype)
    r, kept = loop(b, [numbers.div(b, x, scale), start], k, reduce)
    width = m if complete else k
    eye = b.cast(b.eq(rows, _line(b, width, 2)), dtype)
    first = numbers.add(b, numbers.zeros(b, (x.shape[0], m, width), x.dtype), eye)

    def expand(i: Builder, states: list[Number], step: Value) -> list[Number]:
        v = _at(i, kept, i.eq(wide, i.sub(k - 1, step)), 2)
        return [_reflected(i, v, states[0])]

    (q,) = loop(b, [first], k, expand)
    height = m if complete else k
    r = each(lambda v: b.slice(v, 1, 0, height), r)
    r = numbers.where(b, b.le(_line(b, height, 1), columns), r, zero)
    return q, numbers.mul(b, r, scale)


def _reflected(b: Builder, v: Number, a: Number) -> Number:
    """a - 2 v (v* a)"""
    along = numbers.total(b, numbers.mul(b, numbers.conj(b, v), a), [1], True)
    return numbers.sub(b, a, numbers.mul(b, numbers.mul(b, v, along), b.scalar(2.0, own_type(a))))


# ---------------------------------------------------------------- rotations


def _rounds(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of 0, ..., n - 1 (n even) such that each meets each: [n - 1, n], of a row the first half with the second;
    and where each number stands in its row.
    """
    ring = list(range(n))
    out = []
    for _ in range(max(n - 1, 1)):
        out.append(ring[: n // 2] + ring[n // 2 :][::-1])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    pairs = np.array(out)
    return pairs, np.argsort(pairs, axis=1)


class _Pairs:
    """The pairs of one round, as index vectors, and what reads and writes rows or columns by them."""

    def __init__(self, i: Builder, tables: tuple[np.ndarray, np.ndarray], step: Value) -> None:
        pairs, places = tables
        count, n = pairs.shape
        number = i.binary("mod", step, i.scalar(count, dtypes.int64))
        self.i, self.n, self.half = i, n, n // 2
        self.row = i.gather(i.constant(pairs.astype(np.int64)), number, 0)
        self.place = i.gather(i.constant(places.astype(np.int64)), number, 0)
        self.last = i.eq(number, count - 1)

    def split(self, x: Number, axis: int) -> tuple[Number, Number]:
        """The lines that are the first of a pair, and the second ones."""
        i = self.i
        lines = each(lambda v: i.gather(v, self.row, axis), x)
        first, second = (
            each(lambda v, at=at: i.slice(v, axis, at, at + self.half), lines)  # type: ignore[misc]
            for at in (0, self.half)
        )
        return first, second

    def joined(self, first: Number, second: Number, axis: int) -> Number:
        """The lines in their places again."""
        lines = numbers.concat(self.i, [first, second], axis)
        return each(lambda v: self.i.gather(v, self.place, axis), lines)

    def positions(self, axis: int) -> tuple[Value, Value]:
        """The numbers of the lines, along an axis of [batch, m, n]."""
        found = self.i.reshape(self.row, tuple(self.n if k == axis else 1 for k in range(3)))
        first, second = self.i.split(found, axis, [self.half, self.half])
        return first, second


def _rotation(b: Builder, p: Value, q: Value, cross: Number, still: Value) -> tuple[Value, Value, Number]:
    """Cosine, sine and turn of the rotation that makes `cross` vanish between diagonal elements p and q."""
    size = numbers.absolute(b, cross)
    one = b.scalar(1.0, p.dtype)
    ratio = b.div(b.sub(q, p), b.mul(b.where(still, one, size), 2.0))
    tan = b.div(one, b.add(b.abs(ratio), reals.hypot(b, ratio, b.full(ratio.shape, 1.0, p.dtype))))
    tan = b.where(b.lt(ratio, 0.0), b.neg(tan), tan)
    tan = b.where(still, b.scalar(0.0, p.dtype), tan)
    cos = b.div(one, b.sqrt(b.add(b.mul(tan, tan), 1.0)))
    return cos, b.mul(tan, cos), numbers.conj(b, numbers.phase(b, cross))


def _rotated(b: Builder, p: Number, q: Number, cos: Value, sin: Value, turn: Number) -> tuple[Number, Number]:
    q = numbers.mul(b, q, turn)
    first = numbers.sub(b, numbers.mul(b, p, cos), numbers.mul(b, q, sin))
    return first, numbers.add(b, numbers.mul(b, p, sin), numbers.mul(b, q, cos))


def _even(b: Builder, x: Number, axes: Sequence[int]) -> Number:
    """With a line of zeros more along axes of odd size."""
    high = [int(k in axes and int(d) % 2) for k, d in enumerate(x.shape)]
    return each(lambda v: b.pad(v, [0] * v.rank, high, b.scalar(0, v.dtype)), x)


def _eye(b: Builder, x: Number, n: int) -> Number:
    eye = b.cast(b.eq(_line(b, n, 1), _line(b, n, 2)), own_type(x))
    return numbers.add(b, numbers.zeros(b, (x.shape[0], n, n), x.dtype), eye)


def _epsilon(dtype: Any) -> float:
    return float(np.finfo(dtype.numpy).eps)


def eigh(b: Builder, x: Number) -> tuple[Value, Number]:
    """Eigenvalues [batch, n], from the least on, and eigenvectors [batch, n, n], in columns, by rotations (Jacobi)."""
    n, _ = size_of(x)
    scale = _power(b, x)
    a = _even(b, numbers.div(b, _hermitian(b, x, n), scale), (1, 2))
    wide = n + n % 2
    tables = _rounds(wide)
    off = b.not_(b.eq(_line(b, wide, 1), _line(b, wide, 2)))
    least = 2 * _epsilon(own_type(x))  # what is less is rounding

    def body(i: Builder, states: list[Number], step: Value) -> list[Number]:
        a, v, _ = states
        by = _Pairs(i, tables, step)
        first, second = by.split(a, 1)
        p_at, q_at = by.positions(2)
        columns = _line(i, wide, 2)
        p_at, q_at = (i.reshape(at, (1, by.half, 1)) for at in (p_at, q_at))
        p, q = numbers.real(_at(i, first, i.eq(columns, p_at), 2)), numbers.real(_at(i, second, i.eq(columns, q_at), 2))
        cross = _at(i, first, i.eq(columns, q_at), 2)
        still = i.le(numbers.absolute(i, cross), i.scalar(least, p.dtype))
        cos, sin, turn = _rotation(i, p, q, cross, still)
        turn = numbers.where(i, still, i.scalar(1.0, p.dtype), turn)
        a = by.joined(*_rotated(i, first, second, cos, sin, numbers.conj(i, turn)), 1)
        across = [each(lambda u: i.swap(u, 1, 2), t) for t in (cos, sin, turn)]
        c, s = numbers.real(across[0]), numbers.real(across[1])
        a = by.joined(*_rotated(i, *by.split(a, 2), c, s, across[2]), 2)
        v = by.joined(*_rotated(i, *by.split(v, 2), c, s, across[2]), 2)
        rest = i.reduce("max", i.where(off, _largest(i, a), i.scalar(0.0, own_type(x))), [0, 1, 2])
        return [a, v, i.lt(i.scalar(least, rest.dtype), rest)]

    go = b.full((), True, dtypes.boolean)
    a, v, _ = loop(b, [a, _eye(b, x, wide), go], MOST_SWEEPS * len(tables[0]), body, going=True)
    values = b.slice(numbers.real(diagonal(b, a)), 1, 0, n)
    v = each(lambda u: b.slice(b.slice(u, 1, 0, n), 2, 0, n), v)
    values = b.mul(values, b.reshape(scale, (x.shape[0], 1)))
    values, order = b.emit("top_k", [values], {"k": n, "axis": 1, "largest": False})
    return values, _columns(b, v, order)


def _hermitian(b: Builder, x: Number, n: int) -> Number:
    """By the elements on and below the diagonal."""
    lower = b.le(_line(b, n, 2), _line(b, n, 1))
    found = numbers.where(b, lower, x, numbers.adjoint(b, x))
    if isinstance(found, Complex):
        same = b.eq(_line(b, n, 1), _line(b, n, 2))
        return Complex(found.re, b.where(same, b.scalar(0.0, found.im.dtype), found.im))
    return found


def _columns(b: Builder, x: Number, order: Value) -> Number:
    """The columns of each matrix in an order [batch, n]."""
    index = b.expand(b.reshape(order, (order.shape[0], 1, order.shape[1])), x.shape)
    return each(lambda v: b.one("gather_elements", v, index, axis=2), x)


def svd(b: Builder, x: Number, full: bool) -> tuple[Number, Value, Number]:
    """u, singular values [batch, k] from the greatest on, and v*, by rotations of the columns (Hestenes)."""
    m, n = size_of(x)
    if m < n:
        u, values, v = svd(b, numbers.adjoint(b, x), full)
        return numbers.adjoint(b, v), values, numbers.adjoint(b, u)
    scale = _power(b, x)
    w, v = _orthogonal(b, numbers.div(b, x, scale), n)
    sizes = b.sqrt(b.reduce("sum", numbers.square_abs(b, w), [1]))
    values, order = b.emit("top_k", [sizes], {"k": n, "axis": 1, "largest": True})
    w, v = _columns(b, w, order), _columns(b, v, order)
    q, r = qr(b, w, full)
    turn = numbers.phase(b, diagonal(b, r))
    turn = each(lambda t: b.reshape(t, (x.shape[0], 1, n)), turn)
    if full and m > n:
        turn = numbers.concat(b, [turn, b.full((x.shape[0], 1, m - n), 1.0, own_type(x))], 2)
    return numbers.mul(b, q, turn), b.mul(values, b.reshape(scale, (x.shape[0], 1))), numbers.adjoint(b, v)


def _orthogonal(b: Builder, x: Number, n: int) -> tuple[Number, Number]:
    """x v with orthogonal columns, and v."""
    w = _even(b, x, (2,))
    wide = n + n % 2
    tables = _rounds(wide)
    epsilon = _epsilon(own_type(x))
    zero = b.scalar(0.0, own_type(x))

    def body(i: Builder, states: list[Number], step: Value) -> list[Number]:
        w, v, worst, _ = states
        by = _Pairs(i, tables, step)
        first, second = by.split(w, 2)
        p, q = (i.reduce("sum", numbers.square_abs(i, t), [1], True) for t in (first, second))
        cross = numbers.total(i, numbers.mul(i, numbers.conj(i, first), second), [1], True)
        size, room = numbers.absolute(i, cross), i.sqrt(i.mul(p, q))
        # Columns far below the greatest are noise: they need not be orthogonal to each other.
        greatest = i.reduce("max", i.max(p, q), [1, 2], True)
        noise = i.le(i.min(p, q), i.mul(greatest, epsilon * epsilon * 1e-2))
        still = i.or_(i.le(size, i.mul(room, epsilon)), noise)
        cos, sin, turn = _rotation(i, p, q, cross, still)
        turn = numbers.where(i, still, i.scalar(1.0, p.dtype), turn)
        w = by.joined(*_rotated(i, first, second, cos, sin, turn), 2)
        v = by.joined(*_rotated(i, *by.split(v, 2), cos, sin, turn), 2)
        moved = i.reduce("max", i.cast(i.not_(still), zero.dtype), [0, 1, 2])
        seen = i.max(numbers.real(worst), moved)
        go = i.or_(i.not_(by.last), i.lt(0.0, seen))
        return [w, v, i.where(by.last, i.scalar(0.0, zero.dtype), seen), go]

    go = b.full((), True, dtypes.boolean)
    trip = MOST_SWEEPS * len(tables[0])
    w, v, _, _ = loop(b, [w, _eye(b, x, wide), b.full((), 0.0, zero.dtype), go], trip, body, going=True)
    w = each(lambda t: b.slice(t, 2, 0, n), w)
    return w, each(lambda t: b.slice(b.slice(t, 1, 0, n), 2, 0, n), v)
