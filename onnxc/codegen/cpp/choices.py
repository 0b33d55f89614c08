"""What templates may do, and how one of several kernels for a shape is chosen: by a cost model or as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxc.choices import COST_MODEL, Choice
from onnxc.ir.expr import Dim


@dataclass(frozen=True)
class KernelOptions:
    """What the templates may do.

    Attributes:
        winograd: convolve 3x3 kernels by Winograd's algorithm where it is faster. Its F(4x4) rounds more coarsely
            than a direct sum does: see docs/accuracy.md. Likewise 1x1 kernels and products by Strassen's algorithm.
        tuned: measured decisions by subject, which go before the cost model's.
        vnni: the CPU multiplies and adds four pairs of bytes in one step.
        matrices: it has matrix registers for that (AMX).
        often: the kernel is called again and again by a loop of the program, whose threads are awake meanwhile.
        rows: of a loop whose rows threads divide: how many there are.
    """

    winograd: bool = True
    tuned: tuple[tuple[str, str], ...] = ()
    vnni: bool = False
    matrices: bool = False
    often: bool = False
    rows: Dim | None = None

    def decide(self, subject: str, costs: Mapping[str, float]) -> Choice:
        """The tuned candidate if it is one of them, else the cheapest by the cost model."""
        tuned = dict(self.tuned).get(subject)
        chosen = tuned if tuned in costs else min(costs, key=lambda k: costs[k])
        assert chosen is not None
        return Choice(subject, chosen, tuple(costs), "measured" if chosen == tuned else COST_MODEL)
