"""What slow masks may cost. The budget is that of the server: eight answers whose masks are slow stall the
others as much as one whose masks are eight times as slow."""

from __future__ import annotations

import time
from collections.abc import Callable

SLOW_MASK, SLOW_MASKS, SLOW_SHARE = 0.003, 1.0, 0.02
"""Seconds of CPU time from which a mask is slow, what all slow masks may take at once, and the share of the
time that they may take in the long run."""
WORK_OF_MASK = 3.0
"""Of a pass, what a slow grammar costs for each second of its first mask, at least: the masks of drafts are
slower still, and so is taking a token."""
REFUSED_SECONDS = 60.0
"""How long a grammar that used the budget up is refused, and how long the budget counts as short then."""
OWN_SECONDS = 0.05
"""Slow masks that a grammar may have in that time although others have used the budget up."""
FAST_PASSES = 64
"""After so many passes without a slow mask a grammar is not on trial any more."""
TOO_SLOW = "it takes too long to find the tokens that may follow, because it is too ambiguous"


class Budget:
    """Seconds of slow masks that are left to all grammars."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._time, self._left = clock, clock(), SLOW_MASKS
        self._short_until = -float("inf")

    @property
    def is_short(self) -> bool:
        """Whether slow masks used it up a short time ago."""
        return self.clock() < self._short_until

    def take(self, seconds: float) -> bool:
        """Spend seconds; False if there were not so many."""
        now = self.clock()
        self._left = min(SLOW_MASKS, self._left + SLOW_SHARE * (now - self._time))
        self._time, is_left = now, self._left >= seconds
        self._left = max(0.0, self._left - seconds)
        if not is_left:
            self._short_until = now + REFUSED_SECONDS
        return is_left


class Cost:
    """Whether the masks of one grammar, in all answers that it has, used the budget up. `num_fast`: passes
    without a slow mask of it."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self._until = budget, -float("inf")
        self.num_fast, self._spent, self._since = 0, 0.0, budget.clock()

    @property
    def is_on_trial(self) -> bool:
        """Whether only one answer of such grammars may run at a time: the budget is short, and nothing says
        that this one is fast."""
        return self.budget.is_short and self.num_fast < FAST_PASSES

    @property
    def is_refused(self) -> bool:
        """Whether it used the budget up a short time ago."""
        return self.budget.clock() < self._until

    def refusal_ended(self) -> bool:
        """Whether a refusal, which may have been that of a first mask, is over: true once."""
        is_over = -float("inf") < self._until <= self.budget.clock()
        self._until = -float("inf") if is_over else self._until
        return is_over

    def charge(self, seconds: float) -> bool:
        """Note the CPU time of a mask. Returns whether it is slow."""
        if seconds <= SLOW_MASK:
            return False
        now, self.num_fast = self.budget.clock(), 0
        if now > self._since + REFUSED_SECONDS:
            self._spent, self._since = 0.0, now
        work = WORK_OF_MASK * seconds
        self._spent += work
        if not self.budget.take(work) and self._spent > OWN_SECONDS:
            self._until = now + REFUSED_SECONDS
        return True
