"""What is in a model, and what the machine is: `onnxc info`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxc.errors import OnnxcError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_tensors import open_regular
from onnxc.ir.graph import Graph
from onnxc.ir.types import OptionalType, SequenceType, TensorType, Type
from onnxc.ops.registry import find
from onnxc.primitives.builder import constant_of
from onnxc.random_inputs import dim_names
from onnxc.reports.figures import size
from onnxc.roofline import Peaks
from onnxc.runtime.cache import default_root
from onnxc.runtime.cpu import (
    available_cpus,
    best_level,
    cache_bytes,
    level,
    machine,
    memory_bytes,
    model_name,
)
from onnxc.runtime.peaks import machine_peaks
from onnxc.runtime.toolchain import find_compiler
from onnxc.tuned import FILE, Record


@dataclass(frozen=True)
class OpCount:
    """An operator, how many nodes use it, and whether onnxc has it at the model's opset."""

    name: str
    version: int
    count: int
    supported: bool


@dataclass(frozen=True)
class ModelInfo:
    """A summary of an ONNX model. Shapes are text: `float32[batch, 128]`."""

    name: str
    producer: str
    opsets: dict[str, int]
    inputs: dict[str, str]
    outputs: dict[str, str]
    dims: list[str]
    ops: list[OpCount]
    weights: int
    weights_bytes: int

    @property
    def supported(self) -> bool:
        """Whether onnxc can compile all of its operators."""
        return all(op.supported for op in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can write it."""
        return {**vars(self), "ops": [vars(op) for op in self.ops], "supported": self.supported}


def model_info(model: str | os.PathLike[str]) -> ModelInfo:
    """Reads a model and lists what it holds, also where some of its ops are not supported."""
    graph = onnx_file.load(model)
    constants = [c for n in graph.all_nodes() for v in n.outputs if (c := constant_of(v)) is not None]
    declared, unranked = (graph.metadata.get(f"{side}_types", {}) for side in ("output", "input"))
    opsets = {domain or "ai.onnx": version for domain, version in graph.metadata["opsets"].items()}
    return ModelInfo(
        name=graph.name,
        producer=graph.metadata.get("producer", ""),
        opsets=opsets,
        inputs={v.name: _type(v.type, graph.dim_names, unranked.get(v.name)) for v in graph.inputs},
        outputs={name: _declared(declared.get(name)) for name in graph.output_names},
        dims=dim_names(graph),
        ops=_ops(graph),
        weights=len(constants),
        weights_bytes=sum(c.nbytes for c in constants),
    )


def _ops(graph: Graph) -> list[OpCount]:
    counts = Counter(n.op for n in graph.all_nodes() if n.op != "constant")
    rows = []
    for op, count in counts.most_common():
        domain, name, version = _operator(op, graph.metadata["opsets"])
        supported = find(domain, name, version) is not None
        rows.append(OpCount(f"{domain}.{name}" if domain else name, version, count, supported))
    return rows


def _operator(op: str, opsets: dict[str, int]) -> tuple[str, str, int]:
    """Domain, type and version of `onnx.Gelu`, `com.microsoft.FusedMatMul` or `onnx.Softmax@11`."""
    name, _, version = op.partition("@")
    domain, _, op_type = name.rpartition(".")
    domain = "" if domain == "onnx" else domain
    return domain, op_type, int(version) if version else opsets.get(domain, 1)


def _type(t: Type | None, names: dict[str, str], declared: Sequence[Any] | None = None) -> str:
    """`float32[batch, 3]`, `sequence(float32[...])`; what is declared says the dtype where the rank is open."""
    if isinstance(t, TensorType):
        return f"{t.dtype.name}[{', '.join(names.get(str(d), str(d)) for d in t.shape)}]"
    if isinstance(t, (SequenceType, OptionalType)):
        inner = _type(t.element, names, None if declared is None else declared[1])
        return f"{'sequence' if isinstance(t, SequenceType) else 'optional'}({inner})"
    return f"{declared[1]}[...]" if t is None and declared is not None else str(t or "?")


def _declared(entry: Any) -> str:
    if not entry:
        return "?"
    dtype, dims = entry
    return str(dtype) + ("[...]" if dims is None else f"[{', '.join('?' if d is None else str(d) for d in dims)}]")


@dataclass(frozen=True)
class GpuInfo:
    """A GPU: its name, its architecture (`sm_90`), the newest CUDA that its driver knows, bytes of memory."""

    name: str
    architecture: str
    cuda: str
    free: int
    memory: int

    def __str__(self) -> str:
        memory = f"{size(self.memory)}, {size(self.free)} free"
        return f"{self.name}, {self.architecture}, {memory}, driver for CUDA {self.cuda}"


@dataclass(frozen=True)
class MachineInfo:
    """What onnxc sees of the machine that it runs on. `caches` are bytes of the levels 1 to 3, 0 where unknown;
    `tuning` is the record of measurements, with how many choices were measured where.
    """

    cpu: str
    cpus: int
    level: str
    lanes: int
    caches: tuple[int, ...]
    memory: int
    compiler: str
    cache: str
    tuning: str
    peaks: tuple[Peaks, ...]
    gpus: tuple[GpuInfo, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can write it."""
        gpus = [vars(g) for g in self.gpus]
        return {**vars(self), "peaks": [p.to_dict() for p in self.peaks], "gpus": gpus}

    def lines(self) -> list[tuple[str, str]]:
        """For people: a title and a text on each line."""
        caches = ", ".join(f"L{k} {size(n)}" for k, n in enumerate(self.caches, 1) if n)
        return [
            ("cpu", f"{self.cpu}, {self.cpus} CPU{'s' if self.cpus > 1 else ''} for this process"),
            ("level", f"{self.level}, vectors of {self.lanes} float32"),
            ("memory", ", ".join(x for x in (size(self.memory), caches) if x)),
            ("compiler", self.compiler),
            ("cache", self.cache),
            ("tuning", self.tuning),
            *(("peak" if k == 0 else "", str(p)) for k, p in enumerate(self.peaks)),
            *(("gpu" if k == 0 else "", str(g)) for k, g in enumerate(self.gpus or ("none",))),
        ]


def machine_info() -> MachineInfo:
    """Describes this machine. What it can do at most is measured, the first time.

    Raises:
        ToolchainError: there is no C++ compiler.
    """
    native = level()
    counts = sorted({1, available_cpus()})
    try:
        root = str(default_root())
    except OnnxcError as error:
        root = f"none: {error}"
    return MachineInfo(
        cpu=model_name(),
        cpus=available_cpus(),
        level=best_level() if machine() in ("x86_64", "aarch64") else machine(),
        lanes=native.vector_length,
        caches=tuple(cache_bytes(k) for k in (1, 2, 3)),
        memory=memory_bytes(),
        compiler=find_compiler().version,
        cache=root,
        tuning=_tuning(root),
        peaks=tuple(machine_peaks(n, native.vector_length) for n in counts),
        gpus=tuple(_gpus()),
    )


def _tuning(root: str) -> str:
    record = Record(Path(root) / FILE)
    places = [f"{len(record.rows(where))} on {where}" for where in record.places()]
    return f"{record.path}: {'; '.join(places) or 'nothing measured'}"


def _gpus() -> Iterator[GpuInfo]:
    """The GPUs that can be used; none where the driver or its Python package is missing."""
    from onnxc.runtime.cuda.driver import device, devices

    for k in range(devices()):
        try:
            gpu = device(k)
            with gpu.current():
                free, memory = gpu.memory()
            yield GpuInfo(gpu.name, gpu.architecture, gpu.driver_version, free, memory)
        except OnnxcError:  # another process has it to itself, say
            continue


def is_saved_model(path: str | os.PathLike[str]) -> bool:
    """True for a file that `CompiledModel.save` wrote, by its first bytes or its name. Raises ModelError where there
    is no such file, or what is there is none.
    """
    path = os.fspath(path)
    with os.fdopen(open_regular(path, f"model {path!r}"), "rb") as file:
        return file.read(len(onnx_file.SAVED)) == onnx_file.SAVED or path.endswith(".onnxc")
