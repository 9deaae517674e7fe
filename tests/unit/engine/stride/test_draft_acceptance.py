"""What tests of drafts say of the next ones: they are remembered for long, until new ones contradict them."""

from __future__ import annotations

import random

import pytest

from idlm.infer.runtime.draft_acceptance import MAX_WINDOW, DraftAcceptance


def _observe(acceptance: DraftAcceptance, chance: float, num: int, *, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num):
        accepted = next((index for index in range(3) if rng.random() >= chance), 3)
        acceptance.observe(accepted, min(3, accepted + 1), from_masks=True)
        acceptance.average()


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.05, 0.6), (0.9, 0.3), (0.95, 0.0)])
def test_a_jump_is_believed_after_a_window(before: float, after: float) -> None:
    acceptance = DraftAcceptance([0.85] * 3)
    _observe(acceptance, before, 5000)
    assert acceptance.average()[0] == pytest.approx(before, abs=0.03)
    _observe(acceptance, after, MAX_WINDOW, seed=1)
    assert acceptance.average()[0] == pytest.approx(after, abs=0.15)
    if after > before:
        assert acceptance.average()[2] > (before + after) / 2, "positions that were hardly tested follow"


@pytest.mark.parametrize("chance", [0.02, 0.5, 0.9])
def test_chance_alone_makes_it_forget_nothing(chance: float) -> None:
    acceptance = DraftAcceptance([chance] * 3)
    _observe(acceptance, chance, 6000)
    assert acceptance._from_masks[0].tested > 2000
    assert acceptance.average()[0] == pytest.approx(chance, abs=0.03)


def test_drafts_from_verification_rows_count_for_requests_alone() -> None:
    acceptance = DraftAcceptance([0.8] * 3)
    for _ in range(100):
        acceptance.observe(0, 1, from_masks=False)
    assert acceptance.average() == pytest.approx([0.8] * 3)
    [chances] = acceptance.classes([(33, 300)])
    assert chances == pytest.approx([0.8] * 3, abs=0.05), "a request that accepts as little as all do"


def test_requests_are_sorted_by_what_they_accept() -> None:
    acceptance = DraftAcceptance([0.8] * 3)
    classes = acceptance.classes([(290, 300)] * 3 + [(30, 300)] * 2 + [(0, 0)])
    (low, mean, high), counts = sorted(classes), [classes[key] for key in sorted(classes)]
    assert counts == [2, 1, 3]
    assert mean == pytest.approx([0.8] * 3, abs=0.01)
    assert low[0] < 0.3 and high[0] > 0.9
    assert list(acceptance.classes([]).values()) == [1], "an average request"
