"""Weights on their way in and out of a training: arrays that fit, and the model with the new ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnxc.errors import InputError
from onnxc.frontends.onnx_file import Model, read_model
from onnxc.frontends.onnx_tensors import all_tensors, external_bytes, text

_INLINE = 1 << 30  # bytes of a model from which on its weights are written to a second file


def checked(
    values: Mapping[str, Any], wanted: Mapping[str, np.ndarray], *, complete: bool = False
) -> dict[str, np.ndarray]:
    """Copies of the arrays, in the dtypes of those that are wanted, contiguous.

    Raises:
        InputError: an array that is not wanted, or has another shape; with `complete`, one that is missing.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"arrays are given by name, and not as {type(values).__name__}")
    unknown, missing = values.keys() - wanted.keys(), wanted.keys() - values.keys()
    if unknown or (complete and missing):
        what = [f"not of this model: {sorted(unknown)[:5]}"] if unknown else []
        what += [f"missing: {sorted(missing)[:5]}"] if complete and missing else []
        raise InputError(f"arrays that do not fit: {'; '.join(what)}")
    found = {}
    for name, given in values.items():
        try:
            array, like = np.asarray(given), wanted[name]
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"{name!r} is no array: {error}", cause=error) from error
        if array.shape != like.shape or array.dtype.kind != like.dtype.kind:
            raise InputError(f"{name!r} is {like.dtype}{list(like.shape)}; {array.dtype}{list(array.shape)} was given")
        found[name] = np.array(array, like.dtype, order="C")
    return found


def trained_model(
    model: Model, base_dir: str | os.PathLike[str] | None, weights: Mapping[str, np.ndarray],
    path: str | os.PathLike[str] | None,
) -> onnx.ModelProto | None:  # fmt: skip
    """The model with these weights in the place of its initializers of these names."""
    proto = whole_model(model, base_dir)
    for node in [n for n in proto.graph.node if n.op_type == "Constant" and n.output[0] in weights]:
        proto.graph.initializer.append(numpy_helper.from_array(weights[node.output[0]], node.output[0]))
        proto.graph.node.remove(node)
    tensors = {t.name: t for t in proto.graph.initializer if t.name in weights}
    if not tensors:
        raise InputError(f"the model has none of the weights that were trained: {sorted(weights)[:5]}")
    for name, tensor in tensors.items():
        if tuple(tensor.dims) != weights[name].shape:
            raise InputError(f"{name!r} is {list(tensor.dims)} in the model; {list(weights[name].shape)} was trained")
        tensor.CopyFrom(numpy_helper.from_array(weights[name], name))
    if path is None:
        return proto
    try:
        onnx.save_model(
            proto, os.fspath(path), save_as_external_data=proto.ByteSize() > _INLINE,
            location=os.path.basename(os.fspath(path)) + ".data",
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"the model cannot be written to {os.fspath(path)!r}: {error}", cause=error) from error
    return None


def whole_model(model: Model, base_dir: str | os.PathLike[str] | None) -> onnx.ModelProto:
    """The model with all of its weights in memory. Raises ModelError where they, or the model, cannot be read."""
    proto, folder = read_model(model, base_dir)
    if proto is model:
        proto = onnx.ModelProto()
        proto.CopyFrom(model)
    for tensor in all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.raw_data = external_bytes(tensor, folder, f"tensor {text(tensor.name)!r}").tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return proto
