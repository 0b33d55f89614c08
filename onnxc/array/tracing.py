"""From a Python function and the types of its arguments to a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onnxc.array.core import Array, asarray, checked, concrete, traced, value_of
from onnxc.array.eager import Data
from onnxc.array.pytree import Spec, flatten, places, unflatten
from onnxc.array.sizes import Size
from onnxc.errors import InputError
from onnxc.frontends.decisions import Decisions
from onnxc.frontends.trace import Trace
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType

NUMBERS = (bool, int, float, complex)
_ARRAYS = (Array, np.ndarray, np.generic, *NUMBERS)
_HELD = (str, bytes, bool, int, float, complex, np.dtype)


@dataclass(frozen=True)
class Leaf:
    """An argument's leaf: its type, and whether it is a number of Python."""

    type: TensorType
    weak: bool


@dataclass(frozen=True)
class Result:
    """What a traced function returns.

    Attributes:
        spec: the structure.
        leaves: for each leaf the number of the graph's output, or what it is where it is no array.
        held: which leaves are no arrays.
    """

    spec: Spec
    leaves: tuple[Any, ...]
    held: tuple[bool, ...]

    @cached_property
    def _is_outputs(self) -> bool:
        """Whether the leaves are the outputs in order, as they are where all are arrays: the quick way of a call."""
        return not any(self.held)

    def tree(self, outputs: Sequence[Data]) -> Any:
        """The function's result for these outputs of the program."""
        if self._is_outputs:
            return unflatten(self.spec, map(concrete, outputs))
        pairs = zip(self.leaves, self.held, strict=True)
        return unflatten(self.spec, [k if held else concrete(outputs[k]) for k, held in pairs])


def as_data(x: Any, place: str) -> Data:
    """The numpy array of an argument's leaf. InputError, with its place, where it is none."""
    if isinstance(x, Array):
        if x._data is None:
            checked(x)
        assert x._data is not None
        return x._data
    if not isinstance(x, _ARRAYS):
        raise InputError(
            f"{place} is of the type {type(x).__name__}, which is no array and no number; where it decides what is "
            f"computed, name the argument in static_argnums or static_argnames"
        )
    try:
        data = asarray(x)._data
    except (InputError, OverflowError) as error:
        raise InputError(f"{place}: {error}") from None
    assert data is not None
    return data


def leaf_of(data: Data, given: Any) -> Leaf:
    """The type of a leaf."""
    return Leaf(TensorType(dtypes.from_numpy(data.dtype), data.shape), type(given) in NUMBERS)


def trace_function(
    f: Callable[[list[Array]], Any], leaves: Sequence[Leaf], names: Sequence[str] | None = None, name: str = "",
    decisions: Decisions | None = None,
) -> tuple[Graph, Result]:  # fmt: skip
    """The graph of a function of arrays, and what it returns.

    Args:
        f: is called with a traced array for each leaf.
        leaves: their types.
        names: of the graph's inputs.
        name: the function's, for errors.
        decisions: knows what dynamic sizes are in the call at hand, and is told what was asked of them.

    Raises:
        InputError: it returns what is no array. TraceError, and all other errors: what `f` raises.
    """
    with Trace(decisions=decisions) as trace:
        values = [trace.input(leaf.type, names[k] if names else "") for k, leaf in enumerate(leaves)]
        found = f([traced(v, trace, leaf.weak) for v, leaf in zip(values, leaves, strict=True)])
        outputs, result = results_of(found, trace, name)
    return trace.graph(outputs, name), result


def results_of(found: Any, trace: Trace, name: str) -> tuple[list[Value], Result]:
    """The values of a function's result in a trace."""
    leaves, spec = flatten(found)
    outputs: list[Value] = []
    kept: list[Any] = []
    held: list[bool] = []
    for k, leaf in enumerate(leaves):
        is_array = isinstance(leaf, (Array, Size, np.ndarray, np.generic))
        if not is_array and not isinstance(leaf, _HELD):
            place = places(found, "result")[k]
            raise InputError(
                f"{name or 'the function'} returns {place} of the type {type(leaf).__name__}, which is no array"
            )
        kept.append(len(outputs) if is_array else leaf)
        held.append(not is_array)
        if is_array:
            outputs.append(value_of(asarray(leaf), trace))
    return outputs, Result(spec, tuple(kept), tuple(held))
