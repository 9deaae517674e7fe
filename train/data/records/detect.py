"""Which shape the records of a source have, and which of their keys that shape leaves out.

All records of one source have one shape: a file of several shapes is a mistake far more often than intended.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from idlm.errors import UserError
from idlm.text.thoughts import REASONING_KEYS
from idlm.text.transcripts import is_transcript
from idlm.train.data.base import Encoder
from idlm.train.data.layout import Sample
from idlm.train.data.records.parts import (
    LABEL_KEYS,
    ROLE_KEYS,
    ROLES,
    TEXT_EXTRAS,
    THOUGHT_WORDS,
    is_empty,
    is_mode,
    may_weigh,
    present,
    shown,
    unusable,
)
from idlm.train.data.records.shapes import SHAPES, Keys, Record

AUTO = "auto"
SHAPE_CHOICES = (AUTO, *SHAPES)
MIN_LIKENESS = 0.6
NO_MATCH = 4


def detect_shape(record: Record, wanted: str, *, origin: str) -> str:
    """Return the name of the record's shape; UserError IDLM-0202 where no shape or more than one fits. Other
    names than a shape's own, and keys without a value, count only where no shape fits otherwise."""
    if wanted != AUTO:
        if _match(record, wanted)[0] == NO_MATCH:
            raise _unknown(record, origin, f"is not of data.shape={wanted}")
        return wanted
    ranks = {name: _match(record, name)[0] for name in SHAPES}
    best = min(ranks.values())
    fitting = [name for name, rank in ranks.items() if rank == best < NO_MATCH]
    if "answers" in fitting:
        fitting = ["answers"]
    if not fitting:
        raise _unknown(record, origin, "has none of the known shapes")
    if len(fitting) > 1:
        raise unusable(
            f"{origin} fits several shapes: {', '.join(fitting)}",
            fix=f"choose one of them: {' or '.join(f'data.shape={name}' for name in fitting)}",
        )
    if fitting == ["preference"]:
        raise unusable(
            f"{origin} is a preference: it has the keys {sorted(record)}",
            fix="set data.shape=preference to train on the chosen answers alone, or write messages or "
            "prompt and response",
        )
    if fitting == ["text"] and is_transcript(str(record["text"])):
        raise unusable(
            f"{origin} has text={shown(record['text'])}, which holds the turns of a chat",
            fix=f"write conversations as {SHAPES['messages'].example}, or set data.shape=text to train on "
            "the words of users too",
        )
    return fitting[0]


def check_shape(record: Record, shape: str, wanted: str, *, origin: str, first: str) -> None:
    """Raise UserError IDLM-0230 where the record does not have the shape of the first record, IDLM-0202 where
    it is more than a text."""
    if _match(record, shape)[0] == NO_MATCH:
        raise UserError(
            "IDLM-0230",
            f"{origin} has the keys {sorted(record)}, but {first} is of the shape {shape!r}: "
            f"{SHAPES[shape].example}",
            fix="delete records that lack a part (null in a table), or put each shape into a file of its own "
            "and give the files as data.sources=[{path: FILE}, {path: FILE}]",
        )
    extra = sorted(present(record, TEXT_EXTRAS)) if shape == "text" and wanted == AUTO else []
    if extra:
        raise unusable(
            f"{origin} has {', '.join(extra)} next to a text, so it is part of a conversation",
            fix=f"write conversations as {SHAPES['messages'].example}, or set data.shape=text to train on "
            "the texts alone",
        )


def samples_of(
    record: Record, shape: str, encoder: Encoder, *, origin: str
) -> tuple[list[Sample], frozenset[str]]:
    samples, ignored = SHAPES[shape].encode(record, _keys(record, shape), encoder, origin)
    return samples, frozenset(ignored)


def ignored_keys(record: Record, shape: str) -> list[str]:
    read = {*_match(record, shape)[1][0], *SHAPES[shape].also}
    modes = {key for key in REASONING_KEYS if is_mode(record.get(key))}
    return [key for key, value in record.items() if key not in read - modes and not is_empty(value)]


@functools.cache
def is_read(key: str, shape: str) -> bool:
    """Return whether a key is read or refused in records of a shape."""
    found = SHAPES[shape]
    own = (key for keys in (*found.keys, *found.aliases) for key in keys)
    known = {*own, *found.also, *found.checked, *LABEL_KEYS}
    return key in known or may_weigh(key, 0) or THOUGHT_WORDS.fullmatch(key) is not None


def wanted_columns(names: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the columns that a shape which fits may have, all where none fits, for an error to name them;
    and the others, which are not read."""
    fitting = [shape for shape in SHAPES if _match(dict.fromkeys(names), shape)[1]]
    wanted = [name for name in names if not fitting or any(is_read(name, shape) for shape in fitting)]
    return wanted, tuple(name for name in names if name not in wanted)


def _match(record: Record, name: str) -> tuple[int, list[Keys]]:
    """Return the sets of keys of a shape that a record has, and their rank: 0 for the shape's own names, 1
    for other names, 2 and 3 for those with keys that hold null, `NO_MATCH` without any."""
    shape, given = SHAPES[name], {key for key, value in record.items() if value is not None}
    options = [(held, names) for held in (given, record.keys()) for names in (shape.keys, shape.aliases)]
    for rank, (held, names) in enumerate(options):
        found = [keys for keys in names if held >= set(keys)]
        if found:
            return rank, found
    return NO_MATCH, []


def _keys(record: Record, shape: str) -> Keys:
    _, found = _match(record, shape)
    if len(found) > 1 and found[0] in SHAPES[shape].aliases:
        options = ", ".join(" with ".join(keys) for keys in found)
        own = " and ".join(SHAPES[shape].keys[0])
        raise unusable(
            f"the record may be read in several ways: {options}",
            fix=f"rename the keys that are meant to {own}",
        )
    return found[0]


def _unknown(record: Record, origin: str, problem: str) -> UserError:
    """The error about a record without a known shape; names the shape with the most similar keys."""
    candidates = [
        (name, keys)
        for name, shape in SHAPES.items()
        for keys in (*shape.keys, *shape.aliases)
        if name != "answers"
    ]

    def likeness(candidate: tuple[str, Keys]) -> float:
        return sum(_nearest(key, record)[0] for key in candidate[1]) / len(candidate[1])

    name, keys = max(candidates, key=likeness)
    missing = [key for key in keys if key not in record]
    lacks = f", which lacks {', '.join(missing)}" if missing else ""
    nearest = ((key, *_nearest(key, [given for given in record if given not in keys])) for key in missing)
    fixes = [f"rename {like} to {key}" for key, ratio, like in nearest if ratio >= MIN_LIKENESS]
    lists = [key for key, value in record.items() if _may_be_turns(value)]
    fixes = fixes or [f"rename {key} to messages if it holds the turns" for key in lists[:1]]
    return unusable(
        f"{origin} {problem}: it has the keys {sorted(record)}; the nearest shape is {name!r}{lacks}",
        fix=f"{' and '.join(fixes)}{', or ' if fixes else ''}write {SHAPES[name].example}; shapes: "
        f"{', '.join(SHAPES)}",
    )


def _may_be_turns(value: Any) -> bool:
    """Return whether a value is a list of texts, or of turns of which one is a user's."""
    items = value if isinstance(value, list) else []
    roles = [str(item.get(key)) for item in items if isinstance(item, dict) for key in ROLE_KEYS]
    has_user = any(ROLES.get(role.strip().lower()) == "user" for role in roles)
    return bool(items) and (has_user or all(isinstance(item, str) for item in items))


def _nearest(key: str, record: Iterable[str]) -> tuple[float, str]:
    """Return how alike a key and the most similar key of a record are, whatever their case, and that key."""
    ratios = ((difflib.SequenceMatcher(None, key, given.lower()).ratio(), given) for given in record)
    return max(ratios, default=(0.0, ""))
