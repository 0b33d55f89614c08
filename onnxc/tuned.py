"""The record of measurements: which of several kernels was fastest, in a file that people can read and share.

    {"version": 1,
     "AMD EPYC, native, 2 threads": {
        "conv 1x16x160x160 to 16, kernel 3x3, padded 1x1": {
            "best": "winograd F(4x4)", "microseconds": {"direct": 592.0, "winograd F(4x4)": 262.1, ...}}},
     "NVIDIA H200, sm_90, Triton 3.6.0": {
        "matmul of float16[128, 768], float16[768, 768] [8c1f...]": {"best": "m=64 n=128 ...", ...}}}

The first key says where it was measured: the processor, what was compiled for, threads; or the GPU, its architecture
and the Triton that compiled. Times of elsewhere decide nothing, and names that are no candidates of a kernel decide
nothing either: so a file from a stranger can make a model slow, and nothing worse.

It is ``tuning.json`` in the cache's directory, or the file that is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxc.errors import CacheError, InputError
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import Level, model_name
from onnxc.runtime.package import open_at_once, put_in_place

FILE = "tuning.json"
VERSION = 1
MARGIN = 0.98  # of the cost model's time: what is not faster by more is no reason to change
_MOST = 64 << 20  # bytes of a file that is read
_LONGEST = 1e12  # microseconds that a kernel may take
_LENGTH = 300  # of the name of a place, which is shown

Times = Mapping[str, Mapping[str, float]]
"""Seconds of each candidate, by subject (see :class:`onnxc.choices.Choice`)."""


@dataclass(frozen=True)
class Row:
    """What is known of a subject: the best candidate, seconds of each, those that failed or answered wrongly."""

    best: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    @property
    def ranked(self) -> list[str]:
        """Candidates that were measured, the fastest first."""
        return sorted(self.seconds.keys() - set(self.refused), key=lambda name: (self.seconds[name], name))

    def lacks(self, candidates: Iterable[str]) -> list[str]:
        """Candidates that were never tried."""
        return [c for c in candidates if c not in self.seconds and c not in self.refused]


class Record:
    """A file of measurements.

    Args:
        path: of the file, which need not be there.
        asked: whether the user named it: then what cannot be read is an error, and else it counts as empty.

    Raises:
        InputError: a file that was asked for is no record, or of a later version.
    """

    def __init__(self, path: str | os.PathLike[str], *, asked: bool = False) -> None:
        self.path, self.asked = Path(path), asked
        self._rows = self._read()

    @staticmethod
    def of(cache: Cache | None, path: str | os.PathLike[str] | None) -> Record | None:
        """The file that was asked for, else the cache's, if there is one."""
        if path is not None:
            return Record(path, asked=True)
        return Record(cache.root / FILE) if cache is not None else None

    def places(self) -> list[str]:
        """Where anything was measured."""
        return sorted(self._rows)

    def rows(self, where: str) -> Mapping[str, Row]:
        """What was measured there, by subject."""
        return self._rows.get(where, {})

    def best(self, where: str) -> dict[str, str]:
        """The best candidate by subject, as measured there."""
        return {subject: row.best for subject, row in self.rows(where).items()}

    def add(self, where: str, rows: Mapping[str, Row]) -> None:
        """Adds measurements, in place of older ones of the same candidates. What another process has added stays.

        Raises:
            CacheError: the file cannot be written.
        """
        self._rows = self._read()
        own = self._rows.setdefault(where, {})
        own.update(rows)
        text = json.dumps({"version": VERSION, **_plain(self._rows)}, indent=1, sort_keys=True) + "\n"
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            temporary.write_text(text, encoding="utf-8")
            put_in_place(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise CacheError(f"cannot write {self.path}: {error}", cause=error) from error

    def _read(self) -> dict[str, dict[str, Row]]:
        try:
            return _parsed(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            if not self.asked:
                return {}
            raise InputError(f"{self.path} is no record of measurements: {error}", cause=error) from error


def joined(
    old: Row | None, seconds: Mapping[str, float], refused: Iterable[str], before: str, candidates: Collection[str]
) -> Row:
    """A row with new measurements of a subject, whose choice was `before`; of those candidates that there are."""
    times = {**(old.seconds if old else {}), **seconds}
    wrong = tuple(sorted({*(old.refused if old else ()), *refused} - set(seconds)))
    times = {name: t for name, t in times.items() if name in candidates and name not in wrong}
    return Row(fastest(times, before), times, wrong)


def fastest(seconds: Mapping[str, float], before: str) -> str:
    """The fastest candidate, but what was there before where that is as fast within the margin."""
    if not seconds:
        return before
    best = min(seconds, key=lambda name: seconds[name])
    return before if before in seconds and seconds[best] > MARGIN * seconds[before] else best


def cpu_place(cpu: Level, threads: int) -> str:
    """How a record calls this machine's CPU."""
    return f"{model_name()}, {cpu.name}, {threads} threads"


def gpu_place(device: str, architecture: int, triton: str) -> str:
    """How a record calls a GPU."""
    return f"{device}{_gpu_suffix(architecture, triton)}"


def gpu_places(record: Record, architecture: int, triton: str) -> list[str]:
    """Where a record was measured on GPUs of this architecture, with this Triton."""
    return [where for where in record.places() if where.endswith(_gpu_suffix(architecture, triton))]


def _gpu_suffix(architecture: int, triton: str) -> str:
    return f", sm_{architecture}, Triton {triton}"


def _plain(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    return {where: {subject: _row(row) for subject, row in own.items()} for where, own in rows.items()}


def _row(row: Row) -> dict[str, Any]:
    times = {name: round(seconds * 1e6, 2) for name, seconds in row.seconds.items()}
    return {"best": row.best, "microseconds": times, **({"refused": list(row.refused)} if row.refused else {})}


def _parsed(path: Path) -> dict[str, dict[str, Row]]:
    """The rows of a file; those that are no rows are left out.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is no record.
    """
    with open(path, "rb", opener=open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise ValueError(f"it has more than {_MOST} bytes")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    version = found.pop("version", VERSION)
    if version != VERSION:
        raise ValueError(f"it is of version {str(version)[:20]!r}, and this onnxc reads version {VERSION}")
    rows: dict[str, dict[str, Row]] = {}
    for where, own in found.items():
        if isinstance(own, dict) and len(where) <= _LENGTH and where.isprintable():
            parsed = {subject: _parsed_row(row) for subject, row in own.items()}
            rows[where] = {subject: row for subject, row in parsed.items() if row is not None}
    return rows


def _parsed_row(row: Any) -> Row | None:
    if not isinstance(row, dict) or not isinstance(row.get("best"), str):
        return None
    times, refused = row.get("microseconds"), row.get("refused")
    seconds = {
        name: t / 1e6
        for name, t in (times.items() if isinstance(times, dict) else ())
        if isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t <= _LONGEST
    }
    wrong = tuple(name for name in refused if isinstance(name, str)) if isinstance(refused, list) else ()
    return Row(row["best"], seconds, wrong)
