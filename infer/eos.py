"""Which token ids end an answer of a checkpoint."""

from __future__ import annotations

from typing import Any

from idlm.checkpoint import read_json
from idlm.infer.models.loader import LoadedModel
from idlm.text.tokenizer import stop_token_ids


def eos_ids(model: LoadedModel, tokenizer: Any) -> tuple[int, ...]:
    """The stop ids of the checkpoint's semantics, else those that transformers uses and the tokenizer's.

    Like transformers, reads config.json if generation_config.json is missing; without a tokenizer also if
    generation_config.json has no `eos_token_id`. Raises UserError IDLM-0216 for a value that is not an id.
    """
    if model.semantics.stop_token_ids:
        return model.semantics.stop_token_ids
    path = model.directory / "generation_config.json"
    generation = read_json(path) if path.exists() else None
    if generation is None or (tokenizer is None and "eos_token_id" not in generation):
        return stop_token_ids(tokenizer, read_json(model.directory / "config.json"), source="config.json")
    return stop_token_ids(tokenizer, generation)
