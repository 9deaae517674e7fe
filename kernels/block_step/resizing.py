"""Edits that delete a position of a block or put a mask before one (LLaDA2.2).

A row may predict `delete_id`: its position leaves the block, the others move up, and masks fill the end. Or
`split_id`: a mask is put before what the position held, and the block's end is cut off. The block keeps its
size, and its fixed tokens their positions. Masks that came in so are new ones, the others original ones.
A pass decides as many masks more than its quota as there are new ones, so that original ones get fewer. The
`max_edit_passes`-th pass that begins without an original one is the last, as is any pass after block size +
`max_edit_passes`: it decides all masks and predicts neither token.
Read off public implementations of the released decoder: sgl-project/sglang, pull request 31773, and
FLX-OSS/FluxServe, `decoders/llada/levenshtein.py`, which count late passes differently; as the former here.
Departures: the MASK is never predicted; a block that has had the same tokens before is left to these limits,
where both pick another token for one position.
Shapes: B sequences, W positions of a block, Z lanes, V vocabulary, X wanted rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the positions of blocks hold: tokens, which of them are decided, and which masks are new."""

    tokens_BW: Tensor
    is_decided_BW: Tensor
    is_new_BW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """`is_new_ZW` (bool): new masks. `num_late_Z` int64: passes over the block that began without an original
    mask."""

    delete_id: int
    split_id: int
    max_edit_passes: int
    never_S: Tensor
    is_new_ZW: Tensor
    num_late_Z: Tensor

    @classmethod
    def empty(
        cls, ids: tuple[int, ...], max_edit_passes: int, *, num_lanes: int, size: int, device: torch.device
    ) -> Resizing:
        """Lanes without new masks. `ids`: delete and split."""
        delete_id, split_id = ids
        return cls(
            delete_id=delete_id,
            split_id=split_id,
            max_edit_passes=max_edit_passes,
            never_S=torch.tensor(ids, device=device),
            is_new_ZW=torch.zeros(num_lanes, size, dtype=torch.bool, device=device),
            num_late_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
        )

    def reset(self, lanes_B: Tensor) -> None:
        """Clear the blocks of these lanes."""
        self.is_new_ZW.index_fill_(0, lanes_B, False)
        self.num_late_Z.index_fill_(0, lanes_B, 0)

    def num_late(self, lanes_B: Tensor, is_mask_BW: Tensor) -> Tensor:
        """Late passes over the block, with this one, [B]. `is_mask_BW` (bool): all its masks."""
        has_original_B = (is_mask_BW & ~self.is_new_ZW[lanes_B]).any(-1)
        return self.num_late_Z[lanes_B] + (~has_original_B).long()

    def is_last(self, lanes_B: Tensor, is_mask_BW: Tensor, num_passes_B: Tensor) -> Tensor:
        """Whether this pass must leave a whole block, bool [B], after `num_passes_B` passes over it."""
        is_late_B = self.num_late(lanes_B, is_mask_BW) >= self.max_edit_passes
        return is_late_B | (num_passes_B + 1 >= is_mask_BW.shape[1] + self.max_edit_passes)

    @torch.inference_mode()
    def forbid(self, logits_XV: Tensor, is_forbidden_X: Tensor) -> None:
        """Take both tokens out of some rows' predictions, in place."""
        minimum = torch.finfo(logits_XV.dtype).min
        saved_XS = logits_XV.index_select(1, self.never_S).masked_fill(is_forbidden_X[:, None], minimum)
        logits_XV.index_copy_(1, self.never_S, saved_XS)

    def apply(self, held: Held, written_BW: Tensor, proposed_BW: Tensor) -> Held:
        """The blocks after `proposed_BW` was written at the positions `written_BW` (bool)."""
        size, device = written_BW.shape[1], written_BW.device
        deletes_BW = written_BW & (proposed_BW == self.delete_id)
        splits_BW = written_BW & (proposed_BW == self.split_id)
        takes_BW = written_BW & ~(deletes_BW | splits_BW)
        count_BW = 1 - deletes_BW.long() + splits_BW.long()
        ends_BW = count_BW.cumsum(-1)
        # Each position looks up where its content comes from; a split position comes twice, first as a mask.
        index_W = torch.arange(size, device=device)
        source_BW = (ends_BW[:, None, :] <= index_W[:, None]).sum(-1)
        is_filled_BW = source_BW < size
        source_BW = source_BW.clamp(max=size - 1)
        is_first_BW = (ends_BW - count_BW).gather(1, source_BW) == index_W
        comes_in_BW = ~is_filled_BW | (splits_BW.gather(1, source_BW) & is_first_BW)
        tokens_BW = torch.where(takes_BW, proposed_BW, held.tokens_BW).gather(1, source_BW)
        is_decided_BW = (held.is_decided_BW | takes_BW).gather(1, source_BW) & ~comes_in_BW
        is_new_BW = held.is_new_BW.gather(1, source_BW) | comes_in_BW
        return Held(tokens_BW=tokens_BW, is_decided_BW=is_decided_BW, is_new_BW=is_new_BW & ~is_decided_BW)

    def store(
        self, lanes_B: Tensor, samples_B: Tensor, held: Held, is_mask_BW: Tensor, is_clean_B: Tensor
    ) -> None:
        """Save the state of blocks that continue. `samples_B` (bool): those of this pass; `is_mask_BW`
        (bool): masks before it."""
        late_B = torch.where(samples_B, self.num_late(lanes_B, is_mask_BW), self.num_late_Z[lanes_B])
        self.is_new_ZW[lanes_B] = held.is_new_BW & ~is_clean_B[:, None]
        self.num_late_Z[lanes_B] = torch.where(is_clean_B, 0, late_B)
