"""Chooses how many rows a pass computes, from what earlier passes needed: rows of the head, and in passes
that may drop rows also those that are embedded and those that are left after the drop. The demand of a pass
is known on the device alone: the host reserves the mean of recent passes and a margin that follows their
spread. A sequence that exceeds the capacity waits for the next pass, which does not change its answer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from idlm.infer.state.batch import BlockLimits, PassRows, Schedule

NUM_PASSES = 64
"""Passes that are remembered, about four blocks: sequences that begin their blocks together do not move the
mean, and a choice that a graph was captured for stays."""
MIN_PASSES = 4
MARGIN = 2.5
"""The capacity is this many standard deviations above the mean."""
RETAINED_MARGIN, MIN_MARGIN, MAX_MARGIN = 0.5, 0.3, 1.0
"""Margin for retained rows; padding them costs more than delaying a sequence. It begins at the first number
and grows when more than the share `WAITS` of (sequence, pass) pairs wait."""
WAITS, GAIN = 0.008, 25.0
"""The share to aim at, and how much each pair beyond it adds to the margin. In a simulation of 32 sequences
with clean commits 0.7 % wait at 14 % padding; 0.6 % would at 17 %."""
STEADY = 0.97
"""A choice stays until less than this share of it is needed: each number of rows takes another graph."""
MIN_POSITIONS = 256
"""Positions up to which reading its weights takes all the time of the head, so that it computes all
positions."""
PARTS = 8
"""The capacity grows by this share of all positions: each size in use is a graph of its own. In passes that
drop rows it grows in finer steps (`HEAD_STEPS`): few of their positions need logits."""
STEPS: tuple[tuple[float, int], ...] = ((512, 16), (1024, 32), (math.inf, 64))
"""Below the first number, rows that are retained are rounded up to a multiple of the second."""
FED_STEPS, HEAD_STEPS = 4, 2
"""Embedded rows, and rows of the head, are rounded up to this many of these steps: few layers have them."""
NONE = PassRows(fed=0, retained=0, head=0)
WARM_UP_PARTS = ((3 / 8, 8), (math.inf, 4))
"""Capacities whose graphs are captured before traffic: from one to the next, the rows that are retained grow
by 1/8 below 3/8 of all positions, and by 1/4 above. A capacity that traffic uses often gets its own graph
later."""
WARM_UP_FED, WARM_UP_HEAD, WARM_UP_STORED = 3.25, 0.75, 1.25
"""For each row that is retained, such capacities have this many embedded rows and rows of the head (2.9 and
0.55 in the trace of `benchmarks.eviction`). Where whole blocks are embedded, they have the third for each
position."""


@dataclass(slots=True, kw_only=True)
class RowCounts:
    """Sums over the passes whose results were read. `num_pairs`: (sequence, pass) that were to decode, of
    which `num_waits` exceeded the capacity; rows that sequences needed, and those computed, with padding."""

    num_passes: int = 0
    num_pairs: int = 0
    num_waits: int = 0
    requested: PassRows = NONE
    computed: PassRows = NONE


class LateCounts:
    """Rows per decoding sequence that recent passes needed, and the number to reserve."""

    def __init__(self, margin: float = MARGIN) -> None:
        self.margin, self._chosen = margin, 0.0
        self._needed: deque[float] = deque(maxlen=NUM_PASSES)

    def observe(self, num_rows: int, num_sequences: int) -> None:
        """Record the rows that sequences of a finished pass needed. 0: the decoder does not count them."""
        if num_rows:
            self._needed.append(num_rows / num_sequences)

    def choose(self, num_sequences: int) -> int | None:
        """Rows to reserve for as many sequences; None (all) until `MIN_PASSES` passes were observed."""
        count = len(self._needed)
        if count < MIN_PASSES:
            return None
        mean = sum(self._needed) / count
        variance = sum((needed - mean) ** 2 for needed in self._needed) / count
        needed = mean + self.margin * math.sqrt(variance)
        if not STEADY * self._chosen <= needed <= self._chosen:
            self._chosen = needed
        return math.ceil(self._chosen * num_sequences)


class RowDemand(NamedTuple):
    """Rows that one request needed in a pass, of which `certain` were known to be stored before; 0 if it
    `waited` before they were counted. `samples`: it decodes."""

    samples: bool
    waited: bool
    certain: int
    rows: PassRows


class RowReservation:
    """Chooses for each pass, and counts what passes needed and computed. `drops`: they may drop rows of
    blocks of `block_size`."""

    def __init__(self, *, drops: bool, block_size: int = 1) -> None:
        self._drops, self._block_size, self.counts = drops, block_size, RowCounts()
        self._head, self._fed, self._retained = LateCounts(), LateCounts(), LateCounts(RETAINED_MARGIN)
        self._since = RowCounts()
        """As `counts` was when the margin of retained rows was last looked at."""

    def choose(self, schedule: Schedule) -> None:
        """Set what the schedule reserves. Rows that are stored for certain, mostly of prompts, are known."""
        num_decoding, certain = sum(schedule.samples), sum(schedule.certain_rows())
        head, fed, retained = (late.choose(num_decoding) for late in (self._head, self._fed, self._retained))
        if not self._drops:
            schedule.limits = BlockLimits(num_wanted=head)
            return
        if head is not None and fed is not None and retained is not None:
            capacity = PassRows(fed=certain + fed, retained=certain + retained, head=head)
        else:
            num_positions = self._block_size * num_decoding
            num_rows = certain + num_positions + num_positions // PARTS
            capacity = PassRows(fed=num_rows, retained=num_rows, head=num_positions)
        schedule.limits = BlockLimits(capacity=capacity)

    def observe(self, demands: Sequence[RowDemand], computed: PassRows) -> None:
        """Note a finished pass, by request, and the rows that it computed."""
        counts, decoding = self.counts, [one for one in demands if one.samples]
        counts.num_passes += 1
        counts.num_pairs += len(decoding)
        counts.num_waits += sum(one.waited for one in decoding)
        counts.requested = _sum([counts.requested, *(one.rows for one in demands)])
        counts.computed = _sum([counts.computed, computed])
        for late, name in ((self._head, "head"), (self._fed, "fed"), (self._retained, "retained")):
            counted = [one for one in decoding if getattr(one.rows, name) or not one.waited]
            certain = sum(one.certain for one in counted) if late is not self._head else 0
            late.observe(max(0, sum(getattr(one.rows, name) for one in counted) - certain), len(counted))
        if counts.num_passes - self._since.num_passes >= NUM_PASSES:
            self._judge_margin()

    def _judge_margin(self) -> None:
        """Widen the margin of retained rows where too many waited, and narrow it where few did."""
        waited = self.counts.num_waits - self._since.num_waits
        share = waited / max(1, self.counts.num_pairs - self._since.num_pairs)
        margin = self._retained.margin + GAIN * (share - WAITS)
        self._retained.margin = min(max(margin, MIN_MARGIN), MAX_MARGIN)
        self._since = replace(self.counts)


def _sum(passes: Sequence[PassRows]) -> PassRows:
    fed, retained, head = (sum(getattr(one, name) for one in passes) for name in ("fed", "retained", "head"))
    return PassRows(fed=fed, retained=retained, head=head)


def head_bucket(num_wanted: int | None, num_sequences: int, block_size: int) -> int | None:
    """Rows that a pass of static shape reserves, rounded up to an eighth of all positions; None: all
    positions."""
    num_positions = num_sequences * block_size
    if num_wanted is None or num_positions <= MIN_POSITIONS:
        return None
    step = -(-num_positions // PARTS)
    # A shifted block's first position never waits, nor does one block after those.
    num_rows = -(-max(num_wanted, num_sequences + block_size) // step) * step
    return num_rows if num_rows < num_positions else None


def row_capacity(
    wanted: PassRows | None, *, num_scheduled: int, num_rows: int, num_sequences: int, block_size: int
) -> PassRows | None:
    """The capacity of a pass of static shape, of `num_rows` rows if none is dropped; None: all rows. It holds
    what is scheduled, then a clean block and the next one, so that some sequence always decodes."""
    if wanted is None:
        return None
    minimum = num_scheduled + 2 * block_size
    fed = min(num_rows, _rounded_up(max(wanted.fed, minimum), FED_STEPS))
    retained = min(fed, _rounded_up(max(wanted.retained, minimum), 1))
    num_positions = num_sequences * block_size
    head = num_positions
    if num_positions > MIN_POSITIONS:
        # Rows that are bound by the weights cost nothing, and numbers that differ cost a graph each.
        min_head = max(num_sequences + block_size, MIN_POSITIONS // 2)
        head = min(num_positions, _rounded_up(max(wanted.head, min_head), HEAD_STEPS))
    return PassRows(fed=fed, retained=retained, head=head)


def warm_up_capacities(num_sequences: int, block_size: int, num_rows: int) -> list[PassRows]:
    """Capacities that between them hold those of all passes of as many sequences, of `num_rows` rows if none
    is dropped: the largest first, and for each number of retained rows one with all rows of blocks embedded,
    then one with as many as are usual."""
    num_positions = num_sequences * block_size
    found, left = list[PassRows](), max(MIN_POSITIONS // 2, 2 * num_sequences)
    while left < num_rows:
        usual = min(num_rows, _rounded_up(int(WARM_UP_FED * left), 1))
        whole = min(num_rows, max(left, int(WARM_UP_STORED * num_positions)))
        heads = min(num_positions, _rounded_up(int(WARM_UP_HEAD * left), 1)), min(num_positions, left)
        if usual < whole:
            found.append(PassRows(fed=usual, retained=left, head=heads[0]))
        found.append(PassRows(fed=whole, retained=left, head=heads[1]))
        left += left // next(parts for share, parts in WARM_UP_PARTS if left < share * num_positions)
        left = _rounded_up(left, 1)
    return [PassRows(fed=num_rows, retained=num_rows, head=num_positions), *reversed(found)]


def _rounded_up(num_rows: int, num_steps: int) -> int:
    """Rounded up to a multiple of `num_steps` steps."""
    step = num_steps * next(step for bound, step in STEPS if num_rows < bound)
    return -(-num_rows // step) * step


def head_buckets(num_sequences: int, block_size: int) -> tuple[int | None, ...]:
    """What `head_bucket` returns for as many sequences: None, then the others from the largest down."""
    step = -(-num_sequences * block_size // PARTS)
    sizes = {head_bucket(part * step, num_sequences, block_size) for part in range(PARTS)} - {None}
    return (None, *sorted(sizes, key=lambda size: -(size or 0)))
