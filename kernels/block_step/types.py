"""Tensors that the ops of a block-diffusion pass take and return.

Z lanes, B sequences, R rows, W places of a block, X = B * W wanted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PASSES_BITS = 16
"""The random stream's step is the block's number, then this many bits for the pass."""
RULES = ("sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded")
"""Strategies that the kernel knows."""


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

    def reset(self, lanes_B: Tensor) -> None:
        """These lanes (int64) begin their blocks anew."""
        # Not x[lanes_B] = 0, which copies the number to the device and waits for all that runs there.
        self.is_decided_ZW.index_fill_(0, lanes_B, False)
        self.num_passes_Z.index_fill_(0, lanes_B, 0)
        self.num_clean_passes_Z.index_fill_(0, lanes_B, 0)
        self.whole_part_Z.index_fill_(0, lanes_B, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """`shifted`: a position is predicted by the row before it, so a block's first one by the last row of the
    clean block before, and nothing can be denoised beside that. `fuses`: a block is denoised in the very pass
    that stores the one before, as far as rows suffice. `part`: masks are decided in parts of so many places;
    None: anywhere. `reuses`: a pass over a block feeds just the part that is being decided, behind one pass
    over the whole block per part.
    """

    size: int
    mask_token_id: int
    shifted: bool
    fuses: bool
    part: int | None = None
    reuses: bool = False

    @property
    def reused_part(self) -> int | None:
        """Places that a pass feeds of a block whose others are stored; None: it always feeds all."""
        return self.part if self.reuses else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """Rows of all sequences, laid end to end, and of each sequence what the pass is about. int64 but for the
    bools `is_mask_R`, `samples_B`, `advances_B`, `is_maskable_BW`. `draw_steps_B`: the random stream's step.
    """

    cu_rows_B1: Tensor
    sequence_R: Tensor
    token_ids_R: Tensor
    slots_R: Tensor
    limits_R: Tensor
    is_mask_R: Tensor
    logit_rows_X: Tensor
    first_logit_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    advances_B: Tensor
    starts_B: Tensor
    is_maskable_BW: Tensor
    num_passes_B: Tensor
    num_steps_B: Tensor
    draw_steps_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """For every place a token and its probability (fp64), and the entropy (fp64, nats) where a rule asks."""

    token_ids_BW: Tensor
    confidence_BW: Tensor
    entropy_BW: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What decides between many and few, per lane: fp64, `steps_Z` int64. `max_clean_passes`: passes for
    edits alone; None: there are no edits. `quota_B` (int64): the least that is decided, instead of what the
    steps allot.
    """

    threshold_Z: Tensor
    edit_threshold_Z: Tensor
    entropy_bound_Z: Tensor
    steps_Z: Tensor
    max_clean_passes: int | None = None
    quota_B: Tensor | None = None
