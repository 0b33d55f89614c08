"""PyTorch: ``torch.compile(module, backend="onnxc")``, and what became of it.

    compiled = torch.compile(module, backend="onnxc")
    compiled(x)
    print(onnxc.torch.report())            # what fell back to PyTorch, and why

``onnxc.from_torch`` is beside it. Importing this package does not import torch; its modules do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxc.torch.backend import report as report
    from onnxc.torch.export import ExportError as ExportError
    from onnxc.torch.export import TorchModel as TorchModel
    from onnxc.torch.export import from_torch as from_torch
    from onnxc.torch.limits import SizeWarning as SizeWarning

_HOME = {
    "ExportError": "onnxc.torch.export",
    "SizeWarning": "onnxc.torch.limits",
    "TorchModel": "onnxc.torch.export",
    "from_torch": "onnxc.torch.export",
    "report": "onnxc.torch.backend",
}
__all__ = ["ExportError", "SizeWarning", "TorchModel", "from_torch", "report"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'onnxc.torch' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found
