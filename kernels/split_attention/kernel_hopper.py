"""The backward pass for Hopper (sm_90) in Gluon: products overlap with the arithmetic between them.

Walk, masks and results equal those of `kernel.backward_kernel`, in which Triton waits after every product.
Here the scores of a tile and <do, v> start together, and later products run while the next values are
prepared. Gluon is the lower level of Triton and cannot be interpreted: tests/gpu checks this file,
tests/kernels only compiles it.

B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim, G = N / K."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@builtin
def _add_to_global(descriptor, coordinates, source, _semantic=None):
    """Bulk addition of a tile of shared memory to global memory, which Gluon does not expose yet."""
    values = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, values, source.handle)


@gluon.jit
def _index(i, walk, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Step i: whether it is in the own half, its head, its nominal and its actual first query."""
    _, num_across, low_a, low_o, num_rows, _, head0 = walk
    step = i // HEADS
    is_own = step >= num_across
    nominal = gl.where(is_own, low_o + (step - num_across) * BLOCK_Q, low_a + step * BLOCK_Q)
    return is_own, head0 + i % HEADS, nominal, gl.minimum(nominal, num_rows - BLOCK_Q)


@gluon.jit
def _fetch(i, walk, descriptors, q_smem, do_smem, bars, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Start the copies of step i, if there is one."""
    _is_own, head, _nominal, first = _index(i, walk, HEADS, BLOCK_Q)
    slot = i % q_smem.shape[0]
    is_there = i < walk[0]
    at = [walk[5], head, first, 0]
    q_bar, do_bar = bars[0].index(slot), bars[1].index(slot)
    mbarrier.expect(q_bar, descriptors[0].block_type.nbytes, pred=is_there)
    tma.async_copy_global_to_shared(descriptors[0], at, q_bar, q_smem.index(slot), pred=is_there)
    mbarrier.expect(do_bar, descriptors[1].block_type.nbytes, pred=is_there)
    tma.async_copy_global_to_shared(descriptors[1], at, do_bar, do_smem.index(slot), pred=is_there)


@gluon.jit
def _statistics(
    i,
    walk,
    lse_BNT,
    delta_BNT,
    T,
    N: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    rows: gl.constexpr,
):
    """Log-sum-exp and delta of the queries of step i; `rows` is their layout."""
    _is_own, head, _nominal, first = _index(i, walk, HEADS, BLOCK_Q)
    queries = first + gl.arange(0, BLOCK_Q, layout=rows)
    at = (walk[5] * N + head).to(gl.int64) * T + queries
    mask = (queries >= 0) & (i < walk[0])
    return gl.load(lse_BNT + at, mask=mask, other=0.0), gl.load(delta_BNT + at, mask=mask, other=0.0)


@gluon.jit
def _barriers(NUM: gl.constexpr):
    """One barrier for each place of a tile."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(bars.index(index), count=1)
    return bars


@gluon.jit
def _limits(tile):
    """Union and intersection of the ranges of a tile of rows."""
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)


@gluon.jit
def _key_ranges(seen_start_BT, seen_end_BT, own_from_BT, own_end_BT, at, mask):
    """Ranges of queries that see the keys; empty for keys that belong to another tile."""
    start = gl.load(seen_start_BT + at, mask=mask, other=0)
    end = gl.load(seen_end_BT + at, mask=mask, other=0)
    own_from = gl.load(own_from_BT + at, mask=mask, other=0)
    return start, end, own_from, gl.load(own_end_BT + at, mask=mask, other=0)


@gluon.jit
def _masked(weights, first, nominal, start, end, layout: gl.constexpr):
    """Zero where a query lies outside the range of a key, or before its tile's nominal start."""
    queries = (first + gl.arange(0, weights.shape[1], layout=layout))[None, :]
    low = gl.maximum(start, nominal)
    return gl.where((queries >= low[:, None]) & (queries < end[:, None]), weights, 0.0)


@gluon.jit
def _store(
    gradient, out_PBTKH, base, first_key, row, num_rows, T, stride, H: gl.constexpr, layout: gl.constexpr
):
    """Store the rows that belong to this tile, and zeros for those of padding."""
    BLOCK_K: gl.constexpr = gradient.shape[0]
    columns = gl.arange(0, gradient.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    rows = first_key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))[:, None]
    dtype: gl.constexpr = out_PBTKH.dtype.element_ty
    at = base + rows.to(gl.int64) * stride + columns
    gl.store(out_PBTKH + at, gradient.to(dtype), mask=(rows >= row) & (rows < num_rows) & (columns < H))
    if row + BLOCK_K > num_rows:
        rows = row + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))[:, None]
        at = base + rows.to(gl.int64) * stride + columns
        mask = (rows >= num_rows) & (rows < T) & (columns < H)
        gl.store(out_PBTKH + at, gl.zeros([BLOCK_K, gradient.shape[1]], dtype, layout), mask=mask)


@gluon.jit
def backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    dk_PBTKH,
    dv_PBTKH,
    lse_BNT,
    delta_BNT,
    seen_start_BT,
    seen_end_BT,
    own_from_BT,
    own_end_BT,
    tiles_BI8,
    order,
    num_rows_B,
    B,
    T,
    num_tiles,
    scale,
    scale_log2,
    N: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dk and dv of one tile of keys, summed over its share of the query heads of one KV head; adds to dq."""
    K: gl.constexpr = N // G
    HEADS: gl.constexpr = G // PARTS
    dtype: gl.constexpr = desc_q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_Q, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_H, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, num_warps // 4], [16, BLOCK_H * 4 // num_warps, 16]
    )
    a_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    tile_smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_H], dtype)
    s_smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    flat_smem: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    index = gl.program_id(0) % (K * PARTS)
    kv_head = index // PARTS
    part = index % PARTS
    head0 = kv_head * G + part * HEADS
    tile_index = gl.program_id(0) // (K * PARTS)
    flat = gl.load(order + tile_index // SPLITS)
    b = flat // num_tiles
    row = ((flat % num_tiles) * SPLITS + tile_index % SPLITS) * BLOCK_K
    num_rows = gl.load(num_rows_B + b)
    low_a, high_a, full_low_a, full_high_a = _limits(tiles_BI8 + flat * 8)
    low_o, high_o, full_low_o, full_high_o = _limits(tiles_BI8 + flat * 8 + 4)
    num_across = (high_a - low_a + BLOCK_Q - 1) // BLOCK_Q
    end = (num_across + (high_o - low_o + BLOCK_Q - 1) // BLOCK_Q) * HEADS
    walk = (end, num_across, low_a, low_o, num_rows, b, head0)

    k_smems = gl.allocate_shared_memory(dtype, [1, BLOCK_K, BLOCK_H], tile_smem)
    v_smems = gl.allocate_shared_memory(dtype, [1, BLOCK_K, BLOCK_H], tile_smem)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, BLOCK_H], tile_smem)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, BLOCK_H], tile_smem)
    ds_smems = gl.allocate_shared_memory(dtype, [1, BLOCK_K, BLOCK_Q], s_smem)
    dq_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_Q, BLOCK_H], desc_dq.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], flat_smem)
    delta_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], flat_smem)
    kv_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_bar, count=1)
    bars = _barriers(STAGES), _barriers(STAGES)

    first_key = gl.minimum(row, num_rows - BLOCK_K)
    mbarrier.expect(kv_bar, desc_k.block_type.nbytes + desc_v.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_k, [b, kv_head, first_key, 0], kv_bar, k_smems.index(0))
    tma.async_copy_global_to_shared(desc_v, [b, kv_head, first_key, 0], kv_bar, v_smems.index(0))
    descriptors = (desc_q, desc_do)
    for stage in gl.static_range(STAGES - 1):
        _fetch(stage, walk, descriptors, q_smem, do_smem, bars, HEADS, BLOCK_Q)
    lse_row, delta_row = _statistics(0, walk, lse_BNT, delta_BNT, T, N, HEADS, BLOCK_Q, row_layout)
    lse_smem.index(0).store(lse_row)
    delta_smem.index(0).store(delta_row)

    keys = first_key + gl.arange(0, BLOCK_K, layout=key_layout)
    is_mine = (keys >= row) & (keys < num_rows)
    seen_start, seen_end, own_from, own_end = _key_ranges(
        seen_start_BT, seen_end_BT, own_from_BT, own_end_BT, b * T + keys, is_mine
    )
    zero_s = gl.zeros([BLOCK_K, BLOCK_Q], gl.float32, s_layout)
    zero_dq = gl.zeros([BLOCK_Q, BLOCK_H], gl.float32, dq_layout)
    dk = warpgroup_mma_init(gl.zeros([BLOCK_K, BLOCK_H], gl.float32, kv_layout))
    dv = gl.zeros([BLOCK_K, BLOCK_H], gl.float32, kv_layout)
    mbarrier.wait(kv_bar, 0)

    for i in range(end):
        # Always 0, which is hidden from the compiler: it would hold the addresses of constant tiles for the
        # whole loop, 50 registers too many.
        nil = i >> 30
        k_smem = k_smems.index(nil)
        v_smem = v_smems.index(nil)
        ds_smem = ds_smems.index(nil)
        slot = i % STAGES
        phase = (i // STAGES) & 1
        is_own, head, nominal, first = _index(i, walk, HEADS, BLOCK_Q)
        q = q_smem.index(slot)
        do = do_smem.index(slot)
        mbarrier.wait(bars[0].index(slot), phase)
        scores = warpgroup_mma(k_smem, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        mbarrier.wait(bars[1].index(slot), phase)
        products = warpgroup_mma(v_smem, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        lse_row, delta_row = _statistics(i + 1, walk, lse_BNT, delta_BNT, T, N, HEADS, BLOCK_Q, row_layout)
        scores, dk_done = warpgroup_mma_wait(1, deps=(scores, dk))
        lse = lse_smem.index(i % 2).load(query_layout)
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        full_low = gl.where(is_own, full_low_o, full_low_a)
        full_high = gl.where(is_own, full_high_o, full_high_a)
        if (nominal < full_low) | (nominal + BLOCK_Q > full_high) | (first_key < row):
            start, stop = gl.where(is_own, own_from, seen_start), gl.where(is_own, own_end, seen_end)
            weights = _masked(weights, first, nominal, start, stop, query_layout)
        dv_next = warpgroup_mma(gl.convert_layout(weights.to(dtype), a_layout), do, dv, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        delta = delta_smem.index(i % 2).load(query_layout)
        dscores = (weights * (products - delta[None, :])).to(dtype)
        ds_smem.store(dscores)
        lse_smem.index((i + 1) % 2).store(lse_row)
        delta_smem.index((i + 1) % 2).store(delta_row)
        fence_async_shared()
        dq = warpgroup_mma(ds_smem.permute((1, 0)), k_smem, zero_dq, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(dscores, a_layout), q, dk_done, is_async=True)
        # All warps have passed the barrier before dq, so none still reads the buffer of the previous step.
        _fetch(i + STAGES - 1, walk, descriptors, q_smem, do_smem, bars, HEADS, BLOCK_Q)
        dq, dv = warpgroup_mma_wait(1, deps=(dq, dv_next))
        tma.store_wait(0)
        dq_smem.store(dq)
        fence_async_shared()
        _add_to_global(desc_dq, [BLOCK_Q + b * T + first, head * H], dq_smem)

    dk = warpgroup_mma_wait(0, deps=(dk,))
    tma.store_wait(0)
    base = ((part * B + b).to(gl.int64) * T * K + kv_head) * H
    _store(dk * scale, dk_PBTKH, base, first_key, row, num_rows, T, K * H, H, kv_layout)
    _store(dv, dv_PBTKH, base, first_key, row, num_rows, T, K * H, H, kv_layout)
