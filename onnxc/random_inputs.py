"""Inputs for a model, made at random so that they mean something to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxc.errors import InputError, LimitError, abridged, spelled
from onnxc.ir.dtypes import BY_NAME, DType
from onnxc.ir.expr import Dim, Sym, Symbol, evaluate, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import MapType, OptionalType, SequenceType, TensorType, Type, shape_within
from onnxc.primitives.base import Kind, lookup
from onnxc.runtime.cpu import available_bytes
from onnxc.runtime.sizes import encode

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

MAX_ELEMENTS = 1 << 31
_LARGE = 1 << 26  # bytes of an input for which it is asked how much memory is left
_DRAWN = 8  # bytes of an element as it is drawn, before it has its type
SEQUENCE = 2  # values in a random sequence
ANY_SHAPE = (2, 16)  # of a random tensor of any rank
_INDEXED = {"gather": 1, "gather_elements": 1, "gather_nd": 1, "scatter_elements": 1, "scatter_nd": 1}


def random_inputs(graph: Graph, *, seed: int = 0, sample: int = 0, dims: Mapping[str, int] | None = None) -> Arrays:
    """Inputs that fit a graph of primitives (`onnxc.passes.decompose`), the same for the same seed.

    Floats are normal. Integers that reach a gather as its index stay inside the gathered table. Inputs with
    `mask` in their name are all ones in the first sample; in later ones, each row ends in zeros. Other
    integers are small and positive. Dynamic dims take their sizes from `dims`, by the model's name for the
    dim, and else from `default_dims`.

    A sequence is a list of two values, an optional has its value, a tensor of any rank has rank 2. An input that has a
    default has that.

    Raises InputError: the seed is negative, a dim is unknown or too large, an input is a map. LimitError: an input is
    larger than the memory that is left.
    """
    if seed < 0:
        raise InputError(f"a seed is a number from 0 on, and not {seed}")
    rng = np.random.default_rng([seed, sample])
    sizes = choose_dims(graph, dims or {})
    limits = index_limits(graph, sizes)
    declared = graph.metadata.get("input_types", {})

    def value(v: Value, t: Type | None) -> Any:
        if isinstance(t, SequenceType):
            return [value(v, t.element) for _ in range(SEQUENCE)]
        if isinstance(t, OptionalType):
            return value(v, t.element)
        if isinstance(t, MapType):
            raise InputError(f"input {v.name!r} is a {t}: random inputs have none")
        tensor = TensorType(_innermost(declared[v.name]), ANY_SHAPE) if t is None else t
        assert isinstance(tensor, TensorType)
        one = Value(tensor, v.name)
        found = _random(one, _shape(one, sizes), limits.get(v.id), rng, sample)
        return np.asarray(found, one.dtype.numpy)  # numpy gives a bool or a str for one of rank 0

    return {v.name: graph.defaults[v.name] if v.name in graph.defaults else value(v, v.type) for v in graph.inputs}


def _innermost(declared: Sequence[Any]) -> DType:
    """The dtype of ``["sequence", ["any", "float32"]]``."""
    while declared[0] != "any":
        declared = declared[1]
    return BY_NAME[declared[1]]


def random_for_signature(
    signature: Sequence[tuple[str, str, Sequence[int | str | None]]],
    *,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
) -> Arrays:
    """Inputs for (name, type, shape) as `get_inputs()` has them, with no graph to learn from."""
    symbols_by_name: dict[str, Dim] = {}
    values = []
    for name, type_, shape in signature:
        own = [
            d if isinstance(d, int) else symbols_by_name.setdefault(str(d), Sym(f"d{len(symbols_by_name)}"))
            for d in shape
        ]
        values.append(Value(TensorType(_dtype_of_tensor(type_), tuple(own)), name))
    names = {str(symbol): name for name, symbol in symbols_by_name.items()}
    return random_inputs(Graph(values, [], [], [], dim_names=names), seed=seed, dims=dims)


def _dtype_of_tensor(type_: str) -> DType:
    if not type_.startswith("tensor("):
        raise InputError(f"there are no random inputs of type {type_} for a saved model: give the inputs")
    name = type_.removeprefix("tensor(").removesuffix(")")
    return BY_NAME[{"float": "float32", "double": "float64"}.get(name, name)]


def _shape(value: Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = tuple(evaluate(d, sizes) for d in value.shape)
    if np.prod(shape, dtype=float) > MAX_ELEMENTS:
        raise InputError(f"input {value.name!r} would have the shape {shape}: choose smaller dims")
    needed = math.prod(shape) * (value.dtype.itemsize + _DRAWN)
    if needed > _LARGE and needed > (left := available_bytes()):  # the system may grant it, and end the process
        raise LimitError(
            f"input {value.name!r} of the shape {shape} takes {needed} bytes to draw: {left} bytes of memory are left"
        )
    return shape


def _random(value: Value, shape: tuple[int, ...], limit: int | None, rng: np.random.Generator, sample: int) -> Array:
    dtype: DType = value.dtype
    if "mask" in value.name.lower():
        return _mask(shape, rng, sample).astype(dtype.numpy)
    if dtype.kind == "bool":
        return rng.random(shape) < 0.5
    if dtype.is_integer:
        if limit is None:
            limit = 256 if dtype.name == "uint8" else 128 if dtype.name == "int8" else 10
        low = -128 if dtype.name == "int8" and limit == 128 else 0 if limit <= 10 or dtype.name == "uint8" else 1
        return rng.integers(min(low, limit - 1), limit, shape).astype(dtype.numpy)
    if dtype.is_float:
        return rng.standard_normal(shape).astype(dtype.numpy)
    if dtype.kind == "complex":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype.numpy)
    return rng.choice(np.array(["a", "bc", ""], dtype=object), shape)


def _mask(shape: tuple[int, ...], rng: np.random.Generator, sample: int) -> Array:
    mask = np.ones(shape, np.int64)
    if sample and shape and shape[-1] > 1:
        lengths = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
        mask = (np.arange(shape[-1]) < lengths).astype(np.int64)
    return mask


def choose_dims(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    """A size for each dynamic dim, by symbol. Raises InputError for names that the model does not have."""
    own = {graph.dim_names.get(s.key, s.key): s.key for s in _symbols(graph)}
    unknown = sorted(set(dims) - set(own))
    if unknown:
        there = ", ".join(spelled(abridged(name)) for name in own) or "none"
        raise InputError(f"the model has no dynamic dim {', '.join(map(repr, unknown))}; its dynamic dims: {there}")
    if any(size < 0 for size in dims.values()):
        raise InputError(f"sizes of dims cannot be negative: {dict(dims)}")
    return default_dims(graph) | {own[name]: size for name, size in dims.items()}


def default_dims(graph: Graph) -> dict[str, int]:
    """2 for a batch (the first axis), 64 for the axes of an image, 16 for everything else, by symbol."""
    given = [(d, n) for v in graph.inputs if v.name in graph.defaults
             for d, n in zip(v.shape, graph.defaults[v.name].shape, strict=True)]  # fmt: skip
    sizes = {size: n for d, n in given if isinstance(size := encode(d), str)}
    for value in graph.inputs:
        shape = shape_within(value.type)
        image = isinstance(value.type, TensorType) and value.rank >= 4 and value.dtype.is_float
        for axis, d in enumerate(shape):
            for symbol in _in_order(d):
                size = 2 if axis == 0 else 64 if image and axis >= 2 else 16
                sizes.setdefault(symbol.key, size)
    return sizes


def dim_names(graph: Graph) -> list[str]:
    """The graph's dynamic dims, by the model's names for them, or `s0` where it has none."""
    return [graph.dim_names.get(s.key, s.key) for s in _symbols(graph)]


def _symbols(graph: Graph) -> list[Symbol]:
    return list(dict.fromkeys(s for v in graph.inputs for d in shape_within(v.type) for s in _in_order(d)))


def _in_order(d: Dim) -> list[Symbol]:
    return sorted(symbols(d))


def index_limits(graph: Graph, sizes: Mapping[str, int]) -> dict[int, int]:
    """For each integer input that selects from tables: the size of the smallest, by the input's id.

    From each gather's (or scatter's) index back to the graph's inputs, through views and arithmetic.
    """
    limits: dict[int, int] = {}
    for node in graph.nodes:
        if node.op in _INDEXED and _is_known(node, sizes):
            limit = _table_size(node, sizes)
            for value in _sources(node.operands[_INDEXED[node.op]]):
                limits[value.id] = min(limit, limits.get(value.id, limit))
    return {vid: max(limit, 1) for vid, limit in limits.items()}


def _is_known(node: Node, sizes: Mapping[str, int]) -> bool:
    """Whether the size of the table follows from those of the inputs."""
    return all(s.key in sizes for d in node.operands[0].shape for s in symbols(d))


def _table_size(node: Node, sizes: Mapping[str, int]) -> int:
    shape = node.operands[0].shape
    axes = [shape[node.attrs["axis"]]] if "axis" in node.attrs else [d for d in shape if d != 1] or [1]
    return min((evaluate(d, sizes) for d in axes), default=1)


def _sources(value: Value) -> list[Value]:
    """The integer graph inputs that an index is computed from."""
    found: list[Value] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        v = pending.pop()
        if v.id in seen or not isinstance(v.type, TensorType) or not v.dtype.is_integer:
            continue
        seen.add(v.id)
        if v.node is None:
            found.append(v)
        elif lookup(v.node.op).kind in (Kind.POINTWISE, Kind.VIEW):
            pending.extend(v.node.operands)
    return found
