"""Architectures of transformers, small, by way of torch.compile. `python tests/torch_models.py` runs all of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import torch_models  # noqa: E402


@pytest.mark.parametrize("name", ["gpt_neox", "swin", "bart"])
def test_a_model(name: str) -> None:
    torch.manual_seed(1)
    result = torch_models.checked(*torch_models.MODELS[name]())
    assert result.error < 1e-4 and not result.fallbacks
    assert result.graphs == result.programs == 1


def test_a_mixture_of_experts() -> None:
    """How many rows an expert has, data decides: its product is an op of transformers' own, which PyTorch runs."""
    torch.manual_seed(1)
    result = torch_models.checked(*torch_models.MODELS["mixtral"]())
    assert result.error < 1e-4 and all("grouped_mm" in line for line in result.fallbacks)
