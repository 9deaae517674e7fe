"""Arguments and results of the selection of rows, and what lanes store between passes.

B sequences, R rows, W positions of a block, P pages, S physical slots, K KV heads, H head dim, Z lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class BlockKeys(NamedTuple):
    """The stored keys of each sequence's block, which begins at logical slot `starts_B` (int64).

    `keys_SKH`: one layer of a paged cache, bf16, fp16, fp32, fp64, or e4m3 with a scale per head (`scale_K`).
    Slot s of sequence b is physical slot block_table_BP[b, s // page_size] * page_size + s % page_size."""

    keys_SKH: Tensor
    scale_K: Tensor | None
    block_table_BP: Tensor
    page_size: int
    starts_B: Tensor


class Candidates(NamedTuple):
    """What a selection goes by. bool but for `rows_BW` (the row of each position, -1: not fed), `lanes_B`
    (both int64) and `mean_decoded_B` (fp64 >= 1: decoded tokens per pass).

    `is_mine_B`: sequences that may lose rows. `is_mask_BW`: masks that are fed, of which this pass may decide
    `is_maskable_BW`. `processed_ZW`, by lane: positions that have keys and values in all layers."""

    is_mine_B: Tensor
    is_mask_BW: Tensor
    is_maskable_BW: Tensor
    rows_BW: Tensor
    lanes_B: Tensor
    processed_ZW: Tensor
    mean_decoded_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """`retained_BW` (bool): positions that remain. `ends_B` (int64): how many of a block's first positions
    they see. `budget_B` (int64): K of each sequence."""

    retained_BW: Tensor
    ends_B: Tensor
    budget_B: Tensor


class BlockState(NamedTuple):
    """By lane. Which block the state belongs to, and of the one before it (`starts_Z`, `before_starts_Z`, the
    first slot; -1: none); which positions are frozen with which tokens, there and in the block before; which
    have keys and values in all layers. `counts_Z4`: masks at the block's beginning, its passes; decoded
    tokens and passes of earlier blocks. `is_new_Z`: nothing of the sequence has been computed."""

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


class FedBlocks(NamedTuple):
    """What a pass feeds: `rows_BW` (int64, -1: none) and `is_mask_BW` (bool) of the block that begins at slot
    `starts_B`; all rows of sequence b, of ascending slots without a gap, are cu_rows_B1[b] :
    cu_rows_B1[b + 1], and those before the block end where it begins, or at the end of an earlier block.
    Lanes of sequences are distinct, but for sequences that feed nothing."""

    lanes_B: Tensor
    starts_B: Tensor
    rows_BW: Tensor
    is_mask_BW: Tensor
    cu_rows_B1: Tensor
    slots_R: Tensor
    token_ids_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """`of_request`: decoded tokens are averaged over all passes of the request. `retains_stored`: frozen
    tokens of the block before retain what is stored of them; `shifted`: but not its last one. `prefills`: the
    first pass of a request drops nothing and does not count. `stability`: "off", "plain", "neighbour"."""

    of_request: bool = False
    retains_stored: bool = False
    shifted: bool = False
    prefills: bool = False
    stability: str = "neighbour"


class StartedBlocks(NamedTuple):
    """`mine_B` (bool): blocks that are fed whole and have masks; rows may be dropped of `evicts_B` (bool).
    `mean_decoded_B` (fp64): tokens decoded per pass, at least 1. `token_ids_BW`: those fed, anything where
    there is no row. `keep_R` (bool): rows that are computed; it is undefined at rows other than those of
    active blocks and, if stored ones are retained, the last W before them."""

    mine_B: Tensor
    evicts_B: Tensor
    mean_decoded_B: Tensor
    token_ids_BW: Tensor
    keep_R: Tensor
