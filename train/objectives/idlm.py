"""Introspective-consistency training (I-DLM): the loss over one forward pass of `[x_t | x_0]`.

    L       = L_mask + s * L_clean                      arXiv 2604.11035, section 3.1, equations 1 and 2
    L_mask  = mean of -log p(x_{i+1}) over noisy rows, which see masks of their block and clean rows
    L_clean = mean of -log p(x_{i+1}) over supervised clean rows, as in next-token training
    s       = `clean_weight` of the stage, or balanced ("auto"): stop_gradient(L_mask / L_clean), at most
              `max_clean_weight`. The paper has no bound, nor has the default; at the first step of an
              unconverted base s was 630, and L_mask counted for nothing.

`rows` makes both halves, `terms` the sums of both losses, `weights` (1, s). The means, also those in s, are
over all rows of an optimizer step: all ranks and micro-batches.

With a gated adapter, whose clean rows are the base's, -log p in L_mask may give way, wholly or in part
(`distill_share`), to the divergence of the mask's q from the clean row's p: they predict the same token. With
`phase=random` blocks of masks start at another offset for every visit of a sample. With a `noise_range` the
masks are random ids, others in every visit (arXiv 2609.04010). None of this is in the paper.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary, M supervised positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from idlm.semantics import Semantics
from idlm.train.data.layout import Sample, SampleRows, clean_rows, noisy_rows
from idlm.train.objectives.base import OBJECTIVES, Batch, Count, Head, Objective, TermRequest, Terms
from idlm.train.objectives.curriculum import Stage

SMALLEST_LOSS = 1e-8
"""Floor of L_clean in the ratio, which keeps s finite when the clean rows are learnt perfectly."""


@OBJECTIVES.register("idlm")
@dataclass(frozen=True, slots=True, kw_only=True)
class IntrospectiveConsistency(Objective):
    """The terms are (mask, clean). Each supervised clean row has one noisy row with the same label."""

    places_masks: ClassVar[bool] = True
    has_strides: ClassVar[bool] = True
    predicts_next: ClassVar[bool] = True
    term_names: ClassVar[tuple[str, ...]] = ("mask", "clean")

    def default_row_length(self, max_length: int) -> int:
        return 2 * max_length

    def num_rows(self, length: Count, num_targets: Count) -> Count:
        return length + (length - 1 if self.mask_region == "all" else num_targets)

    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        random = np.random.default_rng([*seed])
        phase = int(random.integers(stage.stride - 1)) if self.phase == "random" else 0
        noisy = noisy_rows(
            sample,
            mask_region=self.mask_region,
            stride=stage.stride,
            mask_token_id=self.mask_token_id or 0,
            phase=phase,
        )
        if self.noise_range:
            low, high = self.noise_range
            noisy = replace(noisy, input_ids=random.integers(low, high, size=len(noisy)))
        return SampleRows(noisy=noisy, clean=clean_rows(sample, self.mask_region))

    def semantics(self, stride: int) -> Semantics:
        return Semantics(
            mask_token_id=self.mask_token_id,
            noise_range=self.noise_range,
            stride=stride,
            mask_region=self.mask_region,
        )

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        sums_clean = stage.clean_weight != 0.0 or want_overlap
        return torch.tensor([batch["noisy_index"].numel(), batch["clean_index"].numel() if sums_clean else 0])

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, request: TermRequest) -> Terms:
        """Noisy and clean row k predict the same token: the overlap of the two is the expected acceptance."""
        noisy_M, clean_M = batch["noisy_index"], batch["clean_index"]
        stage, coefficients = request.stage, request.coefficients
        hidden, labels = hidden_BTD.flatten(0, 1), batch["labels"].flatten()
        overlap = None
        if request.want_overlap:
            overlap_M = head.overlap(*(hidden.detach().index_select(0, rows) for rows in (noisy_M, clean_M)))
            overlap = _by_position(overlap_M, noisy_M, batch, num_masks=stage.stride - 1)
        # With s = 0 clean rows need no gradient; their loss is computed only where it is reported.
        trains_clean = stage.clean_weight != 0.0
        index = torch.cat([noisy_M, clean_M]) if trains_clean or coefficients is None else noisy_M
        rows, loss = hidden.index_select(0, index), None
        if coefficients is None:
            nll = head.nll(rows, labels[index])
        else:
            per_row = torch.cat([coefficients[0].expand(len(noisy_M)), coefficients[1].expand(len(clean_M))])
            if self.distill == "none":
                loss, nll = head.loss(rows, labels[index], per_row[: len(index)])
            else:
                assert not trains_clean, "the verifying distribution is a constant"
                verify = hidden.detach().index_select(0, clean_M)
                loss, nll = head.distilled(
                    rows,
                    verify,
                    labels[index],
                    per_row[: len(index)],
                    divergence=self.distill,
                    share=self.distill_share,
                )
            if request.want_overlap and not trains_clean:
                clean_nll = head.nll(hidden.detach().index_select(0, clean_M), labels[clean_M])
                nll = torch.cat([nll, clean_nll])
        sums = torch.stack([half.sum() for half in nll.tensor_split([len(noisy_M)])])
        return Terms(sums=sums, loss=loss, overlap=overlap)

    def needs_means(self, stage: Stage) -> bool:
        return stage.clean_weight is None

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        """Return (1, s); a balanced s is detached, so that no gradient flows through it."""
        if stage.clean_weight is not None:
            return torch.tensor([1.0, stage.clean_weight])
        assert means is not None
        balance = means[0] / means[1].clamp_min(SMALLEST_LOSS)
        if self.max_clean_weight is not None:
            balance = balance.clamp_max(self.max_clean_weight)
        return torch.stack([torch.ones_like(balance), balance]).detach()


def _by_position(overlap_M: Tensor, noisy_M: Tensor, batch: Batch, *, num_masks: int) -> Tensor:
    """Sums and counts [2, num_masks] of the overlaps [M] of noisy rows by their position in the block."""
    position_M = (batch["position_ids"] - batch["block_starts"]).flatten()[noisy_M]
    values = torch.stack([overlap_M, torch.ones_like(overlap_M)])
    return overlap_M.new_zeros(2, num_masks).index_add(1, position_M, values)
