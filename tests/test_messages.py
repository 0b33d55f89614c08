"""What errors call things: by the names that a user knows, and shortened where these are very long."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import onnxc
from onnxc.cli import app
from onnxc.errors import OnnxcError, shortened
from tests.staging_harness import parsed

F32 = np.float32
FIVE = np.ones(5, F32)
INTERNAL = ("'in0'", "'in1'", "'out0'", "size_s", "s1 =", "s2 =")


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(OnnxcError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "args", "wanted"),
    [
        ("(float[n] x, int64[1] s) => (float[q] y) { y0 = Reshape(x, s) y = Neg(y0) }", [FIVE, [3]],
         "with n = 5, the shape of Reshape (n0 Reshape) = 3 the sizes 5 and 3 meet, which must be equal"),
        ("(float[n] x, bool[m] c) => (float[q] y) { z = Compress(x, c) y = Add(z, x) }", [FIVE, [True, False, True]],
         "n = 5, how many elements are not zero (n0 Compress) = 2"),
        ("(float[n] x, float[m] z) => (float[k] y) { i = NonZero(x) c = Cast<to=1>(i) d = Squeeze(c) y = Add(d, z) }",
         [FIVE, [1.0, 2, 3]], "dim 1 of 'c' = 5, dim 0 of 'z' = 3"),
        ("(int64[1] s) => (float[q] y) { c = ConstantOfShape(s) y = Neg(c) }", [[1 << 50]],
         "a tensor inside of the model would have 4503599627370496 bytes [node n1 Neg]"),
        ("(int64[1] s) => (float[q] y) { c = ConstantOfShape(s) y = Neg(c) }", [[1 << 44]], "a tensor inside"),
        ("(float[n] x, int64[1] s) => (float[q] y) { y0 = Expand(x, s) y = Neg(y0) }", [FIVE, [3]],
         "the shape of Expand: it does not broadcast with that of the tensor"),
        ("(int64[1] s) => (float[q] y) { c = ConstantOfShape(s) y = Neg(c) }", [[-7]],
         "a size cannot be negative (the data gives [-7])"),
    ],
)  # fmt: skip
def test_sizes_that_a_run_tells(text: str, args: list[Any], wanted: str) -> None:
    model = onnxc.compile(parsed(f"g {text}"))
    found = message(lambda: model(*args))
    assert wanted in found
    assert not any(name in found for name in INTERNAL)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("(float[batch, 4] x, float[?, 8] z) => (float[q, r] y) { y = Concat<axis=0>(x, z) }",
         "float32[batch, 4] and float32[dim 0 of 'z', 8]"),
        ("(float[s1, s0] x) => (float[q, r] y) { i = NonZero(x) y = Transpose<perm=[1, 0, 2]>(i) }",
         "int64[2, how many elements are not zero (n0 NonZero)]"),
        ("(float[s1, s0] x) => (float[q, r] y) { y = Transpose<perm=[1, 0, 2]>(x) }", "(s1, s0)"),
        ("(float[s1, s0] x) => (float[q, r] y) { y = Conv(x, x) }", "Conv takes an image [N, C, ...] and"),
    ],
)  # fmt: skip
def test_sizes_while_compiling(text: str, wanted: str) -> None:
    """The model's own names, also where they are those of other symbols here."""
    assert wanted in message(lambda: onnxc.compile(parsed(f"g {text}")))


@pytest.mark.parametrize("name", ["n" * 10_000, 'it\'s "a" b ' * 1000])
def test_long_names_are_shortened(name: str) -> None:
    model = parsed("g (float[n] x, float[n] z) => (float[n] y) { t = Neg(x) y = Add(t, z) }")
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = name
    model.graph.input[0].name = model.graph.node[0].input[0] = model.graph.node[1].name = name
    compiled = onnxc.compile(model)
    calls: list[Callable[[], Any]] = [
        lambda: compiled(FIVE), lambda: compiled(FIVE, FIVE[:2]), lambda: compiled(FIVE, FIVE, FIVE),
        lambda: compiled(FIVE, [FIVE]), lambda: compiled.run([name], {name: FIVE, "z": FIVE}),
        lambda: compiled.run(None, {name + "q": FIVE}), lambda: onnxc.compile(model, keep_inputs=[name + "z"]),
    ]  # fmt: skip
    for call in calls:
        assert len(message(call)) < 1500
    assert len(repr(compiled)) < 1500


def test_names_that_a_terminal_would_obey() -> None:
    model = parsed("g (float[n] x) => (float[n] y) { y = Neg(x) }")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "\x1b[31mred\0\u202e"
    compiled = onnxc.compile(model)
    assert r"float32[\x1b[31mred\x00\u202e]" in message(lambda: compiled(FIVE, FIVE))


def test_inputs_with_names_of_parameters() -> None:
    compiled = onnxc.compile(parsed("g (float[n] self, float[n] args) => (float[n] y) { y = Add(self, args) }"))
    np.testing.assert_array_equal(compiled(self=FIVE, args=FIVE)["y"], FIVE * 2)


def test_what_is_shortened() -> None:
    plain = "the model's 'a b' and \"it's\" are the nodes' names: see 'c'"
    assert shortened(plain) == plain
    for text in ("'" * 10**5, "'a " * 10**5, "can't " * 10**5, repr("x y'z" * 10**5), "a" * 10**6):
        assert len(shortened(text)) <= 20_000


def test_a_full_disk_is_one_of_a_file(tmp_path: Path) -> None:
    onnx.save(parsed("g (float[100000] x) => (float[100000] y) { y = Neg(x) }"), tmp_path / "m.onnx")
    out = tmp_path / "out.npz"
    onnxc.compile(tmp_path / "m.onnx")
    with limited(300_000):  # as a full disk: an error of a write, which has no name
        done = CliRunner().invoke(app, ["run", str(tmp_path / "m.onnx"), "-o", str(out)])
    assert done.exit_code == 2 and str(out) in done.output


@contextlib.contextmanager
def limited(most: int) -> Any:
    """No file may become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
