"""The runtime of the GPU without a GPU: against a driver in memory whose streams are as lazy as they may be."""

from __future__ import annotations

import ctypes
import gc
import importlib
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc import errors
from onnxc.optim import SGD
from onnxc.runtime.cuda import arrays as arrays_module
from onnxc.runtime.cuda import dlpack
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda import graph as graph_module
from onnxc.runtime.cuda import model as model_module
from onnxc.runtime.cuda.arrays import DeviceArray, Incoming, is_dense, stream_of
from onnxc.runtime.cuda.copies import densify
from onnxc.runtime.cuda.driver import Device, Driver
from onnxc.runtime.cuda.memory import Failure, Timeline, Watched
from onnxc.runtime.cuda.model import CudaModel
from onnxc.runtime.cuda.program import Launch, Program
from onnxc.runtime.cuda.workspace import Workspace
from onnxc.runtime.opening import open_model
from onnxc.runtime.package import open_package
from onnxc.training.graph import Slot, Update
from onnxc.training.step import Source, TrainingStep
from tests.cuda_models import cumulative, expected, gathering, manifest, rows, size, sum_of_two, two_steps
from tests.fake_cuda import CUresult, FakeDriver, Handle

F32 = np.float32
HERE = "onnxc.runtime.cuda"


# ---------------------------------------------------------------- kernels


def low(word: int) -> int:
    """An i32 argument."""
    return ctypes.c_int32(word).value


def add(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """z = x + y over n elements."""
    x, y, z, n, *_ = a
    n = low(n)
    gpu.array(z, n, F32)[:] = gpu.array(x, n, F32) + gpu.array(y, n, F32)


def scale(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """y = x * w over rows of four."""
    x, w, y, n, *_ = a
    assert grid == (n, 1, 1)
    gpu.array(y, 4 * n, F32)[:] = (gpu.array(x, 4 * n, F32).reshape(n, 4) * gpu.array(w, 4, F32)).reshape(-1)


def take(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """y = x[i], rows of four, with a check of the indices."""
    x, i, y, rows, n, error, call, *_ = a
    indices = gpu.array(i, n, np.int64)
    for k, index in enumerate(indices):
        if not 0 <= index < rows:
            words = np.frombuffer((ctypes.c_int64 * 4).from_address(error), np.int64)
            if not words[0]:
                words[:3] = 3, low(call), index
            continue
        gpu.array(y + 16 * k, 4, F32)[:] = gpu.array(x + 16 * int(index), 4, F32)


def scratched(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """y = x, by way of 64 bytes of scratch for each program."""
    x, y, n, scratch, profile = a
    assert profile == 0
    gpu.view(scratch, 64 * grid[0]).fill(0xCC)
    gpu.array(y, n, F32)[:] = gpu.array(x, n, F32)


KERNELS = {"add": (6, add), "scale": (6, scale), "take": (9, take), "scratched": (5, scratched)}
# ---------------------------------------------------------------- fixtures


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    use(fake, monkeypatch)
    yield fake
    gc.collect()
    fake.finish()


def use(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.kernels = dict(KERNELS)
    monkeypatch.setattr(driver_module, "load_driver", lambda: Driver(fake))
    monkeypatch.setattr(driver_module, "_devices", {})
    monkeypatch.setenv("ONNXC_POISON", "0")


class Foreign:
    """An array of the GPU of some library, with the interface of version 3."""

    def __init__(
        self, gpu: FakeDriver, array: np.ndarray, stream: int | None = 1, offset: int = 0, **more: Any
    ) -> None:
        self.gpu, self.dtype, self.shape = gpu, array.dtype, array.shape
        place = gpu._allocate(array.nbytes + 64, False)
        self.address = place + offset
        gpu.view(self.address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.stream, self.more = stream, more

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3,
            "strides": None, "stream": self.stream, **self.more,
        }  # fmt: skip


class Packed:
    """An array of the GPU of a library that has DLPack only."""

    def __init__(self, gpu: FakeDriver, array: np.ndarray, device: tuple[int, int] = (2, 0)) -> None:
        self.array, self.address, self.device = array, gpu.put(array), device
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        dtype = arrays_module.from_numpy(self.array.dtype)
        return dlpack.write(self, self.address, 0, dtype, self.array.shape)


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
    with pytest.raises(errors.LimitError, match="above the limit"):
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


# ---------------------------------------------------------------- arrays of the GPU


def test_interface_without_a_copy(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    x = Foreign(gpu, rows(6))
    y = model(x)["y"]
    assert isinstance(y, DeviceArray) and y.shape == (6, 4) and y.dtype == F32 and y.stream == 0
    assert gpu.pending() and not gpu.launches  # nobody has waited
    assert not any(gpu.calls[name] for name in gpu.calls if "cuMemcpy" in name and name != "cuMemcpyHtoD")
    np.testing.assert_array_equal(y.numpy(), expected(rows(6)))
    np.testing.assert_array_equal(np.asarray(y, np.float64), expected(rows(6)).astype(np.float64))


def test_arrays_that_are_put_there(gpu: FakeDriver) -> None:
    """Whatever their layout and byte order; the result is there when `put` returns."""
    model = CudaModel(*two_steps())
    x = rows(6)
    for array in (x, x.astype(">f4"), np.asfortranarray(x), x[::-1][::-1]):
        put = model.put(array)
        assert model.holds(put) and not model.holds(array) and not gpu.pending()
        np.testing.assert_array_equal(put.numpy(), x)
        np.testing.assert_array_equal(model(put)["y"].numpy(), expected(x))
    for small in (np.float64(3), np.zeros((0, 4), F32), np.asarray(True)):
        put = model.put(small)
        assert (put.shape, put.dtype) == (small.shape, small.dtype)
        np.testing.assert_array_equal(put.numpy(), small)
    for wrong in (np.array(["a"]), np.array([None]), np.array([1], "datetime64[s]")):
        with pytest.raises(errors.InputError, match="cannot go to a GPU"):
            model.put(wrong)


def test_a_training_shows_no_state_behind_a_fault_of_another_program(gpu: FakeDriver) -> None:
    """Of two programs, one that adds to gradients and one that updates: the other one's error counts too."""
    found, sections = gathering()
    adding = CudaModel({**found, "updates": {"inputs": [], "first": 0}}, sections)
    updating = CudaModel(*two_steps())
    slot = Slot("w", "", rows(2))
    step = TrainingStep(Source(b"", None, (), ()), [adding, updating], [(), (0,)], [slot], Update(SGD(lr=0.1)))
    step._values = [updating.put(slot.initial)]
    np.testing.assert_array_equal(step.parameters["w"], slot.initial)
    adding(adding.put(rows(2)), adding.put(np.array([5])))
    with pytest.raises(errors.RunError):
        step.state()
    with pytest.raises(errors.InputError, match="a step before failed"):
        step()


def test_nodes_are_updated_only_where_addresses_change(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    x = Foreign(gpu, rows(6))
    model(x)
    y = model(x)["y"]  # the first result has gone: its memory is taken again
    assert gpu.calls["cuGraphExecKernelNodeSetParams"] == 0
    again = model(x)["y"]  # another output: the second kernel
    assert gpu.calls["cuGraphExecKernelNodeSetParams"] == 1 and again.address != y.address
    other = Foreign(gpu, rows(6, 1))
    del again
    z = model(other)["y"]  # another input, which the first kernel has twice
    assert gpu.calls["cuGraphExecKernelNodeSetParams"] == 2
    np.testing.assert_array_equal(y.numpy(), expected(rows(6)))
    np.testing.assert_array_equal(z.numpy(), expected(rows(6, 1)))


def test_a_failed_update_is_made_up_for(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CudaModel(*two_steps())
    x = Foreign(gpu, rows(3))
    y = model(x)["y"]
    update, calls = gpu.cuGraphExecKernelNodeSetParams, []

    def fail_second(*arguments: Any) -> Any:
        calls.append(arguments)
        return update(*arguments) if len(calls) == 1 else (CUresult.CUDA_ERROR_INVALID_VALUE,)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "cuGraphExecKernelNodeSetParams", fail_second)
        with pytest.raises(errors.CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            model(Foreign(gpu, rows(3, 1)))
    np.testing.assert_array_equal(y.numpy(), expected(rows(3)))
    address = y.address
    del y
    y = model(x)["y"]  # all is where it was, but in one of the nodes
    assert y.address == address
    np.testing.assert_array_equal(y.numpy(), expected(rows(3)))


def test_many_calls_under_way(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    found = [model(Foreign(gpu, rows(4, k)))["y"] for k in range(20)]
    assert not gpu.launches
    for k, y in enumerate(found):
        np.testing.assert_array_equal(y.numpy(), expected(rows(4, k)))


def test_memory_of_results_is_used_in_the_stream_s_order(gpu: FakeDriver) -> None:
    model, again = CudaModel(*two_steps()), CudaModel(*two_steps())
    y = None
    for _ in range(3):
        y = again(model(Foreign(gpu, rows(4)))["y"])["y"]  # the result between goes at once
    np.testing.assert_array_equal(y.numpy(), expected(expected(rows(4))))


def test_memory_of_results_stays_with_their_stream(gpu: FakeDriver) -> None:
    model, other = CudaModel(*two_steps()), CudaModel(*two_steps())
    a, b = (int(gpu.cuStreamCreate(1)[1]) for _ in range(2))
    seen: list[np.ndarray] = []
    y = model(Foreign(gpu, rows(4), stream=a))["y"]
    y.synchronize()
    address = y.address
    gpu.push(a, lambda: seen.append(gpu.array(address, 16, F32).reshape(4, 4).copy()))
    del y  # while that is to come
    z = other(Foreign(gpu, rows(4, 1), stream=b))["y"]
    gpu._drain(b)
    gpu._drain(a)
    assert z.address != address
    np.testing.assert_array_equal(seen[0], expected(rows(4)))
    np.testing.assert_array_equal(z.numpy(), expected(rows(4, 1)))


def test_the_producer_s_stream(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    streams = [int(gpu.cuStreamCreate(1)[1]) for _ in range(2)]
    for turn in range(4):
        stream = streams[turn % 2]
        x = Foreign(gpu, np.zeros((3, 4), F32), stream=stream)
        gpu.push(stream, lambda x=x: gpu.array(x.address, 12, F32).__setitem__(slice(None), rows(3).reshape(-1)))
        y = model(x)["y"]
        assert y.stream == stream and y.__cuda_array_interface__["stream"] == stream
        np.testing.assert_array_equal(y.numpy(), expected(rows(3)))


@pytest.mark.parametrize("kind", [int, "ptr", "cuda_stream", "protocol"])
def test_a_given_stream(gpu: FakeDriver, kind: Any) -> None:
    model = CudaModel(*two_steps())
    made, used = (int(gpu.cuStreamCreate(1)[1]) for _ in range(2))
    x = Foreign(gpu, np.zeros((3, 4), F32), stream=made)
    gpu.push(made, lambda: gpu.array(x.address, 12, F32).__setitem__(slice(None), rows(3).reshape(-1)))
    stream: Any = used
    if kind == "protocol":
        stream = type("S", (), {"__cuda_stream__": lambda self: (0, used)})()
    elif kind is not int:
        stream = type("S", (), {kind: used})()
    y = model(x, stream=stream)["y"]
    assert y.stream == used
    np.testing.assert_array_equal(y.numpy(), expected(rows(3)))


def test_streams_by_name() -> None:
    assert [stream_of(s) for s in (0, 1, 2, 77)] == [0, 0, 2, 77]
    for wrong in ("x", None, -1):
        with pytest.raises(errors.InputError):
            stream_of(wrong)


def test_an_input_called_stream(gpu: FakeDriver) -> None:
    found, sections = two_steps()
    found["inputs"][0][0] = "stream"
    model = CudaModel(found, sections)
    np.testing.assert_array_equal(model(stream=rows(2))["y"], expected(rows(2)))


def test_calls_on_two_streams_share_the_arena_in_order(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    streams = [int(gpu.cuStreamCreate(1)[1]) for _ in range(2)]
    found = [model(Foreign(gpu, rows(4, k), stream=streams[k % 2]))["y"] for k in range(6)]
    gpu._drain(streams[1])  # the last call's: it waits for those before
    for k, y in enumerate(found):
        np.testing.assert_array_equal(gpu.array(y.address, 16, F32).reshape(4, 4), expected(rows(4, k)))


def test_numpy_calls_behind_others(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    for k in range(30):
        y = model(Foreign(gpu, rows(4, k)))["y"]
        np.testing.assert_array_equal(model(rows(4, k + 1))["y"], expected(rows(4, k + 1)))
        np.testing.assert_array_equal(y.numpy(), expected(rows(4, k)))


def test_dlpack_in(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    x = Packed(gpu, rows(5))
    stream = int(gpu.cuStreamCreate(1)[1])
    np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(5)))
    np.testing.assert_array_equal(model(x, stream=stream)["y"].numpy(), expected(rows(5)))
    assert x.streams == [1, stream]
    kept = weakref.ref(x)
    model.synchronize()
    del x
    model(Foreign(gpu, rows(5)))
    model.synchronize()
    model(Foreign(gpu, rows(5)))  # a capsule is held until its work is known to be done
    gc.collect()
    assert kept() is None


def test_dlpack_inputs_stay_while_they_are_used(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    found = []
    for k in range(40):  # more than are held without a wait
        x = Packed(gpu, rows(3, k))
        weakref.finalize(x, lambda a=x.address: gpu.view(a, 48).fill(0xEE))
        found.append(model(x)["y"])
        del x
    for k, y in enumerate(found):
        np.testing.assert_array_equal(y.numpy(), expected(rows(3, k)))


def test_dlpack_elsewhere(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    with pytest.raises(errors.InputError, match="GPU 1"):
        model(Packed(gpu, rows(3), device=(2, 1)))
    with pytest.raises(errors.InputError):
        model(Packed(gpu, rows(3), device=(10, 0)))  # of no kind that we know


def test_dlpack_out(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    y = model(Foreign(gpu, rows(5)))["y"]
    assert y.__dlpack_device__() == (2, 0)
    stream = int(gpu.cuStreamCreate(1)[1])
    described = dlpack.read(capsule := y.__dlpack__(stream=stream))
    assert described.address == y.address and described.shape == (5, 4) and described.strides == (4, 1)
    gpu._drain(stream)  # which waits for the model
    np.testing.assert_array_equal(gpu.array(described.address, 20, F32).reshape(5, 4), expected(rows(5)))
    address = y.address
    del y
    gc.collect()
    assert model(Foreign(gpu, rows(5)))["y"].address != address  # the capsule has it
    del capsule
    assert model(Foreign(gpu, rows(5, 1)))["y"].address == address
    with pytest.raises(BufferError):
        model(Foreign(gpu, rows(5)))["y"].__dlpack__(dl_device=(1, 0))


def test_dlpack_capsules_that_are_taken(gpu: FakeDriver) -> None:
    y = CudaModel(*two_steps())(Foreign(gpu, rows(2)))["y"]
    gone = weakref.ref(y)
    capsule = y.__dlpack__(stream=-1)
    place = dlpack._pointer_of(capsule, b"dltensor")
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    rename(capsule, dlpack._USED)
    del capsule, y
    gc.collect()
    assert gone() is not None  # the consumer's
    dlpack.DLManagedTensor.from_address(place).deleter(place)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", sorted(dlpack.CODES))
def test_dlpack_dtypes(name: str) -> None:
    dtype = dlpack.BY_NAME[name]
    owner = np.zeros((2, 3, 1), dtype.numpy)
    found = dlpack.read(dlpack.write(owner, owner.ctypes.data, 1, dtype, owner.shape))
    assert found == (owner.ctypes.data, (2, 1), dtype, (2, 3, 1), (3, 1, 1))
    with pytest.raises(BufferError):
        dlpack.write(owner, 0, 0, dlpack.BY_NAME["int4"], ())


def test_dlpack_agrees_with_numpy() -> None:
    x = np.arange(12, dtype=np.int16).reshape(3, 4)
    found = dlpack.read(x[:, ::2].__dlpack__())
    assert found == (x.ctypes.data, (1, 0), dlpack.BY_NAME["int16"], (3, 2), (4, 2))


class TorchTensor:
    """As torch's tensors, as far as they are asked."""

    is_cuda = True
    dtype = "torch.float32"

    def __init__(self, gpu: FakeDriver, array: np.ndarray, strides: tuple[int, ...] | None = None) -> None:
        self.address, self.shape, self.strides = gpu.put(array), array.shape, strides

    def get_device(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return self.strides is None

    def stride(self) -> Any:
        return self.strides

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return self.address


def test_torch(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = int(gpu.cuStreamCreate(1)[1])
    torch: Any = ModuleType("torch")
    torch.Tensor, torch._C = TorchTensor, ModuleType("torch._C")
    torch._C._cuda_getCurrentRawStream = lambda device: stream
    monkeypatch.setitem(sys.modules, "torch", torch)
    model = CudaModel(*two_steps())
    y = model(TorchTensor(gpu, rows(4)))["y"]
    assert y.stream == stream  # torch's current one
    np.testing.assert_array_equal(y.numpy(), expected(rows(4)))
    turned = TorchTensor(gpu, rows(4).T.copy(), (1, 4))
    turned.shape = (4, 4)
    np.testing.assert_array_equal(model(turned)["y"].numpy(), expected(rows(4)))
    wrong = TorchTensor(gpu, rows(4))
    wrong.dtype = "torch.float64"
    with pytest.raises(errors.InputError, match="expects dtype float32; float64"):
        model(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"typestr": "<f8"}, "float64 was given"),
        ({"typestr": ">f4"}, "another dtype"),
        ({"shape": (2, 2, 4)}, "rank 2"),
        ({"mask": 1}, "mask"),
    ],
)
def test_wrong_arrays(gpu: FakeDriver, change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        CudaModel(*two_steps())(Foreign(gpu, rows(4), **change))


def test_misaligned(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    y = model(Foreign(gpu, rows(4), offset=4))["y"]
    assert gpu.calls["cuMemcpyDtoDAsync"] == 1
    np.testing.assert_array_equal(y.numpy(), expected(rows(4)))


CASES = [
    ((3, 4), (16, 4)), ((3, 4), (32, 4)), ((3, 4), (4, 12)), ((3, 4), (0, 4)), ((3, 4), (4, 0)), ((3, 4), (8, 4)),
    ((2, 3, 4), (4, 8, 24)), ((2, 3, 4), (96, 32, 8)), ((5, 1, 4), (20, 3, 4)), ((), ()), ((0, 4), (7, 7)),
    ((300, 7, 2), (4, 2400, 1200)), ((4, 70, 2), (2, 16, 1200)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "strides"), CASES)
def test_strides(gpu: FakeDriver, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 255, 1 << 15, dtype=np.uint8)
    source, stream = gpu.put(data), Handle(0)
    want = np.ndarray((*shape, 4), np.uint8, data, 0, (*strides, 1))
    device = driver_module.device()
    with device.current():
        to = device.allocate(max(1, want.nbytes))
        densify(device, Incoming(source, None, shape, strides, None, None), 4, to, stream)
    gpu.finish()
    np.testing.assert_array_equal(gpu.view(to, want.nbytes).reshape(want.shape), want)
    order = np.ndarray(shape, F32, data, 0, strides)
    assert is_dense(shape, strides, 4) == bool(order.flags.c_contiguous)


def test_negative_strides(gpu: FakeDriver) -> None:
    with pytest.raises(errors.InputError, match="negative"):
        CudaModel(*two_steps())(Foreign(gpu, rows(4), strides=(-16, 4)))


def test_numpy_among_arrays_of_the_gpu(gpu: FakeDriver) -> None:
    model = CudaModel(*sum_of_two())
    stream = int(gpu.cuStreamCreate(1)[1])
    found = []
    for k in range(5):
        a, b = (rows(6, s)[:, 0].copy() for s in (k, k + 9))
        found.append((model(a, Foreign(gpu, b, stream=(stream, 1)[k % 2]))["c"], a + b))
    for y, want in found:
        assert isinstance(y, DeviceArray)
        np.testing.assert_array_equal(y.numpy(), want)
    a = rows(6)[:, 0].copy()
    np.testing.assert_array_equal(model(a, a)["c"], a + a)


def test_large_arrays_are_not_pinned(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_MOST_PINNED", 1000)
    model = CudaModel(*two_steps())
    for n in (4, 500, 4):
        np.testing.assert_array_equal(model(rows(n))["y"], expected(rows(n)))
    assert gpu.used(host=True) < 2000


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


# ---------------------------------------------------------------- the driver's errors


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(errors.CudaError, match=r"pip install 'onnxc\[cuda\]'"):
        driver_module.load_driver.__wrapped__()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Failed to dlopen libcuda.so.1", "not installed"),
        ('"cuda" is an NVIDIA driver library and can only be found via system search.', "not installed"),
        ('Function "cuGraphLaunch" not found', "update the NVIDIA"),
    ],
)
def test_no_driver_or_an_old_one(monkeypatch: pytest.MonkeyPatch, text: str, advice: str) -> None:
    class Absent(FakeDriver):
        def cuInit(self, flags: int) -> Any:
            raise RuntimeError(text)

    monkeypatch.setattr(importlib, "import_module", lambda name: Absent())
    with pytest.raises(errors.CudaError, match=advice):
        driver_module.load_driver.__wrapped__()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    fake.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    with pytest.raises(errors.CudaError, match="CUDA_VISIBLE_DEVICES"):
        driver_module.load_driver.__wrapped__()
    use(FakeDriver(devices=1), monkeypatch)
    with pytest.raises(errors.CudaError, match="no GPU 3: this process sees 1"):
        CudaModel(*two_steps(), device=3).attach()
    assert driver_module.devices() == 1


def test_machine_code_that_the_driver_refuses(gpu: FakeDriver) -> None:
    found, sections = two_steps()
    sections["cubins:sm_90"] = b"#" * len(sections["cubins:sm_90"])
    with pytest.raises(errors.CudaError, match=r"CUDA_ERROR_NO_BINARY_FOR_GPU.*compile it for this architecture"):
        CudaModel(found, sections)(rows(1))
    sections["cubins:sm_90"] = b""
    with pytest.raises(errors.PackageError, match="outside of its section"):
        CudaModel(found, sections)(rows(1))
    del sections["cubins:sm_90"]
    with pytest.raises(errors.PackageError, match="cubins:sm_90"):
        CudaModel(found, sections).attach()


@pytest.mark.parametrize("more", [[], [size(1), size(1)]])
def test_machine_code_that_takes_other_arguments(gpu: FakeDriver, more: list[Any]) -> None:
    found, sections = two_steps()
    step = found["cuda"]["steps"][0]
    step["args"] = [*step["args"][:3], *more]
    with pytest.raises(errors.PackageError, match=r"'add' does not take \d arguments"):
        CudaModel(found, sections)(rows(1))
    for code in (CUresult.CUDA_ERROR_NOT_FOUND, None):
        found, sections = two_steps()
        if code is not None:
            gpu.failing["cuFuncGetParamInfo"] = code  # a driver that cannot tell
        np.testing.assert_array_equal(CudaModel(found, sections)(rows(1))["y"], expected(rows(1)))


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(memory=100_000)
    use(fake, monkeypatch)
    model = CudaModel(*two_steps())
    with pytest.raises(
        errors.LimitError, match=r"Fake GPU \(sm_90\) has no memory for \d+ bytes: \d+ of 100000 are free"
    ):
        model(rows(4000))
    np.testing.assert_array_equal(model(rows(500))["y"], expected(rows(500)))


def test_memory_that_is_kept_is_given_up_before_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(memory=400_000)
    use(fake, monkeypatch)
    model = CudaModel(*two_steps())
    x = Foreign(fake, rows(1000))
    held = [model(x)["y"] for _ in range(3)]
    del held[:]
    assert model.device.pool.idle_bytes > 0
    model.trim()
    assert model.device.pool.idle_bytes == 0
    held = [model(x)["y"] for _ in range(3)]
    del held[:]
    block = driver_module.device()
    with block.current():
        assert block.allocate(fake.memory - fake.used() + 20_000)


def test_memory_is_given_back(gpu: FakeDriver) -> None:
    before = gpu.used(), gpu.used(host=True)
    model = CudaModel(*two_steps())
    y = model(Foreign(gpu, rows(50)))["y"]
    model(rows(50))
    del model, y
    gc.collect()
    driver_module.device().pool.clear()
    foreign = 50 * 16 + 64  # the input, which nobody frees here
    assert (gpu.used() - foreign, gpu.used(host=True)) == before
    assert gpu.calls["cuModuleUnload"] == 2 and gpu.calls["cuGraphExecDestroy"] == 1


def test_garbage_that_refers_to_itself(gpu: FakeDriver) -> None:
    """What a model waits with when it goes is not gone before, though it is older."""
    device, before = driver_module.device(), gpu.used(host=True)
    with device.current():
        space = Workspace(device)
        model = CudaModel(*two_steps())
        model.join(space)
        model(rows(3))
    model.itself = model  # type: ignore[attr-defined]
    del model, space
    gc.collect()
    assert not gpu.misused and gpu.calls["cuModuleUnload"] == 2 and gpu.used(host=True) == before


def test_the_context_of_others_is_put_back(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    other = Handle(5)
    gpu.cuCtxPushCurrent(other)
    model(rows(2))
    assert gpu.cuCtxGetCurrent()[1] is other
    gpu.cuCtxPushCurrent(model.device.context)
    pushed = gpu.calls["cuCtxPushCurrent"]
    model(rows(2))
    assert gpu.calls["cuCtxPushCurrent"] == pushed


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


# ---------------------------------------------------------------- the real package


def test_the_driver_in_memory_has_the_real_one_s_functions() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    for name in (n for n in vars(FakeDriver) if n.startswith("cu")):
        assert callable(getattr(real, name)), name
    for name in ("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",):
        assert hasattr(real.CUkernelNodeAttrID, name)
    for kind in (FakeDriver.CUdevice_attribute, FakeDriver.CUfunction_attribute, FakeDriver.CUmemorytype):
        name = next(n for n, v in vars(FakeDriver).items() if v is kind)
        assert all(hasattr(getattr(real, name), member) for member in vars(kind))
    assert all(getattr(real.CUresult, member.name) == member for member in CUresult)


def test_the_real_structures_take_what_they_are_given() -> None:
    """Nodes of a graph, made with the real structures: only the driver's functions are in memory."""
    real = pytest.importorskip("cuda.bindings.driver")

    class Mixed(FakeDriver):
        CUstream = real.CUstream
        CUmemorytype, CUfunction_attribute = real.CUmemorytype, real.CUfunction_attribute
        CUkernelNodeAttrID, CUkernelNodeAttrValue = real.CUkernelNodeAttrID, real.CUkernelNodeAttrValue
        CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D = real.CUDA_KERNEL_NODE_PARAMS, real.CUDA_MEMCPY3D
        CUDA_MEMSET_NODE_PARAMS, CUDA_MEMCPY2D = real.CUDA_MEMSET_NODE_PARAMS, real.CUDA_MEMCPY2D
        CUlaunchConfig, CUlaunchAttribute = real.CUlaunchConfig, real.CUlaunchAttribute

    device = Device(Driver(Mixed()), 0)
    found, _ = cumulative()
    found["cuda"]["images"]["sm_90"][0]["cluster"] = 2
    flat = Program(found).at({"s0": 2}, "sm_90", 4)

    class Functions:
        images = Program(found).images["sm_90"]

        def function(self, kernel: int, arguments: int) -> Any:
            return real.CUfunction(99)

    for step in flat.steps:
        node = graph_module._node(device, Functions(), step)  # type: ignore[arg-type]
        node.place([4096 * (k + 1) for k in range(6)])
        params = next(p for name, p in vars(node).items() if name in ("_params", "_copy", "_fill"))
        assert params.getPtr()
        if isinstance(node, graph_module.KernelNode):
            assert (params.gridDimX, params.blockDimX, int(params.func)) == (2, 128, 99)
            identity, value = node._cluster_attribute()
            assert value.clusterDim.x == 2
            config, attribute = real.CUlaunchConfig(), real.CUlaunchAttribute()
            attribute.id, attribute.value = identity, value
            config.attrs, config.numAttrs = [attribute], 1
            config.hStream = real.CUstream(5)
            assert config.attrs[0].value.clusterDim.x == 2
        elif isinstance(node, graph_module.CopyNode):
            assert int(params.dstDevice) == node._to and params.WidthInBytes == 16
        else:
            assert int(params.dst) == 4096 * 4 and params.width == 4


def test_a_model_needs_no_gpu_before_a_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> Any:
        raise errors.CudaError("no driver")

    monkeypatch.setattr(driver_module, "load_driver", none)
    monkeypatch.setattr(driver_module, "_devices", {})
    model = CudaModel(*two_steps())
    model.save(tmp_path / "m.onnxc")
    assert model.explain().kernels and model.source and model.get_inputs() and repr(model)
    model.trim()
    model.synchronize()
    for needs in (lambda: model(rows(1)), lambda: model.architecture, lambda: onnxc.load(tmp_path / "m.onnxc")):
        with pytest.raises(errors.CudaError, match="no driver"):
            needs()
    assert driver_module.devices() == 0
