"""Integer expressions against plain integers: every simplification must keep the value, every bound must
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxc.ir import expr
from onnxc.ir.expr import (
    Dim,
    Expr,
    Sym,
    always_equal,
    bounds,
    ceildiv,
    evaluate,
    floordiv,
    index,
    is_less,
    is_nonnegative,
    maximum,
    minimum,
    mod,
    never_equal,
    prod,
    substitute,
    symbols,
    upper,
)

S, P, N = Sym("s"), Sym("p", 1), Sym("n", -3, 4)
I, J = index("i", 6), index("j", 64)  # noqa: E741  (the names of the variables)
K, L = index("k", P), index("l", P * 4)  # loop variables of a symbolic extent
VARIABLES = {"s": S, "p": P, "n": N, "i": I, "j": J, "k": K, "l": L}

# A random expression is a function of an environment: on symbols it gives an Expr, on numbers the number it
# should be.
Env = Mapping[str, Any]
Build = Callable[[Env], Any]


def _apply(op: str, a: Build, b: Build) -> Build:
    return {
        "+": lambda e: a(e) + b(e),
        "-": lambda e: a(e) - b(e),
        "*": lambda e: a(e) * b(e),
        "//": lambda e: floordiv(a(e), b(e)),
        "%": lambda e: mod(a(e), b(e)),
        "max": lambda e: maximum(a(e), b(e)),
        "min": lambda e: minimum(a(e), b(e)),
    }[op]


def _leaf(value: int | str) -> Build:
    return (lambda e: e[value]) if isinstance(value, str) else (lambda e: value)


numbers = st.integers(-9, 70).map(_leaf)
leaves = st.one_of(numbers, st.sampled_from(sorted(VARIABLES)).map(_leaf))
divisors = st.one_of(
    st.sampled_from([1, 2, 3, 4, 12, 16, 64, 96, "p"]).map(_leaf),
    st.sampled_from([4, 6, 64]).map(lambda n: lambda e: e["p"] * n),
)


def _grow(inner: st.SearchStrategy[Build]) -> st.SearchStrategy[Build]:
    return st.one_of(
        st.builds(_apply, st.sampled_from(["+", "-", "*", "max", "min", "+"]), inner, inner),
        st.builds(_apply, st.sampled_from(["//", "%"]), inner, divisors),
        st.builds(_apply, st.just("*"), inner, st.sampled_from([2, 4, 8, 64, -1]).map(_leaf)),
    )


expressions = st.recursive(leaves, _grow, max_leaves=6)


@st.composite
def environments(draw: st.DrawFn) -> dict[str, int]:
    """Values inside the symbols' ranges, their ends often."""
    p = draw(st.one_of(st.integers(1, 5), st.integers(1, 1000)))
    inside = {"i": (0, 5), "j": (0, 63), "n": (-3, 4), "k": (0, p - 1), "l": (0, 4 * p - 1)}
    values = {name: draw(st.one_of(st.sampled_from(ends), st.integers(*ends))) for name, ends in inside.items()}
    return {**values, "p": p, "s": draw(st.one_of(st.integers(0, 3), st.integers(0, 1000)))}


worlds = st.lists(environments(), min_size=6, max_size=6)


@settings(max_examples=150, deadline=None)
@given(expressions, worlds)
def test_simplification_keeps_the_value(build: Build, envs: list[dict[str, int]]) -> None:
    symbolic = build(VARIABLES)
    for env in envs:
        assert evaluate(symbolic, env) == build(env)


@settings(max_examples=150, deadline=None)
@given(expressions, worlds)
def test_bounds_hold(build: Build, envs: list[dict[str, int]]) -> None:
    d = build(VARIABLES)
    (low, high), top = bounds(d), upper(d)
    if top is not None:
        assert not {s.key for s in symbols(top)} & {"i", "j", "k", "l", "n"}
    for env in envs:
        value = evaluate(d, env)
        assert (low is None or low <= value) and (high is None or value <= high)
        assert top is None or value <= evaluate(top, env)
        assert not is_nonnegative(d) or value >= 0


@settings(max_examples=150, deadline=None)
@given(expressions, expressions, worlds)
def test_comparisons_that_are_certain_hold(left: Build, right: Build, envs: list[dict[str, int]]) -> None:
    a, b = left(VARIABLES), right(VARIABLES)
    for env in envs:
        x, y = evaluate(a, env), evaluate(b, env)
        assert not is_less(a, b) or x < y
        assert not always_equal(a, b) or x == y
        assert not never_equal(a, b) or x != y


@settings(max_examples=100, deadline=None)
@given(expressions, expressions, expressions)
def test_equal_polynomials_are_equal_objects(f: Build, g: Build, h: Build) -> None:
    a, b, c = f(VARIABLES), g(VARIABLES), h(VARIABLES)
    assert a + b == b + a and a * b == b * a
    assert (a + b) + c == a + (b + c) and (a * b) * c == a * (b * c)
    assert a * (b + c) == a * b + a * c and a - a == 0
    assert hash(a * (b + c)) == hash(a * b + a * c)


@settings(max_examples=100, deadline=None)
@given(expressions, worlds, st.integers(0, 5), st.integers(1, 9))
def test_substitution(build: Build, envs: list[dict[str, int]], i: int, p: int) -> None:
    d = build(VARIABLES)
    (symbol,), (other,) = symbols(I), symbols(S)
    replaced = substitute(d, {symbol: i, other: P + 2 * J})
    assert not {symbol, other} & symbols(replaced)
    for env in envs:
        inner = {**env, "i": i, "s": env["p"] + 2 * env["j"]}
        assert evaluate(replaced, env) == evaluate(d, inner)


@settings(max_examples=100, deadline=None)
@given(expressions, st.integers(-9, 9), worlds)
def test_division_by_any_integer(build: Build, by: int, envs: list[dict[str, int]]) -> None:
    assume(by)
    d = build(VARIABLES)
    for env in envs:
        value = evaluate(d, env)
        assert evaluate(floordiv(d, by), env) == value // by
        assert evaluate(mod(d, by), env) == value % by
        if by > 0:
            assert evaluate(ceildiv(d, by), env) == -(-value // by)


def test_division_by_zero() -> None:
    for divide in (floordiv, mod):
        for a in (1, S):
            with pytest.raises(ZeroDivisionError):
                divide(a, 0)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ((S * 64 + 128) // 64, S + 2),
        ((I * 64 + J) // 64, I),
        ((I * 64 + J) % 64, J),
        ((K * 64 + J) // 64 % P, K),  # type: ignore[operator]
        ((S * P + K) // P, S),
        ((S * P + K) % P, K),
        ((S * P * 4 + L) // (P * 4), S),  # type: ignore[operator]
        ((S // 3) // 4, S // 12),
        ((S % 12) % 4, S % 4),
        (mod(J, 64), J),
        (floordiv(J, 64), 0),
        (maximum(S, 0), S),
        (maximum(S + 1, S), S + 1),
        (minimum(I, 5), I),
        (S * 0, 0),
        (S - S, 0),
        (prod([]), 1),
        (prod([2, S, 3]), S * 6),
        (ceildiv(S * 8, 4), S * 2),
        (1 - (1 - S), S),
        (5 + S - 5, S),
    ],
)
def test_what_must_simplify(got: Dim, expected: Dim) -> None:
    """Views of views become plain index arithmetic only if these do."""
    assert got == expected


def test_constants_are_plain_ints() -> None:
    for d in (S - S + 3, (S * 4) % 4, (J + 64) // 64, evaluate(S * S, {"s": 3})):
        assert isinstance(d, int) and not isinstance(d, Expr)


def test_comparisons_that_must_be_decided() -> None:
    assert is_less(K, P) and is_less(K * 4, P * 4) and is_less(I * 64 + J, 384)
    assert is_less(S, S + 1) and is_nonnegative(S * P) and not is_nonnegative(S - 1)
    assert not is_nonnegative(8 * S - S // (1 << 61))  # what it would follow from has too large a factor
    assert never_equal(S + 1, S) and never_equal(J, 64) and not never_equal(S, P)
    assert (
        is_nonnegative(S - S // 2) and is_nonnegative(S - S // 2 - S // 4) and not is_nonnegative(S - 2 * (S // 2) - 1)
    )
    assert is_less(K // 2, P) and is_less(J // 2, 32) and is_less(L // 4, P) and not is_less(P, K) and not is_less(S, P)


def test_greater_ones_that_differ_by_a_polynomial_are_one() -> None:
    x = S - P
    assert maximum(x, 0) - maximum(-x, 0) == x and S * maximum(x, 2) - S * maximum(2 - x, 0) == S * x
    assert maximum(S, P) + minimum(S, P) == S + P and maximum(S + 1, P + 1) - maximum(S, P) == 1
    held = maximum(S, P)
    assert maximum(S + held, P + held) + held == 3 * held and maximum(S + held, P + held) == maximum(S + held, P + held)


def test_bounds_of_what_is_less_a_greater_one() -> None:
    assert is_nonnegative(S + 1 - maximum(S, 1)) and not is_nonnegative(S - maximum(S, 1))
    assert minimum(S + maximum(S - 1, 0), 2 * S) == S + maximum(S - 1, 0)


def test_text() -> None:
    assert [str(d) for d in (S * 2 + 1, -S, S * P - 3, (S + 1) // 4, S % 4, maximum(S, P))] == [
        "2*s + 1", "-s", "p*s - 3", "((s + 1) // 4)", "(s % 4)", "max(s, p)",
    ]  # fmt: skip


def test_nested_remainders_recombine() -> None:
    """The address of an element whose index was taken apart from one flat position is that position."""
    x = expr.index("x", 6 * 5 * 4)
    assert expr.recombine(20 * (x // 20) + 4 * (x % 20 // 4) + x % 4) == x
    assert expr.recombine(3 * (x % 20 // 4) * 4 + 3 * (x % 4)) == 3 * (x % 20)
    y = x * 3  # no remainder of it is the whole
    assert expr.recombine(8 * (y // 4 % 5) + 2 * (y % 4)) == 2 * (y % 20)
    a, b = index("a", 8), index("b", 15)
    part = a * 15 + b  # a remainder by 5 forgets which part it is of
    assert expr.recombine(20 * (part // 20) + 5 * (part // 5 % 4) + part % 5) == part
