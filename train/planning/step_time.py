"""The time that a step is expected to take, part by part: products, attention, element-wise kernels,
gradients and optimizer, collectives, and the device's wait for the host.

On a GPU a product takes the time of its multiply-adds and most of that of moving its operands and its result.
The constants are a compromise of profiled steps on one H200 and one H100: 8B, 1B, 0.6B and 135M shapes, full
and gated LoRA. The plan is within a tenth of every measured step (tests/unit/planning/test_step_time.py). A
small model waits for its host, whose launches take as long whatever its width. With `model.graphs` CUDA
graphs replay its layers (train/model/graphs.py), and the device waits for the host once a step. Meant are
compiled layers and the attention `idlm_split` on GPUs of one node: a dense mask, eager layers, an optimizer
on the host or a network take longer.

On the CPU of this machine a decoder layer and the head of the run's shape are timed, forward and backward, on
a short row of the run's own data, and scaled by their FLOPs. A shape that would take more than a few seconds,
or too much memory, is planned by the rate of one matrix product. AdamW is timed on a part of the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from idlm.train.checkpoint.writer import host_memory
from idlm.train.config.schema import MATMUL_TFLOPS, TrainConfig
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.data.layout import SampleRows, pack_rows
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS
from idlm.train.model.attention import choose_attention
from idlm.train.model.graphs import is_short
from idlm.train.model.load import random_model
from idlm.train.objectives.base import Head, TermRequest
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.planning.flops import PRODUCT, ModelWork, Passes, TokenCounts, extra_passes, train_passes
from idlm.train.planning.state import RunSetup
from idlm.train.prepare import prepare_adapter
from idlm.train.step import BodyAndHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
BUDGET, LONGEST = 1.5, 6.0
"""Seconds that the measurement should take, and may take with the shortest row."""
ENOUGH, MAX_CALLS = 0.3, 50
"""Seconds, and calls, after which the shortest time of a call is known well enough."""
SHORTEST_ROW = 64
MEMORY_SHARE = 0.3
"""Of the memory that is free now: what the timed layers, with their gradients, may take."""
UPDATED = 1 << 22
"""Weights that AdamW is timed on."""
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
step in addition. Under a gate clean and noisy rows run apart."""
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
    recomputed = min(config.model.recomputed_layers or work.num_layers, work.num_layers)
    needed = extra = tokens = 0.0
    parts: dict[str, float] = {}
    for stage, fed in stages:
        share = stage.num_steps / num_steps
        needs = train_passes(work, fed, trains_clean=stage.clean_weight != 0)
        adds = extra_passes(
            fed,
            is_gated=config.is_gated,
            recomputes=config.model.gradient_checkpointing * recomputed / work.num_layers,
            distills=config.train.distill != "none",
            copies_base=config.train.base_kl > 0,
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


def gpu_parts(
    work: ModelWork, setup: RunSetup, rates: Rates, num_trained: int, micro_batches: float
) -> PartsOf:
    weights = work.layers + work.head
    updated = OPTIMIZER_BYTES * num_trained / setup.parts(1) + GRADIENT_BYTES * num_trained * micro_batches
    # ZeRO-1 and DDP reduce gradients once per step, later stages in every micro-batch.
    shards_sums, shards_weights = setup.parts(2) > 1, setup.parts(SHARDS_WEIGHTS) > 1
    sent = 2 * num_trained * (1 + (micro_batches if shards_sums else 1))
    if shards_weights:
        sent += 2 * 2 * weights * micro_batches
    attention = NARROW_ATTENTION if work.head_dim <= NARROW_HEAD else ATTENTION
    if work.is_gated:
        attention = GATED_ATTENTION

    def parts_of(passes: Passes, fed: TokenCounts) -> dict[str, float]:
        moved = 2 * work.moved(passes) / rates.memory
        # In every micro-batch weights are read twice and their gradients written, or read a third time.
        products = work.products(passes) / rates.products + OPERANDS * moved
        products += 3 * 2 * micro_batches * weights / rates.memory
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

    return parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """FLOP/s of layers and head, forward and backward; weights/s of gradients and AdamW."""

    layers: float
    head: float
    gradients: float
    optimizer: float
    how: str


def host_parts(
    config: TrainConfig,
    model: PreTrainedModel,
    work: ModelWork,
    dataset: PackedDataset,
    curriculum: Curriculum,
    *,
    num_trained: int,
) -> tuple[PartsOf, str]:
    """(seconds of a step by part, how they were found) on this CPU."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    rates = measure(config, model, work, dataset, curriculum)
    micro_batches = curriculum.global_batch / config.train.batch_size

    def parts_of(passes: Passes, fed: TokenCounts) -> dict[str, float]:
        # Rows of padding pass through the layers too, but where clean and noisy rows run apart.
        padded = 1.0 if config.is_gated else dataset.row_length / max(1.0, fed.rows)
        return {
            "layers": padded * _of_layers(work, passes) / rates.layers,
            "head": PRODUCT * work.head * passes.head / rates.head,
            "gradients": micro_batches * num_trained / rates.gradients,
            "optimizer": num_trained / rates.optimizer,
        }

    return parts_of, rates.how


def _of_layers(work: ModelWork, passes: Passes) -> float:
    """FLOPs without those of the head."""
    return work.flops(passes._replace(head=0))


def measure(
    config: TrainConfig,
    model: PreTrainedModel,
    work: ModelWork,
    dataset: PackedDataset,
    curriculum: Curriculum,
) -> HostRates:
    dtype = getattr(torch, config.model.dtype)
    width = model.config.get_text_config().hidden_size
    rows, columns = torch.ones(256, width, dtype=dtype), torch.ones(width, 1024, dtype=dtype)
    rate = PRODUCT * rows.numel() * columns.shape[1] / _seconds(lambda: rows @ columns)
    weight, sums = torch.nn.Parameter(torch.ones(UPDATED)), torch.ones(UPDATED)
    weight.grad = torch.ones_like(weight)
    gradients = UPDATED / _seconds(lambda: sums.add_(torch.zeros_like(sums)))
    by_product = HostRates(
        layers=rate,
        head=rate,
        gradients=gradients,
        optimizer=UPDATED / _seconds(torch.optim.AdamW([weight]).step),
        how=f"measured here: a matrix product, {rate / 1e9:,.0f} GFLOP/s; assumed: all products at that rate",
    )
    # A row passes three times through three layers and two heads, and once more to warm up.
    per_row = 3 * PRODUCT * (3 * work.layers / work.num_layers + 2 * work.head) * 2
    num_rows = max(SHORTEST_ROW, min(dataset.row_length, int(BUDGET * rate / per_row)))
    weights = 4 * (2 * work.layers // work.num_layers + 2 * work.head) * 2
    if num_rows * per_row / rate > LONGEST or weights > MEMORY_SHARE * host_memory()[0]:
        return by_product
    try:
        batch, stage = _short_batch(dataset, curriculum, num_rows)
        first, second = (_seconds(_step(config, model, dataset, batch, stage, num)) for num in (1, 2))
    # A family that cannot be built with another number of layers, for which its parts have no common error.
    except Exception:
        log.debug("the layers of this model cannot be timed", exc_info=True)
        return by_product
    # Each weight of a layer, the head and the embedding gets a gradient, however short the row is.
    of_layer, of_rest = (0.0, 0.0) if work.is_frozen else (work.layers / work.num_layers, 2 * work.head)
    layer = max(second - first - of_layer / gradients, 0.05 * first)
    rest = max(first - layer - (of_layer + of_rest) / gradients, 0.05 * first)
    needs = train_passes(work, TokenCounts(*batch["fed"].tolist()), trains_clean=stage.clean_weight != 0)
    how = (
        f"measured here, forward and backward of {int(batch['fed'][:2].sum())} rows by "
        f"{torch.get_num_threads()} threads: one decoder layer {1e3 * layer:,.1f} ms, the head "
        f"{1e3 * rest:,.1f} ms"
    )
    layers = _of_layers(work, needs) / work.num_layers / layer
    return replace(by_product, layers=layers, head=PRODUCT * work.head * needs.head / rest, how=how)


def _seconds(run: Callable[[], Any]) -> float:
    """The shortest time of the calls after the first, or of the first alone where it is long."""
    taken: list[float] = []
    while len(taken) < 2 or (len(taken) < MAX_CALLS and sum(taken) < ENOUGH):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
        if taken[0] > BUDGET:
            break
    return max(min(taken[1:] or taken), 1e-7)


def _short_batch(
    dataset: PackedDataset, curriculum: Curriculum, num_rows: int
) -> tuple[dict[str, torch.Tensor], Stage]:
    """A packed row of at most `num_rows`, of the last stage: the ends of the first samples."""
    stage, objective = curriculum.stages[-1], dataset.objective
    item = curriculum.num_items - stage.num_steps * curriculum.global_batch
    documents: list[SampleRows] = []
    left = num_rows
    for location, sample in enumerate(dataset.rows.row(item)):
        # The end of the sample.
        part = sample.piece(max(0, len(sample) - max(2, left // 2)), len(sample))
        rows = objective.rows(part, stage, (dataset.seed, item, location))
        if documents and len(rows) > left:
            break
        documents.append(rows)
        left -= len(rows)
    row = pack_rows(documents, max(num_rows, num_rows - left), pad_token_id=dataset.pad_token_id)
    return collate([row | {"item_id": item, "stage": stage.index}]), stage


def _step(
    config: TrainConfig,
    model: PreTrainedModel,
    dataset: PackedDataset,
    batch: dict[str, torch.Tensor],
    stage: Stage,
    num_layers: int,
) -> Callable[[], None]:
    """Forward and backward pass of `batch` by a model of the run's shape with `num_layers` layers."""
    dtype, objective = getattr(torch, config.model.dtype), dataset.objective
    attention = choose_attention(config.model.attention, torch.device("cpu"))
    values = model.config.to_dict()
    many = values["num_hidden_layers"]
    values = {
        name: value[:num_layers] if isinstance(value, list) and len(value) == many else value
        for name, value in values.items()
    }
    values["vocab_size"] = max(values["vocab_size"], int(batch["input_ids"].max()) + 1)
    small = random_model(values | {"num_hidden_layers": num_layers}, attention=attention, dtype=dtype, seed=0)
    prepare_adapter(config, small, None)
    runner, counts = BodyAndHead(small), objective.counts(batch, stage=stage, want_overlap=False)
    request = TermRequest(stage=stage, coefficients=1 / counts.clamp_min(1))

    def compute(head: Head, hidden_BTD: torch.Tensor) -> Any:
        return objective.terms(head, hidden_BTD, batch, request)

    def run() -> None:
        casts = config.train.bf16 and dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            terms = runner.terms(small, batch, attention, compute)
        assert terms.loss is not None
        terms.loss.backward()

    return run
