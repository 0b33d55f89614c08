"""torch.compile(backend="onnxc") beside onnxc.compile on the exported file, and beside inductor.

    python -m benchmarks.torch_compile                 # every model of the zoo
    python -m benchmarks.torch_compile bert m_se       # these
    python -m benchmarks.torch_compile --prepare bert  # compile only, so that a second run has only to load and measure
    python -m benchmarks.torch_compile --keep times.jsonl --seconds 10

With `--keep` each model's figures are written to that file as soon as they are there, and those that it has are not
measured again: a run that was cut off goes on where it ended. `--seconds` bounds the turns of a model (of each engine
three at least), not its compile.

The three run in one process with the same threads, and take turns: some runs of one, a pause, some of the next.
Inductor has its weights frozen too. `floor` is the time of a compiled function that does nothing, which is Dynamo's
guards, right after a run of the model: what they look at is no longer in the caches then, as in any call.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import onnxc
from benchmarks.common import THREADS, Mark, Outcome, zoo
from models.zoo import store
from models.zoo.export import make
from onnxc.tools.bench import duration, geometric_mean

TURN, PAUSE, ROUNDS, LEAST = 0.03, 0.01, 12, 3  # seconds, seconds, turns of each at most, and at least
HEADINGS = ["model", "torch.compile, onnxc", "onnxc.compile", "inductor", "floor", "/ onnxc.compile", "/ inductor"]
Calls = dict[str, Callable[[], object]]


def calls(name: str, inductor: bool = True) -> Calls:
    """The engines, compiled, each as a call of the model on its example."""
    module, args, _ = make(name)
    direct = onnxc.compile(zoo(name).path, threads=THREADS)
    arrays = [a.numpy() for a in args]
    found: Calls = {}
    ours = torch.compile(module, backend="onnxc", options={"threads": THREADS})
    found["ours"] = lambda: ours(*args)
    found["direct"] = lambda: direct(*arrays)
    if inductor:
        theirs = torch.compile(module, backend="inductor", options={"freezing": True})
        found["inductor"] = lambda: theirs(*args)
    empty = torch.compile(module, backend=_nothing)
    found["floor"] = lambda: empty(*args)
    for call in found.values():
        call()
    return found


def _nothing(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
    answers: list[object] = []

    def call(*args: object) -> object:
        if not answers:
            answers.append(graph(*args))
        return answers[0]

    return call


def measured(found: Calls, seconds: float = float("inf")) -> dict[str, list[float]]:
    """Seconds of a call, by engine, of each turn the best; no more turns after so many seconds."""
    counts, end = {}, time.perf_counter() + seconds
    for engine, call in found.items():
        start = time.perf_counter()
        call()
        counts[engine] = max(1, int(TURN / max(time.perf_counter() - start, 1e-6)))
    counts["floor"] = min(counts["floor"], counts["direct"])
    times: dict[str, list[float]] = {engine: [] for engine in found}
    for turn in range(ROUNDS):
        if turn >= LEAST and time.perf_counter() > end:
            break
        order = list(found) if turn % 2 else list(found)[::-1]
        for engine in order:
            time.sleep(PAUSE)
            call, best = found[engine], float("inf")
            for _ in range(counts[engine]):
                if engine == "floor":
                    found["direct"]()
                start = time.perf_counter()
                call()
                best = min(best, time.perf_counter() - start)
            times[engine].append(best)
    return times


def torch_compile(
    names: Sequence[str] = store.NAMES,
    inductor: bool = True,
    seconds: float = float("inf"),
    keep: Path | None = None,
) -> Outcome:
    """The table, and the marks.

    Args:
        names: of the models.
        inductor: whether it is measured too.
        seconds: for the turns of a model.
        keep: a file of figures, one model a line: read first, then added to.
    """
    outcome = Outcome("torch.compile(backend='onnxc')", HEADINGS)
    known = _kept(keep)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        for name in names:
            if name not in known:
                torch._dynamo.reset()
                known[name] = _figures(measured(calls(name, inductor), seconds))
                if keep is not None:
                    with keep.open("a") as file:
                        file.write(json.dumps({name: known[name]}) + "\n")
            best, ratio = known[name]["best"], known[name]["ratio"]
            outcome.data[name] = known[name]
            shown = [duration(best[e]) if e in best else "" for e in ("ours", "direct", "inductor", "floor")]
            outcome.rows.append(
                [name, *shown, *(f"{ratio[e]:.2f}" if e in ratio else "" for e in ("direct", "inductor"))]
            )
            print("  ".join(f"{cell:>16}" for cell in outcome.rows[-1]), flush=True)
    for engine, limit in (("direct", 1.03), ("inductor", 1.0)):
        ratios = [row["ratio"][engine] for row in outcome.data.values() if engine in row["ratio"]]
        if ratios:
            outcome.marks.append(Mark(f"time over {engine}'s, the slowest model", max(ratios), limit))
            outcome.notes.append(f"Geometric mean over {engine}: {geometric_mean(ratios):.2f}.")
    return outcome


def _figures(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The best time of each engine, and our quotients over the others."""
    quartile = {engine: float(np.percentile(t, 25)) for engine, t in times.items()}
    ratio = {e: quartile["ours"] / quartile[e] for e in ("direct", "inductor") if e in times}
    return {"best": {engine: min(t) for engine, t in times.items()}, "ratio": ratio}


def _kept(file: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in file.read_text().splitlines() if file is not None and file.exists() else ():
        found.update(json.loads(line))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="default: the whole zoo")
    parser.add_argument("--prepare", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for the turns of a model")
    parser.add_argument("--keep", type=Path, help="a file of figures, to go on with")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    names = given.models or store.NAMES
    if given.prepare:
        with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
            for name in names:
                torch._dynamo.reset()
                calls(name, not given.no_inductor)
                print(name, flush=True)
        return
    outcome = torch_compile(names, not given.no_inductor, given.seconds, given.keep)
    print(outcome.markdown())
    for mark in outcome.marks:
        print(f"{mark.name}: {mark.value:.2f}, limit {mark.limit}: {'met' if mark.met else 'missed'}")


if __name__ == "__main__":
    main()
