"""What accelerators see of a pass: the plan, the blocks being decided, and the keys and values stored so far.

Everything is a plain tensor on the engine's device. No function waits for the device and no shape depends on
what a tensor holds, so a CUDA graph can hold every pass. Slots are logical (of their own sequence) unless a
name says physical.
B sequences, b some of them, R rows still computed, W positions of a block, X any slots, C listed slots, P
pages, N query heads, K KV heads, H head dim, S physical slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from idlm.infer.state.batch import ActiveBlocks, StepPlan
from idlm.infer.state.kv_cache import KVCache

NOT_LISTED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLists:
    """What the plan of layers with lists has to know: where each sequence's block starts, which sequences see
    lists (bool), and the width of lists."""

    starts_B: Tensor
    listed_B: Tensor
    num_listed: int


@dataclass(slots=True, kw_only=True)
class PassView:
    """One pass. `plan` is what the decoder laid out; `rows_BW` follows what is still computed: the number,
    among those rows, of the row at each position of the active block, -1 where there is none. `is_working_B`
    (bool): the plan has rows of the sequence's block; `is_mask_BW` (bool): positions where it has masks.
    `needs_all_rows_B` (bool): sequences of which the kv side lets no row be dropped. `waits_B` (bool):
    sequences beyond the capacity so far (`RowSelection`); they decide nothing in this pass, so no state may
    follow from it. `scale`: of scores."""

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
    waits_B: Tensor = field(init=False)

    def __post_init__(self) -> None:
        demand = self.active.demand
        self.waits_B = torch.zeros_like(self.needs_all_rows_B) if demand is None else demand.waits_B

    @property
    def max_slots(self) -> int:
        """Upper bound, known to the host, of the slots of any sequence in this pass."""
        return min(self.plan.max_slots, self.block_table_BP.shape[1] * self.page_size)

    @property
    def sequences_B(self) -> Tensor:
        """All sequences, by number."""
        return torch.arange(len(self.is_working_B), device=self.is_working_B.device)


def ascending(slots_BKC: Tensor) -> Tensor:
    """Lists in the order that attention takes: int32, ascending, `NOT_LISTED` behind the last slot."""
    beyond = torch.iinfo(torch.int32).max
    slots_BKC = torch.where(slots_BKC >= 0, slots_BKC, beyond).to(torch.int32).sort(dim=-1).values
    return torch.where(slots_BKC < beyond, slots_BKC, NOT_LISTED)


def block_rows(plan: StepPlan, active: ActiveBlocks) -> Tensor:
    """Which rows of a plan belong to active blocks, bool [R]; padding rows do not."""
    rows_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
    return (plan.slots_R >= active.starts_B[plan.sequence_R]) & (rows_R < plan.cu_rows_B1[-1])


def scheduled_rows(plan: StepPlan, active: ActiveBlocks) -> Tensor:
    """Which rows store tokens that the host scheduled, bool [R]: prompts, and clean blocks it knows of."""
    rows_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
    is_stored_R = (plan.slots_R < active.starts_B[plan.sequence_R]) & (rows_R < plan.cu_rows_B1[-1])
    if active.num_scheduled_B is None:
        return is_stored_R
    number_R = rows_R - plan.cu_rows_B1[plan.sequence_R]
    return is_stored_R & (number_R < active.num_scheduled_B[plan.sequence_R])
