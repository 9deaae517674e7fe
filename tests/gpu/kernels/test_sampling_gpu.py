"""The sampling kernels on a CUDA device: random batches against fp64, and one captured step."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from idlm.kernels.sampling import RowProbs, Tuning, draw, row_probs, uniforms
from idlm.kernels.sampling.probs import plain_row_probs
from tests.kernels.cases.draft_walk import Case as Walks
from tests.kernels.cases.sampling import (
    Case,
    all_probs,
    check_draws,
    check_judged,
    check_nonfinite,
    check_probs,
    make_case,
    poisoned,
)
from tests.kernels.cases.sampling_bits import check_allowed, check_restrict
from tests.kernels.cases.sampling_steps import run_steps
from tests.kernels.drafts.lookups import check_lookups

CASES_PER_SEED = 12
# Few, because every combination with a tuning and a dtype is compiled anew.
VOCABULARIES = (37, 4097, 50_257, 151_936)
TUNINGS = (
    Tuning(),
    Tuning(chunk=256, tile=8, num_warps=4, capacity=64, listed=32, sample=2048, step=1024),
)


def oracle(logits_XV: Tensor, *settings: Tensor) -> Tensor:
    """The fp64 path, which test_sampling.py compares with the definition."""
    return plain_row_probs(logits_XV, settings, None, filters=True).probs_XV


def check_case(draw_from: random.Random) -> None:
    num_tokens = draw_from.choice(VOCABULARIES)
    num_rows = draw_from.choice([1, 2, 7, 31]) if num_tokens < 50_000 else draw_from.choice([1, 3])
    tuning = draw_from.choice(TUNINGS)
    case = make_case(draw_from, num_rows, num_tokens, device="cuda", filters=draw_from.random() < 0.8)
    fed_XV = poisoned(case.logits_XV, padding_rows=2)
    settings = [torch.cat([column, column[:1], column[:1]]) for column in case.settings]
    probs = row_probs(fed_XV, *settings, filters=case.has_filters, tuning=tuning)
    probs_XV = all_probs(probs, num_rows)
    check_probs(probs_XV, case, oracle)
    uniforms_X = torch.rand(num_rows + 2, dtype=torch.float64, device="cuda")
    ids_X = draw(probs, torch.arange(num_rows + 2, device="cuda"), uniforms_X)
    check_draws(ids_X[:-2], probs_XV, uniforms_X[:-2])
    assert ((ids_X >= 0) & (ids_X < num_tokens)).all()


@pytest.mark.parametrize("seed", range(16))
def test_random_probabilities_and_draws(seed: int) -> None:
    draw_from = random.Random(seed)
    for _ in range(CASES_PER_SEED):
        check_case(draw_from)


@pytest.mark.parametrize("seed", range(4))
def test_random_masks_of_tokens(seed: int) -> None:
    draw_from, num_tokens = random.Random(seed), (37, 4097)[seed % 2]
    for _ in range(CASES_PER_SEED):
        check_allowed(draw_from, num_tokens, device="cuda")
        check_restrict(draw_from, num_tokens, device="cuda", tuning=TUNINGS[seed // 2 % 2])


@pytest.mark.parametrize("seed", range(8))
def test_random_judged_draws(seed: int) -> None:
    draw_from = random.Random(seed)
    num_tokens = VOCABULARIES[seed % len(VOCABULARIES)]
    for _ in range(CASES_PER_SEED):
        num_rows = draw_from.choice([2, 8, 32]) if num_tokens < 50_000 else 2
        tuning = draw_from.choice(TUNINGS)
        check_judged(draw_from, num_rows, num_tokens, device="cuda", tuning=tuning)


@pytest.mark.parametrize("seed", range(8))
def test_nonfinite_rows_are_reported(seed: int) -> None:
    draw_from = random.Random(seed)
    num_tokens = VOCABULARIES[seed % len(VOCABULARIES)]
    for _ in range(CASES_PER_SEED):
        num_rows = draw_from.choice([2, 8, 32]) if num_tokens < 50_000 else 4
        tuning = draw_from.choice(TUNINGS)
        check_nonfinite(draw_from, num_rows, num_tokens, device="cuda", tuning=tuning)


@pytest.mark.parametrize("seed", range(16))
def test_random_steps(seed: int) -> None:
    draw_from = random.Random(seed)
    num_tokens = draw_from.choice([37, 1025])
    run_steps(draw_from, num_tokens=num_tokens, device="cuda", tuning=TUNINGS[seed % len(TUNINGS)])


@pytest.mark.parametrize("filters", [False, True])
def test_a_row_does_not_depend_on_the_batch(filters: bool) -> None:
    case = make_case(random.Random(1), 64, 151_936, device="cuda", filters=filters)
    together = row_probs(case.logits_XV, *case.settings, filters=filters)
    for row in range(0, 64, 9):
        part = slice(row, row + 1)
        alone = row_probs(case.logits_XV[part], *(column[part] for column in case.settings), filters=filters)
        assert isinstance(alone, RowProbs) and isinstance(together, RowProbs)
        assert torch.equal(alone.numbers_XF[0, :6], together.numbers_XF[row, :6]), f"{row=}"
        assert torch.equal(alone.masses_XC[0], together.masses_XC[row]), f"{row=}"


def test_draws_follow_the_law() -> None:
    """A million draws of 200 tokens: chi-square stays far below that of a bias of 1e-3."""
    num_draws = 1 << 20
    logits_1V = 2 * torch.randn(1, 200, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    one = torch.ones(1, device="cuda", dtype=torch.float64)
    settings = (one, torch.zeros(1, device="cuda", dtype=torch.int64), one, 0 * one)
    probs = row_probs(logits_1V, *settings, filters=False)
    seeds = torch.arange(num_draws // 64, device="cuda")
    uniforms_M = uniforms(seeds, 0 * seeds, 0 * seeds, 64).flatten()
    counts_V = draw(probs, torch.zeros(num_draws, dtype=torch.int64, device="cuda"), uniforms_M).bincount(
        minlength=200
    )
    expected_V = all_probs(probs, 1)[0] * num_draws
    statistic = float(((counts_V - expected_V) ** 2 / expected_V.clamp(min=1e-9)).sum())
    assert statistic < 199 + 6 * (2 * 199) ** 0.5, f"{statistic=}"


def test_uniform_numbers_equal_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, steps = (torch.randint(-(2**62), 2**62, (500,), generator=generator) for _ in range(2))
    samples = torch.randint(0, 2**31, (500,), generator=generator)
    for num_draws in (15, 16_387):
        expected = uniforms(seeds, samples, steps, num_draws)
        found = uniforms(seeds.cuda(), samples.cuda(), steps.cuda(), num_draws)
        assert torch.equal(found.cpu(), expected)


def test_one_kept_token_and_massive_ties_at_full_size() -> None:
    """All logits equal: top-p keeps the first ids, and the whole row is searched."""
    logits_XV = torch.zeros(3, 151_936, device="cuda", dtype=torch.bfloat16)
    logits_XV[2, 77_777] = 30
    ones = torch.ones(3, device="cuda", dtype=torch.float64)
    settings = (ones, torch.tensor([0, 5, 0], device="cuda"), 0.25 * ones, 0 * ones)
    case = Case(logits_XV=logits_XV, settings=settings)
    probs = row_probs(logits_XV, *settings, filters=True)
    probs_XV = all_probs(probs, 3)
    check_probs(probs_XV, case, oracle)
    kept = probs_XV[torch.tensor([0, 0, 2]), torch.tensor([37_983, 37_984, 77_777])] > 0
    assert kept.tolist() == [True, False, True]


def test_nothing_waits_for_the_device_and_a_graph_repeats_the_step() -> None:
    case = make_case(random.Random(3), 8, 50_257, device="cuda")
    rows_X = torch.arange(8, device="cuda")
    uniforms_X = torch.rand(8, dtype=torch.float64, device="cuda")

    def step() -> Tensor:
        probs = row_probs(case.logits_XV, *case.settings, filters=True)
        return draw(probs, rows_X, uniforms_X)

    expected_X = step()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found_X = step()
    found_X.zero_()
    graph.replay()
    assert torch.equal(found_X, expected_X)


@pytest.mark.parametrize("seed", range(6))
def test_walks_on_a_gpu(seed: int) -> None:
    Walks(seed, "cuda", num_tokens=9000, num_drafts=7).check(filters=seed % 2 == 0)


def test_sixteen_bits_draw_from_what_they_store() -> None:
    """Frequencies of drafts after the anchor, by numbers that are spread evenly."""
    case = Walks(1, "cuda", num_tokens=4000, num_drafts=1, dtype=torch.bfloat16)
    counts_ZV, num = torch.zeros(7, 4000, dtype=torch.float64, device="cuda"), 400
    for index in range(num):
        case.uniforms_BJ.fill_((index + 0.5) / num)
        drafts_ZJ, q_ZJV, _ = case.run(filters=True)
        is_drawn_Z = drafts_ZJ[:, 0] >= 0
        counts_ZV[is_drawn_Z, drafts_ZJ[is_drawn_Z, 0]] += 1 / num
    assert (counts_ZV - q_ZJV[:, 0]).abs().max() <= 1.01 / num


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lookups_on_a_gpu(dtype: torch.dtype) -> None:
    found = [check_lookups(seed, device="cuda", columns=5000, dtype=dtype) for seed in range(12)]
    assert sum(found) > len(found)
