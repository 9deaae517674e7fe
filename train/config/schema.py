"""The configuration of `idlm-train`: typed sections with help, and what follows from them (steps, stages).

`conf/train.yaml` and recipes give values only; `train/check.py` checks them. Sections are not frozen,
because composition fills them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from idlm.config.schema import option
from idlm.errors import UserError
from idlm.semantics import PROJECTIONS
from idlm.train.config.data import FILE_SOURCES, DataConfig
from idlm.train.objectives.curriculum import AUTO_BALANCED, Curriculum, Stage, split_steps

TASK_TOKENIZER = "task"
DEFAULT_CLEAN_WEIGHT = 0.2
MATMUL_TFLOPS = {"B200": 1700.0, "H200": 785.0, "H100": 770.0, "A100": 265.0}
"""bf16 TFLOP/s that matrix products of a GPU reach: H200 and H100 measured, others 0.8 of the data sheet."""
DECODED = ("exact_match", "acceptance_rate", "tokens_per_forward")
"""What the answers of a model that trains are measured by."""
Switch = Literal["auto", "on", "off"]
Attention = Literal["auto", "idlm_split", "idlm_flex", "idlm_flash", "idlm_documents", "idlm_sdpa"]


@dataclass(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str | None = option(
        "directory of the base checkpoint; null: new weights by `config`", None, is_path=True
    )
    config: dict[str, Any] = option(
        "model_type and fields of a new transformers model, used when path is null", {}
    )
    tokenizer: str | None = option(
        "tokenizer directory; null: that of path; `task`: that of the generated tasks, or data.task's own",
        None,
        is_path=True,
    )
    dtype: Literal["float32", "bfloat16"] = option("parameter dtype while training", "float32")
    mask_token_id: int | None = option("null: the tokenizer's mask token, else the first unused row", None)
    attention: Attention = option(
        "idlm_split (our kernel), idlm_flex, idlm_flash: on a GPU; idlm_documents, idlm_sdpa: dense mask",
        "auto",
    )
    needs_engine: bool = option("refuse a base that idlm-generate could not decode after training", True)
    gradient_checkpointing: bool = option("recompute activations in the backward pass", False)
    recomputed_layers: int | None = option("layers, the first, whose activations are; null: all", None)
    compile: Switch = option("torch.compile of the decoder layers; auto: on a GPU", "auto")
    graphs: Switch = option(
        "replay the compiled layers of a small model as CUDA graphs; auto: on one GPU", "auto"
    )


@dataclass(kw_only=True)
class AdapterConfig:
    """A LoRA. A gated one (R-ISD) changes mask rows only, so that the base model stays as it is."""

    rank: int = option("rank r of the low-rank update", 128)
    alpha: float = option("the update is scaled by alpha / rank", 256.0)
    gated: bool = option("false: it changes all rows, trains as full fine-tuning does and is merged", True)
    targets: list[str] = option("last name parts of the adapted linear layers", list(PROJECTIONS))


@dataclass(kw_only=True)
class StageConfig:
    """One stage of the curriculum."""

    stride: int = option(
        "tokens that one pass can decide: blocks of stride-1 masks; with objective=block, of stride tokens", 2
    )
    steps: int | None = option("optimizer steps of this stage", None)
    fraction: float | None = option("share of the run, in place of steps; fractions add up to 1", None)
    clean_weight: Any = option(
        "s in L_mask + s * L_clean: a number, or auto (L_mask / L_clean); null: 0.2, 0 with a gated adapter",
        None,
    )


@dataclass(kw_only=True)
class LoopConfig:
    """Length, optimizer, batches and devices of the training loop."""

    stages: list[StageConfig] = option("curriculum; empty for objectives without strides", [])
    steps: int | None = option(
        "optimizer steps of the run, where stages give fractions or there are no stages", None
    )
    epochs: float | None = option("passes over the files, in place of steps", None)
    balance: Literal["step", "previous"] = option(
        "losses that clean_weight=auto balances: those of this step, or of the previous one (faster)", "step"
    )
    phase: Literal["response", "random"] = option(
        "where blocks of masks begin: with each response, or anew for every visit", "response"
    )
    draft_input: Literal["mask", "uniform"] = option(
        "what mask rows are fed: its token, or random ids, anew for every visit of a sample", "mask"
    )
    noise_range: list[int] = option(
        "draft_input=uniform: [low, high), the ids that are drawn; empty: all of the tokenizer", []
    )
    distill: Literal["none", "kl", "overlap"] = option(
        "with a gated adapter: none (labels), kl or overlap (1 - overlap) of the draft to the base", "none"
    )
    distill_share: float = option("share of distillation in the loss, labels have the rest; 1: alone", 1.0)
    base_kl: float = option(
        "weight of KL(base || model) in nats a token, the mean over supervised clean rows, in the loss: it "
        "keeps the clean rows of a full conversion those of the base; a second copy of the weights; 0: none",
        0.0,
    )
    max_clean_weight: float | None = option(
        "bound of a balanced clean weight (clean_weight=auto); null: none, as in the paper", None
    )
    sizes: Literal["given", "fit", "auto"] = option(
        "fit: activations are recomputed if the run fits only so; auto: batch_size, max_length and "
        "learning_rate of 0, the global batch, ZeRO, 16 bits, recomputation and an adapter are chosen by the "
        "model, the data and the memory",
        "given",
    )
    batch_size: int = option("packed rows per device and micro-batch", 1)
    accumulation: int = option("micro-batches per optimizer step", 1)
    global_batch: int | None = option(
        "packed rows per optimizer step over all processes; accumulation then follows", None
    )
    max_length: int = option("longest sample in tokens", 4096)
    row_length: int | None = option("rows of a packed row; null: what the longest sample needs", None)
    max_padding: int = option(
        "objective=full: at most this many stop tokens follow an answer, to fill the canvas", 128
    )
    overlong: Literal["error", "drop", "truncate", "split"] = option(
        "what becomes of samples longer than max_length; split: several samples", "error"
    )
    learning_rate: float = option("peak learning rate", 1e-5)
    schedule: Literal["cosine", "cosine_per_stage", "wsd"] = option(
        "learning rate: cosine to zero over the run or each stage, or wsd (stable, then a line to zero)",
        "cosine",
    )
    warmup: float = option("share of the steps, of the run or of each stage, with a rising rate", 0.03)
    decay: float = option("schedule=wsd: share of the steps with a falling rate, at the end", 0.2)
    weight_decay: float = option("AdamW weight decay", 0.0)
    adam_beta2: float = option("AdamW beta2", 0.999)
    max_grad_norm: float = option("norm at which gradients are clipped; 0: not", 1.0)
    bf16: bool = option(
        "autocast to bfloat16 over float32 parameters; with DeepSpeed, bfloat16 weights with float32 masters",
        False,
    )
    seed: int = option("seed of new weights and dropout", 0)
    device: Literal["auto", "cpu", "cuda"] = option("where to train", "auto")
    threads: int | None = option("CPU threads; null: torch's default", None)
    workers: int = option("processes that prepare rows; 0 prepares them in the training process", 0)
    log_every: int = option("steps between metrics; each stage also ends with them", 10)
    save_every: int = option("steps between checkpoints", 500)
    save_total_limit: int = option("checkpoints that are not deleted", 2)
    save: Literal["async", "sync"] = option(
        "async: training waits for copies in host memory, which a thread writes; sync: for the files", "async"
    )
    max_minutes: float | None = option(
        "save and end with status 85 within this many minutes of the start; null: no limit", None
    )
    zero_stage: int | None = option(
        "DeepSpeed ZeRO: 1 shards the optimizer, 2 gradients too, 3 weights too, 0 nothing; null: without",
        None,
    )
    offload_optimizer: bool = option("store the ZeRO optimizer in host memory (slow)", False)
    deepspeed: str | None = option("DeepSpeed configuration file, in place of zero_stage", None, is_path=True)
    hang_seconds: float = option(
        "seconds without progress of a rank after which the run ends, naming the rank", 600.0
    )


@dataclass(kw_only=True)
class ExportConfig:
    """The published checkpoint."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "null: that of the base, float32 for a gated adapter", None
    )
    merge: bool = option("true: merge an adapter that is not gated into its base, a whole checkpoint", False)


@dataclass(kw_only=True)
class PlanConfig:
    """What `dry_run=true` assumes where it is not given."""

    num_gpus: int | None = option(
        "GPUs to plan for; null: the launcher's processes, else the visible GPUs, else 1", None
    )
    gpu: str | None = option(
        "B200, H200, H100 or A100; null: the visible GPU, else this CPU (H200 with plan.num_gpus)", None
    )
    tflops: float | None = option("bf16 TFLOP/s of its matrix products; null: by its name", None)
    full_config: bool = option("show the whole configuration, not only what differs from the recipe", False)


@dataclass(kw_only=True)
class EvalConfig:
    """Losses and acceptance by draft position on held-out data while training, and answers of the engine."""

    every: int | None = option("optimizer steps between evaluations; null: none", None)
    num_items: int = option("packed rows per evaluation", 16)
    path: str | None = option(
        "held-out data of the data source; null: the task's validation split, or eval.holdout",
        None,
        is_path=True,
    )
    split: str | None = option(
        "held-out split of an hf dataset: of path, or of data.path without one; null: validation of path",
        None,
    )
    subset: str | None = option(
        "configuration of the hf dataset path that has several; null: data.subset if path is data.path", None
    )
    holdout: float = option(
        "share of a file's samples that training leaves out, for evaluations and the report, where path and "
        "split are null; at least 16 samples, or a tenth of fewer than 160, none of fewer than 8; 0: none",
        0.005,
    )
    num_prompts: int = option("prompts that the engine answers greedily at every evaluation; 0: none", 0)
    stop_if: dict[str, float] = option(
        "end the run where the answers' exact_match, acceptance_rate or tokens_per_forward is so far below "
        "its best value in the same stage: {exact_match: 0.05}",
        {},
    )


@dataclass(kw_only=True)
class WandbConfig:
    """Metrics mirrored to Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = option(
        "offline needs no account and leaves files in the run's folder", "disabled"
    )
    project: str = option("name of the project", "idlm")
    name: str | None = option("name of the run; null: chosen by the service", None)


@dataclass(kw_only=True)
class TensorboardConfig:
    """Metrics mirrored to files of TensorBoard."""

    enabled: bool = option("write them into the run's folder (extra tensorboard)", False)


@dataclass(kw_only=True)
class ReportConfig:
    """The report next to the checkpoint."""

    enabled: bool = option("write report.md with plots", True)
    num_samples: int = option("sample generations shown", 8)


@dataclass(kw_only=True)
class TrainConfig:
    """The configuration of `idlm-train`."""

    output_dir: str = option(
        "folder of the checkpoint; the run's own files are in its folder `run`", "outputs/train", is_path=True
    )
    objective: str = option(
        "a registered objective: idlm, ar, block (block diffusion) or full (full diffusion)", "idlm"
    )
    mask_region: Literal["response", "all"] = option("which tokens are supervised", "response")
    resume: str = option("auto, never, or a checkpoint directory of this run", "auto", is_path=True)
    dry_run: bool = option("check everything and print the plan without training", False)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig | None = option("a LoRA, gated (R-ISD) or not; null: train all weights", None)

    data: DataConfig = field(default_factory=DataConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def has_trackers(self) -> bool:
        return self.wandb.mode != "disabled" or self.tensorboard.enabled

    @property
    def is_gated(self) -> bool:
        """Whether a gated adapter is trained, so that clean rows are the base model's."""
        return self.adapter is not None and self.adapter.gated


def value_of(config: TrainConfig, key: str) -> Any:
    """Return the value of the dotted `key`, None where its section is null."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return `config` with other values, by their dotted keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    own = sections.pop("", {})
    return replace(config, **own, **{key: replace(getattr(config, key), **sections[key]) for key in sections})


def refuse_problems(problems: list[str]) -> None:
    """Raise UserError IDLM-0504 that lists all problems, if there are any."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        plural = "s" if len(problems) > 1 else ""
        raise UserError(
            "IDLM-0504",
            f"the configuration has {len(problems)} problem{plural}:{listed}",
            fix="correct the values on the command line or in the recipe",
        )


def missing_keys(config: TrainConfig) -> list[str]:
    """Return sentences about required keys without a value. Imports nothing slow."""
    model, source, problems = config.model, config.data.source, []
    if model.path is None and not model.config:
        problems.append("model.path is missing (or give model.config to start from random weights)")
    elif model.path is None and model.tokenizer is None:
        problems.append("model.tokenizer is missing: a new model needs one (a directory, or `task`)")
    if source in FILE_SOURCES and config.data.path is None and not config.data.sources:
        problems.append(f"data.path is empty: the {source} source needs a path")
    return problems


def clean_weight(stage: StageConfig, config: TrainConfig) -> float | None:
    """Return the stage's s; None: automatic balance, 0 by default with a gated adapter."""
    if stage.clean_weight is None:
        # Imported here, because objectives import torch, which `--help` and missing keys need not wait for.
        from idlm.train.objectives.base import OBJECTIVES

        has_clean_loss = not config.is_gated and OBJECTIVES.get(config.objective).predicts_next
        return DEFAULT_CLEAN_WEIGHT if has_clean_loss else 0.0
    return None if stage.clean_weight == AUTO_BALANCED else float(stage.clean_weight)


def with_accumulation(config: TrainConfig, *, world_size: int) -> TrainConfig:
    """Return `config` with the accumulation that gives `train.global_batch` on `world_size` processes.

    Raises UserError IDLM-0516 when no whole number of micro-batches does, or `train.accumulation` differs."""
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
    return with_values(config, {"train.accumulation": accumulation})


def make_curriculum(config: TrainConfig, *, world_size: int, rows_per_epoch: int | None) -> Curriculum:
    """Return the stages with absolute steps; `rows_per_epoch` is None for an endless source."""
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
    made = tuple(
        Stage(index=index, stride=stage.stride, num_steps=num, clean_weight=clean_weight(stage, config))
        for index, (stage, num) in enumerate(zip(stages, steps, strict=True))
    )
    return Curriculum(stages=made, global_batch=global_batch)
