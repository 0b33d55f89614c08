"""Attention of com.microsoft: scores that are outputs, caches that grow, heads that are normalized."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest

import onnxc
from tests.test_com_microsoft import F, check_outputs, f32, i32, ms, own_draws, run

__all__ = ["own_draws"]  # a fixture
pytestmark = pytest.mark.every_target


MASKS = {
    "no mask": None,
    "some keys": np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], np.int32),
    "all keys of an input": np.array([[0] * 5, [1] * 5], np.int32),  # scores less 10000: the order of sums shows
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_scores_of_multi_head_attention(mask: str, biased: bool) -> None:
    bias = f32(2, 2, 3, 5) if biased else None
    inputs = [f32(2, 3, 8), f32(2, 5, 8), f32(2, 5, 12), None, MASKS[mask], bias]
    case = ms("MultiHeadAttention", inputs, {"num_heads": 2}, outputs=4)
    check_outputs(case, [True] * 4)
    check_outputs(case, [True, False, False, False])  # in one kernel


def test_mask_whose_size_the_run_tells() -> None:
    """Ends of keys, ends and starts, or ends and offsets: which of them is known with the sizes."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
      g (float[b, s, 8] x, float[8, 24] w, float[24] bias, int32[m] mask) => (float[b, s, 8] y)
      { y = com.microsoft.Attention <num_heads = 2> (x, w, bias, mask) }""")
    compiled = onnxc.compile(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for mask in (i32(2, 3), i32(2, 3, 0, 1), i32(2, 3, 0, 3, 6, 0, 2, 7)):
        feeds = {"x": f32(2, 3, 8), "w": f32(8, 24), "bias": f32(24), "mask": mask}
        np.testing.assert_allclose(compiled(**feeds)["y"], session.run(None, feeds)[0], 1e-5, 1e-5)


def test_cache_grows_without_a_compile() -> None:
    """GroupQueryAttention whose total length is an input: one program for all steps, in each layer the same size."""
    layers = range(2)
    text = ", ".join(f"float[b, 2, p, 16] k{i}, float[b, 2, p, 16] v{i}" for i in layers)
    body = " ".join(
        f"x{i + 1}, a{i}, c{i} = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> "
        f"(x{i}, x{i}, x{i}, k{i}, v{i}, s, t)"
        for i in layers
    )
    outs = ", ".join(f"float[b, 2, q, 16] a{i}, float[b, 2, q, 16] c{i}" for i in layers)
    source = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
      g (float[b, n, 32] x0, int32[b] s, int32 t, {text}) => (float[b, n, 32] x2, {outs}) {{ {body} }}"""
    model = onnx.parser.parse_model(source)
    compiled = onnxc.compile(model)
    assert "later" not in [k.function for k in compiled.explain().kernels]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    held = {f"{c}{i}": np.zeros((1, 2, 0, 16), F) for i in layers for c in "kv"}
    for new, total in ((3, 3), (1, 4), (1, 5)):
        feeds = {"x0": f32(1, new, 32), "s": i32(total - 1), "t": np.asarray(total, np.int32), **held}
        wanted = session.run(None, feeds)
        for name, ours, theirs in zip(names, compiled(**feeds).values(), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5, err_msg=name)
        held = {f"{c}{i}": wanted[1 + 2 * i + k] for i in layers for k, c in enumerate("kv")}


@pytest.mark.parametrize(
    "epsilons",
    [{}, {"qk_norm_epsilon": 0.1}, {"q_norm_epsilon": 0.5}, {"qk_norm_epsilon": 0.1, "k_norm_epsilon": 0.5}],
    ids=str,
)
def test_grouped_queries_with_norms(epsilons: dict[str, float]) -> None:
    """As of queries and keys whose heads were normalized before."""
    q, k, v, weights = (f32(*s) for s in ((2, 3, 64), (2, 3, 32), (2, 3, 32), (2, 16)))

    def normalized(x: np.ndarray, weight: np.ndarray, name: str) -> np.ndarray:
        epsilon = epsilons.get(name, epsilons.get("qk_norm_epsilon", 1e-6))
        heads = x.reshape(*x.shape[:2], -1, 16)
        root = np.sqrt((heads.astype(np.float64) ** 2).mean(3, keepdims=True) + epsilon)
        return (heads / root * weight).astype(F).reshape(x.shape)

    rest = [v, None, None, i32(2, 2), np.asarray(3, np.int32)]
    sizes = {"num_heads": 4, "kv_num_heads": 2}
    given = ms("GroupQueryAttention", [q, k, *rest, *[None] * 7, *weights], sizes | epsilons, const=[6], outputs=3)
    plain = [normalized(q, weights[0], "q_norm_epsilon"), normalized(k, weights[1], "k_norm_epsilon"), *rest]
    for a, b in zip(run(given), run(ms("GroupQueryAttention", plain, sizes, const=[6], outputs=3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
