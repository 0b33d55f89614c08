"""The autotuner: measures the kernels between which a compile of a model can choose.

Each candidate of each choice is measured inside the whole model, where its operands are as warm as they will be in
use: the model is compiled once for the first candidates of all choices, once for the second ones, and so on, and each
of these variants runs under the profiler, in turns with the cost model's. A variant whose answers are not those of the
cost model's is halved until the kernel that is to blame is alone; that candidate is refused.

It knows nothing of targets: a function makes a variant for given decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxc.choices import Choice
from onnxc.errors import CudaError, LimitError, OnnxcError
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.tuned import Row, joined

Array = np.ndarray[Any, Any]
Decided = Mapping[str, str]  # a candidate by subject
_COMPARED = 1 << 22  # elements of an output, about
# What the driver says of a kernel that it cannot run; others are as good as before.
_HARMLESS = ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_IMAGE")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Method:
    """How variants are measured.

    Attributes:
        batch: kernels, at least, that are compiled side by side.
        together: those that take turns with each other, and with the cost model's; all of them are in memory.
        rounds: turns of each.
        runs: of a turn.
        median: whether a turn's median counts, or its best run.
        tolerance: of the answers, as a share of their norm.
    """

    batch: int
    together: int
    rounds: int
    runs: int
    median: bool
    tolerance: float


@dataclass
class Tuner:
    """Measures one model.

    Args:
        variant: compiles the model with these decisions, and with the cost model's of all other choices.
        prepare: may compile several variants side by side, before each of them is asked for.
        feeds: inputs by name.
        known: rows of an earlier measurement: what they have is not measured again.
        seconds: after so many no further variant is begun; None for no end.
        keep: is called with the rows so far, now and then, and at the end (also when the user stops it).
    """

    variant: Callable[[Decided], CompiledModel]
    feeds: Mapping[str, Array]
    method: Method
    keep: Callable[[Mapping[str, Row]], None]
    prepare: Callable[[Sequence[Decided]], None] = lambda batch: None
    known: Mapping[str, Row] = field(default_factory=dict)
    seconds: float | None = None
    tell: Progress = lambda stage: None
    choices: dict[str, Choice] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    refused: dict[str, set[str]] = field(default_factory=dict)

    def run(self) -> dict[str, Row]:
        """The rows of all choices that the model has.

        Raises:
            OnnxcError: the model cannot be compiled or run with the cost model's choices.
        """
        start = time.monotonic()
        first = self.variant({})
        self.tell("cost model's choices")
        self.choices = choices_of(first)
        turns = list(self._turns())
        if not turns:
            return self.rows()
        first.seed(0)  # random operators draw the same in all variants
        answers = first.run(None, self.feeds)
        done = 0
        try:
            for batch in self._batches(turns):
                if self._is_over(start):
                    break
                self.prepare(batch)
                for some in _pieces(batch, self.method.together):
                    if self._is_over(start):
                        break
                    self._take_turns(first, some, answers)
                    done += len(some)
                    limit = "" if self.seconds is None else f" of {self.seconds:.0f}"
                    self.tell(f"{done} of {len(turns)} candidates ({time.monotonic() - start:.0f}{limit} s)")
                self.keep(self.rows())
        finally:
            self.keep(self.rows())
        return self.rows()

    def _is_over(self, start: float) -> bool:
        return self.seconds is not None and time.monotonic() - start >= self.seconds

    def _batches(self, turns: Sequence[Decided]) -> Iterator[list[Decided]]:
        """Variants that are compiled side by side."""
        batch: list[Decided] = []
        for decided in turns:
            batch.append(decided)
            if sum(map(len, batch)) >= self.method.batch:
                yield batch
                batch = []
        if batch:
            yield batch

    def rows(self) -> dict[str, Row]:
        """What is known now of the model's choices."""
        found = {}
        for s, choice in self.choices.items():
            if s in self.known or s in self.times:
                times, refused = self.times.get(s, {}), self.refused.get(s, ())
                found[s] = joined(self.known.get(s), times, refused, choice.chosen, choice.candidates)
        return found

    def _turns(self) -> Iterator[dict[str, str]]:
        """The decisions of each variant: of each choice a candidate that was not tried yet."""
        left = {}
        for s, choice in self.choices.items():
            others = [c for c in choice.candidates if c != choice.chosen]
            left[s] = self.known[s].lacks(others) if s in self.known else others
        for n in range(max(map(len, left.values()), default=0)):
            yield {s: names[n] for s, names in left.items() if n < len(names)}

    def _take_turns(self, first: CompiledModel, some: Sequence[Decided], answers: Sequence[Any]) -> None:
        models = [first, *(m for decided in some for m in self._right(decided, answers))]
        for _ in range(self.method.rounds):
            for model in models:
                self._time(model)

    def _right(self, decided: Decided, answers: Sequence[Any]) -> list[CompiledModel]:
        """Variants of these decisions, without those that answer wrongly."""
        try:
            model = self.variant(decided)
            taken = {s: c.chosen for s, c in choices_of(model).items()}
            for s, name in decided.items():
                if taken.get(s) != name:  # it did not compile
                    self.refused.setdefault(s, set()).add(name)
            model.seed(0)
            if agree(model.run(None, self.feeds), answers, self.method.tolerance):
                return [model]
        except LimitError:
            raise  # it is no kernel's fault that memory is short
        except CudaError as error:
            if getattr(error, "code", "") not in _HARMLESS:
                raise  # the GPU's state may be lost
        except OnnxcError:
            pass
        if len(decided) <= 1:
            for s, name in decided.items():
                self.refused.setdefault(s, set()).add(name)
            return []
        pairs = list(decided.items())
        half = len(pairs) // 2
        return self._right(dict(pairs[:half]), answers) + self._right(dict(pairs[half:]), answers)

    def _time(self, model: CompiledModel) -> None:
        """Adds the time of each choice's kernels: of several kernels with one subject, the mean."""
        found: dict[tuple[str, str], list[float]] = {}
        for kernel in model.profile(self.feeds, runs=self.method.runs).kernels:
            if kernel.choice and kernel.choice.subject in self.choices:
                assert kernel.times is not None
                seconds = kernel.times.median if self.method.median else kernel.times.best
                found.setdefault((kernel.choice.subject, kernel.choice.chosen), []).append(seconds)
        for (subject, name), each in found.items():
            seconds = sum(each) / len(each)
            times = self.times.setdefault(subject, {})
            times[name] = min(seconds, times.get(name, seconds))


def _pieces(batch: Sequence[Decided], size: int) -> Iterator[Sequence[Decided]]:
    return (batch[start : start + size] for start in range(0, len(batch), size))


def choices_of(model: CompiledModel) -> dict[str, Choice]:
    """The choices of a model among several candidates, by subject."""
    found = (k.choice for k in model.explain().kernels)
    return {c.subject: c for c in found if c is not None and len(c.candidates) > 1}


def agree(outputs: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> bool:
    """Whether floats are equal within a share of their norm, NaN and infinities are at the same places, and all but a
    few integers are equal (the best of equals may be another). Of large outputs a part is compared.

    >>> agree([np.array([1.0, np.nan])], [np.array([1.0001, np.nan])], 1e-3)
    True
    """
    for p, q in zip(outputs, wanted, strict=True):
        if p.shape != q.shape or p.dtype != q.dtype:
            return False
        a, b = (_sampled(v) for v in (p, q))
        if a.dtype.kind not in "fcV":
            if a.size and np.mean(a != b) > max(tolerance, 1e-2):
                return False
            continue
        x, y = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (a, b))
        finite = np.isfinite(y)
        if not np.array_equal(np.isfinite(x), finite) or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return False
        if np.linalg.norm(x[finite] - y[finite]) > tolerance * np.linalg.norm(y[finite]):
            return False
    return True


def _sampled(array: Array) -> Array:
    """Elements at equal, odd distances, so that every column of a matrix is met, and every tile of a kernel."""
    step = array.size // _COMPARED
    return array.reshape(-1)[:: step | 1] if step else array.reshape(-1)
