"""Profiles: times of kernels, the work that is counted for them, the machine's peaks, and what bounds a kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

import onnxc
from onnxc.cli import app
from onnxc.errors import InputError, RunError
from onnxc.ir.graph import Graph
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.planner.flops import flops, pointwise
from onnxc.roofline import CACHE, COMPUTE, MEMORY, KernelTime, Peaks, Profile, best_and_median
from onnxc.runtime import peaks
from onnxc.runtime.library import load_runtime


def parsed(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def imported(text: str) -> Graph:
    from onnxc.frontends import onnx_file

    graph = onnx_file.load(parsed(text))
    for _, run in passes(PassOptions()):
        graph = run(graph)
    return graph


# ---------------------------------------------------------------- profiles of models


@pytest.mark.parametrize("threads", [1, 2])
def test_a_matmul_and_what_follows(threads: int) -> None:
    text = "(float[64, 96] x, float[96, 32] w) => (float[64] y) <int64[1] axes = {1}> {"
    text += " a = MatMul(x, w) b = Tanh(a) y = ReduceSum <keepdims = 0> (b, axes) }"
    model = onnxc.compile(parsed(text), threads=threads)
    report = model.profile({"x": zeros(64, 96), "w": zeros(96, 32)}, runs=5)
    profile = report.profile
    assert profile is not None and profile.runs == 5 and profile.dims == {}
    assert len(profile.kernels) == len(report.kernels) == report.counts["kernels"]
    assert profile.flops == 2 * 64 * 96 * 32 and profile.peaks.threads == threads
    assert sum(k.pointwise for k in profile.kernels) == 64 * 32 * (10 + 1)
    assert all(0 < k.best <= k.median and k.turns == 1 for k in profile.kernels)
    best = sum(round(k.best * 1e9) for k in profile.kernels)  # whole nanoseconds: sums of seconds round
    assert 0 < best <= round(profile.total * 1e9) <= round(profile.median * 1e9)
    first = next(k for k in profile.kernels if k.flops)
    assert first.reads == 4 * (64 * 96 + 96 * 32)
    assert profile.share_of_peak > 0


def test_numbers_and_text_of_a_profile() -> None:
    report = onnxc.compile(parsed("(float[16, 16] x) => (float[16, 16] y) { y = MatMul(x, x) }")).profile(
        [zeros(16, 16)]
    )
    data = json.loads(json.dumps(report.to_dict()))["profile"]
    (kernel,) = data["kernels"]
    assert kernel["flops"] == 2 * 16**3 and kernel["bound"] in (COMPUTE, MEMORY, CACHE) and kernel["gflops"] > 0
    assert data["kinds"]["matmul"]["flops"] == kernel["flops"] and data["peaks"]["flops"] > 1e9
    text = str(report)
    assert "us a run (best of 30" in text and "of peak" in text and "GFLOP/s of multiply-adds" in text
    assert report.at(lambda size: 0).kernels == report.kernels
    assert "profile" not in onnxc.compile(parsed("(float[1] x) => (float[1] y) { y = Exp(x) }")).explain().to_dict()


def test_dynamic_sizes_are_those_of_the_inputs(tmp_path: Path) -> None:
    model = onnxc.compile(parsed("(float[batch, n] x, float[n, 8] w) => (float[batch, 8] y) { y = MatMul(x, w) }"))
    model.save(tmp_path / "m.onnxc")
    for m in (model, onnxc.load(tmp_path / "m.onnxc")):
        for batch, n in ((3, 5), (17, 33)):
            profile = m.profile({"w": zeros(n, 8), "x": zeros(batch, n)}, runs=2).profile
            assert profile is not None and profile.dims == {"batch": batch, "n": n}
            kernel = next(k for k in profile.kernels if k.flops)
            assert kernel.flops == 2 * batch * n * 8
            assert (kernel.reads, kernel.writes) == (4 * (batch * n + n * 8), 4 * batch * 8)


def test_kernels_in_a_loop_count_every_turn() -> None:
    rng = np.random.default_rng(0)
    size, hidden, steps = 8, 16, 7
    weights = {"w": (1, 4 * hidden, size), "r": (1, 4 * hidden, hidden)}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=hidden)
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (steps, 1, size)),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]  # fmt: skip
    constants = [onnx.numpy_helper.from_array(rng.standard_normal(s, np.float32), n) for n, s in weights.items()]
    graph = helper.make_graph([node], "g", info[:1], info[1:], constants)
    model = onnxc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    profile = model.profile({"x": zeros(steps, 1, size)}, runs=3).profile
    assert profile is not None
    assert {k.turns for k in profile.kernels} <= {1, steps} and profile.flops == 2 * steps * 4 * hidden * (
        size + hidden
    )


def test_parts_of_a_value_count_as_such() -> None:
    """A slice needs its own size; rows that are looked up need theirs, and not the table's."""
    text = "(float[32, 64] x) => (float[32, 16] y) <int64[1] a = {16}, int64[1] b = {32}, int64[1] k = {1}> {"
    sliced = onnxc.compile(parsed(text + " s = Slice(x, a, b, k) y = Exp(s) }"))
    profile = sliced.profile([zeros(32, 64)], runs=1).profile
    assert profile is not None and [(k.reads, k.writes) for k in profile.kernels] == [(4 * 32 * 16, 4 * 32 * 16)]
    looked = onnxc.compile(parsed("(float[1000, 8] t, int64[n] i) => (float[n, 8] y) { y = Gather(t, i) }"))
    profile = looked.profile({"t": zeros(1000, 8), "i": np.zeros(3, np.int64)}, runs=1).profile
    assert profile is not None and [k.reads for k in profile.kernels] == [4 * 3 * 8 + 8 * 3]


def test_wrong_use_and_failures() -> None:
    model = onnxc.compile(parsed("(float[10] t, int64[n] i) => (float[n] y) { y = Gather(t, i) }"))
    for runs in (0, 1.5, None):
        with pytest.raises(InputError, match="runs is at least 1"):
            model.profile([zeros(10), np.zeros(1, np.int64)], runs=runs)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by name or in order, not as a NoneType"):
        model.profile(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'t'"):
        model.profile({"t": zeros(11), "i": np.zeros(1, np.int64)})
    with pytest.raises(RunError, match="out of bounds"):
        model.profile({"t": zeros(10), "i": np.full(1, 10, np.int64)})


def test_a_model_without_kernels() -> None:
    profile = onnxc.compile(parsed("(float[0] x) => (float[0] y) { y = Exp(x) }")).profile([zeros(0)], runs=2).profile
    assert profile is not None and profile.total > 0 and profile.flops == 0


# ---------------------------------------------------------------- what is counted


def test_arithmetic_of_primitives() -> None:
    graph = imported("(float[2, 3, 8, 8] x) => (float[2, 3, 4, 4] y) {"
                     " a = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) b = Erf(a) c = Cast <to = 11> (b)"
                     " d = Cast <to = 1> (c) y = Mul(d, b) }")  # fmt: skip
    counted = {node.op: pointwise(node) for node in graph.nodes if pointwise(node)}
    size = 2 * 3 * 4 * 4
    assert counted == {"window_max": 4 * size, "erf": 10 * size, "mul": size}


def test_contractions_count_as_direct_ones() -> None:
    graph = imported("(float[2, 4, 9, 9] x, float[6, 2, 3, 3] w) => (float[2, 6, 7, 7] y) {"
                     " y = Conv <group = 2> (x, w) }")  # fmt: skip
    assert sum(flops(n) for n in graph.nodes) == 2 * (2 * 6 * 7 * 7) * 2 * 9


# ---------------------------------------------------------------- the roofline


def kernel(best: float, reads: int = 0, work: int = 0, kind: str = "loops") -> KernelTime:
    return KernelTime(0, "k0", kind, "Exp", 1, best, best, reads, 0, 0, work)


def test_what_bounds_a_kernel() -> None:
    machine = Peaks(2, 8, 100e9, 10e9)
    profile = Profile(machine, 3, 1.0, 1.0, (kernel(1.0), kernel(2.0), kernel(4.0, kind="matmul")), {})
    assert profile.limit(kernel(1.0, reads=10**9, work=50 * 10**9)) == (COMPUTE, 0.5)
    assert profile.limit(kernel(1.0, reads=5 * 10**9, work=10**9)) == (MEMORY, 0.5)
    assert profile.limit(kernel(1.0, reads=20 * 10**9, work=10**9)) == (CACHE, 2.0)
    assert kernel(1.0, reads=100, work=250).intensity == 2.5
    kinds = profile.by_kind()
    assert list(kinds) == ["matmul", "loops"] and kinds["loops"].best == 3.0 and kinds["loops"].label == "2 calls"
    unknown = Profile(Peaks(1, 4, 1e9, 0.0), 1, 1.0, 1.0, (), {})
    assert unknown.limit(kernel(1.0, reads=8, work=8))[0] == COMPUTE
    assert best_and_median([0, 3000]) == (1e-9, 1.5e-6)


# ---------------------------------------------------------------- the machine's peaks


def test_every_vector_length_is_measured() -> None:
    runtime = load_runtime()
    for lanes in (4, 8, 16):
        if lanes <= peaks.machine_lanes():
            found = peaks.measure(runtime, 1, lanes)
            assert found.threads == 1 and found.lanes == lanes
            assert 1e8 < found.flops < 1e13 and 1e7 < found.bandwidth < 1e13


def test_the_cache_keeps_the_best_of_some_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXC_CACHE", str(tmp_path / "cache"))
    load_runtime()
    figures = iter([(3e9, 1e9), (2e9, 2e9), (1e9, 1e9), (1e9, 1e9), (1e9, 1e9), (9e9, 9e9), (4e9, 4e9)])
    monkeypatch.setattr(peaks, "measure", lambda runtime, threads, lanes: Peaks(threads, lanes, *next(figures)))

    def of_another_process() -> Peaks:
        peaks.machine_peaks.cache_clear()
        return peaks.machine_peaks(2, 4)

    try:
        assert of_another_process() == Peaks(2, 4, 3e9, 1e9)
        for _ in range(peaks.SAMPLES):  # the last one no longer measures
            assert of_another_process() == Peaks(2, 4, 3e9, 2e9)
        (entry,) = (p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.read_bytes().startswith(b"["))
        entry.write_bytes(b'[5, {"flops": 3')
        assert of_another_process() == Peaks(2, 4, 9e9, 9e9)
    finally:
        peaks.machine_peaks.cache_clear()


def test_no_more_lanes_than_the_machine_has() -> None:
    assert peaks.machine_peaks(1, 1024).lanes == peaks.machine_lanes()


# ---------------------------------------------------------------- the command line


def test_explain_with_a_profile(tmp_path: Path) -> None:
    onnx.save(parsed("(float[n, 4] x) => (float[n, 4] y) { a = Add(x, x) y = Tanh(a) }"), tmp_path / "m.onnx")
    arguments = ["explain", str(tmp_path / "m.onnx"), "--profile", "--runs", "3", "--dim", "n=50"]
    text = CliRunner().invoke(app, arguments).stdout
    assert "best of 3" in text and "at n 50" in text and "Add, Tanh" in text
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["profile"]
    assert data["dims"] == {"n": 50} and data["kernels"][0]["pointwise"] == 50 * 4 * 11


def test_info_of_the_machine() -> None:
    text = CliRunner().invoke(app, ["info"]).stdout
    assert "GFLOP/s of multiply-adds" in text and "compiler" in text
    data = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert data["peaks"][0]["threads"] == 1 and data["lanes"] in (4, 8, 16)
