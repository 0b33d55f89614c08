"""Arguments of ATen ops that PyTorch's ONNX exporter takes and leaves out: its model computes something else then.

Found by looking for parameters that the functions of onnxscript's ``torch_lib`` never read, and tried out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from onnxc.errors import UnsupportedError

Given = Mapping[str, Any]  # the arguments of a node, by name


def check_nothing_left_out(program: ExportedProgram) -> None:
    """UnsupportedError where the exporter's ONNX for a node of a program leaves out what the node says."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]  # those of branches too
    for node in (n for graph in graphs for n in graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if _is_unsaturated(node):
                raise UnsupportedError(f"PyTorch's exporter writes {node.target} so that it saturates")
            for number in _shortened(node):
                raise UnsupportedError(f"PyTorch's exporter writes the number {number!r} of {node.target} as a float32")
            omission = _OMISSIONS.get(str(node.target))
            if omission is not None:
                schema = node.target._schema.arguments
                given = {a.name: a.default_value for a in schema if a.has_default_value()}
                given |= dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
                name, is_left_out = omission
                if is_left_out(given):
                    raise UnsupportedError(f"PyTorch's exporter leaves out {name} of {node.target}")


class MeanOfNothingError(UnsupportedError):
    """A mean is of a dim that may be without elements, of which PyTorch's is NaN, and that of ONNX models is 0."""


def check_means(program: ExportedProgram) -> None:
    """MeanOfNothingError where a program has a mean, or a variance, along a dim whose size may be 0."""
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target).partition(".default")[0] in _MEANS:
            shape, axes = node.args[0].meta["val"].shape, node.args[1] if len(node.args) > 1 else None
            along = [axes] if isinstance(axes, int) else axes or range(len(shape))
            if any(_may_be_zero(shape[k]) for k in along):
                raise MeanOfNothingError(f"{node.target} along a dim that may be without elements")


_MEANS = (
    "aten.mean", "aten.mean.dim", "aten.var.correction", "aten.var_mean.correction", "aten.std.correction",
    "aten.std_mean.correction", "prims.var",
)  # fmt: skip


def _may_be_zero(size: int | torch.SymInt) -> bool:
    if isinstance(size, int):
        return size == 0
    return bool(size.node.shape_env.bound_sympy(size.node.expr).lower < 1)


def _shortened(node: fx.Node) -> Iterator[float]:
    """Numbers of Python beside float64 that float32, as which the exporter writes them, does not hold."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if any(isinstance(v, torch.Tensor) and v.dtype in (torch.float64, torch.complex128) for v in values):
        for x in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(x, float) and math.isfinite(x) and torch.tensor(x, dtype=torch.float32).item() != x:
                yield x


_SMALL = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def _is_unsaturated(node: fx.Node) -> bool:
    """Whether a node casts to a type that has infinities or NaN for what is too large."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    found, *given = [v.dtype if isinstance(v, torch.Tensor) else None for v in values]
    return found in _SMALL and any(d is not None and d is not found for d in given)


def _is_other_range(given: Given) -> bool:
    limits = torch.iinfo(given["dtype"])
    return (given["quant_min"], given["quant_max"]) != (limits.min, limits.max)


def _has_other_scales(given: Given) -> bool:
    """Whether positions are to be scaled otherwise than sizes are."""
    sizes = given["self"].meta["val"].shape[2:]
    scales = (given["scales_h"], given["scales_w"])
    return any(
        s is not None and s != int(s) and not (type(n) is type(m) is int and n * s == m)
        for n, m, s in zip(sizes, given["output_size"], scales, strict=True)
    )


def _is_other_mean(given: Given) -> bool:
    return bool(given["reduce"] == "mean")


_OMISSIONS: dict[str, tuple[str, Callable[[Given], bool]]] = {
    "aten.cross_entropy_loss.default": ("label_smoothing", lambda given: given["label_smoothing"] != 0),
    "aten.avg_pool2d.default": ("divisor_override", lambda given: given["divisor_override"] is not None),
    "aten.avg_pool3d.default": ("divisor_override", lambda given: given["divisor_override"] is not None),
    "aten._upsample_bilinear2d_aa.default": ("scales_h and scales_w", _has_other_scales),
    "aten._upsample_bicubic2d_aa.default": ("scales_h and scales_w", _has_other_scales),
    "aten.scatter_reduce.two": ("the mean", _is_other_mean),
    "aten.multilabel_margin_loss_forward.default": ("the end of a list of labels", lambda given: True),
    "aten.multilabel_margin_loss.default": ("the end of a list of labels", lambda given: True),
    "quantized_decomposed.quantize_per_tensor.default": ("quant_min and quant_max", _is_other_range),
}
