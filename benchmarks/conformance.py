"""The standard's own backend suite through ``onnxc.backend``: how many of its cases hold, with the suite's tolerances.

    python -m benchmarks.conformance                        # the table
    python -m benchmarks.conformance --json results.json    # each case's verdict, too
    python -m benchmarks.conformance --only 'cast|resize' --device CUDA
    python -m benchmarks.conformance --open                 # with models whose inputs have no fixed sizes

A case holds where every output (of a sequence, every element) has the expected dtype and shape, and values within the
case's own rtol and atol. There are no exclusions: a model that is not supported is a failure, and a case that would be
skipped too. The expected values of :data:`RANDOM` are one draw of one generator; those cases are judged by shape,
dtype, seed and distribution.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto
from onnx.backend.test import BackendTest
from onnx.backend.test.loader import load_model_tests

from onnxc.backend import Backend, BackendRep

KINDS = {
    "OnnxBackendNodeModelTest": "node", "OnnxBackendSimpleModelTest": "simple",
    "OnnxBackendPyTorchConvertedModelTest": "pytorch-converted",
    "OnnxBackendPyTorchOperatorModelTest": "pytorch-operator", "OnnxBackendRealModelTest": "light models",
}  # fmt: skip
BERNOULLI = frozenset(
    f"test_bernoulli{dtype}{form}" for dtype in ("", "_double", "_seed") for form in ("", "_expanded")
)
DROPOUT = frozenset(f"test_training_dropout{case}" for case in ("", "_default", "_mask", "_default_mask"))
RANDOM = BERNOULLI | DROPOUT
DRAWS = 400


@dataclass
class Verdict:
    """What came of a case.

    Attributes:
        kind: which part of the suite it belongs to.
        error: why it does not hold; empty where it does.
        seconds: of compiling and running it.
        ops: the operators of its model, "domain::Type" or "Type".
        dtypes: ONNX numbers of the types that its inputs and outputs have.
        runs_on: "kernels", "host" or "kernels and host".
    """

    kind: str
    error: str = ""
    seconds: float = 0.0
    ops: list[str] = field(default_factory=list)
    dtypes: list[int] = field(default_factory=list)
    runs_on: str = ""


class Observed(Backend):
    """onnxc's backend, which remembers what it prepared last. It takes every model: nothing is skipped."""

    model: ModelProto | None = None
    prepared: BackendRep | None = None
    open = False  # whether the sizes of inputs are left open

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        return True

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        cls.model, cls.prepared = model, None
        cls.prepared = super().prepare(opened(model) if cls.open else model, device, **kwargs)
        return cls.prepared


def opened(model: ModelProto) -> ModelProto:
    """The model with a name of its own for each dim of its inputs, and nothing but the ranks of others."""
    model = ModelProto.FromString(model.SerializeToString())
    fixed = {tensor.name for tensor in model.graph.initializer}
    for i, info in enumerate(x for x in model.graph.input if x.name not in fixed):
        for k, dim in enumerate(info.type.tensor_type.shape.dim):
            dim.dim_param = f"d{i}_{k}"
    for dim in (d for info in model.graph.output for d in info.type.tensor_type.shape.dim):
        dim.Clear()
    del model.graph.value_info[:]
    return model


class Suite(BackendTest):
    """The suite, with what is in sequences compared by dtype and shape too. (Its own way fails on scalars in them.)"""

    @classmethod
    def assert_similar_outputs(
        cls, ref_outputs: Sequence[Any], outputs: Sequence[Any], rtol: float, atol: float, model_dir: str | None = None
    ) -> None:
        assert len(outputs) == len(ref_outputs), f"{len(outputs)} values and not {len(ref_outputs)}"
        for wanted, got in zip(ref_outputs, outputs, strict=True):
            if isinstance(wanted, (list, tuple)):
                assert isinstance(got, (list, tuple)), f"{type(got)} and no sequence"
                cls.assert_similar_outputs(wanted, got, rtol, atol, model_dir)
            elif wanted is None or got is None:
                assert wanted is got, f"{got!r} and not {wanted!r}"
            else:
                super().assert_similar_outputs([wanted], [got], rtol, atol, model_dir)


@dataclass(frozen=True)
class Case:
    """A case of the suite: `run` raises where it does not hold."""

    name: str
    kind: str
    run: Callable[[], None]


@cache
def cases(device: str = "CPU") -> dict[str, Case]:
    """Every case of the suite by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute infinities on purpose
        suite = Suite(Observed, __name__).test_cases
    suffix = f"_{device.partition(':')[0].lower()}"
    found = {}
    for title, tests in suite.items():
        for full in unittest.defaultTestLoader.getTestCaseNames(tests):
            if full.endswith(suffix):
                name = full.removesuffix(suffix)
                found[name] = Case(name, KINDS[title], _runner(tests(full), full, name, device))
    return found


def _runner(test: unittest.TestCase, full: str, name: str, device: str) -> Callable[[], None]:
    if name in RANDOM:
        return lambda: judge_draws(name, device)
    return lambda: getattr(test, full)()


@contextmanager
def _light_models() -> Iterator[None]:
    """The suite writes the inputs of its light models beside the user's own; here, to a folder that goes again."""
    before = os.environ.get("ONNX_MODELS")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ONNX_MODELS"] = folder
        try:
            yield
        finally:
            os.environ.pop("ONNX_MODELS")
            if before is not None:
                os.environ["ONNX_MODELS"] = before


# ---------------------------------------------------------------- cases with random numbers


def judge_draws(name: str, device: str) -> None:
    """A case of :data:`RANDOM`: many draws have the expected shape, dtype and shares; with a seed they repeat."""
    case = next(c for c in load_model_tests(kind="node") if c.name == name)
    ((inputs, expected),) = case.data_sets
    draws = _draws(case.model, inputs, device)
    for draw in draws:
        for got, wanted in zip(draw, expected, strict=True):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
    again = _draws(case.model, inputs, device)
    same = all(np.array_equal(x, y) for a, b in zip(draws, again, strict=True) for x, y in zip(a, b, strict=True))
    seeded = any(a.name == "seed" for node in case.model.graph.node for a in node.attribute)
    assert same == seeded, "a seed repeats the draws, and without one they differ"
    if name in DROPOUT:
        _judge_dropout(inputs, draws)
        return
    # The standard's own function for Bernoulli has ones where a uniform number is greater than the probability.
    expanded = any(node.op_type == "Greater" for node in case.model.graph.node)
    _judge_bernoulli(1 - inputs[0] if expanded else inputs[0], draws)


def _draws(model: ModelProto, inputs: Sequence[np.ndarray], device: str) -> list[tuple[np.ndarray, ...]]:
    prepared = Observed.prepare(model, device)
    return [tuple(map(np.asarray, prepared.run(inputs))) for _ in range(DRAWS)]


def _judge_bernoulli(chances: np.ndarray, draws: list[tuple[np.ndarray, ...]]) -> None:
    """Ones, as often as their chances say, else zeros."""
    values = np.stack([draw[0] for draw in draws]).astype(np.float64)
    assert set(np.unique(values)) <= {0.0, 1.0}
    _share(values, chances.astype(np.float64))


def _judge_dropout(inputs: Sequence[np.ndarray], draws: list[tuple[np.ndarray, ...]]) -> None:
    """x / (1 - ratio) where the mask is true, else zero."""
    x, ratio = inputs[0], float(inputs[1]) if len(inputs) > 1 and inputs[1].dtype != bool else 0.5
    for y, *mask in draws:
        kept = mask[0] if mask else y != 0
        np.testing.assert_allclose(y, np.where(kept, x / (1 - ratio), 0), 1e-3, 1e-7)
    kept = np.stack([draw[1] if len(draw) > 1 else (draw[0] != 0) | (x == 0) for draw in draws])
    _share(kept.astype(np.float64), np.full(x.shape, 1 - ratio))


def _share(values: np.ndarray, chances: np.ndarray) -> None:
    """The share of ones is within five standard deviations, of each element and of all together."""
    n = len(values)
    spread = np.sqrt(chances * (1 - chances) / n)
    assert (np.abs(values.mean(0) - chances) <= 5 * spread + 1e-12).all(), "an element's share is not its chance"
    whole = np.sqrt((chances * (1 - chances)).sum() / n) / chances.size
    assert abs(values.mean() - chances.mean()) <= 5 * whole + 1e-12, "the share of all is not the mean chance"


# ---------------------------------------------------------------- the whole suite


def judge(case: Case) -> Verdict:
    """Runs a case and says what came of it."""
    verdict = Verdict(case.kind)
    Observed.model = Observed.prepared = None
    start = time.perf_counter()
    try:
        case.run()
    except (Exception, unittest.SkipTest) as error:
        verdict.error = f"{type(error).__name__}: {error}".strip()
    verdict.seconds = round(time.perf_counter() - start, 3)
    if Observed.model is not None:
        graph = Observed.model.graph
        verdict.ops = sorted({f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in graph.node})
        infos = (*graph.input, *graph.output)
        verdict.dtypes = sorted({i.type.tensor_type.elem_type for i in infos} - {0})
    if Observed.prepared is not None:
        hosted = {k.kind == "host" for k in Observed.prepared.model.explain().kernels}
        verdict.runs_on = "kernels and host" if len(hosted) == 2 else "host" if True in hosted else "kernels"
    return verdict


def judge_all(device: str = "CPU", only: str = "", progress: Callable[[str], None] | None = None) -> dict[str, Verdict]:
    """The verdict of every case whose name matches `only`."""
    found = {}
    with _light_models():
        for name, case in cases(device).items():
            if re.search(only, name):
                found[name] = judge(case)
                if progress is not None:
                    progress(f"{name}: {found[name].error.splitlines()[0][:150] if found[name].error else 'holds'}")
    return found


def table(verdicts: dict[str, Verdict]) -> str:
    """The count by kind, and by what the cases run on, as Markdown."""
    lines = ["| kind | cases | hold |", "| --- | ---: | ---: |"]
    for kind in KINDS.values():
        own = [v for v in verdicts.values() if v.kind == kind]
        if own:
            lines.append(f"| {kind} | {len(own)} | {sum(not v.error for v in own)} |")
    holding = [v for v in verdicts.values() if not v.error]
    lines += [f"| all | {len(verdicts)} | {len(holding)} |", ""]
    where = Counter(v.runs_on for v in holding)
    lines.append(", ".join(f"{count} run on {place or 'nothing'}" for place, count in where.most_common()) + ".")
    return "\n".join(lines)


def main() -> int:
    """The command line; 1 where a case does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write each case's verdict to this file")
    parser.add_argument("--only", default="", help="a regular expression that names of cases match")
    parser.add_argument("--device", default="CPU", help="CPU, CUDA or CUDA:n")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    parser.add_argument("--open", action="store_true", help="leave the sizes of all inputs open")
    chosen = parser.parse_args()
    Observed.open = chosen.open
    start = time.perf_counter()
    verdicts = judge_all(chosen.device, chosen.only, print if chosen.verbose else None)
    for name, verdict in verdicts.items():
        if verdict.error and not chosen.verbose:
            print(f"{name}: {verdict.error.splitlines()[0][:200]}")
    print(table(verdicts))
    print(f"{time.perf_counter() - start:.0f} seconds.")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({name: asdict(v) for name, v in verdicts.items()}, indent=1) + "\n")
    return int(any(v.error for v in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
