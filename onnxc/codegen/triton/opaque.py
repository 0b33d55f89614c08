"""Kernels of the primitives that are no loop nests: running sums, the best along an axis, and scatters.

None of them needs atomics, and results do not depend on the order in which programs run:

- Running sums and the best of a line: see `running.py` and `best.py`.
- Updates of a scatter that reach one element are joined by the first of them: a program compares a block of updates
  with all of their line, in order. So each element is written once, and floats are added in the order of the CPU. Where
  nothing is joined, the last of them is written.
- Rows of float32 that are added up, as of an embedding's gradient, have a program for each row: where it is the first
  for its place, it adds up all rows for this place, some at a time. That order is fixed too.
"""

from __future__ import annotations

import numpy as np

from onnxc.codegen.cpp.routine import without
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.best import top_k
from onnxc.codegen.triton.kernel import Kernel, indent, power
from onnxc.codegen.triton.running import running_sums
from onnxc.codegen.triton.user import emit_user
from onnxc.codegen.triton.writer import Reach, Writer, kept, loaded
from onnxc.errors import UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, ceildiv, prod
from onnxc.ir.graph import Node, Value
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.primitives.builder import constant_of
from onnxc.primitives.indexing import scatter_depth
from onnxc.primitives.kernels import USER

BLOCK = 128  # elements (updates) that a program places
PIECE = 32  # others that it compares them with at a time
COPIED = 1024  # elements that a program copies
SLICE = 64  # neighbouring elements of a slice in a tile
LATER = 64  # the same where the last of those that go to one place is looked for
FEW = 64  # rows that are added up as any updates are
SEARCHED = 1024  # places of rows that a program compares at a time
SUMMED = (8, 256)  # rows, and elements of each, that it adds up at a time
MANY = 8  # rows among these places, above which they are not looked for one by one


def emit_opaque(group: Group, layout: Layout) -> list[Kernel]:
    """The kernels of an opaque group, in the order in which they run."""
    assert group.node is not None
    own = _OPEN.get(group.node.op)
    if own is not None:
        return own(group, layout)
    emitter = _EMITTERS.get(group.node.op)
    if emitter is None:
        raise UnsupportedError(f"no GPU kernel for {group.node.op}", node=", ".join(map(str, group.origin)))
    return emitter(group.node, layout)


# ---------------------------------------------------------------- scatters


def _copy(layout: Layout, source: Value, target: Value) -> Kernel:
    """The result of a scatter starts as the data."""
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
    return w.kernel(ceildiv(reach.count, COPIED), COPIED)


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


def _scatter_elements(node: Node, layout: Layout) -> list[Kernel]:
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
    w.lines += [
        f"raw = tl.load({starts[2]} + i * {steps[2]}, mask=xm, other=0)", f"to = ox_wrapped(raw, {extent})",
        f"good = xm & (to >= 0) & (to < {extent})",
    ]  # fmt: skip
    w.report_index(f"xm & ((to < 0) | (to >= {extent}))", "raw")
    each = [
        f"there = ox_wrapped(tl.load({starts[2]} + j * {steps[2]}, mask=xm, other=0), {extent})", "same = there == to",
        "first = first & ((j >= i) | (there != to))",
    ]  # fmt: skip
    _owned(w, node, f"{starts[0]} + to * {steps[0]}", "good", (BLOCK,))
    update = f"{starts[3]} + j * {steps[3]}"
    distinct = _distinct(index, axis, n)
    _walk(w, node, m, each, update, "good" if distinct else "same & good", distinct)
    w.lines.append(f"tl.store({starts[1]} + to * {steps[1]}, {kept('acc', out.dtype)}, mask=good & first)")
    return [_copy(layout, data, out), w.kernel(ceildiv(reach.count * m, BLOCK), BLOCK)]


def _owned(w: Writer, node: Node, at: str, mask: str, shape: tuple[int, ...]) -> None:
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


def _scatter_nd(node: Node, layout: Layout) -> list[Kernel]:
    data, index, updates = node.operands
    out = node.output
    depth, lead = scatter_depth([v.t for v in node.operands]), index.rank - 1
    strides = {v.id: layout.strides(v) for v in (data, out, index, updates)}
    if _adds_rows(node):
        return [_copy(layout, data, out), _summed_rows(node, layout, depth)]
    w = Writer(layout, (data, out, index, updates))
    rows = Reach.of(index.shape[:-1], strides[index.id][:-1], strides[updates.id][:lead])
    slices = Reach.of(
        data.shape[depth:], strides[data.id][depth:], strides[out.id][depth:], strides[updates.id][lead:]
    )  # fmt: skip
    width = min(SLICE, power(slices.count)) if isinstance(slices.count, int) else SLICE
    distinct = always_equal(rows.count, 1)
    last = node.attrs["reduction"] == "none" and not distinct
    block = 16 if last else max(16, BLOCK // width)  # where each row is compared with all others, fewer: more programs
    blocks = ceildiv(slices.count, width)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lanes("i", f"pid // {w.size(blocks)} * {block}", block, "[:, None]")
    w.lines += [f"qm = q < {w.size(slices.count)}", f"im = i < {w.size(rows.count)}"]
    from_data, to_out, from_updates = w.spread("q", slices)
    _rows(w, node, depth, rows, strides)
    if last:
        w.lines += _last_ones(w, node, depth, rows, strides)
        found, at_updates = _offsets_of(w, "i", rows)
        update = f"{w.start(updates)} + {at_updates} + tl.zeros_like(i) + {from_updates}"
        w.lines += [
            *found, f"u = tl.load({update}, mask=good & last & qm, other=0)",
            f"tl.store({w.start(out)} + at_out + {to_out}, u, mask=good & last & qm)",
        ]  # fmt: skip
        return [_copy(layout, data, out), w.kernel(ceildiv(rows.count, block) * blocks, block * max(width, LATER))]
    _owned(w, node, f"{w.start(data)} + at_data + {from_data}", "good & qm", (block, width))
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


def _last_ones(w: Writer, node: Node, depth: int, rows: Reach, strides: dict[int, tuple[Dim, ...]]) -> list[str]:
    """Statements that find which rows `i` are the `last` for their place."""
    lane = f"tl.arange(0, {LATER}){'.to(tl.int64)' if w.wide else ''}[None, :]"
    return [
        f"lane = {lane}", "later = tl.zeros_like(i) + tl.zeros_like(lane)",
        f"for j0 in range(0, {w.size(rows.count)}, {LATER}):",
        *indent([
            "j = j0 + lane", *_places(w, node, depth, rows, strides, "j"),
            "later = tl.where(same_j & (j > i), 1, later)",
        ]),
        "last = ox_sum(later, 1) == 0",
    ]  # fmt: skip


def _adds_rows(node: Node) -> bool:
    """Whether a scatter adds up more than a few rows of float32."""
    count = prod(node.operands[1].shape[:-1])
    few = isinstance(count, int) and count <= FEW
    return node.attrs["reduction"] == "add" and node.output.dtype.name == "float32" and not few


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


def _places(w: Writer, node: Node, depth: int, rows: Reach, strides: dict[int, tuple[Dim, ...]], j: str) -> list[str]:
    """Statements that find which rows `j` go to the same place as `i`, as ``same_j``, and where they lie, ``at_j``."""
    data, index, _ = node.operands
    inner = Writer(w.layout, ())
    inner.buffers, inner.wide, inner._sizes = w.buffers, w.wide, w._sizes
    at_index, at_updates = inner.offsets(j, rows)
    tests = [f"inside_{j}"]
    for d in range(depth):
        at = f"{w.start(index)} + {at_index} + {w.size(d * strides[index.id][-1])} + tl.zeros_like({j})"
        found = f"ox_wrapped(tl.load({at}, mask=inside_{j}, other=0), {w.size(data.shape[d])})"
        inner.lines.append(f"there_{j}{d} = {found}")
        tests.append(f"(there_{j}{d} == to{d})")
    inside = f"inside_{j} = {j} < {w.size(rows.count)}"
    return [inside, *inner.lines, f"same_{j} = {' & '.join(tests)}", f"at_{j} = {at_updates} + tl.zeros_like({j})"]


def _rows(w: Writer, node: Node, depth: int, rows: Reach, strides: dict[int, tuple[Dim, ...]]) -> None:
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
        w.report_index(f"im & ((to{d} < 0) | (to{d} >= {extent}))", f"raw{d}")
        good.append(f"(to{d} >= 0) & (to{d} < {extent})")
    names = [f"to{d}" for d in range(depth)]
    w.lines += [
        f"good = {' & '.join(good)}",
        f"at_data = {w.along(names, strides[data.id][:depth])} + tl.zeros_like(i)",
        f"at_out = {w.along(names, strides[node.output.id][:depth])} + tl.zeros_like(i)",
    ]


# ---------------------------------------------------------------- users' kernels


def _user(node: Node, layout: Layout) -> list[Kernel]:
    values, sizes = (*node.operands, *node.outputs), node.attrs["sizes"]
    w = Writer(layout, values, *sizes)
    starts = [w.start(v) for v in values]
    return [emit_user(node, layout, w.wide, w.buffers, [w.size(d) for d in sizes], starts)]


_OPEN = {"cumsum": running_sums, "top_k": top_k}  # what they read, and what they make of it, is in their groups
_EMITTERS = {"scatter_elements": _scatter_elements, "scatter_nd": _scatter_nd, USER: _user}
