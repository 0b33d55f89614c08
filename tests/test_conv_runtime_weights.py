"""Convolutions of training: with weights that are known at run time only, and by those weights.

    conv            forward; its gradient by the image is a conv with mirrored weights
    conv_weights    the gradient by the weights

Each runs compiled in float32 and is compared with the interpreter in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest

from onnxc.autodiff.reverse import gradients
from onnxc.codegen.cpp import convolution
from onnxc.codegen.cpp.conv_algorithms import STRIDED, WINOGRAD
from onnxc.export.model import to_onnx
from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.expr import Sym
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.simplify import eliminate_dead
from onnxc.passes.weight_gradients import find_weight_gradients
from onnxc.primitives.builder import Builder
from onnxc.primitives.contraction import window_size
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from onnxc.runtime.cpu import level, machine
from tests.compile_harness import compile_graphs
from tests.gradient_harness import agrees, floats

# images, channels of a group in and out, groups, spatial, kernel, strides, dilations, low, high
CASES: list[tuple[Any, ...]] = [
    (1, 1, 1, 1, (1, 1), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
    (2, 5, 7, 1, (7, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (3, 3, 17, 1, (13, 11), (7, 7), (2, 2), (1, 1), (3, 3), (3, 3)),
    (4, 64, 64, 1, (6, 7), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
    (2, 33, 130, 1, (9, 8), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
    (2, 32, 31, 1, (9, 8), (1, 1), (2, 2), (1, 1), (0, 0), (0, 0)),
    (2, 34, 20, 1, (17, 15), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (1, 70, 3, 1, (9, 9), (3, 3), (1, 1), (2, 3), (2, 3), (2, 3)),
    (2, 4, 6, 3, (8, 7), (3, 2), (1, 2), (1, 1), (1, 0), (0, 1)),
    (2, 20, 36, 2, (8, 7), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (2, 1, 1, 40, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (2, 1, 1, 17, (9, 20), (5, 5), (2, 2), (1, 1), (2, 2), (2, 2)),
    (1, 1, 1, 65, (12, 13), (3, 3), (1, 1), (2, 2), (2, 2), (2, 2)),
    (2, 1, 2, 24, (9, 8), (3, 3), (2, 1), (1, 1), (1, 1), (1, 1)),
    (2, 4, 4, 9, (7, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (1, 1, 1, 16, (3, 3), (7, 11), (1, 1), (1, 1), (3, 5), (3, 5)),  # more padding than image
    (2, 8, 8, 1, (17,), (5,), (3,), (1,), (2,), (1,)),
    (2, 1, 1, 20, (33,), (4,), (1,), (2,), (3,), (3,)),
    (2, 5, 6, 1, (4, 5, 6), (2, 3, 3), (1, 2, 1), (1, 1, 1), (0, 1, 1), (1, 1, 1)),
    (1, 1, 1, 18, (4, 5, 6), (3, 3, 3), (1, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    (0, 3, 4, 1, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
]


def _sizes(case: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of the image, the weights and the result, and the attributes of conv."""
    n, ci, co, groups, spatial, kernel, strides, dilations, low, high = case
    rows = zip(spatial, kernel, strides, low, high, dilations, strict=True)
    out = tuple(int(window_size(*row)) for row in rows)  # type: ignore[arg-type]
    attrs = {"strides": strides, "dilations": dilations, "low": low, "high": high, "groups": groups}
    return (n, ci * groups, *spatial), (co * groups, ci, *kernel), (n, co * groups, *out), attrs


def _graph(case: tuple[Any, ...], what: str, dynamic: bool, dtype: dtypes.DType) -> Graph:
    """forward: conv. step: the weights after a step of an optimizer. Else the gradients by `image` or `weights`."""
    image, weights, result, attrs = _sizes(case)
    b = Builder()

    def given(shape: tuple[int, ...], name: str) -> Value:
        images = dynamic and name != "w"
        return b.input(TensorType(dtype, (Sym("s0"), *shape[1:]) if images else shape), name)

    if what == "forward":
        out = b.one("conv", given(image, "x"), given(weights, "w"), **attrs)
    elif what == "image":
        x, w, dy = given(image, "x"), given(weights, "w"), given(result, "dy")
        y = b.one("conv", x, w, **attrs)
        (found,) = gradients(b, list(b.nodes), {y.id: dy}, [x])
        assert found is not None
        out = found
    else:
        x, dy = given(image, "x"), given(result, "dy")
        out = b.one("conv_weights", x, dy, kernel=weights[2:], **attrs)
        if what == "step":
            out = b.sub(given(weights, "w"), b.mul(out, b.full((), 0.25, dtype)))
    graph = eliminate_dead(b.graph([out]))
    verify(graph)
    return graph


# What is computed, and whether the count of images is symbolic.
WANTED = (("forward", True), ("image", False), ("weights", True), ("step", False))


def _agrees(case: tuple[Any, ...], wanted: Sequence[tuple[str, bool]] = WANTED, cpu: str = "native") -> list[str]:
    """Within the rounding error of its sum, and the same bits with any number of threads. Gives the kernels' kinds."""
    image, weights, result, _ = _sizes(case)
    programs = compile_graphs([_graph(case, what, dynamic, dtypes.float32) for what, dynamic in wanted], cpu=level(cpu))
    shapes = {"x": image, "dy": result, "w": weights}
    rng = np.random.default_rng(5)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for (what, dynamic), program in zip(wanted, programs, strict=True):
        exact_graph = _graph(case, what, dynamic, dtypes.float64)
        arrays = [values[name] for name in exact_graph.input_names]
        (exact,) = interpret(exact_graph, [a.astype(np.float64) for a in arrays])
        (got,) = program(*arrays, threads=1)
        terms = math.prod(weights[1:]) if what in ("forward", "image") else math.prod((image[0], *result[2:]))
        np.testing.assert_allclose(got, exact, 1e-5, 4e-6 * max(1.0, terms**0.5), err_msg=f"{what}, {dynamic=}")
        for threads in (2, 3):
            other = program(*arrays, threads=threads)[0]
            assert other.tobytes() == got.tobytes(), f"{what}, {dynamic=}: {threads} threads give other bits"
    return [call.kind for program in programs for call in program.program.calls]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case: tuple[Any, ...]) -> None:
    _agrees(case)


@pytest.mark.skipif(machine() != "x86_64", reason="a level of x86")
@pytest.mark.parametrize("cpu", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.parametrize("case", CASES[2::6], ids=str)
def test_narrower_vectors(case: tuple[Any, ...], cpu: str) -> None:
    _agrees(case, cpu=cpu)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("tile", "stride"), [*((m, 1) for m in WINOGRAD), *((m, 2) for m in STRIDED)], ids=str)
def test_winograd(tile: tuple[int, int], stride: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile, which the cost model takes for larger maps only: weights as they lie, and mirrored."""
    chosen = (WINOGRAD if stride == 1 else STRIDED)[tile]
    monkeypatch.setattr(convolution, "costs", lambda ways, *_: [k is not chosen for k in ways])
    kernel = tuple(3 if m > 1 else 1 for m in tile)
    low = tuple(k // 2 for k in kernel)
    case = (2, 37, 35, groups, (9, 10), kernel, (stride, stride), (1, 1), low, low)
    kinds = _agrees(case, [("forward", groups > 1), ("image", False)])
    assert kinds.count(f"conv {chosen.name}") == (2 if stride == 1 else 1)


# ------------------------------------------------------------ conv_weights as a primitive


@pytest.mark.parametrize("case", [c for c in CASES if len(c[5]) < 3 and math.prod(c[4]) < 90], ids=str)
def test_derivatives(case: tuple[Any, ...]) -> None:
    """It is linear in the image and in the cotangent: both derivatives, against central differences."""
    image, weights, result, attrs = _sizes((*case[:1], *(min(c, 2) for c in case[1:4]), *case[4:]))
    agrees(
        lambda b, x, dy: b.one("conv_weights", x, dy, kernel=weights[2:], **attrs),
        floats(*image), floats(*result, seed=1), dynamic=False,
    )  # fmt: skip


# ONNX's Conv has no batch of nothing; and of a map far smaller than the kernel the gradient is left as it is.
FOUND = [c for c in CASES if c[0] and 4 * math.prod(_sizes(c)[2][2:]) >= math.prod(c[5])]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", FOUND, ids=str)
def test_is_found_again_in_onnx(case: tuple[Any, ...], dynamic: bool) -> None:
    """As a Conv of exchanged maps it goes through ONNX, and comes back as itself."""
    image, _, result, _ = _sizes(case)
    model = to_onnx(_graph(case, "weights", dynamic, dtypes.float32))
    graph = onnx_file.load(model)
    for _, run in passes(PassOptions()):
        graph = run(graph)
    (found,) = (n for n in graph.nodes if n.op.startswith("conv"))
    assert found.op == "conv_weights"
    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for shape in (image, result))
    (exact,) = interpret(_graph(case, "weights", dynamic, dtypes.float32), [x, dy])
    (again,) = interpret(graph, [x, dy])
    scale = 1e-5 * math.prod((image[0], *result[2:])) ** 0.5
    np.testing.assert_allclose(again, exact, 1e-4, scale)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": x, "dy": dy})
    np.testing.assert_allclose(theirs, exact, 1e-4, scale)


def test_computed_weights_stay_a_convolution() -> None:
    """A kernel that something transposes is not a map for that: the result is an image here."""
    b = Builder()
    x, w = (
        b.input(TensorType(dtypes.float32, shape), name) for shape, name in (((1, 8, 20, 20), "x"), ((8, 6, 3, 3), "w"))
    )
    plain = {"strides": (1, 1), "dilations": (1, 1), "low": (1, 1), "high": (1, 1), "groups": 1}
    graph = find_weight_gradients(b.graph([b.one("conv", x, b.swap(w, 0, 1), **plain)]))
    assert [n.op for n in graph.nodes] == ["transpose", "conv"]


@pytest.mark.parametrize("axis", [2, 3])
def test_the_image_is_part_of_a_larger_one(axis: int) -> None:
    """Windows that reach beyond a part see zeros there, not what was cut off."""
    b = Builder()
    size = [1, 4, 3, 3]
    size[axis] = 4
    x, dy = (b.input(TensorType(dtypes.float32, tuple(s)), name) for s, name in ((size, "x"), ((1, 8, 3, 3), "dy")))
    part = b.slice(x, axis, 0, 3)
    plain = {"strides": (1, 1), "dilations": (1, 1), "low": (1, 1), "high": (1, 1), "groups": 1}
    graph = b.graph([b.one("conv", b.swap(part, 0, 1), b.swap(dy, 0, 1), **plain)])
    found = find_weight_gradients(graph)
    assert any(n.op == "conv_weights" for n in found.nodes)
    inputs = [floats(*shape, seed=k).astype(np.float32) for k, shape in enumerate((size, (1, 8, 3, 3)))]
    (exact,), (again,) = interpret(graph, inputs), interpret(found, inputs)
    np.testing.assert_allclose(again, exact, 1e-4, 1e-4)


@pytest.mark.parametrize("axis", [2, 3])
def test_the_image_is_mirrored(axis: int) -> None:
    """A slice that turns an axis around leaves all sizes as they are, and is no cut of another axis."""
    b = Builder()
    size = (1, 4, 5, 5)
    x, dy = (b.input(TensorType(dtypes.float32, s), name) for s, name in ((size, "x"), ((1, 8, 5, 5), "dy")))
    plain = {"strides": (1, 1), "dilations": (1, 1), "low": (0, 0), "high": (0, 0), "groups": 1}
    graph = b.graph([b.one("conv", b.swap(b.flip(x, [axis]), 0, 1), b.swap(dy, 0, 1), **plain)])
    found = find_weight_gradients(graph)
    assert any(n.op == "conv_weights" for n in found.nodes)
    inputs = [floats(*shape, seed=k).astype(np.float32) for k, shape in enumerate((size, (1, 8, 5, 5)))]
    (exact,), (again,) = interpret(graph, inputs), interpret(found, inputs)
    np.testing.assert_allclose(again, exact, 1e-4, 1e-4)
