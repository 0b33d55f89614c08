"""What the host need not do: small branches that are both computed, loops that data end inside of programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.errors import LimitError, RunError
from onnxc.gradient import differentiate
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.staged import StagedModel
from tests.small_models import floats
from tests.staging_harness import check, int64, parsed

TURNED = """g (float[n, 3] x, int64 t) => (float[n, 3] y) { go = Constant <value = bool {1}> ()
  y = Loop (t, go, x) <body = b (int64 i, bool c, float[n, 3] v) => (bool d, float[n, 3] w) {
    d = Identity(c)  BRANCHES  w = Add(v, s) }> }"""
BRANCHES = """zero = Constant <value = float {0}> ()  three = Constant <value = int64[1] {3}> ()
  total = ReduceSum <keepdims = 0> (v)  p = Greater(total, zero)
  s = If(p) <then_branch = t () => (float[1] a) { h = Constant <value = float[1] {-0.75}> ()  a = Exp(h) },
    else_branch = e () => (float[1] e0) { q = Mod(i, three)  e0 = Cast <to = 1> (q) }>"""
ENDS = """g (double[n] x, int64 t) => (y, z) { go = Constant <value = bool {1}> ()
  y, z = Loop (t, go, x) <body = b (int64 i, bool c, double[n] v) => (bool d, double[n] w, double[n] r) {
    limit = Constant <value = double {100}> ()  two = Constant <value = double {2}> ()
    total = ReduceMax <keepdims = 0> (v)  d = Less(total, limit)  w = Mul(v, two)
    k = Cast <to = 11> (i)  r = Add(v, k) }> }"""
KNOWN = """g (double x) => (double y) { t = Constant <value = int64 {9}> ()  go = Constant <value = bool {1}> ()
  y = Loop (t, go, x) <body = b (int64 i, bool c, double v) => (bool d, double w) { d = Identity(c)
    u = Loop (t, c, v) <body = b2 (int64 i2, bool c2, double v2) => (bool d2, double w2) {
      limit = Constant <value = double {50}> ()  k = Cast <to = 11> (i2)  w2 = Add(v2, k)  d2 = Less(w2, limit) }>
    half = Constant <value = double {0.5}> ()  w = Mul(u, half) }> }"""


def hosted(model: CompiledModel) -> list[str]:
    """The steps of the host."""
    return [k.function for k in model.explain().kernels if k.kind == "host"]


def both(text: str, switch: str, *feeds: dict[str, Any]) -> tuple[CompiledModel, CompiledModel]:
    """A model with and without what a switch of FusionOptions stands for; the outputs are the same."""
    model = parsed(text)
    found = [onnxc.compile(model, fusion=onnxc.FusionOptions(**{switch: on})) for on in (True, False)]
    for feed in feeds:
        for a, b in zip(*(m.run(None, feed) for m in found), strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
    check(model, *feeds)
    return found[0], found[1]


@pytest.mark.parametrize("sign", [1, -1])
def test_small_branches_in_a_loop(sign: int) -> None:
    feeds = [{"x": sign * floats(n, 3), "t": int64(t)} for n in (0, 1, 4) for t in (0, 1, 9)]
    quick, slow = both(TURNED.replace("BRANCHES", BRANCHES), "selects", *feeds)
    assert hosted(quick) == ["read"] and "if" in hosted(slow)


def test_a_loop_around_a_branch_is_one_program() -> None:
    model = parsed("""g (float[5, 4] x) => (float[4] y, float[5, 4] z) { h = Constant <value = float[4] {0, 0, 0, 0}> ()
      y, z = Scan (h, x) <num_scan_inputs = 1, body = b (float[4] s, float[4] v) => (float[4] s2, float[4] r) {
        zero = Constant <value = float {0}> ()  m = ReduceMean <keepdims = 0> (v)  p = Greater(m, zero)
        s2 = If(p) <then_branch = t () => (float[4] a) { u = Add(s, v)  a = Tanh(u) },
                    else_branch = e () => (float[4] b2) { b2 = Mul(s, v) }>
        r = Identity(s2) }> }""")
    assert not isinstance(onnxc.compile(model), StagedModel)
    check(model, {"x": floats(5, 4)}, {"x": -floats(5, 4)})


def branches(then: str, otherwise: str) -> str:
    return f"""g (float[4] x, int64[4] k, bool c) => (y) {{ zero = Constant <value = int64[4] {{0, 0, 0, 0}}> ()
      y = If(c) <then_branch = t () => (a) {{ {then} }}, else_branch = e () => (b) {{ {otherwise} }}> }}"""


@pytest.mark.parametrize("then", ["a = Div(k, zero)", "a = Gather(k, k)", "a = Mod(k, zero)", "a = Reshape(k, k)"])
def test_what_may_fail_is_not_run_where_it_is_not_taken(then: str) -> None:
    model = onnxc.compile(parsed(branches(then, "b = Neg(k)")))
    given = floats(4), np.full(4, 9)
    assert "if" in hosted(model)
    np.testing.assert_array_equal(model(*given, np.array(False))["y"], np.full(4, -9))
    with pytest.raises((RunError, onnxc.errors.InputError)):
        model(*given, np.array(True))


def test_a_branch_that_is_not_taken_shows_nowhere() -> None:
    """Neither NaN nor an infinity, nor what integers do at their limits."""
    quick, slow = both(
        branches("a = Sqrt(x)", "b = Exp(x)"), "selects",
        *({"x": np.float32([-1, 0, 200, np.nan]), "k": np.arange(4), "c": np.array(c)} for c in (True, False)),
    )  # fmt: skip
    assert not hosted(quick) and hosted(slow) == ["if"]
    model = onnxc.compile(parsed(branches("m = Constant <value_ints = [-1]> () a = Div(k, m)", "b = Neg(k)")))
    least = np.full(4, np.iinfo(np.int64).min)
    np.testing.assert_array_equal(model(floats(4), least, np.array(False))["y"], least)


@pytest.mark.parametrize(
    "other", ["b = Concat <axis = 0> (x, x)", "z0 = Constant <value_ints = [0]> () b = Unsqueeze(x, z0)",
              "big = ConstantOfShape(k) s = ReduceSum <keepdims = 0> (big) b = Add(x, s)"]
)  # fmt: skip
def test_branches_of_other_shapes_or_costs_stay(other: str) -> None:
    assert "if" in hosted(onnxc.compile(parsed(branches("a = Neg(x)", other))))


@pytest.mark.parametrize("other", ["b = Identity(u)", "b = Transpose(u)"])
def test_large_values_are_handed_on_not_selected(other: str) -> None:
    """Branches that compute nothing give values of any size."""
    text = f"""g (float[100, 100] x, float[100, 100] u, bool c) => (y) {{ y = If(c) <
      then_branch = t () => (a) {{ a = Identity(x) }}, else_branch = e () => (b) {{ {other} }}> }}"""
    feeds = [{"x": floats(100, 100), "u": -floats(100, 100), "c": np.array(c)} for c in (True, False)]
    assert hosted(check(text, *feeds)) == ["if"]
    small = text.replace("100, 100", "10, 10")
    assert not hosted(onnxc.compile(parsed(small)))


@pytest.mark.parametrize(("op", "stays"), [("Add", False), ("Pow", True)])
def test_functions_count_by_what_they_cost(op: str, stays: bool) -> None:
    """Of 8,000 elements, a sum takes less time than a step of the host, a power more."""
    text = f"""g (float[80, 100] x, float[80, 100] u, bool c) => (y) {{ y = If(c) <
      then_branch = t () => (a) {{ a = {op}(x, u) }}, else_branch = e () => (b) {{ b = Neg(u) }}> }}"""
    assert hosted(onnxc.compile(parsed(text))) == ["if"] * stays


def test_derivatives_have_branches() -> None:
    """That of a branch that is not taken may be NaN."""
    text = """g (double[4] x, bool c) => (double loss) { y = If(c) <then_branch = t () => (a) { a = Sqrt(x) },
      else_branch = e () => (b) { b = Mul(x, x) }>  loss = ReduceSum <keepdims = 0> (y) }"""
    gradient = onnxc.compile(differentiate(onnxc.frontends.onnx_file.load(parsed(text)), "loss", ["x"]))
    x = np.array([-1.0, 0.0, 2.0, 3.0])
    np.testing.assert_array_equal(gradient(x, np.array(False))["x_grad"], 2 * x)


LONG = [1e-6, 1.0, 1e3, 1e-300]


def test_loops_that_data_end_collect_many_results_at_once() -> None:
    feeds = [{"x": np.full(n, v), "t": int64(t)} for n in (1, 3) for v in LONG for t in (1, 2, 40, 5000)]
    quick, slow = both(ENDS, "turns", *feeds)
    assert hosted(quick) == hosted(slow) == ["loop"]
    programs = [sum(k.kind != "host" for k in m.explain().kernels) for m in (quick, slow)]
    assert programs[0] and programs[1]
    assert all(m(np.full(3, 1.0), int64(0))["z"].shape == (0, 3) for m in (quick, slow))


def test_a_limit_of_iterations_that_collect() -> None:
    model = onnxc.compile(parsed(ENDS))
    model.iteration_limit = 10
    assert model(np.full(3, 1.0), int64(99))["z"].shape == (8, 3)
    with pytest.raises(LimitError, match="more than 10 iterations"):
        model(np.full(3, 1e-9), int64(99))


def test_collected_results_have_to_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxc.runtime.staged_steps.memory_bytes", lambda: 1 << 16)
    model = onnxc.compile(parsed(ENDS))
    with pytest.raises(LimitError, match="does not fit into memory after"):
        model(np.full(100, 1e-300), int64(5000))


def test_an_iteration_knows_no_sizes_of_the_one_before() -> None:
    """A loop that ran in it, and now does not: what it collects has as many columns as onnxruntime gives it, none."""
    check(
        """g (float[n] x, int64 t) => (int64[m, 2] y) { go = Constant <value = bool {1}> ()
      y = Loop (t, go) <body = b (int64 i, bool c) => (bool d, int64[2] r) {
        d = Identity(c)  one = Constant <value = int64 {1}> ()  times = Sub(one, i)
        q = Loop (times, c) <body = b2 (int64 i2, bool c2) => (bool d2, int64[k] r2) {
          d2 = Identity(c2)  at = NonZero(x)  all = Constant <value_ints = [-1]> ()  r2 = Reshape(at, all) }>
        r = Shape(q) }> }""",
        {"x": floats(3), "t": int64(3)},
    )  # fmt: skip


def test_loops_within_loops_are_one_program() -> None:
    quick, slow = both(KNOWN, "turns", *({"x": np.array(v)} for v in (0.5, 49.5, 1e6, -1e9, np.nan)))
    assert not isinstance(quick, StagedModel) and "loop" in hosted(slow)


def test_saved_and_loaded(tmp_path: Path) -> None:
    for k, text in enumerate((ENDS, TURNED.replace("BRANCHES", BRANCHES))):
        model = onnxc.compile(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]> ' + text))
        model.save(tmp_path / f"{k}.onnxc")
        args = (np.full(3, 1.0), int64(30)) if k == 0 else (floats(2, 3), int64(7))
        for a, b in zip(model(*args).values(), onnxc.load(tmp_path / f"{k}.onnxc")(*args).values(), strict=True):
            np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- sequences of tensors of one shape

ITEMS = "SplitToSequence <axis = AXIS, keepdims = KEEP>"
STACKS = {
    "appended": """(float[n, 2] x, int64 t) => (y, z, l) { go = Constant <value = bool {1}> ()  e = SequenceEmpty ()
      s, w = Loop (t, go, e, x) <body = b (int64 i, bool c, seq(float[k, 2]) a, float[n, 2] v) => (bool d, o, w2) {
        d = Identity(c)  w2 = Neg(v)  o = SequenceInsert(a, v) }>
      y = ConcatFromSequence <axis = 1> (s)  z = ConcatFromSequence <axis = 2, new_axis = 1> (s)
      l = SequenceLength(s) }""",
    "appended-and-given-out": """(float[n, 2] x, int64 t) => (s, y) { go = Constant <value = bool {1}> ()
      f = Exp(x)  e = SequenceConstruct (x, f)
      s = Loop (t, go, e) <body = b (int64 i, bool c, seq(float[k, 2]) a) => (bool d, o) {
        d = Identity(c)  k1 = Cast <to = 1> (i)  r = Add(x, k1)  o = SequenceInsert(a, r) }>
      last = Constant <value = int64 {-1}> ()  y = SequenceAt(s, last) }""",
    "appended-until": """(float[n, 2] x, int64 t) => (y, l) { go = Constant <value = bool {1}> ()  e = SequenceEmpty ()
      s, w = Loop (t, go, e, x) <body = b (int64 i, bool c, seq(float[k, 2]) a, float[n, 2] v) => (bool d, o, w2) {
        two = Constant <value = float {2}> ()  limit = Constant <value = float {20}> ()
        w2 = Mul(v, two)  m = ReduceMax <keepdims = 0> (w2)  d = Less(m, limit)  o = SequenceInsert(a, w2) }>
      y = ConcatFromSequence <axis = 0> (s)  l = SequenceLength(s) }""",
    "appended-where-sizes-are-data": """(float[n, 2] x, int64 t) => (y) { go = Constant <value = bool {1}> ()
      e = SequenceEmpty ()
      s = Loop (t, go, e) <body = b (int64 i, bool c, seq(float[k]) a) => (bool d, o) {
        d = Identity(c)  at = NonZero(x)  r = ReduceSum <keepdims = 0> (at)  q = Cast <to = 1> (r)  p = Add(x, q)
        o = SequenceInsert(a, p) }>  y = ConcatFromSequence <axis = 0> (s) }""",
    "of-other-sizes": """(float[n, 2] x, int64 t) => (y) { go = Constant <value = bool {1}> ()  e = SequenceEmpty ()
      s, w = Loop (t, go, e, x) <body = b (int64 i, bool c, seq(float[k, 2]) a, float[m, 2] v) => (bool d, o, w2) {
        d = Identity(c)  w2 = Concat <axis = 0> (v, x)  o = SequenceInsert(a, w2) }>
      y = ConcatFromSequence <axis = 0> (s) }""",
    "read-while-it-grows": """(float[n, 2] x, int64 t) => (y) { go = Constant <value = bool {1}> ()
      e = SequenceConstruct (x)
      s = Loop (t, go, e) <body = b (int64 i, bool c, seq(float[k, 2]) a) => (bool d, o) {
        d = Identity(c)  v = SequenceAt(a, i)  w = Add(v, x)  o = SequenceInsert(a, w) }>
      y = ConcatFromSequence <axis = 0> (s) }""",
    "mapped": f"""(float[n, 2] x, int64 t) => (y, l) {{ s = {ITEMS.replace("AXIS", "0").replace("KEEP", "1")} (x)
      r = SequenceMap <body = b (float[1, 2] v) => (float[2, 1] w) {{ u = Transpose(v)  k = Cast <to = 1> (t)
        w = Mul(u, k) }}> (s)  y = ConcatFromSequence <axis = -1> (r)  l = SequenceLength(r) }}""",
    "mapped-columns": f"""(float[2, n] x, int64 t) => (y) {{ s = {ITEMS.replace("AXIS", "1").replace("KEEP", "0")} (x)
      r = SequenceMap <body = b (float[2] v, float[2] u) => (float[2] w) {{ w = Add(v, u) }}> (s, s)
      y = ConcatFromSequence <axis = 0, new_axis = 1> (r) }}""",
    "at-of-known-ones": """(float[n, 2] x, int64 t) => (y) { f = Exp(x)  g = Neg(f)  s = SequenceConstruct (x, f, g)
      v = SequenceAt(s, t)  y = Sin(v) }""",
    "at": f"""(float[n, 2] x, int64 t) => (y, z) {{ s = {ITEMS.replace("AXIS", "0").replace("KEEP", "1")} (x)
      y = SequenceAt(s, t)  one = Constant <value_ints = [-1]> ()  r = Reshape(t, one)  z = SequenceAt(s, r) }}""",
}  # fmt: skip


def stacks_text(case: str) -> str:
    return "g " + STACKS[case].replace("(bool d, o", "(bool d, seq(float[k9, 2]) o")


FREE = ("appended", "appended-and-given-out", "mapped", "mapped-columns", "at", "at-of-known-ones")


@pytest.mark.parametrize("case", STACKS)
def test_sequences_of_one_shape(case: str) -> None:
    shape = (2, 3) if case == "mapped-columns" else (3, 2)
    times = (0, 1) if case.startswith("at") else (1, 2, 6)
    quick, slow = both(
        stacks_text(case), "stacks",
        *({"x": np.abs(floats(*shape)), "t": int64(t)} for t in times),
    )  # fmt: skip
    sequences = [name for name in hosted(quick) if name.startswith("sequence")]
    assert len(sequences) < sum(name.startswith("sequence") for name in hosted(slow)) or case not in FREE
    assert not sequences or case not in (
        "appended",
        "mapped",
        "mapped-columns",
        "at",
        "at-of-known-ones",
        "appended-until",
    )


@pytest.mark.parametrize("case", ["appended", "appended-until", "mapped", "mapped-columns"])
def test_nothing_cannot_be_joined(case: str) -> None:
    model = onnxc.compile(parsed(stacks_text(case)))
    shape = {"mapped": (0, 2), "mapped-columns": (2, 0)}.get(case, (3, 2))
    with pytest.raises(RunError, match=r"empty sequence cannot be concatenated.*ConcatFromSequence"):
        model(np.ones(shape, np.float32), int64(0))


@pytest.mark.parametrize("position", [3, -4])
def test_positions_outside_of_a_sequence(position: int) -> None:
    model = onnxc.compile(parsed(stacks_text("at")))
    with pytest.raises(RunError, match=r"index -?\d is out of bounds.*SequenceAt"):
        model(floats(3, 2), int64(position))


def test_an_empty_list_comes_out() -> None:
    text = stacks_text("appended").replace("=> (y, z, l)", "=> (seq(float[a, 2]) s, l)").split("y = Concat")[0]
    model = onnxc.compile(parsed(text + " l = SequenceLength(s) }"))
    found = model(floats(3, 2), int64(0))
    assert found["s"] == [] and found["l"] == 0
    rows = model(floats(3, 2), int64(3))["s"]
    assert all(r.base is None or r.flags.owndata for r in rows) and len({r.ctypes.data for r in rows}) == 3
