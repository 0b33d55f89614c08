"""Ops of lists of tensors, which optimizers and the clipping of gradients are made of: as ops of one tensor after the
other, which is how eager PyTorch computes them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Not those whose numbers are elements of a tensor, which eager PyTorch reads.
_ALIKE = (
    "abs", "acos", "add", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "cos", "cosh", "div", "erf",
    "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2", "max", "mm", "mul",
    "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh",
    "trunc",
)  # fmt: skip
_OTHERS: dict[str, Callable[..., Tensor]] = {
    "addcdiv": lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value),
    "addcmul": lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value),
    "copy": lambda x, source, non_blocking=False: aten.copy(x, source),
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "zero": torch.zeros_like,
}
_READS = ("addcdiv.Tensor", "addcmul.Tensor")


def _of_each(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """An op of lists, of which the k-th elements are given to one of tensors."""

    def found(*args: Any, **kwargs: Any) -> list[Tensor]:
        def element(x: Any, k: int) -> Any:
            return x[k] if isinstance(x, (list, tuple)) else x

        count = next(len(x) for x in args if isinstance(x, (list, tuple)))
        return [one(*(element(x, k) for x in args), **kwargs) for k in range(count)]

    return found


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, f"_foreach_{name}", None)
    names = [] if packet is None else packet.overloads()
    return [getattr(packet, o) for o in names if "out" not in o and f"{name}.{o}" not in _READS]


LISTS: dict[Any, Callable[..., Any]] = {
    op: _of_each(one)
    for name, one in ({name: getattr(torch, name) for name in _ALIKE} | _OTHERS).items()
    for op in _overloads(name)
}
