"""Kernel calls in a run, counted by explain(), beside torch.compile's inductor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import onnxc
from benchmarks.common import INDUCTOR, Mark, Outcome, fusable, zoo
from models.zoo import store
from onnxc.errors import OnnxcError
from onnxc.planner.groups import FusionOptions


def count(names: Sequence[str] = store.NAMES, tell: Callable[[str], None] = print) -> Outcome:
    """Marks: no more calls than inductor makes; the five-op example is one template and one fused kernel.

    Counted without reductions in two stages, which are more kernels for more speed.
    """
    options = FusionOptions(split=False)
    inductor = json.loads(INDUCTOR.read_text())["models"]
    outcome = Outcome("Kernels in a run", ["model", "templates", "fused", "sum", "inductor", "distinct functions"])
    counts = onnxc.compile(fusable()).explain().counts
    outcome.data["fusable"] = counts
    outcome.rows.append(_row("x @ W, + 1, relu, * 0.5, sum", counts, "2"))
    outcome.marks.append(Mark("kernels of x @ W, + 1, relu, * 0.5, sum", counts["kernels"], 2))
    for name in names:
        try:
            counts = onnxc.compile(zoo(name).path, fusion=options).explain().counts
        except OnnxcError as error:
            tell(f"{name}: {error}")
            continue
        outcome.data[name] = counts
        limit = inductor.get(name, {}).get("sum")
        outcome.rows.append(_row(name, counts, str(limit or "")))
        if limit is not None:
            outcome.marks.append(Mark(f"kernels of {name}", counts["kernels"], limit))
        tell(f"{name:18} {counts['templates']} templates + {counts['fused']} fused, inductor {limit or '?'}")
    return outcome


def _row(name: str, counts: dict[str, int], limit: str) -> list[str]:
    return [
        name,
        *(str(counts[k]) for k in ("templates", "fused", "kernels")),
        limit,
        str(counts["functions"]),
    ]
