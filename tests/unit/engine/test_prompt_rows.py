"""How many prompt rows a pass has beside sequences that decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer import build
from idlm.infer.request import Request
from idlm.infer.runtime.graphs.pass_shape import PROMPT_GRAPHS
from idlm.infer.scheduler import PassCosts, Scheduler
from idlm.infer.state.batch import Schedule
from idlm.infer.state.kv_cache import TOKEN_BY_TOKEN, KVWritePolicy
from idlm.infer.state.page_pool import PagePool

QWEN3_8B = PassCosts(weight_rows=128, slot_rows=128 * 147_456 / 16.4e9, sequence_rows=1)
FEW, MANY, LANES = PROMPT_GRAPHS[-1], 8192, 64
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


def test_prompts_take_about_as_long_as_what_decodes_beside_them() -> None:
    """Figures of Qwen3-8B; whole graphs, so that no row is wasted."""
    assert QWEN3_8B.prompt_rows(256, 256 * 1024) == FEW
    assert QWEN3_8B.prompt_rows(6, 6 * 131_072) == 2 * FEW
    assert QWEN3_8B.prompt_rows(1, 1000) == QWEN3_8B.prompt_rows(32, 32 * 500) == FEW


def test_a_prompt_is_cut_where_something_decodes() -> None:
    scheduler = scheduler_of(MANY)
    add(scheduler, 3000)
    assert fed(scheduler) == [3000], "the whole budget, because nothing decodes yet"
    add(scheduler, 4000, 700)
    assert fed(scheduler) == [1, 1 + FEW]
    assert fed(scheduler) == [1, 1 + FEW]


@pytest.mark.parametrize(("budget", "costs"), [(100, QWEN3_8B), (MANY, None)])
def test_the_budget_stays_the_upper_bound(budget: int, costs: PassCosts | None) -> None:
    scheduler = scheduler_of(budget, costs)
    add(scheduler, 40)
    assert fed(scheduler) == [40]
    add(scheduler, 4000)
    assert fed(scheduler) == [1, min(4000, 1 + budget)]


def test_requests_that_arrive_together_count_from_the_first_pass_on() -> None:
    """Else 16 sequences that decode already would hold up all others."""
    costs = PassCosts(weight_rows=128, slot_rows=0, sequence_rows=30)
    scheduler = scheduler_of(MANY, costs)
    add(scheduler, *[1000] * (LANES + 100))
    assert sum(fed(scheduler)) == MANY + 9
    expected = costs.prompt_rows(LANES, 0)
    assert FEW < expected < MANY
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
    assert FEW <= chunk - BLOCKS.block_size < FEW + BLOCKS.block_size
    assert scheduler.running[1].num_computed == chunk


def test_costs_are_those_of_model_and_decoder() -> None:
    """Qwen3-8B's shape without memory; experts, of which a pass reads all and a row computes few."""
    trunk: Any = SimpleNamespace(
        parameters=lambda: iter([torch.empty(8_200_000_000, dtype=torch.bfloat16, device="meta")])
    )
    dense = SimpleNamespace(num_layers=36, num_kv_heads=8, head_dim=128, moe=None)
    experts = SimpleNamespace(**vars(dense) | {"moe": SimpleNamespace(num_experts=256, num_chosen=8)})
    sizes: Any = SimpleNamespace(max_length=4096, kv_dtype=torch.bfloat16)

    def costs(local: Any, decoder: Any) -> PassCosts | None:
        model: Any = SimpleNamespace(local=local, trunk=trunk)
        return build._pass_costs(model, decoder, sizes)

    adaptive: Any = SimpleNamespace(
        kv_policy=TOKEN_BY_TOKEN, modes=(0, 1), num_rows=lambda mode, _: (1, 64)[mode]
    )
    found = costs(dense, adaptive)
    assert found is not None and found.weight_rows == 128 and found.sequence_rows == 1
    assert found.slot_rows == pytest.approx(128 * 147_456 / 16.4e9)
    scarce = costs(experts, adaptive)
    assert scarce is not None and scarce.prompt_rows(1, 0) == 10 * FEW
    canvas: Any = SimpleNamespace(kv_policy=KVWritePolicy(kind="none"))
    assert costs(dense, canvas) is None
