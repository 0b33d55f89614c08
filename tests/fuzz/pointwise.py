"""Steps: elementwise operators, casts, and what decides element by element."""

from __future__ import annotations

import numpy as np

from tests.fuzz.grow import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Grower,
    Item,
    Skip,
    broadcasts,
)
from tests.fuzz.model import Draw
from tests.fuzz.oracle import onnx_type
from tests.fuzz.steps import step

# The range in which each is finite and well-conditioned.
UNARY = {
    "Abs": (-1e4, 1e4), "Neg": (-1e4, 1e4), "Ceil": (-1e4, 1e4), "Floor": (-1e4, 1e4), "Round": (-1e4, 1e4),
    "Sign": (-1e4, 1e4), "Relu": (-1e4, 1e4), "Sigmoid": (-30, 30), "Tanh": (-30, 30), "Erf": (-9, 9),
    "Exp": (-9, 5), "Log": (0, 1e4), "Sqrt": (0, 1e4), "Reciprocal": (0.1, 50), "Sin": (-9, 9), "Cos": (-9, 9),
    "Tan": (-1.2, 1.2), "Asin": (-0.95, 0.95), "Acos": (-0.95, 0.95), "Atan": (-99, 99), "Sinh": (-5, 5),
    "Cosh": (-5, 5), "Asinh": (-99, 99), "Acosh": (1.1, 99), "Atanh": (-0.9, 0.9), "Softplus": (-20, 20),
    "Softsign": (-99, 99), "HardSwish": (-99, 99), "Mish": (-20, 20), "Identity": (-1e9, 1e9), "Not": (0, 1),
    "BitwiseNot": (-1e9, 1e9), "IsNaN": (-1e9, 1e9), "IsInf": (-1e9, 1e9),
}  # fmt: skip
WITH_ALPHA = {
    "Elu": (0.5, 1.5),
    "LeakyRelu": (0.01, 0.3),
    "Celu": (0.5, 1.5),
    "ThresholdedRelu": (0.2, 1.0),
    "Swish": (0.5, 2),
}


@step(14)
def unary(g: Grower) -> Item:
    op = g.choice(list(UNARY))
    x = g.pick()
    return g.emit(op, [g.tame(x, *UNARY[op]) if x.is_float else x])


@step(3)
def unary_with_attributes(g: Grower) -> Item:
    x = g.float()
    op = g.choice([*WITH_ALPHA, "HardSigmoid", "Selu", "Gelu", "Shrink"])
    if op in WITH_ALPHA:
        return g.emit(op, [x], alpha=round(g.r.uniform(*WITH_ALPHA[op]), 3) if g.chance(0.7) else None)
    if op == "HardSigmoid":
        return g.emit(op, [x], alpha=0.3 if g.chance(0.5) else None, beta=0.4 if g.chance(0.5) else None)
    if op == "Gelu":
        # onnxruntime takes onnx's function for float64, whose constants are float32.
        tanh = "tanh" if x.dtype != F64 else "none"
        return g.emit(op, [x], approximate=g.choice(["none", tanh, None]))
    if op == "Shrink":
        return g.emit(op, [x], lambd=0.4, bias=0.1 if g.chance(0.5) else None)
    return g.emit(op, [x])


@step(16)
def binary(g: Grower) -> Item:
    op = g.choice(["Add", "Add", "Sub", "Mul", "Mul", "Div", "Mod", "Pow", "PRelu"])
    x = g.number()
    if op == "Div" or op == "Mod":
        y = g.like(x, Draw(g.choice(["nonzero", "positive"])))
        if op == "Mod":
            return g.emit(op, [x, y], fmod=1 if x.is_float or g.chance(0.4) else None)
        return g.emit(op, [x, y])
    if op == "Pow":
        kind = g.choice([F32, I32, I64, x.dtype])
        exponent = g.constant(np.asarray(g.choice([0, 1, 2, 3]), kind))
        if g.chance(0.3) and x.is_float:
            return g.emit(op, [g.tame(x, 0.1, 9), g.constant(np.asarray(g.choice([0.5, -1, 1.7, -0.5]), x.dtype))])
        return g.emit(op, [x, exponent])
    if op == "PRelu":
        shape = [d if g.chance(0.6) else 1 for d in x.shape]
        return g.emit(op, [x, g.fresh(x.dtype, shape[g.integer(0, len(shape)) :])])
    y = g.like(x)
    return g.emit(op, [x, y] if g.chance(0.6) else [y, x])


@step(4)
def variadic(g: Grower) -> Item:
    x = g.number()
    parts = [x, *(g.like(x) for _ in range(g.integer(0, 3)))]
    g.r.shuffle(parts)
    return g.emit(g.choice(["Max", "Min", "Mean", "Sum", "Max", "Min"]), parts)


@step(6)
def compare(g: Grower) -> Item:
    x = g.pick()
    return g.emit(g.choice(["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"]), [x, g.like(x)])


@step(4)
def logic(g: Grower) -> Item:
    x = g.pick(lambda i: i.dtype == BOOL)
    return g.emit(g.choice(["And", "Or", "Xor"]), [x, g.like(x)])


@step(3)
def bits(g: Grower) -> Item:
    x = g.pick(lambda i: i.dtype.kind in "iu")
    op = g.choice(["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"])
    if op == "BitShift":
        y = g.constant(g.rng.integers(0, 4, x.shape).astype(x.dtype))
        return g.emit(op, [x, y], direction=g.choice(["LEFT", "RIGHT"]))
    return g.emit(op, [x, g.like(x)])


@step(6)
def where(g: Grower) -> Item:
    x = g.pick()
    try:
        c = g.pick(lambda i: i.dtype == BOOL and broadcasts(i.shape, x.shape))
    except Skip:
        c = g.fresh(BOOL, [d if g.chance(0.7) else 1 for d in x.shape])
    y = g.like(x)
    return g.emit("Where", [c, x, y] if g.chance(0.5) else [c, y, x])


@step(5)
def clip(g: Grower) -> Item:
    x = g.number()
    low, high = sorted([g.integer(-3, 3), g.integer(-2, 5)])
    if x.dtype.kind == "u":
        low, high = abs(low), max(abs(low), high)
    if g.chance(0.3):
        x = g.emit("Relu", [x])
    return g.emit("Clip", [x], min=low if g.chance(0.7) else None, max=high if g.chance(0.7) else None)


@step(10)
def cast(g: Grower) -> Item:
    """Only in the range of the target: beyond it every runtime does as it likes."""
    x = g.pick()
    target = g.choice([*g.dtypes, F32, F64, I64, I32, I16, I8, U8, U16, U32, U64, BOOL, F16, BF16])
    wide = x.array.astype(np.float64)
    if target.kind in "iu":
        info = np.iinfo(target)
        low, high = max(float(info.min), -(2.0**31)), min(float(info.max), 2.0**31)
        if wide.size and (wide.min() < low or wide.max() > high):
            if not x.is_float:
                raise Skip
            x = g.tame(x, low, high)
    if g.chance(0.15) and x.dtype != target:
        return g.emit("CastLike", [x, g.fresh(target, g.shape(0, 2))])
    return g.emit("Cast", [x], to=onnx_type(target))


@step(2)
def casts(g: Grower) -> Item:
    """Float to int to bool, and back."""
    x = g.tame(g.float(), -9, 9)
    y = g.emit("Cast", [x], to=onnx_type(g.choice([I32, I64, I8])))
    z = g.emit("Cast", [y], to=onnx_type(BOOL))
    return g.emit("Cast", [z], to=onnx_type(x.dtype))


@step(1)
def negated_bytes(g: Grower) -> Item:
    x = g.fresh(U8, g.shape())
    y = g.emit("Sub", [g.constant(np.asarray(0, U8)), x])
    return g.emit("Cast", [y], to=onnx_type(g.choice([F32, I32])))


@step(2)
def dropout(g: Grower) -> Item:
    return g.emit("Dropout", [g.float()], ratio=g.choice([None, 0.3]))


@step(1)
def bit_cast(g: Grower) -> Item:
    x = g.pick(lambda i: i.dtype in (I32, U32, I64, U64, U8, I8))
    target = {4: [I32, U32], 8: [I64, U64], 1: [I8, U8]}[x.dtype.itemsize]
    return g.emit("BitCast", [x], to=onnx_type(g.choice(target)))
