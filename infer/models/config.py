"""Reads a decoder's `config.json` into a `ModelSpec`, and refuses what would silently change the arithmetic;
one error reports all problems of a file. Rope types must not depend on the length; they are read in the
layout of transformers 5 (`rope_parameters`) and in the older one (`rope_theta` and `rope_scaling`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from idlm.config.schema import is_number
from idlm.errors import UserError
from idlm.infer.models.base import USUAL, ModelSpec, MoeSpec, OtherLayers, Variant

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
MAX_SIZE, MAX_COUNT = 1 << 20, 1 << 40
"""The largest axis (a few fit the 63 bits of a tensor's size) and count, which is compared with the
tensors."""
MAX_HEAD_DIM = 1 << 16
"""A larger value is a mistake, and computing frequencies for it would fill the memory."""
SCALED_TYPES = ("linear", "llama3", "yarn")
LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope", "su")
LONG_ROPE = "longrope"
"""Has frequencies for contexts up to the trained length, and others for longer ones."""


UNBOUNDED = 1 << 31
"""`max_positions` of a model that runs beyond the length it was trained with (`ModelSpec.trained_length`)."""


def standard(config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The config of a full-diffusion model under the standard names, which `names` maps to the family's."""
    renamed = {name: config[own] for name, own in (names or {}).items() if config.get(own) is not None}
    return {**config, "is_causal": None, **renamed}


class ConfigReader:
    """Typed access to a config dict that collects problems; `check` raises them together."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def _value(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: float = MAX_SIZE
    ) -> int:
        """The field, or `default` if it is absent or null; `minimum` (and a problem) if it is unusable."""
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        bound = f", and at most {maximum}" if isinstance(value, int) and value > maximum else ""
        self.problems.append(f"{name}={value!r} (must be an integer >= {minimum}{bound})")
        return minimum

    def require(self, *names: str) -> None:
        """Raise for a config without these fields: the defaults of its classes fit no trained weights."""
        absent = [name for name in names if self.config.get(name) is None]
        if absent:
            self.problems.append(f"{', '.join(absent)} missing (no default is right)")
        self.check()

    def positive_float(self, name: str, default: float) -> float:
        """The field, or `default` if it is absent; 1 (and a problem) if it is unusable."""
        value = self.config.get(name, default)
        if is_number(value) and value > 0:
            return float(value)
        self.problems.append(f"{name}={value!r} (must be a finite number above 0)")
        return 1.0

    def flag(self, name: str) -> bool:
        """The field; False if it is absent or null, and (with a problem) if it is unusable."""
        value = self._value(name, False)
        if isinstance(value, bool):
            return value
        self.problems.append(f"{name}={value!r} (must be true or false)")
        return False

    def allow(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value is not one of `allowed`; the field may be absent."""
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            self.problems.append(f"{name}={value!r:.200} (supported: {' or '.join(map(repr, allowed))})")

    def check(self) -> None:
        if self.problems:
            raise UserError(
                "IDLM-0604",
                f"config.json ({self.config.get('architectures')!r}) has values that this engine cannot run: "
                f"{'; '.join(dict.fromkeys(self.problems))}",
                fix="use a checkpoint without these settings, or correct config.json where it is wrong",
            )


def dense_spec(
    reader: ConfigReader,
    *,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_norm_eps: float = 1e-6,
    default_head_dim: int | None = None,
    default_rope_theta: float | None = None,
    rotary_dim: int | None = None,
    moe: MoeSpec | None = None,
    variant: Variant = USUAL,
    reads: Collection[str] = (),
) -> ModelSpec:
    """The spec of a standard decoder config, unless the reader has problems. Keyword arguments are what the
    family fixes, or its defaults; `reads` names fields of `MUST_BE_NULL` that it reads itself, and LONG_ROPE
    if it may have that. `qkv_bias` and `o_bias` None are the config's `attention_bias`, `default_head_dim`
    None is width / heads. With `default_rope_theta` None the config must give the base."""
    has_bias = bool(reader.config.get("attention_bias"))
    width, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    head_dim = reader.integer("head_dim", default_head_dim or max(1, width // num_heads))
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_COUNT)
    if num_heads % num_kv_heads:
        heads = f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}"
        reader.problems.append(heads)
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        reader.problems.append(f"head_dim={head_dim} (must be even, up to {MAX_HEAD_DIM})")
    _refuse_unsupported(reader, num_layers, reads)
    max_positions = reader.integer("max_position_embeddings", maximum=math.inf)
    inv_freq, rope_scaling, longest = _rope(
        reader, min(head_dim, MAX_HEAD_DIM), max_positions, default_rope_theta, rotary_dim, reads
    )
    spec = ModelSpec(
        num_layers=num_layers,
        width=width,
        ffn_width=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size", maximum=MAX_COUNT),
        norm_eps=reader.positive_float("rms_norm_eps", default_norm_eps),
        rope_inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        qkv_bias=has_bias if qkv_bias is None else qkv_bias,
        o_bias=has_bias if o_bias is None else o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        max_positions=longest,
        rotary_dim=rotary_dim,
        moe=moe,
        variant=variant,
    )
    reader.check()
    return spec


def _refuse_unsupported(reader: ConfigReader, num_layers: int, reads: Collection[str]) -> None:
    reader.allow("hidden_act", "silu", "swish")
    reader.allow("is_causal", True, None)
    for name in {*MUST_BE_NULL} - {*reads}:
        reader.allow(name, None)
    config = reader.config
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        reader.problems.append(f"layer_types={layer_types!r} (must be a list)")
        return
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other:
        reader.problems.append(f"layer_types contains {other} (supported: 'full_attention' in every layer)")
    first_windowed = config.get("max_window_layers", 0)
    is_known = bool(layer_types) or (isinstance(first_windowed, int) and first_windowed >= num_layers)
    if config.get("use_sliding_window") and config.get("sliding_window") is not None and not is_known:
        reader.problems.append(
            f"use_sliding_window=True with max_window_layers={first_windowed!r} of {num_layers} layers "
            "(supported: no layer with a sliding window)"
        )


def rotated_dims(reader: ConfigReader, head_dim: int, default: float | None = None) -> int | None:
    """Rotated dimensions of a head, from a factor or a width, which must agree; None: all. Where a config has
    neither, the factor is `default`."""
    rope = reader.config.get("rope_parameters") or reader.config.get("rope_scaling")
    given = {**reader.config, **(rope if isinstance(rope, dict) else {})}
    factor: Any = given.get("partial_rotary_factor")
    width: Any = given.get("rotary_dim")
    factor = default if factor is None and width is None else factor
    sizes = {value * unit // 1 for value, unit in ((factor, head_dim), (width, 1)) if is_number(value)}
    size = sizes.pop() if len(sizes) == 1 else 0
    if size % 2 or not 0 < size <= head_dim:
        both = f"partial_rotary_factor={factor!r}, rotary_dim={width!r} of head_dim={head_dim}"
        reader.problems.append(f"{both} (must come to one even number up to head_dim)")
        return None
    return None if size == head_dim else int(size)


def in_windows(spec: ModelSpec, window: int, numbers: Collection[int]) -> ModelSpec:
    """The spec whose layers `numbers` see `window` positions; the same if that is all of them."""
    if window >= spec.max_positions:
        return spec
    others = OtherLayers(
        numbers=numbers,
        rope_inv_freq=spec.rope_inv_freq,
        rope_scaling=spec.rope_scaling,
        window=window,
    )
    return replace(spec, variant=replace(spec.variant, others=others))


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _rope(
    reader: ConfigReader,
    head_dim: int,
    max_positions: int,
    default_theta: float | None,
    rotary_dim: int | None,
    reads: Collection[str],
) -> tuple[tuple[float, ...], float, int]:
    """`rope_inv_freq`, `rope_scaling` and `max_positions` of the spec; nothing and 1 with a problem."""
    config, problems, nothing = reader.config, reader.problems, ((), 1.0, max_positions)
    given = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    wrong = [key for key, value in given.items() if not (value is None or isinstance(value, dict))]
    if wrong:
        problems += [f"{key}={given[key]!r} (must be an object)" for key in wrong]
        return nothing
    parameters: dict[str, Any] = given["rope_scaling"] or given["rope_parameters"] or {}
    kind: Any = parameters.get("rope_type", parameters.get("type", "default"))
    theta: Any = parameters.get("rope_theta", config.get("rope_theta", default_theta))
    rotated = head_dim if rotary_dim is None else rotary_dim
    if found := _rope_problems(
        config, parameters, kind, theta, is_partial=rotary_dim is not None, reads=reads
    ):
        problems += found
        return nothing
    scaling, longest = 1.0, max_positions
    if kind == "default":
        inv_freq = 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    else:
        try:
            inv_freq, scaling = scaled(config, parameters, kind, theta, rotated, max_positions)
            longest = longest_context(config, parameters, kind, max_positions)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            problems.append(f"rope_parameters={parameters!r} cannot be used: {type(error).__name__}: {error}")
            return nothing
    frequencies = inv_freq.tolist()
    if not _is_positive(scaling) or not all(map(_is_positive, frequencies)):
        problems.append(f"rope_parameters={parameters!r} give frequencies or a scale not above 0 and finite")
        return nothing
    return (*frequencies, *[0.0] * (head_dim // 2 - len(frequencies))), float(scaling), longest


def _rope_problems(
    config: dict[str, Any],
    parameters: dict[str, Any],
    kind: Any,
    theta: Any,
    *,
    is_partial: bool,
    reads: Collection[str],
) -> list[str]:
    problems = []
    if any(isinstance(value, dict) for value in parameters.values()):
        problems.append("rope_parameters differs between layer types (supported: one set for all layers)")
    elif not _is_positive(theta):
        problems.append(f"rope_theta={theta!r} (must be a finite number above 0, here or in rope_parameters)")
    supported = ", ".join(("default", *SCALED_TYPES))
    if kind == LONG_ROPE and LONG_ROPE in reads:
        return problems
    if kind in LENGTH_DEPENDENT_TYPES:
        problems.append(
            f"rope_type={kind!r} depends on the sequence length, which would change keys already cached "
            f"(supported: {supported})"
        )
    elif kind not in ("default", *SCALED_TYPES):
        problems.append(f"rope_type={kind!r} (supported: {supported})")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if is_partial and kind != "default":
        problems.append(f"rope_type={kind!r} for a part of each head (supported: 'default')")
    elif not is_partial and partial not in (None, 1):
        problems.append(f"partial_rotary_factor={partial!r} (supported: 1)")
    return problems


def extended(spec: ModelSpec, config: Mapping[str, Any], factor: float) -> ModelSpec:
    """The spec of contexts up to `factor` times the trained length, by a larger base of the rotation.

    NTK-aware extrapolation as LongLLaDA fits it to diffusion models (arXiv 2506.14429): the base b becomes
    lambda * b with lambda = (T / 2 pi) ** (d / e) / b, where T is the longest context, d the rotated
    dimensions and e = 2 * ceil(d / 2 * log_b(trained length / 2 pi)) those that went once round in training.
    No dimension rotates faster than it did. Departure: lambda is not rounded up. Raises UserError IDLM-0620
    for a checkpoint that scales its rotation already."""
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
    """The positions of a rotation: YaRN and linear scaling multiply the length of the training by `factor`,
    where other recipes state the longer `max_position_embeddings`."""
    if kind == LONG_ROPE:
        # Up to here, rows of all positions have the frequencies of short contexts.
        return min(max_positions, int(trained_positions(config, parameters, max_positions)))
    factor = parameters.get("factor")
    if kind not in ("linear", "yarn") or not is_number(factor):
        return max_positions
    return max(max_positions, int(factor * trained_positions(config, parameters, max_positions)))


def trained_positions(config: Mapping[str, Any], parameters: Mapping[str, Any], max_positions: int) -> Any:
    """The length of the training before the rotation was scaled; `max_positions` if config.json has none."""
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
            "partial_rotary_factor": 1.0,
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
