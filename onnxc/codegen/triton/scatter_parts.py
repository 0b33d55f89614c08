"""What the kernels of scatters have in common: how the result begins, how elements are joined, where slices go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import Kernel
from onnxc.codegen.triton.writer import Reach, Writer
from onnxc.ir.expr import Dim, ceildiv
from onnxc.ir.graph import Node, Value
from onnxc.planner.layout import Layout
from onnxc.primitives.indexing import scatter_depth

COPIED = 1024  # elements that a program copies


def begun(layout: Layout, source: Value, target: Value, marks: Value | None = None) -> Kernel:
    """The result of a scatter begins as the data, and the words of its places, `marks`, as zeros."""
    order = layout.order_of(target)
    strides = [[layout.strides(v)[i] for i in order] for v in (source, target)]
    reach = Reach.of([target.shape[i] for i in order], *strides)
    w = Writer(layout, (source, target), reach.count)
    w.lanes("x", f"pid * {COPIED}", COPIED)
    w.lines.append(f"xm = x < {w.size(reach.count)}")
    a, b = w.spread("x", reach)
    w.lines += [
        f"v = tl.load({w.start(source)} + {a}, mask=xm, other=0)", f"tl.store({w.start(target)} + {b}, v, mask=xm)",
    ]  # fmt: skip
    if marks is not None:
        w.lines.append(f"tl.store({w.start(marks)} + x, tl.zeros_like(x), mask=x < {w.size(marks.t.size)})")
    kernel = w.kernel(ceildiv(reach.count, COPIED), COPIED)
    return kernel if marks is None else replace(kernel, scratch=(marks,))


def find(w: Writer, at: str, extent: str, mask: str = "xm", reports: bool = True) -> None:
    """Statements that load the position of each of the lanes `mask`, ``to``, and which are ``good``: in bounds."""
    w.lines += [
        f"raw = tl.load({at}, mask={mask}, other=0)", f"to = ox_wrapped(raw, {extent})",
        f"good = {mask} & (to >= 0) & (to < {extent})",
    ]  # fmt: skip
    if reports:
        w.report_index(f"{mask} & ((to < 0) | (to >= {extent}))", "raw")


def joined(node: Node) -> str:
    """The accumulator `acc` joined with the update `u`, as a term; each sum or product of 16-bit floats is rounded, as
    it would be in memory.
    """
    dtype = node.output.dtype
    name = str(node.attrs["reduction"])
    if dtype.name == "bool":
        name = {"add": "max", "mul": "min"}.get(name, name)
    text = {
        "none": "u", "add": "(acc + u)", "mul": "(acc * u)", "max": "ox_max(acc, u)", "min": "ox_min(acc, u)",
    }[name]  # fmt: skip
    if name in ("add", "mul"):
        text = spelling.rounded(text, dtype)
    return f"{text}.to({'tl.uint8' if dtype.name == 'bool' else spelling.computed(dtype)})"


def row_major(shape: Sequence[Dim], step: Dim = 1) -> list[Dim]:
    """How far apart neighbours along each dim are, without gaps; `step` along the last."""
    found: list[Dim] = []
    for d in reversed(shape):
        found.insert(0, step)
        step = step * d
    return found


class Slices:
    """A scatter of slices. Each row of its index names a place in the result, for one slice of the updates.

    Attributes:
        depth: how many dims of the data a row of the index names a position in.
        rows: all rows, as they lie in the index and in the updates.
        places: the shape of the dims that rows name positions in.
    """

    def __init__(self, node: Node, layout: Layout) -> None:
        self.layout, self.out = layout, node.output
        self.data, self.index, self.updates = node.operands
        self.depth, self._lead = scatter_depth([v.t for v in node.operands]), self.index.rank - 1
        self.rows = Reach.of(
            self.index.shape[:-1], layout.strides(self.index)[:-1], layout.strides(self.updates)[: self._lead]
        )
        self.places = self.data.shape[: self.depth]

    def slice(self, *tensors: Value) -> Reach:
        """The elements of one slice, as they lie in `tensors` (of data, result and updates)."""
        inner = [self.layout.strides(v)[self._lead if v is self.updates else self.depth :] for v in tensors]
        return Reach.of(self.data.shape[self.depth :], *inner)

    def at_index(self, w: Writer, at: str, d: int) -> str:
        """The address of a row's position along dim `d`, where the row begins at the offset `at`."""
        return f"{w.start(self.index)} + {at} + {w.size(d * self.layout.strides(self.index)[-1])}"

    def write_places(self, w: Writer, reports: bool = True) -> None:
        """Statements that find where the rows `i` go, ``to0``, ``to1``, ...: the offsets ``at_data`` and ``at_out``,
        and which of them are ``good``: `im`, and in bounds. The others of `im` are reported, or not.
        """
        at_index, _ = w.offsets("i", self.rows)
        good = ["im"]
        for d, size in enumerate(self.places):
            extent = w.size(size)
            w.lines += [
                f"raw{d} = tl.load({self.at_index(w, at_index, d)} + tl.zeros_like(i), mask=im, other=0)",
                f"to{d} = ox_wrapped(raw{d}, {extent})",
            ]
            if reports:
                w.report_index(f"im & ((to{d} < 0) | (to{d} >= {extent}))", f"raw{d}")
            good.append(f"(to{d} >= 0) & (to{d} < {extent})")
        data, out = (self._along(w, self.layout.strides(v)[: self.depth]) for v in (self.data, self.out))
        w.lines += [f"good = {' & '.join(good)}", f"at_data = {data}", f"at_out = {out}"]

    def flat(self, w: Writer) -> str:
        """The number of the place that the rows `i` go to, among all places."""
        return self._along(w, row_major(self.places))

    def _along(self, w: Writer, steps: Sequence[Dim]) -> str:
        return f"{w.along([f'to{d}' for d in range(self.depth)], steps)} + tl.zeros_like(i)"

    def same_place(self, w: Writer, j: str, to: str = "to") -> list[str]:
        """Statements that find which rows `j` go to the place `to`, as ``same_j``, and where they lie in the updates,
        ``at_j``.
        """
        inner = w.aside()
        at_index, at_updates = inner.offsets(j, self.rows)
        tests = [f"inside_{j}"]
        for d, size in enumerate(self.places):
            at = f"{self.at_index(w, at_index, d)} + tl.zeros_like({j})"
            inner.lines.append(f"there_{j}{d} = ox_wrapped(tl.load({at}, mask=inside_{j}, other=0), {w.size(size)})")
            tests.append(f"(there_{j}{d} == {to}{d})")
        inside = f"inside_{j} = {j} < {w.size(self.rows.count)}"
        return [inside, *inner.lines, f"same_{j} = {' & '.join(tests)}", f"at_{j} = {at_updates} + tl.zeros_like({j})"]

    def in_updates(self, w: Writer, row: str) -> tuple[list[str], str]:
        """Statements that take a row's number apart, and the offset of its slice in the updates."""
        inner = w.aside()
        _, at_updates = inner.offsets(row, self.rows)
        return inner.lines, at_updates
