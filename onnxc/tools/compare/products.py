"""Products in float64. Those with one matrix, as most weights are, go through native/products.cpp where there is a C++
compiler: it widens the matrix as it packs it. Others go through onnxruntime, with the caller's thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxc.errors import OnnxcError
from onnxc.tools.compare.native import library

Array = np.ndarray[Any, Any]
BLOCK = 1 << 19  # elements of the second factor that a thread takes at a time
COLUMNS = 64  # at least, and a multiple of them
_room = threading.local()


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
    """a [..., M, K] @ b [..., K, N] in float64, of factors that may be narrower. One matrix `b` is taken block by
    block, in the threads of `pool`.
    """
    a = np.asarray(a, np.float64)
    if not a.size or not b.size:
        return np.asarray(np.matmul(a, b.astype(np.float64)))
    if b.ndim != 2:
        return _product(a, b)
    rows = np.ascontiguousarray(a.reshape(-1, a.shape[-1]))
    found = np.empty((len(rows), b.shape[1]))

    def fill(part: slice) -> None:
        if not native_product(rows, b[:, part], found[:, part]):
            found[:, part] = _product(rows, b[:, part])

    list(pool.map(fill, _blocks(b)))
    return found.reshape(*a.shape[:-1], b.shape[1])


def native_product(a: Array, b: Array, out: Array) -> bool:
    """a [M, K] @ b [K, N] into `out`; a is contiguous, and the rows of `out` are. False where there is no compiler."""
    native = library()
    if native is None:
        return False
    if b.dtype not in (np.float32, np.float64) or not b.flags.aligned:
        b = b.astype(np.float64)
    (m, k), n = a.shape, b.shape[1]
    size = native.product_room(k)
    if getattr(_room, "array", np.empty(0)).size < size:
        _room.array = np.empty(size)
    steps = [step // b.itemsize for step in b.strides]
    function = native.product_f if b.dtype == np.float32 else native.product_d
    ends = out.ctypes.data, out.strides[0] // out.itemsize
    function(a.ctypes.data, b.ctypes.data, *steps, *ends, m, n, k, _room.array.ctypes.data)
    return True


def _product(a: Array, b: Array) -> Array:
    try:
        found: Array = _matmul().run(None, {"a": a, "b": b.astype(np.float64, "C", copy=False)})[0]
    except Exception as error:  # onnxruntime's have no class of their own
        raise OnnxcError(f"onnxruntime cannot multiply in float64: {error}", cause=error) from error
    return found


def _blocks(b: Array) -> Iterator[slice]:
    """Columns that are taken together."""
    step = max(COLUMNS, BLOCK // len(b) // COLUMNS * COLUMNS)
    return (slice(start, start + step) for start in range(0, b.shape[1], step))
