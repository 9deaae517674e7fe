"""The skeleton of a prompt, read from its text without code of the generators, and the split it lies in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from idlm.tasks import Split, ledger, recall
from idlm.tasks.base import canonical_entity, split_of_skeleton

_WORD = re.compile(r"[A-Za-z]+")
_RECORDS = re.compile(r" ([a-z]{2})([a-z])\.")
_FILLER = re.compile(r" [A-Z][a-z]+(?: now)? [a-z]+ [a-z]+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lexicon:
    """The words of a task that carry no structure."""

    entities: frozenset[str]
    """Names or variables; replaced by `canonical_entity(i)` in order of first appearance."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Items and verbs, each with the canonical word of its class."""


LEXICONS = {
    "ledger": Lexicon(
        entities=frozenset(ledger.NAMES),
        words={word: group[0] for group in (ledger.ITEMS, *ledger.VERBS.values()) for word in group},
    ),
    "recall": Lexicon(entities=frozenset(recall.KEYS)),
}


def skeleton(prompt: str, lexicon: Lexicon) -> str:
    """Return the prompt with every entity, item and verb normalised; numbers and structure stay."""
    seen: dict[str, str] = {}

    def canonical(match: re.Match[str]) -> str:
        word = match.group()
        if word in lexicon.entities:
            return seen.setdefault(word, canonical_entity(len(seen)))
        return lexicon.words.get(word, word)

    return _WORD.sub(canonical, prompt)


def split_of(name: str, prompt: str) -> Split:
    """Return the split of a prompt of task `name`, whatever entities, items, verbs and filler it uses."""
    if name == "recall":
        prompt = _RECORDS.sub(r" \1 \2.", _FILLER.sub("", prompt))
    return split_of_skeleton(skeleton(prompt, LEXICONS[name]))
