"""Products of one matrix whose results meet in a function, as one GPU kernel: interpreted, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxc
from onnxc.planner.groups import FusionOptions
from tests.product_models import KINDS, model
from tests.targets import needs_triton, this_gpu
from tests.triton_simulator import Answer, Simulator

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}
PLAIN = {"m": 32, "n": 32, "k": 16, "warps": 4, "stages": 3}
RESIDENT = {**PLAIN, "resident": 1}
NO_PAIRS = {"pairs": False}
SIZES = [(1, 16, 8), (7, 17, 5), (33, 40, 72), (64, 32, 64), (65, 31, 127), (130, 64, 100)]
rng = np.random.default_rng(29)


def numbers(kind: str, *shape: int) -> Array:
    return np.asarray(rng.standard_normal(shape) * 0.5).astype(KINDS[kind])


def swiglu(a: str = "u", b: str = "t") -> list[onnx.NodeProto]:
    """y = silu(a) * b."""
    return [
        helper.make_node("Sigmoid", [a], ["s"]), helper.make_node("Mul", [a, "s"], ["g"]),
        helper.make_node("Mul", ["g", b], ["y"]),
    ]  # fmt: skip


def gated(kind: str, rows: Sequence[Any], k: int, n: int, way: str) -> tuple[onnx.ModelProto, list[Array]]:
    """silu(x w) * (x v), for one way in which w and v come, and their numbers."""
    w, v = numbers(kind, k, n), numbers(kind, k, n)
    inputs: dict[str, Sequence[Any]] = {"x": [*rows, k]}
    products = [helper.make_node("MatMul", ["x", a], [b]) for a, b in (("w", "u"), ("v", "t"))]
    if way == "transposed":
        products += [helper.make_node("Transpose", [name + "t"], [name], perm=[1, 0]) for name in "wv"]
        constants = {"wt": np.ascontiguousarray(w.T), "vt": np.ascontiguousarray(v.T)}
        return model([*products[2:], *products[:2], *swiglu()], kind, inputs, **constants), [w, v]
    return model([*products, *swiglu()], kind, inputs, w=w, v=v), [w, v]


def wanted(x: Array, w: Array, v: Array) -> Array:
    u, t = (x.astype(np.float64) @ m.astype(np.float64) for m in (w, v))
    found: Array = u / (1 + np.exp(-u)) * t
    return found


def near(found: Array, exact: Array, kind: str) -> None:
    assert found.shape == exact.shape
    assert np.abs(found.astype(np.float64) - exact).max() <= 6 * UNIT[kind] * (1 + np.abs(exact).max())


def run(simulator: Simulator, built: onnx.ModelProto, given: Sequence[Array], **options: Any) -> Answer:
    answer = simulator.run(built.SerializeToString(), list(given), **options)
    assert not answer.error[0]
    return answer


@pytest.mark.parametrize("way", ["constant", "transposed"])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_a_gate_and_what_it_opens(simulator: Simulator, m: int, k: int, n: int, way: str) -> None:
    for kind in ("float16", "bfloat16"):
        for rows in ([m], ["M"]):
            built, (w, v) = gated(kind, rows, k, n, way)
            x = numbers(kind, m, k)
            answer = run(simulator, built, [x])
            assert answer.kinds == ["matmul"]
            near(answer.outputs[0], wanted(x, w, v), kind)


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("way", ["constant", "transposed"])
def test_programs_that_take_several_tiles(simulator: Simulator, way: str, descriptors: bool) -> None:
    for m, k, n in ((97, 40, 136), (7, 64, 72)):
        built, (w, v) = gated("float16", [m], k, n, way)
        x = numbers("float16", m, k)
        answer = run(simulator, built, [x], blocks=RESIDENT, descriptors=descriptors)
        assert answer.kinds == ["matmul"] and "b_tile" in answer.source
        near(answer.outputs[0], wanted(x, w, v), "float16")


def test_every_tile(simulator: Simulator) -> None:
    """Each of the candidates has the same answer, up to rounding."""
    built, (w, v) = gated("float16", [70], 200, 150, "constant")
    x = numbers("float16", 70, 200)
    for candidate in range(8):
        answer = run(simulator, built, [x], candidate=candidate, descriptors=True)
        near(answer.outputs[0], wanted(x, w, v), "float16")


def test_positions_in_both_matrices(simulator: Simulator) -> None:
    """A matrix of the columns of both may need wider indices than either."""
    built, own = gated("float16", [20], 32, 48, "constant")
    x = numbers("float16", 20, 32)
    both = 2 * 32 * 48  # elements
    for limit, wide in ((both, True), (2 * both, False)):
        answer = run(simulator, built, [x], limits={"WIDE": limit})
        assert answer.kinds == ["matmul"] and ("tl.int64" in answer.source) is wide
        near(answer.outputs[0], wanted(x, *own), "float16")


def test_a_batch(simulator: Simulator) -> None:
    built, own = gated("float16", (2, 3, 20), 24, 40, "constant")
    x = numbers("float16", 2, 3, 20, 24)
    answer = run(simulator, built, [x])
    assert answer.kinds == ["matmul"]
    near(answer.outputs[0], wanted(x, *own), "float16")


def test_biases_and_a_residual(simulator: Simulator) -> None:
    """gelu(x w + b) * (x v + c) + r, as GeGLU has it; the other product first, too."""
    m, k, n = 45, 48, 56
    x, w, v = numbers("bfloat16", m, k), numbers("bfloat16", k, n), numbers("bfloat16", k, n)
    b, c, r = numbers("bfloat16", n), numbers("bfloat16", n), numbers("bfloat16", m, n)
    for order in (0, 1):
        products = [helper.make_node("MatMul", ["x", a], [to]) for a, to in (("w", "p"), ("v", "q"))]
        nodes = [
            *(reversed(products) if order else products), helper.make_node("Add", ["p", "b"], ["p1"]),
            helper.make_node("Add", ["q", "c"], ["q1"]), helper.make_node("Gelu", ["p1"], ["p2"]),
            helper.make_node("Mul", ["p2", "q1"], ["z"]), helper.make_node("Add", ["z", "r"], ["y"]),
        ]  # fmt: skip
        built = model(nodes, "bfloat16", {"x": [m, k], "r": [m, n]}, w=w, v=v, b=b, c=c)
        apart = run(simulator, built, [x, r], fusion=NO_PAIRS)
        answer = run(simulator, built, [x, r])
        assert answer.kinds == ["matmul"] and apart.kinds == ["matmul"] * 2
        near(answer.outputs[0], apart.outputs[0].astype(np.float64), "bfloat16")


@pytest.mark.parametrize("step", [1, 2])
def test_both_matrices_in_one(simulator: Simulator, step: int) -> None:
    """Halves of the columns, or every other one, of one product with a bias."""
    m, k, n = 33, 24, 40
    x, w, b = numbers("float16", m, k), numbers("float16", k, 2 * n), numbers("float16", 2 * n)
    starts, end = ((0, n), (n, 2 * n)) if step == 1 else ((0, 1), (2 * n, 2 * n))
    places = {"a0": starts[0], "a1": starts[1], "e0": end[0], "e1": end[1], "axis": 1, "step": step}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["z"]),
        helper.make_node("Slice", ["z", "a0", "e0", "axis", "step"], ["u"]),
        helper.make_node("Slice", ["z", "a1", "e1", "axis", "step"], ["t"]), *swiglu(),
    ]  # fmt: skip
    constants = {name: np.array([place]) for name, place in places.items()}
    built = model(nodes, "float16", {"x": [m, k]}, w=w, b=b, **constants)
    answer = run(simulator, built, [x])
    z = x.astype(np.float64) @ w.astype(np.float64) + b.astype(np.float64)
    u, t = (z[:, :n], z[:, n:]) if step == 1 else (z[:, ::2], z[:, 1::2])
    assert answer.kinds == ["matmul"]
    near(answer.outputs[0], u / (1 + np.exp(-u)) * t, "float16")


def test_what_is_no_number(simulator: Simulator) -> None:
    """An infinity or a NaN reaches its own row or column alone."""
    x, w, v = numbers("float16", 40, 32), numbers("float16", 32, 48), numbers("float16", 32, 48)
    x[3, 4], x[9, 0], v[2, 5] = np.nan, np.inf, np.inf
    products = [helper.make_node("MatMul", ["x", a], [b]) for a, b in (("w", "u"), ("v", "t"))]
    answer = run(simulator, model([*products, *swiglu()], "float16", {"x": [40, 32]}, w=w, v=v), [x])
    with np.errstate(all="ignore"):
        exact = wanted(x, w, v)
    np.testing.assert_array_equal(np.isnan(answer.outputs[0]), np.isnan(exact))
    assert answer.kinds == ["matmul"]


def kinds(
    simulator: Simulator, nodes: list[onnx.NodeProto], kind: str = "float16", outputs: str = "y", given: str = "x"
) -> list[str]:
    """The kernels of a model of x and w, v (24 x 24 each), some of them given and others constants."""
    constants = {name: numbers(kind, 24, 24) for name in "xwv" if name not in given}
    built = model(nodes, kind, {name: [24, 24] for name in given}, outputs, **constants)
    return run(simulator, built, [numbers(kind, 24, 24) for _ in given]).kinds


def test_products_that_stay_apart(simulator: Simulator) -> None:
    products = [helper.make_node("MatMul", ["x", a], [b]) for a, b in (("w", "u"), ("v", "t"))]
    both = [*products, *swiglu()]
    assert kinds(simulator, both) == ["matmul"]
    assert kinds(simulator, both, "float32") == ["matmul"] * 2  # nothing is gained on ordinary units
    assert kinds(simulator, both, given="xwv") == ["matmul"] * 2  # their columns are not put beside each other
    assert kinds(simulator, both, outputs="y u").count("matmul") == 2  # a result that is stored anyhow
    other = [helper.make_node("MatMul", ["x", "w"], ["u"]), helper.make_node("MatMul", ["v", "w"], ["t"])]
    assert kinds(simulator, [*other, *swiglu()], given="xv") == ["matmul"] * 2  # of different rows
    chained = [
        helper.make_node("MatMul", ["x", "w"], ["u"]), helper.make_node("Tanh", ["u"], ["h"]),
        helper.make_node("MatMul", ["x", "h"], ["t"]), *swiglu(),
    ]  # fmt: skip
    assert kinds(simulator, chained).count("matmul") == 2  # one needs the other
    narrow = [*products, helper.make_node("Softmax", ["u"], ["h"]), helper.make_node("Mul", ["h", "t"], ["y"])]
    assert kinds(simulator, narrow).count("matmul") == 2  # a sum over a row is between


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """All sizes, by kernels of both kinds, against those of single products."""
    this_gpu()
    for kind in ("float16", "bfloat16"):
        for m, k, n in [*SIZES, (512, 512, 1408), (300, 1000, 328), (2048, 256, 2048), (16, 2048, 640)]:
            for rows in ([m], ["M"]):
                x = numbers(kind, m, k)
                built, own = gated(kind, rows, k, n, "constant")
                found = onnxc.compile(built, target="cuda", cache=False)
                apart = onnxc.compile(built, target="cuda", cache=False, fusion=FusionOptions(pairs=False))
                assert [len(c.explain().kernels) for c in (found, apart)] == [1, 2]
                y = found(x=x)["y"]
                near(y, wanted(x, *own), kind)
                near(apart(x=x)["y"], y.astype(np.float64), kind)
                assert all(found(x=x)["y"].tobytes() == y.tobytes() for _ in range(3))
