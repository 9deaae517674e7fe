"""Reads slots of a KV cache in plain torch; K KV heads, H head dim, S physical KV slots."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn


def gathered(
    cache_SKH: torch.Tensor, slots_X: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [X, K, H] of a cache, in `dtype`."""
    if cache_SKH.dtype != FP8:
        return cache_SKH.index_select(0, slots_X)
    # By bytes: not every device gathers eight-bit floats.
    cached_XKH = cache_SKH.view(torch.uint8).index_select(0, slots_X).view(FP8)
    if scale_K is None:
        return cached_XKH.to(dtype)
    return (cached_XKH.to(torch.float32) * scale_K[:, None]).to(dtype)
