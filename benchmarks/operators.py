"""The page of operators, docs/operators.md, from the registry and the verdicts of the backend suite:

python -m benchmarks.conformance --json conformance.json
python -m benchmarks.operators conformance.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx

from onnxc.ops.registry import table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operators.md"
# How many of the suite's 2033 cases others hold, by the same suite (onnx 1.23.2) and its tolerances.
PEERS = {
    "onnx's reference evaluator": 2014, "onnxruntime 1.31.1, versions clamped to what it reads": 1835,
    "OpenVINO": 1624, "onnxruntime 1.31.1": 1598, "tinygrad": 1467, "TVM": 902,
}  # fmt: skip
DOMAINS = {
    "": "The default domain", "ai.onnx.ml": "ai.onnx.ml", "ai.onnx.preview": "ai.onnx.preview",
    "ai.onnx.preview.training": "ai.onnx.preview.training",
}  # fmt: skip
MOVED = (
    "Compiled for an NVIDIA H200 the node cases hold as well ([gpu.md](gpu.md#how-it-works)).\n\n"
    "Every operator that moves elements takes strings and complex128, too: kernels compute which element goes where, "
    "and the host takes the elements from there."
)
EXPERIMENTAL = (
    "Affine, Crop, DynamicSlice, ImageScaler, ParametricSoftplus, Scale, ScaledTanh and ThresholdedRelu of opsets 1 to "
    "9, where they were experimental, are there as onnxruntime has them; they are not in the tables."
)
NOT_IN_TABLE = {("", "Constant"): "the import", ("ai.onnx.preview.training", "Gradient"): "a graph pass"}


def page(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as Markdown."""
    lines = [
        "# Operators", "",
        "Written by `python -m benchmarks.operators` from the registry and the verdicts of onnx's backend suite.", "",
        *_counts(verdicts), "", MOVED, "", EXPERIMENTAL, "",
    ]  # fmt: skip
    gradients = _gradients()
    for domain, title in DOMAINS.items():
        lines += [f"## {title}", "", "| operator | versions | answered by | gradient | suite |"]
        lines += ["| --- | --- | --- | --- | ---: |"]
        lines += [_row(domain, name, verdicts, gradients) for name in _names(domain)]
        lines.append("")
    own = sorted(name for domain, name in table() if domain == "com.microsoft")
    lines += ["## com.microsoft", "", f"{len(own)} operators, checked against onnxruntime: {', '.join(own)}."]
    return "\n".join(lines) + "\n"


def _counts(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    kinds = Counter(v["kind"] for v in verdicts.values())
    held = Counter(v["kind"] for v in verdicts.values() if not v["error"])
    where = Counter(v["runs_on"] for v in verdicts.values() if not v["error"])
    rows = [f"| {kind} | {count} | {held[kind]} |" for kind, count in kinds.items()]
    peers = "; ".join(f"{name} {count}" for name, count in PEERS.items())
    places = ", ".join(f"{place} in {count}" for place, count in where.most_common())
    return [
        f"Of the suite's cases (onnx {onnx.__version__}, opset {onnx.defs.onnx_opset_version()}) these hold, compiled "
        "for the CPU, within the suite's own tolerances:",
        "", "| kind | cases | hold |", "| --- | ---: | ---: |", *rows,
        f"| all | {len(verdicts)} | {sum(held.values())} |", "",
        f"Answered by {places} (where inputs decide about ranks, kernels compiled when the model runs count as "
        "host). Ten cases expect one draw of one generator, and are judged by shape, dtype, seed and "
        "distribution.", "",
        f"Others, on the same suite: {peers}.",
    ]  # fmt: skip


def _names(domain: str) -> list[str]:
    return sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == domain and not s.deprecated})


def _row(
    domain: str, name: str, verdicts: Mapping[str, Mapping[str, Any]], gradients: Mapping[str, str]
) -> str:  # fmt: skip
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == (domain, name)]
    versions = sorted({s.since_version for s in schemas if not s.deprecated})
    key = f"{domain}::{name}" if domain else name
    own = [v for v in verdicts.values() if key in v["ops"]]
    alone = Counter(v["runs_on"] for v in own if v["ops"] == [key] and not v["error"])
    by = NOT_IN_TABLE.get((domain, name)) or ", ".join(sorted(alone)) or "kernels"
    suite = f"{sum(not v['error'] for v in own)} of {len(own)}" if own else ""
    return f"| {name} | {_spans(versions)} | {by} | {gradients.get(name, '') if not domain else ''} | {suite} |"


def _spans(versions: Iterable[int]) -> str:
    return ", ".join(map(str, versions))


def _gradients() -> dict[str, str]:
    """The column of docs/training.md: what each operator is differentiated by."""
    found = defaultdict(str)
    for line in (ROOT / "docs" / "training.md").read_text().splitlines():
        row = re.fullmatch(r"\| (\w+) \| ([^|]*) \|.*", line)
        if row and row[1] in _names(""):
            found[row[1]] = row[2].strip()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("verdicts", type=Path, help="what benchmarks.conformance --json wrote")
    PAGE.write_text(page(json.loads(parser.parse_args().verdicts.read_text())))
    print(PAGE)


if __name__ == "__main__":
    main()
