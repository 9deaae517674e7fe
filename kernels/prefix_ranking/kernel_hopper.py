"""The kernel of attention shares for Hopper (sm_90) in Gluon: products overlap with exponentials.

Tiles, ranges and results equal those of `kernel.share_kernel` for queries of one part, in which Triton waits
after every product. Here the scores of the next tile are computed while those of this one become shares.
Gluon cannot be interpreted: tests/gpu checks this file, tests/kernels only compiles it.

L layers, R rows of a pass, B sequences, W places, S physical KV slots, N query heads, K KV heads, G = N / K,
H head dim.
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


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _page_ids(table, tile, start, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Page id of each slot of a tile; 0 from the block on."""
    slots = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(table + slots // PAGE, mask=slots < start, other=0)


@gluon.jit
def _fetch(tile, end, pages, keys, target, start, stride_slot, PAGE: gl.constexpr, layout: gl.constexpr):
    """Start to copy the keys of a tile; zeros from the block on."""
    BLOCK_N: gl.constexpr = target.shape[0]
    slots = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, target.shape[1], layout=gl.SliceLayout(0, layout))
    physical = pages.to(gl.int32) * PAGE + slots % PAGE
    at = physical.to(gl.int64)[:, None] * stride_slot + columns[None, :]
    mask = ((slots < start) & (tile < end))[:, None]
    async_copy.async_copy_global_to_shared(target, keys + at, mask=mask)


@gluon.jit
def _store_shares(shares, scores, factor, b_offset, tile, start, rows_layout: gl.constexpr):
    """Store the shares of a tile from scores [BLOCK_N, BLOCK_M]."""
    BLOCK_N: gl.constexpr = scores.shape[0]
    slots = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=rows_layout)
    b_share = gl.sum(gl.exp2(scores * factor - b_offset[None, :]), 1)
    gl.store(shares + slots, b_share, mask=slots < start)


@gluon.jit(do_not_specialize=["num_layers", "num_sequences", "num_slots", "stride_table"])
def share_kernel(
    q_LRNH, max_LRN, sum_LRN, keys_LSKH, block_table, rows_BW, starts_B, ranks_B, shares_LBKS,
    scale_log2, num_layers, num_sequences, num_slots,
    stride_q_layer, stride_q_row, stride_q_head, stride_sums, stride_layer, stride_slot, stride_head,
    stride_table,
    W: gl.constexpr, K: gl.constexpr, G: gl.constexpr, H: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_B: gl.constexpr, BLOCK_W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Shares of the slots before the blocks of sequences that rank; nothing else is written."""
    dtype: gl.constexpr = q_LRNH.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [num_warps, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, H], dtype)

    kv_head, worker = gl.program_id(0) % K, (gl.program_id(0) // K).to(gl.int64)
    num_workers = gl.num_programs(0) // K
    o_sequence = gl.arange(0, BLOCK_B, layout=line)
    m_sequence = o_sequence < num_sequences
    b_ranks = gl.load(ranks_B + o_sequence, mask=m_sequence, other=0) != 0
    b_starts = gl.load(starts_B + o_sequence, mask=m_sequence & b_ranks, other=0).to(gl.int32)
    b_ends = gl.associative_scan((b_starts + BLOCK_N - 1) // BLOCK_N, 0, _add)
    tiles = gl.max(b_ends, 0)
    at, stop = worker * tiles * num_layers // num_workers, (worker + 1) * tiles * num_layers // num_workers
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, H], q_shared)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, H], k_shared)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    while at < stop:
        layer = at // tiles
        within = (at - layer * tiles).to(gl.int32)
        is_past = b_ends <= within
        b = gl.sum(is_past.to(gl.int32), 0)
        before = gl.max(gl.where(is_past, b_ends, 0), 0)
        start = gl.load(starts_B + b).to(gl.int32)
        first = within - before
        end = gl.minimum((start + BLOCK_N - 1) // BLOCK_N, (first + stop - at).to(gl.int32))
        table = block_table + b.to(gl.int64) * stride_table
        keys = keys_LSKH + layer * stride_layer + kv_head * stride_head
        shares = shares_LBKS + ((layer * num_sequences + b) * K + kv_head) * num_slots

        # Copies and products of the range before are done, in all warps.
        async_copy.wait_group(0)
        gl.thread_barrier()
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, flat))
        columns = gl.arange(0, H, layout=gl.SliceLayout(0, flat))
        row = gl.load(rows_BW + b * W + m // G, mask=m < W * G, other=-1).to(gl.int64)
        at_q = row * stride_q_row + (kv_head * G + m % G) * stride_q_head
        async_copy.async_copy_global_to_shared(
            q_smem,
            q_LRNH + layer * stride_q_layer + at_q[:, None] + columns[None, :],
            mask=(row >= 0)[:, None],
        )
        pages = _page_ids(table, first, start, PAGE, BLOCK_N, gl.SliceLayout(1, flat))
        for stage in gl.static_range(STAGES - 1):
            _fetch(first + stage, end, pages, keys, k_smem.index(stage), start, stride_slot, PAGE, flat)
            async_copy.commit_group()
            pages = _page_ids(table, first + stage + 1, start, PAGE, BLOCK_N, gl.SliceLayout(1, flat))

        o_place = gl.arange(0, BLOCK_W, layout=line)
        fed = gl.load(rows_BW + b * W + o_place, mask=o_place < W, other=-1) >= 0
        num_fed = gl.sum(fed.to(gl.int32), 0)
        o_m = gl.arange(0, BLOCK_M, layout=query_layout)
        m_row = gl.load(rows_BW + b * W + o_m // G, mask=o_m < W * G, other=-1).to(gl.int64)
        at_sum = layer * stride_sums + m_row * (K * G) + kv_head * G + o_m % G
        highest = gl.load(max_LRN + at_sum, mask=m_row >= 0, other=float("inf"))
        total = gl.load(sum_LRN + at_sum, mask=m_row >= 0, other=1.0)
        b_offset = highest + gl.log2(total * (gl.maximum(num_fed, 1) * G).to(gl.float32))

        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        scores = warpgroup_mma(k_smem.index(0), q_smem.permute((1, 0)), zero, use_acc=False)
        for tile in range(first, end - 1):
            n = tile - first
            # The place of the tile before is free: its product is done in all warps.
            _fetch(
                *(tile + STAGES - 1, end, pages, keys, k_smem.index((n + STAGES - 1) % STAGES)),
                *(start, stride_slot, PAGE, flat),
            )
            async_copy.commit_group()
            pages = _page_ids(table, tile + STAGES, start, PAGE, BLOCK_N, gl.SliceLayout(1, flat))
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            gl.thread_barrier()
            next_scores = warpgroup_mma(
                k_smem.index((n + 1) % STAGES), q_smem.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            # A volatile store: ptxas does not move the wait ahead of it.
            _store_shares(shares, scores, scale_log2, b_offset, tile, start, rows_layout)
            scores = warpgroup_mma_wait(0, deps=(next_scores,))
        _store_shares(shares, scores, scale_log2, b_offset, end - 1, start, rows_layout)
        at += end - first
