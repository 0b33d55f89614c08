"""Grows a random model: `grow(seed)`.

A step picks operands from the pool of values, or makes inputs and constants, and emits a node; the oracle runs it at
once. A node that it refuses, or whose results would hide differences (NaN, infinities, ill-conditioned), is dropped.
What an operator takes in an opset (attribute or input, which types) comes from its schema.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from tests.fuzz import shadows
from tests.fuzz.model import Dim, Draw, Input, Model, Run, step
from tests.fuzz.oracle import Array, Oracle, Refused, Value, onnx_type

T = TypeVar("T")
F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)
I64, I32, I16, I8 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int16), np.dtype(np.int8)
U64, U32, U16, U8 = np.dtype(np.uint64), np.dtype(np.uint32), np.dtype(np.uint16), np.dtype(np.uint8)
BOOL = np.dtype(np.bool_)
FLOATS, INTS = (F32, F64, F16), (I64, I32, I8, U8)
SIZES = {"n": 3, "m": 5, "k": 7, "t": 11}  # of dynamic dims; no static dim that is drawn has them
MOST = 4096  # elements


class Skip(Exception):
    """The step does not fit what is there."""


class Item:
    """A value of the pool."""

    def __init__(self, name: str, value: Value) -> None:
        self.name, self.value = name, value

    @property
    def is_sequence(self) -> bool:
        return isinstance(self.value, list)

    @property
    def array(self) -> Array:
        if isinstance(self.value, list):
            raise Skip("a sequence")
        return self.value

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def rank(self) -> int:
        return int(self.array.ndim)

    @property
    def is_float(self) -> bool:
        return not self.is_sequence and shadows.is_float(self.value)

    @property
    def is_number(self) -> bool:
        return not self.is_sequence and self.dtype.kind in "fiuV" and self.dtype.name != "bool"


class Grower:
    """The model so far, its pool, and what steps are made of."""

    def __init__(self, seed: int, oracle: Oracle, opset: int, dynamic: bool, dtypes: Sequence[np.dtype[Any]]) -> None:
        self.r, self.rng = random.Random(seed), np.random.default_rng([seed, 2])
        self.oracle, self.dynamic, self.dtypes = oracle, dynamic, list(dtypes)
        self.model = Model(opset, dict(SIZES) if dynamic else {}, seed=seed)
        self.state = Run({}, {}, [{} for _ in range(shadows.COUNT)])
        self.pool: list[Item] = []
        self.nodes = self.model.nodes  # those of a subgraph, while one grows
        self.room = MOST  # elements of a value
        self.depth = 0  # of subgraphs in each other, while one grows
        self._names = 0

    @property
    def opset(self) -> int:
        return self.model.opset

    # ------------------------------------------------------------ drawing

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def choice(self, options: Sequence[T]) -> T:
        if not options:
            raise Skip
        return self.r.choice(options)

    def integer(self, low: int, high: int) -> int:
        if high < low:
            raise Skip
        return self.r.randint(low, high)

    def name(self, kind: str = "v") -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def size(self) -> int:
        """A dim: mostly small, now and then 0, 1, or one that does not divide a vector."""
        if self.dynamic and self.chance(0.5):
            return self.choice(list(SIZES.values()))
        return self.choice([1, 1, 2, 2, 4, 4, 6, 8, 9, 13, 16, 17]) if self.chance(0.97) else 0

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        while True:
            shape = tuple(self.size() for _ in range(self.integer(low, high)))
            if np.prod(shape) <= MOST // 4:
                return shape

    def dims(self, shape: Sequence[int]) -> tuple[Dim, ...]:
        """With the names of dynamic dims in the place of their sizes."""
        by_size = {v: k for k, v in self.model.sizes.items()}
        return tuple(by_size.get(d, d) for d in shape)

    def dtype(self) -> np.dtype[Any]:
        return self.choice(self.dtypes)

    # ------------------------------------------------------------ the pool

    def pick(self, accept: Callable[[Item], bool] = lambda i: True) -> Item:
        """A tensor of the pool, rather a recent one."""
        found = [i for i in self.pool if not i.is_sequence and accept(i)]
        if not found:
            raise Skip
        return self.choice(found[-4:] if self.chance(0.7) else found)

    def number(self, low: int = 0, high: int = 9) -> Item:
        return self.pick(lambda i: i.is_number and low <= i.rank <= high)

    def float(self, low: int = 0, high: int = 9) -> Item:
        """A float of the pool of such a rank, or a new one."""
        try:
            return self.pick(lambda i: i.is_float and low <= i.rank <= high)
        except Skip:
            return self.fresh(
                self.choice([d for d in self.dtypes if d.name in shadows.NOISE]),
                self.shape(low, min(high, max(low, 4))),
            )

    def fresh(
        self,
        dtype: np.dtype[Any],
        shape: Sequence[int],
        draw: Draw | None = None,
        constant: bool | None = None,
        fixed: bool = False,
    ) -> Item:
        """An input of the model, with dynamic dims unless they are to be fixed; or a constant, by chance."""
        draw = draw or Draw(self.choice(["normal", "normal", "whole"]))
        array = draw.array(self.rng, dtype, shape, self.model.sizes)
        of_one_size = self.dynamic and bool(set(shape) & set(SIZES.values()))
        if constant or (constant is None and not of_one_size and self.chance(0.2)):
            return self.constant(array)
        extent = self.dims([draw.extent])[0] if isinstance(draw.extent, int) else draw.extent
        made = Input(self.name("x"), dtype, tuple(shape) if fixed else self.dims(shape), Draw(draw.kind, extent))
        self.model.inputs.append(made)
        self.model.arrays[made.name] = array
        self._know(made.name, array)
        item = Item(made.name, array)
        self.pool.insert(self.integer(0, len(self.pool)), item)
        return item

    def constant(self, array: Array) -> Item:
        name = self.name("c")
        self.model.constants[name] = array
        self._know(name, array)
        return Item(name, array)

    def _know(self, name: str, value: Value) -> None:
        self.state.values[name] = value
        for s in self.state.shadows:
            s[name] = value

    def like(self, x: Item, draw: Draw | None = None) -> Item:
        """An operand that broadcasts with `x`: from the pool, or new."""
        found = [i for i in self.pool if not i.is_sequence and i.dtype == x.dtype and broadcasts(i.shape, x.shape)]
        if found and draw is None and self.chance(0.5):
            return self.choice(found)
        shape = [d if self.chance(0.75) else 1 for d in x.shape]
        shape = shape[self.integer(0, len(shape)) :] if self.chance(0.3) else shape
        if self.chance(0.05):
            shape = [2, *shape]
        return self.fresh(x.dtype, shape, draw)

    def tame(self, x: Item, low: float, high: float) -> Item:
        """`x`, if its elements lie in a range; else brought there by more nodes."""
        wide = x.array.astype(np.float64)
        if wide.size == 0 or (wide.min() >= low and wide.max() <= high):
            return x
        if low == 0 and self.chance(0.5):
            low = 0.1
        if high > 1e3:
            x = self.emit("Abs", [x])
            return self.emit("Add", [x, self.constant(np.asarray(low + 0.25, x.dtype))])
        if self.chance(0.5) and self.opset >= 11:
            return self.emit("Clip", [x], min=np.asarray(low), max=np.asarray(high))
        y = self.emit("Sigmoid", [x])
        y = self.emit("Mul", [y, self.constant(np.asarray((high - low) * 0.98, x.dtype))])
        return self.emit("Add", [y, self.constant(np.asarray(low + (high - low) * 0.01, x.dtype))])

    # ------------------------------------------------------------ emitting

    def emit(self, op: str, inputs: Sequence[Item | None], **params: Any) -> Item:
        """The only output of a new node. Parameters are attributes or inputs, whatever the schema has."""
        return self.emit_all(op, inputs, 1, **params)[0]

    def emit_all(self, op: str, inputs: Sequence[Item | None], count: int, **params: Any) -> list[Item]:
        """All outputs of a new node. Raises Skip where the opset does not have it, or the oracle refuses it."""
        try:
            schema = onnx.defs.get_schema(op, self.opset)
        except onnx.defs.SchemaError:
            raise Skip from None
        if schema.deprecated or count > schema.max_output:
            raise Skip
        given, attributes = self._place(schema, list(inputs), params)
        self._check_types(schema, given)
        names = [i.name if i is not None else "" for i in given]
        while names and not names[-1]:
            names.pop()
        node = helper.make_node(op, names, [self.name() for _ in range(count)], **attributes)
        return self.add(node)

    def add(self, node: onnx.NodeProto) -> list[Item]:
        """Runs a node, and takes its outputs into the pool. Raises Skip."""
        try:
            trial = Run({}, self.state.values, self.state.shadows)
            step(node, self.opset, trial, self.model.constants, self.oracle, self.rng)
        except Refused as refusal:
            raise Skip(str(refusal)) from refusal
        items = [Item(o, self.state.values[o]) for o in node.output if o]
        if not all(_fits(i.value, self.room) for i in items):
            raise Skip(f"{node.op_type}: large, or not finite")
        self.nodes.append(node)
        self.pool += items
        return items

    def _place(
        self, schema: onnx.defs.OpSchema, inputs: list[Item | None], params: dict[str, Any]
    ) -> tuple[list[Item | None], dict[str, Any]]:
        """Parameters as attributes or as inputs."""
        formal = [i.name for i in schema.inputs]
        attributes: dict[str, Any] = {}
        for key, value in params.items():
            if value is None:
                continue
            key = {"value": "constant_value", "k": "K"}.get(key, key) if key not in schema.attributes else key
            if key in schema.attributes:
                if isinstance(value, Item) or (isinstance(value, (list, np.ndarray)) and not np.size(value)):
                    raise Skip
                attributes[key] = _plain(schema.attributes[key], value)
            elif key in formal:
                at = formal.index(key)
                inputs += [None] * (at + 1 - len(inputs))
                inputs[at] = value if isinstance(value, Item) else self._parameter(schema, at, value, inputs)
            else:
                raise Skip(f"{schema.name} has no {key} in opset {self.opset}")
        return inputs, attributes

    def _parameter(self, schema: onnx.defs.OpSchema, at: int, value: Any, inputs: list[Item | None]) -> Item:
        """A constant for an input, of a type that it may have."""
        formal = schema.inputs[at]
        array = np.asarray(value)
        for k, i in enumerate(inputs):
            if (
                i is not None
                and not i.is_sequence
                and schema.inputs[min(k, len(schema.inputs) - 1)].type_str == formal.type_str
            ):
                return self.constant(array.astype(i.dtype))
        kinds = [I64, I32] if array.dtype.kind in "iu" else [F32, F64]
        fits = [d for d in kinds if type_name(d) in formal.types] or [F32]
        return self.constant(array.astype(self.choice(fits)))

    def _check_types(self, schema: onnx.defs.OpSchema, given: Sequence[Item | None]) -> None:
        bound: dict[str, str] = {}
        for k, item in enumerate(given):
            if k >= len(schema.inputs) and not schema.inputs:
                raise Skip
            formal = schema.inputs[min(k, len(schema.inputs) - 1)]
            if item is None or item.is_sequence:
                continue
            kind = type_name(item.dtype)
            if kind not in formal.types and f"optional({kind})" not in formal.types:
                raise Skip(f"{schema.name} does not take {kind}")
            alike = formal.option != onnx.defs.OpSchema.FormalParameterOption.Variadic or formal.is_homogeneous
            if alike and bound.setdefault(formal.type_str, kind) != kind:
                raise Skip(f"{schema.name} takes operands of one type")

    # ------------------------------------------------------------ subgraphs

    def body(self, make: Callable[[], list[Item]]) -> tuple[list[onnx.NodeProto], list[Item], list[Item]]:
        """Nodes that `make` emits for a subgraph, the items made, and what it returns. The pool is as before."""
        pool, nodes = list(self.pool), self.nodes
        self.nodes = []
        self.depth += 1
        try:
            ends = make()
            made = self.nodes
        finally:
            self.depth -= 1
            self.nodes = nodes
            known = {i.name for i in self.model.inputs}
            fresh = [i for i in self.pool if i.name in known and i not in pool]
            self.pool = pool + fresh
        return made, fresh, ends


def type_name(dtype: np.dtype[Any]) -> str:
    """As schemas say it: `tensor(float)`."""
    name = onnx.TensorProto.DataType.Name(onnx_type(dtype)).lower()
    return f"tensor({name})"


def _plain(attribute: onnx.defs.OpSchema.Attribute, value: Any) -> Any:
    if isinstance(value, (onnx.GraphProto, onnx.TensorProto, str)):
        return value
    kinds = onnx.defs.OpSchema.AttrType
    array = np.asarray(value)
    if attribute.type == kinds.FLOATS:
        return [float(v) for v in array.ravel()]
    if attribute.type == kinds.INTS:
        return [int(v) for v in array.ravel()]
    if attribute.type == kinds.FLOAT:
        return float(array)
    return int(array) if attribute.type == kinds.INT else value


def _fits(value: Value, room: int) -> bool:
    if isinstance(value, list):
        return all(_fits(v, room) for v in value)
    return value.size <= room and value.ndim <= 6 and shadows.is_plain(value)


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes do."""
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


OPSETS = [*range(7, 29), 13, 17, 18, 20, 21, 22, 23, 24, 26]
PALETTES = [
    [F32], [F32], [F32, I64], [F32, I64, BOOL], [F32, F64, I32, I64], [F64, I64], [F16, F32], [F32, U8, I8, I32],
    [F32, F64, F16, *INTS, BOOL], [BF16, F32], [I64, I32, BOOL], [U8, I8, U16, I16, U32, U64, I32, F32],
]  # fmt: skip


def grow(
    seed: int, oracle: Oracle, steps: Sequence[tuple[int, Callable[[Grower], Any]]], opset: int | None = None
) -> Model:
    """The model of a seed."""
    r = random.Random(f"plan {seed}")
    g = Grower(seed, oracle, opset or r.choice(OPSETS), r.random() < 0.4, r.choice(PALETTES))
    for _ in range(r.randint(1, 3)):
        g.fresh(g.dtype(), g.shape(), constant=False)
    wanted = r.choice([2, 4, 7, 12, 20])
    favourites = r.sample(steps, min(len(steps), 12)) if r.random() < 0.6 else list(steps)
    for _ in range(12 * wanted):
        if len(g.model.nodes) >= wanted:
            break
        pool = favourites if r.random() < 0.7 else steps
        _, take = g.r.choices(pool, [w for w, _ in pool])[0]
        try:
            take(g)
        except Skip:
            continue
    return _ended(g)


def _ended(g: Grower) -> Model:
    """With outputs: what nothing reads, and some of what is read."""
    model = copy.copy(g.model)
    used = {n for node in model.nodes for n in node.input}
    made = [o for node in model.nodes for o in node.output if o]
    asked = set(model.outputs)
    model.outputs = [n for n in made if n not in used or n in asked or g.chance(0.15)]
    if model.outputs and g.chance(0.1):  # an input or a weight as it is
        model.outputs.append(g.choice([i.name for i in model.inputs] + list(model.constants)))
    return model
