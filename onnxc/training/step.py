"""A model in training: its parameters, and the compiled program that improves them."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxc.compiler import compile as compile_model
from onnxc.errors import InputError, OnnxcError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.gradient import Joint, joint
from onnxc.ir.graph import Graph
from onnxc.optim import Optimizer
from onnxc.passes.widen_halves import KEPT
from onnxc.planner.groups import FusionOptions
from onnxc.planner.partition import BUDGET
from onnxc.report import Report
from onnxc.runtime.compiled_model import CompiledModel, Outputs
from onnxc.runtime.cuda.arrays import DeviceArray
from onnxc.runtime.package import put_in_place
from onnxc.runtime.random_state import Draws
from onnxc.runtime.staged import StagedModel
from onnxc.training.folded import warn_of_folded
from onnxc.training.graph import Slot, Update, changed_slots, check_is_one_program, slots_of, step_graph
from onnxc.training.held import HostOutputs, is_asked_from_host, on_gpu, wait_for
from onnxc.training.precision import PRODUCTS, SCALE, SKIPPED, LossScale, before_gradients, lowered, scaling_of
from onnxc.training.schedules import Schedule
from onnxc.training.statistics import continued, running_statistics, with_batch_statistics
from onnxc.training.weights import checked, trained_model


def compile_training(
    model: Model,
    *,
    loss: str | Sequence[str] | None = None,
    optimizer: Optimizer,
    wrt: Sequence[str] | None = None,
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    stop_gradient: Sequence[str] = (),
    batch_statistics: bool = False,
    seed: int | None = None,
    precision: str = "float32",
    loss_scale: LossScale | None = None,
    memory_budget: float = 1.0,
    fusion: bool | FusionOptions = True,
    target: str = "cpu",
    input_shapes: InputShapes | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
) -> TrainingStep:
    """Compile the training of a model: forward, loss, backward and the optimizer's update in one program.

    Args:
        model: a path, the bytes of a file, or a ModelProto, whose output or value `loss` is a scalar of a float dtype.
            Its weights are what the training begins with.
        loss: what is minimised: the name of a value, or of several, which add up. By default the only output.
        optimizer: from :mod:`onnxc.optim`.
        wrt: names of the weights that are trained; all others stay as they are. By default as of
            :func:`onnxc.backward`: the parameters, as far as the file tells them from other numbers.
        schedule: the learning rate of each step, from the number of steps before it. By default the optimizer's.
        clip_norm: the most that the norm of all gradients together may be; larger ones are scaled down.
        clip_value: the most that an element of a gradient may be, either way.
        accumulate: of how many calls the mean gradient is taken before the parameters change.
        stop_gradient: names of values that count as constants.
        batch_statistics: each BatchNormalization normalizes by the batch, and keeps its running statistics, in a model
            too that was exported for inference (PyTorch's newer exporter writes any model so).
        seed: what random operators, as Dropout, draw from, as of :func:`onnxc.compile`: each call draws anew, forward
            and backward pass from the same numbers. By default another in each training.
        precision: ``bfloat16`` or ``float16`` runs forward and backward pass in halves where that does no harm;
            parameters, gradients and the optimizer stay as they are. ``tf32`` and ``tf32x3``: as of
            :func:`onnxc.compile`, for GPUs.
        loss_scale: for ``float16``: what the loss is multiplied by, so that small gradients are not lost. Steps whose
            gradients overflow change nothing but the scale. By default ``LossScale()``.
        memory_budget: how much memory the intermediates of a step should take at most, as a fraction of what they take
            otherwise. Products and convolutions are then computed again in the backward pass, as few as will do; where
            no choice will, the one with the least memory is taken. On a CPU the results have the same bits whatever it
            is; on a GPU they may differ by the order of sums.
        target: as of :func:`onnxc.compile`. On a GPU parameters and states stay there.
        fusion: as of :func:`onnxc.compile`; switches off updates in place and recomputation too. On a CPU the results
            have the same bits without.
        input_shapes, base_dir, threads, cache: as in :func:`onnxc.compile`.

    Returns:
        What is called with the inputs of a batch, and answers with the model's outputs before the update.

    Raises:
        InputError: a name that the model does not have, or a loss that is no scalar. UnsupportedError: an operator on
        the way that has no derivative here. Others as :func:`onnxc.compile`.
    """
    if schedule is not None and not callable(schedule):
        raise InputError(f"schedule is a function from the number of steps before to a rate, and not {schedule!r}")
    budget = _budget(memory_budget)
    products, precision = (precision, "float32") if precision in PRODUCTS else ("float32", precision)
    update = Update(optimizer, clip_norm, clip_value, accumulate, scaling_of(precision, loss_scale))
    imported = onnx_file.load(model, base_dir=base_dir, input_shapes=input_shapes)
    imported = continued(with_batch_statistics(imported) if batch_statistics else imported)
    scaled, on_gpu = update.scaling is not None, target != "cpu"
    both = _differentiated(imported, loss, wrt, stop_gradient, precision, scaled=scaled, on_gpu=on_gpu)
    slots = slots_of(both, update)
    graphs = _step_graphs(both, update, slots, {BUDGET: budget, KEPT: precision != "float32"})
    programs = [
        compile_model(graph, target=target, precision=products, threads=threads, cache=cache, fusion=fusion)
        for graph in graphs
    ]
    changed = [changed_slots(graph, slots) for graph in graphs]
    source = Source(model, base_dir, tuple(imported.input_names), tuple(imported.output_names))
    return TrainingStep(source, programs, changed, slots, update, schedule, seed)


def _step_graphs(both: Joint, update: Update, slots: Sequence[Slot], metadata: Mapping[str, Any]) -> list[Graph]:
    """The graphs of a step: one that updates the parameters, after one that adds to the gradients if there are steps
    that only do that.
    """
    kinds = (False, True) if update.steps > 1 else (True,)
    graphs = [step_graph(both, update, slots, last=last) for last in kinds]
    for graph in graphs:
        graph.metadata |= metadata
    return graphs


def _differentiated(
    imported: Graph, loss: str | Sequence[str] | None, wrt: Sequence[str] | None, stop_gradient: Sequence[str],
    precision: str, *, scaled: bool, on_gpu: bool,
) -> Joint:  # fmt: skip
    """The forward and the backward pass in this precision; with inputs for the loss's scale, if it is `scaled`.

    Raises:
        InputError: a value of `wrt` that is no weight, or a loss that depends on none.
        UnsupportedError: a model of several programs, where only one can be trained.
    """
    both = joint(
        imported, loss, wrt, cotangents=scaled, stop_gradient=stop_gradient, buffers=running_statistics(imported),
        prepare=before_gradients(precision, on_gpu=on_gpu),
    )  # fmt: skip
    others = [v.name for v in both.wrt if v.name not in both.weights]
    if others:
        raise InputError(f"wrt: {others} are no weights of the model, and only these are trained")
    if precision != "float32" or on_gpu:
        check_is_one_program(both.graph)
    both = lowered(both, precision, on_gpu=on_gpu)
    trained = [v.name for v, g in zip(both.wrt, both.gradients, strict=True) if g is not None]
    if not trained:
        raise InputError("the loss depends on no weight that could be trained")
    if wrt is None:
        warn_of_folded(trained, imported.metadata.get("folded", {}))
    return both


@dataclass(frozen=True)
class Source:
    """What is trained: the model as it was given, and the names of its inputs and outputs."""

    model: Model
    base_dir: str | os.PathLike[str] | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TrainingStep:
    """A model in training. Each call takes a batch, and changes the parameters.

    Not for several threads at once: a step reads what the one before it wrote.
    """

    def __init__(
        self,
        source: Source,
        programs: Sequence[CompiledModel],
        changed: Sequence[Sequence[int]],
        slots: Sequence[Slot],
        update: Update,
        schedule: Schedule | None = None,
        seed: int | None = None,
    ) -> None:
        self._source = source
        self._programs, self._changed, self._update = list(programs), list(changed), update
        self._keys = {s.key: k for k, s in enumerate(slots)}
        self._parameters = {s.name: k for k, s in enumerate(slots) if not s.state}
        self.schedule = schedule
        self.calls = 0
        self._seed = Draws(seed).seed
        self._failed = ""
        # Programs write into these; those of a GPU are put there by the first call.
        self._values: list[Any] = [np.array(s.initial, order="C") for s in slots]

    def __call__(self, /, *args: Any, learning_rate: float | None = None, **inputs: Any) -> Outputs:
        """One step.

        Args:
            args, inputs: the model's inputs, in its order or by name (one that is called learning_rate: in its order).
            learning_rate: of this step, in place of the schedule's.

        Returns:
            The model's outputs, by name, from the parameters before the update. On a GPU nothing waits for them:
            each is copied from there when it is first read; where an input is on the GPU, they stay there.

        Raises:
            InputError: inputs that do not fit the model. RunError: what the inputs hold does not fit, as a class number
            out of range. The parameters are then as before; where they cannot be, since the program had begun to update
            them, every later call raises InputError until :meth:`load_state` has given it others.
        """
        if self._failed:
            raise InputError(f"a step before failed while it updated the parameters, so load a state: {self._failed}")
        batch = self._bound(args, inputs)
        rate = self.learning_rate if learning_rate is None else _rate(learning_rate)
        turn = self._turn()
        scalars = np.asarray(rate, np.float64), np.asarray(self.steps + 1, np.float64)
        program = self._programs[turn]
        program.seed(self._seed, calls=self.calls)
        with self._watched():
            self._values = on_gpu(program, self._values)
            found = self._kept(program, program(*batch, *scalars, *self._values))
            self.calls += 1
            return HostOutputs(found, self._read) if is_asked_from_host(program, batch) else found

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes where the program failed when it had begun to update. (Of a GPU's, that may show when it is read.)"""
        try:
            yield
        except OnnxcError as error:
            self._failed = str(error) if error.partial else self._failed
            raise

    def _kept(self, program: CompiledModel, found: Outputs) -> Outputs:
        """The model's own outputs. A step of several programs writes over nothing: it gives the new values out too."""
        own = len(self._source.outputs)
        if not isinstance(program, StagedModel):
            return found
        names, arrays = found.keys(), found.values()
        changed = self._changed[self._programs.index(program)]
        for k, array in zip(changed, arrays[own:], strict=True):
            self._values[k] = array
        return Outputs(names[:own], arrays[:own])

    def _read(self, value: Any) -> np.ndarray:
        """A copy in the host's memory."""
        if not isinstance(value, DeviceArray):
            return np.array(value, order="C")
        with self._watched():
            wait_for(self._programs)
            return value.numpy()

    def _turn(self) -> int:
        """Which program: the last updates the parameters, one before it adds to the gradients."""
        return len(self._programs) - 1 if (self.calls + 1) % self._update.steps == 0 else 0

    def _bound(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> list[Any]:
        names = self._source.inputs
        unknown = [n for n in inputs if n not in names]
        given = dict(zip(names, args, strict=False)) | dict(inputs)
        if unknown or len(args) > len(names) or len(given) < len(args) + len(inputs) or len(given) < len(names):
            raise InputError(f"a step takes the inputs {names}; it was given {len(args)} and {list(inputs)}")
        return [given[n] for n in names]

    # ------------------------------------------------------------ what it holds

    @property
    def steps(self) -> int:
        """Updates of the parameters so far."""
        return self.calls // self._update.steps

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by in the next step; None where it is not scaled."""
        return self._number(SCALE)

    @property
    def skipped(self) -> int:
        """Steps so far whose gradients were not finite, and which changed nothing."""
        return int(self._number(SKIPPED) or 0)

    def _number(self, state: str) -> float | None:
        place = self._keys.get(Slot("", state, np.zeros(())).key)
        return None if place is None else float(self._read(self._values[place]))

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return _rate(self.schedule(self.steps)) if self.schedule is not None else self._update.optimizer.lr

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Copies of the parameters, and of the statistics that training keeps, by name."""
        return {name: self._read(self._values[k]) for name, k in self._parameters.items()}

    def set_parameters(self, values: Mapping[str, Any]) -> None:
        """Puts arrays in the place of parameters.

        Raises:
            InputError: a name or a shape that is not the model's.
        """
        wanted = {name: self._values[k] for name, k in self._parameters.items()}
        for name, v in checked(values, wanted).items():
            self._values[self._parameters[name]] = v

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on: parameters, states of the optimizer, the number of calls."""
        return {key: self._read(self._values[k]) for key, k in self._keys.items()} | {
            "calls": np.asarray(self.calls), "seed": np.asarray(self._seed, np.uint64),
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state` gave.

        Raises:
            InputError: it is not that of this model and optimizer.
        """
        wanted = {key: self._values[k] for key, k in self._keys.items()}
        found = checked(state, wanted | {"calls": np.asarray(0), "seed": np.asarray(0, np.uint64)}, complete=True)
        calls = int(found.pop("calls"))
        if calls < 0:
            raise InputError(f"a state after {calls} calls")
        self.calls, self._seed, self._failed = calls, int(found.pop("seed")), ""
        self._values = [found[key] for key in self._keys]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file of safetensors. A file that is there already is replaced when the new one is
        complete.

        Raises:
            InputError: it cannot be written.
        """
        SafetensorError, save_file, _ = _safetensors()

        path = os.fspath(path)
        unfinished = f"{path}.{os.getpid()}.tmp"
        try:
            save_file(self.state(), unfinished)
            put_in_place(unfinished, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
            raise InputError(f"the state cannot be written to {path!r}: {error}", cause=error) from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on from a file that :meth:`save` wrote.

        Raises:
            InputError: there is no such file, or it is not of this model and optimizer.
        """
        SafetensorError, _, load_file = _safetensors()

        path = os.fspath(path)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ValueError("it is not a regular file")
            found = load_file(path)
        except (
            OSError,
            SafetensorError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # of unknown dtypes
            raise InputError(f"no state can be read from {path!r}: {error}", cause=error) from error
        self.load_state(found)

    def to_onnx(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: Model | None = None,
        base_dir: str | os.PathLike[str] | None = None,
    ) -> onnx.ModelProto | None:
        """The model that is trained, with its weights as they are now.

        Args:
            path: writes it there (weights of over 1 GB to a second file beside it), and returns None.
            model: another model with weights of the same names, into which they go: the one without a loss.
            base_dir: the folder of that model's external data, where it is bytes or a ModelProto.

        Raises:
            InputError: that model has no weight of these names and shapes, or the file cannot be written.
            ModelError: that model, or its external data, cannot be read.
        """
        if model is None:
            return trained_model(self._source.model, self._source.base_dir, self.parameters, path)
        return trained_model(model, base_dir, self.parameters, path)

    def explain(self) -> Report:
        """The compiled step (the one that updates the parameters)."""
        return self._programs[-1].explain()

    def profile(self, /, *args: Any, runs: int = 10, **inputs: Any) -> Report:
        """The compiled step with the time of each kernel, as of :meth:`onnxc.CompiledModel.profile`. It is run with
        copies of the parameters, which stay as they are.

        Raises:
            InputError, RunError: as a call.
        """
        scalars = np.asarray(self.learning_rate, np.float64), np.asarray(self.steps + 1, np.float64)
        values = on_gpu(self._programs[-1], [self._read(v) for v in self._values])
        return self._programs[-1].profile([*self._bound(args, inputs), *scalars, *values], runs=runs)


def _budget(given: Any) -> float:
    """A memory budget. InputError for what is none."""
    if not isinstance(given, (int, float)) or not 0 <= given <= 1:
        raise InputError(f"memory_budget is a fraction from 0 to 1, and not {given!r}")
    return float(given)


def _rate(given: Any) -> float:
    """A learning rate. InputError for what is none."""
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not math.isfinite(rate):
        raise InputError(f"a learning rate is a finite number, and not {given!r}")
    return rate


def _safetensors() -> tuple[type[Exception], Any, Any]:
    """The error of its library, and what writes and reads its files."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file, save_file
    except ModuleNotFoundError as error:
        raise InputError("the state of a training is kept by safetensors: pip install 'onnxc[train]'") from error
    return SafetensorError, save_file, load_file
