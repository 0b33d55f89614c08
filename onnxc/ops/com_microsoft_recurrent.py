"""onnxruntime's LSTM with quantized weights."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.com_microsoft import MS
from onnxc.ops.quantization import centered, dynamic_quantize_linear, integer_product, quantized_from
from onnxc.ops.recurrent import Direction, Product, Recurrence, activations_of, lstm_steps, summed_biases
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


@op("DynamicQuantizeLSTM", 1, domain=MS)
def dynamic_quantize_lstm(
    b: Builder, x: Value, w: Value, r: Value, bias: Value | None, lens: Value | None, initial_h: Value | None,
    initial_c: Value | None, p: Value | None, w_scale: Value, w_zero: Value, r_scale: Value, r_zero: Value, *,
    activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (), activations: Sequence[str] = (),
    clip: float = 0.0, direction: Direction = "forward", hidden_size: int = 0, input_forget: Flag = 0,
) -> list[Value]:  # fmt: skip
    """LSTM whose weights [directions, input, 4 * hidden] are integers; x and the state are quantized by their ranges.

    Scales and zero points are [directions] or [directions, 4 * hidden].
    """
    if r.rank != 3 or not isinstance(r.shape[1], int):
        raise ModelError(f"DynamicQuantizeLSTM needs recurrent weights [directions, hidden, 4 * hidden], not {r.t}")
    if hidden_size not in (0, r.shape[1]):
        raise ShapeError(f"DynamicQuantizeLSTM has the hidden_size {hidden_size} and recurrent weights {r.t}")
    if lens is not None:  # steps behind the longest sequence do not widen the range of x
        longest = b.reduce("max", b.cast(lens, dtypes.int64), [0])
        x = b.where(b.lt(b.reshape(b.iota(x.shape[0]), (x.shape[0], 1, 1)), longest), x, 0.0)
    rec = Recurrence(b, x, r.shape[1], lens, direction, 0)
    functions = activations_of(
        activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh", "Tanh"), rec.directions
    )

    def recurrent(ds: Sequence[int]) -> Product:
        weights = [rec.part(v, ds[0]) for v in (r, r_scale, r_zero)]
        return lambda inner, before: _product_of_rows(inner, before, *weights)

    xws = []
    for d in range(rec.directions):
        xw = _product(b, rec.ordered(d), *(rec.part(v, d) for v in (w, w_scale, w_zero)))
        total = summed_biases(rec, bias, d, 4)
        xws.append(xw if total is None else b.add(xw, total))
    alone = [[d] for d in range(rec.directions)]
    return lstm_steps(b, rec, xws, alone, recurrent, functions, initial_h, initial_c, p, bool(input_forget), clip)


def _product(b: Builder, x: Value, w: Value, w_scale: Value, w_zero: Value) -> Value:
    """x [..., k] quantized as a whole, times w [k, n] of integers."""
    whole, scale, zero = dynamic_quantize_linear(b, x)
    total = b.cast(integer_product(b, whole, w, zero, w_zero), dtypes.float32)
    return b.mul(total, b.mul(scale, w_scale))


def _product_of_rows(b: Builder, x: Value, w: Value, w_scale: Value, w_zero: Value) -> Value:
    """x [n, k] quantized row by row, times w [k, m] of integers.

    onnxruntime quantizes as many rows of the state together as one of its threads computes. Rows of their own are
    what it does with a thread for each, and make a sequence's result independent of the others in its batch.
    """
    low, high = (b.reduce(f, x, [1], True) for f in ("min", "max"))
    whole, scale, zero = quantized_from(b, x, b.min(low, 0.0), b.max(high, 0.0))
    total = b.cast(
        b.matmul(b.sub(b.cast(whole, dtypes.int32), b.cast(zero, dtypes.int32)), centered(b, w, w_zero)), dtypes.float32
    )
    return b.mul(total, b.mul(scale, w_scale))
