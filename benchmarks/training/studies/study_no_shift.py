"""`objective=no_shift`: as `idlm`, but a mask predicts its own token, as in masked language models. An
ablation of the study, for training alone: no decoder reads such a model, and its checkpoint is stored as AR.

Let c be the last clean token that the N - 1 masks of a block see. The distance of a prediction is how far its
token is behind c.

    with the shift      clean row c predicts distance 1, masks at c + 1 .. c + N - 1 predict 2 .. N
    without             clean row c predicts distance 1, masks at c + 1 .. c + N - 1 predict 1 .. N - 1

The first mask does here what the clean row does anyway, so a pass with as many rows decides one token less.
Comparable at equal FLOPs are predictions of one distance, 2 to N - 1: their expected acceptance, the overlap
with the clean row that predicts the same token. `acceptance` in training starts at distance 2 with the shift
and at `NEAREST` here. Not comparable are the means over a block, also L_mask, and with it the balanced weight
of L_clean: the shortest distance is the easiest. Labels, clean rows with their shifted loss, stages and the
number of rows are those of `idlm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from idlm.semantics import Semantics
from idlm.train.data.layout import Sample, SampleRows
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency

NAME = "no_shift"
NEAREST = 1


@OBJECTIVES.register(NAME)
@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutShift(IntrospectiveConsistency):
    """Every mask stands one position later, on the token that it predicts."""

    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        # A dataclass with slots is another class than the one that super() knows.
        shifted = IntrospectiveConsistency.rows(self, sample, stage, seed)
        noisy = shifted.noisy
        moved = replace(noisy, positions=noisy.positions + 1, block_starts=noisy.block_starts + 1)
        return replace(shifted, noisy=moved)

    def semantics(self, stride: int) -> Semantics:
        return Semantics(mask_region=self.mask_region)
