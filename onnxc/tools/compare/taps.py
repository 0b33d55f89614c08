"""What a compiled model computes inside: the same plan, compiled with taps (`onnxc.planner.taps`).

    program = TappedProgram(model, CompileOptions())
    program.names                                  # of the tensors that can be shown
    program.run(inputs, ["h1", "h2"])              # {"h1": array, ...}

The tensors of the user's model keep their names through the passes: each value of the decomposed graph is given the
name of the tensor that it stands for, and passes hand names on where they replace a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onnxc.autodiff.operator import expand_gradients
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.program import ProgramWriter
from onnxc.compiler import Stages, build, is_staged, level, pass_options_of, prepared, weights_block
from onnxc.errors import UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.ir.expr import evaluate, symbols
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.manifest import manifest_of
from onnxc.passes.decompose import decompose
from onnxc.passes.pipeline import PassOptions
from onnxc.passes.simplify import eliminate_dead
from onnxc.planner.groups import FusionOptions, Plan
from onnxc.planner.partition import planned
from onnxc.planner.taps import Tap, tapped
from onnxc.primitives.interpret import bind_sizes
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import available_cpus, has_byte_products
from onnxc.runtime.library import load_runtime
from onnxc.runtime.model import PROGRAM, RUNTIME, SOURCE, WEIGHTS, CompiledModel
from onnxc.tuned import Record, cpu_place

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class CompileOptions:
    """How our side is compiled: those options of `onnxc.compile` that change answers."""

    target: str = "cpu"
    cpu: str = "native"
    threads: int | None = None
    input_shapes: InputShapes = field(default_factory=dict)
    base_dir: str | None = None
    fusion: bool | FusionOptions = True
    attention: bool = True
    integer: bool = True
    accuracy: str = "default"
    precision: str = "float32"
    dtype: str | None = None
    tuned: bool = True
    fold_bytes: int = PassOptions.fold_bytes
    cache: bool = True

    def keywords(self) -> dict[str, Any]:
        """For `onnxc.compile`."""
        return dict(vars(self))

    @property
    def passes(self) -> PassOptions:
        """What the passes do."""
        on_gpu = self.target != "cpu"
        return pass_options_of(self.fold_bytes, self.attention, self.integer, self.dtype, on_gpu=on_gpu)

    @property
    def fusion_options(self) -> FusionOptions:
        """What the planner does."""
        if isinstance(self.fusion, FusionOptions):
            return self.fusion
        return FusionOptions() if self.fusion else FusionOptions(*[False] * len(vars(FusionOptions())))


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
        self.options, self.cache = options, cache
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
        plan, taps = self._planned()
        self.plan = plan
        self.names = {t.value.name: t.how for t in taps}
        self.names |= {name: self.names[to] for name, to in self.aliases.items() if to in self.names}
        self._bytes = {t.value.name: t.value.t.nbytes for t in taps}

    def _planned(self, wanted: Sequence[str] | None = None) -> tuple[Plan, list[Tap]]:
        """A fresh plan with taps (plans hold what codegen changes)."""
        found = planned(self._ready, self.options.fusion_options)
        values = {v.name: v for v in found.graph.values() if v.name and v.node is not None}
        return tapped(found, [v for name, v in values.items() if wanted is None or name in wanted])

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
        plan, taps = self._planned(sorted(own))
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
        kernels = KernelOptions(winograd=options.accuracy != "strict", vnni=has_byte_products(cpu), tuned=decided)
        orders = {v.id: plan.layout.order_of(v) for v in plan.graph.outputs}
        program = ProgramWriter(plan, cpu.vector_length, kernels).write()
        runtime = load_runtime(self.cache)
        code = build(program, cpu, self.cache)
        manifest = manifest_of(_permuted(plan.graph, orders), program, cpu, 0, {})
        sections: dict[str, Any] = {
            PROGRAM: code, RUNTIME: runtime.code, SOURCE: program.source.encode(),
            WEIGHTS: weights_block(program).data,
        }  # fmt: skip
        return CompiledModel(manifest, sections, threads=options.threads, cache=self.cache)


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
