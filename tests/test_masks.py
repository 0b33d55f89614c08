"""Bools that are moved and combined as the bytes that they are."""

from __future__ import annotations

import numpy as np
import pytest

import onnxc
from tests.small_models import parse

pytestmark = pytest.mark.every_target

MODEL = """(bool[37,19] a, bool[1,19] b, bool[37,1] c, uint8[37,19] u, float[37,19] x)
=> (bool[37,19] expanded, bool[37,19] logic, bool[37,19] picked, bool[19,37] turned, bool[40,19] padded,
    bool[37,19] upper, bool[37,19] numbers, bool[37,19] shared, bool[37,19] same, float[37,19] chosen)
{
  size = Constant <value_ints = [37, 19]> ()
  expanded = Expand(b, size)
  no = Not(a) either = Or(no, b) one = Xor(either, c) all = And(one, a) logic = Equal(all, b)
  picked = Where(a, b, c)
  turned = Transpose(a)
  pads = Constant <value_ints = [1, 0, 2, 0]> () yes = Constant <value = bool {1}> ()
  padded = Pad(a, pads, yes)
  upper = Trilu(a)
  numbers = Cast <to = 9> (u)
  v = Constant <value = uint8 {100}> () same = Equal(u, v)
  shared = Or(a, c) x2 = Neg(x) chosen = Where(shared, x, x2)
}"""


def test_bools_as_bytes() -> None:
    """A bool may be any byte but 0: what becomes of it is 1."""
    model = onnxc.compile(parse(MODEL))
    rng = np.random.default_rng(4)
    a, b, c = (rng.choice(np.array([0, 1, 2, 254], np.uint8), s).view(bool) for s in ((37, 19), (1, 19), (37, 1)))
    u, x = rng.integers(0, 3, (37, 19)).astype(np.uint8) * 100, rng.standard_normal((37, 19)).astype(np.float32)
    one, two, three = a.view(np.uint8) != 0, b.view(np.uint8) != 0, c.view(np.uint8) != 0
    wanted = {
        "expanded": np.broadcast_to(two, (37, 19)),
        "logic": (((~one | two) ^ three) & one) == two,
        "picked": np.where(one, two, three),
        "turned": one.T,
        "padded": np.pad(one, ((1, 2), (0, 0)), constant_values=True),
        "upper": np.triu(one),
        "numbers": u != 0,
        "shared": one | three,
        "same": u == 100,
        "chosen": np.where(one | three, x, -x),
    }
    for threads in (1, 2):
        model.threads = threads
        found = model(a, b, c, u, x)
        for name, y in wanted.items():
            assert found[name].tobytes() == np.ascontiguousarray(y).tobytes(), name


def test_no_masks_are_made() -> None:
    text = "(bool[N,33] a, bool[33] b) => (bool[N,33] y) { n = Not(a) y = And(n, b) }"
    source = onnxc.compile(parse(text)).explain().source("k0")
    assert "ox_ldbool" not in source and "ox_stbool" not in source
