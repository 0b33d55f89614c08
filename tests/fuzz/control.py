"""Steps: If, Loop, Scan with bodies that grow like models; sequences and optionals."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, helper

from tests.fuzz.grow import BOOL, I64, Grower, Item, Skip, broadcasts
from tests.fuzz.oracle import value_info
from tests.fuzz.steps import STEPS, step

DEEPEST = 3  # bodies in each other


def _grown(g: Grower, count: int, start: list[Item]) -> Item:
    """The last value of a few random steps, which rather read `start`; some of them have bodies of their own."""
    own = [take for _, take in STEPS if take.__module__ != __name__]
    nests = [take for _, take in STEPS if take.__module__ == __name__]
    last = start[-1]
    for _ in range(6 * count):
        if len(g.nodes) >= count:
            break
        g.pool += [i for i in start if g.chance(0.5)]
        try:
            made = g.choice(nests if g.depth < DEEPEST and g.chance(0.15) else own)(g)
        except Skip:
            continue
        last = made if isinstance(made, Item) else made[0] if made else last
    return last


def _like(g: Grower, x: Item, target: Item) -> Item:
    """A value of the type of `target`, computed from `x` where it can be."""
    if (
        x.dtype == target.dtype
        and x.is_number
        and broadcasts(x.shape, target.shape)
        and np.broadcast_shapes(x.shape, target.shape) == target.shape
    ):
        y = g.emit("Add", [x, target]) if g.chance(0.7) or x.shape != target.shape else x
    else:
        y = target
    if y.is_float:
        return g.emit("Mul", [y, g.constant(np.asarray(0.5, y.dtype))])
    return g.emit("Identity", [y])


def _graph(g: Grower, nodes: list, inputs: list[Item], outputs: list[Item]) -> GraphProto:
    """A body; an output that it does not compute itself is copied."""
    own = {o for n in nodes for o in n.output}
    names, extra, seen = [], [], set()
    for item in outputs:
        name = item.name
        if name not in own or name in seen:
            name = g.name("o")
            extra.append(helper.make_node("Identity", [item.name], [name]))
        seen.add(name)
        names.append(name)
    infos = [value_info(i.name, i.value) for i in inputs]
    ends = [value_info(n, i.value) for n, i in zip(names, outputs, strict=True)]
    return helper.make_graph([*nodes, *extra], g.name("g"), infos, ends)


def _known(g: Grower, array: np.ndarray) -> Item:
    """An input of a body, as it is in the first iteration."""
    item = Item(g.name("i"), np.asarray(array))
    g._know(item.name, item.array)
    return item


@step(4)
def if_(g: Grower) -> list[Item]:
    x = g.pick()
    nodes, _, (end, *_) = g.body(lambda: [_grown(g, g.integer(1, 3), [x])])
    branches = [(nodes, end)]

    def other() -> list[Item]:
        """Of the same type and rank; of another shape, where it happens so."""
        y = _grown(g, g.integer(1, 3), [x])
        alike = not y.is_sequence and y.dtype == end.dtype and y.rank == end.rank
        return [y if alike else g.emit("Identity", [g.fresh(end.dtype, end.shape)])]

    nodes, _, (last, *_) = g.body(other)
    branches.append((nodes, last))
    g.r.shuffle(branches)
    if g.chance(0.5):
        condition = g.constant(np.asarray(g.chance(0.5))) if g.chance(0.3) else g.fresh(BOOL, [], constant=False)
    else:
        y = g.emit("ReduceMax", [g.float(0)], keepdims=0)
        condition = g.emit("Greater", [y, g.constant(np.asarray(0.3, y.dtype))])
    graphs = [_graph(g, nodes, [], [end]) for nodes, end in branches]
    return g.add(helper.make_node("If", [condition.name], [g.name()], then_branch=graphs[0], else_branch=graphs[1]))


@step(4)
def loop(g: Grower) -> list[Item]:
    """A trip count, known or not; a condition, now and then; carried values and results of each iteration."""
    x = g.number()
    trip, known, stacks = g.integer(0, 4), g.chance(0.5), g.chance(0.6)
    trip += stacks and not trip  # of no iterations onnxruntime stacks a shape of zeros
    count = g.constant(np.asarray(trip, np.int64)) if known else g.emit("Abs", [g.constant(np.asarray(trip, np.int64))])
    if not known and g.chance(0.5):
        count = g.emit("Size", [g.fresh(I64, [trip], constant=False, fixed=True)])
    number, condition, carried = _known(g, np.asarray(0, np.int64)), _known(g, np.asarray(True)), _known(g, x.array)

    def make() -> list[Item]:
        end = _grown(g, g.integer(1, 4), [carried])
        after = _like(g, end, carried)
        go = (
            g.emit("Less", [g.emit("Cast", [number], to=1), g.constant(np.asarray(g.integer(0, 5) + 0.5, np.float32))])
            if g.chance(0.4)
            else condition
        )
        return [go, after, *([end] if stacks else [])]

    nodes, _, ends = g.body(make)
    body = _graph(g, nodes, [number, condition, carried], ends)
    outputs = [g.name() for _ in ends[1:]]
    start = "" if g.chance(0.6) else g.constant(np.asarray(True)).name
    return g.add(helper.make_node("Loop", [count.name, start, x.name], outputs, body=body))


@step(3)
def scan(g: Grower) -> list[Item]:
    if g.opset < 9:
        raise Skip
    x = g.pick(lambda i: i.is_number and i.rank >= 1 and 0 not in i.shape)
    axis = g.integer(0, x.rank - 1)
    part = _known(g, np.take(x.array, 0, axis))
    state = g.fresh(x.dtype, part.shape)
    carried = _known(g, state.array)
    back = g.chance(0.3)

    def make() -> list[Item]:
        y = g.emit("Add", [carried, part])
        end = _grown(g, g.integer(1, 4), [part, y])
        return [_like(g, y, carried), end]

    nodes, _, ends = g.body(make)
    body = _graph(g, nodes, [carried, part], ends)
    attrs = {"scan_input_axes": [axis], "scan_input_directions": [1 if back else 0]} if axis or back else {}
    if g.chance(0.3):
        attrs["scan_output_axes"] = [g.integer(0, ends[1].rank)]
    return g.add(
        helper.make_node("Scan", [state.name, x.name], [g.name(), g.name()], body=body, num_scan_inputs=1, **attrs)
    )


@step(3)
def sequences(g: Grower) -> Item:
    x = g.pick()
    if g.opset < 11:
        raise Skip
    if g.chance(0.4) and x.rank and x.shape[0] > 0:
        s = g.emit("SplitToSequence", [x], axis=g.integer(0, x.rank - 1), keepdims=g.choice([None, 0, 1]))
    else:
        s = g.emit("SequenceConstruct", [x, *(g.like(x) for _ in range(g.integer(0, 2)))])
    if g.chance(0.3):
        s = g.emit("SequenceInsert", [s, x])
    if g.chance(0.2):
        s = g.emit("SequenceErase", [s])
    if g.chance(0.2):
        return g.emit("SequenceLength", [s])
    alike = len({v.shape[1:] for v in s.value}) == 1  # onnxruntime leaves out what is empty, whatever its shape
    if alike and g.chance(0.4):
        return g.emit("ConcatFromSequence", [s], axis=0, new_axis=g.choice([None, 1]))
    at = g.fresh(I64, [], constant=True) if g.chance(0.5) else g.constant(np.asarray(-1, np.int64))
    return g.emit("SequenceAt", [s, at])


@step(1)
def optionals(g: Grower) -> Item:
    x = g.pick()
    o = g.emit("Optional", [x])
    g.pool.remove(o)
    return g.emit(g.choice(["OptionalHasElement", "OptionalGetElement"]), [o])
