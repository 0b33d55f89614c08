"""Choices between ways to write a kernel: who offers them, what they are called, and which one is taken.

An emitter offers *candidates*, the one that its cost model takes first. Each is a frozen dataclass of numbers (sizes
of a tile, warps, stages), and any of them is correct for the kernel that it is offered for. What was measured is kept
by name alone (`name`, of the kernel's `subject`): a name that is none of the candidates decides nothing, so no number
of a file ever reaches a kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from onnxc.codegen.triton.kernel import Kernel
from onnxc.planner.groups import Group

_DIGITS = 12  # of the digest in a subject
_MOST = 200  # characters before it


@dataclass(frozen=True)
class Ways:
    """The ways to write a group's kernels.

    Attributes:
        candidates: dataclasses of numbers, the cost model's choice first; empty where there is nothing to choose.
        emit: the kernels of one of them, in the order in which they run; of None, those that are the default.
    """

    candidates: Sequence[Any]
    emit: Callable[[Any], list[Kernel]]


def name(candidate: Any) -> str:
    """A candidate's numbers as text, which tells candidates of one kernel from each other. Defaults are left out.
    What has a name of its own (`called`) begins with it.

    >>> @dataclass(frozen=True)
    ... class Blocks:
    ...     m: int
    ...     n: int
    ...     split: int = 1
    >>> name(Blocks(64, 128))
    'm=64 n=128'
    """
    numbers = {f.name: getattr(candidate, f.name) for f in fields(candidate) if getattr(candidate, f.name) != f.default}
    words = [*([candidate.called] if hasattr(candidate, "called") else []), *(f"{k}={v}" for k, v in numbers.items())]
    return " ".join(words) or "default"


def subject(group: Group, kernels: Sequence[Kernel]) -> str:
    """What the kernels of a group are called in a record: what they compute, for people, and a digest of their default
    text and of all that changes their machine code.
    """
    sha = hashlib.sha256()
    for kernel in kernels:
        sha.update(f"{kernel.text()}\n{kernel.parameters()} {kernel.grid} {kernel.kind}\n".encode())
    if group.node is not None:
        operands = [*group.node.operands, *(group.twin.operands[1:] if group.twin is not None else ())]
        types = ", ".join(str(v.t) for v in operands)
        what = f"{group.node.op} of {types}"
    else:
        what = f"loops to {', '.join(str(v.t) for v in group.stored())}"
    return f"{what[:_MOST]} [{sha.hexdigest()[:_DIGITS]}]"
