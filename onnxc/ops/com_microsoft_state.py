"""Operators of com.microsoft that became ONNX's own, with the attributes that they have there."""

from __future__ import annotations

from onnxc.errors import UnsupportedError
from onnxc.ir.graph import Value
from onnxc.ops import sampling, selection
from onnxc.ops.com_microsoft import MS
from onnxc.ops.conv import causal_conv_with_state
from onnxc.ops.indexing import trilu
from onnxc.ops.linear_attention import linear_attention
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


def _only(what: str, **given: tuple[int, int]) -> None:
    """Raises UnsupportedError for an attribute that has another value than the one that is supported."""
    for name, (value, wanted) in given.items():
        if value != wanted:
            raise UnsupportedError(f"{what} of com.microsoft with {name}={value} is not supported")


@op("CausalConvWithState", 1, domain=MS)
def causal_conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, past_state: Value | None = None, *,
    activation: str = "none", ndim: int = 1, dilation: int = 1, channels_last: Flag = 0, state_window: int = 0,
) -> list[Value]:  # fmt: skip
    _only("CausalConvWithState", ndim=(ndim, 1), dilation=(dilation, 1), channels_last=(channels_last, 0),
          state_window=(state_window, 0))  # fmt: skip
    return causal_conv_with_state(b, x, w, bias, past_state, activation=activation)


@op("LinearAttention", 1, domain=MS)
def linear(
    b: Builder, query: Value, key: Value, value: Value, past_state: Value | None = None, decay: Value | None = None,
    beta: Value | None = None, *, chunk_size: int = 64, kv_num_heads: int, q_num_heads: int, scale: float = 0.0,
    state_window: int = 0, update_rule: str = "gated_delta",
) -> list[Value]:  # fmt: skip
    _only("LinearAttention", state_window=(state_window, 0))
    return linear_attention(
        b, query, key, value, past_state, decay, beta, kv_num_heads=kv_num_heads, q_num_heads=q_num_heads, scale=scale,
        update_rule=update_rule,
    )  # fmt: skip


@op("Unique", 1, domain=MS)
def unique(b: Builder, x: Value) -> list[Value | None]:
    """Different elements in the order of their first places; which each element is, and how often."""
    y, _, inverse, counts = selection.unique(b, x, sorted=0)
    return [y, inverse, counts]


op("Trilu", 1, domain=MS)(trilu)
op("GridSample", 1, domain=MS)(sampling.grid_sample)
