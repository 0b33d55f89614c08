"""The last pass before planning: what must lie in a buffer of its own gets a node that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.contraction import images_of
from onnxc.primitives.kernels import USER


def _copy(value: Value) -> Node:
    return Node("copy", [value], [Value(value.t)], {}, (), value.node.origin if value.node else ())


def _rebuilt(node: Node, inputs: Sequence[Value | None], regions: Sequence[Graph]) -> Node:
    return Node(node.op, inputs, node.outputs, node.attrs, regions, node.origin)


def _has_two_orders(output: Value, readers: Sequence[Node]) -> bool:
    """True for an output that is also wanted channels-last, which outputs are not."""
    if output.node is not None and output.node.op == "conv" and readers:
        return True
    return any(v is output for r in readers for v in images_of(r))


PLANES = 4  # most channels of an image of which a convolution turns a few rows at a time, rather than the whole


def reads_planes(node: Node) -> bool:
    """True for a convolution that would read a graph input as it lies: a photograph, say."""
    channels = node.operands[0].shape[1]
    few = isinstance(channels, int) and channels <= PLANES
    return few and node.attrs["groups"] == 1 and not node.attrs.get("wide")


def joins_phases(value: Value | None) -> bool:
    """True for a tensor whose pixels are set side by side from several convolutions, or cut out of what one makes, as
    transposed convolutions do, and for what is computed of such a tensor element by element.

    Pixels come in turns from places that are apart, so that only channels are neighbours on both sides.
    """
    moved = False
    while value is not None and value.node is not None and value.rank >= 3:
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


def prepare(graph: Graph) -> Graph:
    """Copies outputs that are inputs, constants or other outputs, and graph inputs and constants that a
    convolution reads, or what goes into and out of regions.

    (A convolution wants its input channels-last, and these are row-major: the copy changes the order.)
    An output that a convolution reads, or makes for other nodes, is copied too: it may then have both orders. So is one
    that joins the phases of a transposed convolution: they are joined channels-last, and then turned.
    """
    nodes: list[Node] = []
    moved: dict[int, Value] = {}
    inputs = {v.id for v in graph.inputs}
    row_major = inputs | at_regions(graph)
    readers = graph.uses()
    for node in graph.nodes:
        images = images_of(node) if not (node.op == "conv" and reads_planes(node)) else ()
        for x in images:
            if x.id in row_major or constant_of(x) is not None:
                if x.id not in moved:
                    nodes.append(_copy(x))
                    moved[x.id] = nodes[-1].output
                node = _rebuilt(node, [moved[x.id] if v is x else v for v in node.inputs], node.regions)
        if node.regions:
            node = _rebuilt(node, node.inputs, [prepare(g) for g in node.regions])
        nodes.append(node)
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
