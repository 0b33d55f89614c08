"""What kernels are written with that are no loop nests: indices over dims that tensors share, sizes, pointers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.codegen.cpp.routine import collapse
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import Kernel, is_wide, power
from onnxc.codegen.triton.terms import Buffers, Scope, TermEmitter
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Value
from onnxc.planner.layout import Layout

ERR_INDEX, ERR_SHAPE, ERR_VALUE = 3, 5, 6  # as in runtime.h


@dataclass(frozen=True)
class Reach:
    """Dims that a flat index counts, and how far each tensor moves along each of them."""

    sizes: tuple[Dim, ...]
    steps: tuple[tuple[Dim, ...], ...]  # of each tensor

    @staticmethod
    def of(shape: Sequence[Dim], *strides: Sequence[Dim]) -> Reach:
        """Neighbours that all tensors walk through as one are merged."""
        loops = collapse(shape, *strides)
        return Reach(tuple(x.size for x in loops), tuple(tuple(x.steps[k] for x in loops) for k in range(len(strides))))

    @property
    def count(self) -> Dim:
        return prod(self.sizes)


class Writer:
    """The text of one kernel under way."""

    def __init__(self, layout: Layout, values: Sequence[Value], *dims: Dim) -> None:
        self.layout, self.lines, self.buffers = layout, list[str](), Buffers()
        self.wide = is_wide([layout.storage(v) for v in values], *dims)
        self._sizes = TermEmitter({}, (), self.buffers)

    def aside(self) -> Writer:
        """A writer of lines that come elsewhere in the same kernel: in a loop, say."""
        found = Writer(self.layout, ())
        found.buffers, found.wide, found._sizes = self.buffers, self.wide, self._sizes
        return found

    def size(self, d: Dim) -> str:
        """A size, or a sum of products of such."""
        return self._sizes.index(d, Scope())

    def start(self, v: Value) -> str:
        """A pointer to a value's first element."""
        offset = self.layout.offset(v)
        name = self.buffers.pointer(self.layout.storage(v))
        return name if offset == 0 else f"{name} + {self.size(offset)}"

    def lanes(self, name: str, start: str, count: int, view: str = "") -> None:
        """An index with lanes: `view` as in ``[:, None]``."""
        kind = ".to(tl.int64)" if self.wide else ""
        self.lines.append(f"{name} = {start} + tl.arange(0, {count}){kind}{view}")

    def offsets(self, index: str, reach: Reach) -> list[str]:
        """For each tensor, the offset that a flat index gives; its digits are computed once."""
        names = self.digits(index, reach.sizes)
        return [self.along(names, steps) for steps in reach.steps]

    def digits(self, index: str, sizes: Sequence[Dim]) -> list[str]:
        """The names of the indices along these dims that a flat index stands for."""
        rest, names = index, list[str]()
        for k, size in reversed(list(enumerate(sizes))):
            name = self.buffers.fresh("i")
            self.lines.append(f"{name} = {rest}{f' % {self.size(size)}' if k else ''}")
            rest = f"({rest} // {self.size(size)})"
            names.insert(0, name)
        return names

    def spread(self, lanes: str, reach: Reach) -> list[str]:
        """As `offsets`, for an index with lanes: an offset of 0 has them too, as the mask of a load must."""
        return [o if o != "0" else f"tl.zeros_like({lanes})" for o in self.offsets(lanes, reach)]

    def along(self, names: Sequence[str], steps: Sequence[Dim]) -> str:
        """The sum of indices times steps, as ``0`` or ``(a * 3 + b)``."""
        parts = [n if s == 1 else f"{n} * {self.size(s)}" for n, s in zip(names, steps, strict=True) if s != 0]
        return f"({' + '.join(parts)})" if parts else "0"

    def report_index(self, bad: str, value: str) -> None:
        """Reports lanes whose index is out of bounds."""
        self.buffers.reports = True
        self.lines.append(f"ox_report(error, {bad}, {ERR_INDEX}, call, {value})")

    def kernel(self, programs: Dim, elements: int) -> Kernel:
        """The kernel of what has been written; `elements` of its tile."""
        warps = max(1, min(8, power(elements // 256)))
        return Kernel(self.lines, self.buffers, programs, warps, kind="opaque", wide=self.wide)


def loaded(at: str, mask: str, dtype: DType) -> str:
    """Elements as terms; a bool stays a byte."""
    text = f"tl.load({at}, mask={mask}, other=0)"
    return text if dtype.name == "bool" else spelling.widened(text, dtype)


def kept(name: str, dtype: DType) -> str:
    """Elements as they are stored."""
    return spelling.narrowed(name, dtype)
