"""FlashInfer's paged prefill as a back end of paged attention; its planner waits for the device.

Rows behind the last sequence are not given to it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from idlm.kernels.paged_attention.library import (
    LibraryPlan,
    causal_plan,
    common_problems,
    is_installed,
    paged,
)
from idlm.kernels.paged_attention.rows import AttentionRows, HeadShape

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = (64, 128, 256)


def problems(
    shape: HeadShape, *, page_size: int, is_causal: bool, deterministic: bool, device: torch.device
) -> list[str]:
    """Every reason why it cannot serve."""
    found = common_problems(shape, is_causal=is_causal, deterministic=deterministic, device=device)
    if not is_installed("flashinfer"):
        found.append("flashinfer is not installed (pip install flashinfer-python; it compiles with nvcc)")
    if shape.head_dim not in HEAD_DIMS:
        found.append(f"takes head dims {HEAD_DIMS}, got {shape.head_dim}")
    return found


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def plan(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False, launch: Any = None
) -> LibraryPlan:
    """Page lists of all sequences; the library plans with the first layer, which knows the scale."""
    return causal_plan("flashinfer", rows, shape)


def _wrapper(plan: LibraryPlan, scale: float) -> tuple[Any, int]:
    """FlashInfer's planned wrapper and the number of rows that it serves."""
    device, page_size = plan.cu_rows.device, plan.rows.page_size
    flashinfer = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD")
    num_pages_B = (plan.num_slots_B + page_size - 1) // page_size
    is_used = torch.arange(plan.block_table.shape[1], device=device) < num_pages_B[:, None]
    last_page_B = torch.where(plan.num_slots_B > 0, (plan.num_slots_B - 1) % page_size + 1, 0)
    wrapper.plan(
        plan.cu_rows,
        torch.nn.functional.pad(num_pages_B.cumsum(0, dtype=torch.int32), (1, 0)),
        plan.block_table[is_used],
        last_page_B.to(torch.int32),
        plan.shape.num_heads,
        plan.shape.num_kv_heads,
        plan.shape.head_dim,
        page_size,
        causal=True,
        sm_scale=scale,
        q_data_type=plan.shape.dtype,
    )
    return wrapper, int(plan.cu_rows[-1])


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
    if plan.state is None:
        plan.state = _wrapper(plan, scale)
    wrapper, num_fed = plan.state
    page_size = plan.rows.page_size
    cache = paged(k_cache_SKH, page_size), paged(v_cache_SKH, page_size)
    fed_RNH: torch.Tensor = wrapper.run(q_RNH[:num_fed].contiguous(), cache)
    if out is None and num_fed == q_RNH.shape[0]:
        return fed_RNH
    o_RNH = torch.empty(q_RNH.shape, dtype=q_RNH.dtype, device=q_RNH.device) if out is None else out
    o_RNH[:num_fed] = fed_RNH
    o_RNH[num_fed:] = 0
    return o_RNH
