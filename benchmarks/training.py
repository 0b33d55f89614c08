"""Training steps beside PyTorch: forward, loss, backward and the optimizer's update.

    python -m benchmarks.training                      all cases
    python -m benchmarks.training gpt2_b1_s128         one of them
    python -m benchmarks.training --engines onnxc,eager --rounds 5 mlp_b64

Each engine lives in a process of its own with two threads, and they take turns. Measured are PyTorch eager and
``torch.compile``, both with a fused optimizer, onnxc, and onnxc with half of its memory. What a step needs of memory
between its kernels is compared with what PyTorch eager saves for the backward pass.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import THREADS, Mark, Outcome
from onnxc.tools.bench import duration

CASES = ("mlp_b64", "gpt2_b1_s128", "bert_b2_s128", "resnet50_b4")
ENGINES = ("onnxc", "onnxc half", "eager", "compile")
RATE = 1e-4
ROUNDS = 12
TURN = 0.4  # seconds of steps of one engine before the next has its turn
SPEED, MEMORY, HALF, SLOWER = 1.0, 0.8, 0.5, 1.35  # the marks


def training(
    tell: Callable[[str], None] = print, cases: Sequence[str] = CASES, engines: Sequence[str] = ENGINES,
    rounds: int = ROUNDS, folder: Path | None = None,
) -> Outcome:  # fmt: skip
    """All cases, as a table with marks."""
    headings = ["step", *engines, "by the best of PyTorch", "memory", "by PyTorch's", "at half"]
    outcome = Outcome("Training steps", headings)
    with tempfile.TemporaryDirectory() as made:
        for case in cases:
            _case(outcome, case, engines, rounds, folder or Path(made))
            tell("  ".join(outcome.rows[-1]))
    return outcome


def _case(outcome: Outcome, case: str, engines: Sequence[str], rounds: int, folder: Path) -> None:
    workers = {engine: _Worker(case, engine, folder) for engine in engines}
    try:
        facts = {name: worker.ready() for name, worker in workers.items()}
        times = _race(workers, rounds)
    finally:
        for worker in workers.values():
            worker.close()
    best = {name: min(found) for name, found in times.items()}
    peers = [best[name] for name in ("eager", "compile") if name in best]
    cells = [duration(best[name]) for name in engines]
    speed = best["onnxc"] / min(peers) if peers and "onnxc" in best else None
    own, half, theirs = (facts.get(name, {}).get("bytes") for name in ("onnxc", "onnxc half", "eager"))
    share = own / theirs if own and theirs else None
    outcome.rows.append(
        [case, *cells, _shown(speed), f"{own / 1e6:.1f} MB" if own else "", _shown(share), _shown(half and half / own)]
    )
    outcome.data[case] = {"times": times, "facts": facts}
    marks = [(f"{case}: time by the best of PyTorch", speed, SPEED), (f"{case}: memory by PyTorch's", share, MEMORY)]
    if half and own:
        marks += [(f"{case}: memory at half by the default", half / own, HALF)]
        marks += [(f"{case}: time at half by the default", best["onnxc half"] / best["onnxc"], SLOWER)]
    outcome.marks += [Mark(name, value, limit) for name, value, limit in marks if value is not None]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _race(workers: Mapping[str, _Worker], rounds: int) -> dict[str, list[float]]:
    """Seconds of single steps. The workers take turns, in an order that alternates."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    for k in range(rounds):
        for name in list(workers)[:: 1 if k % 2 else -1]:
            times[name] += workers[name].run()
            time.sleep(0.02)
    return times


# ---------------------------------------------------------------- processes


class _Worker:
    """A process that holds one engine's step."""

    def __init__(self, case: str, engine: str, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.training", "--worker", engine, "--folder", str(folder), case]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._facts = self._answer()

    def ready(self) -> dict[str, Any]:
        """What it tells of itself: the bytes that it keeps, the seconds that it took."""
        return self._facts

    def run(self) -> list[float]:
        """Seconds of some steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return list(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _work(case: str, engine: str, folder: Path) -> None:
    """The life of a worker: makes its step, runs some steps for each line that it reads."""
    say, sys.stdout = sys.stdout, sys.stderr  # exporters print
    begun = time.perf_counter()
    step, facts = (_onnxc_step if engine.startswith("onnxc") else _torch_step)(case, engine, folder)
    step()
    facts["seconds"] = time.perf_counter() - begun
    for _ in range(2):
        step()
    print(json.dumps(facts), file=say, flush=True)
    for _ in sys.stdin:
        found: list[float] = []
        while sum(found) < TURN:
            start = time.perf_counter()
            step()
            found.append(time.perf_counter() - start)
        print(json.dumps(found), file=say, flush=True)


Step = Callable[[], Any]


def _onnxc_step(case: str, engine: str, folder: Path) -> tuple[Step, dict[str, Any]]:
    import onnxc
    from models import training as models

    path = folder / f"{case}.onnx"
    module, batch = models.build(case)
    if not path.exists():
        models.export(copy.deepcopy(module), batch, str(path))
    optimizer = onnxc.optim.AdamW(lr=RATE) if _adamw(case) else onnxc.optim.SGD(lr=RATE)
    budget = 0.5 if engine.endswith("half") else 1.0
    step = onnxc.compile_training(path, optimizer=optimizer, memory_budget=budget, threads=THREADS)
    arrays = [x.numpy() for x in batch]
    return lambda: step(*arrays), {"bytes": step.explain().memory.arena}


def _torch_step(case: str, engine: str, folder: Path) -> tuple[Step, dict[str, Any]]:
    import torch

    from models import training as models

    torch.set_num_threads(THREADS)
    module, batch = models.build(case)
    kind = torch.optim.AdamW if _adamw(case) else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=RATE, fused=True)
    facts = {"bytes": _saved_bytes(module, batch)}
    run = torch.compile(module) if engine == "compile" else module

    def step() -> None:
        optimizer.zero_grad()
        run(*batch).backward()
        optimizer.step()

    return step, facts


def _adamw(case: str) -> bool:
    return case.startswith(("gpt2", "bert"))


def _saved_bytes(module: Any, batch: Sequence[Any]) -> int:
    """Bytes that PyTorch eager saves for the backward pass: each storage once, without those of parameters."""
    import torch

    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, Any] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held, so that no other takes its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = module(*batch)
    found = sum(storage.nbytes() for storage in saved.values())
    del loss
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, help="keeps the exported models there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.cases[0], options.worker, options.folder)
        return
    outcome = training(print, options.cases, options.engines.split(","), options.rounds, options.folder)
    print(outcome.markdown())
    for mark in outcome.marks:
        print(f"{'met   ' if mark.met else 'missed'} {mark.name}: {mark.value:.2f}, at most {mark.limit}")


if __name__ == "__main__":
    main()
