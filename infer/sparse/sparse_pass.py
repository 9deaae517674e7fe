"""A pass that accelerators thin: which rows are still fed, and which of them see lists of slots.

The runner's side of `accelerators/base.py`. Everything else in the engine knows rows by what the decoder laid
out: here they are counted anew whenever some are dropped. Reads sizes back from the device, so no graph holds
such a pass yet.
B sequences, R rows still fed, I rows among them, W places of a block, X wanted rows, N query heads, H head
dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.infer.accelerators.base import KVPass, RowSelection, RowsPass
from idlm.infer.sparse.attention import SlotLists, sparse_attention
from idlm.infer.sparse.view import PassView, block_rows, rows_by_place, wide
from idlm.infer.state.batch import ActiveBlocks, StepPlan
from idlm.infer.state.kv_cache import KVCache
from idlm.kernels.paged_attention import Plan


def select_plan_rows(plan: StepPlan, rows_I: Tensor, limits_R: Tensor | None = None) -> StepPlan:
    """The plan with `rows_I` only, in order, which see their block below `limits_R`. Its wanted rows are
    still those of `plan`.
    """
    sequence_I = plan.sequence_R[rows_I]
    counts_B = torch.zeros_like(plan.lanes_B)
    # Padding rows belong to nobody.
    counts_B.scatter_add_(0, sequence_I, (rows_I < plan.cu_rows_B1[-1]).long())
    return replace(
        plan,
        cu_rows_B1=torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)),
        sequence_R=sequence_I,
        token_ids_R=plan.token_ids_R[rows_I],
        positions_R=plan.positions_R[rows_I],
        slots_R=plan.slots_R[rows_I],
        limits_R=(plan.limits_R if limits_R is None else limits_R)[rows_I],
        branch_starts_R=plan.branch_starts_R[rows_I],
        is_mask_R=None if plan.is_mask_R is None else plan.is_mask_R[rows_I],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The rows still fed, in two: `exact_I` with their plan (None: there are none), and those of the blocks
    of `sequences_b`, which lie at `rows_bW` where `is_fed_bW`.
    """

    exact_I: Tensor
    exact_plan: Plan | None
    sequences_b: Tensor
    rows_bW: Tensor
    is_fed_bW: Tensor
    own_bW: Tensor
    sees_own_bWW: Tensor


class SparseKV:
    """What the trunk is given of the cache (`KVAccess`) in such a pass."""

    def __init__(
        self,
        plan: StepPlan,
        view: PassView,
        slot_mapping_R: Tensor,
        *,
        kv: KVPass | None,
        rows: RowsPass | None,
        make_plan: Callable[[StepPlan], Plan],
    ) -> None:
        self.plan, self.view, self.slot_mapping_R = plan, view, slot_mapping_R
        self._kv, self._rows, self._make_plan = kv, rows, make_plan
        self._origin_R = torch.arange(len(plan.slots_R), device=plan.slots_R.device)
        self._all: Plan | None = None
        self._split: _Split | None = None
        if rows is not None:
            self._drop(rows.initial_rows())

    @property
    def _cache(self) -> KVCache:
        return self.view.cache

    @property
    def _active(self) -> ActiveBlocks:
        return self.view.active

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, H]."""
        return self._cache.layer(number)

    def scales(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and values [K]."""
        return self._cache.layer_scales(number)

    def select_rows(self, number: int, q_RNH: Tensor) -> Tensor | None:
        """Rows [I] that go on, keys and values of the layer being stored; None: all."""
        if self._kv is not None:
            self._kv.commit_kv(number)
        return None if self._rows is None else self._drop(self._rows.select_rows(number, q_RNH))

    def attend(self, number: int, q_RNH: Tensor) -> Tensor:
        """Attention output [R, N, H]; rows of sequences without lists are computed as ever."""
        slots_BKC = None if self._kv is None else self._kv.select_kv(number, q_RNH)
        if slots_BKC is None:
            self._all = self._all or self._make_plan(self.plan)
            return self._exact(number, q_RNH, self._all)
        split = self._split = self._split or self._make_split()
        o_RNH = torch.zeros_like(q_RNH)
        if split.exact_plan is not None:
            o_RNH[split.exact_I] = self._exact(number, q_RNH[split.exact_I], split.exact_plan)
        if len(split.sequences_b):
            o_bWNH = self._sparse(number, q_RNH, slots_BKC[split.sequences_b], split)
            o_RNH[split.rows_bW[split.is_fed_bW]] = o_bWNH[split.is_fed_bW].to(o_RNH.dtype)
        return o_RNH

    def finish(self) -> None:
        """All layers are through."""
        for each in (self._kv, self._rows):
            if each is not None:
                each.finish()

    def wanted(self, rows_X: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where wanted rows of the decoder's plan are now, and which of them still are (bool; None: all)."""
        if len(self._origin_R) == len(self.view.plan.slots_R):
            return rows_X, None
        place_R = torch.full_like(self.view.plan.slots_R, PassView.NOT_FED)
        place_R[self._origin_R] = torch.arange(len(self._origin_R), device=place_R.device)
        place_X = place_R[rows_X]
        return place_X.clamp(min=0), place_X >= 0

    def _drop(self, kept: RowSelection | None) -> Tensor | None:
        """Go on with what is kept, and with all rows that must be; returns those [I], None for all."""
        if kept is None:
            return None
        plan, active = self.plan, self._active
        is_open_R = block_rows(plan, active) & ~self.view.needs_all_rows_B[plan.sequence_R]
        limits_R = plan.limits_R
        if kept.limits_R is not None:
            limits_R = torch.where(is_open_R, torch.minimum(kept.limits_R, limits_R), limits_R)
        rows_I = (kept.keep_R | ~is_open_R).nonzero()[:, 0]
        assert len(rows_I) > 0, "an accelerator dropped every row"
        self.plan = select_plan_rows(plan, rows_I, limits_R)
        self.slot_mapping_R = self.slot_mapping_R[rows_I]
        self._origin_R = self._origin_R[rows_I]
        self.view.rows_BW = rows_by_place(self.plan, active)
        self._all = self._split = None
        return None if len(rows_I) == len(plan.slots_R) else rows_I

    def _exact(self, number: int, q_RNH: Tensor, plan: Plan) -> Tensor:
        return self._cache.attend(number, q_RNH, plan, scale=self.view.scale)

    def _make_split(self) -> _Split:
        """Waits for the device to learn how many rows are on either side."""
        assert self._kv is not None
        plan, active, view = self.plan, self._active, self.view
        is_sparse_R = block_rows(plan, active) & self._kv.is_sparse_B[plan.sequence_R]
        exact_I = (~is_sparse_R).nonzero()[:, 0]
        sequences_b = (self._kv.is_sparse_B & (view.rows_BW >= 0).any(-1)).nonzero()[:, 0]
        rows_bW = view.rows_BW[sequences_b]
        slots_bW = view.block_slots(sequences_b)
        is_fed_bW = rows_bW >= 0
        # A place that is not fed computes something that nobody reads.
        limits_bW = torch.where(is_fed_bW, plan.limits_R[rows_bW.clamp(min=0)], slots_bW[:, :1] + 1)
        return _Split(
            exact_I=exact_I,
            exact_plan=self._make_plan(select_plan_rows(plan, exact_I)) if len(exact_I) else None,
            sequences_b=sequences_b,
            rows_bW=rows_bW,
            is_fed_bW=is_fed_bW,
            own_bW=view.physical(slots_bW, sequences_b),
            sees_own_bWW=slots_bW[:, None] < limits_bW[:, :, None],
        )

    def _sparse(self, number: int, q_RNH: Tensor, slots_bKC: Tensor, split: _Split) -> Tensor:
        view, sequences_b = self.view, split.sequences_b
        (keys, values), (k_scale_K, v_scale_K) = self.layer(number), self.scales(number)
        lists = SlotLists(
            listed_bKC=view.physical(slots_bKC.flatten(1), sequences_b).view_as(slots_bKC),
            is_listed_bKC=slots_bKC >= 0,
            own_bW=split.own_bW,
            sees_own_bWW=split.sees_own_bWW,
        )
        q_bWNH = view.queries(q_RNH, sequences_b).to(wide(q_RNH.dtype))
        return sparse_attention(q_bWNH, (keys, k_scale_K), (values, v_scale_K), lists, scale=view.scale)
