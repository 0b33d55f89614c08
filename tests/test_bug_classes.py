"""What random models have found wrong in other compilers, each as a small model, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import onnxc
from tests.small_models import parse, reference

pytestmark = pytest.mark.every_target

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(6)


def f32(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(dtype: type, *shape: int, low: int = -4, high: int = 5) -> Array:
    return RNG.integers(low, high, shape).astype(dtype)


def agrees(text: str | onnx.ModelProto, *inputs: Array, opset: int = 18, exact: bool = False) -> None:
    """The model's outputs are onnxruntime's, with fusion and without."""
    model = parse(text, opset) if isinstance(text, str) else text
    wanted = reference(model, *inputs)
    for fusion in (True, False):
        got = list(onnxc.compile(model, fusion=fusion)(*inputs).values())
        for name, a, b in zip([o.name for o in model.graph.output], got, wanted, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            if exact or a.dtype.kind != "f":
                np.testing.assert_array_equal(a, b, name)
            else:
                tolerance = {2: 5e-3, 4: 2e-5, 8: 1e-12}[a.itemsize]
                np.testing.assert_allclose(a, b, tolerance, tolerance * max(1, np.abs(b).max(initial=0)), err_msg=name)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_indices_of_two_types(kind: str) -> None:
    """One graph indexes with int32 and int64, and computes one from the other."""
    agrees(
        f"""(float[n, 7] x, {kind}[3] i, int64[n, 2] j) => (float[A, B] y, float[C, D] z, int64[E] k)
        {{ a = Gather<axis=1>(x, i) b = GatherElements<axis=1>(x, j) c = Cast<to=7>(i) k = Add(c, c)
           y = Neg(a) z = Abs(b) }}""",
        f32(5, 7), whole(np.dtype(kind).type, 3, low=-7, high=7), whole(np.int64, 5, 2, low=-7, high=7),
        exact=True,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (7,)], ids=str)
def test_rank_0_and_1(shape: tuple[int, ...]) -> None:
    dims = ",".join(map(str, shape))
    agrees(
        f"""(float[{dims}] x, float y) => (float s, float[A] r, float[B] c, float t)
        {{ s = ReduceSum<keepdims=0>(x) p = Constant<value_ints=[-1]>() r = Reshape(x, p) q = Mul(r, y)
           c = Concat<axis=0>(q, r) m = ReduceMax<keepdims=0>(c) t = Sub(m, s) }}""",
        f32(*shape), f32(),
    )  # fmt: skip


@pytest.mark.parametrize("n", [0, 3])
def test_zero_size_dims(n: int) -> None:
    """Sums of nothing, products of nothing, a concat with nothing, and what follows."""
    agrees(
        """(float[n, 4] x, float[2, 4] y, float[4, 5] w) => (float[A] s, float[B, C] c, float[D, E] p, float[F, G] q)
        { zero = Constant<value_ints=[0]>() s = ReduceSum<keepdims=0>(x, zero) c = Concat<axis=0>(x, y)
          p = MatMul(x, w) t = Transpose<perm=[1, 0]>(x) r = MatMul(t, x) q = Add(r, s) }""",
        f32(n, 4), f32(2, 4), f32(4, 5),
    )  # fmt: skip


@pytest.mark.parametrize("n", [0, 3])
def test_the_mean_of_nothing(n: int) -> None:
    """The standard leaves it open; as a bag of no embeddings is written, it has to be 0."""
    agrees(
        """(float[n, 4] x, int64[n, 4] i, float[0, 2] e) => (float[A] y, float z, int64[1, B] w, float[C] v)
        { zero = Constant<value_ints=[0]>() y = ReduceMean<keepdims=0>(x, zero) z = ReduceMean<keepdims=0>(x)
          w = ReduceMean(i, zero) v = ReduceMean<keepdims=0>(e, zero) }""",
        f32(n, 4), np.arange(4 * n).reshape(n, 4), f32(0, 2),
    )  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 5])
def test_nothing_is_read_of_what_is_empty(n: int) -> None:
    """The index of an empty gather is not there to be read."""
    agrees(
        """(float[n, 1, 1] x, int32[n, 1, 1] i) => (float[A] y, float[B, C, D] z)
        { g = GatherElements<axis=2>(x, i) m = Constant<value_ints=[-1]>() y = Reshape(g, m) z = Abs(x) }""",
        f32(n, 1, 1), np.zeros((n, 1, 1), np.int32), exact=True,
    )  # fmt: skip


def test_rows_are_picked_of_what_is_cut_to_nothing() -> None:
    """The loop over rows has one of no steps inside it."""
    agrees(
        """(float[3, 4, 2] x) => (float[A, B, C] y)
        { zero = Constant<value_ints=[0]>() two = Constant<value_ints=[2]>() i = Constant<value_ints=[0, 2, 1, 1]>()
          t = Slice(x, zero, zero, two) y = Gather(t, i) }""",
        f32(3, 4, 2),
    )


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_broadcast_with_arg_reduce(op: str, axis: int) -> None:
    agrees(
        f"""(float[5, 1, 7] x, float[1, 3, 1] y) => (int64[A, B, C] i, float[D, E, F] z)
        {{ s = Add(x, y) i = {op}<axis={axis}, keepdims=1>(s) z = GatherElements<axis={axis}>(s, i) }}""",
        f32(5, 1, 7), f32(1, 3, 1), exact=True,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_negative_pads(mode: str) -> None:
    agrees(
        f"""(float[7, 17] x) => (float[A, B] y, float[C, D] z)
        {{ a = Relu(x) p = Constant<value_ints=[-2, 3, 1, -4]>() y = Pad<mode="{mode}">(a, p)
           q = Constant<value_ints=[1, -1, -1, 1]>() z = Pad<mode="constant">(y, q) }}""",
        f32(7, 17), exact=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "last"),
    [("A, B", "s = Constant<value_ints=[2, 3]>() y = Squeeze(g, s)"), ("A, B", "y = Flatten(g)"),
     ("A, B, C, D", "y = Softmax<axis=1>(g)")],
)  # fmt: skip
def test_layout_rewrite_with_squeeze(rank: str, last: str) -> None:
    agrees(
        f"""(float[2, 3, 9, 7] x, float[8, 3, 3, 3] w, float[8, 8, 1, 1] v) => (float[{rank}] y)
        {{ a = Conv<pads=[1, 1, 1, 1]>(x, w) b = Relu(a) c = Conv(b, v) g = GlobalAveragePool(c) {last} }}""",
        f32(2, 3, 9, 7), f32(8, 3, 3, 3), f32(8, 8, 1, 1),
    )  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_layout_rewrite_with_argmin(axis: int, keepdims: int) -> None:
    rank = "A, B, C, D" if keepdims else "A, B, C"
    agrees(
        f"""(float[2, 3, 9, 7] x, float[8, 3, 3, 3] w, float[4, 8, 1, 1] v) => (int64[{rank}] y, float[E, F, G, H] z)
        {{ a = Conv<pads=[1, 1, 1, 1]>(x, w) b = Relu(a) c = Conv(b, v)
           y = ArgMin<axis={axis}, keepdims={keepdims}>(c) z = Transpose<perm=[0, 2, 3, 1]>(c) }}""",
        whole(np.float32, 2, 3, 9, 7), whole(np.float32, 8, 3, 3, 3), whole(np.float32, 4, 8, 1, 1),
    )  # fmt: skip


def test_aliasing_of_input_and_output() -> None:
    """Outputs that are inputs, twice the same, or views: each an array of its own, inputs as they were."""
    model = parse(
        """(float[n, 4] x) => (float[n, 4] a, float[n, 4] b, float[A, B] c, float[n, 4] d)
        { a = Identity(x) b = Identity(x) m = Constant<value_ints=[4, -1]>() c = Reshape(x, m) d = Neg(x) }"""
    )
    x = f32(3, 4)
    kept = x.copy()
    out = onnxc.compile(model)(x)
    for name in "abc":
        np.testing.assert_array_equal(out[name].ravel(), kept.ravel())
        assert not np.shares_memory(out[name], x)
    out["a"][:] = 0
    np.testing.assert_array_equal(out["b"], kept)
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("n", [1, 2, 17])
def test_concat_expand_and_where_in_one_fusion(n: int) -> None:
    agrees(
        """(float[n, 3] x, bool[n, 6] c, float[1, 1] y) => (float[A, B] z, float[C] s)
        { t = Tanh(x) a = Concat<axis=1>(t, x) k = Shape(a) e = Expand(y, k) w = Where(c, a, e) z = Mul(w, e)
          one = Constant<value_ints=[1]>() s = ReduceSum<keepdims=0>(w, one) }""",
        f32(n, 3), RNG.random((n, 6)) < 0.5, f32(1, 1),
    )  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0.5, 2), (-3, -1), (2, 1)], ids=str)
def test_relu_then_clip(low: float, high: float) -> None:
    """Clip after Relu is not Clip alone, where its range is below zero or its ends change places."""
    agrees(
        f"""(float[5, 17] x) => (float[A, B] y)
        {{ lo = Constant<value_float={float(low)}>() hi = Constant<value_float={float(high)}>()
           r = Relu(x) y = Clip(r, lo, hi) }}""",
        3 * f32(5, 17), exact=True,
    )  # fmt: skip


@pytest.mark.parametrize("c", [(7, 3), (7, 1), (1, 3)], ids=str)
def test_transposed_c_of_gemm(c: tuple[int, int]) -> None:
    agrees(
        f"""(float[5, 3] x, float[7, 5] w, float[{c[0]}, {c[1]}] c) => (float[A, B] y)
        {{ t = Transpose<perm=[1, 0]>(c) y = Gemm<transA=1, transB=1, alpha=0.5, beta=2.0>(x, w, t) }}""",
        f32(5, 3), f32(7, 5), f32(*c),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [3, 6, 7])
def test_float_to_int_to_bool_casts(kind: int) -> None:
    """0.7 is true; 0.7 as an integer is not."""
    agrees(
        f"""(float[4, 9] x) => (bool[A, B] direct, bool[C, D] through, float[E, F] back)
        {{ direct = Cast<to=9>(x) i = Cast<to={kind}>(x) through = Cast<to=9>(i) back = Cast<to=1>(through) }}""",
        f32(4, 9), exact=True,
    )  # fmt: skip


def test_uint8_negation() -> None:
    """0 - x in uint8, modulo 256, and what it is as a float."""
    x = np.arange(256, dtype=np.uint8).reshape(16, 16)
    model = parse(
        """(uint8[16, 16] x) => (uint8[A, B] y, float[C, D] z)
        { zero = Constant<value=uint8 {0}>() y = Sub(zero, x) z = Cast<to=1>(y) }"""
    )
    for fusion in (True, False):
        y, z = onnxc.compile(model, fusion=fusion)(x).values()
        np.testing.assert_array_equal(y, np.uint8(0) - x)
        np.testing.assert_array_equal(z, (np.uint8(0) - x).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "double"])
@pytest.mark.parametrize("axes", ["0", "1", "0, 2", "0, 1, 2"])
def test_reductions_in_float16_and_float64(dtype: str, axes: str) -> None:
    ops = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp"]
    outputs = ", ".join(f"{dtype}[A{op}, B{op}, C{op}] y{op}" for op in ops)
    agrees(
        f"""({dtype}[5, 7, 3] x) => ({outputs})
        {{ a = Constant<value_ints=[{axes}]>() {" ".join(f"y{op} = Reduce{op}<keepdims=1>(x, a)" for op in ops)} }}""",
        (1 + 0.1 * RNG.standard_normal((5, 7, 3))).astype(np.float16 if dtype == "float16" else np.float64),
    )


@pytest.mark.parametrize("transform", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_modes_of_resize(transform: str, mode: str, factor: float) -> None:
    agrees(
        f"""(float[1, 2, 6, 8] x) => (float[A, B, C, D] y)
        {{ s = Constant<value_floats=[1.0, 1.0, {factor}, 2.0]>() r = Relu(x)
           y = Resize<mode="{mode}", coordinate_transformation_mode="{transform}">(r, , s) }}""",
        f32(1, 2, 6, 8),
    )  # fmt: skip


@pytest.mark.parametrize("last", ["2", "n"])
def test_infinities_at_the_end_of_a_line_that_is_resized(last: str) -> None:
    """Beyond it lies the last element alone: no weight of 0 makes NaN of it."""
    agrees(
        f"""(float[1, 1, {last}] x) => (float[A, B, C] y) {{
            s = Constant<value_floats=[1.0, 1.0, 2.0]>() y = Resize<mode="linear">(x, , s) }}""",
        np.array([[[1, -np.inf]]], np.float32),
    )


@pytest.mark.parametrize(
    "tail", ["y = Softmax<axis=1>(b)", "o = Constant<value_ints=[1]>() y = ReduceSum(b, o)", "y = MatMul(b, w)"]
)
def test_a_fused_away_tensor_that_is_an_output(tail: str) -> None:
    agrees(
        f"""(float[n, 17] x, float[17, 17] w) => (float[A, B] y, float[n, 17] a, float[n, 17] b)
        {{ m = MatMul(x, w) a = Relu(m) b = Add(a, x) {tail} }}""",
        f32(5, 17), f32(17, 17),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "ends", "steps"),
    [([0, 0], [9, 17], [2, 3]), ([-1, -1], [-99, -99], [-1, -2]), ([8, 1], [0, 16], [-3, 5]), ([5, 0], [2, 17], [1, 1]),
     ([-3, -17], [2**31 - 1, 2**31 - 1], [1, 4])],
    ids=str,
)  # fmt: skip
def test_slices_with_steps(starts: list[int], ends: list[int], steps: list[int]) -> None:
    """Forwards and backwards, to the end and beyond, empty; read through a second slice and an addition."""
    agrees(
        f"""(float[9, 17] x) => (float[A, B] y, float[C, D] z)
        {{ a = Abs(x) s = Constant<value_ints={starts}>() e = Constant<value_ints={ends}>()
           d = Constant<value_ints={steps}>() n = Constant<value_ints=[0, 1]>()
           y = Slice(a, s, e, n, d) zero = Constant<value_ints=[0]>()
           one = Constant<value_ints=[1]>() two = Constant<value_ints=[-2]>() back = Constant<value_ints=[-99]>()
           t = Slice(y, two, back, one, two) z = Neg(t) }}""",
        f32(9, 17), exact=True,
    )  # fmt: skip


@pytest.mark.parametrize("start", [-1, -4, 0, 2, 2**31 - 1])
def test_slices_backwards_of_short_axes(start: int) -> None:
    model = parse(
        f"""(float[n, 3] x) => (float[A, B] y)
        {{ s = Constant<value_ints=[{start}]>() e = Constant<value_ints=[{-(2**31)}]>() z = Constant<value_ints=[0]>()
           d = Constant<value_ints=[-1]>() y = Slice(x, s, e, z, d) }}"""
    )
    compiled = onnxc.compile(model)
    for n in (0, 1, 3, 7):
        x = f32(n, 3)
        np.testing.assert_array_equal(compiled(x)["y"], reference(model, x)[0])


def test_the_diagonal_of_a_dynamic_matrix() -> None:
    agrees(
        '(float[k, k] x) => (float[A] y, float t) { y = Einsum<equation="ii->i">(x) t = Einsum<equation="ii">(x) }',
        f32(7, 7),
    )


def test_a_gather_by_two_computed_indices_of_each_column() -> None:
    """GridSample with reflected borders: indices that all rows share lie in a table."""
    model = parse(
        """(float[1, 2, 4, 5] x, float[1, 2, 4, 2] g) => (float[A, B, C, D] y)
        { y = GridSample<mode="cubic", padding_mode="reflection", align_corners=1>(x, g) }""",
        20,
    )
    agrees(model, f32(1, 2, 4, 5), np.tanh(f32(1, 2, 4, 2)))


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("text", [
    "v = Conv<pads=[1, 1, 1, 1]>(x, w) z, y = {scan}(s, v)",
    "z, v = {scan}(s, x) y = Conv<pads=[1, 1, 1, 1]>(v, w)",
    "r = Conv<pads=[1, 1, 1, 1]>(x, w) z, v = {scan}(s, r) y = Conv<pads=[1, 1, 1, 1]>(v, w)",
    "r = Relu(x) z, v = {scan}(s, r) u = Conv<pads=[1, 1, 1, 1]>(r, w) y = Add(u, v)",
])  # fmt: skip
def test_convolutions_around_a_scan(text: str, reverse: int) -> None:
    """Convolutions store images channels-last, the body of a scan reads its slices row by row."""
    scan = f"""Scan<
        body = b (float a, float[4, 5, 7] i) => (float c, float[4, 5, 7] p) {{ c = Add(a, a) p = Mul(i, c) }},
        num_scan_inputs=1, scan_input_directions=[{reverse}]>"""
    agrees(
        f"""(float[2, 4, 5, 7] x, float[4, 4, 3, 3] w, float s) => (float[A, B, C, D] y)
        {{ {text.format(scan=scan)} }}""",
        f32(2, 4, 5, 7), f32(4, 4, 3, 3), f32(),
    )  # fmt: skip


def test_a_convolution_around_a_loop() -> None:
    agrees(
        """(float[2, 4, 5, 7] x, float[4, 4, 3, 3] w) => (float[A, B, C, D] y)
        { v = Conv<pads=[1, 1, 1, 1]>(x, w) n = Constant<value_int=3>()
          u = Loop<body = b (int64 k, bool c, float[2, 4, 5, 7] a) => (bool d, float[2, 4, 5, 7] o)
            { d = Identity(c) o = Add(a, v) }>(n, , v)
          y = Conv<pads=[1, 1, 1, 1]>(u, w) }""",
        f32(2, 4, 5, 7), f32(4, 4, 3, 3),
    )  # fmt: skip


def test_computed_halves_are_rounded_before_steps() -> None:
    """A quotient of float16 that float32 arithmetic makes a little less than 1 is 1, and equal halves are equal."""
    a = np.arange(1, 1025, dtype=np.float16)
    model = parse(
        """(float16[n] a, float16[n] b, float16[n] c) => (float16[n] floor, int32[n] cast, bool[n] less, int64[A] best)
        { q = Div(a, b) floor = Floor(q) p = Mul(q, c) cast = Cast<to=6>(p) less = Less(q, c)
          r = Add(q, c) best = ArgMax<axis=0>(r) }""",
        18,
    )
    small = np.where(a % 2 == 1, np.float16(1), np.float16(2e-4) + np.float16(1)).astype(np.float16)
    got = onnxc.compile(model)(a, a, small)
    np.testing.assert_array_equal(got["floor"], np.ones(1024, np.float16))
    for name, wanted in zip(("floor", "cast", "less", "best"), reference(model, a, a, small), strict=True):
        np.testing.assert_array_equal(got[name], wanted, name)


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_many_operands_of_max(dtype: str) -> None:
    """Chains of maxima of values that are not read from memory: g++ took exponential time for their NaN tests."""
    parts = [f"p{i}" for i in range(40)]
    made = [f"c{i} = Constant<value = {dtype} {{{i % 7 - 3}.0}}>()\np{i} = Mul(x, c{i})" for i in range(40)]
    made += [f"{y} = {op}({', '.join(parts)})" for y, op in (("y", "Max"), ("z", "Min"))]
    text = f"({dtype}[n] x) => ({dtype}[n] y, {dtype}[n] z) {{\n" + "\n".join(made) + "\n}"
    x = np.array([1, -2, np.nan, 0, np.inf, -np.inf, 3], np.float32 if dtype == "float" else np.float64)
    agrees(text, x, exact=True)


def test_a_product_in_loops_meets_a_products_kernel() -> None:
    """The one that has no template is not computed in the epilogue of the other."""
    agrees(
        """(float[b, s, 12] x, float[12, 7] w, int64[12, 7] v) => (float[b, s, 7] y)
        { xi = Cast<to=7>(x) a = MatMul(xi, v) p = Cast<to=1>(a) q = MatMul(x, w) y = Mul(p, q) }""",
        3 * f32(2, 5, 12), f32(12, 7), whole(np.int64, 12, 7),
    )  # fmt: skip


LARGE_PRODUCTS = "(float[n, 40] x, float[1] c) => (float[n, 40] y) <int64[1] a = {-1}>"


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_of_large_products(op: str) -> None:
    """The maximum was one of rounded products, and was subtracted from unrounded ones: their difference, 1e31 of 1e38,
    went into the exponential function.
    """
    x = f32(7, 40)
    x[:, 4] = 3e37
    agrees(f"{LARGE_PRODUCTS} {{ t = Mul(x, c) y = {op}(t) }}", x, f32(1) + 2.081)


def test_the_greatest_product_is_one_of_them() -> None:
    """The same bits where it is found and where it is subtracted: so that nothing is left."""
    model = parse(f"{LARGE_PRODUCTS} {{ t = Mul(x, c) m = ReduceMax(t, a) y = Sub(t, m) }}", 18)
    x = f32(7, 40)
    x[:, 4] = 10
    np.testing.assert_array_equal(onnxc.compile(model)(x, f32(1) + 2.081)["y"][:, 4], np.zeros(7, np.float32))


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_the_greatest_of_one_element_is_that_element(op: str, fusion: bool) -> None:
    """In any kernel: it was compared with a product that another one had rounded otherwise."""
    model = parse(f"(float[1] x, float[1] c) => (float[1] y) {{ t = Mul(x, c) m = {op}(t) y = Sub(t, m) }}", 18)
    rng = np.random.default_rng(0)
    for x, c in rng.normal(size=(20, 2, 1)).astype(np.float32):
        np.testing.assert_array_equal(onnxc.compile(model, fusion=fusion)(x, c)["y"], [0])
