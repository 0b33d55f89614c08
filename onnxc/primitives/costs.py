"""What primitives cost to compute: the one table by which the planner, code generation and If-conversion go."""

from __future__ import annotations

_CYCLES = {
    "exp": 8, "log": 8, "tanh": 10, "erf": 12, "sin": 10, "cos": 10, "pow": 20, "div": 4, "sqrt": 4,
    "tan": 20, "asin": 20, "acos": 20, "atan": 20, "sinh": 20, "cosh": 20, "asinh": 20, "acosh": 20,
    "atanh": 20, "threefry": 20, "mod": 8, "fmod": 8, "gather": 3, "gather_nd": 3, "gather_elements": 3,
}  # fmt: skip


def cycles(op: str) -> int:
    """Rough cycles for a vector of elements, relative to an addition.

    >>> cycles("add"), cycles("exp")
    (1, 8)
    """
    return _CYCLES.get(op, 1)
