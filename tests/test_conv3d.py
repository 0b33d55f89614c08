"""Convolutions along one, two and three axes, with weights that are constants and weights that are inputs, against
their definition in float64; and the same bits at any number of threads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import onnxc
from onnxc.codegen.cpp.conv_algorithms import STRIDED, WINOGRAD
from onnxc.compiler.stages import Stages, generate
from onnxc.frontends import onnx_file
from onnxc.planner.groups import FusionOptions
from onnxc.runtime.cpu import level
from tests.targets import is_gpu

pytestmark = pytest.mark.every_target

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A convolution over as many axes as `size` has; `pads` has what lies before and after each axis."""

    n: int
    ci: int
    co: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[tuple[int, int], ...] = ()
    groups: int = 1
    constant: bool = True  # the weights; else they are an input
    dynamic: bool = False  # the sizes of the image are not known before the first run
    expect: str = field(default="conv direct", compare=False)

    def attributes(self) -> dict[str, Any]:
        """Of the ONNX node."""
        rank = len(self.size)
        pads = self.pads or ((0, 0),) * rank
        return {
            "strides": self.strides or (1,) * rank,
            "dilations": self.dilations or (1,) * rank,
            "pads": [p[0] for p in pads] + [p[1] for p in pads],
            "group": self.groups,
        }


def convolved(c: Case, x: F32, w: F32) -> F64:
    """The definition, tap by tap, in float64."""
    a, rank = c.attributes(), len(c.size)
    big = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *(c.pads or ((0, 0),) * rank)])
    big = big.reshape(c.n, c.groups, c.ci // c.groups, *big.shape[2:])
    weights = w.astype(np.float64).reshape(c.groups, c.co // c.groups, c.ci // c.groups, *c.kernel)
    spans = [d * (k - 1) + 1 for k, d in zip(c.kernel, a["dilations"], strict=True)]
    out = [(n - span) // s + 1 for n, span, s in zip(big.shape[3:], spans, a["strides"], strict=True)]
    y = np.zeros((c.n, c.groups, c.co // c.groups, *out))
    for tap in itertools.product(*map(range, c.kernel)):
        inputs: Any = (..., *(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, a["dilations"], out, a["strides"], strict=True)
        ))  # fmt: skip
        weight: Any = (..., *tap)
        y += np.einsum("ngi...,goi->ngo...", big[inputs], weights[weight])
    return y.reshape(c.n, c.co, *out)


def model(c: Case) -> tuple[onnx.ModelProto, dict[str, F32]]:
    """relu(conv(relu(x)) + b), which is channels-last from the first node on, beside conv(x), which reads an input."""
    rng = np.random.default_rng(c.ci * 100 + c.co)
    w = (rng.standard_normal((c.co, c.ci // c.groups, *c.kernel)) / np.sqrt(np.prod(c.kernel))).astype(np.float32)
    bias = rng.standard_normal(c.co).astype(np.float32)
    feed = {"x": rng.standard_normal((c.n, c.ci, *c.size)).astype(np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["first"], **c.attributes()),
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Conv", ["r", "w", "b"], ["second"], **c.attributes()),
        helper.make_node("Relu", ["second"], ["y"]),
    ]
    dims = [f"d{k}" for k in range(len(c.size))] if c.dynamic else c.size
    inputs = [helper.make_tensor_value_info("x", 1, ["n" if c.dynamic else c.n, c.ci, *dims])]
    constants = [numpy_helper.from_array(bias, "b")]
    if c.constant:
        constants.append(numpy_helper.from_array(w, "w"))
    else:
        inputs.append(helper.make_tensor_value_info("w", 1, w.shape))
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in ("first", "y")]
    graph = helper.make_graph(nodes, "volume", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made, {**feed, "w": w, "b": bias}


def cpu_kinds(made: onnx.ModelProto) -> set[str]:
    """The kernels of convolutions that the CPU would run."""
    program = generate(onnx_file.load(made), level(), FusionOptions(), Stages())
    return {call.kind for call in program.calls if call.kind.startswith("conv")}


LIKE_DIRECT = {"conv pixels", "conv direct rows"}  # what may compute a direct sum of few outputs, or of few terms


def check(c: Case) -> None:
    """Both results against float64; threads change no bit; the kernels are the expected ones, or those that may stand
    in for the direct one.
    """
    made, feed = model(c)
    kinds = {"conv direct"} if is_gpu() else (cpu_kinds(made) - LIKE_DIRECT) or {c.expect or "conv direct"}
    assert is_gpu() or (kinds == {c.expect} if c.expect else kinds <= SUMS), (c, kinds)
    given = {k: v for k, v in feed.items() if k == "x" or (k == "w" and not c.constant)}
    results = [onnxc.compile(made, threads=threads).run(None, given) for threads in (1, 3)]
    wants = convolved(c, feed["x"], feed["w"]), convolved(c, np.maximum(feed["x"], 0), feed["w"])
    bias = feed["b"].reshape(-1, *(1,) * len(c.size))
    for y, again, want in zip(*results, (wants[0], np.maximum(wants[1] + bias, 0)), strict=True):
        assert np.array_equal(y, again), c
        assert y.shape == want.shape
        if want.size:
            limit = 1e-5 if kinds == {"conv direct"} else 3e-5
            assert np.abs(y - want).max() <= limit * max(float(np.sqrt((want**2).mean())), 0.1), c


WAYS = [*WINOGRAD.values(), *STRIDED.values()]
SUMS = {"conv direct", *(f"conv {k.name}" for k in WAYS)}  # allowed where a case expects no one kernel
VOLUMES = [
    Case(1, 3, 17, (7, 13, 11), (3, 3, 3), pads=((1, 1),) * 3),
    Case(2, 5, 33, (5, 7, 9), (3, 3, 3), strides=(2, 2, 2), pads=((1, 1),) * 3),
    Case(1, 17, 7, (4, 9, 7), (2, 3, 4), strides=(1, 2, 3), dilations=(2, 1, 2), pads=((0, 2), (1, 0), (3, 1))),
    Case(3, 64, 40, (2, 5, 5), (3, 3, 3), pads=((1, 1),) * 3),
    Case(1, 70, 16, (1, 3, 3), (5, 1, 3), pads=((2, 2), (0, 0), (1, 1))),
    Case(1, 4, 8, (3, 4, 5), (1, 1, 2), pads=((2, 3), (0, 0), (0, 0))),  # whole planes of padding
    Case(1, 8, 8, (2, 3, 3), (2, 2, 2), strides=(3, 1, 1), pads=((4, 4), (2, 0), (0, 3))),
    Case(1, 24, 24, (6, 5, 7), (3, 3, 3), groups=2, pads=((1, 0), (0, 1), (1, 1))),
    Case(2, 6, 9, (5, 6, 7), (1, 2, 2), strides=(2, 1, 1)),
    Case(1, 1, 1, (1, 1, 1), (1, 1, 1)),
    Case(0, 3, 5, (4, 4, 4), (3, 3, 3), dynamic=True),
    Case(1, 3, 24, (9, 21, 23), (3, 7, 7), strides=(1, 2, 2), pads=((1, 1), (3, 3), (3, 3))),
    Case(1, 200, 33, (3, 4, 5), (3, 3, 3), dilations=(1, 2, 1), pads=((1, 1), (2, 2), (1, 1))),
]
WINOGRAD_VOLUMES = [
    Case(1, 17, 40, (5, 13, 14), (3, 3, 3), pads=((1, 1),) * 3),
    Case(2, 33, 24, (7, 9, 12), (2, 3, 3), strides=(2, 1, 1), dilations=(3, 1, 1), pads=((1, 4), (2, 1), (1, 1))),
    Case(1, 48, 70, (3, 20, 17), (3, 3, 3), dilations=(1, 2, 3), pads=((2, 2), (2, 0), (3, 3))),
]
IMAGES = [  # volumes that are seen as batches of images, or as images of columns
    Case(2, 6, 9, (5, 6, 7), (1, 1, 1)),
    Case(1, 6, 20, (5, 12, 13), (1, 5, 3), strides=(1, 2, 1), pads=((0, 0), (1, 2), (0, 1))),
    Case(2, 20, 18, (5, 9, 8), (1, 3, 3), pads=((0, 0), (1, 1), (1, 1)), expect="conv winograd F(4x4)"),
    Case(2, 20, 18, (7, 5, 6), (3, 1, 1), strides=(2, 1, 1), dilations=(2, 1, 1), pads=((2, 1), (0, 0), (0, 0))),
    Case(2, 20, 20, (7, 5, 6), (3, 1, 1), pads=((1, 1), (0, 0), (0, 0)), groups=20, expect="conv depthwise"),
    Case(2, 19, 19, (3, 9, 8), (1, 3, 3), pads=((0, 0), (1, 1), (1, 1)), groups=19, expect="conv depthwise"),
]
DEPTHWISE = [
    Case(1, 19, 19, (5, 8, 17), (3, 3, 3), pads=((1, 1),) * 3, groups=19),
    Case(2, 33, 33, (4, 9, 11), (3, 3, 3), strides=(1, 2, 2), pads=((1, 1),) * 3, groups=33),
    Case(1, 200, 200, (3, 5, 7), (3, 5, 5), strides=(2, 1, 1), pads=((2, 0), (2, 2), (4, 0)), groups=200),
    Case(1, 7, 14, (6, 5, 9), (2, 3, 3), dilations=(2, 2, 2), pads=((4, 4), (1, 2), (3, 0)), groups=7),
    Case(1, 16, 16, (5, 5, 5), (3, 3, 3), pads=((1, 1),) * 3, groups=8),
]


@pytest.mark.parametrize("c", VOLUMES, ids=str)
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "given"])
def test_volumes(c: Case, constant: bool) -> None:
    """Odd sizes, strides, dilations, groups, and pads that differ from side to side or leave the volume."""
    check(replace(c, constant=constant, expect=""))


@pytest.mark.parametrize("c", WINOGRAD_VOLUMES, ids=str)
def test_winograd_in_volumes(c: Case) -> None:
    """Planes are transformed each for itself; strides and dilations along the depth."""
    check(replace(c, expect="conv winograd F(4x4)"))


@pytest.mark.parametrize("c", [c for c in VOLUMES if c.n], ids=str)
def test_volumes_of_dynamic_size(c: Case) -> None:
    """No size but the channels is known to the compiler."""
    check(replace(c, dynamic=True, expect=""))


@pytest.mark.parametrize("c", IMAGES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_volumes_that_are_images(c: Case, dynamic: bool) -> None:
    """Kernels of one plane or one column."""
    check(replace(c, dynamic=dynamic))


@pytest.mark.parametrize("c", [replace(c, expect="conv depthwise 3-D") for c in DEPTHWISE], ids=str)
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "given"])
def test_depthwise_volumes(c: Case, constant: bool) -> None:
    """A channel, or a small group, of its own."""
    check(replace(c, constant=constant))


@pytest.mark.parametrize(
    "c",
    [
        Case(1, 17, 33, (41,), (5,), strides=(2,), pads=((3, 1),)),
        Case(2, 30, 18, (19,), (3,), dilations=(4,), pads=((8, 0),), groups=3),
        Case(1, 30, 30, (25,), (4,), pads=((3, 0),), groups=30, expect="conv depthwise"),
        Case(2, 20, 40, (9, 11), (3, 3), pads=((1, 1), (1, 1)), expect=""),
        Case(1, 3, 7, (13, 12), (7, 2), strides=(2, 3), dilations=(1, 2), pads=((3, 0), (1, 1))),
        Case(1, 21, 21, (9, 30), (3, 3), pads=((1, 1), (1, 1)), groups=21, expect="conv depthwise"),
        Case(1, 16, 24, (7, 7), (1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_are_inputs(c: Case, dynamic: bool) -> None:
    """They are packed at run time, along one and two axes too."""
    check(replace(c, constant=False, dynamic=dynamic))


def test_weights_that_are_computed() -> None:
    """A hypernetwork: weights that a matmul makes, seen through a reshape and a transpose, for each of two images."""
    rng = np.random.default_rng(0)
    table, z = rng.standard_normal((4, 6 * 5 * 9)).astype(np.float32), rng.standard_normal((1, 4)).astype(np.float32)
    x = rng.standard_normal((2, 6, 7, 8)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["z", "table"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["turned"]),
        helper.make_node("Transpose", ["turned"], ["w"], perm=[1, 0, 3, 2]),
        helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes, "hyper",
        [helper.make_tensor_value_info("x", 1, x.shape), helper.make_tensor_value_info("z", 1, z.shape)],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([6, 5, 3, 3]), "shape")],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (y,) = onnxc.compile(made).run(None, {"x": x, "z": z})
    w = (z.astype(np.float64) @ table).reshape(6, 5, 3, 3).transpose(1, 0, 3, 2)
    want = convolved(Case(2, 6, 5, (7, 8), (3, 3), pads=((1, 1), (1, 1))), x, w)  # type: ignore[arg-type]
    assert np.abs(y - want).max() <= 1e-5 * np.sqrt((want**2).mean())


def test_an_image_that_is_its_own_kernel() -> None:
    """One value as both operands (a correlation with itself)."""
    x = np.random.default_rng(0).standard_normal((3, 3, 5, 4)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "x"], ["y"], pads=[2, 2, 2, 1])
    graph = helper.make_graph([node], "own", [helper.make_tensor_value_info("x", 1, x.shape)],
                              [helper.make_tensor_value_info("y", 1, None)])  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (y,) = onnxc.compile(made).run(None, {"x": x})
    want = convolved(Case(3, 3, 3, (5, 4), (5, 4), pads=((2, 2), (2, 1))), x, x)
    assert np.abs(y - want).max() <= 1e-5 * np.sqrt((want**2).mean())
