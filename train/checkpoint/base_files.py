"""What an export takes over from the folder of its base besides weights: config.json, the files of the
tokenizer, and the licence. They are read when a run starts: an export has what it was trained with.

transformers 5 writes positions as `rope_parameters` and the type of the weights as `dtype`. transformers 4
supports neither key: silently it uses `rope_theta` 10,000 and no scaling, which is another model. vLLM,
SGLang and converters read the same keys, each through the version of transformers that it brings. So both are
written, the older ones as the base's own config.json has them, where it has them. The tokenizer's files are
those of the base byte for byte, where all versions read them; transformers 5 alone reads some of what it
writes itself: a class `TokenizersBackend`, a list of `extra_special_tokens`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from idlm.checkpoint import LICENSE, MODEL_CARD, read_json
from idlm.text.tokenizer import read_tokenizer_files

FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
LICENSE_KEYS = ("license", "license_name", "license_link")
KNOWN_LICENSES = {
    "apache-2.0": re.compile(r"\s*Apache License\s+Version 2\.0", re.IGNORECASE),
    "mit": re.compile(r"\s*(The )?MIT License", re.IGNORECASE),
}
"""Names of licences on the hub, and how their texts begin."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFiles:
    """`config`: config.json, {} for new weights. `tokenizer`: content by name. `name`: that of the folder, or
    of the repository in a cache of the hub; None for new weights. `license`: keys of a model card about it.
    `license_text`: the file of that name."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    name: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    license_text: bytes | None = None


def read_base_files(base: Path | None, tokenizer: Path) -> BaseFiles:
    if base is None:
        return BaseFiles(tokenizer=read_tokenizer_files(tokenizer))
    paths = [base / f"{LICENSE}{suffix}" for suffix in ("", ".txt", ".md")]
    text = next((path.read_bytes() for path in paths if path.is_file()), None)
    return BaseFiles(
        config=read_json(base / "config.json"),
        tokenizer=read_tokenizer_files(tokenizer),
        name=_name(base),
        license=_license_of_card(base / MODEL_CARD, text) or _license_of_text(text),
        license_text=text,
    )


def _name(base: Path) -> str:
    """`organisation/name` in a cache of the hub (models--organisation--name/snapshots/commit)."""
    cached = [part for part in base.absolute().parts if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/") if cached else base.resolve().name


def _license_of_card(path: Path, text: bytes | None) -> dict[str, str]:
    """The keys about the licence in a model card; a link to a file next to it becomes one to its copy."""
    found = FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    try:
        values = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    given = values if isinstance(values, dict) else {}
    found_keys = {key: given[key] for key in LICENSE_KEYS if isinstance(given.get(key), str)}
    if not found_keys.get("license_link", "https://").startswith(("https://", "http://")):
        found_keys |= {"license_link": LICENSE}
        if text is None:
            del found_keys["license_link"]
    return found_keys


def _license_of_text(text: bytes | None) -> dict[str, str]:
    """The name of a well-known licence, otherwise the first line of its text; {} without a text."""
    content = "" if text is None else text.decode("utf-8", errors="replace")
    known = next((name for name, start in KNOWN_LICENSES.items() if start.match(content)), None)
    if known is not None or not content.strip():
        return {"license": known} if known is not None else {}
    first = re.sub(r"[^a-z0-9.]+", "-", content.strip().splitlines()[0].lower()).strip("-")
    return {"license": "other", "license_name": first, "license_link": LICENSE}


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
    # Releases of transformers 5 may leave an older key as it was next to `rope_parameters`.
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
    """Return a tokenizer_config.json that means the same in transformers 4 and 5."""
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
