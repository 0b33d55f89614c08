"""Every model of the zoo by name: how to build the module, and example inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn, randn

from models.zoo import huggingface, micro
from models.zoo.detection import Yolo
from models.zoo.diffusion import UNet
from models.zoo.vision import EfficientNetB0, MobileNetV2, ResNet50, SqueezeExcite


@dataclass(frozen=True)
class Entry:
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def _image(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (randn(*shape),)


def _pair(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (randn(*shape), randn(*shape))


def _tokens(batch: int, sequence: int) -> Tensor:
    return torch.randint(1, 1000, (batch, sequence))


def _ids(batch: int, sequence: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (_tokens(batch, sequence),)


def _ids_and_mask(batch: int, sequence: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (_tokens(batch, sequence), torch.ones(batch, sequence, dtype=torch.long))


def _token_and_cache(tensors: int, heads: int, past: int, width: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (_tokens(1, 1), *[randn(1, heads, past, width) for _ in range(tensors)])


CATALOGUE: dict[str, Entry] = {
    "resnet50": Entry(ResNet50, _image(1, 3, 224, 224)),
    "resnet50_b8": Entry(ResNet50, _image(8, 3, 224, 224)),
    "mobilenetv2": Entry(MobileNetV2, _image(1, 3, 224, 224)),
    "mobilenetv2_b8": Entry(MobileNetV2, _image(8, 3, 224, 224)),
    "effnetb0": Entry(EfficientNetB0, _image(1, 3, 224, 224)),
    "unet": Entry(UNet, lambda: (randn(1, 4, 64, 64), torch.tensor([500.0]))),
    "yolo": Entry(Yolo, _image(1, 3, 640, 640)),
    "convnext": Entry(huggingface.convnext, _image(1, 3, 224, 224)),
    "vit": Entry(huggingface.vit, _image(1, 3, 224, 224)),
    "bert": Entry(huggingface.bert, _ids_and_mask(1, 128)),
    "bert_b8": Entry(huggingface.bert, _ids_and_mask(8, 128)),
    "gpt2": Entry(huggingface.gpt2, _ids(1, 128)),
    "gpt2_decode": Entry(huggingface.gpt2_decode, _token_and_cache(24, 12, 128, 64)),
    "llama": Entry(huggingface.llama, _ids(1, 128)),
    "llama_decode": Entry(huggingface.llama_decode, _token_and_cache(12, 4, 128, 64)),
    "whisper": Entry(huggingface.whisper, _image(1, 80, 3000)),
    "t5": Entry(huggingface.t5, _ids(1, 128)),
    "clip": Entry(huggingface.clip, _ids(1, 77)),
    "mlp": Entry(micro.MLP, _image(1, 1024)),
    "mlp_b64": Entry(micro.MLP, _image(64, 1024)),
    "lstm": Entry(micro.LSTM, _ids(1, 64)),
    # micro graphs: the pointwise and reduction patterns that fusion is judged by
    "m_gelu_ln": Entry(micro.BiasGeluNorm, _pair(1, 512, 768)),
    "m_gelu_ln_small": Entry(micro.BiasGeluNorm, _pair(1, 16, 768)),
    "m_softmax": Entry(micro.MaskedSoftmax, lambda: (randn(1, 12, 384, 384), torch.zeros(1, 1, 384, 384))),
    "m_rms_rope": Entry(micro.RmsNormRope, _image(1, 512, 1024)),
    "m_se": Entry(lambda: SqueezeExcite(240, 10), _image(1, 240, 28, 28)),
    "m_chain20": Entry(micro.Chain, _pair(512, 1024)),
    "m_cheap20": Entry(micro.CheapChain, _pair(512, 1024)),
    "m_groupnorm_silu": Entry(micro.GroupNormSilu, _image(1, 192, 64, 64)),
    "m_layernorm": Entry(micro.LayerNorm, _image(1, 512, 768)),
    "m_transpose_sum": Entry(micro.TransposeSum, lambda: (randn(8, 256, 512), randn(8, 512, 256))),
}
