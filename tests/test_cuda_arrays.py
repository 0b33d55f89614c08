"""Arrays of the GPU: what comes in from other libraries, what goes out, copies of those with gaps. Without a GPU."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onnxc import errors
from onnxc.optim import SGD
from onnxc.runtime.cuda import dlpack
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda import graph as graph_module
from onnxc.runtime.cuda import model as model_module
from onnxc.runtime.cuda.arrays import DeviceArray, Incoming, is_dense, stream_of
from onnxc.runtime.cuda.copies import densify
from onnxc.runtime.cuda.model import CudaModel
from onnxc.runtime.cuda.workspace import Workspace
from onnxc.training.graph import Slot, Update
from onnxc.training.step import Source, TrainingStep
from tests.cuda_kernels import Foreign, Packed
from tests.cuda_models import expected, gathering, rows, sum_of_two, two_steps
from tests.fake_cuda import CUresult, FakeDriver, Handle

F32 = np.float32


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


def test_places_that_come_again_have_graphs_of_their_own(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    sets = [Foreign(gpu, rows(5, k)) for k in range(4)]
    for _ in range(2):
        for x in sets:
            model(x)
    updates, graphs = gpu.calls["cuGraphExecKernelNodeSetParams"], gpu.calls["cuGraphInstantiate"]
    assert graphs > 1
    for turn in range(3):
        for k, x in enumerate(sets):
            np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(5, k)), err_msg=f"{turn} {k}")
    assert gpu.calls["cuGraphExecKernelNodeSetParams"] == updates
    assert gpu.calls["cuGraphInstantiate"] == graphs <= 5


def test_graphs_of_places_that_come_no_more_make_room(gpu: FakeDriver) -> None:
    model = CudaModel(*two_steps())
    for phase in range(3):
        sets = [Foreign(gpu, rows(3, 7 * phase + k)) for k in range(graph_module.MOST_SETTLED)]
        for _ in range(12 << phase):
            for k, x in enumerate(sets):
                np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(3, 7 * phase + k)))
    made, gone = gpu.calls["cuGraphInstantiate"], gpu.calls["cuGraphExecDestroy"]
    assert gone > 0 and made - gone <= graph_module.MOST_SETTLED + 1
    (y,), _, _ = model.timed((sets[0],))
    np.testing.assert_array_equal(y.numpy(), expected(rows(3, 14)))
    model.trim()
    assert gpu.calls["cuGraphExecDestroy"] == gpu.calls["cuGraphInstantiate"]


@pytest.mark.parametrize("count", [12, 20, 40])
def test_more_places_than_graphs_do_not_drive_each_other_out(gpu: FakeDriver, count: int) -> None:
    model = CudaModel(*two_steps())
    sets = [Foreign(gpu, rows(2, k)) for k in range(count)]
    for _ in range(20):
        for k, x in enumerate(sets):
            np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(2, k)))
    assert gpu.calls["cuGraphInstantiate"] <= graph_module.MOST_SETTLED + 4


def test_graphs_of_a_model_have_so_many_nodes_together(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MOST_SETTLED_NODES", 5)  # two graphs of two steps
    model = CudaModel(*two_steps())
    for n in (2, 3):  # two sets of sizes
        sets = [Foreign(gpu, rows(n, k)) for k in range(4)]
        for _ in range(4):
            for k, x in enumerate(sets):
                np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(n, k)))
    assert gpu.calls["cuGraphInstantiate"] == 2 + 2
    model.trim()
    x = Foreign(gpu, rows(2, 9))
    np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(2, 9)))
    assert model._kernels.spare == 5


@pytest.mark.parametrize("failing", ["cuGraphExecKernelNodeSetParams", "cuGraphInstantiate"])
def test_a_graph_that_cannot_be_had_a_second_time(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    model = CudaModel(*two_steps())
    sets = [Foreign(gpu, rows(5, k)) for k in range(3)]
    for x in sets:
        model(x)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, failing, lambda *_: (CUresult.CUDA_ERROR_OUT_OF_MEMORY,))
        if failing == "cuGraphInstantiate":  # then the one that there is does
            np.testing.assert_array_equal(model(sets[1])["y"].numpy(), expected(rows(5, 1)))
        else:
            with pytest.raises(errors.LimitError):
                model(sets[1])
    for _ in range(3):
        for k, x in enumerate(sets):
            np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(5, k)))


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

    def is_neg(self) -> bool:
        return False

    def is_conj(self) -> bool:
        return False

    def resolve_neg(self) -> Any:
        return self

    def resolve_conj(self) -> Any:
        return self

    def data_ptr(self) -> int:
        return self.address


def test_torch(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_of(monkeypatch, stream := int(gpu.cuStreamCreate(1)[1]))
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


def test_torch_views_of_the_other_sign(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_of(monkeypatch, int(gpu.cuStreamCreate(1)[1]))
    model, x = CudaModel(*two_steps()), TorchTensor(gpu, -rows(4))
    for _ in range(2):
        x.is_neg = lambda: True  # type: ignore[method-assign]
        x.resolve_neg = lambda: TorchTensor(gpu, rows(4))  # type: ignore[method-assign]
        np.testing.assert_array_equal(model(x)["y"].numpy(), expected(rows(4)))


def torch_of(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """A torch whose current stream this is."""
    torch: Any = ModuleType("torch")
    torch.Tensor, torch._C = TorchTensor, ModuleType("torch._C")
    torch._C._cuda_getCurrentRawStream = lambda device: stream
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_inputs_that_are_read_where_they_are(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and results that wait for nothing are not read one by one; all others are, and give the same."""
    torch_of(monkeypatch, stream := int(gpu.cuStreamCreate(1)[1]))
    model, counted = CudaModel(*sum_of_two()), Counter[int]()
    read = Workspace.read

    def counting(space: Workspace, x: Any, at: int | None) -> Any:
        counted[0] += 1
        return read(space, x, at)

    monkeypatch.setattr(Workspace, "read", counting)
    a, b = (np.arange(8, dtype=F32) + k for k in range(2))
    x, other = TorchTensor(gpu, a), model.put(b)  # of the model's own stream
    model(x, TorchTensor(gpu, b))  # dtypes are met for the first time
    counted.clear()
    y = model(x, TorchTensor(gpu, b))["c"]
    z = model(y, x, stream=stream)["c"]
    assert not counted and y.stream == z.stream == stream
    np.testing.assert_array_equal(z.numpy(), a + a + b)
    far, host = TorchTensor(gpu, np.append(F32(0), b)), TorchTensor(gpu, b)
    far.address, far.shape = far.address + 4, (8,)
    host.get_device = lambda: 1  # type: ignore[method-assign]
    for given in ((x, other), (far, x), (x, b), (x, Foreign(gpu, b))):
        counted.clear()
        np.testing.assert_array_equal(model(*given)["c"].numpy(), a + b)
        assert counted
    np.testing.assert_array_equal(model(x, y, stream=int(gpu.cuStreamCreate(1)[1]))["c"].numpy(), a + a + b)
    with pytest.raises(errors.InputError, match="is on GPU 1, and the model on GPU 0"):
        model(x, host)
    x.dtype = "torch.float64"
    with pytest.raises(errors.InputError, match="expects dtype float32; float64"):
        model(x, y)


def test_results_of_many_sizes(gpu: FakeDriver) -> None:
    """A shape that comes after another one; the same again; and after `trim`."""
    model = CudaModel(*two_steps())
    given = {n: model.put(rows(n)) for n in (2, 5)}
    for n in (2, 2, 5, 5, 2, 0, 5):
        if not n:
            model.trim()
            continue
        np.testing.assert_array_equal(model(given[n])["y"].numpy(), expected(rows(n)))


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
