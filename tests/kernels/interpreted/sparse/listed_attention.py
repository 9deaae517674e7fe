"""Lists, and sums before blocks, of the Triton kernels in the interpreter: started by test_interpreted.py.

tests/gpu/kernels/sparse/test_listed_attention_gpu.py has more shapes."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from idlm.kernels.paged_attention import HeadShape, choice, paged_attention, plan_attention
from idlm.kernels.paged_attention.choice import Launch
from idlm.kernels.paged_attention.planning import TritonPlan
from tests.kernels.cases.paged_attention import SCALE, causal, steady
from tests.kernels.cases.sparse.listed_attention import (
    ListedCase,
    Work,
    assert_before,
    build_listed,
    empty_before,
    listed_error_ratio,
    random_listed,
)

SMALL = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float16)
TINY = Launch(block_m=16, block_n=16, min_blocks=1, combine_rows=8)
HALF = replace(TINY, programs_per_sm=8, combine_parts=4, half_parts=True)
FIXED = replace(TINY, split_slots=16, octave=2)
LAUNCHES = (TINY, HALF, FIXED)
RANDOM_STEPS = int(os.environ.get("RANDOM_STEPS", "3"))
pytestmark = pytest.mark.usefixtures("fresh_memory_is_poison")


def check(listed: ListedCase, tunables: Launch | None) -> Tensor:
    case, is_fixed = listed.case, tunables is not None and tunables.split_slots > 0
    plan = plan_attention(case.rows, case.shape, backend="triton", launch=tunables, deterministic=is_fixed)
    arguments = case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan
    before = empty_before(listed)
    o_RNH = paged_attention(*arguments, scale=SCALE, lists_BKC=listed.lists_BKC, before=before)
    assert listed_error_ratio(listed, o_RNH) <= 2
    assert_before(listed, before, 1e-3)
    return o_RNH


@pytest.mark.sweep_but("tiny")
@pytest.mark.parametrize("tunables", [TINY, FIXED], ids=("tiny", "fixed"))
def test_blocks_beside_other_sequences(tunables: Launch) -> None:
    """A listed block behind its clean rows, dropped rows, a ranking block, a prompt, and blocks at slot 0."""
    sequences = [
        Work(start=45, indices=(0, 1, 2, 3), size=4, num_clean=7),
        Work(start=37, indices=(0, 3, 6), size=8),
        [],
        Work(start=70, indices=tuple(range(8)), size=8, num_clean=8, listed=False),
        causal(3, 9),
        Work(start=0, indices=(0, 1, 2), size=4),
        Work(start=0, indices=(0, 1, 2), size=4, listed=False),
        steady(20),
        Work(start=32, indices=(), size=4),
    ]
    is_tiny = tunables is TINY
    check(build_listed(sequences, SMALL, num_listed=40 if is_tiny else 21, full=is_tiny), tunables)


@pytest.mark.sweep
def test_blocks_walk_apart_from_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short blocks, and tall tiles of a prompt and of a block with more clean rows before it."""
    monkeypatch.setattr(choice, "APART_BLOCKS", 0)
    sequences = [
        causal(3, 70),
        Work(start=45, indices=(0, 1, 2, 3), size=4),
        [],
        Work(start=37, indices=(0, 3, 6), size=8, listed=False),
        Work(start=70, indices=tuple(range(4)), size=4, num_clean=28),
    ]
    listed = build_listed(sequences, SMALL, num_listed=21, spare_slots=400)
    listed = replace(listed, case=replace(listed.case, rows=replace(listed.rows, few_rows=4)))
    plan = plan_attention(listed.rows, SMALL, backend="triton")
    assert isinstance(plan, TritonPlan) and plan.others is not None
    check(listed, None)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("start", [1, 16, 17, 32])
def test_sums_end_where_the_block_begins(start: int) -> None:
    sequences = [Work(start=start, indices=(0, 1), size=4, num_clean=1, listed=False)]
    for tunables in (HALF, FIXED):
        check(build_listed(sequences, SMALL, num_listed=1), tunables)


@pytest.mark.sweep
def test_a_list_and_its_block_are_incomplete_blocks_of_slots() -> None:
    """One slot and one row are two blocks of the walk, though all slots are fewer than one."""
    listed = build_listed([Work(start=1, indices=(0,), size=1)], SMALL, num_listed=3, full=True)
    assert listed.rows.max_slots == 2
    check(listed, TINY)
    check(listed, FIXED)


@pytest.mark.sweep_but("2")
@pytest.mark.parametrize("seed", range(RANDOM_STEPS))
def test_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    sequences = random_listed(rng, maximum=4, longest=120, chunk=20, size=rng.choice([4, 8]))
    shape = replace(SMALL, num_kv_heads=rng.choice([1, 2, 4]))
    listed = build_listed(
        sequences,
        shape,
        num_listed=rng.choice([1, 16, 30]),
        seed=seed,
        page_size=rng.choice([1, 4, 16]),
        padding=rng.randint(0, 9),
        spare_rows=rng.choice([0, 5]),
        spare_slots=rng.choice([0, 50]),
    )
    check(listed, LAUNCHES[seed % len(LAUNCHES)])


@pytest.mark.sweep
def test_with_fixed_splits_a_listed_row_does_not_depend_on_its_batch() -> None:
    """Alone, and behind clean rows among other sequences; equal heads, so that the pages alone differ."""
    work = Work(start=45, indices=(0, 1, 2, 3), size=4)
    others = [causal(40, 3), Work(start=60, indices=(0, 1), size=4, listed=False)]
    outcomes = []
    for sequences in ([work], [*others, replace(work, num_clean=5)]):
        listed = build_listed(sequences, SMALL, num_listed=21, full=True)
        b = len(sequences) - 1
        _same_content(listed, b)
        outcomes.append(check(listed, FIXED)[: int(listed.rows.cu_rows[-1])][-4:])
    assert torch.equal(*outcomes)


def _same_content(listed: ListedCase, b: int) -> None:
    """List, keys, values and the block's queries of sequence b depend on logical slots only."""
    generator = torch.Generator().manual_seed(5)
    case, rows = listed.case, listed.rows
    slots_s = torch.arange(49)
    physical_s = rows.block_table[b, slots_s // rows.page_size] * rows.page_size + slots_s % rows.page_size
    assert listed.lists_BKC is not None
    listed.lists_BKC[b] = torch.randperm(45, generator=generator)[:21].sort().values
    for cache in (case.k_cache_SKH, case.v_cache_SKH):
        cache[physical_s] = torch.randn(49, *cache.shape[1:], generator=generator).to(cache)
    end = int(rows.cu_rows[b + 1])
    case.q_RNH[end - 4 : end] = torch.randn(4, *case.q_RNH.shape[1:], generator=generator).to(case.q_RNH)
