"""What a compile is to make: options, read for this machine and with what was measured on it; and the cache keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from onnxc.choices import Decisions
from onnxc.codegen.cpp.program import VERSION
from onnxc.compiler.options import CompileOptions
from onnxc.fingerprint import Fingerprint, code_digest
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.compiled_model import SCHEMA
from onnxc.runtime.cpu import Level, available_cpus, level
from onnxc.runtime.library import ABI
from onnxc.runtime.toolchain import find_compiler
from onnxc.tuned import Record, cpu_place

if TYPE_CHECKING:
    from onnxc import gpu

Measured = Mapping[int, Decisions]
"""What was measured, by architecture; 0 is the CPU."""


@dataclass(frozen=True)
class Request:
    """What a compile is to make, apart from the model itself.

    Attributes:
        options: what was asked for.
        cpu, gpu: the target; no GPU for the CPU.
        measured: what decides between kernels.
        careful: as of `decompose`.
    """

    options: CompileOptions
    cpu: Level
    gpu: gpu.GpuTarget | None = None
    measured: Measured = field(default_factory=dict)
    careful: bool = False

    @staticmethod
    def of(options: CompileOptions) -> Request:
        """What options ask for. Raises InputError for a target that there is not."""
        return Request(options, level(options.cpu), _gpu_target(options) if options.on_gpu else None)

    def key(self, model: Fingerprint, cache: Cache) -> str:
        """The cache key, without what was measured."""
        asked = self.options
        options = [
            {name: list(shape) for name, shape in (asked.input_shapes or {}).items()},
            sorted(asked.keep_inputs),
            asked.memory_limit or 0,
            self.careful,
            asdict(asked.fusion_options),
            asdict(asked.passes),
            asdict(asked.kernels),
        ]
        if self.gpu is not None:
            return digest("gpu", model.digest, options, self.gpu.identity(), [code_digest(), SCHEMA])
        cpu = self.cpu
        target = [cpu.name, cpu.machine, cpu.flags, cpu.vector_length, sorted(cpu.features)]
        tools = [find_compiler(cache).identity, code_digest(), VERSION, SCHEMA, ABI]
        return digest("model", model.digest, options, target, tools)

    def decided(self, key: str, subjects: Mapping[str, Sequence[str]]) -> str:
        """The cache key with that part of what was measured that decides anything in the model."""
        found = {n: {s: known for s in subjects if (known := d.deciding(s))} for n, d in self.measured.items()}
        return digest("decided", key, found)

    # ------------------------------------------------------------ what was measured

    def place(self) -> str:
        """How a record calls where this is measured."""
        if self.gpu is None:
            return cpu_place(self.cpu, self.options.threads or available_cpus())
        from onnxc import gpu

        return gpu.local_place(gpu.local_architecture(self.gpu))

    def decisions(self, record: Record | None) -> Measured:
        """What decides between kernels: what a record says, or what the options say."""
        given = self.options.tuned
        numbers = self.gpu.architectures if self.gpu is not None else (0,)
        if not isinstance(given, bool):
            return dict.fromkeys(numbers, Decisions(given, "another occasion", "nothing was given"))
        if not given:
            return dict.fromkeys(numbers, Decisions(missing="tuned=False"))
        if self.gpu is not None:
            from onnxc import gpu

            return gpu.decisions(record, self.gpu)
        return {0: Decisions(record.best(self.place()) if record is not None else {})}


def _gpu_target(options: CompileOptions) -> gpu.GpuTarget:
    from onnxc import gpu  # it imports the means to run Triton, which the CPU does not need

    return gpu.parse_target(options.target, options.precision)
