"""Rotations that are not the plain one: those that a checkpoint scales, and NTK for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from idlm.contracts import is_number
from idlm.errors import UserError
from idlm.infer.models.base import ModelSpec


def extended(spec: ModelSpec, config: Mapping[str, Any], factor: float) -> ModelSpec:
    """The spec of contexts up to `factor` times the trained length, by a larger base of the rotation.

    NTK-aware extrapolation as LongLLaDA fits it to diffusion models (arXiv 2506.14429), which MAGE's long
    contexts use: the base b becomes lambda * b with lambda = (T / 2 pi) ** (d / e) / b, where T is the
    longest context, d the rotated dimensions and e = 2 * ceil(d / 2 * log_b(trained length / 2 pi)) those
    that went once round in training. Frequencies are fixed here, so keys that are cached stay valid; no
    dimension rotates faster than it did. Departure: lambda is not rounded up. Raises UserError IDLM-0620 for
    a checkpoint that scales its rotation already."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    rotated = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    base = spec.rope_inv_freq[1] ** (-rotated / 2) if rotated >= 4 else 1.0
    if kind != "default" or base <= 1:
        what = f"rope_type={kind!r}" if kind != "default" else f"{rotated} dimensions that rotate alike"
        raise UserError(
            "IDLM-0620",
            f"rope=ntk with rope_factor={factor:g} changes the rotation's base, and config.json has {what}",
            fix="leave rope out, and use the checkpoint's own context",
        )
    trained = spec.trained_length or spec.max_positions
    longest = int(factor * trained)
    turned = 2 * math.ceil(rotated / 2 * math.log(max(trained / math.tau, 1.0 + 1e-6), base))
    scale = max(1.0, (longest / math.tau) ** (rotated / turned) / base)
    frequencies = tuple(
        frequency * scale ** (-2 * index / rotated) for index, frequency in enumerate(spec.rope_inv_freq)
    )
    return replace(spec, rope_inv_freq=frequencies, max_positions=longest, trained_length=None)


def longest_context(
    config: Mapping[str, Any], parameters: Mapping[str, Any], kind: str, max_positions: int
) -> int:
    """The positions of a rotation: recipes for YaRN and linear scaling multiply the length of the training by
    `factor`, and leave `max_position_embeddings` as it is. Others state the longer length."""
    factor = parameters.get("factor")
    if kind not in ("linear", "yarn") or not is_number(factor):
        return max_positions
    return max(max_positions, int(factor * trained_positions(config, parameters, max_positions)))


def trained_positions(config: Mapping[str, Any], parameters: Mapping[str, Any], max_positions: int) -> Any:
    """The length of the training before the rotation was scaled; `max_positions` if config.json says none."""
    stated = config.get("original_max_position_embeddings")
    return parameters.get("original_max_position_embeddings", max_positions) if stated is None else stated


def scaled(
    config: dict[str, Any],
    parameters: dict[str, Any],
    kind: str,
    theta: float,
    head_dim: int,
    max_positions: int,
) -> tuple[torch.Tensor, float]:
    """Frequencies and scale by transformers' function of a rope type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    view = SimpleNamespace(
        rope_parameters={
            **parameters,
            "rope_type": kind,
            "rope_theta": theta,
            "original_max_position_embeddings": trained_positions(config, parameters, max_positions),
        },
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        standardize_rope_params=lambda: None,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](view, device=None)
    return inv_freq.float(), scaling
