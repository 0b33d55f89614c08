"""Cold compiles, and loading from the cache beside the creation of an onnxruntime session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import THREADS, Mark, Outcome, one_op, private_cache, stored, zoo
from onnxc.tools.bench import duration, stored_inputs
from onnxc.tools.process import Worker

REPEATS = 5


def compiling(tell: Callable[[str], None] = print) -> Outcome:
    """BERT-base, ResNet-50 and a one-op model, each process new, imports not counted."""
    outcome = Outcome("Compile and load", ["what", "onnxc", "onnxruntime"])
    _bert(outcome, tell)
    _resnet(outcome, tell)
    _one_op(outcome, tell)
    return outcome


def _load(engine: str, model: str, inputs: str, environment: dict[str, str]) -> dict[str, Any]:
    with Worker(environment) as worker:
        return worker.ask("load", engine=engine, model=model, threads=THREADS, inputs=inputs)


def _bert(outcome: Outcome, tell: Callable[[str], None]) -> None:
    bert = zoo("bert")
    model = str(bert.path)
    with private_cache() as environment, stored_inputs(list(bert.inputs().values())) as inputs:
        cold = _load("onnxc", model, inputs, environment)["seconds"]
        tell(f"cold compile of BERT-base: {duration(cold)}")
        warm, session = [], []
        for _ in range(REPEATS):
            warm.append(_load("onnxc", model, inputs, environment)["seconds"])
            session.append(_load("onnxruntime", model, inputs, environment)["seconds"])
    tell(f"load BERT-base from the cache: {duration(min(warm))}, session {duration(min(session))}")
    outcome.data["bert"] = {"cold": cold, "cached": warm, "session": session}
    outcome.rows += [
        ["BERT-base, cold compile, empty cache", duration(cold), ""],
        ["BERT-base, from the cache / session creation", duration(min(warm)), duration(min(session))],
    ]
    outcome.marks += [
        Mark("cold compile of BERT-base", cold, 10.0, "s"),
        Mark("load of BERT-base from the cache, by session creation", min(warm) / min(session), 1.0),
    ]


def _resnet(outcome: Outcome, tell: Callable[[str], None]) -> None:
    resnet = zoo("resnet50")
    with private_cache() as environment, stored_inputs(list(resnet.inputs().values())) as inputs:
        cold = _load("onnxc", str(resnet.path), inputs, environment)["seconds"]
    tell(f"cold compile of ResNet-50: {duration(cold)}")
    outcome.data["resnet50"] = {"cold": cold}
    outcome.rows.append(["ResNet-50, cold compile, empty cache", duration(cold), ""])
    outcome.marks.append(Mark("cold compile of ResNet-50", cold, 10.0, "s"))


def _one_op(outcome: Outcome, tell: Callable[[str], None]) -> None:
    """New models in one process that has compiled before: what a test suite or eager use does."""
    first, times = 0.0, []
    with private_cache() as environment, Worker(environment) as worker:
        for k in range(REPEATS + 1):
            shape = (4 + k,)
            with (
                stored(one_op("Relu", shape)) as model,
                stored_inputs([np.ones(shape, np.float32)]) as inputs,
            ):
                seconds = worker.ask("load", engine="onnxc", model=model, threads=THREADS, inputs=inputs)["seconds"]
            if k == 0:
                first = seconds  # builds the runtime and asks the compiler for its name
            else:
                times.append(seconds)
    best = float(np.median(times))
    tell(f"cold compile of one op: {duration(best)} (the first ever: {duration(first)})")
    outcome.data["one_op"] = {"first": first, "times": times}
    outcome.rows += [
        ["one op, cold compile (median)", duration(best), ""],
        ["one op, the first compile of a machine (builds the runtime too)", duration(first), ""],
    ]
    outcome.marks.append(Mark("cold compile of a one-op model", best, 0.4, "s"))
