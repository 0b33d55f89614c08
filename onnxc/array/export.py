"""Functions over arrays as ONNX models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from onnxc.array.arguments import Arguments, checked_function
from onnxc.array.dims import Dynamic, check_dynamic, dim_names, dynamic_leaves, input_names, plain_name, unique
from onnxc.array.pytree import places
from onnxc.array.tracing import trace_function
from onnxc.export.model import to_onnx as export
from onnxc.gradient import cleaned


def to_onnx(
    f: Callable[..., Any], *args: Any, dynamic: Dynamic = False, path: str | os.PathLike[str] | None = None,
    static_argnums: int | tuple[int, ...] = (), static_argnames: str | tuple[str, ...] = (), **kwargs: Any,
) -> onnx.ModelProto:  # fmt: skip
    """A function over arrays as an ONNX model, which any runtime runs.

    Its inputs are the leaves of the arguments, called as their places (`params.w`), its outputs those of the result
    (`result`, `result.loss`). Arrays that the function sees are the model's weights.

    Args:
        f: as of :func:`onnxc.jit`.
        args, kwargs: of which only shapes and dtypes matter, but for static ones. (Arguments of `f` that are called as
            those below go by position.)
        dynamic: as of :func:`onnxc.jit`: dims that the model leaves open.
        path: the model is written to this file, too; one over 2 GB cannot be.
        static_argnums, static_argnames: as of :func:`onnxc.jit`.

    Raises:
        InputError, TraceError: as a call of a jitted function. InternalError: a step has no spelling in ONNX.

    >>> import numpy as np
    >>> model = to_onnx(lambda x: {"twice": x + x}, np.zeros((2, 3), np.float32), dynamic={"x": {0: "batch"}})
    >>> [v.name for v in (*model.graph.input, *model.graph.output)]
    ['x', 'result.twice']
    """
    checked_function(f, "what is exported")
    check_dynamic(dynamic)
    arguments = Arguments(f, static_argnums, static_argnames)
    given = arguments.bind(args, kwargs)
    leaves = dynamic_leaves(dynamic, given) if dynamic else given.leaves
    names = input_names(given)
    returned: list[Any] = []

    def traced(arrays: Any) -> Any:
        returned[:] = [arguments.apply(f, given, arrays)]
        return returned[0]

    name = getattr(f, "__name__", "function")
    graph, result = trace_function(traced, leaves, names, name)
    outputs = [plain_name(p) for p, held in zip(places(returned[0], "result"), result.held, strict=True) if not held]
    graph = cleaned(graph)
    graph.name = re.sub(r"\W", "_", name)
    graph.output_names = unique(outputs, set(names))
    graph.dim_names = dim_names(dynamic, leaves, given)
    model = export(graph)
    if path is not None:
        Path(path).write_bytes(model.SerializeToString())
    return model


__all__ = ["to_onnx"]
