"""Runs models whose sizes or control flow depend on data three ways, and compares:

compiled, by onnxruntime with its optimizations off, and (the graph of primitives and host steps, exported) by
onnxruntime again. Where onnxruntime lacks an op, onnx's reference evaluator is the judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

import onnxc
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.runtime.compiled_model import CompiledModel

Inputs = Mapping[str, Any]
HEAD = '<ir_version: 8, opset_import: ["" : {opset}]> '


def parsed(text: str, opset: int = 18) -> onnx.ModelProto:
    """The model of a graph in onnx's text format."""
    return onnx.parser.parse_model(HEAD.format(opset=opset) + text)


def goes_on(flag: str, op: str, value: str, limit: float, dtype: str = "double") -> str:
    """Nodes for a loop's body: `flag` says whether a reduction of `value` is less than a limit."""
    return f"""
      {flag}_value = {op}<keepdims = 0>({value})
      {flag}_limit = Constant<value = {dtype} {{{limit}}}>()
      {flag} = Less({flag}_value, {flag}_limit)
    """


def runtime(model: onnx.ModelProto) -> ort.InferenceSession:
    """onnxruntime, with its optimizer off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def exported(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model after its ops became primitives and host steps, as ONNX."""
    return to_onnx(decompose(onnx_file.load(model), staged=True))


def check(
    model: onnx.ModelProto | str,
    *feeds: Inputs,
    opset: int = 18,
    oracle: str = "onnxruntime",
    export: bool = True,
    **options: Any,
) -> CompiledModel:
    """Compares outputs for each of the inputs; returns the compiled model.

    Args:
        model: it, or its text.
        feeds: inputs, one call each.
        oracle: `onnxruntime`, or `onnx` for the reference evaluator.
        export: whether onnxruntime is to run what is exported, too.
        options: of the compile.
    """
    model = parsed(model, opset) if isinstance(model, str) else model
    judge = runtime(model) if oracle == "onnxruntime" else ReferenceEvaluator(model)
    compiled = onnxc.compile(model, **options)
    spelled = runtime(exported(model)) if export else None
    for given in feeds:
        wanted = judge.run(None, dict(given))
        same([*compiled(**given).values()], wanted, f"compiled, for {_shapes(given)}")
        if spelled is not None:
            same(spelled.run(None, dict(given)), wanted, f"exported, for {_shapes(given)}")
    return compiled


def same(got: Any, wanted: Any, what: str) -> None:
    """Equal arrays, lists of such, or None; floats to the last few digits."""
    if isinstance(wanted, (list, tuple)):
        assert isinstance(got, (list, tuple)), f"{what}: {got!r} is no list"
        assert len(got) == len(wanted), f"{what}: {len(got)} values, not {len(wanted)}"
        for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
            same(a, b, f"{what}, [{k}]")
    elif wanted is None:
        assert got is None, f"{what}: {got!r}, not None"
    else:
        got, wanted = np.asarray(got), np.asarray(wanted)
        assert got.dtype == wanted.dtype or wanted.dtype.kind in "US", f"{what}: {got.dtype}, not {wanted.dtype}"
        assert got.shape == wanted.shape, f"{what}: shape {got.shape}, not {wanted.shape}"
        if wanted.dtype.kind in "fc":
            digits = {2: 2e-3, 4: 1e-5}.get(wanted.dtype.itemsize, 1e-10)
            np.testing.assert_allclose(got, wanted, digits, digits / 10, err_msg=what)
        else:
            np.testing.assert_array_equal(got, wanted, what)


def _shapes(given: Inputs) -> str:
    return ", ".join(
        f"{k}: {np.shape(v) if not isinstance(v, list) else f'list of {len(v)}'}" for k, v in given.items()
    )


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def int64(x: Any) -> np.ndarray:
    return np.array(x, np.int64)
