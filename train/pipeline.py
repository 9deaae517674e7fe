"""One run from configuration to report: base model, data, training, export. Does not parse a command line.

`run_training` is the entry; `_run` lists the parts in order, and each part is a function of its own.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from idlm.devices import require_gpu
from idlm.errors import UserError
from idlm.log import rank
from idlm.lora import AdapterSpec, base_identity
from idlm.text.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    num_token_ids,
    stop_token_ids,
)
from idlm.train.checkpoint.resume import (
    RUN_FOLDER,
    choose_checkpoint,
    finished_text,
    store_config,
    store_finished,
)
from idlm.train.checkpoint.run_lock import exclusive_output
from idlm.train.checkpoint.stages import StageExports, publish_weights, stage_directory
from idlm.train.config.check import check_config
from idlm.train.config.schema import (
    TASK_TOKENIZER,
    TrainConfig,
    settle_accumulation,
)
from idlm.train.config.trainer_arguments import (
    num_processes,
    require_same_config_everywhere,
    shape,
    training_arguments,
)
from idlm.train.data.checks import inspect_data
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.open import remember_base, remember_data
from idlm.train.data.prepare import make_objective, prepare_data
from idlm.train.distributed.collectives import from_rank_zero, is_distributed
from idlm.train.distributed.deepspeed import gathering_forward, num_elements, num_parameters, zero_stage
from idlm.train.loop.signals import StopOnSignal
from idlm.train.loop.watchdog import Watchdog, watching
from idlm.train.model.attention import choose_attention
from idlm.train.model.checks import (
    check_model,
    grow_vocabulary,
    mask_token,
    num_vocabulary_rows,
    prepare_mask_row,
    window_problem,
)
from idlm.train.model.compile import compile_layers, compiles
from idlm.train.model.gated_lora import add_adapter, choose_mask
from idlm.train.model.load import create_base, load_base
from idlm.train.objectives.base import OBJECTIVES, Objective
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.planning.memory_advice import explain_out_of_memory
from idlm.train.planning.state import check_disk

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from idlm.train.loop.progress import Progress
    from idlm.train.loop.trainer import IdlmTrainer
    from idlm.train.planning.report import Sampler

log = logging.getLogger(__name__)
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything a run needs, checked and loaded."""

    model: PreTrainedModel
    tokenizer: Any
    mask_token_id: int | None
    objective: Objective
    dataset: PackedDataset
    curriculum: Curriculum
    attention: str
    held_out: PackedDataset | None = None
    adapter: AdapterSpec | None = None
    base_identity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`signal` is None when the run finished; `report` is None when none was written."""

    signal: int | None
    last_step: int
    seconds: float
    report: Path | None = None


def run_training(config: TrainConfig, *, console: Any, sampler: Sampler | None = None) -> Outcome:
    """Train, export and report. Every rank of a distributed run calls this; rank 0 publishes and reports."""
    start = time.perf_counter()
    check_config(config)
    if config.train.device != "auto":
        require_gpu(config.train.device, key="train.device")
    if config.adapter is not None and config.model.path is None:
        raise UserError(
            "IDLM-0531",
            "an adapter on new random weights cannot be used: its base is stored nowhere",
            fix="give model.path, or train the new weights first and adapt their checkpoint",
        )
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    config = settle_accumulation(config, world_size=num_processes())
    args = training_arguments(config)
    with watching(config.train.hang_seconds) as watchdog, exclusive_output(config.output_dir):
        return _run(config, args, watchdog, console=console, sampler=sampler, start=start)


def _run(
    config: TrainConfig,
    args: TrainingArguments,
    watchdog: Watchdog,
    *,
    console: Any,
    sampler: Sampler | None,
    start: float,
) -> Outcome:
    require_same_config_everywhere(config)
    finished = from_rank_zero(lambda: finished_text(config)) if is_distributed() else None
    if finished is not None:
        # A run of one process is told so by the command line, before it imports all this.
        if rank() == 0:
            console.print(finished, highlight=False, soft_wrap=True, markup=False)
        return Outcome(signal=None, last_step=0, seconds=time.perf_counter() - start)
    checkpoint = from_rank_zero(lambda: choose_checkpoint(config, shape(config)))
    prepared = prepare(config, world_size=args.world_size, device=args.device)
    args.max_steps = prepared.curriculum.num_steps
    announce(config, prepared, checkpoint, console)
    from_rank_zero(lambda: check_disk(config, prepared.model, prepared.curriculum))
    from_rank_zero(lambda: store_config(config))
    run, source = Path(config.output_dir) / RUN_FOLDER, prepared.dataset.source
    from_rank_zero(lambda: remember_data(run, source, is_continued=checkpoint is not None))
    identity = prepared.base_identity
    from_rank_zero(lambda: remember_base(run, identity, is_continued=checkpoint is not None))
    received, last_step = train(config, prepared, args, checkpoint, console, watchdog)
    watchdog.move("finish", last_step)
    if last_step < prepared.curriculum.num_steps:
        return Outcome(signal=received, last_step=last_step, seconds=time.perf_counter() - start)
    publish_weights(config, prepared, stride=prepared.curriculum.max_stride, target=Path(config.output_dir))
    report = None
    if rank() == 0:
        if config.report.enabled:
            from idlm.train.planning.report import report_run

            report = report_run(
                config, prepared, sampler, num_gpus=args.world_size, seconds=time.perf_counter() - start
            )
        store_finished(config, num_steps=last_step)
    return Outcome(signal=None, last_step=last_step, seconds=time.perf_counter() - start, report=report)


def prepare(config: TrainConfig, *, world_size: int, device: torch.device) -> Prepared:
    """Load base, tokenizer and data, and check that they fit together."""
    is_16_bit = config.train.bf16 or config.model.dtype == "bfloat16"
    attention = choose_attention(config.model.attention, device, is_16_bit=is_16_bit)
    tokenizer = prepare_tokenizer(config)
    model = prepare_model(config, tokenizer, attention, device).to(device)
    mask_token_id, mask_row_D = prepare_mask(config, model, tokenizer)
    with gathering_forward(model):
        check_model(model, attention=attention)
    adapter = prepare_adapter(config, model, mask_row_D)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiles(config.model.compile, device, zero_stage=zero_stage(config)):
        compile_layers(model)
    check_vocabulary(tokenizer, num_vocabulary_rows(model))
    problem = window_problem(model.config, config.train.max_length)
    if problem is not None:
        raise UserError("IDLM-0509", problem, fix="lower train.max_length to the window")
    objective = make_objective(config, model, tokenizer, mask_token_id)
    data = prepare_data(config, tokenizer, objective, mask_token_id, world_size)
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        mask_token_id=mask_token_id,
        objective=objective,
        dataset=data.dataset,
        curriculum=data.curriculum,
        held_out=data.held_out,
        attention=attention,
        adapter=adapter,
        base_identity=_identity_of_base(adapter),
    )


def prepare_tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of the base or the one asked for; `task` is that of the tasks."""
    if config.model.tokenizer == TASK_TOKENIZER:
        from idlm.tasks.tokenizer import save_tokenizer

        with tempfile.TemporaryDirectory() as temporary:
            save_tokenizer(Path(temporary))
            return load_tokenizer(temporary)
    directory = Path(config.model.tokenizer or config.model.path or "")
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise UserError(
            "IDLM-0510",
            f"{directory} has no tokenizer files, and training data is text",
            fix="copy the tokenizer files beside the checkpoint, or set model.tokenizer",
        )
    return tokenizer


def prepare_model(
    config: TrainConfig, tokenizer: Any, attention: str, device: torch.device
) -> PreTrainedModel:
    """The base: loaded from `model.path`, or new with a vocabulary that leaves a spare row for the mask
    token.
    """
    dtype = getattr(torch, config.model.dtype)
    if config.model.path is not None:
        return load_base(config.model.path, attention=attention, dtype=dtype)
    values = dict(config.model.config)
    num_rows = -(-(num_token_ids(tokenizer) + 1) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    values.setdefault("vocab_size", num_rows)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.setdefault(name, getattr(tokenizer, name))
    return create_base(values, attention=attention, dtype=dtype, seed=config.train.seed, device=device)


def prepare_mask(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any
) -> tuple[int | None, torch.Tensor | None]:
    """The mask token's id, with a usable row; grows the vocabulary only when it has no spare row.

    An adapter changes nothing in the base: it may get an embedding of its own, returned as its start [D].
    """
    if not OBJECTIVES.get(config.objective).places_masks:
        return None, None
    if config.adapter is not None:
        return choose_mask(model, tokenizer, config.model.mask_token_id)
    mask_token_id, has_row = mask_token(tokenizer, num_vocabulary_rows(model), config.model.mask_token_id)
    if not has_row:
        grow_vocabulary(model, mask_token_id)
    prepare_mask_row(model, mask_token_id)
    return mask_token_id, None


def prepare_adapter(
    config: TrainConfig, model: PreTrainedModel, mask_row_D: torch.Tensor | None
) -> AdapterSpec | None:
    """Freeze the base and adapt it, where the configuration asks for that."""
    if config.adapter is None:
        return None
    spec = AdapterSpec(
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
        targets=tuple(config.adapter.targets),
        base_path=None if config.model.path is None else str(Path(config.model.path).resolve()),
    )
    add_adapter(model, spec, mask_row_D=mask_row_D, seed=config.train.seed)
    return spec


def _identity_of_base(adapter: AdapterSpec | None) -> str | None:
    if adapter is None or adapter.base_path is None:
        return None
    return base_identity(Path(adapter.base_path))


def announce(config: TrainConfig, prepared: Prepared, checkpoint: Path | None, console: Any) -> None:
    """Say what will happen, before it does."""
    if rank() != 0:
        return
    curriculum, model = prepared.curriculum, prepared.model
    lines = [
        f"{type(model).__name__}, {num_parameters(model):,} parameters, {config.model.dtype}, "
        f"{prepared.attention} on {model.device}",
        f"objective {config.objective} on {config.data.source}, {curriculum.num_steps} steps of "
        f"{curriculum.global_batch} x {prepared.dataset.row_length} rows",
        *(f"stage {stage.index + 1}: {stage.name}" for stage in curriculum.stages if stage.stride > 1),
        *([] if prepared.adapter is None else [_describe_adapter(prepared.adapter, model)]),
        f"checkpoint in {config.output_dir}, the run's files in {Path(config.output_dir) / RUN_FOLDER}",
    ]
    stops = stop_token_ids(prepared.tokenizer, model.generation_config.to_dict())
    lines += inspect_data(config, prepared.dataset, prepared.tokenizer, stop_token_ids=stops).lines()
    if checkpoint is not None:
        lines.append(f"continues from {checkpoint}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _describe_adapter(adapter: AdapterSpec, model: PreTrainedModel) -> str:
    trained = sum(num_elements(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return (
        f"gated LoRA, rank {adapter.rank}, on {', '.join(adapter.targets)}: {trained:,} parameters train; "
        "clean rows are the base model's, so that the clean loss is constant and only the mask loss counts"
    )


def train(
    config: TrainConfig,
    prepared: Prepared,
    args: TrainingArguments,
    checkpoint: Path | None,
    console: Any,
    watchdog: Watchdog,
) -> tuple[int | None, int]:
    """(signal that stopped the run or None, last step done)."""
    from transformers import PrinterCallback

    from idlm.train.loop.progress import Progress
    from idlm.train.loop.trainer import IdlmTrainer

    progress, stop, failed = (
        Progress(Path(args.output_dir) / "metrics.jsonl", console=console),
        StopOnSignal(),
        True,
    )

    def publish_stage(stage: Stage) -> None:
        trainer.at("export")
        trainer.refuse_bad_weights()
        publish_weights(
            config, prepared, stride=stage.stride, target=stage_directory(config.output_dir, stage)
        )

    trainer = IdlmTrainer(
        model=prepared.model,
        args=args,
        train_dataset=prepared.dataset,
        objective=prepared.objective,
        attention=prepared.attention,
        log_every=config.train.log_every,
        # The figures of a step come before anything else is done after it.
        callbacks=[watchdog, progress],
        balance=config.train.balance,
    )
    trainer.zero_stage, trainer.watchdog = zero_stage(config), watchdog
    trainer.remove_callback(PrinterCallback)
    progress.attach(trainer)
    _add_evaluation(config, prepared, trainer, progress)
    trainer.add_callback(StageExports(prepared.curriculum, publish_stage))
    trainer.add_callback(stop)
    if rank() == 0 and config.wandb.mode != "disabled":
        from idlm.train.loop.tracking import open_tracker

        progress.tracker = open_tracker(config.wandb, Path(args.output_dir), asdict(config))
    try:
        with stop.listening(), explain_out_of_memory(config, prepared.model, world_size=args.world_size):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        failed = False
    finally:
        progress.close()
        if progress.tracker is not None:
            progress.tracker.close(failed=failed)
    return stop.received, trainer.state.global_step


def _add_evaluation(
    config: TrainConfig, prepared: Prepared, trainer: IdlmTrainer, progress: Progress
) -> None:
    """Evaluate held-out data while training, where the configuration asks for it."""
    if config.eval.every is None or prepared.held_out is None:
        return
    from idlm.train.loop.evaluation import HeldOut

    trainer.add_callback(
        HeldOut(
            prepared.held_out,
            progress,
            trainer,
            every=config.eval.every,
            num_items=config.eval.num_items,
        )
    )
