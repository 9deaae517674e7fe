"""A base whose config.json says what its weights contradict, or says it in older words."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.checkpoint import read_json
from idlm.semantics import Semantics
from idlm.train.checkpoint.base_files import BaseFiles
from idlm.train.checkpoint.export import export
from idlm.train.model.checks import grow_vocabulary
from idlm.train.model.load import check_base_config, load_base
from tests.tiny_training import tiny_model


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
