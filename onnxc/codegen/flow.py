"""Which kernels each kernel reads from: the edges of the graph that a report draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from onnxc.codegen.calls import KernelCall
from onnxc.ir.graph import Value
from onnxc.planner.groups import Group, Plan
from onnxc.planner.in_place import own_outputs


def linked(plan: Plan, calls: Sequence[KernelCall]) -> list[KernelCall]:
    """The calls with their `takes`: for each value that one reads, the call that made it and which of its stores that
    is; inputs of the graph are -1, -2, ... A call of a loop's step may so take what a later call made, a step before.
    And with their `group`: the position in the plan that each is part of (a loop's calls are of one), and their
    `results`: which output of the model which of the stores is.
    """
    sources = _Sources(plan)
    for number, call in enumerate(calls):
        for store, vid in enumerate(call.gives):
            sources.made.setdefault(sources.whole(vid), []).append((number, store))
    results: dict[int, list[tuple[int, int]]] = {}
    for k, (_, value) in enumerate(own_outputs(plan.graph)):
        for number, store in sources.of(value.id):
            results.setdefault(number, []).append((k, store))
    positions = {vid: k for k, group in enumerate(plan.groups) for vid in _stored(group)}
    return [
        replace(
            call,
            takes=tuple(sorted({source for vid in call.needs for source in sources.of(vid)})),
            group=next((positions[vid] for vid in call.gives), 0),
            results=tuple(results.get(number, ())),
        )
        for number, call in enumerate(calls)
    ]


def _stored(group: Group) -> Iterator[int]:
    """What a group stores, or the groups of its region do."""
    yield from (v.id for v in group.stored())
    for inner in group.region.groups if group.region is not None else ():
        yield from _stored(inner)


class _Sources:
    """Who makes a value, by its id."""

    def __init__(self, plan: Plan) -> None:
        self.made: dict[int, list[tuple[int, int]]] = {v.id: [(-1 - k, 0)] for k, v in enumerate(plan.graph.inputs)}
        self.parts: dict[int, int] = {}
        self.same: dict[int, list[int]] = {}
        for each in _plans(plan):
            self.parts |= {vid: whole.id for vid, (whole, *_) in each.layout.parts.items()}
            self._add_loops(each)

    def _add_loops(self, plan: Plan) -> None:
        """What a loop hands on: operands to its region, states to the next step, results to its outputs."""
        for group in plan.groups:
            if group.region is None or group.node is None:
                continue
            node, inner = group.node, group.region.graph
            states = node.attrs["states"]
            after = [inner.outputs[k] for k in node.attrs["results"]]
            self._add(zip(inner.inputs, node.operands, strict=False))
            self._add(zip(inner.inputs[:states], after[:states], strict=True))
            self._add(zip(node.outputs, after, strict=False))
            self._add(zip(node.outputs[:states], node.operands[:states], strict=True))

    def _add(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        for value, source in pairs:
            self.same.setdefault(value.id, []).append(source.id)

    def whole(self, vid: int) -> int:
        """The value that a part is written into."""
        return self.whole(self.parts[vid]) if vid in self.parts else vid

    def of(self, vid: int) -> set[tuple[int, int]]:
        """The makers of a value; none of a constant."""
        found: set[tuple[int, int]] = set()
        seen: set[int] = set()
        left = [vid]
        while left:
            at = self.whole(left.pop())
            if at not in seen:
                seen.add(at)
                found.update(self.made.get(at, ()))
                left += self.same.get(at, ())
        return found


def _plans(plan: Plan) -> Iterator[Plan]:
    """A plan and those of its loops."""
    yield plan
    for group in plan.groups:
        if group.region is not None:
            yield from _plans(group.region)
