"""Which part of the compiler makes an answer wrong: a pass, a kind of fusion, or a choice about precision.

The graph after each pass is evaluated in float64 by the interpreter that defines what primitives mean: a pass that
changes the answers is the one. Where none does, the model is compiled with one kind of fusion (or one shortcut in
precision) less at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from onnxc.autodiff.operator import expand_gradients
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError, InternalError, OnnxcError
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.pipeline import passes
from onnxc.planner.groups import OF_STEPS, FusionOptions
from onnxc.tools.compare.bounds import gap
from onnxc.tools.compare.engines import Onnxc, OnnxRuntime, Runner
from onnxc.tools.compare.metrics import distance, is_float, largest_finite, wide
from onnxc.tools.compare.pieces import ModelLike
from onnxc.tools.compare.results import Reduction
from onnxc.tools.float64 import evaluate_float64

Array = np.ndarray[Any, Any]
Tell = Callable[[str], None]
KINDS = ("nodes", "passes", "fusion", "precision")
CHANGED = 1e-5  # of the largest value: what a pass that only reorders or folds stays far below in float64
FIRST = 1e-3  # the first graph beside onnxruntime's answers, which are float32


def bisect(
    kind: str, model: ModelLike, given: Mapping[str, Any], options: CompileOptions, tell: Tell,
    reference: Runner | None = None,
) -> Reduction:  # fmt: skip
    """The pass, the kind of fusion or the option that makes the difference. `reference` gives the right answers;
    default: onnxruntime, without optimizations.
    """
    if kind not in KINDS:
        raise InputError(f"a bisection is over {', '.join(KINDS)}, not {kind!r}")
    right = (reference or OnnxRuntime().load(model))(given)
    if reference is not None and (blameless := _differs_anyway(model, given, options, right)):
        return Reduction(kind, "", steps=(blameless,))
    if kind == "passes":
        return bisect_passes(model, given, options, right, tell)
    if kind == "fusion":
        return bisect_options(kind, options, fusion_variants(options), model, given, right, tell)
    return bisect_options(kind, options, precision_variants(options), model, given, right, tell)


def _differs_anyway(model: ModelLike, given: Mapping[str, Any], options: CompileOptions, right: Sequence[Any]) -> str:
    """What there is to say where another engine's answers are as far from the right ones (of another file, say): then
    the compiler has no part in that. "" elsewhere.
    """
    try:
        apart = _error(OnnxRuntime().load(model)(given), right)
    except OnnxcError:
        return ""
    if apart <= FIRST or apart < _compiled_error(model, options, given, right) / 10:
        return ""
    return f"the model differs as much in onnxruntime ({apart:.1e}): the compiler does not do it; 'nodes' looks further"


def bisect_passes(
    model: ModelLike, given: Mapping[str, Any], options: CompileOptions, right: Sequence[Any], tell: Tell
) -> Reduction:
    """The first pass after which the graph gives other answers; the planner and the kernels where no pass does."""
    graph = expand_gradients(onnx_file.load(model, base_dir=options.base_dir, input_shapes=options.input_shapes))
    steps: list[str] = []
    before: list[Array] | None = None
    for name, run in passes(options.passes):
        tell(f"bisect: the graph after {name}")
        old, graph = graph, run(graph)
        if before is not None and _same_nodes(old, graph):
            continue
        answers = _evaluated(graph, given)
        error = _error(answers, right if before is None else before)
        limit = FIRST if before is None else CHANGED
        if name == "convert-precision":  # float64 has no rounding to halves: what is left is a fault
            limit = FIRST
        steps.append(f"after {name}: {len(graph.nodes)} nodes, the answers changed by {error:.1e}")
        # float64 rounds to no halves, and may lie on the other side of a step: the fault is what the kernels have too.
        if not error <= limit and (
            before is not None or not _is_nearer(answers, right, _compiled(model, options, given))
        ):
            return Reduction("passes", name, steps=tuple(steps))
        before = answers
    steps.append("no pass changes the answers: the planner or a kernel does")
    tell("bisect: kinds of fusion")
    found = bisect_options("passes", options, fusion_variants(options), model, given, right, tell)
    culprit = f"plan: {found.culprit}" if found.culprit else "code generation"
    if found.culprit == "nothing":
        culprit = ""
    return Reduction("passes", culprit, steps=(*steps, *found.steps))


def _same_nodes(a: Graph, b: Graph) -> bool:
    return len(a.nodes) == len(b.nodes) and all(x is y for x, y in zip(a.nodes, b.nodes, strict=True))


def _evaluated(graph: Graph, given: Mapping[str, Any]) -> list[Array]:
    """The outputs of a graph in float64."""
    arrays = [given[v.name] if v.name in given else np.zeros(v.shape, v.dtype.numpy) for v in graph.inputs]
    try:
        return list(evaluate_float64(graph, arrays))
    except (KeyError, ValueError, IndexError, TypeError, InternalError):  # a pass left a graph that means nothing
        return [np.full((), np.nan) for _ in graph.outputs]


def _error(found: Sequence[Any], right: Sequence[Any]) -> float:
    """The largest error of all outputs, relative to each one's largest value."""
    errors = [0.0]
    for a, b in zip(found, right, strict=True):
        x, y = np.asarray(a), np.asarray(b)
        scale = largest_finite(wide(y)) if is_float(y) else 1.0
        errors.append(gap(x, y) / (scale or 1.0))
    return max(errors)


def _is_nearer(found: Sequence[Any], first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether answers are nearer to the first than to the second ones: by their mean, of which a few elements on the
    other side of a step are a small part.
    """
    return _mean_distance(found, first) < _mean_distance(found, second)


def _mean_distance(found: Sequence[Any], other: Sequence[Any]) -> float:
    total = 0.0
    for a, b in zip(found, other, strict=True):
        x, y = np.asarray(a), np.asarray(b)
        if x.shape != y.shape:
            return math.inf
        if not x.size:
            continue
        if not (is_float(x) and is_float(y)):
            total += float(np.mean(x != y))
            continue
        errors = distance(wide(x), wide(y)) / (largest_finite(wide(y)) or 1.0)
        total += float(np.mean(np.minimum(errors, 1.0)))
    return total


def fusion_variants(options: CompileOptions) -> list[tuple[str, CompileOptions]]:
    """One kind of fusion less at a time; then none at all."""
    whole = options.fusion_options
    found = [
        (f.name, replace(options, fusion=replace(whole, **{f.name: False})))
        for f in fields(FusionOptions)
        if getattr(whole, f.name) and f.name not in OF_STEPS
    ]
    return [*found, ("all fusion", replace(options, fusion=False))]


def precision_variants(options: CompileOptions) -> list[tuple[str, CompileOptions]]:
    """One shortcut in precision less at a time, and then none."""
    off: dict[str, dict[str, Any]] = {
        f"dtype={options.dtype}": {"dtype": None} if options.dtype else {},
        f"precision={options.precision}": {"precision": "float32"} if options.precision != "float32" else {},
        "Winograd (accuracy='default')": {"accuracy": "strict"} if options.accuracy != "strict" else {},
        "integer products": {"integer": False} if options.integer else {},
        "fused attention": {"attention": False} if options.attention else {},
        "tuned kernels": {"tuned": False} if options.tuned else {},
    }
    found = [(name, replace(options, **change)) for name, change in off.items() if change]
    every = {k: v for change in off.values() for k, v in change.items()}
    return [*found, ("all of these", replace(options, **every))]


def bisect_options(
    kind: str, options: CompileOptions, variants: Sequence[tuple[str, CompileOptions]], model: ModelLike,
    given: Mapping[str, Any], right: Sequence[Any], tell: Tell,
) -> Reduction:  # fmt: skip
    """The first variant, each without one thing, that gives the right answers (ten times nearer, at least)."""
    steps: list[str] = []
    first = _compiled_error(model, options, given, right)
    steps.append(f"as it is: error {first:.1e}")
    if first <= CHANGED:
        return Reduction(kind, "nothing", steps=(*steps, "there is no error to look for"))
    for name, variant in variants:
        tell(f"bisect: without {name}")
        error = _compiled_error(model, variant, given, right)
        steps.append(f"without {name}: error {error:.1e}")
        if error < first / 10:
            return Reduction(kind, name, steps=tuple(steps))
    return Reduction(kind, "", steps=tuple(steps))


def _compiled_error(model: ModelLike, options: CompileOptions, given: Mapping[str, Any], right: Sequence[Any]) -> float:
    return _error(_compiled(model, options, given), right)


def _compiled(model: ModelLike, options: CompileOptions, given: Mapping[str, Any]) -> list[Any]:
    return Onnxc(options).load(model)(given)
