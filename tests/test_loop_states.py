"""States of loops that exchange buffers with what becomes of them, against onnxruntime: to the bit, for any number of
steps.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import onnxc
from tests.staging_harness import floats, int64, parsed, runtime

pytestmark = pytest.mark.every_target
STEPS = (0, 1, 2, 3, 6)
LARGE = 40  # elements of a state that is exchanged, not copied


class _Bodies:
    """Random loops of several large states: permuted, kept, given the same value, captured, stacked, in each other."""

    def __init__(self, seed: int, size: str) -> None:
        self.r, self.size, self.names = random.Random(seed), size, 0

    def name(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def computed(self, known: list[str], count: int) -> tuple[list[str], list[str]]:
        """Lines of a few nodes, and the names of what they make."""
        lines, made = list[str](), list[str]()
        for _ in range(count):
            a, b = (self.r.choice(known + made) for _ in "ab")
            made.append(self.name())
            form = self.r.choice(["Add({0}, {1})", "Sub({0}, {1})", "Max({0}, {1})", "Neg({0})", "Identity({0})",
                                  "Gather({0}, turn)", "ScatterElements({0}, some, few)"])  # fmt: skip
            lines.append(f"{made[-1]} = {form.format(a, b)}")
        return lines, made

    def loop(self, known: list[str], depth: int) -> tuple[list[str], list[str]]:
        """Lines with a Loop, or a Scan over `rows`, and the names of its last states."""
        states, count = [self.name() for _ in range(self.r.randint(1, 3))], self.r.randint(1, 4)
        scan = self.r.random() < 0.4
        part = self.name()
        lines, made = self.computed([*known, *states, *([part] if scan else [])], count)
        if depth:
            inner, ends = self.loop([*states, *made, *known[:1]], depth - 1)
            lines, made = lines + inner, made + ends
        after = [self.r.choice([*made, *made, *states, known[0]]) for _ in states]
        stacked = [self.r.choice([*made, *states])] if depth and self.r.random() < 0.6 else []  # of the outer ones
        ends = [self.name() for _ in (*after, *stacked)]
        copies = [f"{new} = Identity({old})" for new, old in zip(ends, (*after, *stacked), strict=True)]
        shape = f"float[{self.size}]"
        typed = [f"{shape} {s}" for s in states]
        outer = [self.name() for _ in ends]
        starts = ", ".join(self.r.choice(known) for _ in states)
        if scan:
            head, tail = [*typed, f"{shape} {part}"], f"({starts}, rows)"
            op, results = "Scan <num_scan_inputs = 1, body =", [f"{shape} {e}" for e in ends]
        else:
            number, go, on = (self.name() for _ in range(3))
            head, tail = [f"int64 {number}", f"bool {go}", *typed], f"(steps, yes, {starts})"
            op, results = "Loop <body =", [f"bool {on}", *(f"{shape} {e}" for e in ends)]
            copies.append(f"{on} = Identity({go})")
        body = "\n".join([*lines, *copies])
        signature = f"{self.name()} ({', '.join(head)}) => ({', '.join(results)})"
        text = f"{', '.join(outer)} = {op} {signature} {{\n{body}\n}}> {tail}"
        self.stacks = outer[len(states) :] if depth else []
        return [text], outer[: len(states)]

    def model(self) -> str:
        """Two loops, one after the other, as a model's text."""
        lines, ends = self.loop(["x", "y"], self.r.randint(0, 2))
        second, more = self.loop(["x", *ends], 1)
        ends = [*ends, *more, *self.stacks]
        return f"""g (float[{self.size}] x, float[{self.size}] y, float[k, {self.size}] rows, int64 steps,
  int64[{self.size}] turn, int64[3] some, float[3] few) => ({", ".join(ends)}) {{
  yes = Constant <value = bool {{1}}> ()
  {"".join(line + chr(10) for line in (*lines, *second))}
}}"""


def _feed(steps: int, size: int) -> dict[str, np.ndarray]:
    turn = int64(np.roll(np.arange(size), 3))
    return {"x": floats(size), "y": floats(size), "rows": floats(max(1, steps), size), "steps": np.array(steps),
            "turn": turn, "some": int64([4, 0, 9]), "few": floats(3)}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_random_loops(seed: int) -> None:
    bodies = _Bodies(seed, str(LARGE) if seed % 2 else "m")
    model = parsed(bodies.model())
    steps = STEPS[1:] if bodies.stacks else STEPS  # of no steps onnxruntime stacks a shape of zeros
    feeds = [_feed(n, size) for size in ((LARGE,) if seed % 2 else (LARGE, 17, 300)) for n in steps]
    judge, compiled = runtime(model), onnxc.compile(model, threads=2)
    for feed in feeds:
        for found, wanted in zip(compiled.run(None, feed), judge.run(None, feed), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.cpu_only("the source of the CPU")
def test_which_states_exchange_buffers() -> None:
    """Large ones, each for what it becomes: two that become the same as well. A small one is copied."""
    model = parsed("""g (float[40] x, float[3] z, int64 n, bool yes) => (a, b, c, d) {
  a, b, c, d = Loop(n, yes, x, x, x, z) <body = in (int64 i, bool k, float[40] p, float[40] q, float[40] r, float[3] s)
      => (bool l, float[40] t, float[40] u, float[40] v, float[3] w) {
    t = Exp(p) u = Neg(r) v = Neg(r) w = Exp(s) l = Identity(k)
  }>
}""")
    source = onnxc.compile(model).source
    assert source.count("char *const next") == 3
