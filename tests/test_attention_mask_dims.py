"""Attention whose mask has open dims of its own: each may turn out to be 1, as numpy broadcasts."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.errors import InputError

pytestmark = pytest.mark.every_target

TEXT = """<ir_version: 8, opset_import: ["" : 18]> attention (
  float[batch, heads, queries, 24] q, float[kb, kh, keys, 24] k, float[vb, vh, vk, 24] v, MASK
) => (float[yb, yh, yq, 24] y) {
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  scale = Constant <value = float {0.25}> ()
  scaled = Mul (scores, scale)
  masked = Add (scaled, mask)
  p = Softmax <axis = -1> (masked)
  y = MatMul (p, v)
}"""
BATCH, HEADS = 2, 3


def compiled(mask: str) -> onnxc.CompiledModel:
    return onnxc.compile(onnx.parser.parse_model(TEXT.replace("MASK", f"float[{mask}] mask")))


def feeds(queries: int, keys: int, mask: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(queries)
    sizes = {"q": queries, "k": keys, "v": keys}
    found = {name: rng.standard_normal((BATCH, HEADS, n, 24), np.float32) for name, n in sizes.items()}
    return {**found, "mask": rng.standard_normal(mask, np.float32)}


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) * 0.25 + mask
    p = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray = p / p.sum(-1, keepdims=True) @ v
    return result


@pytest.fixture(scope="module")
def four() -> onnxc.CompiledModel:
    return compiled("mb, mh, mq, mk")


@pytest.mark.parametrize("queries,keys", [(5, 7), (1, 1), (1, 300), (40, 65), (7, 1)])
def test_each_dim_may_be_one(four: onnxc.CompiledModel, queries: int, keys: int) -> None:
    kernels = [k.kind for k in four.explain().kernels]
    assert kernels == ["attention"]
    for one in range(16):
        whole = (BATCH, HEADS, queries, keys)
        given = feeds(queries, keys, tuple(1 if one >> i & 1 else d for i, d in enumerate(whole)))
        np.testing.assert_allclose(four(**given)["y"], expected(**given), atol=5e-6)


@pytest.mark.parametrize("mask,shapes", [
    ("mb, 1, 1, mk", [(1, 1, 1, 7), (2, 1, 1, 7), (2, 1, 1, 1)]),
    ("mq, mk", [(5, 7), (1, 7), (5, 1), (1, 1)]),
    ("1, mh, queries, keys", [(1, 1, 5, 7), (1, 3, 5, 7)]),
])  # fmt: skip
def test_masks_of_fewer_open_dims(mask: str, shapes: list[tuple[int, ...]]) -> None:
    model = compiled(mask)
    for shape in shapes:
        given = feeds(5, 7, shape)
        np.testing.assert_allclose(model(**given)["y"], expected(**given), atol=5e-6)


@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (2, 2, 5, 7), (2, 3, 4, 7), (2, 3, 5, 6), (0, 3, 5, 7), (2, 3, 5, 0)])
def test_other_sizes_are_refused(four: onnxc.CompiledModel, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="sizes"):
        four(**feeds(5, 7, shape))
