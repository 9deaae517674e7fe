"""Next-token training on packed clean rows: trains base models, and the control that conversions are compared
with.

Shape letters: B packed rows, T rows of one packed row, D width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.semantics import Semantics
from idlm.train.data.layout import NO_ROWS, Sample, SampleRows, clean_rows
from idlm.train.objectives.base import OBJECTIVES, Batch, Count, Head, Objective, TermRequest, Terms, one_term
from idlm.train.objectives.curriculum import Stage


@OBJECTIVES.register("ar")
@dataclass(frozen=True, slots=True, kw_only=True)
class Autoregressive(Objective):
    """The one term is `clean`: response tokens with `mask_region=response`, all tokens with `all`."""

    places_masks: ClassVar[bool] = False
    has_strides: ClassVar[bool] = False
    predicts_next: ClassVar[bool] = True
    term_names: ClassVar[tuple[str, ...]] = ("clean",)

    def default_row_length(self, max_length: int) -> int:
        return max_length

    def num_rows(self, length: Count, num_targets: Count) -> Count:
        return length

    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        return SampleRows(noisy=NO_ROWS, clean=clean_rows(sample, self.mask_region))

    def semantics(self, stride: int) -> Semantics:
        return Semantics(mask_region=self.mask_region)

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        return torch.tensor([batch["clean_index"].numel()])

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, request: TermRequest) -> Terms:
        return one_term(head, hidden_BTD, batch, batch["clean_index"], coefficients=request.coefficients)
