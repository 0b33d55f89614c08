"""What a kernel of attention need not read of its mask: recognised by what is computed, not by names.

A mask comes as a tensor that is added to the scores, or as a condition where they are replaced. Often it is one of
these, all of which a kernel can know better:

- nothing: zeros (`where(True, 0, -inf)`), or a condition that never holds;
- a *band*: 0 where lower <= key - row <= upper, and one number elsewhere. A causal mask is a band without a lower
  bound, an attention window one with both. Keys that no row of a block sees are left out, and what is left evaluates
  the band from indices in those blocks alone that it cuts;
- the same for all rows (padding): one line of it is read for all rows of a block.

Constants are compared element by element. What is computed at run time is followed to its indices: comparisons of sums
of `iota`, constants that count, and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Expr, Symbol, always_equal, coefficient, is_nonnegative, of, symbols
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index, broadcast, fresh, view_index
from onnxc.loops.loop_index import is_size
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

LARGEST = 1 << 30  # of numbers in an index computation: sums of a few cannot overflow 32 bits
MOST = 1 << 27  # elements of a constant that is looked at

# What is added to hide a key: from here on down, exponentials are exactly 0 beside a key that is not hidden, unless
# scores lie farther apart than this: products of queries and keys are taken to be no larger than `PRODUCTS`.
HIDES = {"float16": -65504.0}
HIDES_WIDE = -9.9e8  # bfloat16 rounds -1e9 to a little more

COMPARED = ("le", "lt", "eq")
FUNCTIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "le": np.less_equal, "lt": np.less, "eq": np.equal,
}  # fmt: skip


@dataclass(frozen=True)
class Band:
    """Row i sees key j where lower <= j - i <= upper; None is no bound. `low` is what others are given."""

    lower: Dim | None
    upper: Dim | None
    low: float = float("-inf")

    def hides(self, queries: Dim, keys: Dim, dtype: DType, most: float) -> bool:
        """Whether hidden keys can be left out: that adds nothing to the sums. A row without any other key is uniform
        over those, so there must be none, unless `low` is minus infinity (then it is NaN, as 0 / 0 is).

        Args:
            queries, keys: sizes.
            dtype: of the attention.
            most: how large scores are taken to be that are not hidden.
        """
        if self.low == float("-inf"):
            return True
        if 2 * most > -self.low:
            return False
        if not self.low <= HIDES.get(dtype.name, HIDES_WIDE) or self.upper is None or not is_nonnegative(self.upper):
            return False
        return self.lower is None or (is_nonnegative(-self.lower) and is_nonnegative(keys - queries))


@dataclass(frozen=True)
class _Choice:
    """`inside` where the band is, `outside` elsewhere."""

    band: Band
    inside: float
    outside: float


@dataclass(frozen=True)
class _Place:
    """The symbols of a row and a key, and how many there are."""

    row: Symbol
    key: Symbol
    sizes: tuple[Dim, Dim]


@dataclass(frozen=True)
class Mask:
    """What is known of a mask.

    Attributes:
        nothing: whether all its elements are 0 (of a condition: False).
        band: the band that it is, if it is seen to be one.
        alike: whether all its rows are equal.
    """

    nothing: bool = False
    band: Band | None = None
    alike: bool = False


def mask_of(bias: Value, queries: Dim, keys: Dim, fill: float | None = None, kept: bool = False) -> Mask:
    """What is known of a mask for scores [..., queries, keys]; with `fill`, of a condition where they are that, or
    (`kept`) where they are not.
    """
    row, key = (fresh(c, d) for c, d in zip("mk", (queries, keys), strict=True))
    (i,), (j,) = symbols(row), symbols(key)
    at = broadcast(bias, (*(fresh("b", d) for d in bias.shape[:-2]), row, key)[2 - min(2, bias.rank) :])
    place = _Place(i, j, (queries, keys))
    found: float | _Choice | None = None
    if fill == 0:
        found = None  # nor would a band of zeros be told from its outside
    elif fill is not None:
        seen = (_bool if kept else _seen)(bias, at, place)
        found = 0.0 if seen is True else _Choice(seen, 0.0, fill) if isinstance(seen, Band) else None
    elif bias.dtype.is_float:
        found = _float(bias, at, place)
    band = None
    whole = bias.rank > 1 and always_equal(bias.shape[-2], queries) and always_equal(bias.shape[-1], keys)
    if isinstance(found, _Choice) and whole:
        band = _hidden(found)
    return Mask(found == 0.0, band, not _varies(bias, at, i))


def _hidden(found: _Choice) -> Band | None:
    """The band outside of which keys are hidden."""
    if found.inside == 0:
        return Band(found.band.lower, found.band.upper, found.outside)
    rest = _opposite(found.band)
    return Band(rest.lower, rest.upper, found.inside) if isinstance(rest, Band) and found.outside == 0 else None


# ---------------------------------------------------------------- what an element is computed of


def _behind_views(v: Value, at: Index) -> tuple[Value, Index]:
    """The element that views show."""
    while constant_of(v) is None and (node := v.node) is not None and node.op in VIEWS:
        v, at = node.operands[0], view_index(node, at)
    return v, at


def _computed(v: Value, at: Index) -> tuple[Node | None, list[tuple[Value, Index]]]:
    """The pointwise node that computes an element, and its operands' elements; None for others."""
    node = v.node
    if node is None or node.op == "iota" or lookup(node.op).kind is not Kind.POINTWISE:
        return None, []
    return node, [(x, broadcast(x, at)) for x in node.operands]


# ---------------------------------------------------------------- floats


def _float(v: Value, at: Index, place: _Place) -> float | _Choice | None:
    """A float that does not depend on other loops than the place's."""
    v, at = _behind_views(v, at)
    array = constant_of(v)
    if array is not None:
        table = _table(array, at, place)
        return _chosen(table.astype(np.float64), place) if table is not None else None
    node, operands = _computed(v, at)
    if node is None:
        return None
    if node.op == "where":
        seen = _bool(*operands[0], place)
        a, b = (_float(x, i, place) for x, i in operands[1:])
        if isinstance(seen, bool):
            return a if seen else b
        return _Choice(seen, a, b) if seen is not None and isinstance(a, float) and isinstance(b, float) else None
    if node.op == "cast" and operands[0][0].dtype.is_float:
        found = _float(*operands[0], place)
        return _each(found, lambda x: float(np.asarray(x).astype(v.dtype.numpy)))
    if node.op == "cast" and operands[0][0].dtype is dtypes.boolean:
        seen = _bool(*operands[0], place)
        if isinstance(seen, bool):
            return float(seen)
        return _Choice(seen, 1.0, 0.0) if seen is not None else None
    if node.op in ("add", "sub", "mul"):
        return _combined(node.op, v.dtype, *(_float(x, i, place) for x, i in operands))
    return None


def _each(x: float | _Choice | None, f: Any) -> float | _Choice | None:
    with np.errstate(all="ignore"):
        if isinstance(x, _Choice):
            return _Choice(x.band, f(x.inside), f(x.outside))
        return None if x is None else float(f(x))


def _combined(
    op: str, dtype: DType, a: float | _Choice | None, b: float | _Choice | None
) -> float | _Choice | None:  # fmt: skip
    """An operation of numbers of a dtype as the model computes it, where one of both does not vary."""

    def apply(x: float, y: float) -> float:
        return float(FUNCTIONS[op](np.asarray(x, dtype.numpy), np.asarray(y, dtype.numpy)))

    if a is None or b is None or (isinstance(a, _Choice) and isinstance(b, _Choice)):
        return None
    if isinstance(b, _Choice):
        return _each(b, lambda y: apply(a, y))  # type: ignore[arg-type]
    return _each(a, lambda x: apply(x, b))


def _where(truth: float | _Choice | None) -> bool | Band | None:
    """Where a number is not 0."""
    if not isinstance(truth, _Choice):
        return None if truth is None else bool(truth)
    if bool(truth.inside) == bool(truth.outside):
        return bool(truth.inside)
    return truth.band if truth.inside else _opposite(truth.band)


def _chosen(table: np.ndarray, place: _Place) -> float | _Choice | None:
    """A table [rows, keys] as one number, or two of which a band chooses."""
    if table.size == 0:
        return None
    if (table == table.flat[0]).all():
        return float(table.flat[0])
    inside = table == 0
    rest = table[~inside]
    if rest.size == table.size or not (rest == rest[0]).all():
        return None
    band = _band(inside, place)
    return _Choice(band, 0.0, float(rest[0])) if band is not None else None


def _band(inside: np.ndarray, place: _Place) -> Band | None:
    """The band that is True in a table [rows, keys], neither full nor empty; None for a line that all of several rows
    (or keys) have.
    """
    rows, keys = inside.shape
    if any(n == 1 and d != 1 for n, d in zip(inside.shape, place.sizes, strict=True)):
        return None
    apart = np.arange(keys)[None, :] - np.arange(rows)[:, None]
    lower, upper = int(apart.min(where=inside, initial=keys)), int(apart.max(where=inside, initial=-rows))
    if not (((apart >= lower) & (apart <= upper)) == inside).all():
        return None
    return Band(lower if lower > 1 - rows else None, upper if upper < keys - 1 else None)


# ---------------------------------------------------------------- conditions and indices


def _bool(v: Value, at: Index, place: _Place) -> bool | Band | None:
    """A condition: always so, or where a band is."""
    v, at = _behind_views(v, at)
    array = constant_of(v)
    if array is not None:
        table = _table(array, at, place)
        return _truth(table, place) if table is not None else None
    node, operands = _computed(v, at)
    if node is None:
        return None
    kind = operands[0][0].dtype
    if node.op in COMPARED and kind in (dtypes.int32, dtypes.int64):
        a, b = (_integer(x, i, place) for x, i in operands)
        return None if a is None or b is None else _compared(node.op, b - a, place)
    if node.op in COMPARED and kind.is_float:
        return _where(_combined(node.op, kind, *(_float(x, i, place) for x, i in operands)))
    if node.op == "cast" and kind.is_float:
        return _where(_each(_float(*operands[0], place), lambda x: float(x != 0)))
    if node.op == "not":
        return _opposite(_bool(*operands[0], place))
    if node.op in ("and", "or"):
        return _joined(node.op, *(_bool(x, i, place) for x, i in operands))
    return _selected(*(_bool(x, i, place) for x, i in operands)) if node.op == "where" else None


def _compared(op: str, rest: Dim, place: _Place) -> bool | Band | None:
    """rest >= 0, > 0 or == 0."""
    by_row, by_key = (coefficient(rest, s) for s in (place.row, place.key))
    if by_row == 0 and by_key == 0:
        if op == "eq":
            return rest == 0 if isinstance(rest, int) else None
        return is_nonnegative(rest - (op == "lt")) or (False if is_nonnegative(-rest - (op == "le")) else None)
    if op == "eq" or by_row is None or by_key is None or (by_row, by_key) not in ((1, -1), (-1, 1)):
        return None
    free = rest - by_row * of(place.row) - by_key * of(place.key) - (op == "lt")
    if {s for s in symbols(free) if not is_size(s)}:
        return None
    return Band(None, free) if by_row == 1 else Band(-free, None)


def _seen(hidden: Value, at: Index, place: _Place) -> bool | Band | None:
    """Where a condition does not hold."""
    hidden, at = _behind_views(hidden, at)
    array = constant_of(hidden)
    if array is not None:
        table = _table(array, at, place)
        return _truth(~table, place) if table is not None else None
    if hidden.node is not None and hidden.node.op == "not":
        return _bool(hidden.node.operands[0], at, place)
    return _opposite(_bool(hidden, at, place))


def _truth(table: np.ndarray, place: _Place) -> bool | Band | None:
    """A table [rows, keys] of conditions."""
    if table.size == 0:
        return None
    return bool(table.flat[0]) if (table == table.flat[0]).all() else _band(table, place)


def _opposite(a: bool | Band | None) -> bool | Band | None:
    if a is None or isinstance(a, bool):
        return None if a is None else not a
    if a.lower is None and a.upper is not None:
        return Band(a.upper + 1, None)
    return Band(None, a.lower - 1) if a.upper is None and a.lower is not None else None


def _joined(op: str, a: bool | Band | None, b: bool | Band | None) -> bool | Band | None:
    """`and`, `or`."""
    decisive = op == "or"
    if a is decisive or b is decisive:
        return decisive
    if a is None or b is None:
        return None
    if isinstance(a, bool):
        return b
    if isinstance(b, bool):
        return a
    if decisive or (a.lower is not None and b.lower is not None) or (a.upper is not None and b.upper is not None):
        return None
    return Band(a.lower if b.lower is None else b.lower, a.upper if b.upper is None else b.upper)


def _selected(condition: bool | Band | None, a: bool | Band | None, b: bool | Band | None) -> bool | Band | None:
    """`a` where the condition holds, else `b`."""
    if isinstance(condition, bool):
        return a if condition else b
    if b is False:
        return _joined("and", condition, a)
    if a is True:
        return _joined("or", condition, b)
    return _opposite(condition) if a is False and b is True else None


def _integer(v: Value, at: Index, place: _Place) -> Dim | None:
    """An integer as an expression of indices and sizes."""
    v, at = _behind_views(v, at)
    array = constant_of(v)
    if array is not None:
        return _counted(array, at, place)
    if v.data is not None and v.data.size == 1:
        size = v.data.reshape(-1)[0]
        return size if isinstance(size, Expr) else int(size)
    if v.node is not None and v.node.op == "iota" and v.dtype.is_integer:
        return at[0]
    node, operands = _computed(v, at)
    if node is None:
        return None
    if node.op == "cast":
        wide = operands[0][0].dtype in (dtypes.int32, dtypes.int64)
        return _integer(*operands[0], place) if wide and v.dtype in (dtypes.int32, dtypes.int64) else None
    if node.op in ("add", "sub", "mul"):
        a, b = (_integer(x, i, place) for x, i in operands)
        if a is None or b is None or (node.op == "mul" and 1 not in (a, b)):
            return None
        return {"add": a + b, "sub": a - b, "mul": a * b}[node.op]
    return None


def _counted(array: np.ndarray, at: Index, place: _Place) -> Dim | None:
    """A constant that counts rows or keys, or is one number."""
    table = _table(array, at, place)
    if table is None or table.size == 0 or np.abs(table.astype(np.float64)).max() > LARGEST:
        return None
    first = int(table[0, 0])
    steps = [
        int(table[1, 0]) - first if table.shape[0] > 1 else 0,
        int(table[0, 1]) - first if table.shape[1] > 1 else 0,
    ]
    counts = [step * np.arange(n) for step, n in zip(steps, table.shape, strict=True)]
    if not (table == first + counts[0][:, None] + counts[1][None, :]).all():
        return None
    row, key = (of(s) for s in (place.row, place.key))
    return first + steps[0] * row + steps[1] * key


def _table(array: np.ndarray, at: Index, place: _Place) -> np.ndarray | None:
    """A constant as [rows, keys], either of which may be 1; None where it depends on other loops too."""
    if array.size > MOST:
        return None
    axes: dict[Symbol, int] = {}
    for axis, (i, n) in enumerate(zip(at, array.shape, strict=True)):
        own = {s for s in (place.row, place.key) if s in symbols(i)}
        if not own:
            if n != 1 and not (array == array.take([0], axis)).all():
                return None
            array = array.take([0], axis) if n else array
        elif len(own) > 1 or i != of(s := own.pop()) or s in axes:
            return None
        else:
            axes[s] = axis
    order = [axes[s] for s in (place.row, place.key) if s in axes]
    array = array.transpose([a for a in range(array.ndim) if a not in order] + order)
    shape = [array.shape[array.ndim - len(order) + k] for k in range(len(order))]
    return array.reshape([*([] if place.row in axes else [1]), *shape, *([] if place.key in axes else [1])])


# ---------------------------------------------------------------- rows


def _varies(v: Value, at: Index, row: Symbol) -> bool:
    """Whether an element may depend on a symbol of its index."""
    v, at = _behind_views(v, at)
    if not any(row in symbols(i) for i in at):
        return False
    array = constant_of(v)
    if array is not None:
        axes = [a for a, i in enumerate(at) if row in symbols(i)]
        return array.size > MOST or any(not (array == array.take([0], a)).all() for a in axes if array.shape[a])
    node, operands = _computed(v, at)
    return node is None or any(_varies(x, i, row) for x, i in operands)
