"""What the planner must know of the machine that runs the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Numbers by which the planner divides reductions and merges kernels; those of a CPU, where nothing else is said.

    Attributes:
        large: elements of a reduction that are worth the start of another kernel.
        leaping: the same, where one stage would read every cache line many times.
        long: elements that one parallel item reads at least, for it to be divided.
        few_items: parallel items that leave the machine idle.
        parts: parallel items that a reduction is cut for.
        part: elements of a part at least.
        uneven: whether parts of a length that has no good divisors are made by filling up the last one.
        short_run: neighbouring elements of one result: fewer are read better beside those of other results.
        columns: neighbouring results that make one item.
        widen: whether sums of 16-bit floats are divided too, by way of float32.
        narrow: bits of a template's result that is stored rather than a wider one made of it by a few instructions.
        staged: whether running sums and the best of long rows are computed in stages.
        pointers: buffers that a kernel may take; None for any number.
        depth: nodes between a reduction and the values in memory that it reads, as far as these are looked for.
        inline: whether a reduction walks through memory as the values lie that it reads beside a concatenation, which
            is computed where it is read.
        pairs: whether a kernel may multiply one matrix by two, for a function of both results.
        late: pointwise nodes that a template of a training step's backward pass takes into its epilogue, where these
            leave one value that is no wider; None for any number. A tile's registers hold its sums and not much more.
        plain: whether an epilogue leaves out what reads elements whose places are data: a tile's registers do not hold
            its places too.
        together: bytes that a kernel without sums writes at most, of a training step, that is merged with others.
        rows: of a product that views divide into products of fewer rows each, by the same right factor, the left one is
            stored in one piece: to multiply so few takes less time than to read the right factor.
        apart: bytes that a kernel with sums reads at least, of a training step, that is not merged; None: all are.
        window: kernels of a training step between two that are merged.
        opens: whether routines (`planner/operands.py`) compute the elements that they read, and finish their results.
        beside: whether sums of different values are made in one pass where these are computed from the same, and what
            else a training step gains from where reading takes the time.
    """

    large: int = 1 << 16
    leaping: int = 1 << 14
    long: int = 0
    few_items: int = 16
    parts: int = 32
    part: int = 4096
    short_run: int = 64
    columns: int = 64
    uneven: bool = False
    widen: bool = False
    narrow: int = 8
    staged: bool = False
    pointers: int | None = None
    depth: int = 24
    inline: bool = False
    pairs: bool = False
    late: int | None = None
    plain: bool = False
    opens: bool = False
    beside: bool = False
    together: int = 1 << 20
    apart: int | None = None
    window: int = 6
    rows: int = 32


CPU = Machine()
# Programs for each of 132 multiprocessors; a second kernel costs 2 us, in which a program reads 65536 numbers.
GPU = Machine(
    large=1 << 17, long=1 << 16, few_items=132, parts=528, part=1 << 13, short_run=16, uneven=True, widen=True,
    narrow=16, staged=True, pointers=40, depth=512, inline=True, pairs=True, late=6, plain=True,
    opens=True, beside=True, together=1 << 25, apart=1 << 21, window=24, rows=0,
)  # fmt: skip
