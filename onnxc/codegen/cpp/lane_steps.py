"""Steps from lane to lane of indices that divide the vector loop.

A vector begins at a multiple of its length. So `i % 32` counts on through the 16 lanes of each, and `i // 32` is the same
number in all of them.
"""

from __future__ import annotations

from onnxc.ir.expr import Call, Dim, Expr, Symbol, of, prod, symbols


def aligned_step(d: Dim, vector: Symbol, lanes: int) -> Dim | None:
    """What an expression grows by from lane to lane of a vector that begins at a multiple of `lanes`; None where its
    lanes are not evenly spaced.
    """
    total: Dim = 0
    for mono, coef in d.terms if isinstance(d, Expr) else ():
        moving = [a for a in mono if vector in symbols(of(a))]
        if len(moving) > 1:
            return None
        if moving:
            (atom,) = moving
            step = _call_step(atom, vector, lanes) if isinstance(atom, Call) else 1
            if step is None:
                return None
            total = total + prod(of(a) for a in mono if a != atom) * coef * step
    return total


def _call_step(call: Call, vector: Symbol, lanes: int) -> Dim | None:
    x, n = call.args
    step = aligned_step(x, vector, lanes)
    if step == 0 and aligned_step(n, vector, lanes) == 0:
        return 0
    if call.op not in ("floordiv", "mod") or not isinstance(step, int) or not isinstance(n, int):
        return None
    reach = abs(step) * lanes  # of a vector
    if step <= 0 or n % reach or any(c * (lanes if mono == (vector,) else 1) % reach for mono, c in _terms(x)):
        return None
    return step if call.op == "mod" else 0


def _terms(d: Dim) -> tuple[tuple[tuple[object, ...], int], ...]:
    return d.terms if isinstance(d, Expr) else (((), d),)
