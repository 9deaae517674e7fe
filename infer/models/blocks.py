"""The base of families whose architecture string alone says that they decode in blocks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from idlm.infer.models.base import Family
from idlm.semantics import Semantics


class BlockFamily(Family):
    """Block-causal; only the block size and token ids can differ between checkpoints of the family."""

    logit_shift: ClassVar[bool]
    """Whether a row predicts the next token rather than the token at its own position."""
    mask_token_id: ClassVar[int]
    """Used if the config has no `mask_token_id`."""
    stop_token_ids: ClassVar[tuple[int, ...]]

    @classmethod
    @abstractmethod
    def block_size(cls, config: dict[str, Any]) -> int:
        """Tokens of a block."""

    @classmethod
    def semantics(cls, config: dict[str, Any]) -> Semantics:
        """Block-causal decoding with the family's ids."""
        given = config.get("mask_token_id")
        return Semantics(
            causality="block",
            logit_shift=cls.logit_shift,
            block_size=cls.block_size(config),
            mask_token_id=cls.mask_token_id if given is None else given,
            stop_token_ids=cls.stop_token_ids,
        )

    @classmethod
    def contradictions(cls, config: dict[str, Any], meaning: Semantics) -> list[str]:
        """What of `meaning` differs from how the family was trained."""
        problems = []
        if meaning.causality != "block":
            problems.append(f"causality={meaning.causality!r}, but this architecture is block-causal")
        if meaning.logit_shift != cls.logit_shift:
            target = "the next token" if cls.logit_shift else "the token at its own position"
            problems.append(
                f"logit_shift={meaning.logit_shift}, but a row of this architecture predicts {target}"
            )
        return problems
