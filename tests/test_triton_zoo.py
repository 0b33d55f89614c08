"""The zoo's micro graphs through GPU kernels in Triton's interpreter, against the kernels of the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import pytest

import onnxc
from models.zoo.store import MICRO_GRAPHS, ZooModel
from tests.triton_simulator import Simulator

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="GPU kernels need Triton: pip install 'onnxc[cuda]'"
)


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    worker = Simulator()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", MICRO_GRAPHS)
def test_same_answers_as_the_cpu(zoo: Callable[[str], ZooModel], simulator: Simulator, name: str) -> None:
    model = zoo(name)
    inputs = model.inputs()
    wanted = onnxc.compile(model.path)(**inputs).values()
    found = simulator.run(onnx.load(model.path).SerializeToString(), list(inputs.values())).outputs
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()))
