"""The last pass before planning: what must lie in a buffer of its own gets a node that makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.contraction import images_of
from onnxc.primitives.kernels import USER


def _copy(value: Value) -> Node:
    return Node("copy", [value], [Value(value.t)], {}, (), value.node.origin[:1] if value.node else ())


def _cut(view: Node) -> list[Node]:
    """A view, and a copy that has its place."""
    seen = Value(view.output.t)
    return [
        Node(view.op, view.inputs, [seen], view.attrs, (), view.origin),
        Node("copy", [seen], view.outputs, {}, (), view.origin),
    ]


def _rebuilt(node: Node, inputs: Sequence[Value | None], regions: Sequence[Graph]) -> Node:
    return Node(node.op, inputs, node.outputs, node.attrs, regions, node.origin)


def _has_two_orders(output: Value, readers: Sequence[Node]) -> bool:
    """True for an output that is also wanted channels-last, which outputs are not."""
    if output.node is not None and output.node.op == "conv" and readers:
        return True
    return any(v is output for r in readers for v in images_of(r))


MOST_VIEWS = 32  # that follow each other: the place of an element is an expression through all of them
MOST_STEPS = 64  # from a tensor back to the convolutions that it may be joined of
PLANES = 4  # most channels of an image of which a convolution turns a few rows at a time, rather than the whole


def reads_planes(node: Node) -> bool:
    """True for a convolution that would read a graph input as it lies: a photograph, say."""
    channels = node.operands[0].shape[1]
    few = isinstance(channels, int) and channels <= PLANES
    return few and node.attrs["groups"] == 1 and not node.attrs.get("wide")


FEW_OUTPUTS = 4  # channels of a group that a kernel of pixels sums at once
FEW_INPUTS = 8  # of a group, of several
FEW_TAPS = 16  # of an image's kernel: more gain from whole vectors of channels what it takes to turn the image
NARROW_ROWS = 12  # pixels: shorter rows leave many of the lanes empty
PIXEL_STRIDE = 4  # the longest of a kernel whose lanes are pixels


def can_take_pixels(node: Node) -> bool:
    """Whether a kernel whose lanes are pixels can compute a convolution."""
    a = node.attrs
    plain = max(a["strides"]) <= PIXEL_STRIDE and max(a["dilations"]) < 1 << 20 and not a.get("wide")
    return plain and constant_of(node.operands[1]) is not None and node.output.dtype is dtypes.float32


def reads_rows(node: Node, graph: Graph, readers: Mapping[int, Sequence[Node]]) -> bool:
    """True for a convolution of few outputs in each group, depthwise ones among them, that reads a graph input as it
    lies and writes its result so, since that becomes an output element by element: its lanes are pixels.
    """
    if node.op != "conv" or node.operands[0].node is not None or not can_take_pixels(node):
        return False
    if not any(v is node.operands[0] for v in graph.inputs):
        return False
    groups, (out, each), width = node.attrs["groups"], node.operands[1].shape[:2], node.output.shape[-1]
    if int(out) // groups > FEW_OUTPUTS or (groups > 1 and int(each) > FEW_INPUTS) or reads_planes(node):
        return False
    taps = math.prod(map(int, node.operands[1].shape[2:])) if node.output.rank > 3 else FEW_TAPS + 1
    if (isinstance(width, int) and width < NARROW_ROWS) or (groups >= VECTOR and taps > FEW_TAPS):
        return False
    value, outputs = node.output, {v.id for v in graph.outputs}
    while value.id not in outputs:
        users = readers.get(value.id, ())
        if len(users) != 1 or lookup(users[0].op).kind is not Kind.POINTWISE or users[0].output.shape != value.shape:
            return False
        value = users[0].output
    return not readers.get(value.id)


def joins_phases(value: Value | None) -> bool:
    """True for a tensor whose pixels are set side by side from several convolutions, or cut out of what one makes, as
    transposed convolutions do, and for what is computed of such a tensor element by element.

    Pixels come in turns from places that are apart, so that only channels are neighbours on both sides.
    """
    moved = False
    for _ in range(MOST_STEPS):
        if value is None or value.node is None or value.rank < 3:
            return False
        node = value.node
        if node.op in ("reshape", "transpose"):
            moved, value = moved or _shuffles_rows(node), node.operands[0]
        elif node.op == "slice" or (node.op == "concat" and _sets_side_by_side(node)):
            cut = value.rank > 3 and _reads_shuffled(node)  # where one axis is joined, neighbours lie side by side
            moved, value = moved or node.op == "concat" or cut, node.operands[0]
        elif node.op == "conv":
            return moved
        elif lookup(node.op).kind is Kind.POINTWISE:
            whole = [v for v in node.operands if v.shape == node.output.shape]
            value = whole[0] if len(whole) == 1 else None
        else:
            return False
    return False


def _sets_side_by_side(concat: Node) -> bool:
    """Whether each part is one place along the axis, which is none of the batch or of the channels."""
    axis = concat.attrs["axis"]
    return axis >= 3 and all(v.shape[axis] == 1 for v in concat.operands)


def _shuffles_rows(node: Node) -> bool:
    """Whether a reshape makes an image of a transposed result, of which whole vectors of channels are moved."""
    shuffle = node.operands[0].node
    if node.op != "reshape" or shuffle is None or shuffle.op != "transpose" or node.output.rank < 4:
        return False
    split = shuffle.operands[0]
    if split.node is None or split.node.op != "reshape" or split.node.operands[0].rank != node.output.rank:
        return False
    channels = split.shape[split.rank - node.output.rank + 1]  # the innermost of what the channels were divided into
    return isinstance(channels, int) and channels % VECTOR == 0


VECTOR = 16  # channels of which any vector's length is a divisor


def _reads_shuffled(node: Node) -> bool:
    """Whether a slice reads what a reshape made of a transposed tensor."""
    source = node.operands[0].node
    while source is not None and source.op == "slice":
        source = source.operands[0].node
    behind = source.operands[0].node if source is not None and source.op == "reshape" else None
    return behind is not None and behind.op == "transpose"


def at_regions(graph: Graph) -> set[int]:
    """Values that regions and users' kernels are given, or that come out of them: row-major, as these take them."""
    nodes = [n for n in graph.nodes if n.regions or n.op == USER]
    return {v.id for n in nodes for v in (*n.inputs, *n.outputs) if v is not None}


def prepare(graph: Graph, *, rows: bool = True) -> Graph:
    """Copies outputs that are inputs, constants or other outputs, and graph inputs and constants that a
    convolution reads, or what goes into and out of regions.

    (A convolution wants its input channels-last, and these are row-major: the copy changes the order.)
    An output that a convolution reads, or makes for other nodes, is copied too: it may then have both orders. So is one
    that joins the phases of a transposed convolution: they are joined channels-last, and then turned. Where many views
    follow each other, one of them is copied.
    With `rows` there are kernels for what `reads_rows` finds.
    """
    nodes: list[Node] = []
    moved: dict[int, Value] = {}
    views: dict[int, int] = {}  # value id -> how many views follow each other before it
    inputs = {v.id for v in graph.inputs}
    row_major = inputs | at_regions(graph)
    readers = graph.uses()
    for node in graph.nodes:
        lies = node.op == "conv" and (reads_planes(node) or (rows and reads_rows(node, graph, readers)))
        images = () if lies else images_of(node)
        for x in images:
            if x.id in row_major or constant_of(x) is not None:
                if x.id not in moved:
                    nodes.append(_copy(x))
                    moved[x.id] = nodes[-1].output
                node = _rebuilt(node, [moved[x.id] if v is x else v for v in node.inputs], node.regions)
        if node.regions:
            node = _rebuilt(node, node.inputs, [prepare(g, rows=rows) for g in node.regions])
        nodes.append(node)
        if node.op in ("reshape", "transpose", "expand", "slice"):
            views[node.output.id] = views.get(node.operands[0].id, 0) + 1
            if views[node.output.id] > MOST_VIEWS:
                nodes[-1:] = _cut(node)
                views[node.output.id] = 0
    outputs: list[Value] = []
    taken: set[int] = set()
    for v in graph.outputs:
        shared = v.id in inputs or v.id in taken or constant_of(v) is not None or joins_phases(v)
        if shared or _has_two_orders(v, readers.get(v.id, ())):
            nodes.append(_copy(v))
            v = nodes[-1].output
        taken.add(v.id)
        outputs.append(v)
    return replace(graph, nodes=nodes, outputs=outputs)
