"""How fast is onnxc beside onnxruntime? `onnxc bench`, and the machinery of `benchmarks/`.

Each engine lives in a process of its own (`tools.worker`), so that neither disturbs the other's threads or
memory, and they take turns: a few runs of one, a pause, a few of the other, in alternating order, over many
rounds. What the machine does meanwhile hits both alike. Compared are the best times and the 25th percentiles;
ratios carry over between machines better than times.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from onnxc.errors import InputError, RunError
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.random_inputs import Arrays, random_inputs
from onnxc.reports.printed import Printed
from onnxc.tools.inputs import write_arrays
from onnxc.tools.process import DiedError, Worker
from onnxc.tools.worker import ENGINES

PAUSE = 0.02  # seconds between turns, in which an engine's threads stop spinning


@dataclass(frozen=True)
class Timing:
    """One engine's runs, in seconds; `load` is compile and load, or the creation of a session."""

    engine: str
    version: str
    load: float
    times: tuple[float, ...]

    @property
    def best(self) -> float:
        """Seconds of the fastest run."""
        return min(self.times)

    @property
    def p25(self) -> float:
        """Seconds: a quarter of the runs were faster."""
        return float(np.percentile(self.times, 25))

    @property
    def median(self) -> float:
        """Seconds: half of the runs were faster."""
        return statistics.median(self.times)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it, with the number of runs for their times."""
        row = {key: getattr(self, key) for key in ("engine", "version", "load", "best", "p25", "median")}
        return {**row, "runs": len(self.times)}


@dataclass(frozen=True)
class Bench(Printed):
    """The outcome of `bench`: onnxc first, then its peers."""

    model: str
    threads: int
    rounds: int
    timings: tuple[Timing, ...]
    profile: dict[str, Any] | None = None  # of onnxc's kernels: `onnxc.roofline.Profile.to_dict`
    text_width: ClassVar[int] = 100

    def share_of_peak(self, engine: str = "onnxc") -> float:
        """The part of the machine's multiply-adds that the model's contractions use, where it was profiled; else 0."""
        best = next(t for t in self.timings if t.engine == engine).best
        return self.profile["flops"] / best / self.profile["peaks"]["flops"] if self.profile else 0.0

    def ratio(self, peer: str = "onnxruntime") -> tuple[float, float]:
        """onnxc's time by the peer's: of best times, and of 25th percentiles. Below 1, onnxc is faster."""
        own, other = self.timings[0], next(t for t in self.timings if t.engine == peer)
        return own.best / other.best, own.p25 / other.p25

    def to_dict(self) -> dict[str, Any]:
        peers = [t.engine for t in self.timings[1:]]
        ratios = {peer: dict(zip(("best", "p25"), self.ratio(peer), strict=True)) for peer in peers}
        timings = [t.to_dict() for t in self.timings]
        return {
            "model": self.model,
            "threads": self.threads,
            "rounds": self.rounds,
            "timings": timings,
            "ratios": ratios,
            **({"profile": self.profile} if self.profile else {}),
        }

    def rendered(self, width: int) -> Iterator[Any]:
        from rich import box  # see `Printed`
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("engine", "version", "load", "best", "25 %", "median", "runs"):
            table.add_column(heading, justify="left" if heading in ("engine", "version") else "right")
        for t in self.timings:
            table.add_row(t.engine, t.version, *map(duration, (t.load, t.best, t.p25, t.median)), str(len(t.times)))
        yield table
        for t in self.timings[1:]:
            best, p25 = self.ratio(t.engine)
            words = f"{1 / best:.2f} times as fast as" if best <= 1 else f"{best:.2f} times the time of"
            text = f"onnxc is {words} {t.engine}" if best <= 1 else f"onnxc takes {words} {t.engine}"
            yield Text(
                f"{text} (time ratio {best:.2f} of best, {p25:.2f} of 25th percentiles; {self.threads} threads)",
                style="bold",
            )


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(4.2e-6), duration(3)
    ('12.3 ms', '4.2 us', '3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


@contextmanager
def stored_inputs(inputs: Sequence[np.ndarray[Any, Any]]) -> Iterator[str]:
    """A temporary .npz that workers read: arrays i0, i1, ... in the order of the model's inputs."""
    with tempfile.TemporaryDirectory(prefix="onnxc-bench-") as folder:
        path = os.path.join(folder, "inputs.npz")
        write_arrays(path, {f"i{k}": a for k, a in enumerate(inputs)})
        yield path


def bench(
    model: str | os.PathLike[str],
    inputs: Arrays | None = None,
    *,
    peers: Sequence[str] = ("onnxruntime",),
    threads: int = 2,
    rounds: int = 20,
    turn: float = 0.05,
    warm_up: float = 0.3,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    accuracy: str = "default",
    tuned: bool = True,
    profile_runs: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Measures a model in onnxc and in its peers, interleaved.

    Args:
        model: an ONNX file.
        inputs: by name; None makes random ones (see `onnxc.random_inputs`, for `seed` and `dims` too).
        peers: engines to compare with: `onnxruntime` (with all of its optimizations), `openvino` (where it
            is installed; f32, for latency).
        threads: of each engine.
        rounds: turns that each engine has; the more, the less the machine's noise counts.
        turn, warm_up: seconds of a turn (at least one run) and of the runs before the first that counts.
        accuracy, tuned: as for `onnxc.compile`.
        profile_runs: runs in which onnxc's kernels are measured one by one, after the race; 0: none.
        progress: called with what is being done.

    Raises OnnxcError where an engine cannot run the model.
    """
    for peer in peers:
        check_peer(peer)
    if rounds < 1 or threads < 1:
        raise InputError("rounds and threads are at least 1")
    tell = progress or (lambda stage: None)
    if inputs is None:
        graph = decompose(onnx_file.load(model, input_shapes=input_shapes), staged=True)
        inputs = random_inputs(graph, seed=seed, dims=dims)
    if any(not isinstance(x, np.ndarray) for x in inputs.values()):
        raise InputError("models whose inputs are sequences or optionals cannot be raced")
    with stored_inputs(list(inputs.values())) as path:
        entries = {e: Entry(e, os.fspath(model), path, input_shapes) for e in peers}
        own = Entry("onnxc", os.fspath(model), path, input_shapes, {"accuracy": accuracy, "tuned": tuned})
        entries = {"onnxc": own, **entries}
        times, profile = race(
            entries, threads=threads, rounds=rounds, turn=turn, warm_up=warm_up, profile_runs=profile_runs, tell=tell
        )
    return Bench(Path(model).name, threads, rounds, tuple(times.values()), profile.get("onnxc"))


@dataclass(frozen=True)
class Entry:
    """One who takes part in a race: an engine with a model, and the file of its inputs."""

    engine: str
    model: str
    inputs: str
    input_shapes: Mapping[str, Sequence[int | str | None]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of onnxc.compile


def race(
    entries: Mapping[str, Entry],
    *,
    threads: int,
    rounds: int,
    turn: float = 0.05,
    warm_up: float = 0.3,
    profile_runs: int = 0,
    tell: Callable[[str], None] = lambda stage: None,
) -> tuple[dict[str, Timing], dict[str, dict[str, Any]]]:
    """The times of all that take part, by their names, and profiles of those that onnxc runs (see `bench`)."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker()) for name in entries}
        loaded = {}
        for name, entry in entries.items():
            tell(f"load into {name}")
            loaded[name] = _loaded(workers[name], entry, threads)
        times = take_turns(workers, rounds, turn, warm_up, tell)
        own = [name for name, entry in entries.items() if entry.engine == "onnxc" and profile_runs]
        profiles = {name: workers[name].ask("profile", runs=profile_runs)["profile"] for name in own}
    timings = {
        name: Timing(entry.engine, str(loaded[name]["version"]), float(loaded[name]["seconds"]), tuple(times[name]))
        for name, entry in entries.items()
    }
    return timings, profiles


def _loaded(worker: Worker, entry: Entry, threads: int) -> dict[str, Any]:
    """What a worker says of the model that it has loaded."""
    try:
        return worker.ask("load", threads=threads, **{**vars(entry), "options": dict(entry.options)})
    except DiedError:
        raise
    except RunError as error:
        if entry.engine == "onnxc":
            raise
        raise RunError(f"{entry.engine} cannot run the model ({error})", cause=error) from error


def check_peer(name: str) -> None:
    """Raises InputError for an engine that is not there, and says how to get it."""
    known = [engine for engine in ENGINES if engine != "onnxc"]
    if name not in known:
        raise InputError(f"no engine {name!r} to compare with; there are {', '.join(known)}")
    if find_spec(name) is None:
        raise InputError(f"the engine {name!r} is not installed; `pip install {name}` installs it")


def take_turns(
    workers: Mapping[str, Worker], rounds: int, turn: float, warm_up: float, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """The times of loaded workers, which take turns; every second round in the opposite order."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    order = list(workers)
    for name, worker in workers.items():
        tell(f"warm up {name}")
        worker.ask("measure", seconds=warm_up, least=3)
    for k in range(rounds):
        tell(f"round {k + 1} of {rounds}")
        for name in order if k % 2 else reversed(order):
            time.sleep(PAUSE)
            times[name] += workers[name].ask("measure", seconds=turn, least=1)["times"]
    return times


def geometric_mean(values: Sequence[float]) -> float:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return statistics.geometric_mean(values)
