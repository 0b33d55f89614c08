"""Products of matrices by cuBLASLt, NVIDIA's library: the few functions of it that a product takes, through ctypes.

The library is looked for when a model first wants it, and a model runs without it: by its own kernels. Nothing of a
file is handed to it but numbers that were looked at (`Product.check`, `Product.fits`), of matrices that lie within
their buffers (`program.py`). Which of its algorithms multiplies, it is asked for each set of sizes, and has to show
that it takes the product; that one stays for as long as the graph that is made with it.

It is given no workspace. So each sum is made as one, by one program, and has the same bits in every run; and a product
is one kernel. (Most algorithms with a workspace use it as a counter, which is set to zero before. On an H200 that takes
as long as they gain, and a graph with such fills in it takes the host 10 us more to launch.)

Matrices have their rows one behind the other here, and their columns there. So the library is given the product of the
transposes: of what is `a` here, it hears as its second factor.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import glob
import os
import site
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnxc.errors import CudaError, OnnxcError
from onnxc.report import Kernel, Report
from onnxc.runtime.cuda.driver import Device

NAME = "cublaslt"  # what its candidates are called begins so
MAJORS: tuple[int, ...] = (13, 12)  # versions of the library whose functions these are
ABSENT = "cuBLASLt was not found: pip install nvidia-cublas (for CUDA 12: nvidia-cublas-cu12)"
_MOST_KNOWN = 1 << 12  # products whose algorithm is kept
VECTOR = 16  # bytes: algorithms ask for no more of addresses
MOST_RANK = 8  # of its suggestions
_MOST = (1 << 31) - 1  # rows, columns, sums, products of a batch
_SPREAD = (1 << 48) - 1  # elements between rows, and between matrices

EPILOGUES = {"": 1, "relu": 2, "gelu": 32}
_BIAS = 4  # with a vector that is added first
_HALVES = {"float16": 2, "bfloat16": 14}
_FLOAT32, _SUMS, _TF32 = 0, 68, 77
PRECISIONS = {"float32": _SUMS, "tf32": _TF32}
# Of matmul descriptors, layouts and preferences: cublasLtMatmulDescAttributes_t and its siblings.
_TRANSPOSED_A, _TRANSPOSED_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_COUNT, _APART = 5, 6
_MOST_BYTES, _REDUCTIONS, _ALIGNMENT = 1, 3, (5, 6, 7, 8)
_WHOLE_SUMS = 0  # CUBLASLT_REDUCTION_SCHEME_NONE: no parts of sums that are added up
_TRIED = 1 << 32  # bytes between the addresses of a product that is tried: nothing is read there


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class LibraryError(CudaError):
    """A function of the library failed."""


@dataclass(frozen=True, slots=True)
class Factor:
    """How a matrix lies: elements from row to row, and from one product of the batch to the next; `turned` where those
    of a column are neighbours, and `apart` is from column to column.
    """

    apart: int
    batch: int = 0
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """d = epilogue(a @ b + c + bias): a is [m, k], b is [k, n], c and d are [m, n], bias is [n]; `count` of them.

    Attributes:
        a, b, d: how the matrices lie; `c` too, where there is one. Rows of c and d lie one behind the other.
        bias: whether there is one, the same for all of the batch.
        epilogue: of `EPILOGUES`.
        dtype: of all of them.
        precision: of float32: of `PRECISIONS`.
        aligned: bytes that the addresses of a, b, c, d are multiples of.
    """

    m: int
    n: int
    k: int
    count: int
    a: Factor
    b: Factor
    d: Factor
    c: Factor | None = None
    bias: bool = False
    epilogue: str = ""
    dtype: str = "float16"
    precision: str = "float32"
    aligned: tuple[int, int, int, int] = (VECTOR,) * 4

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.dtype in _HALVES else 4

    def check(self) -> None:
        """ValueError where a name is none that the library has."""
        if self.dtype not in (*_HALVES, "float32") or self.epilogue not in EPILOGUES:
            raise ValueError(f"no product of {self.dtype!r} with {self.epilogue!r} behind it")
        if self.precision not in PRECISIONS:
            raise ValueError(f"no precision {self.precision!r}")

    def fits(self) -> bool:
        """Whether the library can be given such numbers."""
        sizes = (self.m, self.n, self.k, self.count)
        steps = [step for x in (self.a, self.b, self.d, self.c) if x is not None for step in (x.apart, x.batch)]
        return all(0 < size <= _MOST for size in sizes) and all(0 <= step <= _SPREAD for step in steps)

    def extents(self) -> dict[str, int]:
        """Bytes from the first to behind the last element of each matrix, and of the bias, by name."""

        def nbytes(x: Factor, lines: int, length: int) -> int:
            return ((self.count - 1) * x.batch + (lines - 1) * x.apart + length) * self.itemsize

        found = {"d": nbytes(self.d, self.m, self.n)} | ({"c": nbytes(self.c, self.m, self.n)} if self.c else {})
        for name, x, rows, columns in (("a", self.a, self.m, self.k), ("b", self.b, self.k, self.n)):
            found[name] = nbytes(x, columns, rows) if x.turned else nbytes(x, rows, columns)
        return found | ({"bias": self.n * self.itemsize} if self.bias else {})


Algorithm = bytes
"""An algorithm of the library's, as it writes one down."""


Places = Mapping[str, int]
"""Addresses of "a", "b" and "d", and of "c" and "bias" where there are any."""


class Library:
    """The library on one GPU, whose context is current in all methods.

    Args:
        functions: the loaded library.
        device: the GPU.

    Attributes:
        functions: of the library.
        lock: one product is captured at a time.
        stream: on which they are.
    """

    def __init__(self, functions: Any, device: Device) -> None:
        self.functions, self.driver = functions, device.driver
        self.lock = threading.RLock()
        self._known: dict[tuple[Product, int], Algorithm | None] = {}
        self._handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self._handle))
        self.stream = device.driver("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def call(self, name: str, *arguments: Any) -> None:
        """LibraryError where a function does not succeed."""
        status = int(getattr(self.functions, name)(*arguments))
        if status:
            raise LibraryError(f"{name}: status {status}")

    def set(self, kind: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """An attribute of a "MatmulDesc", a "MatrixLayout" or a "MatmulPreference"."""
        self.call(f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def choose(self, product: Product, rank: int = 1) -> Algorithm | None:
        """The algorithm for a product that the library suggests at a rank (or the last, if it has fewer); None where
        there is none, or where it then refuses the product.

        Its kernel is on the GPU from then on. (The library loads a kernel when it is first needed, and that waits for
        all that the GPU has been given: for ever, where that waits for the host, as under a profile's clock.)
        """
        key = (product, rank)
        with self.lock:
            if key not in self._known:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = self._chosen(product, rank)
            return self._known[key]

    def _chosen(self, product: Product, rank: int) -> Algorithm | None:
        try:
            described = Described(self, product)
            algorithm = next(reversed(self._ask(described, rank)), None)
            if algorithm is not None:
                self._try(described, algorithm)
        except CudaError:  # a capture that the library has spoilt ends with the driver's
            return None
        return algorithm

    def _ask(self, described: Described, wanted: int) -> list[Algorithm]:
        """The algorithms that the library thinks best, the fastest first."""
        results, count = (_Heuristic * wanted)(), ctypes.c_int()
        preference = ctypes.c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            second, first, *others = described.product.aligned
            numbers = {_MOST_BYTES: ctypes.c_uint64(0), _REDUCTIONS: ctypes.c_uint32(_WHOLE_SUMS)}
            numbers |= dict(zip(_ALIGNMENT, map(ctypes.c_uint32, (first, second, *others)), strict=True))
            for attribute, value in numbers.items():
                self.set("MatmulPreference", preference, attribute, value)
            self.call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, described.operation, *described.layouts, preference,
                wanted, results, ctypes.byref(count),
            )  # fmt: skip
        finally:
            self.functions.cublasLtMatmulPreferenceDestroy(preference)
        return [bytes(r.algorithm) for r in results[: count.value] if not r.state and not r.workspace]

    def _try(self, described: Described, algorithm: Algorithm) -> None:
        """Has the kernel of a product be on the GPU, without a run of it. LibraryError where the library refuses."""
        aligned = zip(("a", "b", "c", "d", "bias"), (*described.product.aligned, VECTOR), strict=True)
        places = {name: k * _TRIED + most for k, (name, most) in enumerate(aligned, 1)}
        graph = self.captured(described, algorithm, places)
        try:
            self.driver("cuGraphExecDestroy", self.driver("cuGraphInstantiate", graph, 0))
        finally:
            self.driver.attempt("cuGraphDestroy", graph)

    def run(self, described: Described, algorithm: Algorithm, places: Places, stream: Any) -> None:
        """Has a stream multiply. LibraryError where the library refuses."""
        if described.product.bias:
            self.set("MatmulDesc", described.operation, _BIAS_POINTER, ctypes.c_void_p(places["bias"]))
        a, b = described.layouts[:2]
        given = _Algorithm.from_buffer_copy(algorithm)
        c = places["c" if described.product.c is not None else "d"]
        self.call(
            "cublasLtMatmul", self._handle, described.operation, ctypes.byref(_ONE), places["b"], a, places["a"], b,
            ctypes.byref(described.beta), c, described.layouts[2], places["d"], described.layouts[3],
            ctypes.byref(given), None, 0, ctypes.c_void_p(int(stream)),
        )  # fmt: skip

    def captured(self, described: Described, algorithm: Algorithm, places: Places) -> Any:
        """A run as a graph of its own, which the caller destroys."""
        with self.lock:
            try:
                self.driver("cuStreamBeginCapture", self.stream, self.driver.module.CUstreamCaptureMode(2))  # relaxed
                self.run(described, algorithm, places, self.stream)
                return self.driver("cuStreamEndCapture", self.stream)
            except BaseException:  # Ctrl-C, too: the stream is the whole process's
                with contextlib.suppress(OnnxcError):
                    self.driver.attempt("cuGraphDestroy", self.driver("cuStreamEndCapture", self.stream))
                raise


_ONE = ctypes.c_float(1.0)


class Described:
    """A product as the library knows it: an operation, and the layouts of its factors and results."""

    def __init__(self, library: Library, p: Product) -> None:
        self._library, self.product = library, p
        self.beta = ctypes.c_float(0.0 if p.c is None else 1.0)
        self.operation = ctypes.c_void_p()
        self.layouts: list[ctypes.c_void_p] = []
        kind = _HALVES.get(p.dtype, _FLOAT32)
        compute = _SUMS if p.dtype in _HALVES else PRECISIONS[p.precision]
        library.call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), compute, _FLOAT32)
        code = EPILOGUES[p.epilogue]
        for attribute, value in (
            (_TRANSPOSED_A, int(p.b.turned)), (_TRANSPOSED_B, int(p.a.turned)),
            (_EPILOGUE, (code & ~1 | _BIAS) if p.bias else code),
        ):  # fmt: skip
            library.set("MatmulDesc", self.operation, attribute, ctypes.c_uint32(value))
        self._lies(kind, (p.k, p.n) if p.b.turned else (p.n, p.k), p.b)
        self._lies(kind, (p.m, p.k) if p.a.turned else (p.k, p.m), p.a)
        self._lies(kind, (p.n, p.m), p.d if p.c is None else p.c)
        self._lies(kind, (p.n, p.m), p.d)

    def _lies(self, kind: int, sizes: tuple[int, int], factor: Factor) -> None:
        layout, (inner, outer) = ctypes.c_void_p(), sizes
        apart = factor.apart if outer > 1 else max(factor.apart, inner)
        self._library.call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, inner, outer, apart)
        self.layouts.append(layout)
        if self.product.count > 1:
            self._library.set("MatrixLayout", layout, _COUNT, ctypes.c_int32(self.product.count))
            self._library.set("MatrixLayout", layout, _APART, ctypes.c_int64(factor.batch))

    def __del__(self) -> None:
        functions = self._library.functions
        for layout in self.layouts:
            functions.cublasLtMatrixLayoutDestroy(layout)
        if self.operation.value:
            functions.cublasLtMatmulDescDestroy(self.operation)


# ---------------------------------------------------------------- where it is


def told(report: Report, known: Library | str | None = None, instead: Collection[int] = ()) -> Report:
    """A report that says of each product which was measured to be the library's whether it is.

    Args:
        known: the library, or why there is none; None where no GPU has been asked yet.
        instead: numbers of kernels that ran for some sizes, as the library knew no way.
    """
    if not any(k.choice is not None and k.choice.chosen.startswith(NAME) for k in report.kernels):
        return report
    if known is None:
        known = ABSENT if loaded() is None else ""
    functions = known.functions if isinstance(known, Library) else loaded()
    name = f"cuBLASLt {version_of(functions)}" if isinstance(known, Library) or not known else ""

    def one(kernel: Kernel) -> Kernel:
        choice = kernel.choice
        if choice is None or not choice.chosen.startswith(NAME):
            return kernel
        some = ", but for sizes that it knows no way for" if kernel.number in instead else ""
        runs = f"by {name}{some}" if name else f"{choice.instead or 'its kernel'} runs: {known}"
        return replace(kernel, choice=replace(choice, why=f"{choice.why}; here {runs}"))

    return replace(report, kernels=tuple(one(kernel) for kernel in report.kernels))


def library(device: Device) -> Library | str:
    """The library on a GPU, whose context is current; or why there is none now: the next to ask may find one."""
    majors, why = MAJORS, ABSENT
    while (functions := loaded(majors)) is not None:
        try:
            return _begun(functions, device)
        except CudaError as error:  # of a later CUDA than the driver's, perhaps: an earlier one may be there, too
            why = f"the library does not begin: {error}" if why is ABSENT else why
            majors = tuple(major for major in majors if major != _major(functions))
    return why


_begun = functools.cache(Library)  # but not those that fail


@functools.cache
def loaded(majors: tuple[int, ...] = MAJORS) -> Any:
    """The functions of this machine's library, loaded once in a process; None where there is none of the versions."""
    for path in _paths():
        try:
            functions = ctypes.CDLL(path)
            _declare(functions)
        except (OSError, AttributeError):
            continue
        if _major(functions) in majors:
            return functions
    return None


def _major(functions: Any) -> int:
    return int(version_of(functions).split(".")[0])


def version_of(functions: Any) -> str:
    """As "13.1.0"."""
    number = int(functions.cublasLtGetVersion())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _paths() -> Iterator[str]:
    """Where it may be: what the process has loaded, NVIDIA's wheels, the library path, the toolkit's folder."""
    names = [f"libcublasLt.so.{major}" for major in MAJORS]
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split()[-1] for line in maps if "libcublasLt.so." in line}
    except OSError:
        mapped = set()
    yield from sorted(mapped)
    folders = [f"{base}/nvidia/{part}/lib" for base in _packages() for part in ("cu13", "cublas")]
    yield from (path for folder in folders for name in names if os.path.exists(path := f"{folder}/{name}"))
    yield from names
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    yield from (path for name in names for path in sorted(glob.glob(f"{toolkit}/lib64/{name}")))


def _packages() -> list[str]:
    found = dict.fromkeys([*sys.path, *site.getsitepackages(), site.getusersitepackages()])
    return [folder for folder in found if os.path.isabs(folder)]


def _declare(functions: Any) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    out, integer, wide = ctypes.POINTER(pointer), ctypes.c_int, ctypes.c_int64
    functions.cublasLtGetVersion.restype = size
    for name, types in {
        "cublasLtCreate": (out,),
        "cublasLtMatmulDescCreate": (out, integer, integer),
        "cublasLtMatmulDescDestroy": (pointer,),
        "cublasLtMatmulDescSetAttribute": (pointer, integer, pointer, size),
        "cublasLtMatrixLayoutCreate": (out, integer, ctypes.c_uint64, ctypes.c_uint64, wide),
        "cublasLtMatrixLayoutDestroy": (pointer,),
        "cublasLtMatrixLayoutSetAttribute": (pointer, integer, pointer, size),
        "cublasLtMatmulPreferenceCreate": (out,),
        "cublasLtMatmulPreferenceDestroy": (pointer,),
        "cublasLtMatmulPreferenceSetAttribute": (pointer, integer, pointer, size),
        "cublasLtMatmulAlgoGetHeuristic": (*(pointer,) * 7, integer, pointer, pointer),
        "cublasLtMatmul": (*(pointer,) * 14, size, pointer),
    }.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = types, integer
