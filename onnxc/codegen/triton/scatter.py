"""Scatters: updates that are written to places which data names, or joined with what is there.

Results do not depend on the order in which programs run:

- Where nothing is joined, the last of the updates that reach one element is written. A first kernel marks each place
  with the greatest number of its updates (an atomic maximum of integers), a second one writes those that were marked.
  Integers that are added or compared are joined by atomics instead, in whatever order.
- So many updates that reading all of them in each program would take long are sorted by their places first, and joined
  in order (scatter_sorted.py). Where the run decides how many there are, it chooses.
- Many updates that are joined otherwise (scatter_joins.py): each program has some of the places to itself. It looks at
  the places of all updates, some at a time, and joins those that are its own, in the order of the CPU; but many rows of
  float32 that are added up in one place, some at a time.
- Rows of float32 that are added up, as of an embedding's gradient, have a program for each row (there too): where it is
  the first for its place, it adds up all rows for this place, some at a time. That order is fixed too.
- Few updates, joined or not: the first of those that reach one element joins them all. A program compares a block of
  updates with all of their line, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnxc.codegen.cpp.routine import without
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import WIDE, Kernel, either, indent, power
from onnxc.codegen.triton.scatter_joins import joined_elements, joined_rows, most_rows
from onnxc.codegen.triton.scatter_parts import COPIED, Slices, begun, find, joined, row_major
from onnxc.codegen.triton.scatter_sorted import sorted_elements, sorted_rows
from onnxc.codegen.triton.writer import Reach, Writer, kept, loaded
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, bounds, ceildiv, exceeds, prod
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.planner import operands
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.operands import is_joined_in_order
from onnxc.primitives.builder import constant_of

BLOCK = 128  # elements (updates) that a program places
SLICE = 64  # neighbouring elements of a slice in a tile
FEW = 64  # updates of a line that are compared with each other


def scatter_elements(group: Group, layout: Layout) -> list[Kernel]:
    """The kernels of a scatter along one axis."""
    node = group.node
    assert node is not None
    data, index, _ = node.operands
    axis, out = node.attrs["axis"], node.output
    distinct = node.attrs.get("distinct", False) or _distinct(index, axis, out.shape[axis])
    if distinct or _are_few(index.shape[axis]):
        return [begun(layout, data, out), _compared_elements(node, layout, distinct)]
    if not is_joined_in_order(node):
        return _marked_elements(node, layout)
    many = exceeds(index.shape[axis], operands.SORTED)
    joins = either(many, lambda: sorted_elements(group, layout), lambda: [joined_elements(node, layout)])
    return [begun(layout, data, out), *joins]


def scatter_nd(group: Group, layout: Layout) -> list[Kernel]:
    """The kernels of a scatter of slices."""
    node = group.node
    assert node is not None
    data, index, _ = node.operands
    count = prod(index.shape[:-1])
    if _are_few(count):
        return [begun(layout, data, node.output), _compared_rows(node, layout)]
    if not is_joined_in_order(node):
        return _marked_rows(node, layout)
    few = [begun(layout, data, node.output), joined_rows(node, layout)]
    most = min(operands.SORTED, most_rows(node, layout) or operands.SORTED)
    return either(exceeds(count, most), lambda: sorted_rows(group, layout), lambda: few)


def _overwrites(node: Node) -> bool:
    return bool(node.attrs["reduction"] == "none")


def _are_few(count: Dim) -> bool:
    return isinstance(count, int) and count <= FEW


def _distinct(index: Value, axis: int, n: Dim) -> bool:
    """Whether no two updates of a line reach one element: they are constants, or there is one."""
    if index.shape[axis] == 1:
        return True
    found = constant_of(index)
    if found is None or not isinstance(n, int):
        return False
    wrapped = np.sort(np.where(found < 0, found + n, found), axis=axis)
    return not bool((np.diff(wrapped, axis=axis) == 0).any())


# ---------------------------------------------------------------- few updates, compared with each other


def _compared_elements(node: Node, layout: Layout, distinct: bool) -> Kernel:
    """A lane for each update. `distinct`: no two of a line reach one element."""
    data, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    tensors = (data, out, index, updates)
    strides = [layout.strides(v) for v in tensors]
    m, n = index.shape[axis], out.shape[axis]
    reach = Reach.of(without(index.shape, axis), *(without(s, axis) for s in strides))
    w = Writer(layout, tensors, reach.count * m)
    w.lanes("x", f"pid * {BLOCK}", BLOCK)
    w.lines += [f"xm = x < {w.size(reach.count * m)}", f"i = x % {w.size(m)}", f"line = x // {w.size(m)}"]
    offsets = w.spread("line", reach)
    starts = [f"{w.start(v)} + {o}" for v, o in zip(tensors, offsets, strict=True)]
    steps = [w.size(s[axis]) for s in strides]
    extent = w.size(n)
    find(w, f"{starts[2]} + i * {steps[2]}", extent)
    each = [
        f"there = ox_wrapped(tl.load({starts[2]} + j * {steps[2]}, mask=xm, other=0), {extent})", "same = there == to",
        "first = first & ((j >= i) | (there != to))",
    ]  # fmt: skip
    _accumulate(w, node, f"{starts[0]} + to * {steps[0]}", "good", (BLOCK,))
    update = f"{starts[3]} + j * {steps[3]}"
    _walk(w, node, m, each, update, "good" if distinct else "same & good", distinct)
    w.lines.append(f"tl.store({starts[1]} + to * {steps[1]}, {kept('acc', out.dtype)}, mask=good & first)")
    return w.kernel(ceildiv(reach.count * m, BLOCK), BLOCK)


def _accumulate(w: Writer, node: Node, at: str, mask: str, shape: tuple[int, ...]) -> None:
    """The accumulators, which begin as the elements of the data, and whether lanes are the first for their element."""
    dtype = node.output.dtype
    first = shape if len(shape) == 1 else (shape[0], 1)
    w.lines += [f"acc = {loaded(at, mask, dtype)}", f"first = tl.full({first}, True, tl.int1)"]


def _walk(w: Writer, node: Node, m: Dim, each: list[str], update: str, mask: str, distinct: bool) -> None:
    """Joins all updates in order; where no two reach one element, each lane its own alone."""
    new = f"u = {loaded(update, mask, node.output.dtype)}"
    if distinct:
        w.lines += ["j = i", new, f"acc = {joined(node)}"]
    else:
        loop = [*each, new, f"acc = tl.where(same, {joined(node)}, acc)"]
        w.lines += [f"for j in range(0, {w.size(m)}):", *indent(loop)]


def _compared_rows(node: Node, layout: Layout) -> Kernel:
    """Lanes for each row and some elements of its slice."""
    s = Slices(node, layout)
    slices = s.slice(s.data, s.out, s.updates)
    w = Writer(layout, (s.data, s.out, s.index, s.updates))
    width = min(SLICE, power(slices.count)) if isinstance(slices.count, int) else SLICE
    distinct = always_equal(s.rows.count, 1)
    block = max(16, BLOCK // width)
    blocks = _tile(w, s, slices, block, width)
    from_data, to_out, from_updates = w.spread("q", slices)
    s.write_places(w)
    _accumulate(w, node, f"{w.start(s.data)} + at_data + {from_data}", "good & qm", (block, width))
    inner = w.aside()
    at_index, at_updates = inner.offsets("j", s.rows)
    each = list(inner.lines)
    for d, size in enumerate(s.places):
        each.append(f"there{d} = ox_wrapped(tl.load({s.at_index(w, at_index, d)}), {w.size(size)})")
    same = " & ".join(f"(there{d} == to{d})" for d in range(s.depth)) or "im"
    each += [f"same = {same}", "first = first & ((j >= i) | (same == 0))"]
    if distinct:
        w.lines += ["j = i", *inner.lines]
    update = f"{w.start(s.updates)} + {at_updates} + {from_updates}"
    _walk(w, node, s.rows.count, each, update, "good & qm" if distinct else "qm", distinct)
    store = f"tl.store({w.start(s.out)} + at_out + {to_out}, {kept('acc', s.out.dtype)}, mask=good & first & qm)"
    w.lines.append(store)
    return w.kernel(ceildiv(s.rows.count, block) * blocks, block * width)


def _tile(w: Writer, s: Slices, slices: Reach, block: int, width: int) -> Dim:
    """Lanes for `block` rows, `i`, and `width` elements of their slices, `q`. Returns how many programs each has."""
    blocks = ceildiv(slices.count, width)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lanes("i", f"pid // {w.size(blocks)} * {block}", block, "[:, None]")
    w.lines += [f"qm = q < {w.size(slices.count)}", f"im = i < {w.size(s.rows.count)}"]
    return blocks


# ---------------------------------------------------------------- many updates that need no order


@dataclass(frozen=True)
class _Update:
    """An update of each lane of a kernel, as text.

    Attributes:
        place: the number of its place, among those that have marks.
        number: its own, among those that may reach this place.
        source: its address.
        target: the address of its place in the result.
        lines: statements that `source` needs.
        part: which lanes have an element of it, as ``" & mask"``; empty where all have.
    """

    place: str
    number: str
    source: str = ""
    target: str = ""
    lines: tuple[str, ...] = ()
    part: str = ""


_Task = Literal["join", "mark", "write"]  # what a kernel does with all updates


def _by_itself(node: Node, layout: Layout, marks: Value, kernel: Callable[[_Task], Kernel]) -> list[Kernel]:
    """Each update by itself: joined at once, or marked by a first kernel, and written by a second where it is the last
    for its place. `marks` has a word for each place.
    """
    atomic = not _overwrites(node)
    tasks: tuple[_Task, ...] = ("join",) if atomic else ("mark", "write")
    return [begun(layout, node.operands[0], node.output, None if atomic else marks), *(kernel(t) for t in tasks)]


def _marks(places: Dim, updates: Dim) -> Value:
    """A word for each place: 1 + the number of its last update, or 0."""
    most = bounds(updates)[1]
    kind = dtypes.int32 if most is not None and most < WIDE - 1 else dtypes.int64
    return Value(TensorType(kind, (places,)))


def _do(w: Writer, task: _Task, node: Node, marks: Value, u: _Update) -> None:
    """The statements of a task, for the lanes that are ``good``."""
    mark = f"{w.start(marks)} + {u.place}" if task != "join" else ""
    if task == "mark":
        kind = spelling.computed(marks.dtype)
        w.lines.append(f"tl.atomic_max({mark}, ({u.number} + 1).to({kind}), mask=good, sem='relaxed')")
        return
    if task == "write":
        w.lines.append(f"last = good & (tl.load({mark}, mask=good, other=0) == {u.number} + 1)")
    mask = ("last" if task == "write" else "good") + u.part
    w.lines += [*u.lines, f"u = tl.load({u.source}, mask={mask}, other=0)"]
    if task == "write":
        w.lines.append(f"tl.store({u.target}, u, mask={mask})")
    else:
        w.lines.append(f"tl.atomic_{node.attrs['reduction']}({u.target}, u, mask={mask}, sem='relaxed')")


def _marked_elements(node: Node, layout: Layout) -> list[Kernel]:
    """A lane for each update."""
    _, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    n, m, step = out.shape[axis], index.shape[axis], layout.strides(out)[axis]
    along = [int(d == axis) for d in range(index.rank)]
    lines = row_major([1 if here else d for here, d in zip(along, index.shape, strict=True)], n)
    apart = [[0 if here else s for here, s in zip(along, each, strict=True)] for each in (lines, layout.strides(out))]
    reach = Reach.of(index.shape, *(layout.strides(v) for v in (index, updates)), *apart, along)
    marks = _marks(prod(without(index.shape, axis)) * n, m)

    def kernel(task: _Task) -> Kernel:
        w = Writer(layout, (out, index, updates, marks), reach.count)
        w.lanes("x", f"pid * {COPIED}", COPIED)
        w.lines.append(f"xm = x < {w.size(reach.count)}")
        at_index, at_update, at_mark, at_out, i = w.spread("x", reach)
        find(w, f"{w.start(index)} + {at_index}", w.size(n), reports=task != "write")
        source, target = f"{w.start(updates)} + {at_update}", f"{w.start(out)} + {at_out} + to * {w.size(step)}"
        _do(w, task, node, marks, _Update(f"{at_mark} + to", i, source, target))
        return w.kernel(ceildiv(reach.count, COPIED), COPIED)

    return _by_itself(node, layout, marks, kernel)


def _marked_rows(node: Node, layout: Layout) -> list[Kernel]:
    """Lanes for each row and some elements of its slice; to mark a place, one for each row."""
    s = Slices(node, layout)
    slices, count = s.slice(s.out, s.updates), s.rows.count
    marks = _marks(prod(s.places), count)
    tensors = (s.data, s.out, s.index, s.updates, marks)

    def mark() -> Kernel:
        w = Writer(layout, tensors, count)
        w.lanes("i", f"pid * {COPIED}", COPIED)
        w.lines.append(f"im = i < {w.size(count)}")
        s.write_places(w)
        _do(w, "mark", node, marks, _Update(s.flat(w), "i"))
        return w.kernel(ceildiv(count, COPIED), COPIED)

    def put(task: _Task) -> Kernel:
        w = Writer(layout, tensors, count * slices.count)
        width = min(SLICE, power(slices.count)) if isinstance(slices.count, int) else SLICE
        block = COPIED // width
        blocks = _tile(w, s, slices, block, width)
        to_out, from_updates = w.spread("q", slices)
        s.write_places(w, reports=task == "join")
        lines, at_updates = s.in_updates(w, "i")
        target = f"{w.start(s.out)} + at_out + {to_out}"
        source = f"{w.start(s.updates)} + {at_updates} + tl.zeros_like(i) + {from_updates}"
        _do(w, task, node, marks, _Update(s.flat(w), "i", source, target, tuple(lines), " & qm"))
        return w.kernel(ceildiv(count, block) * blocks, COPIED)

    return _by_itself(node, layout, marks, lambda task: mark() if task == "mark" else put(task))
