"""Autoregressive decoding: one row, one token. The baseline of every figure and the oracle of every test of
the sampling law.

It deliberately shares nothing with `isd` but the packing of rows: no drafts, no acceptance, one draw.
Shapes: B sequences (each has one wanted row), V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from idlm.contracts import CHANGES
from idlm.infer.decoders.base import DECODERS, Decoder, changed_logits, check_causal
from idlm.infer.decoders.rejection import DraftLayout, layouts, plan_rows
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, WantedRows
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.sampling import draw, nonfinite
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class ArConfig:
    """No options."""


@DECODERS.register("ar")
class ArDecoder(Decoder):
    """Feeds the pending token and draws the next one from the distribution of its row."""

    name: ClassVar[str] = "ar"
    Config: ClassVar[type] = ArConfig
    baseline: ClassVar[Mapping[str, Any] | None] = {}
    takes_constraints = True
    takes_changes = CHANGES

    @classmethod
    def fits(cls, semantics: Semantics) -> int | None:
        return 1 if semantics.causality == "causal" else None

    def __init__(self, config: ArConfig, semantics: Semantics) -> None:
        check_causal(semantics, self.name)
        self.config = config

    def num_rows(self, mode: int, max_length: int) -> int:
        return 1

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layout = DraftLayout(layouts("cold", num_masks=0, max_drafts=0), device)

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """The known tokens that are not computed yet, and nothing after them."""
        return plan_rows(table, batch, layout=self._layout, mask_token_id=0)

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Draw one token for every sequence whose last known token was fed."""
        rows_B = torch.where(plan.samples_B, plan.first_logit_B, -1)
        logits_XV = changed_logits(table, batch, plan, wanted)
        probs = table.probs(logits_XV, plan.lanes_B, batch.filters)
        token_ids_B1 = draw(probs, rows_B, table.uniforms(plan.lanes_B, 1)[:, 0])[:, None]
        num_emitted_B = plan.samples_B.long()
        if batch.grammars is not None:
            batch.grammars.start_readback(num_emitted_B, token_ids_B1)
        table.commit(plan.lanes_B, token_ids_B1, num_emitted_B, plan.num_feed_B * plan.advances_B)
        return StepOutcome(
            token_ids_BJ=token_ids_B1,
            num_emitted_B=num_emitted_B,
            nonfinite_B=nonfinite(probs, rows_B[:, None]),
        )
