"""Inputs that have an initializer: a default where they are kept, and constants, of which a call says so, elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

import onnxc
from onnxc.cli import app
from onnxc.errors import InputError
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.ir.text import constants, from_text, to_text
from tests.staging_harness import parsed

pytestmark = pytest.mark.every_target

F32 = np.float32
X, W, B = np.array([[1, 2, 3]], F32), np.array([4, 5, 6], F32), np.array([7, 8, 9], F32)
OWN_W, OWN_B = np.array([1, -1, 2], F32), np.array([10, 20, 30], F32)
PLAIN = "g (float[N, 3] x, float[3] w, float[3] b) => (float[N, 3] y) { t = Mul(x, w) y = Add(t, b) }"
STAGED = """g (float[N, 3] x, float[3] w, float[3] b) => (float[N, 3] y) {
  t = Mul(x, w) p = Greater(t, b) i = NonZero(p) n = Shape(i) m = Cast<to = 1>(n) s = ReduceSum<keepdims = 0>(m)
  z = Sub(s, s) a = Add(t, b) y = Add(a, z)
}"""


def proto(text: str = PLAIN, ir_version: int = 8) -> onnx.ModelProto:
    model = parsed(text)
    model.ir_version = ir_version
    model.graph.initializer.extend([numpy_helper.from_array(OWN_W, "w"), numpy_helper.from_array(OWN_B, "b")])
    return model


@pytest.mark.parametrize("text", [PLAIN, STAGED], ids=["plain", "staged"])
def test_defaults_of_inputs_that_are_kept(text: str, tmp_path: Path) -> None:
    compiled = onnxc.compile(proto(text), keep_inputs=["w", "b"])
    compiled.save(tmp_path / "m.onnxc")
    for model in (compiled, onnxc.load(tmp_path / "m.onnxc")):
        for args, named in [((X,), {}), ((X, W), {}), ((X, W, B), {}), ((), {"x": X}), ((X,), {"b": B}),
                            ((), {"b": B, "x": X}), (([[1, 2, 3]],), {})]:  # fmt: skip
            given = dict(zip("xwb", args, strict=False)) | named
            wanted = X * given.get("w", OWN_W) + given.get("b", OWN_B)
            np.testing.assert_array_equal(model(*args, **named)["y"], wanted)
            np.testing.assert_array_equal(model.run(None, given)[0], wanted)
        with pytest.raises(InputError, match="missing input 'x'"):
            model(w=W)
        assert model.profile([X], runs=1, warm_up=0).profile is not None


def test_what_onnxruntime_does_of_old_and_new_models() -> None:
    for version in (3, 8):
        model = proto(ir_version=version)
        compiled = onnxc.compile(model, keep_inputs=["b"])
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(compiled(X)["y"], session.run(None, {"x": X})[0])
        if version > 3:  # older ones have constants alone, as it reads them
            np.testing.assert_array_equal(compiled(X, B)["y"], session.run(None, {"x": X, "b": B})[0])


def test_defaults_that_are_broadcast_or_random() -> None:
    text = "g (float[n] x, float[k] w) => (float[n] y) { y = Add(x, w) }"
    model = parsed(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([2], F32), "w"))
    assert onnxc.compile(model, keep_inputs=["w"])(W)["y"].tolist() == [6, 7, 8]  # a variant: w has size 1
    body = "{ r = RandomNormalLike(x) z = Sub(r, r) t = Add(z, x) y = Mul(t, w) }"
    model = parsed(f"g (float[3] x, float[3] w) => (float[3] y) {body}")
    model.graph.initializer.append(numpy_helper.from_array(OWN_W, "w"))
    assert onnxc.compile(model, keep_inputs=["w"])(W)["y"].tolist() == (W * OWN_W).tolist()


@pytest.mark.parametrize("text", [PLAIN, STAGED], ids=["plain", "staged"])
def test_values_for_constants_are_refused(text: str) -> None:
    model = onnxc.compile(proto(text))
    for call in (lambda: model(X, W), lambda: model(x=X, w=W), lambda: model.run(None, {"x": X, "w": W})):
        with pytest.raises(InputError, match=r"'w'.*constant.*keep_inputs=\["):
            call()


def test_text_and_export_have_the_defaults() -> None:
    model = proto()
    large = np.arange(100, dtype=F32)
    model.graph.input.append(onnx.helper.make_tensor_value_info("u", 1, [100]))
    model.graph.initializer.append(numpy_helper.from_array(large, "u"))
    graph = onnx_file.load(model, keep_inputs=["w", "u"])
    assert list(graph.defaults) == ["w", "u"] and graph.metadata[onnx_file.FIXED] == ["b"]
    again = from_text(to_text(graph), constants(graph))
    for name, array in graph.defaults.items():
        np.testing.assert_array_equal(again.defaults[name], array)
    written = to_onnx(graph)
    assert {t.name for t in written.graph.initializer} >= {"w", "u"}
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], X * OWN_W + OWN_B)


@pytest.mark.cpu_only
def test_on_the_command_line(tmp_path: Path) -> None:
    def run(*args: Any) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(map(str, args)))
        return done.exit_code, done.output

    path, given, out = tmp_path / "m.onnx", tmp_path / "in.npz", tmp_path / "out.npz"
    onnx.save(proto(), path)
    np.savez(given, x=X, b=B)
    code, text = run("run", path, "--inputs", given)
    assert code == 2 and "gives 'b'" in text and "--keep-input" in text
    kept = ["--keep-input", "w", "--keep-input", "b"]
    assert run("run", path, "--inputs", given, *kept, "-o", out)[0] == 0
    np.testing.assert_array_equal(np.load(out)["y"], X * OWN_W + B)
    assert run("compile", path, *kept, "-o", tmp_path / "m.onnxc")[0] == 0
    for arguments in ([path, *kept], [tmp_path / "m.onnxc"]):
        assert run("run", *arguments)[0] == 0  # random x, and defaults
    assert run("run", tmp_path / "m.onnxc", "--inputs", given, "-o", out)[0] == 0
    np.testing.assert_array_equal(np.load(out)["y"], X * OWN_W + B)
