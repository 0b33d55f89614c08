# ruff: noqa: E501  (models and kernels as text)
"""Operators of users with kernels in C++ and Triton: calls, sizes, errors, gradients, the cache, saved models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

import onnxc
import tests.custom_kernels as own
from onnxc.codegen.triton.user import renamed
from onnxc.errors import InputError, ModelError, OnnxcError, RunError, SizesError, ToolchainError, UnsupportedError
from onnxc.ir.graph import Value
from onnxc.ops import registry
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder
from onnxc.primitives.kernels import Kernel
from tests.triton_simulator import Simulator

RNG = np.random.default_rng(6)
HEAD = '<ir_version: 8, opset_import: ["" : 18, "com.example" : 1]>\n'
SCALED = """g (float[n, m] x, float[k] w) => (float[m, n] y) {
  a = Neg(x)  t = com.example.ScaleRows <shift = 4.0> (a, w)  u = Exp(t)  y = Transpose <perm = [1, 0]> (u) }"""


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    """The table of operators as it was before the test."""
    before = {key: list(rows) for key, rows in registry.table().items()}
    yield
    registry._TABLE.clear()
    registry._TABLE.update(before)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def scaled(x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(np.exp(-x * w[:, None] + 2).T)


def test_of_any_size() -> None:
    model = onnxc.compile(parsed(SCALED))
    for rows, columns in ((1, 1), (300, 5), (7, 33), (0, 3), (3, 0)):
        x, w = floats(rows, columns), floats(rows)
        np.testing.assert_allclose(model(x, w)["y"], scaled(x, w), rtol=1e-5)
    assert [k.kind for k in model.explain().kernels] == ["loops", "user", "loops"]
    assert "once(f32 x" in model.source


def test_types_and_workspace() -> None:
    text = "g (float16[a, b, n] x, bfloat16[a, b, n] z) => (double[a, b] low, uint8[a, b] high) { low, high = com.example.Extremes(x, z) }"
    x = (RNG.random((3, 50, 19)) * 50 + 60).astype(np.float16)
    z = RNG.random((3, 50, 19)).astype(ml_dtypes.bfloat16)
    found = onnxc.compile(parsed(text))(x, z)
    both = x.astype(np.float32) + z.astype(np.float32)
    np.testing.assert_array_equal(found["low"], both.min(-1).astype(np.float64))
    np.testing.assert_array_equal(found["high"], both.max(-1).astype(np.uint8))


def test_values_that_lie_otherwise() -> None:
    """After a convolution, a transpose, a slice, in a concatenation, an If, a Loop: always row-major."""
    text = """g (float[2, 4, 6, 5] x, float[8, 4, 3, 3] k, float[2] w, bool c) => (y, z, l) {
      v = Conv <pads = [1, 1, 1, 1]> (x, k)
      shape = Constant <value_ints = [2, -1]> ()
      r = Reshape(v, shape)
      a = com.example.ScaleRows(r, w)
      s0 = Constant <value_ints = [1]> ()  s1 = Constant <value_ints = [5]> ()  a0 = Constant <value_ints = [0]> ()
      t = Transpose(r)
      t2 = Slice(t, s0, s1, a0)
      rr = Transpose(t2)
      e = com.example.ScaleRows(rr, w)
      y = Concat <axis = 1> (a, e, e)
      z = If (c) <then_branch = p () => (o) { o = com.example.ScaleRows(r, w) },
                  else_branch = q () => (o) { o = Neg(r) }>
      three = Constant <value_int = 3> ()
      l = Loop (three, "", rr) <body = b (int64 i, bool go, float[2, n] u) => (bool on, float[2, n] o) {
        on = Identity(go) o = com.example.ScaleRows(u, w) }>
    }"""
    x, k, w = floats(2, 4, 6, 5), floats(8, 4, 3, 3), floats(2)
    model = onnxc.compile(parsed(text))
    only = onnxc.compile(
        parsed("g (float[2, 4, 6, 5] x, float[8, 4, 3, 3] k) => (v) { v = Conv <pads = [1, 1, 1, 1]> (x, k) }")
    )
    r = only(x, k)["v"].reshape(2, -1)
    rr = r[:, 1:5]
    for c in (True, False):
        found = model(x, k, w, np.array(c))
        e = rr * w[:, None]
        np.testing.assert_allclose(found["y"], np.concatenate([r * w[:, None], e, e], 1), rtol=1e-5)
        np.testing.assert_allclose(found["z"], r * w[:, None] if c else -r, rtol=1e-5)
        np.testing.assert_allclose(found["l"], rr * w[:, None] ** 3, rtol=1e-5)


def test_what_a_run_refuses() -> None:
    model = onnxc.compile(parsed(SCALED))
    with pytest.raises(SizesError, match=r"k = 4 the sizes 4 and 30 .* n1 ScaleRows"):
        model(floats(30, 5), floats(4))
    with pytest.raises(RunError, match=r"returned 7 \[node n1 ScaleRows\]"):
        model(floats(30, 5), floats(30) + 1001)
    with pytest.raises(OnnxcError, match="4 and 3 to be equal"):
        onnxc.compile(parsed("g (float[3, 2] x, float[4] w) => (y) { y = com.example.ScaleRows(x, w) }"))


def test_a_saved_model_has_its_kernels(tmp_path: Path) -> None:
    onnxc.compile(parsed(SCALED)).save(tmp_path / "scaled.onnxc")
    registry._TABLE.pop(("com.example", "ScaleRows"))
    x, w = floats(9, 4), floats(9)
    np.testing.assert_allclose(onnxc.load(tmp_path / "scaled.onnxc")(x, w)["y"], scaled(x, w), rtol=1e-5)


def test_gradient() -> None:
    text = """g (float[n, m] x, float[n] w) => (float loss) {
      y = com.example.ScaleRows(x, w)  z = Mul(y, y)  loss = ReduceSum <keepdims = 0> (z) }"""
    step = onnxc.compile_training(weighted(text, w=floats(6)), loss="loss", optimizer=onnxc.optim.SGD(lr=0.01))
    x = floats(6, 5)
    before = step.parameters["w"].copy()
    step(x)
    slope = 2 * (x**2).sum(1) * before
    np.testing.assert_allclose(step.parameters["w"], before - 0.01 * slope, rtol=1e-4)


def weighted(text: str, **weights: np.ndarray[Any, Any]) -> onnx.ModelProto:
    model = parsed(text)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        kept = [i for i in model.graph.input if i.name != name]
        del model.graph.input[:]
        model.graph.input.extend(kept)
    return model


def test_no_gradient() -> None:
    double = Kernel(
        "double_it", cpp="void double_it(const f32 *x, f32 *y, i64 n) { for (i64 k = 0; k < n; k++) y[k] = 2 * x[k]; }"
    )

    @op("Double", 1, domain="com.example")
    def define(b: Builder, x: Value) -> Value:
        return double.call(b, [x], x.t, sizes=[x.t.size])

    text = "g (float[n] x) => (float loss) { y = com.example.Double(x)  loss = ReduceSum <keepdims = 0> (y) }"
    np.testing.assert_array_equal(onnxc.compile(parsed(text))(np.ones(3, np.float32))["loss"], 6)
    with pytest.raises(UnsupportedError, match=r"double_it has no derivative: .*gradient="):
        onnxc.backward(parsed(text), wrt=["x"])


# ---------------------------------------------------------------- the cache


def doubled(factor: float) -> Callable[..., Value]:
    def define(b: Builder, x: Value) -> Value:
        return b.mul(x, factor)

    return define


def test_a_changed_definition_is_compiled_anew() -> None:
    """Whatever has changed of it: here a variable of its closure, then a kernel's text; an unchanged one is found."""
    text = "g (float[n] x) => (y) { y = com.example.Changed(x) }"
    x = np.ones(2, np.float32)
    for factor in (2.0, 3.0, 2.0):
        op("Changed", 1, domain="com.example")(doubled(factor))
        assert onnxc.compile(parsed(text))(x)["y"].tolist() == [factor, factor]

    def define(b: Builder, x: Value) -> Value:
        return kernel.call(b, [x], x.t, sizes=[x.t.size])

    registry._TABLE.pop(("com.example", "Changed"))
    op("Changed", 1, domain="com.example")(define)
    for number in (5, 6):
        kernel = Kernel("fill", cpp=f"void fill(const f32 *x, f32 *y, i64 n) {{ while (n--) y[n] = x[n] + {number}; }}")
        assert onnxc.compile(parsed(text))(x)["y"].tolist() == [number + 1.0] * 2
    stages = onnxc.compile(parsed(text)).explain().stages
    again = onnxc.compile(parsed(text)).explain()
    assert stages == again.stages


def test_one_definition_of_each_op() -> None:
    with pytest.raises(InputError, match=r"'com.example' is defined already, by tests\.custom_kernels\.scale_rows"):
        op("ScaleRows", 1, domain="com.example")(doubled(1.0))
    with pytest.raises(InputError, match="is defined already, by onnxc"):
        op("Gelu", 1, domain="com.microsoft")(doubled(1.0))
    op("Fresh", 1, 3, domain="com.example")(doubled(1.0))

    def other(b: Builder, x: Value) -> Value:
        return x

    op("Fresh", 4, domain="com.example")(other)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": "a b", "cpp": "x"}, "not the name of a function"),
        ({"name": "a"}, "neither C\\+\\+ nor Triton"),
        ({"name": "a", "cpp": "#include <cmath>\n"}, "has an #include: name"),
        ({"name": "a", "cpp": "x", "headers": ("../x",)}, "names the header"),
        ({"name": "a", "cpp": "x", "warps": 3}, "3 warps"),
    ],
)
def test_kernels_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Kernel(**options)


def used(kernel: Kernel, **call: Any) -> Callable[[], Any]:
    @op("Used", 1, domain="com.example")
    def define(b: Builder, x: Value) -> Value:
        return kernel.call(b, [x], x.t, **call)

    return lambda: onnxc.compile(parsed("g (float[n] x) => (y) { y = com.example.Used(x) }"))


@pytest.mark.parametrize(
    "cpp, message",
    [
        ("void f(const f32 *x, f32 *y) { y[0] = z; }", r"f\.cpp:1:.*'z' was not declared"),
        ("\nvoid f(const f64 *x, f32 *y) { }", r"cannot convert|no matching function"),
        ("void g(const f32 *x, f32 *y) { }", r"'::f' has not been declared"),
        ("void h(); void f(const f32 *x, f32 *y) { h(); }", r"undefined|never defined"),
    ],
)
def test_errors_of_the_compiler(cpp: str, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        used(Kernel("f", cpp=cpp))()


def test_calls_that_do_not_fit() -> None:
    kernel = Kernel("f", cpp="void f(const f32 *x, f32 *y) { }")
    for options, message in (
        ({"sizes": ["n"]}, "sizes of the kernel f"),
        ({"sizes": [True]}, "sizes of the kernel f .* not True"),
        ({"items": 2.5}, "sizes of the kernel f .* not 2.5"),
        ({"scalars": ["n"]}, "scalars of the kernel f"),
        ({"constants": {"a b": 1}}, "constants of the kernel f"),
        ({"scalars": [1 << 64]}, "does not fit 64 bits"),
    ):
        with pytest.raises(InputError, match=message):
            used(kernel, **options)()  # type: ignore[arg-type]
    used(kernel)
    with pytest.raises(UnsupportedError, match="f has no Triton source"):
        onnxc.compile(parsed("g (float[n] x) => (y) { y = com.example.Used(x) }"), target="cuda:sm_90")
    with pytest.raises(UnsupportedError, match="t has no C\\+\\+ source"):
        used(Kernel("t", triton="def t(): pass"))()


def calling(kernel: Kernel) -> Callable[..., Value]:
    def define(b: Builder, x: Value) -> Value:
        return kernel.call(b, [x], x.t, sizes=[x.t.size])

    return define


def test_two_kernels_of_equal_names() -> None:
    """What they define besides does not meet either."""
    text = "template <class T> T part(T x) {{ return x + {0}; }} void f(const f32 *x, f32 *y, i64 n) {{ while (n--) y[n] = part(x[n]); }}"
    for number in (1, 2):
        op(f"Add{number}", 1, domain="com.example")(calling(Kernel("f", cpp=text.format(number))))
    model = onnxc.compile(parsed("g (float[n] x) => (y, z) { y = com.example.Add1(x)  z = com.example.Add2(x) }"))
    found = model(np.zeros(2, np.float32))
    assert (found["y"].tolist(), found["z"].tolist()) == ([1, 1], [2, 2])


def test_kernels_may_have_any_name() -> None:
    """Also those that the call's parameters have."""
    text = "void {0}(const f32 *x, f32 *y, i64 n) {{ while (n--) y[n] = x[n] + 1; }}"
    for name in ("work", "x"):
        op(f"Op_{name}", 1, domain="com.example")(calling(Kernel(name, cpp=text.format(name))))
    model = onnxc.compile(parsed("g (float[n] x) => (y) { z = com.example.Op_work(x)  y = com.example.Op_x(z) }"))
    assert model(np.zeros(2, np.float32))["y"].tolist() == [2, 2]


def test_an_op_that_refuses_open_sizes_in_a_part_compiled_at_run_time() -> None:
    """What was compiled for the sizes of one call serves no other."""

    @op("Total", 1, domain="com.example")
    def total(b: Builder, x: Value) -> Value:
        if not all(isinstance(d, int) for d in x.shape):
            raise ModelError("known sizes are needed")
        return b.reduce("sum", x, list(range(x.rank)), False)

    model = onnxc.compile(
        parsed("""g (float[n, m] x, bool c) => (y) {
          r = If (c) <then_branch = p () => (o) { o = Identity(x) }, else_branch = q () => (o) { o = ReduceSum <keepdims = 0> (x) }>
          y = com.example.Total(r) }""")
    )
    for shape in ((3, 2), (5, 2), (3, 2), (3, 4)):
        np.testing.assert_allclose(model(np.ones(shape, np.float32), np.array(True))["y"], np.prod(shape))


# ---------------------------------------------------------------- Triton


def test_triton_interpreted(simulator: Simulator) -> None:
    x, w = floats(9, 37), floats(9)
    answer = simulator.run(parsed(SCALED).SerializeToString(), [x, w], imports=["tests.custom_kernels"])
    np.testing.assert_allclose(answer.outputs[0], scaled(x, w), rtol=1e-5)
    assert "user" in answer.kinds


def test_triton_compiled(tmp_path: Path) -> None:
    model = onnxc.compile(parsed(SCALED), target="cuda:sm_90")
    assert f"user_{own.SCALE.key}_scale_rows" in model.source
    model.save(tmp_path / "scaled.onnxc")


def test_triton_mistakes(simulator: Simulator) -> None:
    for text, message in (
        ("def f(", "was never closed"),
        ("def g(): pass", "no function of this name"),
        ("class A: pass\ndef f(): pass", "more than functions and constants: 'class A"),
    ):
        with pytest.raises(InputError, match=message):
            renamed(Kernel("f", triton=text))
    both = Kernel("f", triton="A, B = tl.constexpr(1), tl.constexpr(2)\ndef f(x, y):\n    tl.store(y, A + B)")
    assert f"user_{both.key}_A + user_{both.key}_B" in renamed(both)
    used(Kernel("f", triton="@triton.jit\ndef f(x, y):\n    tl.store(y, nothing)"))
    with pytest.raises(ToolchainError, match="nothing"):
        onnxc.compile(parsed("g (float[n] x) => (y) { y = com.example.Used(x) }"), target="cuda:sm_90")
