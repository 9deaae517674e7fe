"""Beginning and end of a pass in plain torch: what a CPU runs. Static shapes, no wait for a device.

B sequences, R rows, W positions of a block, Z lanes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.block_eviction.types import BlockState, FedBlocks, StartedBlocks, StateRules
from idlm.kernels.row_compaction.plain import by_row, find_index


def begin_blocks(state: BlockState, fed: FedBlocks, rules: StateRules) -> StartedBlocks:
    """See `state.begin_blocks`."""
    lanes_B = fed.lanes_B
    mine_B = (fed.rows_BW >= 0).all(dim=1) & fed.is_mask_BW.any(dim=1)
    evicts_B = mine_B & ~state.is_new_Z[lanes_B] if rules.prefills else mine_B
    mean_decoded_B = _turn(state, fed, mine_B, rules)
    ids_BW = fed.token_ids_R[fed.rows_BW.clamp(min=0)]
    frozen_BW = state.frozen_ZW[lanes_B]
    frozen_BW = frozen_BW & ((state.frozen_ids_ZW[lanes_B] == ids_BW) | ~mine_B[:, None])
    state.frozen_ZW[lanes_B] = frozen_BW
    keep_R = by_row(~(frozen_BW & mine_B[:, None]), fed.rows_BW, len(fed.slots_R), other=True)
    if rules.keeps_stored:
        stays_BW, rows_BW = _stays_stored(state, fed)
        if rules.shifted:
            # The last row predicts the first place of the next block.
            stays_BW = F.pad(stays_BW[:, :-1], (0, 1))
        keep_R &= by_row(~stays_BW, rows_BW, len(keep_R), other=True)
    return StartedBlocks(
        mine_B=mine_B, evicts_B=evicts_B, mean_decoded_B=mean_decoded_B, token_ids_BW=ids_BW, keep_R=keep_R
    )


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
    if rules.keeps_stored:
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
    """See `state.finish_blocks`."""
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
