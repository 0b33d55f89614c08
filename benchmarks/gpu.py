"""Models and kernels on an NVIDIA GPU, beside PyTorch eager and torch.compile.

    python -m benchmarks.gpu [CASE ...] [--out results.json] [--seconds 1] [--together 9]

Each case is a PyTorch module in float16 and its export to ONNX. First the answers are compared with those of the module
in float32; then all engines are timed in turns, by events of the GPU around a batch of calls, with several sets of
inputs in rotation; the median of the batches counts. Needs a GPU, torch with CUDA, transformers, and onnxc[cuda].

Most of the time goes into exports and compilers. With `--together N`, N cases are made ready side by side, each in a
process of its own, and then timed one after the other while all others wait.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onnxc
from models.zoo import huggingface, micro
from models.zoo.detection import Yolo
from models.zoo.vision import EfficientNetB0, ResNet50, SqueezeExcite

Run = Callable[[Sequence[Tensor]], Any]
SETS = 4  # of inputs, in rotation
BATCH_SECONDS = 0.02
HOST_SECONDS = 0.2  # of calls whose time on the host is taken
READY, FOUND = "@ready", "@found "  # what a process of `--together` writes: that it may be timed, its result


def _image(batch: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 3, 224, 224),)


def _ids(batch: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(1, 1000, (batch, length)),)


def _step(batch: int) -> Tensor:
    return torch.randint(1, 1000, (batch, 1))


def _past(batch: int) -> list[Tensor]:
    """The keys and values of eight layers."""
    return [torch.randn(batch, 16, huggingface.PAST, 128) for _ in range(16)]


def _masked(batch: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(1, 1000, (batch, length)), torch.ones(batch, length, dtype=torch.long))


def _llama() -> nn.Module:
    """Eight layers of width 2048."""
    config = huggingface.hf.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=32000, max_position_embeddings=2048, **huggingface.SDPA,
    )  # fmt: skip
    return huggingface.FirstOutput(huggingface.hf.LlamaForCausalLM(config), ["input_ids"], use_cache=False)


class Timm(nn.Module):
    """A model of timm's, by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.model = timm.create_model(name, pretrained=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class DecodeStep(huggingface.DecodeStep):
    """A step of the llama above with the keys and values of some tokens before it."""

    def __init__(self) -> None:
        super().__init__(_llama().model, 8)

    def forward(self, ids: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        past = huggingface.hf.DynamicCache(config=self.model.config)
        for layer in range(self.layers):
            past.update(cache[2 * layer], cache[2 * layer + 1], layer)
        position = torch.full((1, 1), huggingface.PAST, dtype=torch.long, device=ids.device)
        out = self.model(input_ids=ids, past_key_values=past, position_ids=position, use_cache=True)
        return (out.logits, *[tensor for layer in past.layers for tensor in (layer.keys, layer.values)])


class Attention(nn.Module):
    """softmax(q k' / sqrt(d)) v."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class FilledAttention(nn.Module):
    """The same with a causal mask that replaces scores, as in models that were written before there was a function."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(length, length).tril().bool())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        return scores.masked_fill(~self.seen, float("-inf")).softmax(-1) @ v


class SoftcapAttention(nn.Module):
    """The same with scores that a tanh bounds, as Gemma 2 has them, and perhaps a window; `flex` is PyTorch's, which
    takes any function of scores.
    """

    def __init__(self, length: int, window: int | None = None, cap: float = 50.0) -> None:
        super().__init__()
        self.window, self.cap = window or length, cap
        seen = torch.ones(length, length).tril().triu(1 - self.window)
        self.register_buffer("seen", seen.bool())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        scores = self.cap * torch.tanh(scores / self.cap)
        return scores.masked_fill(~self.seen, float("-inf")).softmax(-1) @ v

    def flex(self) -> Callable[..., Tensor]:
        """By its kernel, compiled for this softcap and mask."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        cap, window, length = self.cap, self.window, self.seen.shape[0]

        def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key <= row) & (row - key < window)

        mask = create_block_mask(seen, None, None, length, length, device="cuda")
        found: Callable[..., Tensor] = torch.compile(
            lambda q, k, v: flex_attention(q, k, v, score_mod=capped, block_mask=mask)
        )
        return found


class Decode(nn.Module):
    """One query for each head, and the keys and values that layers have kept of a long text."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for keys, values in zip(k.unbind(), v.unbind(), strict=True):
            q = nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return q


class Linear(nn.Module):
    """A product with bias and GELU; `fused` is cuBLASLt's, with both in its epilogue."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x), approximate="tanh")

    def fused(self, x: Tensor) -> Tensor:
        """By one call of cuBLASLt."""
        return torch._addmm_activation(self.linear.bias, x, self.linear.weight.t(), use_gelu=True)


def _heads(length: int, depth: int) -> Callable[[], tuple[Tensor, ...]]:
    heads = 2048 // depth
    batch = max(1, 16384 // length)
    return lambda: tuple(torch.randn(batch, heads, length, depth) for _ in range(3))


def _kept(heads: int, shared: int, keys: int, layers: int = 4) -> Callable[[], tuple[Tensor, ...]]:
    kept = (layers, 1, heads, keys, 128)
    return lambda: (torch.randn(1, heads * shared, 1, 128), torch.randn(*kept), torch.randn(*kept))


@dataclass(frozen=True)
class Case:
    """A module, its inputs, and the dtype of both."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    group: str = "models"
    dtype: torch.dtype = torch.float16


def _pair(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape), torch.randn(*shape))


CASES: dict[str, Case] = {
    "resnet50_b1": Case(ResNet50, _image(1)),
    "resnet50_b32": Case(ResNet50, _image(32)),
    "mobilenetv3_b32": Case(lambda: Timm("mobilenetv3_large_100"), _image(32)),
    "convnext_b32": Case(huggingface.convnext, _image(32)),
    "bert_b1_s128": Case(huggingface.bert, _masked(1, 128)),
    "bert_b32_s512": Case(huggingface.bert, _masked(32, 512)),
    "gpt2_b8_s512": Case(huggingface.gpt2, _ids(8, 512)),
    "vit_b32": Case(huggingface.vit, _image(32)),
    "llama_b1_s512": Case(_llama, _ids(1, 512)),
    "swin_b32": Case(lambda: Timm("swin_tiny_patch4_window7_224"), _image(32), "others"),
    "effnetb0_b32": Case(EfficientNetB0, _image(32), "others"),
    "t5_b8_s512": Case(huggingface.t5, _ids(8, 512), "others"),
    "whisper_b8": Case(huggingface.whisper, lambda: (torch.randn(8, 80, 3000),), "others"),
    "yolo_b8": Case(Yolo, lambda: (torch.randn(8, 3, 640, 640),), "others"),
    **{
        f"llama_decode_b{b}": Case(DecodeStep, lambda b=b: (_step(b), *_past(b)), "others")  # type: ignore[misc]
        for b in (1, 8)
    },
    "m_gelu_ln": Case(micro.BiasGeluNorm, _pair(64, 2048, 768), "micro"),
    "m_softmax": Case(
        micro.MaskedSoftmax, lambda: (torch.randn(32, 12, 512, 512), torch.zeros(32, 1, 512, 512)), "micro"
    ),
    "m_rms_rope": Case(micro.RmsNormRope, lambda: (torch.randn(128, 512, 1024),), "micro"),
    "m_chain20": Case(micro.Chain, _pair(8192, 8192), "micro"),
    "m_cheap20": Case(micro.CheapChain, _pair(8192, 8192), "micro"),
    "m_groupnorm_silu": Case(micro.GroupNormSilu, lambda: (torch.randn(128, 192, 64, 64),), "micro"),
    "m_layernorm": Case(micro.LayerNorm, lambda: (torch.randn(128, 512, 768),), "micro"),
    "m_transpose_sum": Case(
        micro.TransposeSum, lambda: (torch.randn(128, 512, 1024), torch.randn(128, 1024, 512)), "micro"
    ),
    "m_gelu_ln_rows": Case(micro.BiasGeluNorm, _pair(4096, 16, 768), "micro"),
    "m_se": Case(lambda: SqueezeExcite(240, 10), lambda: (torch.randn(256, 240, 28, 28),), "micro"),
    **{
        f"attention_s{s}_d{d}{'_causal' * causal}": Case(lambda c=causal: Attention(c), _heads(s, d), "attention")  # type: ignore[misc]
        for s in (1024, 4096, 16384)
        for d in (64, 128)
        for causal in (False, True)
    },
    **{
        f"softcap_s{s}_d{d}{'_window' * bool(w)}": Case(partial(SoftcapAttention, s, w), _heads(s, d), "softcap")
        for s in (1024, 4096)
        for d in (128, 256)
        for w in (None, s // 4)
    },
    "attention_filled": Case(lambda: FilledAttention(1024), _heads(1024, 64), "filled"),
    **{
        f"decode_h{heads * shared}_kv{heads}_k{keys}": Case(Decode, _kept(heads, shared, keys), "decode")
        for heads, shared in ((8, 1), (8, 4), (32, 1))
        for keys in (4096, 32768)
    },
    **{
        f"linear_{n}": Case(lambda n=n: Linear(n), lambda n=n: (torch.randn(n, n),), "linear", torch.bfloat16)  # type: ignore[misc]
        for n in (4096, 6144, 8192)
    },
}


@dataclass
class Result:
    """What was found of a case: milliseconds by engine, errors, kernels."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    error: float = 0.0
    torch_error: float = 0.0
    nbytes: int = 0  # of the inputs and outputs
    kernels: int = 0
    launches: dict[str, int] = field(default_factory=dict)  # by engine, where `--count` has them counted
    compile_s: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Our time over the best of the others; 0 where one is missing."""
        others = [v for k, v in self.milliseconds.items() if k != "onnxc"]
        return self.milliseconds.get("onnxc", 0.0) / min(others) if others else 0.0

    def line(self) -> str:
        """For people."""
        times = "  ".join(f"{k} {v:.3f}" for k, v in self.milliseconds.items())
        ratio = f"{self.ratio:.2f}" if self.ratio else "-"
        rate = f"{self.nbytes / self.milliseconds['onnxc'] / 1e9:.2f} TB/s | " if "onnxc" in self.milliseconds else ""
        errors = f"error {self.error:.1e} (torch {self.torch_error:.1e})"
        host = f"host {self.host_us.get('onnxc', 0):.0f} us, compiled in {self.compile_s:.1f} s"
        failures = " ".join(f"{k}: {v}" for k, v in self.failures.items())
        launches = " (" + ", ".join(f"{k} {n}" for k, n in self.launches.items()) + ")" if self.launches else ""
        kernels = f"{self.kernels} kernels{launches}"
        return f"{self.name:20} {times} ms | / best {ratio} | {rate}{errors} | {kernels}, {host} {failures}"


def measure(
    name: str,
    case: Case,
    seconds: float,
    engines: Sequence[str],
    tuning: Mapping[str, Any],
    wait: Callable[[], None] = lambda: None,
    count: bool = False,
) -> Result:
    """Checks and times one case.

    Args:
        tuning: options of our compile.
        count: whether the kernels that each engine launches are counted.
        wait: returns when all may be timed; called once, when all engines are ready.
    """
    result = Result(name)
    torch.manual_seed(0)
    module = case.module().eval()
    torch.manual_seed(1)
    sets = [tuple(_narrow(x, case.dtype).cuda() for x in case.inputs()) for _ in range(SETS)]
    with torch.no_grad():
        exact = _first(module.float().cuda()(*(x.float() if x.is_floating_point() else x for x in sets[0]))).float()
        module = module.to(case.dtype)
        runs: dict[str, Run] = {"eager": lambda xs: module(*xs)}
        if isinstance(module, Linear):
            runs["cublaslt"] = lambda xs: module.fused(*xs)
        if isinstance(module, SoftcapAttention):
            flex = module.flex()
            runs["flex"] = lambda xs: flex(*xs)
        result.torch_error = _error(module(*sets[0]), exact)
        for engine in engines:
            try:
                runs[engine] = _engine(engine, module, sets[0], result, tuning)
            except Exception as error:
                traceback.print_exc()
                result.failures[engine] = f"{type(error).__name__}: {str(error)[:200]}"
        if "onnxc" in runs:
            result.error = _error(torch.from_dlpack(next(iter(runs["onnxc"](sets[0])))), exact)
        ends = [*sets[0], _first(module(*sets[0]))]
        result.nbytes = sum(t.numel() * t.element_size() for t in ends)
        torch.cuda.synchronize()
        wait()
        for engine, run in runs.items():
            _time(engine, run, sets, seconds, result)
        for engine, run in runs.items() if count else ():  # last: calls take longer once the profiler has run
            result.launches[engine] = _launched(run, sets[0])
    return result


def _launched(run: Run, inputs: Sequence[Tensor]) -> int:
    """The kernels of one call, those of a CUDA graph and of libraries too; without copies and fills."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    for _ in range(2):  # the first one may miss some, while the profiler starts
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run(inputs)
            torch.cuda.synchronize()
    names = [e.name for e in found.events() if e.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def _error(found: Any, exact: Tensor) -> float:
    y = _first(found).float()
    return float((y - exact).norm() / exact.norm())


def _engine(
    engine: str, module: nn.Module, example: Sequence[Tensor], result: Result, tuning: Mapping[str, Any]
) -> Run:
    if engine == "onnxc":
        model = _compiled(module, example, result, tuning)
        return lambda xs: model(*xs)
    torch._dynamo.reset()
    mode = {"compile": None, "graphs": "reduce-overhead", "max-autotune": "max-autotune"}[engine]
    compiled = torch.compile(module, mode=mode)
    for _ in range(3):
        compiled(*example)
    return lambda xs: compiled(*xs)


def _compiled(module: nn.Module, example: Sequence[Tensor], result: Result, tuning: Mapping[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(module, tuple(example), path, dynamo=True, external_data=True, verbose=False)
        start = time.perf_counter()
        model = onnxc.compile(path, target="cuda", cache=False, **tuning)
        result.compile_s = time.perf_counter() - start
    result.kernels = len(model.explain().kernels)
    return model


def _time(engine: str, run: Run, sets: Sequence[Sequence[Tensor]], seconds: float, result: Result) -> None:
    for xs in sets:
        run(xs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(sets[0])
    torch.cuda.synchronize()
    one = time.perf_counter() - start
    count = max(1, round(BATCH_SECONDS / one))
    times, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 5:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for k in range(count):
            run(sets[k % SETS])
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / count)
    result.milliseconds[engine] = statistics.median(times)
    result.host_us[engine] = statistics.median(_host(run, sets, max(1, round(HOST_SECONDS / one / 20)))) * 1e6


def _host(run: Run, sets: Sequence[Sequence[Tensor]], rounds: int) -> Iterator[float]:
    """Seconds of calls until they return; every 20 the GPU is waited for, so that no queue is full."""
    for _ in range(rounds):
        for k in range(20):
            start = time.perf_counter()
            run(sets[k % SETS])
            yield time.perf_counter() - start
        torch.cuda.synchronize()


def _one_by_one(names: Sequence[str], options: argparse.Namespace) -> Iterator[Result]:
    """The cases in this process."""
    tuning = {"mode": "max-autotune", "tune_seconds": options.tune, "record": options.record} if options.tune else {}
    for name in names:
        try:
            engines, wait = options.engines.split(","), _waiting(options)
            yield measure(name, CASES[name], options.seconds, engines, tuning, wait, options.count)
        except Exception as error:
            traceback.print_exc()
            yield Result(name, failures={"all": f"{type(error).__name__}: {str(error)[:200]}"})
        torch.cuda.empty_cache()


def _waiting(options: argparse.Namespace) -> Callable[[], None]:
    def wait() -> None:
        print(READY, flush=True)
        sys.stdin.readline()

    return wait if options.served else lambda: None


def _together(names: Sequence[str], options: argparse.Namespace) -> Iterator[Result]:
    """The cases in processes of their own: `options.together` of them are made ready at once."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--served", f"--seconds={options.seconds}"]
    command += [f"--engines={options.engines}", f"--record={options.record}"]
    command += [f"--tune={options.tune}"] if options.tune else []
    command += ["--count"] if options.count else []
    threads = max(1, (os.cpu_count() or 1) // options.together)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    for start in range(0, len(names), options.together):
        part = names[start : start + options.together]
        workers = [
            subprocess.Popen(
                [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            for name in part
        ]
        try:
            first = [_next(worker) for worker in workers]
            for name, worker, line in zip(part, workers, first, strict=True):
                yield _result(name, worker, line)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def _next(worker: subprocess.Popen[str]) -> str:
    """The next line that is meant for this process; empty where the other one ends before."""
    assert worker.stdout is not None
    return next((line for line in worker.stdout if line.startswith((READY, FOUND))), "")


def _result(name: str, worker: subprocess.Popen[str], line: str) -> Result:
    """What a process finds; if its line says that it is ready, it is let go first."""
    if line.startswith(READY):
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
        line = _next(worker)
    return Result(**json.loads(line.removeprefix(FOUND))) if line else Result(name, failures={"all": "ended early"})


def main() -> None:
    """Measures the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each engine and case")
    parser.add_argument("--engines", default="onnxc,compile,graphs")
    parser.add_argument("--count", action="store_true", help="counts the kernels that each engine launches")
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="measures candidates for so long, a case")
    parser.add_argument("--record", type=Path, default=Path("tuning.json"), help="where --tune writes what it measures")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="cases that are made ready side by side")
    parser.add_argument("--served", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    results = []
    for found in (_together if options.together > 1 else _one_by_one)(options.cases or list(CASES), options):
        if options.served:
            print(FOUND + json.dumps(vars(found)), flush=True)
            continue
        results.append(found)
        print(found.line(), flush=True)
        if options.out:
            options.out.write_text(json.dumps([vars(r) for r in results], indent=1))
    if options.served:
        return
    for group in sorted({c.group for c in CASES.values()}):
        ratios = [r.ratio for r in results if r.name in CASES and CASES[r.name].group == group and r.ratio]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{group}: {mean:.3f} of the best of torch over {len(ratios)} cases, {max(ratios):.2f} at most")


if __name__ == "__main__":
    main()
