"""LLaDA-8B, LLaDA-1.5 and iLLaDA (arXiv 2502.09992): Llama's arithmetic under OLMo's names, full diffusion.

The switches of `ONLY` were seen in copies of the published file; other values are refused. `ff_proj` is the
gate; the head is the `ff_out` outside of the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, TensorNames
from idlm.infer.models.config import UNBOUNDED, ConfigReader, dense_spec, standard
from idlm.semantics import Semantics

BLOCK = "model.transformer.blocks.{}."
STANDARD_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "mlp_hidden_size",
    "hidden_act": "activation_type",
    "vocab_size": "embedding_size",
    "tie_word_embeddings": "weight_tying",
    "max_position_embeddings": "max_sequence_length",
}
REQUIRED = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"),
    *("rms_norm_eps", "max_position_embeddings"),
)
ONLY = {
    "rope": True,
    "alibi": False,
    "layer_norm_type": "rms",
    "block_type": "llama",
    "block_group_size": 1,
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "scale_logits": False,
    "input_emb_norm": False,
}


@FAMILIES.register("LLaDAModelLM")
class Llada(Family):
    """`vocab_size` may be smaller than `embedding_size`, the number of rows."""

    model_types: ClassVar[tuple[str, ...]] = ("llada",)
    causality: ClassVar[str] = "full"
    logit_shift: ClassVar[bool] = False
    mask_token_id: ClassVar[int | None] = 126_336
    stop_token_ids: ClassVar[tuple[int, ...]] = (126_081, 126_348)
    """<|endoftext|> and <|eot_id|>."""
    config_keys: ClassVar[Mapping[str, str]] = {"scale_logits": READ}
    tensor_names: ClassVar[TensorNames] = TensorNames(
        embed="model.transformer.wte.weight",
        final_norm="model.transformer.ln_f.weight",
        head="model.transformer.ff_out.weight",
        attention_norm=f"{BLOCK}attn_norm.weight",
        q=f"{BLOCK}q_proj",
        k=f"{BLOCK}k_proj",
        v=f"{BLOCK}v_proj",
        o=f"{BLOCK}attn_out",
        mlp_norm=f"{BLOCK}ff_norm.weight",
        gate=f"{BLOCK}ff_proj",
        up=f"{BLOCK}up_proj",
        down=f"{BLOCK}ff_out",
    )

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        """The published default of the norm's epsilon differs from transformers'."""
        reader = ConfigReader(standard(config, STANDARD_NAMES))
        reader.require(*REQUIRED)
        for name, value in ONLY.items():
            reader.allow(name, value, None)
        spec = dense_spec(reader, qkv_bias=False, o_bias=False)
        return replace(spec, trained_length=spec.max_positions, max_positions=UNBOUNDED)

    @classmethod
    def semantics(cls, config: dict[str, Any]) -> Semantics:
        """A model with another mask (iLLaDA) has another tokenizer: its config names the token that stops."""
        meaning, stop_id = super().semantics(config), config.get("eos_token_id")
        if meaning.mask_token_id == cls.mask_token_id or not isinstance(stop_id, int):
            return meaning
        return replace(meaning, stop_token_ids=(stop_id,))
