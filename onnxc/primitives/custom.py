"""Values whose derivative is not that of what computes them: a mark for `onnxc.autodiff`, of no other meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.ir.graph import Attrs, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register

if TYPE_CHECKING:
    from onnxc.primitives.builder import Builder

OWN = "with_gradient"


def _first(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return tuple(types[: attrs["results"]])


def _same(*arrays: np.ndarray, results: int, **rest: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.copy(x) for x in arrays[:results])


# Operands: so many results, then what they were computed from; `inputs` says which of the operator's are there, `rule`
# which operator it is, with its attributes.
register(Primitive(OWN, Kind.VIEW, _first, _same))


def with_gradient(
    b: Builder, rule: tuple[Any, ...], inputs: Sequence[Value | None], outputs: Sequence[Value | None]
) -> list[Value | None]:
    """The same outputs, with the derivative by the inputs that the operator's own rule gives (`autodiff/custom.py`)."""
    ys = [v for v in outputs if v is not None]
    xs = [v for v in inputs if v is not None]
    attrs = {"rule": rule, "results": len(ys), "inputs": tuple(v is not None for v in inputs)}
    with b.unfolded():
        made = iter(b.emit(OWN, [*ys, *xs], attrs))
    return [None if v is None else next(made) for v in outputs]
