"""onnxruntime's contrib operators around decoders and texts, and for regions and matrices, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import OnnxcError
from tests.ops_harness import Case, build, check, compare, expected, feeds

rng = np.random.default_rng(5)
TEXTS = ["foo bar-baz a", "a1b22  c", "", "çé\nd", "aab xaby abab"]


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def ms(name: str, inputs: list[Any], attrs: dict[str, Any] | None = None, **more: Any) -> Case:
    return Case(name, inputs, attrs or {}, domain="com.microsoft", **more)


def regions() -> list[Case]:
    fixed = np.array([[0, 0, 1, 1], [1, 1, 0, 0], [0.5, 0.5, 0.5, 0.5]], np.float32)
    boxes = np.concatenate([rng.uniform(-0.2, 1.2, (4, 4)).astype(np.float32), fixed])
    images, x = np.array([0, 1, 2, 1, 0, 2, 1], np.int32), f32(3, 2, 5, 6)
    sizes = [np.array(s, np.int32) for s in ((3, 4), (1, 5), (2, 1))]
    how = [{"mode": "nearest"}, {"extrapolation_value": 7.0}]
    return [ms("CropAndResize", [x, boxes, images, s], h, const=[3], keep=[2, 4]) for s in sizes for h in how]


def matrices() -> list[Case]:
    drawn = [f32(*s) + 2 * np.eye(s[-1], dtype=np.float32) for s in ((2, 1, 1), (3, 3), (2, 2, 5, 5))]
    drawn[2][..., 0, 0] = 0
    return [ms("Inverse", [x], dynamic=False, rtol=1e-3, atol=1e-4) for x in drawn]


def repeats() -> list[Case]:
    drawn = [(n, rng.integers(0, 3, (2, s))) for n, s in ((1, 4), (2, 9), (3, 9), (3, 2), (3, 1), (2, 0))]
    return [ms("NGramRepeatBlock", [t, f32(2, 6)], {"ngram_size": n}) for n, t in drawn]


@pytest.mark.every_target
@pytest.mark.parametrize("case", [*regions(), *matrices(), *repeats()], ids=str)
def test_operator(case: Case) -> None:
    check(case)


def test_inverse_of_none() -> None:
    """A matrix without an inverse gives no number, and no error."""
    case = ms("Inverse", [np.ones((2, 2), np.float32)], dynamic=False)
    (y,) = onnxc.compile(build(case, False))(**feeds(case)).values()
    assert not np.isfinite(y).any()


TOKENS = [
    {"separators": [" "]}, {"separators": ["[0-9]+", "ab|b"]}, {"separators": ["ab", "abc"], "mark": 1},
    {"separators": [""]}, {"separators": ["x*"]}, {"separators": ["^a", " $"]}, {"tokenexp": "."},
    {"tokenexp": "[a-z]+", "mincharnum": 2}, {"tokenexp": "a|ab"}, {"tokenexp": "a*"}, {"tokenexp": r"\bb|b\b|^f"},
]  # fmt: skip


@pytest.mark.cpu_only
@pytest.mark.parametrize("attrs", TOKENS, ids=str)
def test_tokens(attrs: dict[str, Any]) -> None:
    texts = np.array(TEXTS, object)
    case = ms("Tokenizer", [texts], {"mark": 0, "mincharnum": 1, "pad_value": "#"} | attrs)
    model = onnxc.compile(build(case, True))
    assert model(x0=texts)["y0"].tolist() == expected(case)[0].tolist()
    assert model(x0=texts[:0])["y0"].shape == (0, 0)


@pytest.mark.cpu_only
def test_way_through_costs() -> None:
    model = onnxc.compile(build(ms("DynamicTimeWarping", [f32(2, 3)]), True))
    for shape in ((3, 7), (1, 4), (5, 1), (20, 33)):
        case = ms("DynamicTimeWarping", [np.round(f32(*shape), 1)])
        compare(model(*case.inputs)["y0"], expected(case)[0], str(case), case)


@pytest.mark.cpu_only
def test_pads_that_come_with_the_run() -> None:
    x, w, bias = f32(1, 3, 4, 5), f32(3, 2, 3, 3), f32(2)
    attrs = {"strides": [2, 2], "output_padding": [1, 0]}
    model = onnxc.compile(build(ms("ConvTransposeWithDynamicPads", [x, w, np.zeros(4, np.int64), bias], attrs), False))
    for pads in ([0, 0, 0, 0], [0, 1, 1, 2]):
        case = ms("ConvTransposeWithDynamicPads", [x, w, np.array(pads), bias], attrs)
        compare(model(*case.inputs)["y0"], expected(case)[0], str(case), case)


TEXT = np.array(["a"], object)
REFUSED = [
    ms("Tokenizer", [TEXT], {"mark": 0, "mincharnum": 1, "pad_value": ""}),
    ms("Tokenizer", [TEXT], {"mark": 0, "mincharnum": 0, "pad_value": "", "tokenexp": "a"}),
    ms("Tokenizer", [TEXT], {"mark": 0, "mincharnum": 2, "pad_value": "", "separators": [""]}),
    ms("CropAndResize", [f32(1, 1, 2, 2), f32(1, 4), np.zeros(1, np.int32), np.zeros(2, np.int32)], const=[3]),
    ms("NGramRepeatBlock", [np.zeros((1, 2), np.int64), f32(1, 2)], {"ngram_size": 0}),
    ms("Inverse", [f32(2, 3)]),
    ms("DynamicTimeWarping", [f32(2)]),
]  # fmt: skip


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case: Case) -> None:
    with pytest.raises(OnnxcError):
        onnxc.compile(build(case, False))(*[x for i, x in enumerate(case.inputs) if i not in case.const])
