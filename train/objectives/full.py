"""Full diffusion as in LLaDA (arXiv 2502.09992, section 2.2, algorithm 2): each sample draws one mask rate
p, each of its targets becomes a mask with probability p, and the masks are predicted in place from the whole
sample, whose rows all see each other. There are no clean rows: nothing is predicted from them.

With `mask_region=response` the prompt stays visible. Stop tokens follow an answer, because decoding fills a
canvas that is mostly longer than its answer; they are targets like all others.
Differences from LLaDA: it divides by the targets of each sample and then averages over samples, so that a
token of a short answer weighs more; it pads each answer to the longest of its batch, while here the number of
stop tokens is drawn from 0 to `max_padding`, so that batches do not matter and lengths vary; no sample is cut
to a random length; the first token of a document is always visible.

Shape letter: L tokens of one sample with its padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from idlm.semantics import Semantics
from idlm.train.data.layout import CERTAIN, NO_ROWS, Sample, SampleRows
from idlm.train.objectives.base import OBJECTIVES, Count
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.masked import LOWEST_RATE, MaskedDiffusion


@OBJECTIVES.register("full")
@dataclass(frozen=True, slots=True, kw_only=True)
class FullDiffusion(MaskedDiffusion):
    """One mask rate for a sample, whose rows are one block."""

    has_strides: ClassVar[bool] = False
    pads_answers: ClassVar[bool] = True

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
        num_more = int(random.integers(self.max_padding, endpoint=True))
        token_ids, is_target = self.targets(sample, num_more=num_more)
        rate = int(random.integers(LOWEST_RATE, CERTAIN, endpoint=True))
        is_masked = is_target & (random.integers(CERTAIN, size=len(token_ids)) < rate)
        noisy = self.noisy_rows(token_ids, is_target, is_masked, rate, block_size=len(token_ids))
        return SampleRows(noisy=noisy, clean=NO_ROWS)
