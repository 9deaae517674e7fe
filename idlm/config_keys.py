"""Keys of a model's config.json that change what the model computes, although nothing here reads them.

A config carries much that does not touch the forward pass, so unknown keys pass. This module refuses those
whose name speaks of experts, routing, windows, scales, softcaps or token ids: two published models may share
architecture strings and tensor names and differ in such a key alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from idlm.errors import UserError

SUSPECT = re.compile(
    r"expert|moe|rout|topk|window|scal(e|ing)|multiplier|softcap|token_?(ids?|idx|index|offset)(_|$)"
)
READ = "read"
OF_THE_TOKENIZER = "the tokenizer's files say which tokens a text has"
COMMON_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("rope_scaling", "eos_token_id", "mask_token_id"), READ),
    **dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers"), READ),
    **dict.fromkeys((f"{name}_token_id" for name in ("bos", "pad", "unk", "sep", "cls")), OF_THE_TOKENIZER),
}
"""What any model's config may have: `READ`, or why it is ignored."""
COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts")
"""Numbers of things that have tensors of their own in the files that the engine reads."""


def refuse_unknown_keys(
    config: Mapping[str, Any],
    known: Collection[str],
    *,
    foreign: Mapping[str, str] | None = None,
    source: str = "config.json",
) -> None:
    """Raise UserError IDLM-0618 for keys that are not `known` and may change the arithmetic.

    `foreign`: keys of published models that share the architecture strings and compute something else, with
    the model's name. A key that is null, false or empty switches nothing on and passes.
    """
    foreign = foreign or {}
    unknown = [
        key
        for key, value in config.items()
        if (key in foreign or (SUSPECT.search(key) and key not in known and key not in COMMON_KEYS))
        and not _is_off(value)
    ]
    if not unknown:
        return
    told = ", ".join(f"{key}={config[key]!r:.60}" for key in unknown)
    models = " or ".join(dict.fromkeys(foreign[key] for key in unknown if key in foreign))
    raise UserError(
        "IDLM-0618",
        f"{source} has keys that change what a model computes and that this version does not know: {told}"
        + f"; this is {models}, which this version does not support" * bool(models),
        fix="use another checkpoint; take a key out of config.json only if the model computes the same "
        "without it",
    )


def refuse_impossible_counts(
    config: Mapping[str, Any],
    num_tensors: int,
    *,
    keys: Sequence[str] = COUNTS,
    source: str = "config.json",
) -> None:
    """Raise UserError IDLM-0603 for more layers or experts than there are tensors, before anything counts
    through them.
    """
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > num_tensors:
            raise UserError(
                "IDLM-0603",
                f"{source} says {key}={value}, and the weight files hold {num_tensors} tensors",
                fix="use the config.json that belongs to these weights, and download all weight files",
            )


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
