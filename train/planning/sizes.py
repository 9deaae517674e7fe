"""Sizes of a run that the configuration leaves open (`train.sizes=auto`), by the model, data and memory; or
whether a given run recomputes activations, without which it does not fit (`fit`).

The choice depends on what does not change from start to start: the memory of the device, not what is free of
it. A run that is started again keeps the sizes that it was started with, also on another machine."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from torch import nn

from idlm.errors import UserError
from idlm.files.paths import PACKINGS
from idlm.files.records import SUFFIXES, search
from idlm.semantics import PROJECTIONS
from idlm.train.check import CHOSEN
from idlm.train.checkpoint.resume import CONFIG_FILE, RUN_FOLDER
from idlm.train.checkpoint.writer import host_memory
from idlm.train.config.schema import AdapterConfig, TrainConfig, value_of, with_values
from idlm.train.model.checks import window_of
from idlm.train.planning.estimate import gpu_name, num_gpus, run_setup
from idlm.train.planning.flops import TokenCounts
from idlm.train.planning.memory import DEVICE_BYTES, ModelShape, memory_plan, shape_of
from idlm.train.planning.state import state_bytes

log = logging.getLogger(__name__)
RECOMPUTES, LAYERS = "model.gradient_checkpointing", "model.recomputed_layers"
KEYS = (
    *("model.dtype", RECOMPUTES, LAYERS, "train.bf16", "train.batch_size"),
    *("train.global_batch", "train.max_length", "train.learning_rate", "train.zero_stage"),
)
"""What is chosen, apart from the adapter. A value that is not the default, or 0, was given and stays."""
USABLE, TIGHT = 0.9, 0.95
"""Of a device's memory; tight: where each layer that is recomputed takes time."""
GPU_LENGTH, CPU_LENGTH, SHORTEST = 4096, 1024, 256
GPU_ROWS, CPU_ROWS, MAX_BATCH = 32, 4, 8
"""Packed rows of a step, as far as the data suffices for `WANTED_STEPS`; and of a micro-batch."""
WANTED_STEPS = 100
BYTES_PER_TOKEN, PACKED = 4, 3
"""Of text; and how much smaller compressed files and Parquet are."""
ADAPTER_RATE, LARGE_RATE, LARGE_MODEL, HIGHEST_RATE = 2e-4, 1e-5, 8e9, 1e-3
"""Learning rates: of an adapter; of a model of 8 B parameters, times the root of how much smaller one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What sizes depend on; `ends`: elements into and out of the layers of a LoRA."""

    shape: ModelShape | None
    num_parameters: int
    ends: int
    longest: int


def with_sizes(config: TrainConfig) -> TrainConfig:
    """`config` with the sizes that it leaves open. One with a mistake, which is reported later, gets some."""
    if config.train.sizes == "given":
        return config
    if config.train.sizes == "fit":
        return _recomputing(config)
    chosen = _started_with(config)
    if chosen is None:
        try:
            chosen = _fitting(config, _base(config))
        except UserError:
            minimum = dict(zip(CHOSEN, (1, CPU_LENGTH, LARGE_RATE), strict=True))
            return _filled(config, with_values(config, minimum))
    filled = _filled(config, chosen)
    log.info("sizes for %s: %s", gpu_name(config) or "this CPU", ", ".join(_stated(filled)))
    return filled


def _recomputing(config: TrainConfig) -> TrainConfig:
    """`config` with as few layers recomputed as fits, or with those of the run that continues."""
    given = with_values(config, {"train.sizes": "given"})
    started = _started_with(config)
    if started is not None:
        return with_values(given, {key: value_of(started, key) for key in (RECOMPUTES, LAYERS)})
    with contextlib.suppress(UserError):
        base, gpus, gpu = _base(config), num_gpus(config), gpu_name(config)
        available = _device_bytes(gpu)
        if base.shape is None or _needed(given, base, gpus) <= available:
            return given
        for num in range(1, base.shape.layers + 1):
            smaller = with_values(given, {RECOMPUTES: True, LAYERS: num})
            if _needed(smaller, base, gpus) <= TIGHT * available:
                text = "%s=true %s=%d: with less the run does not fit into %s"
                log.info(text, RECOMPUTES, LAYERS, num, gpu or "this machine")
                return smaller
    return given


def _filled(config: TrainConfig, chosen: TrainConfig) -> TrainConfig:
    """`config` with values of `chosen` where it has none."""
    default = TrainConfig()
    left_open = {key: 0 if key in CHOSEN else value_of(default, key) for key in KEYS}
    found = {key: value_of(chosen, key) for key in KEYS if value_of(config, key) == left_open[key]}
    return with_values(config, found | {"adapter": config.adapter or chosen.adapter, "train.sizes": "given"})


def _stated(config: TrainConfig) -> Iterator[str]:
    yield "full fine-tuning" if config.adapter is None else f"a LoRA of rank {config.adapter.rank}"
    values = {key: value_of(config, key) for key in KEYS}
    yield from (f"{key}={value}" for key, value in values.items() if value not in (None, False))


def _started_with(config: TrainConfig) -> TrainConfig | None:
    """The sizes of the run in output_dir that this one continues; None where there is none."""
    stored = Path(config.output_dir) / RUN_FOLDER / CONFIG_FILE
    if config.resume == "never" or not stored.is_file():
        return None
    # A damaged file is reported where the whole configuration is compared.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        values = yaml.safe_load(stored.read_text(encoding="utf-8"))
        found = {key: values[section].get(name) for key in KEYS for section, name in [key.split(".")]}
        adapter = values["adapter"] and AdapterConfig(**values["adapter"])
        return with_values(config, found | {"adapter": adapter})
    return None


def _base(config: TrainConfig) -> Base:
    from idlm.train.planning.dry_run import meta_model
    from idlm.train.prepare import prepare_tokenizer

    tokenizer = None if config.model.path is not None else prepare_tokenizer(config)
    model = meta_model(config, tokenizer)
    targets = PROJECTIONS if config.adapter is None else config.adapter.targets
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    ]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or GPU_LENGTH
    window = window_of(model.config.get_text_config())
    longest = longest if window is None else min(longest, window[1])
    return Base(
        shape=shape_of(model),
        num_parameters=sum(value.numel() for value in model.parameters()),
        ends=sum(linear.in_features + linear.out_features for linear in linears),
        longest=longest,
    )


def _fitting(config: TrainConfig, base: Base) -> TrainConfig:
    """The largest length, and the first way to train, that fit into the memory; else the least."""
    gpus, gpu, loop = num_gpus(config), gpu_name(config), config.train
    available = USABLE * _device_bytes(gpu)
    length = loop.max_length or min(base.longest, CPU_LENGTH if gpu is None else GPU_LENGTH)
    batch, found = loop.batch_size or 1, None
    while found is None:
        ways = [_sized(way, length, batch) for way in _ways(config, gpus, on_gpu=gpu is not None)]
        found = next((way for way in ways if _needed(way, base, gpus) <= available), None)
        if found is None and (loop.max_length or length // 2 < SHORTEST):
            found = ways[-1]
        length //= 2
    length = found.train.max_length
    rows = max(1, _rows_of_step(config, length, CPU_ROWS if gpu is None else GPU_ROWS) // gpus)
    while gpu is not None and not loop.batch_size and 2 * batch <= min(rows, MAX_BATCH):
        if _needed(_sized(found, length, 2 * batch), base, gpus) > available:
            break
        batch *= 2
    rate = ADAPTER_RATE
    if found.adapter is None:
        rate = min(HIGHEST_RATE, LARGE_RATE * math.sqrt(LARGE_MODEL / base.num_parameters))
    global_batch = max(1, rows // batch) * batch * gpus if loop.accumulation == 1 else None
    sizes = {"train.global_batch": global_batch, "train.learning_rate": float(f"{rate:.0e}")}
    return with_values(_sized(found, length, batch), sizes)


def _sized(config: TrainConfig, length: int, batch: int) -> TrainConfig:
    return with_values(config, {"train.max_length": length, "train.batch_size": batch})


def _ways(config: TrainConfig, gpus: int, *, on_gpu: bool) -> Iterator[TrainConfig]:
    """Ways to train, from the fastest for a model that fits to that with the least memory: all weights, or a
    gated LoRA; with activations saved or computed again; the state on each GPU or in parts."""
    copies_base = config.train.base_kl > 0
    is_given = config.adapter is not None or copies_base
    for adapter in (config.adapter,) if is_given else (None, AdapterConfig()):
        is_sharded = on_gpu and gpus > 1
        stages = (1, 2) if copies_base else (1, 2, 3) if adapter is None else (None, 3)
        for zero_stage in stages if is_sharded else (None,):
            for again in (False, True):
                is_bf16 = on_gpu and (adapter is not None or zero_stage is not None)
                values = {
                    "model.dtype": "bfloat16" if is_bf16 else "float32",
                    "model.gradient_checkpointing": again,
                    "train.bf16": on_gpu and not is_bf16,
                    "train.zero_stage": zero_stage,
                }
                yield replace(_filled(config, with_values(config, values)), adapter=adapter)


def _needed(config: TrainConfig, base: Base, gpus: int) -> float:
    """Bytes at the peak on one device, with every token a target."""
    length, adapted = config.train.max_length, 0
    if config.adapter is not None:
        adapted = config.adapter.rank * base.ends
    if base.shape is None:
        weights = (adapted, base.num_parameters) if adapted else (base.num_parameters, 0)
        return state_bytes(config, *weights, world_size=gpus) / USABLE
    fed = TokenCounts(clean_rows=length, noisy_rows=length, clean_targets=length, noisy_targets=length)
    setup = run_setup(config, 2 * length, fed, num_adapted=adapted, world_size=gpus)
    plan = memory_plan(base.shape, setup)
    return plan.peak_allocated if gpu_name(config) is None else plan.device_bytes


def _device_bytes(gpu: str | None) -> int:
    if gpu is None:
        return host_memory()[1]
    return DEVICE_BYTES.get(gpu) or torch.cuda.get_device_properties(0).total_memory


def _rows_of_step(config: TrainConfig, length: int, maximum: int) -> int:
    """Packed rows of a step: below `maximum` where the data would give less than `WANTED_STEPS` steps."""
    num_bytes = 0.0
    for part in config.data.parts():
        if part.source not in SUFFIXES:
            return maximum
        with contextlib.suppress(UserError, OSError):
            for path in search(part.path, SUFFIXES[part.source]).paths:
                is_plain = part.source != "parquet" and path.suffix not in PACKINGS
                num_bytes += path.stat().st_size * (1 if is_plain else PACKED)
    rows = num_bytes / BYTES_PER_TOKEN / length * (config.train.epochs or 1)
    return 2 ** int(math.log2(min(maximum, max(1.0, rows / WANTED_STEPS))))
