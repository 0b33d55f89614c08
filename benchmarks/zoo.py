"""Time of every zoo model beside onnxruntime and OpenVINO, and what part of the machine's peak it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import PROFILE_RUNS, THREADS, Mark, Outcome, peers, zoo
from models.zoo import store
from onnxc.errors import OnnxcError
from onnxc.tools.bench import bench, duration, geometric_mean

ROUNDS = 20
HEADINGS = [
    "model", "onnxc", "onnxruntime", "OpenVINO", "/ onnxruntime", "25 %", "/ OpenVINO", "25 %", "/ faster",
    "of FMA peak",
]  # fmt: skip
SINGLE = {"resnet50": 0.70, "yolo": 0.60, "unet": 0.50}  # time over onnxruntime's
MEMORY_BOUND = ("gpt2_decode", "llama_decode", "mlp")  # at the limit of memory in every engine
COMPUTE_BOUND = (
    "resnet50", "resnet50_b8", "unet", "yolo", "convnext", "vit", "bert", "bert_b8", "gpt2", "llama", "whisper", "t5",
    "clip", "mlp_b64",
)  # fmt: skip


def speed(names: Sequence[str] = store.NAMES, rounds: int = ROUNDS, tell: Callable[[str], None] = print) -> Outcome:
    """Two threads, separate processes, interleaved: best times, and ratios of best and of 25th percentiles."""
    outcome = Outcome("Speed", HEADINGS)
    for name in names:
        model = zoo(name)
        try:
            result = bench(
                model.path, model.inputs(), peers=peers(), threads=THREADS, rounds=rounds, profile_runs=PROFILE_RUNS
            )
        except OnnxcError as error:
            outcome.rows.append([name, f"fails: {error}"[:120], *[""] * (len(HEADINGS) - 2)])
            outcome.data[name] = {"error": str(error)}
            tell(f"{name}: {error}")
            continue
        outcome.data[name] = result.to_dict()
        outcome.rows.append(row(name, outcome.data[name]))
        tell("  ".join(f"{cell:>9}" for cell in outcome.rows[-1]))
    outcome.marks = marks(outcome.data)
    return outcome


def row(name: str, data: dict[str, Any]) -> list[str]:
    """A model's line of the table, from what `Bench.to_dict` gives. Empty cells where there was no such peer."""
    best = {t["engine"]: t["best"] for t in data["timings"]}
    times = [duration(best[e]) if e in best else "" for e in ("onnxc", "onnxruntime", "openvino")]
    ratios = []
    for peer in ("onnxruntime", "openvino"):
        pair = data["ratios"].get(peer)
        ratios += [f"{pair['best']:.2f}", f"{pair['p25']:.2f}"] if pair else ["", ""]
    share = share_of_peak(data)
    return [name, *times, *ratios, f"{over_faster(data):.2f}", f"{share:.0%}" if share >= 0.01 else ""]


def over_faster(data: dict[str, Any]) -> float:
    """onnxc's best time by that of the faster peer."""
    return max(pair["best"] for pair in data["ratios"].values())


def share_of_peak(data: dict[str, Any], engine: str = "onnxc") -> float:
    """The part of the machine's multiply-adds that a model's contractions use in an engine's best run."""
    profile = data.get("profile")
    times = [t["best"] for t in data["timings"] if t["engine"] == engine]
    return profile["flops"] / times[0] / profile["peaks"]["flops"] if profile and times else 0.0


def marks(data: dict[str, dict[str, Any]]) -> list[Mark]:
    """The marks of these models, each given by what `Bench.to_dict` gives. Those that failed are left out."""
    found = {n: d for n, d in data.items() if "ratios" in d}
    models = {n: d for n, d in found.items() if n in store.MODELS}
    micro = {n: d for n, d in found.items() if n in store.MICRO_GRAPHS}
    out = []
    for title, group, limit in (("models", models, 0.75), ("micro graphs", micro, 0.4)):
        for which, key in (("best", "best"), ("25th percentile", "p25")):
            if group:
                mean = geometric_mean([d["ratios"]["onnxruntime"][key] for d in group.values()])
                out.append(
                    Mark(f"time over {len(group)} {title} by onnxruntime's, geometric mean, {which}", mean, limit)
                )
    over = {n: d["ratios"]["onnxruntime"]["best"] for n, d in found.items()}
    out += [Mark(f"{n} by onnxruntime's time", over[n], limit) for n, limit in SINGLE.items() if n in over]
    out += _worst("slowest micro graph by onnxruntime's time", {n: over[n] for n in micro}, 0.9)
    against = {n: over_faster(d) for n, d in models.items()}
    bound = {n: r for n, r in against.items() if n in MEMORY_BOUND}
    out += _worst("slowest model by the faster peer's", {n: r for n, r in against.items() if n not in bound}, 1.0)
    out += _worst("slowest of decode and mlp by the faster peer's", bound, 1.03)
    for name in COMPUTE_BOUND:
        if name in found:
            out.append(Mark(f"{name}: share of the FMA peak", share_of_peak(found[name]), 0.85, at_least=True))
    return out


def _worst(title: str, ratios: dict[str, float], limit: float) -> list[Mark]:
    if not ratios:
        return []
    name = max(ratios, key=lambda n: ratios[n])
    return [Mark(f"{title} ({name})", ratios[name], limit)]
