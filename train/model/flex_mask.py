"""FlexAttention's block-sparse mask, built from the ranges of `idlm.kernels.split_attention.visibility`.

`create_block_mask` evaluates all T x T pairs; this counts, per row and key block, how many keys of the block
its two ranges cover. The result is the same, block for block.

B packed rows, T rows of one packed row, J key blocks of one packed row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from idlm.kernels.split_attention import Visibility

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_ROWS = 128


def flex_predicate(see: Visibility) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The ranges as a `mask_mod(b, h, q_idx, kv_idx)`; padding rows see nothing."""
    start_BT, end_BT = see.across_start_BT, see.across_end_BT
    own_start_BT, own_until_BT = see.own_start_BT, see.own_until_BT

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        across = (kv_idx >= start_BT[b, q_idx]) & (kv_idx < end_BT[b, q_idx])
        return across | ((kv_idx >= own_start_BT[b, q_idx]) & (kv_idx < own_until_BT[b, q_idx]))

    return mask_mod


def flex_block_mask(see: Visibility, *, block_rows: int = BLOCK_ROWS) -> BlockMask:
    """The BlockMask of all heads; fully visible blocks run no predicate."""
    from torch.nn.attention.flex_attention import BlockMask

    num_rows = see.own_start_BT.shape[1]
    starts_J = torch.arange(0, num_rows, block_rows, device=see.own_start_BT.device)
    covered_BTJ = _overlap(see.across_start_BT, see.across_end_BT, starts_J, block_rows)
    covered_BTJ += _overlap(see.own_start_BT, see.own_until_BT, starts_J, block_rows)
    padded = torch.nn.functional.pad(covered_BTJ, (0, 0, 0, -num_rows % block_rows))
    tiles_BIRJ = padded.unflatten(1, (-1, block_rows))
    seen_BIJ = (tiles_BIRJ > 0).any(dim=2)
    full_BIJ = (tiles_BIRJ == block_rows).all(dim=2)
    return BlockMask.from_kv_blocks(
        *_table(seen_BIJ & ~full_BIJ),
        *_table(full_BIJ),
        BLOCK_SIZE=block_rows,
        mask_mod=flex_predicate(see),
        seq_lengths=(num_rows, num_rows),
    )


def _overlap(start_BT: Tensor, end_BT: Tensor, starts_J: Tensor, block_rows: int) -> Tensor:
    """Int [B, T, J]: how many keys of each block lie in `[start, end)`."""
    low = torch.maximum(start_BT[..., None], starts_J)
    high = torch.minimum(end_BT[..., None], starts_J + block_rows)
    return (high - low).clamp(min=0)


def _table(wanted_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [B, 1, I] and indices [B, 1, I, J], wanted blocks first and ascending."""
    indices = wanted_BIJ.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    return wanted_BIJ.sum(dim=2, dtype=torch.int32)[:, None], indices[:, None].int()
