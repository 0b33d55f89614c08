"""A model in training: its parameters, and the compiled program that improves them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxc.compiler import compile as compile_model
from onnxc.errors import InputError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.gradient import joint
from onnxc.optim import Optimizer
from onnxc.report import Report
from onnxc.runtime.model import CompiledModel, Outputs
from onnxc.training.graph import Slot, Update, slots_of, step_graph
from onnxc.training.statistics import running_statistics
from onnxc.training.weights import checked, trained_model

Schedule = Callable[[int], float]


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
        wrt: names of the weights that are trained; all others stay as they are. By default all of a float dtype that
            the loss depends on.
        schedule: the learning rate of each step, from the number of steps before it. By default the optimizer's.
        clip_norm: the most that the norm of all gradients together may be; larger ones are scaled down.
        clip_value: the most that an element of a gradient may be, either way.
        accumulate: of how many calls the mean gradient is taken before the parameters change.
        stop_gradient: names of values that count as constants.
        input_shapes, base_dir, threads, cache: as in :func:`onnxc.compile`.

    Returns:
        What is called with the inputs of a batch, and answers with the model's outputs before the update.

    Raises:
        InputError: a name that the model does not have, or a loss that is no scalar. UnsupportedError: an operator on
        the way that has no derivative here. Others as :func:`onnxc.compile`.
    """
    imported = onnx_file.load(model, base_dir=base_dir, input_shapes=input_shapes)
    both = joint(imported, loss, wrt, stop_gradient=stop_gradient, buffers=running_statistics(imported))
    others = [v.name for v in both.wrt if v.name not in both.weights]
    if others:
        raise InputError(f"wrt: {others} are no weights of the model, and only these are trained")
    update = Update(optimizer, clip_norm, clip_value, accumulate)
    slots = slots_of(both, update)
    if not any(g is not None for g in both.gradients):
        raise InputError("the loss depends on no weight that could be trained")
    programs, changed = [], []
    for last in (False, True) if accumulate > 1 else (True,):
        step = step_graph(both, update, slots, last=last)
        programs.append(compile_model(step.graph, threads=threads, cache=cache))
        changed.append(step.changed)
    names = imported.input_names, imported.output_names
    return TrainingStep(model, base_dir, names, programs, changed, slots, update, schedule)


class TrainingStep:
    """A model in training. Each call takes a batch, and changes the parameters.

    Not for several threads at once: a step reads what the one before it wrote.
    """

    def __init__(
        self,
        model: Model,
        base_dir: str | os.PathLike[str] | None,
        names: tuple[Sequence[str], Sequence[str]],
        programs: Sequence[CompiledModel],
        changed: Sequence[Sequence[int]],
        slots: Sequence[Slot],
        update: Update,
        schedule: Schedule | None,
    ) -> None:
        self._model, self._base_dir = model, base_dir
        self._inputs, self._outputs = map(tuple, names)
        self._programs, self._changed = list(programs), list(changed)
        self._slots, self._update = list(slots), update
        self.schedule = schedule
        self.calls = 0
        self._values = [np.array(s.initial) for s in slots]

    def __call__(self, /, *args: Any, learning_rate: float | None = None, **inputs: Any) -> Outputs:
        """One step.

        Args:
            args, inputs: the model's inputs, in its order or by name (one that is called learning_rate: in its order).
            learning_rate: of this step, in place of the schedule's.

        Returns:
            The model's outputs, by name, from the parameters before the update.

        Raises:
            InputError: inputs that do not fit the model. The parameters are then as before.
        """
        batch = self._bound(args, inputs)
        rate = self.learning_rate if learning_rate is None else _rate(learning_rate)
        turn = self._turn()
        scalars = np.asarray(rate, np.float64), np.asarray(self.steps + 1, np.float64)
        found = tuple(self._programs[turn](*batch, *scalars, *self._values))
        own = len(self._outputs)
        for k, value in zip(self._changed[turn], found[own:], strict=True):
            self._values[k] = value
        self.calls += 1
        return Outputs(self._outputs, found[:own])

    def _turn(self) -> int:
        """Which program: the last updates the parameters, one before it adds to the gradients."""
        return len(self._programs) - 1 if (self.calls + 1) % self._update.steps == 0 else 0

    def _bound(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> list[Any]:
        names = self._inputs
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
    def learning_rate(self) -> float:
        """Of the next step."""
        return _rate(self.schedule(self.steps)) if self.schedule is not None else self._update.optimizer.lr

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Copies of the parameters, and of the statistics that training keeps, by name."""
        return {s.name: v.copy() for s, v in zip(self._slots, self._values, strict=True) if not s.state}

    def set_parameters(self, values: Mapping[str, Any]) -> None:
        """Puts arrays in the place of parameters.

        Raises:
            InputError: a name or a shape that is not the model's.
        """
        places = {s.name: k for k, s in enumerate(self._slots) if not s.state}
        new = {places[n]: v for n, v in checked(values, {n: self._values[k] for n, k in places.items()}).items()}
        for k, v in new.items():
            self._values[k] = v

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on: parameters, states of the optimizer, the number of calls."""
        rows = {s.key: v.copy() for s, v in zip(self._slots, self._values, strict=True)}
        return rows | {"calls": np.asarray(self.calls)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state` gave.

        Raises:
            InputError: it is not that of this model and optimizer.
        """
        wanted = {s.key: v for s, v in zip(self._slots, self._values, strict=True)}
        found = checked(state, wanted | {"calls": np.asarray(0)}, complete=True)
        calls = int(found.pop("calls"))
        if calls < 0:
            raise InputError(f"a state after {calls} calls")
        self.calls = calls
        self._values = [found[s.key] for s in self._slots]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file of safetensors."""
        from safetensors.numpy import save_file

        save_file(self.state(), os.fspath(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on from a file that :meth:`save` wrote.

        Raises:
            InputError: there is no such file, or it is not of this model and optimizer.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            self.load_state(load_file(os.fspath(path)))
        except (OSError, SafetensorError) as error:
            raise InputError(f"no state can be read from {os.fspath(path)!r}: {error}", cause=error) from error

    def to_onnx(
        self, path: str | os.PathLike[str] | None = None, *, model: Model | None = None
    ) -> onnx.ModelProto | None:
        """The model that is trained, with its weights as they are now.

        Args:
            path: writes it there (weights of over 1 GB to a second file beside it), and returns None.
            model: another model with weights of the same names, into which they go: the one without a loss.

        Raises:
            InputError: that model has no weight of these names and shapes.
        """
        if model is None:
            return trained_model(self._model, self._base_dir, self.parameters, path)
        return trained_model(model, None, self.parameters, path)

    def explain(self) -> Report:
        """The compiled step (the one that updates the parameters)."""
        return self._programs[-1].explain()


def _rate(given: Any) -> float:
    """A learning rate. InputError for what is none."""
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not math.isfinite(rate):
        raise InputError(f"a learning rate is a finite number, and not {given!r}")
    return rate
