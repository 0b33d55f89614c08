"""The list of passes, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxc.ir.graph import Graph
from onnxc.passes.attention import FLOAT32, fuse_attention
from onnxc.passes.attention_scores import HALF
from onnxc.passes.byte_tables import tabulate_bytes
from onnxc.passes.decompose import decompose
from onnxc.passes.gated_products import divide_gated_products
from onnxc.passes.merge_products import merge_products
from onnxc.passes.normalise_indices import normalise_indices
from onnxc.passes.positions import expand_positions
from onnxc.passes.precision import convert_precision
from onnxc.passes.prepare import prepare
from onnxc.passes.quantized import integer_products
from onnxc.passes.random_state import lift_random_state
from onnxc.passes.regions import sink_constants
from onnxc.passes.round_products import round_products
from onnxc.passes.simplify import eliminate_dead, fold_constants, share_common
from onnxc.passes.sink_reshapes import sink_reshapes
from onnxc.passes.tiny_weights import lift_tiny_weights
from onnxc.passes.uniform import fold_uniform
from onnxc.passes.weight_gradients import find_weight_gradients
from onnxc.passes.weight_only import keep_weights_packed
from onnxc.passes.weight_products import weight_products
from onnxc.passes.widen_halves import widen_halves
from onnxc.primitives.assumptions import with_stated


@dataclass(frozen=True)
class PassOptions:
    """What the passes may do.

    Attributes:
        fold_bytes: the most bytes that constant folding may add.
        attention: recognise attention.
        integer: compute products of quantized tensors in integers.
        weight_only: keep quantized weights packed where activations are floats.
        packed_halves: as a GPU has it: in products of few rows, of halves too.
        half_attention: recognise attention of float16 and bfloat16 too.
        attention_depth: the depth of the deepest heads that attention is recognised with; None is no limit.
        dtype: convert a float32 model to "float16" or "bfloat16"; None leaves it as it is.
        keep_io: a converted model's inputs and outputs stay float32.
        merge: products of one value with several constants become one product.
        pairs: a product of a gate and what it opens becomes two, for kernels that make both (`gated_products.py`).
        weight_gradients: recognise gradients of convolutions by their weights.
        weight_products: gradients of convolutions by their weights become products of matrices.
        positions: where a vector is true is found by a routine.
        widen: smooth arithmetic of float16 and bfloat16 is done in float32, where `dtype` asks for no halves.
        rows: convolutions of few outputs read graph inputs as these lie.
        lift: rows and columns of weights that are denormal are scaled.
        table_cost: instructions for a vector that a table of 256 bytes takes: functions of one byte that take more are
            looked up. None: none is.
    """

    fold_bytes: int = 1 << 28
    attention: bool = True
    integer: bool = True
    weight_only: bool = True
    packed_halves: bool = False
    half_attention: bool = False
    attention_depth: int | None = None
    dtype: str | None = None
    keep_io: bool = True
    merge: bool = False
    pairs: bool = False
    weight_gradients: bool = True
    weight_products: bool = False
    positions: bool = True
    widen: bool = True
    rows: bool = True
    lift: bool = True
    table_cost: int | None = 24


def passes(options: PassOptions) -> list[tuple[str, Callable[[Graph], Graph]]]:
    """Every pass with its name: from a graph as imported to one that the planner takes."""
    gpu, table_cost = options.packed_halves, options.table_cost
    pipeline: list[tuple[str, Callable[[Graph], Graph]]] = [
        ("decompose", decompose),
        ("random-state", lift_random_state),
        ("eliminate-dead", lambda g: with_stated(eliminate_dead(g))),
        *([("widen-halves", widen_halves)] if options.widen and options.dtype is None else []),
        *([] if options.positions else [("expand-positions", expand_positions)]),
        *([("integer-products", integer_products)] if options.integer else []),
        *([("keep-weights-packed", lambda g: keep_weights_packed(g, gpu))] if options.weight_only else []),
        ("fold-constants", lambda g: fold_constants(g, options.fold_bytes)),
        ("fold-uniform", fold_uniform),
        ("share-common", share_common),
        *([("byte-tables", lambda g: tabulate_bytes(g, table_cost))] if table_cost is not None else []),
        *([("weight-gradients", find_weight_gradients)] if options.weight_gradients else []),
        *([("weight-products", weight_products)] if options.weight_products else []),
        ("sink-constants", sink_constants),
    ]
    if options.attention:
        of = FLOAT32 | HALF if options.half_attention else FLOAT32
        deepest = options.attention_depth
        pipeline.append(("fuse-attention", lambda g: fuse_attention(g, of, deepest)))
    if options.dtype is not None:
        dtype, keep_io, packed = options.dtype, options.keep_io, options.packed_halves
        pipeline.append(("convert-precision", lambda g: convert_precision(g, dtype, keep_io, packed)))
    if options.pairs:
        pipeline.append(("divide-gated-products", divide_gated_products))
    if options.merge:
        pipeline.append(("merge-products", merge_products))
    if options.lift:
        pipeline.append(("lift-weights", lift_tiny_weights))
    return [
        *pipeline,
        ("sink-reshapes", sink_reshapes),
        ("normalise-indices", normalise_indices),
        ("prepare", lambda g: prepare(g, rows=options.rows)),
        ("round-products", round_products),
    ]
