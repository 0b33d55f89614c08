"""Plans with taps: a model, planned and written as `onnxc.compile` does it, that shows tensors inside of it.

The tensors of the user's model keep their names through the passes: each value of the decomposed graph is given the
name of the tensor that it stands for, and passes hand names on where they replace a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxc.autodiff.operator import expand_gradients
from onnxc.codegen.cpp.program import Program, ProgramWriter
from onnxc.compiler.machine_code import build
from onnxc.compiler.options import CompileOptions
from onnxc.compiler.stages import Stages, is_staged, prepared
from onnxc.errors import UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import Model
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.manifest import layout_of, manifest_of
from onnxc.passes.decompose import decompose
from onnxc.passes.simplify import eliminate_dead
from onnxc.planner.groups import Plan
from onnxc.planner.partition import planned
from onnxc.planner.taps import Tap, tapped
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import available_cpus, has_byte_products, has_matrix_products, level
from onnxc.runtime.library import load_runtime
from onnxc.runtime.model import PROGRAM, RUNTIME, SOURCE
from onnxc.runtime.signature import Tensor
from onnxc.runtime.sizes import encode
from onnxc.tuned import Record, cpu_place


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


class TappedPlans:
    """A model, planned for the CPU as `onnxc.compile` does it, with taps.

    Attributes:
        plan: the plan without taps.
        names: each tensor that can be shown, with how ("stored" or "inside"; see `onnxc.planner.taps.Tap`).
        aliases: other names of these.
        sizes: the bytes of each.
        types: the model's own dtypes of those that are computed in another one.

    Raises UnsupportedError for models of several programs.
    """

    def __init__(self, model: Model | Graph, options: CompileOptions, cache: Cache | None) -> None:
        self.options, self.cache = options, cache
        self._level = level(options.cpu)
        imported = model if isinstance(model, Graph) else onnx_file.load(
            model, base_dir=options.base_dir, input_shapes=options.input_shapes
        )  # fmt: skip
        if is_staged(decompose(imported, staged=True)):
            raise UnsupportedError("a model of several programs has no taps")
        graph, values = named_primitives(expand_gradients(imported))
        self.aliases = {name: v.name for name, v in values.items() if v.name != name}
        declared = {v.name: v.dtype.name for v in values.values()}  # passes may change what they compute in
        self.graph = prepared(graph, options.passes, Stages())
        self.plan, taps = first = self.planned()
        self._first: tuple[Plan, list[Tap]] | None = first
        self.names: dict[str, str] = {t.value.name: t.how for t in taps}
        self.sizes = {t.value.name: t.value.t.nbytes for t in taps}
        types = {t.value.name: t.value.dtype.name for t in taps}
        self.types = {n: declared[n] for n, dtype in types.items() if declared.get(n, dtype) != dtype}

    def described(self) -> dict[str, Any]:
        """What there is to be shown, as JSON."""
        rows = zip(self.graph.input_names, self.graph.inputs, strict=True)
        return {
            "names": self.names,
            "aliases": self.aliases,
            "sizes": {name: encode(size) for name, size in self.sizes.items()},
            "types": self.types,
            "inputs": [Tensor(n, v.dtype, tuple(map(encode, v.shape)), (None,) * v.rank).to_json() for n, v in rows],
        }

    def planned(self, wanted: Sequence[str] | None = None) -> tuple[Plan, list[Tap]]:
        """A fresh plan with taps (plans hold what codegen changes): some, or all that there can be."""
        found = planned(self.graph, self.options.fusion_options)
        values = {v.name: v for v in found.graph.values() if v.name and v.node is not None}
        return tapped(found, [v for name, v in values.items() if wanted is None or name in wanted])

    def made(self, wanted: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], Program]:
        """The program that shows some tensors: manifest, sections but for the weights, and what these are made of.

        The manifest's `taps` say how many outputs the program has more, and of each tensor its name, the output that
        it lies in, that one's memory order, where it begins there (None: it is all of it in another shape), and its
        shape.
        """
        plan, taps = self._plan_of(set(wanted))
        cpu, options = self._level, self.options
        decided: tuple[tuple[str, str], ...] = ()
        if options.tuned is True:
            record = Record.of(self.cache, options.record)
            place = cpu_place(cpu, options.threads or available_cpus())
            decided = tuple(sorted(record.best(place).items())) if record is not None else ()
        elif options.tuned:
            decided = tuple(sorted(options.tuned.items()))
        kernels = replace(
            options.kernels, vnni=has_byte_products(cpu), matrices=has_matrix_products(cpu), tuned=decided
        )
        orders = {v.id: plan.layout.order_of(v) for v in plan.graph.outputs}
        program = ProgramWriter(plan, cpu.vector_length, kernels).write()
        stored = _permuted(plan.graph, orders)
        manifest = manifest_of(stored, program, layout_of(stored, program), cpu, options.memory_limit or 0, {})
        places = {v.id: k for k, v in enumerate(plan.graph.outputs)}
        starts = [None if t.start is None else [*map(encode, t.start)] for t in taps]
        shown = [
            [t.value.name, places[t.buffer.id], list(t.order), start, [*map(encode, t.value.shape)]]
            for t, start in zip(taps, starts, strict=True)
        ]
        manifest["taps"] = {"outputs": len(places) - len(self.graph.outputs), "shown": shown}
        runtime = load_runtime(self.cache)
        sections = {PROGRAM: build(program, cpu, self.cache), RUNTIME: runtime.code, SOURCE: program.source.encode()}
        return manifest, sections, program

    def _plan_of(self, wanted: set[str]) -> tuple[Plan, list[Tap]]:
        """A plan that shows some tensors: once the one that was made to know them all, where that is what is wanted."""
        first, self._first = self._first, None
        if first is not None and {t.value.name for t in first[1]} == wanted:
            return first
        return self.planned(sorted(wanted))


def _permuted(graph: Graph, orders: Mapping[int, tuple[int, ...]]) -> Graph:
    """The same graph, each output with the shape that its buffer has in memory order."""

    def as_stored(v: Value) -> Value:
        order = orders[v.id]
        if order == tuple(range(v.rank)):
            return v
        return Value(TensorType(v.dtype, tuple(v.shape[a] for a in order)), v.name)

    return replace(graph, outputs=[as_stored(v) for v in graph.outputs])
