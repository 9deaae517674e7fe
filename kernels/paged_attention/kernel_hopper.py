"""The walk of tall tiles for Hopper (sm_90) in Gluon: products overlap with the softmax between them.

Items, masks and results equal those of `kernel.attend_kernel` without lists and fixed splits, in which Triton
waits after every product. Here the scores of the next block and the weighted values of this one start
together: loads are issued beside the first, and the softmax runs beside the second. Gluon is the lower level
of Triton and cannot be interpreted: tests/gpu checks this file, tests/kernels only compiles it.

R rows fed this pass, S physical KV slots, N query heads, K KV heads, G = N / K, H head dim.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOTHING: gl.constexpr = gl.constexpr(-1e30)
NO_SLOT: gl.constexpr = gl.constexpr(1 << 30)


@gluon.jit
def _first_slot(i, walk, BLOCK_N: gl.constexpr):
    """First slot of block `i` of the walk: the blocks below the limits, then those of the branches."""
    return gl.where(i < walk[0], i, i - walk[0] + walk[1]) * BLOCK_N


@gluon.jit
def _page_ids(table, i, share, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Page id of each slot of block `i`; 0 behind the share."""
    walk, ends, stop, _ = share
    slots = _first_slot(i, walk, BLOCK_N) + gl.arange(0, BLOCK_N, layout=layout)
    exists = (slots < gl.maximum(ends[0], ends[2] + 1)) & (i < stop)
    return gl.load(table + slots // PAGE, mask=exists, other=0)


@gluon.jit
def _fetch(
    i,
    pages,
    cache,
    target,
    share,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    H: gl.constexpr,
    layout: gl.constexpr,
):
    """Start to copy block `i` of keys or values; zeros where no row sees a slot."""
    walk, ends, stop, stride_slot = share
    slots = _first_slot(i, walk, BLOCK_N) + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    is_read = (slots < ends[0]) | ((slots >= ends[1]) & (slots <= ends[2]))
    physical = pages.to(gl.int32) * PAGE + slots % PAGE
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    at = physical.to(gl.int64)[:, None] * stride_slot + columns[None, :]
    async_copy.async_copy_global_to_shared(target, cache + at, mask=(is_read & (i < stop))[:, None])


@gluon.jit
def _softmax(scores, total, highest, scale_log2):
    """Weights of a block, the sum of weights so far, the maximum, and the factor of what was summed."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = gl.exp2(highest - new_highest)
    return weights, total * shrink + gl.sum(weights, 1), new_highest, shrink


@gluon.jit
def _in_order(total):
    """The same sums, with an instruction that needs them and that stays ahead of the wait that follows.

    ptxas would move the wait ahead of the softmax that is to run meanwhile, but not ahead of a volatile
    store. This one never happens: sums are not negative.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0fBF800000;"
        " @p st.volatile.shared.f32 [$1], $1; mov.b32 $0, $1; }",
        "=r,r",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _hidden(scores, i, walk, bounds, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Scores with -inf where a row does not see a slot; blocks that all rows see are left alone."""
    limits, branches, owns, low_limit = bounds
    first = _first_slot(i, walk, BLOCK_N)
    if first + BLOCK_N > low_limit:
        slots = (first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
        is_seen = (slots < limits[:, None]) | ((slots >= branches[:, None]) & (slots <= owns[:, None]))
        scores = gl.where(is_seen, scores, float("-inf"))
    return scores


@gluon.jit
def _store(
    acc,
    total,
    highest,
    o_RNH,
    partial_o,
    partial_sums,
    where,
    stride_o_row,
    stride_o_head,
    K: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    rows_layout: gl.constexpr,
    out_layout: gl.constexpr,
):
    """The output of a tile with one item, else a part: `kernel_parts.store_part` says what one holds."""
    row, count, kv_head, num_items, my_part = where
    BLOCK_M: gl.constexpr = acc.shape[0]
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, out_layout))[None, :]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, out_layout))
    in_tile = (m < count * G)[:, None]
    if num_items == 1:
        acc = acc / gl.where(total > 0, total, 1.0)[:, None]
        o = gl.convert_layout(acc.to(o_RNH.dtype.element_ty), out_layout)
        rows, heads = (row + m // G).to(gl.int64), kv_head * G + m % G
        at = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns
        gl.store(o_RNH + at, o, mask=in_tile)
    else:
        if partial_o.dtype.element_ty == gl.float16:
            largest = gl.max(gl.abs(acc), 1).to(gl.int32, bitcast=True)
            exponent = gl.minimum(gl.maximum((largest >> 23) - 127, -40), 60)
            shrink = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
            acc, total, highest = acc * shrink[:, None], total * shrink, highest + exponent.to(gl.float32)
        first = (my_part.to(gl.int64) * K + kv_head) * BLOCK_M
        r = gl.arange(0, BLOCK_M, layout=rows_layout)
        gl.store(partial_sums + (first + r) * 2, total, mask=r < count * G)
        gl.store(partial_sums + (first + r) * 2 + 1, highest, mask=r < count * G)
        part = gl.convert_layout(acc.to(partial_o.dtype.element_ty), out_layout)
        gl.store(partial_o + (first + m)[:, None] * H + columns, part, mask=in_tile)


@gluon.jit(do_not_specialize=["stride_table"])
def attend_kernel(
    q_RNH,
    k_cache_SKH,
    v_cache_SKH,
    o_RNH,
    items,
    block_table,
    limits_R,
    branch_starts_R,
    own_slots_R,
    partial_o,
    partial_sums,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_slot,
    stride_head,
    stride_o_row,
    stride_o_head,
    stride_table,
    K: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    PAGE: gl.constexpr,
    RECORD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    KEEP_Q: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One item of one KV head. KEEP_Q: queries stay in registers, so that products read keys alone."""
    dtype: gl.constexpr = q_RNH.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, H, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [num_warps, 1], [1, 0])
    slot_layout: gl.constexpr = gl.SliceLayout(1, flat)
    smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, H], dtype)

    kv_head, item = gl.program_id(0) % K, gl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    walk = gl.load(record + 3), gl.load(record + 4)
    ends = gl.load(record + 7), gl.load(record + 8), gl.load(record + 9)
    low_limit, start, stop = gl.load(record + 6), gl.load(record + 10), gl.load(record + 11)
    num_items, my_part = gl.load(record + 15), gl.load(record + 16)

    # Rows of padding see nothing, are not read, and give 0.
    num_read = gl.where(gl.load(record + 5) > 0, count * G, 0)
    r = gl.arange(0, BLOCK_M, layout=rows_layout)
    sees = r < num_read
    limits = gl.load(limits_R + row + r // G, mask=sees, other=0).to(gl.int32)
    branches = gl.load(branch_starts_R + row + r // G, mask=sees & (ends[1] < NO_SLOT), other=NO_SLOT)
    owns = gl.load(own_slots_R + row + r // G, mask=sees, other=0).to(gl.int32)
    bounds = limits, branches.to(gl.int32), owns, low_limit
    table = block_table + b.to(gl.int64) * stride_table
    share = walk, ends, stop, stride_slot
    pages = _page_ids(table, start, share, PAGE, BLOCK_N, slot_layout)
    next_pages = _page_ids(table, start + 1, share, PAGE, BLOCK_N, slot_layout)
    if PDL:
        gdc_wait()
    if count == 0:
        return

    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, flat))
    columns = gl.arange(0, H, layout=gl.SliceLayout(0, flat))
    at_q = (row + m // G).to(gl.int64) * stride_q_row + (kv_head * G + m % G) * stride_q_head
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, H], q_shared)
    async_copy.async_copy_global_to_shared(
        q_smem, q_RNH + at_q[:, None] + columns[None, :], mask=(m < num_read)[:, None]
    )
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], smem)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], smem)
    k_cache, v_cache = k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head
    # Group g holds the keys of block g and the values of the block before it.
    _fetch(start, pages, k_cache, keys.index(0), share, PAGE, BLOCK_N, H, flat)
    async_copy.commit_group()
    for g in gl.static_range(1, STAGES):
        _fetch(start + g, next_pages, k_cache, keys.index(g), share, PAGE, BLOCK_N, H, flat)
        _fetch(start + g - 1, pages, v_cache, values.index(g - 1), share, PAGE, BLOCK_N, H, flat)
        async_copy.commit_group()
        pages = next_pages
        next_pages = _page_ids(table, start + g + 1, share, PAGE, BLOCK_N, slot_layout)

    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
    acc = gl.zeros([BLOCK_M, H], gl.float32, o_layout)
    total = gl.zeros([BLOCK_M], gl.float32, rows_layout)
    highest = gl.full([BLOCK_M], NOTHING, gl.float32, rows_layout)
    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    gl.thread_barrier()
    if KEEP_Q:
        q = q_smem.load(gl.DotOperandLayout(0, s_layout, 2))
    else:
        q = q_smem
    scores = warpgroup_mma(q, keys.index(0).permute((1, 0)), zero, use_acc=False)
    scores = _hidden(scores, start, walk, bounds, BLOCK_N, s_layout)
    weights, total, highest, shrink = _softmax(scores, total, highest, scale_log2)
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    for i in range(start, stop - 1):
        n = i - start
        # What was loaded for this turn is there, and all warps are done with the turn before.
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        k_place, v_place = (n + 1) % STAGES, n % STAGES
        scores = warpgroup_mma(q, keys.index(k_place).permute((1, 0)), zero, use_acc=False, is_async=True)
        sums = warpgroup_mma(p, values.index(v_place), acc, is_async=True)
        _fetch(i + STAGES, next_pages, k_cache, keys.index(v_place), share, PAGE, BLOCK_N, H, flat)
        _fetch(
            i + STAGES - 1,
            pages,
            v_cache,
            values.index((n + STAGES - 1) % STAGES),
            share,
            PAGE,
            BLOCK_N,
            H,
            flat,
        )
        async_copy.commit_group()
        pages = next_pages
        next_pages = _page_ids(table, i + STAGES + 1, share, PAGE, BLOCK_N, slot_layout)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        scores = _hidden(scores, i + 1, walk, bounds, BLOCK_N, s_layout)
        weights, total, highest, shrink = _softmax(scores, total, highest, scale_log2)
        next_p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        total = _in_order(total)
        acc, p, next_p = warpgroup_mma_wait(0, deps=(sums, p, next_p))
        acc = acc * gl.convert_layout(shrink, out_rows)[:, None]
        p = next_p
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma(p, values.index(gl.maximum(stop - 1 - start, 0) % STAGES), acc)
    if PDL:
        gdc_launch_dependents()
    total, highest = gl.convert_layout(total, out_rows), gl.convert_layout(highest, out_rows)
    _store(
        acc,
        total,
        highest,
        o_RNH,
        partial_o,
        partial_sums,
        (row, count, kv_head, num_items, my_part),
        stride_o_row,
        stride_o_head,
        K,
        G,
        H,
        out_rows,
        flat,
    )
