"""The steps of a staged model: programs, sizes that are read, functions of the host, branches and loops.

A call of the model takes all of them in turn, so what a step does in Python is kept short: what can be found out of the
manifest is found out once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.errors import LimitError, OnnxcError, RunError
from onnxc.host.registry import NO_SIZE, function, looked_at
from onnxc.ir.dtypes import BY_NAME
from onnxc.runtime.cpu import memory_bytes
from onnxc.runtime.sizes import evaluate
from onnxc.runtime.staged_clock import Clock, current
from onnxc.runtime.staged_values import on_host

if TYPE_CHECKING:
    from onnxc.runtime.staged import StagedModel

Array = np.ndarray[Any, Any]
Values = list[Any]
Sizes = dict[str, int]
Named = tuple[int, list[tuple[int, str]]]  # a rank, and which of the dims are sizes of which names

_MOMENT = 0.05  # seconds: how long programs run loops before the host looks whether it is to stop
_SPARE = 1 << 20  # bytes that may be allocated for results of iterations that then do not run
_KEPT_SIZES = 256  # empty arrays by which programs are told sizes
_TRUE = np.asarray(True)  # the condition that a loop's body is given
_ZERO = np.asarray(0, np.int64)  # the number of its first iteration
for _scalar in (_TRUE, _ZERO):
    _scalar.setflags(write=False)
STEPS: dict[str, type[Step]] = {}


class Plan:
    """Steps over slots, ready to run."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        self.model = model
        self.inputs: list[int] = described["inputs"]
        self.outputs: list[int] = described["outputs"]
        self.types = [_named(t) for t in described["types"]]
        self.first: Values = [None] * int(described["slots"])  # as a run begins
        for slot, k in described["constants"]:
            self.first[slot] = model._arrays[k]
        self.steps = [model.step(s["kind"])(s, model) for s in described["steps"]]
        self.made = {slot for step in described["steps"] if step["kind"] == "part" for slot in step["out"]}
        self.read = {slot for step in described["steps"] for slot in step["in"]} | {*self.outputs}
        # whether each output is an array of its own that a program has made
        self.makes_outputs = self.made.issuperset(self.outputs) and len({*self.outputs}) == len(self.outputs)

    def run(self, inputs: Sequence[Any], sizes: Sizes) -> Values:
        """The outputs. `sizes` are of the graphs around it, and get those that are learnt here."""
        return self.outcome(self.begun(inputs), sizes)

    def begun(self, inputs: Sequence[Any]) -> Values:
        """The slots as a run begins."""
        values = self.first.copy()
        for slot, x in zip(self.inputs, inputs, strict=True):
            values[slot] = x
        return values

    def outcome(self, values: Values, sizes: Sizes) -> Values:
        """The outputs, of slots as a run begins."""
        clock = current.clock
        if clock is None or clock.model is not self.model:
            for step in self.steps:
                step.run(values, sizes)
        else:
            for step in self.steps:
                step.timed(values, sizes, clock)
        return [values[k] for k in self.outputs]

    def called(self, inputs: Sequence[Any], around: Sizes) -> Values:
        """As a region: it knows the sizes around it, and those of its inputs."""
        sizes = dict(around)
        self.learn(inputs, sizes)
        return self.run(inputs, sizes)

    def learn(self, inputs: Sequence[Any], sizes: Sizes) -> None:
        """Takes note of the sizes of the inputs."""
        for named, x in zip(self.types, inputs, strict=True):
            if named is not None:
                _learn(named, x, sizes)


class _Body:
    """A loop's body, ready for one iteration after the other: what they all read is looked at once.

    Sizes that an iteration learns are its own: of a loop within it that does not run, the next one does not know them.
    """

    def __init__(self, plan: Plan, inputs: Values, carried: int, sizes: Sizes) -> None:
        self.plan, self.sizes = plan, dict(sizes)
        plan.learn(inputs, self.sizes)
        self.values = plan.begun(inputs)
        self.slots = plan.inputs[2 : 2 + carried]
        self.number = plan.inputs[0] if plan.inputs[0] in plan.read else None
        # A program's results are of the rank that they have by their type.
        self.changing = [
            (k, named) for k, named in enumerate(plan.types[2 : 2 + carried])
            if named is not None and (named[1] or plan.outputs[1 + k] not in plan.made)
        ]  # fmt: skip

    def turn(self, count: int, carried: Values) -> Values:
        """An iteration: condition, carried values, results."""
        values, sizes = self.values.copy(), self.sizes.copy()
        for slot, x in zip(self.slots, carried, strict=True):
            values[slot] = x
        if self.number is not None:
            values[self.number] = np.asarray(count, np.int64)
        for k, named in self.changing:
            _learn(named, carried[k], sizes)
        return self.plan.outcome(values, sizes)


def _named(described: Sequence[Any] | None) -> Named | None:
    """What is to be learnt of a value; None where it is no tensor."""
    if described is None or described[0] != "tensor":
        return None
    return len(described[2]), [(k, size) for k, size in enumerate(described[2]) if isinstance(size, str)]


def _learn(named: Named, value: Any, sizes: Sizes) -> None:
    """Takes note of the sizes of a tensor that have names."""
    rank, names = named
    shape = value.shape
    if len(shape) != rank:
        raise RunError(f"a tensor of rank {rank} was expected, of shape {list(shape)} it is")
    for axis, name in names:
        sizes[name] = shape[axis]


class Step:
    """One step: from slots to slots."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        self.model = model
        self.inputs: list[int | None] = described["in"]
        self.outputs: list[int] = described["out"]
        self.types: list[Any] = described["types"]
        self.named = [_named(t) for t in self.types]
        self.dead: list[int] = described["dead"]
        self.kernel: int = described.get("kernel", 0)  # the row of the report
        self.node: str = described.get("node") or ""
        self.attrs = {k: _attribute(v, model) for k, v in described.get("attrs", {}).items()}
        self.regions = [Plan(r, model) for r in described.get("regions", ())]

    def run(self, values: Values, sizes: Sizes) -> None:
        given = [None if k is None else values[k] for k in self.inputs]
        try:
            found = self.outcome(given, sizes)
            if len(found) < len(self.outputs):
                raise RunError(f"a step made {len(found)} values, not {len(self.outputs)}")
            for slot, named, value in zip(self.outputs, self.named, found, strict=False):
                if named is not None:
                    _learn(named, value, sizes)
                values[slot] = value
        except OnnxcError as error:
            error.node = error.node or self.node or None
            raise
        except MemoryError as error:
            raise LimitError("no memory for what a step makes", node=self.node or None, cause=error) from error
        for slot in self.dead:
            values[slot] = None

    def timed(self, values: Values, sizes: Sizes, clock: Clock) -> None:
        """`run`, with a clock."""
        clock.host(self.kernel, lambda: self.run(values, sizes))

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        """The values of the outputs, or more."""
        raise NotImplementedError


def _attribute(value: Any, model: StagedModel) -> Any:
    if isinstance(value, dict):
        return model._arrays[value["array"]]
    return tuple(value) if isinstance(value, list) else value


class Part(Step):
    """A program."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        number = described["part"]
        self.part = model._parts[number]
        self.call = self.part._run
        self.kernel = model.manifest["first_kernels"][number]
        self.told: list[str] = described["sizes"]
        self.read: list[int] = [k for k in self.inputs if k is not None]

    def run(self, values: Values, sizes: Sizes) -> None:
        args = [values[k] for k in self.read]
        for name in self.told:
            args.append(_empty(sizes[name]))
        try:
            found = self.call(tuple(args))
        except OnnxcError as error:
            error.node = error.node or self.node or None
            raise
        for slot, value in zip(self.outputs, found, strict=True):
            values[slot] = value
        for slot in self.dead:
            values[slot] = None

    def timed(self, values: Values, sizes: Sizes, clock: Clock) -> None:
        args = (*(values[k] for k in self.read), *(_empty(sizes[name]) for name in self.told))
        for slot, value in zip(self.outputs, clock.part(self.kernel, self.part, args), strict=True):
            values[slot] = value
        for slot in self.dead:
            values[slot] = None


_empties: dict[int, Array] = {}


def _empty(size: int) -> Array:
    """An array whose shape tells a program a size."""
    found = _empties.get(size)
    if found is None:
        if len(_empties) >= _KEPT_SIZES:
            _empties.clear()
        found = _empties[size] = np.empty((size, 0), np.uint8)
    return found


class Read(Step):
    """Content that becomes sizes."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.symbols: list[str] = described["symbols"]
        ((self.source,), (self.target,)) = self.inputs, self.outputs
        self.single = self.symbols[0] if len(self.symbols) == 1 else None

    def run(self, values: Values, sizes: Sizes) -> None:
        found = values[self.source]  # type: ignore[index]
        array = found if type(found) is np.ndarray else on_host(found)
        if self.single is not None and array.size == 1:
            number = array.item()
            if number < 0:
                self._fail([number])
            sizes[self.single] = number
        else:
            numbers = array.ravel().tolist()
            if min(numbers, default=0) < 0:
                self._fail(numbers)
            sizes.update(zip(self.symbols, numbers, strict=True))
        values[self.target] = found
        for slot in self.dead:
            values[slot] = None

    def _fail(self, numbers: list[int]) -> None:
        what, misfit = self.attrs["what"], self.attrs.get("misfit")
        if NO_SIZE not in numbers or not misfit:
            raise RunError(f"{what}: a size cannot be negative (the data gives {numbers})", node=self.node or None)
        fit = [n for n in numbers if n >= 0]
        shown = f" ({', '.join('?' if n < 0 else str(n) for n in numbers)})" if fit and max(fit) < -NO_SIZE else ""
        raise RunError(f"{what}{shown}: {misfit}", node=self.node or None)


class Host(Step):
    """A function of `onnxc.host`."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.function = function(described["function"])
        self.looks_at = looked_at(self.function)

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        for k in range(len(given)) if self.looks_at is None else self.looks_at:
            if k < len(given) and type(given[k]) is not np.ndarray:
                given[k] = on_host(given[k])
        try:
            found = self.function(*given, **self.attrs)
        except (OnnxcError, MemoryError):
            raise
        except RecursionError as error:
            raise LimitError("a step on the host is nested too deeply", cause=error) from error
        except Exception as error:
            raise RunError(f"a step on the host failed: {type(error).__name__}: {error}", cause=error) from error
        return found if isinstance(found, tuple) else (found,)


class If(Step):
    """One of two plans."""

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        condition, *taken = given
        split = self.attrs["split"]
        if _flag(condition, "the condition of If"):
            return self.regions[0].called(taken[:split], sizes)
        return self.regions[1].called(taken[split:], sizes)


def _flag(x: Any, what: str) -> bool:
    if x.size != 1:
        raise RunError(f"{what} has {x.size} elements, and must have one")
    return bool((x if type(x) is np.ndarray else on_host(x)).item())


class Loop(Step):
    """A plan, again and again."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.chunk: str | None = described.get("chunk")
        carried, declared = self.attrs["carried"], self.attrs.get("declared", ())
        self.grows = any(t is None or t[0] != "tensor" for t in self.types[:carried])
        self.collects = self.types[carried:]
        for k, text in enumerate(declared):  # what the model says of results whose types only a run can tell
            if text and self.collects[k] is None:
                name, *sizes = text.split()
                self.collects[k] = ["tensor", name, [0, *map(int, sizes)]]

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        trip, condition, *rest = given
        most = None if trip is None else int(on_host(trip))
        go = condition is None or _flag(condition, "the condition of Loop")
        carried, taken = rest[: self.attrs["carried"]], rest[self.attrs["carried"] :]
        if self.chunk is not None:
            return self._in_chunks(most, go, carried, taken, sizes)
        results: list[Values] = [[] for _ in range(self.attrs["scans"])]
        limit, count, room, seen = self.model.iteration_limit, 0, memory_bytes(), set[int]()
        growth = _Growth() if self.grows else None
        body = _Body(self.regions[0], [_ZERO, _TRUE, *rest], len(carried), sizes) if go and most != 0 else None
        while body is not None and go and (most is None or count < most):
            if limit is not None and count >= limit:
                raise LimitError(f"a loop runs for more than {limit} iterations (model.iteration_limit)")
            flag, *found = body.turn(count, carried)
            go = flag is _TRUE or _flag(flag, "the condition of Loop")
            carried = found[: len(carried)]
            for collected, x in zip(results, found[len(carried) :], strict=True):
                collected.append(x)
                room -= x.nbytes if x.dtype != object else 8 + _bytes_of(x, seen)
            if room < 0 or (growth is not None and growth.is_beyond(carried, room)):
                raise LimitError(f"what a loop collects does not fit into memory after {count + 1} iterations")
            count += 1
        stacked = (self._stacked(r, t, sizes) for r, t in zip(results, self.collects, strict=True))
        return [*carried, *stacked]

    def _stacked(self, collected: Values, described: Sequence[Any] | None, sizes: Sizes) -> Any:
        """Results of all iterations, along a new first axis."""
        if not collected:
            return _none(described, sizes)
        shapes = {tuple(x.shape) for x in collected}
        if len(shapes) > 1:
            raise RunError(f"a loop collects values of different shapes: {sorted(shapes)}")
        return self.model.stacked(collected)

    def _in_chunks(self, most: int | None, go: bool, carried: Values, taken: Values, sizes: Sizes) -> Values:
        """A program runs many iterations at once; from one to the next takes no more than a moment."""
        assert self.chunk is not None
        count, chunk, limit, sizes = 0, 1, self.model.iteration_limit, dict(sizes)
        ends = [n for n in (most, limit) if n is not None]
        results = _Collected(self.types[len(carried) :])
        while go and (most is None or count < most):
            if limit is not None and count >= limit:
                raise LimitError(f"a loop runs for more than {limit} iterations (model.iteration_limit)")
            sizes[self.chunk] = min([chunk, *(n - count for n in ends)])
            begun = time.perf_counter()
            number = np.asarray(count, np.int64)
            flag, *found = self.regions[0].called([number, _TRUE, *carried, *taken], sizes)
            results.add(found[len(carried) : -1], int(found[-1]))
            go, carried, count = _flag(flag, "the condition of Loop"), found[: len(carried)], int(found[-1])
            taken_seconds = time.perf_counter() - begun
            faster = 16 if 16 * taken_seconds < _MOMENT else 2
            chunk = min(faster * chunk, results.most()) if taken_seconds < _MOMENT else max(1, chunk // 2)
        return [*carried, *results.joined(sizes)]


class _Collected:
    """Results of a loop of which a program runs many iterations at once."""

    def __init__(self, types: Sequence[Any]) -> None:
        self.types = types
        self.arrays: list[Values] = [[] for _ in types]
        self.count = self.bytes = 0

    def add(self, found: Values, count: int) -> None:
        """Results of the iterations up to a number; those that did not run are undefined."""
        ran, self.count = count - self.count, count
        for collected, x in zip(self.arrays, found, strict=True):
            collected.append(x if len(x) == ran else x[:ran].copy())
            self.bytes += collected[-1].nbytes
        if self.bytes > memory_bytes():
            raise LimitError(f"what a loop collects does not fit into memory after {count} iterations")

    def most(self) -> int:
        """How many iterations may have room for their results before it is known that they run."""
        each = max(self.bytes // self.count, 1)
        return min(max(self.bytes, _SPARE) // each + 1, 1 << 30) if self.arrays else 1 << 30

    def joined(self, sizes: Sizes) -> Iterator[Array]:
        """Each along its first axis."""
        for collected, described in zip(self.arrays, self.types, strict=True):
            if not collected:
                yield _none(described, sizes)
            else:
                yield collected[0] if len(collected) == 1 else np.concatenate(collected)


class _Growth:
    """Sequences that a loop carries, and that may grow without end: measured whenever they are a sixteenth longer, so
    that an iteration costs the same however long they are. No later, however much room is left: what is appended may
    double each time.
    """

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}  # by number of the value: from which length on it is measured

    def is_beyond(self, carried: Values, room: int) -> bool:
        """Whether sequences do not fit into so many bytes."""
        for k, x in enumerate(carried):
            if isinstance(x, list) and len(x) >= self.lengths.get(k, 0):
                self.lengths[k] = len(x) + len(x) // 16 + 1
                if _bytes_of(x, set()) > room:
                    return True
        return False


_ARRAY = 112  # bytes of an array beside its elements


def _bytes_of(x: Any, seen: set[int]) -> int:
    """What a value takes; `seen` are the identities of what was counted before, as arrays and strings may be shared."""
    if isinstance(x, list):
        return 8 * len(x) + sum(_bytes_of(v, seen) for v in x)
    if id(x) in seen or not hasattr(x, "nbytes"):
        return 0
    seen.add(id(x))
    words = {id(w): len(w) for w in x.ravel().tolist()} if x.dtype == object else {}
    found = sum(size for k, size in words.items() if k not in seen)
    seen.update(words)
    return _ARRAY + int(x.nbytes) + found


def _none(described: Sequence[Any] | None, sizes: Sizes) -> Array:
    """What a loop collects that never ran."""
    if described is None:
        raise RunError("a loop that never ran collects values of unknown type")
    rest = [evaluate(d, sizes) if _is_known(d, sizes) else 0 for d in described[2][1:]]
    return np.empty((0, *rest), BY_NAME[described[1]].numpy)


def _is_known(size: Any, sizes: Sizes) -> bool:
    try:
        evaluate(size, sizes)
        return True
    except KeyError:
        return False


STEPS |= {"part": Part, "read": Read, "host": Host, "if": If, "loop": Loop}
