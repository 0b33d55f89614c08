"""Compiling for NVIDIA GPUs: what `compile` does for the targets ``cuda`` and ``cuda:sm_90``.

Machine code is made by Triton on any machine, with a GPU or without; one model may hold that of several architectures.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnxc.codegen.triton.cubin import INSTALL, Image, compile_program
from onnxc.codegen.triton.options import Options, is_template
from onnxc.codegen.triton.program import VERSION, Program, ProgramWriter, encode
from onnxc.errors import InputError, ToolchainError
from onnxc.ir.graph import Graph
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions
from onnxc.planner.layout import assign
from onnxc.planner.templates import ENABLED
from onnxc.runtime import sizes

IMAGES = "cubins:"  # section of the machine code for an architecture
PRECISIONS = ("float32", "tf32", "tf32x3")
OLDEST = 75  # the oldest architecture that Triton compiles for
BOUND = 90  # from here on Triton compiles for sm_90a and the like, whose code runs on no later architecture


@dataclass(frozen=True)
class GpuTarget:
    """What a model is compiled for: compute capabilities, as 90 for sm_90, and options of its kernels."""

    architectures: tuple[int, ...]
    options: Options

    def identity(self) -> list[Any]:
        """Everything that the machine code depends on."""
        return [list(self.architectures), self.options.precision, VERSION, _triton_version()]


def parse_target(target: str, precision: str) -> GpuTarget:
    """The target that a string names: ``cuda`` (this machine's GPU), ``cuda:sm_90``, or ``cuda:sm_80,sm_90``.

    Raises:
        InputError: the string or the precision is none of these. CudaError: ``cuda``, and there is no GPU.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    name, _, rest = target.partition(":")
    found = [re.fullmatch(r"sm_(\d{2,3})", part) for part in rest.split(",")] if rest else []
    if name != "cuda" or not all(found):
        raise InputError(f"target is 'cpu', 'cuda', or 'cuda:sm_90' (several: 'cuda:sm_80,sm_90'), not {target!r}")
    numbers = tuple(sorted({int(m.group(1)) for m in found if m})) or (_capability(),)
    old = [n for n in numbers if n < OLDEST]
    if old:
        raise InputError(f"sm_{old[0]} is older than the oldest architecture that kernels can be made for, sm_{OLDEST}")
    return GpuTarget(numbers, Options(precision))


def _capability() -> int:
    from onnxc.runtime.cuda.driver import device

    major, minor = device().capability
    return int(major) * 10 + int(minor)


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolchainError(INSTALL, cause=error) from error


def generate(graph: Graph, fusion: FusionOptions, target: GpuTarget) -> Program:
    """From a graph of primitives to Triton source."""
    options = FusionOptions(fusion.vertical, fusion.epilogue, fusion.horizontal, chains=False, split=fusion.split)
    return ProgramWriter(plan(graph, assign(graph, ENABLED), options, is_template), target.options).write()


def build(program: Program, target: GpuTarget) -> tuple[dict[str, list[dict[str, Any]]], dict[str, bytes]]:
    """The machine code for each architecture: what the manifest says of it, and the sections."""
    rows: dict[str, list[dict[str, Any]]] = {}
    sections: dict[str, bytes] = {}
    for number in target.architectures:
        images = compile_program(program, number)
        name = f"sm_{number}{'a' if number >= BOUND else ''}"
        rows[name] = _rows(images)
        sections[IMAGES + name] = b"".join(image.code for image in images)
    return rows, sections


def _rows(images: Sequence[Image]) -> list[dict[str, Any]]:
    rows, at = [], 0
    for image in images:
        rows.append(
            {"name": image.name, "at": at, "size": len(image.code), "shared": image.shared, "threads": image.threads,
             "scratch": image.scratch, "cluster": 1}
        )  # fmt: skip
        at += len(image.code)
    return rows


def described(program: Program, images: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What a manifest says of the program."""
    return {"images": images, "steps": encode(program.steps, sizes.encode)}
