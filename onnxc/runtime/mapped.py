"""Mapped files leave memory when they have been read: their pages come back from the file where they are needed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

STEP = 1 << 27  # bytes that are read before pages are let go


def forget(arrays: Iterable[Any]) -> None:
    """Lets the pages go of all files that these arrays (or buffers) are views of. Their content stays what it is: a
    mapping that can be written to may have pages that no file has, and is left alone.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    for mapping in {id(m): m for m in map(_mapping, arrays) if m is not None}.values():
        mapping.madvise(mmap.MADV_DONTNEED)


def forgetting(arrays: Iterable[Any]) -> Callable[[int], None]:
    """A function that is told of each piece of work how many bytes it has read, and forgets from time to time."""
    kept = list(arrays)
    read = 0

    def after(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        if read >= STEP:
            read = 0
            forget(kept)

    return after


def _mapping(view: Any) -> mmap.mmap | None:
    while not isinstance(view, mmap.mmap):
        below = view.base if isinstance(view, np.ndarray) else view.obj if isinstance(view, memoryview) else None
        if below is None:
            return None
        view = below
    with memoryview(view) as content:
        return view if content.readonly else None
