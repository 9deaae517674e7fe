"""`train.base_kl`: one more term of the loss, the divergence of supervised clean rows from the frozen base.

Shape letters: B packed rows of a micro-batch, T rows of one packed row, D width, M supervised rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from idlm.train.objectives.base import BaseRows, Batch, Head, TermRequest, Terms
from idlm.train.objectives.curriculum import Stage
from idlm.train.step import BodyAndHead, Compute, TrainingStep, flat_rows


class FrozenBase:
    """The base as it was before training, which never trains: a copy of `model`, whole on this rank, in
    `dtype`. Made before an adapter is added or layers are compiled, so that it has neither."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(requires_grad=False)
        self.runner = BodyAndHead(self.model)

    @torch.no_grad()
    def rows(self, batch: Batch, attention: str) -> BaseRows:
        """The supervised clean rows of a batch, in the order of its `clean_index`, from a forward pass over
        its clean rows alone: they see no noisy ones."""
        found: list[BaseRows] = []
        clean_M, supervised_M = batch["clean_rows"], batch["clean_index"]

        def collect(head: Head, hidden_BTD: Tensor) -> Terms:
            # `clean_rows` are in order, and supervised ones are among them.
            order_M = torch.searchsorted(clean_M, supervised_M)
            found.append(BaseRows(hidden_MD=hidden_BTD[0].index_select(0, order_M), head=head))
            return Terms(sums=hidden_BTD.new_zeros(0))

        self.runner.terms(self.model, flat_rows(batch, clean_M), attention, collect)
        return found[0]


def near_base(model: PreTrainedModel, dtype: torch.dtype, base_kl: float) -> Callable[..., TrainingStep]:
    """Return what makes the steps of a run near the base, whose copy this makes."""
    return partial(StepNearBase, base=FrozenBase(model, dtype), base_kl=base_kl)


class StepNearBase(TrainingStep):
    """A step whose last term is KL(base || model) of the supervised clean rows, with the weight `base_kl`."""

    def __init__(self, *given: Any, base: FrozenBase, base_kl: float, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.base, self.base_kl = base, base_kl
        self._rows: BaseRows | None = None

    @property
    def term_names(self) -> tuple[str, ...]:
        return (*super().term_names, "base_kl")

    def counts(self, batch: Batch, *, stage: Stage, want_overlap: bool) -> Tensor:
        own = super().counts(batch, stage=stage, want_overlap=want_overlap)
        return torch.cat([own, own.new_tensor([batch["clean_index"].numel()])])

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        own = super().weights(stage, means)
        return torch.cat([own, own.new_tensor([self.base_kl])])

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, request: TermRequest) -> Terms:
        coefficients, index_M = request.coefficients, batch["clean_index"]
        own = request if coefficients is None else replace(request, coefficients=coefficients[:-1])
        terms = super().terms(head, hidden_BTD, batch, own)
        factor = terms.sums.new_ones(()) if coefficients is None else coefficients[-1]
        hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, index_M)
        assert self._rows is not None
        loss = head.kl(hidden_MD, self._rows, factor.expand(len(index_M)))
        sums = torch.cat([terms.sums, (loss.detach() / factor).reshape(1)])
        return replace(terms, sums=sums, loss=None if terms.loss is None else terms.loss + loss)

    def forward(self, model: nn.Module, batch: Batch, compute: Compute, *, trains: bool = False) -> Terms:
        with self.autocast():
            self._rows = self.base.rows(batch, self.attention)
        terms = super().forward(model, batch, compute, trains=trains)
        self._rows = None
        return terms

    def release(self) -> None:
        super().release()
        vars(self.base).clear()
