"""Control flow: If, Loop, Scan.

A loop whose number of iterations is known before it begins, and whose values keep their types, is a `scan`, part of
the program around it. Any other is a step on the host that runs the body as a program of its own, and so is an If
whose condition is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxc.errors import InternalError, LimitError, ModelError, NeedsContentError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, always_equal
from onnxc.ir.graph import Graph, Node, Value, cloned
from onnxc.ir.types import (
    EmptyType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    contradict,
    element_name,
    same_shape,
)
from onnxc.ops import stacks
from onnxc.ops.if_conversion import converted
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, Step, constant_of
from onnxc.primitives.control import close_region
from onnxc.primitives.host import RunTime, is_host
from onnxc.primitives.places import is_foreign
from onnxc.primitives.random import in_branch, in_loop

BOOL, COUNT = TensorType(dtypes.boolean, ()), TensorType(dtypes.int64, ())
MOST_TRIPS = 1 << 40  # of a loop that nothing ends earlier: hours, whatever its body is
MOST_TURNS = 1 << 20  # of a loop in a program that data may end: the host, which has a limit, runs longer ones
MOST_TYPINGS = 8  # of a loop's body: each makes a size or a rank that changes an unknown one


def lower(b: Builder, graph: Graph, inner: Builder, inputs: Sequence[Value | None]) -> list[Value]:
    """A subgraph of the node that is being built, in a builder of its own (or in the same one)."""
    if b.lower is None:
        raise UnsupportedError("control flow needs the graph that it stands in")
    if len(graph.inputs) != len(inputs):
        raise ModelError(f"a subgraph has {len(graph.inputs)} inputs; it is given {len(inputs)}")
    return b.lower(inner, graph, inputs)


def scalar(b: Builder, x: Value) -> Value:
    """A tensor of one element as a scalar; what is not known to be a tensor as it is."""
    return b.reshape(x, ()) if isinstance(x.type, TensorType) and x.rank else x


def _run_time(b: Builder, what: str) -> RunTime:
    if b.run_time is None:
        raise UnsupportedError(f"{what} is not known before the model runs, which is not supported here")
    return b.run_time


# ---------------------------------------------------------------- If


@op("If", 1)
def if_(b: Builder, condition: Value, *, then_branch: Graph, else_branch: Graph) -> list[Value | None]:
    """The outputs of one of two branches; the other is not run. Their shapes may differ."""
    known = constant_of(condition)
    if known is not None:
        return [*lower(b, then_branch if known.item() else else_branch, b, [])]
    branches = [lambda inner: lower(b, then_branch, inner, []), lambda inner: lower(b, else_branch, inner, [])]
    return [*choose(b, condition, branches)]


def choose(b: Builder, condition: Value, branches: Sequence[Callable[[Builder], Sequence[Value]]]) -> list[Value]:
    """The outputs of the first of two branches where a condition holds, else of the second."""
    run_time = _run_time(b, "the condition of an If")
    first = len(run_time.symbols)
    condition = scalar(b, condition)
    built = [_built(b, branch) for branch in branches]
    if run_time.avoided.branches and (found := converted(b, condition, built)) is not None:
        return found
    regions, taken = [], []
    for nodes, outputs in built:
        region, outside = close_region([], nodes, outputs)
        regions.append(region)
        taken.append(outside)
    if len(regions[0].outputs) != len(regions[1].outputs):
        raise ModelError(f"the branches of If have {len(regions[0].outputs)} and {len(regions[1].outputs)} outputs")
    visible = _made_before(run_time, first)
    pairs = [(x.type, y.type) for x, y in zip(regions[0].outputs, regions[1].outputs, strict=True)]
    _check_alike(pairs, "an If gives", "in the other branch")
    types = [run_time.merged(x, y, visible) for x, y in pairs]
    operands = [condition, *taken[0], *taken[1]]
    node = Node("if", operands, [Value(t) for t in types], {"split": len(taken[0])}, regions, b.origin)
    b.nodes.append(node)
    return list(node.outputs)


def _built(b: Builder, branch: Callable[[Builder], Sequence[Value]]) -> tuple[list[Node], list[Value]]:
    """What a branch adds to the graph around it, and what it gives."""
    inner = b.inside()
    in_branch(inner, b)
    outputs = list(branch(inner))
    return inner.nodes, outputs


def _check_alike(pairs: Iterable[tuple[Type | None, Type | None]], what: str, where: str) -> None:
    """ModelError where values of different element types stand for one: the standard leaves them only their shapes."""
    for a, b in pairs:
        if contradict(element_name(a), element_name(b)):
            raise ModelError(f"{what} {element_name(a)}, and {where} {element_name(b)}")


def _made_before(run_time: RunTime, first: int) -> Callable[[Symbol], bool]:
    """Whether a symbol is known outside of a region that was begun when there were `first` symbols."""
    inside = {s.key for s in run_time.symbols[first:]}
    return lambda symbol: symbol.key not in inside


# ---------------------------------------------------------------- loops

Body = Callable[[Builder, Value, Value, list[Value]], "tuple[Value, list[Value], list[Value]]"]
"""(builder, iteration number, condition, carried values) to (condition, carried values, results of the iteration)."""


@dataclass
class _Typed:
    """A body built for carried values of certain types.

    Attributes:
        inner: the builder that it was built in; its inputs are number, condition, and carried values.
        condition, after, results: its outputs.
        first: how many symbols there were before.
        loose: sizes of carried values that are another number in each iteration, by name.
        declared: what the model says of the results, as `_declared` has it.
    """

    inner: Builder
    condition: Value
    after: list[Value]
    results: list[Value]
    first: int
    loose: set[str]
    declared: tuple[str, ...] = ()

    @property
    def carried(self) -> list[Value]:
        return self.inner.inputs[2:]

    def keeps_types(self) -> bool:
        """Whether every carried value has the type that it came with."""
        return all(_fits(x.type, y.type, self.loose) for x, y in zip(self.carried, self.after, strict=True))

    def counts(self) -> bool:
        """Whether what it gives depends on the number of its iteration."""
        needed = {v.id for v in (self.condition, *self.after, *self.results)}
        for node in reversed(self.inner.nodes):
            if any(v.id in needed for v in node.outputs):
                needed |= {v.id for v in node.inputs if v is not None}
        return self.inner.inputs[0].id in needed

    def appended(self, run_time: RunTime) -> dict[int, Value]:
        """Carried sequences that every iteration appends a tensor to, by number."""
        before = _made_before(run_time, self.first)
        others = (self.condition, *self.results)
        return stacks.appended(
            self.carried, self.after, others, self.inner.nodes, lambda s: before(s) and s.key not in self.loose
        )

    def collecting(self, taken: Collection[int]) -> _Typed:
        """A body that gives what it appends to these carried sequences as further results."""
        inserts = [self.after[k].node for k in taken]
        inner = self.inner
        rest = [k for k in range(len(self.after)) if k not in taken]
        inner.inputs = [*inner.inputs[:2], *(self.carried[k] for k in rest)]
        inner.nodes = [n for n in inner.nodes if all(n is not i for i in inserts)]
        values = [i.operands[1] for i in inserts if i is not None]
        return replace(self, after=[self.after[k] for k in rest], results=[*self.results, *values])

    def always_goes_on(self) -> bool:
        """Whether the body says so, whatever is computed."""
        known = constant_of(self.condition)
        return self.condition is self.inner.inputs[1] or (known is not None and bool(known.item()))


def _same(a: Type | None, b: Type | None) -> bool:
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        return a.dtype is b.dtype and same_shape(a.shape, b.shape)
    return a == b


def _fits(a: Type | None, b: Type | None, loose: set[str]) -> bool:
    """Whether a value of type b may come where one of type a is expected, some of whose sizes may be any."""
    if isinstance(b, EmptyType):
        return True
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        pairs = zip(a.shape, b.shape, strict=False)
        return a.dtype is b.dtype and a.rank == b.rank and all(always_equal(x, y) or repr(x) in loose for x, y in pairs)
    if isinstance(a, (SequenceType, OptionalType)) and type(a) is type(b):
        return a.element is None or _fits(a.element, b.element, loose)
    return a is None or a == b


def iterate(
    b: Builder, trip: Value | None, condition: Value | None, initial: Sequence[Value], body: Body,
    declared: Sequence[str] = (),
) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Runs a body at most `trip` times (None: no limit) while a condition holds; the last carried values, and the
    results of all iterations, stacked along a new first axis. Where the body says what those are, `declared` has it: a
    loop that never runs has nothing else to tell it (see `_declared`).
    """
    typed = _typed(b, [v.type for v in initial], body)
    typed.declared = tuple(declared)
    if not stacks.allowed(b):
        return _run(b, trip, condition, initial, typed)
    starts = stacks.begun(b, initial, typed.appended(_run_time(b, "a sequence")))
    if not starts:
        return _run(b, trip, condition, initial, typed)
    rest = [k for k in range(len(initial)) if k not in starts]
    states, results = _run(b, trip, condition, [initial[k] for k in rest], typed.collecting(starts))
    ends = dict(zip(rest, states, strict=True))
    for (k, start), found in zip(starts.items(), results[len(results) - len(starts) :], strict=True):
        ends[k] = stacks.unstacked(b, found if start is None else b.concat([start, found], 0))
    return [ends[k] for k in range(len(initial))], results[: len(results) - len(starts)]


def _run(
    b: Builder, trip: Value | None, condition: Value | None, initial: Sequence[Value], typed: _Typed
) -> tuple[list[Value], list[Value]]:
    """As `iterate`, with the body as it is to be run."""
    goes_on = condition is None or ((known := constant_of(condition)) is not None and bool(known.item()))
    plain = _is_plain(initial, typed)
    all_of_them = trip is not None and goes_on and typed.always_goes_on()
    if trip is not None and all_of_them and plain and not typed.loose:
        return _as_scan(b, trip, initial, _again(typed), typed.counts())
    known = None if trip is None else b.known(b.max(scalar(b, trip), 0))
    most = None if known is None else known.item()
    if plain and not typed.loose and not typed.results and most is not None and _may_end(b, most):
        start = b.scalar(True, dtypes.boolean) if condition is None else scalar(b, condition)
        return _until(b, b.scalar(0, dtypes.int64), start, initial, most, _again(typed))[1][1:], []
    return _on_host(b, trip, condition, initial, typed, most if all_of_them else None)


def _may_end(b: Builder, most: Dim) -> bool:
    """Whether a loop of at most so many iterations, which data may end, is part of a program."""
    avoided = b.run_time is not None and b.run_time.avoided.ends and not b.differentiable
    return avoided and isinstance(most, int) and most <= MOST_TURNS


def _typed(b: Builder, types: list[Type | None], body: Body) -> _Typed:
    """The body, with carried values of types that it keeps: what it changes is a size of its own, or unknown."""
    loose: set[str] = set()
    for _ in range(MOST_TYPINGS):
        first = len(b.run_time.symbols) if b.run_time is not None else 0
        inner = b.inside()
        inner.origin = b.origin
        number, condition = inner.input(COUNT), inner.input(BOOL)
        in_loop(inner, b, number)
        for t in types:
            value = Value(t)
            inner.inputs.append(value)
        condition, after, results = body(inner, number, condition, list(inner.inputs[2:]))
        typed = _Typed(inner, condition, after, results, first, loose)
        if typed.keeps_types():
            return typed
        pairs = [(x.type, y.type) for x, y in zip(typed.carried, after, strict=True)]
        _check_alike(pairs, "a Loop carries", "after an iteration")
        run_time = _run_time(b, "the type of what a Loop carries")
        known = len(run_time.symbols)
        types = [old if _fits(old, new, loose) else run_time.merged(old, new) for old, new in pairs]
        loose |= {s.key for s in run_time.symbols[known:]}
    raise UnsupportedError(f"the types of what a Loop carries still change after {MOST_TYPINGS} iterations")


def _again(typed: _Typed) -> Body:
    """The body once more, of what was built. (Built anew, a loop within loops would be twice for each around it.)"""

    def run(inner: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        here = dict(zip((v.id for v in typed.inner.inputs), (number, go, *carried), strict=True))
        inner.nodes += cloned(typed.inner.nodes, here)
        condition, *ends = [here.get(v.id, v) for v in (typed.condition, *typed.after, *typed.results)]
        return condition, ends[: len(carried)], ends[len(carried) :]

    return run


def _as_scan(
    b: Builder, trip: Value, initial: Sequence[Value], body: Body, counts: bool
) -> tuple[list[Value], list[Value]]:
    """A body that does not count needs no memory for the numbers of all iterations."""
    (count,) = b.extents(b.max(scalar(b, trip), 0), "the trip count of a Loop")
    if isinstance(count, int) and count > MOST_TRIPS:
        raise LimitError(f"a Loop of {count} iterations, which nothing ends earlier, takes longer than anyone waits")

    def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        number = slices[0] if counts else inner.scalar(0, dtypes.int64)
        _, after, results = body(inner, number, inner.scalar(True, dtypes.boolean), states)
        return after, results

    return b.scan(initial, [b.iota(count)] if counts else [], count, step)


def _on_host(
    b: Builder, trip: Value | None, condition: Value | None, initial: Sequence[Value], typed: _Typed, times: Dim | None
) -> tuple[list[Value], list[Value]]:
    """A loop of the host, which runs `times` times, where that is known."""
    run_time = _run_time(b, "how often a Loop runs, or what it carries,")
    ends = [typed.condition, *typed.after, *typed.results]
    region, taken = close_region(typed.inner.inputs, typed.inner.nodes, ends)
    visible = _made_before(run_time, typed.first)
    carried = [run_time.merged(x.type, y.type, visible) for x, y in zip(initial, typed.carried, strict=True)]
    count = run_time.size() if times is None else times
    stacked: list[Type | None] = []
    for v in typed.results:
        one = run_time.merged(v.type, v.type, visible)
        stacked.append(one.with_shape((count, *one.shape)) if isinstance(one, TensorType) else None)
    limit = None if trip is None else scalar(b, trip)
    start = None if condition is None else scalar(b, condition)
    outputs = [Value(t) for t in (*carried, *stacked)]
    attrs: dict[str, Any] = {"carried": len(initial), "scans": len(stacked)}
    if None in stacked and any(typed.declared):
        attrs["declared"] = typed.declared
    regions = [region]
    if (not stacked or _collects(b, typed)) and not typed.loose and _is_plain(initial, typed):
        chunk = run_time.size()
        regions.append(_in_chunks(b, initial, _again(typed), chunk, taken))
        attrs["chunk"] = chunk
    b.nodes.append(Node("loop", [limit, start, *initial, *taken], outputs, attrs, regions, b.origin))
    return outputs[: len(initial)], outputs[len(initial) :]


def _collects(b: Builder, typed: _Typed) -> bool:
    """Whether a program may collect what a body gives. (Derivatives take results away, and collect others.)"""
    avoided = b.run_time is not None and b.run_time.avoided.turns and not b.differentiable
    return avoided and all(isinstance(v.type, TensorType) for v in typed.results)


def _is_plain(initial: Sequence[Value], typed: _Typed) -> bool:
    """Whether the body is one program, of tensors that keep their types."""
    alike = all(_same(x.type, y.type) for x, y in zip(initial, typed.carried, strict=True))
    tensors = all(isinstance(v.type, TensorType) for v in initial)
    foreign = any(map(is_foreign, (*initial, *typed.results)))
    return alike and tensors and not foreign and not any(is_host(n) for n in typed.inner.nodes)


def _in_chunks(b: Builder, initial: Sequence[Value], body: Body, chunk: Dim, taken: Sequence[Value]) -> Graph:
    """A region that runs up to `chunk` iterations: from number, condition, carried values (and what they read) to
    condition, carried values, results, number. Between two of them the host can stop the loop.
    """
    inner = b.inside()
    inner.origin = b.origin
    number, condition = inner.input(COUNT), inner.input(BOOL)
    carried = [inner.input(v.t) for v in initial]
    count, ends, results = _until(inner, number, condition, carried, chunk, body)
    region, reads = close_region(inner.inputs, inner.nodes, [*ends, *results, count])
    given = dict(zip((v.id for v in reads), region.inputs[len(initial) + 2 :], strict=True))
    region.inputs[len(initial) + 2 :] = [given.get(v.id, Value(v.type, v.name)) for v in taken]
    if not given.keys() <= {v.id for v in taken}:
        raise InternalError("a loop's body reads more when it is built again")
    return region


def _until(
    b: Builder, number: Value, condition: Value, carried: Sequence[Value], most: Dim, body: Body
) -> tuple[Value, list[Value], list[Value]]:
    """Iterations from a number on while a condition holds, at most so many of them: the number of the next one,
    condition and carried values, and the results, of those that do not run undefined.
    """

    def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        go, count, *values = states
        in_loop(inner, b, count)
        again, after, results = body(inner, count, go, values)
        return [again, inner.add(count, 1), *after], results

    (go, count, *last), found = b.scan([condition, number, *carried], [], most, step, going=0)
    return count, [go, *last], found


@op("Loop", 1)
def loop(
    b: Builder, trip: Value | None, condition: Value | None, *initial: Value | None, body: Graph
) -> list[Value | None]:
    """Runs the body up to `trip` times, while the condition holds."""
    values = [v for v in initial if v is not None]
    if len(values) < len(initial):
        raise ModelError("a value that a Loop carries is missing")
    if len(body.inputs) != len(values) + 2 or len(body.outputs) <= len(values):
        raise ModelError(
            f"the body of Loop has {len(body.inputs)} inputs and {len(body.outputs)} outputs "
            f"for {len(values)} carried values"
        )

    changed = [k for k in range(len(values)) if not _is_kept(body, k)]
    if not changed and len(body.outputs) == 1 + len(values):
        return [*values]

    def run(inner: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        told = [_as_declared(inner, body, k, v) for k, v in enumerate((number, go))]
        now = dict(zip(changed, carried, strict=True))
        first, *rest = lower(b, body, inner, [*told, *(now.get(k, v) for k, v in enumerate(values))])
        return scalar(inner, first), [rest[k] for k in changed], rest[len(values) :]

    states, results = iterate(b, trip, condition, [values[k] for k in changed], run, _declared(body, 1 + len(values)))
    ends = dict(zip(changed, states, strict=True))
    return [*(ends.get(k, v) for k, v in enumerate(values)), *results]


def _is_kept(body: Graph, k: int) -> bool:
    """Whether a Loop's body gives on its k-th carried value as it is. Such a one is no state, but read from outside:
    tf2onnx hands the weights of recurrent layers from iteration to iteration.
    """
    value: Value | None = body.outputs[1 + k]
    while value is not None and value.node is not None and value.node.op == "onnx.Identity":
        (value,) = value.node.inputs
    return value is body.inputs[2 + k]


def _declared(body: Graph, first: int) -> list[str]:
    """What a body says of its outputs from one on: `float32 1 3` (0: a size that it leaves open), or nothing."""
    told = (body.metadata.get("output_types", {}).get(name) for name in body.output_names[first:])
    known = [t if t is not None and t[1] is not None else None for t in told]
    return [" ".join([t[0], *(str(d if isinstance(d, int) else 0) for d in t[1])]) if t else "" for t in known]


def _as_declared(b: Builder, body: Graph, at: int, x: Value) -> Value:
    """The number or the condition of an iteration: a scalar, but of rank 1 where the body says so, as exporters do."""
    _, shape = (body.metadata.get("input_types", {}).get(body.inputs[at].name) or ("", None))[:2]
    return b.reshape(x, (1,)) if isinstance(shape, (list, tuple)) and len(shape) == 1 else x


# ---------------------------------------------------------------- Scan


@op("Scan", 9)
def scan(
    b: Builder,
    *inputs: Value | None,
    body: Graph,
    num_scan_inputs: int,
    scan_input_axes: list[int] | None = None,
    scan_input_directions: list[Flag] | None = None,
    scan_output_axes: list[int] | None = None,
    scan_output_directions: list[Flag] | None = None,
) -> list[Value | None]:
    """Runs the body over slices of some inputs; collects slices of its outputs."""
    given = [v for v in inputs if v is not None]
    states = len(given) - num_scan_inputs
    outputs = len(body.outputs) - states
    if len(given) < len(inputs) or num_scan_inputs < 1 or states < 0 or outputs < 0 or len(body.inputs) != len(given):
        raise ModelError(f"the body of Scan has {len(body.inputs)} inputs for {len(inputs)} of the node")
    xs = given[states:]
    axes = _per_value(scan_input_axes, num_scan_inputs, "scan_input_axes")
    back = _per_value(scan_input_directions, num_scan_inputs, "scan_input_directions")
    moved = [_to_front(b, x, b.axis(a, x.rank), bool(r)) for x, a, r in zip(xs, axes, back, strict=True)]
    ends, results = scan_over(b, _step(b, body, states), given[:states], moved)
    out_axes = _per_value(scan_output_axes, outputs, "scan_output_axes")
    out_back = _per_value(scan_output_directions, outputs, "scan_output_directions")
    placed = [
        _from_front(b, y, b.axis(a, y.rank), bool(r)) for y, a, r in zip(results, out_axes, out_back, strict=True)
    ]
    return [*ends, *placed]


@op("Scan", 8, 8)
def scan_8(
    b: Builder,
    lengths: Value | None,
    *inputs: Value | None,
    body: Graph,
    num_scan_inputs: int,
    directions: list[Flag] | None = None,
) -> list[Value | None]:
    """Opset 8: every input has a batch axis first, and sequences may be given lengths."""
    given = [v for v in inputs if v is not None]
    states = len(given) - num_scan_inputs
    if len(given) < len(inputs) or num_scan_inputs < 1 or states < 0 or len(body.inputs) != len(given):
        raise ModelError(f"the body of Scan has {len(body.inputs)} inputs for {len(inputs)} of the node")
    back = _per_value(directions, num_scan_inputs, "directions")
    steps = given[states].shape[1]
    step = _step(b, body, states)

    def one(inner: Builder, none: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        """Of one sequence of the batch."""
        length, *rest = slices
        xs = [_back(inner, x, length) if r else x for x, r in zip(rest[states:], back, strict=True)]

        def masked(at: Builder, before: list[Value], now: list[Value]) -> tuple[list[Value], list[Value]]:
            after, results = step(at, before, now[1:])
            goes_on = at.lt(now[0], length)
            kept = [at.where(goes_on, new, old) for new, old in zip(after, before, strict=True)]
            return kept, [at.where(goes_on, y, at.scalar(0, y.dtype)) for y in results]

        if lengths is not None:
            xs = [inner.iota(steps), *xs]
        ends, results = scan_over(inner, step if lengths is None else masked, rest[:states], xs)
        return [], [*ends, *results]

    whole = b.size_as(steps, dtypes.int64) if lengths is None else b.cast(lengths, dtypes.int64)
    each = b.expand(whole, (given[0].shape[0],))
    return [*scan_over(b, one, [], [each, *given])[1]]


def _back(b: Builder, x: Value, length: Value) -> Value:
    """The first `length` of the leading axis from back to front; what comes after them does not matter."""
    return b.gather(x, b.max(b.sub(b.sub(length, 1), b.iota(x.shape[0])), 0), 0)


def _per_value(given: Sequence[int] | None, count: int, what: str) -> list[int]:
    found = [0] * count if given is None else list(given)
    if len(found) != count:
        raise ModelError(f"{what} of Scan has {len(found)} entries for {count} values")
    return found


def _to_front(b: Builder, x: Value, axis: int, reverse: bool) -> Value:
    moved = b.transpose(x, [axis, *(i for i in range(x.rank) if i != axis)])
    return b.flip(moved, [0]) if reverse else moved


def _from_front(b: Builder, y: Value, axis: int, reverse: bool) -> Value:
    y = b.flip(y, [0]) if reverse else y
    order = [i + 1 for i in range(y.rank - 1)]
    order.insert(axis, 0)
    return b.transpose(y, order)


def _step(b: Builder, body: Graph, states: int) -> Step:
    """One step of a Scan, as its body says."""

    def step(inner: Builder, before: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        outputs = lower(b, body, inner, [*before, *slices])
        return outputs[:states], outputs[states:]

    return step


def scan_over(b: Builder, step: Step, initial: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
    """A step over the leading axes: a `scan`, or a loop on the host where the step has steps on the host itself."""

    def pure(inner: Builder, before: list[Value], slices: list[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
        after, results = step(inner, before, slices)
        changed = any(not _same(x.type, y.type) for x, y in zip(initial, after, strict=True))
        foreign = b.run_time is not None and any(map(is_foreign, (*initial, *xs, *results)))
        if changed or foreign or any(is_host(n) for n in inner.nodes):
            raise _HostSteps
        return after, results

    try:
        return b.scan(initial, xs, xs[0].shape[0], pure)
    except _HostSteps:
        pass

    def run(inner: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        after, results = step(inner, carried, [inner.gather(x, number, 0) for x in xs])
        return inner.scalar(True, dtypes.boolean), [*after], [*results]

    return iterate(b, b.size_as(xs[0].shape[0], dtypes.int64), None, initial, run)


class _HostSteps(NeedsContentError):
    """The body of a Scan has steps on the host."""

    def __init__(self) -> None:
        super().__init__("the body of Scan depends on data, which is not supported here", None)
