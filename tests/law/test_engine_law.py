"""The sampling law of whole responses of the whole engine, against exhaustive enumeration by transformers.

The toy has 5 tokens, mask id included; tested are the joints of tokens 0..3 and of tokens 4..7. By
default 2e4 draws of one case; those of every case, alone and together:

    .venv/bin/python -m pytest tests/law/test_engine_law.py -m "sweep or not sweep"
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from idlm.infer.decoders.base import rows_by_mode
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.runtime.stride_controller import StepLoad, StepTimes
from idlm.infer.runtime.worker import InflightStep
from tests.law.harness import (
    MASK_ID,
    NEUTRAL,
    PER_REQUEST,
    PROMPT,
    WINDOW,
    Sampled,
    assert_fits,
    build_engine,
    exact_law,
    fit,
    fits,
    misfits,
    sample,
    worst,
)

NUM_DRAWS, MIXED = 20_000, 5_000
FAMILY_LEVEL = 1e-6
NUM_TESTS = 80
"""At least the number of chi-square tests of this file; each gets an equal part of the family's level."""
LEVEL = FAMILY_LEVEL / NUM_TESTS
CASES = [
    *((4, name) for name in STRATEGIES.names()),
    (2, "alternate"),
    (3, "branch"),
    (4, "branch_2"),
    (5, "branch_3"),
]
MIXED_PROMPT = (0, 3, 1)
MIXED_SETTINGS = (
    NEUTRAL,
    replace(NEUTRAL, temperature=0.6, top_k=3),
    replace(NEUTRAL, temperature=1.5, top_p=0.8),
    replace(NEUTRAL, temperature=0.8, top_k=4, top_p=0.9),
)


@functools.cache
def _draws(law_toy: Path, stride: int, strategy: str) -> Tensor:
    """Responses [B, 8] that fit the law on their own; cases share no seed."""
    engine = build_engine(law_toy, "isd", stride=stride, rejection_strategy=strategy)
    first_round = CASES.index((stride, strategy)) * (NUM_DRAWS // PER_REQUEST)
    sampled = sample(engine, [(PROMPT, NEUTRAL)], NUM_DRAWS, first_round=first_round)
    assert_fits(law_toy, sampled, LEVEL)
    assert 0.3 < sampled.acceptance < 0.9, sampled.acceptance
    assert engine.pool.num_free == engine.pool.num_pages
    return sampled.draws[PROMPT, NEUTRAL]


@pytest.mark.sweep_but("4-branch")
@pytest.mark.parametrize(("stride", "strategy"), CASES)
def test_isd_emits_the_ar_law(law_toy: Path, stride: int, strategy: str) -> None:
    """A mean relative shift of 11 % shows (probability 0.99 at `LEVEL`)."""
    _draws(law_toy, stride, strategy)


@pytest.mark.sweep
@pytest.mark.parametrize("num_cases", [4, len(CASES)])
def test_cases_together_emit_the_ar_law(law_toy: Path, num_cases: int) -> None:
    """A mean relative shift that cases share shows from 6 % on in stride 4, and from 4 % on in all."""
    draws_BT = torch.cat([_draws(law_toy, *case) for case in CASES[:num_cases]])
    assert_fits(law_toy, Sampled(draws={(PROMPT, NEUTRAL): draws_BT}, acceptance=0.0), LEVEL)


@pytest.mark.sweep
@pytest.mark.parametrize("adaptive", [False, True])
def test_requests_of_one_token_per_pass_emit_the_ar_law(law_toy: Path, adaptive: bool) -> None:
    """In the same passes as others, whose lanes they take over."""
    single = replace(NEUTRAL, temperature=0.8, decoder_options={"stride": 1})
    engine = build_engine(law_toy, "isd", stride=4, adaptive=adaptive)
    sampled = sample(engine, [(PROMPT, NEUTRAL), (PROMPT, single)], NUM_DRAWS // 2)
    found = fits(law_toy, sampled)
    assert len(found) == 4 and not misfits(found, LEVEL), found


@pytest.mark.sweep
def test_changing_modes_keeps_the_law(law_toy: Path) -> None:
    """Strides and strategies change from pass to pass, at random and with the last commit."""
    engine = build_engine(law_toy, "isd", stride=4, adaptive=True)
    rng, used = random.Random(1), set()

    def choose(load: StepLoad) -> int:
        num_sequences = load.num_sequences
        newest = engine.table.tokens_ZL[:num_sequences].gather(
            1, (engine.table.num_known_Z[:num_sequences, None] - 1).clamp(min=0)
        )
        used.add(number := (rng.randrange(100) + int(newest.sum())) % len(engine.decoder.modes))
        return number

    engine._stride_controller.choose = choose
    sampled = sample(engine, [(PROMPT, NEUTRAL)], NUM_DRAWS)
    assert_fits(law_toy, sampled, LEVEL)
    assert used == set(range(10))


@pytest.mark.sweep
def test_the_controller_keeps_the_law_while_the_load_changes(
    law_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its choices follow a clock, the load and what was accepted, of each request too: no later tokens."""
    engine = build_engine(law_toy, "isd", stride=4, adaptive=True)
    controller, rng, used = engine._stride_controller, random.Random(2), set()
    assert controller is not None
    widths = rows_by_mode(engine.decoder, 0)
    sizes = itertools.product(range(len(widths)), (1, 16, 256))
    measured = {(mode, size): max(4e-3, 3e-5 * size * widths[mode]) for mode, size in sizes}
    controller.times, choose = StepTimes(measured=measured, widths=widths), controller.choose

    def recorded(load: StepLoad) -> int:
        used.add(number := choose(load))
        return number

    monkeypatch.setattr(controller, "choose", recorded)
    monkeypatch.setattr(InflightStep, "seconds", lambda _: rng.uniform(4e-3, 12e-3))
    draws, seed = [], 0
    while len(draws) < NUM_DRAWS // 2:
        seed += 1
        num = rng.choice((1, 5, 40, 300, 1000))
        completions = engine.generate([list(PROMPT)], replace(NEUTRAL, seed=seed, n=num))
        draws += [completion.token_ids for completion in completions]
    sampled = Sampled(draws={(PROMPT, NEUTRAL): torch.tensor(draws)}, acceptance=0.0)
    assert_fits(law_toy, sampled, LEVEL)
    assert len(used) >= 4, "strides and strategies changed"


def test_ar_emits_the_ar_law(law_toy: Path) -> None:
    """The baseline decoder is exact too, and the mask id is drawn like any other token."""
    sampled = sample(build_engine(law_toy, "ar"), [(PROMPT, NEUTRAL)], 8_000)
    assert_fits(law_toy, sampled, LEVEL)
    assert (sampled.draws[PROMPT, NEUTRAL] == MASK_ID).any()


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["branch", "tree"])
def test_settings_of_one_batch_keep_their_own_distributions(law_toy: Path, strategy: str) -> None:
    """Temperature, top-k and top-p differ between requests that share every forward pass."""
    engine = build_engine(law_toy, "isd", stride=4, rejection_strategy=strategy)
    sampled = sample(engine, [(MIXED_PROMPT, params) for params in MIXED_SETTINGS], MIXED, per_request=50)
    found = assert_fits(law_toy, sampled, LEVEL)
    assert len(found) == 2 * len(MIXED_SETTINGS)


def test_the_published_rule_is_seen(law_toy: Path) -> None:
    """Power of the test: the argmax-draft rule fails the same check by many decades."""
    engine = build_engine(law_toy, "isd", stride=2, rejection_strategy="cold", acceptance="published")
    sampled = sample(engine, [(PROMPT, NEUTRAL)], 5_000)
    found = fits(law_toy, sampled)
    assert len(misfits(found, LEVEL)) == 2
    assert worst(found.values()) < 1e-100
    completion = engine.generate([PROMPT], replace(NEUTRAL))[0]
    assert completion.exactness == "lossy"


def test_relaxed_acceptance_is_detected_and_labelled(law_toy: Path) -> None:
    engine = build_engine(law_toy, "isd", stride=4, rejection_strategy="tree")
    relaxed = replace(NEUTRAL, tau=1.0)
    draws = sample(engine, [(PROMPT, relaxed)], 10_000).draws[PROMPT, relaxed]
    start, _ = exact_law(law_toy, PROMPT, NEUTRAL)
    powers = torch.tensor([125, 25, 5, 1])
    assert fit((draws[:, :WINDOW] * powers).sum(1), start).p_value < LEVEL
    assert engine.generate([PROMPT], relaxed)[0].exactness == "lossy"


def test_the_check_accepts_the_law_and_rejects_a_small_shift(law_toy: Path) -> None:
    """The statistic is calibrated on draws from the law, and detects 3 % of mass in wrong places."""
    law_C, other_C = exact_law(law_toy, PROMPT, NEUTRAL)
    generator = torch.Generator().manual_seed(0)
    p_values = [
        fit(torch.multinomial(law_C, 20_000, True, generator=generator), law_C).p_value for _ in range(200)
    ]
    assert 0.4 < sum(p_values) / len(p_values) < 0.6
    assert min(p_values) > 1e-5
    shifted = torch.multinomial(0.97 * law_C + 0.03 * other_C.flip(0), 200_000, True, generator=generator)
    found = fit(shifted, law_C)
    assert found.p_value < LEVEL
    assert found.total_variation > found.bound


def test_one_exact_law_sums_to_one_and_names_every_response(law_toy: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for law_C in exact_law(law_toy, MIXED_PROMPT, MIXED_SETTINGS[3]):
            assert law_C.shape == (625,)
            assert float(law_C.sum()) == pytest.approx(1.0, abs=1e-9)
            assert bool((law_C == 0).any())
