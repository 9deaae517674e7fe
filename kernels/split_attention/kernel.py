"""The Triton kernels of split attention: one forward, and a backward pass of five products per tile, or three
where clean keys need no gradient.

Every program holds one tile (queries in the forward, keys in the backward) and walks over the tiles of its
two ranges in a single loop, so that the pipeline of loads fills once. Tiles lie anywhere in a range, not on a
grid; a tile that would reach into padding is moved back to end at the last real row, and the rows that it
shares with its neighbour are masked. So padding is never read. Contract in README.md.

B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim, G = N / K."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _limits(tile):
    """Union and intersection of the ranges of a tile of rows."""
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def forward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_o,
    lse_BNT,
    across_start_BT,
    across_end_BT,
    own_start_BT,
    own_until_BT,
    tiles_BI8,
    order,
    num_rows_B,
    T,
    num_tiles,
    scale_log2,
    N: tl.constexpr,
    G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Output and base-2 log-sum-exp of one tile of queries of one head."""
    head = tl.program_id(0) % N
    index = tl.program_id(0) // N
    flat = tl.load(order + index // SPLITS)
    b = flat // num_tiles
    row = ((flat % num_tiles) * SPLITS + index % SPLITS) * BLOCK_Q
    num_rows = tl.load(num_rows_B + b)
    low_a, high_a, full_low_a, full_high_a = _limits(tiles_BI8 + flat * 8)
    low_o, high_o, full_low_o, full_high_o = _limits(tiles_BI8 + flat * 8 + 4)
    num_across = tl.cdiv(high_a - low_a, BLOCK_K)
    num_own = tl.cdiv(high_o - low_o, BLOCK_K)

    rows = row + tl.arange(0, BLOCK_Q)
    inside = rows < T
    across_start = tl.load(across_start_BT + b * T + rows, mask=inside, other=0)
    across_end = tl.load(across_end_BT + b * T + rows, mask=inside, other=0)
    own_start = tl.load(own_start_BT + b * T + rows, mask=inside, other=0)
    own_until = tl.load(own_until_BT + b * T + rows, mask=inside, other=0)
    q = desc_q.load([b, head, row, 0]).reshape(BLOCK_Q, BLOCK_H)
    acc = tl.zeros([BLOCK_Q, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    # Finite, so that a row that sees nothing in its first tiles gives exp2(-inf - high) and not NaN.
    high = tl.full([BLOCK_Q], -1e30, dtype=tl.float32)

    for i in tl.range(0, num_across + num_own, num_stages=STAGES):
        is_own = i >= num_across
        nominal = tl.where(is_own, low_o + (i - num_across) * BLOCK_K, low_a + i * BLOCK_K)
        first = tl.minimum(nominal, num_rows - BLOCK_K)
        full_low = tl.where(is_own, full_low_o, full_low_a)
        full_high = tl.where(is_own, full_high_o, full_high_a)
        k = desc_k.load([b, head // G, first, 0]).reshape(BLOCK_K, BLOCK_H)
        scores = tl.dot(q, k.T)
        if (nominal < full_low) | (nominal + BLOCK_K > full_high):
            keys = first + tl.arange(0, BLOCK_K)
            start = tl.maximum(tl.where(is_own, own_start, across_start), nominal)
            end = tl.where(is_own, own_until, across_end)
            scores = tl.where(
                (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None]), scores, float("-inf")
            )
        highest = tl.maximum(high, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - highest[:, None])
        shrink = tl.exp2(high - highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = desc_v.load([b, head // G, first, 0]).reshape(BLOCK_K, BLOCK_H)
        acc = tl.dot(weights.to(v.dtype), v, acc)
        high = highest

    is_real = rows < num_rows
    total = tl.where(is_real, total, 1.0)
    output = tl.where(is_real[:, None], acc / total[:, None], 0.0)
    desc_o.store([b, head, row, 0], output.to(desc_o.dtype).reshape(1, 1, BLOCK_Q, BLOCK_H))
    lse = tl.where(is_real, high + tl.log2(total), 0.0)
    tl.store(lse_BNT + (b.to(tl.int64) * N + head) * T + rows, lse, mask=inside)


@triton.jit
def prepare_kernel(
    o_BTNH,
    do_BTNH,
    do_stride_b,
    do_stride_t,
    do_stride_n,
    delta_BNT,
    dq_BTNH,
    T,
    N: tl.constexpr,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """delta = <o, do> of each row and head, and a zero dq to accumulate into."""
    b, head = (tl.program_id(1) // N).to(tl.int64), tl.program_id(1) % N
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_H)
    mask = (rows < T)[:, None] & (columns < H)[None, :]
    at = ((b * T + rows[:, None]) * N + head) * H + columns[None, :]
    at_do = b * do_stride_b + rows[:, None].to(tl.int64) * do_stride_t + head * do_stride_n + columns[None, :]
    o = tl.load(o_BTNH + at, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_BTNH + at_do, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_BNT + (b * N + head) * T + rows, tl.sum(o * do, 1), mask=rows < T)
    tl.store(dq_BTNH + at, tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32), mask=mask)


@triton.jit
def backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    dq_BTNH,
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
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BULK: tl.constexpr,
):
    """dk and dv of one tile of keys, summed over its share of the query heads of one KV head; adds to dq."""
    K: tl.constexpr = N // G
    HEADS: tl.constexpr = G // PARTS
    index = tl.program_id(0) % (K * PARTS)
    kv_head, part = index // PARTS, index % PARTS
    tile_index = tl.program_id(0) // (K * PARTS)
    flat = tl.load(order + tile_index // SPLITS)
    b = flat // num_tiles
    row = ((flat % num_tiles) * SPLITS + tile_index % SPLITS) * BLOCK_K
    num_rows = tl.load(num_rows_B + b)
    low_a, high_a, full_low_a, full_high_a = _limits(tiles_BI8 + flat * 8)
    low_o, high_o, full_low_o, full_high_o = _limits(tiles_BI8 + flat * 8 + 4)
    num_across = tl.cdiv(high_a - low_a, BLOCK_Q)
    num_own = tl.cdiv(high_o - low_o, BLOCK_Q)

    first_key = tl.minimum(row, num_rows - BLOCK_K)
    keys = first_key + tl.arange(0, BLOCK_K)
    is_mine = (keys >= row) & (keys < num_rows)
    moved = first_key < row
    seen_start = tl.load(seen_start_BT + b * T + keys, mask=is_mine, other=0)
    seen_end = tl.load(seen_end_BT + b * T + keys, mask=is_mine, other=0)
    own_from = tl.load(own_from_BT + b * T + keys, mask=is_mine, other=0)
    own_end = tl.load(own_end_BT + b * T + keys, mask=is_mine, other=0)
    k = desc_k.load([b, kv_head, first_key, 0]).reshape(BLOCK_K, BLOCK_H)
    v = desc_v.load([b, kv_head, first_key, 0]).reshape(BLOCK_K, BLOCK_H)
    dk = tl.zeros([BLOCK_K, BLOCK_H], dtype=tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_H], dtype=tl.float32)

    for i in tl.range(0, (num_across + num_own) * HEADS, num_stages=STAGES):
        step = i // HEADS
        head = kv_head * G + part * HEADS + i % HEADS
        is_own = step >= num_across
        nominal = tl.where(is_own, low_o + (step - num_across) * BLOCK_Q, low_a + step * BLOCK_Q)
        first = tl.minimum(nominal, num_rows - BLOCK_Q)
        full_low = tl.where(is_own, full_low_o, full_low_a)
        full_high = tl.where(is_own, full_high_o, full_high_a)
        queries = first + tl.arange(0, BLOCK_Q)
        q = desc_q.load([b, head, first, 0]).reshape(BLOCK_Q, BLOCK_H)
        at = (b.to(tl.int64) * N + head) * T + queries
        lse = tl.load(lse_BNT + at, mask=queries >= 0, other=0.0)
        weights = tl.exp2(tl.dot(k, q.T) * scale_log2 - lse[None, :])
        if (nominal < full_low) | (nominal + BLOCK_Q > full_high) | moved:
            start = tl.maximum(tl.where(is_own, own_from, seen_start), nominal)
            end = tl.where(is_own, own_end, seen_end)
            sees = (queries[None, :] >= start[:, None]) & (queries[None, :] < end[:, None])
            weights = tl.where(sees, weights, 0.0)
        do = desc_do.load([b, head, first, 0]).reshape(BLOCK_Q, BLOCK_H)
        dv = tl.dot(weights.to(do.dtype), do, dv)
        delta = tl.load(delta_BNT + at, mask=queries >= 0, other=0.0)
        dscores = weights * (tl.dot(v, do.T) - delta[None, :])
        dscores = dscores.to(q.dtype)
        dk = tl.dot(dscores, q, dk)
        dq = tl.dot(dscores.T, k)
        if BULK:
            desc_dq.atomic_add([BLOCK_Q + b * T + first, head * H], dq)
        else:
            columns = tl.arange(0, BLOCK_H)
            at_dq = ((b.to(tl.int64) * T + queries[:, None]) * N + head) * H + columns[None, :]
            tl.atomic_add(
                dq_BTNH + at_dq, dq, mask=(queries >= 0)[:, None] & (columns < H)[None, :], sem="relaxed"
            )

    columns = tl.arange(0, BLOCK_H)
    base = ((part * B + b).to(tl.int64) * T * K + kv_head) * H
    at = base + keys[:, None].to(tl.int64) * (K * H) + columns[None, :]
    mask = is_mine[:, None] & (columns < H)[None, :]
    tl.store(dk_PBTKH + at, (dk * scale).to(dk_PBTKH.dtype.element_ty), mask=mask)
    tl.store(dv_PBTKH + at, dv.to(dv_PBTKH.dtype.element_ty), mask=mask)
    if row + BLOCK_K > num_rows:
        rows = row + tl.arange(0, BLOCK_K)
        zero = tl.zeros([BLOCK_K, BLOCK_H], dtype=dk_PBTKH.dtype.element_ty)
        at = base + rows[:, None].to(tl.int64) * (K * H) + columns[None, :]
        mask = ((rows >= num_rows) & (rows < T))[:, None] & (columns < H)[None, :]
        tl.store(dk_PBTKH + at, zero, mask=mask)
        tl.store(dv_PBTKH + at, zero, mask=mask)


@triton.jit
def query_gradient_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    dq_BTNH,
    lse_BNT,
    delta_BNT,
    across_start_BT,
    across_end_BT,
    tiles_BI8,
    order,
    num_rows_B,
    T,
    num_tiles,
    scale,
    scale_log2,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of one tile of queries of one head from the keys across, which need no gradient: three products for
    a tile of scores, and no additions in memory. Adds what `dq_BTNH` has of the own half."""
    head = tl.program_id(0) % N
    index = tl.program_id(0) // N
    flat = tl.load(order + index // SPLITS)
    b = flat // num_tiles
    row = ((flat % num_tiles) * SPLITS + index % SPLITS) * BLOCK_Q
    num_rows = tl.load(num_rows_B + b)
    low, high, full_low, full_high = _limits(tiles_BI8 + flat * 8)

    rows = row + tl.arange(0, BLOCK_Q)
    inside = rows < T
    start = tl.load(across_start_BT + b * T + rows, mask=inside, other=0)
    end = tl.load(across_end_BT + b * T + rows, mask=inside, other=0)
    at = (b.to(tl.int64) * N + head) * T + rows
    lse = tl.load(lse_BNT + at, mask=inside, other=0.0)
    delta = tl.load(delta_BNT + at, mask=inside, other=0.0)
    q = desc_q.load([b, head, row, 0]).reshape(BLOCK_Q, BLOCK_H)
    do = desc_do.load([b, head, row, 0]).reshape(BLOCK_Q, BLOCK_H)
    dq = tl.zeros([BLOCK_Q, BLOCK_H], dtype=tl.float32)

    for i in tl.range(0, tl.cdiv(high - low, BLOCK_K), num_stages=STAGES):
        nominal = low + i * BLOCK_K
        first = tl.minimum(nominal, num_rows - BLOCK_K)
        k = desc_k.load([b, head // G, first, 0]).reshape(BLOCK_K, BLOCK_H)
        v = desc_v.load([b, head // G, first, 0]).reshape(BLOCK_K, BLOCK_H)
        weights = tl.exp2(tl.dot(q, k.T) * scale_log2 - lse[:, None])
        dscores = weights * (tl.dot(do, v.T) - delta[:, None])
        if (nominal < full_low) | (nominal + BLOCK_K > full_high):
            keys = first + tl.arange(0, BLOCK_K)
            sees = (keys[None, :] >= tl.maximum(start, nominal)[:, None]) & (keys[None, :] < end[:, None])
            dscores = tl.where(sees, dscores, 0.0)
        dq = tl.dot(dscores.to(k.dtype), k, dq)

    columns = tl.arange(0, BLOCK_H)
    at_dq = ((b.to(tl.int64) * T + rows[:, None]) * N + head) * H + columns[None, :]
    dq += tl.load(dq_BTNH + at_dq, mask=inside[:, None] & (columns < H)[None, :], other=0.0)
    desc_dq.store([b, head, row, 0], (dq * scale).to(desc_dq.dtype).reshape(1, 1, BLOCK_Q, BLOCK_H))


@triton.jit
def finish_kernel(parts_PX, total_X, X, scale, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of float32 parts, scaled and rounded."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_PX + part * X + at, mask=at < X, other=0.0)
    tl.store(total_X + at, (total * scale).to(total_X.dtype.element_ty), mask=at < X)
