"""Held-out losses and acceptance by draft position while training, and the answers of the engine.

Losses use the objective and the attention that train, one packed row at a time, without gradients. For
answers, the weights of the step are published next to the run's checkpoints, decoded by the `Sampler` that
the command line passes in, as for the report, and removed. No random number is drawn, so that a run with
evaluations trains the same weights. Every rank takes part: ZeRO-3 needs all of them to run a layer, and to
publish. They wait while rank 0 decodes, which must take less than `train.hang_seconds`."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.train.config.schema import DECODED, EvalConfig
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.collectives import all_reduce, from_rank_zero
from idlm.train.loop.progress import EVALUATION, Progress, read_metrics
from idlm.train.objectives.curriculum import Curriculum, Stage

if TYPE_CHECKING:
    from idlm.train.loop.trainer import IdlmTrainer
    from idlm.train.report import Sampler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAnswers:
    """Greedy answers to held-out prompts. `publish` writes the weights as they are now into `directory`, to
    be decoded at the stride of a stage."""

    publish: Callable[[Stage], None]
    directory: Path
    sampler: Sampler
    settings: EvalConfig

    def measure(self, stage: Stage) -> dict[str, float]:
        """Figures of every decoder that fits, as `isd_exact_match`; none if the engine failed. Collective."""
        self.publish(stage)
        return from_rank_zero(self._decode)

    def _decode(self) -> dict[str, float]:
        # The engine needs what the last step has left unused.
        free_cached_memory()
        try:
            measurements = self.sampler(self.directory, self.settings.num_prompts).measurements
        finally:
            shutil.rmtree(self.directory)
        figures = {f"{one.decoder}_{name}": getattr(one, name) for one in measurements for name in DECODED}
        return {name: value for name, value in figures.items() if value is not None}

    def refuse_fall(self, record: dict[str, Any], metrics: Path, *, is_last: bool) -> None:
        """Raise UserError IDLM-0553 when a figure of `record`, the last one in `metrics`, is further below
        its best value than `stop_if` allows. The decoder that is chosen by default counts. After the last
        step there is nothing to stop: a warning then, and the model is published."""
        known = [one for one in read_metrics(metrics) if one.get("stage") == record["stage"]]
        for name, fall in self.settings.stop_if.items():
            key = next((key for key in record if key.endswith(f"_{name}")), "")
            best = max((one[key] for one in known if key in one), default=0.0)
            if not key or record[key] >= best - fall:
                continue
            note = (
                f"step {record['step']}: {key} is {record[key]:.3f} after {best:.3f}, and "
                f"eval.stop_if allows a fall of {fall:g}"
            )
            if is_last:
                log.warning("%s; it was the last step, and the model is published", note)
                continue
            raise UserError(
                "IDLM-0553",
                note,
                fix="checkpoints saved before are intact: lower train.learning_rate in a new run, or raise "
                "eval.stop_if to continue",
            )


class HeldOut(TrainerCallback):
    """Evaluates every `every` steps and at the end of every stage; `answers` None: losses alone."""

    def __init__(
        self,
        dataset: PackedDataset,
        progress: Progress,
        trainer: IdlmTrainer,
        settings: EvalConfig,
        answers: HeldOutAnswers | None = None,
    ) -> None:
        rows = dataset.rows_per_epoch()
        assert settings.every is not None, "without it nothing is evaluated"
        self.dataset, self.progress, self.trainer, self.every = dataset, progress, trainer, settings.every
        self.num_items = settings.num_items if rows is None else min(rows, settings.num_items)
        self.answers = answers

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        curriculum, step = self.trainer.step.curriculum, state.global_step
        stage = curriculum.stage_of_step(step - 1)
        if step % self.every and not curriculum.ends_stage(step):
            return
        with self.progress.paused():
            record = {"step": step, EVALUATION: self.num_items, **self.measure(stage)}
            if self.answers is not None:
                if (graphs := self.trainer.step.runner.graphs) is not None:
                    graphs.forget()
                record |= self.answers.measure(stage)
            if state.is_world_process_zero:
                self.progress.write(record)
            if self.answers is not None:
                answers, is_last = self.answers, step == curriculum.num_steps
                metrics = self.progress.metrics_path
                from_rank_zero(lambda: answers.refuse_fall(record, metrics, is_last=is_last))

    def measure(self, stage: Stage) -> dict[str, Any]:
        """Mean losses and acceptance of the held-out rows, laid out for `stage`. Collective."""
        trainer, objective = self.trainer, self.trainer.step.objective
        device = trainer.args.device
        # The clean half is evaluated whatever its weight.
        shown = dataclasses.replace(stage, index=0, num_steps=self.num_items, clean_weight=1.0)
        self.dataset.curriculum = Curriculum(stages=(shown,), global_batch=1)
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
                    overlap += terms.overlap.double()
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
