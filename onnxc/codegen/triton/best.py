"""The best along an axis (`top_k`).

The place of an element among the best of its line is the number of elements ahead of it, which a program counts for a
block of elements. It costs the square of a line's length, and no exchange between programs. Of long lines the planner
makes several stages (`onnxc.planner.stages`): where a line is made of runs that are in order, a program counts by
binary search; where few of many are wanted, it finds them first, in any order.
"""

from __future__ import annotations

from onnxc.codegen.triton.kernel import Kernel, indent, power
from onnxc.codegen.triton.lines import Lines, as_term
from onnxc.codegen.triton.terms import TileVariable
from onnxc.codegen.triton.writer import Writer, kept, loaded
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import ceildiv
from onnxc.ir.graph import Node
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout

BLOCK = 128  # elements that a program places
PIECE = 32  # others that it compares them with at a time
THREADS = 1024  # elements of a line for each 32 threads that look for its best
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}


def top_k(group: Group, layout: Layout) -> list[Kernel]:
    """The kernel of the best along an axis."""
    node = group.node
    assert node is not None
    if node.attrs.get("loose"):
        return [_in_any_order(group, layout)]
    lines = Lines(group, layout)
    (x,), n, k = node.operands, lines.n, node.outputs[0].shape[lines.axis]
    block, piece = (min(b, power(n)) if isinstance(n, int) else b for b in (BLOCK, PIECE))
    w = lines.writer()
    blocks = ceildiv(n, block)
    w.lines.append(f"line = pid // {w.size(blocks)}")
    lines.divide(w, "line")
    w.lanes("i", f"pid % {w.size(blocks)} * {block}", block, "[:, None]")
    kind = ".to(tl.int64)" if w.wide else ""
    w.lines.append(f"im = i < {w.size(n)}")
    text, found = lines.read(w, (block, 1), TileVariable("i", 0, block, "im"))
    w.lines += [*text, as_term("v", found, x)]
    if "runs" in node.attrs:
        piece = _searched(w, node, f"{lines.start(w, x)} + {{}} * {w.size(layout.strides(x)[lines.axis])}", block)
    else:
        order = "ox_above" if node.attrs["largest"] else "ox_below"
        text, found = lines.read(w, (1, piece), TileVariable("j", 1, piece, "jm"))
        w.lines += [
            f"lane = tl.arange(0, {piece}){kind}[None, :]", f"ahead = tl.zeros(({block}, {piece}), tl.int32)",
            f"for j0 in range(0, {w.size(n)}, {piece}):",
            *indent([
                "j = j0 + lane", f"jm = j < {w.size(n)}", *text, as_term("u", found, x),
                f"ahead += (jm & ({order}(u, v) | (ox_same(u, v) & (j < i)))).to(tl.int32)",
            ]),
            f"place = ox_sum(ahead, 1){kind}",
        ]  # fmt: skip
    w.lines += [
        f"chosen = im & (place < {w.size(k)})",
        *_stored(w, lines, kept("v", x.dtype)),
    ]
    return [w.kernel(lines.count * blocks, block * piece)]


def _stored(w: Writer, lines: Lines, value: str) -> list[str]:
    """Statements that store the elements that are `chosen`, and their positions `i`, at their `place`."""
    assert lines.group.node is not None
    targets = [
        f"{lines.start(w, v)} + place * {w.size(lines.layout.strides(v)[lines.axis])}" for v in lines.group.node.outputs
    ]
    return [f"tl.store({t}, {v}, mask=chosen)" for t, v in zip(targets, (value, "i.to(tl.int64)"), strict=True)]


def _searched(w: Writer, node: Node, at: str, block: int) -> int:
    """The places of elements `v` of runs that are in order: how many are ahead in each other run, by binary search.

    Returns how many runs are searched side by side.
    """
    (x,), length = node.operands, node.attrs["runs"]
    n = x.shape[node.attrs["axis"]]
    assert isinstance(n, int)
    runs, kind = n // length, ".to(tl.int64)" if w.wide else ""
    lanes = power(runs)
    order = "ox_above" if node.attrs["largest"] else "ox_below"
    w.lines += [
        f"s = tl.arange(0, {lanes}){kind}[None, :]", f"own = i // {length}",
        f"searched = im & (s < {runs}) & (s != own)", f"low = tl.zeros(({block}, {lanes}), tl.int32){kind}",
        f"high = tl.where(searched, {length}, low)",
        f"for _ in range({length.bit_length()}):",
        *indent([
            "open = low < high", "middle = (low + high) // 2",
            f"u = {loaded(at.format(f'(s * {length} + middle)'), 'open', x.dtype)}",
            f"ahead = {order}(u, v) | (ox_same(u, v) & (s < own))",
            "low = tl.where(open & ahead, middle + 1, low)", "high = tl.where(open & (ahead == 0), middle, high)",
        ]),
        f"place = i % {length} + ox_sum(low, 1)",
    ]  # fmt: skip
    return lanes


# ---------------------------------------------------------------- in any order


def _in_any_order(group: Group, layout: Layout) -> Kernel:
    """A program holds a line, as integers in the order of its elements, and finds the k-th of them bit by bit: the
    greatest number that k elements reach. Then it writes what is above, and after that its equals, up to k.
    """
    node, lines = group.node, Lines(group, layout)
    assert node is not None
    (x,), n, k = node.operands, lines.n, node.attrs["k"]
    w = lines.writer()
    assert isinstance(n, int)
    lanes = power(n)
    lines.divide(w, "pid")
    w.lanes("i", "0", lanes)
    w.lines.append(f"im = i < {n}")
    text, found = lines.read(w, (lanes,), TileVariable("i", 0, lanes, "im"))
    w.lines += [*text, f"v = {found}"]
    bits, kind = _keys(w, x.dtype)
    w.lines += [] if node.attrs["largest"] else ["key = ~key"]
    w.lines += [
        f"reached = tl.sum((im & (key >= 0)).to(tl.int32), 0) >= {k}",
        f"last = tl.where(reached, tl.full((), 0, {kind}), tl.full((), {-(1 << bits - 1)}, {kind}))",
        f"step = tl.full((), {1 << bits - 2}, {kind})",
        f"for _ in range({bits - 1}):",
        *indent([
            "reached = tl.sum((im & (key >= last + step)).to(tl.int32), 0) >= " + str(k),
            "last = tl.where(reached, last + step, last)", "step = step // 2",
        ]),
        "above = im & (key > last)", "same = im & (key == last)",
        "ranks = tl.cumsum(above.to(tl.int32) + same.to(tl.int32) * 65536, 0)",
        "before = tl.sum(above.to(tl.int32), 0)",
        "place = tl.where(above, ranks % 65536, before + ranks // 65536) - 1",
        f"chosen = above | (same & (place < {k}))",
        *_stored(w, lines, "v"),
    ]  # fmt: skip
    warps = max(1, min(16, lanes // THREADS))
    return Kernel(w.lines, w.buffers, lines.count, warps, kind="opaque", wide=w.wide)


def _keys(w: Writer, dtype: DType) -> tuple[int, str]:
    """Writes elements `v` as integers `key` of the same order: the bits that these have, and their type."""
    if not dtype.is_float:
        bits = dtype.bits + (dtype.kind == "uint")
        kind = "tl.int64" if bits > 32 else "tl.int32"
        w.lines.append(f"key = v.to({kind})")
        return bits, kind
    bits, most = dtype.bits, (1 << dtype.bits - 1) - 1
    kind = "tl.int64" if bits > 32 else "tl.int32"
    w.lines += [
        f"key = v.to(tl.int{bits}, bitcast=True).to({kind})",
        f"nan = (key & {most}) > {_INFINITY[dtype.name]}",
        f"key = tl.where(key < 0, key ^ {most}, key)",
        "key = tl.where(key == -1, 0, key)",  # that was -0.0
        f"key = tl.where(nan, {most}, key)",
    ]
    return bits, kind
