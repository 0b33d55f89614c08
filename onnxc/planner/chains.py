"""Chains of convolutions: 1x1, depthwise, 1x1 (as in MobileNet's blocks) as one kernel, band by band.

The tensors between these convolutions are the largest of such networks, and there is little to compute with each of
their elements: a kernel that keeps a few rows of them in the cache saves most of the network's memory traffic.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxc.ir.expr import always_equal
from onnxc.ir.graph import Node, Value
from onnxc.planner.groups import Group, group_reads
from onnxc.planner.guesses import guessed_size
from onnxc.planner.layout import Layout, channels_last
from onnxc.planner.templates import is_template
from onnxc.primitives.builder import constant_of

LEAST_BYTES = 800_000  # between two convolutions, of a batch: what is smaller stays in the caches of the cores anyway
MOST_WEIGHTS = 512 * 1024  # bytes of a 1x1 convolution: every band passes over them


def _is_convolution(group: Group) -> bool:
    node = group.node
    return (
        group.kind == "template"
        and node is not None
        and node.op == "conv"
        and is_template(node)
        and not node.attrs.get("wide")
        and node.output.rank == 4
        and constant_of(node.operands[1]) is not None
        and not group.chain
    )


def _is_depthwise(node: Node) -> bool:
    groups = node.attrs["groups"]
    return groups > 1 and node.operands[1].shape[1] == 1 and always_equal(node.operands[0].shape[1], groups)


def _is_pointwise(node: Node) -> bool:
    x, w, a = node.operands[0].shape, node.operands[1], node.attrs
    same = all(always_equal(i, o) for i, o in zip(x[2:], node.output.shape[2:], strict=True))
    small = isinstance(w.t.nbytes, int) and w.t.nbytes <= MOST_WEIGHTS
    one = w.shape[2:] == (1, 1) and all(s == 1 for s in a["strides"]) and not any(a["low"])
    return one and same and small and a["groups"] == 1


class _Chains:
    def __init__(self, groups: list[Group], layout: Layout, outputs: set[int]) -> None:
        self.layout, self.outputs = layout, outputs
        self.groups = groups
        self.makers = {v.id: g for g in groups for v in g.stored()}
        self.readers: dict[int, list[Group]] = {}
        for g in groups:
            for vid in group_reads(g):
                self.readers.setdefault(vid, []).append(g)

    def run(self) -> list[Group]:
        taken: set[int] = set()  # ids of groups
        last: dict[int, Group] = {}  # id of a chain's last group -> the chain
        for group in self.groups:
            if not _is_convolution(group) or group.node is None or not _is_depthwise(group.node):
                continue
            links = [g for g in (self._before(group), group, self._after(group)) if g is not None]
            if len(links) > 1 and not taken & {id(g) for g in links}:
                taken |= {id(g) for g in links}
                last[id(links[-1])] = _chained(links)
        return [last.get(id(g), g) for g in self.groups if id(g) not in taken or id(g) in last]

    def _before(self, group: Group) -> Group | None:
        assert group.node is not None
        maker = self.makers.get(group.node.operands[0].id)
        return maker if maker is not None and self._link(maker, group) and self._pointwise(maker) else None

    def _after(self, group: Group) -> Group | None:
        stored = group.stored()
        readers = self.readers.get(stored[0].id, []) if len(stored) == 1 else []
        if len(readers) == 1 and _is_convolution(readers[0]) and self._link(group, readers[0]):
            return readers[0] if self._pointwise(readers[0]) else None
        return None

    @staticmethod
    def _pointwise(group: Group) -> bool:
        return group.node is not None and _is_pointwise(group.node)

    def _link(self, first: Group, second: Group) -> bool:
        """True where the second convolution is all that reads what the first one stores, and reads it as it is."""
        if not _is_convolution(first) or second.node is None or first.node is None:
            return False
        stored = first.stored()
        value = second.node.operands[0]
        alone = [v.id for v in stored] == [value.id] and self.readers.get(value.id) == [second]
        elsewhere = any(value.id in s.demands for s in second.sections)
        return alone and not elsewhere and self._fits(value, first.node)

    def _fits(self, value: Value, node: Node) -> bool:
        whole = self.layout.storage(value) is value and value.id not in self.outputs
        lies = self.layout.order_of(value) == channels_last(value.rank) and value.shape == node.output.shape
        (n, *image), size = value.shape, value.dtype.itemsize
        nbytes = size * (n if isinstance(n, int) else 1) * guessed_size(image)
        return whole and lies and nbytes >= LEAST_BYTES


def _chained(links: list[Group]) -> Group:
    end = links[-1]
    reasons = [*(r for g in links for r in g.reasons), f"{len(links)} convolutions run band by band"]
    nodes = [n for g in links for n in g.nodes]
    return Group("template", end.node, sections=end.sections, nodes=nodes, reasons=reasons, chain=links)


def chain_convolutions(groups: list[Group], layout: Layout, outputs: Iterable[int]) -> list[Group]:
    """The groups in order, each depthwise convolution with its 1x1 neighbours where nobody else needs what is between.

    A chain runs in the place of its last convolution: what the others store had no other reader.
    """
    return _Chains(groups, layout, set(outputs)).run()
