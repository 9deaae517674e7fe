"""The sampling kernels in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import random

import pytest
import torch

from idlm.kernels import backend
from idlm.kernels.sampling import RowProbs, Tuning, draw, random_words, row_probs, uniforms
from idlm.kernels.sampling.draws import MAX_DRAWS
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
from tests.kernels.references.sampling import probs_reference

SMALL = Tuning(chunk=32, tile=4, capacity=64, group=2, sample=64, step=128)
WIDE = Tuning(chunk=128, tile=2, capacity=128, step=256, sample=128)
# Lists of 16 overflow, or are out of too many chunks, so the whole row is searched.
CRAMPED = Tuning(chunk=16, tile=2, capacity=16, listed=4, group=4, sample=32, step=64)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_kernels", lambda device: True)


@pytest.mark.sweep_but("1-2-tuning4", "300-3-tuning2")
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "tuning"),
    [(37, 8, SMALL), (131, 5, CRAMPED), (300, 3, SMALL), (700, 2, WIDE), (1, 2, SMALL)],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_probabilities_and_draws(num_tokens: int, num_rows: int, tuning: Tuning) -> None:
    draw_from = random.Random(num_tokens)
    case = make_case(draw_from, num_rows, num_tokens)
    fed_XV = poisoned(case.logits_XV, padding_rows=1)
    settings = tuple(torch.cat([column, column[:1]]) for column in case.settings)
    probs = row_probs(fed_XV, *settings, filters=True, tuning=tuning)
    probs_XV = all_probs(probs, num_rows)
    check_probs(probs_XV, case, probs_reference)
    uniforms_X = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows_X = torch.arange(num_rows + 1)
    ids_X = draw(probs, rows_X, torch.cat([uniforms_X, uniforms_X[:1]]))
    check_draws(ids_X[:-1], probs_XV, uniforms_X)
    assert 0 <= ids_X[-1] < num_tokens


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_filters_and_at_the_ends_of_the_unit_interval() -> None:
    case = make_case(random.Random(5), 6, 300, filters=False)
    probs = row_probs(case.logits_XV, *case.settings, filters=False, tuning=SMALL)
    probs_XV = all_probs(probs, 6)
    check_probs(probs_XV, case, probs_reference)
    for uniform in (2.0**-33, 1 - 2.0**-33):
        uniforms_X = torch.full((6,), uniform, dtype=torch.float64)
        check_draws(draw(probs, torch.arange(6), uniforms_X), probs_XV, uniforms_X)
    assert draw(probs, torch.tensor([-1, 2]), torch.tensor([0.5, 0.5]).double())[0] == 0


@pytest.mark.sweep_but("2-4-tuning1")
@pytest.mark.parametrize(("num_tokens", "num_rows", "tuning"), [(131, 4, CRAMPED), (2, 4, SMALL)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_judged_draws(num_tokens: int, num_rows: int, tuning: Tuning) -> None:
    check_judged(random.Random(num_tokens), num_rows, num_tokens, device="cpu", tuning=tuning)


@pytest.mark.sweep_but("1-4-tuning1")
@pytest.mark.parametrize(("num_tokens", "num_rows", "tuning"), [(131, 6, CRAMPED), (1, 4, SMALL)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nonfinite_rows_are_reported(num_tokens: int, num_rows: int, tuning: Tuning) -> None:
    check_nonfinite(random.Random(num_tokens), num_rows, num_tokens, device="cpu", tuning=tuning)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_does_not_depend_on_the_others() -> None:
    case = make_case(random.Random(11), 3, 200)
    assert case.has_filters
    together = row_probs(case.logits_XV, *case.settings, filters=True, tuning=SMALL)
    assert isinstance(together, RowProbs)
    for row in (0, 2):
        part = slice(row, row + 1)
        alone = row_probs(
            case.logits_XV[part], *(column[part] for column in case.settings), filters=True, tuning=SMALL
        )
        assert isinstance(alone, RowProbs)
        assert torch.equal(alone.numbers_XF[0, :6], together.numbers_XF[row, :6])
        assert torch.equal(alone.masses_XC[0], together.masses_XC[row])


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sampled_bracket_of_a_smooth_row() -> None:
    tuning = Tuning(chunk=32, capacity=32, group=8, sample=64, step=64)
    logits_XV = torch.randn(2, 250, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(2, dtype=torch.float64)
    settings = (ones, torch.tensor([0, 70]), 0.6 * ones, 0 * ones)
    case = Case(logits_XV=logits_XV, settings=settings)
    probs = row_probs(logits_XV, *settings, filters=True, tuning=tuning)
    check_probs(all_probs(probs, 2), case, probs_reference)


# Sequences and masks. The first has 4 rejections; in the second tau decides; the last has no masks.
@pytest.mark.sweep_but("3-sizes2-9")
@pytest.mark.parametrize(
    ("seed", "sizes", "num_tokens"),
    [(54, (6, 1), 40), (11, (4, 3), 11), (3, (2, 0), 9)],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps(seed: int, sizes: tuple[int, int], num_tokens: int) -> None:
    tuning = Tuning(chunk=16, tile=2, capacity=32, group=2, step=64)
    run_steps(random.Random(seed), num_tokens=num_tokens, tuning=tuning, sizes=sizes, count=2)


@pytest.mark.sweep_but("1-2-tuning2")
@pytest.mark.parametrize(
    ("num_tokens", "num_drafts", "tuning"),
    [(37, 3, SMALL), (131, 1, CRAMPED), (1, 2, SMALL)],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masks_of_tokens(num_tokens: int, num_drafts: int, tuning: Tuning) -> None:
    for seed in range(2):
        draw_from = random.Random(seed + num_tokens)
        check_allowed(draw_from, num_tokens)
        check_restrict(draw_from, num_tokens, tuning=tuning, num_drafts=num_drafts)


def test_uniform_numbers_equal_the_plain_ones() -> None:
    seeds = torch.tensor([0, -5, 2**62 + 7])
    samples, steps = torch.tensor([0, 3, 1]), torch.tensor([0, 9, 2**33 + 1])
    lanes = torch.tensor([2, 0, 2])
    for num_draws in (7, 2 * MAX_DRAWS + 3):
        streams = (stream[lanes, None] for stream in (seeds, samples, steps))
        expected = (random_words(*streams, torch.arange(num_draws)).double() + 0.5) * 2.0**-32
        assert torch.equal(uniforms(seeds, samples, steps, num_draws, lanes_B=lanes), expected)
        of_sequences = uniforms(seeds, samples, steps[lanes], num_draws, lanes_B=lanes, steps_by_lane=False)
        assert torch.equal(of_sequences, expected)
