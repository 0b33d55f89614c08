"""Horizontal fusion: small independent kernels that run close to each other become sections of one kernel."""

from __future__ import annotations

from onnxc.planner.groups import Group, group_reads
from onnxc.planner.layout import Layout

SMALL_BYTES = 1 << 20  # of what a kernel writes: larger ones gain nothing from sharing a parallel region
WINDOW = 6  # kernels between the two at most


# Of one kernel: a compiler takes ever longer for a longer function.
MAX_SECTIONS = 64


def merge_small(groups: list[Group], layout: Layout) -> list[Group]:
    """The kernels in an order in which they can run, with small neighbours merged.

    `first` moves down to `second` where nothing in between reads what it writes, or writes what it reads.
    """
    out = list(groups)
    k = 0
    while k < len(out):
        first = out[k]
        if _is_small(first):
            for j in range(k + 1, min(len(out), k + 1 + WINDOW)):
                fits = len(first.sections) + len(out[j].sections) <= MAX_SECTIONS
                if fits and _is_small(out[j]) and not any(_depends(g, first, layout) for g in out[k + 1 : j + 1]):
                    out[j] = _merged(first, out[j])
                    del out[k]
                    k -= 1
                    break
        k += 1
    return out


def _is_small(group: Group) -> bool:
    if group.kind != "loops":
        return False
    written = [v.t.nbytes for v in group.stored()]
    return all(isinstance(n, int) for n in written) and sum(n for n in written if isinstance(n, int)) <= SMALL_BYTES


def _places(group: Group, layout: Layout) -> set[int]:
    """Values that a kernel writes, and the wholes that they are parts of."""
    found: set[int] = set()
    for v in group.stored():
        found.add(v.id)
        while v.id in layout.parts:
            v = layout.parts[v.id][0]
            found.add(v.id)
    return found


def _depends(later: Group, first: Group, layout: Layout) -> bool:
    return bool(group_reads(later) & _places(first, layout))


def _merged(first: Group, second: Group) -> Group:
    """One kernel with the sections of both."""
    shift = len(first.sections)
    placements = {**first.placements, **{k + shift: p for k, p in second.placements.items()}}
    reason = "horizontal: small and independent, so they share a kernel"
    return Group(
        "loops", None, None, [*first.sections, *second.sections], placements, [*first.nodes, *second.nodes],
        [*first.reasons, *second.reasons, reason],
    )  # fmt: skip
