"""Turn a catalogue entry into files: build the module with its seed, export it, store inputs beside it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.zoo import store
from models.zoo.catalogue import CATALOGUE


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    """The module in inference mode, its example inputs and their names; the same ones each time."""
    entry = CATALOGUE[name]
    torch.manual_seed(0)
    module = entry.module().eval()
    torch.manual_seed(1)
    inputs = entry.inputs()
    _settle_batch_norms(module)
    return module, inputs, [_input_name(index, value) for index, value in enumerate(inputs)]


def export(name: str) -> None:
    """Export one model into the store, unless another process has done so meanwhile."""
    with store.locked(name):
        if store.find(name) is not None:
            return
        module, inputs, names = make(name)
        target = store.directory()
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target))
        try:
            _export_quietly(module, inputs, names, scratch / f"{name}.onnx")
            arrays = {f"i{index}": value.numpy() for index, value in enumerate(inputs)}
            np.savez(scratch / f"{name}.inputs.npz", **arrays)
            # NAME.onnx goes last: its presence says that all of it is there
            for file in sorted(scratch.iterdir(), key=lambda path: (path.suffix == ".onnx", path.name)):
                os.replace(file, target / file.name)
        finally:
            shutil.rmtree(scratch)


def _export_quietly(module: nn.Module, inputs: tuple[Tensor, ...], names: list[str], path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # "torchvision is not installed", once a model
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, path, input_names=names, dynamo=True, external_data=True, verbose=False)


def _settle_batch_norms(module: nn.Module) -> None:
    """Give every batch norm statistics like a trained network's; a fresh one would be the identity."""
    with torch.no_grad():
        for child in module.modules():
            if isinstance(child, nn.BatchNorm2d):
                child.running_mean.normal_(0, 0.1)
                child.running_var.uniform_(0.5, 1.5)


def _input_name(index: int, value: Tensor) -> str:
    return "ids" if index == 0 and value.dtype == torch.long else f"x{index}"
