"""Attention by warps with roles, for GPUs with asynchronous products (sm_90): text in front of generated kernels.

One warp brings tiles of queries, keys and values to shared memory. Groups of four warps have 64 queries each: while a
group's product of probabilities and values runs, so does its next product of queries and keys, and it computes
exponentials meanwhile. Barriers say of each slot of shared memory when it is full, and when all have read it.

`span` and `place` are the kernel's own: which tiles a program has, and where a tile's queries, keys, values and results
lie.
"""

# As in library.py.
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,  # noqa: F401  (kernels call it)
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ox_fetch = tma.async_load if hasattr(tma, "async_load_im2col") else tma.async_copy_global_to_shared  # its older name
OX_GROUP = gl.constexpr(64)  # queries of four warps


@gluon.jit
def ox_exp2_near(x):
    """2^x of a float32, 0 below 2^-126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ox_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers that so many arrive at."""
    found = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(count):
        mbarrier.init(found.index(k), count=arrivals)
    return found


# Of causal attention the tiles of a head have unequal work. They are shared out part by part: each part has the tiles
# of so many heads that every program gets two, of which the first is one of those with most to do and the second one of
# those with least. So all programs have as much to do, and the keys and values of few heads are in use at once: these
# stay in the L2 cache. Where a head alone has more tiles than two for each program, they are dealt one by one.


@gluon.jit
def ox_shared_out(count, heads, pid, programs):
    """Heads of a part, how many such parts there are, heads that are left, and the tiles that this program has of each
    part: two, or one where the part has fewer. `count` is that of the tiles of a head.
    """
    together = gl.maximum(2 * programs // count, 1)
    full = heads // together
    each = 2 if 2 * programs - 1 - pid < together * count else 1
    return together, full, heads - full * together, each


@gluon.jit
def ox_share(count, heads):
    """How many tiles this program has."""
    pid, programs = gl.program_id(0), gl.num_programs(0)
    _together, full, last, each = ox_shared_out(count, heads, pid, programs)
    first = 1 if pid < last * count else 0
    second = 1 if 2 * programs - 1 - pid < last * count else 0
    dealt = (count * heads - pid + programs - 1) // programs
    return dealt if 2 * programs < count else full * each + first + second


@gluon.jit
def ox_bring(span, place, lies, buffers, full, free, sizes, groups: gl.constexpr, stages: gl.constexpr):
    """What the warp does that brings tiles. `span` and `place` are the kernel's; `lies`, `buffers`, `full` and `free`
    are those of queries, keys, values.
    """
    q_lies, k_lies, v_lies = lies
    q_at, k_at, v_at = buffers
    q_full, k_full, v_full = full
    q_free, k_free, v_free = free
    rank: gl.constexpr = len(k_at.shape)
    step: gl.constexpr = k_at.shape[rank - 2]
    nbytes: gl.constexpr = 2 * k_at.shape[rank - 1]
    held: gl.constexpr = q_at.shape[0] // groups
    turn = 0
    n = 0
    begin, end, by = span(sizes)
    for tile in range(begin, end, by):
        row0, start, blocks, _tested, q_head, k_head, v_head, _out = place(tile, sizes)
        for k in gl.static_range(groups):
            at = k + turn % held * groups
            mbarrier.wait(q_free.index(at), (turn // held & 1) ^ 1)
            mbarrier.expect(q_full.index(at), OX_GROUP * nbytes)
            ox_fetch(q_lies, q_head + (row0 + k * OX_GROUP, 0), q_full.index(at), q_at.index(at))  # noqa: RUF005
        turn += 1  # noqa: SIM113
        for j in range(blocks):
            slot = n % stages
            phase = (n // stages + 1) & 1
            k0 = start + (blocks - 1 - j) * step
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), step * nbytes)
            ox_fetch(k_lies, k_head + (k0, 0), k_full.index(slot), k_at.index(slot))  # noqa: RUF005
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), step * nbytes)
            ox_fetch(v_lies, v_head + (k0, 0), v_full.index(slot), v_at.index(slot))  # noqa: RUF005
            n += 1


@gluon.jit
def ox_scored(s, k0, m, sizes, ends: gl.constexpr, above: gl.constexpr, below: gl.constexpr):
    """Scores with -inf for keys that do not count: those beyond the last, or outside of a band."""
    layout: gl.constexpr = s.type.layout
    key = k0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    if ends:
        s = gl.where((key < sizes[2])[None, :], s, float("-inf"))
    if above:
        s = gl.where(key[None, :] <= (m + sizes[3])[:, None], s, float("-inf"))
    if below:
        s = gl.where(key[None, :] >= (m + sizes[4])[:, None], s, float("-inf"))
    return s


@gluon.jit
def ox_based(high, unit):
    """The base of exponents: where all keys so far are hidden, -inf - -inf would be NaN."""
    return gl.where(high == float("-inf"), 0.0, high) * unit


@gluon.jit
def ox_begun(
    q, buffers, full, free, turns, n, start, blocks, m, sizes, unit: gl.constexpr, stages: gl.constexpr,
    groups: gl.constexpr, group: gl.constexpr, paced: gl.constexpr, ends: gl.constexpr, above: gl.constexpr,
    below: gl.constexpr,
):  # fmt: skip
    """The last of the `blocks` of keys from `start` on: exponentials, greatest scores, and sums of rows."""
    q_at, k_at, _v_at = buffers
    _q_full, k_full, _v_full = full
    _q_free, k_free, _v_free = free
    rank: gl.constexpr = len(k_at.shape)
    block: gl.constexpr = [k_at.shape[rank - 2], k_at.shape[rank - 1]]
    step: gl.constexpr = block[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, step, 16])
    slot = n % stages
    mbarrier.wait(k_full.index(slot), (n // stages) & 1)
    if paced:
        mbarrier.wait(turns.index(group), n & 1)
    k = k_at.index(slot).reshape(block).permute((1, 0))
    s = warpgroup_mma(q, k, gl.zeros((OX_GROUP, step), gl.float32, scores), use_acc=False, is_async=True)
    if paced:
        mbarrier.arrive(turns.index((group + 1) % groups))
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_free.index(slot))
    s = ox_scored(s, start + (blocks - 1) * step, m, sizes, ends, above, below)
    top = gl.max(s, 1)
    p = ox_exp2_near(s * unit - ox_based(top, unit)[:, None])
    return p.to(q_at.dtype), top, gl.sum(p, 1)


@gluon.jit
def ox_attended(
    state, q, buffers, full, free, turns, k0, m, sizes, unit: gl.constexpr, stages: gl.constexpr, groups: gl.constexpr,
    group: gl.constexpr, paced: gl.constexpr, tested: gl.constexpr, ends: gl.constexpr, above: gl.constexpr,
    below: gl.constexpr,
):  # fmt: skip
    """A block of keys after the first: its scores, while the values of the block before are added up."""
    acc, half, top, total, n = state
    _q_at, k_at, v_at = buffers
    _q_full, k_full, v_full = full
    _q_free, k_free, v_free = free
    rank: gl.constexpr = len(k_at.shape)
    block: gl.constexpr = [k_at.shape[rank - 2], k_at.shape[rank - 1]]
    step: gl.constexpr = block[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, step, 16])
    last = n % stages
    before = (n // stages) & 1
    n += 1
    slot = n % stages
    mbarrier.wait(k_full.index(slot), (n // stages) & 1)
    if paced:
        mbarrier.wait(turns.index(group), n & 1)
    k = k_at.index(slot).reshape(block).permute((1, 0))
    s = warpgroup_mma(q, k, gl.zeros((OX_GROUP, step), gl.float32, layout), use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), before)
    acc = warpgroup_mma(half, v_at.index(last).reshape(block), acc, is_async=True)
    if paced:
        mbarrier.arrive(turns.index((group + 1) % groups))
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_free.index(slot))
    if tested:
        s = ox_scored(s, k0, m, sizes, ends, above, below)
    high = gl.maximum(top, gl.max(s, 1))
    base = ox_based(high, unit)
    p = ox_exp2_near(s * unit - base[:, None])
    old = ox_exp2_near(top * unit - base)
    total = total * old + gl.sum(p, 1)
    acc, half = warpgroup_mma_wait(0, [acc, half])
    mbarrier.arrive(v_free.index(last))
    half = gl.convert_layout(p.to(half.dtype), half.type.layout)
    acc = acc * gl.convert_layout(old, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, half, high, total, n


@gluon.jit
def ox_ended(acc, half, total, v_at, v_full, v_free, n, stages: gl.constexpr, guard: gl.constexpr):
    """The values of the last block are added up, and all divided by the sums. `guard`: rows without keys become 0."""
    rank: gl.constexpr = len(v_at.shape)
    block: gl.constexpr = [v_at.shape[rank - 2], v_at.shape[rank - 1]]
    slot = n % stages
    mbarrier.wait(v_full.index(slot), (n // stages) & 1)
    acc = warpgroup_mma(half, v_at.index(slot).reshape(block), acc, is_async=True)
    if guard:
        some = (total == total) & (total != 0)
        share = gl.where(some, 1.0 / gl.where(some, total, 1.0), 0.0)
    else:
        share = 1.0 / total
    acc, half = warpgroup_mma_wait(0, [acc, half])
    mbarrier.arrive(v_free.index(slot))
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
    if guard:
        acc = gl.where(gl.convert_layout(some, gl.SliceLayout(1, acc.type.layout))[:, None], acc, 0.0)
    return acc


@gluon.jit
def ox_written(acc, out, row0, stride, count, rows: gl.constexpr):
    """Stores results from the address `out` on, of the rows that there are. `rows`: these are all."""
    depth: gl.constexpr = acc.shape[1]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // depth, depth // 8], [4, 1], [1, 0])
    y = gl.convert_layout(acc, stored)
    r = row0 + gl.arange(0, OX_GROUP, gl.SliceLayout(1, stored))
    c = gl.arange(0, depth, gl.SliceLayout(0, stored))
    where = out + r[:, None] * stride + c[None, :]
    if rows:
        gl.store(where, y)
    else:
        gl.store(where, y, mask=(r < count)[:, None])


@gluon.jit
def ox_attend(
    span, place, out_pointer, buffers, full, free, turns, sizes, unit: gl.constexpr, stages: gl.constexpr,
    groups: gl.constexpr, group: gl.constexpr, paced: gl.constexpr, more: gl.constexpr, ends: gl.constexpr,
    above: gl.constexpr, below: gl.constexpr, rows: gl.constexpr, guard: gl.constexpr,
):  # fmt: skip
    """What four warps do: attention of 64 queries of each tile.

    Blocks of keys are taken from the last to the first. `more`: more of them than one may have to be tested. `paced`:
    groups begin products in turns.
    """
    q_at, k_at, v_at = buffers
    q_full, _k_full, v_full = full
    q_free, _k_free, v_free = free
    step: gl.constexpr = k_at.shape[len(k_at.shape) - 2]
    depth: gl.constexpr = k_at.shape[len(k_at.shape) - 1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, step, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, depth, 16])
    held: gl.constexpr = q_at.shape[0] // groups
    turn = 0
    n = 0
    begin, end, by = span(sizes)
    for tile in range(begin, end, by):
        row0, start, blocks, tested, _q_head, _k_head, _v_head, out = place(tile, sizes)
        row0 += group * OX_GROUP
        m = row0 + gl.arange(0, OX_GROUP, gl.SliceLayout(1, scores))
        acc = gl.zeros((OX_GROUP, depth), gl.float32, sums)
        at = group + turn % held * groups
        q = q_at.index(at).reshape([OX_GROUP, depth])
        mbarrier.wait(q_full.index(at), turn // held & 1)
        p, top, total = ox_begun(
            q, buffers, full, free, turns, n, start, blocks, m, sizes, unit, stages, groups, group, paced, ends,
            above, below,
        )  # fmt: skip
        half = gl.convert_layout(p, gl.DotOperandLayout(0, sums, 2))
        if more:
            for j in range(1, tested):
                acc, half, top, total, n = ox_attended(
                    (acc, half, top, total, n), q, buffers, full, free, turns, start + (blocks - 1 - j) * step, m,
                    sizes, unit, stages, groups, group, paced, True, ends, above, below,
                )  # fmt: skip
        for _ in range(gl.maximum(tested, 1) if more else 1, blocks):
            acc, half, top, total, n = ox_attended(
                (acc, half, top, total, n), q, buffers, full, free, turns, 0, m, sizes,
                unit, stages, groups, group, paced, False, False, False, False,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(at))
        acc = ox_ended(acc, half, total, v_at, v_full, v_free, n, stages, guard)
        n += 1
        turn += 1  # noqa: SIM113
        ox_written(acc.to(q_at.dtype), out_pointer + out, row0, sizes[5], sizes[1], rows)
