"""Types as ONNX writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import TypeProto, helper

from onnxc.ir.dtypes import BY_NAME
from onnxc.ir.types import EmptyType, MapType, OptionalType, SequenceType, TensorType, Type


def declared_proto(kind: Sequence[Any]) -> TypeProto:
    """What a model says of an input whose rank it leaves open (`onnxc.frontends.onnx_file`)."""
    word, inner = kind
    if word == "any":
        return helper.make_tensor_type_proto(BY_NAME[inner].onnx, None)
    make = helper.make_sequence_type_proto if word == "sequence" else helper.make_optional_type_proto
    return make(declared_proto(inner))


def type_proto(t: Type | None, dim_names: Mapping[str, str]) -> TypeProto | None:
    """The type; None where it, or what is inside of it, is not known."""
    if isinstance(t, TensorType):
        dims = [d if isinstance(d, int) else dim_names.get(repr(d), repr(d)) for d in t.shape]
        return helper.make_tensor_type_proto(t.dtype.onnx, dims)
    if isinstance(t, EmptyType):
        return helper.make_tensor_type_proto(t.dtype.onnx, None)
    if isinstance(t, MapType):
        return helper.make_map_type_proto(t.key.onnx, helper.make_tensor_type_proto(t.value.onnx, []))
    inner = None if t is None else type_proto(t.element, dim_names)
    if inner is None:
        return None
    make = helper.make_sequence_type_proto if isinstance(t, SequenceType) else helper.make_optional_type_proto
    assert isinstance(t, (SequenceType, OptionalType))
    return make(inner)
