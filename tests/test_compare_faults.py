"""Faults that are planted in models and in the compiler: the comparison names the node, or the pass."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import onnxc.compiler.request
import onnxc.passes.decompose
import onnxc.passes.pipeline
import onnxc.passes.simplify
from onnxc.cli import app
from onnxc.codegen.cpp import program as cpp_program
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ops import registry
from onnxc.tools.compare import compare
from onnxc.tools.compare.results import Comparison
from onnxc.tools.compare.verdict import Verdict
from tests.compare_faults import FAULTS, Fault, inputs_of
from tests.small_models import parse


def reduced(found: Comparison, folder: Path) -> onnx.ModelProto:
    """What the reduction has written: a few nodes, and a command that shows the fault again."""
    reduction = found.reduction
    assert reduction is not None and 1 <= len(reduction.nodes) <= 5, str(found)
    again = CliRunner().invoke(app, shlex.split(reduction.command)[1:])
    assert again.exit_code == 1, again.output
    model = onnx.load(folder / "model.onnx")
    assert len(model.graph.node) <= 5
    return model


@pytest.fixture
def other_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a faulty compiler makes is not found in the cache by the correct one, nor the other way round."""
    name = request.node.nodeid
    monkeypatch.setattr(onnxc.compiler.request, "code_digest", lambda: f"with the fault of {name}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_in_a_model(fault: Fault, tmp_path: Path) -> None:
    """The faulty model beside the correct one: the node is named, and what is left fails in five nodes at most."""
    right, wrong = fault.models()
    given = inputs_of(right)
    found = compare(wrong, given, ours=fault.engine, reference=right, bisect="nodes", folder=tmp_path)
    culprit = found.culprit
    assert culprit is not None and culprit.name == fault.tensor, str(found)
    made = next(n.op_type for n in right.graph.node if fault.tensor in n.output)
    assert culprit.op_type == made and len(culprit.layer) <= 1 + len(right.graph.node) // 4
    reduced(found, tmp_path)
    assert found.reduction is not None and culprit.node in found.reduction.nodes
    assert len(onnx.load(tmp_path / "reference.onnx").graph.node) <= 5


@pytest.mark.parametrize("text", sorted({f.text for f in FAULTS}), ids=lambda t: t.split("(")[1][:24])
def test_no_false_alarm(text: str) -> None:
    """The correct models, compiled."""
    model = next(f for f in FAULTS if f.text == text).models()[0]
    found = compare(model, inputs_of(model), layers=True)
    assert found.agree and not found.faults, str(found)
    assert all(t.verdict in (Verdict.EQUAL, Verdict.ROUNDING) for t in found.layers)


# ---------------------------------------------------------------- faults in the compiler


def rewritten(graph: Graph, change: Callable[[Node], Node | None]) -> Graph:
    """The graph with some nodes replaced by others."""
    r = onnxc.passes.simplify.Rewriter(graph)
    for node in graph.nodes:
        new = change(node)
        if new is None:
            r.keep(node)
            continue
        inputs = [r.value(v) for v in new.inputs]
        made = Node(new.op, inputs, [Value(v.type, v.name) for v in node.outputs], new.attrs, new.regions, node.origin)
        r.nodes.append(made)
        for old, value in zip(node.outputs, made.outputs, strict=True):
            r.replace(old, value)
    return r.result()


def but(node: Node, **changes: Any) -> Node:
    """The node with other attributes."""
    return Node(node.op, node.inputs, [Value(v.type) for v in node.outputs], {**node.attrs, **changes}, (), node.origin)


def spoil_pass(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Node], Node | None]) -> None:
    """A pass of the pipeline also changes nodes that it should leave alone."""
    correct = getattr(onnxc.passes.pipeline, name)
    monkeypatch.setattr(
        onnxc.passes.pipeline, name, lambda *args, **options: rewritten(correct(*args, **options), change)
    )


def swapped(op: str) -> Callable[[Node], Node | None]:
    return lambda n: Node(n.op, n.inputs[::-1], [Value(n.output.type)], n.attrs) if n.op == op else None


def halved_scale(node: Node) -> Node | None:
    return but(node, scale=node.attrs["scale"] / 2) if node.op == "attention" else None


def without_bias(node: Node) -> Node | None:
    return Node("attention", node.inputs[:3], [Value(node.output.type)], node.attrs) if node.op == "attention" else None


def larger_constants(node: Node) -> Node | None:
    if node.op != "constant" or node.attrs["value"].dtype != np.float32 or node.attrs["value"].size < 6:
        return None
    return but(node, value=node.attrs["value"] * np.float32(1.001))


ATTENTION = """(float[1, 2, 8, 16] q, float[1, 2, 16, 8] k, float[1, 2, 8, 16] v, float[1, 1, 8, 8] m)
  => (float[1, 2, 8, 16] y) {
  a = Tanh(q) s = MatMul(a, k) c = Constant<value_float=0.25>() d = Mul(s, c) e = Add(d, m) p = Softmax<axis=-1>(e)
  o = MatMul(p, v) y = Sigmoid(o) }"""
MIXED = """(float[4, 6] x, float[4, 6] z) => (float[4, 6] y) {
  k = Constant<value_floats=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]>() l = Sqrt(k) a = Mul(x, l) b = Sub(a, z) c = Sigmoid(b)
  d = Div(z, k) e = Sub(c, d) f = Exp(e) y = Sub(f, x) }"""

PASSES: list[tuple[str, str, str, Callable[[Node], Node | None]]] = [
    ("fuse-attention", "fuse_attention", ATTENTION, halved_scale),
    ("fuse-attention", "fuse_attention", ATTENTION, without_bias),
    ("share-common", "share_common", MIXED, swapped("sub")),
    ("fold-constants", "fold_constants", MIXED, larger_constants),
    ("sink-constants", "sink_constants", MIXED, swapped("div")),
    ("eliminate-dead", "eliminate_dead", MIXED, swapped("sub")),
    ("prepare", "prepare", MIXED, swapped("sub")),
]


@pytest.mark.parametrize("name, function, text, change", PASSES, ids=lambda x: getattr(x, "__name__", str(x)[:16]))
def test_a_fault_in_a_pass(
    name: str, function: str, text: str, change: Callable[[Node], Node | None], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, other_compiler: None,
) -> None:  # fmt: skip
    model = parse(text, 20)
    given = inputs_of(model)
    spoil_pass(monkeypatch, function, change)
    found = compare(model, given, bisect="passes")
    assert not found.agree
    assert found.reduction is not None and found.reduction.culprit == name, str(found)
    reduced(compare(model, given, bisect="nodes", folder=tmp_path), tmp_path)


@pytest.mark.parametrize("text", [ATTENTION, MIXED], ids=["attention", "mixed"])
def test_no_fault_in_a_pass(text: str) -> None:
    model = parse(text, 20)
    assert compare(model, inputs_of(model))


def spoil_op(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[..., Any]) -> None:
    """Another definition of an operator."""
    monkeypatch.setattr(onnxc.passes.decompose, "apply", _spoiled(op, change))


def _spoiled(op: str, change: Callable[..., Any]) -> Callable[..., Any]:
    def apply(definition: Any, b: Any, inputs: Any, attrs: Any, *rest: Any) -> Any:
        return registry.apply(definition, b, inputs, change(attrs) if definition.name == op else attrs, *rest)

    return apply


OPS: list[tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("Softmax", ATTENTION, lambda attrs: {**attrs, "axis": -2}),
    ("LeakyRelu", "(float[3, 8] x) => (float[3, 8] y) { a = Tanh(x) b = LeakyRelu<alpha=0.1>(a) y = Exp(b) }",
     lambda attrs: {**attrs, "alpha": 0.11}),
    ("CumSum", """(float[3, 8] x) => (float[3, 8] y) { a = Tanh(x) k = Constant<value_int=1>() b = CumSum(a, k)
     c = Mul(b, x) y = Sub(c, b) }""", lambda attrs: {**attrs, "exclusive": 1}),
]  # fmt: skip


@pytest.mark.parametrize("op, text, change", OPS, ids=[op for op, *_ in OPS])
def test_a_fault_in_the_meaning_of_an_op(
    op: str, text: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    other_compiler: None,
) -> None:  # fmt: skip
    """float64 evaluates our own definition, which is wrong too: onnxruntime tells them apart."""
    spoil_op(monkeypatch, op, change)
    model = parse(text, 20)
    given = inputs_of(model)
    found = compare(model, given, attention=False, bisect="nodes", folder=tmp_path)
    assert found.culprit is not None and found.culprit.op_type == op, str(found)
    reduced(found, tmp_path)
    again = compare(model, given, attention=False, bisect="passes").reduction
    assert again is not None and again.culprit == "decompose"


KERNELS = """(float[4, 40] x, float[40, 24] w, float[24] c) => (float[4, 24] y) {
  a = Tanh(x) b = MatMul(a, w) d = Add(b, c) e = Relu(d) f = Exp(e) ax = Constant<value_ints=[1]>()
  s = ReduceSum<keepdims=1>(f, ax) g = Div(f, s) h = Floor(d) y = Sub(g, h) }"""


def spelled_otherwise(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """The C++ of every kernel, with one spelling replaced."""
    correct = cpp_program.ProgramWriter._function

    def function(self: Any, kernel: Any) -> str:
        return correct(self, kernel).replace(right, wrong)

    monkeypatch.setattr(cpp_program.ProgramWriter, "_function", function)


SPELLINGS = [("Floor", "v_floor(", "v_ceil("), ("Tanh", "v_tanh(", "v_sin("), ("Exp", "v_exp(", "v_sinh(")]


@pytest.mark.parametrize("op, right, wrong", SPELLINGS, ids=[op for op, *_ in SPELLINGS])
def test_a_fault_in_a_kernel(
    op: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other_compiler: None
) -> None:
    """Inside of fused kernels: the taps show which node it is."""
    model = parse(KERNELS, 20)
    given = inputs_of(model)
    spelled_otherwise(monkeypatch, right, wrong)
    found = compare(model, given, bisect="nodes", folder=tmp_path)
    assert found.culprit is not None and found.culprit.op_type == op, str(found)
    reduced(found, tmp_path)
    again = compare(model, given, bisect="passes").reduction
    assert again is not None and again.culprit == "code generation"


CASTS = [
    (6, "ox_trunc<i32, f32>(", "ox_trunc<i32, f32>(0.5f + "),  # to the nearest, and not to zero
    (10, "ox_fit<ox_half>(", "ox_fit<ox_half>(1.0004f * "),  # up, and not to the nearest
]


@pytest.mark.parametrize("to, right, wrong", CASTS, ids=["int32", "float16"])
def test_a_cast_that_rounds_wrongly(
    to: int, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other_compiler: None
) -> None:
    """One unit of a half, or one where float64 lies on the other side of a step (5 tanh(x) is 5 in float32)."""
    model = parse(f"""(float[4, 32] x) => (float[4, 32] y) {{ k = Constant<value_float=5.0>() a = Mul(x, k) b = Tanh(a)
      c = Mul(b, k) n = Cast<to={to}>(c) f = Cast<to=1>(n) e = Exp(f) g = Sqrt(e) y = Add(g, x) }}""", 20)  # fmt: skip
    given = inputs_of(model)
    assert not compare(model, given, layers=True).faults
    spelled_otherwise(monkeypatch, right, wrong)
    monkeypatch.setattr(onnxc.compiler.request, "code_digest", lambda: f"with a fault in casts to {to}")
    found = compare(model, given, bisect="nodes", folder=tmp_path)
    assert found.culprit is not None and found.culprit.name == "n", str(found)
    reduced(found, tmp_path)
    if to == 6:  # the outputs are so wrong that they are looked into without being asked
        again = compare(model, given, bisect="passes").reduction
        assert again is not None and again.culprit == "code generation", again


def test_no_fault_in_a_kernel() -> None:
    model = parse(KERNELS, 20)
    assert not compare(model, inputs_of(model), layers=True).faults


def test_a_stale_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other_compiler: None) -> None:
    """Two intermediates in one place: no tensor alone is wrong, and no pass.

    y reads d after e and f have taken its place: wrong by any order of the sums. A product that writes over what
    it multiplies may be right, where a tile takes whole rows of both.
    """
    text = """(float[64, 64] x, float[64, 64] w) => (float[64, 64] y) { a = MatMul(x, w) b = MatMul(a, w)
      c = MatMul(b, a) d = MatMul(c, b) e = MatMul(d, w) f = MatMul(e, w) y = MatMul(f, d) }"""
    model = parse(text, 20)
    given = inputs_of(model)
    monkeypatch.setattr(cpp_program, "assign_offsets", lambda sizes, spans: ([0] * len(sizes), max(sizes, default=0)))
    found = compare(model, given, bisect="passes", layers=True)
    assert not found.agree and found.reduction is not None
    assert found.reduction.culprit == "code generation", str(found)
    assert any("memory" in note for note in found.notes)
    reduced(compare(model, given, bisect="nodes", folder=tmp_path), tmp_path)


def test_an_output_of_constants_is_reduced(tmp_path: Path) -> None:
    """No layer makes it, as the inputs decide about none of it."""
    text = "(float[2] x) => (float[2] y, float[2] z) { y = Neg(x) c = Constant<value_floats=[1.0, 4.0]>() z = Sqrt(c) }"
    right, wrong = parse(text, 20), parse(text.replace("Sqrt", "Exp"), 20)
    found = compare(wrong, {"x": np.ones(2, np.float32)}, reference=right, bisect="nodes", folder=tmp_path)
    assert found.reduction is not None and found.reduction.culprit == "n2 Sqrt"
    reduced(found, tmp_path)


def test_sequences_of_different_lengths_are_wrong(tmp_path: Path) -> None:
    """Their parts have different shapes; the other output is compared all the same."""
    text = """(float[5] x) => (seq(float[m]) s, float[5] z) {
        z = Neg(x) k = Constant<value_int=2>() s = SplitToSequence<axis=0>(z, k) }"""
    right, wrong = parse(text, 20), parse(text.replace("value_int=2", "value_int=3"), 20)
    found = compare(wrong, {"x": np.ones(5, np.float32)}, reference=right, bisect="nodes", folder=tmp_path)
    assert [(o.name, o.verdict) for o in found.outputs] == [("s", Verdict.WRONG), ("z", Verdict.EQUAL)]
    assert not any("written out" in note for note in found.notes)
    reduced(found, tmp_path)
