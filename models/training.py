"""Modules with a loss, as they are trained: the whole-model tests and the benchmark of training steps share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor, nn

from models.training_modules import Autoencoder, Decoder, MobileNet, SmallViT, Tagger
from models.zoo import huggingface
from models.zoo.diffusion import UNet
from models.zoo.micro import MLP
from models.zoo.vision import ResNet50


class LastScores(nn.Module):
    """A language model of LSTMs, whose scores are those of the last position."""

    def __init__(self, words: int = 200, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, 2 * width, 2, batch_first=True)
        self.out = nn.Linear(2 * width, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0][:, -1])


class WithLoss(nn.Module):
    """The mean cross entropy of a module's scores, whose last axis are the classes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        scores = self.module(*batch[:-1])
        return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), batch[-1].reshape(-1))


class Denoising(nn.Module):
    """The mean squared error of the noise that a module finds in images at a time of their diffusion."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.module(images, time), noise)


@dataclass(frozen=True)
class Case:
    """A module with its loss, in training mode, and what makes a batch for it."""

    module: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[nn.Module], nn.Module] = WithLoss


def transformer(kind: str, layers: int, **sizes: int) -> nn.Module:
    """GPT-2 or BERT, without dropout, whose draws differ from one framework to the next."""
    if kind == "gpt2":
        options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(n_layer=layers, **options, **sizes, **huggingface.SDPA)
        return huggingface.FirstOutput(hf.GPT2LMHeadModel(config), ["input_ids"], use_cache=False)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.BertConfig(num_hidden_layers=layers, **options, **sizes, **huggingface.SDPA)
    return huggingface.FirstOutput(hf.BertForMaskedLM(config), ["input_ids"])


def _ids(batch: int, length: int, words: int = 1000) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(1, words, (batch, length)), torch.randint(1, words, (batch, length)))


def _images(batch: int, size: int, classes: int = 1000) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,)))


def _noisy_images(batch: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 4, size, size), 1000 * torch.rand(batch), torch.randn(batch, 4, size, size))


CASES: dict[str, Case] = {
    "mlp_b64": Case(MLP, lambda: (torch.randn(64, 1024), torch.randint(0, 10, (64,)))),
    "gpt2_b1_s128": Case(lambda: transformer("gpt2", 12), _ids(1, 128)),
    "bert_b2_s128": Case(lambda: transformer("bert", 12), _ids(2, 128)),
    "resnet50_b4": Case(ResNet50, _images(4, 224)),
    "gpt2_small": Case(lambda: transformer("gpt2", 2, n_embd=96, n_head=3, vocab_size=1003), _ids(2, 33)),
    "bert_small": Case(
        lambda: transformer("bert", 2, hidden_size=96, num_attention_heads=3, intermediate_size=200, vocab_size=1003),
        _ids(2, 33),
    ),
    "mlp_small": Case(lambda: MLP(64, 128, 2), lambda: (torch.randn(16, 64), torch.randint(0, 10, (16,)))),
    "lstm_small": Case(LastScores, lambda: (torch.randint(0, 200, (4, 9)), torch.randint(0, 200, (4,)))),
    "resnet50_64": Case(ResNet50, _images(4, 64)),
    "unet_small": Case(lambda: UNet(32, (1, 2), blocks=1), _noisy_images(2, 16), Denoising),
    "vit_small": Case(SmallViT, _images(4, 16, 10)),
    "autoencoder_small": Case(Autoencoder, lambda: (torch.rand(4, 1, 16, 16),), lambda module: module),
    "tagger_small": Case(Tagger, lambda: (torch.randint(0, 50, (3, 11)), torch.randint(0, 7, (3, 11)))),
    "decoder_small": Case(Decoder, _ids(2, 13, 60)),
    "mobilenet_small": Case(MobileNet, _images(8, 32, 10)),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A case's module, in training mode, and a batch.

    No two of its parameters are equal: of equal ones the exporter makes one, which is then trained as one.
    """
    torch.manual_seed(seed)
    case = CASES[name]
    module = case.loss(case.module()).train()
    with torch.no_grad():
        for p in module.parameters():
            p += 0.01 * torch.randn_like(p)
    return module, case.batch()


def export(module: nn.Module, batch: tuple[Tensor, ...], path: str, *, optimize: bool = True) -> None:
    """Writes a module in training mode to an ONNX file.

    By PyTorch's older exporter where there are batch norms: the newer one writes them as they are in inference. Without
    `optimize` the weights of the file are the module's parameters and no others: else tables become weights, and a
    parameter that is used in two ways may become two.
    """
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        torch.onnx.export(module, batch, path, dynamo=False, training=torch.onnx.TrainingMode.TRAINING,
                          do_constant_folding=False, opset_version=17)  # fmt: skip
    else:
        with torch.no_grad():  # else LSTMs become loops
            torch.onnx.export(module.eval(), batch, path, dynamo=True, verbose=False, external_data=True,
                              optimize=optimize)  # fmt: skip
