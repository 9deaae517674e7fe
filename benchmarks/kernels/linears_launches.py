"""Launches of the skinny linear that are worth measuring. R rows, D input width, E output width."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from idlm.kernels.linear.launch import Launch, fits, num_splits, with_pdl

ROW_BUCKETS = (16, 32, 64, 128)
"""Tiles of rows; above them the library is as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A linear. `gated`: E is F, the weight has 2F rows. `is_fp8` of the weight."""

    rows: int
    E: int
    D: int
    gated: bool = False
    is_fp8: bool = False


def shortlist(shape: Shape, *, full: bool) -> list[Launch]:
    """Candidates with programs near two or three for each multiprocessor; `full` keeps all."""
    found = [with_pdl(launch, pdl) for pdl in (False, True) for launch in _candidates(shape)]
    if full:
        return found
    kept = []
    for launch in found:
        programs = -(-shape.E // launch.block_e) * launch.splits
        most = (112 if launch.block_r < 128 else 140) << 10
        is_deep = 40 << 10 <= launch.shared_bytes(2, gated=shape.gated) <= most
        is_useful = 190 <= programs <= 420 or (programs > 420 and launch.splits == 1)
        if is_deep and is_useful and launch.stages == 4:
            kept.append(launch)
    return kept or found[:4]


def _candidates(shape: Shape) -> list[Launch]:
    """Launches worth measuring: tiles that fit, splits that make one to four programs per multiprocessor."""
    block_r = next((rows for rows in ROW_BUCKETS if shape.rows <= rows), ROW_BUCKETS[-1])
    found = []
    for block_e, block_d, stages in itertools.product((64, 128), (64, 128, 256), (3, 4, 6)):
        if shape.gated and block_e * block_r > 64 * 128:
            continue
        warps = 8 if block_e * block_r >= 128 * 128 else 4
        tiles = -(-shape.E // block_e)
        for splits in (1, 2, 4, 6, 8, 16):
            launch = Launch(
                block_e=block_e,
                block_r=block_r,
                block_d=block_d,
                splits=splits,
                warps=warps,
                stages=stages,
            )
            fills = tiles * splits <= 600 or splits == 1
            weight_itemsize = 1 if shape.is_fp8 else 2
            is_real = num_splits(launch, shape.D) == splits
            if fills and is_real and fits(launch, 2, weight_itemsize, gated=shape.gated):
                found.append(launch)
    return found
