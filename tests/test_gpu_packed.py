"""Products with packed weights on a GPU, kernels in Triton's interpreter, beside the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from tests.targets import needs_triton
from tests.triton_simulator import Simulator

pytestmark = needs_triton
Array = np.ndarray[Any, Any]
F32 = np.float32
KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}

# (N, K, bits, block, zero points): blocks of 16 to 256, sums that end within a block or within a byte's codes. (Smaller
# matrices are expanded while a model is read.)
SHAPES = [
    (77, 300, 4, 16, "none"), (66, 384, 4, 32, "packed"), (37, 500, 4, 128, "packed"), (70, 270, 8, 16, "none"),
    (40, 480, 8, 32, "packed"), (65, 512, 4, 256, "none"), (51, 400, 2, 32, "packed"), (33, 570, 4, 64, "floats"),
]  # fmt: skip


def n_bits(shapes: Sequence[tuple[int, int, int, int, str]], rows: int | str, kind: type = np.float32) -> bytes:
    """A product by each of the matrices, as MatMulNBits has them."""
    rng = np.random.default_rng(7)
    nodes, inputs, outputs, weights = [], [], [], []
    element = KINDS[np.dtype(kind)]
    for i, (n, k, bits, block, zeros) in enumerate(shapes):
        groups = -(-k // block)
        codes = rng.integers(0, 256, (n, groups, block * bits // 8), dtype=np.uint8)
        made = {f"q{i}": codes, f"s{i}": rng.uniform(0.01, 0.1, n * groups).astype(kind)}
        if zeros == "packed":
            made[f"z{i}"] = rng.integers(0, 256, n * -(-groups * bits // 8), dtype=np.uint8)
        elif zeros == "floats":
            made[f"z{i}"] = rng.uniform(0, 1 << bits, n * groups).astype(kind)
        weights += [numpy_helper.from_array(array, name) for name, array in made.items()]
        attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
        nodes.append(helper.make_node("MatMulNBits", [f"x{i}", *made], [f"y{i}"], domain="com.microsoft", **attrs))
        inputs.append(helper.make_tensor_value_info(f"x{i}", element, [rows, k]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", element, [rows, n]))
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains).SerializeToString()


def factors(shapes: Sequence[tuple[int, int, int, int, str]], rows: int, kind: type = np.float32) -> list[Array]:
    rng = np.random.default_rng(rows)
    return [rng.standard_normal((rows, shape[1])).astype(kind) for shape in shapes]


def check(simulator: Simulator, model: bytes, inputs: list[Array], tolerance: float, **options: Any) -> str:
    """The source, after a comparison; errors are a share of the largest number."""
    ours = onnxc.compile(model, cache=False)(*inputs).values()
    found = simulator.run(model, inputs, **options)
    assert found.kinds.count("matmul") >= len(inputs)
    for a, b in zip(ours, found.outputs, strict=True):
        assert a.dtype == b.dtype
        most = float(np.abs(a).max(initial=0))
        np.testing.assert_allclose(b.astype(F32), a.astype(F32), rtol=0, atol=tolerance * most)
    return found.source


def test_products_of_few_rows(simulator: Simulator) -> None:
    source = check(simulator, n_bits(SHAPES, 3), factors(SHAPES, 3), 2e-6)
    assert source.count("ox_codes") >= 8


def test_rows_that_are_known_when_it_runs(simulator: Simulator) -> None:
    """One kernel for few rows, one for many; each of them does nothing where the other one works."""
    model = n_bits(SHAPES[:1], "rows")
    for rows in (0, 16, 17):
        check(simulator, model, factors(SHAPES[:1], rows), 2e-6)


@pytest.mark.parametrize(("dtype", "rows"), [("float16", 1), ("bfloat16", 20)])
def test_halves(dtype: str, rows: int, simulator: Simulator) -> None:
    """Of a model in float16, and of one that is converted: the codes are multiplied as halves."""
    shapes = [SHAPES[k] for k in (1, 7)]
    check(simulator, n_bits(shapes, rows, np.float16), factors(shapes, rows, np.float16), 2e-3)
    source = check(simulator, n_bits(shapes, rows), factors(shapes, rows), 1e-2, dtype=dtype)
    assert source.count(f"scale0.to(tl.float32)).to(tl.{dtype})") > 0


def test_blocks_that_no_turn_fits(simulator: Simulator) -> None:
    """Blocks of 192, of which parts of 64 rows have one each; a matrix of many rows is expanded."""
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.integers(-128, 128, (448, 48)).astype(np.int8), "w")
    scales = numpy_helper.from_array(rng.uniform(0.01, 0.1, (3, 48)).astype(F32), "scales")
    nodes = [helper.make_node("DequantizeLinear", ["w", "scales"], ["wide"], axis=0, block_size=192)]
    inputs = [("x", [2, 3, 448]), ("long", [80, 448])]
    nodes += [helper.make_node("MatMul", [name, "wide"], [f"{name}_y"]) for name, _ in inputs]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs],
        [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None) for name, _ in inputs], [w, scales],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString()
    arrays = [rng.standard_normal(dims).astype(F32) for _, dims in inputs]
    source = check(simulator, model, arrays, 2e-6)
    assert source.count("ox_codes") == 2  # the codes of a word


def test_machine_code() -> None:
    model = n_bits(SHAPES[:1], 1, np.float16)
    assert "ox_codes" in onnxc.compile(model, target="cuda:sm_80,sm_90", cache=False).source
