"""LLaDA2.0, 2.1 and 2.2 (BailingMoeV2): sigmoid router with groups and a shared expert, half of each head
rotates. 2.2 routes by block: 32 tokens admit `expert_capacity` experts together, and groups play no part then
(sgl-project/sglang, pull requests 31743 and 31768).

The defaults of the published config classes fit no published weights, so every field must be given. Query,
key and value projections are one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, MoeSpec, TensorNames
from idlm.infer.models.config import MAX_COUNT, ConfigReader, dense_spec, rotated_dims

BLOCK_SIZE = 32
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("use_qkv_bias", "use_bias", "tie_word_embeddings"),
    *("num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size", "n_group"),
    *("topk_group", "routed_scaling_factor", "first_k_dense_replace", "norm_topk_prob"),
)
EDIT_TOKENS = ("delete_token_id", "split_token_id")
ATTENTION = "model.layers.{}.attention."
CONFIG_KEYS = {
    **dict.fromkeys((*REQUIRED, *("router_dtype", "expert_capacity", "block_size", *EDIT_TOKENS)), READ),
    "mtp_loss_scaling_factor": "only training reads it",
    "moe_router_enable_expert_bias": "every router of this family has a bias; a missing tensor is refused",
    "moe_shared_expert_intermediate_size": "the shapes of the tensors are checked",
    "_moe_implementation": "names a kernel of the publisher, not the arithmetic",
}


@FAMILIES.register("LLaDA2MoeModelLM")
class Llada2(Family):
    """2.1 differs from 2.0 only in how it is decoded, and so does 2.2, except for its router."""

    model_types: ClassVar[tuple[str, ...]] = ("llada2_moe",)
    causality: ClassVar[str] = "block"
    logit_shift: ClassVar[bool] = False
    mask_token_id: ClassVar[int | None] = 156_895
    """In the tokenizer of Ling, their AR parent, this id is <|role_end|>, which stops there."""
    stop_token_ids: ClassVar[tuple[int, ...]] = (156_892, 156_900)
    """<|endoftext|> and <|role_end|>."""
    config_keys: ClassVar[Mapping[str, str]] = CONFIG_KEYS
    foreign_keys: ClassVar[Mapping[str, str]] = {"image_token_offset": "LLaDA2.0-Uni (images)"}
    tensor_names: ClassVar[TensorNames] = TensorNames(
        embed="model.word_embeddings.weight",
        qkv=f"{ATTENTION}query_key_value",
        o=f"{ATTENTION}dense",
        q_norm=f"{ATTENTION}query_layernorm.weight",
        k_norm=f"{ATTENTION}key_layernorm.weight",
        k_scale=f"{ATTENTION}k_scale",
        v_scale=f"{ATTENTION}v_scale",
    )

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        reader.require(*REQUIRED)
        reader.allow("score_function", "sigmoid", None)
        reader.allow("router_dtype", "fp32", "float32", None)
        rotary_dim, moe = rotated_dims(reader, reader.integer("head_dim")), _experts(reader)
        edit_tokens = [
            reader.integer(name, minimum=0, maximum=MAX_COUNT)
            for name in EDIT_TOKENS
            if config.get(name) is not None
        ]
        if edit_tokens and (moe.capacity is None or len(edit_tokens) < 2):
            reader.problems.append(f"{' or '.join(EDIT_TOKENS)} without the other or without expert_capacity")
        if max(edit_tokens, default=0) >= reader.integer("vocab_size", maximum=MAX_COUNT):
            reader.problems.append(f"{', '.join(EDIT_TOKENS)}={edit_tokens} (must be below vocab_size)")
        reader.allow("use_bias", False)
        return dense_spec(
            reader,
            qkv_bias=reader.flag("use_qkv_bias"),
            o_bias=False,
            qk_norm=bool(config.get("use_qk_norm")),
            rotary_dim=rotary_dim,
            moe=moe,
        )

    @classmethod
    def refined(cls, spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
        """The tensors show whether queries and keys are normalised, because configs leave it out."""
        return replace(spec, qk_norm=spec.qk_norm or cls.tensor_names.q_norm.format(0) in tensors)

    @classmethod
    def block_size(cls, config: dict[str, Any]) -> int:
        """That of every published checkpoint, which only 2.2 has in its config."""
        return BLOCK_SIZE if config.get("block_size") is None else config["block_size"]

    @classmethod
    def edit_token_ids(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """2.2 predicts them to take a position out of a block, or to put one in."""
        return tuple(config[name] for name in EDIT_TOKENS if config.get(name) is not None)


def _experts(reader: ConfigReader) -> MoeSpec:
    num_experts, num_groups = reader.integer("num_experts", maximum=MAX_COUNT), reader.integer("n_group")
    num_chosen, chosen_groups = reader.integer("num_experts_per_tok"), reader.integer("topk_group")
    if num_experts % num_groups or chosen_groups > num_groups:
        reader.problems.append(
            f"num_experts={num_experts} in n_group={num_groups}, of which topk_group={chosen_groups}"
        )
    elif num_experts // num_groups < 2 or num_chosen > num_experts // num_groups * chosen_groups:
        reader.problems.append(f"num_experts_per_tok={num_chosen} from groups of {num_experts // num_groups}")
    ffn_width = reader.integer("moe_intermediate_size")
    block_size, capacity = reader.integer("block_size", BLOCK_SIZE), None
    if reader.config.get("expert_capacity") is not None:
        capacity, num_groups, chosen_groups = reader.integer("expert_capacity", minimum=num_chosen), 1, 1
    return MoeSpec(
        num_experts=num_experts,
        num_chosen=num_chosen,
        ffn_width=ffn_width,
        dense_layers=range(reader.integer("first_k_dense_replace", minimum=0, maximum=MAX_COUNT)),
        score="sigmoid",
        is_normalised=reader.flag("norm_topk_prob"),
        scaling=reader.positive_float("routed_scaling_factor", 1.0),
        has_bias=True,
        num_groups=num_groups,
        num_chosen_groups=chosen_groups,
        shared_ffn_width=ffn_width * reader.integer("num_shared_experts", minimum=0),
        capacity=capacity,
        block_size=block_size,
    )
