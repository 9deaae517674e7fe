"""Stages, packing and the dataset: everything is a pure function of the item, however it is batched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup

from idlm.train.config.schema import LoopConfig, StageConfig, TrainConfig, make_curriculum
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.layout import Sample
from idlm.train.data.packing import best_fit_decreasing
from idlm.train.objectives.block import BlockDiffusion
from idlm.train.objectives.curriculum import Curriculum, Stage, rate_factor, split_steps
from idlm.train.objectives.idlm import IntrospectiveConsistency
from tests.errors import refused

MASK, SCHEDULES = 999, ("cosine", "wsd", "cosine_per_stage")


class FakeSource:
    """Samples of pseudo-random length; `num_samples` None makes it endless."""

    def __init__(self, num_samples: int | None, *, shortest: int = 20, longest: int = 90) -> None:
        self.num_samples, self.shortest, self.longest = num_samples, shortest, longest

    def sample(self, index: int) -> Sample:
        rng = np.random.default_rng(index)
        length = int(rng.integers(self.shortest, self.longest))
        prompt = length // 3
        token_ids = rng.integers(0, 900, size=length).tolist()
        return Sample.from_pair(token_ids[:prompt], token_ids[prompt:], origin=f"sample {index}")


def make_dataset(
    source: FakeSource, *, batch: int = 2, accumulation: int = 1, world: int = 1, **changes
) -> PackedDataset:
    loop = LoopConfig(
        stages=[
            StageConfig(stride=s, steps=n, clean_weight=w)
            for s, n, w in ((2, 3, 0.2), (3, 2, 0.2), (4, 4, "auto"))
        ],
        batch_size=batch,
        accumulation=accumulation,
    )
    settings = {
        "objective": IntrospectiveConsistency(mask_token_id=MASK, mask_region="response"),
        "max_length": 100,
        "row_length": 256,
        "overlong": "error",
        "pad_token_id": 0,
        "seed": 3,
    }
    dataset = PackedDataset(source, **settings | changes)
    curriculum = make_curriculum(
        TrainConfig(train=loop), world_size=world, rows_per_epoch=dataset.rows_per_epoch()
    )
    dataset.curriculum = curriculum
    return dataset


@given(st.integers(3, 500), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3))
def test_fractions_become_steps_that_add_up(total: int, fractions: list[float]) -> None:
    steps = split_steps(total, fractions)
    assert sum(steps) == total
    assert min(steps) >= 1


@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.3])
def test_a_cosine_is_that_of_transformers_bit_for_bit(warmup: float) -> None:
    curriculum = make_dataset(FakeSource(None)).curriculum
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = get_cosine_schedule_with_warmup(optimizer, math.ceil(9 * warmup), 9).lr_lambdas[0]
    settings = {"curriculum": curriculum, "schedule": "cosine", "warmup": warmup, "decay": 0.2}
    rise = math.ceil(9 * warmup)
    rates = [rate_factor(step, **settings) for step in range(10)]
    assert rates[rise:] == [expected(step) for step in range(rise, 10)]
    # Ours rises to the peak in as many steps and does not begin with one that changes nothing.
    assert rates[:rise] == [expected(step + 1) for step in range(rise)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5])
def test_every_step_of_stages_of_any_length_trains(schedule: str, warmup: float) -> None:
    for lengths in ((1,), (1, 1, 1), (2, 1, 3), (1, 40)):
        stages = tuple(
            Stage(index=i, stride=2, num_steps=num, clean_weight=0.2) for i, num in enumerate(lengths)
        )
        settings = {"curriculum": Curriculum(stages=stages, global_batch=1), "schedule": schedule}
        rates = [rate_factor(step, **settings, warmup=warmup, decay=0.2) for step in range(sum(lengths))]
        assert min(rates) > 0 and max(rates) == 1.0


def test_other_schedules_give_late_stages_their_share() -> None:
    thirds = [Stage(index=i, stride=2 + i, num_steps=100, clean_weight=0.2) for i in range(3)]
    shares = {}
    for schedule in SCHEDULES:
        settings = {"schedule": schedule, "warmup": 0.03, "decay": 0.2}
        settings["curriculum"] = Curriculum(stages=tuple(thirds), global_batch=1)
        rates = [rate_factor(step, **settings) for step in range(300)]
        assert max(rates) == 1.0 and min(rates) >= 0.0
        assert rate_factor(300, **settings) == 0.0
        shares[schedule] = sum(rates[200:]) / sum(rates)
    assert shares["cosine"] < 0.07 and shares["wsd"] > 0.25
    assert shares["cosine_per_stage"] == pytest.approx(1 / 3)
    curriculum = make_dataset(FakeSource(None)).curriculum
    per_stage = {"curriculum": curriculum, "schedule": "cosine_per_stage", "warmup": 0.0, "decay": 0.4}
    assert [step for step in range(9) if rate_factor(step, **per_stage) == 1.0] == [0, 3, 5]
    stable = {"curriculum": curriculum, "schedule": "wsd", "warmup": 0.12, "decay": 0.4}
    assert [rate_factor(step, **stable) for step in range(9)] == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_items_do_not_depend_on_how_the_global_batch_is_split() -> None:
    whole = make_dataset(FakeSource(None), batch=8, accumulation=1)
    split = make_dataset(FakeSource(None), batch=2, accumulation=2, world=2)
    for item in (0, 7, 23, 24, 40, 71):
        for name, value in whole[item].items():
            assert np.array_equal(value, split[item][name]), f"{item=} {name=}"


def test_an_item_does_not_depend_on_what_was_read_before() -> None:
    forward, backward = make_dataset(FakeSource(None), batch=16), make_dataset(FakeSource(None), batch=16)
    items = [0, 31, 32, 70, 100, 143]
    first = {item: forward[item]["input_ids"].copy() for item in items}
    for item in reversed(items):
        assert np.array_equal(backward[item]["input_ids"], first[item]), f"{item=}"


def test_endless_rows_waste_little_and_share_no_sample() -> None:
    dataset = make_dataset(FakeSource(None), batch=16)
    members = [index for item in range(128) for index in dataset.rows.members(item)]
    assert len(members) == len(set(members))
    padding = np.mean([(dataset[item]["doc_ids"] == -1).mean() for item in range(64)])
    assert padding < 0.10, f"{padding=}"


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_bins_hold_every_index_once_and_never_overflow(costs: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(costs, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(costs)))
    assert all(sum(costs[i] for i in members) <= capacity for members in bins)


def test_overlong_samples_are_an_error_a_drop_or_a_cut() -> None:
    error = refused(r"IDLM-0205.*sample \d+.*max_length=50", make_dataset, FakeSource(40), max_length=50)
    assert "tokens" in error.message
    assert "raise train.max_length to" in error.fix
    error = refused(r"IDLM-0205.*train.row_length=10", make_dataset, FakeSource(40), row_length=10)
    assert "raise train.row_length to" in error.fix
    assert "max_length" not in str(error)
    dropping = make_dataset(FakeSource(40), max_length=50, overlong="drop")
    too_long = sum(len(FakeSource(40).sample(i)) > 50 for i in range(40))
    assert dropping.rows.num_dropped == too_long > 0
    samples = [FakeSource(40).sample(i) for i in range(40)]
    assert dropping.rows.num_lost == sum(sample.num_targets for sample in samples if len(sample) > 50)
    cutting = make_dataset(FakeSource(40), max_length=50, overlong="truncate")
    assert cutting.rows.num_dropped == 0
    beyond = sum(sample.piece(49, len(sample)).num_targets for sample in samples if len(sample) > 50)
    assert cutting.rows.num_lost == beyond > 0
    assert make_dataset(FakeSource(40), max_length=50, overlong="split").rows.num_lost == 0
    assert max(int(cutting[item]["position_ids"].max()) for item in range(8)) == 49
    endless = make_dataset(FakeSource(None), max_length=50, overlong="drop")
    assert max(int(endless[item]["position_ids"].max()) for item in range(8)) < 50


def test_noise_follows_from_the_item_and_differs() -> None:
    def dataset(seed: int) -> PackedDataset:
        objective = BlockDiffusion(mask_token_id=MASK, mask_region="response", max_stride=4)
        return make_dataset(FakeSource(2, shortest=25, longest=26), objective=objective, seed=seed)

    first, again, other = dataset(1), dataset(1), dataset(2)
    seen = set()
    for item in (7, 0, 3):
        mine, same = first[item], again[item]
        assert all(np.array_equal(mine[name], same[name]) for name in mine)
        assert not np.array_equal(mine["mask_rates"], other[item]["mask_rates"])
        # The documents of a row, and rows with the same documents, are masked differently.
        for doc in range(2):
            seen.add(tuple(mine["mask_rates"][mine["is_noisy"] & (mine["doc_ids"] == doc)].tolist()))
    assert len(seen) == 6
