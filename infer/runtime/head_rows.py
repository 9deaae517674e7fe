"""Chooses how many rows of a pass the output head computes, from what earlier passes asked for.

The head is wanted at masks only, and how many a pass has is known on the device alone. The host reserves the
mean of recent passes and a margin of their spread; a sequence that finds no room waits for the next pass, and
its answer stays what it would have been (`Batch.num_wanted`).
"""

from __future__ import annotations

import math
from collections import deque

NUM_PASSES = 32
"""Passes that are remembered: those of about two blocks, so that sequences in step do not surprise."""
MIN_PASSES = 4
MARGIN = 2.5
"""Standard deviations above the mean that have room."""
MIN_PLACES = 256
"""Up to so many places the head is bound by its weights, so that all have room."""
PARTS = 8
"""Room grows by this part of all places: each size in use is a graph of its own."""


class HeadRows:
    """Remembers the rows per decoding sequence that passes asked for."""

    def __init__(self) -> None:
        self._asked: deque[float] = deque(maxlen=NUM_PASSES)

    def observe(self, num_wanted: int, num_sequences: int) -> None:
        """Note a finished pass in which some sequences decoded: the rows that they asked for, those that
        waited included. 0: the decoder does not say.
        """
        if num_wanted:
            self._asked.append(num_wanted / num_sequences)

    def choose(self, num_sequences: int) -> int | None:
        """Rows to reserve for as many sequences; None (all) before there is anything to go by."""
        count = len(self._asked)
        if count < MIN_PASSES:
            return None
        mean = sum(self._asked) / count
        variance = sum((asked - mean) ** 2 for asked in self._asked) / count
        return math.ceil((mean + MARGIN * math.sqrt(variance)) * num_sequences)


def head_bucket(num_wanted: int | None, num_sequences: int, block_size: int) -> int | None:
    """Rows that a pass of static shape reserves, rounded up to an eighth of all places; None: all places."""
    num_places = num_sequences * block_size
    if num_wanted is None or num_places <= MIN_PLACES:
        return None
    step = -(-num_places // PARTS)
    # A shifted block's first place has room in any case, and one block behind those.
    num_rows = -(-max(num_wanted, num_sequences + block_size) // step) * step
    return num_rows if num_rows < num_places else None


def head_buckets(num_sequences: int, block_size: int) -> tuple[int | None, ...]:
    """What `head_bucket` returns for as many sequences: None, then the others from the largest down."""
    step = -(-num_sequences * block_size // PARTS)
    sizes = {head_bucket(part * step, num_sequences, block_size) for part in range(PARTS)} - {None}
    return (None, *sorted(sizes, key=lambda size: -(size or 0)))
