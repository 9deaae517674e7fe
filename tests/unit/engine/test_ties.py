"""Exact ties have one order on every device: lower token ids, left positions, lower slots, lower experts
first.

tests/gpu/block/test_ties_gpu.py runs the same on a GPU. Near ties have no order; see tests/margins.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.infer.decoders.block_config import UNMASKINGS, Masks
from idlm.infer.runtime.logprobs import emitted_logprobs, likeliest
from idlm.kernels.experts import Routing, route
from idlm.kernels.prefix_ranking import select_largest
from idlm.kernels.sampling import draw, judged_draws, row_probs

pytestmark = pytest.mark.decides


@pytest.fixture
def device() -> str:
    return "cpu"


def ties_in_the_middle(num_tokens: int, device: str) -> torch.Tensor:
    """Tokens 40, 41 and 700 share the largest logit, and 42 to 600 the next one."""
    logits_V = torch.full((num_tokens,), -1.0, device=device)
    logits_V[42:601] = 0.5
    logits_V[[40, 41, 700]] = 2.0
    return logits_V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equally_likely_tokens_greedy_decoding_takes_the_lowest_id(
    device: str, dtype: torch.dtype
) -> None:
    logits_XV = ties_in_the_middle(1000, device).to(dtype).repeat(3, 1)
    zeros_X, ones_X = torch.zeros(2, 3, dtype=torch.float64, device=device) + torch.tensor(
        [[0.0], [1.0]], dtype=torch.float64, device=device
    )
    no_k_X = torch.zeros(3, dtype=torch.int64, device=device)
    probs = row_probs(logits_XV, zeros_X, no_k_X, ones_X, zeros_X, filters=False, own=True)
    rows_X, uniforms_X = torch.arange(3, device=device), ones_X * 0.999
    assert draw(probs, rows_X, uniforms_X).tolist() == [40] * 3
    assert judged_draws(probs, uniforms_X, zeros_X)[0].tolist() == [40] * 3


@pytest.mark.parametrize("name", [name for name in UNMASKINGS.names() if name != "sequential"])
def test_of_equally_confident_places_the_left_one_is_decided_first(device: str, name: str) -> None:
    same_BW = torch.full((1, 40), 0.25, dtype=torch.float64, device=device)
    same_BW[0, 7] = 0.125
    is_maskable_BW = torch.ones(1, 40, dtype=torch.bool, device=device)
    is_maskable_BW[0, :3] = False
    one_B = torch.ones(1, dtype=torch.float64, device=device)
    masks = Masks(
        is_maskable_BW=is_maskable_BW,
        confidence_BW=same_BW,
        entropy_BW=1 - same_BW,
        quota_B=3 * one_B.long(),
        threshold_B=0.9 * one_B,
        entropy_bound_B=2.5 * one_B,
    )
    chosen_BW = UNMASKINGS.get(name)().choose(masks)
    assert chosen_BW[0].nonzero()[:, 0].tolist() == [3, 4, 5]


def test_of_equal_logprobs_the_lower_id_is_reported_first(device: str) -> None:
    logits_V = ties_in_the_middle(1000, device)
    logits_V[5], logits_V[6] = 0.0, -0.0
    plan: Any = SimpleNamespace(first_logit_B=torch.zeros(1, dtype=torch.int64, device=device))
    outcome: Any = SimpleNamespace(token_ids_BJ=torch.zeros(1, 1, dtype=torch.int64, device=device))
    shown = emitted_logprobs(logits_V[None], plan, outcome, num_top=20)
    assert shown.top_ids.flatten().tolist() == [40, 41, 700, *range(42, 59)]
    everything = likeliest(logits_V[None, None], 1000).flatten().tolist()
    assert everything == (-logits_V).argsort(stable=True).tolist()
    law_V = torch.log_softmax(logits_V.double(), -1)
    assert torch.equal(shown.top.flatten(), law_V[shown.top_ids.flatten()])


def test_of_equal_slots_an_accelerator_keeps_the_first_at_any_prefix(device: str) -> None:
    """In long prefixes many slots have an attention mass of 0."""
    for num_slots in (9, 100, 5000):
        scores_1BKS = torch.zeros(1, 1, 2, num_slots, device=device)
        scores_1BKS[..., 6] = 1.0
        count_B, lane_B = torch.tensor([8], device=device), torch.tensor([0], device=device)
        for num, expected in ((4, [0, 1, 2, 6]), (10, [*range(8), -1, -1])):
            slots_1BKC = torch.empty(1, 1, 2, num, dtype=torch.int32, device=device)
            select_largest(scores_1BKS, count_B, count_B > 0, lane_B, slots_1BKC)
            assert slots_1BKC.tolist() == [[[expected] * 2]]


def test_of_equal_experts_and_groups_the_lower_number_is_chosen(device: str) -> None:
    logits_RX = torch.zeros(2, 256, device=device)
    logits_RX[:, 90] = 1.0
    plain = Routing(num_chosen=4, score="softmax", is_normalised=True)
    assert route(logits_RX, plain)[0].sort(dim=1).values.tolist() == [[0, 1, 2, 90]] * 2
    grouped = Routing(num_chosen=4, score="sigmoid", is_normalised=True, num_groups=8, num_chosen_groups=3)
    assert route(logits_RX, grouped)[0].sort(dim=1).values.tolist() == [[0, 1, 2, 90]] * 2
    logits_RX[:, 90] = 0.0
    logits_RX[:, 250:252] = 1.0
    assert route(logits_RX, grouped)[0].sort(dim=1).values.tolist() == [[0, 1, 250, 251]] * 2
