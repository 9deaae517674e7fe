"""What an objective is: which rows a sample becomes, and which summed losses they yield. The trainer knows no
more.

Adding an objective is one new file in this package that registers a class.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary, M supervised rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from idlm.kernels.linear_cross_entropy import linear_cross_entropy, linear_overlap, token_nll
from idlm.registry import Registry
from idlm.semantics import Semantics
from idlm.train.data.layout import Sample, SampleRows
from idlm.train.objectives.curriculum import Stage

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The linear output head, whole on this rank for as long as the model's forward pass is in it.

    Every method takes rows [M, D] that the caller has chosen and keeps one chunk of logits at a time.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None

    def loss(self, hidden_MD: Tensor, labels_M: Tensor, coefficients_M: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of coefficient * nll, differentiable; nll [M] in nats, float32, detached)."""
        return linear_cross_entropy(hidden_MD, self.weight_VD, labels_M, coefficients_M, bias_V=self.bias_V)

    def nll(self, hidden_MD: Tensor, labels_M: Tensor) -> Tensor:
        """nll [M] without gradients, for a third of the cost of `loss`."""
        return token_nll(hidden_MD, self.weight_VD, labels_M, bias_V=self.bias_V)

    def overlap(self, draft_MD: Tensor, verify_MD: Tensor) -> Tensor:
        """Expected acceptance sum_x min(p(x), q(x)) [M] of a sampled draft, float32, detached."""
        return linear_overlap(draft_MD, verify_MD, self.weight_VD, bias_V=self.bias_V)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Teacher-forced expected acceptance, per draft position: sums [num_masks] and counts [num_masks],
    detached.
    """

    sums: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """`sums` [num_terms]: summed negative log-likelihood in nats per term, in the order of
    `Objective.term_names`, detached. `loss`: coefficients * sums, a scalar to differentiate; None without
    coefficients.
    """

    sums: Tensor
    loss: Tensor | None = None
    overlap: Overlap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveArgs:
    """What a run gives its objective. `mask_token_id`: None where no masks are placed; `max_stride`: of all
    stages; `stop_token_ids`: tokens that end an answer.
    """

    mask_token_id: int | None
    mask_region: str
    max_stride: int = 1
    stop_token_ids: tuple[int, ...] = ()


class Objective(Protocol):
    """One training objective; stateless."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the summed losses, in the order of `Terms.sums`."""

    def default_row_length(self, max_length: int) -> int:
        """Rows that hold the longest allowed sample."""

    def num_rows(self, sample: Sample) -> int:
        """Rows the sample occupies at most, at any stage."""

    def num_rows_of(self, lengths: np.ndarray, num_targets: np.ndarray) -> np.ndarray:
        """`num_rows` of many samples, int64, from their tokens and the supervised ones behind the first."""

    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        """The sample's rows at a stage of the curriculum; all that is random follows from `seed`, which a run
        has for every visit of a sample, so that nothing is drawn that a resumed run would have to remember.
        """

    def semantics(self, stride: int) -> Semantics:
        """What a checkpoint trained up to a stage of this stride means."""

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        """Tokens per term whose loss `terms` sums up, int64 [num_terms] on the CPU, from shapes alone."""

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
        """Losses of a micro-batch, where `coefficients` [num_terms] are given with the loss to differentiate.

        `want_overlap`: the step's figures are shown, so that what is only reported is worth its cost.
        `head` sees supervised rows only. Nothing here may wait for the device.
        """

    def needs_means(self, stage: Stage) -> bool:
        """Whether `weights` looks at the step's own losses, which must then be known before the backward
        pass.
        """

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        """Weight of each term, float32 [num_terms]; `means`: global means, given where `needs_means`."""


class OneTerm:
    """Of an objective with one term: that is the loss, at any stage."""

    __slots__ = ()

    def needs_means(self, stage: Stage) -> bool:
        return False

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        return torch.ones(1)


def one_term(
    head: Head,
    hidden_BTD: Tensor,
    batch: Batch,
    index_M: Tensor,
    *,
    weights_M: Tensor | float = 1.0,
    coefficients: Tensor | None,
) -> Terms:
    """The one term of an objective: weight * nll, summed over rows `index_M` of the flattened batch."""
    labels_M = batch["labels"].flatten()[index_M]
    hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, index_M)
    loss = None
    if coefficients is None:
        nll_M = head.nll(hidden_MD, labels_M)
    else:
        loss, nll_M = head.loss(hidden_MD, labels_M, (coefficients * weights_M).expand(len(index_M)))
    return Terms(sums=(weights_M * nll_M).sum().reshape(1), loss=loss)


class ObjectiveFactory(Protocol):
    """The class of an objective, which the configuration is checked against before there is a mask token."""

    @property
    def places_masks(self) -> bool:
        """Whether it needs a mask token and stages of strides."""

    @property
    def predicts_next(self) -> bool:
        """Whether a row predicts the token behind it, as in the base. Without that there is neither a clean
        loss to weigh nor a gated adapter, whose clean rows stay those of the base.
        """

    def create(self, given: ObjectiveArgs) -> Objective:
        """The objective of a run."""


OBJECTIVES: Registry[ObjectiveFactory] = Registry("objective", "idlm.train.objectives")
