"""What the tests of torch.compile(backend="onnxc") and of from_torch share.

It needs torch: import it after `importorskip("torch")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import onnxc
from onnxc.primitives.host import HOST_OPS
from onnxc.primitives.interpret import interpret
from onnxc.torch.backend import _programs, backend
from onnxc.torch.export import TorchModel, _directly


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing of another test: neither Dynamo's graphs, nor our programs, nor random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    _programs.clear()  # graphs of other tests, which live until they are collected
    yield
    torch._dynamo.reset()


def through(f: Any, **options: Any) -> Callable[..., Any]:
    """A function or module by way of this backend."""
    return torch.compile(f, backend=backend, **options)  # type: ignore[no-any-return]


def close(found: Any, expected: Any) -> None:
    """Whether tensors, or trees of them, are equal as float32 numbers are."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def fallbacks() -> set[str]:
    """The ops that PyTorch computes."""
    return {f.op for graph in onnxc.torch.report().graphs for f in graph.fallbacks}


class ByNumpy:
    """Stands in for a compiled model: numpy runs the graph."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def get_inputs(self) -> list[Any]:
        return list(self.graph.inputs)

    def __call__(self, *arrays: Any) -> dict[str, Any]:
        found = [np.array(a, order="C") for a in interpret(self.graph, list(arrays))]
        return dict(zip(self.graph.output_names, found, strict=True))


class Function(torch.nn.Module):  # type: ignore[misc]
    """A function of tensors as a module."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        """What the function returns."""
        return self.f(*args)


def imported(f: Callable[..., Any], *args: Any, dynamic_shapes: Any = None) -> TorchModel:
    """A function as a model by way of the importer of ATen ops alone, as where PyTorch's exporter fails. Numpy runs it,
    or, where the host has to decide, the compiled programs.
    """
    exported = _directly(Function(f), args, {}, dynamic_shapes)
    decides = any(n.op in HOST_OPS for n in exported.model.nodes)
    model = onnxc.compile(exported.model) if decides else ByNumpy(exported.model)
    return TorchModel(model, exported)
