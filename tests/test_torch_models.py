"""Architectures of transformers, small, by way of torch.compile. `python tests/torch_models.py` runs all of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from onnxc.torch import program  # noqa: E402
from tests import torch_models  # noqa: E402
from tests.torch_harness import fresh, through  # noqa: E402


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


def test_generation_compiles_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for the prompt, one for the tokens after it, whose cache grows: whatever the prompt's length."""
    pytest.importorskip("expecttest", reason="PyTorch's lists of samples import it")
    from tests.torch_opinfo import Interpreted

    monkeypatch.setattr(program, "compile", Interpreted)
    small = {**torch_models.SMALL, "num_hidden_layers": 1}
    with fresh(), torch.no_grad():
        model = torch_models.made("LlamaForCausalLM", "LlamaConfig", **small, num_key_value_heads=2)
        prompts = [torch_models.ids(2, length) for length in (7, 9, 4)]
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = [model.generate(ids, **options) for ids in prompts]
        model.forward = through(model.forward, dynamic=True)
        torch._dynamo.utils.counters.clear()
        assert all(torch.equal(model.generate(ids, **options), y) for ids, y in zip(prompts, expected, strict=True))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
