"""The table of steps: functions that emit a node or a few into a `Grower`, with weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.grow import Grower

Step = Callable[[Grower], Any]
STEPS: list[tuple[int, Step]] = []


def step(weight: int = 1) -> Callable[[Step], Step]:
    """Adds the decorated function to the table."""

    def add(take: Step) -> Step:
        STEPS.append((weight, take))
        return take

    return add
