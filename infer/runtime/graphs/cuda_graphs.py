"""Passes of static shape: a schedule is padded to a bucket, and on a GPU each bucket is one CUDA graph.

Padding costs rows, not correctness: padding sequences use the spare lane and feed nothing, and padding rows
store no KV. On a CPU the padded pass runs without a graph, which is how it is tested.

After a warm-up (`warm_up.py`) traffic does not wait for captures. A pass without a graph of its own uses the
captured one with the fewest rows that holds it, if that has at most `eager_rows` rows or little padding;
otherwise it runs eagerly, whose launches are hidden by the passes before it. Passes with blocks use a
larger graph until its padding has taken as long as a capture does, and so do those that may drop rows
(`PassRows`) without a warm-up, where the graphs of the first passes, which are the largest, give way sooner.
While no request waits, the shapes that ran eagerly or padded are captured."""

from __future__ import annotations

import copy
import gc
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from idlm.infer.runtime.graphs.pass_shape import PassShape, shape_of
from idlm.infer.runtime.model_runner import Step, StepResult, with_grammars
from idlm.infer.state.batch import Batch, Schedule, StepPlan, WantedRows, to_device

Columns = list[list[int]]
MAX_CUDA_GRAPHS = 512
"""Graphs at a time. The memory manager does not count what a graph itself takes (nodes and results)."""
MAX_EAGER_PASSES = 32
"""Eager decoding passes of one shape after which its graph is captured even in traffic: they have then taken
longer than a capture does (a pass of launches, and the graph's creation)."""
TIMED_PASSES = 3
MAX_PADDING = 1.125
"""A graph of more rows than `eager_rows` has at most so many times the rows of a pass."""
CAPTURE_PASSES, PASSES_PER_GRAPH, FREE_PADDING = 16, 0.5, 0.03
"""For passes with blocks. A capture takes as long as `CAPTURE_PASSES` passes, so it comes once padding has
cost as much; without a warm-up, once it has cost `PASSES_PER_GRAPH` for each graph, while there are few.
Padding below the share `FREE_PADDING` of a pass does not count."""
MISSED_PASSES = 1.0
"""Padding, in passes, after which a shape is captured when no request waits."""


class StaticStep:
    """A `Step` by schedule. With `captures` (needs a GPU) it captures the graph of a shape when it first sees
    it; if it `is_warm`, only of one that is frequent. Beyond `MAX_CUDA_GRAPHS` a new graph replaces the
    least recently used one; ranks that run the same passes replace the same ones."""

    def __init__(self, step: Step, *, spare_lane: int, captures: bool, eager_rows: int = 0) -> None:
        self._step, self._spare_lane, self.captures = step, spare_lane, captures
        self.eager_rows, self.is_warm, self.num_captured_in_traffic = eager_rows, False, 0
        self._device, self._has_blocks = step.table.device, step.decoder.kv_policy.block_size > 1
        self._graphs: dict[PassShape, _Graph] = {}
        """The most recently used one is the last."""
        self._holders: dict[PassShape, PassShape | None] = {}
        """By shape the captured one that its passes run in; None: they run eagerly."""
        self._num_eager: Counter[PassShape] = Counter()
        self._wasted: dict[PassShape, float] = {}
        """Padding of passes with blocks in larger graphs, in passes, since the last capture of a shape with
        as many sequences."""
        self._num_padded: Counter[PassShape] = Counter()
        """Such passes until the shape has a graph."""
        self._memory = torch.cuda.graph_pool_handle() if captures else None
        # One stream for all, because the allocator reserves what each stream has freed for that stream.
        self._side_stream = torch.cuda.Stream(self._device) if captures else None

    def __call__(self, schedule: Schedule) -> StepResult:
        """Launch the pass; the result is overwritten by the next pass of the same shape."""
        # Reservations are written before the replay, outside the graph.
        self._step.runner.pool.flush()
        table = self._step.table
        shape = shape_of(schedule, self._step.decoder, table.max_length, is_warm=self.is_warm)
        has_graph = self.captures and schedule.prompt_rows is None
        graph = self._graph(shape, schedule) if has_graph else None
        if graph is None:
            batch = self._batch(shape, to_device(self._columns(schedule, shape.num_sequences), self._device))
            result = self._step(with_grammars(batch, schedule), schedule.prompt_rows)
            return replace(result, is_queued=self.captures)
        columns = self._columns(schedule, graph.columns_3B.shape[1])
        # In steady decoding nothing changes from pass to pass.
        if graph.columns != columns:
            graph.columns_3B.copy_(to_device(columns, self._device), non_blocking=True)
            graph.columns = columns
        if graph.result is not None:
            graph.graph.replay()
            return graph.result
        batch = with_grammars(self._batch(shape, graph.columns_3B), schedule)
        self._step.choose_drafts(batch)
        graph.graph.replay()
        assert graph.fed is not None
        plan, wanted = graph.fed
        # A copy, because wanted rows hold the logits that they have computed.
        return self._step.decide(batch, plan, copy.copy(wanted))

    def clear(self) -> None:
        """Drop all graphs, their memory, and their references to NCCL's communicators, which could not end
        before."""
        self._graphs.clear()
        self._holders.clear()
        self._wasted.clear()
        self._num_padded.clear()
        if self.captures:
            # A pool that no graph uses any more cannot be captured into again.
            self._memory = torch.cuda.graph_pool_handle()

    def run(self, shape: PassShape) -> None:
        """Run a pass of this shape without a sequence, so that its kernels are compiled."""
        self._step(self._batch(shape, self._no_sequences(shape)))

    def capture(self, shape: PassShape, *, frees_memory: bool = True) -> None:
        """Capture a shape's graph and store it. `frees_memory`, which takes time: it may have the memory that
        earlier passes have freed."""
        if len(self._graphs) >= MAX_CUDA_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._holders.clear()
        self._num_eager.pop(shape, None)
        self._num_padded.pop(shape, None)
        for each in [each for each in self._wasted if each.num_sequences == shape.num_sequences]:
            del self._wasted[each]
        self._graphs[shape] = self._capture(shape, frees_memory=frees_memory)

    def seconds(self, shape: PassShape) -> float:
        """Time of a pass of the shape without sequences, in its graph if it has one; waits for the device."""
        graph = self._graphs.get(shape)
        launch = partial(self.run, shape) if graph is None else graph.graph.replay
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launch()
        start.record()
        for _ in range(TIMED_PASSES):
            launch()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / TIMED_PASSES

    def capture_missed(self) -> bool:
        """Capture the shape that ran eagerly most often, or else the one that is padded most; False: there is
        none."""
        if self._num_eager:
            [(shape, _)] = self._num_eager.most_common(1)
        else:
            wasted = {each: num * self._padding(each) for each, num in self._num_padded.items()}
            if max(wasted.values(), default=0) < MISSED_PASSES:
                return False
            shape = max(wasted, key=lambda each: wasted[each])
        self.capture(shape)
        return True

    def _graph(self, shape: PassShape, schedule: Schedule) -> _Graph | None:
        """The graph that a pass of this shape runs in; None: it runs eagerly."""
        if shape not in self._holders:
            self._holders[shape] = self._holder(shape)
        holder = self._holders[shape]
        if holder is None and self.is_warm and not self._is_due(shape, schedule):
            return None
        if (
            self._has_blocks
            and holder is not None
            and self._decodes(schedule)
            and self._is_wasteful(shape, holder)
        ):
            holder = None
        if holder is None:
            holder = shape
            self.capture(shape)
            self.num_captured_in_traffic += 1
        graph = self._graphs[holder] = self._graphs.pop(holder)
        return graph

    def _holder(self, shape: PassShape) -> PassShape | None:
        """The captured shape with the fewest rows that such passes should run in."""
        if shape in self._graphs or not (self.is_warm or shape.limits.capacity is not None):
            return shape if shape in self._graphs else None
        maximum = math.inf if self._has_blocks else max(self.eager_rows, MAX_PADDING * shape.all_rows)
        fitting = [each for each in self._graphs if each.holds(shape) and each.all_rows <= maximum]
        if not self.is_warm:
            sampled = shape.filters, shape.changes, shape.num_top
            fitting = [each for each in fitting if (each.filters, each.changes, each.num_top) == sampled]

        def cost(each: PassShape) -> tuple[float, ...]:
            return each.changes, each.filters, each.weight, each.max_known

        return min(fitting, key=cost, default=None)

    def _is_wasteful(self, shape: PassShape, holder: PassShape) -> bool:
        """Whether padding of passes with blocks in larger graphs, this one counted, is worth a capture."""
        if holder == shape:
            return False
        size = shape.num_sequences
        self._wasted[shape] = self._wasted.get(shape, 0.0) + _padding(shape, holder)
        self._num_padded[shape] += 1
        wasted = sum(passes for each, passes in self._wasted.items() if each.num_sequences == size)
        if self.is_warm:
            return wasted > CAPTURE_PASSES
        num_graphs = sum(each.num_sequences == size for each in self._graphs)
        return wasted > min(CAPTURE_PASSES, PASSES_PER_GRAPH * num_graphs)

    def _padding(self, shape: PassShape) -> float:
        """What a pass of the shape would be padded by now, in passes; one that would be eager, by a pass."""
        holder = self._holder(shape)
        return 1.0 if holder is None else _padding(shape, holder)

    def _is_due(self, shape: PassShape, schedule: Schedule) -> bool:
        """Count an eager pass. Passes with prompts come in too many shapes, and large ones gain nothing."""
        if not self._decodes(schedule) or (not self._has_blocks and shape.all_rows > self.eager_rows):
            return False
        self._num_eager[shape] += 1
        return self._num_eager[shape] > MAX_EAGER_PASSES

    def _decodes(self, schedule: Schedule) -> bool:
        """Whether no sequence of the pass feeds a prompt."""
        return all(schedule.samples) and max(schedule.num_feed) <= self._step.decoder.kv_policy.block_size

    def _no_sequences(self, shape: PassShape) -> Tensor:
        """Columns of a pass of padding, int64 [3, B]."""
        columns_3B = torch.zeros(3, shape.num_sequences, dtype=torch.int64, device=self._device)
        columns_3B[0] = self._spare_lane
        return columns_3B

    def _columns(self, schedule: Schedule, num_sequences: int) -> Columns:
        """Lanes, numbers of tokens to feed and whether the pass decodes: three lists of length B."""
        padding = num_sequences - len(schedule.requests)
        lanes = schedule.members.lanes + [self._spare_lane] * padding
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
            changes=shape.changes,
            mode=shape.mode,
            num_top=shape.num_top,
            decides=shape.decides,
            payload=shape.payload,
        )

    def _capture(self, shape: PassShape, *, frees_memory: bool) -> _Graph:
        """Run the shape without a sequence, so that kernels are compiled, then capture it."""
        columns_3B = self._no_sequences(shape)
        here, side_stream = torch.cuda.current_stream(), self._side_stream
        assert side_stream is not None
        side_stream.wait_stream(here)
        with torch.cuda.stream(side_stream):
            self._step(self._batch(shape, columns_3B))
        here.wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        result = fed = None
        torch.cuda.synchronize()
        # `torch.cuda.graph` would do so each time. While it captures, torch frees nothing for an allocation.
        if frees_memory:
            torch.cuda.empty_cache()
        with _without_garbage_collection(), torch.cuda.stream(side_stream):
            graph.capture_begin(self._memory)
            try:
                if shape.decides:
                    result = self._step(self._batch(shape, columns_3B))
                else:
                    fed = self._step.feed(self._batch(shape, columns_3B))
            finally:
                graph.capture_end()
        return _Graph(graph=graph, columns_3B=columns_3B, result=result, fed=fed)


def _padding(shape: PassShape, holder: PassShape) -> float:
    """Padding of a pass in a larger graph that counts, in passes."""
    return max(0.0, holder.weight / shape.weight - 1 - FREE_PADDING)


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
    """`columns`: what was last written to `columns_3B`. It ends with a `result`, or with hidden states
    (`fed`)."""

    graph: torch.cuda.CUDAGraph
    columns_3B: Tensor
    result: StepResult | None
    fed: tuple[StepPlan, WantedRows] | None
    columns: Columns | None = None
