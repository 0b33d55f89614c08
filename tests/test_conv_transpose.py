"""ConvTranspose of every geometry against its definition in float64: each input adds a scaled kernel to the output."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.errors import InputError

pytestmark = pytest.mark.every_target

CASES = [
    # spatial, kernel, strides, dilations, pads, output_padding, group
    ((4, 5), (2, 2), (2, 2), (1, 1), (0, 0, 0, 0), (0, 0), 1),
    ((4, 5), (4, 4), (2, 2), (1, 1), (1, 1, 1, 1), (0, 0), 1),
    ((7, 3), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((5, 5), (3, 5), (3, 2), (1, 1), (0, 2, 1, 1), (2, 0), 3),
    ((5, 4), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), (0, 0), 2),
    ((5, 4), (3, 2), (2, 3), (2, 1), (1, 0, 0, 1), (1, 1), 1),  # every phase of the first axis by a dilated tap
    ((5, 4), (3, 3), (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), 1),  # phases without taps
    ((5, 4), (1, 2), (3, 3), (1, 1), (0, 0, 0, 0), (1, 0), 1),  # a stride beyond the kernel
    ((6, 7), (4, 4), (2, 2), (1, 1), (3, 3, 3, 2), (0, 0), 1),  # pads beyond a phase's reach: the input is cropped
    ((1, 1), (4, 3), (1, 2), (1, 1), (1, 0, 0, 1), (0, 1), 2),  # one input position
    ((17,), (5,), (3,), (1,), (2, 1), (1,), 1),
    ((3, 2, 4), (2, 3, 2), (2, 2, 1), (1, 1, 2), (0, 1, 0, 1, 1, 0), (0, 1, 0), 1),
]


def by_definition(x: np.ndarray, w: np.ndarray, strides, dilations, pads, extra, group) -> np.ndarray:
    n, rank = x.shape[0], x.ndim - 2
    m, kernel, spatial = w.shape[1], w.shape[2:], x.shape[2:]
    full = [
        (d - 1) * s + (k - 1) * t + 1 + e
        for d, s, k, t, e in zip(spatial, strides, kernel, dilations, extra, strict=True)
    ]
    y = np.zeros((n, group, m, *full))
    parts = x.reshape(n, group, -1, *spatial)
    kernels = w.reshape(group, -1, m, *kernel)
    for at, tap in product(np.ndindex(*spatial), np.ndindex(*kernel)):
        place = tuple(i * s + j * d for i, s, j, d in zip(at, strides, tap, dilations, strict=True))
        y[(..., *place)] += np.einsum("ngc,gcm->ngm", parts[(..., *at)], kernels[(..., *tap)])
    crop = tuple(slice(lo, size - hi) for lo, hi, size in zip(pads[:rank], pads[rank:], full, strict=True))
    return y.reshape(n, group * m, *full)[(..., *crop)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_its_definition(case, dynamic: bool) -> None:
    spatial, kernel, strides, dilations, pads, extra, group = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3 * group, *spatial)).astype(np.float32)
    w = rng.standard_normal((3 * group, 5, *kernel)).astype(np.float32)
    bias = rng.standard_normal(5 * group).astype(np.float32)
    node = helper.make_node(
        "ConvTranspose", ["x", "w", "b"], ["y"], kernel_shape=kernel, strides=strides, dilations=dilations,
        pads=pads, output_padding=extra, group=group,
    )  # fmt: skip
    shape = ["n", 3 * group, *(f"d{i}" for i in range(len(spatial)))] if dynamic else x.shape
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(bias, "b")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (y,) = onnxc.compile(model).run(None, {"x": x})
    exact = by_definition(x, w, strides, dilations, pads, extra, group)
    exact += bias.reshape(1, -1, *(1,) * len(spatial))
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


JOINED = [
    # spatial, kernel, strides, pads, output_padding, inputs, maps, group, and what follows
    ((5, 7), (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), 6, 32, 1, "Tanh"),
    ((4, 9), (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), 6, 17, 1, ""),
    ((9, 11), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), 5, 16, 1, "Relu"),
    ((9, 11), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), 5, 3, 1, "Tanh"),
    ((21, 23), (6, 4), (3, 2), (2, 1, 1, 0), (0, 1), 4, 5, 1, "Conv"),
    ((7, 6), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 5, 16, 1, "Relu"),
    ((7, 6), (3, 3), (2, 2), (0, 1, 1, 0), (0, 0), 5, 9, 1, "Conv"),
    ((16, 16), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), 1, 1, 19, "Relu"),
    ((37,), (16,), (8,), (4, 4), (0,), 6, 16, 1, "Tanh"),
    ((29,), (4,), (2,), (1, 1), (0,), 6, 3, 1, "Conv"),
    ((3, 4, 5), (2, 2, 2), (2, 2, 2), (0,) * 6, (0,) * 3, 4, 16, 1, ""),
    ((3, 4, 5), (4, 4, 4), (2, 2, 2), (1,) * 6, (0,) * 3, 4, 2, 1, "Relu"),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_phases_that_are_joined(dynamic: bool) -> None:
    """Phases in one convolution or in several, their results cropped or whole, as an output and as an operand."""
    rng = np.random.default_rng(3)
    inputs: dict[str, np.ndarray] = {}
    nodes, given, outputs, weights, wanted = [], [], [], [], []
    for k, (spatial, kernel, strides, pads, extra, ci, m, group, rest) in enumerate(JOINED):
        x = inputs[f"x{k}"] = rng.standard_normal((2, ci * group, *spatial)).astype(np.float32)
        w = rng.standard_normal((ci * group, m, *kernel)).astype(np.float32)
        bias = rng.standard_normal(m * group).astype(np.float32)
        nodes.append(helper.make_node(
            "ConvTranspose", [f"x{k}", f"w{k}", f"b{k}"], [f"y{k}"], strides=strides, pads=pads, output_padding=extra,
            group=group,
        ))  # fmt: skip
        want = by_definition(x, w, strides, (1,) * len(spatial), pads, extra, group)
        want += bias.reshape(1, -1, *(1,) * len(spatial))
        weights += [numpy_helper.from_array(w, f"w{k}"), numpy_helper.from_array(bias, f"b{k}")]
        if rest == "Conv":
            v = rng.standard_normal((4, m * group, *(1,) * len(spatial))).astype(np.float32)
            weights.append(numpy_helper.from_array(v, f"v{k}"))
            want = np.einsum("oi,ni...->no...", v.reshape(4, -1).astype(np.float64), want)
        if rest:
            nodes.append(helper.make_node(rest, [f"y{k}", f"v{k}"] if rest == "Conv" else [f"y{k}"], [f"z{k}"]))
            want = {"Tanh": np.tanh, "Relu": lambda a: np.maximum(a, 0), "Conv": lambda a: a}[rest](want)
        shape = ["n", ci * group, *(f"d{k}_{i}" for i in range(len(spatial)))] if dynamic else x.shape
        given.append(helper.make_tensor_value_info(f"x{k}", TensorProto.FLOAT, shape))
        outputs.append(helper.make_tensor_value_info(f"z{k}" if rest else f"y{k}", TensorProto.FLOAT, None))
        wanted.append(want)
    graph = helper.make_graph(nodes, "g", given, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for case, y, want in zip(JOINED, onnxc.compile(model).run(None, inputs), wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.sqrt((want**2).mean()) * 4, err_msg=str(case))


def test_a_zero_stride_gap_never_meets_an_infinite_weight() -> None:
    """Gaps between inputs are no zeros that are multiplied: 0 * inf would be NaN."""
    w = np.full((1, 1, 2), np.inf, np.float32)
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[3])
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 1, 2))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (y,) = onnxc.compile(model).run(None, {"x": np.ones((1, 1, 2), np.float32)})
    assert not np.isnan(y).any()


def test_weights_that_are_not_finite_never_meet_padding() -> None:
    rng = np.random.default_rng(5)
    inputs, weights, wanted, nodes = {}, [], [], []
    for number, case in enumerate((CASES[2], CASES[6], CASES[9], CASES[10])):
        spatial, kernel, strides, dilations, pads, extra, group = case
        x = rng.standard_normal((2, 2 * group, *spatial)).astype(np.float32)
        w = rng.standard_normal((2 * group, 3, *kernel)).astype(np.float32)
        w.reshape(-1)[[0, 7, -1]] = np.inf, -np.inf, np.nan
        inputs[f"x{number}"] = x
        weights.append(numpy_helper.from_array(w, f"w{number}"))
        nodes.append(helper.make_node(
            "ConvTranspose", [f"x{number}", f"w{number}"], [f"y{number}"], strides=strides, dilations=dilations,
            pads=pads, output_padding=extra, group=group,
        ))  # fmt: skip
        with np.errstate(invalid="ignore"):
            wanted.append(by_definition(x, w, strides, dilations, pads, extra, group))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in inputs.items()],
        [helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, None) for number in range(len(nodes))], weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for y, want in zip(onnxc.compile(model).run(None, inputs), wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strides", [[1, 1], [2, 1], [2, 3]])
def test_pads_that_take_more_than_there_is(strides: list[int]) -> None:
    """Of open sizes: a call with too few pixels is an error, and what is left of others is as it should be."""
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=strides, pads=[2, 2, 3, 2])
    w = numpy_helper.from_array(np.ones((2, 3, 3, 3), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, "h", "w"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opset = helper.make_opsetid("", 17)
    graph = helper.make_graph([node], "cut", [x], [y], [w])
    model = onnxc.compile(helper.make_model(graph, opset_imports=[opset], ir_version=8))
    for h in range(1, 6):
        size = [strides[0] * (h - 1) + 3 - 5, strides[1] * 3 + 3 - 4]
        image = np.ones((1, 2, h, 4), np.float32)
        if size[0] < 0:
            with pytest.raises(InputError):
                model(image)
        elif size[0] > 0:  # onnxruntime refuses what is left with nothing
            assert model(image)[0].shape == (1, 3, *size)
