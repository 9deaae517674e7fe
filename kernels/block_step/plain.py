"""The decisions of a block-diffusion pass in plain torch: on a CPU, and on a GPU where the kernel does not
support the strategy, or edits resize blocks. Static shapes; nothing waits for the device.

Shapes: B sequences, W positions of a block, Z lanes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.kernels.block_step.plain_rows import editable, fed_positions
from idlm.kernels.block_step.resizing import Held, Resizing
from idlm.kernels.block_step.types import (
    NO_EDITS,
    BlockLanes,
    BlockShape,
    Choose,
    Masks,
    PassBlocks,
    Proposed,
    Rules,
)
from idlm.kernels.step_rows import Lanes, commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Positions of the active block, bool [B, W]: `fixed` ones hold known tokens, `decided` ones tokens that
    are not emitted yet; this pass may decide `is_maskable` ones and rewrite `editable` ones. `opens_B`: the
    pass only begins a shifted block."""

    fixed_BW: Tensor
    decided_BW: Tensor
    is_maskable_BW: Tensor
    editable_BW: Tensor | None
    opens_B: Tensor

    @property
    def masks_BW(self) -> Tensor:
        """All masks, also those that this pass may not decide."""
        return ~(self.fixed_BW | self.decided_BW)


def positions_of(
    known_B: Tensor, blocks: BlockLanes, shape: BlockShape, given: PassBlocks, *, edits: bool
) -> Positions:
    """The positions that a pass may change, of sequences with `known_B` known tokens before it."""
    index_W = torch.arange(shape.size, device=known_B.device)
    fixed_BW = index_W < (known_B % shape.size)[:, None]
    decided_BW, opens_B = blocks.is_decided_ZW[given.lanes_B], (given.num_feed_B > 0) & shape.shifted
    is_maskable_BW, editable_BW = given.is_maskable_BW, None
    if edits:
        editable_BW = editable(decided_BW, known_B, given.samples_B & ~opens_B, shape)
    if given.has_logits_BW is not None:
        is_maskable_BW = is_maskable_BW & given.has_logits_BW
        editable_BW = None if editable_BW is None else editable_BW & given.has_logits_BW
    return Positions(
        fixed_BW=fixed_BW,
        decided_BW=decided_BW,
        is_maskable_BW=is_maskable_BW,
        editable_BW=editable_BW,
        opens_B=opens_B,
    )


def decide_plainly(
    lanes: Lanes,
    table_steps_Z: Tensor,
    blocks: BlockLanes,
    shape: BlockShape,
    given: PassBlocks,
    proposed: Proposed,
    *,
    choose: Choose,
    limits: Rules,
    resizing: Resizing | None,
) -> tuple[Tensor, Tensor]:
    """See `decide_blocks`."""
    lanes_B, samples_B, size = given.lanes_B, given.samples_B, shape.size
    known_B = lanes.num_known_Z[lanes_B]
    active = positions_of(known_B, blocks, shape, given, edits=limits.max_clean_passes is not None)
    tokens_BW, proposed_BW = blocks.tokens_ZW[lanes_B], proposed.token_ids_BW
    chosen_BW = choose(_masks(blocks, shape, given, proposed, active, limits, resizing))
    chosen_BW = torch.where(active.opens_B[:, None], active.is_maskable_BW, chosen_BW)
    num_passes_B = blocks.num_passes_Z[lanes_B]
    last_B = torch.zeros_like(samples_B)
    if resizing is not None:
        last_B = resizing.is_last(lanes_B, active.masks_BW, num_passes_B)
    chosen_BW = chosen_BW | (active.is_maskable_BW & last_B[:, None])
    is_settled_B = samples_B
    if active.editable_BW is not None:
        is_sure_BW = proposed.confidence_BW > limits.edit_threshold_Z[lanes_B, None]
        edited_BW = active.editable_BW & (proposed_BW != tokens_BW) & is_sure_BW
        is_settled_B = is_settled_B & _is_settled(blocks, given, active, limits, edited_BW, last_B)
        chosen_BW = chosen_BW | edited_BW
    if resizing is None:
        tokens_BW = torch.where(chosen_BW, proposed_BW, tokens_BW)
        decided_BW = active.decided_BW | chosen_BW
    else:
        new_BW = resizing.is_new_ZW[lanes_B]
        held = Held(tokens_BW=tokens_BW, is_decided_BW=active.decided_BW, is_new_BW=new_BW)
        held = resizing.apply(held, chosen_BW, proposed_BW)
        tokens_BW, decided_BW = held.tokens_BW, held.is_decided_BW
    is_clean_B = is_settled_B & (decided_BW | active.fixed_BW).all(-1)
    if resizing is not None:
        resizing.store(lanes_B, samples_B, held, active.masks_BW, is_clean_B)
    denoises_B = samples_B & ~active.opens_B
    if shape.reused_part is not None:
        fed = fed_positions(blocks, lanes_B, known_B, given.num_feed_B, shape)
        part_B = torch.where(denoises_B, fed.part_B, blocks.whole_part_Z[lanes_B])
        blocks.whole_part_Z[lanes_B] = torch.where(is_clean_B, -1, part_B)
    _store(blocks, given, tokens_BW, decided_BW, is_clean_B, num_passes_B + denoises_B)
    num_fixed_B = known_B % size
    index_W = torch.arange(size, device=known_B.device)
    emitted_BW = tokens_BW.gather(1, (index_W + num_fixed_B[:, None]).clamp(max=size - 1))
    num_emitted_B = torch.where(is_clean_B, size - num_fixed_B, 0)
    commit(
        lanes,
        table_steps_Z,
        lanes_B=lanes_B,
        token_ids_BA=emitted_BW,
        num_emitted_B=num_emitted_B,
        num_computed_B=given.num_feed_B,
    )
    return emitted_BW, num_emitted_B


def _store(
    blocks: BlockLanes,
    given: PassBlocks,
    tokens_BW: Tensor,
    decided_BW: Tensor,
    is_clean_B: Tensor,
    num_passes_B: Tensor,
) -> None:
    """Store the blocks; those that are clean begin anew."""
    lanes_B = given.lanes_B
    blocks.tokens_ZW[lanes_B] = tokens_BW
    blocks.is_decided_ZW[lanes_B] = decided_BW & ~is_clean_B[:, None]
    blocks.num_passes_Z[lanes_B] = torch.where(is_clean_B, 0, num_passes_B)
    blocks.num_waits_Z[lanes_B] = torch.where(given.waits_B, blocks.num_waits_Z[lanes_B] + 1, 0)


def _masks(
    blocks: BlockLanes,
    shape: BlockShape,
    given: PassBlocks,
    proposed: Proposed,
    active: Positions,
    limits: Rules,
    resizing: Resizing | None,
) -> Masks:
    """The input of strategies."""
    lanes_B, size, quota_B = given.lanes_B, shape.size, limits.quota_B
    if quota_B is None:
        steps_B, num_passes_B = limits.steps_Z[lanes_B], blocks.num_passes_Z[lanes_B]
        quota_B = size // steps_B + (num_passes_B < size % steps_B).long()
    if resizing is not None:
        quota_B = quota_B + (active.is_maskable_BW & resizing.is_new_ZW[lanes_B]).sum(-1)
    return Masks(
        is_maskable_BW=active.is_maskable_BW,
        confidence_BW=proposed.confidence_BW,
        entropy_BW=proposed.entropy_BW,
        quota_B=quota_B,
        threshold_B=limits.threshold_Z[lanes_B],
        entropy_bound_B=limits.entropy_bound_Z[lanes_B],
    )


def _is_settled(
    blocks: BlockLanes, given: PassBlocks, active: Positions, limits: Rules, edited_BW: Tensor, last_B: Tensor
) -> Tensor:
    """Whether no more edits are due, bool [B], as in the last pass; counts passes that began without a
    mask."""
    lanes_B, maximum = given.lanes_B, limits.max_clean_passes
    assert maximum is not None
    began_clean_B = given.samples_B & ~active.masks_BW.any(-1)
    num_clean_B = blocks.num_clean_passes_Z[lanes_B] + began_clean_B
    is_last_B = ~edited_BW.any(-1) | (num_clean_B >= maximum)
    has_none_B = limits.edit_threshold_Z[lanes_B] >= NO_EDITS
    is_settled_B = has_none_B | (began_clean_B & is_last_B) | (given.samples_B & last_B)
    blocks.num_clean_passes_Z[lanes_B] = torch.where(is_settled_B, 0, num_clean_B)
    return is_settled_B
