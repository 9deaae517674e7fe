"""Rows of a block-diffusion pass: whole known blocks that are not stored yet, then the active block, or the
part of it that is being decided (Fast-dLLM v2's dual cache, arXiv 2509.26328).

Every row sees all slots below the end of its own block, which is block-causal attention for prompts, clean
blocks and active blocks alike. Of positions of its block that are not fed it sees what the last pass over
them has stored. Plain torch of static shapes; the host waits for the device only to read the number of rows
of a pass of dynamic shape.
Shapes: B sequences, R rows, W positions of a block, X wanted rows, Z lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idlm.infer.decoders.block_unmask import first_part
from idlm.infer.state.batch import ActiveBlocks, Batch, BlockLimits, DroppedRows, StepPlan
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels import block_step
from idlm.kernels.backend import runs_kernels
from idlm.kernels.block_step import PASSES_BITS, BlockLanes, BlockShape, PackedBlocks, WantedPlaces
from idlm.kernels.row_compaction import take_room

OPENS = 1 << 40
"""Priority of a sequence that draws the first token of a shifted block: that block's last row must not wait,
since a later pass could not compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidingBlocks(ActiveBlocks):
    """The payload of plans: also the place of each wanted row, each sequence's step of the random stream,
    and, once a pass has dropped rows, which places have logits."""

    wanted: WantedPlaces
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
    the number of passes that each lane's quota allows a block. `edits`: decided places want logits too."""
    packed = _pack(table, batch, blocks, shape, steps_Z, edits=edits)
    limits: BlockLimits = batch.payload or BlockLimits()
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
            num_wanted_B=packed.wanted.num_B,
            waits_B=packed.wanted.waits_B,
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
        columns = {name: getattr(wanted, name)[origin_H] for name in ("rows_X", "places_X", "lanes_X")}
        left = replace(left, **columns)
    return replace(plan, payload=replace(active, wanted=left, has_logits_BW=number_BW >= 0))


def _pack(
    table: SequenceState, batch: Batch, blocks: BlockLanes, shape: BlockShape, steps_Z: Tensor, *, edits: bool
) -> PackedBlocks:
    if not runs_kernels(batch.lanes_B):
        return pack_plainly(table, batch, blocks, shape, steps_Z, edits=edits)
    num_rows, num_wanted = _sizes(batch, shape, lambda: _rows_of(table, batch, blocks, shape, edits=edits))
    return block_step.pack_blocks(
        table.lanes(),
        blocks,
        shape,
        steps_Z=steps_Z,
        lanes_B=batch.lanes_B,
        num_feed_B=batch.num_feed_B,
        samples_B=batch.samples_B,
        num_rows=num_rows,
        num_wanted=num_wanted,
        has_room=batch.num_rows is not None,
        edits=edits,
    )


def _sizes(batch: Batch, shape: BlockShape, rows: Callable[[], _Rows]) -> tuple[int, int]:
    """Rows of the pass and of its head: what the host chose (but one block, and a first place of each
    sequence, at least), or exactly what is needed, which the host waits for. No pass is empty, even if the
    device finds all its sequences complete."""
    num_sequences = len(batch.lanes_B)
    num_places = num_sequences * shape.size
    if batch.num_rows is None:
        needed = rows()
        num_rows, num_wanted = torch.stack((needed.cu_rows_B1[-1], needed.is_asked_BW.sum())).tolist()
        return max(1, num_rows), max(1, num_wanted)
    limits: BlockLimits | None = batch.payload
    if limits is None or limits.num_wanted is None:
        return batch.num_rows, num_places
    return batch.num_rows, min(num_places, max(limits.num_wanted, num_sequences + shape.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows that the pass feeds of each sequence, from `cu_rows_B1[b]` on; and, if all fit, whether
    it decides something, its masks that may be decided, and the places that ask for logits."""

    known_B: Tensor
    feed_B: Tensor
    advances_B: Tensor
    denoises_B: Tensor
    opens_B: Tensor
    active: FedPositions
    cu_rows_B1: Tensor
    samples_B: Tensor
    is_maskable_BW: Tensor
    is_asked_BW: Tensor


def _rows_of(
    table: SequenceState, batch: Batch, blocks: BlockLanes, shape: BlockShape, *, edits: bool
) -> _Rows:
    """A decoding sequence stores what the device knows to be due, possibly a block that the host does not
    know yet. Without reserved rows for such a block, the sequence stores it in place of denoising the next
    one: its decoding rows serve for either."""
    lanes_B, size = batch.lanes_B, shape.size
    known_B, computed_B = table.num_known_Z[lanes_B], table.num_computed_Z[lanes_B]
    advances_B = known_B < table.ends_Z[lanes_B]
    wants_B, start_B = batch.samples_B & advances_B, known_B // size * size
    feed_B = torch.where(batch.samples_B, start_B - computed_B, batch.num_feed_B) * advances_B
    denoises_B = _denoises(batch, wants_B, feed_B, shape)
    active = fed_places(blocks, lanes_B, known_B, feed_B, shape)
    samples_B, opens_B = wants_B if shape.shifted else denoises_B, (feed_B > 0) & shape.shifted
    is_decided_BW = blocks.is_decided_ZW[lanes_B]
    is_maskable_BW = is_asked_BW = _open(is_decided_BW, known_B, samples_B, opens_B, shape)
    if edits:
        is_asked_BW = is_asked_BW | editable(is_decided_BW, known_B, samples_B & ~opens_B, shape)
    return _Rows(
        known_B=known_B,
        feed_B=feed_B,
        advances_B=advances_B,
        denoises_B=denoises_B,
        opens_B=opens_B,
        active=active,
        samples_B=samples_B,
        is_maskable_BW=is_maskable_BW,
        is_asked_BW=is_asked_BW,
        cu_rows_B1=torch.nn.functional.pad((feed_B + active.num_B * denoises_B).cumsum(0), (1, 0)),
    )


def pack_plainly(
    table: SequenceState,
    batch: Batch,
    blocks: BlockLanes,
    shape: BlockShape,
    steps_Z: Tensor,
    *,
    edits: bool = False,
) -> PackedBlocks:
    """In plain torch."""
    rows, lanes_B, size = _rows_of(table, batch, blocks, shape, edits=edits), batch.lanes_B, shape.size
    cu_rows_B1, known_B, feed_B, active = rows.cu_rows_B1, rows.known_B, rows.feed_B, rows.active
    num_rows, num_wanted = _sizes(batch, shape, lambda: rows)
    rows_R = torch.arange(num_rows, device=table.device)
    sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(lanes_B) - 1)
    # A sequence that skips positions has nothing to store: all its rows belong to the active block.
    first_slot_B = table.num_computed_Z[lanes_B] + active.first_B * rows.denoises_B
    slots_R = first_slot_B[sequence_R] + rows_R - cu_rows_B1[sequence_R]
    slots_R = torch.where(rows_R < cu_rows_B1[-1], slots_R, 0)
    lane_R, place_R = lanes_B[sequence_R], slots_R % size
    is_known_R = slots_R < known_B[sequence_R]
    is_decided_R = blocks.is_decided_ZW[lane_R, place_R]
    work_R = torch.where(is_decided_R, blocks.tokens_ZW[lane_R, place_R], shape.mask_token_id)
    known_R = table.tokens_ZL[lane_R, slots_R.clamp(max=table.tokens_ZL.shape[1] - 1)]
    wanted = _with_room(
        rows.is_asked_BW,
        _predicting(cu_rows_B1, feed_B - active.first_B, size, num_rows, shifted=shape.shifted),
        lanes_B,
        blocks.num_waits_Z[lanes_B] + (rows.samples_B & rows.opens_B) * OPENS,
        num_wanted,
    )
    waits_B = wanted.waits_B
    num_passes_B = blocks.num_passes_Z[lanes_B]
    # By block and pass, so that a block begun anew draws the same. Pass 0: the first of a shifted block.
    draw_steps_B = (known_B // size << PASSES_BITS) + torch.where(rows.opens_B, 0, 1 + num_passes_B)
    return PackedBlocks(
        cu_rows_B1=cu_rows_B1,
        sequence_R=sequence_R,
        token_ids_R=torch.where(is_known_R, known_R, work_R),
        slots_R=slots_R,
        limits_R=slots_R - place_R + size,
        is_mask_R=~(is_known_R | is_decided_R) & (rows_R < cu_rows_B1[-1]),
        wanted=wanted,
        # A sequence that waits has stored what the host scheduled, as the host believes.
        num_feed_B=torch.where(waits_B, torch.minimum(feed_B, batch.num_feed_B), feed_B),
        samples_B=rows.samples_B & ~waits_B,
        advances_B=rows.advances_B,
        starts_B=known_B // size * size,
        is_maskable_BW=rows.is_maskable_BW & ~waits_B[:, None],
        num_passes_B=num_passes_B,
        num_steps_B=steps_Z[lanes_B],
        draw_steps_B=draw_steps_B,
    )


def _open(
    is_decided_BW: Tensor, known_B: Tensor, samples_B: Tensor, opens_B: Tensor, shape: BlockShape
) -> Tensor:
    """Masks that this pass may decide if all its wanted rows have logits, bool [B, W]."""
    place_W = torch.arange(shape.size, device=known_B.device)
    is_fixed_BW = place_W < (known_B % shape.size)[:, None]
    is_maskable_BW = samples_B[:, None] & ~is_fixed_BW & ~is_decided_BW
    # The last row of a stored block predicts one position; no other row predicts anything then.
    is_maskable_BW &= ~opens_B[:, None] | (place_W == 0)
    return is_maskable_BW if shape.part is None else first_part(is_maskable_BW, shape.part)


def editable(is_decided_BW: Tensor, known_B: Tensor, is_mine_B: Tensor, shape: BlockShape) -> Tensor:
    """Decided positions of `is_mine_B` that have a row and may be edited, bool [B, W]."""
    place_W = torch.arange(shape.size, device=known_B.device)
    is_fixed_BW = place_W < (known_B % shape.size)[:, None]
    # Inside a shifted block no row predicts the first position.
    return is_mine_B[:, None] & is_decided_BW & ~is_fixed_BW & (place_W >= int(shape.shifted))


def _with_room(
    is_asked_BW: Tensor, predicting_X: Tensor, lanes_B: Tensor, priority_B: Tensor, num_wanted: int
) -> WantedPlaces:
    """A wanted row for every place that asks for one, in the order of priorities, then of sequences, until a
    sequence exceeds it: that one and those behind it wait.

    `predicting_X`: the row that predicts each place, [B * W]."""
    num_B = is_asked_BW.sum(dim=1)
    ends_B, waits_B = take_room(num_B, priority_B, num_wanted)
    number_BW = (ends_B - num_B)[:, None] + is_asked_BW.cumsum(dim=1) - 1
    number_BW = torch.where(is_asked_BW & ~waits_B[:, None], number_BW, -1)
    # Places without a row go to one more, which is cut off; padding is row 0, place 0.
    target_X = torch.where(number_BW >= 0, number_BW, num_wanted).flatten()
    places = torch.arange(len(target_X), device=lanes_B.device)
    rows_X, places_X = (
        torch.zeros(num_wanted + 1, dtype=torch.int64, device=lanes_B.device).scatter_(0, target_X, values)
        for values in (predicting_X, places)
    )
    return WantedPlaces(
        rows_X=rows_X[:-1],
        places_X=places_X[:-1],
        lanes_X=lanes_B[places_X[:-1] // is_asked_BW.shape[1]],
        number_BW=number_BW,
        first_B=ends_B - num_B,
        num_B=num_B,
        waits_B=waits_B,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPositions:
    """The positions of each sequence's active block that are fed: the first, how many, and the part that is
    being decided (0 if blocks have no parts)."""

    first_B: Tensor
    num_B: Tensor
    part_B: Tensor


def fed_places(
    blocks: BlockLanes, lanes_B: Tensor, known_B: Tensor, feed_B: Tensor, shape: BlockShape
) -> FedPositions:
    """The whole block; with a dual cache only the part being decided, once the whole has been fed for it.

    In shifted blocks the row before a part predicts its first position: the whole is fed until it is
    decided."""
    size, part_size = shape.size, shape.reused_part
    none_B = torch.zeros_like(known_B)
    if part_size is None:
        return FedPositions(first_B=none_B, num_B=none_B + size, part_B=none_B)
    place_W = torch.arange(size, device=known_B.device)
    is_maskable_BW = (place_W >= (known_B % size)[:, None]) & ~blocks.is_decided_ZW[lanes_B]
    open_B = torch.where(is_maskable_BW, place_W, size - 1).amin(-1)
    part_B = open_B // part_size
    is_whole_B = (blocks.whole_part_Z[lanes_B] != part_B) | (feed_B > 0)
    if shape.shifted:
        is_whole_B |= open_B % part_size == 0
    return FedPositions(
        first_B=torch.where(is_whole_B, 0, part_B * part_size),
        num_B=torch.where(is_whole_B, size, part_size),
        part_B=part_B,
    )


def _denoises(batch: Batch, wants_B: Tensor, feed_B: Tensor, shape: BlockShape) -> Tensor:
    """Sequences that feed their active block. Blocks that the host has not counted take the reserved rows in
    the order of the sequences, also rows of blocks that the host counted and that are stored by now."""
    if shape.shifted or not shape.fuses:
        return wants_B & (feed_B == 0)
    if batch.num_rows is None:
        return wants_B
    uncounted_B = (feed_B - batch.num_feed_B).clamp(min=0)
    num_free = batch.num_rows - len(wants_B) * shape.size - torch.minimum(feed_B, batch.num_feed_B).sum()
    return wants_B & ((uncounted_B == 0) | (uncounted_B.cumsum(0) <= num_free))


def _predicting(cu_rows_B1: Tensor, offset_B: Tensor, size: int, num_rows: int, *, shifted: bool) -> Tensor:
    """Rows [B * W] that predict the positions of the active block, whose position 0 is or would be `offset_B`
    after the sequence's first row; any row of the pass where none predicts a position."""
    place_W = torch.arange(size, device=offset_B.device) - int(shifted)
    first_B1, last_B1 = cu_rows_B1[:-1, None], cu_rows_B1[1:, None] - 1
    rows_BW = first_B1 + offset_B[:, None] + place_W
    return torch.minimum(torch.maximum(rows_BW, first_B1), last_B1).clamp(0, num_rows - 1).flatten()
