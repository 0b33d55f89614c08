"""Attention of few queries over many keys, in parts: what a program found of its keys, and the kernel that joins them.

A model that generates text has one query for each head, and there are fewer heads than multiprocessors. So the keys of
a head are divided over programs. Each stores its sums, and of each row their maximum and total; another kernel joins
them, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.codegen.triton.epilogue import Tile
from onnxc.codegen.triton.kernel import power
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType

INFINITY = "float('-inf')"


@dataclass(frozen=True)
class Parts:
    """What programs leave for the kernel that joins it.

    Attributes:
        count: parts of the keys of a head.
        rows: of a head's tile that count.
        columns: of a result.
        sums: [heads, parts, rows, columns].
        facts: [heads, parts, rows, 2], the maximum of the scores and the sum of the powers.
    """

    count: int
    rows: Dim
    columns: int
    sums: Value
    facts: Value

    @staticmethod
    def of(heads: Dim, count: int, rows: Dim, columns: int) -> Parts:
        """Of so many heads."""
        shape = (heads, count, rows)
        sums, facts = (Value(TensorType(dtypes.float32, (*shape, n))) for n in (columns, 2))
        return Parts(count, rows, columns, sums, facts)

    def bounds(self, keys: str, step: int) -> list[str]:
        """Statements that narrow the bounds `whole` and `end` to the part's own keys, from `first` on."""
        chunk = f"(({keys} + {self.count * step - 1}) // {self.count * step} * {step})"
        return [
            f"first = part * {chunk}", f"last = first + {chunk}",
            "whole = tl.maximum(tl.minimum(whole, last), first)", "end = tl.minimum(end, last)",
        ]  # fmt: skip

    def stored(self, tile: Tile) -> list[str]:
        """Statements that store what was found. `pid` is the head's number, `part` that of the part."""
        sums, facts = (tile.buffers.pointer(x) for x in (self.sums, self.facts))
        rows, count = tile.shape[0], tile.index(self.rows)
        masks = " & ".join(v.mask for v in tile.variables.values() if v.mask and v.name in ("m", "n"))
        return [
            f"own = tl.arange(0, {rows})", f"at = (pid * {self.count} + part) * {count} + own",
            f"tl.store({sums} + at[:, None] * {self.columns} + n, acc{f', mask={masks}' if masks else ''})",
            f"tl.store({facts} + at * 2, top, mask=own < {count})",
            f"tl.store({facts} + at * 2 + 1, total, mask=own < {count})",
        ]  # fmt: skip

    def joined(self, tile: Tile, exponent: str, factor: str | None, exp2: str) -> list[str]:
        """Statements that make `acc` and `total` of all parts of row `one` of head `pid`.

        Args:
            exponent: of 2, for the maxima `tops`, less `base`.
            factor: of the highest one in `base`; None where it comes later.
            exp2: the function.
        """
        sums, facts = (tile.buffers.pointer(x) for x in (self.sums, self.facts))
        lanes = power(self.count)
        counted = [f"each < {self.count}"] if lanes != self.count else []
        wide = [v.mask for v in tile.variables.values() if v.mask and v.name == "n"]
        mask = f", mask={counted[0]}, other={{}}" if counted else ""
        masks = " & ".join([*(f"({c})[:, None]" for c in counted), *wide])
        base = f"tl.where(high == {INFINITY}, 0.0, high)"
        return [
            f"each = tl.arange(0, {lanes})", f"at = (pid * {self.count} + each) * {tile.index(self.rows)} + one",
            f"tops = tl.load({facts} + at * 2{mask.format(INFINITY)})",
            f"totals = tl.load({facts} + at * 2 + 1{mask.format('0.0')})",
            f"sums = tl.load({sums} + at[:, None] * {self.columns} + n{f', mask={masks}, other=0.0' if masks else ''})",
            "high = tl.reduce(tops, 0, ox_max)", f"base = {base if factor is None else f'{base} * {factor}'}",
            f"share = {exp2}({exponent})",
            "total = tl.reduce(totals * share, 0, ox_add) + tl.zeros((1,), tl.float32)",
            "acc = tl.reduce(sums * share[:, None], 0, ox_add)[None, :]",
        ]  # fmt: skip
