"""The zoo's micro graphs through GPU kernels in Triton's interpreter, against the kernels of the CPU.

The interpreter takes some hundredths of a second for each program of a kernel. Where a kernel's programs all do the
same to other rows, the graph is given fewer rows; it is checked that this changes numbers in the kernels and nothing
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

import onnxc
from models.zoo.store import MICRO_GRAPHS, ZooModel
from tests.targets import needs_triton
from tests.triton_simulator import Request, Simulator, program_of

pytestmark = needs_triton

# Which size of a graph becomes which.
FEWER = {
    "m_gelu_ln": (512, 40), "m_softmax": (12, 2), "m_rms_rope": (512, 40), "m_chain20": (512, 24),
    "m_cheap20": (512, 24), "m_layernorm": (512, 40), "m_transpose_sum": (8, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MICRO_GRAPHS)
def test_same_answers_as_the_cpu(zoo: Callable[[str], ZooModel], simulator: Simulator, name: str) -> None:
    stored = zoo(name)
    model, inputs = onnx.load(stored.path), stored.inputs()
    if name in FEWER:
        old, new = FEWER[name]
        whole, model = model, _resized(model, old, new)
        inputs = {key: _cut(x, old, new) for key, x in inputs.items()}
        assert _kernels(model) == _kernels(whole)
    wanted = onnxc.compile(model)(**inputs).values()
    found = simulator.run(model.SerializeToString(), list(inputs.values())).outputs
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()))


def _cut(x: np.ndarray, old: int, new: int) -> np.ndarray:
    """The array with `new` elements along each axis that has `old`."""
    return np.ascontiguousarray(x[tuple(slice(new if n == old else n) for n in x.shape)])


def _resized(model: ModelProto, old: int, new: int) -> ModelProto:
    """The model with `new` for each size `old`: of inputs, of outputs, of weights, and in shapes."""
    resized = ModelProto()
    resized.CopyFrom(model)
    for tensor in resized.graph.initializer:
        x = numpy_helper.to_array(tensor)
        x = np.where(x == old, new, x) if x.dtype == np.int64 else _cut(x, old, new)
        tensor.CopyFrom(numpy_helper.from_array(x, tensor.name))
    for info in (*resized.graph.input, *resized.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            dim.dim_value = new if dim.dim_value == old else dim.dim_value
    del resized.graph.value_info[:]
    return resized


def _kernels(model: ModelProto) -> list[str]:
    """The kernels of a model, without their numbers."""
    _, program = program_of(Request(model.SerializeToString(), []))
    return [re.sub(r"\d+", "0", text) for text in program.kernels.values()]
