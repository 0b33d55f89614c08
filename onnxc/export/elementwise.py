"""Spellings of pointwise primitives."""

from __future__ import annotations

import numpy as np

from onnxc.export.common import Spelling, direct, operand
from onnxc.export.kernels import wide_dtype
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Node
from onnxc.primitives.random import PARITY, ROTATIONS, ROUNDS


def _predicate(op_type: str) -> Spelling:
    """As `direct`, with a bool output."""

    def spell(w: NodeWriter, node: Node, xs: list[str]) -> str:
        dtype = operand(node).dtype
        wide = wide_dtype(op_type, dtype)
        return w.one(op_type, *(xs if wide is dtype else [w.cast(x, wide) for x in xs]))

    return spell


def _isinf(w: NodeWriter, node: Node, xs: list[str]) -> str:
    attrs = {f"detect_{side}": int(node.attrs.get(side, True)) for side in ("positive", "negative")}
    return w.one("IsInf", *xs, **attrs)


def _mod(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """The remainder with the divisor's sign. ONNX has it for integers; for floats it follows from fmod."""
    dtype = operand(node).dtype
    if not dtype.is_float:
        return w.compute("Mod", dtype, xs)
    rest = w.compute("Mod", dtype, xs, fmod=1)
    zero = w.scalar(0, dtype)
    wrong = w.one(
        "And",
        w.one("Less", w.one("Mul", w.one("Sign", rest), xs[1]), zero),
        w.one("Not", w.one("Equal", rest, zero)),
    )
    moved = w.select(dtype, wrong, w.one("Add", rest, xs[1]), rest)
    signed_zero = w.one("Mul", w.one("Sign", xs[1]), zero)
    return w.select(dtype, w.one("Equal", rest, zero), signed_zero, moved)


def _shift(direction: str) -> Spelling:
    """BitShift is for unsigned types; a signed value is shifted as its bits, to the right with its sign."""

    def spell(w: NodeWriter, node: Node, xs: list[str]) -> str:
        dtype = operand(node).dtype
        if dtype.kind == "uint":
            return w.compute("BitShift", dtype, xs, direction=direction)
        bits = dtypes.BY_NAME[f"u{dtype.name}"]
        shift = w.cast(xs[1], bits)

        def shifted(x: str) -> str:
            return w.cast(w.compute("BitShift", bits, [w.cast(x, bits), shift], direction=direction), dtype)

        if direction == "LEFT":
            return shifted(xs[0])
        negative = w.one("Less", xs[0], w.scalar(0, dtype))
        flipped = w.one("BitwiseNot", shifted(w.one("BitwiseNot", xs[0])))
        return w.select(dtype, negative, flipped, shifted(xs[0]))

    return spell


def _where(w: NodeWriter, node: Node, xs: list[str]) -> str:
    return w.select(operand(node, 1).dtype, *xs)


def _cast(w: NodeWriter, node: Node, xs: list[str]) -> str:
    to: DType = node.attrs["to"]
    narrow = to.is_float and to.bits == 8 and to.name != "float8e8m0"
    return w.one("Cast", *xs, to=to.onnx, **({"saturate": 0} if narrow else {}))


def _quantize(w: NodeWriter, node: Node, xs: list[str]) -> str:
    a, to = node.attrs, dtypes.float32
    y = w.one("Round", w.one("Div", xs[0], w.scalar(a["scale"], to)))
    y = w.one("Add", y, w.scalar(a["zero"], to))
    y = w.select(to, w.one("IsNaN", y), w.scalar(a["low"], to), y)
    return w.cast(w.one("Clip", y, w.scalar(a["low"], to), w.scalar(a["high"], to)), dtypes.int32)


def _byte_table(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """Negative positions count from the end, where the table has the bytes of negative numbers."""
    table = w.constant(np.array(node.attrs["numbers"], node.attrs["to"].numpy))
    return w.one("Gather", table, w.cast(xs[0], dtypes.int32), axis=0)


def _threefry(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """In uint32, whose sums onnxruntime has as int64 alone."""
    word = dtypes.uint32

    def add(*parts: str) -> str:
        wide = [w.cast(p, dtypes.int64) for p in parts]
        total = w.one("Add", *wide[:2])
        for part in wide[2:]:
            total = w.one("Add", total, part)
        return w.cast(w.one("BitwiseAnd", total, w.scalar(0xFFFFFFFF, dtypes.int64)), word)

    def shift(x: str, by: int, direction: str, dtype: DType) -> str:
        return w.one("BitShift", x, w.scalar(by, dtype), direction=direction)

    def halves(x: str) -> tuple[str, str]:
        low = w.one("BitwiseAnd", x, w.scalar(0xFFFFFFFF, dtypes.uint64))
        return w.cast(low, word), w.cast(shift(x, 32, "RIGHT", dtypes.uint64), word)

    (a, b), (x, y) = halves(xs[0]), halves(w.cast(xs[1], dtypes.uint64))
    keys = (a, b, w.one("BitwiseXor", w.one("BitwiseXor", a, b), w.scalar(PARITY, word)))
    x, y = add(x, a), add(y, b)
    for step in range(ROUNDS // 4):
        for r in ROTATIONS[step % 2]:
            x = add(x, y)
            turned = w.one("BitwiseOr", shift(y, r, "LEFT", word), shift(y, 32 - r, "RIGHT", word))
            y = w.one("BitwiseXor", turned, x)
        x = add(x, keys[(step + 1) % 3])
        y = add(y, keys[(step + 2) % 3], w.scalar(step + 1, word))
    high = shift(w.cast(y, dtypes.uint64), 32, "LEFT", dtypes.uint64)
    return w.one("BitwiseOr", w.cast(x, dtypes.uint64), high)


_SAME_NAME = {
    "neg": "Neg", "abs": "Abs", "sign": "Sign", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "tanh": "Tanh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "not": "Not", "bitnot": "BitwiseNot", "add": "Add",
    "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "max": "Max", "min": "Min", "and": "And",
    "or": "Or", "xor": "Xor", "bitand": "BitwiseAnd", "bitor": "BitwiseOr", "bitxor": "BitwiseXor",
}  # fmt: skip
SPELLINGS: dict[str, Spelling] = {
    **{name: direct(op_type) for name, op_type in _SAME_NAME.items()},
    "eq": _predicate("Equal"),
    "lt": _predicate("Less"),
    "le": _predicate("LessOrEqual"),
    "isnan": _predicate("IsNaN"),
    "isinf": _isinf,
    "where": _where,
    "cast": _cast,
    "bitcast": lambda w, node, xs: w.one("BitCast", *xs, to=node.attrs["to"].onnx),
    "copy": lambda w, node, xs: w.one("Identity", *xs),
    "with_gradient": lambda w, node, xs: [w.one("Identity", x) for x in xs[: node.attrs["results"]]],
    "mod": _mod,
    "fmod": direct("Mod", fmod=1),
    "shl": _shift("LEFT"),
    "shr": _shift("RIGHT"),
    "quantize": _quantize,
    "byte_table": _byte_table,
    "threefry": _threefry,
    "random_state": lambda w, node, xs: w.constant(np.zeros(2, np.uint64)),
}
