"""Drafts from an earlier occurrence of a sequence's last tokens: plain torch on a CPU, one launch on a GPU.

Contract in README.md. Z lanes, L columns of the token table, B sequences, J drafts, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.sampling import DraftProbs, Drafts
from idlm.kernels.sampling.types import TUNING, ChunkShape, PlainDraftProbs, Tuning

LONGEST = 16
"""Last tokens that are compared at most: of longer matches the latest one counts."""
TILE = 1024
"""Positions that a program compares at a time."""


def look_up(
    tokens_ZL: Tensor,
    num_known_Z: Tensor,
    store: Drafts,
    *,
    lanes_B: Tensor,
    active_B: Tensor,
    minimum: int,
    drafts_ZJ: Tensor,
    layout_Z: Tensor,
    layout: int,
    tuning: Tuning = TUNING,
) -> Tensor:
    """Write the tokens after the longest match of at least `minimum` tokens into the lanes of active
    sequences as drafts, whose stored distributions give them probability 1, and `layout` into `layout_Z`.
    Returns is_found_B (bool); where it is False, nothing is written.

    `tokens_ZL`, `num_known_Z`, `lanes_B`, `drafts_ZJ`, `layout_Z` int64, `active_B` bool; `tuning`: that of
    the store."""
    assert 1 <= minimum <= LONGEST and drafts_ZJ.is_contiguous(), f"{minimum=}"
    if isinstance(store, PlainDraftProbs):
        found_B, ids_BJ = _plain(tokens_ZL, num_known_Z, lanes_B, minimum, drafts_ZJ.shape[1])
        found_B &= active_B
        lanes_b, ids_bJ = lanes_B[found_B], ids_BJ[found_B]
        drafts_ZJ[lanes_b] = ids_bJ
        layout_Z[lanes_b] = layout
        num_tokens = store.probs_ZJV.shape[2]
        store.probs_ZJV[lanes_b] = torch.nn.functional.one_hot(ids_bJ, num_tokens).double()
        return found_B
    assert isinstance(store, DraftProbs), f"{type(store)=}"
    from idlm.kernels.prompt_lookup import kernel

    found_B = torch.empty(len(lanes_B), dtype=torch.bool, device=lanes_B.device)
    shape = ChunkShape(store.logits_ZJV.shape[2], tuning)
    if len(lanes_B):
        kernel.look_up_kernel[(len(lanes_B),)](
            *(tokens_ZL, num_known_Z, store, lanes_B, active_B),
            (drafts_ZJ, layout_Z, found_B),
            *(tokens_ZL.shape[1], drafts_ZJ.shape[1], store.logits_ZJV.shape[2], shape.num_chunks),
            *(minimum, layout),
            LONGEST=LONGEST,
            TILE=TILE,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            num_warps=4,
        )
    return found_B


def _plain(
    tokens_ZL: Tensor, num_known_Z: Tensor, lanes_B: Tensor, minimum: int, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """Whether there is a match, and the drafts [B, J] if so."""
    last_B1 = num_known_Z[lanes_B, None] - 1
    tokens_BL = tokens_ZL[lanes_B]
    ends_L = torch.arange(tokens_BL.shape[1], device=lanes_B.device)
    is_same_BL = (ends_L < last_B1) & (last_B1 < tokens_BL.shape[1])
    length_BL = torch.zeros_like(tokens_BL)
    for back in range(LONGEST):
        is_same_BL &= (ends_L >= back) & (
            tokens_BL.roll(back, 1) == tokens_BL.gather(1, _inside(last_B1 - back, tokens_BL))
        )
        length_BL += is_same_BL
    key_BL = torch.where(length_BL >= minimum, length_BL * len(ends_L) + ends_L, -1)
    best_B1, end_B1 = key_BL.max(1, keepdim=True)
    drafts_J = torch.arange(num_drafts, device=lanes_B.device)
    index_BJ = end_B1 + 1 + drafts_J % (last_B1 - end_B1).clamp(min=1)
    return best_B1[:, 0] >= 0, tokens_BL.gather(1, _inside(index_BJ, tokens_BL))


def _inside(index: Tensor, tokens_BL: Tensor) -> Tensor:
    return index.clamp(min=0, max=tokens_BL.shape[1] - 1)
