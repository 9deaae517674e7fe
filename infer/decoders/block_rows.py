"""Rows of a block-diffusion pass: whole known blocks that are not stored yet, then the active block, or the
part of it that is being decided (Fast-dLLM v2's dual cache, arXiv 2509.26328); and log-probabilities of its
tokens, which are emitted some passes after they were decided.

Every row sees all slots below the end of its own block, which is block-causal attention for prompts, clean
blocks and active blocks alike. Of positions of its block that are not fed it sees what the last pass over
them has stored. The host waits for the device only to read the number of rows of a pass of dynamic shape.
Shapes: B sequences, R rows, W positions of a block, X wanted rows, Z lanes, V vocabulary, K likeliest
tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.infer.runtime.logprobs import Logprobs, token_logprobs
from idlm.infer.state.batch import ActiveBlocks, Batch, BlockDemand, BlockLimits, DroppedRows, StepPlan
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.block_step import BlockLanes, BlockShape, Proposed, WantedPositions, pack_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidingBlocks(ActiveBlocks):
    """The payload of plans: also the position of each wanted row, each sequence's step of the random stream,
    and, once a pass has dropped rows, which positions have logits."""

    wanted: WantedPositions
    draw_steps_B: Tensor
    has_logits_BW: Tensor | None = None


def plan_blocks(
    table: SequenceState, batch: Batch, blocks: BlockLanes, shape: BlockShape, steps_Z: Tensor, *, edits: bool
) -> StepPlan:
    """Lay out the rows that are due. `samples_B`: sequences that decide something in this pass. `steps_Z`:
    the number of passes that each lane's quota allows a block. `edits`: decided positions need logits too."""
    limits: BlockLimits = batch.payload or BlockLimits()
    packed = pack_blocks(
        table.lanes(),
        blocks,
        shape,
        steps_Z=steps_Z,
        lanes_B=batch.lanes_B,
        num_feed_B=batch.num_feed_B,
        samples_B=batch.samples_B,
        num_rows=batch.num_rows,
        num_wanted=limits.num_wanted,
        edits=edits,
    )
    return StepPlan(
        lanes_B=batch.lanes_B,
        cu_rows_B1=packed.cu_rows_B1,
        sequence_R=packed.sequence_R,
        token_ids_R=packed.token_ids_R,
        positions_R=packed.slots_R,
        slots_R=packed.slots_R,
        limits_R=packed.limits_R,
        branch_starts_R=packed.limits_R,
        is_mask_R=packed.is_mask_R,
        logit_rows_X=packed.wanted.rows_X,
        first_logit_B=packed.wanted.first_B,
        num_feed_B=packed.num_feed_B,
        samples_B=packed.samples_B,
        advances_B=packed.advances_B,
        max_rows=max(batch.max_feed, shape.size) + shape.size,
        usual_rows=shape.size,
        max_slots=batch.max_known + shape.size,
        payload=DecidingBlocks(
            starts_B=packed.starts_B,
            is_maskable_BW=packed.is_maskable_BW,
            num_passes_B=packed.num_passes_B,
            num_steps_B=packed.num_steps_B,
            size=shape.size,
            num_scheduled_B=batch.num_feed_B,
            capacity=limits.capacity,
            num_waits_B=blocks.num_waits_Z[batch.lanes_B],
            is_exact=batch.num_rows is None,
            demand=BlockDemand(num_wanted_B=packed.wanted.num_B, waits_B=packed.wanted.waits_B),
            wanted=packed.wanted,
            draw_steps_B=packed.draw_steps_B,
        ),
    )


def deciding(plan: StepPlan) -> DecidingBlocks:
    """The payload of a plan of `plan_blocks`."""
    assert isinstance(plan.payload, DecidingBlocks), f"{type(plan.payload)=}"
    return plan.payload


def without_dropped(plan: StepPlan, dropped: DroppedRows) -> StepPlan:
    """The plan with those wanted rows that the head has computed."""
    active = deciding(plan)
    wanted, origin_H, number_BW = active.wanted, dropped.origin_H, active.wanted.number_BW
    number_BW = torch.where(number_BW >= 0, dropped.numbers_X[number_BW.clamp(min=0)], -1)
    left = replace(wanted, number_BW=number_BW)
    if origin_H is not None:
        columns = {name: getattr(wanted, name)[origin_H] for name in ("rows_X", "positions_X", "lanes_X")}
        left = replace(left, **columns)
    return replace(plan, payload=replace(active, wanted=left, has_logits_BW=number_BW >= 0))


MAX_TOP = 20
"""Alternatives of a token that are stored at most."""


class DecidedScores:
    """Per lane, those of the tokens [Z, W] of the active block, and of the likeliest ones [Z, W, K]."""

    def __init__(self, blocks: BlockLanes, shape: BlockShape, vocab_size: int) -> None:
        self._blocks, self._shape = blocks, shape
        sizes, maximum = (*blocks.tokens_ZW.shape,), min(MAX_TOP, vocab_size)
        self._stored = Logprobs(
            blocks.tokens_ZW.new_zeros(sizes, dtype=torch.float64),
            blocks.tokens_ZW.new_zeros((*sizes, maximum)),
            blocks.tokens_ZW.new_zeros((*sizes, maximum), dtype=torch.float64),
        )

    def begin(self, table: SequenceState, plan: StepPlan, is_read_BW: Tensor) -> None:
        """Remember the active blocks before a pass decides, which may use the proposals of `is_read_BW`."""
        lanes_B, blocks = plan.lanes_B, self._blocks
        self._before = blocks.tokens_ZW[lanes_B], blocks.is_decided_ZW[lanes_B], is_read_BW
        self._num_fixed_B = table.num_known_Z[lanes_B] % self._shape.size

    def note(
        self, plan: StepPlan, logits_XV: Tensor, proposed: Proposed, num_emitted_B: Tensor, *, num_top: int
    ) -> Logprobs:
        """Store the numbers of what the pass decided or rewrote; returns those of the emitted tokens."""
        lanes_B, blocks, wanted = plan.lanes_B, self._blocks, deciding(plan).wanted
        (tokens_before_BW, decided_before_BW, is_read_BW), tokens_BW = self._before, blocks.tokens_ZW[lanes_B]
        decided_BW = blocks.is_decided_ZW[lanes_B] | (num_emitted_B > 0)[:, None]
        is_new_BW = decided_BW & (~decided_before_BW | (tokens_BW != tokens_before_BW)) & is_read_BW
        # The MASK is never predicted.
        logits_XV = logits_XV.clone()
        logits_XV[:, self._shape.mask_token_id] = -math.inf
        ids_X = proposed.token_ids_BW.flatten()[wanted.positions_X]
        scored = token_logprobs(logits_XV, ids_X, num_top=self._stored.top.shape[-1])
        number_BW = wanted.number_BW.clamp(min=0)
        for stored, values in zip(self._stored, scored, strict=True):
            is_new = is_new_BW if stored.ndim == 2 else is_new_BW[..., None]
            stored[lanes_B] = torch.where(is_new, values[number_BW], stored[lanes_B])
        return self._emitted(lanes_B, num_top=num_top)

    def _emitted(self, lanes_B: Tensor, *, num_top: int) -> Logprobs:
        """Those of the tokens after the fixed ones, [B, W]."""
        size = self._shape.size
        index_W = torch.arange(size, device=lanes_B.device)
        positions_BW = (index_W + self._num_fixed_B[:, None]).clamp(max=size - 1)
        chosen_BW = self._stored.chosen[lanes_B].gather(1, positions_BW)
        positions_BW1 = positions_BW[..., None]
        ids_BWK = torch.take_along_dim(self._stored.top_ids[lanes_B], positions_BW1, dim=1)
        top_BWK = torch.take_along_dim(self._stored.top[lanes_B], positions_BW1, dim=1)
        return Logprobs(chosen_BW, ids_BWK[..., :num_top], top_BWK[..., :num_top])
