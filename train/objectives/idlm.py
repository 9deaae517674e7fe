"""Introspective-consistency training: L = L_mask + s * L_clean over one forward pass of `[x_t | x_0]`.

Both halves have labels shifted by one; s is fixed or the detached ratio L_mask / L_clean of the same step's
global means. Paper arXiv 2604.11035, section 3.1, equations 1 and 2.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary, M supervised positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.acceptance import acceptance_rate
from idlm.train.curriculum import Stage
from idlm.train.layout import Sample, SampleRows, clean_rows, noisy_rows, target_flags
from idlm.train.objectives.base import (
    MAX_LOGITS,
    OBJECTIVES,
    Batch,
    Head,
    Overlap,
    Terms,
    chunked,
    token_losses,
)

SMALLEST_LOSS = 1e-8
"""Floor of L_clean in the ratio s: a perfectly learnt clean path must not make s infinite."""


@OBJECTIVES.register("idlm")
@dataclass(frozen=True, slots=True, kw_only=True)
class IntrospectiveConsistency:
    """Terms are (mask, clean); a noisy row exists exactly where a clean row is supervised."""

    mask_token_id: int | None
    mask_region: str
    vocab_size: int
    term_names: tuple[str, ...] = ("mask", "clean")

    def default_row_length(self, max_length: int) -> int:
        return 2 * max_length

    def num_rows(self, sample: Sample) -> int:
        return len(sample) + int(target_flags(sample, self.mask_region).sum())

    def rows(self, sample: Sample, stage: Stage) -> SampleRows:
        assert self.mask_token_id is not None
        noisy = noisy_rows(
            sample, mask_region=self.mask_region, stride=stage.stride, mask_token_id=self.mask_token_id
        )
        return SampleRows(noisy=noisy, clean=clean_rows(sample, self.mask_region))

    def counts(self, batch: Batch) -> Tensor:
        return torch.tensor([batch["noisy_index"].numel(), batch["clean_index"].numel()])

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, *, want_overlap: bool) -> Terms:
        """The k-th noisy and the k-th supervised clean row predict the same token, so their laws are compared
        too.
        """
        noisy_M, clean_M = batch["noisy_index"], batch["clean_index"]
        hidden = hidden_BTD.flatten(0, 1)
        tensors = (hidden[noisy_M], hidden[clean_M], batch["labels"].flatten()[noisy_M])

        def pair(noisy_MD: Tensor, clean_MD: Tensor, labels_M: Tensor) -> tuple[Tensor, ...]:
            draft_MV, verify_MV = head(noisy_MD), head(clean_MD)
            losses = token_losses(draft_MV, labels_M), token_losses(verify_MV, labels_M)
            return (*losses, _overlap(draft_MV, verify_MV)) if want_overlap else losses

        outputs = chunked(pair, tensors, rows=max(1, MAX_LOGITS // (2 * self.vocab_size)))
        overlap = _by_position(outputs[2], noisy_M, batch) if want_overlap else None
        return Terms(sums=torch.stack([outputs[0].sum(), outputs[1].sum()]), overlap=overlap)

    def needs_means(self, stage: Stage) -> bool:
        return stage.clean_weight is None

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        if stage.clean_weight is not None:
            return torch.tensor([1.0, stage.clean_weight])
        assert means is not None
        balance = means[0] / means[1].clamp_min(SMALLEST_LOSS)
        return torch.stack([torch.ones_like(balance), balance]).detach()


@torch.no_grad()
def _overlap(draft_MV: Tensor, verify_MV: Tensor) -> Tensor:
    """Expected acceptance sum_x min(p(x), q(x)) of a sampled draft, float32 [M]."""
    draft = torch.softmax(draft_MV.detach().float(), dim=-1)
    verify = torch.softmax(verify_MV.detach().float(), dim=-1)
    return acceptance_rate(verify, draft)


def _by_position(overlap_M: Tensor, noisy_M: Tensor, batch: Batch) -> Overlap:
    position_M = (batch["position_ids"] - batch["block_starts"]).flatten()[noisy_M]
    num_masks = int(batch["num_masks"])
    sums = torch.zeros(num_masks, dtype=torch.float32, device=overlap_M.device).index_add_(
        0, position_M, overlap_M
    )
    return Overlap(sums=sums, counts=torch.bincount(position_M, minlength=num_masks).float())
