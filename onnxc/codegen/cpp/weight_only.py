"""Products with weights that stay packed (wq.h): which kernel runs, and how codes, scales and zero points lie."""

from __future__ import annotations

import numpy as np

from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, prod
from onnxc.ir.graph import Value
from onnxc.planner.templates import MatmulAccess, matmul_access
from onnxc.primitives.builder import constant_of

VECTORS = 4  # WQ_NV of wq.h: vectors of a panel
UNIT_BYTES = 4  # of a column
FEW_ROWS = 8  # WQ_FEW_ROWS


def steps_of_a_unit(bits: int) -> int:
    """Steps of K whose codes share the bytes of a unit."""
    return 8 * UNIT_BYTES // bits


def packed_bytes(k: int, n: int, bits: int, block: int, panel: int) -> int:
    """Bytes of the packed codes of a [K, N] matrix."""
    return -(-n // panel) * -(-k // block) * -(-block // steps_of_a_unit(bits)) * UNIT_BYTES * panel


def pack_codes(codes: np.ndarray, bits: int, block: int, panel: int, out: np.ndarray) -> None:
    """Writes int8 codes (or float16 and bfloat16 numbers) [K, N] into zeroed bytes as wq.h reads them.

    [panels][blocks][units][bytes of a unit]: whole bytes of a unit lie by steps, then columns; smaller codes share a
    word of each column, the first step lowest.
    """
    k, n = codes.shape
    steps = steps_of_a_unit(bits)
    units = -(-block // steps)
    for p, start in enumerate(range(0, n, panel)):
        part = codes[:, start : start + panel]
        padded = np.zeros((-(-k // block), units * steps, panel), codes.dtype)
        whole = k // block
        padded[:whole, :block, : part.shape[1]] = part[: whole * block].reshape(whole, block, -1)
        if k % block:
            padded[whole, : k % block, : part.shape[1]] = part[whole * block :]
        size = out.nbytes // -(-n // panel)
        mine = out[p * size : (p + 1) * size]
        if bits >= 8:
            mine[:] = padded.view(np.uint8).reshape(-1)
        else:
            mine[:] = _words(padded.view(np.uint8), bits, units * len(padded)).view(np.uint8).reshape(-1)


def _words(codes: np.ndarray, bits: int, units: int) -> np.ndarray:
    """[units, panel] words of the unsigned codes [units, steps, panel]."""
    each = codes.reshape(units, -1, codes.shape[-1])
    words = np.zeros((units, codes.shape[-1]), "<u4")
    for step in range(each.shape[1]):
        words |= (each[:, step].astype("<u4") & ((1 << bits) - 1)) << (step * bits)
    return words


def pack_rows(rows: np.ndarray, panel: int, out: np.ndarray) -> None:
    """Writes scales or zero points [G, N] as [panels][G][panel] into zeroed bytes."""
    g, n = rows.shape
    packed = out.view(rows.dtype).reshape(-1, g, panel)
    for p, start in enumerate(range(0, n, panel)):
        part = rows[:, start : start + panel]
        packed[p, :, : part.shape[1]] = part


def zero_type(zeros: np.ndarray | None) -> tuple[str, np.ndarray | None]:
    """How wq.h reads these zero points, and the array that it reads."""
    if zeros is None or not zeros.any():
        return "WqNone", None
    small = np.abs(zeros).max() <= 127 and not (zeros % 1).any()
    return ("WqByte", zeros.astype(np.int8)) if small else ("WqFloat", zeros)


class QuantizedMatmulEmitter(TemplateEmitter):
    """C[M, N] = A[M, K] ((q - zero) * scale)[K, N], the weights constant."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        access = matmul_access(self.layout, node)
        assert access is not None, "the planner checked the operands"
        m = self.size(access.sizes[0])
        names: dict[Symbol, str] = {}
        decode = self.loops(access.batch, "(t / g.tasks)", names)
        names |= {next(iter(access.m.symbols())): "m", next(iter(access.n.symbols())): "n"}
        a, contiguous = self._left(access, names)
        codes, zeros, matrix = self._weights(node.operands[1:], node.attrs["bits"], node.attrs["block"])
        epilogue = self.epilogue(
            Epilogue(self.group, self.layout, self.lanes, access.index, names, access.n, self.buffers)
        )
        k, n, block = (self.size(d) for d in (access.sizes[2], access.sizes[1], node.attrs["block"]))
        sizes = f"const WqMat w{{nullptr, nullptr, nullptr, {n}, {k}, {block}}};"
        grid = f"const WqGrid g = wq_grid({m}, w, ctx->threads);"
        body = [sizes.replace("nullptr, nullptr, nullptr", matrix), grid,
                "f32 *const scratch = (f32 *)(a->scratch + worker * (WQ_SCRATCH * 4));",
                "for (i64 t = first; t < last; t++) {", *indent(decode),
                "  const auto epi = [=](i64 m, i64 n, vf acc, auto lanes) OX_LAMBDA { (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  wq_task<{codes}, {zeros}, {_kind(access.sizes[0], contiguous)}>(g, t % g.tasks, {a}, w, {m}, scratch, epi);", "}"]  # fmt: skip
        scratch = "ctx->threads * (WQ_SCRATCH * 4)"
        items = f"g.tasks * {self.size(prod(d for _, d in access.batch))}"
        return self.source(body, items, "wq.h", scratch, [sizes, grid], "matmul_quantized")

    def _left(self, access: MatmulAccess, names: dict[Symbol, str]) -> tuple[str, bool]:
        a = access.a
        at = f"{self.pointer(a.value)} + {self.index(a.base, names)}"
        if a.col == 1 or access.sizes[2] == 1:
            return f"WqRows{{{at}, {self.size(a.row)}}}", True
        return f"WqStrided{{{at}, {self.size(a.row)}, {self.size(a.col)}}}", False

    def _weights(self, operands: tuple[Value, ...], bits: int, block: int) -> tuple[str, str, str]:
        """Types of codes and zero points, and the addresses of codes, scales and zero points."""
        q, scale, *zero = (constant_of(v) for v in operands)
        assert q is not None and scale is not None
        panel = VECTORS * self.lanes
        k, n = q.shape
        codes, scales = q, scale
        key = ("weight-only", *(v.id for v in operands), bits, block, panel)
        self._add((*key, "codes"), "u8", packed_bytes(k, n, bits, block, panel),
                  lambda out: pack_codes(codes, bits, block, panel, out))  # fmt: skip
        self._add_rows((*key, "scales"), "f32", scales, panel)
        kind, zeros = zero_type(zero[0] if zero else None)
        if zeros is not None:
            self._add_rows((*key, "zeros"), "f32" if kind == "WqFloat" else "i8", zeros, panel)
        matrix = f"w0, w1, {'nullptr' if zeros is None else 'w2'}"
        return _codes(operands[0].dtype, bits), kind, matrix

    def _add_rows(self, key: object, element: str, rows: np.ndarray, panel: int) -> None:
        g, n = rows.shape
        nbytes = -(-n // panel) * panel * g * rows.itemsize
        self._add(key, element, nbytes, lambda out: pack_rows(rows, panel, out))

    def _add(self, key: object, element: str, nbytes: int, write: object) -> None:
        self.packed.append((element, self.weights.add_packed(key, nbytes, write)))  # type: ignore[arg-type]


def _codes(dtype: dtypes.DType, bits: int) -> str:
    return {dtypes.float16: "WqHalf", dtypes.bfloat16: "WqBf16"}.get(dtype, f"WqInt<{bits}>")


def _kind(rows: Dim, contiguous: bool) -> str:
    """What the kernel's code is for, as far as it is known now."""
    if not contiguous or (isinstance(rows, int) and rows > FEW_ROWS):
        return "WQ_MANY"
    return "WQ_FEW" if isinstance(rows, int) else "WQ_ANY"
