"""Quest (Query-Aware Sparsity, ICML 2024), as MAGE's paper adapts it to blocks.

Each page of 16 slots is summarised by the least and the largest key of each channel. In every pass, a page's
score is the upper bound of a query's product with any of its keys, averaged over the queries of a KV head
(heads of its group, positions of the block). The block's rows see the best pages, and all of the block. A
page is summarised when its keys are final, never from rows that a later pass overwrites. Summaries belong to
physical pages, so shared and copied pages keep theirs. Departure: as for MAGE, the budget counts slots: k /
16 pages, rounded up.
B sequences, I pieces, F slots, C pages of the engine in pieces, P pages of Quest, K KV heads, H head dim, L
sparse layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.infer.accelerators.base import ACCELERATORS, EngineSpec, KVAccelerator, KVPass
from idlm.infer.accelerators.prefix import EVERYTHING, set_problems
from idlm.infer.sparse.view import FP8, NOT_LISTED, PassView, block_rows, flagged, scheduled_rows
from idlm.kernels.prefix_ranking import select_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestConfig:
    """`k`: slots before the block that a KV head sees, in whole pages of `page` slots. `exact_layers`: number
    of layers that see all.
    """

    k: int = 512
    page: int = 16
    exact_layers: int = 2


class Bounds:
    """Least and largest key per channel [L, C, K, H] of pieces of `size` slots. Pages of Quest and pages of
    the engine both consist of whole pieces.
    """

    def __init__(
        self, shape: tuple[int, ...], size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        num_layers, num_pieces, *key = shape
        # One more piece takes what is to be dropped.
        least, largest = torch.zeros(2, num_layers, num_pieces + 1, *key, dtype=dtype, device=device)
        self.nowhere = num_pieces
        self._least, self._largest = least, largest
        self.least, self.largest = least[:, :-1], largest[:, :-1]

    def write(self, layer: int, pieces_I: Tensor, least_IKH: Tensor, largest_IKH: Tensor) -> None:
        """Write the bounds of pieces; those of piece `nowhere` are dropped."""
        self._least[layer, pieces_I] = least_IKH.to(self.least.dtype)
        self._largest[layer, pieces_I] = largest_IKH.to(self.largest.dtype)

    def copy(self, copies: Sequence[tuple[int, int]], page_size: int) -> None:
        """Copy the bounds of the engine's pages (source, target), in this order."""
        per_page = page_size // self.size
        for source, target in copies:
            for each in (self.least, self.largest):
                each[:, target * per_page : (target + 1) * per_page] = each[
                    :, source * per_page : (source + 1) * per_page
                ]


@ACCELERATORS.register("quest")
class Quest(KVAccelerator):
    """Keeps bounds of the keys of each of the engine's pages, and nothing per lane."""

    name: ClassVar[str] = "quest"
    exact_options: ClassVar[Mapping[str, Any]] = {"k": EVERYTHING}
    is_static: ClassVar[bool] = True
    shards: ClassVar[bool] = True
    Config: ClassVar[type] = QuestConfig
    config: QuestConfig

    def problems(self) -> list[str]:
        """Also names numbers out of range."""
        found = set_problems(self.spec, k=self.config.k, exact_layers=self.config.exact_layers)
        if self.config.page < 1:
            found.append(f"page={self.config.page!r} is below 1")
        return [*super().problems(), *found]

    def __init__(self, config: QuestConfig, spec: EngineSpec) -> None:
        super().__init__(config, spec)
        # Slots of a piece.
        self.piece = math.gcd(config.page, spec.page_size)
        # Keys of eight bits are multiplied by a scale, which no narrower dtype can hold.
        self._dtype = torch.float32 if spec.kv_dtype == FP8 else spec.kv_dtype
        self._num_layers = max(0, spec.num_layers - config.exact_layers)

    def page_bytes(self) -> int:
        """Return the bytes of two keys per piece, layer and KV head."""
        spec = self.spec
        keys = 2 * self._num_layers * spec.num_kv_heads * (spec.page_size // self.piece)
        return keys * spec.head_dim * self._dtype.itemsize

    def allocate_pages(self, num_pages: int) -> None:
        """Allocate the bounds of all pages."""
        spec = self.spec
        num_pieces = num_pages * (spec.page_size // self.piece)
        shape = (self._num_layers, num_pieces, spec.num_kv_heads, spec.head_dim)
        self.bounds = Bounds(shape, self.piece, dtype=self._dtype, device=spec.device)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy their bounds."""
        self.bounds.copy(copies, self.spec.page_size)

    def begin(self, view: PassView) -> QuestPass:
        """Every pass over a block is sparse."""
        return QuestPass(view, self.bounds, self.config)


class QuestPass(KVPass):
    """Summarises final keys, then scores pages, layer by layer."""

    lists_ascend: ClassVar[bool] = True

    def __init__(self, view: PassView, bounds: Bounds, config: QuestConfig) -> None:
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
        is_first_R = (plan.slots_R % bounds.size == 0) | (rows_R == plan.cu_rows_B1[plan.sequence_R])
        max_pieces = min(num_rows, num_rows // bounds.size + 2 * num_sequences)
        rows_I = flagged(is_final_R & is_first_R, max_pieces)
        self._is_piece_I, rows_I = rows_I < num_rows, rows_I.clamp(max=num_rows - 1)
        self._sequences_I = plan.sequence_R[rows_I]
        first_I1 = (plan.slots_R[rows_I] // bounds.size * bounds.size)[:, None]
        self._slots_IF = first_I1 + torch.arange(bounds.size, device=device)
        self._pieces_I = view.physical(first_I1, self._sequences_I)[:, 0] // bounds.size
        self._first_slots_I = plan.slots_R[rows_I]
        self._num_pages = -(-view.max_slots // config.page)

    def commit_kv(self, layer: int) -> None:
        """Write the bounds of pieces in which this pass stores final keys."""
        index, bounds = layer - self._config.exact_layers, self._bounds
        if index < 0:
            return
        ends_B = torch.where(self.view.waits_B, self._waiting_ends_B, self._ends_B)
        ends_I1 = ends_B[self._sequences_I, None]
        is_final_IF11 = (self._slots_IF < ends_I1)[:, :, None, None]
        k_IFKH = self.view.keys(layer, self._slots_IF, self._sequences_I)
        least_IKH = torch.where(is_final_IF11, k_IFKH, math.inf).amin(1)
        largest_IKH = torch.where(is_final_IF11, k_IFKH, -math.inf).amax(1)
        is_written_I = self._is_piece_I & (self._first_slots_I < ends_I1[:, 0])
        bounds.write(index, torch.where(is_written_I, self._pieces_I, bounds.nowhere), least_IKH, largest_IKH)

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """Return the slots of the best pages."""
        index, view, page = layer - self._config.exact_layers, self.view, self._config.page
        if index < 0:
            return None
        starts_B = view.active.starts_B
        num = min(-(-self._config.k // page), self._num_pages)
        scores_BKP = self._scores(index, q_RNH)
        pages_1BKC = torch.empty(1, *scores_BKP.shape[:2], num, dtype=torch.int32, device=q_RNH.device)
        num_pages_B = (starts_B + page - 1) // page
        is_selected_B = torch.ones_like(view.is_working_B)
        select_largest(scores_BKP[None], num_pages_B, is_selected_B, view.sequences_B, pages_1BKC)
        pages_BKC1 = pages_1BKC[0, ..., None]
        slots_BKCF = pages_BKC1 * page + torch.arange(page, dtype=torch.int32, device=q_RNH.device)
        # The last page may reach into the block.
        is_listed_BKCF = (pages_BKC1 >= 0) & (slots_BKCF < starts_B[:, None, None, None])
        return torch.where(is_listed_BKCF, slots_BKCF, NOT_LISTED).flatten(2)

    def _scores(self, index: int, q_RNH: Tensor) -> Tensor:
        """Return upper bounds [B, K, P], averaged over the queries of rows still computed.

        The bound is a sum over channels of q * largest where q > 0 and q * least elsewhere: linear in the
        positive and negative parts of queries, which are averaged first.
        """
        view, bounds, size = self.view, self._bounds, self._bounds.size
        num_pages = self._num_pages
        q_BWNH = view.queries(q_RNH, view.sequences_B)
        q_BWKGH = q_BWNH.unflatten(2, (bounds.least.shape[2], -1))
        num_queries_B = (view.rows_BW >= 0).sum(-1).clamp(min=1) * q_BWKGH.shape[3]
        up_BKH = q_BWKGH.clamp(min=0).sum((1, 3)) / num_queries_B[:, None, None]
        down_BKH = q_BWKGH.clamp(max=0).sum((1, 3)) / num_queries_B[:, None, None]
        first_C = torch.arange(num_pages * (self._config.page // size), device=q_RNH.device) * size
        slots_BC = first_C.expand(len(q_BWNH), -1)
        is_stored_BC11 = (slots_BC < view.active.starts_B[:, None])[:, :, None, None]
        pieces_BC = view.physical(slots_BC, view.sequences_B) // size
        least_BCKH = bounds.least[index, pieces_BC].to(q_BWNH.dtype)
        largest_BCKH = bounds.largest[index, pieces_BC].to(q_BWNH.dtype)
        # Pieces that hold nothing yet have the bounds of an earlier owner.
        least_BPKH = torch.where(is_stored_BC11, least_BCKH, math.inf).unflatten(1, (num_pages, -1)).amin(2)
        largest_BPKH = torch.where(is_stored_BC11, largest_BCKH, -math.inf)
        largest_BPKH = largest_BPKH.unflatten(1, (num_pages, -1)).amax(2)
        is_any_BP11 = is_stored_BC11.unflatten(1, (num_pages, -1)).any(2)
        least_BPKH = torch.where(is_any_BP11, least_BPKH, 0)
        largest_BPKH = torch.where(is_any_BP11, largest_BPKH, 0)
        return torch.einsum("bkh,bpkh->bkp", up_BKH, largest_BPKH) + torch.einsum(
            "bkh,bpkh->bkp", down_BKH, least_BPKH
        )
