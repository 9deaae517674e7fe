"""A thin subclass of transformers' Trainer, whose loop calls `idlm.train.step`.

Hooks used, checked in transformers 5.17 and 5.23: `get_batch_samples` (sees all micro-batches of an optimizer
step), `compute_loss`, `training_step`, `_get_train_sampler` and `get_train_dataloader`, those for saving in
`idlm.train.checkpoint.save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.loop.signals import ignore_stop_signals
from idlm.train.objectives.base import Batch, Objective
from idlm.train.step import PreviousMeans, TrainingStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


class IdlmTrainer(SavingTrainer):
    """`objective` decides rows and losses; `balance` is one of `train.objectives.curriculum.BALANCES`."""

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
        previous = PreviousMeans() if balance == "previous" else None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            data_collator=collate,
            callbacks=callbacks if previous is None else [previous, *callbacks],
        )
        # Our losses are already divided by the global count: the Trainer must not divide by the accumulation.
        self.model_accepts_loss_kwargs = True
        self.step = TrainingStep(
            model,
            args,
            objective=objective,
            curriculum=train_dataset.curriculum,
            attention=attention,
            log_every=log_every,
            autocast=self.accelerator.autocast,
            previous=previous,
        )
        if previous is not None:
            previous.step = self.step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The micro-batches of one optimizer step, and the supervised tokens per term over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, torch.zeros(0)
        return batches, self.step.start(self.state.global_step, batches, self._prepare_inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """This rank's share of the step's loss."""
        assert not return_outputs
        return self.step.loss(model, inputs)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Forward and backward pass of one micro-batch; a loss that is not finite ends the run here."""
        guard, engine = self.step.guard, getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None:
            guard.watch(engine.engine.basic_optimizer)
        loss = super().training_step(model, inputs, num_items_in_batch)
        guard.check()
        if engine is not None:
            guard.check_skipped(engine.engine.optimizer)
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The dataset is already in training order; a random order would undo curriculum and resume.
        return SequentialSampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_train_dataloader()
        # accelerate's loader hands out the rows of one that it holds.
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader


def _start_worker(seed: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a data worker: seed it as transformers does, and ignore signals that are meant for the run."""
    if seed is not None:
        seed(worker)
    ignore_stop_signals()
