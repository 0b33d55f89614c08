"""Sizes that do not decide: which dims of arguments become symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxc.array.arguments import Given
from onnxc.array.pytree import flatten
from onnxc.array.tracing import Leaf
from onnxc.errors import InputError
from onnxc.ir.expr import Dim, Sym

Axes = int | Sequence[int] | Mapping[int, str]
Dynamic = bool | Mapping["str | int", Axes]


def dynamic_leaves(dynamic: Dynamic, given: Given) -> list[Leaf]:
    """The leaves with symbols for their dynamic dims, s0, s1, ... InputError for arguments that are not there."""
    symbols = _Symbols()
    if dynamic is True:
        open_axes = [{k: "" for k, d in enumerate(leaf.type.shape) if d not in (0, 1)} for leaf in given.leaves]
        return [_renamed(leaf, axes, symbols) for leaf, axes in zip(given.leaves, open_axes, strict=True)]
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
            found.append(_renamed(rest.pop(0), axes, symbols))
    missing = [k for k in dynamic if k not in used]
    if missing:
        raise InputError(f"dynamic: there is no argument {missing[0]!r}; there are {[n for _, n, _ in entries]}")
    return found


def _named(axes: Axes) -> dict[int, str]:
    if isinstance(axes, Mapping):
        return dict(axes)
    return dict.fromkeys([axes] if isinstance(axes, int) else axes, "")


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


def _renamed(leaf: Leaf, axes: Mapping[int, str], symbols: _Symbols) -> Leaf:
    rank = leaf.type.rank
    shape = list(leaf.type.shape)
    for axis, name in sorted(axes.items()):
        if not -rank <= axis < rank:
            if rank == 0:
                continue  # a scalar in a tree of arrays
            raise InputError(f"dynamic: axis {axis} of an array with {rank} axes")
        shape[axis] = symbols.of(name)
    return replace(leaf, type=leaf.type.with_shape(tuple(shape)))
