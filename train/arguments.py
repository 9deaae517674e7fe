"""Arguments of transformers' Trainer, which open the process group, and the processes of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from idlm.errors import UserError
from idlm.log import num_processes
from idlm.train.checkpoint.resume import RUN_FOLDER, config_hash
from idlm.train.checkpoint.same_run import RunShape
from idlm.train.config.schema import LoopConfig, TrainConfig
from idlm.train.distributed.collectives import gather_objects
from idlm.train.distributed.deepspeed import keeps_fp32_masters, uses_deepspeed, zero_stage

if TYPE_CHECKING:
    from transformers import TrainingArguments


def training_arguments(config: TrainConfig) -> TrainingArguments:
    """The arguments of the Trainer, to be kept alive: ZeRO-3 reads them. Opens the process group."""
    from transformers import TrainingArguments
    from transformers.utils.logging import disable_progress_bar

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
        bf16=loop.bf16 or keeps_fp32_masters(config),
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


def launcher_pid() -> int | None:
    """The process id of the launcher of this rank, before `training_arguments`; None without one."""
    return os.getppid() if "LOCAL_RANK" in os.environ else None


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
