"""Running sums (`cumsum`): a tile [lines, positions], and a carry from piece to piece of a long line.

What is summed is computed as it is read, and what follows from the sums before they are stored.
"""

from __future__ import annotations

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import emit_epilogue
from onnxc.codegen.triton.kernel import Kernel, indent, power
from onnxc.codegen.triton.lines import Lines, as_term
from onnxc.codegen.triton.terms import TileVariable
from onnxc.codegen.triton.writer import Writer
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import always_equal, ceildiv
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout

SCANNED = 2048  # elements of a tile


def running_sums(group: Group, layout: Layout) -> list[Kernel]:
    """The kernel of a running sum."""
    node = group.node
    assert node is not None
    if node.operands[0].dtype.name == "bool":
        raise UnsupportedError("a running sum of bool", node=", ".join(map(str, group.origin)))
    lines = Lines(group, layout, mask="xm")
    n = lines.n
    width = min(SCANNED, power(n)) if isinstance(n, int) else SCANNED // 4
    whole = isinstance(n, int) and n <= width
    side_by_side = bool(lines.others) and not always_equal(layout.strides(node.output)[lines.axis], 1)
    if side_by_side and not whole:
        width = min(width, 128)
    many = power(lines.count) if isinstance(lines.count, int) else 32
    rows = lines.lanes = max(1, min(32 if side_by_side else 8, SCANNED // width, many))
    w = lines.writer()
    w.lanes("x", f"pid * {rows}", rows, "[:, None]")
    w.lines.append(f"xm = x < {w.size(lines.count)}")
    lines.divide(w, "x")
    if whole:
        w.lanes("r", "0", width, "[None, :]")
        w.lines += [*_sums(w, lines, (rows, width)), *_end(w, lines, (rows, width))]
        return [w.kernel(ceildiv(lines.count, rows), rows * width)]
    kind, nothing = spelling.computed(node.output.dtype), _nothing(lines)
    w.lines += [
        f"carry = tl.full(({rows}, 1), {nothing}, {kind})",
        f"lane = tl.arange(0, {width}){'.to(tl.int64)' if w.wide else ''}[None, :]",
        f"for r0 in range(0, {w.size(n)}, {width}):",
        *indent([
            "r = r0 + lane", *_sums(w, lines, (rows, width)), f"s = (s + carry).to({kind})",
            f"carry = ox_sum(tl.where(lane == {width - 1}, s, {nothing}), 1).to({kind})",
            *_end(w, lines, (rows, width)),
        ]),
    ]  # fmt: skip
    return [w.kernel(ceildiv(lines.count, rows), rows * width)]


def _nothing(lines: Lines) -> str:
    return "-0.0" if lines.x.dtype.is_float else "0"  # -0.0 + x is x, whatever the x


def _sums(w: Writer, lines: Lines, shape: tuple[int, int]) -> list[str]:
    """Statements that compute the sums `s` of a piece of lines, and where they belong, `to`."""
    node, n = lines.group.node, w.size(lines.n)
    assert node is not None
    shift, back = (1 if node.attrs.get("exclusive") else 0), bool(node.attrs.get("reverse"))
    read = f"(r >= {shift}) & (r < {n})" if shift else f"r < {n}"
    at, to = (f"{n} - 1 - {r}" if back else r for r in (f"(r - {shift})" if shift else "r", "r"))
    text, found = lines.read(w, shape, TileVariable("at", 1, shape[1], "counts"))
    kind = spelling.computed(node.output.dtype)
    return [
        f"counts = {read}", f"within = r < {n}", f"at = {at}", f"to = {to}", *text, as_term("v", found, lines.x),
        f"v = tl.where(xm & counts, v, tl.full((1, 1), 0, {kind}))",
        f"s = tl.associative_scan(v, 1, ox_add).to({kind})",
    ]  # fmt: skip


def _end(w: Writer, lines: Lines, shape: tuple[int, int]) -> list[str]:
    """Statements that finish and store the sums."""
    node = lines.group.node
    assert node is not None
    tile, places = lines.tile(w, shape, TileVariable("to", 1, shape[1], "within"))
    end = emit_epilogue(lines.group, lines.layout, places, tile, "s")
    return [f"s = {spelling.rounded('s', node.output.dtype)}", *end]
