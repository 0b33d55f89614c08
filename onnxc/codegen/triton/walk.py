"""The direction in which the programs of a kernel go through large buffers.

What a kernel has read or written last is in the L2 cache when the next one begins. Of a buffer that is larger than the
cache the next one finds it there only if it begins at that end: so it goes the other way.
"""

from __future__ import annotations

from onnxc.codegen.triton.kernel import Kernel

LARGE = 32 << 20  # bytes of a buffer that the cache does not hold beside others
EITHER = ("loops", "matmul", "conv")  # kernels with no order of their own (attention begins with the longest rows)


class Walks:
    """The kernels of a program, in the order in which they run."""

    def __init__(self) -> None:
        self._large: set[object] = set()  # buffers of the last kernel that had such
        self._back = False

    def turns(self, kernel: Kernel) -> bool:
        """Whether the programs of the next kernel go from the last one to the first."""
        sizes = {v.id: v.t.nbytes for v in kernel.buffers.storages}
        large = {key for key, nbytes in sizes.items() if isinstance(nbytes, int) and nbytes >= LARGE}
        if not large:
            return False
        free = kernel.kind in EITHER and kernel.extern is None  # a library begins where it likes
        back = not self._back and free and not large.isdisjoint(self._large)
        self._large, self._back = large, back
        return back
