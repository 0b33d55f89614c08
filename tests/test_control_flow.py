"""If, Loop and Scan, compiled and exported, against onnxruntime with its optimizations off."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxc
from onnxc.errors import InputError, LimitError, ModelError, RunError
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.primitives.verify import verify
from tests.staging_harness import check, floats, int64, parsed, same

pytestmark = pytest.mark.every_target
TRUE, FALSE = np.array(True), np.array(False)
Text = str

SIZES = (0, 1, 7)
TABLE = {
    "if": (
        """(bool c, float[n, 3] x) => (float[n, 3] y) {
  y = If (c) <then_branch = t () => (float[n, 3] a) { a = Add(x, x) },
              else_branch = e () => (float[n, 3] b) { b = Neg(x) }>
}""",
        [{"c": c, "x": floats(n, 3)} for c in (TRUE, FALSE) for n in SIZES],
    ),
    "if-condition-of-one-element": (
        """(bool[1] c, float[n] x) => (y) {
  y = If (c) <then_branch = t () => (a) { a = Exp(x) }, else_branch = e () => (b) { b = Neg(x) }>
}""",
        [{"c": c.reshape(1), "x": floats(5)} for c in (TRUE, FALSE)],
    ),
    "if-constant": (
        """(float[n] x) => (y) {
  c = Constant <value = bool {0}> ()
  y = If (c) <then_branch = t () => (a) { a = Exp(x) }, else_branch = e () => (b) { b = Neg(x) }>
}""",
        [{"x": floats(5)}],
    ),
    "if-shapes": (
        """(bool c, float[n, 3] x) => (z) {
  y = If (c) <then_branch = t () => (a) { a = Concat <axis = 0> (x, x) }, else_branch = e () => (b) { b = Neg(x) }>
  z = Exp(y)
}""",
        [{"c": c, "x": floats(n, 3)} for c in (TRUE, FALSE) for n in SIZES],
    ),
    "if-ranks": (
        """(bool c, float[n, 3] x) => (z) {
  y = If (c) <then_branch = t () => (a) { a = ReduceSum <keepdims = 0> (x) }, else_branch = e () => (b) { b = Neg(x) }>
  z = Exp(y)
}""",
        [{"c": c, "x": floats(n, 3)} for c in (TRUE, FALSE) for n in SIZES],
    ),
    "if-dtypes-of-several-outputs": (
        """(bool c, float[n] x, int64[m] i) => (y, z, u) {
  y, z = If (c) <then_branch = t () => (a, a2) { a = Identity(x) a2 = Identity(i) },
                 else_branch = e () => (b, b2) { b = Constant <value_floats = [1.0, 2.0]> () b2 = Neg(i) }>
  u = Add(x, x)
}""",
        [{"c": c, "x": floats(3), "i": int64([1, 2])} for c in (TRUE, FALSE)],
    ),
    "if-squeeze": (
        """(float[n, m] x) => (z) {
  s = Shape(x)
  one = Constant <value_ints = [1]> ()
  i = Constant <value_int = 1> ()
  d = Gather(s, i)
  c = Equal(d, i)
  y = If (c) <then_branch = t () => (a) { a = Squeeze(x, one) }, else_branch = e () => (b) { b = Identity(x) }>
  z = Neg(y)
}""",
        [{"x": floats(3, 1)}, {"x": floats(3, 2)}, {"x": floats(0, 1)}],
    ),
    "if-nested-with-captures": (
        """(bool c, bool d, float[n] x) => (y) {
  w = Exp(x)
  y = If (c) <
    then_branch = t () => (a) {
      a = If (d) <then_branch = t2 () => (a1) { a1 = Add(x, w) }, else_branch = e2 () => (a2) { a2 = Mul(w, x) }>
    },
    else_branch = e () => (b) {
      q = Neg(x)
      b = If (d) <then_branch = t3 () => (a3) { a3 = Add(q, w) },
                  else_branch = e3 () => (a4) { a4 = Concat <axis = 0> (w, q) }>
    }>
}""",
        [{"c": c, "d": d, "x": floats(5)} for c in (TRUE, FALSE) for d in (TRUE, FALSE)],
    ),
    "loop-trip-count-known": (
        """(float[n] x) => (y, s) {
  t = Constant <value_int = 3> ()
  c = Constant <value = bool {1}> ()
  y, s = Loop (t, c, x) <body = b (int64 i, bool cc, float[n] a) => (bool co, float[n] o, float[n] sc) {
    co = Identity(cc) o = Add(a, a) sc = Exp(a)
  }>
}""",
        [{"x": floats(n)} for n in SIZES],
    ),
    "loop-trip-count-and-condition-given": (
        """(int64 t, bool c, float[4] x) => (y, float[k, 4] s) {
  y, s = Loop (t, c, x) <body = b (int64 i, bool cc, float[4] a) => (bool co, float[4] o, float[4] sc) {
    co = Identity(cc) o = Add(a, a) sc = Exp(a)
  }>
}""",
        [{"t": int64(t), "c": c, "x": floats(4)} for t in (-1, 0, 1, 3) for c in (TRUE, FALSE)],
    ),
    "loop-trip-count-computed": (
        """(float[n] x) => (y) {
  p = NonZero(x)
  s = Shape <start = 1> (p)
  t = Squeeze(s)
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[n] a) => (bool co, float[n] o) {
    co = Identity(cc) o = Add(a, x)
  }>
}""",
        [{"x": np.float32([1, 0, 2])}, {"x": np.zeros(3, np.float32)}, {"x": floats(0)}],
    ),
    "loop-without-trip-count": (
        """(float x) => (float y, float[k] s) {
  c = Constant <value = bool {1}> ()
  y, s = Loop ("", c, x) <body = b (int64 i, bool cc, float a) => (bool co, float o, float sc) {
    two = Constant <value = float {2}> ()
    limit = Constant <value = float {100}> ()
    o = Mul(a, two) co = Less(o, limit) sc = Identity(a)
  }>
}""",
        [{"x": np.array(x, np.float32)} for x in (1, 500)],
    ),
    "loop-early-exit": (
        """(int64 t, float[n] x, float[1] limit) => (y, k) {
  zero = Constant <value_int = 0> ()
  y, k = Loop (t, "", x, zero) <body = b (int64 i, bool cc, float[n] a, int64 j) => (bool co, float[n] o, int64 jo) {
    o = Add(a, x) m = ReduceMax <keepdims = 0> (o) one = Constant <value_int = 1> () jo = Add(j, one)
    co = Less(m, limit)
  }>
}""",
        [{"t": int64(t), "x": np.float32([1, 2]), "limit": np.float32([5])} for t in (0, 1, 2, 100)],
    ),
    "loop-that-grows": (
        """(int64 t, float[n] x) => (float[m] y) {
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[q] a) => (bool co, float[r] o) {
    co = Identity(cc) o = Concat <axis = 0> (a, a)
  }>
}""",
        [{"t": int64(t), "x": floats(n)} for t in (0, 1, 3) for n in (0, 1, 3)],
    ),
    "loop-that-changes-rank": (
        """(int64 t, float[n] x) => (y) {
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[q] a) => (bool co, o) {
    co = Identity(cc) z = Constant <value_ints = [0]> () o = Unsqueeze(a, z)
  }>
}""",
        [{"t": int64(0), "x": floats(3)}],
    ),
    "loop-of-weights": (
        """(int64 t, float[n, 2] x) => (y) <float[2, 2] w = {1, 2, -1, 0}> {
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[n, 2] a) => (bool co, float[n, 2] o) {
    co = Identity(cc) o = MatMul(a, w)
  }>
}""",
        [{"t": int64(t), "x": floats(n, 2)} for t in (0, 1, 3) for n in SIZES],
    ),
    "loop-that-counts-in-vectors": (
        """(float[n, 3] x) => (y, s) {
  t = Shape <end = 1> (x)
  go = Constant <value = bool {1}> ()
  zero = Constant <value = float[3] {0, 0, 0}> ()
  axis = Constant <value = int64[1] {0}> ()
  y, s = Loop (t, go, zero) <body = b (int64[1] i, bool c, float[3] a) => (bool c_out, float[3] o, float[3] p) {
    k = Squeeze (i, axis)  row = Gather <axis = 0> (x, k)  o = Add (a, row)  p = Neg (o)  c_out = Identity (c)
  }>
}""",
        [{"x": floats(n, 3)} for n in (1, 4)],
    ),
    "loop-nested": (
        """(int64 t, float[n] x) => (float[m] y) {
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[q] a) => (bool co, float[r] o) {
    co = Identity(cc)
    o = Loop (i, "", a) <body = b2 (int64 j, bool c2, float[q2] a2) => (bool co2, float[r2] o2) {
      co2 = Identity(c2) o2 = Concat <axis = 0> (a2, x)
    }>
  }>
}""",
        [{"t": int64(t), "x": floats(2)} for t in (0, 1, 3)],
    ),
    "loop-without-carried-values": (
        """(int64 t, float[2, 3] x) => (float[k, 2, 3] s, float[k] q) {
  s, q = Loop (t, "") <body = b (int64 i, bool cc) => (bool co, float[2, 3] sc, float q1) {
    co = Identity(cc) f = Cast <to = 1> (i) sc = Add(x, f) q1 = Identity(f)
  }>
}""",
        [{"t": int64(t), "x": floats(2, 3)} for t in (1, 3)],
    ),
    "loop-with-an-if": (
        """(int64 t, float[n] x) => (y) {
  two = Constant <value_int = 2> ()
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[q] a) => (bool co, float[r] o) {
    co = Identity(cc) zero = Constant <value_int = 0> () m = Mod(i, two) even = Equal(m, zero)
    o = If (even) <then_branch = t1 () => (p) { p = Concat <axis = 0> (a, x) },
                   else_branch = e1 () => (p2) { p2 = Neg(a) }>
  }>
}""",
        [{"t": int64(t), "x": floats(2)} for t in (0, 1, 4)],
    ),
    "scan": (
        """(float[2] s, float[t, 2] x) => (a, b) {
  a, b = Scan <num_scan_inputs = 1, body = b (float[2] s1, float[2] x1) => (float[2] o, float[2] y) {
    o = Add(s1, x1) y = Mul(o, x1)
  }> (s, x)
}""",
        [{"s": floats(2), "x": floats(n, 2)} for n in (1, 5)],
    ),
    "scan-axes-and-directions": (
        """(float[2] s, float[2, t] x, float[t, 2] z) => (a, b, c) {
  a, b, c = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [1, 0],
                  scan_output_axes = [-1, 0], scan_output_directions = [0, 1],
    body = b (float[2] s1, float[2] x1, float[2] z1) => (float[2] o, float[2] y, float[2] u) {
      o = Add(s1, x1) y = Mul(o, z1) u = Sub(y, s1)
    }> (s, x, z)
}""",
        [{"s": floats(2), "x": floats(2, n), "z": floats(n, 2)} for n in (1, 5)],
    ),
    "scan-in-if": (
        """(bool c, float[2] s, int64[1] k, float[t, 2] x) => (a, b) {
  a, b = If (c) <
    then_branch = t1 () => (a1, b1) {
      a1, q, b1 = Scan <num_scan_inputs = 1,
        body = b (float[2] s1, int64[1] s2, float[2] x1) => (float[2] o, int64[1] o2, float[2] y) {
          o = Add(s1, x1) o2 = Add(s2, s2) y = Mul(o, x1)
        }> (s, k, x)
    },
    else_branch = e1 () => (a2, b2) { a2 = Neg(s) b2 = Exp(x) }>
}""",
        [{"c": c, "s": floats(2), "k": int64([3]), "x": floats(5, 2)} for c in (TRUE, FALSE)],
    ),
    "scan-of-steps-on-the-host": (
        """(float[n] s, float[t, 2] x) => (a, b) {
  a, b = Scan <num_scan_inputs = 1, body = b (float[k] s1, float[2] x1) => (float[k] o, float[2] y) {
    z = NonZero(x1) q = Cast <to = 1> (z) r = ReduceSum <keepdims = 0> (q) o = Add(s1, r) y = Mul(x1, r)
  }> (s, x)
}""",
        [{"s": floats(3), "x": floats(5, 2)}],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_control_flow(case: str) -> None:
    text, feeds = TABLE[case]
    check("g " + text, *feeds)


SCAN_8 = """g (%s float[n, 2] s, float[n, t, 2] x, float[n, t] z) => (a, b) {
  a, b = Scan <num_scan_inputs = 2, directions = [%d, 0],
    body = b (float[2] s1, float[2] x1, float z1) => (float[2] o, float[2] y) { o = Add(s1, x1) y = Mul(o, z1) }
  > (%s, s, x, z)
}"""


@pytest.mark.parametrize("backward", (0, 1))
@pytest.mark.parametrize("batch, steps", ((1, 1), (3, 5)))
def test_scan_of_opset_8(backward: int, batch: int, steps: int) -> None:
    """With a batch axis, and sequences of different lengths."""
    feed = {"s": floats(batch, 2), "x": floats(batch, steps, 2), "z": floats(batch, steps)}
    check(SCAN_8 % ("", backward, '""'), feed, opset=8)
    lengths = int64([steps, 1, 3][:batch])
    check(SCAN_8 % ("int64[n] l,", backward, "l"), feed | {"l": lengths}, opset=8)


def test_results_of_no_iterations_have_the_shape_that_is_known() -> None:
    """onnxruntime takes 0 for each dim that has a name."""
    text = TABLE["loop-without-carried-values"][0].replace("2, 3", "n, 3")
    model = onnxc.compile(parsed("g " + text))
    found = model(int64(0), floats(2, 3))
    assert found["s"].shape == (0, 2, 3) and found["q"].shape == (0,)


def test_results_of_no_iterations_whose_types_only_a_run_can_tell(tmp_path: Path) -> None:
    """They are what the body declares."""
    model = parsed("""g (float[n, 3] x, int64 k) => (y, z) {
        y, z = Loop (k, "", x) <body = b (int64 i, bool go, float[] a) => (bool on, float[] t, float[1, p] s) {
          on = Identity(go) ax = Constant <value_ints = [0]> () t = Unsqueeze(a, ax)
          m = Constant <value_ints = [-1, 3]> () r = Reshape(a, m) s = ReduceSum(r, ax) }> }""")
    compiled = onnxc.compile(model)
    compiled.save(tmp_path / "m.onnxc")
    for run in (compiled, onnxc.load(tmp_path / "m.onnxc")):
        for k, shape in ((2, (2, 1, 3)), (0, (0, 1, 0))):
            z = run(floats(2, 3), np.int64(k))["z"]
            assert (z.shape, z.dtype) == (shape, np.float32)


def test_a_number_that_is_declared_and_not_read() -> None:
    """A loop whose body does not count keeps no numbers, of whatever rank they are declared."""
    text = """g (float[3] x) => (y) {
  t = Constant <value = int64 {100}> ()
  go = Constant <value = bool {1}> ()
  y = Loop (t, go, x) <body = b (int64[1] i, bool c, float[3] a) => (bool d, float[3] o) {
    o = Sin (a)  d = Identity (c)
  }>
}"""
    (scan,) = [n for n in decompose(onnx_file.load(parsed(text))).nodes if n.op == "scan"]
    assert not any(v.shape == (100,) for v in scan.inputs)
    check(text, {"x": floats(3)})


def test_results_of_which_the_number_alone_is_read() -> None:
    text = """g (float[3] x, float t) => (float[N, 2] y) {
  most = Constant <value = int64 {100}> ()
  go = Constant <value = bool {1}> ()
  last, rows = Loop (most, go, x) <body = b (int64 i, bool c, float[3] a) => (bool d, float[3] o, float[3] row) {
    two = Constant <value = float {2.0}> ()
    o = Mul (a, two)  s = ReduceSum <keepdims = 0> (o)  d = Less (s, t)  row = Identity (o)
  }>
  n = Shape <start = 0, end = 1> (rows)
  width = Constant <value = int64[1] {2}> ()
  shape = Concat <axis = 0> (n, width)
  y = ConstantOfShape (shape)
}"""
    check(text, {"x": np.ones(3, np.float32), "t": np.array(50, np.float32)})


def test_a_rank_that_grows_with_each_iteration() -> None:
    """Each rank is compiled when it comes."""
    model = onnxc.compile(parsed("g " + TABLE["loop-that-changes-rank"][0]))
    for t in (0, 1, 3):
        assert model(int64(t), floats(3))["y"].shape == (*[1] * t, 3)


# ---------------------------------------------------------------- random programs


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, int]:
    """Statements that turn the carried %a of a loop into %o, with regions in them; and how many loops are in it."""
    steps, loops, last = [], 0, "a"
    for k in range(draw(st.integers(1, 3))):
        kind, name = draw(st.sampled_from(["neg", "add", "join", "if", "loop", "take"])), f"v{k}"
        if kind == "neg":
            steps.append(f"{name} = Neg({last})")
        elif kind == "add":
            steps.append(f"{name} = Add({last}, one)")
        elif kind == "join":
            steps.append(f"{name} = Concat <axis = 0> ({last}, x)")
        elif kind == "take":
            steps.append(f"{name}m = Greater({last}, one) {name} = Compress <axis = 0> ({last}, {name}m)")
        elif kind == "if":
            steps.append(
                f"{name}c = Less(i, two) {name} = If ({name}c) <"
                f"then_branch = t{k} () => (t{k}o) {{ t{k}o = Concat <axis = 0> ({last}, {last}) }}, "
                f"else_branch = e{k} () => (e{k}o) {{ e{k}o = Exp({last}) }}>"
            )
        else:
            loops += 1
            steps.append(
                f'{name} = Loop (i, "", {last}) <body = l{k} (int64 j{k}, bool c{k}, float[p{k}] b{k}) => '
                f"(bool d{k}, float[q{k}] r{k}) {{ d{k} = Identity(c{k}) r{k} = Concat <axis = 0> (b{k}, x) }}>"
            )
        last = name
    return " ".join([*steps, f"o = Identity({last})"]), loops


@pytest.mark.cpu_only  # a program for each of many ranks and sizes
@settings(max_examples=12)
@given(bodies(), st.integers(0, 3))
def test_random_loops(body: tuple[str, int], trips: int) -> None:
    text = f"""g (int64 t, float[n] x) => (float[m] y) <float one = {{1}}, int64 two = {{2}}> {{
  y = Loop (t, "", x) <body = b (int64 i, bool cc, float[q] a) => (bool co, float[r] o) {{
    co = Identity(cc) {body[0]}
  }}>
}}"""
    check(text, {"t": int64(trips), "x": np.float32([0.5, 2.0])}, {"t": int64(trips), "x": floats(0)})


# ---------------------------------------------------------------- limits and errors

ENDLESS = """g (float[n] x) => (y) {
  c = Constant <value = bool {1}> ()
  y = Loop ("", c, x) <body = b (int64 i, bool cc, float[n] a) => (bool co, float[n] o) {
    co = Identity(cc) o = Neg(a)
  }>
}"""


def test_a_limit_of_iterations() -> None:
    model = onnxc.compile(parsed(ENDLESS))
    model.iteration_limit = 10
    with pytest.raises(LimitError, match=r"more than 10 iterations.*n\d+ Loop"):
        model(floats(3))


def test_ctrl_c_ends_an_endless_loop() -> None:
    model = onnxc.compile(parsed(ENDLESS))
    model.iteration_limit = 3
    with pytest.raises(LimitError):
        model(floats(3))
    model.iteration_limit = None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            model(floats(3))
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.cpu_only  # a GPU has one step for each turn, and a limit of these
@pytest.mark.parametrize("trip", ["n", "constant"])
def test_a_handler_of_a_signal_ends_a_long_loop(trip: str) -> None:
    """Of a known number of turns: all are in one program. What the handler raises arrives as it is."""

    def stop(number: int, frame: Any) -> None:
        raise InterruptedError("enough")

    given = "int64 n, " if trip == "n" else ""
    known = "" if trip == "n" else "n = Constant <value = int64 {1000000000000}> ()"
    model = onnxc.compile(parsed(f"""g ({given}float[64] x) => (float[64] y) {{
  {known} y = Loop (n, "", x) <body = b (int64 i, bool c, float[64] v) => (bool d, float[64] w) {{
    d = Identity(c) w = Sin(v) }}> }}"""))  # fmt: skip
    args = [np.array(10**12)] * (trip == "n") + [floats(64)]
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(2):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptedError, match="enough"):
                model(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_loops_collect_has_one_shape() -> None:
    text = """g (int64 t, float[n] x) => (float[k, m] y) {
  y = Loop (t, "") <body = b (int64 i, bool cc) => (bool co, float[r] o) {
    co = Identity(cc) z = Constant <value_ints = [1]> () u = Unsqueeze(i, q) o = Expand(one, u)
  }>
}""".replace("q)", "zero)").replace(
        "=> (float[k, m] y) {", "=> (float[k, m] y) <int64[1] zero = {0}, float one = {1}> {"
    )
    model = onnxc.compile(parsed(text))
    assert model(int64(1), floats(1))["y"].shape == (1, 0)
    with pytest.raises(RunError, match=r"different shapes.*Loop"):
        model(int64(2), floats(1))


def test_a_condition_has_one_element() -> None:
    text = "g " + TABLE["if-condition-of-one-element"][0].replace("bool[1]", "bool[n]").replace("float[n]", "float[m]")
    model = onnxc.compile(parsed(text))
    same(model(np.array([True]), floats(2))["y"], np.exp(floats(2)), "y")
    with pytest.raises((RunError, InputError), match="If"):
        model(np.array([True, False]), floats(2))


@pytest.mark.parametrize(
    "text, says",
    (
        (
            'g (int64 t, float[n] x) => (y) { y = Loop (t, "", x) '
            "<body = b (int64 i, bool c) => (bool d) { d = Not(c) }> }",
            "body of Loop has 2 inputs",
        ),
        (
            "g (bool c, float[n] x) => (y) { y = If (c) <then_branch = t () => (a, a2) { a = Exp(x) a2 = Neg(x) }, "
            "else_branch = e () => (b) { b = Neg(x) }> }",
            "branches of If have 2 and 1 outputs",
        ),
        (
            "g (bool c, float[n] x) => (y) { y = If (c) <then_branch = t (float q) => (a) { a = Neg(q) }, "
            "else_branch = e () => (b) { b = Neg(x) }> }",
            "subgraph has 1 inputs; it is given 0 .*If",
        ),
        (
            "g (float[n] x) => (y) { y = Scan <num_scan_inputs = 2, body = b (float a) => (float o) { o = Neg(a) }> "
            "(x) }",
            "body of Scan has 1 inputs",
        ),
    ),
)
def test_wrong_regions(text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        onnxc.compile(parsed(text))


def test_a_body_that_is_built_twice_has_nodes_of_its_own() -> None:
    """A loop's steps one by one, and many of them in one program: regions inside of the body are copied as well."""
    graph = decompose(
        onnx_file.load(
            parsed("""g (float[3] s, float[2, 3] b, int64 n, bool go) => (float[3] y) {
  y = Loop(n, go, s) <body = body (int64 i, bool k, float[3] c) => (bool l, float[3] d) {
     d = Scan <num_scan_inputs = 1, body = in (float[3] u, float[3] v) => (float[3] w) { w = Add(u, v) }> (c, b)
     l = Identity(k)
  }>
}""")
        ),
        staged=True,
    )
    verify(graph)
    (loop,) = (n for n in graph.nodes if n.op == "loop")
    assert len(loop.regions) == 2


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_a_body_gives_on_is_no_state(steps: int) -> None:
    """Weights that go from iteration to iteration, as tf2onnx has them: the product knows that they are constant."""
    model = parsed("""g (float[2,3] x, int64 n, bool yes) => (h, v, e) <float[3,3] w = {1,2,3,4,5,6,7,8,10}> {
  h, v, u, e = Loop(n, yes, x, w, x) <body = in (int64 i, bool k, float[2,3] p, float[3,3] q, float[2,3] r)
      => (bool l, float[2,3] s, float[3,3] t, float[2,3] z, float[2,3] out) {
    m = MatMul(p, q) s = Tanh(m) o = Identity(q) t = Identity(o) z = Add(r, r) out = Add(s, r) l = Identity(k)
  }>
}""")
    x = floats(2, 3)
    check(model, {"x": x, "n": np.array(steps), "yes": np.array(True)})
    (loop,) = (n for n in decompose(onnx_file.load(model), staged=True).nodes if n.op == "loop")
    assert loop.attrs["carried"] == 2
