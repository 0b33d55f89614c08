"""Decision trees: each lane takes a row of features through a tree (onnxc/primitives/trees.py says what a table is)."""

from __future__ import annotations

from onnxc.codegen.triton.kernel import Kernel, indent
from onnxc.codegen.triton.writer import ERR_SHAPE, Writer
from onnxc.ir import dtypes
from onnxc.ir.expr import ceildiv, is_less
from onnxc.ir.graph import Node
from onnxc.planner.layout import Layout
from onnxc.primitives.trees import EQUAL, FEATURES, MISSING, WORDS

WALKS = 256  # of a program


def leaves(node: Node, layout: Layout) -> list[Kernel]:
    """The kernel of `tree_leaves`. Neighbouring lanes take neighbouring rows through one tree."""
    x, nodes, roots = node.operands
    out, flags = node.output, node.attrs["flags"]
    rows, trees = out.shape
    w = Writer(layout, (x, nodes, roots, out), rows * trees)
    (row, step), (out_row, out_tree) = ([w.size(s) for s in layout.strides(v)] for v in (x, out))
    (apart,), words = layout.strides(roots), WORDS[x.dtype]
    w.lanes("lane", f"pid * {WALKS}", WALKS)
    w.lines += [
        f"xm = lane < {w.size(rows * trees)}", f"r = lane % {w.size(rows)}", f"t = lane // {w.size(rows)}",
        f"at = tl.load({w.start(roots)} + t * {w.size(apart)}, mask=xm, other=0)",
    ]  # fmt: skip
    if not is_less(node.attrs["features"], x.shape[1] + 1):
        width = w.size(x.shape[1])
        w.buffers.reports = True
        w.lines += [
            f"fits = {node.attrs['features']} <= {width}",
            f"ox_report(error, xm & (fits == 0), {ERR_SHAPE}, call, {width})",
            "xm = xm & fits",
        ]
    double = x.dtype is dtypes.float64
    split, feature = ("ox_double(here)", 2) if double else ("tl.load(here).to(tl.float32, bitcast=True)", 1)
    first = ["first = v <= split"]
    if flags & EQUAL:
        first.append(f"first = first & ((v >= split) | ((f & {EQUAL}) == 0))")
    if flags & MISSING:
        first.append("first = first | ((v != v) & (f < 0))")
    w.lines += [
        f"for turn in range(0, {node.attrs['steps']}):",
        *indent([
            f"here = {w.start(nodes)} + at * {words}", f"split = {split}", f"f = tl.load(here + {feature})",
            f"v = tl.load({w.start(x)} + r * {row} + (f & {FEATURES - 1}) * {step}, mask=xm, other=0.0)", *first,
            f"at = tl.load(here + {feature + 1}) + tl.where(first, 0, 1)",
        ]),
        f"leaf = tl.load({w.start(nodes)} + at * {words} + {feature + 2})",
        f"tl.store({w.start(out)} + r * {out_row} + t * {out_tree}, leaf, mask=xm)",
    ]  # fmt: skip
    return [w.kernel(ceildiv(rows * trees, WALKS), WALKS * 4)]
