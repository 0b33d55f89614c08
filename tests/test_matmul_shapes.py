"""Products of all shapes of operands in whole models: vectors, one row, small and constant batches, against float64."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxc
from onnxc.runtime.model import CpuModel
from tests.targets import is_gpu

pytestmark = pytest.mark.every_target

Array = np.ndarray
CASES = {
    "one_row": ((1, 77), (77, 1000)),
    "one_row_tail": ((1, 600), (600, 50)),
    "one_row_wide": ((1, 300), (300, 4111)),
    "rows_one_by_one": ((12, 1, 65), (12, 65, 50)),
    "vector": ((131, 1037), (1037, 1)),
    "vectors": ((5, 7, 33), (5, 33, 1)),
    "vector_for_all": ((5, 7, 33), (33, 1)),
    "inner": ((1, 4097), (4097, 1)),
    "outer": ((37, 1), (1, 41)),
    "small_and_many": ((300, 7, 11), (300, 11, 5)),
    "smallest": ((1000, 4, 4), (1000, 4, 4)),
    "near": ((12, 65, 63), (12, 63, 64)),
    "two_batches": ((3, 1, 17, 19), (1, 4, 19, 65)),
    "rows_collide": ((25, 1024), (1024, 100)),
    "few_rows": ((20, 8, 400), (20, 400, 37)),
    "few_rows_share": ((5, 3, 4, 70), (1, 3, 70, 33)),
    "some_rows": ((9, 12, 100), (9, 100, 50)),
}


def _model(operands: dict[str, tuple[Array, Array]], constant: bool, turned: bool, rows: bool) -> onnx.ModelProto:
    """relu(a @ b + 1/4) of each pair. Maybe b is constant, or its last axes lie swapped; maybe the first dim of a is
    known only at run time."""
    dtype = next(iter(operands.values()))[0].dtype
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    nodes, inputs, outputs, initializers = [], [], [], [numpy_helper.from_array(np.full((), 0.25, dtype), "bias")]
    for k, (name, (a, b)) in enumerate(operands.items()):
        stored = np.swapaxes(b, -1, -2) if turned else b
        inputs.append(helper.make_tensor_value_info(f"a_{name}", kind, [f"N{k}" if rows else len(a), *a.shape[1:]]))
        if constant:
            initializers.append(numpy_helper.from_array(np.ascontiguousarray(stored), f"b_{name}"))
        else:
            inputs.append(helper.make_tensor_value_info(f"b_{name}", kind, stored.shape))
        swap = [*range(b.ndim - 2), b.ndim - 1, b.ndim - 2] if turned else [*range(b.ndim)]
        nodes += [helper.make_node("Transpose", [f"b_{name}"], [f"t_{name}"], perm=swap),
                  helper.make_node("MatMul", [f"a_{name}", f"t_{name}"], [f"p_{name}"]),
                  helper.make_node("Add", [f"p_{name}", "bias"], [f"s_{name}"]),
                  helper.make_node("Relu", [f"s_{name}"], [name])]  # fmt: skip
        outputs.append(helper.make_tensor_value_info(name, kind, None))
    graph = helper.make_graph(nodes, "products", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _operands(dtype: type[np.floating] = np.float32) -> dict[str, tuple[Array, Array]]:
    rng = np.random.default_rng(3)
    return {n: tuple(rng.standard_normal(s).astype(dtype) for s in shapes) for n, shapes in CASES.items()}  # type: ignore[misc]


@pytest.mark.parametrize("constant", [False, True], ids=["given", "constant"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rows", [False, True], ids=["static", "dynamic"])
def test_products(constant: bool, turned: bool, rows: bool) -> None:
    _check(_operands(), constant, turned, rows, 1e-5, 2e-6)


@pytest.mark.cpu_only("the template for float64")
@pytest.mark.parametrize("constant", [False, True], ids=["given", "constant"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_products_of_float64(constant: bool, turned: bool) -> None:
    _check(_operands(np.float64), constant, turned, False, 1e-14, 4e-15)


def _check(
    operands: dict[str, tuple[Array, Array]], constant: bool, turned: bool, rows: bool, rtol: float, atol: float
) -> None:
    compiled = onnxc.compile(_model(operands, constant, turned, rows))
    assert isinstance(compiled, CpuModel) or is_gpu()
    given: dict[str, Array] = {}
    for name, (a, b) in operands.items():
        given[f"a_{name}"] = a
        if not constant:
            given[f"b_{name}"] = np.ascontiguousarray(np.swapaxes(b, -1, -2)) if turned else b
    compiled.threads = 1
    one = compiled(**given)
    compiled.threads = 2
    two = compiled(**given)
    for name, (a, b) in operands.items():
        np.testing.assert_array_equal(one[name], two[name], name)
        wider = np.float64 if a.dtype == np.float32 else np.longdouble
        want = np.maximum(a.astype(wider) @ b.astype(wider) + 0.25, 0)
        np.testing.assert_allclose(one[name], want, rtol, atol * np.sqrt(a.shape[-1]), err_msg=name)


@pytest.mark.cpu_only("the C++ source")
def test_matrices_of_a_constant_batch_are_packed_at_compile_time() -> None:
    operands = {n: x for n, x in _operands().items() if n in ("near", "two_batches")}
    assert "mm_pack_b(" not in onnxc.compile(_model(operands, True, False, False)).source
    assert "mm_pack_b(" in onnxc.compile(_model(operands, False, False, False)).source


@pytest.mark.cpu_only("the C++ source")
def test_few_rows_meet_columns_that_stay_where_they_lie() -> None:
    """To turn a whole matrix into panels in memory takes several times as long as its product with few rows."""
    names = ("one_row", "few_rows", "few_rows_share", "some_rows", "rows_collide")
    operands = {n: x for n, x in _operands().items() if n in names}
    source = onnxc.compile(_model(operands, False, True, False)).source
    assert source.count("mv_few_task(") == 3 and source.count("mm_loose_task(") == 2 and "mm_pack_b(" not in source
    (panels,) = re.findall(r"1024, (\d+), scratch", source)  # packed at a time, where a panel is read once
    assert int(panels) <= 2
