"""Held-out losses and acceptance by draft position while training.

Uses the objective and the attention that train, one packed row at a time, without gradients. No random number
is drawn, so that a run with evaluations trains the same weights. Every rank takes part: ZeRO-3 needs all of
them to run a layer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.collectives import all_reduce
from idlm.train.loop.metrics import EVALUATION
from idlm.train.loop.progress import Progress
from idlm.train.objectives.curriculum import Curriculum, Stage

if TYPE_CHECKING:
    from idlm.train.loop.trainer import IdlmTrainer


class HeldOut(TrainerCallback):
    """Evaluates every `every` steps and at the end of every stage."""

    def __init__(
        self, dataset: PackedDataset, progress: Progress, trainer: IdlmTrainer, *, every: int, num_items: int
    ) -> None:
        rows = dataset.rows_per_epoch()
        self.dataset, self.progress, self.trainer, self.every = dataset, progress, trainer, every
        self.num_items = num_items if rows is None else min(rows, num_items)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        curriculum, step = self.trainer.step.curriculum, state.global_step
        stage = curriculum.stage_of_step(step - 1)
        if step % self.every and not curriculum.ends_stage(step):
            return
        with self.progress.paused():
            record = {"step": step, EVALUATION: self.num_items, **self.measure(stage)}
            if state.is_world_process_zero:
                self.progress.write(record)

    def measure(self, stage: Stage) -> dict[str, Any]:
        """Mean losses and acceptance of the held-out rows, laid out for `stage`. Collective."""
        trainer = self.trainer
        objective, device = trainer.step.objective, trainer.args.device
        # The clean half is evaluated whatever its weight.
        shown = dataclasses.replace(stage, index=0, num_steps=self.num_items, clean_weight=1.0)
        self.dataset.start(Curriculum(stages=(shown,), global_batch=1))
        totals = torch.zeros(2, len(objective.term_names), device=device, dtype=torch.float64)
        overlap = torch.zeros(2, stage.stride - 1, device=device, dtype=torch.float64)
        world, own = trainer.args.world_size, trainer.args.process_index
        was_training = trainer.model.training
        trainer.model.eval()
        for start in range(0, self.num_items, world):
            # A rank without an item of its own repeats one and does not count it.
            batch = collate([self.dataset[min(start + own, self.num_items - 1)]])
            moved = {name: value.to(device) for name, value in batch.items()}
            terms = trainer.step.evaluate(shown, moved, want_overlap=stage.stride > 1)
            if start + own < self.num_items:
                counts = objective.counts(batch, stage=shown, want_overlap=True)
                totals += torch.stack([terms.sums.double(), counts.to(device).double()])
                if terms.overlap is not None:
                    overlap += torch.stack([terms.overlap.sums, terms.overlap.counts]).double()
        trainer.model.train(was_training)
        all_reduce(totals)
        all_reduce(overlap)
        means = (totals[0] / totals[1].clamp_min(1)).tolist()
        return {
            "stage": stage.index,
            "stride": stage.stride,
            **{f"{name}_loss": mean for name, mean in zip(objective.term_names, means, strict=True)},
            "acceptance": (overlap[0] / overlap[1])[overlap[1] > 0].tolist(),
        }
