"""Control flow on traced values: If, Loop and Scan of the program. Outside of a trace the same functions run in Python.

A branch or a body sees the arrays around it, and returns what goes on; what it writes elsewhere is lost. It may be
traced more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.array.arguments import checked_function, size_of
from onnxc.array.core import Array, asarray, call_one, concrete, known, traced, value_of
from onnxc.array.dims import may_be_equal
from onnxc.array.immediate import immediately
from onnxc.array.pytree import Spec, flatten, places, unflatten
from onnxc.array.sizes import Size, unsized
from onnxc.array.tracing import NUMBERS
from onnxc.errors import InputError
from onnxc.frontends.trace import Trace, current
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType, same_shape
from onnxc.ops.control import choose, iterate, scan_over
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import PART, Complex, opened, pair

Function = Callable[..., Any]


def cond(condition: Any, then: Function, otherwise: Function, *operands: Any) -> Any:
    """`then(*operands)` where a condition holds, else `otherwise(*operands)`; the other one is not run.

    Args:
        condition: a bool array without axes.
        then, otherwise: return trees of arrays, both of one structure, dtypes and shapes.
        operands: their arguments. (They can use other arrays that they see, too.)

    Raises:
        InputError: the condition is no bool, or the branches return what is not alike: it names the place.
    """
    checked_function(then, "the branch `then` of cond")
    checked_function(otherwise, "the branch `otherwise` of cond")
    pred = _condition(condition, "cond")
    decided = known(pred)
    trace = current()
    if decided is not None or trace is None:
        return (then if bool(decided) else otherwise)(*operands)
    with trace.source("cond"):
        test = value_of(pred, trace)
    ends: list[_Ends] = []

    def branch(f: Function) -> Callable[[Builder], list[Value]]:
        def build(inner: Builder) -> list[Value]:
            with Trace(inner, trace) as own:
                ends.append(_Ends(f(*operands), own))
            if len(ends) == 2:
                ends[1].check_like(ends[0], "the branches of cond return", "result")
            return _parts(ends[-1].values)

        return build

    with trace.source("cond"):
        found = choose(trace.builder, test, [branch(then), branch(otherwise)])
    return unflatten(ends[0].spec, [traced(v, trace) for v in _joined(found, ends[0].values)])


def while_loop(condition: Function, body: Function, init: Any) -> Any:
    """`body` again and again, while `condition` holds: `while condition(state): state = body(state)`.

    Args:
        condition: of the state, a bool array without axes.
        body: from one state to the next, which is alike in structure, dtypes and shapes.
        init: the first state, a tree of arrays. A number of Python gets the dtype that the body makes of it.

    Raises:
        InputError: the body changes what the state is like: it names the place.
    """
    checked_function(condition, "the condition of while_loop")
    checked_function(body, "the body of while_loop")
    trace = current()
    if trace is None:
        state = _settled(init, body)
        while bool(_condition(condition(state), "while_loop")):
            state = _same_state(body(state), state, "while_loop")
        return state
    start = _State(init, trace, lambda s: body(s), "while_loop")

    def run(inner: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        with Trace(inner, trace) as own:
            after = start.after(body(start.tree(start.joined(carried), own)), own)
            again = value_of(_condition(condition(start.tree(after, own)), "while_loop"), own)
        return again, _parts(after), []

    first = value_of(_condition(condition(start.tree(start.values, trace)), "while_loop"), trace)
    with trace.source("while_loop"):
        found, _ = iterate(trace.builder, None, first, _parts(start.values), run)
    return start.tree(start.joined(found), trace)


def fori_loop(lower: Any, upper: Any, body: Function, init: Any) -> Any:
    """`for k in range(lower, upper): state = body(k, state)`.

    Args:
        lower, upper: ints (or sizes), or int arrays without axes. Where both are ints, or sizes, it is differentiable.
        body: `(k, state)` to the next state, which is alike in structure, dtypes and shapes.
        init: the first state, a tree of arrays. A number of Python gets the dtype that the body makes of it.

    Raises:
        InputError: the body changes what the state is like: it names the place.
    """
    checked_function(body, "the body of fori_loop")
    trace = current()
    if trace is None:
        state = _settled(init, lambda s: body(_number(), s))
        for k in range(int(_bound(lower, "lower")), int(_bound(upper, "upper"))):
            state = _same_state(body(asarray(np.int64(k)), state), state, "fori_loop")
        return state
    b = trace.builder
    with trace.source("fori_loop"):
        low, high = _int_value(lower, "lower", trace), _int_value(upper, "upper", trace)
        trip = b.max(b.sub(high, low), 0)
    start = _State(init, trace, lambda s: body(_number(), s), "fori_loop")

    def run(inner: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        with Trace(inner, trace) as own:
            with own.source("fori_loop"):
                k = traced(inner.add(number, low), own)
            after = start.after(body(k, start.tree(start.joined(carried), own)), own)
        return inner.scalar(True, dtypes.boolean), _parts(after), []

    with trace.source("fori_loop"):
        found, _ = iterate(b, trip, None, _parts(start.values), run)
    return start.tree(start.joined(found), trace)


def scan(
    body: Function, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Steps over the first axis of arrays, with a state:

        ys = []
        for x in xs:
            state, y = body(state, x)
            ys.append(y)
        return state, stack(ys)

    Args:
        body: `(state, x)` to `(next state, y)`; the next state is alike in structure, dtypes and shapes.
        init: the first state, a tree of arrays. A number of Python gets the dtype that the body makes of it.
        xs: a tree of arrays with equal first axes; None: x is None, `length` times.
        length: the number of steps.
        reverse: from the last step to the first; ys stand where their xs do.

    Returns:
        The last state, and the tree of ys with a new first axis.

    Raises:
        InputError: lengths differ, or the body changes what the state is like.
    """
    checked_function(body, "the body of scan")
    given, spec = flatten(xs)
    arrays = [asarray(x) for x in given]
    count = _length(arrays, xs, length)
    trace = current()
    if trace is None:
        return _scan_in_python(body, init, arrays, spec, count, reverse)

    def step(tree: Any, slices: Sequence[Array]) -> Any:
        found = body(tree, unflatten(spec, slices))
        if not isinstance(found, tuple) or len(found) != 2:
            raise InputError(
                f"the body of scan returns a pair (state, y), not what is of the type {type(found).__name__}"
            )
        return found

    b = trace.builder
    with trace.source("scan"):
        given_values = [value_of(x, trace) for x in arrays]
        stacks = [b.expand(v, (count, *v.shape[1:])) for v in _parts(given_values)] or [b.iota(count)]
        stacks = [b.flip(v, [0]) if reverse else v for v in stacks]
    start = _State(init, trace, lambda s: step(s, _samples(arrays))[0], "scan")
    ends: list[_Ends] = []

    def run(inner: Builder, before: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        with Trace(inner, trace) as own:
            rows = _joined(slices, given_values)
            after, y = step(start.tree(start.joined(before), own), [traced(v, own) for v in rows])
            ends[:] = [_Ends(y, own)]
            return _parts(start.after(after, own)), _parts(ends[0].values)

    with trace.source("scan"):
        states, found = scan_over(b, run, _parts(start.values), stacks)
        found = _joined([b.flip(v, [0]) if reverse else v for v in found], ends[0].values)
    return start.tree(start.joined(states), trace), unflatten(ends[0].spec, [traced(v, trace) for v in found])


# ---------------------------------------------------------------- states


class _Ends:
    """What a branch or a body returned, as values of its trace."""

    def __init__(self, tree: Any, trace: Trace) -> None:
        self.tree = tree
        leaves, self.spec = flatten(tree)
        self.values = [value_of(asarray(x), trace) for x in leaves]
        self.weak = [x.weak if isinstance(x, Array) else type(x) in (*NUMBERS, Size) for x in leaves]

    def check_like(self, other: _Ends, what: str, name: str) -> None:
        """InputError where it is not of the structure and types of another."""
        if self.spec != other.spec:
            raise InputError(f"{what} trees that differ: {other.spec} and {self.spec}")
        for x, y, place in zip(other.values, self.values, places(other.tree, name), strict=True):
            if x.dtype is not y.dtype or not _fit(x.t, y.t):
                raise InputError(f"{what} what differs at {place}: {x.t} and {y.t}")


def _fit(a: TensorType, b: TensorType) -> bool:
    same = a.rank == b.rank and not any(never_equal(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    return same and (same_shape(a.shape, b.shape) or not (a.is_static and b.is_static))


class _State:
    """What a loop carries.

    Args:
        init: a tree of arrays.
        trace: the one around the loop.
        step: one step, traced to see what becomes of numbers of Python.
        name: of the loop, for errors.
    """

    def __init__(self, init: Any, trace: Trace, step: Callable[[Any], Any], name: str) -> None:
        self.name = name
        self.first = _Ends(init, trace)
        self.values = self.first.values
        if any(self.first.weak):
            self._settle(trace, step)

    def _settle(self, trace: Trace, step: Callable[[Any], Any]) -> None:
        """Numbers of Python get the dtypes that a step makes of them."""
        inner = trace.builder.inside()
        with Trace(inner, trace) as own:
            given = [own.input(v.t) for v in self.values]
            arrays = [traced(v, own, w) for v, w in zip(given, self.first.weak, strict=True)]
            after = _Ends(step(unflatten(self.first.spec, arrays)), own)
        if after.spec != self.first.spec:
            return  # said when it is built
        for k, (v, weak) in enumerate(zip(after.values, self.first.weak, strict=True)):
            if weak and not v.rank and v.dtype not in PART:
                with trace.source(self.name):
                    self.values[k] = trace.builder.cast(self.values[k], v.dtype)

    def joined(self, parts: Sequence[Value]) -> list[Value]:
        """The state's values, of those that the loop carries."""
        return _joined(parts, self.values)

    def tree(self, values: Sequence[Value], trace: Trace) -> Any:
        """The state of these values."""
        return unflatten(self.first.spec, [traced(v, trace) for v in values])

    def after(self, tree: Any, trace: Trace) -> list[Value]:
        """The values of the next state. InputError where it is unlike this one."""
        ends = _Ends(tree, trace)
        if ends.spec == self.first.spec:
            pairs = zip(ends.values, ends.weak, self.values, strict=True)
            with trace.source(self.name):
                ends.values = [
                    trace.builder.cast(v, x.dtype) if weak and _takes(x.dtype, v.dtype) else v for v, weak, x in pairs
                ]
        ends.check_like(self.first, f"the body of {self.name} is given and returns", "state")
        return ends.values


def _takes(state: DType, number: DType) -> bool:
    """Whether a number of Python counts less than a state's array: an integer does not take a float."""
    ranks = [2 if d.is_float else 0 if d is dtypes.boolean else 1 for d in (state, number)]
    return state not in PART and number not in PART and ranks[0] >= ranks[1]


def _settled(init: Any, step: Callable[[Any], Any]) -> Any:
    """The first state outside of a trace: numbers of Python as arrays of the dtypes that a step makes of them."""
    leaves, spec = flatten(init)
    weak = [type(x) in NUMBERS for x in leaves]
    arrays = [concrete(_data(asarray(x))) for x in leaves]  # of its own: a body may write to its state
    if any(weak):
        with Trace() as trace:
            given = [trace.input(TensorType(dtypes.from_numpy(x.dtype), x.dims)) for x in arrays]
            after = _Ends(step(unflatten(spec, [traced(v, trace, w) for v, w in zip(given, weak, strict=True)])), trace)
        if after.spec == spec:
            pairs = zip(arrays, weak, after.values, strict=True)
            arrays = [asarray(_data(x).astype(v.dtype.numpy)) if w and not v.rank else x for x, w, v in pairs]
    return unflatten(spec, arrays)


def _same_state(after: Any, before: Any, name: str) -> Any:
    """The next state outside of a trace."""
    (old, spec), (new, own) = flatten(before), flatten(after)
    if own != spec:
        raise InputError(f"the body of {name} is given and returns trees that differ: {spec} and {own}")
    found = []
    for x, y, place in zip(old, new, places(before, "state"), strict=True):
        array = asarray(y)
        if type(y) in NUMBERS and isinstance(x, Array) and _takes(*(dtypes.from_numpy(v.dtype) for v in (x, array))):
            array = call_one(_cast, array, name=name, to=dtypes.from_numpy(x.dtype))
        if isinstance(x, Array) and (x.dtype != array.dtype or x.dims != array.dims):
            raise InputError(
                f"the body of {name} is given and returns what differs at {place}: "
                f"{x.dtype}{list(x.dims)} and {array.dtype}{list(array.dims)}"
            )
        found.append(array)
    return unflatten(spec, found)


def _cast(b: Builder, x: Value, *, to: Any) -> Value:
    return b.cast(x, to)


def _condition(x: Any, name: str) -> Array:
    found = _said(x, f"the condition of {name}")
    if found.ndim or found.dtype != np.bool_:
        raise InputError(f"the condition of {name} is a bool without axes, not {found.dtype}{list(found.dims)}")
    return found


def _said(x: Any, what: str) -> Array:
    """As `asarray`; the error of what is no array says what it was to be."""
    try:
        return asarray(x)
    except InputError as error:
        raise InputError(f"{what}: {error.message}") from None


# ---------------------------------------------------------------- numbers and steps


def _bound(x: Any, name: str) -> Array:
    array = _said(x, f"the bound {name} of fori_loop")
    if array.ndim or array.dtype.kind not in "iu":
        raise InputError(f"the bound {name} of fori_loop is an int, not {array.dtype}{list(array.dims)}")
    return array


def _int_value(x: Any, name: str, trace: Trace) -> Value:
    if isinstance(x, Size):
        return trace.builder.size_as(unsized(x), dtypes.int64)
    return trace.builder.cast(value_of(_bound(x, name), trace), dtypes.int64)


def _number() -> Array:
    """The loop's variable, where a step is tried."""
    return traced(_here().builder.input(TensorType(dtypes.int64, ())), _here())


def _here() -> Trace:
    own = current()
    assert own is not None
    return own


def _samples(arrays: Sequence[Array]) -> list[Array]:
    """The slices of a step, where it is tried."""
    own = _here()
    types = [TensorType(dtypes.from_numpy(x.dtype), x.dims[1:]) for x in arrays]
    return [traced(own.input(t), own) for t in types]


def _parts(values: Sequence[Value]) -> list[Value]:
    """What a loop or a branch passes on: of complex values both parts."""
    found: list[Value] = []
    for v in map(opened, values):
        found += [v.re, v.im] if isinstance(v, Complex) else [v]
    return found


def _joined(parts: Sequence[Value], like: Sequence[Value]) -> list[Value]:
    """Complex values out of their parts, where these are such."""
    rest = iter(parts)
    return [pair(Complex(next(rest), next(rest))) if v.dtype in PART else next(rest) for v in like]


def _length(arrays: Sequence[Array], xs: Any, length: int | None) -> Any:
    sizes = []
    for x, place in zip(arrays, places(xs, "xs"), strict=True):
        if not x.ndim:
            raise InputError(f"scan: {place} has no axis to step over")
        sizes.append((place, x.dims[0]))
    if length is not None:
        sizes.append(("length", size_of(length, "scan: length")))
    if not sizes:
        raise InputError("scan: without xs there must be a length")
    for place, size in sizes[1:]:
        if not may_be_equal(size, sizes[0][1]):
            raise InputError(f"scan: {sizes[0][0]} has {sizes[0][1]} steps, and {place} has {size}")
    return sizes[-1 if length is not None else 0][1]


def _scan_in_python(
    body: Function, init: Any, arrays: Sequence[Array], spec: Spec, count: int, reverse: bool
) -> tuple[Any, Any]:
    if count == 0:  # what a step would return only a trace can tell
        return immediately(  # type: ignore[no-any-return]
            lambda s, xs: scan(body, s, unflatten(spec, list(xs)), count, reverse), "scan", init, tuple(arrays)
        )

    def step(s: Any) -> Any:
        found = body(s, unflatten(spec, _samples(arrays)))
        return found[0] if isinstance(found, tuple) and found else found

    state = _settled(init, step)
    ys: list[list[Any]] = []
    y_spec: Spec | None = None
    for k in reversed(range(count)) if reverse else range(count):
        found = body(state, unflatten(spec, [asarray(_data(x)[k]) for x in arrays]))
        if not isinstance(found, tuple) or len(found) != 2:
            raise InputError(
                f"the body of scan returns a pair (state, y), not what is of the type {type(found).__name__}"
            )
        state = _same_state(found[0], state, "scan")
        leaves, own = flatten(found[1])
        if y_spec is not None and own != y_spec:
            raise InputError(f"the body of scan returns trees that differ: {y_spec} and {own}")
        y_spec = own
        ys.append([_data(asarray(y)) for y in leaves])
    assert y_spec is not None
    columns = zip(*(ys[::-1] if reverse else ys), strict=True)
    return state, unflatten(y_spec, [asarray(np.stack(c)) for c in columns])


def _data(x: Array) -> np.ndarray[Any, Any]:
    found = known(x)
    assert found is not None
    return found
