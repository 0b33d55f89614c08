"""Operators that ask for shapes or change them, elements unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from onnxc.errors import ModelError, NeedsSizesError, ShapeError
from onnxc.ir.expr import Dim, always_equal, ceildiv, never_equal, prod
from onnxc.ir.graph import Value
from onnxc.ops.common import axes_of
from onnxc.ops.computed import expanded, is_computed, reshape_sizes, split_sizes
from onnxc.ops.registry import Flag, op
from onnxc.primitives.base import at_most_one, broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.movement import settled


@op("Identity", 1)
def identity(b: Builder, x: Value) -> Value:
    return x


@op("Shape", 1)
def shape(b: Builder, x: Value, *, start: int = 0, end: int | None = None) -> Value:
    return b.sizes(_vector(x.shape[slice(start, end)]))


@op("Size", 1)
def size(b: Builder, x: Value) -> Value:
    return b.sizes(np.array(x.t.size, dtype=object))


def _vector(dims: Sequence[Dim]) -> np.ndarray:
    """Dims as an object array: numpy must not look into expressions."""
    array = np.empty(len(dims), dtype=object)
    array[:] = dims
    return array


@op("Reshape", 5)
def reshape(b: Builder, x: Value, shape: Value, *, allowzero: Flag = 0) -> Value:
    if is_computed(b, shape):
        return b.reshape(x, reshape_sizes(b, x, shape, bool(allowzero)))
    wanted = b.ints(shape, "the shape of Reshape")
    if not allowzero:
        if any(isinstance(d, int) and d == 0 and i >= x.rank for i, d in enumerate(wanted)):
            raise ShapeError(f"Reshape to {wanted} copies a dim that {x.t} does not have")
        wanted = [x.shape[i] if isinstance(d, int) and d == 0 else d for i, d in enumerate(wanted)]
    free = [i for i, d in enumerate(wanted) if isinstance(d, int) and d < 0]
    if len(free) > 1 or any(wanted[i] != -1 for i in free):
        raise ModelError(f"Reshape to {wanted}: one dim may be -1, and none less")
    if free:
        wanted[free[0]] = remaining(x.shape, [d for i, d in enumerate(wanted) if i != free[0]])
    sizes, pairs = settled(x.shape, wanted)
    return b.one("reshape", x, shape=sizes, equal=tuple(chain(*pairs))) if pairs else b.reshape(x, sizes)


def remaining(own: Sequence[Dim], others: Sequence[Dim]) -> Dim:
    """The dim that -1 stands for; equal dims cancel first, so that what cannot be divided stays whole."""
    left, used = list(own), list(others)
    for d in others:
        if d in left:
            left.remove(d)
            used.remove(d)
    total, part = prod(left), prod(used)
    if isinstance(part, int) and (part == 0 or (isinstance(total, int) and total % part)):
        raise ShapeError(f"cannot reshape {list(own)} to {list(others)} and one more dim")
    return total // part


@op("Flatten", 1)
def flatten(b: Builder, x: Value, *, axis: int = 1) -> Value:
    if not -x.rank <= axis <= x.rank:
        raise ShapeError(f"Flatten of {x.t} at axis {axis}")
    axis = axis + x.rank if axis < 0 else axis
    return b.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))


@op("Transpose", 1)
def transpose(b: Builder, x: Value, *, perm: list[int] | None = None) -> Value:
    return b.transpose(x, perm if perm is not None else tuple(reversed(range(x.rank))))


def _squeeze(b: Builder, x: Value, axes: tuple[int, ...] | None) -> Value:
    """Drops axes of size 1; without axes, and for an empty list of them, all (as onnxruntime does)."""
    if not axes:
        if not all(d == 1 or never_equal(d, 1) for d in x.shape):
            raise NeedsSizesError(f"which axes of {x.t} Squeeze drops depends on sizes: give them, or axes")
        axes = tuple(i for i, d in enumerate(x.shape) if d == 1)
    wrong = [i for i in axes if isinstance(x.shape[i], int) and x.shape[i] != 1]
    if wrong:
        raise ShapeError(f"Squeeze of the axes {wrong} of {x.t}, which are not of size 1")
    ones = b.expand(x, [1 if i in axes else d for i, d in enumerate(x.shape)])  # has it checked, of open ones
    return b.reshape(ones, [d for i, d in enumerate(x.shape) if i not in axes])


@op("Squeeze", 1, 12)
def squeeze_1(b: Builder, x: Value, *, axes: list[int] | None = None) -> Value:
    return _squeeze(b, x, axes_of(b, axes, x.rank, "Squeeze"))


@op("Squeeze", 13)
def squeeze_13(b: Builder, x: Value, axes: Value | None = None) -> Value:
    return _squeeze(b, x, axes_of(b, axes, x.rank, "Squeeze"))


def _unsqueeze(b: Builder, x: Value, axes: list[int] | Value) -> Value:
    count = len(b.ints(axes, "the axes of Unsqueeze") if isinstance(axes, Value) else axes)
    found = axes_of(b, axes, x.rank + count, "Unsqueeze") or ()
    if len(found) != count:
        raise ModelError(f"the {count} axes of Unsqueeze name an axis twice; there are {found}")
    dims = iter(x.shape)
    return b.reshape(x, [1 if i in found else next(dims) for i in range(x.rank + count)])


@op("Unsqueeze", 1, 12)
def unsqueeze_1(b: Builder, x: Value, *, axes: list[int]) -> Value:
    return _unsqueeze(b, x, axes)


@op("Unsqueeze", 13)
def unsqueeze_13(b: Builder, x: Value, axes: Value) -> Value:
    return _unsqueeze(b, x, axes)


@op("Expand", 8)
def expand(b: Builder, x: Value, shape: Value) -> Value:
    if is_computed(b, shape):
        return expanded(b, x, shape)
    wanted = tuple(b.ints(shape, "the shape of Expand"))
    found = broadcast_shapes(wanted, x.shape)
    # An open size that is wanted stays, so that a call checks that it is the tensor's own.
    lead = len(found) - len(wanted)
    met = [*found[:lead], *(f if isinstance(w, int) else w for f, w in zip(found[lead:], wanted, strict=True))]
    # What is never more than 1 is taken to be 1.
    few = [w for w, f in zip(met, found, strict=True) if at_most_one(w) and not always_equal(w, f)]
    if few:
        x = b.reshape(b.singled(b.expand(x, (*few, *x.shape)), range(len(few))), x.shape)
        met = [f if at_most_one(w) else w for w, f in zip(met, found, strict=True)]
    return b.reshape(b.expand(x, met), found)


@op("Tile", 6)
def tile(b: Builder, x: Value, repeats: Value) -> Value:
    return repeat_whole(b, x, b.extents(repeats, "the repeats of Tile"))


def repeat_whole(b: Builder, x: Value, repeats: Sequence[Dim]) -> Value:
    """The tensor side by side with itself: [d0, d1] to [r0 * d0, r1 * d1]."""
    if len(repeats) != x.rank:
        raise ShapeError(f"Tile of {x.t} by {list(repeats)}: one repeat for each axis is needed")
    split: list[Dim] = []
    spread: list[Dim] = []
    for d, r in zip(x.shape, repeats, strict=True):
        split += [d] if r == 1 else [1, d]
        spread += [d] if r == 1 else [r, d]
    wide = b.expand(b.reshape(x, split), spread)
    return b.reshape(wide, [d * r for d, r in zip(x.shape, repeats, strict=True)])


@op("Concat", 4)
def concat(b: Builder, *xs: Value, axis: int) -> Value:
    if not xs:
        raise ModelError("Concat needs at least one input")
    return b.concat(xs, b.axis(axis, xs[0].rank))


def _split(
    b: Builder, x: Value, axis: int, sizes: Sequence[Dim] | None, parts: int, uneven: bool,
) -> list[Value]:  # fmt: skip
    """Slices of the given sizes, or of equal ones; with `uneven` the last one may be smaller."""
    axis = b.axis(axis, x.rank)
    whole = x.shape[axis]
    total: Dim = whole
    if sizes is not None:
        total = sum(sizes)
    else:
        each = ceildiv(whole, parts)
        if not uneven:
            total = whole // parts * parts
        sizes = [each] * (parts - 1) + [whole - each * (parts - 1)]
    if never_equal(total, whole) or min((s for s in sizes if isinstance(s, int)), default=0) < 0:
        raise ShapeError(f"Split of axis {axis} of {x.t} in sizes {list(sizes)}")
    if not always_equal(total, whole):  # no size of a slice says that nothing is left over
        x = b.one("reshape", x, shape=x.shape, equal=(total, whole))
    return b.split(x, axis, sizes)


@op("Split", 2, 12)
def split_1(
    b: Builder, x: Value, *, axis: int = 0, split: list[int] | None = None, n_outputs: int,
) -> list[Value]:  # fmt: skip
    return _split(b, x, axis, split, n_outputs, False)


@op("Split", 13)
def split_13(
    b: Builder, x: Value, split: Value | None = None, *, axis: int = 0, num_outputs: int | None = None,
    n_outputs: int,
) -> list[Value]:  # fmt: skip
    if num_outputs is not None and num_outputs != n_outputs:
        raise ModelError(f"Split has {n_outputs} outputs, and num_outputs = {num_outputs}")
    if split is not None and is_computed(b, split):
        sizes: Sequence[Dim] | None = split_sizes(b, x.shape[b.axis(axis, x.rank)], split)
    else:
        sizes = None if split is None else b.ints(split, "the sizes of Split")
    if sizes is not None and len(sizes) != n_outputs:
        raise ModelError(f"Split has {n_outputs} outputs, and {len(sizes)} sizes")
    return _split(b, x, axis, sizes, num_outputs or n_outputs, num_outputs is not None)


def _blocks(x: Value, what: str, blocksize: int, mode: str) -> tuple[Dim, Dim, Dim, Dim]:
    """The dims of an image, where the operator's attributes are such as the standard has."""
    if x.rank != 4:
        raise ShapeError(f"{what} takes an image [N, C, H, W], not {x.t}")
    if blocksize < 1 or mode not in ("DCR", "CRD"):
        raise ModelError(f"{what} has the block size {blocksize} and the mode {mode!r}; a mode is DCR or CRD")
    n, c, h, w = x.shape
    return n, c, h, w


@op("DepthToSpace", 1)
def depth_to_space(b: Builder, x: Value, *, blocksize: int, mode: str = "DCR") -> Value:
    """[N, C * s * s, H, W] to [N, C, H * s, W * s]; the mode says whether the depth is outermost."""
    n, c, h, w = _blocks(x, "DepthToSpace", blocksize, mode)
    s = blocksize
    depth = c // (s * s)
    if mode == "DCR":
        parts = b.transpose(b.reshape(x, (n, s, s, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        parts = b.transpose(b.reshape(x, (n, depth, s, s, h, w)), (0, 1, 4, 2, 5, 3))
    return b.reshape(parts, (n, depth, h * s, w * s))


@op("SpaceToDepth", 1)
def space_to_depth(b: Builder, x: Value, *, blocksize: int, mode: str = "DCR") -> Value:
    """[N, C, H * s, W * s] to [N, C * s * s, H, W]."""
    n, c, h, w = _blocks(x, "SpaceToDepth", blocksize, mode)
    s = blocksize
    parts = b.reshape(x, (n, c, h // s, s, w // s, s))
    perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return b.reshape(b.transpose(parts, perm), (n, c * (s * s), h // s, w // s))
