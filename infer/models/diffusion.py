"""The base of families whose architecture string alone says that, and how, they decode by diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from idlm.infer.models.base import Family
from idlm.semantics import Semantics

UNBOUNDED = 1 << 31
"""`max_positions` of a model whose positions have no table."""
WHAT_ROWS_SEE = {"block": "block-causal", "full": "full-diffusion"}


class DiffusionFamily(Family):
    """Only the block size and token ids can differ between checkpoints of the family."""

    causality: ClassVar[str]
    logit_shift: ClassVar[bool]
    """Whether a row predicts the next token rather than the token at its own position."""
    mask_token_id: ClassVar[int]
    """Used if the config has no `mask_token_id`."""
    stop_token_ids: ClassVar[tuple[int, ...]]

    @classmethod
    def block_size(cls, config: dict[str, Any]) -> int | None:
        """Tokens of a block; None for full diffusion."""
        return None

    @classmethod
    def semantics(cls, config: dict[str, Any]) -> Semantics:
        """The family's way to decode, with its ids. A config of other tokens (another mask) brings its own
        `eos_token_id`.
        """
        given, stops = config.get("mask_token_id"), cls.stop_token_ids
        if given is not None and given != cls.mask_token_id:
            stops = _ids(config.get("eos_token_id")) or stops
        return Semantics(
            causality=cls.causality,
            logit_shift=cls.logit_shift,
            block_size=cls.block_size(config),
            mask_token_id=cls.mask_token_id if given is None else given,
            stop_token_ids=stops,
        )

    @classmethod
    def contradictions(cls, config: dict[str, Any], meaning: Semantics) -> list[str]:
        """What of `meaning` differs from how the family was trained."""
        problems = []
        if meaning.causality != cls.causality:
            problems.append(
                f"causality={meaning.causality!r}, but this architecture is {WHAT_ROWS_SEE[cls.causality]}"
            )
        if meaning.logit_shift != cls.logit_shift:
            target = "the next token" if cls.logit_shift else "the token at its own position"
            problems.append(
                f"logit_shift={meaning.logit_shift}, but a row of this architecture predicts {target}"
            )
        return problems


class FullFamily(DiffusionFamily):
    """Full diffusion. A canvas beyond `ModelSpec.trained_length` runs, with a warning."""

    causality: ClassVar[str] = "full"

    @staticmethod
    def standard(config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The config with the standard names of fields, where `names` maps those to the family's."""
        renamed = {name: config[own] for name, own in (names or {}).items() if config.get(own) is not None}
        return {**config, "is_causal": None, **renamed}


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if isinstance(one, int))
