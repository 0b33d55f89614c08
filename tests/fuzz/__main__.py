"""`python -m tests.fuzz --seconds S --first SEED`: random models, one after the other; those that fail, shrunk.

A process of its own runs the models, so that one that crashes is a finding as well. The exit status is 10 where
there was any. `replay FOLDER` judges a stored one again; `one SEED` a seed.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx

from tests.fuzz.catalogue import model_of
from tests.fuzz.judge import Verdict, judge
from tests.fuzz.model import Model
from tests.fuzz.oracle import Oracle, Refused
from tests.fuzz.shrink import shrink
from tests.fuzz.store import replay, save

PATIENCE = 300  # seconds for one model, its shrinking included
FOUND = 10  # the exit status where there were faults


def fuzz(first: int, seconds: float, folder: Path, count: int | None) -> int:
    """Models of the seeds from `first` on, until the time is over; a line for each that is not the same."""
    oracle, start, faults = Oracle(), time.monotonic(), 0
    seen: collections.Counter[str] = collections.Counter()
    nodes, seed = 0, first
    while time.monotonic() - start < seconds and (count is None or seed < first + count):
        signal.alarm(PATIENCE)
        print(f"seed {seed}", file=sys.stderr, flush=True)
        verdict, size = one(seed, oracle, folder)
        seen[verdict.kind] += 1
        nodes += size
        faults += verdict.is_fault
        if verdict.kind != "same":
            print(f"{seed} {verdict.kind}: {verdict.text}"[:400].replace("\n", " "), flush=True)
        seed += 1
    print(f"{seed - first} models of {nodes} nodes in {time.monotonic() - start:.0f} s:", dict(seen), flush=True)
    return faults


def one(seed: int, oracle: Oracle, folder: Path | None) -> tuple[Verdict, int]:
    """The verdict about a seed's model; a failing one is shrunk and stored."""
    model = model_of(seed, oracle)
    if not model.outputs:
        return Verdict("empty"), 0
    try:
        verdict = judge(model, oracle)
    except Refused as refusal:
        return Verdict("refused by the oracle", str(refusal)), 0
    if verdict.is_fault and (reason := _rejected(model, oracle)):
        return Verdict("refused by the oracle", reason), 0
    if verdict.is_fault and folder is not None:
        small, verdict = shrink(model, verdict, oracle)
        print(save(small, verdict, oracle, folder / str(seed)), flush=True)
    return verdict, len(model.nodes)


def _rejected(model: Model, oracle: Oracle) -> str:
    """Why onnx's checker takes a model for wrong as a whole, if it does."""
    try:
        onnx.checker.check_model(model.proto(model.run(oracle, model.arrays, steady=False)), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error)
    return ""


def watched(first: int, seconds: float, folder: Path) -> int:
    """Runs `fuzz` in processes; one that dies is started again behind the seed that killed it."""
    end, faults = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        command = [sys.executable, "-m", "tests.fuzz", "--inside", "--first", str(first), "--out", str(folder)]
        with tempfile.TemporaryFile("w+") as log:
            status = subprocess.run([*command, "--seconds", str(end - time.monotonic())], stderr=log).returncode
            log.seek(0)
            lines = log.read().splitlines()
        if status in (0, FOUND):
            return faults + (status == FOUND)
        seeds = [line for line in lines if line.startswith("seed ")]
        print(f"{seeds[-1] if seeds else 'start'}: the process ended with {status}", *lines[-9:], sep="\n", flush=True)
        faults += 1
        if not seeds:
            break
        first = int(seeds[-1].split()[1]) + 1
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", nargs="*", help="replay FOLDER, or one SEED")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("ONNXC_POISON", "1")
    os.environ.setdefault("ONNXC_VERIFY", "1")
    match options.what:
        case ["replay", folder]:
            verdict = replay(Path(folder), Oracle())
        case ["one", seed]:
            verdict, _ = one(int(seed), Oracle(), options.out)
        case []:
            if options.inside:
                run = fuzz(options.first, options.seconds, options.out, options.count)
            else:
                run = watched(options.first, options.seconds, options.out)
            return FOUND if run else 0
        case _:
            parser.error("what?")
    print(verdict.kind, verdict.text)
    return FOUND if verdict.is_fault else 0


if __name__ == "__main__":
    sys.exit(main())
