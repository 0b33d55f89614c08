"""ATen ops on complex tensors, which are pairs of real values here.

What moves elements, or is linear, is done to both parts by its rule for real tensors; the rest has rules here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_pointwise import truth
from onnxc.frontends.torch_fx_reduction import Axes
from onnxc.frontends.torch_fx_table import RULES, Call, axes_of, axis_of, static
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.ops import complexes, fourier, numbers
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import PART, Complex, Number, each, join, split

ComplexRule = Callable[..., Any]
F = TypeVar("F", bound=ComplexRule)
COMPLEX: dict[Any, ComplexRule] = {}

_EACH = (
    "view", "reshape", "_unsafe_view", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "permute", "t",
    "transpose.int", "expand", "repeat", "slice.Tensor", "select.int", "slice_scatter", "select_scatter", "cat",
    "stack", "split_with_sizes", "split.Tensor", "unbind.int", "flip", "roll", "diagonal", "diagonal_scatter",
    "unfold", "gather", "index_select", "index.Tensor", "embedding", "neg", "_neg_view", "sum", "sum.dim_IntList",
    "mean", "mean.dim", "cumsum", "tril", "triu", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "index_add", "scatter_add", "scatter.src",
    "index_copy", "put", "masked_scatter", "masked_scatter_backward", "index_put", "_unsafe_index.Tensor",
    "_unsafe_index_put",
)  # fmt: skip


def complex_rule(target: Any) -> ComplexRule:
    """The rule of an overload, of which an argument or the result is complex. UnsupportedError where there is none."""
    found = COMPLEX.get(target)
    if found is not None:
        return found
    if target in _of_parts():
        return _by_parts(RULES[target])
    raise UnsupportedError("there is no rule for it with complex numbers")


def has_complex(arguments: Any, types: Sequence[TensorType | None]) -> bool:
    """Whether a call has to do with complex numbers."""
    leaves = pytree.tree_leaves(arguments)
    return any(isinstance(x, Complex) for x in leaves) or any(t is not None and t.dtype in PART for t in types)


def _overload(name: str) -> Any:
    space = torch.ops.prims if name.startswith("prims.") else torch.ops.aten
    packet, _, overload = name.removeprefix("prims.").partition(".")
    return getattr(getattr(space, packet, None), overload or "default", None)


def _of_parts() -> set[Any]:
    return {_overload(name) for name in _EACH} & set(RULES)


def _is_float(x: Any) -> bool:
    return isinstance(x, Value) and x.dtype.is_float


def _by_parts(rule: ComplexRule) -> ComplexRule:
    """A rule for real tensors as one for both parts."""

    def of_both(c: Call, first: Any, *others: Any, **options: Any) -> Any:
        dtype = _computed_in(c)
        # Real data may be of any type; real tensors of the other arguments are indices, so these are integers.
        args = (pytree.tree_map_only(Value, lambda v: numbers.to_complex(c.b, _number(c, v, dtype)), first), *others)
        leaves = pytree.tree_leaves((args, options))
        if any(map(_is_float, leaves)):
            raise UnsupportedError("real and complex tensors together")
        real = replace(c, types=tuple(None if t is None else part_type(t) for t in c.types))

        def of(part: str) -> Any:
            chosen = pytree.tree_map_only(Complex, lambda z: getattr(z, part), (args, options))
            return rule(real, *chosen[0], **chosen[1])

        re, im = of("re"), of("im")
        if isinstance(re, Value):
            return Complex(re, im)
        return [None if r is None else Complex(r, i) for r, i in zip(re, im, strict=True)]

    return of_both


def part_type(t: TensorType) -> TensorType:
    """The type of the parts of a complex tensor, or of a real one."""
    return TensorType(PART.get(t.dtype, t.dtype), t.shape)


def aten(*names: str) -> Callable[[F], F]:
    """Registers a rule for calls with complex numbers."""

    def add(rule: F) -> F:
        COMPLEX.update({found: rule for name in names if (found := _overload(name)) is not None})
        return rule

    return add


# ---------------------------------------------------------------- arithmetic


def _computed_in(c: Call) -> DType:
    return PART.get(c.type.dtype, c.type.dtype)


def _number(c: Call, x: Any, dtype: DType) -> Number:
    """A tensor or a number, its parts in a dtype."""
    if isinstance(x, Complex):
        return each(lambda v: c.b.cast(v, dtype), x)
    if isinstance(x, complex):
        return Complex(c.b.scalar(x.real, dtype), c.b.scalar(x.imag, dtype))
    return c.operand(x, dtype)


def _binary(f: Callable[[Builder, Number, Number], Number]) -> ComplexRule:
    def rule(c: Call, x: Any, y: Any, *, alpha: Any = 1) -> Number:
        dtype = _computed_in(c)
        x, y = _number(c, x, dtype), _number(c, y, dtype)
        if alpha != 1:
            y = numbers.mul(c.b, y, _number(c, alpha, dtype))
        return _full(c, f(c.b, x, y))

    return rule


def _full(c: Call, x: Number) -> Number:
    """Broadcast to the shape of the result: parts may have shapes of their own."""
    return each(lambda v: c.b.expand(v, c.type.shape), x)


aten("add.Tensor", "add.Scalar")(_binary(numbers.add))
aten("sub.Tensor", "sub.Scalar")(_binary(numbers.sub))
aten("rsub.Scalar", "rsub.Tensor")(_binary(lambda b, x, y: numbers.sub(b, y, x)))
aten("mul.Tensor", "mul.Scalar")(_binary(numbers.mul))
aten("div.Tensor", "div.Scalar")(_binary(numbers.div))
aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")(_binary(complexes.pow))


@aten("mm", "bmm")
def matmul(c: Call, x: Number, y: Number) -> Number:
    return numbers.matmul(c.b, x, y)


@aten("addmm", "baddbmm")
def addmm(c: Call, bias: Number, x: Number, y: Number, *, beta: Any = 1, alpha: Any = 1) -> Number:
    b, dtype = c.b, _computed_in(c)
    found = matmul(c, x, y) if alpha == 1 else numbers.mul(b, matmul(c, x, y), _number(c, alpha, dtype))
    if beta == 0:
        return found
    return _full(c, numbers.add(b, found, bias if beta == 1 else numbers.mul(b, bias, _number(c, beta, dtype))))


@aten("dot", "vdot", "mv")
def matvec(c: Call, x: Number, y: Number) -> Number:
    if ".vdot." in c.name:
        x = numbers.conj(c.b, x)
    row, column = ((1, *x.shape) if x.rank == 1 else x.shape), (*y.shape, 1)
    found = numbers.matmul(c.b, each(lambda v: c.b.reshape(v, row), x), each(lambda v: c.b.reshape(v, column), y))
    return each(lambda v: c.b.reshape(v, c.type.shape), found)


@aten("prod", "prod.dim_int", "prims.prod")
def product(c: Call, x: Number, axes: Axes = None, keepdim: bool = False, **options: Any) -> Number:
    return numbers.product(c.b, _number(c, x, _computed_in(c)), axes_of(c, axes, x.rank), keepdim)


@aten("var.correction", "var.dim", "var_mean.correction")
def variance(c: Call, x: Complex, *rest: Any, **options: Any) -> Any:
    """That of the real parts and that of the imaginary ones together."""
    rule: ComplexRule = RULES[_overload(c.name.removeprefix("aten."))]
    found = [rule(c, v, *rest, **options) for v in (x.re, x.im)]
    if "var_mean" not in c.name:
        return c.b.add(*found)
    return [c.b.add(found[0][0], found[1][0]), Complex(found[0][1], found[1][1])]


@aten("eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar")
def equal(c: Call, x: Number, y: Any) -> Value:
    parts = [PART.get(v.dtype, v.dtype) for v in (x, y) if isinstance(v, Complex) or _is_float(v)]
    dtype = max(parts, key=lambda d: d.bits)
    same = numbers.eq(c.b, _number(c, x, dtype), _number(c, y, dtype))
    return c.b.expand(c.b.not_(same) if ".ne." in c.name else same, c.type.shape)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(c: Call, condition: Value, x: Number, y: Number) -> Number:
    dtype = _computed_in(c)
    return _full(c, numbers.where(c.b, truth(c.b, condition), _number(c, x, dtype), _number(c, y, dtype)))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(c: Call, x: Number, mask: Value, value: Any) -> Number:
    return where(c, mask, _number(c, value, _computed_in(c)), x)


def _unary(f: Callable[[Builder, Any], Number]) -> ComplexRule:
    return lambda c, x: f(c.b, _number(c, x, _computed_in(c)) if isinstance(x, complex) else x)


def _exp2(b: Builder, x: Complex) -> Number:
    return numbers.exp(b, Complex(b.mul(x.re, math.log(2)), b.mul(x.im, math.log(2))))


def _rsqrt(b: Builder, x: Complex) -> Number:
    return complexes.reciprocal(b, numbers.sqrt(b, x))


def _sigmoid(b: Builder, x: Complex) -> Number:
    less = numbers.exp(b, Complex(b.neg(x.re), b.neg(x.im)))
    return complexes.reciprocal(b, Complex(b.add(less.re, 1.0), less.im))


_FUNCTIONS: dict[str, Callable[[Builder, Any], Number]] = {
    "abs": numbers.absolute, "angle": numbers.angle, "sgn": complexes.sign, "reciprocal": complexes.reciprocal,
    "exp2": _exp2, "rsqrt": _rsqrt, "sigmoid": _sigmoid, "isnan": complexes.isnan, "isinf": complexes.isinf,
    "_conj": numbers.conj, "conj_physical": numbers.conj, "_conj_physical": numbers.conj,
}  # fmt: skip
_ELEMENTARY = (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin",
    "acos", "atan", "asinh", "acosh", "atanh",
)  # fmt: skip
_FUNCTIONS |= {name: complexes.FUNCTIONS[name] for name in _ELEMENTARY}
for _name, _f in _FUNCTIONS.items():
    aten(_name)(_unary(_f))


# ---------------------------------------------------------------- made of real tensors, and taken apart


@aten("view_as_real", "view_as_real_copy")
def view_as_real(c: Call, x: Complex) -> Value:
    return join(c.b, x)


@aten("view_as_complex", "view_as_complex_copy")
def view_as_complex(c: Call, x: Value) -> Complex:
    return split(c.b, x)


@aten("complex")
def complex_of(c: Call, re: Value, im: Value) -> Number:
    if re.dtype is not im.dtype:
        raise UnsupportedError(f"a complex number of {re.dtype} and {im.dtype}")
    return _full(c, Complex(re, im))


@aten("polar")
def polar(c: Call, size: Value, angle: Value) -> Number:
    return _full(c, numbers.from_polar(c.b, size, angle))


@aten("real", "imag")
def part(c: Call, x: Complex) -> Value:
    return x.re if ".real." in c.name else x.im


@aten(
    "full", "full_like", "fill.Scalar", "fill.Tensor", "new_full", "scalar_tensor", "zeros", "zeros_like", "ones",
    "ones_like", "empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "new_zeros",
)  # fmt: skip
def full(c: Call, *args: Any, **options: Any) -> Number:
    value: Any = 1 if ".ones" in c.name else 0
    if any(name in c.name for name in ("full", "fill", "scalar_tensor")):
        value = options.get("fill_value", args[-1])
    return _full(c, numbers.to_complex(c.b, _number(c, value, _computed_in(c))))


@aten("_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "copy", "contiguous", "resolve_conj", "resolve_neg")
def convert(c: Call, x: Number, *rest: Any, **options: Any) -> Number:
    """As `torch_fx_pointwise.convert`; a complex tensor as a real one is its real part."""
    shape = x.shape
    source = rest[0] if rest and isinstance(rest[0], (Value, Complex)) else x
    if c.type.dtype not in PART:
        if c.type.dtype is dtypes.boolean and isinstance(source, Complex):
            return c.b.expand(_truth(c, source), shape)
        if not c.type.dtype.is_float:
            raise UnsupportedError(f"complex numbers as {c.type.dtype}")
        source = numbers.real(source)
    else:
        source = numbers.to_complex(c.b, source)
    return each(lambda v: c.b.expand(c.b.cast(v, _computed_in(c)), shape), source)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor", "scatter.value")
def filled(c: Call, x: Complex, axis: int, index: Value, value: Any) -> Any:
    value = numbers.to_complex(c.b, _number(c, value, _computed_in(c)))
    return _by_parts(RULES[_overload(c.name.removeprefix("aten.").replace("_Scalar", "_Tensor"))])(
        c, x, axis, index, value
    )


@aten("constant_pad_nd")
def pad(c: Call, x: Complex, pads: Sequence[Dim], value: Any = 0) -> Number:
    to = complex(value)
    rule: ComplexRule = RULES[torch.ops.aten.constant_pad_nd.default]
    real = replace(c, types=(part_type(c.type),))
    return Complex(rule(real, x.re, pads, to.real), rule(real, x.im, pads, to.imag))


@aten("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def any_or_all(c: Call, x: Complex, *rest: Any) -> Any:
    return RULES[_overload(c.name.removeprefix("aten."))](c, _truth(c, x), *rest)


def _truth(c: Call, x: Complex) -> Value:
    return c.b.or_(truth(c.b, x.re), truth(c.b, x.im))


# ---------------------------------------------------------------- Fourier transforms


def _scaled(c: Call, x: Number, lengths: Sequence[int], normalization: int) -> Number:
    """PyTorch's `fft_norm_mode`: none, by the root of the number of elements, by that number."""
    factor = {0: 1.0, 1: 1 / math.sqrt(math.prod(lengths)), 2: 1 / math.prod(lengths)}[normalization]
    return x if factor == 1.0 else each(lambda v: c.b.mul(v, factor), x)


def _along(c: Call, x: Number, axes: Sequence[int], sign: int) -> tuple[Number, list[int]]:
    """Transforms along axes, and their lengths."""
    lengths = []
    for axis in axes:
        at = axis_of(c, axis, x.rank)
        lengths.append(static(x.shape[at], "the length of a Fourier transform"))
        x = fourier.transform(c.b, x, at, lengths[-1], sign)
    return x, lengths


@aten("_fft_c2c")
def fft_c2c(c: Call, x: Complex, axes: Sequence[int], normalization: int, forward: bool) -> Number:
    found, lengths = _along(c, x, axes, -1 if forward else 1)
    return _scaled(c, found, lengths, normalization)


@aten("_fft_r2c")
def fft_r2c(c: Call, x: Value, axes: Sequence[int], normalization: int, onesided: bool) -> Number:
    *others, last = axes
    at = axis_of(c, last, x.rank)
    length = static(x.shape[at], "the length of a Fourier transform")
    found, lengths = _along(c, fourier.transform(c.b, x, at, length, -1, onesided), others, -1)
    return _scaled(c, found, [*lengths, length], normalization)


@aten("_fft_c2r")
def fft_c2r(c: Call, x: Complex, axes: Sequence[int], normalization: int, last_dim_size: int) -> Number:
    *others, last = axes
    length = static(last_dim_size, "the length of a Fourier transform")
    found, lengths = _along(c, x, others, 1)
    real = fourier.to_real(c.b, found, axis_of(c, last, x.rank), length)
    return _scaled(c, real, [*lengths, length], normalization)
