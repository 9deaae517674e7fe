"""One forward pass as a function of tensors: plan -> forward -> advance. The only file that joins model, KV
cache and kernels; `sparse/stack.py` does so for sparse passes.

Nothing here waits for the device, and with `Batch.num_rows` given no shape depends on the contents of
tensors, so a pass runs as it is or in a CUDA graph.
Shapes: R rows, X wanted rows, N query heads, K KV heads, H head dim, B sequences, J tokens that a pass can
emit."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from idlm.infer.decoders.base import Decoder
from idlm.infer.memory.base import MemoryDemand, MemoryManager, Transient
from idlm.infer.models.loader import LoadedModel
from idlm.infer.runtime.logprobs import Logprobs, emitted_logprobs, prompt_logprobs
from idlm.infer.sparse.stack import AcceleratorStack
from idlm.infer.state.batch import (
    Batch,
    DroppedRows,
    PassRows,
    PromptRows,
    Schedule,
    StepPlan,
    WantedRows,
    to_device,
)
from idlm.infer.state.page_pool import KVCache, PagePool
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.paged_attention import AttentionRows, BackendPlan, HeadShape, plan_attention
from idlm.kernels.step_rows import map_slots

ROWS_PER_WANTED = 2
"""From so many fed rows to a wanted one on, the last layer ends with the wanted rows."""

NUM_COUNTS = 8
"""Columns of `StepResult.counts_BJ` before the token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a pass that the host reads, still on the device.

    `counts_BJ`, per sequence: `StepOutcome.nonfinite_B`, whether it waited for rows, the numbers of wanted,
    fed and retained rows that it needed (0: not counted), the numbers of emitted tokens, accepted drafts and
    tested drafts, then the token ids. `widths`: rows that the pass computed, padding included. `logprobs` of
    emitted tokens, and `prompt_logprobs` in the order of `PromptRows`; None if none are requested.
    `is_queued`: its kernels were launched one by one where other passes are one graph."""

    counts_BJ: Tensor
    widths: PassRows
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    is_queued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The three moves of a pass."""

    decoder: Decoder
    table: SequenceState
    runner: PassRunner

    def __call__(self, batch: Batch, prompt_rows: PromptRows | None = None) -> StepResult:
        if batch.grammars is not None:
            self.choose_drafts(batch)
        return self.decide(batch, *self.feed(batch, every_row=prompt_rows is not None), prompt_rows)

    def choose_drafts(self, batch: Batch) -> None:
        """Choose the drafts of sequences with grammars; the host waits for what earlier passes emitted."""
        chosen = batch.grammars.choose_drafts(self.decoder.modes[batch.mode].stride - 1)
        if chosen:
            self.decoder.replace_drafts(to_device(chosen, self.table.device))

    def feed(self, batch: Batch, *, every_row: bool = False) -> tuple[StepPlan, WantedRows]:
        plan = self.decoder.plan(self.table, batch)
        if every_row:
            plan = replace(plan, every_row=True)
        wanted = self.runner.forward(plan)
        return plan if wanted.dropped is None else wanted.dropped.apply(plan), wanted

    def decide(
        self, batch: Batch, plan: StepPlan, wanted: WantedRows, prompt_rows: PromptRows | None = None
    ) -> StepResult:
        outcome = self.decoder.advance(self.table, batch, plan, wanted)
        none_B = torch.zeros_like(outcome.num_emitted_B)
        demand = None if plan.active is None else plan.active.demand
        needed: tuple[Tensor | None, ...] = (None,) * 4
        if demand is not None:
            needed = demand.waits_B.long(), demand.num_wanted_B, demand.num_fed_B, demand.num_retained_B
        drafts = outcome.num_accepted_B, outcome.num_tested_B
        counts = [
            (none_B if count_B is None else count_B)[:, None]
            for count_B in (outcome.nonfinite_B, *needed, outcome.num_emitted_B, *drafts)
        ]
        counts_BJ = torch.cat((*counts, outcome.token_ids_BJ), dim=1)
        scored, prompt_scored = None if outcome.logprobs is None else Logprobs(*outcome.logprobs), None
        if batch.num_top is not None and scored is None:
            scored = emitted_logprobs(wanted.logits(), plan, outcome, num_top=batch.num_top)
        if prompt_rows is not None:
            prompt_scored = prompt_logprobs(wanted, plan, self.table, prompt_rows)
        num_fed = num_retained = len(plan.token_ids_R)
        if wanted.dropped is not None:
            num_fed, num_retained = wanted.dropped.num_fed, len(wanted.hidden_RD)
        widths = PassRows(fed=num_fed, retained=num_retained, head=len(wanted))
        return StepResult(counts_BJ=counts_BJ, widths=widths, logprobs=scored, prompt_logprobs=prompt_scored)


def with_grammars(batch: Batch, schedule: Schedule) -> Batch:
    """The batch of a schedule with the grammars of its requests, if they have any."""
    if not schedule.grammars:
        return batch
    from idlm.infer.structured.pass_grammars import pass_grammars

    return replace(batch, grammars=pass_grammars(schedule))


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A `Step` by schedule, with exactly the rows that are fed."""

    step: Step

    def __call__(self, schedule: Schedule) -> StepResult:
        decoder = self.step.decoder
        is_canvas = decoder.kv_policy.kind == "none"
        batch = schedule.batch(self.step.table.device, decoder.num_rows, is_canvas=is_canvas)
        return self.step(with_grammars(batch, schedule), schedule.prompt_rows)


class PassRunner(ABC):
    """Executes passes."""

    pool: PagePool

    @abstractmethod
    def forward(self, plan: StepPlan) -> WantedRows:
        """Run the model over the rows of `plan` and return its wanted rows."""

    def check_canvas(self, num_rows: int, num_wanted: int, num_canvases: int = 1) -> None:
        """Raise UserError for canvases of so many rows, whose passes could never run."""
        return


class Runner(PassRunner):
    """Model and cache of one device, and the accelerators between them. The memory manager plans the
    transients. `gates_Z`: see `SequenceState`; None: the model has one adapter at most."""

    def __init__(
        self,
        model: LoadedModel,
        pool: PagePool,
        cache: KVCache,
        *,
        attention: str,
        stack: AcceleratorStack | None,
        memory: MemoryManager,
        gates_Z: Tensor | None = None,
    ) -> None:
        self._trunk, self._cache, self.pool = model.trunk, cache, pool
        self._attention, self._stack, self._gates_Z = attention, stack, gates_Z
        self._heads = head_shape(model, cache.keys.dtype)
        others = model.spec.variant.others
        self._window = None if others is None else others.window
        self._windowed = () if others is None else others.numbers
        self._scale = model.spec.score_scale
        moe = model.spec.moe
        self._routes_blocks = moe is not None and moe.capacity is not None
        logits_bytes = model.spec.vocab_size * model.dtype.itemsize
        self._num_chunks = functools.cache(partial(_num_chunks, memory, model.device, logits_bytes))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> WantedRows:
        """Run the model over the rows of `plan`, write the KV of every fed row, and return its wanted rows.

        Each layer stores the KV of all rows before any row attends: a sequence may share pages that another
        one fills in this very pass. What follows attention in the last layer is computed of the wanted rows
        alone where they are few: of a prompt, it is one row."""
        page_size = self.pool.page_size
        block_table_BP = self.pool.block_table(plan.lanes_B, plan.max_slots, plan.canvases.first_slots_B)
        slot_mapping_R = map_slots(
            block_table_BP, plan.sequence_R, plan.slots_R, plan.cu_rows_B1, page_size=page_size
        )
        make_plan = partial(self._plan_attention, block_table_BP)
        sparse_pass = None
        if self._stack is not None:
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
            hidden_RD = self._trunk(fed.token_ids_R, fed.positions_R, sparse_pass, self._gate(fed))
            return self._wanted(hidden_RD, plan, *sparse_pass.finish())
        whole = make_plan(plan)
        has_windows = self._window is not None and self._window < plan.max_slots
        kv = PagedKV(
            cache=self._cache,
            slot_mapping_R=slot_mapping_R,
            plan=whole,
            scale=self._scale,
            window_plan=make_plan(plan, window=self._window) if has_windows else None,
            windowed=self._windowed,
        )
        inputs, rows_X = (plan.token_ids_R, plan.positions_R, kv, self._gate(plan)), plan.logit_rows_X
        are_few = len(plan.token_ids_R) >= ROWS_PER_WANTED * len(rows_X)
        if plan.every_row or self._routes_blocks or not are_few:
            return self._wanted(self._trunk(*inputs), plan, rows_X)
        hidden_XD = self._trunk(*inputs, rows_X)
        return self._wanted(hidden_XD, plan, torch.arange(len(rows_X), device=rows_X.device))

    def _gate(self, plan: StepPlan) -> Tensor | None:
        """The trunk's `gate_R`: of several adapters that of the row's sequence."""
        if plan.is_mask_R is None or self._gates_Z is None:
            return plan.is_mask_R
        return self._gates_Z[plan.lanes_B][plan.sequence_R] * plan.is_mask_R

    def _wanted(
        self, hidden_RD: Tensor, plan: StepPlan, rows_X: Tensor, dropped: DroppedRows | None = None
    ) -> WantedRows:
        return WantedRows(
            hidden_RD,
            rows_X,
            self._trunk.logits,
            dropped=dropped,
            num_chunks=self._num_chunks,
            weight_VD=self._trunk.head_weight if plan.canvases.takes_best else None,
            group=plan.canvases.logit_group,
        )

    def _plan_attention(
        self,
        block_table_BP: Tensor,
        plan: StepPlan,
        listed_B: Tensor | None = None,
        num_listed: int = 0,
        window: int | None = None,
    ) -> BackendPlan:
        """The attention plan that layers share, all or those with windows; with lists, `listed_B` (bool) see
        `num_listed` slots."""
        page_size = self.pool.page_size
        rows = AttentionRows(
            cu_rows=plan.cu_rows_B1,
            block_table=block_table_BP,
            page_size=page_size,
            own_slots_R=plan.slots_R,
            limits_R=plan.limits_R,
            branch_starts_R=plan.branch_starts_R,
            max_rows=plan.max_rows,
            usual_rows=plan.usual_rows,
            few_rows=plan.decoding_rows,
            max_slots=min(plan.max_slots, block_table_BP.shape[1] * page_size),
            starts_B=plan.active.starts_B if listed_B is not None and plan.active is not None else None,
            listed_B=listed_B,
            num_listed=num_listed,
        )
        rows = rows if window is None else rows.in_windows(window, plan.positions_R)
        deterministic = self._trunk.linears.deterministic
        return plan_attention(rows, self._heads, backend=self._attention, deterministic=deterministic)


def _num_chunks(
    memory: MemoryManager, device: torch.device, logits_bytes: int, num_rows: int, row_bytes: int
) -> int:
    logits = Transient(row_bytes=logits_bytes + row_bytes, num_rows=num_rows)
    return min(num_rows, memory.plan(MemoryDemand(device=device, transient=logits)).num_chunks)


def head_shape(model: LoadedModel, kv_dtype: torch.dtype) -> HeadShape:
    """This rank's heads, with a cache of `kv_dtype`."""
    return HeadShape(
        num_heads=model.local.num_heads,
        num_kv_heads=model.local.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """The trunk's access to the cache (`KVAccess`) in a pass that is not sparse."""

    cache: KVCache
    slot_mapping_R: Tensor
    plan: BackendPlan
    scale: float
    window_plan: BackendPlan | None = None
    """Of the layers `windowed`; None: windows hide nothing."""
    windowed: Collection[int] = ()

    def select_rows(self, number: int, q_RNH: Tensor) -> None:
        """All rows remain."""

    def attend(self, number: int, q_RNH: Tensor) -> Tensor:
        is_windowed = self.window_plan is not None and number in self.windowed
        plan = self.window_plan if is_windowed and self.window_plan is not None else self.plan
        return self.cache.attend(number, q_RNH, plan, scale=self.scale)
