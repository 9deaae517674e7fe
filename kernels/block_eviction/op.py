"""How much attention the positions of a block get from each other, which rows remain, and what a lane
stores of its block between passes: kernels on a GPU, else plain torch, in fp32 (fp64 from fp64). Nothing
waits for the device. Contract in README.md.

R rows, B sequences, W positions of a block, P parts of a sum, N query heads, K KV heads, H head dim, Z
lanes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import FP8, read_slots, rounds_as_written, runs_kernels
from idlm.kernels.block_eviction.types import (
    BlockKeys,
    BlockState,
    Candidates,
    FedBlocks,
    Selected,
    StartedBlocks,
    StateRules,
)
from idlm.kernels.row_compaction import by_row, find_index, ranks

MIN_DOT = 16


def block_importance(
    q_RNH: Tensor, rows_BW: Tensor, keys: BlockKeys, *, is_query_BW: Tensor, is_key_BW: Tensor, scale: float
) -> Tensor:
    """The attention that each position of a block gets from the block's queries, in parts [B, P, W] (fp32;
    fp64 from fp64) whose sum over P it is; 0 where `is_key_BW` is false (FOCUS, equations 2 and 15).

    `q_RNH` (rotated) is contiguous in H; `rows_BW` int64: the row of each position; `is_query_BW` and
    `is_key_BW` bool: the positions that count, queries only where there is a row. The largest score of
    neighbours counts, neighbours being adjacent keys. Rows and slots of other positions are not read."""
    if not runs_kernels(q_RNH) or q_RNH.dtype == torch.float64:
        return plain_importance(q_RNH, rows_BW, keys, is_query_BW, is_key_BW, scale)
    import triton

    from idlm.kernels.block_eviction.kernel import importance_kernel

    (num_sequences, size), (_, num_heads, head_dim) = rows_BW.shape, q_RNH.shape
    cache_SKH = keys.keys_SKH
    num_kv_heads = cache_SKH.shape[1]
    assert q_RNH.stride(2) == 1 and cache_SKH.stride(2) == 1, f"{q_RNH.stride()=} {cache_SKH.stride()=}"
    assert rows_BW.is_contiguous() and is_query_BW.is_contiguous() and is_key_BW.is_contiguous()
    assert keys.block_table_BP.stride(1) == 1, f"{keys.block_table_BP.stride()=}"
    parts_BPW = torch.empty(num_sequences, num_kv_heads, size, dtype=torch.float32, device=q_RNH.device)
    importance_kernel[(num_sequences, num_kv_heads)](
        *(q_RNH, rows_BW, keys, is_query_BW, is_key_BW, parts_BPW),
        (*q_RNH.stride()[:2], *cache_SKH.stride()[:2], keys.block_table_BP.stride(0)),
        *(keys.block_table_BP.shape[1] * keys.page_size - 1, scale),
        PAGE=keys.page_size,
        SIZE=size,
        HEAD_DIM=head_dim,
        GROUP=num_heads // num_kv_heads,
        BLOCK_W=max(MIN_DOT, triton.next_power_of_2(size)),
        BLOCK_H=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        num_warps=4,
    )
    return parts_BPW


def plain_importance(
    q_RNH: Tensor, rows_BW: Tensor, keys: BlockKeys, is_query_BW: Tensor, is_key_BW: Tensor, scale: float
) -> Tensor:
    """`block_importance` in torch ops: one part, [B, 1, W]."""
    wide = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
    q_BWNH = torch.where(is_query_BW[:, :, None, None], q_RNH[rows_BW.clamp(min=0)].to(wide), 0.0)
    # Keys move to the front, in order.
    order_BW = (~is_key_BW).to(torch.uint8).argsort(dim=1, stable=True)
    is_key_BW = is_key_BW.gather(1, order_BW)
    k_BWKH = torch.where(is_key_BW[:, :, None, None], _read(keys, order_BW).to(wide), 0.0)
    k_BWNH = k_BWKH.repeat_interleave(q_BWNH.shape[2] // k_BWKH.shape[2], dim=2)
    scores_BNWW = q_BWNH.transpose(1, 2) @ k_BWNH.permute(0, 2, 3, 1) * scale
    minimum = torch.finfo(torch.float32).min
    scores_BNWW = scores_BNWW.masked_fill(~is_key_BW[:, None, None], minimum)
    padded = F.pad(scores_BNWW, (1, 1), value=minimum)
    pooled_BNWW = torch.maximum(torch.maximum(padded[..., :-2], scores_BNWW), padded[..., 2:])
    pooled_BNWW = pooled_BNWW.masked_fill(~is_key_BW[:, None, None], float("-inf"))
    # The softmax of a sequence without keys is NaN.
    weights_BNWW = pooled_BNWW.softmax(dim=-1).nan_to_num(0.0) * is_query_BW[:, None, :, None]
    found_BW = weights_BNWW.sum(dim=(1, 2))
    return torch.zeros_like(found_BW).scatter(1, order_BW, found_BW)[:, None]


def _read(keys: BlockKeys, positions_BW: Tensor) -> Tensor:
    """Keys [B, W, K, H] of positions."""
    last = keys.block_table_BP.shape[1] * keys.page_size - 1
    slots_BW = (keys.starts_B[:, None] + positions_BW).clamp(0, last)
    physical_BW = keys.block_table_BP.gather(1, slots_BW // keys.page_size) * keys.page_size
    physical_BW = physical_BW + slots_BW % keys.page_size
    read_BWKH = read_slots(keys.keys_SKH, physical_BW)
    if read_BWKH.dtype != FP8:
        return read_BWKH
    return read_BWKH.float() if keys.scale_K is None else read_BWKH.float() * keys.scale_K[:, None]


def select_positions(
    first_BPW: Tensor, second_BPW: Tensor, of: Candidates, *, alpha: float, sees_processed: bool = True
) -> Selected:
    """The positions that remain after the second of two layers, by what they gained from the first to the
    second (FOCUS, section 4 and algorithm 1).

    `first_BPW`, `second_BPW`: `block_importance` of both. A sequence that has no more masks than its budget,
    or is not `is_mine_B`, retains every position that is fed and sees its whole block. `sees_processed`:
    positions that were processed before are seen even right of the last one that remains."""
    if not runs_kernels(first_BPW) or first_BPW.dtype == torch.float64:
        deltas_BW, masked_BW = second_BPW.sum(dim=1) - first_BPW.sum(dim=1), of.is_mask_BW
        fed_BW, processed_BW = of.rows_BW >= 0, of.processed_ZW[of.lanes_B]
        budget_B = budgets(deltas_BW, masked_BW, of.mean_decoded_B, alpha=alpha)
        evicts_B = of.is_mine_B & (masked_BW.sum(dim=1) > budget_B)
        is_maskable_BW = of.is_maskable_BW & masked_BW
        chosen_BW = is_maskable_BW & (ranks(deltas_BW, is_maskable_BW) < budget_B[:, None])
        context_BW = with_context(chosen_BW, masked_BW, fed_BW, processed_BW)
        retained_BW = torch.where(evicts_B[:, None], context_BW, fed_BW)
        size = masked_BW.shape[1]
        index_W = torch.arange(size, device=masked_BW.device)
        seen_BW = retained_BW | processed_BW if sees_processed else retained_BW
        ends_B = torch.where(seen_BW, index_W + 1, 0).amax(dim=1)
        return Selected(
            retained_BW=retained_BW, ends_B=torch.where(evicts_B, ends_B, size), budget_B=budget_B
        )
    import triton

    from idlm.kernels.block_eviction.kernel import select_kernel

    num_sequences, num_parts, size = first_BPW.shape
    assert all(column.is_contiguous() for column in of), f"{[column.stride() for column in of]=}"
    retained_BW = torch.empty(num_sequences, size, dtype=torch.bool, device=first_BPW.device)
    numbers_IB = torch.empty(2, num_sequences, dtype=torch.int64, device=first_BPW.device)
    select_kernel[(num_sequences,)](
        *(first_BPW, second_BPW, of, retained_BW, numbers_IB, num_sequences),
        ALPHA=alpha,
        SEES_PROCESSED=sees_processed,
        PARTS=num_parts,
        SIZE=size,
        BLOCK_P=triton.next_power_of_2(num_parts),
        BLOCK_W=triton.next_power_of_2(size),
        num_warps=1 if size <= 16 else 4,
        **rounds_as_written(),
    )
    return Selected(retained_BW=retained_BW, ends_B=numbers_IB[0], budget_B=numbers_IB[1])


def budgets(deltas_BW: Tensor, masked_BW: Tensor, mean_decoded_B: Tensor, *, alpha: float) -> Tensor:
    """Return K of each sequence, int64 [B] (equations 4 and 5, with mean + std of the masks' gains as
    threshold). `mean_decoded_B` is fp64, so that its multiples round as they do on paper."""
    size = masked_BW.shape[1]
    count_B1 = masked_BW.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B1 = torch.where(masked_BW, deltas_BW, 0.0).sum(dim=1, keepdim=True) / count_B1
    squares_BW = torch.where(masked_BW, (deltas_BW - mean_B1) ** 2, 0.0)
    std_B1 = (squares_BW.sum(dim=1, keepdim=True) / count_B1).sqrt()
    num_strong_B = (masked_BW & (deltas_BW >= mean_B1 + std_B1)).sum(dim=1)
    by_history_B = (alpha * mean_decoded_B).ceil().clamp(max=size).long()
    return torch.maximum(by_history_B, num_strong_B)


def with_context(chosen_BW: Tensor, masked_BW: Tensor, fed_BW: Tensor, processed_BW: Tensor) -> Tensor:
    """Return the positions that remain, bool [B, W]: the chosen masks, decoded tokens that are fed, the
    predecessor of each chosen mask, and placeholders, i.e. masks to the left of any of these that have no
    keys and values yet."""
    index_W = torch.arange(masked_BW.shape[1], device=masked_BW.device)
    retained_BW = chosen_BW | (fed_BW & ~masked_BW)
    retained_BW |= masked_BW & F.pad(chosen_BW[:, 1:], (0, 1))
    last_B1 = torch.where(retained_BW, index_W, -1).amax(dim=1, keepdim=True)
    return retained_BW | (masked_BW & ~processed_BW & (index_W < last_B1))


def begin_blocks(state: BlockState, fed: FedBlocks, rules: StateRules) -> StartedBlocks:
    """Begin the state of new blocks, and locate the rows of tokens that are frozen: they are not computed. An
    edited token thaws."""
    if not runs_kernels(fed.slots_R):
        lanes_B = fed.lanes_B
        mine_B = (fed.rows_BW >= 0).all(dim=1) & fed.is_mask_BW.any(dim=1)
        evicts_B = mine_B & ~state.is_new_Z[lanes_B] if rules.prefills else mine_B
        mean_decoded_B = _turn(state, fed, mine_B, rules)
        ids_BW = fed.token_ids_R[fed.rows_BW.clamp(min=0)]
        frozen_BW = state.frozen_ZW[lanes_B]
        frozen_BW = frozen_BW & ((state.frozen_ids_ZW[lanes_B] == ids_BW) | ~mine_B[:, None])
        state.frozen_ZW[lanes_B] = frozen_BW
        keep_R = by_row(~(frozen_BW & mine_B[:, None]), fed.rows_BW, len(fed.slots_R), other=True)
        if rules.retains_stored:
            stays_BW, rows_BW = _stays_stored(state, fed)
            if rules.shifted:
                # The last row predicts the first position of the next block.
                stays_BW = F.pad(stays_BW[:, :-1], (0, 1))
            keep_R &= by_row(~stays_BW, rows_BW, len(keep_R), other=True)
        return StartedBlocks(
            mine_B=mine_B,
            evicts_B=evicts_B,
            mean_decoded_B=mean_decoded_B,
            token_ids_BW=ids_BW,
            keep_R=keep_R,
        )
    import triton

    from idlm.kernels.block_eviction.kernel import begin_kernel

    (num_sequences, size), device = fed.rows_BW.shape, fed.slots_R.device
    flags_IB = torch.empty(2, num_sequences, dtype=torch.bool, device=device)
    started = StartedBlocks(
        mine_B=flags_IB[0],
        evicts_B=flags_IB[1],
        mean_decoded_B=torch.empty(num_sequences, dtype=torch.float64, device=device),
        token_ids_BW=torch.empty_like(fed.rows_BW),
        keep_R=torch.empty(len(fed.slots_R), dtype=torch.bool, device=device),
    )
    assert all(column.is_contiguous() for column in fed), f"{[column.stride() for column in fed]=}"
    begin_kernel[(num_sequences,)](
        state, fed, started, RULES=rules, SIZE=size, BLOCK_W=triton.next_power_of_2(size), num_warps=1
    )
    return started


def _turn(state: BlockState, fed: FedBlocks, mine_B: Tensor, rules: StateRules) -> Tensor:
    """Begin the state of new blocks; all masks of the block before are decided by then. Returns the average
    number of tokens decoded per pass; 1 before the first pass."""
    lanes_B, new_B = fed.lanes_B, mine_B & (state.starts_Z[fed.lanes_B] != fed.starts_B)
    num_masks_B, num_passes_B, decoded_B, earlier_B = state.counts_Z4[lanes_B].unbind(dim=1)
    decoded_B = decoded_B + torch.where(new_B & (num_passes_B > 0), num_masks_B, 0)
    earlier_B = earlier_B + torch.where(new_B, num_passes_B, 0)
    num_passes_B = torch.where(new_B, 0, num_passes_B)
    # What passes that do not count have decided does not count either.
    begins_B, num_left_B = mine_B & (num_passes_B == 0), fed.is_mask_BW.sum(dim=1)
    num_masks_B = torch.where(begins_B, num_left_B, num_masks_B)
    state.counts_Z4[lanes_B] = torch.stack((num_masks_B, num_passes_B, decoded_B, earlier_B), dim=1)
    if rules.retains_stored:
        for now, before in (
            (state.starts_Z, state.before_starts_Z),
            (state.frozen_ZW, state.before_frozen_ZW),
            (state.frozen_ids_ZW, state.before_ids_ZW),
        ):
            is_new = new_B if now.ndim == 1 else new_B[:, None]
            before[lanes_B] = torch.where(is_new, now[lanes_B], before[lanes_B])
    for flags_ZW in (state.frozen_ZW, state.processed_ZW):
        flags_ZW[lanes_B] &= ~new_B[:, None]
    state.starts_Z[lanes_B] = torch.where(new_B, fed.starts_B, state.starts_Z[lanes_B])
    sum_B = num_masks_B - num_left_B
    if rules.of_request:
        sum_B, num_passes_B = sum_B + decoded_B, num_passes_B + earlier_B
    return (sum_B.double() / num_passes_B.clamp(min=1)).clamp(min=1.0)


def _stays_stored(state: BlockState, fed: FedBlocks) -> tuple[Tensor, Tensor]:
    """Which positions [B, W] of the block before the active one are frozen with the tokens that are fed
    there, and their rows. Where nothing of the active block was decided, that is still the block in work."""
    lanes_B, size = fed.lanes_B, fed.rows_BW.shape[1]
    starts_B = fed.starts_B - size
    rows_BW, _ = find_index(fed.cu_rows_B1, fed.slots_R, None, starts_B, size)
    in_work_B, is_before_B = state.starts_Z[lanes_B] == starts_B, state.before_starts_Z[lanes_B] == starts_B
    in_work_B1 = in_work_B[:, None]
    frozen_BW = torch.where(in_work_B1, state.frozen_ZW[lanes_B], state.before_frozen_ZW[lanes_B])
    ids_BW = torch.where(in_work_B1, state.frozen_ids_ZW[lanes_B], state.before_ids_ZW[lanes_B])
    is_same_BW = ids_BW == fed.token_ids_R[rows_BW.clamp(min=0)]
    return frozen_BW & is_same_BW & (in_work_B | is_before_B)[:, None] & (rows_BW >= 0), rows_BW


def finish_blocks(
    state: BlockState,
    fed: FedBlocks,
    started: StartedBlocks,
    rules: StateRules,
    *,
    rows_BW: Tensor,
    waits_B: Tensor,
) -> None:
    """Positions with a row (`rows_BW`, after all drops) have keys and values in all layers now; decoded ones
    freeze. Nothing changes for `waits_B` (bool)."""
    if not runs_kernels(rows_BW):
        lanes_B, mine_B = fed.lanes_B, started.mine_B & ~waits_B
        mine_B1 = mine_B[:, None]
        state.processed_ZW[lanes_B] |= (rows_BW >= 0) & mine_B1
        state.counts_Z4[lanes_B, 1] += mine_B & started.evicts_B
        if rules.prefills:
            state.is_new_Z[lanes_B] &= ~mine_B
        if rules.stability == "off":
            return
        frozen_BW = ~fed.is_mask_BW & mine_B1
        if rules.stability == "neighbour":
            frozen_BW &= F.pad(~fed.is_mask_BW[:, 1:], (0, 1), value=True)
        state.frozen_ZW[lanes_B] |= frozen_BW
        ids_ZW = state.frozen_ids_ZW
        ids_ZW[lanes_B] = torch.where(mine_B1, started.token_ids_BW, ids_ZW[lanes_B])
        return
    import triton

    from idlm.kernels.block_eviction.kernel import finish_kernel

    num_sequences, size = rows_BW.shape
    assert rows_BW.is_contiguous() and waits_B.is_contiguous()
    options = {"RULES": rules, "SIZE": size, "BLOCK_W": triton.next_power_of_2(size), "num_warps": 1}
    finish_kernel[(num_sequences,)](state, fed, started, rows_BW, waits_B, **options)
