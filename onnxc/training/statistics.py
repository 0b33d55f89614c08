"""Running statistics: weights that a model in training mode replaces by outputs of its own nodes."""

from __future__ import annotations

from onnxc.ir.graph import Graph, Value
from onnxc.primitives.builder import constant_of


def running_statistics(imported: Graph) -> dict[str, Value]:
    """For each weight that BatchNormalization in training mode updates, by name, the value that it becomes."""
    found: dict[str, Value] = {}
    for node in imported.nodes:
        if node.op.partition("@")[0] != "onnx.BatchNormalization" or not node.attrs.get("training_mode"):
            continue
        for old, new in zip(node.inputs[3:5], node.outputs[1:3], strict=False):
            if old is not None and old.name and constant_of(old) is not None and new.name:
                found[old.name] = new
    return found
