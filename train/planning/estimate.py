"""The memory and time that a run is expected to need, for the dry run and the report; which settings lower
its memory; and the error for exhausted memory.

The rates of GPUs are assumptions, and the dry run calls them so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from idlm.devices import is_out_of_memory
from idlm.errors import UserError
from idlm.log import num_processes
from idlm.train.config.schema import MATMUL_TFLOPS, TrainConfig, with_values
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, num_parameters, num_trained_parameters
from idlm.train.model.graphs import replays
from idlm.train.model.load import compiles
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.planning.flops import TokenCounts, work_of
from idlm.train.planning.memory import MemoryEstimate, ModelShape, memory_plan, shape_of
from idlm.train.planning.state import GIB, RunSetup, state_bytes, state_setup
from idlm.train.planning.step_time import PartsOf, TimePlan, gpu_parts, host_parts, rates_of, time_plan

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

SAMPLED_ITEMS = 32
DEFAULT_GPU = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run is expected to need; `time` is None where FLOPs are not counted or no rate is known."""

    shape: ModelShape
    setup: RunSetup
    memory: MemoryEstimate
    time: TimePlan | None
    is_counted: bool
    row_length: int
    fed: TokenCounts


def num_gpus(config: TrainConfig) -> int:
    if config.plan.num_gpus is not None:
        return config.plan.num_gpus
    if num_processes() > 1:
        return num_processes()
    return max(1, torch.cuda.device_count()) if config.train.device != "cpu" else 1


def gpu_name(config: TrainConfig) -> str | None:
    """The kind of GPU that the plan is for; None for the CPU, without a visible or requested GPU."""
    if config.plan.gpu is not None:
        return config.plan.gpu
    has_gpu = torch.cuda.is_available()
    is_requested = config.train.device == "cuda" or config.plan.num_gpus is not None
    if config.train.device == "cpu" or not (has_gpu or is_requested):
        return None
    name = torch.cuda.get_device_name(0) if has_gpu else DEFAULT_GPU
    return next((known for known in MATMUL_TFLOPS if known in name), name)


def estimate_run(
    config: TrainConfig,
    model: PreTrainedModel,
    dataset: PackedDataset,
    curriculum: Curriculum,
    *,
    gpus: int,
    num_sampled: int = SAMPLED_ITEMS,
    measures: bool = False,
) -> Estimate | None:
    """What the run will need; `model` with its adapter, if any. None where its shape is unknown to us.
    `num_sampled`: packed rows that are made to get the average one of a stage. `measures`: time a layer
    where the run is for the CPU, which takes seconds."""
    shape = shape_of(model)
    if shape is None:
        return None
    adapted = 0
    if config.adapter is not None:
        adapted = num_trained_parameters(model)
    fed = [_sampled_fed(dataset, curriculum, stage, num_sampled) for stage in curriculum.stages]
    setup = run_setup(config, dataset.row_length, fed[-1], num_adapted=adapted, world_size=gpus)
    work, num_trained = work_of(model), adapted or shape.num_parameters
    parts: tuple[PartsOf, str] | None = None
    gpu = gpu_name(config)
    tflops = config.plan.tflops or MATMUL_TFLOPS.get(gpu or "")
    if work is not None and tflops is not None:
        micro_batches = curriculum.global_batch / (config.train.batch_size * gpus)
        how = f"assumed: {gpus} x {gpu or 'device'}, {tflops:g} TFLOP/s in products"
        parts = gpu_parts(work, setup, rates_of(gpu, tflops), num_trained, micro_batches), how
    elif work is not None and measures and gpu is None:
        parts = host_parts(config, model, work, dataset, curriculum, num_trained=num_trained)
    time = None
    if work is not None and parts is not None:
        stages = list(zip(curriculum.stages, fed, strict=True))
        rows = curriculum.global_batch
        time = time_plan(config, work, *parts, stages=stages, global_batch=rows, num_gpus=gpus)
    return Estimate(
        shape=shape,
        setup=setup,
        memory=memory_plan(shape, setup),
        time=time,
        is_counted=work is not None,
        row_length=dataset.row_length,
        fed=fed[-1],
    )


def _sampled_fed(
    dataset: PackedDataset, curriculum: Curriculum, stage: Stage, num_sampled: int
) -> TokenCounts:
    """The average packed row of a stage, from its first items."""
    first = sum(one.num_steps for one in curriculum.stages[: stage.index]) * curriculum.global_batch
    num_items = min(num_sampled, stage.num_steps * curriculum.global_batch)
    fed = [collate([dataset[first + item]])["fed"].tolist() for item in range(num_items)]
    return TokenCounts(*(sum(counts) / num_items for counts in zip(*fed, strict=True)))


def run_setup(
    config: TrainConfig, row_length: int, fed: TokenCounts, *, num_adapted: int, world_size: int
) -> RunSetup:
    """The setup that `memory_plan` needs; rows of a micro-batch are `fed` times the batch size."""
    size = config.train.batch_size
    device = torch.device("cpu" if gpu_name(config) is None else "cuda")
    return replace(
        state_setup(config, world_size=world_size),
        rows=size * row_length,
        targets=round(size * (fed.clean_targets + fed.noisy_targets)),
        mask_rows=round(size * fed.noisy_rows) if config.is_gated else size * row_length,
        is_checkpointed=config.model.gradient_checkpointing,
        recomputed_layers=config.model.recomputed_layers,
        is_compiled=compiles(config, device),
        is_replayed=not config.model.gradient_checkpointing
        and replays(config.model.graphs, device, world_size=world_size),
        adapter_parameters=num_adapted,
        batch_size=size,
        attention=config.model.attention,
    )


def smaller_runs(config: TrainConfig, *, num_gpus: int) -> dict[str, TrainConfig]:
    """Configurations that may need less memory on each of `num_gpus`, by the settings that change."""
    loop, changes = config.train, dict[str, dict[str, Any]]()
    if loop.batch_size > 1:
        rows = loop.batch_size * loop.accumulation
        size = next(size for size in range(loop.batch_size // 2, 0, -1) if rows % size == 0)
        values: dict[str, Any] = {"train.batch_size": size, "train.accumulation": rows // size}
    else:
        values = {"train.max_length": loop.max_length // 2, "train.overlong": "truncate"}
    changes[" ".join(f"{key}={value}" for key, value in values.items())] = values
    if loop.deepspeed is None and (num_gpus > 1 or loop.offload_optimizer):
        # Compiled layers, or a copy of the base, do not go with weights that move.
        stays_whole = config.model.compile == "on" or loop.base_kl > 0
        highest = SHARDS_WEIGHTS - 1 if stays_whole else SHARDS_WEIGHTS
        for stage in range((loop.zero_stage or 0) + 1, highest + 1):
            changes[f"train.zero_stage={stage}"] = {"train.zero_stage": stage}
    if loop.zero_stage and not loop.offload_optimizer:
        changes["train.offload_optimizer=true (slow)"] = {"train.offload_optimizer": True}
    if not config.model.gradient_checkpointing:
        changes["model.gradient_checkpointing=true"] = {"model.gradient_checkpointing": True}
    elif config.model.recomputed_layers is not None:
        changes["model.recomputed_layers=null"] = {"model.recomputed_layers": None}
    return {name: with_values(config, values) for name, values in changes.items()}


def remedies(config: TrainConfig, estimate: Estimate) -> list[str]:
    """Settings that lower the largest term of the memory plan; those that need least memory first."""
    gpus = estimate.setup.world_size
    changes = [(name, run, gpus) for name, run in smaller_runs(config, num_gpus=gpus).items()]
    # Recomputed activations have other names than saved ones: terms are compared by their first word.
    kind = max(estimate.memory.terms, key=lambda term: term.num_bytes).name.split()[0].rstrip(",")
    before, found = _bytes_of_kind(estimate.memory, kind), []
    for name, changed, world_size in [*changes, (f"{2 * gpus} GPUs", config, 2 * gpus)]:
        share = changed.train.max_length / config.train.max_length
        fed = TokenCounts(*(share * value for value in estimate.fed))
        num_adapted, row_length = estimate.setup.adapter_parameters, round(share * estimate.row_length)
        setup = run_setup(changed, row_length, fed, num_adapted=num_adapted, world_size=world_size)
        plan = memory_plan(estimate.shape, setup)
        if _bytes_of_kind(plan, kind) < before:
            found.append((plan.device_bytes, f"{name} (then {plan.device_bytes / GIB:.1f} GiB)"))
    return [text for _, text in sorted(found)]


def _bytes_of_kind(plan: MemoryEstimate, kind: str) -> int:
    return sum(term.num_bytes for term in plan.terms if term.name.startswith(kind))


def explain_out_of_memory(
    error: BaseException, config: TrainConfig, model: nn.Module, *, world_size: int
) -> None:
    """Raise UserError IDLM-0517 if `error` is about memory: what was used, what to set."""
    if not is_out_of_memory(error):
        return
    is_gpu = isinstance(error, torch.OutOfMemoryError)
    resident, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    host = f"{resident / GIB:.1f} GiB resident of {total / GIB:.1f} GiB"
    where, figures = ("GPU", _gpu_figures()) if is_gpu else ("host", host)
    num_trained = num_trained_parameters(model)
    num_frozen = num_parameters(model) - num_trained
    states = state_bytes(config, num_trained, num_frozen, world_size=world_size)
    settings = advice(config, num_trained=num_trained, num_frozen=num_frozen, world_size=world_size)
    raise UserError(
        "IDLM-0517",
        f"out of {where} memory: {figures}; weights, gradients and optimizer take {states / GIB:.1f} GiB of "
        f"it, activations of {config.train.batch_size} x {config.train.max_length} tokens the rest",
        fix=f"set one of: {'; '.join(settings)}. With another train.batch_size resume=auto continues, other "
        "settings need a new run (resume=never)",
    ) from error


def advice(config: TrainConfig, *, num_trained: int, num_frozen: int, world_size: int) -> list[str]:
    """Settings that lower memory; for those that lower the training state, what it takes then."""
    before, found = state_bytes(config, num_trained, num_frozen, world_size=world_size), []
    for name, changed in smaller_runs(config, num_gpus=world_size).items():
        after = state_bytes(changed, num_trained, num_frozen, world_size=world_size)
        saved = f"{after / GIB:.1f} GiB of weights, gradients and optimizer instead of {before / GIB:.1f}"
        if after <= before:
            found.append(f"{name} ({saved if after < before else 'fewer activations'})")
    return found


def _gpu_figures() -> str:
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB allocated at most, "
        f"{torch.cuda.memory_reserved() / GIB:.1f} GiB reserved, {free / GIB:.1f} of {total / GIB:.1f} GiB "
        "free"
    )
