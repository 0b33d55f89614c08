"""The ONNX importer: what it makes of valid models, and what it says of others."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import onnxc
from onnxc.errors import InputError, LimitError, ModelError, OnnxcError
from onnxc.frontends.onnx_file import load
from onnxc.frontends.onnx_tensors import all_tensors
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.ir.text import from_text, to_text
from onnxc.primitives.verify import verify

node = helper.make_node


def tensor_info(name: str, shape: Sequence[int | str | None] | None = (2,), dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Any] = ("x",),
    outputs: Sequence[Any] = ("y",),
    *,
    opset: int = 20,
    functions: Sequence[onnx.FunctionProto] = (),
    **graph: Any,
) -> ModelProto:
    infos = [[tensor_info(v) if isinstance(v, str) else v for v in values] for values in (inputs, outputs)]
    proto = helper.make_graph(list(nodes), "g", *infos, **graph)
    opsets = [
        helper.make_opsetid("", opset),
        *(helper.make_opsetid(d, 1) for d in sorted({f.domain for f in functions})),
    ]
    return helper.make_model(proto, opset_imports=opsets, functions=list(functions), ir_version=10)


def read(proto: ModelProto, **more: Any) -> Graph:
    graph = load(proto, **more)
    verify(graph)
    return graph


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


def constant(graph: Graph) -> np.ndarray:
    (found,) = [n for n in graph.nodes if n.op == "constant"]
    array: np.ndarray = found.attrs["value"]
    assert found.output.type is not None and found.output.shape == array.shape
    return array


RELU = [node("Relu", ["x"], ["y"])]

# ---------------------------------------------------------------- what a graph looks like


def test_nodes_attributes_and_origins() -> None:
    relu = node("Relu", ["x"], ["h"], name="a/relu")
    trace = 'File "/src/a.py", line 3, in forward\n  y = f(x)\n  File "/src/b.py", line 17, in f\n  relu(x)'
    relu.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    clip = node(
        "Custom",
        ["h", "", "x", ""],
        ["y", "", "z", ""],
        domain="com.acme",
        f=0.5,
        i=3,
        s="hé",
        fs=[1.0, 2.5],
        is_=[1, 2],
        ss=["a", "b"],
        t=numpy_helper.from_array(np.arange(3)),
    )
    proto = model([relu, clip])
    proto.opset_import.add(domain="com.acme", version=3)
    graph = read(proto)
    assert ops(graph) == ["onnx.Relu", "com.acme.Custom"] and graph.metadata["opsets"] == {
        "": 20,
        "com.acme": 3,
    }
    first, second = graph.nodes
    assert (first.origin[0].number, first.origin[0].op_type, first.origin[0].name) == (0, "Relu", "a/relu")
    assert first.origin[0].line == "/src/b.py:17" and str(second.origin[0]) == "n1 Custom"
    assert second.inputs == (first.output, None, graph.inputs[0]) and len(second.outputs) == 3
    attrs = dict(second.attrs)
    assert attrs.pop("t").tolist() == [0, 1, 2]
    assert attrs == {"f": 0.5, "i": 3, "s": "hé", "fs": (1.0, 2.5), "is_": (1, 2), "ss": ("a", "b")}
    assert graph.output_names == ["y"] and graph.outputs == [second.outputs[0]] and graph.input_names == ["x"]
    assert first.output.type is None and str(graph.inputs[0].type) == "float32[2]"


def test_a_domain_may_be_spelled_ai_onnx() -> None:
    proto = model([node("Relu", ["x"], ["y"], domain="ai.onnx")])
    proto.opset_import[0].domain = "ai.onnx"
    assert ops(read(proto)) == ["onnx.Relu"]


def test_dims_become_symbols() -> None:
    x = tensor_info("x", ["batch", 3, None, "batch", -1, 0])
    graph = read(model([node("Add", ["x", "z"], ["y"])], [x, tensor_info("z", ["s0", "batch"])]))
    assert [str(t.type) for t in graph.inputs] == ["float32[s0, 3, s1, s0, s2, 0]", "float32[s3, s0]"]
    assert graph.dim_names == {"s0": "batch", "s3": "s0"}


def test_input_shapes_fix_dims() -> None:
    proto = model([node("Add", ["x", "z"], ["y"])], [tensor_info("x", ["n", 3, None]), tensor_info("z", ["n", "m"])])
    graph = read(proto, input_shapes={"x": (4, None, 5)})
    assert [str(t.type) for t in graph.inputs] == ["float32[4, 3, 5]", "float32[4, s0]"]
    graph = read(proto, input_shapes={"z": ("rows", 2)})
    assert [str(t.type) for t in graph.inputs] == ["float32[s0, 3, s1]", "float32[s2, 2]"]
    for shape in [(4, 4, 5), (4, 3), (4, 3, -1), (4, 3, 1 << 50)]:
        with pytest.raises(InputError, match="'x'"):
            load(proto, input_shapes={"x": shape})
    with pytest.raises(InputError, match=r"'w'.*\['x', 'z'\]"):
        load(proto, input_shapes={"w": (1,)})
    with pytest.raises(InputError, match="'n' the sizes 1 and 2"):
        load(proto, input_shapes={"x": (1, 3, 1), "z": (2, 2)})


def test_an_input_without_a_rank_is_of_unknown_type() -> None:
    proto = model(RELU, [tensor_info("x", None)])
    assert load(proto).inputs[0].type is None
    assert str(read(proto, input_shapes={"x": (2, None, "n")}).inputs[0].type) == "float32[2, s0, s1]"


def test_inputs_that_are_not_tensors() -> None:
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [2, "n"])
    assert str(load(model(RELU, [sequence])).inputs[0].type) == "sequence(float32[2, s0])"
    with pytest.raises(ModelError, match="'x' is a value without a type"):
        load(model(RELU, [onnx.ValueInfoProto(name="x")]))


# ---------------------------------------------------------------- weights and constants

W = numpy_helper.from_array(np.array([1, 2], np.float32), "w")
ADD = [node("Add", ["x", "w"], ["y"])]


def test_an_initializer_that_is_also_an_input() -> None:
    proto = model(ADD, ["x", "w"], initializer=[W])
    graph = read(proto)
    assert graph.input_names == ["x"] and constant(graph).tolist() == [1, 2]
    kept = read(proto, keep_inputs=["w"])
    assert kept.input_names == ["x", "w"] and ops(kept) == ["onnx.Add"]
    with pytest.raises(InputError, match=r"'v'.*\['x', 'w'\]"):
        load(proto, keep_inputs=["v"])


@pytest.mark.parametrize(
    "declared",
    [tensor_info("w", (3,)), tensor_info("w", (2, 1)), tensor_info("w", ()), tensor_info("w", dtype=TensorProto.INT64),
     tensor_info("w", dtype=99), helper.make_tensor_sequence_value_info("w", TensorProto.FLOAT, None)],
)  # fmt: skip
def test_an_initializer_that_is_not_what_its_input_declares(declared: onnx.ValueInfoProto) -> None:
    with pytest.raises(ModelError, match=r"input 'w' is declared as .* initializer is float32 \[2\]"):
        load(model(ADD, ["x", declared], initializer=[W]))
    for fits in (tensor_info("w", ("n",)), tensor_info("w", None)):
        assert read(model(ADD, ["x", fits], initializer=[W])).input_names == ["x"]


def test_unused_and_duplicated_initializers() -> None:
    later, unused = (
        numpy_helper.from_array(np.array([5, 6], np.float32), "w"),
        numpy_helper.from_array(np.ones(3), "u"),
    )
    assert constant(read(model(ADD, initializer=[W, unused, later]))).tolist() == [5, 6]


def test_an_unused_initializer_is_not_even_read() -> None:
    broken = TensorProto(name="u", data_type=1, dims=[1 << 60])
    assert ops(read(model(RELU, initializer=[broken]))) == ["onnx.Relu"]


def test_an_output_may_be_an_input_or_an_initializer() -> None:
    graph = read(model([], outputs=["x", "w"], initializer=[W]))
    assert graph.outputs[0] is graph.inputs[0] and constant(graph).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value": numpy_helper.from_array(np.eye(2))}, np.eye(2)),
        ({"value_float": 0.1}, np.float32(0.1)),
        ({"value_floats": [1.5, 2.5]}, np.array([1.5, 2.5], np.float32)),
        ({"value_int": 7}, np.int64(7)),
        ({"value_ints": [7, 8]}, np.array([7, 8])),
        ({"value_string": "é"}, np.array("é", object)),
        ({"value_strings": ["a", "b"]}, np.array(["a", "b"], object)),
    ],
)
def test_constant_nodes(attribute: dict[str, Any], expected: Any) -> None:
    array = constant(read(model([node("Constant", [], ["y"], **attribute)])))
    assert array.dtype == np.asarray(expected).dtype and array.shape == np.shape(expected)
    np.testing.assert_array_equal(array, expected)


def sparse(positions: np.ndarray, dims: Sequence[int] = (2, 3), count: int = 2) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.arange(1, count + 1, dtype=np.float32), "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(positions), list(dims))


@pytest.mark.parametrize("positions", [np.array([1, 5]), np.array([[0, 1], [1, 2]])])
def test_sparse_tensors(positions: np.ndarray) -> None:
    expected = [[0, 1, 0], [0, 0, 2]]
    as_node = model([node("Constant", [], ["y"], sparse_value=sparse(positions))])
    as_weight = model(ADD, sparse_initializer=[sparse(positions)])
    assert constant(read(as_node)).tolist() == constant(read(as_weight)).tolist() == expected


@pytest.mark.parametrize(
    "bad",
    [
        sparse(np.array([1, 6])),
        sparse(np.array([-1, 0])),
        sparse(np.array([[0, 3], [0, 0]])),
        sparse(np.array([0])),
        sparse(np.array([0, 1]), (1 << 20, 1 << 19)),
    ],
)
def test_bad_sparse_tensors(bad: onnx.SparseTensorProto) -> None:
    with pytest.raises(OnnxcError, match="sparse tensor 'w'"):
        load(model(ADD, sparse_initializer=[bad]))


@pytest.mark.parametrize("attributes", [{}, {"value_int": 1, "value_float": 1.0}, {"value_other": 1}, {"value": 3}])
def test_bad_constant_nodes(attributes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="Constant"):
        load(model([node("Constant", [], ["y"], name="c", **attributes)]))


@pytest.mark.parametrize("said", ["INT", "FLOATS"])
def test_an_attribute_of_another_type_than_it_says(said: str) -> None:
    """What its type reads is 0 or nothing, and no answer that was meant."""
    leaky = node("LeakyRelu", ["x"], ["y"], name="leaky", alpha=0.1)
    leaky.attribute[0].type = onnx.AttributeProto.AttributeType.Value(said)
    with pytest.raises(
        ModelError, match=rf"'alpha' is said to be of type {said}, but its value is one of FLOAT .*leaky"
    ):
        load(model([leaky]))


# ---------------------------------------------------------------- dtypes and storages


def sample(d: dtypes.DType) -> np.ndarray:
    if d is dtypes.string:
        return np.array([["a", "", "é"]], object)
    numbers = [0, 1, -1, 1, 1] if d.kind in ("int", "float", "complex") else [0, 1, 1, 1, 0]
    return np.array([numbers]).astype(d.numpy)


@pytest.mark.parametrize("d", dtypes.ALL, ids=repr)
def test_raw_data_of_every_dtype(d: dtypes.DType) -> None:
    array = sample(d)
    if d is dtypes.string:
        proto = TensorProto(name="w", data_type=d.onnx, dims=[1, 3], string_data=[b"a", b"", "é".encode()])
    else:
        proto = numpy_helper.from_array(array, "w")
        assert proto.HasField("raw_data")
    got = constant(read(model(ADD, initializer=[proto])))
    assert got.dtype == d.numpy and got.shape == array.shape and [str(a) for a in got[0]] == [str(a) for a in array[0]]


@pytest.mark.parametrize("d", [d for d in dtypes.ALL if d is not dtypes.string], ids=repr)
def test_typed_data_of_every_dtype(d: dtypes.DType) -> None:
    array = sample(d)
    try:
        proto = helper.make_tensor("w", d.onnx, array.shape, array.ravel().tolist())
    except (TypeError, ValueError, KeyError):
        pytest.skip("this onnx does not write the dtype")
    assert not proto.HasField("raw_data")
    got = constant(read(model(ADD, initializer=[proto])))
    assert got.dtype == d.numpy and [str(a) for a in got[0]] == [str(a) for a in array[0]]


def test_packed_elements_keep_their_order_and_sign() -> None:
    cases = [
        (ml_dtypes.int4, [-8, 7, 1]),
        (ml_dtypes.uint4, [15, 0, 9]),
        (ml_dtypes.int2, [-2, 1, 0, -1, 1]),
        (ml_dtypes.uint2, [3, 0, 2, 1, 3]),
    ]
    for dtype, values in cases:
        proto = numpy_helper.from_array(np.array(values).astype(dtype), "w")
        assert len(proto.raw_data) == 2
        assert constant(read(model(ADD, initializer=[proto]))).astype(int).tolist() == values


def test_bools_are_zero_or_one() -> None:
    proto = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[3], raw_data=b"\x00\x01\x05")
    assert constant(read(model(ADD, initializer=[proto]))).view(np.uint8).tolist() == [0, 1, 1]


def tensor(**fields: Any) -> TensorProto:
    return TensorProto(**{"name": "w", "data_type": TensorProto.FLOAT, "dims": [2], **fields})


@pytest.mark.parametrize(
    "bad",
    [
        tensor(raw_data=b"1234567"),
        tensor(raw_data=b""),
        tensor(),
        tensor(float_data=[1.0]),
        tensor(int32_data=[1, 2]),
        tensor(dims=[-2], raw_data=b""),
        tensor(dims=[-1, -2], raw_data=b"12345678"),
        tensor(data_type=99, raw_data=b"12345678"),
        tensor(data_type=0, raw_data=b"12345678"),
        tensor(dims=[1 << 62, 1 << 62]),
        tensor(dims=[0, 1 << 62, 1 << 62]),
        tensor(dims=[1 << 39]),
        tensor(data_type=TensorProto.STRING, string_data=[b"a"]),
        tensor(dims=[1] * 1000),
        tensor(data_type=TensorProto.STRING, raw_data=b"ab"),
        tensor(data_type=TensorProto.INT4, raw_data=b"ab"),
        tensor(data_type=TensorProto.COMPLEX64, float_data=[1.0, 2.0]),
        tensor(segment=TensorProto.Segment(begin=0, end=1), raw_data=b"12345678"),
    ],
)
def test_data_that_does_not_fit(bad: TensorProto) -> None:
    with pytest.raises((ModelError, LimitError), match="'w'"):
        load(model(ADD, initializer=[bad]))


# ---------------------------------------------------------------- external data


def test_tensors_are_found_wherever_they_stand() -> None:
    """Of attributes, branches, functions and what those have as a default: any may lie in another file."""

    def tensor(name: str) -> TensorProto:
        return numpy_helper.from_array(np.zeros(1, np.float32), name)

    branch = helper.make_graph([node("Constant", [], ["b"], value=tensor("branch"))], "b", [], [], [tensor("inner")])
    proto = model([node("If", ["c"], ["y"], then_branch=branch), node("Constant", [], ["c"], value=tensor("node"))])
    body = [node("Constant", [], ["r"], value=tensor("body"))]
    function = helper.make_function("f", "F", [], ["r"], body, [helper.make_opsetid("", 18)])
    function.attribute_proto.append(helper.make_attribute("value", tensor("default")))
    proto.functions.append(function)
    proto.graph.initializer.append(tensor("weight"))
    found = sorted(t.name for t in all_tensors(proto))
    assert found == ["body", "branch", "default", "inner", "node", "weight"]


def external(location: str = "w.bin", **entries: Any) -> TensorProto:
    proto = tensor(data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def saved(folder: Path, weight: TensorProto, data: bytes = b"\0" * 4 + np.array([3, 4], "<f4").tobytes()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "w.bin").write_bytes(data)
    (folder / "m.onnx").write_bytes(model(ADD, initializer=[weight]).SerializeToString())
    return folder / "m.onnx"


def test_external_data_is_mapped(tmp_path: Path) -> None:
    for path in (
        saved(tmp_path / "a", external(offset=4, length=8)),
        saved(tmp_path / "b", external(offset=4)),
    ):
        array = constant(load(path))
        assert array.tolist() == [3, 4] and not array.flags.writeable and not array.flags.owndata
        assert constant(load(str(path))).tolist() == [3, 4]
    nested = saved(tmp_path / "c", external("d/w.bin", offset=4))
    (tmp_path / "c/d").mkdir()
    (tmp_path / "c/w.bin").rename(tmp_path / "c/d/w.bin")
    assert constant(load(nested)).tolist() == [3, 4]


def test_external_data_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    path = saved(tmp_path, external(offset=3), b"abc" + np.array([3, 4], "<f4").tobytes())
    array = constant(load(path))
    assert array.tolist() == [3, 4] and array.flags.aligned


def test_external_data_of_bytes_needs_a_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, external(offset=4))
    proto = onnx.load(path, load_external_data=False)
    for source in (path.read_bytes(), proto):
        with pytest.raises(ModelError, match=r"'w'.*base_dir"):
            load(source)
        assert constant(load(source, base_dir=tmp_path)).tolist() == [3, 4]


@pytest.mark.parametrize(
    "bad",
    [
        external(offset=8),
        external(offset=4, length=7),
        external(offset=4, length=9),
        external(offset=-4),
        external(offset="0x4"),
        external(offset="4", length="-8"),
        external(offset=1 << 63),
        external(offset="9" * 5000),
        external(offset="٤"),
        external(offset=""),
        external(""),
        external("."),
        external("nothing"),
        external("../a/w.bin"),
        external("b/../w.bin"),
        external("/etc/passwd"),
        external("w.bin\0"),
        external("*/_ORT_MEM_ADDR_/*", offset=4096, length=8),
        external("w.bin/"),
        external("a" * 5000),
    ],
)
def test_bad_external_data(tmp_path: Path, bad: TensorProto) -> None:
    with pytest.raises(ModelError, match="'w'"):
        load(saved(tmp_path / "a", bad))


def test_links_must_stay_inside_the_folder(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", external("link", offset=4))
    (tmp_path / "secret").write_bytes((tmp_path / "model/w.bin").read_bytes())
    (tmp_path / "model/link").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="leads outside"):
        load(path)
    (tmp_path / "model/link").unlink()
    (tmp_path / "model/link").symlink_to(tmp_path / "model/w.bin")
    assert constant(load(path)).tolist() == [3, 4]
    outside = saved(tmp_path / "other", external("up/secret", offset=4))
    (tmp_path / "other/up").symlink_to(tmp_path)
    with pytest.raises(ModelError, match="leads outside"):
        load(outside)


def test_a_download_cache_of_links_works(tmp_path: Path) -> None:
    """snapshots/<revision>/{m.onnx, w.bin} are links to files that lie together in blobs/."""
    saved(tmp_path / "blobs", external(offset=4))
    (tmp_path / "snapshots/r1").mkdir(parents=True)
    for name, blob in (("m.onnx", "aaa"), ("w.bin", "bbb")):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / blob)
        (tmp_path / "snapshots/r1" / name).symlink_to(f"../../blobs/{blob}")
    assert constant(load(tmp_path / "snapshots/r1/m.onnx")).tolist() == [3, 4]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path, external("pipe", offset=4))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a regular file"):
        load(path)
    with pytest.raises(ModelError, match="not a regular file"):
        load(tmp_path / "pipe")
    (tmp_path / "pipe").unlink()
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(tmp_path / "pipe"))
        with pytest.raises(ModelError, match="'w'"):
            load(path)
    finally:
        server.close()
    with pytest.raises(ModelError, match="not a regular file"):
        load("/dev/zero")
    with pytest.raises(ModelError, match="not a regular file"):
        load(tmp_path)
    if os.path.exists("/proc/self/mem"):  # counts as one, but cannot be read from its beginning
        with pytest.raises(ModelError, match="cannot be read"):
            load("/proc/self/mem")
    with pytest.raises(ModelError, match="cannot be opened"):
        load(tmp_path / "nothing.onnx")


def test_an_empty_external_file(tmp_path: Path) -> None:
    weight = external()
    weight.dims[0] = 0
    assert constant(load(saved(tmp_path, weight, b""))).shape == (0,)


def test_many_external_tensors_take_one_descriptor(tmp_path: Path) -> None:
    weights, nodes = [], []
    for i in range(1500):
        weights.append(external(offset=4))
        weights[-1].name = f"w{i}"
        nodes.append(node("Add", [f"h{i - 1}" if i else "x", f"w{i}"], [f"h{i}"]))
    saved(tmp_path, external())
    proto = model(nodes, outputs=["h1499"], initializer=weights)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    graph = load(proto, base_dir=tmp_path)
    assert len(graph.nodes) == 3000
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2


# ---------------------------------------------------------------- graphs


def test_unsorted_nodes_are_sorted() -> None:
    nodes = [node("Neg", ["b"], ["y"]), node("Abs", ["a"], ["b"]), node("Relu", ["x"], ["a"])]
    graph = read(model(nodes))
    assert ops(graph) == ["onnx.Relu", "onnx.Abs", "onnx.Neg"] and [n.origin[0].number for n in graph.nodes] == [
        2,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), *RELU], "cycle.*n[01].*n[01]"),
        ([node("Add", ["x", "y"], ["y"], name="self")], "cycle.*'self'"),
        ([node("Add", ["x", "nowhere"], ["y"], name="one")], r"'nowhere'.*n0 Add 'one'"),
        ([node("Neg", ["x"], ["y"], name="a"), *RELU], "'y' is defined twice.*n0 Neg 'a'.*n1 Relu"),
        ([node("Relu", ["x"], ["x"])], "'x' is defined twice.*graph input.*n0"),
        ([node("Relu", ["x"], ["z"])], "'y' is used, but nothing"),
        ([node("Relu", ["x"], ["y", "y"])], "'y' is defined twice"),
        ([node("", ["x"], ["y"])], "no op type"),
        ([node("Relu@6", ["x"], ["y"])], "no operator 'Relu@6'"),
        ([node("microsoft.Gelu", ["x"], ["y"], domain="com")], "no operator 'microsoft.Gelu' of the domain 'com'"),
        ([node("Relu", ["x"], ["y"], domain="onnx")], "no operator 'Relu' of the domain 'onnx'"),
    ],
)  # fmt: skip
def test_graphs_that_are_not_dags(nodes: list[NodeProto], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model(nodes))


def test_a_subgraph_may_have_an_output_twice() -> None:
    """Its outputs are told by their places: here the next state and what is stacked, of the step before it."""
    body = """b (int64 i, bool go, float[2] s) => (bool go, float[2] t, float[2] t) { t = Neg(s) }"""
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y, float[n, 2] z) {{
      k = Constant<value = int64 {{3}}>()  y, z = Loop(k, , x)<body = {body}> }}"""
    proto = onnx.parser.parse_model(text)
    assert to_text(from_text(to_text(load(proto)))) == to_text(load(proto))
    x = np.array([1, -2], np.float32)
    found = onnxc.compile(proto)(x)
    np.testing.assert_array_equal(found["y"], -x)
    np.testing.assert_array_equal(found["z"], [-x, x, -x])


def test_names_that_are_taken_twice() -> None:
    with pytest.raises(ModelError, match="'x' is defined twice"):
        load(model(RELU, ["x", "x"]))
    with pytest.raises(ModelError, match="output twice"):
        load(model(RELU, outputs=["y", "y"]))
    with pytest.raises(ModelError, match="'w' is defined twice"):
        load(model([node("Relu", ["x"], ["w"]), *ADD], initializer=[W]))
    with pytest.raises(ModelError, match="no outputs"):
        load(model(RELU, outputs=[]))
    twice = node("Relu", ["x"], ["y"], alpha=1)
    twice.attribute.add().CopyFrom(twice.attribute[0])
    with pytest.raises(ModelError, match=r"'alpha' is given twice.*n0 Relu"):
        load(model([twice]))


def branch(nodes: Sequence[NodeProto], output: str, **more: Any) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "branch", more.pop("inputs", []), [tensor_info(output)], **more)


def test_subgraphs_see_the_names_around_them() -> None:
    inner = branch([node("Mul", ["h", "w"], ["m"])], "m")
    nested = node("If", ["c"], ["q"], then_branch=inner, else_branch=branch([], "h"))
    then = branch([node("Add", ["h", "v"], ["p"]), nested], "q", initializer=[
        numpy_helper.from_array(np.ones(2, np.float32), "v")])  # fmt: skip
    nodes = [
        node("Relu", ["x"], ["h"]),
        node("If", ["c"], ["y"], then_branch=then, else_branch=branch([], "x"), name="if"),
    ]
    graph = read(model(nodes, ["x", tensor_info("c", [], TensorProto.BOOL)], initializer=[W]))
    outer = graph.nodes[-1]
    assert ops(graph) == ["constant", "onnx.Relu", "onnx.If"] and outer.attrs["regions"] == (
        "else_branch",
        "then_branch",
    )
    else_graph, then_graph = outer.regions
    assert ops(then_graph) == ["constant", "onnx.Add", "onnx.If"] and else_graph.outputs == [graph.inputs[0]]
    assert {v.name for v in outer.operands} == {"c", "h", "w", "x"}


def test_nodes_are_sorted_by_what_their_subgraphs_read() -> None:
    body = branch([node("Neg", ["late"], ["r"])], "r")
    nodes = [
        node("If", ["c"], ["y"], then_branch=body, else_branch=branch([], "x")),
        node("Relu", ["x"], ["late"]),
    ]
    assert ops(read(model(nodes, ["x", tensor_info("c", [], TensorProto.BOOL)]))) == ["onnx.Relu", "onnx.If"]


def test_a_loop_body_has_inputs() -> None:
    body = branch(
        [node("Add", ["state", "x"], ["next"])],
        "next",
        inputs=[tensor_info("i", [], 7), tensor_info("k", [], 9), tensor_info("state")],
    )
    body.output.insert(0, tensor_info("k", [], 9))
    graph = read(model([node("Loop", ["", "c", "x"], ["y"], body=body)], ["x", tensor_info("c", [], TensorProto.BOOL)]))
    (region,) = graph.nodes[0].regions
    assert region.input_names == ["i", "k", "state"] and region.outputs[0] is region.inputs[1]
    assert graph.nodes[0].inputs[0] is None


def test_subgraphs_that_are_too_deep() -> None:
    proto = ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)])
    graph = proto.graph
    for _ in range(80):
        graph.output.add(name="y")
        graph.node.add(op_type="If", input=["c"], output=["y"])
        graph = graph.node[0].attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    graph.output.add(name="x")
    proto.graph.input.extend([tensor_info("x"), tensor_info("c", [], TensorProto.BOOL)])
    with pytest.raises(LimitError, match="deep"):
        load(proto)
    with pytest.raises(ModelError):  # protobuf's own limit
        load(proto.SerializeToString())


# ---------------------------------------------------------------- local functions


def function(
    name: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto],
    attributes: Sequence[str] = (), defaults: Sequence[onnx.AttributeProto] = (), opset: int = 20,
) -> onnx.FunctionProto:  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, opsets, attributes, list(defaults))


def call(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> NodeProto:
    return node(op_type, inputs, outputs, domain="local", **attrs)


def reference(n: NodeProto, attribute: str, to: str, kind: int) -> NodeProto:
    n.attribute.append(onnx.AttributeProto(name=attribute, ref_attr_name=to, type=kind))
    return n


def test_functions_are_inlined() -> None:
    leaky = reference(node("LeakyRelu", ["a"], ["t"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    inner = function("Inner", ["a"], ["t"], [leaky], ["slope"])
    twice = reference(call("Inner", ["b"], ["t"], name="first"), "slope", "k", onnx.AttributeProto.FLOAT)
    outer = function("Outer", ["b", "unused"], ["r"], [twice, call("Inner", ["t"], ["r"], slope=0.25)], ["k"])
    graph = read(
        model(
            [call("Outer", ["x"], ["h"], k=0.5, name="o"), node("Neg", ["h"], ["y"])],
            functions=[inner, outer],
        )
    )
    assert ops(graph) == ["onnx.LeakyRelu", "onnx.LeakyRelu", "onnx.Neg"]
    assert [n.attrs.get("alpha") for n in graph.nodes] == [0.5, 0.25, None]
    assert graph.nodes[0].origin[0].name == "o/first/" and len({n.origin for n in graph.nodes}) == 3
    assert graph.nodes[2].inputs == graph.nodes[1].outputs


def test_attributes_of_functions_have_defaults_or_are_left_out() -> None:
    leaky = reference(node("LeakyRelu", ["a"], ["t"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    half = helper.make_attribute("slope", 0.5)
    for defaults, attrs, expected in (([], {}, None), ([half], {}, 0.5), ([half], {"slope": 0.75}, 0.75)):
        f = function("F", ["a"], ["t"], [leaky], [] if defaults else ["slope"], defaults)
        graph = read(model([call("F", ["x"], ["y"], **attrs)], functions=[f]))
        assert graph.nodes[0].attrs.get("alpha") == expected
    with pytest.raises(ModelError, match="'slope' outside of a function"):
        load(model([reference(node("LeakyRelu", ["x"], ["y"]), "alpha", "slope", onnx.AttributeProto.FLOAT)]))


def test_a_constant_and_a_subgraph_of_a_function_take_its_attributes() -> None:
    value = reference(node("Constant", [], ["k"]), "value", "t", onnx.AttributeProto.TENSOR)
    inner = reference(node("LeakyRelu", ["a"], ["l"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    choose = node("If", ["c"], ["r"], then_branch=branch([inner], "l"), else_branch=branch([], "k"))
    f = function("F", ["a", "c"], ["r"], [value, choose], ["t", "slope"])
    weight = numpy_helper.from_array(np.array([7, 8], np.float32))
    nodes = [call("F", ["x", "c"], ["y"], t=weight, slope=0.5)]
    graph = read(model(nodes, ["x", tensor_info("c", [], TensorProto.BOOL)], functions=[f]))
    assert constant(graph).tolist() == [7, 8]
    assert graph.nodes[-1].regions[1].nodes[0].attrs["alpha"] == 0.5


def test_functions_that_return_their_inputs_or_one_value_twice() -> None:
    f = function("F", ["a"], ["a", "t", "t"], [node("Relu", ["a"], ["t"])])
    graph = read(model([call("F", ["x"], ["p", "q", "r"])], outputs=["p", "q", "r"], functions=[f]))
    assert ops(graph) == ["onnx.Relu", "onnx.Identity", "onnx.Identity"]
    graph = read(model([call("F", ["x"], ["p"])], outputs=["p"], functions=[f]))
    assert "onnx.Relu" in ops(graph)


def test_functions_of_another_opset() -> None:
    f = function("F", ["a"], ["t"], [node("Relu", ["a"], ["s"]), node("Softmax", ["s"], ["t"])], opset=11)
    assert ops(read(model([call("F", ["x"], ["y"])], functions=[f]))) == ["onnx.Relu@11", "onnx.Softmax@11"]
    f = function("F", ["a"], ["t"], [node("Relu", ["a"], ["s"]), node("Softmax", ["s"], ["t"])], opset=17)
    assert ops(read(model([call("F", ["x"], ["y"])], functions=[f]))) == ["onnx.Relu", "onnx.Softmax"]


def test_a_function_may_replace_an_operator() -> None:
    f = helper.make_function("", "Relu", ["a"], ["t"], [node("Neg", ["a"], ["t"])], [helper.make_opsetid("", 20)])
    assert ops(read(model(RELU, functions=[f]))) == ["onnx.Neg"]


def test_functions_that_cannot_be_inlined() -> None:
    loop = (
        function("F", ["a"], ["t"], [call("G", ["a"], ["t"])]),
        function("G", ["a"], ["t"], [call("F", ["a"], ["t"])]),
    )
    with pytest.raises(ModelError, match="calls itself"):
        load(model([call("F", ["x"], ["y"])], functions=loop))
    one = function("F", ["a"], ["t"], [node("Relu", ["a"], ["t"])])
    with pytest.raises(ModelError, match=r"1 inputs and 1 outputs.*n0 F"):
        load(model([call("F", ["x", "x"], ["y"])], functions=[one]))
    with pytest.raises(ModelError, match="two local functions"):
        load(model([call("F", ["x"], ["y"])], functions=[one, one]))
    with pytest.raises(ModelError, match="'nowhere'"):
        load(
            model(
                [call("F", ["x"], ["y"])],
                functions=[function("F", ["a"], ["nowhere"], [node("Relu", ["a"], ["t"])])],
            )
        )
    with pytest.raises(ModelError, match="leaves out"):
        load(model([call("F", [], ["y"])], functions=[function("F", ["a"], ["a"], [])]))


def test_functions_that_grow_exponentially() -> None:
    fs = [function("F0", ["a"], ["t"], [node("Relu", ["a"], ["t"])])]
    for i in range(1, 40):
        body = [call(f"F{i - 1}", ["a"], ["s"]), call(f"F{i - 1}", ["s"], ["t"])]
        fs.append(function(f"F{i}", ["a"], ["t"], body))
    with pytest.raises(LimitError, match="nodes once its functions are inlined"):
        load(model([call("F39", ["x"], ["y"])], functions=fs))


# ---------------------------------------------------------------- versions and damage


@pytest.mark.parametrize("opset", [1, 6, 7, 13, 28])
def test_supported_opsets(opset: int) -> None:
    assert read(model(RELU, opset=opset)).metadata["opsets"] == {"": opset}


def test_versions_that_are_not_supported() -> None:
    for opset in (0, -1, 29):
        with pytest.raises(ModelError, match=f"opset {opset}; opsets 1 to 28"):
            load(model(RELU, opset=opset))
    for version in (0, -1, 15, 1 << 40):
        proto = model(RELU)
        proto.ir_version = version
        with pytest.raises(ModelError, match=f"IR version {version}"):
            load(proto)
    missing = model(RELU)
    del missing.opset_import[:]
    with pytest.raises(ModelError, match="opset_import is empty"):
        load(missing)
    missing.opset_import.add(domain="com.acme", version=1)
    with pytest.raises(ModelError, match=r"imports no opset.*n0 Relu"):
        load(missing)


@pytest.mark.parametrize("data", [b"", b"onnx", b"\x00" * 100, b"\xff" * 100, b"PK\x03\x04", b"\x08\x0a"])
def test_files_that_are_not_models(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load(data)
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError):
        load(tmp_path / "m.onnx")


def rich() -> bytes:
    """A model with something of everything, to be damaged."""
    leaky = reference(node("LeakyRelu", ["a"], ["t"]), "alpha", "slope", onnx.AttributeProto.FLOAT)
    f = function("F", ["a"], ["t"], [leaky], ["slope"])
    then = branch([node("Mul", ["h", "w"], ["m"])], "m")
    nodes = [
        call("F", ["x"], ["h"], slope=0.5, name="call"),
        node("Constant", [], ["k"], value_strings=["a", "b"]),
        node("If", ["c"], ["i"], then_branch=then, else_branch=branch([], "x"), name="if"),
        node("Conv", ["i", "v"], ["y"], strides=[1, 1], pads=[0, 0, 0, 0], name="conv"),
    ]  # fmt: skip
    weights = [W, numpy_helper.from_array(np.arange(6).astype(ml_dtypes.int4), "v")]
    inputs = [tensor_info("x", ["n", 2]), tensor_info("c", [], TensorProto.BOOL)]
    return model(
        nodes, inputs, functions=[f], initializer=weights, sparse_initializer=[sparse(np.array([1, 5]))]
    ).SerializeToString()


RICH = rich()


def tolerates(data: bytes) -> None:
    """Either a graph that is well formed or an error of ours."""
    try:
        verify(load(data, base_dir="/nonexistent"))
    except OnnxcError as error:
        str(error)


def test_truncated_models() -> None:
    for end in range(len(RICH)):
        tolerates(RICH[:end])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_models(data: st.DataObject) -> None:
    damaged = bytearray(RICH)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    tolerates(bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    tolerates(data)


def test_names_that_are_not_utf8() -> None:
    data = model([node("Relu", ["x"], ["y"], name="NAME")]).SerializeToString().replace(b"NAME", b"\xff\xfeAB")
    assert load(data).nodes[0].origin[0].name == "\udcff\udcfeAB"
    strings = TensorProto(name="w", data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff"])
    assert constant(load(model([], outputs=["w"], initializer=[strings]))).tolist() == ["\udcff"]
