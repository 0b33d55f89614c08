"""Every stage of a compile writes out as ONNX, and onnxruntime gives the same answer for each."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models import build
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.ir.text import constants, from_text, to_text
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify

SMALL: dict[str, dict[str, int]] = {
    "bert": {"layers": 1, "width": 32, "heads": 2},
    "gpt2": {"layers": 1, "width": 32, "heads": 2},
    "resnet50": {"size": 32},
}


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feed)


@pytest.mark.parametrize("name", SMALL)
def test_every_stage_runs_in_onnxruntime(name: str) -> None:
    model = build.build(name, **SMALL[name])
    feed = build.random_inputs(model)
    expected = run(model, feed)
    graph = onnx_file.load(model)
    for stage, transform in passes(PassOptions()):
        graph = transform(graph)
        verify(graph, after=stage)
        for found, wanted in zip(run(to_onnx(graph), feed), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max(), err_msg=stage)


@pytest.mark.parametrize("name", SMALL)
def test_text_of_the_last_stage_parses_back(name: str) -> None:
    model = build.build(name, **SMALL[name])
    graph = onnx_file.load(model)
    for _, transform in passes(PassOptions()):
        graph = transform(graph)
    text = to_text(graph)
    assert to_text(from_text(text, constants(graph))) == text


def test_interpreter_agrees_after_all_passes() -> None:
    model = build.build("bert", **SMALL["bert"])
    feed = build.random_inputs(model)
    graph = onnx_file.load(model)
    for _, transform in passes(PassOptions()):
        graph = transform(graph)
    found = interpret(graph, [feed[n] for n in graph.input_names])
    for a, b in zip(found, run(model, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
