"""What parsers make of an answer's text."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """A part of an answer. `kind`: content, reasoning, or call; then `text` is the arguments of the call of
    the tool `name`, a JSON object."""

    kind: str
    text: str
    name: str = ""
