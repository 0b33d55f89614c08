"""The derivative of a `loop`, whose number of iterations only a run tells: a loop back over as many."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.reverse import active_values, gradients
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.errors import InternalError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value, cloned
from onnxc.ir.types import TensorType, same_shape
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.builder import Builder
from onnxc.primitives.control import close_region
from onnxc.primitives.host import RunTime


def keeping(node: Node, run_time: RunTime) -> Node:
    """A loop with further results: what it carries before each iteration, and a 1 for each. One that carries what
    cannot be stacked (another shape in each iteration, a sequence) stays as it is.
    """
    region, carried = node.regions[0], node.attrs["carried"]
    before = region.inputs[2 : 2 + carried]
    if _misfit(node) is not None:
        return node
    results = node.outputs[carried:]
    count = results[0].shape[0] if results and isinstance(results[0].type, TensorType) else run_time.size()
    inner = Builder()
    saved = [*before, inner.scalar(1, dtypes.int64)]
    stacked = [Value(v.t.with_shape((count, *v.shape))) for v in saved]
    attrs = {k: v for k, v in node.attrs.items() if k != "chunk"} | {
        "scans": node.attrs["scans"] + len(saved), "saved": len(saved),
    }  # fmt: skip
    ends = [*region.outputs, *saved]
    body = Graph(region.inputs, ends, [*region.nodes, *inner.nodes], [f"out{k}" for k in range(len(ends))])
    return Node("loop", node.inputs, [*node.outputs, *stacked], attrs, [body], node.origin)


def _misfit(node: Node) -> int | None:
    """The number of a carried value that is no tensor of one type all the way."""
    region = node.regions[0]
    for k in range(node.attrs["carried"]):
        x, inside, after = node.inputs[2 + k], region.inputs[2 + k], region.outputs[1 + k]
        if x is None or not _alike(x, inside) or not _alike(inside, after):
            return k
    return None


def _alike(a: Value, b: Value) -> bool:
    """Whether two values are tensors of one type."""
    if not isinstance(a.type, TensorType) or not isinstance(b.type, TensorType):
        return False
    return a.dtype is b.dtype and same_shape(a.shape, b.shape)


@rule("loop")
def loop(s: Step) -> Gradients:
    """From the last iteration to the first: each computes its iteration again from what was carried before it.

    What is carried on the way back are the cotangents of what was carried, and sums of those of what every iteration
    reads.
    """
    k = _misfit(s.node)
    if k is not None:
        inside, after = s.node.regions[0].inputs[2 + k], s.node.regions[0].outputs[1 + k]
        where = next((f"{o} ({o.line})" if o.line else str(o) for o in s.node.origin), "Loop")
        raise UnsupportedError(
            f"a loop has no derivative that carries what changes its shape from one iteration to the next, or what is "
            f"no tensor: value {k} of {where} is {inside.type}, and {after.type} after an iteration"
        )
    if "saved" not in s.node.attrs:
        raise InternalError("a loop is differentiated that has not kept what it carries: see keep_steps")
    return _Back(s).build()


class _Back:
    """Builds the loop of the way back."""

    def __init__(self, s: Step) -> None:
        self.s, self.region = s, s.node.regions[0]
        self.carried = s.node.attrs["carried"]
        self.fixed = 2 + self.carried  # from here on the operands are what every iteration reads
        *self.saved, self.ones = s.node.outputs[len(s.node.outputs) - self.carried - 1 :]
        self.inner = Builder(s.b.differentiable, s.b.run_time)
        self.inner.origin = s.b.origin
        self.number, self.go = (self.inner.input(TensorType(t, ())) for t in (dtypes.int64, dtypes.boolean))

    def build(self) -> Gradients:
        s, b, inner, x = self.s, self.s.b, self.inner, self.s.node.inputs
        wanted = self.differentiated()
        trip = b.reduce("sum", self.ones, [0])
        at = inner.sub(inner.sub(trip, self.number), inner.scalar(1, dtypes.int64))
        states = [inner.input(self.read(k).t) for k in wanted]
        starts = [*wanted, *(k for k in range(self.fixed, len(x)) if s.needed[k])]
        found = self.again(starts, wanted, states, at)
        after: list[Value] = [dx or zeros_like(inner, v) for v, dx in zip(states, found.values(), strict=False)]
        init = [self.cotangent(k) for k in wanted]
        sums = [k for k in starts[len(wanted) :] if found[k] is not None]
        for k in sums:
            dx = found[k]
            assert dx is not None
            states.append(inner.input(dx.t))
            init.append(zeros_like(b, self.read(k)))
            after.append(inner.add(states[-1], dx))
        outputs = dict(zip((*wanted, *sums), self.run(trip, init, after), strict=True))
        return [outputs.get(k) for k in range(len(x))]

    def read(self, k: int) -> Value:
        """An operand; only the first two may be missing."""
        x = self.s.node.inputs[k]
        assert x is not None
        return x

    def again(
        self, starts: Sequence[int], wanted: Sequence[int], states: Sequence[Value], at: Value
    ) -> dict[int, Value | None]:
        """The iteration `at` once more, and the cotangents of some of the operands in it, by their numbers."""
        inner, places = self.inner, self.places(at)
        copies = [inner.one("copy", places[self.region.inputs[k].id]) for k in starts]
        places |= {self.region.inputs[k].id: v for k, v in zip(starts, copies, strict=True)}
        nodes = cloned(self.region.nodes, places)
        inner.nodes += nodes
        found = gradients(inner, nodes, self.seeds(places, wanted, states, at), copies)
        return dict(zip(starts, found, strict=True))

    def differentiated(self) -> list[int]:
        """The numbers of the carried operands that depend on what is wanted: at first, or after some iterations."""
        wanted = [k for k, n in enumerate(self.s.needed) if n and k >= 2]
        while True:
            active = active_values(self.region.nodes, [self.region.inputs[k] for k in wanted])
            more = [2 + k for k in range(self.carried)
                    if 2 + k not in wanted and self.region.outputs[1 + k].id in active]  # fmt: skip
            if not more:
                return sorted(k for k in wanted if k < self.fixed)
            wanted += more

    def places(self, at: Value) -> dict[int, Value]:
        """What an iteration had read, by the ids of the region's inputs."""
        inputs = self.region.inputs
        found = {inputs[0].id: at, inputs[1].id: self.inner.scalar(True, dtypes.boolean)}
        for v, stack in zip(inputs[2 : self.fixed], self.saved, strict=True):
            found[v.id] = self.inner.reshape(self.inner.gather(stack, at, 0), v.shape)
        return found | {v.id: self.read(k) for k, v in enumerate(inputs[self.fixed :], self.fixed)}

    def seeds(
        self, places: dict[int, Value], wanted: Sequence[int], states: Sequence[Value], at: Value
    ) -> dict[int, Value]:
        """The cotangents of an iteration's results: from the one after it, and from what reads the stacked ones."""
        inner, ends, dys = self.inner, self.region.outputs, self.s.dys
        pairs = [(ends[k - 1], dy) for k, dy in zip(wanted, states, strict=True)]
        for k in range(self.carried, len(dys)):
            dy = dys[k]
            if dy is not None:
                pairs.append((ends[1 + k], inner.gather(dy, at, 0)))
        found: dict[int, Value] = {}
        for end, dy in pairs:
            vid = places.get(end.id, end).id
            dy = inner.reshape(dy, places.get(end.id, end).shape)
            found[vid] = inner.add(found[vid], dy) if vid in found else dy
        return found

    def cotangent(self, k: int) -> Value:
        """That of a carried value's last."""
        dy, x = self.s.dys[k - 2], self.read(k)
        return zeros_like(self.s.b, x) if dy is None else self.s.b.reshape(dy, x.shape)

    def run(self, trip: Value, init: Sequence[Value], after: Sequence[Value]) -> list[Value]:
        """The loop itself: what it carries in the end."""
        ends = [self.go, *after]
        nodes = eliminate_dead(Graph([], ends, self.inner.nodes, [""] * len(ends))).nodes
        region, taken = close_region(self.inner.inputs, nodes, ends)
        outputs = [Value(v.type) for v in init]
        attrs = {"carried": len(init), "scans": 0}
        self.s.b.nodes.append(Node("loop", [trip, None, *init, *taken], outputs, attrs, [region], self.s.b.origin))
        return outputs
