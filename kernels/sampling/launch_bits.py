"""Grids of the kernels that forbid tokens. Nothing here waits for the device.

Shapes: X, Y rows, V vocabulary, W words of bits, M sequences with masks, A rows of bits of each, D drafts.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.sampling import kernel_bits
from idlm.kernels.sampling.launch import Shape
from idlm.kernels.sampling.types import DraftProbs, Tuning

TILE = 4096


def allowed_logits(logits_XV: Tensor, rows_Y: Tensor, bits_MW: Tensor, masks_Y: Tensor) -> Tensor:
    """Logits [Y, V]."""
    num_tokens = logits_XV.shape[1]
    out_YV = torch.empty(len(rows_Y), num_tokens, dtype=logits_XV.dtype, device=logits_XV.device)
    tile = min(TILE, triton.next_power_of_2(num_tokens))
    num_tiles = triton.cdiv(num_tokens, tile)
    if len(rows_Y):
        kernel_bits.allowed_kernel[(len(rows_Y) * num_tiles,)](
            logits_XV,
            rows_Y,
            bits_MW,
            masks_Y,
            out_YV,
            logits_XV.stride(0),
            num_tokens,
            bits_MW.shape[1],
            num_tiles,
            TILE=tile,
            num_warps=4,
        )
    return out_YV


def restrict(store: DraftProbs, lanes_M: Tensor, bits_MAW: Tensor, only_MD: Tensor, tuning: Tuning) -> None:
    """Two launches: the chunks, then their sums."""
    num_masks, num_tokens = store.logits_ZJV.shape[1:]
    shape = Shape(num_tokens, tuning)
    if not only_MD.numel():
        return
    kernel_bits.restrict_kernel[(only_MD.numel() * shape.num_half_tiles,)](
        *store.tensors(),
        lanes_M,
        bits_MAW,
        only_MD,
        num_tokens,
        bits_MAW.shape[2],
        shape.num_chunks,
        shape.num_half_tiles,
        num_masks,
        only_MD.shape[1],
        bits_MAW.shape[1],
        TILE=shape.half_tile,
        CHUNK=shape.chunk,
        num_warps=tuning.num_warps,
    )
    kernel_bits.restricted_mass_kernel[(only_MD.numel(),)](
        store.numbers_ZJF,
        store.masses_ZJC,
        lanes_M,
        only_MD,
        shape.num_chunks,
        num_masks,
        only_MD.shape[1],
        CHUNKS=shape.chunks,
        num_warps=1,
    )
