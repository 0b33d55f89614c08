"""Calls of the array API standard that any of its implementations can run: what `onnxc.array_api` is compared on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
REALS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
NUMERIC = INTEGERS + REALS + COMPLEX
ALL = ("bool", *NUMERIC)


@dataclass(frozen=True)
class Case:
    """A call: `run(xp, x, y, i)` of two matrices [3, 5] of one dtype and an int64 vector [4] of positions below 3."""

    name: str
    dtypes: tuple[str, ...]
    run: Callable[[Any, Any, Any, Any], Any]
    special: bool = True  # whether NaN, infinities and -0.0 are among the operands


def operands(dtype: str, special: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a case."""
    rng = np.random.default_rng(7)
    found = []
    for seed in range(2):
        if dtype == "bool":
            x = rng.integers(0, 2, (3, 5)).astype(bool)
        elif dtype in INTEGERS:
            x = rng.integers(0 if dtype[0] == "u" else -6, 7, (3, 5)).astype(dtype)
            x[0, seed] = np.iinfo(dtype).max
        else:
            x = rng.normal(size=(3, 5)) * 3
            x = (x + 1j * rng.normal(size=(3, 5)) if dtype in COMPLEX else x).astype(dtype)
            if special and dtype in REALS:
                x[0] = [[0.0, -0.0, np.inf, -np.inf, np.nan], [-0.0, 0.0, 2.5, -np.inf, 1.0]][seed]
        found.append(x)
    return found[0], found[1], np.array([2, 0, 1, 2])


def _unary(dtypes: tuple[str, ...], *names: str) -> Iterator[Case]:
    for name in names:
        yield Case(name, dtypes, lambda xp, x, y, i, name=name: getattr(xp, name)(x))  # type: ignore[misc]


def _binary(dtypes: tuple[str, ...], *names: str) -> Iterator[Case]:
    for name in names:
        yield Case(name, dtypes, lambda xp, x, y, i, name=name: getattr(xp, name)(x, y))  # type: ignore[misc]


def _along(dtypes: tuple[str, ...], *names: str, special: bool = True) -> Iterator[Case]:
    for name in names:
        for options in ({}, {"axis": 0}, {"axis": 1, "keepdims": True}):
            yield Case(
                name, dtypes,
                lambda xp, x, y, i, name=name, options=options: getattr(xp, name)(x, **options), special,  # type: ignore[misc]
            )  # fmt: skip


def _pointwise() -> Iterator[Case]:
    floats, ordered, bits = REALS + COMPLEX, INTEGERS + REALS, ("bool", *INTEGERS)
    yield from _unary(
        floats, "exp", "log", "log2", "log10", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        "tanh", "asinh", "acosh", "atanh", "expm1", "log1p", "reciprocal",
    )  # fmt: skip
    yield from _unary(NUMERIC, "abs", "negative", "positive", "square", "sign", "isnan", "isinf", "isfinite", "round")
    yield from _unary(COMPLEX, "conj", "real", "imag")
    yield from _unary(ordered, "floor", "ceil", "trunc")
    yield from _unary(bits, "bitwise_invert")
    yield from _unary(REALS, "signbit")
    yield from _unary(("bool",), "logical_not")
    yield from _binary(NUMERIC, "add", "subtract", "multiply")
    yield from _binary(floats, "divide")
    yield from _binary(ALL, "equal", "not_equal")
    yield from _binary(ordered, "less", "less_equal", "greater", "greater_equal", "maximum", "minimum")
    yield from _binary(REALS, "atan2", "hypot", "logaddexp", "copysign", "nextafter", "remainder")
    yield Case("floor_divide", REALS, lambda xp, x, y, i: xp.floor_divide(x, y), False)
    yield from _binary(bits, "bitwise_and", "bitwise_or", "bitwise_xor")
    yield from _binary(("bool",), "logical_and", "logical_or", "logical_xor")
    yield Case("pow", INTEGERS, lambda xp, x, y, i: xp.pow(x, xp.astype(y != 0, x.dtype) * 5))
    yield Case("pow", floats, lambda xp, x, y, i: xp.pow(x, 3.0), False)
    yield Case("pow", floats, lambda xp, x, y, i: xp.pow(xp.abs(x) if x.dtype != y.dtype else x * x, 1.5), False)
    for name in ("floor_divide", "remainder"):
        yield Case(name, INTEGERS, lambda xp, x, y, i, name=name: getattr(xp, name)(x, xp.where(y == 0, 3, y)))  # type: ignore[misc]
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        yield Case(name, INTEGERS, lambda xp, x, y, i, name=name: getattr(xp, name)(x, xp.where(y == 1, y, 3)))  # type: ignore[misc]
    yield Case("clip", ordered, lambda xp, x, y, i: xp.clip(x, 1, 4))
    yield Case("clip", REALS, lambda xp, x, y, i: xp.clip(x, min=y))
    yield Case("where", ALL, lambda xp, x, y, i: xp.where(x == y, x, y))
    yield Case("operators", INTEGERS, lambda xp, x, y, i: 3 - x + y * 2)
    yield Case("operators", floats, lambda xp, x, y, i: (2.0 / x - 1) ** 2)


def _shapes() -> Iterator[Case]:
    yield Case("reshape", ALL, lambda xp, x, y, i: xp.reshape(x, (5, -1)))
    yield Case("permute_dims", ALL, lambda xp, x, y, i: xp.permute_dims(x, (1, 0)))
    yield Case("moveaxis", ALL, lambda xp, x, y, i: xp.moveaxis(xp.stack([x, y]), 0, -1))
    yield Case("concat", ALL, lambda xp, x, y, i: xp.concat([x, y], axis=-1))
    yield Case("concat", ALL, lambda xp, x, y, i: xp.concat([x, y], axis=None))
    yield Case("stack", ALL, lambda xp, x, y, i: xp.stack([x, y], axis=1))
    yield Case("unstack", ALL, lambda xp, x, y, i: xp.unstack(x, axis=1))
    yield Case("expand_dims", ALL, lambda xp, x, y, i: xp.expand_dims(x, axis=1))
    yield Case("squeeze", ALL, lambda xp, x, y, i: xp.squeeze(x[:1, :], axis=0))
    yield Case("flip", ALL, lambda xp, x, y, i: [xp.flip(x), xp.flip(x, axis=1)])
    yield Case("roll", ALL, lambda xp, x, y, i: [xp.roll(x, 7), xp.roll(x, (1, -2), axis=(0, 1))])
    yield Case("repeat", ALL, lambda xp, x, y, i: [xp.repeat(x, 2), xp.repeat(x, 3, axis=0)])
    yield Case("tile", ALL, lambda xp, x, y, i: [xp.tile(x, (2, 1, 3)), xp.tile(x, (2,))])
    yield Case("broadcast_to", ALL, lambda xp, x, y, i: xp.broadcast_to(x[:, :1], (2, 3, 5)))
    yield Case("broadcast_arrays", ALL, lambda xp, x, y, i: xp.broadcast_arrays(x[:, :1], y[:1, :]))
    yield Case("meshgrid", ALL, lambda xp, x, y, i: xp.meshgrid(x[0, :], y[:, 0]))
    yield Case("tril", ALL, lambda xp, x, y, i: [xp.tril(x, k=1), xp.triu(x)])
    yield Case("take", ALL, lambda xp, x, y, i: xp.take(x, i, axis=0))
    yield Case("take_along_axis", ALL, lambda xp, x, y, i: xp.take_along_axis(x, i[:2, None], axis=0))
    yield Case("getitem", ALL, lambda xp, x, y, i: [x[1, ::-2], x[..., None, 2], x[-2:, 1:4:2], x[2, 3]])
    yield Case("full_like", ALL, lambda xp, x, y, i: [xp.full_like(x, 1), xp.zeros_like(x), xp.ones_like(y)])
    yield Case("astype", ALL, lambda xp, x, y, i: xp.astype(x, xp.complex128))
    yield Case(
        "astype", ("bool", *INTEGERS, *REALS), lambda xp, x, y, i: [xp.astype(x, xp.bool), xp.astype(x == y, x.dtype)]
    )


def _reduced() -> Iterator[Case]:
    ordered = INTEGERS + REALS
    yield from _along(NUMERIC, "sum", "prod")
    yield from _along(ordered, "max", "min")
    yield from _along(REALS, "mean", "std", "var")
    yield from _along(ALL, "all", "any", "count_nonzero")
    yield from _along(ordered, "argmax", "argmin", special=False)
    for name in ("cumulative_sum", "cumulative_prod"):
        for first in (False, True):
            yield Case(
                name, NUMERIC,
                lambda xp, x, y, i, name=name, first=first: getattr(xp, name)(x, axis=1, include_initial=first),  # type: ignore[misc]
                False,
            )  # fmt: skip
    yield Case("var", REALS, lambda xp, x, y, i: xp.var(x, axis=1, correction=1.5), False)
    yield Case("diff", NUMERIC, lambda xp, x, y, i: xp.diff(x, axis=0, n=2, prepend=y[:1, :]), False)
    yield Case("sort", ordered, lambda xp, x, y, i: [xp.sort(x), xp.sort(x, axis=0, descending=True)], False)
    yield Case("argsort", ordered, lambda xp, x, y, i: [xp.argsort(x), xp.argsort(x, axis=0)], False)
    yield Case(
        "searchsorted", ordered,
        lambda xp, x, y, i: [xp.searchsorted(xp.sort(x[0, :]), y, side=s) for s in ("left", "right")], False,
    )  # fmt: skip


def _products() -> Iterator[Case]:
    yield Case(
        "matmul", NUMERIC, lambda xp, x, y, i: [x @ y.mT, xp.matmul(x, y[0, :]), xp.matmul(x[0, :], y.mT)], False
    )
    yield Case("tensordot", NUMERIC, lambda xp, x, y, i: [xp.tensordot(x, y), xp.tensordot(x, y.T, axes=1)], False)
    yield Case("vecdot", NUMERIC, lambda xp, x, y, i: xp.vecdot(x, y), False)
    yield Case("matrix_transpose", ALL, lambda xp, x, y, i: xp.matrix_transpose(x))
    yield Case("linalg.outer", NUMERIC, lambda xp, x, y, i: xp.linalg.outer(x[0, :], y[:, 0]), False)
    yield Case("linalg.cross", NUMERIC, lambda xp, x, y, i: xp.linalg.cross(x, y, axis=-2), False)
    yield Case("linalg.trace", NUMERIC, lambda xp, x, y, i: xp.linalg.trace(x, offset=1), False)
    yield Case("linalg.diagonal", ALL, lambda xp, x, y, i: xp.linalg.diagonal(x, offset=-1))


def _matrices() -> Iterator[Case]:
    """Of small matrices with an inverse: x y* + 9, and 3 by 3."""

    def square(xp: Any, x: Any, y: Any) -> Any:
        return x[:, :3] @ xp.conj(y[:, :3].mT) + xp.astype(9 * xp.eye(3), x.dtype)

    floats = REALS + COMPLEX
    for name in ("det", "inv", "slogdet", "eigvalsh", "matrix_rank", "svdvals", "pinv", "matrix_norm", "cholesky"):

        def run(xp: Any, x: Any, y: Any, i: Any, name: str = name) -> Any:
            other = x if name in ("eigvalsh", "cholesky") else y
            return getattr(xp.linalg, name)(square(xp, x, other))

        yield Case(f"linalg.{name}", floats, run, False)
    yield Case("linalg.solve", floats, lambda xp, x, y, i: xp.linalg.solve(square(xp, x, y), x), False)
    yield Case("linalg.matrix_power", floats, lambda xp, x, y, i: xp.linalg.matrix_power(square(xp, x, y), -3), False)
    yield Case("linalg.pinv", floats, lambda xp, x, y, i: xp.linalg.pinv(x), False)
    yield Case("linalg.vector_norm", floats, lambda xp, x, y, i: xp.linalg.vector_norm(x, axis=1, ord=3), False)
    yield Case(
        "linalg.matrix_norm", floats,
        lambda xp, x, y, i: [xp.linalg.matrix_norm(x, ord=o) for o in ("nuc", 1, -1, 2, -2, xp.inf)], False,
    )  # fmt: skip


def _transforms() -> Iterator[Case]:
    for name in ("fft", "ifft", "fftn", "ifftn"):
        yield Case(f"fft.{name}", COMPLEX, lambda xp, x, y, i, name=name: getattr(xp.fft, name)(x), False)  # type: ignore[misc]
    for name in ("irfft", "hfft", "irfftn"):
        yield Case(f"fft.{name}", COMPLEX, lambda xp, x, y, i, name=name: getattr(xp.fft, name)(x), False)  # type: ignore[misc]
    for name in ("rfft", "ihfft", "rfftn"):
        yield Case(f"fft.{name}", REALS, lambda xp, x, y, i, name=name: getattr(xp.fft, name)(x), False)  # type: ignore[misc]
    yield Case("fft.fft", COMPLEX, lambda xp, x, y, i: xp.fft.fft(x, n=7, axis=0, norm="ortho"), False)
    yield Case("fft.fftshift", COMPLEX, lambda xp, x, y, i: [xp.fft.fftshift(x), xp.fft.ifftshift(x, axes=1)], False)


CASES = [*_pointwise(), *_shapes(), *_reduced(), *_products(), *_matrices(), *_transforms()]


def flat(result: Any) -> list[Any]:
    """The arrays of a result."""
    if isinstance(result, (tuple, list)):
        return [a for r in result for a in flat(r)]
    return [result]
