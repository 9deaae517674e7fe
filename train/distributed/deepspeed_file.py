"""A DeepSpeed file of the user (`train.deepspeed`): its problems, and its values with "auto" filled in.

Files of other trainers say "auto" where the trainer knows the value. Here that is the value of our settings;
an optimizer or a schedule that is "auto" is ours, and float16 that is off or "auto" is off. A value that is
given must be that of our settings where there is one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, keeps_fp32_masters

AUTO = "auto"
STAGES = (0, 1, 2, 3)
FILLED_BY_TRAINER = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
)
BY_WIDTH = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Of `zero_optimization`: transformers takes them from the model's width."""
REPLACED = ("optimizer", "scheduler", "fp16", "amp")
"""Sections that our settings replace once nothing in them contradicts."""
ADAMW = ("adamw", "adam", "fusedadam", "deepspeedcpuadam")
FIXED_SCHEDULE = {"warmup_min_lr": 0, "last_batch_iteration": -1}
ADAM_EPSILON, ADAM_BETA1 = 1e-8, 0.9
"""Of transformers' AdamW, which training uses."""


def read_settings(path: Path) -> dict[str, Any] | str:
    """The content of a file, or what is wrong with it as a whole."""
    if not path.is_file():
        return f"train.deepspeed={path} is not a file"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"train.deepspeed={path} is not JSON: {error}"
    sections = ("zero_optimization", "bf16", *REPLACED)
    if not isinstance(given, dict) or any(not isinstance(given.get(name, {}), dict) for name in sections):
        return f"train.deepspeed={path} is not a DeepSpeed configuration: an object is expected"
    return given


def fill(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `ours`, the settings of a run of the same stage. What is "auto" is that of ours, else what
    transformers takes from the model's width, else DeepSpeed's default.
    """
    filled = dict(ours)
    filled |= {name: value for name, value in given.items() if name not in REPLACED and value != AUTO}
    filled["bf16"] = dict(given.get("bf16", {})) | ours["bf16"]
    zero = dict(given.get("zero_optimization", {}))
    offload = {"device": "none", "pin_memory": False} | ours["zero_optimization"].get("offload_optimizer", {})
    for name, value in zero.items():
        if isinstance(value, dict):
            zero[name] = {key: offload.get(key, one) if one == AUTO else one for key, one in value.items()}
        elif value == AUTO:
            zero[name] = ours["zero_optimization"].get(name, AUTO)
    filled["zero_optimization"] = zero
    kept = (*FILLED_BY_TRAINER, *(BY_WIDTH if zero.get("stage") == SHARDS_WEIGHTS else ()))
    return _without_autos(filled, kept)


def _without_autos(values: Mapping[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    """`values` without those that are "auto", at any depth, except under the names in `kept`."""
    return {
        name: _without_autos(value, kept) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != AUTO or name in kept
    }


def settings_problems(given: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """What contradicts our settings or is not supported."""
    if _enabled(given, "fp16") is True or _enabled(given, "amp") is True:
        yield "fp16 is not supported, its range is too small for this loss; use bf16"
    is_bf16 = keeps_fp32_masters(config)
    if _enabled(given, "bf16") not in (None, AUTO, is_bf16):
        yield (
            f"bf16.enabled={json.dumps(_enabled(given, 'bf16'))} contradicts train.bf16 and model.dtype, "
            f'which say {json.dumps(is_bf16)}; write "auto"'
        )
    stage = given.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in STAGES:
        yield f"zero_optimization.stage={json.dumps(stage)} is not one of 0, 1, 2, 3"
    for name, key, value in _known(config):
        told = _value(given, name)
        if told not in (None, AUTO, value):
            yield f'{name}={json.dumps(told)} contradicts {key}={value}; write "auto"'
    yield from _replaced(given)


def _replaced(given: Mapping[str, Any]) -> Iterator[str]:
    """Sections for which training has something of its own."""
    optimizer, schedule = given.get("optimizer", {}), given.get("scheduler", {})
    kind = str(optimizer.get("type", "AdamW"))
    if kind.lower() not in ADAMW or optimizer.get("params", {}).get("adam_w_mode") is False:
        yield f"optimizer.type={kind} is not the AdamW that idlm trains with; remove the section"
    for name, value in schedule.get("params", {}).items():
        is_text = isinstance(value, str)
        if not is_text and FIXED_SCHEDULE.get(name) != value and name != "warmup_max_lr":
            yield (
                f"scheduler.params.{name}={json.dumps(value)} would not be used: train.schedule, "
                'train.warmup and train.decay are; write "auto", or remove the section'
            )
    for name in ("tensor_parallel", "sequence_parallel_size"):
        if name in given:
            yield f"{name!r} would replace what idlm does itself; remove it"


def _known(config: TrainConfig) -> Iterator[tuple[str, str, Any]]:
    """(name in the file, key of ours, its value)."""
    loop = config.train
    size = config.plan.num_gpus if config.dry_run and config.plan.num_gpus else _world_size()
    accumulation, rows = loop.accumulation, loop.batch_size * size
    if loop.global_batch is not None:
        accumulation = max(1, loop.global_batch // max(1, rows))
    yield "train_micro_batch_size_per_gpu", "train.batch_size", loop.batch_size
    yield "gradient_accumulation_steps", "train.accumulation", accumulation
    yield "train_batch_size", f"train.batch_size x accumulation x {size} processes", rows * accumulation
    yield "gradient_clipping", "train.max_grad_norm", loop.max_grad_norm
    yield "optimizer.params.lr", "train.learning_rate", loop.learning_rate
    yield "optimizer.params.betas", "betas", [ADAM_BETA1, loop.adam_beta2]
    yield "optimizer.params.eps", "eps", ADAM_EPSILON
    yield "optimizer.params.weight_decay", "train.weight_decay", loop.weight_decay
    yield "scheduler.params.warmup_max_lr", "train.learning_rate", loop.learning_rate


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _value(given: Mapping[str, Any], name: str) -> Any:
    """The value under a name with dots; None where there is none."""
    value: Any = given
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _enabled(given: Mapping[str, Any], section: str) -> Any:
    """What a section says of itself: true, false, "auto" or None."""
    return given[section].get("enabled", False) if section in given else None
