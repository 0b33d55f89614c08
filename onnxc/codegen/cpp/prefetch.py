"""Which lines of memory a loop nest fetches for writing before it writes them (`ox_ahead` in vec.h).

Where many rows are written a vector each by turns, each store would wait for a line of its own: nothing in a processor
foresees so many runs. And while a phase computes what later ones need, memory is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onnxc.ir.expr import Dim, symbols
from onnxc.loops.nest import Nest, Phase

TILE = 128  # bytes from a vector of a tile's row to what is fetched: two lines
STRIP = 16  # bytes for each lane: of a plane, a strip of conv_across.h is written at a time


def fetch_ahead(phase: Phase, distance: int) -> None:
    """Has each store of a phase fetch what lies so many bytes behind it."""
    phase.stores = [replace(s, ahead=distance) for s in phase.stores]


def fetch_for_later_phases(nest: Nest, computes: Callable[[Phase], bool]) -> None:
    """Has the phases that compute terms for later ones fetch what these store over the same loops, each line once."""
    left = nest.stores()
    for k, phase in enumerate(nest.phases):
        if not computes(phase):
            continue
        later = [s for p in nest.phases[k + 1 :] if p.loops == phase.loops for s in p.stores]
        phase.fetched = [s for s in later if s in left and not _is_data(s.address, nest)]
        left = [s for s in left if s not in phase.fetched]


def _is_data(address: Dim, nest: Nest) -> bool:
    """Whether data decides where that is."""
    return bool(symbols(address) & nest.lookups.keys())
