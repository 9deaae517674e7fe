"""Intervals cover the truth as often as they say."""

from __future__ import annotations

import random

import pytest

from idlm.infer.evaluation.statistics import paired_difference, share_interval


def test_wilson_against_a_published_value() -> None:
    """Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662."""
    interval = share_interval([1.0] * 81 + [0.0] * 182)
    assert interval == pytest.approx((81 / 263, 0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_interval_has_width_zero(value: float) -> None:
    interval = share_interval([value] * 20)
    assert interval.high - interval.low > 0.1
    assert interval.low <= value <= interval.high
    paired = paired_difference([value] * 20, [value] * 20)
    assert paired.value == 0 and paired.low < -0.05 and paired.high > 0.05


def test_pairs_give_the_sign_and_the_right_coverage() -> None:
    """Pairs that agree in 80 % of the prompts; the true difference is 0.04."""
    rng, covered, rounds = random.Random(0), 0, 600
    for _ in range(rounds):
        pairs = rng.choices([(1, 1), (0, 0), (1, 0), (0, 1)], weights=[50, 30, 12, 8], k=150)
        found = paired_difference([float(a) for a, _ in pairs], [float(b) for _, b in pairs])
        covered += found.low <= 0.04 <= found.high
    assert 0.92 <= covered / rounds <= 0.985
    assert paired_difference([1, 1, 1], [0, 0, 1]).value == pytest.approx(2 / 3)


def test_shares_of_several_answers_count_by_prompt() -> None:
    assert share_interval([0.5, 1.0]).value == 0.75
    assert paired_difference([0.5, 1.0], [0.0, 1.0]).value == 0.25
