"""Every operator against onnxruntime: a table of cases, by family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ops_harness import Case, check

pytestmark = pytest.mark.every_target

rng = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def pos(*shape: int) -> np.ndarray:
    return (rng.random(shape) + 0.1).astype(np.float32)


def ints(low: int, high: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return rng.integers(low, high, shape).astype(dtype)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def bools(*shape: int) -> np.ndarray:
    return rng.random(shape) < 0.5


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 88.0, -88.0, 1.5, -2.5, 0.5, 2.0, -1.0], np.float32)


def activations() -> Iterator[Case]:
    plain = [
        "Relu",
        "Sigmoid",
        "Tanh",
        "Softplus",
        "Softsign",
        "HardSwish",
        "Elu",
        "Selu",
        "LeakyRelu",
        "HardSigmoid",
        "Mish",
    ]
    for name in plain:
        yield Case(name, [f32(3, 5) * 4])
        yield Case(name, [f32()])
        yield Case(name, [f32(0, 2)])
    yield Case("Relu", [ints(-5, 5, 7, dtype=np.int32)], opset=14)
    yield Case("Relu", [f32(4).astype(np.float16)])
    yield Case("Relu", [SPECIAL[3:]])
    yield Case("Elu", [f32(3, 5)], {"alpha": 0.3})
    yield Case("Selu", [f32(3, 5)], {"alpha": 1.2, "gamma": 0.7})
    yield Case("Celu", [f32(3, 5) * 3], {"alpha": 2.0}, opset=12)
    yield Case("HardSigmoid", [f32(3, 5) * 5], {"alpha": 0.3, "beta": 0.4})
    yield Case("ThresholdedRelu", [f32(3, 5)], {"alpha": 0.3})
    yield Case("Shrink", [f32(3, 5)], {"bias": 0.1, "lambd": 0.4})
    for kind in (np.int8, np.uint8, np.int32, np.uint16):
        yield Case("Shrink", [np.arange(-5, 6).astype(kind)], {"bias": 1.5, "lambd": 1.4})
    yield Case("Swish", [f32(3, 5)], {"alpha": 1.3}, opset=24)
    yield Case("SwiGLU", [f32(3, 5), f32(3, 5)], opset=28)
    for approximate in ("none", "tanh"):
        yield Case("Gelu", [f32(2, 9) * 3], {"approximate": approximate})
    yield Case("PRelu", [f32(2, 3, 4), f32(3, 1)])
    yield Case("PRelu", [f32(2, 3, 4), f32()])
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        for axis in (-1, 0, 1):
            yield Case(name, [f32(3, 4, 5)], {"axis": axis}, opset=13)
            yield Case(name, [f32(3, 4, 5)], {"axis": axis}, opset=11)
        yield Case(name, [f32(3, 1)], opset=13)
        yield Case(name, [f32(6)], {"axis": 0}, opset=9)
    yield Case("Softmax", [f32(3, 4) * 200], opset=13)
    yield Case("Clip", [SPECIAL], {"min": -1.0, "max": 1.0}, opset=7)
    yield Case("Clip", [f32(9)], opset=7)
    yield Case("Clip", [f32(3, 4), np.float32(-0.5), np.float32(0.5)])
    yield Case("Clip", [f32(3, 4), None, np.float32(0.5)], const=[2])
    yield Case("Clip", [f32(3, 4), np.float32(1), np.float32(-1)])
    yield Case("Clip", [ints(-9, 9, 8, dtype=np.int8), np.int8(-3), np.int8(4)])
    yield Case("Dropout", [f32(2, 3)], {"ratio": 0.3}, opset=10, outputs=2)
    yield Case("Dropout", [f32(2, 3), np.float32(0.3)], opset=13, outputs=2, const=[1])


def arithmetic() -> Iterator[Case]:
    unary = [
        "Abs",
        "Neg",
        "Sign",
        "Exp",
        "Sqrt",
        "Floor",
        "Ceil",
        "Round",
        "Erf",
        "Sin",
        "Cos",
        "Tan",
        "Atan",
        "Sinh",
        "Cosh",
        "Asinh",
        "Reciprocal",
        "Log",
    ]
    for name in unary:
        yield Case(name, [f32(3, 5)], atol=1e-5)
        yield Case(name, [SPECIAL if name not in ("Tan", "Sin", "Cos") else f32(4)], rtol=1e-4)
        yield Case(name, [f32()])
    for name in ("Asin", "Acos", "Atanh"):
        yield Case(name, [rng.uniform(-1, 1, (3, 4)).astype(np.float32)])
    yield Case("Acosh", [pos(3, 4) + 1])
    yield Case("Abs", [ints(-9, 9, 5, dtype=np.int32)])
    yield Case("Sign", [ints(-9, 9, 5, dtype=np.int64)])
    yield Case("Round", [np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4999], np.float32)])
    yield Case("Not", [bools(4)])
    yield Case("BitwiseNot", [ints(0, 200, 5, dtype=np.uint8)])
    pairs = [
        ((3, 4), (3, 4)),
        ((3, 4), (4,)),
        ((), (2, 3)),
        ((2, 1, 4), (3, 1)),
        ((0, 3), (3,)),
        ((1,), (1, 1)),
    ]
    for name in ("Add", "Sub", "Mul", "Div"):
        for a, b in pairs:
            yield Case(name, [f32(*a), pos(*b)])
        yield Case(name, [ints(-50, 50, 3, 4, dtype=np.int32), ints(1, 9, 4, dtype=np.int32)])
        yield Case(name, [f32(4).astype(np.float64), f32(4).astype(np.float64)])
    yield Case("Div", [i64(-7, 7, -7, 7), i64(2, 2, -2, -2)])
    yield Case("Add", [ints(0, 255, 5, dtype=np.uint8), ints(0, 255, 5, dtype=np.uint8)], opset=14)
    for exponent in (2.0, 3.0, 0.5, -1.0, 2.5):
        yield Case("Pow", [pos(3, 4), np.float32(exponent)], const=[1])
    yield Case("Pow", [f32(3, 4), f32(4)])
    yield Case("Pow", [ints(-4, 4, 5, dtype=np.int32), np.float32(2.5)])
    yield Case("Pow", [ints(-4, 4, 5, dtype=np.int64), i64(3)])
    yield Case("Pow", [pos(5), ints(0, 4, 5, dtype=np.int64)])
    yield Case("Mod", [i64(-7, 7, -7, 7), i64(3, 3, -3, -3)])
    yield Case("Mod", [i64(-7, 7, -7, 7), i64(3, 3, -3, -3)], {"fmod": 1})
    yield Case("Mod", [f32(8) * 5, pos(8)], {"fmod": 1}, atol=1e-5)
    yield Case("Mod", [ints(0, 200, 6, dtype=np.uint8), ints(1, 9, 6, dtype=np.uint8)])
    for name in ("Max", "Min", "Sum", "Mean"):
        yield Case(name, [f32(2, 3)])
        yield Case(name, [f32(2, 3), f32(3)])
        yield Case(name, [f32(2, 1, 3), f32(4, 1), f32()])
    yield Case("Max", [ints(-5, 5, 4, dtype=np.int32), ints(-5, 5, 4, dtype=np.int32)])
    yield Case("Max", [np.array([np.nan, 1, 2], np.float32), np.array([0, np.nan, 3], np.float32)])
    for name in ("And", "Or", "Xor"):
        yield Case(name, [bools(3, 4), bools(4)])
    for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        yield Case(name, [ints(0, 99, 3, 4, dtype=np.int32), ints(0, 99, 4, dtype=np.int32)])
    for direction in ("LEFT", "RIGHT"):
        yield Case(
            "BitShift",
            [ints(0, 99, 5, dtype=np.uint8), ints(0, 8, 5, dtype=np.uint8)],
            {"direction": direction},
        )
    for name in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        for periodic in (0, 1):
            yield Case(name, [np.int64(7)], {"periodic": periodic}, const=[0])
    for args in ((0, 7, 1), (10, 1, -3), (5, 5, 1), (3, 0, 1)):
        yield Case("Range", [np.array(a, np.int64) for a in args], const=[0, 1, 2])
        yield Case("Range", [np.array(a * 0.7, np.float32) for a in args], const=[0, 1, 2])


def logic() -> Iterator[Case]:
    for name, opset in (
        ("Equal", 19),
        ("Less", 13),
        ("Greater", 13),
        ("LessOrEqual", 16),
        ("GreaterOrEqual", 16),
    ):
        yield Case(name, [ints(0, 3, 3, 4), ints(0, 3, 4)], opset=opset)
        yield Case(name, [np.array([np.nan, 1, 2], np.float32), np.array([np.nan, 1, 3], np.float32)], opset=opset)
    yield Case("Equal", [bools(5), bools(5)])
    yield Case("Where", [bools(3, 1), f32(3, 4), f32(4)])
    yield Case("Where", [bools(), ints(0, 9, 2, dtype=np.int64), ints(0, 9, 3, 1)])
    yield Case("IsNaN", [SPECIAL])
    for negative in (0, 1):
        for positive in (0, 1):
            yield Case("IsInf", [SPECIAL], {"detect_negative": negative, "detect_positive": positive})


def reductions() -> Iterator[Case]:
    names = ["Sum", "Prod", "Mean", "Max", "Min", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]
    for short in names:
        name = "Reduce" + short
        x = pos(3, 4, 5)
        for axes in ([0], [1, -1], None):
            yield Case(name, [x], {"axes": axes, "keepdims": 0} if axes else {}, opset=11)
            yield Case(name, [x, None if axes is None else i64(*axes)], {"keepdims": 1}, opset=18, const=[1])
        yield Case(name, [x, i64()], {"noop_with_empty_axes": 1}, opset=18, const=[1])
        yield Case(name, [f32()], opset=18)
        yield Case(name, [pos(1, 5), i64(0)], {"keepdims": 0}, opset=18, const=[1])
    yield Case("ReduceSum", [ints(-9, 9, 3, 4, dtype=np.int32), i64(1)], const=[1])
    yield Case("ReduceMean", [ints(-9, 9, 3, 4, dtype=np.int32), i64(1)], const=[1])
    yield Case("ReduceMax", [ints(-9, 9, 3, 4, dtype=np.int8), i64(1)], const=[1])
    yield Case("ReduceMax", [bools(3, 4), i64(1)], opset=20, const=[1])
    yield Case("ReduceSum", [f32(2, 0, 3), i64(1)], const=[1])
    yield Case("ReduceSum", [f32(2, 5, 3), i64(1, -2, 0)], const=[1])
    yield Case("Squeeze", [f32(1, 5, 1), i64(0, 2, 0)], const=[1])
    yield Case(
        "ReduceLogSumExp",
        [np.array([[-np.inf, -np.inf], [1000, 1000]], np.float32), i64(1)],
        opset=18,
        const=[1],
    )
    for name in ("ArgMax", "ArgMin"):
        for axis in (0, -1):
            for last in (0, 1):
                for keep in (0, 1):
                    attrs = {"axis": axis, "select_last_index": last, "keepdims": keep}
                    yield Case(name, [ints(0, 3, 4, 5).astype(np.float32)], attrs)
    for exclusive in (0, 1):
        for reverse in (0, 1):
            yield Case("CumSum", [f32(3, 4), np.int32(1)], {"exclusive": exclusive, "reverse": reverse}, const=[1])


def shapes() -> Iterator[Case]:
    yield Case("Identity", [f32(2, 3)])
    yield Case("Shape", [f32(2, 3, 4)])
    yield Case("Shape", [f32(2, 3, 4)], {"start": 1})
    yield Case("Shape", [f32(2, 3, 4)], {"start": -2, "end": -1})
    yield Case("Shape", [f32()])
    yield Case("Size", [f32(2, 3, 4)])
    for target in ((4, 6), (-1,), (2, -1, 4), (0, -1), (0, 0, 4, 1)):
        yield Case("Reshape", [f32(2, 3, 4), i64(*target)], const=[1])
    yield Case("Reshape", [f32(0, 3), i64(3, 0)], {"allowzero": 1}, const=[1])
    yield Case("Reshape", [f32(1), i64()], const=[1])
    for axis in (0, 1, 2, 3, -1):
        yield Case("Flatten", [f32(2, 3, 4)], {"axis": axis})
    yield Case("Transpose", [f32(2, 3, 4)])
    yield Case("Transpose", [f32(2, 3, 4)], {"perm": [1, 2, 0]})
    yield Case("Squeeze", [f32(1, 3, 1)], dynamic=False)
    yield Case("Squeeze", [f32(1, 3, 1), i64(-1)], const=[1])
    yield Case("Squeeze", [f32(1, 3, 1)], {"axes": [0]}, opset=11)
    yield Case("Unsqueeze", [f32(3, 4), i64(0, -1)], const=[1])
    yield Case("Unsqueeze", [f32(3, 4)], {"axes": [1, 3]}, opset=11)
    yield Case("Expand", [f32(3, 1), i64(2, 1, 4)], const=[1])
    yield Case("Expand", [f32(3, 1), i64(4)], const=[1])
    yield Case("Tile", [f32(2, 3), i64(2, 3)], const=[1])
    yield Case("Tile", [f32(2, 1, 3), i64(1, 4, 0)], const=[1])
    yield Case("Concat", [f32(2, 3), f32(2, 1), f32(2, 0)], {"axis": -1})
    yield Case("Concat", [f32(2, 3)], {"axis": 0})
    yield Case("Split", [f32(6, 2)], {"axis": 0}, opset=13, outputs=3)
    yield Case("Split", [f32(6, 2)], {"axis": 0, "split": [1, 5]}, opset=11, outputs=2)
    yield Case("Split", [f32(6, 2), i64(2, 0, 4)], opset=13, outputs=3, const=[1])
    yield Case("Split", [f32(2, 7)], {"axis": 1, "num_outputs": 3}, opset=18, outputs=3)
    for mode in ("DCR", "CRD"):
        yield Case("DepthToSpace", [f32(2, 12, 3, 4)], {"blocksize": 2, "mode": mode})
    yield Case("SpaceToDepth", [f32(2, 3, 4, 6)], {"blocksize": 2})


def slices() -> Iterator[Case]:
    far = 2**63 - 1
    rows: list[tuple[list[int], list[int], list[int] | None, list[int] | None]] = [
        ([0], [2], None, None),
        ([1], [far], [1], None),
        ([-3], [far], [1], None),
        ([-1], [-far], [1], [-1]),
        ([0, 1], [3, 100], [0, 2], [2, 3]),
        ([5], [2], [0], None),
        ([4], [0], [2], [-2]),
        ([-100], [100], [-1], [1]),
        ([100], [-100], [1], [-3]),
        ([-2], [-1], [0], None),
    ]
    for starts, ends, axes, steps in rows:
        args = [f32(4, 5, 6), i64(*starts), i64(*ends)]
        args += [None if axes is None else i64(*axes), None if steps is None else i64(*steps)]
        yield Case("Slice", args, const=[1, 2, 3, 4])
    yield Case("Slice", [f32(4, 5)], {"starts": [1, -2], "ends": [3, 99]}, opset=9)
    yield Case("Slice", [f32(0, 5), i64(0), i64(5), i64(0), i64(1)], const=[1, 2, 3, 4])
    for start, step in ((1, 2**63 - 1), (-2, -(2**63)), (3, -(2**63) + 1)):  # one element of each
        args = [f32(4, 5), i64(start), i64(4 if step > 0 else -9), i64(-1), i64(step)]
        yield Case("Slice", args, const=[1, 2, 3, 4])
    for mode in ("constant", "reflect", "edge", "wrap"):
        yield Case("Pad", [f32(3, 4), i64(1, 2, 0, 3)], {"mode": mode}, opset=19, const=[1])
        yield Case("Pad", [f32(3, 4), i64(2, 1), None, i64(-1)], {"mode": mode}, opset=19, const=[1, 3])
    yield Case("Pad", [f32(3, 4), i64(1, -1, -1, 2), np.float32(3)], const=[1])
    yield Case("Pad", [ints(0, 9, 3, 4), i64(0, 1, 2, 0), np.int64(7)], const=[1, 2])
    yield Case("Pad", [bools(3, 4), i64(0, 1, 2, 0)], const=[1])
    yield Case("Pad", [f32(3, 4)], {"pads": [1, 0, 0, 2], "value": 1.5}, opset=10)
    yield Case("CenterCropPad", [f32(5, 8, 3), i64(8, 5)], {"axes": [0, 1]}, const=[1], dynamic=False)
    yield Case("ReverseSequence", [f32(4, 3), i64(1, 4, 2)], {"time_axis": 0, "batch_axis": 1}, opset=10)
    yield Case("ReverseSequence", [f32(3, 4, 2), i64(1, 4, 2)], {"time_axis": 1, "batch_axis": 0}, opset=10)


def casts() -> Iterator[Case]:
    values = np.array([0, 1, -1, 2.7, -2.7, 100.5, 0.4], np.float32)
    for to in (1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 16):
        yield Case("Cast", [values[[0, 1, 3, 5, 6]] if to in (2, 12, 13) else values], {"to": to}, opset=13)
    for to in (17, 18, 19, 20):
        # onnxruntime and the standard saturate
        yield Case("Cast", [np.array([1, 2.3, 500, -1e6, 0, np.nan, 1e-9], np.float32)], {"to": to}, opset=19)
        yield Case(
            "Cast",
            [np.array([1, 2.3, 500, -1e6, 0, np.nan], np.float32)],
            {"to": to, "saturate": 0},
            opset=19,
        )
    yield Case("Cast", [np.array([np.nan, np.inf, 0, -0.0], np.float32)], {"to": 9}, opset=13)
    yield Case("Cast", [ints(-9, 9, 5, dtype=np.int32)], {"to": 1}, opset=13)
    yield Case("Cast", [bools(5)], {"to": 7}, opset=13)
    yield Case("Cast", [i64(300, -1, 2**40)], {"to": 2}, opset=13)
    yield Case("CastLike", [values, np.int32(0)], opset=19)
    yield Case("ConstantOfShape", [i64(2, 3)], const=[0])
    yield Case("ConstantOfShape", [i64()], {"value": np.array([4], np.int32)}, const=[0])
    yield Case("ConstantOfShape", [i64(0, 2)], {"value": np.array([True])}, const=[0])
    for k in (-1, 0, 2):
        yield Case("EyeLike", [f32(3, 4)], {"k": k})
    yield Case("EyeLike", [ints(0, 3, 3, 4)], {"dtype": 1})


def indexed() -> Iterator[Case]:
    for axis in (0, 1, -1):
        yield Case("Gather", [f32(4, 5, 3), ints(-3, 3, 2, 2)], {"axis": axis})
        yield Case("GatherElements", [f32(4, 5, 3), ints(-3, 3, 2, 5, 3)], {"axis": axis if axis == 0 else 2})
    yield Case("Gather", [f32(4, 5), np.int32(2)], {"axis": 1})
    yield Case("Gather", [f32(4, 5), ints(0, 3, 0)], {"axis": 1})
    yield Case("GatherND", [f32(4, 5, 3), ints(-4, 4, 6, 2)], dynamic=False)
    yield Case("GatherND", [f32(2, 5, 3), ints(0, 3, 2, 4, 1)], {"batch_dims": 1}, dynamic=False)
    yield Case("ScatterElements", [f32(3, 4), i64(0, 2, 1, 1).reshape(2, 2), f32(2, 2)], {"axis": 1})
    yield Case("ScatterElements", [f32(3, 4), i64(-1, 0).reshape(2, 1), f32(2, 1)], {"axis": 0})
    for reduction in ("add", "mul", "max", "min"):
        attrs = {"axis": 1, "reduction": reduction}
        yield Case("ScatterElements", [f32(3, 4), ints(0, 4, 3, 6), f32(3, 6)], attrs, opset=18)
        yield Case("ScatterND", [f32(3, 4), ints(0, 3, 5, 1), f32(5, 4)], {"reduction": reduction}, opset=18)
    yield Case("ScatterND", [f32(3, 4), i64(0, 1, 2, -1).reshape(2, 2), f32(2)])
    for axis in (-1, 0, 1):
        inputs = [i64(0, 2, -1, 7), np.int64(4), np.array([0.5, 2], np.float32)]
        yield Case("OneHot", inputs, {"axis": axis} if axis < 1 else {}, const=[1])
    for upper in (0, 1):
        for k in (-1, 0, 2):
            yield Case("Trilu", [f32(2, 4, 5), np.int64(k)], {"upper": upper})
    yield Case("Trilu", [ints(0, 9, 4, 4)])
    for largest in (0, 1):
        attrs = {"axis": 1, "largest": largest}
        yield Case("TopK", [ints(0, 4, 3, 7).astype(np.float32), i64(3)], attrs, opset=11, outputs=2, const=[1])
    yield Case("TopK", [f32(5, 2)], {"axis": 0, "k": 2}, opset=9, outputs=2)
    for largest in (0, 1):  # NaN is the greatest
        yield Case("TopK", [SPECIAL, i64(len(SPECIAL))], {"largest": largest}, opset=11, outputs=2, const=[1])
    yield Case("Compress", [f32(3, 4), np.array([True, False, True])], {"axis": 0}, const=[1])
    yield Case("Compress", [f32(3, 4), np.array([True, False, True, False, True])], const=[1])
    yield Case("NonZero", [np.array([[1, 0], [2, 3]], np.float32)], const=[0])


def contractions() -> Iterator[Case]:
    for a, b in [
        ((3, 4), (4, 5)),
        ((4,), (4,)),
        ((4,), (2, 4, 3)),
        ((2, 3, 4), (4,)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((0, 4), (4, 2)),
        ((2, 0), (0, 3)),
    ]:
        yield Case("MatMul", [f32(*a), f32(*b)])
    yield Case("MatMul", [ints(-5, 5, 3, 4, dtype=np.int32), ints(-5, 5, 4, 2, dtype=np.int32)])
    for c in ((3, 5), (5,), (3, 1), (), None):
        yield Case("Gemm", [f32(3, 4), f32(4, 5), None if c is None else f32(*c)])
    yield Case("Gemm", [f32(4, 3), f32(5, 4), f32(5)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0})
    yield Case("Gemm", [f32(3, 4), f32(4, 5), f32(5)], {"beta": 0.0}, opset=9)
    equations = [
        ("ij,jk->ik", (3, 4), (4, 5)),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
        ("ij->ji", (3, 4)),
        ("ii->i", (4, 4)),
        ("ii", (4, 4)),
        ("ij->", (3, 4)),
        ("i,j->ij", (3,), (4,)),
        ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
        ("ij,j", (3, 4), (4,)),
        ("bn,anm,bm->ba", (2, 3), (5, 3, 4), (2, 4)),
        ("i...->...", (3, 4)),
        ("bij,bij->b", (2, 3, 4), (2, 3, 4)),
        ("abc,cd,de->abe", (2, 3, 4), (4, 5), (5, 2)),
        ("iij->j", (3, 3, 4)),
        ("...,...->...", (2, 3), (3,)),
        ("b...i,...i->b...", (2, 3, 4), (3, 4)),
        ("ab,ab->ab", (2, 3), (2, 3)),
        ("blq,bkl->bkq", (2, 3, 4), (2, 5, 3)),
        ("ij,kj->ik", (3, 1), (4, 5)),
    ]
    for equation, *given in equations:
        # onnxruntime refuses ellipses of different ranks
        oracle = "reference" if "..." in equation else "onnxruntime"
        yield Case(
            "Einsum",
            [f32(*s) for s in given],
            {"equation": equation},
            dynamic="ii" not in equation,
            oracle=oracle,
        )


# Sizes of kernels and channels, which are part of a model.
KERNELS = (2, 3, 4, 6, 8)


def convolutions() -> Iterator[Case]:
    x, w, bias = f32(2, 4, 7, 8), f32(6, 4, 3, 3), f32(6)
    yield Case("Conv", [x, w], keep=KERNELS)
    yield Case("Conv", [x, w, bias], {"pads": [1, 0, 2, 1], "strides": [2, 1]}, keep=KERNELS)
    yield Case("Conv", [x, w, bias], {"dilations": [2, 2], "kernel_shape": [3, 3]}, keep=KERNELS)
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield Case("Conv", [x, w], {"auto_pad": auto, "strides": [2, 3]}, keep=KERNELS)
    yield Case("Conv", [x, f32(6, 2, 3, 2)], {"group": 2}, keep=KERNELS)
    yield Case("Conv", [x, f32(8, 1, 3, 3), f32(8)], {"group": 4, "pads": [1, 1, 1, 1]}, keep=KERNELS)
    yield Case("Conv", [f32(2, 3, 9), f32(4, 3, 4), f32(4)], {"strides": [2]}, keep=KERNELS)
    yield Case("Conv", [f32(1, 2, 5, 5, 5), f32(3, 2, 3, 3, 3)], {"pads": [1] * 6}, keep=KERNELS)
    x, w = f32(2, 4, 5, 6), f32(4, 3, 3, 3)
    yield Case("ConvTranspose", [x, w], keep=KERNELS)
    yield Case("ConvTranspose", [x, w, f32(3)], {"strides": [2, 3], "pads": [1, 0, 2, 1]}, keep=KERNELS)
    yield Case(
        "ConvTranspose",
        [x, w],
        {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 1, 1, 1]},
        keep=KERNELS,
    )
    yield Case("ConvTranspose", [x, w], {"dilations": [2, 2], "strides": [2, 1]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, f32(4, 2, 3, 3), f32(4)], {"group": 2, "strides": [2, 2]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, f32(4, 2, 1, 1)], {"strides": [2, 2], "pads": [1, 0, 0, 1]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, f32(4, 2, 2, 2)], {"pads": [2, 2, 2, 1]}, keep=KERNELS)
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield Case("ConvTranspose", [x, w], {"auto_pad": auto, "strides": [2, 2]}, keep=KERNELS)
        yield Case("ConvTranspose", [x, w], {"auto_pad": auto, "strides": [5, 4]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, w], {"strides": [2, 2], "output_shape": [10, 12]}, keep=KERNELS)
    yield Case(
        "ConvTranspose",
        [x, w],
        {"strides": [2, 2], "output_shape": [11, 14], "auto_pad": "SAME_UPPER"},
        keep=KERNELS,
    )
    yield Case("ConvTranspose", [f32(1, 2, 5), f32(2, 3, 4)], {"strides": [3]}, keep=KERNELS)


def pools() -> Iterator[Case]:
    x = f32(2, 3, 7, 8)
    settings: list[dict[str, Any]] = [
        {"kernel_shape": [3, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1},
        {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 0, 1, 1], "ceil_mode": 1},
        {"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"kernel_shape": [3, 2], "auto_pad": "VALID"},
        {"kernel_shape": [2, 3], "dilations": [2, 2], "strides": [2, 1]},
        {
            "kernel_shape": [2, 2],
            "dilations": [3, 2],
            "strides": [2, 2],
            "ceil_mode": 1,
            "pads": [0, 1, 1, 0],
        },
    ]
    for attrs in settings:
        yield Case("MaxPool", [x], attrs)
        yield Case("MaxPool", [x], attrs, outputs=2)
        yield Case("LpPool", [x], {**attrs, "p": 3})
        for include in (0, 1):
            yield Case("AveragePool", [x], {**attrs, "count_include_pad": include})
            if "dilations" not in attrs and "ceil_mode" not in attrs:
                yield Case("AveragePool", [x], {**attrs, "count_include_pad": include}, opset=10)
    short = f32(1, 2, 2, 5)  # an axis of which no window is, by one element
    for name in ("MaxPool", "AveragePool", "LpPool"):
        yield Case(name, [short], {"kernel_shape": [3, 3], "pads": [0, 1, 0, 0]})
    yield Case("MaxPool", [x], {"kernel_shape": [2, 2], "storage_order": 1, "strides": [2, 2]}, outputs=2)
    yield Case("MaxPool", [ints(0, 255, 1, 2, 5, dtype=np.uint8)], {"kernel_shape": [3], "pads": [1, 1]})
    for low, dtype in ((0, np.uint8), (-128, np.int8)):  # the padding is nobody's maximum
        least = ints(low, low + 2, 2, 3, 9, 7, dtype=dtype)
        yield Case("MaxPool", [least], {"kernel_shape": [2, 3], "pads": [1, 1, 1, 1]}, outputs=2)
    hole = np.where(ints(0, 3, 2, 3, 9, 7) == 0, f32(2, 3, 9, 7), np.float32(-np.inf))
    yield Case("MaxPool", [hole], {"kernel_shape": [2, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}, outputs=2)
    yield Case("MaxPool", [f32(1, 2, 5)], {"kernel_shape": [2]}, opset=8)
    yield Case("AveragePool", [f32(1, 2, 4, 5, 6)], {"kernel_shape": [2, 2, 2], "pads": [1] * 6})
    for name in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        yield Case(name, [x], opset=21)
        yield Case(name, [f32(1, 2, 5)], opset=21)
    indices = i64(0, 3, 11, 14).reshape(1, 1, 2, 2)
    yield Case("MaxUnpool", [f32(1, 1, 2, 2), indices], {"kernel_shape": [2, 2], "strides": [2, 2]})


def experimental() -> Iterator[Case]:
    """Of models before opset 10."""
    x = f32(1, 2, 5, 6)
    for opset in (7, 9):
        yield Case("Affine", [x], {"alpha": 2.0, "beta": 0.3}, opset=opset)
        yield Case("Scale", [x], {"scale": -1.5}, opset=opset)
        yield Case("ScaledTanh", [x], {"alpha": 2.0, "beta": 0.3}, opset=opset)
        yield Case("ParametricSoftplus", [x * 30], {"alpha": 2.0, "beta": 0.3}, opset=opset)
        yield Case("ThresholdedRelu", [x], {"alpha": 0.3}, opset=opset)
        yield Case("ImageScaler", [x], {"scale": 2.0, "bias": [1.0, -3.0]}, opset=opset)
        yield Case("Crop", [x], {"border": [1, 2, 0, 1]}, opset=opset)
        yield Case("Crop", [x], {"border": [1, 2, 0, 0], "scale": [2, 4]}, opset=opset)
        yield Case("DynamicSlice", [x, i64(1, 2), i64(4, 9), i64(2, 3)], opset=opset, const=[1, 2, 3])


def norms() -> Iterator[Case]:
    x, c = f32(2, 6, 3, 4), [f32(6), f32(6), f32(6), pos(6)]
    for opset in (7, 9, 14, 15):
        yield Case("BatchNormalization", [x, *c], {"epsilon": 1e-3}, opset=opset, const=[1, 2, 3, 4])
    yield Case("BatchNormalization", [f32(5, 6), *c])
    yield Case("BatchNormalization", [x, *c], {"training_mode": 1}, opset=15, outputs=3)
    for opset in (7, 9, 13):
        yield Case("BatchNormalization", [x, *c], {"momentum": 0.7}, opset=opset, outputs=5)
    for axis in (-1, 1, 0):
        shape = x.shape[axis:] if axis else x.shape
        yield Case("LayerNormalization", [x, f32(*shape), f32(*shape)], {"axis": axis}, opset=17)
        yield Case("LayerNormalization", [x, f32(*shape)], {"axis": axis, "epsilon": 0.1}, opset=17, outputs=3)
        yield Case("RMSNormalization", [x, f32(*shape)], {"axis": axis}, opset=23)
    wide = f32(3, 8).astype(np.float64)  # with means in float32, as the standard has it
    yield Case("LayerNormalization", [wide, wide[0], wide[1]], opset=17, outputs=3)
    half = f32(3, 8).astype(np.float16)
    yield Case("LayerNormalization", [half, half[0], half[1]], opset=17)
    yield Case("RMSNormalization", [half, half[0]], opset=23)
    yield Case("InstanceNormalization", [x, f32(6), f32(6)], {"epsilon": 0.01})
    yield Case("InstanceNormalization", [f32(2, 3, 5), f32(3), f32(3)])
    yield Case("GroupNormalization", [x, f32(3), f32(3)], {"num_groups": 3}, opset=18, oracle="reference")
    yield Case("GroupNormalization", [x, f32(6), f32(6)], {"num_groups": 3}, opset=21)
    for size in (1, 3, 5):
        yield Case("LRN", [x], {"size": size, "alpha": 0.5, "bias": 2.0})
    for p in (1, 2):
        yield Case("LpNormalization", [x], {"axis": 1, "p": p})
    yield Case("MeanVarianceNormalization", [x])
    yield Case("MeanVarianceNormalization", [x], {"axes": [1, 2]})


def resizes() -> Iterator[Case]:
    x = f32(1, 2, 5, 6)
    sizes = [
        ([1, 1, 2, 2], None),
        ([1, 1, 0.6, 1.7], None),
        (None, [1, 2, 8, 3]),
        (None, [1, 2, 1, 12]),
        ([1, 1, 3, 0.5], None),
    ]
    coordinates = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]
    for scales, target in sizes:
        tail = [
            None,
            None if scales is None else np.array(scales, np.float32),
            None if target is None else i64(*target),
        ]
        for how in coordinates:
            base = {"coordinate_transformation_mode": how}
            # onnxruntime takes the last corner's place from the size that is cut to a whole one.
            cut = how == "align_corners" and scales == [1, 1, 0.6, 1.7]
            common: dict[str, Any] = {"opset": 19, "const": [2, 3], **({"oracle": "reference"} if cut else {})}
            for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
                yield Case("Resize", [x, *tail], {**base, "nearest_mode": nearest}, **common)
            yield Case("Resize", [x, *tail], {**base, "mode": "linear"}, **common)
            yield Case("Resize", [x, *tail], {**base, "mode": "cubic"}, rtol=1e-4, **common)
            attrs = {**base, "mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}
            yield Case("Resize", [x, *tail], attrs, rtol=1e-4, atol=1e-5, **common)
    roi = np.array([0, 0, 0.1, -0.2, 1, 1, 0.8, 1.3], np.float32)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    for mode in ("nearest", "linear"):
        yield Case("Resize", [x, roi, None, i64(1, 2, 7, 4)], {**crop, "mode": mode}, opset=13, const=[1, 3])
    for mode in ("linear", "cubic"):
        for scale in (0.6, 0.35):
            given = [x, None, np.array([1, 1, scale, scale], np.float32)]
            yield Case("Resize", given, {"mode": mode, "antialias": 1}, opset=18, const=[2], dynamic=False, rtol=1e-4)
        photo, attrs = [f32(1, 2, 61, 83), None, None, i64(1, 2, 23, 31)], {"mode": mode, "antialias": 1}
        yield Case("Resize", photo, attrs, opset=18, const=[3], dynamic=False, rtol=1e-4)
        yield Case("Resize", photo, {**attrs, "exclude_outside": 1}, opset=18, const=[3], dynamic=False, rtol=1e-4)
        for dtype in (np.uint8, np.int32):  # rounded after each axis; with weights that are exact, ties are ties
            whole = [ints(0, 256, 1, 2, 32, 20).astype(dtype), None, None, i64(1, 2, 16, 40)]
            yield Case("Resize", whole, attrs, opset=18, const=[3], dynamic=False)
    scales = np.array([1, 1, 1.5, 2], np.float32)  # the roi has no part in the size
    yield Case("Resize", [x, roi, scales], {**crop, "mode": "linear"}, opset=13, const=[1, 2])
    line = [f32(40), None, None, i64(9)]
    yield Case("Resize", line, attrs, opset=18, const=[3], dynamic=False, oracle="reference", rtol=1e-4)
    for policy in ("not_larger", "not_smaller"):
        attrs = {"axes": [2, 3], "keep_aspect_ratio_policy": policy}
        yield Case("Resize", [x, None, None, i64(7, 8)], attrs, opset=18, const=[3], dynamic=False)
    scales = np.array([1, 1, 2, 3], np.float32)
    for mode in ("nearest", "linear"):
        yield Case("Upsample", [x, scales], {"mode": mode}, opset=9, const=[1])
        yield Case("Resize", [x, np.array([1, 1, 0.6, 1.5], np.float32)], {"mode": mode}, opset=10, const=[1])
    yield Case("Upsample", [x], {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 2.0]}, opset=7)


def quantized() -> Iterator[Case]:
    x = f32(3, 4, 5) * 10
    for to, low, high in (
        (np.uint8, 0, 255),
        (np.int8, -128, 127),
        (np.uint16, 0, 65535),
        (np.int16, -32768, 32767),
    ):
        zero = np.array(rng.integers(low, high) // 2, to)
        q = ints(low, high, 3, 4, 5, dtype=to)
        yield Case("QuantizeLinear", [x, np.float32(0.13), zero], opset=21)
        yield Case("DequantizeLinear", [q, np.float32(0.13), zero], opset=21)
        zeros = ints(low // 2, high // 2, 4, dtype=to)
        yield Case("QuantizeLinear", [x, pos(4), zeros], {"axis": 1}, opset=21)
        yield Case("DequantizeLinear", [q, pos(4), zeros], {"axis": 1}, opset=21)
    yield Case("QuantizeLinear", [x, np.float32(0.13)], opset=13)
    yield Case("DequantizeLinear", [ints(-9, 9, 3, dtype=np.int32), np.float32(0.5)], opset=13)
    yield Case(
        "QuantizeLinear",
        [f32(3, 6), pos(3, 2), ints(0, 9, 3, 2, dtype=np.uint8)],
        {"axis": 1, "block_size": 3},
        opset=21,
        dynamic=False,
    )
    yield Case(
        "DequantizeLinear",
        [ints(0, 9, 3, 5, dtype=np.uint8), pos(3, 2), ints(0, 9, 3, 2, dtype=np.uint8)],
        {"axis": 1, "block_size": 3},
        opset=21,
        dynamic=False,
    )
    yield Case("QuantizeLinear", [x, np.float32(0.1), np.array(0, ml_dtypes.float8_e4m3fn)], opset=19, const=[2])
    yield Case(
        "QuantizeLinear",
        [x, np.float32(2.0), np.array(0, ml_dtypes.int4)],
        opset=21,
        const=[2],
        oracle="reference",
    )
    yield Case("DynamicQuantizeLinear", [x], outputs=3)
    yield Case("DynamicQuantizeLinear", [np.zeros(4, np.float32)], outputs=3)
    a, b = ints(0, 255, 3, 4, dtype=np.uint8), ints(0, 255, 4, 5, dtype=np.uint8)
    yield Case("MatMulInteger", [a, b])
    yield Case("MatMulInteger", [a, b, np.uint8(100), np.uint8(120)])
    yield Case("MatMulInteger", [a, b, np.uint8(7), ints(0, 9, 5, dtype=np.uint8)], oracle="reference")
    one = np.float32
    yield Case(
        "QLinearMatMul",
        [a, one(0.02), np.uint8(100), b, one(0.03), np.uint8(110), one(0.5), np.uint8(128)],
        opset=13,
    )
    image, kernel = ints(0, 255, 1, 2, 6, 6, dtype=np.uint8), ints(0, 255, 3, 2, 3, 3, dtype=np.uint8)
    yield Case("ConvInteger", [image, kernel, np.uint8(99), np.uint8(120)], {"pads": [1, 1, 1, 1]}, keep=KERNELS)
    qconv = [image, one(0.02), np.uint8(100), kernel, one(0.03), np.uint8(110), one(0.6), np.uint8(128)]
    yield Case("QLinearConv", qconv, {"strides": [2, 2]}, keep=KERNELS)
    yield Case("QLinearConv", [*qconv, ints(-900, 900, 3, dtype=np.int32)], {"pads": [1, 1, 1, 1]}, keep=KERNELS)
    signed = ints(-128, 127, 3, 2, 3, 3, dtype=np.int8)
    per = [
        image,
        one(0.02),
        np.uint8(100),
        signed,
        pos(3) * one(0.05),
        np.zeros(3, np.int8),
        one(0.6),
        np.uint8(128),
    ]
    yield Case("QLinearConv", per, keep=KERNELS)


# Numbers and sizes of heads.
HEADS = (4, 6, 8)


def attentions() -> Iterator[Case]:
    q, k, v = f32(2, 4, 3, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 6)
    yield Case("Attention", [q, k, v], opset=23, keep=HEADS)
    yield Case("Attention", [q, k, v, f32(3, 5)], {"scale": 0.3}, opset=23, keep=HEADS)
    yield Case("Attention", [q, k, v, np.array([[True, False, True, True, False]] * 3)], opset=23, keep=HEADS)
    yield Case("Attention", [q, k, v], {"is_causal": 1, "softcap": 2.0}, opset=23, keep=HEADS)
    for kind in (np.int8, np.uint32, np.float16, np.float64):  # a mask of any numbers
        mask = np.arange(15).reshape(3, 5).astype(kind)
        yield Case("Attention", [q, k, v, mask], opset=24, keep=HEADS, oracle="reference")
    for ours, values in ((np.float32, np.float64), (np.float32, np.float16), (np.float64, np.float32)):
        inputs = [q.astype(ours), k.astype(ours), v.astype(values)]
        yield Case("Attention", inputs, opset=23, outputs=3, dynamic=False, oracle="reference", rtol=1e-3, atol=1e-3)
    yield Case("Attention", [q, f32(2, 2, 5, 8), f32(2, 2, 5, 6)], opset=23, dynamic=False)
    past = [f32(2, 4, 2, 8), f32(2, 4, 2, 6)]
    yield Case("Attention", [q, k, v, None, *past], {"is_causal": 1}, opset=23, outputs=3, keep=HEADS)
    for mode in range(4):
        attrs = {"qk_matmul_output_mode": mode, "softcap": 1.5 if mode else 0.0}
        yield Case("Attention", [q, k, v, f32(3, 5)], attrs, opset=24, outputs=4, oracle="reference", keep=HEADS)
    flat = [f32(2, 3, 32), f32(2, 5, 16), f32(2, 5, 16)]
    yield Case("Attention", flat, {"q_num_heads": 4, "kv_num_heads": 2}, opset=23, dynamic=False)
    x, cos, sin, at = f32(2, 3, 4, 8), f32(10, 4), f32(10, 4), ints(0, 10, 2, 4)
    for interleaved in (0, 1):
        attrs = {"interleaved": interleaved}
        yield Case("RotaryEmbedding", [x, cos, sin, at], attrs, opset=23, dynamic=False)
        yield Case(
            "RotaryEmbedding",
            [f32(2, 4, 24), cos, sin, at],
            {**attrs, "num_heads": 3},
            opset=23,
            dynamic=False,
        )
    yield Case("RotaryEmbedding", [x, f32(2, 4, 2), f32(2, 4, 2)], {"rotary_embedding_dim": 4}, opset=23)


def contrib() -> Iterator[Case]:
    def ms(name: str, inputs: list[Any], attrs: dict[str, Any] | None = None, **more: Any) -> Case:
        return Case(name, inputs, attrs or {}, domain="com.microsoft", **more)

    x = f32(2, 3, 8)
    yield ms("Gelu", [x])
    yield ms("BiasGelu", [x, f32(8)])
    yield ms("FastGelu", [x, f32(8)], atol=1e-5)
    yield ms("QuickGelu", [x], {"alpha": 1.3})
    yield ms("FusedMatMul", [f32(2, 4, 3), f32(5, 4)], {"transA": 1, "transB": 1, "alpha": 0.5})
    yield ms("FusedMatMul", [f32(4, 2, 3), f32(4, 2, 5)], {"transBatchA": 1, "transBatchB": 1, "transA": 1})
    yield ms("FusedGemm", [f32(3, 4), f32(4, 5), f32(5)], {"activation": "LeakyRelu", "activation_alpha": 0.1})
    yield ms(
        "FusedConv",
        [f32(1, 2, 5, 5), f32(3, 2, 3, 3), f32(3), f32(1, 3, 3, 3)],
        {"activation": "Relu"},
        keep=KERNELS,
    )
    yield Case("SimplifiedLayerNormalization", [x, f32(8)], {"epsilon": 1e-5})
    yield ms("SkipLayerNormalization", [x, f32(2, 3, 8), f32(8), f32(8), f32(8)], {"epsilon": 1e-5})
    yield ms("SkipSimplifiedLayerNormalization", [x, f32(2, 3, 8), f32(8)], {"epsilon": 1e-5})
    ids = ints(0, 9, 2, 3, dtype=np.int32)
    tables = [f32(9, 8), f32(7, 8), f32(9, 8), f32(8), f32(8)]
    yield ms("EmbedLayerNormalization", [ids, ids, *tables, ints(0, 2, 2, 3, dtype=np.int32)], outputs=2)
    b, zero = ints(0, 255, 8, 5, dtype=np.uint8), np.uint8(120)
    yield ms("DynamicQuantizeMatMul", [x, b, np.float32(0.1), zero, f32(5)], rtol=1e-4, atol=1e-4)
    whole = ints(0, 255, 3, 8, dtype=np.uint8)
    yield ms(
        "MatMulIntegerToFloat",
        [whole, b, np.float32(0.1), pos(5), zero, ints(0, 99, 5, dtype=np.uint8)],
        rtol=1e-4,
    )
    q = [whole, np.float32(0.1), zero]
    tail = [np.float32(0.3), np.uint8(100)]
    yield ms("QLinearAdd", [*q, *q, *tail])
    yield ms("QLinearSigmoid", [*q, np.float32(0.01), np.uint8(0)])
    yield ms("QLinearLeakyRelu", [*q, *tail], {"alpha": 0.1})
    packed = ints(0, 255, 6, 2, 8, dtype=np.uint8)
    for zeros in (None, ints(0, 255, 6, 1, dtype=np.uint8)):
        attrs = {"K": 32, "N": 6, "bits": 4, "block_size": 16}
        yield ms(
            "MatMulNBits",
            [f32(3, 32), packed, pos(6, 2), zeros],
            attrs,
            const=[1, 2, 3],
            rtol=1e-4,
            atol=1e-4,
        )
    for interleaved in (0, 1):
        inputs = [f32(2, 4, 24), ints(0, 6, 2, 4), f32(10, 4), f32(10, 4)]
        yield ms("RotaryEmbedding", inputs, {"interleaved": interleaved}, dynamic=False)
    yield ms("RotaryEmbedding", [f32(2, 3, 4, 8), i64(2), f32(10, 4), f32(10, 4)], dynamic=False)
    qkv = [f32(2, 3, 8), f32(2, 5, 8), f32(2, 5, 8)]
    yield ms("MultiHeadAttention", qkv, {"num_heads": 2}, dynamic=False)
    yield ms(
        "MultiHeadAttention",
        [*qkv, f32(24), ints(0, 2, 2, 5, dtype=np.int32)],
        {"num_heads": 2},
        dynamic=False,
    )
    yield ms("MultiHeadAttention", [x, x, x], {"num_heads": 2, "unidirectional": 1, "scale": 0.2}, dynamic=False)
    weights = [f32(8, 24), f32(24)]
    yield ms("Attention", [x, *weights], {"num_heads": 2}, dynamic=False)
    yield ms("Attention", [x, *weights, ints(0, 2, 2, 3, dtype=np.int32)], {"num_heads": 2}, dynamic=False)
    yield ms("Attention", [x, *weights], {"num_heads": 2, "unidirectional": 1}, dynamic=False, outputs=2)


def losses() -> Iterator[Case]:
    for shape in ((5, 4), (2, 4, 3, 2)):
        scores, labels = f32(*shape), ints(0, 4, shape[0], *shape[2:])
        for reduction in ("none", "sum", "mean"):
            for extra, attrs in (
                ([], {}),
                ([pos(4)], {}),
                ([pos(4)], {"ignore_index": 1}),
                ([], {"ignore_index": -7}),
            ):
                given = np.where(labels == 2, -7, labels) if attrs.get("ignore_index") == -7 else labels
                attrs = {**attrs, "reduction": reduction}
                yield Case("NegativeLogLikelihoodLoss", [scores, given, *extra], attrs, opset=13, oracle="reference")
                yield Case(
                    "SoftmaxCrossEntropyLoss",
                    [scores, given, *extra],
                    attrs,
                    opset=13,
                    outputs=2,
                    oracle="reference",
                )


def spectra() -> Iterator[Case]:
    for parts in (1, 2):
        x = f32(2, 8, 5, parts)
        for axis in (1, 2):
            for length in (None, np.int64(6), np.int64(11)):
                for onesided in (0, 1) if parts == 1 else (0,):
                    inputs = [x, length, np.int64(axis)]
                    attrs = {"onesided": onesided}
                    yield Case("DFT", inputs, attrs, opset=20, const=[1, 2], keep=(2, 5, 8), rtol=1e-4, atol=1e-4)
                yield Case(
                    "DFT",
                    [x, length],
                    {"axis": axis},
                    opset=17,
                    const=[1],
                    keep=(2, 5, 8),
                    rtol=1e-4,
                    atol=1e-4,
                )
    yield Case("DFT", [f32(2, 8, 2)], {"inverse": 1}, opset=20, dynamic=False, atol=1e-5)
    signal = f32(2, 40, 1)
    hann = np.hanning(16).astype(np.float32)
    for onesided in (0, 1):
        attrs = {"onesided": onesided}
        yield Case("STFT", [signal, np.int64(5), hann], attrs, opset=17, const=[1], keep=(16,), rtol=1e-4, atol=1e-4)
        inputs = [signal, np.int64(4), None, np.int64(8)]
        yield Case("STFT", inputs, attrs, opset=17, const=[1, 3], rtol=1e-4, atol=1e-4)
    edges = [np.int64(8), np.int64(64), np.int64(8000), np.float32(0), np.float32(4000)]
    yield Case("MelWeightMatrix", edges, opset=17, const=range(5), rtol=1e-4)


def samplings() -> Iterator[Case]:
    x, grid = f32(2, 3, 5, 6), rng.uniform(-1.4, 1.4, (2, 4, 3, 2)).astype(np.float32)
    for mode in ("linear", "nearest", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            for align in (0, 1):
                attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
                yield Case("GridSample", [x, grid], attrs, opset=20, keep=(2,), rtol=1e-4, atol=1e-4)
    yield Case("GridSample", [x, grid], {"mode": "bilinear"}, opset=16, keep=(2,), atol=1e-5)
    volume, points = f32(1, 2, 3, 4, 5), rng.uniform(-1.1, 1.1, (1, 2, 3, 2, 3)).astype(np.float32)
    yield Case("GridSample", [volume, points], opset=20, dynamic=False, atol=1e-5)
    for align in (0, 1):
        yield Case(
            "AffineGrid",
            [f32(2, 2, 3), i64(2, 3, 4, 5)],
            {"align_corners": align},
            const=[1],
            opset=20,
            atol=1e-5,
        )
        yield Case(
            "AffineGrid",
            [f32(2, 3, 4), i64(2, 3, 4, 5, 6)],
            {"align_corners": align},
            const=[1],
            opset=20,
            atol=1e-5,
        )
    rois = np.array([[0, 0, 4, 3], [1.5, 0.5, 5.5, 4.5], [-2, -1, 9, 9]], np.float32)
    for how in ("half_pixel", "output_half_pixel"):
        attrs = {
            "coordinate_transformation_mode": how,
            "output_height": 2,
            "output_width": 3,
            "sampling_ratio": 2,
        }
        yield Case("RoiAlign", [x, rois, i64(0, 1, 0)], {**attrs, "spatial_scale": 0.8}, opset=16, atol=1e-5)
        yield Case("RoiAlign", [x, rois, i64(0, 1, 0)], {**attrs, "mode": "max"}, opset=16, atol=1e-5)
        inside, infinite = np.array([[0, 0, 4, 4], [1, 1, 6, 6]], np.float32), f32(1, 2, 6, 6)
        infinite[0, 0, 2, 2] = np.inf  # where neighbours of a weight of 0 may be
        yield Case("RoiAlign", [infinite, inside, i64(0, 0)], {**attrs, "mode": "max"}, opset=16, atol=1e-5)
    for group, own in ((2, 2), (1, 2), (2, 1), (4, 2), (2, 4)):
        inputs = [f32(2, 4, 5, 6), f32(8, 4 // group, 2, 2), f32(2, own * 2 * 4, 4, 5), f32(8), pos(2, own * 4, 4, 5)]
        attrs = {"group": group, "offset_group": own}
        yield Case("DeformConv", inputs, attrs, opset=19, dynamic=False, rtol=1e-4, atol=1e-4)
    yield Case("Col2Im", [f32(2, 12, 20), i64(5, 6), i64(2, 2)], const=[1, 2], opset=18, dynamic=False)
    strided = {"strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 2]}
    yield Case("Col2Im", [f32(2, 12, 18), i64(5, 6), i64(2, 2)], strided, const=[1, 2], opset=18, dynamic=False)
    for image, block, more in (
        ((5, 6), (3, 3), {"pads": [1, 1, 1, 1]}),
        ((9, 11), (4, 3), {"strides": [3, 2], "pads": [1, 0, 2, 1]}),
        ((13, 14), (4, 4), {"strides": [4, 4]}),
        ((13, 14), (2, 2), {"strides": [4, 3]}),
        ((9, 9), (5, 5), {}),
        ((31,), (7,), {"strides": [3], "pads": [2, 1]}),
        ((5, 6, 7), (2, 3, 2), {"strides": [1, 2, 2]}),
    ):
        n, pads = len(image), more.get("pads", [0] * 2 * len(image))
        steps = more.get("strides", [1] * n)
        count = [(image[i] + pads[i] + pads[n + i] - block[i]) // steps[i] + 1 for i in range(n)]
        blocks = f32(2, 3 * int(np.prod(block)), int(np.prod(count)))
        yield Case("Col2Im", [blocks, i64(*image), i64(*block)], more, const=[1, 2], opset=18, dynamic=False, rtol=1e-4)
    for exclusive in (0, 1):
        attrs = {"exclusive": exclusive, "reverse": exclusive}
        yield Case("CumProd", [f32(3, 4), np.int64(1)], attrs, opset=26, const=[1])
    for n in (1, 2, 3, 4, 5, 11):
        yield Case("Det", [f32(2, n, n)], keep=(n,), atol=1e-5)


def linear_attentions() -> Iterator[Case]:
    """onnx's reference evaluator is the oracle: onnxruntime does not have it."""
    q, k, v = (f32(2, 5, n) * 0.5 for n in (12, 6, 14))
    decay, beta = -np.abs(f32(2, 5, 2)), np.abs(f32(2, 5, 2))
    state = f32(2, 2, 3, 7)
    common = {"q_num_heads": 4, "kv_num_heads": 2}
    rules: list[tuple[str, list[Any]]] = [
        ("linear", []), ("gated", [decay]), ("gated", [-np.abs(f32(2, 5, 6))]), ("delta", [None, beta]),
        ("gated_delta", [decay, beta]), ("gated_delta", [decay, beta[:, :, :1]]),
    ]  # fmt: skip
    for rule, extra in rules:
        attrs = {**common, "update_rule": rule}
        for past in (None, state):
            yield Case("LinearAttention", [q, k, v, past, *extra], attrs, opset=27, outputs=2, dynamic=False)
    scaled = {**common, "update_rule": "linear", "scale": 0.3}
    yield Case("LinearAttention", [q, k, v], scaled, opset=27, outputs=2, keep=(12, 6, 14))


def pooled_regions() -> Iterator[Case]:
    x = f32(2, 3, 11, 13)
    corners = np.sort(rng.uniform(-3, 16, (17, 2, 2)), 1).reshape(17, 4)
    rois = np.concatenate([ints(0, 2, 17, 1), corners], 1).astype(np.float32)
    for shape, scale in (([2, 3], 1.0), ([3, 3], 0.5), ([1, 7], 0.0625), ([5, 2], 0.7)):
        yield Case("MaxRoiPool", [x, rois], {"pooled_shape": shape, "spatial_scale": scale}, opset=13)


FAMILIES = [
    activations,
    arithmetic,
    logic,
    reductions,
    shapes,
    slices,
    casts,
    indexed,
    contractions,
    convolutions,
    pools,
    experimental,
    norms,
    resizes,
    quantized,
    attentions,
    contrib,
    losses,
    spectra,
    samplings,
    linear_attentions,
    pooled_regions,
]
CASES = [
    pytest.param(case, id=f"{family.__name__}-{i}-{case}") for family in FAMILIES for i, case in enumerate(family())
]


@pytest.mark.parametrize("case", CASES)
def test_operator(case: Case) -> None:
    check(case)
