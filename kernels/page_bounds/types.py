"""Where slots, pieces and pages lie. B sequences, P pages of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Slot s of sequence b is physical slot `block_table_BP[b, s // page_size] * page_size + s % page_size`
    (int64). Bounds belong to physical pieces of `piece` slots, which divides both `page_size` and `page`;
    scores to logical pages of `page` slots.
    """

    block_table_BP: Tensor
    page_size: int
    piece: int
    page: int

    def __post_init__(self) -> None:
        assert self.page_size % self.piece == 0 == self.page % self.piece, f"{self.page_size=} {self.piece=}"
