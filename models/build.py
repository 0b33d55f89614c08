"""Build a real architecture as ONNX, with numpy alone and weights from a fixed seed.

    python -m models.build bert --out bert.onnx                    BERT-base, batch 1, 128 tokens
    python -m models.build bert --layers 2 --width 128 --heads 2   a small one
    python -m models.build gpt2 --dynamic                          batch and sequence left open
    python -m models.build resnet50 --batch 8 --check              and run it once in onnxruntime

In Python: ``build("gpt2", layers=2, batch="batch", sequence="sequence")`` returns a ModelProto.
The outputs mean nothing (the weights are random); shapes, ops and costs are the real ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from models.bert import bert
from models.gpt2 import gpt2
from models.mobilenet import mobilenet_v2
from models.resnet import resnet50

ARCHITECTURES: dict[str, Callable[..., onnx.ModelProto]] = {
    "bert": bert,
    "gpt2": gpt2,
    "mobilenet_v2": mobilenet_v2,
    "resnet50": resnet50,
}

OPTIONS = ("batch", "sequence", "size", "layers", "width", "heads", "seed")
"""Keywords the command line passes on; an architecture refuses those it does not have."""


def build(name: str, **options: Any) -> onnx.ModelProto:
    """Build an architecture by name; the options are its function's keywords."""
    return ARCHITECTURES[name](**options)


def dynamic_dims(name: str) -> dict[str, str]:
    """The keywords that leave every free dim of an architecture open."""
    return {"batch": "batch"} | ({"sequence": "sequence"} if name in ("bert", "gpt2") else {})


def random_inputs(model: onnx.ModelProto, *, free: int = 2, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs that fit a model built here: token ids, all-ones masks, normal images.

    ``free`` is the size given to every dim that the model leaves open.
    """
    rng = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    for value in model.graph.input:
        shape = [dim.dim_value or free for dim in value.type.tensor_type.shape.dim]
        if value.name == "attention_mask":
            inputs[value.name] = np.ones(shape, np.int64)
        elif value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            inputs[value.name] = rng.integers(1, 1000, shape)
        else:
            inputs[value.name] = rng.standard_normal(shape, np.float32)
    return inputs


def check(model: onnx.ModelProto, *, free: int = 2) -> list[np.ndarray[Any, Any]]:
    """Check the model in full and run it once in onnxruntime; raises if an output is not finite."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray[Any, Any]] = session.run(None, random_inputs(model, free=free))
    for info, output in zip(model.graph.output, outputs, strict=True):
        if not np.isfinite(output).all():
            raise ValueError(f"output {info.name} of {model.graph.name} has values that are not finite")
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    parser.add_argument("--out", type=Path, help="file to write (default: NAME.onnx)")
    parser.add_argument("--dynamic", action="store_true", help="leave batch and sequence open")
    parser.add_argument("--check", action="store_true", help="run it once in onnxruntime")
    for option in OPTIONS:
        parser.add_argument(f"--{option}", type=int)
    arguments = parser.parse_args()

    options = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.dynamic:
        options = dynamic_dims(arguments.name) | options
    model = build(arguments.name, **options)
    if arguments.check:
        check(model)
    out = arguments.out or Path(f"{arguments.name}.onnx")
    out.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, out)
    print(f"{out}: {len(model.graph.node)} nodes, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
