"""Whether the plan of a staged model can be run, before anything of it is: a file may be damaged, or a stranger's.

A plan is JSON. Each step reads slots that an earlier one has filled, calls programs, arrays and functions that exist,
with as many values as they take, and tells programs sizes that are known by then. What is not so is a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from onnxc.ir.dtypes import BY_NAME

_MOST_SLOTS = 1 << 24
_WRAPPED = {"optional": 1, "sequence": 1, "map": 2, "nothing": 1, "any": 1, "tensor": 2}  # how much follows the kind
_NUMBERS = {"if": ("split",), "loop": ("carried", "scans")}  # attributes that count values
_TEXTS = {"read": "what"}

Ports = tuple[int, int]  # how many values go in and come out


def check_ports(rows: Sequence[Any]) -> None:
    """The inputs or outputs of a model: name, type, dims as they are shown."""
    for name, type, dims in rows:
        _require(isinstance(name, str) and _is_list(dims), "an input or output has no name or no dims")
        _check_type(type)


class PlanCheck:
    """Checks plans.

    Args:
        programs: of each program, how many inputs and outputs it has.
        arrays: how many arrays there are.
        kinds: of the steps that can be run.
        kernels: how many a report has.
    """

    def __init__(self, programs: Sequence[Ports], arrays: int, kinds: Collection[str], kernels: int) -> None:
        self.programs, self.arrays, self.kinds, self.kernels = programs, arrays, kinds, kernels

    def plan(self, plan: Mapping[str, Any], known: Collection[str]) -> Ports:
        """A plan in which these sizes are known at first; how many values it takes and gives."""
        slots = _count(plan["slots"], _MOST_SLOTS)
        inputs, outputs = (_slots(plan[side], slots) for side in ("inputs", "outputs"))
        _require(len(plan["types"]) == len(inputs), "the inputs of a plan are not those of its types")
        filled, sizes = set(inputs), {*known, *_learnt(plan["types"])}
        for slot, array in plan["constants"]:
            _count(array, self.arrays)
            filled.update(_slots([slot], slots))
        for step in plan["steps"]:
            self._step(step, slots, filled, sizes)
        _require(filled.issuperset(outputs), "a plan gives out a slot that nothing fills")
        return len(inputs), len(outputs)

    def _step(self, step: Mapping[str, Any], slots: int, filled: set[int], sizes: set[str]) -> None:
        kind, given, made = step["kind"], step["in"], _slots(step["out"], slots)
        _require(kind in self.kinds and _is_list(given), f"a step of the kind {str(kind)[:40]!r}")
        _require(filled.issuperset(k for k in given if k is not None), "a step reads a slot that nothing fills")
        _require(len(step["types"]) == len(made), "the outputs of a step are not those of its types")
        _count(step.get("kernel", 0), max(self.kernels, 1))
        _require(isinstance(step.get("node") or "", str), "the node of a step is no text")
        learnt = [*_learnt(step["types"])]
        if kind == "part":
            self._part(step, given, made, sizes)
            learnt = []  # a program's results have sizes that are known
        else:
            self._attributes(kind, step.get("attrs", {}))
            self._host(kind, step, given, made)
            self._regions(kind, step, len(given), len(made), sizes)
            learnt += step["symbols"] if kind == "read" else []
        filled.update(made)
        filled.difference_update(_slots(step["dead"], slots))
        sizes.update(learnt)

    def _part(self, step: Mapping[str, Any], given: Sequence[Any], made: Sequence[int], sizes: set[str]) -> None:
        takes, gives = self.programs[_count(step["part"], len(self.programs))]
        told = step["sizes"]
        _require(_is_list(told) and sizes.issuperset(told), "a program is told sizes that are not known")
        count = sum(k is not None for k in given) + len(told)
        _require((takes, gives) == (count, len(made)), "a step and its program differ in how many values they have")

    def _attributes(self, kind: str, attrs: Mapping[str, Any]) -> None:
        for name, value in attrs.items():
            _require(isinstance(name, str), "an attribute without a name")
            if isinstance(value, dict):
                _count(value["array"], self.arrays)
        for name in _NUMBERS.get(kind, ()):
            _count(attrs[name], _MOST_SLOTS)
        if kind == "loop" and "declared" in attrs:
            texts = attrs["declared"]
            _require(_is_list(texts) and len(texts) <= attrs["scans"], "a loop declares other results than it has")
            _require(all(map(_is_type, texts)), "a loop declares results of no type")
        if kind in _TEXTS:
            _require(isinstance(attrs[_TEXTS[kind]], str), "an attribute of a step is no text")

    def _host(self, kind: str, step: Mapping[str, Any], given: Sequence[Any], made: Sequence[int]) -> None:
        if kind == "read":
            symbols = step["symbols"]
            _require(len(given) == len(made) == 1 and None not in given, "a step reads sizes of no tensor")
            _require(_is_list(symbols) and all(isinstance(s, str) for s in symbols), "sizes without names")
        if kind == "later":
            _require(isinstance(step["text"], str), "nodes that are no text")
            for name, array in step["held"].items():
                _require(isinstance(name, str), "an array without a name")
                _count(array, self.arrays)
            fixed = step["attrs"]["fixed"]
            _require(_is_list(fixed) and all(_is_slot(k, len(given)) for k in fixed), "contents of no input")

    def _regions(self, kind: str, step: Mapping[str, Any], given: int, made: int, sizes: set[str]) -> None:
        """Branches and bodies: what they take and give is what the step hands them."""
        attrs = step.get("attrs", {})
        chunk = step.get("chunk")
        _require(chunk is None or isinstance(chunk, str), "a chunk without a name")
        inside = sizes | ({chunk} if chunk is not None else set())
        found = [self.plan(region, inside) for region in step.get("regions", ())]
        if kind == "if":
            split = attrs["split"]
            _require(None not in step["in"], "a branch reads what is left out")
            _require(found == [(split, made), (given - 1 - split, made)], "the branches of a step do not fit it")
        elif kind == "loop":
            gives = 1 + attrs["carried"] + attrs["scans"] + (chunk is not None)
            _require(found == [(given, gives)] and None not in step["in"][2:], "the body of a loop does not fit it")
            _require(made == attrs["carried"] + attrs["scans"], "a loop gives other values than its body")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _is_type(value: Any) -> bool:
    """Whether a value is what a loop declares: `float32 1 3`, or nothing."""
    if not isinstance(value, str):
        return False
    name, *sizes = value.split(" ")
    return not value or (name in BY_NAME and all(re.fullmatch("[0-9]{1,13}", s) for s in sizes))


def _is_list(value: Any) -> bool:
    """Whether a value is a list in JSON."""
    return isinstance(value, (list, tuple))


def _is_slot(number: Any, limit: int) -> bool:
    return type(number) is int and 0 <= number < limit


def _count(number: Any, limit: int) -> int:
    _require(_is_slot(number, limit), f"the number {str(number)[:40]} where it is from 0 to {limit - 1}")
    return int(number)


def _slots(numbers: Any, slots: int) -> list[int]:
    _require(_is_list(numbers) and all(_is_slot(k, slots) for k in numbers), "slots that there are not")
    return list(numbers)


def _check_type(type: Any) -> None:
    if type is None:
        return
    kind, *rest = type
    _require(len(rest) == _WRAPPED[kind], f"a type of the kind {str(kind)[:40]!r}")
    if kind in ("optional", "sequence"):
        _check_type(rest[0])
        return
    _require(rest[0] in BY_NAME and (kind != "map" or rest[1] in BY_NAME), "a dtype that there is not")
    _require(kind != "tensor" or _is_list(rest[1]), "a tensor without dims")


def _learnt(types: Sequence[Any]) -> Iterator[str]:
    """The names of sizes that values of such types tell."""
    for type in types:
        _check_type(type)
        if type is not None and type[0] == "tensor":
            yield from (d for d in type[2] if isinstance(d, str))
