"""Layer by layer: which node makes the error, and which only pass it on.

Both sides stream their tensors in the order of the reference's nodes. A layer is what lies between a tensor that both
sides show and the nearest tensors before it that ours shows. The reference's layer is fed *our* inputs, in float64:

    introduced = ours - layer(our inputs)          # what this layer adds
    inherited  = layer(our inputs) - theirs        # what came in

Where the introduced error is more than rounding explains, or where an error appears out of nowhere, the reference's
own engine computes the layer for our inputs too, and onnx's evaluator is asked if those two disagree.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from onnxc.errors import OnnxcError
from onnxc.runtime.cpu import available_cpus
from onnxc.tools.compare.bounds import CASTS, EXACT_OPS, Tolerances, coarsest, gap, graver, layer_bound, only_moves
from onnxc.tools.compare.engines import Engine, Float64, Onnxc, OnnxReference, OnnxRuntime, Strict
from onnxc.tools.compare.local import Layer, Layers, in_engine
from onnxc.tools.compare.metrics import is_float, largest, largest_finite, largest_of, measure, unit, wide
from onnxc.tools.compare.pieces import SourceModel
from onnxc.tools.compare.results import Metrics, TensorComparison
from onnxc.tools.compare.sides import Side, Stream
from onnxc.tools.compare.verdict import Verdict

Array = np.ndarray[Any, Any]
Tell = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")
CHUNK = 48  # nodes that are looked at together
GARBAGE_BYTES = 1 << 30  # of weights of a model whose parts are not left to the garbage collector
CHUNK_BYTES = 1 << 27  # of weights that these have: in float64 they take twice that
WORKERS = 4  # layers that are evaluated at a time, at most: each may hold a few tensors in float64
_NOT_EVALUATED = (OnnxcError, KeyError, ValueError, IndexError)  # what a layer raises that float64 cannot have
JUMP = 100.0  # an error this many times larger than those of a layer's inputs appears out of nowhere


def matched_names(reference: SourceModel, ours: SourceModel | None) -> dict[str, str]:
    """Our name of each tensor that a node of the reference makes, constant ones among them. By name; where two files
    have the same sequence of ops (two exports of one model), by position too.
    """
    if ours is None or ours is reference:
        return {n: n for n in reference.made}
    own = ours.made
    found = {n: n for n in reference.made if n in own}
    if [n.op_type for n in reference.nodes] == [n.op_type for n in ours.nodes]:
        taken = set(found.values())
        for a, b in zip(reference.nodes, ours.nodes, strict=True):
            for x, y in zip(a.output, b.output, strict=False):
                if x and y and x not in found and y in own and y not in taken:
                    found[x] = y
    return found


def layers_of(source: SourceModel, targets: Sequence[str], known: Mapping[str, Any]) -> dict[str, Layer]:
    """The layer of each target, between `known` tensors."""
    found = {}
    for name in targets:
        nodes, inputs = source.cone([name], known)
        found[name] = Layer(name, tuple(nodes), tuple(inputs))
    return found


def compare_layers(
    ours: Side,
    theirs: Side,
    given: Mapping[str, Any],
    tolerances: Tolerances,
    tell: Tell,
    sample: int = 0,
    answers: dict[str, Any] | None = None,
) -> Iterator[TensorComparison]:
    """Every tensor that both sides show, in the order of the reference's nodes. Raises OnnxcError where a side shows
    nothing but its outputs.

    `answers`, where given, is filled with the reference's outputs, as far as nodes make them.
    """
    source = theirs.source or ours.source
    if source is None:
        raise OnnxcError("no side has a model: there are no layers to compare")
    names = matched_names(source, ours.source)
    order = [n for n in source.tensors() if n in names]
    fed = ours.fed(given), theirs.fed(given)
    streams = ours.stream(fed[0], [names[n] for n in order]), theirs.stream(fed[1], order)
    if streams[0] is None or streams[1] is None:
        silent = ours.name if streams[0] is None else theirs.name
        raise OnnxcError(f"{silent} shows its outputs alone: layers cannot be compared")
    cpus = available_cpus()
    with (
        ThreadPoolExecutor(1) as reader,
        ThreadPoolExecutor(min(cpus, WORKERS)) as workers,
        ThreadPoolExecutor(cpus) as blocks,
    ):
        pools = _Pools(reader, workers, blocks)
        shown = (streams[0], streams[1])
        yield from _Walk(pools, source, names, order, shown, theirs, fed, tolerances, tell, sample, answers).run()


@dataclass(frozen=True)
class _Pools:
    """Threads: one that runs both sides a few nodes ahead, those that look at layers, and those that share a large
    product of a layer (which wait for nobody).
    """

    reader: Executor
    workers: Executor
    blocks: Executor


@dataclass
class _Walk:
    """One pass through a model."""

    pools: _Pools
    source: SourceModel
    names: Mapping[str, str]
    order: Sequence[str]
    streams: tuple[Stream, Stream]
    theirs: Side
    given: tuple[Mapping[str, Any], Mapping[str, Any]]  # to ours, and to theirs
    tolerances: Tolerances
    tell: Tell
    sample: int
    answers: dict[str, Any] | None = None
    held: dict[str, Any] = field(default_factory=dict)  # ours, by the reference's names
    other: dict[str, Any] = field(default_factory=dict)  # theirs
    errors: dict[str, float] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)
    whole: dict[str, Layer] = field(default_factory=dict)  # layers that only move numbers, with what computes these

    def run(self) -> Iterator[TensorComparison]:
        shown = [n for n in self.order if self.names[n] in self.streams[0].names]
        targets = [n for n in shown if n in self.streams[1].names]
        self.layers = layers_of(self.source, targets, dict.fromkeys(shown))
        moving = [layer for layer in self.layers.values() if EXACT_OPS.issuperset(self._ops(layer))]
        self.whole = {layer.name: self._whole(layer) for layer in moving}
        last: dict[str, int] = {}
        for layer in (*self.layers.values(), *self.whole.values()):
            end = self.source.made[layer.name]
            last.update((n, max(end, last.get(n, -1))) for n in (layer.name, *layer.inputs))
        self.held.update(self.given[0])
        self.other.update(self.given[1])

        def read(nodes: tuple[int, int]) -> Sequence[Layer]:
            return self._read([n for n in shown if nodes[0] <= self.source.made[n] < nodes[1]], *nodes)

        for (_, end), layers in _one_ahead(self.pools.reader, read, _chunks(self.source)):
            self.tell(f"layers: node {end} of {len(self.source.nodes)}")
            yield from self._rows(layers)
            for store in (self.held, self.other):
                for name in [n for n in list(store) if n not in self.given[0] and last.get(n, -1) < end]:
                    del store[name]
            self.source.forget()
            if self.source.total_bytes > GARBAGE_BYTES:
                gc.collect()  # graphs are full of cycles, and hold weights

    def _whole(self, layer: Layer) -> Layer:
        """A layer with those that make its inputs, and with all before these that our kernels compute inside: another
        kernel than the one that shows a tensor may compute it anew, and round it otherwise.
        """
        inner = {n: self.layers[n] for n in layer.inputs if n in self.layers}
        pending = list(inner.values())
        while pending:
            for name in pending.pop().inputs:
                hidden = self.streams[0].names.get(self.names.get(name, name)) == "inside"
                if hidden and name in self.layers and name not in inner:
                    inner[name] = self.layers[name]
                    pending.append(inner[name])
        parts = [layer, *inner.values()]
        inputs = dict.fromkeys(n for part in parts for n in part.inputs if n not in inner)
        return Layer(layer.name, tuple(sorted({k for part in parts for k in part.nodes})), tuple(inputs))

    def _ops(self, layer: Layer) -> list[str]:
        """The op types of the nodes that the inputs decide about."""
        return [self.source.nodes[k].op_type for k in self.source.computed(layer.nodes)]

    def _read(self, shown: Sequence[str], start: int, end: int) -> Sequence[Layer]:
        """Some nodes on both sides; those of their tensors that can be compared."""
        found = self.streams[0].get([self.names[n] for n in shown])
        ours = {n: found[self.names[n]] for n in shown if self.names[n] in found}
        theirs = self._theirs([n for n in shown if n in self.layers], start, end)
        self.held.update(ours)
        self.other.update(theirs)
        return [self.layers[n] for n in shown if n in self.layers and n in ours and n in theirs]

    def _rows(self, layers: Sequence[Layer]) -> Iterator[TensorComparison]:
        """First how far apart all are, then what of that each layer adds."""
        measured = list(self.pools.workers.map(self._measured, layers))
        pairs = list(zip(layers, measured, strict=True))
        self.errors.update({layer.name: m.error for layer, m in pairs if m is not None})
        local = self._built([layer for layer, m in pairs if m is not None and m.differs])
        return self.pools.workers.map(partial(self._judged, local), layers, measured)

    def _theirs(self, wanted: Sequence[str], start: int, end: int) -> dict[str, Any]:
        """The reference's tensors of some nodes, outputs among them."""
        if self.answers is None:
            return self.streams[1].get(wanted)
        made, fixed = self.source.made, self.source.fixed
        ends = [n for n in self.theirs.output_names if start <= made.get(n, -1) < end and n not in fixed]
        found = self.streams[1].get([*wanted, *(n for n in ends if n not in wanted)])
        self.answers.update({n: found[n] for n in ends if n in found})
        return {n: found[n] for n in wanted if n in found}

    def _judged(self, local: Layers | None, layer: Layer, found: _Measured | None) -> TensorComparison:
        """A layer's row; if it differs, by what the layer gives for our inputs."""
        if found is None:
            return self._row(layer, self.held[layer.name], None, Verdict.SKIPPED, "a sequence or an optional value")
        if not found.differs:
            return self._row(layer, found.ours, found.metrics, found.verdict, found.note, found.error)
        said = self._evaluated(layer, found.ours, found.theirs, local)
        if said.verdict.fails and is_float(found.ours) and layer.name in self.whole:
            said = self._anew(self.whole[layer.name], found.ours, found.theirs, said)
        return self._row(layer, found.ours, found.metrics, said.verdict, said.note, found.error, said, found.scale)

    def _built(self, layers: Sequence[Layer]) -> Layers | None:
        if not layers:
            return None
        try:
            return Layers(self.source, layers, self._feeds(layers), self.pools.blocks)
        except OnnxcError:
            return None

    def _feeds(self, layers: Sequence[Layer]) -> dict[str, Any]:
        """What layers are fed: our values, in the types of the reference's model."""
        feeds: dict[str, Any] = {}
        for layer in layers:
            for name in layer.inputs:
                feeds[name] = self.held[name]
                like = self.other.get(name)
                if isinstance(like, np.ndarray) and isinstance(feeds[name], np.ndarray) and is_float(like):
                    dtype = self.streams[1].types.get(name, like.dtype)
                    feeds[name] = feeds[name].astype(dtype, copy=False)
        return feeds

    # ------------------------------------------------------------ verdicts

    def _measured(self, layer: Layer) -> _Measured | None:
        """How far a tensor is from theirs; None for what is no tensor."""
        a, b = self.held[layer.name], self.other[layer.name]
        if isinstance(a, list) or isinstance(b, list) or a is None or b is None:
            return None
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            note = f"the reference has {b.dtype}{list(b.shape)}"
            return _Measured(a, b, None, math.inf, 1.0, Verdict.WRONG, note)
        metrics = measure(a, b)
        scale = largest_finite(b if b.dtype.kind == "f" else wide(b)) if is_float(b) else 1.0
        error = math.inf if metrics.mismatches else metrics.max_abs / (scale or 1.0)
        if not is_float(a):
            error = float(metrics.mismatches) / max(a.size, 1)
        if not error and _equal(a, b):
            return _Measured(a, b, metrics, 0.0, scale, Verdict.EQUAL)
        return _Measured(a, b, metrics, error, scale)

    def _evaluated(self, layer: Layer, a: Array, b: Array, local: Layers | None) -> _Judgement:
        """What the layer adds, and whether rounding explains it."""
        feeds = self._feeds([layer])
        ops = self._ops(layer)
        eps, rounds = self._unit(layer, a, b, feeds), self._only_rounds(layer, ops, feeds)
        exact, introduced, inherited, bound = None, math.inf, None, 0.0
        if local is not None:
            try:
                exact = _as_stored((local.narrow if rounds else local.exact)(layer, feeds), a)
                introduced, inherited = gap(a, exact), gap(exact, b)
                bound = self._bound(layer, ops, exact, None, eps)
                if introduced > bound and eps:
                    bound = self._loosest(layer, ops, exact, feeds, eps, local)
            except _NOT_EVALUATED:  # that is left to the engine
                exact, introduced, inherited = None, math.inf, None
        judged = _Judgement(Verdict.ROUNDING, introduced, inherited, bound, unit=eps)
        if exact is not None and introduced <= bound and not self._appears(layer, inherited or 0.0, bound):
            return judged
        return self._asked(layer, a, b, feeds, judged, exact, ops, eps, local)

    def _unit(self, layer: Layer, a: Array, b: Array, feeds: Mapping[str, Any]) -> float:
        """The coarsest unit of a tensor: of what both sides show, of what their models say it is, of what models are
        converted to, and of what our inputs are rounded to for the layer.
        """
        declared = self.streams[0].types.get(self.names[layer.name]), self.streams[1].types.get(layer.name)
        units = [unit(t) for t in (*declared, *(s.halves for s in self.streams)) if t is not None]
        units += [unit(feeds[n].dtype) for n in layer.inputs if self._is_rounded(n, feeds)]
        return max([coarsest(a, b), *units]) if is_float(a) else 0.0

    def _is_rounded(self, name: str, feeds: Mapping[str, Any]) -> bool:
        """Whether a layer is fed one of our tensors in another float type."""
        fed, ours = feeds[name], self.held[name]
        return isinstance(fed, np.ndarray) and isinstance(ours, np.ndarray) and fed.dtype != ours.dtype

    def _only_rounds(self, layer: Layer, ops: list[str], feeds: Mapping[str, Any]) -> bool:
        """Whether a layer moves numbers and casts them, the same types on both sides: then its result is certain."""
        known = self.streams[0].types
        plain = all(self.names.get(n, n) not in known for n in (layer.name, *layer.inputs))
        same = self.held[layer.name].dtype == self.other[layer.name].dtype
        casts = not CASTS.isdisjoint(ops) and only_moves(ops)
        return casts and plain and same and not any(self._is_rounded(n, feeds) for n in layer.inputs)

    def _appears(self, layer: Layer, inherited: float, bound: float) -> bool:
        """Whether an error that seems inherited was in none of the inputs: then the float64 model may be wrong."""
        before = max((self.errors.get(n, 0.0) for n in layer.inputs), default=0.0)
        return inherited > bound and self.errors[layer.name] > JUMP * before

    def _anew(self, layer: Layer, a: Array, b: Array, judged: _Judgement) -> _Judgement:
        """The verdict on a layer that only moves numbers, by that layer and what computes them."""
        feeds, ops = self._feeds([layer]), self._ops(layer)
        try:
            local = Layers(self.source, [layer], feeds, self.pools.blocks)
            exact = _as_stored(local.exact(layer, feeds), a)
            bound = self._loosest(layer, ops, exact, feeds, judged.unit, local)
        except _NOT_EVALUATED:
            return judged
        introduced = gap(a, exact)
        if introduced > bound:
            return judged
        note = "a kernel computes anew what it reads"
        return _Judgement(Verdict.ROUNDING, introduced, gap(exact, b), bound, note, judged.unit)

    def _asked(
        self, layer: Layer, a: Array, b: Array, feeds: Mapping[str, Any], judged: _Judgement, exact: Array | None,
        ops: list[str], eps: float, local: Layers | None,
    ) -> _Judgement:  # fmt: skip
        """Asks the reference's engine, and onnx's evaluator where it and float64 disagree about ours."""
        engine = self._engine()
        said = self._in(engine, layer, feeds)
        if said is None or said.shape != a.shape:
            if exact is None:
                return _Judgement(Verdict.SKIPPED, None, None, None, "the layer cannot be evaluated alone", eps)
            worse = judged.introduced is not None and judged.introduced > (judged.bound or 0.0)
            verdict = graver(judged.introduced or 0.0, largest_finite(wide(exact)), eps) if worse else Verdict.ROUNDING
            return judged.but(verdict, "by the layer in float64")
        bound = max(judged.bound or 0.0, self._bound(layer, ops, wide(said) if is_float(said) else said, None, eps))
        if exact is not None and local is not None and is_float(a) and bound < gap(a, said):
            bound = max(bound, self._loosest(layer, ops, exact, feeds, eps, local))
        theirs = gap(a, said)
        if theirs <= bound:
            note = "" if exact is None else f"{engine.name} gives the same for our inputs"
            return _Judgement(Verdict.ROUNDING, theirs, gap(said, b), bound, note, eps)
        if exact is not None and (judged.introduced or 0.0) <= bound:
            for third, note in self._others(engine, layer, feeds):
                if third.shape == a.shape and gap(a, third) <= bound:
                    return judged.but(Verdict.THEIRS_WORSE, note)
        if exact is not None and local is not None and gap(exact, said) <= bound:
            finer = self._unrounded(layer, feeds, local)
            if finer is not None and gap(a, finer) <= bound:
                judged = replace(judged, introduced=gap(a, finer), inherited=gap(finer, b))
                return judged.but(Verdict.ROUNDING, "ours does not round the layer's inputs")
        verdict = graver(theirs, largest_finite(wide(said)) if is_float(said) else 1.0, eps)
        note = f"{engine.name} gives otherwise for our inputs"
        return _Judgement(verdict, theirs, gap(said, b), bound, note, eps)

    def _unrounded(self, layer: Layer, feeds: Mapping[str, Any], local: Layers) -> Array | None:
        """The layer in float64 for our inputs as they are, where it is fed halves that we hold as floats."""
        rounded = [n for n in layer.inputs if self._is_rounded(n, feeds)]
        return local.exact(layer, {**feeds, **{n: self.held[n] for n in rounded}}) if rounded else None

    def _others(self, engine: Engine, layer: Layer, feeds: Mapping[str, Any]) -> Iterator[tuple[Array, str]]:
        """Further answers for a layer that float64 agrees about with ours, and what it means if they agree too."""
        if (found := self._in(OnnxReference(), layer, feeds)) is not None:
            yield found, f"{engine.name} is alone: float64 and onnx's evaluator agree with ours"
        if (found := self._in(Strict(engine), layer, feeds)) is not None:
            yield found, f"accuracy_level lets {engine.name} round inputs to fewer bits; without it, it agrees"

    def _engine(self) -> Engine:
        engine = getattr(self.theirs, "engine", None)
        if engine is None or isinstance(engine, (Float64, Onnxc)):
            return OnnxRuntime()
        return OnnxRuntime() if isinstance(engine, OnnxRuntime) else engine

    def _in(self, engine: Engine, layer: Layer, feeds: Mapping[str, Any]) -> Array | None:
        try:
            found = in_engine(engine, self.source, layer, feeds)
        except OnnxcError:
            return None
        return np.asarray(found)

    def _loosest(
        self, layer: Layer, ops: list[str], exact: Array, feeds: Mapping[str, Any], eps: float, local: Layers
    ) -> float:
        """The bound by what numpy's rounding gives, and by what other rounding of the inputs does to repeated steps."""
        others = (local.narrow(layer, feeds), local.nudged(layer, feeds, eps))
        return max(self._bound(layer, ops, exact, other, eps) for other in others)

    def _bound(self, layer: Layer, ops: list[str], exact: Array, narrow: Array | None, eps: float) -> float:
        asked = self.tolerances.asked(ops[-1] if ops else "", str(self.held[layer.name].dtype))
        if asked is not None:
            return asked * (largest_finite(wide(exact)) if is_float(exact) else 1.0)
        if not is_float(exact):
            return 0.0
        same = self.held[layer.name].dtype == self.other[layer.name].dtype
        same = same and (CASTS.isdisjoint(ops) or self._only_rounds(layer, ops, self._feeds([layer])))
        return layer_bound(ops, exact, narrow, eps, exactly=same)

    # ------------------------------------------------------------ rows

    def _row(
        self, layer: Layer, a: Any, metrics: Any, verdict: Verdict, note: str = "", error: float = 0.0,
        judged: _Judgement | None = None, scale: float = 1.0,
    ) -> TensorComparison:  # fmt: skip
        k = self.source.made[layer.name]
        node = self.source.nodes[k]
        name = self.names[layer.name]
        scale = scale or 1.0

        def part(x: float | None) -> float | None:
            return None if x is None else x / scale

        return TensorComparison(
            name=layer.name,
            node=self.source.numbers[k],
            op_type=node.op_type,
            node_name=node.name,
            origin=self.source.line(k),
            layer=tuple(self.source.numbers[n] for n in self.source.computed(layer.nodes)),
            depth=self.source.depths[k],
            dtype=str(a.dtype) if isinstance(a, np.ndarray) else "sequence",
            shape=tuple(a.shape) if isinstance(a, np.ndarray) else (),
            metrics=None if verdict is Verdict.SKIPPED else metrics,
            error=error,
            inherited=part(judged.inherited) if judged else None,
            introduced=part(judged.introduced) if judged else None,
            bound=part(judged.bound) if judged else None,
            verdict=verdict,
            note=note,
            ours_name=name if name != layer.name else "",
            tap=self.streams[0].names.get(name, ""),
            sample=self.sample,
            unit=judged.unit if judged else 0.0,
        )


@dataclass(frozen=True)
class _Measured:
    """A tensor of both sides. `verdict` is what their distance alone says."""

    ours: Array
    theirs: Array
    metrics: Metrics | None
    error: float
    scale: float
    verdict: Verdict = Verdict.ROUNDING
    note: str = ""

    @property
    def differs(self) -> bool:
        """Whether the layer has to be evaluated to judge it."""
        return self.verdict is Verdict.ROUNDING


@dataclass(frozen=True)
class _Judgement:
    """Absolute errors of a layer, and the unit that its bound is made of."""

    verdict: Verdict
    introduced: float | None
    inherited: float | None
    bound: float | None
    note: str = ""
    unit: float = 0.0

    def but(self, verdict: Verdict, note: str) -> _Judgement:
        """The same numbers, another verdict."""
        return _Judgement(verdict, self.introduced, self.inherited, self.bound, note, self.unit)


def _one_ahead(pool: Executor, action: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Each item with what the action gives for it, which was begun before the item before was handed out."""
    last: tuple[T, Future[R]] | None = None
    for item in items:
        coming = (item, pool.submit(action, item))
        if last is not None:
            yield last[0], last[1].result()
        last = coming
    if last is not None:
        yield last[0], last[1].result()


def _chunks(source: SourceModel) -> Iterator[tuple[int, int]]:
    """Ranges of nodes that are looked at together."""
    start = total = 0
    for k in range(len(source.nodes)):
        total += source.weight_bytes(k)
        if k > start and (k - start == CHUNK or total > CHUNK_BYTES):
            yield start, k
            start, total = k, source.weight_bytes(k)
    if source.nodes:
        yield start, len(source.nodes)


def _equal(a: Array, b: Array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


def _as_stored(exact: Array, like: Array) -> Array:
    """float64 results where the tensor's own type overflows: what is infinite there is infinite here."""
    if not is_float(like) or not is_float(exact):
        return exact
    if exact.dtype.kind == "f" and largest(exact) <= largest_of(like.dtype):
        return wide(exact) if exact.dtype != np.float64 else exact
    with np.errstate(all="ignore"):
        narrow = wide(exact.astype(like.dtype))
    return np.where(np.isfinite(narrow), wide(exact), narrow)
