"""Compiles a model, and compares it with what the oracle gave, at the sizes that it grew with and at others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import onnxc
from onnxc.errors import InputError, OnnxcError, UnsupportedError
from tests.fuzz import shadows
from tests.fuzz.model import Model, Run
from tests.fuzz.oracle import Array, Oracle, Refused, Value

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
OTHER_SIZES = [{"n": 2, "m": 17, "k": 1, "t": 4}, {"n": 1, "m": 1, "k": 6, "t": 33}, {"n": 8, "m": 4, "k": 16, "t": 2}]


@dataclass(frozen=True)
class Verdict:
    """What became of a model.

    Attributes:
        kind: `same`; `refused` (with an UnsupportedError, which says what onnxc cannot do); `error`, `wrong`: faults.
        text: what differs, or the error.
        output: the name of the output that differs.
        inputs: those that show it.
    """

    kind: str
    text: str = ""
    output: str = ""
    inputs: Mapping[str, Array] | None = None

    @property
    def is_fault(self) -> bool:
        return self.kind in ("error", "wrong")


def judge(model: Model, oracle: Oracle, other_sizes: bool = True, **options: Any) -> Verdict:
    """Compiles and runs a model. Raises Refused where the oracle does not run it."""
    first = model.run(oracle, model.arrays, steady=False)
    try:
        compiled = onnxc.compile(model.proto(first), **options)
    except UnsupportedError as error:
        return Verdict("refused", str(error))
    except OnnxcError as error:
        return Verdict("error", f"{type(error).__name__}: {error}")
    verdict = _try(model, compiled, first)
    if verdict.kind != "same" or not model.sizes or not other_sizes:
        return verdict
    for k, sizes in enumerate(OTHER_SIZES):
        try:
            run = model.run(oracle, model.draw(sizes, k))
        except Refused:
            continue
        if _means_something(run, first):
            verdict = _try(model, compiled, run)
            if verdict.kind != "same":
                return verdict
    return verdict


def _means_something(run: Run, first: Run) -> bool:
    """Whether nothing is empty that was not in another run (a window does not fit, say), and all is finite."""
    sizes = [(np.size(v), np.size(run.values[n])) for n, v in first.values.items() if not isinstance(v, list)]
    return all(after or not before for before, after in sizes) and all(map(shadows.is_plain, run.values.values()))


def _try(model: Model, compiled: Any, run: Run) -> Verdict:
    try:
        got = {k: _kept(v) for k, v in compiled(**run.inputs).items()}
        again = compiled(**run.inputs)
    except UnsupportedError as error:
        return Verdict("refused", str(error))
    except InputError as error:  # sizes that must be equal, as a program has it; a window that does not fit
        known = any(text in str(error) for text in ("which must be equal", "a negative size"))
        return Verdict("refused" if known else "error", str(error), inputs=run.inputs)
    except OnnxcError as error:
        return Verdict("error", f"{type(error).__name__}: {error}", inputs=run.inputs)
    for name in model.outputs:
        text = difference(got[name], run.values[name], [s[name] for s in run.shadows])
        text = text or ("" if _same_bits(got[name], again[name]) else "other bits in the second run")
        if text:
            return Verdict("wrong", f"{name}: {text}", name, run.inputs)
    return Verdict("same")


def _kept(value: Any) -> Value:
    return [np.array(v) for v in value] if isinstance(value, (list, tuple)) else np.array(value)


def _same_bits(a: Value, b: Any) -> bool:
    if isinstance(a, list):
        return all(_same_bits(x, y) for x, y in zip(a, b, strict=True))
    return a.tobytes() == np.asarray(b).tobytes()


def difference(got: Value, want: Value, others: list[Value]) -> str:
    """How a result differs from the oracle's by more than rounding; empty where it does not."""
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return f"a sequence of {len(want)} was expected"
        texts = [difference(a, b, [s[k] for s in others]) for k, (a, b) in enumerate(zip(got, want, strict=True))]
        return next((f"[{k}] {t}" for k, t in enumerate(texts) if t), "")
    if isinstance(got, list) or got.dtype != want.dtype or got.shape != want.shape:
        shape = "a sequence" if isinstance(got, list) else f"{got.dtype}{list(got.shape)}"
        return f"{shape}, not {want.dtype}{list(want.shape)}"
    with np.errstate(all="ignore"):
        if not shadows.is_float(want):
            wrong = got != want
        else:
            a, b = got.astype(np.float64), want.astype(np.float64)
            unsure = shadows.error(want, others)  # type: ignore[arg-type]
            size = np.where(np.isfinite(b), np.abs(b), 0.0)
            relative = TOLERANCE[want.dtype.name]
            allowed = relative * size + 0.1 * relative * size.max(initial=0.0) + 8 * unsure
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            wrong = ~(same | (np.abs(a - b) <= allowed))
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{want.dtype}{list(want.shape)}: {int(wrong.sum())} of {want.size} differ; at {at} {got[at]}, not {want[at]}"
    )
