"""What the cases of loop kernels are made with: a builder whose inputs come with data, and tables of cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Sym, evaluate
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder

SIZES = [(7, 17), (1, 33), (31, 1), (0, 5), (16, 3)]  # of the two dims n and m
FIXED = [0, 3]  # the sizes of which there are kernels of fixed shape
FLOATS = [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16]
SIGNED = [dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64]
UNSIGNED = [dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64]
INTS = SIGNED + UNSIGNED


class Bench(Builder):
    """A builder whose inputs come with data. `n` and `m` are ints, or symbols where the sizes are dynamic."""

    def __init__(self, sizes: tuple[int, int], dynamic: bool) -> None:
        super().__init__()
        self.n: Dim = Sym("s0") if dynamic else sizes[0]
        self.m: Dim = Sym("s1") if dynamic else sizes[1]
        self.data: dict[int, np.ndarray | Dim] = {}
        if dynamic:
            self.x(self.n), self.x(self.m)  # inputs that tell the sizes

    def x(self, *shape: Dim, dtype: DType = dtypes.float32) -> Value:
        """An input of small numbers."""
        return self.input(TensorType(dtype, shape), f"x{len(self.inputs)}")

    def array(self, array: np.ndarray) -> Value:
        """An input with this content."""
        value = self.x(*array.shape, dtype=dtypes.from_numpy(array.dtype))
        self.data[value.id] = array
        return value

    def index(self, extent: Dim, *shape: Dim, dtype: DType = dtypes.int64) -> Value:
        """An input of positions along an axis, negative ones among them."""
        value = self.x(*shape, dtype=dtype)
        self.data[value.id] = extent
        return value


def content(bench: Bench, value: Value, sizes: dict[str, int]) -> np.ndarray:
    """The data of an input."""
    given = bench.data.get(value.id)
    if isinstance(given, np.ndarray):
        return given
    shape = [evaluate(d, sizes) for d in value.shape]
    rng = np.random.default_rng([len(shape), bench.inputs.index(value)])  # the same, whatever ran before
    if given is not None:
        extent = evaluate(given, sizes)
        return rng.integers(-extent, max(extent, 1 - extent), shape).astype(value.dtype.numpy)
    if value.dtype.is_float:
        return (rng.standard_normal(shape) * 2).astype(value.dtype.numpy)
    return rng.integers(
        0 if value.dtype.kind in ("uint", "bool") else -9, 2 if value.dtype.kind == "bool" else 10, shape
    ).astype(value.dtype.numpy)


@dataclass(frozen=True)
class Case:
    """A graph builder, the sizes it is compiled for (None: dynamic), and whether it is fused."""

    name: str
    build: Callable[[Bench], Value | Sequence[Value]]
    at: int | None
    fused: bool = True
    rtol: float = 2e-5


@dataclass(frozen=True)
class Table:
    """The cases of one subject."""

    cases: list[Case] = field(default_factory=list)

    def case(self, *, dynamic: bool = True, rtol: float = 2e-5, name: str = "") -> Callable[..., Callable[..., object]]:
        """Adds a case in all its forms."""

        def register(build: Callable[[Bench], Value | Sequence[Value]]) -> Callable[..., object]:
            label = name or build.__name__
            for at in [*(FIXED if dynamic else FIXED[:1]), *([None] if dynamic else [])]:
                sizes = "dynamic" if at is None else "x".join(map(str, SIZES[at]))
                self.cases.append(Case(f"{label}-{sizes}", build, at, True, rtol))
            self.cases.append(Case(f"{label}-unfused", build, 0, False, rtol))
            return build

        return register
