"""Architectures that the transformers library defines: language models, and its vision and speech encoders.

Each function makes a module with random weights that takes tensors by position and returns plain tensors.
Nothing is downloaded: the configurations are the library's defaults or written here.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

SDPA = {"attn_implementation": "sdpa"}
PAST = 128  # tokens already in the cache of the decoding models


class FirstOutput(nn.Module):
    """Call a transformers model with positional tensors; keep its first output only."""

    def __init__(self, model: nn.Module, names: list[str], **options: object) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.options = options

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True)), **self.options)[0]


class DecodeStep(nn.Module):
    """One token with a cache: (ids, k0, v0, k1, v1, ...) to (logits, new k0, new v0, ...)."""

    def __init__(self, model: nn.Module, layers: int) -> None:
        super().__init__()
        self.model = model
        self.layers = layers

    def forward(self, ids: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        past = hf.DynamicCache(config=self.model.config)
        for layer in range(self.layers):
            past.update(cache[2 * layer], cache[2 * layer + 1], layer)
        position = torch.full((1, 1), PAST, dtype=torch.long)
        out = self.model(input_ids=ids, past_key_values=past, position_ids=position, use_cache=True)
        return (out.logits, *[tensor for layer in past.layers for tensor in (layer.keys, layer.values)])


def bert() -> nn.Module:
    model = hf.BertModel(hf.BertConfig(**SDPA), add_pooling_layer=False)
    return FirstOutput(model, ["input_ids", "attention_mask"])


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**SDPA))


def gpt2() -> nn.Module:
    return FirstOutput(_gpt2(), ["input_ids"], use_cache=False)


def gpt2_decode() -> nn.Module:
    return DecodeStep(_gpt2(), 12)


def _llama() -> nn.Module:
    """Six layers of Llama's kind: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""
    config = hf.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        **SDPA,
    )
    return hf.LlamaForCausalLM(config)


def llama() -> nn.Module:
    return FirstOutput(_llama(), ["input_ids"], use_cache=False)


def llama_decode() -> nn.Module:
    return DecodeStep(_llama(), 6)


def t5() -> nn.Module:
    model = hf.T5EncoderModel(hf.T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8))
    return FirstOutput(model, ["input_ids"])


def clip() -> nn.Module:
    return FirstOutput(hf.CLIPTextModel(hf.CLIPTextConfig(**SDPA)), ["input_ids"])


def whisper() -> nn.Module:
    """The encoder of whisper-tiny: 30 seconds of 80-band spectrogram."""
    config = hf.WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, **SDPA)
    return FirstOutput(WhisperEncoder(config), ["input_features"])


def vit() -> nn.Module:
    return FirstOutput(hf.ViTModel(hf.ViTConfig(**SDPA), add_pooling_layer=False), ["pixel_values"])


def convnext() -> nn.Module:
    return FirstOutput(hf.ConvNextModel(hf.ConvNextConfig()), ["pixel_values"])
