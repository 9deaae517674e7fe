"""Chooses the draft layout of the next step: the mode with the most tokens per second at this batch size.

It uses measured acceptance and step times, never the values of drafts that are still to be tested; a sequence
may therefore change its mode at any step without changing its sampling distribution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from idlm.infer.decoders.base import StrideMode

PRIOR_ACCEPTANCE = 0.85
"""Assumed acceptance of a draft before measurements; it weighs as much as `PRIOR_WEIGHT` tests."""
PRIOR_WEIGHT = 16
MAX_REMEMBERED_DRAFTS = 4096
"""After this many tests of a draft position, the older ones are halved."""
NUM_KEPT_TIMES = 5
MAX_TIME_AGE = 24
"""Times of a mode are dropped after this many timed steps without it: under load a GPU slows down by 15 %
within a second (an H200 at 64 sequences).
"""
MIN_STEPS_BETWEEN_TRIALS = 32
EXPLORATION_BUDGET = 0.001
"""Fraction of the tokens that retrying slower modes may cost: slower modes are retried less."""
OOM_MEMORY_STEPS = 1000
"""Steps for which an out-of-memory error limits the rows of a step."""


@dataclass(slots=True)
class _Timing:
    """Times of one mode at one batch size.

    The first is dropped, because it includes compiling or capturing. The shortest of the others counts,
    because disturbances only make a step longer.
    """

    num_seen: int = 0
    last_chosen: int = 0
    last_timed: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_TIMES))

    def least(self) -> float:
        """The shortest of the kept times, in seconds."""
        return min(self.seconds)


class StrideController:
    """Compares modes by expected tokens, from measured acceptance, per measured or estimated second."""

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
        self._num_steps = self._num_timed = self._last_oom = self._last_rows = 0
        self._narrowest = min(range(len(widths)), key=widths.__getitem__)
        self._most_rows: float = math.inf

    def choose(self, num_sequences: int) -> int:
        """The mode, by number, for a step of so many sequences: the fastest, or one that is due for a retry.

        After an out-of-memory error, use the narrowest layout so that no request is dropped, and for
        `OOM_MEMORY_STEPS` only layouts with fewer rows than the step that failed.
        """
        self._num_steps += 1
        number = self._choice(num_sequences)
        timing = self._timings.get((_rounded(num_sequences), number))
        if timing is not None:
            timing.last_chosen = self._num_steps
        self._last_rows = num_sequences * self._widths[number]
        return number

    def _choice(self, num_sequences: int) -> int:
        since = self._num_steps - self._last_oom
        if self._last_oom and since == 1:
            return self._narrowest
        if since > OOM_MEMORY_STEPS:
            self._most_rows = math.inf
        fitting = [n for n, width in enumerate(self._widths) if num_sequences * width <= self._most_rows]
        size = _rounded(num_sequences)
        rates = {number: self.tokens(number) / self.seconds(number, size) for number in fitting}
        trial = self._trial(size, rates)
        return max(rates, key=rates.__getitem__, default=self._narrowest) if trial is None else trial

    def observe_out_of_memory(self) -> None:
        """Record that the step chosen last ran out of memory."""
        self._last_oom = self._num_steps
        self._most_rows = min(self._most_rows, self._last_rows - 1)

    def observe_time(self, mode: int, num_sequences: int, seconds: float) -> None:
        """Record the time of a step that only decoded."""
        timing = self._timings.setdefault((_rounded(num_sequences), mode), _Timing())
        self._num_timed += 1
        if self._num_timed - timing.last_timed > MAX_TIME_AGE:
            timing.seconds.clear()
        timing.num_seen += 1
        timing.last_timed = self._num_timed
        if timing.num_seen > 1:
            timing.seconds.append(seconds)

    def observe_drafts(self, num_accepted: int, num_tested: int) -> None:
        """Record drafts of one sequence: tested in order, the first `num_accepted` accepted."""
        for position in range(num_tested):
            if self._tested[position] >= MAX_REMEMBERED_DRAFTS:
                self._tested[position] /= 2
                self._accepted[position] /= 2
            self._tested[position] += 1
            self._accepted[position] += position < num_accepted

    def acceptance(self, position: int) -> float:
        """Acceptance probability of the draft at `position`, given that those before it were accepted."""
        return (self._accepted[position] + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (
            self._tested[position] + PRIOR_WEIGHT
        )

    def tokens(self, number: int) -> float:
        """Expected tokens per sequence and step in mode `number`, as the decoder computes them."""
        mode = self._modes[number]
        chances = [self.acceptance(position) for position in range(mode.stride - 1)]
        return self._tokens_per_forward(chances, mode)

    def seconds(self, number: int, size: int) -> float:
        """Time of a step: measured, or estimated from steps with similar numbers of rows."""
        timing = self._timings.get((size, number))
        if timing is not None and timing.seconds:
            return timing.least()
        return self._estimated(size * self._widths[number])

    def _estimated(self, num_rows: int) -> float:
        """Proportional to the next step with more rows (else fewer), and at least that of one with fewer.

        Like a roofline this is optimistic; a mode that looks best is then tried and timed.
        """
        known = sorted(
            (size * self._widths[number], timing.least())
            for (size, number), timing in self._timings.items()
            if timing.seconds
        )
        if not known:
            return 1.0
        fewer = [point for point in known if point[0] <= num_rows]
        more = [point for point in known if point[0] > num_rows]
        rows, seconds = more[0] if more else fewer[-1]
        return max(seconds * num_rows / rows, fewer[-1][1] if fewer else 0.0)

    def _trial(self, size: int, rates: Mapping[int, float]) -> int | None:
        """A mode without a usable time, or one whose times are old; None if there is none."""
        best = max(rates.values(), default=0.0)
        for number, rate in rates.items():
            timing = self._timings.get((size, number))
            if timing is None:
                continue
            since = self._num_steps - timing.last_chosen
            is_due = since > MIN_STEPS_BETWEEN_TRIALS and since * EXPLORATION_BUDGET * best > best - rate
            if not timing.seconds or is_due:
                return number
        return None


def _rounded(num_sequences: int) -> int:
    """Batch sizes are rounded up to powers of two."""
    return 1 << (num_sequences - 1).bit_length()
