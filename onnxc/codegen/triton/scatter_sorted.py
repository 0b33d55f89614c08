"""Scatters that join many updates at many places: in order, with work in proportion to updates and places.

The numbers of updates are sorted by their places, by a radix sort that keeps the order of equals: for each digit of a
place, from the lowest on, a kernel counts the digits of each block of updates, one adds up the counts of the blocks
before, and one moves every update to its rank. Then all updates of a place are neighbours, in order; a kernel notes
where each place's begin and end, and the last one joins them with what is there. All scatters by the same index share
what comes before.

A place with many updates would keep others waiting, so a kernel joins each `PART` of them first, counted from the first
one of the place: those parts, and then the rest, are joined with what is there, in order. So what a place becomes
depends on its own updates alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, symbol
from onnxc.codegen.triton.kernel import WIDE, Kernel, indent, power, touched
from onnxc.codegen.triton.scatter_parts import Slices, find, joined, row_major
from onnxc.codegen.triton.terms import TileVariable
from onnxc.codegen.triton.writer import Reach, Writer, kept, loaded
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, bounds, ceildiv, exceeds, floordiv, prod
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.loops.access import fresh
from onnxc.loops.nest import Nest, Phase, Store
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering

BITS = 5  # of a digit
RANKED = 512  # updates that a program counts or moves
MOST_BITS = 40  # of the number of a place that memory has room for
SCANNED = 1024  # counts of blocks that a program adds up at a time
NOTED = 1024  # updates whose neighbours a program looks at
JOINED = 256  # elements of the result that a program has to itself
WIDTH = 128  # of these, neighbours in a slice
AHEAD = 8  # updates of a place that are read before the first of them is joined
PART = 128  # updates of a place that are joined with each other first
Wrong = tuple[str, int, str]  # lanes of which something is to be reported, its code, and a value


@dataclass(frozen=True)
class _Updates:
    """What is sorted and joined.

    Attributes:
        count: how many updates there are.
        place: writes statements that find which of the updates `i` (those of `im`) are ``good``: in bounds. The others
            are reported, or not. Returns the number of the place.
        places: all places that updates may reach, as they lie in data and result.
        slices: the elements of one update, as they lie in data, result and updates.
        apart: where updates begin in the updates.
        lead: dims of the updates that count them; the others are those of a slice.
        task: what tells places from those of other scatters.
    """

    group: Group
    layout: Layout
    count: Dim
    place: Callable[[Writer, bool], str]
    places: Reach
    slices: Reach
    apart: Reach
    lead: int
    task: tuple[Hashable, ...]

    @property
    def node(self) -> Node:
        """The scatter."""
        assert self.group.node is not None
        return self.group.node


def sorted_rows(group: Group, layout: Layout) -> list[Kernel]:
    """The kernels of a scatter of slices."""
    assert group.node is not None
    s = Slices(group.node, layout)

    def place(w: Writer, reports: bool) -> str:
        s.write_places(w, reports)
        return s.flat(w)

    places = Reach.of(s.places, *(layout.strides(v)[: s.depth] for v in (s.data, s.out)))
    lead = s.index.rank - 1
    apart = Reach.of(s.index.shape[:-1], layout.strides(s.updates)[:lead])
    slices = s.slice(s.data, s.out, s.updates)
    task = ("rows", s.index.id, *s.places)
    return _kernels(_Updates(group, layout, prod(s.index.shape[:-1]), place, places, slices, apart, lead, task))


def sorted_elements(group: Group, layout: Layout) -> list[Kernel]:
    """The kernels of a scatter along one axis, whose result begins as the data where the index has no line."""
    node = group.node
    assert node is not None
    data, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    shape = [out.shape[axis] if d == axis else size for d, size in enumerate(index.shape)]
    steps = row_major(shape)
    lines = [0 if d == axis else step for d, step in enumerate(steps)]

    def place(w: Writer, reports: bool) -> str:
        at_index, line = w.spread("i", Reach.of(index.shape, layout.strides(index), lines))
        find(w, f"{w.start(index)} + {at_index}", w.size(shape[axis]), "im", reports)
        return f"{line} + to * {w.size(steps[axis])}"

    places = Reach.of(shape, layout.strides(data), layout.strides(out))
    apart = Reach.of(index.shape, layout.strides(updates))
    task, alone = ("elements", index.id, axis, shape[axis]), Reach((), ((), (), ()))
    return _kernels(_Updates(group, layout, prod(index.shape), place, places, alone, apart, index.rank, task))


def _kernels(u: _Updates) -> list[Kernel]:
    """Those that sort, and the one that joins."""
    most, numbers = bounds(u.places.count)[1], _kind(u.count)
    passes = ceildiv(MOST_BITS if most is None else max(1, min(most.bit_length(), MOST_BITS)), BITS)
    assert isinstance(passes, int)
    turns = passes if isinstance(u.places.count, int) else passes + passes % 2
    blocks = ceildiv(u.count, RANKED)

    def scratch(kind: dtypes.DType, size: Dim) -> Value:
        return Value(TensorType(kind, (size,)))

    kept_in = [(scratch(_kind(u.places.count), u.count), scratch(numbers, u.count)) for _ in range(2)]
    counts, totals = scratch(numbers, blocks * (1 << BITS)), scratch(numbers, 1 << BITS)
    starts, ends = scratch(numbers, u.places.count), scratch(numbers, u.places.count)
    found = list[Kernel]()
    for turn in range(turns):
        source, target = kept_in[(turn + 1) % 2] if turn else None, kept_in[turn % 2]
        made = [
            _counted(u, turn, source, counts), _added_up(u, blocks, counts, totals),
            _moved(u, turn, source, target, counts, totals),
        ]  # fmt: skip
        # Where the number of places is not known, pairs of passes are left out that have nothing to do.
        first = turn // 2 * 2 * BITS
        needed = exceeds(u.places.count, (1 << first) - 1) if first else 1
        found += [replace(k, when=needed) for k in made]
    places, order = kept_in[(turns - 1) % 2]
    found[0] = replace(found[0], scratch=(*kept_in[0], *(kept_in[1] if turns > 1 else ()), counts, totals))
    found.append(_noted(u, places, starts, ends))
    sort = [replace(k, task=(*u.task, at)) for at, k in enumerate(found)]
    return [*sort, *_joined(u, places, order, starts, ends)]


def _kind(n: Dim) -> dtypes.DType:
    """Of numbers up to `n`."""
    most = bounds(n)[1]
    return dtypes.int32 if most is not None and most < WIDE - 1 else dtypes.int64


# ---------------------------------------------------------------- the sort


def _digits(u: _Updates, w: Writer, turn: int, source: tuple[Value, Value] | None, reports: bool) -> None:
    """Statements that find the places of a block of updates, ``key``, and where each has a digit, ``here``:
    [digits, updates]. An update out of bounds goes behind all places.
    """
    w.lanes("i", f"pid * {RANKED}", RANKED, "[None, :]")
    w.lines.append(f"im = i < {w.size(u.count)}")
    if source is None:
        key = u.place(w, reports)
        w.lines.append(f"key = tl.where(good, {key}, {w.size(u.places.count)})")
    else:
        w.lines.append(f"key = tl.load({w.start(source[0])} + i, mask=im, other=0)")
    w.lines += [
        f"digit = tl.arange(0, {1 << BITS})[:, None]",
        f"here = (((key >> {turn * BITS}) & {(1 << BITS) - 1}) == digit) & im",
    ]  # fmt: skip


def _writer(u: _Updates, *values: Value) -> Writer:
    """`values`: those of the scratch, which begin at addresses of their own."""
    return Writer(u.layout, (*u.node.operands, u.node.output, *values), u.count)


def _counted(u: _Updates, turn: int, source: tuple[Value, Value] | None, counts: Value) -> Kernel:
    """How often a block of updates has each digit."""
    w = _writer(u, counts)
    _digits(u, w, turn, source, reports=True)
    blocks = w.size(ceildiv(u.count, RANKED))
    found = f"tl.sum(here.to(tl.int32), 1)[:, None].to({spelling.computed(counts.dtype)})"
    w.lines.append(f"tl.store({w.start(counts)} + digit * {blocks} + pid, {found})")
    return w.kernel(ceildiv(u.count, RANKED), RANKED << BITS)


def _added_up(u: _Updates, blocks: Dim, counts: Value, totals: Value) -> Kernel:
    """A program for each digit: its counts become the sums of those of the blocks before."""
    w = _writer(u, counts)
    at, kind = f"{w.start(counts)} + pid * {w.size(blocks)} + b", spelling.computed(counts.dtype)
    lanes = f"b0 + tl.arange(0, {SCANNED}){'.to(tl.int64)' if w.wide else ''}[None, :]"
    w.lines += [
        f"before = tl.zeros((1, 1), {kind})", f"for b0 in range(0, {w.size(blocks)}, {SCANNED}):",
        *indent([
            f"b = {lanes}", f"bm = b < {w.size(blocks)}", f"n = tl.load({at}, mask=bm, other=0)",
            f"tl.store({at}, before + tl.cumsum(n, 1) - n, mask=bm)",
            f"before += tl.sum(n, 1)[:, None].to({kind})",
        ]),
        f"tl.store({w.start(totals)} + pid + tl.zeros((1, 1), tl.int32), before)",
    ]  # fmt: skip
    return w.kernel(1 << BITS, SCANNED)


def _moved(
    u: _Updates, turn: int, source: tuple[Value, Value] | None, target: tuple[Value, Value], counts: Value,
    totals: Value,
) -> Kernel:  # fmt: skip
    """Each update of a block goes behind those with lower digits, and those before it with the same."""
    w = _writer(u, counts)
    _digits(u, w, turn, source, reports=False)
    (keys, numbers), blocks = target, w.size(ceildiv(u.count, RANKED))
    number = "i" if source is None else f"tl.load({w.start(source[1])} + i, mask=im, other=0)"
    w.lines += [
        f"number = {number}", f"lower = tl.arange(0, {1 << BITS})[None, :]",
        f"first = tl.sum(tl.where(lower < digit, tl.load({w.start(totals)} + lower), 0), 1)[:, None]",
        f"first += tl.load({w.start(counts)} + digit * {blocks} + pid)",
        "rank = first + tl.cumsum(here.to(tl.int32), 1) - 1",
        "at = tl.sum(tl.where(here, rank, 0), 0)[None, :]",
        f"tl.store({w.start(keys)} + at, key.to({spelling.computed(keys.dtype)}), mask=im)",
        f"tl.store({w.start(numbers)} + at, number.to({spelling.computed(numbers.dtype)}), mask=im)",
    ]  # fmt: skip
    return w.kernel(ceildiv(u.count, RANKED), RANKED << BITS)


# ---------------------------------------------------------------- updates of a place, which are neighbours now


def _noted(u: _Updates, keys: Value, starts: Value, ends: Value) -> Kernel:
    """Where the updates of each place begin and end among all; those of places without any stay zeros."""
    w, kind = _writer(u, starts), spelling.computed(starts.dtype)
    w.lanes("x", f"pid * {NOTED}", NOTED)
    at, count = f"{w.start(keys)} + x", w.size(u.count)
    w.lines += [
        f"xm = x < {count}", f"key = tl.load({at}, mask=xm, other=0)",
        f"before = tl.load({at} - 1, mask=xm & (x > 0), other=-1)",
        f"after = tl.load({at} + 1, mask=x + 1 < {count}, other=-1)",
        f"good = xm & (key < {w.size(u.places.count)})",
        f"tl.store({w.start(starts)} + key, x.to({kind}), mask=good & (key != before))",
        f"tl.store({w.start(ends)} + key, (x + 1).to({kind}), mask=good & (key != after))",
    ]  # fmt: skip
    return replace(w.kernel(ceildiv(u.count, NOTED), NOTED), cleared=(starts, ends))


def _joined(u: _Updates, keys: Value, order: Value, starts: Value, ends: Value) -> list[Kernel]:
    """Parts of the updates of a place, where there are any, and all that a place has."""
    most = bounds(u.count)[1]
    if most is not None and most < PART:
        return [_whole(u, order, starts, ends, None)]
    parts = Value(TensorType(u.node.output.dtype, (floordiv(u.count, PART) * u.slices.count,)))
    return [_parts(u, keys, order, starts, ends, parts), _whole(u, order, starts, ends, parts)]


def _shape(u: _Updates) -> tuple[int, int]:
    """Of a tile of places, or of parts, by elements of a slice."""
    width = min(WIDTH, power(u.slices.count)) if isinstance(u.slices.count, int) else WIDTH
    return JOINED // width, width


def _lanes(u: _Updates, w: Writer, name: str, count: Dim) -> Dim:
    """Lanes for some elements of a slice, `q`, and for some of `count` others. Returns the number of programs."""
    block, width = _shape(u)
    blocks = ceildiv(u.slices.count, width)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lanes(name, f"pid // {w.size(blocks)} * {block}", block, "[:, None]")
    w.lines += [f"qm = q < {w.size(u.slices.count)}", f"{name}m = {name} < {w.size(count)}"]
    return ceildiv(count, block) * blocks


def _update(u: _Updates, w: Writer, order: Value, at: str, mask: str, from_updates: str, wrong: list[Wrong]) -> str:
    """An element of the update that is at this place of the order; statements find its address. To `wrong` is added
    what is to be reported of it.
    """
    number = f"tl.load({w.start(order)} + {at}, mask={mask}, other=0){'.to(tl.int64)' if w.wide else ''}"
    w.lines.append(f"number = {number}")
    updates = u.node.operands[2]
    if updates.id in u.group.operands:
        return _computed(u, w, mask, wrong)
    (at_update,) = w.spread("number", u.apart)
    return loaded(f"{w.start(updates)} + {at_update} + {from_updates}", f"({mask}) & qm", updates.dtype)


def _computed(u: _Updates, w: Writer, mask: str, wrong: list[Wrong]) -> str:
    """An element of the update `number`, where nobody has stored it: what leads to it is computed here."""
    updates = u.node.operands[2]
    section, shape = u.group.operands[updates.id], _shape(u)
    lowering = Lowering(section, u.layout)
    store = Store(updates, 0, lowering.at(updates, section.index))
    nest = Nest([], [Phase([], stores=[store])], lowering.lookups)
    tile, places = Tile(shape, w.buffers), list[Dim]()
    names = [*w.digits("number", updates.shape[: u.lead]), *w.digits("q", updates.shape[u.lead :])]
    for a, (name, size) in enumerate(zip(names, updates.shape, strict=True)):
        axis = 0 if a < u.lead else 1
        places.append(own := fresh("i", size))
        tile.lane(symbol(own), TileVariable(name, axis, shape[axis], f"({mask})" if axis == 0 else "qm"))
    substitute_indices(nest, [mapping(section, tuple(places))])
    scope, emitter = tile.scope(), tile.emitter(dict(nest.lookups))
    emitter.wide, emitter.later = w.wide, wrong
    text = spelling.narrowed(emitter.emit(nest.stores()[0].term, scope), updates.dtype)
    w.lines += scope.lines
    text = text if updates.dtype.name == "bool" else spelling.widened(text, updates.dtype)
    return f"tl.broadcast_to({text}, {shape})"


def _reports(wrong: list[Wrong]) -> list[str]:
    """Statements that report what is wrong with any of several elements: a report keeps later reads waiting, so these
    are read first.
    """
    lines = []
    for code in dict.fromkeys(code for _, code, _ in wrong):
        found = [(test, value) for test, own, value in wrong if own == code]
        value = found[-1][1]
        for test, other in found[-2::-1]:
            value = f"tl.where({test}, {other}, {value})"
        lines.append(f"ox_report(error, {' | '.join(f'({test})' for test, _ in found)}, {code}, call, {value})")
    return lines


def _one_after_the_other(
    u: _Updates, w: Writer, count: str, read: Callable[[Writer, str, str, list[Wrong]], str]
) -> list[str]:
    """Statements that join the accumulator `acc` with so many others. `read` gives an element of one of them."""
    reads, joins, wrong = w.aside(), list[str](), list[Wrong]()
    for k in range(AHEAD):
        there = f"k + {k} < {count}"
        reads.lines.append(f"u{k} = {read(reads, f'k + {k}', there, wrong)}")
        joins += [f"u = u{k}", f"acc = tl.where({there}, {joined(u.node)}, acc)"]
    return [
        f"most = tl.max(tl.max({count}, 1), 0)", f"for k in range(0, most, {AHEAD}):",
        *indent([*reads.lines, *_reports(wrong), *joins]),
    ]  # fmt: skip


def _parts(u: _Updates, keys: Value, order: Value, starts: Value, ends: Value, parts: Value) -> Kernel:
    """What parts become. One that ends behind the updates x * PART to (x + 1) * PART - 1 begins among them, and belongs
    to the place of the last of them: so there is one at most, which is the part `x`.
    """
    data, _, updates = u.node.operands
    w = Writer(u.layout, (data, updates, starts, parts, *touched(u.group, u.layout)), u.count * u.slices.count)
    count = floordiv(u.count, PART)
    programs = _lanes(u, w, "x", count)
    _, _, from_updates = w.spread("q", u.slices)
    w.lines += [
        f"key = tl.load({w.start(keys)} + x * {PART} + {PART - 1}, mask=xm, other=0)",
        f"good = xm & (key < {w.size(u.places.count)})",
        f"j = tl.load({w.start(starts)} + key, mask=good, other=0)",
        f"end = tl.load({w.start(ends)} + key, mask=good, other=0)",
        f"j += tl.maximum(x * {PART} - j + {PART - 1}, 0) // {PART} * {PART}",
        f"good = good & (j + {PART} <= end)",
    ]  # fmt: skip

    def own(inner: Writer, k: str, there: str, wrong: list[Wrong]) -> str:
        return _update(u, inner, order, f"j + {k}", there, from_updates, wrong)

    wrong = list[Wrong]()
    w.lines.append(f"acc = {_update(u, w, order, 'j', 'good', from_updates, wrong)}")
    w.lines += [
        *_reports(wrong), f"rest = tl.where(good, {PART - 1}, 0)", "j += 1",
        *_one_after_the_other(u, w, "rest", own),
        f"tl.store({w.start(parts)} + x * {w.size(u.slices.count)} + q, {kept('acc', parts.dtype)}, mask=good & qm)",
    ]  # fmt: skip
    return replace(w.kernel(programs, 2 * JOINED), scratch=(parts,))


def _whole(u: _Updates, order: Value, starts: Value, ends: Value, parts: Value | None) -> Kernel:
    """Lanes for places and some elements of each slice, which join what their place has one after the other."""
    (data, _, updates), out = u.node.operands, u.node.output
    values = (data, out, updates, starts, *touched(u.group, u.layout))
    w = Writer(u.layout, values, u.count * u.slices.count, u.places.count * u.slices.count)
    programs = _lanes(u, w, "place", u.places.count)
    from_data, to_out, from_updates = w.spread("q", u.slices)

    def own(inner: Writer, k: str, there: str, wrong: list[Wrong]) -> str:
        return _update(u, inner, order, f"j + {k}", there, from_updates, wrong)

    at_data, at_out = w.spread("place", u.places)
    w.lines += [
        f"acc = {loaded(f'{w.start(data)} + {at_data} + {from_data}', 'placem & qm', out.dtype)}",
        f"j = tl.load({w.start(starts)} + place, mask=placem, other=0)",
        f"count = tl.load({w.start(ends)} + place, mask=placem, other=0) - j",
    ]  # fmt: skip
    if parts is not None:
        part = f"{w.start(parts)} + (j // {PART} + {{}}) * {w.size(u.slices.count)} + q"
        w.lines += [
            f"parts = count // {PART}",
            *_one_after_the_other(
                u, w, "parts", lambda _, k, there, wrong: loaded(part.format(f"({k})"), f"({there}) & qm", out.dtype)
            ),
            f"j += parts * {PART}", f"count -= parts * {PART}",
        ]  # fmt: skip
    w.lines += [
        *_one_after_the_other(u, w, "count", own),
        f"tl.store({w.start(out)} + {at_out} + {to_out}, {kept('acc', out.dtype)}, mask=placem & qm)",
    ]  # fmt: skip
    return w.kernel(programs, 2 * JOINED)
