"""The list of passes, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxc.ir.graph import Graph
from onnxc.passes.attention import fuse_attention
from onnxc.passes.decompose import decompose
from onnxc.passes.prepare import prepare
from onnxc.passes.quantized import integer_products
from onnxc.passes.regions import sink_constants
from onnxc.passes.simplify import eliminate_dead, fold_constants, share_common
from onnxc.passes.weight_only import keep_weights_packed


@dataclass(frozen=True)
class PassOptions:
    """What the passes may do.

    Attributes:
        fold_bytes: the most bytes that constant folding may add.
        attention: recognise attention.
        integer: compute products of quantized tensors in integers.
        weight_only: keep quantized weights packed where activations are floats.
    """

    fold_bytes: int = 1 << 28
    attention: bool = True
    integer: bool = True
    weight_only: bool = True


def passes(options: PassOptions) -> list[tuple[str, Callable[[Graph], Graph]]]:
    """Every pass with its name: from a graph as imported to one that the planner takes."""
    pipeline: list[tuple[str, Callable[[Graph], Graph]]] = [
        ("decompose", decompose),
        ("eliminate-dead", eliminate_dead),
        *([("integer-products", integer_products)] if options.integer else []),
        *([("keep-weights-packed", keep_weights_packed)] if options.weight_only else []),
        ("fold-constants", lambda g: fold_constants(g, options.fold_bytes)),
        ("share-common", share_common),
        ("sink-constants", sink_constants),
    ]
    if options.attention:
        pipeline.append(("fuse-attention", fuse_attention))
    return [*pipeline, ("prepare", prepare)]
