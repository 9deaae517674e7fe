"""A checkpoint whose likeliest next token depends on the last one alone, and so writes a given answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from idlm.semantics import Semantics


def write_chain(directory: Path, chain: Sequence[int], *, vocab_size: int) -> Path:
    """Save a Qwen3 model, beside the tokenizer that `directory` has, that follows each token of the chain by
    the next one and ends in the last one, or where another token would follow. A token may be in it once. The
    last row is that of masks.
    """
    import torch
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
