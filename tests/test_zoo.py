"""The zoo: 21 architectures and 10 micro graphs that torch exported, each compiled whole and judged."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest

import onnxc
from models.zoo import store
from onnxc.compiler.stages import Stages, generate
from onnxc.frontends import onnx_file
from onnxc.planner.groups import FusionOptions
from onnxc.runtime.cpu import level
from tests.agreement import assert_agrees, assert_repeats
from tests.targets import is_gpu

pytestmark = pytest.mark.every_target

Zoo = Callable[[str], store.ZooModel]
SMALL = (*store.MICRO_GRAPHS, "mlp", "lstm", "whisper", "t5")
"""What is also compiled without fusion: a kernel a node takes long to compile."""

INDUCTOR: dict[str, Any] = json.loads((store.ROOT / "benchmarks" / "inductor.json").read_text())["models"]


@pytest.fixture(autouse=True)
def freed() -> Any:
    """Weights of half a gigabyte are gone before the next model's are read."""
    yield
    gc.collect()


@pytest.mark.parametrize("name", store.NAMES)
def test_model(zoo: Zoo, name: str) -> None:
    """Agreement, the same bits from each run, and no more kernels than inductor makes: of one compile."""
    model = zoo(name)
    compiled = onnxc.compile(model.path, threads=2)
    inputs = model.inputs()
    assert_agrees(model.path, inputs, compiled)
    assert_repeats(compiled, inputs)
    if name in INDUCTOR and not is_gpu():
        # Without reductions in two stages: they are for speed, and inductor has both stages in one kernel.
        program = generate(onnx_file.load(model.path), level(), FusionOptions(split=False), Stages())
        assert len(program.calls) <= INDUCTOR[name]["sum"]


@pytest.mark.parametrize("name", SMALL)
def test_model_without_fusion(zoo: Zoo, name: str) -> None:
    model = zoo(name)
    fused, single = (onnxc.compile(model.path, fusion=on, attention=on) for on in (True, False))
    assert single.explain().counts["kernels"] >= fused.explain().counts["kernels"]
    assert_agrees(model.path, model.inputs(), single)
