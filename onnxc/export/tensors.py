"""Constants as TensorProtos, inside of the model or in a file beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxc.ir import dtypes

EXTERNAL_BYTES = 1024  # smaller constants stay in the model itself


@dataclass
class External:
    """The file that large constants go to, each aligned so that it can be mapped."""

    location: str
    file: Any

    def add(self, array: np.ndarray, name: str) -> TensorProto:
        """Writes an array; returns the tensor that says where it is."""
        self.file.write(b"\0" * (-self.file.tell() % 64))
        offset = self.file.tell()
        dtype = dtypes.from_numpy(array.dtype)
        self.file.write(
            np.ascontiguousarray(array).view(np.uint8).data if dtype.bits >= 8 else tensor_proto(array, name).raw_data
        )
        tensor = TensorProto(name=name, data_type=dtype.onnx, dims=array.shape, data_location=TensorProto.EXTERNAL)
        entries = {"location": self.location, "offset": offset, "length": self.file.tell() - offset}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def tensor_proto(array: np.ndarray, name: str) -> TensorProto:
    """An array, with its content inside."""
    if array.dtype == object:
        words = [s.encode("utf-8", "surrogateescape") for s in array.ravel()]
        return TensorProto(name=name, data_type=TensorProto.STRING, dims=array.shape, string_data=words)
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
