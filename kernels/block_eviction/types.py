"""Arguments and results of the selection of rows.

B sequences, W places of a block, P pages, S physical slots, K KV heads, H head dim, Z lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKeys:
    """The stored keys of each sequence's block, which begins at logical slot `starts_B` (int64).

    `keys_SKH`: one layer of a paged cache, bf16, fp16, fp32, fp64, or e4m3 with a scale per head (`scale_K`).
    Slot s of sequence b is physical slot block_table_BP[b, s // page_size] * page_size + s % page_size.
    """

    keys_SKH: Tensor
    scale_K: Tensor | None
    block_table_BP: Tensor
    page_size: int
    starts_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What a selection goes by. bool but for `rows_BW` (the row of each place, -1: not fed), `lanes_B` (both
    int64) and `mean_decoded_B` (fp64 >= 1: decoded tokens per pass).

    `is_mine_B`: sequences that may lose rows. `is_mask_BW`: masks that are fed, of which this pass may decide
    `is_maskable_BW`. `processed_ZW`, by lane: places that have keys and values in all layers.
    """

    is_mine_B: Tensor
    is_mask_BW: Tensor
    is_maskable_BW: Tensor
    rows_BW: Tensor
    lanes_B: Tensor
    processed_ZW: Tensor
    mean_decoded_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """`kept_BW` (bool): places that go on. `ends_B` (int64): how many of a block's first places they see.
    `budget_B` (int64): K of each sequence.
    """

    kept_BW: Tensor
    ends_B: Tensor
    budget_B: Tensor
