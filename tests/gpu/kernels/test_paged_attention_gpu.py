"""Paged attention on a GPU: random steps within twice PyTorch's own error, and all back ends."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.attention import flash_attend, flash_obstacle
from idlm.kernels.paged_attention import BACKENDS, HeadShape, paged_attention, plan_attention, problems
from tests.kernels.cases.paged_attention import (
    SCALE,
    Case,
    Row,
    block,
    branch,
    build,
    causal,
    error_ratio,
    fixed_content,
    random_sequences,
    steady,
    tree,
)

NUM_SEEDS = 30
CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def heads(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = BF16) -> HeadShape:
    return HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Compile-time configuration, which all random steps of a setting share."""

    shape: HeadShape
    page_size: int = 16
    deterministic: bool = False
    tunables: tuple[tuple[str, Any], ...] = ()


TWO_GROUPS = (("two_groups", True), ("pdl", True), ("block_m", 128), ("warps", 8), ("min_blocks", 1))
SETTINGS = {
    "qwen3_8b": Setting(shape=heads(32, 8, 128)),
    "qwen3_8b_pdl": Setting(shape=heads(32, 8, 128), tunables=(("pdl", True),)),
    "qwen3_8b_wide_parts": Setting(
        shape=heads(32, 8, 128), tunables=(("pdl", True), ("half_parts", False), ("early", False))
    ),
    "qwen3_8b_fixed": Setting(shape=heads(32, 8, 128), deterministic=True),
    "qwen3_8b_fixed_pdl": Setting(
        shape=heads(32, 8, 128), deterministic=True, tunables=(("pdl", True), ("combine_rows", 4))
    ),
    "qwen3_8b_long": Setting(shape=heads(32, 8, 128), tunables=(("block_n", 128), ("programs_per_sm", 1))),
    "qwen3_8b_short": Setting(
        shape=heads(32, 8, 128), tunables=(("block_n", 32), ("combine_rows", 2), ("pdl", True))
    ),
    "wide_short": Setting(shape=heads(8, 2, 256), tunables=(("block_n", 16), ("combine_rows", 2))),
    "qwen3_600m_large_tile": Setting(
        shape=heads(16, 8, 128), tunables=(("block_m", 128), ("warps", 8), ("min_blocks", 1))
    ),
    **{
        f"two_groups_{page_size}": Setting(
            shape=heads(16, 4, 128, dtype), page_size=page_size, tunables=(*TWO_GROUPS, ("half_parts", half))
        )
        for dtype, page_size, half in ((BF16, 16, True), (BF16, 64, True), (FP16, 5, False))
    },
    "two_groups_prompts": Setting(
        shape=heads(32, 8, 128), page_size=24, tunables=(*TWO_GROUPS, ("block_n", 128), ("turns", 2))
    ),
    "qwen2_500m": Setting(shape=heads(14, 2, 64), page_size=32),
    "qwen3_8b_fixed_short": Setting(
        shape=heads(32, 8, 128), deterministic=True, tunables=(("split_slots", 64), ("octave", 2))
    ),
    "llama_fixed": Setting(
        shape=heads(24, 8, 64, FP16), deterministic=True, tunables=(("split_slots", 128),)
    ),
    "wide_fixed": Setting(shape=heads(8, 2, 256), page_size=1, deterministic=True),
    "odd": Setting(shape=heads(6, 2, 80, FP16), page_size=5),
    "wide": Setting(shape=heads(8, 2, 256), page_size=1),
    "many_heads": Setting(shape=heads(71, 1, 64), page_size=64),
    "tiny_fp32": Setting(shape=heads(6, 3, 16, FP32), page_size=4, tunables=(("min_blocks", 1),)),
    "fp32_fixed": Setting(shape=heads(4, 2, 96, FP32), deterministic=True),
}
FIXED = [name for name in SETTINGS if "fixed" in name]


def launch_of(case: Case, setting: Setting) -> Any:
    from idlm.kernels.paged_attention.choice import choose_launch

    chosen = choose_launch(case.shape, max_rows=case.rows.max_rows, deterministic=setting.deterministic)
    return replace(chosen, **dict(setting.tunables))


def run(case: Case, setting: Setting) -> Tensor:
    plan = plan_attention(
        case.rows,
        case.shape,
        backend="triton",
        deterministic=setting.deterministic,
        launch=launch_of(case, setting),
    )
    if dict(setting.tunables).get("two_groups"):
        from idlm.kernels.paged_attention.launch import has_groups

        assert has_groups(plan), "the walk that this setting names"
    return paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE)


@pytest.mark.parametrize("name", SETTINGS)
def test_many_random_steps_are_within_twice_the_error_of_sdpa(name: str) -> None:
    """Poison in padding rows, pages and unseen slots; bounds at and above the truth."""
    setting, ratios = SETTINGS[name], {}
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        maximum, longest, chunk = ((6, 300, 50), (40, 60, 9), (3, 3000, 400))[seed % 3]
        case = build(
            random_sequences(rng, maximum=maximum, longest=longest, chunk=chunk),
            setting.shape,
            page_size=setting.page_size,
            padding=rng.choice([0, 1, 40]),
            seed=seed,
            device="cuda",
            spare_rows=rng.choice([0, 5]),
            spare_slots=rng.choice([0, 1000]),
        )
        ratios[seed] = error_ratio(case, run(case, setting))
    bad = {seed: ratio for seed, ratio in ratios.items() if not ratio <= 2}
    assert not bad
    print(f"{name}: worst of {len(ratios)}: {max(ratios.values()):.2f}")


@pytest.mark.parametrize("num_rows", [1, 15, 32])
def test_a_long_context(num_rows: int) -> None:
    for name in ("qwen3_8b", "qwen3_8b_pdl", "qwen3_8b_fixed", "two_groups_16"):
        sequences = [causal(32_700, num_rows), causal(5, 1)]
        case = build(sequences, SETTINGS[name].shape, page_size=16, device="cuda")
        assert error_ratio(case, run(case, SETTINGS[name])) <= 2, name


def test_prompt_chunks_with_decoding_sequences() -> None:
    sequences = [branch(900), causal(1000, 2048), tree(77), causal(0, 700), [], steady(3000)]
    case = build(sequences, heads(32, 8, 128), page_size=16, device="cuda", padding=100)
    assert error_ratio(case, run(case, Setting(shape=case.shape))) <= 2


@pytest.mark.parametrize("usual_rows", [3, 12, None])
def test_tiles_for_the_rows_that_most_sequences_have(usual_rows: int | None) -> None:
    """As behind a drop of rows: a few rows of most blocks, two whole blocks of some."""
    rng = random.Random(1)
    sequences = [block(rng.randrange(900, 1300), rng.choice([3, 5, 7, 8, 9, 64])) for _ in range(48)]
    case = build(sequences, heads(32, 8, 128), page_size=16, device="cuda", padding=40)
    rows = replace(case.rows, usual_rows=usual_rows, max_rows=4096)
    plan = plan_attention(rows, case.shape, backend="triton")
    found = paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE)
    assert error_ratio(case, found) <= 2


@pytest.mark.parametrize(("few_rows", "longest"), [(1, 1300), (7, 9000), (16, 1300)])
def test_decoding_sequences_walk_apart_from_prompts(few_rows: int, longest: int) -> None:
    """Also in layers that follow one another, of which each waits for the one before in its own kernels."""
    rng = random.Random(1)
    decoding = {1: lambda start: causal(start, 1), 7: tree, 16: branch}[few_rows]
    sequences = [decoding(rng.randrange(900, longest)) for _ in range(72)]
    sequences[5], sequences[40], sequences[41] = causal(0, 700), causal(1000, 300), []
    sequences[60], sequences[61] = causal(500, 3), causal(20, 30)
    case = build(sequences, heads(32, 8, 128), page_size=16, device="cuda", padding=100, spare_slots=500)
    plan = plan_attention(replace(case.rows, few_rows=few_rows), case.shape, backend="triton")
    assert getattr(plan, "others", None) is not None, "what this test is about"
    caches = case.k_cache_SKH, case.v_cache_SKH
    alone = paged_attention(case.q_RNH, *caches, plan, scale=SCALE)
    assert error_ratio(case, alone) <= 2
    torch.cuda.synchronize()
    layers = [case.q_RNH * factor for factor in (0.5, 2.0, 1.0, 1.0)]
    outs = [paged_attention(q_RNH, *caches, plan, scale=SCALE) for q_RNH in layers]
    assert torch.equal(outs[2], alone) and torch.equal(outs[3], alone)
    assert not torch.equal(outs[0], alone) and not torch.equal(outs[1], alone)


@pytest.mark.parametrize("slots", [1000, 5000])
def test_two_warpgroups_walk_prompts(slots: int) -> None:
    """Whole ones, chunks, an empty sequence, one of a few rows; more items than programs, each with two. In
    the second case the longest walk is split."""
    sequences = [causal(0, 1000), causal(300, 700), [], causal(0, 129), causal(5, 3), causal(0, 900)]
    sequences += [causal(slots - 70, 70), causal(0, 777)]
    case = build(sequences, heads(32, 8, 128), page_size=16, device="cuda", padding=100, spare_slots=60)
    plan = plan_attention(case.rows, case.shape, backend="triton")
    assert getattr(plan, "launch", None) and plan.launch.two_groups and plan.num_items * 8 >= 4 * 132
    found = paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE)
    assert error_ratio(case, found) <= 2


@pytest.mark.parametrize("name", FIXED)
def test_with_fixed_splits_rows_do_not_depend_on_the_batch(name: str) -> None:
    """Bitwise, random batches: alone, in a chunk, among others, with and without room for parts."""
    setting = SETTINGS[name]
    cramped = replace(setting, tunables=(*setting.tunables, ("max_parts", 1)))
    for seed in range(15):
        rng = random.Random(seed)
        rows = rng.choice([steady, tree, branch])(rng.randint(30, 3500))
        before = rng.choice([0, 3, 40])
        others = random_sequences(rng, maximum=30, longest=900, chunk=100)
        index = rng.randint(0, len(others))
        sequence: list[Row] = [*causal(rows[0][0] - before, before), *rows] if before <= rows[0][0] else rows
        skipped = len(sequence) - len(rows)
        batches = [([rows], 0, 0), ([*others[:index], sequence, *others[index:]], index, skipped)]
        batches += [([[row]], 0, 0) for row in (rows[0], rows[-1])]
        outcomes = []
        for number, (sequences, b, skip) in enumerate(batches):
            built = build(sequences, setting.shape, page_size=setting.page_size, seed=number, device="cuda")
            case = fixed_content(built, b)
            first = int(case.rows.cu_rows[b]) + skip
            outcomes.append([run(case, s)[first : first + len(rows)] for s in (setting, cramped)])
        alone, among, head, tail = outcomes
        assert torch.equal(alone[0], alone[1]) and torch.equal(among[0], among[1]), seed
        assert torch.equal(alone[0], among[0]), seed
        assert torch.equal(head[0][0], alone[0][0]) and torch.equal(tail[1][0], alone[0][-1]), seed


def fixed_launches(shape: HeadShape) -> list[Any]:
    """What `choose_launch` returns for any load."""
    from idlm.kernels.paged_attention.choice import choose_launch

    loads = itertools.product((1, 7, 15, 400), (1, 4, 13, 16, 64), (300, 9000))
    sizes = [{"max_rows": r, "num_rows": r * b, "num_sequences": b, "max_slots": s} for r, b, s in loads]
    return list({choose_launch(shape, deterministic=True, **each): None for each in sizes})


@pytest.mark.parametrize("name", FIXED)
def test_all_launches_of_deterministic_rows_give_the_same_bits(name: str) -> None:
    setting = SETTINGS[name]
    launches = [replace(each, **dict(setting.tunables)) for each in fixed_launches(setting.shape)]
    for seed in range(9):
        rng = random.Random(seed)
        maximum, longest, chunk = ((9, 300, 50), (20, 90, 9), (4, 9000, 200))[seed % 3]
        sequences = random_sequences(rng, maximum=maximum, longest=longest, chunk=chunk)
        sequences += [causal(rng.randrange(2000), 15), branch(rng.randrange(3000)), tree(rng.randrange(500))]
        case = build(
            sequences, setting.shape, page_size=setting.page_size, seed=seed, padding=5, device="cuda"
        )
        arguments = case.q_RNH, case.k_cache_SKH, case.v_cache_SKH
        plans = [plan_attention(case.rows, case.shape, backend="triton", launch=each) for each in launches]
        first, *others = (paged_attention(*arguments, plan, scale=SCALE) for plan in plans)
        assert error_ratio(case, first) <= 2
        wrong = [
            launch
            for launch, o_RNH in zip(launches[1:], others, strict=True)
            if not torch.equal(o_RNH, first)
        ]
        assert not wrong, f"{seed=} {launches[0]} {wrong[0]}"


@pytest.mark.parametrize("rows", [1, 4, 7, 15, 16])
def test_a_deterministic_row_has_its_bits_at_every_concurrency(rows: int) -> None:
    """The launch of the load: alone, and among 4, 13, 16 and 64 sequences, with tiles of both heights."""
    shape = heads(32, 8, 128)
    kind = {1: lambda at: causal(at, 1), 7: steady, 16: branch}.get(rows, lambda at: causal(at, rows))
    for context in (700, 1090, 3000):
        outcomes = []
        for num in (1, 4, 13, 16, 64):
            rng = random.Random(num)
            sequences = [kind(rng.randrange(20, context)) for _ in range(num - 1)]
            sequences.insert(at := num // 2, kind(context))
            case = build(sequences, shape, page_size=16, seed=num, device="cuda", spare_slots=900)
            case = fixed_content(case, at)
            plan = plan_attention(case.rows, shape, backend="triton", deterministic=True)
            o_RNH = paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE)
            first = int(case.rows.cu_rows[at])
            outcomes.append(o_RNH[first : first + rows])
        assert all(torch.equal(each, outcomes[0]) for each in outcomes), f"{context=}"


@pytest.mark.parametrize("tunables", [(), (("pdl", True),), (("pdl", True), ("early", False))], ids=str)
def test_one_cuda_graph_serves_steps_of_any_lengths(tunables: tuple[tuple[str, Any], ...]) -> None:
    """Planning and two layers are captured once at bounds, then replayed with other lengths."""
    shape, num_rows = heads(32, 8, 128), 64
    setting = Setting(shape=shape, tunables=tunables)
    steps: list[list[list[Row]]] = [
        [steady(9), branch(700), [], causal(40, 3)],
        [[], tree(2000), causal(1, 1), []],
        [branch(31), branch(1), branch(64), branch(2024)],
    ]
    cases = []
    for seed, sequences in enumerate(steps):
        padding = num_rows - sum(map(len, sequences))
        cases.append(build(sequences, shape, page_size=16, padding=padding, seed=seed, device="cuda"))
    columns = max(case.rows.block_table.shape[1] for case in cases)
    num_slots = max(case.k_cache_SKH.shape[0] for case in cases)
    varying = ("cu_rows", "own_slots_R", "limits_R", "branch_starts_R")
    rows = replace(
        cases[0].rows,
        **{name: getattr(cases[0].rows, name).clone() for name in varying},
        block_table=torch.zeros(len(steps[0]), columns, dtype=torch.int64, device="cuda"),
        max_rows=16,
        max_slots=columns * 16,
    )
    cache = torch.zeros(2, num_slots, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device="cuda")
    static = Case(
        rows=rows,
        shape=shape,
        q_RNH=cases[0].q_RNH.clone(),
        k_cache_SKH=cache[0],
        v_cache_SKH=cache[1],
    )
    launch = launch_of(static, setting)

    def step() -> list[Tensor]:
        plan = plan_attention(static.rows, shape, backend="triton", launch=launch)
        arguments = static.q_RNH, static.k_cache_SKH, static.v_cache_SKH, plan
        return [paged_attention(*arguments, scale=SCALE) for _ in range(2)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for case in cases * 3:
        static.q_RNH.copy_(case.q_RNH)
        cache[:] = float("nan")
        cache[0, : len(case.k_cache_SKH)] = case.k_cache_SKH
        cache[1, : len(case.v_cache_SKH)] = case.v_cache_SKH
        static.rows.block_table.zero_()
        static.rows.block_table[:, : case.rows.block_table.shape[1]] = case.rows.block_table
        for name in varying:
            getattr(static.rows, name).copy_(getattr(case.rows, name))
        graph.replay()
        assert error_ratio(case, outputs[0]) <= 2
        assert torch.equal(*outputs)


def test_an_early_sum_sees_all_parts() -> None:
    """A race would fail some of many runs."""
    setting = SETTINGS["qwen3_8b_pdl"]
    case = build([causal(32_000, 4), *(causal(500 * n, 4) for n in range(20))], setting.shape, device="cuda")
    first = run(case, setting)
    assert error_ratio(case, first) <= 2
    assert all(torch.equal(run(case, setting), first) for _ in range(200))


@pytest.mark.parametrize("page_size", [16, 256])
def test_all_back_ends_agree_on_causal_rows(page_size: int) -> None:
    sequences = [causal(0, 1), causal(900, 7), [], causal(33, 300), causal(2000, 1), causal(0, 65)]
    case = build(sequences, heads(32, 8, 128), page_size=page_size, padding=11, device="cuda")
    for name in BACKENDS:
        assert not problems(name, case.shape, device=CUDA)
        plan = plan_attention(case.rows, case.shape, backend=name)
        arguments = case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan
        for out in (None, torch.empty_like(case.q_RNH)):
            o_RNH = paged_attention(*arguments, scale=SCALE, out=out)
            assert error_ratio(case, o_RNH) <= 2.5, name


@pytest.mark.parametrize("page_size", [16, 256])
def test_flash_attention_of_the_benchmark_is_exact(page_size: int) -> None:
    """The benchmark's baseline computes the same attention."""
    sequences = [causal(0, 1), causal(900, 7), causal(33, 300), causal(2000, 1), causal(0, 65)]
    case = build(sequences, heads(32, 8, 128), page_size=page_size, device="cuda")
    if obstacle := flash_obstacle(case.shape):
        pytest.skip(obstacle)
    # The library multiplies unseen slots by zero, which NaN survives.
    keys, values = (cache.nan_to_num(0) for cache in _caches(case))
    attend = flash_attend(case.rows, SCALE)
    assert error_ratio(case, attend(case.q_RNH.contiguous(), keys, values)) <= 2.5


def test_an_fp8_cache_with_its_scales() -> None:
    shape = heads(32, 8, 128)
    case = build([steady(400), causal(5, 90)], shape, page_size=16, device="cuda")
    scale_K = torch.rand(8, device="cuda") + 0.5
    stored = [(cache / scale_K[:, None].to(BF16)).to(torch.float8_e4m3fn) for cache in _caches(case)]
    restored = [(cache.float() * scale_K[:, None]).to(BF16) for cache in stored]
    plain = replace(case, k_cache_SKH=restored[0], v_cache_SKH=restored[1])
    plan = plan_attention(case.rows, replace(shape, kv_dtype=torch.float8_e4m3fn), backend="triton")
    o_RNH = paged_attention(case.q_RNH, *stored, plan, scale=SCALE, k_scale_K=scale_K, v_scale_K=scale_K)
    # The reference rounds the restored cache to bfloat16, which the kernel does not.
    assert error_ratio(plain, o_RNH) <= 4


def _caches(case: Case) -> tuple[Tensor, Tensor]:
    return case.k_cache_SKH, case.v_cache_SKH
