"""The walk of tall tiles for Hopper (sm_90) in Gluon: two warpgroups of 64 packed rows that never meet.

Items, masks and results equal those of `kernel.attend_kernel` without lists, fixed splits and sums before the
block. There 8 warps multiply together and then compute exponentials together, while the tensor cores wait;
here the softmax of one warpgroup overlaps the products of the other, as in FlashAttention-3 (Shah et al.
2024, section 3.1). Departures: no warp only loads; the first warpgroup copies the keys of both, the second
the values. Nothing makes them take turns (the paper's ping-pong), which was measured and is no faster.

Layout: scores [64 rows, 64 slots] and sums [64 rows, H] are in registers as wgmma leaves them, and weights go
into the next product without shared memory. That holds the queries and rings of 6 blocks of keys and of
values: 225 KiB, so one program a multiprocessor. Barriers of a position in the rings: `full` completes when
all 256 threads have copied their pieces of keys or values, `free` when both warpgroups have read them.

Gluon is the lower level of Triton and cannot be interpreted: tests/gpu checks this file, tests/kernels
compiles it, and interpreted runs take Triton's walk.
R rows fed this pass, S physical KV slots, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from idlm.kernels.paged_attention.kernel_plan import RECORD

NOTHING: gl.constexpr = gl.constexpr(-1e30)
NO_SLOT: gl.constexpr = gl.constexpr(1 << 30)
REGISTERS = 248
"""Of a thread of each group; more than 168 forbid a third warpgroup."""
THREADS: gl.constexpr = gl.constexpr(256)
ROWS: gl.constexpr = gl.constexpr(64)
"""Packed rows of a warpgroup."""
BLOCK_N: gl.constexpr = gl.constexpr(64)
"""Slots of a block."""
STAGES: gl.constexpr = gl.constexpr(6)
"""Blocks of keys in shared memory, and of values."""
AHEAD: gl.constexpr = gl.constexpr(4)
"""Blocks that are copied ahead: two are in use where the groups are not at the same one."""
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the threads of a warpgroup, once there are two. Triton 3.6 calls it `thread_barrier`."""


@gluon.jit
def _first_slot(i, walk):
    """First slot of block `i` of the walk: the blocks below the limits, then those of the branches."""
    return gl.where(i < walk[0], i, i - walk[0] + walk[1]) * BLOCK_N


@gluon.jit
def _page_ids(table, i, walk, PAGE: gl.constexpr, layout: gl.constexpr):
    """Page id of each slot of block `i`; -1 where no row sees it, and after the share."""
    slots = _first_slot(i, walk) + gl.arange(0, BLOCK_N, layout=layout)
    is_read = (slots < walk[2]) | ((slots >= walk[3]) & (slots <= walk[4]))
    pages = (slots.to(gl.uint32) // PAGE).to(gl.int32)
    return gl.load(table + pages, mask=is_read & (i < walk[5]), other=-1).to(gl.int32)


@gluon.jit
def _fetch(
    i, n, pages, cache, buffers, bars, walk, stride_slot,
    PAGE: gl.constexpr, H: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Start to copy block `i`, the n-th of the share, when its buffer is free; zeros where no row sees."""
    full, free = bars
    stage = n % STAGES
    slots = _first_slot(i, walk) + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    physical = pages * PAGE + (slots.to(gl.uint32) % PAGE).to(gl.int32)
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    at = physical.to(gl.int64)[:, None] * stride_slot + columns[None, :]
    mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
    async_copy.async_copy_global_to_shared(buffers.index(stage), cache + at, mask=(pages >= 0)[:, None])
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _hidden(scores, i, walk, bounds, layout: gl.constexpr):
    """Scores with -inf where a row does not see a slot; blocks that all rows see are left alone."""
    limits, branches, owns, low_limit = bounds
    first = _first_slot(i, walk)
    if first + BLOCK_N > low_limit:
        slots = (first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
        is_seen = (slots < limits[:, None]) | ((slots >= branches[:, None]) & (slots <= owns[:, None]))
        scores = gl.where(is_seen, scores, float("-inf"))
    return scores


@gluon.jit
def _bounds(rows_of, m, item, G: gl.constexpr):
    """Limits, branches and own slots of packed rows, and the lowest limit of the tile."""
    limits_R, branch_starts_R, own_slots_R = rows_of
    row, num_read, low_limit, low_branch = item
    at, sees = row + m // G, m < num_read
    limits = gl.load(limits_R + at, mask=sees, other=0).to(gl.int32)
    branches = gl.load(branch_starts_R + at, mask=sees & (low_branch < NO_SLOT), other=NO_SLOT).to(gl.int32)
    owns = gl.load(own_slots_R + at, mask=sees, other=0).to(gl.int32)
    return limits, branches, owns, low_limit


@gluon.jit
def _softmax(scores, total, highest, scale_log2):
    """Weights of a block, the sum of weights so far, the maximum, and the factor of what was summed."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = gl.exp2(highest - new_highest)
    return weights, total * shrink + gl.sum(weights, 1), new_highest, shrink


@gluon.jit
def _store(
    acc, total, highest, outputs, where, first_m, K: gl.constexpr, G: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The output of a tile with one item, else a part: see `kernel_parts.store_part`.

    Stored from the layout of the product: another one would pass through memory that the other group uses."""
    o_RNH, partial_o, partial_sums, stride_o_row, stride_o_head = outputs
    row, count, kv_head, num_items, my_part = where
    H: gl.constexpr = acc.shape[1]
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, layout))[None, :]
    m = first_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    m_tile = m < count * G
    if num_items == 1:
        acc = acc / gl.where(total > 0, total, 1.0)[:, None]
        rows, heads = (row + m // G).to(gl.int64), kv_head * G + m % G
        at_row = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns
        gl.store(o_RNH + at_row, acc.to(o_RNH.dtype.element_ty), mask=m_tile[:, None])
    else:
        if partial_o.dtype.element_ty == gl.float16:
            largest = gl.max(gl.abs(acc), 1).to(gl.int32, bitcast=True)
            exponent = gl.minimum(gl.maximum((largest >> 23) - 127, -40), 60)
            shrink = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
            acc, total, highest = acc * shrink[:, None], total * shrink, highest + exponent.to(gl.float32)
        at_m = (my_part.to(gl.int64) * K + kv_head) * (2 * ROWS) + m
        gl.store(partial_sums + at_m * 2, total, mask=m_tile)
        gl.store(partial_sums + at_m * 2 + 1, highest, mask=m_tile)
        at_o = at_m[:, None] * H + columns
        gl.store(partial_o + at_o, acc.to(partial_o.dtype.element_ty), mask=m_tile[:, None])


@gluon.jit
def _group(share, SECOND: gl.constexpr, SIZES: gl.constexpr, PDL: gl.constexpr):
    """The walk of one warpgroup over its 64 packed rows, which copies keys (values if SECOND) for both."""
    K: gl.constexpr = SIZES[0]
    G: gl.constexpr = SIZES[1]
    H: gl.constexpr = SIZES[2]
    PAGE: gl.constexpr = SIZES[3]
    queries, cache, buffers, bars, table, rows_of, walk, start, item, where, outputs, scale_log2 = share
    q_RNH, stride_q_row, stride_q_head, both_q_smem = queries
    k_cache_SKH, v_cache_SKH, stride_slot = cache
    keys, values = buffers
    full, free = bars
    dtype: gl.constexpr = q_RNH.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot_layout: gl.constexpr = gl.SliceLayout(1, flat)
    FIRST_M: gl.constexpr = ROWS if SECOND else 0
    q_smem = both_q_smem.index(1 if SECOND else 0)
    source, mine = (v_cache_SKH, values) if SECOND else (k_cache_SKH, keys)

    bounds = _bounds(rows_of, FIRST_M + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout)), item, G)
    pages = _page_ids(table, start, walk, PAGE, slot_layout)
    if PDL:
        gdc_wait()
    for g in gl.static_range(AHEAD):
        next_pages = _page_ids(table, start + g + 1, walk, PAGE, slot_layout)
        _fetch(start + g, g, pages, source, mine, bars, walk, stride_slot, PAGE, H, flat)
        pages = next_pages
    m = FIRST_M + gl.arange(0, ROWS, layout=slot_layout)
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, flat))
    at_q = (where[0] + m // G).to(gl.int64) * stride_q_row + (where[2] * G + m % G) * stride_q_head
    q_smem.store(gl.load(q_RNH + at_q[:, None] + columns[None, :], mask=(m < item[1])[:, None], other=0.0))
    fence_async_shared()
    barrier()

    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    acc = gl.zeros([ROWS, H], gl.float32, o_layout)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    highest = gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(1, s_layout))
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma(q_smem, keys.index(0).permute((1, 0)), zero, use_acc=False)
    scores = _hidden(scores, start, walk, bounds, s_layout)
    weights, total, highest, shrink = _softmax(scores, total, highest, scale_log2)
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    for i in range(start, walk[5] - 1):
        # The values of a block and the keys of the next one: products without a wait between them.
        n = i - start
        stage, next_stage = n % STAGES, (n + 1) % STAGES
        mbarrier.wait(full.index(next_stage), ((n + 1) // STAGES) & 1)
        sums = warpgroup_mma(p, values.index(stage), acc, is_async=True)
        next_keys = keys.index(next_stage).permute((1, 0))
        scores = warpgroup_mma(q_smem, next_keys, zero, use_acc=False, is_async=True)
        _fetch(i + AHEAD, n + AHEAD, pages, source, mine, bars, walk, stride_slot, PAGE, H, flat)
        pages = _page_ids(table, i + AHEAD + 1, walk, PAGE, slot_layout)
        acc, scores, p = warpgroup_mma_wait(0, deps=(sums, scores, p))
        # All warps of the group have read the block.
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        scores = _hidden(scores, i + 1, walk, bounds, s_layout)
        weights, total, highest, shrink = _softmax(scores, total, highest, scale_log2)
        acc = acc * gl.convert_layout(shrink, out_rows)[:, None]
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc = warpgroup_mma(p, values.index(gl.maximum(walk[5] - 1 - start, 0) % STAGES), acc)
    if PDL:
        gdc_launch_dependents()
    async_copy.commit_group()
    async_copy.wait_group(0)
    total, highest = gl.convert_layout(total, out_rows), gl.convert_layout(highest, out_rows)
    _store(acc, total, highest, outputs, where, FIRST_M, K, G, o_layout)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """One barrier for each block of the ring."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["stride_table"])
def attend_kernel(
    tensors, rows_of, items, parts, scale_log2, strides, stride_table,
    SHAPE: gl.constexpr, PAGE: gl.constexpr, WORKER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One item of one KV head: the output if the tile has one item, else a part."""
    q_RNH, k_cache_SKH, v_cache_SKH, o_RNH = tensors
    block_table, limits_R, branch_starts_R, own_slots_R = rows_of
    stride_q_row, stride_q_head, stride_slot, stride_head, stride_o_row, stride_o_head = strides
    K: gl.constexpr = SHAPE.num_kv_heads
    G: gl.constexpr = SHAPE.group
    H: gl.constexpr = SHAPE.head_dim
    dtype: gl.constexpr = q_RNH.dtype.element_ty
    smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, H], dtype)
    SIZES: gl.constexpr = (K, G, H, PAGE)
    kv_head, item = gl.program_id(0) % K, gl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    low_limit, start, stop = gl.load(record + 6), gl.load(record + 10), gl.load(record + 11)
    high_limit, low_branch, high_own = gl.load(record + 7), gl.load(record + 8), gl.load(record + 9)
    walk = gl.load(record + 3), gl.load(record + 4), high_limit, low_branch, high_own, stop
    where = row, count, kv_head, gl.load(record + 15), gl.load(record + 16)
    # Rows of padding see nothing, are not read, and give 0.
    num_read = gl.where(gl.load(record + 5) > 0, count * G, 0)

    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], smem)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], smem)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, H], q_shared)
    # All threads signal when their copy is complete; one thread of each group frees a buffer.
    bars = _barriers(THREADS), _barriers(2)
    barrier()
    table = block_table + b.to(gl.int64) * stride_table
    queries = q_RNH, stride_q_row, stride_q_head, q_smem
    cache = k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head, stride_slot
    bounds_of = limits_R, branch_starts_R, own_slots_R
    item_of = row, num_read, low_limit, low_branch
    outputs = o_RNH, parts.o, parts.sums, stride_o_row, stride_o_head
    buffers = keys, values
    share = queries, cache, buffers, bars, table, bounds_of, walk, start, item_of, where, outputs, scale_log2
    gl.warp_specialize(
        [(_group, (share, False, SIZES, PDL)), (_group, (share, True, SIZES, PDL))], [4], [WORKER_REGISTERS]
    )
