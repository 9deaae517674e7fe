"""Introspective strided decoding: verify the last pass's drafts and draft the next ones in one causal pass.

arXiv 2604.11035, section 3.2 and Algorithm 1, with two departures: drafts are drawn from the very q that
tests them (the published rule drafts by argmax and is biased), and p and q are warped by the request's own
sampling settings before the test. A strategy decides what follows a rejection (rejection.py).
Shapes: B sequences, J = stride - 1 masks, X wanted rows, V vocabulary, Z lanes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Decoder, StrideMode, check_causal, plan_rows
from idlm.infer.decoders.layout import DraftLayout
from idlm.infer.decoders.rejection import layouts, strategy_of
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, fill_lanes, to_device
from idlm.infer.state.kv_cache import KVWritePolicy
from idlm.infer.state.sequence_state import SequenceState
from idlm.infer.state.wanted_rows import WantedRows
from idlm.infer.structured.masks import PassGrammars, masked
from idlm.kernels.sampling import Verdict, draft_probs, draw, emit_and_draft, nonfinite, put, verify
from idlm.semantics import MAX_STRIDE, Semantics

ADAPTIVE_STRIDES = (2, 3, 4, 8)
PARTIAL_BRANCHES = ((4, "branch_2"), (8, "branch_2"), (8, "branch_3"))


@dataclass(frozen=True, slots=True, kw_only=True)
class IsdConfig:
    """`stride` None: the checkpoint's. `adaptive`: every pass uses the mode, of this stride or a smaller one
    (1 is AR), that was measured to be fastest at the load. The choice follows the clock, so a seed does not
    reproduce a sampled answer, while its distribution stays the same; greedy answers are reproduced but for
    rounding. `acceptance=published` is the authors' argmax-draft rule, lossy.
    """

    stride: int | None = None
    adaptive: bool = False
    rejection_strategy: str = "tree"
    acceptance: Literal["exact", "published"] = "exact"


@DECODERS.register("isd")
class IsdDecoder(Decoder):
    """Up to `stride` tokens per pass. Per lane: pending drafts and the distributions they were drawn from."""

    name: ClassVar[str] = "isd"
    Config: ClassVar[type] = IsdConfig
    kv_policy = KVWritePolicy(has_drafts=True)
    takes_constraints = True

    @classmethod
    def fits(cls, semantics: Semantics) -> int | None:
        """Converted checkpoints: token-causal ones that were trained with masks."""
        return 2 if semantics.causality == "causal" and semantics.stride > 1 else None

    def __init__(self, config: IsdConfig, semantics: Semantics) -> None:
        self.stride = semantics.stride if config.stride is None else config.stride
        self._check(config, semantics)
        self.config = config
        self.num_masks = self.stride - 1
        self.exactness = "exact" if config.acceptance == "exact" else "lossy"
        self._mask_token_id = semantics.mask_token_id or 0
        self.modes = self._choices(config)
        self._layouts = [
            layouts(layout.strategy, num_masks=layout.stride - 1, max_drafts=self.num_masks)
            for layout in self.modes
        ]
        self._widths = tuple(max(layout.width for layout in mode_layouts) for mode_layouts in self._layouts)

    def num_rows(self, mode: int, max_length: int) -> int:
        """Rows of the mode's widest layout."""
        return self._widths[mode]

    def tokens_per_forward(self, acceptance_J: Sequence[float], mode: StrideMode) -> float:
        """As the mode's strategy says."""
        return strategy_of(mode.strategy).tokens_per_forward(acceptance_J)

    def _choices(self, config: IsdConfig) -> tuple[StrideMode, ...]:
        if not config.adaptive:
            return (StrideMode(stride=self.stride, strategy=config.rejection_strategy),)
        strides = {*(stride for stride in ADAPTIVE_STRIDES if stride < self.stride), self.stride} - {1}
        strategies = dict.fromkeys((config.rejection_strategy, "branch"))
        # Between the two in rows and in tokens.
        partial = [(s, name) for s, name in PARTIAL_BRANCHES if s in strides and name not in strategies]
        return (
            StrideMode(stride=1, strategy="cold"),
            *(StrideMode(stride=s, strategy=name) for s in sorted(strides) for name in strategies),
            *(StrideMode(stride=s, strategy=name) for s, name in partial),
        )

    def _check(self, config: IsdConfig, semantics: Semantics) -> None:
        check_causal(semantics, self.name)
        if not 1 <= self.stride <= MAX_STRIDE:
            raise UserError(
                "IDLM-0402",
                f"decoder.stride={self.stride} must be in [1, {MAX_STRIDE}]",
                fix="give decoder.stride, 1 is AR",
            )
        if self.stride > 1 and semantics.mask_token_id is None:
            raise UserError(
                "IDLM-0404",
                f"decoder isd at stride {self.stride} needs a mask token id; the checkpoint does not say it",
                fix="give mask_token_id=..., convert the checkpoint with idlm-train, or use decoder=ar",
            )
        if self.stride > semantics.stride:
            warnings.warn(
                f"stride {self.stride} is larger than the {semantics.stride} that the checkpoint was trained "
                "for: the output distribution is the same, but few of the further drafts will be accepted",
                stacklevel=3,
            )

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Per lane: drafts and the distributions they were drawn from, (stride - 1) * vocab_size numbers."""
        self._stacked = [DraftLayout(mode_layouts, device) for mode_layouts in self._layouts]
        self.draft_buffer_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.drafts_ZJ = torch.zeros(num_lanes, self.num_masks, dtype=torch.int64, device=device)
        self.draft_probs = draft_probs(num_lanes, self.num_masks, vocab_size, dtype=dtype, device=device)

    def admit(self, lanes: list[int], params: Sequence[SamplingParams]) -> None:
        """New sequences have no drafts."""
        fill_lanes(lanes, 0, self.draft_buffer_Z)

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """Known tokens, then the lane's drafts and the masks of the layout."""
        return plan_rows(
            table,
            batch,
            layout=self._stacked[batch.mode],
            mask_token_id=self._mask_token_id,
            draft_buffer_Z=self.draft_buffer_Z,
            drafts_ZJ=self.drafts_ZJ,
        )

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Test the drafts, emit the accepted ones and one token more, draw the next drafts.

        p of the chain rows and q of the mask rows are both warped by each request's own settings.
        """
        lanes_B, num_masks, logits_XV = plan.lanes_B, self.num_masks, wanted.logits()
        uniforms_BD = table.uniforms(lanes_B, 2 * num_masks + 1)
        with masked(batch.grammars, logits_XV, len(lanes_B)):
            verdict, nonfinite_B = self._verify(table, batch, plan, logits_XV, uniforms_BD)
        if batch.grammars is not None and self.config.acceptance == "exact":
            uniforms_BJ = uniforms_BD[:, num_masks + 1 :].contiguous()
            self._draft_again(batch.grammars, table, batch, verdict, logits_XV, uniforms_BJ)
        num_computed_B = (plan.num_feed_B + verdict.accepted_B) * plan.advances_B
        table.commit(lanes_B, verdict.token_ids_BA, verdict.num_emitted_B, num_computed_B)
        return StepOutcome(
            token_ids_BJ=verdict.token_ids_BA,
            num_emitted_B=verdict.num_emitted_B,
            num_accepted_B=verdict.accepted_B,
            num_tested_B=verdict.tested_B,
            nonfinite_B=nonfinite_B,
        )

    def _verify(
        self, table: SequenceState, batch: Batch, plan: StepPlan, logits_XV: Tensor, uniforms_BD: Tensor
    ) -> tuple[Verdict, Tensor]:
        """Test the drafts, and draw the token after the accepted ones and the next drafts; the verdict, and
        `StepOutcome.nonfinite_B`.
        """
        lanes_B, samples_B, num_masks = plan.lanes_B, plan.samples_B, self.num_masks
        probs = table.probs(logits_XV, lanes_B, batch.filters)
        verdict = verify(
            probs,
            self.draft_probs,
            self._stacked[batch.mode].tables,
            lanes_B=lanes_B,
            first_rows_B=plan.first_logit_B,
            active_B=samples_B,
            drafts_ZJ=self.drafts_ZJ,
            tau_Z=table.tau_Z,
            layout_Z=self.draft_buffer_Z,
            uniforms_BJ=uniforms_BD[:, :num_masks],
        )
        emit_and_draft(
            probs,
            self.draft_probs,
            verdict,
            lanes_B=lanes_B,
            uniforms_BA=uniforms_BD[:, num_masks:],
            drafts_ZJ=self.drafts_ZJ,
            layout_Z=self.draft_buffer_Z,
            takes_best=self.config.acceptance == "published",
        )
        put(self.draft_probs, lanes_B, probs, verdict.draft_rows_BJ, active_B=samples_B)
        rows_BA = torch.cat((verdict.emit_rows_B[:, None], verdict.draft_rows_BJ), dim=1)
        return verdict, nonfinite(probs, rows_BA)

    def drafts(self, batch: Batch) -> Tensor:
        """Those of the draft buffer."""
        tables, lanes_B = self._stacked[batch.mode].tables, batch.lanes_B
        num_drafts_B = tables.num_drafts_Y[self.draft_buffer_Z[lanes_B]]
        return torch.cat((num_drafts_B[:, None], self.drafts_ZJ[lanes_B]), dim=1)

    def _draft_again(
        self,
        grammars: PassGrammars,
        table: SequenceState,
        batch: Batch,
        verdict: Verdict,
        logits_XV: Tensor,
        uniforms_BJ: Tensor,
    ) -> None:
        """Replace the drafts of sequences with a grammar, one after the other, by draws from q with the mask
        of all tokens before: few others would be accepted. Waits for the device for each but the last.
        """
        counts_B1 = verdict.num_emitted_B[:, None]
        told = torch.cat((counts_B1, verdict.token_ids_BA, verdict.draft_rows_BJ), dim=1).tolist()
        width = verdict.token_ids_BA.shape[1]
        branches = grammars.after([row[1 : 1 + row[0]] for row in told])
        for depth in range(self.num_masks):
            branches = branches.among([b for b in branches.places if told[b][1 + width + depth] >= 0])
            if not branches.places:
                return
            places_b = to_device(branches.places, logits_XV.device)
            lanes_b = batch.lanes_B[places_b]
            logits_bV = branches.forbid(logits_XV[verdict.draft_rows_BJ[places_b, depth]])
            probs = table.probs(logits_bV, lanes_b, batch.filters)
            rows_b = torch.arange(len(lanes_b), device=logits_XV.device)
            drafts_b = draw(probs, rows_b, uniforms_BJ[places_b, depth])
            self.drafts_ZJ[lanes_b, depth] = drafts_b
            rows_bJ = torch.full((len(lanes_b), self.num_masks), -1, device=logits_XV.device)
            rows_bJ[:, depth] = rows_b
            put(self.draft_probs, lanes_b, probs, rows_bJ, active_B=rows_b >= 0)
            if depth == self.num_masks - 1:
                return
            told_drafts = drafts_b.tolist()
            branches = branches.pushed({b: [told_drafts[row]] for row, b in enumerate(branches.places)})
