"""One forward pass: StepPlan in, logits of the wanted rows out. The only file that joins model, KV cache and
kernel; `sparse_pass.py` does so for passes that accelerators thin.

Shapes: R rows, X wanted rows, N query heads, K KV heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from idlm.contracts import StepPlan
from idlm.errors import UserError
from idlm.infer.models.loader import LoadedModel
from idlm.infer.sparse.sparse_pass import DroppedRows
from idlm.infer.sparse.stack import NO_ACCELERATORS, AcceleratorStack
from idlm.infer.state.kv_cache import KVCache, PagePool
from idlm.kernels.linear.linears import check_rows_agree
from idlm.kernels.paged_attention import AttentionRows, HeadShape, Plan, plan_attention
from idlm.kernels.step_rows import map_slots


class Runner:
    """Model and cache of one device, and the accelerators between them."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        pool: PagePool,
        *,
        attention: str,
        stack: AcceleratorStack = NO_ACCELERATORS,
    ) -> None:
        self._trunk, self._cache, self.pool, self._attention = model.trunk, cache, pool, attention
        self._stack = stack
        self._heads = head_shape(model, cache.keys.dtype)
        self._scale = model.spec.head_dim**-0.5

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Tensor, DroppedRows | None]:
        """Logits [X, V] of `plan.logit_rows_X`, in the model's dtype, and what accelerators dropped (None:
        nothing); writes the KV of every fed row.

        In each layer all of it is stored before any row attends: a sequence may share pages that another one
        fills in this very pass.
        """
        page_size = self.pool.page_size
        num_pages = self.pool.pages_for(plan.max_slots)
        block_table_BP = self.pool.block_table_ZP[plan.lanes_B, :num_pages]
        slot_mapping_R = map_slots(
            block_table_BP, plan.sequence_R, plan.slots_R, plan.cu_rows_B1, page_size=page_size
        )
        make_plan = partial(self._plan_attention, block_table_BP)
        sparse_pass = self._stack.begin(
            plan,
            self._cache,
            block_table_BP=block_table_BP,
            page_size=page_size,
            slot_mapping_R=slot_mapping_R,
            scale=self._scale,
            make_plan=make_plan,
        )
        if sparse_pass is not None:
            fed = sparse_pass.plan
            hidden_RD = self._trunk(fed.token_ids_R, fed.positions_R, sparse_pass, fed.is_mask_R)
            sparse_pass.finish()
            rows_X, dropped = sparse_pass.wanted(plan.logit_rows_X)
            return self._trunk.logits(hidden_RD[rows_X]), dropped
        kv = PagedKV(
            cache=self._cache, slot_mapping_R=slot_mapping_R, plan=make_plan(plan), scale=self._scale
        )
        hidden_RD = self._trunk(plan.token_ids_R, plan.positions_R, kv, plan.is_mask_R)
        return self._trunk.logits(hidden_RD[plan.logit_rows_X]), None

    def _plan_attention(self, block_table_BP: Tensor, plan: StepPlan) -> Plan:
        """What exact attention of the plan's rows needs in all layers."""
        page_size = self.pool.page_size
        rows = AttentionRows(
            cu_rows=plan.cu_rows_B1,
            block_table=block_table_BP,
            page_size=page_size,
            own_slots_R=plan.slots_R,
            limits_R=plan.limits_R,
            branch_starts_R=plan.branch_starts_R,
            max_rows=plan.max_rows,
            max_slots=min(plan.max_slots, block_table_BP.shape[1] * page_size),
        )
        deterministic = self._trunk.linears.deterministic
        return plan_attention(rows, self._heads, backend=self._attention, deterministic=deterministic)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of pages (from, to), before whatever pass comes next."""
        self._cache.copy_pages(copies, self.pool.page_size)
        if copies:
            self._stack.copy_pages(copies)


def head_shape(model: LoadedModel, kv_dtype: torch.dtype) -> HeadShape:
    """This rank's heads, with a cache of `kv_dtype`."""
    return HeadShape(
        num_heads=model.local.num_heads,
        num_kv_heads=model.local.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
    )


def set_deterministic(model: LoadedModel, value: bool) -> None:
    """Compute the model so that a row's bits depend on the row alone, or as fast as can be. UserError
    IDLM-0456 on a GPU whose matrix products cannot do the former.
    """
    if value and not check_rows_agree(model.device, model.dtype):
        raise UserError(
            "IDLM-0456",
            f"deterministic=true: on {torch.cuda.get_device_name(model.device)} the bits of a product's row "
            "depend on how many rows there are",
            fix="use deterministic=false, or a Hopper GPU",
        )
    model.trunk.linears.deterministic = value


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """What the trunk is given of the cache (`KVAccess`)."""

    cache: KVCache
    slot_mapping_R: Tensor
    plan: Plan
    scale: float

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, H]."""
        return self.cache.layer(number)

    def scales(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and values [K]."""
        return self.cache.layer_scales(number)

    def select_rows(self, number: int, q_RNH: Tensor) -> None:
        """Nothing is dropped."""
        return

    def attend(self, number: int, q_RNH: Tensor) -> Tensor:
        """Attention output [R, N, H]."""
        return self.cache.attend(number, q_RNH, self.plan, scale=self.scale)
