"""What a run will take, before it runs: seconds from FLOPs, bytes on disk, and what of them is free.

Rates are assumptions and are named as such wherever they are shown. Nothing here needs a GPU or the weights.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from idlm.train.objectives.curriculum import Stage
from idlm.train.planning.flops import FORWARD, PAIR_FORWARD, ModelWork, TokenCounts, train_flops
from idlm.train.planning.memory import GIB

if TYPE_CHECKING:
    from idlm.train.config.schema import TrainConfig

EFFICIENCY = 0.6
"""Share of that rate which whole steps reach; benchmarks/training/train_step.py measures it."""
EXPORT_BYTES = {"float32": 4, "bfloat16": 2}
DISK_FIX = "free space, lower train.save_total_limit or give another output_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """`flops_per_step` that the rows need and `extra_flops` that the settings add, over all GPUs."""

    num_steps: int
    tokens_per_step: float
    flops_per_step: float
    extra_flops: float
    num_gpus: int
    tflops: float
    efficiency: float

    @property
    def seconds_per_step(self) -> float:
        work = self.flops_per_step + self.extra_flops
        return work / (self.num_gpus * self.tflops * 1e12 * self.efficiency)

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.seconds_per_step / self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Bytes of one checkpoint of the run and of one published one, how many of each, and what is free.
    `held_bytes`: those that the run's earlier checkpoints take already.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int
    num_exports: int
    free_bytes: int
    place: str
    held_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes * self.num_exports

    @property
    def problem(self) -> str | None:
        """What to say when it does not fit; `DISK_FIX` says what to do."""
        missing_bytes = self.needed_bytes - self.held_bytes
        if missing_bytes <= self.free_bytes:
            return None
        return (
            f"output_dir needs {size_text(missing_bytes)}, and {self.place} has "
            f"{size_text(self.free_bytes)} free"
        )


def mean_fed(fed: Sequence[TokenCounts]) -> TokenCounts:
    """The average of several items."""
    names = TokenCounts.__slots__
    return TokenCounts(**{name: sum(getattr(one, name) for one in fed) / len(fed) for name in names})


def time_plan(
    config: TrainConfig,
    work: ModelWork,
    *,
    stages: Sequence[tuple[Stage, TokenCounts]],
    global_batch: int,
    num_gpus: int,
    tflops: float,
) -> TimePlan:
    """Time of all steps; `stages`: each with the average packed row that it is fed.

    Extra FLOPs: one forward pass of the layers for recomputed activations, and one more, with the head, for
    an auto-balanced stage with accumulation that balances its own step.
    """
    num_steps = sum(stage.num_steps for stage, _ in stages)
    needed = extra = tokens = 0.0
    for stage, fed in stages:
        rows = stage.num_steps * global_batch
        forward = FORWARD * work.layers * fed.rows + PAIR_FORWARD * work.queries * fed.pairs
        tokens += rows * fed.clean_rows
        needed += rows * train_flops(work, fed, trains_clean=stage.clean_weight != 0)
        if config.model.gradient_checkpointing:
            extra += rows * forward
        if stage.clean_weight is None and config.train.accumulation > 1 and config.train.balance == "step":
            extra += rows * (forward + FORWARD * work.head * (fed.clean_targets + fed.noisy_targets))
    return TimePlan(
        num_steps=num_steps,
        tokens_per_step=tokens / num_steps,
        flops_per_step=needed / num_steps,
        extra_flops=extra / num_steps,
        num_gpus=num_gpus,
        tflops=tflops,
        efficiency=EFFICIENCY,
    )


def disk_plan(
    config: TrainConfig,
    *,
    num_trained: int,
    num_stages: int,
    num_steps: int,
    has_masters: bool,
    is_bf16: bool,
) -> DiskPlan:
    """A checkpoint holds the weights that train, AdamW's two moments and, with DeepSpeed, float32 masters.

    One more than `save_total_limit` exists while the newest is written. Every stage publishes the weights, or
    the adapter alone.
    """
    loop, weight = config.train, 2 if is_bf16 else 4
    dtype = config.export.dtype or config.model.dtype
    is_float32_adapter = config.adapter is not None and config.export.dtype is None
    output_dir = Path(config.output_dir).absolute()
    place = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    written = [*output_dir.glob("run/checkpoint-*/**/*"), *output_dir.glob("stages/**/*")]
    return DiskPlan(
        checkpoint_bytes=num_trained * (weight + 8 + (4 if has_masters else 0)),
        num_checkpoints=min(loop.save_total_limit + 1, math.ceil(num_steps / loop.save_every)),
        export_bytes=num_trained * (4 if is_float32_adapter else EXPORT_BYTES[dtype]),
        num_exports=num_stages,
        free_bytes=shutil.disk_usage(place).free,
        place=str(place),
        held_bytes=sum(path.stat().st_size for path in written if path.is_file()),
    )


def size_text(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def span(seconds: float) -> str:
    """A time for people: the two largest units."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    days, hours, minutes = minutes // 1440, minutes % 1440 // 60, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
