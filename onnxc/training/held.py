"""Where a training keeps its state: arrays of numpy on the CPU, arrays that stay on the GPU otherwise.

A step on a GPU returns before its work is done. Its outputs are copied from the GPU when somebody looks at them, and
parameters when somebody asks for them; what the next step reads never leaves the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from onnxc.runtime.compiled_model import CompiledModel, Outputs
from onnxc.runtime.cuda.arrays import DeviceArray
from onnxc.runtime.cuda.model import CudaModel

Array = np.ndarray[Any, Any]
Read = Callable[[DeviceArray], Array]


def on_gpu(program: CompiledModel, values: Sequence[Any]) -> list[Any]:
    """Values as a program wants them: for a GPU's, those of numpy are put there."""
    if not isinstance(program, CudaModel):
        return list(values)
    return [program.put(v) if isinstance(v, np.ndarray) else v for v in values]


def wait_for(programs: Sequence[CompiledModel]) -> None:
    """Waits for the work of all programs on a GPU, since what one of them has written may follow from what another one
    has found wrong. Raises RunError for that.
    """
    for program in programs:
        if isinstance(program, CudaModel):
            program.synchronize()


def is_asked_from_host(program: CompiledModel, batch: Sequence[Any]) -> bool:
    """Whether a GPU's program is called with arrays of the host's alone, and so answers with such."""
    return isinstance(program, CudaModel) and not any(program.holds(x) for x in batch)


class HostOutputs(Outputs):
    """Outputs on a GPU as arrays of numpy, each copied when it is first asked for.

    Args:
        found: those of the program.
        read: makes a copy in the host's memory.
    """

    __slots__ = ()

    def __init__(self, found: Outputs, read: Read) -> None:
        super().__init__(found.keys(), _Copied(found.values(), read))  # type: ignore[arg-type]

    def values(self) -> tuple[Any, ...]:
        return tuple(self._arrays)


class _Copied(Sequence[Any]):
    """As a tuple of the copies."""

    def __init__(self, arrays: Sequence[DeviceArray], read: Read) -> None:
        self._arrays: list[Any] = list(arrays)
        self._read = read

    @overload
    def __getitem__(self, k: int) -> Any: ...
    @overload
    def __getitem__(self, k: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, k: int | slice) -> Any:
        if isinstance(k, slice):
            return tuple(self[n] for n in range(*k.indices(len(self))))
        if isinstance(self._arrays[k], DeviceArray):
            self._arrays[k] = self._read(self._arrays[k])
        return self._arrays[k]

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self)))
