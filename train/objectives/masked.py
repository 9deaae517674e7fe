"""What diffusion objectives share: some targets become masks, which are predicted in place.

A target becomes a mask with a probability p that is drawn too. The loss of a masked token weighs 1/p, and the
sum is divided by the number of targets, masked or not, of the whole optimizer step: its expectation is the
NELBO per token.

Shape letters: B packed rows, T rows of one packed row, D width, L tokens of one sample, M masked rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from idlm.train.data.layout import CERTAIN, IGNORE_LABEL, Half, Sample, target_flags
from idlm.train.objectives.base import Batch, Head, Objective, TermRequest, Terms, one_term
from idlm.train.objectives.curriculum import Stage

LOWEST_RATE = CERTAIN // 1000
"""Lower end of the uniform mask rates, which keeps 1/p finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDiffusion(Objective):
    """The one term is `mask`, in nats per target: an estimate of the NELBO."""

    places_masks: ClassVar[bool] = True
    predicts_next: ClassVar[bool] = False
    term_names: ClassVar[tuple[str, ...]] = ("mask",)

    def targets(
        self, sample: Sample, *, num_more: int = 0, multiple: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and target flags [L] up to the last target. If that is a stop token, more of it
        follow as targets: `num_more`, and as many as make L a `multiple`."""
        is_target = np.zeros(len(sample), dtype=bool)
        # As in all objectives, the first token of a document is context.
        is_target[1:] = target_flags(sample, self.mask_region)[:-1]
        end = int(np.flatnonzero(is_target)[-1]) + 1
        last = int(sample.token_ids[end - 1])
        num_more = num_more + -(end + num_more) % multiple if last in self.stop_token_ids else 0
        token_ids = np.concatenate([sample.token_ids[:end], np.full(num_more, last, dtype=np.int64)])
        return token_ids, np.concatenate([is_target[:end], np.ones(num_more, dtype=bool)])

    def noisy_rows(
        self,
        token_ids: np.ndarray,
        is_target: np.ndarray,
        is_masked: np.ndarray,
        rates: np.ndarray | int,
        *,
        block_size: int,
    ) -> Half:
        """Return the rows of blocks with a target; tokens of `is_masked` become masks, drawn at `rates` (in
        parts of `CERTAIN`). All arrays are [L]."""
        assert self.mask_token_id is not None
        positions = np.arange(len(token_ids), dtype=np.int64)
        block = positions // block_size
        kept = (np.bincount(block, weights=is_target) > 0)[block]
        starts = block * block_size
        return Half(
            input_ids=np.where(is_masked, self.mask_token_id, token_ids)[kept],
            positions=positions[kept],
            block_starts=starts[kept],
            labels=np.where(is_target, token_ids, IGNORE_LABEL)[kept],
            reach=np.minimum(starts + block_size, len(token_ids))[kept] - 1,
            mask_rates=np.where(is_masked, rates, 0)[kept],
        )

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        return torch.tensor([batch["noisy_index"].numel() + batch["open_index"].numel()])

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, request: TermRequest) -> Terms:
        index_M = batch["noisy_index"]
        weights_M = CERTAIN / batch["mask_rates"].flatten()[index_M].float()
        return one_term(
            head, hidden_BTD, batch, index_M, weights_M=weights_M, coefficients=request.coefficients
        )
