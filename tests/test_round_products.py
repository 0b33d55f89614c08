"""What is equal is equal: products are joined only with sums where nothing can tell (passes/round_products.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import onnxc
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.passes.round_products import round_products
from onnxc.primitives.builder import Builder
from tests.small_models import parse, reference

pytestmark = pytest.mark.every_target

X = "(float[n, 40] x, float[n, 40] z, float[1] c)"
# Expressions of which onnxruntime says 0 where z is x, however the products round.
ZEROS = {
    "two squares": "p = Mul(x, x) q = Mul(z, z) y = Sub(p, q)",
    "two products": "p = Mul(x, c) q = Mul(c, z) y = Sub(p, q)",
    "a sum with the opposite": "p = Mul(x, c) q = Mul(z, c) r = Neg(q) y = Add(p, r)",
    "moved": "p = Mul(x, c) q = Mul(z, c) s = Transpose(p) t = Transpose(q) r = Sub(s, t) y = Transpose(r)",
    "the greatest": "t = Mul(x, x) m = Max(t, c) n = Mul(z, z) o = Max(n, c) y = Sub(m, o)",
    "a product of three": "t = Mul(x, c) u = Mul(t, x) v = Mul(z, c) w = Mul(v, z) y = Sub(u, w)",
    "probabilities": "p = Softmax(x) q = Softmax(z) y = Sub(p, q)",
    "products of rows": """a = Constant<value_ints = [1]>() p = ReduceProd(x, a) q = ReduceProd(z, a) r = Sub(p, q)
        y = Mul(r, x)""",
    "powers": "p = Pow(x, c) q = Pow(z, c) y = Sub(p, q)",
}


def data(rows: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.random.default_rng(rows).uniform(0.5, 2, (rows, 40)).astype(np.float32)
    return x, x.copy(), np.array([2.081], np.float32)


@pytest.mark.parametrize("kind", ZEROS)
@pytest.mark.parametrize("fusion", [True, False])
def test_what_is_equal_leaves_nothing(kind: str, fusion: bool) -> None:
    """A product that was joined with the subtraction left its rounding error, and a root of that may be NaN."""
    model = parse(f"{X} => (float[n, 40] y) {{ {ZEROS[kind]} }}", 18)
    given = data()
    (wanted,) = reference(model, *given)
    assert not wanted.any()
    np.testing.assert_array_equal(onnxc.compile(model, fusion=fusion)(*given)["y"], wanted)


def test_fractions_are_not_negative() -> None:
    """`t - floor(t)` of a product that rounds to a whole number."""
    model = parse(f"{X} => (float[n, 40] y) {{ t = Mul(x, c) f = Floor(t) y = Sub(t, f) }}", 18)
    x = np.arange(200, dtype=np.float32).reshape(5, 40)
    c = np.array([1 / 3], np.float32)
    np.testing.assert_array_equal(onnxc.compile(model)(x, x, c)["y"], reference(model, x, x, c)[0])


@pytest.mark.parametrize("length", [40, 300_000])
def test_rows_less_their_greatest_product(length: int) -> None:
    """However long rows are, and whichever kernel finds the greatest."""
    text = f"(float[n, {length}] x, float[1] c) => (float[n, {length}] y) <int64[1] a = {{-1}}>"
    model = parse(f"{text} {{ t = Mul(x, c) m = ReduceMax(t, a) d = Sub(m, t) y = Sqrt(d) }}", 18)
    x = np.random.default_rng(0).standard_normal((2, length)).astype(np.float32)
    y = onnxc.compile(model)(x, np.array([2.081], np.float32))["y"]
    assert not np.isnan(y).any()
    np.testing.assert_array_equal(y.min(axis=1), np.zeros(2, np.float32))


@pytest.mark.parametrize("mask", ["", "sum", "mask"])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("known", [True, False])
def test_attention_of_large_scores(known: bool, rows: int, mask: str) -> None:
    """Of scores beyond 1e10 one takes all, and none is NaN: scores less the greatest are nowhere above 0."""
    q, v = f"float[2, 3, {rows}, 32]", "float[2, 3, 90, 32]"
    scale, given = ("<float c = {0.3}>", "") if known else ("", ", float c")
    steps = {"": "t = Mul(s, c)", "sum": "r = Mul(s, c) t = Add(r, m)", "mask": "r = Add(s, m) t = Mul(r, c)"}[mask]
    ends = "p = Softmax<axis=-1>(t) y = MatMul(p, v)"
    inputs = f"{q} q, float[2, 3, 32, 90] k, {v} v, float[{rows}, 90] m{given}"
    model = parse(f"({inputs}) => ({q} y) {scale} {{ s = MatMul(q, k) {steps} {ends} }}", 18)
    rng = np.random.default_rng(rows)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((2, 3, rows, 32), (2, 3, 32, 90), (2, 3, 90, 32))]
    arrays[0], arrays[1] = arrays[0] * np.float32(2e5), arrays[1] * np.float32(2e5)
    arrays.append(np.where(rng.random((rows, 90)) < 0.3, -1e9, 0).astype(np.float32))
    arrays += [] if known else [np.array(0.3, np.float32)]
    np.testing.assert_array_equal(onnxc.compile(model)(*arrays)["y"], reference(model, *arrays)[0])


def marked(make: Callable[..., Value]) -> list[bool]:
    """Which products of a graph of x, y, z (float32[4] each) and one output are marked, in order."""
    b = Builder()
    graph = b.graph([make(b, *(b.input(TensorType(dtypes.float32, (4,)), n) for n in "xyz"))])
    return [bool(n.attrs.get("rounded")) for n in round_products(graph).nodes if n.op == "mul"]


def test_which_products_are_rounded() -> None:
    """Joined are those that only an addition takes, and no other product with them."""
    assert marked(lambda b, x, y, z: b.add(b.mul(x, y), z)) == [False]
    assert marked(lambda b, x, y, z: b.sub(b.mul(x, y), z)) == [True]
    assert marked(lambda b, x, y, z: b.add(b.mul(x, y), b.mul(y, z))) == [True, True]
    assert marked(lambda b, x, y, z: b.mul(b.mul(x, y), z)) == [False, False]
    assert marked(lambda b, x, y, z: b.sub(b.mul(x, b.constant(np.float32(0.25))), z)) == [False]
    assert marked(lambda b, x, y, z: b.add(p := b.mul(x, y), b.exp(p))) == [True]
    assert marked(lambda b, x, y, z: b.add(b.exp(b.mul(x, y)), z)) == [False]
    assert marked(lambda b, x, y, z: b.sub(b.add(b.mul(x, y), z), z)) == [True]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float"])
def test_what_is_equal_leaves_nothing_of_quotients(dtype: str) -> None:
    """Those of halves are products with an inverse on GPUs, which were joined with a subtraction."""
    text = f"({dtype}[n, 40] x, {dtype}[n, 40] z, {dtype}[1] c) => (bool[n, 40] y)"
    model = parse(f"{text} {{ p = Div(x, c) q = Div(z, c) r = Sub(p, q) o = Sub(c, c) y = Equal(r, o) }}", 18)
    given = [x.astype(dtypes.BY_NAME[{"float": "float32"}.get(dtype, dtype)].numpy) for x in data()]
    assert np.asarray(onnxc.compile(model)(*given)["y"]).all()


def test_many_ways_to_an_operand() -> None:
    """Each value is looked at once: there were as many steps as ways through what is moved again and again."""
    b = Builder()
    v = b.mul(x := b.input(TensorType(dtypes.float32, (0,)), "x"), x)
    for _ in range(16):
        v = b.one("concat", *[v] * 16, axis=0)
    graph = b.graph([b.add(v, b.exp(v))])
    assert [n.op for n in round_products(graph).nodes if n.attrs.get("rounded")] == ["mul"]
