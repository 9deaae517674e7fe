"""Introspective strided decoding: verify the last pass's drafts and draft the next ones in one causal pass.

arXiv 2604.11035, section 3.2 and Algorithm 1, with two departures: drafts are drawn from the very q that
tests them (the published rule drafts by argmax and is biased), and p and q are warped by the request's own
sampling settings before the test. A strategy decides what follows a rejection (rejection.py).
Shapes: B sequences, J = stride - 1 masks, X wanted rows, V vocabulary, Z lanes, D draws, C candidates, Y rows
with masks applied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from idlm.contracts import CHANGES, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import (
    DECODERS,
    Decoder,
    KVWritePolicy,
    StrideMode,
    changed_logits,
    check_causal,
)
from idlm.infer.decoders.rejection import (
    NO_ROW,
    SINGLE_BUFFER,
    DraftBuffer,
    DraftLayout,
    layouts,
    plan_rows,
    strategy_of,
)
from idlm.infer.decoders.selector import MaskRows
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, WantedRows, fill_lanes, to_device
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.prompt_lookup import LONGEST, look_up
from idlm.kernels.sampling import Verdict, draft_probs, draw_stored, emit_and_draft, nonfinite, put, verify
from idlm.semantics import MAX_STRIDE, Semantics

ALTERNATE_STRIDES, PARTIAL_STRIDES = (2, 3, 4), (3, 5)
"""Strides below the decoder's own at which `alternate` and `branch_2` are modes of `adaptive`."""
MAX_BRANCH_STRIDE = 4
"""Beyond it `branch_3` is a mode instead of `branch`, whose last groups cost more than they gain."""
MIN_HALVED_STRIDE = 4
"""From this stride on `adaptive` has modes in which the half of the sequences that accepts less feeds fewer
rows."""
SCORE_RATE = 1 / 24
"""Weight of a pass's first draft in the score of its sequence."""
TIE = 1e-6
"""What puts equal scores in an order."""
NUM_CANDIDATES = 16
"""Draws for each draft of a sequence with a grammar. If q gives the allowed tokens a fifth of its mass, none
of them fits in 3 % of the cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsdConfig:
    """`stride` None: the checkpoint's. `adaptive`: every pass uses the mode, of this stride or a smaller one
    (1 is AR), that was measured to be fastest at the load. The choice follows the clock, so a seed does not
    reproduce a sampled answer, while its distribution stays the same; greedy answers are reproduced but for
    rounding. `acceptance=published` is the authors' argmax-draft rule, lossy. `selector`: draw drafts of mask
    rows by the checkpoint's selector, if it has one and the rule is exact. `prompt_lookup_min`: where at
    least so many of the last tokens occurred before in the prompt or the answer, what followed there takes
    the place of the drafts; 0: nowhere."""

    stride: int | None = None
    adaptive: bool = False
    rejection_strategy: str = "tree"
    acceptance: Literal["exact", "published"] = "exact"
    selector: bool = True
    prompt_lookup_min: int = 0


@DECODERS.register("isd")
class IsdDecoder(Decoder):
    """Up to `stride` tokens per pass. Per lane: pending drafts and the distributions they were drawn from."""

    name: ClassVar[str] = "isd"
    Config: ClassVar[type] = IsdConfig
    kv_policy = KVWritePolicy(has_drafts=True)
    takes_constraints = True
    takes_changes = CHANGES
    request_options = ("stride",)

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
        self._mask_token_id, self._noise_range = semantics.mask_token_id or 0, semantics.noise_range
        self.modes = self._choices(config)
        self._has_halves = any(mode.narrow is not None for mode in self.modes)
        self._layouts = [
            [
                layouts(half.strategy, num_masks=half.stride - 1, max_drafts=self.num_masks)
                for half in (mode, mode.narrow)
                if half is not None
            ]
            for mode in self.modes
        ]
        self._drafts_again = [
            any(buffer.from_verify_rows for half in halves for one in half for buffer in one.next_buffers)
            for halves in self._layouts
        ]
        # Of an odd number of sequences the smaller half is wide.
        self._widths = tuple(
            -(-sum(max(layout.width for layout in half) for half in halves) // len(halves))
            for halves in self._layouts
        )

    @property
    def takes_selector(self) -> bool:
        return self.config.selector and self.config.acceptance == "exact" and self.num_masks > 0

    def num_rows(self, mode: int, max_length: int) -> int:
        return self._widths[mode]

    def tokens_per_forward(self, acceptance_J: Sequence[float], mode: StrideMode) -> float:
        return strategy_of(mode.strategy).tokens_per_forward(acceptance_J)

    def drafts_again(self, mode: int) -> bool:
        return self._drafts_again[mode]

    def _choices(self, config: IsdConfig) -> tuple[StrideMode, ...]:
        if not config.adaptive:
            return (StrideMode(stride=self.stride, strategy=config.rejection_strategy),)
        last, widest = self.stride, "branch" if self.stride <= MAX_BRANCH_STRIDE else "branch_3"
        pair = StrideMode(stride=2, strategy="alternate")
        triple = StrideMode(stride=3, strategy="branch_2") if last > MAX_BRANCH_STRIDE else pair
        halved = [(last, "alternate", pair), (last, "branch_2", triple)] * (last >= MIN_HALVED_STRIDE)
        modes = [
            (1, "cold", None),
            *((stride, "alternate", None) for stride in (*ALTERNATE_STRIDES, last) if 1 < stride <= last),
            *((stride, "branch_2", None) for stride in (*PARTIAL_STRIDES, last) if 2 < stride <= last),
            *halved,
            *((last, name, None) for name in (config.rejection_strategy, widest) if last > 1),
        ]
        return tuple(
            StrideMode(stride=stride, strategy=name, narrow=narrow)
            for stride, name, narrow in dict.fromkeys(modes)
        )

    def _check(self, config: IsdConfig, semantics: Semantics) -> None:
        check_causal(semantics, self.name)
        if not 1 <= self.stride <= MAX_STRIDE:
            raise UserError(
                "IDLM-0402",
                f"decoder.stride={self.stride} must be in [1, {MAX_STRIDE}]",
                fix="give decoder.stride, 1 is AR",
            )
        if not 0 <= config.prompt_lookup_min <= LONGEST:
            raise UserError(
                "IDLM-0402",
                f"decoder.prompt_lookup_min={config.prompt_lookup_min} must be in [0, {LONGEST}]",
                fix="give a number of tokens, 0 looks nothing up",
            )
        if self.stride > 1 and semantics.draft_input is None:
            raise UserError(
                "IDLM-0404",
                f"decoder isd at stride {self.stride} needs a mask token id or a noise_range; the "
                "checkpoint has none",
                fix="give mask_token_id=..., convert the checkpoint with idlm-train, or use decoder=ar",
            )
        advice = "this checkpoint is not converted; idlm-train converts it (docs/convert.md)"
        if self.stride > semantics.stride:
            unconverted = f"; {advice}" if semantics.stride == 1 else ""
            warnings.warn(
                f"stride {self.stride} is larger than the {semantics.stride} that the checkpoint was trained "
                "for: the output distribution is the same, but few of the further drafts will be accepted"
                f"{unconverted}",
                stacklevel=3,
            )
        elif config.stride is None and self.stride == 1:
            warnings.warn(f"isd emits one token per forward pass, like ar: {advice}", stacklevel=3)

    def check_options(self, config: IsdConfig, options: Mapping[str, Any]) -> None:
        if config.stride not in (None, 1, self.stride):
            raise UserError(
                "IDLM-0402",
                f"decoder_options.stride={config.stride} must be 1 or the engine's stride, {self.stride}",
                fix="use 1 for one token per pass, or leave it out",
            )

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Per lane: drafts and the distributions they were drawn from, (stride - 1) * vocab_size numbers."""
        self._stacked = [DraftLayout(wide, device, *narrow) for wide, *narrow in self._layouts]
        self.draft_buffer_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.drafts_ZJ = torch.zeros(num_lanes, self.num_masks, dtype=torch.int64, device=device)
        # The buffer of each lane and its half, and how often the first of its drafts was accepted of late.
        self._layout_Z = torch.zeros_like(self.draft_buffer_Z)
        self.score_Z = torch.ones(num_lanes, device=device)
        self.draft_probs = draft_probs(num_lanes, self.num_masks, vocab_size, dtype=dtype, device=device)

    def admit(self, lanes: list[int], params: Sequence[SamplingParams]) -> None:
        fill_lanes(lanes, 0, self.draft_buffer_Z)
        fill_lanes(lanes, 1, self.score_Z)
        single = [lane for lane, one in zip(lanes, params, strict=True) if one.is_single]
        if single:
            fill_lanes(single, SINGLE_BUFFER.index(self.num_masks), self.draft_buffer_Z)

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """Known tokens, then the lane's drafts and the masks of the layout."""
        is_halved = self.modes[batch.mode].narrow is not None
        if is_halved:
            self._halve(batch)
        return plan_rows(
            table,
            batch,
            layout=self._stacked[batch.mode],
            mask_token_id=table.noise(*self._noise_range) if self._noise_range else self._mask_token_id,
            draft_buffer_Z=self._layout_Z if is_halved else self.draft_buffer_Z,
            drafts_ZJ=self.drafts_ZJ,
            is_packed=is_halved,
        )

    def _halve(self, batch: Batch) -> None:
        """Give the half of the sequences with the lower scores the narrow layout. Scores follow from the
        tests of earlier passes alone, never from the drafts that this one tests."""
        lanes_B, num_sequences = batch.lanes_B, len(batch.lanes_B)
        order_B = torch.arange(num_sequences, device=lanes_B.device)
        score_B = torch.where(batch.samples_B, self.score_Z[lanes_B], -1.0) - TIE * order_B
        num_ahead_B = (score_B > score_B[:, None]).sum(1)
        single, buffer_B = SINGLE_BUFFER.index(self.num_masks), self.draft_buffer_Z[lanes_B]
        is_narrow_B = (num_ahead_B >= num_sequences // 2) & (buffer_B != single)
        self._layout_Z.copy_(self.draft_buffer_Z)
        self._layout_Z[lanes_B] = buffer_B + is_narrow_B * (single + 1)

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Test the drafts, emit the accepted ones and one token more, draw the next drafts.

        p of the chain rows and q of the mask rows are both warped by each request's own settings."""
        lanes_B, num_masks = plan.lanes_B, self.num_masks
        logits_XV = changed_logits(table, batch, plan, wanted, self.drafts_ZJ, self.draft_probs)
        num_candidates = 1 if batch.grammars is None else min(NUM_CANDIDATES, logits_XV.shape[1])
        uniforms_BD = table.uniforms(lanes_B, num_masks + 1 + num_masks * num_candidates)
        logit_lanes = lanes_B if plan.logit_lanes_X is None else plan.logit_lanes_X
        probs = table.probs(logits_XV, logit_lanes, batch.filters)
        verdict = verify(
            probs,
            self.draft_probs,
            self._stacked[batch.mode].tables,
            lanes_B=lanes_B,
            first_rows_B=plan.first_logit_B,
            active_B=plan.samples_B,
            drafts_ZJ=self.drafts_ZJ,
            tau_Z=table.tau_Z,
            layout_Z=self.draft_buffer_Z if self.modes[batch.mode].narrow is None else self._layout_Z,
            uniforms_BJ=uniforms_BD[:, :num_masks],
        )
        emit_and_draft(
            probs,
            self.draft_probs,
            verdict,
            lanes_B=lanes_B,
            uniforms_BA=uniforms_BD[:, num_masks : 2 * num_masks + 1],
            drafts_ZJ=self.drafts_ZJ,
            layout_Z=self.draft_buffer_Z,
            takes_best=self.config.acceptance == "published",
        )
        put(self.draft_probs, lanes_B, probs, verdict.draft_rows_BJ, active_B=plan.samples_B)
        if self.selector is not None:
            self._select(table, batch, plan, wanted, logits_XV, verdict, uniforms_BD)
        num_computed_B = (plan.num_feed_B + verdict.accepted_B) * plan.advances_B
        table.commit(lanes_B, verdict.token_ids_BA, verdict.num_emitted_B, num_computed_B)
        is_found_B = self._look_up(table, plan) if self.config.prompt_lookup_min else None
        if batch.grammars is not None:
            # What is drawn next is not masked: the tokens before it are not on the host yet.
            candidates_MJC = self._candidates(logits_XV, verdict, is_found_B, batch, uniforms_BD)
            batch.grammars.start_readback(verdict.num_emitted_B, verdict.token_ids_BA, candidates_MJC)
        rows_BA = torch.cat((verdict.emit_rows_B[:, None], verdict.draft_rows_BJ), dim=1)
        self._score(lanes_B, verdict)
        return StepOutcome(
            token_ids_BJ=verdict.token_ids_BA,
            num_emitted_B=verdict.num_emitted_B,
            num_accepted_B=verdict.accepted_B,
            num_tested_B=verdict.tested_B,
            nonfinite_B=nonfinite(probs, rows_BA),
        )

    def _score(self, lanes_B: Tensor, verdict: Verdict) -> None:
        """Note how often the first draft of each sequence is accepted, if halves depend on it."""
        if self._has_halves:
            surprise_B = (verdict.accepted_B > 0).float() - self.score_Z[lanes_B]
            self.score_Z[lanes_B] += SCORE_RATE * surprise_B * (verdict.tested_B > 0)

    def _select(
        self,
        table: SequenceState,
        batch: Batch,
        plan: StepPlan,
        wanted: WantedRows,
        logits_XV: Tensor,
        verdict: Verdict,
        uniforms_BD: Tensor,
    ) -> None:
        """Draw the drafts of mask rows by the selector, in place of those that are there."""
        assert self.selector is not None
        num_masks, rows_BJ = self.num_masks, verdict.draft_rows_BJ
        if self._drafts_again[batch.mode]:
            assert plan.is_mask_R is not None
            is_mask_BJ = plan.is_mask_R[plan.logit_rows_X[rows_BJ.clamp(min=0)]]
            rows_BJ = rows_BJ.where(is_mask_BJ, NO_ROW)
        rows = MaskRows(
            wanted=wanted,
            logits_XV=logits_XV,
            rows_BJ=rows_BJ,
            anchors_B=verdict.token_ids_BA.gather(1, verdict.accepted_B[:, None])[:, 0],
            uniforms_BJ=uniforms_BD[:, num_masks + 1 : 2 * num_masks + 1],
        )
        self.selector.draw(table, batch, rows, self.draft_probs, self.drafts_ZJ)

    def _look_up(self, table: SequenceState, plan: StepPlan) -> Tensor:
        """Replace drafts by what followed the same tokens before, the newest included. Returns is_found_B.

        Committed tokens decide alone, never the drafts that are replaced or what will test the others."""
        lanes_B = plan.lanes_B
        is_single_B = self.draft_buffer_Z[lanes_B] == SINGLE_BUFFER.index(self.num_masks)
        return look_up(
            table.tokens_ZL,
            table.num_known_Z,
            self.draft_probs,
            lanes_B=lanes_B,
            active_B=plan.samples_B & ~is_single_B,
            minimum=self.config.prompt_lookup_min,
            drafts_ZJ=self.drafts_ZJ,
            layout_Z=self.draft_buffer_Z,
            layout=DraftBuffer(self.num_masks).index(self.num_masks),
        )

    def _candidates(
        self,
        logits_XV: Tensor,
        verdict: Verdict,
        is_found_B: Tensor | None,
        batch: Batch,
        uniforms_BD: Tensor,
    ) -> Tensor:
        """Candidates [M, J, C] for the drafts of sequences with grammars: the draft, then further independent
        draws from its stored distribution, or for one that takes the likeliest tokens these in falling order;
        -1 where there is no draft."""
        grammars, num_masks = batch.grammars, self.num_masks
        index_M = grammars.index_M
        rows_MJ, uniforms_MQ = verdict.draft_rows_BJ[index_M], uniforms_BD[index_M, 2 * num_masks + 1 :]
        num_candidates = min(NUM_CANDIDATES, logits_XV.shape[1])
        uniforms_MJC = uniforms_MQ.reshape(*rows_MJ.shape, num_candidates - 1)
        lanes_M = batch.lanes_B[index_M]
        others_MJC = draw_stored(self.draft_probs, lanes_M, uniforms_MJC)
        firsts_MJ = self.drafts_ZJ[lanes_M]
        ids_MJC = torch.cat((firsts_MJ[:, :, None], others_MJC), dim=2)
        is_published = self.config.acceptance == "published"
        best = range(len(ids_MJC)) if is_published else grammars.greedy
        if best:
            best_b = to_device(list(best), logits_XV.device)
            best_bJC = logits_XV[rows_MJ[best_b].clamp(min=0)].topk(num_candidates).indices
            # The draft is one of them, whatever the order of equal ones.
            ids_MJC[best_b, :, 1:] = best_bJC[:, :, 1:]
        is_draft_MJ = rows_MJ >= 0
        if is_found_B is not None:
            is_draft_MJ |= is_found_B[index_M, None]
        return torch.where(is_draft_MJ[:, :, None], ids_MJC, NO_ROW)

    def replace_drafts(self, chosen: Tensor) -> None:
        lanes_b, index_b, ids_b = chosen.unbind(1)
        self.drafts_ZJ[lanes_b, index_b] = ids_b
