"""Attention in the forms in which exporters and operators write it: one kernel, and the model's own answers.

All forms are functions of the same q, k, v and masks, and outputs of one model: it is compiled with attention found and
without, and compared with float64.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxc
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.ir.text import from_text, to_text
from onnxc.passes.attention import fuse_attention
from onnxc.passes.decompose import decompose
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.primitives.interpret import interpret
from onnxc.tools.float64 import evaluate_float64
from tests.small_models import floats, parse, reference

B, H, Q, K, D, E = 2, 3, 13, 37, 8, 5
SOFTMAX = "NAME_p = Softmax <axis = -1> (NAME_x)  NAME = MatMul (NAME_p, v)"
S, P = "NAME_s = Mul (product_NAME, c)", SOFTMAX
FORMS = {
    "added": f"{S} NAME_x = Add (NAME_s, bias) {P}",
    "kept": f"{S} NAME_x = Where (keep, NAME_s, minus) {P}",
    "filled": f"{S} NAME_x = Where (hide, lowest, NAME_s) {P}",
    "twice": f"{S} NAME_1 = Add (slopes, NAME_s) NAME_x = Add (NAME_1, bias) {P}",
    "filled_then_added": f"{S} NAME_1 = Where (hide, low, NAME_s) NAME_x = Add (NAME_1, line) {P}",
    "added_then_kept": f"{S} NAME_1 = Add (NAME_s, line) NAME_x = Where (keep, NAME_1, minus) {P}",
    "scaled_after": f"NAME_1 = Add (product_NAME, slopes) NAME_x = Mul (NAME_1, c) {P}",
    "clamped": f"{S} NAME_1 = Add (NAME_s, bias) NAME_x = Max (NAME_1, low) {P}",
    "less": f"{S} NAME_x = Sub (NAME_s, slopes) {P}",
    "capped": f"{S} NAME_1 = Div (NAME_s, two) NAME_2 = Tanh (NAME_1) NAME_3 = Mul (two, NAME_2)"
    f" NAME_x = Add (NAME_3, bias) {P}",
    "capped_below": f"{S} NAME_1 = Div (NAME_s, lower) NAME_2 = Tanh (NAME_1) NAME_x = Mul (NAME_2, lower) {P}",
    "guarded": f"{S} NAME_x = Where (keep, NAME_s, minus) NAME_p0 = Softmax (NAME_x) NAME_n = IsNaN (NAME_p0)"
    " NAME_p = Where (NAME_n, zero, NAME_p0)  NAME = MatMul (NAME_p, v)",
    "temperatures": f"NAME_1 = Mul (heat, product_NAME) NAME_2 = Mul (NAME_1, c) NAME_x = Add (NAME_2, bias) {P}",
    "windows": f"{S} NAME_1 = Add (NAME_s, slopes) NAME_r = Reshape (NAME_1, apart) NAME_2 = Add (NAME_r, of_windows)"
    f" NAME_3 = Reshape (NAME_2, whole) NAME_x = Add (NAME_3, line) {P}",
    "keys_first": 'NAME_0 = Einsum <equation = "bhkd,bhqd->bhqk"> (k, q_NAME) NAME_s = Mul (NAME_0, c)'
    ' NAME_x = Add (NAME_s, bias) NAME_p = Softmax (NAME_x) NAME = Einsum <equation = "bhqk,bhke->bhqe"> (NAME_p, v)',
    "lone": f"{S} NAME_r = Reshape (NAME_s, flat) NAME_a = Add (NAME_r, line_of_flat) NAME_b = Reshape (NAME_a, whole)"
    " NAME_x = Add (NAME_b, bias) NAME_p0 = Softmax (NAME_x) NAME_p = Reshape (NAME_p0, flat)"
    " NAME_y = MatMul (NAME_p, v_flat)  NAME = Reshape (NAME_y, result)",
}  # fmt: skip
HEAD = f"""(float[{B}, {H}, {Q}, {D}] q, float[{B}, {H}, {K}, {D}] k, float[{B}, {H}, {K}, {E}] v,
    float[{Q}, {K}] bias, float[{H}, 1, {K}] slopes, float[{B}, 1, 1, {K}] line, bool[{B}, 1, {Q}, {K}] keep) => (
  OUT) {{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  c = Constant <value = float {{0.3}}> ()  two = Constant <value = float {{2}}> ()
  lower = Constant <value = float {{-2}}> ()  zero = Constant <value = float {{0}}> ()
  minus = Constant <value = float {{-inf}}> ()  low = Constant <value = float {{-100}}> ()
  lowest = Constant <value = float {{-3.4028234e38}}> ()  hide = Not (keep)
  flat = Constant <value = int64[3] {{{B * H}, {Q}, {K}}}> ()
  whole = Constant <value = int64[4] {{{B}, {H}, {Q}, {K}}}> ()
  values = Constant <value = int64[3] {{{B * H}, {K}, {E}}}> ()  v_flat = Reshape (v, values)
  result = Constant <value = int64[4] {{{B}, {H}, {Q}, {E}}}> ()
  times = Constant <value = int64[4] {{1, {H}, 1, 1}}> ()  lines = Tile (line, times)
  last = Constant <value = int64[1] {{-1}}> ()  heat = ReduceMean (slopes, last)
  apart = Constant <value = int64[5] {{1, {B}, {H}, {Q}, {K}}}> ()  first = Constant <value = int64[1] {{0}}> ()
  of_windows = Unsqueeze (line, first)
  rows = Constant <value = int64[3] {{{B * H}, 1, {K}}}> ()  line_of_flat = Reshape (lines, rows)
"""


def model(names: list[str]) -> onnx.ModelProto:
    """Each form of scores of its own: nothing is shared."""
    own = (
        "own_NAME = Constant <value = float {AT}> ()  q_NAME = Mul (q, own_NAME)  product_NAME = MatMul (q_NAME, kt)  "
    )
    bodies = [(own + FORMS[n]).replace("NAME", n).replace("AT", str(1 + i / 16)) for i, n in enumerate(names)]
    out = ", ".join(f"float[{B}, {H}, {Q}, {E}] {n}" for n in names)
    return parse("\n  ".join([HEAD.replace("OUT", out), *bodies, "}"]), 18)


def inputs() -> list[np.ndarray]:
    shapes = [(B, H, Q, D), (B, H, K, D), (B, H, K, E), (Q, K), (H, 1, K), (B, 1, 1, K)]
    given = [floats(*shape, seed=n) for n, shape in enumerate(shapes)]
    keep = np.random.default_rng(9).random((B, 1, Q, K)) < 0.7
    keep[..., 0] = True
    return [*given, keep]


def lowered(graph: Graph, **options: bool) -> Graph:
    for _, run in passes(PassOptions(**options)):  # type: ignore[arg-type]
        graph = run(graph)
    return graph


def found(proto: onnx.ModelProto, **options: bool) -> list[str]:
    ops = [n.op for n in lowered(onnx_file.load(proto), **options).nodes]
    return [op for op in ops if op in ("attention", "exp")]


@pytest.mark.parametrize("name", FORMS)
def test_found(name: str) -> None:
    assert found(model([name])) == ["attention"]


@pytest.mark.parametrize("name", ["added", "twice", "kept", "filled"])
def test_found_with_fewer_steps(name: str) -> None:
    """As derivatives have them: one mask, added or a condition."""
    proto = model([name])
    graph = fuse_attention(lowered(onnx_file.load(proto), attention=False), stepped=False)
    (node,) = [n for n in graph.nodes if n.op == "attention"]
    assert "steps" not in node.attrs and len(node.operands) == 4
    for got, wanted in zip(interpret(graph, inputs()), reference(proto, *inputs()), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


CASTS = {
    "behind a mask": ("m = Add (s, bias) x = Cast <to = 1> (m) p0 = Softmax (x) p = Cast <to = 10> (p0)", True),
    "before a mask": ("w = Cast <to = 1> (s) x = Add (w, far) p0 = Softmax (x) p = Cast <to = 10> (p0)", True),
    "before a guard": (
        "w = Cast <to = 1> (s) p0 = Softmax (w) p1 = Cast <to = 10> (p0) n = IsNaN (p1) p = Where (n, zero, p1)", True,
    ),
    "behind a guard": (
        "w = Cast <to = 1> (s) p0 = Softmax (w) n = IsNaN (p0) p1 = Where (n, none, p0) p = Cast <to = 10> (p1)", True,
    ),
    "temperatures": ("w = Cast <to = 1> (s) x = Mul (w, far) p0 = Softmax (x) p = Cast <to = 10> (p0)", False),
    "rounded": ("w = Cast <to = 1> (s) h = Cast <to = 10> (w) c = Cast <to = 1> (h) p0 = Softmax (c)"
                " p = Cast <to = 10> (p0)", False),
    "of float32": ("q1 = Cast <to = 1> (q) k1 = Cast <to = 1> (kt) x = MatMul (q1, k1) p0 = Softmax (x)"
                   " p = Cast <to = 10> (p0)", False),
    "read twice": ("x = Cast <to = 1> (s) p0 = Softmax (x) p = Cast <to = 10> (p0) z = ReduceSum (p0)", False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_halves(name: str) -> None:
    """A softmax in float32 of scores of halves is one of halves for a kernel, which has scores in float32; but no cast
    is passed that rounds scores, or that factors or products of float32 need.
    """
    body, is_found = CASTS[name]
    twice = name == "read twice"
    proto = parse(
        f"(float16[2, 9, 16] q, float16[2, 16, 11] kt, float16[2, 11, 16] v, float16[9, 11] bias, float[9, 1] far) =>"
        f" (float16[2, 9, 16] y{', float[1, 1, 1] z' * twice}) <float16 zero = {{0}}, float none = {{0}}> {{"
        f" s = MatMul (q, kt) {body} y = MatMul (p, v) }}", 18,
    )  # fmt: skip
    ops = {"attention"} if is_found else {"exp"}
    assert set(found(proto, half_attention=True, widen=False)) == ops
    assert set(found(proto)) == {"exp"}, "where halves are computed in float32, casts round"


@pytest.mark.parametrize("name", FORMS)
def test_answers(name: str) -> None:
    """As in float64, in rows without a key as well."""
    proto, given = model([name]), with_an_empty_row()
    graph = onnx_file.load(proto)
    (got,), (wanted,) = interpret(lowered(graph), given), evaluate_float64(decompose(graph), given)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


def test_compiled() -> None:
    """As without the kernel, and as in float64."""
    names = ["twice", "kept", "filled_then_added", "clamped", "less", "capped", "guarded"]
    names += ["temperatures", "windows", "lone"]
    proto, given = model(names), with_an_empty_row()
    fused, plain = onnxc.compile(proto), onnxc.compile(proto, attention=False)
    assert [k.kind for k in fused.explain().kernels].count("attention") == len(names)
    got, apart = fused(*given), plain(*given)
    for name, wanted in zip(names, evaluate_float64(decompose(onnx_file.load(proto)), given), strict=True):
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(got[name], apart[name], rtol=1e-4, atol=2e-5, err_msg=name)
    assert (got["guarded"][1, :, 4] == 0).all() and np.isnan(got["kept"][1, :, 4]).all()


def with_an_empty_row() -> list[np.ndarray]:
    given = inputs()
    given[-1][1, 0, 4] = False
    return given


def test_hidden_scores_do_not_count() -> None:
    """A score that is replaced may be NaN; one to which minus infinity is added may not."""
    proto = model(["kept", "added"])
    graph, compiled = lowered(onnx_file.load(proto)), onnxc.compile(proto)
    for bad in (np.nan, np.inf, -np.inf):
        given = inputs()
        given[1][:, :, 7] = bad
        given[3][:, 7] = -np.inf
        given[-1][..., 7] = False
        with np.errstate(all="ignore"):
            wanted = interpret(graph, given)
        for k, x in enumerate(wanted):
            np.testing.assert_array_equal(np.isnan(compiled(*given)[k]), np.isnan(x))
        assert np.isfinite(wanted[0]).all() and np.isnan(wanted[1]).any()


ROWS = """(float[B, 2, Q, 8] q, float[B, 2, K, 8] k, float[B, 2, K, 5] v, bool[Q, 1] some) => (float[B, 2, Q, 5] y) {
  c = Constant <value = float {0.3}> ()  low = Constant <value = float {-9}> ()
  kt = Transpose <perm = [0, 1, 3, 2]> (k)  product = MatMul (q, kt)  s = Where (some, product, low)  x = Mul (s, c)
  p = Softmax <axis = -1> (x)  y = MatMul (p, v) }"""


@pytest.mark.parametrize("batch", [2, 0])
def test_conditions_of_whole_rows_and_any_batch(batch: int) -> None:
    """A condition that all keys share; no samples at all."""
    proto = parse(ROWS)
    shapes = [(batch, 2, Q, 8), (batch, 2, K, 8), (batch, 2, K, 5)]
    given = [*(floats(*shape, seed=n) for n, shape in enumerate(shapes)), np.arange(Q)[:, None] % 3 > 0]
    compiled = onnxc.compile(proto, threads=2)
    assert [k.kind for k in compiled.explain().kernels].count("attention") == 1
    np.testing.assert_allclose(compiled(*given)["y"], reference(proto, *given)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("given", "taken", "keys"), [((2, 3), (7, 1), 0), ((2, 0), (5, 0), 6)])
def test_scores_without_elements_may_have_any_leading_axes(
    given: tuple[int, int], taken: tuple[int, int], keys: int
) -> None:
    (a, b), (c, d) = given, taken
    text = f"""<ir_version: 8, opset_import: ["" : 18]> none (float[{a}, {b}, 5, 4] q, float[{a}, {b}, 4, {keys}] kt,
        float[{a}, 1, 5, {keys}] mask, float[{c}, {d}, {keys}, 4] v) => (float[{c}, {d}, 5, 4] y) {{
      s = MatMul (q, kt)  m = Add (s, mask)  to = Constant <value = int64[4] {{{c}, {d}, 5, {keys}}}> ()
      r = Reshape <allowzero = 1> (m, to)  p = Softmax (r)  y = MatMul (p, v)
    }}"""
    shapes = [(a, b, 5, 4), (a, b, 4, keys), (a, 1, 5, keys), (c, d, keys, 4)]
    (y,) = onnxc.compile(onnx.parser.parse_model(text))(*(np.zeros(s, np.float32) for s in shapes)).values()
    assert y.shape == (c, d, 5, 4) and not y.any()


def test_scales_beyond_the_range() -> None:
    """One after the other they are infinite; their product is no number of the dtype."""
    text = ROWS.replace("x = Mul (s, c)", "big = Constant <value = float {1e30}> () a = Mul (s, big) x = Mul (a, big)")
    assert "attention" not in [n.op for n in lowered(onnx_file.load(parse(text))).nodes]


def test_text() -> None:
    """What becomes of scores is printed, and parses back."""
    graph = lowered(onnx_file.load(model(["capped", "added_then_kept"])))
    text = to_text(graph)
    assert 'steps=("tanh", "scale", "add")' in text and 'steps=("add", "keep")' in text
    assert to_text(from_text(text)) == text


MASKED = """(float[1, 4, 5, 8] q, float[1, 2, 7, 8] k, float[1, 2, 7, 8] v, MASK) => (y) {
  y = Attention <is_causal = 1, softcap = CAP> (q, k, v, m) }"""


@pytest.mark.parametrize("cap", ["2.5", "-2.5"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_the_operator_with_a_row_without_keys(kind: str, cap: str) -> None:
    """Rows without a key are zeros, made so behind the kernel; a softcap that is not positive is none."""
    proto = parse(MASKED.replace("MASK", f"{kind}[5, 7] m").replace("CAP", cap), 23)
    q, k, v = (floats(1, n, m, 8, seed=n) for n, m in ((4, 5), (2, 7), (2, 7)))
    mask = np.ones((5, 7), bool)
    mask[2] = False
    given = [q, k, v, mask if kind == "bool" else np.where(mask, 0, -np.inf).astype(np.float32)]
    graph = lowered(onnx_file.load(proto))
    assert [n.op for n in graph.nodes if n.op in ("attention", "exp")] == ["attention"]
    (got,), (wanted,) = interpret(graph, given), reference(proto, *given)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert (got[:, :, 2] == 0).all()
