"""The CUDA driver, through cuda-bindings: every return code is looked at, and each failure says what to do.

    gpu = device(0)                          # one object for each GPU of the machine
    with gpu.current():                      # its primary context, which torch, CuPy and JAX use too
        address = gpu.allocate(1 << 20)
        gpu.driver("cuMemsetD8Async", address, 0, 1 << 20, 0)

cuda-bindings is imported at the first use of a GPU, and nowhere else.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from onnxc.errors import CudaError, LimitError
from onnxc.runtime.cuda.memory import BlockPool

_INSTALL = "pip install 'onnxc[cuda]'"
_UPDATE = "update the NVIDIA driver (nvidia-smi shows its version)"
_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no GPU of that number: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": "a forked process cannot use the GPU of its parent: start it with 'spawn'",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's library and its kernel module differ: restart the machine",
    "CUDA_ERROR_STUB_LIBRARY": "the libcuda that was found is a stub: put the driver's before it in the library path",
    "CUDA_ERROR_INVALID_IMAGE": f"a kernel's machine code was refused: {_UPDATE}, or compile the model again",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the model has no machine code for this GPU: compile it for this architecture",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _UPDATE,
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel left its buffers; the GPU's state is lost: please report it",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used a misaligned address; the GPU's state is lost: please report it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is faulty",
    "CUDA_ERROR_DEVICES_UNAVAILABLE": "another process uses the GPU alone (its compute mode)",
}
_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
NOT_READY, INVALID_VALUE = "CUDA_ERROR_NOT_READY", "CUDA_ERROR_INVALID_VALUE"
_IDLE_SHARE = 8  # the part of a GPU's memory that freed results may keep


class DriverError(CudaError):
    """A call of the driver failed; `code` is the name of the driver's result."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """The functions of the driver. ``driver("cuMemAlloc", n)`` returns what it gives, or raises.

    Args:
        module: ``cuda.bindings.driver``, or what a test puts in its place.

    Attributes:
        module: it, for its types.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._success = module.CUresult.CUDA_SUCCESS

    def __call__(self, function: str, *arguments: Any) -> Any:
        try:
            found = getattr(self.module, function)(*arguments)
        except RuntimeError as error:  # cuda-bindings looks the driver's library and its functions up at a call
            raise CudaError(f"{function} cannot be called ({error}): {self._absent(error)}", cause=error) from error
        if found[0] is not self._success:
            raise self._failure(function, found[0])
        if len(found) == 2:
            return found[1]
        return found[1:] or None

    def function(self, name: str) -> Callable[..., None]:
        """A function that gives nothing, for many calls: ``driver.function("cuGraphLaunch")(executable, stream)``."""
        module, success = self.module, self._success

        def call(*arguments: Any) -> None:
            found = getattr(module, name)(*arguments)
            if found[0] is not success:
                raise self._failure(name, found[0])

        return call

    @staticmethod
    def _absent(error: RuntimeError) -> str:
        if str(error).startswith("Function"):  # it is there, and too old to have it
            return _UPDATE
        return "the NVIDIA driver (libcuda.so.1) is not installed, or not in the library path"

    def _failure(self, function: str, code: Any) -> CudaError | LimitError:
        name = str(getattr(code, "name", code))
        text = self._text(code)
        if name == _MEMORY:
            return LimitError(f"the GPU is out of memory ({function}: {text})")
        advice = _ADVICE.get(name)
        return DriverError(f"{function}: {name} ({text})" + (f": {advice}" if advice else ""), name)

    def _text(self, code: Any) -> str:
        try:
            error, text = self.module.cuGetErrorString(code)
        except RuntimeError:
            return "no description"
        known = error is self._success and text
        return (text.decode(errors="replace") if isinstance(text, bytes) else str(text)) if known else "no description"

    def is_ready(self, query: str, *arguments: Any) -> bool:
        """What a query of the driver (``cuEventQuery``, ``cuStreamQuery``) answers."""
        try:
            self(query, *arguments)
        except DriverError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def attempt(self, function: str, *arguments: Any) -> None:
        """A call whose failure does not matter: when something is freed, the process may be at its end."""
        try:
            getattr(self.module, function)(*arguments)
        except Exception:
            pass


@functools.cache
def load_driver() -> Driver:
    """The driver of this machine.

    Raises:
        CudaError: cuda-bindings or the NVIDIA driver is missing or too old.
    """
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaError(f"a GPU needs the package cuda-bindings: {_INSTALL}", cause=error) from error
    driver = Driver(module)
    driver("cuInit", 0)
    return driver


def devices() -> int:
    """How many GPUs this process sees; 0 where there is no driver, no package or no GPU."""
    try:
        return int(load_driver()("cuDeviceGetCount"))
    except (CudaError, LimitError):
        return 0


class Device:
    """One GPU, through its primary context. Use :func:`device`.

    Attributes:
        driver: its driver.
        ordinal: its number.
        name: as NVIDIA calls it.
        capability: (9, 0) for sm_90.
        multiprocessors: how many it has.
        context: the primary context, which is kept to the end of the process.
        streams: those of models that are gone, for the next ones. None is ever destroyed: arrays that a model has made
            name its stream, and may be used when the model is gone.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        handle = driver("cuDeviceGet", ordinal)
        self._handle = handle
        self.name = driver("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(errors="replace")
        self.capability = (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR"))
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.context = driver("cuDevicePrimaryCtxRetain", handle)
        self._context = int(self.context)
        self.streams: list[Any] = []
        with self.current():
            self.pool = BlockPool(self, self.memory()[1] // _IDLE_SHARE)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver("cuDeviceGetAttribute", attribute, self._handle))

    @property
    def architecture(self) -> str:
        """As ``sm_90``."""
        return "sm_{}{}".format(*self.capability)

    @property
    def driver_version(self) -> str:
        """The newest CUDA that the driver knows: ``13.0``."""
        version = int(self.driver("cuDriverGetVersion"))
        return f"{version // 1000}.{version % 1000 // 10}"

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"

    def current(self) -> _Current:
        """A block of code for which this GPU's context is the thread's. (Another library may have set another.)"""
        return _Current(self)

    # ------------------------------------------------------------ memory

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all."""
        free, total = self.driver("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """The address of new memory (at least 256 bytes aligned). The context is current.

        Raises:
            LimitError: there is not so much, even without what pools keep.
        """
        for last in (False, True):
            try:
                return int(self.driver("cuMemAlloc", max(1, nbytes)))
            except LimitError:
                if last:
                    raise self._exhausted(nbytes) from None
                self.pool.clear()
        raise AssertionError

    def _exhausted(self, nbytes: int) -> LimitError:
        try:
            free, total = self.memory()
        except (CudaError, LimitError):
            free = total = 0
        return LimitError(
            f"{self} has no memory for {nbytes} bytes: {free} of {total} are free. Smaller inputs need less; "
            "other processes' use is in nvidia-smi"
        )

    def free(self, address: int) -> None:
        """Frees memory, after all work that the GPU has been given. Never fails."""
        try:
            with self.current():
                self.driver.attempt("cuMemFree", address)
        except (CudaError, LimitError):  # the process ends, or the GPU is lost
            pass

    def upload(self, to: int, source: Any) -> None:
        """Copies a buffer of bytes to the GPU, and waits for it. The context is current."""
        nbytes = memoryview(source).nbytes
        if nbytes:
            self.driver("cuMemcpyHtoD", to, source, nbytes)  # has taken the bytes; perhaps they are not there yet
            self.driver("cuStreamSynchronize", self.driver.module.CUstream(0))


class _Current:
    """Makes a context current where it is not, and puts the other one back at the end."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        device = self._device
        if int(device.driver("cuCtxGetCurrent")) != device._context:
            device.driver("cuCtxPushCurrent", device.context)
            self._pushed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            self._device.driver.attempt("cuCtxPopCurrent")


_lock = threading.Lock()
_devices: dict[int, Device] = {}


def device(ordinal: int = 0) -> Device:
    """The GPU of this number.

    Raises:
        CudaError: there is none, or no driver.
    """
    with _lock:
        if ordinal not in _devices:
            driver = load_driver()
            count = int(driver("cuDeviceGetCount"))
            if not 0 <= ordinal < count:
                raise CudaError(f"there is no GPU {ordinal}: this process sees {count or 'none'}")
            _devices[ordinal] = Device(driver, ordinal)
        return _devices[ordinal]
