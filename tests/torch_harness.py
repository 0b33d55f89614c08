"""What the tests of torch.compile(backend="onnxc") share. It needs torch: import it after `importorskip("torch")`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import onnxc
from onnxc.torch.backend import _programs, backend


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
