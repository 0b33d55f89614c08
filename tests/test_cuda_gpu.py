"""The runtime on a real GPU: kernels written in PTX, which the driver compiles, so nothing else is needed.

``pytest -m gpu tests/test_cuda_gpu.py``; torch and CuPy are tried where they are installed and see the GPU.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc import errors
from onnxc.runtime.cuda import graph as graph_module
from onnxc.runtime.cuda import model as model_module
from onnxc.runtime.cuda.arrays import DeviceArray, Incoming
from onnxc.runtime.cuda.copies import densify
from onnxc.runtime.cuda.memory import rounded
from onnxc.runtime.cuda.model import CudaModel
from tests.cuda_models import F32, Target, cumulative, expected, gathering, rows, sum_of_two, two_steps
from tests.small_models import parse
from tests.targets import this_gpu

pytestmark = pytest.mark.gpu

_HEAD = """.version 7.0
.target sm_70
.address_size 64
.visible .entry {name}({parameters}, .param .u64 scratch, .param .u64 profile)
{{
  .reg .pred %p<4>; .reg .f32 %f<4>; .reg .b32 %r<8>; .reg .b64 %d<16>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r4, %r1, %r2, %r3;
{body}
done: ret;
}}
"""

# z = x + y over n elements, one a thread.
_ADD = """
  ld.param.u32 %r5, [n]; setp.ge.u32 %p1, %r4, %r5; @%p1 bra done;
  mul.wide.u32 %d4, %r4, 4;
  ld.param.u64 %d1, [x]; add.u64 %d1, %d1, %d4; ld.global.f32 %f1, [%d1];
  ld.param.u64 %d2, [y]; add.u64 %d2, %d2, %d4; ld.global.f32 %f2, [%d2];
  add.rn.f32 %f3, %f1, %f2;
  ld.param.u64 %d3, [z]; add.u64 %d3, %d3, %d4; st.global.f32 [%d3], %f3;"""

# y = x * w, rows of four, one a program.
_SCALE = """
  setp.ge.u32 %p1, %r3, 4; @%p1 bra done;
  ld.param.u64 %d8, [n]; cvt.u64.u32 %d9, %r1; setp.ge.u64 %p2, %d9, %d8; @%p2 bra done;
  mad.lo.u32 %r5, %r1, 4, %r3; mul.wide.u32 %d4, %r5, 4; mul.wide.u32 %d5, %r3, 4;
  ld.param.u64 %d1, [x]; add.u64 %d1, %d1, %d4; ld.global.f32 %f1, [%d1];
  ld.param.u64 %d2, [w]; add.u64 %d2, %d2, %d5; ld.global.f32 %f2, [%d2];
  mul.rn.f32 %f3, %f1, %f2;
  ld.param.u64 %d3, [y]; add.u64 %d3, %d3, %d4; st.global.f32 [%d3], %f3;"""

# y = x[i], rows of four, one a program; the first index out of bounds is written down.
_TAKE = """
  setp.ge.u32 %p1, %r3, 4; @%p1 bra done;
  ld.param.u64 %d1, [i]; mul.wide.u32 %d2, %r1, 8; add.u64 %d1, %d1, %d2; ld.global.u64 %d3, [%d1];
  ld.param.u64 %d4, [rows]; setp.lt.u64 %p2, %d3, %d4; @%p2 bra good;
  setp.ne.u32 %p1, %r3, 0; @%p1 bra done;
  ld.param.u64 %d5, [error]; atom.global.cas.b64 %d6, [%d5], 0, 3;
  setp.ne.u64 %p3, %d6, 0; @%p3 bra done;
  ld.param.u32 %r5, [call]; cvt.u64.u32 %d7, %r5; st.global.u64 [%d5+8], %d7; st.global.u64 [%d5+16], %d3;
  bra done;
good:
  mul.wide.u32 %d5, %r3, 4;
  mad.lo.u64 %d6, %d3, 16, %d5; ld.param.u64 %d7, [x]; add.u64 %d7, %d7, %d6; ld.global.f32 %f1, [%d7];
  mul.wide.u32 %d8, %r1, 16; add.u64 %d8, %d8, %d5; ld.param.u64 %d9, [y]; add.u64 %d9, %d9, %d8;
  st.global.f32 [%d9], %f1;"""

_BODIES = {
    "add": (("u64 x", "u64 y", "u64 z", "u32 n"), _ADD),
    "scale": (("u64 x", "u64 w", "u64 y", "u64 n"), _SCALE),
    "take": (("u64 x", "u64 i", "u64 y", "u64 rows", "u64 n", "u64 error", "u32 call"), _TAKE),
}


def ptx(name: str) -> bytes:
    """The text of a kernel, as the driver takes it in place of machine code."""
    parameters, body = _BODIES[name]
    spelled = ", ".join(f".param .{p}" for p in parameters)
    return _HEAD.format(name=name, parameters=spelled, body=body).encode() + b"\0"


@pytest.fixture
def target() -> Target:
    return Target(this_gpu().architecture, ptx)


def on_gpu(array: np.ndarray) -> DeviceArray:
    """An array of the GPU without a library: what a model returns of one (rows of four)."""
    model = CudaModel(*two_steps(target=Target(this_gpu().architecture, ptx)))
    found = model(array)["y"]  # compiles it, and checks it
    np.testing.assert_array_equal(found, expected(array))
    dtype, home = model.get_inputs()[0].dtype, model.device.pool.home(rounded(array.nbytes), 0)
    with model.device.current():
        (address,) = model.device.pool.take([home])
        y = DeviceArray(array.shape, dtype, array.nbytes, home, model._timeline, address)
        model.device.upload(y.address, array)
    return y


# ---------------------------------------------------------------- without any library


@pytest.mark.parametrize("n", [0, 1, 7, 1000])
def test_numpy(target: Target, n: int) -> None:
    model = CudaModel(*two_steps(target=target))
    for seed in range(3):
        np.testing.assert_array_equal(model(rows(n, seed))["y"], expected(rows(n, seed)))


def test_sizes_come_and_go(target: Target) -> None:
    model = CudaModel(*two_steps(target=target))
    for n in (3, 900, 17, 50_000, 3, 900, 1):
        np.testing.assert_array_equal(model(rows(n))["y"], expected(rows(n)))


def test_without_pinned_memory(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_MOST_PINNED", 100)
    model = CudaModel(*two_steps(target=target))
    for n in (1, 900):
        np.testing.assert_array_equal(model(rows(n))["y"], expected(rows(n)))


@pytest.mark.parametrize("most", [1 << 16, 4])
def test_loops_copies_and_fills(target: Target, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(graph_module, "MOST_NODES", most)
    model = CudaModel(*cumulative(target=target))
    for n in (0, 1, 50):
        y, z = model(rows(n))
        np.testing.assert_array_equal(y, np.cumsum(rows(n), 0, dtype=F32))
        np.testing.assert_array_equal(z, y[-1] if n else np.zeros(4, F32))


def test_device_arrays_in_a_chain(target: Target) -> None:
    first, second = CudaModel(*two_steps(target=target)), CudaModel(*two_steps(target=target))
    x = on_gpu(rows(700))
    found = [second(first(x)["y"])["y"] for _ in range(20)]
    for y in found:
        np.testing.assert_array_equal(y.numpy(), expected(expected(rows(700))))


def test_numpy_among_them(target: Target) -> None:
    model, x = CudaModel(*sum_of_two(target=target)), rows(1)
    a = on_gpu(x)
    a.shape = (4,)
    for k in range(10):
        np.testing.assert_array_equal(model(a, rows(1, k)[0])["c"].numpy(), (x + rows(1, k))[0])


def test_errors(target: Target) -> None:
    model = CudaModel(*gathering(target=target))
    np.testing.assert_array_equal(model(rows(5), [4, 0])["y"], rows(5)[[4, 0]])
    with pytest.raises(errors.RunError, match=r"the index 7 is out of bounds.*Gather"):
        model(rows(5), [1, 7])
    y = model(on_gpu(rows(5)), np.array([1, -9]))["y"]
    with pytest.raises(errors.RunError, match="index -9"):
        y.numpy()
    np.testing.assert_array_equal(model(rows(5), [4, 0])["y"], rows(5)[[4, 0]])


def test_threads(target: Target) -> None:
    model, wrong = CudaModel(*two_steps(target=target)), []

    def work(seed: int) -> None:
        try:
            for k in range(30):
                x = rows(1 + (seed + k) % 5, seed)
                np.testing.assert_array_equal(model(x)["y"], expected(x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_strided_copies(target: Target) -> None:
    card = this_gpu()
    data = np.random.default_rng(0).integers(0, 255, 1 << 15, dtype=np.uint8)
    stream = card.driver.module.CUstream(0)
    with card.current():
        source = card.allocate(data.nbytes)
        card.upload(source, data)
        for shape, strides in [((3, 4), (4, 12)), ((2, 3, 4), (96, 32, 8)), ((300, 7, 2), (4, 2400, 1200))]:
            want = np.ascontiguousarray(np.ndarray((*shape, 4), np.uint8, data, 0, (*strides, 1)))
            to, found = card.allocate(want.nbytes), np.empty_like(want)
            densify(card, Incoming(source, None, shape, strides, None, None), 4, to, stream)
            card.driver("cuMemcpyDtoH", found.ctypes.data, to, found.nbytes)
            np.testing.assert_array_equal(found, want)
            card.free(to)
        card.free(source)


def test_machine_code_that_is_none(target: Target) -> None:
    found, sections = two_steps(target=target)
    sections[f"cubins:{target.architecture}"] = b"#" * len(sections[f"cubins:{target.architecture}"])
    with pytest.raises(errors.CudaError):
        CudaModel(found, sections)(rows(1))


def test_more_memory_than_there_is(target: Target) -> None:
    card = this_gpu()
    with card.current(), pytest.raises(errors.LimitError, match="no memory for"):
        card.allocate(1 << 44)


def test_profile(target: Target) -> None:
    report = CudaModel(*two_steps(target=target)).profile([rows(1000)], runs=5)
    assert report.profile is not None and len(report.profile.kernels) == 2
    assert all(0 < k.best < 0.01 for k in report.profile.kernels) and report.profile.peaks.bandwidth > 1e10


# ---------------------------------------------------------------- with libraries


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_of_torch(dtype: str) -> None:
    """A kernel that Triton makes, with tensors of 16 bits in and out, and with numpy's (ml_dtypes') own."""
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    text = f"({dtype}[N, 5] x, {dtype}[5] b) => ({dtype}[N, 5] y) {{ s = Add(x, b) y = Relu(s) }}"
    model = onnxc.compile(parse(text), target="cuda", cache=False)
    kind = getattr(torch, dtype)
    for n in (1, 7, 1000):
        x, b = torch.randn(n, 5, device="cuda").to(kind), torch.randn(5, device="cuda").to(kind)
        wanted = torch.relu((x.float() + b.float()).to(kind))
        y = model(x, b)["y"]
        assert torch.equal(torch.from_dlpack(y), wanted)
        again = model(model(x, b)["y"].numpy(), b)["y"]  # numpy's among the GPU's
        assert torch.equal(torch.from_dlpack(again), torch.relu((wanted.float() + b.float()).to(kind)))


def test_torch(target: Target) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    model = CudaModel(*two_steps(target=target))
    x = torch.from_numpy(rows(500)).cuda()
    for given in (x, x.T.contiguous().T, torch.cat([x[:1], x])[1:], x.repeat_interleave(2, 0)[::2]):
        y = torch.from_dlpack(model(given)["y"])
        np.testing.assert_array_equal(y.cpu().numpy(), expected(rows(500)))
    stream = torch.cuda.Stream()
    for k in range(20):
        with torch.cuda.stream(stream):
            z = torch.from_numpy(rows(500, k)).cuda(non_blocking=True)
            torch.cuda._sleep(1_000_000)
            z = z + 0
            y = torch.from_dlpack(model(z)["y"]) + 0
        found = model(z, stream=torch.cuda.current_stream())["y"].numpy()
        stream.synchronize()
        np.testing.assert_array_equal(y.cpu().numpy(), expected(rows(500, k)))
        np.testing.assert_array_equal(found, expected(rows(500, k)))
    with pytest.raises(errors.InputError, match="float64"):
        model(x.double())


def test_cupy(target: Target) -> None:
    cupy: Any = pytest.importorskip("cupy")
    model = CudaModel(*two_steps(target=target))
    with cupy.cuda.Stream(non_blocking=True):
        for k in range(10):
            y = model(cupy.asarray(rows(500, k)) + 0)["y"]
            np.testing.assert_array_equal(cupy.from_dlpack(y).get(), expected(rows(500, k)))
            np.testing.assert_array_equal(cupy.asarray(y).get(), expected(rows(500, k)))


@pytest.mark.parametrize(
    ("queries", "keys", "depth", "lower", "upper"),
    [
        (600, 700, 128, None, None),
        (512, 512, 128, None, 0),
        (2100, 2100, 64, None, None),
        (700, 700, 128, -300, 40),
        (1500, 1500, 64, None, 0),
        (1100, 1100, 128, None, 0),
    ],
)
def test_attention_of_warps_with_roles(
    queries: int, keys: int, depth: int, lower: int | None, upper: int | None
) -> None:
    """Against float64, where there are enough heads for them to be chosen on sm_90."""
    own = this_gpu()
    pytest.importorskip("triton")
    from tests.test_triton_attention import INF, Case, band, normal

    heads = 48
    case = Case(normal(1, heads, queries, depth), *(normal(1, heads, keys, depth) for _ in range(2)))
    if (lower, upper) != (None, None):
        case.masked(band(queries, keys, lower, upper, -INF), constant=True)
    model = onnxc.compile(case.model(), target="cuda", cache=False)
    assert ("roles=" in str(model.explain())) == (own.capability == (9, 0))
    found, again = (next(iter(model(*case.arrays).values())) for _ in range(2))
    np.testing.assert_allclose(found.astype(np.float64), case.wanted(), 4e-3, 4e-3)
    assert np.array_equal(found, again)
