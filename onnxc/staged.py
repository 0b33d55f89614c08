"""The manifest and the sections of a model that is several programs, with steps on the host between them.

What `onnxc.runtime.staged` reads. Each program has the manifest and the sections that it would have alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.text import constants, to_text
from onnxc.ir.types import EmptyType, MapType, OptionalType, TensorType, Type
from onnxc.passes.random_state import state_input
from onnxc.primitives.builder import constant_of
from onnxc.primitives.host import size_places
from onnxc.runtime.blocks import Block
from onnxc.runtime.cache import Buffer
from onnxc.runtime.compiled_model import SCHEMA, STAGED
from onnxc.runtime.cpu import machine
from onnxc.runtime.model import RUNTIME
from onnxc.runtime.sizes import encode, spell
from onnxc.staging.plan import Plan, Step

Made = tuple[dict[str, Any], dict[str, Buffer]]
ARRAYS = "arrays"


def assembled(
    graph: Graph, plan: Plan, make: Callable[[Graph], Made], options: Mapping[str, Any], seconds: Mapping[str, float]
) -> Made:
    """The manifest and the sections.

    Args:
        graph: with the names of inputs, outputs and dims.
        plan: of it.
        make: compiles one program.
        options: of the compile, for what is compiled when the model runs.
        seconds: of the stages; of all programs.
    """
    writer = _Writer(make)
    described = writer.plan(plan)
    names = graph.dim_names
    parts = [manifest for manifest, _ in writer.made]
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "onnxc": parts[0]["onnxc"] if parts else "",
        "target": STAGED,
        "requires": parts[0]["requires"] if parts else {"machine": machine(), "features": []},
        "name": graph.name,
        "dim_names": names,
        "inputs": [
            _shown(n, v, names, graph.metadata.get("input_types", {}))
            for n, v in zip(graph.input_names, graph.inputs, strict=True)
        ],
        "outputs": [_shown(n, v, names) for n, v in zip(graph.output_names, graph.outputs, strict=True)],
        "random_state": state_input(graph) is not None,  # the last input is the runtime's
        "size_places": size_places(graph.inputs, graph.all_nodes(), graph.dim_names),
        "plan": described,
        "parts": parts,
        "arrays": writer.arrays.table,
        "options": dict(options),
        # What model.explain() tells:
        "cpu": next((p["cpu"] for p in parts), ""),
        "gpu": next((p["gpu"] for p in parts if p.get("gpu")), ""),
        "kernels": writer.kernels,
        "first_kernels": writer.first,  # of each program
        "memory": {
            "arena": "one for each of the programs",
            "buffers": sum(p["memory"]["buffers"] for p in parts),
            "buffers_total": " + ".join(str(p["memory"]["buffers_total"]) for p in parts) or 0,
            "weights": sum(p["memory"]["weights"] for p in parts),
        },
        "kept": {},
        "stages": dict(seconds),
        "sources": {f"p{k}.{name}": text for k, p in enumerate(parts) for name, text in p["sources"].items()},
    }
    return manifest, writer.sections()


class _Writer:
    """Writes plans; keeps the programs and arrays that they need."""

    def __init__(self, make: Callable[[Graph], Made]) -> None:
        self.make = make
        self.made: list[Made] = []
        self.known: dict[str, int] = {}  # text of a program's graph -> its number
        self.arrays = Block()
        self.kernels: list[dict[str, Any]] = []
        self.first: list[int] = []  # of each program: where its kernels begin

    def plan(self, plan: Plan) -> dict[str, Any]:
        return {
            "slots": plan.slots,
            "inputs": plan.inputs,
            "outputs": plan.outputs,
            "types": [type_to_json(t) for t in plan.types],
            "constants": [[slot, self.arrays.add(_content(v))] for slot, v in plan.constants],
            "steps": [self._step(step) for step in plan.steps],
        }

    def _step(self, step: Step) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": step.kind, "in": step.inputs, "out": step.outputs, "dead": step.dead,
            "types": [type_to_json(t) for t in step.types],
        }  # fmt: skip
        if step.part is not None:
            return found | {"part": self._part(step.part), "sizes": step.sizes, "node": _makers(step.part)}
        assert step.node is not None
        node = step.node
        found["kernel"] = len(self.kernels)
        self.kernels.append(_kernel(node))
        attrs = {k: v for k, v in node.attrs.items() if k not in ("symbols", "function", "chunk")}
        found["attrs"] = {k: self._attribute(v) for k, v in attrs.items()}
        found["node"] = " or ".join(f"{s} {s.name!r}" if s.name else str(s) for s in node.origin[:3])
        if node.op == "read":
            found["symbols"] = [encode(d) for d in node.attrs["symbols"]]
        if "chunk" in node.attrs and step.regions[0].told(str(node.attrs["chunk"])):
            found["chunk"] = str(node.attrs["chunk"])
        if node.op == "host":
            found["function"] = node.attrs["function"]
        if node.op == "later":
            (region,) = node.regions
            found["text"] = to_text(region)
            found["held"] = {name: self.arrays.add(array) for name, array in constants(region).items()}
        return found | ({"regions": [self.plan(p) for p in step.regions]} if step.regions else {})

    def _part(self, graph: Graph) -> int:
        text = to_text(graph)
        if text not in self.known:
            number = self.known[text] = len(self.made)
            manifest, sections = self.make(graph)
            self.made.append((manifest, sections))
            self.first.append(len(self.kernels))
            self.kernels += [_moved(k, number, self.first[-1]) for k in manifest["kernels"]]
        return self.known[text]

    def _attribute(self, value: Any) -> Any:
        return {"array": self.arrays.add(value)} if isinstance(value, np.ndarray) else value

    def sections(self) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {ARRAYS: self.arrays.data()}
        for k, (_, sections) in enumerate(self.made):
            for name, data in sections.items():
                found[name if name == RUNTIME else f"p{k}.{name}"] = data
        return found


def _makers(graph: Graph) -> str:
    """The nodes of the model that make what a program gives out: where its errors name no other."""
    origins = [v.node.origin for v in graph.outputs if v.node is not None]
    return " or ".join(dict.fromkeys(f"{s} {s.name!r}" if s.name else str(s) for o in origins for s in o[-1:]))


def _content(v: Value) -> np.ndarray[Any, Any]:
    array = constant_of(v)
    assert array is not None
    return array


def _moved(kernel: Mapping[str, Any], part: int, first: int) -> dict[str, Any]:
    """A kernel of a program, as one of the whole model, in which the program's kernels begin at `first`."""
    takes = [[first + maker, store] for maker, store in kernel["takes"] if maker >= 0]
    return {**kernel, "function": f"p{part}.{kernel['function']}", "takes": takes, "results": []}


def _kernel(node: Node) -> dict[str, Any]:
    """A step on the host, as reports list it."""
    return {
        "function": str(node.attrs.get("function", node.op)),
        "kind": "host",
        "origins": [[s.number, s.op_type, s.name, s.line] for s in node.origin],
        "reasons": ["the host does it, between programs"],
        "boundaries": [[str(v.type or "a value of unknown type"), "made on the host"] for v in node.outputs],
    }


def _shown(
    name: str, value: Value, names: Mapping[str, str], declared: Mapping[str, list[Any]] = MappingProxyType({})
) -> list[Any]:
    """An input or output: name, type (where it is not known whole, what the model declares), dims."""
    shape = value.type.shape if isinstance(value.type, TensorType) else ()
    return [name, declared.get(name) or type_to_json(value.type), [spell(d, names) for d in shape]]


def type_to_json(t: Type | None) -> list[Any] | None:
    """A type as JSON has it."""
    if t is None:
        return None
    if isinstance(t, TensorType):
        return ["tensor", t.dtype.name, [encode(d) for d in t.shape]]
    if isinstance(t, EmptyType):
        return ["nothing", t.dtype.name]
    if isinstance(t, MapType):
        return ["map", t.key.name, t.value.name]
    return ["optional" if isinstance(t, OptionalType) else "sequence", type_to_json(t.element)]
