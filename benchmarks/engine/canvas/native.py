"""Full-diffusion models in plain torch, as transformers users run them: eager modules, SDPA attention.

Written from the papers and the facts of the families (LLaDA arXiv 2502.09992, Dream arXiv 2508.15487,
LLaDA-MoE), with no code of the engine; only the spec of the shapes is shared. Experts run in grouped
products over rows sorted by expert, as transformers 5 runs them.

Every arm decides one mask of a canvas by low confidence at temperature 0. `native_fp64` follows LLaDA's older
generate.py (softmax of all logits in fp64), `native` today's (bf16 logits and softmax). `masked` computes
logits of masks only and no softmax: the confidence is exp(max - logsumexp). `compile` and `compile_masked`
compile the whole step, model and sampler, with dynamic shapes, so that the compiler may fuse the softmax.
Shapes: B canvases (1), L positions, M masks, D width, N heads, K KV heads, H head dim, V vocabulary, E
experts, C chosen experts, F ffn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engine.canvas.sizes import num_masks
from idlm.infer.models.base import ModelSpec, MoeSpec


class RmsNorm(nn.Module):
    """Norm in fp32, cast, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        wide_BLD = x_BLD.float()
        normed_BLD = wide_BLD * torch.rsqrt(wide_BLD.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed_BLD.to(x_BLD.dtype)


class Attention(nn.Module):
    """Separate projections, rotary positions and SDPA in which all positions see all."""

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
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LH, sin_LH)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class NativeModel(nn.Module):
    """A full-diffusion model. Built on the meta device by `empty_model`."""

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
        """Return the logits of all positions [B, L, V], not shifted."""
        return self.head(self.hidden(ids_BL))


def rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    first, second = x_BNLH.chunk(2, dim=-1)
    return x_BNLH * cos_LH + torch.cat((-second, first), dim=-1) * sin_LH


def random_native(spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> NativeModel:
    """A model of random weights, made on the device: products have the variance of their input."""
    model = empty_model(spec, device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def empty_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> NativeModel:
    with torch.device("meta"):
        model = NativeModel(spec).to(dtype)
    model.to_empty(device=device)
    model.inv_freq = torch.tensor(spec.rope_inv_freq, device=device)
    return model.requires_grad_(False).eval()


NATIVE_ARMS = ("native_fp64", "native", "compile", "masked", "compile_masked")
CHUNK_BYTES = 64 << 20
"""Bytes of the fp32 copy of one chunk of logits in the fused confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Token ids [1, L] and the positions of the masks [M], on the device of the model."""

    ids_BL: Tensor
    index_M: Tensor


def random_canvas(
    length: int, prompt_share: float, *, vocab: int, mask_id: int, device: torch.device
) -> Canvas:
    masks = num_masks(length, prompt_share)
    generator = torch.Generator(device).manual_seed(0)
    ids_BL = torch.randint(vocab - 1, (1, length), generator=generator, device=device)
    # An id from the mask's on moves up by one, so that no token of the prompt is the mask.
    ids_BL += ids_BL >= mask_id
    index_M = torch.arange(length - masks, length, device=device)
    ids_BL[:, index_M] = mask_id
    return Canvas(ids_BL=ids_BL, index_M=index_M)


Proposals = tuple[Tensor, Tensor]
"""Tokens [M] and confidences [M] (fp32 or wider) of the masks."""
Propose = Callable[[Tensor, Tensor], Proposals]


def decided(canvas: Canvas, proposals: Proposals) -> Tensor:
    """The ids [1, L] after the mask of the highest confidence is decided."""
    tokens_M, confidence_M = proposals
    best, ids_BL = confidence_M.argmax(), canvas.ids_BL.clone()
    ids_BL[0, canvas.index_M[best]] = tokens_M[best]
    return ids_BL


def proposals_of_all(
    model: NativeModel, ids_BL: Tensor, index_M: Tensor, *, is_shifted: bool, dtype: torch.dtype | None
) -> Proposals:
    """Tokens and confidences by a softmax of the logits of all positions, in `dtype` (None: the model's)."""
    logits_BLV = model(ids_BL)
    if is_shifted:
        logits_BLV = torch.cat((logits_BLV[:, :1], logits_BLV[:, :-1]), dim=1)
    tokens_BL = logits_BLV.argmax(-1)
    probs_BLV = torch.softmax(logits_BLV if dtype is None else logits_BLV.to(dtype), dim=-1)
    confidence_BL = probs_BLV.gather(-1, tokens_BL[..., None])[..., 0]
    return tokens_BL[0, index_M], confidence_BL[0, index_M]


def masked_logits(model: NativeModel, ids_BL: Tensor, index_M: Tensor, *, is_shifted: bool) -> Tensor:
    """Logits [M, V] of the rows that predict the masks."""
    rows_M = (index_M - 1).clamp(min=0) if is_shifted else index_M
    logits_MV: Tensor = model.head(model.hidden(ids_BL)[0, rows_M])
    return logits_MV


def proposals_of_masks(
    model: NativeModel, ids_BL: Tensor, index_M: Tensor, *, is_shifted: bool, is_chunked: bool
) -> Proposals:
    """Tokens and confidences of the masks. `is_chunked`: by chunks of rows, without a second tensor of
    logits; a compiler fuses the fp32 copy into the reductions."""
    logits_MV = masked_logits(model, ids_BL, index_M, is_shifted=is_shifted)
    chunk_rows = max(1, CHUNK_BYTES // (4 * logits_MV.shape[1]))
    tokens, confidences = [], []
    for part_MV in logits_MV.split(chunk_rows) if is_chunked else [logits_MV]:
        highest_M, tokens_M = part_MV.max(-1)
        tokens.append(tokens_M)
        confidences.append((highest_M.float() - part_MV.float().logsumexp(-1)).exp())
    return torch.cat(tokens), torch.cat(confidences)


class NativeArm:
    """One native arm of a model; `backend` is torch.compile's (tests take one that needs no compiler)."""

    def __init__(self, arm: str, model: NativeModel, *, is_shifted: bool, backend: str = "inductor") -> None:
        assert arm in NATIVE_ARMS, arm
        self.is_compiled = arm.startswith("compile")
        if arm in ("native_fp64", "native", "compile"):
            dtype = torch.float64 if arm == "native_fp64" else None
            self._propose: Propose = partial(proposals_of_all, model, is_shifted=is_shifted, dtype=dtype)
        else:
            is_chunked = not self.is_compiled
            self._propose = partial(proposals_of_masks, model, is_shifted=is_shifted, is_chunked=is_chunked)
        if self.is_compiled:
            self._propose = torch.compile(self._propose, dynamic=True, backend=backend)

    @torch.inference_mode()
    def propose(self, canvas: Canvas) -> Proposals:
        if self.is_compiled:
            # Both sizes vary from call to call. `maybe`: int32 indices may add a bound, which is no error.
            torch._dynamo.maybe_mark_dynamic(canvas.ids_BL, 1)
            torch._dynamo.maybe_mark_dynamic(canvas.index_M, 0)
        return self._propose(canvas.ids_BL, canvas.index_M)

    @torch.inference_mode()
    def step(self, canvas: Canvas) -> Tensor:
        """Return the ids [1, L] after one step."""
        return decided(canvas, self.propose(canvas))
