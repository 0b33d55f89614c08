"""Integer matmul and convolution kernels: 8 bit operands, exact int32 sums, weights packed for the CPU's dot products."""

from __future__ import annotations

import numpy as np

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, index, prod, symbols
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import unflatten
from onnxc.planner.templates import Image, MatmulAccess, Matrix, conv_image, matmul_access
from onnxc.primitives.builder import constant_of

WINOGRAD_TILES = 4  # fewer leave too few rows for a product with four times the weights
# The same where the direct product is one of bytes: twice as many at a time, and weights an eighth as large. From here on
# Winograd's algorithm takes 0.70 to 0.82 of the time (with VNNI; at 16 tiles 1.1 of it).
WINOGRAD_TILES_OF_BYTES = 32
MAX_ROWS = 126  # of a depthwise kernel with its dilation: twice DW_PAIRS of iconv.h, less two
MAX_COLUMNS = 1024  # likewise, and its stride: the lines in scratch are so long
MAX_STRIDE = 64


def pack_depth(matrix: np.ndarray, panel: int, depth: int) -> np.ndarray:
    """[K, N] as [ceil(N / panel)][ceil(K / depth)][panel][depth], zero padded: `igemm.h` says why."""
    k, n = matrix.shape
    rows, panels = -(-k // depth), -(-n // panel)
    full = np.zeros((rows * depth, panels * panel), np.int8 if depth == 4 else np.int16)
    full[:k, :n] = matrix
    return np.ascontiguousarray(full.reshape(rows, depth, panels, panel).transpose(2, 0, 3, 1))


def byte_shifts(matrix: np.ndarray) -> np.ndarray | None:
    """What each column of [K, N] is taken less, to fit into int8; None where the numbers of one are too far apart."""
    if matrix.dtype == np.int8 or matrix.size == 0:
        return np.zeros(matrix.shape[1], np.int64)
    low, high = matrix.min(0).astype(np.int64), matrix.max(0).astype(np.int64)
    if (high - low > 255).any():
        return None
    return np.where((low >= -128) & (high <= 127), 0, low + 128)


def offsets(matrix: np.ndarray, zero: int, panel: int) -> np.ndarray:
    """What takes the zero point of rows off sums: -zero times each column's sum, for whole panels."""
    return whole_panels(-zero * matrix.astype(np.int64).sum(0), panel)


def zero_of_bytes(dtype: DType, zero: int = 0) -> int:
    """What rows are less where quads of bytes are multiplied: int8 are read with 128 added."""
    return zero + (128 if dtype is dtypes.int8 else 0)


def whole_panels(columns: np.ndarray, panel: int) -> np.ndarray:
    """A number for each column, modulo 2^32, and zeros to the end of the last panel."""
    out = np.zeros(-(-len(columns) // panel) * panel, np.int64)
    out[: len(columns)] = columns
    return (out & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def pack_depthwise(w: np.ndarray, dilation: int, lanes: int) -> np.ndarray:
    """[CO, 1, KH, KW] as [parity][pair][kx][CO][2] of int16, the rows `dilation` apart."""
    co, _, kh, kw = w.shape
    rows = (kh - 1) * dilation + 1
    pairs, padded = rows // 2 + 1, -(-co // lanes) * lanes
    out = np.zeros((2, pairs * 2, kw, padded), np.int16)
    for parity in range(2):
        out[parity, parity : parity + rows : dilation, :, :co] = w[:, 0].transpose(1, 2, 0)
    return np.ascontiguousarray(out.reshape(2, pairs, 2, kw, padded).transpose(0, 1, 3, 4, 2))


def pack_winograd(w: np.ndarray, panel: int) -> np.ndarray:
    """[CO, CI, 3, 3] as [panel][36][CI / 2][panel][2] of int16, transformed as `iwino.h` says."""
    g = np.array([[1, 0, 0], [1, 1, 1], [1, -1, 1], [1, 2, 4], [1, -2, 4], [0, 0, 1]])
    co, ci = w.shape[:2]
    u = w.reshape(co * ci, 9).astype(np.float32) @ np.kron(g, g).T.astype(np.float32)  # exact: below 2^24
    panels = -(-co // panel)
    full = np.zeros((panels * panel, ci, 36), np.int16)
    full[:co] = u.reshape(co, ci, 36)
    return np.ascontiguousarray(full.reshape(panels, panel, ci // 2, 2, 36).transpose(0, 4, 2, 1, 3))


class _IntegerEmitter(TemplateEmitter):
    """What both kernels share: the depth of a dot product, and packed weights."""

    def depth(self, left: Value, matrix: np.ndarray | None) -> int:
        """Products that a lane adds at a time: four bytes where the CPU can and the weights [K, N] are bytes, else two."""
        if matrix is None or not self.options.vnni or left.dtype.bits != 8:
            return 2
        return 2 if byte_shifts(matrix) is None else 4

    def depth_at_run_time(self, left: Value, right: Value) -> int:
        """The same where the right operand is packed at run time."""
        return 4 if self.options.vnni and left.dtype.bits == right.dtype.bits == 8 else 2

    def pack(self, key: object, matrices: list[np.ndarray], depth: int, zero: int) -> str:
        """Packed matrices, one after the other, what the sums of their columns start with, and what the sums of rows are
        multiplied by: three arguments. `zero` is `zero_of_bytes` of the rows."""
        panel = 2 * self.lanes
        k, n = matrices[0].shape
        key = (key, len(matrices), k, n)
        columns = -(-n // panel) * panel
        shifts = [byte_shifts(m) for m in matrices] if depth == 4 else []

        def write(out: np.ndarray) -> None:
            parts = out.reshape(len(matrices), -1)
            for i, (part, matrix) in enumerate(zip(parts, matrices, strict=True)):
                shift = shifts[i] if shifts else None
                whole = matrix - shift.astype(np.int32) if shift is not None and shift.any() else matrix
                part[:] = pack_depth(whole, panel, depth).reshape(-1).view(np.uint8)

        def write_offsets(out: np.ndarray) -> None:
            out.view(np.int32)[:] = np.concatenate([offsets(m, zero, panel) for m in matrices])

        def write_slopes(out: np.ndarray) -> None:
            out.view(np.int32)[:] = np.concatenate([whole_panels(s, panel) for s in shifts if s is not None])

        rows, room = -(-k // depth), len(matrices) * columns * 4
        found = [self._packed(("integer", key, depth), room * rows, write), "nullptr", "nullptr"]
        if depth == 4 and zero:
            found[1] = self._packed(("integer offsets", key, zero), room, write_offsets)
        if any(s is not None and s.any() for s in shifts):
            found[2] = self._packed(("integer slopes", key), room, write_slopes)
        return ", ".join(found)

    def _packed(self, key: object, nbytes: int, write: object) -> str:
        self.packed.append(("i32", self.weights.add_packed(key, nbytes, write)))  # type: ignore[arg-type]
        return f"w{len(self.packed) - 1}"

    def end(self, value: Value) -> str:
        """The address behind a storage's last element: vectors of a reader may go so far."""
        return f"{self.pointer(value)} + {self.size(value.t.size)}"


class IntegerMatmulEmitter(_IntegerEmitter):
    """C[M, N] = A[M, K] B[K, N] in int32 over batch loops; B packed at compile time where it is constant."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        access = matmul_access(self.layout, node)
        assert access is not None, "the planner checked the operands"
        m, n, k = (self.size(d) for d in access.sizes)
        names: dict[Symbol, str] = {}
        decode = self.loops(access.batch, "(t / g.tasks)", names)
        names |= {next(iter(access.m.symbols())): "m", next(iter(access.n.symbols())): "n"}
        zero_a, zero_b = self._zeros(node)
        matrix = _constant_matrix(access, zero_b)
        depth = self.depth(access.a.value, matrix)
        left = self._left(access.a, names, k, zero_a)
        if matrix is None:
            depth = self.depth_at_run_time(access.a.value, access.b.value)
            b, before, workspace = self._pack_at_run_time(access, names, depth)
            b = f"{b}, {self._right(access, names)}"
        else:
            b = self.pack((access.b.value.id, access.b.base, access.b.row, access.b.col, zero_b), [matrix], depth,
                          zero_of_bytes(access.a.value.dtype, zero_a))  # fmt: skip
            before, workspace = [], "0"
        epilogue = self.epilogue(
            Epilogue(self.group, self.layout, self.lanes, access.index, names, access.n, self.buffers)
        )
        batch = self.size(prod(d for _, d in access.batch))
        grid = f"const IgGrid g = ig_grid({m}, {n}, {k}, ctx->threads);"
        room = self._scratch(k, depth, matrix is None)
        body = [grid, f"void *const scratch = a->scratch + worker * {room};",
                "for (i64 t = first; t < last; t++) {", *indent(decode),
                "  const auto epi = [=](i64 m, i64 n, vi acc, auto lanes) OX_LAMBDA { (void)m; (void)n;", *indent(epilogue, 2), "  };",
                f"  ig_task<{depth}>(g, t % g.tasks, {left}, {b}, {m}, {n}, {k}, scratch, epi);", "}"]  # fmt: skip
        scratch = f"ctx->threads * {room} + {workspace}"
        return self.source(body, f"g.tasks * {batch}", "igemm.h", scratch, [grid, *before], "integer matmul")

    def _scratch(self, k: str, depth: int, packs: bool) -> str:
        """Bytes of a thread's scratch."""
        return f"(ig_scratch({k}, {depth}) + ig_room({k}, {depth}))" if packs else f"ig_scratch({k}, {depth})"

    @staticmethod
    def _zeros(node: Node) -> tuple[int, int]:
        """What both operands are less."""
        left, right = node.attrs.get("zeros", (0, 0))
        return left, right

    def _right(self, access: MatmulAccess, names: dict[Symbol, str], pointer: str = "") -> str:
        """What is packed at run time."""
        node, b, (_, n, k) = self.group.node, access.b, access.sizes
        assert node is not None
        left, right = self._zeros(node)
        left = zero_of_bytes(access.a.value.dtype, left)
        at = f"{pointer or self.pointer(b.value)} + {self.index(b.base, names)}"
        sizes = ", ".join(self.size(d) for d in (b.row, b.col, k, n))
        return f"IgColumns<{spelling.storage_type(b.value.dtype)}>{{{at}, {sizes}, {left}, {right}}}"

    def _left(self, a: Matrix, names: dict[Symbol, str], k: str, zero: int) -> str:
        element = spelling.storage_type(a.value.dtype)
        at = f"{self.pointer(a.value)} + {self.index(a.base, names)}"
        return f"IgRows<{element}>{{{at}, {self.end(a.value)}, {self.size(a.row)}, {self.size(a.col)}, {k}, {zero}}}"

    def _pack_at_run_time(
        self, access: MatmulAccess, names: dict[Symbol, str], depth: int
    ) -> tuple[str, list[str], str]:
        """The packed B: its address, statements that pack it, and the workspace for that."""
        b, (m, n, k) = access.b, access.sizes
        sizes = [self.size(d) for d in (m, n, k)]
        packs = f"ig_packs(ig_grid({', '.join(sizes)}, ctx->threads), {sizes[0]}, {sizes[2]}, {depth})"
        loops = [(s, d) for s, d in access.batch if s in symbols(b.base)]
        count = self.size(prod(d for _, d in loops))
        panels, each = f"ig_panels({self.size(n)})", f"ig_whole({self.size(n)}, {self.size(k)}, {depth})"
        panel, mine = f"IG_NR * ox_up({self.size(k)}, {depth})", dict[Symbol, str]()
        decode = self.loops(loops, "(t / panels)", mine)
        position = "0"
        for s, d in loops:
            position = f"({position} * {self.size(d)} + {names[s]})"
        place = f"(ig_i32 *)(a->scratch + ctx->threads * {self._scratch(self.size(k), depth, True)})"
        pointer, element = self.pointer(b.value), spelling.storage_type(b.value.dtype)
        pack = ["const auto pack = [](void *arg, i64 first, i64 last, int) {",
                "  const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx;",
                f"  const {element} *const src = (const {element} *)a->p[{pointer[1:]}]; @SIZES@",
                f"  const i64 panels = {panels};",
                "  for (i64 t = first; t < last; t++) {", *indent(decode, 2),
                f"    ig_i32 *const d = {place} + t / panels * {each};",
                "    const i64 p = t % panels;",
                f"    ig_pack_b<{depth}>({self._right(access, mine, 'src')}, p, p + 1, d + p * {panel}, d + panels * {panel} + p * IG_NR);",
                "  }", "};",
                f"if (!{packs}) ox_for(ctx, {count} * {panels}, pack, &c);"]  # fmt: skip
        return f"(const i32 *)({place} + {position} * {each})", pack, f"({packs} ? 0 : {count} * {each} * 4)"


def _constant_matrix(access: MatmulAccess, zero: int) -> np.ndarray | None:
    """The K x N matrix that B is a constant view of, less its zero point."""
    b, (_, n, k) = access.b, access.sizes
    constant = constant_of(b.value)
    whole = (b.base, b.row, b.col, n, k)
    if constant is None or not all(isinstance(d, int) for d in whole):
        return None
    base, row, column, n, k = (int(d) for d in whole if isinstance(d, int))
    flat = np.ascontiguousarray(constant).reshape(-1)
    item = flat.itemsize
    matrix = np.lib.stride_tricks.as_strided(flat[base:], (k, n), (row * item, column * item), writeable=False)
    return matrix.astype(np.int16) - np.int16(zero) if zero else matrix


class IntegerConvEmitter(_IntegerEmitter):
    """A convolution over channels-last integers: an implicit matrix product, or depthwise."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        x = conv_image(self.layout, node.operands[0])
        weights = constant_of(node.operands[1])
        assert x is not None and weights is not None, "the planner checked the operands"
        depthwise = _is_depthwise(node)
        epilogue = self._epilogue(node, depthwise)
        element = spelling.storage_type(node.operands[0].dtype)
        shape = self._shape(node, x, depthwise)
        head = [f"const iconv::Shape z = {shape};",
                "const auto epi = [=](iconv::Px q, i64 c, vi acc, auto lanes) OX_LAMBDA { (void)q; (void)c;", *indent(epilogue), "};"]  # fmt: skip
        image = f"{self.pointer(x.value)} + {self.size(x.base)}, ({element}){self._fill(node)}"
        w = weights if weights.ndim == 4 else weights[:, :, None, :]
        if depthwise:
            return self._depthwise(node, w, shape, head, image)
        if self._is_winograd(node, w):
            return self._winograd(node, w, shape, head, image)
        return self._product(node, w, shape, head, f"{image}, {self.end(x.value)}", element)

    def _product(
        self, node: Node, w: np.ndarray, shape: str, head: list[str], image: str, element: str
    ) -> KernelSource:
        groups = node.attrs["groups"]
        co, ci, kh, kw = w.shape
        depth = self.depth(node.operands[0], w.reshape(co, -1).T)
        parts = w.reshape(groups, co // groups, ci, kh, kw).transpose(0, 3, 4, 2, 1).reshape(groups, kh * kw * ci, -1)
        packed = self.pack(("conv", node.operands[1].id, groups), list(parts), depth,
                           zero_of_bytes(node.operands[0].dtype))  # fmt: skip
        scratch = f"ig_scratch({kh * kw * ci}, {depth})"
        body = [*head, "const IgGrid g = iconv::grid(z, ctx->threads);", "for (i64 t = first; t < last; t++)",
                f"  iconv::task<{depth}, {element}>(z, g, t, {image}, {packed}, a->scratch + worker * {scratch}, epi);"]  # fmt: skip
        items = f"iconv::grid({shape}, ctx->threads).tasks * {groups}"
        return self.source(body, items, "iconv.h", f"ctx->threads * {scratch}", [], "integer conv")

    def _depthwise(self, node: Node, w: np.ndarray, shape: str, head: list[str], image: str) -> KernelSource:
        step = self._pairs(node, "dilations")
        nbytes = pack_depthwise(w, step[0], self.lanes).nbytes

        def write(out: np.ndarray) -> None:
            out.view(np.int16)[:] = pack_depthwise(w, step[0], self.lanes).reshape(-1)

        packed = self._packed(("integer depthwise", node.operands[1].id, step[0]), nbytes, write)
        pairs, width = ((w.shape[2] - 1) * step[0] + 1) // 2 + 1, w.shape[3]
        known = step[1] == 1 and pairs * width <= (28 if self.lanes == 16 else 15)  # weights in registers
        scratch = f"iconv::dw_scratch({shape})"
        body = [*head, f"iconv::dw_items<{f'{pairs}, {width}' if known else '0, 0'}>(z, {image}, {packed}, first, last, "
                f"a->scratch + worker * {scratch}, epi);"]  # fmt: skip
        return self.source(
            body, f"iconv::dw_count({shape})", "iconv.h", f"ctx->threads * {scratch}", [], "integer conv depthwise"
        )

    def _is_winograd(self, node: Node, w: np.ndarray) -> bool:
        """Where a quarter of the products is less work, and sums are small enough for it to be exact."""
        a, x = node.attrs, node.operands[0]
        plain = all(n == 1 for n in (*a["strides"], *a["dilations"], a["groups"])) and w.shape[2:] == (3, 3)
        if not plain or x.dtype.bits > 8 or np.abs(w.astype(np.int32)).max() > 255:
            return False
        if w.shape[1] % (2 * self.lanes) or w.shape[1] < 32 or w.shape[0] < 2 * self.lanes:
            return False
        quads = self.depth(x, w.reshape(len(w), -1).T) == 4
        if quads and self.options.matrices:  # ten times as many products at a time
            return False
        least = WINOGRAD_TILES_OF_BYTES if quads else WINOGRAD_TILES
        n, _, oh, ow = node.output.shape
        if not all(isinstance(d, int) for d in (n, oh, ow)) or n * -(-oh // 4) * -(-ow // 4) < least:
            return False
        wide = w.astype(np.int32)
        above, below = (np.maximum(v, 0).sum((1, 2, 3)).max() for v in (wide, -wide))
        greatest = 255 * max(above, below) if x.dtype is dtypes.uint8 else 128 * (above + below)
        return bool(greatest < 1 << 25)

    def _winograd(self, node: Node, w: np.ndarray, shape: str, head: list[str], image: str) -> KernelSource:
        panel = 2 * self.lanes

        def write(out: np.ndarray) -> None:
            out.view(np.int16)[:] = pack_winograd(w, panel).reshape(-1)

        nbytes = -(-w.shape[0] // panel) * panel * w.shape[1] * 36 * 2
        packed = self._packed(("integer winograd", node.operands[1].id), nbytes, write)
        scratch = f"iwino::scratch_bytes({shape})"
        body = [*head, f"iwino::items(z, {image}, {packed}, first, last, a->scratch + worker * {scratch}, epi);"]
        return self.source(
            body, f"iwino::count({shape})", "iwino.h", f"ctx->threads * {scratch}", [], "integer conv winograd"
        )

    def _epilogue(self, node: Node, depthwise: bool) -> list[str]:
        n, c, y, x = (index(k, d) for k, d in zip(("qn", "qc", "qy", "qx"), _four(node.output.shape), strict=True))
        names = {next(iter(symbols(v))): t for v, t in ((n, "q.n"), (c, "c"), (y, "q.y"), (x, "q.x"))}
        pixel = index("qi", 1 << 60)
        names[next(iter(symbols(pixel)))] = "q.i"
        places = (n, c, y, x) if node.output.rank == 4 else (n, c, x)
        spatial = unflatten(pixel, (node.output.shape[0], *node.output.shape[2:]))
        return self.epilogue(
            Epilogue(self.group, self.layout, self.lanes, places, names, c, self.buffers,
                     aligned=node.attrs["groups"] == 1 or depthwise, linear=(spatial[0], c, *spatial[1:]))
        )  # fmt: skip

    def _fill(self, node: Node) -> str:
        """What pads the image."""
        if len(node.operands) < 3:
            return "0"
        constant = constant_of(node.operands[2])
        if constant is not None:
            return str(int(constant))
        storage = self.layout.storage(node.operands[2])
        return f"{self.pointer(storage)}[{self.size(self.layout.address(node.operands[2], ()))}]"

    @staticmethod
    def _pairs(node: Node, key: str) -> tuple[int, int]:
        *first, last = node.attrs[key]
        return (first[0] if first else 1), last

    def _shape(self, node: Node, x: Image, depthwise: bool) -> str:
        a = node.attrs
        one = node.output.rank == 3
        n, ci, h, w = _four(node.operands[0].shape)
        _, co, oh, ow = _four(node.output.shape)
        kh, kw = _four(node.operands[1].shape)[2:]
        strides, dilations = self._pairs(node, "strides"), self._pairs(node, "dilations")
        low = (0, *a["low"]) if one else tuple(a["low"])
        rows = (x.strides[0], 0, x.strides[2]) if one else (x.strides[0], x.strides[2], x.strides[3])
        if depthwise:
            kh, dilations = (kh - 1) * dilations[0] + 1, (1, dilations[1])
        fields: list[Dim] = [n, h, w, ci, oh, ow, co, kh, kw, *strides, *dilations, *low, a["groups"], *rows]
        return f"iconv::Shape{{{', '.join(self.size(f) for f in fields)}}}"


def _is_depthwise(node: Node) -> bool:
    (_, one, *kernel), a = node.operands[1].shape, node.attrs
    *rows, columns = ((k - 1) * d + 1 for k, d in zip(kernel, a["dilations"], strict=True))
    small = all(r <= MAX_ROWS for r in rows) and columns <= MAX_COLUMNS and a["strides"][-1] <= MAX_STRIDE
    return a["groups"] > 1 and one == 1 and small


def _four(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return shape if len(shape) == 4 else (shape[0], shape[1], 1, shape[2])
