"""A graph's text parses back to the same graph; the text itself is what a person reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper, numpy_helper

from onnxc.errors import InternalError, ModelError
from onnxc.frontends.onnx_file import load
from onnxc.ir import dtypes
from onnxc.ir.expr import Sym, ceildiv, floordiv, index, maximum, minimum, mod
from onnxc.ir.graph import Graph, Node, Source, Value
from onnxc.ir.text import INLINE, constants, from_text, to_text
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from onnxc.primitives.verify import verify


def same(a: Graph, b: Graph) -> None:
    """Both graphs have the same structure, types, attributes, names, contents and origins."""
    numbers: dict[int, int] = {}
    _same(a, b, numbers)


def _pair(a: Value | None, b: Value | None, numbers: dict[int, int]) -> None:
    if a is None or b is None:
        assert a is b
        return
    assert numbers.setdefault(a.id, b.id) == b.id and a.name == b.name and repr(a.type) == repr(b.type)
    assert (a.type is None) == (b.type is None) and (a.type is None or a.type == b.type)
    assert (a.data is None) == (b.data is None)
    if a.data is not None and b.data is not None:
        assert a.data.shape == b.data.shape and a.data.tolist() == b.data.tolist()


def _same(a: Graph, b: Graph, numbers: dict[int, int]) -> None:
    assert (a.name, a.output_names, a.dim_names, a.metadata) == (
        b.name,
        b.output_names,
        b.dim_names,
        b.metadata,
    )
    for x, y in zip([*a.inputs, *a.outputs], [*b.inputs, *b.outputs], strict=True):
        _pair(x, y, numbers)
    for n, m in zip(a.nodes, b.nodes, strict=True):
        assert (n.op, n.origin, list(n.attrs)) == (m.op, m.origin, list(m.attrs))
        for key, value in n.attrs.items():
            _same_attr(value, m.attrs[key])
        for x, y in zip([*n.inputs, *n.outputs], [*m.inputs, *m.outputs], strict=True):  # type: ignore[list-item]
            _pair(x, y, numbers)
        for g, h in zip(n.regions, m.regions, strict=True):
            _same(g, h, numbers)


def _same_attr(a: object, b: object) -> None:
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes() if a.dtype != object else a.tolist() == b.tolist()
    else:
        assert type(a) is type(b) and repr(a) == repr(b)


def round_trip(graph: Graph) -> str:
    text = to_text(graph)
    back = from_text(text, constants(graph))
    same(graph, back)
    assert to_text(back) == text
    return text


def test_the_text_of_a_small_graph() -> None:
    b = Builder()
    s = Sym("s0")
    x = b.input(TensorType(dtypes.float32, (s, 2)), "x")
    w = b.constant(np.array([0.5, 1.0], np.float32))
    with b.from_origin((Source(0, "Add", "node_add", "model.py:12"),)):
        y = b.add(x, w)
    z = b.slice(y, 0, s // 2, s)
    graph = b.graph([z], ["y"])
    graph.name, graph.dim_names, graph.metadata = "main", {"s0": "batch"}, {"opsets": {"": 20}}
    assert round_trip(graph) == (
        'graph "main"\n'
        "symbol s0 >= 0\n"
        'dim s0 "batch"\n'
        'metadata "opsets" {"": 20}\n'
        'input %0 "x": float32[s0, 2]\n'
        "%1 = constant() {value=float32[2]{0.5, 1.0}}: float32[2]\n"
        '%2 = add(%0, %1): float32[s0, 2]  # n0 Add "node_add" "model.py:12"\n'
        "%3 = slice(%2) {starts=((s0 // 2), 0), sizes=(-(s0 // 2) + s0, 2), steps=(1, 1)}: "
        "float32[-(s0 // 2) + s0, 2]\n"
        'output %3 "y"\n'
    )


def test_expressions_come_back_as_they_are() -> None:
    s, t = Sym("s0"), Sym("s1", 1, 8)
    k = index("k", s * 2)
    dims = (
        s * t - 3,
        -s + 1,
        s * s * 4,
        floordiv(s, t),
        mod(s - 5, 3),
        maximum(s, t),
        minimum(s - 7, t * 2),
        ceildiv(k, 4),
        floordiv(floordiv(s * t + 1, 3) + 2, 5),
        0,
        -4,
        maximum(floordiv(s - 9, 4), 0) * 3 + 1,
    )
    node = Node("sizes", (), [Value(TensorType(dtypes.int64, (len(dims),)))], {"dims": dims})
    node.output.data = np.array(dims, object)
    text = round_trip(Graph([], [node.output], [node], ["y"]))
    assert "symbol s1 >= 1 <= 8" in text and "symbol k >= 0 <= 2*s0 - 1" in text
    back = from_text(text).nodes[0].attrs["dims"]
    assert back == dims


def test_attributes_of_every_kind() -> None:
    s = Sym("s0")
    attrs = {
        "i": -3,
        "big": 1 << 80,
        "f": 0.1,
        "whole": 2.0,
        "small": 5e-324,
        "huge": 1e300,
        "minus_zero": -0.0,
        "inf": float("inf"),
        "minus": float("-inf"),
        "nan": float("nan"),
        "yes": True,
        "no": False,
        "none": None,
        "s": 'a "b"\n\\ # é {',
        "dtype": dtypes.int8,
        "type": TensorType(dtypes.float32, (s, 2)),
        "empty": (),
        "one": (1,),
        "nested": ((1, 2.0), ("x",), (dtypes.float32, None)),
        "list": [1, (2,), []],
        "dims": (s, s + 1, -s, 3),
        "dim": s * 2,
        "arrays": (np.arange(3), np.zeros((0, 2), np.int8)),
        "a name\n": 1,
        "x.y@3": 2,
    }
    x = Value(TensorType(dtypes.float32, (s,)), 'x\n"%1')
    node = Node(
        "com.acme.Odd op@7 {",
        [x, None, x],
        [Value(None), Value(None, "named")],
        attrs,
        (),
        (Source(3, "Odd op", "n\n"), Source(4, "B", "", "f:1")),
    )
    round_trip(Graph([x], [node.outputs[1], x], [node], ["y", "\u2028\x0b"], "na\x85me"))


def test_a_node_without_outputs_and_a_graph_without_nodes() -> None:
    round_trip(Graph([], [], [Node("effect", (), ())], []))
    round_trip(Graph([], [], [], []))


@pytest.mark.parametrize("d", dtypes.ALL, ids=repr)
def test_arrays_of_every_dtype(d: dtypes.DType) -> None:
    values = ["a", "é\n", "\udcff"] if d is dtypes.string else [0, 1, 1]
    for array in (
        np.array(values, d.numpy).reshape(3, 1),
        np.array(values[1:2], d.numpy).reshape(()),
        np.array([], d.numpy),
    ):
        b = Builder()
        round_trip(b.graph([b.constant(array)]))


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        *(
            hnp.arrays(d, hnp.array_shapes(max_dims=2, max_side=4))
            for d in ("f2", "f4", "f8", "i1", "i8", "u8", "?", "c8")
        )
    )
)
def test_arrays_come_back_bit_by_bit(array: np.ndarray) -> None:
    b = Builder()
    round_trip(b.graph([b.constant(array)]))


def test_large_constants_are_digests() -> None:
    b = Builder()
    array = np.arange(INLINE + 1, dtype=np.float32)
    graph = b.graph([b.constant(array)])
    text = round_trip(graph)
    assert "{#" in text and "64.0" not in text
    with pytest.raises(ModelError, match=r"line 2.*to be given to from_text"):
        from_text(text)
    assert "{...}" in to_text(graph, digests=False)


def test_known_contents_are_kept() -> None:
    b = Builder()
    s = Sym("s0")
    b.input(TensorType(dtypes.float32, (s,)), "x")
    size = b.size_as(s, dtypes.int32)
    vector = b.sizes(np.array([s, 2, s + 1], object))
    text = round_trip(b.graph([size, vector, b.constant(np.array([3, 4]))]))
    assert "int64[3] = (s0, 2, s0 + 1)" in text and "int32[] = (s0,)" in text and "int64[2] = value" in text


def test_regions() -> None:
    c, x = Value(TensorType(dtypes.boolean, ()), "c"), Value(TensorType(dtypes.float32, (2,)), "x")
    neg = Node("neg", [x], [Value(x.type)])
    inner = Node("pick", [c], [Value(None)], {}, [Graph([], [neg.output], [neg], ["a"]), Graph([], [x], [], ["b"])])
    carried = Value(None, "state")
    outer = Node(
        "pick",
        [c],
        [Value(x.type)],
        {"regions": ("body",)},
        [Graph([carried], [inner.output], [inner], ["z"], "body")],
    )
    graph = Graph([c, x], [outer.output], [outer], ["y"])
    text = round_trip(graph)
    assert '\n  region "body"\n' in text and '\n    region ""\n' in text and text.count("end\n") == 3


def test_imported_models() -> None:
    then = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["a"])], "then", [], [helper.make_tensor_value_info("a", 1, ["n"])]
    )
    other = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["b"])],
        "else",
        [],
        [helper.make_tensor_value_info("b", 1, ["n"])],
    )
    nodes = [
        helper.make_node("Resize", ["x", "", "s"], ["h"], mode="linear", name='quoted " name'),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, ["n"]), helper.make_tensor_value_info("c", 9, [])]
    weights = [numpy_helper.from_array(np.ones(1, np.float32), n) for n in ("s", "w")]
    outputs = [helper.make_tensor_value_info("y", 1, ["n"]), helper.make_tensor_value_info("h", 1, ["n"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, weights), opset_imports=[helper.make_opsetid("", 20)]
    )
    round_trip(load(model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 0: expected 'graph'"),
        ("graph", "line 1: expected a string"),
        ('graph "g"\n%0 = neg(%1): float32[2]\n', "line 2: expected a value that is defined, found %1"),
        ('graph "g"\ninput %0 "x": float33[2]\n', "line 2: expected a dtype"),
        ('graph "g"\ninput %0 "x": float32[q]\n', "symbol that is declared"),
        ('graph "g"\ninput %0: ?\ninput %0: ?\n', "line 3: .*defined twice"),
        ('graph "g"\ninput %0: ?\n%1 = neg(%0 {: ?\n', "line 3: expected ','"),
        ('graph "g"\ninput %0: ? nonsense\n', "line 2: expected the end of the line, found nonsense"),
        ('graph "g"\ninput %0: ?\n%1 = neg(%0): ? # x1 Neg "" ""\n', "node number"),
        ('graph "g"\n= f(): \n  region "r"\n', "expected 'end'"),
        ('graph "g"\nmetadata "a" {nonsense\n', "line 2"),
        ('graph "g"\n%0 = constant() {value=float32[2]{1.0}}: ?\n', "line 2"),
        ('graph "g"\n%0 = constant() {value=float32[2]{0x00}}: ?\n', "line 2"),
        ('graph "g"\n%0 = constant() {value=int8[1]{x}}: ?\n', "line 2"),
        ('graph "g"\ninput %0: float32[1.5]\n', "a size, not 1.5"),
        ('graph "g"\n%0 = f() {a=(1 % 2.5)}: ?\n', "a size, not 2.5"),
        ('graph "g"\n%0 = f() {a=max(1)}: ?\n', "line 2"),
        ('graph "g"\n%0 = f() {a="\\x"}: ?\n', "line 2"),
    ],
)  # fmt: skip
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_text(text)


# ---------------------------------------------------------------- verify


def typed(*shape: int) -> TensorType:
    return TensorType(dtypes.float32, shape)


def test_verify_accepts_what_the_builder_makes() -> None:
    b = Builder()
    x = b.input(typed(2, 3), "x")
    verify(b.graph([b.reduce("sum", b.exp(x), [1], keepdims=True)]))


def broken(name: str) -> Graph:
    """A graph with one fault."""
    x = Value(typed(2), "x")
    neg = Node("neg", [x], [Value(typed(2))], {}, (), (Source(7, "Neg"),))
    exp = Node("exp", [neg.output], [Value(typed(2))])
    nodes, outputs, names = [neg, exp], [exp.output], ["y"]
    if name == "order":
        nodes = [exp, neg]
    elif name == "twice":
        nodes = [neg, neg, exp]
    elif name == "undefined output":
        outputs = [Value(typed(2))]
    elif name == "output names":
        names = []
    elif name == "type":
        nodes.append(Node("neg", [x], [Value(typed(3))]))
    elif name == "outputs":
        nodes.append(Node("neg", [x], [Value(typed(2)), Value(typed(2))]))
    elif name == "untyped":
        nodes.append(Node("neg", [x], [Value(None)]))
    elif name == "missing operand":
        nodes.append(Node("neg", [None], [Value(typed(2))]))
    elif name == "unknown":
        nodes.append(Node("nonesuch", [x], [Value(typed(2))]))
    elif name == "rule":
        nodes.append(Node("transpose", [x], [Value(typed(2))], {"perm": (1,)}))
    elif name == "attribute":
        nodes.append(Node("onnx.F", [x], [Value(None)], {"bad": {1: 2}}))
    elif name == "back link":
        Node("exp", [x], [exp.output])
    elif name == "content":
        nodes.append(Node("neg", [x], [Value(typed(2), "", np.zeros(3))]))
    elif name == "constant":
        nodes.append(Node("constant", [], [Value(typed(2))], {"value": [1.0, 2.0]}))
    elif name == "region":
        region = Graph([], [inner := Value(typed(2))], [Node("neg", [x], [inner])], ["a"])
        nodes.append(Node("onnx.If", [x], [Value(None)], {"regions": ("b",)}, [region]))
        outputs = [inner]
    return Graph([x], outputs, nodes, names)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("order", r"operand 0 .* is not defined before its use \[node exp"),
        ("twice", r"stands in the graph twice \[node neg\(float32\[2\]\) from n7 Neg\]"),
        ("undefined output", "output 'y' .* is not defined"),
        ("output names", "1 outputs and 0 output names"),
        ("type", r"has the type float32\[3\], its rule gives float32\[2\]"),
        ("outputs", "has 2 outputs, its rule gives 1"),
        ("untyped", "without a type"),
        ("missing operand", "without a type"),
        ("unknown", "no primitive named 'nonesuch'"),
        ("rule", "type rule fails.*not a permutation"),
        ("attribute", "attribute bad.*dict"),
        ("back link", "does not point back"),
        ("content", r"known content .* has the shape \[3\]"),
        ("constant", "attribute value|needs an array"),
        ("region", "output 'y' .* is not defined"),
    ],
)
def test_verify_names_the_fault_and_the_pass(fault: str, message: str) -> None:
    with pytest.raises(InternalError, match=f"after the pass 'fuse': .*{message}"):
        verify(broken(fault), "fuse")


def test_zoo_like_graph_survives_a_file(tmp_path: Path) -> None:
    b = Builder()
    x = b.input(typed(4, 4), "x")
    graph = b.graph([b.matmul(x, b.constant(np.random.default_rng(0).random((4, 4), np.float32)))], ["y"])
    (tmp_path / "g.txt").write_text(to_text(graph), encoding="utf-8")
    same(graph, from_text((tmp_path / "g.txt").read_text(encoding="utf-8")))
