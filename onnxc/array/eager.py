"""Functions outside of a trace: each call is a program of its own, compiled once for shapes, dtypes and options."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.autodiff.clean import without_hints
from onnxc.compiler import compile
from onnxc.frontends.trace import Trace
from onnxc.gradient import cleaned
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.host import is_host
from onnxc.primitives.interpret import interpret
from onnxc.primitives.pairs import Complex, as_complex, as_floats, opened, pair

Data = np.ndarray[Any, Any]
Run = Callable[[tuple[Data, ...]], Sequence[Data]]
MOST_PROGRAMS = 1024
_ATOMS = frozenset((int, bool, str, bytes, type(None)))


@dataclass(frozen=True)
class Program:
    """A compiled call: what it runs, and whether the rule returned one value."""

    run: Run
    one: bool


class Programs:
    """The programs of the calls that were made last; for any number of threads."""

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        self.most = most
        self.interpreted = False
        self._kept: OrderedDict[Hashable, Program] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Program | None:
        """The program of a key, if it is there."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, program: Program) -> None:
        """Keeps a program; forgets the one that was used longest ago where there are too many."""
        with self._lock:
            self._kept[key] = program
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


PROGRAMS = Programs()


def set_eager(how: str) -> None:
    """How functions outside of a trace run: ``compiled``, or ``interpreted``: node by node with numpy, which compiles
    nothing: quicker for what runs once.
    """
    if how not in ("compiled", "interpreted"):
        raise ValueError(f"'compiled' or 'interpreted', not {how!r}")
    PROGRAMS.interpreted = how == "interpreted"


def run_eagerly(rule: Callable[..., Any], arrays: Sequence[Data], name: str, static: Mapping[str, Any]) -> Any:
    """The results of a rule for arrays: one array, or a tuple of them."""
    key = (PROGRAMS.interpreted, rule, tuple((a.dtype, a.shape) for a in arrays), frozen(static))
    program = PROGRAMS.get(key)
    if program is None:
        program = _compiled(rule, arrays, name, static)
        PROGRAMS.put(key, program)
    results = tuple(program.run(tuple(arrays)))
    return results[0] if program.one else results


def _compiled(rule: Callable[..., Any], arrays: Sequence[Data], name: str, static: Mapping[str, Any]) -> Program:
    with Trace() as trace:
        inputs = [trace.input(TensorType(dtypes.from_numpy(a.dtype), a.shape)) for a in arrays]
        with trace.source(name):
            found = rule(trace.builder, *map(opened, inputs), **static)
            one = isinstance(found, (Value, Complex))
            outputs = [pair(v) for v in ([found] if one else found)]
    return Program(runner(trace.graph(outputs, name)), one)


def runner(graph: Graph, options: Mapping[str, Any] | None = None) -> Run:
    """What computes the outputs of a graph: a program, compiled with these options of `onnxc.compile`; without them as
    :func:`set_eager` says.
    """
    run, data = _of_reals(graph, options), graph.metadata
    return _with_complex(run, data["complex_inputs"], data["complex_outputs"]) if "complex_inputs" in data else run


def _with_complex(run: Run, inputs: Sequence[int], outputs: Sequence[int]) -> Run:
    """Complex arrays are given to the program, and come from it, as real ones [..., 2]."""

    def call(arrays: tuple[Data, ...]) -> Sequence[Data]:
        found = run(tuple(as_floats(a) if k in inputs else a for k, a in enumerate(arrays)))
        return [as_complex(a) if k in outputs else a for k, a in enumerate(found)]

    return call


def _of_reals(graph: Graph, options: Mapping[str, Any] | None) -> Run:
    constants = [c for c in map(constant_of, graph.outputs) if c is not None]
    if len(constants) == len(graph.outputs):
        return lambda _: [c.copy() for c in constants]
    only_views = all(lookup(node.op).kind is Kind.VIEW for node in graph.nodes)
    if options is None and (PROGRAMS.interpreted or only_views) and not any(map(is_host, graph.nodes)):
        graph = eliminate_dead(without_hints(graph))
        return lambda arrays: interpret(graph, arrays)
    return compile(cleaned(graph), **(options or {})).answers


def frozen(x: Any) -> Hashable:
    """A key that is equal for equal static arguments only: 1, 1.0 and True differ."""
    if type(x) in _ATOMS:
        return (type(x), x)
    if isinstance(x, Mapping):
        return (dict, tuple((k, frozen(v)) for k, v in sorted(x.items())))
    if isinstance(x, (tuple, list)):
        return (type(x), tuple(map(frozen, x)))
    if isinstance(x, slice):
        return (slice, frozen(x.start), frozen(x.stop), frozen(x.step))
    if isinstance(x, float):
        return (type(x), x.hex())
    if isinstance(x, complex):
        return (type(x), x.real.hex(), x.imag.hex())
    if isinstance(x, (np.ndarray, np.generic)) and not x.dtype.hasobject:
        return (type(x), x.dtype, x.shape, x.tobytes())
    if isinstance(x, frozenset):
        return (type(x), frozenset(map(frozen, x)))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return (type(x), x, tuple([frozen(getattr(x, f.name)) for f in dataclasses.fields(x) if f.compare]))
    return (type(x), x)
