"""From a manifest and its sections, or from a file, to the compiled model: `open_model` and `onnxc.load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from onnxc.errors import CpuError, PackageError
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.compiled_model import CPU, CUDA, STAGED, CompiledModel, is_for_gpu
from onnxc.runtime.cpu import check_supported, machine
from onnxc.runtime.model import CpuModel
from onnxc.runtime.package import MANIFEST, Package, open_package
from onnxc.runtime.staged import StagedModel


def open_model(
    manifest: Mapping[str, Any],
    sections: Mapping[str, Buffer],
    *,
    threads: int | None = None,
    cache: Cache | None = None,
    device: int = 0,
) -> CompiledModel:
    """A model for the target that its manifest names. The arguments are those of `CompiledModel`.

    Raises:
        PackageError: this onnxc has no such target, or the manifest is of another version, or damaged.
    """
    return _class_for(manifest)(manifest, sections, threads=threads, cache=cache, device=device)


def _class_for(manifest: Mapping[str, Any]) -> type[CompiledModel]:
    target = manifest.get("target", CPU)
    if target == CPU:
        return CpuModel
    if target == STAGED and not is_for_gpu(manifest):
        return StagedModel
    if target not in (CUDA, STAGED):
        raise PackageError(f"the model was compiled for {str(target)[:40]!r}; this onnxc runs {CPU!r} and {CUDA!r}")
    from onnxc.runtime.cuda.model import CudaModel  # models of the CPU need none of its modules
    from onnxc.runtime.cuda.staged import CudaStagedModel

    return CudaModel if target == CUDA else CudaStagedModel


def load(path: str | os.PathLike[str], *, threads: int | None = None, device: int = 0) -> CompiledModel:
    """Load a model that :meth:`CompiledModel.save` wrote. No compiler is needed.

    The file holds machine code: load only what you trust. Its weights are mapped, so processes that load one
    file share them; replace the file rather than write into it.

    Args:
        path: the file.
        threads: for the CPU: the most threads of a call; default: the CPUs that this process may use.
        device: for a GPU: its number.

    Raises:
        PackageError: the file is not there, is damaged, or is of another version.
        InputError: what is given is no path.
        CpuError: this machine lacks CPU features that the model was compiled for; it names them.
        CudaError: the model was compiled for GPUs of another architecture, or there is none; it names both.
    """
    with open_package(path) as package:  # what is made of it keeps its sections
        try:
            model = _model_of(package, threads, device)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise PackageError(
                f"{package.path!r} is damaged: its manifest is none of a model ({what})", cause=error
            ) from error
    model.attach()
    return model


def _model_of(package: Package, threads: int | None, device: int) -> CompiledModel:
    manifest = package.manifest
    if not is_for_gpu(manifest):  # which is asked itself
        target = manifest.get("requires") or {}
        if target.get("machine") != machine():
            raise CpuError(
                f"{package.path!r} was compiled for {target.get('machine')}, and this machine is {machine()}"
            )
        check_supported(target.get("features", ()), repr(package.path))
    sections = {name: package.section(name) for name in package.names if name != MANIFEST}
    return open_model(manifest, sections, threads=threads, device=device)
