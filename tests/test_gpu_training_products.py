"""Products of training steps on a GPU: rows of an odd length, long sums in parts, weights that are turned."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc import gpu
from onnxc.codegen.triton.cubin import Image
from onnxc.codegen.triton.program import Copy, Program
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.optim import SGD, AdamW
from onnxc.passes.long_products import long_products
from onnxc.planner.layout import assign
from onnxc.planner.pitch import align_rows
from onnxc.planner.templates import ENABLED
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from tests.simulated_training import simulated, train
from tests.targets import needs_triton
from tests.triton_simulator import Simulator

RNG = np.random.default_rng(5)
WORDS = 1027


def model_of(text: str, **weights: tuple[int, ...]) -> bytes:
    """A model of the text of its graph, with random weights of these shapes."""
    found = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')
    rng = np.random.default_rng(3)
    for name, shape in weights.items():
        array = rng.standard_normal(shape) / np.sqrt(shape[-1])
        found.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return found.SerializeToString()


# ---------------------------------------------------------------- rows of an odd length


def scores(dtype: dtypes.DType, words: int = WORDS) -> Graph:
    """A product with many words, and a function of it."""
    b = Builder()
    x, w = b.input(TensorType(dtype, (16, 32)), "x"), b.input(TensorType(dtype, (32, words)), "w")
    y = b.exp(b.matmul(x, w))
    return b.graph([b.reduce("sum", y, [1]), b.reduce("max", y, [0])], ["s", "t"])


@pytest.mark.parametrize(
    ("dtype", "words", "pitch"),
    [
        (dtypes.bfloat16, WORDS, 1088), (dtypes.float32, WORDS, 1056), (dtypes.bfloat16, 1032, None),
        (dtypes.bfloat16, 1023, None),
    ],
)  # fmt: skip
def test_pitch(dtype: dtypes.DType, words: int, pitch: int | None) -> None:
    graph = scores(dtype, words)
    layout = align_rows(graph, assign(graph, ENABLED))
    (product, function) = (next(n.output for n in graph.nodes if n.op == op) for op in ("matmul", "exp"))
    for v in (product, function):
        assert layout.strides(v) == (pitch or words, 1)
        assert layout.nbytes(v) == 16 * (pitch or words) * dtype.itemsize
    assert all(v.id not in layout.pitches for v in (*graph.inputs, *graph.outputs))


def test_rows_that_are_joined_are_not_moved_apart() -> None:
    b = Builder()
    x, w = b.input(TensorType(dtypes.float32, (16, 32)), "x"), b.input(TensorType(dtypes.float32, (32, WORDS)), "w")
    y = b.matmul(x, w)
    graph = b.graph([b.reduce("sum", b.reshape(y, (16 * WORDS,)), [0]), b.reduce("sum", y, [0])], ["s", "t"])
    assert y.id not in align_rows(graph, assign(graph, ENABLED)).pitches


LANGUAGE = model_of(
    f"""g (int64[2, 6] ids, int64[12] t) => (float loss) {{
    x = Gather(words, ids) h = MatMul(x, w) r = Relu(h) turned = Transpose<perm = [1, 0]>(words) l = MatMul(r, turned)
    rows = Constant<value = int64[2] {{12, {WORDS}}}>() y = Reshape(l, rows) z = Add(y, bias)
    loss = SoftmaxCrossEntropyLoss<reduction = "mean">(z, t) }}""",
    words=(WORDS, 16), w=(16, 16), bias=(WORDS,),
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize(("precision", "rtol", "atol"), [("float32", 2e-4, 2e-6), ("bfloat16", 2e-2, 2e-2)])
def test_many_words(simulator: Simulator, precision: str, rtol: float, atol: float) -> None:
    """What lies between rows is NaN on the simulated GPU."""
    batches: list[Any] = [
        {"ids": RNG.integers(0, WORDS, (2, 6)), "t": RNG.integers(0, WORDS, 12)} for _ in range(2)
    ]  # fmt: skip
    options: dict[str, Any] = {"optimizer": SGD(lr=0.1), "precision": precision}
    ours, theirs = train(LANGUAGE, batches, "loss", options), simulated(simulator, LANGUAGE, batches, **options)
    assert ours.errors == theirs.errors == ["", ""]
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=rtol)
    for key in ours.state.keys() - {"seed"}:
        np.testing.assert_allclose(theirs.state[key], ours.state[key], rtol=rtol, atol=atol, err_msg=key)


# ---------------------------------------------------------------- epilogues of the backward pass


@needs_triton
def test_updates_are_no_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW reads and writes three tensors: with the sums of a tile they do not fit in registers."""
    nothing = [Image(f"k{n}", b"", 0, 128, 0) for n in range(100)]
    programs = []

    def compiled(program: Program, *_: Any) -> list[Image]:
        programs.append(program)
        return nothing[: len(program.functions)]

    monkeypatch.setattr(gpu, "compile_program", compiled)
    step = onnxc.compile_training(
        LONG, loss="loss", optimizer=AdamW(lr=0.1), precision="bfloat16", target="cuda:sm_90", cache=False
    )
    kernels = step.explain().kernels
    assert {k.kind for k in kernels if any(s.op == "sqrt" for s in k.steps)} == {"loops"}
    forward = [k for k in kernels if k.kind == "matmul" and any(s.op == "max" for s in k.steps)]
    assert len(forward) == 1, "Relu is one of the forward pass"
    assert not any(isinstance(s, Copy) for p in programs for s in p.steps), "parameters are written over the old ones"


# ---------------------------------------------------------------- sums in parts


def product(m: int, k: int, n: int, dtype: dtypes.DType = dtypes.bfloat16) -> Graph:
    """x' y, as of the gradient of a weight."""
    b = Builder()
    x, y = (b.input(TensorType(dtype, (k, d)), name) for d, name in ((m, "x"), (n, "y")))
    return b.graph([b.matmul(b.swap(x, 0, 1), y)], ["z"])


@pytest.mark.parametrize(
    ("sizes", "shapes"),
    [
        ((768, 4096, 768), [(2, 768, 768)]),
        ((8, 2048, 24), [(8, 8, 24)]),
        ((8, 2049, 24), [(8, 8, 24), (8, 24)]),  # what is left is a product of its own
        ((4096, 4096, 4096), [(4096, 4096)]),
    ],
)
def test_parts(sizes: tuple[int, int, int], shapes: list[tuple[int, ...]]) -> None:
    found = [n.output.shape for n in long_products(product(*sizes)).nodes if n.op == "matmul"]
    assert found == shapes


def test_only_halves_have_parts() -> None:
    assert all(n.output.rank == 2 for n in long_products(product(8, 2048, 24, dtypes.float32)).nodes)


@pytest.mark.parametrize("k", [2048, 2100])
def test_parts_add_up(k: int) -> None:
    graph = product(8, k, 24)
    x, y = (RNG.standard_normal((k, d)).astype(ml_dtypes.bfloat16) for d in (8, 24))
    (found,) = interpret(long_products(graph), [x, y])
    wanted = x.astype(np.float64).T @ y.astype(np.float64)
    np.testing.assert_allclose(found.astype(np.float64), wanted, atol=2.0**-7 * np.abs(wanted).max())


def test_weights_are_converted_before_they_are_turned() -> None:
    b = Builder()
    x, w = b.input(TensorType(dtypes.bfloat16, (8, 16)), "x"), b.input(TensorType(dtypes.float32, (24, 16)), "w")
    graph = long_products(b.graph([b.matmul(x, b.cast(b.swap(w, 0, 1), dtypes.bfloat16))], ["z"]))
    assert [n.op for n in graph.nodes] == ["cast", "transpose", "matmul"]


LONG = model_of(
    """g (float[2048, 6] x, int64[2048] t) => (float loss) {
    a = MatMul(x, w) h = Relu(a) y = MatMul(h, v) loss = SoftmaxCrossEntropyLoss<reduction = "mean">(y, t) }""",
    w=(6, 16), v=(16, 4),
)  # fmt: skip


@needs_triton
def test_steps_with_parts(simulator: Simulator) -> None:
    batch: Any = {"x": RNG.standard_normal((2048, 6)).astype(np.float32), "t": RNG.integers(0, 4, 2048)}
    options: dict[str, Any] = {"optimizer": SGD(lr=0.1), "precision": "bfloat16"}
    ours, theirs = train(LONG, [batch, batch], "loss", options), simulated(simulator, LONG, [batch, batch], **options)
    assert ours.errors == theirs.errors == ["", ""]
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=1e-3)
    for key in ours.state.keys() - {"seed"}:
        np.testing.assert_allclose(theirs.state[key], ours.state[key], rtol=1e-2, atol=1e-3, err_msg=key)
