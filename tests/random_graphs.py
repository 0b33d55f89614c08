"""Random graphs of primitives whose results can be compared exactly, or nearly.

A graph grows from a pool of values. Float values are kept in two classes: *exact* ones hold whole
numbers so small
that every order of computing them gives the same bits, and only these are compared, rounded or cast to
integers; the
others may differ in the last digits, and never decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Sym, always_equal, evaluate, prod
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder

T = TypeVar("T")
EXACT = 2.0**22  # exact floats stay below
LARGE = 1e4  # inexact floats above are not computed with
FLOATS = (dtypes.float32, dtypes.float64)
INTS = (dtypes.int32, dtypes.int64, dtypes.uint8, dtypes.int8)
SYMBOLS = (Sym("s0"), Sym("s1"))


class Source(Protocol):
    """Where decisions come from: `random.Random` behind `Seeded`, or hypothesis."""

    def choice(self, options: Sequence[T]) -> T: ...
    def integer(self, lo: int, hi: int) -> int: ...


@dataclass(frozen=True)
class Item:
    """A value of the pool, whether it is exact, and a bound of its magnitude (of floats)."""

    value: Value
    exact: bool = True
    bound: float = 4.0


@dataclass
class RandomGraph:
    """A graph with what its inputs may hold: for index inputs, the extent of the axis that they index."""

    graph: Graph
    extents: dict[int, Dim] = field(default_factory=dict)
    outputs: list[Item] = field(default_factory=list)

    def arrays(self, sizes: dict[str, int], seed: int) -> list[np.ndarray]:
        """Inputs for these sizes."""
        rng = np.random.default_rng(seed)
        return [self._array(v, sizes, rng) for v in self.graph.inputs]

    def _array(self, value: Value, sizes: dict[str, int], rng: np.random.Generator) -> np.ndarray:
        shape = [evaluate(d, sizes) for d in value.shape]
        if value.id in self.extents:
            extent = max(1, evaluate(self.extents[value.id], sizes))
            return rng.integers(-extent, extent, shape).astype(value.dtype.numpy)
        low = 0 if value.dtype.kind in ("uint", "bool") else -4
        return rng.integers(low, 2 if value.dtype.kind == "bool" else 5, shape).astype(value.dtype.numpy)


class Generator:
    """Grows a graph by random steps; a step that does not fit what was drawn does nothing."""

    def __init__(self, source: Source, dynamic: bool = False, max_dim: int = 5) -> None:
        self.r, self.dynamic, self.max_dim = source, dynamic, max_dim
        self.b = Builder()
        self.pool: list[Item] = []
        self.extents: dict[int, Dim] = {}

    def run(self, steps: int) -> RandomGraph:
        """A graph of at most so many steps."""
        if self.dynamic:  # inputs that tell the sizes
            self.pool += [self.fresh(dtypes.float32, [s]) for s in SYMBOLS]
        self.pool += [self.fresh() for _ in range(self.r.integer(1, 3))]
        for _ in range(steps):
            made = self.r.choice(self.steps())(self)
            if made is not None and not any(made.value is i.value for i in self.pool) and self._small(made):
                self.pool.append(made)
        made_items = [i for i in self.pool if i.value.node is not None] or self.pool
        outputs = [made_items[-1]]
        for _ in range(self.r.integer(0, 2)):
            item = self.r.choice(made_items)
            if all(item.value is not o.value for o in outputs):
                outputs.append(item)
        graph = self.b.graph([o.value for o in outputs])
        return RandomGraph(graph, self.extents, outputs)

    def steps(self) -> Sequence[Callable[[Any], Item | None]]:
        """What it grows by, each as often as it stands here."""
        return _STEPS

    def _small(self, item: Item) -> bool:
        sizes = {"s0": 5, "s1": 5}
        return evaluate(item.value.t.size, sizes) <= 4096 and item.value.rank <= 5

    # ------------------------------------------------------------ drawing

    def dim(self) -> Dim:
        if self.dynamic and self.r.integer(0, 2) == 0:
            return self.r.choice(SYMBOLS)
        if self.r.integer(0, 11) == 0:
            return self.r.choice([0, 16, 17, 33])
        return self.r.integer(1, self.max_dim)

    def input(self, dtype: DType, shape: Sequence[Dim]) -> Value:
        return self.b.input(TensorType(dtype, tuple(shape)), f"x{len(self.b.inputs)}")

    def fresh(self, dtype: DType | None = None, shape: Sequence[Dim] | None = None) -> Item:
        dtype = dtype or self.r.choice([dtypes.float32, dtypes.float32, *FLOATS, *INTS, dtypes.boolean])
        shape = shape if shape is not None else [self.dim() for _ in range(self.r.integer(0, 4))]
        return Item(self.input(dtype, shape))

    def index(self, shape: Sequence[Dim], extent: Dim) -> Value:
        value = self.input(self.r.choice([dtypes.int64, dtypes.int32]), shape)
        self.extents[value.id] = extent
        return value

    def pick(self, accept: Callable[[Item], bool] = lambda i: True) -> Item | None:
        found = [i for i in self.pool if accept(i)]
        return self.r.choice(found[-6:]) if found else None

    def number(self) -> Item | None:
        return self.pick(lambda i: i.value.dtype is not dtypes.boolean and i.bound < LARGE)

    def like(self, item: Item) -> Item:
        """An operand that broadcasts with `item`: of the pool, or a new input."""
        v = item.value
        for other in reversed(self.pool):
            if (
                other.value.dtype is v.dtype
                and _broadcasts(v, other.value)
                and other.bound < LARGE
                and self.r.integer(0, 1)
            ):
                return other
        if self.r.integer(0, 3) == 0:
            return Item(self.b.scalar(self.r.integer(1, 3), v.dtype)) if v.dtype is not dtypes.boolean else item
        shape: list[Dim] = [d if self.r.integer(0, 2) else 1 for d in v.shape]
        return self.fresh(v.dtype, shape[self.r.integer(0, len(shape)) :] if self.r.integer(0, 1) else shape)

    def axis(self, item: Item) -> int:
        return self.r.integer(0, item.value.rank - 1)

    def axes(self, item: Item) -> list[int]:
        return [a for a in range(item.value.rank) if self.r.integer(0, 1)]

    # ------------------------------------------------------------ steps

    def unary(self) -> Item | None:
        x = self.number()
        if x is None:
            return None
        v = x.value
        if not v.dtype.is_float or self.r.integer(0, 1):
            op = self.r.choice(["neg", "abs", "sign"])
            return Item(self.b.unary(op, v), x.exact, max(x.bound, 1))
        op = self.r.choice(["tanh", "exp", "sqrt", "sigmoid", "div", "erf"])
        if op == "exp":
            return Item(self.b.exp(self.b.min(v, 2.0)), False, 8)
        if op == "sqrt":
            return Item(self.b.sqrt(self.b.add(self.b.abs(v), 1.0)), False, x.bound + 2)
        if op == "sigmoid":
            return Item(self.b.sigmoid(self.b.max(v, -20.0)), False, 1)
        if op == "div":
            return Item(self.b.div(1.0, self.b.add(self.b.mul(v, v), 1.0)), False, 1)
        return Item(self.b.unary(op, v), False, 1)

    def binary(self) -> Item | None:
        x = self.number()
        if x is None:
            return None
        y = self.like(x)
        op = self.r.choice(["add", "sub", "mul", "max", "min"])
        bound = x.bound * y.bound if op == "mul" else x.bound + y.bound
        exact = x.exact and y.exact and bound < EXACT
        a, b = (x.value, y.value) if self.r.integer(0, 1) else (y.value, x.value)
        return Item(self.b.binary(op, a, b), exact, bound)

    def compare(self) -> Item | None:
        x = self.pick(lambda i: i.exact)
        if x is None or x.value.dtype is dtypes.boolean:
            return None
        y = self.like(x)
        return Item(self.b.binary(self.r.choice(["eq", "lt", "le"]), x.value, y.value)) if y.exact else None

    def logic(self) -> Item | None:
        x = self.pick(lambda i: i.value.dtype is dtypes.boolean)
        if x is None:
            return None
        if self.r.integer(0, 2) == 0:
            return Item(self.b.not_(x.value))
        return Item(self.b.binary(self.r.choice(["and", "or", "xor"]), x.value, self.like(x).value))

    def where(self) -> Item | None:
        c, x = self.pick(lambda i: i.value.dtype is dtypes.boolean), self.number()
        if c is None or x is None or not _broadcasts(c.value, x.value):
            return None
        y = self.like(x)
        if not _broadcasts(c.value, y.value):
            return None
        return Item(self.b.where(c.value, x.value, y.value), x.exact and y.exact, max(x.bound, y.bound))

    def cast(self) -> Item | None:
        x = self.pick(lambda i: i.exact)
        if x is None:
            return None
        to = self.r.choice([*FLOATS, *INTS, dtypes.boolean])
        if x.value.dtype.is_float and (to.bits < 32 or x.bound > 1e6 or to.kind == "uint"):
            return None
        big = x.value.dtype.is_integer
        return Item(self.b.cast(x.value, to), not big, LARGE if big else max(x.bound, 1))

    def view(self) -> Item | None:
        x = self.pick()
        if x is None:
            return None
        v = x.value
        op = self.r.choice(["transpose", "reshape", "reshape", "expand", "slice", "flip"])
        return self._view(op, v, x)

    def _view(self, op: str, v: Value, x: Item) -> Item | None:
        if op == "transpose":
            perm = list(range(v.rank))
            for i in range(v.rank - 1):
                j = self.r.integer(i, v.rank - 1)
                perm[i], perm[j] = perm[j], perm[i]
            return Item(self.b.transpose(v, perm), x.exact, x.bound)
        if op == "reshape":
            return Item(self.b.reshape(v, self.new_shape(v)), x.exact, x.bound)
        if op == "expand":
            shape: list[Dim] = [self.r.integer(1, 4) if d == 1 else d for d in v.shape]
            return Item(
                self.b.expand(v, [self.r.integer(1, 3), *shape] if self.r.integer(0, 1) else shape),
                x.exact,
                x.bound,
            )
        if v.rank == 0:
            return None
        if op == "flip":
            return Item(self.b.flip(v, self.axes(x)), x.exact, x.bound)
        axis = self.axis(x)
        d = v.shape[axis]
        if not isinstance(d, int):
            return Item(self.b.slice(v, axis, d // 2, d, self.r.integer(1, 2)), x.exact, x.bound)
        if d == 0:
            return None
        if self.r.integer(0, 1):
            start = self.r.integer(0, d - 1)
            return Item(self.b.slice(v, axis, start, self.r.integer(start, d), self.r.integer(1, 3)), x.exact, x.bound)
        start = self.r.integer(0, d - 1)
        return Item(self.b.slice(v, axis, start, self.r.integer(-1, start), -self.r.integer(1, 3)), x.exact, x.bound)

    def new_shape(self, v: Value) -> list[Dim]:
        """Dims merged, then split at random divisors."""
        out: list[Dim] = []
        for d in v.shape:
            if out and self.r.integer(0, 1):
                out[-1] = out[-1] * d
            else:
                out.append(d)
        split: list[Dim] = []
        for d in out:
            divisors = [k for k in (2, 3, 4, 5, 6) if isinstance(d, int) and d and d % k == 0]
            if divisors and self.r.integer(0, 1):
                k = self.r.choice(divisors)
                split += [d // k, k]
            else:
                split.append(d)
        if self.r.integer(0, 3) == 0:
            split.insert(self.r.integer(0, len(split)), 1)
        return [d for d in split if d != 1 or self.r.integer(0, 2)]

    def pad(self) -> Item | None:
        x = self.pick(lambda i: i.value.rank > 0 and i.value.dtype is not dtypes.boolean)
        if x is None:
            return None
        n = x.value.rank
        low, high = ([self.r.integer(0, 2) if self.r.integer(0, 1) else 0 for _ in range(n)] for _ in range(2))
        gaps = [self.r.integer(0, 2) if self.r.integer(0, 3) == 0 else 0 for _ in range(n)]
        return Item(self.b.pad(x.value, low, high, float(self.r.integer(0, 2)), gaps), x.exact, max(x.bound, 2))

    def concat(self) -> Item | None:
        x = self.pick(lambda i: i.value.rank > 0)
        if x is None:
            return None
        axis = self.axis(x)
        parts = [x]
        for _ in range(self.r.integer(1, 3)):
            found = [i for i in self.pool if i.value.dtype is x.value.dtype and _joins(i.value, x.value, axis)]
            if found and self.r.integer(0, 2):
                parts.append(self.r.choice(found))
            else:
                parts.append(
                    self.fresh(x.value.dtype, [self.dim() if k == axis else d for k, d in enumerate(x.value.shape)])
                )
        return Item(
            self.b.concat([p.value for p in parts], axis),
            all(p.exact for p in parts),
            max(p.bound for p in parts),
        )

    def iota(self) -> Item:
        dtype = self.r.choice([dtypes.int64, dtypes.int32, dtypes.float32])
        return Item(self.b.iota(self.dim(), dtype), True, 40)

    def sizes(self) -> Item | None:
        x = self.pick(lambda i: i.value.rank > 0)
        if x is None or not self.dynamic:
            return None
        return Item(self.b.sizes(np.array(x.value.shape, dtype=object)), True, LARGE)

    def reduce(self) -> Item | None:
        x = self.number()
        if x is None or x.value.rank == 0:
            return None
        axes = self.axes(x) or [self.axis(x)]
        op = self.r.choice(["sum", "sum", "max", "min"])
        if op != "sum" and any(x.value.shape[a] == 0 or not isinstance(x.value.shape[a], int) for a in axes):
            op = "sum"
        count = evaluate(prod(x.value.shape[a] for a in axes), {"s0": 40, "s1": 40})
        bound = x.bound * max(1, count) if op == "sum" else x.bound
        return Item(self.b.reduce(op, x.value, axes, bool(self.r.integer(0, 1))), x.exact and bound < EXACT, bound)

    def arg(self) -> Item | None:
        x = self.pick(lambda i: i.exact and i.value.rank > 0 and i.value.dtype is not dtypes.boolean)
        if x is None:
            return None
        axis = self.axis(x)
        d = x.value.shape[axis]
        if not isinstance(d, int) or d == 0:
            return None
        op = self.r.choice(["argmax", "argmin"])
        return Item(self.b.one(op, x.value, axis=axis, last=bool(self.r.integer(0, 1))), True, 64)

    def window(self) -> Item | None:
        x = self.number()
        if x is None or x.value.rank == 0 or not all(isinstance(d, int) for d in x.value.shape):
            return None
        n = x.value.rank
        kernel = [self.r.integer(1, 3) for _ in range(n)]
        low, high = ([self.r.integer(0, 1) for _ in range(n)] for _ in range(2))
        strides, dilations = ([self.r.integer(1, 2) for _ in range(n)] for _ in range(2))
        spans = [
            d + a + b - (dl * (k - 1) + 1)
            for d, a, b, dl, k in zip(x.value.shape, low, high, dilations, kernel, strict=True)
        ]
        op = self.r.choice(["window_sum", "window_max"])
        if any(s < 0 for s in spans) or (op == "window_max" and x.value.dtype.is_float and any(low + high)):
            return None
        attrs: dict[str, Any] = {
            "kernel": tuple(kernel), "strides": tuple(strides), "low": tuple(low), "high": tuple(high),
            "dilations": tuple(dilations),
        }  # fmt: skip
        bound = x.bound * (float(np.prod(kernel)) if op == "window_sum" else 1)
        return Item(self.b.one(op, x.value, **attrs), x.exact and bound < EXACT, bound)

    def gather(self) -> Item | None:
        x = self.pick(lambda i: i.value.rank > 0)
        if x is None:
            return None
        axis, v = self.axis(x), x.value
        if v.shape[axis] == 0:
            return None
        op = self.r.choice(["gather", "gather", "elements", "nd"])
        if op == "gather":
            at = self.index([self.dim() for _ in range(self.r.integer(0, 2))], v.shape[axis])
            return Item(self.b.gather(v, at, axis), x.exact, x.bound)
        if op == "elements":
            shape: list[Dim] = [self.dim() if k == axis else d for k, d in enumerate(v.shape)]
            return Item(
                self.b.one("gather_elements", v, self.index(shape, v.shape[axis]), axis=axis),
                x.exact,
                x.bound,
            )
        batch = self.r.integer(0, min(1, v.rank - 1))
        if not always_equal(v.shape[batch], v.shape[min(batch + 1, v.rank - 1)]) or v.shape[batch] == 0:
            depth = 1
        else:
            depth = min(2, v.rank - batch)
        lead = [*v.shape[:batch], *(self.dim() for _ in range(self.r.integer(0, 1)))]
        index = self.index([*lead, depth], v.shape[batch])
        return (
            Item(self.b.one("gather_nd", v, index, batch_dims=batch), x.exact, x.bound) if v.shape[batch] != 0 else None
        )

    def matmul(self) -> Item | None:
        x = self.pick(lambda i: i.value.rank >= 2 and i.value.dtype is not dtypes.boolean and i.bound < 100)
        if x is None:
            return None
        k = x.value.shape[-1]
        y = self.fresh(x.value.dtype, [*([] if self.r.integer(0, 1) else x.value.shape[:-2]), k, self.dim()])
        bound = x.bound * y.bound * max(1, evaluate(k, {"s0": 40, "s1": 40}))
        return Item(self.b.matmul(x.value, y.value), x.exact, bound)

    def softmax(self) -> Item | None:
        x = self.pick(lambda i: i.value.dtype.is_float and i.value.rank > 0 and i.bound < LARGE)
        if x is None:
            return None
        axis = self.axis(x)
        if self.r.integer(0, 1) and isinstance(x.value.shape[axis], int) and x.value.shape[axis] != 0:
            return Item(self.b.softmax(x.value, axis), False, 1)
        if self.r.integer(0, 1):
            return None
        axes = [axis, x.value.rank - 1] if axis != x.value.rank - 1 else [axis]
        if any(x.value.shape[a] == 0 for a in axes):
            return None
        centred = self.b.sub(x.value, self.b.mean(x.value, axes, True))
        variance = self.b.mean(self.b.mul(centred, centred), axes, True)
        return Item(self.b.div(centred, self.b.sqrt(self.b.add(variance, 1.0))), False, 40)

    def copy(self) -> Item | None:
        x = self.pick()
        return None if x is None else Item(self.b.one("copy", x.value), x.exact, x.bound)

    def new(self) -> Item:
        return self.fresh()


def _broadcasts(a: Value, b: Value) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(x == 1 or y == 1 or always_equal(x, y) for x, y in pairs)


def _joins(a: Value, b: Value, axis: int) -> bool:
    return a.rank == b.rank and all(
        k == axis or always_equal(x, y) for k, (x, y) in enumerate(zip(a.shape, b.shape, strict=True))
    )


_STEPS: list[Callable[[Generator], Item | None]] = [
    Generator.unary, Generator.unary, Generator.binary, Generator.binary, Generator.binary, Generator.compare,
    Generator.logic, Generator.where, Generator.cast, Generator.view, Generator.view, Generator.view,
    Generator.pad, Generator.concat, Generator.iota, Generator.sizes, Generator.reduce, Generator.reduce,
    Generator.arg, Generator.window, Generator.gather, Generator.matmul, Generator.softmax,
    Generator.copy, Generator.new,
]  # fmt: skip


class Seeded:
    """Decisions from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]

    def integer(self, lo: int, hi: int) -> int:
        return int(self._rng.integers(lo, hi + 1))
