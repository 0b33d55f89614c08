"""Losses of which PyTorch's tracing makes something else than eager PyTorch computes."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import _reduction
from torch.nn.functional import multilabel_margin_loss as _theirs


def with_losses(module: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph, changed in place, with losses of ours for those calls."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is _theirs:
            node.target = multilabel_margin_loss
    module.recompile()
    return module


def multilabel_margin_loss(
    input: torch.Tensor, target: torch.Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """How far other classes [(batch,) n] come near to those of lists [(batch,) n], which end at their first -1.

    PyTorch's decomposition, which none can switch off, reads on behind the -1.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    line = torch.arange(input.shape[-1], device=input.device)
    valid = (target == -1).cumsum(-1) == 0
    labels = torch.where(valid, target, 0)
    own = input.gather(-1, labels)[..., :, None]
    listed = (valid[..., :, None] & (labels[..., :, None] == line)).any(-2)
    near = 1 - own + input[..., None, :]
    counts = valid[..., :, None] & ~listed[..., None, :] & (near > 0)
    loss = torch.where(counts, near, 0).sum((-2, -1)) / input.shape[-1]
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
