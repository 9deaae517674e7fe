"""A sparse pass: accelerators drop some of its rows, and let rows see lists of slots in place of all slots.

The runner's side of `accelerators/base.py`. The rest of the engine knows rows as the decoder laid them out;
here they are numbered anew when some are dropped. All shapes are known to the host before the pass and
nothing waits for the device: dropped rows leave padding rows at the end, and rows that find no room wait for
the next pass. Attention is one launch a layer: layers without lists share one plan, those with lists another.
B sequences, R rows still computed, I rows after a drop, W positions of a block, X wanted rows, N query heads,
K KV heads, C listed slots, H head dim, Z lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from idlm.infer.accelerators.base import KVPass, RowSelection, RowsPass
from idlm.infer.sparse.view import NOT_LISTED, AttentionLists, PassView, ascending
from idlm.infer.state.batch import StepPlan
from idlm.infer.state.wanted_rows import DroppedRows
from idlm.kernels.paged_attention import Plan
from idlm.kernels.row_compaction import Drop, PackedRows, Room, compact_rows


class SparseKV:
    """What the trunk gets of the cache (`KVAccess`) in a sparse pass. `num_waits_Z`: in how many passes in a
    row each lane waited, which `finish` updates; None: no selection has a capacity.
    """

    def __init__(
        self,
        plan: StepPlan,
        view: PassView,
        slot_mapping_R: Tensor,
        *,
        kv: KVPass | None,
        rows: RowsPass | None,
        make_plan: Callable[[StepPlan, AttentionLists | None], Plan],
        num_waits_Z: Tensor | None = None,
    ) -> None:
        self.plan, self.view, self.slot_mapping_R = plan, view, slot_mapping_R
        self._kv, self._rows, self._make_plan, self._num_waits_Z = kv, rows, make_plan, num_waits_Z
        self._origin_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
        """The row of the decoder's plan that each row is; their number for padding."""
        self._plans: dict[int, Plan] = {}
        """By the number of listed slots; 0: the plan of layers without lists."""
        if rows is not None:
            self._drop(rows.initial_rows())

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, H]."""
        return self.view.cache.layer(number)

    def scales(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales of keys and values [K]."""
        return self.view.cache.layer_scales(number)

    def select_rows(self, number: int, q_RNH: Tensor) -> Tensor | None:
        """Rows [I] that go on once keys and values of the layer are stored; None: all."""
        if self._kv is not None:
            self._kv.commit_kv(number)
        return None if self._rows is None else self._drop(self._rows.select_rows(number, q_RNH))

    def attend(self, number: int, q_RNH: Tensor) -> Tensor:
        """Attention output [R, N, H]."""
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
        return self.view.cache.attend(
            number, q_RNH, plan, scale=self.view.scale, lists_BKC=lists_BKC, before=sums
        )

    def finish(self) -> None:
        """Called after the last layer."""
        for each in (self._kv, self._rows):
            if each is not None:
                each.finish()
        if self._num_waits_Z is not None:
            lanes_B = self.plan.lanes_B
            self._num_waits_Z[lanes_B] = torch.where(self.view.waits_B, self._num_waits_Z[lanes_B] + 1, 0)

    def wanted(self, rows_X: Tensor) -> tuple[Tensor, DroppedRows | None]:
        """Where wanted rows of the decoder's plan are now, and what was dropped (None: no row can be)."""
        if self._rows is None:
            return rows_X, None
        num_rows, num_left = len(self.view.plan.slots_R), len(self._origin_R)
        place_R = torch.full((num_rows + 1,), PassView.NOT_FED, dtype=torch.int64, device=rows_X.device)
        place_R.scatter_(0, self._origin_R, torch.arange(num_left, device=rows_X.device))
        place_X = place_R[rows_X]
        return place_X.clamp(min=0), DroppedRows(has_logits_X=place_X >= 0, waits_B=self.view.waits_B)

    def _drop(self, kept: RowSelection | None) -> Tensor | None:
        """Go on with the rows that are kept, or must be, and find room; returns their numbers [I], None for
        all."""
        if kept is None:
            return None
        plan, view, num_left = self.plan, self.view, len(self._origin_R)
        room = self._room(kept)
        if room is not None and view.active.max_scheduled is not None:
            num_left = min(num_left, view.active.max_scheduled + room.capacity)
        rows = PackedRows(
            cu_rows_B1=plan.cu_rows_B1,
            sequence_R=plan.sequence_R,
            token_ids_R=plan.token_ids_R,
            positions_R=plan.positions_R,
            slots_R=plan.slots_R,
            limits_R=plan.limits_R,
            branch_starts_R=plan.branch_starts_R,
            mapping_R=self.slot_mapping_R,
            origin_R=self._origin_R,
            is_mask_R=plan.is_mask_R,
        )
        drop = Drop(
            rows_BW=view.rows_BW,
            keep_R=kept.keep_R,
            needs_all_B=view.needs_all_rows_B,
            waits_B=view.waits_B,
            limits_R=kept.limits_R,
            scheduled_B=view.active.num_scheduled_B,
        )
        left = compact_rows(rows, drop, num_left=num_left, num_origins=len(view.plan.slots_R), room=room)
        self.slot_mapping_R, self._origin_R = left.rows.mapping_R, left.rows.origin_R
        self.plan = replace(
            plan,
            cu_rows_B1=left.rows.cu_rows_B1,
            sequence_R=left.rows.sequence_R,
            token_ids_R=left.rows.token_ids_R,
            positions_R=left.rows.positions_R,
            slots_R=left.rows.slots_R,
            limits_R=left.rows.limits_R,
            branch_starts_R=left.rows.branch_starts_R,
            is_mask_R=left.rows.is_mask_R,
        )
        view.rows_BW, view.waits_B = left.rows_BW, left.waits_B
        self._plans.clear()
        return left.numbers_I

    def _room(self, kept: RowSelection) -> Room | None:
        """The room for rows that the host did not schedule; None: all have room."""
        if kept.capacity is None:
            return None
        assert kept.capacity >= 2 * self.view.active.size, (
            f"no room for a clean block and the next: {kept.capacity=} {self.view.active.size=}"
        )
        assert self._num_waits_Z is not None
        return Room(capacity=kept.capacity, num_waits_B=self._num_waits_Z[self.plan.lanes_B])

    def _plan(self, num_listed: int) -> Plan:
        """The plan of attention over lists of so many slots, until rows are dropped."""
        if num_listed not in self._plans:
            lists = None
            if num_listed:
                assert self._kv is not None
                lists = AttentionLists(
                    starts_B=self.view.active.starts_B,
                    listed_B=self._kv.is_sparse_B,
                    num_listed=num_listed,
                )
            self._plans[num_listed] = self._make_plan(self.plan, lists)
        return self._plans[num_listed]
