"""Sizes that passes of static shape are padded to, so that few shapes serve all of them."""

from __future__ import annotations

import bisect

BATCH_BUCKETS = (*range(1, 25), *range(26, 33, 2), 40, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences. A sequence may feed a block of rows, and six blocks are enough to make the time of a
step's matrix products follow the rows: up to 32 sequences padding adds at most a twenty-fifth.
"""
PROMPT_GRAPHS = (128, 256, 512)
"""Prompt rows of graphs that also decode, captured ahead."""
PROMPT_BUCKETS = (0, 64, 256, 512, 1024, 2048)
"""Prompt rows next to the decoding rows."""
PROMPT_STEP = 64
"""The same for passes without a graph: Triton compiles apart for multiples of 16 and for other numbers."""
FED_BLOCK_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""The same in blocks, including clean blocks of answers."""
MIN_SLOTS = 1024
DOUBLED_SLOTS = 1 << 15
"""Bounds of contexts double up to here, then grow by at most a quarter."""


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; beyond the largest one, the next multiple of it."""
    place = bisect.bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else -(-size // buckets[-1]) * buckets[-1]


def padded_sequences(num_sequences: int) -> int:
    """Sequences of a pass that needs no graph, rounded up by at most a twenty-fifth beyond 192."""
    step = 1 if num_sequences <= 16 else 2 if num_sequences <= 32 else 8
    return -(-num_sequences // step) * step


def slots_bucket(num_slots: int) -> int:
    """`PassShape.max_known` that holds `num_slots` tokens."""
    if num_slots <= DOUBLED_SLOTS:
        return max(MIN_SLOTS, 1 << (num_slots - 1).bit_length())
    step = 1 << (num_slots.bit_length() - 3)
    return -(-num_slots // step) * step


def rows_bucket(num_rows: int) -> int:
    """Rows of canvases, rounded up by less than an eighth."""
    step = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // step) * step
