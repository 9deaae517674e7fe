"""Tokens that a grammar allows: the others lose their logits, or their share of stored drafts.

Shapes: X, Y rows, V vocabulary, W words of bits, M sequences with masks, A rows of bits of each, D drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels import backend
from idlm.kernels.sampling.types import TUNING, ChunkShape, Drafts, PlainDraftProbs, Tuning

TILE = 4096


def allowed_logits(logits_XV: Tensor, rows_Y: Tensor, bits_MW: Tensor, masks_Y: Tensor) -> Tensor:
    """Copies [Y, V] of the rows `rows_Y` (int64), in which tokens that are not allowed have -inf.

    `masks_Y` (int64): the row of `bits_MW` with those; -1: all. `bits_MW` int32, contiguous: bit
    i % 32 of word i // 32 is set if token i is allowed."""
    assert 32 * bits_MW.shape[1] >= logits_XV.shape[1] and bits_MW.is_contiguous(), f"{bits_MW.shape=}"
    if not backend.has_kernels(logits_XV.device):
        is_open_YV = (
            allowed_tokens(bits_MW, logits_XV.shape[1])[masks_Y.clamp(min=0)] | (masks_Y < 0)[:, None]
        )
        return logits_XV[rows_Y].masked_fill(~is_open_YV, -torch.inf)
    import triton

    from idlm.kernels.sampling import kernel_bits

    num_tokens = logits_XV.shape[1]
    out_YV = torch.empty(len(rows_Y), num_tokens, dtype=logits_XV.dtype, device=logits_XV.device)
    tile = min(TILE, triton.next_power_of_2(num_tokens))
    num_tiles = triton.cdiv(num_tokens, tile)
    if len(rows_Y):
        kernel_bits.allowed_kernel[(len(rows_Y) * num_tiles,)](
            *(logits_XV, rows_Y, bits_MW, masks_Y, out_YV),
            *(logits_XV.stride(0), num_tokens, bits_MW.shape[1], num_tiles),
            TILE=tile,
            num_warps=4,
        )
    return out_YV


def restrict(
    store: Drafts, lanes_M: Tensor, bits_MAW: Tensor, only_MD: Tensor, *, tuning: Tuning = TUNING
) -> None:
    """Condition the stored distributions of some drafts on allowed tokens, in place.

    Draft d < D of lane `lanes_M[m]` keeps the tokens that row d of `bits_MAW[m]` allows (as in
    `allowed_logits`; A >= D), with the same ratios between them; if it has none of them, all its
    probabilities become 0. Where `only_MD` (int64) is a token and not -1, that token gets probability 1."""
    assert only_MD.shape[1] <= bits_MAW.shape[1] and bits_MAW.is_contiguous(), f"{bits_MAW.shape=}"
    if isinstance(store, PlainDraftProbs):
        num_drafts, num_tokens = only_MD.shape[1], store.probs_ZJV.shape[2]
        q_MDV = store.probs_ZJV[lanes_M, :num_drafts] * allowed_tokens(bits_MAW[:, :num_drafts], num_tokens)
        mass_MD1 = q_MDV.sum(-1, keepdim=True)
        q_MDV = q_MDV / mass_MD1.where(mass_MD1 > 0, 1.0)
        one_MDV = torch.nn.functional.one_hot(only_MD.clamp(min=0), num_tokens).double()
        store.probs_ZJV[lanes_M, :num_drafts] = torch.where((only_MD >= 0)[..., None], one_MDV, q_MDV)
        return
    from idlm.kernels.sampling import kernel_bits

    only_MD = only_MD.contiguous()
    num_masks, num_tokens = store.logits_ZJV.shape[1:]
    shape = ChunkShape(num_tokens, tuning)
    if not only_MD.numel():
        return
    kernel_bits.restrict_kernel[(only_MD.numel() * shape.num_half_tiles,)](
        *(store, lanes_M, bits_MAW, only_MD),
        (num_tokens, bits_MAW.shape[2], shape.num_chunks, shape.num_half_tiles),
        *(num_masks, only_MD.shape[1], bits_MAW.shape[1]),
        TILE=shape.half_tile,
        CHUNK=shape.chunk,
        num_warps=tuning.num_warps,
    )
    kernel_bits.restricted_mass_kernel[(only_MD.numel(),)](
        *(store.numbers_ZJF, store.masses_ZJC, lanes_M, only_MD),
        *(shape.num_chunks, num_masks, only_MD.shape[1]),
        CHUNKS=shape.chunks,
        num_warps=1,
    )


def allowed_tokens(bits: Tensor, num_tokens: int) -> Tensor:
    """bool [..., V] of words [..., W]."""
    indices = torch.arange(32, dtype=bits.dtype, device=bits.device)
    return (bits[..., None] >> indices & 1).flatten(-2)[..., :num_tokens] > 0
