"""Models that are several programs, with steps on the host between them: data decides about sizes or about what runs,
or values are no tensors.

A call walks through a plan (`onnxc.staging.plan`; its steps are in `staged_steps.py`, and those that are compiled when
the model runs in `staged_later.py`): programs run as they would alone, and what they hand on are numpy's arrays of
exactly the sizes that they have.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import onnxc.runtime.staged_later  # noqa: F401  (adds its step to the table)
from onnxc.errors import InternalError, PackageError, SizesError, shortened
from onnxc.runtime.binding import Binding
from onnxc.runtime.blocks import arrays_of
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.compiled_model import CPU, FIXED, SCHEMA, CompiledModel, Outputs, Run, dim_names, read_defaults
from onnxc.runtime.cpu import available_cpus
from onnxc.runtime.model import CpuModel
from onnxc.runtime.peaks import machine_peaks
from onnxc.runtime.random_state import Draws
from onnxc.runtime.signature import Signature, Tensor
from onnxc.runtime.sizes import evaluate
from onnxc.runtime.staged_check import PlanCheck, check_ports
from onnxc.runtime.staged_clock import Arguments, Clock, current
from onnxc.runtime.staged_steps import STEPS, Plan, Sizes, Step, Values
from onnxc.runtime.staged_values import Plain, arrays_in, as_value, described, on_host, own

if TYPE_CHECKING:
    from onnxc.report import Report
    from onnxc.roofline import Peaks


_KEPT_SHAPES = 256  # sets of inputs' shapes whose sizes are kept


class StagedModel(CompiledModel):
    """A model of several programs. Call it with numpy arrays (and lists of them, and None), from any thread.

    Attributes:
        iteration_limit: the most iterations of a loop that the host runs; more are a LimitError. None: no limit.
    """

    _program: tuple[str, type[CompiledModel]] = (CPU, CpuModel)  # the target of each part, and its class

    def __init__(
        self,
        manifest: Mapping[str, Any],
        sections: Mapping[str, Buffer],
        *,
        threads: int | None = None,
        cache: Cache | None = None,
        device: int = 0,
    ) -> None:
        if manifest.get("schema") != SCHEMA:
            raise PackageError(f"the model was saved by another version of onnxc ({manifest.get('onnxc', 'unknown')})")
        self.manifest, self._sections = manifest, sections
        self.iteration_limit: int | None = None
        self.seeded: tuple[int | None, int] | None = None
        self.waiting: weakref.WeakSet[CompiledModel] = weakref.WeakSet()  # what was compiled when the model ran
        self._threads = available_cpus() if threads is None else threads
        try:
            dim_names(manifest)
            for side in ("inputs", "outputs"):
                check_ports(manifest[side])
            self._infos = [[described(*row) for row in manifest[side]] for side in ("inputs", "outputs")]
            self._signature = Signature([t for t in self._infos[0] if isinstance(t, Tensor)], [])
            self._names, self._inputs = (tuple(t.name for t in side) for side in self._infos[::-1])
            self._draws = Draws() if manifest.get("random_state") else None
            if self._draws is not None:  # the last input is the runtime's
                self._inputs = self._inputs[:-1]
            given = self._infos[0][: len(self._inputs)]
            self._binding = Binding(given, read_defaults(manifest, sections), manifest.get(FIXED, ()))
            target, program = self._program
            if any(m.get("target", CPU) != target for m in manifest["parts"]):
                raise PackageError(f"the manifest is damaged: a program of the model is not for {target!r}")
            self._parts = [
                program(m, _part_sections(sections, k), threads=threads, cache=cache, device=device)
                for k, m in enumerate(manifest["parts"])
            ]
            places = {str(symbol): str(place) for symbol, place in manifest["size_places"].items()}
            for part in self._parts:
                part._signature.inside(places)
            self._arrays = arrays_of(manifest["arrays"], sections["arrays"])
            self._held = {id(x) for x in self._arrays}
            infos = list(enumerate(self._infos[0]))
            self._tensors = [(k, t.dtype.numpy) for k, t in infos if isinstance(t, Tensor)]
            self._others = [(k, t) for k, t in infos if isinstance(t, Plain)]
            self._solved: dict[tuple[tuple[int, ...], ...], Sizes] = {}  # by the inputs' shapes
            self._check_plan()
            self._plan = Plan(manifest["plan"], self)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError, InternalError) as error:
            raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error

    def _check_plan(self) -> None:
        """Raises ValueError, KeyError and the like for a plan that cannot be run."""
        programs = [(len(p._signature.inputs), len(p._signature.outputs)) for p in self._parts]
        given = [size for t in self._infos[0] if isinstance(t, Tensor) for size in t.sizes]
        known = {size for size in given if isinstance(size, str)}
        for size in given:  # what a call computes of them
            with suppress(ZeroDivisionError):
                evaluate(size, dict.fromkeys(known, 1))
        rows, first = len(self.manifest["kernels"]), self.manifest["first_kernels"]
        ends = [start + len(p["kernels"]) for start, p in zip(first, self.manifest["parts"], strict=True)]
        if min(first, default=0) < 0 or max(ends, default=0) > rows:
            raise ValueError("a program has kernels that the model has not")
        found = PlanCheck(programs, len(self._arrays), STEPS, rows).plan(self.manifest["plan"], known)
        if found != (len(self._infos[0]), len(self._infos[1])):
            raise ValueError("the plan has other inputs and outputs than the model")

    # ------------------------------------------------------------ calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Outputs:
        if kwargs or len(args) != len(self._inputs):
            args = self._binding.bind(args, kwargs)
        return Outputs(self._names, self._answer(self._with_state(args)))

    def _with_state(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = self._binding.bind(args, {})
        return args if self._draws is None else (*args, self._draws.next())

    def _named(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        if type(given) is dict and len(given) == len(self._inputs):
            try:
                return tuple([given[name] for name in self._inputs])
            except KeyError:
                pass  # bind says what is wrong
        return self._binding.bind((), given)

    def _answer(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._tried(args, lambda model: model._run(args))

    def _tried(self, args: tuple[Any, ...], run: Run) -> tuple[Any, ...]:
        """The outputs. Where sizes do not meet, they may be 1, and be broadcast: those of inputs in a variant for them,
        those that the run tells in a variant that is compiled as it runs.
        """
        try:
            return run(self)
        except SizesError as error:
            for careful in (False, True):
                if self._variants is not None:
                    found = self._variants.answer(self, args, error, run, careful)
                    if found is not None:
                        return found
            raise

    def _run(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values, sizes = self._checked(args)
        if self._plan.makes_outputs:
            return tuple(self._plan.run(values, sizes))
        taken = {*self._held, *(id(x) for x in arrays_in(values))}
        return tuple([own(y, taken) for y in self._plan.run(values, sizes)])

    def _checked(self, args: Sequence[Any]) -> tuple[Values, Sizes]:
        """The inputs as programs take them, and the dims that their shapes tell.

        Arrays that are as they should be, of shapes seen before, are only looked at.
        """
        for k, dtype in self._tensors:
            x = args[k]
            if type(x) is not np.ndarray or x.dtype is not dtype or not ((f := x.flags).c_contiguous and f.aligned):
                return self._converted(args)
        key = tuple([args[k].shape for k, _ in self._tensors])
        sizes = self._solved.get(key)
        if sizes is None:
            values, sizes = self._converted(args)
            if len(self._solved) >= _KEPT_SHAPES:
                self._solved.clear()
            self._solved[key] = sizes
            return values, sizes.copy()
        values = list(args)
        for k, t in self._others:
            values[k] = self._placed(t, values[k])
        return values, sizes.copy()

    def _converted(self, args: Sequence[Any]) -> tuple[Values, Sizes]:
        """As `_checked`, whatever is given."""
        arrays = self._signature.arrays([args[k] for k, _ in self._tensors])
        sizes = self._signature.solve([x.shape for x in arrays])
        values = list(args)
        for k, t in self._others:
            values[k] = self._placed(t, values[k])
        for (k, _), array in zip(self._tensors, arrays, strict=True):
            values[k] = array
        return values, sizes

    def _placed(self, info: Plain, x: Any) -> Any:
        """An input that is no tensor of a known rank, as steps take it."""
        return as_value(info.described, x, info.name)

    def step(self, kind: str) -> type[Step]:
        """What runs the steps of a kind."""
        return STEPS[kind]

    def stacked(self, arrays: Sequence[Any]) -> Any:
        """Arrays of one shape along a new first axis."""
        return np.stack(arrays)

    def part_of(self, model: CompiledModel, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs of a model that is a step of this one."""
        return model._run(model._with_state(args))

    def attach(self, device: int | None = None) -> None:
        for part in self._parts:
            part.attach(device)

    def seed(self, seed: int | None = None, *, calls: int = 0) -> None:
        super().seed(seed, calls=calls)
        self.seeded = (seed, calls)
        for model in self.waiting:
            model.seed(seed, calls=calls)

    # ------------------------------------------------------------ facts

    @property
    def threads(self) -> int:
        """The most threads that a call uses. Can be set at any time."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        for part in (*self._parts, *self.waiting):
            part.threads = count  # type: ignore[attr-defined]
        self._threads = count

    def get_inputs(self) -> list[Any]:
        return self._infos[0][: len(self._inputs)]

    def get_outputs(self) -> list[Any]:
        return list(self._infos[1])

    @property
    def source(self) -> str:
        return "\n".join(part.source for part in self._parts)

    def trim(self) -> None:
        for part in self._parts:
            part.trim()

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 30, warm_up: int = 3) -> Report:
        args = self._to_profile(inputs, runs, warm_up)
        clocks = [self._clocked(args) for _ in range(warm_up + runs)][warm_up:]
        sizes = defaultdict(int, clocks[-1].sizes)  # 0 where no program ran that knows them
        report = self._profiled(sizes, [c.rows for c in clocks], self._peaks())
        assert report.profile is not None
        ran = [any(times) for times in zip(*(c.rows for c in clocks), strict=True)]
        kernels = tuple(k if r else replace(k, times=None) for k, r in zip(report.kernels, ran, strict=True))
        profile = replace(report.profile, kernels=tuple(k.times for k in kernels if k.times))
        return replace(report, kernels=kernels, profile=profile)

    def _peaks(self) -> Peaks:
        lanes = next((int(p.get("lanes") or 0) for p in self.manifest["parts"]), 0)
        return machine_peaks(self._threads, lanes or None)

    def arguments(self, inputs: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
        """What each program (by number) was given last in a call with these inputs."""
        found = current.clock = Arguments(self)
        try:
            self._run(self._with_state(tuple(inputs)))
        finally:
            current.clock = None
        numbers = {id(part): k for k, part in enumerate(self._parts)}
        return {numbers[key]: tuple(map(on_host, args)) for key, args in found.given.items()}

    def _clocked(self, args: tuple[Any, ...]) -> Clock:
        """Times of one call."""
        clock = current.clock = Clock(self, len(self.manifest["kernels"]))
        try:
            self._run(args)
        finally:
            current.clock = None
        return clock

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, side)) for side in (self.get_inputs(), self._infos[1]))
        return shortened(f"<{type(self).__name__} {self.manifest.get('name') or ''}({inputs}) -> ({outputs})>")


def _part_sections(sections: Mapping[str, Buffer], number: int) -> dict[str, Buffer]:
    head = f"p{number}."
    own = {name.removeprefix(head): data for name, data in sections.items() if name.startswith(head)}
    return own | {name: sections[name] for name in ("runtime.so",) if name in sections}
