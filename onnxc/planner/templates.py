"""Which nodes run as kernel templates, and how a template reads its operands through views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Expr, Symbol, always_equal, coefficient, prod
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index, broadcast, fresh, unflatten, view_index
from onnxc.planner.layout import Layout
from onnxc.primitives.attention_gradient import mask_operand
from onnxc.primitives.contraction import not_one
from onnxc.primitives.movement import VIEWS

ENABLED = frozenset({"matmul", "matmul_quantized", "conv", "attention"})


def is_template(node: Node) -> bool:
    """True for nodes that a kernel template computes; others of their kind become plain loops."""
    if node.attrs.get("wide"):
        return True
    if node.op == "matmul":
        return "matmul" in ENABLED and node.output.dtype in (dtypes.float32, dtypes.float64)
    if node.op == "conv":
        static = node.operands[1].t.is_static and 0 not in node.operands[1].shape  # no sums of nothing
        return "conv" in ENABLED and node.output.dtype is dtypes.float32 and node.output.rank in (3, 4, 5) and static
    if node.op == "conv_weights":
        static = all(isinstance(d, int) for d in node.output.shape)
        return "conv" in ENABLED and node.output.dtype is dtypes.float32 and node.output.rank in (3, 4, 5) and static
    return node.op in ("attention", "matmul_quantized") and node.op in ENABLED


def through_views(layout: Layout, value: Value, at: Index) -> tuple[Value, Index]:
    """The stored value behind a chain of views, and the index into it."""
    while value.node is not None and value.node.op in VIEWS and value.id not in layout.stored:
        at = view_index(value.node, at)
        value = value.node.operands[0]
    return value, at


@dataclass(frozen=True)
class Matrix:
    """An operand as a matrix in memory: address of its first element (over batch loops) and two strides."""

    value: Value
    base: Dim
    row: Dim
    col: Dim


@dataclass(frozen=True)
class MatmulAccess:
    """How a matmul runs: batch loops, sizes, both operands, and the result's index in terms of the loops; `c` is the
    right operand of the product that shares its kernel, if one does.
    """

    batch: list[tuple[Symbol, Dim]]
    m: Expr
    n: Expr
    sizes: tuple[Dim, Dim, Dim]  # M, N, K
    a: Matrix
    b: Matrix
    index: Index
    c: Matrix | None = None


def _matrix(layout: Layout, value: Value, at: Index, row: Expr, col: Expr) -> Matrix | None:
    source, index = through_views(layout, value, at)
    address = layout.address(source, index)
    (r,), (c,) = (tuple(x.atoms()) for x in (row, col))
    assert isinstance(r, Symbol) and isinstance(c, Symbol)
    rs, cs = coefficient(address, r), coefficient(address, c)
    if rs is None or cs is None:
        return None
    return Matrix(layout.storage(source), address - row * rs - col * cs, rs, cs)


def matmul_access(layout: Layout, node: Node, twin: Node | None = None) -> MatmulAccess | None:
    """The matrices of a matmul, batch dims merged into the rows where B has none; None where a view is in the way.

    Args:
        twin: a product of the same left operand, with a right one of the same sizes, in the same kernel.
    """
    a, b = node.operands[:2]
    out = node.output
    merged = all(d == 1 for d in b.shape[:-2])
    depth = b.shape[-2] if isinstance(b.shape[-2], int) else a.shape[-1]  # of weights it is known
    for merge in [True, False] if merged else [False]:
        lead, rows = out.shape[:-2], out.shape[-2]
        m_size = prod((*lead, rows)) if merge else rows
        m, n, k = fresh("m", m_size), fresh("n", out.shape[-1]), fresh("k", depth)
        loops = [] if merge else [fresh("b", d) for d in lead]
        outer = (
            unflatten(m, (*lead, rows))
            if merge
            else (*(0 if d == 1 else v for v, d in zip(loops, lead, strict=True)), m)
        )
        left = _matrix(layout, a, broadcast(a, (*outer[:-1], outer[-1], k)), m, k)
        place: Index = (*(0,) * (b.rank - 2), k, n) if merge else broadcast(b, (*outer[:-1], k, n))
        right = _matrix(layout, b, place, k, n)
        other = _matrix(layout, twin.operands[1], place, k, n) if twin is not None else None
        if left is None or right is None or (twin is not None and other is None):
            continue
        batch = [(next(iter(v.symbols())), d) for v, d in zip(loops, lead, strict=False) if d != 1]
        return MatmulAccess(batch, m, n, (m_size, out.shape[-1], depth), left, right, (*outer, n), other)
    return None


@dataclass(frozen=True)
class AttentionAccess:
    """How attention runs: batch loops (heads among them), row, key and column loops, and its operands per head."""

    batch: list[tuple[Symbol, Dim]]
    row: Expr
    key: Expr
    column: Expr
    sizes: tuple[Dim, Dim, Dim, Dim]  # queries, keys, depth, columns
    q: Matrix
    k: Matrix  # [key, depth]
    v: Matrix
    masks: tuple[tuple[Value, Dim], ...]  # each with the address of its element
    index: Index


def attention_access(layout: Layout, node: Node) -> AttentionAccess | None:
    """The matrices of an attention node; None where a view is in the way."""
    q, kt, v, *masks = node.operands
    out = node.output
    lead = out.shape[:-2]
    loops = [fresh("b", d) for d in lead]
    outer = tuple(0 if d == 1 else x for x, d in zip(loops, lead, strict=True))
    sizes = (out.shape[-2], kt.shape[-1], q.shape[-1], out.shape[-1])
    row, key, depth, column = (fresh(c, d) for c, d in zip("mkdn", sizes, strict=True))
    left = _matrix(layout, q, broadcast(q, (*outer, row, depth)), row, depth)
    keys = _matrix(layout, kt, broadcast(kt, (*outer, depth, key)), key, depth)
    values = _matrix(layout, v, broadcast(v, (*outer, key, column)), key, column)
    if left is None or keys is None or values is None:
        return None
    found = []
    for mask in masks:
        source, at = through_views(layout, mask, _repeated(mask, (*outer, row, key), (*lead, *sizes[:2])))
        address = layout.address(source, at)
        (k,) = key.symbols()
        if coefficient(address, k) is None:
            return None
        found.append((layout.storage(source), address))
    batch = [(next(iter(x.symbols())), d) for x, d in zip(loops, lead, strict=True) if d != 1]
    return AttentionAccess(batch, row, key, column, sizes, left, keys, values, tuple(found), (*outer, row, column))


@dataclass(frozen=True)
class GradientAccess:
    """How a node of attention's derivative runs: `attention_norm` or `attention_gradient`.

    Rows of `norm` and `delta` are values with the address of a row's number; `index` is the result's, for an
    `attention_norm` without `column`. The first axis of a tile of the result is `row`, or `key`.
    """

    batch: list[tuple[Symbol, Dim]]
    row: Expr
    key: Expr
    column: Expr
    sizes: tuple[Dim, Dim, Dim, Dim]  # queries, keys, depth, columns of v
    matrices: tuple[Matrix, ...]  # q, k [key, depth]; v, dy
    rows: tuple[tuple[Value, Dim], ...]  # norm, delta
    bias: tuple[Value, Dim] | None
    index: Index


def gradient_access(layout: Layout, node: Node) -> GradientAccess | None:
    """The matrices of a node of attention's derivative; None where a view is in the way."""
    q, kt, *rest = node.operands
    bias, norm = mask_operand(node), node.op == "attention_norm"
    lead = node.output.shape[: -1 if norm else -2]
    loops = [fresh("b", d) for d in lead]
    outer = tuple(0 if d == 1 else x for x, d in zip(loops, lead, strict=True))
    wide = q.shape[-1] if norm else rest[0].shape[-1]
    sizes = (q.shape[-2], kt.shape[-1], q.shape[-1], wide)
    width = node.output.shape[-1]
    row, key, depth, far, column = (fresh(c, d) for c, d in zip("mkden", (*sizes, 1 if norm else width), strict=True))
    found = [
        _matrix(layout, q, broadcast(q, (*outer, row, depth)), row, depth),
        _matrix(layout, kt, broadcast(kt, (*outer, depth, key)), key, depth),
    ]
    rows = []
    if not norm:
        v, dy = rest[:2]
        found.append(_matrix(layout, v, broadcast(v, (*outer, key, far)), key, far))
        found.append(_matrix(layout, dy, broadcast(dy, (*outer, row, far)), row, far))
        for x in rest[2:4]:
            source, at = through_views(layout, x, broadcast(x, (*outer, row)))
            rows.append((layout.storage(source), layout.address(source, at)))
    matrices = tuple(m for m in found if m is not None)
    if len(matrices) != len(found):
        return None
    extra = None
    if bias is not None:
        source, at = through_views(layout, bias, _repeated(bias, (*outer, row, key), (*lead, *sizes[:2])))
        address = layout.address(source, at)
        if any(coefficient(address, next(iter(x.symbols()))) is None for x in (row, key)):
            return None
        extra = (layout.storage(source), address)
    batch = [(next(iter(x.symbols())), d) for x, d in zip(loops, lead, strict=True) if d != 1]
    own = key if not norm and node.attrs["of"] != "q" else row
    index = (*outer, row) if norm else (*outer, own, column)
    return GradientAccess(batch, row, key, column, sizes, matrices, tuple(rows), extra, index)


def _repeated(value: Value, at: Index, shape: Sequence[Dim]) -> Index:
    """As `broadcast` to a shape, also along axes whose size only turns out to be 1 at run time."""
    sizes = shape[len(shape) - value.rank :]
    return tuple(
        i if isinstance(d, int) or always_equal(d, size) else i * not_one(d)
        for i, d, size in zip(broadcast(value, at), value.shape, sizes, strict=True)
    )


@dataclass(frozen=True)
class Image:
    """A convolution operand in memory: the strides of N, C and the spatial dims."""

    value: Value
    base: Dim
    strides: tuple[Dim, ...]


def conv_image(layout: Layout, value: Value, planar: bool = False) -> Image | None:
    """An operand or result of a channels-last template; None where its channels are not contiguous.

    With `planar` they need not be: so lie images that are inputs of a model, of which a convolution turns a few rows
    at a time.
    """
    own = [fresh("x", d) for d in value.shape]
    at = tuple(0 if d == 1 else v for v, d in zip(own, value.shape, strict=True))
    source, index = through_views(layout, value, at)
    address = layout.address(source, index)
    strides: list[Dim] = []
    for v, d in zip(own, value.shape, strict=True):
        (s,) = v.atoms()
        assert isinstance(s, Symbol)
        c = coefficient(address, s) if d != 1 else 0
        if c is None:
            return None
        strides.append(c)
        address = address - v * c if d != 1 else address
    if not (planar or always_equal(strides[1], 1) or value.shape[1] == 1):
        return None
    return Image(layout.storage(source), address, tuple(strides))


LARGE = 4 << 20  # bytes of a transposed left factor that is read as it lies: a copy would take no less time, and memory


def _factor_is_direct(layout: Layout, node: Node, value: Value, fewest: int) -> bool:
    """Of a matmul's factor: where a view is in the way of the other one alone, that one is stored."""
    access = matmul_access(layout, node)
    left, right = node.operands[:2]
    if access is not None:
        return value is not left or (_reads_rows(access) and not _is_divided(access, right, fewest))
    stored = {v.id for v in (left, right) if v.node is not None and v.node.op in VIEWS and v.id not in layout.stored}
    if value.id not in stored or left is right:
        return False
    other = left if value is right else right
    layout.stored.add(other.id)
    access = matmul_access(layout, node)
    if other.id in stored:
        layout.stored.discard(other.id)
    if access is None:
        return False
    return value is right or _reads_rows(access)


def _is_divided(access: MatmulAccess, right: Value, fewest: int) -> bool:
    """Whether views divide the rows of one product into products of fewer, which all read the right factor."""
    rows = access.sizes[0]
    shared = bool(access.batch) and all(d == 1 for d in right.shape[:-2])
    return shared and fewest > 0 and not (isinstance(rows, int) and rows >= fewest)


def _reads_rows(access: MatmulAccess) -> bool:
    """Whether the template reads the left factor where it lies."""
    m, _, k = access.sizes
    if always_equal(access.a.col, 1) or k == 1:
        return True
    nbytes = m * k * access.a.value.dtype.itemsize
    if access.a.value.dtype.bits == 16:  # a GPU's matrix units read these in either order
        nbytes = 4 * nbytes * prod(d for _, d in access.batch)
    return always_equal(access.a.row, 1) and isinstance(nbytes, int) and nbytes >= LARGE


def operand_is_direct(layout: Layout, node: Node, value: Value, fewest: int) -> bool:
    """True where the template can read this operand through its views, with no copy. `fewest`: `Machine.rows`."""
    if node.op in ("matmul", "matmul_quantized"):
        return _factor_is_direct(layout, node, value, fewest)
    if node.op == "attention":
        return attention_access(layout, node) is not None
    if node.op in ("attention_norm", "attention_gradient"):
        return gradient_access(layout, node) is not None
    if node.op == "conv_weights":
        return conv_image(layout, value) is not None
    if node.op == "conv":
        x, w = node.operands[:2]  # a third one is the number that pads x
        image = value is not x or conv_image(layout, value) is not None
        return image and (value is not w or conv_image(layout, value, planar=True) is not None)
    return False
