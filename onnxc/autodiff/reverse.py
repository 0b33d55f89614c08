"""The way back: from the cotangents of a graph's results to those of what it was computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxc.autodiff.movement import summed_to
from onnxc.autodiff.rules import Step, rules
from onnxc.errors import UnsupportedError
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder


def gradients(
    b: Builder,
    nodes: Sequence[Node],
    cotangents: Mapping[int, Value],
    wrt: Sequence[Value],
) -> list[Value | None]:
    """Adds to `b` what computes the cotangents of `wrt`.

    Args:
        b: holds `nodes` already, and goes on behind them.
        nodes: what is differentiated, in order.
        cotangents: by the ids of the values that they belong to, in their shapes and dtypes.
        wrt: values, inputs or results of `nodes`, of a float dtype.

    Returns:
        One for each of `wrt`; None: the results do not depend on it.

    Raises:
        UnsupportedError: a node on the way has no derivative rule. It names the node.
    """
    active = active_values(nodes, wrt)
    found: dict[int, list[Value]] = {vid: [value] for vid, value in cotangents.items()}
    wanted = {v.id for v in wrt}
    for node in reversed(nodes):
        needed = [v is not None and v.id in active for v in node.inputs]
        totals = [_total(b, found, v, node) for v in node.outputs]
        for v, total in zip(node.outputs, totals, strict=True):
            if v.id in wanted and total is not None:
                found[v.id] = [total]
        if not any(needed) or all(dy is None for dy in totals) or not any(v.id in active for v in node.outputs):
            continue
        with b.from_origin(node.origin):
            for x, dx in _inputs(b, node, totals, needed):
                found.setdefault(x.id, []).append(dx)
    return [_total(b, found, v, None) for v in wrt]


def active_values(nodes: Sequence[Node], wrt: Sequence[Value]) -> set[int]:
    """The ids of values that depend on `wrt` through floats, or through what is no tensor (which has no derivative);
    not through what stops derivatives.
    """
    active = {v.id for v in wrt}
    for node in nodes:
        if any(v.id in active for v in node.operands) and not node.attrs.get("stop"):
            active.update(v.id for v in node.outputs if not isinstance(v.type, TensorType) or v.dtype.is_float)
    return active


def _total(b: Builder, found: Mapping[int, list[Value]], v: Value, node: Node | None) -> Value | None:
    """The sum of the cotangents that reached a value."""
    parts = found.get(v.id, [])
    if not parts:
        return None
    total = parts[0]
    with b.from_origin(node.origin if node is not None else ()):
        for part in parts[1:]:
            total = b.add(total, part)
    return total


def _inputs(
    b: Builder, node: Node, dys: Sequence[Value | None], needed: Sequence[bool]
) -> list[tuple[Value, Value]]:  # fmt: skip
    """The inputs whose cotangents are wanted and not zero, with these."""
    rule = rules().get(node.op)
    if rule is None:
        where = next((f"{s} ({s.line})" if s.line else str(s) for s in node.origin), "")
        name = node.attrs.get("function", node.op)
        raise UnsupportedError(f"{name} has no derivative{f', which {where} needs' if where else ''}")
    found = []
    for x, dx, wanted in zip(node.inputs, rule(Step(b, node, dys, needed)), needed, strict=True):
        if x is None or dx is None or not wanted:
            continue
        if lookup(node.op).kind is Kind.POINTWISE:
            dx = summed_to(b, dx, x.shape)
        found.append((x, b.reshape(dx, x.shape)))  # a size may have had another name on the way
    return found
