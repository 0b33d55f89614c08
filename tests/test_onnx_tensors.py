"""The ONNX importer: tensors of every dtype and storage, and data in other files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.errors import LimitError, ModelError
from onnxc.frontends.onnx_file import load
from onnxc.frontends.onnx_tensors import all_tensors
from onnxc.ir import dtypes
from tests.onnx_protos import (
    ADD,
    constant,
    model,
    node,
    read,
    tensor,
)

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
