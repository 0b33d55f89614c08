"""What the emitters of routines share: operands as pointers with strides, and loops over lines.

A routine is a function of routines.h or one of its like: what is no loop nest over scalar terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.weights import WeightStore
from onnxc.ir.expr import Dim, always_equal, is_less, prod
from onnxc.ir.graph import Node, Value
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout


@dataclass(frozen=True)
class Axis:
    """A loop over a dim: its size, and the steps of each tensor along it."""

    size: Dim
    steps: tuple[Dim, ...]


def collapse(shape: Sequence[Dim], *strides: Sequence[Dim]) -> list[Axis]:
    """Loops over a shape, outermost first; neighbours that all tensors walk through as one are merged.

    >>> collapse((2, 1, 3, 4), (12, 12, 4, 1), (12, 12, 4, 1))
    [Axis(size=24, steps=(1, 1))]
    >>> collapse((2, 3), (3, 1), (1, 2))
    [Axis(size=2, steps=(3, 1)), Axis(size=3, steps=(1, 2))]
    """
    out: list[Axis] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        before = out[-1] if out else None
        if before and all(always_equal(a, b * size) for a, b in zip(before.steps, steps, strict=True)):
            out[-1] = Axis(before.size * size, tuple(steps))
        else:
            out.append(Axis(size, tuple(steps)))
    return out


def without(xs: Sequence[Dim], axis: int) -> tuple[Dim, ...]:
    """All but one of the sizes or strides."""
    return (*xs[:axis], *xs[axis + 1 :])


def call(routine: str, *args: str) -> str:
    """The statement that calls a routine of routines.h."""
    return f"routines::{routine}({', '.join(args)});"


class RoutineEmitter(TemplateEmitter):
    """Writes a kernel that calls a routine for each of its lines."""

    def __init__(self, group: Group, layout: Layout, lanes: int, weights: WeightStore) -> None:
        super().__init__(group, layout, lanes, weights, KernelOptions())
        assert group.node is not None
        self.node: Node = group.node

    def emit(self) -> KernelSource:
        raise NotImplementedError

    def start(self, value: Value) -> str:
        """The address of a value's first element."""
        pointer = self.pointer(self.layout.storage(value))
        offset = self.layout.offset(value)
        return pointer if offset == 0 else f"{pointer} + {self.size(offset)}"

    def decode(self, counter: str, loops: Sequence[Axis]) -> tuple[list[str], list[str]]:
        """Statements that find the place of the line `counter`, and for each tensor its offset there."""
        lines: list[str] = []
        rest = counter
        for k, loop in reversed(list(enumerate(loops))):
            lines.append(f"const i64 b{k} = {rest}{f' % {self.size(loop.size)}' if k else ''};")
            rest = f"({rest} / {self.size(loop.size)})"
        return lines, self.offsets("b", loops)

    def offsets(self, prefix: str, loops: Sequence[Axis]) -> list[str]:
        """For each tensor, the offset that loop variables prefix0, prefix1, ... give: ` + b0 * 12`."""
        count = len(loops[0].steps) if loops else 8
        each = [[f" + {prefix}{k} * {self.size(s)}" for s in loop.steps] for k, loop in enumerate(loops)]
        return ["".join(steps[i] for steps in each) for i in range(count)]

    def count(self, loops: Sequence[Axis]) -> str:
        """How many points the loops have."""
        return self.size(prod(loop.size for loop in loops))

    def nest(self, prefix: str, loops: Sequence[Axis], body: list[str]) -> list[str]:
        """Loops in order around a body."""
        for k, loop in reversed(list(enumerate(loops))):
            v = f"{prefix}{k}"
            body = [f"for (i64 {v} = 0; {v} < {self.size(loop.size)}; {v}++) {{", *indent(body), "}"]
        return body

    def over_units(self, units: str, work: str, each: list[str]) -> tuple[list[str], list[str]]:
        """The division of units of work into items, for the program and the kernel, and the kernel's loop."""
        head = [f"const i64 units = {units}, each = routines::units_per_item({work});"]
        return head, [
            "const i64 stop = routines::least(last * each, units);",
            "for (i64 t = first * each; t < stop; t++) {", *indent(each), "}",
        ]  # fmt: skip

    def finish(self, head: list[str], body: list[str], before: Sequence[str] = (), scratch: str = "0") -> KernelSource:
        items = "routines::up(units, each)"
        return self.source([*head, *body], items, "routines.h", scratch, [*before, *head], self.node.op)

    def require(self, a: Dim, relation: str, b: Dim) -> list[str]:
        """A check of the kernel that two sizes are equal (==) or ordered (<=), where that is not known."""
        if always_equal(a, b) or (relation == "<=" and is_less(a, b + 1)):
            return []
        left, right = self.size(a), self.size(b)
        fail = f"ctx->api->fail(ctx, OX_ERR_SHAPE, 0, {left});"
        return [f"if (!({left} {relation} {right})) {{ {fail} return; }}"]


CHUNK = 256  # elements of the inner dim that a unit takes at most
# The chunk of the inner dim that unit t takes: w elements.
PICK_CHUNK = ["const i64 from = t % chunks * chunk, w = routines::least(chunk, width - from);"]


def chunks_of(emitter: RoutineEmitter, width: Dim, limit: int = CHUNK) -> list[str]:
    """Statements that divide an inner dim into chunks of at most so many elements."""
    return [
        f"const i64 width = {emitter.size(width)};",
        f"const i64 chunk = routines::columns_per_unit(width, ctx->threads, {limit});",
        "const i64 chunks = routines::up(width, chunk);",
    ]


def is_row_major(v: Value, layout: Layout) -> bool:
    """Whether a value lies in memory without gaps, the last dim innermost."""
    step: Dim = 1
    for size, stride in zip(reversed(v.shape), reversed(layout.strides(v)), strict=True):
        if size != 1 and not always_equal(stride, step):
            return False
        step = step * size
    return True
