"""What is made for traces, outside of one: it is traced, compiled and run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxc.array.core import Array
from onnxc.array.eager import PROGRAMS, Program, runner
from onnxc.array.pytree import flatten, unflatten
from onnxc.array.tracing import as_data, leaf_of, trace_function
from onnxc.fingerprint import fingerprint_graph
from onnxc.gradient import cleaned


def immediately(f: Callable[..., Any], name: str, *trees: Any) -> Any:
    """`f(*trees)`, of which arrays are traced, and all else stays as it is.

    The function runs in each call; its program is compiled once for each graph that comes of it.
    """
    given, spec = flatten(trees)
    at = [k for k, x in enumerate(given) if isinstance(x, (Array, np.ndarray, np.generic))]
    data = [as_data(given[k], f"an argument of {name}") for k in at]

    def traced(arrays: list[Array]) -> Any:
        leaves = list(given)
        for k, x in zip(at, arrays, strict=True):
            leaves[k] = x
        return f(*unflatten(spec, leaves))

    graph, result = trace_function(traced, [leaf_of(d, given[k]) for d, k in zip(data, at, strict=True)], None, name)
    graph = cleaned(graph)
    key = ("graph", PROGRAMS.interpreted, fingerprint_graph(graph).digest)
    program = PROGRAMS.get(key)
    if program is None:
        program = Program(runner(graph), False)
        PROGRAMS.put(key, program)
    return result.tree(program.run(tuple(data)))
