"""Epilogues that kernels share: one function for those that differ in names and sizes, and in nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxc
from onnxc.codegen.cpp.closures import shared

KERNEL = """(void *arg, i64 first, i64 last, int worker) {
  const ox_call *const a = (const ox_call *)arg;
  f32 *const __restrict p0 = (f32 *)a->p[0];
  f32 *const __restrict p1 = (f32 *)a->p[1];
  const i64 s0 = a->s[0];
  const auto epi = [=](Px q, i64 c, vf acc, auto lanes) OX_LAMBDA { (void)q; (void)c;
    const V<f32> t1 = %s;
    stl(p1 + (c + %s*q.i), t1, lanes);
  };
  conv_items(epi);
}"""


def kernel(size, term="acc + ldl(p0 + (c + 3), lanes)"):
    return KERNEL % (term, size)


def test_sizes_and_names_are_arguments():
    found = shared({"k0": kernel(144), "k1": kernel(240).replace("p1", "p7")})
    assert list(found.definitions) == ["closure0"] and found.uses == {"k0": ("closure0",), "k1": ("closure0",)}
    assert "closure0(p0, p1, 144);" in found.kernels["k0"] and "closure0(p0, p7, 240);" in found.kernels["k1"]
    (definition,) = found.defined_for(["k1"])
    assert "[](auto x0, auto x1, i64 n0)" in definition and "stl(x1 + (c + n0*q.i), t1, lanes);" in definition
    assert "(c + 3)" in definition  # what is equal stays


@pytest.mark.parametrize(
    "term",
    [
        "acc * bc<f32>(2)",  # another computation
        "acc + ldl(p0 + (c / 5), lanes)",  # a divisor, which is to be known
        "acc + ldl<8>(p0 + c, lanes)",  # a template's argument
        "acc + unheard_of",  # a name of whose kind nothing is known
        "acc + ldl(p0 + (c + s0), lanes)",  # one variable more
    ],
)
def test_others_are_left_alone(term):
    texts = {"k0": kernel(144), "k1": kernel(144, term)}
    found = shared(texts)
    assert found.kernels == texts and not found.definitions and found.uses == {"k0": (), "k1": ()}


def test_divisors_and_arguments_of_templates_stay():
    for term in ("acc + ldl(p0 + (c / %d), lanes)", "acc + bc<f32>(%d)", "acc + ldl(p0 + f<%d>(c), lanes)",
                 "acc + ldl(p0 + (3*ox_div(c, %d)), lanes)", "acc + ldl(p0 + (f<8, %d>(c)), lanes)"):  # fmt: skip
        assert not shared({"k0": kernel(9, term % 5), "k1": kernel(9, term % 7)}).definitions


def test_a_name_of_an_earlier_lambda_is_no_variable():
    text = kernel(144)
    twice = text.replace("  conv_items(epi);", "\n".join(text.split("\n")[5:9]).replace("epi", "epi1"))
    found = shared({"k0": twice, "k1": twice.replace("144", "96")})
    assert found.kernels["k0"].count("closure0(p0, p1, 144);") == 2 and "t1" not in found.kernels["k0"]


def test_captured_before_it_is_defined():
    shadowed = kernel(144).replace(
        "    const V", "    const V<f32> t0 = t1;  // the kernel's, and then one of its own\n    const V"
    )
    texts = {f"k{k}": shadowed.replace("  const i64 s0", "  const vf t1 = p0[0];\n  const i64 s0") for k in range(2)}
    assert shared(texts).kernels == texts


def test_convolutions_that_share():
    """Pointwise and depthwise layers with SiLU, of channels that are whole vectors and not, with residuals."""
    rng = np.random.default_rng(0)
    nodes, weights, x, channels = [], [], "x", 24
    for k, (out, size, groups) in enumerate([(48, 1, 1), (48, 3, 48), (24, 1, 1), (60, 1, 1), (60, 5, 60), (24, 1, 1)]):
        w = rng.standard_normal((out, channels // groups, size, size)).astype(np.float32) / np.float32(size * 5)
        weights += [numpy_helper.from_array(w, f"w{k}"), numpy_helper.from_array(w[:, 0, 0, 0], f"b{k}")]
        nodes.append(helper.make_node("Conv", [x, f"w{k}", f"b{k}"], [f"c{k}"], pads=[size // 2] * 4, group=groups))
        nodes.append(helper.make_node("Sigmoid", [f"c{k}"], [f"s{k}"]))
        nodes.append(helper.make_node("Mul", [f"c{k}", f"s{k}"], [f"y{k}"]))
        x, channels = f"y{k}", out
    inputs, outputs = (
        [helper.make_tensor_value_info("x", 1, [1, 24, 13, 17])],
        [helper.make_tensor_value_info(x, 1, None)],
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    image = rng.standard_normal((1, 24, 13, 17)).astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": image})[0]
    np.testing.assert_allclose(onnxc.compile(model)(x=image)[x], expected, rtol=1e-4, atol=1e-5)
