"""Time of every zoo model beside onnxruntime with all of its optimizations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.common import THREADS, Mark, Outcome, zoo
from models.zoo import store
from onnxc.errors import OnnxcError
from onnxc.tools.bench import Bench, bench, duration, geometric_mean

ROUNDS = 20


def speed(
    names: Sequence[str] = store.NAMES, rounds: int = ROUNDS, tell: Callable[[str], None] = print
) -> Outcome:
    """Two threads, separate processes, interleaved: best times, and both ratios."""
    outcome = Outcome(
        "Speed", ["model", "onnxruntime", "onnxc", "ratio of best", "ratio of 25th percentiles"]
    )
    found: dict[str, Bench] = {}
    for name in names:
        model = zoo(name)
        try:
            result = bench(model.path, model.inputs(), threads=THREADS, rounds=rounds)
        except OnnxcError as error:
            outcome.rows.append([name, "", f"fails: {error}"[:120], "", ""])
            outcome.data[name] = {"error": str(error)}
            tell(f"{name}: {error}")
            continue
        found[name] = result
        outcome.data[name] = result.to_dict()
        best, p25 = result.ratio()
        own, peer = result.timings
        outcome.rows.append([name, duration(peer.best), duration(own.best), f"{best:.2f}", f"{p25:.2f}"])
        tell(
            f"{name:18} onnxruntime {duration(peer.best):>8}  onnxc {duration(own.best):>8}"
            f"  ratio {best:.2f} {p25:.2f}"
        )
    outcome.marks = _marks(found)
    return outcome


def _marks(found: dict[str, Bench]) -> list[Mark]:
    marks = []
    models = {n: b.ratio() for n, b in found.items() if n in store.MODELS}
    micro = {n: b.ratio() for n, b in found.items() if n in store.MICRO_GRAPHS}
    for title, ratios, limit in (("models", models, 1.0), ("micro graphs", micro, 0.6)):
        for which, column in (("best", 0), ("25th percentile", 1)):
            if ratios:
                mean = geometric_mean([r[column] for r in ratios.values()])
                marks.append(Mark(f"time over {len(ratios)} {title}, geometric mean, {which}", mean, limit))
    if models:
        worst = max(models, key=lambda n: models[n][0])
        marks.append(Mark(f"slowest model ({worst}), best", models[worst][0], 1.4))
    return marks
