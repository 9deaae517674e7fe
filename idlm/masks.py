"""The attention mask of training: whether query row q sees key row k (arXiv 2604.11035, 3.1, appendix E).

A training row `[x_t | x_0]` holds noisy rows (mask tokens) and clean rows of one or more packed documents.
The engine states the same rule as two ranges of KV slots per row: `kernels/paged_attention/types.py`.

Shape letters: B sequences, T rows of one packed training row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_DOC = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeta:
    """What the visibility of each row depends on; tensors [T] or [B, T], of integers except `is_noisy`.

    `doc_ids`: -1 marks padding. `positions`: position ids inside the document. `block_starts`: the position
    at which the diffusion block of a noisy row starts; ignored for clean rows. `is_noisy` (bool): True for
    x_t rows. `reach`: the last position that the row sees in its own half (noisy or clean). It is at least
    the row's own position, does not decrease along a document, and lies inside the block for a noisy row.
    None means the row's own position, which is causal."""

    doc_ids: Tensor
    positions: Tensor
    block_starts: Tensor
    is_noisy: Tensor
    reach: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {t.shape for t in (self.doc_ids, self.positions, self.block_starts, self.is_noisy)}
        shapes |= set() if self.reach is None else {self.reach.shape}
        assert len(shapes) == 1, f"{shapes=}"
        assert self.is_noisy.dtype == torch.bool, f"{self.is_noisy.dtype=}"


def dense_mask(meta: RowMeta) -> Tensor:
    """Return a bool tensor [T, T] or [B, T, T] whose entry [.., q, k] is whether row q sees row k. A
    padding row sees only itself, so that its softmax is finite, and no other row sees it."""
    doc_q, doc_k = meta.doc_ids[..., :, None], meta.doc_ids[..., None, :]
    reach_q = (meta.positions if meta.reach is None else meta.reach)[..., :, None]
    pos_k = meta.positions[..., None, :]
    start_q, start_k = meta.block_starts[..., :, None], meta.block_starts[..., None, :]
    noisy_q, noisy_k = meta.is_noisy[..., :, None], meta.is_noisy[..., None, :]
    rows = torch.arange(meta.doc_ids.shape[-1], device=meta.doc_ids.device)
    reached = pos_k <= reach_q
    noisy_to_noisy = noisy_q & noisy_k & (start_k == start_q) & reached
    noisy_to_clean = noisy_q & ~noisy_k & (pos_k < start_q)
    clean_to_clean = ~noisy_q & ~noisy_k & reached
    same_doc = (doc_q == doc_k) & (doc_q != PADDING_DOC)
    same_row = rows[:, None] == rows[None, :]
    return same_row | (same_doc & (noisy_to_noisy | noisy_to_clean | clean_to_clean))
