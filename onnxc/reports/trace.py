"""A profile as a trace: JSON in the Trace Event Format, which Perfetto and chrome://tracing open.

Times of kernels are known, and not when each began: in the trace they follow each other without the gaps between them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnxc.errors import about_file

_RUN, _COMPILE = 1, 2  # processes of the trace
_KERNELS, _NODES = 1, 2  # threads of the first


def trace_of(report: Mapping[str, Any], parts: Sequence[Mapping[int, float]]) -> dict[str, Any]:
    """The trace of a report's `to_dict()`, which must have a profile, and of the parts that nodes have of the work of
    each kernel.

    The tracks: runs with their kernels; the model's nodes, each with its part of its kernel's time; bytes of
    intermediates that are alive; and the stages of the compile.
    """
    events = [
        _name("process_name", _RUN, 0, f"{report['name'] or 'model'}: runs"),
        _name("thread_name", _RUN, _KERNELS, "kernels"),
        _name("thread_name", _RUN, _NODES, "nodes of the model (parts of kernels)"),
        *_runs(report, parts),
    ]
    if report["stages"]:
        events += [_name("process_name", _COMPILE, 0, "compile"), *_stages(report["stages"])]
    about = {key: report[key] for key in ("name", "cpu", "gpu", "threads") if report.get(key)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "made by": "onnxc"}}


def written_trace(
    path: str | os.PathLike[str], report: Mapping[str, Any], parts: Sequence[Mapping[int, float]]
) -> None:
    """Writes the trace. Raises OSError where that fails."""
    path = os.fspath(path)  # no number, which `open` would take for an open file
    with about_file(path), open(path, "w", encoding="utf-8") as file:
        json.dump(trace_of(report, parts), file, separators=(",", ":"), allow_nan=False)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, thread: int, start: float, length: float, args: Mapping[str, Any], kind: str, process: int = _RUN
) -> dict[str, Any]:
    """From `start`, for `length` microseconds."""
    return {
        "ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, "ts": start, "dur": length,
        "args": dict(args),
    }  # fmt: skip


def _runs(report: Mapping[str, Any], parts: Sequence[Mapping[int, float]]) -> Iterator[dict[str, Any]]:
    kernels = report["kernels"]
    args = [_about(k) for k in kernels]
    alive = _alive(report)
    at = 0.0
    for number, run in enumerate(report["profile"]["times"]):
        yield _slice(f"run {number + 1}", _KERNELS, at, sum(run) / 1e3, {}, "run")
        for k, nanoseconds in enumerate(run):
            length = nanoseconds / 1e3
            if nanoseconds:
                yield _slice(f"#{k} {kernels[k]['kind']}", _KERNELS, at, length, args[k], kernels[k]["kind"])
                if alive:
                    yield {"ph": "C", "name": "intermediates", "pid": _RUN, "ts": at, "args": {"bytes": alive[k]}}
                yield from _of_nodes(kernels[k], parts[k], at, length)
            at += length


def _of_nodes(
    kernel: Mapping[str, Any], parts: Mapping[int, float], at: float, length: float
) -> Iterator[dict[str, Any]]:
    origins = {o["number"]: o for o in kernel["origins"]}
    for number, part in sorted(parts.items()):
        if number in origins and part:
            o = origins[number]
            about = {"name": o["name"], "line": o["line"], "kernel": kernel["number"]}
            yield _slice(f"n{number} {o['op_type']}", _NODES, at, length * part, about, "node")
            at += length * part


def _about(kernel: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("function", "reads", "writes", "weights", "flops", "pointwise", "turns")
    return {
        **{key: kernel[key] for key in keys},
        "nodes": [f"n{o['number']} {o['op_type']} {o['name']}".strip() for o in kernel["origins"]],
        "lines": sorted({o["line"] for o in kernel["origins"] if o["line"]}),
    }


def _alive(report: Mapping[str, Any]) -> list[int]:
    """Bytes of intermediates that are alive in each kernel; empty where the layout is not known."""
    places: Sequence[Mapping[str, Any]] = report["memory"]["places"]
    if not places or any(p["nbytes"] is None for p in places):
        return []
    change = [0] * (len(report["kernels"]) + 1)
    for p in places:
        change[min(p["first"], len(change) - 1)] += p["nbytes"]
        change[min(p["last"] + 1, len(change) - 1)] -= p["nbytes"]
    found, now = [], 0
    for more in change[:-1]:
        now += more
        found.append(now)
    return found


def _stages(stages: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    at = 0.0
    for name, spent in stages.items():
        yield _slice(name, 1, at, spent * 1e6, {}, "compile", _COMPILE)
        at += spent * 1e6
