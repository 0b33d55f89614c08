"""Learning rates that change: functions from the number of updates before to the rate of the next one.

    step = onnxc.compile_training(model, ..., schedule=warmed_up(cosine(3e-4, steps=10_000), 500))

Any other function from an int to a float does as well. The rate is an input of the program, so nothing is compiled
again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxc.errors import InputError

Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """The same rate in all steps."""
    _check(lr=lr)
    return lambda k: lr


def linear(lr: float, steps: int, end: float = 0.0) -> Schedule:
    """From `lr` in a straight line to `end`, which it has after `steps` steps and keeps."""
    return polynomial(lr, steps, 1.0, end)


def polynomial(lr: float, steps: int, power: float, end: float = 0.0) -> Schedule:
    """end + (lr - end) (1 - k / steps)^power, and `end` after that."""
    _check(steps, lr=lr, end=end, power=power)
    return lambda k: end + (lr - end) * (1 - min(k, steps) / steps) ** power


def cosine(lr: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a wave from `lr` down to `end`, which it has after `steps` steps and keeps (Loshchilov and Hutter, SGDR)."""
    _check(steps, lr=lr, end=end)
    return lambda k: _wave(lr, end, min(k, steps) / steps)


def cosine_restarts(lr: float, steps: int, growth: int = 1, end: float = 0.0) -> Schedule:
    """`cosine` again and again, each time over `growth` times as many steps as before."""
    _check(steps, lr=lr, end=end)
    _check(growth)

    def rate(k: int) -> float:
        length = steps
        while k >= length:
            k, length = k - length, length * growth
        return cosine(lr, length, end)(k)

    return rate


def exponential(lr: float, factor: float, every: int = 1) -> Schedule:
    """lr factor^(k / every), in jumps: after each `every` steps the rate is multiplied by the factor."""
    _check(every, lr=lr, factor=factor)
    return lambda k: lr * factor ** (k // every)


def piecewise(lr: float, factors: Mapping[int, float]) -> Schedule:
    """`lr`, multiplied from the steps that are named on: ``piecewise(0.1, {3000: 0.1, 6000: 0.1})``."""
    _check(lr=lr)
    for factor in factors.values():
        _check(factor=factor)
    return lambda k: lr * math.prod(f for at, f in factors.items() if k >= at)


def inverse_root(lr: float, steps: int) -> Schedule:
    """Up to `lr` in `steps` steps, then down as 1 / sqrt(k) (Vaswani and others, Attention Is All You Need)."""
    _check(steps, lr=lr)
    return lambda k: lr * min((k + 1) / steps, math.sqrt(steps / (k + 1)))


def one_cycle(lr: float, steps: int, warm: float = 0.3, start: float = 25.0, end: float = 1e4) -> Schedule:
    """Half a wave from lr / start up to `lr`, for the share `warm` of the steps, then another one down to
    lr / start / end (Smith and Topin, Super-Convergence). The formula and the defaults are PyTorch's.
    """
    _check(steps, lr=lr, start=start, end=end)
    if not 0 < warm < 1:
        raise InputError(f"a schedule's share of rising steps is between 0 and 1, and not {warm!r}")
    top = warm * steps - 1

    def rate(k: int) -> float:
        if k <= top:
            return _wave(lr / start, lr, k / top)
        return _wave(lr, lr / start / end, min((k - top) / (steps - 1 - top), 1.0))

    return rate


def warmed_up(schedule: Schedule, steps: int, start: float = 0.0) -> Schedule:
    """A schedule that begins after `steps` steps, in which the rate rises in a straight line from the share `start` of
    the schedule's first.
    """
    _check(steps, start=start)
    return lambda k: schedule(0) * (start + (1 - start) * k / steps) if k < steps else schedule(k - steps)


def joined(schedules: Sequence[Schedule], at: Sequence[int]) -> Schedule:
    """One schedule after the other: the second begins in step at[0], as if that were its first, and so on."""
    if len(schedules) != len(at) + 1 or list(at) != sorted(set(at)) or any(k < 1 for k in at):
        raise InputError(f"{len(schedules)} schedules change over in {len(schedules) - 1} rising steps, not {list(at)}")

    def rate(k: int) -> float:
        turn = bisect.bisect_right(at, k)
        return schedules[turn](k - (at[turn - 1] if turn else 0))

    return rate


def _wave(first: float, last: float, share: float) -> float:
    """From one rate to another along half a wave; 0 <= share <= 1."""
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def _check(steps: Any = 1, **values: Any) -> None:
    if type(steps) is not int or steps < 1:
        raise InputError(f"a schedule has a number of steps from 1 on, and not {steps!r}")
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InputError(f"a schedule's {name} is a finite number from 0 on, and not {value!r}")
