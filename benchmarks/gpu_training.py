"""Training steps on an NVIDIA GPU, beside PyTorch eager and torch.compile: bfloat16 with float32 parameters.

    python -m benchmarks.gpu_training prepare FOLDER [CASE ...]    compiles the steps; needs no GPU
    python -m benchmarks.gpu_training time FOLDER [CASE ...]       times them, by events of the GPU
    python -m benchmarks.gpu_training profile FOLDER [CASE ...]    the time of each kernel, as JSON beside the programs
    python -m benchmarks.gpu_training check                        losses of small models against PyTorch's on the CPU

A prepared step holds machine code and no weights, so its file is small; it is timed with random parameters, and with
random batches in rotation. Both sides have all of their state on the GPU. `time` needs torch with CUDA, and
transformers; `prepare` and `check` compile, which needs Triton.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import onnxc
from models import training
from models.zoo.micro import MLP
from models.zoo.vision import ResNet50
from onnxc.optim import SGD, AdamW, Optimizer
from onnxc.report import Kernel
from onnxc.runtime.cuda.model import CudaModel

TARGET, PRECISION = "cuda:sm_90", "bfloat16"
SETS = 4  # of inputs, in rotation
BATCH_SECONDS = 0.05
CHECKED = 10  # steps of `check`
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # of its losses


@dataclass(frozen=True)
class Case:
    """A module, what makes a batch for it, and its optimizer."""

    module: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    adam: bool = True

    @property
    def optimizer(self) -> Optimizer:
        """Ours."""
        return AdamW(lr=1e-4) if self.adam else SGD(lr=1e-2, momentum=0.9)

    def theirs(self, module: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """PyTorch's."""
        if self.adam:
            return torch.optim.AdamW(module.parameters(), lr=1e-4, **options)
        return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9, **options)

    def build(self) -> nn.Module:
        """The module with its loss; no two parameters are equal, which the exporter would make one."""
        torch.manual_seed(0)
        module = training.WithLoss(self.module()).train()
        with torch.no_grad():
            for p in module.parameters():
                p += 0.01 * torch.randn_like(p)
        return module


def _layers(width: int) -> list[nn.Module]:
    """Those of a convolutional network with batch normalization."""
    return [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 1000),
    ]  # fmt: skip


CASES = {
    "gpt2_b8_s512": Case(lambda: training.transformer("gpt2", 12), training._ids(8, 512)),
    "bert_b16_s128": Case(lambda: training.transformer("bert", 12), training._ids(16, 128)),
    "resnet50_b32": Case(ResNet50, training._images(32, 224), adam=False),
}
SMALL = {
    "images": Case(lambda: nn.Sequential(*_layers(32)), training._images(16, 64), adam=False),
    "mlp": Case(lambda: MLP(64, 128, 2), lambda: (torch.randn(16, 64), torch.randint(0, 10, (16,)))),
    "gpt2": Case(lambda: training.transformer("gpt2", 2, n_embd=128, n_head=2, vocab_size=1000), training._ids(2, 64)),
    "gpt2_words": Case(lambda: training.transformer("gpt2", 1, n_embd=128, n_head=2), training._ids(8, 128)),
    "bert": Case(
        lambda: training.transformer("bert", 1, hidden_size=128, num_attention_heads=2, intermediate_size=256),
        training._ids(8, 128),
    ),
}


def compiled(case: Case, precision: str, target: str) -> Any:
    """A case's training step."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        training.export(copy.deepcopy(case.build()), case.batch(), path)
        return onnxc.compile_training(path, optimizer=case.optimizer, target=target, precision=precision, cache=False)


def prepare(folder: Path, names: Sequence[str]) -> None:
    """Writes the program of each step to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        start = time.perf_counter()
        (program,) = compiled(CASES[name], PRECISION, TARGET)._programs
        program.save(folder / f"{name}.onnxc")
        size = (folder / f"{name}.onnxc").stat().st_size / 1e6
        kernels = len(program.explain().kernels)
        print(f"{name}: {kernels} kernels, {size:.1f} MB, {time.perf_counter() - start:.0f} s", flush=True)


# ---------------------------------------------------------------- time


def prepared(path: Path, batch: Sequence[Tensor]) -> tuple[CudaModel, list[Any]]:
    """A prepared step, and what it takes beside a batch: rate and step, parameters and states."""
    program = onnxc.load(path)
    assert isinstance(program, CudaModel)
    rng = np.random.default_rng(0)
    rate, step, *slots = program.get_inputs()[len(batch) :]
    assert rate.sizes == step.sizes == ()
    state = [program.put((0.02 * rng.standard_normal(t.sizes, np.float32) ** 2).astype(t.dtype.numpy)) for t in slots]
    return program, [np.float64(1e-4), np.float64(3), *state]


def ours(path: Path, batches: Sequence[Sequence[Tensor]]) -> Callable[[int], Any]:
    """What runs a prepared step with a batch."""
    program, rest = prepared(path, batches[0])
    return lambda k: program(*batches[k % SETS], *rest)


def theirs(case: Case, mode: str, batches: Sequence[Sequence[Tensor]]) -> Callable[[int], Any]:
    """PyTorch's step: autocast to bfloat16, fused optimizer."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision("high")
    module = case.build().cuda()
    optimizer = case.theirs(module, fused=True)

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return module(*batch)

    modes = {"compile": None, "graphs": "reduce-overhead"}
    run = loss if mode == "eager" else torch.compile(loss, mode=modes[mode])

    def step(k: int) -> Tensor:
        found = run(*batches[k % SETS])
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        return found

    return step


def milliseconds(step: Callable[[int], Any], seconds: float) -> float:
    """The median of single steps."""
    for k in range(SETS + 1):
        step(k)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(0)
    torch.cuda.synchronize()
    count = max(1, round(BATCH_SECONDS / (time.perf_counter() - start)))
    times, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 5:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for k in range(count):
            step(k)
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / count)
    return statistics.median(times)


def time_all(folder: Path, names: Sequence[str], engines: Sequence[str], seconds: float, out: Path | None) -> None:
    """Times the cases on all engines. One that fails says so, and the next one goes on."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        case, row = CASES[name], results.setdefault(name, {})
        torch.manual_seed(1)
        batches = [tuple(x.cuda() for x in case.batch()) for _ in range(SETS)]
        for engine in engines:
            try:
                run = ours(folder / f"{name}.onnxc", batches) if engine == "onnxc" else theirs(case, engine, batches)
                row[engine] = milliseconds(run, seconds)
                if engine == "onnxc":
                    loss = float(torch.from_dlpack(next(iter(run(0)))))
                    assert np.isfinite(loss), f"the loss is {loss}"
            except Exception as error:
                row[engine] = f"{type(error).__name__}: {str(error)[:300]}"
            torch.cuda.empty_cache()
            print(name, engine, row[engine], flush=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1))


def profile(folder: Path, names: Sequence[str]) -> None:
    """Writes for each kernel of the steps what it computes and stores, its microseconds, bytes and operations."""
    for name in names:
        torch.manual_seed(1)
        batch = [x.cuda() for x in CASES[name].batch()]
        program, rest = prepared(folder / f"{name}.onnxc", batch)
        rows = [_row(kernel) for kernel in program.profile([*batch, *rest], runs=10).kernels]
        (folder / f"{name}.json").write_text(json.dumps(rows))
        print(f"{name}: {len(rows)} kernels, {sum(r['us'] for r in rows) / 1e3:.2f} ms one by one", flush=True)
        for row in sorted(rows, key=lambda r: -r["us"])[:10]:
            print("  " + "  ".join(str(v) for v in row.values())[:160])


def _row(kernel: Kernel) -> dict[str, Any]:
    assert kernel.times is not None
    us, moved = 1e6 * kernel.times.median, int(kernel.reads) + int(kernel.writes)
    return {
        "us": round(us, 1), "function": kernel.function, "kind": kernel.kind, "megabytes": round(moved / 1e6, 2),
        "GB/s": round(moved / us / 1e3), "TFLOP/s": round(int(kernel.flops) / us / 1e6, 1),
        "stores": [b.type for b in kernel.boundaries], "label": kernel.label,
        "choice": kernel.choice.chosen if kernel.choice else "", "ops": [step.op for step in kernel.steps][:60],
    }  # fmt: skip


# ---------------------------------------------------------------- check


def check(target: str) -> bool:
    """Compares losses of small models with those of PyTorch in float32 on the CPU: whether all are right."""
    right = True
    for name, case in SMALL.items():
        torch.manual_seed(1)
        batches = [case.batch() for _ in range(CHECKED)]
        module = case.build()
        optimizer, exact = case.theirs(module), []
        for batch in batches:
            optimizer.zero_grad()
            loss = module(*batch)
            loss.backward()
            optimizer.step()
            exact.append(loss.item())
        for precision, tolerance in TOLERANCE.items():
            step = compiled(case, precision, target)
            found = [float(next(iter(step(*(x.numpy() for x in batch))))) for batch in batches]
            error = max(abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True))
            right &= error <= tolerance
            verdict = "right" if error <= tolerance else "WRONG"
            print(f"check {name} {precision}: losses differ by {error:.1e}, {verdict}", flush=True)
    return right


def main() -> None:
    """Runs what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "time", "profile", "check"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("steps"))
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--engines", default="onnxc,eager,compile,graphs")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each engine and case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target", default="cuda", help="of check")
    options = parser.parse_args()
    names = options.cases or list(CASES)
    match options.command:
        case "prepare":
            prepare(options.folder, names)
        case "time":
            time_all(options.folder, names, options.engines.split(","), options.seconds, options.out)
        case "profile":
            profile(options.folder, names)
        case "check":
            sys.exit(0 if check(options.target) else 1)


if __name__ == "__main__":
    main()
