"""Files beside a model that claim more than there is: refused before anything of it is read."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc import fingerprint
from onnxc.compiler import stages
from onnxc.errors import InputError, LimitError, ModelError, OnnxcError
from onnxc.frontends import onnx_file
from onnxc.tools import inputs

TIB = 1 << 40


def gathered(folder: Path, size: int, elements: int) -> Path:
    """A model that reads two elements of a weight in a file of `size` bytes, none of which are on the disk."""
    with open(folder / "w.bin", "wb") as file:
        file.truncate(size)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[elements], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    places = helper.make_tensor_value_info("i", TensorProto.INT64, [2])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph([helper.make_node("Gather", ["w", "i"], ["y"])], "g", [places], [result], [weight])
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


@pytest.mark.parametrize("cache", [True, False])
def test_more_than_the_machine_has(cache: bool, tmp_path: Path, fresh_cache: Path) -> None:
    path = gathered(tmp_path, TIB, TIB // 4)
    started = time.process_time()
    with pytest.raises(LimitError, match=rf"'w'\)? takes {TIB} bytes, .* bytes of memory are there"):
        onnxc.compile(path, cache=cache)
    assert time.process_time() - started < 30  # to read a TiB takes minutes


@pytest.mark.parametrize("cache", [True, False])
def test_a_file_that_ends_too_soon(cache: bool, tmp_path: Path, fresh_cache: Path) -> None:
    path = gathered(tmp_path, 100, 26)
    with pytest.raises(ModelError, match=r"'w' reaches byte 104 of an external file of 100 bytes"):
        onnxc.compile(path, cache=cache)


def test_holes_count_as_the_zeros_that_they_are(tmp_path: Path) -> None:
    """A sparse file has the digest of one that is written out, and a byte in it is seen."""
    size = 3 * (8 << 20) + 5
    path = gathered(tmp_path, size, size // 4)
    sparse = fingerprint.fingerprint(path, None, None).digest
    (tmp_path / "w.bin").write_bytes(bytes(size))
    assert fingerprint.fingerprint(path, None, None).digest == sparse
    gathered(tmp_path, size, size // 4)
    with open(tmp_path / "w.bin", "r+b") as file:
        file.seek(9 << 20)
        file.write(b"\1")
    assert fingerprint.fingerprint(path, None, None).digest != sparse


@pytest.mark.parametrize("cache", [True, False])
def test_subgraphs_deeper_than_python_calls(cache: bool, fresh_cache: Path) -> None:
    """A ModelProto may be deeper than what protobuf reads from a file."""
    model = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 18)])
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    for _ in range(2000):
        node = graph.node.add(op_type="If", input=["c"], output=["y"])
        graph.output.add(name="y")
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    with pytest.raises(OnnxcError, match=r"deep|nested|in each other|read"):
        onnxc.compile(model, cache=cache)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    path = gathered(tmp_path, 64, 16)
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(ModelError, match=re.escape("external data 'w.bin' cannot be mapped")):
        onnx_file.load(path)


def test_weights_that_the_memory_left_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gathered(tmp_path, 1 << 20, 1 << 18)
    monkeypatch.setattr(stages, "memory_bytes", lambda: 2 << 20)
    monkeypatch.setattr(stages, "available_bytes", lambda: 1 << 19)
    with pytest.raises(LimitError, match="524288 bytes of memory are left"):
        onnxc.compile(path, cache=False)


def test_archives_that_are_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes on the disk, and more than there is of memory."""
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros(1 << 20, np.float32), y=np.zeros(4, np.float32))
    assert path.stat().st_size < 1 << 14
    assert set(inputs.read_inputs(path, ["x", "y"])) == {"x", "y"}
    monkeypatch.setattr(inputs, "available_bytes", lambda: 1 << 20)
    with pytest.raises(LimitError, match=r"unpacked, 4194432 of them in 'x': 1048576 bytes of memory are left"):
        inputs.read_inputs(path, ["x", "y"])


@pytest.mark.parametrize("size", ["9" * 19, "-" + "9" * 5000, "\N{ARABIC-INDIC DIGIT TWO}"])
def test_sizes_of_too_many_digits(size: str) -> None:
    with pytest.raises(InputError, match="up to 18 digits"):
        inputs.parse_shapes([f"x=1,{size}"])
