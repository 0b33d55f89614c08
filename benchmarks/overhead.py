"""What a call costs beside its work, and what `import onnxc` costs beside its dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from benchmarks.common import THREADS, Mark, Outcome, one_op, stored
from onnxc.tools.bench import Worker, duration, stored_inputs, take_turns

REPEATS = 9
BASE = "import numpy, onnx, networkx"
FORBIDDEN = ("torch", "triton", "onnxruntime", "sympy")  # never imported by `import onnxc`


def overhead(tell: Callable[[str], None] = print) -> Outcome:
    """The run of a model with one op on four numbers."""
    outcome = Outcome("Call overhead, one op on four numbers", ["engine", "best", "25th percentile"])
    engines = ("onnxc", "onnxruntime")
    with ExitStack() as stack:
        model = stack.enter_context(stored(one_op()))
        inputs = stack.enter_context(stored_inputs([np.ones(4, np.float32)]))
        workers = {engine: stack.enter_context(Worker()) for engine in engines}
        for engine, worker in workers.items():
            worker.ask("load", engine=engine, model=model, threads=THREADS, inputs=inputs)
        times = take_turns(workers, rounds=10, turn=0.05, warm_up=0.2, tell=lambda stage: None)
    for engine in engines:
        best, p25 = min(times[engine]), float(np.percentile(times[engine], 25))
        outcome.data[engine] = {"best": best, "p25": p25}
        outcome.rows.append([engine, duration(best), duration(p25)])
        tell(f"call of one op, {engine}: {duration(best)}")
    outcome.marks.append(Mark("call of a one-op model", outcome.data["onnxc"]["p25"] * 1e6, 5.0, "us"))
    return outcome


def imports(tell: Callable[[str], None] = print) -> Outcome:
    """`import onnxc` in a new process, beside `import numpy, onnx, networkx` in another."""
    outcome = Outcome("Import time", ["statement", f"best of {REPEATS}"])
    statements = (BASE, f"{BASE}, onnxc", f"{BASE}, onnxc; onnxc.compile")
    times = {statement: min(_import(statement)[0] for _ in range(REPEATS)) for statement in statements}
    outcome.rows = [[f"`{statement}`", duration(seconds)] for statement, seconds in times.items()]
    outcome.notes.append(
        "The face imports what is used when it is first used: the last row is a first compile's share."
    )
    _, face, compiler = times.values()
    extra = face - times[BASE]
    _, loaded = _import(statements[-1])
    tell(
        f"import onnxc: {extra * 1e3:.1f} ms more than its dependencies, with the compiler"
        f" {(compiler - times[BASE]) * 1e3:.0f} ms; heavy modules: {loaded or 'none'}"
    )
    outcome.data = {"times": times, "heavy": loaded}
    outcome.marks += [
        Mark("import onnxc, beyond numpy, onnx and networkx", extra, 0.1, "s"),
        Mark(f"modules of {', '.join(FORBIDDEN)} that it imports", len(loaded), 0),
    ]
    return outcome


def _import(statement: str) -> tuple[float, list[str]]:
    code = (
        f"import sys, time, json; t = time.perf_counter(); {statement}; t = time.perf_counter() - t; "
        f"print(json.dumps([t, [m for m in {FORBIDDEN!r} if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, loaded = json.loads(done.stdout)
    return float(seconds), list(loaded)
