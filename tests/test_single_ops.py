"""Single operators whose kernels have ways of their own, over odd sizes: pads, repeats, gathers, turns, short rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxc
from onnxc.errors import RunError
from onnxc.ops import quantization
from tests.targets import is_gpu

pytestmark = pytest.mark.every_target

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def _model(op: str, inputs: list[Array], constants: list[Array], outputs: int = 1, **attrs: Any) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(inputs))], [f"c{i}" for i in range(len(constants))]
    graph = helper.make_graph(
        [helper.make_node(op, [*names[0], *names[1]], [f"y{i}" for i in range(outputs)], **attrs)],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in zip(names[0], inputs, strict=True)
        ],
        [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)],
        [numpy_helper.from_array(c, n) for n, c in zip(names[1], constants, strict=True)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def _run(op: str, inputs: list[Array], constants: list[Array], outputs: int = 1, **attrs: Any) -> list[Array]:
    compiled = onnxc.compile(_model(op, inputs, constants, outputs, **attrs), threads=2)
    return compiled.run(None, {f"x{i}": x for i, x in enumerate(inputs)})


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize(
    ("shape", "pads"),
    [((1, 97), (0, 5, 0, 96)), ((3, 7, 17), (0, 2, 0, 0, 3, 16)), ((2, 3, 5, 31), (0, 0, 1, 1, 0, 0, 2, 30)),
     ((2, 4), (0, 9, 1, 11)), ((5, 1), (1, 3, 1, 0)), ((2, 6), (0, -2, 0, 3))],
    ids=str,
)  # fmt: skip
def test_pads_that_continue_an_axis(mode: str, shape: tuple[int, ...], pads: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape).astype(np.float32)
    low, high = pads[: len(shape)], pads[len(shape) :]
    inner = x[tuple(slice(max(0, -a), n - max(0, -b)) for a, b, n in zip(low, high, shape, strict=True))]
    widths = [(max(0, a), max(0, b)) for a, b in zip(low, high, strict=True)]
    (y,) = _run("Pad", [x], [np.array(pads, np.int64)], mode=mode)
    np.testing.assert_array_equal(y, np.pad(inner, widths, mode=mode))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64, np.float16, np.float64])
@pytest.mark.parametrize("times", [(2, 2), (4, 2), (1, 4), (3, 3), (2, 8)], ids=str)
@pytest.mark.parametrize("image", [(1, 1), (7, 17), (5, 8), (3, 67)], ids=str)
def test_nearest_neighbours_repeat(dtype: type, times: tuple[int, int], image: tuple[int, int]) -> None:
    x = RNG.integers(0, 100, (2, 3, *image)).astype(dtype)
    scales = np.array([1, 1, *times], np.float32)
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    (y,) = _run("Resize", [x], [np.zeros(0, np.float32), scales], **how)
    np.testing.assert_array_equal(y, x.repeat(times[0], 2).repeat(times[1], 3))


def test_halves_that_are_no_integers_are_folded_as_kernels_cast_them() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 65504, -2.5], np.float16)
    (y,) = _run("Cast", [x], [], to=onnx.TensorProto.UINT32)
    (folded,) = _run("Cast", [], [x], to=onnx.TensorProto.UINT32)
    np.testing.assert_array_equal(y, folded)


def test_repeats_of_a_slice_begin_in_the_middle_of_a_run() -> None:
    x = RNG.standard_normal((3, 41)).astype(np.float32)
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["wide"], mode="nearest",
                         coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        helper.make_node("Slice", ["wide", "start", "end", "axes"], ["part"]),
        helper.make_node("Concat", ["x", "part"], ["y"], axis=1),
    ]  # fmt: skip
    constants = {
        "scales": np.array([1, 2], np.float32),
        "start": np.array([3]),
        "end": np.array([80]),
        "axes": np.array([1]),
    }
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, x.shape)], [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(c, n) for n, c in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    (y,) = onnxc.compile(model, threads=2).run(None, {"x": x})
    np.testing.assert_array_equal(y, np.concatenate([x, x.repeat(2, 1)[:, 3:80]], 1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8, np.int16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(1, 7), (17, 33), (64, 48), (131, 5)], ids=str)
def test_transposes(dtype: type, shape: tuple[int, int]) -> None:
    x = RNG.integers(0, 100, shape).astype(dtype)
    np.testing.assert_array_equal(_run("Transpose", [x], [])[0], x.T)


@pytest.mark.parametrize("length", [1, 3, 7, 17, 31, 60, 97])
@pytest.mark.parametrize("op", ["max", "min", "sum", "prod"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_reductions_of_short_rows(length: int, op: str, dtype: type) -> None:
    x = RNG.uniform(0.9, 1.1, (5, length)).astype(dtype) if np.dtype(dtype).kind == "f" else (
        RNG.integers(-3, 4, (5, length)).astype(dtype)
    )  # fmt: skip
    name = f"Reduce{op.capitalize()}"
    (y,) = _run(name, [x - 1 if op == "max" else x], [np.array([1])], keepdims=0)
    exact = getattr(np, op)((x - 1 if op == "max" else x).astype(np.float64), axis=1)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 17, 60])
def test_gathers_along_rows(length: int) -> None:
    x = RNG.standard_normal((3, 5, length)).astype(np.float32)
    at = RNG.integers(-length, length, (3, 5, 29))
    np.testing.assert_array_equal(_run("GatherElements", [x, at], [], axis=2)[0], np.take_along_axis(x, at % length, 2))
    where = np.stack([RNG.integers(0, n, (3, 31)) for n in x.shape], -1)
    np.testing.assert_array_equal(_run("GatherND", [x, where], [])[0], x[tuple(np.moveaxis(where, -1, 0))])


@pytest.mark.parametrize("shape", [(1,), (7, 17), (128, 768), (3, 40961)], ids=str)
def test_dynamic_quantization(shape: tuple[int, ...]) -> None:
    x = (RNG.standard_normal(shape) * 3).astype(np.float32)
    y, scale, zero = _run("DynamicQuantizeLinear", [x], [], outputs=3)
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    exact = np.float32(high - low) / np.float32(255) or np.float32(1)
    np.testing.assert_allclose(scale, exact, rtol=1e-6)
    assert abs(int(zero) - round(float(-low / exact))) <= 1
    np.testing.assert_array_equal(y, np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8))


def test_least_and_greatest_take_one_pass() -> None:
    x = np.zeros((64, 4096), np.float32)
    report = onnxc.compile(_model("DynamicQuantizeLinear", [x], [], outputs=3)).explain()
    reasons = [r for k in report.to_dict()["kernels"] for r in k["reasons"]]
    assert any("computed beside" in r for r in reasons), reasons


def _several(nodes: list[onnx.NodeProto], inputs: dict[str, Array]) -> onnx.ModelProto:
    used = {n: inputs[n] for node in nodes for n in node.input}
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in used.items()],
        [onnx.ValueInfoProto(name=o) for node in nodes for o in node.output],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def _compiled(nodes: list[onnx.NodeProto], inputs: dict[str, Array]) -> list[Array]:
    """The outputs of several operators in one model."""
    return onnxc.compile(_several(nodes, inputs), threads=2).run(None, inputs)


def _agree(nodes: list[onnx.NodeProto], inputs: dict[str, Array]) -> list[Array]:
    """The same; onnxruntime has them, too."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted = ort.InferenceSession(_several(nodes, inputs).SerializeToString(), options).run(None, inputs)
    found = _compiled(nodes, inputs)
    for got, want, node in zip(found, wanted, nodes, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=node.name)
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_determinants(dtype: Any) -> None:
    """Many small matrices side by side, few, and larger ones by quarters: as near to the true ones as the matrices'
    condition allows.
    """
    rng = np.random.default_rng(7)
    shapes = [(0, 5, 5), (2, 0, 0), (3, 1, 1), (5, 2, 2), (4, 3, 3), (37, 5, 5), (3, 5, 5), (19, 11, 11), (12, 12),
              (2, 2, 13, 13), (1, 33, 33)]  # fmt: skip
    inputs = {f"x{k}": rng.standard_normal(s).astype(dtype) for k, s in enumerate(shapes)}
    inputs["x5"] *= np.logspace(0, -4, 5, dtype=dtype)  # columns of different sizes
    nodes = [helper.make_node("Det", [n], [f"y{n}"], name=n) for n in inputs]
    for got, x in zip(_compiled(nodes, inputs), inputs.values(), strict=True):
        true = np.linalg.det(x.astype(np.float64))
        bound = 4 * max(1, x.shape[-1]) * np.finfo(dtype).eps * (np.linalg.cond(x) if x.size else 1)
        assert got.shape == true.shape and got.dtype == dtype
        np.testing.assert_array_less(np.abs(got - true), bound * np.abs(true) + 1e-300)


def test_determinants_of_singular_matrices_and_of_what_is_not_finite() -> None:
    """The same infinities and NaNs as onnxruntime's; a pivot of 0 ends in 0."""
    rng = np.random.default_rng(8)
    inputs = {f"x{k}": rng.standard_normal(s).astype(np.float32) for k, s in enumerate([(7, 5, 5), (4, 14, 14)] * 4)}
    nodes = [helper.make_node("Det", [n], [f"y{n}"], name=n) for n in inputs]
    for x in list(inputs.values())[:2]:
        x[..., 1, 2] = np.nan
    for x in list(inputs.values())[2:4]:
        x[..., 1, 2] = np.inf
    for x in list(inputs.values())[4:6]:
        x[..., :, 1] = 0
    for x in list(inputs.values())[6:]:
        x[...] = np.eye(x.shape[-1])[::-1]  # the first pivots are in the last rows
    found = _agree(nodes, inputs)
    assert np.isnan(np.concatenate(found[:2])).all() and not np.concatenate(found[4:6]).any()


def test_determinants_whose_pivots_differ_widely() -> None:
    """The products of the first ones, and of the last ones, are far out of float32's range."""
    inputs = {f"x{n}": np.diag(np.logspace(-18, 18, n)).astype(np.float32) for n in (5, 11, 12, 24)}
    nodes = [helper.make_node("Det", [n], [f"y{n}"], name=n) for n in inputs]
    np.testing.assert_allclose(_compiled(nodes, inputs), 1, rtol=1e-6)


def test_powers_by_one_exponent_that_the_run_tells() -> None:
    x = np.concatenate([RNG.standard_normal(35), [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 3e38]]).astype(np.float32)
    whole = RNG.integers(-90000, 90000, 21).astype(np.int32)
    inputs = {"x": x}
    nodes = []
    for k, exponent in enumerate((2, 3, 2.5, -1)):
        inputs[f"e{k}"] = np.array(exponent, np.float32)
        nodes.append(helper.make_node("Pow", ["x", f"e{k}"], [f"y{k}"], name=f"{exponent}"))
    square, cube, *_ = _agree(nodes, inputs)
    with np.errstate(all="ignore"):
        if not is_gpu():
            np.testing.assert_array_equal(square, x * x)
            np.testing.assert_array_equal(cube, x * x * x)
    inputs = {"w": whole, "two": np.array([2], np.int32), "three": np.array([3], np.int32)}
    wholes = [helper.make_node("Pow", ["w", n], [f"z{n}"]) for n in ("two", "three")]
    for power, got in zip((2, 3), _compiled(wholes, inputs), strict=True):  # they wrap
        np.testing.assert_array_equal(got, (whole.astype(np.int64) ** power).astype(np.int32))


def _integer_convolution(
    x: Array, w: Array, group: int, strides: list[int], dilations: list[int], pads: list[int]
) -> Array:
    """The sum over the kernel's places of products of slices."""
    rank, maps = len(strides), w.shape[0] // group
    x = np.pad(x.astype(np.int64), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    spans = [(n - (k - 1) * d - 1) // s + 1
             for n, k, d, s in zip(x.shape[2:], w.shape[2:], dilations, strides, strict=True)]  # fmt: skip
    out = np.zeros((len(x), group, maps, *spans), np.int64)
    for tap in np.ndindex(*w.shape[2:]):
        at = [
            slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilations, spans, strides, strict=True)
        ]
        part = x[(..., *at)].reshape(len(x), group, w.shape[1], *spans)
        weights = w[(..., *tap)].astype(np.int64).reshape(group, maps, w.shape[1])
        out += np.einsum("gmc,ngc...->ngm...", weights, part)
    return out.reshape(len(x), group * maps, *spans).astype(np.int32)


def test_integer_convolutions_by_weights_that_the_run_tells() -> None:
    """Any kernel, groups, strides, dilations, pads and zero points: exact. Large ones are products, small ones not."""
    r, inputs, nodes, wanted = np.random.default_rng(3), dict[str, Array](), [], []
    for k in range(20):
        rank, group, maps, depth = k % 3 + 1, r.choice([1, 2, 3]), r.choice([1, 3, 5, 16]), r.choice([1, 4, 7, 16])
        kernel, strides, dilations = (r.integers(1, 4 - (i > 0), rank).tolist() for i in range(3))
        pads, kinds = r.integers(0, 3, 2 * rank).tolist(), r.choice([np.uint8, np.int8], 2)
        x = r.integers(0, 256, (2, group * depth, *r.integers(5, 10, rank))).astype(kinds[0])
        w = r.integers(0, 256, (group * maps, depth, *kernel)).astype(kinds[1])
        zeros = r.integers(0, 99, ()).astype(kinds[0]), r.integers(0, 99, [(), (len(w),)][k % 2]).astype(kinds[1])
        given = dict(zip((f"x{k}", f"w{k}", f"a{k}", f"b{k}"), (x, w, *zeros), strict=True))
        nodes.append(helper.make_node("ConvInteger", [*given], [f"y{k}"], group=group, strides=strides,
                                      dilations=dilations, pads=pads))  # fmt: skip
        inputs |= given
        left, right = x.astype(np.int64) - zeros[0], w.astype(np.int64) - zeros[1].reshape(-1, *[1] * (w.ndim - 1))
        wanted.append(_integer_convolution(left, right, group, strides, dilations, pads))
    for found, true, node in zip(_compiled(nodes, inputs), wanted, nodes, strict=True):
        np.testing.assert_array_equal(found, true, err_msg=str(node))


def test_integer_convolutions_of_large_batches_go_image_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of all images at once would take many times the images' memory; the answer is the same."""
    r = np.random.default_rng(4)
    x, w = r.integers(0, 256, (6, 8, 20, 20)).astype(np.uint8), r.integers(-128, 128, (16, 4, 3, 3)).astype(np.int8)
    zeros = np.array(120, np.uint8), r.integers(-9, 9, 16).astype(np.int8)
    inputs = dict(zip("xwab", (x, w, *zeros), strict=True))
    model = _several([helper.make_node("ConvInteger", [*inputs], ["y"], group=2, pads=[1] * 4)], inputs)
    at_once = onnxc.compile(model)
    monkeypatch.setattr(quantization, "MOST_COLUMNS", 8 * 9 * 400)
    one_by_one = onnxc.compile(model, cache=False)
    if not is_gpu():
        assert one_by_one.explain().memory.arena < at_once.explain().memory.arena / 3
    left, right = x.astype(np.int64) - zeros[0], w.astype(np.int64) - zeros[1].reshape(-1, 1, 1, 1)
    wanted = _integer_convolution(left, right, 2, [1, 1], [1, 1], [1] * 4)
    for compiled in (at_once, one_by_one):
        np.testing.assert_array_equal(compiled.run(None, inputs)[0], wanted)


def test_sequences_are_reversed_row_by_row() -> None:
    inputs = {n: RNG.standard_normal(s).astype(np.float32) for n, s in (("x", (7, 5, 3, 6)), ("m", (5, 7)))}
    inputs |= {"a": np.array([0, 7, 1, 4, 6]), "b": np.array([5, 0, 1, 2, 3, 5, 4])}
    nodes = [
        helper.make_node("ReverseSequence", ["x", "a"], ["y0"], name="time first"),
        helper.make_node("ReverseSequence", ["x", "b"], ["y1"], time_axis=1, batch_axis=0, name="time second"),
        helper.make_node("ReverseSequence", ["m", "b"], ["y2"], name="scalars"),
    ]
    _agree(nodes, inputs)
    inputs["a"] = np.array([0, 8, 1, 4, 6])
    with pytest.raises(RunError, match="ReverseSequence"):
        _compiled(nodes[:1], {n: inputs[n] for n in ("x", "a")})
