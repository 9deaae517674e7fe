"""What watches a run: progress, metrics, tracking, held-out evaluation, samples, the report at its end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.files.disk import translate_disk_errors
from idlm.log import rank, run_fingerprint
from idlm.text.tokenizer import stop_token_ids
from idlm.train.checkpoint.resume import RUN_FOLDER, config_text
from idlm.train.checkpoint.stages import stage_directory
from idlm.train.data.checks import inspect_data
from idlm.train.loop.evaluation import SAMPLES_FILE, HeldOut, RunningSamples, read_samples
from idlm.train.loop.progress import EVALUATION, Progress, describe, read_metrics, training_records
from idlm.train.loop.tracking import open_tracker
from idlm.train.planning.estimate import estimate_run
from idlm.train.planning.report import RunFacts, Sampler, SampleReport, write_report

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from idlm.train.config.schema import TrainConfig
    from idlm.train.loop.trainer import IdlmTrainer
    from idlm.train.pipeline import Prepared

PLAN_FILE = "plan.json"
NUM_PROMPTS = 4


class Callbacks:
    """The callbacks that watch; `attach` before training, `close` after it, whatever its end was."""

    def __init__(
        self, config: TrainConfig, prepared: Prepared, args: TrainingArguments, console: Any
    ) -> None:
        run = Path(args.output_dir)
        self.progress = Progress(run / "metrics.jsonl", console=console)
        self.held_out: HeldOut | None = None
        self.samples: RunningSamples | None = None
        if config.eval.every is not None and prepared.held_out is not None:
            self.held_out = HeldOut(
                prepared.held_out, self.progress, every=config.eval.every, num_items=config.eval.num_items
            )
        if config.report.sample_every is not None:
            dataset = prepared.dataset if prepared.held_out is None else prepared.held_out
            self.samples = RunningSamples(
                [dataset.source.sample(index) for index in range(_num_prompts(dataset.source.num_samples))],
                prepared.tokenizer,
                self.progress,
                path=run / SAMPLES_FILE,
                every=config.report.sample_every,
                num_tokens=config.report.sample_tokens,
                row_length=prepared.dataset.row_length,
            )
        if rank() == 0:
            _store_plan(config, prepared, run, num_gpus=args.world_size)
            self.progress.tracker = open_tracker(config.wandb, run, asdict(config))

    @property
    def callbacks(self) -> list[Any]:
        """In the order in which they look at a step: figures of the step first."""
        return [one for one in (self.progress, self.held_out, self.samples) if one is not None]

    def attach(self, trainer: IdlmTrainer) -> None:
        """Watch this trainer."""
        self.progress.attach(trainer)
        for callback in (self.held_out, self.samples):
            if callback is not None:
                callback.trainer = trainer

    def close(self, *, failed: bool) -> None:
        """Give the terminal back and finish the tracker."""
        self.progress.close()
        if self.progress.tracker is not None:
            self.progress.tracker.close(failed=failed)


def finish(
    config: TrainConfig, prepared: Prepared, sampler: Sampler | None, *, seconds: float
) -> Path | None:
    """Describe the published checkpoint; None when no report is wanted. On rank 0."""
    if not config.report.enabled:
        return None
    target = Path(config.output_dir)
    run = target / RUN_FOLDER
    records = read_metrics(run / "metrics.jsonl")
    metrics = training_records(records)
    samples: SampleReport | None = None
    if sampler is not None and config.report.num_samples > 0:
        samples = sampler(target, config.report.num_samples)
    training_seconds = sum(record["seconds"] for record in metrics)
    stages = prepared.curriculum.stages
    facts = {
        "base": config.model.path or "new weights",
        "architecture": type(prepared.model).__name__,
        "objective": config.objective,
        **{f"stage {stage.index + 1}": stage.name for stage in stages},
        "mask token id": str(prepared.mask_token_id),
        "time": f"{seconds:.0f} s in this process, {training_seconds:.0f} s of training",
        "document tokens trained": f"{sum(record['num_tokens'] for record in metrics):,}",
        "last metrics": describe(metrics[-1]) if metrics else "none",
    }
    if prepared.adapter is not None:
        facts["adapter"] = (
            f"gated LoRA, rank {prepared.adapter.rank}, beside its base {prepared.adapter.base_path}; clean "
            "rows are the base model's"
        )
    stops = stop_token_ids(prepared.tokenizer, prepared.model.generation_config.to_dict())
    data = inspect_data(config.data, prepared.dataset, prepared.tokenizer, stop_token_ids=stops)
    exports = [stage_directory(config.output_dir, stage) for stage in stages[:-1]]
    plan = run / PLAN_FILE
    with translate_disk_errors(target / "report.md"):
        return write_report(
            target,
            metrics=metrics,
            config_yaml=config_text(config),
            fingerprint=run_fingerprint(),
            facts=facts,
            samples=samples,
            run=RunFacts(
                evaluations=tuple(record for record in records if EVALUATION in record),
                running_samples=tuple(read_samples(run / SAMPLES_FILE)),
                data_lines=tuple(data.lines()),
                exports=tuple(str(path.relative_to(target)) for path in exports if path.is_dir()),
                plan=json.loads(plan.read_text()) if plan.is_file() else None,
            ),
        )


def _store_plan(config: TrainConfig, prepared: Prepared, run: Path, *, num_gpus: int) -> None:
    """What was expected, for the report to compare."""
    estimate = estimate_run(config, prepared.model, prepared.dataset, prepared.curriculum, gpus=num_gpus)
    if estimate is not None:
        with translate_disk_errors(run / PLAN_FILE):
            run.mkdir(parents=True, exist_ok=True)
            (run / PLAN_FILE).write_text(json.dumps(estimate.as_dict()) + "\n", encoding="utf-8")


def _num_prompts(num_samples: int | None) -> int:
    return NUM_PROMPTS if num_samples is None else min(num_samples, NUM_PROMPTS)
