"""Emits kernels in stages that work through a large tensor image by image.

The grid goes through the images. In step s, the programs of the first stage do image s, those of the next image s - d,
and so on: d is so long that what a stage waits for was done meanwhile, and so short that the last one finds the image,
which the first one has read, in the L2 cache. A program waits for those of lower numbers alone. A GPU starts programs
in the order of their numbers, so whatever is waited for has begun, and no wait goes on for ever.

Stages hand on numbers in words of memory that are zero before the kernel runs. A word is written once, as the number
with some bits turned, so that none is zero: whoever finds no zero among the words that it needs has what it waits for.
Flags, fences and atomics are not needed, and the answer does not depend on who is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.codegen.loop_order import normalise
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power
from onnxc.codegen.triton.loops import Body, NestEmitter
from onnxc.codegen.triton.terms import Buffers
from onnxc.codegen.triton.tiles import Tile
from onnxc.ir import dtypes
from onnxc.ir.expr import Symbol, coefficient, prod, symbols
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.nest import Loop, Nest
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.relay import images, loads

WORDS = {16: dtypes.int16, 32: dtypes.int32}
THREADS = 32
COLUMNS = 64  # neighbouring rows of a tile, where elements of a row are no neighbours
MIDDLE = 8192  # lanes of stages between the first and the last: these had better need one program each


@dataclass(frozen=True)
class Pace:
    """How stages are laid over programs.

    Attributes:
        lanes: elements of a program.
        warps: of a program.
        lag: megabytes of the large tensor that the last stage is behind the first.
    """

    lanes: int = 4096
    warps: int = 4
    lag: int = 16


@dataclass
class _Stage:
    """A stage: its loops within an image, and what it waits for."""

    nest: Nest
    image: Symbol
    words: dict[int, int]  # storage that it waits for -> words of an image
    large: bool  # whether it goes through the large tensor
    body: Body | None = None
    tile: Tile | None = None


def relay_candidates() -> list[Pace]:
    """Choices that are worth measuring, the one that the cost model takes first."""
    sizes = ((4096, 4), (4096, 2), (2048, 2), (8192, 8))
    return list(dict.fromkeys([Pace(), *(Pace(lanes, warps, lag) for lanes, warps in sizes for lag in (16, 12))]))


def emit_relay(group: Group, layout: Layout, choice: Pace | None) -> Kernel:
    """The kernel of a group with stages."""
    pace = choice or Pace()
    handed = {layout.storage(s.root).id: layout.storage(s.root) for s in group.stages}
    words = {i: Value(TensorType(WORDS[v.dtype.bits], v.shape)) for i, v in handed.items()}
    buffers = Buffers(apart=layout.pitches, words=words)
    stages: list[_Stage] = []
    for section in (*group.stages, group.sections[0]):
        nest = Lowering(section, layout).nest(None)
        image = images(nest, section)
        assert image is not None
        stages.append(_stage(nest, image, handed, not stages or section is group.sections[0]))
    touched = [t.value for s in stages for t in loads(s.nest)]
    wide = is_wide([*touched, *(t.value for s in stages for t in s.nest.stores())])
    again = {t.value.id for t in loads(stages[0].nest)} | {s.value.id for s in stages[-1].nest.stores()}
    for stage in stages:
        stage.tile = _tile(stage, pace)
        passing = frozenset(again - words.keys()) if stage is stages[-1] else frozenset[int]()
        given = {stage.image: "image"}
        (stage.body,) = NestEmitter(stage.nest, buffers, wide, stage.tile, given, passing).bodies()
    count = group.sections[0].root.shape[0]
    assert isinstance(count, int)
    lines, programs = _steps(stages, count, _hop(group, pace, len(_waves(stages)) - 1), buffers)
    return Kernel(lines, buffers, programs, pace.warps, kind="relay", wide=wide, cleared=tuple(words.values()))


def _stage(nest: Nest, image: Symbol, handed: dict[int, Value], large: bool) -> _Stage:
    """A stage of a nest, without its loop over images."""
    waited = {t.value.id for t in loads(nest) if t.value.id in handed}
    words = {i: _words(handed[i]) for i in sorted(waited)}
    plain = not nest.outer
    nest.outer = [loop for loop in nest.outer if loop[0] != image]
    for phase in nest.phases:
        phase.loops = [loop for loop in phase.loops if loop[0] != image]
    if plain and len(nest.phases) == 1 and nest.phases[0].loops:
        _rows(nest, set(words))
    normalise(nest)
    return _Stage(nest, image, words, large)


def _words(v: Value) -> int:
    found = prod(v.shape[1:])
    assert isinstance(found, int)
    return found


def _rows(nest: Nest, handed: set[int]) -> None:
    """Makes rows of what has no sums: those loops are outer ones that numbers from other stages depend on, so that
    these are read once for a row.
    """
    (phase,) = nest.phases
    used = {s for t in loads(nest) if t.value.id in handed for s in symbols(t.index[0])}
    outer = [loop for loop in phase.loops if loop[0] in used]
    inner = [loop for loop in phase.loops if loop[0] not in used]
    if outer and inner:
        nest.outer, phase.loops = outer, inner


def _size(loops: list[Loop]) -> int:
    found = prod(d for _, d in loops)
    assert isinstance(found, int)
    return found


def _tile(stage: _Stage, pace: Pace) -> Tile:
    """Some rows of an image, each whole where it fits."""
    nest = stage.nest
    if not nest.outer and not nest.reductions():
        return Tile(pace.lanes, warps=pace.warps)
    turns, rows = max((_size(p.loops) for p in nest.phases), default=1), power(_size(nest.outer))
    whole, lanes = power(turns), pace.lanes if stage.large else max(MIDDLE, pace.lanes)
    columns = NestEmitter(nest, Buffers(), False).facts(nest.phases[0]).kind == "columns"
    across = min(whole, lanes // min(COLUMNS, rows)) if columns else min(whole, lanes)
    points = max(1, min(rows, lanes // across))
    return Tile(points, across, pace.warps, int(whole <= across))


def _waves(stages: Sequence[_Stage]) -> list[list[_Stage]]:
    """Stages in groups that have a program of an image in common: neighbours that need one program each."""
    found: list[list[_Stage]] = []
    for stage in stages:
        assert stage.body is not None
        alone = stage.body.programs == 1 and found and all(s.body and s.body.programs == 1 for s in found[-1])
        if alone:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def _hop(group: Group, pace: Pace, hops: int) -> int:
    """Images from one stage to the next."""
    root = group.sections[0].root
    count, nbytes = root.shape[0], root.t.nbytes
    assert isinstance(count, int) and isinstance(nbytes, int)
    return max(1, min(count, (pace.lag << 20) * count // max(1, nbytes)) // max(1, hops))


def _steps(stages: Sequence[_Stage], count: int, hop: int, buffers: Buffers) -> tuple[list[str], int]:
    """The lines of all stages by the number of a program, and how many programs there are."""
    waves = _waves(stages)
    each = [wave[0].body.programs if wave[0].body is not None else 1 for wave in waves]
    assert all(isinstance(n, int) for n in each)
    numbers = [n for n in each if isinstance(n, int)]
    total, start = sum(numbers), 0
    lines = [f"step = pid // {total}", f"own = pid % {total}"]
    for k, (wave, n) in enumerate(zip(waves, numbers, strict=True)):
        inner = [f"pid = own - {start}"]
        for stage in wave:
            inner += _with_waits(stage, buffers)
        lag = k * hop
        lines += [
            f"image = step - {lag}",
            f"if (own >= {start}) & (own < {start + n}) & (image >= 0) & (image < {count}):",
            *indent(inner),
        ]
        start += n
    return lines, total * (count + (len(waves) - 1) * hop)


def _with_waits(stage: _Stage, buffers: Buffers) -> list[str]:
    """The lines of a stage, with a wait before the first that needs another stage's numbers, or before the loop that
    this is in: what it reads elsewhere is on its way by then.
    """
    assert stage.body is not None and stage.tile is not None
    lines = list(stage.body.lines)
    at = next((k for k, line in enumerate(lines) if "ox_taken(" in line), len(lines))
    while at < len(lines) and lines[at].startswith(" "):
        at -= 1
    lines[at:at] = [_wait(stage, i, n, buffers) for i, n in stage.words.items()]
    return lines


def _wait(stage: _Stage, handed: int, count: int, buffers: Buffers) -> str:
    """Waits for the words of a row, or of a few rows, where a program needs no others; else for those of the image."""
    assert stage.tile is not None
    name = buffers.pointer(buffers.words[handed])
    mine = [t.index[0] for t in loads(stage.nest) if t.value.id == handed]
    if len(stage.nest.outer) == 1 and stage.nest.outer[0][1] == count:
        ((row, _),) = stage.nest.outer
        if all(coefficient(e, row) == 1 and symbols(e) == {row, stage.image} for e in mine):
            points = stage.tile.points
            return f"ox_await({name} + image * {count} + pid * {points}, {count} - pid * {points}, {points}, {points})"
    return f"ox_await({name} + image * {count}, {count}, {count}, {min(1024, max(THREADS, power(count)))})"
