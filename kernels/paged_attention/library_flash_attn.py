"""FlashAttention as a back end of paged attention: version 3 (`flash_attn_interface`), version 4
(`flash-attn-4`, which nothing compiles ahead of time) or version 2 (`flash-attn`), in this order.

Version 2 pages in multiples of 256 slots; versions 3 and 4 take any page size. All align causal masks to the
last row, which is the newest slot here too. Version 4 does not split a sequence's cache over programs on
Hopper, so long contexts of few sequences leave most of the device idle.
"""

from __future__ import annotations

import importlib
import importlib.util
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
NEW_CAPABILITIES = (9, 10, 11)
"""Major compute capabilities whose kernels of version 4 take pages."""
NEW_HEAD_DIM = 128
"""With larger heads a block of version 4 has fewer slots than the threads that look up their pages."""


def obstacles(shape: HeadShape, *, page_size: int, device: torch.device) -> dict[int, str]:
    """Version to what keeps it from serving here, "" for nothing; the preferred version comes first."""
    found = {3: "", 4: "", 2: ""}
    if not is_installed("flash_attn_interface"):
        found[3] = "flash_attn_interface (version 3) is not installed"
    if not _is_part_installed("cute"):
        found[4] = "flash-attn-4 is not installed (pip install 'idlm[flash-attn]')"
    elif shape.head_dim > NEW_HEAD_DIM:
        found[4] = f"flash-attn-4 takes pages with head dims up to {NEW_HEAD_DIM}, got {shape.head_dim}"
    elif torch.cuda.is_available() and device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        if major not in NEW_CAPABILITIES:
            found[4] = f"flash-attn-4 takes pages on compute capability 9 to 11, got {major}"
    if not _is_part_installed("flash_attn_interface"):
        found[2] = "flash-attn (version 2) is not installed"
    elif page_size % OLD_PAGE_SIZE:
        found[2] = f"flash-attn 2 takes pages of a multiple of {OLD_PAGE_SIZE} slots, got {page_size}"
    return found


def _is_part_installed(name: str) -> bool:
    """Whether the folder `flash_attn`, which versions 2 and 4 share, holds this module."""
    return is_installed("flash_attn") and is_installed(f"flash_attn.{name}")


def version(shape: HeadShape, *, page_size: int, device: torch.device) -> int | None:
    """The version that serves, None if none does."""
    found = obstacles(shape, page_size=page_size, device=device)
    return next((number for number, obstacle in found.items() if not obstacle), None)


def problems(
    shape: HeadShape, *, page_size: int, is_causal: bool, deterministic: bool, device: torch.device
) -> list[str]:
    """Every reason why it cannot serve."""
    found = common_problems(shape, is_causal=is_causal, deterministic=deterministic, device=device)
    if version(shape, page_size=page_size, device=device) is None:
        found += obstacles(shape, page_size=page_size, device=device).values()
    if shape.head_dim > 256 or shape.head_dim % 8:
        found.append(f"takes head dims up to 256 in steps of 8, got {shape.head_dim}")
    return found


def plan(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False, launch: Any = None
) -> LibraryPlan:
    """Lengths, the version that serves, and for version 2 where every sequence's slots begin."""
    result = causal_plan("flash_attn", rows, shape)
    serving = version(shape, page_size=rows.page_size, device=rows.cu_rows.device)
    result.state = serving, torch.nn.functional.pad(result.num_slots_B.cumsum(0, dtype=torch.int32), (1, 0))
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
    serving, cu_slots = plan.state
    q_k_v = q_RNH, paged(k_cache_SKH, page_size), paged(v_cache_SKH, page_size)
    shared = {
        "cu_seqlens_q": plan.cu_rows,
        "max_seqlen_q": plan.rows.max_rows,
        "softmax_scale": scale,
        "causal": True,
    }
    if serving == 3:
        o_RNH = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
            *q_k_v, cache_seqlens=plan.num_slots_B, page_table=plan.block_table, **shared
        )
    elif serving == 4:
        o_RNH, _ = importlib.import_module("flash_attn.cute").flash_attn_varlen_func(
            *q_k_v,
            seqused_k=plan.num_slots_B,
            page_table=plan.block_table,
            max_seqlen_k=plan.rows.max_slots,
            **shared,
        )
    else:
        o_RNH = importlib.import_module("flash_attn").flash_attn_varlen_func(
            *q_k_v,
            cu_seqlens_k=cu_slots,
            max_seqlen_k=plan.rows.max_slots,
            block_table=plan.block_table,
            **shared,
        )
    return finished(o_RNH, plan, out)
