"""Kernels for `conv_weights`, the derivative of a convolution by its weights: a matmul over pixels, or depthwise."""

from __future__ import annotations

import math

from onnxc.codegen.cpp.conv_algorithms import WIDEST, groups_fit_lanes
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource
from onnxc.ir.expr import Dim, index, symbols
from onnxc.ir.graph import Node
from onnxc.loops.access import unflatten
from onnxc.planner.templates import Image, conv_image

PLAIN = {"strides": 1, "dilations": 1, "low": 0, "kernel": 1}


class ConvWeightsEmitter(TemplateEmitter):
    """dw[m, c, tap], by blocks of rows m and of columns (c, tap); the epilogue sees whole rows of dw."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        x, dy = (conv_image(self.layout, v, planar=True) for v in node.operands)
        assert x is not None and dy is not None, "the planner checked the operands"
        prefix, special, header = self._algorithm(node)
        m, j = index("m", node.output.shape[0]), index("j", math.prod(node.output.shape[1:]))
        (row,), (column,) = symbols(m), symbols(j)
        end = Epilogue(
            self.group, self.layout, self.lanes, (m, *unflatten(j, node.output.shape[1:])), {row: "m", column: "j"}, j,
            self.buffers,
        )  # fmt: skip
        epilogue = self.epilogue(end)
        shape = self._shape(node, x, dy)
        operands = [f"{self.pointer(v.value)} + {self.size(v.base)}" for v in (x, dy)]
        each = f"ox_up({prefix}_scratch({shape}), 64) * 64"
        room = f"(f32 *)(a->scratch + ctx->threads * ({each}))"
        mine = f"first, last, a->scratch + worker * ({each})"
        lying = [f"(const f32 *)a->p[{self.pointer(v.value)[1:]}] + {self.size(v.base)}" for v in (x, dy)]
        before = [
            "const auto sum = [](void *arg, i64 first, i64 last, int worker) {",
            "  const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx; @SIZES@",
            f"  {prefix}_partials{special}({shape}, {', '.join(lying)}, {room}, {mine});",
            "};",
            f"ox_for(ctx, {prefix}_partial_count({shape}), sum, &c);",
        ]
        body = [
            f"const auto z = {shape};",
            "const auto epi = [=](i64 m, i64 j, vf acc, auto lanes) OX_LAMBDA { (void)m; (void)j;",
            *(f"  {line}" for line in epilogue),
            "};",
            f"{prefix}_items{special}(z, {', '.join(operands)}, {room}, {mine}, epi);",
        ]
        scratch = f"ctx->threads * ({each}) + {prefix}_room({shape})"
        return self.source(body, f"{prefix}_count({shape})", header, scratch, before, "conv by weights")

    def _algorithm(self, node: Node) -> tuple[str, str, str]:
        """The prefix of its functions, their template arguments, and its header."""
        m, c = node.output.shape[:2]
        groups, inputs = node.attrs["groups"], node.operands[0].shape[1]
        assert isinstance(m, int) and isinstance(c, int), "the planner checked the shape"
        if not groups_fit_lanes(m, groups, c, self.lanes):
            return "grad", "", "conv_grad.h"
        width = int(node.attrs["kernel"][-1])
        permuted = not m == groups == inputs
        return "grad_dw", f"<{width if width <= WIDEST else 0}, {str(permuted).lower()}>", "conv_grad_dw.h"

    def _shape(self, node: Node, x: Image, dy: Image) -> str:
        """A GradShape. A line is an image of one row."""
        image, result = node.operands[0].shape, node.operands[1].shape
        line = node.output.rank == 3
        a = {key: ((plain,) if line else ()) + tuple(node.attrs[key]) for key, plain in PLAIN.items()}

        def spatial(sizes: tuple[Dim, ...], one: int) -> tuple[Dim, ...]:
            return ((one,) if line else ()) + tuple(sizes[2:])

        sizes, outs = spatial(image, 1), spatial(result, 1)
        steps, steps_y = spatial(x.strides, 0), spatial(dy.strides, 0)
        last = [a[key][k] for key in ("kernel", "strides", "dilations", "low") for k in (-2, -1)]
        fields = [image[0], *sizes[-2:], image[1], *outs[-2:], result[1], *last, node.attrs["groups"], x.strides[0],
                  *steps[-2:], x.strides[1]]  # fmt: skip
        kind, shape = "ConvShape", f"ConvShape{{{', '.join(self.size(f) for f in fields)}}}"
        if node.output.rank == 5:
            depth = [sizes[0], outs[0], *(a[key][0] for key in ("kernel", "strides", "dilations", "low")), steps[0]]
            kind, shape = "ConvVolume", f"ConvVolume{{{shape}, {', '.join(self.size(f) for f in depth)}}}"
        place = [dy.strides[0], steps_y[0] if len(steps_y) == 3 else 0, *steps_y[-2:], dy.strides[1]]
        return f"GradShape<{kind}>{{{shape}, {', '.join(self.size(f) for f in place)}}}"
