"""Attention of several steps on GPUs: softcaps, bounds and masks in any order, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxc.codegen.triton.attention_mask import Band
from onnxc.codegen.triton.attention_steps import Step, steps_of
from onnxc.codegen.triton.attention_tiles import AttentionTile, Facts, candidates
from onnxc.ir import dtypes
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from tests.targets import needs_triton
from tests.test_triton_attention import INF, Array, Case, band, heads, normal, reads_no_mask
from tests.test_triton_attention_parts import parts
from tests.triton_simulator import Answer, Request, Simulator, program_of

OPS = {"scale": "Mul", "divide": "Div", "tanh": "Tanh", "max": "Max", "add": "Add", "sub": "Sub"}
LOW = -(2.0**30)  # beside which scores are nothing in float32


class Stepped(Case):
    """Attention whose scores go through `steps`: a name of `score_steps` (or `divide`, or `cast`: float32 from there on
    until after their softmax), a mask, a number.
    """

    def __init__(self, q: Array, k: Array, v: Array, scale: float = 0.25, guard: bool = False) -> None:
        super().__init__(q, k, v, scale, guard)
        self.steps: list[tuple[str, Array | None, float | None]] = []
        self.names: list[str | None] = []

    def then(
        self, name: str, mask: Array | None = None, number: float | None = None, constant: bool = False
    ) -> Stepped:
        """With one more step; its mask is an initializer or an input."""
        self.steps.append((name, mask, number))
        if mask is None:
            self.names.append(None)
        elif constant:
            self.names.append(self.constant(f"known{len(self.steps)}", mask))
        else:
            self.names.append(f"bias{len(self.inputs) or ''}")
            self.inputs.append(mask)
        return self

    def capped(self, cap: float) -> Stepped:
        """With a softcap."""
        return self.then("divide", number=cap).then("tanh").then("scale", number=cap)

    def masking(self, s: str, u: str) -> list[onnx.NodeProto]:
        nodes, dtype = [], self.arrays[0].dtype
        for k, ((name, _, number), mask) in enumerate(zip(self.steps, self.names, strict=True)):
            given = None if number is None else self.constant(f"n{k}", np.asarray(number, dtype))
            into = u if k == len(self.steps) - 1 else f"step{k}"
            if name == "cast":
                nodes.append(helper.make_node("Cast", [s], [into], to=onnx.TensorProto.FLOAT))
                dtype = np.dtype(np.float32)
            elif name in ("fill", "keep"):
                nodes.append(helper.make_node("Where", [mask, *((given, s) if name == "fill" else (s, given))], [into]))
            else:
                nodes.append(helper.make_node(OPS[name], [s, *(x for x in (mask, given) if x)], [into]))
            s = into
        return nodes

    def model(self, dynamic: bool = False) -> onnx.ModelProto:
        made = super().model(dynamic)
        if any(name == "cast" for name, _, _ in self.steps):
            at = next(k for k, n in enumerate(made.graph.node) if n.op_type == "Softmax")
            made.graph.node[at].output[0] = "wide"
            kind = helper.np_dtype_to_tensor_dtype(self.arrays[0].dtype)
            made.graph.node.insert(at + 1, helper.make_node("Cast", ["wide"], ["p"], to=kind))
        return made

    def wanted(self) -> Array:
        """In float32 where steps round to it, else in float64."""
        q, k, v = (x.astype(np.float64) for x in self.arrays)
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat(share, 1), v.repeat(share, 1)
        with np.errstate(all="ignore"):
            s = (q @ k.swapaxes(-1, -2) * self.scale).astype(np.float32)
            for name, mask, number in self.steps:
                s = after(s, name, mask, number)
            s = s.astype(np.float64)
            e = np.exp(s - s.max(-1, keepdims=True, initial=-INF))
            p = e / e.sum(-1, keepdims=True)
            return np.asarray(np.where(np.isnan(p), 0, p) @ v if self.guard else p @ v)


def after(s: Array, name: str, mask: Array | None, number: float | None) -> Array:
    """Scores after a step."""
    n = np.float32(0 if number is None else number)
    if name in ("fill", "keep"):
        return np.where(mask, *((n, s) if name == "fill" else (s, n)))
    m = np.float32(0) if mask is None else mask.astype(np.float32)
    return np.asarray(
        {"cast": lambda: s,
         "scale": lambda: s * n, "divide": lambda: s / n, "tanh": lambda: np.tanh(s), "max": lambda: np.maximum(s, n),
         "add": lambda: s + m, "sub": lambda: s - m}[name]()
    )  # fmt: skip


def kernel(answer: Answer) -> str:
    """The text of the kernel that multiplies."""
    (text,) = [t for t in answer.source.split("\nk") if "tl.dot" in t]
    return text


def leaves_out(answer: Answer) -> bool:
    """Whether keys that no row of a block sees are not visited."""
    bounds = [line for line in kernel(answer).splitlines() if line.strip().startswith(("whole =", "end ="))]
    return any("row0" in line for line in bounds)


def hidden(queries: int, keys: int, lower: int | None, upper: int | None) -> Array:
    """Where a row does not see a key."""
    return np.asarray(band(queries, keys, lower, upper, 1.0) != 0)


# ---------------------------------------------------------------- softcaps


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("queries", "keys", "depth", "columns"), [(1, 1, 16, 16), (65, 130, 16, 5), (7, 5, 8, 24)])
def test_softcap(simulator: Simulator, queries: int, keys: int, depth: int, columns: int, dtype: str) -> None:
    for dynamic in (False, True):
        Stepped(*heads(queries, keys, depth, columns, dtype), 2.0).capped(3.0).agrees(simulator, dynamic)
    Stepped(*heads(queries, keys, depth, columns, dtype)).then("scale", number=4.0).then("tanh").agrees(simulator)


@needs_triton
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("name", "low"), [("add", -INF), ("fill", -INF), ("fill", -65504.0), ("add", -65504.0)])
def test_softcap_and_a_causal_mask(simulator: Simulator, name: str, low: float, constant: bool) -> None:
    """Nothing of it is read, and what it hides is left out, as without a softcap."""
    case = Stepped(*heads(90, 130), 2.0).capped(4.0)
    if name == "add":
        case.then("add", band(90, 130, None, 40, low), constant=constant)
    else:
        case.then("fill", hidden(90, 130, None, 40), low, constant)
    answer = case.agrees(simulator)
    assert reads_no_mask(answer) == leaves_out(answer) == constant


@needs_triton
@pytest.mark.parametrize("low", [-INF, -65504.0])
def test_what_a_softcap_raises_is_not_left_out(simulator: Simulator, low: float) -> None:
    """A mask before a tanh makes scores -1: it is found from indices, key by key."""
    case = Stepped(*heads(90, 130)).then("fill", hidden(90, 130, None, 40), low, True).capped(2.0)
    answer = case.agrees(simulator)
    assert reads_no_mask(answer) and not leaves_out(answer)
    case = Stepped(*heads(90, 130)).then("add", band(90, 130, None, 40, low), None, True).then("max", number=-2.0)
    answer = case.agrees(simulator)
    assert reads_no_mask(answer) and not leaves_out(answer)


@needs_triton
def test_windows_of_two_masks(simulator: Simulator) -> None:
    """Both leave keys out, and neither is read; a row may see nothing of them together."""
    for lower, upper, guard in ((-20, 3, False), (30, 40, True), (3, -3, True)):
        case = Stepped(*heads(90, 130, dtype="float32"), guard=guard).capped(2.0)
        case.then("fill", hidden(90, 130, None, upper), -INF, True).then(
            "keep", ~hidden(90, 130, lower, None), -INF, True
        )
        answer = case.agrees(simulator)
        assert reads_no_mask(answer) and leaves_out(answer)


# ---------------------------------------------------------------- several masks


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_of_any_shapes(simulator: Simulator, dtype: str, dynamic: bool) -> None:
    """Each is read as it is, and added in order."""
    case = Stepped(*heads(70, 90, dtype=dtype))
    case.then("add", normal(1, 2, 70, 90, dtype=dtype)).then("fill", np.arange(90) % 7 == 3, -INF)
    case.then("sub", normal(2, 1, 1, dtype=dtype)).then("keep", np.arange(70)[:, None] % 5 > 0, 0.5)
    case.then("max", number=-0.5).then("add", normal(1, 90, dtype=dtype), constant=not dynamic)
    answer = case.agrees(simulator, dynamic)
    assert kernel(answer).split("):")[0].count("p") >= 8, "q, k, v, the result, and all masks"


@needs_triton
def test_the_order_of_sums_shows(simulator: Simulator) -> None:
    """All keys of a query are lowered: what is added before is rounded, as by the model's own order."""
    case = Stepped(*heads(20, 40, dtype="float32"))
    case.then("add", normal(1, 2, 20, 40, dtype="float32")).then("add", np.full((1, 1, 1, 40), LOW, np.float32))
    answer = case.agrees(simulator)
    v = case.arrays[2]
    np.testing.assert_allclose(answer.outputs[0], v.mean(2, keepdims=True).repeat(20, 2), 1e-5, 1e-5)


@needs_triton
@pytest.mark.parametrize("known", ["fill", "add"])
def test_masks_that_lower_what_a_band_shows(simulator: Simulator, known: str) -> None:
    """Padding lowers all keys that a row sees as far as those that it does not see: none can be left out."""
    padding = np.where(np.arange(90) < 50, LOW, 0).astype(np.float32)
    for order in (0, 1):
        case = Stepped(*heads(90, 90, dtype="float32"))
        for k in (order, 1 - order):
            if k:
                case.then("add", padding)
            elif known == "fill":
                case.then("fill", hidden(90, 90, None, 0), LOW, True)
            else:
                case.then("add", band(90, 90, None, 0, LOW, "float32"), None, True)
        assert not leaves_out(case.agrees(simulator))


@needs_triton
def test_masks_that_replace_what_a_band_hides(simulator: Simulator) -> None:
    """Minus infinity, and then a number where keys are padded: hidden ones are as good as seen ones."""
    padded = (np.arange(90) < 50) | (np.arange(90) > 70)
    case = Stepped(*heads(90, 90, dtype="float32")).then("fill", hidden(90, 90, None, 0), -INF, True)
    assert not leaves_out(case.then("fill", padded, LOW).agrees(simulator))
    case = Stepped(*heads(90, 90, dtype="float32"), guard=True).then("fill", hidden(90, 90, None, 0), -INF, True)
    assert leaves_out(case.then("fill", padded, -INF).agrees(simulator)), "here they stay hidden"
    case = Stepped(*heads(90, 90, dtype="float32"), guard=True).then("fill", padded, LOW)
    assert leaves_out(case.then("fill", hidden(90, 90, None, 0), -INF, True).agrees(simulator))


@needs_triton
def test_scales_of_what_a_band_hides(simulator: Simulator) -> None:
    for number, low, out in ((0.25, -INF, True), (0.0, -INF, False), (0.25, -1e9, False), (4.0, -1e9, True)):
        case = Stepped(*heads(90, 90, dtype="float32")).then("fill", hidden(90, 90, None, 0), low, True)
        assert leaves_out(case.then("scale", number=number).agrees(simulator)) == out


@needs_triton
@pytest.mark.parametrize("low", [-1e9, -3.4e38])
def test_scores_farther_apart_than_what_hides(simulator: Simulator, low: float) -> None:
    """Numbers of which a key is hidden beside scores of another size are added or replace them as they are."""
    hide = hidden(90, 90, None, 0)
    for scale in (1.0, 1e9):
        out = scale == 1 or low < -1e30
        case = Stepped(*heads(90, 90, dtype="float32"), scale)
        assert leaves_out(case.then("add", band(90, 90, None, 0, low, "float32"), None, True).agrees(simulator)) == out
        case = Stepped(*heads(90, 90, dtype="float32")).then("tanh").then("scale", number=scale)
        assert leaves_out(case.then("fill", hide, low, True).agrees(simulator)) == out
    case = Stepped(*heads(90, 90, dtype="float32"), 0.0).then("max", number=1e12)
    assert leaves_out(case.then("fill", hide, low, True).agrees(simulator)) == (low < -1e30)


@needs_triton
def test_masks_of_zeros_are_not_read(simulator: Simulator) -> None:
    case = Stepped(*heads(40, 70)).then("add", np.zeros((40, 70), np.float16), constant=True).capped(2.0)
    case.then("fill", np.zeros((1, 70), bool), -INF, True).then("sub", np.zeros((40, 1), np.float16), constant=True)
    assert reads_no_mask(case.agrees(simulator))


@needs_triton
def test_a_window_that_is_subtracted(simulator: Simulator) -> None:
    case = Stepped(*heads(90, 90, dtype="float32")).capped(2.0)
    answer = case.then("sub", band(90, 90, -9, 0, INF, "float32"), constant=True).agrees(simulator)
    assert reads_no_mask(answer) and leaves_out(answer)


# ---------------------------------------------------------------- where they run


def full(case: Stepped, queries: int, keys: int) -> Stepped:
    """With a softcap, a mask of heads, padding, and a causal one."""
    dtype = case.arrays[0].dtype.name
    count = case.arrays[0].shape[1]
    padding = np.where(np.arange(keys) % 9 == 4, -INF, 0).astype(dtype)[None, None, None]
    case.capped(2.0).then("add", normal(1, count, 1, keys, dtype=dtype)).then("add", padding)
    return case.then("fill", hidden(queries, keys, None, keys - queries), -INF, True)


@needs_triton
@pytest.mark.parametrize("wide", [False, True])
def test_grouped_heads(simulator: Simulator, wide: bool) -> None:
    for queries in (2, 20):
        q, k, v = normal(2, 6, queries, 16), normal(2, 2, 70, 16), normal(2, 2, 70, 16)
        answer = full(Stepped(q, k, v), queries, 70).agrees(simulator, wide=wide)
        assert ("head =" in answer.source) == (queries == 2) and leaves_out(answer)


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts(simulator: Simulator, dtype: str) -> None:
    for case in (
        full(Stepped(*grouped(3, 1111, dtype)), 3, 1111),
        Stepped(*grouped(1, 1537, dtype)).capped(4.0),
        Stepped(*grouped(2, 1400, dtype)).then("max", number=-0.5).then("scale", number=0.5),
        Stepped(*grouped(2, 1400, dtype), guard=True)
        .then("fill", np.arange(1400) < 1390, -INF)
        .then("keep", np.array([[True], [False]]), -INF),
    ):
        assert parts(case.agrees(simulator)) > 3


def grouped(queries: int, keys: int, dtype: str) -> tuple[Array, Array, Array]:
    """q, k, v of four heads, each two of which share keys."""
    k, v = (normal(1, 2, keys, 16, dtype=dtype) for _ in range(2))
    return normal(1, 4, queries, 16, dtype=dtype), k, v


@needs_triton
@pytest.mark.parametrize("depth", [64, 128])
def test_every_tile(simulator: Simulator, depth: int) -> None:
    q, k, v = (x[:, :1] for x in heads(90, 150, depth, depth))
    for number in range(len(candidates(Facts(90, 150, 1, depth, 16, causal=True, described=True)))):
        answer = full(Stepped(q, k, v, 0.1), 90, 150).agrees(simulator, candidate=number, descriptors=number % 2 == 1)
        assert leaves_out(answer)


@needs_triton
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_what_is_no_number_stays_so(simulator: Simulator, bad: float, guard: bool) -> None:
    """But for what a condition replaces; a tanh makes numbers of infinities."""
    for place in range(3):
        arrays = heads(70, 130, dtype="float32")
        arrays[place][0, 0, 66, 3] = bad
        Stepped(*arrays, guard=guard).capped(2.0).then("add", normal(70, 130, dtype="float32")).agrees(simulator)
        case = Stepped(*arrays, guard=guard).then("max", number=-1.0)
        case.then("fill", (np.arange(130) == 66) | (np.arange(70)[:, None] == 66), -9.0).agrees(simulator)


@needs_triton
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_a_converted_model(simulator: Simulator, dtype: str, tolerance: float) -> None:
    """Scores and numbers stay float32's."""
    padded = np.arange(40) % 3 == 1
    for alone in (False, True):
        case = Stepped(*heads(20, 40, dtype="float32")).capped(50.0)
        case.then("fill", hidden(20, 40, None, 20), -3.4e38, True)
        if not alone:
            case.then("add", np.where(padded, -3.4e38, 0).astype(np.float32))
        answer = simulator.run(case.model().SerializeToString(), [*case.arrays, *case.inputs], dtype=dtype)
        assert answer.kinds.count("attention") == 1 and leaves_out(answer) == alone
        np.testing.assert_allclose(answer.outputs[0], case.wanted(), tolerance, tolerance)


# ---------------------------------------------------------------- halves whose softmax is float32


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("low", [-INF, -65504.0, -3.4e38])
def test_scores_of_halves_that_are_cast(simulator: Simulator, low: float, dynamic: bool) -> None:
    """Before a mask or behind it."""
    late = Stepped(*heads(90, 130), guard=True).capped(2.0)
    late.then("add", band(90, 130, None, 40, max(low, -65504.0)), None, not dynamic).then("cast")
    early = Stepped(*heads(90, 130)).then("cast").then("fill", hidden(90, 130, None, 40), low, not dynamic)
    for case in (late, early, Stepped(*heads(90, 130)).then("cast")):
        answer = case.agrees(simulator, dynamic)
        assert len(answer.kinds) == 1 and leaves_out(answer) == (len(case.steps) > 1 and not dynamic)


@needs_triton
def test_masks_of_float32_over_halves(simulator: Simulator) -> None:
    """They are not rounded to halves."""
    far = np.where(np.arange(40) % 3 == 1, -1e6, 0).astype(np.float32)
    case = Stepped(*heads(20, 40)).then("cast").then("add", far).then("add", normal(20, 40, dtype="float32"))
    assert len(case.then("scale", number=0.5).agrees(simulator).kinds) == 1


# ---------------------------------------------------------------- any steps


def drawn(seed: int) -> tuple[Stepped, bool]:
    """Any steps of any masks, and whether sizes are to be known at run time only."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float16", "float32"]))
    queries, keys = int(rng.choice([1, 3, 17, 70, 90])), int(rng.choice([1, 5, 64, 90, 131, 300]))
    count, shared = ((2, 2), (6, 2), (4, 1))[rng.integers(3)]
    q, k, v = (
        rng.standard_normal((2, n, m, 16)).astype(dtype) for n, m in ((count, queries), (shared, keys), (shared, keys))
    )
    case = Stepped(q, k, v, float(rng.choice([0.25, 1.0])), bool(rng.integers(2)))
    dynamic = seed % 3 == 1 and count == shared and min(queries, keys) > 1
    lows = [-INF, -INF, -3.0, -65504.0 if dtype == "float16" else LOW]

    def shape() -> tuple[int, ...]:
        whole = (2, count, queries, keys)
        return tuple(d if rng.integers(2) else 1 for d in whole)[rng.integers(4) :]

    def window() -> tuple[int | None, int | None]:
        lower, upper = (int(x) for x in rng.integers(-queries, keys, 2))
        return [(None, upper), (lower, None), (min(lower, 0), keys - queries)][rng.integers(3)]

    for _ in range(int(rng.integers(1, 7))):
        name = str(rng.choice(["scale", "divide", "tanh", "max", "add", "sub", "fill", "keep", "add", "fill", "keep"]))
        constant, number = bool(rng.integers(2)) and not dynamic, None
        mask: Array | None = None
        if name in ("scale", "divide"):
            number = float(rng.choice([0.5, 2.0, 3.0]))
        elif name == "max":
            number = float(rng.choice([-0.5, -4.0]))
        elif name in ("fill", "keep"):
            number = float(rng.choice([*lows, 0.5]))
            mask = hidden(queries, keys, *window()) if rng.integers(2) else rng.random(shape()) < 0.3
            mask = ~mask if name == "keep" else mask
        elif name != "tanh" and rng.integers(2):
            low = float(rng.choice(lows))
            mask = band(queries, keys, *window(), -low if name == "sub" else low, dtype)
        elif name != "tanh":
            mask = rng.standard_normal(shape()).astype(dtype)
        case.then(name, mask, number, constant and mask is not None and mask.size > 1)  # one number is no mask
    return case, dynamic


@needs_triton
@pytest.mark.parametrize("seed", range(24))
def test_any_steps(simulator: Simulator, seed: int) -> None:
    case, dynamic = drawn(seed)
    case.agrees(simulator, dynamic, wide=seed % 5 == 1, candidate=seed // 2)


# ---------------------------------------------------------------- what is known of steps, machine code


def known(*steps: tuple[str, Any, float | None], queries: int = 9, keys: int = 9) -> tuple[list[str], Band | None]:
    """The steps that are left of an attention node's, and the band outside of which keys are left out."""
    b = Builder()
    shapes = {"q": (queries, 4), "kt": (4, keys), "v": (keys, 4)}
    q, kt, v = (b.input(TensorType(dtypes.float32, shape), name) for name, shape in shapes.items())
    masks = [b.constant(m) for _, m, _ in steps if m is not None]
    numbers = tuple(n for _, _, n in steps if n is not None)
    b.one("attention", q, kt, v, *masks, scale=1.0, guard=False, steps=tuple(n for n, _, _ in steps), numbers=numbers)
    found = steps_of(b.nodes[-1], queries, keys)
    return [step.name for step in found.steps], found.band


def test_what_is_left_of_steps() -> None:
    causal, past = np.tri(9) == 0, np.tri(9, 9, -3) > 0
    rest: Any = np.random.default_rng(0).random((9, 9)) < 0.5
    fill, cap = ("fill", causal, -INF), ("tanh", None, None)
    assert known(cap, ("scale", None, 3.0), fill) == (["tanh", "scale"], Band(None, 0))
    assert known(fill, cap) == (["fill", "tanh"], None)
    assert known(fill, ("scale", None, 2.0), ("max", None, -INF)) == (["scale", "max"], Band(None, 0))
    assert known(fill, ("scale", None, -2.0)) == (["fill", "scale"], None)
    assert known(fill, ("max", None, -9.0)) == (["fill", "max"], None)
    assert known(fill, ("fill", past, -INF)) == ([], Band(-2, 0))
    assert known(fill, ("add", rest.astype(np.float32), None)) == (["add"], Band(None, 0))
    assert known(fill, ("sub", rest.astype(np.float32), None)) == (["fill", "sub"], None)
    assert known(fill, ("fill", rest, -INF)) == (["fill"], Band(None, 0))
    assert known(fill, ("keep", rest, -1.0)) == (["fill", "keep"], None)
    assert known(("keep", rest, -1.0), fill) == (["keep"], Band(None, 0))
    low = ("fill", causal, -3e38)
    assert known(cap, low) == (["tanh"], Band(None, 0, -3e38))
    assert known(low, ("fill", past, -3e38)) == (["fill", "fill"], None), "what both hide need not be as low"
    assert known(low, ("add", rest.astype(np.float32), None)) == (["fill", "add"], None)
    assert known(low, fill) == (["fill"], Band(None, 0))
    assert known(low, ("scale", None, 1e-30)) == (["fill", "scale"], None)
    assert known(("add", np.zeros((9, 9), np.float32), None), ("keep", np.ones(9, bool), -1.0)) == ([], None)


def test_masks_that_are_known_are_no_operands() -> None:
    case = Stepped(*heads(40, 70)).then("fill", hidden(40, 70, None, 30), -INF, True).then("add", normal(40, 70))
    graph, _ = program_of(Request(case.capped(2.0).model().SerializeToString(), []))
    (node,) = [n for n in graph.nodes if n.op == "attention"]
    steps = node.attrs["known"]
    assert [s.name for s in steps] == ["fill", "add", "scale", "tanh", "scale"] and len(node.operands) == 4
    assert steps[1] == Step("add", mask=0)


@needs_triton
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("tile", [None, AttentionTile(64, 64, 4, 3, described=1)])
def test_machine_code(architecture: int, tile: AttentionTile | None) -> None:
    """No role is given to warps."""
    from onnxc.codegen.triton.cubin import compile_program

    case = full(Stepped(*(normal(1, 2, 512, 64) for _ in range(3))), 512, 512)
    found = candidates(Facts(512, 512, 2, 64, 16, causal=True, described=True))
    number = found.index(tile) if tile is not None else 0
    _, program = program_of(Request(case.model().SerializeToString(), [], candidate=number, architecture=architecture))
    (image,) = compile_program(program, architecture, 1)
    assert image.code and image.threads == 32 * found[number].warps
    assert "warp_specialize" not in next(iter(program.kernels.values()))
