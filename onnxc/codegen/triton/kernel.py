"""A generated kernel: its text, and what it must be launched with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.extern import Multiplication, Start
from onnxc.codegen.triton.terms import Buffers
from onnxc.errors import LimitError
from onnxc.ir.expr import Call, Dim, Expr, bounds, exceeds, is_nonnegative, of, symbols
from onnxc.ir.graph import Value
from onnxc.ir.reach import reach
from onnxc.loops.loop_index import is_size
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout

OWN = "ox_own_"  # the beginning of names of a kernel's own functions
WIDE = 1 << 31  # elements (or programs) from which an index needs 64 bits
FAR = 1 << 30  # elements in all that 32 bits do for: with lanes behind the end, and places outside of an image


@dataclass
class Kernel:
    """One kernel: the body of a Triton function of `pid`, over a grid of `programs`.

    Where `resident` is not 0, a program does the work of `pid`, `pid + tl.num_programs(0)` and so on: there may be
    fewer of them, that many for each multiprocessor. `back` then says, if there are no helpers, whether to begin at the
    end.

    `helpers` are functions of its own, in Gluon as the kernel then is; `ox_own_` in their names stands for its own
    name. `scratch` are buffers that it leaves for those after it in the same group. `cleared` are buffers of its own
    that must be zero before it runs. `extern` is what a library does in place of all kernels of the group, where it is
    found: the rank of its algorithm, and the product.

    `when` is 1 where it runs and 0 where it does not, which sizes decide (`either`); then its buffers are empty, too.
    Of kernels with the same `task` the first alone runs: what it leaves in its buffers serves all groups.
    """

    lines: list[str]
    buffers: Buffers
    programs: Dim
    warps: int
    stages: int = 3
    kind: str = "loops"
    wide: bool = False  # whether sizes are passed with 64 bits
    resident: int = 0
    helpers: list[str] = field(default_factory=list)
    scratch: tuple[Value, ...] = ()
    cleared: tuple[Value, ...] = ()
    extern: tuple[int, Multiplication[Start]] | None = None
    when: Dim = 1
    task: Hashable = None

    @property
    def grid(self) -> Dim:
        """Programs that are launched: none where it does not run."""
        return self.programs * self.when

    @property
    def own(self) -> tuple[Value, ...]:
        """Its buffers."""
        return (*self.scratch, *self.cleared)

    @property
    def sizes(self) -> list[str]:
        """The dynamic dims that it takes, in order."""
        return sorted(self.buffers.sizes)

    def parameters(self) -> list[tuple[str, str]]:
        """Name and type of each parameter."""
        size = "i64" if self.wide else "i32"
        found = [(f"p{k}", spelling.pointer(v.dtype)) for k, v in enumerate(self.buffers.storages)]
        found += [(s, size) for s in self.sizes]
        return [*found, ("error", "*i64"), ("call", "i32")] if self.buffers.reports else found

    def text(self, back: bool = False) -> str:
        """The function without its name. `back`: programs go from the last to the first; not where it has helpers."""
        names = ", ".join(name for name, _ in self.parameters())
        wide = ".to(tl.int64)" if self.wide else ""
        turned = list[str]()
        own = ["", "", *self.helpers] if self.helpers else []
        number = "tl.program_id(0)"
        if self.resident and not self.helpers:
            turned.append(f"    back: tl.constexpr = {back}")
        elif back:
            number = "(tl.num_programs(0) - 1 - tl.program_id(0))"
        return "\n".join([f"({names}):", *turned, f"    pid = {number}{wide}", *indent(self.lines), *own])


def indent(lines: list[str]) -> list[str]:
    """Lines one block further in."""
    return [f"    {line}" for line in lines]


def either(which: Dim, some: Callable[[], list[Kernel]], others: Callable[[], list[Kernel]]) -> list[Kernel]:
    """The kernels `some` where `which` is 1, `others` where it is 0: of both where only the run knows, which then
    launches those of one, and has no memory for the buffers of the other.
    """
    if isinstance(which, int):
        return some() if which else others()
    forms = ((others(), 1 - which), (some(), which))
    return [replace(k, when=k.when * when) for kernels, when in forms for k in kernels]


def far(
    values: Iterable[Value],
    *dims: Dim,
    rows: tuple[Dim, int | None] = (0, None),
    numbers: Mapping[Dim, bool] | None = None,
) -> Dim:
    """1 where positions in these buffers, or as many things as `dims` say, may need more than 32 bits, 0 where they do
    not: an expression if only the run knows. `rows`: a size, and the most that it is here. `numbers`: what a kernel
    computes with 32 bits, as its `Buffers` have it.
    """
    sizes = dict.fromkeys(_at_most(d, *rows) for d in [*(v.t.size for v in values), *dims])
    large = [d for d in sizes if not _small(d)]
    try:
        large += _reached(numbers or {}, sum(large))
        return 1 if any(map(_is_long, large)) else exceeds(sum(large), FAR)
    except LimitError:  # too long an expression to ask
        return 1


def _reached(numbers: Mapping[Dim, bool], known: Dim) -> list[Dim]:
    """How far numbers of a kernel reach, besides those that are small where what is `known` is. A size may be large
    where another one is 0, and so may a product of which a lesser size is taken. Of a sum of products, such as a place
    in a buffer, the parts may overflow where the sum does not.
    """
    found: list[Dim] = []
    sizes = sorted({s for d in numbers for s in symbols(d) if is_size(s)})
    parts = [part for d, whole in numbers.items() for part in (*([d] if whole else ()), *_arguments(d))]
    for most in dict.fromkeys([*map(of, sizes), *map(reach, dict.fromkeys(parts))]):
        if not _small(most) and not is_nonnegative(known + FAR // 2 - most):
            found.append(most)
            known = known + most
    return found


def _arguments(d: Dim) -> Iterator[Dim]:
    """What has to be right for an expression to be right but for multiples of 2**32: what is divided or compared."""
    for call in d.atoms() if isinstance(d, Expr) else ():
        for part in call.args if isinstance(call, Call) else ():
            yield part
            yield from _arguments(part)


def _is_long(d: Dim) -> bool:
    """Whether a size is always large, or has factors that no number of 32 bits is."""
    return isinstance(d, int) or any(c >= WIDE for _, c in d.terms)


def is_wide(values: Iterable[Value], *dims: Dim, rows: tuple[Dim, int | None] = (0, None)) -> bool:
    """Whether that is so for some sizes."""
    return far(values, *dims, rows=rows) != 0


def _at_most(d: Dim, rows: Dim, most: int | None) -> Dim:
    """The greatest that `d` can be where there are that many rows: a number, where it is a multiple of what they are.

    >>> from onnxc.ir.expr import Sym
    >>> b = Sym("b")
    >>> _at_most(b * 768 + 5, b * 49, 100)
    1541
    """
    if most is None or isinstance(d, int) or isinstance(rows, int) or len(rows.terms) != 1 or rows.terms[0][1] < 1:
        return d
    ((what, each),) = rows.terms
    parts: list[Dim] = [c * (most // each) if m == what and c > 0 else Expr(((m, c),)) for m, c in d.terms if m]
    return sum(parts, sum(c for m, c in d.terms if not m))


def narrow(number: str, wide: bool) -> str:
    """A number of 32 bits, where sizes have 64."""
    return f"({number}).to(tl.int32)" if wide and not number.isdigit() else number


def touched(group: Group, layout: Layout) -> list[Value]:
    """The buffers that the kernel of a template may read or write, in its epilogue too."""
    return [layout.storage(v) for n in group.nodes for v in n.operands] + group.stored()


def _small(d: Dim) -> bool:
    most = bounds(d)[1]
    return most is not None and most < WIDE


def power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, n - 1).bit_length()
