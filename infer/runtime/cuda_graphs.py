"""Passes of static shape: a schedule is padded to a bucket, and on a GPU each bucket is one CUDA graph.

Padding costs rows, not correctness: padding sequences sit on the spare lane and feed nothing, padding rows
store no KV. On a CPU the padded pass runs as it is, which is how it is tested.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.decoders.base import Batch, KVWritePolicy
from idlm.infer.runtime.step import Step, StepResult
from idlm.infer.scheduler import Schedule, lane_of
from idlm.infer.state.device import to_device

Columns = list[list[int]]
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PROMPT_BUCKETS = (0, 64, 256, 1024, 2048)
"""Rows of prompts beside the decoding rows."""
FED_BLOCK_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The same in blocks, clean ones of answers included."""
MIN_SLOTS = 1024
WARM_UP_PASSES = 2
MAX_CUDA_GRAPHS = 192
"""Kept at a time: one picture and kind of sampling need 65 per context length (13 batches, 5 numbers of
prompt rows), of blocks up to 117. What a graph holds for itself, nodes and results, is not foreseen by the
memory manager.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """All that the host knows of a pass, rounded up; what varies beside it lies in tensors."""

    mode: int
    num_sequences: int
    num_prompt_rows: int
    max_known: int
    filters: bool
    num_top: int | None


class StaticStep:
    """A `Step` by schedule. Captures a graph when a shape is first seen (`captures`; needs a GPU).

    Of `MAX_CUDA_GRAPHS` graphs the one that was not used for longest is given up for a new one; ranks that are
    told the same passes give up the same.
    """

    def __init__(self, step: Step, *, spare_lane: int, captures: bool) -> None:
        self._step, self._spare_lane, self._captures = step, spare_lane, captures
        self._device = step.table.device
        self._graphs: dict[PassShape, _Graph] = {}
        """The one used last is the last one."""
        self._memory = torch.cuda.graph_pool_handle() if captures else None

    def __call__(self, schedule: Schedule) -> StepResult:
        """Launch the pass; the result is overwritten by the next pass of the same shape."""
        # Reservations are written before the replay, outside the graph.
        self._step.runner.pool.flush()
        shape = shape_of(schedule, self._step.decoder.kv_policy)
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
        """Drop all graphs and their memory. What they hold of NCCL's communicators keeps those from being
        ended.
        """
        self._graphs.clear()
        if self._captures:
            # A pool that no graph uses any more cannot be captured into again.
            self._memory = torch.cuda.graph_pool_handle()

    def _graph(self, shape: PassShape) -> _Graph:
        """The shape's graph, kept or new."""
        graph = self._graphs.pop(shape, None)
        if graph is None:
            if len(self._graphs) >= MAX_CUDA_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = self._capture(shape)
        self._graphs[shape] = graph
        return graph

    def _columns(self, schedule: Schedule, num_sequences: int) -> Columns:
        """Lanes, tokens to feed and whether the pass decodes, three lists of B."""
        padding = num_sequences - len(schedule.requests)
        lanes = [lane_of(request) for request in schedule.requests] + [self._spare_lane] * padding
        return [lanes, [*schedule.num_feed, *[0] * padding], [*schedule.samples, *[False] * padding]]

    def _batch(self, shape: PassShape, columns_3B: Tensor) -> Batch:
        lanes_B, num_feed_B, samples_B = columns_3B
        width = self._step.decoder.widths[shape.mode]
        return Batch(
            lanes_B=lanes_B,
            num_feed_B=num_feed_B,
            samples_B=samples_B > 0,
            max_feed=shape.num_prompt_rows + 1,
            max_known=shape.max_known,
            num_rows=shape.num_sequences * width + shape.num_prompt_rows,
            filters=shape.filters,
            mode=shape.mode,
            num_top=shape.num_top,
        )

    def _capture(self, shape: PassShape) -> _Graph:
        """Run the shape with nobody in it, so that kernels are compiled, then record it."""
        columns_3B = torch.zeros(3, shape.num_sequences, dtype=torch.int64, device=self._device)
        columns_3B[0] = self._spare_lane
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP_PASSES):
                self._step(self._batch(shape, columns_3B))
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = self._step(self._batch(shape, columns_3B))
        return _Graph(graph=graph, columns_3B=columns_3B, result=result)


@dataclass(slots=True, kw_only=True)
class _Graph:
    """`columns` is what was last written to `columns_3B`."""

    graph: torch.cuda.CUDAGraph
    columns_3B: Tensor
    result: StepResult
    columns: Columns | None = None


def shape_of(schedule: Schedule, kv_policy: KVWritePolicy) -> PassShape:
    """The smallest shape that the pass fits into.

    Without pending tokens all that is fed lies beside the decoding rows if it rides, and there is room for
    clean blocks that the host has not heard of: for as many as it has just heard of, which the device knows
    to be stored by now, and for those of an eighth of the sequences at least. Who finds none waits for a
    pass, and rows that nobody fills cost as much as others.
    """
    num_sequences = _bucket(len(schedule.requests), BATCH_BUCKETS)
    if kv_policy.num_lookahead_tokens:
        num_rows = _bucket(sum(schedule.num_feed) - len(schedule.requests), PROMPT_BUCKETS)
    else:
        num_rows = kv_policy.block_size * _bucket(
            _num_blocks(schedule, num_sequences, kv_policy), FED_BLOCK_BUCKETS
        )
    return PassShape(
        mode=schedule.mode,
        num_sequences=num_sequences,
        num_prompt_rows=num_rows,
        max_known=max(MIN_SLOTS, 1 << (max(schedule.num_known) - 1).bit_length()),
        filters=schedule.filters,
        num_top=schedule.num_top,
    )


def _num_blocks(schedule: Schedule, num_sequences: int, kv_policy: KVWritePolicy) -> int:
    """Blocks for which there are rows beside the decoding ones."""
    if not kv_policy.fused_commit:
        return sum(max(0, num_feed // kv_policy.block_size - 1) for num_feed in schedule.num_feed)
    num_told = sum(schedule.num_feed) // kv_policy.block_size
    return max(num_told, min(num_sequences, 2), -(-num_sequences // 8))


def _bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; beyond the largest, its multiples."""
    place = bisect.bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else -(-size // buckets[-1]) * buckets[-1]
