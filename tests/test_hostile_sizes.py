"""Models with very many nodes, names, outputs or views: what they cost grows with them, and no faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.compiler import machine_code
from onnxc.errors import LimitError, ModelError, OnnxcError
from onnxc.frontends import onnx_file
from onnxc.ir.graph import MOST_SOURCES
from onnxc.passes.decompose import decompose
from onnxc.passes.prepare import MOST_VIEWS, prepare
from onnxc.runtime import model
from onnxc.runtime.cpu import available_bytes, memory_bytes
from tests.small_models import parse
from tests.test_hostile import generate, one

F = TensorProto.FLOAT
DOUBLINGS = 60  # of a term: a walk that does not know where it has been takes 2^60 steps


def squared(value: str, result: str) -> str:
    """A value times itself, again and again."""
    names = [value, *(f"{result}{i}" for i in range(DOUBLINGS - 1)), result]
    return " ".join(f"{b} = Mul({a}, {a})" for a, b in pairwise(names))


SHARED = {
    "between two softmaxes": f"p = Softmax(x) {squared('p', 'q')} r = Softmax(q) {squared('r', 'y')}",
    "on both sides of a concatenation": f"n = Neg(x) {squared('x', 'a')} {squared('n', 'b')} y = Concat<axis=0>(a, b)",
    "after a product": f"t = Transpose(x) p = MatMul(x, t) {squared('p', 'y')}",
    "of a row, beside a matrix": f"m = ReduceMax<axes=[0]>(x) {squared('m', 'a')} y = Mul(x, a)",
}


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
@pytest.mark.parametrize("body", SHARED.values(), ids=SHARED.keys())
def test_terms_that_share_their_parts(body: str, target: str) -> None:
    """Kernels whose terms are graphs, and no trees."""
    proto = parse(f"(float[64, 96] x) => (float[M, N] y) {{ {body} }}", opset=13)
    if target == "cpu":
        x = np.linspace(0.9, 1.0, 64 * 96, dtype=np.float32).reshape(64, 96)
        assert onnxc.compile(proto)(x)[0].shape[1] in (64, 96)
    else:
        pytest.importorskip("triton")
        assert onnxc.compile(proto, target=target).explain().kernels


VIEWS = {
    "transposes": lambda i: helper.make_node("Transpose", [f"v{i}"], [f"v{i + 1}"], perm=[1, 2, 0]),
    "slices": lambda i: helper.make_node("Slice", [f"v{i}", "from", "to"], [f"v{i + 1}"]),
    "unary functions after a product": lambda i: helper.make_node("Tanh", [f"v{i}"], [f"v{i + 1}"]),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_chains_of_one_kind(make: Callable[[int], onnx.NodeProto]) -> None:
    """As deep as Python's stack would have to be, were they walked by recursion."""
    n = 600
    nodes = [helper.make_node("MatMul", ["x", "w"], ["v0"]), *(make(i) for i in range(n))]
    weights = [
        onnx.numpy_helper.from_array(a, name)
        for name, a in {"w": np.eye(4, dtype=np.float32), "from": np.array([0]), "to": np.array([2**60])}.items()
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", F, [2, 3, 4])],
        [helper.make_tensor_value_info(f"v{n}", F, None)], weights,
    )  # fmt: skip
    generate(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


def test_more_than_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have more of it, and others may have taken that: the system would end the process."""
    assert 0 < available_bytes() <= memory_bytes()
    monkeypatch.setattr(model, "memory_bytes", lambda: 1 << 14)
    text = "(float[n] x) => (float[n] y) <int64 z = {0}> { s = Softmax (x) a = CumSum (s, z) y = Softmax (a) }"
    compiled = onnxc.compile(parse(text))
    monkeypatch.setattr(model, "available_bytes", lambda: 1 << 14)
    assert compiled(np.ones(1 << 10, np.float32))["y"].shape == (1 << 10,)
    with pytest.raises(LimitError, match=r"in the output 'y', and .* more; 16384 bytes of memory are left"):
        compiled(np.ones(1 << 12, np.float32))


def test_views_of_views_are_cut() -> None:
    """Some copies among them, and the same answer."""
    n = 3 * MOST_VIEWS
    body = " ".join(f"v{i + 1} = Transpose<perm=[1, 2, 0]>(v{i})" for i in range(n + 1))
    proto = parse(f"(float[2, 3, 4] v0) => (float[A, B, C] v{n + 1}) {{ {body} }}")
    copies = [node for node in prepare(decompose(onnx_file.load(proto))).nodes if node.op == "copy"]
    assert len(copies) == 2
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(onnxc.compile(proto)(x)[0], x.transpose(1, 2, 0))


def test_one_value_that_is_given_out_very_often() -> None:
    """Each copy would cite all the nodes that were found to be equal: the square of their number."""
    n = MOST_SOURCES + 200
    nodes = [helper.make_node("Relu", ["x"], [f"y{i}"]) for i in range(n)]
    outputs = [helper.make_tensor_value_info(f"y{i}", F, None) for i in range(n)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", F, [3])], outputs)
    program = generate(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert sum(len(call.origin) for call in program.calls) < 4 * n


def test_names_of_calls_in_calls() -> None:
    """A node's name has those of the calls around it: 2^10 nodes would have ten times 100,000 characters each."""
    long, opset = "n" * 100_000, [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    functions = [helper.make_function("f", "F0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opset)]
    for i in range(1, 11):
        calls = [
            helper.make_node(f"F{i - 1}", [a], [b], name=long, domain="f") for a, b in (("a", "c"), ("c", "b"))
        ]  # fmt: skip
        functions.append(helper.make_function("f", f"F{i}", ["a"], ["b"], calls, opset))
    graph = helper.make_graph(
        [helper.make_node("F10", ["x"], ["y"], domain="f")], "g", [helper.make_tensor_value_info("x", F, [3])],
        [helper.make_tensor_value_info("y", F, None)],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=opset, ir_version=9, functions=functions)
    nodes = onnx_file.load(proto).nodes
    assert len(nodes) == 1024
    assert max(len(s.name) for node in nodes for s in node.origin) < 10_000


def test_many_inputs_and_initializers() -> None:
    n = 20_000
    values = [helper.make_tensor_value_info(f"x{i}", F, [f"d{i}"]) for i in range(n)]
    weights = [onnx.numpy_helper.from_array(np.zeros(1, np.float32), f"w{i}") for i in range(n)]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x7"], ["y"])], "g", values, [helper.make_tensor_value_info("y", F, None)], weights
    )
    found = onnx_file.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert len(found.inputs) == n and len(found.nodes) == 1


EQUATIONS = ["......ii,...jj->...ij", "ij,jk->i?", "i1,1j->ij", "i..j,jk->ik", "ij,jk->......ik"]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_equations_that_are_none(equation: str) -> None:
    with pytest.raises(ModelError, match="an ellipsis"):
        generate(
            parse(f'(float[3, 3] x, float[3, 3] w) => (float[A, B] y) {{ y = Einsum<equation="{equation}">(x, w) }}')
        )


def branches(depth: int) -> list[onnx.NodeProto]:
    """An If whose branches are such Ifs."""
    if depth == 0:
        return [helper.make_node("Relu", ["x"], ["r0"])]
    graphs = {}
    for which in ("then_branch", "else_branch"):
        end = helper.make_node("Neg", [f"r{depth - 1}"], [f"{which}{depth}"])
        output = helper.make_tensor_value_info(f"{which}{depth}", F, None)
        graphs[which] = helper.make_graph([*branches(depth - 1), end], which, [], [output])
    return [helper.make_node("If", ["c"], [f"r{depth}"], **graphs)]


def branching(depth: int) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", F, [4]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    graph = helper.make_graph(branches(depth), "g", inputs, [helper.make_tensor_value_info(f"r{depth}", F, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_branches_that_double(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that differ in the nodes that they cite, and in nothing else, are compiled once."""
    built, compile_library = [], machine_code.compile_library
    monkeypatch.setattr(machine_code, "compile_library", lambda *a, **b: built.append(a) or compile_library(*a, **b))
    model = onnxc.compile(branching(4), fusion=onnxc.FusionOptions(selects=False))
    assert len(built) <= 3 < 16 <= len(model.explain().kernels)
    x = np.array([-1, 0, 1, 2], np.float32)
    for c in (True, False):
        np.testing.assert_array_equal(model(x, np.array(c))[0], np.maximum(x, 0))


def test_functions_without_end() -> None:
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]

    def model(calls: Callable[[int], list[str]], count: int) -> onnx.ModelProto:
        functions = [
            helper.make_function(
                "f", f"F{i}", ["a"], ["b"],
                [helper.make_node(name, ["a"], [f"b{k}" if k else "b"], domain="f") for k, name in enumerate(calls(i))],
                opset,
            )
            for i in range(count)
        ]  # fmt: skip
        graph = helper.make_graph(
            [helper.make_node("F0", ["x"], ["y"], domain="f")], "g", [helper.make_tensor_value_info("x", F, [3])],
            [helper.make_tensor_value_info("y", F, None)],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=opset, ir_version=9, functions=functions)

    for proto, kind in (
        (model(lambda i: [f"F{(i + 1) % 3}"], 3), ModelError),  # in a circle
        (model(lambda i: [f"F{i + 1}", f"F{i + 1}"], 60), LimitError),  # twice as many at each depth
        (model(lambda i: [f"F{i + 1}"], 5000), LimitError),
    ):
        with pytest.raises(OnnxcError) as caught:
            onnx_file.load(proto)
        assert isinstance(caught.value, kind)


DEEP = 24  # loops in each other, each with an iteration


@pytest.mark.parametrize("known", [True, False])
def test_loops_in_loops(known: bool) -> None:
    """A body is built once: twice in each of the loops around it would be 2^24 times."""
    nodes = [helper.make_node("Neg", ["x0"], ["y0"])]
    for i in range(DEEP):
        inputs = [
            helper.make_tensor_value_info(f"i{i}", TensorProto.INT64, []),
            helper.make_tensor_value_info(f"c{i}", TensorProto.BOOL, []),
            helper.make_tensor_value_info(f"x{i}", F, [3]),
        ]
        outputs = [
            helper.make_tensor_value_info(f"d{i}", TensorProto.BOOL, []),
            helper.make_tensor_value_info(f"y{i}", F, [3]),
        ]
        body = helper.make_graph([helper.make_node("Identity", [f"c{i}"], [f"d{i}"]), *nodes], "body", inputs, outputs)
        nodes = [helper.make_node("Loop", ["trip", "", f"x{i + 1}"], [f"y{i + 1}"], body=body)]
    x = helper.make_tensor_value_info(f"x{DEEP}", F, [3])
    y = helper.make_tensor_value_info(f"y{DEEP}", F, [3])
    trip = helper.make_tensor_value_info("trip", TensorProto.INT64, [])
    one = [helper.make_tensor("trip", TensorProto.INT64, [], [1])]
    graph = helper.make_graph(nodes, "g", [x] if known else [x, trip], [y], one if known else [])
    model = onnxc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    given = [np.arange(3, dtype=np.float32)] + ([] if known else [np.int64(1)])
    np.testing.assert_array_equal(model(*given)[0], -given[0])


MANY = 2**38
WIDE: dict[str, Callable[[], onnx.ModelProto]] = {
    "taps of a transposed convolution": lambda: one("ConvTranspose", [[1, 1, 8], [1, 1, MANY]], strides=[2]),
    "taps in two axes, dilated": lambda: one(
        "ConvTranspose", [[1, 1, 8, 8], [1, 1, 2**20, 2**18]], strides=[2, 2], dilations=[3, 3]
    ),
    "taps of a dilated convolution": lambda: one("Conv", [[1, 1, 4 * MANY], [1, 1, MANY]], dilations=[3]),
    "groups": lambda: one("Conv", [[1, MANY, 4, 4], [MANY, 1, 3, 3]], group=MANY),
    "groups of three channels": lambda: one("Conv", [[1, 3 * 2**32, 4], [6 * 2**32, 3, 3]], group=2**32),
}


@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
def test_convolutions_of_very_many(make: Callable[[], onnx.ModelProto]) -> None:
    """What is chosen by the taps and groups of a convolution is known without a look at each."""
    started = time.process_time()
    generate(make())
    assert time.process_time() - started < 20


def test_samples_of_regions_have_a_limit() -> None:
    shapes = [[1, 1, 4, 4], [3, 4], [3]]
    for attrs in ({"sampling_ratio": 2**31}, {"sampling_ratio": 2, "output_width": 2**60}):
        with pytest.raises(LimitError, match=r"RoiAlign needs a table of \d+ elements.*'the_node'"):
            generate(one("RoiAlign", shapes, types=[F, F, TensorProto.INT64], **attrs))
