"""Which token ids end an answer of a checkpoint."""

from __future__ import annotations

from typing import Any

from idlm.checkpoint import read_json
from idlm.infer.models.loader import LoadedModel
from idlm.text.tokenizer import stop_token_ids


def eos_ids(model: LoadedModel, tokenizer: Any) -> tuple[int, ...]:
    """The checkpoint's own list, else what transformers takes, and the tokenizer's.

    transformers derives a generation config from config.json where generation_config.json is missing. Without
    a tokenizer config.json is asked as well where that file does not speak of it. Raises UserError IDLM-0216
    for what is no id.
    """
    if model.semantics.stop_token_ids:
        return model.semantics.stop_token_ids
    path = model.directory / "generation_config.json"
    generation = read_json(path) if path.exists() else None
    if generation is None or (tokenizer is None and "eos_token_id" not in generation):
        return stop_token_ids(tokenizer, read_json(model.directory / "config.json"), source="config.json")
    return stop_token_ids(tokenizer, generation)
