"""Gradients against central differences in float64.

    agrees(lambda b, x, y: b.mul(x, y), array, other)      a function that builds primitives, on these inputs

Every float input counts, unless it is in `fixed`. The loss is the sum of all float results times random cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.autodiff.clean import drop_unused, without_hints
from onnxc.autodiff.control import keep_steps
from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.reverse import gradients
from onnxc.ir import dtypes
from onnxc.ir.expr import Sym
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify

Array = np.ndarray[Any, Any]
Build = Callable[..., "Value | Sequence[Value]"]
EPS, RTOL, ATOL = 1e-6, 1e-3, 1e-5
SAMPLED = 40  # elements of an input whose derivatives are measured


def floats(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def ints(*shape: int, high: int, low: int = 0, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).integers(low, high, shape)


def distinct(*shape: int, seed: int = 0) -> Array:
    """Elements that are far apart: nothing overtakes another within a difference."""
    n = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(n).reshape(shape) - n / 2 + 0.25) / 4


def types_of(arrays: Sequence[Array], dynamic: bool) -> list[TensorType]:
    """Their types; `dynamic`: sizes but one have names, equal ones the same."""
    return [
        TensorType(dtypes.from_numpy(a.dtype), tuple(Sym(f"d{d}") if dynamic and d != 1 else d for d in a.shape))
        for a in arrays
    ]


def built(build: Build, arrays: Sequence[Array], dynamic: bool = False) -> Graph:
    """What a function builds, with hints for derivatives."""
    b = Builder(differentiable=True)
    xs = [b.input(t, f"x{k}") for k, t in enumerate(types_of(arrays, dynamic))]
    made = build(b, *xs)
    return b.graph([made] if isinstance(made, Value) else list(made))


def with_gradient(primal: Graph, wrt: Sequence[int]) -> Graph:
    """By these inputs; further inputs are the cotangents of the float outputs."""
    ways = [primal.inputs[k] for k in wrt]
    primal = keep_steps(primal, ways)
    b = Builder()
    b.nodes, b.inputs = list(primal.nodes), list(primal.inputs)
    seeds: dict[int, Value] = {}
    for v in primal.outputs:
        if v.dtype.is_float:
            seed = b.input(v.t, f"dy{len(b.inputs)}")
            seeds[v.id] = b.add(seeds[v.id], seed) if v.id in seeds else seed
    found = gradients(b, primal.nodes, seeds, ways)
    ends = [zeros_like(b, v) if dx is None else dx for v, dx in zip(ways, found, strict=True)]
    graph = drop_unused(without_hints(eliminate_dead(b.graph(ends))))
    verify(graph)
    return graph


def cotangents_of(outputs: Sequence[Array]) -> list[Array]:
    """Random ones for float results."""
    rng = np.random.default_rng(7)
    return [rng.uniform(0.5, 1.5, y.shape) * rng.choice([-1, 1], y.shape) for y in outputs if y.dtype.kind == "f"]


def measured(
    run: Callable[[list[Array]], list[Array]],
    arrays: Sequence[Array],
    k: int,
    dys: Sequence[Array],
    count: int = SAMPLED,
) -> Array:
    """Central differences by input k, of `count` elements; NaN where one was not measured."""

    def loss(given: list[Array]) -> float:
        ys = [y for y in run(given) if y.dtype.kind == "f"]
        return float(sum((y * dy).sum() for y, dy in zip(ys, dys, strict=True)))

    slope = np.full(arrays[k].shape, np.nan)
    places = list(np.ndindex(*arrays[k].shape))
    if len(places) > count:
        chosen = np.random.default_rng(3).choice(len(places), count, replace=False)
        places = [places[int(i)] for i in chosen]
    for at in places:
        ends = []
        for step in (EPS, -EPS):
            moved = [a.copy() if i == k else a for i, a in enumerate(arrays)]
            moved[k][at] += step
            ends.append(loss(moved))
        slope[at] = (ends[0] - ends[1]) / (2 * EPS)
    return slope


def compare(got: Array, slope: Array, what: str) -> None:
    assert got.shape == slope.shape, f"{what}: shape {got.shape}, not {slope.shape}"
    seen = ~np.isnan(slope)
    np.testing.assert_allclose(got[seen], slope[seen], RTOL, ATOL, err_msg=what)


def agrees(build: Build, *arrays: Array, fixed: Sequence[int] = (), dynamic: bool = True) -> None:
    """Gradients are what central differences are, with sizes known at compile time and (`dynamic`) at run time only."""
    given = [np.asarray(a) for a in arrays]
    wrt = [k for k, a in enumerate(given) if a.dtype.kind == "f" and k not in fixed]
    forward = built(build, given)
    dys = cotangents_of(interpret(forward, given))
    slopes = [measured(lambda xs: interpret(forward, xs), given, k, dys) for k in wrt]
    for sizes in (False, True) if dynamic else (False,):
        graph = with_gradient(built(build, given, sizes), wrt)
        for k, got, slope in zip(wrt, interpret(graph, [*given, *dys]), slopes, strict=True):
            compare(got, slope, f"input {k}{' with dynamic dims' if sizes else ''}")


def gradient(build: Build, *arrays: Array, wrt: Sequence[int] | None = None) -> list[Array]:
    """The gradients of the sum of all results by float inputs."""
    given = [np.asarray(a) for a in arrays]
    chosen = [k for k, a in enumerate(given) if a.dtype.kind == "f"] if wrt is None else list(wrt)
    graph = with_gradient(built(build, given), chosen)
    ones = [np.ones(np.shape(y), y.dtype) for y in interpret(built(build, given), given) if y.dtype.kind == "f"]
    return interpret(graph, [*given, *ones])
