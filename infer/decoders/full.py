"""Full diffusion: every pass feeds the whole canvas (prompt, answer, masks), whose rows all see all of it,
and decides some masks of the active block. Nothing is stored between passes, unless `decoder.cache` is set
so: then some passes feed a part of the canvas (`full_rows.py`).

LLaDA (arXiv 2502.09992; logits in place, blocks from left to right) and Dream (arXiv 2508.15487; a row
predicts the next position, read by an index and not by a copy). A block of the answer is emitted once it is
clean.
Departures: the MASK is never predicted; a token is drawn by inversion of a Philox number, in the law of the
papers' Gumbel noise; `full_config.py` names those of orders.
Shapes: B sequences, C canvases (as many, or with guidance twice as many), R rows, W positions of the active
block, X wanted positions, Y positions of a slice, Z lanes, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, CanvasReuse, Decoder, KVWritePolicy, StrideMode, answer_length
from idlm.infer.decoders.full_config import (
    NO_FACTOR,
    NO_THRESHOLD,
    ORDERS,
    REQUEST_OPTIONS,
    Drawn,
    FullConfig,
    LaneOptions,
    Quota,
    check,
    check_canvas,
    choose,
    factor_quota,
    flip_chance,
    order_name,
)
from idlm.infer.decoders.full_rows import (
    CACHES,
    MIXED_BYTES,
    NUM_CANVASES,
    ActiveCanvases,
    Cache,
    Canvases,
    FedRows,
    active_canvases,
    canvases_of,
    fed_canvases,
    guided,
    mixed_logits,
    reused_positions,
    wanted_positions,
)
from idlm.infer.state.batch import (
    Batch,
    CanvasLimits,
    StepOutcome,
    StepPlan,
    WantedRows,
    fill_lanes,
    to_device,
)
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.block_step import PASSES_BITS
from idlm.kernels.sampling import judged_draws, nonfinite
from idlm.semantics import Semantics

SCORE_BYTES = 24
"""Bytes for each logit that drawing on a CPU, and scoring by whole distributions, allocate: fp64 copies."""


@DECODERS.register("full")
class FullDecoder(Decoder):
    """Per lane: the tokens of the active block, and the passes over it so far."""

    name: ClassVar[str] = "full"
    Config: ClassVar[type] = FullConfig
    baseline: ClassVar[Mapping[str, Any] | None] = dict.fromkeys(
        ("steps", "threshold", "factor", "cache", "cache_refresh")
    )
    baseline_options: ClassVar[tuple[str, ...]] = (
        "order",
        "block_length",
        "defer_eos",
        "forbid_eos",
        "guidance",
    )
    request_options: ClassVar[Sequence[str]] = REQUEST_OPTIONS
    # A whole canvas costs as many passes as it has positions: LLaDA's length, not that of a longest answer.
    default_max_tokens: ClassVar[int] = 128

    @classmethod
    def fits(cls, semantics: Semantics) -> int | None:
        return 1 if semantics.causality == "full" else None

    def __init__(self, config: FullConfig, semantics: Semantics) -> None:
        if semantics.causality != "full" or semantics.mask_token_id is None:
            raise UserError(
                "IDLM-0450",
                f"decoder full needs a full-diffusion checkpoint; this one has causality="
                f"{semantics.causality!r}, mask_token_id={semantics.mask_token_id}",
                fix="set both in idlm_config.json if the model is one, else leave the decoder out",
            )
        order = order_name(config, logit_shift=semantics.logit_shift)
        self._order_name, self._kind = order, ORDERS.get(order, key="decoder.order")
        check(config, order, self._kind)
        self.config, self._order = config, self._kind()
        self._mask_token_id, self._shift = semantics.mask_token_id, int(semantics.logit_shift)
        self._stop_ids = [*semantics.stop_token_ids]
        self.modes = (StrideMode(stride=config.block_length or 1, strategy=order),)
        self._cache: Cache | None = None
        self._reuse: CanvasReuse | None = None
        if config.cache is not None:
            self._cache, self.exactness = CACHES.get(config.cache, key="decoder.cache")(), "lossy"
            self._reuse = self._cache.reuse(
                block_length=config.block_length, interval=config.cache_refresh, shift=self._shift
            )
        self.kv_policy = KVWritePolicy(kind="none", reuse=self._reuse)
        self.max_canvases = NUM_CANVASES if self._cache is None else 1

    def num_rows(self, mode: int, max_length: int) -> int:
        """The whole canvas; with a cache, in a refresh."""
        return max_length

    def num_canvases(self, params: SamplingParams) -> int:
        return NUM_CANVASES if params.decoder_options.get("guidance", self.config.guidance) > 0 else 1

    def check_options(self, config: FullConfig, options: Mapping[str, Any]) -> None:
        check(config, self._order_name, self._kind, prefix="decoder_options.")

    def check(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Check the canvas too: UserError IDLM-0470."""
        super().check(params, prompt_ids)
        check_canvas(
            self.configure(params.decoder_options),
            num_prompt=len(prompt_ids),
            max_tokens=answer_length(params),
            max_length=self._max_length,
        )
        if self._mask_token_id in prompt_ids:
            raise UserError(
                "IDLM-0470",
                f"the prompt contains the mask (token {self._mask_token_id}), which would never be decided",
                fix="leave it out; a canvas ends in max_tokens masks",
            )

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._max_length = max_length
        self._width = min(self.config.block_length or max_length, max_length)
        shape = (num_lanes, self._width)
        copies = device.type == "cpu" or self._kind.reads != "token" or self.config.forbid_eos
        self._proposal_bytes = SCORE_BYTES * vocab_size if copies else 0
        self._mixed_bytes = MIXED_BYTES * vocab_size
        self.tokens_ZW = torch.zeros(shape, dtype=torch.int64, device=device)
        self.is_decided_ZW = torch.zeros(shape, dtype=torch.bool, device=device)
        self.is_recent_ZW = torch.zeros_like(self.is_decided_ZW)
        self.num_passes_Z = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.options = LaneOptions.empty(num_lanes, device)
        known = [token for token in self._stop_ids if token < vocab_size]
        self._stop_ids_S = to_device(known, device)
        forbidden = [self._mask_token_id, *(known if self.config.forbid_eos else [])]
        self._forbidden_S = to_device(forbidden, device)

    def admit(self, lanes: list[int], params: Sequence[SamplingParams]) -> None:
        self._begin_blocks(lanes)
        configs = [self.configure(one.decoder_options) for one in params]
        self.options.admit(lanes, configs, [answer_length(one) for one in params])

    def rewind(self, lanes: list[int]) -> None:
        """With a cache, begin the blocks anew, with the same outcome: what their passes stored is gone."""
        if self._cache is not None:
            self._begin_blocks(lanes)

    def _begin_blocks(self, lanes: list[int]) -> None:
        fill_lanes(lanes, 0, self.is_decided_ZW, self.is_recent_ZW, self.num_passes_Z)

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """The canvas of every sequence that is not complete; the masks of its active block are wanted."""
        limits: CanvasLimits = batch.payload
        lanes_C, num_feed_C, samples_C = canvases_of(batch, self.options.guidance_Z)
        ends_C, known_C = table.ends_Z[lanes_C], table.num_known_Z[lanes_C]
        advances_C = known_C < ends_C
        samples_C = samples_C & advances_C
        fed = self._fed(batch, known_C, ends_C, samples_C)
        sequence_R, slots_R, is_fed_R = fed.sequence_R, fed.slots_R, fed.is_fed_R
        lane_R, index_R = lanes_C[sequence_R], slots_R - known_C[sequence_R]
        is_known_R, in_block_R = index_R < 0, index_R < self._width
        index_R = index_R.clamp(0, self._width - 1)
        is_decided_R = in_block_R & self.is_decided_ZW[lane_R, index_R]
        decided_R = torch.where(is_decided_R, self.tokens_ZW[lane_R, index_R], self._mask_token_id)
        limits_R = torch.where(is_fed_R, ends_C[sequence_R], 1)
        lanes_B, known_B, ends_B, samples_B = (
            each_C[: len(batch.lanes_B)] for each_C in (lanes_C, known_C, ends_C, samples_C)
        )
        index_W = torch.arange(min(limits.max_length, self._width), device=known_B.device)
        in_block_BW = index_W < self._sizes(known_B, ends_B)[:, None]
        is_decided_BW = self.is_decided_ZW[lanes_B, : len(index_W)]
        is_maskable_BW = in_block_BW & samples_B[:, None] & ~is_decided_BW
        sequence_X, index_X = wanted_positions(is_maskable_BW, is_exact=batch.num_rows is None)
        wanted_X = fed.rows_of(sequence_X, known_B[sequence_X] + index_X - self._shift)
        plan = StepPlan(
            lanes_B=lanes_C,
            cu_rows_B1=fed.cu_rows_B1,
            sequence_R=sequence_R,
            token_ids_R=torch.where(is_known_R, table.tokens_ZL[lane_R, slots_R], decided_R),
            positions_R=slots_R,
            slots_R=slots_R,
            limits_R=limits_R,
            branch_starts_R=limits_R,
            is_mask_R=is_fed_R & ~is_known_R & ~is_decided_R,
            logit_rows_X=wanted_X,
            first_logit_B=torch.zeros_like(known_C),
            num_feed_B=num_feed_C,
            samples_B=samples_C,
            advances_B=advances_C,
            max_rows=batch.max_rows,
            max_slots=limits.max_length,
            payload=ActiveCanvases(
                takes_best=self._kind.reads != "row" and limits.is_greedy and limits.num_canvases == 1,
                sequence_X=sequence_X,
                index_X=index_X,
                is_maskable_BW=is_maskable_BW,
                # By block and pass, so that a block begun anew draws the same.
                draw_steps_B=(known_B << PASSES_BITS) + self.num_passes_Z[lanes_B],
            ),
        )
        if limits.num_canvases == 1:
            return plan
        prompt_ends_C = ends_C - self.options.lengths_Z[lanes_C]
        return guided(plan, fed, ends_C, prompt_ends_C, mask_token_id=self._mask_token_id)

    def _fed(self, batch: Batch, known_B: Tensor, ends_B: Tensor, samples_B: Tensor) -> FedRows:
        """The rows of the pass: of each sequence that samples, its canvas or the part that the cache
        needs."""
        slot_L = torch.arange(batch.payload.max_length, device=known_B.device)
        in_canvas_BL = (slot_L < ends_B[:, None]) & samples_B[:, None]
        if self._cache is None or self._reuse is None:
            return fed_canvases(in_canvas_BL, num_rows=batch.num_rows)
        lanes_B = batch.lanes_B
        index_BL = slot_L - known_B[:, None]
        in_block_BL = (index_BL >= 0) & (index_BL < self._width)
        index_BL = index_BL.clamp(0, self._width - 1)
        is_decided_BL, is_recent_BL = (
            in_block_BL & column_ZW[lanes_B].gather(1, index_BL)
            for column_ZW in (self.is_decided_ZW, self.is_recent_ZW)
        )
        canvases = Canvases(
            slot_L=slot_L,
            known_B=known_B,
            block_ends_B=known_B + self._sizes(known_B, ends_B),
            ends_B=ends_B,
            is_mask_BL=in_canvas_BL & (slot_L >= known_B[:, None]) & ~is_decided_BL,
            is_recent_BL=is_recent_BL,
        )
        refreshes_B = self._reuse.refreshes(self.num_passes_Z[lanes_B])
        is_fed_BL = refreshes_B[:, None] | reused_positions(self._cache, canvases, shift=self._shift)
        return fed_canvases(is_fed_BL & in_canvas_BL, num_rows=batch.num_rows)

    def _sizes(self, known_B: Tensor, ends_B: Tensor) -> Tensor:
        """Positions of the active block [B], at least 1. Whole blocks remain after the known tokens."""
        left_B = (ends_B - known_B).clamp(min=1)
        return left_B if self.config.block_length is None else (left_B - 1) % self.config.block_length + 1

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Decide masks by the order; emit the blocks that are clean."""
        active, lanes_B = active_canvases(plan), batch.lanes_B
        is_maskable_BW = active.is_maskable_BW
        samples_B = plan.samples_B[: len(lanes_B)]
        num_positions, width = is_maskable_BW.numel(), is_maskable_BW.shape[1]
        uniforms_BW2 = table.uniforms(lanes_B, 2 * width, active.draw_steps_B).view(-1, width, 2)
        ids_X, scores_X, bad_X = self._propose(table, batch, plan, wanted, uniforms_BW2[:, :, 0])
        flat_X = active.sequence_X * width + active.index_X

        def by_index(values_X: Tensor) -> Tensor:
            """Values by position [B, W], 0 where there is no wanted row."""
            return values_X.new_zeros(num_positions).scatter_(0, flat_X, values_X).view(-1, width)

        ids_BW, scores_BW = by_index(ids_X), by_index(scores_X)
        is_bad_BW = (by_index(bad_X) > 0) & is_maskable_BW
        chosen_BW = self._choose(table, plan, scores_BW, uniforms_BW2[:, :, 1])
        decided_BW = self.is_decided_ZW[lanes_B, :width] | chosen_BW
        tokens_BW = torch.where(chosen_BW, ids_BW, self.tokens_ZW[lanes_B, :width])
        is_clean_B = samples_B & ~(is_maskable_BW & ~chosen_BW).any(-1)
        self.tokens_ZW[lanes_B, :width] = tokens_BW
        self.is_decided_ZW[lanes_B, :width] = decided_BW & ~is_clean_B[:, None]
        self.is_recent_ZW[lanes_B, :width] = chosen_BW & ~is_clean_B[:, None]
        num_passes_B = self.num_passes_Z[lanes_B] + samples_B.long()
        self.num_passes_Z[lanes_B] = torch.where(is_clean_B, 0, num_passes_B)
        sizes_B = self._sizes(table.num_known_Z[lanes_B], table.ends_Z[lanes_B])
        num_emitted_B = torch.where(is_clean_B, sizes_B, 0)
        table.commit(lanes_B, tokens_BW, num_emitted_B, torch.zeros_like(num_emitted_B))
        return StepOutcome(
            token_ids_BJ=tokens_BW, num_emitted_B=num_emitted_B, nonfinite_B=is_bad_BW.any(-1).long()
        )

    def _propose(
        self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows, uniforms_BW: Tensor
    ) -> tuple[Tensor, ...]:
        """Of every wanted row a token, its score, and whether its logits are not finite; the head streams."""
        active = active_canvases(plan)
        if active.takes_best:
            is_wanted_X = active.is_maskable_BW[active.sequence_X, active.index_X]
            best = wanted.best(self._forbidden_S, is_wanted_X, entropy=self._kind.reads == "entropy")
            if best is not None:
                # All wanted rows are greedy, and the others mean nothing.
                drawn = Drawn(confidence_Y=best.own_X, is_greedy_Y=is_wanted_X, entropy_Y=best.entropy_X)
                return best.token_X, self._score(drawn, best.token_X), best.is_nonfinite_X.long()
        uniforms_X = uniforms_BW[active.sequence_X, active.index_X]
        lane_X, group = batch.lanes_B[active.sequence_X], active.logit_group

        def propose(logits_YV: Tensor, rows: slice) -> tuple[Tensor, ...]:
            rows = slice(rows.start // group, rows.stop // group)
            lane_Y = lane_X[rows]
            if group > 1:
                logits_YV = mixed_logits(logits_YV, self.options.guidance_Z[lane_Y])
            temperature_Y = table.temperature_Z[lane_Y]
            if self.config.forbid_eos:
                lowest = torch.finfo(logits_YV.dtype).min
                logits_YV = logits_YV.index_fill(1, self._stop_ids_S, lowest)
            probs = table.probs(logits_YV, lane_Y, batch.filters, forbidden_id=self._mask_token_id)
            ids_Y, confidence_Y = judged_draws(
                probs, uniforms_X[rows].contiguous(), temperature_Y, always_own=self._kind.always_own
            )
            rows_Y1 = torch.arange(len(ids_Y), device=ids_Y.device)[:, None]
            drawn = Drawn(confidence_Y=confidence_Y, is_greedy_Y=temperature_Y == 0, probs=probs)
            return ids_Y, self._score(drawn, ids_Y), nonfinite(probs, rows_Y1)

        return wanted.proposals(propose, row_bytes=self._proposal_bytes + (group > 1) * self._mixed_bytes)

    def _score(self, drawn: Drawn, ids_Y: Tensor) -> Tensor:
        """Scores of drawn tokens, fp64 [Y]; those of a random order mean nothing."""
        scores_Y = drawn.confidence_Y if self._kind.is_random else self._order.score(drawn)
        if self.config.defer_eos:
            scores_Y = scores_Y.masked_fill(torch.isin(ids_Y, self._stop_ids_S), -torch.inf)
        return scores_Y

    def _choose(self, table: SequenceState, plan: StepPlan, scores_BW: Tensor, uniforms_BW: Tensor) -> Tensor:
        """The masks that this pass decides, bool [B, W]. `uniforms_BW`: a second number of each position."""
        is_maskable_BW, options = active_canvases(plan).is_maskable_BW, self.options
        lanes_B = plan.lanes_B[: len(is_maskable_BW)]
        known_B, ends_B = table.num_known_Z[lanes_B], table.ends_Z[lanes_B]
        size_B = self._sizes(known_B, ends_B)
        quota = Quota(
            pass_B=self.num_passes_Z[lanes_B],
            num_passes_B=options.passes_Z[lanes_B],
            size_B=size_B,
            num_masks_B=is_maskable_BW.sum(-1),
        )
        quota_B = self._order.quota(quota)
        if self._kind.is_random:
            scores_BW = uniforms_BW
        if self._kind.flips:
            is_maskable_BW = is_maskable_BW & (uniforms_BW < flip_chance(quota)[:, None])
        order_temperature_B1 = options.order_temperature_Z[lanes_B, None]
        gumbel_BW = -(-uniforms_BW.log()).log()
        noised_BW = scores_BW / order_temperature_B1 + gumbel_BW
        keys_BW = torch.where(order_temperature_B1 > 0, noised_BW, scores_BW)
        threshold_B1 = options.threshold_Z[lanes_B, None]
        has_threshold_B = threshold_B1[:, 0] < NO_THRESHOLD
        quota_B = torch.where(has_threshold_B, 1, quota_B)
        if self._kind.has_threshold:
            factor_B = options.factor_Z[lanes_B]
            by_factor_B = factor_quota(scores_BW, is_maskable_BW, factor_B)
            quota_B = torch.where(factor_B > NO_FACTOR, by_factor_B, quota_B)
        return choose(keys_BW, is_maskable_BW, quota_B) | (is_maskable_BW & (scores_BW > threshold_B1))
