"""What the calls of a program with inputs of one set of shapes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxc.planner.offsets import aligned
from onnxc.runtime.cuda.arrays import Array, Shape
from onnxc.runtime.cuda.graph import Replay
from onnxc.runtime.cuda.memory import BlockPool, Home, Staging, rounded
from onnxc.runtime.cuda.program import ALIGN, Flat
from onnxc.runtime.signature import Tensor


class Site:
    """All that calls with inputs of one set of shapes share."""

    def __init__(
        self, values: Mapping[str, int], flat: Flat, shapes: Sequence[Shape], tensors: Sequence[Tensor], inputs: int
    ) -> None:
        self.values, self.flat = dict(values), flat
        self.replay: Replay | None = None
        specs = list(zip(shapes, tensors, strict=True))
        self.specs = [(shape, t.dtype.numpy) for shape, t in specs]
        self.sizes = [int(np.prod(shape, dtype=np.int64)) * t.dtype.itemsize for shape, t in specs]
        self.results = [(shape, t.dtype, n) for (shape, t), n in zip(specs[inputs:], self.sizes[inputs:], strict=True)]
        self._homes: tuple[int, list[Home]] | None = None  # of the results of the last call, and its stream
        self.offsets: list[int] = []  # in the staging blocks, of inputs and then outputs
        self.staged = 0
        for nbytes in self.sizes:
            self.offsets.append(self.staged)
            self.staged += aligned(nbytes, ALIGN)
        self.views: list[Array] = []
        self.generation = -1  # of the staging blocks that the views are of

    def homes(self, pool: BlockPool, stream: int) -> list[Home]:
        """Of the results of a call on a stream."""
        if self._homes is None or self._homes[0] != stream:
            self._homes = stream, [pool.home(rounded(nbytes), stream) for *_, nbytes in self.results]
        return self._homes[1]

    def in_pinned(self, staging: Staging) -> list[Array]:
        """The inputs and outputs as arrays in pinned memory."""
        assert staging.pinned is not None
        if self.generation != staging.generation:
            raw = staging.pinned.array
            places = zip(self.offsets, self.sizes, self.specs, strict=True)
            self.views = [raw[at : at + n].view(dtype).reshape(shape) for at, n, (shape, dtype) in places]
            self.generation = staging.generation
        return self.views
