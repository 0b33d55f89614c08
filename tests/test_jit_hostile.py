"""onnxc.jit: what must not be traced, leaks, errors; and the array: its operators, numbers, and sizes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc.array.core import Array, asarray, call
from onnxc.errors import InputError, OnnxcError, ShapeError, TraceError
from onnxc.frontends.trace import current

pytestmark = pytest.mark.usefixtures("no_trace_is_left")

f32 = np.float32
X = np.arange(6, dtype=f32).reshape(2, 3) - 2


# ---------------------------------------------------------------- hostile uses


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda x: 1 if x[0, 0] > 0 else 2, "bool.*onnxc.cond"),
        (lambda x: [k for k in range(3) if k == x[0, 0]], "bool.*onnxc.cond"),
        (lambda x: int(xp.sum(x)), "int.*static"),
        (lambda x: float(x[0, 0]), "float.*static"),
        (lambda x: list(range(xp.asarray(x[0, 0], dtype=xp.int64))), "index.*fori_loop"),
        (lambda x: np.sum(x), "numpy.*array_api"),
        (lambda x: np.cbrt(x), "cbrt.*array_api"),
        (lambda x: np.add.reduce(x), "add.reduce.*array_api"),
        (lambda x: np.asarray(x), "numpy.*array_api"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.item(), "item"),
        (lambda x: np.from_dlpack(x), "DLPack"),
        (lambda x: xp.nonzero(x), "nonzero"),
        (lambda x: xp.unique_values(x), "unique"),
        (lambda x: x[x > 0], "traced"),
    ],
)
def test_content_of_traced_arrays(quick, use, words):
    """The error names the line and what to use; nothing is left behind."""
    with pytest.raises((TraceError, TypeError), match=rf"(?s){words}") as caught:
        onnxc.jit(use)(X)
    assert "test_jit_hostile.py" in str(caught.value)


def test_constants_have_content(quick):
    @onnxc.jit
    def f(x):
        sizes = xp.asarray([1, 2]) * 2
        assert int(sizes[1]) == 4 and bool(sizes[0] == 2)
        return x * int(xp.sum(sizes))

    np.testing.assert_array_equal(f(X).numpy(), X * 6)


def test_leaks(quick, interpreted):
    kept = []

    @onnxc.jit
    def f(x):
        kept.append(x * 2)
        return x

    f(X)
    for use in (
        lambda: kept[0] + 1,
        lambda: onnxc.jit(lambda x: x + kept[0])(X),
        lambda: onnxc.jit(lambda x: x)(kept[0]),
    ):
        with pytest.raises(TraceError, match=r"multiply.*test_jit_hostile.py.*return it"):
            use()
    assert "traced" in repr(kept[0])


def test_leaks_out_of_a_body(quick):
    kept = []

    @onnxc.jit
    def f(x):
        def body(k, s):
            kept.append(s)
            return s + 1

        return onnxc.fori_loop(0, 3, body, x) + kept[0]

    with pytest.raises(TraceError, match="return it"):
        f(X)


def test_leaks_into_another_thread(quick):
    caught = []

    @onnxc.jit
    def f(x):
        def other():
            try:
                x + 1
            except TraceError as error:
                caught.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return x

    f(X)
    assert len(caught) == 1


def test_writes_to_arrays_of_outside(quick, interpreted):
    outside = xp.zeros((3,), dtype=xp.float32)

    def write(x):
        outside[0] = x[0, 0]
        return x

    with pytest.raises(TraceError, match="outside"):
        onnxc.jit(write)(X)

    def body(x):
        def step(k, s):
            x[0, 0] = 5.0
            return s

        return onnxc.fori_loop(0, 2, step, x)

    with pytest.raises(TraceError, match="outside"):
        onnxc.jit(body)(X)
    assert not outside.numpy().any()


def test_writes_inside(quick):
    @onnxc.jit
    def f(x):
        y = x
        x[0] = 9.0
        x += 1
        return y

    expected = X.copy()
    expected[0] = 9
    np.testing.assert_array_equal(f(X).numpy(), expected + 1)
    assert X[0, 0] == -2


def test_exceptions_leave_no_state(quick):
    class Mine(Exception):
        pass

    @onnxc.jit
    def f(x, fail):
        if fail.ndim:
            raise Mine
        return x + 1

    for _ in range(3):
        with pytest.raises(Mine):
            f(X, X)
        assert current() is None
        np.testing.assert_array_equal(f(X, 0).numpy(), X + 1)
    assert len(f.explain_recompiles()) == 1


def test_errors_name_the_function_and_line(quick):
    with pytest.raises(OnnxcError, match=r"(?s)\[2, 3\].*\[4\].*add.*test_jit_hostile.py:\d+"):
        onnxc.jit(lambda x: x + xp.ones((4,), dtype=xp.float32))(X)


def test_eager_errors_name_them_too(interpreted):
    with pytest.raises(OnnxcError, match=r"(?s)\[2, 3\].*\[4\].*add.*test_jit_hostile.py:\d+"):
        asarray(X) + xp.ones((4,), dtype=xp.float32)


def test_generators_and_other_results(quick):
    with pytest.raises(InputError, match="generator"):
        onnxc.jit(lambda x: (y for y in [x]))(X)


def test_zero_size_dims():
    f = onnxc.jit(lambda x: (xp.sum(x), x * 2, xp.mean(x, axis=1)))
    total, twice, mean = f(np.zeros((0, 3), f32))
    assert float(total) == 0 and twice.shape == (0, 3) and mean.shape == (0,)


def test_no_arguments(quick):
    assert onnxc.jit(lambda: xp.ones((2,)))().shape == (2,)
    assert onnxc.jit(lambda x: 5)(X) == 5


# ---------------------------------------------------------------- the array


def _twice(b, x, *, by):
    return b.mul(x, by)


def test_call_keeps_programs_by_static_arguments(interpreted):
    x = asarray(X)
    assert call(_twice, x, by=1).dtype == f32
    for by in (2, 2.0, 3, True):
        np.testing.assert_array_equal(call(_twice, x, by=by).numpy(), X * by)


def test_arrays_are_not_made_by_hand():
    with pytest.raises(InputError, match="asarray"):
        Array(X)
    with pytest.raises(TypeError):
        hash(asarray(X))
    with pytest.raises(TypeError):
        bool(asarray(X))


def test_eager_programs_are_bounded(interpreted, monkeypatch):
    from onnxc.array.eager import Programs

    monkeypatch.setattr("onnxc.array.eager.PROGRAMS", programs := Programs(2))
    programs.interpreted = True
    for n in range(5):
        call(_twice, np.zeros(n, f32), by=2.0)
    assert len(programs) == 2


def test_numpy_operators_leave_it_to_ours(interpreted):
    for found in (X + asarray(X), np.float32(2) * asarray(X), onnxc.jit(lambda x: np.add(X, x))(X)):
        assert isinstance(found, Array)
        np.testing.assert_array_equal(found.numpy(), X + X)
    np.testing.assert_allclose(
        onnxc.jit(lambda x: np.arctan2(x, X) ** 2)(X + 1).numpy(), np.arctan2(X + 1, X) ** 2, 1e-5
    )
    assert (asarray(X + 1) > X).numpy().all()
    with pytest.raises(TypeError):
        asarray(X) + "a"


def test_what_operators_make_of_numbers_alone_are_numbers(quick):
    def f(x, n, t):
        return x * (1 - 0.9**t), x / n**2, x + -n, n + 1, n / 2

    got = onnxc.jit(f)(X, 3, 2.0)
    for y, expected in zip(got, f(X, 3, 2.0), strict=True):
        np.testing.assert_allclose(y.numpy(), expected, 1e-6)
    assert [y.dtype for y in got] == [f32] * 3 + [np.int64, np.float64]
    y, z = onnxc.jit(lambda x, n: (x + np.float64(n.dtype.itemsize), x * (n + x.dtype.type(1))))(X.astype(float), 3)
    assert y.dtype == z.dtype == np.float64


def test_dynamic_sizes_beside_arrays(quick):
    @onnxc.jit(dynamic=True)
    def f(x):
        n = x.shape[0]
        arrays = x * n, n * x, n - x, xp.where(x > 0, x, n), xp.sum(x) / n
        return arrays, (xp.asarray(n), xp.full((2,), n), n + 1), x.shape

    for rows in (2, 5):
        x = np.arange(3 * rows, dtype=f32).reshape(rows, 3) - 2
        arrays, sizes, shape = f(x)
        wanted = x * rows, x * rows, rows - x, np.where(x > 0, x, rows), x.sum() / f32(rows)
        for y, expected in zip(arrays, wanted, strict=True):
            assert y.dtype == f32
            np.testing.assert_array_equal(y.numpy(), expected)
        assert [y.numpy().tolist() for y in (*sizes, *shape)] == [rows, [rows, rows], rows + 1, rows, 3]
    assert len(f.explain_recompiles()) == 1

    compare = onnxc.jit(lambda x: (x.shape[0] == x, x.shape[0] != x, xp.clip(x, 0, x.shape[0])), dynamic=True)
    for y, expected in zip(compare(x), (x == 5, x != 5, np.clip(x, 0, 5)), strict=True):
        np.testing.assert_array_equal(y.numpy(), expected)


def test_a_number_is_not_changed_in_place_and_has_powers_as_in_python(quick):
    def f(x, n):
        before, m = n, n
        n += 1
        m *= 0.5
        return before, n, m, x * before**-2

    for y, expected in zip(onnxc.jit(f)(X, 3), f(X, 3), strict=True):
        np.testing.assert_allclose(y.numpy(), expected, 1e-6)


def test_shape_errors_are_ours(quick):
    with pytest.raises(ShapeError):
        onnxc.jit(lambda x: call(_matmul, x, x))(X)


def _matmul(b, x, y):
    return b.matmul(x, y)


def test_keywords_are_told_apart_by_their_names_and_guarded_as_positions_are():
    scale = 1.0

    @onnxc.jit
    def f(a, b=None, c=None):
        return a * scale - (b if b is not None else 0) + (2 * c if c is not None else 0)

    x, y, z = (np.full(2, v, np.float32) for v in (1, 10, 100))
    for _ in range(2):  # the second time by what the first one left
        assert np.array_equal(f(x, y), [-9, -9])
        assert np.array_equal(f(x, b=y), [-9, -9])
        assert np.array_equal(f(x, c=y), [21, 21])
        assert np.array_equal(f(c=z, b=y, a=x), [191, 191])
        assert np.array_equal(f(b=y, a=x, c=z), [191, 191])
        assert np.array_equal(f(x, b=y, c=3.0), [-3, -3])
        assert np.array_equal(f(x, b=y[:1]), [-9, -9])
    count = len(f.explain_recompiles())
    f(a=x, c=z, b=y)
    assert len(f.explain_recompiles()) == count
    scale = 2.0
    assert np.array_equal(f(x, b=y), [-8, -8])
    with pytest.raises(TypeError):
        f(x, d=y)


def test_a_dynamic_keyword_of_size_one_is_broadcast():
    f = onnxc.jit(lambda a, b: a + b, dynamic=True)
    x = np.arange(4, dtype=np.float32)
    for other in (x, x, x[1:2], x[1:2], np.ones(4, np.float32)):
        assert np.array_equal(f(x, b=other), x + other)
        assert np.array_equal(f(b=other, a=x), x + other)
