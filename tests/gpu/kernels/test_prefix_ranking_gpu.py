"""The ranking of prefixes on a CUDA device against its definition: many small cases, and long lists."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from idlm.kernels.prefix_ranking import attention_share, rank_prefix, workspace_bytes
from idlm.kernels.prefix_ranking import op as op_module
from tests.kernels.cases.sparse.prefix_ranking import OLD, Sizes, check_selection, hard_scores, make_case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = (
    Sizes(width=32, group=4, head_dim=128, page_size=32, max_slots=640, listed=64),
    Sizes(width=32, group=8, head_dim=128, max_slots=320, listed=100, sequences=2),
    Sizes(width=32, group=20, head_dim=64, max_slots=200, layers=1, sequences=2),
    Sizes(width=4, group=7, head_dim=80, page_size=1, max_slots=300, kv_heads=1, listed=33),
    Sizes(width=16, group=1, head_dim=256, max_slots=250, kv_heads=5, listed=300),
    Sizes(width=5, group=3, max_slots=130, sequences=7),
)
SLACK_BYTES = 1 << 20


@pytest.mark.parametrize("part", range(4))
def test_random_cases_equal_the_definition(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        chosen = random.Random(seed)
        dtype = chosen.choice(DTYPES)
        sizes = replace(chosen.choice(SHAPES), max_slots=chosen.choice((64, 130, 320)), layers=1)
        make_case(seed, sizes, dtype, device="cuda", fp8=chosen.random() < 0.3).check()


@pytest.mark.parametrize(
    ("sizes", "dtype", "fp8"),
    [
        *((sizes, torch.bfloat16, False) for sizes in SHAPES),
        *((sizes, DTYPES[number % 3], number % 2 == 0) for number, sizes in enumerate(SHAPES)),
    ],
    ids=str,
)
def test_all_shapes_equal_the_definition(sizes: Sizes, dtype: torch.dtype, fp8: bool) -> None:
    make_case(7, sizes, dtype, device="cuda", fp8=fp8).check()


@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_largest_scores_are_listed(seed: int, group: int) -> None:
    check = partial(check_selection, device="cuda", select=partial(op_module.select_largest, group=group))
    check(hard_scores(seed, (3, 4, 8, 70_001)), [70_001, 0, 9000, 5], 1024)
    check(hard_scores(seed, (2, 4, 1, 4096)), [4096, 4095, 17, 5], 3000)


def test_layers_in_groups_give_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3, replace(SHAPES[0], layers=7), torch.bfloat16, device="cuda")
    rank_prefix(case.ranking, case.lanes_B, case.slots_LZKC)
    found = case.slots_LZKC.clone()
    monkeypatch.setattr(op_module, "MAX_SHARE_BYTES", 100_000)
    assert op_module.layers_at_once(7, 3, 2, 640) == 4
    rank_prefix(case.ranking, case.lanes_B, case.slots_LZKC.fill_(OLD))
    assert torch.equal(case.slots_LZKC, found)


def test_nothing_waits_for_the_device_and_a_graph_ranks_who_is_flagged() -> None:
    case = make_case(11, replace(SHAPES[0], sequences=6), torch.bfloat16, device="cuda")
    ranking, ranks_B = case.ranking, case.ranking.ranks_B.clone()
    assert ranks_B.any()
    rank_prefix(ranking, case.lanes_B, case.slots_LZKC)
    expected = case.slots_LZKC.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rank_prefix(ranking, case.lanes_B, case.slots_LZKC)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rank_prefix(ranking, case.lanes_B, case.slots_LZKC)
    case.slots_LZKC.fill_(OLD)
    ranking.ranks_B.fill_(False)
    graph.replay()
    assert (case.slots_LZKC == OLD).all()
    ranking.ranks_B.copy_(ranks_B)
    for _ in range(3):
        graph.replay()
        assert torch.equal(case.slots_LZKC, expected)


def test_memory_is_what_is_announced() -> None:
    sizes = replace(SHAPES[0], layers=9, max_slots=640)
    case = make_case(5, sizes, torch.bfloat16, device="cuda")
    rank_prefix(case.ranking, case.lanes_B, case.slots_LZKC)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rank_prefix(case.ranking, case.lanes_B, case.slots_LZKC)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= workspace_bytes(9, sizes.sequences, sizes.kv_heads, sizes.max_slots) + 4096
    assert workspace_bytes(34, 26, 8, 1 << 15) <= op_module.MAX_SHARE_BYTES


def test_shares_of_a_long_prefix_add_up_to_one() -> None:
    """One sequence of 60,000 slots, whose work all multiprocessors divide."""
    torch.manual_seed(0)
    sizes = Sizes(layers=2, sequences=1, width=32, group=4, head_dim=128, page_size=32, max_slots=60_000)
    case = make_case(2, replace(sizes, max_slots=64), torch.bfloat16)
    k_LSKH = torch.randn(2, 60_032, 2, 128, device="cuda").bfloat16()
    q_LRNH = torch.randn(2, 32, 8, 128, device="cuda").bfloat16()
    q_LKXH = q_LRNH.float().unflatten(2, (2, 4)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    scores_LKXS = q_LKXH @ k_LSKH[:, :60_000].float().permute(0, 2, 3, 1) * (128**-0.5 * 1.4426950408889634)
    max_LKX = scores_LKXS.amax(-1)
    sum_LKX = (scores_LKXS - max_LKX[..., None]).exp2().sum(-1)
    max_LRN, sum_LRN = (
        one.unflatten(2, (32, 4)).transpose(1, 2).flatten(2).contiguous() for one in (max_LKX, sum_LKX)
    )
    ranking = replace(
        case.ranking,
        q_LRNH=q_LRNH,
        max_LRN=max_LRN,
        sum_LRN=sum_LRN,
        keys_LSKH=k_LSKH,
        block_table_BP=torch.arange(60_032 // 32, device="cuda")[None],
        rows_BW=torch.arange(32, device="cuda")[None],
        starts_B=torch.tensor([60_000], device="cuda"),
        ranks_B=torch.tensor([True], device="cuda"),
        max_slots=60_000,
    )
    shares_LKS = attention_share(ranking, 0, 2)[:, 0, :, :60_000]
    torch.testing.assert_close(shares_LKS.sum(-1), torch.ones(2, 2, device="cuda"), rtol=1e-4, atol=0)
    expected_LKS = (scores_LKXS * 0.6931471805599453).softmax(-1).mean(2)
    torch.testing.assert_close(shares_LKS, expected_LKS, rtol=1e-4, atol=0)
