"""One compile: through the cache, as one program or several, with measurements before it where they are asked for."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxc.autotune import Decided, Method, Tuner
from onnxc.choices import Decisions
from onnxc.compiler import entries
from onnxc.compiler.machine_code import MachineCode
from onnxc.compiler.making import gpu_variants, made, made_of_prepared
from onnxc.compiler.request import Request
from onnxc.compiler.stages import Stages, imported, is_staged, lowered, no_surprises, prepared
from onnxc.errors import InputError
from onnxc.fingerprint import Fingerprint, fingerprint, fingerprint_graph, mentions
from onnxc.frontends.onnx_file import Model
from onnxc.ir.graph import Graph, copied
from onnxc.manifest import add_defaults
from onnxc.ops.registry import users_names
from onnxc.passes.decompose import decompose
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.verify import verify
from onnxc.random_inputs import Arrays, random_inputs
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.compiled_model import WEIGHTS, CompiledModel
from onnxc.runtime.cpu import available_cpus
from onnxc.runtime.opening import open_model
from onnxc.runtime.staged import StagedModel
from onnxc.staged import Made, assembled
from onnxc.staging.cut import cut
from onnxc.tuned import Record

_LARGE = 64 << 20  # bytes of weights from which a compile tidies up after itself
# The CPU's clock and caches wander, so all of its variants take turns; a GPU's do not, and its memory may be full.
_CPU_METHOD = Method(batch=8, together=8, rounds=5, runs=3, median=False, tolerance=1e-2)
_GPU_METHOD = Method(batch=4 * available_cpus(), together=1, rounds=2, runs=15, median=True, tolerance=3e-2)


@dataclass(frozen=True)
class Measuring:
    """What is to be measured before a compile.

    Attributes:
        seconds: after so many no further candidates are begun; None for no end.
        again: whether to measure what the record has already.
        inputs, dims, seed: what the model is run with; random inputs for None.
    """

    seconds: float | None = None
    again: bool = False
    inputs: Arrays | None = None
    dims: Mapping[str, int] | None = None
    seed: int = 0


@dataclass
class Job:
    """One compile: of what, with what, and what it may have measured before.

    Attributes:
        record: of measurements; None where there is no place for one.
        tuning: what to measure before; None for nothing.
    """

    request: Request
    cache: Cache | None
    record: Record | None
    stages: Stages = field(default_factory=Stages)
    tuning: Measuring | None = None

    def __post_init__(self) -> None:
        self.code = MachineCode(self.cache)
        if self.tuning is not None:
            self._check(self.tuning)
        self._look_up()

    def _check(self, tuning: Measuring) -> None:
        """Raises where nothing can be measured, or kept: before any work is done."""
        if self.record is None:
            raise InputError("measurements need a place: a cache, or record=")
        if tuning.seconds is not None and not tuning.seconds >= 0:
            raise InputError(f"tune_seconds is not negative, and not {tuning.seconds!r}")
        self.request.place()

    def _look_up(self) -> None:
        """What was measured becomes part of the request."""
        self.request = replace(self.request, measured=self.request.decisions(self.record))

    # ------------------------------------------------------------ with the cache

    def compiled(self, model: Model | Graph) -> CompiledModel:
        """The model, from the cache if it is there."""
        if self.cache is not None:
            return self._cached(model, self.cache)
        return self._model(self._made(self._imported(model)))

    def _cached(self, model: Model | Graph, cache: Cache) -> CompiledModel:
        """The cache's model. A new one is put into the cache and opened from there: its weights are mapped."""
        found = self._fingerprint(model, cache)
        key = self.request.key(found, cache)
        self.stages.done("fingerprint")
        threads = self.request.options.threads
        subjects = entries.known_choices(cache, key)
        if subjects is not None and self._is_measured(subjects):
            known = entries.get(cache, self.request.decided(key, subjects), threads)
            if known is not None:
                self.stages.done("load")
                return known
        result = self._made(self._imported(model))
        if found.is_current():  # else what was compiled may not be what was looked at
            entry = self.request.decided(key, entries.choices(result[0]))
            if entries.put(cache, key, entry, result):
                stored = entries.get(cache, entry, threads)
                if stored is not None:
                    return stored
        return self._model(result)

    def _fingerprint(self, model: Model | Graph, cache: Cache) -> Fingerprint:
        base_dir = self.request.options.base_dir
        found = fingerprint_graph(model) if isinstance(model, Graph) else fingerprint(model, base_dir, cache)
        if not mentions(model, users_names()):
            return found
        built = self._lowered(self._imported(model))  # known by what it builds, whatever its Python depends on
        return replace(found, digest=digest("users", found.digest, fingerprint_graph(built).digest))

    def _is_measured(self, subjects: Mapping[str, Sequence[str]]) -> bool:
        """Whether nothing is left to be measured for these choices."""
        if self.tuning is None:
            return True
        assert self.record is not None
        rows = self.record.rows(self.request.place())
        return all(s in rows and not rows[s].lacks(self._measurable(names)) for s, names in subjects.items())

    def _measurable(self, candidates: Sequence[str]) -> Sequence[str]:
        """Those that can be measured on this machine."""
        if self.request.gpu is None:
            return candidates
        from onnxc import gpu

        return gpu.measurable(candidates)

    # ------------------------------------------------------------ without it

    def _imported(self, model: Model | Graph) -> Graph:
        return imported(model, self.request.options, self.stages)

    def _lowered(self, graph: Graph) -> Graph:
        return lowered(graph, self.request.options, self.request.careful)

    def _model(self, found: Made) -> CompiledModel:
        return open_model(*found, threads=self.request.options.threads, cache=self.cache)

    def _made(self, graph: Graph) -> Made:
        """The manifest and the sections of a graph."""
        in_primitives = self._lowered(graph)
        if is_staged(in_primitives):
            found = self._staged(in_primitives)
        elif self.tuning is not None:
            _, graph = self.tuned(graph)
            found = made_of_prepared(graph, self.request, self.code, self.stages)
        else:
            found = made(in_primitives, self.request, self.code, self.stages)
        add_defaults(found, graph)
        del graph, in_primitives
        if len(found[1].get(WEIGHTS, b"")) > _LARGE:
            gc.collect()  # graphs are full of cycles, and hold the model's own weights
        return found

    def _staged(self, graph: Graph) -> Made:
        """Of a graph with steps on the host."""
        if os.environ.get("ONNXC_VERIFY") == "1":
            verify(graph, "decompose")
        with no_surprises("planning"):
            plan = cut(eliminate_dead(graph), chunks=self.request.gpu is None)
        parts: list[Graph] = []
        options = self.request.options

        def part_made(part: Graph) -> Made:
            parts.append(part)
            return made(copied(part), self.request, self.code, self.stages)

        def whole() -> Made:
            return assembled(graph, plan, part_made, options.to_json(), self.stages.seconds)

        found = whole()
        if self.tuning is None or not self._tuned_parts(graph, self._model(found), parts):
            return found
        return whole()

    # ------------------------------------------------------------ measuring

    def _tuned_parts(self, graph: Graph, model: CompiledModel, parts: Sequence[Graph]) -> bool:
        """Measures the choices of each program, with what it is given in a call of the model. Whether there are any."""
        tuning = self.tuning
        assert tuning is not None and isinstance(model, StagedModel)
        if not entries.choices(model.manifest):
            return False
        feeds = tuning.inputs or random_inputs(graph, seed=tuning.seed, dims=tuning.dims)
        for number, args in model.arguments(list(feeds.values())).items():
            if entries.choices(model.manifest["parts"][number]):
                part = copied(parts[number])
                self.tuning = replace(tuning, inputs=dict(zip(part.input_names, args, strict=True)))
                self.tuned(part)
        self.tuning = tuning
        return True

    def tuned(self, graph: Graph) -> tuple[Tuner, Graph]:
        """Measures the choices of a graph, as `tuning` says; what follows is compiled with the result.

        Also returns the graph as it is after the passes.
        """
        tuning, record, where = self.tuning, self.record, self.request.place()
        assert tuning is not None and record is not None
        feeds = tuning.inputs
        if feeds is None:
            feeds = random_inputs(decompose(graph), seed=tuning.seed, dims=tuning.dims)
        ready = prepared(graph, self.request.options.passes, self.stages)
        variant, prepare = self._variants(ready)
        tuner = Tuner(
            variant,
            feeds,
            _CPU_METHOD if self.request.gpu is None else _GPU_METHOD,
            keep=lambda rows: record.add(where, rows) if rows else None,
            prepare=prepare,
            known={} if tuning.again else record.rows(where),
            seconds=tuning.seconds,
            tell=self.stages.progress or (lambda stage: None),
        )
        tuner.run()
        self.stages.done("tune")
        self._look_up()
        return tuner, ready

    def _variants(self, graph: Graph) -> tuple[Callable[[Decided], CompiledModel], Callable[[Sequence[Decided]], None]]:
        """What makes variants of a graph that has passed the passes, and what may prepare several."""
        if self.request.gpu is not None:
            return gpu_variants(graph, self.request, self.request.gpu)

        def variant(decided: Decided) -> CompiledModel:
            request = replace(self.request, measured={0: Decisions(decided)})
            return self._model(made_of_prepared(graph, request, self.code, Stages()))

        return variant, lambda batch: None
