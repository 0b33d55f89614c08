"""Convolutions whose results lie planar, as a model's outputs do: the lanes of their epilogues are pixels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxc
from onnxc.codegen.cpp.program import ProgramWriter
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.prepare import prepare
from onnxc.planner.fusion import plan
from onnxc.planner.layout import assign
from onnxc.planner.templates import ENABLED
from onnxc.runtime.cpu import level
from tests.compile_harness import compile_graphs

LEVELS = [
    level(),
    *(level(name) for name in ("x86-64-v3", "x86-64-v2") if level(name).vector_length < level().vector_length),
]


@dataclass(frozen=True)
class Case:
    """A convolution; `rest` is what follows: nothing, "bias", "added" (an image, then Relu) or "row" (one row).
    `computed`: what it reads is no input of the model.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    attributes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    groups: int = 1
    rest: str = ""
    kernel: str = "conv_items"
    computed: bool = False

    def get(self, key: str, default: int) -> tuple[int, ...]:
        """An attribute with one entry for each axis, or for each axis and side."""
        axes = len(self.x) - 2
        return dict(self.attributes).get(key, (default,) * (2 * axes if key == "pads" else axes))

    def exact(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The convolution in float64, tap by tap."""
        axes, (pads, strides, dilations) = len(self.x) - 2, (self.get(*k) for k in DEFAULTS)
        wide = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)])
        wide = wide.reshape(x.shape[0], self.groups, -1, *wide.shape[2:])
        kernels = w.astype(np.float64).reshape(self.groups, -1, *w.shape[1:])
        geometry = list(zip(wide.shape[3:], w.shape[2:], strides, dilations, strict=True))
        out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in geometry]
        y = np.zeros((x.shape[0], self.groups, kernels.shape[1], *out))
        for tap in itertools.product(*map(range, w.shape[2:])):
            places = tuple(
                slice(t * d, t * d + (o - 1) * s + 1, s)
                for t, d, o, s in zip(tap, dilations, out, strides, strict=True)
            )
            y += np.einsum("ngi...,goi->ngo...", wide[(..., *places)], kernels[(..., *tap)])
        return y.reshape(x.shape[0], -1, *out)


DEFAULTS = (("pads", 0), ("strides", 1), ("dilations", 1))
SAME = (("pads", (1, 1, 1, 1)),)

CASES = [
    Case((1, 3, 17, 23), (64, 3, 3, 3), SAME, rest="bias", kernel="conv_row_items"),
    Case((3, 3, 16, 16), (37, 3, 4, 4), (("strides", (4, 4)),), kernel="conv_row_items"),  # images of 16 pixels
    Case((2, 5, 31, 13), (57, 5, 1, 1), rest="added"),
    Case((2, 5, 31, 13), (7, 5, 1, 1), rest="added", kernel="conv_px_items"),
    Case((2, 40, 9, 11), (33, 40, 1, 1), (("strides", (2, 2)),), rest="row"),
    Case((1, 2, 20, 3), (10, 2, 5, 2), (("pads", (4, 1, 0, 1)), ("dilations", (2, 1)))),
    Case((1, 2, 20, 13), (2, 2, 5, 2), (("pads", (4, 1, 0, 1)), ("dilations", (2, 1))), kernel="conv_px_items"),
    Case((2, 24, 14, 19), (51, 8, 3, 3), SAME, groups=3, rest="bias", kernel="conv_wino_items<"),
    Case((1, 16, 9, 33), (34, 8, 5, 5), (("pads", (2, 2, 2, 2)),), groups=2, rest="added"),
    Case((1, 1, 211), (18, 1, 10), (("strides", (5,)),), rest="bias", kernel="conv_row_items"),
    Case((5, 1, 64), (70, 1, 1), rest="added"),
    Case((2, 3, 5, 7, 6), (20, 3, 2, 3, 3), (("pads", (1, 0, 1, 0, 1, 1)),), rest="bias"),
    Case((2, 4, 5, 7, 9), (18, 4, 1, 3, 3), (("pads", (0, 1, 1, 0, 1, 1)),)),  # planes that are images
    Case((2, 4, 6, 5, 7), (58, 4, 3, 1, 1), (("pads", (1, 0, 0, 1, 0, 0)),)),  # images that are rows
    Case((2, 96, 19, 37), (70, 96, 3, 3), SAME, rest="added", kernel="conv_wino_items<"),
    Case((2, 96, 17, 50), (64, 96, 3, 3), (("pads", (2, 3, 2, 3)), ("dilations", (2, 3))), kernel="conv_wino_items<"),
    Case((1, 96, 211), (64, 96, 3), (("pads", (8, 0)), ("dilations", (4,))), kernel="conv_wino_items<1, "),
    Case((1, 64, 41, 12), (64, 64, 3, 1), (("pads", (1, 0, 1, 0)),), kernel="conv_wino_items<4, 1, "),
    Case((2, 19, 13, 35), (19, 1, 3, 3), SAME, groups=19, rest="bias", kernel="conv_dw_items", computed=True),
    Case((2, 19, 13, 35), (19, 1, 3, 3), SAME, groups=19, rest="bias", kernel="conv_px_items"),
    Case((3, 1, 211), (1, 1, 25), (("pads", (12, 12)),), rest="added", kernel="conv_px_items"),
    Case((1, 40, 30, 37), (3, 40, 9, 9), (("pads", (4, 4, 4, 4)),), rest="bias", kernel="conv_px_items", computed=True),
    Case((2, 7, 25, 41), (3, 7, 3, 2), (("strides", (2, 3)), ("pads", (1, 0, 1, 1))), kernel="conv_px_items"),
    Case((1, 12, 31, 23), (6, 2, 3, 3), (("strides", (2, 1)),), 6, "row", "conv_px_items"),
    Case((2, 3, 7, 9, 19), (2, 3, 3, 3, 3), (("pads", (1,) * 6), ("strides", (1, 2, 1))), kernel="conv_px_items"),
    Case((2, 3, 6, 9, 23), (3, 1, 3, 3, 3), (("pads", (2, 1, 1, 2, 1, 1)),), 3, "bias", "conv_px_items"),
    Case((1, 64, 23, 23), (64, 1, 7, 7), (("strides", (2, 2)), ("pads", (3, 3, 3, 3))), 64, "", "conv_dw_items", True),
    Case((1, 64, 25, 25), (64, 1, 3, 3), (("strides", (2, 2)), ("pads", (1, 1, 1, 1))), 64, kernel="conv_px_items"),
    Case((1, 64, 25, 25), (64, 1, 5, 5), (("pads", (2, 2, 2, 2)),), 64, kernel="conv_dw_items"),
    Case((1, 20, 29, 5), (20, 1, 11, 1), (("pads", (5, 0, 5, 0)),), 20, "added", "conv_dw_items"),
    Case((2, 18, 4, 9, 7), (18, 1, 3, 3, 3), (("pads", (1,) * 6),), 18, kernel="conv_dw3_items"),
]


def build(case: Case, turned: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    """The model, its inputs, and what they give in float64; with `turned`, its result has the channels last."""
    rng, fixed = np.random.default_rng(0), np.random.default_rng(1)  # of inputs, and of weights
    x, w = (r.standard_normal(s).astype(np.float32) for r, s in ((rng, case.x), (fixed, case.w)))
    want = case.exact(x, w)
    weights, inputs, nodes = {"w": w}, {"x": x}, []
    attributes: dict[str, Any] = {k: list(v) for k, v in case.attributes}
    if case.computed:
        nodes.append(helper.make_node("Neg", ["x"], ["m"]))
        want = -want
    source = "m" if case.computed else "x"
    nodes.append(helper.make_node("Conv", [source, "w"], ["c"], group=case.groups, **attributes))
    if case.rest == "bias":
        weights["b"] = fixed.standard_normal((1, want.shape[1], *(1,) * (want.ndim - 2))).astype(np.float32)
        nodes.append(helper.make_node("Add", ["c", "b"], ["y"]))
        want = want + weights["b"]
    elif case.rest in ("added", "row"):
        shape = want.shape if case.rest == "added" else want.shape[-1:]
        inputs["r"] = rng.standard_normal(shape).astype(np.float32)
        nodes += [helper.make_node("Add", ["c", "r"], ["s"]), helper.make_node("Relu", ["s"], ["y"])]
        want = np.maximum(want + inputs["r"], 0)
    else:
        nodes.append(helper.make_node("Identity", ["c"], ["y"]))
    if turned:
        nodes.append(helper.make_node("Transpose", ["y"], ["z"], perm=[0, *range(2, want.ndim), 1]))
    given = [helper.make_tensor_value_info(k, 1, v.shape) for k, v in inputs.items()]
    out = [helper.make_tensor_value_info("z" if turned else "y", 1, None)]
    graph = helper.make_graph(nodes, "g", given, out, [numpy_helper.from_array(v, k) for k, v in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), inputs, want


def primitives(model: onnx.ModelProto) -> Graph:
    """The graph before the last pass, which `compile_graphs` runs."""
    graph = onnx_file.load(model)
    for _, run in passes(PassOptions())[:-1]:
        graph = run(graph)
    return graph


def in_turn(turn: int, of: int) -> list[Case]:
    """Of each kernel every so manieth case, and one at least; all of them if `of` is 1."""
    found = []
    for kernel in dict.fromkeys(case.kernel for case in CASES):
        own = [case for case in CASES if case.kernel == kernel]
        found += own[turn % min(of, len(own)) :: of]
    return found


def _sets() -> list[Any]:
    """All cases for this machine's vectors; for others each kernel, by cases in turn (`-m exhaustive`: by all)."""
    own, *others = LEVELS
    found = [pytest.param(own, CASES, id=str(own.vector_length))]
    for k, cpu in enumerate(others):
        found.append(pytest.param(cpu, in_turn(k, len(others)), id=str(cpu.vector_length)))
        every = pytest.mark.exhaustive
        found.append(pytest.param(cpu, CASES, id=f"{cpu.vector_length}, every case", marks=every))
    return found


@pytest.mark.parametrize(("cpu", "cases"), _sets())
def test_against_float64_and_channels_last(cpu: Any, cases: list[Case]) -> None:
    """Odd sizes, batches, every kernel and axis: near the definition, and the bits of the same result channels-last,
    unless lanes are pixels from the beginning: a sum has another order then.
    """
    graphs = [primitives(build(case, turned)[0]) for case in cases for turned in (False, True)]
    compiled = compile_graphs(graphs, cpu=cpu)
    for k, case in enumerate(cases):
        _, inputs, want = build(case, False)
        planar, last = compiled[2 * k : 2 * k + 2]
        (y,), (z,), (one,) = planar(*inputs.values()), last(*inputs.values()), planar(*inputs.values(), threads=1)
        limit = 3e-5 * np.sqrt((want**2).mean())
        assert np.abs(y - want).max() <= limit, case
        if case.kernel == "conv_px_items":
            assert np.abs(np.moveaxis(z, -1, 1) - want).max() <= limit, case
        else:
            np.testing.assert_array_equal(y, np.moveaxis(z, -1, 1), str(case))
        np.testing.assert_array_equal(y, one, str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lanes_are_pixels(case: Case) -> None:
    """The kernel that is meant has such an epilogue, and stores no lane by itself; but not where channels are last, and
    more than one.
    """
    text = {turned: _conv(primitives(build(case, turned)[0])) for turned in (False, True)}
    assert case.kernel in text[False] and "conv_across(" in text[False]
    assert "sts(" not in text[False]
    assert ("conv_across(" in text[True]) == (case.w[0] == 1)


def _conv(graph: Graph) -> str:
    """The kernel of a graph's convolution, for vectors of 16 lanes."""
    graph = prepare(graph)
    kernels = ProgramWriter(plan(graph, assign(graph, ENABLED)), lanes=16).write().kernels
    (text,) = (k for k in kernels.values() if "ConvShape" in k)
    return text


def test_sizes_that_are_not_known() -> None:
    """One program for images of several sizes, of fewer pixels than a vector has lanes among them."""
    case = Case((1, 8, 5, 5), (20, 8, 3, 3), SAME, rest="bias")
    model, _, _ = build(case, False)
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], ("h", "w"), strict=True):
        dim.dim_param = name
    compiled = onnxc.compile(model, cache=False, threads=2)
    for size in ((1, 1), (2, 3), (17, 16), (5, 33)):
        _, inputs, want = build(Case((1, 8, *size), case.w, SAME, rest="bias"), False)
        assert np.abs(np.asarray(compiled(inputs["x"])[0]) - want).max() <= 2e-5 * np.sqrt((want**2).mean())
