"""The cache's entries of compiled models.

A model's key leads to its choices between kernels, and these, with what was measured of them, to the compiled model: so
what is measured of other models changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from onnxc.compiler.options import CompileOptions
from onnxc.errors import CacheError, PackageError
from onnxc.runtime.cache import Cache
from onnxc.runtime.compiled_model import WEIGHTS, CompiledModel
from onnxc.runtime.opening import open_model
from onnxc.runtime.package import MANIFEST, open_package, write_package
from onnxc.staged import Made


def open_cache(options: CompileOptions) -> Cache | None:
    """The cache that options name; None for no cache. Warns where the default cache cannot be had."""
    cache = options.cache
    if isinstance(cache, Cache):
        return cache
    if not isinstance(cache, bool):
        return Cache(cache)
    try:
        return Cache() if cache else None
    except CacheError as error:  # not asked for by name: do without
        warnings.warn(f"compiling without a cache: {error}", stacklevel=4)
        return None


def choices(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """The choices of a compiled model with their candidates, by subject."""
    found = [kernel["choice"] for kernel in manifest["kernels"] if "choice" in kernel]
    return {c["subject"]: list(c["candidates"]) for c in found if len(c["candidates"]) > 1}


def known_choices(cache: Cache, key: str) -> dict[str, list[str]] | None:
    """The choices of a model that was compiled before; None where it was not."""
    try:
        found = json.loads(cache.read(key) or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def put(cache: Cache, key: str, entry: str, made: Made) -> bool:
    """Keeps a compiled model and its choices. Whether that was possible: the disk may be full."""
    manifest, sections = made
    with contextlib.suppress(CacheError, PackageError):
        cache.put(key, json.dumps(choices(manifest)).encode())
        with cache.writing(entry) as path:
            write_package(path, manifest, sections, unhashed=[WEIGHTS])
        return True
    return False


def get(cache: Cache, entry: str, threads: int | None) -> CompiledModel | None:
    """A compiled model, its weights mapped; None where the cache has it not, or damaged."""
    path = cache.get(entry)
    if path is None:
        return None
    try:
        package = open_package(path)
        sections = {name: package.section(name) for name in package.names if name != MANIFEST}
        found = open_model(package.manifest, sections, threads=threads, cache=cache)
        found.entry = entry
        return found
    except PackageError:  # damaged, or removed a moment ago: compile again
        cache.remove(entry)
        return None
