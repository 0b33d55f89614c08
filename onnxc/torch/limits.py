"""The sizes that an export holds for: ranges of dims, and what the module's code decided about them.

A module with ``if x.shape[0] > 5`` becomes a model of one of the branches. PyTorch keeps what was decided while it
traces, and drops most of it from what it exports; so it is read from the trace's own sizes here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import ShapeGuard
from torch.fx.experimental.symbolic_shapes import uninteresting_files
from torch.utils import _pytree as pytree

from onnxc.errors import InputError

_OWN = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MOST_KNOWN = 4096
Place = tuple[Any, ...]  # the path of an argument's leaf, and an axis of it; None where the leaf is a number


class SizeWarning(UserWarning):
    """A call with a dim of 0 or 1, of which the module's code was exported for greater ones alone."""


@dataclass(frozen=True)
class Decided:
    """A condition on sizes that the trace took for true, and the line of the module's code that asked."""

    condition: Any
    line: str


@dataclass
class Limits:
    """What must hold for the sizes of a call.

    Attributes:
        dims: the size at each place, in PyTorch's symbols.
        leaves: which of a call's leaves each path leads to.
        ranges: of symbols: the least and the greatest that the trace found; None is no limit.
        decided: by the module's own code.
        declared: of symbols: the least of a `Dim` with a `min`.
        roots: the names of the `Dim` of which others are made (`2 * n`), and which are no dim themselves.
    """

    dims: Mapping[Place, Any]
    leaves: Mapping[Any, int]
    ranges: Mapping[Any, tuple[int, int | None]]
    decided: Sequence[Decided]
    declared: Mapping[Any, int] = field(default_factory=dict)
    roots: Mapping[Any, str] = field(default_factory=dict)
    _known: set[tuple[int, ...]] = field(default_factory=set)
    _told: set[Decided] = field(default_factory=set)  # in warnings

    def check(self, leaves: Sequence[Any]) -> None:
        """InputError where a call's leaves have sizes that the export does not hold for.

        PyTorch's convention for dims of 0 and 1 is kept: they are taken where a greater one is. Where the module's code
        decided otherwise about these, that is a :class:`SizeWarning`.
        """
        sizes = tuple([_size(leaves[self.leaves[path]], axis) for path, axis in self.dims])
        if sizes in self._known or -1 in sizes:
            return
        try:
            values = self._solved(sizes)
            self._check_ranges(values)
            for decision in self.decided:
                self._check_decided(decision, values)
        except ZeroDivisionError as error:
            zero = ", ".join(_name(place) for place, size in zip(self.dims, sizes, strict=True) if size == 0)
            raise InputError(f"{zero} is 0, and the module's code divides by that") from error
        if len(self._known) < _MOST_KNOWN:
            self._known.add(sizes)

    def _solved(self, sizes: Sequence[int]) -> dict[Any, int]:
        """The value of each symbol. A dim that is an expression must have the value of that."""
        found = list(zip(self.dims.items(), sizes, strict=True))
        values: dict[Any, int] = {}
        for (_, dim), size in found:
            if isinstance(dim, sympy.Symbol):
                values.setdefault(dim, size)
        for (place, dim), size in found:
            solved = _root(dim, size, values)
            if solved is not None:
                symbol, value = solved
                if not value.is_integer or value < 0:
                    said = f"{self._text(dim)} of a whole {self._text(symbol)}"
                    raise InputError(f"{_name(place)} is {size}, and has to be {said}")
                values[symbol] = int(value)
        for (place, dim), size in found:
            wanted = dim if isinstance(dim, sympy.Symbol) else _value(dim, values)
            if not isinstance(dim, sympy.Symbol) and wanted is not None and wanted != size:
                raise InputError(f"{_name(place)} is {size}, and has to be {self._text(dim)} = {wanted}")
        return values

    def _check_ranges(self, values: Mapping[Any, int]) -> None:
        for size, (least, most) in self.ranges.items():
            value = _value(size, values)
            if value is None:
                continue
            is_less = value < self.declared.get(size, 0) or (value < least and least > 2)
            if is_less or (most is not None and value > most):
                said = f"at least {least}" if most is None else f"{least} to {most}"
                raise InputError(f"{self._place(size)} is {value}, and the module was exported for {said}")

    def _check_decided(self, decision: Decided, values: Mapping[Any, int]) -> None:
        if _value(decision.condition, values) in (None, True):
            return
        said = f"the module was exported for {self._text(decision.condition)} ({decision.line})"
        now = ", ".join(f"{self._text(s)} is {values[s]}" for s in _symbols(decision.condition))
        if _value(decision.condition, {s: max(v, 2) for s, v in values.items()}) is not True:
            raise InputError(f"{now}, and {said}")
        if decision in self._told:
            return
        self._told.add(decision)
        warnings.warn(f"{now}, and {said}; the result is that of the code for greater sizes", SizeWarning, stacklevel=4)

    def _text(self, expression: Any) -> str:
        """An expression in the places where its symbols stand."""
        places: dict[Any, str] = {}
        for place, dim in self.dims.items():
            places.setdefault(dim, _name(place))
        places = {**self.roots, **places}
        names = {s: sympy.Symbol(places[s]) for s in _symbols(expression) if s in places}
        return str(expression.xreplace(names))

    def _place(self, symbol: Any) -> str:
        """A symbol, and where it stands if it is no dim itself."""
        text = self._text(symbol)
        made = next((p for p, dim in self.dims.items() if symbol not in self.dims.values() and dim.has(symbol)), None)
        return text if made is None else f"{text} of {_name(made)} = {self._text(self.dims[made])}"


class Watch:
    """Takes notes of a module's traces; the last one counts."""

    def __init__(self) -> None:
        self.sizes: dict[Place, torch.SymInt] = {}
        self.decided: list[Decided] = []
        self.declared: dict[Any, int] = {}
        self.ended: dict[Any, tuple[Any, Any]] = {}

    def begin(self, arguments: Any) -> None:
        """The module is called with these: in a new trace, or by itself in the one that is under way."""
        found = _open_sizes(arguments)
        if found and _environment(found) is not _environment(self.sizes):
            self.sizes, self.decided, self.declared = found, [], _declared(_environment(found))

    def end(self) -> None:
        """The module has returned. Later the trace forgets who asked."""
        if self.sizes:
            env = _environment(self.sizes)
            late = (a for checks in env.deferred_runtime_asserts.values() for a in checks)
            self.decided = [Decided(c.expr, line) for c in (*env.guards, *late) if (line := _line(c))]
            self.ended = _least(env)

    def limits(self, spec: pytree.TreeSpec) -> Limits | None:
        """What the last trace says of the sizes of its arguments, nested so; None where they are all fixed."""
        example = pytree.tree_unflatten([0] * spec.num_leaves, spec)
        leaves = {path: k for k, (path, _) in enumerate(pytree.tree_flatten_with_path(example)[0])}
        dims = {place: d.node.expr for place, d in self.sizes.items() if place[0] in leaves}
        dims = {place: d for place, d in dims.items() if not d.is_number}
        if not dims:
            return None
        env = _environment(self.sizes)
        symbols = {s for d in dims.values() for s in d.free_symbols}
        ranges = {s: _range(env.bound_sympy(s)) for s in sorted(symbols, key=str)}
        decided = [d for d in self.decided if d.condition.free_symbols <= symbols]
        sources = {s: env.var_to_sources.get(s, ()) for s in symbols}
        roots = {s: x.source_name for s, found in sources.items() for x in found if isinstance(x, ConstantSource)}
        ended = {s: self.ended.get(s, found) for s, found in _least(env).items()}
        hinted = {s: int(x) for s, (x, asked) in _least(env).items() if x > ended[s][0] and asked is ended[s][1]}
        return Limits(dims, leaves, ranges, decided, self.declared | hinted, roots)


def _environment(sizes: Mapping[Place, torch.SymInt]) -> Any:
    """What PyTorch knows of sizes, which each trace begins anew; None of no sizes."""
    return next((d.node.shape_env for d in sizes.values()), None)


def _declared(env: Any) -> dict[Any, int]:
    """The least sizes that were asked for, as long as a trace has found out nothing."""
    default = env._default_value_range(fx.experimental._config.backed_size_oblivious).lower
    return {s: int(known.lower) for s, known in env.var_to_range.items() if known.lower > default}


def _least(env: Any) -> dict[Any, tuple[Any, Any]]:
    """The least that is known of each size, and who asked: nobody of those of `Dim.DYNAMIC(min=...)`, which PyTorch
    writes down when the trace is over.
    """
    return {s: (known.lower, env.var_to_range_sloc[s].lower) for s, known in env.var_to_range.items()}


def _root(dim: Any, size: int, values: Mapping[Any, int]) -> tuple[Any, Any] | None:
    """The one unknown symbol of a dim that is linear in it, and its value."""
    known = dim.xreplace({s: sympy.Integer(v) for s, v in values.items()})
    if len(known.free_symbols) != 1:
        return None
    (symbol,) = known.free_symbols
    factor = known.coeff(symbol)
    if not factor.is_number or factor == 0 or (known - factor * symbol).has(symbol):
        return None
    return symbol, (size - (known - factor * symbol)) / factor


def _range(known: Any) -> tuple[int, int | None]:
    least, most = (int(x) if isinstance(x, (int, sympy.Integer)) else None for x in (known.lower, known.upper))
    return least or 0, most


def _size(leaf: Any, axis: int | None) -> int:
    """A size of a leaf; -1 where it has none there, which the model says."""
    shape = np.shape(leaf)
    if axis is None:
        return int(leaf) if isinstance(leaf, (int, np.integer)) else -1
    return int(shape[axis]) if axis < len(shape) else -1


def _open_sizes(arguments: Any) -> dict[Place, torch.SymInt]:
    """The open sizes among a trace's arguments, by place."""
    found: dict[Place, torch.SymInt] = {}
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if isinstance(leaf, torch.SymInt):
            found[(path, None)] = leaf
        elif isinstance(leaf, torch.Tensor):
            found |= {(path, k): d for k, d in enumerate(leaf.shape) if isinstance(d, torch.SymInt)}
    return found


def _value(expression: Any, values: Mapping[Any, int]) -> Any:
    """An expression's int or bool; None where it has symbols of other places."""
    found = expression.xreplace({s: sympy.Integer(v) for s, v in values.items()})
    if found in (sympy.true, sympy.false):
        return bool(found)
    return int(found) if found.is_number else None


def _symbols(expression: Any) -> list[Any]:
    return sorted(expression.free_symbols, key=str)


def _line(condition: Any) -> str:
    """Where code outside of PyTorch asked; nothing where PyTorch's own did, which decides about memory, not results."""
    if isinstance(condition, ShapeGuard):
        frame = condition.sloc.framework_loc
        frames = [] if frame is None or isinstance(frame, str) else [frame]
    else:
        frames = [f for f in condition.stack.summary() if f.filename not in uninteresting_files()]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames and not frames[-1].filename.startswith(_OWN) else ""


def _name(place: Place) -> str:
    path, axis = place
    name = f"{('args', 'kwargs')[path[0].idx]}{pytree.keystr(path[1:])}"
    return name if axis is None else f"{name}.shape[{axis}]"
