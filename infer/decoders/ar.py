"""Autoregressive decoding: one row, one token. The baseline beside every figure and the oracle of every law
test.

Deliberately shares nothing with `isd` but the packing of rows: no drafts, no acceptance, one draw from one
law.
Shapes: B sequences, X wanted rows (one per sampling sequence), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.contracts import StepOutcome, StepPlan
from idlm.infer.decoders.base import DECODERS, Batch, pack_rows
from idlm.infer.decoders.layout import LayoutTable, RowLayout
from idlm.infer.table import SequenceTable
from idlm.sampling import draw, to_law
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class ArConfig:
    """No options."""


@DECODERS.register("ar")
class ArDecoder:
    """Feeds the pending token, draws the next from its row's law."""

    name: ClassVar[str] = "ar"
    Config: ClassVar[type] = ArConfig
    exactness = "exact"
    max_width = 1

    def __init__(self, config: ArConfig, semantics: Semantics) -> None:
        self.config = config

    def allocate(self, num_lanes: int, vocab_size: int, device: torch.device) -> None:
        """One layout, a single row; nothing per lane."""
        only = RowLayout(num_drafts=0, num_masks=0, mask_parents=(), draft_rows=((),), next_layouts=(0,))
        self._layouts = LayoutTable([only], device)

    def seat(self, lanes: list[int]) -> None:
        """Nothing to reset."""

    def plan(self, table: SequenceTable, batch: Batch) -> StepPlan:
        """The known tokens that are not computed yet, and nothing behind them."""
        layout_B = torch.zeros(len(batch.lanes), dtype=torch.int64, device=table.device)
        return pack_rows(
            table,
            batch,
            layouts=self._layouts,
            layout_B=layout_B,
            drafts_BJ=layout_B[:, None][:, :0],
            mask_token_id=0,
        )

    def advance(self, table: SequenceTable, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> StepOutcome:
        """Draw one token for every sequence whose last known token was fed."""
        samples_B = plan.first_logit_B >= 0
        token_ids_B1 = torch.zeros(len(batch.lanes), 1, dtype=torch.int64, device=table.device)
        if len(logits_XV):
            lanes_X = plan.lanes_B[samples_B]
            law_XV = to_law(logits_XV, table.warp(lanes_X, batch.lanes))
            token_ids_B1[samples_B, 0] = draw(law_XV, table.uniforms(lanes_X, 1)[:, 0])
        table.commit(plan.lanes_B, token_ids_B1, samples_B.long(), plan.num_feed_B)
        none_B = torch.zeros_like(plan.num_feed_B)
        return StepOutcome(
            token_ids_BJ=token_ids_B1,
            num_emitted_B=samples_B.long(),
            num_accepted_B=none_B,
            num_tested_B=none_B,
        )
