"""A compiler for ONNX models: generated, fused C++ with onnxruntime's answers.

    import onnxc
    model = onnxc.compile("model.onnx")
    outputs = model(input_ids=ids, attention_mask=mask)

This module defines nothing: each name is fetched from where it is defined when it is first used, so that
``import onnxc`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxc import backend as backend
    from onnxc import errors as errors
    from onnxc import optim as optim
    from onnxc import torch as torch
    from onnxc.compiler import compile as compile
    from onnxc.gradient import backward as backward
    from onnxc.runtime.model import CompiledModel as CompiledModel
    from onnxc.runtime.model import load as load
    from onnxc.tools.compare import compare as compare
    from onnxc.tools.tune import tune as tune
    from onnxc.torch.export import from_torch as from_torch
    from onnxc.training.step import compile_training as compile_training

_HOME = {
    "backward": "onnxc.gradient",
    "CompiledModel": "onnxc.runtime.model",
    "compare": "onnxc.tools.compare",
    "compile": "onnxc.compiler",
    "compile_training": "onnxc.training.step",
    "from_torch": "onnxc.torch.export",
    "load": "onnxc.runtime.model",
    "tune": "onnxc.tools.tune",
}
__all__ = [
    "CompiledModel",
    "backend",
    "backward",
    "compare",
    "compile",
    "compile_training",
    "errors",
    "from_torch",
    "load",
    "optim",
    "torch",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in ("backend", "errors", "optim", "torch"):
        return importlib.import_module(f"onnxc.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'onnxc' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
