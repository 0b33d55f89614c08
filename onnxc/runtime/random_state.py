"""What a model's random operators draw from: a seed, and the number of the call."""

from __future__ import annotations

import os
import secrets
from itertools import count
from typing import Any

import numpy as np

from onnxc.errors import InputError

_MOST = 1 << 64
_forks = count()
_process = next(_forks)  # changes in a process that was forked off


def _forked() -> None:
    global _process
    _process = next(_forks)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Draws:
    """A sequence of states, one for each call: none is given out twice, whatever threads call.

    Args:
        seed: of all states; by default one from the system's entropy, another in each process.
        calls: the number of the first.

    >>> draws = Draws(7)
    >>> draws.next(), draws.next()
    (array([7, 0], dtype=uint64), array([7, 1], dtype=uint64))
    """

    def __init__(self, seed: int | None = None, calls: int = 0) -> None:
        given: Any
        for name, given in (("seed", seed), ("calls", calls)):
            if given is None and name == "seed":
                continue
            if not (isinstance(given, (int, np.integer)) and 0 <= given < _MOST):
                raise InputError(f"{name} is an integer from 0 to 2^64 - 1, and not {given!r}")
        self.seed = secrets.randbits(64) if seed is None else int(seed)
        self._process = _process if seed is None else None
        self._calls = count(int(calls))  # whose steps are atomic

    def next(self) -> np.ndarray[Any, Any]:
        """The state of a call: uint64[2], the seed and the call's number."""
        if self._process is not None and self._process != _process:
            self.seed, self._process = secrets.randbits(64), _process
        return np.array((self.seed, next(self._calls)), np.uint64)
