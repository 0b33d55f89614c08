"""What a compiled model computes inside: the same plan, compiled with taps (`onnxc.planner.taps`).

    program = TappedProgram(model, CompileOptions())
    program.names                                  # of the tensors that can be shown
    program.run(inputs, ["h1", "h2"])              # {"h1": array, ...}

Beside a model that is in the cache, programs with taps are kept there too. Its weights serve them as well, where they
are the same bytes: then neither the disk nor memory has them twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from onnxc.codegen.cpp.program import Program
from onnxc.compiler.options import CompileOptions
from onnxc.compiler.stages import constants, weights_block
from onnxc.errors import CacheError, PackageError, UnsupportedError
from onnxc.frontends.onnx_file import Model
from onnxc.ir.dtypes import BY_NAME
from onnxc.ir.graph import Graph
from onnxc.runtime.cache import Buffer, Cache, digest
from onnxc.runtime.compiled_model import WEIGHTS, CompiledModel
from onnxc.runtime.mapped import forget, forgetting
from onnxc.runtime.model import CpuModel
from onnxc.runtime.opening import open_model
from onnxc.runtime.package import MANIFEST, open_package, write_package
from onnxc.runtime.signature import Signature, Tensor
from onnxc.runtime.sizes import Size, evaluate
from onnxc.tools.compare.taps import TappedPlans

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
OWN_BYTES = 1 << 26  # of weights that are kept for a program with taps alone


class TappedProgram:
    """A model, compiled for the CPU as `onnxc.compile` does it, that shows tensors inside of it.

    Args:
        plain: the same model, compiled with the same options: what its cache entry and its weights can be used for.

    Attributes:
        names: each tensor that can be shown, with how ("stored" or "inside"; see `onnxc.planner.taps.Tap`).
        types: the model's own dtypes of those that come in another one.

    Raises UnsupportedError for models of several programs, and for GPUs.
    """

    def __init__(
        self, model: Model | Graph, options: CompileOptions, cache: Cache | None = None,
        plain: CompiledModel | None = None,
    ) -> None:  # fmt: skip
        if options.target != "cpu":
            raise UnsupportedError("taps inside of kernels are for target='cpu'")
        self.model, self.options, self.cache = model, options, cache or _own_cache(options)
        self.plain = plain if isinstance(plain, CpuModel) else None
        # What was compiled under this key decides all but which tensors are shown.
        self._key = self.plain.entry if self.plain is not None and self.cache is not None else ""
        known = self._known()
        self.aliases: dict[str, str] = known["aliases"]
        self.names: dict[str, str] = dict(known["names"])
        self.names |= {name: self.names[to] for name, to in self.aliases.items() if to in self.names}
        self._sizes: dict[str, Size] = known["sizes"]
        own = {name: BY_NAME[dtype].numpy for name, dtype in known["types"].items()}
        self.types = own | {name: own[to] for name, to in self.aliases.items() if to in own}
        self._inputs = Signature([Tensor.from_json(row) for row in known["inputs"]], ())

    @cached_property
    def plans(self) -> TappedPlans:
        """The model's plan, with taps."""
        return TappedPlans(self.model, self.options, self.cache)

    def _known(self) -> dict[str, Any]:
        """What there is to be shown, from the cache if it is there."""
        if not self._key or self.cache is None:
            return self.plans.described()
        key = digest("taps", self._key)
        with contextlib.suppress(ValueError):
            found = json.loads(self.cache.read(key) or b"null")
            if isinstance(found, dict):
                return found
        described = self.plans.described()
        with contextlib.suppress(CacheError):  # the disk is full
            self.cache.put(key, json.dumps(described).encode())
        return described

    def nbytes(self, name: str, given: Arrays) -> int:
        """How large a tensor is, with these inputs."""
        size = self._sizes[self.aliases.get(name, name)]
        return size if isinstance(size, int) else evaluate(size, _values(self._inputs, given))

    def run(self, given: Arrays, wanted: Sequence[str]) -> tuple[list[Array], dict[str, Array]]:
        """The model's outputs, and the tensors that are wanted (of `names`)."""
        own = sorted({self.aliases.get(name, name) for name in wanted})
        program = self._stored(own) or self._made(own)
        results = list(program(*given.values()).values())
        values = _values(program._signature, given)
        rows = program.manifest["taps"]["shown"]
        shown = {name: _cut(results[k], order, start, shape, values) for name, k, order, start, shape in rows}
        count = len(results) - program.manifest["taps"]["outputs"]
        return results[:count], {name: shown[self.aliases.get(name, name)] for name in wanted}

    def rest(self) -> None:
        """Lets the pages of mapped weights go."""
        if self.plain is not None:
            forget([self.plain.weights])

    # ------------------------------------------------------------ the cache

    def _place(self, own: Sequence[str]) -> str:
        return digest("tapped program", self._key, list(own))

    def _stored(self, own: Sequence[str]) -> CompiledModel | None:
        """The cache's program that shows these tensors; None where it has none that fits."""
        path = self.cache.get(self._place(own)) if self._key and self.cache is not None else None
        if path is None or self.plain is None:
            return None
        try:
            package = open_package(path)
            sections: dict[str, Any] = {name: package.section(name) for name in package.names if name != MANIFEST}
            if WEIGHTS not in sections:
                if package.manifest.get("weights_of") != self._identity():
                    return None
                sections[WEIGHTS] = self.plain.weights.data
            return open_model(package.manifest, sections, threads=self.options.threads, cache=self.cache)
        except PackageError:  # damaged, or removed a moment ago
            return None

    def _made(self, own: Sequence[str]) -> CompiledModel:
        """The program that shows these tensors, now in the cache where its weights need no place of their own."""
        manifest, sections, program = self.plans.made(own)
        kept: dict[str, Buffer] = dict(sections)
        if self._shares(program):
            assert self.plain is not None
            manifest["weights_of"] = self._identity()
            sections[WEIGHTS] = self.plain.weights.data
        else:
            kept[WEIGHTS] = sections[WEIGHTS] = weights_block(program, self.plans.graph).data
        if self._key and self.cache is not None and len(kept.get(WEIGHTS, b"")) <= OWN_BYTES:
            with contextlib.suppress(CacheError, PackageError), self.cache.writing(self._place(own)) as path:
                write_package(path, manifest, kept, unhashed=[WEIGHTS])
        return open_model(manifest, sections, threads=self.options.threads, cache=self.cache)

    def _shares(self, program: Program) -> bool:
        """Whether the compiled model's weights are those of a program with taps."""
        if self.plain is None:
            return False
        block = self.plain.weights
        return program.weights.matches(block, forgetting([block, *constants(self.plans.graph)]))

    def _identity(self) -> list[Any]:
        """What tells the compiled model's weights from others: their bytes follow from the model and its program."""
        assert self.plain is not None
        return [self.plain.weights.nbytes, sha256(self.plain.source.encode()).hexdigest()]


def _own_cache(options: CompileOptions) -> Cache | None:
    cache = options.cache
    if isinstance(cache, Cache):
        return cache
    try:
        return Cache(None if cache is True else cache) if cache else None
    except CacheError:
        return None


def _values(signature: Signature, given: Arrays) -> dict[str, int]:
    """The sizes of open dims."""
    return signature.solve([np.shape(a) for a in given.values()])


def _cut(
    buffer: Array, order: Sequence[int], start: Sequence[Size] | None, shape: Sequence[Size], values: Mapping[str, int]
) -> Array:
    """A tensor, in its own shape, out of the buffer that it lies in: a part of it from `start` on, or all of it."""
    sizes = [evaluate(d, values) for d in shape]
    if start is None:
        return buffer.reshape(sizes)
    whole = buffer if not order else buffer.transpose(np.argsort(order))
    begins = [evaluate(d, values) for d in start]
    return whole[tuple(slice(a, a + n) for a, n in zip(begins, sizes, strict=True))]
