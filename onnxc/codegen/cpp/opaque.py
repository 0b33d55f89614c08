"""Kernels of the primitives that are no loop nests: cumsum, top_k, the scatters, decision trees, the choice of
boxes, and users' own.

Each emitter writes a kernel that divides independent lines (or columns of lines) over parallel items, and
calls a routine of routines.h for each. Operands and results are stored buffers of any memory order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxc.codegen.cpp import spelling, user
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.weights import WeightStore
from onnxc.errors import UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, ceildiv, is_less, prod
from onnxc.ir.graph import Node, Value
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.primitives.indexing import scatter_depth
from onnxc.primitives.kernels import USER

# A unit of a copy: enough bytes to be worth a call.
COPY_CHUNK = 16384
# Rows that go through each of the trees together.
TREE_BLOCK = 64


@dataclass(frozen=True)
class Axis:
    """A loop over a dim: its size, and the steps of each tensor along it."""

    size: Dim
    steps: tuple[Dim, ...]


def collapse(shape: Sequence[Dim], *strides: Sequence[Dim]) -> list[Axis]:
    """Loops over a shape, outermost first; neighbours that all tensors walk through as one are merged.

    >>> collapse((2, 1, 3, 4), (12, 12, 4, 1), (12, 12, 4, 1))
    [Axis(size=24, steps=(1, 1))]
    >>> collapse((2, 3), (3, 1), (1, 2))
    [Axis(size=2, steps=(3, 1)), Axis(size=3, steps=(1, 2))]
    """
    out: list[Axis] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        before = out[-1] if out else None
        if before and all(always_equal(a, b * size) for a, b in zip(before.steps, steps, strict=True)):
            out[-1] = Axis(before.size * size, tuple(steps))
        else:
            out.append(Axis(size, tuple(steps)))
    return out


def without(xs: Sequence[Dim], axis: int) -> tuple[Dim, ...]:
    """All but one of the sizes or strides."""
    return (*xs[:axis], *xs[axis + 1 :])


def call(routine: str, *args: str) -> str:
    """The statement that calls a routine of routines.h."""
    return f"routines::{routine}({', '.join(args)});"


class RoutineEmitter(TemplateEmitter):
    """What the emitters share: operands as pointers with strides, and loops over lines."""

    def __init__(self, group: Group, layout: Layout, lanes: int, weights: WeightStore) -> None:
        super().__init__(group, layout, lanes, weights, KernelOptions())
        assert group.node is not None
        self.node: Node = group.node

    def emit(self) -> KernelSource:
        raise NotImplementedError

    def start(self, value: Value) -> str:
        """The address of a value's first element."""
        pointer = self.pointer(self.layout.storage(value))
        offset = self.layout.offset(value)
        return pointer if offset == 0 else f"{pointer} + {self.size(offset)}"

    def decode(self, counter: str, loops: Sequence[Axis]) -> tuple[list[str], list[str]]:
        """Statements that find the place of the line `counter`, and for each tensor its offset there."""
        lines: list[str] = []
        rest = counter
        for k, loop in reversed(list(enumerate(loops))):
            lines.append(f"const i64 b{k} = {rest}{f' % {self.size(loop.size)}' if k else ''};")
            rest = f"({rest} / {self.size(loop.size)})"
        return lines, self.offsets("b", loops)

    def offsets(self, prefix: str, loops: Sequence[Axis]) -> list[str]:
        """For each tensor, the offset that loop variables prefix0, prefix1, ... give: ` + b0 * 12`."""
        count = len(loops[0].steps) if loops else 8
        each = [[f" + {prefix}{k} * {self.size(s)}" for s in loop.steps] for k, loop in enumerate(loops)]
        return ["".join(steps[i] for steps in each) for i in range(count)]

    def count(self, loops: Sequence[Axis]) -> str:
        """How many points the loops have."""
        return self.size(prod(loop.size for loop in loops))

    def nest(self, prefix: str, loops: Sequence[Axis], body: list[str]) -> list[str]:
        """Loops in order around a body."""
        for k, loop in reversed(list(enumerate(loops))):
            v = f"{prefix}{k}"
            body = [f"for (i64 {v} = 0; {v} < {self.size(loop.size)}; {v}++) {{", *indent(body), "}"]
        return body

    def over_units(self, units: str, work: str, each: list[str]) -> tuple[list[str], list[str]]:
        """The division of units of work into items, for the program and the kernel, and the kernel's loop."""
        head = [f"const i64 units = {units}, each = routines::units_per_item({work});"]
        return head, [
            "const i64 stop = routines::least(last * each, units);",
            "for (i64 t = first * each; t < stop; t++) {", *indent(each), "}",
        ]  # fmt: skip

    def finish(self, head: list[str], body: list[str], before: Sequence[str] = (), scratch: str = "0") -> KernelSource:
        items = "routines::up(units, each)"
        return self.source([*head, *body], items, "routines.h", scratch, [*before, *head], self.node.op)

    def require(self, a: Dim, relation: str, b: Dim) -> list[str]:
        """A check of the kernel that two sizes are equal (==) or ordered (<=), where that is not known."""
        if always_equal(a, b) or (relation == "<=" and is_less(a, b + 1)):
            return []
        left, right = self.size(a), self.size(b)
        fail = f"ctx->api->fail(ctx, OX_ERR_SHAPE, 0, {left});"
        return [f"if (!({left} {relation} {right})) {{ {fail} return; }}"]


class CumsumEmitter(RoutineEmitter):
    """Running sums along an axis: line by line, or neighbouring lines at once where the axis is outer."""

    def emit(self) -> KernelSource:
        (x,), y, axis = self.node.operands, self.node.output, self.node.attrs["axis"]
        if x.dtype.name == "bool":
            raise UnsupportedError("a running sum of bool", node=", ".join(map(str, self.group.origin)))
        strides = self.layout.strides(x), self.layout.strides(y)
        n = x.shape[axis]
        steps = [s[axis] for s in strides]
        starts = [self.start(x), self.start(y)]
        if self.node.attrs.get("reverse"):
            starts = [f"{p} + {self.size((n - 1) * s)}" for p, s in zip(starts, steps, strict=True)]
            steps = [-s for s in steps]
        along = f"{self.size(n)}, {self.size(steps[0])}, {self.size(steps[1])}"
        loops = collapse(without(x.shape, axis), *(without(s, axis) for s in strides))
        exclusive = "true" if self.node.attrs.get("exclusive") else "false"
        types = f"{spelling.storage_type(x.dtype)}, {exclusive}"
        if loops and loops[-1].steps == (1, 1):
            return self._columns(loops, starts, along, types, n)
        return self._lines(loops, starts, along, types, n)

    def _lines(self, loops: list[Axis], starts: list[str], along: str, types: str, n: Dim) -> KernelSource:
        decode, at = self.decode("t", loops)
        t = types.split(",")[0]
        head, _ = self.over_units(self.count(loops), self.size(n), [])
        stop = "routines::least(last * each, units)"
        body = [
            f"const auto at = [=](i64 t, const {t} *&x, {t} *&y) OX_LAMBDA {{ (void)t;", *indent(decode),
            f"  x = {starts[0]}{at[0]};", f"  y = {starts[1]}{at[1]};", "};",
            call(f"cumsum_lines<{types}>", "first * each", stop, along, "at"),
        ]  # fmt: skip
        return self.finish(head, body)

    def _columns(self, loops: list[Axis], starts: list[str], along: str, types: str, n: Dim) -> KernelSource:
        *outer, inner = loops
        decode, at = self.decode("(t / chunks)", outer)
        sizes = chunks_of(self, inner.size)
        x, y = (f"{p}{o} + from" for p, o in zip(starts, at, strict=False))
        each = [*PICK_CHUNK, *decode, call(f"cumsum_columns<{types}>", x, y, along, "w")]
        head, loop = self.over_units(f"{self.count(outer)} * chunks", f"{self.size(n)} * chunk", each)
        return self.finish([*sizes, *head], loop)


# The chunk of the inner dim that unit t takes: w elements.
PICK_CHUNK = ["const i64 from = t % chunks * chunk, w = routines::least(chunk, width - from);"]


def chunks_of(emitter: RoutineEmitter, width: Dim) -> list[str]:
    """Statements that divide an inner dim into chunks."""
    return [
        f"const i64 width = {emitter.size(width)}, chunk = routines::columns_per_unit(width, ctx->threads);",
        "const i64 chunks = routines::up(width, chunk);",
    ]


def order_of(dtype: DType, largest: bool) -> str:
    """How top_k compares elements: an Order of routines.h."""
    bits = 8 if dtype.name == "bool" else dtype.bits
    kind = {"float": "FLOAT", "int": "SIGNED"}.get(dtype.kind, "UNSIGNED")
    infinity = {
        "float32": 0x7F800000,
        "float64": 0x7FF0000000000000,
        "float16": 0x7C00,
        "bfloat16": 0x7F80,
    }.get(dtype.name, 0)
    return f"routines::Order<u{bits}, routines::{kind}, {infinity:#x}ULL, {'true' if largest else 'false'}>"


class TopKEmitter(RoutineEmitter):
    """The k best along an axis, line by line."""

    def emit(self) -> KernelSource:
        (x,), (values, at), axis = self.node.operands, self.node.outputs, self.node.attrs["axis"]
        n, k = x.shape[axis], values.shape[axis]
        all_strides = [self.layout.strides(v) for v in (x, values, at)]
        loops = collapse(without(x.shape, axis), *(without(s, axis) for s in all_strides))
        steps = [self.size(s[axis]) for s in all_strides]
        decode, offsets = self.decode("t", loops)
        spelling.storage_type(x.dtype)
        order = order_of(x.dtype, bool(self.node.attrs["largest"]))
        word = order.split("<")[1].split(",")[0]
        entry = 16 if word == "u64" else 8
        each = f"routines::up(routines::top_k_entries({self.size(n)}, {self.size(k)}) * {entry}, 64) * 64"
        source = f"(const {word} *)({self.start(x)}{offsets[0]})"
        target = f"({word} *)({self.start(values)}{offsets[1]})"
        places = f"{self.start(at)}{offsets[2]}"
        line = call(
            f"top_k<{order}>", source, steps[0], self.size(n), self.size(k), target, steps[1], places,
            steps[2], "scratch",
        )  # fmt: skip
        head, loop = self.over_units(self.count(loops), self.size(n), [*decode, line])
        body = [f"char *const scratch = a->scratch + worker * ({each});", *loop]
        limit = [] if isinstance(n, int) and n < 1 << 32 else self.require(n, "<=", (1 << 32) - 1)
        return self.finish(head, [*self.require(k, "<=", n), *limit, *body], [], f"ctx->threads * ({each})")


class ScatterEmitter(RoutineEmitter):
    """What both scatters share: the result starts as a copy of the data."""

    def __init__(self, group: Group, layout: Layout, lanes: int, weights: WeightStore) -> None:
        super().__init__(group, layout, lanes, weights)
        self.data, self.index_value, self.updates = self.node.operands
        self.out = self.node.output
        self.element = spelling.storage_type(self.data.dtype)
        self.index_type = spelling.storage_type(self.index_value.dtype)

    def operation(self) -> str:
        """The combination of old and new elements. On bool, add is or, and mul is and."""
        name = str(self.node.attrs["reduction"])
        if self.data.dtype.name == "bool":
            name = {"add": "max", "mul": "min"}.get(name, name)
        return "routines::" + {"none": "Set"}.get(name, name.capitalize())

    def copy(self) -> list[str]:
        """Statements of the program that copy the data to the result."""
        order = self.layout.order_of(self.out)
        shape = [self.out.shape[i] for i in order]
        strides = [[self.layout.strides(v)[i] for i in order] for v in (self.data, self.out)]
        *outer, inner = collapse(shape, *strides) or [Axis(1, (1, 1))]
        decode, at = self.decode("(t / chunks)", outer)
        source, target = self.start(self.data), self.start(self.out)
        pointers = [(source.split(" ")[0], "const "), (target.split(" ")[0], "")]
        steps = [self.size(step) for step in inner.steps]
        from_, to = f"{source}{at[0]} + from * {steps[0]}", f"{target}{at[1]} + from * {steps[1]}"
        line = call("copy", to, steps[1], from_, steps[0], "w")
        units = f"{self.count(outer)} * chunks"
        head, loop = self.over_units(units, "chunk", [*PICK_CHUNK, *decode, line])
        width = self.size(inner.size)
        sizes = [
            f"const i64 width = {width}, chunk = routines::most(1, routines::least(width, {COPY_CHUNK}));",
            "const i64 chunks = routines::up(width, chunk);",
        ]
        t = self.element
        inside = [
            "const ox_call *const a = (const ox_call *)arg; (void)a; @SIZES@",
            *(f"{const}{t} *const {p} = ({const}{t} *)a->p[{p[1:]}];" for p, const in pointers),
            *sizes, *head, *loop,
        ]  # fmt: skip
        return [
            "{", "  const auto copy = [](void *arg, i64 first, i64 last, int) {", *indent(inside, 2), "  };",
            *indent([*sizes, *head]), "  ox_for(ctx, routines::up(units, each), copy, &c);", "}",
        ]  # fmt: skip


class ScatterElementsEmitter(ScatterEmitter):
    """out[..., index[..., j, ...], ...] = updates[..., j, ...]: lines along the axis are independent."""

    def emit(self) -> KernelSource:
        axis, shape = self.node.attrs["axis"], self.index_value.shape
        tensors = (self.out, self.index_value, self.updates)
        checks, before = self._checks(axis), self.copy()
        strides = [self.layout.strides(v) for v in tensors]
        outer = collapse(without(shape, axis), *(without(s, axis) for s in strides))
        inner = outer.pop() if outer and outer[-1].steps[0] == 1 else Axis(1, (0, 0, 0))
        decode, at = self.decode("(t / chunks)", outer)
        lines = [
            f"{{{self.start(v)}{o} + from * {self.size(n)}, {self.size(s[axis])}, {self.size(n)}}}"
            for v, o, s, n in zip(tensors, at, strides, inner.steps, strict=False)
        ]
        count = self.size(shape[axis])
        types = f"{self.operation()}, {self.element}, {self.index_type}"
        scatter = call(
            f"scatter<{types}>", "ctx", "0", lines[0], self.size(self.out.shape[axis]), *lines[1:], count, "w"
        )
        work = f"{count} * routines::least(chunk, width)"
        each = [*PICK_CHUNK, *decode, f"if (!{scatter[:-1]}) return;"]
        head, loop = self.over_units(f"{self.count(outer)} * chunks", work, each)
        return self.finish([*chunks_of(self, inner.size), *head], [*checks, *loop], before)

    def _checks(self, axis: int) -> list[str]:
        """The index lies inside the data along the other axes; the updates have the shape of the index."""
        lines: list[str] = []
        for i, (d, n, u) in enumerate(zip(self.data.shape, self.index_value.shape, self.updates.shape, strict=True)):
            lines += [] if i == axis else self.require(n, "<=", d)
            lines += self.require(n, "==", u)
        return lines


class ScatterNDEmitter(ScatterEmitter):
    """out[index[i...]] = updates[i...], slices of the data. Parallel over their columns; rows go in order."""

    def emit(self) -> KernelSource:
        depth = scatter_depth([v.t for v in self.node.operands])
        rows_rank = self.index_value.rank - 1
        to, at, source = (self.layout.strides(v) for v in (self.out, self.index_value, self.updates))
        checks, before = self._checks(depth, rows_rank), self.copy()
        rows = collapse(self.index_value.shape[:-1], at[:-1], source[:rows_rank])
        slices = collapse(self.out.shape[depth:], to[depth:], source[rows_rank:])
        inner = slices.pop() if slices else Axis(1, (1, 1))
        row_at, slice_at = self.offsets("r", rows), self.offsets("q", slices)
        steps = [self.size(s) for s in inner.steps]
        to_line = f"{self.start(self.out)} + to{slice_at[0]} + from * {steps[0]}"
        update = f"(const {self.element} *){self.start(self.updates)}{row_at[1]}{slice_at[1]} + from * {steps[1]}"
        apply = call(f"apply<{self.operation()}>", to_line, steps[0], update, steps[1], "w")
        find = [
            f"const {self.index_type} *const index = {self.start(self.index_value)}{row_at[0]}; (void)index;",
            "i64 to = 0;",
        ]
        for d in range(depth):
            size = self.size(self.out.shape[d])
            at_d = f"routines::place(ctx, 0, (i64)index[{d} * {self.size(at[-1])}], {size})"
            step = f"if (i < 0) return; to += i * {self.size(to[d])};"
            find.append(f"{{ const i64 i = {at_d}; {step} }}")
        each = self.nest("r", rows, [*find, *self.nest("q", slices, [apply])])
        work = self.size(prod((*(r.size for r in rows), *(q.size for q in slices))))
        head, loop = self.over_units("chunks", f"{work} * routines::least(chunk, width)", [*PICK_CHUNK, *each])
        return self.finish([*chunks_of(self, inner.size), *head], [*checks, *loop], before)

    def _checks(self, depth: int, rows_rank: int) -> list[str]:
        wanted = (*self.index_value.shape[:-1], *self.data.shape[depth:])
        pairs = [(self.index_value.shape[-1], depth), *zip(wanted, self.updates.shape, strict=True)]
        return [line for a, b in pairs for line in self.require(a, "==", b)]


class TreeLeavesEmitter(RoutineEmitter):
    """A call of `trees::leaves` for each block of rows."""

    def emit(self) -> KernelSource:
        x, nodes, roots = self.node.operands
        out, attrs = self.node.output, self.node.attrs
        rows, trees = out.shape
        (row, step), (out_row, out_tree) = (self.layout.strides(v) for v in (x, out))
        (roots_step,) = self.layout.strides(roots)
        starts = [self.start(v) for v in (nodes, roots, x, out)]
        sizes = [self.size(d) for d in (roots_step, trees, row, step, out_row, out_tree)]
        line = (
            f"trees::leaves<{spelling.storage_type(x.dtype)}, {attrs['flags']}u>({starts[0]}, {starts[1]}, {sizes[0]}, "
            f"{sizes[1]}, {attrs['steps']}, {starts[2]}, {sizes[2]}, {sizes[3]}, {starts[3]}, {sizes[4]}, {sizes[5]}, "
            f"t * {TREE_BLOCK}, routines::least((t + 1) * {TREE_BLOCK}, {self.size(rows)}));"
        )
        work = f"{self.size(trees)} * {attrs['steps'] * TREE_BLOCK}"
        head, loop = self.over_units(self.size(ceildiv(rows, TREE_BLOCK)), work, [line])
        kernel = self.finish(head, [*self.require(attrs["features"], "<=", x.shape[1]), *loop])
        return replace(kernel, includes=frozenset({"trees.h"}))


class NmsEmitter(RoutineEmitter):
    """Each class finds its boxes in a part of the output of its own; then these are moved together."""

    def emit(self) -> KernelSource:
        (boxes, scores, *numbers), (rows, count) = self.node.operands, self.node.outputs
        (batch, box, step), (scores_batch, of, score) = (self.layout.strides(v) for v in (boxes, scores))
        room, n = self.size(self.node.attrs["room"]), self.size(boxes.shape[1])
        batches, classes = (self.size(d) for d in scores.shape[:2])
        each = f"nms::scratch({n}, {room})"
        most, overlap, *least = (f"*({self.start(v)})" for v in numbers)
        checks = [
            *self.require(boxes.shape[0], "==", scores.shape[0]), *self.require(boxes.shape[1], "==", scores.shape[2]),
            *self.require(boxes.shape[2], "==", 4), *self.require(boxes.shape[1], "<=", (1 << 32) - 1),
        ]  # fmt: skip
        sizes = [
            f"const i64 classes = {classes}, units = {batches} * classes, room = {room};",
            f"i64 *const counts = (i64 *)(a->scratch + ctx->threads * ({each}));",
        ]
        center = "true" if self.node.attrs["center"] else "false"
        kinds = f"{center}, {'true' if least else 'false'}"
        args = [
            f"{self.start(boxes)} + b * {self.size(batch)}", self.size(box), self.size(step),
            f"{self.start(scores)} + b * {self.size(scores_batch)} + c * {self.size(of)}", self.size(score), n,
            f"routines::least({most}, room)", "room", overlap, *(least or ["0.0f"]), "b", "c",
            f"{self.start(rows)} + u * room * 3", f"a->scratch + worker * ({each})",
        ]  # fmt: skip
        pointers = [
            f"{c}{spelling.storage_type(v.dtype)} *const {self.pointer(self.layout.storage(v))} = "
            f"({c}{spelling.storage_type(v.dtype)} *)a->p[{self.pointer(self.layout.storage(v))[1:]}];"
            for v, c in ((boxes, "const "), (scores, "const "), *((v, "const ") for v in numbers), (rows, ""))
        ]
        before = [
            "{", "  const auto select = [](void *arg, i64 first, i64 last, int worker) {",
            *indent([
                "const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx; @SIZES@", *pointers,
                *checks, *sizes,
                "for (i64 u = first; u < last; u++) {",
                "  const i64 b = u / classes, c = u % classes;",
                f"  counts[u] = nms::select<{kinds}>({', '.join(args)});", "}",
            ], 2),
            "  };", f"  ox_for(ctx, {batches} * {classes}, select, &c);", "}",
        ]  # fmt: skip
        checks.append(
            f"if (!({overlap} >= 0 && {overlap} <= 1)) {{ ctx->api->fail(ctx, OX_ERR_VALUE, 0, 0); return; }}"
        )
        end = f"*({self.start(count)}) = nms::close_up({self.start(rows)}, room, counts, units);"
        scratch = f"ctx->threads * ({each}) + {batches} * {classes} * 8"
        return self.source([*checks, *sizes, end], "1", "nms.h", scratch, before, "nms")


class PositionsEmitter(RoutineEmitter):
    """Counts of chunks first, and then each chunk's positions."""

    def emit(self) -> KernelSource:
        (mask,), (places, count) = self.node.operands, self.node.outputs
        (step,), (apart,) = (self.layout.strides(v) for v in (mask, places))
        assert always_equal(apart, 1), "a vector of its own"
        n, at = self.size(mask.shape[0]), self.start(mask)
        storage = self.pointer(self.layout.storage(mask))
        sizes = [
            f"const i64 n = {n}, chunks = routines::up(n, positions::CHUNK);",
            "i64 *const counts = (i64 *)a->scratch;",
        ]
        span = f"(const u8 *)({at}), {self.size(step)}, k * positions::CHUNK, routines::least(n, (k + 1) * positions::CHUNK)"
        before = [
            "{", "  const auto count = [](void *arg, i64 first, i64 last, int) {",
            *indent([
                "const ox_call *const a = (const ox_call *)arg; @SIZES@",
                f"const u8 *const {storage} = (const u8 *)a->p[{storage[1:]}];", *sizes, "(void)chunks;",
                f"for (i64 k = first; k < last; k++) counts[k] = positions::count({span});",
            ], 2),
            "  };", f"  const i64 chunks = routines::up({n}, positions::CHUNK);", "  ox_for(ctx, chunks, count, &c);",
            "  ((i64 *)scratch)[chunks] = positions::running((i64 *)scratch, chunks);", "}",
        ]  # fmt: skip
        body = [
            *sizes, f"if (first == 0) *({self.start(count)}) = counts[chunks];",
            "for (i64 k = first; k < routines::least(last, chunks); k++)",
            f"  positions::write({span}, {self.start(places)} + counts[k]);",
        ]  # fmt: skip
        room = f"(routines::up({n}, positions::CHUNK) + 1) * 8"
        items = f"routines::most(1, routines::up({n}, positions::CHUNK))"
        return self.source(body, items, "positions.h", room, before, "positions")


class UserEmitter(RoutineEmitter):
    """A call of a user's function for each piece of its items."""

    def emit(self) -> KernelSource:
        for v in (*self.node.operands, *self.node.outputs):
            assert is_row_major(v, self.layout), "as layout.assign has it"
        unit = user.unit_of(self.node)
        lines, scratch = user.body(self, unit[0])
        kernel = self.source(lines, self.size(self.node.attrs["items"]), "routines.h", scratch, [], "user")
        return replace(kernel, unit=unit)


def is_row_major(v: Value, layout: Layout) -> bool:
    """Whether a value lies in memory without gaps, the last dim innermost."""
    step: Dim = 1
    for size, stride in zip(reversed(v.shape), reversed(layout.strides(v)), strict=True):
        if size != 1 and not always_equal(stride, step):
            return False
        step = step * size
    return True


_EMITTERS: dict[str, type[RoutineEmitter]] = {
    "cumsum": CumsumEmitter, "top_k": TopKEmitter,
    "scatter_elements": ScatterElementsEmitter, "scatter_nd": ScatterNDEmitter, "tree_leaves": TreeLeavesEmitter,
    "nms": NmsEmitter, "positions": PositionsEmitter, USER: UserEmitter,
}  # fmt: skip


def emit_opaque(group: Group, layout: Layout, lanes: int, weights: WeightStore) -> KernelSource:
    """The kernel of a group around a routine."""
    assert group.node is not None
    emitter = _EMITTERS.get(group.node.op)
    if emitter is None:
        raise UnsupportedError(f"no kernel for {group.node.op}", node=", ".join(map(str, group.origin)))
    return emitter(group, layout, lanes, weights).emit()
