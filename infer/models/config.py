"""Reads a decoder's `config.json` into a `ModelSpec`, and refuses what would silently change the arithmetic.

One error reports all problems of a file. Fields that do not change the forward pass are ignored.
"""

from __future__ import annotations

from typing import Any

from idlm.errors import UserError
from idlm.infer.models.base import ModelSpec, MoeSpec
from idlm.infer.models.rope import is_positive, rope_frequencies

MUST_BE_NULL = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "logit_scale",
    "quantization_config",
    "compression_config",
)
MAX_HEAD_DIM = 1 << 16
"""A larger value is a mistake, and computing frequencies for it would fill the memory."""


class ConfigReader:
    """Typed access to a config dict that collects problems; `check` raises them together."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def _value(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """The field, or `default` if it is absent or null; `least` (and a problem) if it is unusable."""
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.problems.append(f"{name}={value!r} (must be an integer >= {least})")
        return least

    def require(self, *names: str) -> None:
        """Refuse a config without these fields: the defaults of its classes fit no trained weights."""
        absent = [name for name in names if self.config.get(name) is None]
        if absent:
            self.problems.append(f"{', '.join(absent)} missing (no default is right)")

    def positive_float(self, name: str, default: float) -> float:
        """The field, or `default` if it is absent; 1 (and a problem) if it is unusable."""
        value = self.config.get(name, default)
        if is_positive(value):
            return float(value)
        self.problems.append(f"{name}={value!r} (must be a finite number above 0)")
        return 1.0

    def flag(self, name: str, default: bool = False) -> bool:
        """The field, or `default` if it is absent or null; False (and a problem) if it is unusable."""
        value = self._value(name, default)
        if isinstance(value, bool):
            return value
        self.problems.append(f"{name}={value!r} (must be true or false)")
        return False

    def allow(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value is not one of `allowed`; the field may be absent."""
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            self.problems.append(
                f"{name}={value!r} (supported: {' or '.join(repr(item) for item in allowed)})"
            )

    def check(self) -> None:
        """Raise UserError IDLM-0604 with all problems, if there are any."""
        if self.problems:
            raise UserError(
                "IDLM-0604",
                f"config.json ({self.config.get('architectures')!r}) has values that this engine cannot run: "
                f"{'; '.join(self.problems)}",
                fix="use a checkpoint without these settings, or correct config.json where it is wrong",
            )


def dense_spec(
    config: dict[str, Any],
    *,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_rope_theta: float | None = None,
    rotary_dim: int | None = None,
    moe: MoeSpec | None = None,
) -> ModelSpec:
    """The spec of a standard decoder config; keyword arguments are what the family fixes, or its defaults.

    `default_head_dim` None is width / heads. With `default_rope_theta` None the config must give the base.
    """
    reader = ConfigReader(config)
    width, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    head_dim = reader.integer("head_dim", default_head_dim or max(1, width // num_heads))
    num_layers = reader.integer("num_hidden_layers")
    if num_heads % num_kv_heads:
        reader.problems.append(
            f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}"
        )
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        reader.problems.append(f"head_dim={head_dim} (must be even, up to {MAX_HEAD_DIM})")
    _refuse_unsupported(reader, num_layers)
    max_positions = reader.integer("max_position_embeddings")
    inv_freq, rope_scaling, rope_problems = rope_frequencies(
        config,
        head_dim=min(head_dim, MAX_HEAD_DIM),
        max_positions=max_positions,
        default_theta=default_rope_theta,
        rotary_dim=rotary_dim,
    )
    reader.problems += rope_problems
    spec = ModelSpec(
        num_layers=num_layers,
        width=width,
        ffn_width=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        norm_eps=reader.positive_float("rms_norm_eps", 1e-6),
        rope_inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        max_positions=max_positions,
        rotary_dim=rotary_dim,
        moe=moe,
    )
    reader.check()
    return spec


def _refuse_unsupported(reader: ConfigReader, num_layers: int) -> None:
    reader.allow("hidden_act", "silu", "swish")
    reader.allow("is_causal", True, None)
    for name in MUST_BE_NULL:
        reader.allow(name, None)
    config = reader.config
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        reader.problems.append(f"layer_types={layer_types!r} (must be a list)")
        return
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other:
        reader.problems.append(f"layer_types contains {other} (supported: 'full_attention' in every layer)")
    is_windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
    first_windowed = config.get("max_window_layers", 0)
    if (
        is_windowed
        and not layer_types
        and not (isinstance(first_windowed, int) and first_windowed >= num_layers)
    ):
        reader.problems.append(
            f"use_sliding_window=True with max_window_layers={first_windowed!r} of {num_layers} layers "
            "(supported: no layer with a sliding window)"
        )
