"""Train, validation and test splits by a hash of the prompt's skeleton: renaming cannot leak a problem into
training.

The skeleton is the prompt with entities, items and verbs replaced by canonical words. A sample of a split is
found by rejection: candidates come from the sample's own random stream until one hashes into the split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import TypeVar, get_args

from idlm.errors import UserError
from idlm.tasks.base import Split

SPLITS: tuple[str, ...] = get_args(Split)
TEST_SHARE = 0.01
VALIDATION_SHARE = 0.01

_WORD = re.compile(r"[A-Za-z]+")
_TEST_BOUND = int(TEST_SHARE * 2**64)
_VALIDATION_BOUND = int((TEST_SHARE + VALIDATION_SHARE) * 2**64)

Draft = TypeVar("Draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lexicon:
    """The words of a task that carry no structure."""

    entities: frozenset[str]
    """Names or variables; replaced by `canonical_entity(i)` in order of first appearance."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Items and verbs, each with the canonical word of its class."""


def canonical_entity(idx: int) -> str:
    """Return the name that the `idx`-th entity has in a skeleton."""
    return f"E{chr(ord('a') + idx)}"


def skeleton(prompt: str, lexicon: Lexicon) -> str:
    """Return the prompt with every entity, item and verb normalised; numbers and structure stay."""
    seen: dict[str, str] = {}

    def canonical(match: re.Match[str]) -> str:
        word = match.group()
        if word in lexicon.entities:
            return seen.setdefault(word, canonical_entity(len(seen)))
        return lexicon.words.get(word, word)

    return _WORD.sub(canonical, prompt)


def split_of_skeleton(text: str) -> Split:
    """Return the split of a skeleton: 1 % test, 1 % validation, the rest train."""
    value = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
    if value < _TEST_BOUND:
        return "test"
    return "validation" if value < _VALIDATION_BOUND else "train"


def draw_in_split(
    fingerprint: str,
    index: int,
    split: str,
    *,
    draw: Callable[[Random], Draft],
    skeleton_of: Callable[[Draft], str],
) -> tuple[Draft, Random]:
    """Return the first candidate of stream (fingerprint, split, index) that lies in `split`, and the stream.

    `fingerprint` identifies the task's configuration. About 1 draw is needed for train and 100 for the other
    splits. Only `Random.random` may be used on the stream, whose values Python keeps stable across versions.
    """
    if split not in SPLITS:
        raise UserError(
            "IDLM-0223", f"split is {split!r}, allowed are {', '.join(SPLITS)}", fix="choose one of these"
        )
    if index < 0:
        raise UserError(
            "IDLM-0224", f"sample index is {index}, it must be 0 or more", fix="start counting at 0"
        )
    digest = blake2b(f"{fingerprint}|{split}|{index}".encode(), digest_size=16).digest()
    rng = Random(int.from_bytes(digest, "big"))
    while True:
        candidate = draw(rng)
        if split_of_skeleton(skeleton_of(candidate)) == split:
            return candidate, rng
