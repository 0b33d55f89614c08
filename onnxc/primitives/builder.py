"""Builds graphs of primitives: types are inferred, small constants folded, and sizes tracked as expressions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np

import onnxc.primitives.attention
import onnxc.primitives.attention_gradient
import onnxc.primitives.boxes
import onnxc.primitives.contraction
import onnxc.primitives.elementwise
import onnxc.primitives.indexing
import onnxc.primitives.kernels
import onnxc.primitives.movement
import onnxc.primitives.reduction
import onnxc.primitives.trees  # noqa: F401  (the modules register their primitives)
from onnxc.errors import NeedsContentError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, maximum, prod
from onnxc.ir.graph import Graph, Node, Origin, Value
from onnxc.ir.types import TensorType, same_shape
from onnxc.primitives.base import SMOOTH, Kind, at_most_one, check_type, lookup
from onnxc.primitives.control import close_region, scan_types
from onnxc.primitives.elementwise import Undecided
from onnxc.primitives.host import Lower, RunTime, read
from onnxc.primitives.movement import slice_size
from onnxc.primitives.places import FOREIGN, Places, is_foreign, moved
from onnxc.primitives.random import Draws, Moment, in_loop

Operand = Value | float | int | bool | np.generic
Step = Callable[["Builder", list[Value], list[Value]], tuple[Sequence[Value], Sequence[Value]]]

# Content is tracked (Value.data) for integer and bool tensors of at most this many elements.
TRACKED_ELEMENTS = 4096
# A result of at most this many bytes is folded while the graph is built; larger ones wait for the folding pass.
FOLD_BYTES = 1 << 16
CONCAT_PARTS = 64


def constant_of(value: Value | None) -> np.ndarray | None:
    """The array of a value made by a `constant` node, else None."""
    if value is None or value.node is None or value.node.op != "constant":
        return None
    array: np.ndarray = value.node.attrs["value"]
    return array


class Builder:
    """Appends primitives to a node list. Methods are named as the primitives and return values.

    >>> b = Builder()
    >>> x = b.input(TensorType(dtypes.float32, (2, 3)), "x")
    >>> b.add(x, 1.0).type
    float32[2, 3]
    """

    def __init__(self, differentiable: bool = False, run_time: RunTime | None = None) -> None:
        self.differentiable = differentiable  # whether nodes carry the hints that derivative rules read
        self.run_time = run_time  # where the graph may have steps on the host
        self.lower: Lower | None = None  # how definitions of control flow build their regions
        self.parts: dict[int, list[Value]] = {}  # what is in a sequence (or an optional), where it is known now
        self.stacks: dict[int, Value] = {}  # by id of a sequence: the tensor whose rows are in it, where there is one
        self.places: dict[int, Places] = {}  # of moved elements that no kernel has a type for
        self.nodes: list[Node] = []
        self.told: dict[int, Value] = {}  # by id: what has been read as sizes at run time
        self.inputs: list[Value] = []
        self.origin: Origin = ()
        self.folding = True
        self._scalars: dict[tuple[str, bytes], Value] = {}
        self.draws = Draws(self)  # of random numbers, here and in regions
        self.moment: Moment | None = None  # of a region: which of its evaluations draws

    # ------------------------------------------------------------ plumbing

    def input(self, type: TensorType, name: str = "") -> Value:
        """A graph input."""
        value = Value(type, name)
        self.inputs.append(value)
        return value

    def graph(self, outputs: Sequence[Value], names: Sequence[str] | None = None) -> Graph:
        """The graph built so far."""
        return Graph(
            list(self.inputs), list(outputs), self.nodes, list(names or [f"out{i}" for i in range(len(outputs))])
        )

    @contextlib.contextmanager
    def from_origin(self, origin: Origin) -> Iterator[None]:
        """Nodes made inside carry this origin."""
        before, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = before

    @contextlib.contextmanager
    def unfolded(self) -> Iterator[None]:
        """Nodes made inside stay, whatever is known of their operands: for a pass that looks for them."""
        before, self.folding = self.folding, False
        try:
            yield
        finally:
            self.folding = before

    def emit(
        self, op: str, inputs: Sequence[Value], attrs: dict[str, Any] | None = None, regions: Sequence[Graph] = ()
    ) -> tuple[Value, ...]:
        """Adds a node of any primitive and returns its outputs; folds it where all is known and small."""
        attrs = attrs or {}
        primitive = lookup(op)
        if op in ("matmul", "expand") or (primitive.kind is Kind.POINTWISE and len(inputs) > 1):
            inputs = self._broadcastable(op, inputs, attrs)
        types = primitive.infer([v.t for v in inputs], attrs)
        for t in types:
            check_type(t)
        if not regions and self.folding:
            folded = self._fold(op, inputs, attrs, types)
            if folded is not None:
                return folded
        if self.run_time is not None and op != "scan" and (any(map(is_foreign, inputs)) or types[0].dtype in FOREIGN):
            return moved(self, op, inputs, attrs, types)
        node = Node(op, inputs, [Value(t) for t in types], attrs, regions, self.origin)
        self.nodes.append(node)
        return node.outputs

    def _broadcastable(self, op: str, inputs: Sequence[Value], attrs: dict[str, Any]) -> Sequence[Value]:
        """The operands, with a 1 for sizes that are at most 1 and are broadcast."""
        own = 2 if op == "matmul" else 0  # axes that are not broadcast
        shapes = [v.shape[: v.rank - own] for v in inputs] + ([attrs["shape"]] if op == "expand" else [])
        if not any(map(at_most_one, chain.from_iterable(shapes))):
            return inputs
        met = [{d for d in dims if d != 1} for dims in zip_longest(*map(reversed, shapes), fillvalue=1)]

        def fitted(v: Value) -> Value:
            lead = v.rank - own
            spread = (at_most_one(d) and len(met[lead - 1 - i]) > 1 for i, d in enumerate(v.shape[:lead]))
            return self.singled(v, [i for i, s in enumerate(spread) if s])

        return [fitted(v) for v in inputs]

    def singled(self, x: Value, axes: Sequence[int]) -> Value:
        """With a 1 for sizes of which a call checks that they are 1. (A reshape would take any of no elements.)"""
        return self.expand(x, [1 if i in axes else d for i, d in enumerate(x.shape)])

    def one(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        """`emit` for a primitive with one output."""
        (out,) = self.emit(op, inputs, attrs)
        return out

    def _fold(
        self, op: str, inputs: Sequence[Value], attrs: dict[str, Any], types: Sequence[TensorType]
    ) -> tuple[Value, ...] | None:
        """The outputs of an operation whose operands are known: as constants, or as sizes; None where they are not."""
        if op == "constant" or not all(t.is_static for t in types):
            return None
        constants = self._fold_constants(op, inputs, attrs, types)
        return constants if constants is not None else self._fold_sizes(op, inputs, attrs, types)

    def _fold_constants(
        self, op: str, inputs: Sequence[Value], attrs: dict[str, Any], types: Sequence[TensorType]
    ) -> tuple[Value, ...] | None:
        evaluate = lookup(op).evaluate
        small = sum(int(t.nbytes) for t in types if isinstance(t.nbytes, int)) <= FOLD_BYTES
        if evaluate is None or not small or not (inputs or op == "iota"):
            return None
        if op in SMOOTH and types[0].dtype in (dtypes.float16, dtypes.bfloat16):
            return None  # a pass may compute it in float32 first, and rounds once
        arrays = [constant_of(v) for v in inputs]
        if not all(a is not None and a.nbytes <= 4 * FOLD_BYTES for a in arrays):
            return None
        result = evaluate(*arrays, **attrs)
        results = result if isinstance(result, tuple) else (result,)
        return tuple(self.constant(np.asarray(r, t.dtype.numpy)) for r, t in zip(results, types, strict=True))

    def _fold_sizes(
        self, op: str, inputs: Sequence[Value], attrs: dict[str, Any], types: Sequence[TensorType]
    ) -> tuple[Value, ...] | None:
        """Arithmetic on sizes, which may be expressions over symbols."""
        primitive = lookup(op)
        if primitive.evaluate is None or not primitive.symbolic or len(types) != 1 or types[0].rank > 1 or not inputs:
            return None
        known = [self.known(v) for v in inputs]
        if any(k is None for k in known) or types[0].dtype.kind not in ("int", "bool"):
            return None
        try:
            result = primitive.evaluate(*(np.asarray(k) for k in known), **attrs)
        except Undecided:
            return None
        return (self.sizes(np.asarray(result), types[0].dtype),)

    def inside(self) -> Builder:
        """A builder for a region of this one's graph."""
        inner = Builder(self.differentiable, self.run_time)
        inner.draws, inner.parts, inner.stacks = self.draws, self.parts, self.stacks
        return inner

    # ------------------------------------------------------------ constants and sizes

    def constant(self, array: np.ndarray) -> Value:
        """A constant. Arrays are kept as they are (a memory-mapped weight is not copied)."""
        array = np.asarray(array)
        node = Node(
            "constant",
            (),
            [Value(TensorType(dtypes.from_numpy(array.dtype), array.shape))],
            {"value": array},
            (),
            self.origin,
        )
        self.nodes.append(node)
        if array.size <= TRACKED_ELEMENTS and array.dtype.kind in "iub":
            node.output.data = array
        return node.output

    def scalar(self, value: float | int | bool | str | np.generic, dtype: DType) -> Value:
        """A 0-d constant, one node for equal ones. A number as a string is the empty one."""
        if value is None:
            raise TypeError("an operand is missing")  # numpy would make it NaN
        if dtype is dtypes.string and not isinstance(value, str):
            value = ""
        array = np.asarray(value).astype(dtype.numpy)
        key = (dtype.name, array.tobytes())
        if key not in self._scalars:
            with self.from_origin(()):
                self._scalars[key] = self.constant(array)
        return self._scalars[key]

    def known(self, value: Value | None) -> np.ndarray | None:
        """The content of a small integer tensor, as ints and symbolic expressions, where it is known now."""
        return None if value is None else value.data

    def sizes(self, content: np.ndarray, dtype: DType = dtypes.int64) -> Value:
        """A tensor of rank 0 or 1 with this content of ints and expressions."""
        content = np.asarray(content)
        if content.dtype != object or all(isinstance(d, (int, np.integer, bool, np.bool_)) for d in content.ravel()):
            return self.constant(content.astype(dtype.numpy))
        node = Node(
            "sizes",
            (),
            [Value(TensorType(dtypes.int64, (content.size,)))],
            {"dims": tuple(content.ravel())},
            (),
            self.origin,
        )
        self.nodes.append(node)
        node.output.data = content.ravel()
        out = node.output
        if content.ndim == 0:
            out = Node(
                "reshape", [out], [Value(TensorType(dtypes.int64, ()), data=content)], {"shape": ()}, (), self.origin
            ).output
            assert out.node is not None
            self.nodes.append(out.node)
        if dtype is not dtypes.int64:
            out = Node(
                "cast", [out], [Value(out.t.with_dtype(dtype), data=content)], {"to": dtype}, (), self.origin
            ).output
            assert out.node is not None
            self.nodes.append(out.node)
        return out

    def ints(self, value: Value, what: str) -> list[Dim]:
        """The content of an integer tensor that must be known at compile time (as ints or expressions)."""
        content = np.empty(0, np.int64) if value.shape == (0,) else self.known(value)
        if content is None:
            raise NeedsContentError(f"{what} depends on the data of a tensor, which is not supported here", value)
        return [int(d) if isinstance(d, (int, np.integer)) else d for d in np.asarray(content).ravel()]

    def static_ints(self, value: Value, what: str) -> list[int]:
        """As `ints`, without symbolic sizes."""
        content = self.ints(value, what)
        if not all(isinstance(d, int) for d in content):
            raise NeedsContentError(f"{what} must be constant, but is {content}", value)
        return [d for d in content if isinstance(d, int)]

    def extents(self, value: Value, what: str, misfit: str = "") -> list[Dim]:
        """As `ints`, for sizes, none of which is negative: what is not known now is read at run time. `misfit` says
        what is wrong where one of them is `onnxc.host.registry.NO_SIZE`.
        """
        if self.run_time is None or value.shape == (0,) or self.known(value) is not None:
            return self.ints(value, what)
        return self.ints(read(self, value, what, misfit), what)

    def operand(self, x: Operand, like: Value) -> Value:
        """A Python number as a scalar of the other operand's dtype; a value as it is."""
        return x if isinstance(x, Value) else self.scalar(x, like.dtype)

    # ------------------------------------------------------------ pointwise

    def unary(self, op: str, x: Value) -> Value:
        return self.one(op, x)

    def binary(self, op: str, x: Operand, y: Operand) -> Value:
        """A binary primitive; at most one operand may be a Python number."""
        if isinstance(x, Value):
            return self.one(op, x, self.operand(y, x))
        assert isinstance(y, Value)
        return self.one(op, self.operand(x, y), y)

    def neg(self, x: Value) -> Value:
        return self.one("neg", x)

    def abs(self, x: Value) -> Value:
        return self.one("abs", x)

    def exp(self, x: Value) -> Value:
        return self.one("exp", x)

    def log(self, x: Value) -> Value:
        return self.one("log", x)

    def sqrt(self, x: Value) -> Value:
        return self.one("sqrt", x)

    def tanh(self, x: Value) -> Value:
        return self.one("tanh", x)

    def erf(self, x: Value) -> Value:
        return self.one("erf", x)

    def floor(self, x: Value) -> Value:
        return self.one("floor", x)

    def round(self, x: Value) -> Value:
        """To the nearest integer, halves to even."""
        return self.one("round", x)

    def not_(self, x: Value) -> Value:
        return self.one("not", x)

    def isnan(self, x: Value) -> Value:
        return self.one("isnan", x)

    def cast(self, x: Value, to: DType) -> Value:
        return x if x.dtype is to else self.one("cast", x, to=to)

    def bitcast(self, x: Value, to: DType) -> Value:
        """The same bits as another type of the same width."""
        return x if x.dtype is to else self.one("bitcast", x, to=to)

    def add(self, x: Operand, y: Operand) -> Value:
        return self.binary("add", x, y)

    def sub(self, x: Operand, y: Operand) -> Value:
        return self.binary("sub", x, y)

    def mul(self, x: Operand, y: Operand) -> Value:
        return self.binary("mul", x, y)

    def div(self, x: Operand, y: Operand) -> Value:
        """Integers round toward zero, and a zero divisor is an error at run time."""
        return self.binary("div", x, y)

    def pow(self, x: Operand, y: Operand) -> Value:
        return self.binary("pow", x, y)

    def max(self, x: Operand, y: Operand, tie: float | None = None) -> Value:
        """NaN where either is NaN. Of the derivative where both are equal x has a share of `tie`; else each a half."""
        return self._extreme("max", x, y, tie)

    def min(self, x: Operand, y: Operand, tie: float | None = None) -> Value:
        """As `max`."""
        return self._extreme("min", x, y, tie)

    def _extreme(self, op: str, x: Operand, y: Operand, tie: float | None) -> Value:
        if tie is None or not self.differentiable:
            return self.binary(op, x, y)
        like = x if isinstance(x, Value) else y
        assert isinstance(like, Value)
        return self.one(op, self.operand(x, like), self.operand(y, like), tie=tie)

    def detach(self, x: Value) -> Value:
        """The same value, through which no derivative goes."""
        return self.one("copy", x, stop=True) if self.differentiable else x

    def derived(self, y: Value, rule: str, x: Value, *others: Value) -> Value:
        """The same value `y`, of the shape of `x`, with the derivative by `x` that a rule of its own gives. It may read
        `others` too, and give derivatives by these.

        For compositions whose own derivative overflows, takes more work, or has kinks and steps where the function has
        none. The rules are `OWN` in `onnxc/autodiff/elementwise.py`.
        """
        return self.one("copy", y, x, *others, rule=rule) if self.differentiable else y

    def and_(self, x: Value, y: Value) -> Value:
        return self.binary("and", x, y)

    def or_(self, x: Value, y: Value) -> Value:
        return self.binary("or", x, y)

    def eq(self, x: Operand, y: Operand) -> Value:
        return self.binary("eq", x, y)

    def lt(self, x: Operand, y: Operand) -> Value:
        return self.binary("lt", x, y)

    def le(self, x: Operand, y: Operand) -> Value:
        return self.binary("le", x, y)

    def where(self, condition: Value, x: Operand, y: Operand) -> Value:
        like = x if isinstance(x, Value) else y
        assert isinstance(like, Value)
        return self.one("where", condition, self.operand(x, like), self.operand(y, like))

    def sigmoid(self, x: Value) -> Value:
        return self.derived(self.div(1.0, self.add(self.exp(self.neg(x)), 1.0)), "sigmoid", x)

    def clip(self, x: Value, low: Operand | None, high: Operand | None) -> Value:
        """Limited to [low, high], either of which may be None; `high` wins where low > high. NaN stays NaN.

        At a bound the derivative is 1.
        """
        x = x if low is None else self.max(x, low, tie=1.0)
        return x if high is None else self.min(x, high, tie=1.0)

    def softmax(self, x: Value, axis: int) -> Value:
        """exp(x) / sum(exp(x)) along an axis, with the greatest element subtracted first (which cancels out)."""
        e = self.exp(self.sub(x, self.detach(self.reduce("max", x, [axis], True))))
        return self.div(e, self.reduce("sum", e, [axis], True))

    # ------------------------------------------------------------ movement

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        shape = tuple(shape)
        return x if same_shape(x.shape, shape) else self.one("reshape", x, shape=shape)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        return x if tuple(perm) == tuple(range(x.rank)) else self.one("transpose", x, perm=tuple(perm))

    def swap(self, x: Value, a: int, b: int) -> Value:
        """Two axes exchanged."""
        perm = list(range(x.rank))
        perm[a], perm[b] = perm[b], perm[a]
        return self.transpose(x, perm)

    def expand(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Broadcast to a shape of at least the same rank."""
        shape = tuple(shape)
        x = self.reshape(x, (1,) * (len(shape) - x.rank) + x.shape)
        return x if same_shape(x.shape, shape) else self.one("expand", x, shape=shape)

    def full(self, shape: Sequence[Dim], value: Operand, dtype: DType) -> Value:
        """A tensor of one value everywhere."""
        scalar = value if isinstance(value, Value) else self.scalar(value, dtype)
        return self.expand(scalar, shape)

    def slice(self, x: Value, axis: int, start: Dim, stop: Dim, step: int = 1) -> Value:
        """x[..., start:stop:step, ...] with start and stop already inside the axis."""
        return self.part(x, axis, start, slice_size(start, stop, step), step)

    def part(self, x: Value, axis: int, start: Dim, size: Dim, step: int = 1) -> Value:
        """So many elements of an axis. Where a run finds the size to be negative, that is an error; of `slice` it is
        none, and all places in what is left depend on which.
        """
        if step == 1 and always_equal(start, 0) and always_equal(size, x.shape[axis]):
            return x
        starts: list[Dim] = [0] * x.rank
        sizes, steps = list(x.shape), [1] * x.rank
        starts[axis], sizes[axis], steps[axis] = start, size, step
        return self.one("slice", x, starts=tuple(starts), sizes=tuple(sizes), steps=tuple(steps))

    def flip(self, x: Value, axes: Sequence[int]) -> Value:
        """Reversed along these axes."""
        if not axes:
            return x
        starts = tuple(d - 1 if i in axes else 0 for i, d in enumerate(x.shape))
        steps = tuple(-1 if i in axes else 1 for i in range(x.rank))
        return self.one("slice", x, starts=starts, sizes=tuple(x.shape), steps=steps)

    def split(self, x: Value, axis: int, sizes: Sequence[Dim]) -> list[Value]:
        """Consecutive slices of these sizes along an axis."""
        out: list[Value] = []
        at: Dim = 0
        for size in sizes:
            out.append(self.slice(x, axis, at, at + size))
            at = at + size
        return out

    def pad(
        self,
        x: Value,
        low: Sequence[Dim],
        high: Sequence[Dim],
        value: Operand = 0.0,
        interior: Sequence[int] | None = None,
    ) -> Value:
        """Surrounded (and, with `interior`, interleaved) by a value. Nothing may be negative: slice for that."""
        if all(always_equal(d, 0) for d in (*low, *high, *(interior or ()))):
            return x
        gaps = tuple(interior or (0,) * x.rank)
        return self.one("pad", x, self.operand(value, x), low=tuple(low), high=tuple(high), interior=gaps)

    def concat(self, xs: Sequence[Value], axis: int) -> Value:
        if len(xs) > CONCAT_PARTS:  # in stages: a kernel holds the code of all its parts
            xs = [self.concat(xs[i : i + CONCAT_PARTS], axis) for i in range(0, len(xs), CONCAT_PARTS)]
            return self.concat(xs, axis)
        return xs[0] if len(xs) == 1 else self.one("concat", *xs, axis=axis)

    def iota(self, size: Dim, dtype: DType = dtypes.int64) -> Value:
        """0, 1, ..., size - 1."""
        return self.one("iota", size=size, dtype=dtype)

    # ------------------------------------------------------------ the rest

    def reduce(self, op: str, x: Value, axes: Sequence[int], keepdims: bool = False) -> Value:
        """`op` is sum, max, min or prod; axes are not negative."""
        if op in ("max", "min") and all(x.shape[a] == 1 for a in axes):  # what is selected is what it was found in
            out = self.reshape(x, [d for k, d in enumerate(x.shape) if k not in axes])
        else:
            out = self.one(f"reduce_{op}", x, axes=tuple(sorted(axes))) if axes else x
        if keepdims:
            out = self.reshape(out, [1 if i in axes else d for i, d in enumerate(x.shape)])
        return out

    def mean(self, x: Value, axes: Sequence[int], keepdims: bool = False, least: int = 0) -> Value:
        """The sum over how many there are, or over `least` where there are fewer."""
        # A sum of 16-bit floats, and how many there are, may be greater than their type's greatest number.
        wide = self.cast(x, dtypes.float32) if x.dtype.is_float and x.dtype.bits < 32 else x
        total = self.reduce("sum", wide, axes, keepdims)
        count = maximum(prod(x.shape[a] for a in axes), least)
        return self.cast(self.div(total, self.size_as(count, wide.dtype)), x.dtype)

    def size_as(self, size: Dim, dtype: DType) -> Value:
        """A size as a scalar of a dtype."""
        if isinstance(size, int):
            return self.scalar(size, dtype)
        return self.cast(self.sizes(np.asarray(size, dtype=object)), dtype)

    def matmul(self, x: Value, y: Value) -> Value:
        return self.one("matmul", x, y)

    def scan(
        self, init: Sequence[Value], xs: Sequence[Value], trip: Dim, body: Step, going: int | None = None
    ) -> tuple[list[Value], list[Value]]:
        """Runs `body(builder, states, slices) -> (new states, results)` over the leading axis of `xs`, `trip` times.

        With `going`, the number of a state that is a bool, it ends as soon as that is false: results of steps that did
        not run are undefined then.
        Returns the final states, and the results stacked along a new leading axis.
        """
        inner = self.inside()
        inner.origin = self.origin
        states = [inner.input(v.t) for v in init]
        slices = [inner.input(x.t.with_shape(x.shape[1:])) for x in xs]
        numbers: list[Value] = []  # of the step, where it draws random numbers

        def number() -> Value:
            numbers[:] = numbers or [inner.input(TensorType(dtypes.int64, ()))]
            return numbers[0]

        in_loop(inner, self, number)
        after, results = body(inner, states, slices)
        xs = [*xs, *(self.iota(trip) for _ in numbers)]
        ends = [*after, *results]
        unique = list({v.id: v for v in ends}.values())
        region, taken = close_region(inner.inputs, inner.nodes, unique)
        places = tuple(next(k for k, u in enumerate(unique) if u is v) for v in ends)
        attrs = {"states": len(init), "scanned": len(xs), "trip": trip, "results": places}
        attrs |= {} if going is None else {"going": going}
        operands = [*init, *xs, *taken]
        types = scan_types([v.t for v in operands], attrs, region)
        node = Node("scan", operands, [Value(t) for t in types], attrs, (region,), self.origin)
        self.nodes.append(node)
        return list(node.outputs[: len(init)]), list(node.outputs[len(init) :])

    def gather(self, x: Value, index: Value, axis: int) -> Value:
        return self.one("gather", x, index, axis=axis)

    def axis(self, axis: int, rank: int) -> int:
        """A possibly negative axis, checked."""
        if not -rank <= axis < rank:
            raise ShapeError(f"axis {axis} is out of range for rank {rank}")
        return axis % rank if rank else 0
