"""What the families have in common whose architecture string alone says that they decode in blocks."""

from __future__ import annotations

from typing import Any

from idlm.semantics import Semantics


def block_semantics(
    config: dict[str, Any],
    *,
    block_size: int,
    logit_shift: bool,
    mask_token_id: int,
    stop_token_ids: tuple[int, ...],
) -> Semantics:
    """Block-causal; the config's own mask id before the family's."""
    given = config.get("mask_token_id")
    return Semantics(
        causality="block",
        logit_shift=logit_shift,
        block_size=block_size,
        mask_token_id=mask_token_id if given is None else given,
        stop_token_ids=stop_token_ids,
    )


def block_contradictions(meaning: Semantics, *, logit_shift: bool) -> list[str]:
    """Everything but the block's size and the ids is fixed by how such models are trained."""
    problems = []
    if meaning.causality != "block":
        problems.append(f"causality={meaning.causality!r}, this architecture is block-causal")
    if meaning.logit_shift != logit_shift:
        right = "predicts the next token" if logit_shift else "predicts the token of its own place"
        problems.append(f"logit_shift={meaning.logit_shift}, a row of this architecture {right}")
    return problems
