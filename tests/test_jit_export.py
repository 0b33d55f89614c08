"""onnxc.to_onnx: traced functions as ONNX models, which onnxruntime runs; and the face."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxc
from onnxc import array_api as xp
from onnxc import nn, random
from onnxc.errors import InputError, TraceError

pytestmark = pytest.mark.usefixtures("interpreted")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5)).astype(np.float32)
PARAMS = {"w": [RNG.standard_normal((5, 4)).astype(np.float32), RNG.standard_normal((4, 4))], "b": np.float32(0.5)}


def by_onnxruntime(model, feeds):
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {k: np.asarray(v) for k, v in feeds.items()})


def layer(p, x):
    h = nn.gelu(x @ p["w"][0] + p["b"])
    return nn.softmax(xp.astype(h, xp.float64) @ p["w"][1])


FUNCTIONS = {
    "network": (lambda p, x: {"y": layer(p, x), "n": xp.sum(x, axis=1)}, (PARAMS, X)),
    "gradient": (lambda p, x: onnxc.grad(lambda p: xp.sum(layer(p, x)[:, 0] ** 2))(p), (PARAMS, X)),
    "branch": (lambda x, c: onnxc.cond(c, lambda: xp.exp(x), lambda: x * 2), (X, np.array(False))),
    "while": (lambda x: onnxc.while_loop(lambda s: xp.sum(s) < 50, lambda s: s + xp.abs(x), x), (X,)),
    "scan": (lambda x: onnxc.scan(lambda s, a: (s * 0.5 + a, s), xp.zeros((5,), dtype=xp.float32), x), (X,)),
    "random": (lambda k: random.normal(random.fold_in(k, 3), (4, 2)), (np.uint64(7),)),
    "attention": (lambda x: nn.attention(x, x, x, causal=True), (X,)),
    "integers": (lambda x, k: (xp.take(x, k % 3, axis=0), xp.argmax(x, axis=1), k // 2), (X, np.array([5, 1]))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_onnxruntime_agrees(name):
    f, args = FUNCTIONS[name]
    model = onnxc.to_onnx(f, *args)
    leaves = [v for a in args for v in _leaves(a)]
    names = [v.name for v in model.graph.input]
    found = by_onnxruntime(model, dict(zip(names, leaves, strict=True)))
    expected = _leaves(f(*[_arrays(a) for a in args]))
    for x, y in zip(expected, found, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-4, atol=1e-6)


def _leaves(tree):
    if isinstance(tree, dict):
        return [x for k in sorted(tree) for x in _leaves(tree[k])]
    return [x for t in tree for x in _leaves(t)] if isinstance(tree, (tuple, list)) else [tree]


def _arrays(tree):
    if isinstance(tree, dict):
        return {k: _arrays(v) for k, v in tree.items()}
    return type(tree)(map(_arrays, tree)) if isinstance(tree, (tuple, list)) else xp.asarray(tree)


def test_names_and_dynamic_dims(tmp_path):
    def f(params, x):
        return {"out": x @ params["w"][0], "both": (x[0], 3)}

    path = tmp_path / "model.onnx"
    model = onnxc.to_onnx(f, PARAMS, X, dynamic={"x": {0: "batch"}}, path=path)
    assert [v.name for v in model.graph.input] == ["params.b", "params.w.0", "params.w.1", "x"]
    assert [v.name for v in model.graph.output] == ["result.both.0", "result.out"]
    assert model.graph.input[3].type.tensor_type.shape.dim[0].dim_param == "batch"
    feeds = {"params.w.0": PARAMS["w"][0], "params.w.1": PARAMS["w"][1], "params.b": PARAMS["b"]}
    for n in (1, 4):
        x = RNG.standard_normal((n, 5)).astype(np.float32)
        _, out = by_onnxruntime(onnx.load(path), {**feeds, "x": x})
        np.testing.assert_allclose(out, x @ PARAMS["w"][0], rtol=1e-5)
    compiled = onnxc.compile(path)
    np.testing.assert_allclose(compiled.run(["result.out"], {**feeds, "x": x})[0], x @ PARAMS["w"][0], rtol=1e-5)


def test_constants_are_weights_and_static_arguments():
    w = xp.asarray(PARAMS["w"][0])
    model = onnxc.to_onnx(lambda x, n: (x @ w) ** n, X, 2, static_argnums=1)
    assert [v.name for v in model.graph.input] == ["x"]
    (found,) = by_onnxruntime(model, {"x": X})
    np.testing.assert_allclose(found, (X @ PARAMS["w"][0]) ** 2, rtol=1e-4)


def test_names_never_meet():
    model = onnxc.to_onnx(lambda result, x: {"x": result, "result": x}, X, X + 1)
    names = [v.name for v in (*model.graph.input, *model.graph.output)]
    assert len(set(names)) == 4
    found = by_onnxruntime(model, {"result": X, "x": X + 1})
    np.testing.assert_array_equal(found[0], X + 1)


def test_errors():
    with pytest.raises(TraceError, match="test_jit_export"):
        onnxc.to_onnx(lambda x: x if x[0, 0] > 0 else -x, X)
    with pytest.raises(InputError, match="str"):
        onnxc.to_onnx(lambda x, how: x, X, "text")


def test_the_face():
    assert sorted(onnxc.__all__) == sorted(set(onnxc.__all__))
    for name in set(onnxc.__all__) - {"torch"}:
        assert getattr(onnxc, name) is not None
