"""Gemma 3 of text alone: norms before and after each part whose weights are stored less 1, embeddings times
the root of the width, GELU, and layers that see a window and rotate faster, by default five of six."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, OtherLayers, TensorNames, Variant
from idlm.infer.models.config import MAX_SIZE, ConfigReader, dense_spec

WINDOWED, WHOLE = "sliding_attention", "full_attention"
PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")


@FAMILIES.register("Gemma3ForCausalLM")
class Gemma3(Family):
    """transformers 5 writes the rotations of both kinds of layers to `rope_parameters`, 4 those of windowed
    layers to `rope_local_base_freq`."""

    tensor_names: ClassVar[TensorNames] = TensorNames(
        mlp_norm="model.layers.{}.pre_feedforward_layernorm.weight"
    )
    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    config_keys: ClassVar[Mapping[str, str]] = dict.fromkeys(PATTERN_KEYS, READ)

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        reader.allow("hidden_activation", "gelu_pytorch_tanh")
        reader.allow("use_bidirectional_attention", False, None)
        width, window = reader.integer("hidden_size"), reader.integer("sliding_window", 4096)
        scalar = reader.positive_float("query_pre_attn_scalar", 256)
        positions = reader.integer("max_position_embeddings", 131_072, maximum=float("inf"))
        numbers = _windowed_layers(reader)
        reader.check()
        variant = Variant(
            has_output_norms=True,
            norm_offset=1.0,
            embed_scale=width**0.5,
            score_scale=scalar**-0.5,
            has_gelu=True,
        )
        # Both specs have the same fields but for the rotation.
        own = {"tie_word_embeddings": True, **config, "layer_types": None, "rope_scaling": None}
        own["max_position_embeddings"] = positions
        whole, windowed = (
            dense_spec(
                ConfigReader({**own, "rope_parameters": _rope(config, kind)}),
                qk_norm=True,
                default_head_dim=256,
                variant=variant,
            )
            for kind in (WHOLE, WINDOWED)
        )
        others = OtherLayers(
            numbers=numbers,
            rope_inv_freq=windowed.rope_inv_freq,
            rope_scaling=windowed.rope_scaling,
            window=window,
        )
        return replace(whole, max_positions=positions, variant=replace(variant, others=others))


def _rope(config: dict[str, Any], kind: str) -> Any:
    """The rotation of one kind of layers."""
    nested = config.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get(kind), dict):
        return nested[kind]
    if kind == WINDOWED:
        return {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    theta = config.get("rope_theta", 1_000_000.0)
    return {**scaling, "rope_theta": theta} if isinstance(scaling, dict) else scaling


def _windowed_layers(reader: ConfigReader) -> frozenset[int]:
    """Numbers of the layers that see a window."""
    config, kinds = reader.config, reader.config.get("layer_types")
    # A model of more layers is refused when its tensors are counted.
    num_layers = min(reader.integer("num_hidden_layers", maximum=float("inf")), MAX_SIZE)
    if kinds is None:
        name = next((key for key in PATTERN_KEYS if config.get(key) is not None), PATTERN_KEYS[0])
        pattern = reader.integer(name, 6)
        return frozenset(number for number in range(num_layers) if (number + 1) % pattern)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {WINDOWED, WHOLE}:
        shown = f"layer_types={kinds!r:.80}"
        reader.problems.append(f"{shown} (must be a list of {num_layers} times {WINDOWED!r} or {WHOLE!r})")
        return frozenset()
    return frozenset(number for number, kind in enumerate(kinds) if kind == WINDOWED)
