"""Scans whose rows do not meet: threads divide the rows, and each takes its own through all steps.

Where every node of a step computes the rows of its result (axis 0: the sequences of a batch, or the two directions of
an LSTM) from the same rows of what it reads, nothing has to wait for the rows of another thread: a parallel region for
the whole loop takes the place of one for each kernel of each step. Such a step is planned for an open number of rows,
`ROWS`: those of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxc.ir.expr import Dim, Sym, always_equal, prod, substitute
from onnxc.ir.graph import Graph, Node, Value
from onnxc.planner.flops import total
from onnxc.planner.layout import Layout
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

ROWS = Sym("s999999", 1)  # of a part; no model has so many sizes, and all scans share the name: equal kernels are one
(ROWS_SYMBOL,) = ROWS.symbols()
# Bytes of a step's weights from which on threads rather divide the columns of its products: a thread reads all of the
# weights for its rows, and more do not stay in a core's second level of the cache.
MOST_WEIGHTS = 3 << 19
# Elements of a row, at least: vectors of fewer would hold several rows, and which of them are in a loop's last vector,
# for which a compiler may round otherwise, would depend on where a part begins.
NARROWEST = 16
LEAST_WORK = 1 << 13  # operations of a step, some 200 ns: of less, kernels with fixed sizes cost less than threads gain


@dataclass(frozen=True)
class Apart:
    """A step for some of the rows: its region, and how many rows there are in all."""

    region: Graph
    rows: Dim
    shared: int  # bytes of weights that each step reads, however few its rows are
    own: int  # and of each row's own
    products: Dim  # multiplications of each row
    operations: Dim  # all else


def rows_apart(node: Node) -> Apart | str:
    """What becomes of a scan whose rows threads may divide, or why they cannot.

    A scan by the state [2, 3] has the region of a state [s999999, 3]. Rows are found by the states, whose first axis
    they are: what meets one of them along that axis has rows too (a mask of the batch, a scanned slice).
    """
    (region,) = node.regions
    states = region.inputs[: node.attrs["states"]]
    if "going" in node.attrs:
        return "data decides when it ends"
    if not states or any(not s.rank for s in states) or any(not _same_rows(s, states[0]) for s in states):
        return "its states have no rows in common"
    rows: Dim = states[0].shape[0]
    if isinstance(rows, int) and rows < 2:
        return "it has one row"
    found = _Marks(region, rows)
    why = found.mark(states) or _unshared([region.outputs[k] for k in node.attrs["results"]], found)
    shared, own = (sum(_weights(n, found, each) for n in region.nodes) for each in (False, True))
    if not why and shared + own > MOST_WEIGHTS:
        why = f"its weights, {shared + own} bytes, stay in no thread's cache"
    if why:
        return why
    step = found.region()
    products, operations = (substitute(x, {ROWS_SYMBOL: 1}) for x in total(step.nodes))
    work = rows * (products + operations)
    if isinstance(work, int) and work < LEAST_WORK:
        return "a step is little work"
    return Apart(step, rows, shared, own, products // 2, operations)


def is_apart(region: Graph, stored: Sequence[Value], layout: Layout) -> str:
    """Why the planned step cannot be divided after all; "" if it can. `stored` is what its kernels write."""
    if any(not v.rank or v.shape[0] != ROWS for v in stored):
        return "a kernel of its step stores what all rows share"
    if any(isinstance(each := prod(v.shape[1:]), int) and each < NARROWEST for v in stored):
        return "its rows are so narrow that vectors run along them"
    ordered = {v.id for v in region.values()} & (layout.order.keys() | layout.pitches.keys())
    return "its rows are not the outermost axis in memory" if ordered else ""


def _same_rows(a: Value, b: Value) -> bool:
    return always_equal(a.shape[0], b.shape[0])


def _unshared(results: Sequence[Value], found: _Marks) -> str:
    return "" if all(v.id in found.marked for v in results) else "a result is of all rows"


def _weights(node: Node, found: _Marks, each: bool) -> int:
    """Bytes of a product's right operand, a constant, where all rows share it; of one row's, where each has its own."""
    if node.op != "matmul" or (constant := constant_of(_viewed(node.operands[1]))) is None:
        return 0
    marked = node.operands[1].id in found.marked
    return constant.nbytes // (constant.shape[0] if marked else 1) if marked is each else 0


def _viewed(value: Value) -> Value:
    """What a chain of views is of."""
    while value.node is not None and value.node.op in VIEWS:
        value = value.node.operands[0]
    return value


def _aligned(node: Node) -> list[Value]:
    """The operands whose first axis is that of the result, or 1."""
    rank = node.outputs[0].rank
    operands = node.operands[:1] if node.op == "matmul" and rank == 2 else node.operands
    return [v for v in operands if v.rank == rank > 0]


class _Marks:
    """Which values of a region have rows. `marked` are their ids."""

    def __init__(self, region: Graph, rows: Dim) -> None:
        self.graph, self.rows = region, rows
        self.marked: set[int] = set()

    def has_room(self, value: Value) -> bool:
        """Whether the first axis may be that of the rows."""
        return value.rank > 0 and always_equal(value.shape[0], self.rows)

    def mark(self, states: Sequence[Value]) -> str:
        """Marks the states, and all that meets them; says why that is not possible, or ""."""
        self.marked = {v.id for v in states}
        size = 0
        while size != len(self.marked):
            size = len(self.marked)
            for node in self.graph.nodes:
                together = self.together(node)
                if any(v.id in self.marked for v in together):
                    self.marked |= {v.id for v in together}
        return next((why for why in map(self.misfit, self.graph.nodes) if why), "")

    def together(self, node: Node) -> list[Value]:
        """Values of which all have rows if one of them has: results, and operands that meet them along that axis."""
        met: Sequence[Value] = _aligned(node)
        if node.op == "reshape" or lookup(node.op).kind is Kind.REDUCTION:
            met = node.operands
        return [*filter(self.has_room, met), *node.outputs]

    def misfit(self, node: Node) -> str:
        """Why rows of this node cannot be computed apart from others; "" where they can, or where it has none."""
        kind, rules = lookup(node.op).kind, _KEEPS.get(node.op)
        if kind not in (Kind.POINTWISE, Kind.VIEW, Kind.REDUCTION) and node.op != "matmul":
            return f"{node.op} is no loop over rows"
        marked = {v.id for v in (*node.operands, *node.outputs)} & self.marked
        if node.op == "matmul" and constant_of(_viewed(node.operands[1])) is None:
            return "what it multiplies by is no constant"
        if not marked:
            return ""
        if node.attrs.get("wide") and node.operands[1].id in marked:
            return "each row is multiplied by integers of its own"
        together = self.together(node)
        if node.op == "iota" or not all(self.has_room(v) for v in together) or marked - {v.id for v in together}:
            return f"{node.op} mixes rows"
        moved = node.operands if node.op == "concat" else node.operands[:1] if node.op in _MOVES else ()
        others = [v for v in _aligned(node) if v.shape[0] != 1] if rules is None or node.op == "expand" else []
        if any(v.id not in self.marked for v in (*moved, *others)):
            return f"{node.op} makes rows of others"
        if rules is None:
            return "" if kind is Kind.POINTWISE or node.op == "matmul" else f"{node.op} has no rule for rows"
        return "" if rules(node) else f"{node.op} moves rows"

    def region(self) -> Graph:
        """The region for `ROWS` rows. Nodes without rows are shared."""
        new: dict[int, Value] = {v.id: self._value(v) for v in self.graph.inputs}
        nodes = []
        for node in self.graph.nodes:
            if not any(v.id in self.marked for v in node.outputs) and not any(v.id in new for v in node.operands):
                nodes.append(node)
                continue
            outputs = [self._value(v) for v in node.outputs]
            new |= {v.id: w for v, w in zip(node.outputs, outputs, strict=True)}
            inputs = [None if v is None else new.get(v.id, v) for v in node.inputs]
            nodes.append(Node(node.op, inputs, outputs, self._attrs(node), (), node.origin))
        ends = [new.get(v.id, v) for v in self.graph.outputs]
        inner = [new[v.id] for v in self.graph.inputs]
        return Graph(inner, ends, nodes, list(self.graph.output_names), self.graph.name)

    def _value(self, v: Value) -> Value:
        if v.id not in self.marked:
            return Value(v.type, v.name, v.data)
        return Value(v.t.with_shape((ROWS, *v.shape[1:])), v.name)

    def _attrs(self, node: Node) -> dict[str, object]:
        attrs = dict(node.attrs)
        name = {"reshape": "shape", "expand": "shape", "slice": "sizes"}.get(node.op)
        if name is not None and node.output.id in self.marked:
            attrs[name] = (ROWS, *attrs[name][1:])
        return attrs


def _sliced(node: Node) -> bool:
    starts, steps = node.attrs["starts"], node.attrs["steps"]
    return bool(starts[0] == 0 and steps[0] == 1)


def _reduced(node: Node) -> bool:
    return 0 not in node.attrs.get("axes", (node.attrs.get("axis"),))


_MOVES = ("reshape", "transpose", "slice", "pad")  # whose rows are those of their operand, never a broadcast
# By op: whether it leaves the rows where they are. All values of a node that meet have the rows on their first axis.
_KEEPS: dict[str, Callable[[Node], bool]] = {
    "constant": lambda node: True,
    "reshape": lambda node: True,
    "expand": lambda node: True,
    "transpose": lambda node: node.attrs["perm"][0] == 0,
    "slice": _sliced,
    "pad": lambda node: not any(node.attrs[k][0] for k in ("low", "high", "interior")),
    "concat": lambda node: node.attrs["axis"] != 0,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin"), _reduced),
}
