"""Saved models: one file that loads where there is no compiler, and says what is wrong where it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxc
from onnxc import errors
from onnxc.runtime import cpu
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.package import open_package, write_package
from tests.own_process import python
from tests.small_models import floats, parse

TEXT = "(float[N,8] x) => (float[N,4] y) { z = MatMul(x, w) s = Add(z, b) y = Relu(s) }"
W, B = floats(8, 4), floats(4)


def proto() -> onnx.ModelProto:
    model = parse(TEXT)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(W, "w"), onnx.numpy_helper.from_array(B, "b")])
    return model


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return onnxc.compile(proto())


@pytest.fixture
def saved(model: CompiledModel, tmp_path: Path) -> Path:
    model.save(tmp_path / "m.onnxc")
    return tmp_path / "m.onnxc"


def rewritten(path: Path, **changes: Any) -> Path:
    """The package with another manifest."""
    with open_package(path) as package:
        sections = {n: bytes(package.section(n)) for n in package.names if n != "manifest"}
        manifest = {**package.manifest, **changes}
    write_package(path, manifest, sections)
    return path


def test_same_answers_and_facts(model: CompiledModel, saved: Path) -> None:
    again = onnxc.load(saved)
    x = floats(5, 8)
    np.testing.assert_array_equal(again(x)["y"], model(x)["y"])
    np.testing.assert_allclose(again(x)["y"], np.maximum(x @ W + B, 0), 1e-5, 1e-5)
    assert again.get_inputs() == model.get_inputs() and again.get_outputs() == model.get_outputs()
    assert again.source == model.source
    known = {key: value for key, value in model.manifest.items() if key != "stages"}
    assert again.manifest == json.loads(json.dumps(known))
    assert str(again.explain()) == str(replace(model.explain(), stages={}))
    assert onnxc.load(saved, threads=1).threads == 1


def test_saved_from_a_loaded_model_and_over_itself(saved: Path, tmp_path: Path) -> None:
    again = onnxc.load(saved)
    again.save(tmp_path / "second.onnxc")
    assert (tmp_path / "second.onnxc").read_bytes() == saved.read_bytes()
    again.save(saved)
    x = floats(3, 8)
    np.testing.assert_array_equal(onnxc.load(saved)(x)["y"], again(x)["y"])
    saved.unlink()
    np.testing.assert_array_equal(again(x)["y"], again(x)["y"])  # what is mapped stays


def test_two_compiles_are_the_same_bytes(tmp_path: Path) -> None:
    """The manifest of a compile has the times of its stages, and a saved one has not."""
    staged = parse("(float[n] x) => (int64[1, k] y) { y = NonZero(x) }")
    for k, one in enumerate((proto(), staged)):
        paths = [tmp_path / f"{k}{name}.onnxc" for name in "ab"]
        for path in paths:
            compiled = onnxc.compile(one, cache=tmp_path / path.stem)
            assert compiled.explain().stages
            compiled.save(path)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_saved_without_a_cache(tmp_path: Path) -> None:
    model = onnxc.compile(proto(), cache=False)
    model.save(tmp_path / "m.onnxc")
    x = floats(3, 8)
    np.testing.assert_array_equal(onnxc.load(tmp_path / "m.onnxc")(x)["y"], model(x)["y"])


def run_without_compiler(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python code in a process that finds no compiler, and no cache."""
    return python(code, PATH=str(folder), CXX="", ONNXC_CACHE=str(folder / "none"))


def test_loads_without_compiler_cache_or_onnx(saved: Path, tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.modules["onnxruntime"] = None
        import numpy as np, onnxc
        model = onnxc.load({str(saved)!r})
        assert model(np.zeros((2, 8), "f"))["y"].shape == (2, 4)
        assert model(np.zeros((3, 8), "f"))["y"].shape == (3, 4)
        not_needed = ("onnxc.compiler", "onnxc.planner", "onnxc.codegen", "onnxc.frontends")
        assert not [m for m in sys.modules if m.startswith(not_needed)]
    """
    done = run_without_compiler(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "none").exists()


def test_compiling_without_a_compiler_says_what_to_do(tmp_path: Path) -> None:
    code = """
        import onnxc
        from tests.small_models import parse
        try:
            onnxc.compile(parse("(float[2] x) => (float[2] y) { y = Neg(x) }"))
        except onnxc.errors.ToolchainError as error:
            assert "install" in str(error) or "CXX" in str(error), error
            print("told")
    """
    done = run_without_compiler(code, tmp_path)
    assert done.stdout.strip() == "told", done.stderr


def test_weights_are_mapped_and_once(tmp_path: Path) -> None:
    text = "(float[1,1024] x) => (float[1,1024] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, w) }"
    big = parse(text)
    big.graph.initializer.append(onnx.numpy_helper.from_array(floats(1024, 1024), "w"))
    model = onnxc.compile(big)
    model.save(tmp_path / "big.onnxc")
    assert 4 << 20 < os.stat(tmp_path / "big.onnxc").st_size < 5 << 20  # both uses share one copy
    again = onnxc.load(tmp_path / "big.onnxc")
    assert not again._weights.flags.writeable
    if sys.platform.startswith("linux"):
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("big.onnxc")]
        assert maps and all("r--" in line.split()[1] for line in maps)


def test_missing_cpu_features_are_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"machine": cpu.machine(), "features": ["sse2", "avx512_of_the_future"]}
    with pytest.raises(errors.CpuError, match="avx512_of_the_future"):
        onnxc.load(rewritten(saved, requires=needs))
    with pytest.raises(errors.CpuError, match="compiled for riscv64"):
        onnxc.load(rewritten(saved, requires={"machine": "riscv64", "features": []}))


@pytest.mark.skipif(cpu.machine() != "x86_64", reason="a level of x86-64")
def test_named_level_needs_no_more_than_it_says(tmp_path: Path) -> None:
    model = onnxc.compile(proto(), cpu="x86-64-v3")
    assert set(model.manifest["requires"]["features"]) == cpu.level("x86-64-v3").features
    model.save(tmp_path / "m.onnxc")
    x = floats(5, 8)
    np.testing.assert_allclose(onnxc.load(tmp_path / "m.onnxc")(x)["y"], np.maximum(x @ W + B, 0), 1e-5, 1e-5)


def test_what_is_no_saved_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.PackageError):
        onnxc.load(tmp_path / "none.onnxc")
    with pytest.raises(errors.PackageError):
        onnxc.load(tmp_path)
    onnx.save(proto(), tmp_path / "m.onnx")
    with pytest.raises(errors.PackageError, match="not a saved model"):
        onnxc.load(tmp_path / "m.onnx")
    data = saved.read_bytes()
    for cut in (1, 70, 4096, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        with pytest.raises(errors.PackageError):
            onnxc.load(tmp_path / "cut")


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 99}, {"schema": None}, {"inputs": [["x"]]}, {"inputs": None},
        {"outputs": [["y", "float31", [], []]]},
        {"symbols": ["s0", "s9"]}, {"arena": {"sizes": []}}, {"equal": [1]}, {"symbols": [1.5]}, {"symbols": []},
        {"entry": 0}, {"lanes": "s0"}, {"inputs": [["x", "float32", ["s0", 8], [[], 8]]]}, {"requires": "x"},
        {"requires": {"machine": cpu.machine(), "features": [None, []]}},
    ],
)  # fmt: skip
def test_damaged_manifest(saved: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(errors.PackageError):
        onnxc.load(rewritten(saved, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": [["y", "float32", ["s0", 1], ["N", 1]]]}, {"outputs": []},
        {"inputs": [["x", "float32", ["s0", 1], ["N", 1]]]},
        {"arena": {"sizes": [8], "which": [0], "first": [0], "last": [0]}}, {"equal": [["s0", "s0", "n0 Add"]]},
        {"natural": [["s0", "n0 Slice"]]},
    ],
)  # fmt: skip
def test_sizes_that_the_program_was_not_compiled_for(saved: Path, changes: dict[str, Any]) -> None:
    """It would read and write outside of its memory."""
    with pytest.raises(errors.PackageError, match="sizes are not those"):
        onnxc.load(rewritten(saved, **changes))


def test_bytes_of_a_saved_model_are_no_path(saved: Path) -> None:
    with pytest.raises(errors.InputError, match=r"^a saved model has a path; the bytes of a file were given$"):
        onnxc.load(saved.read_bytes())


def test_failed_save_leaves_nothing(model: CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(errors.PackageError):
        model.save(tmp_path / "no such folder" / "m.onnxc")
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.PackageError):
        model.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_loaded_file_can_be_replaced(saved: Path, tmp_path: Path) -> None:
    first = onnxc.load(saved)
    other = onnxc.compile(parse("(float[N,8] x) => (float[N,8] y) { y = Neg(x) }"))
    other.save(saved)
    assert first(floats(2, 8))["y"].shape == (2, 4)
    assert onnxc.load(saved)(floats(2, 8))["y"].shape == (2, 8)
    shutil.copy(saved, tmp_path / "copy")
    assert onnxc.load(tmp_path / "copy")(floats(2, 8))["y"].shape == (2, 8)
