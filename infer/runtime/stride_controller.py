"""Which picture the next pass is decoded with: the one that has brought most tokens per second at this load.

The choice looks at committed tokens and at the time that passes took, never at drafts that are still to be
tested; a sequence may therefore go from picture to picture without any change of its law.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from idlm.infer.decoders.base import StrideMode

PRIOR_ACCEPTANCE = 0.85
"""Acceptance of a draft before anything was measured."""
MAX_REMEMBERED_DRAFTS = 4096
"""Tests per draft position after which older ones count half."""
NUM_KEPT_TIMES = 5
MAX_TIME_AGE = 24
"""Behind a longer pause, counted in passes that were timed, a picture's times say nothing any more: a GPU
that computes much gets slower by 15 % within a second (an H200 at 64 sequences), and its clock dips.
"""
MIN_STEPS_BETWEEN_TRIALS = 32
EXPLORATION_BUDGET = 0.001
"""Share of the tokens that trying a picture again may cost: the worse it looked, the longer that takes."""
OOM_MEMORY_STEPS = 1000
"""As long a shortage of memory is remembered."""


class Pace(Protocol):
    """Chooses pictures, told what became of earlier passes."""

    def choose(self, num_sequences: int) -> int:
        """The number of the picture for a pass of so many sequences."""
        ...

    def observe_time(self, mode: int, num_sequences: int, seconds: float) -> None:
        """A pass without prompt rows has taken so long."""
        ...

    def observe_drafts(self, num_accepted: int, num_tested: int) -> None:
        """Drafts of one sequence were tested in order, the first ones were accepted."""
        ...

    def observe_out_of_memory(self) -> None:
        """The pass chosen last ran out of memory."""
        ...


class FixedPace:
    """The only picture there is."""

    def choose(self, num_sequences: int) -> int:
        """Number 0."""
        return 0

    def observe_time(self, mode: int, num_sequences: int, seconds: float) -> None:
        """Nothing to learn."""

    def observe_drafts(self, num_accepted: int, num_tested: int) -> None:
        """Nothing to learn."""

    def observe_out_of_memory(self) -> None:
        """Nothing to choose."""


@dataclass(slots=True)
class _Timing:
    """Times of one picture at one batch size. The first is dropped: it has compiled or captured something. Of
    the others the least counts: what disturbs a pass only ever makes it longer.
    """

    num_seen: int = 0
    last_chosen: int = 0
    last_learned: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_TIMES))

    def least(self) -> float:
        """Of those that are kept."""
        return min(self.seconds)


class StrideController:
    """Expected tokens of a pass, by measured acceptance, over its measured or foreseen time."""

    def __init__(
        self,
        modes: tuple[StrideMode, ...],
        widths: tuple[int, ...],
        tokens_per_forward: Callable[[Sequence[float], StrideMode], float],
    ) -> None:
        self._modes, self._widths, self._tokens_per_forward = modes, widths, tokens_per_forward
        num_drafts = max(mode.stride for mode in modes) - 1
        self._tested, self._accepted = [0.0] * num_drafts, [0.0] * num_drafts
        self._timings: dict[tuple[int, int], _Timing] = {}
        self._num_passes = self._num_timed = self._last_shortage = self._last_rows = 0
        self._narrowest = min(range(len(widths)), key=widths.__getitem__)
        self._most_rows: float = math.inf

    def choose(self, num_sequences: int) -> int:
        """The best by what is known; now and then one that was not timed for long.

        Right behind a shortage it is the narrowest, so that nobody is given up for the sake of speed, and for
        a while one of fewer rows than what was short of memory.
        """
        self._num_passes += 1
        number = self._choice(num_sequences)
        timing = self._timings.get((_rounded(num_sequences), number))
        if timing is not None:
            timing.last_chosen = self._num_passes
        self._last_rows = num_sequences * self._widths[number]
        return number

    def _choice(self, num_sequences: int) -> int:
        since = self._num_passes - self._last_shortage
        if self._last_shortage and since == 1:
            return self._narrowest
        if since > OOM_MEMORY_STEPS:
            self._most_rows = math.inf
        fitting = [n for n, width in enumerate(self._widths) if num_sequences * width <= self._most_rows]
        size = _rounded(num_sequences)
        rates = {number: self.tokens(number) / self.seconds(number, size) for number in fitting}
        trial = self._trial(size, rates)
        return max(rates, key=rates.__getitem__, default=self._narrowest) if trial is None else trial

    def observe_out_of_memory(self) -> None:
        """Remember the rows of the pass and when it was."""
        self._last_shortage = self._num_passes
        self._most_rows = min(self._most_rows, self._last_rows - 1)

    def observe_time(self, mode: int, num_sequences: int, seconds: float) -> None:
        """Keep the newest few times of the picture at this load."""
        timing = self._timings.setdefault((_rounded(num_sequences), mode), _Timing())
        self._num_timed += 1
        if self._num_timed - timing.last_learned > MAX_TIME_AGE:
            timing.seconds.clear()
        timing.num_seen += 1
        timing.last_learned = self._num_timed
        if timing.num_seen > 1:
            timing.seconds.append(seconds)

    def observe_drafts(self, num_accepted: int, num_tested: int) -> None:
        """Count by position."""
        for position in range(num_tested):
            if self._tested[position] >= MAX_REMEMBERED_DRAFTS:
                self._tested[position] /= 2
                self._accepted[position] /= 2
            self._tested[position] += 1
            self._accepted[position] += position < num_accepted

    def acceptance(self, position: int) -> float:
        """Of a draft whose predecessors were accepted; the first guess weighs as much as 16 tests."""
        return (self._accepted[position] + 16 * PRIOR_ACCEPTANCE) / (self._tested[position] + 16)

    def tokens(self, number: int) -> float:
        """Expected tokens per sequence of a pass in mode `number`, as the decoder computes them."""
        mode = self._modes[number]
        chances = [self.acceptance(position) for position in range(mode.stride - 1)]
        return self._tokens_per_forward(chances, mode)

    def seconds(self, number: int, size: int) -> float:
        """Time of a pass: measured, else foreseen from passes with about as many rows."""
        timing = self._timings.get((size, number))
        if timing is not None and timing.seconds:
            return timing.least()
        return self._foreseen(size * self._widths[number])

    def _foreseen(self, num_rows: int) -> float:
        """In proportion to the nearest pass with more rows (else fewer), but no less than one with fewer.

        A roofline, hence rather too hopeful than too bad: what looks best is then tried and timed.
        """
        known = sorted(
            (size * self._widths[number], timing.least())
            for (size, number), timing in self._timings.items()
            if timing.seconds
        )
        if not known:
            return 1.0
        below = [point for point in known if point[0] <= num_rows]
        above = [point for point in known if point[0] > num_rows]
        rows, seconds = above[0] if above else below[-1]
        return max(seconds * num_rows / rows, below[-1][1] if below else 0.0)

    def _trial(self, size: int, rates: Mapping[int, float]) -> int | None:
        """A picture that has only the one time that does not count, or whose times are old."""
        best = max(rates.values(), default=0.0)
        for number, rate in rates.items():
            timing = self._timings.get((size, number))
            if timing is None:
                continue
            since = self._num_passes - timing.last_chosen
            is_due = since > MIN_STEPS_BETWEEN_TRIALS and since * EXPLORATION_BUDGET * best > best - rate
            if not timing.seconds or is_due:
                return number
        return None


def _rounded(num_sequences: int) -> int:
    """Loads that are told apart: powers of two."""
    return 1 << (num_sequences - 1).bit_length()
