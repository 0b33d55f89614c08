"""Derivatives of functions over arrays.

In a trace they are further nodes of the same graph, so they nest, and are compiled with what is around them. Outside of
one the function is traced, compiled and run in each call; `jit` saves the tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from onnxc.array.arguments import checked_function, several
from onnxc.array.core import Array, asarray, call_one, traced, value_of
from onnxc.array.dims import may_be_equal
from onnxc.array.immediate import immediately
from onnxc.array.pytree import Spec, flatten, places, unflatten
from onnxc.array.tracing import NUMBERS
from onnxc.autodiff.control import keep_steps
from onnxc.autodiff.reverse import gradients
from onnxc.errors import InputError
from onnxc.frontends.trace import Trace, current
from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.builder import Builder

Function = Callable[..., Any]


def grad(f: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
    """The gradient of a function whose result is one float.

    Args:
        f: returns a float array without axes; with `has_aux` a pair of this and of anything else.
        argnums: the positional arguments by which it is differentiated: trees of float arrays (and numbers).
        has_aux: whether the gradient comes with the second of the pair.

    Returns:
        A function of the same arguments. Its result is a tree as the argument (a tuple of them where `argnums` is a
        sequence); with `has_aux` a pair of that and of the function's second result.

    Raises:
        InputError: when it is called: the result is no scalar, or an argument is not made of floats. UnsupportedError:
        something on the way has no derivative; it names the line.

    >>> grad(lambda x: x * x)(np.float32(3)).item()
    6.0
    """
    both = value_and_grad(f, argnums, has_aux)

    @functools.wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradient


def value_and_grad(f: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
    """As :func:`grad`, a function that returns both the result of `f` and the gradient."""
    checked_function(f, "what is differentiated")
    positions = several(argnums, int, "argnums")

    def traced_both(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = _numbers(positions, len(args))
        line = _Linear(lambda *xs: f(*_with(args, numbers, xs), **kwargs), [args[k] for k in numbers], has_aux)
        y = line.scalar()
        seed = line.b.scalar(1, y.dtype)
        found = line.back([seed])
        value = line.result if not has_aux else (line.result, line.aux)
        return value, (tuple(found) if isinstance(argnums, Iterable) else found[0])

    @functools.wraps(f)
    def both(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return traced_both(args, kwargs)
        return immediately(traced_both, "grad", args, kwargs)

    return both


def vjp(f: Function, *primals: Any, has_aux: bool = False) -> Any:
    """The result of a function, and the function of cotangents of it that gives those of the arguments.

    Args:
        f: its results are trees of float arrays; with `has_aux` a pair of such a tree and of anything else.
        primals: its arguments: trees of float arrays.

    Returns:
        `(result, back)`, or `(result, back, aux)`. `back` takes a tree as the result, and returns a tuple of one tree
        for each argument. Outside of a trace it computes the function again.
    """
    if current() is not None:
        line = _Linear(f, primals, has_aux)
        back = functools.partial(_pulled, line)
        return (line.result, back, line.aux) if has_aux else (line.result, back)
    found = immediately(lambda *xs: f(*xs), "vjp", *primals)
    result, aux = _pair(found) if has_aux else (found, None)

    def again(cotangents: Any) -> Any:
        def both(xs: tuple[Any, ...], dys: Any) -> Any:
            return _pulled(_Linear(f, xs, has_aux), dys)

        return both(primals, cotangents) if current() is not None else immediately(both, "vjp", primals, cotangents)

    return (result, again, aux) if has_aux else (result, again)


def jvp(f: Function, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> Any:
    """The result of a function, and how it changes where its arguments change by `tangents`.

    The derivative of the vector-Jacobian product by its cotangent, in which it is linear.

    Args:
        f: its results are trees of float arrays; with `has_aux` a pair of such a tree and of anything else.
        primals: its arguments: trees of float arrays.
        tangents: trees as these.

    Returns:
        `(result, tangent)`, or `(result, tangent, aux)`.
    """
    if current() is None:
        return immediately(lambda xs, dxs: jvp(f, xs, dxs, has_aux), "jvp", tuple(primals), tuple(tangents))
    line = _Linear(f, tuple(primals), has_aux)
    dxs = _matching(tuple(tangents), line.xs, line.spec, "tangents", line.trace)
    b, start = line.b, len(line.b.nodes)
    with line.trace.source("jvp"), b.unfolded():
        zeros = [b.one("copy", b.full(y.shape, b.scalar(0, y.dtype), y.dtype)) for y in line.ys]
        back = gradients(b, line.nodes, _seeds(b, line.ys, zeros), line.xs)
    nodes = _kept(b, start, zeros)
    pairs = [(v, dx) for v, dx in zip(back, dxs, strict=True) if v is not None]
    with line.trace.source("jvp"):
        found = gradients(b, nodes, _seeds(b, [v for v, _ in pairs], [dx for _, dx in pairs]), zeros)
        dys = [_or_zeros(b, dy, y) for dy, y in zip(found, line.ys, strict=True)]
    tangent = unflatten(line.y_spec, [traced(v, line.trace) for v in dys])
    return (line.result, tangent, line.aux) if has_aux else (line.result, tangent)


def stop_gradient(x: Any) -> Any:
    """The same arrays (a tree of them), which count as constants for derivatives."""
    leaves, spec = flatten(x)
    return unflatten(spec, [call_one(_stopped, leaf, name="stop_gradient") for leaf in leaves])


def _stopped(b: Builder, x: Value) -> Value:
    return b.detach(x)


# ---------------------------------------------------------------- one function in a trace


class _Linear:
    """A function that was traced, with what is needed to go back through it.

    Args:
        f: the function, of trees.
        primals: its arguments.
        has_aux: whether it returns a pair, of which the second is not differentiated.

    Attributes:
        result, aux: what it returned.
        xs, ys: values of the leaves of arguments and of the result.
        nodes: what is between them.
    """

    def __init__(self, f: Function, primals: Sequence[Any], has_aux: bool) -> None:
        trace = current()
        assert trace is not None
        self.trace, self.b = trace, trace.builder
        leaves, self.spec = flatten(tuple(primals))
        self.xs = _own(trace, leaves, primals)
        start = len(self.b.nodes)
        weak = [type(x) in NUMBERS for x in leaves]
        found = f(*unflatten(self.spec, [traced(v, trace, w) for v, w in zip(self.xs, weak, strict=True)]))
        self.result: Any
        self.aux: Any
        self.result, self.aux = _pair(found) if has_aux else (found, None)
        results, self.y_spec = flatten(self.result)
        self.ys = [self._float(y, k) for k, y in enumerate(results)]
        self.nodes = _kept(self.b, start, self.xs)

    def _float(self, y: Any, k: int) -> Value:
        if not isinstance(y, (Array, np.ndarray, np.generic, *NUMBERS)):
            raise InputError(
                f"{places(self.result, 'result')[k]} is of the type {type(y).__name__}, which has no derivative"
            )
        value = value_of(asarray(y), self.trace)
        if not value.dtype.is_float:
            raise InputError(f"{places(self.result, 'result')[k]} is {value.t}; only floats have a derivative")
        return value

    def scalar(self) -> Value:
        """The only result, a float without axes."""
        if len(self.ys) != 1 or not self.y_spec.is_leaf() or self.ys[0].rank:
            found = self.ys[0].t if len(self.ys) == 1 else f"a tree of {len(self.ys)} arrays"
            raise InputError(
                f"grad is of functions that return one float without axes, and this one returns {found}; "
                f"add it up (sum, mean), return the rest with has_aux=True, or use vjp"
            )
        return self.ys[0]

    def back(self, dys: Sequence[Value]) -> list[Any]:
        """A tree for each argument: cotangents of its leaves, for those of the results. May be in an inner trace."""
        trace = current()
        assert trace is not None
        b = trace.builder
        with trace.source("grad"):
            found = gradients(b, self.nodes, _seeds(b, self.ys, dys), self.xs)
            dxs = [_or_zeros(b, dx, x) for dx, x in zip(found, self.xs, strict=True)]
        return list(unflatten(self.spec, [traced(v, trace) for v in dxs]))


def _own(trace: Trace, leaves: Sequence[Any], primals: Sequence[Any]) -> list[Value]:
    """The leaves as values that nothing else reads: only what goes through these arguments is differentiated."""
    found = []
    for k, leaf in enumerate(leaves):
        is_array = isinstance(leaf, (Array, np.ndarray, np.generic, float, complex))
        value = value_of(asarray(leaf), trace) if is_array else None
        if value is None or not value.dtype.is_float:
            what = value.t if value is not None else f"of the type {type(leaf).__name__}"
            raise InputError(
                f"{places(tuple(primals), 'argument')[k]} is {what}; a function is differentiated by floats only"
            )
        with trace.source("grad"), trace.builder.unfolded():
            found.append(trace.builder.one("copy", value))
    return found


def _kept(b: Builder, start: int, wrt: Sequence[Value]) -> list[Node]:
    """The nodes since `start`; loops among them keep what the way back reads."""
    part = Graph(list(wrt), [], b.nodes[start:], [])
    b.nodes[start:] = keep_steps(part, wrt, b.run_time).nodes
    return b.nodes[start:]


def _seeds(b: Builder, ys: Sequence[Value], dys: Sequence[Value]) -> dict[int, Value]:
    found: dict[int, Value] = {}
    for y, dy in zip(ys, dys, strict=True):
        found[y.id] = b.add(found[y.id], dy) if y.id in found else dy
    return found


def _or_zeros(b: Builder, dx: Value | None, x: Value) -> Value:
    return dx if dx is not None else b.full(x.shape, b.scalar(0, x.dtype), x.dtype)


def _pulled(line: _Linear, cotangents: Any) -> tuple[Any, ...]:
    trace = current()
    if trace is None:  # the trace that the function belongs to has ended
        raise InputError("this function of vjp belongs to a trace that has ended: call it where vjp was called")
    return tuple(line.back(_matching(cotangents, line.ys, line.y_spec, "cotangents", trace)))


def _matching(tree: Any, like: Sequence[Value], spec: Spec, what: str, trace: Trace) -> list[Value]:
    """The values of a tree that has to be like another one."""
    leaves, own = flatten(tree)
    if own != spec:
        raise InputError(f"the {what} are a tree {own}, and should be one like {spec}")
    found = []
    for leaf, place, x in zip(leaves, places(tree, what), like, strict=True):
        array = asarray(leaf)
        v = value_of(array, trace)
        if type(leaf) in NUMBERS:
            v = trace.builder.cast(v, x.dtype)
        alike = v.dtype is x.dtype and v.rank == x.rank and all(map(may_be_equal, v.shape, x.shape))
        if not alike:
            raise InputError(f"{place} is {v.t}, and should be {x.t}")
        with trace.source(what):
            found.append(trace.builder.expand(v, x.shape))  # of sizes that a call compares
    return found


def _pair(found: Any) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise InputError(f"with has_aux=True a function returns a pair, not what is of the type {type(found).__name__}")
    return found


def _numbers(found: Sequence[int], count: int) -> list[int]:
    for k in found:
        if not -count <= k < count:
            raise InputError(f"argnums: there is no positional argument {k}; the call has {count}")
    if len({k % count for k in found}) < len(found):
        raise InputError(f"argnums: {list(found)} names an argument twice")
    return [k % count for k in found]


def _with(args: Sequence[Any], numbers: Sequence[int], new: Sequence[Any]) -> list[Any]:
    found = list(args)
    for k, x in zip(numbers, new, strict=True):
        found[k] = x
    return found
