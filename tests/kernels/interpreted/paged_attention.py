"""The Triton kernels of paged attention in the interpreter: started by test_interpreted.py.

float32 and float16: the interpreter has no bfloat16. tests/gpu/kernels/test_paged_attention_gpu.py has more
shapes."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from idlm.kernels import backend
from idlm.kernels.paged_attention import HeadShape, choice, paged_attention, plan_attention, planning
from idlm.kernels.paged_attention.choice import Launch
from idlm.kernels.paged_attention.kernel_walk import sum_of
from idlm.kernels.paged_attention.planning import TritonPlan
from tests.kernels.cases.paged_attention import (
    SCALE,
    Case,
    Row,
    block,
    branch,
    build,
    causal,
    cold,
    error_ratio,
    far_branch,
    fixed_content,
    random_sequences,
    steady,
    tree,
)

SMALL = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
HALF_SMALL = replace(SMALL, dtype=torch.float16)
TINY = Launch(block_m=16, block_n=16, min_blocks=1, combine_rows=8)
FIXED = replace(TINY, split_slots=16, octave=2)
MANY = replace(TINY, programs_per_sm=40, combine_parts=4)
HALF = replace(MANY, half_parts=True)
MIXED = [causal(37, 1), [], steady(20), causal(3, 17), branch(31), cold(0), [], tree(45), far_branch(70)]
SPLIT = [steady(20), [], causal(37, 2), tree(45)]
"""A prefix of each kind that `MANY` divides into parts."""
RANDOM_STEPS = int(os.environ.get("RANDOM_STEPS", "7"))
pytestmark = pytest.mark.usefixtures("fresh_memory_is_poison")


def plan_of(case: Case, tunables: Launch | None = None) -> TritonPlan:
    is_fixed = tunables is not None and tunables.split_slots > 0
    plan = plan_attention(case.rows, case.shape, backend="triton", launch=tunables, deterministic=is_fixed)
    assert isinstance(plan, TritonPlan)
    return plan


def run(case: Case, tunables: Launch | None = None, **options: Any) -> Tensor:
    plan = plan_of(case, tunables)
    return paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE, **options)


def check(case: Case, tunables: Launch | None = None) -> None:
    assert error_ratio(case, run(case, tunables)) <= 2


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("tunables", [TINY, FIXED])
def test_a_mixed_step(tunables: Launch) -> None:
    check(build(MIXED, SMALL), tunables)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("window", "tunables"), [(13, TINY), (1, MANY), (40, FIXED), (13, MANY)])
def test_windows(window: int, tunables: Launch) -> None:
    """What no row sees is poisoned, before the windows too."""
    sequences = [*MIXED, causal(60, 30), block(36, 9)]
    case = build(sequences, SMALL, window=window)
    check(case, tunables)


@pytest.mark.sweep
def test_sequences_with_more_rows_than_is_usual_take_more_tiles() -> None:
    case = build(MIXED, SMALL)
    check(replace(case, rows=replace(case.rows, usual_rows=1)))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with few rows walk apart however short the walks are."""
    monkeypatch.setattr(choice, "APART_BLOCKS", 0)


@pytest.mark.sweep_but("shape1-10-16-16-0")
@pytest.mark.parametrize(
    ("shape", "few_rows", "max_rows", "page_size", "padding"),
    [
        (HALF_SMALL, 1, 8, 4, 3),
        (HALF_SMALL, 10, 16, 16, 0),
        (HeadShape(num_heads=14, num_kv_heads=2, head_dim=24, dtype=torch.float16), 1, 2, 5, 9),
    ],
)
def test_sequences_with_few_rows_walk_apart_from_prompts(
    shape: HeadShape, few_rows: int, max_rows: int, page_size: int, padding: int, apart: None
) -> None:
    """Every row is walked once, in any order of sequences, and the padding by the tiles of prompts."""
    sequences = [causal(20, 300), causal(37, 1), [], tree(45), causal(3, 17), causal(90, 4), steady(60)]
    sequences += [[], causal(0, 1), branch(31), causal(0, 2)]
    case = build(sequences, shape, page_size=page_size, padding=padding, spare_slots=400)
    case = replace(case, rows=replace(case.rows, few_rows=few_rows))
    plan = plan_of(case)
    assert plan.others is not None and plan.launch.block_m < plan.others.launch.block_m
    cu_rows, lengths, fed = case.rows.cu_rows.tolist(), [len(rows) for rows in sequences], []
    for walk in plan.walks:
        for b, row, count in (tile[:3] for tile in walk.tiles.tolist() if tile[2] > 0):
            is_wide = b == len(sequences) or lengths[b] > max_rows
            assert is_wide == (walk is plan.others) and cu_rows[b] <= row
            fed += range(row, row + count)
    assert sorted(fed) == list(range(case.rows.own_slots_R.shape[0]))
    check(case)


@pytest.mark.sweep
def test_without_prompts_beside_them_sequences_walk_together(apart: None) -> None:
    """The bounds say that there is no prompt."""
    case = build([causal(37, 1), causal(9, 1), causal(3, 1)], HALF_SMALL, spare_slots=400)
    rows = replace(case.rows, few_rows=1)
    assert plan_of(replace(case, rows=rows)).others is None
    mixed = build([causal(37, 1), causal(9, 60), causal(3, 1)], HALF_SMALL, spare_slots=400)
    rows = replace(mixed.rows, few_rows=1)
    assert plan_of(replace(mixed, rows=rows)).others is not None


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1e-15, 1e18])
def test_parts_in_half_precision(size: float) -> None:
    """The error is relative to the largest part, for values of any size and 1,000 times smaller ones."""
    case = build(SPLIT, SMALL)
    case.v_cache_SKH[::3] /= 1000
    case.v_cache_SKH.mul_(size)
    plain, half = run(case, MANY), run(case, HALF)
    case.v_cache_SKH.abs_()
    largest = run(case, MANY).amax(dim=-1, keepdim=True)
    assert not torch.equal(plain, half)
    assert ((plain - half).abs() <= 2**-11 * largest).all()


@pytest.mark.sweep_but("5-5-20")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(14, 2, 24), (3, 1, 80), (5, 5, 20)])
def test_head_shapes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.float16)
    check(build([tree(50), causal(20, 5)], shape, page_size=16))


@pytest.mark.sweep
def test_rows_at_the_edges_of_blocks() -> None:
    sequences = [causal(start, 2) for start in (13, 14, 15, 16)]
    sequences += [steady(start) for start in (9, 10, 25)] + [far_branch(32), far_branch(47)]
    check(build(sequences, SMALL), TINY)


@pytest.mark.sweep_but(3)
@pytest.mark.parametrize("seed", range(RANDOM_STEPS))
def test_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    sequences = random_sequences(rng, maximum=5, longest=120, chunk=40)
    shape = replace(
        SMALL, num_kv_heads=rng.choice([1, 2, 4]), dtype=rng.choice([torch.float16, torch.float32])
    )
    case = build(sequences, shape, page_size=rng.choice([2, 16]), padding=rng.randint(0, 9), seed=seed)
    check(case, (None, TINY, FIXED)[seed % 3])


@pytest.mark.sweep
@pytest.mark.parametrize("programs_per_sm", [1, 40])
def test_any_number_of_splits(programs_per_sm: int) -> None:
    case = build([causal(130, 2)], SMALL)
    tunables = replace(TINY, programs_per_sm=programs_per_sm)
    plan = plan_of(case, tunables)
    wanted = max(1, backend.INTERPRETED_MULTIPROCESSORS * programs_per_sm // 2)
    used = plan.items[:, 2] > 0
    split = plan.items[0, 15].item()
    assert split == min(wanted, 9), "132 slots are 9 blocks of 16"
    assert used.sum() == split + 1, "and the padding is a tile of its own"
    check(case, tunables)


@pytest.mark.sweep
def test_bounds_above_the_truth_change_nothing() -> None:
    """As in a CUDA graph: more sequences, rows and slots than the step has."""
    sequences = [steady(40), [], branch(11)]
    plain = build(sequences, SMALL, seed=5)
    roomy = build([*sequences, [], []], SMALL, seed=5, spare_rows=9, spare_slots=300)
    check(roomy, TINY)
    assert torch.equal(run(roomy, TINY), run(plain, TINY))


@pytest.mark.parametrize("sequences", [[], [[], []], [causal(0, 1)]])
@pytest.mark.parametrize("padding", [0, 5])
def test_tiny_steps(sequences: list[list[Row]], padding: int) -> None:
    case = build(sequences or [[]], SMALL, padding=padding)
    check(case)


def dot_row_by_row(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """A product whose rows do not depend on their position, as on a GPU and unlike BLAS."""
    product = np.einsum("mk,kn->mn", a.data.astype(np.float32), b.data.astype(np.float32), optimize=False)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


@pytest.mark.sweep
def test_with_fixed_splits_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise equality alone, among its own rows, in a chunk, in a full batch, without room for parts, and in
    a tile of another height."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_row_by_row)
    rows = [*far_branch(72), *causal(73, 1), *((74 + i, 74, 74) for i in range(3))]
    batches: list[Callable[[], tuple[list[list[Row]], int, int]]] = [
        lambda: ([rows], 0, 0),
        lambda: ([causal(9, 1), [], [*causal(65, 7), *rows], branch(10), causal(20, 9)], 2, 7),
        lambda: ([rows, causal(50, 2), tree(33)], 0, 0),
    ]
    tunables = [FIXED, replace(FIXED, max_parts=1), replace(FIXED, block_m=32, stages=7, combine_rows=2)]
    outcomes = []
    for number, batch in enumerate(batches):
        sequences, b, skipped = batch()
        case = fixed_content(build(sequences, SMALL, page_size=(4, 16, 1)[number], seed=number), b)
        first = int(case.rows.cu_rows[b]) + skipped
        outcomes.append(run(case, tunables[number])[first : first + len(rows)])
        if not number:
            even = run(case, TINY)[: len(rows)]
    for index in (0, 2, 4):
        case = fixed_content(build([rows[index : index + 1]], SMALL, seed=7), 0)
        assert torch.equal(run(case, FIXED)[0], outcomes[0][index]), f"row {index} alone"
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)
    assert not torch.equal(even, outcomes[0]), "other splits do round differently, so this test can fail"


@pytest.mark.sweep
def test_a_tile_without_room_for_its_parts_is_walked_by_one_item() -> None:
    case = build([causal(150, 1), causal(150, 1)], SMALL)
    # 10 blocks are splits of 1, 1, 1, 1, 2, 2 and 4 of them; the first of 3 items adds the first 3 up.
    cut, cut_too, none = [1, 0, 0, 5], [1, 1, 5, 5], 0
    for max_parts, expected in ((10, [cut, cut_too]), (9, [cut, none]), (4, [none, none])):
        plan = plan_of(case, replace(FIXED, max_parts=max_parts))
        assert [record[20:24] if record[20] else 0 for record in plan.tiles[:2].tolist()] == expected
    check(case, replace(FIXED, max_parts=9))


@pytest.mark.sweep
@pytest.mark.parametrize("longest", [90, 300])
def test_short_walks_of_many_sequences_are_not_split(longest: int) -> None:
    """One of them has most of the slots, and would be split; the bound on slots decides."""
    case = build([causal(9, 2), causal(83, 3), branch(5), causal(7, 1), steady(3), causal(4, 1)], SMALL)
    case = replace(case, rows=replace(case.rows, max_slots=100))
    tunables = replace(TINY, whole_slots=longest)
    plan = plan_of(case, tunables)
    assert (plan.num_split == 0) == (longest == 300) and (plan.num_items > plan.num_tiles) == (longest < 300)
    assert (plan.tiles[:, 20] > 0).any() == (longest < 300)
    check(case, tunables)


@pytest.mark.parametrize("octave", [1, 16])
def test_fixed_splits_cover_all_slots_and_are_short_against_the_context(octave: int) -> None:
    tunables = replace(FIXED, octave=octave)
    for num_blocks in (1, 2, 3, 7, 16, 33, 100, 1000):
        count = planning.max_fixed_splits(tunables, num_blocks * tunables.block_n)
        starts = [((s - o * octave) << o) for s in range(count + 1) if (o := max(s // octave - 1, 0)) >= 0]
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        assert starts[0] == 0 and starts[-2] < num_blocks <= starts[-1], f"{num_blocks=}"
        assert all(length <= max(1, start // octave) for start, length in zip(starts, lengths, strict=False))


@triton.jit
def sums_kernel(weights_MS, sums_M, M: tl.constexpr, S: tl.constexpr, IS_EXACT: tl.constexpr):
    m = tl.arange(0, M)
    tl.store(sums_M + m, sum_of(tl.load(weights_MS + m[:, None] * S + tl.arange(0, S)[None, :]), IS_EXACT))


def test_sums_of_weights_have_the_same_bits_in_any_order() -> None:
    """Also of the most and largest weights that a block has."""
    weights_MS = torch.rand(16, 128, generator=torch.Generator().manual_seed(0)) ** 8
    weights_MS[0], weights_MS[1] = 1.0, 1 - 2**-18

    def sums(order_S: Tensor, *, is_exact: bool) -> Tensor:
        sums_M = torch.full((16,), torch.nan)
        sums_kernel[(1,)](weights_MS[:, order_S].contiguous(), sums_M, M=16, S=128, IS_EXACT=is_exact)
        return sums_M

    orders = [torch.arange(128), *(torch.randperm(128) for _ in range(5))]
    first, *others = (sums(order_S, is_exact=True) for order_S in orders)
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first.double(), weights_MS.double().sum(1), rtol=2**-14, atol=0)
    rounded = [sums(order_S, is_exact=False) for order_S in orders]
    assert not all(torch.equal(other, rounded[0]) for other in rounded), "so this test can fail"


def test_a_plan_serves_every_layer_and_writes_to_out() -> None:
    case = build([tree(40), causal(0, 3)], SMALL)
    plan = plan_of(case, MANY)
    arguments = case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan
    first = paged_attention(*arguments, scale=SCALE)
    wide = torch.full((first.shape[0], 9, 16), 7.0)
    again = paged_attention(*arguments, scale=SCALE, out=wide[:, 2:6])
    assert torch.equal(again, first) and again.data_ptr() == wide[:, 2:6].data_ptr()
    assert (wide[:, :2] == 7).all() and (wide[:, 6:] == 7).all()


@pytest.mark.sweep_but("True")
@pytest.mark.parametrize("has_scales", [False, True])
def test_an_fp8_cache_and_its_scales(has_scales: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SMALL, dtype=torch.float16)
    case = build([steady(40), causal(5, 9)], shape)
    factors = torch.tensor([[0.5, 2.0], [4.0, 0.25]]) if has_scales else torch.ones(2, 2)
    stored, restored = [], []
    for cache, scale_K in zip((case.k_cache_SKH, case.v_cache_SKH), factors, strict=True):
        stored.append((cache / scale_K[:, None].half()).to(torch.float8_e4m3fn))
        restored.append((stored[-1].float() * scale_K[:, None]).half())
    plain = replace(case, k_cache_SKH=restored[0], v_cache_SKH=restored[1])
    scaled = replace(plain, shape=replace(shape, kv_dtype=torch.float8_e4m3fn), k_cache_SKH=stored[0])
    scaled = replace(scaled, v_cache_SKH=stored[1])
    scales = {"k_scale_K": factors[0], "v_scale_K": factors[1]} if has_scales else {}
    o_RNH = run(scaled, TINY, **scales)
    assert error_ratio(plain, o_RNH) <= 2
    if has_scales:
        monkeypatch.setattr(choice, "APART_BLOCKS", 0)
        mixed = replace(scaled, rows=replace(scaled.rows, few_rows=1, max_slots=400))
        assert plan_of(mixed).others is not None
        assert error_ratio(plain, run(mixed, **scales)) <= 2
