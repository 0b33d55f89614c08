"""Losses for models that have none: the graph as it is, and a loss behind one of its outputs."""

from __future__ import annotations

import os
from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxc.errors import InputError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import Model
from onnxc.ir.types import TensorType
from onnxc.passes.decompose import decompose
from onnxc.training.weights import whole_model

LOSSES = ("cross_entropy", "mse", "l1", "binary_cross_entropy")
_OPSET = 13  # the least in which all that is added is spelled like this


def with_loss(
    model: Model,
    kind: str = "cross_entropy",
    *,
    output: str | None = None,
    axis: int = 1,
    ignore_index: int | None = None,
    target: str = "target",
    name: str = "loss",
    base_dir: str | os.PathLike[str] | None = None,
) -> onnx.ModelProto:
    """A model with a further input, what its output should have been, and a further output, the mean loss.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        kind: ``cross_entropy``, of scores (before any softmax) and class numbers, int64, in the shape of the scores
            without `axis`; ``mse`` and ``l1``, the mean square and absolute difference from a target of the output's
            shape; ``binary_cross_entropy``, of scores (before any sigmoid) and probabilities of that shape.
        output: which of the model's outputs. By default the only one.
        axis: of the classes; for a language model's scores -1.
        ignore_index: a class number that stands for "do not count".
        target, name: of the new input and the new output.

    Raises:
        InputError: an unknown kind, output or axis, a name that the model has already, an opset before 13.
    """
    if kind not in LOSSES:
        raise InputError(f"a loss is one of {', '.join(LOSSES)}, not {kind!r}")
    imported = onnx_file.load(model, base_dir=base_dir)
    names = imported.output_names
    chosen = names[0] if output is None and len(names) == 1 else output
    if chosen not in names:
        raise InputError(f"output: which of {names}?" if output is None else f"no output {output!r}; there are {names}")
    if imported.metadata["opsets"].get("", 1) < _OPSET:
        raise InputError(f"the model has opset {imported.metadata['opsets'].get('', 1)}; losses need {_OPSET} at least")
    scores = decompose(imported).outputs[names.index(chosen)].t
    proto = whole_model(model, base_dir)
    graph = proto.graph
    taken = {n for node in graph.node for n in (*node.input, *node.output)}
    taken |= {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
    if target == name or target in taken or name in taken:
        raise InputError(f"the model has {target!r} or {name!r} already: choose other names for target and name")
    if not scores.dtype.is_float:
        raise InputError(f"{chosen!r} is {scores}; only floats can be trained")
    nodes, kind_of_target, shape = _nodes(kind, chosen, scores, axis, ignore_index, target, name)
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(target, kind_of_target, shape))
    graph.output.append(helper.make_tensor_value_info(name, scores.dtype.onnx, []))
    return proto


def _nodes(
    kind: str, scores: str, t: TensorType, axis: int, ignore_index: int | None, target: str, name: str
) -> tuple[list[onnx.NodeProto], int, list[None]]:
    """What computes the loss, and the target's element type and shape."""

    def part(k: int) -> str:
        return f"{name}/{k}"

    if kind == "cross_entropy":
        if not -t.rank <= axis < t.rank or t.rank < 2:
            raise InputError(f"axis {axis} of {scores!r}, which is {t}")
        axis %= t.rank
        perm = [0, axis, *(k for k in range(1, t.rank) if k != axis)] if axis else [1, 0, *range(2, t.rank)]
        ignored: dict[str, Any] = {} if ignore_index is None else {"ignore_index": ignore_index}
        return (
            [
                helper.make_node("Transpose", [scores], [part(0)], perm=perm),
                helper.make_node("SoftmaxCrossEntropyLoss", [part(0), target], [name], reduction="mean", **ignored),
            ],
            TensorProto.INT64,
            [None] * (t.rank - 1),
        )
    if kind == "binary_cross_entropy":  # softplus(s) - s t
        middle = [
            helper.make_node("Softplus", [scores], [part(0)]),
            helper.make_node("Mul", [scores, target], [part(1)]),
            helper.make_node("Sub", [part(0), part(1)], [part(2)]),
        ]
    else:
        middle = [
            helper.make_node("Sub", [scores, target], [part(0)]),
            helper.make_node("Abs", [part(0)], [part(2)])
            if kind == "l1"
            else helper.make_node("Mul", [part(0)] * 2, [part(2)]),
        ]
    mean = helper.make_node("ReduceMean", [part(2)], [name], keepdims=0)
    return [*middle, mean], t.dtype.onnx, [None] * t.rank
