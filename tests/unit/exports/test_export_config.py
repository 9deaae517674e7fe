"""config.json of an export says the same in the keys of transformers 4 and 5.

What other programs read, by name: vLLM 0.24 (`transformers_utils/config.py` and
`model_arch_config_convertor.py`, `model_executor/models/llama.py` and `qwen3.py`) and SGLang 0.5.23
(`srt/configs/model_config.py`; `srt/utils/hf_transformers/common.py`: `rope_parameters`, else `rope_theta`
and `rope_scaling`; `dtype`, else `torch_dtype`). Both read through the config class of their transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from idlm.checkpoint import read_json
from idlm.semantics import Semantics
from idlm.train.checkpoint.base_files import BaseFiles, model_config
from idlm.train.checkpoint.export import export
from idlm.train.model.checks import grow_vocabulary
from idlm.train.model.load import check_base_config, load_base
from tests.tiny_training import tiny_model

READ_ELSEWHERE = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
    ),
    *("max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "layer_types"),
    *("rope_parameters", "rope_theta", "rope_scaling", "dtype", "torch_dtype"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),
)
"""Keys of Qwen3 that vLLM and SGLang read."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.5]}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def both_forms(family: str, base: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """config.json of an export; transformers 5 reads the same from it as without the older keys."""
    config = AutoConfig.for_model(family, **fields)
    written = json.loads(config.to_json_string(use_diff=False))
    done = model_config(written, base or {})
    again = AutoConfig.for_model(**json.loads(json.dumps(done))).to_dict()
    again["rope_parameters"].pop("type", None)
    assert again["rope_parameters"] == written["rope_parameters"]
    return done


@pytest.mark.parametrize(
    ("family", "fields", "older"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e6}}, {"rope_theta": 1e6, "rope_scaling": YARN}),
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            "stablelm",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        (
            "gpt_neox",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 777, "partial_rotary_factor": 0.5}},
            {"rotary_emb_base": 777, "rotary_pct": 0.5},
        ),
        (
            "gemma3_text",
            LAYERS
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            "phi3",
            {
                "hidden_size": 32,
                "num_attention_heads": 8,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 128,
                "rope_parameters": LONG | {"rope_theta": 1e4},
            },
            {
                "rope_scaling": {"type": "longrope"} | {key: LONG[key] for key in LONG if key != "rope_type"},
                "original_max_position_embeddings": 64,
            },
        ),
        ("qwen3_moe", {"num_experts": 4}, {"num_experts": 4, "num_local_experts": 4}),
    ],
    ids=["theta", "llama3", "yarn", "linear", "partial", "neox", "gemma3", "phi3", "experts"],
)
def test_older_keys_say_what_newer_ones_say(
    family: str, fields: dict[str, Any], older: dict[str, Any]
) -> None:
    done = both_forms(family, **fields)
    assert {key: done.get(key, "absent") for key in older} == older


def test_older_keys_of_the_base_are_kept_as_it_has_them() -> None:
    given = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}, "unknown": 1}
    done = both_forms("llama", base=given, rope_parameters=YARN | {"rope_theta": 5e5})
    assert (done["rope_theta"], done["rope_scaling"]) == (5e5, given["rope_scaling"])
    assert "unknown" not in done, "transformers itself keeps or drops what it does not know"


def test_a_nested_config_has_both_forms_and_remote_code_is_not_named() -> None:
    inner = {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    written = {"text_config": inner, "auto_map": {"AutoConfig": "my.Config"}, "custom_pipelines": {}}
    done = model_config(written, {"text_config": {"rope_theta": 7}})
    assert done.keys() == {"text_config"}
    assert done["text_config"]["rope_theta"] == 7 and done["text_config"]["torch_dtype"] == "bfloat16"


def test_an_export_has_every_key_that_other_engines_read(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    export(model, None, Semantics(), tmp_path / "out", dtype=torch.bfloat16, base=BaseFiles())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not set(READ_ELSEWHERE) - config.keys()
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    # transformers 4 replaces a generation config that is made of config.json.
    assert not read_json(tmp_path / "out" / "generation_config.json")["_from_model_config"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0


def test_scalar_parameters_are_read_back_too(tmp_path: Path) -> None:
    model = tiny_model("apertus", attention="eager")
    assert any(value.dim() == 0 for value in model.state_dict().values())
    export(model, None, Semantics(), tmp_path / "out", dtype=None, base=BaseFiles())


def test_a_tied_flag_over_a_head_of_its_own_is_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Merges and resizes leave it: other programs would then replace the trained head by the embedding."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(read_json(path) | {"tie_word_embeddings": True}))
    with caplog.at_level(logging.WARNING):
        loaded = load_base(str(tmp_path / "base"), attention="idlm_sdpa", dtype=torch.float32)
    assert "output head of their own" in caplog.text
    grow_vocabulary(loaded, 70)
    assert torch.equal(loaded.lm_head.weight[:64], model.lm_head.weight), "growing ties it again"
    export(loaded, None, Semantics(), tmp_path / "out", dtype=None, base=BaseFiles())
    assert read_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] is False
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"][:64], model.lm_head.weight)


def test_equal_tensors_stay_tied(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_base(str(tmp_path), attention="idlm_sdpa", dtype=torch.float32)
    assert loaded.config.tie_word_embeddings and loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_a_pattern_of_windows_is_read_as_types_of_layers(key: str, tmp_path: Path) -> None:
    """Gemma 3 and Cohere 2 on the hub have it, and no `layer_types`."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", key: 6}))
    check_base_config(tmp_path)
