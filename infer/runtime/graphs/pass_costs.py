"""How long passes take, and how many prompt rows one of them stores."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from idlm.infer.runtime.graphs.pass_shape import PROMPT_GRAPHS, STREAMED_ROWS, PassShape

WEIGHT_ROWS = 184
"""Rows that are computed in the time of reading the weights, before it is measured (an H200, bfloat16)."""
MAX_SLOWDOWNS = {"latency": 2.5, "throughput": math.inf}
"""By schedule, how many times as long as a pass that only decodes one with prompts may take."""


Point = tuple[float, float]
"""A number of rows or sequences, and the time of a pass with so many."""


def interpolated(points: Sequence[Point], at: float) -> float:
    """Linear between the points, constant outside."""
    number = bisect_left(points, (at,))
    if number in (0, len(points)):
        return points[min(number, len(points) - 1)][1]
    (before, low), (after, high) = points[number - 1], points[number]
    return low + (at - before) / (after - before) * (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Times of passes, in rows of a large pass that are computed in that time.

    `by_rows`: ascending numbers of rows, and the time of a pass that has so many: linear between them, then a
    row each. `slot_rows`: to read a KV slot. `sequence_rows`: rows of a sequence that decodes. `graph_rows`:
    prompt rows to which a pass is padded, ascending; with more it is launched kernel by kernel, which takes
    `launch_rows`."""

    by_rows: tuple[Point, ...]
    slot_rows: float
    sequence_rows: int
    graph_rows: tuple[int, ...] = ()
    launch_rows: float = 0.0

    def time(self, num_sequences: int, num_slots: int, num_prompt_rows: int = 0) -> float:
        """The time of a pass over such sequences, which have so many slots in all."""
        index = bisect_left(self.graph_rows, num_prompt_rows)
        has_graph = not num_prompt_rows or index < len(self.graph_rows)
        if num_prompt_rows and has_graph:
            num_prompt_rows = self.graph_rows[index]
        num_rows = num_sequences * self.sequence_rows + num_prompt_rows
        last, longest = self.by_rows[-1]
        taken = longest + num_rows - last if num_rows > last else interpolated(self.by_rows, num_rows)
        taken += self.slot_rows * num_slots
        return taken if has_graph else max(taken, self.launch_rows)

    def measured(self, seconds: dict[int, float], launch_seconds: float) -> PassCosts:
        """The same with times by number of rows, and with what launching a pass takes. Nothing changes if no
        pass has more rows than are free while the weights are read: its time does not depend on rows."""
        points = sorted(seconds.items())
        if not points or points[-1][0] < 2 * STREAMED_ROWS:
            return self
        row_seconds = points[-1][1] / points[-1][0]
        times = itertools.accumulate((each / row_seconds for _, each in points), max)
        by_rows = tuple(zip((float(num_rows) for num_rows, _ in points), times, strict=True))
        return replace(self, by_rows=by_rows, launch_rows=launch_seconds / row_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Which passes of a decoder with several modes have graphs. `maximum`: sequences, by mode and prompt
    rows. A pass of `eager_rows` rows takes as long as launching it."""

    maximum: Mapping[tuple[int, int], int]
    eager_rows: int

    @classmethod
    def of(cls, shapes: Iterable[PassShape], missing: Collection[PassShape], eager_rows: int) -> Captured:
        """From the `shapes` that a warm-up wanted, and those that it did not capture. With prompts no
        number of sequences below the `maximum` is missing; without, they may run in a larger graph."""
        maximum, ended = dict[tuple[int, int], int](), set[tuple[int, int]]()
        for shape in sorted(shapes, key=lambda each: each.num_sequences):
            key = shape.mode, shape.num_prompt_rows
            if shape not in missing and key not in ended:
                maximum[key] = shape.num_sequences
            elif shape.num_prompt_rows:
                ended.add(key)
        return cls(maximum=maximum, eager_rows=eager_rows)

    def launches_fast(self, mode: int, num_sequences: int, num_rows: int, num_prompt_rows: int) -> bool:
        """Whether launching such a pass, of `num_rows` in all, takes no longer than it computes."""
        sizes = sorted(size for number, size in self.maximum if number == mode and size >= num_prompt_rows)
        maximum = self.maximum[mode, sizes[0]] if sizes and (num_prompt_rows or not sizes[0]) else 0
        return num_sequences <= maximum or num_rows >= self.eager_rows


def prompt_rows(
    costs: PassCosts,
    *,
    num_sequences: int,
    num_slots: int,
    num_waiting: int,
    maximum: int,
    max_slowdown: float = math.inf,
) -> int:
    """How many of `num_waiting` prompt rows, and of `maximum`, a pass stores with such sequences: of all that
    wait, the sizes of graphs and multiples of the largest, those with the most rows for the time of the pass,
    if that is at most `max_slowdown` times as long as decoding alone; the fewest if all take longer."""
    limit = max_slowdown * costs.time(num_sequences, num_slots)
    num_waiting = min(num_waiting, maximum)
    sizes = [*PROMPT_GRAPHS, *range(2 * PROMPT_GRAPHS[-1], num_waiting, PROMPT_GRAPHS[-1])]
    sizes = [*(size for size in sizes if size < num_waiting), num_waiting]
    times = {size: costs.time(num_sequences, num_slots, size) for size in sizes}
    fitting = [size for size in sizes if times[size] <= limit] or sizes[:1]
    return max(fitting, key=lambda size: size / times[size])
