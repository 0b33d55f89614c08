"""The driver's errors, and cuda-bindings as they are. Without a GPU."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc import errors
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda import graph as graph_module
from onnxc.runtime.cuda.driver import Device, Driver
from onnxc.runtime.cuda.memory import BlockPool
from onnxc.runtime.cuda.model import CudaModel
from onnxc.runtime.cuda.program import Program
from onnxc.runtime.cuda.workspace import Workspace
from tests.cuda_kernels import Foreign, use
from tests.cuda_models import cumulative, expected, rows, size, two_steps
from tests.fake_cuda import CUresult, FakeDriver, Handle

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


def test_blocks_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is bounded, the largest goes first; where one of several is not to be had, none is taken."""
    fake = FakeDriver(memory=1 << 20)
    use(fake, monkeypatch)
    gpu = driver_module.device()
    pool = BlockPool(gpu, 5000)
    small, large, other = homes = [pool.home(*key) for key in ((1024, 1), (4096, 1), (1024, 2))]
    with gpu.current():
        first = pool.take(homes)
        for address, home in zip(first, homes, strict=True):
            home.give(address)
        assert pool.idle_bytes == 2048 and not large.idle and pool.home(4096, 1) is large
        assert pool.take([small, other]) == [first[0], first[2]] and pool.idle_bytes == 0
        third = pool.home(1024, 3)  # another stream has used it last
        third.give(first[2])
        with pytest.raises(errors.LimitError):
            pool.take([third, pool.home(1 << 20, 1)])
        assert pool.take([third]) == [first[2]] and pool.idle_bytes == 0
    assert fake.used() == 2048


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
