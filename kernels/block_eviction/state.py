"""What a lane remembers of its block between passes: the beginning and the end of a pass, a launch each.
Contract in README.md; `begin_reference` and `finish_reference` define it.

B sequences, R rows, W places of a block, Z lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.block_eviction import plain_state

STABILITIES = ("off", "plain", "neighbour")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """By lane. Which block the state belongs to, and of the one before it (`starts_Z`, `before_starts_Z`, the
    first slot; -1: none); which places are frozen with which tokens, there and in the block before; which
    have keys and values in all layers. `counts_Z4`: masks at the block's beginning, its passes; decoded
    tokens and passes of earlier blocks. `is_new_Z`: nothing of the sequence has been computed.
    """

    starts_Z: Tensor
    before_starts_Z: Tensor
    counts_Z4: Tensor
    is_new_Z: Tensor
    frozen_ZW: Tensor
    processed_ZW: Tensor
    before_frozen_ZW: Tensor
    frozen_ids_ZW: Tensor
    before_ids_ZW: Tensor

    @classmethod
    def empty(cls, num_lanes: int, size: int, device: torch.device) -> BlockState:
        """Nothing is known of any lane."""
        ids, flags = (
            torch.zeros(num, num_lanes, size, dtype=dtype, device=device)
            for num, dtype in ((2, torch.int64), (3, torch.bool))
        )
        starts = torch.full((2, num_lanes), -1, dtype=torch.int64, device=device)
        return cls(
            starts_Z=starts[0],
            before_starts_Z=starts[1],
            counts_Z4=torch.zeros(num_lanes, 4, dtype=torch.int64, device=device),
            is_new_Z=torch.ones(num_lanes, dtype=torch.bool, device=device),
            frozen_ZW=flags[0],
            processed_ZW=flags[1],
            before_frozen_ZW=flags[2],
            frozen_ids_ZW=ids[0],
            before_ids_ZW=ids[1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBlocks:
    """What a pass feeds: `rows_BW` (int64, -1: none) and `is_mask_BW` (bool) of the block that begins at slot
    `starts_B`; all rows of sequence b, of ascending slots without a gap, are cu_rows_B1[b] :
    cu_rows_B1[b + 1], and those before the block end where it begins, or at the end of an earlier block.
    Lanes of sequences are distinct, but for sequences that feed nothing.
    """

    lanes_B: Tensor
    starts_B: Tensor
    rows_BW: Tensor
    is_mask_BW: Tensor
    cu_rows_B1: Tensor
    slots_R: Tensor
    token_ids_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """`of_request`: decoded tokens are averaged over all passes of the request. `keeps_stored`: frozen tokens
    of the block before keep what is stored of them; `shifted`: but not its last one. `prefills`: the first
    pass of a request drops nothing and does not count. `stability`: one of `STABILITIES`.
    """

    of_request: bool = False
    keeps_stored: bool = False
    shifted: bool = False
    prefills: bool = False
    stability: str = "neighbour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """`mine_B` (bool): blocks that are fed whole and have masks; rows may be dropped of `evicts_B` (bool).
    `mean_decoded_B` (fp64): tokens decoded per pass, at least 1. `token_ids_BW`: those fed, anything where
    there is no row. `keep_R` (bool): rows that are computed; it says nothing of rows other than those of
    active blocks and, if stored ones are kept, the last W before them.
    """

    mine_B: Tensor
    evicts_B: Tensor
    mean_decoded_B: Tensor
    token_ids_BW: Tensor
    keep_R: Tensor


def begin_blocks(state: BlockState, fed: FedBlocks, rules: StateRules) -> Begun:
    """Begin the state of new blocks, and find the rows of tokens that are frozen: they are not computed. An
    edited token thaws.
    """
    if not runs_kernels(fed.slots_R):
        return plain_state.begin_blocks(state, fed, rules)
    import triton

    from idlm.kernels.block_eviction.kernel_state import begin_kernel

    (num_sequences, size), device = fed.rows_BW.shape, fed.slots_R.device
    flags_IB = torch.empty(2, num_sequences, dtype=torch.bool, device=device)
    begun = Begun(
        mine_B=flags_IB[0],
        evicts_B=flags_IB[1],
        mean_decoded_B=torch.empty(num_sequences, dtype=torch.float64, device=device),
        token_ids_BW=torch.empty_like(fed.rows_BW),
        keep_R=torch.empty(len(fed.slots_R), dtype=torch.bool, device=device),
    )
    columns = (fed.lanes_B, fed.starts_B, fed.rows_BW, fed.is_mask_BW, fed.cu_rows_B1, fed.slots_R)
    columns = (*columns, fed.token_ids_R)
    assert all(column.is_contiguous() for column in columns), f"{[column.stride() for column in columns]=}"
    begin_kernel[(num_sequences,)](
        *(state.starts_Z, state.before_starts_Z, state.counts_Z4, state.is_new_Z, state.frozen_ZW),
        *(state.processed_ZW, state.before_frozen_ZW, state.frozen_ids_ZW, state.before_ids_ZW),
        *columns,
        *(begun.mine_B, begun.evicts_B, begun.mean_decoded_B, begun.token_ids_BW, begun.keep_R),
        OF_REQUEST=rules.of_request,
        KEEPS_STORED=rules.keeps_stored,
        SHIFTED=rules.shifted,
        PREFILLS=rules.prefills,
        SIZE=size,
        BLOCK_W=triton.next_power_of_2(size),
        num_warps=1,
    )
    return begun


def finish_blocks(
    state: BlockState, fed: FedBlocks, begun: Begun, rules: StateRules, *, rows_BW: Tensor, waits_B: Tensor
) -> None:
    """Places with a row (`rows_BW`, after all drops) have keys and values in all layers now; decoded ones
    freeze. Nothing changes for `waits_B` (bool).
    """
    if not runs_kernels(rows_BW):
        plain_state.finish_blocks(state, fed, begun, rules, rows_BW=rows_BW, waits_B=waits_B)
        return
    import triton

    from idlm.kernels.block_eviction.kernel_state import finish_kernel

    num_sequences, size = rows_BW.shape
    assert rows_BW.is_contiguous() and waits_B.is_contiguous()
    finish_kernel[(num_sequences,)](
        *(state.counts_Z4, state.is_new_Z, state.frozen_ZW, state.processed_ZW, state.frozen_ids_ZW),
        *(fed.lanes_B, rows_BW, fed.is_mask_BW, waits_B, begun.mine_B, begun.evicts_B, begun.token_ids_BW),
        PREFILLS=rules.prefills,
        FREEZES=rules.stability != "off",
        BY_NEIGHBOUR=rules.stability == "neighbour",
        SIZE=size,
        BLOCK_W=triton.next_power_of_2(size),
        num_warps=1,
    )
