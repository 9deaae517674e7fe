"""Collects everything that is wrong with a configuration of `idlm-train`, before a model or data is loaded.

An option without effect is refused too (train/unused.py)."""

from __future__ import annotations

import datetime
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from idlm.checkpoint import foreign_files, is_adapter
from idlm.config.project import install_command
from idlm.config.schema import walk
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.files.records import SUFFIXES, search
from idlm.files.tensors import other_format
from idlm.semantics import MAX_STRIDE
from idlm.text.tokenizer import TOKENIZER_FILES
from idlm.train.config.data import FILE_SOURCES, DataConfig, held_out_config
from idlm.train.config.schema import (
    DECODED,
    MATMUL_TFLOPS,
    TASK_TOKENIZER,
    AdapterConfig,
    StageConfig,
    TrainConfig,
    missing_keys,
    refuse_problems,
    value_of,
)
from idlm.train.data.base import SOURCES, has
from idlm.train.data.records.detect import SHAPE_CHOICES
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, uses_deepspeed, zero_stage
from idlm.train.distributed.deepspeed_settings import deepspeed_problems
from idlm.train.model.attention import GPU_ONLY
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.objectives.curriculum import AUTO_BALANCED
from idlm.train.unused import objective_has, unused_options

PUBLISHED_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "idlm_config.json"),
    *TOKENIZER_FILES,
)
FRACTION_TOLERANCE = 0.02
"""Thirds may be written as 0.33."""
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "train.global_batch train.batch_size train.accumulation train.max_length train.row_length "
        "train.log_every train.save_every train.save_total_limit train.threads plan.num_gpus eval.every "
        "eval.num_items adapter.rank model.recomputed_layers",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        "train.weight_decay train.max_grad_norm train.base_kl train.workers train.seed train.max_padding "
        "data.workers report.num_samples eval.num_prompts",
    ),
    (
        "above 0",
        lambda value: value > 0,
        "train.learning_rate train.epochs train.hang_seconds train.max_clean_weight train.max_minutes "
        "plan.tflops adapter.alpha",
    ),
    ("in [0, 1)", lambda value: 0 <= value < 1, "train.warmup train.decay train.adam_beta2 eval.holdout"),
    ("in (0, 1]", lambda value: 0 < value <= 1, "train.distill_share"),
    ("below 2**32", lambda value: value < 2**32, "train.seed"),
)
"""(text, check, keys) of numbers; those that are null have no range."""
CHOSEN = ("train.batch_size", "train.max_length", "train.learning_rate")
"""0 in these means that `train.sizes=auto` chooses."""


def check_config(config: TrainConfig) -> None:
    """Raise UserError IDLM-0504 that lists all problems; looks which files exist but reads none."""
    refuse_problems(
        [
            *missing_keys(config),
            *_not_finite(asdict(config)),
            *_choices(config),
            *_ranges(config),
            *_model_problems(config),
            *_loop_problems(config),
            *_stage_problems(config),
            *data_problems(config),
            *(deepspeed_problems(config) if uses_deepspeed(config.train) else ()),
            *_tracker_problems(config),
            *unused_options(config),
            *_path_problems(config),
        ]
    )


def _tracker_problems(config: TrainConfig) -> Iterator[str]:
    """Libraries of trackers that are set and cannot be imported."""
    mode, wanted = config.wandb.mode, list[tuple[str, str, str]]()
    if mode != "disabled":
        wanted.append(("wandb", f"wandb.mode={mode}", "pip install wandb"))
    if config.tensorboard.enabled:
        command = install_command("tensorboard")
        wanted.append(("torch.utils.tensorboard", "tensorboard.enabled=true", command))
    for module, option, command in wanted:
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield f"{option}: {error}; install it: {command}, or leave the option out"


def _path_problems(config: TrainConfig) -> Iterator[str]:
    # pathlib takes a blank path, such as an unset shell variable leaves, for the current folder.
    for key, _, field, default in walk(TrainConfig):
        path = value_of(config, key) if field.metadata.get("is_path") else None
        if path is not None and not path.strip():
            yield f"{key} is empty: name a file or a folder{', or leave it out' if default is None else ''}"
    target = Path(config.output_dir).absolute()
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not existing.is_dir():
        yield f"output_dir={config.output_dir}: {existing} is a file"
    if Path.cwd().is_relative_to(target.resolve()):
        yield f"output_dir={config.output_dir} holds the current folder and is replaced: name a folder in it"
    if config.model.path is not None and target.resolve() == Path(config.model.path).resolve():
        yield f"output_dir={config.output_dir} is the base, which would be replaced: name another folder"
    for name in foreign_files(target, PUBLISHED_FILES):
        yield f"output_dir={config.output_dir} has a {name} that idlm did not write and would replace"


def _not_finite(values: Any, key: str = "") -> Iterator[str]:
    """Numbers anywhere in `values` that are nan or infinite, which most comparisons miss."""
    if isinstance(values, float) and not math.isfinite(values):
        yield f"{key}={values} must be a finite number"
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _not_finite(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _not_finite(value, f"{key}[{index}]")


def _choices(config: TrainConfig) -> list[str]:
    """Names that are registered, or known by a table; other choices are Literals of the schema."""
    allowed: dict[str, tuple[str, ...]] = {
        "objective": tuple(OBJECTIVES.names()),
        "data.source": tuple(SOURCES.names()),
        "data.shape": SHAPE_CHOICES,
        "plan.gpu": tuple(MATMUL_TFLOPS),
    }
    given = {key: value_of(config, key) for key in allowed}
    if config.plan.tflops is not None:
        del given["plan.gpu"]
    return [
        f"{key}={value!r} is not one of {', '.join(allowed[key])}{did_you_mean(str(value), allowed[key])}"
        f"{'; for another GPU give plan.tflops too' if key == 'plan.gpu' else ''}"
        for key, value in given.items()
        if value not in allowed[key] and not (value is None and key == "plan.gpu")
    ]


def _ranges(config: TrainConfig) -> Iterator[str]:
    left_open = CHOSEN if config.train.sizes == "auto" else ()
    for text, is_fine, keys in RANGES:
        for key in keys.split():
            value = value_of(config, key)
            if not (value is None or is_fine(value) or (value == 0 and key in left_open)):
                yield f"{key}={value} must be {text}"
    if config.train.schedule == "wsd" and config.train.warmup + config.train.decay > 1:
        yield "train.warmup and train.decay are shares of the same steps: their sum must not exceed 1"


def _model_problems(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if model.dtype == "bfloat16" and not uses_deepspeed(config.train) and config.adapter is None:
        yield (
            "model.dtype=bfloat16 would store the only copy of the weights in bfloat16, which rounds AdamW's "
            "small steps away: add train.zero_stage=1 (float32 masters, also on one GPU), or give "
            "model.dtype=float32 train.bf16=true"
        )
    if model.path is not None and not (Path(model.path) / "config.json").is_file():
        hint = "it has no config.json" if Path(model.path).exists() else "the directory does not exist"
        adapter = "an adapter, to be merged into its base" if is_adapter(Path(model.path)) else None
        hint = f"it has {other}" if (other := adapter or other_format(Path(model.path))) else hint
        what = f"model.path={Path(model.path)} is not a checkpoint directory"
        yield f"{what}: {hint}; hub names are not downloaded (hf download NAME --local-dir DIR)"
    if model.tokenizer not in (None, TASK_TOKENIZER) and not Path(model.tokenizer or "").is_dir():
        yield f"model.tokenizer={model.tokenizer} is not a directory"
    if config.train.distill != "none" and not (config.is_gated and config.objective == "idlm"):
        yield (
            f"train.distill={config.train.distill} needs objective=idlm and a gated adapter: in other runs "
            "the clean rows, which are the teacher, would be trained too"
        )
    if config.train.base_kl > 0:
        yield from _base_kl_problems(config)
    if config.adapter is not None:
        yield from _adapter_problems(config, config.adapter)
    elif config.export.merge:
        yield "export.merge=true: there is no adapter to merge"


def _base_kl_problems(config: TrainConfig) -> Iterator[str]:
    given = f"train.base_kl={config.train.base_kl:g}"
    if config.is_gated:
        yield f"{given}: with a gated adapter clean rows are the base's already; leave train.base_kl out"
    if not objective_has(config, "predicts_next"):
        yield (
            f"{given}: objective={config.objective} has no rows that predict the next token as the base "
            "does; leave train.base_kl out, or train with objective=idlm"
        )
    if config.model.path is None:
        yield f"{given}: new weights have no base; give model.path, or leave train.base_kl out"
    if zero_stage(config.train) == SHARDS_WEIGHTS:
        yield (
            f"{given} needs a whole copy of the base on every GPU, and train.zero_stage=3 shards it; set "
            "train.zero_stage=2"
        )


def _adapter_problems(config: TrainConfig, adapter: AdapterConfig) -> Iterator[str]:
    name = config.objective
    if config.model.path is None:
        yield (
            "an adapter on new random weights cannot be used, its base is stored nowhere: give model.path, "
            "or train the new weights first and adapt their checkpoint"
        )
    if not adapter.targets:
        yield "adapter.targets is empty: name at least one linear layer"
    if not adapter.gated:
        if not config.export.merge:
            yield (
                "export.merge=false: an adapter that is not gated changes every row, and idlm decodes with "
                "gated ones alone; set export.merge=true, which publishes a whole checkpoint"
            )
        return
    if config.export.merge:
        yield (
            "export.merge=true: merging W + BA would change the clean rows, and with them the distribution "
            "of the answers; leave it out: the adapter is published next to its base (adapter.gated=false "
            "trains one that is merged)"
        )
    if not objective_has(config, "places_masks"):
        yield f"objective={name} has no mask rows for a gated adapter to train on"
    if not objective_has(config, "predicts_next"):
        yield (
            f"objective={name} takes no gated adapter: its rows see later ones too, so they are not those "
            "of the base; remove adapter, or set adapter.gated=false"
        )
    for index, stage in enumerate(config.train.stages):
        if stage.clean_weight not in (None, 0):
            yield (
                f"train.stages[{index}].clean_weight={stage.clean_weight!r}: with a gated adapter clean rows "
                "are the base model's and their loss is constant; leave clean_weight out or set it to 0"
            )


def data_problems(config: TrainConfig) -> Iterator[str]:
    """Looks for files but opens none."""
    data, owners = config.data, dict[Path, str]()
    paths = [
        ("data" if not data.sources else f"data.sources[{i}]", one) for i, one in enumerate(data.parts())
    ]
    given = [(f"{key}.path", one.path, one.source) for key, one in paths]
    for key, path, source in [*given, ("eval.path", config.eval.path, data.source)]:
        if source in SUFFIXES and path is not None and path.strip():
            try:
                found = search(path, SUFFIXES[source]).paths
            except UserError as error:
                several = "; several are data.sources=[{path: A}, {path: B}]" if "," in path else ""
                yield f"{key}: {error.message}{several}"
                continue
            twice = next((file for file in found if owners.setdefault(file.resolve(), key) != key), None)
            if twice is not None and key != "eval.path":
                yield f"{owners[twice.resolve()]} and {key} both hold {twice}: give it once"
    try:
        datetime.date.fromisoformat(data.date or "2000-01-01")
    except ValueError:
        yield f"data.date={data.date!r} is not a day: write YYYY-MM-DD"
    if data.sources:
        yield from _mixture_problems(data)
    if data.source == "hf" and (config.eval.path, config.eval.split) != (None, None):
        held_out = held_out_config(data, config.eval.path, config.eval.split, config.eval.subset)
        if held_out.split == held_out.trained_split:
            yield (
                f"eval.split={held_out.split} of {held_out.path} is trained on: name another, or leave "
                "eval.path and eval.split out, so that eval.holdout holds out a share"
            )


def _mixture_problems(data: DataConfig) -> Iterator[str]:
    if data.path is not None:
        yield "data.path and data.sources exclude each other"
    for index, (one, made) in enumerate(zip(data.sources, data.parts(), strict=True)):
        key = f"data.sources[{index}]"
        if not (one.path or "").strip():
            yield f"{key}.path is empty"
        if not one.weight > 0:
            yield f"{key}.weight={one.weight} must be above 0"
        if made.source not in FILE_SOURCES:
            yield f"{key}.source={made.source!r} is not one of {', '.join(FILE_SOURCES)}"
        if made.shape not in SHAPE_CHOICES:
            yield f"{key}.shape={made.shape!r} is not one of {', '.join(SHAPE_CHOICES)}"


def _loop_problems(config: TrainConfig) -> Iterator[str]:
    loop, source, attention = config.train, config.data.source, config.model.attention
    has_gpu = loop.device != "cpu" and (config.dry_run or torch.cuda.is_available())
    if loop.max_length == 1:
        yield "train.max_length=1 leaves no token to predict"
    minimum = max(1, len(loop.stages))
    if loop.steps is not None and loop.steps < minimum:
        yield f"train.steps={loop.steps} is too few: give {minimum} or more, one for every stage"
    if attention == "idlm_sdpa" and config.is_gated and loop.batch_size > 1:
        yield (
            f"model.attention=idlm_sdpa with a gated adapter has one mask over the rows of all "
            f"train.batch_size={loop.batch_size} packed rows, of (batch_size * row_length)^2: use auto, or "
            "train.batch_size=1 and a larger train.accumulation"
        )
    if attention in GPU_ONLY and not has_gpu:
        yield f"model.attention={attention} has no backward pass on a CPU: use auto"
    if None not in (loop.steps, loop.epochs):
        yield f"train.steps={loop.steps} and train.epochs={loop.epochs} exclude each other: set one to null"
    if loop.epochs is not None and has(source, "is_endless"):
        yield f"train.epochs={loop.epochs} has no meaning for data.source={source}, which is endless"
    if loop.overlong == "split" and has(source, "is_endless"):
        yield f"train.overlong=split is for files, not for data.source={source}"
    if loop.offload_optimizer and loop.zero_stage not in (1, 2, 3):
        yield "train.offload_optimizer=true needs train.zero_stage=1, 2 or 3"
    for name, fall in config.eval.stop_if.items():
        if name not in DECODED:
            yield f"eval.stop_if: {name!r} is not one of {', '.join(DECODED)}"
        elif fall <= 0:
            yield f"eval.stop_if: {name}={fall} must be above 0, a fall below the best value"
        elif name == DECODED[0] and config.data.source != "task":
            yield f"eval.stop_if: {name} is known for data.source=task alone, which has a checker"


def _stage_problems(config: TrainConfig) -> Iterator[str]:
    stages, has_length = config.train.stages, (config.train.steps, config.train.epochs) != (None, None)
    if not objective_has(config, "has_strides"):
        if not has_length:
            yield "train.steps is missing"
        if stages:
            name = config.objective
            yield f"objective={name} has no strides: remove train.stages and give train.steps"
        return
    if not stages:
        yield "train.stages is empty: give at least one {stride, steps or fraction, clean_weight}"
        return
    has_clean_loss = objective_has(config, "predicts_next")
    for index, stage in enumerate(stages):
        for problem in _problems_of_stage(stage, has_clean_loss=has_clean_loss):
            yield f"train.stages[{index}]{problem}"
    if len({stage.steps is None for stage in stages}) > 1:
        yield "train.stages mixes steps and fractions"
    elif stages[0].steps is None:
        if not has_length:
            yield "train.stages gives fractions: train.steps (or epochs) is missing"
        total = sum(stage.fraction or 0 for stage in stages)
        if abs(total - 1) > FRACTION_TOLERANCE:
            yield (
                f"the fractions of train.stages add up to {total:g}: they are shares of the whole run and "
                "must add up to 1; give fewer train.steps (or epochs) for a shorter run"
            )


def _problems_of_stage(stage: StageConfig, *, has_clean_loss: bool) -> Iterator[str]:
    weight = stage.clean_weight
    if not 2 <= stage.stride <= MAX_STRIDE:
        yield f".stride={stage.stride} must be in [2, {MAX_STRIDE}]"
    if (stage.steps is None) == (stage.fraction is None):
        yield " needs exactly one of steps and fraction"
    if any(num is not None and num <= 0 for num in (stage.steps, stage.fraction)):
        yield " has no steps"
    if weight not in (None, 0) and not has_clean_loss:
        yield f".clean_weight={weight!r}: the objective has no clean loss"
    elif weight not in (None, AUTO_BALANCED) and not (type(weight) in (int, float) and weight >= 0):
        yield f".clean_weight={weight!r} is neither a number >= 0 nor {AUTO_BALANCED!r}"
