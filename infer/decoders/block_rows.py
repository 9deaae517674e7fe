"""Rows of a block-diffusion pass: whole known blocks that are not stored yet, then the block in work, or the
part of it that is being decided (Fast-dLLM v2's dual cache, arXiv 2509.26328).

Every row sees all slots below the end of its own block, which is block-causal attention for prompts, clean
blocks and blocks in work alike; of the places of its block that are not fed, it sees what the last pass over
them has stored. Plain torch of static shapes; nothing waits for the device unless the number of rows is asked
for.
Shapes: B sequences, R rows, W positions of a block, X = B * W wanted rows, Z lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.contracts import StepPlan
from idlm.infer.decoders.base import Batch
from idlm.infer.table import SequenceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLanes:
    """The block in work of each lane: tokens decided so far (known ones are in the table), which places those
    are, how many denoising passes it has had, and how many of these began without a mask (edits only).
    `whole_part_Z`: the part that was being decided when the whole block was fed last; -1: the cache holds
    nothing of this block.
    """

    tokens_ZW: Tensor
    is_decided_ZW: Tensor
    num_passes_Z: Tensor
    num_clean_passes_Z: Tensor
    whole_part_Z: Tensor

    @classmethod
    def empty(cls, num_lanes: int, block_size: int, device: torch.device) -> BlockLanes:
        """Nothing is decided."""
        shape = (num_lanes, block_size)
        return cls(
            tokens_ZW=torch.zeros(shape, dtype=torch.int64, device=device),
            is_decided_ZW=torch.zeros(shape, dtype=torch.bool, device=device),
            num_passes_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
            num_clean_passes_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
            whole_part_Z=torch.full((num_lanes,), -1, dtype=torch.int64, device=device),
        )

    def reset(self, lanes: list[int]) -> None:
        """These lanes begin their blocks anew."""
        self.is_decided_ZW[lanes] = False
        self.num_passes_Z[lanes] = 0
        self.num_clean_passes_Z[lanes] = 0
        self.whole_part_Z[lanes] = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """`shifted`: a position is predicted by the row before it, so a block's first one by the last row of the
    clean block before, and nothing can be denoised beside that. `fuses`: a block is denoised in the very pass
    that stores the one before, as far as rows suffice. `reused_part`: a pass over a block feeds just the part
    of so many places that is being decided, behind one pass over the whole block per part; None: always the
    whole block.
    """

    size: int
    mask_token_id: int
    shifted: bool
    fuses: bool
    reused_part: int | None = None


def pack_blocks(table: SequenceTable, batch: Batch, blocks: BlockLanes, shape: BlockShape) -> StepPlan:
    """Lay out what every sequence is due. `samples_B`: it decides something in this pass.

    A decoding sequence stores what the device knows to be due, which may be a block that the host has not
    heard of. Where such blocks have no room, they are stored without denoising the next: the rows reserved
    for a decoding sequence are either.
    """
    lanes_B, size = batch.lanes_B, shape.size
    known_B, computed_B = table.num_known_Z[lanes_B], table.num_computed_Z[lanes_B]
    advances_B = known_B < table.ends_Z[lanes_B]
    wants_B, start_B = batch.samples_B & advances_B, known_B // size * size
    feed_B = torch.where(batch.samples_B, start_B - computed_B, batch.num_feed_B) * advances_B
    denoises_B = _denoises(batch, wants_B, feed_B, shape)
    work = fed_places(blocks, lanes_B, known_B, feed_B, shape)
    num_rows_B = feed_B + work.num_B * denoises_B
    cu_rows_B1 = torch.nn.functional.pad(num_rows_B.cumsum(0), (1, 0))
    # No pass is empty, even if all its sequences were found complete on the device.
    num_rows = max(1, int(cu_rows_B1[-1])) if batch.num_rows is None else batch.num_rows
    rows_R = torch.arange(num_rows, device=table.device)
    sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(lanes_B) - 1)
    # Whoever skips places has nothing to store: all its rows are of the block in work.
    first_slot_B = computed_B + work.first_B * denoises_B
    slots_R = first_slot_B[sequence_R] + rows_R - cu_rows_B1[sequence_R]
    slots_R = torch.where(rows_R < cu_rows_B1[-1], slots_R, 0)
    lane_R, place_R = lanes_B[sequence_R], slots_R % size
    is_known_R = slots_R < known_B[sequence_R]
    is_decided_R = blocks.is_decided_ZW[lane_R, place_R]
    work_R = torch.where(is_decided_R, blocks.tokens_ZW[lane_R, place_R], shape.mask_token_id)
    known_R = table.tokens_ZL[lane_R, slots_R.clamp(max=table.tokens_ZL.shape[1] - 1)]
    limits_R = slots_R - place_R + size
    return StepPlan(
        lanes_B=lanes_B,
        cu_rows_B1=cu_rows_B1,
        sequence_R=sequence_R,
        token_ids_R=torch.where(is_known_R, known_R, work_R),
        positions_R=slots_R,
        slots_R=slots_R,
        limits_R=limits_R,
        branch_starts_R=limits_R,
        is_mask_R=~(is_known_R | is_decided_R) & (rows_R < cu_rows_B1[-1]),
        logit_rows_X=_wanted(cu_rows_B1, feed_B - work.first_B, size, num_rows, shifted=shape.shifted),
        first_logit_B=torch.arange(len(lanes_B), device=table.device) * size,
        num_feed_B=feed_B,
        samples_B=wants_B if shape.shifted else denoises_B,
        advances_B=advances_B,
        max_rows=max(batch.max_feed, size) + size,
        max_slots=batch.max_known + size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPlaces:
    """Of the block in work of each sequence, if it is fed: the first place, how many, and the part that is
    being decided (0 where blocks have no parts).
    """

    first_B: Tensor
    num_B: Tensor
    part_B: Tensor


def fed_places(
    blocks: BlockLanes, lanes_B: Tensor, known_B: Tensor, feed_B: Tensor, shape: BlockShape
) -> FedPlaces:
    """The whole block; with a dual cache only the part being decided, once the whole has been fed for it.

    In shifted blocks the row before a part predicts its first place: the whole is fed until that is decided.
    """
    size, part_size = shape.size, shape.reused_part
    none_B = torch.zeros_like(known_B)
    if part_size is None:
        return FedPlaces(first_B=none_B, num_B=none_B + size, part_B=none_B)
    place_W = torch.arange(size, device=known_B.device)
    is_open_BW = (place_W >= (known_B % size)[:, None]) & ~blocks.is_decided_ZW[lanes_B]
    open_B = torch.where(is_open_BW, place_W, size - 1).amin(-1)
    part_B = open_B // part_size
    is_whole_B = (blocks.whole_part_Z[lanes_B] != part_B) | (feed_B > 0)
    if shape.shifted:
        is_whole_B |= open_B % part_size == 0
    return FedPlaces(
        first_B=torch.where(is_whole_B, 0, part_B * part_size),
        num_B=torch.where(is_whole_B, size, part_size),
        part_B=part_B,
    )


def _denoises(batch: Batch, wants_B: Tensor, feed_B: Tensor, shape: BlockShape) -> Tensor:
    """Who feeds the block in work. Blocks that the host has not counted go by the order of sequences, into
    the room of those, too, that it has counted and that are stored.
    """
    if shape.shifted or not shape.fuses:
        return wants_B & (feed_B == 0)
    if batch.num_rows is None:
        return wants_B
    uncounted_B = (feed_B - batch.num_feed_B).clamp(min=0)
    room = batch.num_rows - len(wants_B) * shape.size - torch.minimum(feed_B, batch.num_feed_B).sum()
    return wants_B & ((uncounted_B == 0) | (uncounted_B.cumsum(0) <= room))


def _wanted(cu_rows_B1: Tensor, offset_B: Tensor, size: int, num_rows: int, *, shifted: bool) -> Tensor:
    """Rows [X] that predict the places of the block in work, whose place 0 is or would be `offset_B` behind
    the sequence's first row; some row of the pass where none does.
    """
    place_W = torch.arange(size, device=offset_B.device) - int(shifted)
    first_B1, last_B1 = cu_rows_B1[:-1, None], cu_rows_B1[1:, None] - 1
    rows_BW = first_B1 + offset_B[:, None] + place_W
    return torch.minimum(torch.maximum(rows_BW, first_B1), last_B1).clamp(0, num_rows - 1).flatten()
