"""Programs with taps in the cache, weights that two programs share, metrics block by block, names that mean harm."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from typer.testing import CliRunner

import onnxc
from onnxc.cli import app
from onnxc.codegen.weights import WeightStore
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError
from onnxc.reports.terminal import as_text
from onnxc.runtime import mapped
from onnxc.runtime.cache import Cache
from onnxc.runtime.compiled_model import WEIGHTS
from onnxc.runtime.model import CpuModel
from onnxc.runtime.package import open_package
from onnxc.tools.compare import metrics, tapped
from onnxc.tools.compare.bounds import layer_bound
from onnxc.tools.compare.core import compare
from onnxc.tools.compare.sums import BLOCK, largest_gap
from onnxc.tools.compare.tapped import TappedProgram
from onnxc.tools.inputs import read_inputs, write_arrays
from tests.small_models import floats, parse
from tests.test_compare_memory import with_files

OPEN = """(float[n, 16] x) => (float[n, 4] y) {
  w = Constant<value_floats=[0.5, 0.25, 1.0, -1.0]>() r = Constant<value_ints=[-1, 4, 4]>() a = Tanh(x)
  b = Reshape(a, r) c = Mul(b, w) k = Constant<value_ints=[1]>() d = ReduceSum<keepdims=0>(c, k) y = Exp(d) }"""


def never(*args: Any) -> None:
    raise AssertionError("the plan was made again")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty cache that finds the compiled runtime in the ordinary one."""
    found = Cache(tmp_path / "cache")
    usual = tapped._own_cache(CompileOptions())
    monkeypatch.setattr("onnxc.tools.compare.taps.load_runtime", lambda _: onnxc.runtime.library.load_runtime(usual))
    monkeypatch.setattr("onnxc.compiler.making.load_runtime", lambda _: onnxc.runtime.library.load_runtime(usual))
    return found


def test_a_program_with_taps_comes_from_the_cache(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = parse(OPEN), CompileOptions(cache=cache)
    plain = onnxc.compile(model, cache=cache)
    x = floats(3, 16)
    first = TappedProgram(model, options, plain=plain)
    (y,), shown = first.run({"x": x}, ["a", "c"])
    monkeypatch.setattr(tapped, "TappedPlans", never)
    second = TappedProgram(model, options, plain=plain)
    assert second.names == first.names and second.nbytes("c", {"x": x}) == 3 * 16 * 4
    (again,), values = second.run({"x": x}, ["a", "c"])
    assert np.array_equal(y, again) and np.array_equal(y, plain(x)["y"])
    assert all(np.array_equal(shown[n], values[n]) for n in ("a", "c"))
    with pytest.raises(AssertionError, match="again"):  # other taps are another program
        second.run({"x": x}, ["a"])
    with pytest.raises(AssertionError, match="again"):  # what was given may be compiled from something else
        TappedProgram(model, options)


def test_weights_are_shared_where_they_are_the_same(cache: Cache, tmp_path: Path) -> None:
    path, options = with_files(tmp_path), CompileOptions(cache=cache)
    plain = onnxc.compile(path, cache=cache)
    assert isinstance(plain, CpuModel) and plain.entry
    given = {"x": floats(2, 64)}
    program = TappedProgram(path, options, plain=plain)
    _, shown = program.run(given, ["h"])
    stored = cache.get(program._place(["h"]))
    assert stored is not None and WEIGHTS not in open_package(stored).names
    assert np.shares_memory(program._stored(["h"]).weights, plain.weights)  # type: ignore[union-attr]

    class Other(CpuModel):
        """A model of the same key whose program is another one."""

        source = "// not the same"

    plain.__class__ = Other
    other = TappedProgram(path, options, plain=plain)
    assert other._stored(["h"]) is None
    assert np.array_equal(other.run(given, ["h"])[1]["h"], shown["h"])


def test_damage_in_the_cache_is_made_again(cache: Cache) -> None:
    model, options = parse(OPEN), CompileOptions(cache=cache)
    plain = onnxc.compile(model, cache=cache)
    x = floats(2, 16)
    program = TappedProgram(model, options, plain=plain)
    _, shown = program.run({"x": x}, ["a"])
    cache.path(program._place(["a"])).write_bytes(b"damaged")
    cache.put(tapped.digest("taps", plain.entry), b"{not json")
    _, again = TappedProgram(model, options, plain=plain).run({"x": x}, ["a"])
    assert np.array_equal(shown["a"], again["a"])


def test_a_store_knows_its_block() -> None:
    store = WeightStore()
    store.add("a", np.arange(100, dtype=np.float32))
    at = store.add("b", np.full((3, 3), 7, np.int8))
    block = np.zeros(store.nbytes, np.uint8)
    store.fill(block)
    told: list[int] = []
    assert store.matches(block, told.append) and told == [400, 9]
    assert not store.matches(block[:-1])
    block[at] = 8
    assert not store.matches(block)


def test_a_compile_lets_go_of_what_it_has_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[Any] = []
    forget = mapped.forget

    def spy(arrays: Any) -> None:
        found = list(arrays)
        forgotten.extend(a for a in found if mapped._mapping(a) is not None)
        forget(found)

    monkeypatch.setattr(mapped, "STEP", 1)
    monkeypatch.setattr(mapped, "forget", spy)
    path, x = with_files(tmp_path), floats(2, 64)
    y = onnxc.compile(path, cache=False)(x)["y"]
    assert any(a.nbytes == 64 * 64 * 4 for a in forgotten)
    np.testing.assert_allclose(y, ReferenceEvaluator(str(path)).run(None, {"x": x})[0], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, BLOCK), (3, BLOCK + 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_block_by_block_is_as_at_once(shape: tuple[int, ...], dtype: type) -> None:
    b = np.asarray(floats(*shape), dtype)
    a = np.asarray(b * np.float64(1.001) + 1e-4 * floats(*shape, seed=1), dtype)
    found, whole = metrics.measure(a, b, logits=True), metrics._any_metrics(a, b, True)
    for name, value in vars(whole).items():
        mine = getattr(found, name)
        if isinstance(value, (float, dict)):
            assert mine == pytest.approx(value, rel=1e-9), name
        else:
            assert mine == value, name


def test_what_is_not_finite_is_found_in_any_block() -> None:
    a = np.ones(2 * BLOCK + 5, np.float32)
    b = a.copy()
    assert largest_gap(a, b) == 0 and largest_gap(a[:0], b[:0]) == 0
    b[-1] = 3
    assert largest_gap(a, b) == 2 and metrics.measure(a, b).worst == (2 * BLOCK + 4,)
    a[-1] = np.inf
    assert largest_gap(a, b) == math.inf and metrics.measure(a, b).mismatches == 1
    a[BLOCK] = np.nan
    found = metrics.measure(a, b)
    assert math.isnan(largest_gap(a, b)) and found.ours.first == (BLOCK,) and found.mismatches == 2


def test_halves_have_no_transforms_of_images() -> None:
    """Winograd's transforms cost digits of float32: a unit of halves is as large as a fault."""
    whole, half = (layer_bound(["Conv"], np.ones(4), None, 2.0**-bits) for bits in (23, 10))
    assert whole == 256 * 2.0**-23 and half == 4 * 2.0**-10


# ---------------------------------------------------------------- names


NAMES = [
    ["</script><script>alert(1)</script>", "[bold]w[/bold]", "../../etc/a", "a;`id` $HOME", "\"b' \\", "y\n\x1b[31m"],
    ["file", "allow_pickle", "a/b", "a_b", "a:b", "a b"],  # those with a slash and such are the same as file names
    ["x.npy", "x", "/abs/path", "..", "__proto__", "\u202ey"],
]


def named(names: list[str], axis: int) -> onnx.ModelProto:
    x, w, a, b, c, y = names
    nodes = [
        helper.make_node("Tanh", [x], [a], name=a),
        helper.make_node("MatMul", [a, w], [b], name=b),
        helper.make_node("Softmax", [b], [c], name=f"[/red]{c}", axis=axis),
        helper.make_node("Add", [c, a], [y], name=y),
    ]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [4, 4]) for n in (x, w, y)]
    graph = helper.make_graph(nodes, "</script>[bold]g", infos[:2], infos[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("names", NAMES, ids=["markup", "files", "paths"])
def test_names_are_shown_and_not_obeyed(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, axis in (("wrong.onnx", 0), ("right.onnx", 1)):
        onnx.save(named(names, axis), file)
    options = ["--bisect", "nodes", "--output", "out", "--html", "page.html"]
    found = CliRunner().invoke(app, ["compare", "wrong.onnx", "--reference", "right.onnx", *options])
    assert found.exit_code == 1 and "\x1b" not in found.output, found.output
    assert "<script>alert" not in (tmp_path / "page.html").read_text()
    command = next(line for line in found.output.splitlines() if line.strip().startswith("onnxc compare"))
    again = CliRunner().invoke(app, shlex.split(command)[1:])
    assert again.exit_code == 1, again.output
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {
        "wrong.onnx", "right.onnx", "page.html", "out/model.onnx", "out/reference.onnx", "out/inputs.npz",
    }  # fmt: skip


def test_arrays_of_any_name_come_back(tmp_path: Path) -> None:
    arrays = {name: np.full(2, k, np.float32) for k, name in enumerate(n for names in NAMES for n in names)}
    write_arrays(tmp_path / "a.npz", arrays)
    back = read_inputs(tmp_path / "a.npz", list(arrays))
    assert all(np.array_equal(back[n], a) for n, a in arrays.items())


def test_a_terminal_is_not_told_what_to_do() -> None:
    from rich.text import Text

    assert as_text(Text("a\x1b[31m\u202e\x9b1m\nb")) == "a\\x1b[31m\\u202e\\x9b1m\nb"


# ---------------------------------------------------------------- options


def test_options_that_there_are_not() -> None:
    model = parse(OPEN)
    with pytest.raises(InputError, match="'acuracy'"):
        compare(model, acuracy="strict")
    with pytest.raises(InputError, match="none was given"):
        compare(model, dims={"n": 2}, reference="")
    assert compare(model, dims={"n": 2}, memory_limit=1 << 30, reference="float64")


def test_numbers_that_an_epilogue_only_reads_are_not_stored_there() -> None:
    """The epilogue of a convolution stores vectors: a scalar has no room for one."""
    text = """(float[N, 4, 8, 8] x, int8[16, 4, 3, 3] w) => (float[N, 16, 6, 6] y) {
      s = Constant<value = float {0.01}>() q, a, z = DynamicQuantizeLinear(x)
      c = ConvInteger(q, w, z) f = Cast<to=1>(c) m = Mul(a, s) y = Mul(f, m) }"""
    model, r = parse(text, 18), np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(r.integers(-99, 99, (16, 4, 3, 3), np.int8), "w"))
    del model.graph.input[1:]
    found = compare(model, {"x": r.standard_normal((2, 4, 8, 8), np.float32)}, layers=True)
    assert found.agree and not found.faults and "f" in {t.name for t in found.layers}
    assert "m" not in {t.name for t in found.layers if t.tap == "inside"}


def test_what_a_routine_writes_into_an_output_of_another_shape_is_shown() -> None:
    text = """(float[N, 6] x) => (float[M] y) {
      k = Constant<value_ints = [-1]>() axis = Constant<value = int64 {1}>() s = CumSum(x, axis) y = Reshape(s, k) }"""
    model, x = parse(text), floats(3, 6)
    found = compare(model, {"x": x}, layers=True)
    assert found.agree and "s" in {t.name for t in found.layers if t.tap == "stored"}
    (y,), shown = TappedProgram(model, CompileOptions()).run({"x": x}, ["s"])
    assert shown["s"].shape == (3, 6) and np.array_equal(shown["s"].ravel(), y)


def test_numbers_that_another_kernel_computes_anew_are_no_fault() -> None:
    """What a Max reads is stored by one kernel, and computed by another one, whose products and sums are fused."""
    model = parse(
        """(float[256] x, float[256] z) => (float[1] m, float[1] n) {
        p = Mul(x, z) h = Add(p, x) m = ReduceMax(h) n = ReduceMin(h) }""",
        17,
    )
    found = compare(model, {"x": floats(256, seed=2), "z": floats(256, seed=9)}, layers=True)
    assert found.agree and not found.faults, str(found)


def test_a_converted_model_may_round_anywhere() -> None:
    """A sigmoid in float32 reads accumulators of a product that is shown in halves; inputs and weights are halves."""
    model = parse(
        """(float[4, 32] x, float[32, 8] w) => (float[4, 8] y) {
        h = MatMul(x, w) s = Sigmoid(h) c = Constant<value_float=0.3>() y = Mul(s, c) }""",
        20,
    )
    given = {"x": floats(4, 32), "w": floats(32, 8, seed=1)}
    found = compare(model, given, layers=True, dtype="float16", rtol=1e-2, atol=1e-2)
    assert found.agree and not found.faults and len(found.layers) == 3, str(found)


def test_external_data_of_constants_and_subgraphs(tmp_path: Path) -> None:
    """Layers are evaluated in memory, where no folder is known."""
    (tmp_path / "w.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    model = parse(
        """(float[4] x) => (float[4] y) {
        k = Constant<value = float[4] {1, 1, 1, 1}>() h = Mul(x, k) s = ReduceSum<keepdims=0>(h) c = Cast<to=9>(s)
        y = If(c) <then_branch = t () => (float[4] p) <float[4] w = {1, 1, 1, 1}> { p = Add(h, w) },
                   else_branch = e () => (float[4] q) { q = Neg(h) }> }""",
        20,
    )
    held = [model.graph.node[0].attribute[0].t, model.graph.node[4].attribute[0].g.initializer[0]]
    for tensor, offset in zip(held, (0, 16), strict=True):
        tensor.Clear()
        tensor.name, tensor.data_type, tensor.data_location = "w", 1, onnx.TensorProto.EXTERNAL
        tensor.dims.append(4)
        for key, value in (("location", "w.bin"), ("offset", str(offset))):
            tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    found = compare(str(tmp_path / "m.onnx"), {"x": floats(4)}, layers=True)
    assert found.agree and not found.faults and len(found.layers) == 4, str(found)
