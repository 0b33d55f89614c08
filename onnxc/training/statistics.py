"""Running statistics: weights that a model in training mode replaces by outputs of its own nodes."""

from __future__ import annotations

from dataclasses import replace

from onnxc.errors import UnsupportedError
from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.builder import constant_of


def running_statistics(imported: Graph) -> dict[str, Value]:
    """For each weight that BatchNormalization in training mode updates, by name, the value that it becomes."""
    found: dict[str, Value] = {}
    names: dict[int, str] = {}  # of values that a weight has become before
    for node in imported.nodes:
        if not _is_batch_norm(node) or not _trains(node, imported):
            continue
        for old, new in zip(node.inputs[3:5], node.outputs[1:3], strict=False):
            name = None if old is None else names.get(old.id) or _weight(old)
            if name and new.name:
                found[name] = new
                names[new.id] = name
    return found


def with_batch_statistics(imported: Graph) -> Graph:
    """The graph with each BatchNormalization in training mode.

    Raises:
        UnsupportedError: one inside of an If or a loop, or whose statistics are no weights, is in the other mode.
    """
    nodes = []
    for node in imported.nodes:
        _check_none_inside(node, imported)
        if _is_batch_norm(node) and not _trains(node, imported):
            names = [None if v is None else _weight(v) for v in node.inputs[3:5]]
            if None in names or len(names) != 2:
                raise UnsupportedError(f"batch_statistics: {_shown(node)} has statistics that are no weights")
            attrs = {**node.attrs, "training_mode": 1} if _version(node, imported) >= 14 else node.attrs
            outputs = [node.outputs[0], *(Value(None, f"{name} after the batch") for name in names)]
            node = Node(node.op, node.inputs, outputs, attrs, node.regions, node.origin)
        nodes.append(node)
    return replace(imported, nodes=nodes)


def continued(imported: Graph) -> Graph:
    """The graph where of several BatchNormalizations with the same running statistics (a layer that is used more than
    once) each goes on from those of the one before it.
    """
    latest: dict[int, Value] = {}
    nodes = []
    for node in imported.nodes:
        if _is_batch_norm(node) and _trains(node, imported):
            old = node.inputs[3:5]
            now = [v if v is None else latest.get(v.id, v) for v in old]
            node = Node(node.op, [*node.inputs[:3], *now], node.outputs, node.attrs, node.regions, node.origin)
            latest |= {v.id: new for v, new in zip(old, node.outputs[1:3], strict=False) if v is not None and new.name}
        nodes.append(node)
    return replace(imported, nodes=nodes)


def _check_none_inside(node: Node, graph: Graph) -> None:
    """UnsupportedError for a BatchNormalization of a branch or an iteration that would stay in the other mode."""
    for inner in (n for region in node.regions for n in region.nodes):
        if _is_batch_norm(inner) and not _trains(inner, graph):
            raise UnsupportedError(f"batch_statistics: {_shown(inner)} is inside of {_shown(node)}")
        _check_none_inside(inner, graph)


def _shown(node: Node) -> str:
    return next((f"{s} ({s.line or s.name})" if s.line or s.name else str(s) for s in node.origin), node.op)


def _weight(v: Value) -> str | None:
    """The name of a weight."""
    return v.name or None if constant_of(v) is not None else None


def _is_batch_norm(node: Node) -> bool:
    return node.op.partition("@")[0] == "onnx.BatchNormalization"


def _version(node: Node, graph: Graph) -> int:
    return int(node.op.partition("@")[2] or graph.metadata.get("opsets", {}).get("", 1))


def _trains(node: Node, graph: Graph) -> bool:
    """Whether it is in training mode: before opset 14 that is told by its outputs."""
    return bool(node.attrs.get("training_mode")) if _version(node, graph) >= 14 else len(node.outputs) > 1
