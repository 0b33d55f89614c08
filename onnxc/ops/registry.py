"""The table of ONNX operators.

An operator is a Python function that builds its meaning out of primitives:

    @op("HardSigmoid", 6)
    def hard_sigmoid(b: Builder, x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Value:
        return b.min(b.max(b.add(b.mul(x, alpha), beta), 0.0), 1.0)

Its positional parameters are the ONNX inputs (a missing optional one is None, `*xs` takes a variadic tail), its
keyword-only parameters are the ONNX attributes by name, with the standard's defaults; an attribute that is not of its
parameter's type (`int`, `list[float]`, `Flag`, `Literal["avg", "max"]`) is an error. Two more keyword-only
parameters are filled in where a function has them: `opset` (the model's version of the op's domain) and `n_outputs`.
Types, shapes, gradients and kernels follow from the body. Users define theirs in the same way
(docs/custom-operators.md).
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import onnxc.ops
from onnxc.errors import InputError, ModelError, UnsupportedError, shortened
from onnxc.host.registry import import_all
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder
from onnxc.primitives.custom import with_gradient

Definition = Callable[..., "Value | Sequence[Value | None]"]
Gradient = Callable[..., "Value | Sequence[Value | None] | None"]
"""(builder, dys, xs, ys, **attributes) to the cotangents of the inputs, each in the shape and dtype of its input.

`dys` are those of the outputs, None where nothing depends on one; `xs` and `ys` the inputs and outputs. The result has
one for each input, None for zero; a single one may stand alone. The attributes are those that its keywords name.
"""
F = TypeVar("F", bound=Definition)
Flag = Literal[0, 1]
"""An attribute that is true or false. What another number would mean is each runtime's own affair: it is refused."""
_OWN = "onnxc."


@dataclass(frozen=True)
class OpDef:
    """One operator over a range of opset versions of its domain.

    Attributes:
        unchecked: whether a node may have attributes that nobody defined, which mean nothing.
    """

    name: str
    domain: str
    first: int
    last: int | None
    define: Definition
    gradient: Gradient | None = None
    unchecked: bool = False

    def covers(self, opset: int) -> bool:
        """Whether it is the meaning at this opset version."""
        return self.first <= opset and (self.last is None or opset <= self.last)

    def meets(self, other: OpDef) -> bool:
        """Whether there is an opset that both cover."""
        return self.covers(max(self.first, other.first)) and other.covers(max(self.first, other.first))

    @property
    def is_own(self) -> bool:
        """Whether onnxc defines it, and no one else."""
        return str(getattr(self.define, "__module__", "")).startswith(_OWN)


_TABLE: dict[tuple[str, str], list[OpDef]] = {}


def op(
    name: str, first: int, last: int | None = None, domain: str = "", *, gradient: Gradient | None = None,
    unchecked: bool = False,
) -> Callable[[F], F]:  # fmt: skip
    """Registers the decorated function as the meaning of an op from opset `first` to `last` (None: to the newest).

    Its derivative is that of what it builds, or what `gradient` builds. With `unchecked`, attributes that it does not
    know are passed over: onnxruntime has a few such operators, and there are models that count on it.
    """

    def add(define: F) -> F:
        made = OpDef(name, domain, first, last, define, gradient, unchecked)
        if not made.is_own:
            _replace(made)
        _TABLE.setdefault((domain, name), []).append(made)
        return define

    return add


def _replace(made: OpDef) -> None:
    """Takes an older definition by the same function (of a notebook's cell that runs again) out of the table.

    Raises InputError where another function, or onnxc, defines the op.
    """
    rows = [d for key, found in table().items() if key == (made.domain, made.name) for d in found]
    place = _place(made)
    for row in [d for d in rows if d.meets(made)]:
        if row.is_own or _place(row) != place:
            where = "onnxc" if row.is_own else _place(row)
            raise InputError(f"the operator {made.name} of the domain {made.domain!r} is defined already, by {where}")
        _TABLE[made.domain, made.name].remove(row)


def _place(definition: OpDef) -> str:
    """Where an op is defined: module and name of its function."""
    define = definition.define
    return f"{getattr(define, '__module__', '')}.{getattr(define, '__qualname__', repr(define))}"


def users_names() -> set[str]:
    """The names of operators that others than onnxc have defined."""
    return {d.name for rows in table().values() for d in rows if not d.is_own} if _loaded() else set()


def _loaded() -> bool:
    return table.cache_info().currsize > 0


@cache
def table() -> Mapping[tuple[str, str], Sequence[OpDef]]:
    """Every definition, by domain and name. Importing the modules of `onnxc.ops` fills it."""
    import_all(onnxc.ops)
    return _TABLE


def find(domain: str, name: str, opset: int) -> OpDef | None:
    """The definition of an op at an opset version, or None."""
    domain = "" if domain == "ai.onnx" else domain
    return next((d for d in table().get((domain, name), ()) if d.covers(opset)), None)


@cache
def _parameters(define: Definition) -> tuple[Sequence[str], bool, Mapping[str, inspect.Parameter]]:
    parameters = list(inspect.signature(define).parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return [p.name for p in positional], variadic, {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def apply(
    definition: OpDef, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any], opset: int, n_outputs: int
) -> list[Value | None]:
    """Builds one ONNX node in `b` and returns its outputs. Raises ModelError for wrong inputs or attributes."""
    args = _arguments(definition, inputs)
    given = checked_attributes(definition, attrs, opset)
    _, _, keywords = _parameters(definition.define)
    known: dict[str, Any] = {k: _as_stored(p.default) for k, p in keywords.items() if isinstance(p.default, float)}
    known |= {"opset": opset, "n_outputs": n_outputs}
    filled = {k: v for k, v in known.items() if k in keywords and k not in given}
    result = definition.define(b, *args, **given, **filled)
    outputs: list[Value | None] = [result] if isinstance(result, Value) else list(result)
    if definition.gradient is None or not b.differentiable:
        return outputs
    rule = (definition.domain, definition.name, definition.first, tuple(sorted(given.items())))
    return with_gradient(b, rule, list(inputs), outputs)


def _arguments(definition: OpDef, inputs: Sequence[Value | None]) -> list[Value | None]:
    """The inputs of a node as its definition takes them: None for optional ones that are missing."""
    names, variadic, _ = _parameters(definition.define)
    count, args = len(names), list(inputs)
    while args and args[-1] is None and not variadic:
        args.pop()
    if len(args) > count and not variadic:
        raise ModelError(f"{definition.name} takes at most {count} inputs, got {len(args)}")
    args += [None] * (count - len(args))
    lacking = [place for place in _needed(definition.define) if args[place[0]] is None]
    if lacking:
        raise ModelError(f"{definition.name} lacks its input {lacking[0][0]}, {lacking[0][1]!r}")
    gap = next((k for k in range(count, len(args)) if args[k] is None), None)
    if gap is not None and not _has_gaps(definition.define):
        raise ModelError(f"{definition.name} lacks its input {gap}")
    if definition.is_own:
        _check_scales(definition, names, args)
    return args


def _check_scales(definition: OpDef, names: Sequence[str], args: Sequence[Value | None]) -> None:
    """What onnxc's own definitions call a scale is a float. The onnx package knows no types of onnxruntime's operators,
    and a quotient of integers would round where none is meant to.
    """
    for k, (name, value) in enumerate(zip(names, args, strict=False)):
        if name.endswith("scale") and value is not None and not value.dtype.is_float:
            raise ModelError(f"input {k} of {definition.name}, {name!r}, cannot be {value.t}")


@cache
def _needed(define: Definition) -> Sequence[tuple[int, str]]:
    """The inputs that a definition cannot do without, by place and name: those that are a `Value`, and never None."""
    parameters = list(inspect.signature(define).parameters.values())[1:]
    given = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return [(i, p.name) for i, p in enumerate(given) if p.annotation in ("Value", Value)]


@cache
def _has_gaps(define: Definition) -> bool:
    """Whether an input of a variadic tail may be missing."""
    tail = [p for p in inspect.signature(define).parameters.values() if p.kind is p.VAR_POSITIONAL]
    return any(p.annotation not in ("Value", Value) for p in tail)


def checked_attributes(definition: OpDef, attrs: Mapping[str, Any], opset: int) -> dict[str, Any]:
    """The attributes of a node, checked against its definition's parameters. Raises ModelError and UnsupportedError."""
    _, _, keywords = _parameters(definition.define)
    given = {k: v for k, v in attrs.items() if k not in _HINTS and not (definition.unchecked and k not in keywords)}
    unknown = sorted(set(given) - set(keywords))
    if unknown:
        more = f" (and {len(unknown) - _SHOWN} more)" if len(unknown) > _SHOWN else ""
        names = ", ".join(unknown[:_SHOWN])
        raise UnsupportedError(f"{definition.name} has no attribute {names}{more} in opset {opset}")
    required = [k for k, p in keywords.items() if p.default is p.empty and k not in given and k not in _FILLED]
    if required:
        raise ModelError(f"{definition.name} lacks the attribute {', '.join(required)}")
    kinds = _kinds(definition.define)
    for k, v in given.items():
        if not _fits(v, kinds[k]):
            wanted = _wanted(kinds[k], keywords[k].annotation)
            other = _OTHERS.get(type(v).__name__, "of another kind")
            shown = shortened(repr(v)) if isinstance(v, (*_SCALARS, list)) else other
            raise ModelError(f"the attribute {k} of {definition.name} is {shown}, not {wanted}")
    return given


def _as_stored(default: float) -> float:
    """The default of an attribute, as precise as the attribute would be: a float32."""
    return struct.unpack("f", struct.pack("f", default))[0]  # type: ignore[no-any-return]


@cache
def _kinds(define: Definition) -> Mapping[str, Any]:
    """What the annotations of a definition's attributes mean; Any where there is none, or its names are not there."""
    names = getattr(inspect.unwrap(define), "__globals__", {})
    _, _, keywords = _parameters(define)
    return {k: _meaning(p.annotation, names) for k, p in keywords.items()}


def _meaning(annotation: Any, names: dict[str, Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), names)["it"]
    except Exception:  # of a user's function: whatever its text raises
        return Any


def _fits(value: Any, kind: Any) -> bool:
    """Whether an attribute is of the type that a parameter's annotation means: `float`, `list[int] | None`, `Flag`.

    An attribute of type INT is no FLOAT: it is refused elsewhere, too.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, k) for k in inner)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin in (list, tuple, Sequence):
        return isinstance(value, (tuple, list)) and all(_fits(v, inner[0]) for v in value)
    if kind in (int, float, str):
        return isinstance(value, kind)
    return kind is Any or not isinstance(value, _SCALARS)


def _wanted(kind: Any, annotation: Any) -> str:
    """What an attribute has to be, in words."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    choices = [repr(c) for k in parts if get_origin(k) is Literal for c in get_args(k)]
    if choices:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    return f"of the type {annotation if isinstance(annotation, str) else getattr(annotation, '__name__', annotation)}"


_SCALARS = (int, float, str, tuple)
_OTHERS = {"Graph": "a graph", "ndarray": "a tensor"}  # attributes of other types, in an error
_SHOWN = 8  # unknown attributes, in an error
_HINTS = ("consumed_inputs",)  # of opsets 1 to 5: which buffers may be written over
_FILLED = ("opset", "n_outputs")
