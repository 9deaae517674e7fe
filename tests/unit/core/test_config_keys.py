"""Keys of a config.json that change the arithmetic are refused by name.

Those of released models are not; counts are compared with the tensors first; full diffusion is refused when
it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from idlm.checkpoint import COMMON_KEYS, SUSPECT
from idlm.errors import UserError
from idlm.infer.models.base import FAMILIES
from idlm.infer.models.config import MUST_BE_NULL
from idlm.infer.models.loader import read_outline
from tests.released_configs import RELEASED
from tests.toy import load_model, write_toy_checkpoint
from tests.unit.models.test_family_loading import BLOCKS, CONFIGS, write
from tests.unit.models.test_loader import refused

SPEAKING = (
    *("shared_expert_layers", "moe_layer_freq", "router_temperature", "topk_method", "attention_window"),
    *("scale_emb", "residual_scaling", "hidden_multiplier", "router_softcap", "image_token_index"),
)


def _load_config(tmp_path: Path, config: dict[str, Any]) -> None:
    """Read a config as far as the loader does before it compares tensors."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if "SDAR" in config["architectures"][0]:
        BLOCKS.save(tmp_path)
    with pytest.raises(UserError) as caught:
        read_outline(tmp_path)
    assert caught.value.code == "IDLM-0602", caught.value


@pytest.mark.parametrize("name", RELEASED)
def test_no_released_model_is_refused_by_its_keys(name: str, tmp_path: Path) -> None:
    """Weights are what is missing here, and nothing else."""
    config = RELEASED[name]
    _load_config(tmp_path, config)
    spec = FAMILIES.get(config["architectures"][0]).spec(config)
    assert spec.num_layers == config.get("num_hidden_layers", config.get("n_layers"))


def test_every_family_has_a_released_model() -> None:
    assert {config["architectures"][0] for config in RELEASED.values()} == set(FAMILIES.names())


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"expert_capacity": 1.25}, "expert_capacity=1.25 (must be an integer >= "),
        ({"expert_capacity": 1}, "expert_capacity=1 (must be an integer >= "),
        ({"expert_capacity": 4, "block_size": 0}, "block_size=0 (must be an integer >= 1)"),
        ({"split_token_id": 7, "expert_capacity": 4}, "without the other"),
        ({"delete_token_id": 1, "split_token_id": 7}, "without expert_capacity"),
        ({"delete_token_id": 1, "split_token_id": 1 << 20}, "[1, 1048576] (must be below vocab_size)"),
    ],
)
def test_impossible_numbers_of_llada22_are_refused(
    changes: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    write(tmp_path, "LLaDA2MoeModelLM", **changes)
    refused(tmp_path, "IDLM-0604", shown)


def test_llada20_uni_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "LLaDA2MoeModelLM", image_token_offset=157_184)
    refused(tmp_path, "IDLM-0618", "image_token_offset=157184", "LLaDA2.0-Uni")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_unknown_keys_of_every_family_that_speak_of_the_arithmetic_are_refused(
    architecture: str, tmp_path: Path
) -> None:
    unknown = [key for key in SPEAKING if key not in FAMILIES.get(architecture).config_keys]
    assert len(unknown) >= len(SPEAKING) - 1
    write(tmp_path, architecture, **dict.fromkeys(unknown, 1))
    refused(tmp_path, "IDLM-0618", *(f"{key}=1" for key in unknown))


def test_keys_that_are_off_or_speak_of_something_else_pass(tmp_path: Path) -> None:
    off = dict(zip(SPEAKING, [None, False, [], {}, "", *[None] * 5], strict=True))
    write(tmp_path, "Qwen3ForCausalLM", **off, unsloth_version="1", tokenizer_class="x", use_mrope=False)
    load_model(tmp_path, device="cpu")
    write(tmp_path, "Qwen3ForCausalLM", expert_capacity=0)
    refused(tmp_path, "IDLM-0618", "expert_capacity=0")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            {"text_config": {"hidden_size": 4, "layers": [{"num_experts": 8}]}},
            "text_config.layers.num_experts=8",
        ),
        ({"attention": {"sliding_window": 128}}, "attention.sliding_window=128"),
        ({"slidingWindow": 128}, "slidingWindow=128"),
        ({"numMoELayers": 2}, "numMoELayers=2"),
        ({"extra": {"maskTokenId": 5}}, "extra.maskTokenId=5"),
    ],
)
def test_keys_of_nested_sections_and_in_camel_case_are_refused(
    changes: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    write(tmp_path, "Qwen3ForCausalLM", **changes)
    refused(tmp_path, "IDLM-0618", shown)


def test_nested_sections_that_say_nothing_of_the_arithmetic_pass(tmp_path: Path) -> None:
    sections = {
        "auto_map": {"AutoModelForTokenClassification": "modeling.Model"},
        "task_specific_params": {"text": {"max_length": 5, "pad_token_id": 1, "numExperts": None}},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0, "rope_theta": 1e4},
    }
    load_model(write(tmp_path, "Qwen3ForCausalLM", **sections), device="cpu")


def test_a_window_that_llama_would_ignore_is_refused(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path, architecture="Llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"sliding_window": 4096}
    path.write_text(json.dumps(config))
    refused(tmp_path, "IDLM-0604", "sliding_window=4096")
    path.write_text(json.dumps(config | {"use_sliding_window": False}))
    load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("architecture", FAMILIES.names())
def test_what_a_family_declares_has_a_reason_and_is_needed(architecture: str) -> None:
    family = FAMILIES.get(architecture)
    assert all(family.config_keys.values()) and all(family.foreign_keys.values())
    assert not family.config_keys.keys() & family.foreign_keys.keys()
    assert not {*family.config_keys, *family.foreign_keys} & {*COMMON_KEYS, *MUST_BE_NULL}
    assert all(map(SUSPECT.search, family.foreign_keys))


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        *((name, "num_hidden_layers") for name in CONFIGS if name != "LLaDAModelLM"),
        ("Qwen3MoeForCausalLM", "num_experts"),
        ("LLaDA2MoeModelLM", "num_experts"),
        ("LLaDA2MoeModelLM", "first_k_dense_replace"),
    ],
)
def test_a_count_of_10_to_the_12_is_compared_with_the_tensors_first(
    architecture: str, key: str, tmp_path: Path
) -> None:
    """Nothing may count so far: it would hang."""
    write(tmp_path, architecture, **{key: 10**12})
    words = () if key == "first_k_dense_replace" else (f"{key}=1000000000000", "tensors")
    if "SDAR" in architecture:
        BLOCKS.save(tmp_path)
    refused(tmp_path, "IDLM-0603", *words)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Fast_dLLM_QwenForCausalLM", {"head_dim": 10**12}),
        ("Fast_dLLM_QwenForCausalLM", {"head_dim": None, "hidden_size": 10**12}),
        ("LLaDA2MoeModelLM", {"head_dim": 10**12, "rotary_dim": None}),
        ("LLaDA2MoeModelLM", {"head_dim": 10**12, "partial_rotary_factor": None}),
    ],
)
def test_a_head_of_10_to_the_12_is_refused(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, architecture, **changes)
    refused(tmp_path, "IDLM-0604", "head_dim=")
