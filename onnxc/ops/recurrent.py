"""LSTM, GRU and RNN: the input's share as one matmul over the whole sequence, the recurrence as a scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, never_equal
from onnxc.ir.graph import Value
from onnxc.ir.types import same_shape
from onnxc.ops.activation import expm1_of_negative, negative
from onnxc.ops.common import counted
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, Operand

Direction = Literal["forward", "reverse", "bidirectional"]
Activation = Callable[[Builder, Value], Value]
Product = Callable[[Builder, Value], Value]  # of the state [B, H] or [2, B, H] and the recurrent weights
# Elements of a step's recurrent weights from which on the two directions of an op take their steps together: each
# product is then one of two matrices, which two threads share. What is smaller is faster than a parallel region.
TOGETHER = 1 << 15


def _affine(alpha: float, beta: float) -> Activation:
    return lambda b, x: b.add(b.mul(x, alpha), beta)


@cache  # so that equal functions are one object
def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    a = alpha
    simple: dict[str, Activation] = {
        "sigmoid": lambda b, x: b.sigmoid(x),
        "tanh": lambda b, x: b.tanh(x),
        "relu": lambda b, x: b.max(x, 0.0, tie=0.0),
        "softsign": lambda b, x: b.div(x, b.add(b.abs(x), 1.0)),
        "softplus": lambda b, x: b.log(b.add(b.exp(x), 1.0)),
        "affine": _affine(1.0 if a is None else a, beta or 0.0),
        "leakyrelu": lambda b, x: b.where(negative(b, x), b.mul(x, 0.01 if a is None else a), x),
        "thresholdedrelu": lambda b, x: b.where(b.lt(1.0 if a is None else a, x), x, 0.0),
        "scaledtanh": lambda b, x: b.mul(b.tanh(b.mul(x, 1.0 if beta is None else beta)), 1.0 if a is None else a),
        "hardsigmoid": lambda b, x: b.max(
            b.min(b.add(b.mul(x, 0.2 if a is None else a), 0.5 if beta is None else beta), 1.0, tie=0.0), 0.0, tie=0.0
        ),
        "elu": lambda b, x: b.where(negative(b, x), b.mul(expm1_of_negative(b, x), 1.0 if a is None else a), x),
    }
    if name.lower() not in simple:
        raise UnsupportedError(f"the activation {name!r} of a recurrent op is unknown")
    return simple[name.lower()]


def activations_of(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], default: Sequence[str], directions: int
) -> list[list[Activation]]:
    """The functions of each direction that the attributes of a recurrent op name."""
    chosen = list(names) or list(default) * directions
    if len(chosen) != len(default) * directions:
        raise ModelError(f"{len(chosen)} activations given, {len(default) * directions} needed")
    takes = {
        "affine": (1, 1),
        "leakyrelu": (1, 0),
        "thresholdedrelu": (1, 0),
        "scaledtanh": (1, 1),
        "hardsigmoid": (1, 1),
        "elu": (1, 0),
    }
    out, a, c = [], iter(alphas), iter(betas)
    for name in chosen:
        na, nb = takes.get(name.lower(), (0, 0))
        out.append(_activation(name, next(a, None) if na else None, next(c, None) if nb else None))
    n = len(default)
    return [out[d * n : (d + 1) * n] for d in range(directions)]


def _clip(b: Builder, x: Value, limit: float) -> Value:
    if not limit >= 0:
        raise ModelError(f"a recurrent op has the clip {limit}; it must be positive")
    return b.clip(x, -limit, limit) if limit else x


def _reverse(b: Builder, x: Value, lens: Value | None) -> Value:
    """x [T, B, ...] backwards in time; with lengths, each sequence's own part is turned and its padding stays."""
    t = x.shape[0]
    if lens is None:
        starts: list[Dim] = [t - 1] + [0] * (x.rank - 1)
        return b.one("slice", x, starts=tuple(starts), sizes=x.shape, steps=(-1, *(1,) * (x.rank - 1)))
    steps = b.reshape(b.iota(t), (t, 1))
    n = b.reshape(b.cast(lens, dtypes.int64), (1, x.shape[1]))
    source = b.where(b.lt(steps, n), b.sub(b.sub(n, steps), 1), steps)
    index = b.expand(b.reshape(source, (t, x.shape[1], *(1,) * (x.rank - 2))), x.shape)
    return b.one("gather_elements", x, index, axis=0)


def _batch_first(x: Value) -> Value | None:
    """The sequences [B, T, n] of which x is the turned view."""
    node = x.node
    turned = node is not None and node.op == "transpose" and node.attrs["perm"] == (1, 0, 2) and x.shape[1] != 1
    return node.operands[0] if node is not None and turned else None


class Recurrence:
    """What the three ops share: layout, directions, sequence lengths. `hidden` is the size of the state."""

    def __init__(self, b: Builder, x: Value, hidden: Dim, lens: Value | None, direction: str, layout: int) -> None:
        self.b, self.layout = b, layout
        self.x = b.swap(x, 0, 1) if layout else x
        self.steps, self.batch = self.x.shape[0], self.x.shape[1]
        self.hidden = hidden
        self.directions = 2 if direction == "bidirectional" else 1
        self.lens = None if lens is None else counted(b, self.fitted(lens, self.batch), self.steps)
        self.backwards = [False, True] if self.directions == 2 else [direction == "reverse"]

    def passes(self, functions: Sequence[Sequence[Activation]], gates: int) -> list[list[int]]:
        """The directions, as they are computed: those of one list step by step together."""
        each = self.hidden * self.hidden * gates
        if self.directions == 2 and isinstance(each, int) and each >= TOGETHER and functions[0] == functions[1]:
            return [[0, 1]]
        return [[d] for d in range(self.directions)]

    def fitted(self, v: Value, *shape: Dim) -> Value:
        """A tensor in the shape that it must have: where dims are open, a run finds out."""
        if len(shape) != v.rank or any(map(never_equal, v.shape, shape)):
            raise ShapeError(f"a recurrent op takes {v.t} where {list(shape)} is needed")
        return v if same_shape(v.shape, shape) else self.b.reshape(v, shape)

    def weights(self, w: Value, r: Value, bias: Value | None, gates: int) -> tuple[Value, Value, Value | None]:
        """The weights of input and state, and the biases."""
        d, n = self.directions, gates * self.hidden
        both = None if bias is None else self.fitted(bias, d, 2 * n)
        return self.fitted(w, d, n, self.x.shape[2]), self.fitted(r, d, n, self.hidden), both

    def initial(self, h: Value | None, ds: Sequence[int]) -> Value:
        """The state of these directions before the first step: [B, H], or [2, B, H] of both."""
        if h is None:
            return self.b.full((*([2] if len(ds) > 1 else []), self.batch, self.hidden), 0.0, self.x.dtype)
        h = self.b.swap(h, 0, 1) if self.layout else h
        return self.parts(self.fitted(h, self.directions, self.batch, self.hidden), ds)

    def part(self, v: Value, d: int) -> Value:
        """Direction d of a tensor with a leading axis of directions."""
        return self.b.reshape(self.b.slice(v, 0, d, d + 1), v.shape[1:])

    def parts(self, v: Value, ds: Sequence[int]) -> Value:
        """One direction of a tensor [directions, ...]; all of it for both."""
        return v if len(ds) > 1 else self.part(v, ds[0])

    def rows(self, v: Value, ds: Sequence[int]) -> Value:
        """Rows [directions, n] as what broadcasts to states: [n] of one direction, [2, 1, n] of both."""
        return self.b.reshape(v, (2, 1, v.shape[1])) if len(ds) > 1 else self.part(v, ds[0])

    def ordered(self, d: int) -> Value:
        """x in the order of direction d: [T, B, input]."""
        return _reverse(self.b, self.x, self.lens) if self.backwards[d] else self.x

    def projected(self, d: int, w: Value, bias: Value | None) -> Value:
        """x W^T + bias for all steps: [T, B, gates * hidden]. What lies batch by batch in memory is multiplied in that
        order: then all rows are one product.
        """
        b = self.b
        lies = _batch_first(self.x) if not self.backwards[d] else None
        y = b.matmul(lies or self.ordered(d), b.swap(self.part(w, d), 0, 1))
        y = y if bias is None else b.add(y, bias)
        return b.swap(y, 0, 1) if lies is not None else y

    def alive(self, b: Builder, t: Operand, lens: Value | None) -> Value | None:
        """A mask [B, 1] of the sequences that have a step t."""
        return None if lens is None else b.lt(t, b.reshape(b.cast(lens, dtypes.int64), (self.batch, 1)))

    def run(
        self, ds: Sequence[int], states: list[Value], xws: Sequence[Value],
        step: Callable[[Builder, list[Value], Value], list[Value]],
    ) -> tuple[list[Value], list[Value]]:  # fmt: skip
        """Scans these directions together: the states after the last step, and the output of each, the first state.

        `xws` are the input's shares of all directions; a step gets those of its own, [B, n] or [2, B, n].
        Past a sequence's end states stay and outputs are 0. A sequence of no steps ends in the state 0 (as in
        onnxruntime).
        """
        lens = self.lens
        b = self.b
        own = [b.reshape(xws[d], (self.steps, 1, *xws[d].shape[1:])) for d in ds]
        xs = b.concat(own, 1) if len(own) > 1 else xws[ds[0]]
        scanned = [xs, b.iota(self.steps)] if lens is not None else [xs]

        def body(inner: Builder, before: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            after = step(inner, before, slices[0])
            if lens is None:
                return after, [after[0]]
            alive = self.alive(inner, slices[-1], lens)
            assert alive is not None
            kept = [inner.where(alive, a, s) for a, s in zip(after, before, strict=True)]
            return kept, [inner.where(alive, after[0], 0.0)]

        final, (y,) = b.scan(states, scanned, self.steps, body)
        some = self.alive(b, 0, lens)
        if some is not None:
            final = [b.where(some, f, 0.0) for f in final]
        each = (self.steps, self.batch, self.hidden)
        ys = [y] if len(ds) == 1 else [b.reshape(b.slice(y, 1, d, d + 1), each) for d in ds]
        return final, [_reverse(b, v, lens) if self.backwards[d] else v for d, v in zip(ds, ys, strict=True)]

    def outputs(self, ys: list[Value], finals: list[list[Value]]) -> list[Value]:
        """Y [T, D, B, H] (or batch first), then each state [D, B, H]. `finals`: of each pass over directions."""
        b = self.b
        h = self.hidden
        whole = (self.directions, self.batch, h)
        y = b.concat([b.reshape(v, (self.steps, 1, self.batch, h)) for v in ys], 1)
        last = zip(*finals, strict=True)  # of each state
        states = [
            b.reshape(fs[0], whole) if len(fs) == 1 else b.concat([b.reshape(f, (1, *whole[1:])) for f in fs], 0)
            for fs in last
        ]
        if self.layout:
            return [b.transpose(y, (2, 0, 1, 3)), *(b.swap(s, 0, 1) for s in states)]
        return [y, *states]


def _biases(r: Recurrence, bias: Value | None, gates: int) -> tuple[Value | None, Value | None]:
    """The input's and the recurrence's biases, each [directions, gates * hidden]."""
    n = gates * r.hidden
    return (None, None) if bias is None else (r.b.slice(bias, 1, 0, n), r.b.slice(bias, 1, n, 2 * n))


def summed_biases(r: Recurrence, bias: Value | None, d: int, gates: int) -> Value | None:
    """The sum of the biases of direction d."""
    wb, rb = _biases(r, bias, gates)
    return None if wb is None or rb is None else r.b.add(r.part(wb, d), r.part(rb, d))


def _split(b: Builder, x: Value, each: Dim, n: int) -> list[Value]:
    """n parts of the last axis."""
    return b.split(x, x.rank - 1, [each] * n)


@op("LSTM", 1)
def lstm(
    b: Builder, x: Value, w: Value, r: Value, bias: Value | None = None, lens: Value | None = None,
    initial_h: Value | None = None, initial_c: Value | None = None, p: Value | None = None, *, hidden_size: int = 0,
    direction: Direction = "forward", layout: Flag = 0, input_forget: Flag = 0, clip: float = 0.0,
    output_sequence: Flag = 0,
    activations: Sequence[str] = (), activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (),
) -> list[Value]:  # fmt: skip
    """i, o, f, c gates; peepholes P for i, o, f. Y, Y_h, Y_c."""
    rec = Recurrence(b, x, hidden_size or w.shape[1] // 4, lens, direction, layout)
    w, r, bias = rec.weights(w, r, bias, 4)
    functions = activations_of(
        activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh", "Tanh"), rec.directions
    )

    def recurrent(ds: Sequence[int]) -> Product:
        rt = _turned(b, rec.parts(r, ds))
        return lambda inner, before: inner.matmul(before, rt)

    xws = [rec.projected(d, w, summed_biases(rec, bias, d, 4)) for d in range(rec.directions)]
    passes = rec.passes(functions, 4)
    return lstm_steps(b, rec, xws, passes, recurrent, functions, initial_h, initial_c, p, bool(input_forget), clip)


def _turned(b: Builder, r: Value) -> Value:
    return b.swap(r, r.rank - 2, r.rank - 1)


def lstm_steps(
    b: Builder, rec: Recurrence, xws: Sequence[Value], passes: Sequence[Sequence[int]],
    recurrent: Callable[[Sequence[int]], Product], functions: Sequence[Sequence[Activation]],
    initial_h: Value | None, initial_c: Value | None, p: Value | None, input_forget: bool, clip: float,
) -> list[Value]:  # fmt: skip
    """The recurrence of LSTM. `xws` is the input's share of each direction, `recurrent` gives the state's product of
    the directions that a pass takes together."""
    h = rec.hidden
    ys: list[Value] = []
    finals = []
    peepholes = None if p is None else rec.fitted(p, rec.directions, 3 * h)
    for ds in passes:
        f, g, k = functions[ds[0]]
        times = recurrent(ds)
        peep = None if peepholes is None else _split(b, rec.rows(peepholes, ds), h, 3)

        def step(inner: Builder, states: list[Value], x: Value, f: Activation = f, g: Activation = g,
                 k: Activation = k, times: Product = times,
                 peep: list[Value] | None = peep) -> list[Value]:  # fmt: skip
            before, cell = states
            gi, go, gf, gc = _split(inner, inner.add(times(inner, before), x), h, 4)
            if peep is not None:
                gi = inner.add(gi, inner.mul(cell, peep[0]))
                gf = inner.add(gf, inner.mul(cell, peep[2]))
            i = f(inner, _clip(inner, gi, clip))
            forget = inner.sub(1.0, i) if input_forget else f(inner, _clip(inner, gf, clip))
            c = inner.add(inner.mul(forget, cell), inner.mul(i, g(inner, _clip(inner, gc, clip))))
            if peep is not None:
                go = inner.add(go, inner.mul(c, peep[1]))
            return [inner.mul(f(inner, _clip(inner, go, clip)), k(inner, c)), c]

        final, y = rec.run(ds, [rec.initial(initial_h, ds), rec.initial(initial_c, ds)], xws, step)
        ys += y
        finals.append(final)
    return rec.outputs(ys, finals)


@op("GRU", 1)
def gru(
    b: Builder, x: Value, w: Value, r: Value, bias: Value | None = None, lens: Value | None = None,
    initial_h: Value | None = None, *, hidden_size: int = 0, direction: Direction = "forward", layout: Flag = 0,
    linear_before_reset: Flag = 0, clip: float = 0.0, output_sequence: Flag = 0, activations: Sequence[str] = (),
    activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (),
) -> list[Value]:  # fmt: skip
    """z, r, h gates. Y, Y_h."""
    rec = Recurrence(b, x, hidden_size or w.shape[1] // 3, lens, direction, layout)
    w, r, bias = rec.weights(w, r, bias, 3)
    n = rec.hidden
    functions = activations_of(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), rec.directions)
    wb, rb = _biases(rec, bias, 3)
    xws = [rec.projected(d, w, None if wb is None else rec.part(wb, d)) for d in range(rec.directions)]
    ys: list[Value] = []
    finals = []
    for ds in rec.passes(functions, 3):
        f, g = functions[ds[0]]
        rt = _turned(b, rec.parts(r, ds))
        bias_rows = None if rb is None else rec.rows(rb, ds)
        # Where all gates multiply the state before the step, one product serves them.
        cut = 3 * n if linear_before_reset else 2 * n
        gates_r, new_r = _columns(b, rt, 0, cut), None if linear_before_reset else _columns(b, rt, 2 * n, 3 * n)
        gates_b = None if bias_rows is None else _columns(b, bias_rows, 0, cut)
        new_b = None if bias_rows is None or linear_before_reset else _columns(b, bias_rows, 2 * n, 3 * n)

        def step(inner: Builder, states: list[Value], x: Value, f: Activation = f, g: Activation = g,
                 gates_r: Value = gates_r, new_r: Value | None = new_r, gates_b: Value | None = gates_b,
                 new_b: Value | None = new_b) -> list[Value]:  # fmt: skip
            (before,) = states
            xz, xr, xh = _split(inner, x, n, 3)
            product = inner.matmul(before, gates_r)
            product = product if gates_b is None else inner.add(product, gates_b)
            hz, hr, *rest = _split(inner, product, n, 3 if new_r is None else 2)
            z = f(inner, _clip(inner, inner.add(xz, hz), clip))
            reset = f(inner, _clip(inner, inner.add(xr, hr), clip))
            if new_r is None:
                new = inner.add(xh, inner.mul(reset, rest[0]))
            else:
                linear = inner.matmul(inner.mul(reset, before), new_r)
                new = inner.add(xh, linear if new_b is None else inner.add(linear, new_b))
            new = g(inner, _clip(inner, new, clip))
            return [inner.add(inner.mul(inner.sub(1.0, z), new), inner.mul(z, before))]

        final, y = rec.run(ds, [rec.initial(initial_h, ds)], xws, step)
        ys += y
        finals.append(final)
    return rec.outputs(ys, finals)


def _columns(b: Builder, x: Value, start: Dim, stop: Dim) -> Value:
    """Of the last axis."""
    return b.slice(x, x.rank - 1, start, stop)


@op("RNN", 1)
def rnn(
    b: Builder, x: Value, w: Value, r: Value, bias: Value | None = None, lens: Value | None = None,
    initial_h: Value | None = None, *, hidden_size: int = 0, direction: Direction = "forward", layout: Flag = 0,
    clip: float = 0.0, output_sequence: Flag = 0, activations: Sequence[str] = (),
    activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (),
) -> list[Value]:  # fmt: skip
    """One gate. Y, Y_h."""
    rec = Recurrence(b, x, hidden_size or w.shape[1], lens, direction, layout)
    w, r, bias = rec.weights(w, r, bias, 1)
    functions = activations_of(activations, activation_alpha, activation_beta, ("Tanh",), rec.directions)
    xws = [rec.projected(d, w, summed_biases(rec, bias, d, 1)) for d in range(rec.directions)]
    ys: list[Value] = []
    finals = []
    for ds in rec.passes(functions, 1):
        (f,) = functions[ds[0]]
        rt = _turned(b, rec.parts(r, ds))

        def step(inner: Builder, states: list[Value], x: Value, f: Activation = f, rt: Value = rt) -> list[Value]:
            return [f(inner, _clip(inner, inner.add(inner.matmul(states[0], rt), x), clip))]

        final, y = rec.run(ds, [rec.initial(initial_h, ds)], xws, step)
        ys += y
        finals.append(final)
    return rec.outputs(ys, finals)
