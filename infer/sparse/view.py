"""What accelerators see of a pass: the plan, who has a block in work, and keys and values that are stored.

Everything is plain tensors on the engine's device; nothing here waits for it. Slots are logical, of their own
sequence, unless they are called physical.
B sequences, b some of them, R rows still fed, W places of a block, X any slots, P pages, N query heads, K KV
heads, H head dim, S physical slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.infer.state.batch import ActiveBlocks, StepPlan
from idlm.infer.state.kv_cache import KVCache

FP8 = torch.float8_e4m3fn


@dataclass(slots=True, kw_only=True)
class PassView:
    """`plan` is what the decoder laid out; `rows_BW` follows what is still fed: the row, counted among those,
    that is at a place of the block in work, -1 where there is none. `is_working_B` (bool): the pass was laid
    out to feed rows of its block; `is_mask_BW` (bool): the places that it then fed masks at.
    `needs_all_rows_B` (bool): of whom the kv side allows no row to be dropped. `scale`: of scores.
    """

    NOT_FED: ClassVar[int] = -1
    plan: StepPlan
    active: ActiveBlocks
    cache: KVCache
    block_table_BP: Tensor
    page_size: int
    scale: float
    rows_BW: Tensor
    is_working_B: Tensor
    is_mask_BW: Tensor
    needs_all_rows_B: Tensor

    def physical(self, slots_bX: Tensor, sequences_b: Tensor) -> Tensor:
        """Physical slots [b, X] of slots that the sequences own; of any other, some that are there."""
        most = self.block_table_BP.shape[1] * self.page_size - 1
        slots_bX = slots_bX.clamp(0, most)
        pages_bX = self.block_table_BP[sequences_b[:, None], slots_bX // self.page_size]
        return pages_bX * self.page_size + slots_bX % self.page_size

    def block_slots(self, sequences_b: Tensor) -> Tensor:
        """Slots [b, W] of the blocks in work."""
        places_W = torch.arange(self.active.size, device=sequences_b.device)
        return self.active.starts_B[sequences_b, None] + places_W

    def keys(self, layer: int, slots_bX: Tensor, sequences_b: Tensor) -> Tensor:
        """Keys [b, X, K, H], fp32 (fp64 of an fp64 cache), as attention reads them."""
        (keys, _), (scale_K, _) = self.cache.layer(layer), self.cache.layer_scales(layer)
        return read(keys, self.physical(slots_bX, sequences_b), scale_K)

    def queries(self, q_RNH: Tensor, sequences_b: Tensor) -> Tensor:
        """Queries [b, W, N, H] of the blocks in work, fp32 (fp64 of fp64); 0 at places that are not fed."""
        rows_bW = self.rows_BW[sequences_b]
        q_bWNH = q_RNH[rows_bW.clamp(min=0)].to(wide(q_RNH.dtype))
        return torch.where((rows_bW >= 0)[:, :, None, None], q_bWNH, 0)


def read(cache_SKH: Tensor, physical_X: Tensor, scale_K: Tensor | None) -> Tensor:
    """Slots of a cache [*X, K, H], fp32 (fp64 of fp64), scaled if it is of eight bits."""
    # By bytes: not every device gathers eight-bit floats.
    is_fp8 = cache_SKH.dtype == FP8
    read_XKH = cache_SKH.view(torch.uint8)[physical_X].view(FP8) if is_fp8 else cache_SKH[physical_X]
    read_XKH = read_XKH.to(wide(cache_SKH.dtype))
    return read_XKH if scale_K is None else read_XKH * scale_K[:, None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_rows(plan: StepPlan, active: ActiveBlocks) -> Tensor:
    """Which rows of a plan are of blocks in work, bool [R]; padding rows are not."""
    rows_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
    return (plan.slots_R >= active.starts_B[plan.sequence_R]) & (rows_R < plan.cu_rows_B1[-1])


def rows_by_place(plan: StepPlan, active: ActiveBlocks) -> Tensor:
    """`PassView.rows_BW` of a plan's rows."""
    size, device = active.size, plan.slots_R.device
    num_places = len(active.starts_B) * size
    place_R = plan.slots_R - active.starts_B[plan.sequence_R]
    # Rows of no block all go to one place behind the others, which is cut off.
    target_R = torch.where(block_rows(plan, active), plan.sequence_R * size + place_R, num_places)
    rows_X = torch.full((num_places + 1,), PassView.NOT_FED, dtype=torch.int64, device=device)
    rows_X.scatter_(0, target_R, torch.arange(len(target_R), device=device))
    return rows_X[:-1].view(-1, size)
