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
    from onnxc import errors as errors
    from onnxc.compiler import compile as compile
    from onnxc.runtime.model import CompiledModel as CompiledModel
    from onnxc.runtime.model import load as load
    from onnxc.tools.compare import compare as compare
    from onnxc.tools.tune import tune as tune

_HOME = {
    "CompiledModel": "onnxc.runtime.model",
    "compare": "onnxc.tools.compare",
    "compile": "onnxc.compiler",
    "load": "onnxc.runtime.model",
    "tune": "onnxc.tools.tune",
}
__all__ = ["CompiledModel", "compare", "compile", "errors", "load", "tune"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("onnxc.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'onnxc' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
