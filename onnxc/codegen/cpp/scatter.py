"""Kernels of the scatters: a copy of the data, in which some elements are written again."""

from __future__ import annotations

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.routine import PICK_CHUNK, Axis, RoutineEmitter, call, chunks_of, collapse, without
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.weights import WeightStore
from onnxc.ir.expr import prod
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.primitives.indexing import scatter_depth

# A unit of a copy: enough bytes to be worth a call.
COPY_CHUNK = 16384


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
        checks, before = self._checks(depth), self.copy()
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

    def _checks(self, depth: int) -> list[str]:
        wanted = (*self.index_value.shape[:-1], *self.data.shape[depth:])
        pairs = [(self.index_value.shape[-1], depth), *zip(wanted, self.updates.shape, strict=True)]
        return [line for a, b in pairs for line in self.require(a, "==", b)]
