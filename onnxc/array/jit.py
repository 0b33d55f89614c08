"""`onnxc.jit`: a Python function over arrays, compiled once for each structure of its arguments."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, overload

import numpy as np

from onnxc.array.arguments import Arguments, Given, whole
from onnxc.array.core import Array, asarray, concrete, traced, value_of
from onnxc.array.dims import Dynamic, check_dynamic, dim_names, dynamic_leaves, input_names, unique, with_sizes
from onnxc.array.eager import Data, Run, frozen, runner
from onnxc.array.guards import PLAIN, Guards, guard_key, same
from onnxc.array.pytree import flatten, shallow, unflatten
from onnxc.array.tracing import NUMBERS, Leaf, Result, trace_function
from onnxc.compiler import compile
from onnxc.errors import InputError, NeedsSizesError, SizesError
from onnxc.frontends.decisions import VALUE, Decision, Decisions, hold, sizes_of
from onnxc.frontends.trace import Trace, current, line_of
from onnxc.ir.expr import Expr, Sym, symbols
from onnxc.ir.graph import Graph

MOST_SHORTCUTS = 2048
_PLAIN = (Array, np.ndarray)


@dataclass(frozen=True)
class Recompile:
    """One compile of a jitted function.

    Attributes:
        number: 0 for the first.
        reasons: what differs from the program before that is most alike: `x: float32[3] -> float32[4]`.
        arguments: what it was compiled for, by the places of the arguments, and what the function asked of dynamic
            sizes: `n % 2 == 0 (file.py:5): True`.
    """

    number: int
    reasons: tuple[str, ...]
    arguments: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.number}: {'; '.join(self.reasons)}"


@dataclass
class _Program:
    """A compiled trace, and what is needed for a call."""

    run: Run
    result: Result
    outer: tuple[Any, ...]  # what the function read from outside: kept, so that identities stay theirs
    dynamic: bool
    decisions: tuple[Decision, ...]  # what it was traced for, beside its key
    single: bool = field(init=False)

    def __post_init__(self) -> None:
        self.single = self.result.spec.is_leaf() and not self.result.held[0]


class Jitted:
    """A function that is traced and compiled when it is called: see :func:`jit`."""

    def __init__(
        self,
        f: Callable[..., Any],
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        dynamic: Dynamic = False,
        most_programs: int = 64,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        unknown = sorted(
            set(options or {}) - set(inspect.signature(compile).parameters) | {"model"} & set(options or {})
        )
        if unknown:
            raise InputError(f"onnxc.jit has no option {', '.join(map(repr, unknown))}")
        if not callable(f):
            raise InputError(f"onnxc.jit compiles functions, not what is of the type {type(f).__name__}")
        check_dynamic(dynamic)
        functools.update_wrapper(self, f)
        self.__wrapped__ = f
        self._name = getattr(f, "__qualname__", type(f).__name__)
        self._arguments = Arguments(f, static_argnums, static_argnames)
        self._dynamic, self._options = dynamic, dict(options or {})
        self._most = whole(most_programs, "most_programs", 1)
        self._programs: OrderedDict[Hashable, list[_Program]] = OrderedDict()  # those of a key differ in decisions
        self._shortcuts: dict[Hashable, _Program] = {}  # by shapes and dtypes, where all arguments are plain arrays
        self._history: list[Recompile] = []
        self._lock = threading.RLock()
        self._guards: Guards | None = None
        self._plain = not self._arguments.static
        self._static = (self._arguments.numbers, self._arguments.names)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        """As functions are: copied as themselves, and pickled by name."""
        return self._name

    def __repr__(self) -> str:
        return f"<jit {self._name}: {sum(map(len, self._programs.values()))} programs>"

    # ------------------------------------------------------------ calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is not None:
            args, kwargs = _renewed((args, kwargs), trace)
            return self.__wrapped__(*args, **kwargs)
        if not self._plain:
            return self._call(args, kwargs)
        names = sorted(kwargs) if kwargs else ()
        data: list[Data] = []
        for x in (*args, *map(kwargs.__getitem__, names)) if names else args:
            kind = type(x)
            if kind is Array:
                x = x._data
                if x is None:
                    return self._call(args, kwargs)
            elif kind is not np.ndarray:
                return self._call(args, kwargs)
            data.append(x)
        program = self._shortcuts.get((*[(x.dtype, x.shape) for x in data], *names))
        if program is None or (self._guards and not same(self._guards.values(), program.outer)):
            return self._call(args, kwargs)
        if program.single and not program.dynamic:
            return concrete(program.run(tuple(data))[0])
        return self._run(program, data, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The way of trees: the structure and the leaves' types lead to the program."""
        data, key = self._looked_at(args, kwargs)
        program = self._shortcuts.get(key) if key is not None else None
        if program is not None and not (self._guards and not same(self._guards.values(), program.outer)):
            return self._run(program, data, args, kwargs)
        given = self._arguments.bind(args, kwargs)
        return self._run(self._program(given, False, key), given.data, args, kwargs)

    def _looked_at(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Data], Hashable]:
        """The arrays, and a key of what the arguments are like; None where the long way has to look at them."""
        if self._plain:  # then there is another leaf than an array
            return _types(*shallow(args, kwargs), ())
        numbers, static = self._static
        held: list[Hashable] = [(k, frozen(x)) for k, x in enumerate(args) if k in numbers]
        held += [(n, frozen(x)) for n, x in kwargs.items() if n in static]
        try:
            hash(tuple(held))
        except TypeError:
            return [], None
        args = tuple([x for k, x in enumerate(args) if k not in numbers])
        names = tuple(sorted([n for n in kwargs if n not in static]))
        leaves = (*args, *[kwargs[n] for n in names])
        for x in leaves:
            if type(x) not in _PLAIN:
                return _types(*shallow(args, {n: kwargs[n] for n in names}), tuple(held))
        return _types(leaves, names, tuple(held))

    def _run(self, program: _Program, data: Sequence[Data], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            outputs = program.run(tuple(data))
        except SizesError:
            if not program.dynamic:
                raise
            program = self._program(self._arguments.bind(args, kwargs), exact=True)  # a dim is 1, to be broadcast
            outputs = program.run(tuple(data))
        return concrete(outputs[0]) if program.single else program.result.tree(outputs)

    # ------------------------------------------------------------ programs

    def _program(self, given: Given, exact: bool = False, shortcut: Hashable = None) -> _Program:
        with self._lock:
            self._guards = Guards(self.__wrapped__)  # anew: a function that it calls may be another one
            outer = self._guards.values()
            leaves = given.leaves
            if self._dynamic and not exact:
                leaves = dynamic_leaves(self._dynamic, given)
            types = tuple((repr(leaf.type), leaf.weak) for leaf in leaves)
            key = (given.spec, types, frozen(given.static), guard_key(outer), exact)
            sizes = _sizes(leaves, given)
            alike = self._programs.get(key, [])
            program = next((p for p in alike if hold(p.decisions, sizes)), None)
            if program is None:
                program = self._compiled(given, leaves, outer, sizes)
            else:
                program.outer = outer  # equal numbers may be other objects now
            self._programs[key] = [*(p for p in alike if p is not program), program]  # what is used last is last
            self._programs.move_to_end(key)
            self._limit()
            self._shorten(given, program, shortcut)
            return program

    def _compiled(
        self, given: Given, leaves: Sequence[Leaf], outer: tuple[Any, ...], sizes: Mapping[str, int]
    ) -> _Program:
        names = input_names(given)
        graph, result, decisions = self._traced(given, leaves, names, Decisions(sizes))
        graph.output_names = unique(graph.output_names, set(names))
        graph.dim_names = dim_names(self._dynamic, leaves, given)
        dynamic = any(not leaf.type.is_static for leaf in leaves)
        made = tuple(decisions.made.values())
        program = _Program(runner(graph, self._options), result, outer, dynamic, made)
        self._note(given, leaves, outer, dict(d.told(graph.dim_names) for d in made))
        return program

    def _traced(
        self, given: Given, leaves: Sequence[Leaf], names: Sequence[str], decisions: Decisions
    ) -> tuple[Graph, Result, Decisions]:
        """What the function computes, and what was asked of its sizes. Those that an op has to know are numbers."""
        try:
            graph, result = trace_function(
                lambda arrays: self._arguments.apply(self.__wrapped__, given, arrays), leaves, names, self._name,
                decisions,
            )  # fmt: skip
        except NeedsSizesError as error:
            wanted = {s.key for d in error.dims if isinstance(d, Expr) for s in symbols(d)} & decisions.sizes.keys()
            if not wanted:
                raise
            again = Decisions(decisions.sizes)
            for symbol in sorted(wanted):
                again.ask(VALUE, Sym(symbol), line_of(error))
            graph, result, more = self._traced(
                given, with_sizes(leaves, {s: decisions.sizes[s] for s in wanted}), names, again
            )
            return graph, result, Decisions(decisions.sizes, more.made | again.made)
        return graph, result, decisions

    def _limit(self) -> None:
        """Forgets the program that was used longest ago, where there are too many."""
        while sum(map(len, self._programs.values())) > self._most:
            oldest, alike = next(iter(self._programs.items()))
            gone = alike.pop(0)
            if not alike:
                del self._programs[oldest]
            for key in [k for k, p in self._shortcuts.items() if p is gone]:
                del self._shortcuts[key]

    def _shorten(self, given: Given, program: _Program, shortcut: Hashable) -> None:
        """Lets the next call with such arguments find its program at once."""
        if len(self._shortcuts) >= MOST_SHORTCUTS:
            self._shortcuts = {}
        if given.plain and self._plain:
            names = sorted(given.tree[1])
            self._shortcuts[(*[(x.dtype, x.shape) for x in given.data], *names)] = program
        elif shortcut is not None:
            self._shortcuts[shortcut] = program

    # ------------------------------------------------------------ why

    def _note(self, given: Given, leaves: Sequence[Leaf], outer: tuple[Any, ...], decided: Mapping[str, str]) -> None:
        now = dict(zip(given.places(), map(_described, leaves), strict=True))
        now |= {name: f"static {_short(value)}" for name, value in given.static.items()}
        assert self._guards is not None
        now |= {f"{n} (outside)": _outside(v) for n, v in zip(self._guards.names, outer, strict=True)}
        now |= decided
        candidates = [_differences(before.arguments, now) for before in self._history]
        reasons = min(candidates, key=lambda d: (len(d), sum("->" not in r for r in d)), default=("the first call",))
        self._history.append(Recompile(len(self._history), reasons or ("it was forgotten, or a dim is 1",), now))

    def explain_recompiles(self) -> list[Recompile]:
        """Every compile of this function so far, each with what was unlike the programs before it."""
        return list(self._history)

    def clear(self) -> None:
        """Forgets all programs."""
        with self._lock:
            self._programs.clear()
            self._shortcuts = {}


def _renewed(tree: Any, trace: Trace) -> Any:
    """The arguments of a part of a trace: what it writes into them is its own, as in a program of its own."""
    leaves, spec = flatten(tree)
    new = [traced(value_of(asarray(x), trace), trace, x.weak) if isinstance(x, Array) else x for x in leaves]
    new = [traced(trace.constant(x), trace) if isinstance(x, np.ndarray) else x for x in new]
    return unflatten(spec, new)


def _types(leaves: Sequence[Any], structure: Hashable, held: Hashable) -> tuple[list[Data], Hashable]:
    """The leaves' arrays and a key of what they, and what is held, are like; None where there is another leaf.

    Args:
        structure: of the leaves: a tree's, or the names of the last ones, where all are arrays.
    """
    data: list[Data] = []
    found: list[Any] = [structure, held]
    for x in leaves:
        kind = type(x)
        if kind is Array:
            x = x._data
            if x is None:
                return [], None
        elif kind is not np.ndarray:
            if kind not in NUMBERS:
                return [], None
            found.append(kind)
            x = np.asarray(x)
        data.append(x)
        found.append(x.dtype)
        found.append(x.shape)
    return data, tuple(found)


def _sizes(leaves: Sequence[Leaf], given: Given) -> dict[str, int]:
    """What the symbols of dynamic dims are in a call."""
    return {s: n for x, data in zip(leaves, given.data, strict=True) for s, n in sizes_of(x.type.shape, data.shape)}


def _described(leaf: Leaf) -> str:
    return f"{leaf.type.dtype} number" if leaf.weak else repr(leaf.type)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _outside(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}{list(value.shape)} at {id(value):#x}"
    if isinstance(value, FunctionType):
        return f"function at line {value.__code__.co_firstlineno}, {id(value):#x}"
    return _short(value) if isinstance(value, PLAIN) else f"{type(value).__name__} at {id(value):#x}"


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    found = [f"{k}: {before[k]} -> {v}" for k, v in now.items() if k in before and before[k] != v]
    found += [f"{k}: {v} is new" for k, v in now.items() if k not in before]
    return tuple(found + [f"{k} is gone" for k in before if k not in now])


@overload
def jit(f: Callable[..., Any], /) -> Jitted: ...
@overload
def jit(
    f: None = None, /, *, static_argnums: int | Sequence[int] = (), static_argnames: str | Sequence[str] = (),
    dynamic: Dynamic = False, most_programs: int = 64, **options: Any,
) -> Callable[[Callable[..., Any]], Jitted]: ...  # fmt: skip
@overload
def jit(
    f: Callable[..., Any], /, *, static_argnums: int | Sequence[int] = (), static_argnames: str | Sequence[str] = (),
    dynamic: Dynamic = False, most_programs: int = 64, **options: Any,
) -> Jitted: ...  # fmt: skip
def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dynamic: Dynamic = False,
    most_programs: int = 64,
    **options: Any,
) -> Any:
    """Compiles a function over arrays: what it computes is traced at the first call, and run as one program then.

    There is one program for each structure of shapes, dtypes, trees and static arguments. Inside of another traced
    function it is part of that one's program.

    Args:
        f: takes and returns arrays, numbers, and trees of these (dicts, lists, tuples, named tuples, dataclasses,
            None). It runs once for each program, so it should do nothing else. Without it: a decorator.
        static_argnums, static_argnames: arguments that decide what is computed: any hashable object; each other value
            is another program.
        dynamic: sizes that do not decide: True for all that are not 0 or 1 in the first call, or, for each argument by
            name or position, the axes: `{"x": [0]}`, or names of theirs, `{"x": {0: "batch"}, "y": {0: "batch"}}`,
            where equal names are equal sizes.
        most_programs: so many are kept; the one that was used longest ago is forgotten.
        options: of :func:`onnxc.compile`: `target`, `threads`, `cache`, `dtype`, ...

    Raises:
        InputError: an option that does not exist. A call raises TraceError where the function asks for the content of
        a traced array, InputError for arguments that are no arrays, and what the function raises.

    >>> @jit
    ... def scaled(x, by):
    ...     return {"y": x * by}
    >>> scaled(np.arange(3, dtype=np.float32), 2)["y"].numpy()
    array([0., 2., 4.], dtype=float32)
    """
    if f is None:
        return lambda g: Jitted(g, static_argnums, static_argnames, dynamic, most_programs, options)
    return Jitted(f, static_argnums, static_argnames, dynamic, most_programs, options)


__all__ = ["Jitted", "Recompile", "jit"]
