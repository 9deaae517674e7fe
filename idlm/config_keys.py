"""Refuse keys of a model's config.json that may change the forward pass and that no code here reads.

Most keys of a config do not affect the forward pass, so unknown keys pass, except those whose name mentions
experts, routing, windows, scales, softcaps or token ids: two published models may share architecture strings
and tensor names and differ only in such a key.
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
OF_THE_TOKENIZER = "the files of the tokenizer define the tokens of a text"
COMMON_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("rope_scaling", "eos_token_id", "mask_token_id"), READ),
    **dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers"), READ),
    **dict.fromkeys((f"{name}_token_id" for name in ("bos", "pad", "unk", "sep", "cls")), OF_THE_TOKENIZER),
}
"""Keys that any model's config may have: `READ`, or why the key is ignored."""
COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts")
"""Counts of parts of which each has its own tensors in the weight files."""


def refuse_unknown_keys(
    config: Mapping[str, Any],
    known: Collection[str],
    *,
    foreign: Mapping[str, str] | None = None,
    source: str = "config.json",
) -> None:
    """Raise UserError IDLM-0618 for keys that are not `known` and may change the computation.

    `foreign` maps keys of published models that share the architecture strings but compute something else to
    the name of the model. A key that is null, false or empty enables nothing and passes.
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
    listed = ", ".join(f"{key}={config[key]!r:.60}" for key in unknown)
    models = " or ".join(dict.fromkeys(foreign[key] for key in unknown if key in foreign))
    raise UserError(
        "IDLM-0618",
        f"{source} has keys that change what a model computes and that this version does not know: {listed}"
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
    """Raise UserError IDLM-0603 for more layers or experts than tensors, before any loop runs over them."""
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
