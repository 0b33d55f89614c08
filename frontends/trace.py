"""Traces Python functions into the graph IR: what a traced function computes is emitted into the trace's builder.

    with Trace() as trace:
        x = trace.input(TensorType(dtypes.float32, (3,)))
        with trace.source("mul"):
            y = trace.builder.mul(x, 2.0)
    graph = trace.graph([y])

Traces nest: the body of a loop is a trace of its own (its builder makes a region), in which values of the traces around
it can be used. Every thread has traces of its own. Each node's origin is the function that was called, with the line of
the user's source.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import numpy as np

from onnxc.errors import OnnxcError
from onnxc.frontends.decisions import Decisions
from onnxc.ir.expr import symbols
from onnxc.ir.graph import Graph, Source, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import RunTime
from onnxc.primitives.pairs import PART, Complex, constant_pair, join, opened, pair, split

_OWN = frozenset({"onnxc", "optree", "contextlib", "functools", "numpy", "threading"})


class _Stack(threading.local):
    def __init__(self) -> None:
        self.traces: list[Trace] = []


_stack = _Stack()


class Trace:
    """A function that is being traced: a context in which :func:`current` gives it.

    Args:
        builder: where its nodes go; default: a new graph, with the hints that derivative rules read.
        parent: the trace around it, whose values may be used in it.
        decisions: what dynamic sizes are in the call that it is made for, and what was asked of them; its parent's.
    """

    def __init__(
        self, builder: Builder | None = None, parent: Trace | None = None, decisions: Decisions | None = None
    ) -> None:
        self.parent = parent
        self.builder = builder if builder is not None else Builder(differentiable=True, run_time=RunTime())
        self.root: Trace = self if parent is None else parent.root
        self.decisions: Decisions = parent.decisions if parent is not None else decisions or Decisions()
        self.ended = False
        self._count = 0  # of sources, in the root
        self._complex: list[int] = []  # which inputs are of complex numbers
        self._constants: dict[int, tuple[np.ndarray, Value]] = {}  # the arrays are kept, so that ids stay theirs

    def __enter__(self) -> Trace:
        _stack.traces.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        top = _stack.traces.pop()
        assert top is self

    def input(self, type: TensorType, name: str = "") -> Value:
        """A further input of the traced function; of complex numbers as real ones [..., 2]."""
        name = name or f"x{len(self.builder.inputs)}"
        if self.parent is None:
            self._take(type)
        if type.dtype not in PART:
            return self.builder.input(type, name)
        self._complex.append(len(self.builder.inputs))
        return pair(split(self.builder, self.builder.input(TensorType(PART[type.dtype], (*type.shape, 2)), name)))

    def _take(self, type: TensorType) -> None:
        """The names of its sizes are not given out to those that only a run will tell."""
        sizes = self.builder.run_time
        taken = [int(s.key[1:]) for d in type.shape for s in symbols(d) if s.key[1:].isdigit()]
        if sizes is not None and taken:
            assert not sizes.symbols, "an input behind a size that was given out"
            sizes.first = max(sizes.first, 1 + max(taken))

    def constant(self, array: np.ndarray) -> Value:
        """An array of outside as a constant of the graph: one node for one array."""
        found = self._constants.get(id(array))
        if found is None:
            with self.builder.from_origin(()):
                make = constant_pair if array.dtype.kind == "c" else Builder.constant
                found = self._constants[id(array)] = (array, pair(make(self.builder, array)))
        return found[1]

    def encloses(self, inner: Trace | None) -> bool:
        """Whether values of this trace can be used in an inner one."""
        while inner is not None and inner is not self:
            inner = inner.parent
        return inner is self

    @contextmanager
    def source(self, name: str) -> Iterator[None]:
        """Nodes made inside are what this function of the user's line became; errors say so."""
        line = user_line()
        number, self.root._count = self.root._count, self.root._count + 1
        with self.builder.from_origin((Source(number, name, "", line),)):
            try:
                yield
            except OnnxcError as error:
                if error.node is None:
                    error.node = f"{name} ({line})"
                raise

    def graph(self, outputs: Sequence[Value], name: str = "") -> Graph:
        """What was traced. Its metadata says which inputs and outputs [..., 2] are of complex numbers."""
        found = [opened(v) for v in outputs]
        values = [join(self.builder, v) if isinstance(v, Complex) else v for v in found]
        graph = self.builder.graph(values, [f"y{k}" for k in range(len(outputs))])
        graph.name = name
        if self._complex or any(isinstance(v, Complex) for v in found):
            graph.metadata["complex_inputs"] = tuple(self._complex)
            graph.metadata["complex_outputs"] = tuple(k for k, v in enumerate(found) if isinstance(v, Complex))
        return graph


def current() -> Trace | None:
    """This thread's innermost trace; None outside of all."""
    traces = _stack.traces
    return traces[-1] if traces else None


def user_frame() -> FrameType | None:
    """The innermost frame that is not onnxc's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame):
        frame = frame.f_back
    return frame


def _is_own(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _OWN


def user_line() -> str:
    """`file.py:123`: where the user's code is now."""
    frame = user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """Where the user's code was when an error was raised, as :func:`user_line` says it."""
    found, step = "", error.__traceback__
    while step is not None:
        if not _is_own(step.tb_frame):
            found = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return found
