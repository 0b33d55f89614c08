"""Models with random damage, as protobuf allows it: fields set to odd values, cleared, doubled, put elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import onnx.parser
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

_ONES = ",".join(["0.5"] * 54)
TEXTS = (
    # An If, a Loop, a local function, a matrix product.
    """<ir_version: 10, opset_import: ["" : 18, "local" : 1]>
    g (float[N, 4] x, bool c, int64 n) => (float[N, 4] y, float[N, 4] z)
    <float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, float[4] b = {1, 2, 3, 4}> {
      a = MatMul (x, w)
      d = local.f <q = 2.0> (a, b)
      y = If (c) <then_branch = t () => (float[M, 4] p) {p = Relu (d)},
                  else_branch = e () => (float[M, 4] r) {r = Neg (d)}>
      z = Loop (n, c, x) <body = body (int64 i, bool k, float[M, 4] s) => (bool l, float[M, 4] o) {
        l = Identity (k)
        o = Add (s, b)
      }>
    }
    <domain : "local", opset_import : ["" : 18]> f <q> (u, v) => (o) {
      s = Constant <value_float : float = @q> ()
      t = Mul (u, s)
      o = Add (t, v)
    }""",
    # A convolution, a reduction over axes that are an input.
    f"""<ir_version: 10, opset_import: ["" : 18]> g (float[1, 3, 8, 8] x) => (float[1, 2, 8, 8] y)
    <float[2, 3, 3, 3] w = {{{_ONES}}}, float[2] b = {{1, 2}}, int64[2] axes = {{2, 3}}> {{
      a = Conv <pads = [1, 1, 1, 1]> (x, w, b)
      m = ReduceMean (a, axes)
      s = Sigmoid (m)
      y = Mul (a, s)
    }}""",
    # A Scan, a Reshape.
    """<ir_version: 10, opset_import: ["" : 18]> g (float[N, 4, 2] x) => (float[M, 2] y, float[N, 4, 2] q)
    <float[2] z = {0, 0}, int64[3] shape = {0, 4, 2}> {
      e, y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[4, 2] u) => (float[2] t, float[2] o) {
        k = Constant <value_ints = [0]> ()
        r = ReduceSum <keepdims = 0> (u, k)
        t = Add (s, r)
        o = Identity (t)
      }> (z, x)
      q = Reshape (x, shape)
    }""",
    # Quantized weights, sizes that are data, strings.
    """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 4] x, string[K] t) => (int64[L] y, string[K] u)
    <float s = {0.1}, int8 zero = {0}, int8[4, 4] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}> {
      f = DequantizeLinear (w, s, zero)
      a = MatMul (x, f)
      n = NonZero (a)
      k = Constant <value_ints = [-1]> ()
      y = Reshape (n, k)
      u = StringConcat (t, t)
    }""",
    # A recurrence, windows, a selection.
    """<ir_version: 10, opset_import: ["" : 19]> g (float[5, 1, 2] x, float[1, 1, 4, 4] i) => (h, p, r, v)
    <float[1, 8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8},
     float[1, 8, 2] k = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}, int64[4] sizes = {1, 1, 6, 6}> {
      s, h = LSTM <hidden_size = 2> (x, w, k)
      p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (i)
      r = Resize <mode = "linear"> (i, , , sizes)
      c = Constant <value_ints = [2]> ()
      v, j = TopK <axis = 0> (x, c)
    }""",
)
STRINGS = (
    "", "x", "y", "a", "b", '\n";//', "../../etc/passwd", "/etc/passwd", "\0", "\u202e\U0001f600", "n" * 5000,
    "com.acme", "ai.onnx", "Loop", "If", "Add", "axes", "perm", "body", "value", "then_branch",
)  # fmt: skip
BYTES = (b"", b"\xff\xfe", b"max", b"linear", b"\0", bytes(range(3)), bytes(range(16)), b"\x80" * 64)
INTS = (0, -1, 1, 2, 3, -2, 7, 255, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63), 5, 16)
FLOATS = (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e38, 1e-45)


def damaged(seed: int) -> tuple[onnx.ModelProto, list[str]]:
    """One of the models with up to three wounds, and what they are."""
    draw = random.Random(seed)
    model = onnx.parser.parse_model(draw.choice(TEXTS))
    log: list[str] = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        message = draw.choice(list(_messages(model)))
        fields = [f for f, _ in message.ListFields()] if draw.random() < 0.7 else []
        field = draw.choice(fields or list(message.DESCRIPTOR.fields))
        how = draw.choice(["set", "clear", "double", "swap", "drop", "graft"])
        _wound(draw, model, message, field, how)
        log.append(f"{message.DESCRIPTOR.name}.{field.name}: {how}")
    return model, log


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == Field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _wound(draw: random.Random, model: Message, message: Any, field: Any, how: str) -> None:
    if how == "clear":
        message.ClearField(field.name)
    elif field.type == Field.TYPE_MESSAGE:
        # Copies by way of bytes: a message must not be copied into itself.
        same = [m.SerializeToString() for m in _messages(model) if m.DESCRIPTOR is field.message_type]
        target = getattr(message, field.name)
        if not field.is_repeated:
            if same and how != "set":
                target.ParseFromString(draw.choice(same))
            else:
                target.SetInParent()
        elif how == "drop" and target:
            del target[draw.randrange(len(target))]
        elif how == "swap" and len(target) > 1:
            i, j = draw.sample(range(len(target)), 2)
            one, other = target[i].SerializeToString(), target[j].SerializeToString()
            target[i].ParseFromString(other)
            target[j].ParseFromString(one)
        elif how == "double" and target:
            target.add().ParseFromString(draw.choice(list(target)).SerializeToString())
        elif same and how == "graft":
            target.add().ParseFromString(draw.choice(same))
        else:
            target.add()
    elif field.is_repeated:
        values = getattr(message, field.name)
        if values and how in ("set", "swap"):
            values[draw.randrange(len(values))] = _scalar(draw, field)
        elif values and how == "drop":
            del values[draw.randrange(len(values))]
        else:
            values.append(_scalar(draw, field))
    else:
        setattr(message, field.name, _scalar(draw, field))


def _scalar(draw: random.Random, field: Any) -> Any:
    if field.type == Field.TYPE_STRING:
        return draw.choice(STRINGS)
    if field.type == Field.TYPE_BYTES:
        return draw.choice(BYTES)
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return draw.choice(FLOATS)
    if field.type == Field.TYPE_ENUM:
        return draw.choice(sorted(field.enum_type.values_by_number))
    value = draw.choice(INTS)
    if field.type == Field.TYPE_INT32:
        return max(-(2**31), min(2**31 - 1, value))
    return abs(value) if field.type in (Field.TYPE_UINT64, Field.TYPE_UINT32) else value
