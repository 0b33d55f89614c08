"""Products of dequantized tensors become integer products: what is added up is then exact.

    matmul((a - za) * sa, (b - zb) * sb)  =  (matmul(a, b) - za * colsum(b) - ...) * (sa * sb)

Found by what is computed, not by names: so DequantizeLinear, MatMulInteger, ConvInteger, the QLinear operators and
what users cast to int32 themselves all come to the same `wide` primitives. Weights have their zero point taken off at
compile time; a zero point of the left operand becomes one constant for each column, and pads convolutions. Where
neither operand is constant, constant zero points are the kernel's to take off, others are taken off in int16.

What is dequantized, moved about, and quantized again by the same scale and zero point is the integers, moved about:
quantizers put such pairs around every operator that only moves elements.

Before: a graph of primitives whose constants are not folded yet. After: the same values; float ones with the
rounding errors of one product instead of a sum's (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ops.common import limits
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.contraction import NARROW

LIMIT = 1 << 31  # sums of floats must not wrap
LARGE = 2.0**50  # neither what has such a scale nor a product of two such scales is infinite
MOVING = ("reshape", "transpose", "slice", "expand")  # each element of the result is one of the operand


@dataclass(frozen=True)
class Quantized:
    """(whole - zero) * scale. Zero (int32) and scale (float32) broadcast to the tensor, and may be absent.

    `array` is the content of `whole` where it is constant, with views applied; `whole` is not then looked at.
    """

    whole: Value
    array: np.ndarray | None
    zero: Value | None
    scale: Value | None

    @property
    def dtype(self) -> DType:
        """Of the tensor as it is stored."""
        return self.whole.dtype  # type: ignore[no-any-return]


def integer_products(graph: Graph) -> Graph:
    """The graph with `wide` contractions for those of dequantized, or widened, integers."""
    return _Pass(graph).run()


class _Pass:
    def __init__(self, graph: Graph) -> None:
        self.r = Rewriter(graph)
        self.b = Builder()
        self.b.nodes = self.r.nodes

    def run(self) -> Graph:
        for node in self.r.graph.nodes:
            if node.regions:
                regions = [integer_products(g) for g in node.regions]
                node = Node(node.op, node.inputs, node.outputs, node.attrs, regions, node.origin)
            with self.b.from_origin(node.origin):
                result = self._product(node) or self._rounding(node)
            if result is None:
                self.r.keep(node)
            else:
                self.r.replace(node.output, result)
        return self.r.result()

    # ------------------------------------------------------------ finding

    def _product(self, node: Node) -> Value | None:
        if node.op not in ("matmul", "conv") or node.attrs.get("wide"):
            return None
        if node.output.dtype not in (dtypes.float32, dtypes.int32):
            return None
        x, y = (self._quantized(v) for v in node.operands[:2])
        if x is None or y is None or not (_is_moderate(x.scale) and _is_moderate(y.scale)):
            return None
        acc = self._matmul(node, x, y) if node.op == "matmul" else self._conv(node, x, y)
        if acc is None or x.scale is None or y.scale is None:
            return acc
        scale = y.scale if node.op == "matmul" or not y.scale.shape else self._along_channels(y.scale, node.output.rank)
        return self.b.mul(self.b.cast(acc, dtypes.float32), self.b.mul(x.scale, scale))

    def _quantized(self, v: Value) -> Quantized | None:
        """A tensor as (whole - zero) * scale, seen through views; float32 has a scale, int32 has none."""
        v = self._current(v)
        node = v.node
        if node is None:
            return None
        if node.op in ("transpose", "reshape"):
            inner = self._quantized(node.operands[0])
            return None if inner is None else self._viewed(inner, node)
        if v.dtype is dtypes.int32:
            return self._centered(v)
        if node.op != "mul" or v.dtype is not dtypes.float32:
            return None
        for whole, scale in (node.operands, node.operands[::-1]):
            cast = whole.node
            if cast is None or cast.op != "cast" or whole.t.size != v.t.size or whole.rank != v.rank:
                continue
            inner = self._centered(self._current(cast.operands[0]))
            if inner is not None:
                return replace(inner, scale=scale)
        return None

    def _current(self, v: Value) -> Value:
        found = self.r.value(v)
        assert found is not None
        return found

    def _centered(self, v: Value) -> Quantized | None:
        """int32 as whole - zero."""
        if v.dtype is not dtypes.int32 or v.node is None:
            return None
        constant = constant_of(v)
        if constant is not None:
            return Quantized(v, constant, None, None) if _fits(constant, np.int16) else None
        node = v.node
        zero = None
        if node.op == "sub":
            first, zero = node.operands
            if first.t.size != v.t.size or first.rank != v.rank or first.node is None:
                return None
            node = first.node
        if node.op != "cast" or node.operands[0].dtype.bits > 8 or not node.operands[0].dtype.is_integer:
            return None
        whole = node.operands[0]
        array = constant_of(whole)
        if array is None and whole.dtype not in NARROW:
            return None
        if zero is not None and not _is_narrow(zero):
            return None
        return Quantized(whole, array, zero, None)

    def _viewed(self, x: Quantized, node: Node) -> Quantized | None:
        """The same behind a transpose, or behind a reshape where there is one zero point and one scale."""
        b = self.b
        extras = [v for v in (x.zero, x.scale) if v is not None]
        if node.op == "reshape":
            if any(v.t.size != 1 for v in extras) or (x.array is not None and not node.output.t.is_static):
                return None
            zero, scale = (None if v is None else b.reshape(v, ()) for v in (x.zero, x.scale))
            if x.array is not None:
                return Quantized(x.whole, x.array.reshape(node.attrs["shape"]), zero, scale)
            return Quantized(b.reshape(x.whole, node.attrs["shape"]), None, zero, scale)
        perm = node.attrs["perm"]

        def turn(v: Value | None) -> Value | None:
            if v is None or v.t.size == 1:
                return None if v is None else b.reshape(v, ())
            return b.transpose(b.reshape(v, (1,) * (len(perm) - v.rank) + v.shape), perm)

        if x.array is not None:
            return Quantized(x.whole, x.array.transpose(perm), turn(x.zero), turn(x.scale))
        return Quantized(b.transpose(x.whole, perm), None, turn(x.zero), turn(x.scale))

    # ------------------------------------------------------------ rounding

    def _rounding(self, node: Node) -> Value | None:
        """cast(clip(round(x / scale) + zero)) as one primitive, which needs a fraction of the instructions."""
        if node.op != "cast" or not node.output.dtype.is_integer or node.output.dtype.bits > 16:
            return None
        x, numbers = self._current(node.operands[0]), {}
        for op, key in (("min", "high"), ("max", "low"), ("add", "zero")):
            found = _with_scalar(x, op) or (_at_least(x) if op == "max" else None)
            if found is None and key != "zero":
                return None
            if found is not None:
                x, numbers[key] = self._current(found[0]), found[1]
        if x.node is None or x.node.op != "round" or not all(n.is_integer() for n in numbers.values()):
            return None
        x = self._current(x.node.operands[0])
        ratio = _with_scalar(x, "div")
        x, scale = (self._current(ratio[0]), ratio[1]) if ratio is not None and 0 < ratio[1] < np.inf else (x, 1.0)
        low, high, zero = (int(numbers.get(k, 0)) for k in ("low", "high", "zero"))
        to = node.output.dtype
        if not (limits(to)[0] <= low <= high <= limits(to)[1]) or abs(zero) > 1 << 16:
            return None
        same = self._again(x, scale, zero, to) if (low, high) == limits(to) else None
        return same or self.b.cast(self.b.one("quantize", x, scale=scale, zero=zero, low=low, high=high), to)

    def _again(self, x: Value, scale: float, zero: int, to: DType) -> Value | None:
        """The integers that x was made of by this scale and zero point, moved as x was: no other numbers come of them.

        (q - zero) * scale / scale is off by less than 2**-14 where nothing overflows or is subnormal.
        """
        moves: list[Node] = []
        while x.node is not None and x.node.op in MOVING:
            moves.append(x.node)
            x = self._current(x.node.operands[0])
        found = self._quantized(x)
        if found is None or found.array is not None or found.dtype is not to or not 1 / LARGE <= scale <= LARGE:
            return None
        if _number(found.scale) != scale or (0 if found.zero is None else _number(found.zero)) != zero:
            return None
        whole = found.whole
        for node in reversed(moves):
            whole = self.b.one(node.op, whole, **node.attrs)
        return whole

    # ------------------------------------------------------------ building

    def _matmul(self, node: Node, x: Quantized, y: Quantized) -> Value | None:
        b, depth = self.b, node.operands[0].shape[-1]
        if not _constant_along(x, 1) or not _constant_along(y, 2):
            return None
        if x.scale is not None and not self._holds(x, y, depth):
            return None
        weights = _without_zero(y)
        if weights is None or x.array is not None:
            zeros = [_zero_at_run_time(v) for v in (x, y)]
            if None not in zeros:
                return b.one("matmul", x.whole, y.whole, wide=True, **({"zeros": tuple(zeros)} if any(zeros) else {}))
            left, right = self._narrow(x), self._narrow(y)
            return None if left is None or right is None else b.one("matmul", left, right, wide=True)
        acc = b.one("matmul", x.whole, b.constant(weights), wide=True)
        if x.zero is None:
            return acc
        sums = weights.astype(np.int64).sum(-2, keepdims=True)
        return b.sub(acc, b.mul(x.zero, b.constant(_wrapped(sums))))

    def _conv(self, node: Node, x: Quantized, y: Quantized) -> Value | None:
        b, a = self.b, node.attrs
        weights = _without_zero(y)
        single = all(v is None or v.t.size == 1 for v in (x.zero, x.scale))
        if weights is None or not weights.size or not single or x.array is not None or node.output.rank not in (3, 4):
            return None
        if any(v is not None and v.t.size != 1 and not _is_channel_vector(v, weights) for v in (y.zero, y.scale)):
            return None
        if x.scale is not None and not self._holds(x, y, int(np.prod(weights.shape[1:]))):
            return None
        fill: list[Value] = []
        if x.zero is not None:
            found = self._as_fill(x)
            if found is None:
                return None
            fill = [found]
        acc = b.one("conv", x.whole, b.constant(weights), *fill, wide=True, **a)
        if x.zero is None:
            return acc
        sums = _wrapped(weights.astype(np.int64).sum(tuple(range(1, weights.ndim))))
        shape = (1, len(sums), *(1,) * (weights.ndim - 2))
        return b.sub(acc, b.mul(b.reshape(x.zero, ()), b.constant(sums.reshape(shape))))

    def _as_fill(self, x: Quantized) -> Value | None:
        """The zero point as a scalar of the tensor's own dtype."""
        b, zero = self.b, x.zero
        assert zero is not None
        constant = constant_of(zero)
        if constant is not None:
            fits = _fits(constant, x.dtype.numpy)
            return b.constant(constant.reshape(()).astype(x.dtype.numpy)) if fits else None
        if zero.node is not None and zero.node.op == "cast" and zero.node.operands[0].dtype is x.dtype:
            return b.reshape(zero.node.operands[0], ())
        return None

    def _narrow(self, x: Quantized) -> Value | None:
        """A tensor less its zero point, in as few bits as hold it."""
        b = self.b
        if x.array is not None:
            array = _without_zero(x)
            return None if array is None else b.constant(array)
        if x.zero is None:
            return x.whole
        return b.sub(b.cast(x.whole, dtypes.int16), b.cast(x.zero, dtypes.int16))

    def _along_channels(self, v: Value, rank: int) -> Value:
        """A number for each output channel, first axis of the weights, laid along the result's."""
        return v if v.t.size == 1 else self.b.reshape(v, (1, v.t.size, *(1,) * (rank - 2)))

    def _holds(self, x: Quantized, y: Quantized, depth: object) -> bool:
        """True where no sum of so many products can leave int32."""
        return isinstance(depth, int) and depth * _greatest(x) * _greatest(y) < LIMIT


# ---------------------------------------------------------------- what is known of a tensor


def _number(v: Value | None) -> float | None:
    """The one element of a constant."""
    constant = constant_of(v)
    return None if constant is None or constant.size != 1 else float(constant.reshape(()))


def _with_scalar(v: Value, op: str) -> tuple[Value, float] | None:
    """x and c where v is `op(x, c)` in float32, c a constant that broadcasts to x."""
    node = v.node
    if node is None or node.op != op or v.dtype is not dtypes.float32:
        return None
    constant = constant_of(node.operands[1])
    if constant is None or constant.size != 1 or constant.ndim > node.operands[0].rank:
        return None
    return node.operands[0], float(constant.reshape(()))


def _at_least(v: Value) -> tuple[Value, float] | None:
    """x and c where v is `where(c < x, x, c)`: the maximum, but c where x is NaN."""
    if v.node is None or v.node.op != "where":
        return None
    less, x, low = v.node.operands
    constant = constant_of(low)
    if constant is None or constant.shape or less.node is None or less.node.op != "lt":
        return None
    bound, other = less.node.operands
    given = constant_of(bound)
    same = given is not None and np.array_equal(given, constant)
    return (x, float(constant)) if other is x and same and v.dtype is dtypes.float32 else None


def _is_moderate(scale: Value | None) -> bool:
    """False for a constant scale that is infinite, NaN, or so large that what it scales may be."""
    constant = None if scale is None else constant_of(scale)
    return constant is None or bool((np.abs(constant) < LARGE).all())


def _fits(array: np.ndarray, to: object) -> bool:
    info = np.iinfo(to)  # type: ignore[call-overload]
    return not array.size or bool(info.min <= array.min() and array.max() <= info.max)


def _wrapped(sums: np.ndarray) -> np.ndarray:
    """int64 modulo 2^32, as int32."""
    return (sums & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def _is_narrow(zero: Value) -> bool:
    """True for an int32 zero point of an 8 bit type: the difference then fits into int16."""
    constant = constant_of(zero)
    if constant is not None:
        return _fits(constant, np.int16) and bool((np.abs(constant.astype(np.int64)) <= 255).all())
    node = zero.node
    while node is not None and node.op in ("reshape", "transpose", "expand"):
        node = node.operands[0].node
    return node is not None and node.op == "cast" and node.operands[0].dtype in (dtypes.uint8, dtypes.int8)


def _without_zero(x: Quantized) -> np.ndarray | None:
    """A constant less its zero point, as int8, else int16; None where it is not constant or does not fit."""
    zero = None if x.zero is None else constant_of(x.zero)
    if x.array is None or (x.zero is not None and zero is None):
        return None
    whole = x.array.astype(np.int32)
    whole = whole if zero is None else whole - zero
    for dtype in (np.int8, np.int16):
        if whole.shape == x.array.shape and _fits(whole, dtype):
            return np.ascontiguousarray(whole.astype(dtype))
    return None


def _zero_at_run_time(x: Quantized) -> int | None:
    """The one zero point of bytes that are not constant, 0 where there is none; None for anything else."""
    zero = 0.0 if x.zero is None else _number(x.zero)
    return None if x.array is not None or x.dtype.bits != 8 or zero is None else int(zero)


def _greatest(x: Quantized) -> int:
    """A bound of |whole - zero|."""
    array = _without_zero(x)
    if array is not None:
        return int(np.abs(array.astype(np.int32)).max(initial=0))
    zero = 0 if x.zero is None else constant_of(x.zero)
    if x.array is not None or zero is None:
        return 510  # zero points are of 8 bits, and so is what they are taken from
    low, high = x.dtype.limits
    return int(max(np.abs(np.asarray(zero, np.int64) - low).max(), np.abs(np.asarray(zero, np.int64) - high).max()))


def _constant_along(x: Quantized, axis: int) -> bool:
    """True where zero point and scale do not change along an axis, counted from the last (1)."""
    return all(v is None or v.rank < axis or v.shape[-axis] == 1 for v in (x.zero, x.scale))


def _is_channel_vector(v: Value, weights: np.ndarray) -> bool:
    """True for one number for each output channel: [CO, 1, ...]."""
    shape: Sequence[object] = v.shape
    return v.rank == weights.ndim and shape[0] == weights.shape[0] and all(d == 1 for d in shape[1:])
