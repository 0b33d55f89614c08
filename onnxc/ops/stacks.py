"""Sequences of tensors of one shape as one tensor, whose rows they are (`Builder.stacks`): what reads such a sequence
reads the tensor, and needs no step on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from onnxc.host.registry import NO_SIZE
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, is_nonnegative, symbols
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import SequenceType, TensorType, same_shape
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import on_host
from onnxc.primitives.places import is_foreign


def allowed(b: Builder) -> bool:
    """Whether sequences may be tensors."""
    return b.run_time is not None and b.run_time.avoided.sequences


def unstacked(b: Builder, stack: Value, keep: int | None = None) -> Value:
    """The sequence of a tensor's rows; with `keep`, each has an axis of size 1 at that place."""
    shape = stack.shape[1:]
    if keep is not None:
        shape = (*shape[:keep], 1, *shape[keep:])
        stack = b.reshape(stack, (stack.shape[0], *shape))
    t = SequenceType(stack.t.with_shape(shape))
    (out,) = on_host(b, "sequence_split", [stack, None], [t], axis=0, keepdims=0)
    b.stacks[out.id] = stack
    return out


def stacked(b: Builder, values: Value) -> Value | None:
    """The tensor whose rows the values of a sequence are, where there is one."""
    if values.id in b.stacks or not allowed(b):
        return b.stacks.get(values.id)
    parts = b.parts.get(values.id)
    if not parts or not all(_is_row(v, parts[0]) for v in parts):
        return None
    return b.concat([b.reshape(v, (1, *v.shape)) for v in parts], 0)


def _is_row(v: Value, like: Value) -> bool:
    if not isinstance(v.type, TensorType) or not isinstance(like.type, TensorType) or is_foreign(v):
        return False
    return v.type.dtype is like.type.dtype and same_shape(v.shape, like.shape)


def row(b: Builder, stack: Value, position: Value) -> Value:
    """The row at a position, which counts from the end where it is negative."""
    return b.gather(stack, b.reshape(position, ()), 0)


def joined(b: Builder, stack: Value, axis: int, new_axis: bool) -> Value:
    """The rows one after the other along an axis, an existing one or a new one. A RunError where there is none."""
    count = stack.shape[0]
    if not is_nonnegative(count - 1):
        size = b.size_as(count, dtypes.int64)
        told = b.where(b.eq(size, 0), NO_SIZE, size)
        (count,) = b.extents(told, "the length of a sequence", "an empty sequence cannot be concatenated")
        stack = b.expand(stack, (count, *stack.shape[1:]))
    rest = [k + 1 for k in range(stack.rank - 1)]
    turned = b.transpose(stack, [*rest[:axis], 0, *rest[axis:]])
    if new_axis:
        return turned
    shape: list[Dim] = list(stack.shape[1:])
    shape[axis] = count * shape[axis]
    return b.reshape(turned, shape)


def appended(
    carried: Sequence[Value], after: Sequence[Value], others: Sequence[Value], nodes: Sequence[Node],
    visible: Callable[[Symbol], bool],
) -> dict[int, Value]:  # fmt: skip
    """By number: of the sequences that a loop carries, those to which each iteration appends one tensor, of a shape
    that is known outside (all its sizes are `visible`), and does nothing else with; and that tensor.
    """
    reads = Counter(v.id for n in nodes for v in n.operands) + Counter(v.id for v in (*after, *others))
    found = {}
    for k, (x, y) in enumerate(zip(carried, after, strict=True)):
        value = _value_appended(x, y)
        if value is None or reads[x.id] != 1 or reads[y.id] != 1 or is_foreign(value):
            continue
        if all(visible(s) for d in value.shape for s in symbols(d)):
            found[k] = value
    return found


def _value_appended(x: Value, y: Value) -> Value | None:
    """What makes y of x, where that is to append a tensor."""
    node = y.node
    if node is None or node.op != "host" or node.attrs["function"] != "sequence_insert":
        return None
    values, value, *position = node.inputs
    end = values is x and not any(p is not None for p in position)
    return value if end and value is not None and isinstance(value.type, TensorType) else None


def begun(b: Builder, initial: Sequence[Value], found: Mapping[int, Value]) -> dict[int, Value | None]:
    """By number: what is in these sequences before a loop appends to them (None: nothing), where that is a tensor whose
    rows are like what is appended.
    """
    starts: dict[int, Value | None] = {}
    for k, value in found.items():
        if b.parts.get(initial[k].id) == []:
            starts[k] = None
        elif (stack := stacked(b, initial[k])) is not None and _alike(stack, value):
            starts[k] = stack
    return starts


def _alike(stack: Value, value: Value) -> bool:
    return stack.dtype is value.dtype and same_shape(stack.shape[1:], value.shape)
