"""Which nodes have been put together, and whether one cluster must run before another."""

from __future__ import annotations

from collections.abc import Iterable

from onnxc.ir.graph import Graph, Node


class Clusters:
    """Nodes of a graph merged into clusters; the quotient graph must stay free of cycles."""

    def __init__(self, graph: Graph) -> None:
        self._parent = list(range(len(graph.nodes)))
        self._position = {id(n): i for i, n in enumerate(graph.nodes)}
        self._successors: list[set[int]] = [set() for _ in graph.nodes]
        self._last = list(range(len(graph.nodes)))
        self._first = list(range(len(graph.nodes)))
        for i, node in enumerate(graph.nodes):
            for v in node.operands:
                if v.node is not None and id(v.node) in self._position:
                    self._successors[self._position[id(v.node)]].add(i)

    def of(self, node: Node) -> int:
        """The cluster of a node."""
        return self._find(self._position[id(node)])

    def position(self, node: Node) -> int:
        """The node's place in the graph's order."""
        return self._position[id(node)]

    def _find(self, i: int) -> int:
        while self._parent[i] != i:
            self._parent[i] = self._parent[self._parent[i]]
            i = self._parent[i]
        return i

    def merge(self, a: Node, b: Node) -> None:
        """Puts both nodes' clusters together (the caller has made sure that this closes no cycle)."""
        i, j = self.of(a), self.of(b)
        if i == j:
            return
        self._parent[j] = i
        self._successors[i] |= self._successors[j]
        self._successors[j] = set()
        self._last[i] = max(self._last[i], self._last[j])
        self._first[i] = min(self._first[i], self._first[j])

    def reaches(self, sources: Iterable[int], target: int, without: int = -1) -> bool:
        """True where a path leads from any source cluster to the target, not entering cluster `without`."""
        limit = self._last[target]
        seen: set[int] = set()
        stack = [s for s in sources if s != without]
        while stack:
            c = stack.pop()
            if c == target:
                return True
            if c in seen:
                continue
            seen.add(c)
            for s in self._successors[c]:
                s = self._find(s)
                if s not in seen and s != without and self._first[s] <= limit:
                    stack.append(s)
        return False
