"""onnxc.random: reproducible, independent of how it runs, distributed as it should be."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import onnxc
from onnxc import random
from onnxc.errors import OnnxcError

pytestmark = pytest.mark.usefixtures("interpreted")


N = 20_000
DRAWS = {
    "uniform": (lambda k: random.uniform(k, (N,), -2, 3), stats.uniform(-2, 5)),
    "uniform of doubles": (lambda k: random.uniform(k, (N,), dtype=np.float64), stats.uniform()),
    "normal": (lambda k: random.normal(k, (N // 4, 4), 1, 2), stats.norm(1, 2)),
    "normal of halves": (lambda k: random.normal(k, (N,), dtype=np.float16), stats.norm()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distribution(name):
    draw, expected = DRAWS[name]
    found = draw(random.key(5)).numpy().astype(np.float64).ravel()
    assert stats.kstest(found, expected.cdf).pvalue > 1e-3
    np.testing.assert_array_equal(found, draw(random.key(5)).numpy().astype(np.float64).ravel())


def test_counts():
    ints = random.randint(random.key(1), (N,), -2, 5, np.int8).numpy()
    assert ints.dtype == np.int8
    assert stats.chisquare(np.bincount(ints + 2, minlength=7)).pvalue > 1e-3
    bools = random.bernoulli(random.key(2), np.full((N,), 0.2, np.float32)).numpy()
    assert abs(bools.mean() - 0.2) < 0.01
    scores = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    classes = random.categorical(random.key(3), np.broadcast_to(scores, (N, 3))).numpy()
    assert stats.chisquare(np.bincount(classes), N * np.array([0.1, 0.6, 0.3])).pvalue > 1e-3


def test_keys_differ():
    root = random.key(7)
    first, second = random.split(root)
    more = [*random.split(root, 5), *random.split(first, 5), random.fold_in(root, 0), random.fold_in(root, 1), second]
    assert len({int(k) for k in more}) == 12  # second is one of the first five
    assert int(next(iter(random.split(root, 5)))) == int(first)
    a, b = (random.normal(k, (N,)).numpy() for k in (first, second))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
    bits = {int(k) for k in more} & {int(x) for x in random.randint(root, (100,), 0, 1 << 62).numpy()}
    assert not bits


def test_one_program_draws_the_same():
    def f(key, n):
        keys = random.split(key, 3)
        return (
            random.uniform(keys[0], (n, 3)),
            random.normal(keys[1], (n,), dtype=np.float64),
            random.bernoulli(random.fold_in(keys[2], 5), 0.4, (n, 2)),
            random.randint(keys[2], (n,), 0, 10),
            random.categorical(keys[2], np.zeros((n, 4), np.float32)),
        )

    apart = f(random.key(11), 5)
    together = onnxc.jit(f, static_argnums=1)(random.key(11), 5)
    for x, y in zip(apart, together, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5)  # logarithms may round otherwise


def test_in_loops():
    def f(key):
        def step(k, _):
            k, own = random.split(k)
            return k, random.normal(own, (3,))

        return onnxc.scan(step, key, length=4)[1]

    apart = f(random.key(0)).numpy()
    assert len(np.unique(apart)) == 12
    np.testing.assert_allclose(apart, onnxc.jit(f)(random.key(0)).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: random.key(-1),
        lambda: random.key(1 << 64),
        lambda: random.key(1.5),
        lambda: random.uniform(3, (2,)),
        lambda: random.uniform(random.split(random.key(0)), (2,)),
        lambda: random.uniform(random.key(0), (-1,)),
        lambda: random.uniform(random.key(0), (2,), dtype=np.int32),
        lambda: random.randint(random.key(0), (2,), 3, 3),
        lambda: random.randint(random.key(0), (2,), 0, 300, np.int8),
        lambda: random.bernoulli(random.key(0), np.full((3,), 0.5), (2,)),
        lambda: random.categorical(random.key(0), np.arange(3)),
        lambda: random.split(random.key(0), -1),
        lambda: random.split(random.key(0), True),
        lambda: random.normal(random.key(0), (2, True)),
        lambda: random.normal(random.key(0), 3.0),
        lambda: random.randint(random.key(0), (2,), 0.0, 3),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(OnnxcError):
        call()


def test_empty_and_large_keys():
    assert random.normal(random.key((1 << 64) - 1), (0, 3)).shape == (0, 3)
    assert random.split(random.key(0), 0).shape == (0,)
    assert random.key(np.arange(3)).shape == (3,)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_greatest_draw_picks_no_class_that_cannot_be(monkeypatch, dtype):
    last = 1 - (2.0**-53 if dtype is np.float64 else 2.0**-24)
    monkeypatch.setattr(random, "unit", lambda b, k, shape, to: b.full(shape, b.scalar(last, to), to))
    scores = np.array([[-np.inf, 0], [-50, 0]], dtype)
    found = onnxc.jit(lambda key: random.categorical(key, scores))(random.key(0))
    np.testing.assert_array_equal(found.numpy(), [1, 1])
