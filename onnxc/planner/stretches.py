"""Which stretches of a forward pass are computed again on the way back, so that a step takes so much memory at most.

The pass is divided where little goes from one part to the next. Of a stretch between two such places what goes beyond
it is saved, and either all dear results too, or these are computed again when the backward pass comes there. All that
the stretches ahead have saved is then still in memory, and what is cheap lies beside what is dear, since a chain of
pointwise operations is computed in one go. Stretches that take the fewest operations are found by dynamic programming
over these places.
(As in Chen and others, Training Deep Nets with Sublinear Memory Cost, with stretches of unequal sizes.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from onnxc.ir.graph import Node
from onnxc.primitives.base import Kind, lookup

SHARES = (1.2, 1.0, 0.9, 0.8, 0.65, 0.55, 0.5, 0.45, 0.4, 0.3, 0.2)  # of what is saved; cheap results come on top
MOST_PLACES = 48  # at which the forward pass may be divided
MOST_WAYS = 64  # to come to one of them


@dataclass(frozen=True)
class Costs:
    """What there is to choose from.

    Attributes:
        forward: nodes in order.
        sizes: bytes of each one's results.
        work: operations of each one, by its identity.
        cheap: the identities of those that are computed again in any case.
        dear: the identities of those that may be computed again.
    """

    forward: Sequence[Node]
    sizes: Sequence[int]
    work: Mapping[int, int]
    cheap: Set[int]
    dear: Set[int]


def stretches(costs: Costs) -> Iterator[set[int]]:
    """For each of SHARES, where it can be had, the identities of the nodes that may be computed again."""
    passes = _Forward(costs)
    most = passes.estimate()
    for share in SHARES if costs.forward else ():
        chosen = passes.fewest_operations(share * most)
        if chosen is not None:
            yield passes.nodes(chosen)


_Stretch = tuple[int, int, bool]  # the numbers of two places, and whether what is between is computed again


class _Way(NamedTuple):
    """A choice for all stretches up to a place."""

    saved: int  # bytes
    work: int
    chosen: tuple[_Stretch, ...]


class _Forward:
    """The forward pass, with the places at which it may be divided: the numbers of the nodes behind them."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        forward, count = costs.forward, len(costs.forward)
        self.last = _last_readers(forward)
        free = [id(n) in costs.cheap for n in forward]
        again = [f or id(n) in costs.dear for f, n in zip(free, forward, strict=True)]
        sizes = [0 if lookup(n.op).kind is Kind.VIEW else s for n, s in zip(forward, costs.sizes, strict=True)]
        self.movable = [s if a else 0 for s, a in zip(sizes, again, strict=True)]
        self.free = [s if f else 0 for s, f in zip(sizes, free, strict=True)]
        self.sizes = sizes
        fed = _fed(forward, costs.dear)
        self._saved = _sums(0 if f else s for s, f in zip(sizes, free, strict=True))
        self._fixed = _sums(0 if a else s for s, a in zip(sizes, again, strict=True))
        self._inside = _sums(s if not f or k in fed else 0 for k, (s, f) in enumerate(zip(sizes, free, strict=True)))
        self._work = _sums(costs.work[id(n)] if id(n) in costs.dear - costs.cheap else 0 for n in forward)
        self.places = _places(_crossing(self.movable, self.last), self._saved, count)

    def estimate(self) -> int:
        """About the peak where everything dear is saved."""
        return self._saved[-1] + 2 * max(self.sizes, default=0)

    def fewest_operations(self, most: float) -> tuple[_Stretch, ...] | None:
        """The stretches to compute again for a peak of about so many bytes; None where that cannot be had."""
        ways: list[list[_Way]] = [[_Way(0, 0, ())]]
        places = self.places
        for j in range(1, len(places)):
            found: list[_Way] = []
            every, cheap = (self._beyond(places[j], of) for of in (self.movable, self.free))
            for i in range(j):
                a, z = places[i], places[j]
                room = most - 2 * max(self.sizes[a:z])
                inside, work = self._inside[z] - self._inside[a], self._work[z] - self._work[a]
                kept, again = self._saved[z] - self._saved[a] + cheap(a), self._fixed[z] - self._fixed[a] + every(a)
                for way in ways[i]:
                    if way.saved + inside <= room:
                        found.append(_Way(way.saved + kept, way.work, (*way.chosen, (i, j, False))))
                        found.append(_Way(way.saved + again, way.work + work, (*way.chosen, (i, j, True))))
            ways.append(_best(found))
        return min(ways[-1], key=lambda w: w.work).chosen if ways[-1] else None

    def _beyond(self, place: int, sizes: Sequence[int]) -> Callable[[int], int]:
        """From where a stretch begins that ends at a place, the bytes that go beyond it."""
        alive = [k for k in range(place) if sizes[k] and self.last[k] >= place]
        totals = _sums(sizes[k] for k in alive)
        return lambda start: totals[-1] - totals[bisect_left(alive, start)]

    def nodes(self, chosen: Sequence[_Stretch]) -> set[int]:
        """What may be computed again: what is cheap, and all in some stretches; but nothing that goes beyond it."""
        costs = self.costs
        found = set(costs.cheap)
        for i, j, again in chosen:
            z = self.places[j]
            for k in range(self.places[i], z):
                node = costs.forward[k]
                if self.last[k] >= z and lookup(node.op).kind is not Kind.VIEW:
                    found.discard(id(node))
                elif again and id(node) in costs.dear:
                    found.add(id(node))
        return found


def _sums(numbers: Iterator[int]) -> list[int]:
    """Of the first so many, from none on."""
    return [0, *accumulate(numbers)]


def _best(ways: Sequence[_Way]) -> list[_Way]:
    """Those that no other one beats in both bytes and operations."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda w: (w.saved, w.work)):
        if not found or way.work < found[-1].work:
            found.append(way)
    step = -(-len(found) // MOST_WAYS)
    return found[:: max(1, step)]


def _last_readers(forward: Sequence[Node]) -> list[int]:
    """For each node the number of the last one that reads its results, or views of them."""
    last: dict[int, int] = {}
    for k, node in reversed(list(enumerate(forward))):
        own = max([k, *(last.get(v.id, k) for v in node.outputs)]) if lookup(node.op).kind is Kind.VIEW else k
        for v in node.operands:
            last[v.id] = max(last.get(v.id, 0), own)
    return [max([k, *(last.get(v.id, k) for v in n.outputs)]) for k, n in enumerate(forward)]


def _fed(forward: Sequence[Node], dear: Set[int]) -> set[int]:
    """The numbers of the nodes whose results products and convolutions read: these are in memory."""
    number = {v.id: k for k, n in enumerate(forward) for v in n.outputs}
    found = set[int]()
    for node in forward:
        for v in node.operands if lookup(node.op).kind is Kind.TEMPLATE and id(node) in dear else ():
            while v.node is not None and lookup(v.node.op).kind is Kind.VIEW and v.node.operands:
                v = v.node.operands[0]
            found.update({number[v.id]} if v.id in number else ())
    return found


def _crossing(sizes: Sequence[int], last: Sequence[int]) -> list[int]:
    """The bytes that go from the first nodes to the others, for each number of first nodes."""
    change = [0] * (len(sizes) + 1)
    for k, size in enumerate(sizes):
        change[k + 1] += size
        change[last[k] + 1] -= size
    return list(accumulate(change))


def _places(crossing: Sequence[int], saved: Sequence[int], count: int) -> list[int]:
    """Where to divide: where less goes over than next to it. Of many such places those where least does, far apart."""
    runs = [k for k in range(1, count) if crossing[k] != crossing[k - 1]]
    near = [(a, k, z) for a, k, z in zip(runs, runs[1:], runs[2:], strict=False)]
    low = [k for a, k, z in near if crossing[k] < min(crossing[a], crossing[z])]
    part = saved[-1] / MOST_PLACES or 1
    best: dict[int, int] = {}
    for k in low:
        box = int(saved[k] / part)
        if box not in best or crossing[k] <= crossing[best[box]]:
            best[box] = k
    found = low if len(low) < MOST_PLACES else sorted(best.values())
    return [0, *found, count]
