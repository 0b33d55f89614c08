"""The kernel templates of contractions, each with an open epilogue."""

from __future__ import annotations

from onnxc.codegen.triton import attention_gradient
from onnxc.codegen.triton.attention import candidates, emit_attention
from onnxc.codegen.triton.convolution import convolution_candidates, emit_convolution
from onnxc.codegen.triton.matmul import emit_matmul, matmul_candidates
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.packed_matmul import emit_packed, packed_candidates
from onnxc.codegen.triton.tuning import Ways
from onnxc.errors import InternalError
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout


def template_ways(group: Group, layout: Layout, options: Options) -> Ways:
    """The ways to write the kernel of a template group."""
    assert group.node is not None
    match group.node.op:
        case "matmul":
            found = matmul_candidates(group, layout, options)
            return Ways(found, lambda choice: emit_matmul(group, layout, options, choice))
        case "matmul_quantized":
            packed = packed_candidates(group, layout, options)
            return Ways(packed, lambda choice: emit_packed(group, layout, options, choice))
        case "conv":
            ways = convolution_candidates(group, layout, options)
            return Ways(ways, lambda choice: emit_convolution(group, layout, options, choice))
        case "attention":
            tiles = candidates(group, layout)
            return Ways(tiles, lambda choice: emit_attention(group, layout, options, choice))
        case "attention_norm" | "attention_gradient":
            return Ways(
                attention_gradient.candidates(group),
                lambda choice: [attention_gradient.emit_gradient(group, layout, options, choice)],
            )
    raise InternalError(f"no GPU template for {group.node.op}")
