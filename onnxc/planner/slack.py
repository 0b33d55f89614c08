"""How long the kernels of a plan may wait, where those that do not need each other run side by side."""

from __future__ import annotations

from onnxc.planner.groups import Plan, group_reads


def slack(plan: Plan) -> list[int]:
    """For each group how many kernels may run one after the other before one is late that others wait for.

    0 for those of the longest way through the plan. Gradients of weights, which the update at the end reads, have much.
    """
    by_id = {v.id: v for v in plan.graph.values()}
    writer: dict[int, int] = {}
    needs: list[set[int]] = []
    for k, group in enumerate(plan.groups):
        read = (plan.layout.storage(by_id[i]).id for i in group_reads(group) if i in by_id)
        needs.append({writer[i] for i in read if i in writer})
        writer |= {plan.layout.storage(v).id: k for v in group.stored()}
    early = [0] * len(needs)
    for k, before in enumerate(needs):
        early[k] = 1 + max((early[j] for j in before), default=0)
    late = [max(early, default=0)] * len(needs)
    for k in reversed(range(len(needs))):
        for j in needs[k]:
            late[j] = min(late[j], late[k] - 1)
    return [b - a for a, b in zip(early, late, strict=True)]
