"""Template kernels."""

from __future__ import annotations

from onnxc.codegen.cpp.weights import WeightStore
from onnxc.codegen.cpp.writer import KernelSource
from onnxc.errors import UnsupportedError
from onnxc.planner.fusion import Group
from onnxc.planner.layout import Layout


def emit_template(group: Group, layout: Layout, lanes: int, weights: WeightStore) -> KernelSource:
    raise UnsupportedError(f"no kernel for {group.node}")
