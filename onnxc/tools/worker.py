"""The process in which one engine is measured: it holds one session, and does as it is told over pipes.

Commands come as lines of JSON on standard input, and each is answered by a line of JSON (`onnxc.tools.messages`). Only
the process that was asked last is at work, so engines that take turns never share the cores:

    {"do": "import", "engine": "onnxc"}  ->  {"seconds": 0.3, "version": "0.1.0"}
    {"do": "load", "engine": "onnxc", "model": "m.onnx", "threads": 2, "inputs": "i.npz"}  ->  {"seconds": 1}
    {"do": "measure", "seconds": 0.1, "least": 3}  ->  {"times": [...]}
    {"do": "profile", "runs": 10}  ->  {"profile": {...}}
    {"do": "memory"}  ->  {"rss": ..., "pss": ..., "private": ...}
    {"do": "quit"}

What libraries print goes to standard error. Functions import what they need: the process has no library in it but
those of the engine that it measures.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from onnxc.tools.messages import serve_pipes
from onnxc.tools.paths import readable

Run = Callable[[], object]
Command = dict[str, Any]


class _State:
    run: Run

    def do_import(self, engine: str) -> Command:
        """Imports what an engine needs; seconds that it took."""
        start = time.perf_counter()
        import_module(engine)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "version": _version(engine)}

    def do_load(
        self, engine: str, model: str, threads: int, inputs: str, input_shapes: Any = None, options: Any = None
    ) -> Command:
        """Makes the session and runs it once. `seconds` is the session alone, with no import or run."""
        import numpy as np  # so that import times can be measured here too

        import_module(engine)
        _prepare(engine)
        with np.load(inputs) as stored:
            arrays = [stored[f"i{k}"] for k in range(len(stored.files))]
        start = time.perf_counter()
        self.session = _ENGINES[engine](model, threads, input_shapes, **(options or {}))
        seconds = time.perf_counter() - start
        takes = self.session.get_inputs()
        self.feed = feed = {i.name: _given(a, getattr(i, "type", "")) for i, a in zip(takes, arrays, strict=True)}
        session = self.session
        self.run = lambda: session.run(None, feed)
        start = time.perf_counter()
        self.run()
        return {"seconds": seconds, "first_run": time.perf_counter() - start, "version": _version(engine)}

    def do_measure(self, seconds: float, least: int = 1, most: int = 100_000) -> Command:
        """Runs until the seconds are over, at least `least` times; each run's own time."""
        times: list[float] = []
        clock, run = time.perf_counter, self.run
        end = clock() + seconds
        now = clock()
        while (now < end or len(times) < least) and len(times) < most:
            run()
            then = clock()
            times.append(then - now)
            now = then
        return {"times": times}

    def do_profile(self, runs: int) -> Command:
        """Times of each kernel, and its limits (onnxc only)."""
        profile = self.session.profile(self.feed, runs=runs).profile
        return {"profile": profile.to_dict()}

    def do_memory(self) -> Command:
        """Bytes that this process holds (Linux): resident, proportional (shared pages divided), private."""
        gc.collect()
        found: dict[str, int] = {}
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                key, _, rest = line.partition(":")
                if rest.strip().endswith("kB"):
                    found[key] = int(rest.split()[0]) * 1024
        private = found["Private_Clean"] + found["Private_Dirty"]
        return {"rss": found["Rss"], "pss": found["Pss"], "private": private, "anonymous": found["Anonymous"]}


def _given(array: Any, kind: str) -> Any:
    """As `tensor(string)` or `tensor(bfloat16)` wants it: a file has texts of one length, and numpy's own numbers."""
    if array.dtype.kind == "U":
        return array.astype(object)
    name = kind.removeprefix("tensor(").removesuffix(")")
    if not name.startswith(("bfloat16", "float8", "float4", "int4", "uint4", "int2", "uint2")):
        return array
    from onnxc.ir.dtypes import BY_NAME
    from onnxc.tools.inputs import as_declared

    return as_declared(array, BY_NAME[name].numpy)


def _prepare(engine: str) -> None:
    """Imports that the first session would do."""
    if engine == "onnxc":
        import_module("onnxc.compiler")


def _onnxc(model: str, threads: int, input_shapes: Any, **options: Any) -> Any:
    if model.endswith(".onnxc"):
        from onnxc.runtime.opening import load

        return load(model, threads=threads)
    from onnxc.compiler import compile as compile_model

    return compile_model(model, threads=threads, input_shapes=input_shapes, **options)


def _onnxruntime(model: str, threads: int, input_shapes: Any, **options: Any) -> Any:
    """All optimizations, which is its default."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(readable(model), settings, providers=["CPUExecutionProvider"])


class _OpenVino:
    """OpenVINO's compiled model, in the shape of an onnxruntime session.

    Results stay in its own memory, inputs are not copied, and f32 stays f32: on processors with bf16
    instructions it would compute in bf16 by default, which is another model's speed.
    """

    def __init__(self, model: str, threads: int, input_shapes: Any) -> None:
        import openvino

        core = openvino.Core()
        network = core.read_model(model)
        if input_shapes:
            network.reshape({name: openvino.PartialShape(_shape(dims)) for name, dims in input_shapes.items()})
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._compiled = core.compile_model(network, "CPU", settings)
        self._request = self._compiled.create_infer_request()

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=port.get_any_name()) for port in self._compiled.inputs]

    def run(self, names: None, feed: Any) -> Any:
        return self._request.infer(feed, share_inputs=True, share_outputs=True)


def _shape(dims: Any) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in dims]


def _openvino(model: str, threads: int, input_shapes: Any, **options: Any) -> Any:
    return _OpenVino(model, threads, input_shapes)


_ENGINES: dict[str, Callable[..., Any]] = {
    "onnxc": _onnxc,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
ENGINES = tuple(_ENGINES)


def _version(engine: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(engine)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(engine), "__version__", "unknown"))


def main() -> None:
    """Answers commands on standard input."""
    serve_pipes(_State)


if __name__ == "__main__":
    main()
