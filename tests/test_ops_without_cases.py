"""Operators that the official suite has no case of, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxc
from tests.small_models import floats, parse, reference

pytestmark = pytest.mark.every_target

Array = np.ndarray[Any, Any]


def agrees(text: str, *inputs: Array, opset: int = 18) -> None:
    model = parse(text, opset)
    got = list(onnxc.compile(model)(*inputs).values())
    for a, b in zip(got, reference(model, *inputs), strict=True):
        for x, y in zip(a, b, strict=True) if isinstance(b, list) else [(a, b)]:
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_allclose(x, y, 2e-5, 2e-6)


@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 5, 4, 17), (2, 1, 3, 2, 5), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_global_lp_pool(shape: tuple[int, ...], p: int) -> None:
    dims, out = ",".join(map(str, shape)), ",".join("ABCDE"[: len(shape)])
    agrees(f"(float[{dims}] x) => (float[{out}] y) {{ y = GlobalLpPool<p={p}>(x) }}", floats(*shape))


@pytest.mark.parametrize("new_axis", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_sequence_made_and_joined(axis: int, new_axis: int) -> None:
    rank = "A, B, C" if new_axis else "A, B"
    agrees(
        f"""(float[n, 5] x, float[n, 5] y) => (float[{rank}] z)
        {{ a = Abs(x) s = SequenceConstruct(a, y, x) z = ConcatFromSequence<axis={axis}, new_axis={new_axis}>(s) }}""",
        floats(3, 5), floats(3, 5, seed=1),
    )  # fmt: skip


@pytest.mark.parametrize("at", [-3, -1, 0, 2])
def test_a_value_of_a_sequence(at: int) -> None:
    """At a position that is known, and at one that is an input."""
    agrees(
        f"""(float[7] x, float[3] y, int64 k) => (float[A] a, float[B] b)
        {{ s = SequenceConstruct(x, y, x) i = Constant<value_int={at}>()
           a = SequenceAt(s, i) b = SequenceAt(s, k) }}""",
        floats(7), floats(3), np.array(at, np.int64),
    )  # fmt: skip


@pytest.mark.parametrize("at", [None, 0, -1, 1])
def test_a_sequence_without_one(at: int | None) -> None:
    erase = "t = SequenceErase(s)" if at is None else "t = SequenceErase(s, k)"
    agrees(
        f"""(float[7] x, float[3] y, int64 k) => (float[A] a, int64 n, seq(float[B]) t)
        {{ s = SequenceConstruct(x, y, x) {erase} n = SequenceLength(t)
           z = Constant<value_int=0>() a = SequenceAt(t, z) }}""",
        floats(7), floats(3), np.array(at or 0, np.int64),
    )  # fmt: skip


def test_an_optional_that_has_a_value() -> None:
    agrees(
        """(float[n, 3] x) => (float[A, B] y, bool h)
        { a = Relu(x) o = Optional(a) h = OptionalHasElement(o) g = OptionalGetElement(o) y = Neg(g) }""",
        floats(5, 3),
    )  # fmt: skip
