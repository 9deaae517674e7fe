"""Shapes of passes: the host's part of a schedule, padded to few sizes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from idlm.infer.decoders.base import Decoder, KVWritePolicy
from idlm.infer.sparse.row_reservation import head_bucket, row_capacity
from idlm.infer.state.batch import BlockLimits, CanvasLimits, PassRows, Schedule

BATCH_BUCKETS = (*range(1, 25), *range(26, 33, 2), 40, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences. A sequence may feed a block of rows, and six blocks are enough to make the time of a
step's matrix products follow the rows: up to 32 sequences padding adds at most a twenty-fifth."""
PROMPT_GRAPHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Prompt rows of graphs that also decode, captured by the warm-up."""
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
    index = bisect.bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else -(-size // buckets[-1]) * buckets[-1]


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


STREAMED_ROWS = 128
"""Rows up to which a pass takes as long as reading the weights does."""
NO_LIMITS = BlockLimits()
FEW_ROWS = 512
FEW_LAYERS = 16
"""A row of the first layers only, or of the head only, costs one part in this many of another row."""
BOUNDS = ("num_sequences", "num_rows", "num_prompt_rows", "max_known", "filters", "changes", "num_top")
"""Fields of `PassShape` that a pass may have less of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """All that is known of a pass on the host, rounded up; whatever else varies is in tensors. `num_rows`,
    and `max_rows` of one canvas: decoding rows. `decides` False: the graph ends with hidden states, because
    what follows waits for grammars; logits would take memory of each graph's own. See `Batch` for the
    rest."""

    mode: int
    num_sequences: int
    num_rows: int
    max_rows: int
    num_prompt_rows: int
    max_known: int
    filters: bool
    num_top: int | None
    changes: bool = False
    payload: BlockLimits | CanvasLimits | None = None
    decides: bool = True

    @property
    def limits(self) -> BlockLimits:
        """The payload of a pass of blocks; of other passes one that reserves nothing."""
        return self.payload if isinstance(self.payload, BlockLimits) else NO_LIMITS

    @property
    def all_rows(self) -> int:
        """Rows of the pass in most of its layers."""
        capacity = self.limits.capacity
        return self.num_rows + self.num_prompt_rows if capacity is None else capacity.retained

    @property
    def weight(self) -> float:
        """What the pass costs, in rows of all layers."""
        all_rows = self.num_rows + self.num_prompt_rows
        num_head = self.limits.num_wanted or self.num_rows
        rows = self.limits.capacity or PassRows(fed=all_rows, retained=all_rows, head=num_head)
        return max(rows.retained, STREAMED_ROWS) + (rows.fed + rows.head) / FEW_LAYERS

    def holds(self, other: PassShape) -> bool:
        """Whether a pass of shape `other` may run in this one, as far as both have no canvases."""
        after = () if self.decides else ("filters", "changes", "num_top")
        names = [name for name in self.__slots__ if name not in after]
        return all(_holds(name, getattr(self, name), getattr(other, name)) for name in names)


def _holds(name: str, mine: Any, needed: Any) -> bool:
    """The same of one field. Filters and changes of logits leave requests without any as they are, and more
    log-probabilities can be reported than are read."""
    is_bound = name in BOUNDS or isinstance(mine, BlockLimits)
    return mine == needed or (is_bound and mine is not None and needed is not None and mine >= needed)


def shape_of(schedule: Schedule, decoder: Decoder, max_length: int, *, is_warm: bool = False) -> PassShape:
    """The smallest shape that the pass fits into. `is_warm`: it need not have a graph, so it is padded
    less."""
    policy = decoder.kv_policy
    num_sequences = bucket(len(schedule.requests), BATCH_BUCKETS)
    if is_warm:
        num_sequences = padded_sequences(len(schedule.requests))
    max_rows = decoder.num_rows(schedule.mode, schedule.members.max_length)
    num_rows, num_prompt_rows = num_sequences * max_rows, 0
    payload: BlockLimits | CanvasLimits | None = None
    match policy.kind:
        case "append":
            num_prompt_rows = sum(schedule.num_feed) - len(schedule.requests)
            if is_warm:
                num_prompt_rows = -(-num_prompt_rows // PROMPT_STEP) * PROMPT_STEP
            else:
                num_prompt_rows = bucket(num_prompt_rows, PROMPT_BUCKETS)
        case "block":
            num_blocks = _num_blocks(schedule, num_sequences, policy)
            num_prompt_rows = policy.block_size * bucket(num_blocks, FED_BLOCK_BUCKETS)
            num_wanted = head_bucket(schedule.limits.num_wanted, num_sequences, policy.block_size)
            capacity = row_capacity(
                schedule.limits.capacity,
                num_scheduled=sum(schedule.num_feed),
                num_rows=num_rows + num_prompt_rows,
                num_sequences=num_sequences,
                block_size=policy.block_size,
            )
            payload = BlockLimits(num_wanted=num_wanted, capacity=capacity)
        case "none":
            num_rows = rows_bucket(sum(schedule.num_rows))
            maximum = decoder.num_rows(schedule.mode, max_length)
            rows = zip(schedule.num_rows, schedule.requests, strict=True)
            longest_canvas = max(num_rows // request.num_canvases for num_rows, request in rows)
            max_rows = min(rows_bucket(longest_canvas), maximum)
            exact = schedule.canvases
            payload = CanvasLimits(
                max_length=min(rows_bucket(exact.max_length), max_length),
                # Guided passes need logits.
                is_greedy=exact.is_greedy and exact.num_canvases == 1,
                num_canvases=exact.num_canvases,
            )
    return PassShape(
        mode=schedule.mode,
        num_sequences=num_sequences,
        num_rows=num_rows,
        max_rows=max_rows,
        num_prompt_rows=num_prompt_rows,
        max_known=slots_bucket(max(schedule.num_known)),
        filters=schedule.members.filters,
        num_top=schedule.members.num_top,
        changes=schedule.members.changes,
        payload=payload,
        decides=not schedule.grammars,
    )


def _num_blocks(schedule: Schedule, num_sequences: int, kv_policy: KVWritePolicy) -> int:
    """Blocks that get rows in addition to the decoding ones.

    With fused commits as many as are known on the host, but at least those of an eighth of the sequences, for
    clean blocks that are not known there yet. A sequence without a reserved row stores its block in its own
    rows and decides nothing in this step; unused rows cost as much as used ones, unless passes drop them:
    then all sequences may store one."""
    if not kv_policy.fused_commit:
        return sum(max(0, num_feed // kv_policy.block_size - 1) for num_feed in schedule.num_feed)
    num_scheduled = sum(schedule.num_feed) // kv_policy.block_size
    return max(num_scheduled, -(-num_sequences // 8) if schedule.limits.capacity is None else num_sequences)


def batch_sizes(width: int, maximum: int, max_rows: int) -> list[int]:
    """Numbers of sequences, of `width` rows each, to capture graphs of: `maximum` at most, and about
    `max_rows` rows. Padding adds a quarter of the rows at most, an eighth beyond `STREAMED_ROWS`."""
    sizes, size = [1], 1
    while size < maximum and size * width < max_rows:
        growth = 1.25 if size * width < STREAMED_ROWS else 1.125
        step = padded_sequences(size + 1) - padded_sequences(size)
        grown = int(size * growth) // step * step
        # Powers of two are all among them: they are captured and timed first.
        size = min(max(padded_sequences(size + 1), grown), padded_sequences(maximum), 1 << size.bit_length())
        sizes.append(size)
    return sizes


def mixed_sizes(width: int, num_prompt_rows: int, maximum: int) -> list[int]:
    """The same of passes with so many prompt rows; up to `FEW_ROWS` rows padding may add a quarter."""
    sizes, size = list[int](), 0
    while size < maximum:
        num_rows = (size + 1) * width + num_prompt_rows
        share = 4 if num_rows <= FEW_ROWS else 8
        size = min(maximum, size + max(1, num_rows // share // width))
        sizes.append(size)
    return sizes


def max_stored_rows(kv_policy: KVWritePolicy, *, budget: int, num_sequences: int) -> int:
    """Most rows that a pass lays out besides the decoding ones; each sequence's first block is free."""
    size = kv_policy.block_size
    return size * bucket(budget // size + num_sequences, FED_BLOCK_BUCKETS)
