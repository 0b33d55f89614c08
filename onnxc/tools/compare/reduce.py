"""The smallest model that still fails: nodes are cut away while the same tensor differs as much.

    found = reduce_nodes(ours, theirs, given, "h17", error=0.3, folder="case")

What is cut away becomes inputs, fed with the reference's values. Both sides run every candidate anew; of two files,
each side gets its own part between the same tensors.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxc.errors import InputError, OnnxcError
from onnxc.tools.compare.bounds import coarsest, gap, layer_bound
from onnxc.tools.compare.engines import Engine, Onnxc, OnnxRuntime
from onnxc.tools.compare.layers import matched_names
from onnxc.tools.compare.metrics import is_float, largest_finite, wide
from onnxc.tools.compare.pieces import SourceModel, input_names, typed_outputs
from onnxc.tools.compare.results import Comparison, Reduction
from onnxc.tools.compare.sides import OnnxcSide, PieceStream, Side
from onnxc.tools.inputs import write_arrays

Tell = Callable[[str], None]
ALIKE = 0.1  # of the first error, or of the values where that is larger: what is smaller is another fault
MOST_TRIES = 200


@dataclass
class Case:
    """What both sides make of a part of the model.

    Attributes:
        nodes: positions in the reference's nodes.
        error: of the tensor, relative to its largest value.
    """

    nodes: tuple[int, ...]
    error: float


class Reducer:
    """Runs candidates: parts of the reference's model that end with one tensor."""

    def __init__(self, ours: Side, theirs: Side, given: Mapping[str, Any], end: str, error: float, tell: Tell) -> None:
        source = theirs.source or ours.source
        if source is None:
            raise InputError("no side has a model: there is nothing to reduce")
        self.source, self.own = source, ours.source or source
        self.ours, self.theirs, self.end, self.error, self.tell = ours, theirs, end, error, tell
        self.names = matched_names(source, ours.source)
        self.given = ours.fed(given)
        self.values: dict[str, Any] = theirs.fed(given)
        self.tries = 0
        self._tried: dict[tuple[int, ...], Case | None] = {}

    def engine(self) -> Engine:
        """Of our side, for parts of the model: their types are those of the values that they are fed."""
        engine = self.ours.engine
        if isinstance(self.ours, OnnxcSide):
            return Onnxc(replace(self.ours.options, input_shapes={}, base_dir=None))
        return engine

    def reference(self) -> Engine:
        """Of their side."""
        return getattr(self.theirs, "engine", None) or OnnxRuntime()

    def fetch(self, names: Sequence[str]) -> None:
        """The reference's values of tensors, for cuts."""
        missing = [n for n in self.source.tensors() if n in names and n not in self.values]
        if missing:
            engine = self.reference()
            stream = PieceStream(self.source, engine if not isinstance(engine, Onnxc) else OnnxRuntime(), self.given)
            self.values.update(stream.get(missing))

    def cut(self, kept: Sequence[int]) -> tuple[list[int], list[str]]:
        """The kept nodes that the end needs, and what they are fed."""
        inside = set(kept)
        stop = {o for k, n in enumerate(self.source.nodes) if k not in inside for o in n.output if o}
        return self.source.cone([self.end], stop - self.source.fixed)

    def models(self, nodes: Sequence[int], feeds: Sequence[str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The part as a model of ours and as one of theirs."""
        values = {n: self.values[n] for n in feeds}
        theirs = self.source.piece(nodes, values, [self.end])
        if self.own is self.source or self.own.model is self.source.model:
            return theirs, theirs
        read = {n for k in nodes for n in self.source.reads[k]}
        other = {self.names[n]: a for n, a in values.items() if n in self.names}
        other |= {n: a for n, a in self.given.items() if n in read}
        own_nodes, own_feeds = self.own.cone([self.names[self.end]], {self.names.get(n, n) for n in feeds})
        missing = [n for n in own_feeds if n not in other]
        if any(n not in self.given for n in missing):
            raise InputError("the part of our file between the same tensors reads others")
        other |= {n: self.given[n] for n in missing}
        theirs = self.source.piece(nodes, values | other, [self.end], [n for n in missing if n not in self.names])
        return self.own.piece(own_nodes, other, [self.names[self.end]], list(other)), theirs

    def run(self, kept: Sequence[int]) -> Case | None:
        """The case where it fails alike; None where it does not, or cannot be run."""
        nodes, feeds = self.cut(kept)
        key = tuple(nodes)
        if key not in self._tried and self.tries < MOST_TRIES:
            self.tries += 1
            self.tell(f"reduce: {len(nodes)} nodes, try {self.tries}")
            try:
                self.fetch(feeds)
                self._tried[key] = self._run(key, feeds)
            except OnnxcError:
                self._tried[key] = None
        return self._tried.get(key)

    def answers(self, nodes: Sequence[int], feeds: Sequence[str]) -> tuple[onnx.ModelProto, onnx.ModelProto, Any, Any]:
        """The part as a model of ours and as one of theirs, and the tensor that each of them gives."""
        ours, theirs = self.models(nodes, feeds)
        (b,) = self.reference().load(theirs)({n: self.values[n] for n in input_names(theirs)})
        back = {v: k for k, v in self.names.items()}
        given = {
            n: self.values[back.get(n, n)] if back.get(n, n) in self.values else self.given[n]
            for n in input_names(ours)
        }
        (a,) = self.engine().load(ours)(given)
        return ours, theirs, a, b

    def _run(self, nodes: tuple[int, ...], feeds: Sequence[str]) -> Case | None:
        _, _, *found = self.answers(nodes, feeds)
        if any(isinstance(x, list) for x in found):  # sequences, whose lengths differ
            lengths = [len(x) if isinstance(x, list) else None for x in found]
            return Case(nodes, math.inf) if lengths[0] != lengths[1] else None
        a, b = map(np.asarray, found)
        scale = largest_finite(wide(b)) if is_float(b) else 1.0
        distance = gap(a, b)
        ops = [self.source.nodes[k].op_type for k in self.source.computed(nodes)]
        bound = layer_bound(ops, wide(b), None, coarsest(a, b), exactly=a.dtype == b.dtype) if is_float(b) else 0.0
        error = distance / (scale or 1.0)
        alike = not math.isfinite(self.error) or error >= ALIKE * min(self.error, 1.0) or not math.isfinite(error)
        return Case(nodes, error) if distance > bound and alike else None


def reduce_nodes(reducer: Reducer, start: Sequence[int]) -> Case | None:
    """The smallest failing part: first the layer where the error is made, then ever larger surroundings of it."""
    every = len(reducer.source.nodes)
    centre = reducer.source.made[reducer.end]
    case = reducer.run(start)
    reach = max(2, len(start))
    while case is None:
        case = reducer.run(range(max(0, centre - reach), centre + 1))
        if reach > every:
            break
        reach *= 2
    return None if case is None else _smaller(reducer, case)


def _smaller(reducer: Reducer, case: Case) -> Case:
    """Cuts away runs of nodes, of half the length each time."""
    width = max(1, len(case.nodes) // 2)
    while True:
        for first in range(0, len(case.nodes), width):
            kept = [*case.nodes[:first], *case.nodes[first + width :]]
            if reducer.source.made[reducer.end] not in kept:
                continue
            found = reducer.run(kept)
            if found is not None and len(found.nodes) < len(case.nodes):
                case = found
                break
        else:
            if width == 1:
                return case
            width //= 2
            continue
        width = min(width, max(1, len(case.nodes) // 2))


def reduction(
    found: Comparison, ours: Side, theirs: Side, given: Mapping[str, Any], folder: str | Path | None, options: str,
    tell: Tell,
) -> Reduction:  # fmt: skip
    """Reduces a comparison that failed; writes the result into `folder`, where one is given."""
    source = theirs.source or ours.source
    culprit = found.culprit
    if culprit is not None:
        end, error = culprit.name, culprit.introduced or culprit.error
        start = [source.made[end]] if source else []
        numbers = set(culprit.layer)
        start = [k for k, n in enumerate(source.numbers) if n in numbers] if source else []
    else:
        worst = next((o for o in found.outputs if not o.agrees), None)
        if worst is None or source is None or worst.name not in source.made:
            return Reduction("nodes", "", steps=("nothing differs by more than rounding: there is nothing to reduce",))
        end, error = worst.name, math.inf if worst.mismatches else worst.max_rel
        start = [source.made[end]]
    reducer = Reducer(ours, theirs, given, end, error, tell)
    case = reduce_nodes(reducer, start)
    tried = f"{reducer.tries} parts of the model were run"
    if case is None:
        return Reduction("nodes", culprit.label if culprit else "", steps=(tried, "no part of the model fails alone"))
    assert source is not None
    label = culprit.label if culprit else ""
    if not label:
        k = case.nodes[-1]
        label = f"n{source.numbers[k]} {source.nodes[k].op_type}"
    left = source.computed(case.nodes) or case.nodes  # what the inputs decide about, where they decide about the end
    result = Reduction("nodes", label, tuple(source.numbers[k] for k in left), (tried,))
    return result if folder is None else _written(result, reducer, case, Path(folder), options)


def _written(result: Reduction, reducer: Reducer, case: Case, folder: Path, options: str) -> Reduction:
    """The case as files, with the command that shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    _, feeds = reducer.cut(case.nodes)
    ours, theirs, a, b = reducer.answers(case.nodes, feeds)
    model, inputs = folder / "model.onnx", folder / "inputs.npz"
    onnx.save(typed_outputs(ours, {o.name: a for o in ours.graph.output}), model)
    write_arrays(inputs, {n: reducer.values[n] for n in input_names(theirs)})
    against = reducer.reference().name
    if ours is not theirs:
        onnx.save(typed_outputs(theirs, {o.name: b for o in theirs.graph.output}), folder / "reference.onnx")
        against = str(folder / "reference.onnx")
    own = "" if isinstance(reducer.ours, OnnxcSide) else f" --ours {shlex.quote(reducer.engine().name)}"
    command = (
        f"onnxc compare {shlex.quote(str(model))} --inputs {shlex.quote(str(inputs))}"
        f"{own} --reference {shlex.quote(against)} --layers{options}"
    )
    return replace(result, model=str(model), inputs=str(inputs), command=command)


__all__ = ["Case", "Reducer", "SourceModel", "reduce_nodes", "reduction"]
