"""What a run is expected to need, from its configuration, its data and its model's shape: for the dry run and
the report; and the settings that lower its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from idlm.train.config.monitoring import MATMUL_TFLOPS
from idlm.train.config.schema import TrainConfig
from idlm.train.config.trainer_arguments import num_processes
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, num_elements, uses_deepspeed, zero_stage
from idlm.train.model.load import compiles
from idlm.train.objectives.curriculum import Curriculum
from idlm.train.planning.memory import MemoryPlan, ModelShape, memory_plan, shape_of
from idlm.train.planning.state import GIB, RunSetup, state_setup
from idlm.train.planning.time import (
    TimePlan,
    TokenCounts,
    fed_of,
    mean_fed,
    time_plan,
    work_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED_ITEMS = 8
DEFAULT_GPU = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run is expected to need; `time` is None where FLOPs are not counted or no rate is known."""

    shape: ModelShape
    setup: RunSetup
    memory: MemoryPlan
    time: TimePlan | None
    num_gpus: int
    is_counted: bool
    row_length: int
    fed: TokenCounts


def num_gpus(config: TrainConfig) -> int:
    """GPUs that the plan is for."""
    if config.plan.num_gpus is not None:
        return config.plan.num_gpus
    if num_processes() > 1:
        return num_processes()
    return max(1, torch.cuda.device_count()) if config.train.device != "cpu" else 1


def gpu_name(config: TrainConfig) -> str | None:
    """The kind of GPU that the plan is for; None for a run on the CPU."""
    if config.plan.gpu is not None:
        return config.plan.gpu
    if config.train.device == "cpu":
        return None
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else DEFAULT_GPU
    return next((known for known in MATMUL_TFLOPS if known in name), name)


def sampled_fed(dataset: PackedDataset, curriculum: Curriculum, stage: int) -> TokenCounts:
    """The average packed row of a stage, from its first items."""
    first = sum(one.num_steps for one in curriculum.stages[:stage]) * curriculum.global_batch
    last = min(first + SAMPLED_ITEMS, first + curriculum.stages[stage].num_steps * curriculum.global_batch)
    return mean_fed([fed_of(collate([dataset[item]])["fed"]) for item in range(first, last)])


def run_setup(
    config: TrainConfig, row_length: int, fed: TokenCounts, *, num_adapted: int, world_size: int
) -> RunSetup:
    """The setup that `memory_plan` needs; rows of a micro-batch are `fed` times the batch size."""
    size = config.train.batch_size
    device = torch.device("cpu" if config.train.device == "cpu" else "cuda")
    return replace(
        state_setup(config, world_size=world_size),
        rows=size * row_length,
        targets=round(size * (fed.clean_targets + fed.noisy_targets)),
        mask_rows=round(size * fed.noisy_rows),
        accumulation=config.train.accumulation,
        autocast=config.train.bf16 and not uses_deepspeed(config) and config.model.dtype == "float32",
        is_checkpointed=config.model.gradient_checkpointing,
        is_compiled=compiles(config.model.compile, device, zero_stage=zero_stage(config)),
        adapter_parameters=num_adapted,
    )


def estimate_run(
    config: TrainConfig, model: PreTrainedModel, dataset: PackedDataset, curriculum: Curriculum, *, gpus: int
) -> Estimate | None:
    """What the run will need; `model` with its adapter, if any. None where its shape is unknown to us."""
    shape = shape_of(model)
    if shape is None:
        return None
    adapted = 0
    if config.adapter is not None:
        adapted = sum(num_elements(value) for value in model.parameters() if value.requires_grad)
    fed = [sampled_fed(dataset, curriculum, stage.index) for stage in curriculum.stages]
    setup = run_setup(config, dataset.row_length, fed[-1], num_adapted=adapted, world_size=gpus)
    work, tflops = work_of(model), config.plan.tflops or MATMUL_TFLOPS.get(gpu_name(config) or "")
    time = None
    if work is not None and tflops is not None:
        stages, rows = list(zip(curriculum.stages, fed, strict=True)), curriculum.global_batch
        time = time_plan(config, work, stages=stages, global_batch=rows, num_gpus=gpus, tflops=tflops)
    return Estimate(
        shape=shape,
        setup=setup,
        memory=memory_plan(shape, setup),
        time=time,
        num_gpus=gpus,
        is_counted=work is not None,
        row_length=dataset.row_length,
        fed=fed[-1],
    )


def remedies(config: TrainConfig, estimate: Estimate) -> list[str]:
    """Settings that lower the largest term of the memory plan, each with what the run needs then; the
    smallest need comes first.
    """
    loop, gpus, row_length = config.train, estimate.num_gpus, estimate.row_length
    checkpointed = replace(config, model=replace(config.model, gradient_checkpointing=True))
    changes = {
        f"{2 * gpus} GPUs": (config, 2 * gpus, row_length),
        "model.gradient_checkpointing=true": (checkpointed, gpus, row_length),
    }
    if loop.batch_size == 1:
        changes[f"train.max_length={loop.max_length // 2}"] = (config, gpus, row_length // 2)
    loops = {}
    if loop.batch_size > 1:
        loops[f"train.batch_size={loop.batch_size // 2}"] = replace(loop, batch_size=loop.batch_size // 2)
    if loop.deepspeed is None:
        # Compiled layers do not go with weights that move.
        highest = SHARDS_WEIGHTS - 1 if config.model.compile == "on" else SHARDS_WEIGHTS
        for stage in range((loop.zero_stage or 0) + 1, highest + 1):
            loops[f"train.zero_stage={stage}"] = replace(loop, zero_stage=stage)
    if loop.zero_stage:
        loops["train.offload_optimizer=true (slow)"] = replace(loop, offload_optimizer=True)
    for name, changed in loops.items():
        changes[name] = (replace(config, train=changed), gpus, row_length)
    # Recomputed activations have other names than kept ones: terms are compared by their first word.
    kind = max(estimate.memory.terms, key=lambda term: term.num_bytes).name.split()[0].rstrip(",")
    before, found = _bytes_of_kind(estimate.memory, kind), []
    for name, (changed_config, world_size, length) in changes.items():
        plan = _memory_of(changed_config, estimate, world_size=world_size, row_length=length)
        if _bytes_of_kind(plan, kind) < before:
            found.append((plan.device_bytes, f"{name} (then {plan.device_bytes / GIB:.1f} GiB)"))
    return [text for _, text in sorted(found)]


def _memory_of(config: TrainConfig, estimate: Estimate, *, world_size: int, row_length: int) -> MemoryPlan:
    share = row_length / estimate.row_length
    fed = TokenCounts(**{name: share * getattr(estimate.fed, name) for name in TokenCounts.__slots__})
    num_adapted = estimate.setup.adapter_parameters
    setup = run_setup(config, row_length, fed, num_adapted=num_adapted, world_size=world_size)
    return memory_plan(estimate.shape, setup)


def _bytes_of_kind(plan: MemoryPlan, kind: str) -> int:
    return sum(term.num_bytes for term in plan.terms if term.name.startswith(kind))
