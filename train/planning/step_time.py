"""The time that a step is expected to take, part by part: products, attention, element-wise kernels,
gradients and optimizer, collectives, and the device's wait for the host.

A product takes the time of its multiply-adds and most of that of moving its operands and its result. The
constants are a compromise of profiled steps on one H200 and one H100: 8B, 1B, 0.6B and 135M shapes, full and
gated LoRA. The plan is within a tenth of every measured step (tests/unit/planning/test_step_time.py). A small
model waits for its host, whose launches take as long whatever its width. With `model.graphs` CUDA graphs
replay its layers (train/model/graphs.py), and the device waits for the host once a step.
Meant are compiled layers and the attention `idlm_split` on GPUs of one node: a dense mask, eager layers, an
optimizer on the host or a network take longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from idlm.train.config.schema import MATMUL_TFLOPS, TrainConfig
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS
from idlm.train.model.graphs import is_short
from idlm.train.objectives.curriculum import Stage
from idlm.train.planning.flops import ModelWork, Passes, TokenCounts, extra_passes, train_passes
from idlm.train.planning.state import RunSetup

ATTENTION, NARROW_ATTENTION, GATED_ATTENTION = 0.52, 0.42, 0.61
"""Rate of the attention kernels over that of products; narrow: head dims up to 64. Gated: clean keys need no
gradient."""
NARROW_HEAD = 64
OPERANDS = 0.75
"""Share of the time of moving operands that is added to that of multiply-adds."""
ELEMENTWISE = 1.4
"""How often element-wise kernels and copies move what goes into and comes out of products: 1.2 to 1.6."""
WAIT = 0.7e-3
"""Seconds per layer and micro-batch in which a busy device waits for the host's launches: 0.4 to 1.0 ms."""
LAUNCHES, GATED_LAUNCHES, STEP = 3.9e-3, 8.2e-3, 15e-3
"""Seconds that the host takes per layer and micro-batch to launch all kernels, DeepSpeed's included, and per
step besides. Under a gate clean and noisy rows run apart."""
REPLAYED_STEP = 25e-3
"""Seconds per step in which a device that replays graphs waits for the host, around the optimizer."""
GRADIENT_BYTES = 12
"""Moved per trained weight and micro-batch: a bfloat16 gradient to a bucket and back, its float32 sum."""
OPTIMIZER_BYTES = 30
"""Moved per trained weight and step: AdamW's moments and master read and written, gradient, weight."""


class Rates(NamedTuple):
    """Of one GPU: FLOP/s of products; bytes/s of memory; bytes/s that collectives reach inside a node."""

    products: float
    memory: float
    link: float


TBYTES = {"B200": (7.2, 0.70), "H200": (4.3, 0.35), "H100": (3.0, 0.35), "A100": (1.8, 0.24)}
"""TB/s of memory and link. Memory is measured for H200 and H100, others have the same 0.9 of the data sheet;
links are assumed to reach 0.8 of theirs."""


PartsOf = Callable[[Passes, TokenCounts], dict[str, float]]
"""`(passes, fed) -> seconds of one step by part` on one device, whose rows need `passes`; `fed`: the average
packed row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """FLOPs that rows need and settings add, over all GPUs; `parts`: seconds, and `how` found."""

    num_steps: int
    tokens_per_step: float
    flops_per_step: float
    extra_flops: float
    num_gpus: int
    parts: dict[str, float]
    how: str

    @property
    def seconds_per_step(self) -> float:
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.seconds_per_step / self.num_gpus


def rates_of(gpu: str | None, tflops: float) -> Rates:
    """The rates of a GPU whose products reach `tflops`; an unknown one has the H200's proportions."""
    known = gpu if gpu in TBYTES else "H200"
    scale = 1.0 if gpu in TBYTES else tflops / MATMUL_TFLOPS[known]
    memory, link = TBYTES[known]
    return Rates(tflops * 1e12, scale * memory * 1e12, scale * link * 1e12)


def time_plan(
    config: TrainConfig,
    work: ModelWork,
    parts_of: PartsOf,
    how: str,
    *,
    stages: Sequence[tuple[Stage, TokenCounts]],
    global_batch: int,
    num_gpus: int,
) -> TimePlan:
    """Time of all steps; `stages`: each with its average packed row; `how` `parts_of` was found."""
    num_steps = sum(stage.num_steps for stage, _ in stages)
    accumulates = config.train.accumulation > 1 and config.train.balance == "step"
    needed = extra = tokens = 0.0
    parts: dict[str, float] = {}
    for stage, fed in stages:
        share = stage.num_steps / num_steps
        needs = train_passes(work, fed, trains_clean=stage.clean_weight != 0)
        adds = extra_passes(
            fed,
            is_gated=config.is_gated,
            recomputes=_recomputed_share(config, work.num_layers),
            distills=config.train.distill != "none",
            balances=accumulates and stage.clean_weight is None,
        )
        needed += share * global_batch * work.flops(needs)
        extra += share * global_batch * work.flops(adds)
        tokens += share * global_batch * fed.document_tokens
        passes = Passes(*(global_batch / num_gpus * sum(pair) for pair in zip(needs, adds, strict=True)))
        for name, seconds in parts_of(passes, fed).items():
            parts[name] = parts.get(name, 0.0) + share * seconds
    return TimePlan(
        num_steps=num_steps,
        tokens_per_step=tokens,
        flops_per_step=needed,
        extra_flops=extra,
        num_gpus=num_gpus,
        parts=parts,
        how=how,
    )


def _recomputed_share(config: TrainConfig, num_layers: int) -> float:
    """Share of the layers whose activations are recomputed."""
    recomputed = min(config.model.recomputed_layers or num_layers, num_layers)
    return config.model.gradient_checkpointing * recomputed / num_layers


def gpu_parts(
    work: ModelWork, setup: RunSetup, rates: Rates, num_trained: int, micro_batches: float
) -> PartsOf:
    """The parts of a step on one GPU."""
    return lambda passes, fed: _gpu_parts(work, setup, rates, num_trained, micro_batches, passes)


def _gpu_parts(
    work: ModelWork, setup: RunSetup, rates: Rates, num_trained: int, micro_batches: float, passes: Passes
) -> dict[str, float]:
    weights = work.layers + work.head
    moved = 2 * work.moved(passes) / rates.memory
    # In every micro-batch weights are read twice and their gradients written, or read a third time.
    products = work.products(passes) / rates.products + OPERANDS * moved
    products += 3 * 2 * micro_batches * weights / rates.memory
    updated = OPTIMIZER_BYTES * num_trained / setup.parts(1) + GRADIENT_BYTES * num_trained * micro_batches
    # ZeRO-1 and DDP reduce gradients once per step, later stages in every micro-batch.
    shards_sums, shards_weights = setup.parts(2) > 1, setup.parts(SHARDS_WEIGHTS) > 1
    sent = 2 * num_trained * (1 + (micro_batches if shards_sums else 1))
    if shards_weights:
        sent += 2 * 2 * weights * micro_batches
    attention = NARROW_ATTENTION if work.head_dim <= NARROW_HEAD else ATTENTION
    if work.is_gated:
        attention = GATED_ATTENTION
    parts = {
        "products": products,
        "attention": work.queries * passes.pairs / (attention * rates.products),
        "element-wise": ELEMENTWISE * moved,
        "gradients and optimizer": updated / rates.memory,
        "collectives": sent * (1 - 1 / setup.world_size) / rates.link,
    }
    layer_weights = work.layers / work.num_layers
    is_replayed = setup.is_compiled and setup.is_replayed
    if is_replayed and is_short(layer_weights, num_rows=setup.rows, is_gated=work.is_gated):
        return parts | {"host": REPLAYED_STEP}
    launches = GATED_LAUNCHES if work.is_gated else LAUNCHES
    layers = work.num_layers * micro_batches
    return parts | {"host": max(WAIT * layers, launches * layers + STEP - sum(parts.values()))}
