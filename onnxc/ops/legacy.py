"""Operators as opsets 1 to 6 had them, where later ones changed them.

Broadcasting was one-sided then, and had to be asked for: `axis` says where in the left operand's shape the right
operand's begins; without it the last axes are meant.
"""

from __future__ import annotations

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import always_equal, prod
from onnxc.ir.graph import Value
from onnxc.ops.activation import clip_6, prelu, selu
from onnxc.ops.cast import convert
from onnxc.ops.common import constant_input
from onnxc.ops.math import mean, pow, variadic
from onnxc.ops.matmul import gemm
from onnxc.ops.normalization import batch_normalization_7, instance_normalization
from onnxc.ops.pooling import global_lp_pool, lp_pool
from onnxc.ops.registry import Flag, op
from onnxc.ops.resize import upsample_7
from onnxc.ops.shape import concat, repeat_whole, split_1
from onnxc.ops.slicing import pad_2
from onnxc.primitives.builder import Builder


def placed(b: Builder, x: Value, y: Value, axis: int | None, broadcast: int) -> Value:
    """The right operand with the axes that numpy's broadcasting needs."""
    if not broadcast:
        if x.rank != y.rank:
            raise ShapeError(f"{y.t} is combined with {x.t} without broadcast=1")
        return y
    if y.t.size == 1:
        return b.reshape(y, ())
    at = x.rank - y.rank if axis is None else b.axis(axis, x.rank)
    if at < 0 or at + y.rank > x.rank:
        raise ShapeError(f"{y.t} does not fit into {x.t} from axis {at} on")
    return b.reshape(y, (*y.shape, *(1,) * (x.rank - at - y.rank)))


def _binary(name: str, primitive: str, swapped: bool = False) -> None:
    @op(name, 1, 6)
    def define(b: Builder, x: Value, y: Value, *, axis: int | None = None, broadcast: Flag = 0) -> Value:
        y = placed(b, x, y, axis, broadcast)
        return b.binary(primitive, y, x) if swapped else b.binary(primitive, x, y)


for _name in ("Add", "Sub", "Mul", "Div", "And", "Or", "Xor"):
    _binary(_name, _name.lower())
_binary("Equal", "eq")
_binary("Less", "lt")
_binary("Greater", "lt", swapped=True)


@op("Pow", 1, 6)
def pow_1(b: Builder, x: Value, y: Value, *, axis: int | None = None, broadcast: Flag = 0) -> Value:
    return pow(b, x, placed(b, x, y, axis, broadcast))


for _name, _primitive in (("Max", "max"), ("Min", "min"), ("Sum", "add")):
    variadic(_name, 1, _primitive, 5)
op("Mean", 1, 5)(mean)
op("InstanceNormalization", 1, 5)(instance_normalization)
op("Clip", 1, 5)(clip_6)


@op("PRelu", 1, 6)
def prelu_1(b: Builder, x: Value, slope: Value) -> Value:
    """One slope, or one for each channel."""
    if slope.t.size != 1 and slope.rank == 1:
        return prelu(b, x, b.reshape(slope, (*slope.shape, *(1,) * (x.rank - 2))))
    return prelu(b, x, b.reshape(slope, ()) if slope.t.size == 1 else slope)


@op("Selu", 1, 5)
def selu_1(b: Builder, x: Value, *, alpha: float = 1.6732, gamma: float = 1.0507) -> Value:
    return selu(b, x, alpha=alpha, gamma=gamma)


@op("Gemm", 1, 6)
def gemm_1(
    b: Builder, x: Value, y: Value, c: Value, *, alpha: float = 1.0, beta: float = 1.0, broadcast: Flag = 0,
    transA: Flag = 0, transB: Flag = 0,
) -> Value:  # fmt: skip
    return gemm(b, x, y, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@op("BatchNormalization", 1, 6)
def batch_normalization_1(
    b: Builder, x: Value, scale: Value, bias: Value, mean: Value, var: Value, *, epsilon: float = 1e-5,
    is_test: Flag = 0, momentum: float = 0.9, spatial: Flag = 1, n_outputs: int,
) -> Value | list[Value]:  # fmt: skip
    """With one output in test mode, whatever `is_test` says."""
    return batch_normalization_7(
        b, x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum, spatial=spatial,
        n_outputs=1 if is_test else n_outputs,
    )  # fmt: skip


@op("Cast", 1, 5)
def cast_1(b: Builder, x: Value, *, to: str) -> Value:
    """`to` is the type's name, `FLOAT` say."""
    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    found = dtypes.BY_NAME.get(names.get(to.upper(), to.lower()))
    if found is None:
        raise ModelError(f"Cast to {to!r}, which is no type")
    return convert(b, x, found)


@op("Concat", 1, 3)
def concat_1(b: Builder, *xs: Value, axis: int = 1) -> Value:
    return concat(b, *xs, axis=axis)


@op("Split", 1, 1)
def split_first(
    b: Builder, x: Value, sizes: Value | None = None, *, axis: int = 0, split: list[int] | None = None, n_outputs: int,
) -> list[Value]:  # fmt: skip
    """The sizes as an attribute or as an input."""
    if sizes is not None:
        split = _whole(sizes, "the sizes of Split")
    return split_1(b, x, axis=axis, split=split, n_outputs=n_outputs)


@op("Reshape", 1, 4)
def reshape_1(b: Builder, x: Value, *, shape: list[int]) -> Value:
    """-1 is what is left over, 0 the dim of the input."""
    wanted = [x.shape[i] if d == 0 and i < x.rank else d for i, d in enumerate(shape)]
    free = [i for i, d in enumerate(wanted) if isinstance(d, int) and d < 0]
    if len(free) > 1:
        raise ModelError(f"Reshape to {list(shape)} leaves more than one dim open")
    if free:
        wanted[free[0]] = 1
        others = prod(wanted)
        wanted[free[0]] = 0 if always_equal(others, 0) else x.t.size // others
    return b.reshape(x, wanted)


@op("Pad", 1, 1)
def pad_1(b: Builder, x: Value, *, mode: str = "constant", paddings: list[int], value: float = 0.0) -> Value:
    return pad_2(b, x, pads=paddings, mode=mode, value=value)


@op("Tile", 1, 5)
def tile_1(b: Builder, x: Value, tiles: Value, axis: Value) -> Value:
    """Repeated along one axis."""
    (count,), (at,) = _whole(tiles, "the tiles of Tile"), _whole(axis, "the axis of Tile")
    place = b.axis(at, x.rank)
    return repeat_whole(b, x, [count if i == place else 1 for i in range(x.rank)])


def _whole(value: Value, what: str) -> list[int]:
    """Whole numbers, which the first opset had as floats: in the type of what they say something of."""
    return [int(x) for x in constant_input(value, what).ravel()]


@op("LpPool", 1, 1)
def lp_pool_1(
    b: Builder, x: Value, *, auto_pad: str = "NOTSET", kernel_shape: list[int], p: float = 2.0,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    return lp_pool(b, x, auto_pad=auto_pad, kernel_shape=kernel_shape, p=_order(p), pads=pads, strides=strides)


@op("GlobalLpPool", 1, 1)
def global_lp_pool_1(b: Builder, x: Value, *, p: float = 2.0) -> Value:
    return global_lp_pool(b, x, p=_order(p))


def _order(p: float) -> int:
    if p != int(p):
        raise UnsupportedError(f"a norm of order {p}: only whole ones are supported")
    return int(p)


@op("Upsample", 1, 6)
def upsample_1(
    b: Builder, x: Value, *, height_scale: float, mode: str = "nearest", width_scale: float,
) -> Value:  # fmt: skip
    return upsample_7(b, x, mode=mode, scales=[1.0, 1.0, height_scale, width_scale])
