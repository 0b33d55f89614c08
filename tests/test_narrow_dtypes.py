"""Elements of 8 bits and fewer that C++ does not have: conversions, bits, and what moves them, compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxc
from onnxc.errors import ModelError, UnsupportedError
from onnxc.export import to_onnx
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder

Array = np.ndarray[Any, Any]

WIDE_FLOATS = [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16]
POWERS = dtypes.BY_NAME["float8e8m0"]
SMALL_FLOATS = [d for d in dtypes.ALL if d.is_float and d.bits <= 8 and d is not POWERS]
SMALL_INTS = [d for d in dtypes.ALL if d.is_integer and d.bits < 8]
INTS = [d for d in dtypes.ALL if d.is_integer]


def model_of(nodes: Sequence[Any], inputs: dict[str, DType], outputs: dict[str, DType], opset: int = 28) -> Any:
    """A model whose inputs have one dynamic dim."""
    infos = [
        [helper.make_tensor_value_info(name, d.onnx, [None]) for name, d in side.items()] for side in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *infos)
    return helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", opset)])


def casts(source: DType, targets: Sequence[DType], **attrs: Any) -> onnxc.CompiledModel:
    """A model that converts its input to each of the targets."""
    nodes = [helper.make_node("Cast", ["x"], [d.name], to=d.onnx, **attrs) for d in targets]
    return onnxc.compile(model_of(nodes, {"x": source}, {d.name: d for d in targets}))


def bits_of(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def codes(dtype: DType) -> Array:
    """Every element of a small type."""
    return np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy)


def hard_floats(seed: int = 0) -> Array:
    """float32 of random bits, and halfway between others of few bits, and a little beside that."""
    rng = np.random.default_rng(seed)
    few = np.arange(1 << 16, dtype=np.uint32) << 16
    found = np.concatenate([rng.integers(0, 1 << 32, 20_011, dtype=np.uint32), few, few + 1, few - 1])
    return found.view(np.float32)


def assert_same(got: Array, wanted: Array) -> None:
    """Equal bits, but for those of NaN."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    with np.errstate(all="ignore"):
        nan = [np.isnan(v.astype(np.float32)) for v in (got, wanted)]
    differing = np.flatnonzero((bits_of(got) != bits_of(wanted)) & ~(nan[0] & nan[1]))
    assert not differing.size, f"{got[differing[:4]]} and not {wanted[differing[:4]]}, at {differing[:4]}"


# ---------------------------------------------------------------- floats


@pytest.mark.parametrize("source", WIDE_FLOATS, ids=str)
def test_floats_round_to_small_ones_as_ml_dtypes_has_it(source: DType) -> None:
    targets = [d for d in SMALL_FLOATS if d.bits == 8]
    model = casts(source, targets, saturate=0)
    with np.errstate(all="ignore"):
        x = hard_floats().astype(source.numpy)
        for n in (1, 7, 17, len(x)):
            for got, target in zip(model(x[:n]), targets, strict=True):
                assert_same(got, x[:n].astype(target.numpy))


@pytest.mark.parametrize("source", WIDE_FLOATS, ids=str)
def test_what_is_too_large_becomes_the_greatest_number(source: DType) -> None:
    model = casts(source, SMALL_FLOATS)
    with np.errstate(all="ignore"):
        x = hard_floats(1).astype(source.numpy)
    x = x[~np.isnan(x.astype(np.float32))]
    for got, target in zip(model(x), SMALL_FLOATS, strict=True):
        wide = x.astype(np.float64)
        greatest = float(ml_dtypes.finfo(target.numpy).max)
        assert_same(got, np.clip(wide, -greatest, greatest).astype(target.numpy))
        if target.bits == 8 and source is dtypes.float32:
            with np.errstate(all="ignore"):
                assert_same(got, numpy_helper.saturate_cast(x, target.numpy))


@pytest.mark.parametrize("source", [dtypes.float64, dtypes.int32, dtypes.uint32], ids=str)
def test_wide_numbers_are_rounded_once(source: DType) -> None:
    """A little more than halfway between two narrow floats, which a float32 does not show."""
    targets = [dtypes.float16, dtypes.bfloat16]
    ties = np.array([(2 * k + 1) << shift for k in range(256, 300) for shift in range(8, 20)], np.int64)
    x = np.concatenate([ties, ties + 1, ties - 1]).astype(source.numpy)
    if source is dtypes.float64:
        x = np.concatenate([x, -x, x * 2.0**-40, np.nextafter(x, 0), np.nextafter(x, np.inf), [1e300, -1e300, 1e-300]])
    with np.errstate(all="ignore"):
        for got, target in zip(casts(source, targets)(x), targets, strict=True):
            assert_same(got, x.astype(np.float64).astype(target.numpy))


@pytest.mark.parametrize("source", [*SMALL_FLOATS, POWERS], ids=str)
def test_small_floats_as_other_types(source: DType) -> None:
    targets = [d for d in [*WIDE_FLOATS, *SMALL_FLOATS] if d is not source]
    model = casts(source, targets, saturate=0)
    x = codes(source)
    with np.errstate(all="ignore"):
        for got, target in zip(model(x), targets, strict=True):
            wanted = x.astype(np.float32)
            if target.bits < 8:
                greatest = float(ml_dtypes.finfo(target.numpy).max)
                known = ~np.isnan(wanted)
                got, wanted = got[known], np.clip(wanted[known], -greatest, greatest)
            assert_same(got, wanted.astype(target.numpy))


def power(x: float, mode: str, saturate: bool) -> int:
    """The code of a float8e8m0, by the standard's table."""
    if np.isnan(x):
        return 255
    if x == 0 or np.isinf(x):
        return (0 if x == 0 else 254) if saturate else 255
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2 ** exponent, the mantissa from a half on
    up = {"up": mantissa > 0.5, "down": False, "nearest": mantissa >= 0.75}[mode]
    code = int(exponent) - 1 + 127 + int(up)
    return min(max(code, 0), 254) if saturate else code if 0 <= code < 255 else 255


@pytest.mark.parametrize("saturate", [1, 0])
@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two(mode: str, saturate: int) -> None:
    exact = 2.0 ** np.arange(-140, 130)
    x = np.concatenate(
        [exact, exact * 1.5, exact * 1.25, np.nextafter(exact, 0), np.nextafter(exact, np.inf), [0, np.nan, np.inf]]
    )
    for source in (dtypes.float64, dtypes.float32, dtypes.float16):
        with np.errstate(all="ignore"):
            given = x.astype(source.numpy)
        (got,) = casts(source, [POWERS], round_mode=mode, saturate=saturate)(given)
        wanted = [power(float(v), mode, bool(saturate)) for v in given]
        assert bits_of(got).tolist() == wanted


def test_a_rounding_that_there_is_not() -> None:
    with pytest.raises(ModelError, match="round_mode of Cast is 'odd', not 'up', 'down' or 'nearest'"):
        casts(dtypes.float32, [POWERS], round_mode="odd")


# ---------------------------------------------------------------- integers


@pytest.mark.parametrize("source", [*WIDE_FLOATS, *INTS, dtypes.boolean], ids=str)
def test_small_integers_keep_the_low_bits(source: DType) -> None:
    targets = [d for d in SMALL_INTS if d is not source]
    model = casts(source, targets)
    x = np.arange(-130, 131) if source.kind in ("int", "float") else np.arange(256)
    if source.bits < 8:
        x = np.arange(1 << source.bits)
    if source is dtypes.boolean:
        x = np.array([0, 1] * 9)
    x = x.astype(source.numpy)
    for n in (1, 7, 17, len(x)):
        for got, target in zip(model(x[:n]), targets, strict=True):
            whole = x[:n].astype(np.int64)
            assert_same(got, whole.astype(target.numpy))
            assert (bits_of(got) < 1 << target.bits).all()  # the upper bits of a byte are zero


@pytest.mark.parametrize("source", SMALL_INTS, ids=str)
def test_small_integers_as_other_types(source: DType) -> None:
    targets = [d for d in [*WIDE_FLOATS, *INTS, dtypes.boolean] if d is not source]
    x = codes(source)
    dirty = (bits_of(x) | np.uint8(0xF0 if source.bits == 4 else 0xFC)).view(source.numpy)
    model = casts(source, targets)
    for given in (x, dirty):  # bits beyond the number's own do not count
        for got, target in zip(model(given), targets, strict=True):
            assert_same(got, x.astype(np.int64).astype(target.numpy))


def test_quantization_to_four_and_two_bits() -> None:
    x = np.linspace(-3, 3, 61, dtype=np.float32)
    for dtype, low, high in (("int4", -8, 7), ("uint4", 0, 15), ("int2", -2, 1), ("uint2", 0, 3)):
        d = dtypes.BY_NAME[dtype]
        zero = np.array(1, d.numpy)
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ]
        model = model_of(nodes, {"x": dtypes.float32}, {"q": d, "y": dtypes.float32})
        model.graph.initializer.extend(
            [numpy_helper.from_array(np.float32(0.25), "s"), numpy_helper.from_array(zero, "z")]
        )
        q, y = onnxc.compile(model)(x)
        wanted = np.clip(np.rint(x / np.float32(0.25)) + 1, low, high)
        assert q.dtype == d.numpy
        np.testing.assert_array_equal(q.astype(np.float32), wanted)
        np.testing.assert_array_equal(y, (wanted - 1) * np.float32(0.25))


# ---------------------------------------------------------------- bits and places


SAME_WIDTH = [(a, b) for a in dtypes.ALL for b in dtypes.ALL if a.bits == b.bits and a is not b
              and not {a.kind, b.kind} & {"string", "complex"}]  # fmt: skip


@pytest.mark.parametrize("source", sorted({a for a, _ in SAME_WIDTH}, key=str), ids=str)
def test_bitcast(source: DType) -> None:
    targets = [b for a, b in SAME_WIDTH if a is source and b is not dtypes.boolean]
    nodes = [helper.make_node("BitCast", ["x"], [d.name], to=d.onnx) for d in targets]
    model = onnxc.compile(model_of(nodes, {"x": source}, {d.name: d for d in targets}))
    size = 2 if source is dtypes.boolean else 1 << source.bits if source.bits <= 8 else 4099
    raw = np.random.default_rng(0).integers(0, 256, size * source.itemsize, dtype=np.uint8).tobytes()
    x = np.frombuffer(raw, source.numpy) if source.bits > 8 else np.arange(size, dtype=np.uint8).view(source.numpy)
    if source.bits == 16:  # a signaling NaN becomes a quiet one on its way through a float
        x = x[~np.isnan(x.view(np.float16)) & ~np.isnan(x.view(ml_dtypes.bfloat16).astype(np.float32))]
    for got, target in zip(model(x), targets, strict=True):
        assert got.dtype == target.numpy
        np.testing.assert_array_equal(bits_of(got), bits_of(x))


def test_bits_of_bools() -> None:
    node = helper.make_node("BitCast", ["x"], ["y"], to=dtypes.boolean.onnx)
    model = onnxc.compile(model_of([node], {"x": dtypes.uint8}, {"y": dtypes.boolean}))
    assert model(np.array([0, 1, 1, 0, 1], np.uint8))["y"].tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("dtype", [*SMALL_FLOATS, POWERS, *SMALL_INTS], ids=str)
def test_movement(dtype: DType) -> None:
    """Slices with steps, joins and turns move elements as they are."""
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[-1, 4]),
        helper.make_node("Reshape", ["x", "shape"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["turned"], perm=[1, 0]),
        helper.make_node("Constant", [], ["flat"], value_ints=[-1]),
        helper.make_node("Reshape", ["turned", "flat"], ["t"]),
        helper.make_node("Constant", [], ["from"], value_ints=[-1]),
        helper.make_node("Constant", [], ["to"], value_ints=[-1000]),
        helper.make_node("Constant", [], ["axis"], value_ints=[0]),
        helper.make_node("Constant", [], ["by"], value_ints=[-3]),
        helper.make_node("Slice", ["x", "from", "to", "axis", "by"], ["s"]),
        helper.make_node("Concat", ["s", "x"], ["c"], axis=0),
    ]
    model = onnxc.compile(model_of(nodes, {"x": dtype}, {"t": dtype, "s": dtype, "c": dtype}))
    x = np.tile(codes(dtype), 5)[: 4 * 17]
    t, s, c = model(x)
    for got, wanted in ((t, x.reshape(-1, 4).T.reshape(-1)), (s, x[::-3]), (c, np.concatenate([x[::-3], x]))):
        np.testing.assert_array_equal(bits_of(got), bits_of(wanted))


def test_bitcast_has_a_spelling() -> None:
    """The exported model is one of opset 26, which onnx's reference evaluator runs."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (5,)), "x")
    model = to_onnx(b.graph([b.bitcast(b.neg(x), dtypes.int32)], ["y"]))
    assert model.opset_import[0].version == 26
    given = np.array([0, 1, -2, np.inf, np.nan], np.float32)
    (y,) = ReferenceEvaluator(model).run(None, {"x": given})
    np.testing.assert_array_equal(y, (-given).view(np.int32))


# ---------------------------------------------------------------- complex numbers


def test_complex_numbers_are_moved() -> None:
    c64 = dtypes.BY_NAME["complex64"]
    nodes = [
        helper.make_node("Constant", [], ["at"], value_ints=[2, -1, 0]),
        helper.make_node("Gather", ["x", "at"], ["g"]),
        helper.make_node("Constant", [], ["pads"], value_ints=[1, 2]),
        helper.make_node("Pad", ["x", "pads"], ["p"]),
        helper.make_node("Where", ["c", "x", "p0"], ["w"]),
        helper.make_node("BitCast", ["w"], ["b"], to=dtypes.int64.onnx),
        helper.make_node("Concat", ["w", "g", "x"], ["y"], axis=0),
    ]
    model = model_of(nodes, {"x": c64, "c": dtypes.boolean}, {"y": c64, "p": c64, "b": dtypes.int64})
    model.graph.initializer.append(numpy_helper.from_array(np.complex64(-0.0 + 1j), "p0"))
    x = np.array([1 + 2j, np.nan - 0j, -3.5j, 4, np.inf - 1j, 6, 7j], np.complex64)
    c = np.arange(7) % 2 == 0
    y, p, b = onnxc.compile(model)(x, c)
    w = np.where(c, x, np.complex64(-0.0 + 1j))
    for got, wanted in ((y, np.concatenate([w, x[[2, -1, 0]], x])), (p, np.pad(x, (1, 2)))):
        assert got.dtype == np.complex64
        np.testing.assert_array_equal(got.view(np.uint64), wanted.view(np.uint64))
    np.testing.assert_array_equal(b, w.view(np.int64))


def test_complex_numbers_are_not_computed_with() -> None:
    c64 = dtypes.BY_NAME["complex64"]
    node = helper.make_node("ScatterElements", ["x", "i", "x"], ["y"], reduction="add")
    model = model_of([node], {"x": c64, "i": dtypes.int64}, {"y": c64})
    with pytest.raises(UnsupportedError, match="scatter_elements of such is not supported"):
        onnxc.compile(model)
