"""Which values a call gives to which inputs: by position, by name, and for those left out that have a default."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onnxc.errors import InputError


class Binding:
    """The inputs of a model as callers may give them.

    Args:
        inputs: in the model's order, each with its `name`, and shown by `str`.
        defaults: values of inputs that need not be given, by name.
        fixed: names of initializers that the model lists as inputs and that are constants of the program.
    """

    def __init__(self, inputs: Sequence[Any], defaults: Mapping[str, Any], fixed: Collection[str]) -> None:
        self.inputs, self.defaults, self.fixed = tuple(inputs), dict(defaults), frozenset(fixed)
        self.names = tuple(t.name for t in inputs)
        self._known = frozenset(self.names)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Any, ...]:
        """All inputs in the model's order.

        Raises:
            InputError: one is unknown, missing or given twice.
        """
        names = self.names
        if len(args) == len(names) and not kwargs:
            return tuple(args)
        if len(args) > len(names):
            hint = f"{self._constants(sorted(self.fixed))}{by_name(args)}"
            raise InputError(f"{len(args)} inputs were given; the model has {len(names)}: {self._all()}{hint}")
        unknown = [name for name in kwargs if name not in self._known]
        if unknown:
            hint = f"{self._constants([name for name in unknown if name in self.fixed])}{by_name(args)}"
            text = f"the model has no input {', '.join(map(repr, unknown))}; its inputs are {self._all()}"
            raise InputError(text + hint)
        twice = [name for name in names[: len(args)] if name in kwargs]
        if twice:
            raise InputError(f"input {', '.join(map(repr, twice))} is given both by position and by name")
        left = self.inputs[len(args) :]
        missing = [t for t in left if t.name not in kwargs and t.name not in self.defaults]
        if missing:
            raise InputError(f"missing input {', '.join(map(str, missing))}{by_name(args)}")
        return (*args, *(kwargs[t.name] if t.name in kwargs else self.defaults[t.name] for t in left))

    def _all(self) -> str:
        return ", ".join(map(str, self.inputs)) or "none"

    def _constants(self, names: Sequence[str]) -> str:
        """What to add to an error, where a value may have been meant for one of these, which are constants."""
        if not names:
            return ""
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        one = len(names) == 1
        which = "is an initializer, compiled as a constant" if one else "are initializers, compiled as constants"
        return f"; {shown} {which}: onnxc.compile(..., keep_inputs=[{shown}]) lets calls give values"


def by_name(args: Sequence[object]) -> str:
    """What to add to an error about positional arguments, where one is a dict of inputs."""
    return "; a dict of inputs is given as model(**inputs)" if any(isinstance(x, Mapping) for x in args) else ""


def name_list(given: Any, what: str) -> tuple[str, ...]:
    """Several names. InputError for anything else, as a single one, whose letters would pass for names."""
    try:
        found = None if isinstance(given, (str, bytes)) else tuple(given)
    except TypeError:
        found = None
    if found is None or not all(isinstance(name, str) for name in found):
        raise InputError(f"{what} is a list of names, and not {given!r}")
    return found
