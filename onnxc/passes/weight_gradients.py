"""Gradients of convolutions by their weights, found again in ONNX.

ONNX writes such a gradient as a Conv in which images and channels change places: its kernel is the whole map that came
back, its result as small as a kernel (`onnxc/export/contraction.py` spells `conv_weights` so). As a convolution that is
a poor shape; as `conv_weights` it has a kernel of its own, which reads both maps as they lie.
"""

from __future__ import annotations

import math

from onnxc.ir.expr import Dim, always_equal
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder, constant_of

NEAR = 4  # times that a map may be smaller than the kernel that went over it


def find_weight_gradients(graph: Graph) -> Graph:
    """The graph with `conv_weights` for each conv of exchanged maps."""
    r = Rewriter(graph)
    exchanged: dict[int, Value] = {}  # by results that are conv_weights with its first axes exchanged
    for node in graph.nodes:
        b = Builder()
        made = _gradient(b, node, r) if node.op == "conv" else None
        if made is not None:
            r.nodes += b.nodes
            exchanged[node.output.id] = made
            swapped = b.swap(made, 0, 1)
            r.nodes.append(b.nodes[-1])
            r.replace(node.output, swapped)
        elif node.op == "transpose" and node.operands[0].id in exchanged and _is_exchange(node):
            r.replace(node.output, exchanged[node.operands[0].id])
        else:
            r.keep(node)
    return r.result()


def _is_exchange(node: Node | None) -> bool:
    if node is None or node.op != "transpose":
        return False
    return tuple(node.attrs["perm"]) == (1, 0, *range(2, node.output.rank))


def _gradient(b: Builder, node: Node, r: Rewriter) -> Value | None:
    """conv_weights [M, C, taps...] whose first axes, exchanged, are the result of a conv; None for another conv."""
    attrs, image, kernel = node.attrs, node.operands[0], node.operands[1].node
    taps = node.output.shape[2:]
    if attrs.get("wide") or not _is_exchange(kernel) or constant_of(image) is not None:
        return None
    assert kernel is not None
    if not _is_gradient(image, kernel.output, taps, attrs["groups"]):
        return None
    with b.from_origin(node.origin):
        x, dy = _images(b, image, attrs["groups"]), kernel.operands[0]
        high = []
        keys = ("dilations", "strides", "low")
        rows = zip(taps, dy.shape[2:], *(attrs[key] for key in keys), strict=True)
        for axis, (k, out, stride, dilation, low) in enumerate(rows, 2):
            if not (isinstance(k, int) and isinstance(out, int) and isinstance(low, int)):
                return None
            reach = dilation * (k - 1) + stride * (out - 1) + 1 - low
            x = _cut(b, x, axis, reach, stride)
            size = x.shape[axis]
            if not isinstance(size, int):
                return None
            high.append(max(0, reach - size))
        found = b.one(
            "conv_weights", r.value(x) or x, r.value(dy) or dy, kernel=tuple(taps), strides=attrs["dilations"],
            dilations=attrs["strides"], low=attrs["low"], high=tuple(high), groups=attrs["groups"],
        )  # fmt: skip
    return found


def _is_gradient(image: Value, kernel: Value, taps: tuple[Dim, ...], groups: int) -> bool:
    """Whether a conv with an exchanged kernel is more likely a gradient than a convolution by computed weights.

    A gradient's kernel is a map, its result a kernel, and its channels are the images of a batch.
    """
    if not all(isinstance(d, int) for d in (*kernel.shape[2:], *taps)):
        return False
    sizes, results = (math.prod(d for d in dims if isinstance(d, int)) for dims in (kernel.shape[2:], taps))
    if NEAR * sizes >= results:
        return True
    channels, images = image.shape[:2]
    return groups == 1 and isinstance(channels, int) and isinstance(images, int) and channels >= images


def _cut(b: Builder, x: Value, axis: int, reach: int, stride: int) -> Value:
    """An image of which no window of `stride` fits between `reach` and its end: uncut where it may be, else cut.

    Where windows reach beyond a cut, there are zeros, not what was cut off.
    """
    left = x.shape[axis]
    if isinstance(left, int) and left >= reach and x.node is not None and x.node.op == "slice":
        a, whole = x.node.attrs, x.node.operands[0]
        size = whole.shape[axis]
        others = all(always_equal(d, e) for k, (d, e) in enumerate(zip(x.shape, whole.shape, strict=True)) if k != axis)
        fits = isinstance(size, int) and size - reach < stride
        first = all(start == 0 for start in a["starts"]) and all(step == 1 for step in a["steps"])
        if others and first and fits:
            return whole
    return b.slice(x, axis, 0, reach) if isinstance(left, int) and left - reach >= stride else x


def _images(b: Builder, image: Value, groups: int) -> Value:
    """The images [N, C, ...] of which a conv reads [C / groups, groups * N, ...]."""
    node = image.node
    if groups == 1:
        return node.operands[0] if node is not None and _is_exchange(node) else b.swap(image, 0, 1)
    c, n = image.shape[0], image.shape[1] // groups
    spatial = image.shape[2:]
    parts = b.reshape(image, (c, groups, n, *spatial))
    return b.reshape(b.transpose(parts, (2, 1, 0, *range(3, parts.rank))), (n, groups * c, *spatial))
