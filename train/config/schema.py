"""The configuration of `idlm-train`, typed and documented; `conf/train.yaml` and recipes give values, never
logic.

What may be wrong with it: idlm/train/config_check.py. Not frozen: OmegaConf fills them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from idlm.errors import UserError
from idlm.semantics import PROJECTIONS
from idlm.train.config.monitoring import EvalConfig, PlanConfig, ReportConfig, WandbConfig
from idlm.train.data.files import SUFFIXES
from idlm.train.data.settings import DataConfig
from idlm.train.objectives.curriculum import AUTO_BALANCED, Curriculum, Stage, split_steps

TASK_TOKENIZER = "task"
DEFAULT_CLEAN_WEIGHT = 0.2


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class ModelConfig:
    """What is trained."""

    path: str | None = _setting(None, "directory of the base checkpoint; null to start from `config`")
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "model_type and fields of a new transformers model, used when path is null"},
    )
    tokenizer: str | None = _setting(
        None, "tokenizer directory; null: the one in path; `task`: that of the tasks"
    )
    dtype: str = _setting("float32", "parameter dtype while training: float32 or bfloat16")
    mask_token_id: int | None = _setting(None, "null: the tokenizer's mask token, else its first spare row")
    attention: str = _setting(
        "auto",
        "auto; idlm_split (our kernel), idlm_flex, idlm_flash (GPU); idlm_documents, idlm_sdpa (dense mask)",
    )
    gradient_checkpointing: bool = _setting(False, "recompute activations in the backward pass")
    compile: str = _setting("auto", "on, off, or auto: torch.compile of the decoder layers on a GPU")


@dataclass(kw_only=True)
class AdapterConfig:
    """A gated LoRA: the base stays as it is, MASK rows alone learn (R-ISD)."""

    rank: int = _setting(128, "rank r of the low-rank update")
    alpha: float = _setting(256.0, "the update is scaled by alpha / rank")
    targets: list[str] = field(
        default_factory=lambda: list(PROJECTIONS),
        metadata={"help": "last names of the adapted linear layers"},
    )


@dataclass(kw_only=True)
class StageConfig:
    """One stage of the curriculum."""

    stride: int = _setting(
        2, "tokens one forward can finalise: blocks of stride-1 masks, with objective=block of stride tokens"
    )
    steps: int | None = _setting(None, "optimizer steps of this stage")
    fraction: float | None = _setting(None, "instead of steps: share of the run; all add up to 1")
    clean_weight: Any = field(
        default=None,
        metadata={"help": "s in L_mask + s * L_clean: a number, or auto; null: 0.2, and 0 with an adapter"},
    )


@dataclass(kw_only=True)
class LoopConfig:
    """How long, how fast, how much at once."""

    stages: list[StageConfig] = field(
        default_factory=list, metadata={"help": "curriculum; empty for objectives without strides"}
    )
    steps: int | None = _setting(
        None, "optimizer steps of the run, where stages give fractions or there are none"
    )
    epochs: float | None = _setting(None, "instead of steps: passes over a file")
    balance: str = _setting(
        "step", "which losses an auto clean_weight balances: this step's, or for less time the previous one's"
    )
    batch_size: int = _setting(1, "packed rows per device and micro-batch")
    accumulation: int = _setting(1, "micro-batches per optimizer step")
    global_batch: int | None = _setting(
        None, "packed rows per optimizer step over all processes; accumulation then follows"
    )
    max_length: int = _setting(4096, "longest sample in tokens")
    row_length: int | None = _setting(None, "rows of a packed row; null: what the longest sample needs")
    overlong: str = _setting("error", "samples above max_length: error, drop, truncate, or split into pieces")
    learning_rate: float = _setting(1e-5, "peak learning rate")
    warmup: float = _setting(
        0.03, "share of the steps that warms up; a cosine to zero follows, over all stages"
    )
    weight_decay: float = _setting(0.0, "AdamW weight decay")
    adam_beta2: float = _setting(0.999, "AdamW beta2")
    max_grad_norm: float = _setting(1.0, "gradient clipping; 0 switches it off")
    bf16: bool = _setting(
        False, "bfloat16: autocast over float32 parameters; with DeepSpeed weights, with float32 masters"
    )
    seed: int = _setting(0, "seed of new weights and dropout")
    device: str = _setting("auto", "auto, cpu or cuda")
    threads: int | None = _setting(None, "CPU threads; null leaves torch's choice")
    workers: int = _setting(0, "processes that prepare rows; 0 prepares them in the training process")
    log_every: int = _setting(10, "steps between metrics, which every stage ends with too")
    save_every: int = _setting(500, "steps between checkpoints")
    save_total_limit: int = _setting(2, "checkpoints kept")
    zero_stage: int | None = _setting(
        None,
        "DeepSpeed ZeRO: 1 shards the optimizer, 2 gradients too, 3 weights too, 0 nothing; null: without",
    )
    offload_optimizer: bool = _setting(False, "keep the ZeRO optimizer in host memory (slow)")
    deepspeed: str | None = _setting(None, "instead of zero_stage: your own DeepSpeed configuration file")
    hang_seconds: float = _setting(600.0, "a rank that makes no progress for so long ends the run, by name")


@dataclass(kw_only=True)
class ExportConfig:
    """The published checkpoint."""

    dtype: str | None = _setting(None, "float32 or bfloat16; null: as trained")
    merge: bool = _setting(False, "always false: a gated adapter cannot be merged into its base")


@dataclass(kw_only=True)
class TrainConfig:
    """Everything `idlm-train` knows."""

    output_dir: str = _setting(
        "outputs/train", "the checkpoint appears here; the run's own files in its folder `run`"
    )
    objective: str = _setting("idlm", "a registered objective: idlm, ar, or block (block diffusion)")
    mask_region: str = _setting("response", "response or all: which tokens are supervised")
    resume: str = _setting("auto", "auto, never, or a checkpoint directory of this very run")
    dry_run: bool = _setting(False, "check and print the plan, train nothing")
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig | None = _setting(None, "a gated LoRA (R-ISD); null trains all weights")
    data: DataConfig = field(default_factory=DataConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


def refuse_problems(problems: list[str]) -> None:
    """Raise UserError IDLM-0504 with every problem at once, if there is one."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        plural = "s" if len(problems) > 1 else ""
        raise UserError(
            "IDLM-0504",
            f"the configuration has {len(problems)} problem{plural}:{listed}",
            fix="correct the values on the command line or in the recipe",
        )


def missing_keys(config: TrainConfig) -> list[str]:
    """Keys that a run needs and this one lacks, as sentences. Imports nothing slow."""
    model, source, problems = config.model, config.data.source, []
    if model.path is None and not model.config:
        problems.append("model.path is missing (or give model.config to start from random weights)")
    elif model.path is None and model.tokenizer is None:
        problems.append("model.tokenizer is missing: a new model needs one (a directory, or `task`)")
    if source in (*SUFFIXES, "hf") and config.data.path is None:
        problems.append(f"data.path is missing: the {source} source needs one")
    return problems


def clean_weight(stage: StageConfig, config: TrainConfig) -> float | None:
    """The stage's s, None where it is balanced automatically. An adapter leaves clean rows as they are."""
    if stage.clean_weight is None:
        # The objectives import torch, which help and refusals of keys do not wait for.
        from idlm.train.objectives.base import OBJECTIVES

        has_clean_loss = config.adapter is None and OBJECTIVES.get(config.objective).predicts_next
        return DEFAULT_CLEAN_WEIGHT if has_clean_loss else 0.0
    return None if stage.clean_weight == AUTO_BALANCED else float(stage.clean_weight)


def settle_accumulation(config: TrainConfig, *, world_size: int) -> TrainConfig:
    """`config` with the accumulation that `train.global_batch` asks of `world_size` processes.

    UserError IDLM-0516 when no whole number of micro-batches makes it, or another one was asked for.
    """
    loop = config.train
    if loop.global_batch is None:
        return config
    per_pass = loop.batch_size * world_size
    accumulation, rest = divmod(loop.global_batch, per_pass)
    if rest or accumulation == 0:
        fitting = [
            n for n in range(1, loop.global_batch + 1) if loop.global_batch % (n * loop.batch_size) == 0
        ]
        smaller = [n for n in range(1, loop.batch_size) if loop.global_batch % (n * world_size) == 0]
        fixes = [f"start {', '.join(map(str, fitting))} processes"] if fitting else []
        fixes += [f"set train.batch_size={smaller[-1]}"] if smaller else []
        raise UserError(
            "IDLM-0516",
            f"train.global_batch={loop.global_batch} rows are not a multiple of {world_size} processes x "
            f"train.batch_size={loop.batch_size}",
            fix=", or ".join([*fixes, f"set train.global_batch={max(1, accumulation) * per_pass}"]),
        )
    if loop.accumulation not in (1, accumulation):
        raise UserError(
            "IDLM-0516",
            f"train.accumulation={loop.accumulation} contradicts train.global_batch={loop.global_batch}, "
            f"which is {accumulation} micro-batches on {world_size} processes",
            fix="give one of them",
        )
    return replace(config, train=replace(loop, accumulation=accumulation))


def make_curriculum(config: TrainConfig, *, world_size: int, rows_per_epoch: int | None) -> Curriculum:
    """Stages with absolute steps; `rows_per_epoch` is None for an endless source."""
    loop = config.train
    global_batch = loop.batch_size * loop.accumulation * world_size
    stages = loop.stages or [StageConfig(stride=1, fraction=1.0, clean_weight=1.0)]
    steps = [stage.steps for stage in stages if stage.steps is not None]
    if len(steps) != len(stages):
        total = loop.steps
        if total is None:
            assert rows_per_epoch is not None and loop.epochs is not None, f"{rows_per_epoch=} {loop.epochs=}"
            total = max(len(stages), round(rows_per_epoch * loop.epochs / global_batch))
            epochs = total * global_batch / rows_per_epoch
            if epochs > 2 * loop.epochs:
                warnings.warn(
                    f"train.epochs={loop.epochs:g} of {rows_per_epoch} packed rows is less than one step of "
                    f"{global_batch} rows for every stage: the {total} steps are {epochs:.0f} epochs. Give "
                    "more data, or a smaller train.global_batch",
                    stacklevel=2,
                )
        steps = split_steps(total, [stage.fraction or 0.0 for stage in stages])
    return Curriculum(
        stages=tuple(
            Stage(
                index=index,
                stride=stage.stride,
                num_steps=num_steps,
                clean_weight=clean_weight(stage, config),
            )
            for index, (stage, num_steps) in enumerate(zip(stages, steps, strict=True))
        ),
        global_batch=global_batch,
    )
