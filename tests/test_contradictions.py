"""Models that contradict themselves: what they declare, what their attributes are said to be. onnxruntime refuses them
when it loads them; each is an error here that names the node.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxc.errors import ModelError, ShapeError
from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType, contradict
from onnxc.ops.registry import OpDef, apply
from onnxc.passes.decompose import decompose
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from tests.small_models import parse


def built(model: onnx.ModelProto) -> Graph:
    return decompose(onnx_file.load(model), staged=True)


LOOP = """(float[2] x, int64 n) => (float[2] y) {{ y = Loop (n, , x) <body = b ({number} i, bool k, {state} s) =>
    (bool l, {after} o) {{ l = Identity (k) o = Add (s, s) }}> }}"""
DECLARED = {
    "an output": "(float[2] x) => (int64[2] y) { y = Relu (x) }",
    "a value": "(float[2] x) => (float[2] y) <int64[2] a> { a = Neg (x) y = Relu (a) }",
    "a constant": "() => (int64 y) { y = Constant <value_float = 1.0> () }",
    "a sequence": "(float[2] x) => (seq(int64[2]) y) { y = SequenceConstruct (x) }",
    "a sequence of a tensor": "(float[2] x) => (seq(float[2]) y) { y = Relu (x) }",
    "the number of an iteration": LOOP.format(number="int32", state="float[2]", after="float[2]"),
    "a state": LOOP.format(number="int64", state="double[2]", after="float[2]"),
    "what a body gives": LOOP.format(number="int64", state="float[2]", after="double[2]"),
}


@pytest.mark.parametrize("text", DECLARED.values(), ids=DECLARED.keys())
def test_declared_element_types(text: str) -> None:
    with pytest.raises(ModelError, match=r"declare.* as .*node n\d"):
        built(parse(text))


def test_declared_shapes_are_notes() -> None:
    """They may be out of date: onnxruntime warns, and goes on."""
    graph = built(parse("(float[n, 4] x) => (float[7] y) <float[9, 9] a> { a = Neg (x) y = Relu (a) }"))
    assert str(graph.outputs[0].type) == "float32[s0, 4]"
    built(parse(LOOP.format(number="int64", state="float[9, 9]", after="float")))


@pytest.mark.parametrize("kind", ["int64", "seq(float)"])
def test_branches_give_the_same_element_types(kind: str) -> None:
    made = "Cast <to = 7> (x)" if kind == "int64" else "SequenceConstruct (x)"
    model = parse(
        f"""(float[n] x, bool c) => (z) {{ z = If (c) <then_branch = t () => (float[n] p) {{ p = Neg (x) }},
        else_branch = e () => ({kind}[k] q) {{ q = {made} }}> }}""".replace("seq(float)[k]", "seq(float[k])")
    )
    with pytest.raises(ModelError, match=r"an If gives float32, and in the other branch .*node n0 If"):
        built(model)


def test_a_loop_carries_one_element_type() -> None:
    model = parse(
        LOOP.format(number="int64", state="float[2]", after="int64[2]").replace("Add (s, s)", "Cast <to=7> (s)")
    )
    with pytest.raises(ModelError, match=r"a Loop carries float32, and after an iteration int64 .*node n0 Loop"):
        built(model)


def test_what_a_call_declares() -> None:
    """A function's nodes give what the call's outputs are declared as, an output that is an input too."""
    text = """<ir_version: 8, opset_import: ["" : 18, "f" : 1]> g (float[2] x) => (TYPE[2] y) {{ y = f.F (x) }}
        <domain: "f", opset_import: ["" : 18]> F (a) => (b) {{ b = {} (a) }}"""
    built(onnx.parser.parse_model(text.format("Neg").replace("TYPE", "float")))
    for op in ("Neg", "Identity"):
        with pytest.raises(ModelError, match="'y' is float32, but the model declares it as bool"):
            built(onnx.parser.parse_model(text.format(op).replace("TYPE", "bool")))
    passed = onnx.parser.parse_model(text.format("Neg").replace("TYPE", "bool"))
    passed.functions[0].output[0] = "a"
    with pytest.raises(ModelError, match="'y' is float32, but the model declares it as bool"):
        built(passed)


def test_element_types_that_there_are_not() -> None:
    model = parse("(float[2] x) => (float[2] y) <float[2] a> { a = Neg (x) y = Relu (a) }")
    model.graph.value_info[0].type.tensor_type.elem_type = 99
    with pytest.raises(ModelError, match="the value 'a' has an unknown element type"):
        onnx_file.load(model)
    model.graph.value_info[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    built(model)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [("int64", "int64", False), ("int64", "int32", True), ("?", "int32", False), ("optional(?)", "int32", False),
     ("sequence(?)", "sequence(int64)", False), ("sequence(int32)", "sequence(int64)", True),
     ("sequence(optional(int32))", "sequence(int64)", False), ("sequence(int64)", "int64", True)],
)  # fmt: skip
def test_names_of_types(a: str, b: str, wanted: bool) -> None:
    assert contradict(a, b) is contradict(b, a) is wanted


IMAGE = "(float[1,2,7,7] x) => (y) <float[2,2,1,1] w = {1,2,3,4}> { y = OP (x, w) }"
ATTRIBUTES = {
    "a flag": ("(float[1,2,7,7] x) => (y) { y = MaxPool <kernel_shape = [2,2], ceil_mode = 7> (x) }", "0 or 1"),
    "an order": ("(float[1,2,7,7] x) => (y) { y = MaxPool <kernel_shape = [2,2], storage_order = -1> (x) }", "0 or 1"),
    "a name": ('(float[3] x) => (y) { y = Gelu <approximate = "Tanh"> (x) }', "'none' or 'tanh'"),
    "a name where it is not read": (
        '(float[1,1,4] x, float[3] s) => (y) { y = Resize <nearest_mode = "up", mode = "linear"> (x, , s) }', "'floor'",
    ),
    "a direction": (
        '(float[3,1,2] x, float[1,4,2] w, float[1,4,4] r) => (y) { y = RNN <direction = "back"> (x, w, r) }',
        "'forward', 'reverse' or 'bidirectional'",
    ),
    "a clip": ("(float[3,1,2] x, float[1,4,2] w, float[1,4,4] r) => (y) { y = RNN <clip = -1.0> (x, w, r) }", "clip"),
    "an int for a float": ("(float[3] x) => (y) { y = LeakyRelu <alpha = 1> (x) }", "alpha of LeakyRelu is 1"),
    "ints for floats": ("(float[3,1,2] x, float[1,4,2] w, float[1,4,4] r) => (y) "
                        "{ y = RNN <activation_alpha = [1]> (x, w, r) }", "activation_alpha"),
    "two ways of padding": (IMAGE.replace("OP", 'Conv <auto_pad = "SAME_UPPER", pads = [1,1,1,1]>'), "leave one"),
    "of padding back": (IMAGE.replace("OP", 'ConvTranspose <auto_pad = "VALID", pads = [1,1,1,1]>'), "leave one"),
    "an output of other axes": (IMAGE.replace("OP", "ConvTranspose <output_shape = [1,1,1,9,9]>"), "output_shape"),
    "an axis twice": ("(float[1,1,4] x, float[2] s) => (y) { y = Resize <axes = [2,-1]> (x, , s) }", "axis twice"),
    "an integer type": ("(float[3] x) => (y) { y = RMSNormalization <stash_type = 7> (x,x) }", "stash"),
    "a precision of integers": (
        "(float[1,2,3,4] x) => (y) { y = Attention <softmax_precision = 2> (x, x, x) }", "softmax_precision",
    ),
    "a mode before the first": (
        "(float[1,2,3,4] x) => (y) { y = Attention <qk_matmul_output_mode = -1> (x, x, x) }", "0, 1, 2 or 3",
    ),
    "heads that there are not": (
        "(float[1,2,3,4] x) => (y) { y = Attention <q_num_heads = 7> (x, x, x) }", "q_num_heads 7, .* has 2 heads",
    ),
    "a negative part to turn": (
        "(float[1,2,3,4] x, float[3,1] c) => (y) { y = RotaryEmbedding <rotary_embedding_dim = -2> (x, c, c) }", "-2",
    ),
    "more than matrices": ("(float[3,4,4] x, float[4,4] w) => (y) { y = Gemm <transA = 1> (x, w) }", "two matrices"),
    "of a node that waits": ("(float[k] x, int64[n] s) => (y) { y = Reshape <allowzero = 2> (x, s) }", "0 or 1"),
    "a window of other axes": (
        "(float[1,1,4] x, int64[1,1,4] i) => (y) { y = MaxUnpool <kernel_shape = [2], pads = [0,0,0]> (x, i) }", "pads",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), ATTRIBUTES.values(), ids=ATTRIBUTES.keys())
def test_attributes_out_of_their_domain(text: str, says: str) -> None:
    with pytest.raises((ModelError, ShapeError), match=f"{says}.*node n0 "):
        built(parse(text, opset=23))


@pytest.mark.parametrize(
    ("node", "says"),
    [("Add (, x)", "Add lacks its input 0, 'x'"), ("com.microsoft.BiasGelu (, x)", "BiasGelu lacks its input 0"),
     ("com.microsoft.BiasGelu (x)", "BiasGelu lacks its input 1"), ("Where (x, , x)", "Where lacks its input 1"),
     ("Mean (, x)", "Mean lacks its input 0"), ("Concat <axis = 0> (x, , x)", "Concat lacks its input 1")],
)  # fmt: skip
def test_inputs_that_an_op_cannot_do_without(node: str, says: str) -> None:
    model = parse(f"(float[3] x) => (y) {{ y = {node} }}")
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    if "Where" in node:
        model.graph.input[0].type.tensor_type.elem_type = TensorProto.BOOL
    with pytest.raises(ModelError, match=f"{says}.*node n0 "):
        built(model)


def test_an_attribute_of_two_types() -> None:
    model = parse("(float[3] x) => (y) { y = Softmax <axis = 0> (x) }")
    model.graph.node[0].attribute[0].f = 1
    model.graph.node[0].attribute[0].i = -1
    with pytest.raises(ModelError, match=r"of type INT, but its value is one of FLOAT .*n0 Softmax"):
        built(model)


def test_bits_that_an_element_does_not_have() -> None:
    node = "com.microsoft.GatherBlockQuantized <bits = 7, block_size = 16> (t, i, s)"
    model = parse(f"(int4[4,32] t, int64[2] i, float[4,2] s) => (y) {{ y = {node} }}", opset=21)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ModelError, match=r"has 7 bits; there are 4 .*node n0 "):
        built(model)


def test_directions_of_a_scan() -> None:
    text = """(float[2] z, float[3,2] x) => (e, y) { e, y = Scan <num_scan_inputs = 1, scan_input_directions = [DIR],
        body = b (float[2] s, float[2] u) => (float[2] t, float[2] o) { t = Add (s, u) o = Identity (t) }> (z, x) }"""
    built(parse(text.replace("DIR", "1")))
    with pytest.raises(ModelError, match="scan_input_directions of Scan"):
        built(parse(text.replace("DIR", "-1")))


def test_an_axis_that_is_named_twice_counts_once() -> None:
    twice, once = (
        built(parse(f"(float[2,3] x) => (y) {{ y = MeanVarianceNormalization <axes = {axes}> (x) }}"))
        for axes in ("[1, -1]", "[1]")
    )
    assert [n.op for n in twice.nodes] == [n.op for n in once.nodes]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(interpret(twice, [x])[0], interpret(once, [x])[0])


def test_padding_that_is_said_twice_and_is_none() -> None:
    """Pads of zero beside auto_pad contradict nothing, and pools go by auto_pad, as in onnxruntime."""
    built(parse(IMAGE.replace("OP", 'Conv <auto_pad = "VALID", pads = [0,0,0,0]>')))
    pool = 'MaxPool <auto_pad = "VALID", kernel_shape = [2,2], pads = [1,1,1,1]> (x)'
    graph = built(parse(f"(float[1,2,7,7] x) => (y) {{ y = {pool} }}"))
    assert str(graph.outputs[0].type) == "float32[1, 2, 6, 6]"


def test_definitions_whose_annotations_cannot_be_read() -> None:
    """Of a user's operator, whose annotations may name what only a type checker imports."""

    def define(b: Builder, x: Value, *, mode: Unknown = "a", scale: float = 1.0) -> Value:  # type: ignore[name-defined]  # noqa: F821
        return b.mul(x, scale)

    definition = OpDef("Mine", "com.example", 1, None, define)
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (2,)))
    apply(definition, b, [x], {"mode": 3, "scale": 2.0}, 1, 1)
    with pytest.raises(ModelError, match="scale of Mine is 2, not of the type float"):
        apply(definition, b, [x], {"scale": 2}, 1, 1)
