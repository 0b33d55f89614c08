"""The template kernel of attention: how it is called, and what becomes of its scores."""

from __future__ import annotations

import numpy as np

from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.spelling import literal, storage_type
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, coefficient, prod
from onnxc.ir.graph import Value
from onnxc.planner.templates import AttentionAccess, Matrix, attention_access
from onnxc.primitives.attention import fill_of, score_steps

F32 = np.dtype(np.float32)
# What becomes of scores `s` (`score_steps`).
STEPS = {
    "scale": "s * {number}", "tanh": "v_tanh(s)", "max": "v_max(s, {number})", "add": "s + {mask}",
    "sub": "s - {mask}",
    "fill": "sel<f32>(conv<i32, u8>({mask}) != 0, {number}, s)",
    "keep": "sel<f32>(conv<i32, u8>({mask}) != 0, s, {number})",
}  # fmt: skip


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
                "for (i64 t = first; t < last; t++) {", *indent(decode),
                # Made anew in each turn: so a compiler sees its numbers, and compiles one of the two ways alone.
                f"  attn::Shape z; z.sq = {sq}; z.sk = {sk}; z.d = {d}; z.dv = {dv}; z.scale = {float(node.attrs['scale']).hex()}f;",
                f"  const i64 r0 = t % parts * each, r1 = ox_min(r0 + each, {sq});", *indent(score),
                "  const auto out = [=](i64 m, i64 n, vf acc, auto lanes) OX_LAMBDA { (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  attn::attention<{guard}>(z, {q}, {k}, {v}, r0, r1, scratch, score, out);", "}"]  # fmt: skip
        return self.source(body, "heads * parts", "attention.h", f"ctx->threads * ({bytes_each})", parts, "attention")

    def _operand(self, x: Matrix, names: dict[Symbol, str]) -> str:
        return f"{{{self.pointer(x.value)} + {self.index(x.base, names)}, {self.size(x.row)}, {self.size(x.col)}}}"

    def _score(self, access: AttentionAccess, names: dict[Symbol, str], key: Symbol) -> list[str]:
        """The function that makes what the softmax is taken of of products."""
        assert self.group.node is not None
        attrs = self.group.node.attrs
        before: list[str] = []
        lines: list[str] = []
        for name, mask, number in score_steps(attrs, access.masks):
            given = "" if number is None else literal(fill_of(number, F32).tobytes(), dtypes.float32)
            load = "" if mask is None else self._mask(mask, names, key, f"by{len(before)}", before)
            lines.append(f"s = {STEPS[name].format(mask=load, number=given)};")
        if not lines:
            return ["const attn::Plain score{};"]
        head = "const auto score = [=](i64 m, i64 k, vf s, auto lanes) OX_LAMBDA -> vf { (void)m; (void)k; (void)lanes;"
        return [*before, head, *indent([*lines, "return s;"]), "};"]

    def _mask(self, mask: tuple[Value, Dim], names: dict[Symbol, str], key: Symbol, by: str, before: list[str]) -> str:
        """A mask's elements for consecutive keys. `before` gets a statement: how far apart they are, as `by`."""
        value, address = mask
        stride = coefficient(address, key)
        assert stride is not None
        at = f"{self.pointer(value)} + {self.index(address, names)}"
        before.append(f"const i64 {by} = {self.index(stride, names)}; (void){by};")
        whole, apart = f"ldl({at}, lanes)", f"lds({at}, {by}, (int)lanes)"
        single = f"bc<{storage_type(value.dtype)}>(*({at}))"
        if not isinstance(stride, int):  # it may be 1 or 0 all the same
            return f"({by} == 1 ? {whole} : {by} == 0 ? {single} : {apart})"
        return whole if stride == 1 else single if stride == 0 else apart
