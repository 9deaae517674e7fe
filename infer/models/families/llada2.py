"""LLaDA2.0 and 2.1 (BailingMoeV2): sigmoid router with groups and a shared expert, half of each head rotates.

The defaults of the published config classes fit no published weights, so every field must be given. Query,
key and value projections are one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from idlm.config_keys import READ
from idlm.infer.models.base import FAMILIES, ModelSpec, MoeSpec, TensorNames
from idlm.infer.models.config import MAX_HEAD_DIM, ConfigReader, dense_spec
from idlm.infer.models.diffusion import DiffusionFamily

BLOCK_SIZE = 32
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "norm_topk_prob",
    "rms_norm_eps",
    "max_position_embeddings",
    "use_qkv_bias",
    "use_bias",
    "tie_word_embeddings",
)
ATTENTION = "model.layers.{}.attention."
OF_TRAINING = "only training reads it"
CONFIG_KEYS = {
    **dict.fromkeys((*REQUIRED, "router_dtype"), READ),
    "output_router_logits": OF_TRAINING,
    "router_aux_loss_coef": OF_TRAINING,
    "mtp_loss_scaling_factor": OF_TRAINING,
    "moe_router_enable_expert_bias": "every router of this family has a bias; a missing tensor is refused",
    "moe_shared_expert_intermediate_size": "the shapes of the tensors are checked",
    "_moe_implementation": "names a kernel of the publisher, not the arithmetic",
}
LLADA22, LLADA20_UNI = (
    "LLaDA2.2 (routing with a capacity, edits that delete and split)",
    "LLaDA2.0-Uni (images)",
)


@FAMILIES.register("LLaDA2MoeModelLM")
class Llada2(DiffusionFamily):
    """2.1 differs from 2.0 only in how it is decoded."""

    model_types: ClassVar[tuple[str, ...]] = ("llada2_moe",)
    causality: ClassVar[str] = "block"
    logit_shift: ClassVar[bool] = False
    mask_token_id: ClassVar[int] = 156_895
    """In the tokenizer of Ling, their AR parent, this id is <|role_end|>, which stops there."""
    stop_token_ids: ClassVar[tuple[int, ...]] = (156_892, 156_900)
    """<|endoftext|> and <|role_end|>."""
    config_keys: ClassVar[Mapping[str, str]] = CONFIG_KEYS
    foreign_keys: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("expert_capacity", "delete_token_id", "split_token_id"), LLADA22),
        "image_token_offset": LLADA20_UNI,
    }
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
        """All fields of `REQUIRED` must be there."""
        reader = ConfigReader(config)
        reader.require(*REQUIRED)
        reader.allow("score_function", "sigmoid", None)
        reader.allow("router_dtype", "fp32", "float32", None)
        rotary_dim, moe = _rotary_dim(reader), _experts(reader)
        reader.allow("use_bias", False)
        qkv_bias = reader.flag("use_qkv_bias")
        reader.check()
        return dense_spec(
            config,
            qkv_bias=qkv_bias,
            o_bias=False,
            qk_norm=bool(config.get("use_qk_norm")),
            rotary_dim=rotary_dim,
            moe=moe,
        )

    @classmethod
    def refined(cls, spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
        """The tensors tell whether queries and keys are normalised, because configs leave it out."""
        return replace(spec, qk_norm=spec.qk_norm or cls.tensor_names.q_norm.format(0) in tensors)

    @classmethod
    def block_size(cls, config: dict[str, Any]) -> int:
        """That of every published checkpoint."""
        return BLOCK_SIZE


def _rotary_dim(reader: ConfigReader) -> int | None:
    """Rotated dimensions, from a factor or a width; both must agree. None: the whole head rotates."""
    config, head_dim = reader.config, reader.integer("head_dim")
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = parameters if isinstance(parameters, dict) else {}
    given = {
        "partial_rotary_factor": parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")),
        "rotary_dim": config.get("rotary_dim"),
    }
    widths = {
        name: value * head_dim if name == "partial_rotary_factor" else value
        for name, value in given.items()
        if isinstance(value, int | float)
    }
    told = ", ".join(f"{name}={value!r}" for name, value in given.items())
    if len(set(widths.values())) != 1:
        reader.problems.append(f"{told} of head_dim={head_dim} (give one, or two that agree)")
        return None
    width = next(iter(widths.values()))
    if width % 2 or not 0 < width <= min(head_dim, MAX_HEAD_DIM):
        reader.problems.append(f"{told} of head_dim={head_dim} (must come to an even width up to head_dim)")
        return None
    return None if width == head_dim else int(width)


def _experts(reader: ConfigReader) -> MoeSpec:
    num_experts, num_groups = reader.integer("num_experts"), reader.integer("n_group")
    num_chosen, chosen_groups = reader.integer("num_experts_per_tok"), reader.integer("topk_group")
    if num_experts % num_groups or chosen_groups > num_groups:
        reader.problems.append(
            f"num_experts={num_experts} in n_group={num_groups}, of which topk_group={chosen_groups}"
        )
    elif num_experts // num_groups < 2 or num_chosen > num_experts // num_groups * chosen_groups:
        reader.problems.append(f"num_experts_per_tok={num_chosen} from groups of {num_experts // num_groups}")
    ffn_width, num_dense = (
        reader.integer("moe_intermediate_size"),
        reader.integer("first_k_dense_replace", least=0),
    )
    return MoeSpec(
        num_experts=num_experts,
        num_chosen=num_chosen,
        ffn_width=ffn_width,
        dense_layers=tuple(range(min(num_dense, reader.integer("num_hidden_layers")))),
        score="sigmoid",
        is_normalised=reader.flag("norm_topk_prob"),
        scaling=reader.positive_float("routed_scaling_factor", 1.0),
        has_bias=True,
        num_groups=num_groups,
        num_chosen_groups=chosen_groups,
        shared_ffn_width=ffn_width * reader.integer("num_shared_experts", least=0),
    )
