"""Arguments and results of the ops of a block-diffusion pass.

Z lanes, B sequences, R rows, W positions of a block, X wanted rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NO_EDITS = 1.0
"""An edit threshold that no confidence exceeds."""
PASSES_BITS = 16
"""The step of the random stream is the block's number, followed by this many bits for the pass."""
RULES = ("sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded")
"""Strategies that the kernel supports."""


class BlockLanes(NamedTuple):
    """The active block of each lane: the tokens decided so far (known ones are in the table), which positions
    are decided, the number of denoising passes, and how many of these began without a mask (edits only).
    `whole_part_Z`: the part that was being decided when the whole block was last computed; -1: the cache has
    nothing of this block. `num_waits_Z`: the passes in a row in which the lane did not fit."""

    tokens_ZW: Tensor
    is_decided_ZW: Tensor
    num_passes_Z: Tensor
    num_clean_passes_Z: Tensor
    whole_part_Z: Tensor
    num_waits_Z: Tensor

    @classmethod
    def empty(cls, num_lanes: int, block_size: int, device: torch.device) -> BlockLanes:
        """Lanes without any decided position."""
        shape = (num_lanes, block_size)
        return cls(
            tokens_ZW=torch.zeros(shape, dtype=torch.int64, device=device),
            is_decided_ZW=torch.zeros(shape, dtype=torch.bool, device=device),
            num_passes_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
            num_clean_passes_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
            whole_part_Z=torch.full((num_lanes,), -1, dtype=torch.int64, device=device),
            num_waits_Z=torch.zeros(num_lanes, dtype=torch.int64, device=device),
        )

    def reset(self, lanes_B: Tensor) -> None:
        """Clear the active blocks of these lanes (int64)."""
        # Not x[lanes_B] = 0, which copies the number to the device and waits for the device.
        self.is_decided_ZW.index_fill_(0, lanes_B, False)
        self.num_passes_Z.index_fill_(0, lanes_B, 0)
        self.num_clean_passes_Z.index_fill_(0, lanes_B, 0)
        self.num_waits_Z.index_fill_(0, lanes_B, 0)
        self.whole_part_Z.index_fill_(0, lanes_B, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """`shifted`: a row predicts the next position, so the last row of the previous clean block predicts a
    block's first position, and that pass can denoise nothing else. `fuses`: the pass that stores a block also
    denoises the next one, if it has enough rows. `part`: number of positions of a part, in which masks are
    decided together; None: anywhere. `reuses`: a pass computes only the part that is being decided, after one
    pass over the whole block per part."""

    size: int
    mask_token_id: int
    shifted: bool
    fuses: bool
    part: int | None = None
    reuses: bool = False

    @property
    def part_size(self) -> int:
        """Number of positions of a part; of the block if it has none."""
        return self.part or self.size

    @property
    def padded_size(self) -> int:
        """The next power of two, as the kernels need it."""
        return 1 << (self.size - 1).bit_length()

    @property
    def reused_part(self) -> int | None:
        """Number of positions that a pass computes of a block whose others are stored; None: always all."""
        return self.part if self.reuses else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPositions:
    """The positions whose proposals a pass may use, each with one wanted row; int64 but for `waits_B`.

    Wanted row x is row `rows_X[x]` of the pass. It predicts `positions_X[x]` (b * W + w) of a sequence on
    lane `lanes_X[x]`; `number_BW` is its number x, -1 for positions without one. Rows after the last are
    padding: row 0, position 0. `num_B`: the rows that each sequence requested, from number `first_B` on;
    `waits_B` (bool): the sequences beyond the capacity, which have none."""

    rows_X: Tensor
    positions_X: Tensor
    lanes_X: Tensor
    number_BW: Tensor
    first_B: Tensor
    num_B: Tensor
    waits_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """Concatenated rows of all sequences, and numbers of each sequence. int64 but for the bools `is_mask_R`,
    `samples_B`, `advances_B`, `is_maskable_BW`. `draw_steps_B`: step of the random stream."""

    cu_rows_B1: Tensor
    sequence_R: Tensor
    token_ids_R: Tensor
    slots_R: Tensor
    limits_R: Tensor
    is_mask_R: Tensor
    wanted: WantedPositions
    num_feed_B: Tensor
    samples_B: Tensor
    advances_B: Tensor
    starts_B: Tensor
    is_maskable_BW: Tensor
    num_passes_B: Tensor
    num_steps_B: Tensor
    draw_steps_B: Tensor


class Proposed(NamedTuple):
    """For every position a token, its probability (fp64) and, if the rule needs it, the entropy (fp64,
    nats)."""

    token_ids_BW: Tensor
    confidence_BW: Tensor
    entropy_BW: Tensor | None = None


class Rules(NamedTuple):
    """Parameters of the rules, per lane: fp64, `steps_Z` int64. `max_clean_passes`: limit of passes for edits
    alone; None: no edits. `quota_B` (int64): the minimum number of decided positions, in place of the number
    that follows from `steps_Z`."""

    threshold_Z: Tensor
    edit_threshold_Z: Tensor
    entropy_bound_Z: Tensor
    steps_Z: Tensor
    max_clean_passes: int | None = None
    quota_B: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The masks of a block in one pass. `is_maskable_BW` (bool): those that may be decided. `confidence_BW`:
    the probability of the token drawn for each. `entropy_BW` (nats): of the model's own distribution, if a
    strategy needs it. `quota_B` int64 >= 1: decide at least as many, if there are as many. `threshold_B` and
    `entropy_bound_B` (nats), fp64: the requests' own."""

    is_maskable_BW: Tensor
    confidence_BW: Tensor
    entropy_BW: Tensor | None
    quota_B: Tensor
    threshold_B: Tensor
    entropy_bound_B: Tensor


Choose = Callable[[Masks], Tensor]
"""A strategy: the masks to decide, bool [B, W], a subset of those that may be decided."""


class PassBlocks(NamedTuple):
    """The sequences of a pass, as it was planned: `num_feed_B` tokens are stored; `samples_B` (bool): it
    decides something; `waits_B` (bool): sequences beyond the capacity of the pass. Bool [B, W]: masks that
    may be decided if they have logits, and positions that have logits (None: all)."""

    lanes_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    waits_B: Tensor
    is_maskable_BW: Tensor
    has_logits_BW: Tensor | None = None
