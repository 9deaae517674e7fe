"""Arguments of the ops on bounds of keys.

B sequences, I pieces, R rows, W positions of a block, P pages of the engine, C pieces that exist, S physical
KV slots, K KV heads, H head dim."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSlots:
    """Where the slots of sequences are: `block_table_BP` (int64) has their pages of `page_size` slots."""

    block_table_BP: Tensor
    page_size: int

    def physical(self, slots_bX: Tensor, sequences_b: Tensor) -> Tensor:
        """Physical slots [b, X] of slots that the sequences own; for other slots, any that exist."""
        slots_bX = slots_bX.clamp(0, self.block_table_BP.shape[1] * self.page_size - 1)
        pages_bX = self.block_table_BP[sequences_b[:, None], slots_bX // self.page_size]
        return pages_bX * self.page_size + slots_bX % self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Least and largest key per channel [C + 1, K, H] of pieces of `size` slots, which divides the pages of
    the engine. The last piece takes what is to be dropped."""

    min_CKH: Tensor
    largest_CKH: Tensor
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Pieces of which a pass stores keys: `slots_I` (int64) is the first slot that it stores, of sequence
    `sequences_I`; where not `is_piece_I` (bool) there is none."""

    sequences_I: Tensor
    slots_I: Tensor
    is_piece_I: Tensor
