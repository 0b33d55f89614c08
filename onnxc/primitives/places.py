"""Tensors of elements that no kernel has a type for, strings and complex128: programs move places, the host elements.

A primitive that moves elements (a view, a selection, a scatter) does not look at them. Here it is built on int64
places in a list of all elements that go in, and a step on the host (`elements_at`) then takes the elements from there.
Of several such primitives in a row only the last one's result is made, as no one reads those in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxc.errors import UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.primitives.host import on_host

if TYPE_CHECKING:
    from onnxc.primitives.builder import Builder

FOREIGN = frozenset({dtypes.string, dtypes.BY_NAME["complex128"]})
MOVES = frozenset({
    "reshape", "transpose", "expand", "slice", "pad", "concat", "gather", "gather_elements", "gather_nd",
    "scatter_elements", "scatter_nd", "where",
})  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where the elements of a value stand: int64 `at`, of the value's shape, in `lists`, one after the other."""

    at: Value
    lists: tuple[Value, ...]


def is_foreign(value: Value) -> bool:
    """Whether it is a tensor of elements that no kernel has a type for."""
    return isinstance(value.type, TensorType) and value.dtype in FOREIGN


def moved(
    b: Builder, op: str, inputs: Sequence[Value], attrs: dict[str, Any], types: Sequence[TensorType]
) -> tuple[Value, ...]:
    """The output of a primitive that moves such elements. Raises UnsupportedError for one that computes with them."""
    foreign = [v for v in inputs if is_foreign(v)]
    if op not in MOVES or attrs.get("reduction", "none") != "none":
        kind = foreign[0].dtype if foreign else types[0].dtype
        raise UnsupportedError(f"elements of the type {kind} are moved only; {op.replace('_', ' ')} is not supported")
    known = [b.places.get(v.id) or _own(b, v) for v in foreign]
    lists = known[0].lists
    if any(_ids(p.lists) != _ids(lists) for p in known):
        known = [p if len(p.lists) == 1 else _own(b, v) for p, v in zip(known, foreign, strict=True)]
        lists = tuple({p.lists[0].id: p.lists[0] for p in known}.values())
    starts = _starts(b, lists)
    at = iter([_moved_by(b, p.at, starts[p.lists[0].id]) for p in known])
    (place,) = b.emit(op, [next(at) if is_foreign(v) else v for v in inputs], attrs)
    (out,) = on_host(b, "elements_at", [place, *lists], types)
    b.places[out.id] = Places(place, lists)
    return (out,)


def _own(b: Builder, v: Value) -> Places:
    """A value as the one list."""
    return Places(b.reshape(b.iota(v.t.size), v.shape), (v,))


def _ids(lists: Sequence[Value]) -> list[int]:
    return [v.id for v in lists]


def _starts(b: Builder, lists: Sequence[Value]) -> dict[int, Value | None]:
    """Where each list begins; None for the first."""
    found: dict[int, Value | None] = {}
    end = None
    for v in lists:
        found[v.id] = end
        size = b.size_as(v.t.size, dtypes.int64)
        end = size if end is None else b.add(end, size)
    return found


def _moved_by(b: Builder, at: Value, start: Value | None) -> Value:
    return at if start is None else b.add(at, start)
