"""What :func:`onnxc.tune` measured, kept in a readable file: ``tuning.json`` in the cache's directory.

    {"AMD EPYC, native, 2 threads": {
        "conv 1x16x160x160 to 16, kernel 3x3, padded 1x1": {
            "best": "winograd F(4x4)", "microseconds": {"direct": 592.0, "winograd F(4x4)": 262.1, ...}}}}

The first key says where it was measured: processor, what was compiled for, threads. Times of other machines never
decide anything here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxc.errors import CacheError
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import Level, model_name

FILE = "tuning.json"
Times = Mapping[str, Mapping[str, float]]
"""Seconds of each candidate, by subject (see :class:`onnxc.choices.Choice`)."""


def path(cache: Cache) -> Path:
    """Where the file is, or would be."""
    return cache.root / FILE


def load(cache: Cache, cpu: Level, threads: int) -> dict[str, str]:
    """The best candidate by subject, as measured on this machine; empty where nothing was."""
    rows = _read(cache).get(_where(cpu, threads))
    if not isinstance(rows, dict):
        return {}
    found = {subject: row.get("best") for subject, row in rows.items() if isinstance(row, dict)}
    return {subject: best for subject, best in found.items() if isinstance(best, str)}


def save(cache: Cache, cpu: Level, threads: int, times: Times) -> dict[str, str]:
    """Adds measurements to the file, in place of older ones of the same subjects. Returns the best of each.

    Raises CacheError where the file cannot be written.
    """
    everything = _read(cache)
    rows = everything.setdefault(_where(cpu, threads), {})
    best = {subject: min(each, key=lambda k: each[k]) for subject, each in times.items()}
    for subject, each in times.items():
        rows[subject] = {
            "best": best[subject],
            "microseconds": {name: round(seconds * 1e6, 1) for name, seconds in each.items()},
        }
    temporary = cache.root / f"{FILE}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        temporary.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
        os.replace(temporary, path(cache))
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CacheError(f"cannot write {path(cache)}: {error}", cause=error) from error
    return best


def _where(cpu: Level, threads: int) -> str:
    return f"{model_name()}, {cpu.name}, {threads} threads"


def _read(cache: Cache) -> dict[str, Any]:
    """The whole file; one that is missing or damaged counts as empty."""
    try:
        found = json.loads(path(cache).read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
