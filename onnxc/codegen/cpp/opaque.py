"""Kernels of the primitives that are no loop nests: cumsum, top_k, the scatters, decision trees, the choice of
boxes, and users' own.

Each emitter writes a kernel that divides independent lines (or columns of lines) over parallel items, and
calls a routine of routines.h for each. Operands and results are stored buffers of any memory order.
"""

from __future__ import annotations

from dataclasses import replace

from onnxc.codegen.cpp import spelling, user
from onnxc.codegen.cpp.routine import PICK_CHUNK, Axis, RoutineEmitter, call, chunks_of, collapse, is_row_major, without
from onnxc.codegen.cpp.scatter import ScatterElementsEmitter, ScatterNDEmitter
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.weights import WeightStore
from onnxc.errors import UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, ceildiv
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.primitives.kernels import USER

# Rows that go through each of the trees together.
TREE_BLOCK = 64
LONG_ROW = 2048  # elements of neighbouring lines that are summed up at once: the row before is still in the L1 cache
TOP_K_WORK = 4  # operations for an element of a line of which the best are found


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
        sizes = chunks_of(self, inner.size, LONG_ROW)
        x, y = (f"{p}{o} + from" for p, o in zip(starts, at, strict=False))
        each = [*PICK_CHUNK, *decode, call(f"cumsum_columns<{types}>", x, y, along, "w")]
        head, loop = self.over_units(f"{self.count(outer)} * chunks", f"{self.size(n)} * chunk", each)
        return self.finish([*sizes, *head], loop)


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
        head, loop = self.over_units(self.count(loops), f"{TOP_K_WORK} * {self.size(n)}", [*decode, line])
        body = [f"char *const scratch = a->scratch + worker * ({each});", *loop]
        limit = [] if isinstance(n, int) and n < 1 << 32 else self.require(n, "<=", (1 << 32) - 1)
        return self.finish(head, [*self.require(k, "<=", n), *limit, *body], [], f"ctx->threads * ({each})")


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
                "const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx; @SIZES@",
                *dict.fromkeys(pointers),  # views of one tensor, equal constants: one buffer
                *checks, *sizes,
                "for (i64 u = first; u < last; u++) {",
                "  const i64 b = u / classes, c = u % classes;",
                f"  counts[u] = nms::select<{kinds}>({', '.join(args)});", "}",
            ], 2),
            "  };", f"  ox_for(ctx, {batches} * {classes}, select, &c);", "}",
        ]  # fmt: skip
        checks.append(
            f"if (!({overlap} >= 0 && {overlap} <= 1)) {{ ctx->api->fail(ctx, OX_ERR_OVERLAP, 0, 0); return; }}"
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
