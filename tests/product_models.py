"""Models of products in the element types of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def model(
    nodes: Sequence[onnx.NodeProto], kind: str, inputs: dict[str, Sequence[Any]], outputs: str = "y", **constants: Array
) -> onnx.ModelProto:
    """A model of these nodes: the shapes of its inputs by name, and the names of its outputs."""
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(KINDS[kind]))
    graph = helper.make_graph(
        list(nodes), "g", [helper.make_tensor_value_info(n, dtype, list(s)) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, dtype, None) for n in outputs.split()],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
