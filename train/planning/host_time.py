"""The time of a step on the CPU of this machine, from a short measurement here.

A decoder layer and the head of the run's shape are timed, forward and backward, on a short row of the run's
own data, and scaled by their FLOPs. A shape that would take more than a few seconds, or too much memory, is
planned by the rate of one matrix product. AdamW is timed on a part of the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from idlm.devices import host_memory
from idlm.train.config.schema import TrainConfig
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.data.layout import SampleRows, pack_rows
from idlm.train.model.attention import choose_attention
from idlm.train.model.load import random_model
from idlm.train.objectives.base import Head, TermRequest
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.planning.flops import PRODUCT, ModelWork, Passes, TokenCounts, train_passes
from idlm.train.planning.step_time import PartsOf
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
    """Rates of this CPU for the run's shape."""
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
