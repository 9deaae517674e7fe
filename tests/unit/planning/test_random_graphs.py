"""Random graphs: live tensors never overlap, all lies inside."""

from __future__ import annotations

import dataclasses

import pytest

from idlm.infer.mosaic.planner import plan_template
from idlm.infer.mosaic.template import relate
from tests.unit.planning.random_templates import Corrupted, check_positions, random_template, simulate

NUM_GRAPHS, NUM_PARTS = 2_000, 2


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_plan_of_a_random_graph_keeps_what_is_needed(part: int) -> None:
    seeds = range(part, NUM_GRAPHS, NUM_PARTS)
    num_steps = num_shared = 0
    for seed in seeds:
        template, sizes = random_template(seed)
        plan = plan_template(template, sizes)
        check_positions(plan)
        try:
            num_steps += simulate(plan)
        except Corrupted as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_shared += plan.peak_bytes < sum(plan.num_bytes.values())
    # The graphs have what the test is about.
    assert num_shared > len(seeds) / 2 and num_steps > 5 * len(seeds)


def test_the_check_finds_a_lifetime_that_is_one_op_too_short() -> None:
    """A planted fault: each storage in turn ends one op too early, and so may lose its bytes there."""
    num_planted = num_caught = 0
    for seed in range(150):
        template, sizes = random_template(seed)
        right = template.lifetimes
        for index, storage in enumerate(right.storages):
            last = template.ops[storage.last]
            is_read = storage.name in last.reads
            if storage.first == storage.last or not is_read:
                continue
            short = dataclasses.replace(storage, last=storage.last - 1)
            storages = (*right.storages[:index], short, *right.storages[index + 1 :])
            template.__dict__["lifetimes"] = relate(storages, len(template.ops))
            num_planted += 1
            try:
                simulate(plan_template(template, sizes))
            except Corrupted:
                num_caught += 1
    assert num_planted > 100 and num_caught == num_planted, (num_planted, num_caught)
