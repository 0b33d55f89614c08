"""Weights in files: linked by parts of a model, let go from memory, and large models that run in parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.errors import ModelError
from onnxc.runtime.mapped import forget, forgetting
from onnxc.tools.compare import compare, local, products, sides
from onnxc.tools.compare.engines import Float64, OnnxReference, OnnxRuntime, load_piece
from onnxc.tools.compare.layers import CHUNK, _chunks
from onnxc.tools.compare.pieces import SourceModel
from tests.small_models import parse

TEXT = """(float[2, 64] x, float[64, 64] w, float[64] b) => (float[2, 64] y) {
  h = MatMul(x, w) z = Add(h, b) y = Tanh(z) }"""


def with_files(folder: Path, location: str = "weights.bin", *, moved: bool = False) -> Path:
    """The model, its weights in a file beside it, which may be moved to where the location says."""
    model = parse(TEXT, 18)
    r = np.random.default_rng(0)
    for name, shape in (("w", (64, 64)), ("b", (64,))):
        model.graph.initializer.append(numpy_helper.from_array(r.standard_normal(shape, np.float32), name))
    del model.graph.input[1:]
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    again = onnx.load(folder / "m.onnx", load_external_data=False)
    for tensor in again.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location
    onnx.save(again, folder / "m.onnx")
    if moved:
        (folder / "weights.bin").rename(folder / location)
    return folder / "m.onnx"


def test_a_linked_part_gives_what_a_copied_one_does(tmp_path: Path) -> None:
    source = SourceModel(with_files(tmp_path))
    assert source.data_dir == str(tmp_path.resolve())
    feeds = {"x": np.ones((2, 64), np.float32)}
    linked = source.piece([0, 1], feeds, ["z"], linked=True)
    assert [t.name for t in linked.graph.initializer if t.data_location == TensorProto.EXTERNAL] == ["w"]  # b is small
    found = [load_piece(e, source, [0, 1], feeds, ["z"])[0](feeds)[0] for e in (OnnxRuntime(), Float64())]
    copied = OnnxReference().load(source.piece([0, 1], feeds, ["z"]))(feeds)[0]
    for z in found:
        np.testing.assert_allclose(z, copied, rtol=1e-5, atol=1e-5)


def test_weights_are_widened_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK", 64)
    text = "{ g = Gather(t, i) v = Transpose<perm=[1, 0]>(w) y = MatMul(g, v) }"
    model = parse(f"(int64[70] i) => (float[70, 200] y) {text}", 18)
    r = np.random.default_rng(0)
    table, w = r.standard_normal((5, 8), np.float32), r.standard_normal((200, 8)).astype(np.float16)
    model.graph.initializer.extend([numpy_helper.from_array(table, "t"), numpy_helper.from_array(w.astype("f"), "w")])
    source, feeds = SourceModel(model), {"i": np.arange(70) % 5}
    layer = local.Layer("y", (0, 1, 2), ("i",))
    right = table[feeds["i"]].astype(np.float64) @ w.T.astype(np.float64)
    with ThreadPoolExecutor(2) as pool:
        layers = local.Layers(source, [layer], feeds, pool)
        exact = layers.exact(layer, feeds)
        assert exact.dtype == np.float64 and abs(exact - right).max() < 1e-14
        assert 1e-9 < abs(layers.narrow(layer, feeds) - right).max() < 1e-5


@pytest.mark.parametrize(
    "shapes", [((3, 5), (5, 70)), ((2, 3, 5), (5, 7)), ((2, 1, 3, 5), (4, 5, 7)), ((3, 0), (0, 7))]
)
def test_products_are_those_of_float64(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    r = np.random.default_rng(0)
    a, b = r.standard_normal(shapes[0]), r.standard_normal(shapes[1]).astype(np.float32)
    with ThreadPoolExecutor(2) as pool:
        found = products.product(a, b, pool)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.matmul(a, b.astype(np.float64)), rtol=1e-13, atol=1e-13)


def test_sizes_in_a_file_are_copied(tmp_path: Path) -> None:
    model = parse("(float[2, 64] x) => (float[a, b] y) { y = Reshape(x, s) }", 18)
    model.graph.initializer.append(numpy_helper.from_array(np.array([4, 32]), "s"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    source, feeds = SourceModel(tmp_path / "m.onnx"), {"x": np.ones((2, 64), np.float32)}
    for engine in (OnnxRuntime(), Float64()):
        (y,) = load_piece(engine, source, [0], feeds, ["y"])[0](feeds)
        assert y.shape == (4, 32)


@pytest.mark.parametrize("kind", ["constant", "subgraph"])
def test_locations_inside_of_nodes_are_not_taken_for_others(kind: str, tmp_path: Path) -> None:
    """`weights.bin` is another file in the folder of the model than in the one where its weights lie."""
    (tmp_path / "deep").mkdir()
    path = with_files(tmp_path, "deep/weights.bin", moved=True)
    assert SourceModel(path).data_dir == str((tmp_path / "deep").resolve())
    np.full(64, 7, np.float32).tofile(tmp_path / "weights.bin")
    model = onnx.load(path, load_external_data=False)
    inner = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[64], data_location=TensorProto.EXTERNAL)
    inner.external_data.add(key="location", value="weights.bin")
    if kind == "constant":
        node = helper.make_node("Constant", [], ["c"], value=inner)
    else:
        out = helper.make_tensor_value_info("c", TensorProto.FLOAT, [64])
        branch = helper.make_graph([], "g", [], [out], [inner])
        node = helper.make_node("If", ["k"], ["c"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)
    onnx.save(model, path)
    assert SourceModel(path).data_dir is None


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/passwd"])
def test_a_link_does_not_leave_the_folder(location: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        SourceModel(with_files(tmp_path, location)).piece([0], {"x": np.ones((2, 64), np.float32)}, ["h"], linked=True)


def test_what_is_forgotten_comes_back(tmp_path: Path) -> None:
    np.arange(4096, dtype=np.float32).tofile(tmp_path / "a.bin")
    mapped = np.memmap(tmp_path / "a.bin", np.float32, "r")
    view = np.asarray(mapped)[10:20].reshape(2, 5)
    for _ in range(2):
        forget([view, np.ones(3), None])
        forgetting([view])(1 << 40)
        np.testing.assert_array_equal(view.reshape(-1), np.arange(10, 20))


def test_what_no_file_has_stays(tmp_path: Path) -> None:
    np.zeros(4096, np.float32).tofile(tmp_path / "a.bin")
    own = np.memmap(tmp_path / "a.bin", np.float32, "c")
    own[:] = 1
    forget([own])
    assert (own == 1).all()


def test_a_large_model_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_files(tmp_path)
    whole = compare(path, layers=True)
    monkeypatch.setattr(sides, "WHOLE_BYTES", 0)
    parts = compare(path, layers=True)
    assert whole.agree and [t.error for t in parts.layers] == [t.error for t in whole.layers]
    assert [o.max_abs for o in parts.outputs] == [o.max_abs for o in whole.outputs]
    assert repr(parts) == f"<onnxc against onnxruntime: {parts.verdict.value}; 1 outputs, 3 tensors inside>"


def test_chunks_cover_every_node() -> None:
    nodes = " ".join(f"a{k + 1} = Tanh(a{k})" for k in range(2 * CHUNK + 3))
    source = SourceModel(parse(f"(float[4] a0) => (float[4] a{2 * CHUNK + 3}) {{ {nodes} }}", 18))
    ranges = list(_chunks(source))
    assert ranges == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 3)]
