"""Values of a staged model's inputs and outputs: arrays, lists of them, None."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from onnxc.errors import InputError
from onnxc.ir.dtypes import BY_NAME
from onnxc.runtime.signature import Tensor

Array = np.ndarray[Any, Any]


class Plain:
    """An input or output that is no tensor of a known rank, as onnxruntime describes one."""

    def __init__(self, name: str, described: Sequence[Any] | None) -> None:
        self.name, self.described = name, described
        self.shape: list[int | str | None] = []

    @property
    def type(self) -> str:
        """As onnxruntime spells it: ``seq(tensor(float))``."""
        return _spelled(self.described)

    def __str__(self) -> str:
        return f"{self.name!r}: {self.type}"


def _spelled(described: Sequence[Any] | None) -> str:
    if described is None:
        return "any"
    kind, *rest = described
    if kind in ("tensor", "nothing", "any"):
        return Tensor("", BY_NAME[rest[0]], (), ()).type
    if kind == "map":
        return f"map({rest[0]},{_spelled(['tensor', rest[1]])})"
    return f"{'seq' if kind == 'sequence' else kind}({_spelled(rest[0])})"


def described(name: str, type: Sequence[Any] | None, dims: Sequence[Any]) -> Tensor | Plain:
    """An input or output as the manifest has it."""
    if type is not None and type[0] == "tensor":
        return Tensor(name, BY_NAME[type[1]], tuple(type[2]), tuple(dims))
    return Plain(name, type)


def as_value(described: Sequence[Any] | None, x: Any, name: str) -> Any:
    """A caller's value as steps take it: arrays, lists, None."""
    if described is None:
        return _native(np.asarray(x))
    kind, *rest = described
    if kind == "sequence":
        if not isinstance(x, (list, tuple)):
            raise InputError(f"input {name!r} expects a list of values; a {type(x).__name__} was given")
        return [as_value(rest[0], v, name) for v in x]
    if kind == "optional":
        return None if x is None else as_value(rest[0], x, name)
    if kind == "map":
        return x
    dtype, array = BY_NAME[rest[0]], _native(np.asarray(x))
    rank = len(rest[1]) if kind == "tensor" else array.ndim
    if array.dtype != dtype.numpy or array.ndim != rank:
        of_rank = f" of rank {rank}" if kind == "tensor" else ""
        given = f"{array.dtype}{list(array.shape)}"
        raise InputError(f"input {name!r} expects arrays of {dtype}{of_rank}; {given} was given")
    return array


def arrays_in(values: Iterable[Any]) -> Iterator[Array]:
    """The arrays of values, those in lists included."""
    for x in values:
        if isinstance(x, list):
            yield from arrays_in(x)
        elif isinstance(x, np.ndarray):
            yield x


def on_host(x: Any) -> Any:
    """A value with its content in the host's memory: of what lies on a GPU, a copy."""
    if isinstance(x, list):
        return [on_host(v) for v in x]
    return x.numpy() if hasattr(x, "numpy") and not isinstance(x, np.ndarray) else x


def own(y: Any, taken: set[int]) -> Any:
    """An output that shares no memory with an input, a constant or an output before it: these are in `taken`."""
    if isinstance(y, list):
        return [own(v, taken) for v in y]
    if not isinstance(y, np.ndarray):
        return y
    y = y.copy() if id(y) in taken or not y.flags.writeable else y
    taken.add(id(y))
    return y


def _native(array: Array) -> Array:
    if array.dtype.kind in "UST":
        return array.astype(object)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
