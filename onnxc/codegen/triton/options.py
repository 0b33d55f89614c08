"""What may be chosen of GPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.errors import InputError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Node


@dataclass(frozen=True)
class Options:
    """Choices that change generated kernels.

    Attributes:
        precision: how float32 matrices are multiplied: ``float32`` exactly, or ``tf32`` or ``tf32x3`` on matrix units.
        beside: whether a kernel runs beside others, and nothing waits for it: it need not fill the GPU by itself.
        libraries: whether a product may be a library's, where that was measured to be fastest.
    """

    precision: str = "float32"
    beside: bool = False
    libraries: bool = True

    @property
    def dot(self) -> str:
        """Triton's name of the precision."""
        return {"float32": "ieee"}.get(self.precision, self.precision)

    def of_dot(self, dtype: DType) -> str:
        """Further arguments of `tl.dot` for matrices of a dtype, with a comma before each.

        Triton makes `dot(a, b, 0) + x` into `dot(a, b, x)`, whose sum begins with x: -10000 of a mask would leave three
        digits of each product. It does not where a dot says how many terms may be added imprecisely, which means
        nothing for any dtype but 8-bit floats.
        """
        precision = f', input_precision="{self.dot}"' if dtype.name == "float32" else ""
        return f"{precision}, max_num_imprecise_acc={1 << 20}"


PRECISIONS = ("float32", "tf32", "tf32x3")
ATTENTION = ("attention", "attention_norm", "attention_gradient")
FLOATS = ("float32", "float16", "bfloat16")
MOST_DEPTH = 256  # of a head of attention: more does not fit in registers
MOST_SUMMED = 4  # input channels of a group, up to which a convolution is no product of matrices
MOST_MULTIPLIED = 16  # output channels of a group from which on it is better as one, too


def check_precision(name: str) -> None:
    """InputError where float32 matrices cannot be multiplied in a way of this name."""
    if name not in PRECISIONS:
        raise InputError(f"precision is one of {', '.join(PRECISIONS)}, not {name!r}")


def fits_head(depth: Dim) -> bool:
    """Whether heads of this depth are within what the attention kernel takes."""
    return isinstance(depth, int) and depth <= MOST_DEPTH


def is_template(node: Node) -> bool:
    """True for nodes that a Triton template computes; others of their kind become plain loops."""
    if node.op in ("matmul", "matmul_quantized"):
        return _multiplied(node.output.dtype)
    if node.op == "conv":
        w = node.operands[1]
        return _multiplied(node.output.dtype) and node.output.rank in (3, 4, 5) and w.t.is_static
    return node.op in ATTENTION and _multiplied(node.operands[0].dtype)


def is_depthwise(node: Node) -> bool:
    """Whether each output channel of a convolution reads one input channel or very few, and few outputs the same."""
    outputs, channels = node.operands[1].shape[:2]
    groups = int(node.attrs["groups"])
    narrow = isinstance(channels, int) and channels <= MOST_SUMMED and (groups > 1 or channels == 1)
    return narrow and isinstance(outputs, int) and outputs // groups < MOST_MULTIPLIED


def _multiplied(dtype: DType) -> bool:
    return dtype.name in FLOATS
