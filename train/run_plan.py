"""The plan of a run from its configuration, its data and a model's shape: for the dry run and the report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from idlm.train.arguments import num_processes
from idlm.train.config import TrainConfig
from idlm.train.curriculum import Curriculum
from idlm.train.dataset import PackedDataset, collate
from idlm.train.deepspeed import keeps_fp32_masters, num_elements, uses_deepspeed, zero_stage
from idlm.train.estimate import MATMUL_TFLOPS, TimePlan, mean_fed, time_plan
from idlm.train.flops import Fed, fed_of, work_of
from idlm.train.plan import MemoryPlan, ModelShape, RunSetup, memory_plan, shape_of
from idlm.train.regional_compile import compiles

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

    def as_dict(self) -> dict[str, float | None]:
        """For the run's folder, to be compared with what is measured."""
        return {
            "num_gpus": self.num_gpus,
            "peak_allocated": self.memory.peak_allocated,
            "seconds": None if self.time is None else self.time.seconds,
            "tokens_per_second_per_gpu": None if self.time is None else self.time.tokens_per_second_per_gpu,
        }


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


def sampled_fed(dataset: PackedDataset, curriculum: Curriculum, stage: int) -> Fed:
    """The average packed row of a stage, from its first items."""
    first = sum(one.num_steps for one in curriculum.stages[:stage]) * curriculum.global_batch
    last = min(first + SAMPLED_ITEMS, first + curriculum.stages[stage].num_steps * curriculum.global_batch)
    return mean_fed([fed_of(collate([dataset[item]])["fed"]) for item in range(first, last)])


def state_setup(config: TrainConfig, *, world_size: int) -> RunSetup:
    """The run as `state_terms` wants it: without rows."""
    masters = keeps_fp32_masters(config)
    return RunSetup(
        rows=0,
        targets=0,
        mask_rows=0,
        world_size=world_size,
        zero_stage=zero_stage(config),
        is_bf16=masters or config.model.dtype == "bfloat16",
        offloads=config.train.offload_optimizer,
        rank=0 if config.adapter is None else config.adapter.rank,
    )


def run_setup(
    config: TrainConfig, row_length: int, fed: Fed, *, num_adapted: int, world_size: int
) -> RunSetup:
    """The run as `memory_plan` wants it; rows of a micro-batch are `fed` times the batch size."""
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
        time = time_plan(
            config,
            work,
            stages=list(zip(curriculum.stages, fed, strict=True)),
            global_batch=curriculum.global_batch,
            num_gpus=gpus,
            tflops=tflops,
        )
    return Estimate(
        shape=shape,
        setup=setup,
        memory=memory_plan(shape, setup),
        time=time,
        num_gpus=gpus,
        is_counted=work is not None,
    )
