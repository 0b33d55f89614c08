"""Weights that are stored as small integers stay so: a matmul whose constant operand is (q - zero) * scale becomes
`matmul_quantized`, which reads q packed.

It does not matter how the model spells that (DequantizeLinear, MatMulNBits, shifts and masks, with reshapes,
transposes and slices after it): the parts of the expression are evaluated, and the block that shares a scale is read
off the scales themselves. So are float16 and bfloat16 weights behind a Cast: q is then the numbers as they are.

    w = DequantizeLinear <axis = 0> (int8 q [K, N], scale [N])      matmul_quantized(x, q, scale [1, N])
    y = MatMul(x, w)                                                    {bits=8, block=K}
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onnxc.errors import OnnxcError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Graph, Node, Value, merge_origins
from onnxc.ir.types import TensorType
from onnxc.ops.resize import repeat_each
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.base import lookup
from onnxc.primitives.builder import Builder, constant_of

MOVES = frozenset({"reshape", "transpose", "slice"})
BITS = (2, 4, 8)
MAX_CODE = 1 << 11  # float16 holds integers up to this, and differences of floats are exact up to ...
MAX_ZERO = 1 << 22  # ... this
HALVES = (dtypes.float16, dtypes.bfloat16)
MIN_BLOCK = 8  # rows of K that share a scale: with fewer, scales are as large as the weights
PANEL = 64  # columns that packing rounds up to, at most
GROWTH = 4  # a code takes a byte here: so much larger than 2 bits each may the codes be than what they are made from
GPU_ROWS = 64  # of a product, above which its arithmetic takes longer than to read its weights
GPU_BLOCK = 16  # what blocks are multiples of there: matrix units add up so many products at a time
MAX_NODES = 64  # in the expression of a matrix


@dataclass(frozen=True)
class Affine:
    """(codes - zero) * scale; zero and scale broadcast to the codes, and have one element where all agree."""

    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray

    @property
    def is_halves(self) -> bool:
        """Whether the codes are float16 or bfloat16, and no integers."""
        return self.codes.dtype.itemsize == 2 and dtypes.from_numpy(self.codes.dtype) in HALVES

    def moved(self, node: Node) -> Affine:
        """After a node that moves elements."""
        move = lookup(node.op).evaluate
        assert move is not None

        def apply(x: np.ndarray) -> np.ndarray:
            if x.size == 1 and x is not self.codes:
                return x.reshape(())
            return np.asarray(move(np.broadcast_to(x, self.codes.shape), **node.attrs))

        return Affine(apply(self.codes), apply(self.zero), apply(self.scale))


def keep_weights_packed(graph: Graph, gpu: bool = False) -> Graph:
    """Replaces matmuls by constants that are computed from small integers (or halves) by `matmul_quantized`.

    On a GPU those of many rows stay, as they take no longer than their arithmetic; halves are multiplied as halves, and
    halves by constant halves are no packed product.

    Rows that are gathered from such a constant are computed after they have been gathered.
    """
    r = Rewriter(graph)
    for node in graph.nodes:
        table = _match_table(node)
        if table is not None:
            indices = r.value(node.operands[1])
            assert indices is not None
            b = Builder()
            b.origin = node.origin
            r.replace(node.output, _gathered(b, *table, indices))
            r.nodes += b.nodes
            continue
        found = _match(node)
        if found is None or (gpu and not _is_for_gpu(node, found[1])):
            r.keep(node)
            continue
        operands, attrs, origin_nodes = found
        multiplied = node.output.dtype if gpu else dtypes.float32
        x = _cast(r, node, r.value(node.operands[0]), multiplied)
        values = [x]
        for array in operands:
            t = TensorType(dtypes.from_numpy(array.dtype), array.shape)
            values.append(Value(t))
            r.nodes.append(Node("constant", (), [values[-1]], {"value": array}, (), node.origin))
        out = Value(node.output.t.with_dtype(multiplied))
        origin = merge_origins([*(n.origin for n in origin_nodes), node.origin])
        r.nodes.append(Node("matmul_quantized", values, [out], attrs, (), origin))
        r.replace(node.output, _cast(r, node, out, node.output.dtype))
    return r.result()


def _is_for_gpu(node: Node, attrs: dict[str, int]) -> bool:
    """Whether a GPU has a kernel that reads less where the weights of a product are packed."""
    rows, depth = prod(node.output.shape[:-1]), node.operands[0].shape[-1]
    if isinstance(rows, int) and rows > GPU_ROWS:
        return False
    if attrs["bits"] == 16:
        return node.output.dtype is dtypes.float32
    return attrs["block"] % GPU_BLOCK == 0 or (isinstance(depth, int) and attrs["block"] >= depth)


def _cast(r: Rewriter, node: Node, value: Value | None, to: DType) -> Value:
    assert value is not None
    if value.dtype is to:
        return value
    out = Value(value.t.with_dtype(to))
    r.nodes.append(Node("cast", [value], [out], {"to": to}, (), node.origin))
    return out


def _match(node: Node) -> tuple[list[np.ndarray], dict[str, int], list[Node]] | None:
    """Constant operands, attributes, and the nodes that made the weights."""
    if node.op != "matmul" or node.output.dtype not in (dtypes.float32, *HALVES):
        return None
    weights = node.operands[1]
    made, affine = _expression(weights), _matrix(weights)
    if made is None or affine is None:
        return None
    operands = _halves(affine) if affine.is_halves else _canonical(affine)
    return None if operands is None or not _smaller(affine.codes.shape[1], operands[1]["bits"]) else (*operands, made)


def _matrix(value: Value) -> Affine | None:
    """A constant matrix that is computed from codes."""
    if value.rank != 2 or not value.t.is_static or _expression(value) is None:
        return None
    affine = _affine(value)
    return affine if affine is not None and affine.codes.size and affine.codes.shape == value.shape else None


def _match_table(node: Node) -> tuple[list[np.ndarray], dict[str, int]] | None:
    """The table whose rows are gathered, by columns: not one that is there as it is."""
    if node.op != "gather" or node.attrs["axis"] != 0 or node.output.dtype is not dtypes.float32:
        return None
    table, indices = node.operands
    if constant_of(indices) is not None or constant_of(table) is not None:
        return None
    a = _matrix(table)
    if a is None:
        return None
    columns = Affine(*(np.broadcast_to(x, a.codes.shape).T for x in (a.codes, a.zero, a.scale)))
    return _halves(columns) if a.is_halves else _canonical(columns)


def _gathered(b: Builder, operands: list[np.ndarray], attrs: dict[str, int], indices: Value) -> Value:
    """Rows of a table, as floats. Two codes of four bits are one byte of it."""
    codes, scale, *zero = (np.ascontiguousarray(x.T) for x in operands)
    width, pairs = codes.shape[1], attrs["bits"] <= 4 and codes.shape[1] % 2 == 0
    if pairs:
        unsigned = (codes + 8).view(np.uint8)
        codes = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    rows = b.gather(b.constant(codes), indices, 0)
    lead = rows.shape[:-1]
    if pairs:
        halves = [b.binary("bitand", rows, 15), b.binary("shr", rows, 4)]
        rows = b.reshape(b.concat([b.reshape(h, (*h.shape, 1)) for h in halves], rows.rank), (*lead, width))
    whole = b.cast(rows, dtypes.float32)
    whole = b.sub(whole, 8.0) if pairs else whole
    if attrs["bits"] == 16:
        return whole

    def spread(array: np.ndarray) -> Value:
        each = b.gather(b.constant(array), indices, 0)
        return b.slice(repeat_each(b, each, each.rank - 1, attrs["block"]), each.rank - 1, 0, width)

    return b.mul(b.sub(whole, spread(zero[0])) if zero else whole, spread(scale))


def _expression(value: Value) -> list[Node] | None:
    """The nodes of a constant expression, none of them much larger than its constants; None if it is none."""
    found: dict[int, Node] = {}
    stack = [value.node]
    known = largest = 0
    while stack:
        node = stack.pop()
        if node is None or len(found) > MAX_NODES:
            return None
        if id(node) not in found:
            found[id(node)] = node
            stack += [v.node for v in node.operands]
            array = constant_of(node.outputs[0])
            known += array.nbytes if array is not None else 0
            sizes = [v.t.size for v in node.outputs]
            if not all(isinstance(size, int) for size in sizes):
                return None
            largest = max(largest, *(size for size in sizes if isinstance(size, int)))
    return list(found.values()) if 0 < largest <= GROWTH * known else None


class _Constants:
    """Arrays of constant expressions, each evaluated once."""

    def __init__(self) -> None:
        self.known: dict[int, np.ndarray | None] = {}

    def of(self, value: Value) -> np.ndarray | None:
        """None where an evaluation fails: the run reports that."""
        if value.id not in self.known:
            array = constant_of(value)
            self.known[value.id] = self._evaluated(value) if array is None else array
        return self.known[value.id]

    def _evaluated(self, value: Value) -> np.ndarray | None:
        node = value.node
        assert node is not None
        evaluate = lookup(node.op).evaluate
        operands = [self.of(v) for v in node.operands]
        if evaluate is None or len(node.outputs) != 1 or any(a is None for a in operands):
            return None
        try:
            with np.errstate(all="ignore"):
                return np.asarray(evaluate(*operands, **node.attrs), value.dtype.numpy)
        except (OnnxcError, IndexError):
            return None


def _affine(value: Value) -> Affine | None:
    """A constant expression as codes, zero points and scales; those of halves would be rounded, and are not here."""
    node = value.node
    if node is None:
        return None
    if node.op == "constant" and value.dtype in HALVES:
        return Affine(node.attrs["value"], np.zeros((), np.float32), np.ones((), np.float32))
    if node.op in MOVES:
        inner = _affine(node.operands[0])
        return None if inner is None else inner.moved(node)
    if node.op == "cast" and node.operands[0].dtype in HALVES:
        halves = _Constants().of(node.operands[0])
        return None if halves is None else Affine(halves, np.zeros((), np.float32), np.ones((), np.float32))
    if node.op == "cast" and value.dtype in HALVES and node.operands[0].dtype is dtypes.float32:
        return _affine(node.operands[0])
    if node.op == "mul":
        for codes, scale in (node.operands, node.operands[::-1]):
            found = _scaled(codes, scale) if codes.shape == value.shape else None
            if found is not None:
                return found
    return None


def _scaled(whole: Value, scale: Value) -> Affine | None:
    """Where `whole` are integers, less a zero point perhaps."""
    parts = _codes_and_zero(whole)
    if parts is None or parts[0].shape != whole.shape:
        return None
    known = _Constants()
    codes, zero, factor = (known.of(v) if v is not None else np.zeros((), np.float32) for v in (*parts, scale))
    if codes is None or zero is None or factor is None:
        return None
    return Affine(codes, zero.astype(np.float32), factor.astype(np.float32))


def _codes_and_zero(value: Value) -> tuple[Value, Value | None] | None:
    """Integers and what is subtracted from them, if anything is: as floats or in integers that hold the difference."""
    node = value.node
    if node is None or node.op not in ("sub", "cast"):
        return None
    inner = node.operands[0]
    if node.op == "sub":
        codes = _integers(inner)
        return None if codes is None else (codes, node.operands[1])
    below = inner.node
    if below is not None and below.op == "sub" and inner.dtype.kind == "int" and inner.dtype.bits >= 32:
        return _integers(below.operands[0]) or below.operands[0], below.operands[1]
    codes = _integers(value)
    return None if codes is None else (codes, None)


def _integers(value: Value) -> Value | None:
    """The integers behind casts that change no value that counts as a code."""
    node = value.node
    if node is None or node.op != "cast" or not node.operands[0].dtype.is_integer:
        return None
    inner = node.operands[0]
    signs = inner.dtype.kind == value.dtype.kind or inner.dtype.kind == "uint"
    room = value.dtype.bits > inner.dtype.bits or (inner.dtype.kind == value.dtype.kind)
    if not value.dtype.is_float and not (signs and room and value.dtype.bits >= inner.dtype.bits):
        return None
    return _integers(inner) or inner


def _halves(a: Affine) -> tuple[list[np.ndarray], dict[str, int]]:
    k, n = a.codes.shape
    return [a.codes, np.ones((1, n), np.float32)], {"bits": 16, "block": k}


def _canonical(a: Affine) -> tuple[list[np.ndarray], dict[str, int]] | None:
    """Signed codes of as few bits as hold them, with the zero points moved alike, and one row for each block."""
    if not (np.isfinite(a.scale).all() and np.isfinite(a.zero).all()):
        return None
    k, n = a.codes.shape
    scale, zeros = (np.broadcast_to(x, (k, n)) for x in (a.scale, a.zero))
    whole = a.codes.astype(np.int8) if dtypes.from_numpy(a.codes.dtype).bits < 8 else a.codes
    low, high = int(whole.min()), int(whole.max())
    if max(abs(low), abs(high)) > MAX_CODE or np.abs(a.zero).max() > MAX_ZERO:
        return None
    bits = next((b for b in BITS if high - low < 1 << b), None)
    block = math.gcd(_block(scale), _block(zeros)) or k
    if bits is None or block < min(MIN_BLOCK, k):
        return None
    shift = low + (1 << (bits - 1))
    one = float(a.zero.flat[0])
    if _is_uniform(a.zero) and one.is_integer() and low - one >= -(1 << (bits - 1)) and high - one < 1 << (bits - 1):
        shift = int(one)  # then no zero points are left
    codes = (whole.astype(np.int16) - np.int16(shift)).astype(np.int8)
    zero = zeros[::block] - np.float32(shift)
    operands = [codes, np.ascontiguousarray(scale[::block])]
    return [*operands, *([zero] if zero.any() else [])], {"bits": bits, "block": block}


def _smaller(n: int, bits: int) -> bool:
    """Whether packing is worth it: not where columns are so few that whole panels are mostly empty."""
    return -(-n // PANEL) * PANEL * bits <= 24 * n


def _is_uniform(x: np.ndarray) -> bool:
    return bool((x == x.flat[0]).all())


def _block(x: np.ndarray) -> int:
    """How many rows in turn are equal: a divisor of every place where a row differs from the last; 0 if none does."""
    if x.strides[0] == 0:
        return 0
    changes = np.flatnonzero((x[1:] != x[:-1]).any(axis=1)) + 1
    return int(np.gcd.reduce(changes, initial=0))
