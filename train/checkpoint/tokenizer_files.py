"""The files of the tokenizer of an export: those of the base byte for byte, where all versions read them.

transformers 5 alone reads some of what it writes itself: a class `TokenizersBackend`, a list of
`extra_special_tokens`. A base that it saved is published with the older words for the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "tokenizer_config.json"
GENERIC_CLASS = "PreTrainedTokenizerFast"
OF_A_SAVING_PROGRAM = ("backend", "is_local", "local_files_only")
"""What transformers 5 writes about how it loaded a tokenizer."""


def write_tokenizer_files(directory: Path, files: Mapping[str, bytes], tokenizer: Any) -> None:
    """Write `files`, by their paths, into `directory`; `tokenizer` was loaded from them."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    given = json.loads(files[CONFIG]) if CONFIG in files else {}
    config = for_all_versions(given, tokenizer)
    if config != given:
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def for_all_versions(given: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer_config.json that says the same to transformers 4 and 5."""
    config = dict(given)
    # It names Python files, which an export does not have: a class of transformers has read the others.
    config.pop("auto_map", None)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = GENERIC_CLASS
    named = config.pop("model_specific_special_tokens", None)
    tokens = config.get("extra_special_tokens")
    if isinstance(tokens, list):
        del config["extra_special_tokens"]
        if tokens:
            config.setdefault("additional_special_tokens", tokens)
    if named:
        config.setdefault("extra_special_tokens", named)
    if "backend" in config:
        config = {key: value for key, value in config.items() if key not in OF_A_SAVING_PROGRAM}
        if config.get("tokenizer_class") != GENERIC_CLASS:
            config |= _added_tokens(tokenizer)
    return config


def _added_tokens(tokenizer: Any) -> dict[str, bool]:
    """Whether a text begins with bos and ends in eos. transformers 5 does not save this, and a family's class
    in transformers 4 (Llama, Gemma) then begins every text with bos.
    """
    ids = [None, *tokenizer("a")["input_ids"]]
    ends = {
        "add_bos_token": (tokenizer.bos_token_id, ids[1:2]),
        "add_eos_token": (tokenizer.eos_token_id, ids[-1:]),
    }
    return {key: token is not None and [token] == found for key, (token, found) in ends.items()}
