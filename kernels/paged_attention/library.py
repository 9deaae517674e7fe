"""What the back ends that wrap a library share: they serve purely causal rows and are told where those end.

B sequences, R rows fed this pass.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from idlm.kernels.paged_attention.rows import AttentionRows, HeadShape


@dataclass(slots=True, kw_only=True)
class LibraryPlan:
    """Rows and cached slots of every sequence, as libraries want them."""

    backend: str
    rows: AttentionRows
    shape: HeadShape
    cu_rows: torch.Tensor
    """[B + 1] int32."""
    num_slots_B: torch.Tensor
    """[B] int32 cached slots, those of this pass included; 0 where a sequence has no rows."""
    block_table: torch.Tensor
    """[B, P] int32."""
    is_padding_R: torch.Tensor
    state: Any = None
    """What a library prepares itself, once per step."""


def causal_plan(backend: str, rows: AttentionRows, shape: HeadShape) -> LibraryPlan:
    """Lengths on the device; no host synchronisation."""
    num_rows = rows.own_slots_R.shape[0]
    last_B = (rows.cu_rows[1:] - 1).clamp(min=0, max=max(num_rows - 1, 0))
    num_slots_B = torch.zeros_like(last_B)
    if num_rows:
        num_slots_B = torch.where(rows.cu_rows.diff() > 0, rows.own_slots_R[last_B] + 1, 0)
    numbers_R = torch.arange(num_rows, device=rows.cu_rows.device)
    return LibraryPlan(
        backend=backend,
        rows=rows,
        shape=shape,
        cu_rows=rows.cu_rows.to(torch.int32),
        num_slots_B=num_slots_B.to(torch.int32),
        block_table=rows.block_table.to(torch.int32),
        is_padding_R=numbers_R >= rows.cu_rows[-1],
    )


def paged(cache_SKH: torch.Tensor, page_size: int) -> torch.Tensor:
    """The cache [S, K, H] as [pages, page_size, K, H], without a copy."""
    return cache_SKH.view(-1, page_size, *cache_SKH.shape[1:])


def finished(o_RNH: torch.Tensor, plan: LibraryPlan, out: torch.Tensor | None) -> torch.Tensor:
    """`o_RNH`, or `out` filled with it, zero in the padding."""
    result = o_RNH if out is None else out.copy_(o_RNH)
    return result.masked_fill_(plan.is_padding_R[:, None, None], 0)


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def common_problems(
    shape: HeadShape, *, is_causal: bool, deterministic: bool, device: torch.device
) -> list[str]:
    """What none of the libraries does."""
    found = []
    if device.type != "cuda":
        found.append(f"needs a CUDA device, got {device.type}")
    if not is_causal:
        found.append("serves rows only that see exactly the slots up to their own (no branches, no blocks)")
    if deterministic:
        found.append("its split of the cache depends on the batch, so results are not batch-invariant")
    if shape.dtype not in (torch.bfloat16, torch.float16):
        found.append(f"computes bfloat16 and float16, got {shape.dtype}")
    if shape.kv_dtype not in (None, shape.dtype):
        found.append(f"takes a cache of {shape.dtype}, got {shape.kv_dtype}")
    return found
