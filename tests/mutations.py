# ruff: noqa: E501  (text of models and scripts)
"""Small valid models, spoiled at random: `python -m tests.mutations FIRST LAST` tries those of the seeds in between.

Each is refused with a clear error, or gives what onnxruntime gives where that takes it too. The process prints a
line for each; one that ends early, or a line that starts with ``!``, is a fault of onnxc's.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxc
from onnxc.errors import InternalError, OnnxcError, ToolchainError
from tests.small_models import parse

SEEDS = [
    """(float[3, 4] x, float[4, 6] w, float[6] b) => (float[M, K] y)
    { a = MatMul(x, w) c = Add(a, b) d = Relu(c) y = Softmax<axis=-1>(d) }""",
    """(float[1, 3, 9, 9] x, float[4, 3, 3, 3] w, float[4] b) => (float[M, K] y)
    { a = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(x, w, b) c = Relu(a) d = MaxPool<kernel_shape=[2, 2]>(c)
      e = GlobalAveragePool(d) y = Flatten(e) }""",
    """(float[2, 3, 4] x, float[4] g) => (float[M, K, L] y)
    { a = LayerNormalization<axis=-1, epsilon=0.001>(x, g, g) b = Transpose<perm=[0, 2, 1]>(a)
      s = Constant<value_ints=[1]>() y = ReduceMean<keepdims=1>(b, s) }""",
    """(float[5, 4] t, int64[2, 3] i) => (float[M, K, L, P] y)
    { a = Gather<axis=0>(t, i) z = Constant<value_ints=[0]>() o = Constant<value_ints=[1]>()
      b = Unsqueeze(a, z) c = Concat<axis=0>(b, b) y = Slice(c, z, o) }""",
    """(float[n, 3, 4] x) => (float[M, K] y)
    { s = Shape(x) z = Constant<value_ints=[0]>() o = Constant<value_ints=[1]>() m = Constant<value_ints=[-1]>()
      r = Slice(s, z, o) t = Concat<axis=0>(r, m) y = Reshape(x, t) }""",
    """(float[3, 7] x) => (float[M, K] y, int64[M, K] i)
    { k = Constant<value_ints=[2]>() v, i = TopK<axis=1, largest=1>(x, k) f = Cast<to=1>(i) y = Add(v, f) }""",
    """(int64[5] x, int64[5] d, uint32[3] u) => (int64[M] y, uint32[K] c)
    { a = Div(x, d) b = Mod<fmod=0>(x, d) c = BitShift<direction="LEFT">(u, u) y = Add(a, b) }""",
    """(float[2, 3] x) => (float[M, K, L] y)
    { p = Constant<value_ints=[1, 0, 0, 1]>() r = Constant<value_ints=[1, 2]>() e = Constant<value_ints=[2, 1, 1]>()
      a = Pad<mode="constant">(x, p) b = Tile(a, r) y = Expand(b, e) }""",
    """(float[n, 4, 8] x) => (float[M, K, L] y)
    { s = Constant<value_ints=[2, 2]>() a, b = Split<axis=1>(x, s) t = Transpose<perm=[0, 2, 1]>(a)
      c = Sigmoid(b) y = MatMul(t, c) }""",
    """(float[3, 4] x, float[3, 2] u, int64[3, 2] i) => (float[M, K] y)
    { a = ScatterElements<axis=1, reduction="add">(x, i, u) b = GatherElements<axis=1>(a, i)
      s = Constant<value_ints=[0]>() e = Constant<value_ints=[1]>() j = Unsqueeze(s, s) w = Slice(b, s, e)
      y = ScatterND<reduction="none">(b, j, w) }""",
    """(float[t, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[M, K, L] y, float[P, Q, R] h)
    { a, h = LSTM<hidden_size=4, direction="forward">(x, w, r) o = Constant<value_ints=[1]>() y = Squeeze(a, o) }""",
    """(float[1, 2, 4, 4] x) => (float[M, K, L, P] y)
    { s = Constant<value_floats=[1.0, 1.0, 2.0, 2.0]>()
      a = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(x, , s)
      b = AveragePool<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1>(a)
      y = LeakyRelu<alpha=0.1>(b) }""",
    """(float[3, 4] x) => (float[M, K] y)
    { s = Constant<value_floats=[0.1, 0.2, 0.3, 0.4]>() n = Constant<value_ints=[0, 1, 2, 3]>() z = Cast<to=2>(n)
      q = QuantizeLinear<axis=1>(x, s, z) d = DequantizeLinear<axis=1>(q, s, z) y = Abs(d) }""",
    """(float[n, 4] x, float[4] v) => (float[M, K] y)
    { c = Less(x, v) a = Where(c, x, v) i = ArgMax<axis=1, keepdims=0>(a) d = Constant<value_int=4>()
      k = Constant<value_floats=[0.0, 1.0]>() b = OneHot<axis=-1>(i, d, k) o = Constant<value_int=0>()
      y = CumSum<exclusive=1>(b, o) }""",
    """(float[2, 3, 4] x, float[4, 5] w) => (float[M, K] y)
    { a = Einsum<equation="bij,jk->bik">(x, w) t = Constant<value_float=2.0>() b = Pow(a, t)
      s = Constant<value_ints=[2]>() c = ReduceSum<keepdims=0>(b, s) y = Sqrt(c) }""",
]
OPS = [
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Mod",
    "Max",
    "Min",
    "Relu",
    "Exp",
    "Log",
    "Sqrt",
    "Neg",
    "Abs",
    "Sigmoid",
    "Tanh",
    "Erf",
    "Softmax",
    "LogSoftmax",
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "AveragePool",
    "GlobalMaxPool",
    "Transpose",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Concat",
    "Split",
    "Slice",
    "Gather",
    "GatherElements",
    "GatherND",
    "ScatterElements",
    "ScatterND",
    "Pad",
    "Tile",
    "Expand",
    "Cast",
    "Clip",
    "Where",
    "Equal",
    "Less",
    "Greater",
    "And",
    "Or",
    "Not",
    "Xor",
    "BitShift",
    "BitwiseAnd",
    "BitwiseNot",
    "ReduceSum",
    "ReduceMax",
    "ReduceProd",
    "ReduceL2",
    "ArgMax",
    "TopK",
    "CumSum",
    "OneHot",
    "Range",
    "Shape",
    "Size",
    "ConstantOfShape",
    "Identity",
    "LayerNormalization",
    "BatchNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "LSTM",
    "GRU",
    "RNN",
    "Einsum",
    "DepthToSpace",
    "SpaceToDepth",
    "Resize",
    "Trilu",
    "Round",
    "Floor",
    "Ceil",
    "Sign",
    "IsNaN",
    "IsInf",
    "HardSigmoid",
    "Gelu",
    "Mish",
    "Selu",
    "Softplus",
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "LpNormalization",
    "Hardmax",
    "EyeLike",
    "NonZero",
    "Compress",
    "Dropout",
    "PRelu",
    "LRN",
]
NUMBERS = [0, 1, 2, 3, -1, -2, 4, 5, 7, 8, 100, -100, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1]
FLOATS = [0.0, 1.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30]
WORDS = ["NOTSET", "VALID", "SAME_UPPER", "constant", "edge", "reflect", "wrap", "linear", "nearest", "cubic", "add", "mul",
         "none", '"}; int x; //', "*/", "", "ij,jk->ik", "forward", "reverse", "bidirectional", "LEFT", "RIGHT", "\0"]  # fmt: skip
DTYPES = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16]
Random = random.Random


def _attribute(r: Random, a: onnx.AttributeProto) -> None:
    if a.type == onnx.AttributeProto.INT:
        a.i = r.choice(NUMBERS)
    elif a.type == onnx.AttributeProto.FLOAT:
        a.f = r.choice(FLOATS)
    elif a.type == onnx.AttributeProto.STRING:
        a.s = r.choice(WORDS).encode()
    elif a.type == onnx.AttributeProto.INTS:
        if r.random() < 0.3 or not a.ints:
            a.ints.append(r.choice(NUMBERS))
        elif r.random() < 0.2:
            a.ints.pop()
        else:
            a.ints[r.randrange(len(a.ints))] = r.choice(NUMBERS)


def _dim(r: Random, dims: Any) -> None:
    if not dims or r.random() < 0.3:
        dims.add().dim_value = r.choice([1, 2, 3])
    elif r.random() < 0.3:
        dims.pop()
    else:
        dim = r.choice(dims)
        dim.Clear()
        if r.random() < 0.5:
            dim.dim_value = r.choice([0, 1, 2, 3, 4, 5, 7, 8, 16, 33, 100, 2**31, 2**40, -1])
        else:
            dim.dim_param = r.choice(["n", "m", "t", "k"])


def _operand(r: Random, node: onnx.NodeProto, names: list[str]) -> None:
    if node.input:
        node.input[r.randrange(len(node.input))] = r.choice([*names, *names, ""])


def mutate(r: Random, model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with one to three things changed."""
    model = copy.deepcopy(model)
    g = model.graph
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        if not g.node:
            break
        node = r.choice(g.node)
        names = [i.name for i in g.input] + [o for n in g.node for o in n.output]
        changes: list[Callable[[], object]] = [
            lambda: setattr(node, "op_type", r.choice(OPS)),  # noqa: B023
            lambda: node.attribute and _attribute(r, r.choice(node.attribute)),  # noqa: B023
            lambda: node.attribute and _attribute(r, r.choice(node.attribute)),  # noqa: B023
            lambda: node.ClearField("attribute"),  # noqa: B023
            lambda: _operand(r, node, names),  # noqa: B023
            lambda: node.input.append(r.choice(names)),  # noqa: B023
            lambda: node.input and node.input.pop(),  # noqa: B023
            lambda: node.output.append("extra"),  # noqa: B023
            lambda: g.node.remove(node),  # noqa: B023
            lambda: g.node.insert(r.randrange(len(g.node)), copy.deepcopy(node)),  # noqa: B023
            lambda: _dim(r, r.choice(g.input).type.tensor_type.shape.dim),
            lambda: _dim(r, r.choice(g.input).type.tensor_type.shape.dim),
            lambda: setattr(r.choice(g.input).type.tensor_type, "elem_type", r.choice(DTYPES)),
        ]
        r.choice(changes)()
    return model


def inputs_of(compiled: Any, seed: int) -> dict[str, Any] | None:
    """Inputs at a random size; None where they would be large."""
    random_ = np.random.default_rng(seed)
    n, found = int(random_.integers(0, 5)), {}
    for t in compiled.get_inputs():
        shape = [d if isinstance(d, int) else n for d in t.shape]
        if np.prod([float(d) for d in shape]) > 1 << 20:
            return None
        whole = t.dtype.numpy.kind in "iub"
        found[t.name] = (random_.integers(0, 4, shape) if whole else random_.standard_normal(shape)).astype(
            t.dtype.numpy
        )
    return found


def wanted(model: onnx.ModelProto, inputs: dict[str, Any]) -> list[Any] | None:
    """onnxruntime's answers, where it takes the model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, inputs))
    except Exception:
        return None


def judge(model: onnx.ModelProto, seed: int) -> str:
    """What becomes of a model, in a word; with ``!`` before it where that is wrong."""
    try:
        compiled = onnxc.compile(model)
        inputs = inputs_of(compiled, seed)
        if inputs is None:
            return "large"
        got = list(compiled(**inputs))
    except (InternalError, ToolchainError) as error:
        return f"! {error!r}"
    except OnnxcError as error:
        return f"{type(error).__name__}"
    want = wanted(model, inputs)
    if want is None:
        return "ran"
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"! output {k} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if not np.allclose(a.astype(np.float64), b.astype(np.float64), 1e-3, 1e-4, equal_nan=True):
            return f"! output {k} has other values"
    return "same"


def one(seed: int) -> str:
    """The mutation of a seed, judged."""
    r = Random(seed)
    model = mutate(r, parse(r.choice(SEEDS)))
    try:
        return judge(model, seed)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"! {error!r} at {place.filename}:{place.lineno}"


def main() -> None:
    """Prints a line for each seed; a minute without one ends the process."""
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        signal.alarm(60)
        print(seed, one(seed).replace("\n", " ")[:400], flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
