"""Tiny random checkpoints, written by transformers, for tests that need a model but not a good one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from idlm.semantics import Semantics
from tests.small_tokenizers import save_byte_level

ARCHITECTURES = ("Qwen3", "Qwen2", "Llama")


def write_toy_checkpoint(
    directory: Path,
    *,
    architecture: str = "Qwen3",
    vocab_size: int = 48,
    width: int = 32,
    num_layers: int = 2,
    sharpness: float = 4.0,
    seed: int = 0,
    max_positions: int = 512,
    num_kv_heads: int = 2,
    tie_embeddings: bool = False,
) -> Path:
    """Save a stock checkpoint of random weights; `sharpness` scales the head: laws far from uniform."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_embeddings,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture == "Qwen3":
        settings["head_dim"] = 16
    config = getattr(transformers, f"{architecture}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / (0.3 * width**0.5))
    model.float().save_pretrained(directory)
    return directory


def write_spelling_toy(directory: Path) -> Path:
    """Random weights that say they were converted, and a tokenizer whose tokens can spell any text."""
    write_toy_checkpoint(directory, vocab_size=335)
    save_byte_level(directory)
    Semantics(mask_token_id=334, stride=4).save(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    return directory
