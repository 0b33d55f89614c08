"""Numbers for a person to read."""

from __future__ import annotations

Number = int | str
"""An int, or an expression over dynamic dims as text."""


def size(number: Number) -> str:
    """Bytes for a person to read.

    >>> size(1536), size("512*s0")
    ('1.5 KB', '512*s0 B')
    """
    return f"{count(number, 1024)}B"


def count(number: Number, step: int = 1000) -> str:
    """A number with three digits and a prefix: `1.5 M`.

    >>> count(22_300_000)
    '22.3 M'
    """
    if isinstance(number, str):
        return f"({number}) " if " " in number else f"{number} "
    value = float(number)
    for prefix in ("", "K", "M", "G"):
        if abs(value) < step:
            return f"{value:.0f} {prefix}" if value >= 100 or not prefix else f"{value:.3g} {prefix}"
        value /= step
    return f"{value:.3g} T"


def microseconds(seconds: float) -> str:
    """
    >>> microseconds(1.5e-6), microseconds(0.0123456)
    ('1.5', '12346')
    """
    return f"{seconds * 1e6:.1f}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"
