"""Judge an answer to a recall problem by looking up the prompt's records, without any code of the
generator."""

from __future__ import annotations

import re

from idlm.tasks.base import Grade, UnreadablePromptError, judge

_RECORD = re.compile(r" ([a-z]+)([a-z])\.")
_FILLER = re.compile(r" [A-Z][a-z]+(?: now)? [a-z]+ [a-z]+\.")
_QUESTION = re.compile(r" ([a-z]+)\?")


def check_recall(prompt: str, response: str) -> Grade:
    """Compare `response` with the records of `prompt`, pair by pair."""
    return judge(prompt, response, _execute)


def queried_pairs(prompt: str) -> list[tuple[str, str]]:
    """Return the keys that a prompt queries, in order, with their values."""
    text, values, asked = prompt, dict[str, str](), list[str]()
    position = 0
    while position < len(text):
        found = _FILLER.match(text, position)
        record, question = _RECORD.match(text, position), _QUESTION.match(text, position)
        if record is not None and not asked and record.group(1) not in values:
            values[record.group(1)] = record.group(2)
        elif question is not None:
            asked.append(question.group(1))
        elif found is None or asked:
            raise UnreadablePromptError(f"cannot read {text[position : position + 40]!r}")
        found = record or question or found
        assert found is not None
        position = found.end()
    missing = [key for key in asked if key not in values]
    if missing or not asked:
        raise UnreadablePromptError(f"no record of {', '.join(missing) or 'anything asked'}")
    return [(key, values[key]) for key in asked]


def _execute(prompt: str) -> tuple[list[list[str]], str]:
    """Return every pair of the answer, and the last one with what ends it."""
    pairs = [f" {key} {value}" for key, value in queried_pairs(prompt)]
    pairs[0] = f":{pairs[0]}"
    return [[pair] for pair in pairs[:-1]], f"{pairs[-1]}."
