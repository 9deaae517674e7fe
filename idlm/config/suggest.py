"""Suggestions for unknown words in errors: other names of our keys, and the most similar known word."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

_NAMES = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text(encoding="utf-8"))
ALIASES = {name: tuple(keys.split()) for keys, names in _NAMES["ours"].items() for name in names.split()}
"""The keys that the last segment of a written key may mean. The first one that a command has counts."""
ABSENT = {name: what for what, names in _NAMES["absent"].items() for name in names.split()}
"""What a name of other engines stands for, of which idlm has nothing."""


def absent(key: str) -> str | None:
    """The sentence part that follows an unknown key of other engines for what idlm lacks; None for others."""
    what = ABSENT.get(key.rpartition(".")[2].replace("-", "_").lower())
    return None if what is None else f"; other engines have it, and idlm has no {what}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the member of `known` that is most like `word`, or None if none is similar. A word without a dot
    is also compared with the last segment of dotted keys, so that `temprature` matches
    `sampling.temperature`; the whole key wins ties."""
    forms = {key.rpartition(".")[2] if "." not in word else key: key for key in known}
    forms |= {key: key for key in known}
    near = difflib.get_close_matches(word, forms, n=1, cutoff=0.5)
    # Half of the letters in the same order is little: tyni has that of tiny, but response of messages, too.
    has_letters = bool(near) and difflib.SequenceMatcher(None, near[0], word).quick_ratio() >= 0.6
    return forms[near[0]] if has_letters else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the sentence part that follows an unknown word: that only other engines have it, its nearest
    neighbour, or nothing."""
    if isinstance(word, str) and (lacking := absent(word)) is not None:
        return lacking
    match = nearest(word, known) if isinstance(word, str) else None
    return "" if match is None else f"; did you mean {match!r}?"
