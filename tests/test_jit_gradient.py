"""onnxc.grad and its relatives, against central differences in float64 and formulas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc import nn
from onnxc.errors import InputError, OnnxcError

pytestmark = pytest.mark.usefixtures("interpreted")

RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((3, 5)), RNG.standard_normal((5, 2))
V = np.array([0.5, -1.25, 2.0])


def differences(f, x, step=1e-6):
    """The gradient of a function of a float64 array by central differences."""
    found = np.empty_like(x)
    for k in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[k], down[k] = x[k] + step, x[k] - step
        found[k] = (float(f(up)) - float(f(down))) / (2 * step)
    return found


def looped(x):
    return onnxc.fori_loop(0, 4, lambda k, s: s * xp.cos(x) + xp.astype(k, xp.float64), x)


def scanned(x):
    last, each = onnxc.scan(lambda s, a: (s * 0.5 + a, xp.sin(s)), xp.sum(x), x)
    return last + xp.sum(each)


def attended(x):
    return nn.attention(x, x * 0.5, xp.flip(x, axis=0), causal=True)


FUNCTIONS = {
    "elementwise": (lambda x: xp.exp(-x * x) / (1 + xp.abs(x)), X),
    "product": (lambda x: xp.tanh(x @ W), X),
    "reductions": (lambda x: xp.std(x, axis=0) * xp.max(x) + xp.prod(x, axis=1)[0], X),
    "indexing": (lambda x: xp.concat([x[1:, ::-2], x[:2, 2:5]], axis=0) ** 3, X),
    "written": (lambda x: _written(x), X),
    "where": (lambda x: xp.where(x > 0, x**2, -x), X),
    "loop": (looped, V),
    "scan": (scanned, V),
    "attention": (attended, X),
    "branch not taken": (lambda x: onnxc.cond(xp.sum(x) < 0, lambda a: a**2, lambda a: a**2 * x, x), V),
    "cumulative": (lambda x: xp.cumulative_sum(x**2, axis=1), X),
    "sorted": (lambda x: xp.sort(x, axis=1) * W.T[0], X),
}


def _written(x):
    y = xp.zeros_like(x)
    y[1, :] = x[0, :] * 2
    y += x
    return y * y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    f, x = FUNCTIONS[name]

    def total(x):
        y = f(xp.asarray(x))
        return xp.sum(y * xp.reshape(xp.asarray(np.cos(np.arange(y.size))), y.shape))

    found = onnxc.grad(total)(x)
    np.testing.assert_allclose(found.numpy(), differences(total, x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["product", "loop", "scan", "reductions"])
def test_second_derivatives(name):
    """Of the sum of squares of the gradient."""
    f, x = FUNCTIONS[name]

    def first(x):
        g = onnxc.grad(lambda x: xp.sum(f(x) ** 2))(xp.asarray(x))
        return xp.sum(g * g)

    np.testing.assert_allclose(onnxc.grad(first)(x).numpy(), differences(first, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["elementwise", "product", "loop", "scan", "where", "attention"])
def test_forward_mode(name):
    f, x = FUNCTIONS[name]
    dx = np.sin(np.arange(x.size)).reshape(x.shape)
    y, dy = onnxc.jvp(f, (x,), (dx,))
    np.testing.assert_allclose(y.numpy(), f(xp.asarray(x)).numpy(), rtol=1e-12)
    h = 1e-6
    expected = (f(xp.asarray(x + h * dx)).numpy() - f(xp.asarray(x - h * dx)).numpy()) / (2 * h)
    np.testing.assert_allclose(dy.numpy(), expected, rtol=1e-5, atol=1e-8)


def _pulled_back(x, dy):
    return onnxc.vjp(xp.sin, x)[1](dy)[0]


def _pushed_forward(x, dx):
    return onnxc.jvp(xp.sin, (x,), (dx,))[1]


@pytest.mark.parametrize("f", [_pulled_back, _pushed_forward])
def test_dynamic_sizes_of_tangents_and_cotangents(f):
    """Each has a symbol of its own: a call tells whether they are equal."""
    compiled = onnxc.jit(f, dynamic=True)
    for n in (3, 5, 2):
        x, dx = np.random.default_rng(n).normal(size=(2, n))
        np.testing.assert_allclose(compiled(x, dx).numpy(), np.cos(x) * dx)
    assert len(compiled.explain_recompiles()) == 1
    for n, other in ((3, 4), (3, 1), (1, 3)):
        with pytest.raises(InputError, match=r"tangents is|tangents\[0\] is"):
            compiled(np.ones(n), np.ones(other))


def test_compiled():
    """Third derivatives, and what is around them, in one program."""
    third = onnxc.jit(onnxc.grad(onnxc.grad(onnxc.grad(lambda x: x**5 + xp.sin(x)))))
    assert float(third(np.float64(0.5))) == pytest.approx(60 * 0.25 - np.cos(0.5))

    @onnxc.jit
    def newton(x):
        f = lambda x: xp.sum((x - V) ** 4)  # noqa: E731
        g = onnxc.grad(f)
        rows = [onnxc.jvp(g, (x,), (row,))[1] for row in xp.unstack(xp.eye(3, dtype=xp.float64))]
        return x - xp.linalg.solve(xp.stack(rows) + 1e-9 * xp.eye(3, dtype=xp.float64), g(x)), onnxc.value_and_grad(f)(
            x
        )

    x = V + np.array([1.0, 2.0, -1.0])
    stepped, (value, g) = newton(x)
    np.testing.assert_allclose(stepped.numpy(), x - (x - V) / 3, rtol=1e-6)
    np.testing.assert_allclose(g.numpy(), 4 * (x - V) ** 3, rtol=1e-12)
    assert float(value) == pytest.approx(18)


def test_perturbations_stay_apart():
    inner = lambda x: onnxc.grad(lambda y: x * y)(1.0) * x  # noqa: E731  (x^2)
    assert float(onnxc.grad(inner)(3.0)) == 6.0
    assert float(onnxc.grad(lambda x: x * onnxc.grad(lambda y: x + y)(2.0))(5.0)) == 1.0


# ---------------------------------------------------------------- arguments and results


@dataclasses.dataclass
class Layer:
    w: object
    b: object
    size: int = dataclasses.field(metadata={"static": True})


def test_trees_argnums_aux():
    def f(n, layer, x, *, scale):
        y = x @ layer.w + layer.b
        return xp.sum(y**2) * scale, {"y": y, "n": n}

    layer = Layer(W, np.zeros(2), 2)
    (value, aux), (dlayer, dx) = onnxc.value_and_grad(f, argnums=(1, -1), has_aux=True)(7, layer, X, scale=0.5)
    assert aux["n"] == 7 and isinstance(dlayer, Layer) and dlayer.size == 2
    np.testing.assert_allclose(float(value), 0.5 * ((X @ W) ** 2).sum())
    np.testing.assert_allclose(dlayer.w.numpy(), X.T @ (X @ W))
    np.testing.assert_allclose(dlayer.b.numpy(), (X @ W).sum(0))
    np.testing.assert_allclose(dx.numpy(), X @ W @ W.T)
    grads, aux = onnxc.grad(f, 2, has_aux=True)(7, layer, X, scale=0.5)
    np.testing.assert_allclose(grads.numpy(), X @ W @ W.T)
    assert aux["y"].shape == (3, 2)


SLOPES = {  # functions that are composed, their first and second derivatives, where the composition changes
    "log2": (xp.log2, lambda x: 1 / (x * np.log(2)), lambda x: -1 / (x * x * np.log(2)), [1e-30, 0.3, 1.0, 2.0, 1e20]),
    "log10": (xp.log10, lambda x: 1 / (x * np.log(10)), lambda x: -1 / (x * x * np.log(10)), [1e-3, 0.3, 1.0, 100.0]),
    "log1p": (xp.log1p, lambda x: 1 / (1 + x), lambda x: -1 / (1 + x) ** 2, [0.0, 1e-20, 1e-12, -0.5, 1e8]),
    "expm1": (xp.expm1, np.exp, np.exp, [0.0, 1e-20, -1e-12, 0.7, -20.0, -1e4, 700.0]),
    "atan2": (
        lambda x: xp.atan2(x, 0 * x + 2.0), lambda x: 2 / (4 + x * x), lambda x: -4 * x / (4 + x * x) ** 2,
        [0.0, 2.0, -2.0, 1e-20, 1e20],
    ),
    "atan2 of x": (
        lambda x: xp.atan2(0 * x + 2.0, x), lambda x: -2 / (4 + x * x), lambda x: 4 * x / (4 + x * x) ** 2,
        [0.0, 2.0, -2.0, 1e-20, 1e20],
    ),
    "hypot": (
        lambda x: xp.hypot(x, 0 * x + 2.0), lambda x: x / np.sqrt(4 + x * x), lambda x: 4 / np.sqrt(4 + x * x) ** 3,
        [0.0, -0.0, 2.0, -3.0],
    ),
    "logaddexp": (
        lambda x: xp.logaddexp(x, 0 * x), lambda x: 1 / (1 + np.exp(-x)), lambda x: 0.25 / np.cosh(x / 2) ** 2,
        [0.0, 1e-20, 3.0, -3.0, -700.0],
    ),
    "softplus": (
        nn.softplus, lambda x: 1 / (1 + np.exp(-x)), lambda x: 0.25 / np.cosh(x / 2) ** 2, [0.0, 1e-20, 3.0, -3.0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOPES)
def test_derivatives_of_what_is_composed(name):
    """Of the function, not of the steps and special cases that it is computed by."""
    f, first, second, points = SLOPES[name]
    x = np.array(points)
    slope = onnxc.grad(lambda y: xp.sum(f(y)))
    np.testing.assert_allclose(slope(x).numpy(), first(x), rtol=1e-13)
    np.testing.assert_allclose(onnxc.grad(lambda y: xp.sum(slope(y)))(x).numpy(), second(x), rtol=1e-12)


NORMS = {
    "std": lambda x: xp.std(x),
    "vector_norm": lambda x: xp.linalg.vector_norm(x),
    "vector_norm of order 3": lambda x: xp.linalg.vector_norm(x, ord=3),
    "vector_norm of order 0.5": lambda x: xp.linalg.vector_norm(x, ord=0.5),
    "matrix_norm": lambda x: xp.linalg.matrix_norm(x),
    "hypot": lambda x: xp.sum(xp.hypot(x, x)),
    "atan2": lambda x: xp.sum(xp.atan2(x, x)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_nothing_but_zeros_are_flat(name):
    """As in PyTorch: a row of equal numbers makes no NaN of a training."""
    np.testing.assert_array_equal(onnxc.grad(NORMS[name])(np.zeros((2, 3))).numpy(), np.zeros((2, 3)))


def test_norms_are_flat_along_their_zeros():
    half = onnxc.grad(lambda x: xp.sum(xp.linalg.vector_norm(x, axis=1, ord=0.5)))
    np.testing.assert_allclose(half(np.array([[0.0, 4.0]])).numpy(), [[0.0, 1.0]])


def test_bounds_of_clip():
    found = onnxc.grad(lambda x: xp.sum(xp.clip(x, 1, 2)))(np.array([0.5, 1, 1.5, 2, 3]))
    np.testing.assert_array_equal(found.numpy(), [0, 1, 1, 1, 0])  # as of Clip, and of PyTorch


def test_argnums_of_numpy():
    found = onnxc.grad(lambda a, b: a * b, np.int64(1))(2.0, 3.0)
    assert found.item() == 2


def test_vjp():
    y, back = onnxc.vjp(lambda a, b: {"p": a * b, "s": xp.sum(a)}, X, 2 * X)
    da, db = back({"p": np.ones_like(X), "s": np.float64(3)})
    np.testing.assert_allclose(da.numpy(), 2 * X + 3)
    np.testing.assert_allclose(db.numpy(), X)
    assert y["p"].shape == X.shape
    y, back, aux = onnxc.vjp(lambda a: (a * 2, "more"), X, has_aux=True)
    assert aux == "more"
    with pytest.raises(InputError, match="cotangents"):
        back({"p": X})
    with pytest.raises(InputError, match=r"cotangents.*float64\[3, 4\].*float64\[3, 5\]"):
        back(X[:, :4])


def test_a_loop_of_which_nothing_is_left():
    """The second derivative needs no state of it."""

    def f(x):
        grown = onnxc.while_loop(lambda s: xp.sum(xp.abs(s)) < 1, lambda s: xp.exp(s) * 1.3, x)
        return xp.sum(onnxc.fori_loop(0, 2, lambda k, s: s - xp.floor(s), xp.remainder(grown, 1.5)))

    second = onnxc.grad(lambda x: xp.sum(xp.sin(onnxc.grad(f)(x))))
    np.testing.assert_array_equal(second(V).numpy(), np.zeros(3))


def test_independent_arguments_have_zeros():
    g = onnxc.grad(lambda a, b: xp.sum(a), (0, 1))(X, W)
    np.testing.assert_array_equal(g[0].numpy(), np.ones_like(X))
    np.testing.assert_array_equal(g[1].numpy(), np.zeros_like(W))
    _y, dy = onnxc.jvp(lambda a, b: (a * 2, 3.0 * b), (X, W), (X, np.zeros_like(W)))
    np.testing.assert_allclose(dy[0].numpy(), 2 * X)
    np.testing.assert_array_equal(dy[1].numpy(), np.zeros_like(W))
    assert float(onnxc.grad(lambda x: xp.asarray(1.0))(2.0)) == 0


def test_only_what_goes_through_the_argument_counts():
    x = xp.asarray(V)
    np.testing.assert_allclose(onnxc.grad(lambda y: xp.sum(y * x))(x).numpy(), V)
    stopped = onnxc.grad(lambda y: xp.sum(onnxc.stop_gradient(y) * y))(x)
    np.testing.assert_allclose(stopped.numpy(), V)


def test_integers_on_the_way():
    labels = np.array([1, 0, 4])
    g = onnxc.grad(lambda x: nn.cross_entropy(x, labels))(X)
    p = np.exp(X) / np.exp(X).sum(1, keepdims=True)
    p[np.arange(3), labels] -= 1
    np.testing.assert_allclose(g.numpy(), p / 3, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: onnxc.grad(lambda x: x)(X), r"float64\[3, 5\]"),
        (lambda: onnxc.grad(lambda x: (xp.sum(x), x))(X), "tree of 2"),
        (lambda: onnxc.grad(lambda x: xp.sum(xp.astype(x, xp.int64)))(X), "int64"),
        (lambda: onnxc.grad(lambda x: xp.sum(x))(np.arange(3)), r"argument\[0\].*int64"),
        (lambda: onnxc.grad(lambda x: x["a"])({"a": 1}), r"argument\[0\]\['a'\].*int"),
        (lambda: onnxc.grad(lambda x: x, 1)(X), "argnums"),
        (lambda: onnxc.grad(lambda x: x, "x"), "argnums.*'x'"),
        (lambda: onnxc.grad(lambda x: x, float("nan")), "argnums.*nan"),
        (lambda: onnxc.grad(3), "differentiated.*int"),
        (lambda: onnxc.grad(lambda x: x, (0, 0))(X), "twice"),
        (lambda: onnxc.grad(lambda x: xp.sum(x), has_aux=True)(X), "pair"),
        (lambda: onnxc.grad(lambda x: "text")(X), "str"),
        (lambda: onnxc.jvp(lambda x: x, (X,), (W,)), "tangents"),
    ],
)
def test_wrong_uses(call, words):
    with pytest.raises(OnnxcError, match=words):
        call()


def test_a_loop_that_data_end():
    def f(x):
        return onnxc.while_loop(lambda s: s < 9, lambda s: s * s + x, x)

    def slope(g):
        return (g(1.3 + 1e-4) - g(1.3 - 1e-4)) / 2e-4

    first = onnxc.grad(f)
    np.testing.assert_allclose(onnxc.jit(first)(1.3).item(), slope(lambda x: f(x).item()), 1e-6)
    np.testing.assert_allclose(onnxc.grad(first)(1.3).item(), slope(lambda x: first(x).item()), 1e-6)


def test_a_vjp_of_a_trace_that_has_ended():
    kept = []

    @onnxc.jit
    def f(x):
        y, back = onnxc.vjp(lambda x: x * 2, x)
        kept.append(back)
        return back(y)[0]

    np.testing.assert_allclose(f(V).numpy(), 4 * V)
    with pytest.raises(InputError, match="ended"):
        kept[0](V)
    with pytest.raises(OnnxcError):
        onnxc.jit(lambda y: kept[0](y))(V)


def test_empty():
    assert onnxc.grad(lambda x: xp.sum(x * x))(np.zeros((0, 3))).shape == (0, 3)


def test_a_small_network_learns():
    """Gradient descent in one program of twenty steps."""
    x = RNG.standard_normal((16, 5)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    params = {"w": [0.5 * RNG.standard_normal((5, 8)), 0.5 * RNG.standard_normal((8, 1))], "b": np.zeros(8)}
    params = {
        k: [a.astype(np.float32) for a in v] if isinstance(v, list) else v.astype(np.float32) for k, v in params.items()
    }

    def loss(p):
        return xp.mean((xp.tanh(x @ p["w"][0] + p["b"]) @ p["w"][1] - y) ** 2)

    @onnxc.jit
    def train(params, rate):
        def step(p, _):
            value, g = onnxc.value_and_grad(loss)(p)
            w = [a - rate * d for a, d in zip(p["w"], g["w"], strict=True)]
            return {"w": w, "b": p["b"] - rate * g["b"]}, value

        return onnxc.scan(step, params, length=20)

    after, losses = train(params, 0.1)
    assert losses.shape == (20,) and losses.numpy()[-1] < 0.6 * losses.numpy()[0]
    np.testing.assert_allclose(float(loss(params)), losses.numpy()[0], rtol=1e-5)
    assert after["b"].dtype == np.float32
