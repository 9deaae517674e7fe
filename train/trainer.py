"""A thin subclass of transformers' Trainer: our loss over the global batch, atomic checkpoints, stop on a bad
loss.

Hooks used, checked in transformers 5.17 and 5.23: `get_batch_samples` (sees all micro-batches of an optimizer
step), `compute_loss`, `_get_train_sampler`, `_save_checkpoint` and `_get_output_dir`. The loop itself is
transformers'.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from idlm.checkpoint import publish
from idlm.errors import UserError
from idlm.train.curriculum import Stage
from idlm.train.dataset import PackedDataset, collate
from idlm.train.model import BodyAndHead
from idlm.train.objectives.base import Batch, Objective, Overlap, Terms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepLosses:
    """What one optimizer step computed, over all its micro-batches: tensors, so that reading them is the
    caller's cost.

    `counts` [num_terms] are over all ranks; `sums` [num_terms], the overlap per draft position [num_masks]
    and `num_tokens` (document tokens, a scalar) are of this rank alone. `weights` [num_terms].
    """

    stage: Stage
    counts: Tensor
    sums: Tensor
    weights: Tensor
    overlap_sums: Tensor
    overlap_counts: Tensor
    num_tokens: Tensor


class IdlmTrainer(Trainer):
    """`objective` decides rows and losses; `train_dataset` is a `PackedDataset`."""

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
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            data_collator=functools.partial(collate, curriculum=train_dataset.curriculum),
            callbacks=callbacks,
        )
        # Our losses are already divided by the global count, so the Trainer must not divide by the
        # accumulation again.
        self.model_accepts_loss_kwargs = True
        self.objective = objective
        self.attention = attention
        self.log_every = log_every
        self.curriculum = train_dataset.curriculum
        self.runner = BodyAndHead(model)
        self.step_losses: StepLosses | None = None
        self._micro_batches: list[Batch] = []
        self._staging: str | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The dataset is already in training order; a random order would undo curriculum and resume.
        return SequentialSampler(self.train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The micro-batches of one optimizer step, and the supervised tokens per term over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._micro_batches = batches
        if not batches:
            return batches, torch.zeros(0)
        counts = torch.stack([self.objective.counts(batch) for batch in batches]).sum(dim=0).to(device)
        all_reduce(counts)
        stage = self.curriculum.stage_of_step(self.state.global_step)
        num_masks = stage.stride - 1
        self.step_losses = StepLosses(
            stage=stage,
            counts=counts,
            sums=torch.zeros(len(counts), device=device),
            weights=self._weights(stage, batches, counts, device),
            overlap_sums=torch.zeros(num_masks, device=device),
            overlap_counts=torch.zeros(num_masks, device=device),
            num_tokens=torch.stack([batch["num_tokens"] for batch in batches]).sum(),
        )
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
        terms = self._terms(model, inputs, want_overlap=self._is_logged_step())
        counts = step.counts.clamp_min(1)
        if self.objective.needs_means(step.stage) and len(self._micro_batches) == 1:
            global_sums = terms.sums.detach().clone()
            all_reduce(global_sums)
            step.weights = self.objective.weights(step.stage, global_sums / counts)
        step.sums += terms.sums.detach()
        if terms.overlap is not None:
            _add_overlap(step, terms.overlap)
        return (step.weights * terms.sums / counts).sum() * self.args.world_size

    def _is_logged_step(self) -> bool:
        step = self.state.global_step + 1
        return step == 1 or step % self.log_every == 0

    def _weights(self, stage: Stage, batches: list[Batch], counts: Tensor, device: torch.device) -> Tensor:
        """Weights known before the first backward pass.

        An auto-balanced stage needs the losses of the whole step first. With one micro-batch they come from
        that very forward pass; with accumulation they take a pass without gradients over all micro-batches,
        about a third more compute for the step.
        """
        if not self.objective.needs_means(stage):
            return self.objective.weights(stage, None).to(device)
        if len(batches) == 1:
            return torch.ones(len(counts), device=device)
        sums = torch.zeros(len(counts), device=device)
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            self.model.train()
            for batch in batches:
                sums += self._terms(self.model, self._prepare_inputs(batch), want_overlap=False).sums
        all_reduce(sums)
        return self.objective.weights(stage, sums / counts.clamp_min(1))

    def _terms(self, model: nn.Module, batch: Batch, *, want_overlap: bool) -> Terms:
        # accelerate puts only the model's own forward under autocast; the head is called outside of it.
        with self.accelerator.autocast():
            hidden_BTD = self.runner.hidden(model, batch, self.attention)
            return self.objective.terms(self.runner.head, hidden_BTD, batch, want_overlap=want_overlap)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """One micro-batch; a loss that is not finite ends the run before the optimizer can spread it."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not bool(torch.isfinite(loss)):
            item_ids = [int(item) for batch in self._micro_batches for item in batch["item_ids"].tolist()]
            raise UserError(
                "IDLM-0503",
                f"the loss became {float(loss)} at step {self.state.global_step + 1}, data items {item_ids}",
                fix="the last checkpoint is intact: lower train.learning_rate or look at those items",
            )
        return loss

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint aside and publish it with a manifest; weights that are not finite are never
        saved.
        """
        self._refuse_bad_weights()
        run_dir = self.args.output_dir
        name = f"checkpoint-{self.state.global_step}"
        _on_rank_zero_then_all(
            functools.partial(publish, Path(run_dir) / name),
            lambda staging: self._write_into(staging, name, model, trial),
        )
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir, save_total_limit=self.args.save_total_limit, use_mtime=False
            )

    def _write_into(self, staging: str, name: str, model: nn.Module, trial: Any) -> None:
        self._staging = staging
        try:
            super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            # torch's file writer reports a full disk without the errno that `publish` looks for.
            if "PytorchStreamWriter failed writing" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), staging) from error
            raise
        finally:
            self._staging = None
        if _is_distributed():
            dist.barrier()
        if self.args.should_save:
            written = Path(staging) / name
            for entry in sorted(written.iterdir()):
                os.rename(entry, Path(staging) / entry.name)
            shutil.rmtree(written)
            # Pickled arguments that nothing here ever loads: the run's own config.yaml says the same in the
            # open.
            (Path(staging) / "training_args.bin").unlink(missing_ok=True)

    def _refuse_bad_weights(self) -> None:
        bad = [
            name
            for name, value in self.model.named_parameters()
            if value.numel() and not value.isfinite().all()
        ]
        if bad:
            raise UserError(
                "IDLM-0503",
                f"step {self.state.global_step} left {len(bad)} weights that are not finite ({bad[0]}, ...)",
                fix="the last checkpoint is intact: lower train.learning_rate and resume=auto",
            )


def _add_overlap(step: StepLosses, overlap: Overlap) -> None:
    step.overlap_sums += overlap.sums
    step.overlap_counts += overlap.counts


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce(tensor: Tensor) -> None:
    """Sum `tensor` in place over all ranks; does nothing in a run of one process."""
    if _is_distributed():
        dist.all_reduce(tensor)


def _on_rank_zero_then_all(open_staging: Callable[[], Any], write: Callable[[str], None]) -> None:
    """Rank 0 opens the staging directory, all ranks write into it, rank 0 publishes; none runs ahead."""
    if not _is_distributed():
        with open_staging() as staging:
            write(str(staging))
        return
    name: list[str | None] = [None]
    if dist.get_rank() == 0:
        with open_staging() as staging:
            name[0] = str(staging)
            dist.broadcast_object_list(name, src=0)
            write(str(staging))
            dist.barrier()
    else:
        dist.broadcast_object_list(name, src=0)
        assert name[0] is not None
        write(name[0])
        dist.barrier()
    dist.barrier()
