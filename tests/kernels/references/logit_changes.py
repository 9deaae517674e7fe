"""The definition of the changes of logits: one row, one token at a time, in Python numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Those of one lane, with the length of its prompt."""

    num_prompt: int = 1
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    ngram: int = 0
    free_from: int = 0
    biases: dict[int, float] = field(default_factory=dict)
    stops: frozenset[int] = frozenset()


def changed_reference(
    logits: Sequence[float],
    settings: Settings,
    known: Sequence[int],
    drafts: Sequence[int],
    position: int,
    *,
    rounded: Callable[[list[float]], list[float]],
    lowest: float,
) -> list[float]:
    """The row that predicts `position` after the `known` tokens and then these drafts."""
    history, answer = [*known, *drafts], Counter([*known[settings.num_prompt :], *drafts])
    before = set(history)
    found = rounded([logit + settings.biases.get(token, 0.0) for token, logit in enumerate(logits)])
    for token, logit in enumerate(found):
        if token in before:
            found[token] = logit / settings.repetition if logit > 0 else logit * settings.repetition
        if token in answer:
            found[token] -= settings.frequency * answer[token] + settings.presence
    found = rounded(found)
    if position < settings.free_from:
        for token in settings.stops:
            found[token] = lowest
    size = settings.ngram
    if size and position == len(history):
        for start in range(len(history) - size + 1):
            if history[start : start + size - 1] == history[len(history) - size + 1 :]:
                found[history[start + size - 1]] = lowest
    return found
