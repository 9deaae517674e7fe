"""Lazy chunking: the counts of the one-by-one search, fewest and monotone; L_max and the error."""

from __future__ import annotations

import random

import pytest

from benchmarks.engine.canvas.executor import forward_of
from idlm.errors import UserError
from idlm.infer.mosaic import planner
from idlm.infer.mosaic.chunking import Forward, Misfit, max_length, plan_forward, search, trunk_forward
from idlm.infer.mosaic.planner import ArenaPlan, plan_template
from idlm.infer.mosaic.template import K_QUERY, LENGTH, WANTED, Loop, PassTemplate, Size, Sizes
from idlm.infer.mosaic.trunk import TrunkShape
from tests.unit.planning.random_templates import random_template
from tests.unit.planning.shapes import LLADA_8B, SHAPES

GIB = 1 << 30
SMALL = TrunkShape(
    width=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=200, vocab=3000, num_layers=2, item_bytes=4
)
SMALL_MOE = TrunkShape(
    width=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn=96,
    vocab=2000,
    num_layers=2,
    num_experts=8,
    top_k=3,
)


def one_by_one(forward: Forward, sizes: Sizes, capacity: int, min_rows: int) -> ArenaPlan | None:
    """The search as the paper writes it: the operator that makes the peak gets one chunk more."""
    while True:
        plan = plan_template(forward.template(sizes.chunks), sizes)
        if plan.peak_bytes <= capacity:
            return plan
        loop = plan.template.ops[plan.peak_op].loop
        if loop is None or (loop.chunks == K_QUERY and forward.query is None):
            return None
        loops = [op.loop for op in plan.template.ops if op.loop is not None]
        num_rows = max(sizes.num_rows(other.rows) for other in loops if other.chunks == loop.chunks)
        count = sizes.chunks.get(loop.chunks, 1)
        if count >= -(-num_rows // min_rows):
            return None
        chunks = {**sizes.chunks, loop.chunks: count + 1}
        sizes = Sizes(length=sizes.length, wanted=sizes.wanted, chunks=chunks)


def counts(plan: ArenaPlan) -> dict[str, int]:
    return {name: count for name, count in plan.sizes.chunks.items() if count > 1}


@pytest.mark.sweep_but("moe-paper", "dense-mosaic", "moe-ours")
@pytest.mark.parametrize("arm", ["paper", "mosaic", "ours"])
@pytest.mark.parametrize("shape", [SMALL, SMALL_MOE], ids=["dense", "moe"])
def test_the_search_finds_what_the_search_of_the_paper_finds(shape: TrunkShape, arm: str) -> None:
    forward, rng = forward_of(arm, shape), random.Random(0)
    num_plans = num_misfits = 0
    for _ in range(60):
        length = rng.randrange(1, 3000)
        wanted = rng.randrange(length + 1)
        capacity = int(length * 64 * 4 * rng.uniform(0.2, 12))
        found = search(forward, Sizes(length=length, wanted=wanted), capacity=capacity, min_rows=32)
        expected = one_by_one(forward, Sizes(length=length, wanted=wanted), capacity, 32)
        assert isinstance(found, ArenaPlan) == (expected is not None)
        if expected is not None and isinstance(found, ArenaPlan):
            num_plans += 1
            assert counts(found) == counts(expected) and found.offsets == expected.offsets
        else:
            num_misfits += 1
    assert min(num_plans, num_misfits) > 3


def test_the_search_is_that_of_the_paper_on_random_graphs() -> None:
    rng, num_chunked = random.Random(1), 0
    for seed in range(200):
        template, sizes = random_template(seed)
        forward, length, wanted = Forward(template), sizes.length, sizes.wanted
        whole = plan_template(template, Sizes(length=length, wanted=wanted))
        capacity = int(whole.peak_bytes * rng.uniform(0.4, 1.05))
        found = search(forward, Sizes(length=length, wanted=wanted), capacity=capacity, min_rows=1)
        expected = one_by_one(forward, Sizes(length=length, wanted=wanted), capacity, 1)
        assert isinstance(found, ArenaPlan) == (expected is not None), seed
        if expected is not None and isinstance(found, ArenaPlan):
            assert counts(found) == counts(expected), seed
            num_chunked += bool(counts(found))
    assert num_chunked > 25


def test_the_search_is_that_of_the_paper_where_first_fit_leaves_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chain of four tensors, placed from its ends inwards: 2,560 bytes a row where 1,536 are alive."""
    template = PassTemplate("chain")
    loop = Loop(name="loop", rows=LENGTH, chunks="k")
    for name, row_bytes in zip("abcd", (1024, 512, 1024, 512), strict=True):
        template.add_tensor(name, Size(row_bytes=row_bytes, chunks="k"))
    for reads, writes in zip(("", *"abcd"), (*"abcd", ""), strict=True):
        template.add_op(f"make_{writes}", tuple(reads), tuple(writes), chunks=loop)
    monkeypatch.setattr(planner, "orders", lambda *known: [(0, 3, 1, 2)])
    forward, num_gaps = Forward(template), 0
    for capacity in range(2560, 300_000, 2_000):
        found = search(forward, Sizes(length=100, wanted=0), capacity=capacity, min_rows=1)
        expected = one_by_one(forward, Sizes(length=100), capacity, 1)
        assert isinstance(found, ArenaPlan) and expected is not None
        assert counts(found) == counts(expected)
        num_gaps += found.peak_bytes > found.live_bytes
    assert num_gaps > 100
    assert search(forward, Sizes(length=100, wanted=0), capacity=2559, min_rows=1) == Misfit("make_b", 2560)


@pytest.mark.parametrize("model", SHAPES)
def test_counts_are_the_fewest_and_grow_with_length(model: str) -> None:
    forward, capacity = trunk_forward(SHAPES[model]), 8 * GIB
    before: dict[str, int] = {}
    for length in range(10_000, 360_000, 25_000):
        plan = search(forward, Sizes(length=length, wanted=length // 2), capacity=capacity)
        assert isinstance(plan, ArenaPlan) and plan.peak_bytes <= capacity
        found = dict(plan.sizes.chunks)
        assert all(found[name] >= before.get(name, 1) for name in found), (length, found, before)
        before = found
        for name, count in found.items():
            if count > 1:
                fewer = Sizes(length=length, wanted=length // 2, chunks={**found, name: count - 1})
                assert plan_template(forward.template(fewer.chunks), fewer).peak_bytes > capacity
    assert max(before.values()) > 1


@pytest.mark.parametrize("arm", ["paper", "mosaic", "ours"])
@pytest.mark.parametrize("model", SHAPES)
def test_max_length_is_the_last_that_fits(model: str, arm: str) -> None:
    forward, capacity = forward_of(arm, SHAPES[model]), 8 * GIB
    length = max_length(forward, capacity=capacity, wanted_share=0.5)
    for more, kind in ((0, ArenaPlan), (1, Misfit), (1000, Misfit)):
        num = length + more
        found = search(forward, Sizes(length=num, wanted=-(-num // 2)), capacity=capacity)
        assert isinstance(found, kind)


def test_a_canvas_that_is_too_long_is_refused_with_the_operator_and_the_nearest_length() -> None:
    forward = forward_of("mosaic", LLADA_8B)
    nearest = max_length(forward, capacity=8 * GIB, wanted_share=0.25)
    with pytest.raises(UserError) as refusal:
        plan_forward(forward, Sizes(length=400_000, wanted=100_000), capacity=8 * GIB)
    assert refusal.value.code == "IDLM-0466"
    need = 400_000 * 40 * 1024
    assert f"needs {need} bytes" in refusal.value.message and f"{8 * GIB} bytes" in refusal.value.message
    assert "400000 rows, 100000 of them wanted" in refusal.value.message and "v_proj" in refusal.value.message
    assert f"at most {nearest} rows" in refusal.value.fix
    plan_forward(forward, Sizes(length=nearest, wanted=-(-nearest // 4)), capacity=8 * GIB)


@pytest.mark.parametrize("group", [2, 3])
def test_no_chunk_of_logits_divides_a_group(group: int) -> None:
    """Whatever fits, in a plan for more wanted rows than a pass has, too."""
    forward, rng, num_chunked = trunk_forward(SMALL), random.Random(2), 0
    for _ in range(60):
        length, indices = rng.randrange(300, 2000), rng.randrange(2, 90)
        capacity = int(length * 64 * 4 * rng.uniform(1, 6))
        wanted = group * indices
        plan = search(
            forward, Sizes(length=length, wanted=wanted, group=group), capacity=capacity, min_rows=1
        )
        if isinstance(plan, Misfit):
            continue
        assert plan.peak_bytes <= capacity
        num_chunked += plan.sizes.chunks.get("logits", 1) > 1
        for now in (wanted, group * rng.randrange(1, indices + 1)):
            slices = [(step.start, step.stop) for step in plan.steps(now) if step.op.name == "logits"]
            assert [stop for _, stop in slices[:-1]] == [start for start, _ in slices[1:]]
            assert (slices[0][0], slices[-1][1]) == (0, now)
            assert all(start % group == 0 for start, _ in slices)
            largest = max(stop - start for start, stop in slices)
            assert largest <= plan.sizes.chunk_rows(WANTED, "logits")
    assert num_chunked > 10


def test_several_canvases_are_refused_with_the_length_of_one() -> None:
    """Two canvases of the nearest length fit, two of a longer one do not."""
    forward, capacity = trunk_forward(LLADA_8B), 4 * GIB
    alone = max_length(forward, capacity=capacity, wanted_share=0.25)
    with pytest.raises(UserError, match="IDLM-0466") as caught:
        plan_forward(forward, Sizes(length=2 * alone, wanted=alone // 2, group=2), capacity=capacity)
    assert (
        f"a canvas of {alone} rows, {alone // 4} of them wanted, does not fit 2 times" in caught.value.message
    )
    nearest = int(str(caught.value.fix).split()[3])
    assert abs(nearest - alone / 2) <= 0.01 * alone
    plan_forward(forward, Sizes(length=2 * nearest, wanted=2 * (nearest // 4), group=2), capacity=capacity)
    with pytest.raises(UserError, match="IDLM-0466"):
        plan_forward(
            forward, Sizes(length=2 * nearest + 2, wanted=2 * (nearest // 4 + 1), group=2), capacity=capacity
        )
