"""What every template's emitter needs: buffers, names of sizes, and packed weights."""

from __future__ import annotations

from onnxc.choices import Choice
from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.codegen.weights import WeightStore
from onnxc.ir.expr import Dim, Symbol, symbols
from onnxc.ir.graph import Value
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout


class TemplateEmitter:
    """What every template needs: buffers, names of sizes, and packed weights."""

    def __init__(self, group: Group, layout: Layout, lanes: int, weights: WeightStore, options: KernelOptions) -> None:
        self.group, self.layout, self.lanes, self.weights, self.options = group, layout, lanes, weights, options
        self.choice: Choice | None = None  # between algorithms, where there is one
        self.buffers: list[Value] = []
        self.packed: list[tuple[str, int]] = []
        self.by_row: dict[int, int] = {}  # of these: bytes of a row, where each has its own
        self.sizes: dict[Symbol, str] = {}

    def pointer(self, storage: Value) -> str:
        """The name of a buffer in the kernel."""
        for k, v in enumerate(self.buffers):
            if v is storage:
                return f"p{k}"
        self.buffers.append(storage)
        return f"p{len(self.buffers) - 1}"

    def size(self, d: Dim) -> str:
        """An expression over sizes alone."""
        self.sizes.update({s: s.key for s in symbols(d)})
        return spelling.index(d, self.sizes)

    def index(self, d: Dim, names: dict[Symbol, str]) -> str:
        """An expression over loops and sizes."""
        self.sizes.update({s: s.key for s in symbols(d) if s not in names})
        return spelling.index(d, {**self.sizes, **names})

    def epilogue(self, epilogue: Epilogue) -> list[str]:
        """The epilogue's statements. The sizes that they name (of a bias, say) become the kernel's own."""
        lines = epilogue.emit()
        self.sizes.update({s: s.key for s in epilogue.emitter.size_symbols()})
        return lines

    def source(
        self, body: list[str], items: str, include: str, scratch: str, before: list[str], kind: str, few: str = "0"
    ) -> KernelSource:
        return KernelSource(
            text="\n".join(indent(body)), buffers=self.buffers, items=items, symbols=sorted(s.key for s in self.sizes),
            weights=self.packed, by_row=self.by_row, includes=frozenset({include}), before=before, scratch=scratch, kind=kind,
            choice=self.choice, few=few,
        )  # fmt: skip

    def loops(self, loops: list[tuple[Symbol, Dim]], counter: str, names: dict[Symbol, str]) -> list[str]:
        """Statements that decode a counter into loop variables, outermost first."""
        lines = []
        rest = counter
        for k, (s, d) in reversed(list(enumerate(loops))):
            names[s] = f"b{k}"
            lines.append(f"const i64 b{k} = {rest}{f' % {self.size(d)}' if k else ''};")
            rest = f"({rest} / {self.size(d)})"
        return lines
