"""Sizes that do not decide: which dims of arguments become symbols, and what these and the arguments are called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxc.array.arguments import Given, several
from onnxc.array.pytree import flatten
from onnxc.array.tracing import Leaf
from onnxc.errors import InputError
from onnxc.ir.expr import Dim, Sym, always_equal, evaluate, never_equal, symbols

Axes = int | Sequence[int] | Mapping[int, str]
Dynamic = bool | Mapping["str | int", Axes]


def dynamic_leaves(dynamic: Dynamic, given: Given) -> list[Leaf]:
    """The leaves with symbols for their dynamic dims, s0, s1, ... InputError for arguments that are not there."""
    named = _Symbols()
    if dynamic is True:
        open_axes = [{k: "" for k, d in enumerate(leaf.type.shape) if d not in (0, 1)} for leaf in given.leaves]
        return [_renamed(leaf, axes, named) for leaf, axes in zip(given.leaves, open_axes, strict=True)]
    assert not isinstance(dynamic, bool)
    args, kwargs = given.tree
    found: list[Leaf] = []
    rest = list(given.leaves)
    used: set[str | int] = set()
    entries = [(k, n, x) for k, (n, x) in enumerate(zip(given.names, args, strict=True))]
    entries += [(-1, n, kwargs[n]) for n in sorted(kwargs)]
    for k, name, tree in entries:
        key: str | int = name if name in dynamic else k
        axes = _named(dynamic[key]) if key in dynamic else {}
        used.add(key)
        for _ in flatten(tree)[0]:
            found.append(_renamed(rest.pop(0), axes, named))
    missing = [k for k in dynamic if k not in used]
    if missing:
        raise InputError(f"dynamic: there is no argument {missing[0]!r}; there are {[n for _, n, _ in entries]}")
    return found


def check_dynamic(dynamic: object) -> None:
    """InputError for what says nothing about axes; whether the arguments have them, a call finds out."""
    if not isinstance(dynamic, (bool, Mapping)):
        raise InputError(f"dynamic is True, False or a dict of axes by argument, not {dynamic!r}")
    for key, axes in dynamic.items() if isinstance(dynamic, Mapping) else ():
        several(axes, int, f"dynamic[{key!r}]")
        if isinstance(axes, Mapping) and not all(isinstance(name, str) for name in axes.values()):
            raise InputError(f"dynamic[{key!r}] has names of dims by axis, which are strings, not {dict(axes)}")


def _named(axes: Axes) -> dict[int, str]:
    return dict(axes) if isinstance(axes, Mapping) else dict.fromkeys(several(axes, int, "dynamic"), "")


def with_sizes(leaves: Sequence[Leaf], sizes: Mapping[str, int]) -> list[Leaf]:
    """The leaves with numbers for some of their symbols, and for what is made of these alone."""

    def known(d: Dim) -> Dim:
        return evaluate(d, sizes) if sizes.keys() >= {s.key for s in symbols(d)} else d

    return [replace(leaf, type=leaf.type.with_shape(tuple(map(known, leaf.type.shape)))) for leaf in leaves]


class _Symbols:
    def __init__(self) -> None:
        self._given: dict[str, Dim] = {}
        self._count = 0

    def of(self, name: str) -> Dim:
        """The symbol of a name; a new one for none."""
        if name in self._given:
            return self._given[name]
        made = Sym(f"s{self._count}")
        self._count += 1
        if name:
            self._given[name] = made
        return made


def _renamed(leaf: Leaf, axes: Mapping[int, str], named: _Symbols) -> Leaf:
    rank = leaf.type.rank
    shape = list(leaf.type.shape)
    for axis, name in sorted(axes.items()):
        if not -rank <= axis < rank:
            if rank == 0:
                continue  # a scalar in a tree of arrays
            raise InputError(f"dynamic: axis {axis} of an array with {rank} axes")
        shape[axis] = named.of(name)
    return replace(leaf, type=leaf.type.with_shape(tuple(shape)))


# ---------------------------------------------------------------- names of a graph's inputs and dims


def plain_name(place: str) -> str:
    """A place as a name: `params['w'][0]` is `params.w.0`."""
    return re.sub(r"\.+", ".", re.sub(r"[^\w.]+", ".", place)).strip(".") or "x"


def input_names(given: Given) -> list[str]:
    """The names of the inputs of a graph: the places of the leaves, as names."""
    return unique([plain_name(p) for p in given.places()], set())


def unique(names: Sequence[str], taken: set[str]) -> list[str]:
    """The names, each with underscores if it is taken; then they all are."""
    found = []
    for name in names:
        while name in taken:
            name += "_"
        taken.add(name)
        found.append(name)
    return found


def dim_names(dynamic: Dynamic, leaves: Sequence[Leaf], given: Given) -> dict[str, str]:
    """What symbols are called: as the user does, else by their first place."""
    found: dict[str, str] = {}
    for leaf, place in zip(leaves, given.places(), strict=True):
        root = re.split(r"\W", place)[0]
        axes = dynamic.get(root) if not isinstance(dynamic, bool) else None
        for axis, d in enumerate(leaf.type.shape):
            for s in symbols(d):
                own = _axis_name(axes, axis, leaf.type.rank)
                found.setdefault(s.key, own or f"{plain_name(place)}_{axis}")
    return found


def _axis_name(axes: Any, axis: int, rank: int) -> str:
    return (axes.get(axis) or axes.get(axis - rank) or "") if isinstance(axes, dict) else ""


def may_be_equal(a: Dim, b: Dim) -> bool:
    """Whether two sizes that have to be equal are, or may be once a call tells them: the program looks then.

    A dynamic one is no 1. So a 1 beside it is refused, which a program would broadcast.
    """
    return always_equal(a, b) or not (never_equal(a, b) or 1 in (a, b))
