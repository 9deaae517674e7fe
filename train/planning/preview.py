"""Training samples as text: which tokens are context, which are targets, where blocks of masks start.

Colours on a terminal (context dim, targets green, the first token of a masked block underlined), markers in
plain text: `[[` and `]]` around targets, `|` before a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from idlm.train.data.layout import IGNORE_LABEL

if TYPE_CHECKING:
    from rich.text import Text

HEAD_TOKENS, TAIL_TOKENS = 160, 40
LEGEND = "context, [[targets]], | before the first target of a masked block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token; `opens_block`: the first mask of a diffusion block predicts it."""

    text: str
    is_target: bool
    opens_block: bool


def pieces_of(row: dict[str, Any], tokenizer: Any, doc_id: int, *, shift: int = 1) -> list[Piece]:
    """The tokens of one document of a packed row, by the labels that training really sees; noisy rows predict
    the token `shift` places on.
    """
    clean = (row["doc_ids"] == doc_id) & ~row["is_noisy"]
    noisy = (row["doc_ids"] == doc_id) & row["is_noisy"]
    token_ids, labels = row["input_ids"][clean], row["labels"][clean]
    targets = np.flatnonzero(labels != IGNORE_LABEL) + 1
    positions, starts = row["position_ids"][noisy], row["block_starts"][noisy]
    opening = set((positions[positions == starts] + shift).tolist())
    hidden = positions[row["labels"][noisy] != IGNORE_LABEL]
    is_target = set(targets.tolist()) | set((hidden + shift).tolist())
    return [
        Piece(text=_readable(tokenizer, token), is_target=place in is_target, opens_block=place in opening)
        for place, token in enumerate(token_ids.tolist())
    ]


def plain(pieces: list[Piece]) -> str:
    """The sample with markers."""
    parts, was_target = [], False
    for piece in _shortened(pieces):
        if piece.is_target != was_target:
            parts.append("[[" if piece.is_target else "]]")
        parts.append(("|" if piece.opens_block else "") + piece.text)
        was_target = piece.is_target
    return "".join(parts) + ("]]" if was_target else "")


def coloured(pieces: list[Piece]) -> Text:
    """The sample for a terminal."""
    from rich.text import Text

    text = Text()
    for piece in _shortened(pieces):
        style = "dim" if not piece.is_target else "green underline" if piece.opens_block else "green"
        text.append(("|" if piece.opens_block else "") + piece.text, style=style)
    return text


def _shortened(pieces: list[Piece]) -> Iterator[Piece]:
    num_left_out = len(pieces) - HEAD_TOKENS - TAIL_TOKENS
    if num_left_out <= 0:
        yield from pieces
        return
    yield from pieces[:HEAD_TOKENS]
    yield Piece(
        text=f" ... {num_left_out} tokens ... ",
        is_target=pieces[HEAD_TOKENS - 1].is_target,
        opens_block=False,
    )
    yield from pieces[-TAIL_TOKENS:]


def _readable(tokenizer: Any, token_id: int) -> str:
    text: str = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
