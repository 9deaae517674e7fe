"""How warpgroups share the product of many rows, and for which rows and weights.

R rows, E output width."""

from __future__ import annotations

from dataclasses import dataclass

OUTPUTS = 64
"""Of a warpgroup, the height of the matrix instruction."""
STEP = 64
"""Columns of a stage: 128 bytes, the widest swizzle of shared memory."""
BAND = 8
"""Tiles of rows that are multiplied with all outputs before the next ones: 595 us for the 6,144 outputs of
8,192 rows of Qwen3-8B, 688 where all rows are multiplied with a few outputs at a time (one H100)."""
SHARED_BYTES = 224 << 10
MAX_STAGES = 8
PROGRAMS = 132
"""Multiprocessors of an H200, one program each."""
FEW_TILES, APART_ROWS = 44, 128
"""With up to so many rows, fewer tiles lose to Triton's kernel, whose shares have programs of their own (32
tiles of 64 rows take 0.93 to 1.07 times as long, 48 take 0.87, 64 take 0.8 to 0.93; one H100)."""
ONE_TILE = 64
"""Up to so many rows only weights of several shares gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Tiles of `rows` times 64 outputs for each of `num` warpgroups."""

    rows: int
    num: int

    def stages(self, *, gated: bool) -> int:
        """Steps of 64 columns that fit in shared memory with the tile's output."""
        outputs = OUTPUTS * self.num
        free = SHARED_BYTES - 2 * self.rows * outputs
        return min(MAX_STAGES, free // (2 * STEP * (self.rows + outputs * (2 if gated else 1))))

    def num_tiles(self, num_rows: int, E: int) -> int:
        return -(-num_rows // self.rows) * -(-E // (OUTPUTS * self.num))


TALL, WIDE, LOW = Groups(rows=128, num=3), Groups(rows=128, num=2), Groups(rows=64, num=2)
COSTS = {WIDE: 1.0, TALL: 1.4, LOW: 0.575}
"""Time of a tile over that of `WIDE` (48 to 1,024 rows of Qwen3-8B's weights on an H200)."""


def choose_groups(num_rows: int, E: int, *, splits: int, gated: bool) -> Groups | None:
    """What ends first, None for Triton's kernel. Sums of gate, up and shares must fit registers."""
    if num_rows <= APART_ROWS:
        # Weights are read once from memory, whatever the tile.
        gains = num_rows > ONE_TILE or (splits > 1 and not gated)
        return LOW if gains and LOW.num_tiles(num_rows, E) >= FEW_TILES else None
    fitting = ([LOW] if splits > 1 else [WIDE, LOW]) if gated else [WIDE, TALL, LOW]

    def time(groups: Groups) -> float:
        return -(-groups.num_tiles(num_rows, E) // PROGRAMS) * COSTS[groups]

    return min(fitting, key=time)
