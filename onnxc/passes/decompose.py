"""From ONNX operators to primitives: every node is replaced by its operator's definition in `onnxc.ops`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any, TypeGuard

import numpy as np
import onnx

from onnxc.errors import (
    LimitError,
    ModelError,
    NeedsContentError,
    NeedsSizesError,
    OnnxcError,
    ShapeError,
    UnsupportedOpError,
    shortened,
)
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Symbol, symbols
from onnxc.ir.graph import DECLARED, Graph, Node, Value, cloned, merge_origins
from onnxc.ir.types import TensorType, contradict, element_name, shape_within
from onnxc.ops.registry import OpDef, apply, checked_attributes, find, table
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.base import check_type
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.host import Avoided, RunTime, size_places

# What a definition raises for inputs that it cannot be built from (a rank that does not fit, an attribute of
# a wrong type): the model's fault, as the definitions themselves are tested.
_MISFITS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    ZeroDivisionError,
    OverflowError,
    AssertionError,
    AttributeError,
)
_ANY_NUMBER = 2**31 - 1  # of inputs: how the standard's schemas say it


MOST_BUILDS = 2048  # of one subgraph: more than the elements that SequenceMap writes out (ops/sequence.py)
_NCHWC = "com.microsoft.nchwc"
_OWN = "onnxc.op adds operators that onnxc does not have"
_BLOCKED = (
    f"{_NCHWC} is the layout of one machine's kernels: the file was saved after onnxruntime had optimized it there; "
    "save it again, from the original, with the optimization level ORT_ENABLE_EXTENDED or lower"
)


Rule = Callable[[Builder, Value, Sequence["Value | None"]], Value]
"""What stands for a value: the same with another derivative. It is given the value and its node's inputs."""


def decompose(
    graph: Graph, differentiable: bool = False, staged: bool = False, careful: bool = False,
    rules: Mapping[int, Rule] | None = None, avoided: Avoided | None = None,
) -> Graph:  # fmt: skip
    """The graph with every ONNX op replaced by primitives, and all types known.

    Before: as imported (`onnxc.frontends.onnx_file.load`), the opsets in its metadata. After: nodes
    of primitives, each with the origin of the ONNX node that it comes from, none that no output needs. A graph of
    primitives stays as it is.

    With `differentiable`, nodes carry the hints that derivative rules read (`onnxc.autodiff`), and `rules` gives values
    derivatives of their own, by the ids of the imported ones. With `staged`, the graph may have steps on the host
    (`onnxc.primitives.host`); without, what needs them is an UnsupportedError. With `careful`, what depends on a size
    that the run will tell is compiled when the run has told it: it may be 1, and is broadcast then. `avoided` says
    which steps on the host are not made where that is possible.

    Raises UnsupportedOpError that lists every op without a definition; any other OnnxcError names the node,
    its op type and the shapes of its inputs.
    """
    if not any("." in node.op for node in graph.nodes):
        return graph
    b = Builder(differentiable, RunTime(_symbols_taken(graph), avoided=avoided or Avoided()) if staged else None)
    b.inputs = list(graph.inputs)
    for v in graph.inputs:
        _check_input(v, staged)
    scope = _Scope(
        graph.metadata["opsets"], _definitions(graph), careful or bool(graph.metadata.get("careful")),
        frozenset(s for v in graph.inputs for d in shape_within(v.type) for s in symbols(d))
        if graph.metadata.get("at_run") else frozenset(), rules or {},
    )  # fmt: skip
    work = _Decomposer(b, scope, {v.id: v for v in graph.inputs})
    try:
        work.build(graph)
    except OnnxcError as error:
        error.sizes = size_places(graph.inputs, b.nodes, graph.dim_names)
        raise
    return eliminate_dead(replace(graph, outputs=work.outputs(graph), nodes=b.nodes))


def _symbols_taken(graph: Graph) -> int:
    """The number of the first symbol that no input's shape has."""
    taken = [s.key[1:] for v in graph.inputs for d in shape_within(v.type) for s in symbols(d)]
    return 1 + max((int(number) for number in taken if number.isdigit()), default=-1)


@dataclass(frozen=True)
class _Scope:
    """What a graph and its subgraphs have in common.

    Attributes:
        opsets: versions by domain.
        definitions: by op.
        careful: as of `decompose`.
        numbers: sizes that are numbers if that is wanted: those of the inputs of a graph that is compiled as it runs.
        rules: as of `decompose`.
        builds: how often each subgraph was built, by id: a loop builds its body anew for other types.
    """

    opsets: Mapping[str, int]
    definitions: Mapping[str, OpDef]
    careful: bool = False
    numbers: frozenset[Symbol] = frozenset()
    rules: Mapping[int, Rule] = field(default_factory=dict)
    builds: Counter[int] = field(default_factory=Counter)


class _Decomposer:
    """Builds the nodes of one imported graph (or of a subgraph) in a builder.

    What cannot be built before the model runs goes into one `later` node, with all that depends on it.
    """

    def __init__(self, b: Builder, scope: _Scope, values: dict[int, Value]) -> None:
        self.b, self.scope = b, scope
        self.values = values  # by id of the imported value
        self.later: list[Node] = []
        self.unknown: set[int] = {vid for vid, v in values.items() if v.type is None}
        self.fixed: set[int] = set()  # imported values whose content is wanted
        b.lower = self.lower

    def build(self, graph: Graph) -> None:
        """All nodes of the graph."""
        for node in graph.nodes:
            with self.b.from_origin(node.origin):
                if any(v.id in self.unknown or self._may_be_one(v) for v in node.operands):
                    self._put_off(node)
                else:
                    self._node(node)
        if self.later:
            self._build_later({v.id for v in graph.outputs})

    def _node(self, node: Node) -> None:
        if node.op == "constant":
            self.values[node.output.id] = self.b.constant(node.attrs["value"])
            return
        try:
            outputs = self._apply(node)
        except NeedsContentError as error:
            if not self._can_wait(node, error):
                raise
            self._put_off(node)
            return
        for old, new in zip(node.outputs, outputs, strict=False):
            if new is not None:
                rule = self.scope.rules.get(old.id) if _is_tensor(new) else None
                inputs = [None if v is None else self.values.get(v.id) for v in node.inputs]
                self.values[old.id] = new if rule is None else rule(self.b, new, inputs)
                if new.type is None:
                    self.unknown.add(old.id)

    def _apply(self, node: Node) -> Sequence[Value | None]:
        """One node's outputs in the new graph."""
        definition = self.scope.definitions[node.op]
        _, _, version = _target(node.op, self.scope.opsets)
        inputs = [None if v is None else self.values.get(v.id) for v in node.inputs]
        lost = [v for v, new in zip(node.inputs, inputs, strict=True) if v is not None and new is None]
        try:
            if lost:
                raise ModelError(f"the input {lost[0].name!r} is an optional output that its node does not give")
            _check_operands(definition, inputs, version)
            outputs = apply(definition, self.b, inputs, _attributes(node), version, len(node.outputs))
            if len(outputs) < len(node.outputs):
                raise ModelError(f"{definition.name} has {len(outputs)} outputs, not {len(node.outputs)}")
            _check_declared(node, outputs)
            return outputs
        except OnnxcError as error:
            _place(error, node, inputs)
            raise
        except _MISFITS as error:
            reason = _misfit(error)
            wrapped = ModelError(f"its inputs or attributes do not fit {definition.name}: {reason}", cause=error)
            _place(wrapped, node, inputs)
            raise wrapped from error

    def lower(self, b: Builder, graph: Graph, inputs: Sequence[Value | None]) -> list[Value]:
        """Builds a subgraph in another builder; its inputs are these values."""
        _check_region(graph, inputs)
        self.scope.builds[id(graph)] += 1
        if self.scope.builds[id(graph)] > MOST_BUILDS:
            raise LimitError(
                f"a subgraph was built {MOST_BUILDS} times, as of loops within loops whose types still change"
            )
        values = {**self.values, **{v.id: new for v, new in zip(graph.inputs, inputs, strict=True) if new is not None}}
        before = b.lower
        inner = _Decomposer(b, self.scope, values)
        inner.build(graph)
        b.lower = before  # where the builder is this graph's own
        return inner.outputs(graph)

    def outputs(self, graph: Graph) -> list[Value]:
        """The new values of a graph's outputs."""
        missing = [n for v, n in zip(graph.outputs, graph.output_names, strict=True) if v.id not in self.values]
        if missing:
            raise ModelError(f"the outputs {', '.join(map(repr, missing))} are not made by any node")
        return [self.values[v.id] for v in graph.outputs]

    # ------------------------------------------------------------ what waits for the run

    def _can_wait(self, node: Node, error: NeedsContentError) -> bool:
        """Whether the node can be built when the model runs; takes note of the contents that it wants."""
        if self.b.run_time is None:
            return False
        if isinstance(error, NeedsSizesError):
            asked = {s for d in error.dims for s in symbols(d)}  # type: ignore[arg-type]
            if asked and asked <= self.scope.numbers:
                return False
            return any(_sizes_in(v) for v in (self.values.get(o.id) for o in node.operands) if _is_tensor(v))
        new = [v for v in node.operands if self.values.get(v.id) is error.value]
        # A content that was computed from inputs of this node: all that may decide are wanted.
        wanted = new or [v for v in node.operands if _may_decide(self.values.get(v.id))]
        wanted = [v for v in wanted if constant_of(self.values[v.id]) is None]
        self.fixed.update(v.id for v in wanted)
        return bool(wanted)

    def _may_be_one(self, old: Value) -> bool:
        """Whether a value has a size that the run will tell, where that is to be treated with care."""
        new = self.values.get(old.id)
        if not self.scope.careful or self.b.run_time is None or not _is_tensor(new):
            return False
        return not _sizes_in(new).isdisjoint(self.b.run_time.symbols)

    def _put_off(self, node: Node) -> None:
        """Takes note of a node that waits. What is wrong with its attributes does not."""
        if node.op in self.scope.definitions:
            try:
                definition, version = self.scope.definitions[node.op], _target(node.op, self.scope.opsets)[2]
                checked_attributes(definition, _attributes(node), version)
            except OnnxcError as error:
                _place(error, node, [])
                raise
        self.later.append(node)
        self.unknown.update(v.id for v in node.outputs)

    def _build_later(self, asked: set[int]) -> None:
        """One node for all that waits."""
        made = {v.id for n in self.later for v in n.outputs}
        taken = list({v.id: v for n in self.later for v in n.operands if v.id not in made}.values())
        ends = [v for n in self.later for v in n.outputs if v.id in asked]
        if not ends:
            return
        constants = {v.id: c for v in taken if (c := constant_of(self.values[v.id])) is not None}
        taken = [v for v in taken if v.id not in constants]
        region = self._region_later(taken, constants, ends)
        inputs = [self.values[v.id] for v in taken]
        sizes = {v.id for v, new in zip(taken, inputs, strict=True) if new.data is not None}
        fixed = tuple(k for k, v in enumerate(taken) if v.id in self.fixed | sizes)
        origin = merge_origins(n.origin for n in self.later)
        node = Node("later", inputs, [Value(None, v.name) for v in ends], {"fixed": fixed}, (region,), origin)
        self.b.nodes.append(node)
        self.values.update({old.id: new for old, new in zip(ends, node.outputs, strict=True)})

    def _region_later(self, taken: list[Value], constants: dict[int, np.ndarray], ends: list[Value]) -> Graph:
        """The graph of the nodes that wait. Types come with the values: sizes that are known here are no part of it."""
        inner = {v.id: Value(None, v.name) for v in taken}
        held = [Node("constant", (), [inner.setdefault(vid, _typed(c))], {"value": c}) for vid, c in constants.items()]
        nodes = held + cloned(self.later, inner)
        names = [f"out{k}" for k in range(len(ends))]
        metadata = {"opsets": dict(self.scope.opsets), "at_run": True, "careful": self.scope.careful}
        return Graph([inner[v.id] for v in taken], [inner[v.id] for v in ends], nodes, names, metadata=metadata)


def _is_tensor(value: Value | None) -> TypeGuard[Value]:
    return value is not None and isinstance(value.type, TensorType)


def _sizes_in(v: Value) -> set[Symbol]:
    """The sizes that are no numbers, of a tensor and in it."""
    found = {s for d in v.shape for s in symbols(d)}
    if v.data is not None and v.data.dtype == object:
        found |= {s for d in v.data.ravel() for s in symbols(d)}
    return found


def _typed(array: np.ndarray) -> Value:
    return Value(TensorType(dtypes.from_numpy(array.dtype), array.shape))


def _may_decide(value: Value | None) -> bool:
    """Whether a value's content may be what an op has to know: not where it is known, nor where it is large."""
    if value is None or not isinstance(value.type, TensorType) or value.data is not None:
        return False
    return value.type.rank <= 1 and constant_of(value) is None


def _attributes(node: Node) -> dict[str, Any]:
    """The node's attributes, subgraphs among them."""
    attrs = {k: v for k, v in node.attrs.items() if k not in ("regions", DECLARED)}
    return attrs | dict(zip(node.attrs.get("regions", ()), node.regions, strict=True))


def _target(op: str, opsets: Mapping[str, int]) -> tuple[str, str, int]:
    """Domain, type and opset version of `onnx.Gelu`, `com.microsoft.FusedMatMul` or `onnx.Softmax@11`."""
    name, _, version = op.partition("@")
    domain, _, op_type = name.rpartition(".")
    domain = "" if domain == "onnx" else domain
    return domain, op_type, int(version) if version else opsets.get(domain, 1)


def _definitions(graph: Graph) -> dict[str, OpDef]:
    """The definition of each op of the graph and its subgraphs, or one error that lists all ops without one."""
    opsets = graph.metadata["opsets"]
    found: dict[str, OpDef] = {}
    missing: list[tuple[str, str]] = []
    others: dict[str, str] = {}
    for node in graph.all_nodes():
        if node.op in ("constant", *found):
            continue
        domain, op_type, version = _target(node.op, opsets)
        definition = find(domain, op_type, version)
        if definition is None:
            place = _name(node) or ", ".join(map(str, node.origin[:1]))
            missing.append((place, f"{op_type}-{version}" + (f" ({domain})" if domain else "")))
            others[op_type] = _other_versions(domain, op_type)
        else:
            found[node.op] = definition
    if missing:
        raise UnsupportedOpError(missing, _BLOCKED if any(_NCHWC in op for _, op in missing) else _advice(others))
    return found


def _advice(others: Mapping[str, str]) -> str:
    """What to do about ops of which some are there in other opsets: in which, by name, or ""."""
    known = [f"{name} is there {where}" for name, where in others.items() if where]
    converted = [", ".join(known) + ": onnx.version_converter converts models"] if known else []
    return "; ".join(converted + ([] if all(others.values()) else [_OWN]))


def _other_versions(domain: str, name: str) -> str:
    """The opsets that have an op of the standard, where the model's has not; "" of others, which nothing converts."""
    rows = table().get((domain, name), ()) if not domain else ()
    if not rows:
        return ""
    first, last = min(d.first for d in rows), max(inf if d.last is None else d.last for d in rows)
    return f"from opset {first} on" if last == inf else f"until opset {last}"


def _name(node: Node) -> str:
    return next((s.name for s in node.origin if s.name), "")


def _check_input(v: Value, staged: bool) -> None:
    if staged and not isinstance(v.type, TensorType):
        return
    if v.type is None:
        raise ModelError(f"input {v.name!r} has no rank in the model: give its shape in input_shapes")
    try:
        check_type(v.t)
    except OnnxcError as error:
        raise type(error)(f"the input {v.name!r}: {error.message}") from error


_OWN_NAMES = {"float": "float32", "double": "float64"}
Formal = tuple[str, frozenset[str], bool]  # type parameter, kinds of dtypes, and whether the parameter is free


@cache
def _formals(domain: str, name: str, version: int) -> tuple[int, int, tuple[Formal, ...]] | None:
    """What the standard says of an operator's inputs: the fewest, the most, and each one's type."""
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    kind = onnx.defs.OpSchema.FormalParameterOption
    fewest, found = 0, []  # not min_input: the standard counts optional inputs before a variadic one
    for i, formal in enumerate(schema.inputs):
        needed = formal.min_arity if formal.option == kind.Variadic else formal.option == kind.Single
        fewest = i + int(needed) if needed else fewest
        names = (t.removeprefix("tensor(").rstrip(")") for t in formal.types if t.startswith("tensor("))
        kinds = frozenset(dtypes.BY_NAME[_OWN_NAMES.get(n, n)].kind for n in names)
        varied = formal.option == kind.Variadic and not formal.is_homogeneous
        found.append((formal.type_str, kinds, varied))
    return fewest, schema.max_input, tuple(found)


def _inputs(count: int) -> str:
    return f"{count} input{'s'[: count != 1]}"


def _misfit(error: Exception) -> str:
    """What an error of Python's says of a node, in the words of models."""
    if isinstance(error, ZeroDivisionError):
        return "a dim, or an attribute, is 0 where something is divided by it"
    if "unpack" in str(error) or "index out of range" in str(error):
        return "an input of another rank, or an attribute of another length, is needed"
    if isinstance(error, KeyError):
        return f"an input or attribute has no such value as {shortened(str(error))}"
    if isinstance(error, (AttributeError, TypeError)) or not str(error):
        return "an input is missing, or an input or attribute is of another kind than is needed"
    return str(error)


def _check_operands(definition: OpDef, inputs: Sequence[Value | None], version: int) -> None:
    """The number of inputs and their kinds of dtypes are those of the standard, equal where it says so.

    Kinds alone (any float for a float): older opsets run in types that only later ones list.
    """
    found = _formals(definition.domain, definition.name, version)
    if found is None:
        return
    fewest, most, formals = found
    if not fewest <= len(inputs) <= most:
        if most >= _ANY_NUMBER:
            takes = f"at least {_inputs(fewest)}"
        else:
            takes = f"{fewest} to {_inputs(most)}" if fewest < most else _inputs(most)
        raise ModelError(f"{definition.name} takes {takes}, not {len(inputs)}")
    bound: dict[str, DType] = {}
    for i, v in enumerate(inputs):
        parameter, kinds, varied = formals[min(i, len(formals) - 1)]
        if v is None or not isinstance(v.type, TensorType):
            continue
        if kinds and v.dtype.kind not in kinds:
            raise ModelError(f"input {i} of {definition.name} cannot be {v.t}")
        if not varied and bound.setdefault(parameter, v.dtype) is not v.dtype:
            raise ShapeError(f"operands have different dtypes: {bound[parameter]} and {v.dtype}")


def _check_declared(node: Node, outputs: Sequence[Value | None]) -> None:
    """A node gives what the model says that it does: the same element types. (Shapes may be out of date, and are only
    notes to onnxruntime too.)
    """
    for old, new, said in zip(node.outputs, outputs, node.attrs.get(DECLARED, ()), strict=False):
        found = "?" if new is None else element_name(new.type)
        if said and contradict(said, found):
            raise ModelError(f"the output {old.name!r} is {found}, but the model declares it as {said}")


def _check_region(graph: Graph, inputs: Sequence[Value | None]) -> None:
    """What a subgraph is given is what it declares: the same element types."""
    declared = graph.metadata.get("input_types", {})
    for old, new in zip(graph.inputs, inputs, strict=True):
        said, _ = declared.get(old.name, ("?", None))
        found = "?" if new is None else element_name(new.type)
        if contradict(said, found):
            raise ModelError(f"the input {old.name!r} of the subgraph is {found}, but is declared as {said}")


def _place(error: OnnxcError, node: Node, inputs: Sequence[Value | None]) -> None:
    """Says in an error which node it is about, and what went in."""
    if error.node is None:
        name = _name(node)
        error.node = " ".join([*(str(s) for s in node.origin[:1]), *([repr(name)] if name else [])]) or node.op
    if not error.shapes:
        tensors = {f"input {i}": v for i, v in enumerate(inputs) if v is not None and isinstance(v.type, TensorType)}
        error.shapes = {what: v.shape for what, v in tensors.items()}
