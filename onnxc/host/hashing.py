"""Hashes of strings and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]
C1, C2, MASK = 0xCC9E2D51, 0x1B873593, 0xFFFFFFFF


@host_function
def ms_murmur_hash(x: Array, seed: int, positive: bool) -> Array:
    """MurmurHash3_x86_32 of each element."""
    if x.dtype == object:
        found = np.array([_hash(str(text).encode(), seed) for text in x.ravel()], np.uint32)
    else:
        found = _hashes(np.ascontiguousarray(x).reshape(-1).view(np.uint32).reshape(x.size, -1), seed)
    return found.reshape(x.shape) if positive else found.view(np.int32).reshape(x.shape)


def _hashes(blocks: Array, seed: int) -> Array:
    """Of numbers [n, blocks of 32 bits]."""
    h = np.full(len(blocks), seed, np.uint32)
    for k in blocks.T:
        h = h ^ _turned(k * np.uint32(C1), 15) * np.uint32(C2)
        h = _turned(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(4 * blocks.shape[1])
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    return np.asarray(h ^ h >> np.uint32(16))


def _turned(x: Array, bits: int) -> Array:
    return np.asarray(x << np.uint32(bits) | x >> np.uint32(32 - bits))


def _hash(data: bytes, seed: int) -> int:
    """Of bytes: whole blocks of four, then the rest."""
    h, whole = seed, len(data) & ~3
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * C1 & MASK
        h ^= (k << 15 | k >> 17) * C2 & MASK
        if at < whole:
            h = ((h << 13 | h >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & MASK
    return h ^ h >> 16
