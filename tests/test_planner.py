"""What the planner makes of well-known patterns: how many kernels, of which kind, and why."""

from __future__ import annotations

from itertools import count

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.codegen.cpp.index_sets import breakpoint_of
from onnxc.compiler.stages import Stages, generate
from onnxc.frontends import onnx_file
from onnxc.loops.access import fresh
from onnxc.planner.groups import FusionOptions
from onnxc.runtime.cpu import level

Weights = dict[str, np.ndarray]


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, list[int | str]], outputs: list[str], weights: Weights
) -> onnx.ModelProto:
    """A float32 model of opset 20."""
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
        [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def kinds(m: onnx.ModelProto, **options: bool) -> list[str]:
    """The kind of each kernel of a run."""
    return [k.kind for k in onnxc.compile(m, **options).explain().kernels]


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def scalar(x: float) -> np.ndarray:
    return np.asarray(x, np.float32)


def test_matmul_chain_is_one_template_and_one_fused_kernel() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "one"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Mul", ["c", "half"], ["d"]),
        helper.make_node("ReduceSum", ["d"], ["y"], keepdims=0),
    ]
    weights = {"w": weight(64, 32), "one": scalar(1), "half": scalar(0.5)}
    assert kinds(model(nodes, {"x": [16, 64]}, ["y"], weights)) == ["matmul", "loops"]


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_a_softmax_is_one_kernel(op: str) -> None:
    assert kinds(model([helper.make_node(op, ["x"], ["y"], axis=-1)], {"x": [4, 33]}, ["y"], {})) == ["loops"]


def test_normalisation_with_residual_is_one_kernel() -> None:
    nodes = [
        helper.make_node("Add", ["x", "r"], ["s"]),
        helper.make_node("LayerNormalization", ["s", "g", "b"], ["y"]),
    ]
    m = model(nodes, {"x": [4, 40], "r": [4, 40]}, ["y", "s"], {"g": weight(40), "b": weight(40)})
    (kernel,) = onnxc.compile(m).explain().kernels
    assert "stored for others" in " ".join(kernel.reasons)  # the sum is an output as well


def test_attention_is_recognised_as_computed() -> None:
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["t"]),
        helper.make_node("Softmax", ["t"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    m = model(nodes, {n: [1, 2, 9, 16] for n in "qkv"}, ["y"], {"scale": scalar(0.25)})
    assert kinds(m) == ["attention"]
    assert kinds(m, attention=False).count("matmul") == 2


def test_a_residual_and_an_activation_run_in_the_convolution() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "b"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["y"]),
    ]
    m = model(nodes, {"x": [1, 16, 8, 8]}, ["y"], {"w": weight(16, 16, 3, 3), "v": weight(16, 16, 3, 3)})
    found = kinds(m)
    assert [k.split()[0] for k in found] == ["loops", "conv", "conv", "loops"]  # the first changes the layout


def test_a_concatenation_of_convolutions_needs_no_kernel() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Conv", ["a", "v"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["c"], axis=1),
        helper.make_node("Conv", ["c", "u"], ["y"]),
    ]
    weights = {"w": weight(16, 16, 1, 1), "v": weight(16, 16, 1, 1), "u": weight(8, 32, 1, 1)}
    found = kinds(model(nodes, {"x": [1, 16, 8, 8]}, ["y"], weights))
    assert [k.split()[0] for k in found] == ["loops", "conv", "conv", "conv"]


def test_a_routine_reads_and_writes_other_shapes_where_they_lie() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "wide"], ["a"]),
        helper.make_node("CumSum", ["a", "axis"], ["b"]),
        helper.make_node("Reshape", ["b", "long"], ["y"]),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("Reshape", ["r", "wide"], ["c"]),
        helper.make_node("CumSum", ["c", "axis"], ["d"]),
        helper.make_node("Reshape", ["d", "long"], ["e"]),
        helper.make_node("Sqrt", ["e"], ["s"]),
    ]
    numbers = {"wide": np.array([4, 9]), "long": np.array([36]), "axis": np.array(1)}
    m = model(nodes, {"x": [2, 3, 6]}, ["y", "e", "s", "r"], numbers)
    assert kinds(m) == ["cumsum", "loops", "cumsum", "loops"]
    x = np.random.default_rng(0).standard_normal((2, 3, 6)).astype(np.float32)
    b = np.cumsum(x.reshape(4, 9), 1)
    e = np.cumsum(np.maximum(b, 0), 1).ravel()
    got = onnxc.compile(m)(x)
    for name, wanted in {"y": b.ravel(), "e": e, "s": np.sqrt(e), "r": np.maximum(b, 0)}.items():
        np.testing.assert_allclose(got[name], wanted, 1e-5, 1e-5)


def test_equal_layers_share_their_functions() -> None:
    nodes, weights, last = [], {}, "x"
    for k in range(4):
        weights[f"w{k}"] = weight(32, 32) + k
        nodes += [
            helper.make_node("MatMul", [last, f"w{k}"], [f"a{k}"]),
            helper.make_node("Tanh", [f"a{k}"], [f"b{k}"]),
        ]
        last = f"b{k}"
    report = onnxc.compile(model(nodes, {"x": [8, 32]}, [last], weights)).explain()
    assert len(report.kernels) == 4
    assert len({k.function for k in report.kernels}) == 1


def test_every_kernel_cites_its_nodes_by_number_and_type() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["a"], name="secret name"), helper.make_node("Tanh", ["a"], ["y"])]
    compiled = onnxc.compile(model(nodes, {"x": [8, 32]}, ["y"], {}))
    assert "n0 Exp, n1 Tanh" in compiled.source
    assert "secret name" not in compiled.source
    assert "secret name" in str(compiled.explain())


def test_switches_turn_fusion_off_and_change_no_answer() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])]
    m = model(nodes, {"x": [8, 33]}, ["y"], {})
    x = weight(8, 33)
    fused, plain = onnxc.compile(m), onnxc.compile(m, fusion=False)
    assert len(plain.explain().kernels) == 2
    np.testing.assert_array_equal(fused(x)["y"], plain(x)["y"])


def test_what_was_compiled_before_changes_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("InstanceNormalization", ["t", "g", "b"], ["n"]),
        helper.make_node("Softmax", ["n"], ["s"], axis=1),
        helper.make_node("Transpose", ["s"], ["y"], perm=[3, 1, 0, 2]),
    ]
    m = model(nodes, {"x": [2, 5, 7, 8]}, ["y"], {"g": weight(7), "b": weight(7)})
    texts = []
    for start in (0, 7, 95, 991, 9995):  # loop variables are numbered through the life of a process
        monkeypatch.setattr("onnxc.loops.access._fresh", count(start))
        texts.append(onnxc.compile(m, cache=False).source)
    assert set(texts) == {texts[0]}


def test_the_numbers_of_values_change_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of one kernel lie in the arena in their own order, whatever numbers they have."""
    nodes = [
        helper.make_node("Concat", ["x", "z"], ["c"], axis=1),
        helper.make_node("ReduceSum", ["c", "one"], ["s"], keepdims=0),
        helper.make_node("Softmax", ["c"], ["y"], axis=1),
        helper.make_node("Concat", ["u", "v"], ["w"], axis=0),
        helper.make_node("ReduceMax", ["w", "zero"], ["m"], keepdims=0),
    ]
    shapes: dict[str, list[int | str]] = {"x": [0, 5], "z": [0, 4], "u": [2, 0], "v": [3, 0]}
    m = model(nodes, shapes, ["s", "y", "m"], {"zero": np.array([0]), "one": np.array([1])})
    texts = []
    for start in range(48):  # values are numbered through the life of a process
        monkeypatch.setattr("onnxc.ir.graph._ids", count(start))
        texts.append(generate(onnx_file.load(m), level("x86-64-v3"), FusionOptions(), Stages()).source)
    assert set(texts) == {texts[0]}


def test_a_guard_of_two_loops_does_not_split_one_of_them() -> None:
    for _ in range(16):  # the names of loops have letters in them, or none
        i, j = fresh("i", 8), fresh("i", 8)
        assert breakpoint_of(i - j, next(iter(i.symbols()))) is None
    assert breakpoint_of(i - 3, next(iter(i.symbols()))) == 3


def test_vectors_of_what_has_loops_of_its_own() -> None:
    """A condition of whole rows that is an output too does not decide along which loop the rows are computed."""
    m = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    g (int64[2] n, int64[1, 1, 9, 1] at, float[2, 3, 9, 64] x) => (float[2, 3, 9, 64] y, bool[2, 1, 9, 1] seen) {
      shape = Constant <value = int64[4] {2, 1, 1, 1}> ()  zero = Constant <value = float {0}> ()
      end = Reshape (n, shape)  seen = Less (at, end)  y = Where (seen, x, zero)
    }""")
    compiled = onnxc.compile(m)
    (kernel,) = compiled.explain().kernels
    assert kernel.kind == "loops"
    text = compiled.explain().source(0)
    assert "stl(" in text and "sts(" not in text and "lds(" not in text
    n, at, x = np.array([4, 9]), np.arange(9).reshape(1, 1, 9, 1), weight(2, 3, 9, 64)
    y, seen = compiled.run(None, {"n": n, "at": at, "x": x})
    np.testing.assert_array_equal(seen, at < n.reshape(2, 1, 1, 1))
    np.testing.assert_array_equal(y, np.where(seen, x, 0))


@pytest.mark.parametrize(
    ("body", "fetched"),
    [
        ("y = Transpose <perm = [0, 2, 3, 1]> (x)", True),
        ("z = Relu (x)  y = Transpose <perm = [0, 2, 3, 1]> (z)", True),
        ("y = Conv <pads = [1, 1, 1, 1]> (x, w)", True),
        ("y = Softmax (x)", True),
        ("y = Relu (x)", False),
    ],
)
def test_rows_that_are_written_by_turns_are_fetched_for_writing(body: str, fetched: bool) -> None:
    m = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[2, 33, 7, 64] x, float[40, 33, 3, 3] w) => (y) {{ {body} }}""")
    text = onnxc.compile(m).explain().source("k0" if "Conv" not in body else "k1")
    assert ("ox_ahead(" in text) == fetched


@pytest.mark.parametrize("fusion", [True, False])
def test_a_long_chain_of_single_numbers_is_several_kernels(fusion: bool) -> None:
    """Single numbers are computed where they are used, as far as a kernel's terms do not grow too deep."""
    steps = [("Abs", 1), ("Add", 2), ("Neg", 1), ("Sub", 2)] * 100
    nodes = [helper.make_node(op, [f"v{k}", "v0"][:n], [f"v{k + 1}"]) for k, (op, n) in enumerate(steps)]
    nodes.append(helper.make_node("Mul", ["x", f"v{len(steps)}"], ["y"]))
    compiled = onnxc.compile(model(nodes, {"v0": [], "x": [7]}, ["y"], {}), fusion=fusion)
    assert 2 <= len(compiled.explain().kernels) <= 4
    x, start = weight(7), np.float32(0.3)
    v = start
    for _ in range(len(steps) // 4):
        v = -(abs(v) + start) - start
    np.testing.assert_array_equal(compiled(start, x)["y"], x * v)
