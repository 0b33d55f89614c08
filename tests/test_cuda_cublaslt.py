"""Products by cuBLASLt: which of them are offered, what the library is told, and what runs where it is not there.

Without a GPU a library in memory multiplies (`tests/fake_cublas.py`). With one (``pytest --target cuda``), the same
cases run by the library that is installed.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc import gpu as gpu_module
from onnxc.choices import Choice, Decisions
from onnxc.codegen.triton.cubin import Image, KernelError
from onnxc.codegen.triton.program import Function, Program
from onnxc.errors import PackageError
from onnxc.planner.groups import FusionOptions
from onnxc.runtime.cuda import cublaslt
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda.driver import Driver
from onnxc.runtime.cuda.model import CudaModel
from onnxc.tuned import FILE, Record, Row
from tests.fake_cublas import FakeCublas
from tests.fake_cuda import FakeDriver, cubin
from tests.small_models import parse
from tests.targets import needs_triton, this_gpu

pytestmark = needs_triton
Array = np.ndarray[Any, Any]
NAMES = ("cublaslt", "cublaslt rank=2", "cublaslt rank=3")
TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float": np.dtype(np.float32)}
CLOSE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float": 1e-5}


def written(text: str, dtype: str) -> str:
    """A model's text with `T`s of a dtype, and constants of `t`'s dtype, as `e := 0.5`."""
    own = r"\1\1 = Constant<value_float=\2>() \1 = CastLike(\1\1, t)"
    return re.sub(r"(\w) := (\S+)", own, text.replace("T[", f"{dtype}["))


@dataclass(frozen=True)
class Case:
    """A model of `T`s, the sizes of its inputs, which of them are constants, and what it computes."""

    text: str
    sizes: tuple[tuple[int, ...], ...]
    exact: Callable[..., Array]
    constants: tuple[str, ...] = ()

    def arrays(self, dtype: str, seed: int = 0) -> list[Array]:
        rng = np.random.default_rng(seed)
        return [rng.standard_normal(shape).astype(np.float32).astype(TYPES[dtype]) for shape in self.sizes]

    def model(self, dtype: str, arrays: Sequence[Array]) -> onnx.ModelProto:
        model = parse(written(self.text, dtype), opset=20)
        inputs = list(model.graph.input)
        for k in reversed([k for k, i in enumerate(inputs) if i.name in self.constants]):
            model.graph.initializer.append(numpy_helper.from_array(arrays[k], inputs[k].name))
            del model.graph.input[k]
        return model

    @property
    def names(self) -> list[str]:
        return re.findall(r"T\[[^\]]*\] (\w+)", self.text.split("=>")[0])

    def given(self, arrays: Sequence[Array]) -> list[Array]:
        """Those that are inputs."""
        return [x for name, x in zip(self.names, arrays, strict=True) if name not in self.constants]

    def others(self, arrays: Sequence[Array], dtype: str, seed: int) -> list[Array]:
        """New inputs, with the same constants."""
        pairs = zip(self.names, arrays, self.arrays(dtype, seed), strict=True)
        return [old if name in self.constants else new for name, old, new in pairs]

    def wanted(self, arrays: Sequence[Array]) -> Array:
        return self.exact(*(x.astype(np.float64) for x in arrays))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turned(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


PAIR = "(T[17,40] a, T[40,24] b"
CASES = {
    "two inputs": Case(f"{PAIR}) => (T[17,24] y) {{ y = MatMul(a, b) }}", ((17, 40), (40, 24)), lambda a, b: a @ b),
    "odd": Case(
        "(T[33,67] a, T[67,29] b) => (T[33,29] y) { y = MatMul(a, b) }", ((33, 67), (67, 29)), lambda a, b: a @ b
    ),
    "constant": Case(
        "(T[130,72] a, T[72,96] w) => (T[130,96] y) { y = MatMul(a, w) }", ((130, 72), (72, 96)), lambda a, w: a @ w,
        ("w",),
    ),
    "odd constant": Case(
        "(T[130,71] a, T[71,93] w) => (T[130,93] y) { y = MatMul(a, w) }", ((130, 71), (71, 93)), lambda a, w: a @ w,
        ("w",),
    ),
    "right turned": Case(
        "(T[17,40] a, T[24,40] b) => (T[17,24] y) { t = Transpose<perm=[1,0]>(b) y = MatMul(a, t) }",
        ((17, 40), (24, 40)), lambda a, b: a @ b.T,
    ),
    "left turned": Case(
        "(T[512,2200] a, T[512,24] b) => (T[2200,24] y) { t = Transpose<perm=[1,0]>(a) y = MatMul(t, b) }",
        ((512, 2200), (512, 24)), lambda a, b: a.T @ b,
    ),
    "result turned": Case(
        "(T[48,40] a, T[40,24] b) => (T[24,48] y) { t = MatMul(a, b) y = Transpose<perm=[1,0]>(t) }",
        ((48, 40), (40, 24)), lambda a, b: (a @ b).T,
    ),
    "batch": Case(
        "(T[3,17,40] a, T[3,40,24] b) => (T[3,17,24] y) { y = MatMul(a, b) }", ((3, 17, 40), (3, 40, 24)),
        lambda a, b: a @ b,
    ),
    "batches, turned, odd": Case(
        "(T[2,3,17,41] a, T[2,3,23,41] b) => (T[2,3,17,23] y) { t = Transpose<perm=[0,1,3,2]>(b) y = MatMul(a, t) }",
        ((2, 3, 17, 41), (2, 3, 23, 41)), lambda a, b: a @ turned(b),
    ),
    "one left factor": Case(
        "(T[17,40] a, T[3,40,24] b) => (T[3,17,24] y) { y = MatMul(a, b) }", ((17, 40), (3, 40, 24)),
        lambda a, b: a @ b,
    ),
    "one right factor": Case(
        "(T[5,17,40] a, T[40,24] b) => (T[5,17,24] y) { y = MatMul(a, b) }", ((5, 17, 40), (40, 24)),
        lambda a, b: a @ b,
    ),
    "bias": Case(
        f"{PAIR}, T[24] v) => (T[17,24] y) {{ t = MatMul(a, b) y = Add(t, v) }}", ((17, 40), (40, 24), (24,)),
        lambda a, b, v: a @ b + v, ("b", "v"),
    ),
    "Gemm": Case(
        "(T[17,40] a, T[24,40] b, T[24] v) => (T[17,24] y) { y = Gemm<transB=1>(a, b, v) }",
        ((17, 40), (24, 40), (24,)), lambda a, b, v: a @ b.T + v, ("b", "v"),
    ),
    "bias of a batch, ReLU": Case(
        "(T[3,17,40] a, T[3,40,24] b, T[24] v) => (T[3,17,24] y) { t = MatMul(a, b) u = Add(v, t) y = Relu(u) }",
        ((3, 17, 40), (3, 40, 24), (24,)), lambda a, b, v: np.maximum(a @ b + v, 0),
    ),
    "ReLU": Case(
        f"{PAIR}) => (T[17,24] y) {{ t = MatMul(a, b) y = Relu(t) }}", ((17, 40), (40, 24)),
        lambda a, b: np.maximum(a @ b, 0),
    ),
    "residual": Case(
        f"{PAIR}, T[17,24] c) => (T[17,24] y) {{ t = MatMul(a, b) y = Add(c, t) }}", ((17, 40), (40, 24), (17, 24)),
        lambda a, b, c: a @ b + c,
    ),
    "residual of a batch": Case(
        "(T[3,17,40] a, T[3,40,24] b, T[3,17,24] c) => (T[3,17,24] y) { t = MatMul(a, b) y = Add(t, c) }",
        ((3, 17, 40), (3, 40, 24), (3, 17, 24)), lambda a, b, c: a @ b + c,
    ),
    "bias, residual": Case(
        f"{PAIR}, T[24] v, T[17,24] c) => (T[17,24] y) {{ t = MatMul(a, b) u = Add(t, v) y = Add(u, c) }}",
        ((17, 40), (40, 24), (24,), (17, 24)), lambda a, b, v, c: a @ b + v + c, ("b", "v"),
    ),
    "residual, bias, ReLU": Case(
        f"{PAIR}, T[17,24] c, T[24] v) => (T[17,24] y) {{ t = MatMul(a, b) u = Add(t, c) z = Add(u, v) y = Relu(z) }}",
        ((17, 40), (40, 24), (17, 24), (24,)), lambda a, b, c, v: np.maximum(a @ b + c + v, 0),
    ),
    "bias, GELU": Case(
        f'{PAIR}, T[24] v) => (T[17,24] y) {{ t = MatMul(a, b) u = Add(t, v) y = Gelu<approximate="tanh">(u) }}',
        ((17, 40), (40, 24), (24,)), lambda a, b, v: gelu(a @ b + v), ("b", "v"),
    ),
    "bias, GELU by a sigmoid": Case(
        f"{PAIR}, T[24] v) => (T[17,24] y) {{ t = MatMul(a, b) u = Add(t, v) e := 1.5957691 f := 0.0713548 "
        "z = Mul(u, u) w = Mul(z, f) o = Add(w, e) i = Mul(o, u) s = Sigmoid(i) y = Mul(u, s) }",
        ((17, 40), (40, 24), (24,)), lambda a, b, v: gelu(a @ b + v), ("b", "v"),
    ),
    "ReLU by a comparison": Case(
        f"{PAIR}) => (T[17,24] y) {{ t = MatMul(a, b) e := 0.0 g = Greater(t, e) y = Where(g, t, e) }}",
        ((17, 40), (40, 24)), lambda a, b: np.maximum(a @ b, 0),
    ),
    "rows that are not known": Case(
        "(T[N,40] a, T[40,24] b, T[24] v, T[N,24] c) => (T[N,24] y) { t = MatMul(a, b) u = Add(t, v) y = Add(u, c) }",
        ((19, 40), (40, 24), (24,), (19, 24)), lambda a, b, v, c: a @ b + v + c, ("b", "v"),
    ),
    "nothing is known": Case(
        "(T[B,N,K] a, T[B,K,M] b) => (T[B,N,M] y) { y = MatMul(a, b) }", ((3, 19, 33), (3, 33, 21)),
        lambda a, b: a @ b,
    ),
}  # fmt: skip
OTHERS = {
    "GELU by erf": "y = Gelu(t)",
    "a sigmoid": "y = Sigmoid(t)",
    "a bias for each row": "y = Add(t, r)",
    "a factor": "y = Mul(t, c)",
    "a bias behind ReLU": "u = Relu(t) y = Add(u, c)",
    "two residuals": "u = Add(t, c) y = Add(u, d)",
    "ReLU beside the sums": "u = Relu(t) y = Add(u, t)",
    "a little above zero": "e := 0.00001 y = Clip(t, e)",
    "ReLU up to what is not reached": "e := 0.0 f := 400.0 y = Clip(t, e, f)",
    "ReLU up to the most": "e := 0.0 f := 65504.0 y = Clip(t, e, f)",
    "a small slope": "y = LeakyRelu<alpha=0.0001>(t)",
    "ReLU and a little": "e := 0.00001 u = Relu(t) y = Add(u, e)",
    "from a threshold on": "y = ThresholdedRelu<alpha=0.01>(t)",
    "from a small threshold on": "y = ThresholdedRelu<alpha=0.0000002>(t)",
    "GELU and a little": 'e := 0.00001 u = Gelu<approximate="tanh">(t) y = Add(u, e)',
    "GELU up to a limit": 'e := 400.0 u = Gelu<approximate="tanh">(t) y = Min(u, e)',
    "GELU from a limit on": 'e := -0.1699 u = Gelu<approximate="tanh">(t) y = Max(u, e)',
    "quantized": "e := 0.5 u = Div(t, e) v = Round(u) w = Cast<to=3>(v) x = CastLike(w, t) y = Mul(x, e)",
    "ReLU of whole numbers": "u = Cast<to=6>(t) v = Relu(u) y = CastLike(v, t)",
    "a condition as a number": "e := 0.0 u = Greater(t, e) v = CastLike(u, t) y = Mul(t, v)",
    "GELU of other constants": "e := 1.6 f := 0.07 u = Mul(t, t) v = Mul(u, f) w = Add(v, e) x = Mul(w, t) "
    "s = Sigmoid(x) y = Mul(t, s)",
}
REVERSED = "<int64[1] s={-1}, int64[1] e={-1000}, int64[1] x={0}>"


WHERE_NOT = {
    **{k: f"(T[17,40] a, T[40,24] b, T[17,24] c, T[17,24] d, T[17,1] r) => (T[17,24] y) {{ t = MatMul(a, b) {v} }}"
       for k, v in OTHERS.items()},
    "left factors in reverse": f"(T[3,17,40] a, T[3,40,24] b) => (T[3,17,24] y) {REVERSED} "
                               "{ r = Slice(a, s, e, x, s) y = MatMul(r, b) }",
    "any number of left factors in reverse": f"(T[B,N,40] a, T[B,40,24] b) => (T[B,N,24] y) {REVERSED} "
                                             "{ r = Slice(a, s, e, x, s) y = MatMul(r, b) }",
    "residuals in reverse": f"(T[3,17,40] a, T[3,40,24] b, T[3,17,24] c) => (T[3,17,24] y) {REVERSED} "
                            "{ r = Slice(c, s, e, x, s) t = MatMul(a, b) y = Add(t, r) }",
    "one row": "(T[1,40] a, T[40,24] b) => (T[1,24] y) { y = MatMul(a, b) }",
    "one column": "(T[17,40] a, T[40,1] b) => (T[17,1] y) { y = MatMul(a, b) }",
    "another dtype": f"{PAIR}) => (double[17,24] y) {{ t = MatMul(a, b) y = Cast<to=11>(t) }}",
    "places in between": "(T[2,17,3,40] a, T[2,3,40,24] b) => (T[2,3,17,24] y) "
                         "{ t = Transpose<perm=[0,2,1,3]>(a) y = MatMul(t, b) }",
}  # fmt: skip


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that a choice takes before all others, as if a record said so."""
    wanted = [NAMES[0]]
    choose = Decisions.choose

    def chosen(self: Decisions, subject: str, names: Sequence[str], library: Sequence[str] = ()) -> Choice:
        best = {subject: wanted[0]} if wanted[0] in names else {}
        given = Decisions(best, "another occasion", refused=self.refused)
        return choose(given, subject, names, library)

    monkeypatch.setattr(Decisions, "choose", chosen)
    return wanted


def choices(model: onnxc.CompiledModel) -> list[Choice]:
    return [k.choice for k in model.explain().kernels if k.choice is not None]


def compiled(case: Case, arrays: Sequence[Array], dtype: str = "float16", **options: Any) -> CudaModel:
    found = onnxc.compile(case.model(dtype, arrays), **{"target": "cuda", "cache": False, **options})
    assert isinstance(found, CudaModel)
    return found


def check(found: Array, wanted: Array, dtype: str = "float16") -> None:
    assert found.shape == wanted.shape and found.dtype == TYPES[dtype]
    error = np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < CLOSE[dtype], error


# ---------------------------------------------------------------- a library in memory


@dataclass
class Machine:
    """A driver and a library, both in memory. Kernels do nothing: what they would write stays NaN."""

    driver: FakeDriver
    library: FakeCublas
    numbers: Iterator[int]

    def program(self, program: Program, architecture: int) -> list[Image]:
        return [image for image in self.each("", program.functions, architecture) if isinstance(image, Image)]

    def each(self, source: str, functions: Sequence[Function], architecture: int) -> list[Image | str]:
        return [self._image(f) for f in functions]

    def _image(self, function: Function) -> Image:
        name = f"kernel{next(self.numbers)}"
        self.driver.kernels[name] = len(function.parameters) + 2, lambda *arguments: None
        return Image(name, cubin(name), 0, 32 * function.warps, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    driver = FakeDriver()
    found = Machine(driver, FakeCublas(driver), itertools.count())
    monkeypatch.setattr(driver_module, "load_driver", lambda: Driver(driver))
    monkeypatch.setattr(driver_module, "_devices", {})
    monkeypatch.setattr(gpu_module, "compile_each", found.each)
    monkeypatch.setattr(gpu_module, "compile_program", found.program)
    monkeypatch.setattr(cublaslt, "loaded", lambda majors=(13,): found.library if 13 in majors else None)
    yield found
    gc.collect()
    driver.finish()
    assert driver.graphs == 0


def absent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cublaslt, "loaded", lambda *majors: None)


COPIED = "result turned"  # by a kernel afterwards
ROUNDED = (
    ("bias, GELU", "bfloat16"),
    ("bias, GELU by a sigmoid", "bfloat16"),
)  # constants of eight bits: another function


OFFERED = [(name, dtype) for name in CASES for dtype in TYPES if (name, dtype) not in ROUNDED]


@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
def test_gelu_with_rounded_constants_is_not_offered(name: str, dtype: str, machine: Machine) -> None:
    case = CASES[name]
    assert not any(NAMES[0] in c.candidates for c in choices(compiled(case, case.arrays(dtype), dtype)))


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, dtype in OFFERED if name != COPIED])
def test_what_the_library_is_told(name: str, dtype: str, machine: Machine, preferred: list[str]) -> None:
    case = CASES[name]
    arrays = case.arrays(dtype)
    model = compiled(case, arrays, dtype)
    for seed in (0, 1, 1):
        fresh = case.others(arrays, dtype, seed)
        check(model(*case.given(fresh))["y"], case.wanted(fresh), dtype)
    assert machine.library.calls and not machine.driver.launches
    assert "here by cuBLASLt 13.1.0" in choices(model)[0].why


@pytest.mark.parametrize("dtype", ["float16", "float"])
@pytest.mark.parametrize("name", WHERE_NOT)
def test_where_it_is_not_offered(name: str, dtype: str, machine: Machine) -> None:
    model = onnxc.compile(parse(written(WHERE_NOT[name], dtype), opset=20), target="cuda", cache=False)
    assert not any(NAMES[0] in c.candidates for c in choices(model))


def test_constants_of_gelu_may_have_the_digits_of_their_dtype(machine: Machine) -> None:
    text = CASES["bias, GELU by a sigmoid"].text.replace("1.5957691", "1.596")
    for dtype, offered in {"float16": True, "float": False}.items():
        model = onnxc.compile(parse(written(text, dtype), opset=20), target="cuda", cache=False)
        assert (NAMES[0] in choices(model)[0].candidates) is offered


def test_the_cost_model_never_takes_it_and_options_leave_it_out(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    off = compiled(case, arrays, fusion=FusionOptions(libraries=False))
    assert not set(NAMES) & set(choices(off)[0].candidates)
    exact = compiled(CASES["two inputs"], CASES["two inputs"].arrays("float"), "float", precision="tf32x3")
    assert not set(NAMES) & set(choices(exact)[0].candidates)
    preferred[0] = ""
    (choice,) = choices(compiled(case, arrays))
    assert choice.candidates[1:4] == NAMES and choice.chosen == choice.candidates[0]


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_float32_is_multiplied_as_asked(precision: str, machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float")
    model = compiled(case, arrays, "float", precision=precision)
    kinds: list[int] = []
    create = machine.library.cublasLtMatmulDescCreate
    machine.library.cublasLtMatmulDescCreate = lambda out, kind, scale: kinds.append(kind) or create(out, kind, scale)  # type: ignore[method-assign,func-returns-value]
    check(model(*case.given(arrays))["y"], case.wanted(arrays), "float")
    assert set(kinds) == {{"float32": 68, "tf32": 77}[precision]}


def test_ranks(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    for name, algorithm in zip(NAMES, (1, 2, 2), strict=True):  # there are two
        preferred[0] = name
        check(compiled(case, arrays)(*case.given(arrays))["y"], case.wanted(arrays))
        assert machine.library.algorithms[-1] == algorithm


def test_places_that_move_are_told_and_others_are_not(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias, residual"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    given = [[model.put(x) for x in case.given(case.arrays("float16", k))] for k in range(12)]
    kept = [model(*xs)["y"] for xs in given]
    for k, y in enumerate(kept):
        check(y.numpy(), case.wanted(case.others(arrays, "float16", k)))
    del kept
    model(*given[0])
    for _ in range(3):
        model(*given[0])
    before = machine.library.calls
    for _ in range(3):
        model(*given[0])
    assert machine.library.calls == before


def test_sizes_that_change(machine: Machine, preferred: list[str]) -> None:
    case = CASES["nothing is known"]
    model = compiled(case, case.arrays("float16"))
    rng = np.random.default_rng(0)
    for b, n, k, m in [(1, 2, 3, 4), (4, 5, 6, 7), (0, 2, 3, 4), (2, 0, 3, 4), (1, 1, 1, 1), (3, 9, 16, 8)]:
        x, y = (rng.standard_normal(s).astype(np.float16) for s in ((b, n, k), (b, k, m)))
        check(model(x, y)["y"], x.astype(np.float64) @ y) if x.size and y.size else None
        assert model(x, y)["y"].shape == (b, n, m)
    calls = machine.library.calls
    model(np.zeros((2, 3, 0), np.float16), np.zeros((2, 0, 4), np.float16))  # sums of nothing are the kernel's
    assert machine.library.calls == calls and machine.driver.launches


def test_a_profile_runs_it_step_by_step(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    report = model.profile(case.given(arrays), runs=2, warm_up=1)
    (kernel,) = report.kernels
    assert kernel.times is not None and kernel.choice is not None and kernel.choice.chosen == NAMES[0]
    assert machine.library.calls >= 4 and not machine.driver.launches


def test_several_models_at_once(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias, residual"]
    models = [(arrays, compiled(case, arrays)) for arrays in (case.arrays("float16", k) for k in range(3))]
    wrong: list[BaseException] = []

    def work(arrays: list[Array], model: CudaModel) -> None:
        try:
            for _ in range(20):
                check(model(*case.given(arrays))["y"], case.wanted(arrays))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_handles_are_given_back(machine: Machine, preferred: list[str]) -> None:
    case = CASES["rows that are not known"]
    model = compiled(case, case.arrays("float16"))
    for n in (3, 4, 5):
        model(np.ones((n, 40), np.float16), np.ones((n, 24), np.float16))
    model.trim()
    gc.collect()
    assert len(machine.library.alive) == 1  # the library's own


# ---------------------------------------------------------------- where there is no library


def test_without_a_library_its_kernel_runs(
    machine: Machine, preferred: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    compiled(case, arrays).save(tmp_path / "m.onnxc")
    absent(monkeypatch)
    model = onnxc.load(tmp_path / "m.onnxc")
    model(*case.given(arrays))
    assert len(machine.driver.launches) == 1 and not machine.library.calls
    (choice,) = choices(model)
    assert f"here {choice.candidates[0]} runs: cuBLASLt was not found: pip install nvidia-cublas" in choice.why
    assert "was not found" in str(model.explain())


@pytest.mark.parametrize("function", ["cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatrixLayoutCreate"])
def test_a_library_that_fails_is_as_none(function: str, machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    machine.library.failing[function] = 15
    model(*case.given(arrays))
    assert len(machine.driver.launches) == 1 and not machine.library.calls
    (choice,) = choices(model)
    if function == "cublasLtCreate":
        assert f"{choice.candidates[0]} runs: the library does not begin: {function}: status 15" in choice.why
    else:
        assert "by cuBLASLt 13.1.0, but for sizes that it knows no way for" in choice.why


def test_a_product_that_is_refused_is_the_kernels(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    machine.library.failing["cublasLtMatmul"] = 13
    for _ in range(2):
        model(*case.given(arrays))
    assert len(machine.driver.launches) == 2
    assert "but for sizes that it knows no way for" in choices(model)[0].why


@pytest.mark.parametrize("error", [KeyboardInterrupt, ctypes.ArgumentError])
def test_what_stops_a_capture_leaves_no_trace(
    error: type[BaseException], machine: Machine, preferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)

    def stopped(*arguments: Any) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(machine.library, "cublasLtMatmul", stopped)
        with pytest.raises(error):
            model(*case.given(arrays))
    check(model(*case.given(arrays))["y"], case.wanted(arrays))


def test_kernels_of_the_library_are_loaded_before_anything_runs(
    machine: Machine, preferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    done: list[str] = []
    for name in ("cuGraphInstantiate", "cuGraphLaunch"):
        own = getattr(machine.driver, name)
        monkeypatch.setattr(machine.driver, name, lambda *a, n=name, f=own: (done.append(n), f(*a))[1])
    compiled(case, arrays)(*case.given(arrays))
    assert done == ["cuGraphInstantiate", "cuGraphInstantiate", "cuGraphLaunch"]


def test_a_library_that_does_not_begin_is_asked_again(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    machine.library.failing["cublasLtCreate"] = 3
    compiled(case, arrays)(*case.given(arrays))
    assert not machine.library.calls
    machine.library.failing.clear()
    check(compiled(case, arrays)(*case.given(arrays))["y"], case.wanted(arrays))


def test_an_earlier_version_where_the_later_one_does_not_begin(
    machine: Machine, preferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later, earlier = machine.library, FakeCublas(machine.driver)
    later.failing["cublasLtCreate"] = 1
    earlier.version = 120900
    both = {13: later, 12: earlier}
    monkeypatch.setattr(cublaslt, "loaded", lambda majors=(13, 12): next((both[m] for m in majors), None))
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    check(model(*case.given(arrays))["y"], case.wanted(arrays))
    assert "here by cuBLASLt 12.9.0" in choices(model)[0].why


DAMAGE: dict[str, Any] = {
    "product": [[17, 24, 40], ["x", 24, 40, 1], 3, None, [18, 24, 40, 1], [1 << 30, 24, 40, 1], [[[17.0]], 24, 40, 1]],
    "a": [
        None,
        3,
        [],
        [["input", 9, 0], 40, 0, 0],
        [["weights", 0, 0], "q", 0, 0],
        [["input", 0, 0], 41, 0, 0],
        [["input", 0, 2], 40, 0, 0],
        [["error"], 40, 0, 0],
    ],
    "b": [[["weights", 0, 0], 250, 0, 0], [["weights", 0, 1 << 45], 24, 0, 0]],
    "d": [None, [["output", 0]], [["arena", 7, 0], 24, 0, 0], [["output", 0, 0], 25, 0, 0]],
    "bias": [["input", -1, 0], 7, ["weights", 0], ["weights", 0, 4096]],
    "epilogue": ["exp", 3, None, ["relu"]],
    "dtype": ["float8", None, {}],
    "precision": ["float64", None],
    "rank": ["first", None, 1e400],
    "call": ["x"],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in DAMAGE.items() for v in values], ids=str)
def test_damaged_files_are_refused(key: str, value: Any, machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    manifest = json.loads(json.dumps(model.manifest))
    (step,) = manifest["cuda"]["steps"]
    step[key] = value
    damaged = CudaModel(manifest, model._sections)
    with pytest.raises(PackageError, match="damaged"):
        damaged(*case.given(arrays))


def test_results_lie_row_by_row_whatever_a_file_says(machine: Machine, preferred: list[str]) -> None:
    case = CASES["constant"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    manifest = json.loads(json.dumps(model.manifest))
    manifest["cuda"]["steps"][0]["d"][1:] = [97, 0, 1]
    with pytest.raises(PackageError, match="beyond its end"):
        CudaModel(manifest, model._sections)(*case.given(arrays))


def test_odd_numbers_in_files_are_the_kernels(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    arrays = case.arrays("float16")
    model = compiled(case, arrays)
    a = ["input", 0, 0]
    for change in (
        {"rank": 10**9}, {"rank": -5}, {"d": [["output", 0, 0], 3, 0, 0]}, {"bias": ["weights", 0, 2]},
        {"product": [1 << 31, 24, 40, 1]}, {"a": [a, 1 << 60, 0, 0]}, {"a": [a, -40, 0, 0]}, {"a": [a, 40, -680, 0]},
    ):  # fmt: skip
        manifest = json.loads(json.dumps(model.manifest))
        manifest["cuda"]["steps"][0] |= change
        CudaModel(manifest, model._sections)(*case.given(arrays))
    assert len(machine.driver.launches) == 6


def test_a_report_of_a_choice_among_nothing(machine: Machine, preferred: list[str]) -> None:
    case = CASES["bias"]
    model = compiled(case, case.arrays("float16"))
    manifest = json.loads(json.dumps(model.manifest))
    manifest["kernels"][0]["choice"] |= {"candidates": [], "instead": ""}
    machine.library.failing["cublasLtCreate"] = 1
    damaged = CudaModel(manifest, model._sections)
    damaged.attach()
    assert "its kernel runs" in choices(damaged)[0].why


# ---------------------------------------------------------------- measurements


def test_the_tuner_measures_it_where_it_is_there(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["two inputs"]
    arrays = case.arrays("float16")
    options: dict[str, Any] = {"cache": tmp_path, "mode": "max-autotune"}
    with monkeypatch.context() as patch:
        absent(patch)
        model = compiled(case, arrays, **options)
        assert not choices(model)[0].chosen.startswith("cublaslt")
        (row,) = Record(tmp_path / FILE).rows(Record(tmp_path / FILE).places()[0]).values()
        assert not set(NAMES) & {*row.seconds, *row.refused}
        before = next(machine.numbers)
        compiled(case, arrays, **options)  # nothing is left to be measured
        assert next(machine.numbers) == before + 1
    monkeypatch.setattr("onnxc.autotune.agree", lambda *arguments: True)  # kernels do nothing here
    work = machine.driver.push

    def quick(stream: int, run: Callable[[], None]) -> None:
        def timed() -> None:
            machine.driver._clock -= 0.0005
            run()

        work(stream, timed)

    monkeypatch.setattr(machine.driver, "push", quick)
    (choice,) = choices(compiled(case, arrays, **options))
    assert choice.chosen in NAMES and "measured on Fake GPU" in choice.why
    (row,) = Record(tmp_path / FILE).rows(Record(tmp_path / FILE).places()[0]).values()
    assert row.best == choice.chosen and set(NAMES) <= set(row.seconds)
    absent(monkeypatch)  # what a record says holds on a machine that has neither
    elsewhere = compiled(case, arrays, target="cuda:sm_90", cache=tmp_path / "b", record=tmp_path / FILE)
    assert choices(elsewhere)[0].chosen == row.best


BIG = "(float16[512,512] a, float16[512,512] b) => (float16[512,512] y) { y = MatMul(a, b) }"


def test_the_best_tile_where_the_library_is_left_out_or_absent(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"target": "cuda:sm_90", "cache": tmp_path, "record": tmp_path / FILE}
    (choice,) = choices(onnxc.compile(parse(BIG), **options))
    first, *others = [c for c in choice.candidates if c not in NAMES]
    best = others[-1]
    seconds = {NAMES[0]: 1e-6, best: 2e-6, others[0]: 3e-6, first: 4e-6, "gone": 1e-9}
    place = f"NVIDIA Z, sm_90, Triton {gpu_module._triton_version()}"
    Record(tmp_path / FILE).add(place, {choice.subject: Row(NAMES[0], seconds)})
    off = onnxc.compile(parse(BIG), **options, fusion=FusionOptions(libraries=False))
    assert choices(off)[0].chosen == best and choices(off)[0].why.startswith(f"measured on {place}")
    model = onnxc.compile(parse(BIG), **options)
    assert choices(model)[0].chosen == NAMES[0] and choices(model)[0].instead == best
    assert model.source == off.source
    absent(monkeypatch)
    assert f"here {best} runs: cuBLASLt was not found" in choices(onnxc.compile(parse(BIG), **options))[0].why
    Record(tmp_path / FILE).add(place, {choice.subject: Row(NAMES[0], {**seconds, best: 5e-6})})
    assert choices(onnxc.compile(parse(BIG), **options))[0].instead == others[0]  # not the cache's


@pytest.mark.parametrize("best", ["", NAMES[0]])
def test_a_tile_that_does_not_compile_gives_way_to_another_tile(
    best: str, machine: Machine, preferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preferred[0] = best
    rounds: list[str] = []

    def program(program: Program, architecture: int) -> list[Image]:
        (function,) = program.functions
        rounds.append(program.kernels[function.name])
        if rounds[-1] == rounds[0]:
            raise KernelError("it does not fit", [function.name])
        return machine.program(program, architecture)

    monkeypatch.setattr(gpu_module, "compile_program", program)
    (choice,) = choices(onnxc.compile(parse(BIG), target="cuda:sm_90", cache=False))
    first, second, *_ = [c for c in choice.candidates if c not in NAMES]
    assert len(rounds) == 2
    if best:
        assert choice.chosen == best and choice.instead == second
    else:
        assert choice.chosen == second and choice.why.startswith(f"cost model: {first} does not compile")


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), OFFERED)
def test_answers_of_the_real_library(name: str, dtype: str, preferred: list[str]) -> None:
    this_gpu()
    if cublaslt.loaded() is None:
        pytest.skip(cublaslt.ABSENT)
    case = CASES[name]
    arrays = case.arrays(dtype)
    model = compiled(case, arrays, dtype)
    found = [model(*case.given(arrays))["y"] for _ in range(3)]
    check(found[0], case.wanted(arrays), dtype)
    assert all(y.tobytes() == found[0].tobytes() for y in found)
    assert f"here by cuBLASLt {cublaslt.version_of(cublaslt.loaded())}" in choices(model)[0].why
    assert all(not site.flat.instead for site in model._sites.values())
