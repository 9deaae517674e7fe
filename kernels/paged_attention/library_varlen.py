"""`torch.nn.attention.varlen` as a back end of paged attention, in versions of torch whose op takes pages.

It is FlashAttention inside torch: version 2, which pages in multiples of 256 slots, unless another one has
been activated.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from idlm.kernels.paged_attention.library import (
    LibraryPlan,
    causal_plan,
    common_problems,
    finished,
    is_installed,
    paged,
)
from idlm.kernels.paged_attention.rows import AttentionRows, HeadShape

OLD_PAGE_SIZE = 256
NEEDED = ("block_table", "seqused_k", "enable_gqa", "scale")


def problems(
    shape: HeadShape, *, page_size: int, is_causal: bool, deterministic: bool, device: torch.device
) -> list[str]:
    """Every reason why it cannot serve."""
    found = common_problems(shape, is_causal=is_causal, deterministic=deterministic, device=device)
    if not is_installed("torch.nn.attention.varlen"):
        return [*found, f"torch {torch.__version__} has no torch.nn.attention.varlen"]
    from torch.nn.attention import varlen

    missing = [name for name in NEEDED if name not in inspect.signature(varlen.varlen_attn).parameters]
    if missing:
        found.append(f"varlen_attn of torch {torch.__version__} takes no {', '.join(missing)}")
    if page_size % OLD_PAGE_SIZE and _activated() is None:
        found.append(
            f"FlashAttention 2 in torch takes pages of a multiple of {OLD_PAGE_SIZE} slots, got {page_size}"
            " (activate_flash_attention_impl with version 3 takes any)"
        )
    return found


def _activated() -> str | None:
    """The FlashAttention that replaces torch's own, if any."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def plan(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False, launch: Any = None
) -> LibraryPlan:
    """Lengths only."""
    return causal_plan("varlen", rows, shape)


def run(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    plan: LibraryPlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [R, N, H] of one layer."""
    from torch.nn.attention.varlen import varlen_attn

    o_RNH = varlen_attn(
        q_RNH,
        paged(k_cache_SKH, plan.rows.page_size),
        paged(v_cache_SKH, plan.rows.page_size),
        plan.cu_rows,
        None,
        plan.rows.max_rows,
        plan.rows.max_slots,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=plan.shape.group > 1,
        seqused_k=plan.num_slots_B,
        block_table=plan.block_table,
    )
    assert isinstance(o_RNH, torch.Tensor)
    return finished(o_RNH, plan, out)
