"""How many prompt rows a pass has beside sequences that decode."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer import build
from idlm.infer.decoders.base import TOKEN_BY_TOKEN, KVWritePolicy
from idlm.infer.request import Request
from idlm.infer.runtime.graphs.pass_costs import MAX_SLOWDOWNS, PassCosts, prompt_rows
from idlm.infer.runtime.graphs.pass_shape import PROMPT_BUCKETS
from idlm.infer.scheduler import Scheduler
from idlm.infer.state.batch import Schedule
from idlm.infer.state.page_pool import PagePool

SLOT_ROWS = 184 * 147_456 / 16.4e9
QWEN3_8B = PassCosts(by_rows=((184.0, 184.0),), slot_rows=SLOT_ROWS, sequence_rows=1)
SMALL = PassCosts(
    by_rows=((1.0, 300.0), (128.0, 420.0), (1024.0, 1100.0), (4096.0, 4096.0)),
    slot_rows=0.012,
    sequence_rows=1,
    graph_rows=(128, 256, 512, 1024, 2048, 4096),
    launch_rows=6000.0,
)
"""Measured times of a small model: a pass without a graph takes as long as 6,000 rows."""
MANY, LANES = 8192, 64
BLOCKS = KVWritePolicy(kind="block", block_size=48)


def scheduler_of(
    budget: int, costs: PassCosts | None = QWEN3_8B, policy: KVWritePolicy = TOKEN_BY_TOKEN
) -> Scheduler:
    pool = PagePool(
        num_pages=4096, page_size=16, num_lanes=LANES, max_slots=9000, device=torch.device("cpu"), cache=None
    )
    return Scheduler(
        pool,
        num_lanes=LANES,
        max_num_batched_tokens=budget,
        num_rows=lambda _: policy.block_size,
        max_emitted=1,
        kv_policy=policy,
        costs=costs,
        max_slowdown=MAX_SLOWDOWNS["latency"],
    )


def add(scheduler: Scheduler, *lengths: int) -> None:
    for length in lengths:
        request = Request(
            request_id=str(length),
            index=0,
            prompt_ids=[1] * length,
            params=SamplingParams(max_tokens=50),
            stop_ids=frozenset(),
            max_length=length + 50,
        )
        scheduler.add(request)


def launched(scheduler: Scheduler) -> Schedule:
    schedule = scheduler.next()
    assert schedule is not None
    schedule.launched()
    return schedule


def fed(scheduler: Scheduler) -> list[int]:
    return launched(scheduler).num_feed


@pytest.mark.parametrize(
    ("costs", "num_sequences", "num_slots", "num_waiting", "schedule", "expected"),
    [
        # Reading the weights of a large model hides 256 rows; long contexts and many sequences hide more.
        (QWEN3_8B, 4, 4 * 1024, MANY, "latency", 256),
        (QWEN3_8B, 64, 64 * 1024, MANY, "latency", 512),
        (QWEN3_8B, 6, 6 * 131_072, MANY, "latency", 2048),
        (QWEN3_8B, 64, 64 * 1024, MANY, "throughput", MANY),
        (QWEN3_8B, 64, 64 * 1024, 3000, "throughput", 3000),
        # Launches, not rows, would bound the passes between the largest graph and 6,000 rows.
        (SMALL, 64, 64 * 1024, 100_000, "latency", 1024),
        (SMALL, 256, 256 * 1024, 100_000, "latency", 4096),
        (SMALL, 64, 64 * 1024, 100_000, "throughput", MANY),
        (SMALL, 64, 64 * 1024, 4500, "throughput", 4096),
        # What is padded to a graph counts as if it was stored, so that little of a prompt waits for more.
        (SMALL, 1, 0, 1100, "throughput", 1024),
        (SMALL, 1, 0, 2000, "throughput", 2000),
        (SMALL, 1, 0, 20, "latency", 20),
    ],
)
def test_a_pass_stores_most_rows_for_its_time(
    costs: PassCosts, num_sequences: int, num_slots: int, num_waiting: int, schedule: str, expected: int
) -> None:
    found = prompt_rows(
        costs,
        num_sequences=num_sequences,
        num_slots=num_slots,
        num_waiting=num_waiting,
        maximum=MANY,
        max_slowdown=MAX_SLOWDOWNS[schedule],
    )
    assert found == expected


def test_times_of_passes_are_kept_in_rows_of_the_largest() -> None:
    seconds = {1: 1e-3, 576: 2.5e-3, 320: 2.6e-3, 4352: 13.6e-3}
    found = replace(SMALL, slot_rows=0.0).measured(seconds, launch_seconds=20e-3)
    row = 13.6e-3 / 4352
    assert found.time(1, 0) == pytest.approx(1e-3 / row)
    assert found.time(576, 0) == found.time(320, 0) == pytest.approx(2.6e-3 / row), "not less for more rows"
    assert found.time(0, 0, 4352 + 100) == pytest.approx(20e-3 / row), "launching takes longer"
    assert found.time(0, 0, 8000) == pytest.approx(8000)
    assert QWEN3_8B.measured({1: 1e-3}, 1.0) == QWEN3_8B, "one pass does not tell what a row takes"


def test_a_prompt_is_cut_where_something_decodes() -> None:
    scheduler = scheduler_of(MANY)
    add(scheduler, 3000)
    assert fed(scheduler) == [3000], "all of it, because nothing decodes yet"
    add(scheduler, 4000, 700)
    assert fed(scheduler) == [1, 1 + 256]
    assert fed(scheduler) == [1, 1 + 256]


@pytest.mark.parametrize(("budget", "costs"), [(100, QWEN3_8B), (MANY, None)])
def test_the_budget_stays_the_upper_bound(budget: int, costs: PassCosts | None) -> None:
    scheduler = scheduler_of(budget, costs)
    add(scheduler, 40)
    assert fed(scheduler) == [40]
    add(scheduler, 4000)
    assert fed(scheduler) == [1, min(4000, 1 + budget)]


def test_requests_that_arrive_together_count_from_the_first_pass_on() -> None:
    """Else 16 sequences that decode already would hold up all others."""
    costs = PassCosts(by_rows=((128.0, 128.0),), slot_rows=0, sequence_rows=30)
    scheduler = scheduler_of(MANY, costs)
    add(scheduler, *[1000] * (LANES + 100))
    assert sum(fed(scheduler)) == MANY + 9
    expected = 2048
    assert 2.5 * costs.time(16, 0) < costs.time(LANES, 0, expected) < 2.5 * costs.time(LANES, 0)
    schedule = launched(scheduler)
    num_prompts = sum(1 for num_feed in schedule.num_feed if num_feed > 1)
    assert schedule.num_feed[:8] == [1] * 8
    assert sum(schedule.num_feed) - len(schedule.requests) == expected and num_prompts == 3


def test_chunks_beside_decoding_are_whole_blocks() -> None:
    scheduler = scheduler_of(MANY, policy=BLOCKS)
    add(scheduler, 48)
    assert fed(scheduler) == [48]
    scheduler.running[0].num_computed = 48
    add(scheduler, 3000)
    [decoding, chunk] = fed(scheduler)
    assert decoding == 0 and chunk % BLOCKS.block_size == 0
    assert 256 <= chunk - BLOCKS.block_size < 256 + BLOCKS.block_size
    assert scheduler.running[1].num_computed == chunk


def test_costs_are_those_of_model_and_decoder() -> None:
    """Qwen3-8B's shape without memory; experts, of which a pass reads all and a row computes few."""
    trunk: Any = SimpleNamespace(
        parameters=lambda: iter([torch.empty(8_200_000_000, dtype=torch.bfloat16, device="meta")])
    )
    dense = SimpleNamespace(num_layers=36, num_kv_heads=8, head_dim=128, moe=None)
    experts = SimpleNamespace(**vars(dense) | {"moe": SimpleNamespace(num_experts=256, num_chosen=8)})
    sizes: Any = SimpleNamespace(max_length=4096, kv_dtype=torch.bfloat16)

    def costs(local: Any, decoder: Any, graphs: str = "off") -> PassCosts | None:
        model: Any = SimpleNamespace(local=local, trunk=trunk)
        settings: Any = SimpleNamespace(graphs=graphs)
        return build._pass_costs(model, decoder, sizes, settings)

    adaptive: Any = SimpleNamespace(
        kv_policy=TOKEN_BY_TOKEN, modes=(0, 1), num_rows=lambda mode, _: (1, 64)[mode]
    )
    found = costs(dense, adaptive)
    assert found is not None and found.sequence_rows == 1
    assert found.time(1, 0) == found.time(184, 0) == 184 and found.time(1, 0, 1000) == 1001
    assert found.slot_rows == pytest.approx(SLOT_ROWS)
    padded = costs(dense, adaptive, graphs="on")
    assert padded is not None and padded.graph_rows == PROMPT_BUCKETS[1:]
    scarce = costs(experts, adaptive)
    assert scarce is not None and scarce.time(1, 0, 5000) == 32 * 184, "reading them hides 5,887 rows"
    canvas: Any = SimpleNamespace(kv_policy=KVWritePolicy(kind="none"))
    assert costs(dense, canvas) is None
