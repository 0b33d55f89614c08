"""Operators with kernels of their own, for `test_custom_kernels.py` (and for the process that interprets Triton)."""

from __future__ import annotations

from onnxc.ir import dtypes
from onnxc.ir.expr import prod
from onnxc.ir.graph import Value
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder
from onnxc.primitives.kernels import Kernel

SCALE = Kernel(
    "scale_rows",
    cpp="""
        static f32 once(f32 x, f32 w) { return x * w; }
        int scale_rows(const f32 *x, const f32 *w, f32 *y, i64 columns, double shift, i64 first, i64 last) {
          for (i64 row = first; row < last; row++) {
            if (w[row] > 1000) return 7;
            for (i64 c = 0; c < columns; c++)
              y[row * columns + c] = once(x[row * columns + c], w[row]) + std::sqrt((f32)shift);
          }
          return 0;
        }
    """,
    headers=("cmath",),
    triton="""
        import triton
        import triton.language as tl

        NO_SHIFT = tl.constexpr(0)

        @triton.jit
        def once(x, w):
            return x * w

        @triton.jit
        def scale_rows(x, w, y, columns, shift, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            weight = tl.load(w + row)
            for c in range(0, columns, BLOCK):
                lane = c + tl.arange(0, BLOCK)
                v = tl.load(x + row * columns + lane, mask=lane < columns, other=NO_SHIFT)
                tl.store(y + row * columns + lane, once(v, weight) + tl.sqrt(shift), mask=lane < columns)
    """,
    warps=1,
)


def scale_gradient(
    b: Builder, dys: list[Value], xs: list[Value], ys: list[Value], *, shift: float = 0.0
) -> tuple[Value, Value]:
    x, w = xs
    rows, columns = x.shape
    dx = SCALE.call(b, [dys[0], w], x.t, sizes=[columns], scalars=[0.0], items=rows, programs=rows,
                    constants={"BLOCK": 16})  # fmt: skip
    return dx, b.reduce("sum", b.mul(dys[0], x), [1], False)


@op("ScaleRows", 1, domain="com.example", gradient=scale_gradient)
def scale_rows(b: Builder, x: Value, w: Value, *, shift: float = 0.0) -> Value:
    """y = x * w for each row, plus the root of `shift`."""
    rows, columns = x.shape
    return SCALE.call(
        b, [x, w], x.t, sizes=[columns], scalars=[shift], items=rows, programs=rows, equal=[(w.shape[0], rows)],
        constants={"BLOCK": 16},
    )  # fmt: skip


EXTREMES = Kernel(
    "extremes",
    cpp="""
        template <class T> static void sort(T *p, i64 n) { std::sort(p, p + n); }
        void extremes(const f16 *x, const bf16 *z, f64 *low, u8 *high, i64 n, i64 first, i64 last, char *work) {
          f32 *const line = (f32 *)work;
          for (i64 row = first; row < last; row++) {
            std::vector<f32> own(n);
            for (i64 k = 0; k < n; k++) own[k] = line[k] = (f32)x[row * n + k] + z[row * n + k];
            sort(line, n), sort(own.data(), n);
            low[row] = own[0], high[row] = (u8)line[n - 1];
          }
        }
    """,
    headers=("algorithm", "vector"),
)


@op("Extremes", 1, domain="com.example")
def extremes(b: Builder, x: Value, z: Value) -> list[Value]:
    """Of x + z along the last axis: the least as a double, and the greatest as a byte; of any rank."""
    shape, n = x.shape[:-1], x.shape[-1]
    types = [x.t.with_shape(shape).with_dtype(dtypes.float64), x.t.with_shape(shape).with_dtype(dtypes.uint8)]
    return EXTREMES.call_many(b, [x, z], types, sizes=[n], items=prod(shape), workspace=4 * n)
