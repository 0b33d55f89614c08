"""The times of a staged model's steps, for its profile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from onnxc.runtime.compiled_model import CompiledModel

Sizes = Mapping[str, int]


class Timed(Protocol):
    """A program whose kernels can be timed."""

    def timed(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int], dict[str, int]]:
        """Outputs, nanoseconds of each kernel, and sizes."""

    def _run(self, args: tuple[Any, ...]) -> tuple[Any, ...]: ...


class Clock:
    """Adds up the nanoseconds of each row of the report, in one call of the model.

    Attributes:
        model: whose steps are timed; those of models inside of it count for the step that runs them.
        rows: nanoseconds of kernels and of steps on the host; what runs inside of a step counts for itself alone.
        sizes: of symbols, as programs met them last.
    """

    def __init__(self, model: CompiledModel, count: int) -> None:
        self.model = model
        self.rows = [0] * count
        self.sizes: dict[str, int] = {}
        self._inside = 0  # of the step that is running: what has been counted elsewhere

    def host(self, row: int, run: Callable[[], None]) -> None:
        """Runs a step on the host."""
        around, self._inside = self._inside, 0
        start = time.perf_counter_ns()
        run()
        spent = time.perf_counter_ns() - start
        self.rows[row] += spent - self._inside
        self._inside = around + spent

    def part(self, first: int, model: Timed, args: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a program, whose kernels have the rows from `first` on."""
        start = time.perf_counter_ns()
        outputs, times, sizes = model.timed(tuple(args))
        self._inside += time.perf_counter_ns() - start
        for k, spent in enumerate(times):
            self.rows[first + k] += spent
        self.sizes |= sizes
        return outputs


class Arguments(Clock):
    """Notes what programs are given, in place of times: `given`, by the id of the program's model."""

    def __init__(self, model: CompiledModel) -> None:
        super().__init__(model, 0)
        self.given: dict[int, tuple[Any, ...]] = {}

    def host(self, row: int, run: Callable[[], None]) -> None:
        run()

    def part(self, first: int, model: Timed, args: Sequence[Any]) -> tuple[Any, ...]:
        self.given[id(model)] = tuple(args)
        return model._run(tuple(args))


class _Current(threading.local):
    clock: Clock | None = None


current = _Current()
"""The clock of the call that this thread profiles."""
