"""One run from configuration to report: base model, data, training, export. Does not parse a command line.

`run_training` is the entry; `_run` lists the parts in order, and each part is a function of its own."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from idlm.cli.command import absent
from idlm.devices import is_out_of_memory, require_gpu
from idlm.errors import UserError
from idlm.log import num_local_processes, num_processes, rank
from idlm.train.check import check_config
from idlm.train.checkpoint.export import StageExports, publish_weights, stage_directory
from idlm.train.checkpoint.resume import (
    RUN_FOLDER,
    RunShape,
    choose_checkpoint,
    config_hash,
    exclusive_output,
    finished_text,
    needs_resharding,
    store_config,
    store_finished,
)
from idlm.train.checkpoint.save import reshard
from idlm.train.checkpoint.writer import USABLE_SHARE, CheckpointWriter, host_memory
from idlm.train.config.schema import LoopConfig, TrainConfig, with_accumulation
from idlm.train.data.checks import held_out_text, run_warnings
from idlm.train.distributed.collectives import from_rank_zero, gather_objects, is_distributed
from idlm.train.distributed.deepspeed import (
    has_fp32_masters,
    num_parameters,
    num_trained_parameters,
    route_library_output,
    uses_deepspeed,
    zero_stage,
)
from idlm.train.loop.progress import Progress
from idlm.train.loop.trackers import open_trackers
from idlm.train.loop.trainer import IdlmTrainer, PrepareSaves, StopRequests, TimeLimit
from idlm.train.loop.watchdog import Watchdog, watching
from idlm.train.objectives.curriculum import Stage
from idlm.train.planning.estimate import explain_out_of_memory
from idlm.train.planning.state import check_disk, plan_disk, size_text
from idlm.train.prepare import Prepared, data_report, prepare, remember_base, remember_data
from idlm.train.report import Sampler, report_run

log = logging.getLogger(__name__)
ASSUMED_BYTES_PER_SECOND = 200e6
"""Of a save that has not been measured: a slow network disk."""


def training_arguments(config: TrainConfig) -> TrainingArguments:
    """The arguments of the Trainer; hold a reference, because ZeRO-3 reads them. Opens the process group."""
    loop = config.train
    disable_progress_bar()  # Those of weight files would break our own progress line.
    on_gpu = loop.device != "cpu" and torch.cuda.is_available()
    deepspeed = None
    if uses_deepspeed(loop):
        from idlm.train.distributed.deepspeed_settings import (
            deepspeed_config,
            open_communication,
            prepare_environment,
        )

        prepare_environment(on_cpu=not on_gpu)
        deepspeed = deepspeed_config(config, "cuda" if on_gpu else "cpu")
    args = TrainingArguments(
        output_dir=str(Path(config.output_dir) / RUN_FOLDER),
        per_device_train_batch_size=loop.batch_size,
        gradient_accumulation_steps=loop.accumulation,
        learning_rate=loop.learning_rate,
        warmup_steps=loop.warmup,
        weight_decay=loop.weight_decay,
        adam_beta2=loop.adam_beta2,
        max_grad_norm=loop.max_grad_norm,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        bf16=loop.bf16 or has_fp32_masters(config),
        seed=loop.seed,
        use_cpu=not on_gpu,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=loop.save_every,
        save_total_limit=loop.save_total_limit,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        deepspeed=deepspeed,
        ddp_find_unused_parameters=False,
        # More than there are cores would only warn and wait for each other.
        dataloader_num_workers=min(loop.workers, len(os.sched_getaffinity(0))),
        accelerator_config={"non_blocking": on_gpu},  # Otherwise a batch waits for the step before.
    )
    if not on_gpu:
        # Among several ranks it is "cpu:0", to which torch 2.11 restores no tensor of a checkpoint.
        vars(args)["_setup_devices"] = torch.device("cpu")
    if args.n_gpu > 1:
        raise UserError(
            "IDLM-0508",
            f"{args.n_gpu} GPUs are visible to one process",
            fix="start with `torchrun --nproc-per-node N -m idlm.train.cli` or set CUDA_VISIBLE_DEVICES=0",
        )
    if deepspeed is not None:
        open_communication()
    return args


def shape(loop: LoopConfig) -> RunShape:
    """Return how this run divides a step, from its configuration and launcher."""
    return RunShape(
        world_size=num_processes(),
        batch_size=loop.batch_size,
        accumulation=loop.accumulation,
        zero_stage=zero_stage(loop),
    )


def require_same_config_everywhere(config: TrainConfig) -> None:
    """Raise UserError IDLM-0514 on all ranks when one was started with another configuration. Collective."""
    hashes = gather_objects(config_hash(config))
    odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if odd:
        raise UserError(
            "IDLM-0514",
            f"ranks {odd} were started with another configuration than rank 0 (hashes {hashes})",
            fix="compose once and give every rank that file, as recipes/launch/*.sh do (config=FILE)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """`signal` stopped the run, or the end of its time; `saved_step` is that of its last save."""

    signal: int | None
    last_step: int
    saved_step: int = 0
    is_time_up: bool = False
    report: Path | None = None


def run_training(config: TrainConfig, *, console: Any, sampler: Sampler | None = None) -> RunOutcome:
    """Train, export and report. Every rank of a distributed run calls this; rank 0 publishes and reports."""
    start = time.perf_counter()
    check_config(config)
    if config.train.device == "cuda":
        require_gpu(config.train.device, key="train.device")
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    config = with_accumulation(config, world_size=num_processes())
    launcher = os.getppid() if "LOCAL_RANK" in os.environ else None
    route_library_output()
    args = training_arguments(config)
    with (
        # accelerate would import it where it is installed, to check that a model is not wrapped by it.
        absent(*() if uses_deepspeed(config.train) else ("deepspeed",)),
        watching(config.train.hang_seconds, launcher=launcher) as watchdog,
        exclusive_output(config.output_dir),
    ):
        return _run(config, args, watchdog, console=console, sampler=sampler, start=start)


def _run(
    config: TrainConfig,
    args: TrainingArguments,
    watchdog: Watchdog,
    *,
    console: Any,
    sampler: Sampler | None,
    start: float,
) -> RunOutcome:
    # In a run of one process the command line has looked for its end before the imports of this file.
    if is_distributed():
        require_same_config_everywhere(config)
        finished = from_rank_zero(lambda: finished_text(config))
        if finished is not None:
            if rank() == 0:
                console.print(finished, highlight=False, soft_wrap=True, markup=False)
            return RunOutcome(signal=None, last_step=0)
    now = shape(config.train)
    checkpoint = from_rank_zero(lambda: choose_checkpoint(config, now))
    if checkpoint is not None and needs_resharding(now, checkpoint):
        checkpoint = reshard(checkpoint)
    prepared = prepare(config, world_size=args.world_size, device=args.device)
    args.max_steps = prepared.curriculum.num_steps
    announce(config, prepared, checkpoint, console)
    from_rank_zero(lambda: check_disk(config, prepared.model, prepared.curriculum))
    from_rank_zero(lambda: store_config(config))
    run, is_continued = Path(config.output_dir) / RUN_FOLDER, checkpoint is not None
    source, date = prepared.dataset.source, prepared.date
    from_rank_zero(lambda: remember_data(run, source, date=date, is_continued=is_continued))
    if (identity := prepared.base_identity) is not None:
        from_rank_zero(lambda: remember_base(run, identity, is_continued=is_continued))
    outcome, free = train(config, prepared, args, checkpoint, console, watchdog, sampler)
    last_step = outcome.last_step
    watchdog.move("finish", last_step)
    if last_step < prepared.curriculum.num_steps:
        return outcome
    publish_weights(config, prepared, stride=prepared.curriculum.max_stride, target=Path(config.output_dir))
    report = None
    if rank() == 0:
        if config.report.enabled:
            report = write_report(config, prepared, sampler, seconds=time.perf_counter() - start, free=free)
        store_finished(config, num_steps=last_step)
    return RunOutcome(signal=None, last_step=last_step, report=report)


def write_report(
    config: TrainConfig, prepared: Prepared, sampler: Sampler | None, **facts: Any
) -> Path | None:
    """Write the report of the published checkpoint; None if memory is short, which fails no finished run."""
    try:
        return report_run(config, prepared, sampler, **facts)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        log.warning("no report: out of memory: %s", str(error).partition("\n")[0])
        return None


def announce(config: TrainConfig, prepared: Prepared, checkpoint: Path | None, console: Any) -> None:
    if rank() != 0:
        return
    curriculum, model = prepared.curriculum, prepared.model
    lines = [
        f"{type(model).__name__}, {num_parameters(model):,} parameters, {config.model.dtype}, "
        f"{prepared.attention} on {model.device}",
        f"objective {config.objective} on {config.data.source}, {curriculum.num_steps} steps of "
        f"{curriculum.global_batch} x {prepared.dataset.row_length} rows",
        *([] if prepared.mask_text is None else [prepared.mask_text]),
        *(f"stage {stage.index + 1}: {stage.name}" for stage in curriculum.stages if stage.stride > 1),
        f"checkpoint in {config.output_dir}, the run's files in {Path(config.output_dir) / RUN_FOLDER}",
    ]
    if prepared.adapter is not None:
        trained = num_trained_parameters(model)
        lines.append(
            f"{'gated ' if config.is_gated else ''}LoRA, rank {prepared.adapter.rank}, on "
            f"{', '.join(prepared.adapter.targets)}: {trained:,} parameters train"
        )
        if config.is_gated:
            lines.append("clean rows are the base model's: the clean loss is constant, the mask loss counts")
    if config.train.save == "async":
        lines.append(copy_text(config, prepared))
    report = data_report(config, prepared)
    lines += report.lines()
    lines += held_out_text(prepared.dataset, prepared.held_out)
    lines += run_warnings(config, model.config.get_text_config(), report.lengths)
    if checkpoint is not None:
        lines.append(f"continues from {checkpoint}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def copy_text(config: TrainConfig, prepared: Prepared) -> str:
    needed = plan_disk(config, prepared.model, prepared.curriculum).checkpoint_bytes
    if zero_stage(config.train):
        needed = needed * num_local_processes() // num_processes()
    available = host_memory()[0]
    note = f"train.save=async: copies take {size_text(needed)} of {size_text(available)} of host memory"
    return note if needed <= USABLE_SHARE * available else f"{note}, too much: training waits for saves"


def train(
    config: TrainConfig,
    prepared: Prepared,
    args: TrainingArguments,
    checkpoint: Path | None,
    console: Any,
    watchdog: Watchdog,
    sampler: Sampler | None,
) -> tuple[RunOutcome, Callable[[], None]]:
    """Train until the last step or a stop; returns also what gives the memory of training back."""
    run, loop, failed = Path(args.output_dir), config.train, True
    progress = Progress(run / "metrics.jsonl", console=console)
    writer = CheckpointWriter(loop.save, num_sharing=num_local_processes() if uses_deepspeed(loop) else 1)
    stop = StopRequests(writer)
    if loop.max_minutes is not None:
        num_bytes = plan_disk(config, prepared.model, prepared.curriculum).checkpoint_bytes
        stop.limit = TimeLimit(loop.max_minutes, writer, assumed_save=num_bytes / ASSUMED_BYTES_PER_SECOND)
    trainer = IdlmTrainer(
        model=prepared.model,
        args=args,
        train_dataset=prepared.dataset,
        objective=prepared.losses,
        attention=prepared.attention,
        loop=loop,
        callbacks=[watchdog, progress],  # Figures of a step come before anything else done after it.
    )
    trainer.shape, trainer.watchdog, trainer.writer = shape(loop), watchdog, writer
    watchdog.is_stopping = lambda: stop.received is not None or stop.is_time_up
    trainer.remove_callback(PrinterCallback)
    progress.attach(trainer)
    if config.eval.every is not None and prepared.held_out is not None:
        _add_evaluation(config, prepared, trainer, progress, sampler)
    if len(prepared.curriculum.stages) > 1:
        publish = partial(_publish_stage, config, prepared, trainer)
        trainer.add_callback(StageExports(prepared.curriculum, publish))
    trainer.add_callback(stop)
    if writer.is_async:
        trainer.add_callback(PrepareSaves(trainer))
    trackers = open_trackers(config, run) if config.has_trackers and rank() == 0 else []
    progress.mirrors = [tracker.log for tracker in trackers]
    try:
        with stop.listening(), writer.lingering():
            trainer.train() if checkpoint is None else trainer.resume(checkpoint)
            trainer.finish_save()
        failed = False
    except (RuntimeError, MemoryError) as error:
        explain_out_of_memory(error, config, prepared.model, world_size=args.world_size)
        raise
    finally:
        progress.close()
        for tracker in trackers:
            tracker.close(failed=failed)
    outcome = RunOutcome(
        signal=stop.received,
        last_step=trainer.state.global_step,
        saved_step=trainer.saved_step,
        is_time_up=stop.is_time_up,
    )
    return outcome, trainer.release


def _publish_stage(
    config: TrainConfig, prepared: Prepared, trainer: IdlmTrainer, stage: Stage, target: Path | None = None
) -> None:
    trainer.at("export")
    trainer.refuse_bad_weights()
    target = target or stage_directory(config.output_dir, stage)
    publish_weights(config, prepared, stride=stage.stride, target=target)


def _add_evaluation(
    config: TrainConfig, prepared: Prepared, trainer: IdlmTrainer, progress: Progress, sampler: Sampler | None
) -> None:
    from idlm.train.loop.evaluation import HeldOut, HeldOutAnswers

    settings, answers = config.eval, None
    assert prepared.held_out is not None
    if settings.num_prompts and sampler is not None:
        directory = Path(config.output_dir) / RUN_FOLDER / "decoded"
        answers = HeldOutAnswers(
            publish=lambda stage: _publish_stage(config, prepared, trainer, stage, directory),
            directory=directory,
            sampler=sampler,
            settings=settings,
        )
    trainer.add_callback(HeldOut(prepared.held_out, progress, trainer, settings, answers))
