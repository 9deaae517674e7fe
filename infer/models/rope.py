"""Rotary frequencies from a config, for every rope type whose frequencies do not depend on the length.

Scaled types use the functions of transformers. Reads the layout of transformers 5 (`rope_parameters`) and the
older one (`rope_theta` and `rope_scaling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from idlm.contracts import is_number

SCALED_TYPES = ("linear", "llama3", "yarn")
LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope", "su")


def is_positive(value: Any) -> bool:
    """Whether `value` is a finite number above 0."""
    return is_number(value) and value > 0


def rope_frequencies(
    config: dict[str, Any],
    *,
    head_dim: int,
    max_positions: int,
    default_theta: float | None,
    rotary_dim: int | None = None,
) -> tuple[tuple[float, ...], float, list[str]]:
    """Return (head_dim / 2 inverse frequencies, factor on cos and sin, problems).

    With problems the frequencies are empty. Only `rotary_dim` dimensions rotate (None: all); the frequencies
    of the others are 0. With `default_theta` None, a config without a base is a problem.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        return (), 1.0, [f"rope_parameters={parameters!r} (must be an object)"]
    theta = parameters.get("rope_theta", config.get("rope_theta", default_theta))
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    problems = _problems(config, parameters, rope_type, theta, is_partial=rotary_dim is not None)
    if problems:
        return (), 1.0, problems
    assert theta is not None
    if rope_type == "default":
        rotated = head_dim if rotary_dim is None else rotary_dim
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        still = [0.0] * ((head_dim - rotated) // 2)
        return _checked((1.0 / theta**exponents).tolist(), 1.0, parameters, still)
    return _scaled(
        config, {**parameters, "rope_type": rope_type, "rope_theta": theta}, head_dim, max_positions
    )


def _checked(
    frequencies: list[float], scaling: Any, parameters: dict[str, Any], still: Sequence[float] = ()
) -> tuple[tuple[float, ...], float, list[str]]:
    """The result of `rope_frequencies`, checked for zeros and NaN, which the formulas let through."""
    if not is_positive(scaling) or not all(map(is_positive, frequencies)):
        return (), 1.0, [f"rope_parameters={parameters!r} give frequencies or a scale not above 0 and finite"]
    return (*frequencies, *still), float(scaling), []


def _problems(
    config: dict[str, Any], parameters: dict[str, Any], rope_type: Any, theta: Any, *, is_partial: bool
) -> list[str]:
    problems = []
    if any(isinstance(value, dict) for value in parameters.values()):
        problems.append("rope_parameters differs between layer types (supported: one set for all layers)")
    elif not is_positive(theta):
        problems.append(f"rope_theta={theta!r} (must be a finite number above 0, here or in rope_parameters)")
    supported = ", ".join(("default", *SCALED_TYPES))
    if rope_type in LENGTH_DEPENDENT_TYPES:
        problems.append(
            f"rope_type={rope_type!r} depends on the sequence length, which would change keys already cached "
            f"(supported: {supported})"
        )
    elif rope_type not in ("default", *SCALED_TYPES):
        problems.append(f"rope_type={rope_type!r} (supported: {supported})")
    if is_partial:
        if rope_type != "default":
            problems.append(f"rope_type={rope_type!r} for a part of each head (supported: 'default')")
        return problems
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        problems.append(f"partial_rotary_factor={partial!r} (supported: 1)")
    return problems


def _scaled(
    config: dict[str, Any], parameters: dict[str, Any], head_dim: int, max_positions: int
) -> tuple[tuple[float, ...], float, list[str]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    trained_on = config.get("original_max_position_embeddings")
    if trained_on is not None:
        parameters["original_max_position_embeddings"] = trained_on
    parameters.setdefault("original_max_position_embeddings", max_positions)
    view = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        standardize_rope_params=lambda: None,
    )
    try:
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](view, device=None)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        return (), 1.0, [f"rope_parameters={parameters!r} cannot be used: {type(error).__name__}: {error}"]
    return _checked(inv_freq.float().tolist(), attention_scaling, parameters)
