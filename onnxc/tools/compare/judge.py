"""The verdict on outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from onnxc.errors import InputError, OnnxcError, UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.primitives.host import is_host
from onnxc.tools.compare.bounds import GROSS, Tolerances, output_bound
from onnxc.tools.compare.engines import onnx_runner
from onnxc.tools.compare.metrics import distance, is_float, is_whole, largest, measure, unit, wide
from onnxc.tools.compare.pieces import ModelLike, SourceModel
from onnxc.tools.compare.results import OutputComparison
from onnxc.tools.compare.sides import Side
from onnxc.tools.compare.verdict import Verdict
from onnxc.tools.float64 import evaluate_float64, open_shapes

Array = np.ndarray[Any, Any]
Arrays = dict[str, Any]
Tell = Callable[[str], None]


class Judge:
    """The verdict on outputs: the model's graph, the tolerances, and the referees that are only asked when needed."""

    def __init__(
        self,
        model: ModelLike,
        input_shapes: Mapping[str, Sequence[int | str | None]] | None,
        tolerances: Tolerances,
        tell: Tell,
        base_dir: str | None = None,
    ) -> None:
        self.model, self.tolerances, self.tell, self.base_dir = model, tolerances, tell, base_dir
        self.input_shapes = input_shapes
        self.source = SourceModel(model, base_dir)

    def primitives(self, given: Arrays | None = None) -> Graph:
        """The model in primitives, for the sizes of some inputs or for open ones. Made anew: it may hold copies of
        weights, and is seldom needed.
        """
        load = partial(onnx_file.load, self.model, base_dir=self.base_dir)
        graph = load(input_shapes=self.input_shapes)
        shapes = open_shapes(graph, given or {})
        return decompose(load(input_shapes=shapes) if shapes else graph, staged=True)

    @cached_property
    def depth(self) -> int:
        """Nodes on the longest path through the model."""
        return max(self.source.depths, default=0)

    def named(self, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """Given inputs, by name, in the model's order."""
        names = self.source.inputs
        if not isinstance(inputs, Mapping):
            if not isinstance(inputs, (list, tuple)):
                raise InputError(f"inputs are a dict by name, or a list in order, not a {type(inputs).__name__}")
            if len(inputs) != len(names):
                raise InputError(f"the model has {len(names)} inputs, and {len(inputs)} arrays were given")
            inputs = dict(zip(names, inputs, strict=True))
        missing, unknown = [n for n in names if n not in inputs], [n for n in inputs if n not in names]
        if missing or unknown:
            raise InputError(f"the model's inputs are {names}; missing: {missing}, unknown: {unknown}")
        return {name: _given(name, inputs[name]) for name in names}

    def _exact(self, given: Arrays) -> list[Array]:
        graph = self.primitives(given)
        if any(is_host(n) for n in graph.nodes):
            raise UnsupportedError("a model of several programs is not evaluated in float64")
        return evaluate_float64(graph, list(given.values()))

    def outputs(
        self,
        sample: int,
        given: Arrays,
        ours: Sequence[Array],
        theirs: Sequence[Array],
        names: Sequence[str] | None = None,
        reference: Side | None = None,
    ) -> list[OutputComparison]:
        """A row for each output, those in sequences one by one."""
        flat, ours, theirs = flattened(list(names or self.source.outputs), ours, theirs)
        first = [
            self.compared(name, sample, np.asarray(a), np.asarray(b))
            for name, a, b in zip(flat, ours, theirs, strict=True)
        ]
        doubted = [k for k, o in enumerate(first) if not o.agrees and o.metrics is not None]
        # The referees evaluate the model that was given: they know nothing of a second one.
        own = reference is None or reference.source is None or reference.source.model is self.model
        if own and any(is_float(ours[k]) for k in doubted):
            first = self._ask_float64(given, ours, theirs, first)
        if own and any(not is_float(ours[k]) for k in doubted):
            first = self._ask_onnx(given, ours, first)
        if reference is not None and reference.source is None:  # what was saved is what is wanted, right or not
            first = [replace(r, agrees=r.agrees and r.verdict is not Verdict.THEIRS_WORSE) for r in first]
        return first

    def compared(self, name: str, sample: int, a: Array, b: Array) -> OutputComparison:
        """One output, by the tolerances alone."""
        row = {"name": name, "sample": sample, "dtype": str(a.dtype), "shape": a.shape}
        if a.shape != b.shape or not (a.dtype == b.dtype or _comparable(a, b)):
            note = f"the reference has {b.dtype}{list(b.shape)}"
            return OutputComparison(
                **row, max_abs=math.inf, max_rel=math.inf, mismatches=a.size, agrees=False, note=note,
                verdict=Verdict.WRONG,
            )  # fmt: skip
        metrics = measure(a, b, logits=True)
        if not is_float(a):
            wrong = metrics.mismatches
            note = f"{wrong} of {a.size} are not equal" if wrong else "equal"
            return OutputComparison(
                **row, max_abs=metrics.max_abs, max_rel=metrics.max_rel, mismatches=wrong, agrees=not wrong, note=note,
                verdict=Verdict.WRONG if wrong else Verdict.EQUAL, metrics=metrics,
            )  # fmt: skip
        reference = wide(b)
        errors = distance(wide(a), reference)
        agrees = bool((errors <= self._allowed(reference)).all())
        count = metrics.mismatches
        note = f"{count} NaN or infinite where the reference is not" if count else ""
        verdict = (
            Verdict.EQUAL if agrees and not errors.any() else Verdict.ROUNDING if agrees
            else Verdict.WRONG if count or metrics.max_rel > GROSS else Verdict.OURS_WORSE
        )  # fmt: skip
        return OutputComparison(
            **row, max_abs=metrics.max_abs, max_rel=metrics.max_rel, mismatches=count, agrees=agrees,
            zero_signs=metrics.zero_signs, note=note, verdict=verdict, metrics=metrics,
        )  # fmt: skip

    def _allowed(self, reference: Array) -> Array:
        """The tolerance of each element."""
        return self.tolerances.allowed(reference)

    def _ask_float64(
        self, given: Arrays, ours: Sequence[Array], theirs: Sequence[Array], rows: list[OutputComparison]
    ) -> list[OutputComparison]:
        self.tell("evaluate in float64")
        try:
            exact = self._exact(given)
        except OnnxcError as error:
            return [
                r if r.agrees else replace(r, note=f"{r.note}; no float64 reference: {error}".strip("; ")) for r in rows
            ]
        out = []
        for row, a, b, e in zip(rows, ours, theirs, exact, strict=True):
            judged = row if row.agrees or not is_float(a) else self._nearer(row, a, b, _rounded(e, a))
            out.append(judged)
        return out

    def _nearer(self, row: OutputComparison, ours: Array, theirs: Array, exact: Array) -> OutputComparison:
        """The rule of the second chance: distances to float64."""
        if not ours.shape == theirs.shape == exact.shape:
            return row
        a, b = wide(ours), wide(theirs)
        own, other = distance(a, exact), distance(b, exact)
        limit = 2 * largest(other[np.isfinite(other)])
        broken = np.isfinite(b) & ~np.isfinite(a)  # which no float64 evaluation of our own graph may excuse
        agrees = bool((own <= np.maximum(limit, self._allowed(exact))).all()) and not broken.any()
        errors = (largest(own), largest(other))
        scale = largest(exact[np.isfinite(exact)])
        bound = output_bound(self.depth, scale, unit(ours.dtype))
        words = f"to float64: onnxc {errors[0]:.1e}, reference {errors[1]:.1e}"
        if agrees:
            verdict = Verdict.THEIRS_WORSE if errors[1] > max(2 * errors[0], bound) else Verdict.ROUNDING
        else:
            gross = broken.any() or not errors[0] <= GROSS * (scale or 1.0)
            verdict = Verdict.WRONG if gross else Verdict.OURS_WORSE
        return replace(row, agrees=agrees, errors64=errors, note=words, verdict=verdict, bound=bound)

    def _ask_onnx(self, given: Arrays, ours: Sequence[Array], rows: list[OutputComparison]) -> list[OutputComparison]:
        self.tell("evaluate in onnx's reference evaluator")
        try:
            exact = onnx_runner(self.model)(given)
            _, exact, _ = flattened(self.source.outputs, exact, exact)
        except OnnxcError as error:
            return [r if r.agrees else replace(r, note=f"{r.note}; {error}") for r in rows]
        out = []
        for row, a, e in zip(rows, ours, exact, strict=True):
            if not row.agrees and not is_float(a) and a.dtype == e.dtype and np.array_equal(a, e):
                note = f"{row.note}, but onnx's reference evaluator agrees with onnxc"
                row = replace(row, agrees=True, note=note, verdict=Verdict.THEIRS_WORSE)
            out.append(row)
        return out


def _given(name: str, value: Any) -> Any:
    """An input as an array in this machine's order of bytes; a sequence or nothing as it is."""
    if isinstance(value, list) or value is None:
        return value
    if isinstance(value, np.ma.MaskedArray):  # numpy would drop the mask
        raise InputError(f"input {name!r} expects an array; a masked one was given: fill it (.filled)")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # a tensor that needs grad, say
        raise InputError(f"input {name!r} is no array: {error}", cause=error) from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _comparable(a: Array, b: Array) -> bool:
    """Whether two dtypes that differ may still agree: floats (of another precision), strings, and integers of a few
    bits, which engines keep in wider ones.
    """
    kinds = {a.dtype.kind, b.dtype.kind}
    few_bits = "V" in kinds and is_whole(a) and is_whole(b)
    return (is_float(a) and is_float(b)) or kinds <= set("OUST") or few_bits


def flattened(
    names: Sequence[str], ours: Sequence[Any], theirs: Sequence[Any]
) -> tuple[list[str], list[Array], list[Array]]:
    """Outputs as arrays: those in a sequence under `name[0]`, `name[1]`, ..., None as an empty array, and maps of the
    same keys as their values. Where two sequences have different lengths, each is an array of as many objects.
    """
    flat_names: list[str] = []
    flat_ours: list[Array] = []
    flat_theirs: list[Array] = []
    for name, a, b in zip(names, ours, theirs, strict=True):
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            inner = flattened([f"{name}[{k}]" for k in range(len(a))], a, b)
        else:
            if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
                a, b = list(a.values()), [b[key] for key in a]
            own, other = map(_as_array, (a, b))
            inner = ([name], [own], [other])
        flat_names += inner[0]
        flat_ours += inner[1]
        flat_theirs += inner[2]
    return flat_names, flat_ours, flat_theirs


def _as_array(x: Any) -> Array:
    """A tensor; nothing as an empty one, and a sequence as so many objects."""
    if isinstance(x, list):
        return np.empty(len(x), object)
    return np.empty(0, bool) if x is None else np.asarray(x)


def _rounded(exact: Array, like: Array) -> Array:
    """float64 results where the output's own type overflows: what is infinite there is infinite here."""
    with np.errstate(all="ignore"):
        narrow = wide(exact.astype(like.dtype))
    return np.where(np.isfinite(narrow), wide(exact), narrow)
