"""Sequences and optionals. What is in them is tracked where it is known, so that many a model needs no step on the
host for them (`Builder.parts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf import text_format
from onnx import TypeProto

from onnxc.errors import ModelError, NeedsContentError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import EmptyType, OptionalType, SequenceType, TensorType, Type
from onnxc.ops import stacks
from onnxc.ops.common import dtype_of
from onnxc.ops.control import iterate, lower
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import RunTime, on_host
from onnxc.primitives.places import is_foreign

COUNT = TensorType(dtypes.int64, ())
FLAG = TensorType(dtypes.boolean, ())


def _run_time(b: Builder, what: str) -> RunTime:
    if b.run_time is None:
        raise NeedsContentError(f"{what} is a step on the host, which is not supported here", None)
    return b.run_time


def _made(
    b: Builder, function: str, inputs: Sequence[Value | None], t: Type | None, parts: list[Value] | None
) -> Value:
    """A sequence or an optional that a function of the host makes, with what is in it where that is known."""
    (out,) = on_host(b, function, inputs, [t])
    if parts is not None:
        b.parts[out.id] = parts
    return out


def _common(b: Builder, types: Sequence[Type | None], what: str) -> Type | None:
    """The type of every value that has one of these types."""
    run_time = _run_time(b, what)
    found = types[0]
    for t in types[1:]:
        found = run_time.merged(found, t)
    return found


def _element(b: Builder, values: Value, what: str) -> Type | None:
    """The type of a sequence's elements, with sizes of its own."""
    if not isinstance(values.type, SequenceType):
        raise ModelError(f"{what} takes a sequence, not {values.type}")
    return _inside(b, values.type, what)


def _inside(b: Builder, t: SequenceType | OptionalType, what: str) -> Type | None:
    """The type of what comes out of a sequence or an optional. Of what is empty it is not known."""
    return None if isinstance(t.element, EmptyType) else _run_time(b, what).renewed(t.element)


def _position(b: Builder, position: Value | None, length: int, count: int, default: int) -> int | None:
    """Which of the first `count` places a position is, if it is known.

    A negative one counts from the end of the sequence, which has so many values: -1 is the last of them.
    """
    known = default if position is None else b.known(position)
    if known is None:
        return None
    at = known if isinstance(known, int) else known.item() if known.size == 1 else None
    if not isinstance(at, int):
        return None
    if not -length <= at < count:
        raise ModelError(f"position {at} is outside of a sequence of {length}")
    return at + length if at < 0 else at


# ---------------------------------------------------------------- sequences


@op("SequenceConstruct", 11)
def sequence_construct(b: Builder, *inputs: Value) -> Value:
    """A sequence of these values."""
    if not inputs:
        raise ModelError("SequenceConstruct takes at least one input")
    t = SequenceType(_common(b, [v.type for v in inputs], "SequenceConstruct"))
    return _made(b, "sequence_construct", inputs, t, list(inputs))


@op("SequenceEmpty", 11)
def sequence_empty(b: Builder, *, dtype: int = 1) -> Value:
    """A sequence of nothing."""
    return _nothing(b, EmptyType(dtype_of(dtype, "SequenceEmpty")))


def _nothing(b: Builder, element: Type | None) -> Value:
    """A sequence of nothing; what may come into it is of this type."""
    return _made(b, "sequence_construct", [], SequenceType(element), [])


@op("SequenceAt", 11)
def sequence_at(b: Builder, values: Value, position: Value) -> Value:
    """One of the values."""
    parts = b.parts.get(values.id)
    at = None if parts is None else _position(b, position, len(parts), len(parts), 0)
    if parts is not None and at is not None:
        return parts[at]
    if position.t.size == 1 and (stack := stacks.stacked(b, values)) is not None:
        return stacks.row(b, stack, position)
    return on_host(b, "sequence_at", [values, position], [_element(b, values, "SequenceAt")])[0]


@op("SequenceInsert", 11)
def sequence_insert(b: Builder, values: Value, value: Value, position: Value | None) -> Value:
    """One value more, before a position or at the end."""
    _element(b, values, "SequenceInsert")
    assert isinstance(values.type, SequenceType)
    parts = b.parts.get(values.id)
    element = _run_time(b, "SequenceInsert").merged(values.type.element, value.type)
    if parts is not None:
        at = _position(b, position, len(parts), len(parts) + 1, len(parts))
        parts = None if at is None else [*parts[:at], value, *parts[at:]]
    return _made(b, "sequence_insert", [values, value, position], SequenceType(element), parts)


@op("SequenceErase", 11)
def sequence_erase(b: Builder, values: Value, position: Value | None) -> Value:
    """Without the value at a position, or without the last."""
    _element(b, values, "SequenceErase")
    parts = b.parts.get(values.id)
    if parts:
        at = _position(b, position, len(parts), len(parts), -1)
        parts = None if at is None else [*parts[:at], *parts[at + 1 :]]
    return _made(b, "sequence_erase", [values, position], values.type, parts)


@op("SequenceLength", 11)
def sequence_length(b: Builder, values: Value) -> Value:
    """How many there are."""
    _element(b, values, "SequenceLength")
    if values.id in b.parts:
        return b.scalar(len(b.parts[values.id]), dtypes.int64)
    if values.id in b.stacks:
        return b.size_as(b.stacks[values.id].shape[0], dtypes.int64)
    return on_host(b, "sequence_length", [values], [COUNT])[0]


@op("ConcatFromSequence", 11)
def concat_from_sequence(b: Builder, values: Value, *, axis: int, new_axis: Flag = 0) -> Value:
    """The values one after the other, along an axis or a new one."""
    element = _element(b, values, "ConcatFromSequence")
    parts = b.parts.get(values.id)
    if parts and isinstance(element, TensorType):
        at = b.axis(axis, element.rank + new_axis)
        return b.concat([b.reshape(v, _with(v.shape, at, 1)) if new_axis else v for v in parts], at)
    if (stack := b.stacks.get(values.id)) is not None:
        return stacks.joined(b, stack, b.axis(axis, stack.rank - 1 + new_axis), bool(new_axis))
    t: Type | None = None
    if isinstance(element, TensorType):
        size = _run_time(b, "ConcatFromSequence").size()
        at = b.axis(axis, element.rank + new_axis)
        shape = _with(element.shape, at, size)
        t = element.with_shape(shape if new_axis else shape[: at + 1] + element.shape[at + 1 :])
    return on_host(b, "sequence_concat", [values], [t], axis=axis, new_axis=new_axis)[0]


def _with(shape: tuple[Dim, ...], axis: int, size: Dim) -> tuple[Dim, ...]:
    """The shape with one more dim."""
    return (*shape[:axis], size, *shape[axis:])


@op("SplitToSequence", 11)
def split_to_sequence(b: Builder, x: Value, split: Value | None, *, axis: int = 0, keepdims: Flag = 1) -> Value:
    """Slices along an axis: of size 1, of one size, or of sizes that are given."""
    at = b.axis(axis, x.rank)
    drop = split is None and not keepdims
    rest = (*x.shape[:at], *x.shape[at + 1 :])
    shape = rest if drop else _with(rest, at, 1 if split is None else _run_time(b, "SplitToSequence").size())
    sizes = _split_sizes(b, x.shape[at], split)
    parts = None if sizes is None else b.split(x, at, sizes)
    if parts is not None and drop:
        parts = [b.reshape(p, rest) for p in parts]
    options = {"axis": axis, "keepdims": keepdims}
    (out,) = on_host(b, "sequence_split", [x, split], [SequenceType(x.t.with_shape(shape))], **options)
    if parts is not None:
        b.parts[out.id] = parts
    elif split is None and stacks.allowed(b) and not is_foreign(x):
        moved = b.transpose(x, [at, *(k for k in range(x.rank) if k != at)])
        b.stacks[out.id] = moved if drop else b.reshape(moved, (x.shape[at], *shape))
    return out


MOST_PARTS = 1024


def _split_sizes(b: Builder, size: Dim, split: Value | None) -> list[int] | None:
    known = None if split is None else b.known(split)
    if not isinstance(size, int) or size > MOST_PARTS or (split is not None and known is None):
        return None
    if known is not None and known.dtype == object:  # of sizes that are symbols
        return None
    given: list[int] = [1] if known is None else known.ravel().tolist()
    if split is not None and split.rank:
        return given
    if len(given) != 1 or given[0] <= 0:
        raise ModelError(f"SplitToSequence cannot split an axis into parts of {given}")
    return [min(given[0], size - k) for k in range(0, size, given[0])]


@op("SequenceMap", 17)
def sequence_map(b: Builder, values: Value, *others: Value, body: Graph) -> list[Value | None]:
    """A function of each value of a sequence (with those of other sequences, or with a value for all)."""
    inputs = [values, *others]
    _element(b, values, "SequenceMap")
    lists = [b.parts.get(v.id) if isinstance(v.type, SequenceType) else None for v in inputs]
    known = [p for v, p in zip(inputs, lists, strict=True) if isinstance(v.type, SequenceType)]
    if all(p is not None for p in known):
        return _mapped(b, inputs, [p for p in known if p is not None], body)
    length = sequence_length(b, values)

    def mapped(inner: Builder, number: Value) -> list[Value]:
        given = [sequence_at(inner, v, number) if isinstance(v.type, SequenceType) else v for v in inputs]
        return lower(b, body, inner, given)

    trial = b.inside()  # what comes into the sequences is known when the body has been built
    trial.origin = b.origin
    types = [v.type for v in mapped(trial, trial.scalar(0, dtypes.int64))]
    empty = [_nothing(b, EmptyType(t.dtype) if isinstance(t, TensorType) else None) for t in types]

    def run(inner: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        outputs = mapped(inner, number)
        after = [_appended(inner, c, v) for c, v in zip(carried, outputs, strict=True)]
        return inner.scalar(True, dtypes.boolean), after, []

    return [*iterate(b, length, None, empty, run)[0]]


def _appended(b: Builder, values: Value, value: Value) -> Value:
    """One value more at the end of a sequence whose values are not known."""
    assert isinstance(values.type, SequenceType)
    t = SequenceType(_run_time(b, "SequenceMap").merged(values.type.element, value.type))
    (out,) = on_host(b, "sequence_insert", [values, value], [t])
    return out


def _mapped(b: Builder, inputs: Sequence[Value], lists: list[list[Value]], body: Graph) -> list[Value | None]:
    """Of sequences whose values are known."""
    if len({len(p) for p in lists}) != 1:
        raise ModelError(f"SequenceMap takes sequences of one length, not of {[len(p) for p in lists]}")
    rows = []
    for k in range(len(lists[0])):
        rest = iter(lists)
        given = [next(rest)[k] if isinstance(v.type, SequenceType) else v for v in inputs]
        rows.append(lower(b, body, b, given))
    if not rows:
        return [sequence_empty(b) for _ in body.outputs]
    return [sequence_construct(b, *column) for column in zip(*rows, strict=True)]


# ---------------------------------------------------------------- optionals


@op("Optional", 15)
def optional(b: Builder, value: Value | None, *, type: str | None = None) -> Value:
    """A value that may be missing: it has one, or (with a type in its place) has none."""
    if value is None:
        if type is None:
            raise ModelError("Optional has neither a value nor a type")
        element = _declared(text_format.Parse(type, TypeProto()))  # a wrong one is the model's fault
        return _made(b, "optional", [], OptionalType(element), [])
    return _made(b, "optional", [value], OptionalType(value.type), [value])


def _declared(t: TypeProto) -> Type | None:
    """A type as the standard writes it, of what is not there."""
    if t.HasField("sequence_type"):
        return SequenceType(_declared(t.sequence_type.elem_type))
    return EmptyType(dtype_of(t.tensor_type.elem_type, "Optional")) if t.HasField("tensor_type") else None


@op("OptionalHasElement", 15)
def optional_has_element(b: Builder, value: Value | None) -> Value:
    """Whether there is a value."""
    if value is None or not isinstance(value.type, OptionalType):
        return b.scalar(value is not None, dtypes.boolean)
    if value.id in b.parts:
        return b.scalar(bool(b.parts[value.id]), dtypes.boolean)
    return on_host(b, "optional_has", [value], [FLAG])[0]


@op("OptionalGetElement", 15)
def optional_get_element(b: Builder, value: Value) -> Value:
    """The value of an optional that has one; a value that is none."""
    if not isinstance(value.type, OptionalType):
        return value
    parts = b.parts.get(value.id)
    if parts is not None and not parts:
        raise ModelError("OptionalGetElement of an Optional that is empty")
    if parts:
        return parts[0]
    return on_host(b, "optional_get", [value], [_inside(b, value.type, "an optional")])[0]
