"""Plans that the planner would not choose: its choices between legal ways are drawn, and answers must stay.

    with random_plans(seed):
        model = onnxc.compile(...)

What is drawn: whether a kernel takes a node that it could take, whether a node is computed anew in each kernel that
reads it or stored by one, how many of the nodes that follow a template its epilogue takes, and which views get
kernels of their own. Each of these is a question of speed alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from onnxc.ir.graph import Node
from onnxc.planner.epilogues import Epilogues
from onnxc.planner.groups import Group
from onnxc.planner.placing import Placing
from onnxc.planner.section import Section, cost

REFUSED = 0.12  # of what a kernel could take


@contextmanager
def random_plans(seed: int) -> Iterator[None]:
    """Everything that is planned inside has plans that follow from the seed."""
    rng = random.Random(seed)
    accepts, has_long_index = Section.accepts, Placing._has_long_index

    def sometimes(self: Section, node: Node, store: bool) -> str:
        reason = accepts(self, node, store)
        if reason or node.output is self.root:
            return reason
        return "drawn" if rng.random() < REFUSED else ""

    def anew(self: Placing, node: Node) -> bool:
        return cost(node) <= 12 and rng.random() < 0.5

    def stored(self: Placing, node: Node, takers: list[Group]) -> bool:
        free = node.output.id not in self.through_views and all(g.node is None for g in takers)
        return has_long_index(self, node, takers) or (free and rng.random() < REFUSED)

    def length(self: Epilogues, cores: Sequence[Node], candidates: list[Node]) -> int:
        counts = [len(self.draft.needed(cores, candidates[:n])) for n in range(1, len(candidates) + 1)]
        return rng.choice([0, *(n for n, count in enumerate(counts, 1) if count == 1)])

    with (
        patch.object(Section, "accepts", sometimes),
        patch.object(Placing, "_reads_as_much", anew),
        patch.object(Placing, "_has_long_index", stored),
        patch.object(Epilogues, "_length", length),
    ):
        yield
