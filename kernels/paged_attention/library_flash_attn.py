"""FlashAttention by `flash-attn` (2) or `flash_attn_interface` (3) as a back end of paged attention.

Version 2 pages in multiples of 256 slots; version 3 takes any page size. Both align causal masks to the last
row, which is the newest slot here too.
"""

from __future__ import annotations

import importlib
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


def problems(
    shape: HeadShape, *, page_size: int, is_causal: bool, deterministic: bool, device: torch.device
) -> list[str]:
    """Every reason why it cannot serve."""
    found = common_problems(shape, is_causal=is_causal, deterministic=deterministic, device=device)
    if not is_installed("flash_attn_interface"):
        if not (is_installed("flash_attn") and is_installed("flash_attn.flash_attn_interface")):
            found.append("neither flash-attn nor flash_attn_interface is installed")
        elif page_size % OLD_PAGE_SIZE:
            found.append(
                f"flash-attn 2 takes pages of a multiple of {OLD_PAGE_SIZE} slots, got {page_size}"
                " (flash_attn_interface, version 3, takes any)"
            )
    if shape.head_dim > 256 or shape.head_dim % 8:
        found.append(f"takes head dims up to 256 in steps of 8, got {shape.head_dim}")
    return found


def plan(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False, launch: Any = None
) -> LibraryPlan:
    """Lengths and, for version 2, where every sequence's slots begin."""
    result = causal_plan("flash_attn", rows, shape)
    result.state = torch.nn.functional.pad(result.num_slots_B.cumsum(0, dtype=torch.int32), (1, 0))
    return result


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
    page_size = plan.rows.page_size
    k, v = paged(k_cache_SKH, page_size), paged(v_cache_SKH, page_size)
    if is_installed("flash_attn_interface"):
        o_RNH = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
            q_RNH,
            k,
            v,
            cache_seqlens=plan.num_slots_B,
            page_table=plan.block_table,
            cu_seqlens_q=plan.cu_rows,
            max_seqlen_q=plan.rows.max_rows,
            softmax_scale=scale,
            causal=True,
        )
    else:
        o_RNH = importlib.import_module("flash_attn").flash_attn_varlen_func(
            q_RNH,
            k,
            v,
            cu_seqlens_q=plan.cu_rows,
            cu_seqlens_k=plan.state,
            max_seqlen_q=plan.rows.max_rows,
            max_seqlen_k=plan.rows.max_slots,
            softmax_scale=scale,
            causal=True,
            block_table=plan.block_table,
        )
    return finished(o_RNH, plan, out)
