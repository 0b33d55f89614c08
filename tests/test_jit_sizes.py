"""Dynamic sizes in jitted functions: arithmetic leaves them open, comparisons and numbers of Python are decided."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc import nn
from onnxc.errors import InputError, OnnxcError, TraceError
from onnxc.frontends.decisions import IS_NEGATIVE, IS_ZERO, VALUE, Decisions, hold
from onnxc.ir.expr import Sym

SIZES = (2, 3, 4, 7, 9)


def given(n):
    return np.arange(n * 3, dtype=np.float32).reshape(n, 3)


def doubled(number, times):
    for _ in range(times):
        number = number + number
    return float(number)


def check(f, most, sizes=SIZES):
    """A function gives for each size what it does outside of a trace, by so many programs."""
    jitted = onnxc.jit(f, dynamic={"x": {0: "n"}})
    for n in sizes:
        got, want = np.asarray(jitted(given(n))), np.asarray(f(xp.asarray(given(n))))
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(jitted.explain_recompiles()) == most
    return jitted


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * x.shape[0] ** 0.5,
        lambda x: x * x.shape[0] ** 2,
        lambda x: x * (1 / x.shape[0]) + x.shape[0] / 2,
        lambda x: x * divmod(x.shape[0], 3)[1] - divmod(100, x.shape[0] + 1)[0],
        lambda x: x * (x.shape[0] // -2) + x.shape[0] % -3,
        lambda x: x * abs(-x.shape[0]) + round(x.shape[0]) + +x.shape[0],
        lambda x: x[: x.shape[0] // 2],
        lambda x: x[-(x.shape[0] // 2) :],
        lambda x: x[-x.shape[0]] + x[x.shape[0] - 1],
        lambda x: x[: np.int64(1) * x.shape[0] // np.int64(2)],
        lambda x: x * (np.ones(3, np.float32) * x.shape[0]),
        lambda x: xp.where(np.arange(3) == x.shape[0], x, 0),
        lambda x: xp.reshape(x, (x.shape[0] * 3,)),
        lambda x: x.reshape(3, x.shape[0]) * x.size,
        lambda x: x + xp.arange(1, x.shape[0] + 1, dtype=xp.float32)[:, None],
        lambda x: xp.repeat(x[:1], x.shape[0], axis=0) + xp.tile(x[:1], (x.shape[0], 1)),
        lambda x: xp.roll(x, x.shape[0] // 2, axis=0),
        lambda x: xp.concat([x, xp.zeros((8 - x.shape[0] % 8, 3), dtype=xp.float32)]),
        lambda x: onnxc.fori_loop(0, x.shape[0], lambda i, s: s + x[i], xp.zeros(3, dtype=xp.float32)),
        lambda x: x if x.shape[0] < math.inf and x.shape[0] >= 0 and not x.shape[0] <= math.nan else -x,
        lambda x: x if x.shape == (x + 1).shape and x.shape[0] != x.shape[0] + 1 else -x,
        lambda x: -x if x.shape[0] is None or x.shape[0] == "a" else x,
        lambda x: (f"{x.shape[0]:3d} {x.shape[0]} {x.shape[0]!r:>8}", x)[1],
        lambda x: (f"{x.shape[0]:>+10,d} {x.shape[0]:08.3f}", x)[1],
        lambda x: x * (np.float64(0.5) * x.shape[0]) + np.float32(2) / (x.shape[0] + np.float32(1)),
        lambda x: x * (np.int64(7) / (x.shape[0] + 1)) + x.shape[0] / np.int32(3) + np.float32(1.5) ** x.shape[0],
        lambda x: x[: np.power(x.shape[0], 2) - 1],
        lambda x: x * onnxc.fori_loop(0, 3, lambda i, s: s * 0.5, x.shape[0]),
        lambda x: x[xp.asarray([0, 1]), x.shape[1] - 1] + x[xp.asarray([-1, 0]), -1],
        lambda x: x[xp.asarray([0, 0]), xp.asarray([0, 2])] + x[x.shape[0] - 1, xp.asarray([1, 2])],
        lambda x: x[: copy.deepcopy(x.shape)[0] // 2],
    ],
)
def test_arithmetic_leaves_sizes_open(quick, f):
    check(f, 1)


@pytest.mark.parametrize(
    ("f", "most"),
    [
        (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, 2),
        (lambda x: x * 2 if x.shape[0] > 3 else x, 2),
        (lambda x: x * 2 if 2 < x.shape[0] <= 7 else x, 3),
        (lambda x: x * 2 if x.shape[0] >= 3.5 else x, 2),
        (lambda x: x * 2 if x.shape[0] == 4.0 else x, 2),
        (lambda x: x * 2 if np.int64(3) < x.shape[0] else x, 2),
        (lambda x: x * 2 if x.shape == (3, 3) else x, 2),
        (lambda x: x * 2 if x.shape[0] in (2, 4) else x, 3),
        (lambda x: x[: min(x.shape[0], 3)] * max(x.shape[0], 3), 3),
        (lambda x: x[x.shape[0] - 3 :], 2),
        (lambda x: onnxc.cond(x.shape[0] > 3, lambda a: a * 2, lambda a: a, x), 2),
        (lambda x: onnxc.grad(lambda a: xp.sum(a**2) if a.shape[0] > 3 else xp.sum(a))(x), 2),
        (lambda x: onnxc.while_loop(lambda s: xp.sum(s) < 99, lambda s: 2 * s + 1 if s.shape[0] > 3 else s + 9, x), 2),
    ],
)
def test_comparisons_are_decided(quick, f, most):
    check(f, most)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * math.sqrt(x.shape[0]),
        lambda x: x * np.sqrt(x.shape[0]) + math.ceil(x.shape[0]),
        lambda x: sum((x[i] for i in range(x.shape[0])), xp.zeros(3, dtype=xp.float32)),
        lambda x: sum(x, xp.zeros(3, dtype=xp.float32)) * len(x),
        lambda x: xp.stack([x] * x.shape[0]),
        lambda x: x * (x.shape[0] << 1) + (5 & x.shape[0]),
        lambda x: x + np.zeros(x.shape, np.float32),
        lambda x: x[: int(x.shape[0] * 0.5)] * math.ceil(x.shape[0] / 2),
        lambda x: x * {2: 5.0}.get(x.shape[0], 1.0),
        lambda x: xp.unstack(x)[0],
        lambda x: x[[0, x.shape[0] - 1]] + x[[x.shape[0] - 1]][0],
        lambda x: xp.sum(x, axis=-(x.shape[0] // x.shape[0])) * x.shape[0] ** 0.5 + len(x),
        lambda x: x[:: x.shape[0]][0] + xp.tril(x, k=x.shape[0] - 3),
        lambda x: x * xp.eye(x.shape[0], 3, k=1 - x.shape[0]),
        lambda x: xp.astype(onnxc.random.randint(onnxc.random.key(0), (9,), 0, x.shape[0]), xp.float32),
        lambda x: x * round(x.shape[0] / 4) + round(x.shape[0] * 0.3, 1),
        lambda x: x * doubled(x.shape[0] * 0.5, 60),
        lambda x: xp.real(xp.fft.fft(xp.astype(x, xp.complex64), axis=0)),
    ],
)
def test_numbers_of_python_are_decided(quick, f):
    check(f, len(SIZES))


def test_numbers_that_are_computed_later():
    functions = (
        lambda x, n: x * n**0.5, lambda x, n: x * n**-0.5, lambda x, n: x * n**2, lambda x, n: x * 2.0**n,
        lambda x, n: x * (1 / n), lambda x, n: x * (n / 2) ** 0.5, lambda x, n: x * (n / n), lambda x, n: x + 0.5 * n,
        lambda x, n: x * (n + 0.5), lambda x, n: x * (1.5 - n), lambda x, n: x * (n - 1.5), lambda x, n: x * (n // 2.0),
        lambda x, n: x * (7.5 // n), lambda x, n: x * (n % 1.5), lambda x, n: x[: n // 2] * (n % 2),
    )  # fmt: skip
    for f in functions:
        traced = onnxc.jit(lambda x, f=f: f(x, x.shape[0]), dynamic=True)
        for n in (5, 4):
            x = np.arange(1, n + 1, dtype=np.float32)
            found, expected = traced(x), f(x, n)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
        assert len(traced.explain_recompiles()) == 1


def test_whether_it_is_nothing(quick):
    check(lambda x: x + 1 if x.shape[0] else xp.ones((1, 3), dtype=xp.float32), 2, (0, 2, 5))


def _square(n):
    return np.eye(n) * 3 + 0.1


KNOWN = {  # functions that an op of known sizes is in, arrays of a size, and how many programs four sizes make
    "conv": (lambda x, w: nn.conv(x, w), lambda n: (np.ones((n, 3, 6, 6)), np.ones((4, 3, 3, 3))), 1),
    "conv of a kernel": (lambda x, w: nn.conv(x, w), lambda n: (np.ones((2, 3, 9, 9)), np.ones((4, 3, n, n))), 4),
    "its gradient": (
        lambda x, w: onnxc.grad(lambda w: xp.sum(nn.conv(x, w) ** 2))(w),
        lambda n: (np.ones((n, 3, 6, 6)), np.ones((4, 3, 3, 3))), 1,
    ),
    "attention": (lambda q, k: nn.attention(q, k, k), lambda n: (np.ones((2, n, 4)), np.ones((2, n + 1, 4))), 1),
    "solve": (lambda a, b: xp.linalg.solve(a, b), lambda n: (_square(n), np.arange(n * 1.0)), 4),
    "qr": (lambda a: xp.linalg.qr(a).R, lambda n: (_square(n)[:, 1:],), 4),
    "pinv": (lambda a: xp.linalg.pinv(a), lambda n: (_square(n)[:, 1:],), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_that_an_op_has_to_know_are_those_of_the_call(name, quick):
    f, arrays, most = KNOWN[name]
    jitted = onnxc.jit(f, dynamic=True)
    for n in (4, 2, 5, 3, 4):
        np.testing.assert_allclose(np.asarray(jitted(*arrays(n))), np.asarray(f(*arrays(n))), atol=1e-12)
    assert len(jitted.explain_recompiles()) == most


def test_why_a_size_has_to_be_known(quick):
    jitted = onnxc.jit(lambda a: xp.linalg.inv(a), dynamic=True)
    for n in (2, 3):
        jitted(_square(n))
    reason = r"1: a_0 \(\S*test_jit_sizes.py:\d+\): 2 -> 3; a_1 \(\S*test_jit_sizes.py:\d+\): 2 -> 3"
    assert re.fullmatch(reason, str(jitted.explain_recompiles()[-1]))
    with pytest.raises(OnnxcError, match="only a call tells"):
        onnxc.to_onnx(lambda a: xp.linalg.inv(a), _square(3), dynamic={"a": [0, 1]})
    with pytest.raises(InputError, match="square matrices"):
        jitted(np.ones((2, 3)))


def test_dynamic_sizes_of_statistics_and_masks():
    """Each has a symbol of its own."""
    norm = onnxc.jit(nn.batch_norm, dynamic=True)
    mask = onnxc.jit(_masked, dynamic=True)
    for n in (3, 5):
        x, v = np.arange(4.0 * n).reshape(4, n), np.arange(n) + 1.0
        np.testing.assert_allclose(norm(x, v, v, v, v).numpy(), nn.batch_norm(x, v, v, v, v).numpy())
        np.testing.assert_array_equal(mask(v, v > 2).numpy(), np.where(v > 2, 7, v))
    assert len(norm.explain_recompiles()) == len(mask.explain_recompiles()) == 1
    for wrong in (4, 1):
        with pytest.raises(IndexError, match="mask"):
            mask(np.ones(3), np.ones(wrong, bool))


def _masked(x, m):
    x = xp.asarray(x, copy=True)
    x[m] = 7.0
    return x


def test_as_result(quick):
    f = onnxc.jit(lambda x: (x.shape[0], x.size * 2 + 1), dynamic=True)
    assert [tuple(map(int, f(given(n)))) for n in SIZES] == [(n, n * 6 + 1) for n in SIZES]
    assert len(f.explain_recompiles()) == 1


def test_why_it_compiles_again(quick):
    f = check(lambda x: x * 2 if x.shape[0] % 2 == 0 else x, 2)
    assert "n % 2) == 0 (" in str(f.explain_recompiles()[1]) and "True -> False" in str(f.explain_recompiles()[1])


def test_two_sizes(quick):
    @onnxc.jit(dynamic={"x": 0, "y": 0})
    def longer(x, y):
        if x.shape[0] == y.shape[0]:
            return x + y
        return x if x.shape[0] > y.shape[0] else y

    for a, b in ((3, 3), (4, 2), (2, 4), (5, 5), (9, 2)):
        assert longer(given(a), given(b)).shape == (max(a, b), 3)
    assert len(longer.explain_recompiles()) == 3


def test_a_number_made_of_an_array_of_another_size(quick):
    f = onnxc.jit(lambda x, y: x * float(xp.broadcast_to(xp.asarray(x.shape[0] * 0.5), (y.shape[0],))[0]),
                  dynamic={"x": 0, "y": 0})  # fmt: skip
    for a, b in ((4, 2), (4, 3), (6, 2)):
        np.testing.assert_array_equal(f(given(a), given(b)).numpy(), given(a) * (a * 0.5))


def test_sizes_that_divide_by_zero_in_a_later_call(quick):
    f = onnxc.jit(lambda x, k: x * 2 if xp.reshape(x, (k.shape[0], -1)).shape[1] > 3 else x, dynamic={"x": 0, "k": 0})
    np.testing.assert_array_equal(f(given(4), given(2)).numpy(), given(4) * 2)
    with pytest.raises(InputError, match="divides by zero in this call"):
        f(given(4), given(0))
    np.testing.assert_array_equal(f(given(4), given(4)).numpy(), given(4))


def test_stacked_arrays_are_of_one_size(quick):
    f = onnxc.jit(lambda x, y: xp.stack([x, y]), dynamic=True)
    for n in (2, 4):
        np.testing.assert_array_equal(f(given(n), given(n) + 1).numpy(), [given(n), given(n) + 1])
    assert len(f.explain_recompiles()) == 1
    with pytest.raises(InputError, match="stack of different shapes"):
        f(given(2), given(4))


def test_programs_have_an_upper_bound(quick):
    f = onnxc.jit(lambda x: x * len(x), dynamic=True, most_programs=3)
    for n in (2, 3, 4, 5, 2, 5, 4):
        np.testing.assert_array_equal(f(given(n)).numpy(), given(n) * n)
    assert "3 programs" in repr(f) and len(f._shortcuts) == 3
    assert len(f.explain_recompiles()) == 5


def test_what_fails_forgets_nothing(quick):
    @onnxc.jit(dynamic=True)
    def f(x):
        if x.shape[0] > 3:
            raise ValueError("too long")
        return x

    for _ in range(2):
        f(given(2))
        with pytest.raises(ValueError, match="too long"):
            f(given(5))
    assert len(f.explain_recompiles()) == 1


@pytest.mark.parametrize(
    "f", [lambda x: x * 2 if x.shape[0] > 3 else x, lambda x: x * len(x), lambda x: x[: int(x.shape[0] * 0.5)]]
)
def test_no_call_decides_for_a_file(f):
    with pytest.raises(TraceError, match=r"test_jit_sizes.py:\d+: .* (dynamic|static)"):
        onnxc.to_onnx(f, given(3), dynamic={"x": {0: "batch"}})


@pytest.mark.parametrize(
    "f",
    [
        lambda x: xp.reshape(x, (-1,)) * (x.shape[0] // x.shape[1]),
        lambda x: x * (x.shape[0] % x.shape[1]) + x.shape[0] // 2,
        lambda x: x[: 12 // x.shape[0]],
        lambda x: x[x.shape[0] - 1] + x[0],
    ],
)
def test_files_whose_sizes_are_divided_and_are_positions(f):
    model = onnxc.compile(onnxc.to_onnx(f, given(3), dynamic={"x": {0: "rows", 1: "columns"}}))
    for n in (3, 6, 7):
        np.testing.assert_array_equal(model(x=given(n))["result"], f(xp.asarray(given(n))).numpy())


def test_outside_of_its_trace(quick):
    kept = []
    onnxc.jit(lambda x: kept.append(x.shape[0]) or x, dynamic=True)(given(3))
    (n,) = kept
    for use in (lambda: n > 3, lambda: int(n), lambda: xp.zeros(n), lambda: n * 0.5, lambda: given(3) * n):
        with pytest.raises(TraceError, match="outside of the function"):
            use()
    with pytest.raises(TraceError, match="outside of the function"):
        onnxc.jit(lambda x: xp.zeros(n) + x[0, 0], dynamic=True)(given(4))


def test_errors(quick):
    for f, error in (
        (lambda x: x // (x.shape[0] // 0), ZeroDivisionError),
        (lambda x: x if x.shape[0] < "a" else -x, TypeError),
    ):
        with pytest.raises(error):
            onnxc.jit(f, dynamic=True)(given(3))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: xp.linalg.matrix_power(xp.eye(2) * 2, x.shape[0]),
        lambda x: xp.diff(x, axis=0, n=x.shape[0] - 1),
        lambda x: xp.linalg.vector_norm(x, ord=x.shape[0]),
        lambda x: xp.var(x, correction=x.shape[0] - 2),
        lambda x: xp.linspace(0, x.shape[0], 3),
    ],
)
def test_sizes_for_numbers_of_python(f):
    """Were errors: the function compares them, or computes with them."""
    check(f, len(SIZES))


def test_searched_vectors_of_open_sizes(quick):
    """Of no element, too; and NaN is greater than all, of known sizes as of others."""
    searched = onnxc.jit(lambda x, v, side: xp.searchsorted(x, v, side=side), static_argnames="side", dynamic={"x": 0})
    values = np.array([-1, 0, 2, 2.5, np.nan, np.inf, 80], np.float32)
    for side in ("left", "right"):
        for n in (0, 1, 2, 5, 64, 100):
            line = np.repeat(np.array([*range(n // 2), np.nan], np.float32), 2)[:n]
            np.testing.assert_array_equal(searched(line, values, side), np.searchsorted(line, values, side))
    assert len(searched.explain_recompiles()) == 2


@pytest.mark.parametrize("f", [xp.max, xp.min, xp.argmax, xp.argmin], ids=lambda f: f.__name__)
def test_extremes_of_a_size_that_turns_out_to_be_0(f, quick):
    """They were infinite, or an error about a negative size."""
    jitted = onnxc.jit(lambda x: f(x[1:], axis=0), dynamic=True)
    np.testing.assert_array_equal(jitted(given(4)), f(xp.asarray(given(4)[1:]), axis=0).numpy())
    for n in (0, 1):
        with pytest.raises(ValueError, match=f"{f.__name__} of no elements"):
            jitted(given(n))
    norm = onnxc.jit(lambda x: xp.linalg.vector_norm(x, ord=np.inf), dynamic=True)
    assert norm(given(3)).numpy() == 8 and norm(given(0)).numpy() == 0


def test_decisions_hold():
    n = Sym("s0")
    decisions = Decisions({"s0": 6})
    assert decisions.ask(IS_ZERO, n % 2, "a") and not decisions.ask(IS_NEGATIVE, n - 4, "b")
    assert not decisions.ask(IS_NEGATIVE, n, "certain") and len(decisions.made) == 2
    assert [k for k in range(9) if hold(decisions.made.values(), {"s0": k})] == [4, 6, 8]
    assert decisions.ask(VALUE, n, "c") == 6
    assert [k for k in range(9) if hold(decisions.made.values(), {"s0": k})] == [6]
    with pytest.raises(KeyError):
        decisions.ask(VALUE, Sym("s9"), "d")
