"""The split by skeleton: about 1 % each, disjoint, and blind to names, items and verbs. And the sample
builder."""

from __future__ import annotations

import random
import re

import pytest

from idlm.tasks import TASKS, ledger
from idlm.tasks.base import split_of_skeleton
from tests.unit.tasks.skeletons import LEXICONS, skeleton, split_of

TASK_LEVELS = [("ledger", "tiny"), ("ledger", "multi")]


def test_shares_are_one_percent_each():
    rng = random.Random(0)
    task = ledger.Ledger(level="tiny")
    drawn = [task.canonical_prompt(task.draw(rng)) for _ in range(20_000)]
    splits = [split_of_skeleton(text) for text in set(drawn)]
    assert len(splits) > 19_000
    for split in ("test", "validation"):
        # Standard deviation of the share is 0.0007.
        assert abs(splits.count(split) / len(splits) - 0.01) < 0.0035
    assert set(splits) == {"train", "validation", "test"}


@pytest.mark.sweep_but("ledger-multi")
@pytest.mark.parametrize(("name", "level"), TASK_LEVELS)
def test_splits_share_no_skeleton(name, level):
    task = TASKS.get(name)(level=level)
    nums = {"train": 20_000 if level == "tiny" else 1_000, "validation": 60, "test": 60}
    skeletons = {
        split: {skeleton(task.sample(index, split).prompt, LEXICONS[name]) for index in range(num)}
        for split, num in nums.items()
    }
    assert not skeletons["train"] & skeletons["test"]
    assert not skeletons["train"] & skeletons["validation"]
    assert not skeletons["validation"] & skeletons["test"]
    assert len(skeletons["test"]) > 55


def renamed(
    prompt: str, rng: random.Random, classes: list[tuple[str, ...]], entities: tuple[str, ...]
) -> str:
    """Replace every word of a class by another of it, and entities by a random injective map."""
    new_entities = dict(zip(entities, rng.sample(entities, len(entities)), strict=True))

    def replace(match: re.Match[str]) -> str:
        word = match.group()
        return new_entities.get(word) or next((rng.choice(group) for group in classes if word in group), word)

    return re.sub(r"[A-Za-z]+", replace, prompt)


def test_renaming_never_moves_a_problem():
    rng = random.Random(1)
    story = TASKS.get("ledger")(level="multi")
    for index in range(25):
        for split in ("test", "train"):
            prompt = story.sample(index, split).prompt
            other = renamed(prompt, rng, [ledger.ITEMS, *ledger.VERBS.values()], ledger.NAMES)
            assert other != prompt and split_of("ledger", other) == split
