"""Input of attention in one pass: which rows belong to which sequence and which slots each row sees.

B sequences, R rows fed this pass, P KV pages of the longest sequence, N query heads, K KV heads, H head dim,
W positions of a block, C listed slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """Rows of a pass, all tensors int64 on one device; slots are LOGICAL slots of the row's own sequence.

    Row `r` sees `[0, limits_R[r])` and `[branch_starts_R[r], own_slots_R[r]]`, and at least one slot in all;
    in layers with windows, of the first range what is not before `first_slots_R[r]`.
    In layers with lists, a row of a listed sequence whose own slot is not before the sequence's block sees
    the list of its KV head and `[starts_B[b], limits_R[r])` instead."""

    cu_rows: torch.Tensor
    """[B + 1]; rows of sequence b are `cu_rows[b]:cu_rows[b + 1]`, which may be empty."""
    block_table: torch.Tensor
    """[B, P] page ids, padded with 0."""
    page_size: int
    own_slots_R: torch.Tensor
    limits_R: torch.Tensor
    branch_starts_R: torch.Tensor
    max_rows: int
    """Largest number of rows of one sequence."""
    usual_rows: int | None = None
    """Most sequences have no more rows than this; None: `max_rows`. Used for the choice of tiles only."""
    few_rows: int | None = None
    """Sequences with more rows may walk apart from those with at most so many, which have the tiles of a pass
    of theirs alone: prompts with decoding. None: all walk together."""
    max_slots: int
    """Largest visible logical slot of any row, plus one."""
    starts_B: torch.Tensor | None = None
    """[B] first slot of the block that each sequence is decoding."""
    listed_B: torch.Tensor | None = None
    """bool [B]; which sequences see lists. Such rows have layers with lists, others exact layers."""
    num_listed: int = 0
    """C, the width of the lists."""
    first_slots_R: torch.Tensor | None = None
    """The window's first slot of each row, may be negative; such rows have no lists."""

    def in_windows(self, window: int, positions_R: torch.Tensor) -> AttentionRows:
        """The same rows in layers where each sees `window` positions, its own the last. What lies before a
        branch is stored at its position, and positions of a branch follow one another."""
        return replace(
            self,
            first_slots_R=positions_R - (window - 1),
            branch_starts_R=torch.maximum(self.branch_starts_R, self.own_slots_R - (window - 1)),
        )


class BeforeBlock(NamedTuple):
    """Where a layer leaves the sums of its softmax over the slots before the block.

    For row r of the block of sequence b (own slot >= starts_B[b]) that sees no list, and query head n, over
    the slots below both starts_B[b] and limits_R[r]: the share of slot s is
    `exp2(scale * log2(e) * <q[r, n], k[s]> - highest_RN[r, n]) / totals_RN[r, n]`.
    Other rows, and rows without such slots, get -inf and 0."""

    highest_RN: torch.Tensor
    """float32; maximum of `scale * log2(e) * <q, k>`."""
    totals_RN: torch.Tensor
    """float32; sum of exp2 of the same less the maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Shape and dtype of the heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """dtype of queries and outputs, and of the cache unless `kv_dtype` is given."""
    kv_dtype: torch.dtype | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
