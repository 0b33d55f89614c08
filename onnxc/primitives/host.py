"""Steps between programs: what the host does while a model runs, as nodes of the graph.

A graph with such nodes becomes several programs and a plan that runs them in turn (`onnxc.staging`). The nodes:

- `read`: its operand's content becomes sizes: the symbols in its attribute `symbols`, in the order of the elements
  (`what` says what they are).
  The output has the operand's type and `Value.data`. What depends on one of these symbols runs after it.
- `host`: a function of `onnxc.host`, named by the attribute `function`; the other attributes are its options.
- `if`: operands: the condition, then what either branch reads; regions: the branches, with the same inputs.
- `loop`: operands: the greatest number of iterations and the condition (each may be None), `carried` initial values,
  then what every iteration reads. Region: iteration number, condition, carried values, and the rest, to condition,
  carried values, and `scans` values that are collected along a new first axis. Where there is a symbol `chunk`, a
  second region runs up to so many iterations, from the same inputs to condition, carried values, what is collected of
  them (as many as that, those that did not run included), and number.
- `later`: ONNX nodes (a region as imported) that can be built only when the model runs: of a rank that is not known
  before, or of content (the operands numbered by the attribute `fixed`) that decides about ranks.

Their outputs may have any type of `onnxc.ir.types`, or None for what only a run will tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.errors import NeedsContentError, ShapeError
from onnxc.ir.expr import Dim, Symbol, always_equal, of, symbols
from onnxc.ir.graph import Attrs, Graph, Node, Value, describe
from onnxc.ir.types import EmptyType, OptionalType, SequenceType, TensorType, Type
from onnxc.primitives.base import Kind, Primitive, register

if TYPE_CHECKING:
    from onnxc.primitives.builder import Builder

HOST_OPS = ("read", "host", "if", "loop", "later")
MOST_READ = 64  # elements that become sizes: more than any rank

Lower = Callable[["Builder", Graph, Sequence[Value | None]], "list[Value]"]
"""Builds an imported subgraph, with these values for its inputs, and returns its outputs."""


@dataclass(frozen=True)
class Avoided:
    """Which steps on the host are avoided, where they can be.

    Attributes:
        branches: an If of two small branches: both are computed (`onnxc.ops.if_conversion`).
        turns: of a loop that data end and that collects results: a program runs many iterations at once.
        sequences: those of tensors of one shape: they are one tensor (`onnxc.ops.stacks`).
        ends: a loop of no more than so many iterations that data may end: it is part of a program. Only for the CPU.
    """

    branches: bool = True
    turns: bool = True
    sequences: bool = True
    ends: bool = False


@dataclass
class RunTime:
    """What the builders of a graph with steps on the host share: the symbols that are given out.

    Attributes:
        first: the number of the first of them (sizes are s0, s1, ...).
        symbols: all so far.
        avoided: what the host need not do.
    """

    first: int = 0
    symbols: list[Symbol] = field(default_factory=list)
    avoided: Avoided = Avoided()

    def size(self) -> Dim:
        """A size that a run will tell, not negative."""
        symbol = Symbol(f"s{self.first + len(self.symbols)}")
        self.symbols.append(symbol)
        return of(symbol)

    def renewed(self, t: Type | None) -> Type | None:
        """The type with a new size for each dim that is not a number: of a value that is like another."""
        if isinstance(t, TensorType):
            return t.with_shape(tuple(d if isinstance(d, int) else self.size() for d in t.shape))
        return type(t)(self.renewed(t.element)) if isinstance(t, (SequenceType, OptionalType)) else t

    def merged(self, a: Type | None, b: Type | None, visible: Callable[[Symbol], bool] = lambda s: True) -> Type | None:
        """The type of a value that is an `a` or a `b`: equal sizes stay, as far as their symbols are visible."""
        if a != b and (isinstance(a, EmptyType) or isinstance(b, EmptyType)):
            some = b if isinstance(a, EmptyType) else a
            return self.merged(some, some, visible)
        if isinstance(a, TensorType) and isinstance(b, TensorType):
            if a.dtype is not b.dtype or a.rank != b.rank:
                return None
            pairs = zip(a.shape, b.shape, strict=True)
            return a.with_shape(
                tuple(x if always_equal(x, y) and all(map(visible, symbols(x))) else self.size() for x, y in pairs)
            )
        if isinstance(a, (SequenceType, OptionalType)) and type(a) is type(b):
            return type(a)(self.merged(a.element, b.element, visible))
        return a if a == b else None


def is_host(node: Node) -> bool:
    """Whether the host does what the node says."""
    return node.op in HOST_OPS


def read(b: Builder, value: Value, what: str, misfit: str = "") -> Value:
    """The same value, with its content as sizes, which are symbols. An integer tensor of a few elements.

    What has been read here already is not read again: the sizes are the same symbols.

    `what` says in errors what the sizes are, and `misfit` what is wrong where one of them is
    `onnxc.host.registry.NO_SIZE`.
    """
    size = value.t.size
    if b.run_time is None or not value.dtype.is_integer or not isinstance(size, int) or size > MOST_READ:
        raise NeedsContentError(f"sizes cannot be read from a tensor of type {value.type}", value)
    if value.id in b.told:
        return b.told[value.id]
    content = np.empty(size, object)
    content[:] = [b.run_time.size() for _ in range(size)]
    content = content.reshape([d for d in value.t.shape if isinstance(d, int)])
    out = Value(value.type, data=content)
    attrs = {"symbols": tuple(content.ravel()), "what": what, **({"misfit": misfit} if misfit else {})}
    b.nodes.append(Node("read", [value], [out], attrs, (), b.origin))
    b.told[value.id] = out
    return out


def on_host(
    b: Builder, function: str, inputs: Sequence[Value | None], types: Sequence[Type | None], **options: Any
) -> tuple[Value, ...]:
    """A step that a function of `onnxc.host` does: its outputs, of these types.

    Args:
        function: its name there.
        inputs: its arguments; None for those that are left out.
        types: of the outputs; sizes that only the run tells are new ones of `run_time.size()`, None is any type.
        options: its keyword arguments: numbers, strings, arrays, tuples of these.
    """
    if b.run_time is None:
        raise NeedsContentError(f"{function} is a step on the host, which is not supported here", None)
    node = Node("host", inputs, [Value(t) for t in types], {"function": function, **options}, (), b.origin)
    b.nodes.append(node)
    return node.outputs


def _no_inference(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    raise ShapeError("the types of a step on the host are given, not inferred")


for _name in HOST_OPS:
    register(Primitive(_name, Kind.HOST, _no_inference, None))


def size_places(inputs: Iterable[Value], nodes: Iterable[Node], names: Mapping[str, str]) -> dict[str, str]:
    """What each size is, as errors say it: the model's name of it, a dim of an input, what a step reads or gives. By
    symbol.
    """
    found: dict[str, str] = {}

    def note(value: Value, what: str) -> None:
        for axis, d in enumerate(value.type.shape if isinstance(value.type, TensorType) else ()):
            if repr(d) in map(repr, symbols(d)):  # no number, nor what is computed from sizes
                found.setdefault(repr(d), names.get(repr(d)) or f"dim {axis} of {what}")

    for v in inputs:
        note(v, repr(v.name) if v.name else "a value inside of the model")
    for node in nodes:
        maker = describe(node.origin, node.op)
        if node.op == "read":
            made = node.attrs["symbols"]
            for k, d in enumerate(made):
                number = f"[{k}]" if len(made) > 1 else ""
                found.setdefault(repr(d), f"{node.attrs['what']}{number} ({maker})")
        elif is_host(node):
            for v in node.outputs:
                note(v, f"what {maker} gives")
            for v in (v for region in node.regions for v in region.inputs):
                note(v, f"a value inside of {maker}")
    return found
