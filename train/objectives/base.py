"""The contract of a training objective. A new one is one new file in this folder that registers a class.

The trainer calls three methods of an objective, in this order:
    rows     which noisy and clean rows a sample becomes (input ids, labels, what each row sees)
    terms    which losses these rows give: sums of negative log-likelihoods, one per name in `term_names`
    weights  how the loss weighs the means of the terms: loss = sum_i weights[i] * sums[i] / counts[i]
`counts` are summed over all ranks and micro-batches of a step. `Objective` states each method; `ar.py` is the
shortest example.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary, M supervised rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from idlm.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_distillation,
    linear_overlap,
    token_nll,
)
from idlm.registry import Registry
from idlm.semantics import Semantics
from idlm.train.data.layout import Sample, SampleRows
from idlm.train.objectives.curriculum import Stage

Batch = dict[str, Tensor]
Count = TypeVar("Count", int, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The linear output head, whole on this rank while the model's forward pass is in it. Each method takes
    rows [M, D] and holds one chunk of logits at a time."""

    weight_VD: Tensor
    bias_V: Tensor | None = None

    def loss(self, hidden_MD: Tensor, labels_M: Tensor, coefficients_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum of coefficient * nll, differentiable; nll [M] in nats, float32, detached)."""
        return linear_cross_entropy(hidden_MD, self.weight_VD, labels_M, coefficients_M, bias_V=self.bias_V)

    def distilled(
        self,
        draft_MD: Tensor,
        verify_MD: Tensor,
        labels_M: Tensor,
        coefficients_M: Tensor,
        *,
        divergence: str,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """Return what `loss` does, of (1 - share) * nll + share * divergence of draft and `verify_MD`."""
        rows = draft_MD, verify_MD, self.weight_VD, labels_M, coefficients_M
        return linear_distillation(*rows, divergence=divergence, share=share, bias_V=self.bias_V)

    def kl(self, hidden_MD: Tensor, base: tuple[Head, Tensor], coefficients_M: Tensor) -> Tensor:
        """Return sum of coefficient * KL(base || model), a scalar that is differentiable in the model, over
        the whole vocabulary; float32. `base` has another head and the rows [M, D] that it takes."""
        head, base_MD = base
        # Labels have no share of this loss.
        labels_M = torch.zeros(len(hidden_MD), dtype=torch.int64, device=hidden_MD.device)
        rows = hidden_MD, base_MD, self.weight_VD, labels_M, coefficients_M
        other, bias_V = (head.weight_VD, head.bias_V), self.bias_V
        return linear_distillation(*rows, divergence="kl", share=1.0, bias_V=bias_V, verify_head=other)[0]

    def nll(self, hidden_MD: Tensor, labels_M: Tensor) -> Tensor:
        """Return nll [M] in nats without gradients, for a third of the cost of `loss`."""
        return token_nll(hidden_MD, self.weight_VD, labels_M, bias_V=self.bias_V)

    def overlap(self, draft_MD: Tensor, verify_MD: Tensor) -> Tensor:
        """Return the expected acceptance sum_x min(p(x), q(x)) [M] of sampled drafts, float32, detached."""
        return linear_overlap(draft_MD, verify_MD, self.weight_VD, bias_V=self.bias_V)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The losses of a micro-batch.

    `sums` [num_terms]: summed negative log-likelihood in nats per term, in the order of
    `Objective.term_names`, detached. `loss`: the scalar coefficients @ sums to differentiate; None without
    coefficients. `overlap` [2, num_masks]: sums and counts of the teacher-forced expected acceptance by draft
    position, detached."""

    sums: Tensor
    loss: Tensor | None = None
    overlap: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRequest:
    """What the losses of a micro-batch need at a stage. `coefficients` [num_terms], weights / counts,
    are given where the loss is differentiated. `want_overlap`: this step is logged, so also compute what is
    only reported."""

    stage: Stage
    coefficients: Tensor | None = None
    want_overlap: bool = False


class Losses(ABC):
    """The losses of a step: what it sums, and how it weighs the sums."""

    __slots__ = ()

    @property
    @abstractmethod
    def term_names(self) -> tuple[str, ...]:
        """Names of the summed losses, in the order of `Terms.sums`."""

    @abstractmethod
    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        """Return how many tokens each term sums over, int64 [num_terms] on the CPU, from shapes alone."""

    @abstractmethod
    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, request: TermRequest) -> Terms:
        """Return the losses of a micro-batch from the last hidden states [B, T, D]. Must not wait for the
        device."""

    def needs_means(self, stage: Stage) -> bool:
        """Return whether `weights` depends on the step's own losses, which then need a forward pass first."""
        return False

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        """Return the weight of each term, float32 [num_terms]; `means` [num_terms], sums / counts over all
        ranks, are given where `needs_means`. The weight of a single term is 1."""
        return torch.ones(1)

    def release(self) -> None:  # noqa: B027
        """Give back device memory of its own, if it has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Losses):
    """Base of all objectives. It has no state: each result follows from the arguments.

    `mask_token_id` is None where no masks are placed, or random ids of `noise_range` [low, high) in their
    place; `max_stride` is the largest stride of all stages; `stop_token_ids` end an answer; `max_padding`
    bounds how many more of them follow it. `max_clean_weight` bounds a balanced s. `phase`, `distill` and
    `distill_share` are those of `objective=idlm`."""

    places_masks: ClassVar[bool]
    """Whether it needs a mask token."""
    has_strides: ClassVar[bool]
    """Whether it needs stages with strides."""
    pads_answers: ClassVar[bool] = False
    """Whether it reads `max_padding`."""
    predicts_next: ClassVar[bool]
    """Whether a row predicts the next token, as in the base model. Otherwise there is no clean loss to weigh
    and no gated adapter, whose clean rows are those of the base."""

    mask_token_id: int | None
    mask_region: str
    max_stride: int = 1
    stop_token_ids: tuple[int, ...] = ()
    max_padding: int = 0
    max_clean_weight: float | None = None
    noise_range: tuple[int, ...] = ()
    phase: str = "response"
    distill: str = "none"
    distill_share: float = 1.0

    @abstractmethod
    def default_row_length(self, max_length: int) -> int:
        """Return how many rows the longest allowed sample needs."""

    @abstractmethod
    def num_rows(self, length: Count, num_targets: Count) -> Count:
        """Return how many rows a sample needs at most, over all stages: numbers, or int64 [samples] of many.
        `length` counts its tokens, `num_targets` its supervised tokens after the first token."""

    @abstractmethod
    def rows(self, sample: Sample, stage: Stage, seed: Sequence[int] = ()) -> SampleRows:
        """Return the rows of a sample at a stage of the curriculum. Everything random follows from `seed`,
        which differs for each visit of a sample, so that a resumed run draws the same."""

    @abstractmethod
    def semantics(self, stride: int) -> Semantics:
        """Return how to decode a checkpoint that was trained up to a stage of this stride."""


def one_term(
    head: Head,
    hidden_BTD: Tensor,
    batch: Batch,
    index_M: Tensor,
    *,
    weights_M: Tensor | float = 1.0,
    coefficients: Tensor | None,
) -> Terms:
    """Return the terms of an objective with one: weight * nll, summed over rows `index_M` of the batch."""
    labels_M = batch["labels"].flatten()[index_M]
    hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, index_M)
    loss = None
    if coefficients is None:
        nll_M = head.nll(hidden_MD, labels_M)
    else:
        loss, nll_M = head.loss(hidden_MD, labels_M, (coefficients * weights_M).expand(len(index_M)))
    return Terms(sums=(weights_M * nll_M).sum().reshape(1), loss=loss)


OBJECTIVES: Registry[type[Objective]] = Registry("objective", "idlm.train.objectives")
