"""The derivative of attention in training steps on a GPU: kernels in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.errors import UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.gradient import joint
from onnxc.optim import SGD
from onnxc.passes.attention import fuse_attention
from onnxc.passes.decompose import decompose
from onnxc.training.precision import LossScale, before_gradients
from tests.simulated_training import simulated
from tests.targets import needs_triton
from tests.test_attention_forms import model
from tests.triton_simulator import Simulator

pytestmark = needs_triton
Array = np.ndarray[Any, Any]
INF = float("inf")


def band(queries: int, keys: int, lower: int | None, upper: int | None) -> Array:
    """Whether a query sees a key."""
    apart = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    low = apart >= (lower if lower is not None else -queries)
    return np.asarray(low & (apart <= (upper if upper is not None else keys)))


@dataclass
class Case:
    """Attention of some sizes. `mask` is added to the scores; `hidden` says where they are `fill`."""

    queries: int
    keys: int
    depth: int = 16
    columns: int = 16
    scale: float = 0.25
    heads: int = 2
    shared: int = 1  # heads of queries that have the same keys and values
    mask: Array | None = None
    hidden: Array | None = None
    fill: float = -INF
    guard: bool = False

    def arrays(self, seed: int) -> dict[str, Array]:
        """Queries, keys, values, and what the result is multiplied by."""
        rng = np.random.default_rng(seed)
        groups = self.heads // self.shared
        shapes = {
            "q": (1, self.heads, self.queries, self.depth), "k": (1, groups, self.keys, self.depth),
            "v": (1, groups, self.keys, self.columns), "c": (1, self.heads, self.queries, self.columns),
        }  # fmt: skip
        return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}

    def wanted(self, x: dict[str, Array]) -> dict[str, Array]:
        """The gradients of sum(c * y), in float64."""
        q, k, v, c = (x[n].astype(np.float64) for n in "qkvc")
        k, v = k.repeat(self.shared, 1), v.repeat(self.shared, 1)
        s = q @ k.swapaxes(-1, -2) * self.scale
        s = s if self.mask is None else s + self.mask
        s = s if self.hidden is None else np.where(self.hidden, self.fill, s)
        s = s.astype(np.float32).astype(np.float64)  # as far below zero nothing is left of what a mask is added to
        with np.errstate(all="ignore"):
            p = np.exp(s - s.max(-1, keepdims=True))
            p = np.nan_to_num(p / p.sum(-1, keepdims=True))
        ds = p * (c @ v.swapaxes(-1, -2) - (c * (p @ v)).sum(-1, keepdims=True)) * self.scale
        ds = ds if self.hidden is None else np.where(self.hidden, 0, ds)
        found = {"q": ds @ k, "k": ds.swapaxes(-1, -2) @ q, "v": p.swapaxes(-1, -2) @ c}
        groups = self.heads // self.shared
        for n in "kv":
            whole = found[n]
            found[n] = whole.reshape(1, groups, self.shared, *whole.shape[2:]).sum(2)
        return found

    def nodes(self, n: int) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        """The model of it; names end in its number."""
        made: list[onnx.NodeProto] = []
        constants: list[onnx.TensorProto] = []

        def constant(name: str, array: Any) -> str:
            constants.append(numpy_helper.from_array(np.asarray(array), f"{name}{n}"))
            return f"{name}{n}"

        def node(op: str, inputs: list[str], output: str, **attrs: Any) -> str:
            made.append(helper.make_node(op, inputs, [f"{output}{n}"], **attrs))
            return f"{output}{n}"

        k, v = f"k{n}", f"v{n}"
        if self.shared > 1:
            groups = self.heads // self.shared
            for name, width in (("k", self.depth), ("v", self.columns)):
                one = node("Unsqueeze", [f"{name}{n}", constant(f"{name}axis", np.array([2]))], f"{name}one")
                wide = constant(f"{name}wide", np.array([1, groups, self.shared, self.keys, width]))
                flat = constant(f"{name}flat", np.array([1, self.heads, self.keys, width]))
                node("Reshape", [node("Expand", [one, wide], f"{name}many"), flat], f"{name}all")
            k, v = f"kall{n}", f"vall{n}"
        kt = node("Transpose", [k], "kt", perm=[0, 1, 3, 2])
        s = node("Mul", [node("MatMul", [f"q{n}", kt], "s"), constant("scale", np.float32(self.scale))], "t")
        if self.mask is not None:
            data = constant("maskdata", self.mask.astype(np.float32))
            made.append(helper.make_node("Identity", [data], [f"mask{n}"]))
            s = node("Add", [s, f"mask{n}"], "u")
        if self.hidden is not None:
            s = node("Where", [constant("hidden", self.hidden), constant("fill", np.float32(self.fill)), s], "w")
        p = node("Softmax", [s], "p", axis=-1)
        if self.guard:
            p = node("Where", [node("IsNaN", [p], "nan"), constant("zero", np.float32(0)), p], "g")
        y = node("MatMul", [p, v], "y")
        node("ReduceSum", [node("Mul", [y, f"c{n}"], "z")], "l", keepdims=0)
        return made, constants


def model_of(cases: list[Case]) -> tuple[bytes, dict[str, Array], dict[str, Array]]:
    """A model of all cases, whose loss is their sum; its inputs, and its weights."""
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    inputs: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    for n, case in enumerate(cases):
        made, own = case.nodes(n)
        nodes, constants = nodes + made, constants + own
        arrays = case.arrays(n)
        inputs[f"c{n}"] = arrays.pop("c")
        weights |= {f"{name}{n}": x for name, x in arrays.items()}
    nodes.append(helper.make_node("Sum", [f"l{n}" for n in range(len(cases))], ["loss"]))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in inputs.items()]
    constants += [numpy_helper.from_array(x, n) for n, x in weights.items()]
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "g", infos, [loss], constants)
    made_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return made_model.SerializeToString(), inputs, weights


def agree(simulator: Simulator, cases: list[Case], precision: str, tolerance: float) -> None:
    """A step whose rate is 1 takes the gradients from the parameters."""
    model, inputs, weights = model_of(cases)
    options = {"loss_scale": LossScale(initial=1.0)} if precision == "float16" else {}
    found = simulated(
        simulator, model, [inputs], optimizer=SGD(lr=1.0), precision=precision, wrt=list(weights), **options
    )
    assert found.errors == [""]
    assert found.kernels.count("attention_norm") == len(cases)
    assert found.kernels.count("attention_gradient") == 3 * len(cases)
    for n, case in enumerate(cases):
        arrays = {name: weights[f"{name}{n}"] for name in "qkv"} | {"c": inputs[f"c{n}"]}
        for name, gradient in case.wanted(arrays).items():
            own = weights[f"{name}{n}"] - found.state[f"parameter/{name}{n}"].astype(np.float64)
            error = np.linalg.norm(own - gradient) / max(np.linalg.norm(gradient), 1.0)
            assert error < tolerance, f"case {n}, {case}: {name} differs by {error:.1e}"


SIZES = [
    Case(1, 1), Case(7, 5, 8, 24), Case(17, 63, 40, 16), Case(65, 130, 16, 5, heads=1),
    Case(131, 7, 32, 80, heads=1), Case(64, 64, 64, 64, heads=1), Case(20, 70, heads=6, shared=3),
    Case(9, 33, scale=-0.7), Case(5, 9, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize(("precision", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_sizes(simulator: Simulator, precision: str, tolerance: float) -> None:
    agree(simulator, SIZES, precision, tolerance)


def hiding(seen: Array, low: float = -INF) -> Array:
    return np.where(seen, 0.0, low)[None, None]


def test_masks(simulator: Simulator) -> None:
    """Causal ones, windows, rows without a key, numbers that are added; conditions where scores are replaced."""
    rng = np.random.default_rng(5)
    cases = [
        Case(140, 140, heads=1, mask=hiding(band(140, 140, None, 0))),
        Case(40, 170, heads=1, mask=hiding(band(40, 170, None, 130), -1e9)),
        Case(200, 200, heads=1, mask=hiding(band(200, 200, -70, 10)), guard=True),
        Case(140, 70, heads=1, mask=hiding(band(140, 70, 0, None)), guard=True),
        Case(33, 70, mask=rng.standard_normal((1, 2, 33, 70))),
        Case(33, 70, mask=rng.standard_normal((1, 1, 1, 70)), guard=True),
        Case(21, 40, hidden=rng.random((1, 2, 21, 40)) < 0.4, fill=-3.0),
        Case(90, 90, heads=1, hidden=~band(90, 90, None, 0)[None, None]),
        Case(8, 20, mask=np.where(np.arange(8)[:, None] % 3 == 0, -INF, np.zeros((8, 20)))[None, None], guard=True),
    ]
    agree(simulator, cases, "float16", 4e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_rows_that_numbers_hide(simulator: Simulator, precision: str, tolerance: float) -> None:
    """Where all scores of a row are the same large number, all keys count alike, and other rows see nothing of it."""
    rows = np.broadcast_to(np.arange(8)[:, None] % 3 == 0, (8, 20))[None, None]
    lowest = float(np.finfo(np.float32).min)
    cases = [Case(8, 20, hidden=rows, fill=low) for low in (-1e9, lowest)]
    cases += [Case(8, 20, mask=np.where(rows, low, 0.0)) for low in (-1e9, lowest)]
    agree(simulator, cases, precision, tolerance)


@pytest.mark.parametrize("stop", ["s0", "t0", "kt0", "p0"])
def test_where_gradients_stop(stop: str) -> None:
    """At values inside of attention too."""
    graph = onnx_file.load(model_of([Case(7, 5)])[0])

    def reached(**options: Any) -> list[bool]:
        return [
            g is not None for g in joint(graph, "loss", ["q0", "k0", "v0"], stop_gradient=[stop], **options).gradients
        ]

    assert reached(prepare=before_gradients("bfloat16", on_gpu=True)) == reached()


def test_steps_are_differentiated_as_written() -> None:
    """Kernels of derivatives know one mask: other steps are not offered, and no gradient leaves them out."""
    graph = decompose(onnx_file.load(model(["capped", "added_then_kept", "added"])))
    prepare = before_gradients("bfloat16", on_gpu=True)
    assert prepare is not None
    found = [n for n in prepare(graph, graph.inputs[:3]).nodes if n.op in ("attention", "exp")]
    assert sorted(n.op for n in found) == ["attention", "exp", "exp"] and not any("steps" in n.attrs for n in found)
    both = Case(7, 5, mask=np.arange(35.0).reshape(7, 5), hidden=np.eye(7, 5) == 1)
    with pytest.raises(UnsupportedError, match="no derivative through add, fill"):
        joint(onnx_file.load(model_of([both])[0]), "loss", ["q0"], prepare=lambda g, wrt: fuse_attention(g))


@pytest.mark.parametrize("scale", [0.25, 64.0, 1e5])
@pytest.mark.parametrize("low", [None, -1e9])
def test_scores_beyond_what_masks_are_bounded_to(scale: float, low: float | None) -> None:
    """They are differentiated as written: kernels of derivatives take a mask of -1e9 for -65536."""
    model, _, _ = model_of([Case(7, 5, scale=scale, mask=None if low is None else np.full((7, 5), low))])
    made = joint(onnx_file.load(model), "loss", ["q0"], prepare=before_gradients("bfloat16", on_gpu=True))
    assert ("attention" in [n.op for n in made.graph.nodes]) == (low is None or scale <= 64)
