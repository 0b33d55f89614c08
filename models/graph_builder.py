"""A small helper for writing ONNX graphs by hand: names, weights and nodes, in the order of the computation.

    g = GraphBuilder("two_layers")
    x = g.input("x", np.float32, ["batch", 4])
    h = g.op("Relu", g.linear("hidden", x, 4, 8))
    g.output("y", g.linear("out", h, 8, 2), np.float32, ["batch", 2])
    model = g.build()

Weights come from one seeded generator, in the order in which they are asked for, so the same script always
writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike
from onnx import helper, numpy_helper

Dim = int | str
"""A size, or the name of one that is known only when the model runs."""

OPSET = 20
IR_VERSION = 10  # what opset 20 was released with; every current runtime reads it


class GraphBuilder:
    """Collects nodes and weights; every method that makes a value returns its name."""

    def __init__(self, name: str, *, seed: int = 0) -> None:
        self.name = name
        self.rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._scopes: list[str] = []
        self._taken: set[str] = set()

    # ------------------------------------------------------------------------------------------ names

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names made inside: ``with g.scope("layer3"): ...`` gives ``layer3.query.weight``."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def _unique(self, name: str) -> str:
        full = base = ".".join([*self._scopes, name])
        count = 1
        while full in self._taken:
            full = f"{base}_{count}"
            count += 1
        self._taken.add(full)
        return full

    # ------------------------------------------------------------------------------- inputs and outputs

    def input(self, name: str, dtype: DTypeLike, shape: Sequence[Dim]) -> str:
        """Declare an input of the model."""
        self._taken.add(name)
        self._inputs.append(helper.make_tensor_value_info(name, _element_type(dtype), list(shape)))
        return name

    def output(self, name: str, value: str, dtype: DTypeLike, shape: Sequence[Dim]) -> None:
        """Declare ``value`` an output of the model, under ``name``."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=self._unique(f"{name}.out")))
        self._outputs.append(helper.make_tensor_value_info(name, _element_type(dtype), list(shape)))

    # ---------------------------------------------------------------------------------------- weights

    def constant(self, name: str, value: ArrayLike, dtype: DTypeLike | None = None) -> str:
        """Store an array as an initializer."""
        full = self._unique(name)
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype), full))
        return full

    def ints(self, name: str, *values: int) -> str:
        """A rank-1 int64 constant: shapes, axes, indices."""
        return self.constant(name, values, np.int64)

    def normal(self, name: str, shape: Sequence[int], std: float) -> str:
        """A float32 weight drawn from N(0, std²)."""
        return self.constant(name, self.rng.standard_normal(tuple(shape), np.float32) * np.float32(std))

    def uniform(self, name: str, shape: Sequence[int], low: float, high: float) -> str:
        """A float32 weight drawn evenly from [low, high)."""
        return self.constant(name, self.rng.uniform(low, high, tuple(shape)), np.float32)

    # ------------------------------------------------------------------------------------------ nodes

    def op(self, op_type: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Append a node with one output. An empty string leaves an optional input out."""
        return self.ops(op_type, *inputs, count=1, name=name, **attributes)[0]

    def ops(self, op_type: str, *inputs: str, count: int, name: str | None = None, **attributes: Any) -> list[str]:
        """Append a node with ``count`` outputs."""
        full = self._unique(name or op_type.lower())
        outputs = [full] if count == 1 else [f"{full}.{i}" for i in range(count)]
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=full, **attributes))
        return outputs

    # --------------------------------------------------------------------------------- common layers

    def linear(self, name: str, x: str, fan_in: int, fan_out: int, *, std: float | None = None) -> str:
        """``x @ W + b`` over the last axis, for ``x`` of any rank."""
        with self.scope(name):
            weight = self.normal("weight", (fan_in, fan_out), fan_in**-0.5 if std is None else std)
            bias = self.normal("bias", (fan_out,), 0.02)
            return self.op("Add", self.op("MatMul", x, weight), bias)

    def layer_norm(self, name: str, x: str, width: int, *, epsilon: float = 1e-5) -> str:
        """LayerNormalization over the last axis, with scale near one and a small bias."""
        with self.scope(name):
            scale = self.uniform("weight", (width,), 0.8, 1.2)
            bias = self.normal("bias", (width,), 0.02)
            return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)

    def conv(self, name: str, x: str, c_in: int, c_out: int, kernel: int, *, stride: int = 1, groups: int = 1) -> str:
        """A square convolution without bias, padded so that stride 1 keeps the size."""
        fan_in = c_in // groups * kernel * kernel
        with self.scope(name):
            weight = self.normal("weight", (c_out, c_in // groups, kernel, kernel), (2 / fan_in) ** 0.5)
            return self.op(
                "Conv",
                x,
                weight,
                kernel_shape=[kernel] * 2,
                strides=[stride] * 2,
                pads=[kernel // 2] * 4,
                group=groups,
            )

    def batch_norm(self, name: str, x: str, channels: int) -> str:
        """BatchNormalization in inference form, its statistics those of a trained network."""
        with self.scope(name):
            return self.op(
                "BatchNormalization",
                x,
                self.uniform("scale", (channels,), 0.5, 1.0),
                self.normal("bias", (channels,), 0.1),
                self.normal("mean", (channels,), 0.1),
                self.uniform("variance", (channels,), 0.5, 1.5),
                epsilon=1e-5,
            )

    # ------------------------------------------------------------------------------------------ model

    def build(self) -> onnx.ModelProto:
        """The finished model, checked, with shapes inferred for every value."""
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._weights)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="onnxc.models",
        )
        onnx.checker.check_model(model)
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def _element_type(dtype: DTypeLike) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
