"""Full-diffusion models in plain torch, as transformers users run them: eager modules, SDPA attention.

Written from the papers and the facts of the families (LLaDA arXiv 2502.09992, Dream arXiv 2508.15487,
LLaDA-MoE), with no code of the engine; only the spec of the shapes is shared. Experts run in grouped
products over rows sorted by expert, as transformers 5 runs them.
Shapes: B canvases (1), L places, D width, N heads, K KV heads, H head dim, V vocabulary, E experts, C chosen
experts, F ffn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idlm.infer.models.base import ModelSpec, MoeSpec, TensorNames


class RmsNorm(nn.Module):
    """Norm in fp32, cast, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide_BLD = x_BLD.float()
        normed_BLD = wide_BLD * torch.rsqrt(wide_BLD.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed_BLD.to(x_BLD.dtype)


class Attention(nn.Module):
    """Separate projections, rotary positions and SDPA in which all places see all."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.width, q_width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.width, kv_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.width, kv_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(q_width, spec.width, bias=spec.o_bias)
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.head_dim, self.is_grouped = spec.head_dim, spec.num_kv_heads != spec.num_heads

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        """Return the attention output [B, L, D]."""
        shape = (*x_BLD.shape[:2], -1, self.head_dim)
        q_BNLH = self.q_norm(self.q_proj(x_BLD).view(shape)).transpose(1, 2)
        k_BKLH = self.k_norm(self.k_proj(x_BLD).view(shape)).transpose(1, 2)
        v_BKLH = self.v_proj(x_BLD).view(shape).transpose(1, 2)
        q_BNLH, k_BKLH = rotate(q_BNLH, cos_LH, sin_LH), rotate(k_BKLH, cos_LH, sin_LH)
        o_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, enable_gqa=self.is_grouped)
        return self.o_proj(o_BNLH.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A SwiGLU."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return down(silu(gate) * up) [B, L, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


class Experts(nn.Module):
    """A softmax router in fp32, whose weights are not normalised, and grouped products over sorted rows."""

    def __init__(self, moe: MoeSpec, width: int) -> None:
        super().__init__()
        assert moe.score == "softmax" and not moe.is_normalised and not moe.shared_ffn_width, moe
        self.num_experts, self.num_chosen = moe.num_experts, moe.num_chosen
        self.router = nn.Linear(width, moe.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.ffn_width, width))
        self.down = nn.Parameter(torch.empty(moe.num_experts, width, moe.ffn_width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs by router weight [B, L, D]."""
        x_LD = x_BLD.flatten(0, 1)
        weights_LC, experts_LC = self.router(x_LD).float().softmax(-1).topk(self.num_chosen, dim=-1)
        sorted_experts, order = experts_LC.flatten().sort(stable=True)
        numbers_E = torch.arange(self.num_experts, device=x_LD.device)
        ends_E = torch.searchsorted(sorted_experts, numbers_E, right=True).to(torch.int32)
        hidden = grouped_product(x_LD[order // self.num_chosen], self.gate_up, ends_E)
        gate, up = hidden.chunk(2, dim=-1)
        out = grouped_product(F.silu(gate) * up, self.down, ends_E)
        out = out * weights_LC.flatten()[order, None].to(out.dtype)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return out[inverse].view(len(x_LD), self.num_chosen, -1).sum(1).view_as(x_BLD)


def grouped_product(rows: Tensor, weights: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to `ends_E[e]`, from the end before, times the transposed weight of expert e."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    found: Tensor = product(rows, weights.transpose(1, 2), offs=ends_E)
    return found


class Layer(nn.Module):
    """Attention and feed-forward part, each after a norm and added to its input."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(spec.width, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RmsNorm(spec.width, spec.norm_eps)
        self.mlp = Mlp(spec.width, spec.ffn_width) if spec.moe is None else Experts(spec.moe, spec.width)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        """Return the residual stream after the layer."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LH, sin_LH)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class NativeModel(nn.Module):
    """A full-diffusion model. Built on the meta device by `random_model` and `loaded_model`."""

    inv_freq: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert not spec.mlp_bias and not spec.tie_embeddings and spec.rotary_dim is None, spec
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.width)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = RmsNorm(spec.width, spec.norm_eps)
        self.head = nn.Linear(spec.width, spec.vocab_size, bias=False)
        self.register_buffer("inv_freq", torch.empty(0), persistent=False)

    def hidden(self, ids_BL: Tensor) -> Tensor:
        """Return the normalised output of the last layer [B, L, D]."""
        x_BLD = self.embed(ids_BL)
        positions_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
        angles_LH = (positions_L[:, None].float() * self.inv_freq).repeat(1, 2)
        cos_LH, sin_LH = angles_LH.cos().to(x_BLD.dtype), angles_LH.sin().to(x_BLD.dtype)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos_LH, sin_LH)
        return self.norm(x_BLD)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Return the logits of all places [B, L, V], not shifted."""
        return self.head(self.hidden(ids_BL))


def rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    """Rotate dimension i with i + H/2."""
    first, second = x_BNLH.chunk(2, dim=-1)
    return x_BNLH * cos_LH + torch.cat((-second, first), dim=-1) * sin_LH


def random_model(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0, sharpness: float = 1.0
) -> NativeModel:
    """A model of random weights, made on the device: products keep the variance of their input.

    `sharpness` multiplies the head, so that choices of tests do not depend on rounding.
    """
    model = _empty_model(spec, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.startswith("embed"):
                parameter.normal_(generator=generator)
            else:
                parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
        model.head.weight.mul_(sharpness)
    return model


def loaded_model(
    spec: ModelSpec, tensors: Mapping[str, Tensor], names: TensorNames, *, device: torch.device
) -> NativeModel:
    """A model with the tensors of a checkpoint under the family's names, in their dtype."""
    model = _empty_model(spec, device, tensors[names.embed].dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_tensor_of(name, tensors, names))
    return model


def _empty_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> NativeModel:
    with torch.device("meta"):
        model = NativeModel(spec).to(dtype)
    model.to_empty(device=device)
    model.inv_freq = torch.tensor(spec.rope_inv_freq, device=device)
    return model.requires_grad_(False).eval()


def _tensor_of(name: str, tensors: Mapping[str, Tensor], names: TensorNames) -> Tensor:
    """The tensor of a parameter; experts are stacked, gate rows before up rows."""
    top = {"embed.weight": names.embed, "norm.weight": names.final_norm, "head.weight": names.head}
    if name in top:
        return tensors[top[name]]
    _, number, part = name.split(".", 2)
    layer = int(number)
    whole = {
        "attention_norm.weight": names.attention_norm,
        "mlp_norm.weight": names.mlp_norm,
        "attention.q_norm.weight": names.q_norm,
        "attention.k_norm.weight": names.k_norm,
        "mlp.router.weight": names.router,
    }
    if part in whole:
        return tensors[whole[part].format(layer)]
    if part in ("mlp.gate_up", "mlp.down"):
        return _stacked(part, layer, tensors, names)
    module, _, kind = part.rpartition(".")
    projections = {
        "attention.q_proj": names.q,
        "attention.k_proj": names.k,
        "attention.v_proj": names.v,
        "attention.o_proj": names.o,
        "mlp.gate_proj": names.gate,
        "mlp.up_proj": names.up,
        "mlp.down_proj": names.down,
    }
    return tensors[f"{projections[module].format(layer)}.{kind}"]


def _stacked(part: str, layer: int, tensors: Mapping[str, Tensor], names: TensorNames) -> Tensor:
    parts = (names.expert_down,) if part == "mlp.down" else (names.expert_gate, names.expert_up)
    experts, expert = [], 0
    while parts[0].format(layer, expert) in tensors:
        experts.append(torch.cat([tensors[name.format(layer, expert)] for name in parts]))
        expert += 1
    return torch.stack(experts)
