"""A choice between ways to compute a kernel: code generators make it, reports show it, the tuner measures it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One decision: what for (a readable text that says all that its speed depends on), what, and among what."""

    subject: str
    chosen: str
    candidates: tuple[str, ...]
