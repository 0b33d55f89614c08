"""One C++ source for a whole model: its kernels, and the program that calls them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from onnxc.codegen.calls import KernelCall, Updates, kernel_call, size_symbols
from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.closures import Shared, shared
from onnxc.codegen.cpp.headers import headers_of
from onnxc.codegen.cpp.opaque import emit_opaque
from onnxc.codegen.cpp.sections import emit_sections
from onnxc.codegen.cpp.templates import emit_template
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.flow import linked
from onnxc.codegen.weights import WeightStore
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import Dim, Symbol, substitute
from onnxc.ir.graph import Value
from onnxc.planner.groups import Group, Plan
from onnxc.planner.in_place import own_outputs, updates_of
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.memory import Buffer, assign_offsets, lifetimes, region_values
from onnxc.planner.rows import ROWS, ROWS_SYMBOL, Apart
from onnxc.primitives.builder import constant_of

ENTRY = "onnxc_run"
COPIED = 64  # bytes of a loop's state that are copied sooner than two buffers are exchanged
# Counts every change of what is generated: part of the cache key.
VERSION = 1


@dataclass
class Program:
    """The generated source with what is needed to call it."""

    sources: list[str]
    calls: list[KernelCall]
    buffers: list[Buffer]
    offsets: list[int] | None  # None where sizes are symbolic: they are placed at each new size
    arena_bytes: int
    symbols: list[str]
    weights: WeightStore
    kernels: dict[str, str] = field(default_factory=dict)  # function -> text
    updates: Updates | None = None
    units: dict[str, str] = field(default_factory=dict)  # of users' kernels, by name: these are sources too

    @property
    def source(self) -> str:
        """All translation units, one after the other."""
        return "\n".join(self.sources)


class ProgramWriter:
    """Generates the program of a plan. `lanes` is the vector length of the CPU level."""

    def __init__(self, plan: Plan, lanes: int, options: KernelOptions | None = None) -> None:
        self.plan, self.lanes, self.options = plan, lanes, options or KernelOptions()
        self.weights = WeightStore()
        self.functions: dict[str, str] = {}  # text -> name
        self.calls: list[KernelCall] = []
        self.lines: list[str] = []
        self.includes: set[str] = set()
        self.scratch: set[str] = {"0"}
        self.units: dict[str, str] = {}
        self.depth = 0
        self.turns: Dim = 1
        self.buffers = lifetimes(plan)
        self.symbols = size_symbols(plan)
        self.sizes = [*self.symbols, ROWS_SYMBOL.key]  # as kernels find them in a call's `s`; rows are a part's
        self.apart: Apart | None = None  # of the loop whose calls are written, where threads divide its rows
        self.updates = updates_of(plan.graph)
        self._overwriting: list[int] = []  # calls that write over inputs
        self._places = self._fixed_places()

    def _fixed_places(self) -> dict[int, str]:
        places = {v.id: f"buf[{k}]" for k, v in enumerate(self.plan.graph.inputs)}
        n = len(places)
        places |= {v.id: f"buf[{n + k}]" for k, (_, v) in enumerate(own_outputs(self.plan.graph))}
        sizes = [b.nbytes for b in self.buffers]
        self.offsets: list[int] | None = None
        self.arena_bytes = 0
        if all(isinstance(s, int) for s in sizes):
            self.offsets, self.arena_bytes = assign_offsets(
                [s for s in sizes if isinstance(s, int)], [(b.first, b.last) for b in self.buffers]
            )
            places |= {b.value.id: f"arena + {at}" for b, at in zip(self.buffers, self.offsets, strict=True)}
        else:
            base = len(self.symbols)
            places |= {b.value.id: f"arena + s[{base + 1 + k}]" for k, b in enumerate(self.buffers)}
        layout = self.plan.layout
        guests = [v for v in self.plan.graph.values() if layout.placed_on(v) is not None]
        return places | {v.id: places[layout.storage(v).id] for v in guests}

    def place(self, storage: Value) -> str:
        """The C++ expression of a buffer's address."""
        if storage.id in self._places:
            return self._places[storage.id]
        constant = constant_of(storage)
        if constant is None:
            raise UnsupportedError(f"{storage} has no buffer")
        return self._from_row(f"weights + {self.weights.add(storage.id, constant)}", storage)

    def write(self) -> Program:
        """The whole source."""
        spelling.check_complex(self.plan.graph)
        self._run(self.plan)
        updates = self._update_rest()
        kernels = {name: text for text, name in self.functions.items()}
        return Program(
            [*self.units.values(), *self._sources(kernels)],
            linked(self.plan, self.calls),
            self.buffers,
            self.offsets,
            self.arena_bytes,
            self.symbols,
            self.weights,
            kernels,
            updates,
            self.units,
        )

    def _update_rest(self) -> Updates | None:
        """Copies what could not be written over its input there."""
        if not self.updates:
            return None
        apart = [v for v in self.plan.graph.outputs if v.id in self.updates and v.id not in self.plan.layout.overwrites]
        self.lines += ["if (ox_failed(ctx)) return ctx->error.code;"] if apart else []
        self.lines += [self._copy(self.place(self.updates[v.id]), self.place(v), v) for v in apart]
        position = {v.id: k for k, v in enumerate(self.plan.graph.inputs)}
        changed = sorted({position[v.id] for v in self.updates.values()})
        return Updates(tuple(changed), min(self._overwriting, default=len(self.calls)))

    def _run(self, plan: Plan) -> None:
        """The calls of a plan's kernels, in order."""
        for group in plan.groups:
            if group.kind == "control":
                assert group.node is not None
                outside, self.turns = self.turns, self.turns * group.node.attrs["trip"]
                self._scan(group)
                self.turns = outside
            else:
                self._call(self._kernel(group, plan.layout), group)

    def _kernel(self, group: Group, layout: Layout) -> KernelSource:
        if group.kind == "loops":
            nests = [Lowering(s, layout).nest(group.placements.get(k)) for k, s in enumerate(group.sections)]
            return emit_sections(nests, self.lanes)
        if group.kind == "opaque":
            return emit_opaque(group, layout, self.lanes, self.weights)
        rows = None if self.apart is None else self.apart.rows
        options = replace(self.options, often=self.depth > 0, rows=rows)
        return emit_template(group, layout, self.lanes, self.weights, options)

    def _scan(self, group: Group) -> None:
        """A loop around the region's kernels; between two steps, states and what became of them exchange buffers, or are
        copied.
        """
        if group.apart is not None:
            self._scan_apart(group, group.apart)
        else:
            self.lines += ["{", *self._loop(group, "ox_loop(ctx)", "ox_ends(ctx)"), "}"]

    def _scan_apart(self, group: Group, apart: Apart) -> None:
        """The loop as a function of some rows, which `ox_rows` calls for those of each thread."""
        outside = self.apart, self.scratch
        self.apart, self.scratch = apart, {"0"}
        loop = self._loop(group, "worker ? 0 : ox_loop(shared)", "(worker ? ox_failed(shared) : ox_ends(shared))")
        own, (self.apart, self.scratch) = self.scratch, outside
        rows, name = spelling.index(apart.rows, self._names), ROWS_SYMBOL.key
        each = f"ox_up({_of_rows(rows, sorted(own), '&alone')}, 64) * 64"
        self.scratch.add(f"ox_max({_of_rows(rows, sorted(own), 'ctx')}, ctx->threads * ({each}))")
        assert group.node is not None and group.region is not None
        facts = (apart.rows, group.node.attrs["trip"], apart.shared, apart.own, apart.products, apart.operations)
        step = ", ".join(spelling.index(d, self._names) for d in (*facts, len(group.region.groups)))
        sizes = ", ".join([*(f"s[{k}]" for k in range(len(self.symbols))), name])
        self.lines += [
            "{", "ox_ctx *const shared = ctx;",
            "const auto part = [&](i64 row, i64 end, int worker, ox_ctx *const ctx, char *const scratch) {",
            f"  const i64 {name} = end - row, sizes[] = {{{sizes}}}; (void)scratch;",
            *indent(_derived(loop, ROWS_SYMBOL, True)), *indent(loop), "};",
            f"const i64 parts = {_parts(step)};",
            f"ox_rows(ctx, {rows}, parts, scratch, {each}, part);", f"if (parts > 1) ox_lap(ctx, {len(self.calls) - 1});",
            "if (ox_failed(ctx)) return ctx->error.code;", "}",
        ]  # fmt: skip

    def _loop(self, group: Group, begin: str, ends: str) -> list[str]:
        """The loop of a scan. `begin` gives its first turn, `ends` whether it is to end before the next one."""
        node, region = group.node, group.region
        assert node is not None and region is not None
        n, m = node.attrs["states"], node.attrs["scanned"]
        operands, inner, t = node.operands, region.graph, f"t{self.depth}"
        for v, _ in region_values(group) if self.apart else ():
            self._places[v.id] = self._from_row(self.place(v), v)
        for x, slice_ in zip(operands[n : n + m], inner.inputs[n : n + m], strict=True):
            self._places[slice_.id] = self._step_of(x, slice_, t)
        for x, same in zip(operands[n + m :], inner.inputs[n + m :], strict=True):
            self._places[same.id] = self._from_row(self.place(x), same)
        after, states = [inner.outputs[k] for k in node.attrs["results"]], inner.inputs[:n]
        declared, moves = self._turns(states, after[:n])
        copies: list[str] = []
        for y, stacked in zip(after[n:], node.outputs[n:], strict=True):
            place = self._step_of(stacked, y, t)
            if y.id in self._places:
                copies.append(self._copy(place, self.place(y), y))
            else:
                self._places[y.id] = place
        outside, self.lines = (
            self.lines,
            ["ctx->turns -= ctx != shared;  // items of a part are not walked back and forth"] if self.apart else [],
        )
        self.depth += 1
        self._run(region)
        self.depth -= 1
        body, self.lines = self.lines, outside
        going = node.attrs.get("going")
        on = "" if going is None else f" && *(const unsigned char *)({self.place(states[going])})"
        return [
            *declared,
            *(self._copy(self.place(s), self._from_row(self.place(x), s), s) for s, x in zip(states, operands[:n], strict=True)),
            f"for (i64 {t} = {begin}; {t} < {spelling.index(node.attrs['trip'], self._names)} && !{ends}{on}; {t}++) {{",
            *indent(body), *indent(copies), *indent(moves), "}",
            *(self._copy(self._from_row(self.place(f), s), self.place(s), s) for f, s in zip(node.outputs[:n], states, strict=True)),
        ]  # fmt: skip

    def _step_of(self, stacked: Value, slice_: Value, t: str) -> str:
        """Where the slice of step `t` is in a stacked tensor."""
        nbytes = spelling.index(substitute(slice_.t.nbytes, self._all_rows), self._names)
        return self._from_row(f"(char *)({self.place(stacked)}) + {t} * {nbytes}", slice_)

    def _from_row(self, place: str, value: Value) -> str:
        """The place of a part's first row in a value that begins there; of a value without rows, the place itself."""
        if self.apart is None or not value.rank or value.shape[0] != ROWS:
            return place
        return f"{place} + row * {spelling.index(substitute(value.t.nbytes, {ROWS_SYMBOL: 1}), self._names)}"

    def _turns(self, states: Sequence[Value], after: Sequence[Value]) -> tuple[list[str], list[str]]:
        """Declarations of variables, in which the buffers of states are from now on, and statements that give each state
        what became of it.
        """
        declared, turns, copied = list[str](), list[str](), list[tuple[Value, Value]]()
        uses = Counter(v.id for v in (*states, *after))
        for k, (s, a) in enumerate(zip(states, after, strict=True)):
            small = isinstance(s.t.nbytes, int) and s.t.nbytes <= COPIED
            if small or uses[a.id] > 1 or not all(self.place(v).startswith("arena") for v in (s, a)):
                copied.append((s, a))
                continue
            one, other = f"u{self.depth}_{k}", f"v{self.depth}_{k}"
            declared.append(f"char *{one} = {self.place(s)}, *{other} = {self.place(a)};")
            turns.append(f"{{ char *const next = {other}; {other} = {one}; {one} = next; }}")
            self._places |= {s.id: one, a.id: other}
        return declared, [*(self._copy(self.place(s), self.place(a), s) for s, a in copied), *turns]

    @property
    def _all_rows(self) -> dict[Symbol, Dim]:
        return {} if self.apart is None else {ROWS_SYMBOL: self.apart.rows}

    @property
    def _names(self) -> dict[Symbol, str]:
        return {Symbol(s): s for s in self.sizes}

    def _bytes(self, value: Value) -> str:
        return spelling.index(value.t.nbytes, self._names)

    def _copy(self, to: str, source: str, value: Value) -> str:
        return f"__builtin_memcpy((void *)({to}), (const void *)({source}), {self._bytes(value)});"

    def _call(self, kernel: KernelSource, group: Group) -> None:
        number = len(self.calls)
        if any(v.id in self.updates and v.id in self.plan.layout.overwrites for v in group.stored()):
            self._overwriting.append(number)
        name = self.functions.setdefault(self._function(kernel), f"k{len(self.functions)}")
        self.includes |= kernel.includes
        self.scratch.add(kernel.scratch)
        self.units |= dict([kernel.unit] if kernel.unit else [])
        sizes = " ".join(self._sizes(kernel, "\n".join(kernel.before)))
        kernel.before = [line.replace("@SIZES@", sizes) for line in kernel.before]
        pointers = [self.place(v) for v in kernel.buffers]
        steps = [f" + row * {kernel.by_row[k]}" if k in kernel.by_row else "" for k in range(len(kernel.weights))]
        pointers += [f"weights + {at}{step}" for (_, at), step in zip(kernel.weights, steps, strict=True)]
        comment = ", ".join(f"n{s.number} {''.join(c for c in s.op_type if c.isalnum())}" for s in group.origin[:12])
        self.lines += [
            f"{{ // {number}: {comment}",
            f"  void *const p[] = {{{', '.join(f'(void *)({x})' for x in pointers) or '0'}}};",
            f"  ox_call c = {{ctx, p, {'s' if self.apart is None else 'sizes'}, scratch}};",
            *indent(kernel.before), f"  {_region(kernel, name)}", f"  ox_lap(ctx, {number});",
            *([f"  if (ox_failed(ctx)) {{ ctx->error.node = {number}; {self._leave} }}"] if _can_fail(kernel) else []), "}",
        ]  # fmt: skip
        packed = sum(self.weights.sizes().get(at, 0) for _, at in kernel.weights)
        call = kernel_call(
            self.plan, group, name, kernel.kind, kernel.buffers, packed, self.turns, kernel.choice, self._all_rows
        )
        self.calls.append(call)

    @property
    def _leave(self) -> str:
        """After a failure: what ends the run, or a part of a loop."""
        if self.apart is None:
            return "return ctx->error.code;"
        return "if (ctx != shared) ctx->api->fail(shared, ctx->error.code, ctx->error.node, ctx->error.value); return;"

    def _function(self, kernel: KernelSource) -> str:
        lines = ["(void *arg, i64 first, i64 last, int worker) {",
                 "  const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx; (void)ctx; (void)worker;"]  # fmt: skip
        for k, v in enumerate(kernel.buffers if kernel.named else ()):
            t = spelling.storage_type(v.dtype)
            lines.append(f"  {t} *const __restrict p{k} = ({t} *)a->p[{k}];")
        for k, (t, _) in enumerate(kernel.weights):
            lines.append(f"  const {t} *const w{k} = (const {t} *)a->p[{len(kernel.buffers) + k}];")
        return "\n".join([*lines, *indent(self._sizes(kernel, kernel.text)), kernel.text, "}"])

    def _sizes(self, kernel: KernelSource, text: str) -> list[str]:
        """Definitions of the sizes that a function of a kernel names, from its argument `a`."""
        derived = spelling.derived_in(text)
        used = {*kernel.symbols, *(s for _, value in derived for s in re.findall(r"\bs\d+\b", value))}
        loads = [f"const i64 {s} = a->s[{self.sizes.index(s)}];" for s in sorted(used)]
        return [*loads, *(f"const i64 {name} = {value};" for name, value in derived)]

    def _sources(self, kernels: dict[str, str]) -> list[str]:
        """Translation units that can be compiled side by side; the last has the entry."""
        found, entry = shared(kernels), self._entry()
        *others, own = _balanced(found, sum(map(len, entry)) // KERNEL_COSTS)
        units = [[*found.defined_for(part), *(f"void {name}{found.kernels[name]}" for name in part)] for part in others]
        last = [f"void {name}(void *arg, i64 first, i64 last, int worker);" for part in others for name in part]
        last += [*found.defined_for(own), *(f"static void {name}{found.kernels[name]}" for name in own)]
        return ["\n".join([*self._head(lines), *lines, ""]) for lines in (*units, [*last, *entry])]

    def _head(self, lines: list[str]) -> list[str]:
        return [f'#include "{name}"' for name in sorted({"program.h"} | self.includes | headers_of("\n".join(lines)))]

    def _entry(self) -> list[str]:
        arena = str(self.arena_bytes) if self.offsets is not None else f"s[{len(self.symbols)}]"
        loads = [f"const i64 {s} = s[{k}]; (void){s};" for k, s in enumerate(self.symbols)]
        body = [*(f"scratch_bytes = ox_max(scratch_bytes, {x});" for x in sorted(self.scratch)),
                "char *const arena = ctx->api->arena(ctx, arena_bytes + scratch_bytes); if (!arena) return ctx->error.code;",
                "char *const scratch = arena + arena_bytes; (void)scratch;", "ox_lap(ctx, -1);", *self.lines]  # fmt: skip
        derived = _derived(body, ROWS_SYMBOL, False)
        if any("&alone" in x for x in self.scratch):
            derived.append("const ox_ctx alone = ox_alone(ctx);")
        return [f"OX_EXPORT int {ENTRY}(ox_ctx *ctx, void *const *buf, const ox_i64 *s) {{",
                "  const char *const weights = (const char *)ctx->user[0]; (void)weights; (void)buf; (void)s;",
                *indent(loads), *indent(derived), f"  const i64 arena_bytes = {arena}; i64 scratch_bytes = 0;",
                *indent(body), "  return ox_failed(ctx);", "}", ""]  # fmt: skip


def _derived(lines: list[str], of: Symbol, with_it: bool) -> list[str]:
    """Definitions of the derived sizes in these lines that depend on a symbol, or of those that do not."""
    found = spelling.derived_in("\n".join(lines))
    return [f"const i64 {name} = {value};" for name, value in found if spelling.derives_from(name, of) is with_it]


def _parts(step: str) -> str:
    """How many parts of a loop's rows there are; 0 for none. The loop is told by the fields of `ox_step`."""
    return f"ox_parts(ox_step{{{step}}}, ctx->threads)"


def _of_rows(rows: str, items: Sequence[str], ctx: str) -> str:
    """The greatest of several sizes, which are of so many rows and of the threads of a context."""
    lines = [*_derived(list(items), ROWS_SYMBOL, True), "i64 most = 0;", *(f"most = ox_max(most, {x});" for x in items)]
    given = f"const i64 {ROWS_SYMBOL.key}, const ox_ctx *const ctx"
    return f"[&]({given}) {{ (void){ROWS_SYMBOL.key}; (void)ctx; {' '.join(lines)} return most; }}({rows}, {ctx})"


# Seconds of compile time, roughly: for each character of a kernel, and for the first use of a template's header.
UNIT_CHARACTERS = 12_000  # kernels of less text than this are not worth a second compiler
MAX_UNITS = 2
KERNEL_COSTS = 5  # a kernel's character takes as long as so many of the entry


def _balanced(found: Shared, entry: int) -> list[list[str]]:
    """The kernels' names in groups of about equal text, of which the last is compiled with the entry; those that share
    something are together, if they are no half.
    """
    size = {name: len(body) for name, body in found.kernels.items()}
    total = sum(size.values())
    units = max(1, min(MAX_UNITS, total // UNIT_CHARACTERS, len(size)))
    alike: dict[object, list[str]] = {}
    for name in size:
        alike.setdefault(found.uses[name] or name, []).append(name)
    together = [names for names in alike.values() if sum(size[n] for n in names) * units <= total]
    apart = [[name] for names in alike.values() if names not in together for name in names]
    parts: list[list[str]] = [[] for _ in range(units)]
    sizes = [*[0] * (units - 1), entry]
    for names in sorted([*together, *apart], key=lambda names: -sum(size[n] for n in names)):
        k = sizes.index(min(sizes))
        parts[k] += names
        sizes[k] += sum(size[n] for n in names)
    return parts


def _region(kernel: KernelSource, name: str) -> str:
    """The call of a kernel's function for all of its items."""
    if kernel.few == "0":
        return f"ox_for(ctx, {kernel.items}, {name}, &c);"
    return f"ox_for_few(ctx, {kernel.items}, {name}, &c, {kernel.few});"


def _can_fail(kernel: KernelSource) -> bool:
    """True where a kernel may report an error: the run then ends after it, and the error names the kernel."""
    return any(
        word in kernel.text
        for word in (
            "ox_index(",
            "ox_indices",
            "ox_idiv",
            "ox_imod",
            "->fail(",
            "routines::scatter<",
            "routines::place(",
        )
    )
