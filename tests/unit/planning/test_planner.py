"""First fit against the most bytes alive on the real templates, which no plan beats."""

from __future__ import annotations

import math

import pytest

from benchmarks.engine.canvas.executor import PRODUCT_ARMS, forward_of
from idlm.infer.mosaic.chunking import Forward, search, trunk_forward
from idlm.infer.mosaic.planner import ArenaPlan, plan_template
from idlm.infer.mosaic.template import PassTemplate, Sizes
from idlm.infer.mosaic.trunk import TrunkShape
from tests.unit.planning.random_templates import check_positions, simulate
from tests.unit.planning.shapes import SHAPES

LENGTHS = [round(2 ** (exponent / 3)) for exponent in range(27, 61, 4)]
"""512 to a million rows."""


def template_of(shape: TrunkShape, arm: str) -> PassTemplate:
    """The template of an arm that chunks the most."""
    forward = forward_of(arm, shape)
    return forward.query or forward.whole


@pytest.mark.sweep_but("llada_8b-paper", "dream_7b-ours")
@pytest.mark.parametrize("arm", PRODUCT_ARMS)
@pytest.mark.parametrize("model", SHAPES)
def test_first_fit_is_within_one_percent_of_the_bytes_alive(model: str, arm: str) -> None:
    template = template_of(SHAPES[model], arm)
    worst = 0.0
    for length in LENGTHS:
        for share in (0.0, 0.37, 1.0):
            for num in (1, 3, 40):
                chunks = {
                    "ffn": num,
                    "experts": num,
                    "logits": 2 * num - 1,
                    "query": 1 + num if arm == "ours" else 1,
                }
                sizes = Sizes(length=length, wanted=math.ceil(share * length), chunks=chunks)
                plan = plan_template(template, sizes)
                worst = max(worst, plan.peak_bytes / plan.live_bytes)
    assert worst <= 1.01


@pytest.mark.parametrize("model", SHAPES)
def test_plans_of_the_search_reach_the_bytes_alive(model: str) -> None:
    forward = trunk_forward(SHAPES[model])
    for length in LENGTHS:
        for capacity in (2 << 30, 8 << 30, 24 << 30, 124 << 30):
            plan = search(forward, Sizes(length=length, wanted=length // 2), capacity=capacity)
            if isinstance(plan, ArenaPlan):
                assert plan.live_bytes <= plan.peak_bytes <= min(capacity, 1.01 * plan.live_bytes)
                check_positions(plan)


@pytest.mark.parametrize("model", SHAPES)
def test_a_plan_of_a_real_template_keeps_what_is_needed(model: str) -> None:
    forward: Forward = trunk_forward(SHAPES[model])
    for chunks in ({}, {"query": 3, "ffn": 2, "experts": 4, "logits": 5}):
        template = forward.template(chunks)
        plan = plan_template(template, Sizes(length=40, wanted=20, chunks=chunks))
        assert simulate(plan, "token_ids", "positions", "wanted_rows") > 100
