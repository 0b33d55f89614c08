"""From Triton source to machine code for NVIDIA GPUs: needs Triton, and neither a GPU nor torch."""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from onnxc.codegen.triton.program import Function, Program
from onnxc.errors import ToolchainError

# Bytes of shared memory that a program may have; those that are not here are taken to have the least.
LEAST_SHARED = 99 << 10
SHARED = {75: 64 << 10, 80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
DESCRIPTORS = 90  # the first architecture with units that copy a tile to shared memory, to addresses of 16 bytes
# ptxas (12.8, 12.9) has been seen to compile sums of pairs of 16-bit indices wrongly, in loops that it unrolls. LLVM
# makes such pairs of indices of which it knows that they are small.
PAIRS = re.compile(r"\b(?:add|sub|min|max|mad|mul)\.(?:lo\.)?[su]16x2\b")
GLUON = "@gluon.jit"
# So many functions are compiled in this process: another takes as long as several of them until it begins, for Triton
# reads all of itself for the key of its cache.
FEW = 3
INSTALL = "GPU kernels are compiled by Triton: pip install 'onnxc[cuda]'"


@dataclass(frozen=True)
class Image:
    """Machine code of one kernel, and what its launch needs."""

    name: str  # of the entry
    code: bytes
    shared: int  # bytes of shared memory
    threads: int
    scratch: int  # bytes of global memory for each program
    resident: int = 0  # as in `Function`


class KernelError(ToolchainError):
    """Triton refuses kernels; `functions` are their names."""

    def __init__(self, message: str, functions: Sequence[str], cause: BaseException | None = None) -> None:
        super().__init__(message, cause=cause)
        self.functions = tuple(functions)


def load(source: str, **flags: bool) -> dict[str, Any]:
    """The functions of a source. Triton reads their text again, by way of linecache.

    Flags are constants of `library.py` that are written into the text: Triton takes a function that it has compiled for
    one value for compiled, whatever the constant has become.
    """
    for flag, value in flags.items():
        source = source.replace(f"{flag} = tl.constexpr(False)", f"{flag} = tl.constexpr({value})", 1)
    name = f"<onnxc {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "onnxc_kernels"}
    exec(compile(source, name, "exec"), namespace)  # noqa: S102  (our own text: no string of a model is in it)
    return namespace


def compile_program(program: Program, architecture: int, workers: int | None = None) -> list[Image]:
    """The machine code of every function, in order.

    Args:
        program: the generated program.
        architecture: the compute capability, as 90 for sm_90.
        workers: processes that compile side by side; default: one for each CPU, and none but this for few functions.

    Raises:
        KernelError: Triton refuses kernels. ToolchainError: Triton is not installed, or died.
    """
    found = compile_each(program.source, program.functions, architecture, workers)
    failed = {f.name: image for f, image in zip(program.functions, found, strict=True) if isinstance(image, str)}
    if failed:
        raise KernelError(next(iter(failed.values())), tuple(failed))
    return [image for image in found if not isinstance(image, str)]


def compile_each(
    source: str, functions: Sequence[Function], architecture: int, workers: int | None = None
) -> list[Image | str]:
    """The machine code of some functions of a source, in order; of one that Triton refuses, its reason.

    Raises:
        ToolchainError: Triton is not installed, or died.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ToolchainError(INSTALL, cause=error) from error
    count = workers or (1 if len(functions) <= FEW else len(os.sched_getaffinity(0)))
    count = max(1, min(count, len(functions)))
    quiet = GLUON not in source  # else Triton 3.9 has complaints on standard error when the process ends
    if (count <= 1 and quiet) or not sys.executable:
        return attempt_functions(source, functions, architecture)
    parts = [functions[k::count] for k in range(count)]
    found: dict[str, Image | str] = {}
    with ThreadPoolExecutor(count) as pool:
        for images in pool.map(lambda part: _elsewhere(source, part, architecture), parts):
            found |= images
    return [found[f.name] for f in functions]


def _elsewhere(source: str, functions: Sequence[Function], architecture: int) -> dict[str, Image | str]:
    """Compiles some functions in a process of their own. (A fork could hang where other threads hold locks.)"""
    request = json.dumps([source, [asdict(f) for f in functions], architecture])
    found = subprocess.run(  # -P: what lies in the working directory is not imported
        [sys.executable, "-P", "-c", "from onnxc.codegen.triton.cubin import serve; serve()"],
        input=request, capture_output=True, encoding="utf-8", errors="replace", check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
    )  # fmt: skip
    try:
        answer = json.loads(found.stdout[found.stdout.rindex("\n") + 1 :])  # others may have printed before
    except ValueError as error:
        last = found.stderr.strip()[-2000:]
        raise ToolchainError(f"Triton ended with code {found.returncode}: {last}", cause=error) from error
    images = [a if isinstance(a, str) else Image(**{**a, "code": base64.b64decode(a["code"])}) for a in answer]
    return {f.name: image for f, image in zip(functions, images, strict=True)}


def serve() -> None:
    """Answers a request of :func:`_elsewhere` on standard input: images, or of each what went wrong."""
    source, functions, architecture = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Triton prints, or a library under it, is no part of the answer
    parsed = [
        Function(**{**f, "parameters": tuple(map(tuple, f["parameters"])), "loose": tuple(f["loose"])})
        for f in functions
    ]
    images = attempt_functions(source, parsed, architecture)
    answer = [i if isinstance(i, str) else {**asdict(i), "code": base64.b64encode(i.code).decode()} for i in images]
    with out:
        out.write("\n" + json.dumps(answer))


def attempt_functions(source: str, functions: Sequence[Function], architecture: int) -> list[Image | str]:
    """As :func:`compile_each`, in this process."""
    found: list[Image | str] = []
    compiler = _Compiler(source, architecture)
    for function in functions:
        try:
            found.append(compiler.image(function))
        except KernelError as error:
            found.append(str(error))
    return found


def _source_type(kernel: Any) -> Any:
    """What Triton calls the source of a function of its own language, or of Gluon."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _reasons(error: BaseException) -> str:
    """What an error says, and those that it comes from: in a function that is called, say."""
    found = [str(error)]
    while error.__cause__ is not None and len(found) < 8:
        error = error.__cause__
        found.append(str(error))
    return "\n".join(dict.fromkeys(found))


class _Compiler:
    """Compiles functions of a source for an architecture."""

    def __init__(self, source: str, architecture: int) -> None:
        self._source, self._architecture = source, architecture
        self._loaded: dict[tuple[bool, bool], dict[str, Any]] = {}

    def image(self, function: Function, wary: bool = False) -> Image:
        """The machine code of a function; without pairs of indices in 16 bits, if it has such."""
        from triton import compile as compile_triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget

        descriptors = self._architecture >= DESCRIPTORS and not function.loose
        aligned = {
            (k,): [["tt.divisibility", 16]]
            for k, (_, t) in enumerate(function.parameters)
            if t[0] == "*" and k not in function.loose
        }
        most = SHARED.get(self._architecture, LEAST_SHARED)
        for stages in range(function.stages, 0, -1):  # fewer where an architecture has less shared memory
            options = {"num_warps": function.warps, "num_stages": stages, "enable_fp_fusion": True,
                       "enable_reflect_ftz": False}  # fmt: skip
            try:
                kernel = self._kernel(function.name, descriptors, wary)
                if kernel.is_gluon() and not (self._architecture == DESCRIPTORS and descriptors):
                    raise ToolchainError("it is for sm_90 alone, and buffers at addresses of 16 bytes")
                source = _source_type(kernel)(kernel, dict(function.parameters), {}, aligned)
                with knobs.compilation.scope():
                    knobs.compilation.disable_line_info = True  # tables for profilers: a sixth of the time
                    found = compile_triton(source, target=GPUTarget("cuda", self._architecture, 32), options=options)
            except Exception as error:
                why = f"Triton cannot compile {function.name}: {_reasons(error)}"
                raise KernelError(why, [function.name], cause=error) from error
            if not wary and PAIRS.search(found.asm["ptx"]):
                return self.image(function, wary=True)
            meta = found.metadata
            if meta.shared <= most:
                scratch = getattr(meta, "global_scratch_size", 0)
                resident = function.resident if descriptors else 0
                return Image(meta.name, found.asm["cubin"], meta.shared, 32 * meta.num_warps, scratch, resident)
        need = f"{function.name} needs {meta.shared} bytes of shared memory"
        raise KernelError(f"{need}; sm_{self._architecture} has {most} for a kernel", [function.name])

    def _kernel(self, name: str, descriptors: bool, wary: bool) -> Any:
        key = descriptors, wary
        if key not in self._loaded:
            self._loaded[key] = load(self._source, ox_descriptors=descriptors, ox_wary=wary)
        return self._loaded[key][name]
