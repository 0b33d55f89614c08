"""The writer of nodes: what spellings are written with. Constants, and sizes as tensors, are made when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxc.errors import InternalError
from onnxc.export.kernels import wide_dtype
from onnxc.export.tensors import EXTERNAL_BYTES, External, tensor_proto
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Atom, Call, Dim, Expr, Symbol, is_nonnegative, of
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType


class NodeWriter:
    """Nodes and initializers of one graph; each method adds what it needs and returns the name of the result.

    Generated names begin with `prefix`. The writer of a region inside has `parent`, whose constants and sizes it sees.
    """

    def __init__(
        self, prefix: str, external: External | None, dim_names: Mapping[str, str], parent: NodeWriter | None = None
    ) -> None:
        self.prefix, self.external, self.dim_names = prefix, external, dim_names
        self.names: dict[int, str] = dict(parent.names) if parent else {}  # of values, by id
        self.counter: list[int] = parent.counter if parent else [0]
        self.dims: dict[Dim, str] = dict(parent.dims) if parent else {}
        self.constants: dict[tuple[Any, ...], str] = dict(parent.constants) if parent else {}
        self.kept: list[np.ndarray] = []  # arrays that constants are known by: they must outlive the writer
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def fresh(self) -> str:
        """A new name."""
        self.counter[0] += 1
        return f"{self.prefix}{self.counter[0]}"

    def several(self, op_type: str, inputs: Sequence[str], count: int, **attrs: Any) -> list[str]:
        """A node with several outputs."""
        outputs = [self.fresh() for _ in range(count)]
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, **attrs))
        return outputs

    def one(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        """A node with one output."""
        return self.several(op_type, inputs, 1, **attrs)[0]

    def cast(self, x: str, to: DType) -> str:
        """The name of a tensor, converted."""
        return self.one("Cast", x, to=to.onnx)

    def compute(self, op_type: str, dtype: DType, inputs: Sequence[str], *more: str, **attrs: Any) -> str:
        """An op on inputs of one dtype (`more` are others), through a wider one where runtimes have no kernel."""
        return self.compute_several(op_type, dtype, inputs, more, 1, **attrs)[0]

    def compute_several(
        self, op_type: str, dtype: DType, inputs: Sequence[str], more: Sequence[str], count: int, **attrs: Any
    ) -> list[str]:
        """As `compute`; the first output has the inputs' dtype."""
        wide = wide_dtype(op_type, dtype)
        if wide is dtype:
            return self.several(op_type, [*inputs, *more], count, **attrs)
        made = self.several(op_type, [*(self.cast(x, wide) for x in inputs), *more], count, **attrs)
        return [self.cast(made[0], dtype), *made[1:]]

    def select(self, dtype: DType, condition: str, x: str, y: str) -> str:
        """`x` where the condition holds, else `y`, through a wider dtype where need be."""
        wide = wide_dtype("Where", dtype)
        if wide is dtype:
            return self.one("Where", condition, x, y)
        return self.cast(self.one("Where", condition, self.cast(x, wide), self.cast(y, wide)), dtype)

    def pad(self, x: str, value: str, dtype: DType, pads: Sequence[Dim]) -> str:
        """`x` with `value` around it: `pads` are those in front of each axis, then those behind."""
        wide = wide_dtype("Pad", dtype)
        if wide is dtype:
            return self.one("Pad", x, self.shape(pads), value)
        return self.cast(self.one("Pad", self.cast(x, wide), self.shape(pads), self.cast(value, wide)), dtype)

    # ------------------------------------------------------------ constants

    def constant(self, array: np.ndarray, named: str | None = None) -> str:
        """An initializer; small ones that are equal are one, but for those with a name of their own."""
        small = array.size <= 64 and array.dtype != object
        key: tuple[object, ...] = (named,)
        if named is None:
            key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes()) if small else (id(array),)
        if key not in self.constants:
            name = self.constants[key] = named or self.fresh()
            self.kept.append(array)
            large = array.nbytes >= EXTERNAL_BYTES and array.dtype != object
            out = self.external.add(array, name) if self.external and large else tensor_proto(array, name)
            self.initializers.append(out)
        return self.constants[key]

    def ints(self, *values: int) -> str:
        """The name of a constant, int64 [len(values)]."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float | int, dtype: DType) -> str:
        """The name of a constant of rank 0."""
        return self.constant(np.array(value).astype(dtype.numpy))

    # ------------------------------------------------------------ sizes

    def symbols(self, values: Sequence[Value]) -> None:
        """Reads each symbol from the first of these tensors that has it as a dim, alone or as `a * s + b`."""
        found: list[tuple[Value, int, Symbol, int, int]] = []
        for value in values:
            for axis, dim in enumerate(value.shape if isinstance(value.type, TensorType) else ()):
                line = _line(dim)
                if line is not None:
                    found.append((value, axis, *line))
        for value, axis, symbol, factor, offset in sorted(found, key=lambda f: (f[3], f[4]) != (1, 0)):
            if of(symbol) in self.dims:
                continue
            size = self.one("Shape", self.names[value.id], start=axis, end=axis + 1)
            if offset:
                size = self.one("Sub", size, self.ints(offset))
            self.dims[of(symbol)] = self.one("Div", size, self.ints(factor)) if factor != 1 else size

    def dim(self, d: Dim) -> str:
        """A size as an int64 tensor of shape [1]."""
        if isinstance(d, int):
            return self.ints(d)
        if d not in self.dims:
            self.dims[d] = self._polynomial(d)
        return self.dims[d]

    def _polynomial(self, d: Expr) -> str:
        terms = []
        for mono, coef in d.terms:
            factors = [self._atom(a) for a in mono]
            if coef != 1 or not factors:
                factors.append(self.ints(coef))
            terms.append(self._chain("Mul", factors))
        return self._chain("Add", terms)

    def _chain(self, op_type: str, parts: Sequence[str]) -> str:
        total = parts[0]
        for part in parts[1:]:
            total = self.one(op_type, total, part)
        return total

    def _atom(self, atom: Atom) -> str:
        if of(atom) in self.dims:
            return self.dims[of(atom)]
        if not isinstance(atom, Call):
            raise InternalError(f"the symbol {atom} is a dim of no graph input, so it cannot be written as ONNX")
        a, b = (self.dim(x) for x in atom.args)
        if atom.op == "floordiv":
            if not is_nonnegative(atom.args[0]):  # Div rounds toward zero, Mod has the sign of the divisor
                a = self.one("Sub", a, self.one("Mod", a, b))
            made = self.one("Div", a, b)
        else:
            made = self.one({"mod": "Mod", "max": "Max", "min": "Min"}[atom.op], a, b)
        self.dims[of(atom)] = made
        return made

    def shape(self, dims: Sequence[Dim]) -> str:
        """Sizes as an int64 vector."""
        if all(isinstance(d, int) for d in dims):
            return self.constant(np.array(dims, np.int64))
        return self.one("Concat", *map(self.dim, dims), axis=0) if len(dims) > 1 else self.dim(dims[0])

    def reshape(self, x: str, shape: Sequence[Dim]) -> str:
        """The name of a tensor in another shape."""
        return self.one("Reshape", x, self.shape(shape), allowzero=1)


def _line(d: Dim) -> tuple[Symbol, int, int] | None:
    """`factor * symbol + offset`, where a dim is that."""
    if not isinstance(d, Expr) or not isinstance(d.terms[0][0][0] if d.terms[0][0] else None, Symbol):
        return None
    (mono, factor), *rest = d.terms
    if len(mono) != 1 or factor < 1 or len(rest) > 1 or (rest and rest[0][0]):
        return None
    symbol = mono[0]
    return (symbol, factor, rest[0][1] if rest else 0) if isinstance(symbol, Symbol) else None
