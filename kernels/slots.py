"""Slots of a KV cache, which may have eight bits, read in plain torch; K KV heads, H head dim, S slots."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn


def read_slots(cache_SKH: torch.Tensor, slots_X: torch.Tensor) -> torch.Tensor:
    """Slots [*X, K, H] of a cache, in its dtype."""
    if cache_SKH.dtype != FP8:
        return cache_SKH[slots_X]
    # By bytes: not every device gathers eight-bit floats.
    return cache_SKH.view(torch.uint8)[slots_X].view(FP8)


def gathered(
    cache_SKH: torch.Tensor, slots_X: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [X, K, H] of a cache; those of eight bits are scaled, and in `dtype`."""
    if cache_SKH.dtype != FP8:
        return cache_SKH.index_select(0, slots_X)
    cached_XKH = read_slots(cache_SKH, slots_X)
    if scale_K is None:
        return cached_XKH.to(dtype)
    return (cached_XKH.to(torch.float32) * scale_K[:, None]).to(dtype)
