"""The rows of a block-diffusion pass in plain torch, for a CPU. Static shapes; nothing waits for the device.

Of positions of its block that are not fed a row sees what the last pass over them has stored. Shapes: B
sequences, R rows, W positions of a block, X wanted rows, Z lanes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.kernels.block_step.types import PASSES_BITS, BlockLanes, BlockShape, PackedBlocks, WantedPositions
from idlm.kernels.row_compaction import allot
from idlm.kernels.step_rows import Lanes

OPENS = 1 << 40
"""Priority of a sequence that draws the first token of a shifted block: that block's last row must not wait,
since a later pass could not compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRows:
    """The rows that the pass feeds of each sequence, from `cu_rows_B1[b]` on; and, if all fit, whether
    it decides something, its masks that may be decided, and the positions that need logits."""

    known_B: Tensor
    feed_B: Tensor
    advances_B: Tensor
    denoises_B: Tensor
    opens_B: Tensor
    active: FedPositions
    cu_rows_B1: Tensor
    samples_B: Tensor
    is_maskable_BW: Tensor
    is_due_BW: Tensor


def due_rows(
    lanes: Lanes,
    blocks: BlockLanes,
    shape: BlockShape,
    columns_B: tuple[Tensor, Tensor, Tensor],
    *,
    num_rows: int | None,
    edits: bool,
) -> DueRows:
    """`columns_B`: lanes, tokens to feed, and whether the sequence decodes.

    A decoding sequence stores what is due on the device, possibly a block that is not known on the host
    yet. Without reserved rows for such a block, the sequence stores it in place of denoising the next one:
    its decoding rows serve for either."""
    (lanes_B, num_feed_B, samples_B), size = columns_B, shape.size
    known_B, computed_B = lanes.num_known_Z[lanes_B], lanes.num_computed_Z[lanes_B]
    advances_B = known_B < lanes.ends_Z[lanes_B]
    wants_B, start_B = samples_B & advances_B, known_B // size * size
    feed_B = torch.where(samples_B, start_B - computed_B, num_feed_B) * advances_B
    denoises_B = _denoises(shape, wants_B, feed_B, num_feed_B, num_rows)
    active = fed_positions(blocks, lanes_B, known_B, feed_B, shape)
    samples_B, opens_B = wants_B if shape.shifted else denoises_B, (feed_B > 0) & shape.shifted
    is_decided_BW = blocks.is_decided_ZW[lanes_B]
    is_maskable_BW = is_due_BW = _open(is_decided_BW, known_B, samples_B, opens_B, shape)
    if edits:
        is_due_BW = is_due_BW | editable(is_decided_BW, known_B, samples_B & ~opens_B, shape)
    return DueRows(
        known_B=known_B,
        feed_B=feed_B,
        advances_B=advances_B,
        denoises_B=denoises_B,
        opens_B=opens_B,
        active=active,
        samples_B=samples_B,
        is_maskable_BW=is_maskable_BW,
        is_due_BW=is_due_BW,
        cu_rows_B1=torch.nn.functional.pad((feed_B + active.num_B * denoises_B).cumsum(0), (1, 0)),
    )


def pack_plainly(
    lanes: Lanes,
    blocks: BlockLanes,
    shape: BlockShape,
    rows: DueRows,
    columns_B: tuple[Tensor, Tensor, Tensor],
    steps_Z: Tensor,
    sizes: tuple[int, int],
) -> PackedBlocks:
    """See `pack_blocks`; `sizes`: rows of the pass and wanted rows."""
    (lanes_B, num_feed_B, _), (num_rows, num_wanted) = columns_B, sizes
    size, cu_rows_B1, known_B = shape.size, rows.cu_rows_B1, rows.known_B
    feed_B, active = rows.feed_B, rows.active
    rows_R = torch.arange(num_rows, device=lanes_B.device)
    sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(lanes_B) - 1)
    # A sequence that skips positions has nothing to store: all its rows belong to the active block.
    first_slot_B = lanes.num_computed_Z[lanes_B] + active.first_B * rows.denoises_B
    slots_R = first_slot_B[sequence_R] + rows_R - cu_rows_B1[sequence_R]
    slots_R = torch.where(rows_R < cu_rows_B1[-1], slots_R, 0)
    lane_R, index_R = lanes_B[sequence_R], slots_R % size
    is_known_R = slots_R < known_B[sequence_R]
    is_decided_R = blocks.is_decided_ZW[lane_R, index_R]
    work_R = torch.where(is_decided_R, blocks.tokens_ZW[lane_R, index_R], shape.mask_token_id)
    known_R = lanes.tokens_ZL[lane_R, slots_R.clamp(max=lanes.tokens_ZL.shape[1] - 1)]
    wanted = _with_capacity(
        rows.is_due_BW,
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
        limits_R=slots_R - index_R + size,
        is_mask_R=~(is_known_R | is_decided_R) & (rows_R < cu_rows_B1[-1]),
        wanted=wanted,
        # A sequence that waits has stored what the host scheduled, on which the host counts.
        num_feed_B=torch.where(waits_B, torch.minimum(feed_B, num_feed_B), feed_B),
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
    index_W = torch.arange(shape.size, device=known_B.device)
    is_fixed_BW = index_W < (known_B % shape.size)[:, None]
    is_maskable_BW = samples_B[:, None] & ~is_fixed_BW & ~is_decided_BW
    # The last row of a stored block predicts one position; no other row predicts anything then.
    is_maskable_BW &= ~opens_B[:, None] | (index_W == 0)
    return is_maskable_BW if shape.part is None else first_part(is_maskable_BW, shape.part)


def editable(is_decided_BW: Tensor, known_B: Tensor, is_mine_B: Tensor, shape: BlockShape) -> Tensor:
    """Decided positions of `is_mine_B` that have a row and may be edited, bool [B, W]."""
    index_W = torch.arange(shape.size, device=known_B.device)
    is_fixed_BW = index_W < (known_B % shape.size)[:, None]
    # Inside a shifted block no row predicts the first position.
    return is_mine_B[:, None] & is_decided_BW & ~is_fixed_BW & (index_W >= int(shape.shifted))


def _with_capacity(
    is_due_BW: Tensor, predicting_X: Tensor, lanes_B: Tensor, priority_B: Tensor, num_wanted: int
) -> WantedPositions:
    """A wanted row for every position that needs one, in the order of priorities, then of sequences, until
    a sequence exceeds it: that one and those after it wait.

    `predicting_X`: the row that predicts each position, [B * W]."""
    num_B = is_due_BW.sum(dim=1)
    ends_B, waits_B = allot(num_B, priority_B, num_wanted)
    number_BW = (ends_B - num_B)[:, None] + is_due_BW.cumsum(dim=1) - 1
    number_BW = torch.where(is_due_BW & ~waits_B[:, None], number_BW, -1)
    # Positions without a row go to one more, which is cut off; padding is row 0, position 0.
    target_X = torch.where(number_BW >= 0, number_BW, num_wanted).flatten()
    positions = torch.arange(len(target_X), device=lanes_B.device)
    rows_X, positions_X = (
        torch.zeros(num_wanted + 1, dtype=torch.int64, device=lanes_B.device).scatter_(0, target_X, values)
        for values in (predicting_X, positions)
    )
    return WantedPositions(
        rows_X=rows_X[:-1],
        positions_X=positions_X[:-1],
        lanes_X=lanes_B[positions_X[:-1] // is_due_BW.shape[1]],
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


def fed_positions(
    blocks: BlockLanes, lanes_B: Tensor, known_B: Tensor, feed_B: Tensor, shape: BlockShape
) -> FedPositions:
    """The whole block; with a dual cache only the part being decided, once the whole has been fed for it.

    In shifted blocks the row before a part predicts its first position: the whole is fed until it is
    decided."""
    size, part_size = shape.size, shape.reused_part
    none_B = torch.zeros_like(known_B)
    if part_size is None:
        return FedPositions(first_B=none_B, num_B=none_B + size, part_B=none_B)
    index_W = torch.arange(size, device=known_B.device)
    is_maskable_BW = (index_W >= (known_B % size)[:, None]) & ~blocks.is_decided_ZW[lanes_B]
    open_B = torch.where(is_maskable_BW, index_W, size - 1).amin(-1)
    part_B = open_B // part_size
    is_whole_B = (blocks.whole_part_Z[lanes_B] != part_B) | (feed_B > 0)
    if shape.shifted:
        is_whole_B |= open_B % part_size == 0
    return FedPositions(
        first_B=torch.where(is_whole_B, 0, part_B * part_size),
        num_B=torch.where(is_whole_B, size, part_size),
        part_B=part_B,
    )


def _denoises(
    shape: BlockShape, wants_B: Tensor, feed_B: Tensor, num_feed_B: Tensor, num_rows: int | None
) -> Tensor:
    """Sequences that feed their active block. Blocks that the host has not counted take the reserved rows in
    the order of the sequences, also rows of blocks that the host counted and that are stored by now."""
    if shape.shifted or not shape.fuses:
        return wants_B & (feed_B == 0)
    if num_rows is None:
        return wants_B
    uncounted_B = (feed_B - num_feed_B).clamp(min=0)
    num_free = num_rows - len(wants_B) * shape.size - torch.minimum(feed_B, num_feed_B).sum()
    return wants_B & ((uncounted_B == 0) | (uncounted_B.cumsum(0) <= num_free))


def _predicting(cu_rows_B1: Tensor, offset_B: Tensor, size: int, num_rows: int, *, shifted: bool) -> Tensor:
    """Rows [B * W] that predict the positions of the active block, whose position 0 is or would be `offset_B`
    after the sequence's first row; any row of the pass where none predicts a position."""
    index_W = torch.arange(size, device=offset_B.device) - int(shifted)
    first_B1, last_B1 = cu_rows_B1[:-1, None], cu_rows_B1[1:, None] - 1
    rows_BW = first_B1 + offset_B[:, None] + index_W
    return torch.minimum(torch.maximum(rows_BW, first_B1), last_B1).clamp(0, num_rows - 1).flatten()


def first_part(is_maskable_BW: Tensor, part_size: int) -> Tensor:
    """The maskable positions in the leftmost part that has any; a part is `part_size` positions."""
    index_W = torch.arange(is_maskable_BW.shape[1], device=is_maskable_BW.device)
    part_W = index_W // part_size
    first_B = torch.where(is_maskable_BW, part_W, is_maskable_BW.shape[1]).amin(-1)
    return is_maskable_BW & (part_W == first_B[:, None])
