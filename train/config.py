"""The configuration of `idlm-train`, typed and documented; `conf/train.yaml` and recipes give values, never
logic.

`problems` collects everything that is wrong before anything heavy is loaded. Not frozen: OmegaConf fills
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from idlm.checkpoint import foreign_files
from idlm.errors import UserError
from idlm.lora import PROJECTIONS
from idlm.semantics import MASK_REGIONS
from idlm.suggest import did_you_mean
from idlm.train.attention import ATTENTIONS, GPU_ONLY
from idlm.train.curriculum import AUTO_BALANCED, BALANCES, Curriculum, Stage, split_steps
from idlm.train.data.settings import DataConfig, data_problems
from idlm.train.dataset import OVERLONG_POLICIES
from idlm.train.deepspeed import deepspeed_problems, uses_deepspeed
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.regional_compile import CHOICES as COMPILE_CHOICES
from idlm.train.settings import EvalConfig, PlanConfig, ReportConfig, WandbConfig, control_problems

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TASK_TOKENIZER = "task"
INFINITE = float("inf")
PUBLISHED_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
RANGES = (
    ("warmup", 0, 1),
    ("weight_decay", 0, INFINITE),
    ("adam_beta2", 0, 1),
    ("max_grad_norm", 0, INFINITE),
    ("threads", 1, INFINITE),
    ("workers", 0, INFINITE),
    ("seed", 0, 2**32),
)
"""Settings of the loop with the values they may take, the last one excluded."""
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

    stride: int = _setting(2, "tokens one forward can finalise; blocks of stride-1 masks are trained")
    steps: int | None = _setting(None, "optimizer steps of this stage")
    fraction: float | None = _setting(None, "instead of steps: share of the run")
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
    log_every: int = _setting(10, "steps between metrics")
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
    objective: str = _setting("idlm", "a registered objective: idlm or ar")
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


def check_config(config: TrainConfig) -> None:
    """Raise UserError IDLM-0504 with every problem at once; reads no file but asks which ones exist."""
    problems = [
        *_choices(config),
        *_model_problems(config),
        *_adapter_problems(config),
        *_loop_problems(config),
        *_stage_problems(config),
        *data_problems(config.data),
        *control_problems(config.plan, config.eval, config.wandb, config.report),
    ]
    target = Path(config.output_dir).absolute()
    place = next(path for path in (target, *target.parents) if path.exists())
    if not place.is_dir():
        problems.append(f"output_dir={config.output_dir}: {place} is a file")
    for name in foreign_files(target, PUBLISHED_FILES):
        problems.append(
            f"output_dir={config.output_dir} has a {name} of somebody else, which would be replaced"
        )
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        plural = "s" if len(problems) > 1 else ""
        raise UserError(
            "IDLM-0504",
            f"the configuration has {len(problems)} problem{plural}:{listed}",
            fix="correct the values on the command line or in the recipe",
        )


def clean_weight(stage: StageConfig, adapter: AdapterConfig | None) -> float | None:
    """The stage's s, None where it is balanced automatically. An adapter leaves clean rows as they are."""
    if stage.clean_weight is None:
        return DEFAULT_CLEAN_WEIGHT if adapter is None else 0.0
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
        raise UserError(
            "IDLM-0516",
            f"train.global_batch={loop.global_batch} rows are not a multiple of {world_size} processes x "
            f"train.batch_size={loop.batch_size}",
            fix=f"start {', '.join(map(str, fitting)) or 'fewer'} processes, or set train.global_batch="
            f"{max(1, accumulation) * per_pass} or train.batch_size=1",
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
        steps = split_steps(total, [stage.fraction or 0.0 for stage in stages])
    return Curriculum(
        stages=tuple(
            Stage(
                index=index,
                stride=stage.stride,
                num_steps=num_steps,
                clean_weight=clean_weight(stage, config.adapter),
            )
            for index, (stage, num_steps) in enumerate(zip(stages, steps, strict=True))
        ),
        global_batch=global_batch,
    )


def _choices(config: TrainConfig) -> list[str]:
    allowed: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("objective", config.objective, tuple(OBJECTIVES.names())),
        ("mask_region", config.mask_region, MASK_REGIONS),
        ("model.dtype", config.model.dtype, DTYPES),
        ("model.attention", config.model.attention, ("auto", *ATTENTIONS)),
        ("model.compile", config.model.compile, COMPILE_CHOICES),
        ("train.overlong", config.train.overlong, OVERLONG_POLICIES),
        ("train.balance", config.train.balance, BALANCES),
        ("train.device", config.train.device, DEVICES),
    ]
    if config.export.dtype is not None:
        allowed.append(("export.dtype", config.export.dtype, DTYPES))
    return [
        f"{key}={value!r} is not one of {', '.join(values)}{did_you_mean(str(value), values)}"
        for key, value, values in allowed
        if value not in values
    ]


def _model_problems(config: TrainConfig) -> list[str]:
    model, problems = config.model, []
    if model.dtype == "bfloat16" and not uses_deepspeed(config) and config.adapter is None:
        problems.append(
            "model.dtype=bfloat16 would keep the only copy of the weights in bfloat16, where AdamW's small "
            "steps are rounded away: add train.zero_stage=1 (float32 masters, also on one GPU), or give "
            "model.dtype=float32 train.bf16=true"
        )
    if model.path is None and not model.config:
        problems.append("model.path is missing (or give model.config to start from random weights)")
    if model.path is not None and not (Path(model.path) / "config.json").is_file():
        hint = "the directory does not exist" if not Path(model.path).exists() else "it has no config.json"
        problems.append(
            f"model.path={model.path} is not a checkpoint directory: {hint}; hub names are not downloaded"
        )
    if model.path is None and model.tokenizer is None:
        problems.append("model.tokenizer is missing: a new model needs one (a directory, or `task`)")
    if model.tokenizer not in (None, TASK_TOKENIZER) and not Path(model.tokenizer or "").is_dir():
        problems.append(f"model.tokenizer={model.tokenizer} is not a directory")
    return problems


def _adapter_problems(config: TrainConfig) -> list[str]:
    adapter = config.adapter
    if adapter is None:
        return ["export.merge=true: there is no adapter to merge"] if config.export.merge else []
    problems = []
    if config.export.merge:
        problems.append(
            "export.merge=true: merging W + BA would change the clean rows, so that the result would no "
            "longer decode with the base model's law; the adapter is published beside its base instead"
        )
    if adapter.rank < 1:
        problems.append(f"adapter.rank={adapter.rank} must be at least 1")
    if adapter.alpha <= 0:
        problems.append(f"adapter.alpha={adapter.alpha} must be above 0")
    if not adapter.targets:
        problems.append("adapter.targets is empty: name at least one linear layer")
    if config.objective == "ar":
        problems.append("objective=ar has no MASK rows for an adapter to train on")
    for index, stage in enumerate(config.train.stages):
        if stage.clean_weight not in (None, 0):
            problems.append(
                f"train.stages[{index}].clean_weight={stage.clean_weight!r}: with an adapter clean rows are "
                "the base model's and their loss is constant; leave clean_weight out or set it to 0"
            )
    return problems


def _loop_problems(config: TrainConfig) -> list[str]:
    loop, problems = config.train, []
    if loop.global_batch is not None and loop.global_batch < 1:
        problems.append(f"train.global_batch={loop.global_batch} must be at least 1")
    positive = ("batch_size", "accumulation", "max_length", "log_every", "save_every", "save_total_limit")
    for name in positive:
        if getattr(loop, name) < 1:
            problems.append(f"train.{name}={getattr(loop, name)} must be at least 1")
    for name, low, high in RANGES:
        value = getattr(loop, name)
        if value is not None and not low <= value < high:
            problems.append(f"train.{name}={value} must be in [{low}, {high:g})")
    if loop.learning_rate <= 0:
        problems.append(f"train.learning_rate={loop.learning_rate} must be above 0")
    if loop.max_length < 2:
        problems.append(f"train.max_length={loop.max_length} leaves no token to predict")
    if loop.steps is not None and loop.steps < max(1, len(loop.stages)):
        problems.append(f"train.steps={loop.steps} must be at least 1, and 1 for every stage")
    if loop.epochs is not None and loop.epochs <= 0:
        problems.append(f"train.epochs={loop.epochs} must be above 0")
    has_gpu = loop.device != "cpu" and (config.dry_run or torch.cuda.is_available())
    if config.model.attention in GPU_ONLY and not has_gpu:
        problems.append(f"model.attention={config.model.attention} has no backward pass on a CPU: use auto")
    if loop.steps is not None and loop.epochs is not None:
        problems.append("train.steps and train.epochs exclude each other")
    if loop.epochs is not None and config.data.source == "task":
        problems.append("train.epochs has no meaning for the endless task source: use train.steps")
    if loop.overlong == "split" and config.data.source == "task":
        problems.append("train.overlong=split is for files, not for the task source")
    if loop.hang_seconds <= 0:
        problems.append(f"train.hang_seconds={loop.hang_seconds} must be above 0")
    return [*problems, *deepspeed_problems(config)]


def _stage_problems(config: TrainConfig) -> list[str]:
    loop, problems = config.train, []
    if config.objective == "ar":
        if loop.stages:
            problems.append("objective=ar has no strides: remove train.stages and give train.steps")
        return problems if loop.steps or loop.epochs else [*problems, "train.steps is missing"]
    if not loop.stages:
        return ["train.stages is empty: give at least one {stride, steps or fraction, clean_weight}"]
    for index, stage in enumerate(loop.stages):
        where = f"train.stages[{index}]"
        if stage.stride < 2:
            problems.append(f"{where}.stride={stage.stride} must be at least 2")
        if (stage.steps is None) == (stage.fraction is None):
            problems.append(f"{where} needs exactly one of steps and fraction")
        if (stage.steps is not None and stage.steps < 1) or (
            stage.fraction is not None and stage.fraction <= 0
        ):
            problems.append(f"{where} has no steps")
        weight = stage.clean_weight
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight >= 0
        if weight is not None and not is_number and weight != AUTO_BALANCED:
            problems.append(f"{where}.clean_weight={weight!r} is neither a number >= 0 nor {AUTO_BALANCED!r}")
    if len({stage.steps is None for stage in loop.stages}) > 1:
        problems.append("train.stages mixes steps and fractions")
    elif loop.stages[0].steps is None and loop.steps is None and loop.epochs is None:
        problems.append("train.stages gives fractions: train.steps (or epochs) is missing")
    return problems
