"""config.json of an export, in the words of transformers 5 and of transformers 4.

transformers 5 writes positions as `rope_parameters` and the type of the weights as `dtype`. transformers 4
knows neither key: without a word it takes `rope_theta` 10,000 and no scaling, which is another model. vLLM,
SGLang and converters read the same keys, each through the version of transformers that it brings. So both are
written, the older ones as the base's own config.json has them, where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def for_all_versions(written: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of transformers 5 with the keys of transformers 4; `base`: that of the base."""
    config = {key: value for key, value in written.items() if key not in NAMES_OF_CODE}
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            inner = base.get(key)
            config[key] = for_all_versions(value, inner if isinstance(inner, dict) else {})
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
