"""Steps: products, convolutions, pooling, resizing, attention, recurrent layers, transforms."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.grow import BOOL, F32, F64, I32, Grower, Item, Skip
from tests.fuzz.model import Draw
from tests.fuzz.reductions import image
from tests.fuzz.steps import step


@step(9)
def matmul(g: Grower) -> Item:
    x = g.pick(lambda i: i.is_number and i.rank >= 1)
    found = [
        i for i in g.pool if not i.is_sequence and i.dtype == x.dtype and i.rank >= 2 and i.shape[-2] == x.shape[-1]
    ]
    if found and g.chance(0.4):
        return g.emit("MatMul", [x, g.choice(found)])
    batch = [d if g.chance(0.6) else 1 for d in x.shape[:-2]] if g.chance(0.4) else []
    shape = [*batch, x.shape[-1], g.size()] if g.chance(0.85) else [x.shape[-1]]
    y = g.fresh(x.dtype, shape, constant=g.chance(0.5))
    return g.emit("MatMul", [x, y])


@step(5)
def gemm(g: Grower) -> Item:
    x = g.pick(lambda i: i.is_number and i.rank == 2)
    left, right = g.choice([None, 0, 1]), g.choice([None, 0, 1])
    m, k = x.shape[::-1] if left else x.shape
    n = g.size()
    y = g.fresh(x.dtype, [n, k] if right else [k, n], constant=g.chance(0.5))
    c = g.choice([None, (n,), (1, n), (m, 1), (m, n), ()])
    if c is None and g.opset < 11:
        c = (n,)
    bias = None if c is None else g.fresh(x.dtype, c)
    if c == (m, n) and g.chance(0.5):
        bias = g.emit("Transpose", [g.fresh(x.dtype, (n, m))], perm=[1, 0])
    scales: dict[str, Any] = {"alpha": g.choice([None, 0.5]), "beta": g.choice([None, 0.25])} if x.is_float else {}
    return g.emit("Gemm", [x, y, bias], transA=left, transB=right, **scales)


@step(2)
def einsum(g: Grower) -> Item:
    spec = g.choice([
        "ij,jk->ik", "ij,jk->ki", "bij,bjk->bik", "ij->ji", "ij->i", "ii->i", "bhd,hde->bhe", "i,j->ij",
        "...ij,jk->...ik", "bij,bkj->bik", "ij,ij->", "i,ij,j->", "bij,bjk,bkl->bil", "ij->", "ijk->kji",
    ])  # fmt: skip
    size: dict[str, int] = {}
    operands = []
    for term in spec.split("->")[0].split(","):
        shape = [size.setdefault(c, g.size()) for c in term.replace("...", "")]
        operands.append(g.fresh(g.choice([F32]), [2, *shape] if "..." in term else shape))
    return g.emit("Einsum", operands, equation=spec)


def window(g: Grower, x: Item, kernel: list[int] | None = None) -> dict[str, Any]:
    """Attributes of a window that fits on an image."""
    n = x.rank - 2
    kernel = kernel or [g.integer(1, min(4, d)) for d in x.shape[2:]]
    attrs: dict[str, Any] = {"kernel_shape": kernel}
    if g.chance(0.5):
        attrs["strides"] = [g.integer(1, 3) for _ in range(n)]
    if g.chance(0.3):
        attrs["dilations"] = [
            g.integer(1, 2) if (k - 1) * 2 < d else 1 for k, d in zip(kernel, x.shape[2:], strict=True)
        ]
    if g.chance(0.2):
        attrs["auto_pad"] = g.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    elif g.chance(0.6):
        attrs["pads"] = [g.integer(0, max(0, k - 1)) for _ in range(2) for k in kernel]
    if "auto_pad" in attrs:
        attrs.pop("dilations", None)
    return attrs


def convolved(g: Grower, x: Item) -> Item:
    """A convolution, of one or more groups, or of each channel by itself."""
    c = x.shape[1]
    groups = g.choice([n for n in (1, 1, 2, 4, c) if c % n == 0])
    outputs = groups * g.choice([1, 2, 3, 4] if groups > 1 else [1, 4, 5, 8, 16])
    kernel = [g.choice([k for k in (1, 3, 3, 2, 5) if k <= d]) for d in x.shape[2:]]
    w = g.fresh(x.dtype, [outputs, c // groups, *kernel], constant=g.chance(0.8), fixed=True)
    bias = g.fresh(x.dtype, [outputs], constant=g.chance(0.8), fixed=True) if g.chance(0.6) else None
    return g.emit("Conv", [x, w, bias], group=groups if groups > 1 else None, **window(g, x, kernel))


@step(6)
def conv(g: Grower) -> Item:
    return convolved(g, image(g))


@step(4)
def conv_block(g: Grower) -> Item:
    """A convolution, something pointwise, and a residual."""
    x = image(g)
    w = g.fresh(x.dtype, [x.shape[1], x.shape[1], *[g.choice([1, 3, 3])] * (x.rank - 2)], constant=True)
    k = w.shape[2]
    y = g.emit("Conv", [x, w], pads=[k // 2] * 2 * (x.rank - 2))
    if g.chance(0.5):
        y = g.emit(
            "BatchNormalization", [y, *(g.fresh(x.dtype, [x.shape[1]], Draw("positive"), True) for _ in range(4))]
        )
    y = g.emit(g.choice(["Relu", "Sigmoid", "HardSwish", "Tanh", "LeakyRelu"]), [y])
    y = g.emit("Add", [y, x])
    if g.chance(0.4):
        y = g.emit("Transpose", [y], perm=[0, *range(2, x.rank), 1])
        return g.emit("ArgMin", [y], axis=x.rank - 1) if g.chance(0.5) else g.emit("ReduceMax", [y], axes=[x.rank - 1])
    if g.chance(0.4):
        y = g.emit("GlobalAveragePool", [y])
        return g.emit("Squeeze", [y], axes=list(range(2, x.rank)))
    return y


@step(3)
def conv_transpose(g: Grower) -> Item:
    x = image(g)
    c = x.shape[1]
    groups = g.choice([n for n in (1, 1, 2) if c % n == 0])
    kernel = [g.integer(1, 4) for _ in x.shape[2:]]
    w = g.fresh(x.dtype, [c, g.choice([1, 2, 4]), *kernel], constant=g.chance(0.8), fixed=True)
    attrs: dict[str, Any] = {"strides": [g.integer(1, 3) for _ in kernel]} if g.chance(0.6) else {}
    if g.chance(0.4):
        attrs["pads"] = [g.integer(0, (k - 1) // 2) for _ in range(2) for k in kernel]
    if "strides" in attrs and g.chance(0.3):
        attrs["output_padding"] = [g.integer(0, s - 1) for s in attrs["strides"]]
    if g.chance(0.2):
        attrs["dilations"] = [g.integer(1, 2) for _ in kernel]
    bias = g.fresh(x.dtype, [w.shape[1] * groups]) if g.chance(0.5) else None
    return g.emit("ConvTranspose", [x, w, bias], group=groups if groups > 1 else None, **attrs)


@step(5)
def pool(g: Grower) -> Item:
    x = image(g)
    op = g.choice(["MaxPool", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
    if op.startswith("Global"):
        return g.emit(op, [x], p=g.choice([None, 1, 3]) if op == "GlobalLpPool" else None)
    attrs = window(g, x)
    if g.opset < {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]:
        attrs.pop("dilations", None)
    if op == "LpPool":
        attrs["p"] = g.choice([None, 1, 2, 3])
    if g.chance(0.3) and g.opset >= (10 if op != "LpPool" else 18):
        attrs["ceil_mode"] = 1
    if op == "AveragePool" and g.chance(0.4):
        attrs["count_include_pad"] = 1
    if op == "MaxPool" and g.opset >= 8 and g.chance(0.3):
        return g.emit_all(op, [x], 2, **attrs)[0]
    return g.emit(op, [x], **attrs)


@step(1)
def unpool(g: Grower) -> Item:
    x = g.fresh(F32, [g.integer(1, 2), g.integer(1, 3), 4, 6])
    y, at = g.emit_all("MaxPool", [x], 2, kernel_shape=[2, 2], strides=[2, 2])
    return g.emit("MaxUnpool", [y, at], kernel_shape=[2, 2], strides=[2, 2])


@step(4)
def resize(g: Grower) -> Item:
    x = image(g, 3, 4)
    mode = g.choice(["nearest", "linear", "cubic"] if x.rank == 4 else ["nearest", "linear"])
    if g.opset < 11:
        factors = [1.0, 1.0, *(g.choice([1.0, 2.0, 3.0]) for _ in x.shape[2:])]
        op = "Upsample" if g.opset < 10 else "Resize"
        return g.emit(op, [x], scales=np.array(factors, np.float32), mode=mode if mode != "cubic" else "linear")
    attrs: dict[str, Any] = {"mode": mode}
    attrs["coordinate_transformation_mode"] = g.choice(
        [
            "half_pixel",
            "align_corners",
            "asymmetric",
            "pytorch_half_pixel",
            None,
            *(["half_pixel_symmetric"] if g.opset >= 19 else []),
        ]
    )
    if mode == "nearest":
        attrs["nearest_mode"] = g.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil", None])
    if mode == "cubic":
        attrs |= {"cubic_coeff_a": g.choice([None, -0.5]), "exclude_outside": g.choice([None, 1])}
    if g.opset >= 18 and g.chance(0.3):
        attrs["antialias"] = 1 if mode != "nearest" else None
    if g.chance(0.5):
        # Powers of two: other coordinates are rounded, and then cut, by each runtime in its own way. Where the last
        # corner lies when the size is no whole number, onnxruntime and the standard do not agree (docs/accuracy.md).
        corners = attrs["coordinate_transformation_mode"] == "align_corners"
        factors = [1.0, 1.0, *(g.choice([2.0 if corners else 0.5, 1.0, 2.0, 4.0]) for _ in x.shape[2:])]
        return g.emit("Resize", [x, None, g.constant(np.array(factors, np.float32))], **attrs)
    if mode == "nearest":
        sizes = [*x.shape[:2], *(d * g.choice([1, 2]) for d in x.shape[2:])]
    else:
        sizes = [*x.shape[:2], *(g.integer(1, 12) for _ in x.shape[2:])]
    return g.emit("Resize", [x, None, None, g.constant(np.array(sizes, np.int64))], **attrs)


@step(1)
def grid_sample(g: Grower) -> Item:
    x = g.fresh(F32, [g.integer(1, 2), g.integer(1, 3), g.integer(2, 6), g.integer(2, 6)])
    grid = g.fresh(F32, [x.shape[0], g.integer(1, 5), g.integer(1, 5), 2], Draw("unit"))
    mode = g.choice(["bilinear", "bicubic"] if g.opset < 20 else ["linear", "cubic"])
    return g.emit(
        "GridSample",
        [x, grid],
        mode=mode,
        padding_mode=g.choice(["zeros", "border", "reflection"]),
        align_corners=g.integer(0, 1),
    )


@step(1)
def col2im(g: Grower) -> Item:
    h, w, kh, kw = g.integer(3, 7), g.integer(3, 7), g.integer(1, 3), g.integer(1, 3)
    x = g.fresh(F32, [g.integer(1, 2), g.integer(1, 3) * kh * kw, (h - kh + 1) * (w - kw + 1)])
    return g.emit("Col2Im", [x, g.constant(np.array([h, w], np.int64)), g.constant(np.array([kh, kw], np.int64))])


@step(3)
def attention_by_parts(g: Grower) -> Item:
    """Queries, keys, values; a scale, a mask, softmax, a product."""
    b, h, t, s, d = g.integer(1, 2), g.integer(1, 4), g.size(), g.size(), g.choice([1, 4, 8, 16, 17])
    q, k, v = (g.fresh(F32, [b, h, n, d], constant=False) for n in (t, s, s))
    scores = g.emit("MatMul", [q, g.emit("Transpose", [k], perm=[0, 1, 3, 2])])
    scores = g.emit(g.choice(["Mul", "Div"]), [scores, g.constant(np.asarray(g.choice([0.5, 2.0, 0.125]), F32))])
    if g.chance(0.3):
        mask = g.fresh(BOOL, [1, 1, t, s] if g.chance(0.5) else [b, 1, 1, s])
        scores = g.emit("Where", [mask, scores, g.constant(np.asarray(-100.0, F32))])
    elif g.chance(0.4):
        scores = g.emit("Add", [scores, g.fresh(F32, g.choice([[t, s], [b, 1, t, s], [1, h, 1, s]]))])
    y = g.emit("Softmax", [scores], axis=3)
    return g.emit("MatMul", [y, v])


@step(2)
def attention(g: Grower) -> Item:
    b, h, t, s, d = g.integer(1, 2), g.choice([1, 2, 4]), g.integer(1, 5), g.integer(1, 6), g.choice([2, 4, 8])
    heads = g.choice([n for n in (1, 2, 4) if h % n == 0])
    attrs: dict[str, Any] = {
        "is_causal": g.choice([None, 1]),
        "scale": g.choice([None, 0.3]),
        "softcap": g.choice([None, None, 2.0]),
    }
    if g.chance(0.5):
        q, k, v = g.fresh(F32, [b, h, t, d]), g.fresh(F32, [b, heads, s, d]), g.fresh(F32, [b, heads, s, d])
    else:
        q, k, v = g.fresh(F32, [b, t, h * d]), g.fresh(F32, [b, s, heads * d]), g.fresh(F32, [b, s, heads * d])
        attrs |= {"q_num_heads": h, "kv_num_heads": heads}
    mask = g.fresh(g.choice([F32, BOOL]), [t, s]) if g.chance(0.3) else None
    return g.emit("Attention", [q, k, v, mask], **attrs)


@step(1)
def rotary(g: Grower) -> Item:
    b, h, t, d = g.integer(1, 2), g.integer(1, 3), g.integer(1, 5), g.choice([4, 8])
    x = g.fresh(F32, [b, h, t, d])
    cos, sin = (g.fresh(F32, [b, t, d // 2], Draw("unit")) for _ in range(2))
    return g.emit("RotaryEmbedding", [x, cos, sin], interleaved=g.choice([None, 1]))


@step(2)
def recurrent(g: Grower) -> Item:
    op, gates = g.choice([("RNN", 1), ("GRU", 3), ("LSTM", 4)])
    t, b, i, h = g.size() or 1, g.integer(1, 3), g.choice([1, 2, 4]), g.choice([1, 2, 4, 6])
    direction = g.choice([None, "forward", "reverse", "bidirectional"])
    d = 2 if direction == "bidirectional" else 1
    x = g.fresh(F32, [t, b, i])
    w, r = g.fresh(F32, [d, gates * h, i], constant=True), g.fresh(F32, [d, gates * h, h], constant=True)
    bias = g.fresh(F32, [d, 2 * gates * h], constant=True) if g.chance(0.5) else None
    lengths = g.fresh(I32, [b], Draw("count", t)) if g.chance(0.2) else None
    start = g.fresh(F32, [d, b, h]) if g.chance(0.4) else None
    extra = {"linear_before_reset": g.choice([None, 1])} if op == "GRU" else {}
    return g.emit_all(op, [x, w, r, bias, lengths, start], 2, hidden_size=h, direction=direction, **extra)[0]


@step(1)
def transforms(g: Grower) -> Item:
    op = g.choice(
        ["DFT", "HannWindow", "HammingWindow", "BlackmanWindow", "Det", "AffineGrid", "NonMaxSuppression", "MaxRoi"]
    )
    if op == "DFT":
        x = g.fresh(F32, [g.integer(1, 3), g.integer(2, 9), g.choice([1, 2])])
        return g.emit(op, [x], axis=1 if g.opset < 20 else np.asarray(1), inverse=None)
    if op.endswith("Window"):
        return g.emit(op, [g.constant(np.asarray(g.integer(2, 9), I32))], periodic=g.choice([None, 0]))
    if op == "Det":
        n = g.integer(1, 6)
        return g.emit(op, [g.fresh(g.choice([F32, F64]), [*g.shape(0, 1), n, n])])
    if op == "AffineGrid":
        return g.emit(
            op,
            [g.fresh(F32, [2, 2, 3]), g.constant(np.array([2, 1, g.integer(1, 5), g.integer(2, 5)], np.int64))],
            align_corners=g.integer(0, 1),
        )
    if op == "NonMaxSuppression":
        n = g.integer(1, 6)
        low = g.fresh(F32, [1, n, 2], Draw("unit"))
        boxes = g.emit("Concat", [low, g.emit("Add", [low, g.fresh(F32, [1, n, 2], Draw("positive"))])], axis=2)
        most = g.constant(np.asarray(g.integer(1, 4), np.int64))
        limits = [g.constant(np.asarray(v, np.float32)) for v in (0.4, -0.5)]
        return g.emit(op, [boxes, g.fresh(F32, [1, g.integer(1, 2), n]), most, *limits])
    raise Skip


@step(1)
def deform(g: Grower) -> Item:
    c, k = g.integer(1, 3), g.integer(1, 2)
    x = g.fresh(F32, [1, c, 5, 6])
    w = g.fresh(F32, [g.integer(1, 3), c, k, k])
    offset = g.fresh(F32, [1, 2 * k * k, 6 - k, 7 - k], Draw("unit"))
    mask = g.fresh(F32, [1, k * k, 6 - k, 7 - k]) if g.chance(0.4) else None
    return g.emit("DeformConv", [x, w, offset, None, mask], kernel_shape=[k, k])
