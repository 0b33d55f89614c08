"""Losses behind models that have none, beside PyTorch's; and the example that uses one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxc.errors import InputError
from onnxc.training.losses import with_loss
from tests.small_models import Array, floats, parse, reference

SCORES = parse("(float[n, 5, m] x) => (float[n, 5, m] scores) { scores = Identity(x) }", 20)
F = torch.nn.functional


def loss_of(proto: onnx.ModelProto, x: Array, target: Array) -> float:
    onnx.checker.check_model(proto, full_check=True)
    return float(reference(proto, x, target)[-1])


@pytest.mark.parametrize("axis", [1, -1, 2])
@pytest.mark.parametrize("ignored", [None, 3])
def test_cross_entropy_beside_pytorch(axis: int, ignored: int | None) -> None:
    x = floats(4, 5, 6)
    classes = np.moveaxis(x, axis, 1)
    target = np.random.default_rng(1).integers(0, 5, (classes.shape[0], classes.shape[2]))
    wanted = F.cross_entropy(
        torch.tensor(classes), torch.tensor(target), ignore_index=-100 if ignored is None else ignored
    )
    found = loss_of(with_loss(SCORES, axis=axis, ignore_index=ignored), x, target)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "torch_loss"),
    [("mse", F.mse_loss), ("l1", F.l1_loss), ("binary_cross_entropy", F.binary_cross_entropy_with_logits)],
)
def test_losses_of_numbers_beside_pytorch(kind: str, torch_loss: Any) -> None:
    x = floats(4, 5, 6)
    target = np.abs(np.tanh(floats(4, 5, 6, seed=1)))
    found = loss_of(with_loss(SCORES, kind), x, target)
    np.testing.assert_allclose(found, torch_loss(torch.tensor(x), torch.tensor(target)), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "hinge"}, "a loss is one of"),
        ({"output": "y"}, "no output 'y'"),
        ({"axis": 3}, "axis 3"),
        ({"target": "x"}, "choose other names"),
        ({"name": "scores"}, "choose other names"),
    ],
)
def test_what_does_not_fit_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_loss(SCORES, **options)


def test_old_opsets_and_integers_are_refused() -> None:
    with pytest.raises(InputError, match="losses need 13"):
        with_loss(parse("(float[n] x) => (float[n] y) { y = Relu(x) }", 12))
    with pytest.raises(InputError, match="only floats"):
        with_loss(parse("(int64[n] x) => (int64[n] y) { y = Abs(x) }"), "mse")


def test_the_example_reads_digits_sideways(tmp_path: Path) -> None:
    path = Path(__file__).parent.parent / "examples/finetune_digits.py"
    spec = importlib.util.spec_from_file_location("finetune_digits", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses, before, after = example.finetune(3, tmp_path / "sideways.onnx")
    assert losses[-1] < losses[0] / 3
    assert before < 0.2
    assert after > 0.85
