"""A thin subclass of transformers' Trainer: our loss over the global batch, and stop on a bad loss.

Hooks used, checked in transformers 5.17 and 5.23: `get_batch_samples` (sees all micro-batches of an optimizer
step), `compute_loss`, `_get_train_sampler` and `get_train_dataloader`, those for saving in
`idlm.train.checkpoint.save`. The loop itself is transformers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.collectives import all_reduce
from idlm.train.loop.signals import ignore_stop_signals
from idlm.train.model.body_and_head import BodyAndHead
from idlm.train.objectives.base import Batch, Head, Objective, Terms
from idlm.train.step import LossGuard, PreviousMeans, StepLosses

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

log = logging.getLogger(__name__)


class IdlmTrainer(SavingTrainer):
    """`objective` decides rows and losses; `train_dataset` is a `PackedDataset`; `balance` is one of
    `idlm.train.objectives.curriculum.BALANCES`.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: PackedDataset,
        objective: Objective,
        attention: str,
        log_every: int,
        callbacks: list[Any],
        balance: str = "step",
    ) -> None:
        self.step_losses: StepLosses | None = None
        self.previous = PreviousMeans(self) if balance == "previous" else None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            data_collator=collate,
            callbacks=callbacks if self.previous is None else [self.previous, *callbacks],
        )
        # Our losses are already divided by the global count, so the Trainer must not divide by the
        # accumulation again.
        self.model_accepts_loss_kwargs = True
        self.objective = objective
        self.attention = attention
        self.log_every = log_every
        self.curriculum = train_dataset.curriculum
        self.runner = BodyAndHead(model)
        self.guard = LossGuard(Path(args.output_dir))
        self.before_save: Callable[[], None] | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The dataset is already in training order; a random order would undo curriculum and resume.
        return SequentialSampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_train_dataloader()
        # accelerate's loader hands out the rows of one that it holds.
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The micro-batches of one optimizer step, and the supervised tokens per term over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, torch.zeros(0)
        self.guard.begin(self.state.global_step + 1, num_micro_batches=len(batches))
        stage = self.curriculum.stage_of_step(self.state.global_step)
        is_shown = self.is_logged(self.state.global_step + 1)
        per_batch = [self.objective.counts(batch, stage=stage, want_overlap=is_shown) for batch in batches]
        counts = torch.stack(per_batch).sum(dim=0).to(device)
        all_reduce(counts)
        num_masks = stage.stride - 1
        self.step_losses = StepLosses(
            stage=stage,
            counts=counts,
            sums=torch.zeros(len(counts), device=device),
            weights=torch.ones(len(counts), device=device),
            is_weighted=False,
            overlap_sums=torch.zeros(num_masks, device=device),
            overlap_counts=torch.zeros(num_masks, device=device),
            num_tokens=torch.stack([batch["num_tokens"] for batch in batches]).sum(),
            fed=torch.stack([batch["fed"] for batch in batches]).sum(dim=0),
        )
        self._weigh(self.step_losses, batches)
        return batches, counts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """This rank's share of the step's loss, scaled so that averaging gradients over ranks gives the
        global mean.
        """
        step = self.step_losses
        assert step is not None and not return_outputs
        terms = self._terms(model, inputs, step, trains=True)
        assert terms.loss is not None
        step.sums += terms.sums
        if terms.overlap is not None:
            step.add_overlap(terms.overlap)
        self.guard.note(terms.loss, inputs)
        return terms.loss

    def is_logged(self, step: int) -> bool:
        """Whether the metrics get a line after this 1-based step; those of two stages share none."""
        return step == 1 or step % self.log_every == 0 or self.curriculum.ends_stage(step)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.before_save is not None:
            self.before_save()
        super()._save_checkpoint(model, trial)

    def _weigh(self, step: StepLosses, batches: list[Batch]) -> None:
        """Set the weights of the terms, unless they follow from the step's one micro-batch while it runs.

        An auto-balanced stage needs the losses of the whole step before its gradients. With one micro-batch
        they come from that very forward pass, for one more product with the head; with accumulation they
        take a pass without gradients over all micro-batches, about a third more compute for the step. With
        `balance=previous` the losses of the step before stand in for them and cost nothing.
        """
        if not self.objective.needs_means(step.stage):
            step.weigh(self.objective.weights(step.stage, None).to(step.sums.device))
        elif self.previous is not None and self.previous.means is not None:
            step.weigh(self.objective.weights(step.stage, self.previous.means))
        elif len(batches) > 1:
            sums = torch.zeros_like(step.sums)
            with torch.no_grad(), torch.random.fork_rng(devices=[sums.device] if sums.is_cuda else []):
                self.model.train()
                for batch in batches:
                    sums += self._terms(self.model, self._prepare_inputs(batch), step, trains=False).sums
            step.weigh(self.objective.weights(step.stage, step.means(sums)))

    def _terms(self, model: nn.Module, batch: Batch, step: StepLosses, *, trains: bool) -> Terms:
        """Losses of a micro-batch, computed inside the head's forward; with `trains`, to differentiate."""
        stage, want_overlap = step.stage, trains and self.is_logged(self.state.global_step + 1)

        def sums_only(head: Head, hidden_BTD: Tensor) -> Terms:
            return self.objective.terms(
                head, hidden_BTD.detach(), batch, stage=stage, coefficients=None, want_overlap=False
            )

        def differentiable(head: Head, hidden_BTD: Tensor) -> Terms:
            if not step.is_weighted:
                means = step.means(sums_only(head, hidden_BTD).sums)
                step.weigh(self.objective.weights(stage, means))
            coefficients = step.weights / step.counts.clamp_min(1) * self.args.world_size
            return self.objective.terms(
                head, hidden_BTD, batch, stage=stage, coefficients=coefficients, want_overlap=want_overlap
            )

        # accelerate puts the wrapped model's forward under autocast, not that of the model inside.
        with self.accelerator.autocast():
            return self.runner.terms(model, batch, self.attention, differentiable if trains else sums_only)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """One micro-batch; a loss that is not finite ends the run before the optimizer can spread it."""
        engine = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None:
            self.guard.watch(engine.engine.basic_optimizer)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.guard.check()
        if engine is not None:
            self.guard.check_skipped(engine.engine.optimizer)
        return loss


def _start_worker(seed: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a data worker: transformers' seeding, and no death by a signal that is meant for the run."""
    if seed is not None:
        seed(worker)
    ignore_stop_signals()
