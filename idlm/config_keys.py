"""Refuse keys of a model's config.json that may change the forward pass and that no code here reads.

Most keys of a config do not affect the forward pass, so unknown keys pass, except those whose name mentions
experts, routing, windows, scales, softcaps or token ids: two published models may share architecture strings
and tensor names and differ only in such a key. Keys of nested sections and camelCase keys count as well."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from idlm.errors import UserError

SUSPECT = re.compile(
    r"expert|moe|rout|topk|window|scal(e|ing)|multiplier|softcap|token_?(ids?|idx|index|offset)(_|$)"
)
READ = "read"
OF_THE_TOKENIZER = "the files of the tokenizer define the tokens of a text"
COMMON_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "eos_token_id", "mask_token_id"), READ),
    **dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers"), READ),
    **dict.fromkeys((f"{name}_token_id" for name in ("bos", "pad", "unk", "sep", "cls")), OF_THE_TOKENIZER),
}
"""Keys that any model's config may have: `READ`, or why the key is ignored."""
HARMLESS_KEYS = {key for key, reason in COMMON_KEYS.items() if reason != READ}
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def refuse_unknown_keys(
    config: Mapping[str, Any],
    known: Collection[str],
    *,
    foreign: Mapping[str, str] | None = None,
    source: str = "config.json",
) -> None:
    """Raise UserError IDLM-0618 for keys that are not `known` and may change the computation; a key that is
    null, false or empty enables nothing. `foreign`: keys of published models that share the architecture
    strings but compute something else, and the names of the models."""
    unknown = dict(_suspects(config, {*known, *COMMON_KEYS}))
    if not unknown:
        return
    listed = ", ".join(f"{key}={value!r:.60}" for key, value in unknown.items())
    models = " or ".join(dict.fromkeys(name for key, name in (foreign or {}).items() if key in unknown))
    raise UserError(
        "IDLM-0618",
        f"{source} has keys that change what a model computes and that this version does not know: {listed}"
        + f"; this is {models}, which this version does not support" * bool(models),
        fix="use another checkpoint; take a key out of config.json only if the model computes the same "
        "without it",
    )


def _suspects(
    section: Mapping[str, Any], known: Collection[str], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of unknown suspect keys, also of nested sections that no code here reads."""
    for key, value in section.items():
        if key in known or value is None or value is False or value in ("", [], {}):
            continue
        if SUSPECT.search(key.lower()) or SUSPECT.search(CAMEL.sub("_", key).lower()):
            yield path + key, value
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from _suspects(item, HARMLESS_KEYS, f"{path}{key}.")


def refuse_impossible_counts(
    counts: Mapping[str, Any], num_tensors: int, *, source: str = "config.json"
) -> None:
    """Raise UserError IDLM-0603 for more layers or experts than tensors, before any loop runs over them."""
    for key, value in counts.items():
        if isinstance(value, int) and value > num_tensors:
            raise UserError(
                "IDLM-0603",
                f"{source} says {key}={value}, and the weight files hold {num_tensors} tensors",
                fix="use the config.json that belongs to these weights, and download all weight files",
            )
