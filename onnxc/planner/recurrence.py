"""How one kernel does all steps of a loop, as `recurrences.py` finds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxc.ir.expr import Dim
from onnxc.ir.graph import Node, Value
from onnxc.loops.terms import Load
from onnxc.planner.layout import Layout
from onnxc.planner.section import Section
from onnxc.planner.templates import MatmulAccess

# Bytes of matrices that all programs of a step read, those of each 16 rows a copy: of 64 MB (float32, 64 rows, 1024
# columns) an LSTM takes 1.4 times as long as with kernels of its own for each step, of 32 MB 0.94 times, of 16 MB 0.52.
MOST_READ = 32 << 20

# The same where the run decides how many rows there are, by element type: from there on kernels for each step take less
# time. Of LSTMs and GRUs in float32 they do from 80 rows of 512 columns on, and 32 of 1024; in halves from 512, and 40.
MOST_OPEN = {"float32": 16 << 20, "float16": 32 << 20, "bfloat16": 32 << 20}
LEAST_OPEN = 128 << 10  # bytes of matrices up to which one kernel does all steps of any rows: a program may hold them
MOST_TURNS = 1 << 12  # steps that have kernels of their own where these are many: a graph holds all of them


@dataclass(frozen=True)
class Product:
    """A product of a stage. Its rows are of a state, of what an earlier stage hands on, or of what is in memory; its
    columns are of a constant.
    """

    node: Node
    access: MatmulAccess
    constant: np.ndarray[Any, Any]


@dataclass
class Stage:
    """Part of a step: its products, and what it makes of their results; `loads` is all that it reads."""

    section: Section
    roots: list[Value]
    products: list[Product] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


@dataclass
class Recurrence:
    """How one kernel does all steps of a loop.

    Attributes:
        layout: of the values of a step.
        handed: what stages hand on to later ones of the same step.
        outside: the operand that each input of a step is, or is a part of.
        stepwise: 1 where each step has kernels of its own after all, else 0: the run knows how many rows there are.
        most: rows that there are where it is 0, if it says so.
    """

    layout: Layout
    stages: list[Stage]
    handed: list[Value]
    outside: dict[int, Value]
    stepwise: Dim = 0
    most: int | None = None
