"""Memory that a process holds after it loaded BERT-base and ran it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.common import THREADS, Mark, Outcome, private_cache, zoo
from onnxc.tools.bench import stored_inputs
from onnxc.tools.process import Worker


def memory(tell: Callable[[str], None] = print) -> Outcome:
    """Growth of the PSS over the process with everything imported; onnxc loads from a warm cache."""
    bert = zoo("bert")
    outcome = Outcome("Memory held after load, BERT-base", ["engine", "growth of PSS", "PSS", "RSS", "private"])
    grown: dict[str, float] = {}
    with private_cache() as environment, stored_inputs(list(bert.inputs().values())) as inputs:
        load = {"model": str(bert.path), "threads": THREADS, "inputs": inputs}
        with Worker(environment) as worker:
            worker.ask("load", engine="onnxc", **load)  # fills the cache
        for engine in ("onnxc", "onnxruntime"):
            before, after = _measure(engine, load, environment)
            grown[engine] = after["pss"] - before["pss"]
            outcome.data[engine] = {"before": before, "after": after}
            cells = [grown[engine], after["pss"], after["rss"], after["private"]]
            outcome.rows.append([engine, *(f"{x / 1e6:.0f} MB" for x in cells)])
            tell(f"{engine}: {grown[engine] / 1e6:.0f} MB more than before the load")
    outcome.marks.append(Mark("memory held after load, by onnxruntime's", grown["onnxc"] / grown["onnxruntime"], 1.2))
    return outcome


def _measure(engine: str, load: dict[str, Any], environment: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    with Worker(environment) as worker:
        worker.ask("import", engine="numpy")
        worker.ask("import", engine="onnxc.compiler" if engine == "onnxc" else engine)
        before = worker.ask("memory")
        worker.ask("load", engine=engine, **load)
        return before, worker.ask("memory")
