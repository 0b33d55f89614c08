"""Attributes as Python values, and the arrays that Constant nodes hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from google.protobuf import text_format
from onnx import AttributeProto

from onnxc.errors import ModelError
from onnxc.frontends.onnx_scope import Attribute, Scope
from onnxc.frontends.onnx_tensors import DataFolder, array_of, dense, text

_CONSTANT_FORMS: dict[str, Any] = {
    "value": None, "sparse_value": None, "value_float": np.float32, "value_floats": np.float32,
    "value_int": np.int64, "value_ints": np.int64, "value_string": object, "value_strings": object,
}  # fmt: skip

_PLAIN: dict[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda a: float(a.f),
    AttributeProto.INT: lambda a: int(a.i),
    AttributeProto.STRING: lambda a: text(a.s),
    AttributeProto.FLOATS: lambda a: tuple(float(x) for x in a.floats),
    AttributeProto.INTS: lambda a: tuple(int(x) for x in a.ints),
    AttributeProto.STRINGS: lambda a: tuple(text(s) for s in a.strings),
    AttributeProto.TYPE_PROTO: lambda a: text_format.MessageToString(a.tp, as_one_line=True),
}

# How the type of an attribute shows in files that are too old to state it.
_FIELD_KINDS = (
    ("f", AttributeProto.FLOAT),
    ("i", AttributeProto.INT),
    ("s", AttributeProto.STRING),
    ("t", AttributeProto.TENSOR),
    ("g", AttributeProto.GRAPH),
    ("sparse_tensor", AttributeProto.SPARSE_TENSOR),
    ("tp", AttributeProto.TYPE_PROTO),
)
_LIST_KINDS = (
    ("floats", AttributeProto.FLOATS),
    ("ints", AttributeProto.INTS),
    ("strings", AttributeProto.STRINGS),
)
_PLAIN_DTYPES: dict[type, Any] = {int: np.int64, float: np.float32, str: object}


def value_of(a: AttributeProto, name: str, folder: DataFolder | None) -> Any:
    """An attribute that is no subgraph, as a Python value: int, float, str, array, or a tuple of those."""
    kind, what = kind_of(a), f"attribute {name!r}"
    _check_field(a, kind, what)
    if kind == AttributeProto.TENSOR:
        return array_of(a.t, folder, what)
    if kind == AttributeProto.TENSORS:
        return tuple(array_of(t, folder, what) for t in a.tensors)
    if kind == AttributeProto.SPARSE_TENSOR:
        return dense(a.sparse_tensor, folder)
    if kind not in _PLAIN:
        raise ModelError(f"{what} has a type that no operator uses ({kind})")
    return _PLAIN[kind](a)


def _check_field(a: AttributeProto, kind: int, what: str) -> None:
    """ModelError where an attribute's value is not of the type that it says it is: what it says would read as 0."""
    has = [k for field, k in _FIELD_KINDS if a.HasField(field) and getattr(a, field)]
    has += [k for field, k in _LIST_KINDS if len(getattr(a, field))]
    others = [k for k in has if k != kind]
    if others:
        said, found = (AttributeProto.AttributeType.Name(k) for k in (kind, others[0]))
        raise ModelError(f"{what} is said to be of type {said}, but its value is one of {found}")


def constant_array(attrs: Mapping[str, Any], outputs: int, label: str) -> np.ndarray:
    """The value of a Constant node with these attributes and so many outputs."""
    values = {k: v for k, v in attrs.items() if k.startswith("value") or k == "sparse_value"}
    if len(values) != 1 or outputs != 1:
        raise ModelError("a Constant must have one output and one value", node=label)
    ((form, value),) = values.items()
    if form not in _CONSTANT_FORMS:
        raise ModelError(f"a Constant has no attribute {form}", node=label)
    array = value if _CONSTANT_FORMS[form] is None else _plain_array(value, _CONSTANT_FORMS[form], label)
    if not isinstance(array, np.ndarray):
        raise ModelError(f"attribute {form} of a Constant must be a tensor", node=label)
    return array


def _plain_array(value: Any, dtype: Any, label: str) -> np.ndarray:
    """Numbers or strings as an array of their own type, whatever the attribute's name says of it: onnxruntime goes by
    the values. `dtype` is that of no values.
    """
    values = value if isinstance(value, tuple) else (value,)
    own = next((d for kind, d in _PLAIN_DTYPES.items() if values and all(isinstance(v, kind) for v in values)), None)
    if values and own is None:
        raise ModelError("a Constant's value is neither numbers nor strings", node=label)
    array = np.empty(len(values) if isinstance(value, tuple) else (), own or dtype)
    array[...] = value
    return array


def kind_of(a: AttributeProto) -> int:
    """The attribute's type, guessed where the file does not state it."""
    if a.type:
        return int(a.type)
    single = next((kind for name, kind in _FIELD_KINDS if a.HasField(name)), None)
    listed = next((kind for name, kind in _LIST_KINDS if len(getattr(a, name))), AttributeProto.INTS)
    return int(listed if single is None else single)


def resolve(a: AttributeProto, scope: Scope) -> Attribute | None:
    """An attribute, or the one that it refers to in the call of a function; None where the call does not give it."""
    reference = text(a.ref_attr_name)
    if not reference:
        return a, scope
    if scope.attributes is None:
        raise ModelError(f"attribute {text(a.name)!r} refers to {reference!r} outside of a function")
    return scope.attributes.get(reference)
