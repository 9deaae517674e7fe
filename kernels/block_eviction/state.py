"""What a lane remembers of its block between passes: the beginning and the end of a pass, a launch each.
Contract in README.md; the references define it.

B sequences, R rows, W positions of a block, Z lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.block_eviction import plain_state
from idlm.kernels.block_eviction.types import BlockState, FedBlocks, StartedBlocks, StateRules


def begin_blocks(state: BlockState, fed: FedBlocks, rules: StateRules) -> StartedBlocks:
    """Begin the state of new blocks, and find the rows of tokens that are frozen: they are not computed. An
    edited token thaws."""
    if not runs_kernels(fed.slots_R):
        return plain_state.begin_blocks(state, fed, rules)
    import triton

    from idlm.kernels.block_eviction.kernel_state import begin_kernel

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
        plain_state.finish_blocks(state, fed, started, rules, rows_BW=rows_BW, waits_B=waits_B)
        return
    import triton

    from idlm.kernels.block_eviction.kernel_state import finish_kernel

    num_sequences, size = rows_BW.shape
    assert rows_BW.is_contiguous() and waits_B.is_contiguous()
    options = {"RULES": rules, "SIZE": size, "BLOCK_W": triton.next_power_of_2(size), "num_warps": 1}
    finish_kernel[(num_sequences,)](state, fed, started, rows_BW, waits_B, **options)
