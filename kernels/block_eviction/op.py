"""How much attention the positions of a block get from each other, which rows remain, and what a lane
stores of its block between passes. Nothing waits for the device. Contract in README.md.

R rows, B sequences, W positions of a block, P parts of a sum, N query heads, K KV heads, H head dim, Z
lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import rounds_as_written, runs_kernels
from idlm.kernels.block_eviction import plain
from idlm.kernels.block_eviction.types import (
    BlockKeys,
    BlockState,
    Candidates,
    FedBlocks,
    Selected,
    StartedBlocks,
    StateRules,
)

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
        return plain.block_importance(
            q_RNH, rows_BW, keys, is_query_BW=is_query_BW, is_key_BW=is_key_BW, scale=scale
        )
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


def select_positions(
    first_BPW: Tensor, second_BPW: Tensor, of: Candidates, *, alpha: float, sees_processed: bool = True
) -> Selected:
    """The positions that remain after the second of two layers, by what they gained from the first to the
    second (FOCUS, section 4 and algorithm 1).

    `first_BPW`, `second_BPW`: `block_importance` of both. A sequence that has no more masks than its budget,
    or is not `is_mine_B`, retains every position that is fed and sees its whole block. `sees_processed`:
    positions that were processed before are seen even right of the last one that remains."""
    if not runs_kernels(first_BPW) or first_BPW.dtype == torch.float64:
        return plain.select_positions(first_BPW, second_BPW, of, alpha=alpha, sees_processed=sees_processed)
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


def begin_blocks(state: BlockState, fed: FedBlocks, rules: StateRules) -> StartedBlocks:
    """Begin the state of new blocks, and locate the rows of tokens that are frozen: they are not computed. An
    edited token thaws."""
    if not runs_kernels(fed.slots_R):
        return plain.begin_blocks(state, fed, rules)
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
        plain.finish_blocks(state, fed, started, rules, rows_BW=rows_BW, waits_B=waits_B)
        return
    import triton

    from idlm.kernels.block_eviction.kernel import finish_kernel

    num_sequences, size = rows_BW.shape
    assert rows_BW.is_contiguous() and waits_B.is_contiguous()
    options = {"RULES": rules, "SIZE": size, "BLOCK_W": triton.next_power_of_2(size), "num_warps": 1}
    finish_kernel[(num_sequences,)](state, fed, started, rows_BW, waits_B, **options)
