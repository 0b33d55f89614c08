"""Cases of pointwise operators, reductions, casts, and of what moves elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.op_cases import SPECIAL, bools, f32, i64, ints, pos, rng
from tests.ops_harness import Case


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
        yield Case("Trilu", [f32(2, 4, 5), np.int64(2**63 - 1)], {"upper": upper})
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
