"""Who may see whom, once: the dense reference and the engine's two ranges per row.

A training row `[x_t | x_0]` holds noisy rows (mask tokens) and clean rows of one or more packed documents. It
is not an attention kernel: it only answers "may query row q see key row k". Paper arXiv 2604.11035, section
3.1 and appendix E.

Shape letters: B sequences, T rows of one packed training row, R rows fed in this pass, S KV slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_DOC = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeta:
    """What visibility depends on, per row. All tensors are [T] or [B, T].

    `doc_ids`: int, -1 marks padding. `positions`: int, position ids inside the document. `block_starts`: int,
    position at which the diffusion block of a noisy row starts; never read for clean rows. `is_noisy`: bool,
    True for x_t rows. `reach`: int, the last position that the row sees of its own half: at least its own,
    not descending along a document, that of a noisy row inside its block; None: its own, which is causal.
    """

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
    """Bool [T, T] or [B, T, T]; entry [.., q, k] says whether row q sees row k.

    Padding rows see only themselves, so that their softmax is finite, and no other row sees them.
    """
    doc_q, doc_k = meta.doc_ids[..., :, None], meta.doc_ids[..., None, :]
    reach_q = (meta.positions if meta.reach is None else meta.reach)[..., :, None]
    pos_k = meta.positions[..., None, :]
    start_q, start_k = meta.block_starts[..., :, None], meta.block_starts[..., None, :]
    noisy_q, noisy_k = meta.is_noisy[..., :, None], meta.is_noisy[..., None, :]
    rows = torch.arange(meta.doc_ids.shape[-1], device=meta.doc_ids.device)
    return _rule(
        doc_q, doc_k, reach_q, pos_k, start_q, start_k, noisy_q, noisy_k, rows[:, None] == rows[None, :]
    )


def visible_slots(limit_R: Tensor, branch_start_R: Tensor, slot_R: Tensor, num_slots: int) -> Tensor:
    """Bool [R, S]: row r sees the slots [0, limit) and [branch_start, own slot] of its own sequence.

    Plain causal rows have `limit == slot + 1`; then the branch range adds nothing whatever its start.
    """
    slots_S = torch.arange(num_slots, device=limit_R.device)
    below_limit = slots_S[None, :] < limit_R[:, None]
    own_branch = (slots_S[None, :] >= branch_start_R[:, None]) & (slots_S[None, :] <= slot_R[:, None])
    return below_limit | own_branch


def _rule(
    doc_q: Tensor,
    doc_k: Tensor,
    reach_q: Tensor,
    pos_k: Tensor,
    start_q: Tensor,
    start_k: Tensor,
    noisy_q: Tensor,
    noisy_k: Tensor,
    same_row: Tensor,
) -> Tensor:
    reached = pos_k <= reach_q
    noisy_to_noisy = noisy_q & noisy_k & (start_k == start_q) & reached
    noisy_to_clean = noisy_q & ~noisy_k & (pos_k < start_q)
    clean_to_clean = ~noisy_q & ~noisy_k & reached
    same_doc = (doc_q == doc_k) & (doc_q != PADDING_DOC)
    return same_row | (same_doc & (noisy_to_noisy | noisy_to_clean | clean_to_clean))
