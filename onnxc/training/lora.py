"""Training of a few numbers in the place of many: low-rank adapters beside weights that stay as they are.

Hu and others, LoRA: Low-Rank Adaptation of Large Language Models (2021): x W becomes x W + (alpha / rank) (x A) B.
Only A and B are trained; in the end their product is added to W, and the model is as large as it was.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from onnxc.errors import InputError
from onnxc.frontends.onnx_file import Model
from onnxc.training.weights import checked, trained_model, whole_model


@dataclass(frozen=True)
class Adapted:
    """A model with adapters.

    Attributes:
        model: computes what the one without adapters does, until they are trained.
        parameters: the names of A and B of each adapter: what is trained (`wrt`).
        adapters: the names of A and B, by the name of the weight beside which they stand.
        scale: what their product is multiplied by.
    """

    model: onnx.ModelProto
    parameters: tuple[str, ...]
    adapters: Mapping[str, tuple[str, str]]
    scale: float
    _original: onnx.ModelProto

    def merged(
        self, parameters: Mapping[str, Any], path: str | os.PathLike[str] | None = None, *, model: Model | None = None
    ) -> onnx.ModelProto | None:
        """The model without adapters, their products added to its weights.

        Args:
            parameters: arrays by name, as ``step.parameters`` has them.
            path: writes the model there, and returns None.
            model: another model with weights of the same names, into which they go: the one without a loss.

        Raises:
            InputError: arrays of an adapter are missing, or have another shape.
        """
        initial = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer}
        wanted = {name: initial[name] for name in self.parameters}
        given = checked({n: v for n, v in parameters.items() if n in wanted}, wanted, complete=True)
        weights = {}
        for name, (a, b) in self.adapters.items():
            product = given[a].astype(np.float64) @ given[b].astype(np.float64)
            weights[name] = (initial[name].astype(np.float64) + self.scale * product).astype(initial[name].dtype)
        return trained_model(self._original if model is None else model, None, weights, path)


def with_lora(
    model: Model,
    *,
    rank: int,
    targets: Sequence[str] | None = None,
    alpha: float | None = None,
    seed: int = 0,
    base_dir: str | os.PathLike[str] | None = None,
) -> Adapted:
    """A model with an adapter beside weights of its MatMul and Gemm nodes.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        rank: the columns of A and rows of B.
        targets: names of weights, or patterns as ``"*.q_proj.*"``. By default all that MatMul or Gemm multiplies by.
        alpha: the adapters' products are multiplied by alpha / rank. By default by 1.
        seed: of A at first, uniform numbers up to 1 / sqrt(rows of A); B is zero.

    Raises:
        InputError: a target that fits no weight, or one that other operators read too; a rank that is no rank.
    """
    if type(rank) is not int or rank < 1:
        raise InputError(f"rank is an integer from 1 on, and not {rank!r}")
    original = whole_model(model, base_dir)
    adapted = onnx.ModelProto()
    adapted.CopyFrom(original)
    chosen = _chosen(adapted.graph, targets)
    scale = 1.0 if alpha is None else alpha / rank
    rng = np.random.default_rng(seed)
    taken = {n for node in adapted.graph.node for n in (*node.input, *node.output)}
    adapters = {}
    for name, array in chosen.items():
        if rank > min(array.shape):
            raise InputError(f"rank {rank} is more than {name!r}, which is {list(array.shape)}, can have")
        prefix = name
        while any(n.startswith(f"{prefix}.lora_") for n in taken):
            prefix += "_"
        bound = 1 / np.sqrt(array.shape[0])
        a = rng.uniform(-bound, bound, (array.shape[0], rank)).astype(array.dtype)
        b = np.zeros((rank, array.shape[1]), array.dtype)
        adapters[name] = f"{prefix}.lora_A", f"{prefix}.lora_B"
        adapted.graph.initializer.extend(
            numpy_helper.from_array(v, n) for v, n in zip((a, b), adapters[name], strict=True)
        )
    nodes = [new for node in adapted.graph.node for new in _beside(node, chosen, adapters, scale)]
    del adapted.graph.node[:]
    adapted.graph.node.extend(nodes)
    return Adapted(adapted, tuple(n for pair in adapters.values() for n in pair), adapters, scale, original)


def _chosen(graph: onnx.GraphProto, targets: Sequence[str] | None) -> dict[str, np.ndarray]:
    """The weights that get an adapter."""
    readers = _readers(graph)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    weights = {t.name: t for t in graph.initializer if len(t.dims) == 2 and t.data_type in floats and t.name in readers}
    if targets is None:
        found = [n for n in weights if not any(readers[n])]
    else:
        found = _fitting(list(weights), targets)
    for name in found:
        reader = next(filter(None, readers[name]), None)
        if reader is not None:
            raise InputError(
                f"targets: {name!r} is read by {reader} too, not only as the second factor of MatMul or Gemm"
            )
    if not found:
        raise InputError("the model has no weight that MatMul or Gemm multiplies by")
    return {n: numpy_helper.to_array(weights[n]) for n in found}


def _readers(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """The types of the nodes that read each value, subgraphs included; "" for a product by it, of MatMul or Gemm."""
    readers: dict[str, list[str]] = {}
    for node in graph.node:
        for k, name in enumerate(node.input):
            readers.setdefault(name, []).append("" if k == 1 and _multiplies(node) else node.op_type)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                for name in {n for inside in inner.node for n in inside.input}:
                    readers.setdefault(name, []).append(node.op_type)
    return readers


def _multiplies(node: NodeProto) -> bool:
    """Whether the second input is a matrix that the first one is multiplied by."""
    return node.op_type in ("MatMul", "Gemm") and not node.domain


def _fitting(names: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The names that any of the patterns fits. Raises InputError for a pattern that fits none."""
    found = [n for n in names if any(fnmatch.fnmatchcase(n, t) for t in targets)]
    for target in targets:
        if not fnmatch.filter(found, target):
            raise InputError(f"targets: no matrix {target!r} among the weights; there are {names[:20]}")
    return found


def _beside(
    node: NodeProto, chosen: Mapping[str, np.ndarray], adapters: Mapping[str, tuple[str, str]], scale: float
) -> list[NodeProto]:
    """A node with the adapter of its weight; any other as it is."""
    if not _multiplies(node) or len(node.input) < 2 or node.input[1] not in adapters:
        return [node]
    weight, end = node.input[1], node.output[0]
    (a, b), dtype = adapters[weight], chosen[weight].dtype
    attrs = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    base, down, up, number, scaled = (f"{end}/lora/{k}" for k in range(5))
    factor = np.asarray(scale * attrs.get("alpha", 1.0), dtype)
    if attrs.get("transB"):  # x W' = x (A B)' = (x B') A'
        first = helper.make_node("Gemm", [node.input[0], b], [down], transA=attrs.get("transA", 0), transB=1)
        second = helper.make_node("Gemm", [down, a], [up], transB=1)
    elif attrs.get("transA"):
        first = helper.make_node("Gemm", [node.input[0], a], [down], transA=1)
        second = helper.make_node("MatMul", [down, b], [up])
    else:
        first = helper.make_node("MatMul", [node.input[0], a], [down])
        second = helper.make_node("MatMul", [down, b], [up])
    main = NodeProto()
    main.CopyFrom(node)
    main.output[0] = base
    return [
        main, first, second,
        helper.make_node("Constant", [], [number], value=numpy_helper.from_array(factor, number)),
        helper.make_node("Mul", [up, number], [scaled]),
        helper.make_node("Add", [base, scaled], [end]),
    ]  # fmt: skip
