"""One operator each, at ordinary sizes: beside onnxruntime, with open sizes, and on a GPU.

    python -m benchmarks.single                  # each operator's time by onnxruntime's, and with open sizes by its own
    python -m benchmarks.single CumSum Gather    # these operators
    python -m benchmarks.single --gpu            # device time beside the time in which a GPU moves as many bytes

A model is as fast as its slowest operator lets it be, and a zoo of models has few of them. What stands out here (`<<`:
slower than onnxruntime, or than twice what bytes take) is worth a look: what nobody has measured is slow. With `--gpu`
answers are compared with those of onnxruntime on the CPU as well. Times are the best of many calls that take turns, in
one process: they tell ratios of 1.2 and more on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxc
from benchmarks.common import THREADS
from onnxc.errors import OnnxcError
from onnxc.tools.bench import duration

SECONDS, TURN, REST = 1.0, 0.03, 0.005
BYTES, LAUNCH = 4e12, 2.5e-6  # of a GPU: bytes a second, and what a kernel takes at least
SLOW, FAR = 1.2, 2.0
OPENED = 4  # sizes above which a dim is opened, but for channels

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(0)


@dataclass
class Case:
    """An operator and its inputs; those at the places `const` are the model's own."""

    op: str
    inputs: Sequence[Array | None]
    const: Sequence[int] = ()
    outputs: int = 1
    domain: str = ""
    opset: int = 22
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The operator, and the shapes of what it is given."""
        shapes = (x for k, x in enumerate(self.inputs) if x is not None and k not in self.const)
        return f"{self.op} {', '.join('x'.join(map(str, x.shape)) for x in shapes)}"

    def model(self, opened: bool = False) -> onnx.ModelProto:
        """The model; `opened` has no number for dims, but for those of channels and small ones."""
        names = ["" if x is None else f"x{k}" for k, x in enumerate(self.inputs)]
        given = [(k, x) for k, x in enumerate(self.inputs) if x is not None]
        outputs = [f"y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, outputs, domain=self.domain, **self.attrs)
        infos = [
            helper.make_tensor_value_info(f"x{k}", helper.np_dtype_to_tensor_dtype(x.dtype), _dims(x, opened))
            for k, x in given if k not in self.const
        ]  # fmt: skip
        graph = helper.make_graph(
            [node], "g", infos, [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(x, f"x{k}") for k, x in given if k in self.const],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(self.domain, 3 if "ml" in self.domain else 1)] if self.domain else []
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def feeds(self) -> dict[str, Array]:
        return {f"x{k}": x for k, x in enumerate(self.inputs) if x is not None and k not in self.const}


def _dims(x: Array, opened: bool) -> list[int | str]:
    """Dims of one size have one name."""
    channels = 1 if x.ndim > 2 else -1
    return [f"n{d}" if opened and d > OPENED and k != channels else d for k, d in enumerate(x.shape)]


# ---------------------------------------------------------------- cases


def _f(*shape: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def _i(low: int, high: int, *shape: int, dtype: Any = np.int64) -> Array:
    return rng.integers(low, high, shape).astype(dtype)


def _n(*numbers: float, dtype: Any = np.int64) -> Array:
    return np.array(numbers, dtype)


def _s(number: float, dtype: Any = np.float32) -> Array:
    return np.array(number, dtype)


def windows() -> Iterator[Case]:
    """Convolutions, pools, and what reads images at places in between."""
    image = _f(1, 64, 56, 56)
    for shape, filters, attrs in (
        ((1, 3, 224, 224), (64, 3, 7, 7), {"strides": [2, 2], "pads": [3] * 4}),
        ((1, 64, 56, 56), (64, 64, 5, 5), {"pads": [2] * 4}),
        ((1, 128, 28, 28), (128, 128, 3, 3), {"pads": [2] * 4, "dilations": [2, 2]}),
        ((1, 256, 28, 28), (256, 8, 3, 3), {"pads": [1] * 4, "group": 32}),
        ((1, 96, 112, 112), (96, 1, 3, 3), {"pads": [1] * 4, "group": 96}),
        ((16, 64, 7, 7), (128, 64, 1, 1), {}),
        ((1, 128, 4000), (128, 128, 5), {"pads": [2, 2]}),
        ((1, 512, 1000), (512, 1, 31), {"pads": [15, 15], "group": 512}),
        ((1, 32, 16, 28, 28), (32, 32, 3, 3, 3), {"pads": [1] * 6}),
    ):
        yield Case("Conv", [_f(*shape), _f(*filters)], (1,), attrs=attrs)
    for shape, filters, attrs in (
        ((1, 128, 32, 32), (128, 64, 4, 4), {"strides": [2, 2], "pads": [1] * 4}),
        ((1, 256, 32, 32), (256, 128, 2, 2), {"strides": [2, 2]}),
        ((1, 128, 500), (128, 64, 16), {"strides": [8], "pads": [4, 4]}),
    ):
        yield Case("ConvTranspose", [_f(*shape), _f(*filters)], (1,), attrs=attrs)
    yield Case("DeformConv", [_f(1, 64, 28, 28), _f(64, 64, 3, 3), _f(1, 18, 28, 28)], (1,), attrs={"pads": [1] * 4})
    around = {"pads": [1] * 4, "kernel_shape": [3, 3]}
    yield Case("MaxPool", [_f(1, 64, 112, 112)], attrs={**around, "strides": [2, 2]})
    yield Case("MaxPool", [_f(1, 256, 20, 20)], attrs={"kernel_shape": [5, 5], "pads": [2] * 4})
    yield Case("AveragePool", [_f(8, 64, 56, 56)], attrs={"kernel_shape": [2, 2], "strides": [2, 2]})
    yield Case("AveragePool", [_f(1, 256, 35, 35)], attrs=around)
    yield Case("GlobalAveragePool", [_f(8, 512, 28, 28)])
    yield Case("LpPool", [image], attrs={"kernel_shape": [3, 3]})
    places = np.tile(np.arange(784) * 4, (64, 1)).reshape(1, 64, 28, 28)
    yield Case("MaxUnpool", [_f(1, 64, 28, 28), places], attrs={"kernel_shape": [2, 2], "strides": [2, 2]})
    for attrs in (
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        {"mode": "linear"}, {"mode": "cubic"},
    ):  # fmt: skip
        yield Case("Resize", [image, _n(dtype=np.float32), _n(1, 1, 2, 2, dtype=np.float32)], (1, 2), attrs=attrs)
    yield Case("GridSample", [_f(1, 64, 64, 64), _f(1, 64, 64, 2).clip(-1, 1)])
    corners = np.concatenate([rng.uniform(0, 200, (200, 2)), rng.uniform(200, 400, (200, 2))], 1).astype(np.float32)
    attrs = {"output_height": 7, "output_width": 7, "sampling_ratio": 2, "spatial_scale": 0.125}
    yield Case("RoiAlign", [_f(1, 256, 50, 50), corners, _n(*[0] * 200)], opset=16, attrs=attrs)
    yield Case("Col2Im", [_f(1, 576, 784), _n(28, 28), _n(3, 3)], (1, 2), attrs={"pads": [1] * 4})


def movement() -> Iterator[Case]:
    """What finds elements, and puts them elsewhere."""
    yield Case("Gather", [_f(30000, 768), _i(0, 30000, 8, 512)], (0,))
    yield Case("Gather", [_f(64, 1000, 64), _i(0, 1000, 128)], attrs={"axis": 1})
    yield Case("GatherND", [_f(100, 100, 64), _i(0, 100, 5000, 2)])
    yield Case("GatherElements", [_f(1000, 1000), _i(0, 1000, 1000, 1000)], attrs={"axis": 1})
    for reduction in ("none", "add"):
        attrs = {"reduction": reduction}
        yield Case("ScatterND", [_f(20000, 64), _i(0, 20000, 40000, 1), _f(40000, 64)], attrs=attrs)
        yield Case("ScatterElements", [_f(10000, 64), _i(0, 10000, 20000, 64), _f(20000, 64)], attrs=attrs)
        yield Case("ScatterElements", [_f(100000), _i(0, 100000, 100000), _f(100000)], attrs=attrs)
    yield Case("NonZero", [rng.random((1000, 1000)) > 0.5])
    yield Case("Compress", [_f(10000, 64), rng.random(10000) > 0.5], attrs={"axis": 0})
    yield Case("Unique", [_i(0, 1000, 100000)], outputs=4)
    for shape, perm in (((8, 64, 56, 56), [0, 2, 3, 1]), ((2048, 2048), [1, 0]), ((8, 512, 12, 64), [0, 2, 1, 3])):
        yield Case("Transpose", [_f(*shape)], attrs={"perm": perm})
    yield Case("Concat", [_f(8, 64, 56, 56), _f(8, 64, 56, 56)], attrs={"axis": 1})
    yield Case("Concat", [_f(100000, 3), _f(100000, 5)], attrs={"axis": 1})
    yield Case("Split", [_f(64, 768, 30)], outputs=3, attrs={"axis": 1, "num_outputs": 3})
    yield Case("Pad", [_f(8, 64, 56, 56), _n(0, 0, 1, 1, 0, 0, 1, 1)], (1,))
    yield Case("Pad", [_f(1, 64, 256, 256), _n(0, 0, 3, 3, 0, 0, 3, 3)], (1,), attrs={"mode": "reflect"})
    yield Case("Slice", [_f(64, 512, 512), _n(0), _n(512), _n(2), _n(2)], (1, 2, 3, 4))
    yield Case("SpaceToDepth", [_f(1, 64, 128, 128)], attrs={"blocksize": 2})
    yield Case("Where", [rng.random((1024, 1024)) > 0.5, _f(1024, 1024), _f(1024, 1024)])
    yield Case("OneHot", [_i(0, 1000, 512), _s(1000, np.int64), _n(0, 1, dtype=np.float32)], (1, 2))
    boxes = rng.uniform(0, 1, (1, 8400, 4)).astype(np.float32)
    numbers = [_n(100), _n(0.5, dtype=np.float32), _n(0.6, dtype=np.float32)]
    scores = rng.uniform(0, 1, (1, 1, 8400)).astype(np.float32)
    yield Case("NonMaxSuppression", [boxes, scores, *numbers], (2, 3, 4))


def reductions() -> Iterator[Case]:
    """Sums, the best, and norms."""
    yield Case("TopK", [_f(1, 50257), _n(50)], (1,), outputs=2)
    yield Case("TopK", [_f(64, 1000), _n(5)], (1,), outputs=2)
    yield Case("ArgMax", [_f(128, 50257)], attrs={"axis": -1})
    for axis in (0, 1):
        yield Case("CumSum", [_f(1000, 1000), _s(axis, np.int64)], (1,))
    for shape, axis in (((4096, 768), -1), ((4096, 768), 0), ((64, 512, 256), 1)):
        yield Case("ReduceSum", [_f(*shape), _n(axis)], (1,))
    yield Case("ReduceLogSumExp", [_f(512, 5000), _n(-1)], (1,))
    yield Case("Softmax", [_f(12, 128, 128)])
    yield Case("Softmax", [_f(1, 21, 512, 512)], attrs={"axis": 1})
    yield Case("Softmax", [_f(8, 50257)])
    yield Case("LayerNormalization", [_f(512, 1024), _f(1024), _f(1024)], (1, 2))
    yield Case("InstanceNormalization", [_f(1, 64, 256, 256), _f(64), _f(64)], (1, 2))
    yield Case("GroupNormalization", [_f(1, 320, 64, 64), _f(320), _f(320)], (1, 2), attrs={"num_groups": 32})
    yield Case("LRN", [_f(1, 96, 55, 55)], attrs={"size": 5})
    yield Case("SoftmaxCrossEntropyLoss", [_f(512, 5000), _i(0, 5000, 512)])


def functions() -> Iterator[Case]:
    """Element by element."""
    x, positive = _f(1024, 1024), np.abs(_f(1024, 1024)) + 1
    for op in (
        "Relu",
        "Sigmoid",
        "Tanh",
        "Exp",
        "Erf",
        "Gelu",
        "Mish",
        "Sin",
        "Tan",
        "Cosh",
        "Asinh",
        "Round",
        "IsNaN",
    ):
        yield Case(op, [x])
    yield from (Case(op, [positive]) for op in ("Log", "Sqrt", "Acosh"))
    yield Case("Pow", [positive, x])
    yield Case("Mod", [_i(0, 1000, 1024, 1024), _i(1, 50, 1024, 1024)])
    yield Case("Add", [_f(8, 512, 768), _f(768)])
    yield Case("Cast", [x], attrs={"to": TensorProto.FLOAT16})
    yield Case("QuantizeLinear", [_f(8, 64, 56, 56), _s(0.05), _s(128, np.uint8)], (1, 2))
    yield Case("DynamicQuantizeLinear", [_f(512, 768)], outputs=3)


def products() -> Iterator[Case]:
    """Matrices, transforms, and recurrent layers."""
    for m, k, n in ((512, 512, 512), (1, 2048, 2048), (8, 128, 512), (197, 769, 333), (100000, 32, 16)):
        yield Case("MatMul", [_f(m, k), _f(k, n)], (1,))
    yield Case("MatMul", [_f(96, 128, 64), _f(96, 64, 128)])
    yield Case("MatMul", [_f(512, 512, dtype=np.float64), _f(512, 512, dtype=np.float64)], (1,))
    yield Case("Gemm", [_f(64, 1024), _f(4096, 1024), _f(4096)], (1, 2), attrs={"transB": 1})
    bytes_ = _i(0, 255, 128, 768, dtype=np.uint8), _i(-127, 127, 768, 768, dtype=np.int8)
    yield Case("MatMulInteger", bytes_, (1,))
    yield Case("Einsum", [_f(8, 128, 12, 64), _f(8, 128, 12, 64)], attrs={"equation": "bqhd,bkhd->bhqk"})
    yield Case("DFT", [_f(64, 1000, 1), None, _s(1, np.int64)], (2,), opset=20, attrs={"onesided": 1})
    yield Case("Attention", [_f(1, 12, 128, 64) for _ in range(3)], opset=23)
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for length, batch, width in ((100, 8, 128), (500, 1, 64)):
            sizes = (1, gates * width, width), (1, gates * width, width), (1, 2 * gates * width)
            weights = [_f(*size) * np.float32(width**-0.5) for size in sizes]  # larger ones make it chaotic
            outputs = 3 if op == "LSTM" else 2
            yield Case(op, [_f(length, batch, width), *weights], (1, 2, 3), outputs, attrs={"hidden_size": width})


def learning() -> Iterator[Case]:
    """Classical machine learning."""
    labels = {"keys_int64s": list(range(1000)), "values_floats": [float(k) for k in range(1000)]}
    yield Case("LabelEncoder", [_i(0, 1000, 10000)], domain="ai.onnx.ml", attrs=labels)
    numbers = {"offset": [0.5] * 50, "scale": [2.0] * 50}
    yield Case("Scaler", [_f(10000, 50)], domain="ai.onnx.ml", attrs=numbers)
    yield Case("Normalizer", [_f(10000, 50)], domain="ai.onnx.ml", attrs={"norm": "L2"})
    for rows in (1, 1000):
        yield Case("TreeEnsembleRegressor", [_f(rows, 30)], domain="ai.onnx.ml", attrs=_forest(100, 6, 30))


def _forest(trees: int, depth: int, features: int) -> dict[str, Any]:
    """Full trees with random splits."""
    inner, count = 2**depth - 1, 2 ** (depth + 1) - 1
    nodes = [(t, k, k < inner) for t in range(trees) for k in range(count)]
    ends = [(t, k) for t, k, branches in nodes if not branches]
    return {
        "nodes_treeids": [t for t, _, _ in nodes], "nodes_nodeids": [k for _, k, _ in nodes],
        "nodes_modes": ["BRANCH_LEQ" if b else "LEAF" for _, _, b in nodes],
        "nodes_featureids": [int(rng.integers(features)) if b else 0 for _, _, b in nodes],
        "nodes_values": [float(rng.standard_normal()) if b else 0.0 for _, _, b in nodes],
        "nodes_truenodeids": [2 * k + 1 if b else 0 for _, k, b in nodes],
        "nodes_falsenodeids": [2 * k + 2 if b else 0 for _, k, b in nodes],
        "target_treeids": [t for t, _ in ends], "target_nodeids": [k for _, k in ends],
        "target_ids": [0] * len(ends), "target_weights": [float(w) for w in rng.standard_normal(len(ends))],
        "n_targets": 1,
    }  # fmt: skip


GROUPS = (windows, movement, reductions, functions, products, learning)

# ---------------------------------------------------------------- measuring

Call = Callable[[], object]


def best_of(calls: Sequence[Call]) -> list[float]:
    """The best time of each, in seconds; they take turns."""
    found, end = [float("inf")] * len(calls), time.monotonic() + SECONDS * len(calls) / 2
    while time.monotonic() < end:
        for k, call in enumerate(calls):
            until = time.monotonic() + TURN
            while time.monotonic() < until:
                start = time.perf_counter()
                call()
                found[k] = min(found[k], time.perf_counter() - start)
            time.sleep(REST)
    return found


def session(model: onnx.ModelProto, fast: bool = True) -> Callable[[dict[str, Array]], list[Array]]:
    """onnxruntime's session, with all optimizations or none."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not fast:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feeds: made.run(None, feeds)


def on_cpu(case: Case) -> str:
    """A line: times, and ratios to onnxruntime's and of open to known sizes."""
    feeds, peer = case.feeds(), session(case.model())
    own, opened = (onnxc.compile(case.model(opened), threads=THREADS) for opened in (False, True))
    a, b, c = best_of([lambda: own(**feeds), lambda: peer(feeds), lambda: opened(**feeds)])
    mark = " <<" if a > SLOW * b or c > SLOW * a else ""
    return f"{duration(a):>9} {duration(b):>9} {a / b:6.2f}  open {c / a:6.2f}{mark}"


def on_gpu(case: Case) -> str:
    """A line: time of the kernels, that of the bytes, their number, and how far the answers are from onnxruntime's."""
    feeds = case.feeds()
    wanted = session(case.model(), fast=False)(feeds)
    model = onnxc.compile(case.model(), target="cuda")
    got = [np.asarray(y) for y in model(**feeds).values()]
    times = [k.times.median for k in model.profile(list(feeds.values()), runs=10).kernels if k.times]
    least = sum(x.nbytes for x in (*feeds.values(), *wanted)) / BYTES + LAUNCH
    far = max(float(np.abs(a - b.astype(np.float64)).max(initial=0)) for a, b in zip(got, wanted, strict=True))
    mark = " <<" if sum(times) > FAR * least else ""
    return f"{duration(sum(times)):>9} {sum(times) / least:7.1f}  {len(times)} kernels, {far:.1e} apart{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operators", nargs="*", help="names of operators; all, if none is given")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPU")
    given = parser.parse_args()
    for group in GROUPS:
        for case in group():
            if given.operators and case.op not in given.operators:
                continue
            try:
                line = (on_gpu if given.gpu else on_cpu)(case)
            except OnnxcError as error:
                line = f"{type(error).__name__}: {error}"
            print(f"{case.name:44} {line}", flush=True)


if __name__ == "__main__":
    main()
