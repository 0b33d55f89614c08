"""The manifest of a compiled model: all but code and weights, what calls need and what reports tell."""

from __future__ import annotations

import importlib.metadata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnxc.codegen.calls import KernelCall
from onnxc.codegen.cpp.program import ENTRY, Program
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Graph, Value, describe
from onnxc.passes.precision import kept as kept_float32
from onnxc.passes.precision import summary
from onnxc.passes.random_state import state_input
from onnxc.planner.in_place import own_outputs
from onnxc.primitives.assumptions import assumptions
from onnxc.runtime.blocks import Block
from onnxc.runtime.cache import Buffer
from onnxc.runtime.compiled_model import DEFAULTS, FIXED, SCHEMA
from onnxc.runtime.cpu import Level
from onnxc.runtime.signature import Signature, Tensor
from onnxc.runtime.sizes import Size, encode, spell

if TYPE_CHECKING:
    from onnxc.codegen.triton.program import Program as GpuProgram


def manifest_of(
    graph: Graph,
    program: Program | GpuProgram,
    layout: Mapping[str, Any],
    cpu: Level,
    memory_limit: int,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """All but code and weights: what calls need, and what reports tell. `layout` is of `layout_of`."""
    names = graph.dim_names
    offsets = program.offsets
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "onnxc": _version(),
        "requires": {"machine": cpu.machine, "features": sorted(cpu.features)},
        "entry": ENTRY,
        "memory_limit": memory_limit,
        "inputs": layout["inputs"],
        "outputs": layout["outputs"],
        "symbols": layout["symbols"],
        "dim_names": names,
        "equal": layout["equal"],
        "natural": layout["natural"],
        "arena": layout["arena"],
        "random_state": state_input(graph) is not None,  # the last input is the runtime's
        # What model.explain() tells:
        "name": graph.name,
        "cpu": cpu.name,
        "lanes": cpu.vector_length,
        "kernels": [_kernel(call, names) for call in program.calls],
        "memory": {
            "arena": program.arena_bytes if offsets is not None else "laid out for each size",
            "buffers": len(program.buffers),
            "buffers_total": _spelled(_total(b.nbytes for b in program.buffers), names),
            "weights": program.weights.nbytes,
            "places": _places(program),
        },
        "kept": summary(kept_float32(graph)),
        "stages": dict(seconds),
        "sources": program.kernels,
    }
    updates = getattr(program, "updates", None)
    if updates is not None:
        manifest["updates"] = {"inputs": list(updates.inputs), "first": updates.first}
    unsolved = Signature([Tensor.from_json(row) for row in manifest["inputs"]], (), program.symbols, names).unsolved
    if unsolved:
        dims = ", ".join(names.get(s) or s for s in unsolved)
        raise UnsupportedError(f"the sizes {dims} depend on data, or on no input's shape: give input_shapes")
    return manifest


def _version() -> str:
    try:
        return importlib.metadata.version("onnxc")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def add_defaults(made: tuple[dict[str, Any], dict[str, Buffer]], graph: Graph) -> None:
    """Adds to a manifest and its sections which inputs need not be given, and which the graph has as constants."""
    manifest, sections = made
    if fixed := graph.metadata.get("fixed_inputs"):
        manifest[FIXED] = fixed
    if graph.defaults:
        block = Block()
        for array in graph.defaults.values():
            block.add(array)
        manifest[DEFAULTS], sections[DEFAULTS] = dict(zip(graph.defaults, block.table, strict=True)), block.data()


def layout_of(graph: Graph, program: Program | GpuProgram) -> dict[str, Any]:
    """What of a manifest says which memory the program is given, and what it takes for granted of sizes."""
    names = graph.dim_names
    equal, natural = _conditions(graph)
    return {
        "inputs": [_tensor(n, v, names) for n, v in zip(graph.input_names, graph.inputs, strict=True)],
        "outputs": [_tensor(n, v, names) for n, v in own_outputs(graph)],
        "symbols": program.symbols,
        "equal": equal,
        "natural": natural,
        "arena": None if program.offsets is not None else arena_of(program),
    }


def _tensor(name: str, value: Value, names: Mapping[str, str]) -> list[Any]:
    sizes, dims = tuple(map(encode, value.shape)), tuple(spell(d, names) for d in value.shape)
    return Tensor(name, value.dtype, sizes, dims).to_json()


def arena_of(program: Program | GpuProgram) -> dict[str, Any]:
    """The lifetimes of the intermediates, for :class:`onnxc.runtime.model.Arena`."""
    places: dict[Dim, int] = {}
    which = [places.setdefault(b.nbytes, len(places)) for b in program.buffers]
    return {
        "sizes": [encode(d) for d in places],
        "which": which,
        "first": [b.first for b in program.buffers],
        "last": [b.last for b in program.buffers],
    }


def _places(program: Program | GpuProgram) -> list[list[Any]]:
    """The intermediates: first and last call, type, and offset and bytes where sizes are known."""
    groups = [call.group for call in program.calls]  # ascending; lifetimes are counted in groups
    fixed = program.offsets is not None
    known = program.offsets if program.offsets is not None else [0] * len(program.buffers)
    return [
        [
            bisect_left(groups, b.first),
            max(bisect_right(groups, b.last) - 1, 0),
            str(b.value.type),
            *([at, b.nbytes] if fixed else []),
        ]
        for b, at in zip(program.buffers, known, strict=True)
    ]


def _kernel(call: KernelCall, names: Mapping[str, str]) -> dict[str, Any]:
    work = {name: getattr(call, name) for name in ("reads", "writes", "flops", "pointwise", "turns")}
    sizes = {name: encode(dim) for name, dim in work.items() if not isinstance(dim, int)}
    return {
        "function": call.function,
        "kind": call.kind,
        "origins": [[s.number, s.op_type, s.name, s.line] for s in call.origin],
        "reasons": list(call.reasons),
        "boundaries": [list(b) for b in call.boundaries],
        "takes": [list(source) for source in call.takes],
        "results": [list(result) for result in call.results],
        "steps": [[s.op, s.type, list(s.nodes), list(s.reads), encode(s.work)] for s in call.steps],
        **{name: _spelled(dim, names) for name, dim in work.items()},
        **({"sizes": sizes} if sizes else {}),  # of those that are dynamic, to be evaluated
        "weights": call.weights,
        **({"choice": asdict(call.choice)} if call.choice is not None else {}),
    }


def _spelled(dim: Dim, names: Mapping[str, str]) -> int | str:
    found = spell(dim, names)
    return str(dim) if found is None else found


def _total(dims: Iterator[Dim]) -> Dim:
    total: Dim = 0
    for d in dims:
        total = total + d
    return total


# ---------------------------------------------------------------- what was taken for granted


def _conditions(graph: Graph) -> tuple[list[tuple[Size, Size, str]], list[tuple[Size, str]]]:
    """Pairs of sizes that must be equal and sizes that must not be negative, each with the node that wants it."""
    found = assumptions(graph)
    equal = [(encode(a), encode(b), describe(*place)) for (a, b), place in found.equal.items()]
    return equal, [(encode(d), describe(*place)) for d, place in found.natural.items()]
