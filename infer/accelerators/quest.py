"""Quest (Query-Aware Sparsity, ICML 2024), as MAGE's paper adapts it to blocks.

Pages of 16 slots are summarised by the least and largest key of each channel. In every pass, a page's score
is the upper bound of a query's product with any key of it, averaged over the queries of a KV head (heads of
its group, places of the block); the best pages are seen, and all of the block. Pages are summarised when keys
are stored for good, never those of rows that a later pass overwrites; summaries belong to physical pages, so
that shared and copied ones keep theirs. Departure: the budget is in slots as MAGE's, k / 16 pages rounded up.
b sequences, I rows, F slots, C pages of the engine in pieces, K KV heads, H head dim, L thinned layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.infer.accelerators.base import ACCELERATORS, KVAccelerator, KVPass
from idlm.infer.accelerators.prefix import EVERYTHING, NOT_LISTED, best, set_problems
from idlm.infer.sparse.view import FP8, PassView, block_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestConfig:
    """`k`: slots before the block that a KV head sees, in whole pages of `page` slots. `exact_layers`: how
    many layers see all.
    """

    k: int = 512
    page: int = 16
    exact_layers: int = 2


class Bounds:
    """Least and largest key per channel [L, C, K, H] of pieces of `size` slots, the largest that pages of
    Quest and pages of the engine are both made of.
    """

    def __init__(
        self, shape: tuple[int, ...], size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        self.least = torch.zeros(shape, dtype=dtype, device=device)
        self.largest = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, copies: Sequence[tuple[int, int]], page_size: int) -> None:
        """Pages of the engine (from, to), in this order."""
        per_page = page_size // self.size
        for source, target in copies:
            for each in (self.least, self.largest):
                each[:, target * per_page : (target + 1) * per_page] = each[
                    :, source * per_page : (source + 1) * per_page
                ]


@ACCELERATORS.register("quest")
class Quest(KVAccelerator):
    """Per page of the engine: bounds of its keys. Nothing per lane."""

    name: ClassVar[str] = "quest"
    exact_options: ClassVar[Mapping[str, Any]] = {"k": EVERYTHING}
    shards: ClassVar[bool] = True
    Config: ClassVar[type] = QuestConfig
    config: QuestConfig

    def problems(self) -> list[str]:
        """Those of all, and of the numbers."""
        found = set_problems(self.place, k=self.config.k, exact_layers=self.config.exact_layers)
        if self.config.page < 1:
            found.append(f"page={self.config.page!r} is below 1")
        return [*super().problems(), *found]

    @property
    def piece(self) -> int:
        """Slots of a piece."""
        return math.gcd(self.config.page, self.place.page_size)

    @property
    def _dtype(self) -> torch.dtype:
        # Scaled keys of eight bits are no numbers of a narrower type.
        return torch.float32 if self.place.kv_dtype == FP8 else self.place.kv_dtype

    @property
    def _num_layers(self) -> int:
        return max(0, self.place.num_layers - self.config.exact_layers)

    def page_bytes(self) -> int:
        """Two keys per piece, layer and KV head."""
        place = self.place
        keys = 2 * self._num_layers * place.num_kv_heads * (place.page_size // self.piece)
        return keys * place.head_dim * self._dtype.itemsize

    def allocate_pages(self, num_pages: int) -> None:
        """Bounds of all pages."""
        place = self.place
        num_pieces = num_pages * (place.page_size // self.piece)
        shape = (self._num_layers, num_pieces, place.num_kv_heads, place.head_dim)
        self.bounds = Bounds(shape, self.piece, dtype=self._dtype, device=place.device)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Their bounds go with them."""
        self.bounds.copy(copies, self.place.page_size)

    def begin(self, view: PassView) -> QuestPass:
        """Every block is thinned, from its first pass on."""
        return QuestPass(view, self.bounds, self.config)


class QuestPass(KVPass):
    """Summarises what is stored for good, then scores pages, layer by layer."""

    def __init__(self, view: PassView, bounds: Bounds, config: QuestConfig) -> None:
        super().__init__(view, is_sparse_B=view.is_working_B)
        self._bounds, self._config = bounds, config
        plan, device = view.plan, view.plan.slots_R.device
        rows_R = torch.arange(len(plan.slots_R), device=device)
        is_final_R = ~block_rows(plan, view.active) & (rows_R < plan.cu_rows_B1[-1])
        ends_B = torch.zeros_like(view.active.starts_B)
        ends_B.scatter_reduce_(0, plan.sequence_R, torch.where(is_final_R, plan.slots_R + 1, 0), "amax")
        # A piece is summarised once, by the first of its rows.
        is_first_R = (plan.slots_R % bounds.size == 0) | (rows_R == plan.cu_rows_B1[plan.sequence_R])
        rows_I = (is_final_R & is_first_R).nonzero()[:, 0]
        self._sequences_I = plan.sequence_R[rows_I]
        first_I1 = (plan.slots_R[rows_I] // bounds.size * bounds.size)[:, None]
        self._slots_IF = first_I1 + torch.arange(bounds.size, device=device)
        self._is_final_IF = self._slots_IF < ends_B[self._sequences_I, None]
        self._pieces_I = view.physical(first_I1, self._sequences_I)[:, 0] // bounds.size
        self._working_b = view.is_working_B.nonzero()[:, 0]
        self._num_pages = 0
        if len(self._working_b):
            longest = int(view.active.starts_B[self._working_b].max())
            self._num_pages = max(1, -(-longest // config.page))

    def commit_kv(self, layer: int) -> None:
        """Bounds of the pieces in which this pass stores something for good."""
        place = layer - self._config.exact_layers
        if place < 0 or not len(self._pieces_I):
            return
        k_IFKH = self.view.keys(layer, self._slots_IF, self._sequences_I)
        is_final_IF11 = self._is_final_IF[:, :, None, None]
        bounds = self._bounds
        least_IKH = torch.where(is_final_IF11, k_IFKH, math.inf).amin(1)
        largest_IKH = torch.where(is_final_IF11, k_IFKH, -math.inf).amax(1)
        bounds.least[place, self._pieces_I] = least_IKH.to(bounds.least.dtype)
        bounds.largest[place, self._pieces_I] = largest_IKH.to(bounds.largest.dtype)

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """The slots of the best pages."""
        place, view, page = layer - self._config.exact_layers, self.view, self._config.page
        if place < 0 or not len(self._working_b):
            return None
        starts_b1 = view.active.starts_B[self._working_b, None]
        scores_bKP = self._scores(place, q_RNH)
        first_P = torch.arange(self._num_pages, device=q_RNH.device) * page
        num = min(-(-self._config.k // page), self._num_pages)
        pages_bKC = best(scores_bKP, first_P < starts_b1, num)
        slots_bKCF = pages_bKC[..., None] * page + torch.arange(page, device=q_RNH.device)
        is_listed_bKCF = (pages_bKC[..., None] >= 0) & (slots_bKCF < starts_b1[:, None, None])
        slots_bKX = torch.where(is_listed_bKCF, slots_bKCF, NOT_LISTED).flatten(2)
        shape = (len(view.is_working_B), *slots_bKX.shape[1:])
        slots_BKX = torch.full(shape, NOT_LISTED, dtype=torch.int64, device=q_RNH.device)
        slots_BKX[self._working_b] = slots_bKX
        return slots_BKX

    def _scores(self, place: int, q_RNH: Tensor) -> Tensor:
        """Upper bounds [b, K, P], averaged over the queries that are fed.

        The bound is a sum over channels of q * largest where q > 0 and q * least elsewhere: linear in the
        positive and negative parts of queries, which are averaged first.
        """
        view, bounds, size = self.view, self._bounds, self._bounds.size
        sequences_b, num_pages = self._working_b, self._num_pages
        q_bWNH = view.queries(q_RNH, sequences_b)
        q_bWKGH = q_bWNH.unflatten(2, (bounds.least.shape[2], -1))
        num_queries_b = (view.rows_BW[sequences_b] >= 0).sum(-1).clamp(min=1) * q_bWKGH.shape[3]
        up_bKH = q_bWKGH.clamp(min=0).sum((1, 3)) / num_queries_b[:, None, None]
        down_bKH = q_bWKGH.clamp(max=0).sum((1, 3)) / num_queries_b[:, None, None]
        first_C = torch.arange(num_pages * (self._config.page // size), device=q_RNH.device) * size
        slots_bC = first_C.expand(len(sequences_b), -1)
        is_stored_bC11 = (slots_bC < view.active.starts_B[sequences_b, None])[:, :, None, None]
        pieces_bC = view.physical(slots_bC, sequences_b) // size
        least_bCKH = bounds.least[place, pieces_bC].to(q_bWNH.dtype)
        largest_bCKH = bounds.largest[place, pieces_bC].to(q_bWNH.dtype)
        # Bounds of pieces that hold nothing yet are of whoever had them before.
        least_bPKH = torch.where(is_stored_bC11, least_bCKH, math.inf).unflatten(1, (num_pages, -1)).amin(2)
        largest_bPKH = torch.where(is_stored_bC11, largest_bCKH, -math.inf)
        largest_bPKH = largest_bPKH.unflatten(1, (num_pages, -1)).amax(2)
        is_any_bP11 = is_stored_bC11.unflatten(1, (num_pages, -1)).any(2)
        least_bPKH = torch.where(is_any_bP11, least_bPKH, 0)
        largest_bPKH = torch.where(is_any_bP11, largest_bPKH, 0)
        return torch.einsum("bkh,bpkh->bkp", up_bKH, largest_bPKH) + torch.einsum(
            "bkh,bpkh->bkp", down_bKH, least_bPKH
        )
