"""Autoregressive decoding: one row, one token. The baseline beside every figure and the oracle of every law
test.

Deliberately shares nothing with `isd` but the packing of rows: no drafts, no acceptance, one draw from one
law.
Shapes: B sequences (each wants one row), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.contracts import StepOutcome, StepPlan
from idlm.infer.decoders.base import (
    DECODERS,
    TOKEN_BY_TOKEN,
    Batch,
    StrideMode,
    check_causal,
    plan_rows,
    request_config,
)
from idlm.infer.decoders.layout import DraftLayout
from idlm.infer.decoders.rejection import layouts
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.sampling import draw, nonfinite
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
    modes: tuple[StrideMode, ...] = (StrideMode(stride=1, strategy="cold"),)
    widths: tuple[int, ...] = (1,)
    kv_policy = TOKEN_BY_TOKEN

    def __init__(self, config: ArConfig, semantics: Semantics) -> None:
        check_causal(semantics, self.name)
        self.config = config

    def configure(self, options: Mapping[str, Any]) -> ArConfig:
        """Requests have no options of their own."""
        return request_config(self.name, self.config, options)

    def allocate(self, num_lanes: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """One layout, a single row; nothing per lane."""
        self._picture = DraftLayout(layouts("cold", num_masks=0, max_drafts=0), device)

    def admit(self, lanes: list[int], options: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to reset."""

    def rewind(self, lanes: list[int]) -> None:
        """Nothing to go back on."""

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """The known tokens that are not computed yet, and nothing behind them."""
        return plan_rows(table, batch, layout=self._picture, mask_token_id=0)

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, logits_BV: Tensor) -> StepOutcome:
        """Draw one token for every sequence whose last known token was fed."""
        probs = table.probs(logits_BV, plan.lanes_B, batch.filters)
        rows_B = torch.where(plan.samples_B, plan.first_logit_B, -1)
        token_ids_B1 = draw(probs, rows_B, table.uniforms(plan.lanes_B, 1)[:, 0])[:, None]
        num_emitted_B = plan.samples_B.long()
        table.commit(plan.lanes_B, token_ids_B1, num_emitted_B, plan.num_feed_B * plan.advances_B)
        none_B = torch.zeros_like(num_emitted_B)
        return StepOutcome(
            token_ids_BJ=token_ids_B1,
            num_emitted_B=num_emitted_B,
            num_accepted_B=none_B,
            num_tested_B=none_B,
            nonfinite_B=nonfinite(probs, rows_B[:, None]),
        )
