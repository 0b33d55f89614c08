"""Sides, samples, streams, bisections and helpers of the comparison."""

from __future__ import annotations

import json
import math
import re
import wave
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError, OnnxcError
from onnxc.frontends import onnx_file
from onnxc.reports.terminal import as_text
from onnxc.testing import assert_arrays_close, assert_close
from onnxc.tools.compare import compare
from onnxc.tools.compare.bounds import parse_tolerances
from onnxc.tools.compare.layers import CHUNK, matched_names
from onnxc.tools.compare.metrics import measure, top_agreement
from onnxc.tools.compare.pieces import SourceModel
from onnxc.tools.compare.sides import Side
from onnxc.tools.compare.tapped import TappedProgram
from onnxc.tools.compare.training import compare_gradients, compare_training
from onnxc.tools.compare.verdict import Verdict
from onnxc.tools.data import samples_of
from tests.small_models import floats, parse

MODEL = parse("""(float[4, 8] x, float[8, 8] w) => (float[4, 8] y) {
  a = Tanh(x) b = MatMul(a, w) c = Relu(b) d = Softmax<axis=-1>(c) y = Add(d, a) }""", 20)  # fmt: skip
GIVEN = {"x": floats(4, 8), "w": floats(8, 8)}
TYPES = "float16", "float"


@pytest.mark.parametrize(
    "reference", ["onnxruntime", "onnxruntime:basic", "onnxruntime:all", "onnx", "float64", "onnxc"]
)
@pytest.mark.parametrize("ours", ["onnxc", "onnxruntime"])
def test_any_two_sides(ours: str, reference: str) -> None:
    found = compare(MODEL, GIVEN, ours=ours, reference=reference, layers=True)
    assert found.agree and not found.faults, str(found)
    assert found.sides == (ours, reference)
    whole = "onnxruntime:all" not in found.sides and ours != "onnxc" and reference != "onnxc"
    assert {t.name for t in found.layers} >= ({"a", "b", "c", "d", "y"} if whole else {"y"})
    json.dumps(found.to_dict())
    assert "tensors inside" in str(found)


def test_a_reference_that_runs_node_by_node_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are then those of the layers; with several samples, or with another engine, it runs whole."""
    before = compare(MODEL, GIVEN)
    run, runs = Side.run, list[str]()
    monkeypatch.setattr(Side, "run", lambda self, given: runs.append(self.name) or run(self, given))
    once = compare(MODEL, GIVEN, layers=True)
    assert not runs and once.outputs == before.outputs and len(once.layers) == 5
    assert compare(MODEL, [GIVEN, GIVEN], layers=True).layers and runs == ["onnxruntime"] * 2


def test_what_is_documented_for_programs() -> None:
    """Keys may be added, and none go."""
    text = (Path(__file__).parent.parent / "docs" / "compare.md").read_text()
    text = text[text.index("## For programs") :].split("\n## ")[0]
    named = re.findall(r"`(\w+)`", text)
    data = compare(MODEL, GIVEN, layers=True).to_dict()
    known = {*data, *data["outputs"][0], *data["layers"][0]}
    assert known == set(named)


def test_narrow_tables_have_fewer_columns_and_whole_numbers() -> None:
    found = compare(MODEL, GIVEN, reference="float64", layers=True)
    for width in (50, 60, 80, 100, 160):
        text = as_text(found, width)
        tables = [line for line in text.splitlines() if "e-0" in line and "rtol" not in line]
        assert all(len(line) <= width for line in tables)
        assert len(tables) == 1 + sum(t.introduced is not None for t in found.layers), text
        assert ("inherited" in text) == (width >= 70) and ("type" in text) == (width >= 80)


def test_saved_outputs(tmp_path: Path) -> None:
    (right,) = onnxc.compile(MODEL)(**GIVEN).values()
    np.savez(tmp_path / "saved.npz", y=right)
    assert compare(MODEL, GIVEN, reference=str(tmp_path / "saved.npz")).verdict is Verdict.EQUAL
    (tmp_path / "output_0.pb").write_bytes(numpy_helper.from_array(right * np.float32(1.1)).SerializeToString())
    found = compare(MODEL, GIVEN, reference=tmp_path)
    assert not found.agree and found.verdict is Verdict.THEIRS_WORSE
    assert compare(MODEL, GIVEN, reference={"y": right})
    with pytest.raises(InputError, match="lacks the outputs 'y'"):
        compare(MODEL, GIVEN, reference={"z": right})


def test_a_second_file_by_name_and_by_position(tmp_path: Path) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(MODEL)
    for node in other.graph.node:
        node.input[:] = [f"{n}_2" if n in "abcd" else n for n in node.input]
        node.output[:] = [f"{n}_2" if n in "abcd" else n for n in node.output]
    onnx.save(MODEL, tmp_path / "a.onnx")
    onnx.save(other, tmp_path / "b.onnx")
    names = matched_names(SourceModel(MODEL), SourceModel(other))
    assert names == {"a": "a_2", "b": "b_2", "c": "c_2", "d": "d_2", "y": "y"}
    found = compare(tmp_path / "b.onnx", GIVEN, reference=str(tmp_path / "a.onnx@onnx"), layers=True)
    assert found.agree and [t.ours_name for t in found.layers] == ["a_2", "b_2", "c_2", "d_2", ""]


def test_two_files_that_differ_are_told_of_the_referee(tmp_path: Path) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(MODEL)
    other.graph.node[0].op_type = "Sin"
    onnx.save(MODEL, tmp_path / "a file.onnx")
    onnx.save(other, tmp_path / "b.onnx")
    a, b = tmp_path / "a file.onnx", tmp_path / "b.onnx"
    found = compare(b, GIVEN, reference=str(a))
    assert f"note: which is nearer to the truth? --reference '{a}@float64' says" in " ".join(str(found).split())
    assert not compare(b, GIVEN, reference=f"{a}@float64").notes  # asked already
    assert not compare(a, GIVEN, reference=str(a)).notes
    assert not compare(MODEL, GIVEN, compiled=lambda *arrays: {"y": GIVEN["x"]}).notes  # float64 has judged them


def test_a_torch_module() -> None:
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, w: Any) -> Any:
            a = x.tanh()
            return (a @ w).relu().softmax(-1) + a

    assert compare(MODEL, GIVEN, reference=Module())


def test_taps_leave_the_plan_as_it_is() -> None:
    program = TappedProgram(MODEL, CompileOptions())
    before = [[n.op for n in g.nodes] for g in program.plans.plan.groups]
    plan, taps = program.plans.planned()
    assert [[n.op for n in g.nodes] for g in plan.groups] == before
    assert {t.value.name: t.how for t in taps}.keys() >= {"a", "b", "c"}
    (plain,) = onnxc.compile(MODEL)(**GIVEN).values()
    (own,), shown = program.run(GIVEN, ["b", "c"])
    assert np.array_equal(plain, own) and np.array_equal(np.maximum(shown["b"], 0), shown["c"])


def test_taps_of_images_come_row_major() -> None:
    model = parse("""(float[1, 3, 8, 8] x, float[4, 3, 3, 3] w, float[5, 4, 1, 1] v) => (float[1, 5, 8, 8] y) {
      a = Conv<pads=[1, 1, 1, 1]>(x, w) b = Relu(a) c = Conv(b, v) y = Sigmoid(c) }""", 20)  # fmt: skip
    given = {"x": floats(1, 3, 8, 8), "w": floats(4, 3, 3, 3), "v": floats(5, 4, 1, 1)}
    found = compare(model, given, layers=True)
    assert not found.faults and {t.name for t in found.layers} >= {"a", "b"}, str(found)


def test_error_is_introduced_once_and_inherited_after() -> None:
    wrong = parse("""(float[4, 8] x, float[8, 8] w) => (float[4, 8] y) {
      a = Tanh(x) b = MatMul(a, w) k = Constant<value_float=0.99>() c0 = Relu(b) c = Mul(c0, k)
      d = Softmax<axis=-1>(c) y = Add(d, a) }""", 20)  # fmt: skip
    found = compare(wrong, GIVEN, reference=MODEL, layers=True)
    by_name = {t.name: t for t in found.layers}
    c, d = by_name["c"], by_name["d"]
    assert found.culprit is c and c.introduced is not None and c.introduced == pytest.approx(0.01, rel=1e-3)
    assert d.introduced is not None and d.inherited is not None and d.introduced < 1e-6 < d.inherited
    first = found.first_divergence
    assert first is not None and first.name == "c"


def test_the_first_nan() -> None:
    model = parse("(float[4] x) => (float[4] y) { a = Neg(x) b = Log(a) c = Exp(b) y = Add(c, x) }")
    found = compare(model, [np.array([-1.0, -2.0, 3.0, 0.0], np.float32)], layers=True)
    assert found.agree and found.first_nonfinite is not None
    side, tensor = found.first_nonfinite
    assert side == "both" and tensor.name == "b" and tensor.metrics is not None
    assert tensor.metrics.theirs.first == (2,) and tensor.metrics.theirs.nan == 1 and tensor.metrics.theirs.neginf == 1


def test_a_loader_and_the_worst_sample() -> None:
    def loader() -> Any:
        for k in range(4):
            yield {"x": floats(4, 8, seed=k), "w": floats(8, 8, seed=k)}

    assert compare(MODEL, loader()).samples == 4
    found = compare(MODEL, loader(), keep_worst=True)
    assert found.samples == 4 and len(found.outputs) == 1
    assert compare(MODEL, samples=3, seed=7).seed == 7


def test_metrics() -> None:
    b = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    a = np.nextafter(b, np.float32(np.inf))
    found = measure(a, b)
    assert found.ulp_max == 1 and found.ulp_histogram == {"1": 4} and found.cosine == pytest.approx(1)
    assert found.snr_db is not None and found.snr_db > 130
    assert measure(b, b).snr_db is None and measure(b, b).ulp_histogram == {"0": 4}
    spoiled = a.copy()
    spoiled[1] = np.nan
    assert measure(spoiled, b).mismatches == 1 and measure(spoiled, b).ours.first == (1,)
    assert measure(np.array([1, 2]), np.array([1, 5])).max_abs == 3
    logits = np.eye(8)
    assert top_agreement(logits, logits) == (1.0, 1.0) and top_agreement(logits, logits[::-1])[0] == 0


def test_tolerances_of_the_user() -> None:
    wrong = parse("""(float[4, 8] x, float[8, 8] w) => (float[4, 8] y) {
      a = Tanh(x) b0 = MatMul(a, w) k = Constant<value_float=1.00003>() b = Mul(b0, k) c = Relu(b)
      d = Softmax<axis=-1>(c) y = Add(d, a) }""", 20)  # fmt: skip
    assert compare(wrong, GIVEN, reference=MODEL, layers=True).faults
    assert not compare(wrong, GIVEN, reference=MODEL, layers=True, tolerances={"MatMul": 1e-4}).faults
    with pytest.raises(InputError, match="a tolerance is given as"):
        parse_tolerances(["MatMul"])


# ---------------------------------------------------------------- samples from files


def graph_of(text: str) -> Any:
    return onnx_file.load(parse(text))


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((10, 20, 3), (255, 0, 51), np.uint8)).save(tmp_path / "a.png")
    graph = graph_of("(float[1, 3, 8, 8] x) => (float[1, 3, 8, 8] y) { y = Relu(x) }")
    (found,) = samples_of(tmp_path / "a.png", graph)
    assert found["x"].shape == (1, 3, 8, 8) and np.allclose(found["x"][0, :, 4, 4], (1, 0, 0.2))
    last = graph_of("(uint8[h, w, 3] x) => (uint8[h, w, 3] y) { y = Identity(x) }")
    (found,) = samples_of(tmp_path, last)
    assert found["x"].shape == (10, 20, 3) and found["x"].dtype == np.uint8
    (tmp_path / "b.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match="not an image"):
        list(samples_of(tmp_path / "b.png", graph))
    with pytest.raises(InputError, match="does not fit"):
        list(samples_of(tmp_path / "a.png", graph_of("(float[3] x) => (float[3] y) { y = Relu(x) }")))


def test_sounds(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((2, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.array([[16384, 0], [-32768, -32768]], "<i2").tobytes())
    (found,) = samples_of(tmp_path, graph_of("(float[1, n] x) => (float[1, n] y) { y = Relu(x) }"))
    assert found["x"].tolist() == [[0.25, -1.0]]
    (found,) = samples_of(tmp_path, graph_of("(float[4] x) => (float[4] y) { y = Relu(x) }"))
    assert found["x"].tolist() == [0.25, -1.0, 0, 0]


def test_test_data_and_python(tmp_path: Path) -> None:
    graph = graph_of("(float[2] x) => (float[2] y) { y = Relu(x) }")
    for k in range(2):
        (tmp_path / f"test_data_set_{k}").mkdir()
        tensor = numpy_helper.from_array(np.full(2, k, np.float32))
        (tmp_path / f"test_data_set_{k}" / "input_0.pb").write_bytes(tensor.SerializeToString())
    assert [s["x"].tolist() for s in samples_of(tmp_path, graph)] == [[0, 0], [1, 1]]
    loader = tmp_path / "loader.py"
    loader.write_text(
        "import numpy as np\ndef load():\n    for k in range(3):\n        yield {'x': np.full(2, k, 'f')}\n"
    )
    assert len(list(samples_of(f"{loader}:load", graph))) == 3
    for place, message in ((f"{loader}:nothing", "no function"), (tmp_path / "missing", "no file")):
        with pytest.raises(InputError, match=message):
            list(samples_of(place, graph))


# ---------------------------------------------------------------- bisections, helpers, training


def test_precision_is_bisected() -> None:
    found = compare(MODEL, GIVEN, dtype="bfloat16", bisect="precision", rtol=1e-5, atol=1e-6)
    assert not found.agree and found.reduction is not None
    assert found.reduction.culprit == "dtype=bfloat16" and "bfloat16" in str(found)


def test_assert_close() -> None:
    assert assert_close(MODEL, GIVEN).agree
    with pytest.raises(AssertionError, match="DIFFERS"):
        assert_close(MODEL, GIVEN, reference={"y": np.zeros((4, 8), np.float32)})
    assert_arrays_close({"y": GIVEN["x"]}, {"y": GIVEN["x"] * np.float32(1.0001)})
    with pytest.raises(AssertionError, match=r"array 0 differs: 1 of 32 elements"):
        spoiled = GIVEN["x"].copy()
        spoiled[0, 0] += 1
        assert_arrays_close([spoiled], [GIVEN["x"]])
    with pytest.raises(AssertionError, match="not equal"):
        assert_arrays_close([np.arange(3)], [np.array([0, 1, 3])])


LOSS = parse("""(float[4, 3] x, float[4, 2] t) => (float[] loss) <float[3, 2] w = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6}> {
  h = MatMul(x, w) a = Tanh(h) e = Sub(a, t) s = Mul(e, e) loss = ReduceMean<keepdims=0>(s) }""", 18)  # fmt: skip


def test_gradients_and_training_steps() -> None:
    given = {"x": floats(4, 3), "t": floats(4, 2)}
    found = compare_gradients(LOSS, given, layers=True)
    assert found.agree and not found.faults and {o.name for o in found.outputs} == {"loss", "w_grad"}
    steps = compare_training(LOSS, [given] * 3, optimizer=onnxc.optim.AdamW(lr=1e-2))
    assert steps.agree and steps.samples == 3, str(steps)
    assert {o.name for o in steps.outputs} >= {"loss", "parameter/w"}


def test_gradients_beside_pytorch() -> None:
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.from_numpy(numpy_helper.to_array(LOSS.graph.initializer[0]).copy()))

        def forward(self, x: Any, t: Any) -> Any:
            return (((x @ self.w).tanh() - t) ** 2).mean()

    given = {"x": floats(4, 3), "t": floats(4, 2)}
    assert compare_gradients(LOSS, given, reference=Module())
    with pytest.raises(InputError, match="no parameter 'v'"):
        compare_gradients(LOSS, given, reference=Module(), parameters={"w": "v"})


def test_halves_beside_floats() -> None:
    """Two files, one of which takes halves: each is given its own type, and both the same values."""
    half, whole = (parse(f"({t}[4, 8] x) => ({t}[4, 8] y) {{ h = Mul(x, x) y = Tanh(h) }}", 20) for t in TYPES)
    for a, b in ((half, whole), (whole, half)):
        for given in (None, {"x": floats(4, 8)}):
            found = compare(a, given, reference=b, layers=True, tolerances={"float32": 2e-3}, rtol=1e-2)
            assert found.agree and len(found.layers) == 2 and not found.faults, str(found)


def test_halves_that_are_computed_in_floats() -> None:
    """What the compiler keeps in float32 of a model of halves has weights of halves all the same."""
    half, whole = (
        parse(f"({t}[4, 64] x) => ({t}[4, 64] y) {{ a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) y = Sub(c, x) }}", 20)
        for t in TYPES
    )
    for model, dtype in ((half, np.float16), (whole, np.float32)):
        model.graph.initializer.append(numpy_helper.from_array((floats(64, 64) / 8).astype(dtype), "w"))
    found = compare(half, ours="onnxc", reference=whole, layers=True, rtol=1e-2, atol=1e-2)
    assert found.agree and not found.faults and len(found.layers) == 4, str(found)


def test_tensors_that_numpy_has_no_type_for() -> None:
    """bfloat16 inside of a model, and as its input, in onnxruntime."""
    model = parse("""(float[4, 8] x, bfloat16[4, 8] z) => (float[4, 8] y, bfloat16[4, 8] w) {
      a = Tanh(x) w = Cast<to=16>(a) b = Cast<to=1>(w) c = Cast<to=1>(z) y = Add(b, c) }""", 20)  # fmt: skip
    found = compare(model, layers=True)
    assert found.agree and not found.faults and len(found.layers) == 5, str(found)


def test_random_inputs_of_rank_0() -> None:
    model = parse("""(bool c, float[3] x) => (float[3] y) {
      y = If (c) <then_branch = t () => (float[3] a) { a = Neg(x) }, else_branch = e () => (float[3] b) { b = Exp(x) }>
    }""", 20)  # fmt: skip
    assert compare(model, layers=True).agree


def test_an_index_of_rank_0_in_another_piece() -> None:
    """A constant that is made in one chunk of nodes, and read in the next, keeps its rank."""
    nodes = " ".join(f"a{k + 1} = Tanh(a{k})" for k in range(CHUNK))
    model = parse(f"(float[2, 3] a0) => (float[3] y) {{ i = Constant<value = int64 {{1}}>() {nodes} "
                  f"y = Gather<axis=0>(a{CHUNK}, i) }}", 20)  # fmt: skip
    assert not compare(model, layers=True).faults


def test_the_compiler_is_not_blamed_for_another_file() -> None:
    other = onnx.ModelProto()
    other.CopyFrom(MODEL)
    other.graph.node[2].op_type = "Neg"
    for kind in ("passes", "precision"):
        found = compare(MODEL, GIVEN, ours="onnxc", reference=other, bisect=kind).reduction
        assert found is not None and not found.culprit and "the compiler does not do it" in found.steps[-1]


def test_saved_bytes_are_those_of_the_model_s_type(tmp_path: Path) -> None:
    """numpy stores the bytes of bfloat16 and forgets what they are; files of other machines have another order."""
    model = parse("(float[4] x) => (bfloat16[4] y, int64[4] k) { a = Neg(x) y = Cast<to=16>(a) k = Cast<to=7>(x) }", 20)
    x = floats(4)
    saved = {"y": (-x).astype(ml_dtypes.bfloat16), "k": x.astype(">i8")}
    np.savez(tmp_path / "saved.npz", **saved, a=-x)
    for place in (str(tmp_path / "saved.npz"), saved):
        found = compare(model, {"x": x}, reference=place, layers=True)
        assert found.agree and all(o.metrics is not None and not o.metrics.max_abs for o in found.outputs), str(found)
    np.savez(tmp_path / "saved.npz", y=saved["y"][::-1].copy(), k=saved["k"], a=np.zeros(4, "V3"))
    found = compare(model, {"x": x}, reference=str(tmp_path / "saved.npz"), layers=True)
    assert not found.agree and found.outputs[1].agrees and [t.name for t in found.layers] == ["y", "k"]
    with pytest.raises(InputError, match="has to be an engine"):
        compare(model, {"x": x}, ours=str(tmp_path / "saved.npz"), bisect="nodes")


@pytest.mark.parametrize("wrong", [{"tolerances": {"float32": math.nan}}, {"compiled": lambda *given: {}}])
def test_arguments_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        compare(parse("(float[n, 2] x) => (float[n, 2] y) { y = Neg(x) }", 20), **wrong)


def test_a_reference_that_draws_numbers() -> None:
    model = parse("(float[3] x) => (float[3] y) { r = RandomNormalLike(x) y = Add(x, r) }", 20)
    with pytest.raises(InputError, match="random operators"):
        compare(model, ours="onnxruntime", reference="onnxc", layers=True)


def test_sides_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"no file 'missing\.onnx'"):
        compare(MODEL, GIVEN, reference="missing.onnx")
    with pytest.raises(InputError, match="optimization level"):
        compare(MODEL, GIVEN, reference="onnxruntime:best")
    with pytest.raises(InputError, match="a bisection is over"):
        compare(MODEL, GIVEN, reference={"y": np.zeros((4, 8), np.float32)}, bisect="luck")
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, w: Any) -> Any:
            return x

    with pytest.raises(OnnxcError, match="outputs alone"):
        compare(MODEL, GIVEN, reference=Module(), layers=True)


def test_halves_that_ours_holds_as_floats_condemn_nothing() -> None:
    """Angles up to 2000, rounded to halves by onnxruntime alone: float64 sides with ours, and the cosine's layer, which
    is judged for angles that are rounded, does not overrule it.
    """
    model = parse("""(float16[n] x, float16 f) => (float[n] y) {
        a = Mul(x, f)  b = Concat<axis = 0>(a, a)  c = Cos(b)  y = Cast<to = 1>(c) }""")
    given = {"x": np.linspace(900, 1400, 64).astype(np.float16), "f": np.float16(1.5)}
    found = compare(model, given, layers=True)
    assert found.agree and found.outputs[0].verdict is Verdict.THEIRS_WORSE and not found.faults, str(found)
