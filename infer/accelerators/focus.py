"""FOCUS (rows side): after layer 1 only those masks of a block that look decodable are computed.

A mask looks decodable if it gains attention from layer 0 to layer 1 (section 3). The number of masks that go
on follows from how many were decoded before and how many stand out. With each mask goes its predecessor, and
all masks to its left that have no keys and values yet (section 4, Algorithm 1). A decoded token is frozen
once its right neighbour is decoded, until it is edited. Where paper and code (appendix E) differ, this file
follows the code, except as listed at `Focus`.
B sequences, R rows still computed, W positions of a block, P parts of a sum, N query heads, H head dim, Z
lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from idlm.infer.sparse.accelerator import ACCELERATORS, PassView, RowsAccelerator, RowSelection, RowsPass
from idlm.infer.state.batch import fill_lanes
from idlm.kernels.block_eviction import (
    BlockKeys,
    BlockState,
    Candidates,
    FedBlocks,
    Selected,
    StateRules,
    begin_blocks,
    block_importance,
    finish_blocks,
    select_positions,
)
from idlm.kernels.row_compaction import spread_index

LAST_LAYER = 1
"""The last layer whose attention is measured; rows are dropped after its queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusConfig:
    """`alpha`: the number of masks that remain is the average number of tokens decoded per pass times this,
    and at least the number of masks whose gain is a standard deviation above the mean. `importance`:
    attention is summed over the "masked" tokens (the paper's code) or the whole "block" (equation 2). `mean`:
    decoded tokens are averaged over the passes of the "block" or of the whole "request", as long as the
    request retains its KV. `rule`: what the "paper" and the "published" code do differently, see `Focus`.

    `stability`: decoded tokens that were computed once more are frozen if their right "neighbour" is decoded
    (the paper's DC+), whatever their neighbour is ("plain", its DC), or not at all ("off"). `commit`: of a
    finished block all rows are computed again ("clean"), or only the "unfrozen" ones, as the paper describes:
    cheaper by a row per token, while frozen tokens have keys and values that saw masks to their right."""

    alpha: float = 1.5
    importance: Literal["masked", "block"] = "masked"
    mean: Literal["block", "request"] = "block"
    stability: Literal["neighbour", "plain", "off"] = "neighbour"
    commit: Literal["clean", "unfrozen"] = "clean"
    rule: Literal["paper", "published"] = "paper"


class FocusPass(RowsPass):
    """One pass. `budget_B` int64: K of each sequence, once known."""

    def __init__(self, view: PassView, config: FocusConfig, memory: BlockState, *, shifted: bool) -> None:
        super().__init__(view)
        plan = view.plan
        self._config, self._memory = config, memory
        self._fed = FedBlocks(
            lanes_B=plan.lanes_B,
            starts_B=view.active.starts_B,
            rows_BW=view.rows_BW,
            is_mask_BW=view.is_mask_BW,
            cu_rows_B1=plan.cu_rows_B1,
            slots_R=plan.slots_R,
            token_ids_R=plan.token_ids_R,
        )
        self._rules = StateRules(
            of_request=config.mean == "request",
            retains_stored=config.commit == "unfrozen",
            shifted=shifted,
            prefills=config.rule == "published",
            stability=config.stability,
        )
        self._started = begin_blocks(memory, self._fed, self._rules)
        self._first_BPW: Tensor | None = None
        self.budget_B: Tensor | None = None

    def initial_rows(self) -> RowSelection | None:
        """Return all rows but frozen tokens. An edited token thaws: the stored keys are those of another
        token."""
        return RowSelection(keep_R=self._started.keep_R, drops_stored=self._rules.retains_stored)

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
        where = view.active.starts_B, view.rows_BW, len(q_RNH)
        keep_R, limits_R = spread_index(selected.retained_BW, selected.ends_B, *where)
        return RowSelection(keep_R=keep_R, limits_R=limits_R)

    def finish(self) -> None:
        """Retained positions have keys and values in all layers now; decoded ones with decoded right
        neighbours freeze."""
        view = self.view
        finish_blocks(
            self._memory, self._fed, self._started, self._rules, rows_BW=view.rows_BW, waits_B=view.waits_B
        )

    def _importance(self, layer: int, q_RNH: Tensor) -> Tensor:
        """The attention that positions of blocks get in a layer, in parts [B, P, W]."""
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
        view = self.view
        candidates = Candidates(
            is_mine_B=self._started.evicts_B,
            is_mask_BW=view.is_mask_BW,
            is_maskable_BW=view.active.is_maskable_BW,
            rows_BW=view.rows_BW,
            lanes_B=view.plan.lanes_B,
            processed_ZW=self._memory.processed_ZW,
            mean_decoded_B=self._started.mean_decoded_B,
        )
        return select_positions(
            first_BPW,
            second_BPW,
            candidates,
            alpha=self._config.alpha,
            sees_processed=not self._rules.prefills,
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
    retained in this pass, which hides frozen tokens to the right of it; and the first pass of a request
    evicts, with an average of 1 (Algorithm 1), where the code's first pass is the prefill, which retains all
    rows and does not count in the average. `rule="published"` does both as the code does; a request that lost
    its KV begins with such a prefill again. With both, masks are decided above the threshold (`>`), where the
    code takes those that reach it (`>=`): that is the decoder's rule."""

    name: ClassVar[str] = "focus"
    is_static: ClassVar[bool] = True
    exact_options: ClassVar[Mapping[str, Any]] = {"alpha": 1e9, "stability": "off"}
    Config: ClassVar[type] = FocusConfig
    config: FocusConfig

    def problems(self) -> list[str]:
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
            found.append(f"blocks of {size} position have no row to leave out (allowed: 2 and more)")
        if self.config.stability == "plain" and self.spec.semantics.logit_shift:
            found.append(
                "stability=plain freezes rows that still predict the next position: this model's logits "
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
        spec = self.spec
        assert spec.block_size is not None
        self.memory = BlockState.empty(spec.num_lanes, spec.block_size, spec.device)

    def reset(self, lanes: list[int]) -> None:
        memory = self.memory
        fill_lanes(lanes, -1, memory.starts_Z, memory.before_starts_Z)
        fill_lanes(lanes, 0, memory.counts_Z4)
        fill_lanes(lanes, True, memory.is_new_Z)

    def begin(self, view: PassView) -> FocusPass:
        return FocusPass(view, self.config, self.memory, shifted=self.spec.semantics.logit_shift)
