"""`train.base_kl`: one more term of the loss, the divergence of supervised clean rows from the frozen base.

Shape letters: B packed rows of a micro-batch, T rows of one packed row, D width, M supervised rows."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from idlm.train.objectives.base import Batch, Head, Losses, TermRequest, Terms
from idlm.train.objectives.curriculum import Stage
from idlm.train.step import BodyAndHead, flat_rows


class FrozenBase:
    """The base as it was before training, which never trains: a copy of `model`, whole on this rank, in
    `dtype`, with the attention of the model. Made before an adapter is added or layers are compiled, so that
    it has neither."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, attention: str) -> None:
        self.attention = attention
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(requires_grad=False)
        self.runner = BodyAndHead(self.model)
        self._last: tuple[Batch, tuple[Head, Tensor]] | None = None

    def rows(self, batch: Batch) -> tuple[Head, Tensor]:
        """The head, and the hidden states [M, D] of the supervised clean rows of a batch, in the order of its
        `clean_index`."""
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._run(batch)
        return self._last[1]

    @torch.no_grad()
    def _run(self, batch: Batch) -> tuple[Head, Tensor]:
        """From a forward pass over clean rows alone: they see no noisy ones."""
        found: list[tuple[Head, Tensor]] = []
        clean_M, supervised_M = batch["clean_rows"], batch["clean_index"]

        def collect(head: Head, hidden_BTD: Tensor) -> Terms:
            # `clean_rows` are in order, and supervised ones are among them.
            order_M = torch.searchsorted(clean_M, supervised_M)
            found.append((head, hidden_BTD[0].index_select(0, order_M)))
            return Terms(sums=hidden_BTD.new_zeros(0))

        self.runner.terms(self.model, flat_rows(batch, clean_M), self.attention, collect)
        return found[0]


class NearBase(Losses):
    """The losses of an objective and, as the last term, KL(base || model) of the supervised clean rows, with
    the weight `base_kl`."""

    def __init__(self, objective: Losses, base: FrozenBase, base_kl: float) -> None:
        self.objective, self.base, self.base_kl = objective, base, base_kl

    @property
    def term_names(self) -> tuple[str, ...]:
        return (*self.objective.term_names, "base_kl")

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        own = self.objective.counts(batch, stage=stage, want_overlap=want_overlap)
        return torch.cat([own, own.new_tensor([batch["clean_index"].numel()])])

    def needs_means(self, stage: Stage) -> bool:
        return self.objective.needs_means(stage)

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        own = self.objective.weights(stage, means)
        return torch.cat([own, own.new_tensor([self.base_kl])])

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, request: TermRequest) -> Terms:
        coefficients, index_M = request.coefficients, batch["clean_index"]
        own = request if coefficients is None else replace(request, coefficients=coefficients[:-1])
        terms = self.objective.terms(head, hidden_BTD, batch, own)
        factor = terms.sums.new_ones(()) if coefficients is None else coefficients[-1]
        hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, index_M)
        loss = head.kl(hidden_MD, self.base.rows(batch), factor.expand(len(index_M)))
        sums = torch.cat([terms.sums, (loss.detach() / factor).reshape(1)])
        return replace(terms, sums=sums, loss=None if terms.loss is None else terms.loss + loss)

    def release(self) -> None:
        """Give back the memory of the base."""
        vars(self.base).clear()
