"""A training sample as text: which tokens are context, which are targets, where blocks of masks start.

`[[` and `]]` surround targets, `|` is before the first target of a masked block. A terminal also shows
context dim and targets green.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.text import Text

from idlm.train.data.layout import IGNORE_LABEL

HEAD_TOKENS, TAIL_TOKENS = 160, 40
LEGEND = "context, [[targets]], | before the first target of a masked block"


def sample_text(row: dict[str, Any], tokenizer: Any, *, shift: int) -> Text:
    """The first document of a packed row, by the labels that training really sees; noisy rows predict the
    token `shift` places on.
    """
    is_shown = row["doc_ids"] == 0
    clean, noisy = is_shown & ~row["is_noisy"], is_shown & row["is_noisy"]
    token_ids, positions = row["input_ids"][clean].tolist(), row["position_ids"][noisy]
    opening = set((positions[positions == row["block_starts"][noisy]] + shift).tolist())
    targets = set((np.flatnonzero(row["labels"][clean] != IGNORE_LABEL) + 1).tolist())
    targets |= set((positions[row["labels"][noisy] != IGNORE_LABEL] + shift).tolist())
    head, tail = HEAD_TOKENS, max(HEAD_TOKENS, len(token_ids) - TAIL_TOKENS)
    text, was_target = Text(), False
    for place, token_id in enumerate(token_ids):
        is_target = place in targets
        if head <= place < tail:
            if place == head:
                text.append(f" ... {tail - head} tokens ... ", style="dim")
            continue
        if is_target != was_target:
            text.append("[[" if is_target else "]]", style="dim")
        token = ("|" if place in opening else "") + _readable(tokenizer, token_id)
        text.append(token, style="green" if is_target else "dim")
        was_target = is_target
    return text.append("]]", style="dim") if was_target else text


def _readable(tokenizer: Any, token_id: int) -> str:
    text: str = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
