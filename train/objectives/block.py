"""Block diffusion as in SDAR (arXiv 2510.06303): masked tokens of a block are predicted in place, from the
whole block and the clean blocks before it, in one forward pass of `[x_t | x_0]`.

Blocks have `stride` tokens and start with the document. Differences from SDAR: the mask rate is drawn per
block, not per sample, for less variance; a block without a target has no noisy rows, because no row would see
them; the block in which an answer ends is filled with its stop token, because a shorter block would reveal
the end, which is unknown in decoding.

Shape letter: L tokens of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from idlm.semantics import Semantics
from idlm.train.data.layout import CERTAIN, IGNORE_LABEL, Half, Sample, SampleRows
from idlm.train.objectives.base import OBJECTIVES, Count
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.masked import LOWEST_RATE, MaskedDiffusion


@OBJECTIVES.register("block")
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDiffusion(MaskedDiffusion):
    """One mask rate for each block of `stride` tokens."""

    has_strides: ClassVar[bool] = True

    def semantics(self, stride: int) -> Semantics:
        return Semantics(
            causality="block",
            logit_shift=False,
            block_size=stride,
            mask_token_id=self.mask_token_id,
            stride=stride,
            mask_region=self.mask_region,
        )

    def default_row_length(self, max_length: int) -> int:
        return 2 * max_length + self.max_stride - 1

    def num_rows(self, length: Count, num_targets: Count) -> Count:
        num_noisy = length + (self.max_stride - 1)
        if self.mask_region == "response":
            # Each noisy block has a target.
            num_in_blocks = num_targets * self.max_stride
            num_noisy = num_noisy - (num_noisy - num_in_blocks) * (num_in_blocks < num_noisy)
        return length + num_noisy

    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        random = np.random.default_rng([*seed])
        token_ids, is_target = self.targets(sample, multiple=stage.stride)
        block = np.arange(len(token_ids)) // stage.stride
        rates = random.integers(LOWEST_RATE, CERTAIN, size=block[-1] + 1, endpoint=True)[block]
        is_masked = is_target & (random.integers(CERTAIN, size=len(block)) < rates)
        return SampleRows(
            noisy=self.noisy_rows(token_ids, is_target, is_masked, rates, block_size=stage.stride),
            clean=_context_rows(sample, stage.stride),
        )


def _context_rows(sample: Sample, block_size: int) -> Half:
    """The clean half, block-causal and without labels: a row that sees its own token would only copy it."""
    positions = np.arange(len(sample), dtype=np.int64)
    return Half(
        input_ids=sample.token_ids,
        positions=positions,
        block_starts=np.zeros_like(positions),
        labels=np.full(len(sample), IGNORE_LABEL, dtype=np.int64),
        reach=np.minimum((positions // block_size + 1) * block_size, len(sample)) - 1,
    )
