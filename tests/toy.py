"""Tiny random checkpoints, written by transformers, for tests that need a model but not a good one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from idlm.infer.models.base import ALONE, Shards
from idlm.infer.models.loader import LoadedModel, load_outline, read_outline
from idlm.semantics import Semantics
from tests.small_tokenizers import save_byte_level

ARCHITECTURES = ("Qwen3", "Qwen2", "Llama")


def load_model(
    path: str | Path, *, device: str = "cpu", shards: Shards = ALONE, **options: Any
) -> LoadedModel:
    """Check and load a model; `options` of `read_outline`."""
    return load_outline(read_outline(path, shards=shards, **options), device=device, shards=shards)


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


def write_chain(directory: Path, chain: Sequence[int], *, vocab_size: int) -> Path:
    """Save a Qwen3 model whose likeliest next token depends on the last one alone, beside the tokenizer that
    `directory` has. It follows each token of the chain, which may be in it once, by the next one, and ends in
    the last one, or where another token would follow. The last row is that of masks."""
    from safetensors.torch import save_file

    size = vocab_size
    # The last norm gives a row of one number the length sqrt(size).
    head, unit = torch.zeros(size, size), size**-0.5
    head[chain[-1]] = unit
    for token_id, following in zip(chain[:-1], chain[1:], strict=True):
        head[following, token_id] = 20.0 * unit
    layer, ones = "model.layers.0.", torch.ones
    weights = {
        "model.embed_tokens.weight": torch.eye(size),
        "lm_head.weight": head,
        "model.norm.weight": ones(size),
        f"{layer}input_layernorm.weight": ones(size),
        f"{layer}post_attention_layernorm.weight": ones(size),
        f"{layer}self_attn.q_norm.weight": ones(8),
        f"{layer}self_attn.k_norm.weight": ones(8),
        f"{layer}self_attn.o_proj.weight": torch.zeros(size, 8),
        f"{layer}mlp.down_proj.weight": torch.zeros(size, 8),
    }
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    weights |= {f"{layer}{name}.weight": torch.zeros(8, size) for name in names}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": size,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "attention_bias": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [chain[-1]]}))
    Semantics(mask_token_id=size - 1, stride=3).save(directory)
    return directory
