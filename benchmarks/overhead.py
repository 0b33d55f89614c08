"""What a call costs beside its work, and what `import onnxc` costs beside its dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

import onnxc
from benchmarks.common import THREADS, Mark, Outcome, one_op, stored
from onnxc.tools.bench import duration, stored_inputs, take_turns
from onnxc.tools.process import Worker

REPEATS = 9
STEP = 0.5  # what a jitted function reads from its module
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


def jitted(tell: Callable[[str], None] = print) -> Outcome:
    """Calls of functions that `onnxc.jit` has compiled, each one op on four numbers; with the guards of such a call."""
    outcome = Outcome("Call overhead of a jitted function, one op on four numbers", ["call", "best", "25th percentile"])
    x, options = np.ones(4, np.float32), {"threads": THREADS}
    plain = onnxc.jit(lambda x, y: x + y, **options)
    closed = onnxc.jit(lambda x: x * STEP, **options)
    tree = onnxc.jit(lambda p: {"y": p["x"] + p["y"]}, **options)
    number = onnxc.jit(lambda x, by: x * by, **options)
    calls: dict[str, Callable[[], object]] = {
        "two arrays": lambda: plain(x, x),
        "an array, and a number of the module, which is looked at": lambda: closed(x),
        "an array and a keyword": lambda: number(x, by=2.0),
        "a dict of two arrays": lambda: tree({"x": x, "y": x}),
    }
    for name, call in calls.items():
        call()
        times = sorted(_repeated(call) for _ in range(REPEATS))
        best, p25 = times[0], float(np.percentile(times, 25))
        outcome.data[name] = {"best": best, "p25": p25}
        outcome.rows.append([name, duration(best), duration(p25)])
        tell(f"call of a jitted function, {name}: {duration(best)}")
    worst = max(found["p25"] for found in outcome.data.values())
    outcome.marks.append(Mark("call of a jitted one-op function", worst * 1e6, 15.0, "us"))
    return outcome


def _repeated(call: Callable[[], object], count: int = 5000) -> float:
    """Seconds of a call, the mean of many."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


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
