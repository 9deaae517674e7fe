"""The decoder trunk shared by all dense families: plain torch over packed ragged rows, fused projections.

Not a transformers module: attention is a callback, there is no cache, no mask and no batch axis in here.
Rounding follows transformers step by step (norms in fp32, then cast), so that bf16 logits agree as well.
R rows fed this pass, X rows whose logits are wanted, N query heads, K KV heads, J fused heads (N + 2K, or
N + K without the values), H head dim, h half of it, D width, F ffn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idlm.infer.models.base import Attend, ModelSpec, TensorNames


class DenseLayer(nn.Module):
    """One block's weights. Query, key and value rows are stacked in `qkv`, gate and up rows in `gate_up`."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        fused_heads, o_width = spec.num_heads + 2 * spec.num_kv_heads, spec.num_heads * spec.head_dim
        self.attention_norm = empty(spec.width)
        self.qkv = empty(fused_heads * spec.head_dim, spec.width)
        self.qkv_bias = empty(fused_heads * spec.head_dim) if spec.qkv_bias else None
        # One row per head, all equal within queries and within keys: both are then normalised by one call.
        self.qk_norm = empty(spec.num_heads + spec.num_kv_heads, spec.head_dim) if spec.qk_norm else None
        self.o = empty(spec.width, o_width)
        self.o_bias = empty(spec.width) if spec.o_bias else None
        self.mlp_norm = empty(spec.width)
        self.gate_up = empty(2 * spec.ffn_width, spec.width)
        self.gate_up_bias = empty(2 * spec.ffn_width) if spec.mlp_bias else None
        self.down = empty(spec.width, spec.ffn_width)
        self.down_bias = empty(spec.width) if spec.mlp_bias else None
        self.spec = spec

    def forward(self, x_RD: Tensor, layer: int, cos_R1H: Tensor, sin_R1H: Tensor, attend: Attend) -> Tensor:
        spec = self.spec
        normed_RD = rms_norm(x_RD, self.attention_norm, spec.norm_eps)
        qkv_RJH = F.linear(normed_RD, self.qkv, self.qkv_bias).view(x_RD.shape[0], -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        qk_RJH = qkv_RJH[:, :num_rotated]
        if self.qk_norm is not None:
            qk_RJH = rms_norm(qk_RJH, self.qk_norm, spec.norm_eps)
        qk_RJH = rotate(qk_RJH, cos_R1H, sin_R1H)
        o_RNH = attend(
            layer, qk_RJH[:, : spec.num_heads], qk_RJH[:, spec.num_heads :], qkv_RJH[:, num_rotated:]
        )
        x_RD = x_RD + F.linear(o_RNH.reshape(x_RD.shape[0], -1), self.o, self.o_bias)
        normed_RD = rms_norm(x_RD, self.mlp_norm, spec.norm_eps)
        gate_RF, up_RF = F.linear(normed_RD, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return x_RD + F.linear(F.silu(gate_RF) * up_RF, self.down, self.down_bias)


class DenseTrunk(nn.Module):
    """Embedding, layers, final norm, head. Built empty: the loader fills `weight_targets`."""

    inv_freq: Tensor

    def __init__(self, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Parameter(
            torch.empty(spec.vocab_size, spec.width, device=device, dtype=dtype), requires_grad=False
        )
        self.layers = nn.ModuleList(DenseLayer(spec, device, dtype) for _ in range(spec.num_layers))
        self.final_norm = nn.Parameter(
            torch.empty(spec.width, device=device, dtype=dtype), requires_grad=False
        )
        self.head = (
            self.embed
            if spec.tie_embeddings
            else nn.Parameter(torch.empty_like(self.embed), requires_grad=False)
        )
        self.register_buffer("inv_freq", torch.tensor(spec.rope_inv_freq, device=device), persistent=False)

    def forward(self, token_ids_R: Tensor, positions_R: Tensor, attend: Attend) -> Tensor:
        """Return hidden_RD after the final norm; ids and positions are int64 on the trunk's device."""
        x_RD = F.embedding(token_ids_R, self.embed)
        cos_R1H, sin_R1H = self._rotary_tables(positions_R, x_RD.dtype)
        for index, layer in enumerate(self.layers):
            x_RD = layer(x_RD, index, cos_R1H, sin_R1H, attend)
        return rms_norm(x_RD, self.final_norm, self.spec.norm_eps)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Return logits_XV in fp32; the product itself runs in the weights' dtype."""
        return F.linear(hidden_XD, self.head).float()

    def _rotary_tables(self, positions_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [R, 1, H] in `dtype`; the first half of sin is negated, as `rotate` wants it."""
        angles_Rh = positions_R[:, None].float() * self.inv_freq
        cos_Rh, sin_Rh = angles_Rh.cos() * self.spec.rope_scaling, angles_Rh.sin() * self.spec.rope_scaling
        cos_RH, sin_RH = torch.cat((cos_Rh, cos_Rh), dim=-1), torch.cat((-sin_Rh, sin_Rh), dim=-1)
        return cos_RH.to(dtype)[:, None], sin_RH.to(dtype)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32, cast back, then scale; `weight` broadcasts from the right."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def rotate(x_RJH: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half layout; sin carries the sign of the swapped halves."""
    swapped_RJH = x_RJH.roll(x_RJH.shape[-1] // 2, dims=-1)
    return (x_RJH * cos_R1H).add_(swapped_RJH.mul_(sin_R1H))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """Where a checkpoint tensor goes: `shape` is what the file must hold; it is broadcast into `view`."""

    view: Tensor
    shape: tuple[int, ...]


def weight_targets(trunk: DenseTrunk, names: TensorNames) -> dict[str, WeightTarget]:
    """Every tensor the checkpoint must hold, by its name there; views into the trunk's own memory."""
    spec = trunk.spec
    targets = {names.embed: _target(trunk.embed), names.final_norm: _target(trunk.final_norm)}
    if not spec.tie_embeddings:
        targets[names.head] = _target(trunk.head)
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, DenseLayer)
        targets[names.attention_norm.format(number)] = _target(layer.attention_norm)
        targets[names.mlp_norm.format(number)] = _target(layer.mlp_norm)
        if layer.qk_norm is not None:
            q_norm, k_norm = layer.qk_norm.split((spec.num_heads, spec.num_kv_heads))
            targets[names.q_norm.format(number)] = WeightTarget(view=q_norm, shape=(spec.head_dim,))
            targets[names.k_norm.format(number)] = WeightTarget(view=k_norm, shape=(spec.head_dim,))
        fused = (
            ((names.q, names.k, names.v), (q_rows, kv_rows, kv_rows), layer.qkv, layer.qkv_bias),
            ((names.gate, names.up), (spec.ffn_width, spec.ffn_width), layer.gate_up, layer.gate_up_bias),
            ((names.o,), (spec.width,), layer.o, layer.o_bias),
            ((names.down,), (spec.width,), layer.down, layer.down_bias),
        )
        for parts, sizes, weight, bias in fused:
            for suffix, tensor in (("weight", weight), ("bias", bias)):
                if tensor is not None:
                    for part, view in zip(parts, tensor.split(sizes), strict=True):
                        targets[f"{part.format(number)}.{suffix}"] = _target(view)
    return targets


def _target(view: Tensor) -> WeightTarget:
    return WeightTarget(view=view, shape=tuple(view.shape))
