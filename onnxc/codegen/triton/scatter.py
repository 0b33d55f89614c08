"""Scatters: updates that are written to places which data names, or joined with what is there.

Results do not depend on the order in which programs run:

- Where nothing is joined, the last of the updates that reach one element is written. A first kernel marks each place
  with the greatest number of its updates (an atomic maximum of integers), a second one writes those that were marked.
  Integers that are added or compared are joined by atomics instead, in whatever order.
- Many updates that are joined otherwise: each program has some of the places to itself. It looks at the places of all
  updates, some at a time, and joins those that are its own, in the order of the CPU; but many rows of float32 that are
  added up in one place, some at a time.
- Few updates that are joined: the first of those that reach one element joins them all. A program compares a block of
  updates with all of their line, in order.
- Rows of float32 that are added up, as of an embedding's gradient, have a program for each row: where it is the first
  for its place, it adds up all rows for this place, some at a time. That order is fixed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxc.codegen.cpp.routine import without
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import WIDE, Kernel, indent, power
from onnxc.codegen.triton.writer import Reach, Writer, kept, loaded
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, bounds, ceildiv, maximum, minimum, prod
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.planner.layout import Layout
from onnxc.primitives.builder import constant_of
from onnxc.primitives.indexing import scatter_depth

BLOCK = 128  # elements (updates) that a program places
COPIED = 1024  # elements that a program copies
SLICE = 64  # neighbouring elements of a slice in a tile
FEW = 64  # updates of a line that are compared with each other
SEARCHED = 1024  # places of rows that a program compares at a time
SUMMED = (8, 256)  # rows, and elements of each, that it adds up at a time
MANY = 8  # rows among these places, above which they are not looked for one by one
COMPARED = 8192  # rows of float32 up to which each is compared with all others
OWNERS = 512  # programs that have places to themselves
LINES, SEEN = 8, 512  # lines, and updates of all of them, that a program looks at at a time


def _copy(layout: Layout, source: Value, target: Value, marks: Value | None = None) -> Kernel:
    """The result of a scatter starts as the data, and its places without `marks`."""
    order = layout.order_of(target)
    strides = [[layout.strides(v)[i] for i in order] for v in (source, target)]
    reach = Reach.of([target.shape[i] for i in order], *strides)
    w = Writer(layout, (source, target), reach.count)
    w.lanes("x", f"pid * {COPIED}", COPIED)
    w.lines.append(f"xm = x < {w.size(reach.count)}")
    a, b = w.spread("x", reach)
    w.lines += [
        f"v = tl.load({w.start(source)} + {a}, mask=xm, other=0)", f"tl.store({w.start(target)} + {b}, v, mask=xm)",
    ]  # fmt: skip
    if marks is not None:
        w.lines.append(f"tl.store({w.start(marks)} + x, tl.zeros_like(x), mask=x < {w.size(marks.t.size)})")
    kernel = w.kernel(ceildiv(reach.count, COPIED), COPIED)
    return kernel if marks is None else replace(kernel, scratch=(marks,))


def _joined(node: Node, old: str, new: str) -> str:
    """Old and new elements joined; each sum or product of 16-bit floats is rounded, as it would be in memory."""
    dtype = node.output.dtype
    name = str(node.attrs["reduction"])
    if dtype.name == "bool":
        name = {"add": "max", "mul": "min"}.get(name, name)
    text = {
        "none": new, "add": f"({old} + {new})", "mul": f"({old} * {new})", "max": f"ox_max({old}, {new})",
        "min": f"ox_min({old}, {new})",
    }[name]  # fmt: skip
    if name in ("add", "mul"):
        text = spelling.rounded(text, dtype)
    return text


def _term(dtype: DType) -> str:
    return "tl.uint8" if dtype.name == "bool" else spelling.computed(dtype)


def scatter_elements(node: Node, layout: Layout) -> list[Kernel]:
    """The kernels of a scatter along one axis."""
    data, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    distinct = node.attrs.get("distinct", False) or _distinct(index, axis, out.shape[axis])
    if not distinct and not _are_few(index.shape[axis]):
        if _overwrites(node) or _is_atomic(node):
            return _marked_elements(node, layout)
        return _owned_elements(node, layout)
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
    w.lines += [
        f"raw = tl.load({starts[2]} + i * {steps[2]}, mask=xm, other=0)", f"to = ox_wrapped(raw, {extent})",
        f"good = xm & (to >= 0) & (to < {extent})",
    ]  # fmt: skip
    w.report_index(f"xm & ((to < 0) | (to >= {extent}))", "raw")
    each = [
        f"there = ox_wrapped(tl.load({starts[2]} + j * {steps[2]}, mask=xm, other=0), {extent})", "same = there == to",
        "first = first & ((j >= i) | (there != to))",
    ]  # fmt: skip
    _begun(w, node, f"{starts[0]} + to * {steps[0]}", "good", (BLOCK,))
    update = f"{starts[3]} + j * {steps[3]}"
    _walk(w, node, m, each, update, "good" if distinct else "same & good", distinct)
    w.lines.append(f"tl.store({starts[1]} + to * {steps[1]}, {kept('acc', out.dtype)}, mask=good & first)")
    return [_copy(layout, data, out), w.kernel(ceildiv(reach.count * m, BLOCK), BLOCK)]


def _begun(w: Writer, node: Node, at: str, mask: str, shape: tuple[int, ...]) -> None:
    """The accumulators, which begin as the elements of the data, and whether lanes are the first for their element."""
    dtype = node.output.dtype
    first = shape if len(shape) == 1 else (shape[0], 1)
    w.lines += [f"acc = {loaded(at, mask, dtype)}", f"first = tl.full({first}, True, tl.int1)"]


def _walk(w: Writer, node: Node, m: Dim, each: list[str], update: str, mask: str, distinct: bool) -> None:
    """Joins all updates in order; where no two reach one element, each lane its own alone."""
    dtype = node.output.dtype
    new = f"u = {loaded(update, mask, dtype)}"
    joined = f"{_joined(node, 'acc', 'u')}.to({_term(dtype)})"
    if distinct:
        w.lines += ["j = i", new, f"acc = {joined}"]
    else:
        loop = [*each, new, f"acc = tl.where(same, {joined}, acc)"]
        w.lines += [f"for j in range(0, {w.size(m)}):", *indent(loop)]


def _distinct(index: Value, axis: int, n: Dim) -> bool:
    """Whether no two updates of a line reach one element: they are constants, or there is one."""
    if index.shape[axis] == 1:
        return True
    found = constant_of(index)
    if found is None or not isinstance(n, int):
        return False
    wrapped = np.sort(np.where(found < 0, found + n, found), axis=axis)
    return not bool((np.diff(wrapped, axis=axis) == 0).any())


def scatter_nd(node: Node, layout: Layout) -> list[Kernel]:
    """The kernels of a scatter of slices."""
    data, index, updates = node.operands
    out = node.output
    depth, lead = scatter_depth([v.t for v in node.operands]), index.rank - 1
    strides = {v.id: layout.strides(v) for v in (data, out, index, updates)}
    count = prod(index.shape[:-1])
    if not _are_few(count):
        if _overwrites(node) or _is_atomic(node):
            return _marked_rows(node, layout, depth)
        return [
            _copy(layout, data, out),
            _summed_rows(node, layout, depth) if _is_compared(node) else _owned_rows(node, layout, depth),
        ]
    w = Writer(layout, (data, out, index, updates))
    rows = Reach.of(index.shape[:-1], strides[index.id][:-1], strides[updates.id][:lead])
    slices = Reach.of(
        data.shape[depth:], strides[data.id][depth:], strides[out.id][depth:], strides[updates.id][lead:]
    )  # fmt: skip
    width = min(SLICE, power(slices.count)) if isinstance(slices.count, int) else SLICE
    distinct = always_equal(rows.count, 1)
    block = max(16, BLOCK // width)
    blocks = ceildiv(slices.count, width)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lanes("i", f"pid // {w.size(blocks)} * {block}", block, "[:, None]")
    w.lines += [f"qm = q < {w.size(slices.count)}", f"im = i < {w.size(rows.count)}"]
    from_data, to_out, from_updates = w.spread("q", slices)
    _rows(w, node, depth, rows, strides)
    _begun(w, node, f"{w.start(data)} + at_data + {from_data}", "good & qm", (block, width))
    inner = Writer(layout, ())
    inner.buffers, inner.wide, inner._sizes = w.buffers, w.wide, w._sizes
    at_index, at_updates = inner.offsets("j", rows)
    each = list(inner.lines)
    names = []
    for d in range(depth):
        at = f"{w.start(index)} + {at_index} + {w.size(d * strides[index.id][-1])}"
        each.append(f"there{d} = ox_wrapped(tl.load({at}), {w.size(data.shape[d])})")
        names.append(f"(there{d} == to{d})")
    each += [f"same = {' & '.join(names) or 'im'}", "first = first & ((j >= i) | (same == 0))"]
    if distinct:
        w.lines += ["j = i", *inner.lines]
    update = f"{w.start(updates)} + {at_updates} + {from_updates}"
    _walk(w, node, rows.count, each, update, "good & qm" if distinct else "qm", distinct)
    store = f"tl.store({w.start(out)} + at_out + {to_out}, {kept('acc', out.dtype)}, mask=good & first & qm)"
    w.lines.append(store)
    return [_copy(layout, data, out), w.kernel(ceildiv(rows.count, block) * blocks, block * width)]


def _overwrites(node: Node) -> bool:
    return bool(node.attrs["reduction"] == "none")


def _is_atomic(node: Node) -> bool:
    """Whether updates are joined by one instruction, and in whatever order with the same result."""
    return node.output.dtype.name in ("int32", "int64") and node.attrs["reduction"] in ("add", "max", "min")


def _are_few(count: Dim) -> bool:
    return isinstance(count, int) and count <= FEW


def _is_compared(node: Node) -> bool:
    """Whether each row is compared with all others, for those that belong together to be added up at a time."""
    count = prod(node.operands[1].shape[:-1])
    return isinstance(count, int) and count <= COMPARED and _is_sum(node)


def _is_sum(node: Node) -> bool:
    return bool(node.attrs["reduction"] == "add" and node.output.dtype.name == "float32")


def _summed_rows(node: Node, layout: Layout, depth: int) -> Kernel:
    """A program for each row and some of its elements."""
    data, index, updates = node.operands
    out, lead = node.output, index.rank - 1
    strides = {v.id: layout.strides(v) for v in (data, out, index, updates)}
    rows = Reach.of(index.shape[:-1], strides[index.id][:-1], strides[updates.id][:lead])
    slices = Reach.of(
        data.shape[depth:], strides[data.id][depth:], strides[out.id][depth:], strides[updates.id][lead:]
    )  # fmt: skip
    w = Writer(layout, (data, out, index, updates), rows.count * slices.count)
    piece, width = SUMMED
    searched = min(SEARCHED, power(rows.count)) if isinstance(rows.count, int) else SEARCHED
    width = min(width, power(slices.count)) if isinstance(slices.count, int) else width
    blocks, count, kind = ceildiv(slices.count, width), w.size(rows.count), ".to(tl.int64)" if w.wide else ""
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lines += [
        f"qm = q < {w.size(slices.count)}", f"row = pid // {w.size(blocks)}", "i = row + tl.zeros((1, 1), tl.int32)",
        "im = i >= 0", f"lane = tl.arange(0, {searched}){kind}[:, None]",
        f"near = tl.arange(0, {piece}){kind}[:, None]",
    ]  # fmt: skip
    from_data, to_out, from_updates = w.spread("q", slices)
    _rows(w, node, depth, rows, strides)
    search = ["j = j0 + lane", *_places(w, node, depth, rows, strides, "j")]
    some = [
        "k = k0 + near", *_places(w, node, depth, rows, strides, "k"),
        f"u = tl.load({w.start(updates)} + at_k + {from_updates}, mask=same_k & qm, other=0.0)",
        "acc += ox_sum(tl.where(same_k & qm, u, 0.0), 0)",
    ]  # fmt: skip
    single, at_last = _offsets_of(w, "last", rows)
    one = [
        f"last = ox_least(same_j & (j > last), j, j0 + {searched})", *single,
        f"acc += tl.load({w.start(updates)} + {at_last} + {from_updates}, mask=qm, other=0.0)",
    ]  # fmt: skip
    w.lines += [
        "earlier = 0", f"for j0 in range(0, row, {searched}):",
        *indent([*search, "earlier = tl.maximum(earlier, ox_some(same_j & (j < i)))"]),
        "if earlier == 0:",
        *indent([
            f"acc = tl.load({w.start(data)} + at_data + {from_data}, mask=good & qm, other=0.0)",
            f"for j0 in range(row // {searched} * {searched}, {count}, {searched}):",
            *indent([
                *search, "found = ox_count(same_j)", f"if found > {MANY}:",
                *indent([f"for k0 in range(j0, j0 + {searched}, {piece}):", *indent(some)]),
                "else:", *indent(["last = j0 - 1", "for turn in range(0, found):", *indent(one)]),
            ]),
            f"tl.store({w.start(out)} + at_out + {to_out}, acc, mask=good & qm)",
        ]),
    ]  # fmt: skip
    return w.kernel(rows.count * blocks, piece * width // 2)


def _offsets_of(w: Writer, name: str, rows: Reach) -> tuple[list[str], str]:
    """Statements that take a row's number apart, and where its updates lie."""
    inner = Writer(w.layout, ())
    inner.buffers, inner.wide, inner._sizes = w.buffers, w.wide, w._sizes
    _, at_updates = inner.offsets(name, rows)
    return inner.lines, at_updates


def _places(
    w: Writer, node: Node, depth: int, rows: Reach, strides: dict[int, tuple[Dim, ...]], j: str, to: str = "to"
) -> list[str]:
    """Statements that find which rows `j` go to the place `to`, as ``same_j``, and where they lie, ``at_j``."""
    data, index, _ = node.operands
    inner = Writer(w.layout, ())
    inner.buffers, inner.wide, inner._sizes = w.buffers, w.wide, w._sizes
    at_index, at_updates = inner.offsets(j, rows)
    tests = [f"inside_{j}"]
    for d in range(depth):
        at = f"{w.start(index)} + {at_index} + {w.size(d * strides[index.id][-1])} + tl.zeros_like({j})"
        found = f"ox_wrapped(tl.load({at}, mask=inside_{j}, other=0), {w.size(data.shape[d])})"
        inner.lines.append(f"there_{j}{d} = {found}")
        tests.append(f"(there_{j}{d} == {to}{d})")
    inside = f"inside_{j} = {j} < {w.size(rows.count)}"
    return [inside, *inner.lines, f"same_{j} = {' & '.join(tests)}", f"at_{j} = {at_updates} + tl.zeros_like({j})"]


def _rows(
    w: Writer, node: Node, depth: int, rows: Reach, strides: dict[int, tuple[Dim, ...]], reports: bool = True
) -> None:
    """Where the rows `i` of a scatter go: `at_data`, `at_out`, and which are `good`."""
    data, index, _ = node.operands
    at_index, _ = w.offsets("i", rows)
    good = ["im"]
    for d in range(depth):
        extent = w.size(data.shape[d])
        at = f"{w.start(index)} + {at_index} + {w.size(d * strides[index.id][-1])}"
        w.lines += [
            f"raw{d} = tl.load({at} + tl.zeros_like(i), mask=im, other=0)",
            f"to{d} = ox_wrapped(raw{d}, {extent})",
        ]
        if reports:
            w.report_index(f"im & ((to{d} < 0) | (to{d} >= {extent}))", f"raw{d}")
        good.append(f"(to{d} >= 0) & (to{d} < {extent})")
    names = [f"to{d}" for d in range(depth)]
    w.lines += [
        f"good = {' & '.join(good)}",
        f"at_data = {w.along(names, strides[data.id][:depth])} + tl.zeros_like(i)",
        f"at_out = {w.along(names, strides[node.output.id][:depth])} + tl.zeros_like(i)",
    ]


# ---------------------------------------------------------------- many updates that need no order


def _marks(places: Dim, updates: Dim) -> Value:
    """A word for each place: 1 + the number of its last update, or 0."""
    most = bounds(updates)[1]
    kind = dtypes.int32 if most is not None and most < WIDE - 1 else dtypes.int64
    return Value(TensorType(kind, (places,)))


def _mark(w: Writer, marks: Value, at: str, number: str) -> str:
    kind = spelling.computed(marks.dtype)
    return f"tl.atomic_max({w.start(marks)} + {at}, ({number} + 1).to({kind}), mask=good, sem='relaxed')"


def _looked(w: Writer, marks: Value, at: str, number: str) -> str:
    return f"last = good & (tl.load({w.start(marks)} + {at}, mask=good, other=0) == {number} + 1)"


def _written(at: str, update: str, mask: str) -> list[str]:
    return [f"u = tl.load({update}, mask={mask}, other=0)", f"tl.store({at}, u, mask={mask})"]


def _joined_at_once(node: Node, at: str, update: str, mask: str) -> list[str]:
    atomic = f"tl.atomic_{node.attrs['reduction']}({at}, u, mask={mask}, sem='relaxed')"
    return [f"u = tl.load({update}, mask={mask}, other=0)", atomic]


def _marked_elements(node: Node, layout: Layout) -> list[Kernel]:
    """Each update by itself: joined at once, or marked, and then written where it is the last."""
    data, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    n, m, step = out.shape[axis], index.shape[axis], layout.strides(out)[axis]
    along = [int(d == axis) for d in range(index.rank)]
    lines = _row_major([1 if here else d for here, d in zip(along, index.shape, strict=True)], n)
    apart = [[0 if here else s for here, s in zip(along, each, strict=True)] for each in (lines, layout.strides(out))]
    reach = Reach.of(index.shape, *(layout.strides(v) for v in (index, updates)), *apart, along)
    atomic = _is_atomic(node)
    marks = _marks(prod(without(index.shape, axis)) * n, m)
    kernels = [_copy(layout, data, out, None if atomic else marks)]
    for writes in (True,) if atomic else (False, True):
        w = Writer(layout, (out, index, updates, marks), reach.count)
        w.lanes("x", f"pid * {COPIED}", COPIED)
        w.lines.append(f"xm = x < {w.size(reach.count)}")
        at_index, at_update, at_mark, at_out, i = w.spread("x", reach)
        extent = w.size(n)
        w.lines += [
            f"raw = tl.load({w.start(index)} + {at_index}, mask=xm, other=0)", f"to = ox_wrapped(raw, {extent})",
            f"good = xm & (to >= 0) & (to < {extent})",
        ]  # fmt: skip
        if atomic or not writes:
            w.report_index(f"xm & ((to < 0) | (to >= {extent}))", "raw")
        update, place = f"{w.start(updates)} + {at_update}", f"{w.start(out)} + {at_out} + to * {w.size(step)}"
        if atomic:
            w.lines += _joined_at_once(node, place, update, "good")
        elif writes:
            w.lines += [_looked(w, marks, f"{at_mark} + to", i), *_written(place, update, "last")]
        else:
            w.lines.append(_mark(w, marks, f"{at_mark} + to", i))
        kernels.append(w.kernel(ceildiv(reach.count, COPIED), COPIED))
    return kernels


def _row_major(shape: Sequence[Dim], step: Dim = 1) -> list[Dim]:
    """How far apart neighbours along each dim are, without gaps; `step` along the last."""
    found: list[Dim] = []
    for d in reversed(shape):
        found.insert(0, step)
        step = step * d
    return found


def _marked_rows(node: Node, layout: Layout, depth: int) -> list[Kernel]:
    """The same of slices."""
    data, index, updates = node.operands
    out, lead = node.output, index.rank - 1
    strides = {v.id: layout.strides(v) for v in (data, out, index, updates)}
    rows = Reach.of(index.shape[:-1], strides[index.id][:-1], strides[updates.id][:lead])
    slices = Reach.of(data.shape[depth:], strides[out.id][depth:], strides[updates.id][lead:])
    marks = _marks(prod(data.shape[:depth]), rows.count)
    place = _row_major(data.shape[:depth])
    names = [f"to{d}" for d in range(depth)]

    atomic = _is_atomic(node)
    kernels = [_copy(layout, data, out, None if atomic else marks)]
    if not atomic:
        w = Writer(layout, (data, out, index, updates, marks), rows.count)
        w.lanes("i", f"pid * {COPIED}", COPIED)
        w.lines.append(f"im = i < {w.size(rows.count)}")
        _rows(w, node, depth, rows, strides)
        w.lines.append(_mark(w, marks, f"{w.along(names, place)} + tl.zeros_like(i)", "i"))
        kernels.append(w.kernel(ceildiv(rows.count, COPIED), COPIED))

    w = Writer(layout, (data, out, index, updates, marks), rows.count * slices.count)
    width = min(SLICE, power(slices.count)) if isinstance(slices.count, int) else SLICE
    block, blocks = COPIED // width, ceildiv(slices.count, width)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lanes("i", f"pid // {w.size(blocks)} * {block}", block, "[:, None]")
    w.lines += [f"qm = q < {w.size(slices.count)}", f"im = i < {w.size(rows.count)}"]
    to_out, from_updates = w.spread("q", slices)
    _rows(w, node, depth, rows, strides, reports=atomic)
    found, at_updates = _offsets_of(w, "i", rows)
    at = f"{w.start(out)} + at_out + {to_out}"
    update = f"{w.start(updates)} + {at_updates} + tl.zeros_like(i) + {from_updates}"
    if atomic:
        w.lines += [*found, *_joined_at_once(node, at, update, "good & qm")]
    else:
        last = _looked(w, marks, f"{w.along(names, place)} + tl.zeros_like(i)", "i")
        w.lines += [last, *found, *_written(at, update, "last & qm")]
    return [*kernels, w.kernel(ceildiv(rows.count, block) * blocks, COPIED)]


# ---------------------------------------------------------------- many updates that are joined


def _join(w: Writer, node: Node, at: str, update: str, mask: str) -> list[str]:
    """Statements that join one update with what is there. The threads of a program have seen each other's writes."""
    dtype = node.output.dtype
    joined = f"{_joined(node, 'acc', 'u')}.to({_term(dtype)})"
    return [
        "tl.debug_barrier()", f"acc = {loaded(at, mask, dtype)}", f"u = {loaded(update, mask, dtype)}",
        f"acc = {joined}", f"tl.store({at}, {kept('acc', dtype)}, mask={mask})",
    ]  # fmt: skip


def _owned_elements(node: Node, layout: Layout) -> list[Kernel]:
    """Lines side by side, each with a part of its places; from step to step the first of the updates that are left."""
    data, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    n, m = out.shape[axis], index.shape[axis]
    tensors = (out, index, updates)
    strides = [layout.strides(v) for v in tensors]
    reach = Reach.of(without(index.shape, axis), *(without(s, axis) for s in strides))
    lines = min(LINES, power(reach.count)) if isinstance(reach.count, int) else LINES
    piece = min(SEEN // lines, power(m)) if isinstance(m, int) else SEEN // lines
    blocks = ceildiv(reach.count, lines)
    parts: Dim = max(1, OWNERS // max(1, blocks)) if isinstance(blocks, int) else OWNERS // LINES
    parts = maximum(1, minimum(parts, n))
    w = Writer(layout, (data, *tensors), reach.count * m)
    kind = ".to(tl.int64)" if w.wide else ""
    w.lanes("x", f"pid // {w.size(parts)} * {lines}", lines, "[:, None]")
    w.lines.append(f"xm = x < {w.size(reach.count)}")
    starts = [f"{w.start(v)} + {o}" for v, o in zip(tensors, w.spread("x", reach), strict=True)]
    steps, extent, each = [w.size(s[axis]) for s in strides], w.size(n), w.size(ceildiv(n, parts))
    report = Writer(layout, ())
    report.report_index(f"inside & ((to < 0) | (to >= {extent}))", "raw")
    w.buffers.reports = True
    w.lines += [
        f"low = pid % {w.size(parts)} * {each}", f"high = tl.minimum(low + {each}, {extent})",
        f"lane = tl.arange(0, {piece}){kind}[None, :]", f"for j0 in range(0, {w.size(m)}, {piece}):",
        *indent([
            "j = j0 + lane", f"inside = xm & (j < {w.size(m)})",
            f"raw = tl.load({starts[1]} + j * {steps[1]}, mask=inside, other=0)", f"to = ox_wrapped(raw, {extent})",
            *report.lines, "mine = inside & (to >= low) & (to < high)",
            "most = tl.max(tl.sum(mine.to(tl.int32), 1), 0)", "for turn in range(0, most):",
            *indent([
                f"first = tl.min(tl.where(mine, j, j0 + {piece}), 1)[:, None]", f"some = first < j0 + {piece}",
                "place = tl.sum(tl.where(mine & (j == first), to, 0), 1)[:, None]",
                *_join(w, node, f"{starts[0]} + place * {steps[0]}", f"{starts[2]} + first * {steps[2]}", "some"),
                "mine = mine & (j != first)",
            ]),
        ]),
    ]  # fmt: skip
    return [_copy(layout, data, out), w.kernel(blocks * parts, lines * piece)]


def _owned_rows(node: Node, layout: Layout, depth: int) -> Kernel:
    """A program for some of the places and some elements of each slice."""
    data, index, updates = node.operands
    out, lead = node.output, index.rank - 1
    strides = {v.id: layout.strides(v) for v in (data, out, index, updates)}
    rows = Reach.of(index.shape[:-1], strides[index.id][:-1], strides[updates.id][:lead])
    slices = Reach.of(data.shape[depth:], strides[out.id][depth:], strides[updates.id][lead:])
    places, (_, width) = prod(data.shape[:depth]), SUMMED
    width = min(width, power(slices.count)) if isinstance(slices.count, int) else width
    parts = maximum(1, minimum(OWNERS, places))
    blocks = ceildiv(slices.count, width)
    w = Writer(layout, (data, out, index, updates), rows.count * slices.count)
    kind, count = ".to(tl.int64)" if w.wide else "", w.size(rows.count)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lines += [
        f"qm = q < {w.size(slices.count)}", f"low = pid // {w.size(blocks)} * {w.size(ceildiv(places, parts))}",
        f"high = low + {w.size(ceildiv(places, parts))}", f"lane = tl.arange(0, {SEARCHED}){kind}[:, None]",
    ]  # fmt: skip
    to_out, from_updates = w.spread("q", slices)
    inner = Writer(layout, ())
    inner.buffers, inner.wide, inner._sizes = w.buffers, w.wide, w._sizes
    _rows(inner, node, depth, rows, strides)
    found, at_updates = _offsets_of(w, "last", rows)
    whole = Reach.of(data.shape[:depth], strides[out.id][:depth])
    digits, at_out = _digits(w, "place", whole)
    to, update = f"{w.start(out)} + {at_out} + {to_out}", f"{w.start(updates)} + {at_updates} + {from_updates}"
    together = _added_together(w, node, depth, rows, strides, (*digits, to), from_updates) if _is_sum(node) else []
    w.lines += [
        f"for j0 in range(0, {count}, {SEARCHED}):",
        *indent([
            "i = j0 + lane", f"im = i < {count}", *inner.lines,
            f"to = {w.along([f'to{d}' for d in range(depth)], _row_major(data.shape[:depth]))} + tl.zeros_like(i)",
            "mine = good & (to >= low) & (to < high)", "found = ox_count(mine)",
            *together, f"last = ox_least(mine, i, j0 + {SEARCHED}) - 1", "for turn in range(0, found):",
            *indent([
                f"last = ox_least(mine & (i > last), i, j0 + {SEARCHED})",
                "place = tl.sum(tl.sum(tl.where(i == last, to, 0), 1), 0)", *found, *digits,
                *_join(w, node, to, update, "qm"),
            ]),
        ]),
    ]  # fmt: skip
    return w.kernel(blocks * parts, SEARCHED)


def _added_together(
    w: Writer, node: Node, depth: int, rows: Reach, strides: dict[int, tuple[Dim, ...]], place: Sequence[str],
    from_updates: str,
) -> list[str]:  # fmt: skip
    """Statements that add up those of a program's rows that go where the first of them goes, some at a time, where they
    are many: a padding's, say. They are `mine` no more.
    """
    *digits, at = place
    piece, kind = SUMMED[0], ".to(tl.int64)" if w.wide else ""
    first = [f"there{d} = tl.max(tl.max(tl.where(i == first, to{d}, 0), 1), 0)" for d in range(depth)]
    again = _places(w, node, depth, rows, strides, "k", "there")
    return [
        f"first = ox_least(mine, i, j0 + {SEARCHED})", "place = tl.sum(tl.sum(tl.where(i == first, to, 0), 1), 0)",
        "alike = ox_count(mine & (to == place))", f"if alike > {MANY}:",
        *indent([
            *first, *digits, "tl.debug_barrier()", f"acc = tl.load({at}, mask=qm, other=0.0)",
            f"for k0 in range(j0, j0 + {SEARCHED}, {piece}):",
            *indent([
                f"k = k0 + tl.arange(0, {piece}){kind}[:, None]", *again,
                f"u = tl.load({w.start(node.operands[2])} + at_k + {from_updates}, mask=same_k & qm, other=0.0)",
                "acc += ox_sum(u, 0)",
            ]),
            f"tl.store({at}, acc, mask=qm)",
        ]),
        f"mine = mine & ((to != place) | (alike <= {MANY}))", "found = ox_count(mine)",
    ]  # fmt: skip


def _digits(w: Writer, name: str, reach: Reach) -> tuple[list[str], str]:
    """Statements that take a flat position apart, and the offset that it stands for."""
    inner = Writer(w.layout, ())
    inner.buffers, inner.wide, inner._sizes = w.buffers, w.wide, w._sizes
    (at,) = inner.offsets(name, reach)
    return inner.lines, at
