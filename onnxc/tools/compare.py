"""Does onnxc give onnxruntime's answers? `onnxc.compare`, and the `onnxc compare` command.

    result = onnxc.compare("model.onnx")                     # random inputs
    result = onnxc.compare("model.onnx", {"x": x}, samples=1)
    print(result); assert result.agree

onnxruntime runs with its optimizations disabled, since they can change answers. The rule, for each output:

- Floats: every element is within `rtol` of the reference's plus `atol` of the output's largest value; NaN and
  infinities stand at the same places. Where that fails, the same graph is evaluated in float64
  (`tools.float64`), and what counts is the distance to it: at most twice onnxruntime's own largest,
  or the tolerance above. NaN and infinities that onnxruntime does not have are never excused.
- Integers and booleans are equal. Where they are not, onnx's reference evaluator decides: onnxruntime's u8 x
  s8 products saturate on CPUs without VNNI.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from onnxc.compiler import compile as compile_model
from onnxc.errors import InputError, OnnxcError, RunError, UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.primitives.host import is_host
from onnxc.random_inputs import random_inputs
from onnxc.tools.float64 import evaluate_float64

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Model = str | os.PathLike[str] | bytes | ModelProto
Runner = Callable[[Arrays], list[Array]]
REFERENCES = ("onnxruntime", "onnx", "float64")


@dataclass(frozen=True)
class OutputComparison:
    """One output of one sample.

    Attributes:
        max_abs: the largest absolute difference of finite elements from the reference.
        max_rel: `max_abs` by the reference's largest finite value.
        mismatches: integers and booleans that are not equal; floats of which one is NaN or infinite and the
            other is not (or of another sign).
        zero_signs: zeros whose signs differ. Shown, and not a reason to differ.
        errors64: largest distance to float64, of onnxc and of the reference, where float64 was asked.
        note: what decided.
    """

    name: str
    sample: int
    dtype: str
    shape: tuple[int, ...]
    max_abs: float
    max_rel: float
    mismatches: int
    agrees: bool
    zero_signs: int = 0
    errors64: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`: true where every output of every sample agrees."""

    outputs: tuple[OutputComparison, ...]
    reference: str
    samples: int
    rtol: float
    atol: float

    @property
    def agree(self) -> bool:
        return all(o.agrees for o in self.outputs)

    def __bool__(self) -> bool:
        return self.agree

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can write it (a value that is not finite is None)."""
        rows = [{**vars(o), "shape": list(o.shape)} for o in self.outputs]
        rows = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows
        ]
        settings = {k: v for k, v in vars(self).items() if k != "outputs"}
        return {"agree": self.agree, **settings, "outputs": rows}

    def __str__(self) -> str:
        from rich.console import Console  # only to print

        console = Console(file=io.StringIO(), width=120, no_color=True, force_terminal=False)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        several = self.samples > 1
        for heading in ["output", *(["sample"] if several else []), "type", "max abs", "max rel", "verdict"]:
            table.add_column(heading, justify="right" if heading in ("sample", "max abs", "max rel") else "left")
        for o in self.outputs:
            verdict = Text("agrees" if o.agrees else "DIFFERS", style="green" if o.agrees else "bold red")
            verdict.append(f": {o.note}" if o.note else "", style="default")
            cells = [o.name, *([str(o.sample)] if several else []), f"{o.dtype}{list(o.shape)}"]
            table.add_row(*map(Text, cells), f"{o.max_abs:.2e}", f"{o.max_rel:.2e}", verdict)
        yield table
        differing = sum(not o.agrees for o in self.outputs)
        end = (
            f"agrees with {self.reference}"
            if not differing
            else f"{differing} of {len(self.outputs)} outputs differ from {self.reference}"
        )
        yield Text(f"{end} (rtol {self.rtol:g}, atol {self.atol:g} of the largest value)", style="bold")


def compare(
    model: Model,
    inputs: Mapping[str, Array] | Sequence[Array] | None = None,
    *,
    reference: str = "onnxruntime",
    samples: int = 1,
    seed: int = 0,
    rtol: float = 1e-3,
    atol: float = 1e-5,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    cpu: str = "native",
    threads: int | None = None,
    accuracy: str = "default",
    tuned: bool = True,
    compiled: Callable[..., Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Runs a model in onnxc and in a reference on the same inputs, and judges each output.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        inputs: by name or in order; None makes `samples` random sets from `seed` (see
            `onnxc.random_inputs`).
        reference: `onnxruntime`, `onnx` (its reference evaluator) or `float64`.
        rtol, atol: relative to each element, and to the output's largest value.
        dims: sizes of dynamic dims in random inputs, by the model's names: `{"batch": 2}`.
        input_shapes, cpu, threads, accuracy, tuned: as for `onnxc.compile`.
        compiled: a compiled model to judge, instead of compiling `model`.
        progress: called with the name of each stage.

    Raises OnnxcError where the model cannot be compiled, or the reference cannot run it.
    """
    if reference not in REFERENCES:
        raise InputError(f"no reference {reference!r}; there are {', '.join(REFERENCES)}")
    if samples < 1:
        raise InputError("at least one sample is needed")
    tell = progress or (lambda stage: None)
    judge = _Judge(model, input_shapes, rtol, atol, tell)
    tell("compile")
    if compiled is None:
        compiled = compile_model(
            model,
            cpu=cpu,
            threads=threads,
            input_shapes=input_shapes,
            accuracy=accuracy,
            tuned=tuned,
            progress=lambda stage: tell(f"{stage} done"),
        )
    if getattr(compiled, "random", False):
        raise InputError("the model has random operators: no other runtime draws the same numbers")
    tell(f"load into {reference}")
    run = judge.runner(reference)
    found: list[OutputComparison] = []
    for sample in range(1 if inputs is not None else samples):
        tell(f"sample {sample}")
        given = (
            judge.named(inputs)
            if inputs is not None
            else random_inputs(judge.primitives, seed=seed, sample=sample, dims=dims)
        )
        ours = list(compiled() if not given else compiled(*given.values()).values())
        found += judge.outputs(sample, given, ours, run(given))
    return Comparison(tuple(found), reference, 1 if inputs is not None else samples, rtol, atol)


class _Judge:
    """One comparison: the model's graph, the tolerances, and the referees that are only asked when needed."""

    def __init__(
        self,
        model: Model,
        input_shapes: Mapping[str, Sequence[int | str | None]] | None,
        rtol: float,
        atol: float,
        tell: Callable[[str], None],
    ) -> None:
        self.model, self.rtol, self.atol, self.tell = model, rtol, atol, tell
        self.graph: Graph = onnx_file.load(model, input_shapes=input_shapes)

    @cached_property
    def primitives(self) -> Graph:
        return decompose(self.graph, staged=True)

    def named(self, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """Given inputs, by name, in the model's order."""
        names = self.graph.input_names
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(names):
                raise InputError(f"the model has {len(names)} inputs, and {len(inputs)} arrays were given")
            inputs = dict(zip(names, inputs, strict=True))
        missing, unknown = [n for n in names if n not in inputs], [n for n in inputs if n not in names]
        if missing or unknown:
            raise InputError(f"the model's inputs are {names}; missing: {missing}, unknown: {unknown}")
        return {name: x if isinstance(x := inputs[name], list) or x is None else np.asarray(x) for name in names}

    def runner(self, reference: str) -> Runner:
        if reference == "float64":
            return self._exact
        return onnx_runner(self.model) if reference == "onnx" else onnxruntime_runner(self.model)

    def _exact(self, given: Arrays) -> list[Array]:
        if any(is_host(n) for n in self.primitives.nodes):
            raise UnsupportedError("a model of several programs is not evaluated in float64")
        return evaluate_float64(self.primitives, list(given.values()))

    def outputs(
        self, sample: int, given: Arrays, ours: Sequence[Array], theirs: Sequence[Array]
    ) -> list[OutputComparison]:
        names, ours, theirs = flattened(self.graph.output_names, ours, theirs)
        first = [
            self._compare(name, sample, np.asarray(a), np.asarray(b))
            for name, a, b in zip(names, ours, theirs, strict=True)
        ]
        doubted = [k for k, o in enumerate(first) if not o.agrees and o.note != "shape"]
        if any(_is_float(ours[k]) for k in doubted):
            first = self._ask_float64(given, ours, theirs, first)
        if any(not _is_float(ours[k]) for k in doubted):
            first = self._ask_onnx(given, ours, first)
        return first

    def _compare(self, name: str, sample: int, a: Array, b: Array) -> OutputComparison:
        row = {"name": name, "sample": sample, "dtype": str(a.dtype), "shape": a.shape}
        if a.shape != b.shape or (a.dtype != b.dtype and _is_float(a) != _is_float(b)):
            note = f"the reference has {b.dtype}{list(b.shape)}"
            return OutputComparison(
                **row, max_abs=math.inf, max_rel=math.inf, mismatches=a.size, agrees=False, note=note
            )
        if not _is_float(a):
            wrong = int(np.count_nonzero(a != b))
            largest, scale = _integer_error(a, b)
            note = f"{wrong} of {a.size} are not equal" if wrong else "equal"
            return OutputComparison(
                **row, max_abs=largest, max_rel=largest / scale, mismatches=wrong, agrees=not wrong, note=note
            )
        wide, reference = _wide(a), _wide(b)
        errors = distance(wide, reference)
        mismatches = int(np.count_nonzero(np.isinf(errors)))
        largest, scale = _largest(errors[np.isfinite(errors)]), _largest(reference[np.isfinite(reference)])
        agrees = bool((errors <= self._allowed(reference)).all())
        zeros = (wide == 0) & (reference == 0)
        signs = int(np.count_nonzero(zeros & (np.signbit(wide.real) != np.signbit(reference.real))))
        note = f"{mismatches} NaN or infinite where the reference is not" if mismatches else ""
        return OutputComparison(
            **row,
            max_abs=largest,
            max_rel=largest / (scale or 1.0),
            mismatches=mismatches,
            agrees=agrees,
            zero_signs=signs,
            note=note,
        )

    def _allowed(self, reference: Array) -> Array:
        """The tolerance of each element."""
        magnitude = np.abs(np.where(np.isfinite(reference), reference, 0))
        allowed: Array = self.rtol * magnitude + self.atol * _largest(magnitude)
        return allowed

    def _ask_float64(
        self, given: Arrays, ours: Sequence[Array], theirs: Sequence[Array], rows: list[OutputComparison]
    ) -> list[OutputComparison]:
        self.tell("evaluate in float64")
        try:
            exact = self._exact(given)
        except OnnxcError as error:
            return [
                r if r.agrees else _changed(r, note=f"{r.note}; no float64 reference: {error}".strip("; "))
                for r in rows
            ]
        out = []
        for row, a, b, e in zip(rows, ours, theirs, exact, strict=True):
            judged = row if row.agrees or not _is_float(a) else self._nearer(row, _wide(a), _wide(b), _rounded(e, a))
            out.append(judged)
        return out

    def _nearer(self, row: OutputComparison, a: Array, b: Array, exact: Array) -> OutputComparison:
        """The rule of the second chance: distances to float64."""
        if not a.shape == b.shape == exact.shape:
            return row
        own, other = distance(a, exact), distance(b, exact)
        limit = 2 * _largest(other[np.isfinite(other)])
        broken = np.isfinite(b) & ~np.isfinite(a)  # which no float64 evaluation of our own graph may excuse
        agrees = bool((own <= np.maximum(limit, self._allowed(exact))).all()) and not broken.any()
        errors = (_largest(own), _largest(other))
        words = f"to float64: onnxc {errors[0]:.1e}, reference {errors[1]:.1e}"
        return _changed(row, agrees=agrees, errors64=errors, note=words)

    def _ask_onnx(self, given: Arrays, ours: Sequence[Array], rows: list[OutputComparison]) -> list[OutputComparison]:
        self.tell("evaluate in onnx's reference evaluator")
        try:
            exact = onnx_runner(self.model)(given)
            _, exact, _ = flattened(self.graph.output_names, exact, exact)
        except OnnxcError as error:
            return [r if r.agrees else _changed(r, note=f"{r.note}; {error}") for r in rows]
        out = []
        for row, a, e in zip(rows, ours, exact, strict=True):
            if not row.agrees and not _is_float(a) and np.array_equal(a, e):
                row = _changed(row, agrees=True, note=f"{row.note}, but onnx's reference evaluator agrees with onnxc")
            out.append(row)
        return out


def flattened(
    names: Sequence[str], ours: Sequence[Any], theirs: Sequence[Any]
) -> tuple[list[str], list[Array], list[Array]]:
    """Outputs as arrays: those in a sequence under `name[0]`, `name[1]`, ..., and None as an empty array.

    Raises RunError where two sequences have different lengths.
    """
    flat_names: list[str] = []
    flat_ours: list[Array] = []
    flat_theirs: list[Array] = []
    for name, a, b in zip(names, ours, theirs, strict=True):
        if isinstance(a, list) or isinstance(b, list):
            if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
                raise RunError(f"output {name!r} is {_size(a)}, and the reference's is {_size(b)}")
            inner = flattened([f"{name}[{k}]" for k in range(len(a))], a, b)
        else:
            own, other = (np.empty(0, bool) if x is None else np.asarray(x) for x in (a, b))
            inner = ([name], [own], [other])
        flat_names += inner[0]
        flat_ours += inner[1]
        flat_theirs += inner[2]
    return flat_names, flat_ours, flat_theirs


def _size(x: Any) -> str:
    return f"a sequence of {len(x)}" if isinstance(x, list) else "no sequence"


def _changed(row: OutputComparison, **changes: Any) -> OutputComparison:
    return OutputComparison(**{**vars(row), **changes})


def _is_float(a: Array) -> bool:
    """Floats and complex numbers, those of ml_dtypes included (their integers have no inexact casts)."""
    return a.dtype.kind in "fc" or (a.dtype.kind == "V" and "float" in a.dtype.name)


def _wide(a: Array) -> Array:
    return np.asarray(a).astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _rounded(exact: Array, like: Array) -> Array:
    """float64 results where the output's own type overflows: what is infinite there is infinite here."""
    with np.errstate(all="ignore"):
        narrow = _wide(exact.astype(like.dtype))
    return np.where(np.isfinite(narrow), _wide(exact), narrow)


def _largest(a: Array) -> float:
    return float(np.abs(a).max(initial=0.0))


def _integer_error(a: Array, b: Array) -> tuple[float, float]:
    if a.dtype.kind not in "iub" and a.dtype.kind != "V":
        return 0.0, 1.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    return _largest(x - y), _largest(y) or 1.0


def distance(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one of them is."""
    with np.errstate(all="ignore"):
        error: Array = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), error, np.inf))


# ---------------------------------------------------------------- references


def onnxruntime_runner(model: Model, *, optimize: bool = False, threads: int | None = None) -> Runner:
    """onnxruntime on the CPU, its optimizations all disabled or all enabled. Raises RunError."""
    import onnxruntime  # a quarter of a second, and only needed here

    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads = threads
    source = (
        model.SerializeToString()
        if isinstance(model, ModelProto)
        else model
        if isinstance(model, bytes)
        else os.fspath(model)
    )
    try:
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has an exception class for each status, with no common base but this
        raise RunError(
            f"onnxruntime cannot load the model ({_first_line(error)}); another reference may", cause=error
        ) from error

    def run(given: Arrays) -> list[Array]:
        try:
            outputs: list[Array] = session.run(None, given)
        except Exception as error:
            raise RunError(f"onnxruntime cannot run the model ({_first_line(error)})", cause=error) from error
        return outputs

    return run


def onnx_runner(model: Model) -> Runner:
    """onnx's reference evaluator: slow, and exact in integers."""
    from onnx.reference import ReferenceEvaluator

    try:
        evaluator = ReferenceEvaluator(model if isinstance(model, (bytes, ModelProto)) else os.fspath(model))
    except Exception as error:  # it raises whatever its ops raise
        raise RunError(
            f"onnx's reference evaluator cannot load the model ({_first_line(error)})", cause=error
        ) from error

    def run(given: Arrays) -> list[Array]:
        try:
            return list(evaluator.run(None, given))
        except Exception as error:
            raise RunError(
                f"onnx's reference evaluator cannot run the model ({_first_line(error)})", cause=error
            ) from error

    return run


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
