"""`onnxc.compare`: two runs of a model, and the verdict on each output.

    result = onnxc.compare("model.onnx")                     # onnxc and onnxruntime, random inputs
    result = onnxc.compare("model.onnx", {"x": x}, layers=True)
    print(result); assert result.agree

By default onnxruntime runs with its optimizations disabled, since they can change answers. The rule, for each output:

- Floats: every element is within `rtol` of the reference's plus `atol` of the output's largest value; NaN and
  infinities stand at the same places. Where that fails, the same graph is evaluated in float64
  (`tools.float64`), and what counts is the distance to it: at most twice the reference's own largest,
  or the tolerance above. NaN and infinities that the reference does not have are never excused.
- Integers and booleans are equal. Where they are not, onnx's reference evaluator decides: onnxruntime's u8 x
  s8 products saturate on CPUs without VNNI.
"""

from __future__ import annotations

import math
import os
import resource
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from onnx import defs

from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError, OnnxcError
from onnxc.ir.dtypes import BY_NAME
from onnxc.ir.graph import Graph
from onnxc.random_inputs import random_inputs
from onnxc.tools.compare.bisect import KINDS
from onnxc.tools.compare.bisect import bisect as bisection
from onnxc.tools.compare.bounds import CASTS, EXACT_OPS, GROSS, Tolerances, is_half
from onnxc.tools.compare.engines import Float64
from onnxc.tools.compare.judge import Judge
from onnxc.tools.compare.layers import compare_layers
from onnxc.tools.compare.metrics import unit
from onnxc.tools.compare.peer import peer
from onnxc.tools.compare.pieces import ModelLike
from onnxc.tools.compare.reduce import reduction
from onnxc.tools.compare.results import Comparison, OutputComparison, Reduction, TensorComparison
from onnxc.tools.compare.sides import OnnxcSide, Side, make_side
from onnxc.tools.compare.verdict import Verdict

Arrays = dict[str, Any]
Tell = Callable[[str], None]
T = TypeVar("T")


def compare(
    model: ModelLike,
    inputs: Mapping[str, Any] | Sequence[Any] | Iterable[Mapping[str, Any]] | None = None,
    *,
    ours: Any = None,
    reference: Any = "onnxruntime",
    samples: int = 1,
    seed: int = 0,
    keep_worst: bool = False,
    layers: bool = False,
    bisect: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-5,
    tolerances: Mapping[str, float] | None = None,
    dims: Mapping[str, int] | None = None,
    compiled: Callable[..., Any] | None = None,
    progress: Tell | None = None,
    **compiling: Any,
) -> Comparison:
    """Runs a model on two sides on the same inputs, and judges each output; with `layers`, each tensor inside.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        inputs: by name or in order; an iterable of such mappings (a loader of samples); None makes `samples` random
            sets from `seed` (see `onnxc.random_inputs`).
        ours: the side that is judged: `onnxc`, or whatever `reference` may be. Default: `onnxc`; `onnxruntime` where
            the reference is another ONNX file, so that what is compared is the two files.
        reference: `onnxruntime` (`onnxruntime:basic`, `:extended`, `:all` optimize), `onnx` (its reference evaluator),
            `float64`, `onnxc`, a second ONNX file (`other.onnx`, `other.onnx@float64`), saved outputs (`.npz`, a
            folder of `output_0.pb`, ..., a dict), a `torch.nn.Module`.
        samples: sets of random inputs.
        keep_worst: of many samples, only the worst of each output is kept.
        layers: compares every tensor that both sides show, for the worst sample: where the error is made, and where
            it is only passed on.
        bisect: where the sides differ, looks for the part that makes it: `nodes` (the smallest part of the model that
            still fails; implies `layers`), `passes` of the compiler, kinds of `fusion`, or shortcuts in `precision`.
        folder: where `bisect="nodes"` writes that part with its inputs.
        rtol, atol: relative to each element, and to the output's largest value.
        tolerances: of layers, relative to the largest value, by dtype, op type or both: `{"float16": 1e-2, "Softmax":
            1e-4, "Softmax:float16": 2e-2}`. Default: a bound from the dtype and the operations.
        dims: sizes of dynamic dims in random inputs, by the model's names: `{"batch": 2}`.
        compiled: a compiled model to judge, instead of compiling `model`.
        progress: called with the name of each stage.
        compiling: the options of `onnxc.compile` (`target`, `dtype`, `input_shapes`, `cache`, ...).

    Raises OnnxcError where the model cannot be compiled, or a side cannot run it.
    """
    if samples < 1:
        raise InputError("at least one sample is needed")
    if bisect is not None and bisect not in KINDS:
        raise InputError(f"a bisection is over {', '.join(KINDS)}, not {bisect!r}")
    if not (math.isfinite(rtol) and rtol >= 0 and math.isfinite(atol) and atol >= 0):
        raise InputError(f"rtol and atol are numbers from 0 on, not {rtol} and {atol}")
    options = _compile_options(compiling)
    tell = progress or (lambda stage: None)
    judge = Judge(model, options.input_shapes, Tolerances(rtol, atol, tolerances or {}), tell, options.folder)
    theirs = make_side(reference, judge.source, options, tell=tell)
    if ours is None:
        ours = "onnxc" if compiled is not None or not _is_other_file(theirs, model) else "onnxruntime"
    own = make_side(ours, judge.source, options, compiled=compiled, tell=tell)
    _check_sides(judge, own, theirs)
    own.prepare("whose answers are judged")
    theirs.prepare("the reference")
    _cast_inputs(own, theirs)
    run = _Run(judge, own, theirs, options, tell)
    given = _samples(judge, inputs, samples, seed, dims)
    layers = layers or bisect == "nodes"
    found = run.all(given, keep_worst=keep_worst, layers=layers, seed=seed if inputs is None else None)
    if bisect is None or (found.agree and not found.faults):
        return found
    return replace(found, reduction=run.bisect(bisect, found, folder))


def _compile_options(given: Mapping[str, Any]) -> CompileOptions:
    """The options of a compile, by name."""
    known = [f.name for f in fields(CompileOptions)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"neither onnxc.compare nor onnxc.compile has an option {', '.join(map(repr, unknown))}")
    return CompileOptions(**given)


def _check_sides(judge: Judge, *sides: Side) -> None:
    """Raises InputError for models that take other inputs, and for tolerances of what there is not."""
    sources = [side.source for side in sides if side.source is not None]
    for side in sides:
        missing = [] if side.source is None else [n for n in side.source.inputs if n not in judge.source.inputs]
        if missing:
            raise InputError(
                f"{side.name} has the inputs {', '.join(map(repr, missing))}, and the model "
                f"{', '.join(map(repr, judge.source.inputs)) or 'none'}: both are given the same, by name"
            )
    ops = {n.op_type for source in sources for n in source.nodes}
    for name, most in judge.tolerances.by.items():
        if not most >= 0:
            raise InputError(f"a tolerance is a number from 0 on, and {most!r} is given for {name!r}")
        op, _, dtype = name.rpartition(":")
        known = dtype in BY_NAME and (not op or op in ops or defs.has(op))
        if not known and (op or not (dtype in ops or defs.has(dtype))):
            raise InputError(f"a tolerance is of a dtype or of an operator, and {name!r} is neither")


def _cast_inputs(own: Side, theirs: Side) -> None:
    """A half-precision version of a model may take halves: both sides are given the same values, as halves have them,
    each in its own type.
    """
    if own.source is None or theirs.source is None:
        return
    types, others = own.source.float_inputs, theirs.source.float_inputs
    mixed = {n: max(t, others[n], key=unit) for n, t in types.items() if n in others and others[n] != t}
    own.casts = {n: (coarse, types[n]) for n, coarse in mixed.items()}
    theirs.casts = {n: (coarse, others[n]) for n, coarse in mixed.items()}


def _is_other_file(side: Side, model: ModelLike) -> bool:
    return side.source is not None and side.source.model is not model


def _samples(judge: Judge, inputs: Any, samples: int, seed: int, dims: Mapping[str, int] | None) -> Iterator[Arrays]:
    """Sets of inputs, by name."""
    if inputs is None:
        graph: Graph | None = judge.primitives()
        for sample in range(samples):
            assert graph is not None
            given = random_inputs(graph, seed=seed, sample=sample, dims=dims)
            graph = graph if sample + 1 < samples else None  # it may hold copies of weights
            yield given
    elif isinstance(inputs, (Mapping, list, tuple)) and not _is_list_of_samples(inputs):
        yield judge.named(inputs)
    elif isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, np.ndarray)):
        for one in inputs:
            yield judge.named(one)
    else:
        raise InputError(f"inputs are a dict by name, a list, or several of these, not a {type(inputs).__name__}")


def _is_list_of_samples(inputs: Any) -> bool:
    return isinstance(inputs, (list, tuple)) and bool(inputs) and all(isinstance(x, Mapping) for x in inputs)


class _Run:
    """Both sides over all samples."""

    def __init__(self, judge: Judge, ours: Side, theirs: Side, options: CompileOptions, tell: Tell) -> None:
        self.judge, self.ours, self.theirs, self.tell = judge, ours, theirs, tell
        self.options = replace(options, mode="default", tune_seconds=None)  # what was measured is known by then
        self.seconds: dict[str, float] = {}
        self.worst: Arrays = {}

    def bisect(self, kind: str, found: Comparison, folder: str | os.PathLike[str] | None) -> Reduction:
        """What makes the difference, for the worst sample."""
        if kind == "nodes" and self.ours.source is None:
            raise InputError("bisect='nodes' runs parts of the model: what is judged has to be an engine")
        if kind == "nodes":
            text = _option_text(self.options)
            place = None if folder is None else Path(folder)
            return self._timed(
                "bisect", lambda: reduction(found, self.ours, self.theirs, self.worst, place, text, self.tell)
            )
        if not isinstance(self.ours, OnnxcSide):
            raise InputError(f"bisect={kind!r} takes the compiler apart: our side has to be onnxc")
        names, theirs, options = self.judge.source.outputs, self.theirs, self.options
        given = self.ours.fed(self.worst)

        def right(given: Mapping[str, Any]) -> list[Any]:
            outputs = dict(zip(theirs.output_names, theirs.run(theirs.fed(given)), strict=True))
            return [outputs[n] for n in names] if set(names) <= outputs.keys() else list(outputs.values())

        return self._timed("bisect", lambda: bisection(kind, self.judge.model, given, options, self.tell, right))

    def all(self, samples: Iterator[Arrays], *, keep_worst: bool, layers: bool, seed: int | None) -> Comparison:
        found: list[OutputComparison] = []
        worst: tuple[tuple[int, float], int, Arrays] | None = None
        inside: list[TensorComparison] = []
        count = 0
        for sample, (given, only) in enumerate(_marked(samples)):
            self.tell(f"sample {sample}")
            once = layers and only and self.theirs.runs_by_node
            rows, inside = self.one(sample, given, layers=once)
            found = _worst(found, rows) if keep_worst else found + rows
            count += 1
            badness = max((_badness(r) for r in rows), default=(0, 0.0))
            if worst is None or badness > worst[0]:
                worst = (badness, sample, given)
        if worst is None:
            raise InputError("the loader gave no inputs")
        self.worst = worst[2]
        notes: list[str] = []
        if not layers and self._excused(found):
            found = self.once_more(found, worst[1], worst[2])
        if layers:
            inside = inside or self.layers(worst[1], worst[2])
            notes += [n for n in (getattr(self.ours, "note", ""), getattr(self.theirs, "note", "")) if n]
            notes += _with_taps(inside, found)
            found = _condemned(found, inside)
        notes += self._undecided(found)
        tolerances = self.judge.tolerances
        return Comparison(
            tuple(found),
            self.theirs.name,
            count,
            tolerances.rtol,
            tolerances.atol,
            sides=(self.ours.name, self.theirs.name),
            seed=seed,
            layers=tuple(inside),
            seconds=self.seconds,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + peer().peak(),
            notes=tuple(notes),
        )

    def _timed(self, name: str, action: Callable[[], T]) -> T:
        self.tell(name)
        start = time.perf_counter()
        try:
            return action()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def one(
        self, sample: int, given: Arrays, *, layers: bool = False
    ) -> tuple[list[OutputComparison], list[TensorComparison]]:
        """One set of inputs: the outputs, and with `layers` the tensors inside, from the same run of the reference."""
        ours = self._timed(f"run {self.ours.name}", lambda: self.ours.run(self.ours.fed(given)))
        _check_drawn(self.ours)
        self.ours.rest()
        names, shared = self.theirs.output_names, self.ours.output_names
        if len(ours) != len(shared):  # of what was given as compiled
            raise InputError(f"{self.ours.name} gives {len(ours)} outputs, and the model has {len(shared)}")
        if len(names) != len(shared):
            counts = [f"{len(n)} ({', '.join(n)})" for n in (shared, names)]
            raise InputError(f"outputs of {self.ours.name}: {counts[0]}; of {self.theirs.name}: {counts[1]}")
        answers: Arrays = {}
        inside = self.layers(sample, given, answers) if layers else []
        if all(name in answers for name in names):
            theirs = [answers[name] for name in names]
        else:
            theirs = self._timed(f"run {self.theirs.name}", lambda: self.theirs.run(self.theirs.fed(given)))
        _check_drawn(self.theirs)
        if set(names) == set(shared):  # in another order, perhaps
            ours = [ours[shared.index(name)] for name in names]
        judge = self.judge
        return self._timed("judge", lambda: judge.outputs(sample, given, ours, theirs, names, self.theirs)), inside

    def _undecided(self, rows: Sequence[OutputComparison]) -> list[str]:
        """What tells which of two files is nearer to the truth, where they differ: no referee was asked."""
        model = None if self.theirs.source is None else self.theirs.source.model
        if all(r.agrees for r in rows) or not isinstance(model, (str, os.PathLike)) or model == self.judge.model:
            return []
        if isinstance(getattr(self.theirs, "engine", None), Float64):
            return []
        truth = shlex.quote(f"{os.fspath(model)}@float64")
        return [f"which is nearer to the truth? --reference {truth} says of each file how far it is from that"]

    def _excused(self, rows: Sequence[OutputComparison]) -> bool:
        """Whether float64, which evaluates our own definitions of the operators, has excused what differs by more than
        the tolerance: a wrong definition would be wrong there too.
        """
        compiled = isinstance(self.ours, OnnxcSide) and self.ours.is_compiled and self.ours.options.target == "cpu"
        own = self.theirs.source is not None and self.theirs.source.model is self.judge.model
        return compiled and own and any(_is_excused(r) for r in rows)

    def once_more(self, rows: list[OutputComparison], sample: int, given: Arrays) -> list[OutputComparison]:
        """The outputs, after a look at each layer on both sides."""
        try:
            return _condemned(rows, self.layers(sample, given))
        except OnnxcError:
            return rows

    def layers(self, sample: int, given: Arrays, answers: Arrays | None = None) -> list[TensorComparison]:
        """Every tensor inside, for one set of inputs. `answers` gets the reference's outputs."""
        self.ours.close()
        self.theirs.close()
        tolerances = self.judge.tolerances
        return self._timed(
            "layers",
            lambda: list(compare_layers(self.ours, self.theirs, given, tolerances, self.tell, sample, answers)),
        )


def _check_drawn(side: Side) -> None:
    """Raises InputError for a compiled model that draws random numbers; that it does is known once it has run."""
    if isinstance(side, OnnxcSide) and side.random:
        raise InputError("the model has random operators: no other runtime draws the same numbers")


def _marked(samples: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Each sample, with whether it is the only one."""
    first = list(islice(samples, 2))
    yield from ((sample, len(first) == 1) for sample in first)
    yield from ((sample, False) for sample in samples)


def _option_text(options: CompileOptions) -> str:
    """Options of the compiler that are not the default, for a command line."""
    default = CompileOptions()
    named = ("target", "cpu", "threads", "accuracy", "precision", "dtype")
    given = [(n, getattr(options, n)) for n in named if getattr(options, n) != getattr(default, n)]
    text = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in given)
    return text + (" --no-tuned" if options.tuned is False else "")


def _is_excused(row: OutputComparison) -> bool:
    """Whether float64 alone lets an output pass: it takes ours for the better one, or is itself far from both (on the
    other side of a step, say). Halves are not looked at again: engines round them at other places, which layers cannot
    tell from a fault.
    """
    if row.errors64 is None or not _is_certain(row.dtype):
        return False
    return row.verdict is Verdict.THEIRS_WORSE or (row.verdict is Verdict.ROUNDING and row.max_rel > GROSS)


def _is_certain(dtype: str) -> bool:
    """Whether engines compute with this type alike: integers, and what is no half."""
    return "float" not in dtype or dtype in ("float32", "float64")


def _is_at_fault(t: TensorComparison) -> bool:
    """Whether a layer is wrong beyond doubt. Integers that were computed may be a step apart, where what is rounded to
    them (by QuantizeLinear, say) lies between two. A half may be one that ours holds as a float32.
    """
    whole = "float" not in t.dtype
    known = _is_certain(t.dtype) and not is_half(t.unit)
    return t.verdict.fails and known and (not whole or t.op_type in CASTS | EXACT_OPS)


def _condemned(rows: list[OutputComparison], layers: Sequence[TensorComparison]) -> list[OutputComparison]:
    """What float64 has excused is wrong where a layer is."""
    culprit = next((t for t in layers if _is_at_fault(t)), None)
    if culprit is None:
        return rows
    note = f"float64 is as wrong: {culprit.label} is another in the reference"
    return [
        replace(r, agrees=False, verdict=culprit.verdict, note=note)
        if _is_excused(r) else r
        for r in rows
    ]  # fmt: skip


def _with_taps(rows: list[TensorComparison], outputs: Sequence[OutputComparison]) -> list[str]:
    """What there is to say where an output fails and no layer does: the run with taps was another one."""
    wrong = [o.name for o in outputs if not o.agrees]
    inside = {t.name: t for t in rows if t.verdict is not Verdict.SKIPPED}
    fine = [n for n in wrong if n in inside and inside[n].error < 1e-5]
    if not fine or any(t.verdict.fails for t in rows):
        return []
    return [
        f"with its tensors written out, {', '.join(fine)} is right: it is not what a node computes, but how kernels "
        "share memory or are fused (--bisect passes or fusion tells)"
    ]


def _badness(row: OutputComparison) -> tuple[int, float]:
    order = list(Verdict)
    return (order.index(row.verdict) if row.verdict is not Verdict.SKIPPED else 0, row.max_rel)


def _worst(before: list[OutputComparison], rows: list[OutputComparison]) -> list[OutputComparison]:
    found = {r.name: r for r in before}  # sequences of some samples are longer than those of others
    for r in rows:
        found[r.name] = max(found.get(r.name, r), r, key=_badness)
    return list(found.values())
