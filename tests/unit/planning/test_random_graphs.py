"""10,000 random graphs: live tensors never overlap, aliases and barriers hold, all lies inside."""

from __future__ import annotations

import dataclasses

import pytest

from idlm.infer.planning.lifetimes import relate
from idlm.infer.planning.planner import plan_template
from tests.unit.planning.random_templates import Corrupted, check_places, random_template, simulate

NUM_GRAPHS, NUM_PARTS = 10_000, 4


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_plan_of_a_random_graph_keeps_what_is_needed(part: int) -> None:
    seeds = range(part, NUM_GRAPHS, NUM_PARTS)
    num_steps = num_aliases = num_barriers = num_shared = 0
    for seed in seeds:
        template, sizes = random_template(seed)
        plan = plan_template(template, sizes)
        check_places(plan)
        try:
            num_steps += simulate(plan)
        except Corrupted as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_aliases += len(template.aliases)
        num_barriers += sum(op.is_barrier for op in template.ops)
        num_shared += plan.peak_bytes < sum(plan.num_bytes.values())
    # The graphs have what the test is about.
    assert min(num_aliases, num_barriers, num_shared) > len(seeds) / 2 and num_steps > 5 * len(seeds)


def test_the_check_finds_a_lifetime_that_is_one_op_too_short() -> None:
    """A planted fault: each storage in turn ends, or begins, one op too early or too late."""
    num_planted = num_caught = 0
    for seed in range(150):
        template, sizes = random_template(seed)
        right = template.lifetimes
        for index, storage in enumerate(right.storages):
            if storage.first == storage.last:
                continue
            short = dataclasses.replace(storage, last=storage.last - 1)
            storages = (*right.storages[:index], short, *right.storages[index + 1 :])
            template.__dict__["lifetimes"] = relate(storages, len(template.ops), template.aliases)
            num_planted += 1
            try:
                simulate(plan_template(template, sizes))
            except Corrupted:
                num_caught += 1
    # Most faults are harmless in a small graph: nothing is placed into the gap.
    assert num_planted > 200 and num_caught > num_planted / 10, (num_planted, num_caught)
