"""Full diffusion as in LLaDA (arXiv 2502.09992, section 2.2, algorithm 2): each sample draws one mask rate
p, each of its targets becomes a mask with probability p, and the masks are predicted in place from the whole
sample, whose rows all see each other. There are no clean rows: nothing is predicted from them.

The loss of a masked token weighs 1/p, and the sum is divided by the number of targets, masked or not, of the
whole optimizer step: its expectation is the NELBO per token. With `mask_region=response` the prompt stays
visible. Stop tokens follow an answer, because decoding fills a canvas that is mostly longer than its answer;
they are targets like all others.
Differences from LLaDA: it divides by the targets of each sample and then averages over samples, so that a
token of a short answer weighs more; it pads each answer to the longest of its batch, while here the number of
stop tokens is drawn from 0 to `max_padding`, so that batches do not matter and lengths vary; no sample is cut
to a random length; the first token of a document is always visible.

Shape letters: B packed rows, T rows of one packed row, D width, L tokens of one sample with its padding, M
masked rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from idlm.semantics import Semantics
from idlm.train.data.layout import CERTAIN, IGNORE_LABEL, NO_ROWS, Rows, Sample, SampleRows, target_flags
from idlm.train.objectives.base import OBJECTIVES, Batch, Count, Head, Objective, Terms, one_term
from idlm.train.objectives.curriculum import Stage

LOWEST_RATE = CERTAIN // 1000
"""Lower end of the uniform mask rates, which keeps 1/p finite."""


@OBJECTIVES.register("full")
@dataclass(frozen=True, slots=True, kw_only=True)
class FullDiffusion(Objective):
    """The one term is `mask`, in nats per target: an estimate of the NELBO."""

    places_masks: ClassVar[bool] = True
    has_strides: ClassVar[bool] = False
    pads_answers: ClassVar[bool] = True
    predicts_next: ClassVar[bool] = False
    term_names: ClassVar[tuple[str, ...]] = ("mask",)

    def semantics(self, stride: int) -> Semantics:
        return Semantics(
            causality="full",
            logit_shift=False,
            mask_token_id=self.mask_token_id,
            mask_region=self.mask_region,
        )

    def default_row_length(self, max_length: int) -> int:
        return max_length + self.max_padding

    def num_rows(self, length: Count, num_targets: Count) -> Count:
        return length + self.max_padding

    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        random = np.random.default_rng([*seed])
        token_ids, is_target = self._padded(sample, int(random.integers(self.max_padding, endpoint=True)))
        rate = int(random.integers(LOWEST_RATE, CERTAIN, endpoint=True))
        is_masked = is_target & (random.integers(CERTAIN, size=len(token_ids)) < rate)
        return SampleRows(noisy=self.noisy_rows(token_ids, is_target, is_masked, rate), clean=NO_ROWS)

    def noisy_rows(
        self, token_ids: np.ndarray, is_target: np.ndarray, is_masked: np.ndarray, rate: int
    ) -> Rows:
        """Return all rows of a sample as one block; tokens of `is_masked` become masks, drawn at `rate` (in
        parts of `CERTAIN`). All arrays are [L].
        """
        assert self.mask_token_id is not None
        positions = np.arange(len(token_ids), dtype=np.int64)
        return Rows(
            input_ids=np.where(is_masked, self.mask_token_id, token_ids),
            positions=positions,
            block_starts=np.zeros_like(positions),
            labels=np.where(is_target, token_ids, IGNORE_LABEL),
            reach=np.full_like(positions, len(token_ids) - 1),
            mask_rates=np.where(is_masked, rate, 0),
        )

    def _padded(self, sample: Sample, num_more: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and target flags [L] up to the last target, and `num_more` stop tokens if it is one:
        the canvas of decoding ends in the answer too.
        """
        is_target = np.zeros(len(sample), dtype=bool)
        # As in all objectives, the first token of a document is context.
        is_target[1:] = target_flags(sample, self.mask_region)[:-1]
        end = int(np.flatnonzero(is_target)[-1]) + 1
        last = int(sample.token_ids[end - 1])
        num_more = num_more if last in self.stop_token_ids else 0
        token_ids = np.concatenate([sample.token_ids[:end], np.full(num_more, last, dtype=np.int64)])
        return token_ids, np.concatenate([is_target[:end], np.ones(num_more, dtype=bool)])

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        return torch.tensor([batch["noisy_index"].numel() + batch["open_index"].numel()])

    def terms(
        self,
        head: Head,
        hidden_BTD: Tensor,
        batch: Batch,
        *,
        stage: Stage,
        coefficients: Tensor | None,
        want_overlap: bool,
    ) -> Terms:
        index_M = batch["noisy_index"]
        weights_M = CERTAIN / batch["mask_rates"].flatten()[index_M].float()
        return one_term(head, hidden_BTD, batch, index_M, weights_M=weights_M, coefficients=coefficients)
