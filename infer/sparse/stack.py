"""The accelerators of an engine: built from their names, checked, and started together in each pass, in which
they drop some rows, and let rows see lists of slots in place of all slots.

The rest of the engine has rows as the decoder laid them out; here they get new numbers when some are
dropped. The host has chosen all shapes before the pass (`PassRows`), so nothing waits for the device, but
with graphs=off the host reads how many rows are left. These end with padding. A sequence whose rows exceed
the capacity decides nothing in this pass and comes first in the next. Attention is one launch a layer: layers
without lists share one plan, those with lists another. B sequences, R rows still computed, I rows after a
drop, W positions of a block, X wanted rows, H rows of the head (and head dim), N query heads, K KV heads, C
listed slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from idlm.config import schema
from idlm.errors import UserError
from idlm.infer.sparse.accelerator import (
    ACCELERATORS,
    NOT_LISTED,
    Accelerator,
    EngineSpec,
    KVAccelerator,
    KVPass,
    PassView,
    RowsAccelerator,
    RowSelection,
    RowsPass,
    ascending,
)
from idlm.infer.state.batch import BlockDemand, DroppedRows, StepPlan, row_columns
from idlm.infer.state.page_pool import KVCache
from idlm.kernels.paged_attention import BackendPlan
from idlm.kernels.row_compaction import Drop, PackedRows, RowCapacity, compact_rows, find_index, retain_wanted

USUAL = 1.25
"""Most sequences have at most this many times the mean number of rows that are left of a sequence."""


class SparseKV:
    """What the trunk gets of the cache (`KVAccess`) in a sparse pass."""

    def __init__(
        self,
        plan: StepPlan,
        view: PassView,
        slot_mapping_R: Tensor,
        *,
        kv: KVPass | None,
        rows: RowsPass | None,
        make_plan: Callable[[StepPlan, Tensor | None, int], BackendPlan],
    ) -> None:
        self.plan, self.view, self.cache, self.slot_mapping_R = plan, view, view.cache, slot_mapping_R
        self._kv, self._rows, self._make_plan = kv, rows, make_plan
        self._origin_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
        """Each row's number in the decoder's plan; for padding, the number of rows of that plan."""
        self._plans: dict[int, BackendPlan] = {}
        """By the number of listed slots; 0: the plan of layers without lists."""
        self._demand_B = self._num_fed_B = plan.cu_rows_B1.diff()
        """Rows that each sequence needed at the last drop, and at the first."""
        if rows is not None:
            capacity = view.active.capacity
            everything = RowSelection(keep_R=torch.ones_like(plan.slots_R, dtype=torch.bool))
            retained = rows.initial_rows() or (None if capacity is None else everything)
            self._drop(retained, None if capacity is None else capacity.fed)
            self._num_fed_B = self._demand_B
        self._num_fed = len(self.plan.slots_R)

    def select_rows(self, number: int, q_RNH: Tensor) -> Tensor | None:
        """Rows [I] that remain once keys and values of the layer are stored; None: all."""
        if self._kv is not None:
            self._kv.commit_kv(number)
        if self._rows is None:
            return None
        limit = self.view.active.capacity
        return self._drop(self._rows.select_rows(number, q_RNH), None if limit is None else limit.retained)

    def attend(self, number: int, q_RNH: Tensor) -> Tensor:
        lists_BKC = sums = None
        if self._kv is not None:
            lists_BKC = self._kv.select_kv(number, q_RNH)
            if lists_BKC is not None and not lists_BKC.shape[2]:
                # Rows that see no slot before their block: a list of nothing.
                lists_BKC = torch.nn.functional.pad(lists_BKC, (0, 1), value=NOT_LISTED)
            sums = None if lists_BKC is None else self._kv.prefix_sums(number, q_RNH)
            if lists_BKC is not None and not self._kv.lists_ascend:
                lists_BKC = ascending(lists_BKC)
        plan = self._plan(0 if lists_BKC is None else lists_BKC.shape[2])
        return self.cache.attend(number, q_RNH, plan, scale=self.view.scale, lists_BKC=lists_BKC, before=sums)

    def finish(self) -> tuple[Tensor, DroppedRows | None]:
        """Called after the last layer. Returns the rows [H] that the head computes, and what was dropped
        (None: no row can be)."""
        rows_H, dropped = self._wanted(self.view.plan)
        for each in (self._kv, self._rows):
            if each is not None:
                each.finish()
        return rows_H, dropped

    def _wanted(self, plan: StepPlan) -> tuple[Tensor, DroppedRows | None]:
        """Wanted rows of the decoder's plan that are left enter the head in the plan's order, which is that
        of waiting, up to the head's capacity."""
        rows_X, view, active = plan.logit_rows_X, self.view, self.view.active
        if self._rows is None:
            return rows_X, None
        assert active.demand is not None
        num_head = len(rows_X) if active.capacity is None else min(len(rows_X), active.capacity.head)
        retained = retain_wanted(
            *(rows_X, plan.first_logit_B, active.demand.num_wanted_B, view.waits_B, self._origin_R),
            size=active.size,
            num_head=num_head if active.is_exact or num_head < len(rows_X) else None,
        )
        if active.is_exact:
            retained = retained.cut(max(1, int(retained.demand_B.sum())))
        view.waits_B = retained.waits_B
        dropped = DroppedRows(
            origin_H=retained.origin_H,
            numbers_X=retained.numbers_X,
            demand=BlockDemand(
                num_wanted_B=retained.demand_B,
                waits_B=view.waits_B,
                num_fed_B=self._num_fed_B,
                num_retained_B=self._demand_B,
            ),
            num_fed=self._num_fed,
        )
        return retained.index_H, dropped

    def _drop(self, retained: RowSelection | None, capacity: int | None) -> Tensor | None:
        """Drop unselected rows and pack the rest into `capacity` rows (None: all fit); returns their numbers
        [I], None for all."""
        if retained is None:
            return None
        plan, view, num_left, limit = self.plan, self.view, len(self._origin_R), None
        if capacity is not None:
            assert view.active.num_waits_B is not None
            limit = RowCapacity(capacity=capacity, num_waits_B=view.active.num_waits_B)
            num_left = min(num_left, capacity)
        rows = PackedRows(**row_columns(plan), mapping_R=self.slot_mapping_R, origin_R=self._origin_R)
        drop = Drop(
            rows_BW=view.rows_BW,
            keep_R=retained.keep_R,
            needs_all_B=view.needs_all_rows_B,
            waits_B=view.waits_B,
            limits_R=retained.limits_R,
            scheduled_B=view.active.num_scheduled_B,
        )
        sizes = {"num_left": num_left, "num_origins": len(view.plan.slots_R)}
        left = compact_rows(rows, drop, **sizes, limit=limit, drops_stored=retained.drops_stored)
        if view.active.is_exact:
            left = left.cut(max(1, int(left.rows.cu_rows_B1[-1])))
        self.slot_mapping_R, self._origin_R = left.rows.mapping_R, left.rows.origin_R
        self._demand_B = torch.where(view.waits_B, 0, left.demand_B)
        self.plan = replace(
            plan,
            **row_columns(left.rows),
            usual_rows=math.ceil(USUAL * len(left.numbers_I) / len(view.waits_B)),
        )
        view.rows_BW, view.waits_B = left.rows_BW, left.waits_B
        self._plans.clear()
        return left.numbers_I

    def _plan(self, num_listed: int) -> BackendPlan:
        """The plan of attention over lists of `num_listed` slots, until rows are dropped."""
        if num_listed not in self._plans:
            listed_B = None if self._kv is None or not num_listed else self._kv.is_sparse_B
            self._plans[num_listed] = self._make_plan(self.plan, listed_B, num_listed)
        return self._plans[num_listed]


class AcceleratorStack:
    """At most one accelerator of each side."""

    def __init__(self, members: Sequence[Accelerator]) -> None:
        self.members = members
        self.kv = next((each for each in members if isinstance(each, KVAccelerator)), None)
        self.rows = next((each for each in members if isinstance(each, RowsAccelerator)), None)

    @property
    def is_lossy(self) -> bool:
        """Whether answers follow another distribution than the decoder's own."""
        return any(each.exactness == "lossy" for each in self.members)

    @property
    def decodes_again(self) -> bool:
        return any(each.decodes_again for each in self.members)

    @property
    def eager(self) -> list[str]:
        """Names of accelerators whose passes a CUDA graph cannot hold."""
        return [each.name for each in self.members if not each.is_static]

    def allocate(self) -> int:
        """Allocate the state of lanes; returns the bytes per KV page in addition to keys and values."""
        for each in self.members:
            each.allocate()
        return sum(each.page_bytes() for each in self.members)

    def pass_bytes(self) -> int:
        """Bytes that a pass takes for them at most."""
        return sum(each.pass_bytes() for each in self.members)

    def allocate_pages(self, num_pages: int) -> None:
        for each in self.members:
            each.allocate_pages(num_pages)

    @torch.inference_mode()
    def reset(self, lanes: list[int]) -> None:
        for each in self.members:
            each.reset(lanes)

    def begin(
        self,
        plan: StepPlan,
        cache: KVCache,
        *,
        block_table_BP: Tensor,
        page_size: int,
        slot_mapping_R: Tensor,
        scale: float,
        make_plan: Callable[[StepPlan, Tensor | None, int], BackendPlan],
    ) -> SparseKV | None:
        """Start a sparse pass; None if the pass is exact. `make_plan` plans attention
        of a plan's rows, of which sequences (bool, or None) see lists of so many slots."""
        if plan.active is None:
            return None
        active = plan.active
        rows_BW, is_mask_BW = find_index(
            plan.cu_rows_B1, plan.slots_R, plan.is_mask_R, active.starts_B, active.size
        )
        is_working_B = (rows_BW >= 0).any(dim=-1)
        view = PassView(
            plan=plan,
            active=active,
            cache=cache,
            block_table_BP=block_table_BP,
            page_size=page_size,
            scale=scale,
            rows_BW=rows_BW,
            is_working_B=is_working_B,
            is_mask_BW=is_mask_BW,
            needs_all_rows_B=torch.zeros_like(is_working_B),
        )
        kv = None if self.kv is None else self.kv.begin(view)
        if kv is not None and kv.needs_all_rows_B is not None:
            view.needs_all_rows_B = kv.needs_all_rows_B
        rows = None if self.rows is None else self.rows.begin(view)
        if kv is None and rows is None:
            return None
        return SparseKV(plan, view, slot_mapping_R, kv=kv, rows=rows, make_plan=make_plan)


def accelerator_configs(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each accelerator's Config. UserError IDLM-0102 for an unknown name, IDLM-0461 for bad options."""
    problems: list[str] = []
    configs = {
        name: schema.build_options(ACCELERATORS.get(name).Config, options, problems, f"accelerators.{name}.")
        for name, options in given.items()
    }
    if problems:
        raise UserError("IDLM-0461", "; ".join(problems), fix="correct the accelerator options named")
    return configs


def stack_of(configs: Mapping[str, Any], spec: EngineSpec) -> AcceleratorStack:
    """The accelerators of an engine, from the Config of each by name. Raises UserError IDLM-0460 with every
    reason why they do not fit the engine or one another."""
    made = [ACCELERATORS.get(name)(config, spec) for name, config in configs.items()]
    reasons = [f"{each.name}: {problem}" for each in made for problem in each.problems()]
    if made and spec.has_windows:
        reasons.append("some layers of the model see a window of positions")
    sides: dict[str, list[str]] = {}
    for each in made:
        sides.setdefault(each.side, []).append(each.name)
    reasons += [
        f"{' and '.join(names)} are {'both' if len(names) == 2 else 'all'} of the {side} side (allowed: one "
        "of each side)"
        for side, names in sides.items()
        if len(names) > 1
    ]
    if reasons:
        raise UserError(
            "IDLM-0460",
            f"accelerators=[{','.join(configs)}] cannot work with this engine:"
            + "".join(f"\n  - {reason}" for reason in reasons),
            fix="set each to what is allowed, or leave the accelerator out (accelerators=[])",
        )
    return AcceleratorStack(made)
