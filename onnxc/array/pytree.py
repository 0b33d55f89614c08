"""Trees of arrays: dicts, lists, tuples, named tuples, dataclasses and None, flat and back, with names of the places.

A dataclass is known from when one is first met. Its fields are subtrees, but for those with
`dataclasses.field(metadata={"static": True})`, which belong to the structure, and must be hashable.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any

import optree

from onnxc.array.eager import frozen
from onnxc.errors import InputError

_NAMESPACE = "onnxc"
_lock = threading.Lock()
_known: set[type] = set()
Spec = optree.PyTreeSpec


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of a tree and its structure, which can be hashed and compared. InputError for one without an end."""
    leaves, spec = shallow_tree(tree)
    if any(_is_dataclass(x) for x in leaves):
        for x in leaves:
            if _is_dataclass(x):
                _register(type(x))
        return flatten(tree)
    return leaves, spec


def shallow(*trees: Any) -> tuple[list[Any], Spec]:
    """As :func:`flatten` of a tuple, but dataclasses that are not known yet are leaves."""
    return shallow_tree(trees)


def shallow_tree(tree: Any) -> tuple[list[Any], Spec]:
    """As :func:`shallow`, of one tree."""
    try:
        return optree.tree_flatten(tree, namespace=_NAMESPACE)
    except RecursionError as error:
        raise InputError("the tree of arrays is too deep: it may hold itself", cause=error) from error


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The tree of a structure, with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def tree_map(f: Callable[..., Any], tree: Any, *more: Any) -> Any:
    """The tree of `f(leaf, ...)` for each leaf of a tree, and those in the same places of others, which are alike.

    Raises:
        InputError: one of the others has another structure.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": [2]}, {"x": 10, "y": [20]})
    {'x': 11, 'y': [22]}
    """
    leaves, spec = flatten(tree)
    columns = [leaves]
    for other in more:
        own, found = flatten(other)
        if found != spec:
            raise InputError(f"tree_map of trees that differ: {spec} and {found}")
        columns.append(own)
    return unflatten(spec, [f(*xs) for xs in zip(*columns, strict=True)])


def places(tree: Any, name: str = "") -> list[str]:
    """How each leaf is reached from the tree, which is called `name`: `params['w'][0]`."""
    flatten(tree)
    return [a.codify(name) for a in optree.tree_accessors(tree, namespace=_NAMESPACE)]


class _Held:
    """Static fields of a dataclass: equal where they decide alike, as static arguments are."""

    __slots__ = ("key", "values")

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values, self.key = values, frozen(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.key == other.key

    def __hash__(self) -> int:
        hash(self.values)  # a TypeError where a field cannot be
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.values)


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and type(x) not in _known


def _register(cls: type) -> None:
    fields = dataclasses.fields(cls)
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    static = tuple(f.name for f in fields if f.metadata.get("static"))

    def take_apart(x: Any) -> tuple[tuple[Any, ...], _Held, tuple[str, ...]]:
        return tuple(getattr(x, n) for n in children), _Held(tuple(getattr(x, n) for n in static)), children

    def put_together(held: Any, values: Any) -> Any:
        made: Any = object.__new__(cls)  # its __init__ may check, or take other arguments
        for n, v in (*zip(children, values, strict=True), *zip(static, held.values, strict=True)):
            object.__setattr__(made, n, v)
        return made

    with _lock:
        if cls not in _known:
            optree.register_pytree_node(
                cls, take_apart, put_together, path_entry_type=optree.GetAttrEntry, namespace=_NAMESPACE
            )
            _known.add(cls)
