"""Samples that are held out: chosen by content, never on both sides, and never all of them."""

from __future__ import annotations

import numpy as np
import pytest

from idlm.train.config.schema import EvalConfig
from idlm.train.data.held_out import held_out_flags
from idlm.train.data.layout import Sample

Pair = tuple[list[int], list[int]]


class Pairs:
    """A finite source of pairs of prompt and answer."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs, self.num_samples = pairs, len(pairs)

    def sample(self, index: int) -> Sample:
        return Sample.from_pair(*self.pairs[index])


def distinct(num: int, *, prompt: bool = True) -> list[Pair]:
    return [([1, 2, number] if prompt else [1], [number, 5]) for number in range(10, 10 + num)]


def held_out(pairs: list[Pair], *, seed: int = 0, **config: float) -> list[Pair]:
    flags = held_out_flags(EvalConfig(**config), Pairs(pairs), seed=seed)  # type: ignore[arg-type]
    return [] if flags is None else [pairs[index] for index in np.flatnonzero(flags)]


@pytest.mark.parametrize("prompt", [True, False], ids=["pairs", "texts"])
@pytest.mark.parametrize(
    ("num", "share", "expected"),
    [
        (7, 0.5, 0),
        (8, 0.005, 1),
        (40, 0.005, 4),
        (500, 0.005, 16),
        (500, 0.2, 100),
        (40, 0, 0),
    ],
)
def test_a_share_is_held_out_and_of_little_data_some(
    num: int, share: float, expected: int, prompt: bool
) -> None:
    assert len(held_out(distinct(num, prompt=prompt), holdout=share)) == expected


def test_evaluations_get_a_sample_of_any_data_that_can_be_divided() -> None:
    assert [len(held_out(distinct(num), every=5)) for num in (1, 2, 7)] == [0, 1, 1]


def test_the_choice_follows_from_the_content_and_the_seed() -> None:
    pairs = distinct(100)
    chosen = held_out(pairs)
    assert sorted(held_out(pairs[::-1])) == sorted(chosen), "not from the order"
    assert held_out(pairs) == chosen != held_out(pairs, seed=1)


def test_answers_to_one_prompt_and_copies_stay_on_one_side() -> None:
    pairs = [(prompt, [*answer, number]) for prompt, answer in distinct(60) for number in (7, 8)]
    pairs += pairs[:20]
    prompts = [tuple(prompt) for prompt, _ in held_out(pairs, holdout=0.3)]
    assert prompts
    for prompt in set(prompts):
        assert prompts.count(prompt) == [tuple(other) for other, _ in pairs].count(prompt)


def test_a_prompt_of_most_samples_is_not_held_out() -> None:
    common = [([1, 2, 3], [number]) for number in range(10, 40)]
    assert held_out(common) == [], "nothing would be left to train on"
    rare = distinct(3)
    assert all(pair in rare for pair in held_out(common + rare)) and held_out(common + rare)


def test_held_out_data_of_its_own_leaves_the_file_whole() -> None:
    for config in (EvalConfig(path="other.jsonl"), EvalConfig(split="test")):
        assert held_out_flags(config, Pairs(distinct(40)), seed=0) is None
