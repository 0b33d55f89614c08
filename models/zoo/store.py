"""Where the exported models lie, and how to get one that is not there yet. Imports no torch.

A model is three files: NAME.onnx, NAME.onnx.data (its weights) and NAME.inputs.npz (arrays i0, i1, ... in
the order of the graph's inputs). NAME.onnx is moved into place last: a model is there whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parents[2]

MODELS = (
    "resnet50", "resnet50_b8", "mobilenetv2", "mobilenetv2_b8", "effnetb0", "unet", "yolo", "convnext", "vit",
    "bert", "bert_b8", "gpt2", "gpt2_decode", "llama", "llama_decode", "whisper", "t5", "clip",
    "mlp", "mlp_b64", "lstm",
)  # fmt: skip
MICRO_GRAPHS = (
    "m_gelu_ln", "m_gelu_ln_small", "m_softmax", "m_rms_rope", "m_se", "m_chain20", "m_cheap20",
    "m_groupnorm_silu", "m_layernorm", "m_transpose_sum",
)  # fmt: skip
NAMES = MODELS + MICRO_GRAPHS


@dataclass(frozen=True)
class ZooModel:
    """One exported model on disk."""

    name: str
    path: Path

    @property
    def inputs_path(self) -> Path:
        return self.path.with_name(f"{self.name}.inputs.npz")

    def inputs(self) -> dict[str, np.ndarray[Any, Any]]:
        """The example inputs, by the names of the graph's inputs."""
        graph = onnx.load(self.path, load_external_data=False).graph
        with np.load(self.inputs_path) as stored:
            return {value.name: stored[f"i{index}"] for index, value in enumerate(graph.input)}


def directory() -> Path:
    """``$ONNXC_ZOO``, or build/zoo in the repository."""
    return Path(os.environ.get("ONNXC_ZOO") or ROOT / "build" / "zoo")


def find(name: str) -> ZooModel | None:
    """The model, if it was exported before."""
    if name not in NAMES:
        raise KeyError(f"no zoo model is called {name!r}; there are: {', '.join(NAMES)}")
    path = directory() / f"{name}.onnx"
    return ZooModel(name, path) if path.exists() else None


def ensure(name: str) -> ZooModel:
    """The model, exported first if it is missing. Several processes may ask for it at once.

    The export runs in a process of its own, so that torch never enters the caller's.
    """
    model = find(name)
    if model is None:
        subprocess.run([sys.executable, "-m", "models.zoo", name], cwd=ROOT, check=True)
        model = find(name)
        if model is None:
            raise FileNotFoundError(f"the export of {name} left no file in {directory()}")
    return model


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock under which ``name`` is exported; a second process waits here."""
    directory().mkdir(parents=True, exist_ok=True)
    with (directory() / f".{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
