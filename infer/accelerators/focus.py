"""FOCUS (rows side): after layer 1 only those masks of a block that look decodable are computed.

A mask looks decodable if it gains attention from layer 0 to layer 1 (section 3). The number of masks that go
on follows from how many were decoded before and how many stand out. With each mask goes its predecessor, and
all masks to its left that have no keys and values yet (section 4, Algorithm 1). A decoded token is frozen
once its right neighbour is decoded, until it is edited. Where paper and code (appendix E) differ, this file
follows the code, except as `Focus` says.
B sequences, R rows still computed, W positions of a block, P parts of a sum, N query heads, H head dim, Z
lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.infer.accelerators.base import ACCELERATORS, BlockMemory, RowsAccelerator, RowSelection, RowsPass
from idlm.infer.sparse.view import PassView, by_row, rows_by_place
from idlm.infer.state.batch import fill_lanes
from idlm.kernels.block_eviction import BlockKeys, Candidates, Selected, block_importance, select_places

LAST_LAYER = 1
"""The last layer whose attention is measured; rows are dropped after its queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusConfig:
    """`alpha`: the number of masks that go on is the average number of tokens decoded per pass times this,
    and at least the number of masks whose gain is a standard deviation above the mean. `importance`:
    attention is summed over the "masked" tokens (the paper's code) or the whole "block" (equation 2). `mean`:
    decoded tokens are averaged over the passes of the "block" or of the whole "request", as long as the
    request keeps its KV. `rule`: what the "paper" and the "published" code do differently, see `Focus`.

    `stability`: decoded tokens that were computed once more are frozen if their right "neighbour" is decoded
    (the paper's DC+), whatever their neighbour is ("plain", its DC), or not at all ("off"). `commit`: of a
    finished block all rows are computed again ("clean"), or only the "unfrozen" ones, as the paper describes:
    cheaper by a row per token, while frozen tokens keep keys and values that saw masks to their right.
    """

    alpha: float = 1.5
    importance: Literal["masked", "block"] = "masked"
    mean: Literal["block", "request"] = "block"
    stability: Literal["neighbour", "plain", "off"] = "neighbour"
    commit: Literal["clean", "unfrozen"] = "clean"
    rule: Literal["paper", "published"] = "paper"


class Memory:
    """State per lane. For the active block: which positions are frozen with which tokens, which have keys and
    values in all layers, how many masks it began with and how many passes it has had. Of the block before,
    until it is stored, what is frozen (`keeps_before`). For earlier blocks: the numbers of decoded tokens and
    of passes. `is_new_Z`: nothing of the sequence has been computed.
    """

    def __init__(self, num_lanes: int, block_size: int, device: torch.device, *, keeps_before: bool) -> None:
        shape, self._keeps_before = (num_lanes, block_size), keeps_before
        self.blocks, self.before = BlockMemory(num_lanes, device), BlockMemory(num_lanes, device)
        self.flags_2ZW = torch.zeros(2, *shape, dtype=torch.bool, device=device)
        self.frozen_ZW, self.processed_ZW = self.flags_2ZW
        self.before_frozen_ZW = torch.zeros_like(self.frozen_ZW)
        self.frozen_ids_ZW, self.before_ids_ZW = torch.zeros(2, *shape, dtype=torch.int64, device=device)
        self.is_new_Z = torch.ones(num_lanes, dtype=torch.bool, device=device)
        self.counts_Z4 = torch.zeros(num_lanes, 4, dtype=torch.int64, device=device)
        """Masks at the block's beginning, its passes; decoded tokens and passes of earlier blocks."""

    def reset(self, lanes: list[int]) -> None:
        """Clear these lanes."""
        self.blocks.reset(lanes)
        self.before.reset(lanes)
        fill_lanes(lanes, 0, self.counts_Z4)
        fill_lanes(lanes, True, self.is_new_Z)

    def turn(self, view: PassView, mine_B: Tensor, *, of_request: bool) -> Tensor:
        """Begin the state of new blocks; all masks of the block before are decoded by then. Returns the
        average number of tokens decoded per pass, fp64 [B], at least 1; 1 before the first pass.
        """
        lanes_B, new_B = view.plan.lanes_B, mine_B & ~self.blocks.knows(view)
        num_masks_B, num_passes_B, decoded_B, earlier_B = self.counts_Z4[lanes_B].unbind(dim=1)
        decoded_B = decoded_B + torch.where(new_B & (num_passes_B > 0), num_masks_B, 0)
        earlier_B = earlier_B + torch.where(new_B, num_passes_B, 0)
        num_passes_B = torch.where(new_B, 0, num_passes_B)
        # What passes that do not count have decided does not count either.
        begins_B, num_left_B = mine_B & (num_passes_B == 0), view.is_mask_BW.sum(dim=1)
        num_masks_B = torch.where(begins_B, num_left_B, num_masks_B)
        self.counts_Z4[lanes_B] = torch.stack((num_masks_B, num_passes_B, decoded_B, earlier_B), dim=1)
        if self._keeps_before:
            self._keep(lanes_B, new_B)
        self.flags_2ZW[:, lanes_B] &= ~new_B[:, None]
        self.blocks.claim(view, new_B)
        sum_B = num_masks_B - num_left_B
        if of_request:
            sum_B, num_passes_B = sum_B + decoded_B, num_passes_B + earlier_B
        return (sum_B.double() / num_passes_B.clamp(min=1)).clamp(min=1.0)

    def _keep(self, lanes_B: Tensor, new_B: Tensor) -> None:
        """Of lanes whose block ends (`new_B`, bool), what is frozen in it."""
        starts_Z, before_Z = self.blocks.starts_Z, self.before.starts_Z
        before_Z[lanes_B] = torch.where(new_B, starts_Z[lanes_B], before_Z[lanes_B])
        for now_ZW, before_ZW in (
            (self.frozen_ZW, self.before_frozen_ZW),
            (self.frozen_ids_ZW, self.before_ids_ZW),
        ):
            before_ZW[lanes_B] = torch.where(new_B[:, None], now_ZW[lanes_B], before_ZW[lanes_B])

    def stays_stored(self, view: PassView, rows_BW: Tensor) -> Tensor:
        """Which places [B, W] of the block before the active one (rows `rows_BW`) are frozen with the tokens
        that stand there. Where nothing of the active block was decided, that is still the block in work.
        """
        lanes_B, starts_B = view.plan.lanes_B, view.active.starts_B - view.active.size
        in_work_B, is_before_B = (each.starts_Z[lanes_B] == starts_B for each in (self.blocks, self.before))
        in_work_B1 = in_work_B[:, None]
        frozen_BW = torch.where(in_work_B1, self.frozen_ZW[lanes_B], self.before_frozen_ZW[lanes_B])
        ids_BW = torch.where(in_work_B1, self.frozen_ids_ZW[lanes_B], self.before_ids_ZW[lanes_B])
        is_same_BW = ids_BW == view.plan.token_ids_R[rows_BW.clamp(min=0)]
        return frozen_BW & is_same_BW & (in_work_B | is_before_B)[:, None] & (rows_BW >= 0)


class FocusPass(RowsPass):
    """One pass over the blocks of `mine_B` (bool). `budget_B` int64: K of each sequence, once known.
    `shifted`: a row predicts the next place.
    """

    def __init__(
        self, view: PassView, config: FocusConfig, memory: Memory, mine_B: Tensor, *, shifted: bool
    ) -> None:
        super().__init__(view)
        self._config, self._memory, self._mine_B, self._shifted = config, memory, mine_B, shifted
        self._is_published = config.rule == "published"
        self._evicts_B = mine_B
        if self._is_published:
            self._evicts_B = mine_B & ~memory.is_new_Z[view.plan.lanes_B]
        self._mean_decoded_B = memory.turn(view, mine_B, of_request=config.mean == "request")
        self._ids_BW = view.plan.token_ids_R[view.rows_BW.clamp(min=0)]
        self._first_BPW: Tensor | None = None
        self.budget_B: Tensor | None = None

    def initial_rows(self) -> RowSelection | None:
        """Return all rows but frozen tokens. An edited token thaws: the stored keys are those of another
        token."""
        lanes_B, memory = self.view.plan.lanes_B, self._memory
        memory.frozen_ZW[lanes_B] &= (memory.frozen_ids_ZW[lanes_B] == self._ids_BW) | ~self._mine_B[:, None]
        frozen_BW = memory.frozen_ZW[lanes_B] & self._mine_B[:, None]
        keep_R = by_row(~frozen_BW, self.view.rows_BW, len(self.view.plan.slots_R), other=True)
        if self._config.commit == "clean":
            return RowSelection(keep_R=keep_R)
        rows_BW = rows_by_place(self.view.plan, self.view.active, blocks_before=1)
        stays_BW = memory.stays_stored(self.view, rows_BW)
        if self._shifted:
            # The last row predicts the first place of the next block.
            stays_BW = F.pad(stays_BW[:, :-1], (0, 1))
        keep_R &= by_row(~stays_BW, rows_BW, len(keep_R), other=True)
        return RowSelection(keep_R=keep_R, drops_stored=True)

    def select_rows(self, layer: int, q_RNH: Tensor) -> RowSelection | None:
        """Measure in layer 0, select in layer 1."""
        if layer > LAST_LAYER:
            return None
        view = self.view
        found_BPW = self._importance(layer, q_RNH)
        if self._first_BPW is None:
            self._first_BPW = found_BPW
            return None
        selected = self._select(self._first_BPW, found_BPW)
        self.budget_B = selected.budget_B
        limits_BW = (view.active.starts_B + selected.ends_B)[:, None].expand_as(view.rows_BW)
        return RowSelection(
            keep_R=by_row(selected.kept_BW, view.rows_BW, len(q_RNH), other=True),
            limits_R=by_row(limits_BW, view.rows_BW, len(q_RNH), other=torch.iinfo(torch.int64).max),
        )

    def finish(self) -> None:
        """Kept positions have keys and values in all layers now; decoded ones with decoded right neighbours
        freeze."""
        view, lanes_B, mine_B = self.view, self.view.plan.lanes_B, self._mine_B & ~self.view.waits_B
        mine_B1 = mine_B[:, None]
        self._memory.processed_ZW[lanes_B] |= (view.rows_BW >= 0) & mine_B1
        self._memory.counts_Z4[lanes_B, 1] += mine_B & self._evicts_B
        if self._is_published:
            self._memory.is_new_Z[lanes_B] &= ~mine_B
        if self._config.stability != "off":
            frozen_BW = ~view.is_mask_BW & mine_B1
            if self._config.stability == "neighbour":
                frozen_BW &= F.pad(~view.is_mask_BW[:, 1:], (0, 1), value=True)
            self._memory.frozen_ZW[lanes_B] |= frozen_BW
            ids_ZW = self._memory.frozen_ids_ZW
            ids_ZW[lanes_B] = torch.where(mine_B1, self._ids_BW, ids_ZW[lanes_B])

    def _importance(self, layer: int, q_RNH: Tensor) -> Tensor:
        """The attention that places of blocks get in a layer, in parts [B, P, W]."""
        view, masked_BW = self.view, self.view.is_mask_BW
        (keys_SKH, _), (scale_K, _) = view.cache.layer(layer), view.cache.layer_scales(layer)
        is_key_BW = masked_BW if self._config.importance == "masked" else torch.ones_like(masked_BW)
        return block_importance(
            q_RNH,
            view.rows_BW,
            BlockKeys(
                keys_SKH=keys_SKH,
                scale_K=scale_K,
                block_table_BP=view.block_table_BP,
                page_size=view.page_size,
                starts_B=view.active.starts_B,
            ),
            is_query_BW=is_key_BW & (view.rows_BW >= 0),
            is_key_BW=is_key_BW,
            scale=view.scale,
        )

    def _select(self, first_BPW: Tensor, second_BPW: Tensor) -> Selected:
        """The places that go on, by their importance in both layers."""
        view = self.view
        candidates = Candidates(
            is_mine_B=self._evicts_B,
            is_mask_BW=view.is_mask_BW,
            is_maskable_BW=view.active.is_maskable_BW,
            rows_BW=view.rows_BW,
            lanes_B=view.plan.lanes_B,
            processed_ZW=self._memory.processed_ZW,
            mean_decoded_B=self._mean_decoded_B,
        )
        return select_places(
            first_BPW,
            second_BPW,
            candidates,
            alpha=self._config.alpha,
            sees_processed=not self._is_published,
        )


@ACCELERATORS.register("focus")
class Focus(RowsAccelerator):
    """Departures from paper and code: if a pass may decide only some masks (sub-blocks), the best are
    selected among those. With `commit="clean"` finished blocks are stored from all their rows, frozen ones
    included. Blocks without masks (LLaDA2.1's edits) are computed whole. `importance="block"` does not sum
    over queries of frozen tokens. A sequence that lost its KV begins its block again. Sums are in fp32, in a
    fixed order.

    `rule="paper"` follows the paper where the published code differs: from the attention of layer 1 on, rows
    see their block up to the last position that was ever processed, where the code stops at the last row
    kept in this pass, which hides frozen tokens to the right of it; and the first pass of a request evicts,
    with an average of 1 (Algorithm 1), where the code's first pass is the prefill, which keeps all rows and
    does not count in the average. `rule="published"` does both as the code does; a request that lost its KV
    begins with such a prefill again. With both, masks are decided above the threshold (`>`), where the code
    takes those that reach it (`>=`): that is the decoder's rule.
    """

    name: ClassVar[str] = "focus"
    is_static: ClassVar[bool] = True
    exact_options: ClassVar[Mapping[str, Any]] = {"alpha": 1e9, "stability": "off"}
    Config: ClassVar[type] = FocusConfig
    config: FocusConfig

    def problems(self) -> list[str]:
        """Also names options out of range, too few layers, and a decoder that keeps old keys and values."""
        found, alpha, size = super().problems(), self.config.alpha, self.spec.block_size
        if not 1 <= alpha < float("inf"):
            found.append(f"alpha={alpha!r} is not a finite number >= 1")
        if self.spec.num_layers <= LAST_LAYER:
            found.append(
                f"it compares two layers, the model has {self.spec.num_layers} (allowed: 2 and more)"
            )
        if self.spec.decoder_options.get("dual_cache"):
            found.append("decoder.dual_cache=true leaves rows of the block out as well (allowed: false)")
        if size is not None and size < 2:
            found.append(f"blocks of {size} place have no row to leave out (allowed: 2 and more)")
        if self.config.stability == "plain" and self.spec.logit_shift:
            found.append(
                "stability=plain freezes rows that still predict the place behind them: this model's logits "
                "are shifted (allowed: neighbour, off)"
            )
        if size is not None and self.spec.num_slots is not None and self.spec.num_slots < size:
            found.append(
                f"num_pages= gives {self.spec.num_slots} slots, which do not hold the {size} rows of a block "
                f"(allowed: {-(-size // self.spec.page_size)} pages and more)"
            )
        return found

    @property
    def decodes_again(self) -> bool:
        """Frozen tokens of finished blocks have seen masks."""
        return self.config.commit == "unfrozen"

    def allocate(self) -> None:
        """Allocate the state of each lane's block."""
        spec = self.spec
        assert spec.block_size is not None
        self.memory = Memory(
            spec.num_lanes, spec.block_size, spec.device, keeps_before=self.config.commit == "unfrozen"
        )

    def reset(self, lanes: list[int]) -> None:
        """Clear these lanes."""
        self.memory.reset(lanes)

    def begin(self, view: PassView) -> FocusPass:
        """Rows are dropped of blocks that are fed whole and have masks."""
        mine_B = (view.rows_BW >= 0).all(dim=1) & view.is_mask_BW.any(dim=1)
        shifted = self.spec.logit_shift
        return FocusPass(view, self.config, self.memory, mine_B, shifted=shifted)
