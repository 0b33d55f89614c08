"""The vector math headers against float64: error bounds in ULP, special values, tails, integers.

A tiny library with one loop per function is compiled for each instruction set that the header has a form
for (and this machine can run), and called through ctypes.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxc.codegen.cpp.headers import headers_of
from tests.native_library import native_library

WARNINGS = ["-Wall", "-Wextra", "-Werror"]

# Random bits hold signalling NaNs, of which numpy warns at each cast.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")

Array = NDArray[Any]
Reference = Callable[..., Array]


def _erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in x.tolist()])


# Function, reference in float64, bound in ULP of f32.
UNARY: dict[str, tuple[Reference, float]] = {
    "exp": (np.exp, 1.5),
    "log": (np.log, 2.0),
    "tanh": (np.tanh, 4.5),
    "erf": (_erf, 3.0),
    "sin": (np.sin, 2.0),
    "cos": (np.cos, 2.0),
    "tan": (np.tan, 2.0),
    "asin": (np.arcsin, 2.0),
    "acos": (np.arccos, 2.0),
    "atan": (np.arctan, 2.0),
    "sinh": (np.sinh, 3.0),
    "cosh": (np.cosh, 2.0),
    "asinh": (np.arcsinh, 2.0),
    "acosh": (np.arccosh, 2.0),
    "atanh": (np.arctanh, 3.0),
    "sqrt": (np.sqrt, 0.5),
}
# Function, reference in the type itself: equal to the bit (the sign of a NaN aside).
EXACT: dict[str, Reference] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "abs": np.abs,
    "neg": np.negative,
    "sign": lambda x: np.where(x == 0, 0, np.sign(x)),
}
BINARY = ("pow", "max", "min", "fmod", "mod", "copysign")
INTEGER_BINARY = ("pow", "max", "min", "fmod", "mod", "idiv")
INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")

UNARY_LOOP = """extern "C" void {t}_{f}(const {t} *x, {t} *r, i64 n) {{
  for (; n >= VL; n -= VL, x += VL, r += VL) st(r, v_{f}(ld(x)));
  if (n) stn(r, v_{f}(ldn(x, n)), n);
}}
"""
BINARY_LOOP = """extern "C" void {t}_{f}(const {t} *x, const {t} *y, {t} *r, i64 n) {{
  for (; n >= VL; n -= VL, x += VL, y += VL, r += VL) st(r, v_{f}(ld(x), ld(y)));
  if (n) stn(r, v_{f}(ldn(x, n), ldn(y, n)), n);
}}
"""


def _loops() -> list[str]:
    found = []
    for t in ("f32", "f64"):
        found += [UNARY_LOOP.format(t=t, f=f) for f in (*UNARY, *EXACT)]
        found += [BINARY_LOOP.format(t=t, f=f) for f in BINARY]
    for t in INTEGERS:
        found += [UNARY_LOOP.format(t=t, f=f) for f in ("abs", "sign")]
        found += [BINARY_LOOP.format(t=t, f=f) for f in INTEGER_BINARY]
    return found


def _source(loops: Sequence[str]) -> str:
    """The loops, and what they need: as a program has it."""
    headers = ["vmath.h", *sorted(headers_of("".join(loops)))]
    return "".join([*(f'#include "{name}"\n' for name in headers), 'extern "C" const int fused = OX_FMA;\n', *loops])


class Library:
    """The compiled loops: `lib("f32_exp", x)`, `lib("i8_mod", x, y)`."""

    def __init__(self, path: Path) -> None:
        self._dll = ctypes.CDLL(str(path))
        self.fused = bool(ctypes.c_int.in_dll(self._dll, "fused").value)
        """Whether the code has fused multiplies; without, errors are a little larger."""

    def __call__(self, name: str, *args: Array) -> Array:
        out = np.empty_like(args[0])
        self.fill(name, *args, out)
        return out

    def fill(self, name: str, *arrays: Array) -> None:
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        getattr(self._dll, name)(*pointers, ctypes.c_int64(arrays[0].size))


def _builds() -> dict[str, list[str]]:
    if platform.machine() != "x86_64":
        return {"native": ["-march=native"]}
    return {
        "native": ["-march=native"],
        "v3-vl8": ["-march=x86-64-v3", "-DONNXC_VL=8"],
        "baseline-vl4": ["-march=x86-64", "-DONNXC_VL=4"],
    }


def _runs_here(build: str) -> bool:
    if build != "v3-vl8":
        return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and {"avx2", "fma"} <= set(cpuinfo.read_text().split())


@pytest.fixture(scope="session", params=list(_builds()))
def lib(request: pytest.FixtureRequest, session_folder: Path) -> Library:
    """One library for each instruction set."""
    if not _runs_here(request.param):
        pytest.skip("this machine lacks AVX2")
    return Library(native_library(session_folder, _source(_loops()), [*WARNINGS, *_builds()[request.param]], ["-lm"]))


def _specials() -> NDArray[np.float32]:
    tiny = [1e-45, 1e-40, 1.17549435e-38, 1e-30, 1e-8, 1e-4]
    edges = [0.25, 0.5, 0.75, 0.99999994, 1.0, 1.0000001, 1.5, 2.0, 2.5, 3.0, 3.5, 3.9, 9.0, 17.0, 63.0, 64.0]
    large = [87.3, 88.0, 88.7228, 88.73, 103.9, 104.1, 127.0, 128.0, 149.5, 8388607.5, 8388609.0, 3.4e38]
    positive = np.array([0.0, *tiny, *edges, *large, np.inf, np.nan], np.float32)
    return np.concatenate([positive, -positive])


def _sweep(count: int = 120_000) -> NDArray[np.float32]:
    """Random bits (every exponent alike), ordinary ranges, specials; an odd length, so that tails run."""
    rng = np.random.default_rng(7)
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    ranges = [rng.uniform(-w, w, count // 4).astype(np.float32) for w in (0.5, 2, 10, 110, 1e4, 6e4)]
    near_one = 1 + rng.uniform(-1, 1, count // 4) * 2.0 ** rng.integers(-23, 0, count // 4)
    x = np.concatenate([_specials(), any_bits, *ranges, near_one.astype(np.float32)])
    return x if x.size % 2 else x[:-1]


def ulp_error(got: NDArray[np.float32], exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Error in units of the last place of `exact`, rounded to f32: 0 where both are the same NaN or infinity.

    What rounds to infinity counts as 2^128, so that an overflow one step early is an error of one ULP.
    """
    with np.errstate(all="ignore"):
        near = exact.astype(np.float32)
        step = np.exp2(np.maximum(np.frexp(np.clip(np.abs(exact), 1e-300, 3e38))[1] - 24, -149))
        wide = np.where(np.isinf(got), np.copysign(2.0**128, got), got.astype(np.float64))
        limit = np.where(np.isinf(near), np.copysign(2.0**128, near), exact)
        same = (np.isnan(got) & np.isnan(near)) | (got == near)
        error = np.where(same & ~np.isfinite(near), 0.0, np.abs(wide - limit) / step)
        return np.where(np.isnan(error), np.inf, error)


def _report(x: Array, got: Array, exact: Array, error: NDArray[np.float64]) -> str:
    i = int(np.argmax(error))
    return f"{error[i]:.2f} ULP at {x[i]!r}: {got[i]!r} for {exact[i]!r}"


def _reference(f: Reference, *args: Array) -> Array:
    with np.errstate(all="ignore"):
        return f(*args)


def _same(got: Array, exact: Array) -> None:
    """Equal, the sign of zeros included; any NaN equals any other."""
    np.testing.assert_array_equal(got, exact)
    comparable = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(got)[comparable], np.signbit(exact)[comparable])


@pytest.mark.parametrize("name", list(UNARY))
def test_f32_error_is_within_its_bound(lib: Library, name: str) -> None:
    f, bound = UNARY[name]
    bound *= 1.0 if lib.fused else 1.3
    x = _sweep()
    got, exact = lib(f"f32_{name}", x), _reference(f, x.astype(np.float64))
    error = ulp_error(got, exact)
    assert error.max() <= bound, _report(x, got, exact, error)


@pytest.mark.parametrize("name", list(UNARY))
def test_f32_error_next_to_where_forms_change(lib: Library, name: str) -> None:
    """Every float close to a limit, a change of columns, or a change of the result from normal to denormal."""
    f, bound = UNARY[name]
    bound *= 1.0 if lib.fused else 1.3
    exponentials = [87.0, 87.3365, 88.7228, 89.0, 103.2789, 103.9721, 104.0, 126.0, 128.0, 149.0, 150.0]
    others = [2.0**-126, 2.0**60, 2.0**127, 0.75, 1.5, 3.84, 3.87, 10000.0, 48000.0]
    edges = np.array([*exponentials, *others, *np.arange(1, 15) * 17 / 64, *np.arange(1, 31) / 8], np.float32)
    near = (edges.view(np.uint32)[:, None] + np.arange(-200, 200, dtype=np.int64)).astype(np.uint32)
    x = near.view(np.float32).ravel()
    x = np.concatenate([x, -x])
    got, exact = lib(f"f32_{name}", x), _reference(f, x.astype(np.float64))
    error = ulp_error(got, exact)
    assert error.max() <= bound, _report(x, got, exact, error)


@pytest.mark.parametrize("name", list(UNARY))
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_a_lane_depends_on_its_own_argument_alone(lib: Library, kind: str, name: str) -> None:
    """Functions have forms for vectors whose lanes are all ordinary; the others must not show which one ran."""
    x = _sweep(20_000).astype(np.float32 if kind == "f32" else np.float64)
    wide = np.array([1e6, 2.0**20 + 1, 1e15, 1e300, -1e300, 5e-310], np.float64)
    x = np.concatenate([x, np.tile(wide, 200)]) if kind == "f64" else x
    order = np.random.default_rng(9).permutation(x.size)
    alone = lib(f"{kind}_{name}", np.repeat(x, 16))[::16]
    _same(lib(f"{kind}_{name}", x[order]), alone[order])


@pytest.mark.parametrize("name", list(UNARY))
def test_f32_zeros_infinities_and_nans_are_exact(lib: Library, name: str) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    exact = _reference(UNARY[name][0], x.astype(np.float64)).astype(np.float32)
    _same(lib(f"f32_{name}", x), exact)
    _same(lib(f"f32_{name}", np.repeat(x, 16)), np.repeat(exact, 16))


@pytest.mark.parametrize("name", ["tanh", "erf", "sin", "cos"])
def test_f32_never_exceeds_one(lib: Library, name: str) -> None:
    x = np.linspace(0, 20, 2_000_001, dtype=np.float32)
    assert np.abs(lib(f"f32_{name}", x)).max() <= 1.0


def test_f32_of_every_saturated_tanh_and_erf_is_one(lib: Library) -> None:
    x = np.array([9.03, 9.5, 20.0, 1e30, np.inf], np.float32)
    for name in ("tanh", "erf"):
        np.testing.assert_array_equal(lib(f"f32_{name}", x), 1.0)
        np.testing.assert_array_equal(lib(f"f32_{name}", -x), -1.0)


@pytest.mark.parametrize("name", list(UNARY))
def test_f64_is_as_good_as_libm(lib: Library, name: str) -> None:
    x = np.concatenate([_specials(), _sweep(2000)]).astype(np.float64)
    exact = _reference(UNARY[name][0], x)
    np.testing.assert_allclose(lib(f"f64_{name}", x), exact, rtol=5e-15, atol=5e-324)


# Function, reference in a wider type, bound in ULP of f64.
WIDE: dict[str, tuple[Reference, float]] = {
    "exp": (np.exp, 1.1),
    "log": (np.log, 1.0),
    "tanh": (np.tanh, 2.7),
    "sin": (np.sin, 1.6),
    "cos": (np.cos, 1.6),
    "sqrt": (np.sqrt, 0.51),
}


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="this machine has no type wider than f64")
@pytest.mark.parametrize("name", list(WIDE))
def test_f64_error_is_within_its_bound(lib: Library, name: str) -> None:
    f, bound = WIDE[name]
    rng = np.random.default_rng(8)
    any_bits = rng.integers(0, 2**64, 100_000, dtype=np.uint64).view(np.float64)
    ranges = [rng.uniform(-w, w, 40_000) for w in (0.5, 2, 20, 760, 1e4)]
    near_one = 1 + rng.uniform(-1, 1, 40_000) * 2.0 ** rng.integers(-52, 0, 40_000)
    small = rng.uniform(-1, 1, 40_000) * 2.0 ** rng.integers(-1074, 0, 40_000)
    turns = np.round(rng.uniform(-6e5, 6e5, 40_000)) * (np.pi / 2)
    edges = [5e-324, 1e-310, 2.0**-1022, 709.78, 709.79, 745.13, 745.14, 746.1, 19.06, 19.07, 2.0**20, 2.0**20 + 1]
    special = [0.0, np.inf, np.nan, *edges]
    x = np.concatenate([special, np.negative(special), any_bits, *ranges, near_one, small, turns])
    if name in ("sin", "cos"):  # beyond, the wide type's own reduction is worse
        x = x[~(np.abs(x) > 2**21) | np.isinf(x)]
    with np.errstate(all="ignore"):
        exact = f(x.astype(np.longdouble))
        near = exact.astype(np.float64)
        step = np.ldexp(np.longdouble(1), np.maximum(np.frexp(np.clip(np.abs(near), 0, 1.7e308))[1] - 53, -1074))
        got = lib(f"f64_{name}", x)
        same = (np.isnan(got) & np.isnan(near)) | ((got == near) & ~np.isfinite(near))
        error = np.where(same, 0.0, np.abs(got.astype(np.longdouble) - exact) / step).astype(np.float64)
    error = np.where(np.isnan(error), np.inf, error)
    assert error.max() <= bound, _report(x, got, near, error)
    sure = ~np.isnan(near)
    np.testing.assert_array_equal(np.signbit(got)[sure], np.signbit(near)[sure])
    if name in ("tanh", "sin", "cos"):
        assert np.abs(got[sure]).max() <= 1


@pytest.mark.parametrize("name", list(EXACT))
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_rounding_and_signs_are_exact(lib: Library, name: str, kind: str) -> None:
    halves = np.arange(-40, 41) / 4
    large = [2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**51 + 0.5, 2.0**52 - 0.5, 2.0**53]
    x = np.concatenate([_sweep(4000), halves, large, np.negative(large)])
    x = x.astype(np.float32 if kind == "f32" else np.float64)
    exact = _reference(EXACT[name], x).astype(x.dtype)
    got = lib(f"{kind}_{name}", x)
    _same(got, exact)


def _pairs(dtype: type[np.floating[Any]]) -> tuple[Array, Array]:
    """Every pair of specials and small whole numbers, then random ones."""
    rng = np.random.default_rng(11)
    some = np.concatenate([_specials(), np.arange(-5, 6), [16777215.0, 16777216.0, 0.1, -0.1]])
    a, b = (v.ravel() for v in np.meshgrid(some, some))
    x = np.concatenate([a, rng.uniform(-50, 50, 3001), 2.0 ** rng.uniform(-140, 127, 3001)])
    y = np.concatenate([b, rng.integers(-9, 10, 3001), rng.uniform(-3, 3, 3001)])
    return x.astype(np.float32).astype(dtype), y.astype(np.float32).astype(dtype)


def test_f32_pow_error_and_special_values(lib: Library) -> None:
    x, y = _pairs(np.float32)
    got, exact = lib("f32_pow", x, y), _reference(np.power, x.astype(np.float64), y.astype(np.float64))
    error = ulp_error(got, exact)
    i = int(np.argmax(error))
    assert error.max() <= 1.0, (x[i], y[i], got[i], exact[i])
    comparable = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(got)[comparable], np.signbit(exact)[comparable])


def _maximum(x: Array, y: Array) -> Array:
    return np.where(np.isnan(x), x, np.where(x > y, x, y))


def _minimum(x: Array, y: Array) -> Array:
    return np.where(np.isnan(x), x, np.where(x < y, x, y))


FLOAT_BINARY: dict[str, Reference] = {
    "max": _maximum,
    "min": _minimum,
    "fmod": np.fmod,
    "mod": np.mod,
    "copysign": np.copysign,
}


@pytest.mark.parametrize("name", list(FLOAT_BINARY))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float_binary_is_exact(lib: Library, name: str, dtype: type[np.floating[Any]]) -> None:
    x, y = _pairs(dtype)
    kind = "f32" if dtype is np.float32 else "f64"
    _same(lib(f"{kind}_{name}", x, y), _reference(FLOAT_BINARY[name], x, y))


def test_f64_pow_is_that_of_libm(lib: Library) -> None:
    x, y = _pairs(np.float64)
    np.testing.assert_allclose(lib("f64_pow", x, y), _reference(np.power, x, y), rtol=5e-15, atol=5e-324)


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _power(x: int, y: int) -> int:
    if y >= 0:
        return pow(x, y, 2**64)
    return {1: 1, -1: 1 if y % 2 == 0 else -1}.get(x, 0)


INTEGER_REFERENCE: dict[str, Callable[[int, int], int]] = {
    "max": max,
    "min": min,
    "pow": _power,
    "idiv": _truncated,
    "fmod": lambda x, y: x - _truncated(x, y) * y,
    "mod": lambda x, y: x % y,
}


def _integers(kind: str, count: int = 4001) -> NDArray[np.integer[Any]]:
    dtype = np.dtype(kind[0] + str(int(kind[1:]) // 8))
    info = np.iinfo(dtype)
    rng = np.random.default_rng(3)
    edge = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, info.max // 3], dtype)
    small = rng.integers(max(info.min, -9), 10, count).astype(dtype)
    wide = rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    return np.concatenate([np.repeat(edge, edge.size), np.where(rng.random(count) < 0.5, small, wide)])


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_functions_are_exact_and_wrap(lib: Library, kind: str) -> None:
    x = _integers(kind)
    edges = np.tile(x[:100:10], 10)
    y = np.concatenate([edges, np.random.default_rng(5).permutation(x[100:])])
    keep = y != 0
    x, y = x[keep], y[keep]
    bits = int(kind[1:])
    for name, f in INTEGER_REFERENCE.items():
        exact = [f(a, b) % 2**bits for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        got = lib(f"{kind}_{name}", x, y).view(f"u{bits // 8}")
        np.testing.assert_array_equal(got, np.array(exact, got.dtype), err_msg=name)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(lib(f"{kind}_abs", x), np.abs(x))
    np.testing.assert_array_equal(lib(f"{kind}_sign", x), np.sign(x))


@pytest.mark.parametrize("digits", [51, 52, 53])  # up to 51 with AVX2, and 52 with AVX-512, they are divided as floats
@pytest.mark.parametrize("kind", ["i64", "u64"])
def test_quotients_next_to_whole_numbers_are_exact(lib: Library, kind: str, digits: int) -> None:
    rng = np.random.default_rng(6)
    y = rng.integers(1, 2 ** rng.integers(1, digits + 1, 40_000))
    x = np.clip(y * rng.integers(0, 2**digits // y + 1) + rng.integers(-1, 2, y.size), 0, 2**digits - 1)
    if kind == "i64":
        x, y = x * rng.choice([-1, 1], x.size), y * rng.choice([-1, 1], y.size)
    exact = np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))
    dtype = np.int64 if kind == "i64" else np.uint64
    got = lib(f"{kind}_idiv", x.astype(dtype), y.astype(dtype))
    np.testing.assert_array_equal(got, exact.astype(dtype))


@pytest.mark.parametrize(("kind", "exponents", "digits"), [("f32", (-149, 100), 23), ("f64", (-1074, 900), 52)])
def test_remainders_next_to_multiples_are_exact(
    lib: Library, kind: str, exponents: tuple[int, int], digits: int
) -> None:
    rng, dtype = np.random.default_rng(7), np.dtype(kind.replace("32", "4").replace("64", "8"))
    y = np.ldexp(rng.uniform(1, 2, 80_000), rng.integers(*exponents, 80_000)).astype(dtype)
    y = np.where(y == 0, dtype.type(1), y)
    x = (y * rng.integers(0, 2 ** rng.integers(1, digits, y.size)).astype(np.float64)).astype(dtype)
    whole = np.dtype(f"i{dtype.itemsize}")
    x = (x.view(whole) + rng.integers(-1, 2, x.size, dtype=whole)).clip(0).view(dtype)  # its neighbours
    x, y = x * rng.choice([-1, 1], x.size).astype(dtype), y * rng.choice([-1, 1], y.size).astype(dtype)
    with np.errstate(all="ignore"):
        _same(lib(f"{kind}_fmod", x, y), np.fmod(x, y))
        _same(lib(f"{kind}_mod", x, y), np.mod(x, y))


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_division_by_zero_does_not_trap(lib: Library, kind: str) -> None:
    x = _integers(kind)
    for name in ("idiv", "mod", "fmod"):
        lib(f"{kind}_{name}", x, np.zeros_like(x))


@pytest.mark.parametrize("count", range(40))
def test_tails_write_only_their_lanes(lib: Library, count: int) -> None:
    x = np.linspace(-3, 3, count, dtype=np.float32)
    out = np.full(count + 20, 7, np.float32)
    lib.fill("f32_exp", x, out)
    np.testing.assert_allclose(out[:count], np.exp(x), rtol=3e-7)
    assert (out[count:] == 7).all()
