"""The runtime of the GPU without a GPU: against a driver in memory whose streams are as lazy as they may be."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc import errors
from onnxc.runtime.cuda import graph as graph_module
from onnxc.runtime.cuda import model as model_module
from onnxc.runtime.cuda.memory import Failure, Timeline, Watched
from onnxc.runtime.cuda.model import CudaModel
from onnxc.runtime.cuda.program import Launch, Program
from onnxc.runtime.opening import open_model
from onnxc.runtime.package import open_package
from tests.cuda_kernels import Foreign, use
from tests.cuda_models import cumulative, expected, gathering, manifest, rows, size, sum_of_two, two_steps
from tests.fake_cuda import CUresult, FakeDriver

F32 = np.float32
HERE = "onnxc.runtime.cuda"


# ---------------------------------------------------------------- the face


def test_the_manifest_decides_the_class(gpu: FakeDriver) -> None:
    model = open_model(*two_steps(), threads=2, device=0)
    assert isinstance(model, CudaModel) and isinstance(model, onnxc.CompiledModel)
    assert model.architecture == "sm_90" and str(model.device) == "Fake GPU (sm_90)"
    assert repr(model) == "<CudaModel m('x': float32[N, 4]) -> ('y': float32[N, 4])>"
    assert model.source == "# kernels"
    assert [t.name for t in model.get_inputs()] == ["x"]
    assert model.explain().counts["kernels"] == 2
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(model)
    with pytest.raises(errors.PackageError, match="'rocm'"):
        open_model({"target": "rocm"}, {})


@pytest.mark.parametrize("n", [1, 2, 7, 17, 1000])
def test_numpy_in_and_out(gpu: FakeDriver, n: int) -> None:
    model = CudaModel(*two_steps())
    x = rows(n)
    for given in (x, x.tolist(), np.asfortranarray(x), x[::-1][::-1]):
        np.testing.assert_array_equal(model(given)["y"], expected(x))
    np.testing.assert_array_equal(model(x=x)["y"], expected(x))
    np.testing.assert_array_equal(model.run(["y"], {"x": x})[0], expected(x))
    assert gpu.calls["cuGraphInstantiate"] == 1 and gpu.calls["cuGraphExecKernelNodeSetParams"] == 0
    assert type(model(x)["y"]) is np.ndarray


def test_results_stay(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    found = [model(rows(5, k))["y"] for k in range(6)]
    for k, y in enumerate(found):
        np.testing.assert_array_equal(y, expected(rows(5, k)))


def test_no_rows(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    assert model(rows(0))["y"].shape == (0, 4)
    assert not gpu.launches  # a grid of zero is no launch
    y = model(Foreign(gpu, rows(0)))["y"]
    assert y.shape == (0, 4) and y.numpy().shape == (0, 4)


def test_static_sizes(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps(3))
    np.testing.assert_array_equal(model(rows(3))["y"], expected(rows(3)))
    with pytest.raises(errors.InputError, match="size 3"):
        model(rows(4))


@pytest.mark.parametrize(
    ("given", "message"),
    [((np.zeros((2, 4)),), "dtype float32"), ((np.zeros(4, F32),), "rank 2"), ((), "missing"), ((1, 2), "2 inputs")],
)
def test_wrong_inputs(gpu: FakeDriver, given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        CudaModel(*two_steps())(*given)


def test_poison_changes_no_answer(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXC_POISON", "1")
    model = CudaModel(*two_steps())
    np.testing.assert_array_equal(model(rows(5))["y"], expected(rows(5)))
    np.testing.assert_array_equal(model(Foreign(gpu, rows(5)))["y"].numpy(), expected(rows(5)))


def test_save_and_load(gpu: FakeDriver, tmp_path: Path) -> None:
    CudaModel(*two_steps()).save(tmp_path / "m.onnxc")
    model = onnxc.load(tmp_path / "m.onnxc")
    assert isinstance(model, CudaModel)
    np.testing.assert_array_equal(model(rows(3))["y"], expected(rows(3)))
    with open_package(tmp_path / "m.onnxc") as package:
        assert "cubins:sm_90" in package.names


def test_several_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(capability: tuple[int, int], *names: str) -> str:
        return Program({**found, "cuda": {"images": {name: [] for name in names}, "steps": []}}).architecture(
            capability, "it"
        )

    found, _ = two_steps()
    assert best((9, 0), "sm_80", "sm_90", "sm_90a") == "sm_90a"
    assert best((8, 9), "sm_80", "sm_86", "sm_90") == "sm_86"
    assert best((10, 3), "sm_100", "sm_100a", "sm_100f") == "sm_100f"
    assert best((12, 0), "sm_120") == "sm_120"
    for capability in [(9, 0), (8, 0), (7, 5)]:
        with pytest.raises(errors.CudaError, match=r"compiled for sm_86, sm_100a.*cuda:sm_"):
            best(capability, "sm_86", "sm_100a")


def test_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeDriver(capability=(8, 0)), monkeypatch)
    CudaModel(*two_steps()).save(tmp_path / "m.onnxc")  # compiled for others, and saved
    message = r'sm_90, and this GPU is Fake GPU \(sm_80\).*target="cuda:sm_80"'
    with pytest.raises(errors.CudaError, match=message):
        onnxc.load(tmp_path / "m.onnxc")
    with pytest.raises(errors.CudaError, match=message):
        CudaModel(*two_steps())(rows(1))


@pytest.mark.parametrize("change", [{"cuda": {}}, {"arena": None}, {"cuda": {"images": {}}}, {"cuda": 3}])
def test_damaged_manifests(gpu: FakeDriver, change: dict[str, Any]) -> None:
    found, sections = two_steps()
    with pytest.raises(errors.OnnxcError):
        CudaModel({**found, **change}, sections)


@pytest.mark.parametrize(
    "step",
    [
        {"launch": 9, "call": 0, "grid": [1, 1, 1], "args": []},
        {"launch": 0, "call": 0, "grid": [1, 1], "args": []},
        {"launch": 0, "call": 0, "grid": [1, 1, 1], "args": [["input", 3, 0]]},
        {"launch": 0, "call": 0, "grid": [1, 1, 1], "args": [["arena", 5, 0]]},
        {"launch": 0, "call": 0, "grid": ["t9", 1, 1], "args": []},
        {"copy": [1]},
        {"jump": 1},
    ],
)
def test_damaged_steps(gpu: FakeDriver, step: dict[str, Any]) -> None:
    found, sections = two_steps()
    found["cuda"]["steps"] = [step]
    with pytest.raises(errors.PackageError, match="damaged"):
        CudaModel(found, sections)(rows(2))


def test_limits(gpu: FakeDriver) -> None:
    found, sections = two_steps()
    model = CudaModel({**found, "memory_limit": 1000}, sections)
    model(rows(10))
    with pytest.raises(errors.LimitError, match="more than its limit"):
        model(rows(100))
    found["cuda"]["steps"][0]["grid"] = [1, 70000, 1]
    with pytest.raises(errors.LimitError, match="grid"):
        CudaModel(found, sections)(rows(1))
    found["cuda"]["steps"] = [{"loop": "t0", "trip": 1 << 30, "steps": [{"fill": [["output", 0, 0], 4]}]}]
    with pytest.raises(errors.LimitError, match="steps"):
        CudaModel(found, sections)(rows(1))


# ---------------------------------------------------------------- sizes, loops, copies


def test_dynamic_sizes_grow_and_shrink(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    for n in (3, 900, 17, 5000, 3, 900, 1):
        np.testing.assert_array_equal(model(rows(n))["y"], expected(rows(n)))
        np.testing.assert_array_equal(model(Foreign(gpu, rows(n)))["y"].numpy(), expected(rows(n)))
    assert gpu.calls["cuGraphInstantiate"] == 5  # the arena moved, and the graphs moved with it


def test_sites_are_bounded(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_MOST_SITES", 3)
    model = CudaModel(*two_steps())
    for n in (1, 2, 3, 1, 4, 1, 2):
        np.testing.assert_array_equal(model(rows(n))["y"], expected(rows(n)))
        assert len(model._sites) <= 3
    assert gpu.calls["cuGraphInstantiate"] == 5 and gpu.calls["cuGraphExecDestroy"] == 2  # 2 went first, then 3


@pytest.mark.parametrize("most", [1 << 16, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_loops_and_copies(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, n: int, most: int) -> None:
    monkeypatch.setattr(graph_module, "MOST_NODES", most)  # a long program does without a graph
    model = CudaModel(*cumulative())
    for x in (rows(n), rows(n, 1)):
        want = np.cumsum(x, 0, dtype=F32)
        last = want[-1] if n else np.zeros(4, F32)
        for given in (x, Foreign(gpu, x)):
            y, z = model(given)
            np.testing.assert_array_equal(np.asarray(y), want)
            np.testing.assert_array_equal(np.asarray(z), last)


def test_long_copies_are_divided(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HERE}.program._MOST_COPIED", 12)
    x = np.arange(8, dtype=F32)
    vector = ["float32", [8], [8]]
    given = manifest([["x", *vector]], [["y", *vector]], [], [{"copy": [["output", 0, 0], ["input", 0, 0], 32]}])
    np.testing.assert_array_equal(CudaModel(*given)(x)["y"], x)
    assert gpu.calls["cuGraphAddMemcpyNode"] == 3


def test_nested_loops(gpu: FakeDriver) -> None:
    copy = {"copy": [["output", 0, [[12, "t0"], [4, "t1"]]], ["input", 0, [[4, "t0"], [8, "t1"]]], 4]}
    loop = {"loop": "t0", "trip": 2, "steps": [{"loop": "t1", "trip": 3, "steps": [copy]}]}
    given = manifest([["x", "float32", [3, 2], [3, 2]]], [["y", "float32", [2, 3], [2, 3]]], [], [loop])
    x = np.arange(6, dtype=F32).reshape(3, 2)
    np.testing.assert_array_equal(CudaModel(*given)(x)["y"], x.T)


def test_scratch_lies_behind_the_arena(gpu: FakeDriver) -> None:
    found, sections = manifest(
        [["x", "float32", ["s0"], ["N"]]], [["y", "float32", ["s0"], ["N"]]], ["scratched"],
        [{"launch": 0, "call": 0, "grid": ["s0", 1, 1], "args": [["input", 0, 0], ["output", 0, 0], size("s0")]}],
    )  # fmt: skip
    model = CudaModel(found, sections)
    for n in (3, 50):
        x = rows(n)[:, 0].copy()
        np.testing.assert_array_equal(model(x)["y"], x)
    arena = model._space.arena
    assert arena is not None and arena.nbytes >= 64 * 50


def test_clusters_and_shared_memory(gpu: FakeDriver) -> None:
    found, sections = two_steps(2)
    found["cuda"]["images"]["sm_90"][0] |= {"shared": 100_000, "cluster": 2}
    model = CudaModel(found, sections)
    np.testing.assert_array_equal(model(rows(2))["y"], expected(rows(2)))
    assert gpu.shared == {"add": 100_000} and gpu.clusters == [2]
    model.profile([rows(2)], runs=1, warm_up=0)
    assert gpu.clusters == [2, 2]


def test_programs_that_go_on_to_others_are_as_many_as_fit_on_the_gpu() -> None:
    found, _ = two_steps()
    grids = [s.grid for s in Program(found).at({"s0": 64}, "sm_90", 3).steps if isinstance(s, Launch)]
    found["cuda"]["images"]["sm_90"][0]["resident"] = 2
    capped = [s.grid for s in Program(found).at({"s0": 64}, "sm_90", 3).steps if isinstance(s, Launch)]
    assert grids == [(64, 1, 1)] * 2 and capped == [(6, 1, 1), (64, 1, 1)]
    found["cuda"]["images"]["sm_90"][0]["resident"] = -1
    with pytest.raises(errors.PackageError):
        Program(found)


# ---------------------------------------------------------------- errors of kernels


def test_errors_with_numpy(gpu: FakeDriver) -> None:
    model = CudaModel(*gathering())
    np.testing.assert_array_equal(model(rows(5), [4, 0])["y"], rows(5)[[4, 0]])
    with pytest.raises(errors.RunError, match=r"the index 7 is out of bounds.*n1 Gather 'embed'"):
        model(rows(5), [1, 7])
    np.testing.assert_array_equal(model(rows(5), [4, 0])["y"], rows(5)[[4, 0]])


def test_errors_of_results_on_the_gpu(gpu: FakeDriver) -> None:
    model = CudaModel(*gathering())
    x, good, bad = Foreign(gpu, rows(5)), np.array([1, 2]), np.array([1, 9])
    y = model(x, bad)["y"]
    with pytest.raises(errors.RunError, match="index 9"):
        y.numpy()
    model(x, bad)
    with pytest.raises(errors.RunError, match="index 9"):
        model.synchronize()
    model(x, bad)
    gpu.finish()
    with pytest.raises(errors.RunError, match="index 9"):
        model(x, good)
    np.testing.assert_array_equal(model(x, good)["y"].numpy(), rows(5)[[1, 2]])


def test_a_result_outlives_its_model(gpu: FakeDriver) -> None:
    model = CudaModel(*gathering())
    gone = weakref.ref(model)
    y = model(Foreign(gpu, rows(5)), np.array([1, 9]))["y"]
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(errors.RunError, match="index 9"):
        y.synchronize()


# ---------------------------------------------------------------- threads, profile


@pytest.mark.parametrize("foreign", [False, True])
def test_threads(gpu: FakeDriver, foreign: bool) -> None:
    model = CudaModel(*two_steps())
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            for k in range(15):
                x = rows(1 + (seed + k) % 5, seed)
                y = model(Foreign(gpu, x) if foreign else x)["y"]
                np.testing.assert_array_equal(np.asarray(y), expected(x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_first_calls_at_once(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    model, others, watch = CudaModel(*two_steps()), [], Timeline.watch

    def slow(self: Timeline, failure: Failure) -> Watched:
        if not others:
            others.append(threading.Thread(target=model.attach))
            others[0].start()
            others[0].join(0.05)  # it waits until the model is there
        return watch(self, failure)

    monkeypatch.setattr(Timeline, "watch", slow)
    np.testing.assert_array_equal(model(rows(2))["y"], expected(rows(2)))
    others[0].join()
    assert gpu.calls["cuStreamCreate"] == 1  # for one workspace


def test_profile(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HERE}.profile._TOGETHER", 3)
    model = CudaModel(*cumulative())
    report = model.profile({"x": rows(5)}, runs=4, warm_up=1)
    assert report.profile is not None and report.profile.runs == 4
    (kernel,) = report.profile.kernels
    assert kernel.best > 0 and report.profile.dims == {"N": 5}
    assert "Fake GPU (sm_90)" in str(report) and report.profile.peaks.flops == 0
    assert report.to_dict()["profile"]["share_of_peak"] == 0
    with pytest.raises(errors.InputError, match="runs"):
        model.profile([rows(5)], runs=0)


def test_profile_with_arrays_of_the_gpu(gpu: FakeDriver) -> None:
    """Those of another stream are waited for; those with gaps are copied; numpy arrays may be among them."""
    model = CudaModel(*sum_of_two())
    x, y = (np.arange(4, dtype=F32) * k for k in (1, 10))
    for inputs in ([Foreign(gpu, x), Foreign(gpu, y)], [x, Foreign(gpu, y, offset=4)]):
        report = model.profile(inputs, runs=2, warm_up=1)
        assert report.profile is not None and report.profile.kernels[0].best > 0
    np.testing.assert_array_equal(model(x, y)["c"], x + y)


def test_profile_without_a_gate(gpu: FakeDriver) -> None:
    gpu.failing["cuStreamWaitValue32"] = CUresult.CUDA_ERROR_INVALID_VALUE
    assert CudaModel(*two_steps()).profile([rows(5)], runs=1).profile
