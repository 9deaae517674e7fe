"""Tiles of the grouped products. R rows, E experts, C chosen experts, P pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHARED_BYTES = 225 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Of one product; everything here may be swept (benchmarks/kernels/experts.py).

    `block_o` outputs: with `stacked` (gate and up only) the instruction's M side is twice as large, it is
    then 64 or a multiple. `block_i` columns per step. `tma`: weights (where they allow it) are read by
    descriptor; not with `stacked`.
    """

    block_o: int
    block_i: int
    warps: int = 4
    stages: int = 4
    stacked: bool = False
    tma: bool = False

    def shared_bytes(self, itemsize: int, block_r: int, *, gated: bool) -> int:
        """Shared memory of the pipeline, about."""
        return self.stages * self.block_i * ((2 if gated else 1) * self.block_o + block_r) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`block_r`: pairs of a tile, shared by both products."""

    block_r: int
    gate_up: Tile
    down: Tile


STREAMED = {
    block_r: Launch(
        block_r=block_r,
        gate_up=Tile(block_o=32, block_i=128, stacked=True),
        down=Tile(block_o=64, block_i=128),
    )
    for block_r in (16, 32)
}
"""For few rows: what counts is the number of weight bytes on their way."""
COMPUTED = {
    64: Launch(
        block_r=64,
        gate_up=Tile(block_o=128, block_i=64, warps=8),
        down=Tile(block_o=256, block_i=64, warps=8),
    ),
    128: Launch(
        block_r=128,
        gate_up=Tile(block_o=128, block_i=64, warps=8),
        down=Tile(block_o=256, block_i=64, warps=8),
    ),
}
EXACT = Launch(
    block_r=16,
    gate_up=Tile(block_o=64, block_i=32, stages=2),
    down=Tile(block_o=64, block_i=32, stages=2),
)
"""fp32 products are made of fma, in an order that follows the tile: one tile for any number of rows."""


def choose(num_rows: int, num_chosen: int, num_experts: int, dtype: torch.dtype) -> Launch:
    """By how many rows an expert of `num_experts` gets on average, and can get at most."""
    if dtype.itemsize > 2:
        return EXACT
    mean = num_rows * num_chosen / num_experts
    # Twice the mean, so that few experts need a second tile and read their weights twice.
    wanted = min(num_rows, 2 * mean)
    for block_r, launch in STREAMED.items():
        if wanted <= block_r:
            return launch
    return COMPUTED[64 if mean < 96 else 128]


def num_tiles(num_pairs: int, num_experts: int, block_r: int) -> int:
    """The most tiles that `num_pairs` can need: every expert has at most one that is not full."""
    return min(num_experts, num_pairs) + num_pairs // block_r
