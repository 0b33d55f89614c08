"""What a comparison finds, as objects: `Comparison`, its outputs and its layers.

Stable: reports and CI read these attributes, or what `to_dict()` makes of them. Numbers are plain Python ones; an
error that is not finite (a NaN or an infinity on one side alone) is `inf`, and None in `to_dict()`.

The two sides are called *ours* (`Comparison.sides[0]`, the one that is judged) and *theirs* (`sides[1]`). Errors are
of ours, measured against theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from onnxc.reports.printed import Printed
from onnxc.tools.compare.verdict import Verdict


@dataclass(frozen=True)
class Special:
    """Numbers that are not finite, in one tensor of one side.

    Attributes:
        nan, posinf, neginf: how many elements.
        first: the index of the first one of them in row-major order; None where all are finite.
    """

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    first: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """How many elements are not finite."""
        return self.nan + self.posinf + self.neginf


@dataclass(frozen=True)
class Metrics:
    """How far a tensor of ours is from theirs. Quantiles and units in the last place are those of a sample of 16,384
    elements where a tensor has more (and of the element with the largest difference).

    Attributes:
        max_abs: the largest absolute difference of elements that are finite on both sides.
        mean_abs: the mean of these.
        max_rel: `max_abs` divided by the largest finite magnitude of theirs.
        rms_rel: root mean square of the difference, divided by the root mean square of theirs.
        abs_quantiles: absolute differences at 50, 90, 99 and 99.9 %: `{"0.5": ...}`.
        ulp_max: the largest difference in units in the last place of the dtype; None where it is not a float.
        ulp_quantiles: the same at 50, 90, 99 and 99.9 %.
        ulp_histogram: elements by difference in ulp: 0, then 1, 2-3, 4-7, 8-15, ...: `{"0": 90, "1": 8, "2": 2}`, each
            key the lower end of its bin.
        cosine: of the angle between both tensors as vectors; None where one is zero.
        snr_db: ten times the decimal logarithm of theirs' power by the difference's; None where they are equal.
        mismatches: elements of which one is NaN or infinite and the other is not (or of another sign); elements that
            are not equal, for integers and booleans.
        zero_signs: zeros whose signs differ. Shown, and not a reason to differ.
        worst: the index of the largest difference, row-major; None for empty tensors.
        top1, top5: for what may be logits (a float output of at least two columns): the share of rows whose largest
            elements, or five largest as a set, are at the same places; None elsewhere.
        ours, theirs: NaN and infinities of each side.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    rms_rel: float
    abs_quantiles: Mapping[str, float] = field(default_factory=dict)
    ulp_max: float | None = None
    ulp_quantiles: Mapping[str, float] = field(default_factory=dict)
    ulp_histogram: Mapping[str, int] = field(default_factory=dict)
    cosine: float | None = None
    snr_db: float | None = None
    mismatches: int = 0
    zero_signs: int = 0
    worst: tuple[int, ...] | None = None
    top1: float | None = None
    top5: float | None = None
    ours: Special = Special()
    theirs: Special = Special()


@dataclass(frozen=True)
class OutputComparison:
    """One output of one sample.

    Attributes:
        max_abs: the largest absolute difference of finite elements from the reference.
        max_rel: `max_abs` by the reference's largest finite value.
        mismatches: integers and booleans that are not equal; floats of which one is NaN or infinite and the
            other is not (or of another sign).
        agrees: whether ours passes: the verdict is neither OURS_WORSE nor WRONG.
        zero_signs: zeros whose signs differ. Shown, and not a reason to differ.
        errors64: largest distance to float64, of ours and of the reference, where float64 was asked.
        note: what decided.
        verdict: see `Verdict`.
        bound: the largest distance to float64 that rounding explains, given dtype and depth, where it was asked.
        metrics: everything else; None where shapes differ.
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
    verdict: Verdict = Verdict.ROUNDING
    bound: float | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True)
class TensorComparison:
    """One tensor inside of the model (or an output), in the order of the model's nodes.

    With a layer's *inputs* are meant the nearest tensors before it that both sides show; where a side has fused
    several nodes into one, the layer is all of them.

    Attributes:
        name: the tensor's name in the reference's model.
        ours_name: its name on our side, where it is another.
        node: number of the node that makes it, in the order of the reference's file (`n17`).
        op_type: that node's ONNX op type.
        node_name: that node's name; empty where it has none.
        origin: the source line that the exporter left, or "".
        layer: numbers of all nodes between the layer's inputs and this tensor, `node` the last.
        depth: nodes on the longest path from the model's inputs to this tensor.
        dtype, shape: of ours.
        metrics: distances from theirs; None where the verdict is SKIPPED.
        error: the largest error of ours against theirs, relative to theirs' largest value.
        inherited: that part of `error` which comes in with the layer's inputs: the reference's layer is fed our inputs,
            and what comes out is compared with theirs. None where it was not evaluated.
        introduced: the part which this layer makes: ours is compared with what the reference's layer gives for our
            inputs. None where it was not evaluated.
        bound: what of `introduced` rounding explains, given the dtype and the operations of the layer.
        tap: how our side showed the tensor: "output" (the model's own, or a graph output), "stored" (a kernel stores
            it anyway), "inside" (written from inside of a fused kernel, which is otherwise the same), or "".
        verdict: of what this layer introduces, where that was evaluated; else of the tensor.
        note: what decided, in words.
        sample: which sample this is of.
        unit: from 1 to the next number, in the coarsest type that counts: of what both sides show, of what their models
            declare, of what our inputs are rounded to for the layer. 0 where the layer was not evaluated.
    """

    name: str
    node: int
    op_type: str
    node_name: str
    origin: str
    layer: tuple[int, ...]
    depth: int
    dtype: str
    shape: tuple[int, ...]
    metrics: Metrics | None
    error: float
    inherited: float | None
    introduced: float | None
    bound: float | None
    verdict: Verdict
    note: str = ""
    ours_name: str = ""
    tap: str = ""
    sample: int = 0
    unit: float = 0.0

    @property
    def label(self) -> str:
        """`n17 LayerNormalization`"""
        return f"n{self.node} {self.op_type}"


@dataclass(frozen=True)
class Reduction:
    """What `reduce` and `--bisect` found.

    Attributes:
        kind: "nodes", "passes", "fusion" or "precision".
        culprit: the node (`n17 Softmax`), fusion option, pass or part that makes the difference; "" where none was
            found.
        nodes: numbers of the model's nodes that are left in the smallest failing model.
        steps: what was tried, with what came of it, in order.
        model: path of the smallest failing ONNX model, where one was written.
        inputs: path of its inputs (.npz).
        command: one line that shows the fault again.
    """

    kind: str
    culprit: str
    nodes: tuple[int, ...] = ()
    steps: tuple[str, ...] = ()
    model: str = ""
    inputs: str = ""
    command: str = ""


@dataclass(frozen=True)
class Comparison(Printed):
    """The outcome of `compare`: true where every output of every sample agrees.

    Attributes:
        outputs: each output of each sample (with `keep_worst`, of the worst sample of each output).
        reference: the name of their side ("onnxruntime").
        samples: how many sets of inputs were run.
        rtol, atol: tolerances; relative to each element, and to the output's largest value.
        sides: what both sides are, in words.
        seed: of random inputs; None where they were given.
        layers: tensors inside of the model in the order of its nodes; empty without `layers=True`.
        reduction: what a bisection found; None where none was asked for.
        seconds: of each stage.
        peak_bytes: the most memory that the process has had, and onnxruntime's beside it, where it was measured.
        notes: what there is to know about the whole (a fallback that was taken).
    """

    outputs: tuple[OutputComparison, ...]
    reference: str
    samples: int
    rtol: float
    atol: float
    sides: tuple[str, str] = ("onnxc", "onnxruntime")
    seed: int | None = None
    layers: tuple[TensorComparison, ...] = ()
    reduction: Reduction | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether every output agrees."""
        return all(o.agrees for o in self.outputs)

    def __bool__(self) -> bool:
        return self.agree

    def __repr__(self) -> str:
        """One line: print() shows the tables."""
        ours, theirs = self.sides
        culprit = f", made by {self.culprit.label}" if self.culprit is not None else ""
        counts = f"{len(self.outputs)} outputs, {len(self.layers)} tensors inside"
        return f"<{ours} against {theirs}: {self.verdict.value}{culprit}; {counts}>"

    @property
    def verdict(self) -> Verdict:
        """The gravest of the outputs' verdicts."""
        order = [v for v in Verdict if v is not Verdict.SKIPPED]
        return max((o.verdict for o in self.outputs if o.verdict in order), key=order.index, default=Verdict.EQUAL)

    @property
    def faults(self) -> tuple[TensorComparison, ...]:
        """The layers that introduce more error than rounding explains, in the order of the model."""
        return tuple(t for t in self.layers if t.verdict.fails)

    @property
    def culprit(self) -> TensorComparison | None:
        """The first of `faults`: the node that made the difference."""
        return next(iter(self.faults), None)

    @property
    def first_divergence(self) -> TensorComparison | None:
        """The first layer, in the order of the model, that is not equal on both sides."""
        return next((t for t in self.layers if t.verdict not in (Verdict.EQUAL, Verdict.SKIPPED) and t.error > 0), None)

    @property
    def first_nonfinite(self) -> tuple[str, TensorComparison] | None:
        """The first layer with a NaN or an infinity in it, and on which side ("ours", "theirs" or "both")."""
        for t in self.layers:
            if t.metrics is not None and (t.metrics.ours.count or t.metrics.theirs.count):
                ours, theirs = bool(t.metrics.ours.count), bool(t.metrics.theirs.count)
                return ("both" if ours and theirs else "ours" if ours else "theirs"), t
        return None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can write it (a value that is not finite is None)."""
        settings = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("outputs", "layers")}
        culprit, nonfinite = self.culprit, self.first_nonfinite
        return {
            "agree": self.agree,
            "verdict": self.verdict.value,
            "culprit": culprit.name if culprit else None,
            "first_nonfinite": {"side": nonfinite[0], "name": nonfinite[1].name} if nonfinite else None,
            **settings,
            "outputs": [plain(o) for o in self.outputs],
            "layers": [plain(t) for t in self.layers],
        }

    def rendered(self, width: int) -> Iterable[Any]:
        from onnxc.tools.compare.tables import comparison_tables  # it imports rich: see `Printed`

        return comparison_tables(self, width)


def plain(value: Any) -> Any:
    """Of what JSON has: dataclasses as dicts, tuples as lists, what is not finite as None."""
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
