"""From Triton source to machine code for NVIDIA GPUs: needs Triton, and neither a GPU nor torch."""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import os
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
INSTALL = "GPU kernels are compiled by Triton: pip install 'onnxc[cuda]'"


@dataclass(frozen=True)
class Image:
    """Machine code of one kernel, and what its launch needs."""

    name: str  # of the entry
    code: bytes
    shared: int  # bytes of shared memory
    threads: int
    scratch: int  # bytes of global memory for each program


def load(source: str) -> dict[str, Any]:
    """The functions of a source. Triton reads their text again, by way of linecache."""
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
        workers: processes that compile side by side; default: one for each CPU.

    Raises:
        ToolchainError: Triton is not installed, or refuses a kernel.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ToolchainError(INSTALL, cause=error) from error
    count = min(workers or len(os.sched_getaffinity(0)), len(program.functions))
    if count <= 1 or not sys.executable:
        return compile_functions(program.source, program.functions, architecture)
    parts = [program.functions[k::count] for k in range(count)]
    found: dict[str, Image] = {}
    with ThreadPoolExecutor(count) as pool:
        for images in pool.map(lambda part: _elsewhere(program.source, part, architecture), parts):
            found |= images
    return [found[f.name] for f in program.functions]


def _elsewhere(source: str, functions: Sequence[Function], architecture: int) -> dict[str, Image]:
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
    if isinstance(answer, str):
        raise ToolchainError(answer)
    images = [Image(**{**row, "code": base64.b64decode(row["code"])}) for row in answer]
    return {f.name: image for f, image in zip(functions, images, strict=True)}


def serve() -> None:
    """Answers a request of :func:`_elsewhere` on standard input: images, or what went wrong."""
    source, functions, architecture = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Triton prints, or a library under it, is no part of the answer
    try:
        parsed = [
            Function(**{**f, "parameters": tuple(map(tuple, f["parameters"])), "loose": tuple(f["loose"])})
            for f in functions
        ]
        images = compile_functions(source, parsed, architecture)
        answer: Any = [{**asdict(i), "code": base64.b64encode(i.code).decode()} for i in images]
    except ToolchainError as error:
        answer = str(error)
    with out:
        out.write("\n" + json.dumps(answer))


def compile_functions(source: str, functions: Sequence[Function], architecture: int) -> list[Image]:
    """The machine code of some functions of a source."""
    namespace = load(source)
    return [_compiled(namespace[f.name], f, architecture) for f in functions]


def _compiled(kernel: Any, function: Function, architecture: int) -> Image:
    from triton import compile as compile_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {
        (k,): [["tt.divisibility", 16]]
        for k, (_, t) in enumerate(function.parameters)
        if t[0] == "*" and k not in function.loose
    }
    most = SHARED.get(architecture, LEAST_SHARED)
    for stages in range(function.stages, 0, -1):  # fewer where an architecture has less shared memory
        options = {"num_warps": function.warps, "num_stages": stages, "enable_fp_fusion": True,
                   "enable_reflect_ftz": False}  # fmt: skip
        try:
            source = ASTSource(kernel, dict(function.parameters), {}, aligned)
            found = compile_triton(source, target=GPUTarget("cuda", architecture, 32), options=options)
        except Exception as error:
            raise ToolchainError(f"Triton cannot compile {function.name}: {error}", cause=error) from error
        meta = found.metadata
        if meta.shared <= most:
            scratch = getattr(meta, "global_scratch_size", 0)
            return Image(meta.name, found.asm["cubin"], meta.shared, 32 * function.warps, scratch)
    raise ToolchainError(
        f"{function.name} needs {meta.shared} bytes of shared memory; sm_{architecture} has {most} for a kernel"
    )
