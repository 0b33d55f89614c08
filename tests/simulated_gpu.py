"""A GPU that is not there: the driver in memory of `tests.fake_cuda`, whose kernels Triton's interpreter runs.

What `tests.triton_simulator` does for single programs, with all of the runtime in between: manifests, graphs, staging,
streams, error words. Needs ``TRITON_INTERPRET=1`` from the start of the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from onnxc import gpu
from onnxc.codegen.triton.cubin import Image
from onnxc.codegen.triton.program import Program
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda.driver import Driver
from tests.fake_cuda import FakeDriver, cubin
from tests.triton_simulator import Interpreter, Memory, waits


class _Allocations(Memory):
    """The buffers that kernels may touch: those of the driver."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()
        spans = driver.spans()
        self.starts, self.ends = [a for a, _ in spans], [a + n for a, n in spans]


class SimulatedGpu:
    """The driver, and the interpreter behind it."""

    def __init__(self, interpreter: Interpreter | None = None) -> None:
        """Of a process there can be one interpreter, which changes Triton's for good."""
        self._driver = FakeDriver(memory=1 << 36)
        self._interpreter = interpreter or Interpreter()
        self._numbers = itertools.count()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """In the place of the driver, and of Triton's compiler."""
        patch.setattr(driver_module, "load_driver", lambda: Driver(self._driver))
        patch.setattr(driver_module, "_devices", {})
        patch.setattr(gpu, "compile_program", self._compile)

    def _compile(self, program: Program, architecture: int) -> list[Image]:
        """As `compile_program`; the machine code is the name of a kernel that the driver knows from here on."""
        functions = self._interpreter.functions(program, descriptors=False)
        images = []
        for function in program.functions:
            name = f"kernel{next(self._numbers)}"
            types = [t for _, t in function.parameters]
            self._driver.kernels[name] = (
                len(types) + 2,
                self._kernel(functions[function.name], types, waits(program.kernels[function.name])),
            )
            images.append(Image(name, cubin(name), 0, 32 * function.warps, 0))
        return images

    def _kernel(self, function: Callable[..., None], types: list[str], waits: bool) -> Callable[..., None]:
        def run(driver: FakeDriver, grid: tuple[int, int, int], words: list[int]) -> None:
            interpreter = self._interpreter
            interpreter.memory = _Allocations(driver)
            with np.errstate(all="ignore"):
                interpreter.launch(function, types, words[: len(types)], grid[0], waits)

        return run
