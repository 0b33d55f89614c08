# ruff: noqa: E501  (models as text, one to a line)
"""Models as an attacker or a careless user would write them: a clear OnnxcError, or right answers."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.codegen.cpp.program import Program
from onnxc.compiler.stages import Stages
from onnxc.compiler.stages import generate as generated
from onnxc.errors import InputError, InternalError, LimitError, ModelError, OnnxcError, RunError, ToolchainError
from onnxc.frontends import onnx_file
from onnxc.planner.groups import FusionOptions
from onnxc.runtime import toolchain
from onnxc.runtime.cpu import level, memory_bytes
from tests.compile_harness import _fenced
from tests.small_models import parse

F, L = TensorProto.FLOAT, TensorProto.INT64
Array = np.ndarray[Any, Any]
Shape = Sequence[int | str]
HUGE = 2**62


def info(name: str, shape: Shape | None, dtype: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[Any],
    outputs: list[Any],
    constants: dict[str, Any] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    weights = [onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def one(
    op: str,
    shapes: Sequence[Shape],
    *constants: Any,
    types: Sequence[int] = (),
    outputs: int = 1,
    opset: int = 18,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node, its inputs x0, x1..., then constants (None: an input left out)."""
    dtypes = [*types, *[F] * (len(shapes) - len(types))]
    inputs = [info(f"x{i}", s, t) for i, (s, t) in enumerate(zip(shapes, dtypes, strict=True))]
    names = [i.name for i in inputs] + ["" if c is None else f"c{k}" for k, c in enumerate(constants)]
    node = helper.make_node(op, names, [f"y{k}" for k in range(outputs)], name="the_node", **attrs)
    given = {f"c{k}": c for k, c in enumerate(constants) if c is not None}
    return model([node], inputs, [onnx.ValueInfoProto(name=f"y{k}") for k in range(outputs)], given, opset)


def generate(proto: onnx.ModelProto) -> Program:
    return generated(onnx_file.load(proto), level(), FusionOptions(), Stages())


# ---------------------------------------------------------------- strings

STRINGS = {
    "code": '"); } int main() { system("id"); } //',
    "comment": "*/ #include </etc/passwd> /*",
    "lines": 'a\n#define float double\r\nb\\\n"',
    "nul": "before\0after",
    "shell": "$(touch /tmp/onnxc-was-here) `id` ; rm -rf ~ | & > x",
    "path": "../../../../tmp/onnxc-was-here",
    "option": "-fplugin=/tmp/evil.so",
    "trigraph": '??/ %:include R"(x)"',
    "long": "n" * 100_000,
    "unicode": "\u202e\U0001f600 {0} %s %n",
}


def named(text: str) -> onnx.ModelProto:
    """A model that says `text` wherever a model has room for words."""
    nodes = [
        helper.make_node("MatMul", [text + "x", text + "w"], [text + "a"], name=text, doc_string=text),
        helper.make_node("Relu", [text + "a"], [text + "y"], name=text + "2"),
    ]
    w = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), text + "w")
    graph = helper.make_graph(nodes, text, [info(text + "x", [text, 4])], [info(text + "y", None)], [w], text)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    proto.producer_name = proto.producer_version = proto.domain = proto.doc_string = text
    proto.metadata_props.add(key=text, value=text)
    nodes_in_file = proto.graph.node
    nodes_in_file[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f'File "{text}", line 7')
    return proto


@pytest.mark.parametrize("text", STRINGS.values(), ids=STRINGS.keys())
def test_no_string_of_the_model_gets_out(text: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    start = subprocess.Popen

    def watch(command: Any, *args: Any, **kwargs: Any) -> Any:
        assert not kwargs.get("shell")
        commands.extend(command)
        return start(command, *args, **kwargs)

    monkeypatch.setattr(toolchain.subprocess, "Popen", watch)
    compiled = onnxc.compile(named(text))
    (y,) = compiled(np.full((2, 4), 3, np.float32))
    assert y.tolist() == [[3.0] * 4] * 2
    assert compiled.get_outputs()[0].name == text + "y"
    files = [p.name for p in fresh_cache.rglob("*")]
    for piece in {text, text[:40], *[line for line in text.splitlines() if len(line) > 3]}:
        assert piece not in compiled.source
        assert not any(piece in word for word in (*commands, *files))
    str(compiled.explain())
    assert not Path("/tmp/onnxc-was-here").exists()


def test_names_that_are_not_utf8() -> None:
    data = named("@@@@").SerializeToString().replace(b"@@@@", b"\xff\xfe*/")
    try:
        compiled = onnxc.compile(data)
    except OnnxcError:
        return  # a protobuf that refuses such strings
    assert "\udcff" not in compiled.source


@pytest.mark.parametrize("text", STRINGS.values(), ids=STRINGS.keys())
def test_strings_in_attributes_and_op_types(text: str) -> None:
    refused = [
        one("Pad", [[3]], np.array([1, 1]), mode=text),
        one("Einsum", [[2, 3], [3, 4]], equation=text),
        one("BitShift", [[2], [2]], types=[TensorProto.UINT8] * 2, direction=text),
        one("MaxPool", [[1, 1, 4]], kernel_shape=[2], auto_pad=text),
        one("Resize", [[1, 1, 4, 4]], None, np.ones(4, np.float32) * 2, mode=text),
        one("ScatterElements", [[3], [3], [3]], types=[F, L, F], reduction=text),
        one("LSTM", [[5, 2, 3], [1, 16, 3], [1, 16, 4]], activations=[text] * 3),
        one("Relu", [[3]], **{text.replace("\0", ""): 1}),
    ]
    other = one("Relu", [[3]])
    other.graph.node[0].op_type = text
    foreign = one("Relu", [[3]])
    foreign.graph.node[0].domain = text
    for proto in (*refused, other, foreign):
        with pytest.raises(OnnxcError) as caught:
            generate(proto)
        assert not isinstance(caught.value, (InternalError, ToolchainError))


# ---------------------------------------------------------------- shapes and attributes

CONV = [[1, 4, 8, 8], [4, 4, 3, 3]]
ROIS = [[1, 1, 4, 4], [3, 4], [3]]
REFUSED: dict[str, Callable[[], onnx.ModelProto]] = {
    "a dim of 2^62": lambda: one("Relu", [[HUGE]]),
    "a product beyond int64": lambda: one("Relu", [[2**39, 2**39]]),
    "rank 100": lambda: one("Relu", [[1] * 100]),
    "reshape to rank 1000": lambda: one("Reshape", [[6]], np.array([6] + [1] * 999)),
    "an axis of 2^62": lambda: one("Softmax", [[2, 3]], axis=HUGE),
    "an axis too low": lambda: one("Softmax", [[2, 3]], axis=-3),
    "an axis that is a float": lambda: one("Softmax", [[2, 3]], axis=1.5),
    "an axis that is a string": lambda: one("Softmax", [[2, 3]], axis="1"),
    "floats for a float": lambda: one("LeakyRelu", [[2, 3]], alpha=[1.0, 2.0]),
    "an int for ints": lambda: one("Transpose", [[2, 3]], perm=1),
    "concat of other dims": lambda: one("Concat", [[2, 3], [4, 5]], axis=0),
    "concat of other ranks": lambda: one("Concat", [[2, 3], [4]], axis=0),
    "concat without axis": lambda: one("Concat", [[2, 3]]),
    "matmul of other dims": lambda: one("MatMul", [[2, 3], [4, 5]]),
    "matmul of other batches": lambda: one("MatMul", [[2, 3, 4], [3, 4, 5]]),
    "broadcast": lambda: one("Add", [[2, 3], [4, 5]]),
    "other dtypes": lambda: one("Add", [[2], [2]], types=[F, L]),
    "conv channels": lambda: one("Conv", [[1, 3, 8, 8], [4, 5, 3, 3]]),
    "conv dtypes": lambda: one("Conv", CONV, types=[F, L]),
    "conv group 0": lambda: one("Conv", CONV, group=0),
    "conv group -1": lambda: one("Conv", CONV, group=-1),
    "conv group 3": lambda: one("Conv", CONV, group=3),
    "conv stride 0": lambda: one("Conv", CONV, strides=[0, 1]),
    "conv dilation 0": lambda: one("Conv", CONV, dilations=[0, 1]),
    "conv dilation -1": lambda: one("Conv", CONV, dilations=[-1, 1]),
    "conv pads 2^60": lambda: one("Conv", CONV, pads=[2**60] * 4),
    "conv too few pads": lambda: one("Conv", CONV, pads=[1]),
    "conv kernel too large": lambda: one("Conv", [[1, 4, 2, 2], [4, 4, 3, 3]]),
    "conv kernel of nothing": lambda: one("Conv", [[1, 4, 2, 2], [4, 4, 0, 3]]),
    "transposed conv stride": lambda: one("ConvTranspose", CONV, strides=[2**50] * 2),
    "pool of 2^30 x 2^30": lambda: one("AveragePool", [[1, 4, 8, 8]], kernel_shape=[2**30] * 2, pads=[2**29] * 4),
    "pool stride 0": lambda: one("AveragePool", [[1, 4, 8, 8]], kernel_shape=[1, 1], strides=[0, 0]),
    "LRN of 2^50": lambda: one("LRN", [[1, 4, 8, 8]], size=2**50),
    "regions in -2 rows": lambda: one("RoiAlign", ROIS, types=[F, F, L], output_height=-2, sampling_ratio=1),
    "-1 samples of regions": lambda: one("RoiAlign", ROIS, types=[F, F, L], sampling_ratio=-1),
    "flatten before the first axis": lambda: one("Flatten", [[2, 3]], axis=-3),
    "transpose twice one axis": lambda: one("Transpose", [[2, 3]], perm=[0, 0]),
    "split sizes": lambda: one("Split", [[6]], np.array([4, 4]), outputs=2),
    "split negative": lambda: one("Split", [[6]], np.array([8, -2]), outputs=2),
    "split for fewer outputs": lambda: one("Split", [[6]], np.array([3, 3])),
    "split in none": lambda: one("Split", [[6]], num_outputs=0),
    "reshape twice -1": lambda: one("Reshape", [[6]], np.array([-1, -1])),
    "reshape that leaves a rest": lambda: one("Reshape", [[6]], np.array([4, -1])),
    "reshape to 2^124": lambda: one("Reshape", [[6]], np.array([HUGE, HUGE])),
    "expand to a negative dim": lambda: one("Expand", [[1]], np.array([-4])),
    "expand to 2^124": lambda: one("Expand", [[1]], np.array([HUGE, HUGE])),
    "tile a negative time": lambda: one("Tile", [[3]], np.array([-1])),
    "pad of 2^62": lambda: one("Pad", [[3]], np.array([HUGE, HUGE])),
    "slice by steps of 0": lambda: one("Slice", [[3]], *(np.array([k]) for k in (0, 2, 0, 0))),
    "gather by floats": lambda: one("Gather", [[3], [2]]),
    "gather elements of another rank": lambda: one("GatherElements", [[3, 4], [2]], types=[F, L]),
    "gather elements outside": lambda: one("GatherElements", [[3, 4], [5000, 4]], types=[F, L], axis=1),
    "gather too deep": lambda: one("GatherND", [[3, 4], [2, 5]], types=[F, L]),
    "gather outside of the batch": lambda: one("GatherND", [[3, 4], [5000, 1]], types=[F, L], batch_dims=1),
    "gather 9 batch dims": lambda: one("GatherND", [[3, 4], [3, 1]], types=[F, L], batch_dims=9),
    "gather -1 batch dims": lambda: one("GatherND", [[3, 4], [3, 1]], types=[F, L], batch_dims=-1),
    "scatter outside": lambda: one("ScatterElements", [[3, 4], [5, 4], [5, 4]], types=[F, L, F], axis=1),
    "scatter of other dtypes": lambda: one("ScatterElements", [[3], [3], [3]], types=[F, L, L]),
    "top 2^60": lambda: one("TopK", [[3]], np.array([2**60]), outputs=2),
    "top -1": lambda: one("TopK", [[3]], np.array([-1]), outputs=2),
    "a range of 2^63": lambda: one("Range", [], *(np.int64(k) for k in (-HUGE, HUGE, 1))),
    "a range by steps of 0": lambda: one("Range", [], *(np.int64(k) for k in (0, 9, 0))),
    "a range to NaN": lambda: one("Range", [], *(np.float32(k) for k in (0, np.nan, 1))),
    "fill of 2^124": lambda: one("ConstantOfShape", [], np.array([HUGE, HUGE])),
    "one-hot of infinity": lambda: one("OneHot", [[3]], np.float32(np.inf), np.zeros(2, np.float32), types=[L]),
    "bits of floats": lambda: one("BitwiseAnd", [[3], [3]]),
    "known division by zero": lambda: one("Div", [], np.array([1]), np.array([0])),
    "known remainder by zero": lambda: one("Mod", [], np.array([1]), np.array([0])),
    "depth to space by 0": lambda: one("DepthToSpace", [[1, 4, 4, 4]], blocksize=0),
    "space to depth by -1": lambda: one("SpaceToDepth", [[1, 4, 4, 4]], blocksize=-1),
    "no group": lambda: one("GroupNormalization", [[1, 3, 4], [2], [2]], num_groups=0),
    "resize to NaN": lambda: one("Resize", [[1, 1, 4, 4]], None, np.full(4, np.nan, np.float32)),
    "resize by 0": lambda: one("Resize", [[1, 1, 4, 4]], None, np.zeros(4, np.float32)),
    "a window function of 2^40 in DFT": lambda: one("DFT", [[1, 2**40, 1]], opset=17),
    "cast to no type": lambda: one("Cast", [[3]], to=99),
    "an attribute too many": lambda: one("Relu", [[3]], foo=1),
    "no inputs": lambda: one("Add", []),
    "one input of two": lambda: one("Add", [[3]]),
    "nine inputs": lambda: one("Add", [[3]] * 9),
    "seven outputs": lambda: one("Relu", [[3]], outputs=7),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_node_and_its_shapes(make: Callable[[], onnx.ModelProto]) -> None:
    with pytest.raises(OnnxcError) as caught:
        generate(make())
    error = caught.value
    assert not isinstance(error, (InternalError, ToolchainError))
    assert (
        (error.node is not None and "the_node" in error.node)
        or "the input 'x0'" in str(error)
        or "input 'x0'" in str(error)
    )


WIRING: dict[str, Callable[[], onnx.ModelProto]] = {
    "two makers": lambda: model(
        [helper.make_node(op, ["x"], ["y"]) for op in ("Relu", "Exp")], [info("x", [2])], [info("y", None)]
    ),
    "an input made": lambda: model([helper.make_node("Relu", ["x"], ["x"])], [info("x", [2])], [info("x", None)]),
    "one node, one name twice": lambda: model(
        [helper.make_node("Split", ["x"], ["y", "y"])], [info("x", [2])], [info("y", None)]
    ),
    "itself": lambda: model([helper.make_node("Add", ["x", "y"], ["y"])], [info("x", [2])], [info("y", None)]),
    "nothing": lambda: model([], [], []),
}


@pytest.mark.parametrize("make", WIRING.values(), ids=WIRING.keys())
def test_wiring_that_makes_no_sense(make: Callable[[], onnx.ModelProto]) -> None:
    with pytest.raises(ModelError):
        generate(make())


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: one("ConstantOfShape", [], np.array([2**43])),
        lambda: one("Range", [], np.int64(0), np.int64(2**42), np.int64(1)),
        lambda: one("Expand", [], np.float32([1]), np.array([2**43])),
        lambda: one("OneHot", [[3]], np.array(2**42), np.array([0, 1], np.float32), types=[L]),
        lambda: one("Tile", [], np.ones(3, np.float32), np.array([2**42])),
    ],
)  # fmt: skip
def test_nothing_large_is_made_while_compiling(make: Callable[[], onnx.ModelProto]) -> None:
    program = generate(make())
    assert program.weights.nbytes < 1 << 20
    with pytest.raises(LimitError):
        onnxc.compile(make())(*([np.zeros(3, np.int64)] if make().graph.input else []))


def test_empty_tensors_that_numpy_cannot_have() -> None:
    with pytest.raises(LimitError, match="no array has the shape"):
        onnxc.compile(one("Expand", [], np.ones((0, 1), np.float32), np.array([0, 2**62])))


@pytest.mark.parametrize(
    ("op", "weights", "dtype"),
    [
        ("Conv", (40, 0, 3, 3), np.float32),
        ("Conv", (40, 0, 1, 3, 3), np.float32),
        ("ConvTranspose", (0, 7, 3, 3), np.float32),
        ("ConvInteger", (7, 0, 1, 1), np.uint8),
        ("ConvInteger", (7, 0, 3, 3), np.uint8),
    ],
)
def test_images_of_no_channels(op: str, weights: tuple[int, ...], dtype: type) -> None:
    """A sum of nothing is 0, and reads nothing."""
    shape = (1, 0, *[5] * (len(weights) - 2))
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    bias = [] if op == "ConvInteger" else [np.arange(max(weights[:2]), dtype=np.float32)]
    y = onnxc.compile(one(op, [shape], np.zeros(weights, dtype), *bias, types=[kind]))(np.zeros(shape, dtype))[0]
    per_channel = bias[0] if bias else np.zeros(max(weights[:2]))
    assert y.size
    np.testing.assert_array_equal(y, np.broadcast_to(per_channel.reshape(-1, *[1] * (y.ndim - 2)), y.shape))


def test_regions_in_no_rows() -> None:
    arrays = [np.ones((1, 1, 4, 4), np.float32), np.ones((3, 4), np.float32), np.zeros(3, np.int64)]
    y = onnxc.compile(one("RoiAlign", ROIS, types=[F, F, L], output_height=0))(*arrays)[0]
    assert y.shape == (3, 1, 0, 1)


def test_arenas_have_a_limit() -> None:
    """An intermediate that no machine holds, between an input and an output that every machine does."""
    text = "(float[N] x, float[M] y) => (float z) { a = MatMul(p, q) z = ReduceMax<keepdims=0>(e) }"
    text = text.replace(
        "a = ",
        "i = Constant<value_ints=[-1, 1]>() j = Constant<value_ints=[1, -1]>() "
        "p = Reshape(x, i) q = Reshape(y, j) a = ",
    ).replace("z = ", "e = Softmax<axis=0>(a) z = ")
    compiled = onnxc.compile(parse(text))
    assert np.isfinite(compiled(np.ones(5, np.float32), np.ones(7, np.float32))[0])
    n = int(memory_bytes() ** 0.5)
    with pytest.raises(LimitError):
        compiled(np.ones(n, np.float32), np.ones(n, np.float32))
    limited = onnxc.compile(parse(text), memory_limit=100)
    with pytest.raises(LimitError, match=r"the intermediates of a call at these sizes take \d+ bytes.*memory_limit"):
        limited(np.ones(50, np.float32), np.ones(70, np.float32))


DOUBLING = {
    "Concat": "v{i} = Concat<axis=0>(u{i}, u{i})",
    "Tile": "v{i} = Tile(u{i}, two)",
    "Expand": "e{i} = Unsqueeze(u{i}, zero) f{i} = Expand(e{i}, pair) v{i} = Reshape(f{i}, flat)",
}


@pytest.mark.parametrize("size", ["4", "N"])
@pytest.mark.parametrize("step", DOUBLING.values(), ids=DOUBLING.keys())
def test_doubling_sixty_times(step: str, size: str) -> None:
    body = " ".join(step.replace("u{i}", f"v{i - 1}").replace("{i}", str(i)) for i in range(1, 61))
    head = "two = Constant<value_ints=[2]>() zero = Constant<value_ints=[0]>() pair = Constant<value_ints=[2, 1]>()"
    proto = parse(f"(float[{size}] v0) => (float[M] v60) {{ {head} flat = Constant<value_ints=[-1]>() {body} }}")
    if size == "4":
        with pytest.raises(LimitError):
            generate(proto)
    else:
        generate(proto)


@pytest.mark.parametrize("op", ["Mul", "Add"])
def test_sizes_that_grow_without_end(op: str) -> None:
    """A size times itself, sixty times: in numbers, and as an expression."""
    square = " ".join(f"s{i + 1} = {op}(s{i}, s{i})" for i in range(60))
    for size in ("3", "N"):
        with pytest.raises(LimitError):
            generate(parse(f"(float[{size}] x) => (float[M] y) {{ s0 = Shape(x) {square} o = Constant<value_floats=[1.0]>() "
                           "t = Concat<axis=0>(s60, s60) y = Expand(o, t) }"))  # fmt: skip


# ---------------------------------------------------------------- very many nodes


def chain(step: str, n: int, inputs: str, first: str) -> onnx.ModelProto:
    body = " ".join(step.replace("{j}", str(i + 1)).replace("{i}", str(i)) for i in range(n))
    return parse(f"({inputs}) => (float[P] v{n}) {{ v0 = {first} {body} }}")


def fibonacci(n: int) -> onnx.ModelProto:
    body = " ".join(f"v{i} = {'Mul' if i % 2 else 'Add'}(v{i - 1}, v{i - 2})" for i in range(2, n))
    return parse(f"(float[8] x) => (float[8] v{n - 1}) {{ v0 = Relu(x) v1 = Exp(x) {body} }}")


MANY: dict[str, Callable[[], onnx.ModelProto]] = {
    "20000 additions": lambda: chain("v{j} = Add(v{i}, x)", 20_000, "float[8] x", "Identity(x)"),
    "5000 doublings": lambda: chain("v{j} = Add(v{i}, v{i})", 5_000, "float[8] x", "Identity(x)"),
    "2000 sigmoids": lambda: chain("v{j} = Sigmoid(v{i})", 2_000, "float[8] x", "Identity(x)"),
    "1000 matmuls": lambda: chain("v{j} = MatMul(v{i}, x)", 1_000, "float[8, 8] x", "Identity(x)"),
    "1000 fibonacci": lambda: fibonacci(1_000),
    "500 transposed reshapes": lambda: chain(
        "t{j} = Transpose<perm=[1, 2, 0]>(v{i}) v{j} = Reshape(t{j}, s)", 500, "float[4, 6, 8] x, int64[3] q",
        "Relu(x) s = Constant<value_ints=[6, 8, 4]>()",
    ),
    "300 slices of a dynamic dim": lambda: chain(
        "v{j} = Slice(v{i}, one, far)", 300, "float[N] x",
        "Relu(x) one = Constant<value_ints=[1]>() far = Constant<value_ints=[9999999999]>()",
    ),
    "500 branches": lambda: parse(
        f"(float[8] x) => (float[P] y) {{ {' '.join(f'b{i} = LeakyRelu<alpha={i / 500}>(x)' for i in range(1, 501))} "
        f"y = Concat<axis=0>({', '.join(f'b{i}' for i in range(1, 501))}) }}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", MANY.values(), ids=MANY.keys())
def test_many_nodes(make: Callable[[], onnx.ModelProto]) -> None:
    """Neither RecursionError nor hours: the limit, of the process's own time, is ten times what a slow machine takes."""
    proto = make()
    start = time.process_time()
    program = generate(proto)
    assert time.process_time() - start < 60
    assert max(map(len, program.kernels.values())) < 1_000_000


# ---------------------------------------------------------------- hostile data


OUTSIDE = [3, -4, 2**31, -(2**31), 2**40, 2**62, -(2**63), 2**63 - 1]


@pytest.mark.every_target
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    "text",
    [
        "(float[3, 5] x, int64[N] i) => (float[N, 5] y) { y = Gather(x, i) }",
        "(float[3, 5] x, int64[N] j) => (float[N, 5] y) { s = Shape(x) a = Constant<value_ints=[1]>() i = Unsqueeze(j, a) "
        "f = Constant<value_ints=[-1, 5]>() k = Expand(i, e) e = Constant<value_ints=[1, 5]>() y = GatherElements(x, k) }",
        "(float[3, 5] x, int64[N] j) => (float[N, 5] y) { a = Constant<value_ints=[1]>() i = Unsqueeze(j, a) y = GatherND(x, i) }",
        "(float[3, 5] x, int64[N] j) => (float[3, 5] y) { a = Constant<value_ints=[1]>() i = Unsqueeze(j, a) "
        "u = Gather(x, z) z = Mul(j, o) o = Constant<value_ints=[0]>() y = ScatterND(x, i, u) }",
    ],
    ids=["gather", "gather-elements", "gather-nd", "scatter-nd"],
)  # fmt: skip
def test_indices_outside(text: str, rows: int) -> None:
    ordered = text.replace(
        "k = Expand(i, e) e = Constant<value_ints=[1, 5]>()", "e = Constant<value_ints=[1, 5]>() k = Expand(i, e)"
    )
    ordered = ordered.replace("u = Gather(x, z) z = Mul(j, o) o = Constant<value_ints=[0]>()",
                              "o = Constant<value_ints=[0]>() z = Mul(j, o) u = Gather(x, z)")  # fmt: skip
    compiled = onnxc.compile(parse(ordered))
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    good = np.arange(rows) % 3
    compiled(_fenced(x), _fenced(good))
    for bad in OUTSIDE:
        index = good.copy()
        index[rows // 2] = bad
        with pytest.raises(RunError, match="out of bounds") as caught:
            compiled(_fenced(x), _fenced(index))
        assert caught.value.node is not None
    compiled(_fenced(x), _fenced(good))


@pytest.mark.every_target
def test_an_error_names_the_node_of_its_index() -> None:
    """Where thousands of indices of two nodes are wrong at once, the words of two reports must not mix."""
    compiled = onnxc.compile(
        parse("(float[7] x, int64[N] i, int64[N] j) => (float[N] y, float[N] z) { y = Gather(x, i) z = Gather(x, j) }"),
        fusion=False,
    )
    count = np.arange(20_000)
    for _ in range(5):
        with pytest.raises(RunError, match=r"index \d+ is out of bounds") as caught:
            compiled(np.ones(7, np.float32), 1_000_000 + count, 2_000_000 + count)
        index = int(re.findall(r"index (\d+)", str(caught.value))[0])
        assert caught.value.node in {1: ("n0 Gather",), 2: ("n1 Gather",)}[index // 1_000_000]


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_integer_division(op: str, dtype: Any) -> None:
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    compiled = onnxc.compile(one(op, [["n"], ["n"]], types=[number, number]))
    least = np.iinfo(dtype).min
    a, b = np.array([least, 7, 9] * 9, dtype), np.array([1, 2, 3] * 9, dtype)
    compiled(a, b)
    for at in (0, 13, 26):
        zero = b.copy()
        zero[at] = 0
        with pytest.raises(RunError, match="division by zero"):
            compiled(a, zero)
    if least < 0:  # overflows: any answer but a trap
        compiled(a, np.full(27, -1, dtype))


@pytest.mark.every_target
def test_shifts_beyond_the_width() -> None:
    for direction in ("LEFT", "RIGHT"):
        compiled = onnxc.compile(one("BitShift", [["n"], ["n"]], types=[TensorProto.UINT32] * 2, direction=direction))
        compiled(np.arange(40, dtype=np.uint32), np.arange(40, dtype=np.uint32) * 7)


# ---------------------------------------------------------------- dynamic dims that do not fit

MEETING: dict[str, tuple[Callable[[], onnx.ModelProto], list[Shape], list[list[Shape]]]] = {
    "add": (lambda: one("Add", [["a", "c"], ["b", "d"]]), [[3, 4], [3, 4]], [[[3, 4], [30, 4]], [[3, 4], [2, 4]], [[2, 4], [3, 4]]]),
    "matmul": (lambda: one("MatMul", [["a", "m", "k"], ["b", "l", "n"]]), [[2, 3, 4], [2, 4, 5]], [[[2, 3, 4], [2, 40, 5]], [[2, 3, 4], [3, 4, 5]]]),
    "gemm": (lambda: one("Gemm", [["a", "b"], ["c", "d"], ["e", "f"]]), [[3, 4], [4, 6], [3, 6]], [[[3, 4], [40, 6], [3, 6]], [[3, 4], [4, 6], [3, 2]]]),
    "concat": (lambda: one("Concat", [["a", "b"], ["c", "d"]], axis=0), [[3, 4], [2, 4]], [[[3, 4], [2, 9]]]),
    "conv": (lambda: one("Conv", [["n", "c", 8, 8], ["m", "k", 3, 3]], group=2), [[1, 4, 8, 8], [4, 2, 3, 3]],
             [[[1, 4, 8, 8], [4, 5, 3, 3]], [[1, 4, 8, 8], [3, 2, 3, 3]]]),
    "pool": (lambda: one("MaxPool", [[1, 1, "n"]], kernel_shape=[3], strides=[2]), [[1, 1, 5]], [[[1, 1, 2]]]),
    "split": (lambda: one("Split", [["n", 3]], np.array([8, 3]), outputs=2), [[11, 3]], [[[3, 3]], [[10, 3]]]),
    "gather elements": (lambda: one("GatherElements", [["a", 4], ["b", 4]], types=[F, L], axis=1), [[5, 4], [3, 4]], [[[3, 4], [5000, 4]]]),
    "gather nd": (lambda: one("GatherND", [["a", 4], ["b", 1]], types=[F, L], batch_dims=1), [[3, 4], [3, 1]], [[[3, 4], [5000, 1]]]),
    "scatter": (lambda: one("ScatterElements", [["a", 4], ["c", 4], ["e", 4]], types=[F, L, F], axis=1),
                [[3, 4], [2, 4], [2, 4]], [[[3, 4], [50, 4], [50, 4]], [[3, 4], [2, 4], [1, 4]]]),
    "reshape": (lambda: one("Reshape", [["n", 3]], np.array([4, -1])), [[8, 3]], [[[3, 3]]]),
    "squeeze": (lambda: one("Squeeze", [["n", 3]], np.array([0])), [[1, 3]], [[[5, 3]]]),
    "top k": (lambda: one("TopK", [["n"]], np.array([5]), outputs=2), [[7]], [[[3]]]),
    "expand": (lambda: parse("(float[A, B] x, float[C, D] y) => (float[E, F] z) { s = Shape(y) z = Expand(x, s) }"),
               [[3, 4], [3, 4]], [[[3, 4], [30, 40]], [[2, 4], [3, 4]]]),
    "attention": (
        lambda: parse("(float[A,B,C] q, float[D,E,F] k, float[G,H,P] v, float[J,K,L] m) => (float[X,Y,Z] y) "
                      "{ s = MatMul(q, k) t = Add(s, m) p = Softmax<axis=-1>(t) y = MatMul(p, v) }"),
        [[2, 4, 8], [2, 8, 5], [2, 5, 3], [2, 4, 5]],
        [[[2, 4, 8], [2, 80, 5], [2, 5, 3], [2, 4, 5]], [[2, 4, 8], [2, 8, 5], [2, 50, 3], [2, 4, 5]],
         [[2, 4, 8], [2, 8, 5], [2, 5, 3], [2, 4, 9]], [[9, 4, 8], [2, 8, 5], [2, 5, 3], [2, 4, 5]]],
    ),
    "scan": (lambda: one("LSTM", [["t", "b", 3], [1, 16, 3], [1, 16, 4], [1, 32], ["c"], [1, "b", 4]], types=[F, F, F, F, TensorProto.INT32]),
             [[5, 2, 3], [1, 16, 3], [1, 16, 4], [1, 32], [2], [1, 2, 4]],
             [[[5, 2, 3], [1, 16, 3], [1, 16, 4], [1, 32], [7], [1, 2, 4]]]),
}  # fmt: skip


@pytest.mark.every_target
@pytest.mark.parametrize(("make", "good", "bad"), MEETING.values(), ids=MEETING.keys())
def test_dims_taken_as_equal_are_checked(
    make: Callable[[], onnx.ModelProto], good: list[Shape], bad: list[list[Shape]]
) -> None:
    """Every input ends where an inaccessible page begins: what reads past it crashes."""
    compiled = onnxc.compile(make())

    def call(shapes: list[Shape]) -> None:
        compiled(*(_fenced(np.ones(s, t.dtype.numpy)) for s, t in zip(shapes, compiled.get_inputs(), strict=True)))  # type: ignore[arg-type]

    call(good)
    for shapes in bad:
        with pytest.raises((InputError, RunError)) as caught:
            call(shapes)
        assert caught.value.node is not None
    call(good)


@pytest.mark.every_target
def test_slice_from_a_size_that_may_be_negative() -> None:
    """`x[n - 5:]` counts from the end where n < 5."""
    compiled = onnxc.compile(parse(
        "(float[A] x, float[B] y) => (float[C] z) { n = Shape(y) five = Constant<value_ints=[5]>() "
        "s = Sub(n, five) far = Constant<value_ints=[9999999999]>() z = Slice(x, s, far) }"
    ))  # fmt: skip
    x = np.arange(9, dtype=np.float32)
    for n in range(20):
        np.testing.assert_array_equal(compiled(x, np.zeros(n, np.float32))[0], x[n - 5 :])


# ---------------------------------------------------------------- under the address sanitizer

SANITIZED = """
import numpy as np, onnxc, os, sys
del os.environ["LD_PRELOAD"]  # compilers need no sanitizer themselves: they would take twice the time
from onnxc.errors import OnnxcError
from tests.test_hostile import MEETING, OUTSIDE, parse
for name, (make, good, bad) in MEETING.items():
    compiled = onnxc.compile(make())
    for shapes in [good, *bad]:
        try:
            compiled(*(np.ones(s, t.dtype.numpy) for s, t in zip(shapes, compiled.get_inputs())))
        except OnnxcError:
            pass
compiled = onnxc.compile(parse("(float[3, 5] x, int64[N] i) => (float[N, 5] y) { y = Gather(x, i) }"))
for bad in OUTSIDE:
    try:
        compiled(np.ones((3, 5), np.float32), np.full(9, bad))
        sys.exit("an index outside was read")
    except OnnxcError:
        pass
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs libasan as gcc installs it")
def test_kernels_under_the_address_sanitizer(fresh_cache: Path) -> None:
    compiler_name = os.environ.get("CXX", "g++")
    asan = subprocess.run(
        [compiler_name, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not os.path.isabs(asan):
        pytest.skip("the compiler has no address sanitizer")
    script = "from onnxc.runtime import toolchain as t; t._LEAN += ('-fsanitize=address',); t._LIBRARIES_BARE = ('-lasan', *t._LIBRARIES_BARE)\n"
    done = subprocess.run(
        [sys.executable, "-c", script + SANITIZED],
        env={**os.environ, "LD_PRELOAD": os.path.realpath(asan), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "done" and done.returncode == 0, done.stderr[-3000:]


def test_the_fences_work() -> None:
    """What the tests above lean on: a read past a fenced array ends the process."""
    script = "import numpy as np, ctypes; from tests.compile_harness import _fenced; a = _fenced(np.ones(4, np.float32)); ctypes.string_at(a.ctypes.data, 17)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode < 0
    assert ctypes.sizeof(ctypes.c_void_p) == 8


# ---------------------------------------------------------------- at random


@pytest.mark.parametrize("part", range(2))
def test_mutations(part: int) -> None:
    """In a process of its own, so that a crash is seen. (`python -m tests.mutations 0 100000` looks longer.)"""
    command = [sys.executable, "-m", "tests.mutations", str(part * 60), str(part * 60 + 60)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert lines and lines[-1] == "done", (done.returncode, lines[-1:], done.stderr[-2000:])
    assert not [line for line in lines if " ! " in f" {line.partition(' ')[2][:2]}"]
    assert sum(line.endswith("same") for line in lines) >= 5
