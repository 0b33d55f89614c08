"""Whole models, trained beside PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from models import training
from onnxc.optim import SGD, AdamW, Optimizer
from onnxc.training.step import TrainingStep, compile_training

STEPS = 20
ADAMW: tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]] = (
    AdamW(lr=1e-4), lambda p: torch.optim.AdamW(p, lr=1e-4),
)  # fmt: skip
MODELS = {"mlp_small": ADAMW, "lstm_small": ADAMW, "gpt2_small": ADAMW, "bert_small": ADAMW, "unet_small": ADAMW}


def trained_weights(path: Path, module: torch.nn.Module) -> list[str] | None:
    """Weights of a file that are parameters, reshaped at most, where the others are numbers of its own: as the ones
    and zeros that the exporter gives an InstanceNormalization which stands for a GroupNorm.
    """
    if not any(isinstance(m, torch.nn.GroupNorm) for m in module.modules()):
        return None
    held = {p.detach().numpy().tobytes() for p in module.parameters()}
    weights = onnx.load(path).graph.initializer
    return [w.name for w in weights if numpy_helper.to_array(w).tobytes() in held]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``exported("gpt2_small")``: the file of that case's module. Each is exported once."""

    @functools.cache
    def file(name: str, *, optimize: bool = True) -> Path:
        module, batch = training.build(name)
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        training.export(module, batch, str(path), optimize=optimize)
        return path

    return file


def check_losses(step: TrainingStep, name: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Trains both, and compares the loss of each step."""
    for k in range(STEPS):
        batch = training.CASES[name].batch()
        loss = module(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        (found,) = step(*(x.numpy() for x in batch))
        np.testing.assert_allclose(found, loss.detach().numpy(), rtol=1e-4, err_msg=f"step {k}")


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_pytorch(name: str, exported: Callable[..., Path]) -> None:
    path = exported(name)
    module, _ = training.build(name)
    mine, theirs = MODELS[name]
    wrt = trained_weights(path, module)
    step = compile_training(path, optimizer=mine, wrt=wrt)
    assert wrt is None or len(wrt) == len(list(module.parameters()))
    check_losses(step, name, module, theirs(module.parameters()))


OTHERS = ("vit_small", "autoencoder_small", "tagger_small", "decoder_small", "mobilenet_small")


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_losses_of_other_modules(name: str, exported: Callable[..., Path]) -> None:
    """As exported without the exporter's own optimizations, so that what is trained is what PyTorch trains."""
    path = exported(name, optimize=False)
    module, _ = training.build(name)
    mine = SGD(lr=0.05, momentum=0.9)
    step = compile_training(path, optimizer=mine, memory_budget=0.5)
    statistics = {n for n in step.parameters if n.endswith(("running_mean", "running_var"))}
    assert step.parameters.keys() - statistics == {n for n, _ in module.named_parameters()}
    check_losses(step, name, module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_gradients_with_a_memory_budget_are_those_of_pytorch(budget: float, exported: Callable[..., Path]) -> None:
    """What is computed again is what it was: gradients, as Adam's losses hide how large they are."""
    path = exported("gpt2_small")
    module, batch = training.build("gpt2_small")
    step = compile_training(path, optimizer=SGD(lr=1.0), memory_budget=budget)
    before = step.parameters
    step(*(x.numpy() for x in batch))
    after = step.parameters
    module(*batch).backward()
    theirs = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    names = {n: next((m for m in theirs if n.endswith(m)), None) for n in after}
    matched = {n: m for n, m in names.items() if m is not None and theirs[m].shape == after[n].shape}
    assert len(matched) > 20
    for n, m in matched.items():
        error = np.linalg.norm(before[n] - after[n] - theirs[m]) / np.linalg.norm(theirs[m])
        assert error < 1e-3, n


@pytest.mark.zoo
@pytest.mark.slow
def test_an_ill_conditioned_gradient_is_as_near_as_that_of_pytorch(exported: Callable[..., Path]) -> None:
    """An untrained ResNet-50 with batch norms, at four images: PyTorch's gradients in float32 and in float64 differ by
    2 %, and so do ours.
    """
    path = exported("resnet50_64")
    module, batch = training.build("resnet50_64")
    step = compile_training(path, optimizer=SGD(lr=1.0))
    before = step.parameters
    step(*(x.numpy() for x in batch))
    after = step.parameters
    exact = copy.deepcopy(module).double()
    for m in (module, exact):
        dtype = next(m.parameters()).dtype
        m(*(x.to(dtype) if x.is_floating_point() else x for x in batch)).backward()
    theirs = dict(module.named_parameters())
    errors = [
        (before[name].astype(np.float64) - after[name] - p.grad.numpy(), theirs[name].grad.numpy() - p.grad.numpy())
        for name, p in exact.named_parameters()
    ]
    ours, torchs = (np.sqrt(sum(float((e[k] ** 2).sum()) for e in errors)) for k in (0, 1))
    assert ours <= 1.5 * torchs
