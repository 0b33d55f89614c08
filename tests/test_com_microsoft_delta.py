"""GatedDeltaNet of com.microsoft against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxc
from tests.ops_harness import Case, build, check, compare, expected, feeds

rng = np.random.default_rng(31)
TOKENS, BATCH, HEADS, VALUES, WIDTH, DEPTH = 6, 2, 2, 4, 8, 5


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def case(more: list[Any], attrs: dict[str, Any], starts: Any = None, packed: bool = False) -> Case:
    q, k, v = f32(TOKENS, HEADS, WIDTH), f32(TOKENS, HEADS, WIDTH), f32(TOKENS, VALUES, DEPTH)
    heads = [np.concatenate([x.reshape(TOKENS, -1) for x in (q, k, v)], 1), None, None] if packed else [q, k, v]
    decay, beta, *rest = more
    state = f32(BATCH, VALUES, DEPTH, WIDTH)
    inputs = [*heads, starts, decay, beta, state, *rest]
    given = {"qk_l2_norm": 1, **attrs}
    return Case("GatedDeltaNet", inputs, given, domain="com.microsoft", outputs=2, dynamic=False, rtol=1e-4, atol=1e-5)


CASES = {
    "plain": lambda: case([-abs(f32(TOKENS, VALUES)), abs(f32(TOKENS, VALUES))], {}),
    "packed": lambda: case([-abs(f32(TOKENS, VALUES, WIDTH)), abs(f32(TOKENS, VALUES))], {"scale": 0.7}, packed=True),
    "gate": lambda: case(
        [f32(TOKENS, VALUES), f32(TOKENS, VALUES), f32(VALUES), f32(VALUES)],
        {"gate_activation": "softplus", "beta_activation": "sigmoid"},
    ),
    "bounded": lambda: case(
        [f32(TOKENS, VALUES, WIDTH), f32(TOKENS, VALUES), f32(VALUES), f32(VALUES, WIDTH)], {"gate_activation": "kda"}
    ),
    "linear": lambda: case([None, None], {"update_rule": "linear", "qk_l2_norm": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_requests_of_one_length(name: str) -> None:
    check(CASES[name]())


def test_vectors_that_are_nearly_nothing() -> None:
    """What is added before they are divided by their length."""
    small = case([-abs(f32(TOKENS, VALUES)), abs(f32(TOKENS, VALUES))], {})
    small.inputs[0] *= np.float32(1e-6)  # type: ignore[index, operator]
    check(small)


def test_requests_of_any_length() -> None:
    starts = np.array([0, 4, TOKENS], np.int32)
    ragged = case([-abs(f32(TOKENS, VALUES)), abs(f32(TOKENS, VALUES))], {}, starts=starts)
    got = onnxc.compile(build(ragged, False))(**feeds(ragged)).values()
    for a, b in zip(got, expected(ragged), strict=True):
        compare(np.asarray(a), b, "ragged", ragged)
