"""The models that the project ships: the trained digits model, and the architectures of models/build.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxc
from models.build import build, dynamic_dims, random_inputs
from tests.agreement import assert_agrees, assert_repeats

pytestmark = pytest.mark.every_target

Array = np.ndarray[Any, Any]

TRANSFORMER = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 500, "positions": 128}
SMALL: dict[str, dict[str, int]] = {
    "bert": TRANSFORMER,
    "gpt2": TRANSFORMER,
    "mobilenet_v2": {"size": 64, "classes": 10},
    "resnet50": {"size": 64, "classes": 10},
}
TOKENS = [{"batch": b, "sequence": s} for b, s in ((1, 1), (1, 17), (3, 32), (2, 128))]
IMAGES = [{"batch": b} for b in (1, 2, 5)]


def sizes(name: str) -> list[dict[str, int]]:
    return TOKENS if "sequence" in dynamic_dims(name) else IMAGES


def inputs(model: onnx.ModelProto, options: dict[str, int]) -> dict[str, Array]:
    """Inputs of a static model; token ids stay in the vocabulary, and the last row's mask ends in zeros."""
    found = random_inputs(model)
    if "input_ids" in found:
        found["input_ids"] %= options["vocabulary"]
    if "attention_mask" in found:
        mask = found["attention_mask"]
        mask[-1, mask.shape[1] // 2 + 1 :] = 0
    return found


@pytest.mark.parametrize("name", SMALL)
def test_architecture(name: str) -> None:
    """With its free dims open, one compile serves every size; a compile for one size differs by rounding."""
    model = build(name, **SMALL[name], **dynamic_dims(name))
    compiled = onnxc.compile(model, threads=2)
    for free in sizes(name):
        static = build(name, **SMALL[name], **free)
        given = inputs(static, SMALL[name])
        assert_agrees(model, given, compiled)
        assert_repeats(compiled, given)
    fixed = onnxc.compile(static, threads=2)  # of the last size
    assert_agrees(static, given, fixed)
    for a, b in zip(fixed(**given), compiled(**given), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * float(np.abs(a).max()))


def test_digits(digits: Path) -> None:
    """The README's first model: trained, so its accuracy says that the answers mean something."""
    with np.load(digits / "digits_test.npz") as stored:
        image, label = stored["image"], stored["label"]
    compiled = onnxc.compile(digits / "digits.onnx", threads=2)
    (logits,) = compiled(image=image).values()
    assert len(label) == 360 and (logits.argmax(1) == label).mean() >= 0.97
    for batch in (1, 7, 360):
        assert_agrees(digits / "digits.onnx", {"image": image[:batch]}, compiled)
        (part,) = compiled(image=image[:batch]).values()
        assert (part.argmax(1) == logits[:batch].argmax(1)).all()
    assert_repeats(compiled, {"image": image})
