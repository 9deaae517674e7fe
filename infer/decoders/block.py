"""Block diffusion: each pass over a block of masks decides some of them until the block is clean; the pass
that begins the next block stores its KV.

SDAR (arXiv 2510.06303, logits in place), Fast-dLLM v2 (arXiv 2509.26328, logits shifted inside the block,
whose first token is drawn from the last row of the clean block before) and LLaDA2.x, of which 2.1 also edits
decided tokens. Blocks are counted from position 0; the tail of a prompt is fixed in the first block. Every
sequence is at a step of its own.
LLaDA2.2's edits that delete and insert positions are in `kernels/block_step`.
Departures: the MASK is never predicted; the first token of a shifted block is drawn with the request's own
settings, not always the argmax; a greedy request's confidence is under the model's own distribution (a
one-hot one has no information); an edit writes the argmax whatever the temperature, else edits would not end.
Shapes: B sequences, W positions of a block, X wanted rows, V vocabulary, Z lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from idlm.contracts import CHANGES, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, Decoder, KVWritePolicy, StrideMode
from idlm.infer.decoders.block_config import (
    NO_EDITS,
    REQUEST_OPTIONS,
    UNMASKINGS,
    BlockConfig,
    LaneOptions,
    check,
    warn_of_unread,
)
from idlm.infer.decoders.block_rows import MAX_TOP, DecidedScores, deciding, plan_blocks, without_dropped
from idlm.infer.state.batch import Batch, StepOutcome, StepPlan, WantedRows, to_device
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.block_step import (
    BlockLanes,
    BlockShape,
    PassBlocks,
    Positions,
    Proposed,
    Resizing,
    Rules,
    decide_blocks,
    positions_of,
)
from idlm.kernels.logit_changes import ABSENT, ChangedRows, KnownTokens
from idlm.kernels.sampling import entropy, judged_draws, nonfinite
from idlm.semantics import Semantics


@DECODERS.register("block")
class BlockDecoder(Decoder):
    """Per lane: the active block, and options of the request's own."""

    name: ClassVar[str] = "block"
    Config: ClassVar[type] = BlockConfig
    baseline: ClassVar[Mapping[str, Any] | None] = {"strategy": "sequential"}
    # Which run of tokens a position ends is not known while those before it are masks.
    takes_changes = CHANGES.keys() - {"no_repeat_ngram_size"}
    request_options: ClassVar[Sequence[str]] = REQUEST_OPTIONS

    @classmethod
    def fits(cls, semantics: Semantics) -> int | None:
        return 1 if semantics.causality == "block" else None

    def __init__(self, config: BlockConfig, semantics: Semantics) -> None:
        size, mask_token_id = semantics.block_size, semantics.mask_token_id
        if semantics.causality != "block" or size is None or mask_token_id is None:
            raise UserError(
                "IDLM-0450",
                f"decoder block needs a block-causal checkpoint; this one has causality="
                f"{semantics.causality!r}, block_size={size}, mask_token_id={mask_token_id}",
                fix="set all three in idlm_config.json if the model is one, else leave the decoder out",
            )
        strategy = UNMASKINGS.get(config.strategy, key="decoder.strategy")
        check(config, size)
        warn_of_unread(config.strategy, strategy.reads, config.changed, prefix="decoder.")
        self.config = config
        self.exactness = "lossy" if config.dual_cache else "exact"
        self.shape = BlockShape(
            size=size,
            mask_token_id=mask_token_id,
            shifted=semantics.logit_shift,
            fuses=config.fused_commit,
            part=config.sub_block_size,
            reuses=config.dual_cache,
        )
        self._strategy = strategy()
        self._edits = config.sure_edit < NO_EDITS
        self.modes = (StrideMode(stride=size, strategy=config.strategy),)
        self.kv_policy = KVWritePolicy(
            kind="block",
            block_size=size,
            fused_commit=config.fused_commit and not semantics.logit_shift,
            feeds_parts=config.dual_cache,
            # Edits that move tokens would have to move their numbers too.
            max_logprobs=None if semantics.edit_token_ids else MAX_TOP,
        )
        self._edit_token_ids = semantics.edit_token_ids
        self._resizing: Resizing | None = None
        if self._edit_token_ids and config.sub_block_size is not None:
            raise UserError(
                "IDLM-0451",
                f"decoder.sub_block_size={config.sub_block_size} decides parts of a block, but edits of this "
                "model move tokens from one part to another",
                fix="leave decoder.sub_block_size out",
            )

    def num_rows(self, mode: int, max_length: int) -> int:
        return self.shape.size

    def check_options(self, config: BlockConfig, options: Mapping[str, Any]) -> None:
        """A request cannot enable edits in an engine whose passes make none."""
        check(config, self.shape.size, prefix="decoder_options.")
        warn_of_unread(config.strategy, self._strategy.reads, options, prefix="decoder_options.")
        if config.sure_edit < NO_EDITS and not self._edits:
            raise UserError(
                "IDLM-0453",
                f"decoder_options.edit_threshold={config.edit_threshold!r}, but this engine has no edits",
                fix="build it with decoder.edit_threshold= or decoder.mode=quality, or leave it out",
            )

    def allocate(
        self, num_lanes: int, max_length: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks = BlockLanes.empty(num_lanes, self.shape.size, device)
        self._scores = DecidedScores(self.blocks, self.shape, vocab_size)
        self.options = LaneOptions.empty(num_lanes, device)
        if self._edit_token_ids:
            ids, maximum = self._edit_token_ids, self.config.max_edit_passes
            self._resizing = Resizing.empty(
                ids, maximum, num_lanes=num_lanes, size=self.shape.size, device=device
            )

    def admit(self, lanes: list[int], params: Sequence[SamplingParams]) -> None:
        self.rewind(lanes)
        configs = [self.configure(one.decoder_options) for one in params]
        self.options.admit(lanes, configs, block_size=self.shape.size)

    def rewind(self, lanes: list[int]) -> None:
        """Restart the active blocks after their KV was lost; the answer does not change."""
        lanes_B = to_device(lanes, self.blocks.num_passes_Z.device)
        self.blocks.reset(lanes_B)
        if self._resizing is not None:
            self._resizing.reset(lanes_B)

    def plan(self, table: SequenceState, batch: Batch) -> StepPlan:
        """Whole known blocks that are not stored yet, then the active block."""
        return plan_blocks(table, batch, self.blocks, self.shape, self.options.steps_Z, edits=self._edits)

    def advance(self, table: SequenceState, batch: Batch, plan: StepPlan, wanted: WantedRows) -> StepOutcome:
        """Draw a token for every mask, decide some masks, and emit the blocks that are clean then."""
        if wanted.dropped is not None:
            plan = without_dropped(plan, wanted.dropped)
        logits_XV = wanted.logits()
        proposed, nonfinite_B = self._propose(table, batch, plan, logits_XV)
        logprobs = None
        if batch.num_top is not None:
            self._scores.begin(table, plan, self._is_read(table, plan))
        emitted_BW, num_emitted_B = self._decide(table, plan, proposed)
        if batch.num_top is not None:
            logprobs = self._scores.note(plan, logits_XV, proposed, num_emitted_B, num_top=batch.num_top)
        return StepOutcome(
            token_ids_BJ=emitted_BW, num_emitted_B=num_emitted_B, nonfinite_B=nonfinite_B, logprobs=logprobs
        )

    def _quota(self, plan: StepPlan) -> Tensor | None:
        """The fewest masks to decide in each sequence, int64 [B]; None: what its number of steps implies."""
        return None

    def _propose(
        self, table: SequenceState, batch: Batch, plan: StepPlan, logits_XV: Tensor
    ) -> tuple[Proposed, Tensor]:
        """A token for every position with its confidence and what else strategies need, and which sequences
        have logits that are not finite. Proposals mean nothing where nothing may be decided; positions that
        may be edited get the most likely token."""
        active = deciding(plan)
        wanted, is_maskable_BW = active.wanted, active.is_maskable_BW
        if self._resizing is not None:
            lanes_B, masks_BW = plan.lanes_B, self._positions(table, plan).masks_BW
            last_B = self._resizing.is_last(lanes_B, masks_BW, self.blocks.num_passes_Z[lanes_B])
            self._resizing.forbid(logits_XV, last_B[wanted.positions_X // self.shape.size])
        forbidden_id = self.shape.mask_token_id
        logits_XV = self._changed(table, batch, plan, logits_XV)
        probs = table.probs(logits_XV, wanted.lanes_X, batch.filters, forbidden_id=forbidden_id)
        # Numbers belong to positions, so that no draw depends on which rows are wanted.
        uniforms_BW = table.uniforms(plan.lanes_B, self.shape.size, active.draw_steps_B)
        ids_X, confidence_X = judged_draws(
            probs,
            uniforms_BW.flatten()[wanted.positions_X],
            table.temperature_Z,
            lanes_B=wanted.lanes_X,
            takes_best_X=(~is_maskable_BW).flatten()[wanted.positions_X] if self._edits else None,
            always_own=self.config.confidence == "model",
        )
        number_BW = wanted.number_BW.clamp(min=0)
        proposed = Proposed(
            token_ids_BW=ids_X[number_BW],
            confidence_BW=confidence_X[number_BW],
            entropy_BW=entropy(probs)[number_BW] if self._strategy.needs_entropy else None,
        )
        is_read_BW = self._is_read(table, plan)
        return proposed, nonfinite(probs, torch.where(is_read_BW, number_BW, -1)).clamp(max=1)

    def _changed(self, table: SequenceState, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> Tensor:
        """The logits, changed by the tokens before the block and by those of the block that are decided, but
        for the one at the position itself; a copy if log-probabilities need the model's own."""
        if not batch.changes:
            return logits_XV
        if batch.num_top is not None:
            with torch.inference_mode():
                logits_XV[:, self.shape.mask_token_id] = torch.finfo(logits_XV.dtype).min
            logits_XV = logits_XV.clone()
        active, blocks = deciding(plan), self.blocks
        wanted, size = active.wanted, self.shape.size
        own_X = wanted.positions_X % size
        rows = ChangedRows(
            lanes_X=wanted.lanes_X,
            num_drafts_X=torch.full_like(own_X, size),
            positions_X=active.starts_B[wanted.positions_X // size] + own_X,
            own_X=own_X,
        )
        decided_ZW = torch.where(blocks.is_decided_ZW, blocks.tokens_ZW, ABSENT)
        known = KnownTokens(table.num_known_Z, table.tokens_ZL, decided_ZW)
        table.changes.apply(logits_XV, known, rows, plan.lanes_B)
        return logits_XV

    def _is_read(self, table: SequenceState, plan: StepPlan) -> Tensor:
        """Positions whose proposals may be used, bool [B, W]."""
        if self._edits:
            positions = self._positions(table, plan)
            assert positions.editable_BW is not None
            return positions.is_maskable_BW | positions.editable_BW
        active = deciding(plan)
        is_maskable_BW, has_logits_BW = active.is_maskable_BW, active.has_logits_BW
        return is_maskable_BW if has_logits_BW is None else is_maskable_BW & has_logits_BW

    def _positions(self, table: SequenceState, plan: StepPlan) -> Positions:
        known_B = table.num_known_Z[plan.lanes_B]
        return positions_of(known_B, self.blocks, self.shape, _given(plan), edits=self._edits)

    def _decide(self, table: SequenceState, plan: StepPlan, proposed: Proposed) -> tuple[Tensor, Tensor]:
        """Decide, edit and commit; returns tokens [B, W], and how many of each sequence are emitted."""
        options = self.options
        limits = Rules(
            threshold_Z=options.threshold_Z,
            edit_threshold_Z=options.edit_threshold_Z,
            entropy_bound_Z=options.entropy_bound_Z,
            steps_Z=options.steps_Z,
            max_clean_passes=self.config.max_edit_passes if self._edits else None,
            quota_B=self._quota(plan),
        )
        return decide_blocks(
            *(table.lanes(), table.steps_Z, self.blocks, self.shape, _given(plan), proposed),
            rule=self.config.strategy,
            choose=self._strategy.choose,
            limits=limits,
            resizing=self._resizing,
        )


def _given(plan: StepPlan) -> PassBlocks:
    active = deciding(plan)
    assert active.demand is not None
    return PassBlocks(
        lanes_B=plan.lanes_B,
        num_feed_B=plan.num_feed_B,
        samples_B=plan.samples_B,
        waits_B=active.demand.waits_B,
        is_maskable_BW=active.is_maskable_BW,
        has_logits_BW=active.has_logits_BW,
    )
