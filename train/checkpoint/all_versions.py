"""config.json and the tokenizer's files of an export, in the words of transformers 5 and of transformers 4.

transformers 5 writes positions as `rope_parameters` and the type of the weights as `dtype`. transformers 4
knows neither key: without a word it takes `rope_theta` 10,000 and no scaling, which is another model. vLLM,
SGLang and converters read the same keys, each through the version of transformers that it brings. So both are
written, the older ones as the base's own config.json has them, where it has them.

The tokenizer's files are those of the base byte for byte, where all versions read them. transformers 5 alone
reads some of what it writes itself: a class `TokenizersBackend`, a list of `extra_special_tokens`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES_OF_CODE = ("auto_map", "custom_pipelines")
"""They name Python files, which an export does not have: a class of transformers loads it."""
OLDER_NAMES = {
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
}
"""What transformers 4 calls a key of a family: by model_type, which the names of variants begin with."""
OLDER_KEYS = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *(older for names in OLDER_NAMES.values() for older in names.values()),
)
STRICT_FAMILIES = ("olmo", "olmo2", "phi3")
"""Their classes take `type` and the factors, and no further key in `rope_scaling`."""
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERIC_CLASS = "PreTrainedTokenizerFast"
OF_A_SAVING_PROGRAM = ("backend", "is_local", "local_files_only")
"""What transformers 5 writes about how it loaded a tokenizer."""


def model_config(written: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of transformers 5 with the keys of transformers 4; `base`: that of the base."""
    config = {key: value for key, value in written.items() if key not in NAMES_OF_CODE}
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            inner = base.get(key)
            config[key] = model_config(value, inner if isinstance(inner, dict) else {})
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    older = _older_rope(config)
    for family, names in OLDER_NAMES.items():
        if str(config.get("model_type")).startswith(family):
            both = config | older
            older |= {name: both[newer] for newer, name in names.items() if newer in both}
    # Releases of transformers 5 may leave an older key as it was beside `rope_parameters`.
    return config | older | {key: base[key] for key in OLDER_KEYS if key in base}


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The positions of `rope_parameters` in the keys of transformers 4."""
    rope = config.get("rope_parameters")
    if not rope:
        return {}
    # One dictionary, or one for each type of layers: then transformers 4 has a second key for Gemma 3 alone.
    older = {}
    if str(config.get("model_type")).startswith("gemma3"):
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    rope = dict(rope.get("full_attention", rope))
    older |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kind, name = rope.pop("rope_type", "default"), "rope_type"
    rope.pop("type", None)
    if config.get("model_type") in STRICT_FAMILIES:
        name = "type"
        rope.pop("original_max_position_embeddings", None)
    return older | {"rope_scaling": None if kind == "default" else {name: kind, **rope}}


def write_tokenizer_files(directory: Path, files: Mapping[str, bytes], tokenizer: Any) -> None:
    """Write `files`, by their paths, into `directory`; `tokenizer` was loaded from them."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    given = json.loads(files[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in files else {}
    config = tokenizer_config(given, tokenizer)
    if config != given:
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / TOKENIZER_CONFIG).write_text(text + "\n", encoding="utf-8")


def tokenizer_config(given: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
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
    in transformers 4 (Llama, Gemma) then begins every text with bos."""
    ids = [None, *tokenizer("a")["input_ids"]]
    ends = {
        "add_bos_token": (tokenizer.bos_token_id, ids[1:2]),
        "add_eos_token": (tokenizer.eos_token_id, ids[-1:]),
    }
    return {key: token is not None and [token] == found for key, (token, found) in ends.items()}
