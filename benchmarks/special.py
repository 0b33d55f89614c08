"""What the zoo has no model for: attention over long sequences, weights of few bits, and integer arithmetic."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import generated
from benchmarks.common import PROFILE_RUNS, THREADS, Mark, Outcome, stored, zoo
from onnxc.tools.bench import Entry, Timing, bench, duration, race, stored_inputs

ROUNDS = 12
SEQUENCES = (1500, 4096)
OWN, PEER = "onnxc", "onnxruntime"


def attention(tell: Callable[[str], None] = print) -> Outcome:
    """Softmax attention with 6 heads of depth 64, beside onnxruntime."""
    outcome = Outcome("Attention, 6 heads of depth 64", ["sequence", OWN, PEER, "ratio of best", "25 %", "of FMA peak"])
    for sequence in SEQUENCES:
        for mask in (False, True):
            name = f"{sequence}{', with a mask' if mask else ''}"
            model, inputs = generated.attention(sequence, mask)
            with stored(model) as path:
                found = bench(path, inputs, threads=THREADS, rounds=ROUNDS, profile_runs=PROFILE_RUNS)
            best, p25 = found.ratio()
            cells = [duration(t.best) for t in found.timings]
            outcome.rows.append([name, *cells, f"{best:.2f}", f"{p25:.2f}", f"{found.share_of_peak():.0%}"])
            outcome.data[name] = found.to_dict()
            outcome.marks.append(Mark(f"attention, sequence {name}, by onnxruntime's time", best, 0.6))
            tell(f"attention {name}: {' '.join(cells)}, ratio {best:.2f}")
    return outcome


def weights(tell: Callable[[str], None] = print) -> Outcome:
    """One row through matmuls whose weights have 32, 8 or 4 bits: time should follow the bytes."""
    title = f"One row through {generated.LAYERS} matmuls of {generated.WIDTH} by {generated.WIDTH}"
    outcome = Outcome(
        title, ["weights", "bytes", OWN, PEER, "ratio of best", "by float32's time", "bytes by float32's"]
    )
    with ExitStack() as stack:
        entries: dict[str, Entry] = {}
        nbytes: dict[int, int] = {}
        for bits in (32, 8, 4):
            model, inputs = generated.decoder(bits)
            nbytes[bits] = generated.weight_bytes(model)
            path, arrays = stack.enter_context(stored(model)), stack.enter_context(stored_inputs(list(inputs.values())))
            entries |= {f"{engine} {bits}": Entry(engine, path, arrays) for engine in (OWN, PEER)}
        times, _ = race(entries, threads=THREADS, rounds=ROUNDS)
    for bits, n in nbytes.items():
        own, peer, full = times[f"{OWN} {bits}"].best, times[f"{PEER} {bits}"].best, times[f"{OWN} 32"].best
        share, size = own / full, n / nbytes[32]
        name = {32: "float32", 8: "int8, DequantizeLinear", 4: "int4, MatMulNBits"}[bits]
        cells = [f"{n / 1e6:.0f} MB", duration(own), duration(peer), f"{own / peer:.2f}", f"{share:.2f}", f"{size:.2f}"]
        outcome.rows.append([name, *cells])
        tell("  ".join([name, *cells]))
        if bits != 32:
            outcome.marks.append(Mark(f"{name}: time by float32's, over the same of bytes", share / size, 1.2))
    outcome.data = {"bytes": nbytes, "times": {name: t.to_dict() for name, t in times.items()}}
    return outcome


def integers(tell: Callable[[str], None] = print) -> Outcome:
    """Quantized models beside the float32 models that they come from, and beside onnxruntime's time for them."""
    headings = ["model", "float32", "int8", "int8 by float32", f"{PEER}, int8", "by onnxruntime's"]
    outcome = Outcome("int8", headings)
    for name, make in (("MLP, MatMulInteger", _dynamic), ("MLP, QDQ", _static_mlp), ("resnet50, QDQ", _static_resnet)):
        with make() as (real, whole, inputs), stored_inputs(list(inputs.values())) as arrays:
            entries = {
                "float32": Entry(OWN, real, arrays),
                "int8": Entry(OWN, whole, arrays),
                PEER: Entry(PEER, whole, arrays),
            }
            times, _ = race(entries, threads=THREADS, rounds=ROUNDS)
        _integer_row(outcome, name, times)
        tell("  ".join(outcome.rows[-1]))
    return outcome


def _integer_row(outcome: Outcome, name: str, times: dict[str, Timing]) -> None:
    real, whole, peer = (times[k].best for k in ("float32", "int8", PEER))
    cells = [duration(real), duration(whole), f"{whole / real:.2f}", duration(peer), f"{whole / peer:.2f}"]
    outcome.rows.append([name, *cells])
    outcome.data[name] = {key: t.to_dict() for key, t in times.items()}
    outcome.marks.append(Mark(f"{name}: int8 by float32's time", whole / real, 0.7))


Quantized = Iterator[tuple[str, str, dict[str, Any]]]  # paths of the float32 model and of the int8 one; inputs


@contextmanager
def _dynamic() -> Quantized:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model, inputs = generated.perceptron()
    with stored(model) as path:
        whole = str(Path(path).with_name("int8.onnx"))
        quantize_dynamic(path, whole, weight_type=QuantType.QInt8)
        yield path, whole, inputs


@contextmanager
def _static_mlp() -> Quantized:
    model, inputs = generated.perceptron()
    with stored(model) as path:
        yield path, _static(path, inputs), inputs


@contextmanager
def _static_resnet() -> Quantized:
    resnet = zoo("resnet50")
    with tempfile.TemporaryDirectory(prefix="onnxc-bench-model-") as folder:
        path = f"{folder}/model.onnx"  # with its weights inside, as the quantizer wants it
        onnx.save(onnx.load(resnet.path), path)
        yield path, _static(path, resnet.inputs()), resnet.inputs()


def _static(path: str, inputs: dict[str, Any]) -> str:
    """The model quantized with QuantizeLinear and DequantizeLinear around each operator, by ranges seen once."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Once(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter([inputs])

        def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
            return next(self.feeds, None)

    whole = str(Path(path).with_name("int8.onnx"))
    quantize_static(
        path, whole, Once(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return whole
