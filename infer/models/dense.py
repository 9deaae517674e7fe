"""The decoder trunk shared by all dense families: plain torch over packed ragged rows, fused projections.

Not a transformers module: attention is a callback, there is no cache, no mask and no batch axis in here.
Rounding follows transformers step by step (norms in fp32, then cast), so that bf16 logits agree as well.
R rows fed this pass, M MASK rows of them, X rows whose logits are wanted, N query heads, K KV heads, J fused
heads (N + 2K, or N + K without the values), H head dim, h half of it, D width, F ffn, V vocabulary, E output
width of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idlm.infer.models.base import Attend, ModelSpec, TensorNames
from idlm.infer.parallel import ALONE, Shards
from idlm.lora import low_rank

SUMMED = ("o", "down")
"""Projections whose input is divided among ranks, so that their outputs are summed."""


class LowRank(nn.Module):
    """Gated LoRA of one fused projection: an A and a B for each of its parts, zero where a part is not
    adapted.
    """

    def __init__(
        self, sizes: tuple[int, ...], width: int, *, rank: int, scaling: float, like: Tensor
    ) -> None:
        super().__init__()

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=like.device, dtype=like.dtype), requires_grad=False)

        self.a = nn.ParameterList(zeros(rank, width) for _ in sizes)
        self.b = nn.ParameterList(zeros(size, rank) for size in sizes)
        self.scaling = scaling

    def forward(self, x_MD: Tensor) -> Tensor:
        """What the projection's output gains, [M, E]."""
        parts = [low_rank(x_MD, a, b, self.scaling) for a, b in zip(self.a, self.b, strict=True)]
        return torch.cat(parts, dim=-1)


class DenseLayer(nn.Module):
    """One block's weights. Query, key and value rows are stacked in `qkv`, gate and up rows in `gate_up`."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, shards: Shards = ALONE
    ) -> None:
        super().__init__()
        self.shards, spec = shards, shards.local(spec)

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
        self.lora: nn.ModuleDict | None = None
        self.spec = spec

    def projections(
        self, names: TensorNames
    ) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], Tensor, Tensor | None]]:
        """Per fused projection: the checkpoint's modules in it, their output widths, weight and bias."""
        spec = self.spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        ffn = spec.ffn_width
        return {
            "qkv": ((names.q, names.k, names.v), (q_rows, kv_rows, kv_rows), self.qkv, self.qkv_bias),
            "gate_up": ((names.gate, names.up), (ffn, ffn), self.gate_up, self.gate_up_bias),
            "o": ((names.o,), (spec.width,), self.o, self.o_bias),
            "down": ((names.down,), (spec.width,), self.down, self.down_bias),
        }

    def project(self, name: str, x_RD: Tensor, rows_M: Tensor | None) -> Tensor:
        """Projection `name` of all rows, [R, E]; an adapter adds its part to `rows_M` and touches no other
        row. Of `o` and `down` a rank computes a summand, the first one with the bias.
        """
        has_bias = self.shards.rank == 0 or name not in SUMMED
        out_RE = F.linear(x_RD, getattr(self, name), getattr(self, f"{name}_bias") if has_bias else None)
        if self.lora is not None and rows_M is not None:
            out_RE.index_add_(0, rows_M, self.lora[name](x_RD.index_select(0, rows_M)))
        return self.shards.sum(out_RE) if name in SUMMED else out_RE

    def forward(
        self,
        x_RD: Tensor,
        layer: int,
        cos_R1H: Tensor,
        sin_R1H: Tensor,
        attend: Attend,
        mask_rows_M: Tensor | None,
    ) -> Tensor:
        spec = self.spec
        normed_RD = rms_norm(x_RD, self.attention_norm, spec.norm_eps)
        qkv_RJH = self.project("qkv", normed_RD, mask_rows_M).view(x_RD.shape[0], -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        qk_RJH = qkv_RJH[:, :num_rotated]
        if self.qk_norm is not None:
            qk_RJH = rms_norm(qk_RJH, self.qk_norm, spec.norm_eps)
        qk_RJH = rotate(qk_RJH, cos_R1H, sin_R1H)
        o_RNH = attend(
            layer, qk_RJH[:, : spec.num_heads], qk_RJH[:, spec.num_heads :], qkv_RJH[:, num_rotated:]
        )
        x_RD = x_RD + self.project("o", o_RNH.reshape(x_RD.shape[0], -1), mask_rows_M)
        normed_RD = rms_norm(x_RD, self.mlp_norm, spec.norm_eps)
        gate_RF, up_RF = self.project("gate_up", normed_RD, mask_rows_M).chunk(2, dim=-1)
        return x_RD + self.project("down", F.silu(gate_RF) * up_RF, mask_rows_M)


class DenseTrunk(nn.Module):
    """Embedding, layers, final norm, head. Built empty: the loader fills `weight_targets`."""

    inv_freq: Tensor

    def __init__(
        self, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, shards: Shards = ALONE
    ) -> None:
        super().__init__()
        self.spec, self.shards = spec, shards
        self.embed = nn.Parameter(
            torch.empty(spec.vocab_size, spec.width, device=device, dtype=dtype), requires_grad=False
        )
        self.layers = nn.ModuleList(DenseLayer(spec, device, dtype, shards) for _ in range(spec.num_layers))
        self.final_norm = nn.Parameter(
            torch.empty(spec.width, device=device, dtype=dtype), requires_grad=False
        )
        self._head_rows = shards.part(spec.vocab_size)
        self.head = (
            self.embed[self._head_rows]
            if spec.tie_embeddings
            else nn.Parameter(torch.empty_like(self.embed[self._head_rows]), requires_grad=False)
        )
        self.register_buffer("inv_freq", torch.tensor(spec.rope_inv_freq, device=device), persistent=False)
        self.is_adapted = False
        self.mask_row: nn.Parameter | None = None

    def forward(
        self, token_ids_R: Tensor, positions_R: Tensor, attend: Attend, is_mask_R: Tensor | None = None
    ) -> Tensor:
        """Return hidden_RD after the final norm; ids and positions are int64 on the trunk's device."""
        mask_rows_M = self._mask_rows(is_mask_R)
        x_RD = self._embed(token_ids_R, mask_rows_M)
        cos_R1H, sin_R1H = self._rotary_tables(positions_R, x_RD.dtype)
        for index, layer in enumerate(self.layers):
            x_RD = layer(x_RD, index, cos_R1H, sin_R1H, attend, mask_rows_M)
        return rms_norm(x_RD, self.final_norm, self.spec.norm_eps)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Return logits_XV in fp32; the product itself runs in the weights' dtype."""
        return self.shards.gather(F.linear(hidden_XD, self.head), self.spec.vocab_size).float()

    def _mask_rows(self, is_mask_R: Tensor | None) -> Tensor | None:
        """Indices of the rows that the adapter applies to; None when there is no adapter or no such row."""
        if not self.is_adapted or is_mask_R is None:
            return None
        rows_M = is_mask_R.nonzero()[:, 0]
        return rows_M if len(rows_M) else None

    def _embed(self, token_ids_R: Tensor, mask_rows_M: Tensor | None) -> Tensor:
        if self.mask_row is None or mask_rows_M is None:
            return F.embedding(token_ids_R, self.embed)
        # The id of these rows may lie outside the table.
        x_RD = F.embedding(token_ids_R.index_fill(0, mask_rows_M, 0), self.embed)
        return x_RD.index_copy_(0, mask_rows_M, self.mask_row.expand(len(mask_rows_M), -1))

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
    """Where a checkpoint tensor goes: `shape` is what the file must hold, of which `part` is broadcast into
    `view`.
    """

    view: Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()


def weight_targets(trunk: DenseTrunk, names: TensorNames) -> dict[str, WeightTarget]:
    """Every tensor the checkpoint must hold, by its name there; views into the trunk's own memory."""
    spec, shards = trunk.spec, trunk.shards
    targets = {names.embed: target_of(trunk.embed), names.final_norm: target_of(trunk.final_norm)}
    if not spec.tie_embeddings:
        rows = shards.part(spec.vocab_size)
        targets[names.head] = WeightTarget(view=trunk.head, shape=tuple(trunk.embed.shape), part=(rows,))
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, DenseLayer)
        targets[names.attention_norm.format(number)] = target_of(layer.attention_norm)
        targets[names.mlp_norm.format(number)] = target_of(layer.mlp_norm)
        if layer.qk_norm is not None:
            q_norm, k_norm = layer.qk_norm.split((layer.spec.num_heads, layer.spec.num_kv_heads))
            targets[names.q_norm.format(number)] = WeightTarget(view=q_norm, shape=(spec.head_dim,))
            targets[names.k_norm.format(number)] = WeightTarget(view=k_norm, shape=(spec.head_dim,))
        for fused, (parts, sizes, weight, bias) in layer.projections(names).items():
            axis = 1 if fused in SUMMED else 0
            for part, view in zip(parts, weight.split(sizes), strict=True):
                targets[f"{part.format(number)}.weight"] = target_of(view, shards, axis)
            if bias is not None:
                for part, view in zip(parts, bias.split(sizes), strict=True):
                    whole = ALONE if fused in SUMMED else shards
                    targets[f"{part.format(number)}.bias"] = target_of(view, whole, 0)
    return targets


def target_of(view: Tensor, shards: Shards = ALONE, axis: int = 0) -> WeightTarget:
    """A checkpoint tensor of which `view` is this rank's equal part along `axis`; alone, the whole."""
    shape = list(view.shape)
    shape[axis] *= shards.size
    part = (slice(None),) * axis + (shards.part(shape[axis]),)
    return WeightTarget(view=view, shape=tuple(shape), part=() if shards.size == 1 else part)
