"""Rows of a block-diffusion pass: whole known blocks that are not stored yet, then the active block, or the
part of it that is being decided (Fast-dLLM v2's dual cache, arXiv 2509.26328).

Every row sees all slots below the end of its own block, which is block-causal attention for prompts, clean
blocks and active blocks alike. Of positions of its block that are not fed it sees what the last pass over
them has stored. Plain torch of static shapes; the host waits for the device only to read the number of rows
of a pass of dynamic shape.
Shapes: B sequences, R rows, W positions of a block, X wanted rows, Z lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.infer.state.batch import ActiveBlocks, Batch, BlockDemand, BlockLimits, DroppedRows, StepPlan
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.block_step import BlockLanes, BlockShape, WantedPositions, pack_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidingBlocks(ActiveBlocks):
    """The payload of plans: also the position of each wanted row, each sequence's step of the random stream,
    and, once a pass has dropped rows, which positions have logits."""

    wanted: WantedPositions
    draw_steps_B: Tensor
    has_logits_BW: Tensor | None = None


def plan_blocks(
    table: SequenceState,
    batch: Batch,
    blocks: BlockLanes,
    shape: BlockShape,
    steps_Z: Tensor,
    *,
    edits: bool = False,
) -> StepPlan:
    """Lay out the rows that are due. `samples_B`: sequences that decide something in this pass. `steps_Z`:
    the number of passes that each lane's quota allows a block. `edits`: decided positions want logits too."""
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
