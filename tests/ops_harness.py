"""Runs one ONNX operator through its definition and numpy, and compares with onnxruntime.

    check(Case("Gather", [x, index], {"axis": 1}))

Where onnxruntime has no kernel for an op or a type, onnx's reference evaluator is the judge.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxc.frontends.onnx_file import load
from onnxc.ir import dtypes
from tests.targets import evaluate

Array = np.ndarray
# The highest opset that the installed onnxruntime takes without a warning.
NEWEST = 24
# Operators in which onnxruntime multiplies uint8 by int8.
OF_BYTES = frozenset({
    "ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QAttention", "QGemm", "QLinearConv", "QLinearMatMul",
})  # fmt: skip


@functools.cache
def onnxruntime_multiplies_bytes() -> bool:
    """Whether its products of uint8 and int8 are exact: without VNNI they are added in pairs that saturate at 16 bits.

    Where they are not, int8 operands of tests keep to 7 bits, with which no pair does.
    """
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    shapes = (("a", 2, [4, 64]), ("b", 3, [64, 16]), ("y", 6, None))
    infos = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in shapes]
    graph = helper.make_graph([node], "bytes", infos[:2], infos[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"a": np.full((4, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)})
    return bool((y == 64 * 255 * 127).all())


@dataclass
class Case:
    """One node: its inputs (None where absent), attributes, and which inputs are constants of the model.

    `dynamic` says whether it must also work where the dims of the other inputs are known only at run time:
    all but those of size 1 (which broadcast) and of the sizes in `keep`. Dims of one size have one name.
    """

    op: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 22
    const: Sequence[int] = ()
    outputs: int = 1
    domain: str = ""
    dynamic: bool = True
    keep: Sequence[int] = ()
    rtol: float | None = None
    atol: float | None = None
    oracle: str = "onnxruntime"

    def __post_init__(self) -> None:
        self.inputs = [None if x is None else np.asarray(x) for x in self.inputs]
        if self.op in OF_BYTES and self.oracle == "onnxruntime" and not onnxruntime_multiplies_bytes():
            self.inputs = [_narrow(x) for x in self.inputs]

    def __str__(self) -> str:
        shapes = "-".join("x".join(map(str, x.shape)) or "scalar" if x is not None else "none" for x in self.inputs)
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items() if not isinstance(v, Array))
        return f"{self.op}@{self.opset}-{shapes}-{attrs}"[:120]


def _narrow(x: Array | None) -> Array | None:
    return np.asarray(np.clip(x, -64, 64)) if x is not None and x.dtype == np.int8 else x


def build(case: Case, dynamic: bool) -> onnx.ModelProto:
    """The model of a case; with `dynamic`, every dim of an input has a name instead of a size."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    infos, weights = [], []
    for i, (name, x) in enumerate(zip(names, case.inputs, strict=True)):
        if x is None:
            continue
        if i in case.const:
            weights.append(numpy_helper.from_array(x, name))
        else:
            shape = [f"d{d}" if dynamic and d != 1 and d not in case.keep else d for d in x.shape]
            infos.append(helper.make_tensor_value_info(name, dtypes.from_numpy(x.dtype).onnx, shape))
    outputs = [f"y{i}" for i in range(case.outputs)]
    attrs = {k: numpy_helper.from_array(v) if isinstance(v, Array) else v for k, v in case.attrs.items()}
    node = helper.make_node(case.op, names, outputs, domain=case.domain, **attrs)
    graph = helper.make_graph([node], "one", infos, [helper.make_empty_tensor_value_info(o) for o in outputs], weights)
    opsets = [helper.make_opsetid("", case.opset)]
    if case.domain:
        opsets.append(helper.make_opsetid(case.domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=min(helper.VERSION_TABLE[-1][1], 10))


def feeds(case: Case) -> dict[str, Array]:
    return {f"x{i}": x for i, x in enumerate(case.inputs) if x is not None and i not in case.const}


def expected(case: Case) -> list[Array]:
    """What onnxruntime gives with its optimizations off, or the reference evaluator."""
    model = build(case, False)
    if case.oracle == "onnxruntime" and case.opset <= NEWEST:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(model.SerializeToString(), options)
            return list(session.run(None, feeds(case)))
        except (
            ort.capi.onnxruntime_pybind11_state.NotImplemented,
            ort.capi.onnxruntime_pybind11_state.InvalidGraph,
        ):
            pass
        except ort.capi.onnxruntime_pybind11_state.Fail as error:
            if "not yet supported on this hardware" in str(error):
                pytest.skip(f"onnxruntime's {case.op} wants another CPU")
            raise
        except RuntimeError as error:
            if "Numpy type" not in str(error):  # onnxruntime cannot hand out bfloat16 and the like
                raise
    return list(ReferenceEvaluator(model).run(None, feeds(case)))


def actual(case: Case, dynamic: bool) -> list[Array]:
    return evaluate(load(build(case, dynamic)), list(feeds(case).values()))


def check(case: Case) -> None:
    """Compares with sizes known at compile time and, unless the case says otherwise, at run time only."""
    wanted = expected(case)
    for dynamic in (False, True) if case.dynamic else (False,):
        got = actual(case, dynamic)
        assert len(got) == len(wanted)
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            compare(a, b, f"{case}{' with dynamic dims' if dynamic else ''}, output {i}", case)


def compare(got: Array, wanted: Array, what: str, case: Case) -> None:
    wanted = np.asarray(wanted)
    if wanted.dtype == np.uint8 and dtypes.from_numpy(got.dtype).is_float:  # how onnxruntime hands out 8-bit floats
        wanted = wanted.view(got.dtype)
    assert got.dtype == wanted.dtype, f"{what}: dtype {got.dtype}, not {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, not {wanted.shape}"
    kind = dtypes.from_numpy(wanted.dtype)
    if not kind.is_float:
        np.testing.assert_array_equal(got, wanted, what)
        return
    rtol = case.rtol if case.rtol is not None else {64: 1e-9, 32: 2e-5, 16: 4e-3}.get(kind.bits, 0)
    atol = case.atol if case.atol is not None else {64: 1e-11, 32: 2e-6, 16: 2e-3}.get(kind.bits, 0)
    np.testing.assert_allclose(
        got.astype(np.float64), wanted.astype(np.float64), rtol, atol, equal_nan=True, err_msg=what
    )  # fmt: skip
