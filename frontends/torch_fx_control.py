"""Branches and loops on tensors: higher-order ops of PyTorch, whose arguments are graphs.

`cond` and `while_loop` are steps of the host, so there are such programs in models alone; `scan` and `map` are loops of
a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_pointwise import truth
from onnxc.frontends.torch_fx_table import RULES, Call
from onnxc.ir.graph import Value
from onnxc.ops.control import choose, iterate, scalar
from onnxc.primitives.builder import Builder

F = TypeVar("F", bound=Callable[..., Any])


def higher(name: str) -> Callable[[F], F]:
    """Registers the decorated function for a higher-order op, where the installed PyTorch has it."""

    def add(rule: F) -> F:
        found = getattr(torch.ops.higher_order, name, None)
        if found is not None:
            RULES[found] = rule
        return rule

    return add


def _build(c: Call, module: Any, b: Builder, operands: Sequence[Any]) -> list[Value]:
    assert c.region is not None
    return c.region(module, b, operands)


def _tensors(values: Sequence[Any], what: str) -> list[Value]:
    if not all(isinstance(v, Value) for v in values):
        raise UnsupportedError(f"{what} carries what is no real tensor")
    return list(values)


@higher("cond")
def cond(c: Call, condition: Any, true: Any, false: Any, operands: Sequence[Any] = ()) -> list[Value]:
    if not isinstance(condition, Value):
        return _build(c, true if condition else false, c.b, operands)
    branches = [lambda b: _build(c, true, b, operands), lambda b: _build(c, false, b, operands)]
    return choose(c.b, truth(c.b, scalar(c.b, condition)), branches)


@higher("while_loop")
def while_loop(c: Call, going: Any, body: Any, carried: Sequence[Any], more: Sequence[Any] = ()) -> list[Value]:
    def goes(b: Builder, values: Sequence[Value]) -> Value:
        return truth(b, scalar(b, _build(c, going, b, [*values, *more])[0]))

    def step(b: Builder, number: Value, go: Value, values: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        after = _build(c, body, b, [*values, *more])
        return goes(b, after), after, []

    start = _tensors(carried, "a loop")
    return iterate(c.b, None, goes(c.b, start), start, step)[0]


@higher("scan")
def scan(c: Call, step: Any, initial: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()) -> list[Value]:
    initial, xs = _tensors(initial, "a scan"), _tensors(xs, "a scan")

    def body(b: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        found = _build(c, step, b, [*states, *slices, *more])
        return found[: len(states)], found[len(states) :]

    states, results = c.b.scan(initial, xs, xs[0].shape[0], body)
    return [*states, *results]


@higher("map_impl")
def map_(c: Call, function: Any, xs: Sequence[Any], more: Sequence[Any] = ()) -> list[Value]:
    xs = _tensors(xs, "a map")
    run = partial(_build, c, function)
    return c.b.scan([], xs, xs[0].shape[0], lambda b, states, slices: ([], run(b, [*slices, *more])))[1]


@higher("invoke_subgraph")
def invoke(c: Call, function: Any, identifier: str, *operands: Any) -> list[Value]:
    """A part of the function that is traced once (`torch.compiler.nested_compile_region`)."""
    return _build(c, function, c.b, operands)
