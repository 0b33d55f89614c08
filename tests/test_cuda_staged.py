"""Models of several programs on a GPU: control flow, sizes and sequences whose values stay there.

``pytest --target cuda`` runs these on this machine's GPU. Without one a process of its own runs them, on a driver in
memory and with kernels in Triton's interpreter.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import InputError, LimitError, RunError
from onnxc.runtime.cuda import profile
from onnxc.runtime.cuda.arrays import LEGACY
from onnxc.runtime.cuda.memory import Pinned
from tests import targets
from tests.staging_harness import floats, int64, parsed, same
from tests.targets import needs_triton

F32 = np.float32
TRUE = np.array(True)
ROOT = Path(__file__).resolve().parents[1]
on_gpu = pytest.mark.every_target
# Some of what judges answers on every target, where it is quick in the interpreter.
SAMPLE = (
    "test_conv_transpose.py::test_weights_that_are_not_finite_never_meet_padding",
    "test_defaults.py::test_defaults_of_inputs_that_are_kept",
)


@needs_triton
def test_these_and_others_on_a_simulated_gpu() -> None:
    if targets.is_gpu():
        pytest.skip("they run on the GPU")
    command = [sys.executable, "-m", "pytest", "--target", "simulated", "-q", "-x", "-p", "no:cacheprovider", __file__]
    command += [f"tests/{name}" for name in SAMPLE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_without_xdist())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def _without_xdist() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}


@pytest.fixture(autouse=True)
def _a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("every_target") is not None and not targets.is_gpu():
        pytest.skip("needs a GPU as the target")


@functools.cache
def elsewhere() -> Any:
    """A model that makes arrays of the GPU, on its own stream."""
    return onnxc.compile(parsed("g (float[n] x) => (float[n] y) { y = Neg(x) }"))


def put(x: Any) -> Any:
    return elsewhere().put(np.asarray(x))


# While the sum of |a| is below a limit that is data: a += w, collecting a and the number of each turn; a loop in it
# adds or subtracts the outer x as often as the turn's number says. How much is collected is known at the end only.
WHILE = """g (float limit, float[n] x) => (float[n] last, float[k, n] all, int64[k] turns)
  <float[1] w = {1}, bool yes = {1}> {
  last, all, turns = Loop ("", yes, x) <body = b (int64 i, bool cc, float[n] a)
      => (bool go, float[n] o, float[n] c, int64 t) {
    o1 = Add(a, w)
    o = Loop (i, "", o1) <body = b2 (int64 j, bool c2, float[n] a2) => (bool co2, float[n] o2) {
      co2 = Identity(c2) s2 = ReduceSum <keepdims = 0> (a2) f2 = Cast <to = 1> (s2)
      big = Greater(f2, limit)
      o2 = If (big) <then_branch = t () => (ot) { ot = Sub(a2, x) }, else_branch = e () => (oe) { oe = Add(a2, x) }>
    }>
    p = Abs(o) s = ReduceSum <keepdims = 0> (p) go = Less(s, limit) c = Identity(o) t = Identity(i)
  }>
}"""


def loops(limit: float, x: np.ndarray) -> list[np.ndarray]:
    a, collected, turns, go = x, [], [], True
    while go:
        a = a + F32(1)
        for _ in range(len(turns)):
            a = a - x if a.sum() > limit else a + x
        turns.append(len(turns))
        collected.append(a)
        go = np.abs(a).sum() < limit
    return [a, np.stack(collected), int64(turns)]


@on_gpu
def test_loops_that_data_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_COPIED", 1 << 20)
    compiled = onnxc.compile(parsed(WHILE))
    compiled.save(tmp_path / "m.onnxc")
    for model in (compiled, onnxc.load(tmp_path / "m.onnxc")):
        for n, limit in ((3, 20.0), (5, 1.0), (1, 9.0)):
            x = np.abs(floats(n))
            wanted = loops(F32(limit), x)
            same([*model(F32(limit), x).values()], wanted, "arrays of the host")
            found = model(limit=put(F32(limit)), x=put(x))
            assert all(isinstance(y, type(put(x))) for y in found)
            same([y.numpy() for y in found], wanted, "arrays of the GPU")
            same([y.numpy() for y in model(F32(limit), put(x))], wanted, "both")
    report = compiled.profile([F32(9), np.abs(floats(3))], runs=2, warm_up=0)
    assert {"loop", "if"} <= {k.function for k in report.kernels if k.kind == "host"}
    assert any(k.times and k.kind != "host" for k in report.kernels)
    compiled.trim()
    compiled.iteration_limit = 1
    with pytest.raises(LimitError, match="more than 1 iterations"):
        compiled(F32(1e9), np.ones(3, F32))


@on_gpu
def test_the_order_of_calls_on_streams() -> None:
    """Each call reads what the one before it has only begun to make, on another stream."""
    model = onnxc.compile(parsed(WHILE))
    x, before = np.float32([0.5, 0.25, 1.0]), elsewhere()
    wanted, now = x, before(put(-x))["y"]
    for _ in range(3):
        now = model(F32(20), now)["last"]
        wanted = loops(F32(20), wanted)[0]
        now, wanted = before(now)["y"], -wanted
    same(now.numpy(), wanted, "chained")


@on_gpu
def test_what_kernels_of_a_body_find_wrong() -> None:
    model = onnxc.compile(
        parsed("""g (float[n] x, int64[1] at) => (float[m] y) <bool yes = {1}, int64 one = {1}, float top = {3}> {
  k, y0 = Loop ("", yes, at) <body = b (int64 i, bool cc, int64[1] a) => (bool go, int64[1] o, float[1] v) {
    v = Gather(x, a) o = Add(a, one) s = ReduceSum <keepdims = 0> (v) go = Less(s, top)
  }>
  y = Identity(y0)
}""")
    )
    x = np.arange(6, dtype=F32)
    same(model(x, int64([1]))["y"], F32([[1], [2], [3]]), "y")
    for feed in ([x, int64([9])], [x[:2], int64([0])]):
        with pytest.raises(RunError, match=r"Gather"):
            model(*feed)
        with pytest.raises(RunError, match=r"Gather"):
            model(*map(put, feed))["y"].numpy()
    same(model(put(x), int64([2]))["y"].numpy(), F32([[2], [3]]), "afterwards")


@on_gpu
def test_outputs_have_memory_of_their_own() -> None:
    model = onnxc.compile(
        parsed("""g (bool c, float[n] x) => (a, b, w) <float[2] k = {7, 8}> {
  a, b, w = If (c) <then_branch = t () => (ta, tb, tw) { ta = Identity(x) tb = Identity(x) tw = Identity(k) },
                    else_branch = e () => (ea, eb, ew) { ea = Neg(x) eb = Identity(x) ew = Identity(x) }>
}""")
    )
    for c in (True, False):
        x = put(floats(4))
        found = [*model(np.array(c), x)]
        assert len({y.address for y in (*found, x)}) == 4
        same([y.numpy() for y in found], [floats(4), floats(4), F32([7, 8])] if c else
             [-floats(4), floats(4), floats(4)], "outputs")  # fmt: skip
        again = [*model(np.array(c), floats(4))]
        same(again, [y.numpy() for y in found], "again")
        again[2][:] = 0
        same(model(np.array(c), floats(4))["w"], found[2].numpy(), "the constant is as it was")


@on_gpu
def test_sequences_of_arrays_of_the_gpu() -> None:
    model = onnxc.compile(
        parsed("""g (seq(float[n, 2]) s, int64 k) => (seq(float[n, 2]) t, y, int64 count) {
  x = SequenceAt(s, k) y = Neg(x) t = SequenceInsert(s, y) count = SequenceLength(t)
}""")
    )
    pieces = [floats(n, 2) for n in (1, 3)]
    wanted = [[*pieces, -pieces[1]], -pieces[1], int64(3)]
    same([*model(pieces, int64(1)).values()], wanted, "the host's")
    t, y, count = model([put(x) for x in pieces], int64(1))
    same([[x.numpy() for x in t], y.numpy(), count.numpy()], wanted, "the GPU's")


@on_gpu
def test_sizes_and_programs_that_wait_for_data() -> None:
    """A size that is read, and a rank that only a call tells: what is compiled then shares the stream, too."""
    model = onnxc.compile(
        parsed("""g (float[n] x, int64[r] shape) => (y, z) <float zero = {0}> {
  m = Greater(x, zero) y0 = Compress(x, m) y = Exp(y0) z0 = Reshape(x, shape) z = Neg(z0)
}""")
    )
    x = floats(6)
    for shape in ([2, 3], [6], [1, 3, 2], [3, 2]):
        wanted = [np.exp(x[x > 0]), -x.reshape(shape)]
        same([*model(x, int64(shape)).values()], wanted, "the host's")
        same([v.numpy() for v in model(put(x), put(int64(shape)))], wanted, "the GPU's")


@on_gpu
def test_inputs_that_do_not_fit() -> None:
    model = onnxc.compile(parsed(WHILE))
    with pytest.raises(InputError, match="float32"):
        model(F32(1), put(int64([1])))
    with pytest.raises(InputError, match="rank"):
        model(F32(1), put(np.ones((2, 2), F32)))


@on_gpu
def test_traced_functions() -> None:
    import onnxc.array_api as xp

    def function(x: Any, n: Any) -> Any:
        total = onnxc.while_loop(lambda s: xp.sum(s) < 100, lambda s: s * 2 + x, x)
        count = onnxc.fori_loop(0, n, lambda i, s: s + xp.astype(i, xp.float32), xp.sum(x))
        ends, sums = onnxc.scan(lambda c, v: (c + v, c * v), xp.sum(total), x)
        return onnxc.cond(count > 5, lambda: total, lambda: -total), ends, sums

    x = np.float32([1, 2, 3])
    found = onnxc.jit(function, target="cuda")(x, np.int64(4))
    total = x
    while total.sum() < 100:
        total = total * 2 + x
    sums, c = [], total.sum()
    for v in x:
        sums.append(c * v)
        c += v
    same([np.asarray(y) for y in found], [total, c, F32(sums)], "traced")


@on_gpu
def test_arrays_and_constants_outlive_what_made_them() -> None:
    """An array names the stream of the model that made it, which may be gone; so may that of a call that was the first
    to need a constant. Memory of the caller's may be written over, pinned or not.
    """
    text = "g (float[n] x) => (float[n] y) { y = Neg(x) }"
    model, x = onnxc.compile(parsed(text)), floats(2)
    made = model(model.put(x))["y"]
    own = made.stream
    del model
    gc.collect()
    same(elsewhere()(made)["y"].numpy(), x, "made by a model that is gone")
    model = onnxc.compile(
        parsed("""g (bool c, float[n] x) => (y) <float[2] k = {7, 8}> {
  w = If (c) <then_branch = t () => (tw) { tw = Identity(k) }, else_branch = e () => (ew) { ew = Identity(x) }>
  y = Neg(w)
}""")
    )
    given = put(x)
    for stream in (own, LEGACY):
        same(model(TRUE, given, stream=stream)["y"].numpy(), F32([-7, -8]), "a constant")
        assert [copy.stream for _, copy in model._constants.values()] == [stream]
    space = elsewhere()._space
    with space.device.current():
        pinned = Pinned(space.device, 1 << 20)
        pinned.array[:] = 1
        copy = space.upload(pinned.array, LEGACY)
        pinned.array[:] = 2
    assert copy.numpy().max() == 1
