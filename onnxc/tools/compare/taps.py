"""What a compiled model computes inside: the same plan, compiled with taps (`onnxc.planner.taps`).

    program = TappedProgram(model, CompileOptions())
    program.names                                  # of the tensors that can be shown
    program.run(inputs, ["h1", "h2"])              # {"h1": array, ...}

The tensors of the user's model keep their names through the passes: each value of the decomposed graph is given the
name of the tensor that it stands for, and passes hand names on where they replace a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from onnxc.autodiff.operator import expand_gradients
from onnxc.codegen.cpp.program import Program, ProgramWriter
from onnxc.compiler.options import CompileOptions
from onnxc.compiler.stages import Stages, build, is_staged, prepared, weights_block
from onnxc.errors import CacheError, UnsupportedError
from onnxc.fingerprint import code_digest
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import Model
from onnxc.ir.expr import evaluate, symbols
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.manifest import manifest_of
from onnxc.passes.decompose import decompose
from onnxc.passes.simplify import eliminate_dead
from onnxc.planner.groups import Plan
from onnxc.planner.partition import planned
from onnxc.planner.taps import Tap, tapped
from onnxc.primitives.interpret import bind_sizes
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import available_cpus, has_byte_products, level
from onnxc.runtime.library import load_runtime
from onnxc.runtime.model import PROGRAM, RUNTIME, SOURCE, WEIGHTS, CompiledModel
from onnxc.runtime.toolchain import find_compiler
from onnxc.tools.compare.memory import forgetting
from onnxc.tuned import Record, cpu_place

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def named_primitives(imported: Graph) -> tuple[Graph, dict[str, Value]]:
    """The graph in primitives, its values named as the tensors that they stand for, and these values by name.

    Of several tensors that are one value (by way of Identity, say), the last made gives the name.
    """
    made = {v.name: v for n in imported.nodes for v in n.outputs if v.name and n.op != "constant"}
    shown = [v for v in made.values() if all(v is not o for o in imported.outputs)]
    names = [f"#{k}" for k in range(len(shown))]
    wide = replace(imported, outputs=[*imported.outputs, *shown], output_names=[*imported.output_names, *names])
    graph = decompose(wide)
    count = len(imported.outputs)
    found = {v.name: new for v, new in zip(wide.outputs, graph.outputs, strict=True) if v.name}
    for name, value in found.items():
        if value.node is not None:
            value.name = name
    return eliminate_dead(replace(graph, outputs=graph.outputs[:count], output_names=imported.output_names)), found


class TappedProgram:
    """A model, compiled for the CPU as `onnxc.compile` does it, that shows tensors inside of it.

    Attributes:
        plan: the plan without taps.
        names: each tensor that can be shown, with how ("stored" or "inside"; see `onnxc.planner.taps.Tap`).

    Raises UnsupportedError for models of several programs, and for GPUs.
    """

    def __init__(self, model: Model | Graph, options: CompileOptions, cache: Cache | None = None) -> None:
        if options.target != "cpu":
            raise UnsupportedError("taps inside of kernels are for target='cpu'")
        self.options, self.cache = options, cache or _own_cache(options)
        self._level = level(options.cpu)
        imported = model if isinstance(model, Graph) else onnx_file.load(
            model, base_dir=options.base_dir, input_shapes=options.input_shapes
        )  # fmt: skip
        if is_staged(decompose(imported, staged=True)):
            raise UnsupportedError("a model of several programs has no taps")
        graph, values = named_primitives(expand_gradients(imported))
        self.aliases = {name: v.name for name, v in values.items() if v.name != name}
        self._ready = prepared(graph, options.passes, Stages())
        self.graph = self._ready
        self.plan, taps = first = self._planned()
        self._first: tuple[Plan, list[Tap]] | None = first
        self.names = {t.value.name: t.how for t in taps}
        self.names |= {name: self.names[to] for name, to in self.aliases.items() if to in self.names}
        self._bytes = {t.value.name: t.value.t.nbytes for t in taps}

    def _planned(self, wanted: Sequence[str] | None = None) -> tuple[Plan, list[Tap]]:
        """A fresh plan with taps (plans hold what codegen changes)."""
        found = planned(self._ready, self.options.fusion_options)
        values = {v.name: v for v in found.graph.values() if v.name and v.node is not None}
        return tapped(found, [v for name, v in values.items() if wanted is None or name in wanted])

    def _plan_of(self, wanted: set[str]) -> tuple[Plan, list[Tap]]:
        """A plan that shows some tensors: once the one that was made to know them all, where that is what is wanted."""
        first, self._first = self._first, None
        if first is not None and {t.value.name for t in first[1]} == wanted:
            return first
        return self._planned(sorted(wanted))

    def nbytes(self, name: str, given: Arrays) -> int:
        """How large a tensor is, with these inputs."""
        size = self._bytes[self.aliases.get(name, name)]
        if isinstance(size, int):
            return size
        sizes = bind_sizes(self._ready.inputs, list(given.values()))
        return evaluate(size, {s.key: sizes[s.key] for s in symbols(size)})

    def run(self, given: Arrays, wanted: Sequence[str]) -> tuple[list[Array], dict[str, Array]]:
        """The model's outputs, and the tensors that are wanted (of `names`)."""
        own = {self.aliases.get(name, name) for name in wanted}
        plan, taps = self._plan_of(own)
        compiled = self._compiled(plan)
        results = list(compiled(*given.values()).values())
        count = len(self._ready.outputs)
        buffers = {v.id: a for v, a in zip(plan.graph.outputs, results, strict=True)}
        sizes = bind_sizes(self._ready.inputs, list(given.values()))
        shown = {t.value.name: _cut(t, buffers[t.buffer.id], sizes) for t in taps}
        return results[:count], {name: shown[self.aliases.get(name, name)] for name in wanted}

    def _compiled(self, plan: Plan) -> CompiledModel:
        cpu, options = self._level, self.options
        decided: tuple[tuple[str, str], ...] = ()
        if options.tuned:
            record = Record.of(self.cache, None)
            place = cpu_place(cpu, options.threads or available_cpus())
            decided = tuple(sorted(record.best(place).items())) if record is not None else ()
        kernels = replace(options.kernels, vnni=has_byte_products(cpu), tuned=decided)
        orders = {v.id: plan.layout.order_of(v) for v in plan.graph.outputs}
        program = ProgramWriter(plan, cpu.vector_length, kernels).write()
        runtime = load_runtime(self.cache)
        code = self._code(program)
        manifest = manifest_of(_permuted(plan.graph, orders), program, cpu, 0, {})
        sections: dict[str, Any] = {
            PROGRAM: code, RUNTIME: runtime.code, SOURCE: program.source.encode(),
            WEIGHTS: weights_block(program, forgetting(self._constants())).data,
        }  # fmt: skip
        return CompiledModel(manifest, sections, threads=options.threads, cache=self.cache)

    def _constants(self) -> list[Array]:
        """The weights that the packed ones are made of."""
        return [n.attrs["value"] for n in self._ready.nodes if n.op == "constant"]

    def _code(self, program: Program) -> bytes:
        """The program's machine code, from the cache if it is there."""
        cpu, cache = self._level, self.cache
        if cache is None:
            return build(program, cpu)
        tools = [find_compiler(cache).identity, code_digest(), cpu.machine, cpu.flags]
        key = digest("tapped", tools, program.sources)
        found = cache.read(key) or b""
        code = found[32:]
        if sha256(code).digest() != found[:32]:
            code = build(program, cpu, cache)
            with contextlib.suppress(CacheError):  # the disk is full
                cache.put(key, [sha256(code).digest(), code])
        return code


def _own_cache(options: CompileOptions) -> Cache | None:
    cache = options.cache
    if isinstance(cache, Cache):
        return cache
    try:
        return Cache(None if cache is True else cache) if cache else None
    except CacheError:
        return None


def _permuted(graph: Graph, orders: Mapping[int, tuple[int, ...]]) -> Graph:
    """The same graph, each output with the shape that its buffer has in memory order."""

    def as_stored(v: Value) -> Value:
        order = orders[v.id]
        if order == tuple(range(v.rank)):
            return v
        return Value(TensorType(v.dtype, tuple(v.shape[a] for a in order)), v.name)

    return replace(graph, outputs=[as_stored(v) for v in graph.outputs])


def _cut(tap: Tap, buffer: Array, sizes: Mapping[str, int]) -> Array:
    """The tapped value, in its own shape, out of its buffer."""
    whole = buffer if not tap.order else buffer.transpose(np.argsort(tap.order))
    start = [evaluate(d, sizes) for d in tap.start]
    shape = [evaluate(d, sizes) for d in tap.value.shape]
    return whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
