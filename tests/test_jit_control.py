"""onnxc.cond, while_loop, fori_loop and scan: traced, and in Python."""

from __future__ import annotations

import numpy as np
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc.errors import InputError, OnnxcError

pytestmark = pytest.mark.usefixtures("interpreted")

X = np.arange(1, 6, dtype=np.float32)


def both(f, *args):
    """What a function gives outside of a trace, and in one; they must agree."""
    apart, together = f(*map(xp.asarray, args)), onnxc.jit(f)(*args)
    leaves = lambda t: [y for x in t for y in leaves(x)] if isinstance(t, (tuple, list)) else [t]  # noqa: E731
    for x, y in zip(leaves(apart), leaves(together), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5)
    return apart


def test_cond():
    def f(p, x):
        scale = xp.max(x)
        a, (b, _) = onnxc.cond(p, lambda y: (y * scale, [x[::-1], None]), lambda y: (y + 1, [x, None]), x)
        return a, b

    a, b = both(f, np.array(True), X)
    np.testing.assert_array_equal(a.numpy(), X * 5)
    np.testing.assert_array_equal(b.numpy(), X[::-1])
    a, b = both(f, np.array(False), X)
    np.testing.assert_array_equal(a.numpy(), X + 1)


def test_cond_runs_one_branch():
    """The other one would divide by zero."""
    f = onnxc.jit(lambda n: onnxc.cond(n == 0, lambda: n, lambda: 12 // n))
    assert int(f(np.int64(0))) == 0
    assert int(f(np.int64(5))) == 2


def test_cond_in_cond_and_known_conditions():
    def f(x):
        inner = lambda y: onnxc.cond(xp.sum(y) > 10, lambda: y * 2, lambda: y * 3)  # noqa: E731
        return onnxc.cond(x[0] > 0, inner, lambda y: -y, x) + onnxc.cond(True, lambda: x, lambda: "never")

    for x in (X, X * 0.1, -X):
        both(f, x)


def test_while_loop():
    def collatz(n):
        def step(s):
            n, count = s
            return xp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

        return onnxc.while_loop(lambda s: s[0] != 1, step, (n, 0))[1]

    for n, steps in ((27, 111), (1, 0)):
        assert int(both(collatz, np.int64(n))) == steps


def test_while_loop_of_trees_and_outer_arrays():
    def f(x, limit):
        table = x * 2

        def step(s):
            return {"v": s["v"] + table, "k": s["k"] + 1, "none": None}

        found = onnxc.while_loop(lambda s: xp.sum(s["v"]) < limit, step, {"v": x, "k": np.int32(0), "none": None})
        return found["v"], found["k"]

    v, k = both(f, X, np.float32(100))
    assert int(k) == 3 and v.numpy()[0] == 7


def test_fori_loop():
    def f(x, low, high):
        table = xp.cumulative_sum(x)

        def step(k, s):
            return s * 0.5 + xp.take(table, xp.reshape(k, (1,)))[0]

        return onnxc.fori_loop(0, 4, step, x), onnxc.fori_loop(low, high, step, x)

    for low, high in ((1, 4), (3, 3), (4, 1)):
        both(f, X, np.int64(low), np.int32(high))


def test_a_body_writes_to_its_own_state():
    def body(*args):
        state = args[-1]
        state[0] += 1
        return state

    start = xp.asarray(X)
    for run in (
        lambda s: onnxc.fori_loop(0, 2, body, s),
        lambda s: onnxc.while_loop(lambda t: t[0] < 3, body, s),
        lambda s: onnxc.scan(lambda t, _: (body(t), t[0]), s, length=2)[0],
    ):
        assert float(run(start)[0]) == 3
        np.testing.assert_array_equal(start.numpy(), X)


def test_numbers_take_the_dtype_of_the_body():
    f = onnxc.jit(lambda x: onnxc.fori_loop(0, 3, lambda k, s: (s[0] + x, s[1] + 1), (0.0, 0)))
    total, count = f(np.float32(1.5))
    assert total.dtype == np.float32 and float(total) == 4.5
    assert count.dtype == np.int64 and int(count) == 3


def test_an_integer_state_takes_no_float():
    with pytest.raises(InputError, match=r"state: int64\[\] and float64\[\]"):
        onnxc.jit(lambda n: onnxc.fori_loop(0, 3, lambda k, s: 2.5, n))(np.int64(1))


def test_scan():
    def f(x, z):
        def step(s, row):
            a, b = row["a"], row["b"]
            return s * a + b, {"s": s, "ab": (a * b * z)[None]}

        xs = {"a": x, "b": x[::-1]}
        last, each = onnxc.scan(step, z, xs)
        back, turned = onnxc.scan(step, z, xs, reverse=True)
        return last, each["s"], each["ab"], back, turned["s"]

    last, s, ab, _back, turned = both(f, X, np.float32(0.5))
    state = 0.5
    for k in range(5):
        assert s.numpy()[k] == np.float32(state)
        state = state * X[k] + X[4 - k]
    assert float(last) == state and ab.shape == (5, 1)
    assert turned.numpy()[4] == 0.5


def test_scan_without_xs_and_without_steps():
    def f(x):
        powers = onnxc.scan(lambda s, _: (s * x, s), xp.ones_like(x), length=4)[1]
        nothing = onnxc.scan(lambda s, a: (s + a, (s, a)), x, xp.zeros((0, 3), dtype=xp.float32))
        return powers, nothing

    powers, (state, (states, _)) = both(f, X[:3])
    np.testing.assert_array_equal(powers.numpy(), X[:3] ** np.arange(4)[:, None])
    assert states.shape == (0, 3)
    np.testing.assert_array_equal(state.numpy(), X[:3])


def test_loops_in_loops():
    def f(x):
        def outer(k, s):
            inner = onnxc.scan(lambda c, a: (c + a * s[0], c), s, xp.stack([x, s]))[1]
            return onnxc.while_loop(lambda c: xp.sum(c) > 10, lambda c: c / 2, inner[1])

        return onnxc.fori_loop(0, 3, outer, x)

    both(f, X)


def test_dynamic_length():
    f = onnxc.jit(
        lambda x: onnxc.scan(lambda s, a: (s + a, s * a), xp.zeros((), dtype=xp.float32), x), dynamic={"x": 0}
    )
    for n in (5, 0, 3):
        total, each = f(X[:n])
        assert float(total) == X[:n].sum() and each.shape == (n,)
    assert len(f.explain_recompiles()) == 1


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: onnxc.cond(x[0] > 0, lambda: x, lambda: x[:2]), r"result.*float32\[5\].*float32\[2\]"),
        (lambda x: onnxc.cond(x[0] > 0, lambda: (x, x), lambda: (x, x > 0)), r"result\[1\].*float32.*bool"),
        (lambda x: onnxc.cond(x[0] > 0, lambda: x, lambda: (x, x)), "differ"),
        (lambda x: onnxc.cond(x > 0, lambda: x, lambda: x), r"bool\[5\]"),
        (lambda x: onnxc.cond(x[0], lambda: x, lambda: x), "float32"),
        (lambda x: onnxc.while_loop(lambda s: s[0] < 9, lambda s: s[:2], x), r"state.*float32\[5\].*float32\[2\]"),
        (lambda x: onnxc.while_loop(lambda s: s < 9, lambda s: s * 2, x), r"bool\[5\]"),
        (lambda x: onnxc.fori_loop(0, 3, lambda k, s: (s, s), x), "differ"),
        (lambda x: onnxc.fori_loop(0, 2.5, lambda k, s: s, x), "bound"),
        (lambda x: onnxc.fori_loop(0, 3, lambda k, s: {"a": s["a"] > 0}, {"a": x}), r"state\['a'\].*float32.*bool"),
        (lambda x: onnxc.scan(lambda s, a: s, x, x), "pair"),
        (lambda x: onnxc.scan(lambda s, a: (s, a), x, x[0]), "axis"),
        (lambda x: onnxc.scan(lambda s, a: (s, a), x, {"a": x, "b": x[:2]}), r"'a'.*5.*'b'.*2"),
        (lambda x: onnxc.scan(lambda s, a: (s, a), x, x, length=4), "length"),
        (lambda x: onnxc.scan(lambda s, a: (s, a), x), "length"),
        (lambda x: onnxc.scan(lambda s, a: (s, s), x, length=-1), "length is an int"),
        (lambda x: onnxc.scan(lambda s, a: (s, s), x, length=True), "length is an int"),
        (lambda x: onnxc.scan(lambda s, a: (s, s), x, length=3.0), "length is an int"),
        (lambda x: onnxc.scan(None, x, x), "body of scan"),
        (lambda x: onnxc.cond(x[0] > 0, lambda: x, 3), "`otherwise` of cond"),
        (lambda x: onnxc.cond("yes", lambda: x, lambda: x), "condition of cond"),
        (lambda x: onnxc.while_loop(True, lambda s: s, x), "condition of while_loop"),
        (lambda x: onnxc.fori_loop(0, 2**70, lambda k, s: s, x), "bound upper of fori_loop"),
    ],
)
def test_wrong_uses(f, words):
    with pytest.raises(OnnxcError, match=words):
        onnxc.jit(f)(X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: onnxc.while_loop(lambda s: s[0] < 9, lambda s: s[:2], x),
        lambda x: onnxc.fori_loop(0, 3, lambda k, s: (s, s), x),
        lambda x: onnxc.fori_loop(0, 3, lambda k, s: s > 0, x),
        lambda x: onnxc.scan(lambda s, a: s, x, x),
        lambda x: onnxc.cond(x[0], lambda: x, lambda: x),
    ],
)
def test_wrong_uses_in_python(f):
    with pytest.raises(InputError):
        f(xp.asarray(X))


def test_exceptions_in_a_body_leave_no_state():
    from onnxc.frontends.trace import current

    def f(x):
        def step(k, s):
            raise KeyError("mine")

        return onnxc.fori_loop(0, 3, step, x)

    with pytest.raises(KeyError, match="mine"):
        onnxc.jit(f)(X)
    assert current() is None


def test_complex_states():
    def f(z, p):
        powers = onnxc.scan(lambda s, a: (s * a, (s, xp.real(a))), z[0], z)
        third = onnxc.fori_loop(0, 2, lambda k, s: s * z, z)
        far = onnxc.while_loop(lambda s: xp.abs(s[0]) < 100, lambda s: s * z, z)
        return powers, third, far, onnxc.cond(p, lambda: z * 2, lambda: z - 1j)

    z = np.array([1 + 2j, 3 - 1j], np.complex64)
    (_, third, far, chosen) = both(f, z, np.array(False))
    np.testing.assert_allclose(third.numpy(), z**3, rtol=1e-5)
    assert abs(far.numpy()[0]) > 100
    np.testing.assert_allclose(chosen.numpy(), z - 1j, rtol=1e-5)


def test_a_scan_with_branches_in_its_body():
    """The host runs it; it has as many results as steps all the same, and a derivative."""
    steps = np.array([[1, 2], [-3, 1], [2, -1], [1, 1]], np.float32)

    def f(x, steps):
        def body(c, y):
            return onnxc.cond(xp.sum(y) > 0, lambda: c * y, lambda: c - 1.0), c * c

        last, squares = onnxc.scan(body, x, steps)
        assert squares.shape == (4, 2)
        return xp.sum(last) + xp.sum(squares * xp.reshape(xp.arange(8, dtype=xp.float32), (4, 2)))

    x = np.array([0.5, -1.5])
    both(f, x.astype(np.float32), steps)
    wide = steps.astype(np.float64)
    g = onnxc.jit(onnxc.grad(lambda x: xp.sum(_stacked(x, wide))))(x).numpy()
    value = lambda x: float(xp.sum(_stacked(xp.asarray(x), wide)))  # noqa: E731
    near = [(value(x + d) - value(x - d)) / 2e-5 for d in 1e-5 * np.eye(2)]
    np.testing.assert_allclose(g, near, rtol=1e-6)


def _stacked(x, steps):
    def body(c, y):
        return onnxc.cond(xp.sum(y) > 0, lambda: c * y, lambda: c - 1.0), c * c

    return onnxc.scan(body, x, xp.asarray(steps))[1]


def test_sizes_that_a_run_tells_have_names_of_their_own():
    """Dims of arguments are s0, s1, ... too."""

    def chosen(x, y):
        return onnxc.cond(xp.sum(x) > 0, lambda: x, lambda: y * 2) + x

    f = onnxc.jit(chosen, dynamic=True)
    np.testing.assert_array_equal(f(np.ones(3), np.ones(4)).numpy(), np.full(3, 2.0))
    with pytest.raises(OnnxcError, match="differs at result"):
        f(-np.ones(3), np.ones(4))

    def grown(a, b):
        return onnxc.while_loop(lambda s: xp.sum(s) < 50, lambda s: s + a @ b, b)

    g = onnxc.jit(grown, dynamic=True)
    for n, last in ((3, 17.0), (4, 13.0)):
        np.testing.assert_array_equal(g(np.eye(n), np.ones(n)).numpy(), np.full(n, last))
