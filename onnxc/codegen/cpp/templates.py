"""Template kernels, each with its epilogue inlined: which group has which, and that of matmul."""

from __future__ import annotations

import numpy as np

from onnxc.codegen.cpp import spelling, strassen
from onnxc.codegen.cpp.attention import AttentionEmitter
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.conv_gradient import ConvWeightsEmitter
from onnxc.codegen.cpp.convolution import ConvChainEmitter, ConvEmitter
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.integer import IntegerConvEmitter, IntegerMatmulEmitter
from onnxc.codegen.cpp.weight_only import QuantizedMatmulEmitter
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.weights import WeightStore
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import Dim, Symbol, always_equal, prod, substitute, symbols
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.rows import ROWS
from onnxc.planner.templates import MatmulAccess, Matrix, matmul_access
from onnxc.primitives.builder import constant_of

PANEL = {16: 32, 8: 16, 4: 8}  # MM_NR of matmul.h by vector length
MATRICES = 3  # MM_LINES of matmul.h: whose lines the matmul template fetches early
PACKED_GROWTH = 2  # matrices of a batch are packed at compile time if that takes so many times their bytes
MOST_MATRICES = 4096  # of such a batch
FEW = 24  # MM_FEW of matmul.h, at most
FEW_DOTS, MOST_DOTS = 4, 8  # rows of A that take columns of B as they lie: of sums of any length, at most
DOT = 48  # terms of a sum for each of them: shorter ones are added up across lanes too often
LOOSE_ROWS = 1024  # most rows of A for which each thread packs the panels of B that it needs, when it needs them
LOOSE_BYTES = 1 << 20  # of panels that are packed at a time: they should stay in a cache of the second level
BLOCK = 144  # MM_MC of matmul.h: most rows of A that read a panel once
LOOSE_ONCE = 1 << 16  # bytes of such panels: they leave the cache to A and to what is packed
SHORT = 32  # MM_SHORT of matmul.h: up to so many terms, a sum has a plain loop of its own


def packed_columns(n: int, panel: int) -> int:
    """Columns of a packed matrix: whole panels, and half a panel where that is enough for the rest."""
    return -(-n // (panel // 2)) * (panel // 2)


def pack_panels(matrix: np.ndarray, panel: int, out: np.ndarray) -> None:
    """Writes [K, N] as [ceil(N / panel)][K][panel], the last panel maybe half as wide, zero padded, into zeroed bytes."""
    k, n = matrix.shape
    flat, whole = out.view(matrix.dtype), n // panel
    panels, rest = flat[: whole * panel * k].reshape(whole, k, panel), flat[whole * panel * k :]
    panels[...] = matrix[:, : whole * panel].reshape(k, whole, panel).transpose(1, 0, 2)
    if n % panel and k:
        rest.reshape(k, -1)[:, : n % panel] = matrix[:, whole * panel :]


def _are_rows(a: str) -> bool:
    """Whether A is read as it lies: its text in C++ is of rows side by side."""
    return a.startswith("MmRows")


def _is_short(access: MatmulAccess) -> bool:
    """Whether a sum has so few terms that a plain loop adds them up."""
    return isinstance(access.sizes[2], int) and access.sizes[2] <= SHORT


class MatmulEmitter(TemplateEmitter):
    """C[M, N] = A[M, K] B[K, N] over batch loops; B packed at compile time where it is constant."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        self.element = spelling.lane_type(node.output.dtype)
        self.bytes: int = node.output.dtype.itemsize
        access = matmul_access(self.layout, node)
        assert access is not None, "the planner checked the operands"
        names: dict[Symbol, str] = {}
        decode = self.loops(access.batch, "(t / g.tasks)", names)
        names |= {next(iter(access.m.symbols())): "m", next(iter(access.n.symbols())): "n"}
        a = self._left(access, names)
        return self._of_plain_rows(access, a, decode, names) or self._packed_panels(access, a, decode, names)

    def _of_plain_rows(
        self, access: MatmulAccess, a: str, decode: list[str], names: dict[Symbol, str]
    ) -> KernelSource | None:
        """A kernel that reads B as it lies, or packs it where it is needed: for rows of A that are none to be packed.
        None where none of these is faster.
        """
        if not _are_rows(a):
            return None
        if access.sizes[1] == 1 and access.b.row == 1:
            return self._column(access, a, decode, names)
        if _is_short(access):
            return None
        if _few_by_columns(access):
            return self._few(access, a, decode, names)
        panels = self._loose_panels(access)
        return self._loose(access, a, panels, decode, names) if panels else None

    def _packed_panels(self, access: MatmulAccess, a: str, decode: list[str], names: dict[Symbol, str]) -> KernelSource:
        """The kernel that reads B in packed panels."""
        m, n, k = (self.size(d) for d in access.sizes)
        short = _are_rows(a) and _is_short(access)
        b, before, workspace = self._right(access, names, always_equal(access.b.col, 1) and not short)
        end = Epilogue(self.group, self.layout, self.lanes, access.index, names, access.n, self.buffers)
        epilogue = self.epilogue(end)
        batch = self.size(prod(d for _, d in access.batch))
        long_runs = not _are_rows(a) or (access.sizes[0] == 1 and before)  # of A to pack, of B's rows to read
        divide, least = ("mm_short_grid", "") if short else ("mm_coarse_grid", ", 16") if long_runs else ("mm_grid", "")
        grid = f"const MmGrid g = {divide}({m}, {n}, {k}, ctx->threads{least}{self._work(batch)});"
        lines = self._out(end, access, names)
        halves = self._halves(access) if _are_rows(a) and not (short or before or batch != "1") else None
        if halves is not None:
            return self._strassen(access, halves, f"{a}, {b}", epilogue, lines)
        task = f"mm_task(g, t % g.tasks, {a}, {b}, {m}, {n}, {k}, scratch, epi{lines});"
        if short:
            task = f"(void)scratch; mm_short(g, t % g.tasks, {a}, {b}.packed, {m}, {n}, {k}, epi);"
        t = self.element
        body = [grid, f"{t} *const scratch = ({t} *)(a->scratch + worker * (MM_SCRATCH * {self.bytes}));",
                *self._each_item(f"g.tasks * {batch}"), *indent(decode),
                f"  const auto epi = [=](i64 m, i64 n, {self._vector} acc, auto lanes) OX_LAMBDA {{ (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  {task}", "}"]  # fmt: skip
        scratch = f"ctx->threads * (MM_SCRATCH * {self.bytes}) + {workspace}"
        return self.source(body, f"g.tasks * {batch}", "matmul.h", scratch, [grid, *before], "matmul", "mm_few(g)")

    def _each_item(self, items: str) -> list[str]:
        """The beginning of a loop over the items: in a loop of the program in turns forth and back."""
        if not self.options.often:
            return ["for (i64 t = first; t < last; t++) {"]
        return ["for (i64 item = first; item < last; item++) {",
                f"  const i64 t = mm_forth_and_back(item, {items}, ctx->threads, ctx->turns);"]  # fmt: skip

    def _halves(self, access: MatmulAccess) -> tuple[str, int] | None:
        """The constants of Strassen's algorithm, and the rows of an item; None where another one is chosen."""
        node, (m, n, k), panel = self.group.node, access.sizes, PANEL[self.lanes]
        constant = constant_of(access.b.value)
        if node is None or constant is None or self.element != "f32" or not self.options.winograd:
            return None
        if self.options.rows is not None:  # its blocks depend on how many rows a thread has
            return None
        each = strassen.rows_of_item(node)
        if not strassen.is_possible(m, n, k, each, panel) or not isinstance(access.b.base, int):
            return None
        assert isinstance(n, int) and isinstance(k, int) and isinstance(each, int)
        subject = f"matmul {m if isinstance(m, int) else '?'}x{k} to {n}" + (f", items of {each}" if each != m else "")
        self.choice = self.options.decide(subject, strassen.COSTS)
        if self.choice.chosen != strassen.STRASSEN:
            return None
        found = strassen.constants(_matrix_of(constant, access.b, access.b.base, k, n), panel)
        if found is None:
            self.choice = None
            return None

        def write(out: np.ndarray) -> None:
            out.view(np.float32)[...] = found

        key = ("strassen", access.b.value.id, access.b.base, access.b.row, access.b.col, k, n, panel)
        self.packed.append(("f32", self.weights.add_packed(key, found.nbytes, write)))
        return f"w{len(self.packed) - 1}", each

    def _strassen(
        self, access: MatmulAccess, halves: tuple[str, int], factors: str, epilogue: list[str], lines: str
    ) -> KernelSource:
        """The product by Strassen's algorithm."""
        (m, n, k), (name, each) = (self.size(d) for d in access.sizes), halves
        plan = f"const MsPlan g = ms_plan({m}, {n}, {k}, {each}, ctx->threads{self._often});"
        body = [plan, "f32 *const scratch = (f32 *)(a->scratch + worker * ms_bytes(g));",
                "const auto epi = [=](i64 m, i64 n, vf acc, auto lanes) OX_LAMBDA { (void)m; (void)n;", *indent(epilogue), "};",
                "for (i64 t = first; t < last; t++)",
                f"  ms_task(g, t, {factors}, {name}, {m}, {n}, {k}, scratch, epi{lines});"]  # fmt: skip
        scratch = f"ctx->threads * ms_bytes(ms_plan({m}, {n}, {k}, {each}, ctx->threads{self._often}))"
        before = [plan, "ms_fresh(g, scratch, ctx->threads);"]
        return self.source(body, "g.tasks", "matmul_strassen.h", scratch, before, "matmul strassen")

    @property
    def _often(self) -> str:
        return ", MM_OFTEN" if self.options.often else ""

    def _work(self, batch: str) -> str:
        """The last arguments of a grid: how much work is a task, and whether there is one product alone."""
        return self._often or (", MM_ONCE, true" if batch == "1" else "")

    @property
    def _vector(self) -> str:
        return {"f32": "vf", "f64": "vd"}[self.element]

    def _loose_panels(self, access: MatmulAccess) -> int:
        """How many panels of B a thread packs at a time, as it needs them; 0 where B is packed beforehand, or not."""
        m, n, k = access.sizes
        if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)) or m > LOOSE_ROWS:
            return 0
        # Few rows read B where it lies, if they can; if not, what several matrices of A share is packed once.
        if m <= FEW and (always_equal(access.b.col, 1) or len(_batch_of_b(access)) < len(access.batch)):
            return 0
        panel = PANEL[self.lanes]
        each = k * panel * self.bytes
        if constant_of(access.b.value) is not None or each > LOOSE_BYTES or not k:
            return 0
        most = max(1, LOOSE_ONCE // each) if m <= BLOCK else max(LOOSE_BYTES // each, -(-m // panel))
        return min(-(-n // panel), most)

    def _loose(
        self, access: MatmulAccess, a: str, panels: int, decode: list[str], names: dict[Symbol, str]
    ) -> KernelSource:
        """A product by a matrix that is computed, or that changes: packed by the tasks themselves."""
        m, n, k = (self.size(d) for d in access.sizes)
        b = f"{self.pointer(access.b.value)} + {self.index(access.b.base, names)}"
        t = self.element
        loose = f"MmLoose<{t}>{{{b}, {self.size(access.b.row)}, {self.size(access.b.col)}}}"
        end = Epilogue(self.group, self.layout, self.lanes, access.index, names, access.n, self.buffers)
        epilogue = self.epilogue(end)
        batch = self.size(prod(d for _, d in access.batch))
        grid = f"const MmGrid g = mm_loose_grid({m}, {n}, {k}, ctx->threads{self._work(batch)});"
        room = self.size(panels * PANEL[self.lanes] * access.sizes[2])
        body = [grid, f"{t} *const scratch = ({t} *)(a->scratch + worker * ((MM_SCRATCH + {room}) * {self.bytes}));",
                "for (i64 t = first; t < last; t++) {", *indent(decode),
                f"  const auto epi = [=](i64 m, i64 n, {self._vector} acc, auto lanes) OX_LAMBDA {{ (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  mm_loose_task(g, t % g.tasks, {a}, {loose}, {m}, {n}, {k}, {panels}, scratch + MM_SCRATCH, scratch, epi"
                f"{self._out(end, access, names)});", "}"]  # fmt: skip
        scratch = f"ctx->threads * ((MM_SCRATCH + {room}) * {self.bytes})"
        return self.source(body, f"g.tasks * {batch}", "matmul.h", scratch, [grid], "matmul", "mm_few(g)")

    def _column(self, access: MatmulAccess, a: str, decode: list[str], names: dict[Symbol, str]) -> KernelSource:
        """A matrix times a vector."""
        m, k = self.size(access.sizes[0]), self.size(access.sizes[2])
        vector = f"{self.pointer(access.b.value)} + {self.index(access.b.base, names)}"
        task = f"mv_task<{self.element}>(t % parts, parts, {a}, {vector}, {m}, {k}, epi);"
        return self._in_parts(access, f"mv_parts({m}, {k}, ctx->threads)", task, decode, names)

    def _few(self, access: MatmulAccess, a: str, decode: list[str], names: dict[Symbol, str]) -> KernelSource:
        """Few rows times a matrix whose columns are contiguous."""
        m, n, k = (self.size(d) for d in access.sizes)
        b = f"{self.pointer(access.b.value)} + {self.index(access.b.base, names)}"
        columns = f"MvColumns<{self.element}>{{{b}, {self.size(access.b.col)}}}"
        task = f"mv_few_task(t % parts, parts, {a}, {columns}, {m}, {n}, {k}, epi);"
        return self._in_parts(access, f"mv_few_parts({m}, {n}, {k}, ctx->threads)", task, decode, names)

    def _in_parts(
        self, access: MatmulAccess, count: str, task: str, decode: list[str], names: dict[Symbol, str]
    ) -> KernelSource:
        """A product of `matvec.h`, which takes its matrices as they lie: so many tasks for each of the batch."""
        end = Epilogue(self.group, self.layout, self.lanes, access.index, names, access.n, self.buffers)
        parts = f"const i64 parts = {count};"
        body = [parts, "for (i64 t = first; t < last; t++) {", *indent([x.replace("g.tasks", "parts") for x in decode]),
                f"  const auto epi = [=](i64 m, i64 n, {self._vector} acc, auto lanes) OX_LAMBDA {{ (void)m; (void)n;", *indent(self.epilogue(end), 2), "  };",
                f"  {task}", "}"]  # fmt: skip
        batch = self.size(prod(d for _, d in access.batch))
        return self.source(body, f"parts * {batch}", "matvec.h", "0", [parts], "matmul")

    def _out(self, end: Epilogue, access: MatmulAccess, names: dict[Symbol, str]) -> str:
        """The rows that the epilogue writes and reads, for the template to fetch their lines in time."""
        text = ""
        for value, base, apart in end.matrices(next(iter(access.m.symbols())))[:MATRICES]:
            at = f"{self.pointer(value)} + {self.index(base, names)}"
            text += f", MmLines{{{at}, {self.index(apart, names)} * {value.dtype.itemsize}, {value.dtype.itemsize}}}"
        return text

    def _left(self, access: MatmulAccess, names: dict[Symbol, str]) -> str:
        a = access.a
        at = f"{self.pointer(a.value)} + {self.index(a.base, names)}"
        if a.col == 1 or access.sizes[2] == 1:
            return f"MmRows<{self.element}>{{{at}, {self.size(a.row)}}}"
        return f"MmStrided<{self.element}>{{{at}, {self.size(a.row)}, {self.size(a.col)}}}"

    def _right(self, access: MatmulAccess, names: dict[Symbol, str], in_place: bool) -> tuple[str, list[str], str]:
        """The packed B: its address, statements that pack it at run time, and the workspace for that."""
        b, (_, n, k) = access.b, access.sizes
        constant, bases, panel = constant_of(b.value), _bases(access, self.options.rows), PANEL[self.lanes]
        if constant is None or not isinstance(n, int) or not isinstance(k, int) or bases is None:
            return self._pack_at_run_time(access, names, in_place)
        each = packed_columns(n, panel) * k * self.bytes
        if len(bases) > 1 and len(bases) * each > PACKED_GROWTH * constant.nbytes:
            return self._pack_at_run_time(access, names, in_place)

        def write(out: np.ndarray) -> None:
            for i, base in enumerate(bases):
                pack_panels(_matrix_of(constant, b, base, k, n), panel, out[i * each : (i + 1) * each])

        key = ("matmul", b.value.id, tuple(bases), b.row, b.col, k, n, panel)
        self.packed.append((self.element, self.weights.add_packed(key, len(bases) * each, write)))
        place = f" + {self._position(access, names)} * {each // self.bytes}" if len(bases) > 1 else ""
        if access.batch and (first := access.batch[0])[1] == ROWS and first in _batch_of_b(access):
            self.by_row[len(self.packed) - 1] = len(bases) * each // constant.shape[0]
        return f"MmRight<{self.element}>(w{len(self.packed) - 1}{place})", [], "0"

    def _position(self, access: MatmulAccess, names: dict[Symbol, str]) -> str:
        """Which of the matrices that B has along the batch loops."""
        position = "0"
        for s, d in _batch_of_b(access):
            position = f"({position} * {self.size(d)} + {names[s]})"
        return position

    def _pack_at_run_time(
        self, access: MatmulAccess, names: dict[Symbol, str], in_place: bool
    ) -> tuple[str, list[str], str]:
        b, (m, n, k) = access.b, access.sizes
        first = f"mm_packs({self.size(m)}, {self.size(n)}, {self.size(k)}, {str(in_place).lower()})"
        loops = _batch_of_b(access)
        count = self.size(prod(d for _, d in loops))
        each = f"mm_packed({self.size(k)}, {self.size(n)})"
        mine: dict[Symbol, str] = {}
        decode = self.loops(loops, "(t / panels)", mine)
        t = self.element
        place = f"({t} *)(a->scratch + ctx->threads * (MM_SCRATCH * {self.bytes}))"
        pointer = self.pointer(b.value)
        pack = ["const auto pack = [](void *arg, i64 first, i64 last, int) {",
                "  const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx;",
                f"  const {t} *const src = (const {t} *)a->p[{pointer[1:]}]; @SIZES@",
                f"  const i64 skip = {first}, panels = mm_panels({self.size(n)}) - skip;",
                "  for (i64 t = first; t < last; t++) {", *indent(decode, 2),
                f"    mm_pack_b(src + {self.index(b.base, mine)}, {self.size(b.row)}, {self.size(b.col)}, {self.size(k)}, {self.size(n)}, "
                f"{place} + t / panels * {each}, skip + t % panels, skip + t % panels + 1);", "  }", "};",
                f"ox_for(ctx, {count} * (mm_panels({self.size(n)}) - {first}), pack, &c);"]  # fmt: skip
        packed = f"{place} + {self._position(access, names)} * {each}"
        rows = f"{pointer} + {self.index(b.base, names)}, {self.size(b.row)}" if in_place else "nullptr, 0"
        return f"MmRight<{t}>({packed}, {rows})", pack, f"{count} * {each} * {self.bytes}"


def _few_by_columns(access: MatmulAccess) -> bool:
    """Whether a B that nothing has packed, of contiguous columns, meets so few rows that they read it as it lies."""
    (m, _, k), b = access.sizes, access.b
    if not isinstance(m, int) or not always_equal(b.row, 1) or constant_of(b.value) is not None:
        return False
    return m <= MOST_DOTS and m <= (max(FEW_DOTS, k // DOT) if isinstance(k, int) else FEW_DOTS)


def _batch_of_b(access: MatmulAccess) -> list[tuple[Symbol, Dim]]:
    """The batch loops along which B changes."""
    return [(s, d) for s, d in access.batch if s in symbols(access.b.base)]


def _bases(access: MatmulAccess, rows: Dim | None) -> list[int] | None:
    """Where each of B's matrices begins, in the order of the batch loops; None where that is not known, or where
    there are very many. Those of all rows, where threads divide them."""
    bases: list[Dim] = [access.b.base]
    for s, extent in _batch_of_b(access):
        d = rows if extent == ROWS else extent
        if not isinstance(d, int) or len(bases) * d > MOST_MATRICES:
            return None
        bases = [substitute(base, {s: i}) for base in bases for i in range(d)]
    known = [base for base in bases if isinstance(base, int)]
    return known if len(known) == len(bases) else None


def _matrix_of(constant: np.ndarray, b: Matrix, base: int, k: int, n: int) -> np.ndarray:
    """The K x N matrix that a view of a constant is."""
    flat = np.ascontiguousarray(constant).reshape(-1)
    assert isinstance(b.row, int) and isinstance(b.col, int)
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[base:], (k, n), (b.row * item, b.col * item), writeable=False)


_EMITTERS: dict[
    str,
    type[MatmulEmitter]
    | type[QuantizedMatmulEmitter]
    | type[AttentionEmitter]
    | type[ConvEmitter]
    | type[ConvWeightsEmitter]
    | type[IntegerMatmulEmitter]
    | type[IntegerConvEmitter],
] = {
    "matmul": MatmulEmitter, "matmul_quantized": QuantizedMatmulEmitter, "attention": AttentionEmitter, "conv": ConvEmitter,
    "conv_weights": ConvWeightsEmitter,
    "wide matmul": IntegerMatmulEmitter, "wide conv": IntegerConvEmitter,
    "chained conv": ConvChainEmitter,
}  # fmt: skip


def emit_template(
    group: Group, layout: Layout, lanes: int, weights: WeightStore, options: KernelOptions
) -> KernelSource:
    """The kernel of a template group."""
    assert group.node is not None
    kind = "wide " if group.node.attrs.get("wide") else "chained " if group.chain else ""
    emitter = _EMITTERS.get(kind + group.node.op)
    if emitter is None:
        raise UnsupportedError(f"no kernel for {group.node.op}", node=", ".join(map(str, group.origin)))
    return emitter(group, layout, lanes, weights, options).emit()
