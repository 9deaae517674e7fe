"""The nearest known word to a misspelt one, for error messages; vocabularies here are small."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of two neighbours that turn `a` into `b`."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        two_before, before, row = before, row, [i]
        for j, char_b in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (char_a != char_b))
            if i > 1 and j > 1 and char_a == b[j - 2] and a[i - 2] == char_b:
                cost = min(cost, two_before[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The member of `known` with the fewest edits from `word`; None when nothing is even half alike.

    A word without a dot is also compared with the last segment of dotted keys, so that `temprature` finds
    `sampling.temperature`; the whole key wins ties.
    """
    best: tuple[float, str] | None = None
    for candidate in known:
        forms = [(candidate, 0.0)]
        if "." in candidate and "." not in word:
            forms.append((candidate.rpartition(".")[2], 0.5))
        for form, penalty in forms:
            length = max(len(word), len(form))
            limit = min(max(2.0, length / 2), length - 1, best[0] if best else length)
            if abs(len(word) - len(form)) + penalty > limit:
                continue
            distance = edit_distance(word, form) + penalty
            if distance <= limit and (best is None or (distance, candidate) < best):
                best = (distance, candidate)
    return None if best is None else best[1]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The sentence part that follows an unknown word: its nearest neighbour, or nothing; nothing is near what
    is no text.
    """
    match = nearest(word, known) if isinstance(word, str) else None
    return "" if match is None else f"; did you mean {match!r}?"
