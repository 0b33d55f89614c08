"""The kernel templates of contractions, each with an open epilogue."""

from __future__ import annotations

from onnxc.codegen.triton.attention import emit_attention
from onnxc.codegen.triton.convolution import emit_convolution
from onnxc.codegen.triton.kernel import Kernel
from onnxc.codegen.triton.matmul import emit_matmul
from onnxc.codegen.triton.options import Options
from onnxc.errors import InternalError
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout


def emit_template(group: Group, layout: Layout, options: Options) -> Kernel:
    """The kernel of a template group."""
    assert group.node is not None
    emitters = {"matmul": emit_matmul, "conv": emit_convolution, "attention": emit_attention}
    if group.node.op not in emitters:
        raise InternalError(f"no GPU template for {group.node.op}")
    return emitters[group.node.op](group, layout, options)
