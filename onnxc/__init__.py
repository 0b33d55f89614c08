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
    from onnxc import array_api as array_api
    from onnxc import backend as backend
    from onnxc import errors as errors
    from onnxc import nn as nn
    from onnxc import optim as optim
    from onnxc import random as random
    from onnxc import torch as torch
    from onnxc.array.control import cond as cond
    from onnxc.array.control import fori_loop as fori_loop
    from onnxc.array.control import scan as scan
    from onnxc.array.control import while_loop as while_loop
    from onnxc.array.core import Array as Array
    from onnxc.array.eager import set_eager as set_eager
    from onnxc.array.export import to_onnx as to_onnx
    from onnxc.array.gradient import grad as grad
    from onnxc.array.gradient import jvp as jvp
    from onnxc.array.gradient import stop_gradient as stop_gradient
    from onnxc.array.gradient import value_and_grad as value_and_grad
    from onnxc.array.gradient import vjp as vjp
    from onnxc.array.jit import jit as jit
    from onnxc.array.pytree import tree_map as tree_map
    from onnxc.compiler import compile as compile
    from onnxc.gradient import backward as backward
    from onnxc.ops.registry import op as op
    from onnxc.planner.groups import FusionOptions as FusionOptions
    from onnxc.primitives.kernels import Kernel as Kernel
    from onnxc.runtime.compiled_model import CompiledModel as CompiledModel
    from onnxc.runtime.opening import load as load
    from onnxc.tools.compare import compare as compare
    from onnxc.tools.tune import tune as tune
    from onnxc.torch.export import from_torch as from_torch
    from onnxc.training.step import compile_training as compile_training

_HOME = {
    "Array": "onnxc.array.core",
    "CompiledModel": "onnxc.runtime.compiled_model",
    "FusionOptions": "onnxc.planner.groups",
    "Kernel": "onnxc.primitives.kernels",
    "backward": "onnxc.gradient",
    "compare": "onnxc.tools.compare",
    "compile": "onnxc.compiler",
    "compile_training": "onnxc.training.step",
    "cond": "onnxc.array.control",
    "fori_loop": "onnxc.array.control",
    "from_torch": "onnxc.torch.export",
    "grad": "onnxc.array.gradient",
    "jit": "onnxc.array.jit",
    "jvp": "onnxc.array.gradient",
    "load": "onnxc.runtime.opening",
    "op": "onnxc.ops.registry",
    "scan": "onnxc.array.control",
    "set_eager": "onnxc.array.eager",
    "stop_gradient": "onnxc.array.gradient",
    "to_onnx": "onnxc.array.export",
    "tree_map": "onnxc.array.pytree",
    "tune": "onnxc.tools.tune",
    "value_and_grad": "onnxc.array.gradient",
    "vjp": "onnxc.array.gradient",
    "while_loop": "onnxc.array.control",
}
_MODULES = ("array_api", "backend", "errors", "nn", "optim", "random", "torch")
__all__ = [
    "Array",
    "CompiledModel",
    "FusionOptions",
    "Kernel",
    "array_api",
    "backend",
    "backward",
    "compare",
    "compile",
    "compile_training",
    "cond",
    "errors",
    "fori_loop",
    "from_torch",
    "grad",
    "jit",
    "jvp",
    "load",
    "nn",
    "op",
    "optim",
    "random",
    "scan",
    "set_eager",
    "stop_gradient",
    "to_onnx",
    "torch",
    "tree_map",
    "tune",
    "value_and_grad",
    "vjp",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow to import

        return version("onnxc")
    if name in _MODULES:
        return importlib.import_module(f"onnxc.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'onnxc' has no attribute {name!r}")
    try:
        found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"onnxc.{name} needs PyTorch: pip install 'onnxc[torch]'", name="torch") from error
    return found


def __dir__() -> list[str]:
    return __all__
