"""`onnxc.array_api` against array-api-strict and numpy: names, signatures, values, and what a trace does."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc.array.core import Array
from onnxc.errors import InputError, OnnxcError, TraceError
from tests.array_api_cases import ALL, CASES, Case, flat, operands

VERSION = "2024.12"


@pytest.fixture(autouse=True)
def _version() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strict.set_array_api_strict_flags(api_version=VERSION)
    with np.errstate(all="ignore"):
        yield
    strict.reset_array_api_strict_flags()


# Names of array-api-strict that are no part of the standard.
_OWN = {
    "set_array_api_strict_flags", "get_array_api_strict_flags", "reset_array_api_strict_flags",
    "ArrayAPIStrictFlags", "Device", "__array_api_strict_version__", "__version__",
}  # fmt: skip


def _names(module: ModuleType) -> list[str]:
    return sorted(set(module.__all__) - _OWN)


@pytest.mark.parametrize("extension", [None, "linalg", "fft"])
def test_every_name_is_there_with_its_parameters(extension: str | None) -> None:
    theirs, ours = (m if extension is None else getattr(m, extension) for m in (strict, xp))
    missing = [n for n in _names(theirs) if not hasattr(ours, n)]
    newer = {"eig", "eigvals", "broadcast_shapes", "isin"}  # of 2025.12
    assert set(missing) <= newer
    for name in set(_names(theirs)) - newer:
        f = getattr(theirs, name)
        if inspect.isfunction(f):
            wanted = [p for p in inspect.signature(f).parameters.values() if p.name not in ("kwargs", "_")]
            given = inspect.signature(getattr(ours, name)).parameters
            assert [p.name for p in wanted] == [p for p in given if p != "_"], name
            assert all(p.kind == given[p.name].kind for p in wanted), name


def _compare(result: Any, expected: Any, where: str, loose: float = 1.0) -> None:
    found, wanted = flat(result), flat(expected)
    assert len(found) == len(wanted), where
    for a, b in zip(found, wanted, strict=True):
        x, y = np.asarray(a.numpy() if isinstance(a, Array) else a), np.asarray(b)
        assert x.dtype == y.dtype, f"{where}: {x.dtype}, not {y.dtype}"
        assert x.shape == y.shape, f"{where}: {x.shape}, not {y.shape}"
        if x.dtype.kind in "fc":
            eps = float(np.finfo(x.dtype).eps)
            size = max(1.0, float(np.max(np.abs(y[np.isfinite(y)]), initial=0.0)))
            np.testing.assert_allclose(x, y, rtol=64 * eps * loose, atol=8 * eps * size * loose, err_msg=where)
            if x.dtype.kind == "f" and not where.startswith("clip"):  # of -0.0 and 0.0 none is greater
                zeros = (y == 0) & (x == 0)
                assert (np.signbit(x) == np.signbit(y))[zeros].all(), f"{where}: signs of zeros"
        else:
            np.testing.assert_array_equal(x, y, err_msg=where)


def _expected(case: Case, dtype: str) -> Any:
    arrays = [strict.asarray(a) for a in operands(dtype, case.special)]
    return case.run(strict, *arrays)


@pytest.mark.parametrize("dtype", ALL)
def test_values(dtype: str, interpreted: None) -> None:
    """Every function for every dtype, in numpy's meaning of the primitives."""
    for case in CASES:
        if dtype in case.dtypes:
            arrays = [xp.asarray(a) for a in operands(dtype, case.special)]
            _compare(case.run(xp, *arrays), _expected(case, dtype), f"{case.name} of {dtype}")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32", "float64", "complex64"])
def test_values_of_compiled_functions(dtype: str) -> None:
    """As many functions as one program computes."""
    cases = [c for c in CASES if dtype in c.dtypes]
    for special in (False, True):
        group = [c for c in cases if c.special == special]
        arrays = [xp.asarray(a) for a in operands(dtype, special)]
        if not group:
            continue
        found = onnxc.jit(lambda x, y, i, group=group: [flat(c.run(xp, x, y, i)) for c in group])(*arrays)
        for case, result in zip(group, found, strict=True):
            _compare(result, _expected(case, dtype), f"{case.name} of {dtype}")


# ---------------------------------------------------------------- indexing

KEYS: list[Any] = [
    2, -1, slice(1, None), slice(None, None, -1), slice(4, 0, -2), slice(5, 2), (1, 2), (slice(None), 0), (..., 1),
    (None, 1, ..., None), (slice(1, 3), slice(None, None, 3), -2), (), ..., None, (0, slice(0, 0)),
]  # fmt: skip
ARRAYS: list[Any] = [
    np.array([2, 0, 0]), (np.array([1, 2]), np.array([-1, 3])), (slice(None), np.array([[1], [2]])),
    (1, np.array([0, 3])), (np.array([0, 1]), slice(1, 4), np.array([2, 0])), (np.array([0]), ..., 1),
    (np.array(2), slice(None), np.array([1, 1])), (slice(None), np.array([2, 0, 4]), ..., 1),
    (None, slice(None), np.array([[2], [0]]), ..., np.array([1, 3])), (slice(1, None), 4, ..., np.array([1, 3])),
]  # fmt: skip


def _ours(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_ours, key))
    return xp.asarray(key) if isinstance(key, np.ndarray) else key


@pytest.mark.parametrize("key", KEYS + ARRAYS, ids=str)
def test_indices_read_and_write_as_in_numpy(key: Any, interpreted: None) -> None:
    data = np.arange(3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
    _compare(xp.asarray(data)[_ours(key)], data[key], "getitem")
    for value in (np.float32(-1), -np.arange(data[key].size, dtype=np.float32).reshape(data[key].shape)):
        mine, theirs = xp.asarray(data.copy()), data.copy()
        if data[key].size and len({*np.arange(60).reshape(data.shape)[key].ravel()}) < data[key].size:
            value = value.ravel()[0]  # which of two values for one place stays is open
        mine[_ours(key)] = xp.asarray(value)
        theirs[key] = value
        _compare(mine, theirs, "setitem")


def test_masks_read_and_write_as_in_numpy(interpreted: None) -> None:
    data = np.arange(15, dtype=np.int32).reshape(3, 5)
    for mask in (data % 2 == 0, np.array([True, False, True]), np.array(True), np.zeros((3, 5), bool)):
        _compare(xp.asarray(data)[xp.asarray(mask)], data[mask], "getitem")
        for value in (np.int32(-1), -data[mask]):
            mine, theirs = xp.asarray(data.copy()), data.copy()
            mine[xp.asarray(mask)] = xp.asarray(value)
            theirs[mask] = value
            _compare(mine, theirs, "setitem")
    for shape in ((0,), (0, 5), (3, 0)):  # 0 fits any size, and selects nothing
        mine, nothing = xp.asarray(data), xp.zeros(shape, dtype=xp.bool)
        _compare(mine[nothing], np.zeros((0, *data.shape[len(shape) :]), np.int32), "getitem")
        mine[nothing] = xp.asarray(np.int32(-1))
        _compare(mine, data, "setitem")
    with pytest.raises(IndexError):
        xp.asarray(data)[xp.zeros((0, 4), dtype=xp.bool)]


@pytest.mark.parametrize("key", [3, -4, (0, 5), (0, 0, 0), (..., ...), "x", 1.5, (np.array([1.0]),)], ids=str)
def test_indices_that_do_not_fit(key: Any) -> None:
    with pytest.raises(IndexError):
        xp.zeros((3, 5))[_ours(key)]


def test_writing_changes_one_array_alone() -> None:
    source = np.zeros(3)
    x = xp.asarray(source)
    y = x[1:]
    x[1] = 7.0
    x += 1
    assert list(source) == [0, 0, 0] and list(y.numpy()) == [0, 0] and list(x.numpy()) == [1, 8, 1]


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("first", ALL)
def test_promotion(first: str) -> None:
    x = (xp.zeros(2, dtype=first), strict.zeros(2, dtype=getattr(strict, first)))
    for second in ALL:
        y = (xp.zeros(2, dtype=second), strict.zeros(2, dtype=getattr(strict, second)))
        try:
            wanted = strict.result_type(x[1], y[1])
        except TypeError:
            with pytest.raises(TypeError, match=r"do not mix|is no dtype"):
                xp.result_type(x[0], y[0])
        else:
            assert xp.result_type(x[0], y[0]).name == str(wanted).rpartition(".")[2]
    for number in (True, 1, 1.0, 1j):
        try:
            wanted = strict.result_type(x[1], number)
        except TypeError:
            with pytest.raises(TypeError, match="does not fit"):
                xp.result_type(x[0], number)
        else:
            assert xp.result_type(x[0], number).name == str(wanted).rpartition(".")[2]


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(OverflowError, match="300 does not fit uint8"):
        xp.zeros(2, dtype=xp.uint8) + 300
    with pytest.raises(TypeError, match=r"the number 1\.5 does not fit an array of int32"):
        xp.zeros(2, dtype=xp.int32) + 1.5
    with pytest.raises(TypeError, match="no dtype of the array API standard"):
        xp.zeros(2, dtype="float16")


# ---------------------------------------------------------------- decompositions


def _spectrum(n: int, complex_: bool, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, n + 2, n)) + (1j * rng.normal(size=(2, n + 2, n)) if complex_ else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_decompositions(n: int, dtype: str, interpreted: None) -> None:
    """Products of the factors, and that they are orthonormal; also of matrices that have not full rank."""
    tall = _spectrum(n, dtype.startswith("c"), n).astype(dtype)
    tall[1, :, -1] = tall[1, :, 0]
    eps = float(np.finfo(dtype).eps)
    size = float(np.linalg.norm(tall, 2, axis=(-2, -1)).max())

    def near(a: Any, b: Any, scale: float = 1.0) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=40 * eps * n * scale)

    for x in (tall, np.swapaxes(tall, -1, -2)):
        k = min(x.shape[-2:])
        for full in (False, True):
            u, s, vh = (a.numpy() for a in xp.linalg.svd(xp.asarray(x), full_matrices=full))
            near(u[..., :k] * s[:, None, :] @ vh[..., :k, :], x, size)
            near(np.conj(np.swapaxes(u, -1, -2)) @ u, np.eye(u.shape[-1])[None] + 0 * u[:, :1, :1])
            near(vh @ np.conj(np.swapaxes(vh, -1, -2)), np.eye(vh.shape[-2])[None] + 0 * u[:, :1, :1])
            near(s, np.linalg.svd(x)[1], size)
        for mode in ("reduced", "complete"):
            q, r = (a.numpy() for a in xp.linalg.qr(xp.asarray(x), mode=mode))
            near(q @ r, x, size)
            near(np.conj(np.swapaxes(q, -1, -2)) @ q, np.eye(q.shape[-1])[None] + 0 * q[:, :1, :1])
            assert not np.tril(r, -1).any()
    h = np.conj(np.swapaxes(tall, -1, -2)) @ tall
    w, v = (a.numpy() for a in xp.linalg.eigh(xp.asarray(h)))
    near(v * w[:, None, :] @ np.conj(np.swapaxes(v, -1, -2)), h, size**2)
    near(w, np.linalg.eigvalsh(h), size**2)
    assert list(xp.linalg.matrix_rank(xp.asarray(tall)).numpy()) == [n, max(n - 1, 1)]


def test_matrices_of_nothing(interpreted: None) -> None:
    for shape in ((0, 0), (2, 0, 0)):
        x = xp.zeros(shape)
        assert (xp.linalg.det(x).numpy() == 1).all() and xp.linalg.inv(x).shape == shape
        assert xp.linalg.svd(x).S.shape == shape[:-1] and xp.linalg.eigh(x).eigenvalues.shape == shape[:-1]
    q, r = xp.linalg.qr(xp.zeros((3, 0)), mode="complete")
    assert (q.numpy() == np.eye(3)).all() and r.shape == (3, 0)


def test_matrices_without_an_inverse(interpreted: None) -> None:
    x = xp.asarray([[1.0, 2.0], [2.0, 4.0]])
    assert float(xp.linalg.det(x)) == 0 and float(xp.linalg.slogdet(x).logabsdet) == -np.inf
    assert not np.isfinite(xp.linalg.inv(x).numpy()).all()
    assert np.isnan(xp.linalg.cholesky(-x).numpy()).any()


@pytest.mark.parametrize("n", [1, 2, 7, 12, 30, 97])
def test_transforms_of_every_length(n: int, interpreted: None) -> None:
    rng = np.random.default_rng(n)
    z = rng.normal(size=(3, 11)) + 1j * rng.normal(size=(3, 11))
    for norm in ("backward", "ortho", "forward"):
        for name in ("fft", "ifft", "irfft", "hfft"):
            found, wanted = getattr(xp.fft, name)(xp.asarray(z), n=n, norm=norm), getattr(np.fft, name)(z, n, norm=norm)
            np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-12, err_msg=name)
        for name in ("rfft", "ihfft"):
            found, wanted = (
                getattr(xp.fft, name)(xp.asarray(z.real), n=n, norm=norm),
                getattr(np.fft, name)(z.real, n, norm=norm),
            )
            np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-12, err_msg=name)


# ---------------------------------------------------------------- what depends on data


DEPENDENT = {
    "nonzero": lambda x, k: xp.nonzero(x),
    "unique_all": lambda x, k: xp.unique_all(x),
    "unique_counts": lambda x, k: xp.unique_counts(x),
    "unique_inverse": lambda x, k: xp.unique_inverse(x),
    "unique_values": lambda x, k: xp.unique_values(x),
    "repeat": lambda x, k: xp.repeat(x, k),
    "x[mask]": lambda x, k: x[x > 1],
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_shapes_that_depend_on_data(name: str) -> None:
    """They are computed outside of a trace, and of what is known in one."""
    f, x, k = DEPENDENT[name], np.array([3, 1, 0, 3]), np.array([0, 2, 1, 1])
    with pytest.raises(TraceError, match="which is computed later"):
        onnxc.jit(f)(xp.asarray(x), xp.asarray(k))
    expected = {"repeat": np.repeat(x, k), "x[mask]": x[x > 1], "nonzero": np.nonzero(x)}
    _compare(f(xp.asarray(x), xp.asarray(k)), expected.get(name, _unique(name, x)), name)
    known = onnxc.jit(lambda y: [y + 1, f(xp.asarray(x), xp.asarray(k))])(xp.asarray(x))[1]
    if name != "x[mask]":  # its mask is computed in the trace
        _compare(known, expected.get(name, _unique(name, x)), name)


def _unique(name: str, x: np.ndarray) -> Any:
    return getattr(strict, name)(strict.asarray(x)) if name.startswith("unique") else None


def test_dynamic_dims() -> None:
    @onnxc.jit(dynamic={"x": [0]})
    def f(x: Array) -> Any:
        n = x.shape[0]
        steps = xp.astype(xp.arange(n), xp.float64)
        return [
            xp.reshape(x, (n * 2, -1)), x[1:-1, ::-1], xp.roll(x, 1, axis=0), x + steps[:, None], xp.flip(x, axis=0),
            xp.var(x, axis=0, correction=1), xp.concat([x, xp.zeros((n, 1))], axis=1), xp.cumulative_sum(x, axis=0),
            xp.sort(x, axis=0), xp.tile(x, (2, 1)), xp.repeat(x, 2, axis=0), xp.linalg.vector_norm(x),
            xp.eye(n, 4, k=1), xp.linspace(-1, 2, n), xp.linspace(0, 1, 2 * n, endpoint=False),
        ]  # fmt: skip

    for n in (5, 3, 8):
        x = np.random.default_rng(n).normal(size=(n, 4))
        wanted = [
            x.reshape(n * 2, -1), x[1:-1, ::-1], np.roll(x, 1, 0), x + np.arange(n)[:, None], x[::-1],
            x.var(0, ddof=1), np.concatenate([x, np.zeros((n, 1))], 1), x.cumsum(0), np.sort(x, 0), np.tile(x, (2, 1)),
            np.repeat(x, 2, 0), np.asarray(np.linalg.norm(x)),
            np.eye(n, 4, 1), np.linspace(-1, 2, n), np.linspace(0, 1, 2 * n, endpoint=False),
        ]  # fmt: skip
        _compare(f(xp.asarray(x)), wanted, f"n = {n}")
    assert len(f.explain_recompiles()) == 1


def test_products_of_complex_numbers_along_dynamic_axes() -> None:
    @onnxc.jit(dynamic=True)
    def f(x: Array) -> Any:
        return xp.prod(x), xp.prod(x, axis=1, keepdims=True), xp.cumulative_prod(x, axis=0)

    slope = onnxc.jit(onnxc.grad(lambda t: xp.real(xp.prod(xp.exp(1j * t) * t))), dynamic=True)
    for n in (3, 2, 5):
        real, imaginary = np.random.default_rng(n).normal(size=(2, n, 4))
        x = real + 1j * imaginary
        _compare(f(x), [np.asarray(x.prod()), x.prod(1, keepdims=True), x.cumprod(0)], f"n = {n}")
        t = real[:, 0]
        whole = np.prod(np.exp(1j * t) * t)  # its logarithm's derivative is the sum of i + 1 / t
        np.testing.assert_allclose(slope(t).numpy(), np.real(whole * (1j + 1 / t)), rtol=1e-10)
    assert len(f.explain_recompiles()) == 1


_BESIDE: dict[str, tuple[Any, Any, list[tuple[Any, ...]]]] = {  # a function, numpy's, and shapes: those that fit first
    "vecdot": (
        lambda x, y: xp.vecdot(x, y, axis=-2), lambda x, y: (x * y).sum(-2),
        [((2, 3, 4), (3, 4)), ((2, 3, 4), (5, 4)), ((2, 3, 4), (1, 4)), ((2, 1, 4), (3, 4))],
    ),
    "tensordot": (
        xp.tensordot, np.tensordot,
        [((2, 3, 4), (3, 4, 5)), ((2, 3, 4), (4, 3, 5)), ((2, 3, 4), (2, 6, 5)), ((2, 3, 4), (3, 1, 5))],
    ),
    "scan": (
        lambda x, y: onnxc.scan(lambda s, row: (s + row[0] * row[1], s), 0.0, (x, y))[0], lambda x, y: np.dot(x, y),
        [((3,), (3,)), ((3,), (4,)), ((3,), (1,)), ((1,), (3,))],
    ),
    "scan of a length": (
        lambda x, y: onnxc.scan(lambda s, row: (s + row, s), 0.0, x, length=5)[0], lambda x, y: x.sum(),
        [((5,), (2,)), ((3,), (2,)), ((7,), (2,))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _BESIDE)
def test_dynamic_sizes_that_have_to_be_equal(name: str) -> None:
    """Each has a symbol of its own: a call tells whether they are."""
    f, wanted, (fitting, *others) = _BESIDE[name]
    compiled = onnxc.jit(f, dynamic=True)
    arrays = [np.random.default_rng(0).normal(size=shape) for shape in fitting]
    np.testing.assert_allclose(compiled(*arrays).numpy(), wanted(*arrays))
    for shapes in others:
        with pytest.raises((InputError, ValueError), match=r"steps, and|sizes"):
            compiled(*map(np.ones, shapes))


def _shifted(x: Array) -> Array:
    y = xp.asarray(x, copy=True)
    y[1:] = x[:-1]
    return y


def test_dynamic_sizes_that_a_call_compares() -> None:
    f = onnxc.jit(lambda x: xp.reshape(x, (2, -1)), dynamic=True)
    for n in (6, 8):
        np.testing.assert_array_equal(f(np.arange(n)).numpy(), np.arange(n).reshape(2, -1))
    shift = onnxc.jit(_shifted, dynamic=True)
    for n in (5, 1, 2):
        np.testing.assert_array_equal(shift(np.arange(n)).numpy(), [0, *range(n - 1)])
    with pytest.raises(InputError, match="elements differ"):
        f(np.arange(5))


# ---------------------------------------------------------------- the rest


def test_namespace_of_arrays() -> None:
    x = xp.zeros(3)
    assert x.__array_namespace__() is xp and x.__array_namespace__(api_version="2023.12") is xp
    with pytest.raises(ValueError, match="version"):
        x.__array_namespace__(api_version="1999.01")
    info = xp.__array_namespace_info__()
    assert info.dtypes(kind="real floating") == {"float32": xp.float32, "float64": xp.float64}
    assert info.default_dtypes()["integral"] == xp.int64


def test_exchange_with_numpy_and_devices() -> None:
    source = np.arange(4.0)
    x = xp.from_dlpack(source)
    assert np.shares_memory(x.numpy(), source) and (np.from_dlpack(x) == source).all()
    assert not np.shares_memory(xp.asarray(source, copy=True).numpy(), source)
    with pytest.raises(ValueError, match="by a copy only"):
        xp.asarray([1, 2], copy=False)
    with pytest.raises(InputError, match="the only device"):
        xp.zeros(3, device="cuda")


def test_lists_of_traced_arrays() -> None:
    f = onnxc.jit(lambda x: xp.asarray([[x[0], 2.0], [3.0, x[1]]]))
    assert f(xp.asarray([1.0, 4.0])).numpy().tolist() == [[1, 2], [3, 4]]


def test_the_page_lists_every_name() -> None:
    page = (Path(__file__).parent.parent / "docs/array-api.md").read_text()
    told = set(re.findall(r"`(\w+)`", page))
    names = {n for m in (xp, xp.linalg, xp.fft) for n in m.__all__}
    assert names <= told
    section = page.partition("## Shapes that depend on data")[2].partition("\n## ")[0]
    assert set(DEPENDENT) - {"x[mask]"} <= set(re.findall(r"`(\w+)\(x", section))


# ---------------------------------------------------------------- derivatives


def _written_to(x: Array) -> Array:
    y = x * 2
    y[0, 1:] = x[1, 1:] * 3
    y[:, 0] += 1.0
    return xp.sum(y * y)


DIFFERENTIATED = {
    "linalg": lambda x: xp.linalg.det(x) + xp.sum(xp.linalg.inv(x) ** 2) + xp.sum(xp.linalg.qr(x).R ** 3),
    "complex": lambda x: xp.sum(xp.abs(xp.fft.fft(x)) ** 3 + xp.real(xp.log(x + 1j)) * xp.imag(xp.exp(x * 1j))),
    "written to": _written_to,
    "running": lambda x: xp.sum(xp.cumulative_prod(x, axis=1) * xp.sort(x, axis=0)),
    "two": lambda x: xp.sum(xp.atan2(x, x.T + 4) + xp.hypot(x, x.T) + xp.logaddexp(x, x.T)),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives(name: str) -> None:
    """By differences, of one random direction."""
    f, rng = DIFFERENTIATED[name], np.random.default_rng(3)
    x, d = rng.normal(size=(2, 3, 3))
    found = float(np.sum(onnxc.grad(f)(xp.asarray(x)).numpy() * d))
    g = onnxc.jit(f)
    up, down = (float(g(xp.asarray(x + s * 1e-6 * d))) for s in (1, -1))
    assert found == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-6)


def _held_by_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: xp.ceil(None), "ceil: the argument x is None, and has to be an array"),
        (lambda x: xp.sum(x, axis="a"), "sum: the argument axis is the str 'a', and has to be int, a tuple"),
        (lambda x: xp.fft.fftfreq(None), "fftfreq: the argument n is None, and has to be int"),
        (lambda x: xp.linalg.outer(x, [1]), "outer: the argument x2 is the list"),
        (lambda x: xp.stack([x, None]), "stack: the argument arrays is the list"),
        (lambda x: xp.reshape(x, (1 << 70,)), "reshape"),
        (lambda x: xp.add(x), r"add\(\) missing 1 required positional argument: 'x2'"),
        (lambda x: xp.from_dlpack(3), "from_dlpack"),
        (lambda x: xp.tril(x[:, None], k=float("nan")), "tril: the argument k is the float nan, and has to be int"),
        (lambda x: xp.fft.rfftfreq(3, d=0), "rfftfreq: samples at the distance zero"),
        (lambda x: xp.asarray(_held_by_itself()), "asarray: the lists are too deep"),
    ],
)
def test_arguments_of_wrong_types(call: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        call(xp.zeros(3))


def test_differences_beside_arrays_of_numpy(interpreted: None) -> None:
    ends = {"prepend": np.zeros(1), "append": np.ones(1)}
    np.testing.assert_array_equal(xp.diff(np.arange(3.0), **ends).numpy(), np.diff(np.arange(3.0), **ends))


def test_differences_end_where_nothing_is_left() -> None:
    assert xp.diff(xp.zeros(3), n=1 << 40).shape == (0,)


def test_namespaces_show_what_is_in_the_standard() -> None:
    for space in (xp, xp.linalg, xp.fft):
        assert dir(space) == sorted(space.__all__)


def _called(name: str) -> None:
    """A call of the function that fails in the ops that it is made of, or at run time."""
    a, b = xp.ones((2, 3)), xp.ones((4, 5))
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: a + b,
        "concat": lambda: xp.concat([a, b]),
        "where": lambda: xp.where(a > 0, a, b),
        "take": lambda: xp.take(a, xp.asarray([9]), axis=0),
        "tile": lambda: xp.tile(a, (-1,)),
        "floor_divide": lambda: xp.floor_divide(xp.asarray([1]), xp.asarray([0])),
        "pinv": lambda: xp.linalg.pinv(xp.ones(3)),
        "all": lambda: onnxc.jit(lambda x: xp.all(x + b))(a),
        "matmul": lambda: onnxc.jit(lambda x: x @ b)(a),
    }
    calls[name]()


@pytest.mark.parametrize(
    ("name", "called"),
    [(n, n) for n in ("add", "concat", "where", "take", "tile", "floor_divide", "pinv", "matmul")] + [("all", "add")],
)
def test_errors_begin_with_the_function_that_was_called(name: str, called: str) -> None:
    with pytest.raises(OnnxcError, match=rf"^{called}\b") as caught:
        _called(name)
    assert str(caught.value).count(f"{called}: ") <= 1
    assert str(caught.value).startswith(caught.value.args[0])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", ["acos", "acosh", "asin", "asinh", "atan", "atanh"])
def test_inverse_functions_of_the_greatest_and_least_complex_numbers(name: str, dtype: str, interpreted: None) -> None:
    parts = [0.0, -0.0, 1.0, -2.5, 1e30, -1e30, np.inf, -np.inf, np.nan, 1e-40, 3e38]
    x = np.array([complex(re, im) for re in parts for im in parts], dtype)
    found, expected = getattr(xp, name)(xp.asarray(x)).numpy(), getattr(np, "arc" + name[1:])(x)
    for part in ("real", "imag"):  # the sign beside a NaN is open
        a, b = getattr(found, part), getattr(expected, part)
        open_sign = np.isnan(found.real) | np.isnan(found.imag)
        a, b = (np.where(open_sign, np.abs(v), v) for v in (a, b))
        least = np.finfo(dtype)
        np.testing.assert_allclose(a, b, rtol=16 * least.eps, atol=least.tiny, err_msg=part)


def test_ints_of_numpy_are_ints(interpreted: None) -> None:
    x, one = xp.asarray(np.arange(12.0).reshape(3, 4)), np.int64(1)
    assert xp.arange(np.int64(6), None, np.int32(2)).dtype == np.int64
    for found, expected in (
        (xp.roll(x, one), xp.roll(x, 1)),
        (xp.roll(x, (one, 2), axis=(0, 1)), xp.roll(x, (1, 2), axis=(0, 1))),
        (xp.linalg.diagonal(x, offset=one), xp.linalg.diagonal(x, offset=1)),
        (xp.tensordot(x, x.T, axes=one), xp.tensordot(x, x.T, axes=1)),
        (xp.fft.fft(x, n=np.int32(5)), xp.fft.fft(x, n=5)),
    ):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_numbers_are_written_as_those_of_numpy() -> None:
    x = xp.asarray(1.25)
    assert f"{x:.1f} {xp.asarray(7):03d} {xp.ones(2)}" == "1.2 007 Array([1., 1.], dtype=float64)"
    with pytest.raises(TypeError, match="without axes"):
        f"{xp.ones(2):.1f}"
    with pytest.raises(TypeError):
        [1, 2][xp.asarray(True)]
