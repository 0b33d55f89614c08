"""Models that failed, as folders: `model.onnx`, `inputs.npz`, `wanted.npz`, and what happened in `verdict.txt`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, printer

from tests.fuzz.judge import Verdict, judge
from tests.fuzz.model import Input, Model
from tests.fuzz.oracle import Oracle


def save(model: Model, verdict: Verdict, oracle: Oracle, folder: Path) -> str:
    """Writes a folder; the text of its verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    run = model.run(oracle, model.arrays, steady=False)
    proto = model.proto(run)
    onnx.save(proto, folder / "model.onnx")
    _write(folder / "inputs.npz", model.arrays)
    _write(folder / "wanted.npz", {o: run.values[o] for o in model.outputs if isinstance(run.values[o], np.ndarray)})
    command = f"python -m tests.fuzz replay {folder}"
    text = f"seed {model.seed}, {verdict.kind}: {verdict.text}\n{command}\n\n{printer.to_text(proto)}\n"
    (folder / "verdict.txt").write_text(text)
    return text


def _write(path: Path, arrays: dict) -> None:
    np.savez(path, **{n: a if a.dtype.isbuiltin == 1 else a.astype(np.float32) for n, a in arrays.items()})


def replay(folder: Path, oracle: Oracle) -> Verdict:
    """Judges a stored model again."""
    proto = onnx.load(folder / "model.onnx")
    with np.load(folder / "inputs.npz") as stored:
        given = dict(stored)
    inputs, arrays = [], {}
    for i in proto.graph.input:
        t = i.type.tensor_type
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(t.elem_type))
        inputs.append(Input(i.name, dtype, tuple(d.dim_param or d.dim_value for d in t.shape.dim)))
        arrays[i.name] = given[i.name].astype(dtype)
    constants = {w.name: numpy_helper.to_array(w) for w in proto.graph.initializer}
    outputs = [o.name for o in proto.graph.output]
    model = Model(proto.opset_import[0].version, {}, inputs, constants, list(proto.graph.node), outputs, arrays)
    return judge(model, oracle)
