"""Template kernels: matmul, convolution, attention, each with its epilogue inlined."""

from __future__ import annotations

import numpy as np

from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.convolution import ConvChainEmitter, ConvEmitter
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.integer import IntegerConvEmitter, IntegerMatmulEmitter
from onnxc.codegen.cpp.weight_only import QuantizedMatmulEmitter
from onnxc.codegen.cpp.weights import WeightStore
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import Symbol, always_equal, coefficient, prod, symbols
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import AttentionAccess, MatmulAccess, Matrix, attention_access, matmul_access
from onnxc.primitives.builder import constant_of

PANEL = {16: 32, 8: 16, 4: 8}  # MM_NR of matmul.h by vector length
MATRICES = 2  # whose lines the matmul template fetches early
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


class MatmulEmitter(TemplateEmitter):
    """C[M, N] = A[M, K] B[K, N] over batch loops; B packed at compile time where it is constant."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        access = matmul_access(self.layout, node)
        assert access is not None, "the planner checked the operands"
        m, n, k = (self.size(d) for d in access.sizes)
        names: dict[Symbol, str] = {}
        decode = self.loops(access.batch, "(t / g.tasks)", names)
        names |= {next(iter(access.m.symbols())): "m", next(iter(access.n.symbols())): "n"}
        a = self._left(access, names)
        short = a.startswith("MmRows") and isinstance(access.sizes[2], int) and access.sizes[2] <= SHORT
        b, before, workspace = self._right(access, names, always_equal(access.b.col, 1) and not short)
        end = Epilogue(self.group, self.layout, self.lanes, access.index, names, access.n, self.buffers)
        epilogue = self.epilogue(end)
        batch = self.size(prod(d for _, d in access.batch))
        least = "" if short or a.startswith("MmRows") else ", 16"
        grid = f"const MmGrid g = {'mm_short_grid' if short else 'mm_grid'}({m}, {n}, {k}, ctx->threads{least});"
        task = f"mm_task(g, t % g.tasks, {a}, {b}, {m}, {n}, {k}, scratch, epi{self._out(end, access, names)});"
        if short:
            task = f"(void)scratch; mm_short(g, t % g.tasks, {a}, {b}.packed, {m}, {n}, {k}, epi);"
        body = [grid, "f32 *const scratch = (f32 *)(a->scratch + worker * (MM_SCRATCH * 4));",
                "for (i64 t = first; t < last; t++) {", *indent(decode),
                "  const auto epi = [=](i64 m, i64 n, vf acc, auto lanes) OX_LAMBDA { (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  {task}", "}"]  # fmt: skip
        scratch = f"ctx->threads * (MM_SCRATCH * 4) + {workspace}"
        return self.source(body, f"g.tasks * {batch}", "matmul.h", scratch, [grid, *before], "matmul")

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
            return f"MmRows<f32>{{{at}, {self.size(a.row)}}}"
        return f"MmStrided<f32>{{{at}, {self.size(a.row)}, {self.size(a.col)}}}"

    def _right(self, access: MatmulAccess, names: dict[Symbol, str], in_place: bool) -> tuple[str, list[str], str]:
        """The packed B: its address, statements that pack it at run time, and the workspace for that."""
        b, (_, n, k) = access.b, access.sizes
        constant = constant_of(b.value)
        if constant is not None and isinstance(b.base, int) and isinstance(n, int) and isinstance(k, int):
            panel = PANEL[self.lanes]
            offset = self.weights.add_packed(
                ("matmul", b.value.id, b.base, b.row, b.col, panel), packed_columns(n, panel) * k * 4,
                lambda out: pack_panels(_matrix_of(constant, b, k, n), panel, out),
            )  # fmt: skip
            self.packed.append(("f32", offset))
            return f"MmRight<f32>(w{len(self.packed) - 1})", [], "0"
        return self._pack_at_run_time(access, names, in_place)

    def _pack_at_run_time(
        self, access: MatmulAccess, names: dict[Symbol, str], in_place: bool
    ) -> tuple[str, list[str], str]:
        b, (m, n, k) = access.b, access.sizes
        first = f"mm_packs({self.size(m)}, {self.size(n)}, {str(in_place).lower()})"
        loops = [(s, d) for s, d in access.batch if s in symbols(b.base)]
        count = self.size(prod(d for _, d in loops))
        each = f"mm_packed({self.size(k)}, {self.size(n)})"
        mine: dict[Symbol, str] = {}
        decode = self.loops(loops, "(t / panels)", mine)
        position = "0"
        for s, d in loops:
            position = f"({position} * {self.size(d)} + {names[s]})"
        place = "(f32 *)(a->scratch + ctx->threads * (MM_SCRATCH * 4))"
        pointer = self.pointer(b.value)
        pack = ["const auto pack = [](void *arg, i64 first, i64 last, int) {",
                "  const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx;",
                f"  const f32 *const src = (const f32 *)a->p[{pointer[1:]}]; @SIZES@",
                f"  const i64 skip = {first}, panels = mm_panels({self.size(n)}) - skip;",
                "  for (i64 t = first; t < last; t++) {", *indent(decode, 2),
                f"    mm_pack_b(src + {self.index(b.base, mine)}, {self.size(b.row)}, {self.size(b.col)}, {self.size(k)}, {self.size(n)}, "
                f"{place} + t / panels * {each}, skip + t % panels, skip + t % panels + 1);", "  }", "};",
                f"ox_for(ctx, {count} * (mm_panels({self.size(n)}) - {first}), pack, &c);"]  # fmt: skip
        packed = f"{place} + {position} * {each}"
        rows = f"{pointer} + {self.index(b.base, names)}, {self.size(b.row)}" if in_place else "nullptr, 0"
        return f"MmRight<f32>({packed}, {rows})", pack, f"{count} * {each} * 4"


def _matrix_of(constant: np.ndarray, b: Matrix, k: int, n: int) -> np.ndarray:
    """The K x N matrix that a view of a constant is."""
    flat = np.ascontiguousarray(constant).reshape(-1)
    assert isinstance(b.base, int) and isinstance(b.row, int) and isinstance(b.col, int)
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[b.base :], (k, n), (b.row * item, b.col * item), writeable=False)


class AttentionEmitter(TemplateEmitter):
    """softmax(scale * Q K^T + bias) V, one head at a time, with no score matrix in memory."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        access = attention_access(self.layout, node)
        assert access is not None, "the planner checked the operands"
        sq, sk, d, dv = (self.size(x) for x in access.sizes)
        names: dict[Symbol, str] = {}
        decode = self.loops(access.batch, "(t / parts)", names)
        row, key, column = (next(iter(x.symbols())) for x in (access.row, access.key, access.column))
        q, k, v = (self._operand(x, names) for x in (access.q, access.k, access.v))
        score = self._score(access, {**names, row: "m", key: "k"}, key)
        epilogue = self.epilogue(
            Epilogue(
                self.group,
                self.layout,
                self.lanes,
                access.index,
                {**names, row: "m", column: "n"},
                access.column,
                self.buffers,
            )
        )
        heads = self.size(prod(x for _, x in access.batch))
        parts = [
            f"const i64 heads = {heads}, each = attn::rows_per_item({sq}, heads, ctx->threads), parts = ox_up({sq}, each);"
        ]
        guard = "true" if node.attrs["guard"] else "false"
        bytes_each = f"ox_up(attn::scratch_floats({d}, {dv}) * 4, 64) * 64"
        body = [*parts, f"f32 *const scratch = (f32 *)(a->scratch + worker * ({bytes_each}));",
                f"attn::Shape z; z.sq = {sq}; z.sk = {sk}; z.d = {d}; z.dv = {dv}; z.scale = {float(node.attrs['scale']).hex()}f;",
                "for (i64 t = first; t < last; t++) {", *indent(decode),
                f"  const i64 r0 = t % parts * each, r1 = ox_min(r0 + each, {sq});", *indent(score),
                "  const auto out = [=](i64 m, i64 n, vf acc, auto lanes) OX_LAMBDA { (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  attn::attention<{guard}>(z, {q}, {k}, {v}, r0, r1, scratch, score, out);", "}"]  # fmt: skip
        return self.source(body, "heads * parts", "attention.h", f"ctx->threads * ({bytes_each})", parts, "attention")

    def _operand(self, x: Matrix, names: dict[Symbol, str]) -> str:
        return f"{{{self.pointer(x.value)} + {self.index(x.base, names)}, {self.size(x.row)}, {self.size(x.col)}}}"

    def _score(self, access: AttentionAccess, names: dict[Symbol, str], key: Symbol) -> list[str]:
        if access.bias is None:
            return ["const attn::Plain score{};"]
        value, address = access.bias
        stride = coefficient(address, key)
        assert stride is not None
        at = f"{self.pointer(value)} + {self.index(address, names)}"
        load = (
            "ldl(" + at + ", lanes)"
            if stride == 1
            else f"bc<f32>(*({at}))"
            if stride == 0
            else f"lds({at}, {self.index(stride, names)}, (int)lanes)"
        )
        return [
            f"const auto score = [=](i64 m, i64 k, vf s, auto lanes) OX_LAMBDA -> vf {{ (void)m; (void)k; return s + {load}; }};"
        ]


_EMITTERS: dict[
    str,
    type[MatmulEmitter]
    | type[QuantizedMatmulEmitter]
    | type[AttentionEmitter]
    | type[ConvEmitter]
    | type[IntegerMatmulEmitter]
    | type[IntegerConvEmitter],
] = {
    "matmul": MatmulEmitter, "matmul_quantized": QuantizedMatmulEmitter, "attention": AttentionEmitter, "conv": ConvEmitter,
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
