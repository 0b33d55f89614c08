"""The table of ATen overloads: each is a function that builds its meaning out of primitives.

    @aten("leaky_relu")
    def leaky_relu(c: Call, x: Value, slope: float = 0.01) -> Value:
        return c.b.where(c.b.lt(x, 0.0), c.b.mul(x, slope), x)

A rule gets the arguments of the FX node as PyTorch's schema orders and names them: tensors as values, SymInts as sizes
(ints or expressions), the rest as it is. Its results are converted to the dtypes that PyTorch gives the node's outputs,
so a rule has to care only about the dtype in which it computes. What it cannot build is an UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar
from zlib import crc32

import sympy
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxc.errors import UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Expr
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.ops.registry import apply, find
from onnxc.primitives.builder import Builder

Operand = Value | float | int | bool | Expr
Result = Value | Sequence[Value | None]
Rule = Callable[..., Result]
F = TypeVar("F", bound=Rule)
RULES: dict[Any, Rule] = {}
NAMED: dict[str, Rule] = {}  # of other libraries' operators, which are there once these are imported
_OPSET = 23  # of the ONNX operators that rules are made of


def aten(*names: str) -> Callable[[F], F]:
    """Registers the decorated function for overloads of ``torch.ops.aten``: ``add.Tensor``; ``relu`` is
    ``relu.default``, and ``prims.iota`` that of ``torch.ops.prims``. A name that the installed PyTorch lacks is left
    out.
    """

    def add(rule: F) -> F:
        for name in names:
            space = torch.ops.prims if name.startswith("prims.") else torch.ops.aten
            packet, _, overload = name.removeprefix("prims.").partition(".")
            found = getattr(getattr(space, packet, None), overload or "default", None)
            if found is not None:
                RULES[found] = rule
        return rule

    return add


def named(name: str) -> Callable[[F], F]:
    """Registers the decorated function for an overload of another library's, as PyTorch names it."""

    def add(rule: F) -> F:
        NAMED[name] = rule
        return rule

    return add


def alone(rule: F) -> F:
    """A rule for models alone: where PyTorch is there, it computes the node, as it refuses data that have no answer (a
    matrix without an inverse), for which the rule gives infinities or NaN, or as its own way looks at data and is the
    quicker one.
    """

    @wraps(rule)
    def checked(c: Call, *args: Any, **options: Any) -> Result:
        if c.b.run_time is None:
            raise UnsupportedError("there is no rule for it that looks at the data, as PyTorch does")
        return rule(c, *args, **options)

    return checked  # type: ignore[return-value]


@dataclass
class Call:
    """One node that is being imported.

    Attributes:
        b: where to build.
        types: those that PyTorch gives the outputs; None for what is no tensor.
        name: of the overload, `aten.add.Tensor`.
        tensors: PyTorch's own (fake) tensors of the positional arguments; None for what is no tensor.
        sole: whether nothing else reads the first argument.
        region: what a graph that is an argument (a branch) returns: of it, a builder, and operands.
    """

    b: Builder
    types: tuple[TensorType | None, ...]
    name: str = ""
    tensors: tuple[torch.Tensor | None, ...] = ()
    sole: bool = False
    region: Callable[[Any, Builder, Sequence[Any]], list[Value]] | None = None

    @property
    def type(self) -> TensorType:
        """The type of the first output."""
        first = self.types[0]
        if first is None:
            raise UnsupportedError("its output is no tensor")
        return first

    def order(self, argument: int) -> tuple[int, ...]:
        """The axes of an argument from the slowest to the fastest in memory, where it is all of its storage."""
        x = self.tensors[argument]
        order = None if x is None else memory_order(x)
        if x is None or order is None or not _is_all_of_memory(x, order):
            raise UnsupportedError("addresses in memory of which a tensor is only a part")
        return order

    def operand(self, x: Operand, dtype: DType) -> Value:
        """A tensor, a number or a size in this dtype."""
        if isinstance(x, Value):
            return self.b.cast(x, dtype)
        if isinstance(x, Expr):
            return self.b.size_as(x, dtype)
        return self.b.scalar(x, dtype)

    def promoted(self, *xs: Operand, kind: Promotion = Promotion.DEFAULT) -> list[Value]:
        """The operands in the dtype in which PyTorch computes with them: float32 where they are halves."""
        dtype = computed_in(kind, *xs)
        return [self.operand(x, dtype) for x in xs]

    def floats(self, *xs: Operand) -> list[Value]:
        """As `promoted`, integers as floats."""
        return self.promoted(*xs, kind=Promotion.INT_TO_FLOAT)

    def onnx(self, name: str, *inputs: Value | None, outputs: int = 1, **attributes: Any) -> list[Any]:
        """The outputs of an ONNX operator."""
        definition = find("", name, _OPSET)
        assert definition is not None, name
        return apply(definition, self.b, inputs, attributes, _OPSET, outputs)


def computed_in(kind: Promotion, *xs: Operand) -> DType:
    """PyTorch's rule of promotion: a tensor of rank 0 counts less than others, and a number less than that."""
    specimens = [
        _specimen(x.dtype, x.rank > 0) if isinstance(x, Value) else 1 if isinstance(x, Expr) else x for x in xs
    ]
    return dtype_of(elementwise_dtypes(*specimens, type_promotion_kind=kind)[0])


@cache
def _specimen(dtype: DType, ranked: bool) -> torch.Tensor:
    with unset_fake_temporarily():  # it outlives the trace in which it is first wanted
        return torch.empty((1,) if ranked else (), dtype=_TORCH[dtype], device="meta")


@cache
def saturates(dtype: DType) -> bool:
    """Whether PyTorch has a type's greatest number for all that is too large: its versions differ in float8_e4m3fn."""
    if not dtype.is_float or dtype.bits > 8:
        return False
    with unset_fake_temporarily():
        return bool(torch.full((1,), torch.inf).to(_TORCH[dtype]).float().isfinite())


_TORCH: dict[DType, torch.dtype] = {}
_DTYPES: dict[torch.dtype, DType] = {}
_KINDS = ("float", "int", "uint", "bool", "complex")
for _dtype in dtypes.ALL:
    _name = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}.get(_dtype.name, _dtype.name)
    _found = getattr(torch, _name, None)
    if (
        isinstance(_found, torch.dtype)
        and _dtype.kind in ("float", "int", "uint", "bool", "complex")
        and _dtype.bits >= 8
    ):
        _TORCH[_dtype], _DTYPES[_found] = _found, _dtype


def dtype_of(dtype: torch.dtype) -> DType:
    """The element type that a tensor of this dtype has here. UnsupportedError for quantized ones, say."""
    if dtype not in _DTYPES:
        raise UnsupportedError(f"tensors of {dtype} are not supported")
    return _DTYPES[dtype]


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the slowest to the fastest of a tensor without gaps; None where it has gaps, or repeats itself."""
    numbers = [n for n in (*value.shape, *value.stride()) if isinstance(n, torch.SymInt)]
    if all(n.node.has_hint() for n in numbers):
        if value.is_contiguous():
            return tuple(range(value.dim()))
        strides, sizes = ([_hint(n) for n in of] for of in (value.stride(), value.shape))
    else:  # PyTorch would not answer for sizes that data decides
        strides, sizes = ([_example(n) for n in of] for of in (value.stride(), value.shape))
    order = sorted(range(len(strides)), key=lambda i: -strides[i])
    dense = 1
    for i in reversed(order):
        if sizes[i] != 1 and strides[i] != dense:
            return None
        dense *= sizes[i]
    return tuple(order)


def _is_all_of_memory(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is its storage, with its axes in this order, whatever the sizes are."""
    dense: Any = sympy.Integer(1)
    for axis in reversed(order):
        size, stride = (_expression(n) for n in (x.shape[axis], x.stride()[axis]))
        if size != 1 and sympy.expand(stride - dense) != 0:
            return False
        dense = dense * size
    storage = _expression(x.untyped_storage().nbytes())
    return bool(_expression(x.storage_offset()) == 0 and sympy.expand(storage - dense * x.element_size()) == 0)


def _expression(n: int | torch.SymInt) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n)


def _hint(n: int | torch.SymInt) -> int:
    return int(n.node.hint) if isinstance(n, torch.SymInt) else n


def _example(n: int | torch.SymInt) -> int:
    """A size for some values of its symbols that are no size's by chance."""
    if not isinstance(n, torch.SymInt):
        return n
    chosen = {s: sympy.Integer(10007 + 2 * (crc32(str(s).encode()) % 8191)) for s in n.node.expr.free_symbols}
    return int(n.node.expr.xreplace(chosen))


def axis_of(c: Call, axis: int, rank: int) -> int:
    """A possibly negative axis. A scalar has one for PyTorch, which is no axis here."""
    return c.b.axis(axis, max(rank, 1))


def axes_of(c: Call, axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Axes as PyTorch gives them: none or an empty list mean all."""
    if axes is None or (not isinstance(axes, int) and not axes):
        return tuple(range(rank))
    given = [axes] if isinstance(axes, int) else axes
    return tuple(sorted({a for a in (axis_of(c, a, rank) for a in given) if a < rank}))


def static(d: Dim, what: str) -> int:
    """A size that must be known at compile time."""
    if not isinstance(d, int):
        raise UnsupportedError(f"{what} must be static, but is {d}")
    return d
