"""Everything that is wrong with a configuration of `idlm-train`, found before anything heavy is loaded."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from idlm.checkpoint import foreign_files
from idlm.config.suggest import did_you_mean
from idlm.semantics import MASK_REGIONS, MAX_STRIDE
from idlm.train.config.monitoring import control_problems
from idlm.train.config.schema import TASK_TOKENIZER, TrainConfig, missing_keys, refuse_problems
from idlm.train.config.unused_options import unused_options
from idlm.train.data.base import is_endless
from idlm.train.data.dataset import OVERLONG_POLICIES
from idlm.train.data.settings import data_problems
from idlm.train.distributed.deepspeed import deepspeed_problems, uses_deepspeed
from idlm.train.model.attention import ATTENTIONS, GPU_ONLY
from idlm.train.model.compile import CHOICES as COMPILE_CHOICES
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.objectives.curriculum import AUTO_BALANCED, BALANCES

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
INFINITE = float("inf")
PUBLISHED_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "idlm_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
FRACTION_TOLERANCE = 0.02
"""Thirds may be written as 0.33."""
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


def check_config(config: TrainConfig) -> None:
    """Raise UserError IDLM-0504 with every problem at once; reads no file but asks which ones exist."""
    problems = [
        *missing_keys(config),
        *_not_numbers(asdict(config)),
        *_choices(config),
        *_model_problems(config),
        *_adapter_problems(config),
        *_loop_problems(config),
        *_stage_problems(config),
        *data_problems(config.data, config.eval.path),
        *control_problems(config.plan, config.eval, config.wandb, config.report),
        *unused_options(config),
    ]
    problems += _empty_paths(config)
    target = Path(config.output_dir).absolute()
    place = next(path for path in (target, *target.parents) if path.exists())
    if not place.is_dir():
        problems.append(f"output_dir={config.output_dir}: {place} is a file")
    for name in foreign_files(
        target, (*PUBLISHED_FILES, *(() if config.adapter is None else ("README.md",)))
    ):
        problems.append(
            f"output_dir={config.output_dir} has a {name} of somebody else, which would be replaced"
        )
    refuse_problems(problems)


def _empty_paths(config: TrainConfig) -> list[str]:
    """Paths that are given but blank, as an unset shell variable leaves them: pathlib takes those for the
    current folder.
    """
    paths = {
        "output_dir": (config.output_dir, "name a folder"),
        "model.path": (config.model.path, "name a checkpoint directory"),
        "model.tokenizer": (config.model.tokenizer, "name a directory, or leave it out"),
        "data.path": (config.data.path, "name a file, a folder or a pattern"),
        "data.cache_dir": (config.data.cache_dir, "name a folder, or leave it out"),
        "eval.path": (config.eval.path, "name a file, or leave it out"),
        "train.deepspeed": (config.train.deepspeed, "name a file, or leave it out"),
    }
    return [
        f"{key} is empty: {fix}"
        for key, (path, fix) in paths.items()
        if path is not None and not path.strip()
    ]


def _not_numbers(values: Any, key: str = "") -> list[str]:
    """Settings anywhere in `values` that are nan or infinite, which pass most comparisons."""
    if isinstance(values, float) and not math.isfinite(values):
        return [f"{key}={values} must be a finite number"]
    if isinstance(values, dict):
        return [
            line
            for name, value in values.items()
            for line in _not_numbers(value, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(values, list):
        return [line for place, value in enumerate(values) for line in _not_numbers(value, f"{key}[{place}]")]
    return []


def _places_masks(config: TrainConfig) -> bool:
    """Whether the objective does; an unknown one, which is told elsewhere, is taken for one that does."""
    known = config.objective in OBJECTIVES.names()
    return not known or OBJECTIVES.get(config.objective).places_masks


def _predicts_next(config: TrainConfig) -> bool:
    """Likewise."""
    known = config.objective in OBJECTIVES.names()
    return not known or OBJECTIVES.get(config.objective).predicts_next


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
    if model.path is not None and not (Path(model.path) / "config.json").is_file():
        hint = "the directory does not exist" if not Path(model.path).exists() else "it has no config.json"
        problems.append(
            f"model.path={model.path} is not a checkpoint directory: {hint}; hub names are not downloaded"
        )
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
    if not _places_masks(config):
        problems.append("objective=ar has no MASK rows for an adapter to train on")
    if not _predicts_next(config):
        problems.append(
            f"objective={config.objective} takes no adapter: its clean rows see their block both ways, "
            "so that they are not those of the base; remove adapter"
        )
    for index, stage in enumerate(config.train.stages):
        if stage.clean_weight not in (None, 0):
            problems.append(
                f"train.stages[{index}].clean_weight={stage.clean_weight!r}: with an adapter clean rows are "
                "the base model's and their loss is constant; leave clean_weight out or set it to 0"
            )
    return problems


def _loop_problems(config: TrainConfig) -> list[str]:
    loop, problems = config.train, []
    endless = is_endless(config.data.source)
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
    if loop.row_length is not None and loop.row_length < 1:
        problems.append(f"train.row_length={loop.row_length} must be at least 1, or null")
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
    if loop.epochs is not None and endless:
        problems.append(
            f"train.epochs={loop.epochs} has no meaning for data.source={config.data.source}, which never "
            "ends: use train.steps"
        )
    if loop.overlong == "split" and endless:
        problems.append(f"train.overlong=split is for files, not for data.source={config.data.source}")
    if loop.hang_seconds <= 0:
        problems.append(f"train.hang_seconds={loop.hang_seconds} must be above 0")
    return [*problems, *deepspeed_problems(config)]


def _stage_problems(config: TrainConfig) -> list[str]:
    loop, problems = config.train, []
    if not _places_masks(config):
        if loop.stages:
            problems.append("objective=ar has no strides: remove train.stages and give train.steps")
        return problems if loop.steps or loop.epochs else [*problems, "train.steps is missing"]
    if not loop.stages:
        return ["train.stages is empty: give at least one {stride, steps or fraction, clean_weight}"]
    for index, stage in enumerate(loop.stages):
        where = f"train.stages[{index}]"
        if not 2 <= stage.stride <= MAX_STRIDE:
            problems.append(f"{where}.stride={stage.stride} must be in [2, {MAX_STRIDE}]")
        if (stage.steps is None) == (stage.fraction is None):
            problems.append(f"{where} needs exactly one of steps and fraction")
        if (stage.steps is not None and stage.steps < 1) or (
            stage.fraction is not None and stage.fraction <= 0
        ):
            problems.append(f"{where} has no steps")
        weight = stage.clean_weight
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight >= 0
        if weight not in (None, 0) and not _predicts_next(config):
            problems.append(
                f"{where}.clean_weight={weight!r}: objective={config.objective} has no clean loss, "
                "leave it out"
            )
        elif weight is not None and not is_number and weight != AUTO_BALANCED:
            problems.append(f"{where}.clean_weight={weight!r} is neither a number >= 0 nor {AUTO_BALANCED!r}")
    if len({stage.steps is None for stage in loop.stages}) > 1:
        problems.append("train.stages mixes steps and fractions")
    elif loop.stages[0].steps is None:
        if loop.steps is None and loop.epochs is None:
            problems.append("train.stages gives fractions: train.steps (or epochs) is missing")
        total = sum(stage.fraction or 0 for stage in loop.stages)
        if abs(total - 1) > FRACTION_TOLERANCE:
            problems.append(
                f"the fractions of train.stages add up to {total:g}: they are shares of the whole run and "
                "must add up to 1; give fewer train.steps (or epochs) for a shorter run"
            )
    return problems
