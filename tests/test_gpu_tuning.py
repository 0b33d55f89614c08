"""Measured choices of GPU kernels: records, what decides, the tuner on a driver in memory, and every candidate."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import onnxc
from onnxc import autotune, gpu
from onnxc.autotune import agree
from onnxc.choices import Choice, Decisions
from onnxc.cli import app
from onnxc.codegen.triton.cubin import Image, KernelError, compile_each
from onnxc.codegen.triton.program import Function, Program
from onnxc.errors import CudaError, InputError, LimitError
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda.driver import Driver
from onnxc.tuned import FILE, Record, Row, fastest, gpu_place, gpu_places, joined
from tests.fake_cuda import CUresult, Failed, FakeDriver, cubin
from tests.small_models import parse
from tests.targets import needs_triton
from tests.triton_simulator import Request, Simulator, program_of

Array = np.ndarray[Any, Any]
pytestmark = needs_triton
N = 8192
DOUBLED = f"(float[{N}] x) => (float[{N}] y) {{ y = Add(x, x) }}"
TRITON = gpu._triton_version()
FAKE = gpu_place("Fake GPU", 90, TRITON)


# ---------------------------------------------------------------- the record


def test_a_record_comes_back(tmp_path: Path) -> None:
    record = Record(tmp_path / "r.json")
    row = Row("b", {"a": 2e-6, "b": 1e-6}, ("c",))
    record.add(FAKE, {"matmul": row})
    record.add("cpu", {"conv": Row("x")})
    again = Record(tmp_path / "r.json", asked=True)
    assert again.rows(FAKE) == {"matmul": row} and again.best("cpu") == {"conv": "x"}
    assert row.lacks(["a", "b", "c", "d"]) == ["d"]
    assert gpu_places(again, 90, TRITON) == [FAKE] and not gpu_places(again, 80, TRITON)
    text = json.loads((tmp_path / "r.json").read_text())
    assert text["version"] == 1 and text[FAKE]["matmul"]["microseconds"] == {"a": 2.0, "b": 1.0}


def test_two_writers_keep_each_others_rows(tmp_path: Path) -> None:
    one, other = (Record(tmp_path / "r.json") for _ in range(2))
    one.add(FAKE, {"a": Row("x")})
    other.add(FAKE, {"b": Row("y")})
    assert Record(tmp_path / "r.json").best(FAKE) == {"a": "x", "b": "y"}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


HOSTILE = {
    "not JSON": "{",
    "not UTF-8": b"\xff\xfe{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "a later version": '{"version": 2}',
    "an odd version": '{"version": {"a": 1}}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_where_asked_for_and_else_ignored(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert Record(path).places() == []
    with pytest.raises(InputError, match="no record of measurements"):
        Record(path, asked=True)
    with pytest.raises(InputError, match="no record of measurements"):
        onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False, record=path)


def test_hostile_rows_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rows: dict[str, Any] = {
        "a": 1, "b": {"best": 3}, "c": {"best": "x", "microseconds": [1], "refused": "x"},
        "d": {"best": "y", "microseconds": {"p": "1", "q": True, "r": -1, "s": 1e999, "t": 4}, "refused": [1, "u"]},
    }  # fmt: skip
    rows["e"] = {"best": "z", "microseconds": {"v": 10**400, "w": float("nan")}}
    path.write_text(json.dumps({"version": 1, FAKE: rows, "z": 3, "\x1b[31m": rows, "y" * 1000: rows}))
    found = Record(path, asked=True)
    assert found.rows(FAKE) == {
        "c": Row("x"),
        "d": Row("y", {"t": 4e-6}, ("u",)),
        "e": Row("z"),
    } and found.places() == [FAKE]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["best", "microseconds", "refused", "a"]), inner),
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from(["version", FAKE, "place"]), st.dictionaries(st.text(), _JSON) | _JSON))
def test_any_content_is_read_and_written_or_refused(content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.json"
        path.write_text(json.dumps(content))
        record = Record(path)
        before = record.best(FAKE)
        record.add(FAKE, {"x": Row("y", {"y": 1e-6})})
        assert Record(path, asked=True).best(FAKE) == {**before, "x": "y"}


def test_a_folder_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no record"):
        Record(tmp_path, asked=True)


def test_the_best_must_be_better() -> None:
    assert fastest({"a": 1.0, "b": 0.99}, "a") == "a" and fastest({"a": 1.0, "b": 0.9}, "a") == "b"
    assert fastest({}, "a") == "a"
    row = joined(Row("b", {"a": 1.0, "b": 0.5}, ("d",)), {"a": 1.0, "c": 0.4}, ["b"], "a", "abcd")
    assert row == Row("c", {"a": 1.0, "c": 0.4}, ("b", "d"))


# ---------------------------------------------------------------- what decides


def choices(model: onnxc.CompiledModel) -> list[Choice]:
    return [k.choice for k in model.explain().kernels if k.choice is not None]


def test_a_record_decides_for_its_architecture_and_explain_says_why(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    plain = onnxc.compile(parse(DOUBLED), target="cuda:sm_80,sm_90", cache=False)
    (choice,) = choices(plain)
    assert choice.chosen == choice.candidates[0] and "no record" in choice.why
    other = choice.candidates[1]
    Record(path).add(gpu_place("NVIDIA Z", 90, TRITON), {choice.subject: Row(other)})
    model = onnxc.compile(parse(DOUBLED), target="cuda:sm_80,sm_90", cache=False, record=path)
    (told,) = choices(model)
    assert told.chosen == choice.chosen and f"nothing for sm_80 with Triton {TRITON}" in told.why
    assert f"sm_90: {other} (measured on NVIDIA Z, sm_90, Triton {TRITON})" in told.why
    assert set(model.manifest["cuda"]["own_steps"]) == {"sm_90a"} and model.source.count("def k") == 2
    assert told.why in str(model.explain()).replace("\n", " ")
    alone = onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False, record=path)
    assert choices(alone)[0].chosen == other and "own_steps" not in alone.manifest["cuda"]
    off = onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False, record=path, tuned=False)
    assert choices(off)[0].chosen == choice.chosen


def test_names_that_are_no_candidates_decide_nothing(tmp_path: Path) -> None:
    subject = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False))[0].subject
    hostile = "points=1'); import os #"
    model = onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False, tuned={subject: hostile})
    (choice,) = choices(model)
    assert choice.chosen == choice.candidates[0] and "no candidate any more" in choice.why
    assert hostile not in model.source


def test_decisions() -> None:
    names = ["a", "b", "c"]
    found = Decisions({"s": "b"}, "here", "unknown")
    assert found.choose("s", names) == Choice("s", "b", ("a", "b", "c"), "measured on here")
    assert found.choose("t", names).why == "cost model: unknown"
    refused = Decisions({"s": "b"}, refused=frozenset({("s", "b"), ("t", "a")}))
    assert refused.choose("s", names).chosen == "a" and "b, which was measured" in refused.choose("s", names).why
    assert refused.choose("t", names).chosen == "b" and "a does not compile" in refused.choose("t", names).why


def test_the_fastest_of_those_that_are_left() -> None:
    found = Decisions({"s": "lib"}, "here", refused=frozenset({("t", "a")}), ranked={"s": ["gone", "lib", "c", "b"]})
    names = ["a", "lib", "b", "c"]
    assert found.choose("s", names, ["lib"]) == Choice("s", "lib", tuple(names), "measured on here", "c")
    left = found.choose("s", ["a", "b"])
    assert left.chosen == "b" and left.why == "measured on here, of the others: the best is no candidate here"
    assert found.choose("t", names, ["lib"]).chosen == "b"  # a library is not taken unmeasured
    assert found.choose("u", names, ["lib"]) == Choice("u", "a", tuple(names), "cost model")
    assert Row("x", {"a": 3.0, "b": 1.0, "c": 2.0}, ("b",)).ranked == ["c", "a"]


def test_the_triton_of_another_record_is_told(tmp_path: Path) -> None:
    Record(tmp_path / FILE).add("NVIDIA Z, sm_90, Triton 0.1", {"x": Row("y")})
    (choice,) = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=tmp_path))
    assert "it has NVIDIA Z, sm_90, Triton 0.1" in choice.why


def test_subjects_depend_on_what_is_computed_and_on_no_names() -> None:
    texts = [
        DOUBLED, DOUBLED.replace("x", "input").replace("y", "output"), DOUBLED.replace(str(N), "4096"),
        DOUBLED.replace("float", "float16"), DOUBLED.replace("Add", "Mul"),
    ]  # fmt: skip
    subjects = [choices(onnxc.compile(parse(t), target="cuda:sm_90", cache=False))[0].subject for t in texts]
    assert subjects[0] == subjects[1] and len(set(subjects)) == 4


def test_cached_models_depend_on_what_was_measured_of_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = gpu.make

    def counted(*args: Any) -> Any:
        made.append(1)
        return make(*args)

    monkeypatch.setattr(gpu, "make", counted)

    def compiled() -> Choice:
        return choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=tmp_path))[0]

    where = gpu_place("NVIDIA Z", 90, TRITON)
    first = compiled()
    compiled()
    assert len(made) == 1
    Record(tmp_path / FILE).add(where, {first.subject: Row(first.candidates[1])})
    assert compiled().chosen == first.candidates[1] and len(made) == 2
    Record(tmp_path / FILE).add(where, {"another": Row("a")})
    compiled()
    assert len(made) == 2


def test_max_autotune_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(ordinal: int = 0) -> Any:
        raise CudaError("no driver")

    monkeypatch.setattr(gpu, "device", nothing)
    for target in ("cuda", "cuda:sm_90"):
        with pytest.raises(CudaError, match="no driver"):
            onnxc.compile(parse(DOUBLED), target=target, mode="max-autotune")
    with pytest.raises(CudaError, match=r"max-autotune.*there is none"):
        onnxc.compile(parse(DOUBLED), target="cuda:sm_90", mode="max-autotune")


# ---------------------------------------------------------------- the tuner, on a driver in memory


@dataclass
class Kernels:
    """Stands for Triton: whatever is compiled doubles its input, in a time that depends on the warps.

    Attributes:
        wrong, broken: warps of the kernels that answer wrongly, and of those that do not compile.
        compiled: warps and threads of each that was compiled.
    """

    driver: FakeDriver
    wrong: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    compiled: list[int] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def each(self, source: str, functions: Sequence[Function], architecture: int) -> list[Image | str]:
        return [self._image(f) for f in functions]

    def program(self, program: Program, architecture: int) -> list[Image]:
        found = self.each("", program.functions, architecture)
        if any(isinstance(image, str) for image in found):
            names = [f.name for f, image in zip(program.functions, found, strict=True) if isinstance(image, str)]
            raise KernelError("it does not fit", names)
        return [image for image in found if isinstance(image, Image)]

    def _image(self, function: Function) -> Image | str:
        warps = function.warps
        if warps in self.broken:
            return "it does not fit"
        self.compiled.append(warps)

        def run(driver: FakeDriver, grid: tuple[int, int, int], words: list[int]) -> None:
            driver._clock += 1 / warps
            factor = 3 if warps in self.wrong else 2
            driver.array(words[1], N, np.float32)[:] = factor * driver.array(words[0], N, np.float32)

        name = f"kernel{next(self.numbers)}"
        self.driver.kernels[name] = len(function.parameters) + 2, run
        return Image(name, cubin(name), 0, 32 * warps, 0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    driver = FakeDriver()
    found = Kernels(driver)
    monkeypatch.setattr(driver_module, "load_driver", lambda: Driver(driver))
    monkeypatch.setattr(driver_module, "_devices", {})
    monkeypatch.setattr(gpu, "compile_each", found.each)
    monkeypatch.setattr(gpu, "compile_program", found.program)
    return found


def warps(name: str) -> int:
    """Of a candidate; 4 is the default."""
    return int(next((part.removeprefix("warps=") for part in name.split() if part.startswith("warps=")), "4"))


def test_the_fastest_is_taken_and_kept(kernels: Kernels, tmp_path: Path) -> None:
    told: list[str] = []
    options = {"target": "cuda", "cache": tmp_path}
    model = onnxc.compile(parse(DOUBLED), mode="max-autotune", progress=told.append, **options)
    (choice,) = choices(model)
    assert warps(choice.chosen) == max(map(warps, choice.candidates)) > warps(choice.candidates[0])
    assert choice.why == f"measured on {FAKE}" and any(" candidates (" in t for t in told)
    x = np.arange(N, dtype=np.float32)
    np.testing.assert_array_equal(model(x)["y"], 2 * x)
    (row,) = Record(tmp_path / FILE).rows(FAKE).values()
    assert row.best == choice.chosen and set(row.seconds) == set(choice.candidates)
    # What is known is not measured again, and decides in compiles that measure nothing.
    before = len(kernels.compiled)
    again = onnxc.compile(parse(DOUBLED), mode="max-autotune", **options)
    assert choices(again) == [choice] and len(kernels.compiled) == before
    assert choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=tmp_path)) == [choice]
    # With the record as a file of its own, there and elsewhere.
    shared = tmp_path / "shared.json"
    shared.write_bytes((tmp_path / FILE).read_bytes())
    elsewhere = onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=tmp_path / "other", record=shared)
    assert choices(elsewhere) == [choice]


def test_of_several_gpus_this_machines_counts(kernels: Kernels, tmp_path: Path) -> None:
    (choice,) = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False))
    record = Record(tmp_path / FILE)
    for device, name in (("A", choice.candidates[1]), ("Fake GPU", choice.candidates[2]), ("Z", choice.candidates[3])):
        record.add(gpu_place(device, 90, TRITON), {choice.subject: Row(name)})
    (own,) = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=tmp_path))
    assert own.chosen == choice.candidates[2] and own.why == f"measured on {FAKE}"
    kernels.driver.devices = 0
    (first,) = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=tmp_path))
    assert first.chosen == choice.candidates[1] and "A, sm_90" in first.why and "Z, sm_90" in first.why


def test_wrong_answers_and_kernels_that_do_not_compile_are_refused(kernels: Kernels, tmp_path: Path) -> None:
    names = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False))[0].candidates
    most = sorted(set(map(warps, names)))
    kernels.wrong, kernels.broken = {most[-1]}, {most[0]} - {warps(names[0])}
    found = onnxc.tune(parse(DOUBLED), target="cuda", cache=tmp_path)
    bad = {n for n in names if warps(n) in kernels.wrong | kernels.broken}
    assert set(found.refused[next(iter(found.times))]) == bad
    (best,) = found.best.values()
    assert best not in bad and "refused" in found.to_dict() and "1 choices measured" in str(found)
    (row,) = Record(tmp_path / FILE).rows(FAKE).values()
    assert set(row.refused) == bad
    model = onnxc.compile(parse(DOUBLED), target="cuda", cache=tmp_path)
    assert choices(model)[0].chosen == best


def test_the_budget_ends_it_and_the_next_run_goes_on(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxc.compiler.job._GPU_METHOD", autotune.Method(1, 1, 1, 2, True, 1e-2))
    now = itertools.count()
    monkeypatch.setattr(autotune, "time", SimpleNamespace(monotonic=lambda: next(now)))
    options = {"target": "cuda", "cache": tmp_path, "mode": "max-autotune"}
    model = onnxc.compile(parse(DOUBLED), tune_seconds=0, **options)
    assert choices(model)[0].chosen == choices(model)[0].candidates[0]
    assert not Record(tmp_path / FILE).places()
    onnxc.compile(parse(DOUBLED), tune_seconds=4, **options)
    (row,) = Record(tmp_path / FILE).rows(FAKE).values()
    assert len(row.seconds) == 2
    onnxc.compile(parse(DOUBLED), **options)
    (row,) = Record(tmp_path / FILE).rows(FAKE).values()
    assert not row.lacks(choices(model)[0].candidates)
    with pytest.raises(InputError, match="tune_seconds"):
        onnxc.compile(parse(DOUBLED), tune_seconds=-1, **options)


def test_what_was_measured_before_an_interrupt_is_kept(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxc.compiler.job._GPU_METHOD", autotune.Method(1, 1, 1, 2, True, 1e-2))

    def stop(stage: str) -> None:
        if stage.startswith("2 of "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        onnxc.tune(parse(DOUBLED), target="cuda", cache=tmp_path, progress=stop)
    (row,) = Record(tmp_path / FILE).rows(FAKE).values()
    assert len(row.seconds) == 3


def test_a_damaged_record_is_found_before_anything_is_measured(kernels: Kernels, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(InputError, match="no record"):
        onnxc.tune(parse(DOUBLED), target="cuda", cache=tmp_path, record=tmp_path / "r.json")
    assert not kernels.compiled
    with pytest.raises(InputError, match="tuned=False says otherwise"):
        onnxc.compile(parse(DOUBLED), target="cuda", cache=tmp_path, mode="max-autotune", tuned=False)
    with pytest.raises(InputError, match="a place"):
        onnxc.compile(parse(DOUBLED), target="cuda", cache=False, mode="max-autotune")
    with pytest.raises(InputError, match="is sm_90, not sm_80"):
        onnxc.compile(parse(DOUBLED), target="cuda:sm_80", cache=tmp_path, mode="max-autotune")


@pytest.mark.parametrize(
    ("code", "error"),
    [("LAUNCH_OUT_OF_RESOURCES", None), ("ILLEGAL_ADDRESS", CudaError), ("OUT_OF_MEMORY", LimitError)],
)
def test_what_the_driver_refuses_and_what_ends_it(
    code: str, error: type[Exception] | None, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = FakeDriver._kernel_work

    def refusing(driver: FakeDriver, params: Any) -> Any:
        if params.blockDimX > 4 * 32:
            raise Failed(CUresult[f"CUDA_ERROR_{code}"])
        return launch(driver, params)

    monkeypatch.setattr(FakeDriver, "_kernel_work", refusing)
    if error is not None:
        with pytest.raises(error):
            onnxc.tune(parse(DOUBLED), target="cuda", cache=tmp_path)
        return
    found = onnxc.tune(parse(DOUBLED), target="cuda", cache=tmp_path)
    (refused,) = found.refused.values()
    assert refused and all(warps(n) > 4 for n in refused)


def test_a_default_that_does_not_compile_gives_way(kernels: Kernels) -> None:
    first, *others = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False))[0].candidates
    kernels.broken = {warps(first)}
    (choice,) = choices(onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False))
    assert choice.chosen in others and f"{first} does not compile" in choice.why
    kernels.broken = set(map(warps, [first, *others]))
    with pytest.raises(KernelError, match="does not fit"):
        onnxc.compile(parse(DOUBLED), target="cuda:sm_90", cache=False)


def test_the_command_line(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXC_CACHE", str(tmp_path / "cache"))
    path, record, out = (str(tmp_path / name) for name in ("m.onnx", "r.json", "m.onnxc"))
    onnx.save(parse(DOUBLED), path)

    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stdout

    assert f"kept in {record}" in invoke("tune", path, "--target", "cuda", "--record", record, "--tune-seconds", "100")
    invoke("compile", path, "-o", out, "--target", "cuda:sm_90", "--record", record)
    assert f"measured on {FAKE}" in invoke("explain", out)
    invoke("compile", path, "-o", out, "--target", "cuda", "--mode", "max-autotune")
    assert f"tuning.json: 1 on {FAKE}" in invoke("info")
    assert CliRunner().invoke(app, ["compile", path, "-o", out, "--mode", "fast"]).exit_code == 2


def test_agree() -> None:
    x = np.array([1.0, -np.inf, np.nan, 3.0], np.float16)
    assert agree([x], [x], 1e-3)
    assert not agree([x], [np.array([1, np.inf, np.nan, 3], np.float16)], 1e-3)
    assert not agree([x], [np.array([1, -np.inf, 0, 3], np.float16)], 1e-3)
    assert not agree([x], [x[:3]], 1e-3) and not agree([x], [x.astype(np.float32)], 1e-3)
    many = np.arange(1000)
    assert agree([np.where(many == 7, 8, many)], [many], 1e-3) and not agree([many + 1], [many], 1e-3)
    assert agree([np.zeros(0, bool)], [np.zeros(0, bool)], 1e-3)
    large = np.ones((4096, 4096), np.float16)
    wrong = large.copy()
    wrong[128:256, :128] = 5
    assert agree([large], [large], 3e-2) and not agree([wrong], [large], 3e-2)


# ---------------------------------------------------------------- every candidate


def tensor(shape: Sequence[int], seed: int, dtype: Any = np.float16) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def model_of(
    node: str, shapes: Sequence[Sequence[int]], constants: Sequence[int], out: Sequence[int], **attrs: Any
) -> onnx.ModelProto:
    """One node and a Tanh behind it, in float16."""
    names = [f"x{k}" for k in range(len(shapes))]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)
        for k, (name, shape) in enumerate(zip(names, shapes, strict=True)) if k not in constants
    ]  # fmt: skip
    weights = [numpy_helper.from_array(tensor(shapes[k], k) / 4, names[k]) for k in constants]
    nodes = [helper.make_node(node, names, ["t"], **attrs), helper.make_node("Tanh", ["t"], ["y"])]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, out)
    graph = helper.make_graph(nodes, "g", inputs, [result], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def attention() -> onnx.ModelProto:
    h = "float16[2, 3, 70, 40]"
    return parse(
        f"({h} q, float16[2, 3, 40, 70] k, {h} v) => ({h} y) "
        "{ s = MatMul(q, k)  p = Softmax <axis = -1> (s)  y = MatMul(p, v) }"
    )


def conv(x: Sequence[int], w: Sequence[int], size: int, pad: int, **attrs: Any) -> onnx.ModelProto:
    """A convolution of a square image to one of another size."""
    return model_of("Conv", [x, w], [1], (x[0], w[0], size, size), pads=[pad] * 4, **attrs)


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "product": lambda: model_of("MatMul", [(2, 67, 88), (88, 136)], [1], (2, 67, 136)),
    "row times matrix": lambda: model_of("MatMul", [(1, 1024), (1024, 136)], [1], (1, 136)),
    "convolution": lambda: conv((2, 24, 9, 9), (40, 24, 3, 3), 9, 1),
    "first convolution": lambda: conv((1, 3, 17, 17), (16, 3, 7, 7), 8, 2, strides=[2, 2]),
    "grouped convolution": lambda: conv((2, 32, 7, 7), (32, 16, 3, 3), 7, 1, group=2),
    "depthwise convolution": lambda: conv((2, 20, 7, 7), (20, 1, 3, 3), 7, 1, group=20),
    "attention": attention,
    "pointwise": lambda: parse("(float[37, 61] x) => (float[37, 61] y) { y = Exp(x) }"),
    "transpose": lambda: parse("(float[37, 61] x) => (float[61, 37] y) { a = Tanh(x) y = Transpose<perm=[1,0]>(a) }"),
    "softmax": lambda: parse("(float16[37, 300] x) => (float16[37, 300] y) { y = Softmax<axis=-1>(x) }"),
    "columns": lambda: parse("(float[37, 61] x) => (float[37, 61] y) { y = Softmax<axis=0>(x) }"),
}


def width(model: onnx.ModelProto) -> int:
    """The most candidates that a kernel of the model has."""
    _, program = program_of(Request(model.SerializeToString(), []))
    return max((len(c.choice.candidates) for c in program.calls if c.choice is not None), default=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_every_candidate_compiles(name: str) -> None:
    """What needs more shared memory than an architecture has is refused, and nothing else."""
    model = GRAPHS[name]()
    functions: dict[tuple[str, int, int], tuple[str, Function]] = {}
    for candidate in range(width(model)):
        _, program = program_of(Request(model.SerializeToString(), [], candidate=candidate))
        for f in program.functions:
            functions.setdefault((program.kernels[f.name], f.warps, f.stages), (program.source, f))
    for architecture in (80, 90):
        for source, function in functions.values():
            (found,) = compile_each(source, [function], architecture, 1)
            assert isinstance(found, Image) or "of shared memory" in found


@pytest.mark.parametrize("name", GRAPHS)
def test_every_candidate_answers_the_same(name: str, simulator: Simulator) -> None:
    model = GRAPHS[name]()
    data = model.SerializeToString()
    kinds = {TensorProto.FLOAT16: np.float16, TensorProto.FLOAT: np.float32}
    inputs = [
        tensor([d.dim_value for d in v.type.tensor_type.shape.dim], k, kinds[v.type.tensor_type.elem_type])
        for k, v in enumerate(model.graph.input)
    ]
    (wanted,) = simulator.run(data, inputs).outputs
    for candidate in range(1, width(model)):
        answer = simulator.run(data, inputs, candidate=candidate)
        assert answer.error[0] == 0
        np.testing.assert_allclose(
            answer.outputs[0].astype(np.float64),
            wanted.astype(np.float64),
            rtol=4e-3,
            atol=4e-3,
            err_msg=str(candidate),
        )
