"""The walk of tall tiles for Hopper (sm_90) in Gluon: four warps that only copy, and two warpgroups of 64
packed rows that only compute and never meet.

Items, masks and results equal those of `kernel.attend_kernel` without lists, fixed splits and sums before the
block. There 8 warps multiply together and then compute exponentials together, while the tensor cores wait;
here the softmax of a block overlaps the values' product of the block before, and the products of the other
warpgroup, as in FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2). Departures: keys and values come
from pages of any size, 16 bytes a thread; nothing makes the warpgroups take turns (the paper's ping-pong),
which was measured and is no faster. A program computes one item or two: what the second reads is copied
from the last scores of the first on, during its last product and its store.

Layout: scores [64 rows, BLOCK_N slots] and sums [64 rows, H] are in registers as wgmma leaves them, and
weights go into the next product without shared memory. That holds the queries and rings of keys and of values
of `SLOTS` slots: 225 KiB, so one program a multiprocessor. Barriers: `full_q`, `full_k` and `full_v` complete
when all threads that copy have copied their pieces, `free_q` and `free` when both warpgroups have read the
queries, or the keys and values of a block.

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
REGISTERS, COPY_REGISTERS, MEAN_REGISTERS = 208, 88, 168
"""Of a thread that computes, of one that copies, and of all 384 when the kernel starts."""
COPY_THREADS: gl.constexpr = gl.constexpr(128)
ROWS: gl.constexpr = gl.constexpr(64)
"""Packed rows of a warpgroup."""
SLOTS: gl.constexpr = gl.constexpr(384)
"""Of keys in shared memory, and of values."""
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the threads of a warpgroup, once there are two. Triton 3.6 calls it `thread_barrier`."""


@gluon.jit
def _read(items, turn, total, SIZES: gl.constexpr):
    """The item and KV head of a turn: its walk, rows and output, packed rows that see something, number of
    blocks (0: there is no item). Every second turn goes backwards: walks of a prompt lengthen from item to
    item, and so add up to like sums."""
    K: gl.constexpr = SIZES[0]
    G: gl.constexpr = SIZES[1]
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    index = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
    is_item = index < total
    index = gl.minimum(index, total - 1)
    record = items + index // K * RECORD
    count, start, stop = gl.load(record + 2), gl.load(record + 10), gl.load(record + 11)
    low_limit, high_limit = gl.load(record + 6), gl.load(record + 7)
    low_branch, high_own = gl.load(record + 8), gl.load(record + 9)
    below = gl.load(record + 3), gl.load(record + 4)
    walk = below[0], below[1], low_limit, high_limit, low_branch, high_own, start, stop
    where = gl.load(record), gl.load(record + 1), count, index % K, gl.load(record + 15), gl.load(record + 16)
    # Rows of padding see nothing, are not read, and give 0.
    num_read = gl.where(gl.load(record + 5) > 0, count * G, 0)
    num_blocks = gl.where(is_item & (count > 0), gl.maximum(stop - start, 1), 0)
    return walk, where, num_read, num_blocks


@gluon.jit
def _first_slot(i, walk, BLOCK_N: gl.constexpr):
    """First slot of block `i` of the walk: the blocks below the limits, then those of the branches."""
    return gl.where(i < walk[0], i, i - walk[0] + walk[1]) * BLOCK_N


@gluon.jit
def _page_ids(table, i, walk, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Page id of each slot of block `i`; -1 where no row sees it, and after the share."""
    slots = _first_slot(i, walk, BLOCK_N) + gl.arange(0, BLOCK_N, layout=layout)
    is_read = (slots < walk[3]) | ((slots >= walk[4]) & (slots <= walk[5]))
    pages = (slots.to(gl.uint32) // PAGE).to(gl.int32)
    return gl.load(table + pages, mask=is_read & (i < walk[7]), other=-1).to(gl.int32)


@gluon.jit
def _copy_queries(queries, where, num_read, q_smem, G: gl.constexpr, layout: gl.constexpr):
    """Start to copy the packed rows of an item; zeros for rows that see nothing."""
    q_RNH, stride_q_row, stride_q_head = queries
    H: gl.constexpr = q_smem.shape[2]
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    for group in gl.static_range(2):
        m = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        at = (where[1] + m // G).to(gl.int64) * stride_q_row + (where[3] * G + m % G) * stride_q_head
        pointers = q_RNH + at[:, None] + columns[None, :]
        async_copy.async_copy_global_to_shared(q_smem.index(group), pointers, mask=(m < num_read)[:, None])


@gluon.jit
def _copy(items, share, sources, buffers, bars, SIZES: gl.constexpr, PDL: gl.constexpr):
    """The warps that copy: the queries of each item, then its keys and values, block by block."""
    G: gl.constexpr = SIZES[1]
    H: gl.constexpr = SIZES[2]
    PAGE: gl.constexpr = SIZES[3]
    queries, caches, tables = sources
    k_cache_SKH, v_cache_SKH, stride_slot, stride_head = caches
    q_smem, keys, values = buffers
    full_q, free_q, full_k, full_v, free = bars
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot_layout: gl.constexpr = gl.SliceLayout(1, layout)
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, layout))[None, :]
    if PDL:
        gdc_wait()
    n, num_done = 0, 0
    for turn in range(share[1]):
        walk, where, num_read, num_blocks = _read(items, turn, share[0], SIZES)
        if num_blocks > 0:
            table = tables[0] + where[0].to(gl.int64) * tables[1]
            at_head = where[3] * stride_head
            start = walk[6]
            pages = _page_ids(table, start, walk, PAGE, BLOCK_N, slot_layout)
            mbarrier.wait(free_q.index(0), (num_done & 1) ^ 1)
            _copy_queries(queries, where, num_read, q_smem, G, layout)
            async_copy.mbarrier_arrive(full_q.index(0), increment_count=False)
            for i in range(start, start + num_blocks):
                stage = n % STAGES
                slots = _first_slot(i, walk, BLOCK_N) + gl.arange(0, BLOCK_N, layout=slot_layout)
                physical = pages * PAGE + (slots.to(gl.uint32) % PAGE).to(gl.int32)
                at = physical.to(gl.int64)[:, None] * stride_slot + (at_head + columns)
                is_read = (pages >= 0)[:, None]
                # A load that depends on another one is started a block ahead.
                pages = _page_ids(table, i + 1, walk, PAGE, BLOCK_N, slot_layout)
                mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
                async_copy.async_copy_global_to_shared(keys.index(stage), k_cache_SKH + at, mask=is_read)
                async_copy.mbarrier_arrive(full_k.index(stage), increment_count=False)
                async_copy.async_copy_global_to_shared(values.index(stage), v_cache_SKH + at, mask=is_read)
                async_copy.mbarrier_arrive(full_v.index(stage), increment_count=False)
                n += 1
            num_done += 1
    if PDL:
        gdc_launch_dependents()
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _bounds(rows_of, m, where, num_read, low_branch, G: gl.constexpr):
    """Limits, branches and own slots of packed rows."""
    limits_R, branch_starts_R, own_slots_R = rows_of
    at, sees = where[1] + m // G, m < num_read
    limits = gl.load(limits_R + at, mask=sees, other=0).to(gl.int32)
    branches = gl.load(branch_starts_R + at, mask=sees & (low_branch < NO_SLOT), other=NO_SLOT).to(gl.int32)
    owns = gl.load(own_slots_R + at, mask=sees, other=0).to(gl.int32)
    return limits, branches, owns


@gluon.jit
def _hidden(scores, i, walk, bounds, layout: gl.constexpr):
    """Scores with -inf where a row does not see a slot; blocks that all rows see are left alone."""
    limits, branches, owns = bounds
    BLOCK_N: gl.constexpr = scores.shape[1]
    first = _first_slot(i, walk, BLOCK_N)
    if first + BLOCK_N > walk[2]:
        slots = (first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
        is_seen = (slots < limits[:, None]) | ((slots >= branches[:, None]) & (slots <= owns[:, None]))
        scores = gl.where(is_seen, scores, float("-inf"))
    return scores


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
    _, row, count, kv_head, num_items, my_part = where
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
def _attend(
    items, share, rows_of, outputs, scale_log2, buffers, bars,
    SECOND: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the walks of 64 packed rows of each item, and their store."""
    K: gl.constexpr = SIZES[0]
    G: gl.constexpr = SIZES[1]
    H: gl.constexpr = SIZES[2]
    both_q_smem, keys, values = buffers
    full_q, free_q, full_k, full_v, free = bars
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    dtype: gl.constexpr = keys.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    FIRST_M: gl.constexpr = ROWS if SECOND else 0
    q_smem = both_q_smem.index(1 if SECOND else 0)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    n, num_done = 0, 0
    for turn in range(share[1]):
        walk, where, num_read, num_blocks = _read(items, turn, share[0], SIZES)
        if num_blocks > 0:
            start = walk[6]
            m = FIRST_M + gl.arange(0, ROWS, layout=s_rows)
            bounds = _bounds(rows_of, m, where, num_read, walk[4], G)
            acc = gl.zeros([ROWS, H], gl.float32, o_layout)
            row_sums = gl.zeros([ROWS], gl.float32, s_rows)
            highest = gl.full([ROWS], NOTHING, gl.float32, s_rows)
            mbarrier.wait(full_q.index(0), num_done & 1)
            mbarrier.wait(full_k.index(n % STAGES), (n // STAGES) & 1)
            scores = warpgroup_mma(q_smem, keys.index(n % STAGES).permute((1, 0)), zero, use_acc=False)
            scores = _hidden(scores, start, walk, bounds, s_layout)
            weights, row_sums, highest, shrink = _softmax(scores, row_sums, highest, scale_log2)
            p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
            for i in range(start + 1, start + num_blocks):
                # The keys of a block and the values of the one before, whose product ends after the softmax.
                stage, next_stage = n % STAGES, (n + 1) % STAGES
                mbarrier.wait(full_k.index(next_stage), ((n + 1) // STAGES) & 1)
                next_keys = keys.index(next_stage).permute((1, 0))
                scores = warpgroup_mma(q_smem, next_keys, zero, use_acc=False, is_async=True)
                mbarrier.wait(full_v.index(stage), (n // STAGES) & 1)
                sums = warpgroup_mma(p, values.index(stage), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                scores = _hidden(scores, i, walk, bounds, s_layout)
                weights, row_sums, highest, shrink = _softmax(scores, row_sums, highest, scale_log2)
                acc, p = warpgroup_mma_wait(0, deps=(sums, p))
                # All warps of the group have read the block.
                barrier()
                mbarrier.arrive(free.index(stage), count=1)
                acc = acc * gl.convert_layout(shrink, out_rows)[:, None]
                p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
                n += 1
            barrier()
            mbarrier.arrive(free_q.index(0), count=1)
            mbarrier.wait(full_v.index(n % STAGES), (n // STAGES) & 1)
            acc = warpgroup_mma(p, values.index(n % STAGES), acc)
            barrier()
            mbarrier.arrive(free.index(n % STAGES), count=1)
            n += 1
            num_done += 1
            row_sums, highest = gl.convert_layout(row_sums, out_rows), gl.convert_layout(highest, out_rows)
            _store(acc, row_sums, highest, outputs, where, FIRST_M, K, G, o_layout)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that so many arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUM):
        mbarrier.init(bars.index(number), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["total", "turns", "stride_table"])
def attend_kernel(
    tensors, rows_of, items, total, turns, parts, scale_log2, strides, stride_table,
    SHAPE: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Up to `turns` of the `total` items of all KV heads: the output of a tile with one item, else a part."""
    q_RNH, k_cache_SKH, v_cache_SKH, o_RNH = tensors
    block_table, limits_R, branch_starts_R, own_slots_R = rows_of
    stride_q_row, stride_q_head, stride_slot, stride_head, stride_o_row, stride_o_head = strides
    H: gl.constexpr = SHAPE.head_dim
    STAGES: gl.constexpr = SLOTS // BLOCK_N
    dtype: gl.constexpr = q_RNH.dtype.element_ty
    smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, H], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, H], q_shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], smem)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], smem)
    # All threads that copy signal when their copy is complete; one thread of each group frees a buffer.
    of_queries = _barriers(1, COPY_THREADS), _barriers(1, 2)
    of_blocks = _barriers(STAGES, COPY_THREADS), _barriers(STAGES, COPY_THREADS), _barriers(STAGES, 2)
    fence_async_shared()
    barrier()
    SIZES: gl.constexpr = (SHAPE.num_kv_heads, SHAPE.group, H, PAGE)
    share, buffers = (total, turns), (q_smem, keys, values)
    bars = of_queries[0], of_queries[1], of_blocks[0], of_blocks[1], of_blocks[2]
    caches = k_cache_SKH, v_cache_SKH, stride_slot, stride_head
    sources = (q_RNH, stride_q_row, stride_q_head), caches, (block_table, stride_table)
    bounds_of = limits_R, branch_starts_R, own_slots_R
    outputs = o_RNH, parts.o, parts.sums, stride_o_row, stride_o_head
    gl.warp_specialize(
        [
            (_attend, (items, share, bounds_of, outputs, scale_log2, buffers, bars, False, SIZES)),
            (_attend, (items, share, bounds_of, outputs, scale_log2, buffers, bars, True, SIZES)),
            (_copy, (items, share, sources, buffers, bars, SIZES, PDL)),
        ],
        [4, 4],
        [REGISTERS, COPY_REGISTERS],
    )
