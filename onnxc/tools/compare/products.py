"""Products in float64. onnxruntime's take one thread, the caller's, and AVX-512 where there is any; numpy's take every
core, one product after the other, and on some CPUs half of each core.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxc.errors import OnnxcError

Array = np.ndarray[Any, Any]
BLOCK = 1 << 19  # elements of the second factor that are widened at a time


@cache
def _matmul() -> Any:
    """MatMul of two inputs, as a session."""
    import onnxruntime

    a, b, c = (helper.make_tensor_value_info(n, TensorProto.DOUBLE, None) for n in "abc")
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", [a, b], [c])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # which would keep the largest product
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def product(a: Array, b: Array, pool: Executor) -> Array:
    """a [..., M, K] @ b [..., K, N] in float64, of factors that may be narrower. One matrix `b` is widened block by
    block, in the threads of `pool`.
    """
    a = np.asarray(a, np.float64)
    if not a.size or not b.size:
        return np.asarray(np.matmul(a, b.astype(np.float64)))
    if b.ndim != 2:
        return _product(a, b)
    rows = a.reshape(-1, a.shape[-1])
    found = np.empty((len(rows), b.shape[1]))

    def fill(part: slice) -> None:
        found[:, part] = _product(rows, b[:, part])

    list(pool.map(fill, _blocks(b)))
    return found.reshape(*a.shape[:-1], b.shape[1])


def _product(a: Array, b: Array) -> Array:
    try:
        found: Array = _matmul().run(None, {"a": a, "b": b.astype(np.float64, "C", copy=False)})[0]
    except Exception as error:  # onnxruntime's have no class of their own
        raise OnnxcError(f"onnxruntime cannot multiply in float64: {error}", cause=error) from error
    return found


def _blocks(b: Array) -> Iterator[slice]:
    """Columns that are widened together."""
    step = max(64, BLOCK // len(b))
    return (slice(start, start + step) for start in range(0, b.shape[1], step))
