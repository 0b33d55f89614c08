"""Compiling for GPUs where there is none: machine code, files, several architectures, and what can go wrong."""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from models.zoo.store import MICRO_GRAPHS, NAMES, ZooModel
from onnxc import gpu
from onnxc.codegen.triton import cubin
from onnxc.codegen.triton.cubin import Image
from onnxc.codegen.triton.program import Function, Place, Program
from onnxc.errors import CudaError, InputError, ToolchainError
from onnxc.ir.expr import Sym
from onnxc.runtime.cuda import driver
from onnxc.runtime.cuda.model import CudaModel
from tests.fake_cuda import FakeDriver
from tests.small_models import parse
from tests.targets import needs_triton

pytestmark = needs_triton
ADD = "(float[N, 7] x, float[7] b) => (float[N, 7] y) { y = Add(x, b) }"
COPY = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k0(a, b):\n    {}\n"
LANES = "i = tl.arange(0, 128)\n    tl.store(b + i, tl.load(a + i))"


def copying(body: str = LANES, loose: Sequence[int] = ()) -> tuple[str, list[Function]]:
    return COPY.format(body), [Function("k0", (("a", "*fp32"), ("b", "*fp32")), 1, 3, tuple(loose))]


def image(source: str, functions: Sequence[Function], architecture: int) -> Image:
    """The machine code of one function.

    Raises:
        ToolchainError: Triton refuses it.
    """
    (found,) = cubin.compile_each(source, functions, architecture)
    if isinstance(found, str):
        raise ToolchainError(found)
    return found


def test_a_file_for_several_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnxc.compile(parse(ADD), target="cuda:sm_90,sm_80", cache=False)
    assert "k0" in str(model.explain()) and "def k0" in model.source
    assert set(model.manifest["cuda"]["images"]) == {"sm_80", "sm_90a"}
    model.save(tmp_path / "m.onnxc")

    def nothing(ordinal: int = 0) -> Any:
        raise CudaError("there is no GPU")

    monkeypatch.setattr("onnxc.runtime.cuda.workspace.find_device", nothing)
    with pytest.raises(CudaError):
        model(np.ones((2, 7), np.float32), np.ones(7, np.float32))
    with pytest.raises(CudaError):
        onnxc.load(tmp_path / "m.onnxc")


def test_a_model_for_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(devices=2, capability=(8, 6))
    monkeypatch.setattr(driver, "load_driver", lambda: driver.Driver(fake))
    monkeypatch.setattr(driver, "_devices", {})
    model = onnxc.compile(parse(ADD), target="cuda", device=1, cache=False)
    assert isinstance(model, CudaModel) and model.device.ordinal == 1 and model.architecture == "sm_86"
    model.attach(1)
    with pytest.raises(InputError, match="GPU 1 already"):
        model.attach(0)
    for options in ({"device": 2, "target": "cuda"}, {"device": 1}, {"device": 1, "target": "cuda:sm_90"}):
        with pytest.raises((InputError, CudaError), match=r"no GPU 2|target='cuda'|this GPU is"):
            onnxc.compile(parse(ADD), cache=False, **options)


@pytest.mark.parametrize("target", ["cuda:", "gpu", "cuda:sm_90a", "cuda:90", "cuda:sm_70", "cuda:sm_90,", "cuda:sm_9"])
def test_wrong_targets(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(ordinal: int = 0) -> Any:
        raise CudaError("there is no GPU")

    monkeypatch.setattr(gpu, "device", nothing)
    with pytest.raises((InputError, CudaError)):
        onnxc.compile(parse(ADD), target=target, cache=False)


def test_architectures_that_do_not_exist() -> None:
    with pytest.raises(ToolchainError):
        onnxc.compile(parse(ADD), target="cuda:sm_999", cache=False)


def test_only_whole_buffers_are_aligned() -> None:
    """A step's part of a sequence begins where it may: vectors of 16 bytes must not be read there."""
    t, n = Sym("t0"), Sym("s0")
    assert Place("arena", 0).is_aligned and Place("input", 0, t * 32).is_aligned
    assert not Place("input", 0, t * 28).is_aligned and not Place("arena", 0, t * n * 4).is_aligned
    plain, loose = (image(*copying(loose=k), 90).code for k in ((), (0, 1)))
    assert plain != loose


def test_stages_that_do_not_fit_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """i = tl.arange(0, 32)
    at = i[:, None] * 32 + i[None, :]
    acc = tl.zeros((32, 32), tl.float32)
    for k in range(0, 1024, 32):
        acc = tl.dot(tl.load(a + at + k), tl.load(b + at + k), acc)
    tl.store(a + at, acc)"""
    source, _ = copying(body)
    function = Function("k0", (("a", "*fp32"), ("b", "*fp32")), 4, 3)
    free = image(source, [function], 80)
    monkeypatch.setitem(cubin.SHARED, 80, free.shared - 1)
    fewer = image(source, [function], 80)
    assert fewer.shared < free.shared
    monkeypatch.setitem(cubin.SHARED, 80, 1)
    with pytest.raises(ToolchainError, match="shared memory"):
        image(source, [function], 80)


def test_refused_kernels_are_named() -> None:
    with pytest.raises(ToolchainError, match="cannot compile k0"):
        image(*copying("tl.store(b, nothing)"), 90)
    found = cubin._elsewhere(*copying("tl.store(b, nothing)"), 90)["k0"]
    assert isinstance(found, str) and "cannot compile k0" in found


def test_the_process_that_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ignores what lies in the working directory, survives noise on its output, and its death is told."""
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    found = cubin._elsewhere(*copying(), 90)
    assert not isinstance(found["k0"], str) and found["k0"].code
    run = subprocess.run

    def noisy(*args: Any, **options: Any) -> Any:
        answer = run(*args, **options)
        answer.stdout = "hello\n" + answer.stdout
        return answer

    monkeypatch.setattr(cubin.subprocess, "run", noisy)
    assert cubin._elsewhere(*copying(), 90) == found
    dead = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(cubin.subprocess, "run", lambda *args, **options: dead)
    with pytest.raises(ToolchainError, match="-9"):
        cubin._elsewhere(*copying(), 90)


# ---------------------------------------------------------------- every kernel of the zoo

TILE = r"tl\.arange\(0, \d+\)|tl\.(?:zeros|full)\(\([^)]*\)"
NUMBER = re.compile(rf"({TILE})|(?<![\w.])\d+(\.\d*(?:e[+-]?\d+)?)?(?![\w.])")
NAME = re.compile(r"\b[A-Za-z_]\w*")
WORD = re.compile(rf"{TILE}|\b(?:tl|gl)\.[\w.]+|\box_\w+")


def alike(text: str) -> str:
    """A kernel without the sizes of its tensors: of these stays by what they can be divided, and how wide they are."""

    def number(found: re.Match[str]) -> str:
        if found[1] or float(found[0]) in (0, 1):
            return found[0]
        if found[2]:
            return "#."
        n = int(found[0])
        return f"#{min(n & -n, 16)}-{(n.bit_length() > 15) + (n.bit_length() > 31)}"

    return NUMBER.sub(number, text)


class Kernels:
    """Compiles each kernel once, in whichever test of whichever process it is met first, if it has something new.

    For sm_90 that is a line, but for sizes, or such types, or as many warps and stages. For the other architectures it
    is two things in one kernel, of those that code is made of: functions of Triton on tiles of a shape, types, warps,
    stages. With `every` each text is new.
    """

    def __init__(self, folder: Path, every: bool) -> None:
        self.folder, self.every = folder / f"kernels-{every}", every
        self.folder.mkdir(exist_ok=True)

    def compile_program(self, program: Program, architecture: int, workers: int | None = None) -> list[Image]:
        """In the place of `cubin.compile_program`; the images are empty."""
        new = [f for f in program.functions if self._is_new(program.kernels[f.name], f, architecture)]
        if new:  # else a process begins for nothing, where there is one
            cubin.compile_program(replace(program, functions=new), architecture, workers=1)
        return [Image(f.name, b"", 0, 32 * f.warps, 0) for f in program.functions]

    def _is_new(self, text: str, function: Function, architecture: int) -> bool:
        parts = [repr((text, replace(function, name="")))]
        if not self.every:
            parts = lines_of(text, function) if architecture == 90 else pairs_of(text, function)
        firsts = [self._is_first(f"{architecture} {part}") for part in parts]  # all of them are noted
        return any(firsts)

    def _is_first(self, part: str) -> bool:
        try:
            (self.folder / hashlib.sha256(part.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def lines_of(text: str, function: Function) -> list[str]:
    """What a kernel is made of, line by line; parameters by their types."""
    types = dict(function.parameters)
    way = f"{sorted({*types.values()})}, {function.warps} warps, {function.stages} stages, {len(function.loose)} loose"
    typed = NAME.sub(lambda name: types.get(name[0], name[0]), text)
    return [way, *(alike(line.strip()) for line in typed.splitlines())]


def pairs_of(text: str, function: Function) -> list[str]:
    """Two functions of Triton, types and so on of which a kernel has both."""
    words = {*WORD.findall(text), *(t for _, t in function.parameters), f"{function.warps} warps"}
    words |= {f"{function.stages} stages", f"loose: {bool(function.loose)}"}
    return [" ".join(pair) for pair in itertools.combinations_with_replacement(sorted(words), 2)]


def test_a_kernel_is_compiled_for_each_type(tmp_path: Path) -> None:
    kernels, (text, (whole,)) = Kernels(tmp_path, every=False), copying()
    half = replace(whole, parameters=(("a", "*fp16"), ("b", "*fp16")))
    other = copying(LANES.replace("+ i", "+ i + 7"))[0]
    mixed = replace(whole, parameters=(("a", "*fp16"), ("b", "*fp32")))
    for architecture in (80, 90):
        seen = [(text, whole), (text, whole), (text, half), (text, half), (other, half), (text, mixed)]
        new = [kernels._is_new(of, function, architecture) for of, function in seen]
        assert new == [True, False, True, False, architecture == 90, True], architecture


HALVES = ("bert", "gpt2", "llama", "mobilenetv2", "resnet50")  # models whose kernels of halves are compiled every time


def _zoo_case(name: str, dtype: str | None) -> Any:
    """Those of eight images and texts differ from those of one in sizes alone."""
    rare = name.endswith("_b8") or (dtype is not None and name not in HALVES)
    return pytest.param(name, dtype, marks=[pytest.mark.exhaustive] if rare else [])


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["classes", "every"])
@pytest.mark.parametrize(("name", "dtype"), [_zoo_case(n, d) for n in NAMES for d in (None, "float16")])
def test_kernels_of_the_zoo(
    zoo: Callable[[str], ZooModel],
    session_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str | None,
    every: bool,
) -> None:
    monkeypatch.setattr(gpu, "compile_program", Kernels(session_folder, every).compile_program)
    model = onnxc.compile(zoo(name).path, target="cuda:sm_80,sm_90,sm_100", dtype=dtype, cache=False)
    report = model.explain()
    assert report.gpu == "sm_80, sm_90, sm_100"
    if name in MICRO_GRAPHS:
        assert len(report.kernels) <= (4 if name == "m_se" else 1)
