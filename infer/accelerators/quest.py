"""Quest (Query-Aware Sparsity, ICML 2024), as MAGE's paper adapts it to blocks.

Each page of 16 slots is summarised by the least and the largest key of each channel. In every pass, a page's
score is the upper bound of a query's product with any of its keys, averaged over the queries of a KV head
(heads of its group, positions of the block). The block's rows see the best pages, and all of the block. A
page is summarised when its keys are final, never from rows that a later pass overwrites. Summaries belong to
physical pages, so shared pages keep theirs. Departure: as for MAGE, the budget counts slots: k /
16 pages, rounded up.
B sequences, I pieces, F slots, C pages of the engine in pieces, P pages of Quest, K KV heads, H head dim, L
sparse layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.infer.accelerators.prefix import EVERYTHING, set_problems
from idlm.infer.sparse.accelerator import (
    ACCELERATORS,
    NOT_LISTED,
    EngineSpec,
    KVAccelerator,
    KVPass,
    PassView,
    block_rows,
    scheduled_rows,
)
from idlm.kernels.backend import FP8
from idlm.kernels.page_bounds import Bounds, PagedSlots, Pieces, page_scores, write_bounds
from idlm.kernels.prefix_ranking import select_largest
from idlm.kernels.row_compaction import flagged


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestConfig:
    """`k`: slots before the block that a KV head sees, in whole pages of `page` slots. `exact_layers`: number
    of layers that see all."""

    k: int = 512
    page: int = 16
    exact_layers: int = 2


@ACCELERATORS.register("quest")
class Quest(KVAccelerator):
    """Stores bounds of the keys of each of the engine's pages, and nothing per lane."""

    name: ClassVar[str] = "quest"
    exact_options: ClassVar[Mapping[str, Any]] = {"k": EVERYTHING}
    is_static: ClassVar[bool] = True
    shards: ClassVar[bool] = True
    Config: ClassVar[type] = QuestConfig
    config: QuestConfig

    def problems(self) -> list[str]:
        found = set_problems(self.spec, k=self.config.k, exact_layers=self.config.exact_layers)
        if self.config.page < 1:
            found.append(f"page={self.config.page!r} is below 1")
        return [*super().problems(), *found]

    def __init__(self, config: QuestConfig, spec: EngineSpec) -> None:
        super().__init__(config, spec)
        # Slots of a piece: pages of Quest and pages of the engine both consist of whole ones.
        self.piece = math.gcd(config.page, spec.page_size)
        # Keys of eight bits are multiplied by a scale, which no narrower dtype can hold.
        stored = spec.heads.kv_dtype or spec.heads.dtype
        self._dtype = torch.float32 if stored == FP8 else stored
        self._num_layers = max(0, spec.num_layers - config.exact_layers)

    def page_bytes(self) -> int:
        spec = self.spec
        keys = 2 * self._num_layers * spec.heads.num_kv_heads * (spec.page_size // self.piece)
        return keys * spec.heads.head_dim * self._dtype.itemsize

    def allocate_pages(self, num_pages: int) -> None:
        """Least and largest key of every piece of a page, by layer; one more takes what is to be dropped."""
        spec, num_pieces = self.spec, num_pages * (self.spec.page_size // self.piece)
        shape = (2, self._num_layers, num_pieces + 1, spec.heads.num_kv_heads, spec.heads.head_dim)
        minimum, largest = torch.zeros(shape, dtype=self._dtype, device=spec.device)
        self.bounds = [
            Bounds(min_CKH=low, largest_CKH=high, size=self.piece) for low, high in zip(minimum, largest)
        ]

    def begin(self, view: PassView) -> QuestPass:
        return QuestPass(view, self.bounds, self.config, self.piece)


class QuestPass(KVPass):
    """Summarises final keys, then scores pages, layer by layer."""

    lists_ascend: ClassVar[bool] = True

    def __init__(self, view: PassView, bounds: list[Bounds], config: QuestConfig, piece: int) -> None:
        super().__init__(view, is_sparse_B=view.is_working_B)
        self._bounds, self._config = bounds, config
        plan, device = view.plan, view.plan.slots_R.device
        num_rows, num_sequences = len(plan.slots_R), len(view.is_working_B)
        rows_R = torch.arange(num_rows, device=device)
        is_final_R = ~block_rows(plan, view.active) & (rows_R < plan.cu_rows_B1[-1])
        is_scheduled_R = scheduled_rows(plan, view.active)
        # Where the final rows of each sequence end; and where, if the sequence waits.
        self._ends_B, self._waiting_ends_B = (
            torch.zeros_like(view.active.starts_B).scatter_reduce_(
                0, plan.sequence_R, torch.where(is_stored_R, plan.slots_R + 1, 0), "amax"
            )
            for is_stored_R in (is_final_R, is_scheduled_R)
        )
        # A piece is summarised once, by the first of its rows.
        is_first_R = (plan.slots_R % piece == 0) | (rows_R == plan.cu_rows_B1[plan.sequence_R])
        max_pieces = min(num_rows, num_rows // piece + 2 * num_sequences)
        rows_I = flagged(is_final_R & is_first_R, max_pieces)
        is_piece_I, rows_I = rows_I < num_rows, rows_I.clamp(max=num_rows - 1)
        self._pieces = Pieces(
            sequences_I=plan.sequence_R[rows_I], slots_I=plan.slots_R[rows_I], is_piece_I=is_piece_I
        )
        self._slots = PagedSlots(block_table_BP=view.block_table_BP, page_size=view.page_size)
        self._num_pages = -(-view.max_slots // config.page)
        # The block of a sequence that is still prefilling begins after the pages of this pass.
        self._starts_B = torch.where(view.is_working_B, view.active.starts_B, 0)
        self._num_pages_B = (self._starts_B + config.page - 1) // config.page
        self._offset_F = torch.arange(config.page, dtype=torch.int32, device=device)

    def commit_kv(self, layer: int) -> None:
        """Write the bounds of pieces in which this pass stores final keys."""
        index, view = layer - self._config.exact_layers, self.view
        if index < 0:
            return
        ends_B = torch.where(view.waits_B, self._waiting_ends_B, self._ends_B)
        (keys_SKH, _), (scale_K, _) = view.cache.layer(layer), view.cache.layer_scales(layer)
        write_bounds(keys_SKH, scale_K, self._bounds[index], self._pieces, ends_B, self._slots)

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        index, view, page = layer - self._config.exact_layers, self.view, self._config.page
        if index < 0:
            return None
        bounds, starts_B = self._bounds[index], self._starts_B
        scores_BKP = page_scores(
            q_RNH, view.rows_BW, bounds, starts_B, self._slots, page=page, num_pages=self._num_pages
        )
        num = min(-(-self._config.k // page), self._num_pages)
        pages_1BKC = torch.empty(1, *scores_BKP.shape[:2], num, dtype=torch.int32, device=q_RNH.device)
        is_listed_B = self.is_sparse_B
        select_largest(scores_BKP[None], self._num_pages_B, is_listed_B, view.sequences_B, pages_1BKC)
        # Pages ascend, so that a slot of the block can only be the last one; page -1 has negative slots.
        slots_BKCF = torch.add(self._offset_F, pages_1BKC[0, ..., None], alpha=page)
        is_before_BKCF = slots_BKCF < self._starts_B[:, None, None, None]
        return torch.where(is_before_BKCF, slots_BKCF, NOT_LISTED).clamp_(min=NOT_LISTED).flatten(2)
