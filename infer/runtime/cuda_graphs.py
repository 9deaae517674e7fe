"""Passes of static shape: a schedule is padded to a bucket, and on a GPU each bucket is one CUDA graph.

Padding costs rows, not correctness: padding sequences use the spare lane and feed nothing, and padding rows
store no KV. On a CPU the padded pass runs without a graph, which is how it is tested.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.decoders.base import Decoder
from idlm.infer.runtime.head_rows import head_bucket, row_room
from idlm.infer.runtime.model_runner import Step, StepResult
from idlm.infer.state.batch import Batch, RowRoom, Schedule, lane_of, to_device
from idlm.infer.state.kv_cache import KVWritePolicy

Columns = list[list[int]]
BATCH_BUCKETS = (*range(1, 25), *range(26, 33, 2), 40, 48, 64, 96, 128, 192, 256)
"""A sequence may feed a block of rows, of which six bind a step's matrix products by their rows: up to 32
sequences padding adds at most a twenty-fifth.
"""
PROMPT_BUCKETS = (0, 64, 256, 1024, 2048)
"""Prompt rows beside the decoding rows."""
FED_BLOCK_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""The same in blocks, including clean blocks of answers."""
MIN_SLOTS = 1024
DOUBLED_SLOTS = 1 << 15
"""Bounds of contexts double up to here, then grow by at most a quarter."""
WARM_UP_PASSES = 2
MAX_CUDA_GRAPHS = 192
"""Graphs kept at a time. One mode and kind of sampling needs 175 per context length (35 batch sizes, 5
numbers of prompt rows), more with blocks if all sizes occur. The memory manager does not count what a graph
itself takes (nodes and results).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Everything that the host knows of a pass, rounded up; whatever else varies is in tensors. `num_rows`,
    and `max_rows` of one canvas: decoding rows. `max_length` is 0 and `is_greedy` False unless canvases are
    fed. See `Batch` for the rest.
    """

    mode: int
    num_sequences: int
    num_rows: int
    max_rows: int
    num_prompt_rows: int
    max_known: int
    filters: bool
    num_top: int | None
    max_length: int = 0
    is_greedy: bool = False
    num_canvases: int = 1
    num_wanted: int | None = None
    room: RowRoom | None = None


class StaticStep:
    """A `Step` by schedule. Captures a graph when a shape is first seen (`captures`; needs a GPU).

    Beyond `MAX_CUDA_GRAPHS` a new graph replaces the least recently used one; ranks that run the same passes
    replace the same ones.
    """

    def __init__(self, step: Step, *, spare_lane: int, captures: bool) -> None:
        self._step, self._spare_lane, self._captures = step, spare_lane, captures
        self._device = step.table.device
        self._graphs: dict[PassShape, _Graph] = {}
        """The most recently used one is the last."""
        self._memory = torch.cuda.graph_pool_handle() if captures else None

    def __call__(self, schedule: Schedule) -> StepResult:
        """Launch the pass; the result is overwritten by the next pass of the same shape."""
        # Reservations are written before the replay, outside the graph.
        self._step.runner.pool.flush()
        shape = shape_of(schedule, self._step.decoder, self._step.table.max_length)
        columns = self._columns(schedule, shape.num_sequences)
        if not self._captures:
            return self._step(self._batch(shape, to_device(columns, self._device)))
        graph = self._graph(shape)
        # In steady decoding nothing changes from pass to pass.
        if graph.columns != columns:
            graph.columns_3B.copy_(to_device(columns, self._device), non_blocking=True)
            graph.columns = columns
        graph.graph.replay()
        return graph.result

    def clear(self) -> None:
        """Drop all graphs and their memory, and with them their references to NCCL's communicators, which
        could not end before.
        """
        self._graphs.clear()
        if self._captures:
            # A pool that no graph uses any more cannot be captured into again.
            self._memory = torch.cuda.graph_pool_handle()

    def _graph(self, shape: PassShape) -> _Graph:
        """The shape's graph, captured now if it is new."""
        graph = self._graphs.pop(shape, None)
        if graph is None:
            if len(self._graphs) >= MAX_CUDA_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = self._capture(shape)
        self._graphs[shape] = graph
        return graph

    def _columns(self, schedule: Schedule, num_sequences: int) -> Columns:
        """Lanes, numbers of tokens to feed and whether the pass decodes: three lists of length B."""
        padding = num_sequences - len(schedule.requests)
        lanes = [lane_of(request) for request in schedule.requests] + [self._spare_lane] * padding
        return [lanes, [*schedule.num_feed, *[0] * padding], [*schedule.samples, *[False] * padding]]

    def _batch(self, shape: PassShape, columns_3B: Tensor) -> Batch:
        lanes_B, num_feed_B, samples_B = columns_3B
        return Batch(
            lanes_B=lanes_B,
            num_feed_B=num_feed_B,
            samples_B=samples_B > 0,
            max_feed=shape.num_prompt_rows + 1,
            max_known=shape.max_known,
            max_rows=shape.max_rows,
            num_rows=shape.num_rows + shape.num_prompt_rows,
            filters=shape.filters,
            mode=shape.mode,
            num_top=shape.num_top,
            max_length=shape.max_length,
            is_greedy=shape.is_greedy,
            num_canvases=shape.num_canvases,
            num_wanted=shape.num_wanted,
            room=shape.room,
        )

    def _capture(self, shape: PassShape) -> _Graph:
        """Run the shape without a sequence, so that kernels are compiled, then capture it."""
        columns_3B = torch.zeros(3, shape.num_sequences, dtype=torch.int64, device=self._device)
        columns_3B[0] = self._spare_lane
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP_PASSES):
                self._step(self._batch(shape, columns_3B))
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with _without_garbage_collection(), torch.cuda.graph(graph, pool=self._memory):
            result = self._step(self._batch(shape, columns_3B))
        return _Graph(graph=graph, columns_3B=columns_3B, result=result)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """An engine that is collected resets its graphs, which would invalidate a capture in progress."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True, kw_only=True)
class _Graph:
    """`columns` is what was last written to `columns_3B`."""

    graph: torch.cuda.CUDAGraph
    columns_3B: Tensor
    result: StepResult
    columns: Columns | None = None


def shape_of(schedule: Schedule, decoder: Decoder, max_length: int) -> PassShape:
    """The smallest shape that the pass fits into; no sequence is longer than `max_length`."""
    policy = decoder.kv_policy
    num_sequences = _bucket(len(schedule.requests), BATCH_BUCKETS)
    max_rows = decoder.num_rows(schedule.mode, schedule.max_length)
    num_rows, num_prompt_rows, longest, is_greedy = num_sequences * max_rows, 0, 0, False
    num_wanted: int | None = None
    room: RowRoom | None = None
    match policy.kind:
        case "append":
            num_prompt_rows = _bucket(sum(schedule.num_feed) - len(schedule.requests), PROMPT_BUCKETS)
        case "block":
            num_blocks = _num_blocks(schedule, num_sequences, policy)
            num_prompt_rows = policy.block_size * _bucket(num_blocks, FED_BLOCK_BUCKETS)
            num_wanted = head_bucket(schedule.num_wanted, num_sequences, policy.block_size)
            room = row_room(
                schedule.room,
                num_scheduled=sum(schedule.num_feed),
                num_rows=num_rows + num_prompt_rows,
                num_sequences=num_sequences,
                block_size=policy.block_size,
            )
        case "none":
            num_rows = _rounded_up(sum(schedule.num_rows))
            most = decoder.num_rows(schedule.mode, max_length)
            rows = zip(schedule.num_rows, schedule.requests, strict=True)
            longest_canvas = max(num_rows // request.num_canvases for num_rows, request in rows)
            max_rows = min(_rounded_up(longest_canvas), most)
            longest = min(_rounded_up(schedule.max_length), max_length)
            # Guided passes need logits.
            is_greedy = schedule.is_greedy and schedule.num_canvases == 1
    return PassShape(
        mode=schedule.mode,
        num_sequences=num_sequences,
        num_rows=num_rows,
        max_rows=max_rows,
        num_prompt_rows=num_prompt_rows,
        max_known=_slots_bucket(max(schedule.num_known)),
        filters=schedule.filters,
        num_top=schedule.num_top,
        max_length=longest,
        is_greedy=is_greedy,
        num_canvases=schedule.num_canvases,
        num_wanted=num_wanted,
        room=room,
    )


def _num_blocks(schedule: Schedule, num_sequences: int, kv_policy: KVWritePolicy) -> int:
    """Blocks that get rows beside the decoding ones.

    With fused commits that includes clean blocks the host does not know yet: as many as it knows of (the
    device has stored those by now), but at least those of an eighth of the sequences, rounded up. A sequence
    that finds no reserved row stores its block in its own rows and decides nothing in this step; unused rows
    cost as much as used ones, unless passes drop them: then all sequences may store one.
    """
    if not kv_policy.fused_commit:
        return sum(max(0, num_feed // kv_policy.block_size - 1) for num_feed in schedule.num_feed)
    num_told = sum(schedule.num_feed) // kv_policy.block_size
    return max(num_told, -(-num_sequences // 8) if schedule.room is None else num_sequences)


def most_stored_rows(kv_policy: KVWritePolicy, *, budget: int, num_sequences: int) -> int:
    """Rows beside the decoding ones that a pass lays out at most. The first block of each sequence does not
    count against the budget.
    """
    size = kv_policy.block_size
    return size * _bucket(budget // size + num_sequences, FED_BLOCK_BUCKETS)


def _bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; beyond the largest one, the next multiple of it."""
    place = bisect.bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else -(-size // buckets[-1]) * buckets[-1]


def _slots_bucket(num_slots: int) -> int:
    """`PassShape.max_known` of so many tokens."""
    if num_slots <= DOUBLED_SLOTS:
        return max(MIN_SLOTS, 1 << (num_slots - 1).bit_length())
    step = 1 << (num_slots.bit_length() - 3)
    return -(-num_slots // step) * step


def _rounded_up(num_rows: int) -> int:
    """Rows of canvases, rounded up by less than an eighth."""
    step = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // step) * step
