"""Arguments and results of the ops for rows of a pass.

Z lanes, L columns of the token table, B sequences, R rows, X rows whose logits are wanted, Y draft buffers, W
rows of the widest layout, J drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

MASK = -1
"""Source of a row that is a MASK; others are 0 (the pending token) or the number of a draft, from 1."""
NOISE_DRAWS, GROUP_DRAWS = 1 << 31, 256
"""Draws of a step from the first one on give ids of MASK rows: so many for each group. Those before it test
and draw drafts, so that both are independent."""


class Lanes(NamedTuple):
    """State by lane, int64. The last column of `tokens_ZL` is never read. `draft_buffer_Z` None: all 0."""

    num_known_Z: Tensor
    num_computed_Z: Tensor
    ends_Z: Tensor
    tokens_ZL: Tensor
    draft_buffer_Z: Tensor | None = None
    drafts_ZJ: Tensor | None = None


class Noise(NamedTuple):
    """Ids of MASK rows in place of the mask's: uniform in [low, high), by the lane's random stream, int64."""

    seeds_Z: Tensor
    samples_Z: Tensor
    steps_Z: Tensor
    low: int
    high: int


class RowTable(NamedTuple):
    """Per draft buffer the number of rows after the known tokens, with the pending one, and per row its
    source, and its position, limit and branch start relative to the pending token. int64, contiguous."""

    width_Y: Tensor
    source_YW: Tensor
    position_YW: Tensor
    limit_YW: Tensor
    branch_YW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Concatenated rows of all sequences; int64 but for bools `is_mask_R`, `samples_B`, `advances_B`."""

    cu_rows_B1: Tensor
    sequence_R: Tensor
    token_ids_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    limits_R: Tensor
    branch_starts_R: Tensor
    is_mask_R: Tensor
    logit_rows_X: Tensor
    samples_B: Tensor
    advances_B: Tensor
