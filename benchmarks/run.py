"""All benchmarks: python -m benchmarks.run [NAME ...]

A NAME is a benchmark (speed, kernels, attention, weights, int8, compile, memory, overhead, jit, import) or a model of
the zoo; models restrict speed and kernels to themselves. Results go to benchmarks/results/ as JSON and Markdown;
`python -m benchmarks.plots` makes the figures and tables of the documentation from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import compiling, kernels, memory, overhead, special, zoo
from benchmarks.common import Outcome, machine
from models.zoo import store

RESULTS = Path(__file__).parent / "results"
BY_MODEL = ("speed", "kernels")
OTHERS: dict[str, Callable[[], Outcome]] = {
    "attention": special.attention,
    "weights": special.weights,
    "int8": special.integers,
    "compile": compiling.compiling,
    "memory": memory.memory,
    "overhead": overhead.overhead,
    "jit": overhead.jitted,
    "import": overhead.imports,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every benchmark, every model")
    parser.add_argument("--rounds", type=int, default=zoo.ROUNDS, help="turns of each engine, for speed")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    known = (*BY_MODEL, *OTHERS, *store.NAMES)
    unknown = [n for n in arguments.names if n not in known]
    if unknown:
        parser.error(f"no benchmark or model {unknown[0]!r}; there are {', '.join(known)}")
    where = machine()
    outcomes, failed = run(arguments.names, arguments.rounds)
    write(arguments.output, where, outcomes)
    sys.exit(1 if failed else 0)


def run(names: Sequence[str], rounds: int = zoo.ROUNDS) -> tuple[dict[str, Outcome], bool]:
    """The chosen benchmarks. One that fails is reported, and the others still run."""
    models = [n for n in names if n in store.NAMES]
    chosen = [n for n in names if n not in store.NAMES] or (list(BY_MODEL) if models else [*BY_MODEL, *OTHERS])
    outcomes: dict[str, Outcome] = {}
    failed = False
    for name in chosen:
        print(f"== {name}", flush=True)
        try:
            if name == "speed":
                outcomes[name] = zoo.speed(models or store.NAMES, rounds)
            elif name == "kernels":
                outcomes[name] = kernels.count(models or store.NAMES)
            else:
                outcomes[name] = OTHERS[name]()
        except Exception:
            traceback.print_exc()
            failed = True
    return outcomes, failed


def write(folder: Path, where: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """Prints the marks, and stores all results under the time of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    marks = marks_table(outcomes)
    print(marks.markdown(), flush=True)
    data: dict[str, Any] = {
        "machine": where,
        "marks": [{"of": name, **m.to_dict()} for name, outcome in outcomes.items() for m in outcome.marks],
        "results": {name: outcome.data for name, outcome in outcomes.items()},
    }
    head = ["# Benchmarks", "", *(f"- {key}: {value}" for key, value in where.items())]
    parts = ["\n".join(head), marks.markdown(), *(outcome.markdown() for outcome in outcomes.values())]
    stem = folder / time.strftime("%Y%m%d-%H%M%S")
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    print(f"results: {stem.with_suffix('.md')}, {stem.with_suffix('.json')}")


def marks_table(outcomes: dict[str, Outcome]) -> Outcome:
    """All marks; of the kernel counts only those that are missed, and how many are met."""
    table = Outcome("Marks", ["mark", "reached", "at most", ""])
    counts = [m for o in outcomes.values() for m in o.marks if m.name.startswith("kernels of ")]
    for mark in [m for o in outcomes.values() for m in o.marks]:
        if mark not in counts or not mark.met:
            unit = f" {mark.unit}" if mark.unit else ""
            table.rows.append(
                [
                    mark.name,
                    f"{mark.value:.3g}{unit}",
                    f"{'at least ' if mark.at_least else ''}{mark.limit:g}{unit}",
                    "met" if mark.met else "MISSED",
                ]
            )
    if counts:
        met = sum(m.met for m in counts)
        table.rows.append(
            [
                "kernel counts at or under inductor's",
                str(met),
                str(len(counts)),
                "met" if met == len(counts) else "MISSED",
            ]
        )
    return table


if __name__ == "__main__":
    main()
