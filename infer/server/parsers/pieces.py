"""What parsers make of an answer's text."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """A part of an answer. `kind`: content, reasoning, or call; then `text` is the arguments of the call of
    the tool `name`, a JSON object.
    """

    kind: str
    text: str
    name: str = ""


def num_open(text: str, tag: str) -> int:
    """Number of characters at the end of `text` that the tag may begin with; it is not in the text."""
    longest = min(len(text), len(tag) - 1)
    return next((num for num in range(longest, 0, -1) if text.endswith(tag[:num])), 0)
