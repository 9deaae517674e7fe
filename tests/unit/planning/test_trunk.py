"""Templates of the real models: what must be alive per token, the program, and the printed table."""

from __future__ import annotations

import pytest

from benchmarks.engine.canvas.executor import forward_of
from idlm.infer.mosaic.canvas import fused_head
from idlm.infer.mosaic.chunking import max_length, search, trunk_forward
from idlm.infer.mosaic.planner import ArenaPlan, describe_plan
from idlm.infer.mosaic.template import Sizes
from idlm.kernels.masked_logits import WORKSPACE_BYTES, WORKSPACE_ROW_BYTES
from tests.unit.planning.shapes import KIB_A_ROW, LLADA_8B, LLADA_MOE, SHAPES

GIB = 1 << 30


@pytest.mark.parametrize(("model", "arm"), KIB_A_ROW)
@pytest.mark.parametrize("prompt_share", [0.1, 0.5, 0.9])
def test_the_bytes_of_a_row_are_those_of_the_table(model: str, arm: str, prompt_share: float) -> None:
    """The slope of the capacity over L_max, between two large capacities."""
    forward = forward_of(arm, SHAPES[model])
    low, high = (max_length(forward, capacity=num * GIB, wanted_share=1 - prompt_share) for num in (20, 60))
    slope = 40 * GIB / (high - low) / 1024
    assert slope == pytest.approx(KIB_A_ROW[model, arm], rel=0.005)


def names(plan: ArenaPlan) -> list[str]:
    return [step.op.name for step in plan.steps()]


def test_a_fused_head_stores_no_logits() -> None:
    forward = trunk_forward(fused_head(LLADA_8B))
    plan = search(forward, Sizes(length=100_000, wanted=100_000), capacity=4 * GIB)
    assert isinstance(plan, ArenaPlan) and "logits" not in plan.num_bytes
    assert names(plan)[-2:] == ["final_norm", "masked_logits"]
    assert plan.num_bytes["ranges"] == WORKSPACE_BYTES + 100_000 * WORKSPACE_ROW_BYTES
    assert "ranges" in describe_plan(plan)


@pytest.mark.sweep_but("llada_8b-0.1", "dream_7b-0.5")
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("model", SHAPES)
def test_a_fused_head_takes_no_length(model: str, share: float) -> None:
    """L_max is that of stored logits at least, and a canvas that fits them fits without."""
    shape = SHAPES[model]
    fused = fused_head(shape)
    for arm in ("mosaic", "ours"):
        longest, without = (
            max_length(forward_of(arm, one), capacity=8 * GIB, wanted_share=share) for one in (shape, fused)
        )
        assert 0 < longest <= without
    for length in (64, 1000, 8192, 65536):
        wanted = round(share * length)
        stored, none = (
            search(trunk_forward(one), Sizes(length=length, wanted=wanted), capacity=24 * GIB)
            for one in (shape, fused)
        )
        assert isinstance(stored, ArenaPlan) and isinstance(none, ArenaPlan)
        assert none.peak_bytes <= stored.peak_bytes + WORKSPACE_BYTES


def test_the_printed_table_names_every_tensor_and_the_peak() -> None:
    plan = search(trunk_forward(LLADA_MOE), Sizes(length=300_000, wanted=150_000), capacity=8 * GIB)
    assert isinstance(plan, ArenaPlan)
    text = describe_plan(plan)
    lines = text.splitlines()
    assert lines[0].startswith("moe, attention whole: 300000 rows, 150000 wanted, 16 layers, K_experts=")
    for name in plan.template.tensors:
        row = next(line for line in lines if line.split()[0] == name)
        assert f"{plan.num_bytes[name]:,}" in row and f"{plan.offsets[name]:,}" in row
    assert f"planned {plan.peak_bytes:,} bytes" in lines[-1] and "ratio 1.0000" in lines[-1]
    assert plan.template.ops[plan.peak_op].name in lines[-2]
