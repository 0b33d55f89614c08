"""onnxc.jit: programs by structure, trees, dynamic dims, guards; and what must not be traced."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
import threading

import numpy as np
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc.array.core import asarray
from onnxc.errors import InputError, OnnxcError, RunError

pytestmark = pytest.mark.usefixtures("no_trace_is_left")

f32 = np.float32
X = np.arange(6, dtype=f32).reshape(2, 3) - 2


# ---------------------------------------------------------------- compiled


def test_compiled_and_eager_agree():
    def f(x, w, *, scale):
        hidden = xp.tanh(x @ w + 1)
        return {"sum": xp.sum(hidden, axis=0), "both": (hidden * scale, xp.max(hidden))}

    w = np.random.default_rng(0).standard_normal((3, 5)).astype(f32)
    expected = np.tanh(X @ w + 1)
    for g in (f, onnxc.jit(f)):
        found = g(asarray(X), asarray(w), scale=0.5)
        np.testing.assert_allclose(found["sum"].numpy(), expected.sum(0), rtol=1e-5)
        np.testing.assert_allclose(found["both"][0].numpy(), expected / 2, rtol=1e-5)
        assert found["both"][0].dtype == f32
        np.testing.assert_allclose(found["both"][1].numpy(), expected.max(), rtol=1e-6)


def test_kernels_cite_the_line():
    f = onnxc.jit(lambda x: xp.exp(x) - 1)
    f(X)
    ((program,),) = f._programs.values()
    origins = [s for k in program.run.__self__.explain().kernels for s in k.origins]
    assert any("test_jit.py" in str(getattr(s, "line", s)) for s in origins)


def test_an_error_of_the_run_names_the_line():
    f = onnxc.jit(lambda x, k: xp.take(x, k, axis=0))
    with pytest.raises(RunError, match="take"):
        f(X, np.array([0, 9]))


def test_plain_python_and_numpy_come_in():
    f = onnxc.jit(lambda x, n: xp.asarray(x) * n)
    np.testing.assert_array_equal(f(X, 3).numpy(), X * 3)
    np.testing.assert_array_equal(f(X[:, ::-1], np.float32(2)).numpy(), X[:, ::-1] * 2)
    assert f(X, 2.5).dtype == f32  # a number counts less than an array
    assert f(np.arange(3), np.int64(2)).dtype == np.int64


def test_call_is_short():
    """A call of known shapes looks nothing up but its program: what it runs is counted, not timed."""
    f = onnxc.jit(lambda x: x + 1)
    f(X)
    f._arguments = None  # the long way would need it
    np.testing.assert_array_equal(f(X).numpy(), X + 1)
    np.testing.assert_array_equal(f(asarray(X)).numpy(), X + 1)


# ---------------------------------------------------------------- trees

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Layer:
    w: object
    b: object = None
    name: str = dataclasses.field(default="layer", metadata={"static": True})

    def __post_init__(self):
        assert isinstance(self.name, str)


def test_trees(quick):
    @onnxc.jit
    def f(tree):
        layer = tree["layers"][0]
        assert isinstance(layer, Layer) and isinstance(tree["p"], Point)
        return Layer(layer.w * 2, None, layer.name + "'"), Point(tree["p"].y, [tree["none"], tree["p"].x])

    layer, point = f({"layers": [Layer(X, None, "first")], "p": Point(X + 1, X - 1), "none": None})
    assert layer.name == "first'" and layer.b is None
    np.testing.assert_array_equal(layer.w.numpy(), X * 2)
    np.testing.assert_array_equal(point.x.numpy(), X - 1)
    assert point.y[0] is None
    f({"layers": [Layer(X, None, "second")], "p": Point(X + 1, X - 1), "none": None})
    assert len(f.explain_recompiles()) == 2  # what is static is another program


def test_order_of_a_dict_does_not_matter(quick):
    f = onnxc.jit(lambda d: d["a"] - d["b"])
    np.testing.assert_array_equal(f({"a": X, "b": X + 1}).numpy(), -np.ones_like(X))
    np.testing.assert_array_equal(f({"b": X + 1, "a": X}).numpy(), -np.ones_like(X))
    assert len(f.explain_recompiles()) == 1


def test_results_that_are_no_arrays(quick):
    f = onnxc.jit(lambda x: {"n": 3, "s": "text", "x": x, "none": None, "np": X, "empty": ()})
    found = f(X)
    assert (found["n"], found["s"], found["none"], found["empty"]) == (3, "text", None, ())
    np.testing.assert_array_equal(found["np"].numpy(), X)
    with pytest.raises(InputError, match=r"result\['f'\].*builtin_function"):
        onnxc.jit(lambda x: {"f": len})(X)


@pytest.mark.parametrize(
    ("argument", "place"),
    [
        ({"a": ["text"]}, r"tree\['a'\]\[0\].*str"),
        ([X, object()], r"tree\[1\].*object"),
        (np.array(["a"]), "tree.*strings"),
        (2**70, "tree.*integers that no dtype holds"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), "tree.*masked"),
    ],
)
def test_arguments_that_are_no_arrays(quick, argument, place):
    with pytest.raises(InputError, match=place):
        onnxc.jit(lambda tree: 1)(argument)


def test_masks_are_not_lost():
    """Where numpy's arrays are operands, too."""
    x, masked = xp.asarray([1.0, 2.0]), np.ma.array([0, 1], mask=[0, 1])
    for use in (lambda: x + masked, lambda: xp.where(masked, x, x), lambda: x[masked]):
        with pytest.raises(InputError, match="masked"):
            use()


# ---------------------------------------------------------------- one program for each structure


def test_recompiles_say_why(quick):
    f = onnxc.jit(lambda x, n=None, *, flag=False: x * 2, static_argnames="flag")
    f(X), f(X + 1), f(X[:1]), f(X.astype(np.float64)), f(X, flag=True), f(X, 1), f(X, 2), f(X, X)
    reasons = [str(r) for r in f.explain_recompiles()]
    assert reasons == [
        "0: the first call",
        "1: x: float32[2, 3] -> float32[1, 3]",
        "2: x: float32[2, 3] -> float64[2, 3]",
        "3: flag: static True is new",
        "4: n: int64 number is new",
        "5: n: int64 number -> float32[2, 3]",
    ]
    assert repr(f).endswith("6 programs>")


def test_programs_are_bounded(quick):
    f = onnxc.jit(lambda x: x + 1, most_programs=np.int64(3))
    for n in [1, 2, 3, 4, 5, 1]:
        assert f(np.zeros(n, f32)).shape == (n,)
    assert len(f._programs) == len(f._shortcuts) == 3
    assert len(f.explain_recompiles()) == 6
    f.clear()
    assert not f._programs


def test_trees_without_an_end(quick):
    held = [X]
    held.append(held)
    for f in (onnxc.jit(lambda tree: tree[0]), onnxc.jit(lambda x: held)):
        with pytest.raises(InputError, match="it may hold itself"):
            f(held)


def test_trees_take_a_shortcut(quick):
    f = onnxc.jit(lambda t, n=1: t["a"] * n + t["b"][0])
    for n in (2, 2.5, 3):
        np.testing.assert_array_equal(f({"a": X, "b": [X]}, n).numpy(), X * n + X)
    assert len(f.explain_recompiles()) == 2
    bind, f._arguments = f._arguments, None  # the long way would need it
    np.testing.assert_array_equal(f({"a": X, "b": [asarray(X)]}, 7).numpy(), X * 8)
    f._arguments = bind
    np.testing.assert_array_equal(f({"a": X[:1], "b": [X[:1]]}, n=3).numpy(), X[:1] * 4)


def test_static_arguments_take_a_shortcut(quick):
    f = onnxc.jit(lambda x, n, *, how=0: x * n + how, static_argnums=1, static_argnames="how")
    for n, how in ((2, 0), (2.0, 0), (2, 1)):
        np.testing.assert_array_equal(f(X, n, how=how).numpy(), X * n + how)
    f._arguments = None  # the long way would need it
    np.testing.assert_array_equal(f(X + 1, 2, how=1).numpy(), X * 2 + 3)
    np.testing.assert_array_equal(f(X + 1, 2.0, how=0).numpy(), X * 2 + 2)


def test_static_arguments(quick):
    @functools.partial(onnxc.jit, static_argnums=(1,), static_argnames=("axis",))
    def f(x, how, *, axis=0):
        return xp.sum(x, axis=axis) if how == "sum" else x[: len(how)]

    assert f(X, "sum").shape == (3,)
    assert f(X, how="sum", axis=1).shape == (2,)
    assert f(X, "a").shape == (1, 3)
    with pytest.raises(InputError, match=r"'how'.*hashed"):
        f(X, ["a"])
    # equal objects of other types are other programs
    g = onnxc.jit(lambda x, n: x if n is True else x * n, static_argnums=-1)
    assert [int(g(np.arange(3), n)[2]) for n in (1, True, 1.0 * 2 == 2)] == [2, 2, 2]
    assert len(g.explain_recompiles()) == 2


@dataclasses.dataclass(frozen=True)
class _Config:
    n: object


@dataclasses.dataclass(frozen=True)
class _Layer:
    w: object
    n: object = dataclasses.field(metadata={"static": True})


def test_equal_objects_that_hold_other_types_are_other_programs(quick):
    def by(n):
        return 2 if n is True else 3 if isinstance(n, float) else 5

    f = onnxc.jit(lambda x, config: x * by(config.n), static_argnums=1)
    g = onnxc.jit(lambda layer: layer.w * by(layer.n))
    h = onnxc.jit(lambda x, held: x * sum(map(by, held)), static_argnums=1)
    for _ in range(2):
        for n in (1, True, 1.0):
            for found in (f(X, _Config(n)), g(_Layer(X, n)), h(X, frozenset([n]))):
                np.testing.assert_array_equal(found.numpy(), X * by(n))
    assert len(f.explain_recompiles()) == len(g.explain_recompiles()) == len(h.explain_recompiles()) == 3
    sign = onnxc.jit(lambda x, n: x * float(np.copysign(1, n)), static_argnums=1)
    assert [float(sign(f32(1), f32(n))) for n in (0.0, -0.0)] == [1, -1]
    nan = onnxc.jit(lambda x, n: x, static_argnums=1)
    assert all(nan(X, f32("nan")).shape == X.shape for _ in range(3)) and len(nan.explain_recompiles()) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 2},
        {"static_argnums": "x"},
        {"static_argnums": 1.5},
        {"static_argnums": (0, True)},
        {"static_argnums": None},
        {"static_argnames": "z"},
        {"static_argnames": 3},
        {"speed": "high"},
        {"most_programs": 0},
        {"most_programs": float("nan")},
        {"most_programs": True},
        {"model": None},
        {"dynamic": 5},
        {"dynamic": {"x": "ab"}},
        {"dynamic": {"x": [float("nan")]}},
        {"dynamic": {"x": {0: 5}}},
    ],
)
def test_wrong_options(options):
    with pytest.raises(InputError, match=next(iter(options))):
        onnxc.jit(lambda x, y: x, **options)
    with pytest.raises(InputError, match="functions"):
        onnxc.jit(3)


@onnxc.jit
def doubled(x):
    return x * 2


def test_a_jitted_function_is_copied_as_functions_are():
    assert copy.deepcopy({"f": doubled})["f"] is doubled and pickle.loads(pickle.dumps(doubled)) is doubled


def test_rest_arguments(quick):
    f = onnxc.jit(lambda *xs, **named: sum(xs) - named["last"])
    np.testing.assert_array_equal(f(X, X, X, last=X).numpy(), X * 2)
    with pytest.raises(InputError, match=r"xs\[1\]"):
        f(X, "a", last=X)


def test_methods(quick):
    class Model:
        def __init__(self):
            self.w = X

        @functools.partial(onnxc.jit, static_argnums=0)
        def apply(self, x):
            return x + self.w

    np.testing.assert_array_equal(Model().apply(X).numpy(), X + X)


# ---------------------------------------------------------------- dynamic dims


def test_dynamic_dims_compile_once():
    @functools.partial(onnxc.jit, dynamic={"x": {0: "n"}, "y": {-1: "n"}})
    def f(x, y):
        assert not isinstance(x.shape[0], int)
        return (y @ x) / x.shape[1], xp.sum(xp.concat([x, x]), axis=0)

    rng = np.random.default_rng(1)
    for n in (5, 1, 17, 0):
        x, y = rng.standard_normal((n, 3)), rng.standard_normal((2, n))
        a, b = f(x, y)
        np.testing.assert_allclose(a.numpy(), y @ x / 3, atol=1e-12)
        np.testing.assert_allclose(b.numpy(), 2 * x.sum(0), atol=1e-12)
    assert len(f.explain_recompiles()) == 1
    with pytest.raises(OnnxcError):
        f(x, rng.standard_normal((2, 7)))


def test_dynamic_everything(quick):
    f = onnxc.jit(lambda t: t["a"] * 2 + t["b"], dynamic=True)
    for n, m in ((2, 3), (5, 7), (2, 9)):
        x = np.ones((n, m), f32)
        np.testing.assert_array_equal(f({"a": x, "b": x[:1]}).numpy(), 3 * x)
    assert len(f.explain_recompiles()) == 1


def test_a_dim_of_one_meets_an_open_one():
    f = onnxc.jit(lambda x, y: x + y, dynamic={"x": 0, "y": 0})
    for n, m in ((3, 3), (3, 1), (1, 4), (4, 4), (3, 1)):
        x, y = np.ones((n, 2), f32), np.arange(m * 2, dtype=f32).reshape(m, 2)
        np.testing.assert_array_equal(f(x, y).numpy(), x + y)
    assert len(f.explain_recompiles()) == 3


def test_wrong_dynamic(quick):
    with pytest.raises(InputError, match="'z'"):
        onnxc.jit(lambda x: x, dynamic={"z": 0})(X)
    with pytest.raises(InputError, match="axis 2"):
        onnxc.jit(lambda x: x, dynamic={0: 2})(X)


def test_sizes_that_do_not_fit_are_named_as_the_function_does():
    f = onnxc.jit(lambda table, y0: table["w"] + y0, dynamic={"table": {0: "n", 1: "n"}})
    with pytest.raises(InputError, match=r"'table.w'.*\[n, n\].* dim 1 \(n\)"):
        f({"w": X}, 1.0)
    assert f({"w": X @ X.T}, 1.0).shape == (2, 2)


# ---------------------------------------------------------------- what a function reads from outside

FACTOR = 2.0
TABLE = asarray(np.ones(3, f32))


def _helper(x):
    return x * FACTOR


def test_a_changed_global_is_another_program(quick, monkeypatch):
    f = onnxc.jit(lambda x: _helper(x) + TABLE)
    np.testing.assert_array_equal(f(X).numpy(), X * 2 + 1)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    np.testing.assert_array_equal(f(X).numpy(), X * 3 + 1)
    monkeypatch.setitem(globals(), "TABLE", asarray(np.full(3, 5, f32)))
    np.testing.assert_array_equal(f(X).numpy(), X * 3 + 5)
    assert "FACTOR (outside): 2.0 -> 3.0" in str(f.explain_recompiles()[1])


def test_a_changed_closure_is_another_program(quick):
    scale, w = 1.0, asarray(np.ones(3, f32))
    f = onnxc.jit(lambda x: x * scale + w)
    np.testing.assert_array_equal(f(X).numpy(), X + 1)
    scale = 2.0
    np.testing.assert_array_equal(f(X).numpy(), X * 2 + 1)
    w[0] = 7.0  # in place
    np.testing.assert_array_equal(f(X).numpy(), X * 2 + np.array([7, 1, 1], f32))


def test_a_changed_function_is_another_program(quick, monkeypatch):
    f = onnxc.jit(lambda x: _helper(x))
    np.testing.assert_array_equal(f(X).numpy(), X * FACTOR)
    monkeypatch.setitem(globals(), "_helper", lambda x: x - FACTOR)
    np.testing.assert_array_equal(f(X).numpy(), X - FACTOR)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    np.testing.assert_array_equal(f(X).numpy(), X - 4)
    monkeypatch.setitem(globals(), "FACTOR", float("4"))  # equal, and another object
    for _ in range(2):
        np.testing.assert_array_equal(f(X).numpy(), X - 4)
    assert len(f.explain_recompiles()) == 3


def _times(k, x):
    return x * k


def test_what_is_replaced_of_any_kind_is_another_program(quick):
    part, inner, pair, table = functools.partial(_times, 2.0), onnxc.jit(lambda x: x * 2), (2.0, 0), {"k": 2.0}
    f = onnxc.jit(lambda x: (part(x), inner(x), x * pair[0], x * table["k"]))
    for k in (2, 3):
        for found in (*f(X), *f(X)):
            np.testing.assert_array_equal(found.numpy(), X * k)
        part, inner, pair, table = functools.partial(_times, 3.0), onnxc.jit(lambda x: x * 3), (3.0, 0), {"k": 3.0}
    assert len(f.explain_recompiles()) == 2


def test_names_of_attributes_are_no_names_outside(quick, monkeypatch):
    monkeypatch.setitem(globals(), "w", 1.0)
    f = onnxc.jit(lambda layer: layer.w * 2)
    f(_Layer(X, 1))
    monkeypatch.setitem(globals(), "w", 2.0)
    f(_Layer(X, 1))
    assert len(f.explain_recompiles()) == 1


# ---------------------------------------------------------------- nesting, threads


def test_nested(quick):
    inner = onnxc.jit(lambda x, n: x * n, static_argnums=1)
    outer = onnxc.jit(lambda x: inner(x, 3) + inner(x, 4))
    np.testing.assert_array_equal(outer(X).numpy(), X * 7)
    assert not inner.explain_recompiles()


def test_nested_functions_write_to_their_own_arguments(quick):
    @onnxc.jit
    def inner(x):
        x[0] = 9.0
        return x

    own = X.copy()
    outer = onnxc.jit(lambda x: (x, inner(x), inner(own)))
    first, second, third = outer(X)
    np.testing.assert_array_equal(first.numpy(), X)
    assert (second.numpy()[0] == 9).all() and (third.numpy()[0] == 9).all()
    np.testing.assert_array_equal(own, X)


def test_recursion(quick):
    @functools.partial(onnxc.jit, static_argnums=1)
    def power(x, n):
        return xp.ones_like(x) if n == 0 else x * power(x, n - 1)

    np.testing.assert_array_equal(power(X, 4).numpy(), X**4)

    @onnxc.jit
    def endless(x):
        return endless(x)

    with pytest.raises(RecursionError):
        endless(X)


def test_threads_trace_at_once(quick):
    barrier = threading.Barrier(2, timeout=30)
    found = {}

    def run(k):
        def f(x):
            barrier.wait()
            y = x + k
            barrier.wait()
            return y * 2

        found[k] = onnxc.jit(f)(X).numpy()

    threads = [threading.Thread(target=run, args=(k,)) for k in (1, 2)]
    [t.start() for t in threads], [t.join() for t in threads]
    for k in (1, 2):
        np.testing.assert_array_equal(found[k], (X + k) * 2)


def test_one_function_in_many_threads():
    f = onnxc.jit(lambda x: xp.sum(x * x))
    errors = []

    def run(n):
        for k in range(20):
            x = np.full((n,), k, f32)
            if float(f(x)) != n * k * k:
                errors.append((n, k))

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3, 3)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not errors
    assert len(f.explain_recompiles()) == 3
