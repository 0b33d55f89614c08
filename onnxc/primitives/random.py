"""Random numbers: a generator that counts, so that every number follows from a key and a position alone.

Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (2011): `threefry` is their Threefry-2x32
with 20 rounds. A draw is pointwise: it fuses, comes out the same in any number of threads, on any target, and when it
is computed again; and a derivative reads the numbers that its model has used.

    state = [seed, calls]              random_state: filled in by the runtime, anew for each call of the model
    key   = threefry(threefry(seed, number of the draw in the model), calls)
    bits  = threefry(key, 0), threefry(key, 1), ...

An operator with a `seed` of its own has key = threefry(its seed, calls): as in onnxruntime, calls of a model go on in
one sequence, which begins anew when the model is loaded again, and operators of equal seeds draw equal numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxc.errors import ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Attrs, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, broadcast_shapes, register

if TYPE_CHECKING:
    from onnxc.primitives.builder import Builder

STATE = TensorType(dtypes.uint64, (2,))
"""Of `random_state`: the seed, and how many calls there were before."""

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
ROUNDS = 20


def _words(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    if [t.dtype for t in types] != [dtypes.uint64, dtypes.int64]:
        raise ShapeError(f"threefry of {', '.join(map(str, types))}: a key is uint64, a counter int64")
    return (TensorType(dtypes.uint64, broadcast_shapes(*(t.shape for t in types))),)


def threefry(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """64 random bits, uint64, for each counter, int64, under each key, uint64; of all three low words come first."""
    k0, k1 = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    x0, x1 = counter.astype(np.uint32), (counter >> np.int64(32)).astype(np.uint32)
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    with np.errstate(over="ignore"):
        x0, x1 = x0 + k0, x1 + k1
        for step in range(ROUNDS // 4):
            for r in ROTATIONS[step % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(r) | x1 >> np.uint32(32 - r)) ^ x0
            x0 = x0 + keys[(step + 1) % 3]
            x1 = x1 + keys[(step + 2) % 3] + np.uint32(step + 1)
    return np.asarray(x0.astype(np.uint64) | x1.astype(np.uint64) << np.uint64(32))


def _state(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return (STATE,)


register(Primitive("threefry", Kind.POINTWISE, _words, threefry))
# Only the runtime knows what it is in a call: a pass makes it an input. In the interpreter: the first call of seed 0.
register(Primitive("random_state", Kind.VIEW, _state, lambda: np.zeros(2, np.uint64)))


# ---------------------------------------------------------------- draws


class Draws:
    """What the builders of a graph and of its regions share: the state, and how many draws there are so far."""

    def __init__(self, root: Builder) -> None:
        self.root = root
        self.count = 0
        self._state: Value | None = None

    def state(self, k: int) -> Value:
        """One of the state's two numbers, as a scalar of the outermost graph."""
        b = self.root
        if self._state is None:
            self._state = b.one("random_state")
        return b.reshape(b.slice(self._state, 0, k, k + 1), ())


Moment = Callable[[], Value]
"""Which of all evaluations of a graph or a region this is, as an int64: no two have the same."""


def in_branch(inner: Builder, outer: Builder) -> None:
    """Lets a region draw that is evaluated at most once in each evaluation of the graph around it."""
    inner.moment = lambda: moment(outer)


def in_loop(inner: Builder, outer: Builder, iteration: Value | Moment) -> None:
    """Lets a region draw that is evaluated again and again; `iteration` is (or gives) its number, an int64."""

    def each() -> Value:
        key = inner.cast(moment(outer), dtypes.uint64)
        number = iteration if isinstance(iteration, Value) else iteration()
        return inner.cast(inner.one("threefry", key, number), dtypes.int64)

    inner.moment = each


def moment(b: Builder) -> Value:
    """The moment of what is being built.

    Raises:
        UnsupportedError: nothing says which evaluation of this region is which.
    """
    if b.moment is not None:
        return b.moment()
    if b.draws.root is not b:
        raise UnsupportedError("random operators inside of this operator's subgraph are not supported yet")
    return b.cast(b.draws.state(1), dtypes.int64)


def random_key(b: Builder, seed: float | None) -> Value:
    """The key of a further draw: of the operator's own seed, or else of the model's."""
    own = b.draws.count
    b.draws.count += 1
    if seed is not None:
        base = b.scalar(np.uint64(int.from_bytes(struct.pack("<d", seed), "little")), dtypes.uint64)
    else:
        base = b.one("threefry", b.draws.state(0), b.scalar(own, dtypes.int64))
    return b.one("threefry", base, moment(b))


def random_bits(b: Builder, shape: Sequence[Dim], key: Value) -> Value:
    """64 random bits for each element, uint64."""
    return b.one("threefry", key, b.reshape(b.iota(prod(shape)), shape))
