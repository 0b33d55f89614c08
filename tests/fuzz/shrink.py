"""Makes a failing model small: fewer outputs, fewer nodes (their results become inputs), smaller inputs.

What counts as failing stays the same kind of verdict. Every candidate is run by the oracle again, so it stays valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from tests.fuzz.judge import Verdict, judge
from tests.fuzz.model import Input, Model
from tests.fuzz.oracle import Array, Oracle, Refused, reads


def shrink(model: Model, verdict: Verdict, oracle: Oracle, seconds: float = 120) -> tuple[Model, Verdict]:
    """The smallest model found that fails alike, with its verdict. The inputs are those that show the failure."""
    start = time.monotonic()
    if verdict.inputs is not None and verdict.inputs.keys() == model.arrays.keys():
        fixed = _fixed(replace(model, arrays=dict(verdict.inputs)))
        found = _judged(fixed, oracle)
        if found is not None and found.kind == verdict.kind:
            model, verdict = fixed, found
    progress = True
    while progress and time.monotonic() - start < seconds:
        progress = False
        for candidate in _candidates(model, verdict, oracle):
            if time.monotonic() - start > seconds:
                break
            found = _judged(candidate, oracle)
            if found is not None and _alike(found, verdict):
                model, verdict, progress = candidate, found, True
                break
    return model, verdict


def _judged(model: Model, oracle: Oracle) -> Verdict | None:
    try:
        return judge(model, oracle)
    except Refused:
        return None


def _alike(a: Verdict, b: Verdict) -> bool:
    """Errors are the same where their first words are; sizes and names may change."""
    return a.kind == b.kind and (a.kind == "wrong" or a.text.split()[:4] == b.text.split()[:4])


def _fixed(model: Model) -> Model:
    """With the sizes of its inputs in the place of dynamic dims."""
    inputs = [replace(i, dims=tuple(model.arrays[i.name].shape)) for i in model.inputs]
    return replace(model, inputs=inputs, sizes={})


def _candidates(model: Model, verdict: Verdict, oracle: Oracle) -> Iterator[Model]:
    if len(model.outputs) > 1:
        ends = [verdict.output] if verdict.output else model.outputs
        yield from (replace(model, outputs=[o]).live() for o in ends)
        yield from (replace(model, outputs=[p for p in model.outputs if p != o]).live() for o in model.outputs)
    if model.sizes:
        yield _fixed(model)
    run = model.run(oracle, model.arrays, steady=False)
    count = len(model.nodes)
    width = count // 2
    while width >= 1:  # runs of nodes become inputs
        for first in range(0, count, width):
            yield from _cut(model, model.nodes[first : first + width], run.values)
        width //= 2
    for node in model.nodes:  # an earlier output instead of the end
        for o in node.output:
            if o and o not in model.outputs and isinstance(run.values[o], np.ndarray):
                yield replace(model, outputs=[o]).live()
    for node in model.nodes:
        yield from _bypassed(model, node, run.values)
    yield from _simpler_inputs(model)


def _cut(model: Model, nodes: list[onnx.NodeProto], values: dict[str, Any]) -> Iterator[Model]:
    made = [o for n in nodes for o in n.output if o]
    rest = [n for n in model.nodes if all(n is not m for m in nodes)]
    outputs = [o for o in model.outputs if o not in made]
    if not outputs or any(isinstance(values[o], list) for o in made):
        return
    needed = {r for n in rest for r in reads(n)}
    fresh = [o for o in made if o in needed]
    inputs = [*model.inputs, *(Input(o, values[o].dtype, tuple(values[o].shape)) for o in fresh)]
    arrays = {**model.arrays, **{o: values[o] for o in fresh}}
    yield replace(model, nodes=rest, outputs=outputs, inputs=inputs, arrays=arrays).live()


def _bypassed(model: Model, node: onnx.NodeProto, values: dict[str, Any]) -> Iterator[Model]:
    """An input of a node, of the type of its result, in its place."""
    (result,) = node.output if len(node.output) == 1 else ("",)
    if not result or result in model.outputs or isinstance(values[result], list):
        return
    for name in node.input:
        a, b = values.get(name), values[result]
        if isinstance(a, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape:
            nodes = []
            for other in model.nodes:
                if other is node:
                    continue
                copy = onnx.NodeProto()
                copy.CopyFrom(other)
                copy.input[:] = [name if i == result else i for i in other.input]
                nodes.append(copy)
            yield replace(model, nodes=nodes).live()


def _simpler_inputs(model: Model) -> Iterator[Model]:
    """Inputs as constants; sizes halved, everywhere they stand; rounder numbers."""
    sizes = sorted({d for a in model.arrays.values() for d in a.shape if d > 1}, reverse=True)
    for d in sizes:
        for smaller in (1, d // 2, d - 1):
            if 0 < smaller < d and not model.sizes:
                yield _resized(model, lambda n, d=d, s=smaller: s if n == d else n)
    change: Callable[[Array], Array]
    for change in (np.zeros_like, np.round):
        for name, a in model.arrays.items():
            if a.dtype.kind == "f" and not np.array_equal(change(a), a):
                yield replace(model, arrays={**model.arrays, name: change(a)})


def _resized(model: Model, change: Callable[[int], int]) -> Model:
    def cut(a: Array) -> Array:
        return a[tuple(slice(0, change(n)) for n in a.shape)]

    arrays = {n: cut(a) for n, a in model.arrays.items()}
    inputs = [replace(i, dims=tuple(arrays[i.name].shape)) for i in model.inputs]
    constants = {n: cut(a) if a.ndim > 1 else a for n, a in model.constants.items()}
    return replace(model, arrays=arrays, inputs=inputs, constants=constants)
